// Activations, dropout and the residual sum: elementwise, bound by memory bandwidth. Formulas and derivatives are in math.h.
// Outputs may alias inputs: each thread reads an element before it overwrites it.
#pragma once
#include "../activations.h"
#include "../ops.h"
#include "device.cuh"
#include "fp8.cuh"

namespace gpu {
namespace detail {

constexpr int mlp_threads = 256, mlp_packs = 2;  // packs in flight per thread

template <class Act>
struct Value {
    static constexpr bool of_two = false;
    __device__ float operator()(float x, float) const { return Act::forward(x); }
};
template <class Act>
struct Gradient {
    static constexpr bool of_two = true;
    __device__ float operator()(float dy, float x) const { return Act::gradient(x, dy); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Sources (fp8.cuh) of the inputs of matrix products.
template <class F2>
struct Elementwise {  // f(a, b), or f(a)
    static constexpr int inputs = 2, tiles = 1;
    const floatX *a, *b;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        in[0] = load_part<packed>(a + (size_t)row * F, column, F);
        in[1] = F2::of_two ? load_part<packed>(b + (size_t)row * F, column, F) : in[0];
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const {
        const F2 f;
#pragma unroll
        for (int j = 0; j < Pack<floatX>::size; j++) out[0][j] = (floatX)f((float)in[0][j], (float)in[1][j]);
    }
};
template <class Act>
struct Gated {
    static constexpr int inputs = 2, tiles = 1;
    const floatX* gate_up;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        const floatX* gate = gate_up + (size_t)row * 2 * F;
        in[0] = load_part<packed>(gate, column, F), in[1] = load_part<packed>(gate + F, column, F);
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const {
#pragma unroll
        for (int j = 0; j < Pack<floatX>::size; j++) out[0][j] = (floatX)Act::forward((float)in[0][j], (float)in[1][j]);
    }
};
template <class Act>
struct GatedGradient {
    static constexpr int inputs = 3, tiles = 2;
    const floatX *dout, *gate_up;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        Gated<Act>{gate_up}.template load<packed>(in, row, column, F);
        in[2] = load_part<packed>(dout + (size_t)row * F, column, F);
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const {
#pragma unroll
        for (int j = 0; j < Pack<floatX>::size; j++) {
            const GateUp<float> d = Act::gradient((float)in[0][j], (float)in[1][j], (float)in[2][j]);
            out[0][j] = (floatX)d.gate;
            out[1][j] = (floatX)d.up;
        }
    }
};

// out[i] = f(a[i], b[i]); b may be null. Elements outside packs (the end; all of them if memory is not aligned) are moved one
// by one.
template <class F>
__global__ void __launch_bounds__(mlp_threads)
    elementwise_kernel(floatX* out, const floatX* a, const floatX* b, size_t n, size_t n_packs) {
    constexpr int size = Pack<floatX>::size;
    const F f;
    const size_t thread = (size_t)blockIdx.x * mlp_threads + threadIdx.x, threads = (size_t)gridDim.x * mlp_threads;
    const size_t first = (size_t)blockIdx.x * mlp_threads * mlp_packs + threadIdx.x;
    Pack<floatX> x[mlp_packs], y[mlp_packs];
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) {
        const size_t i = first + k * mlp_threads;
        if (i >= n_packs) continue;
        x[k] = load(a + i * size);
        y[k] = b ? load(b + i * size) : x[k];
    }
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) {
        const size_t i = first + k * mlp_threads;
        if (i >= n_packs) continue;
#pragma unroll
        for (int j = 0; j < size; j++) x[k][j] = (floatX)f((float)x[k][j], (float)y[k][j]);
        store(out + i * size, x[k]);
    }
    for (size_t i = n_packs * size + thread; i < n; i += threads) out[i] = (floatX)f((float)a[i], b ? (float)b[i] : 0.0f);
}

template <class F>
void elementwise(Ctx& ctx, floatX* out, const floatX* a, const floatX* b, size_t n) {
    if (n == 0) return;
    constexpr size_t per_block = mlp_threads * mlp_packs * Pack<floatX>::size;
    const size_t n_packs = aligned_16(out, a, b) ? n / Pack<floatX>::size : 0;
    LAUNCH(elementwise_kernel<F>, (unsigned)ceil_div(n, per_block), mlp_threads, 0, ctx, out, a, b, n, n_packs);
}

// Writes the numbers of a Source. Blocks (rows, parts of a row).
template <bool packed, class Source>
__global__ void __launch_bounds__(mlp_threads) rows_kernel(floatX* x, Source source, int F) {
    constexpr int size = Pack<floatX>::size;
    const auto first = [](int k) { return (int)((blockIdx.y * mlp_packs + k) * blockDim.x + threadIdx.x) * size; };
    Pack<floatX> in[mlp_packs][Source::inputs], out[Source::tiles];
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) source.template load<packed>(in[k], (int)blockIdx.x, first(k), F);
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) {
        source.compute(in[k], out);
#pragma unroll
        for (int t = 0; t < Source::tiles; t++)
            store_part<packed>(x + ((size_t)blockIdx.x * Source::tiles + t) * F, first(k), F, out[t]);
    }
}

