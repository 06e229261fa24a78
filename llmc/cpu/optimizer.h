// AdamW (Loshchilov & Hutter, 2019): one pass over memory that reads gradient, weight and both moments once and writes weight
// and moments. Bound by memory bandwidth: 28 bytes per parameter. A bf16 parameter is the upper half of its fp32 weight.
#pragma once
#include <cmath>

#include "../ops.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {

inline void adamw(Ctx&, floatX* param, LowerHalf* lower, real* m, real* v, const real* grad, size_t n, real lr, real beta1,
                  real beta2, real eps, real weight_decay, real grad_scale, int64_t step) {
    // Bias corrections in double: beta^step loses digits in fp32.
    const real correct1 = (real)(1 / (1 - std::pow((double)beta1, (double)step)));
    const real correct2 = (real)(1 / (1 - std::pow((double)beta2, (double)step)));
    constexpr size_t ahead = 256;  // numbers: what the CPU itself asks for in advance is too little for so many streams
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first), [=](int k, auto there) {
            const size_t i = first + (size_t)k;
            for (const real* x : {grad, (const real*)m, (const real*)v}) __builtin_prefetch(x + i + ahead);
            __builtin_prefetch(param + i + ahead);
            if (has_lower_halves) __builtin_prefetch(lower + i + ahead);
            const floats g = grad_scale * load(grad + i, there);
            const floats mi = beta1 * load(m + i, there) + (1 - beta1) * g,
                         vi = beta2 * load(v + i, there) + (1 - beta2) * g * g;
            const floats w = load_weights(param, lower, i, there);
            const floats updated = w - lr * (mi * correct1 / (root(vi * correct2) + eps) + weight_decay * w);
            store(m + i, mi, there), store(v + i, vi, there), store_weights(param, lower, i, updated, there);
        });
    });
}

}  // namespace cpu
