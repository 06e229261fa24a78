// ZeRO-1 (Rajbhandari et al., 2020): the ranks of a data-parallel group shard the optimizer's work and state. The parameter
// buffer is cut into buckets, and each bucket into one shard per rank. A bucket's gradients are reduce-scattered, so a rank has
// the sums for its own shard; it holds fp32 weights and moments for that shard only, and updates it; the new parameters are
// all-gathered. A bucket that belongs to one rank (shard.h) is reduced to it and broadcast from it. Bytes per parameter and
// rank: 2 (parameters) + 4 (gradients, or 2 in bf16) + 10 / ranks (lower halves of fp32 weights, moments; 6 / ranks with both
// moments in bf16). Without ZeRO (--zero 0), gradients are all-reduced and every rank computes the whole update. ZeRO-2 shards
// the gradients as well (sharded_gradients.h), ZeRO-3 the parameters (sharded_parameters.h).
#pragma once
#include <vector>

#include "../parallel/comm.h"
#include "../parallel/ranks.h"
#include "shard.h"

// Sums over ranks, in place, in the elements' own type: bf16 moves half the bytes. CPUs sum in fp32 and round once; NCCL's
// rings round each addition (comm_gpu.cuh).
inline void all_reduce(be::Ctx& ctx, be::Comm& comm, const Elements& x, size_t n) {
    x.visit([&](auto* elements) { be::all_reduce(ctx, comm, elements, n); });
}

// Sums gradients over data-parallel ranks, bucket by bucket from the end of the matrices to their front as backward completes
// them, overlapping with the work on ctx. overlap = false: all of them after backward, for comparison. Without ZeRO each is an
// all-reduce in order with that work, which overlaps with nothing.
class GradientReducer {
public:
    GradientReducer(be::Ctx& ctx, Ranks& ranks, const Shards& shards, const ParameterTable& table, const Elements& grads,
                    bool overlap)
        : ctx_(ctx),
          ranks_(ranks),
          shards_(shards),
          grads_(grads),
          limit_(overlap ? table.decayed : 0),
          pending_(shards.buckets.size()),
          started_(shards.buckets.size(), false) {
        // Gradients to which another stage adds are not ready before the end.
        for (const TensorSpec& t : table.rows)
            if (t.copy) limit_ = std::min(limit_, t.offset);
    }

    // Starts all buckets of matrices from element `begin` on; their gradients must be complete. `begin` decreases from call to
    // call.
    void ready(size_t begin) {
        for (size_t i = shards_.buckets.size(); i-- > 0;) {
            const Bucket& b = shards_.buckets[i];
            if (b.begin >= begin && b.end <= limit_) start(i);
        }
    }
    // All gradients are complete: starts the remaining buckets and waits.
    void finish() {
        for (size_t i = shards_.buckets.size(); i-- > 0;) start(i);
        for (size_t i = shards_.buckets.size(); i-- > 0;) be::finish(ctx_, pending_[i]);
    }

private:
    void start(size_t i) {
        const Bucket& b = shards_.buckets[i];
        if (started_[i]) return;
        started_[i] = true;
        be::Comm& comm = ranks_.that_share(b.of_experts);
        if (!shards_.cut) return all_reduce(ctx_, comm, grads_.from(b.begin), b.n);
        grads_.from(b.begin).visit([&](auto* x) {
            pending_[i] = b.owner < 0 ? be::start_reduce_scatter(ctx_, comm, x, b.n)
                                      : be::start_reduce(ctx_, comm, x, b.end - b.begin, b.owner);
        });
    }

    be::Ctx& ctx_;
    Ranks& ranks_;
    const Shards& shards_;
    Elements grads_;
    size_t limit_;
    std::vector<be::Pending> pending_;
    std::vector<bool> started_;
};

// Sends updated parameters to all data-parallel ranks, bucket by bucket, overlapping with the update of the next bucket and the
// next forward pass. Readers of parameters call need() first. overlap = false: start() waits, for comparison. Without ZeRO
// every rank has updated all of them, and nothing is sent; with ZeRO-3 each pass gathers them (sharded_parameters.h).
class ParameterGatherer {
public:
    ParameterGatherer(be::Ctx& ctx, Ranks& ranks, const Shards& shards, bool overlap)
        : ctx_(ctx), ranks_(ranks), shards_(shards), overlap_(overlap), pending_(shards.buckets.size()) {}

    // This rank's shard of a bucket of `params` was updated.
    void start(const Bucket& b, floatX* params) {
        if (!shards_.cut || shards_.cut_params) return;
        be::Pending& pending = pending_[(size_t)(&b - shards_.buckets.data())];
        be::Comm& comm = ranks_.that_share(b.of_experts);
        pending = b.owner < 0 ? be::start_all_gather(ctx_, comm, params + b.begin, b.n)
                              : be::start_broadcast(ctx_, comm, params + b.begin, b.end - b.begin, b.owner);
        if (!overlap_) be::finish(ctx_, pending);
    }
    // Waits for the matrices before this element, and for all vectors.
    void need(size_t end) {
        for (size_t i = 0; i < pending_.size(); i++)
            if (shards_.buckets[i].begin < end || !shards_.buckets[i].decay) be::finish(ctx_, pending_[i]);
    }
    void finish() { need(SIZE_MAX); }

private:
    be::Ctx& ctx_;
    Ranks& ranks_;
    const Shards& shards_;
    bool overlap_;
    std::vector<be::Pending> pending_;
};
