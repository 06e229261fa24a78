// Flash attention on a matrix unit, in bf16 or fp32: tiles of 64 queries and 64 keys. Formulas are in attention.h.
//
// Scores are computed transposed, with keys as rows and queries as columns: s^T = K Q^T. A query's maximum and sum then
// accumulate in vectors of queries, without horizontal sums, and P^T can serve as both operands: its rows unchanged (left),
// and packed (right). Scores and sums over keys are stored in stripes of few queries, so that a tile's keys and values are
// multiplied with them from the L1 cache.
//   forward   s^T = K Q^T        o^T += V^T P^T
//   backward  s^T = K Q^T        dp^T = V dO^T        dv += P^T dO        dk += dS^T Q        dq^T += K^T dS^T
// A query tile keeps a running maximum m and sum l per query; when a tile of keys raises m by more than a threshold, earlier
// sums are scaled by exp(m_old - m_new). Fully masked tiles are skipped, and so is a quarter of each diagonal tile. Every
// operand that is used more than once is packed once per head: left operands as rows of tiles of 64, right operands in the
// unit's packed layout. Rows beyond T and elements beyond the head size are zero. For a bf16 unit, P and dS are rounded to
// bf16, once each, as on a GPU; for an fp32 unit they stay in fp32, and other operands are widened when packed. Sums, softmax
// and the running maximum are fp32.
// Parallelism: forward over (sequence, query head, tile of queries) after keys and values are packed; backward over (sequence,
// key/value head), where a task owns dk, dv and the dq of its query heads, or over query heads or their tiles if there are too
// few tasks. There are no atomics, and the bits do not depend on the number of threads.
// Cost: forward 2, backward 5 products of 2 T^2/2 HS FLOPs per head. Bound by the matrix unit: the only other work is
// exponentials and roundings of T^2/2 elements per head, and with a soft cap as many tanh. Memory: scratch for one task per
// thread.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../base/math.h"
#include "../ops.h"
#include "../shapes.h"
#include "ctx.h"
#include "packing.h"
#include "parallel.h"
#include "rope.h"
#include "vectors.h"

#if CPU_FAST_PATHS

