// Shared by the tests of attention kernels: the cases and the reference of the CPU's tests, the special unit's error, scratch
// memory filled with NaN.
#pragma once
#include "../../llmc/gpu/ctx.cuh"
#include "../attention_reference.h"

namespace test {

inline void spoil_scratch(gpu::Ctx& ctx) {  // results must not depend on what earlier ops left there
    CUDA(cudaMemset(ctx.scratch(1 << 20), 0xff, 1 << 20));
    CUDA(cudaDeviceSynchronize());
}

namespace attention {

// Relative error of exp(x), where x is a difference with an absolute error, and of some more such factors. The difference is
// rounded, and the special unit works with its product with log2(e), rounded again; `each` is the relative error of one factor.
inline double special_unit_error(double x, double x_error, double each, int more) {
    return std::expm1(x_error + 3 * u * std::min(std::abs(x), 100.0) + 4 * u + (2 * more + 1) * each);
}

}  // namespace attention

}  // namespace test
