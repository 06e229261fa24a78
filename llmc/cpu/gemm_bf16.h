// The three products of linear layers on a matrix unit (matrix_unit.h), of bf16 matrices.
//   rows_times      out (N, C) = a (N, K) b (K, C)     forward: inp times weight^T; backward_input: dout times weight
//   columns_times   c (M, C) (+)= a^T b of a (N, M), b (N, C)     backward_weight: dout and inp
// The unit is fed from caches (Goto and van de Geijn, 2008): a block of at most 256 rows and 256 columns and the next 1024 of k
// lie in the second cache, and of it 32 columns and 512 of k, which all rows meet, in the first. What is read from further away
// takes part in 512 operations a number. Right operands are packed when they are wanted, by who multiplies with them: weights
// are read from where they lie, once, and there are no packed copies to keep.
// rows_times: threads share columns, and rows where there are few columns. Rows are finished in fp32 before `finish` rounds
// them and does what comes after the product. columns_times: threads pack b together, then share the rows of c.
// Every sum runs over k in order: the bits depend on the unit, not on threads or blocks. Limits: K a multiple of 32, C and M of
// 16. Any N: rows that fill no tile are copied beside zeros.
#pragma once
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../math.h"
#include "ctx.h"
#include "matrix_unit.h"
#include "packing.h"
#include "parallel.h"

