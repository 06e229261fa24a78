// Parallel loops. For loops over many elements, the body receives a range and contains a plain inner loop that the compiler
// vectorizes; `#pragma omp simd` is not used, since with it GCC 12 refuses loops that store bf16.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "../base/math.h"
#include "team.h"

// Asserts that a loop's iterations are independent, whatever the pointers' values.
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define INDEPENDENT_ITERATIONS
#endif

namespace cpu {

// f(task) for tasks below n, in parallel; or f(member, task), where each member has its own memory (team.h).
template <class F>
void parallel_tasks(size_t n, F f, int threads = op_threads()) {
    Team::run(n > 1 ? threads : 1, [&](Team::Member& me) {
        me.share((int64_t)n, [&](int64_t task) {
            if constexpr (std::is_invocable_v<F, size_t>) f((size_t)task);
            else f(me, (size_t)task);
        });
    });
}

// f(first, last) for ranges that cover [0, n), in parallel.
template <class F>
void parallel_ranges(size_t n, F f, size_t range = 8192) {
    parallel_tasks(ceil_div(n, range), [&](size_t task) { f(task * range, std::min(n, (task + 1) * range)); });
}

// f(i) for i below n, or f(member, i), in parallel. For small bodies: a task consists of several i.
template <class F>
void parallel_for(int n, F f, int threads = op_threads()) {
    const int some = std::max(1, n / (16 * threads));
    const auto task = [&](Team::Member& me, size_t t) {
        for (int i = (int)t * some; i < std::min(n, ((int)t + 1) * some); i++)
            if constexpr (std::is_invocable_v<F, int>) f(i);
            else f(me, i);
    };
    parallel_tasks((size_t)ceil_div(n, some), task, threads);
}

}  // namespace cpu
