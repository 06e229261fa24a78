// What makes a run fit that needs more memory than there is, for --dry-run.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../model/recompute.h"
#include "../options/options.h"

// Changes of options that make a run fit into `most` bytes per rank, least intrusive first. bytes_of(options, ranks): memory of
// the fullest rank; throws Error if the combination is invalid.
struct Remedy {
    std::string options;
    double bytes;
};
// Layers that --recompute-num-layers must name for a run to fit into `most` bytes, or 0 if no number is enough; and from how
// many on more change nothing, as no stage has as many.
struct FewestLayers {
    int enough = 0, all = 0;
};
template <class BytesOf>
FewestLayers fewest_layers(const TrainOptions& o, double most, BytesOf bytes_of) {
    const auto bytes = [&](int layers) -> double {
        TrainOptions p = o;
        p.recompute_num_layers = layers;
        try {
            return bytes_of(p);
        } catch (const Error&) {
            return INFINITY;
        }
    };
    // The first number after `low` for which a condition holds that then holds for all larger ones.
    const auto first = [](int low, int high, auto holds) {
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (holds(middle) ? high : low) = middle;
        }
        return high;
    };
    const int most_layers = 10000;
    FewestLayers n;
    const double least = bytes(most_layers);
    n.all = first(0, most_layers, [&](int layers) { return bytes(layers) <= least; });
    if (least <= most) n.enough = first(0, n.all, [&](int layers) { return bytes(layers) <= most; });
    return n;
}
template <class BytesOf>
std::vector<Remedy> find_remedies(const TrainOptions& o, int ranks, bool memory_is_host, double most, BytesOf bytes_of) {
    std::vector<Remedy> found;
    const auto fits = [&](const std::string& words, const TrainOptions& p, int n) {
        try {
            const double bytes = (double)bytes_of(p, n);
            if (bytes <= most) found.push_back({words, bytes});
            return bytes <= most;
        } catch (const Error&) {
            return false;
        }
    };
    const auto micro_batch = [](const TrainOptions& p) { return format("--micro-batch-size %d", p.micro_batch_size); };
    const auto smaller_micro_batch = [&](TrainOptions p, const std::string& words) {
        while ((p.micro_batch_size /= 2) > 0)
            if (fits(words + micro_batch(p), p, ranks)) return;
    };
    TrainOptions least = o;  // the least memory on these ranks, apart from the micro-batch
    std::string words;
    if (o.recompute_num_layers) {
        const FewestLayers n = fewest_layers(o, most, [&](const TrainOptions& p) { return (double)bytes_of(p, ranks); });
        const auto layers = [](int layers) { return format("--recompute-num-layers %d", layers); };
        TrainOptions p = o;
        p.recompute_num_layers = n.enough;
        if (n.enough > o.recompute_num_layers) fits(layers(n.enough), p, ranks);
        if (n.all > o.recompute_num_layers) {
            least.recompute_num_layers = n.all;
            words += layers(n.all) + " ";
        }
    }
    if (memory_is_host && !o.save_in_foreground) {
        least.save_in_foreground = true;
        words += "--save-in-foreground ";
        TrainOptions p = o;
        p.save_in_foreground = true;
        fits("--save-in-foreground", p, ranks);
    }
    if (!o.zero) {
        TrainOptions p = o;
        p.zero = least.zero = 1;
        words += "--zero 1 ";
        fits("--zero 1", p, ranks);
    }
    for (const char* policy : recompute_words) {
        if (recompute_policy(policy) <= recompute_policy(o.recompute_granularity)) continue;
        TrainOptions p = o;
        p.recompute_granularity = policy;
        if (fits(std::string("--recompute ") + policy, p, ranks)) break;
    }
    smaller_micro_batch(o, "");
    if (o.recompute_granularity != "full") {
        least.recompute_granularity = "full";
        words += "--recompute full ";
    }
    if (found.empty() && !words.empty() && !fits(words.substr(0, words.size() - 1), least, ranks))
        smaller_micro_batch(least, words);
    const OptimizerRow& optimizer = optimizer_row(o.optimizer);
    const bool first = o.exp_avg_dtype == "fp32", second = o.exp_avg_sq_dtype == "fp32" && optimizer.narrows_second_moment();
    if (found.empty() && (first || second)) {
        if (first) least.exp_avg_dtype = "bf16";
        if (second) least.exp_avg_sq_dtype = "bf16";
        words += std::string(first ? "--exp-avg-dtype bf16 " : "") + (second ? "--exp-avg-sq-dtype bf16 " : "");
        if (!fits(words.substr(0, words.size() - 1), least, ranks)) smaller_micro_batch(least, words);
    }
    if (found.empty() && o.main_grads_dtype != "bf16") {
        least.main_grads_dtype = "bf16";
        words += "--main-grads-dtype bf16 ";
        if (!fits(words.substr(0, words.size() - 1), least, ranks)) smaller_micro_batch(least, words);
    }
    if (memory_is_host) return found;
    for (const char* part : {"optimizer", "gradients"}) {
        if (!found.empty() || !optimizer.can_offload() || o.offload == "gradients") break;
        const bool gradients = part == std::string("gradients");
        if (gradients ? ranks > 1 : o.offload != "none") continue;
        least.offload = part;
        const std::string all = words + "--offload " + part;
        if (!fits(all, least, ranks)) smaller_micro_batch(least, all + " ");
    }
    // More GPUs: the smallest number that suffices, split by data (ZeRO), tensor or pipeline parallelism.
    for (int more = 2; more <= 1024; more *= 2) {
        const size_t before = found.size();
        for (int tp = 1; tp <= more && tp * o.tensor_model_parallel_size <= std::min(8, o.node_size); tp *= 2)
            for (int pp = 1; tp * pp <= more; pp *= 2) {
                TrainOptions p = o;
                p.tensor_model_parallel_size *= tp;
                p.pipeline_model_parallel_size *= pp;
                std::string layout = format("%d GPUs", ranks * more);
                if (p.offload == "gradients") {  // is for one GPU
                    p.offload = "optimizer";
                    layout += " --offload optimizer";
                }
                if (tp > 1) layout += format(" --tp %d", p.tensor_model_parallel_size);
                if (pp > 1) layout += format(" --pp %d", p.pipeline_model_parallel_size);
                if (found.size() < before + 3) fits(layout, p, ranks * more);
            }
        if (found.size() > before) break;
    }
    return found;
}
