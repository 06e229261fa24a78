// Predicts the speed of generation on ranks that do not exist here, for `tune --inference`: the time to the first token of a
// batch of texts, and the time of each later one, by tensor and pipeline parallelism. Pure functions.
//
// Decoding. Each pass generates one token for each of `batch` texts, at the end of a context of T tokens, through all pipeline
// stages one after another, as in the program. A stage reads its weights once and multiplies them with all rows, whichever
// takes longer (the roofline); then attention reads the keys and values of each text.
//   layer    max(weight bytes / memory, FLOPs / rate) + key/value bytes / memory + two all-reduces of (batch, C)
//   token    the layers of all stages, the messages between them, the logits gathered over tp and passed on over pp
// Prefill. Prompts are read one after another, each in one pass: max(weight bytes / memory, FLOPs / rate) and all-reduces of
// (T, C).
//
// A collective of n ranks takes the time of its bytes at the bandwidth of the slowest link plus its latency (planner.h). FLOPs
// use the planner's efficiency, memory at 0.8 of its rate: `bench --generate` reads 80 to 83% of the rate that this program
// can read on a CPU (dev/bench/README.md).
// Not included: the time to launch kernels, which bounds small models on a GPU; sampling; texts that start or end.
#pragma once
#include <algorithm>

#include "../base/math.h"
#include "../model/flops.h"
#include "../model/model_config.h"
#include "planner.h"

struct InferencePlan {
    double prefill_seconds = 0;  // until all texts of the batch have their first token
    double token_seconds = 0;    // of each later token of a text
    double tokens_per_second(int batch) const { return batch / token_seconds; }
};

namespace detail {

constexpr double share_of_memory_rate = 0.8;

// Seconds of a ring's steps, each with a part of `bytes`: n - 1 for a gather, twice that for an all-reduce.
inline double collective_seconds(const PlanInput& in, int n, int stride, int steps, double bytes) {
    if (n == 1) return 0;
    const Link link = slowest_link(in, n, stride);
    return message_latency(link.between_nodes, steps) + steps * bytes / n / (link.gbs * giga);
}

}  // namespace detail

// `in`: tp x pp ranks, T the context, of which `prompt` tokens are read before the first one is generated.
inline InferencePlan plan_inference(const PlanInput& in, int batch, int prompt) {
    detail::check_plan(in);
    const ModelConfig& c = in.c;
    const double element = (double)in.bytes_per_element, memory = in.memory_gbs * detail::giga * detail::share_of_memory_rate;
    const double rate = in.tflops * 1e12 * in.efficiency, C = c.C, Vp = c.Vp;
    const FlopSizes layer = flop_sizes_of_layer(c, in.T, false), of_prompt = flop_sizes_of_layer(c, prompt, false);
    const double seen = (1 - layer.windowed) * in.T + layer.windowed * std::min<double>((double)layer.window, in.T);
    const double cached = 2.0 * std::max(1, c.NKV / in.tp) * c.HS() * seen * element;  // bytes per layer and text
    const double attention =
        (layers_forward_flops(of_prompt, AttentionCount::causal) - layer_products_flops(of_prompt)) / in.tp;

    // read: weights in memory that the rows need, of which each row is multiplied by `active`.
    const auto multiply = [&](double read, double active, double rows) {
        return std::max(read * element / memory, 2 * active * rows / rate);
    };
    // The products of all layers; two FLOPs a weight and row.
    const auto multiply_layers = [&](double rows) {
        const auto of_layer = [&](bool mixture) {
            const FlopSizes one = flop_sizes_of_layer(c, in.T, mixture);
            return multiply(layer_weights(one, rows) / in.tp, layer_products_flops(one) / 2 / in.tp, rows);
        };
        return detail::over_layers(c.L, c.mixtures(), of_layer(false), of_layer(true));
    };
    const auto reduce = [&](int n, int stride, double elements) {
        return detail::collective_seconds(in, n, stride, 2 * (n - 1), elements * element);
    };
    // In addition to the layers: the embedding, the messages between stages, the head with its logits of some of the rows.
    const auto ends = [&](double rows, double with_logits) {
        const double message = in.pp == 1 ? 0 : detail::collective_seconds(in, 2, in.tp, 1, 2 * rows * C * element);
        return reduce(in.tp, 1, rows * C) + (in.pp - 1) * message + multiply(C * Vp / in.tp, C * Vp / in.tp, with_logits) +
               detail::collective_seconds(in, in.tp, 1, in.tp - 1, with_logits * Vp * element) +
               reduce(in.pp, in.tp, with_logits * Vp);
    };
    const double prefill = prompt * attention / detail::attention_rate(in) + 2 * reduce(in.tp, 1, prompt * C);
    const double decode = batch * cached / memory + 2 * reduce(in.tp, 1, batch * C);
    return {batch * (multiply_layers(prompt) + c.L * prefill + ends(prompt, 1)),
            multiply_layers(batch) + c.L * decode + ends(batch, batch)};
}
