// LayerNorm and RMSNorm with the residual sum fused in front; formulas and the derivation of gradients are in cpu/norm.h.
//   forward   xhat = (x - mean) rstd,  y = w xhat + b          RMSNorm: mean = 0, no b
//   backward  with g = w dy:  dx = rstd (g - mean(g) - xhat mean(g xhat)),  dw += sum dy xhat,  db += sum dy
//             and optionally sums of the columns of dinp as stored: a bias's gradient without a separate pass
//
// A row is processed by as many warps as hold it in registers: it is read once, with all loads in flight together, and the
// variance is the mean of (x - mean)^2 as on the CPU, not a difference of squares. Rows of a single warp need no barrier. Rows
// that are not whole packs, or longer than 16384 elements, use plain kernels that loop over memory.
//
// Backward sums dw and db over rows. The grid is as large as runs at once; each group of warps processes rows a stride apart
// and keeps its part of both sums in registers; groups write them to scratch memory, and a last kernel adds them in order. No
// atomics: the same bits in every run on one kind of device (the number of groups depends on its multiprocessors).
//
// Bound by memory bandwidth. Bytes per element, for bf16: forward 4 (8 with the residual sum), backward 6 (8 if it adds to
// dinp); the partial sums of dw and db are a few MB per call, which stay in the L2 cache. Sums are fp32.
#pragma once
#include "../ops.h"
#include "device.cuh"
#include "fp8.cuh"
#include "reduce.cuh"

