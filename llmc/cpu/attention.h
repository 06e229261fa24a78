// Causal flash attention (Dao et al., 2022; Dao, 2023) with grouped queries, ALiBi and document masks.
//   s_tj = scale q_t.k_j + slope (j - t) for doc_start_t <= j <= t,  p_tj = exp(s_tj - lse_t),  out_t = sum_j p_tj v_j
// Backward. With D_t = dout_t . out_t (which is sum_j p_tj dp_tj, the softmax's own correction):
//   dv_j = sum_t p_tj dout_t,  dp_tj = dout_t . v_j,  ds_tj = p_tj (dp_tj - D_t),  dq_t = scale sum_j ds_tj k_j,
//   dk_j = scale sum_t ds_tj q_t
// p is computed again from lse, so nothing of size T x T is ever stored.
//
// The plain functions are the definition, row by row. The tiled ones cut queries and keys into tiles of 64, turn each step into
// small fp32 matrix products (tile_product) and skip tiles that are masked as a whole. Query tiles keep a running maximum m and
// sum l per row; when a tile raises m, what was summed so far is scaled by exp(m_old - m_new).
// Parallel: forward over (sequence, query head, query tile); backward over (sequence, key/value head), whose task owns dk, dv
// and the dq of its query heads, so there are no atomics and the bits do not depend on the number of threads.
// With bf16 numbers and a matrix unit, the products are done there: attention_bf16.h.
// Cost: forward 2, backward 5 products of 2 T^2/2 HS FLOPs per head. Memory: scratch for one task per thread.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../math.h"
#include "../ops.h"
#include "attention_bf16.h"
#include "attention_shape.h"

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

inline real score(const AttentionShape& a, const floatX* qkv, const real* slopes, int b, int h, int t, int j) {
    const real s = a.scale * dot(qkv + a.query(b, t, h), qkv + a.key(b, j, h / a.group()), a.HS);
    return slopes ? s + slopes[h] * (j - t) : s;
}

inline void attention_forward(floatX* out, real* lse, const floatX* qkv, const real* slopes, const int* doc_start,
                              const AttentionShape& a, real* scratch /*(B, NH, T)*/) {
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < a.B; b++)
        for (int h = 0; h < a.NH; h++) {
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
        }
}

inline void attention_backward(floatX* dqkv, const floatX* dout, const floatX* out, const real* lse, const floatX* qkv,
                               const real* slopes, const int* doc_start, const AttentionShape& a,
                               real* scratch /*(B, T, NH + 2*NKV, HS)*/) {
    real* d = scratch;
    const size_t n = (size_t)a.B * a.T * a.row();
    std::fill(d, d + n, real(0));
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < a.B; b++)
        for (int g = 0; g < a.NKV; g++)
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
    for (size_t i = 0; i < n; i++) dqkv[i] = (floatX)d[i];
}

}  // namespace plain

