// The backward pass of flash attention for Hopper. attention_hopper.cuh describes tiles, circular buffers and warpgroups.
//
// With D = rowsum(dout out), computed first, every score's P = 2^(c S - lse) needs no maximum. Two kernels:
//   dk, dv  a block owns 128 keys of a key/value head and loops over the queries of all its query heads. It computes the
//           transposes S^T = K Q^T and dP^T = V dout^T, so that P^T and dS^T are in registers as left operands of
//           dV += P^T dout and dK += dS^T Q.
//   dq      a block owns 128 queries and loops over keys: S, dP, then dS, the left operand of dQ += dS K.
//   Seven products of T^2/2 HS multiply-adds per head, where a single kernel needs five; in exchange there are no
//   atomic adds, and neither P nor dS leaves the registers.
// With dq_sums: one kernel. The first of the two also writes dS^T to shared memory, where, read by columns, it is the
// left operand of a tile's contribution to dQ = dS K; TMA adds that to fp32 sums in global memory while the product for dK
// runs. Blocks of other keys add theirs in no fixed order. A small kernel converts the sums to bf16.
//
// Soft caps and dropout: attention_scores.cuh, and two kernels.
//
// Precision: bf16 products with fp32 sums; P and dS are rounded to bf16 as operands. Deterministic, except with dq_sums: every
// sum has one owner and a fixed order.
// Bound: tensor cores. Measured: dev/kernels/bench.md.
#pragma once
#include "attention_hopper.cuh"

