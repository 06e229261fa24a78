// Language features beyond our own use: min and max of floats, shuffles within parts of a warp, atomics with an argument of
// another type. The emulator once lacked these or, as for max, silently used the int version.
#include <gtest/gtest.h>

#include "../../llmc/gpu/device.cuh"

namespace test_gpu_language {

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

// Lanes that have returned no longer vote, and a shuffle that reads from them is undefined.
__global__ void returned_lanes_kernel(unsigned* votes, float* read) {
    const int lane = threadIdx.x;
    votes[0] = __ballot_sync(all_lanes, true);
    if (lane >= 8) return;
    votes[1] = __ballot_sync(all_lanes, lane != 3);
    const float x = __shfl_down_sync(all_lanes, 1.0f, 1);
    read[lane] = x;
}

TEST(Language, LanesThatHaveReturned) {
    struct {
        cudaStream_t stream = nullptr;
    } ctx;
    unsigned *votes, host[2];
    float *read, host_read[8];
    CUDA(cudaMalloc(&votes, sizeof host));
    CUDA(cudaMalloc(&read, sizeof host_read));
    LAUNCH(returned_lanes_kernel, 1, 32, 0, ctx, votes, read);
    CUDA(cudaMemcpy(host, votes, sizeof host, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(host_read, read, sizeof host_read, cudaMemcpyDeviceToHost));
    EXPECT_EQ(host[0], all_lanes);
    EXPECT_EQ(host[1], 0xf7u);
    for (int lane = 0; lane < 7; lane++) EXPECT_EQ(host_read[lane], 1.0f);
#ifdef BACKEND_EMU
    EXPECT_TRUE(std::isnan(host_read[7])) << "nobody may rely on what a lane has left that is gone";
#endif
    CUDA(cudaFree(votes));
    CUDA(cudaFree(read));
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

}  // namespace test_gpu_language
