// muP and CompleteP (llmc/model/parametrization.h): each tensor's factors compared with values worked out by hand; factors
// folded into weights train like computed ones; and the coordinate check of Yang et al. (2022, appendix D.1): the change of
// the residual stream and the logits in a few steps does not depend on the width, with CompleteP not on the depth either,
// whereas in the standard parametrization it does.
#include "trainer.h"
#include "files.h"
#include "testing.h"

namespace test_parametrization_fp32 {

// ---- factors ----------------------------------------------------------------------------------------------------------------
// Width 256 is 4 times the base's, 6 layers are 3 times as many, and heads of 64 are 4 times as large.
ModelConfig four_times(const char* family) {
    ModelConfig c;
    set_family(c, family);
    c.L = 6;
    c.C = 256;
    c.NH = c.NKV = 4;
    c.F = 1024;
    c.T = 16;
    c.V = 100;
    pad_vocabulary(c, 64);
    c.parametrization = {4, 3, 4};
    return c;
}
const TensorSpec& row_of(const ParameterTable& table, const std::string& name) {
    for (const TensorSpec& t : table.rows)
        if (t.name == name) return t;
    fail("the table has no %s", name.c_str());
}
struct Expected {
    const char* name;
    int block;  // index into the tensor's blocks of rows
    TensorFactors factors;
};
void expect_factors(const ModelConfig& c, const std::vector<Expected>& expected) {
    const ParameterTable table(c);
    for (const auto& [name, block, factors] : expected) {
        const TensorSpec& t = row_of(table, name);
        const TensorFactors f = t.factors.folded(t.blocks.at((size_t)block).fold);
        const std::string where = format("%s, rows %d", name, block);
        EXPECT_NEAR(f.init, factors.init, 1e-12) << where;
        EXPECT_NEAR(f.lr, factors.lr, 1e-12) << where;
        EXPECT_NEAR(f.weight_decay, factors.weight_decay, 1e-12) << where;
        EXPECT_NEAR(f.eps, factors.eps, 1e-12) << where;
    }
}

TEST(Parametrization, FactorsOfTensors) {
    const double third = 1.0 / 3, root3 = std::sqrt(3.0);
    // The embedding is tied, so the logits' factor 1/4 must be in the final norm.
    expect_factors(four_times("gpt2"), {{"wte", 0, {1, 1, 1, 0.25}},
                                        {"wpe", 0, {1, 1, 1, 0.25}},
                                        {"blocks.5.norm1_w", 0, {1, 1, 1, 1.0 / 12}},
                                        {"blocks.5.norm2_b", 0, {1, 1, 1, 1.0 / 12}},
                                        {"blocks.5.qkv_w", 0, {0.25, 0.125, 8, 1.0 / 6}},
                                        {"blocks.5.qkv_w", 1, {0.5, 0.25, 4, 1.0 / 12}},
                                        {"blocks.5.qkv_w", 2, {0.5, 0.25, 4, 1.0 / 12}},
                                        {"blocks.5.qkv_b", 0, {0.5, 0.5, 2, 1.0 / 6}},
                                        {"blocks.5.qkv_b", 1, {1, 1, 1, 1.0 / 12}},
                                        {"blocks.0.proj_w", 0, {0.5 * root3 * third, 0.25 * third, 12, 0.25}},
                                        {"blocks.0.proj_b", 0, {third, third, 3, 0.25}},
                                        {"blocks.0.fc1_w", 0, {0.5, 0.25, 4, 1.0 / 12}},
                                        {"blocks.0.fc2_w", 0, {0.5 * root3 * third, 0.25 * third, 12, 0.25}},
                                        {"final_norm_w", 0, {0.25, 0.25, 4, 1}},
                                        {"final_norm_b", 0, {0.25, 0.25, 4, 1}}});
    // The norms of queries and after attention and MLP have the factors of queries, proj and fc2 above.
    expect_factors(four_times("olmo2"), {{"blocks.5.qkv_w", 0, {0.5, 0.25, 4, 1.0 / 12}},
                                         {"blocks.5.q_norm_w", 0, {0.5, 0.5, 2, 1.0 / 6}},
                                         {"blocks.5.k_norm_w", 0, {1, 1, 1, 1.0 / 12}},
                                         {"blocks.5.proj_w", 0, {0.5 * root3, 0.25, 4, 1.0 / 12}},
                                         {"blocks.5.norm1_after_w", 0, {third, third, 3, 0.25}},
                                         {"blocks.5.norm2_after_w", 0, {third, third, 3, 0.25}},
                                         {"head", 0, {1, 1, 1, 0.25}}});
    // The embedding, multiplied by 16 instead of 8, is half as large; as it is tied, its logits are doubled. The scores'
    // factor is the base's, not 1 / sqrt(HS).
    ModelConfig gemma = four_times("gemma2");
    gemma.embedding_scale = 16;
    gemma.attention_scale = 0.25;
    expect_factors(gemma, {{"wte", 0, {0.5, 0.5, 2, 0.5}},
                           {"final_norm_w", 0, {0.5, 0.5, 2, 0.5}},
                           {"blocks.2.qkv_w", 0, {0.125, 0.0625, 16, 1.0 / 3}}});
}

TEST(Parametrization, StandardHasOneRange) {
    for (const Family& f : families()) {
        ModelConfig c = four_times(f.name);
        EXPECT_GT(ParameterTable(c).factors.size(), 3u) << f.name;
        c.parametrization = {};
        const ParameterTable table(c);
        ASSERT_EQ(table.factors.size(), 1u) << f.name;
        EXPECT_EQ(table.factors[0].end, table.size);
        EXPECT_TRUE(table.factors[0].factors == TensorFactors()) << f.name;
    }
}

TEST(Parametrization, MuonsLearningRate) {
    MuonRecipe recipe;
    EXPECT_DOUBLE_EQ(recipe.learning_rate(0.25, {4, 1, 1}), 0.5);
    EXPECT_DOUBLE_EQ(recipe.learning_rate(0.25 / 3, {4, 3, 1}), 0.5 / 3);
    recipe.shape_scaling = true;
    EXPECT_DOUBLE_EQ(recipe.learning_rate(0.25 / 3, {4, 3, 1}), 1.0 / 3);
}

// ---- training ---------------------------------------------------------------------------------------------------------------
ModelConfig small(const char* family, int C, int L, int HS) {
    ModelConfig c;
    set_family(c, family);
    c.L = L;
    c.C = C;
    c.NH = c.NKV = C / HS;
    c.F = 4 * C;
    c.T = 16;
    c.V = 60;
    c.parametrization = {};
    pad_vocabulary(c, 64);
    return c;
}

// The effect of a few steps on the first batch: the root mean square change of the residual stream after each block, and of
// the logits; and the loss of each step.
struct Outcome {
    std::vector<double> changes, losses;
};
class Training {
public:
    explicit Training(const TrainOptions& given) : o_(given) {
        const std::string prefix = files_ / "data";
        TokenDatasetWriter writer(prefix, 60);
        std::vector<int> tokens;
        for (int i = 0; i < 4096; i++) tokens.push_back(1 + i * i % 59);
        writer.add(tokens.data(), tokens.size());
        writer.end_document();
        writer.commit();
        o_.data_path = {prefix};
        o_.seq_length = 16;
        o_.micro_batch_size = o_.global_batch_size = 4;
        o_.seed = 2;
        o_.clip_grad = 0;
        o_.lr_decay_style = "constant";
    }

