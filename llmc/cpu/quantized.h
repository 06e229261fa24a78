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
#if CPU_FAST_PATHS && defined(__AVX2__)
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
// The block's levels times its scale are computed once; its codes only choose among them.
inline void dequantize_nf4(floatX* out, const uint8_t* codes, const uint8_t* scale) {
    float s;
    memcpy(&s, scale, sizeof s);
    floatX levels[16];
#if CPU_FAST_PATHS
    for (int k = 0; k < 16; k += lanes) store(levels + k, load(nf4_levels.data() + k) * s);
#else
    for (int k = 0; k < 16; k++) levels[k] = (floatX)(nf4_levels[(size_t)k] * s);
#endif
    choose_levels(out, codes, (const floatX*)levels);
}

// Decodes `count` numbers from number `first` on, in whole blocks; n: the numbers of the whole matrix.
inline void dequantize_part(floatX* out, const QuantizedWeights& w, size_t n, size_t first, size_t count) {
    const WeightFormatRow& row = weight_format_row(w.format);
    const size_t begin = first / row.block, blocks = count / row.block;
    const uint8_t *codes = w.codes + begin * row.code_bytes, *scales = w.scales(n) + begin * row.scale_bytes;
    if (w.format == WeightFormat::nf4)
        for (size_t i = 0; i < blocks; i++) dequantize_nf4(out + i * 64, codes + i * 32, scales + i * 4);
    visit_gguf_format(w.format, [&](auto format) {
        constexpr size_t block = WeightBlock<format()>::numbers, bytes = WeightBlock<format()>::bytes;
        for (size_t i = 0; i < blocks; i++)
            for (size_t k = 0; k < block; k += 8) {
                float x[8];
                decode_eight<format()>(x, codes + i * bytes, (int)k);
                for (size_t j = 0; j < 8; j++) out[i * block + k + j] = (floatX)x[j];
            }
    });
}

}  // namespace detail

inline void dequantize_weights(Ctx&, floatX* out, const QuantizedWeights& w, size_t n) {
    parallel_ranges(
        n, [=](size_t first, size_t last) { detail::dequantize_part(out + first, w, n, first, last - first); }, 1 << 14);
}

}  // namespace cpu
