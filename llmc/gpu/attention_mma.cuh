// Flash attention on tensor cores through mma.sync: bf16, head sizes 32 to 256 (attention_kernels), GPUs of capability 8.0 and
// later (FlashAttention-2: Dao, 2023). The mathematics and the derivation of backward are in llmc/cpu/attention.h.
//
// Three kernels of the same form: a block keeps a tile of rows in shared memory, of which each warp owns 16 M, and loops over
// tiles of N rows of the other operands, double-buffered: cp.async fills one buffer while the other is multiplied.
//   forward   queries are resident, loop over k and v     S = Q K^T, P = exp(S - max), O += P V
//   dq        queries and dout resident, loop over k, v   S, dP = dO V^T, dS = P (dP - D), dQ += dS K
//   dk, dv    keys and values resident, loop over q, dout S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
// Each kernel computes A B^T (operands as they are in memory), then weights, then weights times B. The accumulators of the
// first product have the register layout of the second one's left operand, so weights stay in registers, also for dk and dv,
// which use S^T. A block of the last kernel loops over the queries of all heads of its group.
//
// Soft caps and dropout: attention_scores.cuh. Heads of 192 and 256: dk and dv in separate launches, as together they exceed
// the registers; the weights are computed twice, so that backward has 8 products.
//
// Precision: bf16 operands, fp32 sums and softmax; P and dS are rounded to bf16 as operands. 2^x by the special function unit,
// on scores scaled by log2(e): a relative error of 2^-22, plus 2^-24 per unit of |score|.
// Determinism: no atomics; each output is summed by one warp in one order.
// Cost: 2 and 7 products of T^2/2 HS multiply-adds per head (5 would suffice if dq and dk/dv shared S and dP, which requires
// atomics or an order among blocks). A right operand is read from shared memory once per warp, 512 bytes for 2 M mma: at M = 1
// that takes about as long as the mma themselves on an A100, at M = 2 half as long. Not yet measured on a GPU.
// Shared memory: at most 97 KB per block.
#pragma once
#include "attention_scores.cuh"
#include "attention_simple.cuh"
#include "tensor.cuh"

#if !defined(PRECISION_FP32)

