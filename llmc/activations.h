// The activation functions as types, for the kernels of every backend; formulas are in base/math.h. Plain ones have forward(x)
// and gradient(x, dy); gated ones have forward(gate, up) and gradient(gate, up, dy).
#pragma once
#include "base/math.h"
#include "shapes.h"

namespace activation {

struct Gelu {
    template <class F>
    HD static F forward(F x) {
        return gelu(x);
    }
    template <class F>
    HD static F gradient(F x, F dy) {
        return dy * gelu_derivative(x);
    }
};
struct GeluExact {
    template <class F>
    HD static F forward(F x) {
        return x * normal_distribution(x).cumulative;
    }
    template <class F>
    HD static F gradient(F x, F dy) {
        const auto n = normal_distribution(x);
        return dy * (n.cumulative + x * n.density);
    }
};
struct Relu {
    template <class F>
    HD static F forward(F x) {
        return positive(x);
    }
    template <class F>
    HD static F gradient(F x, F dy) {
        return x <= real(0) ? F{} : dy;
    }
};
struct Relu2 {
    template <class F>
    HD static F forward(F x) {
        const F r = positive(x);
        return r * r;
    }
    template <class F>
    HD static F gradient(F x, F dy) {
        return (dy + dy) * positive(x);
    }
};
struct Swiglu {
    template <class F>
    HD static F forward(F gate, F up) {
        return swiglu(gate, up);
    }
    template <class F>
    HD static GateUp<F> gradient(F gate, F up, F dy) {
        return swiglu_gradient(gate, up, dy);
    }
};
struct Geglu {
    template <class F>
    HD static F forward(F gate, F up) {
        return gelu(gate) * up;
    }
    template <class F>
    HD static GateUp<F> gradient(F gate, F up, F dy) {
        return geglu_gradient(gate, up, dy);
    }
};

struct ClampedSwiglu {
    template <class F>
    HD static F forward(F gate, F up) {
        return clamped_swiglu(gate, up);
    }
    template <class F>
    HD static GateUp<F> gradient(F gate, F up, F dy) {
        return clamped_swiglu_gradient(gate, up, dy);
    }
};

}  // namespace activation

// Calls single(plain activation) or gated(gated activation).
template <class Single, class Gated>
void with_activation(Activation a, Single single, Gated gated) {
#define CASE(value, Type, gates, ...)                          \
    case Activation::value:                                    \
        if constexpr (gates) return gated(activation::Type()); \
        else return single(activation::Type());
    switch (a) { ACTIVATIONS(CASE) }
#undef CASE
}
