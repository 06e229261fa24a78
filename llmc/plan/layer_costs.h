// The input and output of a plan (planner.h), and the costs of a layer apart from its products: attention by kernel, the bytes
// of elementwise operations, recomputation, links between ranks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../model/adapters.h"
#include "../model/flops.h"
#include "../model/mesh.h"
#include "../model/model_config.h"
#include "../model/recompute.h"
#include "../parallel/pipeline_schedule.h"
#include "../parallel/ranks.h"
#include "devices.h"
#include "energy.h"

// The number of parameters of a virtual stage is a function of tp, ep, layers, mixtures, and whether it is the first or last
// one.
using StageKey = std::tuple<int, int, int, int, bool, bool>;

struct PlanInput {
    ModelConfig c;  // with padded vocabulary
    int world = 1, tp = 1, pp = 1, vpp = 1, ep = 1, cp = 1;
    bool sequence_parallel = true;  // if tp > 1
    bool exchanges_heads = false;   // if cp > 1: attention of whole sequences for some heads
    bool all_to_all = false;        // if ep > 1: rows go only to the ranks of their experts
    double expert_imbalance = 1;    // choices of the busiest rank's experts, as a multiple of the mean
    int zero = 1;
    bool overlap = true;  // ZeRO's communication and half of backward's over tp overlap with computation
    // In other programs: only the communication over tp overlaps; pipeline messages that each pass waits for, one after
    // another: 1 in Megatron-LM's schedule without chunks, which sends and receives at once, 2 in DeepSpeed's.
    bool data_overlaps = true;
    int blocking_messages = 0;
    int B = 1, T = 0;  // micro-batch, sequence
    int64_t global_batch = 0;
    std::string recompute = "none";
    int recompute_layers = 0;               // layers of each virtual stage with `recompute`; 0: all
    std::string recompute_others = "none";  // in the others
    std::vector<int> layers;                // of each virtual stage; empty: balanced
    int64_t bucket_elements = 0;            // parameters per data parallel message; 0: default_bucket_elements
    size_t bytes_per_element = 2, gradient_bytes = 4;
    size_t moment_bytes = 8;                            // of both moments, per parameter
    AttentionCount attention = AttentionCount::causal;  // as computed by the kernels
    int head_rows = 0;                                  // rows of logits in memory at a time; 0: enough for their products
    int newton_schulz_steps = 0;                        // of Muon; 0: AdamW updates everything
    bool muon_heads = false;                            // a head is a separate matrix
    bool offloads = false, averages = false;            // the optimizer's state is on the host; weights are averaged
    bool offloads_gradients = false;                    // gradients are on the host, too
    bool compares = false;                              // pairs of answers (DPO): the head computes losses before gradients

    std::string device = "h100";  // for the table only; its figures follow
    double tflops = 989, efficiency = usual_efficiency, memory_gbs = 3350;
    int capability = 90;  // CUDA compute capability: which kernels compute attention
    bool fp8 = false;
    double products_speedup = 1;             // of products with weights in FP8 over bf16, except experts'
    int bf16_at_start = 0, bf16_at_end = 0;  // layers that are always in bf16
    bool transposes_weights = false;         // FP8 weights are transposed in each backward pass, not kept
    int node_size = 8;
    double intra_gbs = 450, inter_gbs = 50, host_gbs = 50;
    double watts = 0;        // of a GPU; 0: not known
    double co2_per_kwh = 0;  // grams; 0: not known

    double rows() const { return (double)B * T / cp; }  // of a micro-batch on a rank
    bool gathers_keys() const { return cp > 1 && !exchanges_heads; }

    std::map<StageKey, double>* sizes = nullptr;  // caches the stages' parameters over plans of one model; null: no cache
};

