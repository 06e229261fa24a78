// Flash attention for Hopper (sm_90a): bf16, head sizes 64 and 128, along the lines of FlashAttention-3 (Shah et al., 2024).
// The mathematics is in llmc/cpu/attention.h, the instructions are in hopper.cuh.
//
// A block's first warpgroup is the producer: one of its threads keeps circular buffers of tiles in shared memory filled by TMA,
// and it gives its registers to the others. The other warpgroups are consumers: each owns 64 rows and runs wgmma on the tiles.
// Each slot of a circular buffer has two mbarriers: `full` completes a phase when the tile has arrived, `empty` when all
// consumer warps have read it. All tiles are in shared memory in wgmma's layout: slabs of 64 columns, rows of 128 bytes,
// swizzled.
//
// Forward. 64 rows of S = Q K^T stay in registers, become P = 2^(c (S - max S)) there (c = scale log2(e); with ALiBi 1, and S
//   includes scale and bias), and are the left operand of O += P V.
//   Overlap: the softmax of a tile of keys is computed while P V of the previous tile runs; and the consumers alternate in
//   issuing products (ping-pong), so that one's softmax overlaps with the other's products. The kernel is persistent: the grid
//   fills the GPU, and a block that has finished a work item (a tile of queries of one head) draws the next one from a common
//   counter, long ones first, heads whose keys and values fit in the L2 cache together; if items are short and many, blocks
//   use a fixed stride. The assignment does not change results.
// Backward: attention_hopper_backward.cuh, which uses the device code at the start of this file.
//
// Soft caps and dropout: attention_scores.cuh. That version uses two consumers for heads of 64, too, for more registers.
//
// Precision: bf16 products with fp32 sums; P is rounded to bf16 as an operand. Deterministic. Documents: doc_start must not
// decrease within a sequence. Fully masked tiles are skipped, and only tiles at the border of the mask are masked.
// Bound: tensor cores; the exponentials of a forward tile take about half as long as its products at HS 128.
// Measured: dev/kernels/bench.md.
#pragma once
#include "../shapes.h"
#include "attention_scores.cuh"
#include "device.cuh"
#include "hopper.cuh"

