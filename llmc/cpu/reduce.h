// Reductions with a fixed order, so that results have the same bits for any number of threads and any vector length.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../base/math.h"
#include "../ops.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {
namespace detail {

// dbias (+)= column sums of dout (N, OC), whose rows are `stride` apart: a task owns 64 columns and adds their rows from first
// to last.
inline void column_sums(real* dbias, const floatX* dout, size_t stride, int N, int OC, Acc acc) {
    constexpr int width = 64;
    parallel_tasks((size_t)ceil_div(OC, width), [=](size_t task) {
        const int first = (int)task * width;
        const int columns = std::min(width, OC - first);
        real sum[width] = {};
        for (int n = 0; n < N; n++) {
            const floatX* row = dout + (size_t)n * stride + first;
            for (int k = 0; k < columns; k++) sum[k] += (real)row[k];
        }
        for (int k = 0; k < columns; k++) dbias[first + k] = acc == Acc::Add ? dbias[first + k] + sum[k] : sum[k];
    });
}

// f(0) + f(1) + .. + f(n-1) in 16 interleaved parts. Floating-point addition is not associative, so a compiler may not split a
// plain loop into vector lanes; here the split is part of the definition, and the inner loop vectorizes.
template <class F>
inline real lane_sum(int n, F f) {
    constexpr int parts = 16;
    real part[parts] = {};
    const int whole = n / parts * parts;
    for (int i = 0; i < whole; i += parts)
        for (int k = 0; k < parts; k++) part[k] += f(i + k);
    real sum = 0;
    for (int i = whole; i < n; i++) sum += f(i);
    for (int k = 0; k < parts; k++) sum += part[k];
    return sum;
}

// lane_sum() of squares by vectors, whose elements are prefetched 2 KiB ahead: 0.9 of the time on a Xeon, out of memory.
template <class E>
inline real lane_sum_of_squares(const E* x, int n) {
    constexpr int parts = 16, ahead = 2048 / (int)sizeof(E);
    floats part[parts / lanes] = {};
    const int whole = n / parts * parts;
    for (int i = 0; i < whole; i += parts) {
        __builtin_prefetch(x + i + ahead);
        for (int k = 0; k < parts / lanes; k++) {
            const floats v = load(x + i + k * lanes);
            part[k] += v * v;
        }
    }
    real sum = 0, sums[parts];
    memcpy(sums, part, sizeof sums);
    for (int i = whole; i < n; i++) sum += (real)x[i] * (real)x[i];
    for (const real s : sums) sum += s;
    return sum;
}

// Blocks of fixed size are summed in fp32 (256 terms per lane: few enough to be accurate), and the blocks' sums in double, in
// order. NaN and infinity propagate. Reads each element once: bound by memory bandwidth.
template <class E>
double sum_of_squares(const E* x, size_t n) {
    constexpr size_t block = 4096;
    std::vector<double> sums(ceil_div(n, block));
    parallel_ranges(
        n,
        [&](size_t first, size_t last) {
            for (; first < last; first += block) {
                const E* part = x + first;
                const int there = (int)std::min(block, last - first);
                sums[first / block] = lane_sum_of_squares(part, there);
            }
        },
        4 * block);
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

}  // namespace detail

// For the global gradient norm.
inline double sum_of_squares(Ctx&, const Elements& x, size_t n) {
    return x.visit_second([=](const auto* elements) { return detail::sum_of_squares(elements, n); });
}

inline void add_squares(Ctx& ctx, double* sum, const Elements& x, size_t n) { *sum += sum_of_squares(ctx, x, n); }

// Reads each word once: bound by memory bandwidth.
inline uint64_t word_sum(Ctx&, const void* x, size_t n, size_t first) {
    constexpr size_t block = 8192;
    std::atomic<uint64_t> all{0};
    parallel_ranges(
        n,
        [&](size_t begin, size_t end) {
            uint64_t sum = 0;
            const char* words = (const char*)x + begin * sizeof(uint32_t);
            const uint32_t factor = (uint32_t)(2 * (first + begin) + 1), count = (uint32_t)(end - begin);
            for (uint32_t i = 0; i < count; i++) {
                uint32_t word;
                memcpy(&word, words + i * sizeof word, sizeof word);
                sum += (uint64_t)word * (factor + 2 * i);
            }
            all += sum;
        },
        block);
    return all;
}

}  // namespace cpu
