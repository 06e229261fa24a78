// The whole model in double: every parameter's gradient compared with finite differences of the loss, for each family and
// each option of the block, with grouped queries, document masks, masked targets, z-loss, padded vocabulary; recomputation
// gives the same bits.
#include <gtest/gtest.h>

#include <random>

#include "trainer.h"
#include "model_files.h"

namespace test_model_fp64 {

// Named models: a family with one option, or with a published model's options.
struct Variant {
    const char *name, *family;
    void (*change)(ModelConfig&);
};
const Variant variants[] = {
    {"gpt2", "gpt2", nullptr},
    {"bloom", "bloom", nullptr},
    {"llama", "llama", nullptr},
    {"llama, tied", "llama", [](ModelConfig& c) { c.tied = true; }},
    // one option each
    {"norms after", "train_gpt", [](ModelConfig& c) { c.norm_place = NormPlace::after; }},
    {"norms before and after", "train_gpt", [](ModelConfig& c) { c.norm_place = NormPlace::both; }},
    {"attention and MLP parallel", "train_gpt", [](ModelConfig& c) { c.norm_place = NormPlace::parallel; }},
    {"parallel with LayerNorm", "gpt2", [](ModelConfig& c) { c.norm_place = NormPlace::parallel; }},
    {"one norm for both branches", "train_gpt", [](ModelConfig& c) { c.norm_place = NormPlace::shared; }},
    {"LayerNorm without bias", "gpt2", [](ModelConfig& c) { c.norm_bias = false; }},
    {"opt", "opt", nullptr},
    {"mpt", "mpt", nullptr},
    {"falcon", "falcon", nullptr},
    {"gpt_neo", "gpt_neo",
     [](ModelConfig& c) {
         c.window = 3;
         c.full_interval = 2;
         c.full_offset = 1;
     }},
    {"gptj", "gptj", nullptr},
    {"bias of the logits, tied", "gpt2", [](ModelConfig& c) { c.head_bias = true; }},
    {"cohere2", "cohere2",
     [](ModelConfig& c) {
         c.window = 3;
         c.full_interval = c.nope_interval = 2;
         c.logit_divisor = 3;
     }},
    {"LayerNorm before and after", "gpt2", [](ModelConfig& c) { c.norm_place = NormPlace::both; }},
    {"norms of one plus weight", "train_gpt", [](ModelConfig& c) { c.norm_plus_one = true; }},
    {"wide heads", "llama", [](ModelConfig& c) { c.head_size = 6; }},
    {"narrow heads", "gpt2", [](ModelConfig& c) { c.head_size = 2; }},
    {"grouped queries and learned positions", "gpt2", [](ModelConfig& c) { c.NKV = 2; }},
    {"grouped queries and ALiBi", "bloom", [](ModelConfig& c) { c.NKV = 1; }},
    {"bias of qkv", "train_gpt", [](ModelConfig& c) { c.qkv_bias = true; }},
    {"bias of proj", "train_gpt", [](ModelConfig& c) { c.proj_bias = true; }},
    {"bias of the MLP", "train_gpt", [](ModelConfig& c) { c.mlp_bias = true; }},
    {"norm of each head", "train_gpt", [](ModelConfig& c) { c.qk_norm = QkNorm::head; }},
    {"norm of all heads", "train_gpt", [](ModelConfig& c) { c.qk_norm = QkNorm::whole; }},
    {"exact GeLU", "train_gpt", [](ModelConfig& c) { c.activation = Activation::gelu_exact; }},
    {"ReLU", "train_gpt", [](ModelConfig& c) { c.activation = Activation::relu; }},
    {"squared ReLU", "train_gpt", [](ModelConfig& c) { c.activation = Activation::relu2; }},
    {"clamped SwiGLU", "train_gpt", [](ModelConfig& c) { c.activation = Activation::clamped_swiglu; }},
    {"GeGLU", "train_gpt", [](ModelConfig& c) { c.activation = Activation::geglu; }},
    {"no positions", "train_gpt", [](ModelConfig& c) { c.position = Position::none; }},
    {"every second layer without positions", "train_gpt", [](ModelConfig& c) { c.nope_interval = 2; }},
    {"every second layer without ALiBi", "bloom", [](ModelConfig& c) { c.nope_interval = 2; }},
    {"partial rotary", "train_gpt", [](ModelConfig& c) { c.rotary_fraction = 0.5; }},
    {"YaRN", "train_gpt",
     [](ModelConfig& c) {
         c.rope_scaling.type = RopeScaling::Type::yarn;
         c.rope_scaling.factor = 4;
         c.rope_scaling.original = 8;
     }},
    {"Llama 3's scaling", "train_gpt",
     [](ModelConfig& c) {
         c.rope_scaling.type = RopeScaling::Type::llama3;
         c.rope_scaling.factor = 8;
         c.rope_scaling.original = 8;
     }},
    {"window", "train_gpt", [](ModelConfig& c) { c.window = 3; }},
    {"window and ALiBi", "bloom", [](ModelConfig& c) { c.window = 3; }},
    {"window in every second layer", "train_gpt",
     [](ModelConfig& c) {
         c.window = 3;
         c.full_interval = 2;
     }},
    {"window with its own base", "train_gpt",
     [](ModelConfig& c) {
         c.window = 3;
         c.full_interval = 2;
         c.local_rope_base = 100;
     }},
    {"capped scores", "train_gpt", [](ModelConfig& c) { c.attention_softcap = 1.5; }},
    {"capped logits", "train_gpt", [](ModelConfig& c) { c.logit_softcap = 1.5; }},
    {"scale of scores", "train_gpt", [](ModelConfig& c) { c.attention_scale = 0.3; }},
    {"sinks", "train_gpt", [](ModelConfig& c) { c.sinks = true; }},
    {"granite", "granite",
     [](ModelConfig& c) {
         c.embedding_scale = 4.9;
         c.residual_scale = 0.4;
         c.logit_divisor = 3;
         c.attention_scale = 0.3;
     }},
    {"residual scale, LayerNorm, parallel", "train_gpt",
     [](ModelConfig& c) {
         c.norm = Norm::layernorm;
         c.norm_place = NormPlace::parallel;
         c.residual_scale = 0.4;
     }},
    {"scale of the embedding", "train_gpt", [](ModelConfig& c) { c.embedding_scale = 4.9; }},
    {"scale of the embedding beside positions", "gpt2", [](ModelConfig& c) { c.embedding_scale = 4.9; }},
    {"norm of the embedding", "train_gpt", [](ModelConfig& c) { c.embedding_norm = true; }},
    {"dropout", "train_gpt",
     [](ModelConfig& c) {
         c.embedding_dropout = 0.1;
         c.attention_dropout = 0.2;
         c.hidden_dropout = 0.3;
     }},
    {"dropout in a parallel block", "gpt_neox", [](ModelConfig& c) { c.hidden_dropout = 0.3; }},
    // mixtures of experts
    {"mixture", "train_gpt",
     [](ModelConfig& c) {
         c.mixture.experts = 5;
         c.mixture.topk = 3;
     }},
    {"mixture of one expert per row", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {4, 1};
         c.mixture.normalize = false;
     }},
    {"mixture of more experts than rows", "llama",
     [](ModelConfig& c) {
         c.mixture = {37, 2};
     }},
    {"mixture by sigmoids", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {6, 2};
         c.mixture.sigmoid = true;
         c.mixture.scale = 2.5;
     }},
    {"mixture without a gate", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {5, 2};
         c.activation = Activation::relu2;
     }},
    {"mixture with biases", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {5, 3};
         c.activation = Activation::clamped_swiglu;
         c.mlp_bias = true;
     }},
    {"mixture with norms and dropout", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {5, 2};
         c.norm_place = NormPlace::both;
         c.hidden_dropout = 0.2;
         c.mlp_bias = true;
     }},
    {"mixture after a dense layer", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {5, 2};
         c.mixture.width = 12;
         c.mixture.dense_layers = {0};
     }},
    {"mixture before a dense layer without a gate", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {3, 2};
         c.mixture.width = 28;
         c.mixture.dense_layers = {1};
         c.activation = Activation::relu2;
         c.norm_place = NormPlace::both;
     }},
    {"mixture with a shared expert", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {5, 2};
         c.mixture.shared = 28;
         c.mlp_bias = true;
         c.activation = Activation::gelu;
         c.norm_place = NormPlace::after;
     }},
    {"mixture with a gated shared expert after a dense layer", "qwen2_moe",
     [](ModelConfig& c) {
         c.mixture.experts = 5;
         c.mixture.topk = 3;
         c.mixture.width = 12;
         c.mixture.shared = 36;
         c.mixture.dense_layers = {0};
     }},
    {"mixture with biases and a gated shared expert", "train_gpt",
     [](ModelConfig& c) {
         c.mixture = {5, 2};
         c.mixture.shared = 20;
         c.mixture.shared_gate = c.mlp_bias = true;
     }},
    // published families, as far as our options cover them
    {"mistral", "mistral", [](ModelConfig& c) { c.window = 4; }},
    {"qwen2", "qwen2", nullptr},
    {"qwen3", "qwen3", [](ModelConfig& c) { c.head_size = 6; }},
    {"smollm3", "smollm3", [](ModelConfig& c) { c.nope_interval = 2; }},
    {"olmo2", "olmo2", nullptr},
    {"gpt_neox", "gpt_neox", [](ModelConfig& c) { c.head_size = 8; }},
    {"gemma2", "gemma2",
     [](ModelConfig& c) {
         c.window = 4;
         c.full_interval = 2;
         c.attention_softcap = 2;
         c.logit_softcap = 3;
         c.embedding_scale = 4.9;
         c.head_size = 6;
     }},
    {"gemma3", "gemma3_text",
     [](ModelConfig& c) {
         c.window = 4;
         c.full_interval = 2;
         c.local_rope_base = 100;
         c.embedding_scale = 4.9;
         c.attention_scale = 0.4;
     }},
    {"everything", "train_gpt",
     [](ModelConfig& c) {
         c.norm = Norm::layernorm;
         c.norm_place = NormPlace::both;
         c.norm_plus_one = true;
         c.qk_norm = QkNorm::head;
         c.activation = Activation::geglu;
         c.qkv_bias = c.proj_bias = c.mlp_bias = true;
         c.head_size = 8;
         c.rotary_fraction = 0.5;
         c.nope_interval = 2;
         c.window = 3;
         c.full_interval = 2;
         c.attention_softcap = 2;
         c.logit_softcap = 3;
         c.sinks = true;
         c.embedding_norm = true;
         c.embedding_scale = 4.9;
         c.embedding_dropout = c.attention_dropout = c.hidden_dropout = 0.1;
     }},
};

