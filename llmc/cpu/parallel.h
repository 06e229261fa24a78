// Loops over many elements, cut into ranges for threads. The body gets a range and holds a plain inner loop, which the compiler
// turns into vector code; `#pragma omp simd` does not serve here: with it GCC 12 refuses loops that store bf16.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>

// Before a loop: its iterations do not depend on each other, whatever the pointers' values.
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define INDEPENDENT_ITERATIONS
#endif

namespace cpu {

// GCC's OpenMP lets a waiting thread spin for milliseconds before it sleeps. A step has hundreds of short parallel regions, so
// one other busy process on the machine then costs far more than its share (a step of the quick start: 1.5-1.8 s instead of 0.7
// s). Spinning for some ten microseconds costs 1% on an idle machine. The library reads the environment before main, so the
// program starts itself again, once, unless the user has decided.
inline void limit_spinning(char** argv) {
#if defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    setenv("GOMP_SPINCOUNT", "5000", 1);
    execv("/proc/self/exe", argv);  // returns only if that is not possible, which does no harm
#else
    (void)argv;
#endif
}

// f(first, last) for ranges that cover [0, n), in parallel.
template <class F>
void parallel_ranges(size_t n, F f) {
    constexpr size_t range = 8192;
#pragma omp parallel for schedule(static)
    for (size_t first = 0; first < n; first += range) f(first, std::min(n, first + range));
}

}  // namespace cpu
