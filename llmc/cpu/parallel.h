// Loops over many elements, cut into ranges for threads. The body gets a range and holds a plain inner loop, which the compiler
// turns into vector code; `#pragma omp simd` does not serve here: with it GCC 12 refuses loops that store bf16.
#pragma once
#include <algorithm>
#include <cstddef>

// Before a loop: its iterations do not depend on each other, whatever the pointers' values.
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define INDEPENDENT_ITERATIONS
#endif

namespace cpu {

// f(first, last) for ranges that cover [0, n), in parallel.
template <class F>
void parallel_ranges(size_t n, F f) {
    constexpr size_t range = 8192;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < n; first += range) f(first, std::min(n, first + range));
}

}  // namespace cpu