namespace gpu::hopper {

// Per-row inputs of backward for 64 queries of a head. Rows past T have lse = infinity, so that their weights are 0.
struct alignas(16) QueryStatistics {
    float lse[64];      // in units of ln 2
    float d[64];        // rowsum(dout out)
    int first_key[64];  // doc_start
};

// A block per 64 queries of a head; HS / 8 lanes read a row.
template <int HS>
__global__ void __launch_bounds__(256)
    attention_statistics_kernel(QueryStatistics* statistics /*(B, NH, tiles)*/, const bf16* dout, const bf16* out,
                                const float* lse, AttentionInputs in, int tiles) {
    constexpr int lanes = HS / 8;
    const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles, b = head / in.NH, h = head % in.NH,
              lane = threadIdx.x % lanes;
    for (int row = threadIdx.x / lanes; row < 64; row += 256 / lanes) {
        const int t = tile * 64 + row, last = min(t, in.T - 1);
        const size_t at = (((size_t)b * in.T + last) * in.NH + h) * HS + lane * 8;
        const Pack<bf16> dy = load(dout + at), y = load(out + at);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf((float)dy[i], (float)y[i], sum);
#pragma unroll
        for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(all_lanes, sum, offset);
        if (lane != 0) continue;
        QueryStatistics& to = statistics[(size_t)head * tiles + tile];
        to.lse[row] = t < in.T ? lse[(size_t)head * in.T + t] * log2_e : INFINITY;
        to.d[row] = t < in.T ? sum : 0.0f;
        to.first_key[row] = in.doc_start ? in.doc_start[(size_t)b * in.T + last] : 0;
    }
}

// The kernel of a block's 128 keys, in two warpgroups, against tiles of queries; with_queries: also their gradient.
template <int HS, bool with_queries>
struct BackwardKeys {
    static constexpr int consumers = 2, keys = 128, queries = with_queries && HS == 64 ? 128 : 64,
                         stages = HS == 128      ? 3
                                  : with_queries ? 2
                                                 : 4;
    struct ForQueries {
        Tile<keys, queries> ds[2];          // of this tile of queries and of the previous one
        float dq[consumers][sum_elements];  // staging for the sums
    };
    struct Nothing {};
    struct Shared : std::conditional_t<with_queries, ForQueries, Nothing> {
        Tile<keys, HS> k, v;
        Tile<queries, HS> q[stages], dout[stages];
        QueryStatistics statistics[stages][queries / 64];
        Ring<stages> ring;
        uint64_t kv_full;
    };
    static_assert(sizeof(Shared) <= shared_memory);
};
// The kernel of a block's 128 queries, in two warpgroups, against tiles of 128 keys.
template <int HS>
struct BackwardQueries {
    static constexpr int consumers = 2, queries = 128, keys = 128, stages = HS == 64 ? 4 : 2;
    struct Shared {
        Tile<queries, HS> q, dout;
        Tile<keys, HS> k[stages], v[stages];
        Ring<stages> ring;
        uint64_t q_full;
    };
    static_assert(sizeof(Shared) <= shared_memory);
};
constexpr int backward_threads = 384, backward_producer_registers = 24, backward_consumer_registers = 240;

#ifdef HOPPER_CODE

// The tiles of queries that see any of the keys j0 .. j0 + n - 1: first .. end - 1. As doc_start does not decrease, the end is
// the first tile whose documents start after these keys.
struct QueryTiles {
    int first, end;
    __device__ QueryTiles(const AttentionInputs& in, int b, int j0, int n, int queries)
        : first(j0 / queries), end(ceil_div(in.T, queries)) {
        if (!in.doc_start) return;
        int low = first + 1;  // the first tile has the queries of the keys' own rows
        while (low < end) {
            const int middle = (low + end) / 2;
            if (in.doc_start[(size_t)b * in.T + middle * queries] >= j0 + n) end = middle;
            else low = middle + 1;
        }
    }
};

template <int HS, bool with_queries>
__device__ void keys_producer(typename BackwardKeys<HS, with_queries>::Shared& shared, const CUtensorMap& kv_map,
                              const CUtensorMap& q_map, const CUtensorMap& dout_map, const QueryStatistics* statistics,
                              const AttentionInputs& in, int b, int g, int j0) {
    using K = BackwardKeys<HS, with_queries>;
    const int group = in.group(), tiles = ceil_div(in.T, 128) * 128 / K::queries;
    mbarrier_arrive_expect(&shared.kv_full, sizeof shared.k + sizeof shared.v);
    load_tile(shared.k, kv_map, &shared.kv_full, in.NH + g, j0, b);
    load_tile(shared.v, kv_map, &shared.kv_full, in.NH + in.NKV + g, j0, b);
    const QueryTiles range(in, b, j0, K::keys, K::queries);
    unsigned n = 0;
    for (int h = g * group; h < (g + 1) * group; h++)
        for (int tile = range.first; tile < range.end; tile++, n++) {
            const unsigned stage = n % K::stages;
            uint64_t* full = &shared.ring.full[stage];
            wait_empty(shared.ring, n);
            mbarrier_arrive_expect(full, sizeof shared.q[0] + sizeof shared.dout[0] + sizeof shared.statistics[0]);
            load_tile(shared.q[stage], q_map, full, h, tile * K::queries, b);
            load_tile(shared.dout[stage], dout_map, full, h, tile * K::queries, b);
            bulk_load(&shared.statistics[stage], statistics + (((size_t)b * in.NH + h) * tiles + tile) * (K::queries / 64),
                      sizeof shared.statistics[0], full);
        }
}

// With a cap or dropout: s becomes P times the derivative of the cap, and p becomes the kept P. This is one loop, because
// registers do not suffice for both P and the derivative until dP arrives. log_sum, hidden and kept are functions of a number's
// place 4i + 2r + e.
template <int N, class LogSum, class Hidden, class Kept>
__device__ __forceinline__ void capped_weights(float (&s)[N / 2], uint32_t (&p)[N / 16][4], const CapAndDropout& cap,
                                               float slope, int distance, const Place& me, LogSum log_sum, Hidden hidden,
                                               Kept kept) {
#pragma unroll
    for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float bias = slope * (float)(me.column - me.row - 8 * r + distance);
            float weights[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = s[4 * i + 2 * r + e];
                const float score = fmaf(x, cap.scale, fmaf(slope, (float)(8 * i + e), bias));
                const float weight = exp2_approx(hidden(i, r, e) ? -INFINITY : score - log_sum(i, r, e));
                weights[e] = kept(i, r, e) ? weight : 0.0f;
                x = weight * fmaf(cap.square * x, x, 1.0f);
            }
            p[i / 2][i % 2 * 2 + r] = pack_bf16(weights[0], weights[1]);
        }
}

