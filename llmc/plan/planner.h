// Predicts the time of a training step on ranks that do not exist here: a model of computation, communication and pipeline with
// a few hardware figures, for --dry-run --world N and for choosing a layout. Pure functions; nothing here communicates or
// measures.
//
//   pass of a stage   FLOPs / (peak * efficiency) + its tensor-parallel communication, as far as it is exposed
//   pipeline          simulate_pipeline (pipeline_schedule.h) with these passes and the time of a message: bubble and uneven
//                     stages
//   step              pipeline + exposed data-parallel communication + both ends of a tied embedding + update
// Collectives are rings: each of n ranks sends (n - 1) / n of the tensor in a gather or a reduce-scatter, twice that in an
// all-reduce, at the bandwidth of the slowest link on the ring, and waits for the latency of each of its steps. A ring with k
// ranks on each node it passes uses the k network ports of these ranks. Ranks are placed as in mesh.h: tp within a node, then
// dp, then pp. Communication per layer and micro-batch, in halves of an all-reduce of (B T, C): 4 forward; backward 4, or 6
// with sequence parallelism, which gathers the inputs of two matrices again for their weights' gradients; 4 more with full
// recomputation, 1 more with MLP recomputation and sequence parallelism. Expert parallelism gathers or reduce-scatters the rows
// (ep B T, C) of ep ranks: 2 forward, 3 backward, 2 more with full recomputation, 1 with MLP recomputation; nothing overlaps.
// Context parallelism gathers keys and values, 1 message forward, 2 backward and 1 more where attention is recomputed, or
// exchanges heads, twice as many messages; nothing overlaps.
// All-to-all messages carry only the rows that chose one of a rank's experts (fraction_for_rank), which are also packed or
// added: read and written in memory. The busiest rank's experts have --expert-imbalance times the mean load, by default 1;
// experts' gradients are only sent between ranks with the same experts.
//
// Cost of recomputation: full, its layers' forward pass once more; selective, the memory traffic of norms and activation
// functions; mlp, the same plus the product fc1. For pairs of answers, the head's forward pass is computed twice, as if not
// all logits fit in memory at once. For every --head-rows rows of logits, the head's weights are read twice, and its gradients
// read and written: with few rows these bytes take longer than the products.
// Attention that the GPU computes without tensor cores (attention_kernels) has a separate rate, and so have the draws of
// attention dropout.
//
// Assumed to overlap: gradients with the backward pass of the last micro-batch, except their last bucket; new parameters with
// the update of the next bucket, except the last; pipeline messages unless a rank waits for them; with sequence parallelism 4
// of backward's 6 halves, each with a product of qkv or fc1 (without a slowdown of these products). With --zero 2 gradients,
// in fp32, overlap with the backward pass of every micro-batch, except the first layers' and the embedding's; with --zero 3 so
// do parameters, and with the forward pass, too, each time all but a bucket. With --zero 0 or --no-overlap no data-parallel
// communication overlaps, with --no-overlap no tensor-parallel one, as in the program.
// Latencies are NCCL's own for its fastest protocol (message_latency): the minimum for a message.
// Not included: ranks slower than others, contention between nodes, reading data, checkpoints, the smaller batches of a
// ramp-up; norms' gradients and loss statistics over tp (below 0.1% of its bytes); the time to launch kernels.
//
// The efficiency is one GPU's for whole layers, which includes norms and activations of the rows that a rank holds with
// sequence parallelism. Without it every rank of tp passes over all rows. 0.62 of an A100's peak follows from the times of a
// layer in arXiv:2205.05198, all five within 4%. test/test_published_steps.cpp compares predicted with published steps: 14 of
// 22 within 8%, the others 13 to 21% too fast. For Hopper it was measured (efficiency_of). It differs between programs:
// measure. FP8 shortens products with weights, not attention and elementwise operations, so its gain depends on the model.
//
// Layout and message sizes: Narayanan et al., arXiv:2104.04473.
// Times of layers: Korthikanti et al., arXiv:2205.05198. ZeRO: arXiv:1910.02054.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../base/text.h"
#include "../model/adapters.h"
#include "../model/flops.h"
#include "../model/mesh.h"
#include "../model/model_config.h"
#include "../model/parameters.h"
#include "../options/options.h"
#include "../parallel/pipeline_schedule.h"
#include "devices.h"
#include "energy.h"
#include "layer_costs.h"