namespace cpu {
namespace detail {
namespace flash {

constexpr int tile = 64;          // queries or keys per tile
constexpr int most_columns = 64;  // maximum columns of a head that are stored at once

// Calls f with the number n of queries in a stripe: one column of tiles, or as many as stay in registers.
template <class E, class F>
void with_stripe(const MatrixUnit<E>& unit, F f) {
    if (unit.tiles) f(std::integral_constant<int, 16>());
    else f(std::integral_constant<int, 32>());
}

inline int tiles_of(int T) { return ceil_div(T, tile); }
// Whether these functions support the shape: no dropout, and, if only some rows are queries, these start with a tile.
inline bool takes(const AttentionShape& a) { return a.dropout.rate == 0 && a.first % tile == 0; }
inline int padded_size(int HS) { return round_up(HS, k_step<floatX>); }
inline int rows_at(const AttentionShape& a, int t0) { return std::min((int)tile, a.T - t0); }

// Prefetches the rows of a head in the tile at t0; x is the first one.
inline Prefetch prefetch_rows(const AttentionShape& a, const floatX* x, size_t stride, int t0) {
    return t0 < a.T ? Prefetch(x, stride, rows_at(a, t0), a.HS) : Prefetch();
}
// True if rows of a head at `to` are written with non-temporal stores: whole cache lines, too far apart for hardware prefetch.
template <class E>
bool streams(const MatrixUnit<E>& unit, const floatX* to, size_t stride, int HS) {
    return detail::streams(unit, to, HS * sizeof(floatX)) && stride * sizeof(floatX) % 64 == 0;
}

// ---- packing of a tile: 64 rows of a head, of which `rows` are valid, HS elements each, a stride apart ---------------------
// Left operand (64, H) = rows.
template <class E>
void pack_left_rows(E* to, const floatX* from, size_t stride, int rows, int HS, int H) {
    for (int r = 0; r < tile; r++) {
        E* row = to + (size_t)r * H;
        const floatX* x = from + (size_t)r * stride;
        const int n = r < rows ? HS : 0;
        if constexpr (as_stored_in<E>) std::copy_n(x, n, row);
        else for_vectors(n, [=](int c, auto there) { store(row + c, load(x + c, there), there); });
        std::fill(row + n, row + H, E(0));
    }
}
// The rows to be packed: in place if they fill the tile, else a zero-padded copy.
struct Rows64 {
    const floatX* x;
    size_t stride;
    Rows64(floatX* copy, const floatX* from, size_t from_stride, int rows, int HS, int H) : x(from), stride(from_stride) {
        if (rows == tile && HS == H) return;
        pack_left_rows(copy, from, from_stride, rows, HS, H);
        x = copy;
        stride = (size_t)H;
    }
};
// Left operand (H, 64) = rows^T; right operands (H, 64) = rows^T and (64, H) = rows.
template <class E>
void pack_left_transposed(const MatrixUnit<E>& unit, E* to, const Rows64& rows, int H) {
    detail::pack_left_transposed(unit, to, tile, rows.x, rows.stride, H, tile, tile);
}
template <class E>
void pack_transposed(const MatrixUnit<E>& unit, E* to, const Rows64& rows, int H) {
    detail::pack_transposed(unit, to, 16 * (size_t)H, rows.x, rows.stride, tile, H);
}
template <class E>
void pack_rows(const MatrixUnit<E>& unit, E* to, const Rows64& rows, int H) {
    detail::pack_rows(unit, to, 16 * (size_t)tile, rows.x, rows.stride, H, tile, tile);
}
// The last step of a gradient's rows: inverse rotation (rope.h), if any, of values rounded as if they were stored first.
struct Back {
    const Rope* rotation;  // or null; heads of at most most_columns
    size_t first;          // row of the batch
    void turn(float* row, int i, int HS) const {
        if (!rotation) return;
        for_vectors(HS, [=](int c, auto) { store(row + c, as_stored((const floatX*)nullptr, load(row + c))); });
        rotate(row, rotation->angles((int)first + i), rotation->rotated / 2, -1.0f);
    }
};

// Stores rows of a head from fp32 sums in stripes of (H, queries), each row times its factor.
template <int stripe, class E>
void store_transposed(const MatrixUnit<E>& unit, floatX* to, size_t stride, const float* sums, const float* factors, int rows,
                      int HS, int H, Back back = {}) {
    const bool streamed = streams(unit, to, stride, HS);
    alignas(64) float block[16 * most_columns];
    for (int t0 = 0; t0 < rows; t0 += 16)
        for (int first = 0; first < HS; first += most_columns) {
            const int columns = std::min((int)most_columns, HS - first);
            for (int c = 0; c < columns; c += 16) {
                const float* from = sums + (size_t)(t0 / stripe * stripe) * H + (size_t)(first + c) * stripe + t0 % stripe;
                unit.layouts.transpose_words((uint32_t*)(block + c), most_columns, (const uint32_t*)from, (size_t)stripe, 16);
            }
            for (int t = t0; t < std::min(rows, t0 + 16); t++) {
                float* const row = block + (t - t0) * most_columns;
                const float factor = factors[t];
                back.turn(row, t, HS);
                put(streamed, to + (size_t)t * stride + first, columns, [=](int c, auto) { return factor * load(row + c); });
            }
        }
}

// ---- products of a tile of keys and one of queries -------------------------------------------------------------------------
// On the diagonal, where queries and keys are the same rows, the first half of the queries sees no key of the second half.
constexpr int half = tile / 2;
inline int keys_seen(bool diagonal, int t /*the first query*/) { return diagonal && t < half ? half : tile; }

// s (keys, n queries) = keys queries^T.
template <class E>
void score(const MatrixUnit<E>& unit, float* s, const E* keys /*(64, H)*/, const E* queries /*packed (H, n)*/, int H, int n,
           int seen) {
    unit.product(s, n, keys, H, queries, H, seen, n, H, false, Streamed::neither, nullptr);
}
// o (H, n queries) = left p, or += left p.
template <class E>
void sum_over_keys(const MatrixUnit<E>& unit, float* o, const E* left /*(H, 64 keys)*/,
                   const E* p /*packed (64 keys, n queries)*/, int H, int n, int seen, bool add) {
    unit.product(o, n, left, tile, p, tile, H, n, seen, add, Streamed::neither, nullptr);
}
// o (64 keys, H) = p right, or += p right. On the diagonal, where query j is the first to see key j, o is set.
template <class E>
void sum_over_queries(const MatrixUnit<E>& unit, float* o, const E* p /*(64 keys, 64 queries)*/,
                      const E* right /*packed (64 queries, H)*/, int H, bool diagonal) {
    const int n = diagonal ? half : tile;
    for (int j = 0; j < tile; j += n)
        unit.product(o + (size_t)j * H, H, p + j * tile + j, tile, right + right_index<E>(j, 0, tile), tile, n, H, tile - j,
                     !diagonal, Streamed::neither, nullptr);
}

// ---- scores ----------------------------------------------------------------------------------------------------------------
// Caps s (`seen` keys, n queries) and scales it. In backward, dp becomes (1 - t^2) dp + t^2 correction / scale, so that scale
// dp - correction is multiplied by the derivative 1 - t^2, t = tanh(scale s / cap).
inline void cap_scores(float* s, float* dp /*or null*/, int n, int seen, const AttentionShape& a,
                       const float* correction /*(n)*/) {
    const float inner = (float)(a.scale / a.softcap), cap = (float)a.softcap, unscaled = (float)(1 / a.scale);
    for (int j = 0; j < seen; j++)
        for_vectors(n, [=](int t, auto) {
            const floats x = tanh_of(inner * load(s + j * n + t));
            store(s + j * n + t, cap * x);
            if (!dp) return;
            const floats d = load(dp + j * n + t);
            store(dp + j * n + t, d + x * x * (unscaled * load(correction + t) - d));
        });
}

inline float scale_after_cap(const AttentionShape& a) { return a.softcap > 0 ? 1.0f : (float)a.scale; }

// Masks s (`seen` keys from j0 on, n queries from t0 on): -inf where the mask forbids or no key exists; the tile has `keys`
// keys. With ALiBi slopes, also applies scale and slope. Returns the positive factor that is still to be applied.
inline float finish_scores(float* s, int n, int t0, int j0, int keys, int seen, float scale, const real* slope,
                           const int* doc_start /*of t0 or null*/) {
    const floats minus_infinity = floats{} - std::numeric_limits<float>::infinity();
    const int all_see /*of keys*/ = slope || doc_start ? 0 : std::min(keys, std::max(0, t0 - j0 + 1));
    for (int j = all_see; j < seen; j++)
        for_vectors(n, [=](int t, auto) {
            float* const at = s + j * n + t;
            const floats after = lane_numbers() + (float)(t0 + t - j0 - j);  // distance of each query from the key
            const floats score = slope ? scale * load(at) - (float)*slope * after : load(at);
            floats x = j < keys ? score : minus_infinity;
            x = after >= 0.0f ? x : minus_infinity;
            if (doc_start) x = load_words(doc_start + t) <= (uint32_t)(j0 + j) ? x : minus_infinity;
            store(at, x);
        });
    return slope ? 1.0f : scale;
}
// The first tile of keys that the query tile at t0 sees: documents start at docs[t], which does not decrease within a sequence,
// so the first row sees furthest back.
inline int first_keys(const int* docs /*of a sequence's queries, or null*/, const AttentionShape& a, int t0) {
    return docs ? docs[t0 - a.first] / tile * tile : 0;
}
// The document starts of the tile at t0; rows beyond T have none.
inline const int* documents_of(int* starts, const int* docs, const AttentionShape& a, int t0) {
    if (!docs) return nullptr;
    for (int t = 0; t < tile; t++) starts[t] = t0 + t < a.T ? docs[t0 - a.first + t] : 0;
    return starts;
}

// ---- forward ---------------------------------------------------------------------------------------------------------------
// Packed keys and values of all heads: (B, NKV, tiles, 2) of 64 H elements: keys as rows, values transposed.
template <class E>
struct KeysAndValues {
    const AttentionShape& a;
    E* memory;
    int H = padded_size(a.HS);
    static size_t bytes(const AttentionShape& a) {
        return (size_t)a.B * a.NKV * tiles_of(a.T) * 2 * tile * padded_size(a.HS) * sizeof(E);
    }
    E* keys(int b, int g, int j0) const {
        return memory + (((size_t)b * a.NKV + g) * tiles_of(a.T) + j0 / tile) * 2 * tile * H;
    }
    E* values_transposed(int b, int g, int j0) const { return keys(b, g, j0) + (size_t)tile * H; }
    void lay(const MatrixUnit<E>& unit, const floatX* kv, int b, int g, int j0, floatX* scratch /*(64, H)*/) const {
        const int rows = rows_at(a, j0);
        pack_left_rows(keys(b, g, j0), kv + a.key(b, j0, g), a.key_row(), rows, a.HS, H);
        pack_left_transposed(unit, values_transposed(b, g, j0),
                             Rows64(scratch, kv + a.value(b, j0, g), a.key_row(), rows, a.HS, H), H);
    }
};

template <class E>
struct ForwardMemory {
    float *s, *o;  // (64 keys, stripe), stripes of (H, queries)
    E *q, *p;      // packed (H, 64), (64 keys, stripe)
    floatX* rows;  // (64, H)
    static size_t bytes(int H) {
        return sizeof(float) * tile * (half + (size_t)H) + sizeof(E) * tile * ((size_t)H + half) + sizeof(floatX) * tile * H;
    }
    ForwardMemory(char* memory, int H) {
        s = (float*)memory;
        o = s + tile * half;
        q = (E*)(o + (size_t)H * tile);
        p = q + (size_t)tile * H;
        rows = (floatX*)(p + tile * half);
    }
};

// Writes rows k and k + 1 of 16 columns, from n on, of a packed right operand with 64 rows.
inline void put_rows(bf16* packed, int k, int n, floats first, floats second) {
    const words pairs = RoundedTwo(first, second).pairs();
    memcpy((void*)(packed + right_index<bf16>(k, n, tile)), &pairs, sizeof pairs);
}
inline void put_rows(float* packed, int k, int n, floats first, floats second) {
    store(packed + right_index<float>(k, n, tile), first);
    store(packed + right_index<float>(k + 1, n, tile), second);
}

// Stores two vectors in the unit's type.
inline void store_two(bf16* to, bf16* to_second, floats first, floats second) {
    const RoundedTwo both(first, second);
    both.store(to, to_second);
}
inline void store_two(float* to, float* to_second, floats first, floats second) {
    store(to, first);
    store(to_second, second);
}

// Packs exponentials of scores (`keys`, n queries), factor times s, relative to each query's `top`, into p, and adds their
// sums. A maximum that rose by more than `little` becomes the new top, to which sums and o (H, n) are rescaled; otherwise
// exponentials are at most e^8, which costs no accuracy, and the branch is well predicted. 16 queries at a time.
constexpr float little = 8;
template <int n, class E>
void softmax_stripe(const float* scores, E* p, float* out, float factor, float* top, float* sum, int H, int keys) {
    const floats minus_infinity = floats{} - std::numeric_limits<float>::infinity();
    for (int t = 0; t < n; t += lanes) {
        const float* s = scores + t;
        floats largest[4] = {minus_infinity, minus_infinity, minus_infinity, minus_infinity};
        for (int j = 0; j < keys; j += 4) {
            UNROLLED
            for (int i = 0; i < 4; i++) largest[i] = larger(load(s + (j + i) * n), largest[i]);
        }
        const floats highest = factor * larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
        const floats before = load(top + t), reference = highest > before + little ? highest : before;
        const floats shift = reference == minus_infinity ? floats{} : reference;  // a query without keys so far
        floats added = {};
        for (int j = 0; j < keys; j += 2) {
            const floats x = exp_for_rounding(factor * load(s + j * n) - shift),
                         y = exp_for_rounding(factor * load(s + (j + 1) * n) - shift);
            added += x + y;
            put_rows(p, j, t, x, y);
        }
        if (same_bits(before, reference)) {
            store(sum + t, load(sum + t) + added);
            continue;
        }
        const floats rescale = exp_for_rounding(before - shift);
        store(top + t, reference);
        store(sum + t, load(sum + t) * rescale + added);
        for (int c = 0; c < H; c++) {
            float* o = out + (size_t)c * n + t;
            store(o, load(o) * rescale);
        }
    }
}

// A tile of queries: sequence b, head h, first row t0.
struct QueryTile {
    int b, h, t0;
};

// Prefetches `prefetch` between its products.
template <int n, class E>
void forward_tile(const MatrixUnit<E>& unit, floatX* out, real* lse, const floatX* qkv, const real* slopes,
                  const int* doc_start, const AttentionShape& a, const KeysAndValues<E>& kv, QueryTile queries,
                  Prefetch prefetch, const ForwardMemory<E>& m) {
    const int b = queries.b, h = queries.h, t0 = queries.t0, rows = rows_at(a, t0), H = kv.H, g = h / a.group();
    int starts[tile];
    if (doc_start) doc_start += (size_t)b * a.queries();
    const int* docs = documents_of(starts, doc_start, a, t0);
    float top[tile], sum[tile] = {};
    std::fill(top, top + tile, -std::numeric_limits<float>::infinity());
    pack_transposed(unit, m.q, Rows64(m.rows, qkv + a.query(b, t0, h), a.row(), rows, a.HS, H), H);
    const int from = first_keys(doc_start, a, t0);
    std::fill(m.o, m.o + (size_t)H * tile, 0.0f);
    const int asked = ceil_div(prefetch.left(), ((t0 - from) / tile + 1) * (tile / n));
    for (int j0 = from; j0 < t0 + rows; j0 += tile) {
        for (int t = 0; t < tile; t += n) {
            prefetch.issue(asked);
            const int seen = keys_seen(j0 == t0, t);
            float* const o = m.o + (size_t)t * H;
            score(unit, m.s, kv.keys(b, g, j0), m.q + right_index<E>(0, t, H), H, n, seen);
            if (a.softcap > 0) cap_scores(m.s, nullptr, n, seen, a, nullptr);
            const float factor = finish_scores(m.s, n, t0 + t, j0, rows_at(a, j0), seen, scale_after_cap(a),
                                               slopes ? slopes + h : nullptr, docs ? docs + t : nullptr);
            softmax_stripe<n>(m.s, m.p, o, factor, top + t, sum + t, H, seen);
            sum_over_keys(unit, o, kv.values_transposed(b, g, j0), m.p, H, n, seen, true);
        }
    }
    for (int i = 0; i < rows; i++) lse[a.statistic(b, t0 + i, h)] = top[i] + std::log(sum[i]);
    for (float& x : sum) x = 1 / x;
    store_transposed<n>(unit, out + a.output(b, t0, h), (size_t)a.NH * a.HS, m.o, sum, rows, a.HS, H);
}

// ---- backward --------------------------------------------------------------------------------------------------------------
// A thread's buffers: operands of a key/value head and of one of its query heads, gradients, and tiles.
template <class E>
struct BackwardMemory {
    E *k, *kt, *v;           // (tiles, 64, H), (tiles, H, 64), (tiles, 64, H): left operands
    E *qt, *q, *dot, *dout;  // packed (H, 64), (64, H) of queries and of dout, per tile
    E *p, *ds, *ds_packed;
    float *s, *dp, *dq, *dkv[2], *correction, *lse;  // dq (tiles) stripes, dkv (tiles, 2, 64, H) of a query head, of several
    floatX* rows;
    // Memory of a head's operands and sums: of `sums` query heads the gradients of keys and values.
    static size_t head_bytes(const AttentionShape& a, int sums) {
        const size_t H = (size_t)padded_size(a.HS), n = (size_t)tiles_of(a.T) * tile, operand = n * H;
        const size_t of_queries = (n - (size_t)a.first) * H;
        return round_up(
            sizeof(E) * (3 * operand + 4 * of_queries) + sizeof(float) * (of_queries + 2 * operand * (size_t)sums + 2 * n), 64);
    }
    static size_t tiles_bytes(const AttentionShape& a) {
        const size_t small = (size_t)tile * tile, stripe = small / 2;
        return round_up(
            sizeof(E) * (2 * small + stripe) + sizeof(floatX) * tile * padded_size(a.HS) + sizeof(float) * 2 * stripe, 64);
    }
    // Operands of queries, and dq, have rows from a.first on; their pointers are the places of row 0.
    BackwardMemory(char* head, int sums, char* tiles, const AttentionShape& a) {
        const size_t H = (size_t)padded_size(a.HS), n = (size_t)tiles_of(a.T) * tile, small = (size_t)tile * tile;
        const size_t stripe = small / 2, operand = n * H, before = (size_t)a.first * H;
        E* x = (E*)head;
        for (E** p_operand : {&k, &kt, &v}) {
            *p_operand = x;
            x += operand;
        }
        for (E** p_operand : {&qt, &q, &dot, &dout}) {
            *p_operand = x - before;
            x += operand - before;
        }
        dq = (float*)x - before;
        dkv[0] = (float*)x + (operand - before);
        dkv[1] = dkv[0] + 2 * operand;  // if sums is 2
        correction = dkv[0] + 2 * operand * (size_t)sums;
        lse = correction + n;
        p = (E*)tiles;
        ds = p + small;
        ds_packed = ds + small;
        s = (float*)(ds_packed + stripe);
        dp = s + stripe;
        rows = (floatX*)(dp + stripe);
    }
};

struct BackwardTensors {
    floatX *dqkv, *dkv;  // dkv: of keys and values; dqkv unless they are apart
    const floatX *dout, *out;
    const real* lse;
    const floatX *qkv, *kv;
    const real* slopes;    // or null
    const int* doc_start;  // or null
    const Rope* rotation;  // or null
};

inline size_t key_gradients(const AttentionShape& a) { return (size_t)tiles_of(a.T) * 2 * tile * padded_size(a.HS); }

// p = exp(factor s - lse) and ds = p (scale dp - correction) for (`keys`, n queries from `first` on), rounded: columns of both
// (64 keys, 64 queries), and ds packed as well.
template <int n, class E>
void score_gradients(const BackwardMemory<E>& m, int first, float factor, const float* lse, const float* correction,
                     float scale, int keys) {
    const float *const s = m.s, *const dp = m.dp;
    E *const p_columns = m.p + first, *const ds_columns = m.ds + first, *const packed = m.ds_packed;
    for (int t = 0; t < n; t += lanes) {
        const floats log_sum = load(lse + t), subtract = load(correction + t);
        for (int j = 0; j < keys; j += 2) {
            floats p[2], ds[2];
            for (int i = 0; i < 2; i++) {
                const int from = (j + i) * n + t;
                p[i] = exp_for_rounding(factor * load(s + from) - log_sum);
                ds[i] = p[i] * (scale * load(dp + from) - subtract);
            }
            const int to = j * tile + t;
            store_two(p_columns + to, p_columns + to + tile, p[0], p[1]);
            store_two(ds_columns + to, ds_columns + to + tile, ds[0], ds[1]);
            put_rows(packed, j, t, ds[0], ds[1]);
        }
    }
}

// Query head h of sequence b: sets its gradient, and dkv, its contribution to the gradients of keys and values. Operands are
// packed when first used, and query gradients are stored after their last keys, so that memory access overlaps with the matrix
// unit.
template <int n, class E>
struct BackwardHead {
    const MatrixUnit<E>& unit;
    const BackwardTensors& x;
    const AttentionShape& a;
    const BackwardMemory<E>& m;
    float* dkv;
    int b, h;
    bool packs_keys;  // otherwise they are packed already
    int H = padded_size(a.HS);
    const int* docs = x.doc_start ? x.doc_start + (size_t)b * a.queries() : nullptr;
    Prefetch prefetches[5] = {};  // the next tile's rows of keys, values, queries, dout and out

