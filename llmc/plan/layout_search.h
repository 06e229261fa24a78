// The search for a layout: among all ways to divide a training step over the ranks, finds the fastest ones, and the Pareto
// front of time and memory. Time comes from the planner (planner.h), memory from the functions that allocate it.
//
// Searched: ranks (if several numbers are possible), tensor and pipeline parallelism, chunks per pipeline rank, micro-batch,
// sequence parallelism, ZeRO, and recomputation: none, selective, mlp or full, of all layers or of as few as fit; if a layout
// does not fit, as many rows of logits at a time as fit; and FP8 if requested, since it changes the numbers of a training, with
// the weights' transposes in memory and without. Given options are fixed. Equivalent layouts are not tried twice: sequence
// parallelism without tensor parallelism, ZeRO without data parallelism.
//
// Simulating a pipeline is the most expensive part, so a layout is simulated only if it can matter. A rank runs its passes one
// after another, which gives a lower bound for the time of its step (least_step_seconds, usually within a few percent). Layouts
// are considered in the order of their bounds. One is skipped if an earlier one needs no more memory and takes no longer than
// this bound, unless the bound is below the time of the fastest few: then it may be one of these. The result is exactly the
// same as for trying all layouts.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../base/clock.h"
#include "from_options.h"
#include "nccl_memory.h"
#include "planner.h"
#include "../options/schedule.h"

struct Layout {
    int ranks = 1, tp = 1, cp = 1, pp = 1, vpp = 1, ep = 1, micro_batch = 1, zero = 1;
    bool sequence_parallel = true;
    std::string recompute = "none";
    int recompute_layers = 0;               // first layers of each stage with `recompute`; 0: all
    int head_rows = 0;                      // rows of logits in memory at a time; 0: the device's number
    std::string fp8;                        // --fp8-format; empty: bf16
    std::string transposes = "auto";        // --fp8-weight-transpose: in FP8 keep or on-the-fly
    std::string recompute_others = "none";  // a weaker policy for the other layers
    std::string offload = "none";           // --offload

    int dp() const { return ranks / (tp * cp * pp); }  // ranks with samples of their own
    bool offloads() const { return offload != "none"; }
    void apply(TrainOptions& o) const {
        o.tensor_model_parallel_size = tp;
        o.pipeline_model_parallel_size = pp;
        o.num_virtual_stages_per_pipeline_rank = vpp;
        o.expert_model_parallel_size = ep;
        o.context_parallel_size = cp;
        o.micro_batch_size = micro_batch;
        o.zero = zero;
        o.no_sequence_parallel = !sequence_parallel;
        o.recompute_granularity = recompute;
        o.recompute_num_layers = recompute_layers;
        o.recompute_other_layers = recompute_others;
        o.head_rows = head_rows;
        o.fp8_format = fp8;
        o.fp8_weight_transpose = fp8.empty() ? "auto" : transposes;
        o.offload = offload;
    }
    std::string recompute_in_words() const {
        if (!recompute_layers) return recompute;
        return format("%d %s, %s", recompute_layers, recompute.c_str(), recompute_others.c_str());
    }
};

struct Candidate {
    Layout layout;
    double bytes = 0;            // on the fullest rank
    double least_seconds = 0;    // lower bound of the step time
    double seconds = NAN;        // step time, if known
    std::shared_ptr<Plan> plan;  // if simulated
    double measured = NAN;       // seconds of a step in a trial
};

// The memory of one rank of a pipeline stage, for these options and number of ranks.
using MemoryOfStage = std::function<RankMemory(const TrainOptions&, const ModelConfig&, int ranks, int stage)>;

// The search problem.
struct LayoutProblem {
    TrainOptions o;          // everything that a layout does not determine; o.given: options fixed by the user
    std::vector<int> ranks;  // numbers of ranks to choose from
    size_t best = 5;         // number of fastest layouts to find
    bool search_fp8 = false;
    bool may_offload = false;  // layouts that do not fit may keep the optimizer's state on the host
    // The model with its vocabulary padded for tp; bytes of a rank's memory; the memory of a stage's rank of a layout; sets the
    // options' hardware for a number of ranks.
    std::function<ModelConfig(int tp)> model;
    std::function<double(int ranks)> memory;
    MemoryOfStage memory_of_stage;
    // Additional bytes that libraries use on a rank.
    std::function<double(const ModelConfig&, const Layout&)> bytes_of_libraries = [](auto&, auto&) { return 0; };
    // Memory of a rank's share of its host; queried if the optimizer's state is there.
    std::function<double(int ranks)> host_memory = [](int) { return INFINITY; };
    std::function<void(TrainOptions&, int ranks)> set_hardware = [](TrainOptions&, int) {};
};

