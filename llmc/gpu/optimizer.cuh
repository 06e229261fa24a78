// Initial weights, AdamW, Lion, and sums in bf16; formulas in ops.inl and cpu/optimizer.h. AdamW is a single pass, bound by
// memory bandwidth: per parameter 16 bytes are read and 12 written, 12 and 8 with both moments in bf16, 10 and 6 in 8 bits, 2
// read less with bf16 gradients. Lion, with one moment, moves 8 bytes less (4 in bf16). A thread processes 8 elements: a pack
// of bf16 parameters, which are the upper halves of fp32 weights. Non-temporal loads and stores were 3% slower on an H100
// (dev/kernels/bench.md).
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
template <bool has_sign, int bias>
__device__ __forceinline__ void set_moment(Float8<has_sign, bias>& moment, float x, uint32_t random) {
    moment.bits = (uint8_t)Float8<has_sign, bias>::encode(x, random);
}

// Eight elements, in as many packs as they need, or half of one.
template <class T, size_t bytes = sizeof(T)>
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

template <class T>
struct Eight<T, 1> {
    T values[8];
    __device__ T& operator[](int k) { return values[k]; }
    __device__ void load_from(const T* p) {
        const uint2 bits = *reinterpret_cast<const uint2*>(p);
        memcpy((void*)values, &bits, 8);
    }
    __device__ void store_to(T* p) const {
        uint2 bits;
        memcpy((void*)&bits, values, 8);
        *reinterpret_cast<uint2*>(p) = bits;
    }
};

// The random numbers of eight elements that use two draws.
__device__ __forceinline__ void draw_eight(uint32_t (&random)[2][4], const Rounding& rounding, size_t first) {
    const uint64_t group = rounding.number(first) / 4;
#pragma unroll
    for (int k = 0; k < 2; k++) rounding.draw(random[k], (uint32_t)(group + k), (uint32_t)((group + k) >> 32));
}

constexpr int adamw_threads = 256;

// Whether tensors of this type have elements in this build.
template <class T>
constexpr bool is_stored = has_lower_halves || !std::is_same<std::remove_const_t<T>, LowerHalf>::value;
template <class T>
__device__ __forceinline__ T* element(T* tensor, size_t i) {
    if constexpr (is_stored<T>) return tensor + i;
    else return tensor;
}
template <class T, class U>
__device__ __forceinline__ void load_eight(Eight<T>& e, U* tensor, size_t first) {
    if constexpr (is_stored<T>) e.load_from(tensor + first);
}
template <class T, class U>
__device__ __forceinline__ void store_eight(const Eight<T>& e, U* tensor, size_t first) {
    if constexpr (is_stored<T> && !std::is_const<U>::value) e.store_to(tensor + first);
}

// Calls rule(random, an element of each tensor) for n elements. A thread moves 8 of the first n_whole in packs; the others are
// moved one by one. Tensors of constants are only read. draws: random is drawn; otherwise it is 0.
template <bool draws, class Rule, class... T>
__device__ __forceinline__ void for_elements(size_t n, size_t n_whole, const Rounding& rounding, Rule rule, T*... tensors) {
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * 8;
    const auto in_packs = [&](auto... e) {
        (load_eight(e, tensors, first), ...);
        uint32_t random[2][4] = {};
        if constexpr (draws) draw_eight(random, rounding, first);
#pragma unroll
        for (int k = 0; k < 8; k++) rule(random[k / 4][k % 4], &e[k]...);
        (store_eight(e, tensors, first), ...);
    };
    if (first < n_whole) in_packs(Eight<std::remove_const_t<T>>{}...);
    for (size_t i = n_whole + thread; i < n; i += threads) rule(draws ? rounding.word(i) : 0, element(tensors, i)...);
}

template <class M, class V, class G>
__global__ void __launch_bounds__(adamw_threads) adamw_kernel(floatX* param, LowerHalf* lower, M* m, V* v, const G* grad,
                                                              size_t n, size_t n_whole, AdamWUpdate update, Rounding rounding) {
    constexpr bool rounded = !std::is_same<M, real>::value || !std::is_same<V, real>::value;
    const auto rule = [=](uint32_t random, floatX* p, LowerHalf* low, M* mean, V* variance, const G* g) {
        float w = load_weight(p, low, 0), mk = *mean, vk = *variance;
        update(w, mk, vk, *g);
        set_moment(*mean, mk, random), set_moment(*variance, vk, random >> 16), store_weight(p, low, 0, w);
    };
    for_elements<rounded>(n, n_whole, rounding, rule, param, lower, m, v, grad);
}

