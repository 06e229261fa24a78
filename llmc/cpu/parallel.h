// Loops in parallel. The body of one over many elements gets a range and holds a plain inner loop, which the compiler turns
// into vector code; `#pragma omp simd` does not serve here: with it GCC 12 refuses loops that store bf16.
#pragma once
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "../base/math.h"
#include "team.h"

// Before a loop: its iterations do not depend on each other, whatever the pointers' values.
#if defined(__clang__)
#define INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define INDEPENDENT_ITERATIONS
#endif

namespace cpu {

// f(task) for tasks below n, in parallel; or f(member, task), where each member has memory of its own (team.h).
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

// f(i) for i below n, or f(member, i), in parallel. Each is so little work that a task has several.
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
