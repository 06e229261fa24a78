// ZeRO-3 (Rajbhandari et al., 2020): the parameters are sharded as well (sharded_gradients.h). TrainingMemory::params has only
// this rank's shards, in the order of the optimizer's state. Before a pass reads the matrices of a block, the head or the
// embedding, they are gathered into one of two areas (sections.h), while the previous section is in use in the other one. A
// section that is still in its area is gathered again only after an update. Vectors, under a thousandth of all, are gathered
// once after each update.
//
// Bytes per parameter and rank: 16 / ranks, and 6 for each parameter of two blocks. Parameters are sent twice in every
// micro-batch, for the forward and for the backward pass, instead of once in a step. All data-parallel ranks must make the same
// passes. The weights are ZeRO-2's, to the bit.
#pragma once
#include <array>
#include <climits>
#include <vector>

#include "../model/arena.h"
#include "../model/parameters.h"
#include "../parallel/comm.h"
#include "../parallel/ranks.h"
#include "sections.h"

class ShardedParameters {
public:
    static constexpr int none = INT_MIN;
    bool overlap = true;  // false: gathers end before the pass continues, for comparison

    void plan(Arena& arena, const ParameterTable& table, bool tied) {
        used_ = true;
        decayed_ = table.decayed;
        sections_ = Sections(table, tied);
        for (size_t i = 0; i < areas_.size(); i++) arena.add("gathered parameters", &areas_[i].memory, sections_.sizes[i]);
        arena.add("gathered parameters", &vectors_, table.size - decayed_);
    }
    bool used() const { return used_; }

    // Where ops read a tensor, after need().
    floatX* parameter(const TensorSpec& t) const {
        if (t.vector()) return vectors_ + (t.offset - decayed_);
        const Section* s = sections_.of(t.block);
        return areas_[s->area].memory + (t.offset - s->begin);
    }

    // Before ops read the parameters of a block, the head or the embedding (TensorSpec::block). Starts to gather those that the
    // pass needs next, if they have another area.
    template <class Memory>
    void need(be::Ctx& ctx, const Memory& m, int block, int next = none) {
        if (!used_) return;
        if (!has_vectors_) gather_vectors(ctx, m);
        const Section* const s = sections_.of(block);
        if (!s) return;
        start(ctx, m, *s);
        finish(ctx, areas_[s->area]);
        const Section* const after = sections_.of(next);
        if (!after || after->area == s->area) return;
        start(ctx, m, *after);
        if (!overlap) finish(ctx, areas_[after->area]);
    }
    // Before the parameters change.
    void drop(be::Ctx& ctx) {
        for (Area& area : areas_) {
            finish(ctx, area);
            area.section = nullptr;
        }
        has_vectors_ = false;
    }

private:
    struct Area {
        floatX* memory = nullptr;
        const Section* section = nullptr;  // whose parameters are there, or on their way
        std::vector<be::Pending> pending = {};
    };

    template <class Memory>
    void start(be::Ctx& ctx, const Memory& m, const Section& s) {
        Area& area = areas_[s.area];
        if (area.section == &s) return;
        finish(ctx, area);
        area.section = &s;
        for (const Bucket& b : m.shards.buckets)
            if (s.has(b)) area.pending.push_back(gather(ctx, m, b, area.memory + (b.begin - s.begin)));
    }
    static void finish(be::Ctx& ctx, Area& area) {
        for (be::Pending& pending : area.pending) be::finish(ctx, pending);
        area.pending.clear();
    }
    template <class Memory>
    void gather_vectors(be::Ctx& ctx, const Memory& m) {
        std::vector<be::Pending> pending;
        for (const Bucket& b : m.shards.buckets)
            if (!b.decay) pending.push_back(gather(ctx, m, b, vectors_ + (b.begin - decayed_)));
        for (be::Pending& p : pending) be::finish(ctx, p);
        has_vectors_ = true;
    }
    template <class Memory>
    static be::Pending gather(be::Ctx& ctx, const Memory& m, const Bucket& b, floatX* to) {
        be::Comm& comm = m.ranks->that_share(b.of_experts);
        const floatX* const mine = m.weights_of(b);
        if (b.owner < 0) return be::start_all_gather(ctx, comm, to, mine, b.n);
        const size_t bytes = b.n * sizeof(floatX);
        if (bytes) be::copy_rows(ctx, to, bytes, mine, bytes, bytes, 1);
        return be::start_broadcast(ctx, comm, to, b.end - b.begin, b.owner);
    }

    Sections sections_;
    std::array<Area, 3> areas_;
    floatX* vectors_ = nullptr;
    size_t decayed_ = 0;  // of the table
    bool used_ = false;
    bool has_vectors_ = false;
};
