// Rotary positions; formulas in cpu/rope.h. In place; values are unchanged; fp32 arithmetic. Each element is read and written
// once: bound by memory bandwidth. A thread rotates one pack of pairs and loops over heads, so that it reads the angles once.
#pragma once
#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

// One block per row n: x runs over packs of half of a head's rotated numbers, y over heads.
template <bool packed>
__global__ void __launch_bounds__(1024)
    rotate_kernel(floatX* qkv, const int* __restrict__ positions, const real* __restrict__ cos_sin, int rotated, int NH,
                  int NKV, int HS, float direction) {
    constexpr int size = Pack<floatX>::size, width = Pack<real>::size;
    const int half = rotated / 2, j = threadIdx.x * size;
    const real* angle = cos_sin + (size_t)positions[blockIdx.x] * rotated;  // (half, 2)
    float cosine[size], sine[size];
#pragma unroll
    for (int k = 0; k < 2 * size; k += width) {
        const Pack<real> a = load_part<packed>(angle, 2 * j + k, rotated);
#pragma unroll
        for (int i = 0; i < width; i += 2) {
            cosine[(k + i) / 2] = a[i];
            sine[(k + i) / 2] = direction * a[i + 1];
        }
    }
    for (int head = threadIdx.y; head < NH + NKV; head += blockDim.y) {
        floatX *low = qkv + ((size_t)blockIdx.x * (NH + 2 * NKV) + head) * HS, *high = low + half;
        Pack<floatX> x1 = load_part<packed>(low, j, half), x2 = load_part<packed>(high, j, half);
#pragma unroll
        for (int k = 0; k < size; k++) {
            const float a = (float)x1[k], b = (float)x2[k];
            x1[k] = (floatX)(a * cosine[k] - b * sine[k]);
            x2[k] = (floatX)(b * cosine[k] + a * sine[k]);
        }
        store_part<packed>(low, j, half, x1);
        store_part<packed>(high, j, half, x2);
    }
}

inline void rotate(Ctx& ctx, floatX* qkv, const Rope& rope, const AttentionShape& shape, float direction) {
    const int N = shape.N(), NH = shape.NH, NKV = shape.NKV, HS = shape.HS;
    if (N == 0) return;
    const int half = rope.rotated / 2, packs = ceil_div(half, Pack<floatX>::size);
    CHECK(rope.rotated % 2 == 0 && half > 0 && rope.rotated <= HS && packs <= 1024, "rotation of %d of %d", rope.rotated, HS);
    const int heads = std::max(1, std::min(NH + NKV, 256 / packs));
    const bool packed = half % Pack<floatX>::size == 0 && HS % Pack<floatX>::size == 0 && aligned_16(qkv, rope.cos_sin);
    const auto kernel = packed ? rotate_kernel<true> : rotate_kernel<false>;
    LAUNCH(kernel, N, dim3(packs, heads), 0, ctx, qkv, rope.positions, rope.cos_sin, rope.rotated, NH, NKV, HS, direction);
}

}  // namespace detail

inline void rope_forward(Ctx& ctx, floatX* qkv, const Rope& rope, const AttentionShape& shape) {
    detail::rotate(ctx, qkv, rope, shape, 1);
}

inline void rope_backward(Ctx& ctx, floatX* dqkv, const Rope& rope, const AttentionShape& shape) {
    detail::rotate(ctx, dqkv, rope, shape, -1);
}

}  // namespace gpu