// aligned: whether the source's memory is aligned to 16 bytes.
template <class Source>
void rows_of(Ctx& ctx, const Output& out, const Source& source, int N, int F, bool aligned) {
    if (N == 0) return;
    if (out.codes.codes) {
        CHECK(aligned, "codes of matrices that are not at multiples of 16 bytes");
        return make_codes(ctx, out, source, N, F);
    }
    const bool packed = F % Pack<floatX>::size == 0 && aligned && aligned_16(out.x);
    const int packs = ceil_div(F, Pack<floatX>::size), threads = std::min(mlp_threads, ceil_div(packs, 32) * 32);
    const auto kernel = packed ? rows_kernel<true, Source> : rows_kernel<false, Source>;
    LAUNCH(kernel, dim3(N, ceil_div(packs, threads * mlp_packs)), threads, 0, ctx, out.x, source, F);
}

__global__ void __launch_bounds__(mlp_threads) scale_kernel(floatX* x, size_t n, size_t n_packs, float factor) {
    constexpr int size = Pack<floatX>::size;
    const size_t thread = (size_t)blockIdx.x * mlp_threads + threadIdx.x, threads = (size_t)gridDim.x * mlp_threads;
    if (thread < n_packs) {
        Pack<floatX> numbers = load(x + thread * size);
#pragma unroll
        for (int j = 0; j < size; j++) numbers[j] = (floatX)(factor * (float)numbers[j]);
        store(x + thread * size, numbers);
    }
    for (size_t i = n_packs * size + thread; i < n; i += threads) x[i] = (floatX)(factor * (float)x[i]);
}

// out = kept ? inp / (1 - rate) : 0. `in_fours`: packs start at the first number of a draw.
template <bool in_fours>
__global__ void __launch_bounds__(mlp_threads)
    dropout_kernel(floatX* out, const floatX* inp, size_t n, size_t n_packs, Dropout dropout) {
    constexpr int size = Pack<floatX>::size;
    const float factor = dropout.factor();
    const uint32_t threshold = dropout.threshold();
    const size_t thread = (size_t)blockIdx.x * mlp_threads + threadIdx.x, threads = (size_t)gridDim.x * mlp_threads;
    if (in_fours && thread < n_packs) {
        Pack<floatX> x = load(inp + thread * size);
#pragma unroll
        for (int j = 0; j < size; j += 4) {
            const uint64_t number = dropout.draws.number(thread * size + j);
            uint32_t words[4];
            dropout.draws.draw(words, (uint32_t)(number / 4), (uint32_t)(number >> 34));
#pragma unroll
            for (int k = 0; k < 4; k++) x[j + k] = words[k] < threshold ? (floatX)0.0f : (floatX)((float)x[j + k] * factor);
        }
        store(out + thread * size, x);
    }
    for (size_t i = n_packs * size + thread; i < n; i += threads) out[i] = (floatX)dropout.apply(i, (float)inp[i]);
}

// Activations of one input: without codes, rows do not matter, and numbers are moved in packs for any F.
template <class F2>
void elementwise_or_codes(Ctx& ctx, const Output& out, const floatX* a, const floatX* b, int N, int F) {
    if (out.codes.codes) rows_of(ctx, out, Elementwise<F2>{a, b}, N, F, aligned_16(a, b));
    else elementwise<F2>(ctx, out.x, a, b, (size_t)N * F);
}

}  // namespace detail

inline void activation_forward(Ctx& ctx, const Output& out, const floatX* inp, int N, int F, Activation activation) {
    with_activation(
        activation, [&](auto act) { detail::elementwise_or_codes<detail::Value<decltype(act)>>(ctx, out, inp, nullptr, N, F); },
        [&](auto act) { detail::rows_of(ctx, out, detail::Gated<decltype(act)>{inp}, N, F, aligned_16(inp)); });
}

inline void activation_backward(Ctx& ctx, const Output& dinp, const floatX* dout, const floatX* inp, int N, int F,
                                Activation activation) {
    with_activation(
        activation,
        [&](auto act) { detail::elementwise_or_codes<detail::Gradient<decltype(act)>>(ctx, dinp, dout, inp, N, F); },
        [&](auto act) {
            detail::rows_of(ctx, dinp, detail::GatedGradient<decltype(act)>{dout, inp}, N, F, aligned_16(dout, inp));
        });
}

inline void residual_forward(Ctx& ctx, floatX* out, const floatX* a, const floatX* b, size_t n) {
    detail::elementwise<detail::Sum>(ctx, out, a, b, n);
}

inline void scale_elements(Ctx& ctx, floatX* x, size_t n, real factor) {
    if (n == 0) return;
    const size_t n_packs = aligned_16(x) ? n / Pack<floatX>::size : 0;
    const unsigned blocks = (unsigned)ceil_div(n, (size_t)detail::mlp_threads * Pack<floatX>::size);
    LAUNCH(detail::scale_kernel, blocks, detail::mlp_threads, 0, ctx, x, n, n_packs, (float)factor);
}

inline void dropout_forward(Ctx& ctx, floatX* out, const floatX* inp, size_t n, const Dropout& dropout) {
    if (n == 0) return;
    const bool in_fours = aligned_16(out, inp) && dropout.draws.in_eights();
    const size_t n_packs = in_fours ? n / Pack<floatX>::size : 0;
    const auto kernel = in_fours ? detail::dropout_kernel<true> : detail::dropout_kernel<false>;
    const unsigned blocks = (unsigned)ceil_div(n, (size_t)detail::mlp_threads * Pack<floatX>::size);
    LAUNCH(kernel, blocks, detail::mlp_threads, 0, ctx, out, inp, n, n_packs, dropout);
}

}  // namespace gpu