struct FoundLayouts {
    std::vector<Candidate> best;             // the fastest, with their plans
    std::vector<Candidate> front;            // the Pareto front, from the fastest to the smallest
    std::vector<Candidate> fit;              // all that fit
    std::map<std::string, int64_t> refused;  // by reason
    int64_t tried = 0, simulated = 0;
    Candidate nearest;          // the layout closest to fitting; bytes 0: none
    double lacking = INFINITY;  // bytes by which it is too large
    double seconds = 0;         // duration of the search
};

namespace detail {

inline std::vector<int> divisors(int64_t n) {
    std::vector<int> found;
    for (int64_t d = 1; d * d <= n; d++) {
        if (n % d) continue;
        found.push_back((int)d);
        if (d != n / d) found.push_back((int)(n / d));
    }
    std::sort(found.begin(), found.end());
    return found;
}

struct FullRank {
    int rank;
    std::vector<int> layers, in_flight;  // of its chunks
};
// True if layers need different memory.
inline bool layers_differ(const TrainOptions& o, const ModelConfig& c) {
    return o.first_last_layers_bf16 || !c.mixture.dense_layers.empty();
}

// The ranks of a pipeline that may need the most memory. Ranks with the same layers and ends differ by the micro-batches that
// they hold: one that holds no more than another in any chunk needs no more memory. all: return every rank, since layers
// differ.
inline std::vector<FullRank> fullest_ranks(int pp, int vpp, const std::vector<int>& layers,
                                           const std::vector<int>& micro_batches, bool all) {
    std::vector<FullRank> fullest;
    for (int r = 0; r < pp; r++) {
        FullRank one = {r, {}, {}};
        for (int chunk = 0; chunk < vpp; chunk++) {
            one.layers.push_back(layers[(size_t)virtual_stage(pp, r, chunk)]);
            one.in_flight.push_back(micro_batches_in_flight(pp, r, vpp, micro_batches, chunk));
        }
        const auto covers = [&](const FullRank& other) {
            return !all && other.rank > 0 && r < pp - 1 && other.layers == one.layers &&
                   std::equal(one.in_flight.begin(), one.in_flight.end(), other.in_flight.begin(), std::less_equal<int>());
        };
        if (std::none_of(fullest.begin(), fullest.end(), covers)) fullest.push_back(std::move(one));
    }
    return fullest;
}

// The memory of a pipeline rank, derived from a few small layouts. It is a sum of terms that depend only on the ranks and
// layers (parameters, gradients, moments), only on the micro-batch and recomputation (shared buffers, logits), and on each
// micro-batch in flight, per layer and per rank. Regions start at whole pages, so the sum is exact. Each term is a difference
// between two layouts in the function that plans memory; it is cached by its dependencies.
class StageMemory {
public:
    explicit StageMemory(const LayoutProblem& problem) : problem_(problem) {}

    // True if the sum has this form: not if layers differ, if adapters have their own activations, or for generative tasks,
    // whose keys and values depend on the micro-batch and the rank's layers together.
    static bool can_add_up(const TrainOptions& o, const ModelConfig& c) {
        return c.L > 1 && !c.adapted() && !layers_differ(o, c) && o.eval_tasks.empty();
    }

