// The planner compared with counts by hand and measurements; test_published_steps.cpp has steps of large runs.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "../llmc/options/cli.h"
#include "../llmc/plan/nccl_memory.h"
#include "../llmc/base/table.h"
#include "../llmc/plan/planner.h"
#include "../llmc/options/schedule.h"
#include "files.h"
#include "testing.h"

namespace test_planner {

using test::expect_error;
using test::expect_within;

// By the driver's name; a GPU with unknown peak must not get a similar one's.
TEST(Hardware, PeaksByName) {
    EXPECT_EQ(gpu_tflops("NVIDIA H100 80GB HBM3"), 989);
    EXPECT_EQ(gpu_tflops("NVIDIA H100 PCIe"), 756);
    EXPECT_EQ(gpu_tflops("NVIDIA H200 NVL"), 835);
    EXPECT_EQ(gpu_tflops("NVIDIA A100-SXM4-80GB"), 312);
    EXPECT_EQ(gpu_tflops("NVIDIA L40S"), 362);
    EXPECT_EQ(gpu_tflops("NVIDIA L4"), 121);
    EXPECT_EQ(gpu_tflops("NVIDIA GB200"), 2500);
    EXPECT_EQ(gpu_tflops("NVIDIA GeForce RTX 4090"), 165.2);
    EXPECT_EQ(gpu_tflops("NVIDIA RTX 6000 Ada Generation"), 364.2);
    for (const char* unknown :
         {"NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti", "Quadro RTX 6000", "H1000", ""})
        EXPECT_EQ(gpu_tflops(unknown), 0) << unknown;
    EXPECT_EQ(find_device("h100").tflops, 989);
}

// ---- computation and communication -----------------------------------------------------------------------------------------
// Distinct sizes; 8 layers.
PlanInput toy() {
    PlanInput in;
    set_family(in.c, "llama");
    in.c.L = 8;
    in.c.C = 192;
    in.c.NH = 12;
    in.c.NKV = 6;
    in.c.F = 516;
    in.c.T = 64;
    in.c.V = 1000;
    pad_vocabulary(in.c, 128);
    in.B = 2;
    in.T = 64;
    in.global_batch = 96;
    in.node_size = 4;
    return in;
}

// In FP8 products with weights are faster; attention, elementwise operations, the head and communication are not.
TEST(Planner, Fp8SpeedsUpOnlyTheProducts) {
    PlanInput in = toy();
    in.world = 2;
    in.tp = 2;
    in.overlap = false;  // otherwise faster products hide less
    in.memory_gbs = 1e5;
    const StagePlan wide = make_plan(in).stages[0];
    in.products_speedup = 1.6;
    const StagePlan narrow = make_plan(in).stages[0];
    const double rate = in.tflops * 1e12 * in.efficiency, saved = 1 - 1 / 1.6, N = 2 * 64, C = 192, F = 516, heads = 12 * 16;
    const double products = 2 * N * (C * 2 * heads + heads * C + 3 * C * F) / 2 / rate;  // of a layer, forward
    // In 2 bytes each: two norms with residuals, 4 C; RoPE, which reads and writes queries, keys and values; SwiGLU; backward's
    // sums of out times its gradient.
    const double forward = 2 * N / 2 * (8 * C + 2 * 2 * heads + 3 * F), backward = forward + 2 * N / 2 * (2 * F + 2 * heads);
    EXPECT_GT(wide.head_flops, 0);
    expect_within(wide.forward_seconds - narrow.forward_seconds, 8 * saved * (products - forward / 1e14), 1e-9);
    expect_within(wide.backward_seconds - narrow.backward_seconds, 8 * saved * (2 * products - backward / 1e14), 1e-9);
    in.bf16_at_start = 1;  // of its layers
    expect_within(wide.forward_seconds - make_plan(in).stages[0].forward_seconds,
                  7.0 / 8 * (wide.forward_seconds - narrow.forward_seconds), 1e-9);
    in.bf16_at_end = in.c.L - 1;
    EXPECT_EQ(make_plan(in).stages[0].forward_seconds, wide.forward_seconds);
}

// Without sequence parallelism each rank of tp passes over all rows in norms and residuals, of which the efficiency has a part.
TEST(Planner, SequenceParallelismDividesNormsAndResiduals) {
    PlanInput in = toy();
    in.world = in.tp = 2;
    in.overlap = false;
    in.intra_gbs = 1e9;
    in.c.head_size = 64;
    const StagePlan divided = make_plan(in).stages[0];
    in.sequence_parallel = false;
    const StagePlan whole = make_plan(in).stages[0];
    const double more = 8 * 0.5 * 8 * 2 * 64 * 192 * 2 / 3350e9, latency = 7.2e-6, both = 7.8e-6;
    expect_within(divided.forward_seconds - whole.forward_seconds,
                  divided.forward_halves * latency - more - whole.forward_halves / 2 * both, 1e-6);
    in.recompute = "full";
    const StagePlan again = make_plan(in).stages[0];
    expect_within(again.backward_seconds - whole.backward_seconds,
                  whole.forward_flops / (in.tflops * 1e12 * in.efficiency) + more + 2 * 8 * both, 1e-6);
}

// 14 TFLOP/s for 2 products forward and 7 backward: in fp32, and in bf16 for some head sizes.
TEST(Planner, AttentionWithoutTensorCoresTakesLonger) {
    TrainOptions o;
    o.seq_length = 1024;
    o.micro_batch_size = 16;
    ModelConfig c = config_from_preset("gpt2-124m");
    pad_vocabulary(c, 128);
    const auto passes = [&](size_t bytes_per_element) {
        const bool slow = bytes_per_element == 4;
        const PlanInput in = plan_input(o, c, 1, {12}, 16, bytes_per_element);
        EXPECT_EQ(detail::attention_is_slow(in), slow);
        const StagePlan s = make_plan(in).stages[0];
        Table table;
        add_rows(table, make_plan(in), 0);
        const std::string text = table.str(Paint{false}, 200);
        EXPECT_EQ(text.find("without tensor cores") != std::string::npos, slow) << text;
        return std::make_pair(s.forward_seconds, s.backward_seconds);
    };
    const double flops = 12.0 * 2 * 16 * 1024 * 1024 * 768, rate = 989e12 * efficiency_of(find_device("h100"), 768, 16384);
    const double forward = flops / 14e12 - flops / rate, backward = 3.5 * flops / 14e12 - 2 * flops / rate;
    expect_within(passes(4).first - passes(2).first, forward, 1e-9);
    expect_within(passes(4).second - passes(2).second, backward, 1e-9);
    o.recompute_granularity = "full";
    expect_within(passes(4).second - passes(2).second, forward + backward, 1e-9);
    EXPECT_TRUE(attention_is_slow(c, 80, false));
    c.attention_dropout = 0.1;
    c.attention_softcap = 30;
    for (const int size : {32, 64, 80, 96, 128, 160, 192, 256}) {
        c.head_size = size;
        EXPECT_FALSE(attention_is_slow(c, 80, true)) << size;
    }
    c.head_size = 144;
    EXPECT_TRUE(attention_is_slow(c, 90, true));
    c.head_size = 0;
    c.NH = c.NKV = 32;  // of 24
    EXPECT_TRUE(attention_is_slow(c, 80, true));
    EXPECT_EQ(slow_attention_note(c, 80, true), "heads of 24 run without tensor cores, at 14 TFLOP/s or less");
}

// On Hopper only heads of 64 and 128 have wgmma; others have 0.63 of its rate, and if dk and dv are apart 9 products instead
// of 7. On other GPUs mma.sync is as fast as layers.
TEST(Planner, AttentionByMmaTakesLongerOnHopper) {
    for (const int head_size : {64, 96, 192}) {
        PlanInput in = toy();
        in.c.head_size = head_size;
        const StagePlan h100 = make_plan(in).stages[0];
        const double rate = in.tflops * 1e12 * in.efficiency, one = 8.0 * detail::attention_flops(in) / rate;
        EXPECT_EQ(slow_attention_note(in.c, 90, true).empty(), head_size == 64);
        in.capability = 80;
        EXPECT_EQ(slow_attention_note(in.c, 80, true), "");
        const StagePlan ada = make_plan(in).stages[0];
        const double again = head_size == 192 ? 9.0 / 7 : 1, slow = head_size == 64 ? 0 : one;
        expect_within(h100.forward_seconds - ada.forward_seconds, slow * (1 / 0.63 - 1), 1e-9);
        expect_within(h100.backward_seconds - ada.backward_seconds, 2 * slow * (again / 0.63 - 1), 1e-9);
    }
}

// Dropout costs 22 instructions per attention weight, once forward and twice backward, or three times if a separate kernel
// computes dk and dv; an H100 issues 128 in the time of 4,096 FLOPs, an A100 in the time of 2,048.
TEST(Planner, AttentionDropoutTakesItsDraws) {
    for (const bool h100 : {true, false})
        for (const int head_size : {64, 192}) {
            PlanInput in = toy();
            in.c.head_size = head_size;
            if (!h100) in.capability = 80, in.tflops = 312;
            const StagePlan without = make_plan(in).stages[0];
            in.c.attention_dropout = 0.1;
            const StagePlan with = make_plan(in).stages[0];
            const double weights = 8.0 * in.B * in.c.NH * in.T * in.T / 2, rate = in.tflops * 1e12 / (h100 ? 32 : 16);
            const double once = 22 * weights / rate, back = head_size == 192 ? 3 * once : 2 * once;
            expect_within(with.forward_seconds - without.forward_seconds, once, 1e-9);
            expect_within(with.backward_seconds - without.backward_seconds, back, 1e-9);
            in.recompute = "full";
            const StagePlan again = make_plan(in).stages[0];
            in.c.attention_dropout = 0;
            expect_within(again.backward_seconds - make_plan(in).stages[0].backward_seconds, once + back, 1e-9);
            in.c.attention_dropout = 0.1;
            Table table;
            add_rows(table, make_plan(in), 0);
            EXPECT_NE(table.str(Paint{false}, 200).find("attention dropout"), std::string::npos);
        }
}

// Experts' products take bf16's time, and their factors are read and written before: weights, the input, which is also
// measured, and the activation, as well.
TEST(Planner, Fp8DoesNotSpeedUpExperts) {
    PlanInput in = toy();
    in.memory_gbs = 1e5;
    in.c.mixture.experts = 8;
    in.c.mixture.topk = 2;
    const StagePlan wide = make_plan(in).stages[0];
    in.fp8 = true;
    in.products_speedup = 1.6;
    const StagePlan narrow = make_plan(in).stages[0];
    const double rate = in.tflops * 1e12 * in.efficiency, N = 2 * 64, C = 192, F = 516, heads = 12 * 16;
    const double products = 2 * N * (C * 2 * heads + heads * C) / rate, elementwise = 2 * N * (8 * C + 4 * heads + 2 * 3 * F);
    const double rounding = 2 * (2 * 8 * C * 3 * F + 3 * N * C + 3 * 2 * N * F);
    expect_within(narrow.forward_seconds - wide.forward_seconds,
                  8 * (rounding / 1e14 - (1 - 1 / 1.6) * (products - elementwise / 1e14)), 1e-9);
    in.memory_gbs = 1e9;
    EXPECT_LT(make_plan(in).stages[0].backward_seconds, wide.backward_seconds);
}

// Weights of FP8 layers that are transposed in every backward pass are read and written once each.
TEST(Planner, TransposesOfFp8WeightsPassOverMemory) {
    PlanInput in = toy();
    in.world = in.tp = 2;
    in.products_speedup = 1.4;
    in.bf16_at_start = 2;
    const StagePlan kept = make_plan(in).stages[0];
    in.transposes_weights = true;
    const StagePlan made = make_plan(in).stages[0];
    const double weights = 192 * (12 + 2 * 6) * 16 + 192 * 192 + 3 * 192 * 516;  // qkv, proj, fc1 and fc2
    EXPECT_EQ(kept.transposed_bytes, 0);
    expect_within(made.transposed_bytes, 2 * 6 * weights / 2, 1e-12);
    expect_within(made.backward_seconds - kept.backward_seconds, made.transposed_bytes / (in.memory_gbs * 1e9), 1e-9);
    EXPECT_EQ(made.forward_seconds, kept.forward_seconds);
}

// The MLP's recomputation is the product fc1 and elementwise operations; other layers have the requested policy.
TEST(Planner, RecomputationAddsWhatItComputes) {
    PlanInput in = toy();
    in.world = in.tp = 2;
    const auto stage = [&](const char* policy, int layers, const char* others) {
        in.recompute = policy;
        in.recompute_layers = layers;
        in.recompute_others = others;
        return make_plan(in).stages[0];
    };
    const StagePlan none = stage("none", 0, "none"), selective = stage("selective", 0, "none"), mlp = stage("mlp", 0, "none"),
                    full = stage("full", 0, "none"), some = stage("mlp", 3, "selective"), more = stage("full", 3, "mlp");
    const double fc1 = 2.0 * 192 * 2 * 516 * 2 * 64 / 2;  // on one of two ranks
    EXPECT_EQ(none.recomputed_flops + selective.recomputed_flops, 0);
    EXPECT_EQ(mlp.recomputed_flops, 8 * fc1);
    EXPECT_EQ(mlp.backward_flops, none.backward_flops + 8 * fc1);
    EXPECT_EQ(mlp.recomputed_bytes, selective.recomputed_bytes);
    EXPECT_GT(mlp.recomputed_bytes, 0);
    EXPECT_EQ(mlp.backward_halves, none.backward_halves + 8);  // fc1's input is gathered again
    EXPECT_EQ(full.recomputed_flops, full.forward_flops);
    EXPECT_EQ(some.recomputed_flops, 3 * fc1);
    EXPECT_EQ(some.recomputed_bytes, mlp.recomputed_bytes);
    expect_within(more.recomputed_flops, 3 * full.forward_flops / 8 + 5 * fc1, 1e-14);
    in.sequence_parallel = false;
    EXPECT_EQ(stage("mlp", 0, "none").backward_halves, stage("none", 0, "none").backward_halves);
    in.recompute = in.recompute_others = "none";
    in.recompute_layers = 0;
    const Plan p = make_plan(in);
    in.recompute = "mlp";
    EXPECT_GT(make_plan(in).hardware_tflops * make_plan(in).step_seconds, p.hardware_tflops * p.step_seconds);
}

TEST(Planner, CountsCommunicatorsOfNccl) {
    ModelConfig c = toy().c;
    c.NKV = 2;
    const auto count = [&](int ranks, int tp, int pp, bool generates = false) {
        const NcclMemory n = nccl_memory(c, make_mesh(ranks, 0, tp, pp, 1, 1), generates);
        EXPECT_EQ(n.bytes(), n.groups * 864.0 * (1 << 20) + n.edges * 24.0 * (1 << 20));
        return std::make_pair(n.groups, n.edges);
    };
    EXPECT_EQ(count(1, 1, 1), std::make_pair(0, 0));
    EXPECT_EQ(count(8, 1, 1), std::make_pair(1, 0));  // data
    EXPECT_EQ(count(8, 2, 1), std::make_pair(2, 0));  // and tensor
    EXPECT_EQ(count(8, 4, 1), std::make_pair(3, 0));  // and ranks that hold the same key/value heads
    EXPECT_EQ(count(8, 2, 2), std::make_pair(2, 2));  // forward and backward
    EXPECT_EQ(count(8, 1, 4, true), std::make_pair(2, 4));
    EXPECT_EQ(nccl_memory(c, make_mesh(8, 0, 2, 2, 2, 1), false).edges, 4);        // a ring
    EXPECT_EQ(nccl_memory(c, make_mesh(8, 0, 1, 1, 1, 4), false, true).edges, 6);  // to and from 3 ranks of experts
    c.tied = true;
    EXPECT_EQ(count(8, 1, 8), std::make_pair(1, 4));  // both ends of the pipeline
}

// In preference training, only the last stage computes the head's forward pass a second time.
TEST(Planner, ComparedAnswersTakeTheHeadTwice) {
    PlanInput in = toy();
    in.world = in.pp = 2;
    const Plan once = make_plan(in);
    in.compares = true;
    const Plan twice = make_plan(in);
    const double head = head_forward_flops(flop_sizes(in.c, in.T)) * in.B * in.T;
    EXPECT_EQ(twice.stages[0].backward_flops, once.stages[0].backward_flops);
    expect_within(twice.stages[1].head_flops - once.stages[1].head_flops, head, 1e-9);
    expect_within(twice.stages[1].backward_flops - once.stages[1].backward_flops, head, 1e-9);
    EXPECT_GT(twice.step_seconds, once.step_seconds);
    EXPECT_GT(twice.hardware_tflops * twice.step_seconds, once.hardware_tflops * once.step_seconds);
}

TEST(Planner, StagesAddUpToTheModel) {
    PlanInput in = toy();
    const FlopSizes all = {8, 192, 12, 6, 16, 516, 1024, 64, true};
    const double tokens = 2 * 64, model = model_flops_per_token(all, AttentionCount::causal) * tokens;
    const auto flops = [](const Plan& p) {
        double sum = 0;
        for (const StagePlan& s : p.stages) sum += s.forward_flops + s.backward_flops;
        return sum;
    };
    const auto parameters = [](const Plan& p) {
        double sum = 0;
        for (const StagePlan& s : p.stages) sum += s.parameters;
        return sum;
    };
    const Plan one = make_plan(in);
    expect_within(flops(one), model, 1e-14);
    EXPECT_EQ(parameters(one), (double)ParameterTable(in.c).size);
    in.recompute = "full";
    expect_within(flops(make_plan(in)), full_recompute_flops_per_token(all, AttentionCount::causal) * tokens, 1e-14);
    in.recompute = "none";
    in.world = 16;
    in.tp = 2;
    in.pp = 4;
    in.vpp = 2;
    const Plan p = make_plan(in);
    EXPECT_EQ(p.mesh.dp.size, 2);
    EXPECT_EQ(p.micro_batches, 24);
    expect_within(flops(p) * 2, model, 1e-14);
    EXPECT_EQ(p.stages.size(), 8u);
    expect_within(parameters(p) * 2, parameters(one), 0.01);  // norms are on both ranks of tp
}

// In halves of an all-reduce of (2 64, 192) bf16; each of 2 ranks sends half.
TEST(Planner, TensorParallelTraffic) {
    PlanInput in = toy();
    in.world = in.tp = 2;
    in.overlap = false;
    const double half = 2 * 64 * 192 * 2 / 2, m = 48;
    const auto expect_halves = [&](bool sequence_parallel, const char* recompute, int halves, int messages) {
        in.sequence_parallel = sequence_parallel;
        in.recompute = recompute;
        const Plan p = make_plan(in);
        EXPECT_EQ(p.tensor.bytes, m * halves * half) << sequence_parallel << recompute;
        EXPECT_EQ(p.tensor.messages, m * messages);
        const double latency = 6.6e-6 + (sequence_parallel ? 1 : 2) * 0.6e-6;
        expect_within(p.tensor.exposed, m * (halves * half / 450e9 + messages * latency), 1e-14);
        EXPECT_EQ(p.tensor.exposed, p.tensor.seconds);
    };
    // embedding: reduce-scatter, gather; head: gather, reduce-scatter
    expect_halves(true, "none", 8 * (4 + 6) + 2 + 2, 8 * (4 + 6) + 2 + 2);
    expect_halves(true, "full", 8 * (4 + 10) + 2 + 2, 8 * (4 + 10) + 2 + 2);
    // embedding: all-reduce; head: all-reduce
    expect_halves(false, "none", 8 * (4 + 4) + 2 + 2, 8 * (2 + 2) + 1 + 1);
    expect_halves(false, "selective", 8 * (4 + 4) + 2 + 2, 8 * (2 + 2) + 1 + 1);

    // 4 of a layer's 10 halves are hidden, each by a longer product, or otherwise for the time of the product.
    in.sequence_parallel = true;
    in.recompute = "none";
    const Plan apart = make_plan(in);
    in.overlap = true;
    for (const double tflops : {1e-3, 1e6}) {
        in.tflops = tflops;
        const Plan p = make_plan(in);
        const double half_seconds = half / 450e9 + 7.2e-6, rate = tflops * 1e12 * in.efficiency;
        const double C = 192, each = 2 * 2 * 64 * C / 2, qkv = each * (in.c.NH + 2 * in.c.NKV) * in.c.HS() / rate;
        const double hidden = std::min(half_seconds, qkv) + std::min(half_seconds, each * in.c.F1() / rate);
        EXPECT_EQ(p.tensor.seconds, apart.tensor.seconds);
        expect_within(p.tensor.exposed, p.tensor.seconds - m * 8 * 2 * hidden, 1e-12);
        EXPECT_LT(p.tensor.exposed, p.tensor.seconds);
    }
    in.sequence_parallel = false;
    EXPECT_EQ(make_plan(in).tensor.exposed, make_plan(in).tensor.seconds);
    expect_halves(false, "full", 8 * (4 + 8) + 2 + 2, 8 * (2 + 4) + 1 + 1);
    in.tp = in.world = 1;
    const Plan alone = make_plan(in);
    EXPECT_EQ(alone.tensor.bytes + alone.pipeline.bytes + alone.data.bytes + alone.embedding.bytes, 0);
    EXPECT_EQ(alone.step_seconds, alone.pipeline_seconds + alone.update_seconds);
}

// The rows of 4 ranks are gathered and reduced 5 times per layer, 1 or 2 times more with recomputation. Experts' parameters are
// divided by 4, and cross only the 2 ranks that have the same ones.
TEST(Planner, ExpertParallelTraffic) {
    PlanInput in = toy();
    in.c.mixture.experts = 8;
    in.c.mixture.topk = 2;
    in.world = in.node_size = 8;
    const Plan whole = make_plan(in);
    EXPECT_EQ(whole.experts.messages, 0);
    in.ep = 4;
    const double rows = 3 * 2.0 * 64 * 192 * 2, experts = 8 * 8 * 3.0 * 192 * 516, layers = 8, micro_batches = 96 / 2 / 8;
    for (const auto& [recompute, gathers] : {std::pair("none", 5), {"selective", 5}, {"mlp", 6}, {"full", 7}}) {
        in.recompute = recompute;
        const Plan p = make_plan(in);
        EXPECT_EQ(p.experts.messages, micro_batches * layers * gathers);
        EXPECT_EQ(p.experts.bytes, (double)p.experts.messages * rows);
    }
    in.recompute = "none";
    const Plan p = make_plan(in);
    expect_within(whole.stages[0].parameters - p.stages[0].parameters, experts * 3 / 4, 1e-3);
    const double others = whole.stages[0].parameters - experts;
    expect_within(p.data.bytes, (4 + 2) * (others * 7 / 8 + experts / 4 / 2), 1e-3);
    expect_within(p.pipeline_seconds - whole.pipeline_seconds, p.experts.seconds, 1e-6);
    // A row goes to one of 4 ranks with 2 of 8 experts if not both of its choices are among the other 6: 1 - 6/8 5/7 = 13/28.
    // Sent rows are also packed or added, 2 x 4 passes over memory for 3 other ranks' rows.
    in.all_to_all = true;
    const Plan to_all = make_plan(in);
    expect_within(to_all.experts.bytes, p.experts.bytes * 13 / 28, 1e-12);
    expect_within(to_all.pipeline_seconds - whole.pipeline_seconds,
                  to_all.experts.seconds + to_all.experts.bytes * 8 / 3 / (in.memory_gbs * 1e9), 1e-6);
    // The busiest rank has 1.5 times the choices: in each of 8 layers half of its experts' products more, 3 times with
    // backward, and rows for them in messages. It cannot have more than the choices of all 4 ranks.
    in.all_to_all = false;
    in.expert_imbalance = 1.5;
    const double products = 0.5 * 2 * (2 * 64) * 2 * 192 * 516 * 3, rate = in.tflops * 1e12 * in.efficiency;
    expect_within(make_plan(in).pipeline_seconds - p.pipeline_seconds, micro_batches * layers * 3 * products / rate, 1e-6);
    in.all_to_all = true;
    expect_within(make_plan(in).experts.bytes, 1.5 * to_all.experts.bytes, 1e-12);
    in.expert_imbalance = 100;
    EXPECT_EQ(make_plan(in).experts.bytes, p.experts.bytes);
    in.expert_imbalance = 4;
    in.all_to_all = false;
    const double most = make_plan(in).pipeline_seconds;
    in.expert_imbalance = 8;
    EXPECT_EQ(make_plan(in).pipeline_seconds, most);
    in.ep = 3;
    expect_error([&] { make_plan(in); }, {"expert-model-parallel-size 3", "8 data-parallel ranks"});
    in.ep = 8;
    in.c.mixture.experts = 4;
    expect_error([&] { make_plan(in); }, {"expert-model-parallel-size 8", "4 experts"});
}

// Keys and values of 4 ranks are gathered in each layer, forward and backward, and their gradients reduce-scattered. Ranks that
// have rows of the same samples share a batch, and all of them the gradients.
TEST(Planner, ContextParallelTraffic) {
    PlanInput in = toy();
    in.world = in.node_size = 8;
    const Plan whole = make_plan(in);
    EXPECT_EQ(whole.context.messages, 0);
    in.cp = 4;
    const double keys = 3 * 2.0 * 64 / 4 * 2 * in.c.NKV * in.c.HS() * 2, layers = 8, micro_batches = 96 / 2 / 2;
    for (const auto& [recompute, messages] : {std::pair("none", 3), {"full", 4}}) {
        in.recompute = recompute;
        const Plan p = make_plan(in);
        EXPECT_EQ(p.micro_batches, micro_batches);
        EXPECT_EQ(p.context.messages, micro_batches * layers * messages);
        EXPECT_EQ(p.context.bytes, (double)p.context.messages * keys);
    }
    in.recompute = "none";
    in.exchanges_heads = true;
    expect_error([&] { make_plan(in); }, {"alltoall", "divides the 6 key/value heads; it is 4"});
    in.c.NKV = 12;
    // qkv and the output, 3/4 of whose rows go to others, and their gradients with both again.
    for (const bool full : {false, true}) {
        in.recompute = full ? "full" : "none";
        const Plan p = make_plan(in);
        const double rows = 2.0 * 64 / 4, numbers = (2 * in.c.NH + 2 * in.c.NKV) * in.c.HS();
        EXPECT_EQ(p.context.bytes, micro_batches * layers * (full ? 4 : 3) * rows * 3 / 4 * numbers * 2);
        EXPECT_EQ(p.context.messages, 2 * micro_batches * layers * (full ? 4 : 3));
    }
    in.exchanges_heads = false;
    in.c.NKV = 6;
    in.recompute = "none";
    const Plan p = make_plan(in);
    EXPECT_EQ(p.data.bytes, whole.data.bytes);
    EXPECT_EQ(p.stages[0].parameters, whole.stages[0].parameters);
    expect_within(p.stages[0].forward_flops, whole.stages[0].forward_flops / 4, 1e-9);
    in.cp = 3;
    expect_error([&] { make_plan(in); }, {"context-parallel-size 3", "8 ranks"});
    in.cp = 8;
    in.T = 72;
    expect_error([&] { make_plan(in); }, {"--context-parallel-size 8 cannot split the 72 rows", "multiple of 16"});
}

// Messages to all ranks, or only to those with an expert of a row's choice, if at most 2 of 3 rows go to each.
TEST(Planner, DispatcherOfExperts) {
    TrainOptions o;
    ModelConfig c;
    c.mixture.topk = 2;
    c.mixture.experts = 8;
    EXPECT_FALSE(sends_all_to_all(o, c));
    o.expert_model_parallel_size = 2;  // 1 - 4/8 3/7 = 0.79
    EXPECT_FALSE(sends_all_to_all(o, c));
    o.expert_model_parallel_size = 8;  // 1 - 7/8 6/7 = 0.25
    EXPECT_TRUE(sends_all_to_all(o, c));
    o.moe_token_dispatcher_type = "allgather";
    EXPECT_FALSE(sends_all_to_all(o, c));
    c.mixture.topk = 7;
    EXPECT_EQ(fraction_for_rank(c.mixture, 4), 1);
}

TEST(Planner, PipelineTraffic) {
    PlanInput in = toy();
    in.world = in.pp = 4;
    Plan p = make_plan(in);
    EXPECT_EQ(p.pipeline.messages, 48 * 2);  // a rank in the middle: forward and backward
    EXPECT_EQ(p.pipeline.bytes, 48 * 2 * (2 * 64 * 192 * 2));
    EXPECT_FALSE(p.pipeline.between_nodes);
    EXPECT_GT(p.pipeline.exposed, 0);
    EXPECT_LT(p.pipeline.exposed, p.pipeline.seconds);
    const double plain = p.bubble;
    in.vpp = 2;
    p = make_plan(in);
    EXPECT_EQ(p.pipeline.messages, 48 * 4);
    EXPECT_LT(p.ideal_bubble, plain);
    in.world = 8;
    in.tp = 2;
    in.vpp = 1;  // rows cut over tp; 8 ranks are 2 nodes
    p = make_plan(in);
    EXPECT_EQ(p.pipeline.bytes, 48 * 2 * (64 * 192 * 2));
    EXPECT_TRUE(p.pipeline.between_nodes);
    in.c.tied = true;
    EXPECT_EQ(make_plan(in).embedding.bytes, 4.0 * 512 * 192);
}

TEST(Planner, DataParallelTraffic) {
    PlanInput in = toy();
    in.world = 4;
    const double parameters = (double)ParameterTable(in.c).size;
    Plan p = make_plan(in);
    EXPECT_EQ(p.data.bytes, parameters * 3 / 4 * (4 + 2));  // fp32 gradients there, bf16 parameters back
    EXPECT_EQ(p.data.messages, 2);
    EXPECT_EQ(p.data.exposed, p.data.seconds);  // nothing overlaps a single bucket
    in.bucket_elements = 100000;                // with many, only the last one is exposed, if there is enough work
    in.tflops = 1;
    in.memory_gbs = 1;
    p = make_plan(in);
    const double buckets = std::ceil(parameters / 100000);
    expect_within(p.data.exposed, p.data.seconds / buckets, 1e-9);
    in.overlap = false;
    p = make_plan(in);
    expect_within(p.data.exposed, p.data.seconds, 1e-14);
    in.zero = 0;
    p = make_plan(in);
    EXPECT_EQ(p.data.bytes, parameters * 3 / 4 * 8);
    EXPECT_EQ(p.data.exposed, p.data.seconds);
    EXPECT_GT(p.update_seconds, make_plan(toy()).update_seconds);
}

// Bytes of memory traffic per parameter: AdamW 24 for weights and moments, 4 for gradients; 4 to clear; 4 / dp for the
// norm.
TEST(Planner, Update) {
    PlanInput in = toy();
    in.world = 4;
    const double parameters = (double)ParameterTable(in.c).size;
    expect_within(make_plan(in).update_seconds, parameters * (28.0 / 4 + 4 + 1) / 3350e9, 1e-12);
    in.zero = 0;
    expect_within(make_plan(in).update_seconds, parameters * (28.0 + 4 + 1) / 3350e9, 1e-12);
    // Offloaded, the lower halves and moments are limited by the link instead of memory; averages are transferred too.
    in.offloads = true;
    expect_within(make_plan(in).update_seconds, parameters * (2 + 8) / 50e9, 1e-12);
    PlanInput gradients = in;
    gradients.offloads_gradients = true;
    gradients.gradient_bytes = 2;  // once for the norm, once with the state
    expect_within(make_plan(gradients).update_seconds, parameters * (2 + 8 + 2 + 2) / 50e9, 1e-12);
    expect_within(make_plan(gradients).stages[0].backward_seconds - make_plan(in).stages[0].backward_seconds,
                  parameters * 2 / 50e9, 1e-9);
    in.averages = true;
    in.host_gbs = 25;
    expect_within(make_plan(in).update_seconds, parameters * (2 + 8 + 2 + 4) / 25e9, 1e-12);
}

TEST(Planner, StepIsTheSumOfItsParts) {
    PlanInput in = toy();
    in.world = 16;
    in.tp = 2;
    in.pp = 4;
    in.c.tied = true;
    const Plan p = make_plan(in);
    EXPECT_GT(p.embedding.exposed, 0);
    EXPECT_GT(p.data.exposed, 0);
    expect_within(p.step_seconds, p.pipeline_seconds + p.data.exposed + p.embedding.exposed + p.update_seconds, 1e-14);
}

TEST(Planner, LinksFollowTheMesh) {
    PlanInput in;
    in.node_size = 8;
    in.intra_gbs = 300;
    in.inter_gbs = 25;
    in.world = 64;
    const auto expect_link = [&](int size, int stride, bool between, double gbs) {
        const detail::Link link = detail::slowest_link(in, size, stride);
        EXPECT_EQ(link.between_nodes, between) << size << " ranks, " << stride << " apart";
        EXPECT_EQ(link.gbs, gbs) << size << " ranks, " << stride << " apart";
    };
    expect_link(8, 1, false, 300);
    expect_link(4, 2, false, 300);
    expect_link(64, 1, true, 200);  // rings over all 8 ports of a node
    expect_link(32, 2, true, 100);
    expect_link(16, 4, true, 50);
    expect_link(8, 8, true, 25);
    expect_link(4, 16, true, 25);
    expect_link(6, 1, true, 25);  // 6 and 8 do not divide: some group has one rank on a node
    in.world = 6;
    expect_link(6, 1, false, 300);  // but a single group of 6 is on one node
    in.world = 64;
    in.inter_gbs = 50;
    expect_link(64, 1, true, 300);  // never faster than within the node
}

TEST(Planner, FasterHardwareIsNeverSlower) {
    PlanInput in = toy();
    in.world = 16;
    in.tp = 2;
    in.pp = 4;
    const double base = make_plan(in).step_seconds;
    for (double PlanInput::*figure :
         {&PlanInput::tflops, &PlanInput::efficiency, &PlanInput::memory_gbs, &PlanInput::intra_gbs, &PlanInput::inter_gbs}) {
        PlanInput faster = in;
        faster.*figure *= 1.7;
        EXPECT_LT(make_plan(faster).step_seconds, base);
    }
    in.world = in.tp = in.pp = 1;  // all times except latencies are quotients
    in.c.head_size = 64;           // and attention without tensor cores
    const double alone = make_plan(in).step_seconds;
    for (double PlanInput::*figure : {&PlanInput::tflops, &PlanInput::memory_gbs}) in.*figure *= 3;
    expect_within(make_plan(in).step_seconds, alone / 3, 1e-12);
}

// On infinitely fast links, a message of each kind takes 6.6 us plus a latency per step of its ring.
TEST(Planner, MessagesHaveLatency) {
    PlanInput in = toy();
    in.intra_gbs = in.inter_gbs = 1e12;
    in.world = 4;
    const auto expect_latency = [](const Traffic& t, int64_t messages, double latency) {
        EXPECT_EQ(t.messages, messages);
        expect_within(t.seconds, (double)messages * latency, 1e-6);
    };
    expect_latency(make_plan(in).data, 2, 6.6e-6 + 3 * 0.6e-6);  // gradients are scattered, parameters gathered
    expect_within(make_plan(in).data.exposed, 2 * (6.6e-6 + 3 * 0.6e-6), 1e-6);
    in.zero = 0;
    expect_latency(make_plan(in).data, 1, 6.6e-6 + 6 * 0.6e-6);
    in.c.tied = true;
    in.pp = 4;
    expect_latency(make_plan(in).pipeline, 48 * 2, 6.6e-6 + 0.6e-6);
    expect_latency(make_plan(in).embedding, 1, 6.6e-6 + 2 * 0.6e-6);
    EXPECT_EQ(make_plan(in).data.seconds, 0);
    in.node_size = 1;
    expect_latency(make_plan(in).pipeline, 48 * 2, 6.6e-6 + 2.7e-6);
    in.pp = 1;
    in.world = in.tp = 2;
    expect_latency(make_plan(in).tensor, 48 * (8 * 10 + 4), 6.6e-6 + 2.7e-6);
    EXPECT_EQ(make_plan(in).pipeline.seconds, 0);
}

// With few rows of logits, reading the head's weights takes longer than multiplying: for every 16 of 128 rows, 1,024 x 192
// weights are read twice, and fp32 gradients read and written.
TEST(Planner, FewHeadRowsReadTheHeadAgain) {
    PlanInput in = toy();
    const double whole = make_plan(in).stages[0].backward_seconds, rate = in.tflops * 1e12 * in.efficiency;
    in.head_rows = 16;
    const double head = 8 * 1024.0 * 192 * (2 * 2 + 2 * 4) / 3350e9;
    expect_within(make_plan(in).stages[0].backward_seconds - whole, head - make_plan(in).stages[0].head_flops / rate, 1e-9);
    in.memory_gbs = 1e9;
    EXPECT_EQ(make_plan(in).stages[0].backward_seconds, whole);
}

TEST(Planner, Throughput) {
    PlanInput in = toy();
    const Plan p = make_plan(in);
    expect_within(p.tokens_per_second, 96 * 64 / p.step_seconds, 1e-14);
    expect_within(p.days(1e9), 1e9 / p.tokens_per_second / 86400, 1e-14);
    EXPECT_LT(p.model_tflops_causal, p.model_tflops_full);
    EXPECT_EQ(p.hardware_tflops, p.model_tflops_causal);
    EXPECT_LT(p.model_tflops_causal, in.tflops * in.efficiency);
}

TEST(Planner, RefusesWhatCannotBe) {
    PlanInput in = toy();
    in.world = 6;
    in.tp = 4;
    expect_error([&] { make_plan(in); }, {"6 ranks", "4", "HINT"});
    in = toy();
    in.world = 5;
    expect_error([&] { make_plan(in); }, {"96", "2 x 5", "= 10", "HINT"});
    in = toy();
    in.efficiency = 0;
    expect_error([&] { make_plan(in); }, {"device-efficiency", "0"});
    in = toy();
    in.recompute = "some";
    expect_error([&] { make_plan(in); }, {"some", "none, selective, mlp or full"});
    expect_error([] { find_device("z80"); }, {"z80", "h100", "--device-tflops"});
}

// ---- options and the table -------------------------------------------------------------------------------------------------
TEST(Planner, OptionsGiveTheHardware) {
    TrainOptions o;
    o.seq_length = 64;
    o.micro_batch_size = 2;
    const PlanInput base = toy();
    PlanInput in = plan_input(o, base.c, 8, {8}, 96, 2);
    EXPECT_EQ(in.device, "h100");
    EXPECT_EQ(in.tflops, 989);
    EXPECT_EQ(in.intra_gbs, 450);
    EXPECT_EQ(in.inter_gbs, 50);
    EXPECT_EQ(in.node_size, 8);
    EXPECT_EQ(in.efficiency, efficiency_of(find_device("h100"), 192, (double)in.B * in.T));
    EXPECT_EQ(planned_memory_bytes(o), 79.5 * (1 << 30));
    o.device = "a100";
    o.device_tflops = 100;
    o.inter_node_gbs = 3;
    o.device_memory_gib = 40;
    in = plan_input(o, base.c, 8, {8}, 96, 2);
    EXPECT_EQ(in.tflops, 100);
    EXPECT_EQ(in.efficiency, usual_efficiency);
    o.device_efficiency = 0.3;
    EXPECT_EQ(plan_input(o, base.c, 8, {8}, 96, 2).efficiency, 0.3);
    EXPECT_EQ(in.intra_gbs, 300);
    EXPECT_EQ(in.inter_gbs, 3);
    EXPECT_EQ(planned_memory_bytes(o), 40.0 * (1 << 30));
    EXPECT_EQ(planned_host_bytes(o, 8), 2.5e11);  // 2 TB for 8
    o.host_memory_gib = 64;
    EXPECT_EQ(planned_host_bytes(o, 16), 8.0 * (1 << 30));
    EXPECT_EQ(planned_host_bytes(o, 1), 64.0 * (1 << 30));
    EXPECT_GT(make_plan(in).tokens_per_second, 0);
    EXPECT_EQ(in.watts, 0);  // explicit figures mean another GPU
    o.device_watts = 450;
    o.carbon_intensity = 100;
    in = plan_input(o, base.c, 8, {8}, 96, 2);
    EXPECT_EQ(in.watts, 450);
    EXPECT_EQ(in.co2_per_kwh, 100);
    o = {};
    o.seq_length = 64;
    EXPECT_EQ(plan_input(o, base.c, 8, {8}, 96, 2).watts, 700);
    o.head_rows = 512;
    o.fp8_format = "hybrid";
    in = plan_input(o, base.c, 8, {8}, 96, 2);
    EXPECT_EQ(in.head_rows, 512);
    EXPECT_EQ(in.products_speedup, 1.62);
    EXPECT_EQ(in.bf16_at_start + in.bf16_at_end, 0);
    EXPECT_TRUE(in.overlap);
    EXPECT_EQ(in.device, "h100");
    o.first_last_layers_bf16 = o.no_overlap = true;
    o.num_layers_at_start_in_bf16 = 2;
    o.num_layers_at_end_in_bf16 = 3;
    o.device_tflops = 1;
    in = plan_input(o, base.c, 8, {8}, 96, 2);
    EXPECT_EQ(in.bf16_at_start, 2);
    EXPECT_EQ(in.bf16_at_end, 3);
    EXPECT_FALSE(in.overlap);
    EXPECT_EQ(in.device, "device");
    o.device_tflops.reset();
    o.device = "a100";
    expect_error([&] { plan_input(o, base.c, 8, {8}, 96, 2); }, {"--device a100", "FP8", "HINT"});
    // --device accepts exactly the devices of the table
    for_each_option(o, [](const Option& option, auto&) {
        if (option.field != std::string("device")) return;
        Strings names;
        for (const Device& d : devices()) names.push_back(d.name);
        EXPECT_EQ(option.allowed.choices, names);
    });
}

// Measured on one H100, dev/kernels/bench.md, with 64 times 1024 tokens of GPT-2 124M.
TEST(Planner, EfficiencyFollowsTheWidthAndTheRows) {
    const Device h100 = find_device("h100");
    EXPECT_EQ(efficiency_of(h100, 64, 65536), 0.456);
    EXPECT_EQ(efficiency_of(h100, 768, 65536), 0.456);
    EXPECT_EQ(efficiency_of(h100, 2048, 32768), 0.548);
    EXPECT_NEAR(efficiency_of(h100, 2896, 8192), 0.582, 0.001);  // halfway to 4096
    EXPECT_EQ(efficiency_of(find_device("h200"), 12288, 4096), 0.647);
    EXPECT_EQ(efficiency_of(h100, 20480, 1), 0.647);
    EXPECT_EQ(efficiency_of(h100, 12288, 2048, 4), 0.6275);
    EXPECT_EQ(efficiency_of(h100, 8192, 8192, 4), 0.616);  // as 4096
    EXPECT_EQ(efficiency_of(find_device("l40s"), 768, 1), usual_efficiency);
    EXPECT_EQ(efficiency_of(find_device("a100"), 6144, 8192, 8), usual_efficiency);
    EXPECT_NEAR(efficiency_of(find_device("a100"), 12288, 2048, 8), 0.6645, 0.0001);  // 2^0.1 times as much
    // Fewer rows are slower, especially very few; above 8192 the number has no effect.
    EXPECT_NEAR(efficiency_of(h100, 4096, 4096), 0.574, 0.001);
    EXPECT_LT(efficiency_of(h100, 4096, 1024), 0.42);
    EXPECT_EQ(efficiency_of(h100, 4096, 1e6), efficiency_of(h100, 4096, 8192));
    TrainOptions o;
    o.seq_length = 1024;
    o.micro_batch_size = 64;
    ModelConfig c = config_from_preset("gpt2-124m");
    pad_vocabulary(c, 128);
    expect_within(make_plan(plan_input(o, c, 1, {12}, 64, 2)).tokens_per_second, 565684, 0.05);
    // 12 layers of a 7B model on one H100, steps of 524,288 tokens: 34,280 tokens/s at 1x4096, selective recomputation, with a
    // vocabulary of 32,000; 38,538 at 2x4096 with 1,024.
    const auto of_7b = [](int B, int vocabulary, const char* recompute, const char* fp8 = "") {
        TrainOptions p;
        p.seq_length = 4096;
        p.micro_batch_size = B;
        p.recompute_granularity = recompute;
        p.fp8_format = fp8;
        ModelConfig m = config_from_preset("llama2-7b");
        m.L = 12;
        m.V = vocabulary;
        pad_vocabulary(m, 128);
        return make_plan(plan_input(p, m, 1, {12}, 128, 2)).tokens_per_second;
    };
    expect_within(of_7b(1, 32000, "selective"), 34280, 0.05);
    expect_within(of_7b(2, 1024, "none"), 38538, 0.05);
    expect_within(of_7b(2, 1024, "none", "hybrid"), 57200, 0.05);
}

TEST(Planner, TableSaysWhatMatters) {
    PlanInput in = toy();
    in.world = 16;
    in.tp = 2;
    in.pp = 4;
    Table table;
    table.section("Plan");
    add_rows(table, make_plan(in), 1e9);
    const std::string text = table.str(Paint{false}, 200);
    for (const char* part :
         {"16 x h100", "nodes of 4", "989 TFLOP/s at 62%", "tensor parallel", "within nodes", "pipeline, per rank",
          "between nodes", "data parallel", "bubble", "12.5%", "step", "tokens/s", "1.00B tokens in"})
        EXPECT_NE(text.find(part), std::string::npos) << part << " is not in:\n" << text;
    in.world = in.tp = in.pp = 1;
    Table alone;
    add_rows(alone, make_plan(in), 1e9);
    EXPECT_EQ(alone.str(Paint{false}, 200).find("parallel, per rank"), std::string::npos);
    EXPECT_EQ(alone.str(Paint{false}, 200).find("energy"), std::string::npos);  // unknown power
}

// Virtual tokens cost time, but do not count as tokens of the run.
TEST(Planner, VirtualTokensAreNotTokensOfTheRun) {
    PlanInput in = toy();
    const Plan all = make_plan(in);
    in.c.virtual_tokens.count = in.T / 4;
    const Plan some = make_plan(in);
    EXPECT_NEAR(some.tokens_per_second * some.step_seconds, 0.75 * all.tokens_per_second * all.step_seconds, 1e-6);
    Table open;
    add_rows(open, all, 0);
    EXPECT_EQ(open.str(Paint{false}, 200).find("whole run"), std::string::npos);
}

// 36 s of 100 GPUs at 500 W are 0.5 kWh, and at 400 g per kWh 200 g.
TEST(Planner, EnergyIsAtMostThePower) {
    struct Rows {
        std::map<std::string, std::string> text;
        std::map<std::string, nlohmann::ordered_json> exacts;
        std::string last;
        void row(const std::string& label, const std::string& value) { text[last = label] = value; }
        void exact(const nlohmann::ordered_json& value) { exacts[last] = value; }
    } rows;
    Plan p = make_plan(toy());
    p.in.world = 100;
    p.in.watts = 500;
    add_rows(rows, p, 36 * p.tokens_per_second);
    EXPECT_EQ(rows.text["energy"], "at most 0.50 kWh: the GPUs at 500 W each, without hosts, network and cooling");
    EXPECT_EQ(rows.exacts["energy"].size(), 1u);
    p.in.co2_per_kwh = 400;
    add_rows(rows, p, 36 * p.tokens_per_second);
    EXPECT_NE(rows.text["energy"].find("kWh, 0.20 kg of CO2 at 400 g per kWh: the"), std::string::npos) << rows.text["energy"];
    EXPECT_NEAR(rows.exacts["energy"]["kilowatt_hours"], 0.5, 1e-9);
    EXPECT_NEAR(rows.exacts["energy"]["grams_of_co2"], 200, 1e-6);
}

}  // namespace test_planner
