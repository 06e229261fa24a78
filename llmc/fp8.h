// 8-bit floating point (Micikevicius et al., 2022, arXiv 2209.05433). Codes are bytes: sign, exponent, mantissa.
//   e4m3   4 exponent bits, bias 7; largest 448; no infinities, s.1111.111 is NaN      weights and activations
//   e5m2   5 exponent bits, bias 15; largest 57344; IEEE's infinities and NaNs          gradients: range before precision
// encode() rounds to nearest, ties to even, and saturates: what is finite stays finite. NaN and infinities become NaN, so that
// they are seen in the loss instead of vanishing behind a large number. Both formats are parts of bf16 and of fp32: decoding is
// exact.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "types.h"

enum class Fp8 { e4m3, e5m2 };

HD constexpr float fp8_max(Fp8 format) { return format == Fp8::e4m3 ? 448.0f : 57344.0f; }
constexpr const char* fp8_name(Fp8 format) { return format == Fp8::e4m3 ? "e4m3" : "e5m2"; }

template <Fp8 format>
HD inline uint8_t fp8_encode(float x) {
    constexpr int mantissa = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15, dropped = 23 - mantissa;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    bits &= 0x7fffffffu;
    if (bits >= 0x7f800000u) return sign | 0x7f;
    float a;
    memcpy(&a, &bits, 4);
    if (a >= fp8_max(format)) a = fp8_max(format);
    if (bits < (uint32_t)(127 - bias + 1) << 23) {
        // Below the least normal number codes count steps of 2^(1 - bias - mantissa). A float whose last bit is worth one step
        // takes the number in its low bits, and rounds as floats do.
        const uint32_t one_step = (uint32_t)(127 + 23 + 1 - bias - mantissa) << 23;
        float steps;
        memcpy(&steps, &one_step, 4);
        steps += a;
        memcpy(&bits, &steps, 4);
        return sign | (uint8_t)bits;
    }
    memcpy(&bits, &a, 4);
    bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return sign | (uint8_t)((bits >> dropped) - ((uint32_t)(127 - bias) << mantissa));
}
HD inline uint8_t fp8_encode(float x, Fp8 format) {
    return format == Fp8::e4m3 ? fp8_encode<Fp8::e4m3>(x) : fp8_encode<Fp8::e5m2>(x);
}

// The definition, read aloud.
inline float fp8_decode(uint8_t code, Fp8 format) {
    const int mantissa = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const float sign = code & 0x80 ? -1.0f : 1.0f;
    if (format == Fp8::e4m3 ? (code & 0x7f) == 0x7f : exponent == 31 && fraction) return NAN;
    if (format == Fp8::e5m2 && exponent == 31) return sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp((float)fraction, 1 - bias - mantissa);
    return sign * std::ldexp((float)(fraction + (1 << mantissa)), exponent - bias - mantissa);
}

// What a tensor is multiplied by before it is encoded, so that its largest element comes to the format's largest over 2^margin.
// 0: there was nothing but zeros to measure; the caller keeps what it had.
HD inline float fp8_scale(float amax, Fp8 format, int margin) {
    if (!(amax > 0) || !(amax <= 3.402823466e38f)) return 0;
    float scale = fp8_max(format) / amax;
    for (int i = 0; i < margin; i++) scale *= 0.5f;
    return scale <= 3.402823466e38f ? scale : 3.402823466e38f;
}
