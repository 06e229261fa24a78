// Encodes matrices as FP8 codes (../fp8.h), as they are computed or afterwards. A row is encoded while it is in cache.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "../ops.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// The largest finite |x[i]|. Non-negative floats order as their bits do, and compilers vectorize the integer loop.
inline float largest_finite(const floatX* x, size_t n) {
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const float number = (float)x[i];
        int32_t bits;
        memcpy(&bits, &number, 4);
        bits &= 0x7fffffff;
        bits = bits < 0x7f800000 ? bits : 0;
        largest = largest > bits ? largest : bits;
    }
    float a;
    memcpy(&a, &largest, 4);
    return a;
}

// codes[i] = encode(x[i] * scale) of one row; returns the largest finite |x|.
template <Fp8 format>
float encode_row(uint8_t* codes, const floatX* x, int C, float scale) {
    INDEPENDENT_ITERATIONS
    for (int c = 0; c < C; c++) codes[c] = fp8_encode<format>((float)x[c] * scale);
    return largest_finite(x, (size_t)C);
}

// Sets a matrix (N, C) row by row, in parallel: row(n, y) computes the C numbers of row n.
template <class Row>
void set_rows(Ctx& ctx, const Output& out, int N, int C, Row row) {
    const Codes& q = out.codes;
    if (!q.codes) {
        parallel_for(N, [&](int n) { row(n, out.x + (size_t)n * C); });
        return;
    }
    const auto encode = q.format == Fp8::e4m3 ? encode_row<Fp8::e4m3> : encode_row<Fp8::e5m2>;
    std::vector<float> largest((size_t)N);
    std::vector<floatX> own(out.x ? 0 : (size_t)ctx.threads * C);
    parallel_for(
        N,
        [&](Team::Member& me, int n) {
            floatX* y = out.x ? out.x + (size_t)n * C : own.data() + (size_t)me.number * C;
            row(n, y);
            largest[(size_t)n] = encode(q.codes + (size_t)n * C, y, C, *q.scale);
        },
        ctx.threads);
    for (const float x : largest) *q.amax = std::max(*q.amax, x);
    if (q.transposed) transpose_codes(ctx, q.transposed, q.codes, N, C);
}

}  // namespace detail

inline void absolute_max(Ctx&, float* amax, const floatX* x, size_t n) {
    constexpr size_t range = 8192;
    std::vector<float> largest(ceil_div(n, range));
    parallel_ranges(
        n, [&](size_t i, size_t end) { largest[i / range] = detail::largest_finite(x + i, end - i); }, range);
    for (const float one : largest) *amax = std::max(*amax, one);
}

inline void quantize(Ctx& ctx, const Codes& out, const floatX* x, int N, int C) {
    detail::set_rows(ctx, out, N, C, [=](int n, floatX* y) { std::copy_n(x + (size_t)n * C, C, y); });
}

inline void transpose_codes(Ctx&, uint8_t* transposed, const uint8_t* codes, int N, int C) {
    constexpr int tile = 64;  // source and destination of a tile fit in the cache
    parallel_for(ceil_div(C, tile), [=](int task) {
        const int c0 = task * tile;
        for (int n0 = 0; n0 < N; n0 += tile)
            for (int c = c0; c < std::min(C, c0 + tile); c++)
                for (int n = n0; n < std::min(N, n0 + tile); n++) transposed[(size_t)c * N + n] = codes[(size_t)n * C + c];
    });
}

inline void set_scale(Ctx&, float* scale, float* inverse, const float* amax, Fp8 format, int margin) {
    const float s = fp8_scale(*amax, format, margin);
    *scale = s > 0 ? s : 1.0f;
    *inverse = 1.0f / *scale;
}

}  // namespace cpu
