// Embedding: out = scale wte[token] (+ wpe[position]). Backward adds each row's gradient, times scale, to its token's row, and
// to its position's row. Gradients in bf16 need no buffer for sums in fp32: one row is summed at a time, of sorted tokens.
// Several rows may have the same token, so in backward each thread owns a range of channels and visits all rows in order: no
// two threads write the same number, and sums are in row order for any number of threads. Bound by memory bandwidth.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "../base/math.h"
#include "../ops.h"
#include "memory.h"
#include "optimizer.h"
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

inline void embedding_backward_rounded(Ctx& ctx, bf16* table, const floatX* dout, const int* ids, int N, int C,
                                       const VocabularyShard& shard, Acc acc, const Rounding& rounding) {
    if (acc == Acc::Set) clear_in_parallel(table, (size_t)shard.V * C * sizeof *table);
    std::vector<std::pair<int, int>> rows;  // of the table and of dout
    for (int n = 0; n < N; n++)
        if (ids[n] >= shard.v0 && ids[n] - shard.v0 < shard.V) rows.emplace_back(ids[n] - shard.v0, n);
    std::sort(rows.begin(), rows.end());
    constexpr int drawn = 64;  // channels per range: as many as are rounded at a time
    const int width = ceil_div(ceil_div(C, drawn), ctx.threads) * drawn;
    parallel_tasks(ceil_div(C, width), [&](size_t task) {
        const int first = (int)task * width, n = std::min(C - first, width);
        std::vector<real> sum((size_t)n);
        for (size_t k = 0; k < rows.size(); k++) {
            const floatX* d = dout + (size_t)rows[k].second * C + first;
            for (int c = 0; c < n; c++) sum[c] += shard.scale * (real)d[c];
            if (k + 1 < rows.size() && rows[k + 1].first == rows[k].first) continue;
            const size_t element = (size_t)rows[k].first * C + first;
            detail::accumulate(table + element, sum.data(), n, acc, rounding, element);
            std::fill(sum.begin(), sum.end(), real(0));
        }
    });
}

}  // namespace cpu
