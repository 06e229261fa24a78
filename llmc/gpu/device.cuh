// Shared device code: 16-byte packs, and reductions over a warp and a block.
#pragma once
#include "../base/math.h"
#include "../base/types.h"
#include "ctx.cuh"

namespace gpu {

// 16 bytes that are loaded and stored at once. Addresses must be multiples of 16, as in rows of C elements if C % size == 0.
//   Pack<floatX> x = load(inp + i);  x[k] ...;  store(out + i, x);
template <class T>
struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T values[size];
    __device__ T& operator[](int i) { return values[i]; }
    __device__ const T& operator[](int i) const { return values[i]; }
};

template <class T>
__device__ __forceinline__ Pack<T> load(const T* p) {
    const int4 bits = *reinterpret_cast<const int4*>(p);
    Pack<T> pack;
    memcpy((void*)&pack, &bits, 16);
    return pack;
}
// A streaming load, for data that is read once: leaves the caches to other data.
template <class T>
__device__ __forceinline__ Pack<T> load_streaming(const T* p) {
    const int4 bits = __ldcs(reinterpret_cast<const int4*>(p));
    Pack<T> pack;
    memcpy((void*)&pack, &bits, 16);
    return pack;
}
template <class T>
__device__ __forceinline__ void store(T* p, const Pack<T>& pack) {
    int4 bits;
    memcpy((void*)&bits, &pack, 16);
    *reinterpret_cast<int4*>(p) = bits;
}

// Part of a row of any length C: elements beyond its end are read as zero and not written. `packed` guarantees that the row
// starts at a multiple of 16 bytes and that C is a multiple of the pack's size; otherwise elements are moved one by one.
template <bool packed, class T>
__device__ __forceinline__ Pack<T> load_part(const T* row, int first, int C) {
    if constexpr (packed)
        if (first < C) return load(row + first);
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; k++) pack[k] = !packed && first + k < C ? row[first + k] : T(0);
    return pack;
}
template <bool packed, class T>
__device__ __forceinline__ void store_part(T* row, int first, int C, const Pack<T>& pack) {
    if constexpr (packed) {
        if (first < C) store(row + first, pack);
    } else {
#pragma unroll
        for (int k = 0; k < Pack<T>::size; k++)
            if (first + k < C) row[first + k] = pack[k];
    }
}

// True if memory at these addresses can be moved in packs (null: not used).
template <class... T>
bool aligned_16(const T*... p) {
    return (... && ((uintptr_t)p % 16 == 0));
}

constexpr unsigned all_lanes = 0xffffffffu;

// Every lane gets the result. The order is fixed (butterfly), so the bits are the same in every run.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(all_lanes, x, offset);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(all_lanes, x, offset));
    return x;
}

// Reduces over a block of whole warps (at most 32); every thread gets the result. Contains two barriers, so all threads must
// call it; consecutive calls need no barrier between them.
template <class F>
__device__ __forceinline__ float block_reduce(float x, float neutral, F warp_reduce) {
    __shared__ float of_warp[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    x = warp_reduce(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    const float result = warp_reduce(lane < n_warps ? of_warp[lane] : neutral);
    __syncthreads();  // the next call overwrites of_warp
    return result;
}
__device__ __forceinline__ float block_sum(float x) {
    return block_reduce(x, 0.0f, [](float y) { return warp_sum(y); });
}
__device__ __forceinline__ float block_max(float x) {
    return block_reduce(x, -INFINITY, [](float y) { return warp_max(y); });
}

}  // namespace gpu
