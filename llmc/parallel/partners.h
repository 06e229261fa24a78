// Sends each rank's bytes to a partner on another node while training continues. Only the thread that uses MPI calls it
// (MPI_THREAD_FUNNELED): start(), then poll() between steps, with a window of messages in flight that the network moves
// meanwhile. It has a communicator of its own.
#pragma once
#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "../base/clock.h"
#include "world.h"

class PartnerTransfer {
public:
    struct Message {
        int rank;  // the other end
        char* data;
        size_t bytes;
    };

#if HAVE_MPI
    // Called by all ranks.
    explicit PartnerTransfer(World& world) {
        const Waiting waiting(world, "making the group of partners");
        MPI(MPI_Comm_dup(world.mpi(), &comm_));
        MPI(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    }
    ~PartnerTransfer() {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (!finalized && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm_);
    }
    // Called by all ranks, with buffers that stay until poll() returns true; the sizes of both ends agree.
    void start(const Message& send, const std::vector<Message>& receive) {
        streams_ = {{send, true}};
        for (const Message& m : receive) streams_.push_back({m, false});
        waited_ = 0;
        polled_ = monotonic_seconds();
    }
    // Continues; returns true when everything was sent and received. Polls for `seconds` at most.
    bool poll(double seconds) {
        const double begin = monotonic_seconds();
        bool done;
        do {
            const double now = monotonic_seconds();
            waited_ = waited_ + std::min(now - polled_, 1.0);  // a long step in between is not the network's delay
            polled_ = now;
            done = true;
            for (Stream& s : streams_) done &= advance(s);
        } while (!done && polled_ - begin < seconds);
        return done;
    }
#else
    explicit PartnerTransfer(World&) {}
    void start(const Message&, const std::vector<Message>&) {}
    bool poll(double) { return true; }
#endif
    // Seconds since the network last sent or received anything, while it was polled. Any thread may call it.
    double stalled() const { return waited_; }

private:
    static constexpr size_t piece = 16 << 20, window = 16;  // bytes of a message, messages in flight

#if HAVE_MPI
    struct Stream {
        Message message;
        bool sends;
        size_t posted = 0;
        std::vector<MPI_Request> requests{};
    };
    // Returns true if all of it is done.
    bool advance(Stream& s) {
        const Message& m = s.message;
        while (s.posted < m.bytes && s.requests.size() < window) {
            const int n = (int)std::min(piece, m.bytes - s.posted);
            s.requests.emplace_back();
            if (s.sends) MPI(MPI_Isend(m.data + s.posted, n, MPI_BYTE, m.rank, 0, comm_, &s.requests.back()));
            else MPI(MPI_Irecv(m.data + s.posted, n, MPI_BYTE, m.rank, 0, comm_, &s.requests.back()));
            s.posted += (size_t)n;
        }
        const size_t open = s.requests.size();
        for (MPI_Request& request : s.requests) {
            int done = 0;
            MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        }
        s.requests.erase(std::remove(s.requests.begin(), s.requests.end(), MPI_REQUEST_NULL), s.requests.end());
        if (s.requests.size() < open) waited_ = 0;
        return s.requests.empty() && s.posted == m.bytes;
    }

    MPI_Comm comm_ = MPI_COMM_NULL;
    std::vector<Stream> streams_;
    double polled_ = 0;
#endif
    std::atomic<double> waited_{0};
};
