// Comm on CPUs: a group of ranks that exchange tensors over MPI.
//
// Sums. MPI's own reductions do not support bf16, and the order of their additions depends on the algorithm chosen for a size
// and a number of ranks. Here every block of the result belongs to one rank, which receives the others' contributions, adds
// them in the order of ranks in fp32 (`real`), and rounds once. So a result has the same bits on all ranks and in every run,
// wherever it is in the buffer.
//   reduce_scatter   rank i sends block j to rank j, for all j; each adds up its own
//   all_reduce       the same with blocks of nearly equal size, then each rank sends its block to all others
//   all_gather       each rank sends its part to all others
//   all_to_all       each rank sends its rows for each other rank to it
//   reduce, broadcast  as reduce_scatter and all_gather, with one rank owning everything
// Cost: a rank sends (size - 1) / size of the buffer, for all_reduce twice that, which is the minimum.
//
// Contributions arrive in pieces, in two alternating buffers: the next piece is received while one is added. Together they use
// at most 32 MiB (up to 256 ranks). At most two started operations hold such buffers; others request their contributions in
// finish(). Large messages progress only while a rank is inside an MPI call, so starting early gains less than on a GPU.
//
// Errors. Messages with an unexpected size or tag are rejected. With TRAIN_GPT_CHECK_COMM=1, the ranks compare the kind and
// element count before each collective; a mismatch, which would otherwise be a deadlock, is an error that names the ranks.
// TRAIN_GPT_COMM_PIECE=bytes sets the size of the pieces, for tests.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../ops.h"
#include "world.h"
#include "../cpu/parallel.h"

// ---- shared by the Comms of both backends -----------------------------------------------------------------------------------
// Multiprocessors for messages over an edge on a GPU: a few reach the 50 GB/s between nodes, while the products need the
// others. Not yet measured on a GPU.
constexpr int edge_blocks = 4;

// The direction of messages in a group: each rank sends to the one `step` places after it. closed: the ends are connected, in a
// ring.
struct Route {
    int step;  // 1 or -1; 0: no messages
    bool closed;
    int neighbor(int place, int size, int distance) const {  // -1: there is none
        const int to = place + distance;
        return to >= 0 && to < size ? to : closed ? (to + size) % size : -1;
    }
};