namespace gpu::hopper {

constexpr int slab = 64;  // columns of 128 bytes

// A part of an L2 cache of 50 MB; other data uses the remainder.
constexpr size_t section_bytes = 32 << 20;

template <int rows, int HS>
struct Tile {
    bf16 data[HS / slab][rows][slab];
};
template <int stages>
struct Ring {
    uint64_t full[stages], empty[stages];
};

struct AttentionInputs : AttentionShape, AttentionMask {
    CapAndDropout cap;
    AttentionInputs(const AttentionShape& a, const AttentionMask& mask) : AttentionShape(a), AttentionMask(mask), cap(a) {}
};

// The layout of the fp32 sums of query gradients: per head, tiles of 64 queries; per tile, slabs of 64 columns, in the register
// order of a warpgroup's 128 threads: four elements of its first thread, of the second ...; then the next four of the first.
constexpr int sum_elements = 64 * slab;  // elements of a tile's slab

constexpr size_t shared_memory = 227 << 10;  // of a block

// The common counter of a persistent kernel's blocks, zero between launches: the last block to leave resets it.
struct ItemCounter {
    unsigned taken, left;
};

// ---- shared device code -----------------------------------------------------------------------------------------------------
#ifdef HOPPER_CODE

// A block's next item; its first item is blockIdx.x.
__device__ __forceinline__ int take_item(ItemCounter* counter) { return (int)(gridDim.x + atomicAdd(&counter->taken, 1u)); }
// Called by the producer: passes item number n of this block to the consumers.
__device__ __forceinline__ void tell_item(int (&items)[2], uint64_t (&told)[2], unsigned n, int item) {
    items[n % 2] = item;
    mbarrier_arrive(&told[n % 2]);
}
__device__ __forceinline__ void leave(ItemCounter* counter) {
    if (atomicAdd(&counter->left, 1u) + 1 < gridDim.x) return;
    counter->taken = counter->left = 0;
}

// A thread's lane and warp in its warpgroup, and the two rows of a (64, N) accumulator that it holds: `row` and row + 8. Its
// columns are 8i + column and the next one.
struct Place {
    int lane, warp, row, column;
    __device__ Place() {
        lane = threadIdx.x % 32;
        warp = threadIdx.x % 128 / 32;
        row = warp * 16 + lane / 4;
        column = lane % 4 * 2;
    }
};

template <int stages>
__device__ __forceinline__ void init_ring(Ring<stages>& ring, int consumers) {
    for (int i = 0; i < stages; i++) mbarrier_init(&ring.full[i], 1), mbarrier_init(&ring.empty[i], 4 * consumers);
}
// Wait until tile n, counted from the kernel's start, is in its slot of the ring; or until that slot is free for it.
template <int stages>
__device__ __forceinline__ void wait_full(Ring<stages>& ring, unsigned n) {
    mbarrier_wait(&ring.full[n % stages], n / stages & 1);
}
template <int stages>
__device__ __forceinline__ void wait_empty(Ring<stages>& ring, unsigned n) {
    mbarrier_wait(&ring.empty[n % stages], (n / stages & 1) ^ 1);
}
// Called by all lanes of a warp that has read the tile; one lane arrives, once the others have waited too.
__device__ __forceinline__ void release(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// Loads a tile of a head from token t0 on, with all its slabs of columns.
template <int rows, int HS>
__device__ __forceinline__ void load_tile(Tile<rows, HS>& tile, const CUtensorMap& map, uint64_t* full, int head, int t0,
                                          int b) {
    tma_load(&tile, map, full, 0, t0, head * (HS / slab), b);
}

// d (64, N) = a b^T over HS columns: 64 rows of tile a from first_row on, and N rows of tile b.
template <int N, int a_rows, int HS>
__device__ __forceinline__ void multiply_transposed(float (&d)[N / 2], const Tile<a_rows, HS>& a, int first_row,
                                                    const Tile<N, HS>& b) {
    const uint64_t a_matrix = matrix_descriptor(&a.data[0][first_row][0], 0), b_matrix = matrix_descriptor(&b, 0);
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        const uint64_t a_step = advanced(a_matrix, k / 4 * a_rows * 128 + k % 4 * 32),
                       b_step = advanced(b_matrix, k / 4 * N * 128 + k % 4 * 32);
        if (k == 0) wgmma_set<N, Major::rows>(d, a_step, b_step);
        else wgmma<N, Major::rows>(d, a_step, b_step, true);
    }
    wgmma_commit();
}
// d (64, 64) = a^T b, slabs of K rows.
template <int K>
__device__ __forceinline__ void multiply_columns(float (&d)[32], const bf16 (&a)[K][slab], const bf16 (&b)[K][slab]) {
    const uint64_t a_matrix = matrix_descriptor(&a, 0), b_matrix = matrix_descriptor(&b, 0);
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
        const uint64_t a_step = advanced(a_matrix, k * 16 * 128), b_step = advanced(b_matrix, k * 16 * 128);
        if (k == 0) wgmma_set<64, Major::columns, Major::columns>(d, a_step, b_step);
        else wgmma<64, Major::columns, Major::columns>(d, a_step, b_step, true);
    }
    wgmma_commit();
}
// d (64, HS) = p b, or += with accumulate: p (64, K) in registers, tile b of K rows.
template <int K, int HS>
__device__ __forceinline__ void multiply(float (&d)[HS / 2], const uint32_t (&p)[K / 16][4], const Tile<K, HS>& b,
                                         bool accumulate) {
    const uint64_t b_matrix = matrix_descriptor(&b, K * 128);
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma<HS, Major::columns>(d, p[k], advanced(b_matrix, k * 16 * 128), accumulate || k > 0);
    wgmma_commit();
}
// The accumulator x (64, K), rounded, as the left operand of the next product.
template <int K>
__device__ __forceinline__ void pack_operand(uint32_t (&p)[K / 16][4], const float (&x)[K / 2]) {
#pragma unroll
    for (int k = 0; k < K / 16; k++)
#pragma unroll
        for (int r = 0; r < 4; r++) p[k][r] = pack_bf16(x[8 * k + 2 * r], x[8 * k + 2 * r + 1]);
}
// Stores the accumulator x (64, HS), scaled by row, to rows first_row .. +63 of a tile, swizzled so that the 16-byte chunks of
// 8 rows fall into different banks.
template <int rows, int HS>
__device__ __forceinline__ void stage_rows(Tile<rows, HS>& tile, int first_row, const float (&x)[HS / 2],
                                           const float (&factor)[2], const Place& me) {
#pragma unroll
    for (int i = 0; i < HS / 8; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            bf16* to = &tile.data[i / 8][first_row + me.row + 8 * r][((i % 8) ^ (me.row % 8)) * 8 + me.column];
            *reinterpret_cast<uint32_t*>(to) = pack_bf16(x[4 * i + 2 * r] * factor[r], x[4 * i + 2 * r + 1] * factor[r]);
        }
}

