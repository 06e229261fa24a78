// Copies between page-locked host memory and the device that overlap with the ops on ctx, and with each other in the two
// directions (ops.inl): a stream uploads, another one downloads, and events order them with ctx.stream.
//
// Page-locked memory has the same address on the device, so that kernels can also read and write it directly, at the rate of
// the link. It is registered rather than allocated by the driver: its pages are touched by all threads, and are huge ones.
#pragma once
#include "memory.cuh"

namespace gpu {

inline void lock_memory(void* memory, size_t bytes) {
    int device = 0;
    cudaDeviceProp p;
    CUDA(cudaGetDevice(&device));
    CUDA(cudaGetDeviceProperties(&p, device));
    if (!p.canUseHostPointerForRegisteredMem)
        fail("this GPU cannot access page-locked memory at host addresses; HINT: omit --offload");
    cpu::clear_in_parallel(memory, bytes);
    if (cudaHostRegister(memory, bytes, cudaHostRegisterDefault) != cudaSuccess) {
        (void)cudaGetLastError();
        fail(
            "could not page-lock %.2f GiB of memory; HINT: other programs may have locked it, or the container has a lower "
            "limit",
            (double)bytes / 1073741824.0);
    }
}
inline void unlock_memory(void* memory) {
    cudaDeviceSynchronize();  // copies may be in flight
    cudaHostUnregister(memory);
}

class HostLink {
public:
    // One for the upload, one for ops, one for the download.
    static constexpr int n_slots = 3;

    HostLink() = default;
    HostLink(const HostLink&) = delete;
    HostLink& operator=(const HostLink&) = delete;
    ~HostLink() {
        if (!up_) return;
        for (const cudaStream_t stream : {up_, down_}) {
            cudaStreamSynchronize(stream);
            cudaStreamDestroy(stream);
        }
        cudaEventDestroy(mark_);
        for (const Slot& slot : slots_)
            for (const cudaEvent_t event : {slot.uploaded, slot.downloaded}) cudaEventDestroy(event);
    }

    // All copies up to end() start after the ops that are now on ctx.
    void begin(Ctx& ctx) {
        if (!up_) create();
        order(up_, ctx.stream, mark_);
    }
    // Uploads to a slot, after the last download from it; later ops on ctx see them.
    void begin_upload(int slot) { CUDA(cudaStreamWaitEvent(up_, slots_[slot].downloaded, 0)); }
    void upload(void* to, const void* from_host, size_t bytes) {
        CUDA(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, up_));
    }
    void end_upload(Ctx& ctx, int slot) { order(ctx.stream, up_, slots_[slot].uploaded); }
    // Downloads from a slot, after the ops that are on ctx.
    void begin_download(Ctx& ctx) { order(down_, ctx.stream, mark_); }
    void download(void* to_host, const void* from, size_t bytes) {
        CUDA(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, down_));
    }
    void end_download(int slot) { CUDA(cudaEventRecord(slots_[slot].downloaded, down_)); }
    // Later ops on ctx come after all downloads.
    void end(Ctx& ctx) { order(ctx.stream, down_, mark_); }

private:
    struct Slot {
        cudaEvent_t uploaded = nullptr, downloaded = nullptr;
    };

    void create() {
        for (cudaStream_t* stream : {&up_, &down_}) CUDA(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&mark_, cudaEventDisableTiming));
        for (Slot& slot : slots_)
            for (cudaEvent_t* event : {&slot.uploaded, &slot.downloaded})
                CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
    // Makes later work on `later` wait for the work that is now on `earlier`.
    static void order(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
        CUDA(cudaEventRecord(event, earlier));
        CUDA(cudaStreamWaitEvent(later, event, 0));
    }

    cudaStream_t up_ = nullptr, down_ = nullptr;
    cudaEvent_t mark_ = nullptr;  // recorded and waited for at once
    Slot slots_[n_slots];
};

}  // namespace gpu
