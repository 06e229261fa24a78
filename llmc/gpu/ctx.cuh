// gpu::Ctx: all state that a GPU op may use: stream, device limits, cuBLASLt with its workspace and plans, scratch memory. All
// ops of one Ctx run in order on its stream, so they share one scratch buffer; nothing in it outlives an op.
#pragma once
#include <cublasLt.h>
#include <omp.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "../base/types.h"
#include "../cpu/threads.h"
#include "launch.cuh"

namespace gpu {

#ifdef BACKEND_EMU
constexpr const char* backend_name = "emu";
#else
constexpr const char* backend_name = "cuda";
#endif
constexpr bool memory_is_host = false;                  // also on the emulator, so that copies are tested
constexpr bool sets_bf16_gradients = has_lower_halves;  // cuBLASLt does not round products of fp32 to bf16

#define CUBLAS(call)                                                                                          \
    do {                                                                                                      \
        const cublasStatus_t cublas_status_ = (call);                                                         \
        if (cublas_status_ != CUBLAS_STATUS_SUCCESS)                                                          \
            fail("%s failed: %s at %s:%d", #call, cublasLtGetStatusName(cublas_status_), __FILE__, __LINE__); \
    } while (0)

// Streams that share a connection to the GPU wait for each other's work, so that a send may wait for a receive behind it. CUDA
// has 8 connections unless told otherwise, but NCCL alone has two streams for each communicator. Set before main(): MPI may
// start CUDA.
inline const bool has_connections = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) == 0;

// The number of GPUs that this process sees; if 0, also the reason. Never fails.
inline int count_devices(std::string& why_none) {
    int n = 0;
    const cudaError_t error = cudaGetDeviceCount(&n);
    if (error == cudaSuccess && n > 0) return n;
    (void)cudaGetLastError();
    why_none = error == cudaSuccess ? "no CUDA device" : cudaGetErrorString(error);
    return 0;
}
inline int count_devices() {
    std::string why_none;
    return count_devices(why_none);
}

struct GemmPlans;  // matmul.cuh
namespace hopper {
class TensorMaps;  // hopper.cuh
}

// Page-locked memory for uploads and large downloads, see memory.cuh.
class Staging {
public:
    static constexpr size_t slot_bytes = 1 << 20;
    static constexpr int n_slots = 16;  // more than a micro-batch uploads, so that the host need not wait for the previous one
    struct Slot {
        void* memory = nullptr;
        cudaEvent_t sent = nullptr;
    };
    Staging() = default;
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;
    ~Staging() {
        for (Slot& slot : slots_) {
            if (slot.memory) cudaFreeHost(slot.memory);
            if (slot.sent) cudaEventDestroy(slot.sent);
        }
    }
    // The least recently used slot; waits until its last transfer is complete.
    Slot& next() {
        Slot& slot = slots_[turn_++ % n_slots];
        if (!slot.memory) {
            CUDA(cudaMallocHost(&slot.memory, slot_bytes));
            CUDA(cudaEventCreateWithFlags(&slot.sent, cudaEventDisableTiming));
        } else {
            CUDA(cudaEventSynchronize(slot.sent));
        }
        return slot;
    }

private:
    Slot slots_[n_slots];
    unsigned turn_ = 0;
};

struct Ctx {
    int threads;  // OpenMP threads for work on the host
    int device;
    cudaStream_t stream = nullptr;
    int capability = 0;  // 80, 90, ...
    int multiprocessors = 0;
    size_t shared_bytes = 0;  // maximum shared memory of a block
    size_t memory_bytes = 0;
    std::string name;
    bool plain = false;    // true: attention's simple kernel instead of the tensor-core ones
    int steady_rows = 0;   // for CPUs (cpu/ctx.h)
    bool autotune = true;  // false: do not time new products, even after use_gemm_cache(); their shapes rarely recur

