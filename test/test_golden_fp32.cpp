// The trainer compared with PyTorch: test/golden/FAMILY_tiny is a small model of each family as saved by transformers, with
// the logits, losses, gradients (by autograd) and 20 training steps that dev/ref/model_reference.py computed in float64.
// Everything uses the path of a real run: options are parsed from train.toml, the model is read from the directory, batches
// come from a DataLoader, and steps are train_step's.
//
// Tolerance. noise.KEY is PyTorch's largest error in KEY when computing in float32. One unit is that plus one rounding of
// KEY's largest element, since the golden values are stored as float32; the allowed error is `factor` units. The factor
// exists because our sums have another order than PyTorch's and the error of one run is only a sample; 8 units are 2e-6 to
// 1e-5 of a tensor's largest element, and the largest error seen is 2.3 units.
#include <set>
#include <tuple>

#include "trainer.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace test_golden_fp32 {

constexpr double factor = 8;

// One fixture's golden tensors, and comparisons with them.
class Golden {
public:
    explicit Golden(const std::string& directory) : file_(SafetensorsReader::open(directory + "/golden.safetensors")) {}

    const TensorView& tensor(const std::string& key) const {
        const TensorView* t = file_.find(key);
        if (!t) fail("the fixture has no '%s'", key.c_str());
        return *t;
    }
    std::vector<double> values(const std::string& key) const {
        std::vector<double> x(tensor(key).elements());
        file_.read_as(tensor(key), x.data());
        return x;
    }
    std::vector<int> integers(const std::string& key) const {
        std::vector<int> x(tensor(key).elements());
        file_.read_as(tensor(key), x.data());
        return x;
    }
    int64_t dimension(const std::string& key, int i) const { return tensor(key).shape.at(i); }

    template <class Buffer>
    void expect(const std::string& key, const Buffer& actual) {
        const std::vector<double> expected = values(key);
        double largest = 0, difference = 0;
        for (double x : expected) largest = std::max(largest, std::abs(x));
        const double unit = values("noise." + key)[0] + test::roundoff<float> * largest;
        test::expect_close(actual, expected, factor * unit, 0, key);
        for (size_t i = 0; i < std::min(actual.size(), expected.size()); i++)
            difference = std::max(difference, std::abs(actual[i] - expected[i]));
        worst_ = std::max(worst_, difference / unit);
        compared_.insert(key);
    }
    // Every tensor of the model, as in files: parameters or gradients.
    void expect_all(be::Ctx& ctx, const std::string& prefix, const ParameterTable& table, real* memory) {
        HostSide<real> host(ctx, memory, table.size);
        host.download();
        real* buffer = host.data();
        for (const TensorSpec& spec : table.rows)
            for (const HfTensor& t : spec.hf) {
                std::vector<real> file((size_t)t.rows * spec.cols);
                convert_layout(spec, t, buffer + spec.offset, file.data(), true);
                expect(prefix + t.name, file);
            }
    }
    // All of the file was compared, as a skipped tensor could be a parameter that we lack.
    void expect_compared(const std::vector<std::string>& prefixes) const {
        for (const auto& [key, unused] : file_.tensors())
            for (const std::string& prefix : prefixes) {
                const bool concerned = key.compare(0, prefix.size(), prefix) == 0;
                EXPECT_TRUE(!concerned || compared_.count(key)) << key << " was not compared";
            }
    }
    double worst() const { return worst_; }  // in units of the tolerance before `factor`

private:
    SafetensorsReader file_;
    double worst_ = 0;
    std::set<std::string> compared_;
};

std::string fixture(const std::string& family) {
    return (std::filesystem::path(__FILE__).parent_path() / "golden" / (family + "_tiny")).string();
}

