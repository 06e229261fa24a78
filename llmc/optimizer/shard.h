// The shards of the parameter buffer over data-parallel ranks (used by zero.h): which elements a rank owns, their place in
// memory that holds only its own shards, and which elements it counts in sums over all ranks.
//
// A bucket lies either in the range with weight decay or in the range without, and has about `bucket_elements` elements: large
// messages use the network well, and several of them can start before backward ends. For an optimizer that needs whole matrices
// (muon.h), each of the blocks' matrices is a separate bucket that belongs to one rank: starting with the largest, each goes to
// the rank with the fewest elements. With more ranks than matrices, some ranks have none.
//
// With expert parallelism, experts' matrices are in buckets of their own, which only the ranks with the same experts share.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "../elements.h"
#include "../model/parameters.h"

struct Bucket {
    size_t begin, end;  // range of the buffer
    bool decay;
    size_t mine, n;           // this rank's shard: buffer elements [mine, mine + n)
    size_t shard;             // offset of the shard in memory that holds only this rank's shards
    int owner = -1;           // the rank that owns the whole bucket; -1: ranks have equal shards
    int matrix = -1;          // row of the table, if it is a block's matrix that must not be split
    bool of_experts = false;  // shared by the ranks of edp, not of dp

    bool whole_matrix() const { return matrix >= 0; }
};

struct Range {
    size_t begin, end;
};

class Shards {
public:
    std::vector<Bucket> buckets;  // in the order of the buffer
    size_t size = 0;              // elements of all shards of this rank
    size_t size_of_cut = 0;       // the part of size outside whole matrices, which comes first in memory
    bool cut = false;             // sharded; otherwise every rank has all elements
    bool cut_gradients = false;   // so are the gradients (sharded_gradients.h)
    bool cut_params = false;      // and the parameters (sharded_parameters.h)
    bool in_order = true;         // the parameters in memory are this rank's shards, in order

