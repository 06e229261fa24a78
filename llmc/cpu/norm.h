// LayerNorm (Ba et al., 2016) and RMSNorm (Zhang & Sennrich, 2019), with the residual sum fused in front.
//   forward   xhat = (x - mean) rstd,  y = w xhat + b          RMSNorm: mean = 0, no b, rstd = 1 / sqrt(mean(x^2) + eps)
// With an offset, w is offset + weight.
//   backward  with g = w dy:  dx = rstd (g - mean(g) - xhat mean(g xhat))      RMSNorm: without mean(g)
//             dw = sum over rows of dy xhat,  db = sum over rows of dy
// (dx: d xhat_j / d x_i = rstd (delta_ij - 1/C - xhat_i xhat_j / C); the middle term comes from the mean, the last from rstd.)
// Both norms are one loop with a compile-time switch. The plain loops are the definition, with sums in double, and the only
// path in the fp64 build. The fast path sums in fp32. For gradients of w and b it divides rows into blocks of fixed size, each
// block is summed by one task, and the blocks are added in order: the same bits for any number of threads. Bound by memory
// bandwidth: forward reads x once (it stays in cache for the second pass) and writes y.
// The norms of query and key heads are RMSNorm with rows inside longer ones (HeadRows).
#pragma once
#include <algorithm>
#include <cmath>

#include "../ops.h"
#include "fp8.h"
#include "parallel.h"
#include "reduce.h"
#include "vectors.h"

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

// y = the norm of x, row n.
template <bool centred>
void normalize(int n, floatX* y, const floatX* x, const NormParams& params, const NormStatistics& statistics) {
    const int C = params.C;
    double total = 0, squares = 0;
    for (int c = 0; c < C; c++) total += (real)x[c];
    const real m = centred ? (real)(total / C) : real(0);
    for (int c = 0; c < C; c++) squares += ((double)(real)x[c] - m) * ((double)(real)x[c] - m);
    const real r = (real)(1 / std::sqrt(squares / C + params.eps));
    for (int c = 0; c < C; c++) {
        const real scaled = ((real)x[c] - m) * r * (params.offset + (real)params.weight[c]);
        y[c] = (floatX)(centred ? scaled + (real)params.bias[c] : scaled);
    }
    if (centred) statistics.mean[n] = m;
    statistics.rstd[n] = r;
}

// dinp and dout have the layout `rows`, inp is contiguous. dinp may be dout: the gradients of the parameters come first.
template <bool centred>
void norm_backward(floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp, const NormParams& params,
                   const NormStatistics& statistics, const HeadRows& rows, Acc acc) {
    const int C = params.C, N = rows.count();
    const auto dy = [=](int n, int c) { return (real)dout[rows.at(n, C) + c]; };
    const auto xhat = [=](int n, int c) {
        const real m = centred ? statistics.mean[n] : real(0);
        return ((real)inp[(size_t)n * C + c] - m) * statistics.rstd[n];
    };
    parallel_for(C, [=](int c) {
        double dw = 0, db = 0;
        for (int n = 0; n < N; n++) {
            dw += dy(n, c) * xhat(n, c);
            db += dy(n, c);
        }
        grads.weight[c] += (real)dw;
        if (centred) grads.bias[c] += (real)db;
    });
    parallel_for(N, [=](int n) {
        const auto g = [=](int c) { return (params.offset + (real)params.weight[c]) * dy(n, c); };
        double sum_g = 0, sum_gx = 0;
        for (int c = 0; c < C; c++) {
            if (centred) sum_g += g(c);
            sum_gx += g(c) * xhat(n, c);
        }
        const real mean_g = (real)(sum_g / C);
        const real mean_gx = params.means.sums ? params.means.of(n) : (real)(sum_gx / C);
        for (int c = 0; c < C; c++) {
            floatX& dx = dinp[rows.at(n, C) + c];
            const real d = statistics.rstd[n] * (g(c) - mean_g - xhat(n, c) * mean_gx);
            dx = (floatX)(acc == Acc::Add ? (real)dx + d : d);
        }
    });
}

}  // namespace plain