// Stores the accumulator x (64, 64) in the layout of the query-gradient sums.
__device__ __forceinline__ void stage_sums(float (&to)[sum_elements], const float (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        store(to + (128 * i + threadIdx.x % 128) * 4, Pack<float>{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
}

// Sum and maximum over the four lanes that hold a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(all_lanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(all_lanes, x, 2));
}

// ALiBi: s = scale s + slope (column - row + distance).
template <int N>
__device__ __forceinline__ void add_bias(float (&s)[N / 2], float scale, float slope, int distance, const Place& me) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float bias = slope * (float)(me.column - me.row - 8 * r + distance);
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = s[4 * i + 2 * r + e];
                x = fmaf(x, scale, fmaf(slope, (float)(8 * i + e), bias));
            }
    }
}

// The tiles of `keys` keys that queries t0 .. t0 + n - 1 see: first .. last. As doc_start does not decrease, the first query
// sees furthest back.
struct KeyTiles {
    int first, last;
    __device__ KeyTiles(const AttentionInputs& in, int b, int t0, int n, int keys)
        : first(in.doc_start ? in.doc_start[(size_t)b * in.T + t0] / keys : 0), last((min(t0 + n, in.T) - 1) / keys) {}
};

// The two queries of a thread: the keys they see, and whether a tile of keys needs a mask for this warpgroup's 64 rows from t0
// on.
struct Queries {
    int t[2], first_key[2], t0, highest_first_key;
    __device__ Queries(const AttentionInputs& in, int b, int t0_, const Place& me) : t0(t0_), highest_first_key(0) {
        for (int r = 0; r < 2; r++) {
            t[r] = t0 + me.row + 8 * r;
            first_key[r] = 0;
        }
        if (!in.doc_start) return;
        const int* doc_start = in.doc_start + (size_t)b * in.T;
        for (int r = 0; r < 2; r++) first_key[r] = doc_start[min(t[r], in.T - 1)];
        highest_first_key = doc_start[min(t0 + 63, in.T - 1)];
    }
    __device__ bool border(int j0, int keys) const { return j0 + keys - 1 > t0 || j0 < highest_first_key; }
    __device__ bool sees(int r, int j) const { return j <= t[r] && j >= first_key[r]; }
};

#endif

// ---- forward ---------------------------------------------------------------------------------------------------------------
template <int HS, bool capped_or_dropped>
struct Forward {
    static constexpr int consumers = HS == 64 && !capped_or_dropped ? 3 : 2, rows = 64 * consumers, keys = 128,
                         stages = HS == 64 ? 4 : 2;
    static constexpr int threads = 128 * (1 + consumers);
    static constexpr int producer_registers = consumers == 3 ? 32 : 24, consumer_registers = consumers == 3 ? 160 : 240;
    static_assert(producer_registers + consumers * consumer_registers <= 512, "a multiprocessor has 64 K registers");
    struct Shared {
        Tile<rows, HS> q;
        Tile<keys, HS> k[stages], v[stages];
        Tile<64, HS> out[consumers];
        Ring<stages> k_ring, v_ring;
        Ring<1> q_ring;
        // With a counter, items are announced as soon as they are known, before their queries are loaded. An item's slot is
        // free once the next item has its queries.
        int items[2];
        uint64_t told[2];
    };
    static_assert(sizeof(Shared) <= shared_memory);
};

#ifdef HOPPER_CODE