// One function although it is longer than a screen: its sums and probabilities stay in registers from product to product.
template <int HS, bool with_queries, bool capped_or_dropped>
__device__ void keys_consumer(typename BackwardKeys<HS, with_queries>::Shared& shared, const CUtensorMap& dkv_map,
                              float* dq_sums, const AttentionInputs& in, int b, int g, int j0, int w) {
    using K = BackwardKeys<HS, with_queries>;
    constexpr int N = K::queries;
    const Place me;
    const int group = in.group(), my_j0 = j0 + 64 * w, tiles = ceil_div(in.T, 128) * 128 / N;
    const float scale = in.scale * log2_e, c = in.slopes ? 1.0f : scale, one[2] = {1.0f, 1.0f};
    const QueryTiles range(in, b, j0, K::keys, N);
    // Not in.cap.keep: with an operand from constant memory ptxas serializes all products (C7515).
    const float keep = capped_or_dropped ? in.dropout.factor() : 1.0f;
    float dk[HS / 2], dv[HS / 2], s[N / 2], dp[N / 2], dq[32];
    uint32_t p[N / 16][4], ds[N / 16][4];

    const bool first_thread = threadIdx.x % 128 == 0;
    const auto both_barrier = [] { named_barrier_sync(1 + K::consumers, 128 * K::consumers); };
#pragma unroll
    for (int i = 0; i < HS / 2; i++) dk[i] = dv[i] = 0;
    mbarrier_wait(&shared.kv_full, 0);

    unsigned n = 0;
    uint64_t* held = nullptr;  // the slot whose products are running
    for (int h = g * group; h < (g + 1) * group; h++) {
        const float slope = in.slopes ? in.slopes[h] * log2_e : 0.0f;
        for (int tile = range.first; tile < range.end; tile++, n++) {
            const unsigned stage = n % K::stages;
            const int t0 = tile * N;
            wait_full(shared.ring, n);
            if (!with_queries && t0 < my_j0) {  // all of these queries precede the warpgroup's keys
                release(&shared.ring.empty[stage]);
                continue;
            }
            const auto& statistics = shared.statistics[stage];
            wgmma_fence();
            multiply_transposed(s, shared.k, 64 * w, shared.q[stage]);
            wgmma_wait<1>(dk);  // the previous tile's products are done: p and ds are free
            if (held) release(held);
            held = &shared.ring.empty[stage];
            wgmma_fence();
            multiply_transposed(dp, shared.v, 64 * w, shared.dout[stage]);
            wgmma_wait<1>(s);
            const Kept<N, true, capped_or_dropped> kept(in, b, h, t0, my_j0 + 16 * me.warp);

            // s and dp: row = key, column = query.
            if constexpr (capped_or_dropped) {
                const auto log_sum = [&](int i, int, int e) { return statistics[i / 8].lse[i % 8 * 8 + me.column + e]; };
                const auto hidden = [&](int i, int r, int e) {
                    const int column = i % 8 * 8 + me.column + e, t = t0 + i / 8 * 64 + column, j = my_j0 + me.row + 8 * r;
                    return j > t || j < statistics[i / 8].first_key[column];
                };
                tanh_of_scores<N / 2>(s, in.cap);
                capped_weights<N>(s, p, in.cap, -slope, t0 - my_j0, me, log_sum, hidden, kept);
            } else {
                if (in.slopes) add_bias<N>(s, scale, -slope, t0 - my_j0, me);
#pragma unroll
                for (int i = 0; i < N / 8; i++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float lse = statistics[i / 8].lse[i % 8 * 8 + me.column + e];
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            float& x = s[4 * i + 2 * r + e];
                            x = exp2_approx(fmaf(x, c, -lse));
                        }
                    }
                if (t0 < my_j0 + 63 || statistics[N / 64 - 1].first_key[63] > my_j0)  // the border of the mask
#pragma unroll
                    for (int i = 0; i < N / 8; i++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int column = i % 8 * 8 + me.column + e, t = t0 + i / 8 * 64 + column;
                            const int first_key = statistics[i / 8].first_key[column];
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                const int j = my_j0 + me.row + 8 * r;
                                float& x = s[4 * i + 2 * r + e];
                                x = j > t || j < first_key ? 0.0f : x;
                            }
                        }
                pack_operand<N>(p, s);
            }
            wgmma_fence(dv, p);
            multiply(dv, p, shared.dout[stage], true);
            wgmma_wait<1>(dp);
#pragma unroll
            for (int i = 0; i < N / 8; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float d = statistics[i / 8].d[i % 8 * 8 + me.column + e];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float& x = dp[4 * i + 2 * r + e];
                        if (capped_or_dropped) x = kept(i, r, e) ? x * keep : 0.0f;
                        x = s[4 * i + 2 * r + e] * (x - d);
                    }
                }
            pack_operand<N>(ds, dp);
            // Each warpgroup computes half of the queries' gradient: 64 columns if heads have 128, else 64 of 128 queries. It
            // reads the ds of both, and stores while the product for dk runs.
            if constexpr (with_queries) {
                stage_rows(shared.ds[n % 2], 64 * w, dp, one, me);
                fence_proxy_async();
                if (first_thread) tma_store_wait<0>();  // the previous dq has been read
                both_barrier();
                wgmma_fence();
                multiply_columns(dq, shared.ds[n % 2].data[HS == 64 ? w : 0], shared.k.data[HS == 64 ? 0 : w]);
            }
            wgmma_fence(dk, ds);
            multiply(dk, ds, shared.q[stage], true);
            if constexpr (with_queries) {
                wgmma_wait<1>(dq);
                stage_sums(shared.dq[w], dq);
                fence_proxy_async();
                named_barrier_sync(1 + w, 128);
                if (first_thread) {
                    const size_t part = (((size_t)b * in.NH + h) * tiles + tile) * K::consumers + w;
                    bulk_add(dq_sums + part * sum_elements, shared.dq[w], sizeof shared.dq[w]);
                    tma_store_commit();
                }
                wgmma_wait<0>(dk);  // without it ptxas, which cannot see that dq is free, serializes all products
            }
        }
    }
    wgmma_wait<0>(dk);
    wgmma_wait<0>(dv);
    if (with_queries) both_barrier();  // the other warpgroup's products have read these keys

    // These rows of k and v are no longer read: the results are staged in them.
    const float scales[2] = {in.scale, in.scale}, keeps[2] = {keep, keep};
    stage_rows(shared.k, 64 * w, dk, scales, me);
    stage_rows(shared.v, 64 * w, dv, keeps, me);
    fence_proxy_async();
    named_barrier_sync(1 + w, 128);
    if (threadIdx.x % 128 == 0) {
        for (int i = 0; i < HS / slab; i++) {
            tma_store(dkv_map, &shared.k.data[i][64 * w][0], 0, my_j0, (in.NH + g) * (HS / slab) + i, b);
            tma_store(dkv_map, &shared.v.data[i][64 * w][0], 0, my_j0, (in.NH + in.NKV + g) * (HS / slab) + i, b);
        }
        tma_store_commit();
        tma_store_wait<0>();
    }
}