// Options as from the command line. Each golden sample becomes a dataset of its own, twice its T tokens, so that each
// sample of T+1 tokens at a multiple of T is the same. Blended with equal weights (powers of two, so that rounding has no
// effect) the datasets take turns, and the loader returns sample 0, 1, ..., S-1, 0, ... despite its shuffling.
TrainOptions options_of(const std::string& directory, const Golden& golden, const ModelConfig& c,
                        const test::TemporaryDirectory& data) {
    TrainOptions o;
    cli::parse("train", o, {"--config", directory + "/train.toml"});
    const std::vector<int> tokens = golden.integers("tokens");
    const int64_t S = golden.dimension("tokens", 0), T = golden.dimension("tokens", 1);
    for (int64_t s = 0; s < S; s++) {
        const std::string prefix = data / std::to_string(s);
        TokenDatasetWriter writer(prefix, c.V);
        for (int twice = 0; twice < 2; twice++) writer.add(tokens.data() + s * T, T);
        writer.end_document();
        writer.commit();
        o.data_path.push_back(format("%g", 1.0 / (double)S));
        o.data_path.push_back(prefix);
    }
    return o;
}

DataOptions loader_options(const TrainOptions& o, const ModelConfig& c, const Schedule& schedule) {
    DataOptions d = data_options(o, c, nullptr, DataSplit::whole, schedule.total_samples);
    d.eod = 0;  // like the reference's random tokens
    return d;
}

ModelConfig config_of(const std::string& directory) {
    ModelConfig c = read_config(directory);
    check_config(c);
    pad_vocabulary(c, 16);
    CHECK(c.Vp > c.V, "the fixtures should pad the vocabulary: %d", c.V);
    return c;
}

// A fixture, ready to train.
struct Fixture {
    std::string directory;
    Golden golden;
    be::Ctx ctx{1};  // too little work for several threads
    Model m;
    test::TemporaryDirectory files;
    TrainOptions o;
    Schedule schedule;
    DataLoader data;

    Fixture(const std::string& family, bool plain, int B)
        : directory(fixture(family)),
          golden(directory),
          m(config_of(directory)),
          o(options_of(directory, golden, m.c, files)),
          schedule(make_schedule(o, 1)),
          data(loader_options(o, m.c, schedule)) {
        ctx.plain = plain;
        plan_memory(m, Recompute::none, B, o.seq_length, B * o.seq_length);
        allocate(ctx, m);
        load_parameters(ctx, m, directory);
    }
};

class Families : public testing::TestWithParam<std::tuple<const char*, bool>> {
protected:
    std::string family() const { return std::get<0>(GetParam()); }
    bool plain() const { return std::get<1>(GetParam()); }
    void report(const Golden& golden) { RecordProperty("worst", format("%.2f of the allowed %.0f", golden.worst(), factor)); }
};

TEST_P(Families, LogitsLossAndEveryGradient) {
    Fixture run(family(), plain(), 4);
    Model& m = run.m;
    Golden& golden = run.golden;
    Batch batch;
    run.data.fetch(0, (int)run.schedule.final_batch, batch);
    const Pass pass = upload(run.ctx, m, batch, m.a.micro_batch());
    const real z_coef = (real)run.o.z_loss_strength;

    clear_sums(run.ctx, m);
    model_forward(pass);
    head(pass, 0, z_coef, false);
    const LossSums sums = read_sums(run.ctx, m);
    HostSide<floatX> padded(run.ctx, m.a.logits, (size_t)pass.N() * m.c.Vp);
    padded.download();
    std::vector<real> logits;
    for (int i = 0; i < pass.N(); i++) {
        const floatX* row = padded.data() + (size_t)i * m.c.Vp;
        logits.insert(logits.end(), row, row + m.c.V);
    }
    golden.expect("logits", logits);
    golden.expect("ce", std::vector<double>{sums.ce / (double)sums.n});
    golden.expect("z", std::vector<double>{sums.z / (double)sums.n});

    be::clear(run.ctx, m.grads.data, m.table.size * sizeof(real));
    head(pass, (real)(1.0 / (double)sums.n), z_coef, true);
    model_backward(pass, [](int) {});
    golden.expect_all(run.ctx, "grad.", m.table, (real*)m.grads.data);
    golden.expect_compared({"logits", "ce", "z", "grad."});
    report(golden);
}

