// GeLU, SwiGLU and the residual sum: elementwise, bound by memory bandwidth. Formulas and derivatives are in math.h.
// SwiGLU (Shazeer, 2020): out = silu(g) u with silu(g) = g s, s = sigmoid(g). Backward, with dy the gradient of out:
//   dg = dy u s (1 + g (1 - s)),  du = dy g s
#pragma once
#include "../math.h"
#include "../ops.h"
#include "fp8.h"
#include "parallel.h"

namespace cpu {

inline void gelu_forward(Ctx& ctx, const Output& out, const floatX* inp, int N, int F) {
    detail::set_rows(ctx, out, N, F, [=](int n, floatX* y) {
        const floatX* x = inp + (size_t)n * F;
        INDEPENDENT_ITERATIONS
        for (int f = 0; f < F; f++) y[f] = (floatX)gelu((real)x[f]);
    });
}

inline void gelu_backward(Ctx& ctx, const Output& dinp, const floatX* dout, const floatX* inp, int N, int F) {
    detail::set_rows(ctx, dinp, N, F, [=](int n, floatX* dx) {
        const floatX *x = inp + (size_t)n * F, *dy = dout + (size_t)n * F;
        INDEPENDENT_ITERATIONS
        for (int f = 0; f < F; f++) dx[f] = (floatX)((real)dy[f] * gelu_derivative((real)x[f]));
    });
}

inline void swiglu_forward(Ctx& ctx, const Output& out, const floatX* gate_up, int N, int F) {
    detail::set_rows(ctx, out, N, F, [=](int n, floatX* y) {
        const floatX *gate = gate_up + (size_t)n * 2 * F, *up = gate + F;
        INDEPENDENT_ITERATIONS
        for (int f = 0; f < F; f++) {
            const real g = (real)gate[f];
            y[f] = (floatX)(g * sigmoid(g) * (real)up[f]);
        }
    });
}

inline void swiglu_backward(Ctx& ctx, const Output& dgate_up, const floatX* dout, const floatX* gate_up, int N, int F) {
    detail::set_rows(ctx, dgate_up, N, 2 * F, [=](int n, floatX* dgate) {
        const floatX *gate = gate_up + (size_t)n * 2 * F, *up = gate + F, *dy = dout + (size_t)n * F;
        floatX* dup = dgate + F;
        INDEPENDENT_ITERATIONS
        for (int f = 0; f < F; f++) {
            const real g = (real)gate[f], u = (real)up[f], d = (real)dy[f], s = sigmoid(g);
            dgate[f] = (floatX)(d * u * s * (1 + g * (1 - s)));
            dup[f] = (floatX)(d * g * s);
        }
    });
}

inline void residual_forward(Ctx&, floatX* out, const floatX* a, const floatX* b, size_t n) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        INDEPENDENT_ITERATIONS
        for (size_t i = first; i < last; i++) out[i] = (floatX)((real)a[i] + (real)b[i]);
    });
}

}  // namespace cpu
