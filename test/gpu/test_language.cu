// What kernels may write beside our own use: min and max of floats, shuffles within parts of a warp, atomics with an argument
// of another type. On the emulator these were once missing or, like max, silently taken for those of int.
#include <gtest/gtest.h>

#include "../../llmc/gpu/device.cuh"

using namespace gpu;

constexpr int n_results = 8;

__global__ void language_kernel(float* out, unsigned* counter) {
    const int lane = threadIdx.x;
    float* mine = out + lane * n_results;
    mine[0] = max(0.25f, 0.75f) + min(0.5f, 2.0f);
    mine[1] = (float)max(-1, lane);
    mine[2] = __shfl_down_sync(all_lanes, (float)lane, 3, 8);
    mine[3] = __shfl_up_sync(all_lanes, (float)lane, 3, 8);
    mine[4] = __shfl_sync(all_lanes, (float)lane, 9, 8);
    mine[5] = __shfl_xor_sync(all_lanes, (float)lane, 8, 8);
    mine[6] = __shfl_down_sync(all_lanes, (float)lane, 3);
    mine[7] = __shfl_xor_sync(all_lanes, (float)lane, 5);
    atomicAdd(counter, 2);
}

TEST(Language, WhatForeignKernelsUse) {
    struct {
        cudaStream_t stream = nullptr;
    } ctx;
    float* out;
    unsigned *counter, count = 0;
    CUDA(cudaMalloc(&out, 32 * n_results * sizeof(float)));
    CUDA(cudaMalloc(&counter, sizeof(unsigned)));
    CUDA(cudaMemset(counter, 0, sizeof(unsigned)));
    LAUNCH(language_kernel, 1, 32, 0, ctx, out, counter);
    float host[32][n_results];
    CUDA(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(&count, counter, sizeof count, cudaMemcpyDeviceToHost));
    EXPECT_EQ(count, 64u);
    for (int lane = 0; lane < 32; lane++) {
        EXPECT_EQ(host[lane][0], 1.25f);
        EXPECT_EQ(host[lane][1], (float)lane);
        EXPECT_EQ(host[lane][2], (float)(lane % 8 < 5 ? lane + 3 : lane)) << lane;
        EXPECT_EQ(host[lane][3], (float)(lane % 8 >= 3 ? lane - 3 : lane)) << lane;
        EXPECT_EQ(host[lane][4], (float)(lane / 8 * 8 + 1)) << lane;
        EXPECT_EQ(host[lane][5], (float)(lane / 8 % 2 ? lane - 8 : lane)) << lane;  // a later group is not read
        EXPECT_EQ(host[lane][6], (float)(lane < 29 ? lane + 3 : lane)) << lane;
        EXPECT_EQ(host[lane][7], (float)(lane ^ 5)) << lane;
    }
    CUDA(cudaFree(out));
    CUDA(cudaFree(counter));
}
