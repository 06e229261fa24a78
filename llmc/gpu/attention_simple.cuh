// Attention for any head size up to 256 and both precisions, without tensor cores: the GPU's plain version of
// llmc/cpu/attention.h, and the per-row inputs of backward, which it shares with attention_mma.cuh.
//
// A warp owns 4 rows: queries (forward, dq) or keys (dk and dv). The block loops over the tiles of 32 keys (or queries) that
// any of its rows needs. Scores: each lane owns one row of the tile and multiplies it with the warp's rows. Sums over the tile:
// each lane owns every 32nd element of the head and reads the weights that the lanes wrote to shared memory. fp32 throughout:
// tiles are widened when loaded. No atomics; each output is summed in one order by one warp.
// Cost: forward 2, backward 7 products (dq and dk/dv each recompute the scores) of T^2/2 HS multiply-adds per head; bound by
// reading shared memory, about one load per multiply-add. For fp32 and unusual head sizes; not meant to be fast.
#pragma once
#include <cmath>

#include "../ops.h"
#include "attention_order.cuh"
#include "device.cuh"

namespace gpu {

// ---- shared with attention_mma.cuh -----------------------------------------------------------------------------------------
// A part of the 40 to 126 MB of L2 cache of a data-center GPU; other data needs room, too.
constexpr size_t section_bytes = 16 << 20;

// Per-row inputs of backward for queries: 16 bytes, which one asynchronous copy brings into shared memory.
struct alignas(16) RowInfo {
    float lse, lse_log2;  // of the scores; lse_log2: times log2(e), for kernels that use 2^x
    float correction;     // dout . out, the softmax's correction
    int first_key;
};

// A warp processes 32 / lanes rows at a time; `lanes` (a power of two) is just enough to hold a row in packs.
template <bool packed>
__global__ void attention_row_info(RowInfo* info /*(B, NH, T)*/, const floatX* dout, const floatX* out, const float* lse,
                                   const int* doc_start, AttentionShape a, int lanes) {
    const int lane = threadIdx.x % 32;
    const size_t n = (size_t)a.B * a.queries() * a.NH;
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    float sum = 0;
    if (row < n)
        for (int c = lane % lanes * Pack<floatX>::size; c < a.HS; c += lanes * Pack<floatX>::size) {
            const Pack<floatX> x = load_part<packed>(dout + row * a.HS, c, a.HS);
            const Pack<floatX> y = load_part<packed>(out + row * a.HS, c, a.HS);
#pragma unroll
            for (int k = 0; k < Pack<floatX>::size; k++) sum += (float)x[k] * (float)y[k];
        }
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(all_lanes, sum, offset);
    if (row < n && lane % lanes == 0) {
        const int queries = a.queries(), h = (int)(row % a.NH), b = (int)(row / a.NH / queries);
        const int t = a.first + (int)(row / a.NH % queries);
        const size_t i = a.statistic(b, t, h);
        info[i] = {lse[i], lse[i] * log2_e, sum, doc_start ? doc_start[row / a.NH] : 0};
    }
}

// The number of lanes that hold a row of HS elements in packs.
inline int lanes_of_row(int HS) {
    int lanes = 1;
    while (lanes < 32 && lanes * Pack<floatX>::size < HS) lanes *= 2;
    return lanes;
}

inline RowInfo* compute_row_info(Ctx& ctx, const floatX* dout, const AttentionActs& acts, const int* doc_start,
                                 const AttentionShape& a) {
    const size_t n = (size_t)a.B * a.queries() * a.NH;
    RowInfo* info = (RowInfo*)ctx.scratch(n * sizeof(RowInfo));
    const int lanes = lanes_of_row(a.HS);
    const unsigned blocks = (unsigned)ceil_div(n * lanes, 256);
    if (a.HS % Pack<floatX>::size == 0 && aligned_16(dout, acts.out))
        LAUNCH(attention_row_info<true>, blocks, 256, 0, ctx, info, dout, acts.out, acts.lse, doc_start, a, lanes);
    else LAUNCH(attention_row_info<false>, blocks, 256, 0, ctx, info, dout, acts.out, acts.lse, doc_start, a, lanes);
    return info;
}

// ---- the simple kernels ----------------------------------------------------------------------------------------------------
namespace simple {

constexpr int R = 4;      // rows per warp
constexpr int tile = 32;  // rows of a tile in shared memory, one per lane

// C: elements of a head per lane, 4 (heads up to 128) or 8 (up to 256). Fewer warps for wide heads: shared memory is limited.
template <int C>
constexpr int warps = C == 4 ? 8 : 2;
template <int C>
constexpr int block_rows = R* warps<C>;

// Lanes read down a column of a tile: an odd row stride avoids bank conflicts.
HD constexpr int tile_row(int HS) { return HS | 1; }

// Loads rows [first, first + n) of a head, widened; rows from `end` on are zero.
__device__ inline void load_rows(float* to, int to_row, const floatX* head, size_t row, int first, int n, int end, int HS) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    for (int i = warp; i < n; i += n_warps)
        for (int c = lane; c < HS; c += 32)
            to[i * to_row + c] = first + i < end ? (float)head[(size_t)(first + i) * row + c] : 0.0f;
}

__device__ __forceinline__ float capped(const AttentionShape& a, float score) {
    return a.softcap > 0 ? soft_cap(score, a.softcap) : score;
}

// dots[r] = row r of the warp times the lane's row of the tile
__device__ __forceinline__ void multiply(float (&dots)[R], const float* rows, const float* tile_of_rows, int HS) {
    const float* mine = tile_of_rows + threadIdx.x % 32 * tile_row(HS);
    for (int r = 0; r < R; r++) dots[r] = 0;
    for (int c = 0; c < HS; c++) {
        const float x = mine[c];
#pragma unroll
        for (int r = 0; r < R; r++) dots[r] += rows[r * HS + c] * x;
    }
}

// sums[r] += sum_j weights[r][j] tile[j], for the lane's elements of the head
template <int C>
__device__ __forceinline__ void accumulate(float (&sums)[R][C], const float* weights /*(R, tile)*/, const float* tile_of_rows,
                                           int HS) {
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < tile; j++) {
        float x[C];
#pragma unroll
        for (int i = 0; i < C; i++) x[i] = lane + 32 * i < HS ? tile_of_rows[j * tile_row(HS) + lane + 32 * i] : 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int i = 0; i < C; i++) sums[r][i] += weights[r * tile + j] * x[i];
    }
}

