// SIMD vectors of one register, for loops that the compiler does not vectorize well itself: GCC's and clang's vector types, and
// intrinsics where these do not generate good code. A longer vector type would work on every CPU, but GCC 12 keeps it in memory
// and compares and selects element by element. Without fast paths a vector is a single number, which turns the same loops into
// plain ones.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../base/math.h"
#include "../base/rng.h"
#include "../base/types.h"
#include "../elements.h"
#include "ctx.h"

#if CPU_FAST_PATHS && defined(__AVX2__)
#include <immintrin.h>
#endif

#if CPU_FAST_PATHS
namespace cpu {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
typedef float floats __attribute__((vector_size(4 * lanes)));
typedef uint32_t words __attribute__((vector_size(4 * lanes)));
typedef uint16_t halves __attribute__((vector_size(2 * lanes)));

}  // namespace cpu

template <>
struct BitsOf<cpu::floats> {
    using type = cpu::words;
};

// Multiplies even and odd words separately, as CPU instructions do.
#if defined(__AVX512F__)
template <>
struct WideProduct<cpu::words> {
    cpu::words high, low;
    WideProduct(uint32_t factor, cpu::words x) {
        constexpr __mmask16 odd = 0xaaaa;
        const __m512i f = _mm512_set1_epi32((int)factor), all = (__m512i)x;
        const __m512i a = _mm512_maskz_mul_epu32(0xff, all, f),
                      b = _mm512_maskz_mul_epu32(0xff, _mm512_maskz_srli_epi64(0xff, all, 32), f);
        high = (cpu::words)_mm512_mask_mov_epi32(_mm512_maskz_srli_epi64(0xff, a, 32), odd, b);
        low = (cpu::words)_mm512_mask_mov_epi32(a, odd, _mm512_maskz_slli_epi64(0xff, b, 32));
    }
};
#else
template <>
struct WideProduct<cpu::words> {
    cpu::words high, low;
    WideProduct(uint32_t factor, cpu::words x) {
        for (int i = 0; i < cpu::lanes; i++) {
            const WideProduct<uint32_t> product(factor, x[i]);
            high[i] = product.high;
            low[i] = product.low;
        }
    }
};
#endif

namespace cpu {

inline floats load(const float* p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}
inline words load_words(const int* p) {
    words x;
    memcpy(&x, p, sizeof x);
    return x;
}
inline floats lane_numbers() {
    constexpr float numbers[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(numbers);
}
#if defined(__AVX512F__)
// The masked forms: GCC 12 warns about undefined lanes of the others.
inline words widen(halves h) { return (words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h); }
inline halves narrow(words w) { return (halves)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)w); }
inline float total(floats x) {
    x += (floats)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)x, (__m512)x, 0x4e);
    x += (floats)_mm512_maskz_shuffle_f32x4(0xffff, (__m512)x, (__m512)x, 0xb1);
    x += (floats)_mm512_maskz_permute_ps(0xffff, (__m512)x, 0x4e);
    x += (floats)_mm512_maskz_permute_ps(0xffff, (__m512)x, 0xb1);
    return x[0];
}
#else
inline words widen(halves h) { return __builtin_convertvector(h, words); }
inline halves narrow(words w) { return __builtin_convertvector(w, halves); }
// The sum of all lanes, always in the same order.
inline float total(floats x) {
    float part[lanes];
    memcpy(part, &x, sizeof x);
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}
#endif
inline words load(const uint16_t* p) {
    halves h;
    memcpy(&h, p, sizeof h);
    return widen(h);
}
inline floats load(const bf16* p) { return (floats)(load(&p->bits) << 16); }
inline words load(const uint8_t* p) {
    uint32_t w[lanes];
    for (int i = 0; i < lanes; i++) w[i] = p[i];
    words x;
    memcpy(&x, w, sizeof x);
    return x;
}
template <bool has_sign, int bias>
floats load(const Float8<has_sign, bias>* p) {
    return Float8<has_sign, bias>::template decode<floats>(load(&p->bits));
}

