// Decoding of quantized weights (llmc/quantized.h): a thread per 8 numbers, which are in one block. Bound: memory, 2 bytes
// written per weight in bf16 and 0.6 to 1.1 read. Not yet measured on a GPU.
#pragma once
#include "../ops.h"
#include "../quantized.h"
#include "device.cuh"

namespace gpu {
namespace detail {

template <WeightFormat format>
__global__ void __launch_bounds__(256) dequantize_kernel(floatX* out, const uint8_t* codes, const uint8_t* scales, size_t n) {
    constexpr bool doubled = format == WeightFormat::nf4_double, nf4 = format == WeightFormat::nf4 || doubled;
    constexpr size_t block = WeightBlock<format>::numbers, bytes = WeightBlock<format>::bytes;
    __shared__ float levels[16], levels_of_scales[doubled ? 256 : 1];
    if (nf4 && threadIdx.x < 16) levels[threadIdx.x] = nf4_level((int)threadIdx.x);
    if constexpr (doubled) levels_of_scales[threadIdx.x] = dynamic_level((int)threadIdx.x);
    __syncthreads();
    const size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * 8;
    if (i >= n) return;
    float x[8];
    if constexpr (nf4) {
        float scale;
        if constexpr (doubled) scale = DoubleScales{scales, n / 64}.scale(i / 64, levels_of_scales[scales[i / 64]]);
        else scale = reinterpret_cast<const float*>(scales)[i / 64];
        const uint32_t eight = reinterpret_cast<const uint32_t*>(codes)[i / 8];
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = levels[eight >> (8 * (k / 2) + 4 * (1 - k % 2)) & 15] * scale;
    } else {
        decode_eight<format>(x, codes + i / block * bytes, (int)(i % block));
    }
#pragma unroll
    for (int first = 0; first < 8; first += Pack<floatX>::size) {
        Pack<floatX> pack;
#pragma unroll
        for (int k = 0; k < Pack<floatX>::size; k++) pack[k] = (floatX)x[first + k];
        store(out + i + first, pack);
    }
}

}  // namespace detail

inline void dequantize_weights(Ctx& ctx, floatX* out, const QuantizedWeights& w, size_t n) {
    auto kernel = w.format == WeightFormat::nf4_double ? detail::dequantize_kernel<WeightFormat::nf4_double>
                                                       : detail::dequantize_kernel<WeightFormat::nf4>;
    visit_gguf_format(w.format, [&](auto format) { kernel = detail::dequantize_kernel<format()>; });
    LAUNCH(kernel, (unsigned)ceil_div(n, (size_t)8 * 256), 256, 0, ctx, out, w.codes, w.scales(n), n);
}

inline bool decodes_rows(const Ctx&, int) { return false; }
inline void quantized_linear_forward(Ctx&, floatX*, int, const floatX*, const QuantizedWeights&, const floatX*, int, int, int) {
    CHECK(false, "a product that decodes rows");
}

}  // namespace gpu
