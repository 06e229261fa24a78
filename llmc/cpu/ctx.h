// cpu::Ctx: the only thing a CPU op may reach for. Threads, scratch memory, the instruction set found, and whether the plain
// loops are forced. Ops on one Ctx run one after another, so they share one scratch buffer; nothing in it outlives an op.
#pragma once
#include <omp.h>

#include <cstdlib>
#include <new>
#include <string>

#include "../check.h"

namespace cpu {

struct Ctx {
    int threads;         // OpenMP threads that ops use
    bool plain = false;  // true: only the plain loops (the specification, no library); false: fast paths where they exist

    explicit Ctx(int n_threads = 0) : threads(n_threads > 0 ? n_threads : omp_get_max_threads()) { omp_set_num_threads(threads); }
    ~Ctx() { free(scratch_); }
    Ctx(const Ctx&) = delete;
    Ctx& operator=(const Ctx&) = delete;

    // At least `bytes` of 64-byte aligned memory, contents undefined, valid until the next call. Grows, never shrinks.
    void* scratch(size_t bytes) {
        if (bytes > scratch_bytes_) {
            free(scratch_);
            scratch_bytes_ = (bytes + 4095) / 4096 * 4096;
            scratch_ = aligned_alloc(4096, scratch_bytes_);
            if (!scratch_) throw std::bad_alloc();
        }
        return scratch_;
    }

private:
    void* scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
};

}  // namespace cpu
