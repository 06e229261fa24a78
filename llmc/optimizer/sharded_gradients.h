// ZeRO-2 (Rajbhandari et al., 2020): the gradients of matrices are sharded as well (zero.h). No rank keeps whole gradients. In
// every micro-batch, ops write a block's, the head's or the embedding's into scratch memory. When its backward pass ends,
// they are reduced to the ranks that own the shards, while backward continues with the next block; each owner adds the sums to
// its shard, which is in fp32 or, rounded as in gradients.h, in bf16. Two blocks use two areas of scratch in turn (sections.h).
// The vectors' gradients, under a thousandth of all, are whole on every rank and reduced once a step. ZeRO-3 shards the
// parameters as well (sharded_parameters.h).
//
// Bytes per parameter and rank: 2 (parameters) + 14 / ranks (gradients, lower halves of fp32 weights, moments), and 4 for each
// parameter of two blocks. Gradients are sent once per micro-batch, in fp32, instead of once per step. With one micro-batch the
// sums have the same bits as ZeRO-1's; with several, they are added in another order.
#pragma once
#include <array>
#include <vector>

#include "../model/arena.h"
#include "../model/parameters.h"
#include "../parallel/comm.h"
#include "../parallel/ranks.h"
#include "sections.h"

class ShardedGradients {
public:
    bool overlap = true;  // false: reductions end before backward continues, for comparison

    void plan(Arena& arena, const ParameterTable& table, bool tied) {
        used_ = true;
        decayed_ = table.decayed;
        sections_ = Sections(table, tied);
        for (size_t i = 0; i < areas_.size(); i++)
            arena.add("gradients of two blocks (fp32)", &areas_[i].memory, sections_.sizes[i]);
        arena.add("gradients of vectors (fp32)", &vectors_, table.size - decayed_);
    }
    bool used() const { return used_; }

    // Where ops write the gradient of a tensor.
    real* gradient(const TensorSpec& t) const {
        if (t.vector()) return vector(t.offset);
        const Section* s = sections_.of(t.block);
        return areas_[s->area].memory + (t.offset - s->begin);
    }
    // The gradients of the vectors from this element of the buffer on.
    real* vector(size_t element) const { return vectors_ + (element - decayed_); }

    // Before a step.
    void begin_step(be::Ctx& ctx, const ParameterTable& table) {
        be::clear(ctx, vectors_, (table.size - decayed_) * sizeof(real));
    }
    // Before a micro-batch's backward pass through a block, the head or the embedding (TensorSpec::block).
    template <class Memory>
    void begin(be::Ctx& ctx, const Memory& m, int block) {
        const bool after_head = sections_.keeps_embedding && block == TensorSpec::embedding;
        const Section* s = sections_.of(block);
        if (!s) return;
        Area& area = areas_[s->area];
        if (!after_head) add_sums(ctx, m, area);
        const auto clear = [&](size_t begin, size_t end) {
            be::clear(ctx, area.memory + (begin - s->begin), (end - begin) * sizeof(real));
        };
        if (block == TensorSpec::embedding) clear(after_head ? s->end_of_embedding : s->begin, s->end);
        else
            for (const Range& gap : s->gaps) clear(gap.begin, gap.end);
    }
    // After it: starts the reductions. The sums set the shards or are added to them.
    template <class Memory>
    void end(be::Ctx& ctx, const Memory& m, int block, Acc acc, uint64_t key) {
        const Section* s = sections_.of(block);
        if (!s || s->block != block) return;  // a tied embedding is complete after the embedding's backward pass
        Area& area = areas_[s->area];
        area.section = s;
        area.acc = acc;
        area.key = key;
        for (const Bucket& b : m.shards.buckets)
            if (s->has(b)) area.pending.push_back(start(ctx, m, b, area.memory + (b.begin - s->begin)));
        if (!overlap) add_sums(ctx, m, area);
    }
    // After a step's last micro-batch: completes the matrices' gradients.
    template <class Memory>
    void finish_matrices(be::Ctx& ctx, const Memory& m) {
        for (Area& area : areas_) add_sums(ctx, m, area);
    }
    // Reduces the vectors' gradients.
    template <class Memory>
    void reduce_vectors(be::Ctx& ctx, const Memory& m) {
        std::vector<be::Pending> pending;
        for (const Bucket& b : m.shards.buckets)
            if (!b.decay) pending.push_back(start(ctx, m, b, vector(b.begin)));
        size_t i = 0;
        for (const Bucket& b : m.shards.buckets) {
            if (b.decay) continue;
            be::finish(ctx, pending[i++]);
            add(ctx, m, b, vector(b.mine), Acc::Set, 0);
        }
    }

private:
    struct Area {
        real* memory = nullptr;
        const Section* section = nullptr;  // whose gradients are being reduced
        Acc acc = Acc::Set;
        uint64_t key = 0;
        std::vector<be::Pending> pending = {};
    };

    template <class Memory>
    static be::Pending start(be::Ctx& ctx, const Memory& m, const Bucket& b, real* x) {
        be::Comm& comm = m.ranks->that_share(b.of_experts);
        return b.owner < 0 ? be::start_reduce_scatter(ctx, comm, x, b.n)
                           : be::start_reduce(ctx, comm, x, b.end - b.begin, b.owner);
    }
    // Waits for an area's sums, and adds this rank's to its shards.
    template <class Memory>
    void add_sums(be::Ctx& ctx, const Memory& m, Area& area) {
        if (!area.section) return;
        const Section& s = *area.section;
        size_t i = 0;
        for (const Bucket& b : m.shards.buckets) {
            if (!s.has(b)) continue;
            be::finish(ctx, area.pending[i++]);
            add(ctx, m, b, area.memory + (b.mine - s.begin), area.acc, area.key);
        }
        area.pending.clear();
        area.section = nullptr;
    }
    template <class Memory>
    static void add(be::Ctx& ctx, const Memory& m, const Bucket& b, const real* sums, Acc acc, uint64_t key) {
        const Elements shard = m.gradients_of(b);
        if (!shard.is_bf16()) return be::accumulate_real(ctx, (real*)shard.data, sums, b.n, acc);
        for_each_rounding(m.table, b.mine, b.mine + b.n, key, [&](size_t first, size_t n, const Rounding& r) {
            be::accumulate(ctx, (bf16*)shard.data + (first - b.mine), sums + (first - b.mine), n, acc, r);
        });
    }

    Sections sections_;
    std::array<Area, 3> areas_;
    real* vectors_ = nullptr;
    size_t decayed_ = 0;  // of the table
    bool used_ = false;
};
