// Named regions in one allocation of the backend's memory and, if host memory is separate, in two allocations of host memory,
// one of them page-locked. add() plans a region, and all are allocated at once; the memory table of --dry-run is printed from
// the same plan, so the two cannot disagree.
#pragma once
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../ops.h"

class Arena {
public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        for (Pool* place : {&backend_, &host_, &locked_}) {
            if (!place->memory) continue;
#if defined(__SANITIZE_ADDRESS__)
            ASAN_UNPOISON_MEMORY_REGION(place->memory, place->bytes);
#endif
            if (place == &locked_) be::unlock_memory(place->memory);
            if (place == &backend_) be::release_memory(place->memory, place->bytes);
            else cpu::release_memory(place->memory, place->bytes);
        }
    }

    // Plans `count` elements of E in the backend's memory; allocate() sets *slot. Regions start at multiples of 4096 bytes;
    // with AddressSanitizer, the gaps between them must not be touched.
    template <class E>
    void add(const char* purpose, E** slot, size_t count) {
        add(backend_, purpose, slot, count * sizeof(E));
    }
    void add(const char* purpose, Elements* moment, size_t count) {
        add(backend_, purpose, &moment->data, count * moment->element_bytes());
    }
    // Plans a region in host memory.
    template <class E>
    void add_on_host(const char* purpose, E** slot, size_t count) {
        add_on_host_bytes(host_, purpose, slot, count * sizeof(E));
    }
    void add_on_host(const char* purpose, Elements* moment, size_t count) {
        add_on_host_bytes(host_, purpose, &moment->data, count * moment->element_bytes());
    }
    // Plans a region in page-locked host memory, which ops can use, too.
    template <class E>
    void add_locked(const char* purpose, E** slot, size_t count) {
        add_on_host_bytes(locked_, purpose, slot, count * sizeof(E));
    }
    void add_locked(const char* purpose, Elements* moment, size_t count) {
        add_on_host_bytes(locked_, purpose, &moment->data, count * moment->element_bytes());
    }

    // Counts memory that is allocated elsewhere, by the backend.
    void count(const char* purpose, size_t bytes) {
        if (bytes) purposes_.emplace_back(purpose, bytes);
        counted_ += bytes;
    }

    size_t bytes() const { return backend_.bytes + counted_; }
    size_t bytes_on_host() const { return be::memory_is_host ? bytes() : host_.bytes + locked_.bytes; }
    // Bytes of the regions that are in host memory in a GPU build; the same value on CPUs.
    size_t bytes_for_host() const { return for_host_; }
    const std::vector<std::pair<std::string, size_t>>& purposes() const { return purposes_; }

    // Fails where allocate() would.
    void check(size_t on_host, const char* advice) const {
        if (!be::memory_is_host) check_available(bytes(), be::available_memory(), "GPU memory", advice);
        check_available(bytes_on_host(), on_host, "memory", advice);
    }
    // Allocates the memory, zero-filled, and points every slot at its region. If memory does not suffice, fails with advice on
    // reducing it; on_host: available host memory.
    void allocate(size_t on_host = cpu::available_memory(), const char* advice = "a smaller model") {
        check(on_host, advice);
        if (backend_.bytes) backend_.memory = be::allocate_memory(backend_.bytes);
        for (Pool* place : {&host_, &locked_})
            if (place->bytes) place->memory = cpu::allocate_memory(place->bytes);
        if (locked_.bytes) be::lock_memory(locked_.memory, locked_.bytes);
        for (const Pool* place : {&backend_, &host_, &locked_}) point_slots(*place);
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
    struct Pool {
        std::vector<Region> regions;
        size_t bytes = 0;
        void* memory = nullptr;
    };

    void add_on_host_bytes(Pool& place, const char* purpose, void* slot, size_t bytes) {
        const size_t before = place.bytes + backend_.bytes;
        if (be::memory_is_host) add(backend_, purpose, slot, bytes);
        else add(place, std::string(purpose) + " (host)", slot, bytes);
        for_host_ += place.bytes + backend_.bytes - before;
    }
    void add(Pool& place, std::string_view purpose, void* slot, size_t bytes) {
        CHECK(!place.memory, "add after allocate");
        place.regions.push_back({slot, place.bytes, bytes});
        bytes = round_up(bytes + guard_bytes, 4096);
        place.bytes += bytes;
        const auto same = [&](const auto& known) { return known.first == purpose; };
        if (last_ >= purposes_.size() || !same(purposes_[last_]))  // regions of one purpose are mostly adjacent
            last_ = (size_t)(std::find_if(purposes_.begin(), purposes_.end(), same) - purposes_.begin());
        if (last_ == purposes_.size()) purposes_.emplace_back(purpose, 0);
        purposes_[last_].second += bytes;
    }

    void check_available(size_t wanted, size_t available, const char* what, const char* advice) const {
        if (wanted <= available) return;
        std::string table;
        for (const auto& [name, bytes] : purposes_) table += format("  %-28s %9.2f GiB\n", name.c_str(), bytes / 1073741824.0);
        fail("this run needs %.2f GiB of %s, but %.2f GiB are available:\n%sHINT: to reduce it, use %s", wanted / 1073741824.0,
             what, available / 1073741824.0, table.c_str(), advice);
    }

    static void point_slots(const Pool& place) {
        for (const Region& r : place.regions) {
            void* start = (char*)place.memory + r.offset;
            memcpy(r.slot, &start, sizeof start);  // *slot is an E*; all pointers have one representation
#if defined(__SANITIZE_ADDRESS__)
            const size_t end = &r == &place.regions.back() ? place.bytes : (&r)[1].offset;
            ASAN_POISON_MEMORY_REGION((char*)start + r.bytes, end - r.offset - r.bytes);
#endif
        }
    }

    Pool backend_, host_, locked_;
    size_t for_host_ = 0, counted_ = 0;
    std::vector<std::pair<std::string, size_t>> purposes_;
    size_t last_ = 0;  // the purpose of the newest region
};

// Waits for all ops on ctx.
inline void wait_for_device(be::Ctx& ctx) {
    char byte;
    static void* const memory = be::allocate_memory(1);
    be::download(ctx, &byte, memory, 1);
}

// Host access to memory of the backend: the memory itself if the CPU can reach it, else a copy: upload() sends it and
// download() fetches it. The copy is zero until then, and its pages are allocated on first touch, by many threads at once.
template <class E>
class HostSide {
public:
    // on_host: `memory` is host memory even on GPUs.
    HostSide(be::Ctx& ctx, E* memory, size_t n, bool on_host = false)
        : ctx_(ctx), memory_(memory), bytes_(n * sizeof(E)), on_host_(on_host) {
        if (has_copy()) data_ = (E*)cpu::allocate_memory(bytes_);
        else if (!be::memory_is_host) wait_for_device(ctx);  // ops may still use it
    }
    HostSide(const HostSide&) = delete;
    HostSide& operator=(const HostSide&) = delete;
    ~HostSide() {
        if (has_copy()) cpu::release_memory(data_, bytes_);
    }
    E* data() { return data_; }
    void upload() {
        if (has_copy()) be::upload(ctx_, memory_, data_, bytes_);
    }
    void download() {
        if (has_copy()) be::download(ctx_, data_, memory_, bytes_);
    }

private:
    bool has_copy() const { return !be::memory_is_host && !on_host_ && bytes_ > 0; }

    be::Ctx& ctx_;
    E* memory_;
    size_t bytes_;
    bool on_host_;
    E* data_ = memory_;
};