namespace comm_detail {

// A description of this rank's group, sent to the others while groups are made.
inline std::string group_text(const std::vector<int>& ranks, const std::string& name) {
    std::string text = name + ":";
    for (const int r : ranks) text += " " + std::to_string(r);
    return text;
}
// This rank's index in `ranks`, or -1. said[r] is the group_text of world rank r; fails if the lists do not agree.
inline int place_in_group(const World& world, const std::vector<int>& ranks, const std::string& name,
                          const std::vector<std::string>& said) {
    int place = -1;
    for (size_t i = 0; i < ranks.size(); i++) {
        CHECK(ranks[i] >= 0 && ranks[i] < world.size(), "rank %d in group %s of %d", ranks[i], name.c_str(), world.size());
        CHECK(std::count(ranks.begin(), ranks.end(), ranks[i]) == 1, "rank %d is twice in group %s", ranks[i], name.c_str());
        if (ranks[i] == world.rank()) place = (int)i;
    }
    const std::string& mine = said[(size_t)world.rank()];
    for (const int r : ranks)
        if (place >= 0 && said[r] != mine)
            fail("ranks create different groups: rank %d creates '%s', rank %d '%s'", world.rank(), mine.c_str(), r,
                 said[r].c_str());
    return place;
}

// The description of a collective that TRAIN_GPT_CHECK_COMM compares.
struct Note {
    char operation[32] = "";
    uint64_t count = 0, element_bytes = 0;
    int64_t sequence = 0;
    Note() = default;
    Note(const char* o, size_t n, size_t bytes, int64_t s) : count(n), element_bytes(bytes), sequence(s) {
        snprintf(operation, sizeof operation, "%s", o);
    }
    std::string text() const {
        return format("%s of %llu elements of %llu bytes (number %lld)", operation, (unsigned long long)count,
                      (unsigned long long)element_bytes, (long long)sequence);
    }
};

// The ranks of a Comm.
struct Members {
    std::string name;
    std::vector<int> ranks;  // world ranks
    int rank, size;
    Route route;
    std::shared_ptr<Monitor> monitor;
    bool check = false;      // TRAIN_GPT_CHECK_COMM
    int64_t sequence = 0;    // collectives so far; the same on all ranks
    int64_t n_messages = 0;  // messages that this rank has sent or received
    Members(const World& world, const std::vector<int>& r, const std::string& n, int place, Route to)
        : name(n), ranks(r), rank(place), size((int)r.size()), route(to), monitor(world.monitor()) {
        const char* text = world_detail::variable("TRAIN_GPT_CHECK_COMM");
        check = text && std::string(text) != "0";
    }
    Members(const Members&) = delete;
    Members& operator=(const Members&) = delete;
    int receiver() const { return route.step ? route.neighbor(rank, size, route.step) : -1; }
    int sender() const { return route.step ? route.neighbor(rank, size, -route.step) : -1; }
    void check_message(int peer, int wanted, int tag) const {
        CHECK(peer >= 0 && peer == wanted && tag >= 0 && tag < 32768, "group %s: a message between ranks %d and %d, tag %d",
              name.c_str(), rank, peer, tag);
    }
};

inline void compare_notes(const Members& g, const std::vector<Note>& notes) {
    const Note& mine = notes[g.rank];
    for (size_t r = 0; r < notes.size(); r++)
        if (memcmp(&notes[r], &mine, sizeof mine) != 0)
            fail("ranks disagree in group %s: rank %d is in %s, rank %d in %s", g.name.c_str(), g.ranks[g.rank],
                 mine.text().c_str(), g.ranks[r], notes[r].text().c_str());
}

// The second half of a started operation, run by finish(), which must be called.
class Unfinished {
public:
    Unfinished() = default;
    explicit Unfinished(std::function<void()> rest) : rest_(std::move(rest)) {}
    Unfinished(Unfinished&& other) noexcept : rest_(std::exchange(other.rest_, nullptr)) {}
    Unfinished& operator=(Unfinished&& other) noexcept {
        CHECK(!rest_, "a started operation was not finished");
        rest_ = std::exchange(other.rest_, nullptr);
        return *this;
    }
    ~Unfinished() { CHECK(!rest_ || std::uncaught_exceptions() > 0, "a started operation was not finished"); }
    void finish() {
        if (const auto rest = std::exchange(rest_, nullptr)) rest();
    }

private:
    std::function<void()> rest_;
};

}  // namespace comm_detail

namespace cpu {
namespace detail {

// Bytes of a piece of a rank's contribution.
inline size_t piece_bytes_of(int size) { return std::clamp<size_t>((16 << 20) / (size_t)(size - 1), 64 << 10, 4 << 20); }

// The ranks of a Comm and its MPI state, at a fixed address.
struct Group : comm_detail::Members {
    size_t piece_bytes = 0;  // size of pieces of contributions
    size_t most_bytes = 0;   // maximum size of other messages; MPI counts in int
#if HAVE_MPI
    MPI_Comm collectives = MPI_COMM_NULL, messages = MPI_COMM_NULL;
    std::vector<std::vector<char>> buffers;  // for contributions; currently free
    int buffers_started = 0;                 // buffers held by started operations