namespace gpu {
namespace mma {

// Tile shapes: as large as registers allow on all architectures without spilling. 8 warps if M is 1, for as many rows.
template <int HS>
struct Forward {
    static constexpr int M = HS <= 96 ? 2 : 1, N = HS == 128 ? 64 : 32, warps = HS == 256 ? 4 : 8 / M, rows = 16 * M * warps;
    static constexpr size_t bytes = sizeof(bf16) * HS * (rows + 2 * 2 * N);
};
template <int HS>
struct BackwardQueries {
    static constexpr int M = HS <= 80 ? 2 : 1, N = HS == 256 ? 16 : 32, warps = HS > 128 ? 4 : 8 / M, rows = 16 * M * warps;
    static constexpr size_t bytes = sizeof(bf16) * HS * (2 * rows + 2 * 2 * N);
};
template <int HS>
struct BackwardKeys {  // small heads leave registers and shared memory for three smaller blocks
    static constexpr int M = 1, N = HS == 160 || HS == 256 ? 16 : 32, blocks = HS <= 64 ? 3 : 1,
                         warps = HS <= 64 || HS > 128 ? 4 : 8, rows = 16 * M * warps;
    static constexpr bool apart = dk_dv_apart(HS);  // dk and dv in a launch each, as together they exceed the registers
    static constexpr size_t bytes = sizeof(bf16) * HS * (2 * rows + 2 * 2 * N) + 2 * N * sizeof(RowInfo);
};

// The limit per block on the GPUs with the least shared memory, of capability 8.6, 8.9 and 12.0.
template <int... HS>
constexpr bool fit_in_shared_memory(HeadSizes<HS...>) {
    return ((Forward<HS>::bytes <= 99 << 10 && BackwardQueries<HS>::bytes <= 99 << 10 && BackwardKeys<HS>::bytes <= 99 << 10) &&
            ...);
}
static_assert(fit_in_shared_memory(MmaHeads{}));

// ---- tiles in shared memory ------------------------------------------------------------------------------------------------
// Starts copying rows [first, first + rows) of a head into a tile; rows from `end` on become zeros.
template <int HS, int rows, int threads>
__device__ __forceinline__ void copy_tile(bf16* tile, const bf16* head, size_t row_size, int first, int end) {
    constexpr int chunks = HS / 8, at_once = threads / chunks;  // rows per step; some threads idle if HS is not a power of 2
    const int my_row = (int)threadIdx.x / chunks, chunk = (int)threadIdx.x % chunks;
    const bf16* from = head + (size_t)(first + my_row) * row_size + chunk * 8;
    if (my_row < at_once)
#pragma unroll
        for (int r = 0; r < rows; r += at_once) {
            const int row = r + my_row;
            if (rows % at_once == 0 || row < rows)
                copy_async_16(tile + tile_offset<HS>(row, chunk), from + (size_t)r * row_size, first + row < end);
        }
}

// ---- products of a warp ----------------------------------------------------------------------------------------------------
// Fragments are described in tensor.cuh. In sums of 16 M rows, lane (g, t) has rows 16 m + g and 16 m + g + 8, and of each 8
// columns 2t and 2t + 1.

// c (16 M, N) = a (16 M, HS) b (N, HS)^T, both tiles in shared memory.
template <int HS, int M, int N>
__device__ __forceinline__ void product_transposed(float (&c)[M][N / 8][4], const bf16* a, const bf16* b) {
    const int lane = threadIdx.x % 32;
    const LaneOffset<HS> of_left(lane % 16, lane / 16), of_right(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
#pragma unroll
    for (int k = 0; k < HS / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(left[m], a + of_left(m, 2 * k));
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4(right, b + of_right(n, 2 * k));
            const uint32_t even[2] = {right[0], right[1]}, odd[2] = {right[2], right[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(c[m][2 * n], left[m], even, c[m][2 * n]);
                mma_m16n8k16(c[m][2 * n + 1], left[m], odd, c[m][2 * n + 1]);
            }
        }
    }
}

// c (16 M, HS) += w (16 M, N) b (N, HS); w is the result of product_transposed, rounded to bf16.
template <int HS, int M, int N>
__device__ __forceinline__ void add_product(float (&c)[M][HS / 8][4], const float (&w)[M][N / 8][4], const bf16* b) {
    const LaneOffset<HS> of_right(threadIdx.x % 16, threadIdx.x % 32 / 16);
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &w[m][2 * k + i / 2][i % 2 * 2];
                left[m][i] = pack_bf16(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < HS / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(right, b + of_right(k, 2 * n));
            const uint32_t even[2] = {right[0], right[1]}, odd[2] = {right[2], right[3]};
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_m16n8k16(c[m][2 * n], left[m], even, c[m][2 * n]);
                mma_m16n8k16(c[m][2 * n + 1], left[m], odd, c[m][2 * n + 1]);
            }
        }
    }
}

// Row and column of each number of an accumulator of 16 M rows that a lane holds.
__device__ __forceinline__ int lane_row(int m, int i) { return 16 * m + i / 2 * 8 + (int)threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_column(int n, int i) { return 8 * n + (int)threadIdx.x % 4 * 2 + i % 2; }

// s = scale s + slope (column - row + distance)
template <int M, int N>
__device__ __forceinline__ void add_bias(float (&s)[M][N][4], float scale, float slope, int distance) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float bias = slope * (float)(lane_column(0, i) - lane_row(m, i) + distance);
#pragma unroll
            for (int n = 0; n < N; n++) s[m][n][i] = s[m][n][i] * scale + (bias + slope * (float)(8 * n));
        }
}

// s = -inf where hidden(row, column)
template <int M, int N, class Hidden>
__device__ __forceinline__ void mask(float (&s)[M][N][4], Hidden hidden) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (hidden(lane_row(m, i), lane_column(n, i))) s[m][n][i] = -INFINITY;
}

