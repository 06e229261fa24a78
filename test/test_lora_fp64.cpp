// Low-rank adapters in double: every gradient compared with finite differences, for each family and several choices of
// matrices, also with dropout of their inputs; frozen weights stay unchanged; merged matrices compute the same; the tables
// of PEFT's names; recomputation gives the same bits.
#include <gtest/gtest.h>

#include <random>

#include "../llmc/commands/merge.h"
#include "trainer.h"
#include "finite_differences.h"
#include "model_files.h"

namespace test_lora_fp64 {
namespace {

using Names = std::vector<std::string>;

ModelConfig tiny(const std::string& family, const Names& targets, int rank) {
    ModelConfig c;
    set_family(c, family);
    c.L = 2;
    c.C = 24;
    c.NH = 6;
    c.NKV = c.qkv_bias ? 6 : 3;
    c.F = family == "bloom" ? 4 * c.C : 20;
    c.T = 11;
    c.V = 29;
    c.init_std = 0.2;
    if (c.mixture.shared) c.mixture = {5, 2, false, false, 1, 12, 28, true, {1}};
    if (c.mixture.on()) c.mixture.experts = 5, c.mixture.topk = 2;
    if (c.parallel()) c.rotary_fraction = 0.5;  // in GPT-NeoX: 2 of 4 dimensions, not 1
    if (c.norm_place == NormPlace::both) {      // Gemma 2 and 3
        c.head_size = 8;
        c.window = 5;
        c.full_interval = 2;
        c.embedding_scale = 5;
        c.attention_softcap = 2;
        c.logit_softcap = 3;
    }
    check_config(c);
    pad_vocabulary(c, 16);
    if (rank) {
        c.lora.rank = rank;
        c.lora.alpha = 5;
        c.lora.modules = lora_modules(c, targets);
    }
    return c;
}

struct Fixture {
    be::Ctx ctx{2};
    Model m;
    Batch batch;
    explicit Fixture(const ModelConfig& c, Recompute recompute = Recompute::none) : m(c) {
        std::mt19937 rng(7);
        batch.B = 2;
        batch.T = c.T - 1;
        for (int i = 0; i < batch.B * batch.T; i++) {
            batch.tokens.push_back((int)(rng() % c.V));
            batch.targets.push_back(i % 5 == 3 ? -1 : (int)(rng() % c.V));
            batch.positions.push_back(i % batch.T);
        }
        plan_memory(m, recompute, batch.B, batch.T, 7);
        allocate(ctx, m);
        initialize(ctx, m, 42);
        upload(ctx, m, batch, m.a.micro_batch());
    }
    // B starts at zero, where A has no gradient.
    void move_adapters() {
        std::mt19937 rng(3);
        for (const TensorSpec& t : m.table.rows)
            for (size_t i = 0; i < t.size(); i++) m.params[t.offset + i] += 0.3 * ((rng() % 1000) / 500.0 - 1);
    }
    // As in training: with the adapters' dropout, using the masks of some sample of the run.
    void drop(double rate, int64_t sample = 5) {
        m.c.lora.dropout = rate;
        pass().in.drops = true;
        pass().in.seed = 9;
        pass().in.sample = sample;
    }
    Pass pass() { return {ctx, m, m.a.micro_batch()}; }
    real* grads() { return (real*)m.grads.data; }
    double loss() {
        clear_sums(ctx, m);
        model_forward(pass());
        head(pass(), 0, 1e-2, false);
        const LossSums sums = read_sums(ctx, m);
        return (sums.ce + sums.z) / 16;
    }
    void gradients(Acc acc = Acc::Set) {
        pass().in.gradients = acc;
        begin_gradients(ctx, m);
        model_forward(pass());
        head(pass(), 1.0 / 16, 1e-2, true);
        model_backward(pass(), [](int) {});
    }
    uint32_t hash_of_frozen() const { return crc32c(m.frozen->params, m.frozen->table.size * sizeof(floatX)); }
};

struct Case {
    const char* family;
    Names targets;
    int rank;
};
const Case cases[] = {
    {"llama", {"all"}, 3},       {"llama", {"q", "v"}, 2}, {"llama", {"k", "up", "down"}, 1}, {"gpt2", {"all"}, 2},
    {"gpt2", {"c_proj"}, 4},     {"bloom", {"all"}, 2},    {"bloom", {"qkv", "up"}, 3},       {"gpt_neox", {"all"}, 2},
    {"qwen3", {"all"}, 3},       {"olmo2", {"all"}, 3},    {"olmo2", {"v", "o", "down"}, 2},  {"gemma2", {"all"}, 2},
    {"gemma3_text", {"all"}, 2}, {"mixtral", {"all"}, 3},  {"qwen3_moe", {"fc2", "q"}, 2},    {"olmoe", {"gate"}, 2},
    {"qwen2_moe", {"all"}, 2},   {"gpt_oss", {"all"}, 2},  {"gpt_oss", {"down"}, 3},          {"granitemoe", {"fc1", "q"}, 3}};

TEST(Lora, GradientsEqualFiniteDifferencesAndTheModelStaysFrozen) {
    for (const Case& k : cases) {
        Fixture f(tiny(k.family, k.targets, k.rank));
        f.move_adapters();
        const uint32_t before = f.hash_of_frozen();
        f.gradients();
        test::expect_finite_differences(f.m.table, f.m.params, f.grads(), 8, k.family, [&] { return f.loss(); });
        EXPECT_EQ(f.hash_of_frozen(), before);
    }
}

TEST(Lora, MicroBatchesAddAndRecomputationKeepsTheBits) {
    for (const char* family : {"llama", "mixtral"}) {
        const ModelConfig c = tiny(family, {"all"}, 3);
        Fixture none(c);
        none.move_adapters();
        none.gradients();
        const std::vector<real> once(none.grads(), none.grads() + none.m.table.size);
        for (const Recompute recompute : {Recompute::selective, Recompute::mlp, Recompute::full}) {
            Fixture other(c, recompute);
            other.move_adapters();
            other.gradients();
            EXPECT_EQ(memcmp(once.data(), other.grads(), once.size() * sizeof(real)), 0) << (int)recompute;
        }
        none.gradients(Acc::Add);
        for (size_t i = 0; i < once.size(); i++) ASSERT_NEAR(none.grads()[i], 2 * once[i], 1e-15 + 1e-12 * std::abs(once[i]));
    }
}

TEST(Lora, DropoutOfTheirInputsHasItsGradientAndItsMasksEveryPolicyOfRecomputation) {
    for (const Case& k : {cases[0], cases[3], cases[5], cases[7], cases[9], cases[13]}) {
        ModelConfig c = tiny(k.family, k.targets, k.rank);
        c.lora.dropout = 0.4;
        Fixture none(c);
        none.move_adapters();
        Fixture plain(tiny(k.family, k.targets, k.rank));
        plain.move_adapters();
        const double without = none.loss();
        EXPECT_EQ(without, plain.loss()) << "what evaluates drops nothing";
        none.drop(0.4);
        const double with = none.loss();
        EXPECT_GT(std::abs(with - without), 1e-3) << k.family;
        none.gradients();
        test::expect_finite_differences(none.m.table, none.m.params, none.grads(), 8, k.family, [&] { return none.loss(); });
        none.drop(0.4, 6);
        EXPECT_NE(none.loss(), with) << "another sample has other masks";
        none.drop(0.4);
        none.gradients();
        for (const Recompute recompute : {Recompute::selective, Recompute::mlp, Recompute::full}) {
            Fixture other(c, recompute);
            other.move_adapters();
            other.drop(0.4);
            other.gradients();
            EXPECT_EQ(memcmp(none.grads(), other.grads(), none.m.table.size * sizeof(real)), 0) << k.family << (int)recompute;
        }
    }
}

// A micro-batch of two samples has the masks of two micro-batches of one.
TEST(Lora, DropoutDoesNotDependOnTheMicroBatch) {
    for (const char* family : {"llama", "mixtral"}) {
        ModelConfig c = tiny(family, {"all"}, 3);
        c.lora.dropout = 0.4;
        Fixture both(c);
        both.move_adapters();
        both.drop(0.4, 6);
        const double expected = both.loss();
        double sum = 0;
        for (int i = 0; i < 2; i++) {
            Fixture one(c);
            one.move_adapters();
            Batch half = one.batch;
            half.B = 1;
            for (std::vector<int>* of : {&half.tokens, &half.targets, &half.positions})
                *of = {of->begin() + i * half.T, of->begin() + (i + 1) * half.T};
            upload(one.ctx, one.m, half, one.m.a.micro_batch());
            one.drop(0.4, 6 + i);
            sum += one.loss();
        }
        EXPECT_NEAR(sum, expected, 1e-13 * expected);
    }
}

TEST(Lora, NewAdaptersChangeNothingAndMergedMatricesComputeTheSame) {
    for (const Case& k : cases) {
        Fixture f(tiny(k.family, k.targets, k.rank)), plain(tiny(k.family, {}, 0));
        EXPECT_EQ(f.loss(), plain.loss()) << k.family;  // B is zero
        f.move_adapters();
        const double adapted = f.loss();
        EXPECT_GT(std::abs(adapted - plain.loss()), 1e-3) << k.family;
        merge_adapters(f.m.c, plain.m.table, plain.m.params, f.m.params);
        EXPECT_NEAR(plain.loss(), adapted, 1e-13 * adapted) << k.family;
    }
}

// A quantized model has the outputs of the model of its decoded weights, to the last bit, with any recomputation; merging
// starts from the same weights.
TEST(Lora, QuantizedWeightsComputeAsTheirDecodedValues) {
    for (const char* family : {"llama", "gpt2", "olmo2"})
        for (const WeightFormat format :
             {WeightFormat::nf4, WeightFormat::nf4_double, WeightFormat::q8_0, WeightFormat::q4_k}) {
            ModelConfig c = tiny(family, {}, 0);
            c.C = c.F = format == WeightFormat::q4_k ? 256 : 64;
            c.NH = c.NKV = 4;
            const Fixture whole(c);
            c.lora.rank = 3;
            c.lora.alpha = 5;
            c.lora.modules = lora_modules(c, {std::string(family) == "llama" ? "v" : "all"});  // also matrices without adapters
            Fixture plain(c);
            c.base_format = format;
            Fixture quantized(c);
            const ParameterTable &table = plain.m.frozen->table, &coded = quantized.m.frozen->table;
            EXPECT_GT(table.size, coded.size + coded.quantized_bytes / 2);
            size_t matrices = 0;
            for (size_t i = 0; i < coded.rows.size(); i++) {
                const TensorSpec& t = coded.rows[i];
                floatX* const to = plain.m.frozen->params + table.rows[i].offset;
                const std::vector<floatX> before(to, to + t.size());
                if (t.quantized()) dequantize_tensor(plain.ctx, to, t, quantized.m.frozen->quantized + t.offset);
                else ASSERT_EQ(memcmp(to, quantized.m.frozen->params + t.offset, t.size() * sizeof *to), 0) << t.name;
                if (!t.quantized()) continue;
                matrices++;
                double worst = 0, largest = 0;
                for (size_t k = 0; k < t.size(); k++) {
                    worst = std::max(worst, std::abs(to[k] - before[k]));
                    largest = std::max(largest, std::abs(before[k]));
                }
                // Half of the largest gap between levels, 0.304, in nf4-double times a scale that may be too large; half a step
                // of 1/127 and d's rounding to fp16; half of a step in 15 of twice the largest number, and clipped numbers.
                const double bound = format == WeightFormat::nf4          ? 0.1521
                                     : format == WeightFormat::nf4_double ? 0.17
                                     : format == WeightFormat::q8_0       ? 0.5 / 127 + 0x1p-11
                                                                          : 0.2;
                EXPECT_LE(worst, largest * bound) << t.name;
                EXPECT_GT(worst, 0) << t.name;
            }
            EXPECT_EQ(matrices, 4u * 2);
            ModelConfig alone = c;  // without adapters, for inference
            alone.lora = {};
            Fixture inference(alone, Recompute::inference);
            EXPECT_EQ(inference.loss(), plain.loss());  // B is zero
            EXPECT_EQ(inference.m.table.size, 0u);
            plain.move_adapters();
            plain.gradients();
            for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::mlp, Recompute::full}) {
                Fixture f(c, recompute);
                f.move_adapters();
                f.gradients();
                EXPECT_EQ(memcmp(plain.grads(), f.grads(), f.m.table.size * sizeof(real)), 0) << family << (int)recompute;
                EXPECT_EQ(plain.loss(), f.loss());
            }
            const ParameterTable model = ParameterTable(c);
            std::vector<real> weights(whole.m.params, whole.m.params + model.size);
            round_to_format(c, model.part, model, weights.data());
            for (size_t i = 0; i < coded.rows.size(); i++)
                EXPECT_EQ(memcmp(&weights[model.rows[i].offset], plain.m.frozen->params + table.rows[i].offset,
                                 table.rows[i].size() * sizeof(real)),
                          0)
                    << table.rows[i].name;
        }
}

