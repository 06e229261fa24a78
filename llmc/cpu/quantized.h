// Decoding of quantized weights (llmc/quantized.h) for the products that follow. Bound: a decoded weight is written to memory
// and read again by the product, 2 bytes each in bf16, next to 0.6 to 1.1 bytes of code.
#pragma once
#include <cstring>

#include "../ops.h"
#include "../quantized.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// The block's levels times its scale are computed once; its codes only choose among them.
inline void dequantize_nf4(floatX* out, const uint8_t* codes, const uint8_t* scale) {
    float s;
    memcpy(&s, scale, sizeof s);
    floatX levels[16];
    for (int k = 0; k < 16; k++) levels[k] = (floatX)(nf4_level(k) * s);
    for (int j = 0; j < 32; j++) {
        out[2 * j] = levels[codes[j] >> 4];
        out[2 * j + 1] = levels[codes[j] & 15];
    }
}
inline void dequantize_q8_0(floatX* out, const uint8_t* codes, const uint8_t* scale) {
    uint16_t half;
    memcpy(&half, scale, sizeof half);
    const float d = scale_of_half(half);
    for (int j = 0; j < 32; j++) out[j] = (floatX)((float)(int8_t)codes[j] * d);
}

}  // namespace detail

inline void dequantize_weights(Ctx&, floatX* out, const QuantizedWeights& w, size_t n) {
    const WeightFormatRow& row = weight_format_row(w.format);
    const uint8_t* const scales = w.scales(n);
    const auto block = w.format == WeightFormat::nf4 ? detail::dequantize_nf4 : detail::dequantize_q8_0;
    parallel_ranges(
        n / row.block,
        [=](size_t first, size_t last) {
            for (size_t i = first; i < last; i++)
                block(out + i * row.block, w.codes + i * row.code_bytes, scales + i * row.scale_bytes);
        },
        256);
}

}  // namespace cpu