template <int HS, bool capped_or_dropped>
__device__ void forward_producer(typename Forward<HS, capped_or_dropped>::Shared& shared, const CUtensorMap& q_map,
                                 const CUtensorMap& kv_map, const AttentionInputs& in, const WorkOrder& order,
                                 ItemCounter* counter) {
    using F = Forward<HS, capped_or_dropped>;
    unsigned n = 0, items = 0;  // tiles of keys, items of work
    for (int i = blockIdx.x, next; i < order.items(); i = next, items++) {
        if (counter) tell_item(shared.items, shared.told, items, i);
        next = counter ? take_item(counter) : i + (int)gridDim.x;  // the atomic's latency is hidden until it is needed
        const WorkOrder::Item item = order.item(i);
        const int b = item.head / in.NH, h = item.head % in.NH, g = h / in.group();
        const int t0 = (order.tiles - 1 - item.tile) * F::rows;
        const KeyTiles range(in, b, t0, F::rows, F::keys);
        const auto load = [&](Tile<F::keys, HS>* tiles, Ring<F::stages>& ring, int j, int kv_head) {
            const unsigned number = n + (range.last - j), stage = number % F::stages;
            wait_empty(ring, number);
            mbarrier_arrive_expect(&ring.full[stage], sizeof tiles[stage]);
            load_tile(tiles[stage], kv_map, &ring.full[stage], kv_head, j * F::keys, b);
        };
        wait_empty(shared.q_ring, items);
        mbarrier_arrive_expect(&shared.q_ring.full[0], sizeof shared.q);
        load_tile(shared.q, q_map, &shared.q_ring.full[0], h, t0, b);
        // In order of use: keys one tile ahead of values.
        for (int j = range.last; j >= range.first; j--) {
            load(shared.k, shared.k_ring, j, in.NH + g);
            if (j < range.last) load(shared.v, shared.v_ring, j + 1, in.NH + in.NKV + g);
        }
        load(shared.v, shared.v_ring, range.first, in.NH + in.NKV + g);
        n += range.last - range.first + 1;
    }
    if (!counter) return;
    tell_item(shared.items, shared.told, items, order.items());
    leave(counter);
}

// A warpgroup's rows in the online softmax: s (64, keys) turns from products into weights. Scores are c s, for powers of 2.
template <bool first, int N>
__device__ __forceinline__ void softmax_step(float (&s)[N / 2], float c, float (&top)[2], float (&sum)[2],
                                             float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float highest = first ? -INFINITY : top[r];
#pragma unroll
        for (int i = 0; i < N / 8; i++) highest = fmaxf(highest, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
        highest = row_max(highest);  // finite: the first tile holds each row's own key
        rescale[r] = first ? 0.0f : exp2_approx((top[r] - highest) * c);
        top[r] = highest;
        const float shift = highest * c;
        float part = 0;
#pragma unroll
        for (int i = 0; i < N / 8; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = s[4 * i + 2 * r + e];
                x = exp2_approx(fmaf(x, c, -shift));
                part += x;
            }
        sum[r] = first ? part : fmaf(sum[r], rescale[r], part);  // of this thread's columns
    }
}