namespace detail {

// Parameters of a virtual stage on a rank, with padding.
inline double stage_parameters(const PlanInput& in, const Part& part) {
    const auto mixtures = std::count_if(part.layers.begin(), part.layers.end(), [&](int l) { return in.c.has_mixture(l); });
    const StageKey key = {in.tp, in.ep, (int)part.layers.size(), (int)mixtures, part.first, part.last};
    if (in.sizes)
        if (const auto known = in.sizes->find(key); known != in.sizes->end()) return known->second;
    const double size = (double)trained_table(in.c, part).size;
    if (in.sizes) (*in.sizes)[key] = size;
    return size;
}

// The virtual stages of rank 0 of each tp group, with `layers` layers each.
inline std::vector<StagePlan> plan_stages(const PlanInput& in, const Mesh& mesh, const std::vector<int>& layers) {
    const ModelConfig& c = in.c;
    const double N = in.rows();
    const double head = head_forward_flops(flop_sizes(c, in.T)) * N / in.tp;
    const bool cut = cuts_rows(in), frozen = c.adapted();
    // For each kind of layer: dense, and with a mixture.
    double layer[2], products[2], weights[2];
    RecomputeCost first[2], others[2];
    for (const bool mixture : {false, true}) {
        const FlopSizes one = flop_sizes_of_layer(c, in.T, mixture);
        const double fc1 = fc1_flops(one) * N / in.tp;
        layer[mixture] = layers_forward_flops(one, in.attention) * N / in.tp;
        products[mixture] = layer_products_flops(one) * N / in.tp;
        weights[mixture] = (layer_products_flops(one) / 2 - (mixture ? one.mixture() : 0)) / in.tp;  // with transposes in FP8
        first[mixture] = recompute_cost(in, in.recompute, mixture, layer[mixture], fc1);
        others[mixture] = recompute_cost(in, in.recompute_others, mixture, layer[mixture], fc1);
    }
    std::vector<StagePlan> stages;
    for (int s = 0, at = 0; s < (int)layers.size(); s++) {
        Part part;
        part.tp = mesh.tp;
        part.ep = mesh.ep;
        part.first = s == 0;
        part.last = s == (int)layers.size() - 1;
        StagePlan stage;
        stage.layers = layers[s];
        const int n_first = in.recompute_layers ? std::min(layers[s], in.recompute_layers) : layers[s],
                  n_others = layers[s] - n_first;
        int mixtures_of_first = 0;
        for (int i = 0; i < layers[s]; i++, at++) {
            part.layers.push_back(at);
            stage.fp8 += at >= in.bf16_at_start && at < c.L - in.bf16_at_end ? 1.0 / layers[s] : 0;
            stage.mixtures += c.has_mixture(at);
            mixtures_of_first += i < n_first && c.has_mixture(at);
        }
        const int mixtures_of_others = stage.mixtures - mixtures_of_first;
        // The sum of a figure over all layers; the same over layers that are recomputed, of these and of the others.
        const auto all = [&](const double* of) { return over_layers(stage.layers, stage.mixtures, of[0], of[1]); };
        const auto recomputed = [&](auto figure) {
            return over_layers(n_first, mixtures_of_first, first[0].*figure, first[1].*figure) +
                   over_layers(n_others, mixtures_of_others, others[0].*figure, others[1].*figure);
        };
        stage.parameters = stage_parameters(in, part);
        stage.forward_flops = all(layer);
        stage.head_flops = part.last ? ((frozen ? 2 : 3) + in.compares) * head : 0;
        const bool first_again = in.recompute == "full", others_again = in.recompute_others == "full";
        stage.attention_again = (first_again ? n_first : 0) + (others_again ? n_others : 0);
        stage.mixtures_again = (first_again ? mixtures_of_first : 0) + (others_again ? mixtures_of_others : 0);
        stage.recomputed_flops = recomputed(&RecomputeCost::flops);
        stage.backward_flops = all(layer) * 2 - (frozen ? all(products) : 0) + stage.recomputed_flops + stage.head_flops;
        stage.recomputed_bytes = recomputed(&RecomputeCost::bytes);
        if (in.transposes_weights) stage.transposed_bytes = 2 * stage.fp8 * all(weights);
        if (in.tp > 1) {
            stage.forward_halves = 4 * stage.layers + (part.first ? cut ? 1 : 2 : 0);
            stage.backward_halves =
                (cut ? 6 : 4) * stage.layers + (int)recomputed(&RecomputeCost::halves) + (part.first && cut) + 2 * part.last;
        }
        if (in.cp > 1) {
            stage.forward_keys = stage.layers;
            stage.backward_keys = 2 * stage.layers + stage.attention_again;
        }
        if (in.ep > 1) {
            stage.forward_gathers = 2 * stage.mixtures;
            stage.backward_gathers = (frozen ? 2 : 3) * stage.mixtures + (int)recomputed(&RecomputeCost::gathers);
        }
        stages.push_back(stage);
    }
    return stages;
}

// Bytes of a micro-batch's residual stream.
inline double stream_bytes(const PlanInput& in) { return in.rows() * in.c.C * in.bytes_per_element; }
// Bytes that a rank sends in one half of an all-reduce over tp ranks.
inline double tensor_half_bytes(const PlanInput& in) { return stream_bytes(in) * (in.tp - 1) / in.tp; }

// Bytes that a rank sends when it gathers the keys and values of cp ranks or reduce-scatters their gradients. If they exchange
// heads: qkv and attention's output, in backward with their gradients.
inline double key_bytes(const PlanInput& in) {
    const double keys = 2 * std::max(1.0, (double)in.c.NKV / in.tp), heads = keys + 2.0 * in.c.NH / in.tp;
    return in.rows() * (in.cp - 1) * (in.exchanges_heads ? heads / in.cp : keys) * in.c.HS() * (double)in.bytes_per_element;
}
// Bytes of memory that packing and ordering them reads and writes.
inline double key_packing_bytes(const PlanInput& in) {
    return in.exchanges_heads ? 4 * key_bytes(in) * in.cp / std::max(1, in.cp - 1) : 0;
}
// Bytes that a rank sends to another one of ep, of the rows of a micro-batch; to all others, when rows are gathered or sums
// returned.
inline double expert_message_bytes(const PlanInput& in) {
    return stream_bytes(in) * (in.all_to_all ? std::min(1.0, in.expert_imbalance * fraction_for_rank(in.c.mixture, in.ep)) : 1);
}
inline double expert_gather_bytes(const PlanInput& in) { return expert_message_bytes(in) * (in.ep - 1); }
// Bytes of memory that packing them, or adding them, reads and writes.
inline double expert_packing_bytes(const PlanInput& in) { return in.all_to_all ? 2 * in.ep * expert_message_bytes(in) : 0; }
// FLOPs of experts in a mixture's forward pass that the busiest rank has in addition to the mean: for its choices, at most
// all choices of all ranks.
inline double flops_of_imbalance(const PlanInput& in) {
    const ModelConfig& c = in.c;
    if (in.ep == 1 || !c.mixture.on()) return 0;
    const double choices = in.rows() * c.mixture.topk, width = c.expert_width();
    return (std::min(in.expert_imbalance, (double)in.ep) - 1) * 2 * choices * c.C * (c.F1((int)width) + width) / in.tp;
}
// The parameters of a stage's experts on a rank, which only the ranks with the same experts share.
inline double expert_parameters(const PlanInput& in, double mixtures) {
    const ModelConfig& c = in.c;
    return in.ep > 1 && !c.adapted()
               ? mixtures * c.mixture.experts / in.ep * (c.F1(c.expert_width()) + c.expert_width()) / in.tp * c.C
               : 0;
}

// Bytes of a message between two stages.
inline double pipeline_message_bytes(const PlanInput& in) { return stream_bytes(in) / (cuts_rows(in) ? in.tp : 1); }

// FLOPs of a micro-batch's products that hide communication, for the two matrices of a layer whose input is gathered; 0 if the
// program does not overlap.
struct ColumnProducts {
    double qkv = 0, fc1 = 0;
};
inline ColumnProducts column_products(const PlanInput& in, bool mixture) {
    const ModelConfig& c = in.c;
    if (!cuts_rows(in) || !in.overlap || c.adapted()) return {};
    const double each = 2.0 * in.rows() * c.C / in.tp;
    return {each * (c.NH + 2 * c.NKV) * c.HS(), each * mlp_columns(c, mixture).F1};
}

// Seconds of each stage's passes: computation, then exposed communication with the other tp ranks.
inline void plan_passes(Plan& p) {
    const PlanInput& in = p.in;
    const Link link = slowest_link(in, in.tp, 1);
    p.tensor.between_nodes = link.between_nodes;
    p.tensor.gbs = link.gbs;
    // Each half is a message, or an all-reduce combines both.
    const int halves = cuts_rows(in) ? 1 : 2;
    p.tensor.latency = message_latency(link.between_nodes, halves * (in.tp - 1));
    const double half_seconds = tensor_half_bytes(in) / (link.gbs * giga) + p.tensor.latency / halves;
    const Link of_experts = slowest_link(in, in.ep, in.tp);
    p.experts.between_nodes = of_experts.between_nodes;
    p.experts.gbs = of_experts.gbs;
    p.experts.latency = message_latency(of_experts.between_nodes, in.ep - 1);
    const double gather_seconds = expert_gather_bytes(in) / (of_experts.gbs * giga) + p.experts.latency +
                                  expert_packing_bytes(in) / (in.memory_gbs * giga);
    const Link of_keys = slowest_link(in, in.cp, in.tp);
    p.context.between_nodes = of_keys.between_nodes;
    p.context.gbs = of_keys.gbs;
    p.context.latency = message_latency(of_keys.between_nodes, (in.exchanges_heads ? 2 : 1) * (in.cp - 1));
    const double key_seconds =
        key_bytes(in) / (of_keys.gbs * giga) + p.context.latency + key_packing_bytes(in) / (in.memory_gbs * giga);
    const double rate = in.tflops * 1e12 * in.efficiency;
    const SlowAttention slow = slow_attention(in);
    const double head_bytes = 2.0 * (double)(in.bytes_per_element + in.gradient_bytes) * in.c.Vp / in.tp * in.c.C;
    const ColumnProducts products[] = {column_products(in, false), column_products(in, true)};
    const ElementwiseBytes rows = bytes_of_rows(in);
    const ElementwiseBytes columns[] = {bytes_of_columns(in, false), bytes_of_columns(in, true)};
    const ElementwiseBytes apart_of[] = {bytes_apart(in, false), bytes_apart(in, true)};
    const double bandwidth = in.memory_gbs * giga;
    const auto forward_bytes = [&](bool mixture) { return rows.forward / in.tp + columns[mixture].forward; };
    const auto backward_bytes = [&](bool mixture) { return rows.backward / in.tp + columns[mixture].backward; };
    for (StagePlan& s : p.stages) {
        const auto all = [&](double dense, double mixture) { return over_layers(s.layers, s.mixtures, dense, mixture); };
        const double elementwise = all(forward_bytes(false), forward_bytes(true));
        const double elementwise_backward = all(backward_bytes(false), backward_bytes(true));
        const double elementwise_again =
            over_layers(s.attention_again, s.mixtures_again, forward_bytes(false), forward_bytes(true));
        const ElementwiseBytes apart = {all(apart_of[0].forward, apart_of[1].forward),
                                        all(apart_of[0].backward, apart_of[1].backward)};
        // Products with weights take the layers' time without attention and elementwise operations. FP8 does not shorten those
        // of mixtures.
        const double saved = s.fp8 * (1 - 1 / in.products_speedup), attention = s.layers * attention_flops(in);
        const double of_mixture = 2 * flop_sizes_of_layer(in.c, in.T, true).mixture() * in.rows() / in.tp;
        const double experts = s.mixtures * of_mixture, experts_again = s.mixtures_again * of_mixture;
        const ElementwiseBytes to_fp8 = bytes_of_fp8_experts(in);
        const auto in_layers = [&](double flops, double of_attention, double bytes) {
            return flops / rate - saved * std::max(0.0, (flops - of_attention) / rate - bytes / bandwidth);
        };
        for (double ColumnProducts::*one : {&ColumnProducts::qkv, &ColumnProducts::fc1}) {
            const auto hidden = [&](double flops) { return std::min(half_seconds, flops / rate * (1 - saved)); };
            // One half overlaps with each of backward's two products.
            s.hidden_seconds += 2 * all(hidden(products[0].*one), hidden(products[1].*one));
        }
        // Others wait for the rank with the most choices; backward has two products for each of forward's, or one.
        const double late = flops_of_imbalance(in) / rate;
        s.forward_seconds = in_layers(s.forward_flops, attention + experts, elementwise) + s.forward_halves * half_seconds +
                            s.forward_gathers * gather_seconds + s.forward_keys * key_seconds + s.layers * slow.forward +
                            (apart.forward + s.fp8 * s.mixtures * to_fp8.forward) / bandwidth + s.mixtures * late;
        double head = s.head_flops / rate;
        if (in.head_rows && s.head_flops > 0)
            head = std::max(head, std::ceil(in.rows() / in.head_rows) * head_bytes / (in.memory_gbs * giga));
        const double again = s.attention_again * attention_flops(in);
        const double in_backward = in_layers(s.backward_flops - s.head_flops,
                                             2 * attention + (in.c.adapted() ? 1 : 2) * experts + again + experts_again,
                                             elementwise_backward + elementwise_again);
        const double fp8_bytes = s.fp8 * (s.mixtures * to_fp8.backward + s.mixtures_again * to_fp8.forward);
        // A micro-batch is added to gradients on the host: both directions of the link at a time, not overlapped with products.
        const double to_host = in.offloads_gradients ? s.parameters * (double)in.gradient_bytes / in.host_gbs / giga : 0;
        s.backward_seconds = in_backward + head + to_host + s.backward_halves * half_seconds - s.hidden_seconds +
                             s.backward_gathers * gather_seconds + s.backward_keys * key_seconds +
                             (s.recomputed_bytes + s.transposed_bytes + fp8_bytes + apart.backward) / bandwidth +
                             s.layers * slow.backward + s.attention_again * slow.forward +
                             ((in.c.adapted() ? 1 : 2) * s.mixtures + s.mixtures_again) * late;
    }
}

// A message goes from one rank to another through the port of the sender.
inline void plan_pipeline_link(Plan& p) {
    p.pipeline.between_nodes = slowest_link(p.in, p.in.pp, p.in.tp * p.mesh.dp.size).between_nodes;
    p.pipeline.gbs = p.pipeline.between_nodes ? p.in.inter_gbs : p.in.intra_gbs;
    p.pipeline.latency = message_latency(p.pipeline.between_nodes, 1);
}
inline double pipeline_message_seconds(const Plan& p) {
    return p.in.pp > 1 ? pipeline_message_bytes(p.in) / (p.pipeline.gbs * giga) + p.pipeline.latency : 0;
}

// All passes of a step.
inline void plan_pipeline(Plan& p) {
    const PlanInput& in = p.in;
    const auto simulate = [&](double message) {
        std::vector<double> forward, backward;
        for (const StagePlan& s : p.stages) {
            forward.push_back(s.forward_seconds + in.blocking_messages * message);
            backward.push_back(s.backward_seconds + in.blocking_messages * message);
        }
        return step_time(in.pp, in.vpp, (int)p.micro_batches, forward, backward, in.blocking_messages ? 0 : message);
    };
    const StepTime step = simulate(pipeline_message_seconds(p));
    p.pipeline_seconds = step.total;
    p.bubble = step.bubble;
    p.ideal_bubble = bubble_fraction(in.pp, in.vpp, (int)p.micro_batches);
    p.pipeline.exposed = in.pp > 1 ? step.total - simulate(0).total : 0;
}

// Messages of the busiest pipeline rank to its tp peers and to its neighbors.
inline void plan_messages(Plan& p) {
    const PlanInput& in = p.in;
    const double m = (double)p.micro_batches, half = tensor_half_bytes(in), message = pipeline_message_bytes(in);
    const int last = (int)p.stages.size() - 1;
    for (int rank = 0; rank < in.pp; rank++) {
        double sent = 0, halves = 0, hidden = 0, gathers = 0, keys = 0;
        for (int chunk = 0; chunk < in.vpp; chunk++) {
            const int s = virtual_stage(in.pp, rank, chunk);
            halves += p.stages[s].forward_halves + p.stages[s].backward_halves;
            hidden += p.stages[s].hidden_seconds;
            gathers += p.stages[s].forward_gathers + p.stages[s].backward_gathers;
            keys += p.stages[s].forward_keys + p.stages[s].backward_keys;
            sent += m * ((s > 0) + (s < last));
        }
        if (m * halves * half > p.tensor.bytes) {
            p.tensor.bytes = m * halves * half;
            p.tensor.hidden = m * hidden;
            p.tensor.messages = (int64_t)(m * halves / (cuts_rows(in) ? 1 : 2));
        }
        if (const double bytes = m * keys * key_bytes(in); bytes > p.context.bytes) {
            p.context.bytes = bytes;
            p.context.messages = (int64_t)(m * keys) * (in.exchanges_heads ? 2 : 1);
        }
        if (const double bytes = m * gathers * expert_gather_bytes(in); bytes > p.experts.bytes) {
            p.experts.bytes = bytes;
            p.experts.messages = (int64_t)(m * gathers);
        }
        if (sent * message > p.pipeline.bytes) {
            p.pipeline.bytes = sent * message;
            p.pipeline.messages = (int64_t)sent;
        }
    }
}

// The work of each pipeline rank after its last pass; the slowest one decides. Communication between data-parallel ranks
// overlaps with work, except its last bucket.
inline void plan_update(Plan& p) {
    const PlanInput& in = p.in;
    const int dp = p.mesh.dp.size;
    const Link link = slowest_link(in, dp, in.tp);
    p.data.between_nodes = link.between_nodes;
    p.data.gbs = link.gbs;
    p.data.latency = message_latency(link.between_nodes, (in.zero ? 1 : 2) * (dp - 1));
    const double bucket = in.bucket_elements ? (double)in.bucket_elements : (double)default_bucket_elements(dp);
    const double of_gradient = (double)in.gradient_bytes, moments = 2 * (double)in.moment_bytes;
    double slowest = -1;
    for (int rank = 0; rank < in.pp; rank++) {
        double parameters = 0;
        int layers = 0, mixtures = 0;
        for (int chunk = 0; chunk < in.vpp; chunk++) {
            const StagePlan& stage = p.stages[(size_t)virtual_stage(in.pp, rank, chunk)];
            parameters += stage.parameters;
            layers += stage.layers;
            mixtures += stage.mixtures;
        }
        const double experts = expert_parameters(in, mixtures), others = parameters - experts, edp = p.mesh.edp.size;
        const double part = others * (dp - 1) / dp + experts * (edp - 1) / edp, buckets = std::ceil(parameters / bucket);
        // Without ZeRO gradients are gathered, with it new parameters.
        const double gathered = in.zero ? (double)in.bytes_per_element : of_gradient;
        const double latency = dp > 1 ? buckets * p.data.latency : 0;
        const double sent = in.zero > 1 ? 4 : of_gradient;  // bytes of a gradient in each message
        const double scatter = sent * part / (link.gbs * giga) + latency;
        const double passes = in.zero > 1 ? (double)p.micro_batches : 1, scatters = in.zero > 1 ? passes * in.vpp : 1;
        const double gather = gathered * part / (link.gbs * giga) + (in.zero ? latency : 0);
        // AdamW reads and writes fp32 weights (8) and moments, and reads gradients; clearing gradients and computing the norm
        // of a rank's own ones also pass over memory.
        const double shard = others / dp + experts / edp, own = in.zero ? shard : parameters;
        double update = (own * (8 + moments + of_gradient) + of_gradient * (parameters + shard)) / in.memory_gbs / giga;
        // Muon's matrices are whole on one of the ranks that share them; its elementwise operations cost about the same as
        // AdamW's.
        MuonFlops muon[2];
        for (const bool mixture : {false, true})
            muon[mixture] = muon_flops(flop_sizes_of_layer(in.c, in.T, mixture), in.newton_schulz_steps, in.muon_heads);
        const double sharing = (double)in.tp * (in.zero ? dp : 1);
        const double largest = std::max(mixtures < layers ? muon[0].largest : 0, mixtures > 0 ? muon[1].largest : 0);
        update += std::max(over_layers(layers, mixtures, muon[0].layer, muon[1].layer) / sharing, largest) /
                  (in.tflops * 1e12 * in.efficiency);
        // Offloaded state crosses the link in both directions at a time, while it is updated; averages in a separate pass.
        const double lower = in.bytes_per_element == 2 ? 2 : 0, average = in.averages ? lower + 4 : 0;
        const double of_moments = (double)in.moment_bytes / (in.newton_schulz_steps ? 2 : 1);
        // Gradients on the host are read for the norm, and again with the state.
        const double gradients = in.offloads_gradients ? own * of_gradient : 0;
        const double host_bytes = in.offloads ? own * (lower + of_moments + average) + 2 * gradients : 0;
        const double host_seconds = host_bytes / in.host_gbs / giga;
        update = std::max(update + gradients / in.host_gbs / giga, host_seconds);
        const auto exposed = [&](double seconds, double work) { return std::max(seconds - work, seconds / buckets); };
        const StagePlan& first = p.stages[(size_t)virtual_stage(in.pp, rank, 0)];
        // ZeRO-2 sends each chunk's gradients when it ends, and ZeRO-3 gathers its parameters for both passes.
        const double of_chunk = in.zero > 1 ? scatter / in.vpp : scatter, parameters_of_chunk = gather / in.vpp;
        const bool overlaps = in.zero && in.overlap && in.data_overlaps;
        double waiting = 0;
        if (in.zero > 2)
            waiting = scatters * (overlaps ? exposed(parameters_of_chunk, first.forward_seconds) +
                                                 exposed(of_chunk + parameters_of_chunk, first.backward_seconds)
                                           : of_chunk + 2 * parameters_of_chunk);
        else
            waiting = overlaps ? scatters * exposed(of_chunk, first.backward_seconds) + exposed(gather, update)
                               : scatters * of_chunk + gather;
        if (waiting + update <= slowest) continue;
        slowest = waiting + update;
        const double gathers = in.zero > 2 ? 2 * passes : 1;
        p.data.bytes = part * (sent * passes + gathered * gathers);
        p.data.messages = dp > 1 ? (int64_t)(buckets * (passes + (in.zero ? gathers : 0))) : 0;
        p.data.exposed = waiting;
        p.update_seconds = update;
        p.host_bytes = host_bytes;
        p.host_seconds = host_seconds;
    }
}

// The gradients of a tied embedding, which both ends of the pipeline hold: an all-reduce of two ranks sends one half of the
// matrix each way, twice.
inline void plan_tied_embedding(Plan& p) {
    const PlanInput& in = p.in;
    if (!in.c.tied || in.pp == 1) return;
    const double bytes = (double)in.gradient_bytes * in.c.Vp / in.tp * in.c.C;
    const bool between = p.pipeline.between_nodes;
    p.embedding = {bytes, 1, between, p.pipeline.gbs, message_latency(between, 2), 0, 0};
    p.embedding.exposed = p.embedding.bytes / (p.embedding.gbs * giga) + p.embedding.latency;
}

inline void plan_rates(Plan& p) {
    const PlanInput& in = p.in;
    const FlopSizes all = flop_sizes(in.c, in.T);
    const double tokens = (double)in.global_batch * in.T, per_gpu = tokens / p.step_seconds / in.world / 1e12;
    double again = 0;
    for (const StagePlan& s : p.stages) again += s.recomputed_flops * in.tp / in.rows();
    const double computed = model_flops_per_token(all, in.attention) + again + in.compares * head_forward_flops(all);
    p.model_tflops_causal = model_flops_per_token(all, AttentionCount::causal) * per_gpu;
    p.model_tflops_full = model_flops_per_token(all, AttentionCount::full) * per_gpu;
    p.hardware_tflops = computed * per_gpu;
    p.tokens_per_second = (double)in.global_batch * (in.T - in.c.virtual_tokens.count) / p.step_seconds;
}

}  // namespace detail