#endif

// Converts the sums of query gradients; a block per 64 queries of a head.
template <int HS>
__global__ void __launch_bounds__(256)
    attention_query_gradient_kernel(bf16* dqkv, const float* sums, AttentionInputs in, int tiles) {
    constexpr int packs = HS / 8;  // packs of a row, one per thread; a thread has two rows
    const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles, b = head / in.NH, h = head % in.NH;
    for (int i = threadIdx.x; i < 32 * packs; i += 256) {
        const int pack = i % packs, warp = i / packs / 8, row = i / packs % 8, t = tile * 64 + warp * 16 + row;
        const float* from =
            sums + ((size_t)blockIdx.x * (HS / slab) + pack / 8) * sum_elements + (pack % 8 * 128 + warp * 32 + row * 4) * 4;
        Pack<bf16> x[2];
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            const Pack<float> four = load(from + 4 * lane);
#pragma unroll
            for (int e = 0; e < 4; e++) x[e / 2][2 * lane + e % 2] = (bf16)(four[e] * in.scale);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
            if (t + 8 * r < in.T)
                store(dqkv + (((size_t)b * in.T + t + 8 * r) * (in.NH + 2 * in.NKV) + h) * HS + pack * 8, x[r]);
    }
}

#ifdef HOPPER_CODE

