// Initial weights, AdamW, and sums in bf16; formulas in ops.inl and cpu/optimizer.h. AdamW is a single pass: per parameter 16
// bytes are read and 12 written, 12 and 8 with both moments in bf16, 10 and 8 with bf16 gradients as well: bound by memory
// bandwidth. A thread processes 8 elements: a pack of bf16 parameters, which are the upper halves of their fp32 weights.
// Non-temporal loads and stores were 3% slower on an H100 (dev/kernels/bench.md).
#pragma once
#include <cmath>

#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

struct AdamWUpdate {
    float lr, beta1, beta2, eps, weight_decay, grad_scale, correct1, correct2;
    __device__ void operator()(float& w, float& m, float& v, float grad) const {
        const float g = grad_scale * grad;
        m = beta1 * m + (1 - beta1) * g;
        v = beta2 * v + (1 - beta2) * g * g;
        w -= lr * (m * correct1 / (sqrtf(v * correct2) + eps) + weight_decay * w);
    }
};

__device__ __forceinline__ void set_moment(real& moment, float x, uint32_t) { moment = x; }
__device__ __forceinline__ void set_moment(bf16& moment, float x, uint32_t random) {
    moment.bits = (uint16_t)round_stochastically(x, random);
}

// Eight elements, in as many packs as they need.
template <class T>
struct Eight {
    static constexpr int size = Pack<T>::size;
    Pack<T> packs[8 / size];
    __device__ T& operator[](int k) { return packs[k / size][k % size]; }
    __device__ void load_from(const T* p) {
#pragma unroll
        for (int k = 0; k < 8; k += size) packs[k / size] = load(p + k);
    }
    __device__ void store_to(T* p) const {
#pragma unroll
        for (int k = 0; k < 8; k += size) store(p + k, packs[k / size]);
    }
};

// The random numbers of eight elements that use two draws.
__device__ __forceinline__ void draw_eight(uint32_t (&random)[2][4], const Rounding& rounding, size_t first) {
    const uint64_t group = rounding.number(first) / 4;
#pragma unroll
    for (int k = 0; k < 2; k++) rounding.draw(random[k], (uint32_t)(group + k), (uint32_t)((group + k) >> 32));
}

constexpr int adamw_threads = 256;

// n_whole elements are moved in packs, the others one by one.
template <class M, class V, class G>
__global__ void __launch_bounds__(adamw_threads) adamw_kernel(floatX* param, LowerHalf* lower, M* m, V* v, const G* grad,
                                                              size_t n, size_t n_whole, AdamWUpdate update, Rounding rounding) {
    constexpr bool rounded = std::is_same<M, bf16>::value || std::is_same<V, bf16>::value;
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * 8;
    if (first < n_whole) {
        Eight<M> pm;
        Eight<V> pv;
        Eight<G> pg;
        Eight<floatX> p;
        Eight<LowerHalf> low{};
        if constexpr (has_lower_halves) low.load_from(lower + first);
        p.load_from(param + first), pm.load_from(m + first), pv.load_from(v + first), pg.load_from(grad + first);
        uint32_t random[2][4] = {};
        if constexpr (rounded) draw_eight(random, rounding, first);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float w = load_weight(&p[k], &low[k], 0), mk = pm[k], vk = pv[k];
            update(w, mk, vk, pg[k]);
            set_moment(pm[k], mk, random[k / 4][k % 4]), set_moment(pv[k], vk, random[k / 4][k % 4] >> 16);
            store_weight(&p[k], &low[k], 0, w);
        }
        pm.store_to(m + first), pv.store_to(v + first), p.store_to(param + first);
        if constexpr (has_lower_halves) low.store_to(lower + first);
    }
    for (size_t i = n_whole + thread; i < n; i += threads) {
        float w = load_weight(param, lower, i), mi = m[i], vi = v[i];
        update(w, mi, vi, grad[i]);
        const uint32_t random = rounded ? rounding.word(i) : 0;
        set_moment(m[i], mi, random), set_moment(v[i], vi, random >> 16), store_weight(param, lower, i, w);
    }
}

