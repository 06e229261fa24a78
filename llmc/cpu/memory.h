// The memory of ops. Pages are zero-filled on first touch, and huge where the system supports that.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>

#include "../ops.h"
#include "cgroup.h"
#include "parallel.h"

namespace cpu {

// Bytes that this process can still allocate: the machine's available memory, or the rest of its control groups' limits if that
// is less (cgroup.h).
inline size_t available_memory() {
    size_t available = SIZE_MAX;
    if (FILE* f = fopen("/proc/meminfo", "r")) {
        char line[256];
        size_t kib;
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) available = kib * 1024;
        fclose(f);
    }
    return std::min(available, cgroup_limits().memory_left);
}

// GPU memory that plans must leave free: scratch memory of ops, NCCL's buffers, and lazily loaded code.
inline size_t reserve_on_gpu(size_t bytes) { return std::min((size_t)512 << 20, bytes / 64); }

// Rows of logits at a time on a GPU with this much memory: a sixteenth of it, in whole tiles of products, as every further
// chunk reads and writes the head's gradient again. At most INT_MAX logits, which an H200 would exceed with GPT-2's
// vocabulary: 32-bit offsets have failed there in other libraries, and no product this large has been tried.
inline size_t logits_rows_on_gpu(size_t memory, size_t row_bytes) {
    const size_t bytes = std::min(memory / 16, (size_t)INT_MAX * sizeof(floatX));
    return std::max<size_t>(1024, bytes / row_bytes / 128 * 128);
}

inline size_t logits_rows(const Ctx&, size_t) { return 1024; }  // more would not fit in the caches, fewer make products slow

inline void* allocate_memory(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        fail("cannot allocate %.2f GiB of memory (mmap); HINT: see ulimit -v and the container's limits",
             (double)bytes / 1073741824.0);
    madvise(memory, bytes, MADV_HUGEPAGE);  // fewer TLB misses; a hint, may be ignored
    return memory;
}
inline void release_memory(void* memory, size_t bytes) { munmap(memory, bytes); }

inline void copy_in_parallel(void* to, const void* from, size_t bytes) {
    constexpr size_t range = 1 << 18;
    parallel_ranges(
        bytes, [=](size_t i, size_t end) { memcpy((char*)to + i, (const char*)from + i, end - i); }, range);
}

inline void upload(Ctx&, void* to, const void* from_host, size_t bytes) { copy_in_parallel(to, from_host, bytes); }
inline void download(Ctx&, void* to_host, const void* from, size_t bytes) { copy_in_parallel(to_host, from, bytes); }

inline void clear_in_parallel(void* memory, size_t bytes) {
    constexpr size_t range = 1 << 18;
    parallel_ranges(
        bytes, [=](size_t i, size_t end) { memset((char*)memory + i, 0, end - i); }, range);
}
inline void clear(Ctx&, void* memory, size_t bytes) { clear_in_parallel(memory, bytes); }

inline void copy_rows(Ctx&, void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes, size_t rows) {
    for (size_t i = 0; i < rows; i++) memcpy((char*)to + i * to_stride, (const char*)from + i * from_stride, row_bytes);
}

// On CPUs the host's memory is the backend's.
inline void lock_memory(void* memory, size_t bytes) { clear_in_parallel(memory, bytes); }
inline void unlock_memory(void*) {}

// Copies immediately. Ops are also complete when they return, so there is nothing to wait for.
class HostLink {
public:
    static constexpr int n_slots = 3;

    void begin(Ctx&) {}
    void begin_upload(int) {}
    void upload(void* to, const void* from_host, size_t bytes) { copy_in_parallel(to, from_host, bytes); }
    void end_upload(Ctx&, int) {}
    void begin_download(Ctx&) {}
    void download(void* to_host, const void* from, size_t bytes) { copy_in_parallel(to_host, from, bytes); }
    void end_download(int) {}
    void end(Ctx&) {}
};

}  // namespace cpu
