// Decoding of quantized weights (llmc/quantized.h) for the products that follow. Bound: a decoded weight is written to memory
// and read again by the product, 2 bytes each in bf16, next to 0.6 to 1.1 bytes of code.
#pragma once
#include <array>
#include <cstring>

#include "../ops.h"
#include "../quantized.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {
namespace detail {

// out = the levels that the codes of a block of NF4 choose.
template <class E>
void choose_levels(E* out, const uint8_t* codes, const E* levels) {
    for (int j = 0; j < 32; j++) {
        out[2 * j] = levels[codes[j] >> 4];
        out[2 * j + 1] = levels[codes[j] & 15];
    }
}
#if CPU_FAST_PATHS && defined(__AVX512BW__)
// The 16 levels twice, so that the upper bits of a code do not matter to a shuffle of words.
inline __m512i twice(__m256i levels) { return _mm512_maskz_broadcast_i64x4(0xff, levels); }
inline void choose_levels(bf16* out, const uint8_t* codes, const bf16* levels) {
    const __m512i table = twice(_mm256_loadu_si256((const __m256i*)levels));
    for (int j = 0; j < 32; j += 16) {
        const __m512i both = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)(codes + j)));
        const __m512i each =
            _mm512_or_si512(_mm512_maskz_srli_epi32(0xffff, both, 4), _mm512_maskz_slli_epi32(0xffff, both, 16));
        _mm512_storeu_si512(out + 2 * j, _mm512_maskz_permutexvar_epi16(~0u, each, table));
    }
}
#elif CPU_FAST_PATHS && defined(__AVX2__)
// A byte shuffle looks up 16 codes at once, separately in the lower and the upper bytes of the levels.
inline void choose_levels(bf16* out, const uint8_t* codes, const bf16* levels) {
    __m128i first, last;
    memcpy(&first, levels, sizeof first);
    memcpy(&last, levels + 8, sizeof last);
    const __m128i byte = _mm_set1_epi16(255), four_bits = _mm_set1_epi8(15);
    const __m128i lower = _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(last, byte)),
                  upper = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8));
    for (int j = 0; j < 32; j += 16, out += 32) {
        __m128i both;
        memcpy(&both, codes + j, sizeof both);
        const __m128i even = _mm_and_si128(_mm_srli_epi16(both, 4), four_bits), odd = _mm_and_si128(both, four_bits);
        const __m128i even_lower = _mm_shuffle_epi8(lower, even), even_upper = _mm_shuffle_epi8(upper, even),
                      odd_lower = _mm_shuffle_epi8(lower, odd), odd_upper = _mm_shuffle_epi8(upper, odd);
        const __m128i evens[] = {_mm_unpacklo_epi8(even_lower, even_upper), _mm_unpackhi_epi8(even_lower, even_upper)},
                      odds[] = {_mm_unpacklo_epi8(odd_lower, odd_upper), _mm_unpackhi_epi8(odd_lower, odd_upper)};
        const __m128i numbers[] = {_mm_unpacklo_epi16(evens[0], odds[0]), _mm_unpackhi_epi16(evens[0], odds[0]),
                                   _mm_unpacklo_epi16(evens[1], odds[1]), _mm_unpackhi_epi16(evens[1], odds[1])};
        memcpy((void*)out, numbers, sizeof numbers);
    }
}
#endif

constexpr std::array<float, 16> nf4_levels = [] {
    std::array<float, 16> levels{};
    for (size_t k = 0; k < 16; k++) levels[k] = nf4_level((int)k);
    return levels;
}();
constexpr std::array<float, 256> dynamic_levels = [] {
    std::array<float, 256> levels{};
    for (size_t k = 0; k < 256; k++) levels[k] = dynamic_level((int)k);
    return levels;
}();
// The block's levels times its scale are computed once; its codes only choose among them.
inline void dequantize_nf4(floatX* out, const uint8_t* codes, float s /*scale*/) {
    floatX levels[16];
#if CPU_FAST_PATHS
    for (int k = 0; k < 16; k += lanes) store(levels + k, load(nf4_levels.data() + k) * s);
#else
    for (int k = 0; k < 16; k++) levels[k] = (floatX)(nf4_levels[(size_t)k] * s);
#endif
    choose_levels(out, codes, (const floatX*)levels);
}

inline float scale_of(const uint8_t* half) {
#if CPU_FAST_PATHS && defined(__F16C__)
    uint16_t bits;
    memcpy(&bits, half, sizeof bits);
    return _cvtsh_ss(bits);
#else
    return scale_at(half);
#endif
}