// ---- the fast path ---------------------------------------------------------------------------------------------------------
namespace detail {

constexpr int prefetch_ahead = 4096 / sizeof(floatX);  // prefetch distance, in elements

// Sets factors (C) to offset + weight, for all rows.
inline const real* widen_weight(real* factors, const NormParams& params) {
    for (int c = 0; c < params.C; c++) factors[c] = params.offset + (real)params.weight[c];
    return factors;
}

// y = the norm of x, row n; true: LayerNorm, false: RMSNorm.
template <bool centred>
void normalize(int n, floatX* y, const floatX* x, const real* factors, const NormParams& params,
               const NormStatistics& statistics) {
    const floatX* bias = params.bias;
    const int C = params.C;
    const auto mean_of = [=](auto f) {
        floats sum = {};
        for_vectors(C, [&](int c, auto there) { sum += first_of(f(load(x + c, there)), there); });
        return total(sum) / C;
    };
    const real m = centred ? mean_of([](floats v) { return v; }) : real(0);
    const real variance = mean_of([=](floats v) { return (v - m) * (v - m); });
    const real r = 1 / std::sqrt(variance + params.eps);
    for_vectors(C, [=](int c, auto there) {
        const floats scaled = (load(x + c, there) - m) * r * load(factors + c, there);
        store(y + c, centred ? scaled + load(bias + c, there) : scaled, there);
    });
    if (centred) statistics.mean[n] = m;
    statistics.rstd[n] = r;
}

template <bool centred>
void norm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                  const floatX* add, const NormParams& params, int N) {
    const int C = params.C;
    const bool plain = ctx.plain;
    const real* factors = widen_weight((real*)ctx.scratch(sizeof(real) * C), params);
    set_rows(ctx, out, N, C, [=](int n, floatX* y) {
        const floatX* x = inp + (size_t)n * C;
        if (add) {
            const floatX* b = add + (size_t)n * C;
            floatX* s = sum + (size_t)n * C;
            for_vectors(C, [=](int c, auto there) {
                for (const floatX* row : {x, b}) __builtin_prefetch(row + c + prefetch_ahead);
                store(s + c, load(x + c, there) + load(b + c, there), there);
            });
            x = s;
        }
        if (plain) plain::normalize<centred>(n, y, x, params, statistics);
        else normalize<centred>(n, y, x, factors, params, statistics);
    });
}

template <bool centred>
void norm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                   const NormParams& params, const NormStatistics& statistics, const HeadRows& rows, Acc acc) {
    if (ctx.plain) return plain::norm_backward<centred>(dinp, grads, dout, inp, params, statistics, rows, acc);
    const int C = params.C, N = rows.count();
    constexpr int block_rows = 64, sums = centred ? 2 : 1;
    const int blocks = ceil_div(N, block_rows);
    real* partial = (real*)ctx.scratch(sizeof(real) * (size_t)blocks * sums * C);  // (blocks, sums, C): of dweight, of dbias
    const floatX* weight = params.weight;
    const real offset = params.offset;
    const auto sum_blocks = [=](auto factor) {
        parallel_tasks((size_t)blocks, [=](size_t task) {
            const int block = (int)task;
            real *dw = partial + (size_t)block * sums * C, *db = dw + C;
            std::fill(dw, dw + sums * C, real(0));
            for (int n = block * block_rows; n < std::min(N, (block + 1) * block_rows); n++) {
                const floatX *x = inp + (size_t)n * C, *dy = dout + rows.at(n, C);
                floatX* dx = dinp + rows.at(n, C);
                const real m = centred ? statistics.mean[n] : real(0), r = statistics.rstd[n];
                floats sum_g = {}, sum_gx = {};
                for_vectors(C, [&](int c, auto there) {
                    for (const floatX* row : {x, dy, (const floatX*)dx}) __builtin_prefetch(row + c + prefetch_ahead);
                    const floats g = factor(c, there) * load(dy + c, there);
                    if (centred) sum_g += g;
                    sum_gx += g * ((load(x + c, there) - m) * r);
                });
                const real mean_g = total(sum_g) / C;
                const real mean_gx = params.means.sums ? params.means.of(n) : total(sum_gx) / C;
                for_vectors(C, [=](int c, auto there) {
                    const floats y = load(dy + c, there), xhat = (load(x + c, there) - m) * r, g = factor(c, there) * y;
                    store(dw + c, load(dw + c, there) + y * xhat, there);
                    if (centred) store(db + c, load(db + c, there) + y, there);
                    const floats d = r * (g - mean_g - xhat * mean_gx);
                    store(dx + c, acc == Acc::Add ? load(dx + c, there) + d : d, there);
                });
            }
        });
    };
    if (offset == 0) sum_blocks([=](int c, auto there) { return load(weight + c, there); });
    else sum_blocks([=](int c, auto there) { return offset + load(weight + c, there); });
    constexpr int width = 64;  // channels of a task: whole cache lines
    parallel_ranges((size_t)C,
                    [=](size_t first, size_t last) {
                        for (int block = 0; block < blocks; block++) {
                            const real *dw = partial + (size_t)block * sums * C, *db = dw + C;
                            for (size_t c = first; c < last; c++) {
                                grads.weight[c] += dw[c];
                                if (centred) grads.bias[c] += db[c];
                            }
                        }
                    },
                    width);
}

}  // namespace detail