// A virtual stage on one rank.
struct StagePlan {
    int layers = 0, mixtures = 0;                   // all, and those with a mixture of experts
    double parameters = 0;                          // with padding, and with a copy of a tied embedding
    double forward_flops = 0, backward_flops = 0;   // per micro-batch, with recomputation; the head counts as backward
    double head_flops = 0;                          // the head's share
    double fp8 = 0;                                 // the fraction of its layers that may be in FP8
    double recomputed_flops = 0;                    // the share of recomputation
    int attention_again = 0, mixtures_again = 0;    // layers whose attention is recomputed, and those with a mixture
    double recomputed_bytes = 0;                    // read and written to recompute norms and activation functions
    double transposed_bytes = 0;                    // read and written to transpose FP8 weights, per micro-batch
    int forward_halves = 0, backward_halves = 0;    // tensor parallel communication per micro-batch, in halves of an all-reduce
    int forward_gathers = 0, backward_gathers = 0;  // and expert-parallel: gathers or reduce-scatters of all ranks' rows
    int forward_keys = 0, backward_keys = 0;        // and context-parallel: of keys and values
    double hidden_seconds = 0;                      // the time that overlaps with products
    double forward_seconds = 0, backward_seconds = 0;
};

// The busiest rank's messages per step.
struct Traffic {
    double bytes = 0;
    int64_t messages = 0;
    bool between_nodes = false;
    double gbs = 0;      // bandwidth
    double latency = 0;  // seconds of an empty message
    double seconds = 0;  // without overlap
    double hidden = 0;   // seconds that overlap, of tensor-parallel communication
    double exposed = 0;  // the time that does not overlap
};

struct Plan {
    PlanInput in;
    Mesh mesh;
    int64_t micro_batches = 0;
    std::vector<StagePlan> stages;  // virtual ones, in the order of the model
    Traffic tensor, context, experts, pipeline, data, embedding;
    double ideal_bubble = 0, bubble = 0;  // for equal stages; simulated: idle over working time
    double pipeline_seconds = 0, update_seconds = 0, step_seconds = 0;
    double host_bytes = 0, host_seconds = 0;  // --offload: a rank's traffic to and from the host, and its time
    // Per GPU: model FLOPs with half of attention's scores, or with all of them, as logged by Megatron-LM; all computed FLOPs.
    double model_tflops_causal = 0, model_tflops_full = 0, hardware_tflops = 0;
    double tokens_per_second = 0;

    double days(double tokens) const { return tokens / tokens_per_second / 86400; }
};

// True if attention on a GPU runs without tensor cores.
inline bool attention_is_slow(const ModelConfig& c, int capability, bool in_bf16) {
    return attention_kernels(c.HS(), capability, in_bf16) == AttentionKernels::simple;
}
// The rate of mma.sync as a fraction of the GPU's peak: 1 where it is the tensor cores' own instruction. On Hopper 0.63
// (arXiv:2402.13499). On Blackwell's data-center GPUs assumed to be Hopper's rate per multiprocessor.
inline double mma_rate(int capability) { return capability == 90 ? 0.63 : capability / 10 == 10 ? 0.32 : 1; }
// The kernels that compute attention. Hopper's need whole sequences: gathers_keys: context parallelism cuts them.
inline AttentionKernels attention_kernels(const ModelConfig& c, int capability, bool in_bf16, bool gathers_keys) {
    const AttentionKernels kernels = attention_kernels(c.HS(), capability, in_bf16);
    return gathers_keys && kernels == AttentionKernels::hopper ? AttentionKernels::mma : kernels;
}
// A note about attention that is slower than layers' products, or "".
inline std::string slow_attention_note(const ModelConfig& c, int capability, bool in_bf16, bool gathers_keys = false) {
    if (attention_is_slow(c, capability, in_bf16))
        return format("heads of %d%s run without tensor cores, at 14 TFLOP/s or less", c.HS(), in_bf16 ? "" : " in fp32");
    if (attention_kernels(c, capability, in_bf16, gathers_keys) == AttentionKernels::hopper || mma_rate(capability) == 1)
        return "";
    return format("heads of %d run by mma.sync%s, at %.0f%% of the tensor cores' rate or less", c.HS(),
                  gathers_keys ? " with gathered keys" : "", 100 * mma_rate(capability));
}