    // The memory of the rank that needs the most. `o`: the options with the layout l; layers: of all stages.
    double most_bytes(const TrainOptions& o, const ModelConfig& c, const Layout& l, const std::vector<int>& layers,
                      const std::vector<FullRank>& ranks) {
        const Work& again = work(o, c, l.recompute);
        const Work& once = l.recompute_layers ? work(o, c, l.recompute_others) : again;
        double most = 0;
        for (const FullRank& r : ranks)
            most = std::max(most, of_ranks(o, c, l, r.rank, layers) + shared(again, o, c, r.rank == l.pp - 1) +
                                      kept(again, once, l, r.rank, layers, r.in_flight));
        return most;
    }

private:
    // A pipeline of three ranks, which hold a, b and the other layers, with a step of n micro-batches.
    double small(TrainOptions o, const ModelConfig& c, int a, int b, int n, int rank) {
        o.pipeline_layers = {std::to_string(a), std::to_string(b), std::to_string(c.L - a - b)};
        o.account_for_embedding_in_pipeline_split = o.account_for_loss_in_pipeline_split = false;
        o.pipeline_model_parallel_size = 3;
        o.num_virtual_stages_per_pipeline_rank = 1;
        o.recompute_num_layers = 0;
        o.zero = 1;
        o.offload = "none";  // of_ranks() adds it; differences between small layouts must not depend on its place
        o.rampup_batch_size.clear();
        const int ep = o.expert_model_parallel_size;
        o.global_batch_size = o.micro_batch_size * n * ep;
        const int ranks = 3 * o.tensor_model_parallel_size * o.context_parallel_size * ep;
        return (double)problem_.memory_of_stage(o, c, ranks, rank).bytes;
    }
    // The memory of the second of two micro-batches in flight.
    double of_micro_batch(const TrainOptions& o, const ModelConfig& c, int a, int b, int rank) {
        return small(o, c, a, b, 2, rank) - small(o, c, a, b, 1, rank);
    }

    // Which weights have codes: 0 none, 1 all, 2 all but their transposes.
    static int in_fp8(const TrainOptions& o) {
        return o.fp8_format.empty() ? 0 : o.fp8_weight_transpose == "on-the-fly" ? 2 : 1;
    }

    struct Work {
        double shared, layer, beside[2];  // shared: without the head; beside: outside layers, without and with the embedding
    };
    // The map's value for a key, computed if it is missing; if that throws, nothing is cached.
    template <class Map, class Make>
    static const typename Map::mapped_type& remembered(Map& map, const typename Map::key_type& key, Make make) {
        const auto found = map.find(key);
        return found != map.end() ? found->second : map.emplace(key, make()).first->second;
    }
    const Work& work(const TrainOptions& of, const ModelConfig& c, const std::string& recompute) {
        return remembered(work_,
                          {of.tensor_model_parallel_size, of.context_parallel_size, of.expert_model_parallel_size,
                           of.micro_batch_size, of.no_sequence_parallel, in_fp8(of), recompute},
                          [&] {
                              TrainOptions o = of;
                              o.recompute_granularity = recompute;
                              Work w;
                              const double one = of_micro_batch(o, c, 0, 1, 1);
                              w.layer = of_micro_batch(o, c, 0, 2, 1) - one;
                              w.beside[0] = one - w.layer;
                              w.beside[1] = of_micro_batch(o, c, 1, c.L - 1, 0) - w.layer;
                              w.shared = small(o, c, 0, 1, 1, 1) - one;
                              return w;
                          });
    }
    double shared(const Work& w, const TrainOptions& o, const ModelConfig& c, bool head) {
        if (!head) return w.shared;
        return remembered(with_head_, {&w, o.head_rows}, [&] { return small(o, c, 0, c.L - 1, 1, 2) - w.layer - w.beside[0]; });
    }
    // again: of layers recomputed as in the layout; once: of the others.
    static double kept(const Work& again, const Work& once, const Layout& l, int rank, const std::vector<int>& layers,
                       const std::vector<int>& in_flight) {
        double bytes = 0;
        for (int chunk = 0; chunk < l.vpp; chunk++) {
            const int stage = virtual_stage(l.pp, rank, chunk), all = layers[(size_t)stage];
            const int recomputed = l.recompute_layers ? std::min(l.recompute_layers, all) : all;
            const double of_layers = recomputed * again.layer + (all - recomputed) * once.layer;
            bytes += in_flight[(size_t)chunk] * (again.beside[stage == 0] + of_layers);
        }
        return bytes;
    }
    // The remaining terms, independent of micro-batch and recomputation.
    double of_ranks(const TrainOptions& of, const ModelConfig& c, const Layout& of_rank, int rank,
                    const std::vector<int>& layers) {
        Layout l = of_rank;
        int all = 0;
        for (int chunk = 0; chunk < l.vpp; chunk++) all += layers[(size_t)virtual_stage(l.pp, rank, chunk)];
        return remembered(of_ranks_,
                          {l.ranks, l.tp, l.cp, l.pp, l.ep, l.zero, all, rank == 0, rank == l.pp - 1, l.sequence_parallel,
                           in_fp8(of), l.offloads()},
                          [&] {
                              TrainOptions o = of;
                              std::vector<int> in_flight;
                              l.recompute = "full";
                              l.recompute_layers = 0;
                              l.recompute_others = "none";
                              l.apply(o);
                              o.rampup_batch_size.clear();
                              o.global_batch_size = l.micro_batch * l.dp() * l.pp;
                              for (int chunk = 0; chunk < l.vpp; chunk++)
                                  in_flight.push_back(micro_batches_in_flight(l.pp, rank, l.vpp, {l.pp}, chunk));
                              const double whole = (double)problem_.memory_of_stage(o, c, l.ranks, rank).bytes;
                              const Work& w = work(o, c, l.recompute);
                              return whole - shared(w, o, c, rank == l.pp - 1) - kept(w, w, l, rank, layers, in_flight);
                          });
    }

