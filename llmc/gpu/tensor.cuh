// The warp-wide tensor-core instructions of sm_80 and later, one function each: inline PTX on a GPU, an equivalent on the CPU
// in test/emu/tensor.h. Hopper's additions (wgmma, TMA, mbarriers) are in hopper.cuh.
//
// mma_m16n8k16: d (16, 8) = a (16, 16) b (16, 8) + c, bf16 factors, fp32 sums. Fragments, with g = lane / 4, t = lane % 4, two
// bf16 per register, the lower column (row of b) in the low half:
//   a[0] (g, 2t..)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)      b[0] (2t.., g)  b[1] (2t+8.., g)
//   c[0] (g, 2t)  c[1] (g, 2t+1)  c[2] (g+8, 2t)  c[3] (g+8, 2t+1)
// ldmatrix_x4 loads four 8 x 8 matrices of bf16 from shared memory: lane i gives the address of row i % 8 of matrix i / 8 (16
// bytes, aligned to 16); register m of lane (g, t) receives elements (g, 2t), (g, 2t+1) of matrix m, or with _trans (2t, g),
// (2t+1, g).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../base/types.h"

#ifdef __CUDACC__
namespace gpu {

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                   "f"(c[3]));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts an asynchronous copy of 16 bytes from global to shared memory; `present` false: writes zeros and reads nothing.
__device__ __forceinline__ void copy_async_16(void* to_shared, const void* from_global, bool present = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from_global),
                 "r"(present ? 16 : 0)
                 : "memory");
}
// Ends a group of copies of this thread.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups are in flight. Other threads' copies need a barrier after it.
template <int pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace gpu
#else
#include "../../test/emu/tensor.h"
#endif

namespace gpu {

// Two floats rounded to bf16, the first in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
#ifdef __CUDACC__
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return (uint32_t)bf16(low).bits | (uint32_t)bf16(high).bits << 16;
#endif
}

// ---- tiles in shared memory ------------------------------------------------------------------------------------------------
namespace mma {

// The swizzled position, in a tile with rows of C elements, of a row's chunk of 8 elements (16 bytes). ldmatrix reads the same
// chunk of 8 rows at once, which must fall into 8 different groups of 4 banks. With rows of C/8 = odd * 2^k chunks, rows 8/2^k
// apart would conflict; exchanging chunks by exclusive-or with the number of that step, modulo 2^k, separates them.
template <int C>
constexpr int tile_steps = (C / 8 & -(C / 8)) < 8 ? (C / 8 & -(C / 8)) : 8;  // 2^k

template <int C>
HD constexpr int tile_exchange(int row) {
    constexpr int steps = tile_steps<C>;
    return row / (8 / steps) % steps;
}
template <int C>
HD constexpr int tile_offset(int row, int chunk) {
    return row * C + (chunk ^ tile_exchange<C>(row)) * 8;
}

// tile_offset(row + 16 i, chunk + c) for a lane's own row and chunk (0 or 1), with compile-time i and even c: the lane's part
// is computed once, the remainder becomes an immediate offset.
template <int C>
struct LaneOffset {
    int row_offset, exchange;
    HD LaneOffset(int row, int chunk) : row_offset(row * C), exchange(chunk ^ tile_exchange<C>(row)) {}
    HD int operator()(int i, int c) const {
        constexpr int steps = tile_steps<C>;
        return row_offset + 16 * i * C + c / steps * steps * 8 + (c % steps ^ exchange) * 8;
    }
};

}  // namespace mma
}  // namespace gpu
