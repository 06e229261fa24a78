// Device memory, and copies between device and host.
//
// An asynchronous copy needs page-locked host memory. So upload() uses a ring of page-locked slots: it copies into the next
// slot, starts the transfer, and returns while it runs; it waits only for a slot whose previous transfer is still running. So
// the next micro-batch is on the device before the kernels that read it start. A download() larger than a slot uses the same
// ring: while all host threads copy one slot to its destination, the next ones are transferred. The driver's own path for
// pageable memory uses one thread and alternates copying and transferring.
#pragma once
#include <algorithm>
#include <climits>
#include <deque>

#include "../cpu/memory.h"
#include "../ops.h"
#include "launch.cuh"

namespace gpu {

inline size_t free_memory() {
    size_t available = 0, total = 0;
    CUDA(cudaMemGetInfo(&available, &total));
    return available;
}
inline size_t available_memory() {
    const size_t available = free_memory();
    return available - cpu::reserve_on_gpu(available);
}

inline size_t logits_rows(const Ctx& ctx, size_t row_bytes) { return cpu::logits_rows_on_gpu(ctx.memory_bytes, row_bytes); }

inline void* allocate_memory(size_t bytes) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        (void)cudaGetLastError();  // clears it, or the next launch would report it
        fail("cannot allocate %.2f GiB of GPU memory, %.2f GiB are free; HINT: other programs may be using it (nvidia-smi)",
             (double)bytes / 1073741824.0, (double)free_memory() / 1073741824.0);
    }
    CUDA(cudaMemset(memory, 0, bytes));
    CUDA(cudaDeviceSynchronize());  // the memset is on the legacy stream, with which our streams do not synchronize
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
    struct StagedCopy {
        char* to;
        size_t bytes;
        Staging::Slot* slot;
    };
    std::deque<StagedCopy> under_way;
    for (size_t started = 0; started < bytes || !under_way.empty();) {
        if (under_way.size() == Staging::n_slots || started == bytes) {
            const StagedCopy& piece = under_way.front();
            CUDA(cudaEventSynchronize(piece.slot->sent));
            cpu::copy_in_parallel(piece.to, piece.slot->memory, piece.bytes);
            under_way.pop_front();
        } else {
            const StagedCopy piece = {(char*)to_host + started, std::min(Staging::slot_bytes, bytes - started),
                                      &ctx.staging.next()};
            CUDA(cudaMemcpyAsync(piece.slot->memory, (const char*)from + started, piece.bytes, cudaMemcpyDeviceToHost,
                                 ctx.stream));
            CUDA(cudaEventRecord(piece.slot->sent, ctx.stream));
            under_way.push_back(piece);
            started += piece.bytes;
        }
    }
}

inline void clear(Ctx& ctx, void* memory, size_t bytes) { CUDA(cudaMemsetAsync(memory, 0, bytes, ctx.stream)); }

inline void copy_rows(Ctx& ctx, void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes,
                      size_t rows) {
    const auto copy = [&](char* dst, const char* src, size_t bytes) {
        CUDA(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, ctx.stream));
    };
    if (to_stride == row_bytes && from_stride == row_bytes)  // 15% faster than a 2-D copy on an H100
        copy((char*)to, (const char*)from, row_bytes * rows);
    else if (std::max(to_stride, from_stride) > INT_MAX)  // above cudaDevAttrMaxPitch: rows of long sequences
        for (size_t i = 0; i < rows; i++) copy((char*)to + i * to_stride, (const char*)from + i * from_stride, row_bytes);
    else CUDA(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, rows, cudaMemcpyDeviceToDevice, ctx.stream));
}

}  // namespace gpu