namespace gpu {
namespace detail {

// Elements of a row per thread, and the maximum row length, which sets the threads per block and so the registers per thread.
constexpr int forward_elements = 16, backward_elements = 8, long_elements = 32, longest_row = 16384;
// Backward with sums of dinp's columns has 8 more registers per thread and so fewer threads.
constexpr int threads_with_columns = 768;

// The number of threads, in whole warps, that hold a row of C elements with `elements` each.
inline int threads_of_row(int C, int elements) { return ceil_div(ceil_div(C, elements), 32) * 32; }

// ---- forward ---------------------------------------------------------------------------------------------------------------
// Block (threads of a row, rows): several rows only if each has one warp.
template <bool centred, bool coded>
__global__ void __launch_bounds__(longest_row / forward_elements)
    norm_forward_kernel(floatX* out, Codes codes, real* mean, real* rstd, floatX* sum, const floatX* inp, const floatX* add,
                        const floatX* __restrict__ weight, const floatX* __restrict__ bias, int N, int C, real eps,
                        real offset) {
    constexpr int size = Pack<floatX>::size, packs = forward_elements / size;
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y, row = n * C;
    if (n >= (size_t)N) return;  // whole warps, in blocks without barriers
    const auto first = [](int k) { return (int)(k * blockDim.x + threadIdx.x) * size; };
    const auto row_sum = [](float x) { return blockDim.x == 32 ? warp_sum(x) : block_sum(x); };

    Pack<floatX> x[packs];
#pragma unroll
    for (int k = 0; k < packs; k++) x[k] = load_part<true>(inp + row, first(k), C);
    if (add) {
        Pack<floatX> a[packs];
#pragma unroll
        for (int k = 0; k < packs; k++) a[k] = load_part<true>(add + row, first(k), C);
#pragma unroll
        for (int k = 0; k < packs; k++) {
#pragma unroll
            for (int j = 0; j < size; j++) x[k][j] = (floatX)((float)x[k][j] + (float)a[k][j]);
            store_part<true>(sum + row, first(k), C, x[k]);
        }
    }

    float m = 0;
    if constexpr (centred) {
        float total = 0;
#pragma unroll
        for (int k = 0; k < packs; k++)
#pragma unroll
            for (int j = 0; j < size; j++) total += (float)x[k][j];
        m = row_sum(total) / C;
    }
    float squares = 0;
#pragma unroll
    for (int k = 0; k < packs; k++) {
        if (first(k) >= C) continue;  // zeros beyond the row
#pragma unroll
        for (int j = 0; j < size; j++) squares += ((float)x[k][j] - m) * ((float)x[k][j] - m);
    }
    const float r = 1 / sqrtf(row_sum(squares) / C + eps);

    const float scale = coded ? *codes.scale : 0;
    float largest = 0;
#pragma unroll
    for (int k = 0; k < packs; k++) {
        const Pack<floatX> w = load_part<true>(weight, first(k), C);
        Pack<floatX> b{}, y;
        if constexpr (centred) b = load_part<true>(bias, first(k), C);
#pragma unroll
        for (int j = 0; j < size; j++) {
            const float scaled = ((float)x[k][j] - m) * r * (offset + (float)w[j]);
            y[j] = (floatX)(centred ? scaled + (float)b[j] : scaled);
        }
        if (!coded || out) store_part<true>(out + row, first(k), C, y);
        if constexpr (coded)
            if (first(k) < C) encode_pack<Fp8::e4m3>(codes.codes + row + first(k), y, scale, largest);
    }
    if constexpr (coded) largest = blockDim.x == 32 ? warp_max(largest) : block_max(largest);
    if (threadIdx.x == 0) {
        if (coded) raise(codes.amax, largest);
        if (centred) mean[n] = m;
        rstd[n] = r;
    }
}

// For any C: a block per row.
template <bool centred, bool coded>
__global__ void __launch_bounds__(256)
    norm_forward_plain_kernel(floatX* out, Codes codes, real* mean, real* rstd, floatX* sum, const floatX* inp,
                              const floatX* add, const floatX* weight, const floatX* bias, int C, real eps, real offset) {
    const size_t n = blockIdx.x, row = n * C;
    const floatX* x = add ? sum + row : inp + row;
    if (add)
        for (int c = threadIdx.x; c < C; c += 256) sum[row + c] = (floatX)((float)inp[row + c] + (float)add[row + c]);
    float total = 0, squares = 0;  // a thread reads its own writes
    for (int c = threadIdx.x; c < C; c += 256) total += (float)x[c];
    const float m = centred ? block_sum(total) / C : 0.0f;
    for (int c = threadIdx.x; c < C; c += 256) squares += ((float)x[c] - m) * ((float)x[c] - m);
    const float r = 1 / sqrtf(block_sum(squares) / C + eps);
    float largest = 0;
    for (int c = threadIdx.x; c < C; c += 256) {
        const float scaled = ((float)x[c] - m) * r * (offset + (float)weight[c]);
        const floatX y = (floatX)(centred ? scaled + (float)bias[c] : scaled);
        if (!coded || out) out[row + c] = y;
        if (coded) codes.codes[row + c] = fp8_encode<Fp8::e4m3>((float)y * *codes.scale);
        largest = larger_finite(largest, (float)y);
    }
    if (coded) raise_amax(codes.amax, largest);
    if (threadIdx.x == 0) {
        if (centred) mean[n] = m;
        rstd[n] = r;
    }
}

template <bool centred, bool coded>
void norm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                  const floatX* add, const NormParams& params, int N) {
    if (N == 0) return;
    const auto& [mean, rstd] = statistics;
    const auto& [weight, bias, C, eps, offset, means] = params;
    const bool packed = C % Pack<floatX>::size == 0 && aligned_16(out.x, out.codes.codes, sum, inp, add, weight, bias);
    const int threads = threads_of_row(C, forward_elements), rows = threads == 32 ? 8 : 1;
    if (packed && C <= longest_row)
        LAUNCH((norm_forward_kernel<centred, coded>), ceil_div(N, rows), dim3(threads, rows), 0, ctx, out.x, out.codes, mean,
               rstd, sum, inp, add, weight, bias, N, C, eps, offset);
    else
        LAUNCH((norm_forward_plain_kernel<centred, coded>), N, 256, 0, ctx, out.x, out.codes, mean, rstd, sum, inp, add, weight,
               bias, C, eps, offset);
}
template <bool centred>
void norm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                  const floatX* add, const NormParams& params, int N) {
    const Codes& q = out.codes;
    CHECK(!q.codes || (q.format == Fp8::e4m3 && !q.transposed), "codes of a norm are e4m3 and not transposed");
    const auto forward = q.codes ? norm_forward<centred, true> : norm_forward<centred, false>;
    forward(ctx, out, statistics, sum, inp, add, params, N);
}

