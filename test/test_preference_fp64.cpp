// Preference training in double: losses, rewards and every gradient compared with PyTorch (test/golden/dpo.safetensors,
// from dev/ref/dpo_golden.py), every gradient compared with finite differences, and a model with adapters, whose reference
// is the base model.
#include <gtest/gtest.h>

#include <random>

#include "trainer.h"
#include "finite_differences.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace test_preference_fp64 {
namespace {

// ---- against PyTorch -------------------------------------------------------------------------------------------------------
const std::string golden_dir = (std::filesystem::path(__FILE__).parent_path() / "golden").string();

template <class E>
std::vector<E> read(const SafetensorsReader& file, const std::string& name) {
    const TensorView* t = file.find(name);
    if (!t) fail("%s is missing", name.c_str());
    std::vector<E> x(t->elements());
    file.read_as(*t, x.data());
    return x;
}

// The pairs of the golden file as prepared data.
void write_pairs(const SafetensorsReader& golden, const std::string& prefix, int V) {
    const std::vector<int> tokens = read<int>(golden, "tokens"), prompt = read<int>(golden, "prompt");
    const size_t longest = tokens.size() / (2 * prompt.size());
    TokenDatasetWriter writer(prefix, {"hash", "tokenizer", V}, {}, "plain", true);
    for (size_t answer = 0; answer < 2 * prompt.size(); answer++) {
        std::vector<uint8_t> learned;
        for (size_t i = 0; i < longest && tokens[answer * longest + i] >= 0; i++)
            learned.push_back((int)i >= prompt[answer / 2]);
        writer.add(tokens.data() + answer * longest, learned.size(), learned.data());
        writer.end_document();
    }
    writer.commit();
}

struct Case {
    const char *name, *family;
    Preference preference;
};

// One global batch of all pairs, in micro-batches of B samples, each with one or two pairs; `rows` of logits at a time.
void compare_with_golden(const Case& k, int B, int rows) {
    const SafetensorsReader golden = SafetensorsReader::open(golden_dir + "/dpo.safetensors");
    const std::string model = golden_dir + "/" + k.family + "_tiny", name = k.name;
    const test::TemporaryDirectory dir;
    ModelConfig c = read_config(model);
    check_config(c);
    pad_vocabulary(c, 16);
    write_pairs(golden, dir / "pairs", c.V);
    DataOptions d;
    d.blend.paths = {dir / "pairs"};
    d.T = c.T;
    d.part = DataSplit::whole;
    d.pairs = true;
    DataLoader data(d);
    ASSERT_EQ(data.n_pairs(), 5);
    ASSERT_EQ(data.terms(0, data.n_samples()), 5);
    ASSERT_EQ(data.n_samples() % B, 0) << data.n_samples();
    data.set_reference(read<double>(golden, name + ".reference"));

    be::Ctx ctx(1);
    Model m(c);
    m.preference = k.preference;
    plan_memory(m, Recompute::none, B, c.T, rows);
    allocate(ctx, m);
    load_parameters(ctx, m, model);
    const std::vector<double> rewards = read<double>(golden, name + ".rewards");
    const auto check_sums = [&](const char* what) {
        const LossSums sums = read_sums(ctx, m);
        ASSERT_EQ(sums.pair_sums.n, 5);
        EXPECT_NEAR(sums.loss(), read<double>(golden, name + ".loss")[0], 1e-12) << name << " " << what;
        double chosen = 0, rejected = 0;
        int64_t right = 0;
        for (size_t i = 0; i < rewards.size(); i += 2) {
            chosen += rewards[i];
            rejected += rewards[i + 1];
            right += rewards[i] > rewards[i + 1];
        }
        EXPECT_NEAR(sums.pair_sums.chosen, chosen, 1e-12);
        EXPECT_NEAR(sums.pair_sums.rejected, rejected, 1e-12);
        EXPECT_EQ(sums.pair_sums.right, right);
    };
    size_t compared = 0;
    const auto losses = evaluate(
        ctx, m, data, 0, data.n_samples(), [] { return false; },
        [&](const std::vector<AnswerPair>& pairs) {
            for (const AnswerPair& pair : pairs) {
                const double* expected = rewards.data() + 2 * pair.number;
                EXPECT_NEAR(k.preference.beta * pair.chosen.ratio(), expected[0], 1e-12) << name << " pair " << pair.number;
                EXPECT_NEAR(k.preference.beta * pair.rejected.ratio(), expected[1], 1e-12) << name << " pair " << pair.number;
                compared++;
            }
        });
    EXPECT_EQ(compared, 5u);
    check_sums("without gradients");

    begin_gradients(ctx, m);
    clear_sums(ctx, m);
    Batch batch;
    for (int64_t first = 0; first < data.n_samples(); first += B) {
        data.fetch(first, B, batch);
        const Pass pass = upload(ctx, m, batch, m.a.micro_batch());
        pass.in.gradients = first ? Acc::Add : Acc::Set;
        model_forward(pass);
        head(pass, 1.0 / 5, 0, true);
        model_backward(pass, [](int) {});
    }
    check_sums("with gradients");
    if (!golden.find(name + ".grad." + m.table.rows[0].hf[0].name)) return;
    real* const grads = (real*)m.grads.data;
    for (const TensorSpec& spec : m.table.rows)
        for (const HfTensor& t : spec.hf) {
            const std::vector<double> expected = read<double>(golden, name + ".grad." + t.name);
            std::vector<real> ours((size_t)t.rows * spec.cols);
            convert_layout(spec, t, grads + spec.offset, ours.data(), true);
            double largest = 0;
            for (const double x : expected) largest = std::max(largest, std::abs(x));
            EXPECT_GT(largest, 0);
            test::expect_close(ours, expected, 1e-9 * largest, 0x1p-24, name + " " + t.name);  // they are stored in fp32
        }
}

TEST(Preference, LossRewardsAndEveryGradientAreThoseOfPyTorch) {
    for (const Case& k : {Case{"llama", "llama", {0.5, 0, false}},
                          {"llama.smoothed", "llama", {0.3, 0.2, false}},
                          {"gpt2.ipo", "gpt2", {0.4, 0, true}}})
        for (const int rows : {3, 1024}) {  // in parts, and all at once
            compare_with_golden(k, 1, rows);
            compare_with_golden(k, 2, rows);
        }
}

// ---- against finite differences ------------------------------------------------------------------------------------------
struct Fixture {
    be::Ctx ctx{2};
    Model m;
    Batch batch;
    Fixture(const char* family, const Preference& preference, int head_rows, int lora_rank,
            Recompute recompute = Recompute::none)
        : m(config(family, lora_rank)) {
        std::mt19937 rng(7);
        m.preference = preference;
        batch.B = 2;
        batch.T = 12;
        for (int b = 0; b < batch.B; b++)
            for (int t = 0; t < batch.T; t++) {
                const int start = t < 5 ? 0 : t < 9 ? 5 : 9;  // chosen, rejected, padding
                const bool learned = b == 0 ? t % 5 > 1 && t < 9 : t > 2 && t != 5 && t < 9;
                batch.tokens.push_back((int)(rng() % m.c.V));
                batch.targets.push_back(learned ? (int)(rng() % m.c.V) : -1);
                batch.positions.push_back(t - start);
                batch.doc_start.push_back(start);
            }
        for (int b = 0; b < 2; b++) {
            const auto answer = [&](int first, int rows, double reference) {
                const auto begin = batch.targets.begin() + 12 * b + first;
                return Answer{12 * b + first, rows, (int)std::count_if(begin, begin + rows, [](int t) { return t >= 0; }),
                              reference, 0};
            };
            batch.pairs.push_back({b, answer(0, 5, -9 - b), answer(5, 4, -10)});
        }
        plan_memory(m, recompute, batch.B, batch.T, head_rows);
        allocate(ctx, m);
        initialize(ctx, m, 42);
        if (m.frozen)  // B starts at zero, where A has no gradient
            for (size_t i = 0; i < m.table.size; i++) m.params[i] += 0.3 * ((rng() % 1000) / 500.0 - 1);
    }
    static ModelConfig config(const char* family, int lora_rank) {
        ModelConfig c;
        set_family(c, family);
        c.L = 2;
        c.C = 24;
        c.NH = 6;
        c.NKV = std::string(family) == "llama" ? 3 : 6;
        c.F = std::string(family) == "bloom" ? 4 * c.C : 20;
        c.T = 12;
        c.V = 29;
        c.init_std = 0.2;
        check_config(c);
        pad_vocabulary(c, 16);
        if (!lora_rank) return c;
        c.lora.rank = lora_rank;
        c.lora.alpha = 5;
        c.lora.modules = lora_modules(c, {"all"});
        return c;
    }
    Pass upload_all() { return upload(ctx, m, batch, m.a.micro_batch()); }
    double loss() {
        const Pass pass = upload_all();
        clear_sums(ctx, m);
        model_forward(pass);
        head(pass, 0, 0, false);
        return read_sums(ctx, m).loss();
    }
    std::vector<real> gradients() {
        const Pass pass = upload_all();
        pass.in.gradients = Acc::Set;
        begin_gradients(ctx, m);
        model_forward(pass);
        head(pass, 1.0 / 2, 0, true);
        model_backward(pass, [](int) {});
        return std::vector<real>((real*)m.grads.data, (real*)m.grads.data + m.table.size);
    }
};

struct Variant {
    const char* family;
    Preference preference;
    int head_rows, lora_rank;
};

TEST(Preference, GradientsEqualFiniteDifferences) {
    for (const Variant& k : {Variant{"llama", {0.5, 0, false}, 7, 0},
                             {"llama", {0.7, 0.2, false}, 24, 0},
                             {"gpt2", {0.3, 0, true}, 5, 0},
                             {"bloom", {2, 0, false}, 24, 0},
                             {"llama", {0.5, 0, false}, 7, 3},
                             {"gpt2", {0.4, 0, true}, 24, 2}}) {
        Fixture f(k.family, k.preference, k.head_rows, k.lora_rank);
        const std::vector<real> grads = f.gradients();
        test::expect_finite_differences(f.m.table, f.m.params, grads.data(), 6, k.family, [&] { return f.loss(); });
    }
}

TEST(Preference, PartsOfTheLogitsAndRecomputationKeepTheBits) {
    const Preference preference{0.5, 0, false};
    const std::vector<real> once = Fixture("llama", preference, 24, 0).gradients();
    for (const Recompute recompute : {Recompute::selective, Recompute::mlp, Recompute::full}) {
        const std::vector<real> again = Fixture("llama", preference, 24, 0, recompute).gradients();
        EXPECT_EQ(memcmp(once.data(), again.data(), once.size() * sizeof(real)), 0) << (int)recompute;
    }
    const std::vector<real> parts = Fixture("llama", preference, 5, 0).gradients();
    test::expect_close(parts, std::vector<double>(once.begin(), once.end()), 1e-15, 1e-12, "in parts");
}

// If the reference is the model itself, all margins are 0.
TEST(Preference, BeginsWithTheLossOfNoPreference) {
    Fixture f("llama", {0.5, 0, false}, 7, 0);
    f.loss();
    for (size_t i = 0; i < 2; i++) {
        const AnswerPair& scored = f.m.a.micro_batch().pairs[i];
        f.batch.pairs[i].chosen.reference = scored.chosen.log_p;
        f.batch.pairs[i].rejected.reference = scored.rejected.log_p;
    }
    EXPECT_NEAR(f.loss(), std::log(2), 1e-15);
    EXPECT_EQ(read_sums(f.ctx, f.m).pair_sums.right, 0);
}

// Far from 0 neither overflows, and the loss grows linearly with the margin.
TEST(Preference, LossIsFiniteForAllMargins) {
    const Preference p{1, 0, false};
    EXPECT_NEAR(p.of(-1e4).loss, 1e4, 1e-9);
    EXPECT_NEAR(p.of(-1e4).derivative, -1, 1e-12);
    EXPECT_NEAR(p.of(1e4).loss, 0, 1e-12);
    EXPECT_NEAR(p.of(1e4).derivative, 0, 1e-12);
    EXPECT_NEAR(p.of(0).loss, std::log(2), 1e-15);
    EXPECT_NEAR(p.of(0).derivative, -0.5, 1e-15);
}

}  // namespace
}  // namespace test_preference_fp64
