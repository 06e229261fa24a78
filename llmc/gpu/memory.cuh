// Device memory, and copies between it and the host's.
//
// An asynchronous copy needs page-locked memory on the host's side. upload() therefore goes through a ring of page-locked
// slots: it copies into the next slot, starts the transfer, and returns while that runs; it waits only for a slot that is still
// on its way from the time before. So the next micro-batch is on the device before the kernels that read it are reached.
// download() of more than a slot goes through the same ring: while all threads of the host copy one slot to where it belongs,
// the next ones are on their way. The driver's own way to pageable memory takes one thread, copying and transferring in turn.
#pragma once
#include <deque>

#include "../cpu/memory.h"
#include "../ops.h"
#include "launch.cuh"

namespace gpu {

inline size_t available_memory() {
    size_t available = 0, total = 0;
    CUDA(cudaMemGetInfo(&available, &total));
    return available;
}

// A sixteenth of the memory, whole tiles of products: every further chunk reads and writes the head's fp32 gradient once more.
inline size_t logits_rows(const Ctx& ctx, size_t row_bytes) {
    return std::max<size_t>(1024, ctx.memory_bytes / 16 / row_bytes / 128 * 128);
}

inline void* allocate_memory(size_t bytes) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        (void)cudaGetLastError();  // or it would be found again after the next launch
        fail("the GPU refused %.2f GiB of memory, %.2f GiB are free; HINT: other programs may use it (nvidia-smi)",
             (double)bytes / 1073741824.0, (double)available_memory() / 1073741824.0);
    }
    CUDA(cudaMemset(memory, 0, bytes));
    CUDA(cudaDeviceSynchronize());  // the memset is on the legacy stream, which no stream of ours waits for
    return memory;
}
inline void release_memory(void* memory, size_t) { cudaFree(memory); }

inline void upload(Ctx& ctx, void* to, const void* from_host, size_t bytes) {
    for (size_t done = 0; done < bytes; done += Staging::slot_bytes) {
        const size_t part = std::min(Staging::slot_bytes, bytes - done);
        Staging::Slot& slot = ctx.staging.next();
        cpu::copy_in_parallel(slot.memory, (const char*)from_host + done, part);
        CUDA(cudaMemcpyAsync((char*)to + done, slot.memory, part, cudaMemcpyHostToDevice, ctx.stream));
        CUDA(cudaEventRecord(slot.sent, ctx.stream));
    }
}

inline void download(Ctx& ctx, void* to_host, const void* from, size_t bytes) {
    if (bytes <= Staging::slot_bytes) {
        CUDA(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, ctx.stream));
        CUDA(cudaStreamSynchronize(ctx.stream));
        return;
    }
    struct Piece {
        char* to;
        size_t bytes;
        Staging::Slot* slot;
    };
    std::deque<Piece> under_way;
    for (size_t started = 0; started < bytes || !under_way.empty();) {
        if (under_way.size() == Staging::n_slots || started == bytes) {
            const Piece& piece = under_way.front();
            CUDA(cudaEventSynchronize(piece.slot->sent));
            cpu::copy_in_parallel(piece.to, piece.slot->memory, piece.bytes);
            under_way.pop_front();
        } else {
            const Piece piece = {(char*)to_host + started, std::min(Staging::slot_bytes, bytes - started), &ctx.staging.next()};
            CUDA(cudaMemcpyAsync(piece.slot->memory, (const char*)from + started, piece.bytes, cudaMemcpyDeviceToHost,
                                 ctx.stream));
            CUDA(cudaEventRecord(piece.slot->sent, ctx.stream));
            under_way.push_back(piece), started += piece.bytes;
        }
    }
}

inline void clear(Ctx& ctx, void* memory, size_t bytes) { CUDA(cudaMemsetAsync(memory, 0, bytes, ctx.stream)); }

inline void copy_rows(Ctx& ctx, void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes,
                      size_t rows) {
    if (to_stride == row_bytes && from_stride == row_bytes)  // on an H100 15% faster than in two dimensions
        CUDA(cudaMemcpyAsync(to, from, row_bytes * rows, cudaMemcpyDeviceToDevice, ctx.stream));
    else CUDA(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, rows, cudaMemcpyDeviceToDevice, ctx.stream));
}

}  // namespace gpu
