// The state of a training run besides its model, for any architecture: the position in the run, the history of earlier steps,
// and the checks of a run while it trains.
#pragma once
#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "../data/dataloader.h"
#include "../model/fp8_state.h"
#include "../ops.h"
#include "../optimizer/training_memory.h"
#include "../optimizer/zero.h"
#include "../report/logger.h"
#include "../options/options.h"
#include "diagnostics.h"
#include "../plan/from_options.h"
#include "../plan/guard.h"
#include "memory_check.h"
#include "../options/schedule.h"
#include "../options/skip.h"
#include "../checkpoint/training_state.h"

// The history of earlier steps, the same on every rank. Checkpoints keep it: a resumed run decides as if it had not stopped.
struct StepHistory {
    Fp8State fp8;  // scales of all layers
    Guard guard;
    Steadiness steadiness;

    // Loads the history in the checkpoint `dir`; state: the checkpoint's, or a new run's, which has no history.
    StepHistory(const TrainOptions& o, int layers, const TrainingState& state, const std::string& dir)
        : guard(guard_options(o)) {
        if (const Fp8Recipe recipe = fp8_recipe(o); recipe.on) fp8 = Fp8State(recipe, layers);
        fp8.from_json(state.fp8, state_file(dir));
        if (!state.guard.is_null()) guard.restore(state.guard, state_file(dir));
        if (!state.steadiness.is_null()) steadiness.restore(state.steadiness, state_file(dir));
    }
    void save(TrainingState& state) const {
        state.fp8 = fp8.to_json();
        state.guard = guard.state();
        state.steadiness = steadiness.state();
    }
    // Restores the history of a checkpoint. The guard's counts continue.
    void roll_back(const StepHistory& saved) {
        const Guard before = guard;
        *this = saved;
        guard = before;
        guard.rolled_back(saved.guard);
    }
};

// The load of experts, from the sums of all layers' routers (Pass's read_router_sums) in a step on `sequences` of `rows` rows.
inline MixtureLoad mixture_load(const std::vector<double>& sums, const ModelConfig& c, double sequences, double rows,
                                bool drops) {
    const size_t each = sums.size() / (size_t)c.L, E = (size_t)c.mixture.experts;
    MixtureLoad load;
    load.balance = load.z = load.busiest = load.entropy = 0;
    if (drops) load.dropped = 0;
    const double mixtures = c.mixtures();
    for (size_t layer = 0; layer < (size_t)c.L; layer++) {
        if (!c.has_mixture((int)layer)) continue;
        const size_t i = layer * each;
        load.balance += sums[i + RouterSums::balance] / sequences / mixtures;
        load.z += sums[i + RouterSums::z] / rows / mixtures;
        load.entropy += sums[i + RouterSums::entropy] / rows / mixtures;
        if (drops) load.dropped += (int64_t)sums[i + RouterSums::dropped];
        const double dropped = sums[i + RouterSums::dropped] / (rows * c.mixture.topk);
        MixtureLoad::Layer of_layer = {(int)layer, sums[i + RouterSums::entropy] / rows, dropped, {}};
        for (size_t e = 0; e < E; e++) {
            const double of_expert = sums[i + RouterSums::rows + e];
            of_layer.load.push_back(of_expert * (double)E / (rows * c.mixture.topk));
            load.busiest = std::max(load.busiest, of_layer.load.back());
            load.idle += of_expert == 0;
        }
        load.layers.push_back(of_layer);
    }
    return load;
}

// The rewards over pairs of answers; nothing if there are none.
inline std::optional<Rewards> rewards_of(const PreferenceSums& sums) {
    if (sums.n == 0) return {};
    const auto n = (double)sums.n;
    return Rewards{sums.chosen / n, sums.rejected / n, (double)sums.right / n};
}

struct TrainerBase {
    be::Ctx& ctx;
    const TrainOptions& o;
    const Schedule& schedule;
    const DataLoader& data;
    TrainingState state;  // counters: the position in the run
    StepHistory history;
    Verdict verdict;                // on the last step
    nlohmann::ordered_json health;  // of the last step's layers; null: not examined
    BatchRanges discards;           // batches that are drawn and dropped
    ParameterGatherer gatherer;
    MemoryCheck memory_check;
    PlantedFaults faults;
    LayerHealth layer_health;
    std::function<bool()> stop = [] { return false; };  // called before each micro-batch; returns the same on every rank

    // position: of the checkpoint `dir`, or of a new run.
    TrainerBase(be::Ctx& c, const TrainingMemory& m, const TrainOptions& options, const Schedule& s, const DataLoader& loader,
                const TrainingState& position, const std::string& dir)
        : ctx(c),
          o(options),
          schedule(s),
          data(loader),
          state(position),
          history(o, m.c.L, state, dir),
          gatherer(ctx, *m.ranks, m.shards, !o.no_overlap),
          memory_check(o.check_weight_hash_across_dp_replicas_interval > 0, ctx, m),
          faults(ctx, m),
          layer_health(ctx, m) {}

    int64_t batch() const { return state.batch(); }  // the next one's number
    // The counters at the next batch that is not skipped. Skipping does not change weights, moments or learning rate.
    Counters next_batch() const { return schedule.next(state, state.skips, discards); }
    bool finished() const { return next_batch().step >= schedule.total_steps; }
    // Whether something that needs a training step is due at the next one, or was due at a skipped batch right before it.
    bool due_in_step(int64_t interval) const {
        int64_t first = batch(), skipped = 0;
        for (int64_t before = -1; before != first;) {
            before = first;
            first = discards.first_of_row_before(first);
            const int64_t begin = state.skips.first_of_row_before(first);
            skipped += first - begin;
            first = begin;
        }
        return due_after(interval, std::max<int64_t>(state.step - skipped, 0), state.step + 1);
    }

    // Counts a step on `global_batch` samples, with the guard's verdict on it. Returns statistics from the counters and sums.
    StepStats count_step(int64_t global_batch, const LossSums& sums) {
        state.updates += verdict.apply;
        state.scheduled += verdict.apply ? global_batch : 0;
        state.step++;
        state.consumed += global_batch;
        state.tokens += global_batch * o.seq_length;
        state.loss = sums.loss();
        StepStats s;
        s.step = state.step;
        s.consumed_samples = state.consumed;
        s.global_batch = (int)global_batch;
        s.tokens = state.tokens;
        s.loss = state.loss;
        s.z_loss = sums.z / sums.n;
        s.lse_mean = sums.lse / sums.n;
        s.lse_max = sums.lse_max;
        s.rewards = rewards_of(sums.pair_sums);
        s.skipped = state.step - state.updates;
        s.applied = verdict.apply;
        return s;
    }
};
