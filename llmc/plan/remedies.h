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
class RemedySearch {
public:
    RemedySearch(const TrainOptions& o, int ranks, bool memory_is_host, double most, BytesOf bytes_of)
        : o_(o), least_(o), ranks_(ranks), memory_is_host_(memory_is_host), most_(most), bytes_of_(bytes_of) {}

    std::vector<Remedy> find() {
        recompute_more_layers();
        if (memory_is_host_ && !o_.save_in_foreground)
            change_one("--save-in-foreground", [](TrainOptions& p) { p.save_in_foreground = true; });
        if (!o_.zero) change_one("--zero 1", [](TrainOptions& p) { p.zero = 1; });
        recompute_more();
        smaller_micro_batch(o_, "");
        if (o_.recompute_granularity != "full") {
            least_.recompute_granularity = "full";
            words_ += "--recompute full ";
        }
        if (found_.empty() && !words_.empty()) change_all(words_);
        if (found_.empty()) narrow_moments();
        if (found_.empty() && o_.main_grads_dtype != "bf16") {
            least_.main_grads_dtype = "bf16";
            change_all(words_ += "--main-grads-dtype bf16 ");
        }
        if (o_.zero > 0 && !o_.detect_nondeterminism) {
            for (least_.zero = o_.zero + 1; found_.empty() && least_.zero <= 3; least_.zero++)
                change_all(words_ + format("--zero %d ", least_.zero));
            least_.zero = o_.zero;
        }
        if (memory_is_host_) return found_;
        offload();
        add_gpus();
        return found_;
    }

private:
    const TrainOptions& o_;
    TrainOptions least_;  // the least memory on these ranks, apart from the micro-batch
    std::string words_;   // its changes, each followed by a blank
    int ranks_;
    bool memory_is_host_;
    double most_;
    BytesOf bytes_of_;
    std::vector<Remedy> found_;

    bool fits(const std::string& words, const TrainOptions& p, int ranks) {
        try {
            const double bytes = (double)bytes_of_(p, ranks);
            if (bytes <= most_) found_.push_back({words, bytes});
            return bytes <= most_;
        } catch (const Error&) {
            return false;
        }
    }
    void smaller_micro_batch(TrainOptions p, const std::string& words) {
        while ((p.micro_batch_size /= 2) > 0)
            if (fits(words + format("--micro-batch-size %d", p.micro_batch_size), p, ranks_)) return;
    }
    template <class Change>
    void change_one(const std::string& words, Change change) {
        TrainOptions p = o_;
        change(p);
        change(least_);
        words_ += words + " ";
        fits(words, p, ranks_);
    }
    void change_all(const std::string& words) {
        if (!fits(words.substr(0, words.size() - 1), least_, ranks_)) smaller_micro_batch(least_, words);
    }
    void recompute_more_layers() {
        if (!o_.recompute_num_layers) return;
        const FewestLayers n = fewest_layers(o_, most_, [&](const TrainOptions& p) { return (double)bytes_of_(p, ranks_); });
        const auto layers = [](int layers) { return format("--recompute-num-layers %d", layers); };
        TrainOptions p = o_;
        p.recompute_num_layers = n.enough;
        if (n.enough > o_.recompute_num_layers) fits(layers(n.enough), p, ranks_);
        if (n.all <= o_.recompute_num_layers) return;
        least_.recompute_num_layers = n.all;
        words_ += layers(n.all) + " ";
    }
    void recompute_more() {
        for (const char* policy : recompute_words) {
            if (recompute_policy(policy) <= recompute_policy(o_.recompute_granularity)) continue;
            TrainOptions p = o_;
            p.recompute_granularity = policy;
            if (fits(std::string("--recompute ") + policy, p, ranks_)) break;
        }
    }
    void narrow_moments() {
        const bool first = o_.exp_avg_dtype == "fp32",
                   second = o_.exp_avg_sq_dtype == "fp32" && optimizer_row(o_.optimizer).narrows_second_moment();
        if (!first && !second) return;
        if (first) least_.exp_avg_dtype = "bf16";
        if (second) least_.exp_avg_sq_dtype = "bf16";
        words_ += std::string(first ? "--exp-avg-dtype bf16 " : "") + (second ? "--exp-avg-sq-dtype bf16 " : "");
        change_all(words_);
    }
    void offload() {
        for (const char* part : {"optimizer", "gradients"}) {
            if (!found_.empty() || !optimizer_row(o_.optimizer).can_offload() || o_.offload == "gradients") break;
            const bool gradients = part == std::string("gradients");
            if (gradients ? ranks_ > 1 : o_.offload != "none") continue;
            least_.offload = part;
            change_all(words_ + "--offload " + part + " ");
        }
    }
    // The smallest number of GPUs that suffices, split by data (ZeRO), tensor or pipeline parallelism, and if that
    // does not suffice in a mixture of experts by expert parallelism.
    void add_gpus() {
        for (int more = 2; more <= 1024; more *= 2) {
            const size_t before = found_.size();
            for (int tp = 1; tp <= more && tp * o_.tensor_model_parallel_size <= std::min(8, o_.node_size); tp *= 2)
                for (int pp = 1; tp * pp <= more; pp *= 2)
                    if (found_.size() < before + 3) split(more, tp, pp);
            if (found_.size() > before) break;
        }
    }
    void split(int more, int tp, int pp) {
        TrainOptions p = o_;
        p.tensor_model_parallel_size *= tp;
        p.pipeline_model_parallel_size *= pp;
        std::string layout = format("%d GPUs", ranks_ * more);
        if (p.offload == "gradients") {  // is for one GPU
            p.offload = "optimizer";
            layout += " --offload optimizer";
        }
        if (tp > 1) layout += format(" --tp %d", p.tensor_model_parallel_size);
        if (pp > 1) layout += format(" --pp %d", p.pipeline_model_parallel_size);
        if (fits(layout, p, ranks_ * more) || p.expert_model_parallel_size > 1) return;
        const int dp = ranks_ * more / (p.tensor_model_parallel_size * p.pipeline_model_parallel_size);
        for (int& ep = p.expert_model_parallel_size = 2; ep <= dp; ep *= 2)
            if (fits(layout + format(" --ep %d", ep), p, ranks_ * more)) return;
    }
};
template <class BytesOf>
std::vector<Remedy> find_remedies(const TrainOptions& o, int ranks, bool memory_is_host, double most, BytesOf bytes_of) {
    return RemedySearch<BytesOf>(o, ranks, memory_is_host, most, bytes_of).find();
}
