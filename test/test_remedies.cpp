// Changes to a run that does not fit in memory: the smallest that suffice come first.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "../llmc/plan/remedies.h"
#include "testing.h"

namespace test_remedies {

// A run with 8 GiB of memory for a rank's share of the model and 4 GiB per sample, or a quarter of that with full
// recomputation.
TEST(Remedies, AreTheSmallestChangesThatFit) {
    TrainOptions o;
    o.micro_batch_size = 8;
    o.tensor_model_parallel_size = 1;
    const auto bytes_of = [](const TrainOptions& p, int) {
        if (p.tensor_model_parallel_size > 4) throw Error("too few heads");
        const double part = p.tensor_model_parallel_size * p.pipeline_model_parallel_size;
        const double state = (p.exp_avg_dtype == "bf16" && p.exp_avg_sq_dtype == "bf16" ? 6 : 8) -
                             (p.main_grads_dtype == "bf16" ? 1 : 0) - (p.offload == "optimizer" ? 3 : 0);
        return (state + 4.0 * p.micro_batch_size * (p.recompute_granularity == "full" ? 0.25 : 1)) / part +
               (p.save_in_foreground ? 0 : 1);
    };
    const auto words = [&](double most, bool host) {
        std::string text;
        for (const Remedy& r : find_remedies(o, 2, host, most, bytes_of)) {
            EXPECT_LE(r.bytes, most);
            text += r.options + "; ";
        }
        return text;
    };
    EXPECT_EQ(words(40.5, true), "--save-in-foreground; --recompute full; --micro-batch-size 4; ");
    EXPECT_EQ(words(18, true), "--recompute full; --micro-batch-size 2; ");
    EXPECT_EQ(words(10.5, true), "--save-in-foreground --recompute full --micro-batch-size 2; ");
    const std::string moments = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 ";
    EXPECT_EQ(words(8, true), "--save-in-foreground --recompute full " + moments + "--micro-batch-size 2; ");
    EXPECT_EQ(words(6.5, true),
              "--save-in-foreground --recompute full " + moments + "--main-grads-dtype bf16 --micro-batch-size 1; ");
    EXPECT_EQ(words(5, true), "");
    const std::string more = "16 GPUs --pp 8; 16 GPUs --tp 2 --pp 4; 16 GPUs --tp 4 --pp 2; ";
    EXPECT_EQ(words(6, false),
              "--recompute full " + moments + "--main-grads-dtype bf16 --offload optimizer --micro-batch-size 2; " + more);
    o.optimizer = "normuon";
    EXPECT_EQ(words(6, false), more);
    o.optimizer = "adamw";
    o.recompute_granularity = "full";
    EXPECT_EQ(words(11, true), "--micro-batch-size 2; ");
}

// Gradients that only sharding reduces enough.
TEST(Remedies, ShardGradients) {
    TrainOptions o;
    o.recompute_granularity = "full";
    const auto bytes_of = [](const TrainOptions& p, int ranks) { return p.zero > 1 ? 20.0 / ranks : 20.0; };
    const auto found = find_remedies(o, 4, true, 6, bytes_of);
    ASSERT_EQ(found.size(), 1u);
    EXPECT_NE(found[0].options.find("--main-grads-dtype bf16 --zero 2"), std::string::npos) << found[0].options;
    o.detect_nondeterminism = 1;
    EXPECT_TRUE(find_remedies(o, 4, true, 6, bytes_of).empty());
}

// A mixture of 4 experts, whose 30 GiB only expert parallelism divides, next to 2 GiB that tp divides.
TEST(Remedies, SpreadExperts) {
    TrainOptions o;
    o.optimizer = "normuon";
    o.recompute_granularity = "full";
    const auto bytes_of = [](const TrainOptions& p, int ranks) {
        const int tp = p.tensor_model_parallel_size, ep = p.expert_model_parallel_size;
        if (4 % ep || ranks % (tp * ep) || tp > 2 || p.pipeline_model_parallel_size > 1) throw Error("no such layout");
        return 30.0 / ep + 2.0 / tp;
    };
    std::string text;
    for (const Remedy& r : find_remedies(o, 1, false, 9.6, bytes_of)) text += r.options + "; ";
    EXPECT_EQ(text, "4 GPUs --ep 4; ");
}

// The first n of 12 layers are recomputed; each other layer needs 1 GiB. If n is set, a larger one is proposed.
TEST(Remedies, RecomputeMoreLayersWhereTheirNumberIsGiven) {
    TrainOptions o;
    o.micro_batch_size = 1;
    o.recompute_granularity = "full";
    o.recompute_num_layers = 3;
    const auto words = [&](double most, const char* dtype) {
        o.main_grads_dtype = dtype;
        const auto bytes_of = [](const TrainOptions& p, int ranks) {
            if (ranks > 1) throw Error("one GPU");
            return 12.0 - std::min(12, p.recompute_num_layers) + (p.main_grads_dtype == "fp32" ? 2 : 1) +
                   (p.exp_avg_dtype == "fp32" ? 2 : 1) + (p.exp_avg_sq_dtype == "fp32" ? 2 : 1);
        };
        std::string text;
        for (const Remedy& r : find_remedies(o, 1, false, most, bytes_of)) text += r.options + "; ";
        return text;
    };
    EXPECT_EQ(words(10.5, "fp32"), "--recompute-num-layers 8; ");
    EXPECT_EQ(words(6, "fp32"), "--recompute-num-layers 12; ");
    EXPECT_EQ(words(4, "fp32"), "--recompute-num-layers 12 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16; ");
    o.recompute_num_layers = 12;  // already all
    EXPECT_EQ(words(4, "fp32"), "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16; ");
    o.recompute_granularity = "mlp";  // a stronger policy for as many layers is second
    o.recompute_num_layers = 3;
    EXPECT_EQ(words(9, "bf16").substr(0, 26), "--recompute-num-layers 8; ");
}

// Narrow moments keep their type, and NorMuon keeps its exp_avg_sq in fp32.
TEST(Remedies, NarrowOnlyMomentsInFp32) {
    const auto bytes_of = [](const TrainOptions& p, int ranks) {
        if (ranks > 1) throw Error("one GPU");
        if (p.optimizer == "normuon" && p.exp_avg_sq_dtype != "fp32") throw Error("exp_avg_sq in fp32");
        const auto bytes = [](const std::string& type) { return type == "fp32" ? 4.0 : type == "bf16" ? 2.0 : 1.0; };
        return bytes(p.exp_avg_dtype) + bytes(p.exp_avg_sq_dtype) + bytes(p.main_grads_dtype) -
               (p.offload == "optimizer"   ? 1
                : p.offload == "gradients" ? 2
                                           : 0);
    };
    TrainOptions o;
    o.micro_batch_size = 1;
    o.recompute_granularity = "full";
    const auto words = [&](double most) {
        std::string text;
        for (const Remedy& r : find_remedies(o, 1, false, most, bytes_of)) text += r.options + "; ";
        return text;
    };
    EXPECT_EQ(words(8), "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16; ");
    o.exp_avg_dtype = "fp8";
    EXPECT_EQ(words(7), "--exp-avg-sq-dtype bf16; ");
    o.exp_avg_sq_dtype = "fp8";
    EXPECT_EQ(words(4), "--main-grads-dtype bf16; ");
    EXPECT_EQ(words(3), "--main-grads-dtype bf16 --offload optimizer; ");
    EXPECT_EQ(words(2), "--main-grads-dtype bf16 --offload gradients; ");
    o.exp_avg_dtype = o.exp_avg_sq_dtype = "fp32";
    o.optimizer = "normuon";
    EXPECT_EQ(words(10), "--exp-avg-dtype bf16; ");
    EXPECT_EQ(words(8), "--exp-avg-dtype bf16 --main-grads-dtype bf16; ");
}

}  // namespace test_remedies