// A plan without the simulation of its pipeline.
inline Plan begin_plan(const PlanInput& in) {
    detail::check_plan(in);
    Plan p;
    p.in = in;
    p.mesh = make_mesh(in.world, 0, in.tp, in.pp, in.vpp, in.ep, in.cp);
    check_context_parallel(in.c, in.cp, in.ep, in.T);
    if (in.exchanges_heads) check_exchange_of_heads(in.c, in.cp, in.tp);
    check_tensor_parallel(in.c, in.tp, in.sequence_parallel, in.T / in.cp);
    check_expert_parallel(in.c, in.ep);
    const int dp = p.mesh.samples.size;
    if (in.global_batch % ((int64_t)in.B * dp))
        fail(
            "--global-batch-size %lld is not divisible by --micro-batch-size %d x %d data-parallel ranks = %lld; HINT: choose "
            "a multiple",
            (long long)in.global_batch, in.B, dp, (long long)in.B * dp);
    p.micro_batches = in.global_batch / in.B / dp;
    const std::string problem = pipeline_problem(in.pp, in.vpp, (int)p.micro_batches);
    if (!problem.empty()) fail("%s", problem.c_str());
    p.stages =
        detail::plan_stages(in, p.mesh, split_layers(costs_of_layers(in.c, in.T), in.pp * in.vpp, false, false, in.layers));

    detail::plan_passes(p);
    detail::plan_pipeline_link(p);
    detail::plan_messages(p);
    detail::plan_update(p);
    detail::plan_tied_embedding(p);
    return p;
}