    Outcome run(const ModelConfig& c) const {
        be::Ctx ctx(2);
        auto ranks = std::make_shared<Ranks>();
        ranks->whole_matrices = muon_recipe(o_).on;
        Model m(c, ranks, {c.L});
        m.muon.recipe = muon_recipe(o_);
        const Schedule schedule = make_schedule(o_, 1);
        DataOptions d = data_options(o_, c, nullptr, DataSplit::whole, schedule.total_samples);
        d.eod = 0;
        const DataLoader data(d);
        plan_memory(m, Recompute::none, 4, o_.seq_length, 4 * o_.seq_length);
        allocate(ctx, m);
        initialize(ctx, m, 7);
        Batch batch;
        data.fetch(0, 4, batch);
        const std::vector<std::vector<real>> before = coordinates(ctx, m, batch);
        Outcome outcome;
        Trainer trainer(ctx, m, o_, schedule, data, {});
        while (trainer.state.step < schedule.total_steps) outcome.losses.push_back(train_step(trainer)->loss);
        const std::vector<std::vector<real>> after = coordinates(ctx, m, batch);
        for (size_t i = 0; i < after.size(); i++) {
            double squares = 0;
            for (size_t k = 0; k < after[i].size(); k++) squares += std::pow((double)after[i][k] - (double)before[i][k], 2);
            outcome.changes.push_back(std::sqrt(squares / (double)after[i].size()));
        }
        return outcome;
    }

private:
    static std::vector<std::vector<real>> coordinates(be::Ctx& ctx, Model& m, const Batch& batch) {
        const Pass pass = upload(ctx, m, batch, m.a.micro_batch());
        model_forward(pass);
        head(pass, 0, 0, false);
        std::vector<std::vector<real>> all;
        const size_t N = (size_t)pass.N();
        for (size_t i = 1; i < pass.in.x.size(); i++) all.emplace_back(pass.in.x[i], pass.in.x[i] + N * (size_t)m.c.C);
        for (size_t n = 0; n < N; n++) {
            const real* row = m.a.logits + n * (size_t)m.c.Vp;
            if (n == 0) all.emplace_back();
            all.back().insert(all.back().end(), row, row + m.c.V);
        }
        return all;
    }

