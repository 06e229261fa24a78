// AdamW's moments and the gradients, each in fp32 or in bf16, moments also in 8 bits (--exp-avg-dtype, --exp-avg-sq-dtype,
// --main-grads-dtype): 4, 2 or 1 bytes per parameter.
//
// Rounded to the nearest bf16, a moment would not move: a step changes exp_avg_sq by at most (1 - beta2) of the gradient's
// square, and every change below half an ulp, 1/512 to 1/256 of the moment, would be lost. So bf16 moments are rounded
// stochastically: to one of the two nearest bf16 numbers, with probabilities that make the expected value exact. The weights
// are updated with the moments before rounding. Gradients that accumulate over micro-batches are rounded in the same way
// (gradients.h).
//
// 8-bit moments are also rounded stochastically: neighbors differ by a quarter to a seventh. They need no scales: exp_avg has
// a sign and 5 bits of exponent, up to 24 in steps of at least 2^-28; exp_avg_sq has no sign and 6 bits of exponent, up to
// 12 in steps of at least 2^-61. So a byte depends only on its element: ranks may split
// tensors anywhere, and any layout resumes any other. Both formats are subsets of bf16, in which checkpoints store them.
//
// The random numbers are functions of seed, step or sample, tensor, and the element's index in the whole tensor, not in a
// rank's part: the bits are the same for all layouts and backends and after a resume.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/math.h"
#include "base/rng.h"
#include "base/types.h"

// An 8-bit floating-point number with 2 bits of mantissa and denormals, without infinity. The largest code is NaN; infinities
// are stored as NaN. Numbers above the range saturate.
template <bool has_sign, int bias>
struct Float8 {
    uint8_t bits;
    Float8() = default;
    HD Float8(float x) : bits((uint8_t)encode(x, 0x8000u)) {}  // the nearest; ties away from zero
    HD operator float() const { return decode<float>(bits); }

    // The code has the exponent and mantissa of an fp32 number that is smaller by 2^(127 - bias).
    static constexpr uint32_t nan = has_sign ? 0x7f : 0xff;
    static constexpr int dropped = 21;
    HD static constexpr float power_of_two(int exponent) {
        return exponent == 0 ? 1.0f : exponent > 0 ? 2 * power_of_two(exponent - 1) : power_of_two(exponent + 1) / 2;
    }
    template <class F>
    HD static F decode(typename BitsOf<F>::type code) {
        const auto magnitude = code & nan;
        auto result = magnitude << dropped;
        F x;
        memcpy(&x, &result, sizeof x);
        x *= power_of_two(127 - bias);
        memcpy(&result, &x, sizeof x);
        result = magnitude == nan ? result | 0x7fffffffu : result;
        if (has_sign) result |= (code & 0x80u) << 24;
        memcpy(&x, &result, sizeof x);
        return x;
    }
    // Rounded stochastically with 16 random bits.
    template <class F>
    HD static typename BitsOf<F>::type encode(F x, typename BitsOf<F>::type random) {
        typename BitsOf<F>::type bits;
        memcpy(&bits, &x, sizeof bits);
        const auto magnitude = bits & 0x7fffffffu;
        F scaled;
        memcpy(&scaled, &magnitude, sizeof scaled);
        scaled *= power_of_two(bias - 127);
        auto code = magnitude;
        memcpy(&code, &scaled, sizeof code);
        code = (code + ((random & 0xffffu) << (dropped - 16))) >> dropped;
        code = code < nan ? code : (code & 0u) + (nan - 1);
        code = magnitude >= 0x7f800000u ? (code & 0u) + nan : code;
        if (has_sign) code |= bits >> 24 & 0x80u;
        return code;
    }
    HD static uint32_t encode(double x, uint32_t random) { return encode((float)x, random); }
};
using signed8 = Float8<true, 27>;
using unsigned8 = Float8<false, 60>;

enum class ElementType : uint8_t { fp32, bf16, signed8, unsigned8 };  // fp32: real

// One number per parameter: a moment or the gradients.
struct Elements {
    void* data = nullptr;
    ElementType type = ElementType::fp32;

    Elements() = default;
    Elements(const real* x) : data((void*)x) {}
    Elements(const bf16* x) : data((void*)x), type(ElementType::bf16) {}
    Elements(const signed8* x) : data((void*)x), type(ElementType::signed8) {}
    Elements(const unsigned8* x) : data((void*)x), type(ElementType::unsigned8) {}
    bool is_bf16() const { return type == ElementType::bf16; }
    bool rounded() const { return type != ElementType::fp32; }
    size_t element_bytes() const { return type == ElementType::fp32 ? sizeof(real) : is_bf16() ? sizeof(bf16) : 1; }
    // The elements from index i on.
    Elements from(size_t i) const {
        Elements rest = *this;
        rest.data = (char*)data + i * element_bytes();
        return rest;
    }
    // Call f with a pointer to the elements in their own type: visit for gradients, which are never 8 bits; visit_first for
    // exp_avg; visit_second for exp_avg_sq, whose 8-bit form has no sign; visit_moment for either moment.
    template <class F>
    auto visit(F f) const {
        return is_bf16() ? f((bf16*)data) : f((real*)data);
    }
    template <class F>
    auto visit_first(F f) const {
        return type == ElementType::signed8 ? f((signed8*)data) : visit(f);
    }
    template <class F>
    auto visit_second(F f) const {
        return type == ElementType::unsigned8 ? f((unsigned8*)data) : visit(f);
    }
    template <class F>
    auto visit_moment(F f) const {
        return type == ElementType::signed8 ? f((signed8*)data) : visit_second(f);
    }
};

// x rounded stochastically: the bits of one of the two neighboring bf16 numbers. Adds 16 random bits to the bits that are
// truncated. A bf16 is unchanged, infinity too; NaN becomes 0x7fff.
template <class F>
HD inline typename BitsOf<F>::type round_stochastically(F x, typename BitsOf<F>::type random) {
    typename BitsOf<F>::type bits;
    memcpy(&bits, &x, sizeof bits);
    const auto rounded = (bits + (random & 0xffffu)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0u) + 0x7fffu : rounded;
}
HD inline uint32_t round_stochastically(double x, uint32_t random) { return round_stochastically((float)x, random); }
// The bits of the nearest bf16, ties to even.
template <class F>
HD inline typename BitsOf<F>::type round_to_nearest(F x) {
    typename BitsOf<F>::type bits;
    memcpy(&bits, &x, sizeof bits);
    return round_stochastically(x, (bits >> 16 & 1u) + 0x7fffu);
}
HD inline uint32_t round_to_nearest(double x) { return round_to_nearest((float)x); }

// The key of the random numbers: for a step's moments, or for a micro-batch's contribution to the gradients.
inline uint64_t rounding_key(uint64_t seed, int64_t step, RngPurpose purpose = RngPurpose::rounding) {
    const auto bits = random_bits(seed, purpose, ~0u, (uint64_t)step);
    return (uint64_t)bits[0] << 32 | bits[1];
}

// The random numbers for a tensor's elements in a step: the lower half of each is for exp_avg, the upper for exp_avg_sq.
using Rounding = Draws<RngPurpose::rounding>;
