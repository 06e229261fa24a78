// AdamW's moments and the gradients, each in fp32 or in bf16 (--exp-avg-dtype, --exp-avg-sq-dtype, --main-grads-dtype): 4 or 2
// bytes per parameter.
//
// Rounded to the nearest bf16, a moment would stand still: a step moves exp_avg_sq by at most (1 - beta2) of the gradient's
// square, and every change below half an ulp, 1/512 to 1/256 of the moment, would be lost. So bf16 moments are rounded
// stochastically: to one of the two nearest bf16 numbers, with probabilities that make the expected value exact. The weights
// are updated with the moments before rounding. Gradients to which micro-batches add are rounded in the same way (gradients.h).
//
// The random numbers are functions of seed, step or sample, tensor, and the element's index in the whole tensor, whichever part
// of it a rank holds: the bits are the same for all layouts and backends and after a resume.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/math.h"
#include "base/rng.h"
#include "base/types.h"

// One number per parameter: a moment or the gradients, in bf16 or real.
struct Elements {
    void* data = nullptr;  // bf16 or real
    bool is_bf16 = false;

    Elements() = default;
    Elements(const real* x) : data((void*)x) {}
    Elements(const bf16* x) : data((void*)x), is_bf16(true) {}
    size_t element_bytes() const { return is_bf16 ? sizeof(bf16) : sizeof(real); }
    // The elements from index i on.
    Elements from(size_t i) const {
        Elements rest = *this;
        rest.data = (char*)data + i * element_bytes();
        return rest;
    }
    // Calls f with a pointer to the elements in their own type.
    template <class F>
    auto visit(F f) const {
        return is_bf16 ? f((bf16*)data) : f((real*)data);
    }
};

// x rounded stochastically: the bits of one of the two neighbouring bf16 numbers. 16 random bits are added to the bits that are
// cut off. A bf16 stays as it is, infinity too; NaN becomes 0x7fff.
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

// The key of the random numbers: for a step's moments, or for what the micro-batch of a sample adds to the gradients.
inline uint64_t rounding_key(uint64_t seed, int64_t step, RngPurpose purpose = RngPurpose::rounding) {
    const auto bits = random_bits(seed, purpose, ~0u, (uint64_t)step);
    return (uint64_t)bits[0] << 32 | bits[1];
}

// The random numbers for a tensor's elements in a step: the lower half of each is for exp_avg, the upper for exp_avg_sq.
using Rounding = Draws<RngPurpose::rounding>;
