// 8-bit floating point, FP8 (Micikevicius et al., 2022, arXiv 2209.05433). Codes are bytes: sign, exponent, mantissa.
//   e4m3   4 exponent bits, bias 7; largest 448; no infinities, s.1111.111 is NaN      weights and activations
//   e5m2   5 exponent bits, bias 15; largest 57344; IEEE's infinities and NaNs          gradients: range before precision
// fp8_encode() rounds to nearest, ties to even, and saturates: finite numbers stay finite. NaN and infinities become NaN, so
// that they show in the loss instead of vanishing behind a large number. Both formats are subsets of bf16 and of fp32: decoding
// is exact.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/types.h"

enum class Fp8 { e4m3, e5m2 };

HD constexpr float fp8_max(Fp8 format) { return format == Fp8::e4m3 ? 448.0f : 57344.0f; }
constexpr const char* fp8_name(Fp8 format) { return format == Fp8::e4m3 ? "e4m3" : "e5m2"; }

// Branch-free, so that loops over it vectorize.
template <Fp8 format>
HD inline uint8_t fp8_encode(float x) {
    constexpr int mantissa = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15, dropped = 23 - mantissa;
    constexpr uint32_t infinity = 0x7f800000u, least_normal = (uint32_t)(127 - bias + 1) << 23;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffffu;
    float a;
    memcpy(&a, &magnitude, 4);
    a = a < fp8_max(format) ? a : fp8_max(format);
    memcpy(&bits, &a, 4);
    const uint32_t normal =
        ((bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped) - ((uint32_t)(127 - bias) << mantissa);
    // Codes below the least normal number count steps of 2^(1 - bias - mantissa). Added to a float whose last bit is worth one
    // step, the number lands in the low bits, rounded as floats are.
    constexpr uint32_t one_step = (uint32_t)(127 + 23 + 1 - bias - mantissa) << 23;
    float steps;
    memcpy(&steps, &one_step, 4);
    steps += a;
    memcpy(&bits, &steps, 4);
    const uint32_t finite = magnitude < least_normal ? bits & 0xff : normal;
    return (uint8_t)(sign | (magnitude >= infinity ? 0x7f : finite));
}
HD inline uint8_t fp8_encode(float x, Fp8 format) {
    return format == Fp8::e4m3 ? fp8_encode<Fp8::e4m3>(x) : fp8_encode<Fp8::e5m2>(x);
}

// The definition of the formats.
inline float fp8_decode(uint8_t code, Fp8 format) {
    const int mantissa = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
    const float sign = code & 0x80 ? -1.0f : 1.0f;
    if (format == Fp8::e4m3 ? (code & 0x7f) == 0x7f : exponent == 31 && fraction) return NAN;
    if (format == Fp8::e5m2 && exponent == 31) return sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp((float)fraction, 1 - bias - mantissa);
    return sign * std::ldexp((float)(fraction + (1 << mantissa)), exponent - bias - mantissa);
}

// The scale that multiplies a tensor before it is encoded: its largest element becomes the format's largest number over
// 2^margin. 0 if all elements were zero; the caller then keeps its old scale.
HD inline float fp8_scale(float amax, Fp8 format, int margin) {
    if (!(amax > 0) || !(amax <= 3.402823466e38f)) return 0;
    float scale = fp8_max(format) / amax;
    for (int i = 0; i < margin; i++) scale *= 0.5f;
    return scale <= 3.402823466e38f ? scale : 3.402823466e38f;
}

// The factor that decodes a tensor's codes. Fills 16 bytes, because cuBLASLt reads it at such addresses.
struct alignas(16) ScaleInverse {
    float value;
};

// Destination of the codes of a matrix (N, C), and of its transpose if requested: code = fp8_encode(x * scale). amax
// accumulates the largest finite |x|; amax and scale are single floats in the backend's memory.
struct Codes {
    uint8_t* codes = nullptr;       // (N, C); null: no codes
    uint8_t* transposed = nullptr;  // (C, N) or null
    float* amax = nullptr;
    const float* scale = nullptr;
    Fp8 format = Fp8::e4m3;
};
// The outputs of an op: numbers, codes of the numbers rounded to floatX, or both. An op that writes codes saves quantize()'s
// pass over memory; one that writes no numbers saves their store as well.
struct Output {
    floatX* x = nullptr;
    Codes codes;
    Output(floatX* numbers) : x(numbers) {}
    Output(const Codes& c, floatX* numbers = nullptr) : x(numbers), codes(c) {}
};
