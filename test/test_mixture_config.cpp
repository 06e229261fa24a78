// Mixtures of experts in configuration: options as Megatron-LM has them, refusals by name, counts of parameters and of FLOPs.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../llmc/cpu/attention.h"
#include "../llmc/model/flops.h"
#include "../llmc/model/hf_config.h"
#include "../llmc/model/lora.h"
#include "../llmc/model/presets.h"
#include "../llmc/optimizer/expert_biases.h"
#include "../llmc/plan/from_options.h"
#include "../llmc/plan/planner.h"
#include "../llmc/run/expert_watch.h"
#include "files.h"
#include "testing.h"

namespace test_mixture_config {

using test::expect_error;
using Arguments = std::vector<std::string>;

TrainOptions parsed(const Arguments& further) {
    Arguments arguments = {"--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "99"};
    for (const char* flag : {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"})
        arguments.emplace_back(flag);
    for (const char* word : {"--normalization", "RMSNorm", "--position-embedding-type", "rope", "--seq-length", "32"})
        arguments.emplace_back(word);
    arguments.insert(arguments.end(), further.begin(), further.end());
    TrainOptions o;
    EXPECT_TRUE(cli::parse("train", o, arguments));
    return o;
}
ModelConfig configured(const Arguments& further) { return configure_model(parsed(further), nullptr); }

TEST(MixtureConfig, OptionsOfMegatron) {
    const ModelConfig plain = configured({"--num-experts", "8"});
    EXPECT_EQ(plain.family, "mixtral");
    EXPECT_EQ(plain.mixture.experts, 8);
    EXPECT_EQ(plain.mixture.topk, 2);
    EXPECT_TRUE(plain.mixture.normalize && !plain.mixture.sigmoid && plain.mixture.scale == 1);
    EXPECT_EQ(plain.F, 192) << "SwiGLU's default width";
    const ModelConfig all =
        configured({"--num-experts", "5", "--moe-router-topk", "3", "--ffn-hidden-size", "96", "--moe-ffn-hidden-size", "40",
                    "--moe-router-score-function", "sigmoid", "--moe-router-topk-scaling-factor", "2.5"});
    EXPECT_EQ(all.family, "train_gpt");
    EXPECT_EQ(all.F, 40);
    EXPECT_TRUE(all.mixture.topk == 3 && all.mixture.sigmoid && all.mixture.normalize && all.mixture.scale == 2.5);
    EXPECT_FALSE(configured({"--num-experts", "8", "--moe-router-pre-softmax"}).mixture.normalize);
    EXPECT_FALSE(configured({"--num-experts", "8", "--moe-router-score-function", "sigmoid", "--moe-router-topk", "1"})
                     .mixture.normalize)
        << "as Megatron-LM";
    EXPECT_EQ(configured({"--preset", "olmoe-1b-7b", "--moe-router-topk", "4"}).mixture.topk, 4);
    const ModelConfig deepseek = configured({"--num-experts", "8", "--moe-router-topk", "4", "--moe-router-num-groups", "4",
                                             "--moe-router-group-topk", "2", "--moe-router-score-function", "sigmoid",
                                             "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.01"});
    EXPECT_EQ(deepseek.family, "train_gpt");
    EXPECT_TRUE(deepseek.mixture.groups == 4 && deepseek.mixture.group_topk == 2 && deepseek.mixture.bias);
    const auto written = to_hf_config(deepseek, "");
    EXPECT_EQ(written["topk_method"], "noaux_tc");
    EXPECT_TRUE(written["n_group"] == 4 && written["topk_group"] == 2);
    EXPECT_EQ(configured({"--num-experts", "8", "--moe-router-num-groups", "2", "--moe-router-group-topk", "2"}).family,
              "mixtral")
        << "all groups are all experts";

    EXPECT_TRUE(config_from_preset("gpt-oss-20b").mlp_bias);
    EXPECT_FALSE(configured({"--preset", "gpt-oss-20b", "--no-add-mlp-bias"}).mlp_bias);
    EXPECT_TRUE(configured({"--num-experts", "8", "--add-mlp-bias"}).mlp_bias);

    const TrainOptions o =
        parsed({"--num-experts", "8", "--moe-aux-loss-coeff", "1e-2", "--moe-z-loss-coeff", "1e-3",
                "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-router-dtype", "fp32", "--moe-grouped-gemm",
                "--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "4", "--moe-permute-fusion"});
    EXPECT_EQ(o.moe_aux_loss_coeff, 1e-2);
    EXPECT_EQ(o.moe_z_loss_coeff, 1e-3);
    EXPECT_EQ(layout_of(o).ep, 4);
    EXPECT_EQ(o.moe_token_dispatcher_type, "alltoall");
    EXPECT_EQ(o.notes.size(), 3u);
}

TEST(MixtureConfig, RefusalsByName) {
    const std::pair<Arguments, Arguments> rows[] = {
        {{"--moe-router-load-balancing-type", "global_aux_loss"}, {"aux_loss, none", "HINT: aux_loss", "not available yet"}},
        {{"--moe-router-load-balancing-type", "none", "--moe-aux-loss-coeff", "0.1"}, {"0.1", "none", "HINT"}},
        {{"--moe-router-topk", "9"}, {"--moe-router-topk is 9", "--num-experts, 8"}},
        {{"--moe-router-topk", "1"}, {"--moe-router-topk 1", "HINT: --moe-router-pre-softmax"}},
        {{"--num-experts", "1", "--moe-router-pre-softmax"}, {"--num-experts 1", "softmax", "learns nothing", "HINT"}},
        {{"--num-experts", "1"}, {"--num-experts 1", "softmax", "HINT"}},
        {{"--moe-router-pre-softmax", "--moe-router-score-function", "sigmoid"}, {"pre-softmax", "sigmoid", "HINT"}},
        {{"--moe-router-dtype", "fp64"}, {"fp64", "only fp32"}},
        {{"--moe-layer-freq", "0"}, {"--moe-layer-freq is '0'", "[0]*1+[1]*23"}},
        {{"--moe-layer-freq", "[0]*2"}, {"makes all layers dense", "HINT"}},
        {{"--moe-layer-freq", "[0]*1+[1]*2"}, {"lists 3 layers", "the model has 2"}},
        {{"--moe-layer-freq", "[0]+"}, {"--moe-layer-freq is '[0]+'", "expected N"}},
        {{"--moe-layer-freq", "([0,1]"}, {"--moe-layer-freq is '([0,1]'"}},
        {{"--moe-layer-freq", "[2,1]"}, {"--moe-layer-freq is '[2,1]'"}},
        {{"--mlp-only-layers", "0"}, {"--moe-layer-freq"}},
        {{"--moe-pad-expert-input-to-capacity"}, {"never padded"}},
        {{"--moe-token-drop-policy", "position"}, {"requires --moe-expert-capacity-factor"}},
        {{"--moe-expert-capacity-factor", "2", "--dpo-beta", "0.1"}, {"--moe-expert-capacity-factor", "--dpo-beta", "HINT"}},
        {{"--moe-token-dispatcher-type", "flex"}, {"moe-token-dispatcher-type is 'flex'", "allgather, alltoall"}},
        {{"--moe-shared-expert-gate"}, {"--moe-shared-expert-gate requires --moe-shared-expert-intermediate-size"}},
        {{"--n-shared-experts", "2"}, {"--moe-shared-expert-intermediate-size"}},
        {{"--moe-router-enable-expert-bias"}, {"sigmoid", "Megatron-LM", "HINT: --moe-router-score-function sigmoid"}},
        {{"--moe-router-bias-update-rate", "0.1"}, {"requires --moe-router-enable-expert-bias"}},
        {{"--moe-router-num-groups", "2"}, {"requires --moe-router-group-topk"}},
        {{"--moe-router-group-topk", "2"}, {"requires --moe-router-num-groups"}},
        {{"--moe-router-num-groups", "3", "--moe-router-group-topk", "1"},
         {"--moe-router-num-groups is 3", "divide --num-experts, 8"}},
        {{"--moe-router-num-groups", "4", "--moe-router-group-topk", "3"}, {"moe-router-group-topk is 3", "divide", "2"}},
        {{"--moe-router-num-groups", "8", "--moe-router-group-topk", "1"}, {"moe-router-group-topk is 1", "at most 1 experts"}},
        {{"--moe-use-upcycling"}, {"--moe-use-upcycling requires --model DIR"}},
        {{"--norm-place", "parallel"}, {"norm-place parallel", "HINT: --norm-place before"}},
        {{"--parametrization", "mup", "--mup-base-width", "32"}, {"--parametrization mup", "HINT"}},
        {{"--dpo-beta", "0.1", "--moe-z-loss-coeff", "0.1"}, {"--moe-z-loss-coeff", "--dpo-beta", "HINT"}},
        {{"--ffn-hidden-size", "4000000", "--num-experts", "512"}, {"512 experts", "rows"}},
    };
    for (const auto& [options, parts] : rows)
        expect_error(
            [&, &given = options] {
                Arguments arguments = {"--num-experts", "8"};
                arguments.insert(arguments.end(), given.begin(), given.end());
                configured(arguments);
            },
            parts);
    const std::pair<Arguments, Arguments> without[] = {
        {{"--moe-router-topk", "2"}, {"--moe-router-topk requires --num-experts", "a mixture", "HINT"}},
        {{"--moe-aux-loss-coeff", "0.1"}, {"--moe-aux-loss-coeff requires"}},
        {{"--moe-router-num-groups", "2"}, {"--moe-router-num-groups requires --num-experts"}},
        {{"--moe-router-enable-expert-bias"}, {"--moe-router-enable-expert-bias requires --num-experts"}},
        {{"--moe-router-load-balancing-type", "none"}, {"--moe-router-load-balancing-type requires"}},
        {{"--moe-ffn-hidden-size", "64"}, {"--moe-ffn-hidden-size requires"}},
        {{"--moe-layer-freq", "2"}, {"--moe-layer-freq requires"}},
        {{"--moe-shared-expert-intermediate-size", "64"}, {"--moe-shared-expert-intermediate-size requires --num-experts"}},
        {{"--ep", "2"}, {"--expert-model-parallel-size requires --num-experts"}},
    };
    for (const auto& [options, parts] : without) expect_error([&, &given = options] { configured(given); }, parts);
}

TEST(MixtureConfig, DenseLayersAsInMegatron) {
    using Layers = std::vector<int>;
    for (const auto& [pattern, dense] : {std::pair<const char*, Layers>{"1", {}},
                                         {"2", {1, 3, 5}},
                                         {"7", {1, 2, 3, 4, 5}},
                                         {"[0]*1+[1]*5", {0}},
                                         {"([0]*2+[1]*4)", {0, 1}},
                                         {"([0,1]+[1]*1) * 2", {0, 3}},
                                         {"[1, 1, 0, 1, 1, 0]", {2, 5}}})
        EXPECT_EQ(LayerPattern(pattern, 6).dense, dense) << pattern;
    const ModelConfig c = configured({"--num-layers", "3", "--num-experts", "8", "--moe-layer-freq", "[0]*1+[1]*2",
                                      "--ffn-hidden-size", "96", "--moe-ffn-hidden-size", "40"});
    EXPECT_EQ(c.family, "train_gpt");
    EXPECT_EQ(c.mixture.dense_layers, Layers{0});
    EXPECT_TRUE(c.F == 96 && c.expert_width() == 40 && c.mixtures() == 2 && !c.has_mixture(0) && c.has_mixture(1));
    const double attention = 4 * 64 * 64, dense = 3 * 64 * 96, mixture = 2 * 3 * 64 * 40 + 8 * 64;
    EXPECT_EQ(layer_products_flops(flop_sizes(c, 32)), 2 * (3 * attention + dense + 2 * mixture));
    const double norms = 7 * 64, vocabulary = 2 * 99 * 64;
    EXPECT_EQ((double)active_parameters(c) - norms - vocabulary, 3 * attention + dense + 2 * mixture);
    EXPECT_EQ(lora_modules(c, {"all", "gate"}).size(), 4u + 3 + 3);
    EXPECT_EQ(lora_modules(c, {"gate"}), (Arguments{"mlp.gate_proj", "mlp.experts.gate_proj"}));
    EXPECT_EQ(configured({"--num-experts", "8", "--moe-layer-freq", "1"}).family, "mixtral");
    const ModelConfig wider =
        configured({"--preset", "olmoe-1b-7b", "--moe-layer-freq", "[0]*1+[1]*1", "--ffn-hidden-size", "4096"});
    EXPECT_TRUE(wider.F == 4096 && wider.expert_width() == 1024) << "the preset's experts keep their width";
}

TEST(MixtureConfig, SharedExpertProcessesEveryToken) {
    const Arguments without = {"--num-experts", "8", "--moe-ffn-hidden-size", "40"};
    const auto with = [&](Arguments further) {
        further.insert(further.begin(), without.begin(), without.end());
        return configured(further);
    };
    const ModelConfig none = configured(without), plain = with({"--moe-shared-expert-intermediate-size", "48"});
    const ModelConfig c = with({"--moe-shared-expert-intermediate-size", "48", "--moe-shared-expert-gate",
                                "--moe-router-pre-softmax", "--add-qkv-bias"});
    EXPECT_EQ(c.family, "qwen2_moe");
    EXPECT_EQ(plain.family, "train_gpt");
    EXPECT_TRUE(plain.mixture.shared == 48 && !plain.mixture.shared_gate && c.mixture.shared_gate);
    const int64_t shared = 2 * 3 * 64 * 48, gate = 2 * 64, biases = 2 * 3 * 64;
    EXPECT_EQ(active_parameters(plain) - active_parameters(none), shared);
    EXPECT_EQ(active_parameters(c) - active_parameters(none), shared + gate + biases);
    const auto products = [](const ModelConfig& c) { return layer_products_flops(flop_sizes(c, 32)); };
    EXPECT_EQ(products(c) - products(none), 2 * (double)(shared + gate));
}

// Identifiers of tensors, which determine their initial weights, are the same on every rank, although layers differ.
TEST(MixtureConfig, TensorsOfDifferentLayersHaveOneIdentifier) {
    ModelConfig c = config_from_preset("mixture-tiny");
    c.L = 5;
    c.mixture.width = 32;
    c.mixture.dense_layers = {0, 3};
    const ParameterTable whole(c);
    for (size_t i = 0; i < whole.rows.size(); i++) EXPECT_EQ(whole.rows[i].id, (int)i);
    for (const std::vector<int>& layers : {std::vector<int>{1, 2}, {3, 4}, {0, 4}, {2}, {}}) {
        Part part;
        part.layers = layers;
        part.first = part.last = false;
        for (const TensorSpec& t : ParameterTable(c, part).rows) EXPECT_EQ(whole.rows[(size_t)t.id].name, t.name);
    }
}

TEST(MixtureConfig, CapacityIsRoundedUp) {
    for (const auto& [factor, capacity] : {std::pair{1.0, 5}, {1.25, 6}, {0.01, 1}, {100.0, 24}})
        EXPECT_EQ((ExpertCapacity{factor}.of({2, 4, 5, 3})), capacity) << factor << " of 24 / 5";
}

// An expert starves after three records below 1/8, and recovers with the first at 1/8.
TEST(MixtureConfig, StarvingExpertsAreNamed) {
    ExpertWatch watch;
    std::vector<std::string> said;
    const double loads[] = {0.1, 0.2, 0.1, 0.1, 0.1, 0.1, 0.125, 2};
    for (int64_t step = 1; step <= 8; step++) {
        MixtureLoad load;
        load.layers = {{3, 1, 0.25, {1.9, loads[step - 1]}}, {5, 1, 0, {1, 1}}};
        const auto record = watch.step(load, step, 8);
        ASSERT_TRUE(record);
        EXPECT_EQ(record->json["layers"][0]["load"][1], (int)std::llround(1000 * loads[step - 1]));
        EXPECT_EQ(record->json["layers"][0]["dropped"], 0.25);
        said.push_back(record->starving + "/" + record->recovered);
    }
    EXPECT_EQ(said, (std::vector<std::string>{"/", "/", "/", "/", "layer 3: 1/", "/", "/layer 3: 1", "/"}));
    int records = 0;
    for (int64_t step = 1; step <= 1000; step++) {
        MixtureLoad load;
        load.layers = {{0, 1, 0, {1, 1}}};
        if (const auto record = watch.step(load, step, 1000)) {
            EXPECT_EQ(record->json["layers"][0]["load"][0], 1000) << "a mean";
            records++;
        }
    }
    EXPECT_EQ(records, 167);
}

// bias += rate sign(mean load - load), by layer; a rank with some of the layers knows the biases of all.
TEST(MixtureConfig, BiasesMoveTowardTheMeanLoad) {
    be::Ctx ctx(1);
    ModelConfig c = config_from_preset("mixture-tiny");
    c.L = 3;
    c.mixture.experts = 6;  // a mean in which each load has a sixth would be 0.9999999999999999 of six times 1
    c.mixture.sigmoid = c.mixture.bias = true;
    Part part;
    part.layers = {2, 0};
    Arena arena;
    ExpertBiases biases;
    biases.plan(arena, c, part);
    arena.allocate(SIZE_MAX, "");
    const size_t each = RouterSums::size(6);
    std::vector<double> sums(3 * each, 7);
    const double loads[3][6] = {{10, 30, 20, 20, 20, 20}, {1, 1, 1, 1, 1, 1}, {1, 0, 0, 0, 0, 0}};
    for (size_t l = 0; l < 3; l++) std::copy_n(loads[l], 6, &sums[l * each + RouterSums::rows]);
    biases.move(ctx, sums, 0.25);
    biases.move(ctx, sums, 0.25);
    const std::vector<real> expected = {0.5, -0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.5, 0.5, 0.5, 0.5, 0.5, 0.5};
    EXPECT_EQ(biases.values(), expected);
    for (int e = 0; e < 6; e++) {
        EXPECT_EQ(biases.of_block(0)[e], expected[(size_t)(12 + e)]);
        EXPECT_EQ(biases.of_block(1)[e], expected[(size_t)e]);
    }
    c.mixture.bias = false;
    ExpertBiases none;
    none.plan(arena, c, part);
    EXPECT_EQ(none.of_block(0), nullptr);
}

// 5 experts, of which 3 process a token.
TEST(MixtureConfig, FlopsCountActiveExperts) {
    ModelConfig dense = configured({"--ffn-hidden-size", "40"}), c = dense;
    c.mixture.experts = 5;
    c.mixture.topk = 3;
    const double mlp = 3.0 * 64 * 40, router = 5 * 64, L = 2;
    const FlopSizes s = flop_sizes(c, 32), d = flop_sizes(dense, 32);
    EXPECT_DOUBLE_EQ(layer_products_flops(s) - layer_products_flops(d), 2 * L * (2 * mlp + router));
    EXPECT_DOUBLE_EQ(model_flops_per_token(c, 32) - model_flops_per_token(dense, 32), 6 * L * (2 * mlp + router));
    EXPECT_DOUBLE_EQ(fc1_flops(s), 3 * fc1_flops(d));
    // One row reads its own experts, many rows read all.
    EXPECT_DOUBLE_EQ(layer_weights(s, 1), layer_products_flops(s) / 2);
    EXPECT_DOUBLE_EQ(layer_weights(s, 1e6), layer_weights(d, 9) + L * (4 * mlp + router));
    EXPECT_DOUBLE_EQ(layer_weights(d, 1), layer_weights(d, 1e6));
    // Muon: 4 more MLPs of 3 matrices of 40 x 64, and the router, 5 x 64.
    const auto step = [](double small, double large) { return 4 * small * small * large + 2 * small * small * small; };
    EXPECT_DOUBLE_EQ(muon_flops(s, 7, false).layer - muon_flops(d, 7, false).layer, 7 * (12 * step(40, 64) + step(5, 64)));
    // Every parameter of matrices in layers and head, except idle experts, is multiplied once per token.
    const double norms = 5 * 64, embedding = 99 * 64;
    EXPECT_EQ(2 * ((double)active_parameters(c) - norms - embedding), layer_products_flops(s) + 2.0 * 99 * 64);
}

// A mixture of 2 of 8 plans the time of products with 2 MLPs, and of memory with 8.
TEST(MixtureConfig, PlansCountActiveExperts) {
    const auto planned = [](const char* experts, const char* width) {
        PlanInput in;
        in.c = configured(
            {"--hidden-size", "1024", "--num-attention-heads", "8", "--ffn-hidden-size", width, "--num-experts", experts});
        in.T = 1024;
        in.B = 2;
        in.global_batch = 8;
        in.world = 1;
        return make_plan(in);
    };
    const Plan dense = planned("0", "2048"), mixture = planned("8", "1024");
    EXPECT_GT(mixture.stages[0].forward_seconds, dense.stages[0].forward_seconds);
    EXPECT_LT(mixture.stages[0].forward_seconds, 1.1 * dense.stages[0].forward_seconds) << "router, and sums over experts";
    EXPECT_GT(mixture.update_seconds, 1.5 * dense.update_seconds);
}

// A plan of stages with different layers is as expensive as its layers.
TEST(MixtureConfig, PlansCountEachKindOfLayer) {
    const auto planned = [](const Arguments& further, int pp, const std::string& recompute) {
        Arguments options = {"--num-layers",  "4", "--hidden-size",     "1024", "--num-attention-heads", "8",
                             "--num-experts", "8", "--ffn-hidden-size", "4096", "--moe-ffn-hidden-size", "512"};
        options.insert(options.end(), further.begin(), further.end());
        PlanInput in;
        in.c = configured(options);
        in.T = 1024;
        in.B = 2;
        in.global_batch = 8;
        in.pp = in.world = pp;
        in.recompute = recompute;
        return make_plan(in);
    };
    const auto seconds = [](const StagePlan& s) { return s.forward_seconds + s.backward_seconds; };
    for (const char* recompute : {"none", "selective", "mlp", "full"}) {
        const Plan some = planned({"--moe-layer-freq", "[0,0,1,1]"}, 2, recompute), all = planned({}, 2, recompute);
        ASSERT_EQ(some.stages.size(), 2u);
        EXPECT_EQ(some.stages[0].layers + some.stages[1].layers, 4);
        EXPECT_EQ(some.stages[1].layers, 3) << "dense layers are wider, so the second stage has three";
        const Plan one = planned({"--moe-layer-freq", "[0,0,1,1]"}, 1, recompute);
        EXPECT_NEAR(seconds(one.stages[0]), seconds(some.stages[0]) + seconds(some.stages[1]), 1e-9) << recompute;
        EXPECT_GT(seconds(one.stages[0]), 1.2 * (seconds(all.stages[0]) + seconds(all.stages[1]))) << recompute;
    }
}

// A name selects the matrices of all experts; routers have none.
TEST(MixtureConfig, AdaptersAreOnAttentionAndExperts) {
    const ModelConfig c = config_from_preset("mixture-tiny");
    EXPECT_EQ(lora_modules(c, {"q", "down"}).size(), 2u);
    EXPECT_EQ(lora_modules(c, {"all"}).size(), 7u);
    EXPECT_EQ(lora_modules(c, {"fc1"}).size(), 2u);
    expect_error([&] { lora_modules(c, {"router"}); }, {"no matrix 'router'", "q_proj", "gate"});
}

}  // namespace test_mixture_config
