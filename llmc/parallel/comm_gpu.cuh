// Comm on GPUs: a group of ranks, one GPU each, that exchange tensors through NCCL. The group's first rank creates NCCL's id,
// and the World sends it to the others.
//
// Streams. A collective runs on ctx.stream, in order with the ops around it. A started one runs on the Comm's own stream, after
// the work currently on ctx.stream, and finish() makes ctx.stream wait for it. All collectives of one Comm run one after
// another: an event orders the two streams.
//
// Messages. On a GPU a send waits for its receive, and NCCL runs all operations of a communicator one after another. If
// messages shared a communicator, two ranks that send to each other before they receive would deadlock. So every directed edge
// of a Route, from u to v, has its own communicator: u only sends on it, from a separate stream, and v only receives, on
// ctx.stream. Then a send waits only for its receive, and only finish() waits for a send. The first message between two ranks
// also blocks the host while NCCL connects them; in a ring in which all ranks send first, all would block. So the edges are
// created, with one message over each, in rounds in which a rank has at most one edge, which excludes cycles.
//
// Communicators and streams: one communicator for each group that this run uses and each edge of this rank; one stream for each
// group that starts collectives (data and tensor parallelism) and each edge that sends. NCCL adds two per communicator, so
// ctx.cuh asks CUDA for more connections. These streams have the highest priority: the blocks of NCCL's kernels are scheduled
// before the blocks of a waiting product. An edge uses at most `edge_blocks` multiprocessors.
//
// Precision: NCCL sums floatX in its own way. A ring rounds every addition of bf16 to bf16; switches that add (NVLS) use fp32.
// cpu:: sums in fp32 and rounds once. Gradients are `real`, for which both sum in fp32, or optionally bf16: then a ring's
// roundings give a sum over R ranks with independent summands a relative standard deviation of 0.0016 sqrt(R / 2), without
// bias: 0.3% for 8 ranks, 0.9% for 64, 3.6% for 1,024.
// Determinism: the same bits on all ranks, and in every run of the same layout on the same machines, as NCCL chooses algorithms
// by size and topology.
// Cost: a collective moves as many bytes as on CPUs; 360 GB/s between 8 GPUs on NVLink 4 require messages of 64 MB or more.
//
// Errors: NCCL's errors are fail()ed with its text. If a rank has died, the others wait in NCCL until the launcher ends them,
// or the World's watchdog does: UnderWay reports to it which operations wait on streams, and errors that NCCL met there. It
// ends the process without ncclCommAbort, which could itself wait. TRAIN_GPT_CHECK_COMM=1 compares collectives as on CPUs; each
// then waits for the device.
// Kernels of several communicators in flight must fit on the GPU together, as they wait for other ranks: here at most the
// started collectives of each Comm and one send per edge, which use a few of some hundred multiprocessors.
// Ranks cannot share a GPU. The same code runs on the emulator, whose NCCL (test/emu/nccl.h) is asynchronous too; not yet run
// with NCCL on several GPUs.
#pragma once
#include <deque>
#include <mutex>
#include <string_view>

#include "comm_cpu.h"
#include "../gpu/memory.cuh"

#if !defined(HAVE_NCCL)
#if HAVE_MPI && __has_include(<nccl.h>)  // without MPI there is one rank
#define HAVE_NCCL 1
#else
#define HAVE_NCCL 0
#endif
#endif
#if HAVE_NCCL
#include <nccl.h>
#endif