// bf16 bits in the low half of each word, rounded as struct bf16 does.
inline words rounded(floats x) {
    const words u = (words)x, nearest = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return x == x ? nearest : words{} + 0x7fffu;  // NOLINT(misc-redundant-expression): false for a NaN
}

// Rounding for storage. bf16 instructions treat denormals as zero, as they do in products, and keep a NaN's bits.
#if defined(__AVX512BF16__)
inline halves rounded_halves(floats x) { return (halves)_mm512_maskz_cvtneps_pbh(0xffff, (__m512)x); }
struct RoundedTwo {  // two vectors in one instruction
    __m512i both;
    RoundedTwo(floats first, floats second) : both((__m512i)_mm512_maskz_cvtne2ps_pbh(~0u, (__m512)second, (__m512)first)) {}
    void store(bf16* first, bf16* second) const {
        _mm512_mask_storeu_epi32(first, 0xff, both);
        _mm256_storeu_si256((__m256i*)second, _mm512_maskz_extracti64x4_epi64(0xf, both, 1));
    }
    words pairs() const {  // words of both: the first vector in the low halves
        typedef uint16_t all_halves __attribute__((vector_size(64)));
        const all_halves order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return (words)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)order, both);
    }
};
#else
inline halves rounded_halves(floats x) { return narrow(rounded(x)); }
struct RoundedTwo {
    words first, second;
    RoundedTwo(floats x, floats y) : first(rounded(x)), second(rounded(y)) {}
    void store(bf16* to_first, bf16* to_second) const {
        const halves h[2] = {narrow(first), narrow(second)};
        memcpy((void*)to_first, &h[0], sizeof h[0]);
        memcpy((void*)to_second, &h[1], sizeof h[1]);
    }
    words pairs() const { return first | second << 16; }
};
#endif

inline void store(float* p, floats x) { memcpy(p, &x, sizeof x); }
inline void store(uint16_t* p, words x) {  // the low halves
    const halves h = narrow(x);
    memcpy(p, &h, sizeof h);
}
inline void store(uint8_t* p, words x) {  // the low bytes
    uint32_t w[lanes];
    memcpy(w, &x, sizeof w);
    for (int i = 0; i < lanes; i++) p[i] = (uint8_t)w[i];
}
inline void store(bf16* p, floats x) {
    const halves h = rounded_halves(x);
    memcpy((void*)p, &h, sizeof h);
}

// Non-temporal store of a cache line of 64 bytes: the line is not read first. Other threads see it after fence().
#if defined(__AVX512F__)
inline void stream(float* line, floats x) { _mm512_stream_ps(line, (__m512)x); }
inline void stream(bf16* line, floats first, floats second) {
#if defined(__AVX512BF16__)
    const __m512i both = (__m512i)_mm512_maskz_cvtne2ps_pbh(~0u, (__m512)second, (__m512)first);
#else
    // With a full mask: GCC 12 warns about the part that _mm512_inserti64x4 itself leaves undefined.
    const __m512i both = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512((__m256i)rounded_halves(first)),
                                                  (__m256i)rounded_halves(second), 1);
#endif
    _mm512_stream_si512((__m512i*)line, both);
}
inline void fence() { _mm_sfence(); }
inline bool same_bits(floats x, floats y) { return _mm512_cmpneq_epi32_mask((__m512i)x, (__m512i)y) == 0; }
inline floats root(floats x) { return (floats)_mm512_maskz_sqrt_ps(0xffff, (__m512)x); }
#else
inline void fence() {}
inline bool same_bits(floats x, floats y) { return memcmp((const char*)&x, (const char*)&y, sizeof x) == 0; }
#if defined(__AVX2__)
inline floats root(floats x) { return (floats)_mm256_sqrt_ps((__m256)x); }
#else
inline floats root(floats x) {
    for (int i = 0; i < lanes; i++) x[i] = std::sqrt(x[i]);
    return x;
}
#endif
#endif

