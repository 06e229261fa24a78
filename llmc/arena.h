// Named regions in one allocation. A region is planned with add(), the whole is allocated at once, and the memory table of
// --dry-run is printed from the same plan, so the two cannot disagree.
#pragma once
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

// Bytes of memory that this process could still get: the machine's available memory, or what its cgroup leaves if that is less.
inline size_t available_memory_bytes() {
    size_t available = SIZE_MAX;
    if (FILE* f = fopen("/proc/meminfo", "r")) {
        char line[256];
        size_t kib;
        while (fgets(line, sizeof line, f))
            if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) available = kib * 1024;
        fclose(f);
    }
    const auto number_in = [](const char* path) {
        size_t value = SIZE_MAX;
        if (FILE* f = fopen(path, "r")) {
            if (fscanf(f, "%zu", &value) != 1) value = SIZE_MAX;  // "max": no limit
            fclose(f);
        }
        return value;
    };
    const size_t limit = number_in("/sys/fs/cgroup/memory.max"), used = number_in("/sys/fs/cgroup/memory.current");
    if (limit != SIZE_MAX && used != SIZE_MAX) available = std::min(available, limit > used ? limit - used : 0);
    return available;
}

// The most physical memory that this process has held so far.
inline size_t peak_memory_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

// The physical memory that this process holds now.
inline size_t resident_memory_bytes() {
    size_t pages = 0;
    if (FILE* f = fopen("/proc/self/statm", "r")) {
        if (fscanf(f, "%*u %zu", &pages) != 1) pages = 0;
        fclose(f);
    }
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        if (!memory_) return;
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(memory_, total_);
#endif
        munmap(memory_, total_);
    }

    // Plans `count` elements of E; allocate() sets *slot. Regions start at multiples of 4096 bytes; with AddressSanitizer what
    // lies between the end of one and the start of the next may not be touched.
    template <class E>
    void add(const char* purpose, E** slot, size_t count) {
        CHECK(!memory_, "add after allocate");
        regions_.push_back({slot, total_, count * sizeof(E)});
        const size_t bytes = (count * sizeof(E) + guard_bytes + 4095) / 4096 * 4096;
        total_ += bytes;
        for (auto& [name, sum] : purposes_)
            if (name == purpose) {
                sum += bytes;
                return;
            }
        purposes_.push_back({purpose, bytes});
    }

    size_t bytes() const { return total_; }
    const std::vector<std::pair<std::string, size_t>>& purposes() const { return purposes_; }

    // Gets the memory, zero-filled, and points every slot at its region. fail()s if the machine has not enough.
    void allocate() {
        const size_t available = available_memory_bytes();
        if (total_ > available) {
            std::string table;
            for (const auto& [name, bytes] : purposes_)
                table += format("  %-28s %9.2f GiB\n", name.c_str(), bytes / 1073741824.0);
            fail(
                "this run needs %.2f GiB of memory, %.2f GiB are available:\n%s"
                "HINT: a smaller --micro-batch-size or --seq-length, --recompute full, --save-in-foreground or a smaller "
                "model need less",
                total_ / 1073741824.0, available / 1073741824.0, table.c_str());
        }
        memory_ = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory_ == MAP_FAILED) {
            memory_ = nullptr;
            fail("the system refused %.2f GiB of memory (mmap); HINT: see ulimit -v and the container's limits",
                 total_ / 1073741824.0);
        }
        madvise(memory_, total_, MADV_HUGEPAGE);  // fewer TLB misses; a hint, may be ignored
        for (const Region& r : regions_) {
            void* start = (char*)memory_ + r.offset;
            memcpy(r.slot, &start, sizeof start);  // *slot is some E*, all of one representation
#if defined(__SANITIZE_ADDRESS__)
            const size_t end = &r == &regions_.back() ? total_ : (&r)[1].offset;
            ASAN_POISON_MEMORY_REGION((char*)start + r.bytes, end - r.offset - r.bytes);
#endif
        }
    }

private:
#if defined(__SANITIZE_ADDRESS__)
    static constexpr size_t guard_bytes = 64;
#else
    static constexpr size_t guard_bytes = 0;
#endif
    struct Region {
        void* slot;
        size_t offset, bytes;
    };
    std::vector<Region> regions_;
    std::vector<std::pair<std::string, size_t>> purposes_;
    size_t total_ = 0;
    void* memory_ = nullptr;
};
