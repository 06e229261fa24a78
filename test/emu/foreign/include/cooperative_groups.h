// Cooperative groups on the emulator, as far as llm.c uses them: a block, its tiles of 32 threads (whole warps of it), reductions.
#pragma once
#include <cuda_runtime.h>

namespace cooperative_groups {

struct thread_block {
    static unsigned thread_rank() { return emu::block().current->index; }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static void sync(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        emu::block().barrier(0, 0, true, {file, line});
    }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned n>
struct thread_block_tile {
    static_assert(n == 32, "only tiles of a whole warp");
    static unsigned thread_rank() { return emu::lane(); }
    static unsigned size() { return n; }
    static unsigned num_threads() { return n; }
    static unsigned meta_group_rank() { return emu::block().current->warp; }
    static unsigned meta_group_size() { return (thread_block::size() + n - 1) / n; }
    static void sync() { __syncwarp(); }
    template <class T>
    static T shfl(T x, int lane) {
        return __shfl_sync(~0u, x, lane);
    }
    template <class T>
    static T shfl_xor(T x, int mask) {
        return __shfl_xor_sync(~0u, x, mask);
    }
};
template <unsigned n>
thread_block_tile<n> tiled_partition(const thread_block&) {
    return {};
}

template <class T>
struct plus {
    T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct greater {
    T operator()(T a, T b) const { return a > b ? a : b; }
};
template <class T>
struct less {
    T operator()(T a, T b) const { return a < b ? a : b; }
};

template <class T, class F>
T reduce(const thread_block_tile<32>&, T x, F f) {
    for (int offset = 16; offset > 0; offset /= 2) {
        const T other = __shfl_xor_sync(~0u, x, offset);
        x = emu::lane() & offset ? f(other, x) : f(x, other);  // the same bits in every lane
    }
    return x;
}

}  // namespace cooperative_groups
