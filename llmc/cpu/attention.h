// Causal flash attention (Dao et al., 2022; Dao, 2023) with grouped queries, ALiBi and document masks.
//   s_tj = scale q_t.k_j + slope (j - t) for doc_start_t <= j <= t,  p_tj = exp(s_tj - lse_t),  out_t = sum_j p_tj v_j
// Backward. With D_t = dout_t . out_t (which is sum_j p_tj dp_tj, the softmax's own correction):
//   dv_j = sum_t p_tj dout_t,  dp_tj = dout_t . v_j,  ds_tj = p_tj (dp_tj - D_t),  dq_t = scale sum_j ds_tj k_j,
//   dk_j = scale sum_t ds_tj q_t
// p is recomputed from lse, so nothing of size T x T is ever stored. With a soft cap, scale q.k becomes
// c_tj = cap tanh(scale q.k / cap) in s, and ds is multiplied by 1 - (c/cap)^2. With dropout, p v and dp are multiplied by 0 or
// 1 / (1 - rate).
//
// The plain functions are the definition, row by row, and the only path in the fp64 build and with dropout; flash_attention.h
// is the fast path.
//
// A sink is a key with a score but no value: lse' = log(e^lse + e^sink), out' = out e^(lse - lse'). Backward with lse' and out'
// is that for a softmax with one more score, and d/dsink = - sum_t e^(sink - lse'_t) (dout_t . out'_t).
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../base/math.h"
#include "../ops.h"
#include "rope.h"
#include "vectors.h"
#include "flash_attention.h"

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

inline real dot(const floatX* a, const floatX* b, int n) {
    real sum = 0;
    for (int i = 0; i < n; i++) sum += (real)a[i] * (real)b[i];
    return sum;
}

// The capped score, before ALiBi.
inline real score(const AttentionShape& a, const floatX* qkv, const floatX* kv, int b, int h, int t, int j) {
    const real s = a.scale * dot(qkv + a.query(b, t, h), kv + a.key(b, j, h / a.group()), a.HS);
    return a.softcap > 0 ? soft_cap(s, a.softcap) : s;
}
inline real with_bias(real score, const real* slopes, int h, int t, int j) {
    return slopes ? score + slopes[h] * (j - t) : score;
}

// kv: keys and values; qkv unless they are apart.
inline void attention_forward(floatX* out, real* lse, const floatX* qkv, const floatX* kv, const AttentionMask& mask,
                              const AttentionShape& a, real* scratch /*(B, NH, T)*/) {
    parallel_tasks((size_t)a.B * a.NH, [=](size_t task) {
        const int b = (int)task / a.NH, h = (int)task % a.NH;
        real* p = scratch + task * (size_t)a.T;
        for (int t = a.first; t < a.T; t++) {
            const int first = mask.doc_start ? mask.doc_start[a.query_row(b, t)] : 0;
            real top = -std::numeric_limits<real>::infinity(), sum = 0;
            for (int j = first; j <= t; j++)
                top = std::max(top, p[j] = with_bias(score(a, qkv, kv, b, h, t, j), mask.slopes, h, t, j));
            for (int j = first; j <= t; j++) sum += p[j] = std::exp(p[j] - top);
            lse[a.statistic(b, t, h)] = top + std::log(sum);
            for (int j = first; j <= t; j++) p[j] *= a.dropout.of(a.weight(b, h, t, j));
            for (int i = 0; i < a.HS; i++) {
                real o = 0;
                for (int j = first; j <= t; j++) o += p[j] * (real)kv[a.value(b, j, h / a.group()) + i];
                out[a.output(b, t, h) + i] = (floatX)(o / sum);
            }
        }
    });
}

// Elements of dqkv, and of dkv if keys and values are apart.
inline size_t query_elements(const AttentionShape& a) { return (size_t)a.B * a.queries() * a.row(); }
inline size_t key_elements(const AttentionShape& a) { return a.apart ? (size_t)a.B * a.T * a.key_row() : 0; }

