// FP8 codes (../fp8.h) of matrices, made as they are computed or afterwards. A row is encoded while it is in cache.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "../ops.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// The largest finite |x[i]|. Floats without sign order as their bits do, and integers are what compilers make vector code of.
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

// Sets a matrix (N, C) row by row, in parallel: row(n, y) sets the C numbers of row n.
template <class Row>
void set_rows(Ctx& ctx, const Output& out, int N, int C, Row row) {
    const Codes& q = out.codes;
    if (!q.codes) {
#pragma omp parallel for schedule(static)
        for (int n = 0; n < N; n++) row(n, out.x + (size_t)n * C);
        return;
    }
    const auto encode = q.format == Fp8::e4m3 ? encode_row<Fp8::e4m3> : encode_row<Fp8::e5m2>;
    float largest = *q.amax;
#pragma omp parallel reduction(max : largest)
    {
        std::vector<floatX> own(out.x ? 0 : (size_t)C);
#pragma omp for schedule(static)
        for (int n = 0; n < N; n++) {
            floatX* y = out.x ? out.x + (size_t)n * C : own.data();
            row(n, y);
            largest = std::max(largest, encode(q.codes + (size_t)n * C, y, C, *q.scale));
        }
    }
    *q.amax = largest;
    if (q.transposed) transpose_codes(ctx, q.transposed, q.codes, N, C);
}

}  // namespace detail

inline void absolute_max(Ctx&, float* amax, const floatX* x, size_t n) {
    constexpr size_t range = 8192;
    float largest = *amax;
#pragma omp parallel for schedule(static) reduction(max : largest)
    for (size_t i = 0; i < n; i += range) largest = std::max(largest, detail::largest_finite(x + i, std::min(range, n - i)));
    *amax = largest;
}

inline void quantize(Ctx& ctx, const Codes& out, const floatX* x, int N, int C) {
    detail::set_rows(ctx, out, N, C, [=](int n, floatX* y) { std::copy_n(x + (size_t)n * C, C, y); });
}

inline void transpose_codes(Ctx&, uint8_t* transposed, const uint8_t* codes, int N, int C) {
    constexpr int tile = 64;  // both sides of one are in cache together
#pragma omp parallel for collapse(2) schedule(static)
    for (int c0 = 0; c0 < C; c0 += tile)
        for (int n0 = 0; n0 < N; n0 += tile)
            for (int c = c0; c < std::min(C, c0 + tile); c++)
                for (int n = n0; n < std::min(N, n0 + tile); n++) transposed[(size_t)c * N + n] = codes[(size_t)n * C + c];
}

inline void set_scale(Ctx&, float* scale, float* inverse, const float* amax, Fp8 format, int margin) {
    const float s = fp8_scale(*amax, format, margin);
    *scale = s > 0 ? s : 1.0f;
    *inverse = 1.0f / *scale;
}

}  // namespace cpu
