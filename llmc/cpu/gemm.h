// The three products of linear layers on a matrix unit (matrix_unit.h), in bf16 or fp32.
//   rows_times      out (N, C) = a (N, K) b (K, C)     forward: inp times weight^T; backward_input: dout times weight
//   columns_times   c (M, C) (+)= a^T b of a (N, M), b (N, C)     backward_weight: dout and inp
// The unit is fed from caches (Goto and van de Geijn, 2008): a block of at most 256 rows and 256 columns and the next 1024 of k
// lie in the second cache, and of it 32 columns and 512 of k, which all rows meet, in the first. What is read from further away
// takes part in 512 operations a number. Right operands are packed when they are wanted, by who multiplies with them: weights
// are read from where they lie, once, and there are no packed copies to keep.
// rows_times: threads share columns, and rows where there are few columns. Rows are finished in fp32 before `finish` rounds
// them and does what comes after the product. columns_times: threads pack b together, then share the rows of c.
// Every sum runs over k in order: the bits depend on the unit, not on threads or blocks.
// Sizes that fill no words or tiles of the unit (K of 64 bytes, C and M of 16) are multiplied as copies beside zeros.
#pragma once
#include <algorithm>
#include <cstring>

#include "../math.h"
#include "../ops.h"
#include "ctx.h"
#include "matrix_unit.h"
#include "packing.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {
namespace detail {
namespace gemm {

constexpr int block = 256, slab = 1024;  // rows and columns, and of k, that stay in the second cache
constexpr int narrow = 32, depth = 512;  // columns, and of k, that stay in the first

// Rows that are finished together. Of short sums there are many for the work they cost: fewer rows, so that they stay near.
inline int rows_at_once(int K) { return K <= 256 ? 32 : block; }

// A result (rows, columns) in panels of columns, as many for each thread, and parts of its rows where there are few panels.
struct Shares {
    int columns, panels, rows, parts;
    Shares(int N, int C, int threads) {
        columns = round_up(ceil_div(C, round_up(ceil_div(C, block), threads)), 16);
        columns = std::max(columns, std::min(C, 64));
        panels = ceil_div(C, columns);
        rows = round_up(ceil_div(N, ceil_div(threads, panels)), 16);
        parts = ceil_div(N, rows);
    }
};

// c (rows, columns) = a b or c += a b, of a slab at most.
inline void multiply_block(const MatrixUnit<floatX>& unit, float* c, int ldc, const floatX* a, int lda, const floatX* packed,
                           int rows, int columns, int K, bool add) {
    for (int n = 0; n < columns; n += narrow)
        for (int k = 0; k < K; k += depth)
            unit.product(c + n, ldc, a + k, lda, packed + right_index<floatX>(k, n, K), K, rows,
                         std::min((int)narrow, columns - n), std::min((int)depth, K - k), add || k > 0);
}

// ---- products --------------------------------------------------------------------------------------------------------------
// K is a multiple of what fills a tile's row; C may be any, of which packed panels have the next multiple of 16.
// pack(to, k, K, first column, columns) packs K rows of a panel of b; finish(n, first column, columns, sums) gets each finished
// part of a row. Lines of `out` (N, C), if it is given, are asked for before the product whose result they are to hold.
template <class Pack, class Finish>
void rows_times(Ctx& ctx, floatX* out, const floatX* a, int N, int K, int C, Pack pack, Finish finish) {
    const MatrixUnit<floatX>& unit = *ctx.unit;
    const int wide = round_up(C, 16), at_once = rows_at_once(K);
    const Shares shares(N, wide, ctx.threads);
    const int width = shares.columns, kept = round_up(K > slab ? shares.rows : std::min(at_once, shares.rows), 16);
    const size_t packed_size = (size_t)std::min(K, (int)slab) * width, few_size = (size_t)16 * slab,
                 sums_size = (size_t)kept * width;
    const size_t per_thread = (packed_size + few_size) * sizeof(floatX) + sums_size * sizeof(float);
    char* memory = (char*)ctx.scratch(per_thread * (size_t)ctx.threads);
#pragma omp parallel num_threads(ctx.threads)
    {
        float* memory_of_sums = (float*)(memory + per_thread * (size_t)omp_get_thread_num());
        floatX *packed = (floatX*)(memory_of_sums + sums_size), *few = packed + packed_size;
        unit.begin();
#pragma omp for schedule(dynamic)
        for (int task = 0; task < shares.panels * shares.parts; task++) {
            const int c0 = task / shares.parts * width, columns = std::min(width, wide - c0);
            const int first = task % shares.parts * shares.rows, end = std::min(N, first + shares.rows);
            for (int k0 = 0; k0 < K; k0 += slab) {
                const int k_here = std::min((int)slab, K - k0);
                pack(packed, k0, k_here, c0, columns);
                for (int n0 = first; n0 < end; n0 += at_once) {
                    const int rows = std::min(at_once, end - n0), whole = rows / 16 * 16;
                    const floatX* here = a + (size_t)n0 * K + k0;
                    const bool last = k0 + k_here == K;
                    if (last && out) prefetch_lines<1>(out + (size_t)n0 * C + c0, (size_t)C, columns, rows);
                    float* sums = memory_of_sums + (K > slab ? (size_t)(n0 - first) * width : 0);
                    if (whole > 0) multiply_block(unit, sums, width, here, K, packed, whole, columns, k_here, k0 > 0);
                    if (whole < rows) {  // rows that fill no tile: a copy beside zeros
                        std::fill(few, few + few_size, floatX(0));
                        for (int n = whole; n < rows; n++)
                            std::copy_n(here + (size_t)n * K, k_here, few + (size_t)(n - whole) * slab);
                        multiply_block(unit, sums + (size_t)whole * width, width, few, slab, packed, 16, columns, k_here,
                                       k0 > 0);
                    }
                    if (last)
                        for (int n = 0; n < rows; n++) finish(n0 + n, c0, std::min(columns, C - c0), sums + (size_t)n * width);
                }
            }
        }
        unit.end();
    }
}

// M and C are multiples of 16.
inline void columns_times(Ctx& ctx, float* c, const floatX* a, const floatX* b, int N, int M, int C, Acc acc) {
    const MatrixUnit<floatX>& unit = *ctx.unit;
    const Shares shares(C, M, ctx.threads);  // of c's rows, and of its columns where there are few rows
    const int piece = std::min((int)block, round_up(ceil_div(C, ctx.threads), 16));
    const int deepest = std::min((int)slab, round_up(N, k_step<floatX>));
    const size_t right_size = (size_t)deepest * C, left_size = (size_t)deepest * shares.columns;
    floatX* right = (floatX*)ctx.scratch((right_size + left_size * (size_t)ctx.threads) * sizeof(floatX));
#pragma omp parallel num_threads(ctx.threads)
    {
        floatX* left = right + right_size + left_size * (size_t)omp_get_thread_num();
        unit.begin();
        for (int k0 = 0; k0 < N; k0 += slab) {
            const int there = std::min((int)slab, N - k0), K = round_up(there, k_step<floatX>);
#pragma omp for schedule(dynamic)
            for (int c0 = 0; c0 < C; c0 += piece)
                pack_rows(unit, right + (size_t)c0 * K, b + (size_t)k0 * C + c0, (size_t)C, std::min(piece, C - c0), K, there);
#pragma omp for schedule(dynamic)
            for (int task = 0; task < shares.panels * shares.parts; task++) {
                const int m0 = task / shares.parts * shares.columns, c0 = task % shares.parts * shares.rows;
                const int rows = std::min(shares.columns, M - m0), columns = std::min(shares.rows, C - c0);
                lay_transposed(unit, left, a + (size_t)k0 * M + m0, (size_t)M, rows, K, there);
                multiply_block(unit, c + (size_t)m0 * C + c0, C, left, K, right + (size_t)c0 * K, rows, columns, K,
                               k0 > 0 || acc == Acc::Add);
            }
        }
        unit.end();
    }
}

// x (rows, columns) where it lies, or a copy in ctx.copies[i] with zeros up to as many rows and columns as are wanted.
inline const floatX* padded(Ctx& ctx, int i, const floatX* x, int rows, int columns, int all_rows, int all_columns) {
    if (rows == all_rows && columns == all_columns) return x;
    std::vector<floatX>& copy = ctx.copies[i];
    copy.assign((size_t)all_rows * all_columns, floatX(0));
    for (int r = 0; r < rows; r++) std::copy_n(x + (size_t)r * columns, columns, &copy[(size_t)r * all_columns]);
    return copy.data();
}

// ---- linear layers ---------------------------------------------------------------------------------------------------------
// out = inp weight^T (+ bias); with `pre`, that is pre, and out = gelu(pre).
inline void forward(Ctx& ctx, floatX* out, floatX* pre, const floatX* inp, const floatX* weight, const floatX* bias, int N,
                    int IC, int OC) {
    const int K = round_up(IC, k_step<floatX>);
    inp = padded(ctx, 0, inp, N, IC, N, K), weight = padded(ctx, 1, weight, OC, IC, round_up(OC, 16), K);
    const auto pack = [&](floatX* to, int k, int k_here, int first, int columns) {
        pack_transposed(*ctx.unit, to, weight + (size_t)first * K + k, (size_t)K, columns, k_here);
    };
    rows_times(ctx, out, inp, N, K, OC, pack, [=](int n, int first, int columns, const float* sums) {
        const size_t at = (size_t)n * OC + first;
        floatX* y = (pre ? pre : out) + at;
        if (bias) {
            const floatX* b = bias + first;
            for_vectors(columns, [=](int c, auto there) { store(y + c, load(sums + c) + load(b + c, there), there); });
        } else {
            for_vectors(columns, [=](int c, auto there) { store(y + c, load(sums + c), there); });
        }
        if (!pre) return;
        floatX* activated = out + at;
        for_vectors(columns, [=](int c, auto there) { store(activated + c, gelu(load(y + c, there)), there); });
    });
}

// dinp = dout weight, times gelu'(pre) where there is one.
inline void backward_input(Ctx& ctx, floatX* dinp, const floatX* dout, const floatX* weight, const floatX* pre, int N, int IC,
                           int OC) {
    const int K = round_up(OC, k_step<floatX>), stride = round_up(IC, 16);
    dout = padded(ctx, 0, dout, N, OC, N, K), weight = padded(ctx, 1, weight, OC, IC, K, stride);
    const auto pack = [&](floatX* to, int k, int k_here, int first, int columns) {
        pack_rows(*ctx.unit, to, weight + (size_t)k * stride + first, (size_t)stride, columns, k_here, k_here);
    };
    rows_times(ctx, dinp, dout, N, K, IC, pack, [=](int n, int first, int columns, const float* sums) {
        const size_t at = (size_t)n * IC + first;
        floatX* dx = dinp + at;
        for_vectors(columns, [=](int c, auto there) { store(dx + c, load(sums + c), there); });
        if (!pre) return;
        const floatX* x = pre + at;
        for_vectors(columns, [=](int c, auto there) {
            store(dx + c, load(dx + c, there) * gelu_derivative(load(x + c, there)), there);
        });
    });
}

// dweight (+)= dout^T inp.
inline void backward_weight(Ctx& ctx, float* dweight, const floatX* dout, const floatX* inp, int N, int IC, int OC, Acc acc) {
    const int M = round_up(OC, 16), C = round_up(IC, 16);
    if (M == OC && C == IC) return columns_times(ctx, dweight, dout, inp, N, M, C, acc);
    std::vector<float> sums((size_t)M * C);
    columns_times(ctx, sums.data(), padded(ctx, 0, dout, N, OC, N, M), padded(ctx, 1, inp, N, IC, N, C), N, M, C, Acc::Set);
    for (int o = 0; o < OC; o++)
        for (int i = 0; i < IC; i++) {
            const float sum = sums[(size_t)o * C + i];
            float& d = dweight[(size_t)o * IC + i];
            d = acc == Acc::Add ? d + sum : sum;
        }
}

}  // namespace gemm
}  // namespace detail
}  // namespace cpu
