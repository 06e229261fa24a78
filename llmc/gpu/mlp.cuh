// GeLU, SwiGLU and the residual sum: elementwise, bound by memory bandwidth. Formulas and derivatives are in math.h and
// cpu/mlp.h. Outputs may alias inputs: a thread has read what it overwrites.
#pragma once
#include "../base/math.h"
#include "../ops.h"
#include "device.cuh"
#include "fp8.cuh"

namespace gpu {
namespace detail {

constexpr int mlp_threads = 256, mlp_packs = 2;  // packs in flight per thread

struct Gelu {
    __device__ float operator()(float x, float) const { return gelu(x); }
};
struct GeluGradient {
    __device__ float operator()(float dy, float x) const { return dy * gelu_derivative(x); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Sources (fp8.cuh) of the inputs of matrix products.
template <class F2>
struct Elementwise {  // f(a, b); b may be null if f does not use it
    static constexpr int inputs = 2, tiles = 1;
    const floatX *a, *b;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        in[0] = load_part<packed>(a + (size_t)row * F, column, F);
        in[1] = b ? load_part<packed>(b + (size_t)row * F, column, F) : in[0];
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const {
        const F2 f;
#pragma unroll
        for (int j = 0; j < Pack<floatX>::size; j++) out[0][j] = (floatX)f((float)in[0][j], (float)in[1][j]);
    }
};
struct Swiglu {
    static constexpr int inputs = 2, tiles = 1;
    const floatX* gate_up;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        const floatX* gate = gate_up + (size_t)row * 2 * F;
        in[0] = load_part<packed>(gate, column, F), in[1] = load_part<packed>(gate + F, column, F);
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const {
#pragma unroll
        for (int j = 0; j < Pack<floatX>::size; j++) out[0][j] = (floatX)swiglu((float)in[0][j], (float)in[1][j]);
    }
};
struct SwigluGradient {
    static constexpr int inputs = 3, tiles = 2;
    const floatX *dout, *gate_up;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        Swiglu{gate_up}.load<packed>(in, row, column, F);
        in[2] = load_part<packed>(dout + (size_t)row * F, column, F);
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const {
#pragma unroll
        for (int j = 0; j < Pack<floatX>::size; j++) {
            const GateUp<float> d = swiglu_gradient((float)in[0][j], (float)in[1][j], (float)in[2][j]);
            out[0][j] = (floatX)d.gate, out[1][j] = (floatX)d.up;
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

// GeLU and its gradient: without codes, rows do not matter, and numbers are moved in packs for any F.
template <class F2>
void gelu_of(Ctx& ctx, const Output& out, const floatX* a, const floatX* b, int N, int F) {
    if (out.codes.codes) rows_of(ctx, out, Elementwise<F2>{a, b}, N, F, aligned_16(a, b));
    else elementwise<F2>(ctx, out.x, a, b, (size_t)N * F);
}

}  // namespace detail

inline void gelu_forward(Ctx& ctx, const Output& out, const floatX* inp, int N, int F) {
    detail::gelu_of<detail::Gelu>(ctx, out, inp, nullptr, N, F);
}

inline void gelu_backward(Ctx& ctx, const Output& dinp, const floatX* dout, const floatX* inp, int N, int F) {
    detail::gelu_of<detail::GeluGradient>(ctx, dinp, dout, inp, N, F);
}

inline void swiglu_forward(Ctx& ctx, const Output& out, const floatX* gate_up, int N, int F) {
    detail::rows_of(ctx, out, detail::Swiglu{gate_up}, N, F, aligned_16(gate_up));
}

inline void swiglu_backward(Ctx& ctx, const Output& dgate_up, const floatX* dout, const floatX* gate_up, int N, int F) {
    detail::rows_of(ctx, dgate_up, detail::SwigluGradient{dout, gate_up}, N, F, aligned_16(dout, gate_up));
}

inline void residual_forward(Ctx& ctx, floatX* out, const floatX* a, const floatX* b, size_t n) {
    detail::elementwise<detail::Sum>(ctx, out, a, b, n);
}

}  // namespace gpu
