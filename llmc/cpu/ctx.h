// cpu::Ctx: the only thing a CPU op may reach for. Threads, scratch memory, oneDNN's engine and its compiled matrix products,
// and whether the plain loops are forced. Ops on one Ctx run one after another, so they share one scratch buffer; nothing in it
// outlives an op.
#pragma once
#include <omp.h>

#include <array>
#include <cstdlib>
#include <map>
#include <new>
#include <string>
#include <vector>

// Matrix products come from oneDNN where it is installed, unless our own are faster; without it, plain loops do those that do
// not fit our own, right but slowly.
#if !defined(HAVE_ONEDNN)
#if __has_include(<oneapi/dnnl/dnnl.hpp>)
#define HAVE_ONEDNN 1
#else
#define HAVE_ONEDNN 0
#endif
#endif
#if HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#endif

#include "../check.h"
#include "../types.h"
#include "matrix_unit.h"

namespace cpu {

constexpr const char* backend_name = "cpu";
constexpr bool memory_is_host = true;  // what ops work on can be read and written by the CPU

struct Ctx {
    int threads;         // OpenMP threads that ops use
    bool plain = false;  // true: only the plain loops (the specification, no library); false: fast paths where they exist

    const MatrixUnit* unit = matrix_units().front();  // for bf16
#if HAVE_ONEDNN  // see matmul.h. The key holds everything that a compiled product depends on.
    using GemmKey = std::array<int64_t, 8>;
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
    std::map<GemmKey, dnnl::matmul> gemms;
#endif

    std::vector<floatX> decoded[2];  // factors and sums of products of 8-bit numbers, see fp8_linear.h
    std::vector<real> sums;

    // The device is a GPU's; there is but one CPU.
    explicit Ctx(int n_threads = 0, int /*device*/ = 0) : threads(n_threads > 0 ? n_threads : omp_get_max_threads()) {
        omp_set_num_threads(threads);
    }
    ~Ctx() { free(scratch_); }
    Ctx(const Ctx&) = delete;
    Ctx& operator=(const Ctx&) = delete;

    // At least `bytes` of page-aligned memory, contents undefined, valid until the next call. Grows, never shrinks.
    void* scratch(size_t bytes) {
        if (bytes > scratch_bytes_) {
            free(scratch_);
            scratch_bytes_ = (bytes + 4095) / 4096 * 4096;
            scratch_ = aligned_alloc(4096, scratch_bytes_);
            if (!scratch_) throw std::bad_alloc();
        }
        return scratch_;
    }

    // For the start-up table.
    std::string description() const {
        return format("%d thread%s, %s%s", threads, threads == 1 ? "" : "s", isa_name().c_str(), plain ? ", plain loops" : "");
    }
    std::string isa_name() const {
#if HAVE_ONEDNN
        switch (dnnl::get_effective_cpu_isa()) {
            case dnnl::cpu_isa::avx512_core_amx:
                return "AMX (AVX-512)";
            case dnnl::cpu_isa::avx512_core_bf16:
                return "AVX-512 with bf16";
            case dnnl::cpu_isa::avx512_core_vnni:
            case dnnl::cpu_isa::avx512_core:
                return "AVX-512";
            case dnnl::cpu_isa::avx2_vnni:
            case dnnl::cpu_isa::avx2:
                return "AVX2";
            case dnnl::cpu_isa::avx:
                return "AVX";
            case dnnl::cpu_isa::sse41:
                return "SSE4.1";
            default:
                return "generic";
        }
#else
        return std::string(unit ? unit->name : "no matrix unit") + ", without oneDNN";
#endif
    }

private:
    void* scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
};

}  // namespace cpu