inline void attention_backward(floatX* dqkv, floatX* dkv, const floatX* dout, const AttentionActs& acts,
                               const AttentionMask& mask, const AttentionShape& a,
                               real* scratch /*(query_elements + key_elements)*/) {
    const floatX *qkv = acts.qkv, *kv = acts.keys(), *out = acts.out;
    const real* lse = acts.lse;
    const size_t n = query_elements(a), n_keys = key_elements(a);
    real *d = scratch, *dk = a.apart ? d + n : d;
    std::fill(d, d + n + n_keys, real(0));
    parallel_tasks((size_t)a.B * a.NKV, [=](size_t task) {
        const int b = (int)task / a.NKV, g = (int)task % a.NKV;
        for (int h = g * a.group(); h < (g + 1) * a.group(); h++)
            for (int t = a.first; t < a.T; t++) {
                const floatX* dy = dout + a.output(b, t, h);
                const real correction = dot(dy, out + a.output(b, t, h), a.HS);
                for (int j = mask.doc_start ? mask.doc_start[a.query_row(b, t)] : 0; j <= t; j++) {
                    const real s = score(a, qkv, kv, b, h, t, j), keep = a.dropout.of(a.weight(b, h, t, j));
                    const real p = std::exp(with_bias(s, mask.slopes, h, t, j) - lse[a.statistic(b, t, h)]);
                    const real slope = a.scale * (a.softcap > 0 ? soft_cap_derivative(s, a.softcap) : real(1));
                    const real ds = slope * p * (keep * dot(dy, kv + a.value(b, j, g), a.HS) - correction);
                    for (int i = 0; i < a.HS; i++) {
                        dk[a.value(b, j, g) + i] += keep * p * (real)dy[i];
                        d[a.query(b, t, h) + i] += ds * (real)kv[a.key(b, j, g) + i];
                        dk[a.key(b, j, g) + i] += ds * (real)qkv[a.query(b, t, h) + i];
                    }
                }
            }
    });
    for (size_t i = 0; i < n; i++)
        if (!a.apart || i % a.row() < a.output_row()) dqkv[i] = (floatX)d[i];
    for (size_t i = 0; i < n_keys; i++) dkv[i] = (floatX)dk[i];
}

}  // namespace plain

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline void attention_rows_forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const floatX* kv,
                                   const AttentionMask& mask, const AttentionShape& shape) {
#if CPU_FAST_PATHS
    if (!ctx.plain && detail::flash::takes(shape))
        return detail::flash::forward(ctx, out, lse, qkv, kv, mask.slopes, mask.doc_start, shape);
#endif
    real* scratch = (real*)ctx.scratch(sizeof(real) * (size_t)shape.N() * shape.NH);
    plain::attention_forward(out, lse, qkv, kv, mask, shape, scratch);
}
inline void attention_forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const AttentionMask& mask,
                              const AttentionShape& shape) {
    attention_rows_forward(ctx, out, lse, qkv, qkv, mask, shape);
}

inline size_t attention_sums(const Ctx&, const AttentionShape&) { return 0; }

inline size_t attention_scratch(const Ctx& ctx, const AttentionShape& shape) {
#if CPU_FAST_PATHS
    if (!ctx.plain && detail::flash::takes(shape)) return detail::flash::scratch_bytes(ctx, shape);
#else
    (void)ctx;
#endif
    return sizeof(real) * (plain::query_elements(shape) + plain::key_elements(shape));
}

inline void attention_rows_backward(Ctx& ctx, floatX* dqkv, floatX* dkv, const floatX* dout, const AttentionActs& acts,
                                    const AttentionMask& mask, const AttentionShape& shape) {
#if CPU_FAST_PATHS
    if (!ctx.plain && detail::flash::takes(shape))
        return detail::flash::backward(
            ctx, {dqkv, dkv, dout, acts.out, acts.lse, acts.qkv, acts.keys(), mask.slopes, mask.doc_start, nullptr}, shape);
#endif
    const size_t elements = plain::query_elements(shape) + plain::key_elements(shape);
    real* scratch = (real*)ctx.scratch(sizeof(real) * elements);
    plain::attention_backward(dqkv, dkv, dout, acts, mask, shape, scratch);
}
inline void attention_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const AttentionActs& acts, const AttentionMask& mask,
                               const AttentionShape& shape, real* /*dq_sums*/) {
    attention_rows_backward(ctx, dqkv, dqkv, dout, acts, mask, shape);
}