// Rows from `end` on are not written.
template <int C>
__device__ __forceinline__ void store_rows(floatX* head, size_t row, int first, int end, int HS, const float (&x)[R][C],
                                           float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int i = 0; i < C; i++)
            if (first + r < end && lane + 32 * i < HS) head[(first + r) * row + lane + 32 * i] = (floatX)(x[r][i] * factor);
}

inline size_t forward_bytes(int HS, int rows) {
    return sizeof(float) * ((size_t)2 * tile * tile_row(HS) + (size_t)rows * (HS + tile));
}
inline size_t backward_bytes(int HS, int rows) {
    return sizeof(float) * ((size_t)2 * tile * tile_row(HS) + (size_t)rows * (2 * HS + 2 * tile));
}

template <int C>
__global__ void __launch_bounds__(32 * warps<C>, 1)
    attention_forward(floatX* out, float* lse, const floatX* qkv, const floatX* kv, const float* slopes, const int* doc_start,
                      AttentionShape a, WorkOrder order) {
    constexpr int rows = block_rows<C>;
    DYNAMIC_SHARED(float, shared);
    const int HS = a.HS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *keys = shared, *values = keys + tile * tile_row(HS), *queries = values + tile * tile_row(HS);
    float* weights = queries + rows * HS;
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / a.NH, h = item.head % a.NH, g = h / a.group();
    const int t0 = a.first + (order.tiles - 1 - item.tile) * rows, t_end = min(t0 + rows, a.T);
    const int t = t0 + warp * R;  // the warp's first row
    const float slope = slopes ? slopes[h] : 0.0f;
    int first[R];  // first key of row r; rows past the end use the last row's, and are not written
    for (int r = 0; r < R; r++) first[r] = doc_start ? doc_start[a.query_row(b, min(t + r, a.T - 1))] : 0;

    float *my_queries = queries + warp * R * HS, *p = weights + warp * R * tile;
    float top[R], sum[R], o[R][C] = {};
    for (int r = 0; r < R; r++) {
        top[r] = -INFINITY;
        sum[r] = 0;
    }
    load_rows(queries, HS, qkv + a.query(b, a.first, h), a.row(), t0 - a.first, rows, a.queries(), HS);
    // doc_start does not decrease within a sequence, so the block's first row sees furthest back.
    const int j_first = doc_start ? doc_start[a.query_row(b, t0)] / tile * tile : 0;
    for (int j0 = j_first; j0 < t_end; j0 += tile) {
        __syncthreads();  // the last tile has been read
        load_rows(keys, tile_row(HS), kv + a.key(b, 0, g), a.key_row(), j0, tile, a.T, HS);
        load_rows(values, tile_row(HS), kv + a.value(b, 0, g), a.key_row(), j0, tile, a.T, HS);
        __syncthreads();
        float s[R];
        multiply(s, my_queries, keys, HS);
        const int j = j0 + lane;
        for (int r = 0; r < R; r++) {
            const bool seen = j <= t + r && j >= first[r] && j < a.T;
            s[r] = seen ? capped(a, a.scale * s[r]) + slope * (float)(j - t - r) : -INFINITY;
            const float highest = fmaxf(top[r], warp_max(s[r]));
            const float shift = highest == -INFINITY ? 0.0f : highest;  // a row without keys in this tile
            const float rescale = exp_real(top[r] - shift), weight = exp_real(s[r] - shift);
            p[r * tile + lane] = weight * (a.dropout.rate > 0 && seen ? a.dropout.of(a.weight(b, h, t + r, j)) : 1.0f);
            sum[r] = sum[r] * rescale + warp_sum(weight);
            for (int i = 0; i < C; i++) o[r][i] *= rescale;
            top[r] = highest;
        }
        __syncwarp();
        accumulate<C>(o, p, values, HS);
        __syncwarp();  // before the weights are overwritten
    }
    for (int r = 0; r < R; r++) {
        for (int i = 0; i < C; i++) o[r][i] /= sum[r];
        if (lane == 0 && t + r < a.T) lse[a.statistic(b, t + r, h)] = top[r] + logf(sum[r]);
    }
    store_rows<C>(out + a.output(b, a.first, h), a.output_row(), t - a.first, a.queries(), HS, o, 1.0f);
}