template <class M, class G>
__global__ void __launch_bounds__(adamw_threads) lion_kernel(floatX* param, LowerHalf* lower, M* m, const G* grad, size_t n,
                                                             size_t n_whole, AdamW constants, Rounding rounding) {
    constexpr bool rounded = !std::is_same<M, real>::value;
    const auto rule = [=](uint32_t random, floatX* p, LowerHalf* low, M* moment, const G* gradient) {
        float w = load_weight(p, low, 0);
        const float g = constants.grad_scale * (float)*gradient, mean = (float)*moment;
        const float direction = constants.beta1 * mean + (1 - constants.beta1) * g;
        const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;  // 0 and NaN stay
        w -= constants.lr * (sign + constants.weight_decay * w);
        set_moment(*moment, constants.beta2 * mean + (1 - constants.beta2) * g, random);
        store_weight(p, low, 0, w);
    };
    for_elements<rounded>(n, n_whole, rounding, rule, param, lower, m, grad);
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
        if constexpr (add) {
            s.load_from(sum + first);
            draw_eight(random, rounding, first);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) set(s[k], px[k], random[k / 4][k % 4]);
        s.store_to(sum + first);
    }
    for (size_t i = n_whole + thread; i < n; i += threads) set(sum[i], x[i], add ? rounding.word(i) : 0);
}

// ---- Muon. A thread processes 8 elements, as in adamw_kernel.
template <class M, class G>
__global__ void __launch_bounds__(adamw_threads)
    muon_momentum_kernel(floatX* update, M* m, const G* grad, size_t n, size_t n_whole, MuonMomentum constants,
                         Rounding rounding) {
    constexpr bool rounded = !std::is_same<M, real>::value;
    const auto set = [=](floatX& u, M& moment, float g, uint32_t random) {
        const float share = (1 - constants.momentum) * (constants.grad_scale * g);
        const float mean = constants.momentum * (float)moment + share;
        set_moment(moment, mean, random);
        u = (floatX)(share + constants.momentum * mean);
    };
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * 8;
    if (first < n_whole) {
        Eight<M> pm;
        Eight<G> pg;
        Eight<floatX> u;
        pm.load_from(m + first);
        pg.load_from(grad + first);
        uint32_t random[2][4] = {};
        if constexpr (rounded) draw_eight(random, rounding, first);
#pragma unroll
        for (int k = 0; k < 8; k++) set(u[k], pm[k], pg[k], random[k / 4][k % 4]);
        pm.store_to(m + first);
        u.store_to(update + first);
    }
    for (size_t i = n_whole + thread; i < n; i += threads) set(update[i], m[i], grad[i], rounded ? rounding.word(i) : 0);
}

__global__ void __launch_bounds__(adamw_threads)
    divide_by_norm_kernel(floatX* x, size_t n, size_t n_whole, const double* squares) {
    const float factor = 1 / fmaxf(sqrtf((float)*squares), (float)smallest_norm);
    for_elements<false>(
        n, n_whole, {}, [=](uint32_t, floatX* p) { *p = (floatX)(factor * (float)*p); }, x);
}

// Elements of the diagonal are at multiples of n + 1.
__global__ void __launch_bounds__(adamw_threads)
    newton_schulz_polynomial_kernel(floatX* square, const floatX* __restrict__ gram, size_t n, size_t n_whole) {
    const auto value = [=](bool diagonal, float g, float s) {
        const float constant = diagonal ? (float)newton_schulz_a : 0.0f;
        return (floatX)(constant + (float)newton_schulz_b * g + (float)newton_schulz_c * s);
    };
    const size_t thread = (size_t)blockIdx.x * adamw_threads + threadIdx.x, threads = (size_t)gridDim.x * adamw_threads;
    const size_t first = thread * 8;
    if (first < n_whole) {
        Eight<floatX> s, g;
        s.load_from(square + first);
        g.load_from(gram + first);
        size_t after_diagonal = first % (n + 1);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            s[k] = value(after_diagonal == 0, (float)g[k], (float)s[k]);
            after_diagonal = after_diagonal == n ? 0 : after_diagonal + 1;
        }
        s.store_to(square + first);
    }
    for (size_t i = n_whole + thread; i < n * n; i += threads)
        square[i] = value(i % (n + 1) == 0, (float)gram[i], (float)square[i]);
}