// e^x for results that are rounded to bf16, x from -87 to 88: relative error 3.6e-6, and 1 at 0; NaN stays NaN. Computed as 2^n
// 2^f with f from -1/2 to 1/2: half as many instructions as exp_of.
inline floats exp_in_range(floats x) {
    const float log2e = 1.44269504f, shift = 12582912.0f;  // 1.5 * 2^23, as in exp_of
    const floats shifted = x * log2e + shift, f = x * log2e - (shifted - shift);
    floats p = 9.7829126e-3f * f + 5.5976884e-2f;
    p = p * f + 2.4020711e-1f;
    p = p * f + 6.9311360e-1f;
    p = p * f + 1.0f;
    return (floats)((words)p + ((words)shifted << 23));
}
// e^x for results that are rounded to floatX, x at most 88: 0 below -87.
inline floats exp_for_rounding(floats x) {
    if constexpr (std::is_same<floatX, float>::value) return exp_of(x);
    const floats y = exp_in_range(x);
    return x < -87.0f ? floats{} : y;
}

// The value after a store and a load.
inline floats as_stored(const bf16*, floats x) { return (floats)(widen(rounded_halves(x)) << 16); }
inline floats as_stored(const float*, floats x) { return x; }

// The sum of products of a register's numbers at x and at w: for bf16, even and odd ones separately, without shuffles.
inline floats products(const float* x, const float* w) { return load(x) * load(w); }
inline floats products(const bf16* x, const bf16* w) {
    words a, b;
    memcpy(&a, x, sizeof a);
    memcpy(&b, w, sizeof b);
    return (floats)(a << 16) * (floats)(b << 16) + (floats)(a & 0xffff0000u) * (floats)(b & 0xffff0000u);
}
// The same, with x widened before: 32 numbers of bf16 as 16 even and 16 odd ones.
inline floats products(const float* x, const bf16* w) {
    words b;
    memcpy(&b, w, sizeof b);
    return load(x) * (floats)(b << 16) + load(x + lanes) * (floats)(b & 0xffff0000u);
}

}  // namespace cpu

// For results that are rounded to bf16: relative error 3.7e-6 in three quarters of the time; 0 below -87. Always inlined: with
// one more activation in the program the compiler made it a call, and SwiGLU's epilogue took four times as long.
#if defined(__AVX512F__)
template <>
__attribute__((always_inline)) inline cpu::floats sigmoid(cpu::floats x) {
    if constexpr (std::is_same<floatX, float>::value) return 1.0f / (1.0f + exp_of(-x));
    constexpr __mmask16 all = 0xffff;
    const cpu::floats at_most = (cpu::floats)_mm512_maskz_min_ps(all, _mm512_set1_ps(87.0f), (__m512)x);  // NaN stays NaN
    const cpu::floats d = 1.0f + cpu::exp_in_range(-at_most);
    const cpu::floats y = (cpu::floats)_mm512_maskz_rcp14_ps(all, (__m512)d);  // 14 bits, then a Newton step
    return x < -87.0f ? cpu::floats{} : y + y * (1.0f - d * y);
}
#endif

#else
namespace cpu {

constexpr int lanes = 1;
using floats = real;
using words = uint32_t;
inline real total(floats x) { return x; }
template <class E>
floats load(const E* p) {
    return (real)*p;
}
inline words load(const uint16_t* p) { return *p; }
template <class E, class X>
void store(E* p, X x) {
    *p = (E)x;
}
inline void fence() {}
inline real root(real x) { return std::sqrt(x); }
inline real exp_for_rounding(real x) { return exp_real(x); }

}  // namespace cpu
#endif

