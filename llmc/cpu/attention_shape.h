// The layout of attention's tensors, and the dot product of two rows.
#pragma once
#include <cstddef>

#include "../base/types.h"

namespace cpu {

// The layout of heads in the fused projection (B, T, NH + 2*NKV, HS).
struct AttentionShape {
    int B, T, NH, NKV, HS;
    real scale;
    int group() const { return NH / NKV; }
    size_t row() const { return (size_t)(NH + 2 * NKV) * HS; }
    size_t query(int b, int t, int h) const { return ((size_t)b * T + t) * row() + (size_t)h * HS; }
    size_t key(int b, int t, int g) const { return query(b, t, NH + g); }
    size_t value(int b, int t, int g) const { return query(b, t, NH + NKV + g); }
    size_t output(int b, int t, int h) const { return (((size_t)b * T + t) * NH + h) * HS; }
    size_t statistic(int b, int t, int h) const { return ((size_t)b * NH + h) * T + t; }
};

inline real dot(const floatX* a, const floatX* b, int n) {
    real sum = 0;
    for (int i = 0; i < n; i++) sum += (real)a[i] * (real)b[i];
    return sum;
}

}  // namespace cpu