// Two micro-batches per step with different numbers of masked targets; warm-up, decay, clipped and unclipped steps.
TEST_P(Families, TwentyTrainingSteps) {
    Fixture run(family(), plain(), 2);
    Golden& golden = run.golden;
    const std::vector<int> tokens = golden.integers("tokens"), targets = golden.integers("targets");
    const size_t step_tokens = (size_t)run.schedule.final_batch * run.o.seq_length;
    Batch batch;
    Trainer trainer(run.ctx, run.m, run.o, run.schedule, run.data, {});
    std::vector<double> ce, z, norm, lr;
    while (trainer.state.step < run.schedule.total_steps) {
        // The loader must return the reference's batches, otherwise the comparisons below are meaningless.
        run.data.fetch(trainer.state.consumed, (int)run.schedule.final_batch, batch);
        const size_t first = (size_t)trainer.state.step * step_tokens % tokens.size(), last = first + step_tokens;
        ASSERT_EQ(batch.tokens, std::vector<int>(tokens.begin() + first, tokens.begin() + last)) << trainer.state.step;
        ASSERT_EQ(batch.targets, std::vector<int>(targets.begin() + first, targets.begin() + last)) << trainer.state.step;
        const StepStats s = *train_step(trainer);
        ce.push_back(s.loss);
        z.push_back(s.z_loss);
        norm.push_back(s.grad_norm);
        lr.push_back(s.lr);
    }
    golden.expect("steps.ce", ce);
    golden.expect("steps.z", z);
    golden.expect("steps.norm", norm);
    golden.expect("steps.lr", lr);
    golden.expect_all(run.ctx, "final.", run.m.table, run.m.params);
    golden.expect_compared({"steps.", "final."});
    EXPECT_EQ(trainer.state.updates, trainer.state.step);

    const auto clipped = std::count_if(norm.begin(), norm.end(), [&](double n) { return n > run.o.clip_grad; });
    EXPECT_GT(clipped, 0);
    EXPECT_LT(clipped, trainer.state.step);
    report(golden);
}

// ---- conversations ----------------------------------------------------------------------------------------------------------
// A dataset of conversations of random tokens, some of which are in the loss.
DataOptions write_conversations(const std::string& prefix, const ModelConfig& c, int T, const std::vector<int>& lengths) {
    TokenDatasetWriter writer(prefix, {"", "", c.V}, {}, "chatml");
    for (size_t d = 0; d < lengths.size(); d++) {
        std::vector<int> tokens;
        std::vector<uint8_t> learned;
        for (int t = 0; t < lengths[d]; t++) {
            tokens.push_back((int)((d * 1000003 + (size_t)t * 2654435761u) % (size_t)c.V));
            learned.push_back((t * 7 + (int)d) % 5 < 2 || t == 1);
        }
        writer.add(tokens.data(), tokens.size(), learned.data());
        writer.end_document();
    }
    writer.commit();
    DataOptions o;
    o.blend.paths = {prefix};
    o.part = DataSplit::whole;
    o.T = T;
    return o;
}
std::vector<real> gradients_of(be::Ctx& ctx, Model& m) {
    HostSide<real> host(ctx, (real*)m.grads.data, m.table.size);
    host.download();
    return std::vector<real>(host.data(), host.data() + m.table.size);
}