inline void attention_rope_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const AttentionActs& acts,
                                    const AttentionMask& mask, const Rope& rope, const AttentionShape& shape, real* dq_sums) {
#if CPU_FAST_PATHS
    if (!ctx.plain && detail::flash::takes(shape) && shape.HS <= detail::flash::most_columns)
        return detail::flash::backward(
            ctx, {dqkv, dqkv, dout, acts.out, acts.lse, acts.qkv, acts.qkv, mask.slopes, mask.doc_start, &rope}, shape);
#endif
    attention_backward(ctx, dqkv, dout, acts, mask, shape, dq_sums);
    rope_backward(ctx, dqkv, rope, shape);
}

inline std::string attention_limits(int) { return ""; }

inline void attention_decode(Ctx& ctx, floatX* out, const AttentionCache& cache, const floatX* qkv, const DecodeMask& mask,
                             const AttentionShape& a) {
    CHECK(a.T == 1, "%d new tokens of each sequence", a.T);
    int longest = 0;
    for (int b = 0; b < a.B; b++) {
        CHECK(mask.t[b] >= 0 && mask.t[b] < cache.P, "row %d of a cache of %d", mask.t[b], cache.P);
        longest = std::max(longest, mask.t[b] + 1 - mask.first(b));
    }
    real* scores = (real*)ctx.scratch(sizeof(real) * (size_t)a.B * a.NH * longest);
    parallel_tasks((size_t)a.B * a.NKV, [=](size_t task) {
        const int b = (int)task / a.NKV, g = (int)task % a.NKV, HS = a.HS;
        const int t = mask.t[b], first = mask.first(b), rows = t + 1 - first;
        const size_t begin = (size_t)mask.sequences[b] * cache.P;
        const auto cached = [&](floatX* of, int j) { return of + ((begin + j) * a.NKV + g) * HS; };
        std::copy_n(qkv + a.key(b, 0, g), HS, cached(cache.keys, t));
        std::copy_n(qkv + a.value(b, 0, g), HS, cached(cache.values, t));
        for (int h = g * a.group(); h < (g + 1) * a.group(); h++) {
            real* p = scores + ((size_t)b * a.NH + h) * longest;
            real top = mask.sinks ? (real)mask.sinks[h] : -std::numeric_limits<real>::infinity();
            for (int i = 0; i < rows; i++) {
                p[i] = a.scale * inner_product(qkv + a.query(b, 0, h), cached(cache.keys, first + i), HS);
                if (a.softcap > 0) p[i] = soft_cap(p[i], a.softcap);
                if (mask.slopes) p[i] += mask.slopes[h] * (i + 1 - rows);
                top = std::max(top, p[i]);
            }
            real sum = mask.sinks ? exp_real((real)mask.sinks[h] - top) : real(0);
            for (int i = 0; i < rows; i++) sum += p[i] = exp_real(p[i] - top);
            for_vectors(HS, [&](int c, auto there) {
                floats o = {};
                for (int i = 0; i < rows; i++) o += p[i] * load(cached(cache.values, first + i) + c, there);
                store(out + a.output(b, 0, h) + c, o / sum, there);
            });
        }
    });
}

inline void sinks_forward(Ctx&, floatX* out, real* lse, const floatX* sinks, const AttentionShape& a) {
    parallel_for(a.N() * a.NH, [=](int row) {
        const int b = row / a.NH / a.T, t = row / a.NH % a.T, h = row % a.NH;
        real& log_sum = lse[a.statistic(b, t, h)];
        const real sink = (real)sinks[h], top = std::max(sink, log_sum);
        const real with_sink = top + std::log(std::exp(log_sum - top) + std::exp(sink - top));
        const real factor = std::exp(log_sum - with_sink);
        log_sum = with_sink;
        floatX* x = out + a.output(b, t, h);
        for_vectors(a.HS, [=](int c, auto there) { store(x + c, load(x + c, there) * factor, there); });
    });
}

inline void sinks_backward(Ctx&, real* dsinks, const floatX* dout, const AttentionActs& acts, const floatX* sinks,
                           const AttentionShape& a) {
    parallel_for(a.NH, [=](int h) {
        double sum = 0;
        for (int b = 0; b < a.B; b++)
            for (int t = 0; t < a.T; t++) {
                const size_t at = a.output(b, t, h);
                sum +=
                    std::exp((real)sinks[h] - acts.lse[a.statistic(b, t, h)]) * inner_product(dout + at, acts.out + at, a.HS);
            }
        dsinks[h] -= (real)sum;
    });
}

}  // namespace cpu
