// Types, reductions, and the arithmetic of the emulated NCCL (nccl.h).
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

typedef enum { ncclNumOps_dummy = 5 } ncclRedOp_dummy_t;
typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
    ncclMaxRedOp = 0x7fffffff >> (32 - 8 * sizeof(ncclRedOp_dummy_t))
} ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
} ncclDataType_t;

namespace emu::nccl {

struct Bf16 {
    uint16_t bits;
    Bf16() = default;
    explicit Bf16(float x) {  // to nearest, ties to even; NaN stays NaN
        uint32_t u;
        memcpy(&u, &x, 4);
        bits = x != x ? 0x7fff : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t u = (uint32_t)bits << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
};

struct TypeInfo {
    const char* name;
    size_t bytes;
    bool reducible;
};
inline const TypeInfo& info(ncclDataType_t type) {
    static const TypeInfo table[ncclNumTypes] = {{"int8", 1, true},     {"uint8", 1, true},       {"int32", 4, true},
                                                 {"uint32", 4, true},   {"int64", 8, true},       {"uint64", 8, true},
                                                 {"float16", 2, false}, {"float32", 4, true},     {"float64", 8, true},
                                                 {"bfloat16", 2, true}, {"float8e4m3", 1, false}, {"float8e5m2", 1, false}};
    return table[type];
}
// F is called with a value of the type.
template <class F>
void with_type(ncclDataType_t type, F f) {
    switch (type) {
        case ncclInt8: return f(int8_t());
        case ncclUint8: return f(uint8_t());
        case ncclInt32: return f(int32_t());
        case ncclUint32: return f(uint32_t());
        case ncclInt64: return f(int64_t());
        case ncclUint64: return f(uint64_t());
        case ncclFloat32: return f(float());
        case ncclFloat64: return f(double());
        case ncclBfloat16: return f(Bf16());
        default: fault("NCCL: no arithmetic in %s", info(type).name);
    }
}

template <class T>
T reduce(ncclRedOp_t op, T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        using U = std::make_unsigned_t<T>;  // wraps around, as on a GPU
        switch (op) {
            case ncclProd: return (T)((U)a * (U)b);
            case ncclMax: return std::max(a, b);
            case ncclMin: return std::min(a, b);
            default: return (T)((U)a + (U)b);
        }
    } else {
        using F = std::conditional_t<std::is_same_v<T, double>, double, float>;
        const F x = (F)a, y = (F)b;
        switch (op) {
            case ncclProd: return (T)(x * y);
            case ncclMax: return (T)std::fmax(x, y);
            case ncclMin: return (T)std::fmin(x, y);
            default: return (T)(x + y);
        }
    }
}
// A rank's own input to the sum: for avg, in floating point, times 1/n.
template <class T>
T contribution(ncclRedOp_t op, T x, int ranks) {
    if constexpr (std::is_integral_v<T>) return x;
    else if (op != ncclAvg) return x;
    else return reduce(ncclProd, x, (T)(std::conditional_t<std::is_same_v<T, double>, double, float>)(1.0 / ranks));
}
// to = partial (op) own, or just own if there is no partial. `to` may be `partial`.
inline void accumulate(ncclDataType_t type, ncclRedOp_t op, int ranks, void* to, const void* partial, const void* own,
                       size_t count) {
    with_type(type, [=](auto example) {
        using T = decltype(example);
        for (size_t i = 0; i < count; i++) {
            const T x = contribution(op, ((const T*)own)[i], ranks);
            ((T*)to)[i] = partial ? reduce(op, ((const T*)partial)[i], x) : x;
        }
    });
}
// The last step of avg when the sum is complete: integers divide, towards zero.
inline void complete(ncclDataType_t type, ncclRedOp_t op, int ranks, void* data, size_t count) {
    if (op != ncclAvg) return;
    with_type(type, [=](auto example) {
        using T = decltype(example);
        if constexpr (std::is_integral_v<T>) {
            using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
            for (size_t i = 0; i < count; i++) ((T*)data)[i] = (T)((Wide)((T*)data)[i] / (Wide)ranks);
        }
    });
}

}  // namespace emu::nccl