    Shards() = default;
    // zero: the stage of ZeRO. whole_matrices: matrices of blocks must not be split.
    Shards(const ParameterTable& table, const Mesh& mesh, int zero, size_t bucket_elements, bool whole_matrices = false)
        : cut(zero > 0 && mesh.dp.size > 1),
          cut_gradients(cut && zero > 1),
          cut_params(cut && zero > 2),
          mesh_(mesh),
          bucket_elements_(bucket_elements) {
        size_t begin = 0;
        if (cut_gradients) set_borders(table);
        for (const TensorSpec& t : table.rows)
            if (of_edp(t)) experts_.push_back({t.offset, t.offset + round_up(t.size(), (size_t)64)});
        std::sort(experts_.begin(), experts_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
        if (whole_matrices) {
            const std::vector<int> owners = balanced_owners(table);
            for (size_t i = 0; i < table.rows.size(); i++) {
                const TensorSpec& t = table.rows[i];
                if (!of_block(t)) continue;
                add_cut(begin, t.offset, true);
                begin = round_up(t.offset + t.size(), (size_t)64);
                add({t.offset, begin, true, 0, 0, 0, owners[i], (int)i, of_edp(t)});
            }
        }
        add_cut(begin, table.decayed, true);
        add_cut(table.decayed, table.size, false);
        for (const bool whole : {false, true}) {
            for (Bucket& b : buckets)
                if (b.whole_matrix() == whole) b.shard = std::exchange(size, size + b.n);
            if (!whole) size_of_cut = size;
        }
        for (const Bucket& b : buckets) in_order &= cut_params || (b.shard == b.begin && b.n == b.end - b.begin);
    }

    // Elements of this rank's largest shard.
    size_t largest() const {
        size_t n = 0;
        for (const Bucket& b : buckets) n = std::max(n, b.n);
        return n;
    }

    // Calls visit(from, shard, n): elements [from, from + n) of a range that starts at `begin` are at `shard` in this rank's
    // shards. Optionally skips whole matrices.
    template <class Visit>
    void for_each_part(size_t begin, size_t n, Visit visit, bool with_whole_matrices = true) const {
        for (const Bucket& b : buckets) {
            if (b.whole_matrix() && !with_whole_matrices) continue;
            const size_t first = std::max(begin, b.mine), last = std::min(begin + n, b.mine + b.n);
            if (first < last) visit(first - begin, b.shard + first - b.mine, last - first);
        }
    }

    // The elements of the buffer that no lower rank also has: sums over these on all ranks include each parameter once.
    std::vector<Range> not_duplicated(const ParameterTable& table) const {
        std::vector<Range> ranges;
        const int tp_rank = table.part.tp.rank;
        std::vector<const TensorSpec*> order;
        for (const TensorSpec& spec : table.rows) order.push_back(&spec);
        std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
        size_t counted_to = 0;  // gaps between tensors are zero: including them gives fewer ranges
        bool gap = true;
        const auto add = [&](size_t begin, size_t end) {
            for_each_part(begin, end - begin, [&](size_t from, size_t, size_t n) {
                const size_t first = begin + from;
                if (!ranges.empty() && ranges.back().end == first) ranges.back().end = first + n;
                else ranges.push_back({first, first + n});
            });
        };
        for (const TensorSpec* spec : order) {
            size_t n = spec->size();
            if (spec->copy || (spec->replicated && tp_rank > 0) || (!cut && axis(of_edp(*spec)).rank > 0)) n = 0;
            if (tp_rank % spec->replicas) n -= (size_t)spec->replicated_rows * spec->cols;
            if (n > 0) {
                add(gap ? spec->offset : counted_to, spec->offset + n);
                counted_to = spec->offset + n;
            }
            gap = n < spec->size();
        }
        return ranges;
    }

private:
    static bool of_block(const TensorSpec& t) { return t.block >= 0 && !t.vector(); }
    bool of_edp(const TensorSpec& t) const { return t.of_experts && mesh_.ep.size > 1; }
    // The ranks that share a bucket.
    const Axis& axis(bool of_experts) const { return of_experts ? mesh_.edp : mesh_.dp; }

    // The owning rank for each row of the table that is a block's matrix: the same on all ranks. Each edp rank of experts
    // stands for ep dp ranks.
    std::vector<int> balanced_owners(const ParameterTable& table) const {
        std::vector<size_t> order, elements((size_t)mesh_.dp.size);
        std::vector<int> owners(table.rows.size(), -1);
        for (size_t i = 0; i < table.rows.size(); i++)
            if (of_block(table.rows[i])) order.push_back(i);
        std::stable_sort(order.begin(), order.end(),
                         [&](size_t a, size_t b) { return table.rows[a].size() > table.rows[b].size(); });
        for (const size_t i : order) {
            const int each = of_edp(table.rows[i]) ? mesh_.ep.size : 1;  // dp ranks that get an equal matrix
            const auto least = std::min_element(elements.begin(), elements.end());
            owners[i] = (int)(least - elements.begin()) / each;
            for (int r = owners[i] * each; r < (owners[i] + 1) * each; r++) elements[(size_t)r] += table.rows[i].size();
        }
        return owners;
    }
    // With sharded gradients no bucket has gradients of two blocks; and a tied embedding, which both ends of the pipeline hold,
    // is split equally at both.
    void set_borders(const ParameterTable& table) {
        const TensorSpec* before = nullptr;
        for (const TensorSpec& t : table.rows) {
            if (t.vector()) continue;
            if (before && before->block != t.block) borders_.push_back(t.offset);
            if (t.id == 0) borders_.push_back(t.offset + round_up(t.size(), (size_t)64));
            before = &t;
        }
    }
    void add_cut(size_t begin, size_t end, bool decay) {
        for (const size_t border : borders_) {
            if (border <= begin || border >= end) continue;
            add_cut_by_experts(begin, border, decay);
            begin = border;
        }
        add_cut_by_experts(begin, end, decay);
    }
    void add_cut_by_experts(size_t begin, size_t end, bool decay) {
        for (const Range& r : experts_) {
            if (r.begin < begin || r.begin >= end) continue;
            add_buckets(begin, r.begin, decay, false);
            add_buckets(r.begin, r.end, decay, true);
            begin = r.end;
        }
        add_buckets(begin, end, decay, false);
    }
    // Buckets of equal shards. The indivisible remainder, less than 64 elements per rank, belongs to the first rank.
    void add_buckets(size_t begin, size_t end, bool decay, bool of_experts) {
        const size_t unit = (size_t)axis(of_experts).size * 64, step = std::max<size_t>(1, bucket_elements_ / unit) * unit;
        for (; begin < end; begin += step) {
            const size_t last = std::min(end, begin + step), divisible = begin + (last - begin) / unit * unit;
            if (!cut) add({begin, last, decay, 0, 0, 0, -1, -1, of_experts});
            if (cut && divisible > begin) add({begin, divisible, decay, 0, 0, 0, -1, -1, of_experts});
            if (cut && last > divisible) add({divisible, last, decay, 0, 0, 0, 0, -1, of_experts});
        }
    }
    void add(Bucket b) {
        const Axis& ranks = axis(b.of_experts);
        const size_t elements = b.end - b.begin, per_rank = elements / (size_t)ranks.size;
        b.mine = b.begin;
        b.n = elements;
        if (cut && b.owner >= 0) b.n = b.owner == ranks.rank ? elements : 0;
        if (cut && b.owner < 0) {
            b.mine += (size_t)ranks.rank * per_rank;
            b.n = per_rank;
        }
        buckets.push_back(b);
    }

    Mesh mesh_;
    size_t bucket_elements_ = 64;  // at most, rounded down to a multiple of 64 elements per rank
    std::vector<Range> experts_;   // of the buffer, in order: shared by the ranks of edp
    std::vector<size_t> borders_;  // elements at which buckets start, in order
};
