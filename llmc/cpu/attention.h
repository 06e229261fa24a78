// Causal flash attention (Dao et al., 2022; Dao, 2023) with grouped queries, ALiBi and document masks.
//   s_tj = scale q_t.k_j + slope (j - t) for doc_start_t <= j <= t,  p_tj = exp(s_tj - lse_t),  out_t = sum_j p_tj v_j
// Backward. With D_t = dout_t . out_t (which is sum_j p_tj dp_tj, the softmax's own correction):
//   dv_j = sum_t p_tj dout_t,  dp_tj = dout_t . v_j,  ds_tj = p_tj (dp_tj - D_t),  dq_t = scale sum_j ds_tj k_j,
//   dk_j = scale sum_t ds_tj q_t
// p is recomputed from lse, so nothing of size T x T is ever stored.
//
// The plain functions are the definition, row by row, and the only ones in the fp64 build; flash_attention.h is the fast path.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../base/math.h"
#include "../ops.h"
#include "attention_shape.h"
#include "rope.h"
#include "vectors.h"
#if CPU_FAST_PATHS
#include "flash_attention.h"
#endif

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

inline real score(const AttentionShape& a, const floatX* qkv, const real* slopes, int b, int h, int t, int j) {
    const real s = a.scale * dot(qkv + a.query(b, t, h), qkv + a.key(b, j, h / a.group()), a.HS);
    return slopes ? s + slopes[h] * (j - t) : s;
}

inline void attention_forward(floatX* out, real* lse, const floatX* qkv, const real* slopes, const int* doc_start,
                              const AttentionShape& a, real* scratch /*(B, NH, T)*/) {
    parallel_tasks((size_t)a.B * a.NH, [=](size_t task) {
        const int b = (int)task / a.NH, h = (int)task % a.NH;
        real* p = scratch + a.statistic(b, 0, h);
        for (int t = 0; t < a.T; t++) {
            const int first = doc_start ? doc_start[b * a.T + t] : 0;
            real top = -std::numeric_limits<real>::infinity(), sum = 0;
            for (int j = first; j <= t; j++) top = std::max(top, p[j] = score(a, qkv, slopes, b, h, t, j));
            for (int j = first; j <= t; j++) sum += p[j] = std::exp(p[j] - top);
            lse[a.statistic(b, t, h)] = top + std::log(sum);
            for (int i = 0; i < a.HS; i++) {
                real o = 0;
                for (int j = first; j <= t; j++) o += p[j] * (real)qkv[a.value(b, j, h / a.group()) + i];
                out[a.output(b, t, h) + i] = (floatX)(o / sum);
            }
        }
    });
}

inline void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const real* lse, const floatX* qkv,
                               const real* slopes, const int* doc_start, const AttentionShape& a,
                               real* scratch /*(B, T, NH + 2*NKV, HS)*/) {
    real* d = scratch;
    const size_t n = (size_t)a.B * a.T * a.row();
    std::fill(d, d + n, real(0));
    parallel_tasks((size_t)a.B * a.NKV, [=](size_t task) {
        const int b = (int)task / a.NKV, g = (int)task % a.NKV;
        for (int h = g * a.group(); h < (g + 1) * a.group(); h++)
            for (int t = 0; t < a.T; t++) {
                const floatX* dy = dout + a.output(b, t, h);
                const real correction = dot(dy, out + a.output(b, t, h), a.HS);
                for (int j = doc_start ? doc_start[b * a.T + t] : 0; j <= t; j++) {
                    const real p = std::exp(score(a, qkv, slopes, b, h, t, j) - lse[a.statistic(b, t, h)]);
                    const real ds = a.scale * p * (dot(dy, qkv + a.value(b, j, g), a.HS) - correction);
                    for (int i = 0; i < a.HS; i++) {
                        d[a.value(b, j, g) + i] += p * (real)dy[i];
                        d[a.query(b, t, h) + i] += ds * (real)qkv[a.key(b, j, g) + i];
                        d[a.key(b, j, g) + i] += ds * (real)qkv[a.query(b, t, h) + i];
                    }
                }
            }
    });
    for (size_t i = 0; i < n; i++) dqkv[i] = (floatX)d[i];
}

}  // namespace plain

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline void attention_forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const real* slopes, const int* doc_start,
                              int B, int T, int NH, int NKV, int HS, real scale) {
    const AttentionShape a{B, T, NH, NKV, HS, scale};
#if CPU_FAST_PATHS
    if (!ctx.plain) return detail::flash::forward(ctx, out, lse, qkv, slopes, doc_start, a);
#endif
    plain::attention_forward(out, lse, qkv, slopes, doc_start, a, (real*)ctx.scratch(sizeof(real) * (size_t)B * NH * T));
}