// A block updates the second moment of one row. factors: (rows); squares: (rows) of the rows times their factors.
__global__ void __launch_bounds__(256) neuron_factors_kernel(float* factors, float* squares, real* second_moment,
                                                             const floatX* __restrict__ x, int cols, float beta2) {
    const size_t row = blockIdx.x;
    float sum = 0;
    for (int k = threadIdx.x; k < cols; k += 256) {
        const float value = (float)x[row * cols + k];
        sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x > 0) return;
    const float v = beta2 * second_moment[row] + (1 - beta2) * sum / (float)cols, factor = 1 / (sqrtf(v) + (float)neuron_eps);
    second_moment[row] = v;
    factors[row] = factor;
    squares[row] = sum * factor * factor;
}
// One block. *scale makes the norm equal to an orthogonal matrix's.
__global__ void __launch_bounds__(256) neuron_scale_kernel(float* scale, const float* squares, int rows, int smaller) {
    float sum = 0;
    for (int k = threadIdx.x; k < rows; k += 256) sum += squares[k];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *scale = sum > 0 ? sqrtf((float)smaller / sum) : 0.0f;
}
__global__ void __launch_bounds__(256)
    scale_neurons_kernel(floatX* x, const float* __restrict__ factors, const float* __restrict__ scale, int cols) {
    const size_t row = blockIdx.x;
    const float factor = factors[row] * *scale;
    for (int k = threadIdx.x; k < cols; k += 256) x[row * cols + k] = (floatX)(factor * (float)x[row * cols + k]);
}

__global__ void __launch_bounds__(adamw_threads) apply_update_kernel(floatX* param, LowerHalf* lower, const floatX* update,
                                                                     size_t n, size_t n_whole, float rate, float decay) {
    const auto rule = [=](uint32_t, floatX* p, LowerHalf* low, const floatX* u) {
        store_weight(p, low, 0, (1 - decay) * load_weight(p, low, 0) - rate * (float)*u);
    };
    for_elements<false>(n, n_whole, {}, rule, param, lower, update);
}

// ---- The average of the weights ----
// average_weights, or with `swaps` swap_weights. A thread processes 8 elements, as in adamw_kernel.
template <bool swaps>
__global__ void __launch_bounds__(adamw_threads)
    average_kernel(real* average, floatX* param, LowerHalf* lower, size_t n, size_t n_whole, float share) {
    using Stored = std::conditional_t<swaps, floatX, const floatX>;
    using StoredLower = std::conditional_t<swaps, LowerHalf, const LowerHalf>;
    const auto rule = [=](uint32_t, real* a, Stored* p, StoredLower* low) {
        const float w = load_weight(p, low, 0), before = *a;
        if constexpr (swaps) store_weight(p, low, 0, before);
        *a = swaps ? w : before + share * (w - before);
    };
    for_elements<false>(n, n_whole, {}, rule, average, (Stored*)param, (StoredLower*)lower);
}

template <bool swaps>
void average_or_swap(Ctx& ctx, real* average, floatX* param, LowerHalf* lower, size_t n, float share) {
    if (n == 0) return;
    const size_t in_packs = aligned_16(average, param, lower) ? n / 8 * 8 : 0;
    LAUNCH(average_kernel<swaps>, (unsigned)ceil_div(n, (size_t)adamw_threads * 8), adamw_threads, 0, ctx, average, param,
           lower, n, in_packs, share);
}

}  // namespace detail