namespace cpu {

// Loads the first n numbers (at most a vector); the other lanes are zero.
template <class E>
auto load(const E* p, int n) {
    if (n >= lanes) return load(p);
    E some[lanes] = {};
    std::copy_n(p, n, some);
    return load(some);
}
template <class E, class X>
void store(E* p, X x, int n) {
    if (n >= lanes) return store(p, x);
    E some[lanes];
    store(some, x);
    std::copy_n(some, n, p);
}

// The first n lanes; the others become zero.
inline floats first_of(floats x, int n) {
    if (n >= lanes) return x;
    real some[lanes];
    store(some, x);
    return load(some, n);
}

// fp32 weights: in two halves (math.h), or whole.
inline floats load_weights(const bf16* param, const LowerHalf* lower, size_t i, int n) {
    return whole_weight(load(param + i, n), load(lower + i, n));
}
inline void store_weights(bf16* param, LowerHalf* lower, size_t i, floats x, int n) {
    const auto halves = weight_halves(x);
    store(param + i, halves.upper, n);
    store(lower + i, halves.lower, n);
}
inline floats load_weights(const real* param, const LowerHalf*, size_t i, int n) { return load(param + i, n); }
inline void store_weights(real* param, LowerHalf*, size_t i, floats x, int n) { store(param + i, x, n); }

// Calls f(i, n) for each vector of `count` numbers and for the tail; n is a constant for full vectors. Always inlined: in a
// large program the compiler would make a call, with f's captures in memory.
template <class F>
__attribute__((always_inline)) inline void for_vectors(int count, F f) {
    int i = 0;
    for (; i + lanes <= count; i += lanes) f(i, std::integral_constant<int, lanes>());
    if (i < count) f(i, count - i);
}

inline bool fills_lines(const void* p) { return (uintptr_t)p % 64 == 0; }  // p is at the start of a cache line

// y[i] = value(i, number of valid lanes) for i below `count`; with `streamed`, full lines use non-temporal stores if y is
// aligned to a line and a register holds a line.
template <class E, class F>
void put([[maybe_unused]] bool streamed, E* y, int count, F value) {
    int whole = 0;
#if CPU_FAST_PATHS && defined(__AVX512F__)
    if (streamed) {
        constexpr int line = (int)(64 / sizeof(E));
        const std::integral_constant<int, lanes> all;
        for (; whole + line <= count; whole += line) {
            if constexpr (line == 2 * lanes) stream(y + whole, value(whole, all), value(whole + lanes, all));
            else stream(y + whole, value(whole, all));
        }
    }
#endif
    for_vectors(count - whole, [=](int i, auto there) { store(y + whole + i, value(whole + i, there), there); });
}

// x . y: one sum per lane, then the sum of these.
inline real inner_product(const floatX* x, const floatX* y, int n) {
    floats sum = {};
    for_vectors(n, [&](int i, auto there) { sum += load(x + i, there) * load(y + i, there); });
    return total(sum);
}

inline floats larger(floats x, floats y) { return x > y ? x : y; }  // returns y where x is NaN

// random[k] = draws.word(first + k), for k below n.
template <RngPurpose purpose>
void random_words(uint32_t* random, const Draws<purpose>& draws, size_t first, size_t n) {
    constexpr size_t block = 4 * lanes;
    for (size_t k = 0; k < n;) {
        const uint64_t number = draws.number(first + k), group = number / 4;
        const bool together =
            number % 4 == 0 && std::min(n - k, draws.run(first + k)) >= block && (uint32_t)group <= UINT32_MAX - lanes;
        if (!together) {
            random[k] = draws.word(first + k);
            k++;
            continue;
        }
        uint32_t groups[lanes], drawn[4][lanes];
        for (int i = 0; i < lanes; i++) groups[i] = (uint32_t)group + (uint32_t)i;
        words low, w[4];
        memcpy(&low, groups, sizeof low);
        draws.draw(w, low, (uint32_t)(group >> 32));
        memcpy(drawn, w, sizeof drawn);
        for (int i = 0; i < lanes; i++)
            for (int j = 0; j < 4; j++) random[k + (size_t)(4 * i + j)] = drawn[j][i];
        k += block;
    }
}

}  // namespace cpu
