// Text that the ranks of one node share, in memory that MPI maps into all of them. Unlike collectives, ranks use it in any
// order and any number of times. A rank that holds the lock must not wait for other ranks; if it dies, the lock is released.
#pragma once
#include <pthread.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "../base/shared_text.h"
#include "world.h"

#if HAVE_MPI
class NodeText : public SharedText {
public:
    // Called by all ranks.
    explicit NodeText(World& world) {
        const Waiting waiting(world, "making the memory that a node's ranks share");
        MPI(MPI_Comm_split_type(world.mpi(), MPI_COMM_TYPE_SHARED, world.rank(), MPI_INFO_NULL, &node_));
        int rank = 0, unit = 1;
        MPI(MPI_Comm_rank(node_, &rank));
        MPI_Aint bytes = rank == 0 ? sizeof(Memory) : 0;
        void* mine = nullptr;
        MPI(MPI_Win_allocate_shared(bytes, unit, MPI_INFO_NULL, node_, &mine, &window_));
        MPI(MPI_Win_shared_query(window_, 0, &bytes, &unit, &memory_));
        if (rank == 0) {
            memory_->bytes = 0;
            pthread_mutexattr_t attributes;
            pthread_mutexattr_init(&attributes);
            pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
            pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
            pthread_mutex_init(&memory_->mutex, &attributes);
            pthread_mutexattr_destroy(&attributes);
        }
        world.barrier();
    }
    ~NodeText() override {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (finalized || std::uncaught_exceptions() > 0) return;  // freeing is collective; the others may not participate
        MPI_Win_free(&window_);
        MPI_Comm_free(&node_);
    }
    NodeText(const NodeText&) = delete;
    NodeText& operator=(const NodeText&) = delete;

    void lock() override {
        if (pthread_mutex_lock(&memory_->mutex) == EOWNERDEAD) pthread_mutex_consistent(&memory_->mutex);
    }
    void unlock() override { pthread_mutex_unlock(&memory_->mutex); }
    std::string text(size_t from) override { return std::string(memory_->text + from, memory_->bytes - from); }
    void append(const std::string& more) override {
        if (more.size() > sizeof memory_->text - memory_->bytes) return;
        memcpy(memory_->text + memory_->bytes, more.data(), more.size());
        memory_->bytes += more.size();
    }

private:
    struct Memory {
        pthread_mutex_t mutex;
        size_t bytes;
        char text[1 << 20];
    };
    MPI_Comm node_ = MPI_COMM_NULL;
    MPI_Win window_ = MPI_WIN_NULL;
    Memory* memory_ = nullptr;
};
#endif

// Null if the run has one rank.
inline std::shared_ptr<SharedText> text_of_node(World& world) {
#if HAVE_MPI
    if (world.size() > 1) return std::make_shared<NodeText>(world);
#endif
    (void)world;
    return nullptr;
}