// One function although it is longer than a screen: its sums and probabilities stay in registers from product to product.
template <int HS, bool capped_or_dropped>
__device__ void forward_consumer(typename Forward<HS, capped_or_dropped>::Shared& shared, const CUtensorMap& out_map,
                                 float* lse, const AttentionInputs& in, const WorkOrder& order, bool counted, int w) {
    using F = Forward<HS, capped_or_dropped>;
    constexpr int N = F::keys;
    const Place me;
    // Ping-pong: barrier 1 + w opens for consumer w when the previous consumer passes. The last consumer gives the first turn,
    // and the first one takes the last, so that no barrier is left half full.
    const auto take_turn = [&] { named_barrier_sync(1 + w, 256); };
    const auto pass_turn = [&] { named_barrier_arrive(w + 1 < F::consumers ? 2 + w : 1, 256); };
    if (w == F::consumers - 1) named_barrier_arrive(1, 256);
    const auto staging_barrier = [&] { named_barrier_sync(1 + F::consumers + w, 128); };

    unsigned n = 0;
    for (unsigned items = 0;; items++) {
        int i = (int)(blockIdx.x + items * gridDim.x);
        if (counted) {
            mbarrier_wait(&shared.told[items % 2], items / 2 & 1);
            i = shared.items[items % 2];
        }
        if (i >= order.items()) break;
        const WorkOrder::Item item = order.item(i);
        const int b = item.head / in.NH, h = item.head % in.NH;
        const int t0 = (order.tiles - 1 - item.tile) * F::rows;
        const int my_t0 = t0 + 64 * w;
        const bool idle = my_t0 >= in.T;  // past the sequence's end
        const KeyTiles range(in, b, t0, F::rows, N);
        KeyTiles mine = range;
        if (!idle) mine = KeyTiles(in, b, my_t0, 64, N);
        // Skips tiles that only other warpgroups of this block need.
        const auto skip = [&] {
            take_turn(), pass_turn();
            wait_full(shared.k_ring, n), release(&shared.k_ring.empty[n % F::stages]);
            wait_full(shared.v_ring, n), release(&shared.v_ring.empty[n % F::stages]);
            n++;
        };
        const Queries queries(in, b, my_t0, me);
        const bool alibi = in.slopes, capped = capped_or_dropped && in.cap.capped;
        const float slope = alibi ? in.slopes[h] * log2_e : 0.0f, scale = capped ? 1.0f : in.scale * log2_e,
                    c = alibi ? 1.0f : scale;
        float s[N / 2], o[HS / 2], top[2], sum[2], rescale[2];
        uint32_t p[N / 16][4];
        const auto finish_scores = [&](int j) {
            const int j0 = j * N;
            if (capped) cap_scores<N / 2>(s, in.cap);
            if (alibi) add_bias<N>(s, scale, slope, j0 - my_t0, me);
            if (queries.border(j0, N))
#pragma unroll
                for (int i = 0; i < N / 2; i++)
                    if (!queries.sees(i / 2 % 2, j0 + i / 4 * 8 + me.column + i % 2)) s[i] = -INFINITY;
        };
        const auto drop_weights = [&](int j) {
            if (!capped_or_dropped || in.dropout.rate == 0) return;
            const KeptWeights<N, false> kept(in, b, h, my_t0 + 16 * me.warp, j * N);
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (!kept(i / 4, i / 2 % 2, i % 2)) s[i] = 0;
        };

        wait_full(shared.q_ring, items);
        if (idle) {
            for (int j = range.last; j >= range.first; j--) skip();
            release(&shared.q_ring.empty[0]);
            continue;
        }
        for (int j = range.last; j > mine.last; j--) skip();

        wait_full(shared.k_ring, n);
        take_turn();
        wgmma_fence();
        multiply_transposed(s, shared.q, 64 * w, shared.k[n % F::stages]);
        pass_turn();
        wgmma_wait<0>(s);
        release(&shared.k_ring.empty[n % F::stages]);
        finish_scores(mine.last);
        softmax_step<true, N>(s, c, top, sum, rescale);
        drop_weights(mine.last);
        pack_operand<N>(p, s);

        for (int j = mine.last - 1; j >= mine.first; j--, n++) {
            const unsigned next = n + 1;
            wait_full(shared.k_ring, next);
            take_turn();
            wgmma_fence();
            multiply_transposed(s, shared.q, 64 * w, shared.k[next % F::stages]);
            wait_full(shared.v_ring, n);
            wgmma_fence(o, p);
            multiply(o, p, shared.v[n % F::stages], j < mine.last - 1);
            pass_turn();
            wgmma_wait<1>(s);
            release(&shared.k_ring.empty[next % F::stages]);
            finish_scores(j);
            softmax_step<false, N>(s, c, top, sum, rescale);
            drop_weights(j);
            end_of_basic_block(in.T < 0);
            wgmma_wait<0>(o);
            release(&shared.v_ring.empty[n % F::stages]);
            pack_operand<N>(p, s);
#pragma unroll
            for (int e = 0; e < HS / 2; e++) o[e] *= rescale[e / 2 % 2];
        }
        release(&shared.q_ring.empty[0]);
        wait_full(shared.v_ring, n);
        wgmma_fence(o, p);
        multiply(o, p, shared.v[n % F::stages], mine.last > mine.first);
        wgmma_wait<0>(o);
        release(&shared.v_ring.empty[n % F::stages]);
        n++;
        for (int j = mine.first - 1; j >= range.first; j--) skip();

        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float total = row_sum(sum[r]);
            factor[r] = (capped_or_dropped ? in.cap.keep : 1.0f) / total;
            if (me.column == 0 && queries.t[r] < in.T)
                lse[(size_t)item.head * in.T + queries.t[r]] = fmaf(top[r] * c, ln_2, logf(total));
        }
        const bool stores = threadIdx.x % 128 == 0;
        if (stores) tma_store_wait<0>();  // the previous item has left the staging tile
        staging_barrier();
        stage_rows(shared.out[w], 0, o, factor, me);
        fence_proxy_async();
        staging_barrier();
        if (stores) {
            tma_store(out_map, &shared.out[w], 0, my_t0, h * (HS / slab), b);  // rows past T are not written
            tma_store_commit();
        }
    }
    if (w == 0) take_turn();
    if (threadIdx.x % 128 == 0) tma_store_wait<0>();
}

#endif