// ---- tiles -----------------------------------------------------------------------------------------------------------------
namespace detail {

constexpr int tile = 64;                              // queries and keys of a tile
constexpr int vector_lanes = 64 / (int)sizeof(real);  // one 64-byte vector; the compiler splits it where the CPU has less
typedef real vector_t __attribute__((vector_size(64)));
static_assert(tile % vector_lanes == 0, "tiles are whole vectors");

inline int padded(int n) { return (n + vector_lanes - 1) / vector_lanes * vector_lanes; }

// R rows and W vectors of c (+)= a b, held in registers. a(i, k) = a[i * a_row + k * a_col] is broadcast.
template <int R, int W>
inline void register_tile(real* c, int c_row, const real* a, int a_row, int a_col, const real* b, int b_row, int K, bool add) {
    vector_t sum[R][W] = {};
    if (add)
        for (int i = 0; i < R; i++)
            for (int w = 0; w < W; w++) sum[i][w] = *(const vector_t*)(c + i * c_row + w * vector_lanes);
    for (int k = 0; k < K; k++)
        for (int i = 0; i < R; i++) {
            const real x = a[i * a_row + k * a_col];
            for (int w = 0; w < W; w++) sum[i][w] += x * *(const vector_t*)(b + k * b_row + w * vector_lanes);
        }
    for (int i = 0; i < R; i++)
        for (int w = 0; w < W; w++) *(vector_t*)(c + i * c_row + w * vector_lanes) = sum[i][w];
}

// c (M, N) = a b, or c += a b; N and the rows of b and c are padded to whole vectors and 64-byte aligned.
inline void tile_product(real* c, int c_row, const real* a, int a_row, int a_col, const real* b, int b_row, int M, int N, int K,
                         bool add) {
    constexpr int R = 4, W = 4;
    const int vectors = padded(N) / vector_lanes;
    for (int w = 0; w < vectors;) {
        const int left = vectors - w, width = left >= W ? W : left >= 2 ? 2 : 1;
        real* cw = c + w * vector_lanes;
        const real* bw = b + w * vector_lanes;
        for (int i = 0; i < M;) {
            const int rows = M - i >= R ? R : 1;
            const real* ai = a + i * a_row;
            real* ci = cw + i * c_row;
            if (rows == R && width == W) register_tile<R, W>(ci, c_row, ai, a_row, a_col, bw, b_row, K, add);
            else if (rows == R && width == 2) register_tile<R, 2>(ci, c_row, ai, a_row, a_col, bw, b_row, K, add);
            else if (rows == R) register_tile<R, 1>(ci, c_row, ai, a_row, a_col, bw, b_row, K, add);
            else if (width == W) register_tile<1, W>(ci, c_row, ai, a_row, a_col, bw, b_row, K, add);
            else if (width == 2) register_tile<1, 2>(ci, c_row, ai, a_row, a_col, bw, b_row, K, add);
            else register_tile<1, 1>(ci, c_row, ai, a_row, a_col, bw, b_row, K, add);
            i += rows;
        }
        w += width;
    }
}

// Copies rows of a head into a padded tile (rows, padded HS); the padding is zero.
inline void load_tile(real* to, const floatX* from, size_t stride, int rows, int HS) {
    const int width = padded(HS);
    for (int i = 0; i < rows; i++) {
        for (int c = 0; c < HS; c++) to[i * width + c] = (real)from[i * stride + c];
        std::fill(to + i * width + HS, to + (i + 1) * width, real(0));
    }
}

// The same, transposed: (HS, tile). Columns past `rows` are zero.
inline void load_tile_transposed(real* to, const floatX* from, size_t stride, int rows, int HS) {
    for (int c = 0; c < HS; c++) {
        for (int i = 0; i < rows; i++) to[c * tile + i] = (real)from[i * stride + c];
        std::fill(to + c * tile + rows, to + (c + 1) * tile, real(0));
    }
}

// Turns s = q k^T of a tile into scores: scale, slope, and -inf where the mask forbids. Columns past `keys` are -inf.
inline void finish_scores(real* s, int t0, int rows, int j0, int keys, real scale, real slope,
                          const int* doc_start /*of t0, or null*/) {
    const real minus_infinity = -std::numeric_limits<real>::infinity();
    for (int i = 0; i < rows; i++) {
        real* row = s + i * tile;
        const int t = t0 + i;
        for (int j = 0; j < tile; j++) row[j] = scale * row[j] + slope * (real)(j0 + j - t);
        const int end = std::min(keys, t - j0 + 1), begin = doc_start ? std::max(0, doc_start[i] - j0) : 0;
        for (int j = std::max(0, end); j < tile; j++) row[j] = minus_infinity;
        for (int j = 0; j < std::min(begin, (int)tile); j++) row[j] = minus_infinity;
    }
}

struct ForwardScratch {
    real *q, *k, *v, *s, *o;
    static size_t size(int HS) { return (size_t)tile * (3 * padded(HS) + tile) + (size_t)padded(HS) * tile; }
    ForwardScratch(real* p, int HS) {
        q = p, v = q + tile * padded(HS), o = v + tile * padded(HS), s = o + tile * padded(HS), k = s + tile * tile;
    }
};

inline void forward_tile(floatX* out, real* lse, const floatX* qkv, const real* slopes, const int* doc_start,
                         const AttentionShape& a, int b, int h, int t0, const ForwardScratch& m) {
    const int rows = std::min((int)tile, a.T - t0), width = padded(a.HS), g = h / a.group();
    const int* docs = doc_start ? doc_start + b * a.T + t0 : nullptr;
    const real slope = slopes ? slopes[h] : real(0), minus_infinity = -std::numeric_limits<real>::infinity();
    real top[tile], sum[tile];
    std::fill(top, top + tile, minus_infinity);
    std::fill(sum, sum + tile, real(0));
    std::fill(m.o, m.o + rows * width, real(0));
    load_tile(m.q, qkv + a.query(b, t0, h), a.row(), rows, a.HS);
    // doc_start does not decrease within a sequence, so the first row sees furthest back.
    for (int j0 = docs ? docs[0] / tile * tile : 0; j0 < t0 + rows; j0 += tile) {
        const int keys = std::min((int)tile, a.T - j0);
        load_tile_transposed(m.k, qkv + a.key(b, j0, g), a.row(), keys, a.HS);
        load_tile(m.v, qkv + a.value(b, j0, g), a.row(), keys, a.HS);
        tile_product(m.s, tile, m.q, width, 1, m.k, tile, rows, tile, a.HS, false);
        finish_scores(m.s, t0, rows, j0, keys, a.scale, slope, docs);
        for (int i = 0; i < rows; i++) {
            real *s = m.s + i * tile, *o = m.o + i * width;
            real highest = top[i];
            for (int j = 0; j < tile; j++) highest = s[j] > highest ? s[j] : highest;
            const real shift = highest == minus_infinity ? real(0) : highest;  // a row that sees nothing of this tile
            const real rescale = exp_real(top[i] - shift);
            real part[vector_lanes] = {};
            for (int j = 0; j < tile; j += vector_lanes)
                for (int l = 0; l < vector_lanes; l++) part[l] += s[j + l] = exp_real(s[j + l] - shift);
            sum[i] *= rescale;
            for (int l = 0; l < vector_lanes; l++) sum[i] += part[l];
            for (int c = 0; c < width; c++) o[c] *= rescale;
            top[i] = highest;
        }
        tile_product(m.o, width, m.s, tile, 1, m.v, width, rows, width, keys, true);
    }
    for (int i = 0; i < rows; i++) {
        lse[a.statistic(b, t0 + i, h)] = top[i] + std::log(sum[i]);
        for (int c = 0; c < a.HS; c++) out[a.output(b, t0 + i, h) + c] = (floatX)(m.o[i * width + c] / sum[i]);
    }
}

struct BackwardScratch {
    real *q, *dout, *k, *kt, *vt, *dk, *dv, *p, *ds, *dq, *correction;
    static size_t size(int T, int HS) {
        return (size_t)padded(HS) * tile * 7 + 2 * (size_t)tile * tile + (size_t)(T + tile) * padded(HS) +
               (size_t)(T + tile) / vector_lanes * vector_lanes;
    }
    BackwardScratch(real* scratch, int T, int HS) {
        const size_t n = (size_t)padded(HS) * tile;
        real** const small[] = {&q, &dout, &k, &kt, &vt, &dk, &dv};
        for (real** slot : small) *slot = scratch, scratch += n;
        p = scratch, ds = p + tile * tile, dq = ds + tile * tile, correction = dq + (size_t)(T + tile) * padded(HS);
    }
};

// All gradients of key/value head g and its query heads in sequence b.
inline void backward_head(floatX* dqkv, const floatX* dout, const floatX* out, const real* lse, const floatX* qkv,
                          const real* slopes, const int* doc_start, const AttentionShape& a, int b, int g,
                          real* dkv /*(T, 2, padded HS)*/, const BackwardScratch& m) {
    const int width = padded(a.HS), T = a.T;
    const int* docs = doc_start ? doc_start + b * T : nullptr;
    std::fill(dkv, dkv + (size_t)T * 2 * width, real(0));
    for (int h = g * a.group(); h < (g + 1) * a.group(); h++) {
        const real slope = slopes ? slopes[h] : real(0);
        const real* lse_h = lse + a.statistic(b, 0, h);
        std::fill(m.dq, m.dq + (size_t)T * width, real(0));
        for (int t = 0; t < T; t++) m.correction[t] = dot(dout + a.output(b, t, h), out + a.output(b, t, h), a.HS);
        for (int j0 = 0; j0 < T; j0 += tile) {
            const int keys = std::min((int)tile, T - j0);
            load_tile(m.k, qkv + a.key(b, j0, g), a.row(), keys, a.HS);
            load_tile_transposed(m.kt, qkv + a.key(b, j0, g), a.row(), keys, a.HS);
            load_tile_transposed(m.vt, qkv + a.value(b, j0, g), a.row(), keys, a.HS);
            std::fill(m.dk, m.dk + tile * width, real(0));
            std::fill(m.dv, m.dv + tile * width, real(0));
            for (int t0 = j0; t0 < T; t0 += tile) {
                if (docs && docs[t0] >= j0 + tile) break;  // from here on, documents begin after this tile of keys
                const int rows = std::min((int)tile, T - t0);
                load_tile(m.q, qkv + a.query(b, t0, h), a.row(), rows, a.HS);
                load_tile(m.dout, dout + a.output(b, t0, h), (size_t)a.NH * a.HS, rows, a.HS);
                tile_product(m.p, tile, m.q, width, 1, m.kt, tile, rows, tile, a.HS, false);
                tile_product(m.ds, tile, m.dout, width, 1, m.vt, tile, rows, tile, a.HS, false);
                finish_scores(m.p, t0, rows, j0, keys, a.scale, slope, docs ? docs + t0 : nullptr);
                for (int i = 0; i < rows; i++) {
                    real *p = m.p + i * tile, *ds = m.ds + i * tile;
                    const real log_sum = lse_h[t0 + i], correction = m.correction[t0 + i];
                    for (int j = 0; j < tile; j++) {
                        p[j] = exp_real(p[j] - log_sum);
                        ds[j] = a.scale * p[j] * (ds[j] - correction);
                    }
                }
                tile_product(m.dv, width, m.p, 1, tile, m.dout, width, keys, width, rows, true);
                tile_product(m.dk, width, m.ds, 1, tile, m.q, width, keys, width, rows, true);
                tile_product(m.dq + (size_t)t0 * width, width, m.ds, tile, 1, m.k, width, rows, width, keys, true);
            }
            for (int j = 0; j < keys; j++)
                for (int c = 0; c < width; c++) {
                    dkv[((size_t)(j0 + j) * 2) * width + c] += m.dk[j * width + c];
                    dkv[((size_t)(j0 + j) * 2 + 1) * width + c] += m.dv[j * width + c];
                }
        }
        for (int t = 0; t < T; t++)
            for (int c = 0; c < a.HS; c++) dqkv[a.query(b, t, h) + c] = (floatX)m.dq[(size_t)t * width + c];
    }
    for (int t = 0; t < T; t++)
        for (int c = 0; c < a.HS; c++) {
            dqkv[a.key(b, t, g) + c] = (floatX)dkv[(size_t)t * 2 * width + c];
            dqkv[a.value(b, t, g) + c] = (floatX)dkv[((size_t)t * 2 + 1) * width + c];
        }
}

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline void attention_forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const real* slopes, const int* doc_start,
                              int B, int T, int NH, int NKV, int HS, real scale) {
    const AttentionShape a{B, T, NH, NKV, HS, scale};
    if (ctx.plain) {
        plain::attention_forward(out, lse, qkv, slopes, doc_start, a, (real*)ctx.scratch(sizeof(real) * (size_t)B * NH * T));
        return;
    }
    if constexpr (std::is_same<floatX, bf16>::value)
        if (ctx.unit) return detail::bf16_attention::forward(ctx, out, lse, qkv, slopes, doc_start, a);
    const size_t per_thread = (detail::ForwardScratch::size(HS) + 63) / 64 * 64;
    real* scratch = (real*)ctx.scratch(sizeof(real) * per_thread * ctx.threads);
    const int tiles = (T + detail::tile - 1) / detail::tile, tasks = B * NH * tiles;
#pragma omp parallel for schedule(dynamic) num_threads(ctx.threads)
    for (int task = 0; task < tasks; task++) {
        const detail::ForwardScratch m(scratch + per_thread * omp_get_thread_num(), HS);
        // Long rows first: the last query tile has the most keys, and a long task at the end would leave threads waiting.
        const int t0 = (tiles - 1 - task / (B * NH)) * detail::tile;
        detail::forward_tile(out, lse, qkv, slopes, doc_start, a, task / NH % B, task % NH, t0, m);
    }
}