namespace gpu {
namespace detail {

#if HAVE_NCCL
#define NCCL(call)                                                                                          \
    do {                                                                                                    \
        const ncclResult_t nccl_result_ = (call);                                                           \
        if (nccl_result_ != ncclSuccess) gpu::detail::nccl_failed(nccl_result_, #call, __FILE__, __LINE__); \
    } while (0)
[[noreturn]] inline void nccl_failed(ncclResult_t result, const char* what, const char* file, int line) {
    fail("%s failed: %s (%s) at %s:%d; HINT: NCCL_DEBUG=WARN says more", what, ncclGetErrorString(result),
         ncclGetLastError(nullptr), file, line);
}

template <class E>
ncclDataType_t nccl_type();
template <>
inline ncclDataType_t nccl_type<bf16>() {
    return ncclBfloat16;
}
template <>
inline ncclDataType_t nccl_type<float>() {
    return ncclFloat32;
}

template <>
inline ncclDataType_t nccl_type<uint8_t>() {
    return ncclUint8;
}

// Events are reused: an operation uses up to three, and a step has thousands of operations. There are never more than are in
// use at a time. Any thread may return one.
class Events {
public:
    static Events& with(unsigned flags) {
        static Events* const timed = new Events(cudaEventDefault);  // until the process ends
        static Events* const untimed = new Events(cudaEventDisableTiming);
        return flags == cudaEventDisableTiming ? *untimed : *timed;
    }
    cudaEvent_t take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (free_.empty()) {
            cudaEvent_t e;
            CUDA(cudaEventCreateWithFlags(&e, flags_));
            return e;
        }
        cudaEvent_t e = free_.back();
        free_.pop_back();
        return e;
    }
    void give_back(cudaEvent_t e) {
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(e);
    }

private:
    explicit Events(unsigned flags) : flags_(flags) {}
    const unsigned flags_;
    std::mutex mutex_;
    std::vector<cudaEvent_t> free_;
};
struct EventReturner {
    Events* from;
    void operator()(cudaEvent_t e) const { from->give_back(e); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, EventReturner>;
inline Event record(cudaStream_t stream, unsigned flags) {
    Events& events = Events::with(flags);
    Event event(events.take(), {&events});
    CUDA(cudaEventRecord(event.get(), stream));
    return event;
}
// Later work on `later` runs after the work that is on `earlier` now.
inline void order(cudaStream_t later, cudaStream_t earlier) {
    CUDA(cudaStreamWaitEvent(later, record(earlier, cudaEventDisableTiming).get(), 0));
}

// The operations of a group that are on streams and not complete. NCCL's calls return at once; the device waits for other
// ranks, so the watchdog must look there. Each operation is between two events. A wait is measured from when the watchdog first
// saw the first event passed until the second one passes: neither long kernels earlier on the stream nor a host that runs far
// ahead count as a wait. For an operation on the ops' stream, the time between its two events is time that the ops wait, for
// other ranks or for the data: it is reported to the monitor afterwards. So the ranks' waiting is known without blocking the
// host.
class UnderWay {
public:
    const comm_detail::Members& group;

    UnderWay(const comm_detail::Members& g, const Ctx& ctx) : group(g), device_(ctx.device), ops_stream_(ctx.stream) {
        group.monitor->add_wait_of_device(group.name, 0);
    }
    // Calls launch() to put an operation on the stream; returns the event after it.
    template <class Launch>
    std::shared_ptr<Event> put(const char* operation, int64_t number, ncclComm_t comm, cudaStream_t stream, Launch launch) {
        const Activity activity = {false, operation, group.name, number};
        Event reached = record(stream, cudaEventDefault);
        check(launch(comm, stream), activity);
        auto over = std::make_shared<Event>(record(stream, cudaEventDefault));
        std::lock_guard<std::mutex> lock(mutex_);
        drop_finished();
        operations_.push_back({std::move(reached), over, comm, activity, stream == ops_stream_});
        return over;
    }
    // Makes the ops wait for an operation on another stream.
    void wait_for(const char* operation, int64_t number, ncclComm_t comm, const Event& done) {
        put(operation, number, comm, ops_stream_, [&](ncclComm_t, cudaStream_t stream) {
            CUDA(cudaStreamWaitEvent(stream, done.get(), 0));
            return ncclSuccess;
        });
    }
    // The operation that has waited longest. Called by the watchdog's thread and, after each step, by the host's.
    Activity longest_wait() {
        std::lock_guard<std::mutex> lock(mutex_);
        CUDA(cudaSetDevice(device_));  // otherwise CUDA would make a context on the first GPU for this thread
        drop_finished();
        Activity longest;
        for (Operation& o : operations_) {
            if (passed(*o.over)) continue;
            ncclResult_t error = ncclSuccess;
            NCCL(ncclCommGetAsyncError(o.comm, &error));
            check(error, o.activity);
            if (!o.activity.waiting && passed(o.reached)) {
                o.activity.waiting = true;
                o.activity.since = monotonic_seconds();
            }
            if (o.activity.waiting && (!longest.waiting || o.activity.since < longest.since)) longest = o.activity;
        }
        return longest;
    }

private:
    struct Operation {
        Event reached;
        std::shared_ptr<Event> over;
        ncclComm_t comm;
        Activity activity;
        bool holds_ops;  // is on the ops' stream
    };
    static void check(ncclResult_t result, const Activity& activity) {
        if (result != ncclSuccess && result != ncclInProgress) nccl_failed(result, activity.name().c_str(), __FILE__, __LINE__);
    }
    static bool passed(const Event& event) {
        const cudaError_t error = cudaEventQuery(event.get());
        if (error == cudaErrorNotReady) return (void)cudaGetLastError(), false;  // cleared, or the next launch reports it
        CUDA(error);
        return true;
    }
    void drop_finished() {
        while (!operations_.empty() && passed(*operations_.front().over)) {
            const Operation& o = operations_.front();
            float ms = 0;
            if (o.holds_ops) CUDA(cudaEventElapsedTime(&ms, o.reached.get(), o.over->get()));
            group.monitor->add_wait_of_device(group.name, ms * 1e-3);
            operations_.pop_front();
        }
    }

    const int device_;
    const cudaStream_t ops_stream_;
    std::mutex mutex_;
    std::deque<Operation> operations_;  // in call order
};

// A communicator, and if needed a stream to use it on.
struct Channel {
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;

    // most_blocks: limit for NCCL's kernels, one block per multiprocessor; 0: NCCL's choice.
    Channel(int size, int rank, const std::string& unique_id, int most_blocks) {
        ncclUniqueId id;
        CHECK(unique_id.size() == sizeof id.internal, "an id of %zu bytes", unique_id.size());
        memcpy(id.internal, unique_id.data(), sizeof id.internal);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        if (most_blocks) config.maxCTAs = most_blocks;
        NCCL(ncclCommInitRankConfig(&comm, size, id, rank, &config));
    }
    cudaStream_t own_stream() {
        if (stream) return stream;
        int least = 0, greatest = 0;
        CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
        return stream;
    }
    ~Channel() {
        // Destroying a communicator is collective; after an error the other ranks do not participate, so it is aborted.
        if (comm && std::uncaught_exceptions() > 0) ncclCommAbort(comm);
        else if (comm) ncclCommDestroy(comm);
        if (stream) cudaStreamDestroy(stream);
    }
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;
};

// One end of the directed edge from one rank (0 on this communicator) to another (1).
struct Edge : Channel {
    Edge(bool sends, const std::string& id, Ctx& ctx) : Channel(2, sends ? 0 : 1, id, edge_blocks) {
        floatX* first_message = (floatX*)ctx.scratch(sizeof(floatX));  // contents do not matter
        const cudaStream_t s = sends ? own_stream() : ctx.stream;
        if (sends) NCCL(ncclSend(first_message, 1, nccl_type<floatX>(), 1, comm, s));
        else NCCL(ncclRecv(first_message, 1, nccl_type<floatX>(), 0, comm, s));
        CUDA(cudaStreamSynchronize(s));
    }
    // Returns the function that completes the send: after it the sender's stream may write x again.
    std::function<void()> send(const floatX* x, size_t n, cudaStream_t from, UnderWay& under_way, int64_t number) {
        order(stream, from);
        const auto sent = under_way.put("send", number, comm, stream, [=](ncclComm_t c, cudaStream_t s) {
            return ncclSend(x, n, nccl_type<floatX>(), 1, c, s);
        });
        return [=, &under_way] { under_way.wait_for("send", number, comm, *sent); };
    }
};

// The ranks of a Comm and its communicators, at a fixed address.
struct Group : comm_detail::Members {
    std::unique_ptr<Channel> own;         // for collectives
    std::unique_ptr<Edge> to, from;       // for messages
    bool to_first = false;                // made first; destroyed in the same order, as that may wait for the peer
    std::shared_ptr<Event> last_started;  // on own's stream; later work on other streams must wait for it
    comm_detail::Note* notes = nullptr;   // (size), on the device
    UnderWay under_way;

    // ids: of the communicators that world ranks make, see makes_id().
    Group(Ctx& ctx, World& world, const std::vector<int>& r, const std::string& n, int place, Route route_,
          const std::vector<std::string>& ids)
        : Members(world, r, n, place, route_), under_way(*this, ctx) {
        const Waiting waiting(monitor.get(), "making the group", name, 0);
        if (route.step) connect(ctx, ids);
        else own = std::make_unique<Channel>(size, rank, ids[(size_t)ranks[0]], 0);
        if (check) CUDA(cudaMalloc(&notes, (size_t)size * sizeof(comm_detail::Note)));
        monitor->add(this, [this] { return under_way.longest_wait(); });
    }
    ~Group() {
        monitor->remove(this);
        cudaFree(notes);
        if (to_first) to.reset();
        from.reset();
        to.reset();
    }
    // The edges of pairs of neighbors (u, u + 1): even u first, then odd u, last the pair that closes a ring of odd length.
    void connect(Ctx& ctx, const std::vector<std::string>& ids) {
        const auto round_of = [&](int lower) { return size % 2 && lower == size - 1 ? 2 : lower % 2; };
        const int before = (rank + size - 1) % size, out = route.step > 0 ? rank : before, in = route.step > 0 ? before : rank;
        to_first = round_of(out) < round_of(in);
        for (int round = 0; round < 3; round++) {
            if (receiver() >= 0 && round_of(out) == round) to = std::make_unique<Edge>(true, ids[(size_t)ranks[rank]], ctx);
            if (sender() >= 0 && round_of(in) == round) from = std::make_unique<Edge>(false, ids[(size_t)ranks[sender()]], ctx);
        }
    }
};
// True if the rank makes a communicator's id for the others: the first rank for collectives, the sender for an edge.
inline bool makes_id(int place, int size, Route route) {
    return size > 1 && (route.step ? route.neighbor(place, size, route.step) >= 0 : place == 0);
}

// Starts a collective and returns its sequence number.
inline int64_t begin(Ctx& ctx, Group& g, const char* operation, size_t n, size_t element_bytes) {
    const int64_t sequence = ++g.sequence;
    if (g.check) {
        const Waiting waiting(g.monitor.get(), operation, g.name, sequence);
        std::vector<comm_detail::Note> all((size_t)g.size);
        all[(size_t)g.rank] = comm_detail::Note(operation, n, element_bytes, sequence);
        if (g.last_started) g.under_way.wait_for(operation, sequence, g.own->comm, *g.last_started);
        comm_detail::Note* mine = g.notes + g.rank;
        upload(ctx, mine, &all[(size_t)g.rank], sizeof *mine);
        g.under_way.put(operation, sequence, g.own->comm, ctx.stream, [&](ncclComm_t comm, cudaStream_t stream) {
            return ncclAllGather(mine, g.notes, sizeof *mine, ncclChar, comm, stream);
        });
        download(ctx, all.data(), g.notes, all.size() * sizeof *mine);
        compare_notes(g, all);
    }
    return sequence;
}

// Calls launch(communicator, stream), on ctx.stream or, for a started operation, on the group's stream.
template <class Launch>
void run(Ctx& ctx, Group& g, const char* operation, size_t n, size_t element_bytes, Launch launch) {
    const int64_t sequence = begin(ctx, g, operation, n, element_bytes);
    const Waiting waiting(g.monitor.get(), operation, g.name, sequence);
    if (const auto started = std::exchange(g.last_started, nullptr))
        g.under_way.wait_for(operation, sequence, g.own->comm, *started);
    g.under_way.put(operation, sequence, g.own->comm, ctx.stream, launch);
}
template <class Launch>
std::function<void()> start(Ctx& ctx, Group& g, const char* operation, size_t n, size_t element_bytes, Launch launch) {
    const int64_t sequence = begin(ctx, g, operation, n, element_bytes);
    const Waiting waiting(g.monitor.get(), operation, g.name, sequence);
    order(g.own->own_stream(), ctx.stream);
    const auto done = g.last_started = g.under_way.put(operation, sequence, g.own->comm, g.own->stream, launch);
    return [&g, operation, sequence, done] { g.under_way.wait_for(operation, sequence, g.own->comm, *done); };
}
#else
struct Group : comm_detail::Members {};
#endif

// Identifies the device of this rank.
inline std::string device_text(const Ctx& ctx) {
    char id[64] = "";
    CUDA(cudaDeviceGetPCIBusId(id, sizeof id, ctx.device));
    return id;
}

}  // namespace detail

class Comm {
public:
    Comm() = default;
    // Like cpu::Comm's constructor.
    Comm(Ctx& ctx, World& world, const std::vector<int>& ranks, std::string name)
        : Comm(ctx, world, ranks, std::move(name), {0, false}) {}
    Comm(Ctx& ctx, World& world, const std::vector<int>& ranks, std::string name, Route route) : name_(std::move(name)) {
        std::string mine = comm_detail::group_text(ranks, name_);
        const size_t n = ranks.size();
#if HAVE_NCCL
        // group, device, and possibly NCCL's id
        mine += "\n" + detail::device_text(ctx) + "\n";
        const auto here = std::find(ranks.begin(), ranks.end(), world.rank());
        if (here != ranks.end() && detail::makes_id((int)(here - ranks.begin()), (int)n, route)) {
            ncclUniqueId id;
            NCCL(ncclGetUniqueId(&id));
            mine.append(id.internal, sizeof id.internal);
        }
#endif
        std::vector<std::string> said = world.all_gather(mine), devices, ids;
        for (std::string& s : said) {
            const size_t line = s.find('\n'), next = line == std::string::npos ? line : s.find('\n', line + 1);
            devices.push_back(next == std::string::npos ? "" : s.substr(line + 1, next - line - 1));
            ids.push_back(next == std::string::npos ? "" : s.substr(next + 1));
            s.resize(std::min(line, s.size()));
        }
        const int place = comm_detail::place_in_group(world, ranks, name_, said);
        if (place < 0 || n == 1) return;
#if HAVE_NCCL
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < i; j++) {
                const size_t a = (size_t)ranks[j], b = (size_t)ranks[i];
                if (world.on_one_machine(a, b) && devices[a] == devices[b])
                    fail(
                        "ranks %zu and %zu share the GPU %s of host %s, which NCCL cannot do; HINT: start as many ranks on a "
                        "machine as it has GPUs",
                        a, b, devices[a].c_str(), world.hosts()[a].c_str());
            }
        group_ = std::make_unique<detail::Group>(ctx, world, ranks, name_, place, route, ids);
#else
        (void)ctx, (void)route;
        fail(
            "%zu ranks on GPUs (group %s) need NCCL, which this program was built without; HINT: install its headers "
            "(libnccl-dev) and build again",
            n, name_.c_str());
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

// ---- collectives -----------------------------------------------------------------------------------------------------------
inline size_t contribution_bytes(int, size_t) { return 0; }

template <class E>
void all_reduce(Ctx& ctx, Comm& comm, E* x, size_t n) {
    if (comm.size() == 1 || n == 0) return;
#if HAVE_NCCL
    detail::run(ctx, *comm.group(), "all_reduce", n, sizeof(E), [=](ncclComm_t c, cudaStream_t stream) {
        return ncclAllReduce(x, x, n, detail::nccl_type<E>(), ncclSum, c, stream);
    });
#else
    (void)ctx, (void)x;
#endif
}

inline void all_reduce_max(Ctx& ctx, Comm& comm, float* x, size_t n) {
    if (comm.size() == 1 || n == 0) return;
#if HAVE_NCCL
    detail::run(ctx, *comm.group(), "all_reduce_max", n, sizeof(float),
                [=](ncclComm_t c, cudaStream_t stream) { return ncclAllReduce(x, x, n, ncclFloat32, ncclMax, c, stream); });
#else
    (void)ctx, (void)x;
#endif
}

namespace detail {

#if HAVE_NCCL
template <class E>
auto gather(E* out, const E* mine, size_t n) {
    return [=](ncclComm_t c, cudaStream_t stream) { return ncclAllGather(mine, out, n, nccl_type<E>(), c, stream); };
}
template <class E>
auto scatter(E* out, const E* all, size_t n) {
    return
        [=](ncclComm_t c, cudaStream_t stream) { return ncclReduceScatter(all, out, n, nccl_type<E>(), ncclSum, c, stream); };
}
#endif
// For one rank: at most a copy, if it is not in place.
template <class E>
bool copied(Ctx& ctx, const Comm& comm, E* out, const E* from, size_t n) {
    if (n == 0) return true;
    if (comm.size() > 1) return false;
    if (out != from) copy_rows(ctx, out, n * sizeof(E), from, n * sizeof(E), n * sizeof(E), 1);
    return true;
}

}  // namespace detail

template <class E>
void all_gather(Ctx& ctx, Comm& comm, E* out, const E* mine, size_t n) {
    if (detail::copied(ctx, comm, out, mine, n)) return;
#if HAVE_NCCL
    detail::run(ctx, *comm.group(), "all_gather", n, sizeof(E), detail::gather(out, mine, n));
#endif
}

template <class E>
void reduce_scatter(Ctx& ctx, Comm& comm, E* out, const E* all, size_t n) {
    if (detail::copied(ctx, comm, out, all, n)) return;
#if HAVE_NCCL
    detail::run(ctx, *comm.group(), "reduce_scatter", n, sizeof(E), detail::scatter(out, all, n));
#endif
}

inline void all_to_all(Ctx& ctx, Comm& comm, void* out, const std::vector<int>& received, const void* in,
                       const std::vector<int>& sent, size_t row_bytes) {
    const auto bytes = [=](const std::vector<int>& first, int r) { return (size_t)(first[r + 1] - first[r]) * row_bytes; };
    const auto at = [=](auto* rows, const std::vector<int>& first, int r) { return rows + (size_t)first[r] * row_bytes; };
    const int me = comm.rank();
    const size_t own = bytes(sent, me);
    CHECK(own == bytes(received, me), "%zu of %zu bytes to itself", bytes(received, me), own);
    if (own) copy_rows(ctx, at((char*)out, received, me), own, at((const char*)in, sent, me), own, own, 1);
    if (comm.size() == 1) return;
#if HAVE_NCCL
    detail::run(ctx, *comm.group(), "all_to_all", row_bytes, 1, [&](ncclComm_t c, cudaStream_t stream) {
        ncclResult_t result = ncclGroupStart();
        for (int i = 1; i < comm.size() && result == ncclSuccess; i++) {
            const int to = (me + i) % comm.size(), from = (me + comm.size() - i) % comm.size();
            if (bytes(sent, to)) result = ncclSend(at((const char*)in, sent, to), bytes(sent, to), ncclUint8, to, c, stream);
            if (result == ncclSuccess && bytes(received, from))
                result = ncclRecv(at((char*)out, received, from), bytes(received, from), ncclUint8, from, c, stream);
        }
        const ncclResult_t ended = ncclGroupEnd();
        return result != ncclSuccess ? result : ended;
    });
#endif
}

template <class E>
Pending start_all_gather(Ctx& ctx, Comm& comm, E* out, const E* mine, size_t n) {
    if (detail::copied(ctx, comm, out, mine, n)) return Pending();
#if HAVE_NCCL
    return Pending(detail::start(ctx, *comm.group(), "all_gather", n, sizeof(E), detail::gather(out, mine, n)));
#else
    return Pending();
#endif
}

template <class E>
Pending start_reduce_scatter(Ctx& ctx, Comm& comm, E* out, const E* all, size_t n) {
    if (detail::copied(ctx, comm, out, all, n)) return Pending();
#if HAVE_NCCL
    return Pending(detail::start(ctx, *comm.group(), "reduce_scatter", n, sizeof(E), detail::scatter(out, all, n)));
#else
    return Pending();
#endif
}

template <class E>
Pending start_reduce_scatter(Ctx& ctx, Comm& comm, E* all, size_t n) {
    return start_reduce_scatter(ctx, comm, all + (size_t)comm.rank() * n, (const E*)all, n);
}

template <class E>
Pending start_all_gather(Ctx& ctx, Comm& comm, E* all, size_t n) {
    return start_all_gather(ctx, comm, all, (const E*)all + (size_t)comm.rank() * n, n);
}

template <class E>
Pending start_reduce(Ctx& ctx, Comm& comm, E* x, size_t n, int root) {
    if (comm.size() == 1 || n == 0) return Pending();
#if HAVE_NCCL
    return Pending(detail::start(ctx, *comm.group(), "reduce", n, sizeof(E), [=](ncclComm_t c, cudaStream_t stream) {
        return ncclReduce(x, x, n, detail::nccl_type<E>(), ncclSum, root, c, stream);
    }));
#else
    (void)ctx, (void)x, (void)root;
    return Pending();
#endif
}

template <class E>
Pending start_broadcast(Ctx& ctx, Comm& comm, E* x, size_t n, int root) {
    if (comm.size() == 1 || n == 0) return Pending();
#if HAVE_NCCL
    return Pending(detail::start(ctx, *comm.group(), "broadcast", n, sizeof(E), [=](ncclComm_t c, cudaStream_t stream) {
        return ncclBroadcast(x, x, n, detail::nccl_type<E>(), root, c, stream);
    }));
#else
    (void)ctx, (void)x, (void)root;
    return Pending();
#endif
}

inline void progress(Ctx&, Comm&) {}  // NCCL's kernels progress on their own

// ---- messages --------------------------------------------------------------------------------------------------------------
// Runs one collective of each kind, with one element and with 64 MiB, for which NCCL may use other algorithms: so the memory
// that it allocates at a communicator's first use is gone before memory is planned. On the emulator, whose only algorithm is
// the ring, the larger ones are smaller.
inline void warm_up(Ctx& ctx, Comm& comm) {
    [[maybe_unused]] constexpr bool emulated = std::string_view(backend_name) == "emu";
    if (comm.size() == 1) return;
#if HAVE_NCCL
    detail::Group& g = *comm.group();
    const Waiting waiting(g.monitor.get(), "warm_up", g.name, g.sequence);
    const size_t size = (size_t)g.size, most = emulated ? 1024 : ((size_t)64 << 20) / sizeof(floatX) / size;
    floatX* x = (floatX*)allocate_memory(most * size * sizeof(floatX));
    for (const size_t n : {(size_t)1, most}) {
        floatX* mine = x + (size_t)g.rank * n;
        const ncclDataType_t type = detail::nccl_type<floatX>();
        for (const int kind : {0, 1, 2}) {
            NCCL(ncclGroupStart());  // not counted among the group's operations
            if (kind == 0) NCCL(ncclAllReduce(x, x, n * size, type, ncclSum, g.own->comm, ctx.stream));
            if (kind == 1) NCCL(ncclAllGather(mine, x, n, type, g.own->comm, ctx.stream));
            if (kind == 2) NCCL(ncclReduceScatter(x, mine, n, type, ncclSum, g.own->comm, ctx.stream));
            NCCL(ncclGroupEnd());
        }
    }
    CUDA(cudaStreamSynchronize(ctx.stream));
    release_memory(x, 0);
#else
    (void)ctx;
#endif
}

inline Pending start_send(Ctx& ctx, Comm& comm, const floatX* x, size_t n, int peer, int tag) {
    comm.group()->check_message(peer, comm.group()->receiver(), tag);
    if (n == 0) return Pending();
#if HAVE_NCCL
    detail::Group& g = *comm.group();
    const int64_t number = ++g.n_messages;
    const Waiting waiting(g.monitor.get(), "start_send", g.name, number);
    return Pending(g.to->send(x, n, ctx.stream, g.under_way, number));
#else
    (void)ctx, (void)x;
    return Pending();
#endif
}

inline void recv(Ctx& ctx, Comm& comm, floatX* x, size_t n, int peer, int tag) {
    comm.group()->check_message(peer, comm.group()->sender(), tag);
    if (n == 0) return;
#if HAVE_NCCL
    detail::Group& g = *comm.group();
    const int64_t number = ++g.n_messages;
    const Waiting waiting(g.monitor.get(), "recv", g.name, number);
    g.under_way.put("recv", number, g.from->comm, ctx.stream, [=](ncclComm_t c, cudaStream_t stream) {
        return ncclRecv(x, n, detail::nccl_type<floatX>(), 0, c, stream);
    });
#else
    (void)ctx, (void)x;
#endif
}

}  // namespace gpu