// For row t of head h and key j, from q.k and dout.v: p after dropout, and p (dp - correction) times the derivative of the cap;
// 0 where the row does not see the key.
__device__ __forceinline__ void weights_of(float& p, float& ds, float qk, float dov, const RowInfo& row, int b, int h, int t,
                                           int j, const AttentionShape& a, float slope) {
    const bool seen = t < a.T && j <= t && j >= row.first_key;
    const float score = capped(a, a.scale * qk), keep = a.dropout.rate > 0 && seen ? a.dropout.of(a.weight(b, h, t, j)) : 1.0f;
    p = seen ? exp_real(score + slope * (float)(j - t) - row.lse) : 0.0f;
    ds = p * (keep * dov - row.correction);
    if (a.softcap > 0) ds *= soft_cap_derivative(score, a.softcap);
    p *= keep;
}

template <int C>
__global__ void __launch_bounds__(32 * warps<C>, 1)
    attention_backward_queries(floatX* dqkv, const floatX* dout, const RowInfo* info, const floatX* qkv, const floatX* kv,
                               const float* slopes, AttentionShape a, WorkOrder order) {
    constexpr int rows = block_rows<C>;
    DYNAMIC_SHARED(float, shared);
    const int HS = a.HS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *keys = shared, *values = keys + tile * tile_row(HS), *queries = values + tile * tile_row(HS);
    float *douts = queries + rows * HS, *weights = douts + rows * HS;
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / a.NH, h = item.head % a.NH, g = h / a.group();
    const int t0 = a.first + (order.tiles - 1 - item.tile) * rows, t_end = min(t0 + rows, a.T);
    const int t = t0 + warp * R;
    const float slope = slopes ? slopes[h] : 0.0f;
    RowInfo row[R];
    for (int r = 0; r < R; r++) row[r] = info[a.statistic(b, min(t + r, a.T - 1), h)];

    float *my_queries = queries + warp * R * HS, *my_douts = douts + warp * R * HS, *my_weights = weights + warp * R * tile;
    float dq[R][C] = {};
    load_rows(queries, HS, qkv + a.query(b, a.first, h), a.row(), t0 - a.first, rows, a.queries(), HS);
    load_rows(douts, HS, dout + a.output(b, a.first, h), a.output_row(), t0 - a.first, rows, a.queries(), HS);
    for (int j0 = info[a.statistic(b, t0, h)].first_key / tile * tile; j0 < t_end; j0 += tile) {
        __syncthreads();
        load_rows(keys, tile_row(HS), kv + a.key(b, 0, g), a.key_row(), j0, tile, a.T, HS);
        load_rows(values, tile_row(HS), kv + a.value(b, 0, g), a.key_row(), j0, tile, a.T, HS);
        __syncthreads();
        float qk[R], dov[R];
        multiply(qk, my_queries, keys, HS);
        multiply(dov, my_douts, values, HS);
        for (int r = 0; r < R; r++) {
            float p, ds;
            weights_of(p, ds, qk[r], dov[r], row[r], b, h, t + r, j0 + lane, a, slope);
            my_weights[r * tile + lane] = ds;
        }
        __syncwarp();
        accumulate<C>(dq, my_weights, keys, HS);
        __syncwarp();
    }
    store_rows<C>(dqkv + a.query(b, a.first, h), a.row(), t - a.first, a.queries(), HS, dq, a.scale);
}