    const LayoutProblem& problem_;
    std::map<std::tuple<int, int, int, int, bool, int, std::string>, Work> work_;
    std::map<std::pair<const Work*, int>, double> with_head_;  // by rows of logits
    std::map<std::tuple<int, int, int, int, int, int, int, bool, bool, bool, int, bool>, double> of_ranks_;
};

// A search in progress.
class LayoutSearcher {
public:
    explicit LayoutSearcher(const LayoutProblem& problem) : problem_(problem), o_(problem.o), memory_(problem) {}

    FoundLayouts run() {
        const double begin = monotonic_seconds();
        // Higher stages of ZeRO send gradients, and parameters, in every micro-batch: only if nothing else fits, or on request.
        for (const bool higher : {false, true}) {
            if (higher && (given("zero") || problem_.o.detect_nondeterminism || !found_.fit.empty())) break;
            higher_stages_ = higher;
            for (const int ranks : problem_.ranks) {
                o_ = problem_.o;
                problem_.set_hardware(o_, ranks);
                most_ = problem_.memory(ranks);
                for (const int tp : divisors(ranks))
                    if (is_free("tensor-model-parallel-size", tp, problem_.o.tensor_model_parallel_size)) try_tensor(ranks, tp);
            }
        }
        choose();
        found_.seconds = monotonic_seconds() - begin;
        return std::move(found_);
    }

private:
    bool given(const char* option) const { return problem_.o.given.count(option) > 0; }
    // True if a value may be tried: the option is not given, or has this value.
    template <class Value>
    bool is_free(const char* option, const Value& value, const Value& of_user) const {
        return !given(option) || value == of_user;
    }
    // Counts a reason why layouts are rejected, if `check` fails.
    template <class Check>
    bool passes(const char* reason, Check check) {
        try {
            check();
            return true;
        } catch (const Error&) {
            refuse(reason);
            return false;
        }
    }
    void refuse(const std::string& reason) {
        found_.refused[reason]++;
        found_.tried++;
    }

    void try_tensor(int ranks, int tp) {
        Layout l;
        l.ranks = ranks;
        l.tp = tp;
        o_.tensor_model_parallel_size = tp;
        if (tp > 1024) return refuse("more than 1,024 tensor-parallel ranks");
        if (!passes("tensor parallelism that does not divide heads or width", [&] {
                c_ = problem_.model(tp);
                check_tensor_parallel(c_, tp, false, 0);
            }))
            return;
        for (const int pp : divisors(ranks / tp)) {
            l.pp = pp;
            if (!is_free("pipeline-model-parallel-size", pp, problem_.o.pipeline_model_parallel_size)) continue;
            if (pp > 1024 || pp > c_.L + 2) {
                refuse("more pipeline stages than layers");
                continue;
            }
            for (int vpp = 1; vpp == 1 || (pp > 1 && pp * vpp <= c_.L + 2); vpp++) {
                l.vpp = vpp;
                if (!is_free("num-virtual-stages-per-pipeline-rank", vpp, problem_.o.num_virtual_stages_per_pipeline_rank))
                    continue;
                l.cp = 1;
                for (const int cp : divisors(l.dp())) {
                    l.cp = cp;
                    if (can_cut_context(cp, l.tp)) try_experts(l);
                }
            }
        }
    }