// A lower bound of the step time of such a plan, in seconds: a rank runs its passes one after another, the first when the first
// micro-batch has reached it through the earlier ranks, and after its last one the gradient returns through them.
inline double least_step_seconds(const Plan& p) {
    const PlanInput& in = p.in;
    const double message = detail::pipeline_message_seconds(p);
    double slowest = 0, before = 0;
    for (int rank = 0; rank < in.pp; rank++) {
        double passes = 0;
        for (int chunk = 0; chunk < in.vpp; chunk++) {
            const StagePlan& s = p.stages[(size_t)virtual_stage(in.pp, rank, chunk)];
            passes += s.forward_seconds + s.backward_seconds;
        }
        slowest = std::max(slowest, before + (double)p.micro_batches * passes);
        before += p.stages[(size_t)rank].forward_seconds + p.stages[(size_t)rank].backward_seconds + 2 * message;
    }
    return slowest + p.data.exposed + p.embedding.exposed + p.update_seconds;
}

inline Plan make_plan(const PlanInput& in) {
    Plan p = begin_plan(in);
    detail::plan_pipeline(p);
    for (Traffic* t : {&p.tensor, &p.context, &p.experts, &p.pipeline, &p.data, &p.embedding})
        t->seconds = t->messages ? t->bytes / (t->gbs * detail::giga) + (double)t->messages * t->latency : 0;
    p.tensor.exposed = p.tensor.seconds - p.tensor.hidden;
    p.experts.exposed = p.experts.seconds;
    p.context.exposed = p.context.seconds;
    p.step_seconds = p.pipeline_seconds + p.data.exposed + p.embedding.exposed + p.update_seconds;
    detail::plan_rates(p);
    return p;
}