// dp becomes (dp where kept - correction) times the derivative of the cap; with a cap, the products s become capped scores.
// correction: a function of a number's place.
template <int N, class Kept, class Correction>
__device__ __forceinline__ void cap_and_drop(float (&s)[N / 8][4], float (&dp)[N / 8][4], const CapAndDropout& cap, Kept kept,
                                             Correction correction) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) dp[n][i] = (kept(n, i / 2, i % 2) ? dp[n][i] * cap.keep : 0.0f) - correction(n, i);
    if (cap.capped)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float t = tanh_approx(s[n][i] * cap.argument);
                s[n][i] = cap.scale * t;
                dp[n][i] *= fmaf(-t, t, 1.0f);
            }
}

// Weights that are not kept become 0.
template <int N, class Kept>
__device__ __forceinline__ void drop(float (&s)[N / 8][4], Kept kept) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!kept(n, i / 2, i % 2)) s[n][i] = 0;
}

// Rounds factor * c to bf16 and stores the rows below `end`, 16 bytes at a time, staged in `tile`: 16 M rows that no other warp
// uses.
template <int HS, int M>
__device__ __forceinline__ void store_rows(bf16* head, size_t row_size, int first, int end, const float (&c)[M][HS / 8][4],
                                           const float (&factor)[M][2], bf16* tile) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // all lanes have read the tile
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < HS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *reinterpret_cast<uint32_t*>(tile + tile_offset<HS>(16 * m + 8 * i + lane / 4, n) + lane % 4 * 2) =
                    pack_bf16(c[m][n][2 * i] * factor[m][i], c[m][n][2 * i + 1] * factor[m][i]);
    __syncwarp();
    constexpr int chunks = HS / 8;
    for (int i = lane; i < 16 * M * chunks; i += 32) {
        const int row = i / chunks, chunk = i % chunks;
        if (first + row < end)
            store(head + (size_t)(first + row) * row_size + chunk * 8, load(tile + tile_offset<HS>(row, chunk)));
    }
}