ModelConfig tiny(const std::string& name) {
    const Variant* v = std::find_if(std::begin(variants), std::end(variants), [&](const Variant& v) { return name == v.name; });
    ModelConfig c;
    set_family(c, v->family);
    c.L = 2;
    c.C = 24;
    c.NH = 6;
    c.NKV = c.norm == Norm::rmsnorm ? 3 : 6;
    c.F = c.family == "bloom" ? 4 * c.C : 20;
    c.T = 11;
    c.V = 29;
    c.init_std = 0.2;
    if (v->change) v->change(c);
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

// The elements of a tensor without a padded vocabulary's.
size_t live_elements(const TensorSpec& t) { return t.hf.size() == 1 ? (size_t)t.hf[0].rows * t.cols : t.size(); }

struct Fixture {
    be::Ctx ctx{2};
    Model m;
    Batch batch;
    Fixture(const ModelConfig& c, Recompute recompute, bool documents, int head_rows = 7, bool bf16_gradients = false,
            int recomputed = INT_MAX, Recompute others = Recompute::none)
        : m(c), batch(random_batch(c, 2, c.T - 1, documents)) {
        if (bf16_gradients) m.grads.type = ElementType::bf16;
        m.recomputed = recomputed;
        m.recompute_others = others;
        plan_memory(m, recompute, 2, c.T - 1, head_rows, {1});
        allocate(ctx, m);
        initialize(ctx, m, 42);
        if (c.mixture.on()) {
            m.router_losses = {0.3, 0.02};
            if (recompute != Recompute::inference) clear_router_sums(ctx, m);
        }
        // Gains different from 1 and biases from 0, as errors in their gradients could hide otherwise.
        std::mt19937 rng(3);
        for (const TensorSpec& t : m.table.rows)
            if (t.vector())
                for (size_t i = 0; i < live_elements(t); i++) m.params[t.offset + i] += 0.3 * ((rng() % 1000) / 500.0 - 1);
        upload();
    }
    void upload() {
        MicroBatch& in = ::upload(ctx, m, batch, m.a.micro_batch()).in;
        in.drops = m.recompute != Recompute::inference;
        in.seed = 9;
        in.sample = 5;
    }
    Pass pass() { return {ctx, m, m.a.micro_batch()}; }
    real* grads() { return (real*)m.grads.data; }
    double scale() const { return 1.0 / 16; }
    double loss() {
        clear_sums(ctx, m);
        model_forward(pass());
        head(pass(), 0, 1e-2, false);
        const LossSums sums = read_sums(ctx, m);
        return (sums.ce + sums.z) * scale() + router_losses();
    }
    double router_losses() {
        double losses = 0;
        for (size_t i = 0; i < m.blocks.size(); i++) {
            if (!m.blocks[i].has_mixture()) continue;
            const Routing& routing = m.a.micro_batch().blocks[i].mlp.routing;
            const MixtureShape shape = pass().mixture();
            std::vector<double> sums(RouterSums::size(shape.E));
            std::vector<real> dlogits((size_t)shape.N() * shape.E), drouting((size_t)shape.slots());
            be::router_backward(ctx, dlogits.data(), sums.data(), drouting.data(), routing, shape, m.c.mixture.rule(nullptr),
                                {});
            losses += m.router_losses.balance * sums[RouterSums::balance] + m.router_losses.z * sums[RouterSums::z];
        }
        return losses;
    }
    void gradients() {
        be::clear(ctx, grads(), m.table.size * sizeof(real));
        model_forward(pass());
        head(pass(), scale(), 1e-2, true);
        model_backward(pass(), [](int) {});
    }
};

void PrintTo(const Variant& v, std::ostream* out) { *out << v.name; }
class Family : public testing::TestWithParam<Variant> {};

// Along some elements of every tensor or, if `elements` is 0, along a direction that changes all of its elements.
void expect_gradients(Fixture& f, size_t elements) {
    f.gradients();
    std::mt19937 rng(11);
    for (const TensorSpec& t : f.m.table.rows) {
        floatX* params = f.m.params + t.offset;
        const real* grads = f.grads() + t.offset;
        EXPECT_NE(std::count(grads, grads + t.size(), real(0)), (ptrdiff_t)t.size()) << t.name << " gets no gradient";
        const size_t live = live_elements(t);
        for (size_t k = 0; k < std::max<size_t>(1, std::min(live, elements)); k++) {
            std::vector<double> direction(live);
            if (elements) direction[live <= elements ? k : rng() % live] = 1;
            else
                for (double& x : direction) x = (rng() % 1000) / 500.0 - 1;
            const std::vector<floatX> kept(params, params + live);
            double analytic = 0;
            const auto loss_at = [&](double h) {
                for (size_t i = 0; i < live; i++) params[i] = kept[i] + h * direction[i];
                return f.loss();
            };
            for (size_t i = 0; i < live; i++) analytic += direction[i] * grads[i];
            // Central differences: truncation ~ h^2, rounding ~ 1e-16 / h = 1e-11.
            const double h = elements ? 1e-5 : 3e-6, numeric = (loss_at(h) - loss_at(-h)) / (2 * h);
            loss_at(0);
            EXPECT_TRUE(std::abs(numeric - analytic) <= 1e-9 + 1e-6 * std::abs(numeric))
                << t.name << ": " << analytic << " but differences give " << numeric;
        }
    }
}

TEST_P(Family, GradientOfEveryTensorEqualsFiniteDifferences) {
    const std::string name = GetParam().name;
    const bool thorough = name == "gpt2" || name == "bloom" || name == "llama";
    for (bool documents : {false, true}) {
        if (!documents && !thorough) continue;
        Fixture f(tiny(GetParam().name), Recompute::none, documents);
        expect_gradients(f, thorough ? 12 : 0);
    }
}

// Dropout by counter: the same masks whenever a sample is computed, others for other samples and seeds, none in evaluation.
TEST(Model, DropoutFollowsSeedAndSample) {
    Fixture f(tiny("dropout"), Recompute::none, false);
    const auto loss = [&](uint64_t seed, int64_t sample, bool drops) {
        MicroBatch& in = f.m.a.micro_batch();
        in.seed = seed;
        in.sample = sample;
        in.drops = drops;
        return f.loss();
    };
    const double first = loss(9, 5, true), without = loss(9, 5, false);
    EXPECT_EQ(first, loss(9, 5, true));
    EXPECT_NE(first, loss(8, 5, true));
    EXPECT_NE(first, loss(9, 7, true));
    EXPECT_NE(first, without);
    f.m.c.embedding_dropout = f.m.c.attention_dropout = f.m.c.hidden_dropout = 0;
    EXPECT_EQ(loss(9, 5, true), without);
    // Sample 6 is the first of one micro-batch and the second of another.
    f.m.c.hidden_dropout = 0.3;
    const size_t T = (size_t)f.batch.T;
    for (std::vector<int>* of : {&f.batch.tokens, &f.batch.targets}) std::copy_n(of->begin() + T, T, of->begin());
    f.upload();
    loss(9, 5, true);
    const std::vector<real> second(f.m.a.loss + T, f.m.a.loss + 2 * T);
    loss(9, 6, true);
    EXPECT_EQ(second, std::vector<real>(f.m.a.loss, f.m.a.loss + T));
}

TEST_P(Family, RecomputationAndHeadChunksKeepTheBits) {
    Fixture none(tiny(GetParam().name), Recompute::none, true);
    none.gradients();
    for (Recompute recompute : {Recompute::selective, Recompute::mlp, Recompute::full}) {
        Fixture other(tiny(GetParam().name), recompute, true);
        other.gradients();
        EXPECT_EQ(memcmp(none.grads(), other.grads(), none.m.table.size * sizeof(real)), 0) << (int)recompute;
        EXPECT_LT(other.m.arena.bytes(), none.m.arena.bytes());
    }
    // The policy only in the first layer, a weaker one in the other: memory is between the policy in both and none in both.
    ASSERT_EQ(none.m.c.L, 2);
    const std::pair<Recompute, Recompute> mixed[] = {{Recompute::full, Recompute::none},
                                                     {Recompute::full, Recompute::mlp},
                                                     {Recompute::mlp, Recompute::selective},
                                                     {Recompute::selective, Recompute::none}};
    for (const auto& [first, others] : mixed) {
        Fixture all(tiny(GetParam().name), first, true);
        Fixture some(tiny(GetParam().name), first, true, 7, false, 1, others);
        some.gradients();
        EXPECT_EQ(memcmp(none.grads(), some.grads(), none.m.table.size * sizeof(real)), 0) << (int)first << (int)others;
        EXPECT_GT(some.m.arena.bytes(), all.m.arena.bytes());
    }
}

TEST_P(Family, TheFirstMicroBatchSetsWhatOthersAddTo) {
    Fixture added(tiny(GetParam().name), Recompute::none, true), set(tiny(GetParam().name), Recompute::none, true);
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

// One micro-batch's gradients, then two.
TEST_P(Family, Bf16GradientsAreRoundedOncePerMicroBatch) {
    const int all = 1000;  // rows of logits: one contribution to the head
    Fixture exact(tiny(GetParam().name), Recompute::none, true, all),
        f(tiny(GetParam().name), Recompute::full, true, all, true);
    Fixture parts(tiny(GetParam().name), Recompute::full, true, all, true),
        cut(tiny(GetParam().name), Recompute::full, true, 7, true);
    parts.m.micro_grads.elements_at_a_time = 1;  // 16 rows of a matrix
    exact.gradients();
    bf16* stored = (bf16*)f.m.grads.data;
    for (const TensorSpec& t : f.m.table.rows) std::fill_n(stored + t.offset, t.size(), bf16(NAN));
    int nearest = 0, other = 0;
    for (const int micro_batches : {1, 2}) {
        for (Fixture* each : {&f, &parts, &cut}) {
            each->pass().in.gradients = micro_batches == 1 ? Acc::Set : Acc::Add;
            each->pass().in.rounding_key = 77 + 2 * micro_batches;
            begin_gradients(each->ctx, each->m);
            model_forward(each->pass());
            head(each->pass(), each->scale(), 1e-2, true);
            model_backward(each->pass(), [](int) {});
        }
        EXPECT_EQ(memcmp(f.m.grads.data, parts.m.grads.data, f.m.table.size * sizeof(bf16)), 0);
        for (const TensorSpec& t : f.m.table.rows) {
            const bool of_both = f.m.c.tied && t.name == "wte";  // its contributions are rounded separately
            double largest = 0;
            for (size_t i = t.offset; i < t.offset + t.size(); i++) largest = std::max(largest, std::abs(exact.grads()[i]));
            // Logits of 7 rows at a time are several contributions to the head, each rounded.
            const int cuts = ceil_div(f.pass().N(), 7);
            for (size_t i = t.offset; i < t.offset + t.size(); i++) {
                const bf16 in_cuts = ((bf16*)cut.m.grads.data)[i];
                if (&t != f.m.specs.head) ASSERT_EQ(in_cuts.bits, stored[i].bits) << t.name;
                else ASSERT_NEAR((float)in_cuts, (float)stored[i], (cuts + 2) * micro_batches * 0x1p-7 * largest) << t.name;
                const double once = exact.grads()[i];
                if (micro_batches == 1 && !of_both) {
                    ASSERT_EQ(stored[i].bits, bf16((float)once).bits) << t.name;
                    continue;
                }
                // A rounding error is below one unit in the last place, 2^-7 of the result.
                const double allowed = of_both ? 4 * micro_batches * 0x1p-7 * largest : 3 * 0x1p-7 * std::abs(once);
                ASSERT_NEAR((float)stored[i], micro_batches * once, allowed + 1e-30) << t.name;
                if (of_both || once == 0) continue;
                (stored[i].bits == bf16((float)((double)(float)bf16((float)once) + once)).bits ? nearest : other)++;
            }
        }
    }
    EXPECT_GT(std::min(nearest, other), 100) << "the second is rounded stochastically";
    for (const TensorSpec& t : f.m.table.rows)  // padding between tensors stays zero
        for (size_t i = t.offset + t.size(); i % 64 != 0; i++) EXPECT_EQ(stored[i].bits, 0) << t.name;
}

TEST_P(Family, PaddedVocabularyTakesNoPart) {
    Fixture f(tiny(GetParam().name), Recompute::none, false);
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
    Fixture f(tiny(GetParam().name), Recompute::none, false);
    const double all = f.loss();
    const std::vector<real> before(f.m.a.loss, f.m.a.loss + f.batch.T - 1);
    f.batch.tokens[f.batch.T - 1] = (f.batch.tokens[f.batch.T - 1] + 1) % f.m.c.V;
    f.upload();
    EXPECT_NE(f.loss(), all);
    for (int t = 0; t < f.batch.T - 1; t++) EXPECT_EQ(before[t], f.m.a.loss[t]) << t;
}

TEST_P(Family, GenerationWithACacheEqualsTheFullForward) {
    Fixture f(tiny(GetParam().name), Recompute::inference, false, 100);
    const int T = f.batch.T, V = f.m.c.V;
    std::vector<int> tokens(f.batch.tokens.begin(), f.batch.tokens.begin() + T);
    Generator generator(f.ctx, f.m);
    for (int prompt : {1, 4, T}) {
        generator.prompt(0, {tokens.begin(), tokens.begin() + prompt});
        for (int t = prompt; t < T; t++) generator.append({{0, tokens[t]}});
        const std::vector<float> cached = generator.logits();
        f.upload();  // the generator's tokens have replaced them
        model_forward(f.pass());
        head(f.pass(), 0, 0, false);
        const floatX* full = f.m.a.logits + (size_t)(T - 1) * f.m.c.Vp;
        const double cap = f.m.c.logit_softcap;
        for (int i = 0; i < V; i++) {
            const double want = cap > 0 ? cap * std::tanh(full[i] / cap) : full[i];
            EXPECT_NEAR(cached[i], want, 1e-5 * (1 + std::abs(want))) << "token " << i << " after a prompt of " << prompt;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Model, Family, testing::ValuesIn(variants), [](const auto& test) {
    std::string name = test.param.name;
    for (char& c : name)
        if (!isalnum((unsigned char)c)) c = '_';
    return name;
});

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