// A block owns keys of one key/value head and loops over the queries of all heads of its group, so their sum needs no second
// pass.
template <int C>
__global__ void __launch_bounds__(32 * warps<C>, 1)
    attention_backward_keys(floatX* dkv, const floatX* dout, const RowInfo* info, const floatX* qkv, const floatX* kv,
                            const float* slopes, const int* doc_start, AttentionShape a, WorkOrder order) {
    constexpr int rows = block_rows<C>;
    DYNAMIC_SHARED(float, shared);
    const int HS = a.HS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *queries = shared, *douts = queries + tile * tile_row(HS), *keys = douts + tile * tile_row(HS);
    float *values = keys + rows * HS, *weights = values + rows * HS;
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / a.NKV, g = item.head % a.NKV;
    const int j0 = item.tile * rows, j = j0 + warp * R;  // j: the warp's first key
    const int t_first = max(j0, a.first), t_end = rows_that_see(doc_start, a, b, t_first, j0 + rows);

    float *my_keys = keys + warp * R * HS, *my_values = values + warp * R * HS;
    float *p = weights + warp * R * 2 * tile, *ds = p + R * tile;
    float dk[R][C] = {}, dv[R][C] = {};
    load_rows(keys, HS, kv + a.key(b, 0, g), a.key_row(), j0, rows, a.T, HS);
    load_rows(values, HS, kv + a.value(b, 0, g), a.key_row(), j0, rows, a.T, HS);
    for (int h = g * a.group(); h < (g + 1) * a.group(); h++) {
        const float slope = slopes ? slopes[h] : 0.0f;
        for (int t0 = t_first; t0 < t_end; t0 += tile) {
            __syncthreads();
            load_rows(queries, tile_row(HS), qkv + a.query(b, a.first, h), a.row(), t0 - a.first, tile, a.queries(), HS);
            load_rows(douts, tile_row(HS), dout + a.output(b, a.first, h), a.output_row(), t0 - a.first, tile, a.queries(), HS);
            __syncthreads();
            const RowInfo row = info[a.statistic(b, min(t0 + lane, a.T - 1), h)];
            float kq[R], vdo[R];
            multiply(kq, my_keys, queries, HS);
            multiply(vdo, my_values, douts, HS);
            for (int r = 0; r < R; r++)
                weights_of(p[r * tile + lane], ds[r * tile + lane], kq[r], vdo[r], row, b, h, t0 + lane, j + r, a, slope);
            __syncwarp();
            accumulate<C>(dv, p, douts, HS);
            accumulate<C>(dk, ds, queries, HS);
            __syncwarp();
        }
    }
    store_rows<C>(dkv + a.key(b, 0, g), a.key_row(), j, a.T, HS, dk, a.scale);
    store_rows<C>(dkv + a.value(b, 0, g), a.key_row(), j, a.T, HS, dv, 1.0f);
}

