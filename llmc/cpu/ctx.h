// cpu::Ctx: all state that a CPU op may use: threads, scratch memory, the matrix unit, and whether the plain loops are forced.
// Ops on one Ctx run one after another, so they share one scratch buffer; nothing in it outlives an op.
#pragma once
#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../base/types.h"
#include "threads.h"

// Fast paths in addition to the plain loops. The fp64 build has none, and neither does code compiled by nvcc, which lacks
// vector types: there the CPU's ops only serve as reference for a GPU's.
#if defined(PRECISION_FP64) || defined(__CUDACC__)
#define CPU_FAST_PATHS 0
#else
#define CPU_FAST_PATHS 1
#include "matrix_unit.h"
#endif

namespace cpu {

constexpr const char* backend_name = "cpu";
constexpr bool memory_is_host = true;  // the CPU can access the memory of ops
constexpr int count_devices() { return 1; }
constexpr bool sets_bf16_gradients = false;  // matrix products can set weight gradients in bf16

struct Ctx {
    int threads;                   // number of threads of an op
    bool plain = !CPU_FAST_PATHS;  // true: only the plain loops (the specification); false: fast paths where they exist
    int steady_rows = 0;           // up to this many rows, a row of a product has the same bits regardless of their number
    bool autotune = true;          // for GPUs (gpu/ctx.cuh)
#if CPU_FAST_PATHS
    // The matrix unit for each kind of product, and its measured speed in FLOP/s per thread (unit_choice.h), if any.
    AnyUnit layers = default_unit<floatX>(Products::layers), attention = default_unit<floatX>(Products::attention);
    double layers_rate = 0, attention_rate = 0;
    std::vector<floatX> copies[3];  // zero-padded copies of operands that cannot be read in place
#endif

    // `device` applies to GPUs; there is only one CPU.
    explicit Ctx(int n_threads = 0, int /*device*/ = 0, bool /*may_lack_device*/ = false)
        : threads(n_threads > 0 ? n_threads : default_threads()) {
        op_threads() = threads;
        omp_set_num_threads(threads);
    }
    ~Ctx() { free(scratch_); }
    Ctx(const Ctx&) = delete;
    Ctx& operator=(const Ctx&) = delete;

    // At least `bytes` of memory, aligned to a page, or to a huge page if large enough; contents undefined, valid until the
    // next call. Grows, never shrinks.
    void* scratch(size_t bytes) {
        if (bytes > scratch_bytes_) {
            constexpr size_t huge_page = 2 << 20;  // holds packed operands, whose rows would each occupy a page
            const size_t page = bytes < huge_page ? 4096 : huge_page;
            free(scratch_);
            scratch_bytes_ = round_up(bytes, page);
            scratch_ = aligned_alloc(page, scratch_bytes_);
            if (!scratch_) throw std::bad_alloc();
            madvise(scratch_, scratch_bytes_, MADV_HUGEPAGE);  // a hint
        }
        return scratch_;
    }
    size_t scratch_bytes() const { return scratch_bytes_; }

    bool has_device() const { return true; }

    // The text for the start-up table.
    std::string description() const {
        const std::string n = format("%d thread%s, ", threads, threads == 1 ? "" : "s");
#if CPU_FAST_PATHS
        if (!plain) return n + described(layers, layers_rate) + "; attention " + described(attention, attention_rate);
#endif
        return n + "plain loops";
    }

private:
#if CPU_FAST_PATHS
    static std::string described(AnyUnit unit, double rate) {
        const bool by_parts = sizeof(floatX) == 4 && std::holds_alternative<const MatrixUnit<bf16>*>(unit);
        return name_of(unit) + std::string(by_parts ? " by parts of bf16" : "") +
               (rate > 0 ? format(" at %.3g GFLOP/s a thread", rate / 1e9) : "");
    }
#endif
    void* scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
};

}  // namespace cpu
