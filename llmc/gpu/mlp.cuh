// GeLU, SwiGLU and the residual sum: elementwise, bound by memory bandwidth. Formulas and derivatives are in math.h and
// cpu/mlp.h. Outputs may be inputs: a thread has read what it overwrites.
#pragma once
#include "../math.h"
#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

constexpr int mlp_threads = 256, mlp_packs = 2;  // loaded by a thread before it computes, so that memory is kept busy

struct Gelu {
    __device__ float operator()(float x, float) const { return gelu(x); }
};
struct GeluGradient {
    __device__ float operator()(float dy, float x) const { return dy * gelu_derivative(x); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// out[i] = f(a[i], b[i]); b may be null. Elements that are in no pack (the end; all, if memory is not aligned) come one by one.
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

// Blocks (rows, parts of a row).
template <bool packed>
__global__ void __launch_bounds__(mlp_threads) swiglu_forward_kernel(floatX* out, const floatX* gate_up, int F) {
    constexpr int size = Pack<floatX>::size;
    const floatX *gate = gate_up + (size_t)blockIdx.x * 2 * F, *up = gate + F;
    const auto first = [](int k) { return (int)((blockIdx.y * mlp_packs + k) * blockDim.x + threadIdx.x) * size; };
    Pack<floatX> g[mlp_packs], u[mlp_packs];
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) g[k] = load_part<packed>(gate, first(k), F), u[k] = load_part<packed>(up, first(k), F);
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) {
#pragma unroll
        for (int j = 0; j < size; j++) {
            const float x = (float)g[k][j];
            g[k][j] = (floatX)(x * sigmoid(x) * (float)u[k][j]);
        }
        store_part<packed>(out + (size_t)blockIdx.x * F, first(k), F, g[k]);
    }
}

template <bool packed>
__global__ void __launch_bounds__(mlp_threads)
    swiglu_backward_kernel(floatX* dgate_up, const floatX* dout, const floatX* gate_up, int F) {
    constexpr int size = Pack<floatX>::size;
    const floatX *gate = gate_up + (size_t)blockIdx.x * 2 * F, *up = gate + F, *dy = dout + (size_t)blockIdx.x * F;
    floatX *dgate = dgate_up + (size_t)blockIdx.x * 2 * F, *dup = dgate + F;
    const auto first = [](int k) { return (int)((blockIdx.y * mlp_packs + k) * blockDim.x + threadIdx.x) * size; };
    Pack<floatX> g[mlp_packs], u[mlp_packs], d[mlp_packs];
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) {
        g[k] = load_part<packed>(gate, first(k), F), u[k] = load_part<packed>(up, first(k), F);
        d[k] = load_part<packed>(dy, first(k), F);
    }
#pragma unroll
    for (int k = 0; k < mlp_packs; k++) {
#pragma unroll
        for (int j = 0; j < size; j++) {
            const float x = (float)g[k][j], y = (float)u[k][j], gradient = (float)d[k][j], s = sigmoid(x);
            g[k][j] = (floatX)(gradient * y * s * (1 + x * (1 - s)));
            u[k][j] = (floatX)(gradient * x * s);
        }
        store_part<packed>(dgate, first(k), F, g[k]);
        store_part<packed>(dup, first(k), F, u[k]);
    }
}

struct SwigluShape {
    int threads;
    dim3 blocks;
    SwigluShape(int N, int F) {
        const int packs = ceil_div(F, Pack<floatX>::size);
        threads = std::min(mlp_threads, ceil_div(packs, 32) * 32);
        blocks = dim3(N, ceil_div(packs, threads * mlp_packs));
    }
};

}  // namespace detail

inline void gelu_forward(Ctx& ctx, floatX* out, const floatX* inp, size_t n) {
    detail::elementwise<detail::Gelu>(ctx, out, inp, nullptr, n);
}

inline void gelu_backward(Ctx& ctx, floatX* dinp, const floatX* dout, const floatX* inp, size_t n) {
    detail::elementwise<detail::GeluGradient>(ctx, dinp, dout, inp, n);
}

inline void residual_forward(Ctx& ctx, floatX* out, const floatX* a, const floatX* b, size_t n) {
    detail::elementwise<detail::Sum>(ctx, out, a, b, n);
}

inline void swiglu_forward(Ctx& ctx, floatX* out, const floatX* gate_up, int N, int F) {
    if (N == 0) return;
    const detail::SwigluShape shape(N, F);
    const bool packed = F % Pack<floatX>::size == 0 && aligned_16(out, gate_up);
    const auto kernel = packed ? detail::swiglu_forward_kernel<true> : detail::swiglu_forward_kernel<false>;
    LAUNCH(kernel, shape.blocks, shape.threads, 0, ctx, out, gate_up, F);
}

inline void swiglu_backward(Ctx& ctx, floatX* dgate_up, const floatX* dout, const floatX* gate_up, int N, int F) {
    if (N == 0) return;
    const detail::SwigluShape shape(N, F);
    const bool packed = F % Pack<floatX>::size == 0 && aligned_16(dgate_up, dout, gate_up);
    const auto kernel = packed ? detail::swiglu_backward_kernel<true> : detail::swiglu_backward_kernel<false>;
    LAUNCH(kernel, shape.blocks, shape.threads, 0, ctx, dgate_up, dout, gate_up, F);
}

}  // namespace gpu
