// The average of the weights over the steps of a run (--ema-decay D): after update t, counted from 1, a = d a + (1 - d) w in
// fp32, with d = min(D, t / (9 + t)), so that the fast early updates are soon forgotten (as in TensorFlow's
// ExponentialMovingAverage with num_updates). It starts as the initial weights. Each rank averages its shards, as with AdamW's
// moments; averaging only reads the weights, so training has the same bits with and without it.
#pragma once
#include <algorithm>

#include "training_memory.h"
#include "zero.h"

// Call after each update. update 0: copies the initial weights into the average, whose memory is zero.
inline void update_average(be::Ctx& ctx, const TrainingMemory& m, double decay, int64_t update) {
    const real keep = (real)std::min(decay, (double)update / (9.0 + (double)update));
    if (!m.average) return;
    m.stream->begin(ctx);
    for (const Bucket& b : m.shards.buckets)
        m.stream->run(ctx, m.state(), StateUse::averaging(), b.shard, b.n,
                      [&](const OptimizerState& state, size_t first, size_t n) {
                          be::average_weights(ctx, state.average, m.weights_of(b) + first, state.master_low_bits, n, keep);
                      });
    m.stream->end(ctx);
}

// Exchanges the weights for the average; a second call exchanges them back, to the same bits. All ranks call it, after all
// parameters have been gathered.
inline void swap_average(be::Ctx& ctx, TrainingMemory& m, ParameterGatherer& gatherer) {
    m.sharded_params.drop(ctx);
    m.stream->begin(ctx);
    for (const Bucket& b : m.shards.buckets) {
        m.stream->run(ctx, m.state(), StateUse::swapping(), b.shard, b.n,
                      [&](const OptimizerState& state, size_t first, size_t n) {
                          be::swap_weights(ctx, state.average, m.weights_of(b) + first, state.master_low_bits, n);
                      });
        gatherer.start(b, m.params);
    }
    m.stream->end(ctx);
    gatherer.finish();
}
