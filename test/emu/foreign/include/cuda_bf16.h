// bf16 with the names of the toolkit's header; arithmetic in fp32, rounded once, as on a GPU.
#pragma once
#include <cuda_runtime.h>
#include <type_traits>

struct __nv_bfloat16_raw {
    unsigned short x;
};
struct __nv_bfloat16 {
    our_bf16 value;
    __nv_bfloat16() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    __nv_bfloat16(T x) : value((float)x) {}
    __nv_bfloat16(__nv_bfloat16_raw r) { value.bits = r.x; }
    operator float() const { return value; }
    operator __nv_bfloat16_raw() const { return {value.bits}; }
    __nv_bfloat16& operator+=(__nv_bfloat16 y) { return *this = (float)*this + (float)y; }
};
using nv_bfloat16 = __nv_bfloat16;
inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a + (float)b; }
inline __nv_bfloat16 operator-(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a - (float)b; }
inline __nv_bfloat16 operator*(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a * (float)b; }
inline __nv_bfloat16 operator/(__nv_bfloat16 a, __nv_bfloat16 b) { return (float)a / (float)b; }

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 operator+(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x + b.x, a.y + b.y}; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16_raw{x}; }
