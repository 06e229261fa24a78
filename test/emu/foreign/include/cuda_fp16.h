// half by the compiler's own type, for kernels that only name it; g++ has one from 12 on.
#pragma once
#include <cuda_runtime.h>

#if defined(__clang__) || __GNUC__ >= 12
#ifdef __clang__
using half_storage = __fp16;
#else
using half_storage = _Float16;
#endif
struct half {
    half_storage value;
    half() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    half(T x) : value((half_storage)x) {}
    operator float() const { return (float)value; }
};
struct alignas(4) half2 {
    half x, y;
};
inline half2 __halves2half2(half x, half y) { return {x, y}; }
inline half2 operator+(half2 a, half2 b) { return {(float)a.x + (float)b.x, (float)a.y + (float)b.y}; }
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }
inline half __ushort_as_half(unsigned short x) {
    half h;
    memcpy((void*)&h, &x, 2);
    return h;
}
#endif
