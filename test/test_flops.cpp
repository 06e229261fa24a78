// The FLOP formulas compared with published throughputs and with a count of every matrix product.
#include <gtest/gtest.h>

#include <cmath>

#include "../llmc/model/flops.h"

namespace test_flops {

// The throughput logged by Megatron-LM v0.6, in its form; equals model_flops_per_token(s, AttentionCount::full).
double megatron_flops_per_token(const FlopSizes& s) {
    const double L = s.L, h = s.C, a = s.NH, k = s.NKV, d = s.HS, f = s.F, V = s.V, T = s.T;
    return 12 * L * h * h * ((1 + k / a + T / h) * (d * a / h) + f / h * (s.gated ? 1.5 : 1.0) + V / (2 * L * h));
}

// The formula of the MT-NLG and BLOOM papers, FLOPs per token with full recomputation: F = 4C and one kv head per query
// head.
double paper_flops_per_token(const FlopSizes& s) {
    const double L = s.L, h = s.C, V = s.V, T = s.T;
    return 96 * L * h * h * (1 + T / (6 * h) + V / (16 * L * h));
}

//                              L      C   NH  NKV   HS      F       V     T  swiglu
const FlopSizes bloom_176b = {70, 14336, 112, 112, 128, 57344, 250880, 2048, false};
const FlopSizes mt_nlg_530b = {105, 20480, 128, 128, 160, 81920, 51200, 2048, false};
const FlopSizes llm_jp_172b = {96, 12288, 96, 16, 128, 38464, 99840, 4096, true};

double tflops_per_gpu(double flops_per_token, double batch, double seq, double seconds, double gpus) {
    return flops_per_token * batch * seq / seconds / gpus / 1e12;
}

void expect_relative(double got, double want, double tolerance) {
    EXPECT_TRUE(std::abs(got - want) <= tolerance * std::abs(want)) << "got " << got << ", want " << want;
}

// Published with two or three decimals: within half a unit of the last one.
TEST(Flops, BloomThroughput) {
    EXPECT_NEAR(tflops_per_gpu(paper_flops_per_token(bloom_176b), 2048, 2048, 104.70, 384), 149.763, 0.0005);
}

TEST(Flops, MtNlgThroughput) {
    const double flops = paper_flops_per_token(mt_nlg_530b);
    EXPECT_NEAR(tflops_per_gpu(flops, 1920, 2048, 60.1, 2240), 125.73, 0.005);
    EXPECT_NEAR(tflops_per_gpu(flops, 1920, 2048, 50.2, 2800), 120.42, 0.005);
    EXPECT_NEAR(tflops_per_gpu(flops, 1920, 2048, 44.4, 3360), 113.46, 0.005);
}

TEST(Flops, LlmJpStep) {
    const double step = megatron_flops_per_token(llm_jp_172b) * 1728 * 4096;
    expect_relative(step, 7.68e18, 0.005 / 7.68);
    EXPECT_NEAR(step / 512 / 400e12, 37.5, 0.05);
    EXPECT_NEAR(step / 512 / 550e12, 27.3, 0.05);
}

// Three formulas for the same count; doubles of about ten operations agree to some 1e-15 each.
TEST(Flops, FormulasAgree) {
    for (const FlopSizes& s : {bloom_176b, mt_nlg_530b, llm_jp_172b})
        expect_relative(megatron_flops_per_token(s), model_flops_per_token(s, AttentionCount::full), 1e-14);
    for (const FlopSizes& s : {bloom_176b, mt_nlg_530b})
        expect_relative(paper_flops_per_token(s), full_recompute_flops_per_token(s, AttentionCount::full), 1e-14);
}

// A toy with distinct sizes, counted product by product over one sequence.
TEST(Flops, CountedByHand) {
    const FlopSizes s = {3, 20, 6, 2, 5, 14, 37, 8, true};
    double forward = 0;
    const auto product = [&](double m, double n, double k) { forward += 2 * m * n * k; };
    for (int layer = 0; layer < 3; layer++) {
        product(8, (6 + 2 + 2) * 5, 20);  // QKV of 8 tokens
        for (int head = 0; head < 6; head++) {
            product(8, 8, 5);
            product(8, 5, 8);
        }
        product(8, 20, 6 * 5);   // projection
        product(8, 2 * 14, 20);  // gate and up
        product(8, 20, 14);      // down
    }
    const double layers = forward;
    product(8, 37, 20);  // head
    EXPECT_EQ(model_flops_per_token(s, AttentionCount::full) * 8, 3 * forward);
    EXPECT_EQ(full_recompute_flops_per_token(s, AttentionCount::full) * 8, 3 * forward + layers);
    // causal: half of the scores and of their products with V
    EXPECT_EQ(model_flops_per_token(s, AttentionCount::causal) * 8, 3 * (forward - 3 * 6 * (2 * 8 * 8 * 5)));
}

// A query's scores, counted one by one; the formula omits half of the diagonal.
TEST(Flops, WindowsAreCountedByTheirKeys) {
    ModelConfig c;
    c.L = 6;
    c.C = c.F = 64;
    c.NH = c.NKV = 4;
    c.V = c.Vp = 64;
    c.window = 100;
    c.full_interval = 3;
    const int T = 1000;
    double keys = 0;
    for (int layer = 0; layer < c.L; layer++)
        for (int t = 0; t < T; t++) keys += c.sees_all(layer) ? t + 0.5 : std::min(t + 0.5, 100.0);
    ModelConfig whole = c;
    whole.window = 0;
    const double matrices = model_flops_per_token(whole, T) - 6.0 * c.L * 64 * T;
    expect_relative(model_flops_per_token(c, T) - matrices, 12 * 64 * keys / T, 1e-3);
    c.window = T;
    EXPECT_EQ(model_flops_per_token(c, T), model_flops_per_token(whole, T)) << "a window of all keys";
}

// With adapters no frozen weight has a gradient: a third of the products of every layer and the head is not computed.
TEST(Flops, AdaptersLeaveOutGradientsOfWeights) {
    ModelConfig c;
    c.L = 3;
    c.C = 20;
    c.NH = 4;
    c.NKV = 2;
    c.F = 14;
    c.V = c.Vp = 37;
    c.activation = Activation::swiglu;
    const double products = 3 * 2 * (20 * (4 + 2 * 2) * 5 + 20 * 20 + 20 * 14 * 3) + 2 * 20 * 37;
    for (const int window : {0, 4}) {
        c.window = window;
        const double all = model_flops_per_token(c, 8);
        c.virtual_tokens.count = 5;
        EXPECT_DOUBLE_EQ(model_flops_per_token(c, 8), all - products) << window;
        c.virtual_tokens.count = 0;
    }
}

// C x C matrices cost 5 (4 + 2) C^3, fc1 and fc2 with F = 4 C cost 5 (16 + 2) C^3: together 25 C per parameter of a layer.
TEST(Flops, NewtonSchulzStepsOfALayer) {
    const double C = 64;
    const FlopSizes s = {1, 64, 4, 4, 16, 256, 0, 8, false};
    const MuonFlops whole = muon_flops(s, 5, false);
    EXPECT_DOUBLE_EQ(whole.layer, 25 * C * 12 * C * C);
    EXPECT_DOUBLE_EQ(whole.largest, 90 * C * C * C);
    // A head of 16 rows: 5 (4 16^2 C + 2 16^3).
    EXPECT_DOUBLE_EQ(muon_flops(s, 5, true).layer, 210 * C * C * C + 3 * 4 * 5 * (4 * 16 * 16 * C + 2 * 16 * 16 * 16));
    EXPECT_EQ(muon_flops(s, 0, false).layer, 0);
}

}  // namespace test_flops
