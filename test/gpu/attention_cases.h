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

// Relative error of exp(x), where x is a difference with an absolute error, and of `more` such factors. The difference is
// rounded, and the special unit uses its product with log2(e), rounded again; `each` is the relative error of one factor.
inline double special_unit_error(double x, double x_error, double each, int more) {
    return std::expm1(x_error + 3 * u * std::min(std::abs(x), 100.0) + 4 * u + (2 * more + 1) * each);
}

// A capped score by tanh_approx: four roundings and the special unit's 2^-22 before the exponential, whose effect on tanh is at
// most 4u; 1 + e and its reciprocal 6u, the difference u; then the factor and log2(e).
inline double tanh_approx_error(double cap, double value) { return 11 * u * cap + 3 * u * std::abs(value); }

// Roundings shared by all GPU kernels. A weight: its score, its exponential, and one or two more per tile passed. lse is the
// sum of a score and a logarithm, out a sum divided by another.
struct GpuKernelArithmetic : Arithmetic {
    GpuKernelArithmetic(double rounded_operand, int tokens_of_tile) {
        operand = rounded_operand;
        tile = tokens_of_tile;
        logarithm = 8 * u;
        division = 4 * u;
    }
    double forward_weight(double score, double top, double score_error, int tiles) const override {
        return exponential(score, top, score_error, tiles);
    }
    double backward_weight(double score, double log_sum, double score_error) const override {
        return exponential(score, log_sum, score_error, 1);
    }

private:
    // Relative error of exp(score - shift), and of `more` such factors.
    virtual double exponential(double score, double shift, double score_error, int more) const = 0;
};

}  // namespace attention

}  // namespace test
