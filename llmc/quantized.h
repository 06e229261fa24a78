// Quantized weights: a frozen matrix in 4 to 8 bits per number, decoded to floatX before its products. The numbers of a row are
// divided into blocks, each with its own scale.
//   nf4    blocks of 64: one of 16 levels, the quantiles of a normal distribution, times the block's largest magnitude in fp32
//          (QLoRA; Dettmers et al., 2023, arXiv 2305.14314); 4.5 bits per weight. Levels, decisions and order of the codes are
//          as in bitsandbytes: the first of two neighbors is in the upper half of a byte. The scales follow all codes
//   nf4-double   nf4 with its scales in 8 bits (double quantization, section 3 of the paper); 4.13 bits per weight: see
//          DoubleScales
//   others blocks as in GGUF files (model/gguf.h), which contain their scales; decode_eight() has the formulas
// The decoded number is computed in fp32 and rounded once. model/quantize.h encodes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/enum_table.h"
#include "base/math.h"
#include "base/types.h"

// none: floatX; gguf: each matrix as in the GGUF file that it is read from.
enum class WeightFormat { none, nf4, nf4_double, q4_k, q5_k, q6_k, q8_0, q4_0, q4_1, q5_0, q5_1, gguf };
struct WeightFormatRow {
    WeightFormat value;
    const char* word;  // of --quantize-base, if it can be encoded
    bool encodes;
    size_t block;                    // numbers with a common scale
    size_t code_bytes, scale_bytes;  // of a block; 0: the scale is among the codes
};
inline constexpr WeightFormatRow weight_formats[] = {{WeightFormat::none, "none", true, 1, 0, 0},
                                                     {WeightFormat::nf4, "nf4", true, 64, 32, 4},
                                                     {WeightFormat::nf4_double, "nf4-double", true, 64, 32, 1},
                                                     {WeightFormat::q4_k, "q4_k", true, 256, 144, 0},
                                                     {WeightFormat::q5_k, "q5_k", true, 256, 176, 0},
                                                     {WeightFormat::q6_k, "q6_k", true, 256, 210, 0},
                                                     {WeightFormat::q8_0, "q8_0", true, 32, 34, 0},
                                                     {WeightFormat::q4_0, "q4_0", false, 32, 18, 0},
                                                     {WeightFormat::q4_1, "q4_1", false, 32, 20, 0},
                                                     {WeightFormat::q5_0, "q5_0", false, 32, 22, 0},
                                                     {WeightFormat::q5_1, "q5_1", false, 32, 24, 0},
                                                     {WeightFormat::gguf, "gguf", false, 1, 0, 0}};
static_assert(is_table_of<WeightFormat>(weight_formats));
constexpr const WeightFormatRow& weight_format_row(WeightFormat format) { return row_of(weight_formats, format); }
template <WeightFormat format>
struct WeightBlock {
    static constexpr size_t numbers = weight_format_row(format).block, bytes = weight_format_row(format).code_bytes;
};
inline WeightFormat weight_format(const std::string& word) {
    for (const WeightFormatRow& row : weight_formats)
        if (word == row.word) return row.value;
    fail("there is no format of weights '%s'", word.c_str());
}
// The formats of --quantize-base.
inline std::vector<std::string> weight_format_words() {
    std::vector<std::string> words;
    for (const WeightFormatRow& row : weight_formats)
        if (row.encodes || row.value == WeightFormat::gguf) words.emplace_back(row.word);
    return words;
}
// visit(std::integral_constant<WeightFormat, format>()), if the format has GGUF's blocks.
template <class Visit>
void visit_gguf_format(WeightFormat format, Visit visit) {
    using F = WeightFormat;
    switch (format) {
        case F::none:
        case F::gguf:
        case F::nf4:
        case F::nf4_double: return;
        case F::q4_k: return visit(std::integral_constant<F, F::q4_k>());
        case F::q5_k: return visit(std::integral_constant<F, F::q5_k>());
        case F::q6_k: return visit(std::integral_constant<F, F::q6_k>());
        case F::q8_0: return visit(std::integral_constant<F, F::q8_0>());
        case F::q4_0: return visit(std::integral_constant<F, F::q4_0>());
        case F::q4_1: return visit(std::integral_constant<F, F::q4_1>());
        case F::q5_0: return visit(std::integral_constant<F, F::q5_0>());
        case F::q5_1: return visit(std::integral_constant<F, F::q5_1>());
    }
}

// The scales of a whole matrix in nf4-double, as in bitsandbytes: a byte for each, which is a dynamic_level; a factor in fp32
// for each group of 256; and the mean of all. A scale is mean + factor level.
struct DoubleScales {
    static constexpr size_t group = 256;
    const uint8_t* codes;
    size_t n;  // scales

    static size_t bytes(size_t n) { return (size_t)factors_at(n) + (ceil_div(n, group) + 1) * sizeof(float); }
    HD static constexpr size_t factors_at(size_t n) { return (n + 3) / 4 * 4; }
    // And, last, the mean.
    HD const float* factors() const { return (const float*)(codes + factors_at(n)); }
    // The product is rounded before it is added; in double it is exact, so that no compiler fuses the two.
    HD float scale(size_t i, float level) const {
        return (float)((double)level * (double)factors()[i / group]) + factors()[(n + group - 1) / group];
    }
};
// Formats whose blocks depend on all numbers of a matrix, so that a part of it has other codes.
constexpr bool codes_whole_matrices(WeightFormat format) { return format == WeightFormat::nf4_double; }