TEST(Lora, TrainsInAFractionOfTheMemory) {
    const auto bytes = [](const Fixture& f, const std::string& purpose) {
        size_t sum = 0;
        for (const auto& [name, n] : f.m.arena.purposes())
            if (name.find(purpose) == 0) sum += n;
        return sum;
    };
    const Fixture lora(tiny("llama", {"all"}, 2)), full(tiny("llama", {}, 0));
    EXPECT_GE(bytes(lora, "parameters (frozen)"), full.m.table.size * sizeof(floatX));
    for (const char* purpose : {"gradients", "Adam moments"}) EXPECT_LT(bytes(lora, purpose), bytes(full, purpose)) << purpose;
    EXPECT_EQ(lora.m.shards.size, lora.m.table.size);
    EXPECT_LT(lora.m.table.size, full.m.table.size);
}

TEST(Lora, TablesHavePeftsNames) {
    const ModelConfig c = tiny("llama", {"q", "v", "gate", "down"}, 4);
    EXPECT_EQ(c.lora.modules, (Names{"self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"}));
    std::map<std::string, std::vector<int64_t>> shapes;
    size_t parameters = 0;
    for (const TensorSpec& t : trained_table(c).rows)
        for (const HfTensor& hf : t.hf) {
            shapes[hf.name] = file_shape(t, hf);
            parameters += (size_t)hf.rows * t.whole_cols;
        }
    const std::string layer = "base_model.model.model.layers.1.";
    EXPECT_EQ(shapes.size(), 2u * 4 * 2);
    EXPECT_EQ(trained_table(c).trained, parameters);
    using Shape = std::vector<int64_t>;
    EXPECT_EQ(shapes.at(layer + "self_attn.q_proj.lora_A.weight"), (Shape{4, 24}));
    EXPECT_EQ(shapes.at(layer + "self_attn.v_proj.lora_B.weight"), (Shape{12, 4}));
    EXPECT_EQ(shapes.at(layer + "mlp.gate_proj.lora_B.weight"), (Shape{20, 4}));
    EXPECT_EQ(shapes.at(layer + "mlp.down_proj.lora_A.weight"), (Shape{4, 20}));
    EXPECT_EQ(peft_modules(c), (Names{"q_proj", "v_proj", "gate_proj", "down_proj"}));
    // Each expert has a matrix of the name.
    const ModelConfig mixture = tiny("mixtral", {"gate", "w2"}, 4);
    EXPECT_EQ(mixture.lora.modules, (Names{"block_sparse_moe.experts.w1", "block_sparse_moe.experts.w2"}));
    EXPECT_EQ(peft_modules(mixture), (Names{"w1", "w2"}));
    size_t of_experts = 0;
    for (const TensorSpec& t : trained_table(mixture).rows)
        for (const HfTensor& hf : t.hf) {
            const char* const named[] = {"w1.lora_A", "w1.lora_B", "w2.lora_A", "w2.lora_B"};
            EXPECT_TRUE(std::any_of(std::begin(named), std::end(named), [&](const std::string& n) {
                return hf.name.find(".block_sparse_moe.experts.") != std::string::npos && ends_with(hf.name, n + ".weight");
            })) << hf.name;
            of_experts++;
        }
    EXPECT_EQ(of_experts, 2u * 5 * 4);
    EXPECT_EQ(trained_table(mixture).trained, 2u * 5 * 4 * (24 + 20 + 20 + 24));
    // Experts in one tensor of the files are one parameter; gate and up have one A. The outer of PEFT's modules is down_proj.
    const ModelConfig stacked = tiny("granitemoe", {"q", "fc1", "down"}, 4), oss = tiny("gpt_oss", {"gate_up_proj"}, 4);
    const std::string experts = "block_sparse_moe.experts";
    EXPECT_EQ(stacked.lora.modules, (Names{"self_attn.q_proj", experts + ".gate_up_proj", experts + ".down_proj"}));
    EXPECT_EQ(peft_modules(stacked), Names{"q_proj"});
    EXPECT_EQ(peft_parameters(stacked), (Names{experts + ".gate_up_proj", experts + ".down_proj"}));
    shapes.clear();
    for (const ModelConfig& model : {stacked, oss})
        for (const TensorSpec& t : trained_table(model).rows)
            for (const HfTensor& hf : t.hf) shapes[hf.name] = file_shape(t, hf);
    EXPECT_EQ(shapes.size(), 2u * 2 * (3 + 1));
    EXPECT_EQ(shapes.at(layer + experts + ".lora_A.weight"), (Shape{5 * 4, 20}));
    EXPECT_EQ(shapes.at(layer + experts + ".lora_B.weight"), (Shape{24, 5 * 4}));
    EXPECT_EQ(shapes.at(layer + experts + ".base_layer.lora_A.weight"), (Shape{5 * 4, 24}));
    EXPECT_EQ(shapes.at(layer + experts + ".base_layer.lora_B.weight"), (Shape{2 * 20, 5 * 4}));
    EXPECT_EQ(shapes.at(layer + "mlp.experts.lora_B.weight"), (Shape{2 * 20, 5 * 4}));
    // c_proj is the last part of two names in GPT-2: if only one is meant, its full path is used.
    EXPECT_EQ(peft_modules(tiny("gpt2", {"o", "qkv"}, 1)), (Names{"c_attn", "attn.c_proj"}));
    EXPECT_EQ(peft_modules(tiny("gpt2", {"c_proj"}, 1)), (Names{"c_proj"}));
    // The matrices of shared experts also end in gate_proj.
    const Names several = peft_modules(tiny("qwen2_moe", {"q", "gate"}, 1));
    EXPECT_EQ(several.size(), 1u + 5 + 1);
    EXPECT_EQ(several[5], "mlp.experts.4.gate_proj");
    EXPECT_EQ(several[6], "mlp.gate_proj");
    try {
        tiny("gpt2", {"q_proj"}, 1);
        FAIL() << "GPT-2 has no q_proj";
    } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("all, attn.c_attn, c_attn, qkv, attn.c_proj"), std::string::npos) << e.what();
    }
}

