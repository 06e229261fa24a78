// CUDA's built-in vector types and their make_ functions, as far as kernels here use them.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
// Kernels move 16 bytes as an int4 (gpu/device.cuh): at addresses that are not multiples of 16 a GPU faults, and so does this.
struct alignas(16) int4 {
    int x = 0, y = 0, z = 0, w = 0;
    int4() = default;
    int4(int x_, int y_, int z_, int w_) : x(x_), y(y_), z(z_), w(w_) {}
    int4(const int4& from) { *this = from; }
    int4& operator=(const int4& from) {
        check(this);
        check(&from);
        memcpy((void*)this, (const void*)&from, sizeof from);
        return *this;
    }

private:
    static void check(const void* address) {
        asm("" : "+r"(address));  // or the compiler derives its alignment from the type
        if ((uintptr_t)address % 16 == 0) return;
        fprintf(stderr, "emu: misaligned address %p of 16 bytes\n", address);
        abort();
    }
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
