// AdamW; formulas in ops.inl and cpu/optimizer.h. One pass: per parameter 16 bytes are read and 12 written in fp32, and the
// parameter itself: bound by memory bandwidth. A thread takes 8 elements, so that a pack of bf16 parameters is written at once.
#pragma once
#include <cmath>

#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

struct AdamW {
    float lr, beta1, beta2, eps, weight_decay, grad_scale, correct1, correct2;
    __device__ float operator()(float& w, float& m, float& v, float grad) const {
        const float g = grad_scale * grad;
        m = beta1 * m + (1 - beta1) * g;
        v = beta2 * v + (1 - beta2) * g * g;
        return w -= lr * (m * correct1 / (sqrtf(v * correct2) + eps) + weight_decay * w);
    }
};

constexpr int adamw_threads = 256;

// n_whole elements are moved in packs, the others one by one. param may be master.
__global__ void __launch_bounds__(adamw_threads)
    adamw_kernel(floatX* param, real* master, real* m, real* v, const real* grad, size_t n, size_t n_whole, AdamW update) {
    constexpr int per_thread = 8, size = Pack<real>::size, packs = per_thread / size;
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * per_thread;
    if (first < n_whole) {
        Pack<real> pw[packs], pm[packs], pv[packs], pg[packs];
#pragma unroll
        for (int k = 0; k < packs; k++) {
            const size_t i = first + k * size;
            pw[k] = load(master + i), pm[k] = load(m + i), pv[k] = load(v + i), pg[k] = load_streaming(grad + i);
        }
        constexpr int param_size = Pack<floatX>::size;
        Pack<floatX> p[per_thread / param_size];
#pragma unroll
        for (int k = 0; k < per_thread; k++) {
            const float w =
                update(pw[k / size][k % size], pm[k / size][k % size], pv[k / size][k % size], pg[k / size][k % size]);
            p[k / param_size][k % param_size] = (floatX)w;
        }
#pragma unroll
        for (int k = 0; k < packs; k++) {
            const size_t i = first + k * size;
            store(master + i, pw[k]), store_streaming(m + i, pm[k]), store_streaming(v + i, pv[k]);
        }
#pragma unroll
        for (int k = 0; k < per_thread; k += param_size) store(param + first + k, p[k / param_size]);
    }
    for (size_t i = n_whole + thread; i < n; i += threads) {
        float w = master[i], mi = m[i], vi = v[i];
        update(w, mi, vi, grad[i]);
        master[i] = w, m[i] = mi, v[i] = vi;
        param[i] = (floatX)w;
    }
}

}  // namespace detail

inline void adamw(Ctx& ctx, floatX* param, real* master, real* m, real* v, const real* grad, size_t n, real lr, real beta1,
                  real beta2, real eps, real weight_decay, real grad_scale, int64_t step) {
    if (n == 0) return;
    // Bias corrections in double: beta^step loses digits in fp32.
    const float correct1 = (float)(1 / (1 - std::pow((double)beta1, (double)step)));
    const float correct2 = (float)(1 / (1 - std::pow((double)beta2, (double)step)));
    const size_t n_whole = aligned_16(param, master, m, v, grad) ? n / 8 * 8 : 0;
    LAUNCH(detail::adamw_kernel, (unsigned)ceil_div(n, (size_t)detail::adamw_threads * 8), detail::adamw_threads, 0, ctx, param,
           master, m, v, grad, n, n_whole, detail::AdamW{lr, beta1, beta2, eps, weight_decay, grad_scale, correct1, correct2});
}

}  // namespace gpu
