// Shared by all attention kernels: exponentials to base 2, the order of work items, and the search for the end of a document.
#pragma once
#include <algorithm>

#include "../base/math.h"
#include "../shapes.h"
#include "launch.cuh"

namespace gpu {

constexpr float log2_e = 1.44269504088896f, ln_2 = 0.693147180559945f;

// 2^x by the special function unit, one instruction: relative error 2^-22, results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef __CUDACC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -126.0f ? 0.0f : exp2f(x);
#endif
}

// Assigns tiles of heads to work items, which start in the order of their index. Long tiles come first (index 0: the last
// queries, which see the most keys, or the first keys, which most queries see), so that none starts when the others are about
// to finish. But tiles of one head read the same memory, so heads are divided into sections that fit in the L2 cache: within a
// section first one tile of each head, then the next tile of each.
struct WorkOrder {
    int tiles, heads, section;  // tiles of a head; heads of all sequences; heads of a section
    struct Item {
        int tile, head;
    };
    HD int items() const { return tiles * heads; }
    HD Item item(int i) const {
        const int first = i / (section * tiles) * section, within = i - first * tiles;
        const int n = section < heads - first ? section : heads - first;
        return {within / n, first + within % n};
    }
};

// shared_bytes: the data that the tiles of `group` neighboring heads all read; cache_bytes: of the L2 cache.
inline WorkOrder work_order(int tiles, size_t heads, int group, size_t shared_bytes, size_t cache_bytes) {
    CHECK(tiles * heads <= 0x7fffffff, "%d tiles of %zu heads are too many for one launch", tiles, heads);
    const size_t section = std::max<size_t>(1, cache_bytes / shared_bytes) * (size_t)group;
    return {tiles, (int)heads, (int)std::min(section, heads)};
}
// For tiles of this many rows of E. The query heads of a group read the same keys and values; a key/value head reads the
// queries and output gradients of its group.
template <class E>
WorkOrder queries_order(const AttentionShape& a, int rows, size_t cache_bytes) {
    const size_t shared_bytes = 2 * sizeof(E) * a.T * a.HS;
    return work_order(ceil_div(a.queries(), rows), (size_t)a.B * a.NH, a.group(), shared_bytes, cache_bytes);
}
template <class E>
WorkOrder keys_order(const AttentionShape& a, int rows, size_t cache_bytes) {
    const size_t shared_bytes = 2 * sizeof(E) * a.T * a.HS * a.group();
    return work_order(ceil_div(a.T, rows), (size_t)a.B * a.NKV, 1, shared_bytes, cache_bytes);
}

// The first of the rows [from, T) whose document starts at `key` or later, so that it sees no key before it; T if none.
__device__ inline int first_row_past(const int* doc_start /*(T)*/, int from, int T, int key) {
    int end = T;
    while (from < end) {
        const int middle = (from + end) / 2;
        if (doc_start[middle] >= key) end = middle;
        else from = middle + 1;
    }
    return end;
}
// The end of the queries, from row `from` on, that may see keys before row `end` of sequence b.
__device__ inline int rows_that_see(const int* doc_start, const AttentionShape& a, int b, int from, int end) {
    if (!doc_start) return a.T;
    return a.first + first_row_past(doc_start + (size_t)b * a.queries(), from - a.first, a.queries(), end);
}

}  // namespace gpu
