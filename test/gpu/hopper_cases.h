// For the tests of kernels that use Hopper's instructions, which are skipped on other GPUs: numbers whose sums are exact.
#pragma once
#include <gtest/gtest.h>

#include <vector>

#include "../../llmc/gpu/ctx.cuh"
#include "../testing.h"

namespace test {

class OnHopper : public testing::Test {
protected:
    gpu::Ctx ctx;
    void SetUp() override {
        if (ctx.capability != 90) GTEST_SKIP() << "these instructions exist on compute capability 9.0; this is " << ctx.name;
    }
};

// Whole numbers from -8 to 8: products and their sums are exact, so results must be equal.
inline std::vector<bf16> whole_numbers(size_t n, uint64_t seed) {
    Rng rng(seed);
    std::vector<bf16> x(n);
    for (bf16& value : x) value = bf16((float)(rng.below(17) - 8));
    return x;
}

}  // namespace test