namespace cpu {
namespace detail {
namespace unit_gemm {

constexpr int block = 256, slab = 1024;  // rows and columns, and of k, that stay in the second cache
constexpr int narrow = 32, depth = 512;  // columns, and of k, that stay in the first

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }
inline int divide_up(int n, int by) { return (n + by - 1) / by; }

// A result (rows, columns) in panels of columns, as many for each thread, and parts of its rows where there are few panels.
struct Shares {
    int columns, panels, rows, parts;
    Shares(int N, int C, int threads) {
        columns = round_up(divide_up(C, round_up(divide_up(C, block), threads)), 16);
        columns = std::max(columns, std::min(C, 64));
        panels = divide_up(C, columns);
        rows = round_up(divide_up(N, divide_up(threads, panels)), 16);
        parts = divide_up(N, rows);
    }
};

// c (rows, columns) = a b or c += a b, of a slab at most.
inline void multiply_block(const MatrixUnit& unit, float* c, int ldc, const bf16* a, int lda, const bf16* packed, int rows,
                           int columns, int K, bool add) {
    for (int n = 0; n < columns; n += narrow)
        for (int k = 0; k < K; k += depth)
            unit.product(c + n, ldc, a + k, lda, packed + right_index(k, n, K), K, rows, std::min((int)narrow, columns - n),
                         std::min((int)depth, K - k), add || k > 0);
}

// ---- products --------------------------------------------------------------------------------------------------------------
// pack(to, k, K, first column, columns) packs K rows of a panel of b; finish(n, first column, columns, sums) gets each finished
// part of a row.
template <class Pack, class Finish>
void rows_times(Ctx& ctx, const bf16* a, int N, int K, int C, Pack pack, Finish finish) {
    const MatrixUnit& unit = *ctx.unit;
    const Shares shares(N, C, ctx.threads);
    const int width = shares.columns, kept = K > slab ? shares.rows : std::min((int)block, shares.rows);  // rows of sums
    const size_t packed_size = (size_t)std::min(K, slab) * width, few_size = (size_t)16 * slab,
                 sums_size = (size_t)kept * width;
    const size_t per_thread = (packed_size + few_size) * sizeof(bf16) + sums_size * sizeof(float);
    char* memory = (char*)ctx.scratch(per_thread * (size_t)ctx.threads);
#pragma omp parallel num_threads(ctx.threads)
    {
        float* memory_of_sums = (float*)(memory + per_thread * (size_t)omp_get_thread_num());
        bf16 *packed = (bf16*)(memory_of_sums + sums_size), *few = packed + packed_size;
        unit.begin();
#pragma omp for schedule(dynamic)
        for (int task = 0; task < shares.panels * shares.parts; task++) {
            const int c0 = task / shares.parts * width, columns = std::min(width, C - c0);
            const int first = task % shares.parts * shares.rows, end = std::min(N, first + shares.rows);
            for (int k0 = 0; k0 < K; k0 += slab) {
                const int k_here = std::min((int)slab, K - k0);
                pack(packed, k0, k_here, c0, columns);
                for (int n0 = first; n0 < end; n0 += block) {
                    const int rows = std::min((int)block, end - n0), whole = rows / 16 * 16;
                    const bf16* here = a + (size_t)n0 * K + k0;
                    float* sums = memory_of_sums + (K > slab ? (size_t)(n0 - first) * width : 0);
                    if (whole > 0) multiply_block(unit, sums, width, here, K, packed, whole, columns, k_here, k0 > 0);
                    if (whole < rows) {
                        std::fill(few, few + few_size, bf16(0));
                        for (int n = whole; n < rows; n++)
                            std::copy_n(here + (size_t)n * K, k_here, few + (size_t)(n - whole) * slab);
                        multiply_block(unit, sums + (size_t)whole * width, width, few, slab, packed, 16, columns, k_here,
                                       k0 > 0);
                    }
                    if (k0 + k_here == K)
                        for (int n = 0; n < rows; n++) finish(n0 + n, c0, columns, sums + (size_t)n * width);
                }
            }
        }
        unit.end();
    }
}

inline void columns_times(Ctx& ctx, float* c, const bf16* a, const bf16* b, int N, int M, int C, Acc acc) {
    const MatrixUnit& unit = *ctx.unit;
    const Shares shares(C, M, ctx.threads);
    const int deepest = std::min((int)slab, round_up(N, 32));
    const size_t right_size = (size_t)deepest * C, left_size = (size_t)deepest * shares.columns;
    bf16* right = (bf16*)ctx.scratch((right_size + left_size * (size_t)ctx.threads) * sizeof(bf16));
#pragma omp parallel num_threads(ctx.threads)
    {
        bf16* left = right + right_size + left_size * (size_t)omp_get_thread_num();
        unit.begin();
        for (int k0 = 0; k0 < N; k0 += slab) {
            const int there = std::min((int)slab, N - k0), K = round_up(there, 32);
#pragma omp for schedule(dynamic)
            for (int c0 = 0; c0 < C; c0 += block)
                pack_rows(right + (size_t)c0 * K, b + (size_t)k0 * C + c0, (size_t)C, std::min((int)block, C - c0), K, there);
#pragma omp for schedule(dynamic)
            for (int m0 = 0; m0 < M; m0 += shares.columns) {
                const int rows = std::min(shares.columns, M - m0);
                lay_transposed(unit, left, a + (size_t)k0 * M + m0, (size_t)M, rows, K, there);
                multiply_block(unit, c + (size_t)m0 * C, C, left, K, right, rows, C, K, k0 > 0 || acc == Acc::Add);
            }
        }
        unit.end();
    }
}

// ---- linear layers: true if it was done here, false if that is others' work ------------------------------------------------
template <class E>
bool fits(const Ctx& ctx, int K, int C) {
    return std::is_same<E, bf16>::value && !ctx.plain && K % 32 == 0 && C % 16 == 0;
}

// out = inp weight^T (+ bias); with `pre`, that is pre, and out = gelu(pre).
template <class E>
bool forward(Ctx& ctx, E* out, E* pre, const E* inp, const E* weight, const E* bias, int N, int IC, int OC) {
    if (!fits<E>(ctx, IC, OC)) return false;
    if constexpr (std::is_same<E, bf16>::value) {
        const auto pack = [&](bf16* to, int k, int K, int first, int columns) {
            pack_transposed(*ctx.unit, to, weight + (size_t)first * IC + k, (size_t)IC, columns, K);
        };
        rows_times(ctx, inp, N, IC, OC, pack, [=](int n, int first, int columns, const float* sums) {
            const size_t at = (size_t)n * OC + first;
            E* y = (pre ? pre : out) + at;
            INDEPENDENT_ITERATIONS
            for (int c = 0; c < columns; c++) y[c] = (E)(sums[c] + (bias ? (float)bias[first + c] : 0.0f));
            if (!pre) return;
            E* activated = out + at;
            INDEPENDENT_ITERATIONS
            for (int c = 0; c < columns; c++) activated[c] = (E)gelu((real)y[c]);
        });
    }
    return true;
}

// dinp = dout weight, times gelu'(pre) where there is one.
template <class E>
bool backward_input(Ctx& ctx, E* dinp, const E* dout, const E* weight, const E* pre, int N, int IC, int OC) {
    if (!fits<E>(ctx, OC, IC)) return false;
    if constexpr (std::is_same<E, bf16>::value) {
        const auto pack = [&](bf16* to, int k, int K, int first, int columns) {
            pack_rows(to, weight + (size_t)k * IC + first, (size_t)IC, columns, K, K);
        };
        rows_times(ctx, dout, N, OC, IC, pack, [=](int n, int first, int columns, const float* sums) {
            const size_t at = (size_t)n * IC + first;
            E* dx = dinp + at;
            INDEPENDENT_ITERATIONS
            for (int c = 0; c < columns; c++) dx[c] = (E)sums[c];
            if (!pre) return;
            const E* x = pre + at;
            INDEPENDENT_ITERATIONS
            for (int c = 0; c < columns; c++) dx[c] = (E)((real)dx[c] * gelu_derivative((real)x[c]));
        });
    }
    return true;
}

// dweight (+)= dout^T inp.
template <class E>
bool backward_weight(Ctx& ctx, real* dweight, const E* dout, const E* inp, int N, int IC, int OC, Acc acc) {
    if (!fits<E>(ctx, 32, OC) || IC % 16 != 0) return false;
    if constexpr (std::is_same<E, bf16>::value) columns_times(ctx, dweight, dout, inp, N, OC, IC, acc);
    return true;
}

}  // namespace unit_gemm
}  // namespace detail
}  // namespace cpu
