// ZeRO-1 (Rajbhandari et al., 2020): the ranks of a data-parallel group share the optimizer's work and state. The buffer of
// parameters is cut into buckets, each bucket into one part per rank. Gradients of a bucket are reduce-scattered, so that a
// rank has the sums of its own part; there it has fp32 weights and moments, and updates; the new parameters are all-gathered.
// Bytes per parameter and rank: 2 (parameters) + 4 (gradients, or 2 in bf16) + 10 / ranks (lower halves of fp32 weights,
// moments; 6 / ranks with both moments in bf16).
// Without it (--zero 0) gradients are all-reduced, and every rank does all of the update.
#pragma once
#include <vector>

#include "comm.h"
#include "shard.h"

// Sums over ranks, in place: in the elements' own type, which in bf16 moves half the bytes. On CPUs sums are fp32 and rounded
// once, NCCL's rings round each addition (comm_gpu.cuh).
inline void all_reduce(be::Ctx& ctx, be::Comm& comm, const Elements& x, size_t n) {
    x.visit([&](auto* elements) { be::all_reduce(ctx, comm, elements, n); });
}

// Sums gradients over data-parallel ranks, bucket by bucket, from the end of the matrices to their front as backward finishes
// them, beside the work on ctx. overlap = false: all of them after it, for comparison.
class GradientReducer {
public:
    GradientReducer(be::Ctx& ctx, be::Comm& dp, const Shards& shards, const ParameterTable& table, const Elements& grads,
                    bool overlap)
        : ctx_(ctx),
          dp_(dp),
          shards_(shards),
          grads_(grads),
          limit_(overlap ? table.decayed : 0),
          pending_(shards.buckets.size()),
          started_(shards.buckets.size(), false) {
        // What another stage adds to is never ready early.
        for (const TensorSpec& t : table.rows)
            if (t.copy) limit_ = std::min(limit_, t.offset);
    }

    // Matrices from this element on have their last summand.
    void ready(size_t begin) {
        for (size_t i = shards_.buckets.size(); i-- > 0;) {
            const Bucket& b = shards_.buckets[i];
            if (b.begin >= begin && b.end <= limit_) start(i);
        }
    }
    // All gradients have: starts what is left and waits.
    void finish() {
        for (size_t i = shards_.buckets.size(); i-- > 0;) start(i);
        for (size_t i = shards_.buckets.size(); i-- > 0;) be::finish(ctx_, pending_[i]);
    }

private:
    void start(size_t i) {
        const Bucket& b = shards_.buckets[i];
        if (started_[i]) return;
        started_[i] = true;
        if (!shards_.cut) return all_reduce(ctx_, dp_, grads_.from(b.begin), b.n);
        grads_.from(b.begin).visit([&](auto* x) { pending_[i] = be::start_reduce_scatter(ctx_, dp_, x, b.n); });
    }

    be::Ctx& ctx_;
    be::Comm& dp_;
    const Shards& shards_;
    Elements grads_;
    size_t limit_;
    std::vector<be::Pending> pending_;
    std::vector<bool> started_;
};

// Brings updated parameters to all data-parallel ranks, bucket by bucket beside the update of the next ones and the next
// forward pass. Whoever reads parameters says first which he needs. overlap = false: start() waits, for comparison.
class ParameterGatherer {
public:
    ParameterGatherer(be::Ctx& ctx, be::Comm& dp, const Shards& shards, bool overlap)
        : ctx_(ctx), dp_(dp), shards_(shards), overlap_(overlap), pending_(shards.buckets.size()) {}

    // A bucket's parts of `params` are new.
    void start(const Bucket& b, floatX* params) {
        if (!shards_.cut) return;
        be::Pending& pending = pending_[(size_t)(&b - shards_.buckets.data())];
        pending = be::start_all_gather(ctx_, dp_, params + b.begin, b.n);
        if (!overlap_) be::finish(ctx_, pending);
    }
    // Waits for matrices before this element, and for all vectors.
    void need(size_t end) {
        for (size_t i = 0; i < pending_.size(); i++)
            if (shards_.buckets[i].begin < end || !shards_.buckets[i].decay) be::finish(ctx_, pending_[i]);
    }
    void finish() { need(SIZE_MAX); }

private:
    be::Ctx& ctx_;
    be::Comm& dp_;
    const Shards& shards_;
    bool overlap_;
    std::vector<be::Pending> pending_;
};