inline void attention_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const floatX* out, const real* lse,
                               const floatX* qkv, const real* slopes, const int* doc_start, int B, int T, int NH, int NKV,
                               int HS, real scale) {
    const AttentionShape a{B, T, NH, NKV, HS, scale};
    if (ctx.plain) {
        plain::attention_backward(dqkv, dout, out, lse, qkv, slopes, doc_start, a,
                                  (real*)ctx.scratch(sizeof(real) * (size_t)B * T * a.row()));
        return;
    }
    if constexpr (std::is_same<floatX, bf16>::value)
        if (ctx.unit) return detail::bf16_attention::backward(ctx, dqkv, dout, out, lse, qkv, slopes, doc_start, a);
    const size_t dkv_size = (size_t)T * 2 * detail::padded(HS);
    const size_t per_thread = (detail::BackwardScratch::size(T, HS) + dkv_size + 63) / 64 * 64;
    real* scratch = (real*)ctx.scratch(sizeof(real) * per_thread * ctx.threads);
#pragma omp parallel for schedule(dynamic) num_threads(ctx.threads)
    for (int task = 0; task < B * NKV; task++) {
        real* mine = scratch + per_thread * omp_get_thread_num();
        const detail::BackwardScratch m(mine + dkv_size, T, HS);
        detail::backward_head(dqkv, dout, out, lse, qkv, slopes, doc_start, a, task / NKV, task % NKV, mine, m);
    }
}