    Group(World& world, const std::vector<int>& r, const std::string& n, int place, Route to)
        : Members(world, r, n, place, to) {
        const Waiting waiting(monitor.get(), "making the group", name, 0);
        MPI_Group all, some;
        MPI(MPI_Comm_group(world.mpi(), &all));
        MPI(MPI_Group_incl(all, size, ranks.data(), &some));
        MPI(MPI_Comm_create_group(world.mpi(), some, 0, &collectives));
        MPI(MPI_Comm_dup(collectives, &messages));
        MPI(MPI_Group_free(&some));
        MPI(MPI_Group_free(&all));
        MPI(MPI_Comm_set_errhandler(collectives, MPI_ERRORS_RETURN));
        MPI(MPI_Comm_set_errhandler(messages, MPI_ERRORS_RETURN));
        piece_bytes = piece_bytes_of(size);
        most_bytes = 1 << 30;
        if (world_detail::variable("TRAIN_GPT_COMM_PIECE"))
            piece_bytes = most_bytes = (size_t)world_detail::number("TRAIN_GPT_COMM_PIECE", 8, 1 << 30) / 8 * 8;
    }
    ~Group() {
        int finalized = 0;
        MPI_Finalized(&finalized);
        if (finalized || std::uncaught_exceptions() > 0) return;  // freeing is collective; the others may not take part
        MPI_Comm_free(&messages);
        MPI_Comm_free(&collectives);
    }
#endif
};

}  // namespace detail

class Comm {
public:
    Comm() = default;
    // Called by all ranks of the World in the same order; each passes its own group, so several groups are made at once. Ranks
    // are numbered in the order of the list. A rank that is not in its list gets a Comm of only itself.
    Comm(Ctx& ctx, World& world, const std::vector<int>& ranks, std::string name)
        : Comm(ctx, world, ranks, std::move(name), {0, false}) {}
    Comm(Ctx&, World& world, const std::vector<int>& ranks, std::string name, Route route) : name_(std::move(name)) {
        const int place =
            comm_detail::place_in_group(world, ranks, name_, world.all_gather(comm_detail::group_text(ranks, name_)));
        if (place < 0 || ranks.size() == 1) return;
#if HAVE_MPI  // without MPI there is one rank
        group_ = std::make_unique<detail::Group>(world, ranks, name_, place, route);
#else
        (void)route;
#endif
    }

    int size() const { return group_ ? group_->size : 1; }
    int rank() const { return group_ ? group_->rank : 0; }
    const std::string& name() const { return name_; }
    detail::Group* group() const { return group_.get(); }  // null for a group of one rank

private:
    std::string name_ = "alone";
    std::unique_ptr<detail::Group> group_;
};

class Pending : public comm_detail::Unfinished {
    using Unfinished::Unfinished;
};
inline void finish(Ctx&, Pending& pending) { pending.finish(); }

namespace detail {

#if HAVE_MPI
using Requests = std::vector<MPI_Request>;

inline void post_send(MPI_Comm comm, Requests& requests, const void* data, size_t bytes, size_t piece, int peer, int tag) {
    for (size_t at = 0; at < bytes; at += piece) {
        requests.emplace_back();
        MPI(MPI_Isend((const char*)data + at, (int)std::min(piece, bytes - at), MPI_BYTE, peer, tag, comm, &requests.back()));
    }
}
inline void post_receive(MPI_Comm comm, Requests& requests, void* data, size_t bytes, size_t piece, int peer, int tag) {
    for (size_t at = 0; at < bytes; at += piece) {
        requests.emplace_back();
        MPI(MPI_Irecv((char*)data + at, (int)std::min(piece, bytes - at), MPI_BYTE, peer, tag, comm, &requests.back()));
    }
}

// Starts a collective and returns its sequence number, which determines its tag, so that several can be in flight. MPI
// guarantees tags up to 32767.
inline int64_t begin(Group& g, const char* operation, size_t n, size_t element_bytes) {
    const int64_t sequence = ++g.sequence;
    if (g.check) {
        const Waiting waiting(g.monitor.get(), operation, g.name, sequence);
        const comm_detail::Note note(operation, n, element_bytes, sequence);
        std::vector<comm_detail::Note> notes((size_t)g.size);
        MPI_Request request;
        MPI(MPI_Iallgather(&note, sizeof note, MPI_BYTE, notes.data(), sizeof note, MPI_BYTE, g.collectives, &request));
        wait_for(request);
        compare_notes(g, notes);
    }
    return sequence;
}
inline int tag_of(int64_t sequence) { return (int)(sequence % 32768); }

// out = sum of all parts, in their order. out may be one of them.
template <class E>
void sum_parts(E* out, const std::vector<const E*>& parts, size_t n) {
    parallel_ranges(n, [&](size_t first, size_t last) {
        constexpr size_t block = 512;
        real sum[block];
        for (; first < last; first += block) {
            const size_t m = std::min(block, last - first);
            const E* p = parts[0] + first;
            INDEPENDENT_ITERATIONS
            for (size_t i = 0; i < m; i++) sum[i] = (real)p[i];
            for (size_t r = 1; r < parts.size(); r++) {
                p = parts[r] + first;
                INDEPENDENT_ITERATIONS
                for (size_t i = 0; i < m; i++) sum[i] += (real)p[i];
            }
            INDEPENDENT_ITERATIONS
            for (size_t i = 0; i < m; i++) out[first + i] = E(sum[i]);
        }
    });
}

// The first half of a reduction: elements [first[j], first[j + 1]) of `all` are summed on rank j.
template <class E>
class Reduction {
public:
    Reduction(Group& group, E* out, const E* all, std::vector<size_t> first, int64_t sequence)
        : g(group), out_(out), all_(all), first_(std::move(first)), tag_(tag_of(sequence)) {
        n_ = first_[(size_t)g.rank + 1] - first_[g.rank];
        piece_ = std::min(n_, g.piece_bytes / sizeof(E));
    }
    Reduction(const Reduction&) = delete;
    Reduction& operator=(const Reduction&) = delete;

