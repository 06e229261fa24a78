// ZeRO-1 (Rajbhandari et al., 2020): the ranks of a data-parallel group share the optimizer's work and state. The buffer of
// parameters is cut into buckets, each bucket into one part per rank. Gradients of a bucket are reduce-scattered, so that a
// rank has the sums of its own part; there it has fp32 weights and moments, and updates; the new parameters are all-gathered.
// Bytes per parameter and rank: 2 (parameters) + 4 (gradients) + 12 / ranks.
// Without it (--zero 0) gradients are all-reduced, and every rank does all of the update.
#pragma once
#include <vector>

#include "comm.h"
#include "shard.h"

// Sums gradients over data-parallel ranks, bucket by bucket, from the end of the matrices to their front as backward finishes
// them, beside the work on ctx.
class GradientReducer {
public:
    GradientReducer(be::Ctx& ctx, be::Comm& dp, const Shards& shards, const ParameterTable& table, real* grads)
        : ctx_(ctx),
          dp_(dp),
          shards_(shards),
          grads_(grads),
          limit_(table.decayed),
          pending_(shards.buckets.size()),
          started_(shards.buckets.size(), false) {
        // What another stage adds to is never ready early.
        for (const TensorSpec& t : table.rows)
            if (t.copy) limit_ = t.offset;
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
        if (shards_.cut) pending_[i] = be::start_reduce_scatter(ctx_, dp_, grads_ + b.begin, b.n);
        else be::all_reduce(ctx_, dp_, grads_ + b.begin, b.n);
    }

    be::Ctx& ctx_;
    be::Comm& dp_;
    const Shards& shards_;
    real* grads_;
    size_t limit_;
    std::vector<be::Pending> pending_;
    std::vector<bool> started_;
};

// Brings updated parameters to all data-parallel ranks, bucket by bucket beside the update of the next ones.
class ParameterGatherer {
public:
    ParameterGatherer(be::Ctx& ctx, be::Comm& dp, const Shards& shards, floatX* params)
        : ctx_(ctx), dp_(dp), shards_(shards), params_(params) {}
    void start(const Bucket& b) {
        if (shards_.cut) pending_.push_back(be::start_all_gather(ctx_, dp_, params_ + b.begin, b.n));
    }
    void finish() {
        for (be::Pending& p : pending_) be::finish(ctx_, p);
        pending_.clear();
    }

private:
    be::Ctx& ctx_;
    be::Comm& dp_;
    const Shards& shards_;
    floatX* params_;
    std::vector<be::Pending> pending_;
};
