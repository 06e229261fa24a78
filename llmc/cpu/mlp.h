// GeLU, SwiGLU and the residual sum: elementwise, bound by memory bandwidth. Formulas and derivatives are in math.h.
#pragma once
#include "../base/math.h"
#include "../ops.h"
#include "fp8.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {

inline void gelu_forward(Ctx& ctx, const Output& out, const floatX* inp, int N, int F) {
    detail::set_rows(ctx, out, N, F, [=](int n, floatX* y) {
        const floatX* x = inp + (size_t)n * F;
        for_vectors(F, [=](int f, auto there) { store(y + f, gelu(load(x + f, there)), there); });
    });
}

inline void gelu_backward(Ctx& ctx, const Output& dinp, const floatX* dout, const floatX* inp, int N, int F) {
    detail::set_rows(ctx, dinp, N, F, [=](int n, floatX* dx) {
        const floatX *x = inp + (size_t)n * F, *dy = dout + (size_t)n * F;
        for_vectors(
            F, [=](int f, auto there) { store(dx + f, load(dy + f, there) * gelu_derivative(load(x + f, there)), there); });
    });
}

inline void swiglu_forward(Ctx& ctx, const Output& out, const floatX* gate_up, int N, int F) {
    detail::set_rows(ctx, out, N, F, [=](int n, floatX* y) {
        const floatX *gate = gate_up + (size_t)n * 2 * F, *up = gate + F;
        for_vectors(F, [=](int f, auto there) { store(y + f, swiglu(load(gate + f, there), load(up + f, there)), there); });
    });
}

inline void swiglu_backward(Ctx& ctx, const Output& dgate_up, const floatX* dout, const floatX* gate_up, int N, int F) {
    detail::set_rows(ctx, dgate_up, N, 2 * F, [=](int n, floatX* dgate) {
        const floatX *gate = gate_up + (size_t)n * 2 * F, *up = gate + F, *dy = dout + (size_t)n * F;
        floatX* dup = dgate + F;
        for_vectors(F, [=](int f, auto there) {
            const auto d = swiglu_gradient(load(gate + f, there), load(up + f, there), load(dy + f, there));
            store(dgate + f, d.gate, there);
            store(dup + f, d.up, there);
        });
    });
}

inline void residual_forward(Ctx&, floatX* out, const floatX* a, const floatX* b, size_t n) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first), [=](int i, auto there) {
            store(out + first + i, load(a + first + i, there) + load(b + first + i, there), there);
        });
    });
}

}  // namespace cpu
