// AdamW (Loshchilov & Hutter, 2019): one pass over memory that reads gradient, master weight and both moments once, and writes
// master, moments and the rounded parameter. Bound by memory bandwidth: 4 reads + 3 writes of fp32 and the parameter's write.
#pragma once
#include <cmath>

#include "../ops.h"
#include "parallel.h"

namespace cpu {

inline void adamw(Ctx&, floatX* param, real* master, real* m, real* v, const real* grad, size_t n, real lr, real beta1,
                  real beta2, real eps, real weight_decay, real grad_scale, int64_t step) {
    // Bias corrections in double: beta^step loses digits in fp32.
    const real correct1 = (real)(1 / (1 - std::pow((double)beta1, (double)step)));
    const real correct2 = (real)(1 / (1 - std::pow((double)beta2, (double)step)));
    parallel_ranges(n, [=](size_t first, size_t last) {
        INDEPENDENT_ITERATIONS
        for (size_t i = first; i < last; i++) {
            const real g = grad_scale * grad[i];
            const real mi = beta1 * m[i] + (1 - beta1) * g, vi = beta2 * v[i] + (1 - beta2) * g * g;
            m[i] = mi;
            v[i] = vi;
            const real w = master[i];
            const real updated = w - lr * (mi * correct1 / (std::sqrt(vi * correct2) + eps) + weight_decay * w);
            master[i] = updated;
            param[i] = (floatX)updated;
        }
    });
}

}  // namespace cpu