template <int HS>
__device__ void queries_producer(typename BackwardQueries<HS>::Shared& shared, const CUtensorMap& q_map,
                                 const CUtensorMap& dout_map, const CUtensorMap& kv_map, const AttentionInputs& in, int b,
                                 int h, int t0) {
    using Q = BackwardQueries<HS>;
    const int g = h / in.group();
    mbarrier_arrive_expect(&shared.q_full, sizeof shared.q + sizeof shared.dout);
    load_tile(shared.q, q_map, &shared.q_full, h, t0, b);
    load_tile(shared.dout, dout_map, &shared.q_full, h, t0, b);
    const KeyTiles range(in, b, t0, Q::queries, Q::keys);
    for (int j = range.first; j <= range.last; j++) {
        const unsigned n = j - range.first, stage = n % Q::stages;
        uint64_t* full = &shared.ring.full[stage];
        wait_empty(shared.ring, n);
        mbarrier_arrive_expect(full, sizeof shared.k[0] + sizeof shared.v[0]);
        load_tile(shared.k[stage], kv_map, full, in.NH + g, j * Q::keys, b);
        load_tile(shared.v[stage], kv_map, full, in.NH + in.NKV + g, j * Q::keys, b);
    }
}

template <int HS, bool capped_or_dropped>
__device__ void queries_consumer(typename BackwardQueries<HS>::Shared& shared, const CUtensorMap& dq_map,
                                 const QueryStatistics* statistics, const AttentionInputs& in, int b, int h, int t0, int w) {
    using Q = BackwardQueries<HS>;
    constexpr int N = Q::keys;
    const Place me;
    const int my_t0 = t0 + 64 * w;
    const KeyTiles range(in, b, t0, Q::queries, N);
    const bool idle = my_t0 >= in.T;  // past the sequence's end
    KeyTiles mine = range;
    if (idle) mine.last = mine.first - 1;
    else mine = KeyTiles(in, b, my_t0, 64, N);
    const Queries queries(in, b, my_t0, me);
    const float scale = in.scale * log2_e, slope = in.slopes ? in.slopes[h] * log2_e : 0.0f, c = in.slopes ? 1.0f : scale;
    const QueryStatistics& of_rows = statistics[((size_t)b * in.NH + h) * (ceil_div(in.T, 128) * 2) + my_t0 / 64];
    const float lse[2] = {of_rows.lse[me.row], of_rows.lse[me.row + 8]}, d[2] = {of_rows.d[me.row], of_rows.d[me.row + 8]};
    float dq[HS / 2], s[N / 2], dp[N / 2];
    uint32_t ds[N / 16][4];
#pragma unroll
    for (int i = 0; i < HS / 2; i++) dq[i] = 0;
    mbarrier_wait(&shared.q_full, 0);

    uint64_t* held = nullptr;  // the slot whose products are running
    for (int j = range.first; j <= range.last; j++) {
        const unsigned n = j - range.first, stage = n % Q::stages;
        const int j0 = j * N;
        wait_full(shared.ring, n);
        if (j < mine.first || j > mine.last) {
            release(&shared.ring.empty[stage]);
            continue;
        }
        wgmma_fence();
        multiply_transposed(s, shared.q, 64 * w, shared.k[stage]);
        wgmma_wait<1>(dq);  // the previous tile's last product is done: ds is free
        if (held) release(held);
        held = &shared.ring.empty[stage];
        wgmma_fence();
        multiply_transposed(dp, shared.dout, 64 * w, shared.v[stage]);
        const Kept<N, false, capped_or_dropped> kept(in, b, h, my_t0 + 16 * me.warp, j0);
        wgmma_wait<1>(s);
        if constexpr (capped_or_dropped) {
            uint32_t unused[N / 16][4];
            const auto log_sum = [&](int, int r, int) { return lse[r]; };
            const auto hidden = [&](int i, int r, int e) { return !queries.sees(r, j0 + 8 * i + me.column + e); };
            const auto weigh = [&](auto is_hidden) {
                capped_weights<N>(s, unused, in.cap, slope, j0 - my_t0, me, log_sum, is_hidden, kept);
            };
            tanh_of_scores<N / 2>(s, in.cap);
            if (queries.border(j0, N)) weigh(hidden);
            else weigh([](int, int, int) { return false; });
        } else {
            if (in.slopes) add_bias<N>(s, scale, slope, j0 - my_t0, me);
#pragma unroll
            for (int i = 0; i < N / 2; i++) s[i] = exp2_approx(fmaf(s[i], c, -lse[i / 2 % 2]));
            if (queries.border(j0, N))
#pragma unroll
                for (int i = 0; i < N / 2; i++)
                    if (!queries.sees(i / 2 % 2, j0 + i / 4 * 8 + me.column + i % 2)) s[i] = 0;
        }
        wgmma_wait<0>(dp);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            if (capped_or_dropped) dp[i] = kept(i / 4, i / 2 % 2, i % 2) ? dp[i] * in.cap.keep : 0.0f;
            dp[i] = s[i] * (dp[i] - d[i / 2 % 2]);
        }
        pack_operand<N>(ds, dp);
        wgmma_fence(dq, ds);
        multiply(dq, ds, shared.k[stage], true);
    }
    wgmma_wait<0>(dq);

    const float scales[2] = {in.scale, in.scale};
    stage_rows(shared.q, 64 * w, dq, scales, me);  // no other warpgroup reads these rows of q
    fence_proxy_async();
    named_barrier_sync(1 + w, 128);
    if (threadIdx.x % 128 == 0) {
        for (int i = 0; i < HS / slab; i++) tma_store(dq_map, &shared.q.data[i][64 * w][0], 0, my_t0, h * (HS / slab) + i, b);
        tma_store_commit();
        tma_store_wait<0>();
    }
}