inline void layernorm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                              const floatX* add, const NormParams& params, int N) {
    detail::norm_forward<true>(ctx, out, statistics, sum, inp, add, params, N);
}

inline bool norm_sums_columns(int) { return true; }

inline void layernorm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                               const NormParams& params, const NormStatistics& statistics, int N, Acc acc) {
    detail::norm_backward<true>(ctx, dinp, grads, dout, inp, params, statistics, {N, (size_t)params.C, 1}, acc);
    if (grads.dinp_columns) detail::column_sums(grads.dinp_columns, dinp, (size_t)params.C, N, params.C, Acc::Add);
}

inline void rmsnorm_forward(Ctx& ctx, const Output& out, const NormStatistics& statistics, floatX* sum, const floatX* inp,
                            const floatX* add, const NormParams& params, int N) {
    detail::norm_forward<false>(ctx, out, statistics, sum, inp, add, params, N);
}

inline void rmsnorm_backward(Ctx& ctx, floatX* dinp, const NormGrads& grads, const floatX* dout, const floatX* inp,
                             const NormParams& params, const NormStatistics& statistics, int N, Acc acc) {
    detail::norm_backward<false>(ctx, dinp, grads, dout, inp, params, statistics, {N, (size_t)params.C, 1}, acc);
    if (grads.dinp_columns) detail::column_sums(grads.dinp_columns, dinp, (size_t)params.C, N, params.C, Acc::Add);
}

inline void head_norm_forward(Ctx& ctx, floatX* qkv, floatX* kept, real* rstd, const NormParams& params, const HeadRows& rows) {
    const int C = params.C;
    const bool plain = ctx.plain;
    const real* factors = detail::widen_weight((real*)ctx.scratch(sizeof(real) * C), params);
    parallel_for(rows.count(), [=](int n) {
        floatX *y = qkv + rows.at(n, C), *x = kept + (size_t)n * C;
        std::copy_n(y, C, x);
        if (params.means.sums) {
            rstd[n] = 1 / std::sqrt(params.means.of(n) + params.eps);
            for (int c = 0; c < C; c++) y[c] = (floatX)((real)x[c] * rstd[n] * factors[c]);
        } else if (plain) plain::normalize<false>(n, y, x, params, {nullptr, rstd});
        else detail::normalize<false>(n, y, x, factors, params, {nullptr, rstd});
    });
}

inline void head_norm_backward(Ctx& ctx, floatX* dqkv, const NormGrads& grads, const floatX* kept, const NormParams& params,
                               const real* rstd, const HeadRows& rows) {
    const NormStatistics statistics = {nullptr, const_cast<real*>(rstd)};
    detail::norm_backward<false>(ctx, dqkv, grads, dqkv, kept, params, statistics, rows, Acc::Set);
}

inline void head_norm_squares(Ctx&, real* sums, const floatX* qkv, int C, const HeadRows& rows) {
    parallel_for(rows.count(), [=](int n) {
        const floatX* x = qkv + rows.at(n, C);
        double sum = 0;
        for (int c = 0; c < C; c++) sum += (double)(real)x[c] * (real)x[c];
        sums[n] = (real)sum;
    });
}

inline void head_norm_products(Ctx&, real* sums, const floatX* dqkv, const floatX* kept, const NormParams& params,
                               const real* rstd, const HeadRows& rows) {
    const int C = params.C;
    parallel_for(rows.count(), [=](int n) {
        const floatX *dy = dqkv + rows.at(n, C), *x = kept + (size_t)n * C;
        double sum = 0;
        for (int c = 0; c < C; c++)
            sum += (double)((params.offset + (real)params.weight[c]) * (real)dy[c]) * ((real)x[c] * rstd[n]);
        sums[n] = (real)sum;
    });
}

}  // namespace cpu
