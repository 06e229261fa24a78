// Activations, dropout and the residual sum: elementwise, bound by memory bandwidth. Formulas and derivatives are in math.h.
#pragma once
#include "../activations.h"
#include "../ops.h"
#include "fp8.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {

inline void activation_forward(Ctx& ctx, const Output& out, const floatX* inp, int N, int F, Activation activation) {
    with_activation(
        activation,
        [&](auto act) {
            detail::set_rows(ctx, out, N, F, [=](int n, floatX* y) {
                const floatX* x = inp + (size_t)n * F;
                for_vectors(F, [=](int f, auto there) { store(y + f, act.forward(load(x + f, there)), there); });
            });
        },
        [&](auto act) {
            detail::set_rows(ctx, out, N, F, [=](int n, floatX* y) {
                const floatX *gate = inp + (size_t)n * 2 * F, *up = gate + F;
                for_vectors(F, [=](int f, auto there) {
                    store(y + f, act.forward(load(gate + f, there), load(up + f, there)), there);
                });
            });
        });
}

inline void activation_backward(Ctx& ctx, const Output& dinp, const floatX* dout, const floatX* inp, int N, int F,
                                Activation activation) {
    with_activation(
        activation,
        [&](auto act) {
            detail::set_rows(ctx, dinp, N, F, [=](int n, floatX* dx) {
                const floatX *x = inp + (size_t)n * F, *dy = dout + (size_t)n * F;
                for_vectors(
                    F, [=](int f, auto there) { store(dx + f, act.gradient(load(x + f, there), load(dy + f, there)), there); });
            });
        },
        [&](auto act) {
            detail::set_rows(ctx, dinp, N, 2 * F, [=](int n, floatX* dgate) {
                const floatX *gate = inp + (size_t)n * 2 * F, *up = gate + F, *dy = dout + (size_t)n * F;
                floatX* dup = dgate + F;
                for_vectors(F, [=](int f, auto there) {
                    const auto d = act.gradient(load(gate + f, there), load(up + f, there), load(dy + f, there));
                    store(dgate + f, d.gate, there);
                    store(dup + f, d.up, there);
                });
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

inline void scale_elements(Ctx&, floatX* x, size_t n, real factor) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first),
                    [=](int i, auto there) { store(x + first + i, factor * load(x + first + i, there), there); });
    });
}

inline void dropout_forward(Ctx&, floatX* out, const floatX* inp, size_t n, const Dropout& dropout) {
    constexpr size_t drawn = 64;  // random numbers at a time
    const real factor = dropout.factor();
    const uint32_t threshold = dropout.threshold();
    parallel_ranges(n, [=](size_t first, size_t last) {
        uint32_t random[drawn] = {};
        for (size_t i = first; i < last; i += drawn) {
            const size_t count = std::min(drawn, last - i);
            if (dropout.rate > 0) random_words(random, dropout.draws, i, count);
            for_vectors((int)count, [&](int k, auto there) {
                words word;
                memcpy(&word, random + k, sizeof word);
                store(out + i + k, word >= threshold ? load(inp + i + k, there) * factor : floats{}, there);
            });
        }
    });
}

}  // namespace cpu
