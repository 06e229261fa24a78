// dev/kernels/gemm_hopper.cuh compared with plain loops: all layouts, with and without clusters, sizes that end within
// tiles, more items than blocks, bias, split K. Whole numbers with exact sums, so that bits must be equal.
#include <gtest/gtest.h>

#include "../../dev/kernels/gemm_hopper.cuh"
#include "device_memory.h"
#include "hopper_cases.h"

namespace test_gpu_gemm_hopper {

using namespace test;
using namespace gpu::hopper;

class GemmHopper : public OnHopper {};

struct Case {
    int M, N, K;
    Major a, b;
    bool bias;
    int splits;  // 0: chosen
};

void check(gpu::Ctx& ctx, const Case& c, int cluster) {
    SCOPED_TRACE(testing::Message() << c.M << " x " << c.N << " x " << c.K << (c.a == Major::rows ? ", A rows" : ", A columns")
                                    << (c.b == Major::rows ? ", B rows" : ", B columns") << ", splits " << c.splits
                                    << ", clusters of " << cluster);
    const std::vector<bf16> a = whole_numbers((size_t)c.M * c.K, 1), b = whole_numbers((size_t)c.N * c.K, 2),
                            bias = whole_numbers(c.N, 3);
    std::vector<float> a_rows((size_t)c.M * c.K), b_rows((size_t)c.N * c.K);
    for (int m = 0; m < c.M; m++)
        for (int k = 0; k < c.K; k++) a_rows[(size_t)m * c.K + k] = (float)a[c.a == Major::rows ? m * c.K + k : k * c.M + m];
    for (int n = 0; n < c.N; n++)
        for (int k = 0; k < c.K; k++) b_rows[(size_t)n * c.K + k] = (float)b[c.b == Major::rows ? n * c.K + k : k * c.N + n];
    std::vector<bf16> expected((size_t)c.M * c.N);
    for (int m = 0; m < c.M; m++)
        for (int n = 0; n < c.N; n++) {
            float sum = c.bias ? (float)bias[n] : 0;
            for (int k = 0; k < c.K; k++) sum += a_rows[(size_t)m * c.K + k] * b_rows[(size_t)n * c.K + k];
            expected[(size_t)m * c.N + n] = bf16(sum);
        }
    DeviceMemory<bf16> a_device(a), b_device(b), bias_device(bias), out(expected.size());
    gemm(ctx, out.p(), {a_device.p(), c.a}, {b_device.p(), c.b}, c.bias ? bias_device.p() : nullptr, c.M, c.N, c.K,
         {cluster, c.splits});
    expect_same_bits(out.get(), expected, "out");
}
void check(gpu::Ctx& ctx, const Case& c) {
    check(ctx, c, 1);
    check(ctx, c, 2);
}

constexpr Major rows = Major::rows, columns = Major::columns;

TEST_F(GemmHopper, Forward) {
    check(ctx, {1, 8, 8, rows, rows, false, 0});
    check(ctx, {257, 264, 72, rows, rows, true, 0});
    check(ctx, {520, 520, 328, rows, rows, true, 1});  // items and steps for the ring to wrap around, several per block
}
TEST_F(GemmHopper, BackwardInput) {
    check(ctx, {3, 8, 24, rows, columns, false, 0});
    check(ctx, {130, 392, 200, rows, columns, false, 1});
}
TEST_F(GemmHopper, BackwardWeight) {
    check(ctx, {8, 8, 1, columns, columns, false, 0});
    check(ctx, {264, 136, 333, columns, columns, false, 1});
}
TEST_F(GemmHopper, Splits) {
    check(ctx, {136, 264, 449, columns, columns, false, 3});
    check(ctx, {100, 72, 640, rows, rows, true, 10});
    check(ctx, {64, 64, 1600, columns, columns, false, 0});
    EXPECT_EQ(gemm_splits(32 * 32, 128, 66, (size_t)8192 * 8192), 1);
    EXPECT_GT(gemm_splits(9, 1024, 66, 768 * 768), 5);
}
#ifndef __CUDACC__
TEST_F(GemmHopper, InAnyOrder) {
    const emu::Config before = emu::config();
    for (const emu::Order order : {emu::Order::forward, emu::Order::reverse, emu::Order::random})
        for (unsigned seed = 7; seed < (order == emu::Order::random ? 10u : 8u); seed++) {
            emu::config().order = order;
            emu::config().seed = seed;
            check(ctx, {257, 264, 328, rows, rows, true, 1});
            check(ctx, {136, 264, 400, columns, columns, false, 2});
        }
    emu::config() = before;
}
TEST_F(GemmHopper, RefusesRowsThatTmaCannotRead) {
#ifdef EMU_TSAN
    GTEST_SKIP() << "ThreadSanitizer and tests that die do not go together";
#endif
    DeviceMemory<bf16> x(64 * 64);
    const auto run = [&](Major a, Major b, int M, int N, int K) {
        gemm(ctx, x.p(), {x.p(), a}, {x.p(), b}, nullptr, M, N, K, {2, 0});
    };
    EXPECT_DEATH(run(rows, rows, 8, 8, 12), "multiples of 16 bytes");
    EXPECT_DEATH(run(rows, rows, 8, 12, 8), "multiples of 16 bytes");
    EXPECT_DEATH(run(columns, columns, 12, 8, 8), "multiples of 16 bytes");
    EXPECT_DEATH(run(columns, rows, 8, 8, 8), "no product needs");
}
#endif

}  // namespace test_gpu_gemm_hopper
