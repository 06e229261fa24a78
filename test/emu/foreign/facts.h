// The lines of cute_facts.cpp and our_facts.cu.
#pragma once
#include <cstdint>
#include <cstdio>

constexpr unsigned tile_address = 4096;  // of a tile in shared memory
constexpr int B = 3, T = 1000, heads = 5;

// far: `leading` is used. The hardware ignores it for rows, and for columns of one swizzled row.
inline void print_descriptor(const char* what, int first, int k, uint64_t bits, bool far) {
    const uint64_t leading = (uint64_t)0x3fff << 16;
    printf("descriptor of %s, from row %d, step %d: %016llx\n", what, first, k,
           (unsigned long long)(far ? bits : bits & ~leading));
}
inline void print_place(const char* what, int row, int column, unsigned address) {
    printf("place, %s: (%d, %d) at %u\n", what, row, column, address);
}
inline void print_register(const char* what, int row, int column, int thread, int i) {
    printf("register of %s: (%d, %d) in thread %d, element %d\n", what, row, column, thread, i);
}
// All arguments of cuTensorMapEncodeTiled except the address and hints to the L2 cache.
template <class Size, class Edge>
void print_map(int type, unsigned rank, const Size* sizes, const Size* strides, const Edge* box, const Edge* steps,
               int interleave, int swizzle, int fill) {
    printf("tensor map of type %d, interleave %d, swizzle %d, fill %d:", type, interleave, swizzle, fill);
    for (unsigned d = 0; d < rank; d++)
        printf(" (size %llu, stride %llu, box %u, step %u)", (unsigned long long)sizes[d],
               d ? (unsigned long long)strides[d - 1] : 0ull, (unsigned)box[d], (unsigned)steps[d]);
    printf("\n");
}