// ---- backward --------------------------------------------------------------------------------------------------------------
// Consecutive rows.
struct WholeRows {
    int N;
    HD int count() const { return N; }
    HD size_t at(size_t row, int C) const { return row * C; }
};

// dinp and dout have the layout `rows`. Block (threads of a row, groups); partial (groups of the grid, 1 to 3, C): sums of
// dy xhat, of dy if centred, and of dinp as it is stored if `columns`. A thread has 8 elements of a row, or 32 of a long one,
// which do not fit in registers and are read again, from the cache. One function although it is long: all parts work on the
// same registers.
template <bool centred, int elements, class Rows, bool columns>
__global__ void __launch_bounds__(columns                         ? threads_with_columns
                                  : elements == backward_elements ? 1024
                                                                  : longest_row / long_elements)
    norm_backward_kernel(floatX* dinp, real* __restrict__ partial, const floatX* dout, const floatX* inp, const floatX* weight,
                         const real* __restrict__ mean, const real* __restrict__ rstd, Rows rows, int C, real offset,
                         bool add) {
    constexpr int size = Pack<floatX>::size, packs = elements / size, sums = 1 + centred + columns;
    constexpr bool keep = elements == backward_elements;
    constexpr bool keep_all = keep && !centred;  // also the weight and dinp; LayerNorm lacks the registers
    __shared__ float2 of_warp[2][32];            // alternating, so that a row needs only one barrier
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32, first_warp = threadIdx.y * warps;
    const auto first = [](int k) { return (int)(k * blockDim.x + threadIdx.x) * size; };

    float dw[packs][size] = {}, db[packs][size] = {}, dx_sum[packs][size] = {};
    Pack<floatX> kept_weight[packs] = {};
    if constexpr (keep_all)
#pragma unroll
        for (int k = 0; k < packs; k++) kept_weight[k] = load_part<true>(weight, first(k), C);
    const auto weights = [&](int k) { return keep_all ? kept_weight[k] : load_part<true>(weight, first(k), C); };
    const size_t stride = (size_t)gridDim.x * blockDim.y;
    size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    const size_t N = (size_t)rows.count();
    for (int parity = 0; n - threadIdx.y < N; n += stride, parity ^= 1) {  // equally often for all threads of the block
        const size_t row = n * C, strided = rows.at((int)n, C);
        const bool there = n < N;
        const int length = there ? C : 0;
        const float m = centred && there ? mean[n] : 0.0f, r = there ? rstd[n] : 0.0f;
        Pack<floatX> x[packs], dy[packs], kept_sum[packs] = {};
        const auto load_packs = [&](int k) {
            x[k] = load_part<true>(inp + row, first(k), length);
            dy[k] = load_part<true>(dout + strided, first(k), length);
        };
        if constexpr (keep)
#pragma unroll
            for (int k = 0; k < packs; k++) load_packs(k);
        if constexpr (keep_all)  // in flight before the row's sum is needed
#pragma unroll
            for (int k = 0; k < packs; k++) kept_sum[k] = load_part<true>(dinp + strided, first(k), add ? length : 0);
        float g_sum = 0, gx_sum = 0;
#pragma unroll
        for (int k = 0; k < packs; k++) {
            if constexpr (!keep) {
                if (k * size % 16 == 0) __syncwarp();  // otherwise the compiler loads more packs at once than fit in registers
                load_packs(k);
            }
            const Pack<floatX> w = weights(k);
#pragma unroll
            for (int j = 0; j < size; j++) {
                const float d = (float)dy[k][j], g = (offset + (float)w[j]) * d, xhat = ((float)x[k][j] - m) * r;
                if (centred) g_sum += g, db[k][j] += d;
                gx_sum += g * xhat;
                dw[k][j] += d * xhat;
            }
        }
        g_sum = centred ? warp_sum(g_sum) : 0;
        gx_sum = warp_sum(gx_sum);
        if (warps > 1) {
            if (lane == 0) of_warp[parity][first_warp + threadIdx.x / 32] = make_float2(g_sum, gx_sum);
            __syncthreads();
            const float2 s = lane < warps ? of_warp[parity][first_warp + lane] : make_float2(0, 0);
            g_sum = centred ? warp_sum(s.x) : 0;
            gx_sum = warp_sum(s.y);
        }
        const float mean_g = g_sum / C, mean_gx = gx_sum / C;
#pragma unroll
        for (int k = 0; k < packs; k++) {
            const Pack<floatX> w = weights(k);
            if constexpr (!keep) load_packs(k);
            Pack<floatX> dx = kept_sum[k];
            if (!keep_all && add) dx = load_part<true>(dinp + strided, first(k), length);
#pragma unroll
            for (int j = 0; j < size; j++) {
                const float xhat = ((float)x[k][j] - m) * r, g = (offset + (float)w[j]) * (float)dy[k][j];
                const float d = r * (g - mean_g - xhat * mean_gx);
                dx[j] = (floatX)(add ? (float)dx[j] + d : d);
                if (columns) dx_sum[k][j] += (float)dx[j];  // 0 in missing rows
            }
            store_part<true>(dinp + strided, first(k), length, dx);
        }
    }

    real* part = partial + ((size_t)blockIdx.x * blockDim.y + threadIdx.y) * sums * C;
    constexpr int width = Pack<real>::size;
#pragma unroll
    for (int k = 0; k < packs; k++)
#pragma unroll
        for (int j = 0; j < size; j += width) {
            Pack<real> w, b, c;
#pragma unroll
            for (int i = 0; i < width; i++) w[i] = dw[k][j + i], b[i] = db[k][j + i], c[i] = dx_sum[k][j + i];
            store_part<true>(part, first(k) + j, C, w);
            if (centred) store_part<true>(part + C, first(k) + j, C, b);
            if (columns) store_part<true>(part + (sums - 1) * C, first(k) + j, C, c);
        }
}