// Decodes a block of GGUF's: the plain loop.
template <WeightFormat format>
void decode_plain(floatX* out, const uint8_t* block) {
    for (size_t first = 0; first < WeightBlock<format>::numbers; first += 8) {
        float x[8];
        decode_eight<format>(x, block, (int)first);
        for (size_t k = 0; k < 8; k++) out[first + k] = (floatX)x[k];
    }
}
#if CPU_FAST_PATHS
typedef int32_t integers __attribute__((vector_size(4 * lanes)));
inline floats numbers_of(const int8_t* q) {
    int32_t each[lanes];
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): codes are numbers with a sign
    for (int i = 0; i < lanes; i++) each[i] = q[i];
    integers all;
    memcpy(&all, each, sizeof all);
    return __builtin_convertvector(all, floats);
}
// Scales and minima of the 8 groups of a block of q4_k or q5_k.
struct GroupScales {
    float scale[8], minimum[8];
    explicit GroupScales(const uint8_t* block) {
        uint32_t s[3], bytes[4];
        memcpy(s, block + 4, sizeof s);
        for (int k = 0; k < 2; k++) {
            bytes[2 * k] = s[k] & 0x3f3f3f3f;
            bytes[2 * k + 1] = (s[2] >> 4 * k & 0x0f0f0f0f) | (s[k] >> 6 & 0x03030303) << 4;
        }
        int8_t each[16];
        memcpy(each, bytes, sizeof each);
        float all[16];
        for (int i = 0; i < 16; i += lanes) store(all + i, numbers_of(each + i));
        const float d = scale_of(block), m = scale_of(block + 2);
        for (int j = 0; j < 8; j++) {
            scale[j] = d * all[j];
            minimum[j] = m * all[8 + j];
        }
    }
};
#if defined(__AVX512BW__)
// The 16 levels of a group are computed once; its codes only choose among them.
inline void decode_q4_k(bf16* out, const uint8_t* block) {
    const floats steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const GroupScales groups(block);
    const auto choose = [&](int j, __m512i codes) {
        const halves levels = rounded_halves(steps * groups.scale[j] - groups.minimum[j]);
        _mm512_storeu_si512(out + j * 32, _mm512_maskz_permutexvar_epi16(~0u, codes, twice((__m256i)levels)));
    };
    for (int j = 0; j < 8; j += 2) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)(block + 16 + j * 16));
        const __m512i codes = _mm512_maskz_cvtepu8_epi16(~0u, both);
        choose(j, codes);
        choose(j + 1, _mm512_maskz_srli_epi16(~0u, codes, 4));
    }
}
#endif

// The codes of a block become bytes, then a vector of numbers at a time, which are in one group.
template <WeightFormat format>
void decode(floatX* out, const uint8_t* block) {
    using F = WeightFormat;
#if defined(__AVX512BW__)
    if constexpr (format == F::q4_k && sizeof(floatX) == 2) return decode_q4_k((bf16*)out, block);
#endif
    [[maybe_unused]] int8_t q[256];
    if constexpr (format == F::q8_0) {
        const float d = scale_of(block);
        for (int i = 0; i < 32; i += lanes)
            store(out + i, __builtin_convertvector((integers)(load(block + 2 + i) << 24) >> 24, floats) * d);
    } else if constexpr (format == F::q6_k) {
        for (int half = 0; half < 2; half++) {
            const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
            int8_t* const to = q + 128 * half;
            for (int k = 0; k < 32; k++) {
                to[k] = (int8_t)((low[k] & 15) + (high[k] & 3) * 16 - 32);
                to[k + 32] = (int8_t)((low[k + 32] & 15) + (high[k] >> 2 & 3) * 16 - 32);
                to[k + 64] = (int8_t)((low[k] >> 4) + (high[k] >> 4 & 3) * 16 - 32);
                to[k + 96] = (int8_t)((low[k + 32] >> 4) + (high[k] >> 6) * 16 - 32);
            }
        }
        const float d = scale_of(block + 208);
        float scales[16];
        for (int j = 0; j < 16; j++) scales[j] = d * (float)(int8_t)block[192 + j];
        for (int i = 0; i < 256; i += lanes) store(out + i, numbers_of(q + i) * scales[i / 16]);
    } else if constexpr (format == F::q4_k || format == F::q5_k) {
        constexpr bool five = format == F::q5_k;
        const GroupScales groups(block);
        for (int j = 0; j < 8; j += 2)
            for (int k = 0; k < 32; k++) {
                const uint8_t low = block[(five ? 48 : 16) + j * 16 + k], high = five ? block[16 + k] >> j : 0;
                q[j * 32 + k] = (int8_t)((low & 15) + (high & 1) * 16);
                q[j * 32 + 32 + k] = (int8_t)((low >> 4) + (high >> 1 & 1) * 16);
            }
        for (int i = 0; i < 256; i += lanes) store(out + i, numbers_of(q + i) * groups.scale[i / 32] - groups.minimum[i / 32]);
    } else {
        decode_plain<format>(out, block);
    }
}
#else
template <WeightFormat format>
void decode(floatX* out, const uint8_t* block) {
    decode_plain<format>(out, block);
}
#endif

// Decodes `count` numbers from number `first` on, in whole blocks; n: the numbers of the whole matrix.
inline void dequantize_part(floatX* out, const QuantizedWeights& w, size_t n, size_t first, size_t count) {
    const WeightFormatRow& row = weight_format_row(w.format);
    const size_t begin = first / row.block, blocks = count / row.block;
    const uint8_t* const codes = w.codes + begin * row.code_bytes;
    if (w.format == WeightFormat::nf4) {
        const float* const scales = (const float*)w.scales(n) + begin;
        for (size_t i = 0; i < blocks; i++) dequantize_nf4(out + i * 64, codes + i * 32, scales[i]);
    }
    if (w.format == WeightFormat::nf4_double) {
        const DoubleScales scales = {w.scales(n), n / row.block};
        for (size_t i = 0; i < blocks; i++)
            dequantize_nf4(out + i * 64, codes + i * 32, scales.scale(begin + i, dynamic_levels[scales.codes[begin + i]]));
    }
    visit_gguf_format(w.format, [&](auto format) {
        constexpr size_t block = WeightBlock<format()>::numbers, bytes = WeightBlock<format()>::bytes;
        for (size_t i = 0; i < blocks; i++) decode<format()>(out + i * block, codes + i * bytes);
    });
}

}  // namespace detail

inline void dequantize_weights(Ctx&, floatX* out, const QuantizedWeights& w, size_t n) {
    parallel_ranges(
        n, [=](size_t first, size_t last) { detail::dequantize_part(out + first, w, n, first, last - first); }, 1 << 14);
}

}  // namespace cpu