// ---- forward ---------------------------------------------------------------------------------------------------------------
// One function although it is long: all parts of the loop work on the same registers (o, top, sum).
template <int HS, bool capped_or_dropped>
__global__ void __launch_bounds__(32 * Forward<HS>::warps, 1)
    attention_forward(bf16* out, float* lse, const bf16* qkv, const bf16* kv, const float* slopes, const int* doc_start,
                      AttentionShape a, CapAndDropout cap, WorkOrder order) {
    using F = Forward<HS>;
    constexpr int M = F::M, N = F::N, threads = 32 * F::warps;
    DYNAMIC_SHARED(bf16, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto keys = [&](int stage) { return shared + (F::rows + stage * 2 * N) * HS; };
    const auto values = [&](int stage) { return shared + (F::rows + stage * 2 * N + N) * HS; };
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / a.NH, h = item.head % a.NH, g = h / a.group();
    const int t0 = a.first + (order.tiles - 1 - item.tile) * F::rows, t_end = min(t0 + F::rows, a.T);
    const auto first_key = [&](int t) { return doc_start ? doc_start[a.query_row(b, min(t, a.T - 1))] : 0; };
    // The warp's rows, and the first keys that they see; rows past the end use the last row's, and are not written.
    const int t_first = t0 + warp * 16 * M, t_last = t_first + 16 * M - 1;
    const int first_of_first = first_key(t_first), first_of_last = first_key(t_last);

    const auto copy_stage = [&](int stage, int j0) {
        copy_tile<HS, N, threads>(keys(stage), kv + a.key(b, 0, g), a.key_row(), j0, a.T);
        copy_tile<HS, N, threads>(values(stage), kv + a.value(b, 0, g), a.key_row(), j0, a.T);
        copy_async_commit();
    };
    bf16* queries = shared;
    copy_tile<HS, F::rows, threads>(queries, qkv + a.query(b, a.first, h), a.row(), t0 - a.first, a.queries());
    // doc_start does not decrease within a sequence, so the block's first row sees furthest back.
    int j0 = first_key(t0) / N * N, stage = 0;
    copy_stage(stage, j0);

    // Scores are scaled such that 2^(factor * s) is their exponential: with ALiBi they are scaled before the bias is added.
    const bool capped = capped_or_dropped && cap.capped;
    const float scale = capped ? 1.0f : a.scale * log2_e, slope = slopes ? slopes[h] * log2_e : 0.0f,
                factor = slopes ? 1.0f : scale;
    float o[M][HS / 8][4] = {}, top[M][2], sum[M][2] = {};  // sum: of the lane's own columns
#pragma unroll
    for (int m = 0; m < M; m++) top[m][0] = top[m][1] = -INFINITY;

    for (; j0 < t_end; j0 += N, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();  // this buffer has arrived, and all warps are done with the other
        if (j0 + N < t_end) copy_stage(stage ^ 1, j0 + N);
        if (j0 > t_last || j0 + N <= first_of_first) continue;  // no row of this warp sees any of these keys

        float s[M][N / 8][4];
        product_transposed<HS, M, N>(s, queries + warp * 16 * M * HS, keys(stage));
        if (capped)
#pragma unroll
            for (int m = 0; m < M; m++) cap_scores<N / 2>(&s[m][0][0], cap);
        if (slopes) add_bias(s, scale, slope, j0 - t_first);
        if (j0 + N - 1 > t_first || j0 < first_of_last)
            mask(s, [&](int row, int column) {
                const int t = t_first + row, j = j0 + column;
                return j > t || j < first_key(t);
            });
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float highest = top[m][i];
#pragma unroll
                for (int n = 0; n < N / 8; n++) highest = fmaxf(highest, fmaxf(s[m][n][2 * i], s[m][n][2 * i + 1]));
                highest = fmaxf(highest, __shfl_xor_sync(all_lanes, highest, 1));
                highest = fmaxf(highest, __shfl_xor_sync(all_lanes, highest, 2));
                const float shift = highest == -INFINITY ? 0.0f : highest * factor;  // a row without keys so far
                const float rescale = exp2_approx(top[m][i] * factor - shift);
                top[m][i] = highest;
                sum[m][i] *= rescale;
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        sum[m][i] += s[m][n][2 * i + e] = exp2_approx(s[m][n][2 * i + e] * factor - shift);
#pragma unroll
                for (int n = 0; n < HS / 8; n++) o[m][n][2 * i] *= rescale, o[m][n][2 * i + 1] *= rescale;
            }
        if (capped_or_dropped && a.dropout.rate > 0)
#pragma unroll
            for (int m = 0; m < M; m++) drop<N>(s[m], KeptWeights<N, false>(a, b, h, t_first + 16 * m, j0));
        add_product<HS, M, N>(o, s, values(stage));
    }

    float inverse[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float total = sum[m][i];
            total += __shfl_xor_sync(all_lanes, total, 1);
            total += __shfl_xor_sync(all_lanes, total, 2);
            inverse[m][i] = (capped_or_dropped ? cap.keep : 1.0f) / total;
            const int t = t_first + lane_row(m, 2 * i);
            if (lane % 4 == 0 && t < a.T) lse[a.statistic(b, t, h)] = top[m][i] * factor * ln_2 + logf(total);
        }
    store_rows<HS, M>(out + a.output(b, a.first, h), a.output_row(), t_first - a.first, a.queries(), o, inverse,
                      queries + warp * 16 * M * HS);
}

