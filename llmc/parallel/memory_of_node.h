// NodeMemory that the ranks of a node share: the first one fills memory without a name (memfd), which the others open through
// /proc and map. Unlike MPI's shared windows it does not depend on the size of /dev/shm or /tmp. A rank that cannot open it, in
// a container of its own for example, fills memory of its own.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../base/clock.h"
#include "../cpu/node_memory.h"
#include "rounds.h"
#include "world.h"

class MemoryOfNode : public NodeMemory {
public:
    explicit MemoryOfNode(World& world) : world_(world) {}

    // The other ranks wait while the first one of the node fills the memory.
    std::shared_ptr<const char> filled(size_t bytes, const std::string& what, const Fill& fill) const override {
        int first = 0;
        while (!world_.is_here(first)) first++;
        File mine;
        check_room(first == world_.rank(), bytes, what);
        Rounds rounds(world_);
        if (first == world_.rank()) mine = filled_file(bytes, fill, rounds.tick());
        const std::string place = rounds.end(mine.place)[(size_t)first];
        std::shared_ptr<const char> memory = mine.memory;
        if (!memory && !place.empty()) memory = opened(bytes, place);
        check_room(!memory, bytes, what);  // all have mapped the file
        if (mine.fd >= 0) close(mine.fd);
        Rounds others(world_);
        if (!memory) memory = filled_alone(bytes, fill, others.tick());
        others.end("");
        return memory;
    }

private:
    // Before the first rank allocates: fails where the memory of this machine, or of a container, does not suffice for all that
    // allocate.
    void check_room(bool allocates, size_t bytes, const std::string& what) const {
        const auto all = world_.all_gather(allocates ? "1" : "");
        size_t here = 0;
        for (int r = 0; r < world_.size(); r++) here += world_.is_here(r) && !all[(size_t)r].empty();
        if (allocates) check_available(bytes, here, what);
        world_.barrier();
    }
    struct File {
        int fd = -1;
        std::string place;  // PATH NUMBER: the number, which the file ends with, shows that PATH is the same file for others
        std::shared_ptr<const char> memory;
    };

    // No memory if there are no such files.
    static File filled_file(size_t bytes, const Fill& fill, const std::function<void()>& tick) {
        File file;
        file.fd = memfd_create("train_gpt", MFD_CLOEXEC);
        if (file.fd < 0) return file;
        const size_t all = bytes + sizeof(uint64_t);
        char* memory = ftruncate(file.fd, (off_t)all) == 0 ? map(file.fd, all, PROT_READ | PROT_WRITE) : nullptr;
        if (!memory) return file;
        file.memory = owned(memory, all);
        madvise(memory, all, MADV_HUGEPAGE);
        fill(memory, tick);
        const uint64_t number = (uint64_t)std::random_device()() << 32 | std::random_device()();
        memcpy(memory + bytes, &number, sizeof number);
        file.place = format("/proc/%d/fd/%d %llu", (int)getpid(), file.fd, (unsigned long long)number);
        return file;
    }
    // Null if that is another file in this process's view, or cannot be opened.
    static std::shared_ptr<const char> opened(size_t bytes, const std::string& place) {
        const size_t space = place.find(' '), all = bytes + sizeof(uint64_t);
        const int fd = open(place.substr(0, space).c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) return nullptr;
        const bool whole = lseek(fd, 0, SEEK_END) == (off_t)all;
        char* memory = whole ? map(fd, all, PROT_READ) : nullptr;
        close(fd);
        if (!memory) return nullptr;
        std::shared_ptr<const char> result = owned(memory, all);
        uint64_t number;
        memcpy(&number, memory + bytes, sizeof number);
        if (std::to_string(number) != place.substr(space + 1)) return nullptr;
        return result;
    }
    static char* map(int fd, size_t bytes, int protection) {
        void* memory = mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
        return memory == MAP_FAILED ? nullptr : (char*)memory;
    }
    static std::shared_ptr<const char> owned(char* memory, size_t bytes) {
        return {memory, [bytes](const char* p) { munmap((void*)p, bytes); }};
    }

    World& world_;
};

inline std::shared_ptr<NodeMemory> memory_of_node(World& world) {
    if (world.size() == 1) return std::make_shared<NodeMemory>();
    return std::make_shared<MemoryOfNode>(world);
}
