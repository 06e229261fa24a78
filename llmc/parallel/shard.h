// The shards of the parameter buffer over data-parallel ranks (used by zero.h): which elements a rank owns, where they lie in
// memory that holds only its own shards, and which elements it counts in sums over all ranks.
//
// A bucket lies either in the range with weight decay or in the range without, and has about `bucket_elements`: large messages
// use the network well, and several of them can start before backward ends.
#pragma once
#include <algorithm>
#include <vector>

#include "../elements.h"
#include "../model/parameters.h"

// Elements of a bucket, where no option says how many: as Megatron-LM, for dp ranks.
inline size_t default_bucket_elements(int dp) { return std::max<size_t>(40000000, (size_t)1000000 * dp); }

struct Bucket {
    size_t begin, end;  // range of the buffer
    bool decay;
    size_t mine, n;  // this rank's shard: buffer elements [mine, mine + n)
    size_t shard;    // offset of the shard in memory that holds only this rank's shards
};

struct Range {
    size_t begin, end;
};

class Shards {
public:
    std::vector<Bucket> buckets;  // in the order of the buffer
    size_t size = 0;              // elements of all shards of this rank
    bool cut = false;             // sharded; otherwise every rank has all elements

    Shards() = default;
    Shards(const ParameterTable& table, const Axis& dp, bool zero, size_t bucket_elements) : cut(zero && dp.size > 1) {
        const size_t parts = cut ? (size_t)dp.size : 1, unit = (size_t)dp.size * 64;
        const size_t step = std::max<size_t>(1, bucket_elements / unit) * unit;
        for (const bool decay : {true, false}) {
            const size_t end = decay ? table.decayed : table.size;
            for (size_t begin = decay ? 0 : table.decayed; begin < end; begin += step) {
                const size_t last = std::min(end, begin + step), n = (last - begin) / parts;
                CHECK((last - begin) % parts == 0, "a bucket of %zu elements for %zu ranks", last - begin, parts);
                buckets.push_back({begin, last, decay, begin + (cut ? (size_t)dp.rank * n : 0), n, size});
                size += n;
            }
        }
    }

    // Calls visit(from, shard, n): elements [from, from + n) of a range that begins at `begin` are at `shard` in this rank's
    // shards.
    template <class Visit>
    void for_each_part(size_t begin, size_t n, Visit visit) const {
        for (const Bucket& b : buckets) {
            const size_t first = std::max(begin, b.mine), last = std::min(begin + n, b.mine + b.n);
            if (first < last) visit(first - begin, b.shard + first - b.mine, last - first);
        }
    }

    // The elements of the buffer that this rank counts in sums over all ranks, so that each parameter counts once.
    std::vector<Range> counted(const ParameterTable& table, const Axis& dp) const {
        std::vector<Range> ranges;
        if (!cut && dp.rank > 0) return ranges;
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
            if (spec->copy || (spec->replicated && tp_rank > 0)) n = 0;
            if (tp_rank % spec->replicas) n -= (size_t)spec->replicated_rows * spec->cols;
            if (n > 0) {
                add(gap ? spec->offset : counted_to, spec->offset + n);
                counted_to = spec->offset + n;
            }
            gap = n < spec->size();
        }
        return ranges;
    }
};