// ---- backward --------------------------------------------------------------------------------------------------------------
template <int HS, bool capped_or_dropped>
__global__ void __launch_bounds__(32 * BackwardQueries<HS>::warps, 1)
    attention_backward_queries(bf16* dqkv, const bf16* dout, const RowInfo* info, const bf16* qkv, const bf16* kv,
                               const float* slopes, AttentionShape a, CapAndDropout cap, WorkOrder order) {
    using F = BackwardQueries<HS>;
    constexpr int M = F::M, N = F::N, threads = 32 * F::warps;
    DYNAMIC_SHARED(bf16, shared);
    const int warp = threadIdx.x / 32;
    bf16 *queries = shared, *douts = queries + F::rows * HS;
    const auto keys = [&](int stage) { return shared + (2 * F::rows + stage * 2 * N) * HS; };
    const auto values = [&](int stage) { return shared + (2 * F::rows + stage * 2 * N + N) * HS; };
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / a.NH, h = item.head % a.NH, g = h / a.group();
    const int t0 = a.first + (order.tiles - 1 - item.tile) * F::rows, t_end = min(t0 + F::rows, a.T);
    const int t_first = t0 + warp * 16 * M, t_last = t_first + 16 * M - 1;

    const auto copy_stage = [&](int stage, int j0) {
        copy_tile<HS, N, threads>(keys(stage), kv + a.key(b, 0, g), a.key_row(), j0, a.T);
        copy_tile<HS, N, threads>(values(stage), kv + a.value(b, 0, g), a.key_row(), j0, a.T);
        copy_async_commit();
    };
    copy_tile<HS, F::rows, threads>(queries, qkv + a.query(b, a.first, h), a.row(), t0 - a.first, a.queries());
    copy_tile<HS, F::rows, threads>(douts, dout + a.output(b, a.first, h), a.output_row(), t0 - a.first, a.queries());
    const auto info_of = [&](int t) -> const RowInfo& { return info[a.statistic(b, min(t, a.T - 1), h)]; };
    int j0 = info_of(t0).first_key / N * N, stage = 0;
    copy_stage(stage, j0);

    float lse_log2[M][2], correction[M][2];  // rows past the end: the last row's; not written
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const RowInfo& row = info_of(t_first + lane_row(m, 2 * i));
            lse_log2[m][i] = row.lse_log2, correction[m][i] = row.correction;
        }
    const int first_of_first = info_of(t_first).first_key, first_of_last = info_of(t_last).first_key;

    const float scale = capped_or_dropped && cap.capped ? 1.0f : a.scale * log2_e, slope = slopes ? slopes[h] * log2_e : 0.0f,
                factor = slopes ? 1.0f : scale;
    float dq[M][HS / 8][4] = {};
    for (; j0 < t_end; j0 += N, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        if (j0 + N < t_end) copy_stage(stage ^ 1, j0 + N);
        if (j0 > t_last || j0 + N <= first_of_first) continue;

        float s[M][N / 8][4], dp[M][N / 8][4];
        product_transposed<HS, M, N>(s, queries + warp * 16 * M * HS, keys(stage));
        product_transposed<HS, M, N>(dp, douts + warp * 16 * M * HS, values(stage));
        if (capped_or_dropped)
#pragma unroll
            for (int m = 0; m < M; m++)
                cap_and_drop<N>(s[m], dp[m], cap, KeptWeights<N, false>(a, b, h, t_first + 16 * m, j0),
                                [&](int, int i) { return correction[m][i / 2]; });
        if (slopes) add_bias(s, scale, slope, j0 - t_first);
        if (j0 + N - 1 > t_first || j0 < first_of_last)
            mask(s, [&](int row, int column) {
                const int t = t_first + row, j = j0 + column;
                return j > t || j < info_of(t).first_key;
            });
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[m][n][i] = exp2_approx(s[m][n][i] * factor - lse_log2[m][i / 2]) *
                                 (capped_or_dropped ? dp[m][n][i] : dp[m][n][i] - correction[m][i / 2]);
        add_product<HS, M, N>(dq, s, keys(stage));
    }

    float factors[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = a.scale;
    store_rows<HS, M>(dqkv + a.query(b, a.first, h), a.row(), t_first - a.first, a.queries(), dq, factors,
                      queries + warp * 16 * M * HS);
}