inline std::string attention_limits(int) { return ""; }

inline void attention_decode(Ctx& ctx, floatX* out, floatX* keys, floatX* values, const floatX* qkv, const real* slopes, int B,
                             int t, int P, int NH, int NKV, int HS, real scale) {
    const int group = NH / NKV, row = NH + 2 * NKV;
    real* scores = (real*)ctx.scratch(sizeof(real) * (size_t)B * NH * (t + 1));
#pragma omp parallel for collapse(2) schedule(static)
    for (int b = 0; b < B; b++)
        for (int g = 0; g < NKV; g++) {
            const auto cached = [&](floatX* cache, int j) { return cache + (((size_t)b * P + j) * NKV + g) * HS; };
            const floatX* token = qkv + (size_t)b * row * HS;
            std::copy_n(token + (size_t)(NH + g) * HS, HS, cached(keys, t));
            std::copy_n(token + (size_t)(NH + NKV + g) * HS, HS, cached(values, t));
            for (int h = g * group; h < (g + 1) * group; h++) {
                real* p = scores + ((size_t)b * NH + h) * (t + 1);
                real top = -std::numeric_limits<real>::infinity(), sum = 0;
                for (int j = 0; j <= t; j++) {
                    p[j] = scale * dot(token + (size_t)h * HS, cached(keys, j), HS);
                    if (slopes) p[j] += slopes[h] * (j - t);
                    top = std::max(top, p[j]);
                }
                for (int j = 0; j <= t; j++) sum += p[j] = exp_real(p[j] - top);
                for (int c = 0; c < HS; c++) {
                    real o = 0;
                    for (int j = 0; j <= t; j++) o += p[j] * (real)cached(values, j)[c];
                    out[((size_t)b * NH + h) * HS + c] = (floatX)(o / sum);
                }
            }
        }
}

}  // namespace cpu
