// AdamW; formulas in ops.inl and cpu/optimizer.h. One pass: per parameter 16 bytes are read and 12 written: bound by
// memory bandwidth. A thread takes 8 elements: a pack of bf16 parameters, which are the upper halves of their fp32 weights.
// Loads and stores that bypass the cache were 3% slower on an H100 (dev/kernels/bench.md).
#pragma once
#include <cmath>

#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

struct AdamW {
    float lr, beta1, beta2, eps, weight_decay, grad_scale, correct1, correct2;
    __device__ void operator()(float& w, float& m, float& v, float grad) const {
        const float g = grad_scale * grad;
        m = beta1 * m + (1 - beta1) * g;
        v = beta2 * v + (1 - beta2) * g * g;
        w -= lr * (m * correct1 / (sqrtf(v * correct2) + eps) + weight_decay * w);
    }
};

constexpr int adamw_threads = 256;

// n_whole elements are moved in packs, the others one by one.
__global__ void __launch_bounds__(adamw_threads)
    adamw_kernel(floatX* param, LowerHalf* lower, real* m, real* v, const real* grad, size_t n, size_t n_whole, AdamW update) {
    constexpr int per_thread = 8, size = Pack<real>::size, packs = per_thread / size;
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * per_thread;
    if (first < n_whole) {
        constexpr int param_size = Pack<floatX>::size;
        Pack<real> pm[packs], pv[packs], pg[packs];
        Pack<floatX> p[per_thread / param_size];
        Pack<LowerHalf> low{};
        if constexpr (has_lower_halves) low = load(lower + first);
#pragma unroll
        for (int k = 0; k < per_thread; k += param_size) p[k / param_size] = load(param + first + k);
#pragma unroll
        for (int k = 0; k < packs; k++) {
            const size_t i = first + k * size;
            pm[k] = load(m + i), pv[k] = load(v + i), pg[k] = load(grad + i);
        }
#pragma unroll
        for (int k = 0; k < per_thread; k++) {
            floatX* const x = &p[k / param_size][k % param_size];
            float w = load_weight(x, &low[k], 0);
            update(w, pm[k / size][k % size], pv[k / size][k % size], pg[k / size][k % size]);
            store_weight(x, &low[k], 0, w);
        }
#pragma unroll
        for (int k = 0; k < packs; k++) {
            const size_t i = first + k * size;
            store(m + i, pm[k]), store(v + i, pv[k]);
        }
#pragma unroll
        for (int k = 0; k < per_thread; k += param_size) store(param + first + k, p[k / param_size]);
        if constexpr (has_lower_halves) store(lower + first, low);
    }
    for (size_t i = n_whole + thread; i < n; i += threads) {
        float w = load_weight(param, lower, i), mi = m[i], vi = v[i];
        update(w, mi, vi, grad[i]);
        m[i] = mi, v[i] = vi, store_weight(param, lower, i, w);
    }
}

}  // namespace detail

inline void adamw(Ctx& ctx, floatX* param, LowerHalf* lower, real* m, real* v, const real* grad, size_t n, real lr, real beta1,
                  real beta2, real eps, real weight_decay, real grad_scale, int64_t step) {
    if (n == 0) return;
    // Bias corrections in double: beta^step loses digits in fp32.
    const float correct1 = (float)(1 / (1 - std::pow((double)beta1, (double)step)));
    const float correct2 = (float)(1 / (1 - std::pow((double)beta2, (double)step)));
    const size_t n_whole = aligned_16(param, lower, m, v, grad) ? n / 8 * 8 : 0;
    LAUNCH(detail::adamw_kernel, (unsigned)ceil_div(n, (size_t)detail::adamw_threads * 8), detail::adamw_threads, 0, ctx, param,
           lower, m, v, grad, n, n_whole, detail::AdamW{lr, beta1, beta2, eps, weight_decay, grad_scale, correct1, correct2});
}

}  // namespace gpu
