// Planned times of generation, counted by hand.
#include <gtest/gtest.h>

#include "../llmc/plan/inference_plan.h"

namespace test_inference_plan {

// One sequence's token reads all weights and its keys and values once; for many sequences, the products take longer.
TEST(InferencePlan, OneRankIsBoundByMemoryOrByFlops) {
    ModelConfig c;
    c.L = 2;
    c.C = 64;
    c.NH = 4;
    c.NKV = 2;
    c.F = 96;
    c.T = 32;
    c.V = c.Vp = 128;
    c.activation = Activation::swiglu;
    PlanInput in;
    in.c = c;
    in.T = 32;
    in.global_batch = 1;
    in.memory_gbs = 100;
    in.tflops = 1;
    in.efficiency = 0.5;
    const double layers = 2 * (64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 96), head = 64 * 128;
    const double keys_and_values = 2 * 2 * 2 * 16 * 32, rate = 0.8 * 100e9;
    EXPECT_NEAR(plan_inference(in, 1, 16).token_seconds, 2 * (layers + head + keys_and_values) / rate, 1e-15);
    const int many = 10000;
    EXPECT_NEAR(plan_inference(in, many, 16).token_seconds, many * (2 * (layers + head) / 0.5e12 + 2 * keys_and_values / rate),
                1e-9);
    // A prompt of 16 tokens is limited by FLOPs, with half of attention computed; only the last token has logits.
    const double attention = 2 * 16 * 16 * 4 * 16 * 2.0 / 0.5e12;
    EXPECT_NEAR(plan_inference(in, 3, 16).prefill_seconds, 3 * (2 * 16 * layers / 0.5e12 + 2 * head / rate + attention), 1e-12);
}

// Two tensor-parallel ranks each read half, and add two all-reduces per layer, one for the embedding, and a gather of the
// logits; two pipeline stages read everything in turn and pass it on.
TEST(InferencePlan, RanksAddTheLatencyOfTheirCollectives) {
    ModelConfig c;
    c.L = 2;
    c.C = 64;
    c.NH = c.NKV = 4;
    c.F = 256;
    c.V = c.Vp = 128;
    PlanInput in;
    in.c = c;
    in.T = c.T = 32;
    in.global_batch = 1;
    in.intra_gbs = 1e9;  // messages have only their latency
    const double one = plan_inference(in, 1, 16).token_seconds;
    in.world = in.tp = 2;
    EXPECT_NEAR(plan_inference(in, 1, 16).token_seconds, one / 2 + 5 * (6.6e-6 + 2 * 0.6e-6) + 7.2e-6, 1e-9);
    in.tp = 1;
    in.pp = 2;
    EXPECT_NEAR(plan_inference(in, 1, 16).token_seconds, one + 2 * 6.6e-6 + 3 * 0.6e-6, 1e-9);
    in.node_size = 1;
    in.inter_gbs = 1e9;
    EXPECT_NEAR(plan_inference(in, 1, 16).token_seconds, one + 2 * 6.6e-6 + 3 * 2.7e-6, 1e-9);
}

}  // namespace test_inference_plan
