// AdamW (Loshchilov & Hutter, 2019): one pass over memory that reads gradient, master weight and both moments once, and writes
// master, moments and the rounded parameter. Bound by memory bandwidth: 4 reads + 3 writes of fp32 and the parameter's write.
#pragma once
#include <cmath>

#include "../ops.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {

inline void adamw(Ctx&, floatX* param, real* master, real* m, real* v, const real* grad, size_t n, real lr, real beta1,
                  real beta2, real eps, real weight_decay, real grad_scale, int64_t step) {
    // Bias corrections in double: beta^step loses digits in fp32.
    const real correct1 = (real)(1 / (1 - std::pow((double)beta1, (double)step)));
    const real correct2 = (real)(1 / (1 - std::pow((double)beta2, (double)step)));
    constexpr size_t ahead = 256;  // numbers: what the CPU itself asks for in advance is too little for four streams
    parallel_ranges(n, [=](size_t first, size_t last) {
        put((const void*)param != master && fills_lines(param + first), param + first, (int)(last - first),
            [=](int k, auto there) {
                const size_t i = first + (size_t)k;
                for (const real* x : {grad, (const real*)m, (const real*)v, (const real*)master})
                    __builtin_prefetch(x + i + ahead);
                const floats g = grad_scale * load(grad + i, there);
                const floats mi = beta1 * load(m + i, there) + (1 - beta1) * g,
                             vi = beta2 * load(v + i, there) + (1 - beta2) * g * g;
                const floats w = load(master + i, there);
                const floats updated = w - lr * (mi * correct1 / (root(vi * correct2) + eps) + weight_decay * w);
                store(m + i, mi, there), store(v + i, vi, there), store(master + i, updated, there);
                return updated;
            });
        fence();
    });
}

}  // namespace cpu