// ---- from the command line -------------------------------------------------------------------------------------------------
// Whether expert-parallel ranks send rows only to the ranks of their experts. By default if at most 2 in 3 go to a rank:
// packing them for a message, and adding what returns, each read and write memory, some 7 times as fast as a link between GPUs
// of a node (devices.h).
inline bool sends_all_to_all(const TrainOptions& o, const ModelConfig& c, int ep) {
    if (ep == 1 || !o.moe_token_dispatcher_type.empty()) return ep > 1 && o.moe_token_dispatcher_type == "alltoall";
    return fraction_for_rank(c.mixture, ep) <= 2.0 / 3;
}
inline bool sends_all_to_all(const TrainOptions& o, const ModelConfig& c) {
    return sends_all_to_all(o, c, o.expert_model_parallel_size);
}

inline PlanInput plan_input(const TrainOptions& o, const ModelConfig& c, int world, const std::vector<int>& layers,
                            int64_t global_batch, size_t bytes_per_element) {
    const Device d = find_device(o.device);
    PlanInput in;
    in.c = c;
    in.world = world;
    in.tp = o.tensor_model_parallel_size;
    in.ep = o.expert_model_parallel_size;
    in.cp = o.context_parallel_size;
    in.exchanges_heads = in.cp > 1 && exchanges_heads(o);
    in.pp = o.pipeline_model_parallel_size;
    in.vpp = o.num_virtual_stages_per_pipeline_rank;
    in.sequence_parallel = !o.no_sequence_parallel;
    in.all_to_all = sends_all_to_all(o, c);
    in.expert_imbalance = o.expert_imbalance;
    in.zero = o.zero;
    in.overlap = !o.no_overlap;
    in.B = o.micro_batch_size;
    in.T = o.seq_length + c.virtual_tokens.count;
    in.global_batch = global_batch;
    in.recompute = o.recompute_granularity;
    in.recompute_layers = o.recompute_num_layers;
    in.recompute_others = o.recompute_other_layers;
    in.layers = layers;
    in.bucket_elements = o.ddp_bucket_size;
    in.bytes_per_element = bytes_per_element;
    in.device = o.device_tflops && !o.given.count("device") ? "device" : d.name;
    in.capability = d.capability;
    in.efficiency = o.device_efficiency.value_or(o.device_tflops ? usual_efficiency : efficiency_of(d, c.C, in.rows(), in.tp));
    in.node_size = o.node_size;
    in.gradient_bytes = o.main_grads_dtype == "bf16" ? 2 : 4;
    const OptimizerRow& optimizer = optimizer_row(o.optimizer);
    in.moment_bytes = 4 * optimizer.moments;
    for (const std::string* dtype : {&o.exp_avg_dtype, &o.exp_avg_sq_dtype})
        in.moment_bytes -= *dtype == "bf16" ? 2 : *dtype == "fp8" ? 3 : 0;
    if (optimizer.whole_matrices) in.newton_schulz_steps = o.muon_num_ns_steps;
    in.muon_heads = o.muon_split_heads;
    in.offloads = o.offload != "none";
    in.offloads_gradients = o.offload == "gradients";
    in.averages = o.ema_decay > 0;
    in.compares = o.dpo_beta.has_value();
    if (!o.fp8_format.empty()) {
        if (!o.device_tflops && d.capability < 89)
            fail_usage("FP8 was requested for --device %s, which only supports bf16; HINT: omit FP8, or --device h100", d.name);
        in.fp8 = true;
        in.products_speedup = o.device_fp8_speedup;
        in.transposes_weights = o.fp8_weight_transpose == "on-the-fly";
        if (o.first_last_layers_bf16) {
            in.bf16_at_start = o.num_layers_at_start_in_bf16;
            in.bf16_at_end = o.num_layers_at_end_in_bf16;
        }
    }
    in.head_rows = o.head_rows;
    in.tflops = o.device_tflops.value_or(d.tflops);
    in.memory_gbs = o.device_memory_gbs.value_or(d.memory_gbs);
    in.intra_gbs = o.intra_node_gbs.value_or(d.intra_gbs);
    in.inter_gbs = o.inter_node_gbs.value_or(d.inter_gbs);
    in.host_gbs = o.host_link_gbs.value_or(d.host_gbs);
    in.watts = o.device_watts.value_or(o.device_tflops ? 0 : d.watts);
    in.co2_per_kwh = o.carbon_intensity.value_or(0);
    return in;
}