template <int HS, bool capped_or_dropped>
__global__ void __launch_bounds__(Forward<HS, capped_or_dropped>::threads, 1)
    attention_forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap kv_map,
                             const __grid_constant__ CUtensorMap out_map, float* lse, AttentionInputs in, WorkOrder order,
                             ItemCounter* counter) {
#ifdef HOPPER_CODE
    using F = Forward<HS, capped_or_dropped>;
    DYNAMIC_SHARED(typename F::Shared, shared);
    if (threadIdx.x == 0) {
        tma_prefetch(q_map);
        tma_prefetch(kv_map);
        tma_prefetch(out_map);
        init_ring(shared->q_ring, F::consumers);
        init_ring(shared->k_ring, F::consumers), init_ring(shared->v_ring, F::consumers);
        mbarrier_init(&shared->told[0], 1), mbarrier_init(&shared->told[1], 1);
        mbarrier_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);  // declares it uniform in a warp
    if (warpgroup == 0) {
        registers_decrease<F::producer_registers>();
        if (threadIdx.x == 0) forward_producer<HS, capped_or_dropped>(*shared, q_map, kv_map, in, order, counter);
    } else {
        registers_increase<F::consumer_registers>();
        forward_consumer<HS, capped_or_dropped>(*shared, out_map, lse, in, order, counter, warpgroup - 1);
    }
#else
    __trap();
#endif
}

// ---- host ------------------------------------------------------------------------------------------------------------------
// x (B, T, heads, HS) for tiles of `rows` tokens and `slabs` slabs of one head: column of a slab | token | slab | sequence.
inline CUtensorMap head_map(Ctx& ctx, const bf16* x, int heads, const AttentionShape& a, int rows, int slabs) {
    const uint64_t token = (uint64_t)heads * a.HS * sizeof(bf16);
    if (!ctx.tensor_maps) ctx.tensor_maps = std::make_shared<TensorMaps>();
    return ctx.tensor_maps->get<4>(x, {slab, (uint64_t)a.T, (uint64_t)heads * a.HS / slab, (uint64_t)a.B},
                                   {token, slab * sizeof(bf16), token * a.T}, {slab, (uint32_t)rows, (uint32_t)slabs, 1});
}

template <int HS, bool capped_or_dropped>
void run_forward(Ctx& ctx, bf16* out, real* lse, const bf16* qkv, const AttentionInputs& in) {
    using F = Forward<HS, capped_or_dropped>;
    const int heads = in.NH + 2 * in.NKV, slabs = HS / slab;
    const CUtensorMap q_map = head_map(ctx, qkv, heads, in, F::rows, slabs),
                      kv_map = head_map(ctx, qkv, heads, in, F::keys, slabs),
                      out_map = head_map(ctx, out, in.NH, in, 64, slabs);
    const WorkOrder order = queries_order<bf16>(in, F::rows, section_bytes);
    // For many short items a stride was 2 to 5% faster (H100, 64 and 16 sequences of 1024, 35 and 18 items per block),
    // otherwise a counter, by up to 15%.
    const bool counted = HS != 64 || in.T > 1024 || order.items() < 16 * ctx.multiprocessors;
    LAUNCH((attention_forward_kernel<HS, capped_or_dropped>), std::min(order.items(), ctx.multiprocessors), F::threads,
           sizeof(typename F::Shared), ctx, q_map, kv_map, out_map, lse, in, order,
           counted ? (ItemCounter*)ctx.counters : nullptr);
}

}  // namespace gpu::hopper

namespace gpu {

inline bool attention_hopper_takes(const Ctx& ctx, int HS) {
    return attention_kernels(HS, ctx.capability, true) == AttentionKernels::hopper;
}

inline void attention_forward_hopper(Ctx& ctx, bf16* out /*(B, T, NH, HS)*/, real* lse /*(B, NH, T)*/,
                                     const bf16* qkv /*(B, T, NH + 2*NKV, HS)*/, const AttentionMask& mask,
                                     const AttentionShape& a) {
    CHECK(attention_hopper_takes(ctx, a.HS), "head size %d on capability %d", a.HS, ctx.capability);
    CHECK(a.scale > 0, "the maximum of scores is taken before scaling");
    HopperHeads::call(a.HS, [&](auto HS) {
        const auto run = a.capped_or_dropped() ? hopper::run_forward<HS.value, true> : hopper::run_forward<HS.value, false>;
        run(ctx, out, lse, qkv, {a, mask});
    });
}

}  // namespace gpu