    // Sends everything, starting with the next rank, so that the ranks do not all send to the same one at a time.
    void start() {
        if (g.buffers_started < 2) {
            g.buffers_started++;
            holds_buffer_ = true;
            ask();
        }
        for (int i = 1; i < g.size; i++) {
            const size_t peer = (size_t)((g.rank + i) % g.size);
            post_send(g.collectives, sends_, all_ + first_[peer], (first_[peer + 1] - first_[peer]) * sizeof(E),
                      g.piece_bytes / sizeof(E) * sizeof(E), (int)peer, tag_);
        }
    }
    // Adds the contributions; afterwards `all` may be overwritten.
    void finish() {
        if (buffer_.empty()) ask();
        for (int slot = 0; added_ < n_; slot ^= 1) {
            wait_for(receives_[slot]);
            const size_t count = std::min(piece_, n_ - added_);
            std::vector<const E*> parts;
            for (int r = 0; r < g.size; r++) parts.push_back(r == g.rank ? all_ + first_[r] + added_ : contribution(slot, r));
            sum_parts(out_ + added_, parts, count);
            added_ += count;
            ask_for(slot);
        }
        wait_for(sends_);
        g.buffers.push_back(std::move(buffer_));
        if (holds_buffer_) g.buffers_started--;
    }

private:
    void ask() {
        if (!g.buffers.empty()) {
            buffer_ = std::move(g.buffers.back());
            g.buffers.pop_back();
        }
        const size_t bytes = std::max<size_t>(1, 2 * (size_t)(g.size - 1) * piece_ * sizeof(E));
        if (buffer_.size() < bytes) buffer_ = std::vector<char>(bytes);
        ask_for(0);
        ask_for(1);
    }
    // Requests the next piece from every other rank.
    void ask_for(int slot) {
        const size_t count = std::min(piece_, n_ - asked_);
        for (int i = 1; i < g.size && count > 0; i++) {
            const int peer = (g.rank + g.size - i) % g.size;
            post_receive(g.collectives, receives_[slot], contribution(slot, peer), count * sizeof(E), count * sizeof(E), peer,
                         tag_);
        }
        asked_ += count;
    }
    E* contribution(int slot, int r) {
        const size_t place = (size_t)(r < g.rank ? r : r - 1);
        return (E*)buffer_.data() + ((size_t)slot * (size_t)(g.size - 1) + place) * piece_;
    }

