// Rotary positions (Su et al., 2021), rotate-half pairing: with angle a = position * base^(-2j/HS), elements j and j + HS/2 of
// a query or key head turn as a plane vector: (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1 sin a). A rotation's transpose is
// the rotation by -a, so backward is forward with the sine negated. In place; values are not touched; fp32 arithmetic.
#pragma once
#include "../ops.h"
#include "parallel.h"

namespace cpu {
namespace detail {

inline void rotate(floatX* qkv, const int* positions, const real* cos_sin, int N, int NH, int NKV, int HS, real direction) {
    const int half = HS / 2;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const real* angle = cos_sin + (size_t)positions[n] * half * 2;
        for (int head = 0; head < NH + NKV; head++) {
            floatX* x = qkv + ((size_t)n * (NH + 2 * NKV) + head) * HS;
            INDEPENDENT_ITERATIONS
            for (int j = 0; j < half; j++) {
                const real c = angle[2 * j], s = direction * angle[2 * j + 1], x1 = (real)x[j], x2 = (real)x[j + half];
                x[j] = (floatX)(x1 * c - x2 * s);
                x[j + half] = (floatX)(x2 * c + x1 * s);
            }
        }
    }
}

}  // namespace detail

inline void rope_forward(Ctx&, floatX* qkv, const int* positions, const real* cos_sin, int N, int NH, int NKV, int HS) {
    detail::rotate(qkv, positions, cos_sin, N, NH, NKV, HS, 1);
}

inline void rope_backward(Ctx&, floatX* dqkv, const int* positions, const real* cos_sin, int N, int NH, int NKV, int HS) {
    detail::rotate(dqkv, positions, cos_sin, N, NH, NKV, HS, -1);
}

}  // namespace cpu