    cublasLtHandle_t cublas = nullptr;
    static constexpr size_t workspace_bytes = 32 << 20;
    void* workspace = nullptr;
    static constexpr size_t counter_bytes = 256;
    void* counters = nullptr;  // zero between kernels: counters shared by the blocks of a persistent kernel
    std::shared_ptr<GemmPlans> plans;
    std::shared_ptr<hopper::TensorMaps> tensor_maps;
    Staging staging;

    // may_lack_device: without a GPU, makes a Ctx for planning only, on which no op may be called (machine.h: plan_for).
    explicit Ctx(int n_threads = 0, int device_number = 0, bool may_lack_device = false)
        : threads(n_threads > 0 ? n_threads : cpu::default_threads()), device(device_number) {
        cpu::op_threads() = threads;
        omp_set_num_threads(threads);
        std::string why_none;
        const int n_devices = count_devices(why_none);
        if (n_devices == 0 && may_lack_device) return;
        if (n_devices == 0)
            fail("no GPU: %s; HINT: make BACKEND=cpu builds the program for the CPU; nvidia-smi shows the driver's state",
                 why_none.c_str());
        if (n_devices == 1) device = 0;  // each rank sees only its own (srun --gpus-per-task=1)
        if (device >= n_devices) fail("GPU %d was requested, but there are %d (0 .. %d)", device, n_devices, n_devices - 1);
        CUDA(cudaSetDevice(device));
        cudaDeviceProp p;
        CUDA(cudaGetDeviceProperties(&p, device));
        capability = p.major * 10 + p.minor;
        multiprocessors = p.multiProcessorCount;
        name = p.name;
        shared_bytes = p.sharedMemPerBlockOptin;
        memory_bytes = p.totalGlobalMem;
        if (capability < 80)
            fail("GPU %d (%s) has compute capability %d.%d; 8.0 or later is needed (A100, RTX 30, H100, ...)", device, p.name,
                 p.major, p.minor);
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUBLAS(cublasLtCreate(&cublas));
        CUDA(cudaMalloc(&workspace, workspace_bytes));
        CUDA(cudaMalloc(&counters, counter_bytes));
        CUDA(cudaMemsetAsync(counters, 0, counter_bytes, stream));
    }
    ~Ctx() {
        if (!has_device()) return;
        cudaStreamSynchronize(stream);  // kernels and copies may still use the memory freed below
        plans.reset();
        cudaFree(scratch_);
        cudaFree(workspace);
        cudaFree(counters);
        if (cublas) cublasLtDestroy(cublas);
        if (stream) cudaStreamDestroy(stream);
    }
    Ctx(const Ctx&) = delete;
    Ctx& operator=(const Ctx&) = delete;

    bool has_device() const { return stream != nullptr; }

    // The text for the start-up table.
    std::string description() const {
        if (!has_device()) return name;
        return format("%s (sm_%d, %d multiprocessors), %d host threads", name.c_str(), capability, multiprocessors, threads);
    }

    // At least `bytes` of device memory, aligned to 256, contents undefined, valid until the next call. Grows, never shrinks;
    // growing waits for the device, which happens only in a run's first step.
    void* scratch(size_t bytes) {
        if (bytes > scratch_bytes_) {
            CUDA(cudaStreamSynchronize(stream));
            CUDA(cudaFree(scratch_));
            scratch_ = nullptr;
            scratch_bytes_ = 0;
            if (cudaMalloc(&scratch_, bytes) != cudaSuccess) {
                (void)cudaGetLastError();
                fail("the GPU has less than %.2f GiB free for scratch memory; HINT: a smaller --micro-batch-size needs less",
                     (double)bytes / 1073741824.0);
            }
            scratch_bytes_ = bytes;
        }
        return scratch_;
    }
    size_t scratch_bytes() const { return scratch_bytes_; }

private:
    void* scratch_ = nullptr;
    size_t scratch_bytes_ = 0;
};

}  // namespace gpu
