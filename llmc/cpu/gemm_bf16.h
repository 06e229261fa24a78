// The three products of linear layers on a matrix unit (matrix_unit.h), of bf16 matrices.
//   rows_times      out (N, C) = a (N, K) b (K, C)     forward: inp times weight^T; backward_input: dout times weight
//   columns_times   c (M, C) (+)= a^T b of a (N, M), b (N, C)     backward_weight: dout and inp
// Threads share the columns of the first and the rows of the second, in panels of 64. Who multiplies with a panel packs it
// before, into memory that stays in its cache: weights are read from where they lie, once, and there are no packed copies to
// keep. Packing touches an element once for the 2 N operations (N rows) that it takes part in. 128 rows of a panel are complete
// in fp32 before `finish` rounds them and does what comes after the product. Every sum runs over k in order: the bits depend on
// the unit, not on threads or panels. Limits: K a multiple of 32, C and M of 16. Any N: rows that fill no tile are copied
// beside zeros.
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

constexpr int panel = 64, rows_at_once = 128;
constexpr int depth = 1024;  // of k at once, so that a panel's and the rows' part of it stay in the second cache

// c (rows, columns) = a (rows, K) packed (K, columns); a's rows are a multiple of 16.
inline void product(const MatrixUnit& unit, float* c, const bf16* a, const bf16* packed, int rows, int columns, int K) {
    for (int k = 0; k < K; k += depth)
        unit.product(c, panel, a + k, K, packed + (size_t)k * 16, K, rows, columns, std::min(depth, K - k), k > 0);
}

// ---- products --------------------------------------------------------------------------------------------------------------
// pack(to, first column, columns) packs a panel of b; finish(n, first column, columns, sums) gets each finished part of a row.
template <class Pack, class Finish>
void rows_times(Ctx& ctx, const bf16* a, int N, int K, int C, Pack pack, Finish finish) {
    const MatrixUnit& unit = *ctx.unit;
    const size_t packed_size = (size_t)K * panel, few_size = (size_t)K * 16, sums_size = (size_t)rows_at_once * panel;
    const size_t per_thread = (packed_size + few_size) * sizeof(bf16) + sums_size * sizeof(float);
    char* memory = (char*)ctx.scratch(per_thread * (size_t)ctx.threads);
#pragma omp parallel num_threads(ctx.threads)
    {
        float* sums = (float*)(memory + per_thread * (size_t)omp_get_thread_num());
        bf16 *packed = (bf16*)(sums + sums_size), *few = packed + packed_size;
        unit.begin();
#pragma omp for schedule(static)
        for (int c0 = 0; c0 < C; c0 += panel) {
            const int columns = std::min((int)panel, C - c0);
            pack(packed, c0, columns);
            for (int n0 = 0; n0 < N; n0 += rows_at_once) {
                const int rows = std::min((int)rows_at_once, N - n0), whole = rows / 16 * 16;
                const bf16* here = a + (size_t)n0 * K;
                if (whole > 0) product(unit, sums, here, packed, whole, columns, K);
                if (whole < rows) {
                    std::copy_n(here + (size_t)whole * K, (size_t)(rows - whole) * K, few);
                    std::fill(few + (size_t)(rows - whole) * K, few + few_size, bf16(0));
                    product(unit, sums + (size_t)whole * panel, few, packed, 16, columns, K);
                }
                for (int n = 0; n < rows; n++) finish(n0 + n, c0, columns, sums + (size_t)n * panel);
            }
        }
        unit.end();
    }
}

inline void columns_times(Ctx& ctx, float* c, const bf16* a, const bf16* b, int N, int M, int C, Acc acc) {
    const MatrixUnit& unit = *ctx.unit;
    const int K = (N + 31) / 32 * 32;
    const size_t right_size = (size_t)K * C, left_size = (size_t)K * panel;
    bf16* right = (bf16*)ctx.scratch((right_size + left_size * (size_t)ctx.threads) * sizeof(bf16));
#pragma omp parallel num_threads(ctx.threads)
    {
        bf16* left = right + right_size + left_size * (size_t)omp_get_thread_num();
#pragma omp for schedule(static)
        for (int c0 = 0; c0 < C; c0 += panel)
            pack_rows(right + (size_t)c0 * K, b + c0, (size_t)C, std::min((int)panel, C - c0), K, N);
        unit.begin();
#pragma omp for schedule(static)
        for (int m0 = 0; m0 < M; m0 += panel) {
            const int rows = std::min((int)panel, M - m0);
            lay_transposed(unit, left, a + m0, (size_t)M, rows, K, N);
            for (int k = 0; k < K; k += depth)
                unit.product(c + (size_t)m0 * C, C, left + k, K, right + (size_t)k * 16, K, rows, C, std::min(depth, K - k),
                             k > 0 || acc == Acc::Add);
        }
        unit.end();
    }
}

// ---- linear layers: true if it was done here, false if that is others' work ------------------------------------------------
template <class E>
bool fits(const Ctx& ctx, int K, int C) {
    return std::is_same<E, bf16>::value && ctx.own_products && !ctx.plain && K % 32 == 0 && C % 16 == 0;
}

// out = inp weight^T (+ bias); with `pre`, that is pre, and out = gelu(pre).
template <class E>
bool forward(Ctx& ctx, E* out, E* pre, const E* inp, const E* weight, const E* bias, int N, int IC, int OC) {
    if (!fits<E>(ctx, IC, OC)) return false;
    if constexpr (std::is_same<E, bf16>::value) {
        const auto pack = [&](bf16* to, int first, int columns) {
            pack_transposed(*ctx.unit, to, weight + (size_t)first * IC, (size_t)IC, columns, IC);
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
        const auto pack = [&](bf16* to, int first, int columns) { pack_rows(to, weight + first, (size_t)IC, columns, OC, OC); };
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