    Group& g;
    E* out_;
    const E* all_;
    std::vector<size_t> first_;
    int tag_;
    size_t n_, piece_;              // elements of this rank's block, and of a piece of it
    size_t asked_ = 0, added_ = 0;  // elements of the block
    std::vector<char> buffer_;      // (2, size - 1, piece)
    bool holds_buffer_ = false;
    Requests sends_, receives_[2];
};

// Sends everyone's block of `all`, elements [first[j], first[j + 1]) of rank j, to everyone.
template <class E>
void start_gather(Group& g, Requests& requests, E* all, const std::vector<size_t>& first, int64_t sequence) {
    const size_t me = (size_t)g.rank;
    for (int i = 1; i < g.size; i++) {
        const size_t from = (size_t)((g.rank + g.size - i) % g.size);
        post_receive(g.collectives, requests, all + first[from], (first[from + 1] - first[from]) * sizeof(E), g.most_bytes,
                     (int)from, tag_of(sequence));
    }
    for (int i = 1; i < g.size; i++)
        post_send(g.collectives, requests, all + first[me], (first[me + 1] - first[me]) * sizeof(E), g.most_bytes,
                  (g.rank + i) % g.size, tag_of(sequence));
}
#endif

// Offsets of the ranks' blocks, and the end.
inline std::vector<size_t> equal_blocks(int size, size_t n) {
    std::vector<size_t> first;
    for (int j = 0; j <= size; j++) first.push_back((size_t)j * n);
    return first;
}
// The blocks if all elements belong to one rank.
inline std::vector<size_t> one_block(int size, int root, size_t n) {
    std::vector<size_t> first((size_t)size + 1, 0);
    std::fill(first.begin() + root + 1, first.end(), n);
    return first;
}

}  // namespace detail

inline size_t contribution_bytes(int size, size_t block) {
    return size == 1 ? 0 : 2 * (size_t)(size - 1) * std::min(block, detail::piece_bytes_of(size));
}

// ---- collectives -----------------------------------------------------------------------------------------------------------
template <class E>
void all_reduce(Ctx&, Comm& comm, E* x, size_t n) {
    if (comm.size() == 1 || n == 0) return;
#if HAVE_MPI
    detail::Group& g = *comm.group();
    const int64_t sequence = detail::begin(g, "all_reduce", n, sizeof(E));
    const Waiting waiting(g.monitor.get(), "all_reduce", g.name, sequence);
    std::vector<size_t> first;
    const size_t size = (size_t)g.size;
    for (size_t j = 0; j <= size; j++) first.push_back(n / size * j + std::min(j, n % size));
    detail::Reduction<E> reduction(g, x + first[g.rank], x, first, sequence);
    reduction.start();
    reduction.finish();
    detail::Requests requests;
    detail::start_gather(g, requests, x, first, sequence);
    wait_for(requests);
#else
    (void)x;
#endif
}

inline void all_reduce_max(Ctx&, Comm& comm, float* x, size_t n) {
    if (comm.size() == 1 || n == 0) return;
#if HAVE_MPI
    detail::Group& g = *comm.group();
    const int64_t sequence = detail::begin(g, "all_reduce_max", n, sizeof *x);
    const Waiting waiting(g.monitor.get(), "all_reduce_max", g.name, sequence);
    for (size_t i = 0; i < n; i++)
        if (std::isnan(x[i])) x[i] = -INFINITY;
    MPI_Request request;
    MPI(MPI_Iallreduce(MPI_IN_PLACE, x, (int)n, MPI_FLOAT, MPI_MAX, g.collectives, &request));
    wait_for(request);
#else
    (void)x;
#endif
}

namespace detail {

#if HAVE_MPI
template <class E>
Pending start_gather(Comm& comm, const char* operation, E* all, size_t n, const std::vector<size_t>& first) {
    Group& g = *comm.group();
    const int64_t sequence = begin(g, operation, n, sizeof(E));
    const auto requests = std::make_shared<Requests>();
    start_gather(g, *requests, all, first, sequence);
    return Pending([&g, operation, requests, sequence] {
        const Waiting waiting(g.monitor.get(), operation, g.name, sequence);
        wait_for(*requests);
    });
}
#endif

}  // namespace detail

template <class E>
Pending start_all_gather(Ctx&, Comm& comm, E* all, size_t n) {
    if (comm.size() == 1 || n == 0) return Pending();
#if HAVE_MPI
    return detail::start_gather(comm, "all_gather", all, n, detail::equal_blocks(comm.size(), n));
#else
    (void)all;
    return Pending();
#endif
}

template <class E>
Pending start_broadcast(Ctx&, Comm& comm, E* x, size_t n, int root) {
    if (comm.size() == 1 || n == 0) return Pending();
#if HAVE_MPI
    return detail::start_gather(comm, "broadcast", x, n, detail::one_block(comm.size(), root, n));
#else
    (void)x;
    (void)root;
    return Pending();
#endif
}

template <class E>
Pending start_all_gather(Ctx& ctx, Comm& comm, E* out, const E* mine, size_t n) {
    E* place = out + (size_t)comm.rank() * n;
    if (mine != place && n > 0) memcpy((void*)place, (const void*)mine, n * sizeof(E));
    return start_all_gather(ctx, comm, out, n);
}

template <class E>
void all_gather(Ctx& ctx, Comm& comm, E* out, const E* mine, size_t n) {
    Pending pending = start_all_gather(ctx, comm, out, mine, n);
    finish(ctx, pending);
}

namespace detail {

// out: this rank's block of the sums; `first`: the ranks' blocks.
template <class E>
Pending start_reduction(Comm& comm, const char* operation, E* out, const E* all, size_t n, const std::vector<size_t>& first) {
#if HAVE_MPI
    Group& g = *comm.group();
    const int64_t sequence = begin(g, operation, n, sizeof(E));
    const auto reduction = std::make_shared<Reduction<E>>(g, out, all, first, sequence);
    reduction->start();
    return Pending([&g, operation, reduction, sequence] {
        const Waiting waiting(g.monitor.get(), operation, g.name, sequence);
        reduction->finish();
    });
#else
    (void)comm, (void)operation, (void)out, (void)all, (void)n, (void)first;
    return Pending();
#endif
}

}  // namespace detail

template <class E>
Pending start_reduce_scatter(Ctx&, Comm& comm, E* out, const E* all, size_t n) {
    if (n == 0) return Pending();
    if (comm.size() > 1)
        return detail::start_reduction(comm, "reduce_scatter", out, all, n, detail::equal_blocks(comm.size(), n));
    if (out != all) memcpy((void*)out, (const void*)all, n * sizeof(E));
    return Pending();
}

template <class E>
Pending start_reduce_scatter(Ctx& ctx, Comm& comm, E* all, size_t n) {
    return start_reduce_scatter(ctx, comm, all + (size_t)comm.rank() * n, (const E*)all, n);
}

template <class E>
Pending start_reduce(Ctx&, Comm& comm, E* x, size_t n, int root) {
    if (comm.size() == 1 || n == 0) return Pending();
    return detail::start_reduction(comm, "reduce", x, (const E*)x, n, detail::one_block(comm.size(), root, n));
}

template <class E>
void reduce_scatter(Ctx& ctx, Comm& comm, E* out, const E* all, size_t n) {
    Pending pending = start_reduce_scatter(ctx, comm, out, all, n);
    finish(ctx, pending);
}

inline void all_to_all(Ctx&, Comm& comm, void* out, const std::vector<int>& received, const void* in,
                       const std::vector<int>& sent, size_t row_bytes) {
    const auto bytes = [&](const std::vector<int>& first, int r) { return (size_t)(first[r + 1] - first[r]) * row_bytes; };
    const auto at = [&](auto* rows, const std::vector<int>& first, int r) { return rows + (size_t)first[r] * row_bytes; };
    const int me = comm.rank();
    CHECK(bytes(sent, me) == bytes(received, me), "%zu of %zu bytes to itself", bytes(received, me), bytes(sent, me));
    if (bytes(sent, me)) memcpy(at((char*)out, received, me), at((const char*)in, sent, me), bytes(sent, me));
#if HAVE_MPI
    if (comm.size() == 1) return;
    detail::Group& g = *comm.group();
    const int64_t sequence = detail::begin(g, "all_to_all", row_bytes, 1);
    const Waiting waiting(g.monitor.get(), "all_to_all", g.name, sequence);
    detail::Requests requests;
    for (int i = 1; i < g.size; i++) {
        const int r = (me + g.size - i) % g.size;
        detail::post_receive(g.collectives, requests, at((char*)out, received, r), bytes(received, r), g.most_bytes, r,
                             detail::tag_of(sequence));
    }
    for (int i = 1; i < g.size; i++) {
        const int r = (me + i) % g.size;
        detail::post_send(g.collectives, requests, at((const char*)in, sent, r), bytes(sent, r), g.most_bytes, r,
                          detail::tag_of(sequence));
    }
    wait_for(requests);
#endif
}

// Lets pending messages progress for some microseconds; called between long stretches of computation. MPI has no progress
// thread, and a large message waits until its receiver confirms that there is room.
inline void progress(Ctx&, Comm& comm) {
    if (comm.size() == 1) return;
#if HAVE_MPI
    for (int i = 0, found = 0; i < 20; i++)
        MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm.group()->messages, &found, MPI_STATUS_IGNORE));
