// Shared by the tests of attention kernels: the cases of the CPU's tests, scratch memory filled with NaN.
#pragma once
#include "../../llmc/gpu/ctx.cuh"
#include "../attention_cases.h"

namespace test {

inline void spoil_scratch(gpu::Ctx& ctx) {  // results must not depend on what earlier ops left there
    CUDA(cudaMemset(ctx.scratch(1 << 20), 0xff, 1 << 20));
    CUDA(cudaDeviceSynchronize());
}

}  // namespace test
