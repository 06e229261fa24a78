// Encodes the weights of a frozen model (llmc/quantized.h), on the host. A tensor-parallel rank that has whole blocks of a
// matrix gets the same codes as one that has all of it.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../cpu/parallel.h"
#include "../quantized.h"
#include "gguf.h"

namespace detail {

// A block of 64, by the arithmetic of bitsandbytes: x times the fp32 reciprocal of the largest magnitude, and the level whose
// interval between the midpoints of neighboring levels has the product; a midpoint itself belongs to the lower level.
inline void quantize_nf4(const float* x, uint8_t* codes, float* scale) {
    constexpr int n = 64;
    float most = 0, bounds[15];
    for (int j = 0; j < n; j++) most = std::max(most, std::fabs(x[j]));
    for (int k = 0; k < 15; k++) bounds[k] = (nf4_level(k) + nf4_level(k + 1)) / 2;
    const float inverse = 1.0f / std::max(most, 1e-38f);
    uint8_t of[n];
    for (int j = 0; j < n; j++) {
        const float scaled = std::min(std::max(x[j] * inverse, -1.0f), 1.0f);
        int code = 0;
        for (int k = 0; k < 15; k++) code += bounds[k] < scaled;
        of[j] = (uint8_t)code;
    }
    for (int j = 0; j < n / 2; j++) codes[j] = (uint8_t)(of[2 * j] << 4 | of[2 * j + 1]);
    *scale = most;
}

}  // namespace detail

// Encodes n numbers, in whole blocks, at `to`, which has QuantizedWeights::bytes(). Returns false if one of them is too large
// for the format.
inline bool quantize_weights(WeightFormat kind, const float* x, size_t n, uint8_t* to) {
    const WeightFormatRow& row = weight_format_row(kind);
    CHECK(kind != WeightFormat::none && n % row.block == 0, "%zu numbers in blocks of %zu", n, row.block);
    if (kind != WeightFormat::nf4) return quantize(gguf_type_of(kind), x, n, (char*)to);
    uint8_t* const scales = to + QuantizedWeights::code_bytes(kind, n);
    cpu::parallel_ranges(
        n / row.block,
        [&](size_t first, size_t last) {
            for (size_t i = first; i < last; i++) {
                float scale;
                detail::quantize_nf4(x + i * row.block, to + i * row.code_bytes, &scale);
                memcpy(scales + i * row.scale_bytes, &scale, row.scale_bytes);
            }
        },
        256);
    return true;
}