    // Unless --context-parallel-size is given, parts of at least 4,096 rows: shorter sequences fit without it.
    bool can_cut_context(int cp, int tp) {
        if (!is_free("context-parallel-size", cp, problem_.o.context_parallel_size)) return false;
        if (cp == 1) return true;
        if (exchanges_heads(o_) &&
            !passes("key/value heads that context parallelism does not divide", [&] { check_exchange_of_heads(c_, cp, tp); }))
            return false;
        if (given("context-parallel-size")) return true;
        const int64_t rows = o_.seq_length + c_.virtual_tokens.count;
        return rows / cp >= 4096 && passes("sequences that context parallelism does not divide or support", [&] {
                   check_context_parallel(c_, cp, 1, rows);
                   TrainOptions o = o_;
                   o.context_parallel_size = cp;
                   check_context_parallel_options(o);
               });
    }
    void try_experts(Layout l) {
        for (const int ep : divisors(c_.mixture.on() ? std::gcd(l.dp() * l.cp, c_.mixture.experts) : 1)) {
            l.ep = ep;
            if (l.cp > 1 && l.cp % ep) continue;
            if (is_free("expert-model-parallel-size", ep, problem_.o.expert_model_parallel_size)) try_pipeline(l);
        }
    }

    void try_pipeline(Layout l) {
        o_.pipeline_model_parallel_size = l.pp;
        o_.num_virtual_stages_per_pipeline_rank = l.vpp;
        o_.expert_model_parallel_size = l.ep;
        o_.context_parallel_size = l.cp;
        if (!passes("more pipeline stages than layers",
                    [&] { layers_ = layers_of_stages(o_, c_, make_mesh(l.ranks, 0, l.tp, l.pp, l.vpp, l.ep, l.cp)); }))
            return;
        const int64_t batch = o_.global_batch_size;
        if (given("micro-batch-size")) return try_batch(l, problem_.o.micro_batch_size);
        if (batch % l.dp()) return refuse("a global batch that data-parallel ranks do not divide");
        for (const int micro_batch : divisors(batch / l.dp())) try_batch(l, micro_batch);
    }

    void try_batch(Layout l, int micro_batch) {
        l.micro_batch = o_.micro_batch_size = micro_batch;
        if ((int64_t)micro_batch * (o_.seq_length + c_.virtual_tokens.count) > INT_MAX)
            return refuse("too many tokens per pass");
        Schedule s;
        if (!passes("a global batch that micro-batches do not divide", [&] { read_batches(s, o_, l.dp()); }) ||
            !passes("a ramp-up of the batch that micro-batches do not divide", [&] { read_rampup(s, o_); }) ||
            !passes("micro-batches that the ranks of an interleaved pipeline do not divide", [&] { check_pipeline(s, o_); }))
            return;
        fullest_ = fullest_of(l, s.micro_batches());
        for (const bool cut : {true, false})
            for (const int zero : {1, 0, 2, 3}) {
                if (!given("zero") && (zero > 1) != higher_stages_) continue;
                if (l.tp == 1 ? !cut : !is_free("no-sequence-parallel", cut, !problem_.o.no_sequence_parallel)) continue;
                if (l.dp() * l.cp == 1 && !given("zero") ? zero != 1 : !is_free("zero", zero, problem_.o.zero)) continue;
                l.sequence_parallel = l.tp == 1 ? !problem_.o.no_sequence_parallel : cut;
                l.zero = zero;
                if (passes("sequence parallelism that does not divide a sequence", [&] {
                        check_tensor_parallel(c_, l.tp, l.sequence_parallel, (o_.seq_length + c_.virtual_tokens.count) / l.cp);
                    }))
                    for (const bool fp8 : {false, true}) {
                        if (fp8 && !problem_.search_fp8) continue;
                        l.fp8 = fp8 ? "hybrid" : problem_.o.fp8_format;
                        try_transposes(l);
                    }
            }
    }

    // In FP8 with the weights' transposes in memory, and without.
    void try_transposes(Layout l) {
        const std::string& given = problem_.o.fp8_weight_transpose;
        for (const char* transposes : {"keep", "on-the-fly"}) {
            l.transposes = l.fp8.empty() ? "auto" : transposes;
            if (l.fp8.empty() || given == "auto" || given == transposes) try_places_of_state(l);
            if (l.fp8.empty()) return;
        }
    }

