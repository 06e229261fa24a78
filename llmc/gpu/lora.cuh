// Low-rank adapters: conversion between the matrices B of a layer's adapters and the block-diagonal matrix of all of them
// (model/lora.h): a thread per element of the latter, a thousandth of the layer's own memory traffic.
#pragma once
#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

// The index in B of element i of the block-diagonal matrix; -1: none.
__device__ inline int64_t lora_place(const LoraRows& rows, size_t i) {
    const int width = rows.width(), all_rows = (int)(i / width), column = (int)(i % width);
    const int expert = all_rows / rows.OC, row = all_rows % rows.OC;
    int64_t place = -1;
#pragma unroll  // so that the blocks stay where arguments are, and are not copied to local memory
    for (int k = 0; k < 3; k++) {
        const LoraRows::Block& block = rows.block[k];
        if (k < rows.blocks && row >= block.row && row < block.row + block.rows && column / rows.rank == block.part)
            place = ((int64_t)expert * rows.packed + block.packed + row - block.row) * rows.rank + column % rows.rank;
    }
    return place;
}

__global__ void __launch_bounds__(256) lora_spread_kernel(floatX* wide, const floatX* b, LoraRows rows, float scale, size_t n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    const int64_t place = lora_place(rows, i);
    wide[i] = (floatX)(place < 0 ? 0.0f : scale * (float)b[place]);
}

template <bool add>
__global__ void __launch_bounds__(256) lora_collect_kernel(real* db, const real* dwide, LoraRows rows, float scale, size_t n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    const int64_t place = lora_place(rows, i);
    if (place >= 0) db[place] = (add ? db[place] : real(0)) + scale * dwide[i];
}

}  // namespace detail

inline void lora_spread(Ctx& ctx, floatX* wide, const floatX* b, const LoraRows& rows, real scale) {
    const size_t n = (size_t)rows.experts * rows.OC * rows.width();
    LAUNCH(detail::lora_spread_kernel, (unsigned)ceil_div(n, (size_t)256), 256, 0, ctx, wide, b, rows, scale, n);
}

inline void lora_collect(Ctx& ctx, real* db, const real* dwide, const LoraRows& rows, real scale, Acc acc) {
    const size_t n = (size_t)rows.experts * rows.OC * rows.width();
    const auto kernel = acc == Acc::Add ? detail::lora_collect_kernel<true> : detail::lora_collect_kernel<false>;
    LAUNCH(kernel, (unsigned)ceil_div(n, (size_t)256), 256, 0, ctx, db, dwide, rows, scale, n);
}

}  // namespace gpu