inline size_t attention_sums(const Ctx&, int, int, int, int) { return 0; }

inline void attention_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const floatX* out, const real* lse,
                               const floatX* qkv, const real* slopes, const int* doc_start, int B, int T, int NH, int NKV,
                               int HS, real scale, real* /*dq_sums*/) {
    const AttentionShape a{B, T, NH, NKV, HS, scale};
#if CPU_FAST_PATHS
    if (!ctx.plain) return detail::flash::backward(ctx, {dqkv, dout, out, lse, qkv, slopes, doc_start, nullptr}, a);
#endif
    plain::attention_backward(dqkv, dout, out, lse, qkv, slopes, doc_start, a,
                              (real*)ctx.scratch(sizeof(real) * (size_t)B * T * a.row()));
}

inline void attention_rope_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const floatX* out, const real* lse,
                                    const floatX* qkv, const int* doc_start, const int* positions, const real* cos_sin, int B,
                                    int T, int NH, int NKV, int HS, real scale, real* /*dq_sums*/) {
#if CPU_FAST_PATHS
    if (!ctx.plain && HS <= detail::flash::most_columns) {
        const detail::Rotation rotation{positions, cos_sin, HS};
        return detail::flash::backward(ctx, {dqkv, dout, out, lse, qkv, nullptr, doc_start, &rotation},
                                       {B, T, NH, NKV, HS, scale});
    }
#endif
    attention_backward(ctx, dqkv, dout, out, lse, qkv, nullptr, doc_start, B, T, NH, NKV, HS, scale);
    rope_backward(ctx, dqkv, positions, cos_sin, B * T, NH, NKV, HS);
}

inline std::string attention_limits(int) { return ""; }

inline void attention_decode(Ctx& ctx, floatX* out, floatX* keys, floatX* values, const floatX* qkv, const real* slopes, int B,
                             int t, int P, int NH, int NKV, int HS, real scale) {
    const int group = NH / NKV, row = NH + 2 * NKV;
    real* scores = (real*)ctx.scratch(sizeof(real) * (size_t)B * NH * (t + 1));
    parallel_tasks((size_t)B * NKV, [=](size_t task) {
        const int b = (int)task / NKV, g = (int)task % NKV;
        const auto cached = [&](floatX* cache, int j) { return cache + (((size_t)b * P + j) * NKV + g) * HS; };
        const floatX* token = qkv + (size_t)b * row * HS;
        std::copy_n(token + (size_t)(NH + g) * HS, HS, cached(keys, t));
        std::copy_n(token + (size_t)(NH + NKV + g) * HS, HS, cached(values, t));
        for (int h = g * group; h < (g + 1) * group; h++) {
            real* p = scores + ((size_t)b * NH + h) * (t + 1);
            real top = -std::numeric_limits<real>::infinity(), sum = 0;
            for (int j = 0; j <= t; j++) {
                p[j] = scale * inner_product(token + (size_t)h * HS, cached(keys, j), HS);
                if (slopes) p[j] += slopes[h] * (j - t);
                top = std::max(top, p[j]);
            }
            for (int j = 0; j <= t; j++) sum += p[j] = exp_real(p[j] - top);
            for_vectors(HS, [&](int c, auto there) {
                floats o = {};
                for (int j = 0; j <= t; j++) o += p[j] * load(cached(values, j) + c, there);
                store(out + ((size_t)b * NH + h) * HS + c, o / sum, there);
            });
        }
    });
}

}  // namespace cpu