// n numbers: the codes of all blocks, then their scales.
struct QuantizedWeights {
    WeightFormat format = WeightFormat::none;
    const uint8_t* codes = nullptr;
    bool used() const { return format != WeightFormat::none; }
    // Bytes before the scales, and of both; multiples of 64.
    static size_t code_bytes(WeightFormat format, size_t n) {
        const WeightFormatRow& row = weight_format_row(format);
        return round_up(n / row.block * row.code_bytes, (size_t)64);
    }
    static size_t bytes(WeightFormat format, size_t n) {
        const WeightFormatRow& row = weight_format_row(format);
        const size_t blocks = n / row.block;
        return code_bytes(format, n) +
               round_up(format == WeightFormat::nf4_double ? DoubleScales::bytes(blocks) : blocks * row.scale_bytes,
                        (size_t)64);
    }
    const uint8_t* scales(size_t n) const { return codes + code_bytes(format, n); }
};

HD constexpr float nf4_level(int code) {
    constexpr float levels[] = {-1.0f,
                                -0.6961928009986877f,
                                -0.5250730514526367f,
                                -0.39491748809814453f,
                                -0.28444138169288635f,
                                -0.18477343022823334f,
                                -0.09105003625154495f,
                                0.0f,
                                0.07958029955625534f,
                                0.16093020141124725f,
                                0.24611230194568634f,
                                0.33791524171829224f,
                                0.44070982933044434f,
                                0.5626170039176941f,
                                0.7229568362236023f,
                                1.0f};
    return levels[code];
}
// bitsandbytes' dynamic 8-bit numbers (Dettmers, 2015, arXiv 1511.04561), from -0.993 to 1 in increasing order: 127 and 255 are
// 0 and 1. The others are 127 + m and 127 - m, positive and negative, of m = 2^i + k, k < 2^i: 10^(i - 6) times the middle of
// part k of 2^i equal parts of [0.1, 1], whose bounds have the roundings of torch.linspace.
HD constexpr float dynamic_level(int code) {
    if (code == 127 || code == 255) return code == 255 ? 1.0f : 0.0f;
    constexpr float powers[] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    const int m = code > 127 ? code - 127 : 127 - code;
    int i = 0;
    while (m >> (i + 1)) i++;
    const int n = 1 << i, k = m - n;
    const double step = (1.0f - 0.1f) / (float)n;
    float bounds[2] = {};
    for (int j = 0; j < 2; j++) bounds[j] = (float)(2 * (k + j) < n ? (double)0.1f + step * (k + j) : 1.0 - step * (n - k - j));
    const float level = powers[i] * ((bounds[0] + bounds[1]) / 2);
    return code > 127 ? level : -level;
}
HD inline float scale_at(const uint8_t* bytes) { return half_to_float((uint16_t)(bytes[0] | bytes[1] << 8)); }

// Scale and minimum of group j of 8, 6 bits each. The upper 2 bits of the last four groups are in the bytes of the first.
HD inline int scale_of_group(const uint8_t* s, int j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6 << 4); }
HD inline int minimum_of_group(const uint8_t* s, int j) { return j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6 << 4); }

// x = numbers [first, first + 8) of a block, first a multiple of 8. d, m: fp16; q: an integer of the format's bits, 6 bits for
// the scale and the minimum of a group. Except in q6_k, products are exact, so it does not matter if a compiler fuses them with
// the sum.
template <WeightFormat format>
HD inline void decode_eight(float* x, const uint8_t* block, int first) {
    using F = WeightFormat;
    constexpr bool five = format == F::q5_0 || format == F::q5_1 || format == F::q5_k;
    if constexpr (format == F::q8_0) {  // d q
        const float d = scale_at(block);
        for (int k = 0; k < 8; k++) x[k] = (float)(int8_t)block[2 + first + k] * d;
    } else if constexpr (format == F::q6_k) {  // (d scale) (q - 32), a signed scale of 8 bits for 16 numbers; d is last
        const int half = first / 128, part = first / 32 % 4, at = first % 32;
        const uint8_t *low = block + 64 * half + 32 * (part % 2) + at, *high = block + 128 + 32 * half + at;
        const float scale = scale_at(block + 208) * (float)(int8_t)block[192 + first / 16];
        for (int k = 0; k < 8; k++) {
            const int q = (low[k] >> part / 2 * 4 & 15) | (high[k] >> 2 * part & 3) << 4;
            x[k] = scale * (float)(q - 32);
        }
    } else if constexpr (format == F::q4_k || format == F::q5_k) {
        // (d scale) q - m minimum, for groups of 32; bit j of the fifth bits of a number is for group j
        const int group = first / 32, at = first % 32;
        const float scale = scale_at(block) * (float)scale_of_group(block + 4, group),
                    minimum = scale_at(block + 2) * (float)minimum_of_group(block + 4, group);
        const uint8_t *high = block + 16 + at, *low = block + (five ? 48 : 16) + group / 2 * 32 + at;
        for (int k = 0; k < 8; k++) {
            const int q = (low[k] >> group % 2 * 4 & 15) | (five ? (high[k] >> group & 1) << 4 : 0);
            x[k] = scale * (float)q - minimum;
        }
    } else {  // d q + m, or d (q - half of the levels); the first 16 of 32 numbers are in the lower halves of 16 bytes
        constexpr bool has_minimum = format == F::q4_1 || format == F::q5_1;
        constexpr int fifth_bits = has_minimum ? 4 : 2, codes = fifth_bits + (five ? 4 : 0);
        const float d = scale_at(block), m = has_minimum ? scale_at(block + 2) : 0;
        for (int k = 0; k < 8; k++) {
            const int q = (block[codes + first % 16 + k] >> first / 16 * 4 & 15) |
                          (five ? (block[fifth_bits + first / 8] >> k & 1) << 4 : 0);
            x[k] = has_minimum ? d * (float)q + m : d * (float)(q - (five ? 16 : 8));
        }
    }
}
