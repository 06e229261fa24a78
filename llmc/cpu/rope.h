// Rotary positions (Su et al., 2021), rotate-half pairing: with angle a = position * base^(-2j/rotated), elements j and j +
// rotated/2 of a query or key head rotate as a 2-D vector: (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a); elements
// from `rotated` on are unchanged. The transpose of a rotation is the rotation by -a, so backward is forward with the sine
// negated. In place; values are unchanged; fp32 arithmetic.
#pragma once
#include "../ops.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// Rotates a head's vector x (2 half), given (cos, sin) of its angles; direction is 1, or -1 for gradients.
template <class E>
void rotate(E* x, const real* angles, int half, real direction) {
    INDEPENDENT_ITERATIONS
    for (int j = 0; j < half; j++) {
        const real c = angles[2 * j], s = direction * angles[2 * j + 1], x1 = (real)x[j], x2 = (real)x[j + half];
        x[j] = (E)(x1 * c - x2 * s);
        x[j + half] = (E)(x2 * c + x1 * s);
    }
}

inline void rotate_heads(floatX* qkv, const Rope& rope, const AttentionShape& shape, real direction) {
    parallel_for(shape.N(), [=](int n) {
        for (int head = 0; head < shape.NH + shape.NKV; head++)
            rotate(qkv + (size_t)n * shape.row() + (size_t)head * shape.HS, rope.angles(n), rope.rotated / 2, direction);
    });
}

}  // namespace detail

inline void rope_forward(Ctx&, floatX* qkv, const Rope& rope, const AttentionShape& shape) {
    detail::rotate_heads(qkv, rope, shape, 1);
}

inline void rope_backward(Ctx&, floatX* dqkv, const Rope& rope, const AttentionShape& shape) {
    detail::rotate_heads(dqkv, rope, shape, -1);
}

}  // namespace cpu