    test::TemporaryDirectory files_;
    TrainOptions o_;
};

TrainOptions options(double lr, int steps) {
    TrainOptions o;
    o.lr = lr;
    o.train_iters = steps;
    return o;
}

// A computed factor and one folded into weights give the same losses, over steps where learning rate, weight decay and
// epsilon all matter.
void expect_same_training(const ModelConfig& computed, const ModelConfig& folded, const char* what) {
    TrainOptions o = options(1e-2, 12);
    o.weight_decay = 1;
    o.adam_eps = 1e-3;
    const Training training(o);
    const Outcome a = training.run(computed), b = training.run(folded);
    ASSERT_EQ(a.losses.size(), b.losses.size());
    EXPECT_LT(a.losses.back(), a.losses[0] - 0.02) << what;
    for (size_t i = 0; i < a.losses.size(); i++) EXPECT_NEAR(a.losses[i], b.losses[i], 2e-5) << what << ", step " << i + 1;
}
TEST(Parametrization, FoldedFactorsTrainAsComputedOnes) {
    for (const char* family : {"gpt2", "llama", "qwen3"}) {  // with biases, without, and with a norm of queries
        ModelConfig computed = small(family, 64, 2, 32), folded = computed;
        computed.attention_scale = std::sqrt(8.0) / 32;
        folded.parametrization = {1, 1, 4};
        expect_same_training(computed, folded, family);
    }
    for (const bool tied : {true, false}) {
        ModelConfig computed = small("gemma", 64, 2, 16), folded = computed;
        computed.tied = folded.tied = tied;
        computed.parametrization = folded.parametrization = {4, 2, 1};
        computed.embedding_scale = 4;
        folded.embedding_scale = 8;
        expect_same_training(computed, folded, tied ? "embedding, tied" : "embedding");
    }
}

// For each coordinate, the ratio of the largest to the smallest change over models; returns the largest ratio.
double spread(const std::vector<Outcome>& models) {
    double worst = 1;
    const auto add = [&](auto value_of) {
        double least = INFINITY, most = 0;
        for (const Outcome& m : models) {
            least = std::min(least, value_of(m));
            most = std::max(most, value_of(m));
        }
        worst = std::max(worst, most / least);
    };
    add([](const Outcome& m) { return m.changes.front(); });                // after the first block
    add([](const Outcome& m) { return m.changes[m.changes.size() - 2]; });  // after the last
    add([](const Outcome& m) { return m.changes.back(); });                 // logits
    return worst;
}
// For models of these widths, relative to 64; or of these depths, relative to 2.
double spread_over_widths(const Training& training, const char* family, int widest, bool mup) {
    std::vector<Outcome> models;
    for (int C = 64; C <= widest; C *= 2) {
        ModelConfig c = small(family, C, 2, 16);
        if (mup) c.parametrization.width = C / 64.0;
        models.push_back(training.run(c));
    }
    return spread(models);
}
double spread_over_depths(const Training& training, const char* family, bool completep) {
    std::vector<Outcome> models;
    for (const int L : {2, 4, 8, 16}) {
        ModelConfig c = small(family, 64, L, 16);
        if (!c.norm_before())
            c.embedding_scale = 50;  // otherwise the first block's input is near zero, and its norm's output is noise
        if (completep) c.parametrization.depth = L / 2.0;
        models.push_back(training.run(c));
    }
    for (Outcome& m : models) m.changes.front() = m.changes[(m.changes.size() - 1) / 2 - 1];  // in the middle
    return spread(models);
}

constexpr double bound = 2;
TEST(Parametrization, ChangesDoNotDependOnTheWidth) {
    const Training adamw(options(2e-3, 4));
    TrainOptions o = options(2e-2, 4);
    o.optimizer = "muon";
    const Training muon(o);
    struct Case {
        const char* name;
        const Training& training;
        const char* family;
        int widest;  // 512 takes three quarters of the time of all four
    };
    for (const auto& [name, training, family, widest] :
         {Case{"AdamW", adamw, "llama", 512}, Case{"AdamW", adamw, "gpt2", 256}, Case{"Muon", muon, "llama", 256}}) {
        const double mup = spread_over_widths(training, family, widest, true),
                     standard = spread_over_widths(training, family, widest, false);
        printf("%s, %s: changes differ by a factor of %.2f with muP, %.2f without\n", name, family, mup, standard);
        EXPECT_LT(mup, bound) << name << " " << family;
        EXPECT_GT(standard, bound) << name << " " << family;
    }
}
TEST(Parametrization, ChangesDoNotDependOnTheDepth) {
    const Training training(options(1e-3, 4));
    for (const char* family : {"llama", "olmo2"}) {
        const double completep = spread_over_depths(training, family, true),
                     standard = spread_over_depths(training, family, false);
        printf("%s: changes differ by a factor of %.2f with CompleteP, %.2f without\n", family, completep, standard);
        EXPECT_LT(completep, bound) << family;
        EXPECT_GT(standard, bound) << family;
    }
}

}  // namespace test_parametrization_fp32
