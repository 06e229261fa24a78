// Storage and accumulation types, fixed when the program is built (PRECISION=bf16|fp32; the tests also build fp64).
//   floatX  storage of parameters and activations: bf16 | float | double
//   real    all accumulators (gradients, norms, softmax, losses, statistics, optimizer state): float
//           (double in the fp64 build, which exists for finite differences)
// bf16 is our own type, so that all builds behave alike: round to nearest even, NaN becomes 0x7fff (as in CUDA).
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif

struct bf16 {
    uint16_t bits;
    bf16() = default;
    HD bf16(float x) : bits(round(x)) {}
    HD operator float() const {
        const uint32_t u = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }

private:
    HD static uint16_t round(float x) {
#ifdef __CUDA_ARCH__
        uint16_t result;  // the same rounding in one instruction
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
        return result;
#else
        uint32_t u;
        memcpy(&u, &x, 4);
        // Adding 0x7fff plus the lowest kept bit rounds to nearest, ties to even; a carry into the exponent is correct.
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
    }
};
static_assert(sizeof(bf16) == 2, "bf16 is stored, copied and written to files as two bytes");

// IEEE half to float: widen the exponent. Denormals are computed as multiples of 2^-24, since denormal floats may be flushed to
// zero.
HD inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * (float)mantissa * 0x1p-24f;
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

#if defined(PRECISION_FP64)
using floatX = double;
using real = double;
inline constexpr const char* precision_name = "fp64";
#elif defined(PRECISION_FP32)
using floatX = float;
using real = float;
inline constexpr const char* precision_name = "fp32";
#else
using floatX = bf16;
using real = float;
inline constexpr const char* precision_name = "bf16";
#endif

// Training in bf16 keeps fp32 weights in two halves (WeightHalves, math.h): the parameters are the upper halves, these the
// lower. Builds whose floatX is already the accumulation type have none, and pointers to them are null.
using LowerHalf = uint16_t;
inline constexpr bool has_lower_halves = sizeof(floatX) < sizeof(real);

// Whether an op overwrites its output or adds to it.
enum class Acc { Set, Add };