// with_keys, with_values: which gradients to compute. Both together do not fit into registers for heads of 192 and 256.
template <int HS, bool capped_or_dropped, bool with_keys, bool with_values>
__global__ void __launch_bounds__(32 * BackwardKeys<HS>::warps, BackwardKeys<HS>::blocks)
    attention_backward_keys(bf16* dkv, const bf16* dout, const RowInfo* info, const bf16* qkv, const bf16* kv,
                            const float* slopes, const int* doc_start, AttentionShape a, CapAndDropout cap, WorkOrder order) {
    using F = BackwardKeys<HS>;
    constexpr int M = F::M, N = F::N, threads = 32 * F::warps;
    DYNAMIC_SHARED(bf16, shared);
    const int warp = threadIdx.x / 32;
    bf16 *keys = shared, *values = keys + F::rows * HS;
    const auto queries = [&](int stage) { return shared + (2 * F::rows + stage * 2 * N) * HS; };
    const auto douts = [&](int stage) { return shared + (2 * F::rows + stage * 2 * N + N) * HS; };
    RowInfo* const infos = reinterpret_cast<RowInfo*>(shared + (2 * F::rows + 4 * N) * HS);
    const WorkOrder::Item item = order.item(blockIdx.x);
    const int b = item.head / a.NKV, g = item.head % a.NKV;
    const int j0 = item.tile * F::rows, j_first = j0 + warp * 16 * M, j_last = j_first + 16 * M - 1;
    // The first tile of queries starts at the first key, or with the first query.
    const int t_begin = max(j0, a.first), t_end = rows_that_see(doc_start, a, b, t_begin, j0 + F::rows);

    // Rows past the end are zero: their dout and correction are zero, so they add nothing, whatever their weights.
    const auto copy_stage = [&](int stage, int h, int t0) {
        copy_tile<HS, N, threads>(queries(stage), qkv + a.query(b, a.first, h), a.row(), t0 - a.first, a.queries());
        copy_tile<HS, N, threads>(douts(stage), dout + a.output(b, a.first, h), a.output_row(), t0 - a.first, a.queries());
        const int i = threadIdx.x;
        if (i < N) copy_async_16(infos + stage * N + i, info + a.statistic(b, t0 + i, h), t0 + i < a.T);
        copy_async_commit();
    };
    copy_tile<HS, F::rows, threads>(keys, kv + a.key(b, 0, g), a.key_row(), j0, a.T);
    copy_tile<HS, F::rows, threads>(values, kv + a.value(b, 0, g), a.key_row(), j0, a.T);
    int h = g * a.group(), t0 = t_begin, stage = 0;
    const int h_end = h + a.group();
    copy_stage(stage, h, t0);

    const float scale = capped_or_dropped && cap.capped ? 1.0f : a.scale * log2_e, factor = slopes ? 1.0f : scale;
    float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
    for (; h < h_end; stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        const int this_t0 = t0;
        const float slope = slopes ? slopes[h] * log2_e : 0.0f;
        const int this_h = h;
        t0 += N;
        // the next head of the group
        if (t0 >= t_end) {
            t0 = t_begin;
            h++;
        }
        if (h < h_end) copy_stage(stage ^ 1, h, t0);
        const RowInfo* rows = infos + stage * N;
        if (j_first > this_t0 + N - 1 || j_last < rows[0].first_key) continue;

        float s[M][N / 8][4], dp[M][N / 8][4] = {};  // S^T, dP^T: a row for each key
        product_transposed<HS, M, N>(s, keys + warp * 16 * M * HS, queries(stage));
        if constexpr (with_keys) product_transposed<HS, M, N>(dp, values + warp * 16 * M * HS, douts(stage));
        static_assert(M == 1, "the kept weights belong to 16 keys");
        const Kept<N, true, capped_or_dropped> kept(a, b, this_h, this_t0, j_first);
        if (capped_or_dropped)
            cap_and_drop<N>(s[0], dp[0], cap, kept, [&](int n, int i) { return rows[lane_column(n, i)].correction; });
        if (slopes) add_bias(s, scale, -slope, this_t0 - j_first);
        if (j_last > this_t0 || j_first < rows[min(N, a.T - this_t0) - 1].first_key)
            mask(s, [&](int row, int column) {
                const int t = this_t0 + column, j = j_first + row;
                return j > t || j < rows[column].first_key;
            });
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const RowInfo& row = rows[lane_column(n, i)];
                    s[m][n][i] = exp2_approx(s[m][n][i] * factor - row.lse_log2);
                    dp[m][n][i] = s[m][n][i] * (capped_or_dropped ? dp[m][n][i] : dp[m][n][i] - row.correction);
                }
        if (capped_or_dropped) drop<N>(s[0], kept);
        if constexpr (with_values) add_product<HS, M, N>(dv, s, douts(stage));
        if constexpr (with_keys) add_product<HS, M, N>(dk, dp, queries(stage));
    }

    float scales[M][2], keeps[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
        scales[m][0] = scales[m][1] = a.scale, keeps[m][0] = keeps[m][1] = capped_or_dropped ? cap.keep : 1.0f;
    if constexpr (with_keys)
        store_rows<HS, M>(dkv + a.key(b, 0, g), a.key_row(), j_first, a.T, dk, scales, keys + warp * 16 * M * HS);
    if constexpr (with_values)
        store_rows<HS, M>(dkv + a.value(b, 0, g), a.key_row(), j_first, a.T, dv, keeps, values + warp * 16 * M * HS);
}

