// Sums in a fixed order: the same bits in every run, in whatever order blocks run.
#pragma once
#include <numeric>
#include <vector>

#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

// Block (32, 32) for 32 columns: a thread adds every 32nd row, then one thread per column adds its 32 parts.
__global__ void __launch_bounds__(1024)
    add_rows_kernel(real* total, real* second, real* third, const real* __restrict__ rows, int n, int C, size_t stride) {
    __shared__ float parts[32][33];
    const int c = blockIdx.x * 32 + threadIdx.x;
    rows += (size_t)blockIdx.y * C;
    float sum = 0;
    if (c < C) {
#pragma unroll 8
        for (int i = threadIdx.y; i < n; i += 32) sum += rows[i * stride + c];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) sum += parts[i][threadIdx.x];
    (blockIdx.y == 0 ? total : blockIdx.y == 1 ? second : third)[c] += sum;
}

// The last step of gradients summed over rows in parts: total (C) += the sum of `rows` (n, C). With `second`, and with `third`,
// rows are (n, 2, C) or (n, 3, C), and these get the sums of the second and third C of each.
inline void add_rows(Ctx& ctx, real* total, real* second, real* third, const real* rows, int n, int C) {
    const int sums = third ? 3 : second ? 2 : 1;
    LAUNCH(add_rows_kernel, dim3(ceil_div(C, 32), sums), dim3(32, 32), 0, ctx, total, second, third, rows, n, C,
           (size_t)sums * C);
}

// For counts and totals, not for inner loops. Every lane gets the result.
template <class T>
__device__ __forceinline__ T warp_total(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(all_lanes, x, offset);
    return x;
}
// Reduces over a block of whole warps; thread 0 gets the result. Contains two barriers.
template <class T>
__device__ __forceinline__ T block_total(T x) {
    __shared__ T of_warp[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    x = warp_total(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    const T result = warp_total(lane < n_warps ? of_warp[lane] : T(0));
    __syncthreads();
    return result;
}

constexpr int squares_threads = 512, squares_blocks = 512;

// partial[block]: sums of squares of every gridDim.x-th tile of x. A thread adds `packs` packs in fp32 (few enough for an error
// of a few ulp), and these sums in double.
template <class E>
__global__ void __launch_bounds__(squares_threads)
    sum_of_squares_kernel(double* partial, const E* __restrict__ x, size_t n, size_t n_packs) {
    constexpr int size = Pack<E>::size, packs = 4;
    double total = 0;
    for (size_t tile = blockIdx.x; tile * squares_threads * packs < n_packs; tile += gridDim.x) {
        const size_t first = tile * squares_threads * packs + threadIdx.x;
        Pack<E> p[packs];
#pragma unroll
        for (int k = 0; k < packs; k++) {
            const size_t i = first + (size_t)k * squares_threads;
            p[k] = i < n_packs ? load_streaming(x + i * size) : Pack<E>{};
        }
        float sum[size] = {};
#pragma unroll
        for (int k = 0; k < packs; k++)
#pragma unroll
            for (int j = 0; j < size; j++) sum[j] += (real)p[k][j] * (real)p[k][j];
#pragma unroll
        for (int j = 0; j < size; j += 4) total += (sum[j] + sum[j + 1]) + (sum[j + 2] + sum[j + 3]);
    }
    // Elements outside packs: the end, or all of an unaligned x.
    const size_t step = (size_t)gridDim.x * squares_threads;
    for (size_t i = n_packs * size + (size_t)blockIdx.x * squares_threads + threadIdx.x; i < n; i += step)
        total += (double)(real)x[i] * (real)x[i];
    total = block_total(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(squares_threads) add_partial_squares_kernel(double* total, const double* partial, int n) {
    double sum = 0;
    for (int i = threadIdx.x; i < n; i += squares_threads) sum += partial[i];
    sum = block_total(sum);
    if (threadIdx.x == 0) *total += sum;
}

// partial[block]: sums over every gridDim.x-th tile of x; a thread processes one word of a tile.
__global__ void __launch_bounds__(squares_threads)
    word_sum_kernel(unsigned long long* partial, const uint32_t* x, size_t n, size_t first) {
    unsigned long long sum = 0;
#pragma unroll 8
    for (size_t i = (size_t)blockIdx.x * squares_threads + threadIdx.x; i < n; i += (size_t)gridDim.x * squares_threads)
        sum += (unsigned long long)x[i] * (uint32_t)(2 * (first + i) + 1);
    sum = block_total(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Adds to *total. partial: squares_blocks numbers. At most this many blocks run, their number depends only on n, and they are
// added in order.
template <class E>
void add_squares(Ctx& ctx, double* total, double* partial, const E* x, size_t n) {
    const int blocks = (int)std::min<size_t>(squares_blocks, n / (squares_threads * 16) + 1);
    LAUNCH(sum_of_squares_kernel<E>, blocks, squares_threads, 0, ctx, partial, x, n, aligned_16(x) ? n / Pack<E>::size : 0);
    LAUNCH(add_partial_squares_kernel, 1, squares_threads, 0, ctx, total, partial, blocks);
}

}  // namespace detail

// For the global gradient norm. NaN and infinity propagate. Reads each element once: bound by memory bandwidth.
inline double sum_of_squares(Ctx& ctx, const Elements& x, size_t n) {
    double* partial = (double*)ctx.scratch(sizeof(double) * (detail::squares_blocks + 1));
    double *total = partial + detail::squares_blocks, result = 0;
    clear(ctx, total, sizeof *total);
    x.visit_second([&](const auto* elements) { detail::add_squares(ctx, total, partial, elements, n); });
    download(ctx, &result, total, sizeof result);  // waits
    return result;
}

inline void add_squares(Ctx& ctx, double* sum, const Elements& x, size_t n) {
    double* partial = (double*)ctx.scratch(sizeof(double) * detail::squares_blocks);
    x.visit_second([&](const auto* elements) { detail::add_squares(ctx, sum, partial, elements, n); });
}

// Reads each word once: bound by memory bandwidth.
inline uint64_t word_sum(Ctx& ctx, const void* x, size_t n, size_t first) {
    const size_t blocks = std::min<size_t>(detail::squares_blocks, n / (detail::squares_threads * 16) + 1);
    std::vector<unsigned long long> parts(blocks);
    auto* partial = (unsigned long long*)ctx.scratch(blocks * sizeof parts[0]);
    LAUNCH(detail::word_sum_kernel, (unsigned)blocks, detail::squares_threads, 0, ctx, partial, (const uint32_t*)x, n, first);
    download(ctx, parts.data(), partial, blocks * sizeof parts[0]);  // waits
    return std::accumulate(parts.begin(), parts.end(), (uint64_t)0);
}

}  // namespace gpu