    void pack_keys(int j0) {
        const int g = h / a.group(), rows = rows_at(a, j0);
        const size_t at = (size_t)j0 * H, key = a.key(b, j0, g), value = a.value(b, j0, g);
        pack_left_rows(m.k + at, x.kv + key, a.key_row(), rows, a.HS, H);
        detail::pack_left_transposed(unit, m.kt + at, tile, m.k + at, (size_t)H, H, tile, tile);
        pack_left_rows(m.v + at, x.kv + value, a.key_row(), rows, a.HS, H);
        prefetches[0] = prefetch_rows(a, x.kv + key + tile * a.key_row(), a.key_row(), j0 + tile);
        prefetches[1] = prefetch_rows(a, x.kv + value + tile * a.key_row(), a.key_row(), j0 + tile);
    }
    void pack_queries(int t0) {
        const int rows = rows_at(a, t0);
        const size_t at = (size_t)t0 * H, width = (size_t)a.NH * a.HS;
        const floatX *const q = x.qkv + a.query(b, t0, h), *const dout = x.dout + a.output(b, t0, h),
                            *const out = x.out + a.output(b, t0, h);
        const Rows64 queries(m.rows, q, a.row(), rows, a.HS, H);
        pack_transposed(unit, m.qt + at, queries, H);
        pack_rows(unit, m.q + at, queries, H);
        const Rows64 gradients(m.rows, dout, width, rows, a.HS, H);
        pack_transposed(unit, m.dot + at, gradients, H);
        pack_rows(unit, m.dout + at, gradients, H);
        for (int i = 0; i < tile; i++) {
            const bool there = i < rows;
            m.lse[t0 + i] = there ? (float)x.lse[a.statistic(b, t0 + i, h)] : 0.0f;
            m.correction[t0 + i] = there ? (float)a.scale * inner_product(dout + i * width, out + i * width, a.HS) : 0.0f;
        }
        prefetches[2] = prefetch_rows(a, q + tile * a.row(), a.row(), t0 + tile);
        prefetches[3] = prefetch_rows(a, dout + tile * width, width, t0 + tile);
        prefetches[4] = prefetch_rows(a, out + tile * width, width, t0 + tile);
    }