    // Also tries the optimizer's state on the host, if layouts do not fit with it on the device.
    void try_places_of_state(Layout l) {
        l.offload = problem_.o.offload;
        if (try_recomputation(l) || l.offloads() || given("offload") || !problem_.may_offload) return;
        l.offload = "optimizer";
        try_recomputation(l);
    }

    // Returns true if the layout fits without recomputation, or with the given one.
    bool try_recomputation(Layout l) {
        if (given("recompute-granularity")) {
            l.recompute = problem_.o.recompute_granularity;
            l.recompute_layers = problem_.o.recompute_num_layers;
            l.recompute_others = problem_.o.recompute_other_layers;
            return add_largest_head(l);
        }
        // Each policy costs more time per saved byte than the weaker one before it, so the fastest mixtures of policies combine
        // two neighbors.
        bool weaker_fits = true, first_fits = false;
        std::string weaker;
        for (const char* policy : recompute_words) {
            l.recompute = policy;
            const bool fits = add_largest_head(l);
            if (weaker.empty()) first_fits = fits;
            if (fits && !weaker_fits) add_fewest_layers(l, weaker);
            weaker_fits = fits;
            weaker = policy;
        }
        return first_fits;
    }

    // Adds a layout with the device's number of rows of logits or, if that does not fit, with the largest power of
    // 2 from 256 on that fits; l is set to it.
    bool add_largest_head(Layout& l) {
        l.head_rows = problem_.o.head_rows;
        const int fewest = 256;  // fewer take longer to read the head's weights than to multiply by them
        const int64_t rows = (int64_t)l.micro_batch * (o_.seq_length + c_.virtual_tokens.count) / l.cp;
        const auto with_rows = [&](int head_rows) {
            l.head_rows = head_rows;
            return with_bytes(l);
        };
        const auto largest = [&] {
            const Candidate whole = with_rows(problem_.o.head_rows);
            if (whole.bytes <= most_ || given("head-rows") || rows <= fewest) return whole;
            Candidate best = with_rows(fewest);
            if (best.bytes >= whole.bytes) return whole;
            while (best.bytes <= most_ && 2 * best.layout.head_rows < rows) {
                Candidate more = with_rows(2 * best.layout.head_rows);
                if (more.bytes > most_) break;
                best = std::move(more);
            }
            return best;
        };
        Candidate found;
        if (!passes(unsupported, [&] { found = largest(); })) return false;
        l = found.layout;
        return add(std::move(found));
    }
    static constexpr const char* unsupported = "sizes or options that the program does not support";

    // Adds the mixture of a policy that fits and a weaker one that does not, with the fewest layers of the stronger one. Fewer
    // take less time and more memory.
    void add_fewest_layers(Layout l, const std::string& weaker) {
        l.recompute_others = weaker;
        int fewest = 1, enough = *std::max_element(layers_.begin(), layers_.end());
        const int all = enough;
        while (fewest < enough) {
            l.recompute_layers = (fewest + enough) / 2;
            if (with_bytes(l).bytes <= most_) enough = l.recompute_layers;
            else fewest = l.recompute_layers + 1;
        }
        l.recompute_layers = enough;
        if (enough < all) add(with_bytes(l));
    }

    // On the fullest rank.
    double bytes_of(const Layout& l) {
        l.apply(o_);
        if (StageMemory::can_add_up(o_, c_)) return memory_.most_bytes(o_, c_, l, layers_, fullest_);
        size_t most = 0;
        for (const FullRank& r : fullest_) most = std::max(most, problem_.memory_of_stage(o_, c_, l.ranks, r.rank).bytes);
        return (double)most;
    }
    Candidate with_bytes(const Layout& l) {
        Candidate candidate;
        candidate.layout = l;
        candidate.bytes = bytes_of(l) + problem_.bytes_of_libraries(c_, l);
        return candidate;
    }

    // Adds a layout, and returns whether it fits.
    bool add(Candidate candidate) {
        found_.tried++;
        if (candidate.bytes - most_ < found_.lacking) {
            found_.lacking = candidate.bytes - most_;
            found_.nearest = candidate;
        }
        if (!(candidate.bytes <= most_)) {
            found_.refused["out of memory"]++;
            return false;
        }
        if (!fits_on_host(candidate.layout)) {
            found_.refused["too little host memory"]++;
            return false;
        }
        candidate.least_seconds = least_step_seconds(begin_plan(input_of(candidate.layout)));
        found_.fit.push_back(std::move(candidate));
        return true;
    }