// Both are bound by memory bandwidth: 12 bytes per parameter, and 16.
inline void average_weights(Ctx& ctx, real* average, const floatX* param, const LowerHalf* lower, size_t n, real keep) {
    detail::average_or_swap<false>(ctx, average, const_cast<floatX*>(param), const_cast<LowerHalf*>(lower), n, 1 - keep);
}
inline void swap_weights(Ctx& ctx, real* other, floatX* param, LowerHalf* lower, size_t n) {
    detail::average_or_swap<true>(ctx, other, param, lower, n, 0);
}

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
    exp_avg.visit_first([&](auto* m) {
        exp_avg_sq.visit_second([&](auto* v) {
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

inline void lion(Ctx& ctx, floatX* param, LowerHalf* lower, const Elements& exp_avg, const Elements& grad, size_t n,
                 const AdamW& c, const Rounding& rounding) {
    if (n == 0) return;
    const bool packed = aligned_16(param, lower, (char*)exp_avg.data, (char*)grad.data) && rounding.in_eights();
    exp_avg.visit_first([&](auto* m) {
        grad.visit([&](const auto* g) {
            using M = std::remove_pointer_t<decltype(m)>;
            using G = std::remove_const_t<std::remove_pointer_t<decltype(g)>>;
            LAUNCH((detail::lion_kernel<M, G>), (unsigned)ceil_div(n, (size_t)detail::adamw_threads * 8), detail::adamw_threads,
                   0, ctx, param, lower, m, g, n, packed ? n / 8 * 8 : 0, c, rounding);
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

namespace detail {
template <bool add>
__global__ void __launch_bounds__(adamw_threads) accumulate_real_kernel(real* sum, const real* __restrict__ x, size_t n) {
    const size_t i = (size_t)blockIdx.x * adamw_threads + threadIdx.x;
    if (i < n) sum[i] = add ? sum[i] + x[i] : x[i];
}
}  // namespace detail
inline void accumulate_real(Ctx& ctx, real* sum, const real* x, size_t n, Acc acc) {
    if (n == 0) return;
    const auto kernel = acc == Acc::Add ? detail::accumulate_real_kernel<true> : detail::accumulate_real_kernel<false>;
    LAUNCH(kernel, (unsigned)ceil_div(n, (size_t)detail::adamw_threads), detail::adamw_threads, 0, ctx, sum, x, n);
}

// ---- Muon: all bound by memory bandwidth -----------------------------------------------------------------------------------
namespace detail {
inline unsigned blocks_of_eights(size_t n) { return (unsigned)ceil_div(n, (size_t)adamw_threads * 8); }
}  // namespace detail

inline void muon_momentum(Ctx& ctx, floatX* update, const Elements& exp_avg, const Elements& grad, size_t n,
                          const MuonMomentum& constants, const Rounding& rounding) {
    if (n == 0) return;
    const bool packed = aligned_16(update, (char*)exp_avg.data, (char*)grad.data) && rounding.in_eights();
    exp_avg.visit_first([&](auto* m) {
        grad.visit([&](const auto* g) {
            using M = std::remove_pointer_t<decltype(m)>;
            using G = std::remove_const_t<std::remove_pointer_t<decltype(g)>>;
            LAUNCH((detail::muon_momentum_kernel<M, G>), detail::blocks_of_eights(n), detail::adamw_threads, 0, ctx, update, m,
                   g, n, packed ? n / 8 * 8 : 0, constants, rounding);
        });
    });
}

inline void divide_by_norm(Ctx& ctx, floatX* x, size_t n, const double* squares) {
    LAUNCH(detail::divide_by_norm_kernel, detail::blocks_of_eights(n), detail::adamw_threads, 0, ctx, x, n,
           aligned_16(x) ? n / 8 * 8 : 0, squares);
}

inline void newton_schulz_polynomial(Ctx& ctx, floatX* square, const floatX* gram, int n) {
    const size_t size = (size_t)n * (size_t)n;
    LAUNCH(detail::newton_schulz_polynomial_kernel, detail::blocks_of_eights(size), detail::adamw_threads, 0, ctx, square, gram,
           (size_t)n, aligned_16(square, gram) ? size / 8 * 8 : 0);
}

inline void normalize_neurons(Ctx& ctx, floatX* x, real* second_moment, int rows, int cols, real beta2) {
    float* const factors = (float*)ctx.scratch((2 * (size_t)rows + 1) * sizeof(float));
    float *const squares = factors + rows, *const scale = squares + rows;
    LAUNCH(detail::neuron_factors_kernel, rows, 256, 0, ctx, factors, squares, second_moment, x, cols, beta2);
    LAUNCH(detail::neuron_scale_kernel, 1, 256, 0, ctx, scale, squares, rows, std::min(rows, cols));
    LAUNCH(detail::scale_neurons_kernel, rows, 256, 0, ctx, x, factors, scale, cols);
}

inline void apply_update(Ctx& ctx, floatX* param, LowerHalf* lower, const floatX* update, size_t n, real rate, real decay) {
    LAUNCH(detail::apply_update_kernel, detail::blocks_of_eights(n), detail::adamw_threads, 0, ctx, param, lower, update, n,
           aligned_16(param, lower, update) ? n / 8 * 8 : 0, rate, decay);
}

}  // namespace gpu
