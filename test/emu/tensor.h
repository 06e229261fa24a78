// The instructions of llmc/gpu/tensor.cuh on the CPU. A warp's lanes meet, and the last one to arrive computes for all.
// An asynchronous copy runs either at once or when it is waited for, as the random order decides: a kernel that reads before
// waiting finds old bytes, one that overwrites the source too early finds new ones.
#pragma once
#include <cuda_runtime.h>

#include "../../llmc/base/types.h"

namespace emu {

struct MmaOperands {
    uint32_t a[4], b[2];
    float c[4];
};

inline float low_bf16(uint32_t u) { return __uint_as_float(u << 16); }
inline float high_bf16(uint32_t u) { return __uint_as_float(u & 0xffff0000u); }

// (16, 16) times (16, 8) plus (16, 8), from the fragments of all lanes; fragment layout as in tensor.cuh.
EMU_OPTIMIZED inline void mma_of_warp(unsigned char (*table)[64]) {
    float A[16][16], B[16][8], C[16][8];
    for (int lane = 0; lane < 32; lane++) {
        MmaOperands in;
        memcpy(&in, table[lane], sizeof in);
        const int g = lane / 4, t = lane % 4 * 2;
        for (int r = 0; r < 4; r++) {
            const int row = g + r % 2 * 8, column = t + r / 2 * 8;
            A[row][column] = low_bf16(in.a[r]);
            A[row][column + 1] = high_bf16(in.a[r]);
        }
        for (int r = 0; r < 2; r++) {
            B[t + r * 8][g] = low_bf16(in.b[r]);
            B[t + r * 8 + 1][g] = high_bf16(in.b[r]);
        }
        for (int r = 0; r < 4; r++) C[g + r / 2 * 8][t + r % 2] = in.c[r];
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4 * 2;
        const float d[4] = {C[g][t], C[g][t + 1], C[g + 8][t], C[g + 8][t + 1]};
        memcpy(table[lane], d, sizeof d);
    }
}

inline void mma_of_lane(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4], Where where) {
    MmaOperands in;
    memcpy(in.a, a, sizeof in.a);
    memcpy(in.b, b, sizeof in.b);
    memcpy(in.c, c, sizeof in.c);
    auto table = block().meet(~0u, &in, sizeof in, where, mma_of_warp);
    Quiet quiet;
    memcpy(d, table[lane()], sizeof d);
}

template <bool transposed>
void ldmatrix_of_lane(uint32_t (&r)[4], const void* row, Where where) {
    if ((uintptr_t)row % 16) fault("%s:%d: ldmatrix from an address that is not a multiple of 16", where.file, where.line);
    auto table = block().meet(~0u, &row, sizeof row, where);
    const unsigned g = lane() / 4, t = lane() % 4 * 2;
    for (unsigned m = 0; m < 4; m++)
        for (unsigned half = 0; half < 2; half++) {
            const unsigned matrix_row = transposed ? t + half : g, column = transposed ? g : t + half;
            const uint16_t* p;
            quiet_begin();
            memcpy(&p, table[m * 8 + matrix_row], sizeof p);
            quiet_end();
            const uint32_t value = p[column];
            r[m] = half ? r[m] | value << 16 : value;
        }
}

inline void copy_async_16(void* to, const void* from, bool present, Where where) {
    if ((uintptr_t)to % 16 || (present && (uintptr_t)from % 16))
        fault("%s:%d: cp.async of 16 bytes between addresses that are not multiples of 16", where.file, where.line);
    const auto copy = [=] {
        if (present) memcpy(to, from, 16);
        else memset(to, 0, 16);
    };
    auto& groups = block().current->copy_groups;
    if (groups.empty()) groups.emplace_back();
    if (config().order == Order::random && block().random() % 4 == 0) copy();
    else groups.back().push_back(copy);
}
inline void copy_async_commit() {
    auto& groups = block().current->copy_groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();  // the last one is open
}
inline void copy_async_wait(size_t pending) {
    auto& groups = block().current->copy_groups;
    while (groups.size() > pending + 1) {
        for (const auto& copy : groups.front()) copy();
        groups.erase(groups.begin());
    }
}

}  // namespace emu

namespace gpu {

#define mma_m16n8k16(d, a, b, c) emu::mma_of_lane(d, a, b, c, EMU_HERE)
#define ldmatrix_x4(r, row) emu::ldmatrix_of_lane<false>(r, row, EMU_HERE)
#define ldmatrix_x4_trans(r, row) emu::ldmatrix_of_lane<true>(r, row, EMU_HERE)
inline void copy_async_16(void* to_shared, const void* from_global, bool present = true) {
    emu::copy_async_16(to_shared, from_global, present, EMU_HERE);
}
inline void copy_async_commit() { emu::copy_async_commit(); }
template <int pending>
void copy_async_wait() {
    emu::copy_async_wait(pending);
}

}  // namespace gpu
