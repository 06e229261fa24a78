// The whole model, in double: every parameter's gradient against finite differences of the loss, for each family, with grouped
// queries, document masks, masked targets, z-loss, padded vocabulary; recomputation gives the same bits.
#include <gtest/gtest.h>

#include <random>

#include "trainer.h"
#include "model_files.h"

namespace test_model_fp64 {

ModelConfig tiny(const std::string& family) {
    ModelConfig c;
    set_family(c, family == "llama-tied" ? "llama" : family);
    if (family == "llama-tied") c.tied = true;
    c.L = 2;
    c.C = 24;
    c.NH = 6;
    c.NKV = c.family == "llama" ? 3 : 6;
    c.F = 20;
    c.T = 11;
    c.V = 29;
    c.init_std = 0.2;
    if (c.family == "bloom") c.F = 4 * c.C;
    check_config(c);
    pad_vocabulary(c, 16);
    return c;
}

Batch random_batch(const ModelConfig& c, int B, int T, bool documents) {
    std::mt19937 rng(7);
    Batch b;
    b.B = B;
    b.T = T;
    for (int i = 0; i < B * T; i++) {
        b.tokens.push_back((int)(rng() % c.V));
        b.targets.push_back(i % 5 == 3 ? -1 : (int)(rng() % c.V));
        const int t = i % T, start = documents && t >= 4 ? 4 : 0;
        b.positions.push_back(t - start);
        if (documents) b.doc_start.push_back(start);
    }
    return b;
}

struct Fixture {
    be::Ctx ctx{2};
    Model m;
    Batch batch;
    Fixture(const ModelConfig& c, Recompute recompute, bool documents, int head_rows = 7, bool bf16_gradients = false)
        : m(c), batch(random_batch(c, 2, c.T - 1, documents)) {
        m.grads.is_bf16 = bf16_gradients;
        plan_memory(m, recompute, 2, c.T - 1, head_rows, true);
        allocate(ctx, m);
        initialize(ctx, m, 42);
        // Gains away from 1 and biases away from 0, or their gradients' errors could hide.
        std::mt19937 rng(3);
        for (const TensorSpec& t : m.table.rows)
            if (t.vector())
                for (size_t i = 0; i < t.size(); i++) m.params[t.offset + i] += 0.3 * ((rng() % 1000) / 500.0 - 1);
        upload(ctx, m, batch, m.a.micro_batch());
    }
    Pass pass() { return {ctx, m, m.a.micro_batch()}; }
    real* grads() { return (real*)m.grads.data; }
    double scale() const { return 1.0 / 16; }
    double loss() {
        clear_sums(ctx, m);
        model_forward(pass());
        head(pass(), 0, 1e-2, false);
        const LossSums sums = read_sums(ctx, m);
        return (sums.ce + sums.z) * scale();
    }
    void gradients() {
        be::clear(ctx, grads(), m.table.size * sizeof(real));
        model_forward(pass());
        head(pass(), scale(), 1e-2, true);
        model_backward(pass(), [](int) {});
    }
};

class Family : public testing::TestWithParam<const char*> {};

TEST_P(Family, GradientOfEveryTensorEqualsFiniteDifferences) {
    for (bool documents : {false, true}) {
        Fixture f(tiny(GetParam()), Recompute::none, documents);
        f.gradients();
        std::mt19937 rng(11);
        for (const TensorSpec& t : f.m.table.rows) {
            double largest = 0;
            for (size_t i = 0; i < t.size(); i++) largest = std::max(largest, std::abs((double)f.grads()[t.offset + i]));
            EXPECT_GT(largest, 0) << t.name << " gets no gradient";
            const size_t live = t.hf.size() == 1 ? (size_t)t.hf[0].rows * t.cols : t.size();
            for (size_t k = 0; k < std::min<size_t>(live, 12); k++) {
                const size_t i = t.offset + (live <= 12 ? k : rng() % live);
                const double kept = f.m.params[i], h = 1e-5;
                f.m.params[i] = kept + h;
                const double up = f.loss();
                f.m.params[i] = kept - h;
                const double down = f.loss();
                f.m.params[i] = kept;
                // Central differences: truncation ~ h^2, rounding ~ 1e-16 / h = 1e-11.
                const double numeric = (up - down) / (2 * h), error = std::abs(numeric - f.grads()[i]);
                EXPECT_TRUE(error <= 1e-9 + 1e-6 * std::abs(numeric))
                    << t.name << "[" << i - t.offset << "]: " << f.grads()[i] << " but differences give " << numeric;
            }
        }
    }
}

TEST_P(Family, RecomputationAndHeadChunksKeepTheBits) {
    Fixture none(tiny(GetParam()), Recompute::none, true);
    none.gradients();
    for (Recompute recompute : {Recompute::selective, Recompute::full}) {
        Fixture other(tiny(GetParam()), recompute, true);
        other.gradients();
        EXPECT_EQ(memcmp(none.grads(), other.grads(), none.m.table.size * sizeof(real)), 0) << (int)recompute;
        EXPECT_LT(other.m.arena.bytes(), none.m.arena.bytes());
    }
}

TEST_P(Family, TheFirstMicroBatchSetsWhatOthersAddTo) {
    Fixture added(tiny(GetParam()), Recompute::none, true), set(tiny(GetParam()), Recompute::none, true);
    const auto run = [](Fixture& f, Acc acc) {
        f.pass().in.gradients = acc;
        model_forward(f.pass());
        head(f.pass(), f.scale(), 1e-2, true);
        model_backward(f.pass(), [](int) {});
    };
    be::clear(added.ctx, added.grads(), added.m.table.size * sizeof(real));
    run(added, Acc::Add);
    run(added, Acc::Add);
    for (const TensorSpec& t : set.m.table.rows) std::fill_n(set.grads() + t.offset, t.size(), real(NAN));
    begin_gradients(set.ctx, set.m);
    run(set, Acc::Set);
    run(set, Acc::Add);
    for (const TensorSpec& t : added.m.table.rows)
        for (size_t i = t.offset; i < t.offset + t.size(); i++) ASSERT_EQ(added.grads()[i], set.grads()[i]) << t.name;
}

// A micro-batch's contribution to the gradients, and two of them.
TEST_P(Family, Bf16GradientsAreRoundedOncePerMicroBatch) {
    Fixture exact(tiny(GetParam()), Recompute::none, true), f(tiny(GetParam()), Recompute::full, true, 7, true);
    exact.gradients();
    bf16* stored = (bf16*)f.m.grads.data;
    for (const TensorSpec& t : f.m.table.rows) std::fill_n(stored + t.offset, t.size(), bf16(NAN));
    int nearest = 0, other = 0;
    for (const int micro_batches : {1, 2}) {
        f.pass().in.gradients = micro_batches == 1 ? Acc::Set : Acc::Add;
        f.pass().in.rounding_key = 77 + 2 * micro_batches;
        begin_gradients(f.ctx, f.m);
        model_forward(f.pass());
        head(f.pass(), f.scale(), 1e-2, true);
        model_backward(f.pass(), [](int) {});
        for (const TensorSpec& t : f.m.table.rows) {
            const bool of_both = f.m.c.tied && t.name == "wte";  // whose summands are rounded one by one
            double largest = 0;
            for (size_t i = t.offset; i < t.offset + t.size(); i++) largest = std::max(largest, std::abs(exact.grads()[i]));
            for (size_t i = t.offset; i < t.offset + t.size(); i++) {
                const double once = exact.grads()[i];
                if (micro_batches == 1 && !of_both) {
                    ASSERT_EQ(stored[i].bits, bf16((float)once).bits) << t.name;
                    continue;
                }
                // A rounding is off by less than a unit in the last place, 2^-7 of its result.
                const double allowed = of_both ? 4 * micro_batches * 0x1p-7 * largest : 3 * 0x1p-7 * std::abs(once);
                ASSERT_NEAR((float)stored[i], micro_batches * once, allowed + 1e-30) << t.name;
                if (of_both || once == 0) continue;
                (stored[i].bits == bf16((float)((double)(float)bf16((float)once) + once)).bits ? nearest : other)++;
            }
        }
    }
    EXPECT_GT(std::min(nearest, other), 100) << "the second is rounded stochastically";
    for (const TensorSpec& t : f.m.table.rows)  // what lies between tensors stays zero
        for (size_t i = t.offset + t.size(); i % 64 != 0; i++) EXPECT_EQ(stored[i].bits, 0) << t.name;
}

TEST_P(Family, PaddedVocabularyTakesNoPart) {
    Fixture f(tiny(GetParam()), Recompute::none, false);
    f.gradients();
    for (const TensorSpec& t : f.m.table.rows) {
        if (t.hf.size() != 1 || t.hf[0].rows == t.rows) continue;
        for (size_t i = (size_t)t.hf[0].rows * t.cols; i < t.size(); i++) {
            EXPECT_EQ(f.m.params[t.offset + i], 0) << t.name;
            EXPECT_EQ(f.grads()[t.offset + i], 0) << t.name;
        }
    }
}

TEST_P(Family, LaterTokensDoNotChangeEarlierLosses) {
    Fixture f(tiny(GetParam()), Recompute::none, false);
    f.loss();
    const std::vector<real> before(f.m.a.loss, f.m.a.loss + f.batch.T - 1);
    f.batch.tokens[f.batch.T - 1] = (f.batch.tokens[f.batch.T - 1] + 1) % f.m.c.V;
    f.loss();
    for (int t = 0; t < f.batch.T - 1; t++) EXPECT_EQ(before[t], f.m.a.loss[t]) << t;
}

TEST_P(Family, GenerationWithACacheEqualsTheFullForward) {
    Fixture f(tiny(GetParam()), Recompute::inference, false, 100);
    const int T = f.batch.T, V = f.m.c.V;
    std::vector<int> tokens(f.batch.tokens.begin(), f.batch.tokens.begin() + T);
    Generator generator(f.ctx, f.m);
    for (int prompt : {1, 4, T}) {
        generator.prompt({tokens.begin(), tokens.begin() + prompt});
        for (int t = prompt; t < T; t++) generator.append(tokens[t]);
        const std::vector<float> cached = generator.logits();
        upload(f.ctx, f.m, f.batch, f.m.a.micro_batch());  // the generator's tokens took their place
        model_forward(f.pass());
        head(f.pass(), 0, 0, false);
        const floatX* full = f.m.a.logits + (size_t)(T - 1) * f.m.c.Vp;
        for (int i = 0; i < V; i++)
            EXPECT_NEAR(cached[i], full[i], 1e-5 * (1 + std::abs(full[i]))) << "token " << i << " after a prompt of " << prompt;
    }
}

INSTANTIATE_TEST_SUITE_P(Model, Family, testing::Values("gpt2", "bloom", "llama", "llama-tied"));

TEST(Model, PublishedParameterCounts) {
    const std::pair<const char*, size_t> counts[] = {
        {"bloom-560m", 559214592}, {"bloom-1b1", 1065314304},  {"bloom-1b7", 1722408960},
        {"bloom-3b", 3002557440},  {"bloom-7b1", 7069016064},  {"bloom-176b", 176247271424},
        {"gpt2-124m", 124439808},  {"gpt2-1558m", 1557611200}, {"llama2-7b", 6738415616}};
    for (const auto& [name, count] : counts) {
        ModelConfig c = config_from_preset(name);
        pad_vocabulary(c, 128);
        EXPECT_EQ(ParameterTable(c).trained, count) << name;
    }
    ModelConfig llm_jp = config_from_preset("llm-jp-172b");
    llm_jp.V = 99584;  // the published count includes Megatron's padded rows
    pad_vocabulary(llm_jp, 128);
    EXPECT_EQ(ParameterTable(llm_jp).trained, 172394557440u);
}

TEST(Model, EveryPresetIsValid) {
    for (const Preset& preset : presets()) {
        ModelConfig c = config_from_preset(preset.name);
        if (!c.V) c.V = 4096;
        EXPECT_NO_THROW(check_config(c)) << preset.name;
        const ModelConfig again = from_hf_config(to_hf_config(c, "bfloat16"), "round trip");
        EXPECT_EQ(again.L, c.L);
        EXPECT_EQ(again.F, c.F) << preset.name;
        EXPECT_EQ(again.NKV, c.NKV) << preset.name;
        EXPECT_EQ(again.T, c.T) << preset.name;
        EXPECT_EQ(again.tied, c.tied) << preset.name;
    }
}

TEST(Model, FileLayoutsRoundTrip) {
    for (const char* family : {"gpt2", "bloom", "llama"}) {
        Fixture f(tiny(family), Recompute::inference, false);
        for (const TensorSpec& spec : f.m.table.rows)
            for (const HfTensor& t : spec.hf) {
                std::vector<double> ours(f.m.params + spec.offset, f.m.params + spec.offset + spec.size()),
                    file((size_t)t.rows * spec.cols), back = ours;
                convert_layout(spec, t, ours.data(), file.data(), true);
                for (int r = 0; r < t.rows; r++)
                    for (int col = 0; col < spec.cols; col++) back[(size_t)(t.row + r) * spec.cols + col] = NAN;
                convert_layout(spec, t, back.data(), file.data(), false);
                EXPECT_EQ(ours, back) << t.name;
            }
    }
}

}  // namespace test_model_fp64