// Models with adapters on all matrices, which up to 4 ranks can share.
std::vector<ModelConfig> models_for_ranks() {
    std::vector<ModelConfig> models;
    for (const char* family : {"llama", "mixtral", "gpt_oss", "granitemoe"}) {
        ModelConfig c = tiny(family, {"all"}, 3);
        c.NH = 4;
        c.NKV = 2;
        c.C = 16;
        models.push_back(c);
    }
    return models;
}

// Each rank's rows equal the whole tensors' rows, wherever heads and columns are split.
TEST(Lora, RanksHoldPartsOfTheWhole) {
    for (const ModelConfig& c : models_for_ranks()) {
        const ParameterTable whole = trained_table(c);
        std::vector<real> values(whole.size);
        for (size_t i = 0; i < values.size(); i++) values[i] = (real)i;
        for (const int tp : {2, 4})
            for (int rank = 0; rank < tp; rank++) {
                Part part = whole_model(c);
                part.tp = {tp, rank};
                const ParameterTable table = trained_table(c, part);
                ASSERT_EQ(table.rows.size(), whole.rows.size());
                for (size_t k = 0; k < table.rows.size(); k++) {
                    const TensorSpec &mine = table.rows[k], &all = whole.rows[k];
                    ASSERT_EQ(mine.name, all.name);
                    EXPECT_EQ(mine.whole_rows, all.rows);
                    EXPECT_EQ(mine.replicated, mine.name.find("proj_lora_b") != std::string::npos ||
                                                   mine.name.find("fc2_lora_b") != std::string::npos ||
                                                   mine.name.find("qkv_lora_a") != std::string::npos ||
                                                   mine.name.find("fc1_lora_a") != std::string::npos);
                    EXPECT_EQ(mine.replicated, mine.partial_sum);
                    size_t held = 0;
                    for (const HfTensor& t : mine.hf) for_each_run(mine, t, [&](const TensorRun& run) { held += run.n; });
                    EXPECT_EQ(held, mine.size()) << mine.name << " on rank " << rank << " of " << tp;
                }
            }
    }
}