// Rows for a table: anything with row(label, value) and exact(value). `tokens`: of the whole run; 0: unknown length.
template <class Rows>
void add_rows(Rows& t, const Plan& p, double tokens) {
    const PlanInput& in = p.in;
    const auto seconds = [](double s) {  // three digits, more precise than human_duration
        const double x = s >= 0.9995 ? s : s >= 0.9995e-3 ? s * 1e3 : s * 1e6;
        return format("%.*f %s", x < 9.995 ? 2 : x < 99.95 ? 1 : 0, x, x == s ? "s" : s >= 0.9995e-3 ? "ms" : "us");
    };
    const auto traffic = [&](const char* label, const Traffic& x, const char* hidden) {
        if (x.messages == 0) return;
        t.row(label, format("%s in %s message%s %s nodes at %.4g GB/s: %s, of which %s %s", human_bytes(x.bytes).c_str(),
                            with_commas(x.messages).c_str(), x.messages == 1 ? "" : "s", x.between_nodes ? "between" : "within",
                            x.gbs, seconds(x.seconds).c_str(), seconds(x.exposed).c_str(), hidden));
    };
    const auto slower = [](const StagePlan& a, const StagePlan& b) {
        return a.forward_seconds + a.backward_seconds < b.forward_seconds + b.backward_seconds;
    };
    const auto [fastest, slowest] = std::minmax_element(p.stages.begin(), p.stages.end(), slower);
    t.row("hardware",
          format("%d x %s in nodes of %d: %.4g TFLOP/s at %.0f%%%s, links of %.4g and %.4g GB/s within and between nodes",
                 in.world, in.device.c_str(), in.node_size, in.tflops, 100 * in.efficiency,
                 in.products_speedup == 1 ? ""
                                          : format(", products%s %.3g times as fast in FP8",
                                                   in.c.mixture.on() ? " except experts'" : "", in.products_speedup)
                                                .c_str(),
                 in.intra_gbs, in.inter_gbs));
    t.row("micro-batch", format("forward %s, backward %s%s", seconds(slowest->forward_seconds).c_str(),
                                seconds(slowest->backward_seconds).c_str(),
                                in.pp == 1 ? ""
                                           : format(" on the slowest stage; the fastest takes %.0f%% of that",
                                                    100 * (fastest->forward_seconds + fastest->backward_seconds) /
                                                        (slowest->forward_seconds + slowest->backward_seconds))
                                                 .c_str()));
    const double seconds_of_stage = slowest->forward_seconds + slowest->backward_seconds;
    const auto of_stage = [s = *slowest](const detail::SlowAttention& slow) {
        return s.layers * (slow.forward + slow.backward) + s.attention_again * slow.forward;
    };
    if (const std::string note = slow_attention_note(in.c, in.capability, in.bytes_per_element == 2, in.gathers_keys());
        !note.empty())
        t.row("attention", format("%s: passes take %.3g times as long", note.c_str(),
                                  seconds_of_stage / (seconds_of_stage - of_stage(detail::of_slower_kernels(in)))));
    if (in.c.attention_dropout > 0)
        t.row("attention dropout", format("drawing its random numbers takes up to %.0f%% of the passes",
                                          100 * of_stage(detail::draws_of_dropout(in)) / seconds_of_stage));
    if (in.ep > 1)
        t.row("load of experts", in.expert_imbalance > 1
                                     ? format("the busiest rank has %.4g times the mean", in.expert_imbalance)
                                     : "assumed to be equal (--expert-imbalance)");
    traffic("tensor parallel, per rank", p.tensor, "not overlapped");
    traffic("context parallel, per rank", p.context, "not overlapped");
    traffic("expert parallel, per rank", p.experts, "not overlapped");
    traffic("pipeline, per rank", p.pipeline, "waited for");
    traffic("data parallel, per rank", p.data, "not overlapped");
    traffic("tied embedding, per rank", p.embedding, "not overlapped");
    if (in.offloads)
        t.row("link to the host, per rank",
              format("%s%s at %.4g GB/s: %s, overlapped with the update%s", human_bytes(p.host_bytes).c_str(),
                     in.offloads_gradients ? "" : " each way", in.host_gbs, seconds(p.host_seconds).c_str(),
                     in.offloads_gradients ? "; gradients in each micro-batch, not overlapped" : ""));
    if (in.pp > 1)
        t.row("bubble", format("%.1f%%; with equal stages and no messages %.1f%%", 100 * p.bubble, 100 * p.ideal_bubble));
    t.row("step", format("%s: passes %s, data parallel %s, update %s", seconds(p.step_seconds).c_str(),
                         seconds(p.pipeline_seconds).c_str(), seconds(p.data.exposed + p.embedding.exposed).c_str(),
                         seconds(p.update_seconds).c_str()));
    t.exact({{"seconds", p.step_seconds}});
    t.row("throughput",
          format("%s tokens/s; per GPU %.*f model TFLOP/s (causal attention; %.*f counted in full), %.0f%% of peak",
                 human_count(p.tokens_per_second).c_str(), p.model_tflops_causal < 10 ? 2 : 0, p.model_tflops_causal,
                 p.model_tflops_full < 10 ? 2 : 0, p.model_tflops_full, 100 * p.model_tflops_causal / in.tflops));
    t.exact({{"tokens_per_second", p.tokens_per_second}, {"model_tflops_per_gpu", p.model_tflops_causal}});
    if (tokens == 0) return;
    t.row("whole run",
          format("%s tokens in %s, %s GPU hours", human_count(tokens).c_str(), human_duration(p.days(tokens) * 86400).c_str(),
                 human_count(p.days(tokens) * 24 * in.world).c_str()));
    t.exact({{"tokens", tokens}, {"days", p.days(tokens)}});
    if (in.watts > 0) {
        const double joules = p.days(tokens) * 86400 * in.world * in.watts, grams = grams_of_co2(joules, in.co2_per_kwh);
        std::string co2;
        if (grams > 0) co2 = format(", %s kg of CO2 at %.4g g per kWh", human_count(grams / 1e3).c_str(), in.co2_per_kwh);
        t.row("energy", format("at most %s kWh%s: the GPUs at %.4g W each, without hosts, network and cooling",
                               human_count(joules / 3.6e6).c_str(), co2.c_str(), in.watts));
        nlohmann::ordered_json exact = {{"kilowatt_hours", joules / 3.6e6}};
        if (grams > 0) exact["grams_of_co2"] = grams;
        t.exact(exact);
    }
}