template <int C>
void launch_forward(Ctx& ctx, floatX* out, float* lse, const floatX* qkv, const floatX* kv, const AttentionMask& mask,
                    const AttentionShape& a) {
    const int rows = block_rows<C>;
    const WorkOrder order = queries_order<floatX>(a, rows, section_bytes);
    LAUNCH(attention_forward<C>, order.items(), 32 * warps<C>, forward_bytes(a.HS, rows), ctx, out, lse, qkv, kv, mask.slopes,
           mask.doc_start, a, order);
}

template <int C>
void launch_backward(Ctx& ctx, floatX* dqkv, floatX* dkv, const floatX* dout, const RowInfo* info, const AttentionActs& acts,
                     const AttentionMask& mask, const AttentionShape& a) {
    const int rows = block_rows<C>;
    const WorkOrder of_queries = queries_order<floatX>(a, rows, section_bytes);
    const WorkOrder of_keys = keys_order<floatX>(a, rows, section_bytes);
    LAUNCH(attention_backward_keys<C>, of_keys.items(), 32 * warps<C>, backward_bytes(a.HS, rows), ctx, dkv, dout, info,
           acts.qkv, acts.keys(), mask.slopes, mask.doc_start, a, of_keys);
    LAUNCH(attention_backward_queries<C>, of_queries.items(), 32 * warps<C>, backward_bytes(a.HS, rows), ctx, dqkv, dout, info,
           acts.qkv, acts.keys(), mask.slopes, a, of_queries);
}

}  // namespace simple

inline void attention_forward_simple(Ctx& ctx, floatX* out, float* lse, const floatX* qkv, const floatX* kv,
                                     const AttentionMask& mask, const AttentionShape& a) {
    const auto launch = a.HS <= 128 ? simple::launch_forward<4> : simple::launch_forward<8>;
    launch(ctx, out, lse, qkv, kv, mask, a);
}

inline void attention_backward_simple(Ctx& ctx, floatX* dqkv, floatX* dkv, const floatX* dout, const AttentionActs& acts,
                                      const AttentionMask& mask, const AttentionShape& a) {
    const RowInfo* info = compute_row_info(ctx, dout, acts, mask.doc_start, a);
    const auto launch = a.HS <= 128 ? simple::launch_backward<4> : simple::launch_backward<8>;
    launch(ctx, dqkv, dkv, dout, info, acts, mask, a);
}

}  // namespace gpu