// For any C: a block per group, which keeps its sums in scratch memory.
template <bool centred, bool columns, class Rows>
__global__ void __launch_bounds__(256)
    norm_backward_plain_kernel(floatX* dinp, real* partial, const floatX* dout, const floatX* inp, const floatX* weight,
                               const real* mean, const real* rstd, Rows rows, int C, real offset, bool add, RowMeans products) {
    constexpr int sums = 1 + centred + columns;
    real *dw = partial + (size_t)blockIdx.x * sums * C, *db = dw + C, *dx_sum = dw + (sums - 1) * C;
    for (int c = threadIdx.x; c < sums * C; c += 256) dw[c] = 0;
    __syncthreads();
    for (size_t n = blockIdx.x; n < (size_t)rows.count(); n += gridDim.x) {
        const floatX *x = inp + n * C, *dy = dout + rows.at((int)n, C);
        floatX* dx = dinp + rows.at((int)n, C);
        const float m = centred ? mean[n] : 0.0f, r = rstd[n];
        float g_sum = 0, gx_sum = 0;
        for (int c = threadIdx.x; c < C; c += 256) {
            const float d = (float)dy[c], g = (offset + (float)weight[c]) * d, xhat = ((float)x[c] - m) * r;
            g_sum += g;
            gx_sum += g * xhat;
            dw[c] += d * xhat;
            if (centred) db[c] += d;
        }
        const float mean_g = centred ? block_sum(g_sum) / C : 0.0f;
        const float mean_gx = products.sums ? products.of(n) : block_sum(gx_sum) / C;
        for (int c = threadIdx.x; c < C; c += 256) {
            const float xhat = ((float)x[c] - m) * r;
            const float d = r * ((offset + (float)weight[c]) * (float)dy[c] - mean_g - xhat * mean_gx);
            dx[c] = (floatX)(add ? (float)dx[c] + d : d);
            if (columns) dx_sum[c] += (float)dx[c];
        }
    }
}