// Packed conversations have the same loss and gradients as separate ones, each a sequence of its own: none sees another,
// positions restart, and only answers count. For separate ones the loss is summed here, from logits.
TEST_P(Families, PackedConversationsCountTheirAnswersAlone) {
    Fixture run(family(), plain(), 4);
    Model& m = run.m;
    const int T = run.o.seq_length;
    const DataOptions options = write_conversations(run.files / "chat", m.c, T, {T / 2, T / 3, 3, T + 1, 2, T / 2, T / 4, 5});
    const DataLoader data(options);
    const int64_t targets = data.unmasked(0, data.n_samples());
    const real scale = (real)(1.0 / (double)targets);
    ASSERT_LE(data.n_samples(), 4);
    Batch batch;
    data.fetch(0, (int)data.n_samples(), batch);

    const auto passes = [&](const Batch& b) {
        const Pass pass = upload(run.ctx, m, b, m.a.micro_batch());
        pass.in.gradients = Acc::Add;
        model_forward(pass);
        return pass;
    };
    clear_sums(run.ctx, m);
    be::clear(run.ctx, m.grads.data, m.table.size * sizeof(real));
    const Pass packed = passes(batch);
    head(packed, scale, 0, true);
    model_backward(packed, [](int) {});
    const LossSums sums = read_sums(run.ctx, m);
    EXPECT_EQ(sums.n, targets);
    const std::vector<real> packed_gradients = gradients_of(run.ctx, m);

    be::clear(run.ctx, m.grads.data, m.table.size * sizeof(real));
    double ce = 0;
    for (size_t first = 0; first < batch.tokens.size();) {
        size_t end = first + 1;
        while (end < batch.tokens.size() && batch.positions[end] > 0) end++;
        const auto part = [&](const std::vector<int>& x) {
            return std::vector<int>(x.begin() + (long)first, x.begin() + (long)end);
        };
        Batch alone;
        alone.tokens = part(batch.tokens);
        alone.targets = part(batch.targets);
        alone.positions = part(batch.positions);
        alone.B = 1;
        alone.T = (int)(end - first);
        first = end;
        if (*std::max_element(alone.targets.begin(), alone.targets.end()) < 0) continue;  // padding
        const Pass pass = passes(alone);
        clear_sums(run.ctx, m);
        head(pass, 0, 0, false);
        HostSide<floatX> logits(run.ctx, m.a.logits, (size_t)pass.N() * m.c.Vp);
        logits.download();
        for (int i = 0; i < alone.T; i++) {
            const floatX* row = logits.data() + (size_t)i * m.c.Vp;
            double sum = 0;
            for (int v = 0; v < m.c.V; v++) sum += std::exp((double)row[v]);
            if (alone.targets[(size_t)i] >= 0) ce += std::log(sum) - (double)row[alone.targets[(size_t)i]];
        }
        head(pass, scale, 0, true);
        model_backward(pass, [](int) {});
    }
    EXPECT_NEAR(sums.ce, ce, 1e-5 * ce);
    const std::vector<real> alone_gradients = gradients_of(run.ctx, m);
    for (const TensorSpec& spec : m.table.rows) {
        const size_t n = spec.size();
        const real* expected = alone_gradients.data() + spec.offset;
        real largest = 0;
        for (size_t i = 0; i < n; i++) largest = std::max(largest, std::abs(expected[i]));
        for (size_t i = 0; i < n; i++)
            ASSERT_NEAR(packed_gradients[spec.offset + i], expected[i], 2e-5 * largest) << spec.hf[0].name;
    }
    // This is also the loss of a step.
    TrainOptions o = run.o;
    o.z_loss_strength = 0;
    o.global_batch_size = (int)data.n_samples();
    o.micro_batch_size = 1;
    o.lr_warmup_iters = 0;
    o.train_iters = 1;
    const Schedule schedule = make_schedule(o, 1);
    Trainer trainer(run.ctx, m, o, schedule, data, {});
    EXPECT_NEAR(train_step(trainer)->loss, ce / (double)targets, 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Golden, Families, testing::Combine(testing::Values("gpt2", "bloom", "llama"), testing::Bool()),
                         [](const auto& test) {
                             return std::string(std::get<0>(test.param)) + (std::get<1>(test.param) ? "_plain" : "_fast");
                         });

// ---- the other families -----------------------------------------------------------------------------------------------------
// test/golden/families/NAME is a tiny model as saved by transformers, with its logits, loss and gradients
// (dev/ref/families_reference.py): 5 query heads of 6 in a width of 20, one key/value head, windows and scaled positions
// that take effect in a sequence of 17, mixtures of 5 experts with 3 per token.
class OfTransformers : public testing::TestWithParam<std::tuple<const char*, bool>> {};

TEST_P(OfTransformers, LogitsLossAndEveryGradient) {
    const std::string directory =
        (std::filesystem::path(__FILE__).parent_path() / "golden/families" / std::get<0>(GetParam())).string();
    const Golden golden(directory);
    be::Ctx ctx{1};
    ctx.plain = std::get<1>(GetParam());
    Model m(config_of(directory));
    Batch batch;
    batch.B = (int)golden.dimension("tokens", 0);
    batch.T = (int)golden.dimension("tokens", 1);
    const int N = batch.B * batch.T;
    batch.tokens = golden.integers("tokens");
    batch.targets = golden.integers("targets");
    for (int i = 0; i < N; i++) batch.positions.push_back(i % batch.T);
    plan_memory(m, Recompute::none, batch.B, batch.T, N);
    allocate(ctx, m);
    load_parameters(ctx, m, directory);

    const Pass pass = upload(ctx, m, batch, m.a.micro_batch());
    const auto close = [&](const std::string& key, const auto& actual) {
        const std::vector<double> expected = golden.values(key);
        double largest = 0;
        for (const double x : expected) largest = std::max(largest, std::abs(x));
        test::expect_close(actual, expected, 2e-5 * std::max(1e-2, largest), 0, key);
    };
    clear_sums(ctx, m);
    model_forward(pass);
    head(pass, 0, 0, false);
    const LossSums sums = read_sums(ctx, m);
    close("ce", std::vector<double>{sums.ce / (double)sums.n});
    HostSide<floatX> padded(ctx, m.a.logits, (size_t)N * m.c.Vp);
    padded.download();
    std::vector<real> logits;
    for (int i = 0; i < N; i++)
        logits.insert(logits.end(), padded.data() + (size_t)i * m.c.Vp, padded.data() + (size_t)i * m.c.Vp + m.c.V);
    if (const real cap = (real)m.c.logit_softcap; cap > 0)  // as applied by the classifier
        for (real& x : logits) x = cap * std::tanh(x / cap);
    close("logits", logits);

    be::clear(ctx, m.grads.data, m.table.size * sizeof(real));
    head(pass, (real)(1.0 / (double)sums.n), 0, true);
    model_backward(pass, [](int) {});
    HostSide<real> grads(ctx, (real*)m.grads.data, m.table.size);
    grads.download();
    for (const TensorSpec& spec : m.table.rows)
        for (const HfTensor& t : spec.hf) {
            std::vector<real> file((size_t)t.rows * spec.cols);
            convert_layout(spec, t, grads.data() + spec.offset, file.data(), true);
            const bool renamed = t.name == "embed_out.weight";  // a parameter's name in the class, and in files
            close("grad." + (renamed ? "lm_head.weight" : t.name), file);
        }
}

INSTANTIATE_TEST_SUITE_P(
    Golden, OfTransformers,
    testing::Combine(testing::Values("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "gpt_neox", "gemma", "gemma2",
                                     "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "olmo3",
                                     "ministral", "seed_oss", "arcee", "exaone4", "starcoder2", "stablelm", "phi3", "ernie4_5",
                                     "helium", "glm", "glm4", "nemotron", "gpt_bigcode", "granite", "granitemoe", "minicpm",
                                     "cohere", "cohere2", "opt", "internlm2", "mpt", "falcon", "phi", "gptj", "codegen",
                                     "internlm3", "exaone", "gpt_neo"),
                     testing::Bool()),
    [](const auto& test) { return std::string(std::get<0>(test.param)) + (std::get<1>(test.param) ? "_plain" : "_fast"); });

}  // namespace test_golden_fp32
