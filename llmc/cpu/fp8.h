// Encodes matrices as FP8 codes (../fp8.h), as they are computed or afterwards. A row is encoded while it is in cache.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "../base/enum_table.h"
#include "../ops.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// All 256 numbers of a format.
inline const std::array<float, 256>& numbers_of_codes(Fp8 format) {
    static const auto numbers = [] {
        std::array<std::array<float, 256>, number_of_values<Fp8>()> all;
        for (const Fp8 f : {Fp8::e4m3, Fp8::e5m2})
            for (int code = 0; code < 256; code++) all[(size_t)f][(size_t)code] = fp8_decode((uint8_t)code, f);
        return all;
    }();
    return numbers[(size_t)format];
}

// The bits of |x|, or 0 if x is not finite. Non-negative floats order like their bits, and compilers vectorize a maximum of
// integers.
inline int32_t finite_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    bits &= 0x7fffffff;
    return bits < 0x7f800000 ? bits : 0;
}
inline float from_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The largest finite |x[i]|.
inline float largest_finite(const floatX* x, size_t n) {
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) largest = std::max(largest, finite_bits((float)x[i]));
    return from_bits(largest);
}

// codes[i] = encode(x[i] * scale) of one row; returns the largest finite |x|. One pass: two take 1.2 times as long.
template <Fp8 format>
float encode_row(uint8_t* codes, const floatX* x, int C, float scale) {
    int32_t largest = 0;
    INDEPENDENT_ITERATIONS
    for (int c = 0; c < C; c++) {
        const float number = (float)x[c];
        largest = std::max(largest, finite_bits(number));
        codes[c] = fp8_encode<format>(number * scale);
    }
    return from_bits(largest);
}

// Encodes a matrix (N, C) row by row, in parallel: row(member, n) returns the C numbers of row n.
template <class Row>
void encode_rows(Ctx& ctx, const Codes& out, int N, int C, Row row) {
    const auto encode = out.format == Fp8::e4m3 ? encode_row<Fp8::e4m3> : encode_row<Fp8::e5m2>;
    std::vector<float> largest((size_t)N);
    parallel_for(
        N, [&](Team::Member& me, int n) { largest[(size_t)n] = encode(out.codes + (size_t)n * C, row(me, n), C, *out.scale); },
        ctx.threads);
    for (const float x : largest) *out.amax = std::max(*out.amax, x);
    if (out.transposed) transpose_codes(ctx, out.transposed, out.codes, N, C);
}

// Sets a matrix (N, C) row by row, in parallel: row(n, y) computes the C numbers of row n.
template <class Row>
void set_rows(Ctx& ctx, const Output& out, int N, int C, Row row) {
    if (!out.codes.codes) {
        parallel_for(N, [&](int n) { row(n, out.x + (size_t)n * C); });
        return;
    }
    std::vector<floatX> own(out.x ? 0 : (size_t)ctx.threads * C);
    encode_rows(ctx, out.codes, N, C, [&](Team::Member& me, int n) {
        floatX* y = out.x ? out.x + (size_t)n * C : own.data() + (size_t)me.number * C;
        row(n, y);
        return y;
    });
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
    detail::encode_rows(ctx, out, N, C, [=](Team::Member&, int n) { return x + (size_t)n * C; });
}

inline void absolute_max_of_rows(Ctx& ctx, float* amax, const floatX* x, const FilledRows& rows) {
    absolute_max(ctx, amax, x, rows.size());
}

inline void fp8_numbers(Ctx&, floatX* out, const floatX* x, const FilledRows& rows, const float* scale, Fp8 format) {
    const std::array<float, 256>& numbers = detail::numbers_of_codes(format);
    const auto round = [&](auto encode) {
        parallel_ranges(rows.size(), [&](size_t i, size_t end) {
            constexpr size_t some = 256;
            uint8_t codes[some];
            for (; i < end; i += some) {
                const size_t n = std::min(some, end - i);
                encode(codes, x + i, (int)n, *scale);
                for (size_t k = 0; k < n; k++) out[i + k] = (floatX)numbers[codes[k]];
            }
        });
    };
    if (format == Fp8::e4m3) round(detail::encode_row<Fp8::e4m3>);
    else round(detail::encode_row<Fp8::e5m2>);
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