template <bool centred, bool columns, class Rows>
void norm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                   const NormParams& params, const NormStatistics& statistics, const Rows& rows, Acc acc) {
    const int N = rows.count(), C = params.C;
    if (N == 0) return;
    const floatX* weight = params.weight;
    const bool packed =
        rows.at(1, C) % Pack<floatX>::size == 0 && C % Pack<floatX>::size == 0 && aligned_16(dinp, dout, inp, weight);
    const bool is_long = C > 1024 * backward_elements, plain = !packed || C > longest_row || params.means.sums;
    const int threads = plain ? 256 : threads_of_row(C, is_long ? long_elements : backward_elements);
    constexpr int most_threads = columns ? threads_with_columns : 1024;  // of a multiprocessor
    CHECK(!columns || plain || threads <= most_threads, "sums of the columns of rows of %d", C);
    const int groups = plain ? 1 : std::max(1, 256 / threads);
    // As many blocks as run at once, but at least four rows per group, or its sums would cost more than its rows.
    const int per_multiprocessor = is_long ? 1 : most_threads / (threads * groups);
    const int blocks = std::min(ctx.multiprocessors * per_multiprocessor, ceil_div(N, 4 * groups));
    real* partial = (real*)ctx.scratch(sizeof(real) * (size_t)blocks * groups * (1 + centred + columns) * C);
    const auto& [mean, rstd] = statistics;
    if (plain)
        LAUNCH((norm_backward_plain_kernel<centred, columns, Rows>), blocks, threads, 0, ctx, dinp, partial, dout, inp, weight,
               mean, rstd, rows, C, params.offset, acc == Acc::Add, params.means);
    else {
        auto kernel = norm_backward_kernel<centred, backward_elements, Rows, columns>;
        if constexpr (!columns)
            if (is_long) kernel = norm_backward_kernel<centred, long_elements, Rows, false>;
        LAUNCH(kernel, blocks, dim3(threads, groups), 0, ctx, dinp, partial, dout, inp, weight, mean, rstd, rows, C,
               params.offset, acc == Acc::Add);
    }
    real* const bias = centred ? grads.bias : grads.dinp_columns;
    add_rows(ctx, grads.weight, bias, centred ? grads.dinp_columns : nullptr, partial, blocks * groups, C);
}
template <bool centred>
void norm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                   const NormParams& params, const NormStatistics& statistics, int N, Acc acc) {
    const auto backward =
        grads.dinp_columns ? norm_backward<centred, true, WholeRows> : norm_backward<centred, false, WholeRows>;
    backward(ctx, dinp, grads, dout, inp, params, statistics, WholeRows{N}, acc);
}

// ---- query and key heads ---------------------------------------------------------------------------------------------------
// As many threads as hold a row in packs process it, or the whole block in a loop if the row is longer than a warp's packs.
template <bool packed>
__global__ void __launch_bounds__(256)
    head_norm_kernel(floatX* qkv, floatX* kept, real* rstd, const floatX* __restrict__ weight, HeadRows rows, int C, real eps,
                     real offset, int threads) {
    constexpr int size = Pack<floatX>::size;
    const int thread = threadIdx.x % threads, row = (int)(((size_t)blockIdx.x * blockDim.x + threadIdx.x) / threads);
    const int length = row < rows.count() ? C : 0;
    floatX *x = qkv + (length ? rows.at(row, C) : 0), *keep = kept + (size_t)row * C;
    float squares = 0;
    for (int c = thread * size; c < length; c += threads * size) {
        const Pack<floatX> p = load_part<packed>(x, c, C);
        store_part<packed>(keep, c, C, p);
#pragma unroll
        for (int k = 0; k < size; k++) squares += (float)p[k] * (float)p[k];
    }
    if (threads > 32) squares = block_sum(squares);
    else
        for (int lanes = threads / 2; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(all_lanes, squares, lanes);
    const float r = 1 / sqrtf(squares / C + eps);
    for (int c = thread * size; c < length; c += threads * size) {
        const Pack<floatX> w = load_part<packed>(weight, c, C);
        Pack<floatX> p = load_part<packed>(x, c, C);
#pragma unroll
        for (int k = 0; k < size; k++) p[k] = (floatX)((float)p[k] * r * (offset + (float)w[k]));
        store_part<packed>(x, c, C, p);
    }
    if (thread == 0 && length) rstd[row] = r;
}

// A block per row: this rank's part of the sum of x^2 or, backward, of dout (offset + weight) xhat.
template <bool backward>
__global__ void __launch_bounds__(256)
    head_norm_sums_kernel(real* sums, const floatX* x, const floatX* kept, const floatX* weight, const real* rstd,
                          HeadRows rows, int C, real offset) {
    const int row = blockIdx.x;
    x += rows.at(row, C);
    float sum = 0;
    for (int c = threadIdx.x; c < C; c += 256) {
        const float v = (float)x[c];
        if constexpr (backward) sum += (offset + (float)weight[c]) * v * ((float)kept[(size_t)row * C + c] * rstd[row]);
        else sum += v * v;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[row] = sum;
}

// A block per row; the mean of squares is an input.
__global__ void __launch_bounds__(256) head_norm_part_kernel(floatX* qkv, floatX* kept, real* rstd, const floatX* weight,
                                                             HeadRows rows, int C, real eps, real offset, RowMeans squares) {
    const int row = blockIdx.x;
    floatX *x = qkv + rows.at(row, C), *keep = kept + (size_t)row * C;
    const float r = 1 / sqrtf(squares.of(row) + eps);
    for (int c = threadIdx.x; c < C; c += 256) {
        keep[c] = x[c];
        x[c] = (floatX)((float)x[c] * r * (offset + (float)weight[c]));
    }
    if (threadIdx.x == 0) rstd[row] = r;
}

}  // namespace detail

inline void layernorm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                              const floatX* add, const NormParams& params, int N) {
    detail::norm_forward<true>(ctx, out, statistics, sum, inp, add, params, N);
}

