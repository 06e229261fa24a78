// Reductions with a fixed order, so that results have the same bits for any number of threads and any vector length.
#pragma once
#include <algorithm>
#include <vector>

#include "../ops.h"

namespace cpu {
namespace detail {

// combine(start, f(0), f(1), .. f(n-1)) in `lanes` interleaved parts. Floating-point addition is not associative, so a compiler
// may not split a plain loop into vector lanes; here the split is the definition, and the inner loop becomes vector code.
template <int lanes, class F, class Combine>
inline real lane_reduce(int n, real start, F f, Combine combine) {
    real part[lanes];
    for (int k = 0; k < lanes; k++) part[k] = start;
    const int whole = n / lanes * lanes;
    for (int i = 0; i < whole; i += lanes)
        for (int k = 0; k < lanes; k++) part[k] = combine(part[k], f(i + k));
    real result = start;
    for (int i = whole; i < n; i++) result = combine(result, f(i));
    for (int k = 0; k < lanes; k++) result = combine(result, part[k]);
    return result;
}

template <class F>
inline real lane_sum(int n, F f) {
    return lane_reduce<16>(n, 0, f, [](real a, real b) { return a + b; });
}

// The largest of start and all f(i); NaN is passed over. 32 lanes: with 16, GCC 12 makes scalar code, ten times slower.
template <class F>
inline real lane_max(int n, real start, F f) {
    return lane_reduce<32>(n, start, f, [](real a, real b) { return b > a ? b : a; });
}

}  // namespace detail

// For the global gradient norm. Blocks of fixed size are summed in fp32 (256 terms a lane: short enough to be accurate), and
// the blocks' sums in double, in order. NaN and infinity come through. Reads each element once: bound by memory bandwidth.
inline double sum_of_squares(Ctx&, const real* x, size_t n) {
    constexpr size_t block = 4096;
    std::vector<double> sums((n + block - 1) / block);
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < sums.size(); b++) {
        const real* part = x + b * block;
        sums[b] = detail::lane_sum((int)std::min(block, n - b * block), [=](int i) { return part[i] * part[i]; });
    }
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

inline void add_squares(Ctx& ctx, double* sum, const real* x, size_t n) { *sum += sum_of_squares(ctx, x, n); }

}  // namespace cpu
