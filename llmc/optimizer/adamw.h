// AdamW (Loshchilov and Hutter, 2019) and Lion (Chen et al., 2023), which update each element by itself, on this rank's shards
// of all parameters except whole matrices, which Muon updates (muon.h). Each tensor has its own factors of learning rate,
// epsilon and weight decay (parametrization.h); vectors have no weight decay. Neither optimizer's step depends on the
// gradient's size, so muP's factors apply to both.
#pragma once
#include <algorithm>
#include <cstdint>

#include "../model/parameters.h"
#include "../ops.h"
#include "training_memory.h"

struct ElementwiseStep {
    double lr, beta1, beta2, eps, weight_decay;  // Lion has no eps
    double grad_scale;                           // factor of the gradients
    int64_t step;                                // counts updates, from 1
    uint64_t rounding_key;
};

// Calls updated(bucket) for each bucket, in the same order on all ranks: first the vectors, which every block needs, then the
// matrices in the order of the forward pass.
template <class Updated>
void update_elementwise(be::Ctx& ctx, const TrainingMemory& m, const ElementwiseStep& s, Updated updated) {
    AdamW constants = {0, (real)s.beta1, (real)s.beta2, 0, 0, (real)s.grad_scale, s.step};
    // `weights`, `state` and `gradients` belong to elements [begin, begin + n) of the buffer.
    const auto update = [&](floatX* weights, const OptimizerState& state, const Elements& gradients, size_t begin, size_t n,
                            bool decay) {
        const auto update_part = [&](size_t first, size_t count, const Rounding& rounding) {
            floatX* const w = weights + (first - begin);
            const OptimizerState part = state.from(first - begin);
            const Elements grads = gradients.from(first - begin);
            if (m.optimizer->value == OptimizerKind::lion)
                return be::lion(ctx, w, part.master_low_bits, part.exp_avg, grads, count, constants, rounding);
            be::adamw(ctx, w, part.master_low_bits, part.exp_avg, part.exp_avg_sq, grads, count, constants, rounding);
        };
        for (const FactorRange& r : m.table.factors) {
            const size_t first = std::max(r.begin, begin), last = std::min(r.end, begin + n);
            if (first >= last) continue;
            constants.lr = (real)(s.lr * r.factors.lr);
            constants.eps = (real)(s.eps * r.factors.eps);
            constants.weight_decay = decay ? (real)(s.weight_decay * r.factors.weight_decay) : real(0);
            if (m.exp_avg.rounded() || m.exp_avg_sq.rounded())
                for_each_rounding(m.table, first, last, s.rounding_key, update_part);
            else update_part(first, last - first, {});
        }
    };
    m.stream->begin(ctx);
    for (const bool decay : {false, true})
        for (const Bucket& b : m.shards.buckets) {
            if (b.decay != decay || b.whole_matrix()) continue;
            m.stream->run(ctx, m.state(), StateUse::adamw(), b.shard, b.n,
                          [&](const OptimizerState& state, size_t first, size_t n) {
                              update(m.weights_of(b) + first, state, m.gradients_of(b).from(first), b.mine + first, n, decay);
                          });
            updated(b);
        }
    m.stream->end(ctx);
}