    // Prefetches a few rows before each product.
    void issue_prefetches() {
        for (Prefetch& rows : prefetches) rows.issue(n / 2);
    }
    // Adds the contributions of the key tile at j0 and the query tile at t0 to the gradients of keys and values, of queries, or
    // of all.
    void add(int j0, int t0, bool to_keys, bool to_queries) {
        const bool diagonal = j0 == t0, first = j0 == first_keys(docs, a, t0);  // the first tile of keys for these queries
        const size_t keys = (size_t)j0 * H, queries = (size_t)t0 * H;
        const float scale = (float)a.scale;
        int starts[tile];
        const int* docs_here = documents_of(starts, docs, a, t0);
        for (int t = 0; t < tile; t += n) {
            const int seen = keys_seen(diagonal, t);
            const size_t stripe = queries + right_index<E>(0, t, H);
            issue_prefetches();
            score(unit, m.s, m.k + keys, m.qt + stripe, H, n, seen);
            issue_prefetches();
            score(unit, m.dp, m.v + keys, m.dot + stripe, H, n, seen);
            if (a.softcap > 0) cap_scores(m.s, m.dp, n, seen, a, m.correction + t0 + t);
            const float factor = finish_scores(m.s, n, t0 + t, j0, rows_at(a, j0), seen, scale_after_cap(a),
                                               x.slopes ? x.slopes + h : nullptr, docs_here ? docs_here + t : nullptr);
            issue_prefetches();
            score_gradients<n>(m, t, factor, m.lse + t0 + t, m.correction + t0 + t, scale, seen);
            if (!to_queries) continue;
            issue_prefetches();
            sum_over_keys(unit, m.dq + (size_t)(t0 + t) * H, m.kt + keys, m.ds_packed, H, n, seen, !first);
        }
        if (!to_keys) return;
        float *const dk = dkv + 2 * keys, *const dv = dk + (size_t)tile * H;
        sum_over_queries(unit, dv, m.p, m.dout + queries, H, diagonal);
        sum_over_queries(unit, dk, m.ds, m.q + queries, H, diagonal);
    }
    void store_query_gradients(int t0) {
        float ones[tile];
        std::fill(ones, ones + tile, 1.0f);
        store_transposed<n>(unit, x.dqkv + a.query(b, t0, h), a.row(), m.dq + (size_t)t0 * H, ones, rows_at(a, t0), a.HS, H,
                            {x.rotation, (size_t)b * a.T + t0});
    }
    // Calls f(t0) for the tiles of queries that see the tile of keys at j0. Keys before all queries have no diagonal tile,
    // which would set their gradients.
    template <class F>
    void for_each_query_tile(int j0, F f) {
        if (j0 < a.first) std::fill_n(dkv + 2 * (size_t)j0 * H, 2 * (size_t)tile * H, 0.0f);
        for (int t0 = std::max(j0, a.first); t0 < a.T && first_keys(docs, a, t0) <= j0; t0 += tile) f(t0);
    }
    void run() {
        for (int j0 = 0; j0 < a.T; j0 += tile) {
            if (packs_keys) pack_keys(j0);
            for_each_query_tile(j0, [&](int t0) {
                if (j0 == first_keys(docs, a, t0)) pack_queries(t0);
                add(j0, t0, true, true);
                if (t0 == j0) store_query_gradients(t0);  // all keys of these queries are done
            });
        }
    }
    // The gradients of one tile's keys and values, then of its queries, when all tiles are packed. Every sum has the same order
    // as in run(), but scores and their gradients are computed twice: 7 products instead of 5.
    void run_tile(int at) {
        for_each_query_tile(at, [&](int t0) { add(at, t0, true, false); });
        if (at < a.first) return;
        for (int j0 = first_keys(docs, a, at); j0 <= at; j0 += tile) add(j0, at, false, true);
        store_query_gradients(at);
    }
};

// sum += x.
inline void add_to(float* sum, const float* x, size_t n) {
    INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < n; i++) sum[i] += x[i];
}

// Stores dkv (2, 64, H) of the tile at j0.
template <class E>
void store_key_gradients(const MatrixUnit<E>& unit, floatX* out, float* dkv, const Rope* rotation, const AttentionShape& a,
                         int b, int g, int j0) {
    const int H = padded_size(a.HS);
    for (const bool values : {false, true}) {
        floatX* const to = out + (values ? a.value(b, j0, g) : a.key(b, j0, g));
        const bool streamed = streams(unit, to, a.key_row(), a.HS);
        for (int j = 0; j < rows_at(a, j0); j++) {
            float* const row = dkv + (size_t)(values * tile + j) * H;
            if (!values) Back{rotation, (size_t)b * a.T + j0}.turn(row, j, a.HS);
            put(streamed, to + (size_t)j * a.key_row(), a.HS, [=](int c, auto) { return load(row + c); });
        }
    }
}

// Calls f(the unit that multiplies floatX); attention has no unit that splits fp32 into bf16 parts.
template <class F>
void on_unit(const Ctx& ctx, F f) {
    std::visit(
        [&](const auto* unit) {
            if constexpr (parts<typename std::decay_t<decltype(*unit)>::Element> == 1) f(*unit);
            else fail("attention has no %s in fp32", unit->name);
        },
        ctx.attention);
}

// ---- the ops ---------------------------------------------------------------------------------------------------------------
template <class E>
struct ForwardPlan {
    size_t shared, per_thread, bytes;
    ForwardPlan(const Ctx& ctx, const AttentionShape& a)
        : shared(round_up(KeysAndValues<E>::bytes(a), 64)),
          per_thread(round_up(ForwardMemory<E>::bytes(padded_size(a.HS)), 64)),
          bytes(shared + per_thread * (size_t)ctx.threads) {}
};

template <class E>
void forward(Ctx& ctx, const MatrixUnit<E>& unit, floatX* out, real* lse, const floatX* qkv, const floatX* key_rows,
             const real* slopes, const int* doc_start, const AttentionShape& a) {
    const int tiles = tiles_of(a.T), query_tiles = tiles - a.first / tile, H = padded_size(a.HS);
    const ForwardPlan<E> plan(ctx, a);
    const size_t shared = plan.shared, per_thread = plan.per_thread;
    char* memory = (char*)ctx.scratch(plan.bytes);
    const KeysAndValues<E> kv{a, (E*)memory};
    const int tasks = a.B * a.NH * query_tiles;
    // A head's last tile, which has the most keys, comes first: a long task at the end would leave threads idle.
    const auto queries_of = [&](int task) {
        const int head = task / query_tiles;
        return QueryTile{head / a.NH, head % a.NH, (tiles - 1 - task % query_tiles) * tile};
    };
    Team::run(ctx.threads, [&](Team::Member& me) {
        const ForwardMemory<E> m(memory + shared + per_thread * (size_t)me.number, H);
        me.share(a.B * a.NKV * tiles, [&](int64_t i) {
            const int task = (int)i;
            kv.lay(unit, key_rows, task / tiles / a.NKV, task / tiles % a.NKV, task % tiles * tile, m.rows);
        });
        unit.begin();
        me.share(tasks, [&](int64_t i) {
            const int task = (int)i;
            const QueryTile next = queries_of(std::min(task + 1, tasks - 1));  // likely this thread's next task
            const Prefetch prefetch = prefetch_rows(a, qkv + a.query(next.b, next.t0, next.h), a.row(), next.t0);
            with_stripe(unit, [&](auto stripe) {
                forward_tile<stripe>(unit, out, lse, qkv, slopes, doc_start, a, kv, queries_of(task), prefetch, m);
            });
            fence();
        });
        unit.end();
    });
}

// A task is a key/value head with its query heads, which share its operands. If these are too few for the threads, it is a
// single query head; if those are too few as well, one tile of it: its keys with all later queries, and its queries with all
// earlier keys, so that all tiles take the same time. The contributions of query heads are added in their order, so the bits do
// not depend on this choice.
template <class E>
struct BackwardPlan {
    bool by_tiles, apart;
    int sums;                                        // of BackwardMemory
    size_t head_bytes, tiles_bytes, at_once, bytes;  // at_once: heads in memory
    BackwardPlan(const Ctx& ctx, const AttentionShape& a) {
        const int heads = a.B * a.NH;
        // Tiles cost about half as much again; with whole heads, the busiest thread would take longer still.
        by_tiles = tiles_of(a.T) > 1 && 2 * ceil_div(heads, ctx.threads) * ctx.threads > 3 * heads;
        apart = by_tiles || (a.group() > 1 && a.B * a.NKV < 2 * ctx.threads);
        sums = apart ? 0 : a.group() > 1 ? 2 : 1;
        head_bytes = BackwardMemory<E>::head_bytes(a, sums);
        tiles_bytes = BackwardMemory<E>::tiles_bytes(a);
        at_once = (size_t)(by_tiles ? heads : ctx.threads);
        bytes = head_bytes * at_once + tiles_bytes * (size_t)ctx.threads +
                (apart ? (size_t)heads * key_gradients(a) * sizeof(float) : 0);
    }
};

template <class E>
void backward(Ctx& ctx, const MatrixUnit<E>& unit, const BackwardTensors& x, const AttentionShape& a) {
    const int H = padded_size(a.HS), group = a.group(), kv_heads = a.B * a.NKV, tiles = tiles_of(a.T);
    const int heads = a.B * a.NH;
    const BackwardPlan<E> plan(ctx, a);
    const bool by_tiles = plan.by_tiles, apart = plan.apart;
    const size_t n = key_gradients(a);
    char* const memory = (char*)ctx.scratch(plan.bytes);
    char* const tiles_memory = memory + plan.head_bytes * plan.at_once;
    // (B, NH, tiles, 2, 64, H), if stored separately
    float* const summands = (float*)(tiles_memory + plan.tiles_bytes * (size_t)ctx.threads);
    Team::run(ctx.threads, [&](Team::Member& me) {
        const auto memory_of = [&](int head) {
            return BackwardMemory<E>(memory + plan.head_bytes * (size_t)head, plan.sums,
                                     tiles_memory + plan.tiles_bytes * (size_t)me.number, a);
        };
        const auto on_head = [&](const BackwardMemory<E>& m, int head, float* dkv, bool packs_keys, auto f) {
            with_stripe(unit, [&](auto stripe) {
                f(BackwardHead<stripe, E>{unit, x, a, m, dkv, head / a.NH, head % a.NH, packs_keys});
            });
        };
        const auto whole_head = [&](const BackwardMemory<E>& mine, int head, float* dkv, bool packs_keys) {
            on_head(mine, head, dkv, packs_keys, [](auto of_head) { of_head.run(); });
        };
        // f(a head, the first row of a tile), for all tiles.
        const auto on_tiles = [&](auto f) {
            me.share(heads * tiles, [&](int64_t task) {
                const int head = (int)task / tiles, at = (int)task % tiles * tile;
                on_head(memory_of(head), head, summands + (size_t)head * n, true, [=](auto of_head) { f(of_head, at); });
                fence();
            });
        };
        unit.begin();
        if (apart) {
            if (by_tiles) {
                on_tiles([](auto& head, int at) {
                    head.pack_keys(at);
                    if (at >= head.a.first) head.pack_queries(at);
                });
                on_tiles([](auto& head, int at) { head.run_tile(at); });
            } else {
                const BackwardMemory<E> mine = memory_of(me.number);
                me.share(heads, [&](int64_t head) {
                    whole_head(mine, (int)head, summands + (size_t)head * n, true);
                    fence();
                });
            }
            me.share(kv_heads * tiles, [&](int64_t share) {
                const int task = (int)share;
                const int head = task / tiles, j0 = task % tiles * tile;
                float* sum = summands + (size_t)head * group * n + (size_t)j0 * 2 * H;
                for (int i = 1; i < group; i++) add_to(sum, sum + (size_t)i * n, (size_t)tile * 2 * H);
                store_key_gradients(unit, x.dkv, sum, x.rotation, a, head / a.NKV, head % a.NKV, j0);
                fence();
            });
        } else {
            const BackwardMemory<E> mine = memory_of(me.number);
            me.share(kv_heads, [&](int64_t share) {
                const int task = (int)share;
                whole_head(mine, task * group, mine.dkv[0], true);
                for (int i = 1; i < group; i++) {
                    whole_head(mine, task * group + i, mine.dkv[1], false);
                    add_to(mine.dkv[0], mine.dkv[1], n);
                }
                for (int j0 = 0; j0 < a.T; j0 += tile)
                    store_key_gradients(unit, x.dkv, mine.dkv[0] + (size_t)j0 * 2 * H, x.rotation, a, task / a.NKV,
                                        task % a.NKV, j0);
                fence();
            });
        }
        unit.end();
    });
}

inline void forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const floatX* kv, const real* slopes,
                    const int* doc_start, const AttentionShape& a) {
    on_unit(ctx, [&](const auto& unit) { forward(ctx, unit, out, lse, qkv, kv, slopes, doc_start, a); });
}
inline void backward(Ctx& ctx, const BackwardTensors& x, const AttentionShape& a) {
    on_unit(ctx, [&](const auto& unit) { backward(ctx, unit, x, a); });
}

// The scratch memory that both need.
inline size_t scratch_bytes(const Ctx& ctx, const AttentionShape& a) {
    size_t most = 0;
    on_unit(ctx, [&](const auto& unit) {
        using E = typename std::decay_t<decltype(unit)>::Element;
        most = std::max(ForwardPlan<E>(ctx, a).bytes, BackwardPlan<E>(ctx, a).bytes);
    });
    return most;
}

}  // namespace flash
}  // namespace detail
}  // namespace cpu
#endif  // CPU_FAST_PATHS
