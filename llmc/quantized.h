// Quantized weights: a frozen matrix in 4 or 8 bits per number, decoded to floatX before its products. The numbers of a row are
// divided into blocks, each with its own scale.
//   nf4    blocks of 64: one of 16 levels, the quantiles of a normal distribution, times the block's largest magnitude in fp32
//          (QLoRA; Dettmers et al., 2023, arXiv 2305.14314); 4.5 bits per weight. Levels, decisions and order of the codes are
//          as in bitsandbytes: the first of two neighbors is in the upper half of a byte
//   q8_0   blocks of 32: round(x / d) times d = max|x| / 127 in fp16, as in GGUF (model/gguf.h); 8.5 bits per weight
// Both decode as float(code) * scale in fp32, rounded once. model/quantize.h encodes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/enum_table.h"
#include "base/math.h"
#include "base/types.h"

enum class WeightFormat { none, nf4, q8_0 };  // none: floatX
struct WeightFormatRow {
    WeightFormat value;
    const char* word;                // of --quantize-base
    size_t block;                    // numbers with a common scale
    size_t code_bytes, scale_bytes;  // of a block
};
inline constexpr WeightFormatRow weight_formats[] = {
    {WeightFormat::none, "none", 1, 0, 0}, {WeightFormat::nf4, "nf4", 64, 32, 4}, {WeightFormat::q8_0, "q8_0", 32, 32, 2}};
static_assert(is_table_of<WeightFormat>(weight_formats));
inline const WeightFormatRow& weight_format_row(WeightFormat format) { return row_of(weight_formats, format); }
inline WeightFormat weight_format(const std::string& word) {
    for (const WeightFormatRow& row : weight_formats)
        if (word == row.word) return row.value;
    fail("there is no format of weights '%s'", word.c_str());
}
inline std::vector<std::string> weight_format_words() {
    std::vector<std::string> words;
    for (const WeightFormatRow& row : weight_formats) words.emplace_back(row.word);
    return words;
}

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
        return code_bytes(format, n) + round_up(n / row.block * row.scale_bytes, (size_t)64);
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
// A finite fp16 number: its exponent is 112 less than with the same bits in fp32, also if it is denormal.
HD inline float scale_of_half(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    float x;
    memcpy(&x, &magnitude, 4);
    return x * 5.192296858534828e33f;  // 2^112; scales are not negative
}