#endif

template <int HS, bool with_queries, bool capped_or_dropped>
__global__ void __launch_bounds__(backward_threads, 1)
    attention_backward_keys_kernel(const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ CUtensorMap q_map,
                                   const __grid_constant__ CUtensorMap dout_map, const __grid_constant__ CUtensorMap dkv_map,
                                   float* dq_sums, const QueryStatistics* statistics, AttentionInputs in, WorkOrder order) {
#ifdef HOPPER_CODE
    using K = BackwardKeys<HS, with_queries>;
    DYNAMIC_SHARED(typename K::Shared, shared);
    const WorkOrder::Item item = order.item(blockIdx.x);  // most queries see the first keys: long items first
    const int b = item.head / in.NKV, g = item.head % in.NKV, j0 = item.tile * K::keys;
    if (threadIdx.x == 0) {
        tma_prefetch(kv_map);
        tma_prefetch(q_map);
        tma_prefetch(dout_map);
        tma_prefetch(dkv_map);
        mbarrier_init(&shared->kv_full, 1), init_ring(shared->ring, K::consumers);
        mbarrier_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<backward_producer_registers>();
        if (threadIdx.x == 0) keys_producer<HS, with_queries>(*shared, kv_map, q_map, dout_map, statistics, in, b, g, j0);
    } else {
        registers_increase<backward_consumer_registers>();
        keys_consumer<HS, with_queries, capped_or_dropped>(*shared, dkv_map, dq_sums, in, b, g, j0, warpgroup - 1);
    }
#else
    __trap();
#endif
}

template <int HS, bool capped_or_dropped>
__global__ void __launch_bounds__(backward_threads, 1)
    attention_backward_queries_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap dout_map,
                                      const __grid_constant__ CUtensorMap kv_map, const __grid_constant__ CUtensorMap dq_map,
                                      const QueryStatistics* statistics, AttentionInputs in, WorkOrder order) {
#ifdef HOPPER_CODE
    using Q = BackwardQueries<HS>;
    DYNAMIC_SHARED(typename Q::Shared, shared);
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / in.NH, h = item.head % in.NH;
    const int t0 = (order.tiles - 1 - item.tile) * Q::queries;  // long items first
    if (threadIdx.x == 0) {
        tma_prefetch(q_map);
        tma_prefetch(dout_map);
        tma_prefetch(kv_map);
        tma_prefetch(dq_map);
        mbarrier_init(&shared->q_full, 1), init_ring(shared->ring, Q::consumers);
        mbarrier_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_decrease<backward_producer_registers>();
        if (threadIdx.x == 0) queries_producer<HS>(*shared, q_map, dout_map, kv_map, in, b, h, t0);
    } else {
        registers_increase<backward_consumer_registers>();
        queries_consumer<HS, capped_or_dropped>(*shared, dq_map, statistics, in, b, h, t0, warpgroup - 1);
    }
#else
    __trap();
#endif
}