inline bool norm_sums_columns(int C) { return C <= detail::threads_with_columns * detail::backward_elements; }

inline void layernorm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                               const NormParams& params, const NormStatistics& statistics, int N, Acc acc) {
    detail::norm_backward<true>(ctx, dinp, grads, dout, inp, params, statistics, N, acc);
}

inline void rmsnorm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                            const floatX* add, const NormParams& params, int N) {
    detail::norm_forward<false>(ctx, out, statistics, sum, inp, add, params, N);
}

inline void rmsnorm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                             const NormParams& params, const NormStatistics& statistics, int N, Acc acc) {
    detail::norm_backward<false>(ctx, dinp, grads, dout, inp, params, statistics, N, acc);
}

inline void head_norm_forward(Ctx& ctx, floatX* qkv, floatX* kept, real* rstd, const NormParams& params, const HeadRows& rows) {
    if (rows.count() == 0) return;
    const auto& [weight, bias, C, eps, offset, means] = params;
    if (means.sums) {
        LAUNCH(detail::head_norm_part_kernel, rows.count(), 256, 0, ctx, qkv, kept, rstd, weight, rows, C, eps, offset, means);
        return;
    }
    int threads = 1;
    while (threads < 64 && threads * Pack<floatX>::size < C) threads *= 2;
    if (threads > 32) threads = 256;
    const bool packed = C % Pack<floatX>::size == 0 && rows.stride % Pack<floatX>::size == 0 && aligned_16(qkv, kept, weight);
    const unsigned blocks = (unsigned)ceil_div((size_t)rows.count() * threads, 256);
    const auto kernel = packed ? detail::head_norm_kernel<true> : detail::head_norm_kernel<false>;
    LAUNCH(kernel, blocks, 256, 0, ctx, qkv, kept, rstd, weight, rows, C, eps, offset, threads);
}

inline void head_norm_backward(Ctx& ctx, floatX* dqkv, const NormGrads& grads, const floatX* kept, const NormParams& params,
                               const real* rstd, const HeadRows& rows) {
    const NormStatistics statistics = {nullptr, const_cast<real*>(rstd)};
    detail::norm_backward<false, false>(ctx, dqkv, grads, dqkv, kept, params, statistics, rows, Acc::Set);
}

inline void head_norm_squares(Ctx& ctx, real* sums, const floatX* qkv, int C, const HeadRows& rows) {
    if (rows.count() == 0) return;
    LAUNCH(detail::head_norm_sums_kernel<false>, rows.count(), 256, 0, ctx, sums, qkv, nullptr, nullptr, nullptr, rows, C, 0);
}

inline void head_norm_products(Ctx& ctx, real* sums, const floatX* dqkv, const floatX* kept, const NormParams& params,
                               const real* rstd, const HeadRows& rows) {
    if (rows.count() == 0) return;
    LAUNCH(detail::head_norm_sums_kernel<true>, rows.count(), 256, 0, ctx, sums, dqkv, kept, params.weight, rstd, rows,
           params.C, params.offset);
}

}  // namespace gpu
