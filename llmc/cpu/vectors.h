// Sixteen numbers at a time, for loops that the compiler does not turn into good vector code itself: GCC's and clang's vector
// types, which every CPU has in as many registers as it needs for 64 bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../math.h"
#include "../types.h"

namespace cpu {

constexpr int lanes = 16;
typedef float floats __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

}  // namespace cpu

template <>
struct BitsOf<cpu::floats> {
    using type = cpu::words;
};

namespace cpu {

inline floats load(const float* p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}
inline floats load(const bf16* p) {
    halves h;
    memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
}

// bf16's bits, in the low half of each word: as bf16's own rounding.
inline words rounded(floats x) {
    const words u = (words)x, nearest = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return x == x ? nearest : words{} + 0x7fffu;
}

inline void store(float* p, floats x) { memcpy(p, &x, sizeof x); }
inline void store(bf16* p, floats x) {
    const halves h = __builtin_convertvector(rounded(x), halves);
    memcpy((void*)p, &h, sizeof h);
}

// The first n, at most 16; what is loaded beside them is zero.
template <class E>
floats load(const E* p, int n) {
    if (n >= lanes) return load(p);
    E some[lanes] = {};
    std::copy_n(p, n, some);
    return load(some);
}
template <class E>
void store(E* p, floats x, int n) {
    if (n >= lanes) return store(p, x);
    E some[lanes];
    store(some, x);
    std::copy_n(some, n, p);
}

inline floats larger(floats x, floats y) { return x > y ? x : y; }  // y where x is NaN

}  // namespace cpu