namespace detail {

inline constexpr double giga = 1e9;

struct Link {
    bool between_nodes;
    double gbs;  // per rank in a ring
};

// The slowest link between `size` ranks that are `stride` apart, in any group of the grid.
inline Link slowest_link(const PlanInput& in, int size, int stride) {
    const int span = size * stride;
    if (in.world <= in.node_size || in.node_size % span == 0) return {false, in.intra_gbs};
    // Ranks of the group on each node; if groups and nodes do not align, a node may have only one.
    const int here = in.node_size % stride == 0 && span % in.node_size == 0 ? std::max(1, in.node_size / stride) : 1;
    return {true, std::min(in.intra_gbs, here * in.inter_gbs)};
}

// Seconds of a collective in addition to its bytes: 6.6 us, and for each step of its ring 0.6 us within a node and 2.7 us
// between nodes. These are the figures of NCCL's own cost model for rings with its protocol LL (nccl/src/graph/tuning.cc).
inline double message_latency(bool between_nodes, int steps) { return 6.6e-6 + steps * (between_nodes ? 2.7e-6 : 0.6e-6); }

inline void check_plan(const PlanInput& in) {
    CHECK(in.c.Vp >= in.c.V && in.c.L > 0, "the model has no sizes or no padded vocabulary");
    if (in.B < 1 || in.T < 1 || in.global_batch < 1 || in.node_size < 1)
        fail("a plan of micro-batch %d, sequence %d, global batch %lld, %d GPUs a node; each must be at least 1", in.B, in.T,
             (long long)in.global_batch, in.node_size);
    const std::pair<const char*, double> rates[] = {{"device-tflops", in.tflops},         {"device-efficiency", in.efficiency},
                                                    {"device-memory-gbs", in.memory_gbs}, {"intra-node-gbs", in.intra_gbs},
                                                    {"inter-node-gbs", in.inter_gbs},     {"host-link-gbs", in.host_gbs}};
    for (const auto& [name, value] : rates)
        refuse_value(!(value > 0 && std::isfinite(value)), std::string("--") + name, value, "above 0");
    for (const std::string& policy : {in.recompute, in.recompute_others}) recompute_policy(policy);  // refuses unknown ones
}

// Whether sequence parallelism divides the rows of the residual stream among tp ranks.
inline bool cuts_rows(const PlanInput& in) { return in.sequence_parallel && in.tp > 1; }

// The sum over n layers, of which some have a mixture of experts.
inline double over_layers(int n, int mixtures, double dense, double mixture) {
    return (n - mixtures) * dense + mixtures * mixture;
}
// Columns of fc1 and of its activation that process a row in a layer.
struct MlpColumns {
    double F1, F;
};
inline MlpColumns mlp_columns(const ModelConfig& c, bool mixture) {
    if (!mixture) return {(double)c.F1(), (double)c.F};
    const double topk = c.mixture.topk;
    return {topk * c.F1(c.expert_width()) + c.F1(c.mixture.shared), topk * c.expert_width() + c.mixture.shared};
}

// Memory traffic of a rank for recomputing the norms and the activation function of a layer, for a micro-batch, in bytes.
inline double elementwise_bytes(const PlanInput& in, bool mixture) {
    const double N = in.rows(), norms = 2 * 2.0 * in.c.C / (cuts_rows(in) ? in.tp : 1);
    const MlpColumns mlp = mlp_columns(in.c, mixture);
    return N * (norms + (mlp.F1 + mlp.F) / in.tp) * (double)in.bytes_per_element;
}

// Attention without tensor cores reads an operand from shared memory for each multiply-add: 64 FLOPs per clock and
// multiprocessor, which are 14 TFLOP/s on an H100. Forward has 2 products, and backward 7, where other kernels need 4.
constexpr double simple_attention_tflops = 14;
inline bool attention_is_slow(const PlanInput& in) { return attention_is_slow(in.c, in.capability, in.bytes_per_element == 2); }
// FLOPs of a layer's attention for a micro-batch on one of tp ranks, forward.
inline double attention_flops(const PlanInput& in) {
    const FlopSizes one = flop_sizes_of_layer(in.c, in.T, false);
    return (layers_forward_flops(one, in.attention) - layer_products_flops(one)) * in.rows() / in.tp;
}
// Additional seconds of a layer with it, forward and backward.
struct SlowAttention {
    double forward = 0, backward = 0;
};
// FLOP/s of forward's products.
inline double attention_rate(const PlanInput& in) {
    const double usual = in.tflops * 1e12 * in.efficiency;
    const AttentionKernels kernels = attention_kernels(in.c, in.capability, in.bytes_per_element == 2, in.gathers_keys());
    if (kernels == AttentionKernels::simple) return std::min(usual, simple_attention_tflops * 1e12);
    return kernels == AttentionKernels::mma ? usual * mma_rate(in.capability) : usual;
}
// Backward's products in units of forward's two: counted as 2, as in the fastest kernels, unless keys' scores are
// computed again for dk and dv apart.
inline SlowAttention of_slower_kernels(const PlanInput& in) {
    const double usual = in.tflops * 1e12 * in.efficiency, rate = attention_rate(in), flops = attention_flops(in);
    if (rate == usual) return {};
    const double backward = attention_is_slow(in) ? 3.5 : dk_dv_apart(in.c.HS()) ? 2 * 9.0 / 7 : 2;
    return {flops / rate - flops / usual, backward * flops / rate - 2 * flops / usual};
}
// Attention dropout draws a number for each weight, forward and in each kernel of backward: 22 instructions a weight (1,400 of
// a warp for 16 x 128 of them, by machine code; dev/LOG.md). A multiprocessor issues 128 per clock, while its tensor cores do
// 2,048 FLOPs for dense bf16 products on an A100, 4,096 on an H100, 8,192 on a B200. Counted as if draws and products never
// overlapped: not yet measured on a GPU.
constexpr double draw_instructions = 22;
inline SlowAttention draws_of_dropout(const PlanInput& in) {
    if (in.c.attention_dropout == 0) return {};
    const double flops_per_clock = in.capability >= 100 ? 8192 : in.capability >= 90 ? 4096 : 2048;
    const double weights = attention_flops(in) / (4.0 * in.c.HS());
    const double seconds = weights * draw_instructions / (in.tflops * 1e12 / flops_per_clock * 128);
    return {seconds, dk_dv_apart(in.c.HS()) ? 3 * seconds : 2 * seconds};
}
inline SlowAttention slow_attention(const PlanInput& in) {
    const SlowAttention kernels = of_slower_kernels(in), draws = draws_of_dropout(in);
    return {kernels.forward + draws.forward, kernels.backward + draws.backward};
}

// Bytes that a rank reads and writes in the elementwise operations of a layer for a micro-batch, forward and backward.
struct ElementwiseBytes {
    double forward = 0, backward = 0;
};
// For rows of width C: two norms, each with the residual before it, read and write 4 C numbers per row in either direction.
inline ElementwiseBytes bytes_of_rows(const PlanInput& in) {
    const double bytes = 8.0 * in.rows() * in.c.C * (double)in.bytes_per_element;
    return {bytes, bytes};
}
// For heads and the feed-forward, which tp divides: RoPE reads and writes queries, keys and values, the activation F1 and F,
// and backward F1 twice; backward also reads out and its gradient.
inline ElementwiseBytes bytes_of_columns(const PlanInput& in, bool mixture) {
    const ModelConfig& c = in.c;
    const double heads = (double)(c.NH + 2 * c.NKV) * c.HS(), rope = c.position == Position::rope ? 2 * heads : 0;
    const double each = in.rows() * (double)in.bytes_per_element / in.tp;
    const auto [F1, F] = mlp_columns(c, mixture);
    return {each * (rope + F1 + F), each * (rope + 2 * F1 + F + 2.0 * c.NH * c.HS())};
}
// Programs before FlashAttention (AttentionCount::full) kept scores in memory, 2 bytes each. Forward, the masked softmax reads
// and writes them, and dropout again with a mask of 1 byte: 9 bytes. Backward, dropout 5 and the softmax 6 (arXiv:2205.05198).
inline ElementwiseBytes bytes_of_scores(const PlanInput& in) {
    if (in.attention != AttentionCount::full) return {};
    const double scores = in.rows() * in.T * in.c.NH / in.tp;
    return {9 * scores, 11 * scores};
}
// A mixture sums the K outputs of a row's experts, in backward the gradients of its input, which every rank has for all rows;
// then it adds the shared expert's.
inline double bytes_of_combining(const PlanInput& in, bool mixture) {
    const double each = in.rows() * in.c.C * (double)in.bytes_per_element;
    return mixture ? each * (in.c.mixture.topk + 1 + (in.c.mixture.shared ? 3 : 0)) : 0;
}
// The weights of a quantized layer are decoded before their products, forward and backward: codes are read, numbers written.
inline double bytes_of_decoding(const PlanInput& in) {
    if (!in.c.quantized()) return 0;
    double bytes = 0, n = 0;
    for (const TensorSpec& t : frozen_table(in.c, whole_model(in.c)).rows) {
        if (!t.quantized()) continue;
        bytes += (double)coded_bytes(t);
        n += (double)t.size();
    }
    const double weights = layer_products_flops(flop_sizes_of_layer(in.c, in.T, false)) / 2 / in.tp;
    return n > 0 ? weights * (bytes / n + (double)in.bytes_per_element) : 0;
}
// The products of experts in FP8 take bf16's time, after both factors have been read and written as numbers of codes; rows are
// read once more for their scale.
inline ElementwiseBytes bytes_of_fp8_experts(const PlanInput& in) {
    if (!in.fp8 || !in.c.mixture.on()) return {};
    const ModelConfig& c = in.c;
    const double F = c.expert_width(), F1 = c.F1(c.expert_width()), choices = in.rows() * c.mixture.topk;
    const double weights = 2.0 * c.mixture.experts / in.ep * c.C * (F + F1) / in.tp;
    const double input = 2 * in.rows() * in.ep * c.C + in.rows() * c.C, act = 3 * choices * F / in.tp;
    const double output = input, dfc1 = 3 * choices * F1 / in.tp, again = c.adapted() ? 0 : input + act;
    const double bytes = (double)in.bytes_per_element;
    return {bytes * (weights + input + act), bytes * (weights + output + dfc1 + again)};
}
// Bytes that the efficiency does not include: of rows it includes 1 / tp.
inline ElementwiseBytes bytes_apart(const PlanInput& in, bool mixture) {
    const double more = cuts_rows(in) ? 0 : 1 - 1.0 / in.tp;
    const ElementwiseBytes rows = bytes_of_rows(in), scores = bytes_of_scores(in);
    const double sums = bytes_of_combining(in, mixture) + bytes_of_decoding(in);
    return {more * rows.forward + scores.forward + sums, more * rows.backward + scores.backward + sums};
}

// Cost of a recomputation policy in a layer of a micro-batch on a rank: FLOPs, bytes of elementwise operations,
// tensor-parallel communication in halves of an all-reduce, and gathers over ep.
struct RecomputeCost {
    double flops = 0, bytes = 0;
    int halves = 0, gathers = 0;
};
inline RecomputeCost recompute_cost(const PlanInput& in, const std::string& policy, bool mixture, double layer_flops,
                                    double fc1) {
    const double scores = bytes_of_scores(in).forward;
    if (policy == "full") return {layer_flops, bytes_apart(in, mixture).forward, 4, mixture ? 2 : 0};
    if (policy == "mlp")
        return {fc1, elementwise_bytes(in, mixture), cuts_rows(in) ? 1 : 0, mixture};  // fc1's input is gathered again
    if (policy == "selective" && scores > 0) return {attention_flops(in), scores, 0};  // Megatron's, of attention's core
    if (policy == "selective") return {0, elementwise_bytes(in, mixture), 0};
    return {};
}

}  // namespace detail