__global__ void __launch_bounds__(256)
    initialize_weights_kernel(floatX* param, LowerHalf* lower, InitialWeights w, size_t first, size_t n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    const real x = w.at((first + i) / w.cols, (first + i) % w.cols);
    LowerHalf half = 0;
    store_weight(param + i, &half, 0, x);
    if (lower) lower[i] = half;
}

// A thread processes 8 elements, as in adamw_kernel.
template <bool add>
__global__ void __launch_bounds__(adamw_threads)
    accumulate_kernel(bf16* sum, const real* __restrict__ x, size_t n, size_t n_whole, Rounding rounding) {
    const auto set = [](bf16& s, float summand, uint32_t random) {
        if (add) s.bits = (uint16_t)round_stochastically((float)s + summand, random);
        else s = summand;
    };
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * 8;
    if (first < n_whole) {
        Eight<bf16> s;
        Eight<real> px;
        px.load_from(x + first);
        uint32_t random[2][4] = {};
        if constexpr (add) s.load_from(sum + first), draw_eight(random, rounding, first);
#pragma unroll
        for (int k = 0; k < 8; k++) set(s[k], px[k], random[k / 4][k % 4]);
        s.store_to(sum + first);
    }
    for (size_t i = n_whole + thread; i < n; i += threads) set(sum[i], x[i], add ? rounding.word(i) : 0);
}

}  // namespace detail

// Bound by some 150 double-precision instructions per element.
inline void initialize_weights(Ctx& ctx, floatX* param, LowerHalf* lower, const InitialWeights& w, size_t first, size_t n) {
    if (n > 0)
        LAUNCH(detail::initialize_weights_kernel, (unsigned)ceil_div(n, (size_t)256), 256, 0, ctx, param, lower, w, first, n);
}

inline void adamw(Ctx& ctx, floatX* param, LowerHalf* lower, const Elements& exp_avg, const Elements& exp_avg_sq,
                  const Elements& grad, size_t n, const AdamW& c, const Rounding& rounding) {
    if (n == 0) return;
    // Bias corrections in double: beta^step loses digits in fp32.
    const float correct1 = (float)(1 / (1 - std::pow((double)c.beta1, (double)c.step)));
    const float correct2 = (float)(1 / (1 - std::pow((double)c.beta2, (double)c.step)));
    const detail::AdamWUpdate update{c.lr, c.beta1, c.beta2, c.eps, c.weight_decay, c.grad_scale, correct1, correct2};
    const bool aligned = aligned_16(param, lower, (char*)exp_avg.data, (char*)exp_avg_sq.data, (char*)grad.data);
    const size_t in_packs = aligned && rounding.in_eights() ? n / 8 * 8 : 0;
    const unsigned blocks = (unsigned)ceil_div(n, (size_t)detail::adamw_threads * 8);
    exp_avg.visit([&](auto* m) {
        exp_avg_sq.visit([&](auto* v) {
            grad.visit([&](const auto* g) {
                using M = std::remove_pointer_t<decltype(m)>;
                using V = std::remove_pointer_t<decltype(v)>;
                using G = std::remove_const_t<std::remove_pointer_t<decltype(g)>>;
                LAUNCH((detail::adamw_kernel<M, V, G>), blocks, detail::adamw_threads, 0, ctx, param, lower, m, v, g, n,
                       in_packs, update, rounding);
            });
        });
    });
}

inline void accumulate(Ctx& ctx, bf16* sum, const real* x, size_t n, Acc acc, const Rounding& rounding) {
    if (n == 0) return;
    const bool packed = aligned_16(sum, x) && (acc == Acc::Set || rounding.in_eights());
    const auto kernel = acc == Acc::Add ? detail::accumulate_kernel<true> : detail::accumulate_kernel<false>;
    LAUNCH(kernel, (unsigned)ceil_div(n, (size_t)detail::adamw_threads * 8), detail::adamw_threads, 0, ctx, sum, x, n,
           packed ? n / 8 * 8 : 0, rounding);
}

}  // namespace gpu