// ---- host ------------------------------------------------------------------------------------------------------------------
template <int HS, bool with_queries, bool capped_or_dropped>
void run_backward_keys(Ctx& ctx, bf16* dqkv, float* dq_sums, const QueryStatistics* statistics, const bf16* dout,
                       const bf16* qkv, const AttentionInputs& in) {
    using K = BackwardKeys<HS, with_queries>;
    const int heads = in.NH + 2 * in.NKV, slabs = HS / slab;
    const WorkOrder order = keys_order<bf16>(in, K::keys, section_bytes);
    LAUNCH((attention_backward_keys_kernel<HS, with_queries, capped_or_dropped>), order.items(), backward_threads,
           sizeof(typename K::Shared), ctx, head_map(ctx, qkv, heads, in, K::keys, slabs),
           head_map(ctx, qkv, heads, in, K::queries, slabs), head_map(ctx, dout, in.NH, in, K::queries, slabs),
           head_map(ctx, dqkv, heads, in, 64, 1), dq_sums, statistics, in, order);
}

// dq_sums: null, or memory in which query gradients are summed in no fixed order.
template <int HS, bool capped_or_dropped>
void run_backward(Ctx& ctx, bf16* dqkv, float* dq_sums, const bf16* dout, const bf16* out, const real* lse, const bf16* qkv,
                  const AttentionInputs& in) {
    using Q = BackwardQueries<HS>;
    const int heads = in.NH + 2 * in.NKV, slabs = HS / slab, tiles = ceil_div(in.T, 128) * 2;
    const size_t n_heads = (size_t)in.B * in.NH;
    auto* statistics = (QueryStatistics*)ctx.scratch(n_heads * tiles * sizeof(QueryStatistics));
    LAUNCH((attention_statistics_kernel<HS>), (unsigned)(n_heads * tiles), 256, 0, ctx, statistics, dout, out, lse, in, tiles);

    if (dq_sums) {
        CHECK(!capped_or_dropped, "one kernel has no registers left for caps and dropout");
        CUDA(cudaMemsetAsync(dq_sums, 0, n_heads * tiles * 64 * HS * sizeof(float), ctx.stream));
        run_backward_keys<HS, true, false>(ctx, dqkv, dq_sums, statistics, dout, qkv, in);
        LAUNCH((attention_query_gradient_kernel<HS>), (unsigned)(n_heads * tiles), 256, 0, ctx, dqkv, dq_sums, in, tiles);
        return;
    }
    run_backward_keys<HS, false, capped_or_dropped>(ctx, dqkv, nullptr, statistics, dout, qkv, in);
    const CUtensorMap qkv_map = head_map(ctx, qkv, heads, in, 128, slabs);
    const WorkOrder order = queries_order<bf16>(in, Q::queries, section_bytes);
    LAUNCH((attention_backward_queries_kernel<HS, capped_or_dropped>), order.items(), backward_threads,
           sizeof(typename Q::Shared), ctx, qkv_map, head_map(ctx, dout, in.NH, in, 128, slabs), qkv_map,
           head_map(ctx, dqkv, heads, in, 64, 1), statistics, in, order);
}

}  // namespace gpu::hopper

namespace gpu {

// The size of dq_sums in elements.
inline size_t attention_hopper_sums(const AttentionShape& a) { return (size_t)a.B * round_up(a.T, 128) * a.NH * a.HS; }

inline void attention_backward_hopper(Ctx& ctx, bf16* dqkv /*(B, T, NH + 2*NKV, HS)*/, const bf16* dout /*(B, T, NH, HS)*/,
                                      const bf16* out, const real* lse, const bf16* qkv, const AttentionMask& mask,
                                      const AttentionShape& a, float* dq_sums /*or null*/) {
    CHECK(attention_hopper_takes(ctx, a.HS), "head size %d on capability %d", a.HS, ctx.capability);
    HopperHeads::call(a.HS, [&](auto HS) {
        const auto run = a.capped_or_dropped() ? hopper::run_backward<HS.value, true> : hopper::run_backward<HS.value, false>;
        run(ctx, dqkv, dq_sums, dout, out, lse, qkv, {a, mask});
    });
}

}  // namespace gpu
