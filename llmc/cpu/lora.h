// Low-rank adapters: conversion between the matrices B of a layer's adapters and the block-diagonal matrix of all of them
// (model/lora.h). The products themselves are in matmul.h.
#pragma once
#include <algorithm>

#include "../ops.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// visit(block, row of the layer's weight, the same row in B) for every row that an adapter adds to, in parallel.
template <class Visit>
void for_each_lora_row(const LoraRows& rows, Visit visit) {
    for (int i = 0; i < rows.blocks; i++) {
        const LoraRows::Block& block = rows.block[i];
        parallel_for(rows.experts * block.rows, [&](int task) {
            const size_t e = (size_t)(task / block.rows), r = (size_t)(task % block.rows);
            visit(block, e * rows.OC + block.row + r, e * rows.packed + block.packed + r);
        });
    }
}

}  // namespace detail

inline void lora_spread(Ctx&, floatX* wide, const floatX* b, const LoraRows& rows, real scale) {
    const size_t width = (size_t)rows.width(), rank = (size_t)rows.rank;
    std::fill_n(wide, (size_t)rows.experts * rows.OC * width, floatX(0));
    detail::for_each_lora_row(rows, [=](const LoraRows::Block& block, size_t row, size_t packed) {
        for (size_t k = 0; k < rank; k++) wide[row * width + block.part * rank + k] = scale * (real)b[packed * rank + k];
    });
}

inline void lora_collect(Ctx&, real* db, const real* dwide, const LoraRows& rows, real scale, Acc acc) {
    const size_t width = (size_t)rows.width(), rank = (size_t)rows.rank;
    detail::for_each_lora_row(rows, [=](const LoraRows::Block& block, size_t row, size_t packed) {
        for (size_t k = 0; k < rank; k++) {
            real& sum = db[packed * rank + k];
            sum = (acc == Acc::Add ? sum : real(0)) + scale * dwide[row * width + block.part * rank + k];
        }
    });
}

}  // namespace cpu