// The parts of the ranks, each written to its place, give the files of one rank.
TEST(Lora, RanksWriteTheFilesOfOne) {
    for (const ModelConfig& c : models_for_ranks()) {
        const ParameterTable whole = trained_table(c);
        std::map<std::string, std::vector<real>> expected, files;
        const auto write = [](const TensorSpec& t, real* numbers, auto& to) {
            for (const HfTensor& hf : t.hf) {
                to[hf.name].resize((size_t)hf.rows * t.whole_cols);
                convert_layout(t, hf, numbers, to[hf.name].data(), true);
            }
        };
        std::vector<real> numbers(whole.size);
        for (size_t i = 0; i < numbers.size(); i++) numbers[i] = (real)(i + 1);
        for (const TensorSpec& t : whole.rows) write(t, &numbers[t.offset], expected);
        const int ep = c.mixture.on() ? c.mixture.experts : 1;
        for (int rank = 0; rank < 2 * ep; rank++) {
            Part part = whole_model(c);
            part.tp = {2, rank % 2};
            part.ep = {ep, rank / 2};
            const ParameterTable table = trained_table(c, part);
            for (size_t k = 0; k < table.rows.size(); k++) {
                const TensorSpec &mine = table.rows[k], &all = whole.rows[k];
                std::vector<real> held(mine.size());
                for (size_t i = 0; i < held.size(); i++) {
                    const int row = mine.whole_row((int)(i / (size_t)mine.cols)),
                              col = mine.first_col + (int)(i % (size_t)mine.cols);
                    held[i] = numbers[all.offset + (size_t)row * all.cols + (size_t)col];
                }
                write(mine, held.data(), files);
            }
        }
        EXPECT_EQ(files, expected) << c.family;
        for (const auto& [name, file] : expected)
            EXPECT_EQ(std::set<real>(file.begin(), file.end()).size(), file.size()) << name;
    }
}

}  // namespace
}  // namespace test_lora_fp64