// ---- launches --------------------------------------------------------------------------------------------------------------
template <int HS, bool capped_or_dropped>
void launch_forward(Ctx& ctx, bf16* out, float* lse, const bf16* qkv, const bf16* kv, const AttentionMask& mask,
                    const AttentionShape& a) {
    using F = Forward<HS>;
    const WorkOrder order = queries_order<bf16>(a, F::rows, section_bytes);
    LAUNCH((attention_forward<HS, capped_or_dropped>), order.items(), 32 * F::warps, F::bytes, ctx, out, lse, qkv, kv,
           mask.slopes, mask.doc_start, a, CapAndDropout(a), order);
}

template <int HS, bool capped_or_dropped>
void launch_backward(Ctx& ctx, bf16* dqkv, bf16* dkv, const bf16* dout, const RowInfo* info, const AttentionActs& acts,
                     const AttentionMask& mask, const AttentionShape& a) {
    using Q = BackwardQueries<HS>;
    using K = BackwardKeys<HS>;
    const WorkOrder of_keys = keys_order<bf16>(a, K::rows, section_bytes);
    const WorkOrder of_queries = queries_order<bf16>(a, Q::rows, section_bytes);
    const auto launch = [&](auto kernel) {
        LAUNCH(kernel, of_keys.items(), 32 * K::warps, K::bytes, ctx, dkv, dout, info, acts.qkv, acts.keys(), mask.slopes,
               mask.doc_start, a, CapAndDropout(a), of_keys);
    };
    if constexpr (K::apart) {
        launch(attention_backward_keys<HS, capped_or_dropped, true, false>);
        launch(attention_backward_keys<HS, capped_or_dropped, false, true>);
    } else {
        launch(attention_backward_keys<HS, capped_or_dropped, true, true>);
    }
    LAUNCH((attention_backward_queries<HS, capped_or_dropped>), of_queries.items(), 32 * Q::warps, Q::bytes, ctx, dqkv, dout,
           info, acts.qkv, acts.keys(), mask.slopes, a, CapAndDropout(a), of_queries);
}

template <bool capped_or_dropped>
void forward(Ctx& ctx, bf16* out, float* lse, const bf16* qkv, const bf16* kv, const AttentionMask& mask,
             const AttentionShape& a) {
    MmaHeads::call(a.HS, [&](auto HS) { launch_forward<HS.value, capped_or_dropped>(ctx, out, lse, qkv, kv, mask, a); });
}

template <bool capped_or_dropped>
void backward(Ctx& ctx, bf16* dqkv, bf16* dkv, const bf16* dout, const RowInfo* info, const AttentionActs& acts,
              const AttentionMask& mask, const AttentionShape& a) {
    MmaHeads::call(a.HS,
                   [&](auto HS) { launch_backward<HS.value, capped_or_dropped>(ctx, dqkv, dkv, dout, info, acts, mask, a); });
}

}  // namespace mma

inline void attention_forward_mma(Ctx& ctx, bf16* out, float* lse, const bf16* qkv, const bf16* kv, const AttentionMask& mask,
                                  const AttentionShape& a) {
    (a.capped_or_dropped() ? mma::forward<true> : mma::forward<false>)(ctx, out, lse, qkv, kv, mask, a);
}

inline void attention_backward_mma(Ctx& ctx, bf16* dqkv, bf16* dkv, const bf16* dout, const AttentionActs& acts,
                                   const AttentionMask& mask, const AttentionShape& a) {
    const RowInfo* info = compute_row_info(ctx, dout, acts, mask.doc_start, a);
    (a.capped_or_dropped() ? mma::backward<true> : mma::backward<false>)(ctx, dqkv, dkv, dout, info, acts, mask, a);
}

}  // namespace gpu
#endif  // not PRECISION_FP32