    bool fits_on_host(const Layout& l) {
        if (!l.offloads()) return true;
        l.apply(o_);
        const double most = problem_.host_memory(l.ranks);
        return std::all_of(fullest_.begin(), fullest_.end(), [&](const FullRank& r) {
            return (double)problem_.memory_of_stage(o_, c_, l.ranks, r.rank).host <= most;
        });
    }

    PlanInput input_of(const Layout& l) {
        l.apply(o_);
        PlanInput in = plan_input(o_, c_, l.ranks, layers_, o_.global_batch_size, sizeof(floatX));
        in.sizes = &sizes_;
        return in;
    }

    // The same for a layout that was added earlier, in another state of this search.
    PlanInput input_again(const Layout& l) {
        o_ = problem_.o;
        problem_.set_hardware(o_, l.ranks);
        l.apply(o_);
        c_ = problem_.model(l.tp);
        layers_ = layers_of_stages(o_, c_, make_mesh(l.ranks, 0, l.tp, l.pp, l.vpp, l.ep, l.cp));
        return input_of(l);
    }

    // Simulates layouts that may be among the fastest or on the front, and selects these.
    void choose() {
        std::vector<Candidate>& fit = found_.fit;
        std::stable_sort(fit.begin(), fit.end(), [](const Candidate& a, const Candidate& b) {
            return a.least_seconds != b.least_seconds ? a.least_seconds < b.least_seconds : a.bytes < b.bytes;
        });
        std::vector<Candidate*> known;  // from the fastest on
        const auto faster = [](const Candidate* a, const Candidate* b) {
            return a->seconds != b->seconds ? a->seconds < b->seconds : a->bytes < b->bytes;
        };
        for (Candidate& one : fit) {
            const double bound = one.least_seconds * (1 - 1e-9);  // sums in another order
            const auto beats = [&](const Candidate* other) { return other->bytes <= one.bytes && other->seconds <= bound; };
            const bool may_be_best = known.size() < problem_.best || bound < known[problem_.best - 1]->seconds;
            if (!may_be_best && std::any_of(known.begin(), known.end(), beats)) continue;
            one.plan = std::make_shared<Plan>(make_plan(input_again(one.layout)));
            one.plan->in.sizes = nullptr;
            one.seconds = one.plan->step_seconds;
            found_.simulated++;
            known.insert(std::upper_bound(known.begin(), known.end(), &one, faster), &one);
        }
        for (size_t i = 0; i < std::min(problem_.best, known.size()); i++) found_.best.push_back(*known[i]);
        double least = INFINITY;
        for (const Candidate* one : known) {
            if (one->bytes >= least) continue;
            least = one->bytes;
            found_.front.push_back(*one);
        }
    }

    const std::vector<FullRank>& fullest_of(const Layout& l, const std::vector<int>& micro_batches) {
        std::set<int> sizes;
        for (const int n : micro_batches) sizes.insert(std::min(n, 3 * l.pp));  // beyond that the pattern repeats
        const std::vector<int> key(sizes.begin(), sizes.end());
        const auto [place, added] = known_fullest_.try_emplace({l.pp, l.vpp, key});
        if (added) place->second = fullest_ranks(l.pp, l.vpp, layers_, micro_batches, layers_differ(o_, c_));
        return place->second;
    }

    const LayoutProblem& problem_;
    FoundLayouts found_;
    TrainOptions o_;           // with the current layout
    ModelConfig c_;            // for its tp
    std::vector<int> layers_;  // of its stages
    std::vector<FullRank> fullest_;
    StageMemory memory_;
    double most_ = 0;
    bool higher_stages_ = false;  // of ZeRO: 2 and 3 are tried instead of 0 and 1, unless one is given
    std::map<StageKey, double> sizes_;
    std::map<std::tuple<int, int, std::vector<int>>, std::vector<FullRank>> known_fullest_;
};

}  // namespace detail

inline FoundLayouts search_layouts(const LayoutProblem& problem) { return detail::LayoutSearcher(problem).run(); }
