// The average of the weights over the steps of a run (--ema-decay D): after update t, counted from 1, a = d a + (1 - d) w in
// fp32, with d = min(D, t / (9 + t)), so that the first updates, which move fast, are soon forgotten (as TensorFlow's
// ExponentialMovingAverage with num_updates). It begins as the initial weights. Each rank averages its shards, as it does with
// AdamW's moments; training only is read, its bits are the same with and without.
#pragma once
#include <algorithm>

#include "training_memory.h"
#include "zero.h"

// After an update; 0: the weights have just been set, and the average's memory is zero.
inline void update_average(be::Ctx& ctx, const TrainingMemory& m, double decay, int64_t update) {
    const real keep = (real)std::min(decay, (double)update / (9.0 + (double)update));
    for (const Bucket& b : m.shards.buckets)
        if (m.average)
            be::average_weights(ctx, m.average + b.shard, m.params + b.mine, m.lower ? m.lower + b.shard : nullptr, b.n, keep);
}

// Exchanges the weights for the average; a second call exchanges them back, to the same bits. Called by all ranks, when all
// parameters have been gathered.
inline void swap_average(be::Ctx& ctx, const TrainingMemory& m, ParameterGatherer& gatherer) {
    for (const Bucket& b : m.shards.buckets) {
        be::swap_weights(ctx, m.average + b.shard, m.params + b.mine, m.lower ? m.lower + b.shard : nullptr, b.n);
        gatherer.start(b, m.params);
    }
    gatherer.finish();
}