#endif
}

// ---- messages --------------------------------------------------------------------------------------------------------------
inline void warm_up(Ctx&, Comm&) {}

inline Pending start_send(Ctx&, Comm& comm, const floatX* x, size_t n, int peer, int tag) {
    comm.group()->check_message(peer, comm.group()->receiver(), tag);
    if (n == 0) return Pending();
#if HAVE_MPI
    detail::Group& g = *comm.group();
    const auto requests = std::make_shared<detail::Requests>();
    detail::post_send(g.messages, *requests, x, n * sizeof(floatX), g.most_bytes, peer, tag);
    const int64_t sequence = ++g.n_messages;
    return Pending([&g, requests, sequence] {
        const Waiting waiting(g.monitor.get(), "send", g.name, sequence);
        wait_for(*requests);
    });
#else
    (void)x;
    return Pending();
#endif
}

inline void recv(Ctx&, Comm& comm, floatX* x, size_t n, int peer, int tag) {
    comm.group()->check_message(peer, comm.group()->sender(), tag);
    if (n == 0) return;
#if HAVE_MPI
    detail::Group& g = *comm.group();
    const Waiting waiting(g.monitor.get(), "recv", g.name, ++g.n_messages);
    detail::Requests requests;
    const size_t bytes = n * sizeof(floatX);
    for (size_t at = 0; at < bytes; at += g.most_bytes) {
        const int wanted = (int)std::min(g.most_bytes, bytes - at);
        MPI_Message message;
        MPI_Status status;
        int found = 0, there = 0;
        wait_until([&] {
            MPI(MPI_Improbe(peer, MPI_ANY_TAG, g.messages, &found, &message, &status));
            return found != 0;
        });
        MPI(MPI_Get_count(&status, MPI_BYTE, &there));
        if (there != wanted || status.MPI_TAG != tag)
            fail("ranks disagree in group %s: rank %d expects %d bytes with tag %d from rank %d, which sends %d with tag %d",
                 g.name.c_str(), g.ranks[g.rank], wanted, tag, g.ranks[peer], there, status.MPI_TAG);
        requests.emplace_back();
        MPI(MPI_Imrecv((char*)x + at, wanted, MPI_BYTE, &message, &requests.back()));
    }
    wait_for(requests);
#else
    (void)x;
#endif
}

}  // namespace cpu
