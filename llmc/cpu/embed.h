// Embedding: out = scale wte[token] (+ wpe[position]). Backward adds each row's gradient, times scale, to its token's row, and
// to its position's row.
// Several rows may have the same token, so in backward each thread owns a range of channels and visits all rows in order: no
// two threads write the same number, and sums are in row order for any number of threads. Bound by memory bandwidth.
#pragma once
#include <algorithm>

#include "../base/math.h"
#include "../ops.h"
#include "parallel.h"

namespace cpu {

inline void embedding_forward(Ctx&, floatX* out, const int* tokens, const int* positions, const floatX* wte, const floatX* wpe,
                              int N, int C, const VocabularyShard& shard) {
    parallel_for(N, [=](int n) {
        const int token = tokens[n] - shard.v0;
        const floatX* te = token >= 0 && token < shard.V ? wte + (size_t)token * C : nullptr;
        const floatX* pe = wpe ? wpe + (size_t)positions[n] * C : nullptr;
        floatX* row = out + (size_t)n * C;
        const real scale = shard.scale;
        if (te && pe) {
            INDEPENDENT_ITERATIONS
            for (int c = 0; c < C; c++) row[c] = (floatX)(scale * (real)te[c] + (real)pe[c]);
        } else if (te) {
            INDEPENDENT_ITERATIONS
            for (int c = 0; c < C; c++) row[c] = (floatX)(scale * (real)te[c]);
        } else if (pe) std::copy_n(pe, C, row);
        else std::fill_n(row, C, floatX(0));
    });
}

inline void embedding_backward(Ctx& ctx, real* dwte, real* dwpe, const floatX* dout, const int* tokens, const int* positions,
                               int N, int C, const VocabularyShard& shard) {
    constexpr int line = 16;  // channels per range: whole cache lines of the gradient
    const int width = ceil_div(ceil_div(C, line), ctx.threads) * line;
    parallel_tasks(ceil_div(C, width), [=](size_t task) {
        const int first = (int)task * width, last = std::min(C, first + width);
        for (int n = 0; n < N; n++) {
            const floatX* d = dout + (size_t)n * C;
            const int token = tokens[n] - shard.v0;
            if (token >= 0 && token < shard.V) {
                real* row = dwte + (size_t)token * C;
                for (int c = first; c < last; c++) row[c] += shard.scale * (real)d[c];
            }
            if (dwpe) {
                real* row = dwpe + (size_t)positions[n] * C;
                for (int c = first; c < last; c++) row[c] += (real)d[c];
            }
        }
    });
}

}  // namespace cpu
