// The planner compared with published steps of large runs.
// Published: models, layouts, batches, recomputation, numbers of GPUs, the hardware's peaks and links, the steps' seconds.
// Assumed, equally for all A100 runs: the efficiency, which a test below derives from published times of a single layer;
// that attention kept all scores in memory (it did, before FlashAttention), stages exchange complete activations, tensor
// parallelism is not overlapped, pipeline messages are only overlapped with chunks, and a head's time follows from its FLOPs.
// No parameter is fitted to a step.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "../llmc/model/presets.h"
#include "../llmc/plan/planner.h"
#include "testing.h"

namespace test_published_steps {

using test::expect_within;

const double a100_efficiency = usual_efficiency;

PlanInput on_a100(const char* preset, int padded_to, int tp, int pp) {
    PlanInput in;
    in.c = config_from_preset(preset);
    pad_vocabulary(in.c, padded_to);
    const Device d = find_device("a100");
    in.device = d.name;
    in.tflops = d.tflops;
    in.memory_gbs = d.memory_gbs;
    in.intra_gbs = d.intra_gbs;
    in.inter_gbs = d.inter_gbs;
    in.efficiency = a100_efficiency;
    in.capability = d.capability;
    in.node_size = 8;
    in.attention = AttentionCount::full;
    in.recompute = "full";
    in.sequence_parallel = false;
    in.T = 2048;
    in.tp = tp;
    in.pp = pp;
    return in;
}

// arXiv:2205.05198, table 4: one layer of the 22B model (width 6144, 64 heads, sequence 2048, micro-batch 4) on 8 A100. One
// efficiency gives all of its times, with and without sequence parallelism and recomputation.
TEST(PlannerPublished, EfficiencyIsThatOfOneLayer) {
    struct Row {
        const char* recompute;
        bool sequence_parallel;
        double forward, backward;  // ms
    };
    for (const Row& r : {Row{"none", false, 7.7, 11.9}, Row{"none", true, 7.2, 11.8}, Row{"full", false, 7.7, 19.5},
                         Row{"selective", false, 7.7, 13.2}, Row{"selective", true, 7.2, 13.1}}) {
        PlanInput in = on_a100("gpt3-175b", 128 * 8, 8, 1);
        in.c.L = 1;
        in.c.C = 6144;
        in.c.NH = in.c.NKV = 64;
        in.c.F = 4 * 6144;
        in.world = 8;
        in.B = in.global_batch = 4;
        in.overlap = false;
        in.recompute = r.recompute;
        in.sequence_parallel = r.sequence_parallel;
        const Plan p = make_plan(in);
        const StagePlan& s = p.stages[0];
        // Without the embedding's and the head's communication and products.
        const double half = detail::tensor_half_bytes(in) / 300e9;
        const double layer = s.forward_seconds + s.backward_seconds - s.head_flops / (312e12 * a100_efficiency) - 4 * half;
        EXPECT_NEAR(1e3 * layer / (r.forward + r.backward), 1, 0.04) << r.recompute << " " << r.sequence_parallel;
    }
}

void set_a100_efficiency(PlanInput& in) {
    in.efficiency = efficiency_of(find_device("a100"), in.c.C, (double)in.B * in.T, in.tp);
}
PlanInput mt_nlg(int gpus) {
    PlanInput in = on_a100("mt-nlg-530b", 128 * 8, 8, 35);
    in.world = gpus;
    in.B = 1;
    in.global_batch = 1920;
    in.zero = 0;
    in.blocking_messages = 2;
    set_a100_efficiency(in);
    return in;
}
PlanInput bloom() {
    PlanInput in = on_a100("bloom-176b", 128, 4, 12);
    in.world = 384;
    in.B = 2;
    in.global_batch = 2048;
    in.inter_gbs = 4 * 12.5 / 8;
    in.layers = {5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5};
    in.blocking_messages = 2;
    set_a100_efficiency(in);
    return in;
}
PlanInput korthikanti(int L, int C, int NH, int pp, int B, int vpp, int batch, bool selective, int dp = 1) {
    PlanInput in = on_a100("gpt3-175b", 128 * 8, 8, pp);
    in.c.L = L;
    in.c.C = C;
    in.c.NH = in.c.NKV = NH;
    in.c.F = 4 * C;
    in.world = 8 * pp * dp;
    in.B = B;
    in.global_batch = batch * dp;
    in.vpp = vpp;
    in.recompute = selective ? "selective" : "full";
    in.sequence_parallel = selective;
    in.overlap = false;
    in.blocking_messages = vpp == 1;
    set_a100_efficiency(in);
    return in;
}
PlanInput on_h100(const ModelConfig& c, int T, int gpus, int tp, int pp, int vpp, int B, int batch, bool fp8, int cp = 1) {
    TrainOptions o;
    o.seq_length = T;
    o.micro_batch_size = B;
    o.tensor_model_parallel_size = tp;
    o.pipeline_model_parallel_size = pp;
    o.context_parallel_size = cp;
    o.num_virtual_stages_per_pipeline_rank = vpp;
    if (fp8) o.fp8_format = "hybrid";
    ModelConfig padded = c;
    pad_vocabulary(padded, 128 * tp);
    return plan_input(o, padded, gpus, {}, batch, 2);
}
ModelConfig gpt(int L, int C, int NH) {
    ModelConfig c = config_from_preset("gpt3-175b");
    c.L = L;
    c.C = C;
    c.NH = c.NKV = NH;
    c.F = 4 * C;
    c.V = 51200;
    return c;
}
ModelConfig llama(const char* preset) {
    ModelConfig c = config_from_preset(preset);
    c.V = 32000;
    return c;
}

struct Row {
    const char *what, *source;
    PlanInput in;
    double seconds, error;  // published; of the plan, in percent
};
// Each row has its error, `within` rows one of at most 8%, and the mean of all errors' sizes is `mean`.
void expect_errors(const std::vector<Row>& rows, int within, double mean) {
    int close = 0;
    double sum = 0;
    for (const Row& r : rows) {
        const double seconds = make_plan(r.in).step_seconds, error = 100 * (seconds / r.seconds - 1);
        EXPECT_NEAR(error, r.error, 0.3) << r.what << ", " << r.source << ": " << seconds << " s, published " << r.seconds;
        close += std::abs(error) <= 8;
        sum += std::abs(error);
    }
    EXPECT_EQ(close, within);
    EXPECT_NEAR(sum / (double)rows.size(), mean, 0.05);
}

// Each published step, its source and the plan's error in percent: negative where the plan is too fast. Efficiencies are this
// program's own on H100, and on A100 the one of Megatron-LM's layer above, at other widths about as on H100. Errors above 8%
// are other programs' (llmc/PARALLEL.md has the arithmetic): MT-NLG's three steps fit 0.196 s per micro-batch, 10% above the
// plan, and 6 s per step, where Megatron-LM takes 0.168 s per micro-batch of the same model in the same layout; it reached 163
// TFLOP/s per GPU on 2,520 (arXiv:2104.04473), MT-NLG 126. LLM-jp's run has 40% of an H100's peak, Megatron-LM's own
// benchmarks 47%. This program's layers are faster than NeMo's in models from 5B to 13B.
TEST(PlannerPublished, Steps) {
    // Its script runs on Google Cloud's A3, 4 ports of 200 Gb/s per node, and does not overlap gradients.
    PlanInput llm_jp = on_h100(config_from_preset("llm-jp-172b"), 4096, 512, 4, 16, 1, 1, 1728, false);
    llm_jp.inter_gbs = 4 * 25.0 / 8;
    llm_jp.data_overlaps = false;
    llm_jp.blocking_messages = 1;
    PlanInput llm_jp_fp8 = llm_jp;
    llm_jp_fp8.products_speedup = TrainOptions().device_fp8_speedup;
    const ModelConfig gpt_175b = gpt(96, 12288, 96);
    const std::vector<Row> rows = {
        {"BLOOM 176B, 384 A100", "arXiv:2211.05100, the run's log", bloom(), 104.7, -3.7},
        {"22B, 8 A100, full recomputation", "arXiv:2205.05198, table 5", korthikanti(48, 6144, 64, 1, 4, 1, 4, false), 1.42,
         -5.1},
        {"22B, 8 A100, selective", "same", korthikanti(48, 6144, 64, 1, 4, 1, 4, true), 1.10, -5.5},
        {"175B, 64 A100, full", "same", korthikanti(96, 12288, 96, 8, 1, 3, 64, false), 18.13, -3.1},
        {"175B, 64 A100, selective", "same", korthikanti(96, 12288, 96, 8, 1, 3, 64, true), 13.75, -3.3},
        {"530B, 280 A100, full", "same", korthikanti(105, 20480, 128, 35, 1, 3, 280, false), 49.05, 0.3},
        {"530B, 280 A100, selective", "same", korthikanti(105, 20480, 128, 35, 1, 3, 280, true), 37.83, -2.0},
        {"530B, 2240 A100, selective", "same, 6.3", korthikanti(105, 20480, 128, 35, 1, 3, 280, true, 8), 39.15, -4.2},
        {"1T, 512 A100, full", "same", korthikanti(128, 25600, 160, 64, 1, 1, 512, false), 94.42, 6.9},
        {"1T, 512 A100, selective", "same", korthikanti(128, 25600, 160, 64, 1, 1, 512, true), 71.49, 3.6},
        {"MT-NLG 530B, 2240 A100", "arXiv:2201.11990", mt_nlg(2240), 60.1, -17.3},
        {"MT-NLG 530B, 2800 A100", "same", mt_nlg(2800), 50.2, -18.2},
        {"MT-NLG 530B, 3360 A100", "same", mt_nlg(3360), 44.4, -20.5},
        {"LLM-jp 172B, 512 H100", "its log, 400 TFLOP/s", llm_jp, 37.5, -18.1},
        {"the same in FP8", "550 TFLOP/s", llm_jp_fp8, 27.3, -20.8},
        {"GPT 5B in FP8, 64 H100", "NeMo 24.09", on_h100(gpt(24, 4096, 32), 2048, 64, 1, 1, 1, 4, 2048, true), 2.80, -18.4},
        {"GPT 20B in FP8, 64 H100", "same", on_h100(gpt(44, 6144, 48), 2048, 64, 2, 1, 1, 2, 256, true), 1.40, -3.3},
        {"GPT 175B in FP8, 128 H100", "same", on_h100(gpt_175b, 2048, 128, 4, 8, 6, 1, 256, true), 5.72, -5.6},
        {"GPT 175B in FP8, 512 H100", "same", on_h100(gpt_175b, 2048, 512, 4, 8, 6, 2, 2048, true), 9.93, 6.4},
        {"Llama 2 7B in FP8, 8 H100", "same", on_h100(llama("llama2-7b"), 4096, 8, 1, 1, 1, 1, 128, true), 3.87, -13.2},
        {"Llama 2 13B in FP8, 16 H100", "same", on_h100(llama("llama2-13b"), 4096, 16, 1, 4, 10, 1, 128, true), 3.76, -12.8},
        {"Llama 2 70B in FP8, 64 H100", "same", on_h100(llama("llama2-70b"), 4096, 64, 4, 4, 20, 1, 128, true), 4.74, 0.8},
    };
    expect_errors(rows, 14, 8.8);
}

// Steps from which nothing in the plan was derived or corrected.
// arXiv:2104.04473, table 1, in the layouts of Megatron-LM's examples/sc21/run_table_1.sh, with gradients in fp16. Its FLOP/s
// count the recomputed forward pass, by formula (3).
Row narayanan(const char* what, int L, int C, int NH, int tp, int pp, int vpp, int B, int batch, int gpus, double tflops,
              double error) {
    PlanInput in = on_a100("gpt3-175b", 128 * tp, tp, pp);
    in.c.L = L;
    in.c.C = C;
    in.c.NH = in.c.NKV = NH;
    in.c.F = 4 * C;
    in.world = gpus;
    in.B = B;
    in.global_batch = batch;
    in.vpp = vpp;
    in.zero = 0;
    in.gradient_bytes = 2;
    in.overlap = false;
    in.blocking_messages = vpp == 1;
    set_a100_efficiency(in);
    const double l = L, h = C, T = in.T, V = 51200;
    const double flops = 96 * (double)batch * T * l * h * h * (1 + T / (6 * h) + V / (16 * l * h));
    return {what, "arXiv:2104.04473", in, flops / gpus / tflops / 1e12, error};
}
Row nemo(const char* what, const PlanInput& in, double tokens_per_second_and_gpu, double error) {
    return {what, "NeMo 24.12", in, (double)in.global_batch * in.T / tokens_per_second_and_gpu / in.world, error};
}
TEST(PlannerPublished, HeldOut) {
    ModelConfig nemotron = gpt(96, 18432, 96);  // arXiv:2406.11704
    nemotron.NKV = 8;
    nemotron.V = 256000;
    PlanInput on_8_a100 = on_a100("gpt2-124m", 128, 1, 1);
    on_8_a100.world = 8;
    on_8_a100.T = 1024;
    on_8_a100.B = 64;
    on_8_a100.global_batch = 512;
    on_8_a100.recompute = "none";
    on_8_a100.attention = AttentionCount::causal;
    set_a100_efficiency(on_8_a100);
    const auto preset = [](const char* name) { return config_from_preset(name); };
    const std::vector<Row> rows = {
        narayanan("1.7B, 32 A100", 24, 2304, 24, 1, 1, 1, 16, 512, 32, 137, -4.6),
        narayanan("3.6B, 64 A100", 30, 3072, 32, 2, 1, 1, 16, 512, 64, 138, -4.1),
        narayanan("7.5B, 128 A100", 36, 4096, 32, 4, 1, 1, 16, 512, 128, 142, -1.0),
        narayanan("18B, 256 A100", 40, 6144, 48, 8, 1, 1, 8, 1024, 256, 135, -5.3),
        narayanan("39B, 512 A100", 48, 8192, 64, 8, 2, 1, 4, 1536, 512, 138, -2.9),
        narayanan("76B, 1024 A100", 60, 10240, 80, 8, 4, 3, 2, 1792, 1024, 140, -10.8),
        narayanan("146B, 1536 A100", 80, 12288, 96, 8, 8, 2, 2, 2304, 1536, 148, -7.0),
        narayanan("310B, 1920 A100", 96, 16384, 128, 8, 16, 2, 1, 2160, 1920, 155, -9.8),
        narayanan("530B, 2520 A100", 105, 20480, 128, 8, 35, 3, 1, 2520, 2520, 163, -8.6),
        narayanan("1T, 3072 A100", 128, 25600, 160, 8, 64, 1, 1, 3072, 3072, 163, -1.4),
        nemo("Llama 3 8B in FP8, 8 H100", on_h100(preset("llama3-8b"), 8192, 8, 1, 1, 1, 1, 128, true, 2), 12273, -11.8),
        nemo("Llama 3 70B in FP8, 64 H100", on_h100(preset("llama3-70b"), 8192, 64, 4, 4, 5, 1, 128, true, 2), 1524, 1.7),
        nemo("Nemotron 340B in FP8, 128 H100", on_h100(nemotron, 4096, 128, 8, 8, 12, 1, 32, true), 326, 10.2),
        {"GPT-2 124M, 8 A100", "llm.c, run_gpt2_124M.sh", on_8_a100, 0.300, 11.3},
        {"GPT-2 124M, 8 H100", "llm.c, by modded-nanogpt: 45 minutes",
         on_h100(preset("gpt2-124m"), 1024, 8, 1, 1, 1, 64, 512, false), 0.138, -15.4},
        {"GPT-2 1.6B, 8 H100", "llm.c, run_gpt2_1558M.sh", on_h100(preset("gpt2-1558m"), 1024, 8, 1, 1, 1, 16, 1024, false),
         2.80, -8.2},
    };
    expect_errors(rows, 8, 7.13);
}

// Whatever a step takes, its FLOP/s follow the papers' formulas.
TEST(PlannerPublished, FlopsPerSecond) {
    for (const auto& [gpus, seconds] : {std::pair(2240, 60.1), {2800, 50.2}, {3360, 44.4}}) {
        const Plan p = make_plan(mt_nlg(gpus));
        expect_within(p.hardware_tflops * p.step_seconds / seconds, 125.73 * 60.1 * 2240 / seconds / gpus, 1e-4);
    }
    const Plan p = make_plan(bloom());
    expect_within(p.hardware_tflops * p.step_seconds / 104.70, 149.763, 1e-5);
    EXPECT_EQ(p.data.gbs, 12.5);  // 2 of 8 data parallel ranks on a node: their ring has 2 ports
}

// LLM-jp 172B: 400 TFLOP/s per GPU as Megatron-LM counts, in steps of 37.5 s.
TEST(PlannerPublished, LlmJp172B) {
    PlanInput in = on_h100(config_from_preset("llm-jp-172b"), 4096, 512, 4, 16, 1, 1, 1728, false);
    in.recompute = "selective";
    const Plan p = make_plan(in);
    expect_within(p.model_tflops_full * p.step_seconds / 37.5, 400, 0.002);
    EXPECT_EQ(p.micro_batches, 216);
    EXPECT_NEAR(p.ideal_bubble, 0.069, 0.0005);
    EXPECT_GT(p.bubble, p.ideal_bubble);  // the last stage has the head and as many layers as others
    in.c.V = in.c.Vp = 512;
    in.inter_gbs = in.intra_gbs = 1e6;
    EXPECT_NEAR(make_plan(in).bubble, 0.069, 0.0015);  // almost no head, only latency to wait for
}

}  // namespace test_published_steps
