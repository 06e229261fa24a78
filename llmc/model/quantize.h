// Encodes the weights of a frozen model (llmc/quantized.h), on the host. A tensor-parallel rank that has whole blocks of a
// matrix gets the same codes as one that has all of it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
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

// The scales of a matrix in nf4-double, by the arithmetic of bitsandbytes 0.50 on a CPU: a group's largest difference from the
// mean is its factor; differences divided by it are rounded to 65,536 steps from -1 to 1, then to a level. The mean is a sum in
// double; PyTorch sums in fp32, in an order that depends on the device and the number of threads, so its last bits may differ.
inline void quantize_scales(const std::vector<float>& scales, uint8_t* to) {
    const size_t n = scales.size();
    float *const factors = (float*)(to + DoubleScales::factors_at(n)), bounds[255];
    for (int k = 0; k < 255; k++) bounds[k] = (dynamic_level(k) + dynamic_level(k + 1)) / 2;
    const float mean = (float)(std::accumulate(scales.begin(), scales.end(), 0.0) / (double)n);
    for (size_t first = 0; first < n; first += DoubleScales::group) {
        const size_t end = std::min(n, first + DoubleScales::group);
        float most = 0;
        for (size_t i = first; i < end; i++) most = std::max(most, std::fabs(scales[i] - mean));
        factors[first / DoubleScales::group] = most;
        const float inverse = most > 0 ? 1.0f / most : 0;
        for (size_t i = first; i < end; i++) {
            const float scaled = std::min(std::max((scales[i] - mean) * inverse, -1.0f), 1.0f);
            const float steps = (float)((double)((scaled + 1) * 0.5f) * 65535);
            const float rounded = -1 + (float)(2 * (int)std::floor(steps + 0.5f)) / 65535;
            to[i] = most > 0 ? (uint8_t)(std::lower_bound(bounds, bounds + 255, rounded) - bounds) : 0;
        }
    }
    factors[ceil_div(n, DoubleScales::group)] = mean;
}

}  // namespace detail

// Encodes n numbers, in whole blocks, at `to`, which has QuantizedWeights::bytes(). Returns false if one of them is too large
// for the format.
inline bool quantize_weights(WeightFormat kind, const float* x, size_t n, uint8_t* to) {
    const WeightFormatRow& row = weight_format_row(kind);
    CHECK(kind != WeightFormat::none && n % row.block == 0, "%zu numbers in blocks of %zu", n, row.block);
    const bool doubled = kind == WeightFormat::nf4_double;
    if (kind != WeightFormat::nf4 && !doubled) return quantize(gguf_type_of(kind), x, n, (char*)to);
    std::vector<float> scales(n / row.block);
    cpu::parallel_ranges(
        n / row.block,
        [&](size_t first, size_t last) {
            for (size_t i = first; i < last; i++) detail::quantize_nf4(x + i * row.block, to + i * row.code_bytes, &scales[i]);
        },
        256);
    uint8_t* const coded_scales = to + QuantizedWeights::code_bytes(kind, n);
    if (doubled) detail::quantize_scales(scales, coded_scales);
    else memcpy(coded_scales, scales.data(), scales.size() * sizeof(float));
    return true;
}
