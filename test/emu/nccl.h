// NCCL on the CPU, over MPI: the part of the library's interface that this program uses, with the values of the header of NCCL
// 2.28. One process is one rank with its own emulated GPU; processes come from mpirun, and one started without it is a world of
// one. Programs that include this are compiled by mpicxx or with its flags. MPI is initialized here, and finalized at exit,
// unless the program has done it.
//
// Maths. Blocks of a ring, as in the library: in a reduction over n ranks, block b is summed in the order of ranks b + 1, b +
// 2, ..., b (modulo n), in the data's own type: bf16 is rounded after each addition. NCCL's ring does the same, and it is the
// less accurate of its algorithms, so that a program that passes here does not rely on sums in fp32. The result has the same
// bits on all ranks and in each run, but an element's place in the buffer affects its rounding. avg multiplies each input by
// 1/n (rounded to the type) and sums; for integers it sums, then divides. max and min drop NaN.
//
// It is deliberately adversarial: anything that callers may not rely on fails.
// - A call puts its operation on the stream and returns. The operation waits for the other ranks and blocks only its stream
//   and its communicator, whose operations run one after another, on any stream.
// - Operations of a group run at the same time, starting with the last one; nothing is read before the group ends.
// - Buffers must be device memory of one allocation, aligned, and overlap only as documented for in-place use.
// - All ranks of a collective, and both ends of a send, compare their arguments: on a mismatch, stderr reports it,
//   nothing is moved, the operation never ends, and the communicator's asynchronous error is ncclInvalidArgument (NCCL would
//   hang or move garbage).
// - EMU_NCCL_TIMEOUT=seconds ends a program in which an operation waits for other ranks longer than that, and names it.
// - EMU_NCCL_HANG=N or N:CODE: the Nth operation of each communicator outside of groups never ends, as if another rank
//   were missing. CODE: the communicator's asynchronous error.
// - EMU_NCCL_MEMORY_MB=N: each communicator allocates N MiB of the device at its first operation, like NCCL's buffers,
//   and fails with ncclUnhandledCudaError if they are not free.
// - ncclCommAbort, from any thread, ends the communicator's operations, so that streams continue; their results are undefined.
// - A rank that ends by exit() with an error ends all ranks, as the launcher would.
// Operations advance while the host waits for a stream or an event or calls MPI_Test or MPI_Testall, which are intercepted for
// that: a GPU needs no host. So a host that waits in a blocking MPI call must not expect other ranks to need its streams.
// Not supported: reductions of fp16 and fp8 (they can be moved), reductions made by ncclRedOpCreate, ncclCommInitRank and
// ncclCommSplit inside of a group, several GPUs in one process, registered memory. The rank that created an id must be one of
// the communicator's. Cost: a ring moves 2 (n - 1) / n of the buffer (all-reduce), in messages of 1 GiB at most
// (EMU_NCCL_PIECE=bytes).
#pragma once
#undef OMPI_SKIP_MPICXX
#undef MPICH_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <cuda_runtime.h>
#include <mpi.h>

#include "nccl_numbers.h"
#include <unistd.h>
#include <stdarg.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// ---- types and enumerators -------------------------------------------------------------------------------------------------
#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9
#define NCCL_SUFFIX ""
#define NCCL_VERSION_CODE 22809
#define NCCL_VERSION(X, Y, Z) (((X) <= 2 && (Y) <= 8) ? (X)*1000 + (Y)*100 + (Z) : (X)*10000 + (Y)*100 + (Z))
#define NCCL_COMM_NULL NULL
#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR -1

typedef struct ncclComm* ncclComm_t;
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

typedef struct ncclConfig_v22800 {
    size_t size;
    unsigned int magic;
    unsigned int version;
    int blocking;
    int cgaClusterSize;
    int minCTAs;
    int maxCTAs;
    const char* netName;
    int splitShare;
    int trafficClass;
    const char* commName;
    int collnetEnable;
    int CTAPolicy;
    int shrinkShare;
    int nvlsCTAs;
    int nChannelsPerNetPeer;
    int nvlinkCentricSched;
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER                                                                                                \
    {                                                                                                                          \
        sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH), NCCL_CONFIG_UNDEF_INT,             \
            NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, \
            NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_PTR, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, \
            NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT                                                \
    }

struct ncclComm {
    MPI_Comm mpi = MPI_COMM_NULL;
    int rank = 0, size = 0;
    bool finalized = false;
    std::atomic<ncclResult_t> error{ncclSuccess};  // the error that made the communicator unusable
    std::atomic<bool> aborted{false};
    emu::Ticket last;  // operation: the next one runs after it
    // NCCL's own streams: after each operation the first one waits for it (NCCL 2.28, src/enqueue.cc), which also holds streams
    // that share its connection (streams.h).
    cudaStream_t own[2] = {emu::streams().create(false), emu::streams().create(false)};
    // Numbers of operations: of all ranks, and to and from each one. Equal at both ends, they determine the messages' tags.
    unsigned collectives = 0;
    int calls = 0;            // for EMU_NCCL_HANG
    void* buffers = nullptr;  // of EMU_NCCL_MEMORY_MB
    std::vector<unsigned> sent, received;

    ~ncclComm() {
        for (const cudaStream_t s : own) emu::streams().destroy(s);
    }
};

namespace emu::nccl {

// ---- errors ----------------------------------------------------------------------------------------------------------------
// Texts are kept: another thread may still be reading an earlier one.
inline std::atomic<const char*>& last_error() {
    static std::atomic<const char*> text{""};
    return text;
}
inline void set_last_error(const char* text) {
    static std::mutex mutex;
    static std::deque<std::string> all;
    const std::lock_guard<std::mutex> lock(mutex);
    last_error() = all.emplace_back(text).c_str();
}
// A thread's state between ncclGroupStart and ncclGroupEnd, and the first refused call there.
struct Group {
    int depth = 0;
    ncclResult_t error = ncclSuccess;
};
inline Group& group() {
    static thread_local Group g;
    return g;
}
// Ends a refused call: its text for ncclGetLastError, its code also for ncclGroupEnd.
__attribute__((format(printf, 2, 3))) inline ncclResult_t refuse(ncclResult_t code, const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    set_last_error(text);
    if (group().depth && group().error == ncclSuccess) group().error = code;
    return code;
}

// ---- MPI -------------------------------------------------------------------------------------------------------------------
// Called at exit. MPI_Finalize waits for all ranks; after an error they may be waiting for this one.
inline void leave_mpi(int status, void*) {
    int finalized;
    MPI_Finalized(&finalized);
    if (finalized) return;
    if (status == 0) MPI_Finalize();
    else MPI_Abort(MPI_COMM_WORLD, status);
}
inline bool enter_mpi() {
    int initialized, finalized, level;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized && MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) == MPI_SUCCESS)
        initialized = on_exit(leave_mpi, nullptr) == 0;
    return initialized && !finalized;
}
inline int world_rank() {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}
// The maximum message size. MPI counts in int.
inline size_t piece_bytes() {
    static const char* bytes = getenv("EMU_NCCL_PIECE");
    return bytes ? std::max<size_t>(1, std::min<size_t>(INT_MAX, strtoull(bytes, nullptr, 10))) : (size_t)1 << 30;
}

// Ends the program when nothing has moved for EMU_NCCL_TIMEOUT seconds.
struct Patience {
    double since = MPI_Wtime(), limit = getenv("EMU_NCCL_TIMEOUT") ? atof(getenv("EMU_NCCL_TIMEOUT")) : 1e30;
    void renew() { since = MPI_Wtime(); }
    double waited() const { return MPI_Wtime() - since; }
    template <class Describe>
    void look(Describe describe) const {
        if (waited() > limit)
            fault("NCCL, world rank %d: nothing has moved for %g s: %s", world_rank(), limit, describe().c_str());
    }
};
inline void finish(MPI_Request request, const char* what) {
    const Patience patience;
    for (int done = 0; MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done;) {
        patience.look([=] { return std::string(what); });
        usleep((unsigned)std::min(15 + patience.waited() * 1e6 / 8, 150.0));
    }
}
inline void send_now(const void* data, size_t bytes, int world_peer, int tag) {
    MPI_Request request;
    MPI_Isend(data, (int)bytes, MPI_BYTE, world_peer, tag, MPI_COMM_WORLD, &request);
    finish(request, "ncclCommInitRank sends to another rank");
}
inline void receive_now(void* data, size_t bytes, int world_peer, int tag) {
    MPI_Request request;
    MPI_Irecv(data, (int)bytes, MPI_BYTE, world_peer, tag, MPI_COMM_WORLD, &request);
    finish(request, "ncclCommInitRank waits for other ranks to call it with the same id");
}

// ---- operations ------------------------------------------------------------------------------------------------------------
enum class Kind { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Send, Recv };
inline const char* name_of(Kind kind) {
    static const char* const names[] = {"ncclAllReduce",     "ncclReduce", "ncclBroadcast", "ncclAllGather",
                                        "ncclReduceScatter", "ncclSend",   "ncclRecv"};
    return names[(int)kind];
}

// Exchanged by ranks before they start.
struct Header {
    uint64_t count;
    int32_t kind, type, op, root;
    bool operator==(const Header& h) const {
        return count == h.count && kind == h.kind && type == h.type && op == h.op && root == h.root;
    }
};

// One call on one rank, as steps: the messages of a step have all arrived before the next step starts. Step 0 compares headers.
struct Operation {
    Kind kind;
    ncclComm* comm;
    const char* source;
    char* result;
    size_t count;  // as in the call: of a block for all-gather and reduce-scatter, of the whole buffer else
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer;  // of a send or receive, or the root, or -1
    cudaStream_t stream;
    unsigned number = 0;  // among operations that the other end also counts
    int step = 0;
    bool finished = false, disagrees = false;
    std::vector<MPI_Request> requests;
    std::vector<Header> headers;                           // this rank's, then the others'
    std::vector<char> outgoing, incoming, private_result;  // partial sums; ncclReduce's result on non-root ranks

    Operation(Kind kind_, ncclComm* comm_, const void* source_, void* result_, size_t count_, ncclDataType_t type_,
              ncclRedOp_t op_, int peer_, cudaStream_t stream_)
        : kind(kind_),
          comm(comm_),
          source((const char*)source_),
          result((char*)result_),
          count(count_),
          type(type_),
          op(op_),
          peer(peer_),
          stream(stream_) {}
    bool to_one() const { return kind == Kind::Send || kind == Kind::Recv; }
    size_t bytes(size_t n) const { return n * info(type).bytes; }
    std::string describe() const {
        std::string s = std::string(name_of(kind)) + " of " + std::to_string(count) + " " + info(type).name;
        if (kind == Kind::Send) s += " to rank " + std::to_string(peer);
        if (kind == Kind::Recv) s += " from rank " + std::to_string(peer);
        return s + " as rank " + std::to_string(comm->rank) + " of " + std::to_string(comm->size);
    }

    // Three streams of messages between two ranks: of collectives, from sender to receiver, and back. 4096 operations of each
    // can be in flight; MPI guarantees tags up to 32767.
    enum Stream { Collective, Forward, Backward };
    int tag(Stream stream) const { return (int)(number % 4096) * 4 + stream; }
    Stream data_stream() const { return to_one() ? Forward : Collective; }
    void post(bool sends, void* data, size_t n_bytes, int rank, Stream stream) {
        for (size_t at = 0; at < n_bytes; at += piece_bytes()) {
            const int part = (int)std::min(n_bytes - at, piece_bytes());
            requests.emplace_back();
            if (sends) MPI_Isend((char*)data + at, part, MPI_BYTE, rank, tag(stream), comm->mpi, &requests.back());
            else MPI_Irecv((char*)data + at, part, MPI_BYTE, rank, tag(stream), comm->mpi, &requests.back());
        }
    }
    void post_send(const void* data, size_t n_bytes, int rank) { post(true, (void*)data, n_bytes, rank, data_stream()); }
    void post_receive(void* data, size_t n_bytes, int rank) { post(false, data, n_bytes, rank, data_stream()); }

    void exchange_headers() {
        const bool rooted = kind == Kind::Reduce || kind == Kind::Broadcast;
        const Kind told = kind == Kind::Recv ? Kind::Send : kind;
        headers.assign(1, {count, (int32_t)told, (int32_t)type, (int32_t)op, rooted ? peer : -1});
        std::vector<int> others;
        if (to_one()) others = {peer};
        else
            for (int rank = 0; rank < comm->size; rank++)
                if (rank != comm->rank) others.push_back(rank);
        headers.resize(1 + others.size());
        for (size_t i = 0; i < others.size(); i++) {
            post(true, &headers[0], sizeof(Header), others[i], kind == Kind::Recv ? Backward : data_stream());
            post(false, &headers[1 + i], sizeof(Header), others[i], kind == Kind::Send ? Backward : data_stream());
        }
    }
    bool agreed() {
        for (const Header& h : headers) {
            if (h == headers[0]) continue;
            refuse(ncclInvalidArgument, "%s, but another rank: %s of %zu %s (operation %d, root %d; here %d, %d)",
                   describe().c_str(), name_of((Kind)h.kind), (size_t)h.count, info((ncclDataType_t)h.type).name, h.op, h.root,
                   headers[0].op, headers[0].root);
            fprintf(stderr, "emulated NCCL, world rank %d: %s\n", world_rank(), last_error().load());
            comm->error = ncclInvalidArgument;
            return false;
        }
        return true;
    }

    // Makes all progress that is possible without waiting; returns true if there was any.
    bool advance() {
        if (disagrees) return false;
        if (!requests.empty()) {
            int done;
            PMPI_Testall((int)requests.size(), requests.data(), &done, MPI_STATUSES_IGNORE);
            if (!done) return false;
            requests.clear();
        }
        if (step == 0) exchange_headers();
        else if (step == 1 && !agreed()) disagrees = true;
        else run(step - 1);
        step++;
        return true;
    }
    void run(int s) {
        if (kind == Kind::Send && s == 0) post_send(source, bytes(count), peer);
        else if (kind == Kind::Recv && s == 0) post_receive(result, bytes(count), peer);
        else if (kind == Kind::Broadcast && s == 0) broadcast();
        else if (to_one() || kind == Kind::Broadcast) finished = true;
        else ring(s);
    }
    void broadcast() {
        if (comm->rank != peer) return post_receive(result, bytes(count), peer);
        if (bytes(count) && result != source) memcpy(result, source, bytes(count));
        for (int rank = 0; rank < comm->size; rank++)
            if (rank != peer) post_send(result, bytes(count), rank);
    }

    // The ring: each rank sends to the next. Over n - 1 steps the blocks travel around the ring and are summed, block b ends at
    // rank b; over n - 1 further steps the complete blocks travel around. Reduce-scatter is the first half, all-gather the
    // second, all-reduce both; reduce is an all-reduce whose result only the root uses.
    struct Block {
        size_t begin, count;
    };
    Block block(int b) const {  // modulo n
        const size_t n = (size_t)comm->size, i = (size_t)b % n;
        if (kind == Kind::AllGather || kind == Kind::ReduceScatter) return {i * count, count};
        return {count / n * i + std::min(i, count % n), count / n + (i < count % n)};
    }
    void ring(int s) {
        const int n = comm->size, rank = comm->rank, next = (rank + 1) % n, previous = (rank + n - 1) % n;
        const int reducing = kind == Kind::AllGather ? 0 : n - 1, gathering = kind == Kind::ReduceScatter ? 0 : n - 1;
        if (s == 0 && kind == Kind::AllGather && count && source != result + bytes(rank * count))
            memcpy(result + bytes(rank * count), source, bytes(count));
        if (s == 0 && kind == Kind::Reduce && rank != peer) {
            private_result.resize(bytes(count));
            result = private_result.data();
        }
        if (s <= reducing && kind != Kind::AllGather) {
            const Block own = block(rank - 1 - s + n);
            outgoing.resize(bytes(own.count));
            accumulate(type, op, n, outgoing.data(), s ? incoming.data() : nullptr, source + bytes(own.begin), own.count);
            if (s < reducing) {
                incoming.resize(bytes(block(rank - 2 - s + 2 * n).count));
                post_send(outgoing.data(), outgoing.size(), next);
                return post_receive(incoming.data(), incoming.size(), previous);
            }
            complete(type, op, n, outgoing.data(), own.count);
            if (own.count)
                memcpy(result + (kind == Kind::ReduceScatter ? 0 : bytes(own.begin)), outgoing.data(), outgoing.size());
        }
        const int g = s - reducing;
        if (g == gathering) {
            finished = true;
            return;
        }
        const Block out = block(rank - g + n), in = block(rank - 1 - g + n);
        post_send(result + bytes(out.begin), bytes(out.count), next);
        post_receive(result + bytes(in.begin), bytes(in.count), previous);
    }
};

using Operations = std::vector<std::unique_ptr<Operation>>;
inline Operations& queue() {
    static thread_local Operations operations;
    return operations;
}
// Operations that run at the same time, as a transfer of a stream.
struct Transfer {
    Operations operations;
    bool hangs = false;
    int hang_with = ncclSuccess;  // asynchronous error
    Patience patience = {};
    double looked = MPI_Wtime();

    // The last one first. A refused one does not stop the others: their peers depend on them.
    Work::Step advance() {
        for (const auto& o : operations)
            if (o->comm->aborted) return abandon();
        if (hangs && hang_with != ncclSuccess) operations[0]->comm->error = (ncclResult_t)hang_with;
        if (hangs) return Work::Step::waits;
        bool moves = false, finished = true;
        const Operation* waiting = nullptr;
        for (auto o = operations.rbegin(); o != operations.rend(); ++o) {
            if ((*o)->finished) continue;
            if ((*o)->advance()) moves = true;
            else waiting = o->get();
            finished &= (*o)->finished;
        }
        if (finished) return Work::Step::ends;
        const double since_looked = MPI_Wtime() - std::exchange(looked, MPI_Wtime());
        if (moves || since_looked > 1) patience.renew();  // the host was elsewhere
        else patience.look([=] { return waiting->describe(); });
        return moves ? Work::Step::moves : Work::Step::waits;
    }
    Work::Step abandon() {
        for (auto& o : operations) (void)o.release();  // MPI may still write to its buffers
        return Work::Step::ends;
    }
};
// Puts operations on their stream. before: the last operations of their communicators.
inline void launch(Operations operations, const std::vector<Ticket>& before, bool may_hang) {
    const auto transfer = std::make_shared<Transfer>();
    transfer->operations = std::move(operations);
    const Operations& all = transfer->operations;
    for (const auto& o : all)
        o->number = o->kind == Kind::Send   ? o->comm->sent[o->peer]++
                    : o->kind == Kind::Recv ? o->comm->received[o->peer]++
                                            : o->comm->collectives++;
    static const char* const hang = getenv("EMU_NCCL_HANG");
    int n = 0;
    transfer->hangs = may_hang && hang && sscanf(hang, "%d:%d", &n, &transfer->hang_with) >= 1 && ++all[0]->comm->calls == n;
    const Ticket ticket = streams().put_transfer(
        all[0]->stream, [=] { return transfer->advance(); }, before);
    for (const auto& o : all) o->comm->last = ticket;
    streams().put(all[0]->comm->own[0], nullptr, ticket);
}

// ---- arguments -------------------------------------------------------------------------------------------------------------
// The existing communicators. Threads other than the creator may query their errors.
struct Communicators {
    std::mutex mutex;
    std::set<const ncclComm*> all;
    void add(const ncclComm* comm) {
        const std::lock_guard<std::mutex> lock(mutex);
        all.insert(comm);
    }
    void remove(const ncclComm* comm) {
        const std::lock_guard<std::mutex> lock(mutex);
        all.erase(comm);
    }
    bool has(const ncclComm* comm) {
        const std::lock_guard<std::mutex> lock(mutex);
        return all.count(comm) > 0;
    }
};
inline Communicators& communicators() {
    static Communicators c;
    return c;
}
inline ncclResult_t check(const char* call, const ncclComm* comm) {
    if (!comm) return refuse(ncclInvalidArgument, "%s: the communicator is NULL", call);
    if (!communicators().has(comm)) return refuse(ncclInvalidArgument, "%s: this communicator does not exist (any more)", call);
    return ncclSuccess;
}
inline bool in_device_memory(const void* p, size_t n_bytes) {
    const auto& all = device().allocations;
    auto found = all.upper_bound((void*)p);
    if (found == all.begin()) return false;
    --found;
    return (const char*)p + n_bytes <= (const char*)found->first + found->second;
}
inline ncclResult_t check_buffer(const char* call, const char* which, const void* p, size_t n_bytes, size_t align) {
    if (!n_bytes) return ncclSuccess;
    if (!p) return refuse(ncclInvalidArgument, "%s: %s is NULL", call, which);
    if ((uintptr_t)p % align)
        return refuse(ncclInvalidArgument, "%s: %s %p is not aligned to %zu bytes", call, which, p, align);
    if (!in_device_memory(p, n_bytes))
        return refuse(ncclInvalidArgument, "%s: %s: %zu bytes at %p are not device memory", call, which, n_bytes, p);
    return ncclSuccess;
}

inline bool has_buffers(ncclComm* comm) {
    static const char* const mb = getenv("EMU_NCCL_MEMORY_MB");
    return !mb || comm->buffers || cudaMalloc(&comm->buffers, (size_t)atol(mb) << 20) == cudaSuccess;
}

// A collective, or a send or receive: checked, then queued in a group or run at once. `peer` is the root, or -1 if there is
// none.
inline ncclResult_t start(Kind kind, const void* source, void* result, size_t count, ncclDataType_t type, ncclRedOp_t op,
                          int peer, ncclComm* comm, cudaStream_t stream) {
    const char* call = name_of(kind);
    if (const ncclResult_t e = check(call, comm)) return e;
    if (comm->error) return refuse(comm->error, "%s: an earlier operation has made this communicator unusable", call);
    if (comm->finalized) return refuse(ncclInvalidUsage, "%s: this communicator is finalized", call);
    if ((int)type < 0 || type >= ncclNumTypes)
        return refuse(ncclInvalidArgument, "%s: there is no data type %d", call, (int)type);
    const bool reduces = kind == Kind::AllReduce || kind == Kind::Reduce || kind == Kind::ReduceScatter;
    if (reduces && ((int)op < 0 || op >= ncclNumOps))
        return refuse(ncclInvalidArgument, "%s: there is no operation %d", call, (int)op);
    if (reduces && !info(type).reducible)
        return refuse(ncclInvalidArgument, "%s: reductions in %s are not emulated", call, info(type).name);
    const bool to_one = kind == Kind::Send || kind == Kind::Recv, rooted = kind == Kind::Reduce || kind == Kind::Broadcast;
    if ((to_one || rooted) && (peer < 0 || peer >= comm->size))
        return refuse(ncclInvalidArgument, "%s: %s %d is not in [0, %d)", call, rooted ? "root" : "peer", peer, comm->size);

    const size_t element = info(type).bytes, ranks = (size_t)comm->size, rank = (size_t)comm->rank, n_bytes = count * element;
    if (count > SIZE_MAX / 16 / element / ranks)
        return refuse(ncclInvalidArgument, "%s: the count %zu is too large", call, count);
    const bool reads = kind == Kind::Broadcast ? (int)rank == peer : kind != Kind::Recv;
    const bool writes = kind == Kind::Reduce ? (int)rank == peer : kind != Kind::Send;
    const size_t read_bytes = kind == Kind::ReduceScatter ? n_bytes * ranks : n_bytes,
                 written_bytes = kind == Kind::AllGather ? n_bytes * ranks : n_bytes;
    if (reads)
        if (const ncclResult_t e = check_buffer(call, "sendbuff", source, read_bytes, element)) return e;
    if (writes)
        if (const ncclResult_t e = check_buffer(call, "recvbuff", result, written_bytes, element)) return e;
    if (reads && writes && count) {
        const char *s = (const char*)source, *r = (const char*)result;
        const bool in_place = kind == Kind::AllGather       ? s == r + rank * n_bytes
                              : kind == Kind::ReduceScatter ? r == s + rank * n_bytes
                                                            : s == r;
        if (!in_place && s < r + written_bytes && r < s + read_bytes)
            return refuse(ncclInvalidArgument, "%s: the buffers overlap, but not as for work in place", call);
    }
    if (!has_buffers(comm)) return refuse(ncclUnhandledCudaError, "%s: Failed to CUDA calloc the communicator's buffers", call);
    const bool grouped = group().depth > 0;
    Operations one;
    Operations& to = grouped ? queue() : one;
    to.push_back(std::make_unique<Operation>(kind, comm, source, result, count, type, op, peer, stream));
    if (!grouped) launch(std::move(one), {comm->last}, true);
    return ncclSuccess;
}

// ---- communicators ---------------------------------------------------------------------------------------------------------
struct Id {
    char magic[16];
    int creator;  // rank in the world
    unsigned counter;
};
constexpr char id_magic[16] = "emulated NCCL";

inline ncclComm* new_communicator(MPI_Comm mpi) {
    auto* comm = new ncclComm;
    comm->mpi = mpi;
    MPI_Comm_rank(mpi, &comm->rank);
    MPI_Comm_size(mpi, &comm->size);
    comm->sent.assign((size_t)comm->size, 0);
    comm->received = comm->sent;
    communicators().add(comm);
    return comm;
}
inline ncclResult_t check_config(const char* call, const ncclConfig_t* config) {
    if (config && (config->magic != 0xcafebeef || config->size != sizeof(ncclConfig_t)))
        return refuse(ncclInvalidArgument, "%s: the config was not set to NCCL_CONFIG_INITIALIZER", call);
    const auto valid = [](int n) { return n == NCCL_CONFIG_UNDEF_INT || (n >= 1 && n <= 64); };
    if (config && (!valid(config->minCTAs) || !valid(config->maxCTAs) ||
                   (config->maxCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs < config->minCTAs)))
        return refuse(ncclInvalidArgument, "%s: %d to %d CTAs", call, config->minCTAs, config->maxCTAs);
    return ncclSuccess;
}

// The world ranks of a communicator's members, in its order: each member reports to the id's creator, which sends the list to
// all. Empty on all of them if they are inconsistent.
inline std::vector<int> find_members(const Id& id, int size, int rank) {
    struct Report {
        int size, rank, world_rank;
    };
    const int report_tag = 32000 + 2 * (int)(id.counter % 256), answer_tag = report_tag + 1;  // above the tags of operations
    std::vector<int> members((size_t)size, -1);
    int fits = 1;
    const Report own = {size, rank, world_rank()};
    if (id.creator != own.world_rank) {
        send_now(&own, sizeof own, id.creator, report_tag);
        receive_now(&fits, sizeof fits, id.creator, answer_tag);
        if (fits) receive_now(members.data(), members.size() * sizeof(int), id.creator, answer_tag);
    } else {
        static std::set<unsigned> used;
        fits = used.insert(id.counter).second;
        members[(size_t)rank] = own.world_rank;
        std::vector<int> reporters;
        for (int i = 1; i < size; i++) {
            Report r;
            receive_now(&r, sizeof r, MPI_ANY_SOURCE, report_tag);
            reporters.push_back(r.world_rank);
            if (r.size != size || members[(size_t)r.rank] != -1) fits = 0;  // r.rank < r.size was checked by the sender
            else members[(size_t)r.rank] = r.world_rank;
        }
        for (int reporter : reporters) {
            send_now(&fits, sizeof fits, reporter, answer_tag);
            if (fits) send_now(members.data(), members.size() * sizeof(int), reporter, answer_tag);
        }
    }
    return fits ? members : std::vector<int>();
}

}  // namespace emu::nccl

// The host waits for other ranks here, which may need work on this rank's streams.
extern "C" inline int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
    emu::streams().progress();
    return PMPI_Test(request, done, status);
}
extern "C" inline int MPI_Testall(int n, MPI_Request* requests, int* done, MPI_Status* statuses) {
    emu::streams().progress();
    return PMPI_Testall(n, requests, done, statuses);
}

// ---- the library's functions -----------------------------------------------------------------------------------------------
inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInternalError: return "internal error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}
inline const char* ncclGetLastError(ncclComm_t) { return emu::nccl::last_error(); }

inline ncclResult_t ncclGetVersion(int* version) {
    if (!version) return emu::nccl::refuse(ncclInvalidArgument, "ncclGetVersion: version is NULL");
    return *version = NCCL_VERSION_CODE, ncclSuccess;
}

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* unique_id) {
    using namespace emu::nccl;
    if (!unique_id) return refuse(ncclInvalidArgument, "ncclGetUniqueId: uniqueId is NULL");
    if (!enter_mpi()) return refuse(ncclSystemError, "ncclGetUniqueId: MPI cannot be initialized, or is finalized already");
    static unsigned counter = 0;
    Id id = {};
    memcpy(id.magic, id_magic, sizeof id.magic);
    id.creator = world_rank();
    id.counter = counter++;
    *unique_id = {};
    memcpy(unique_id->internal, &id, sizeof id);
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId unique_id, int rank,
                                           ncclConfig_t* config) {
    EMU_CALLED();
    using namespace emu::nccl;
    const char* call = "ncclCommInitRank";
    if (!comm) return refuse(ncclInvalidArgument, "%s: comm is NULL", call);
    *comm = nullptr;
    if (const ncclResult_t e = check_config(call, config)) return e;
    if (nranks < 1 || rank < 0 || rank >= nranks)
        return refuse(ncclInvalidArgument, "%s: rank %d is not in [0, %d)", call, rank, nranks);
    Id id;
    memcpy(&id, unique_id.internal, sizeof id);
    if (memcmp(id.magic, id_magic, sizeof id.magic) != 0)
        return refuse(ncclInvalidArgument, "%s: commId is not from ncclGetUniqueId", call);
    if (group().depth) return refuse(ncclInvalidUsage, "%s: inside of a group it is not emulated", call);
    if (!enter_mpi()) return refuse(ncclSystemError, "%s: MPI cannot be initialized, or is finalized already", call);
    int world;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (nranks > world) return refuse(ncclInvalidUsage, "%s: %d ranks, but %d processes", call, nranks, world);
    MPI_Comm mpi = MPI_COMM_NULL;
    if (nranks == 1) MPI_Comm_dup(MPI_COMM_SELF, &mpi);
    else {
        const std::vector<int> members = find_members(id, nranks, rank);
        if (members.empty())
            return refuse(ncclInvalidArgument,
                          "%s: as rank %d of %d: ranks are missing or named twice, sizes differ, or the id was used before",
                          call, rank, nranks);
        MPI_Group all, some;
        MPI_Comm_group(MPI_COMM_WORLD, &all);
        MPI_Group_incl(all, nranks, members.data(), &some);
        MPI_Comm_create_group(MPI_COMM_WORLD, some, 31000 + (int)(id.counter % 256), &mpi);
        MPI_Group_free(&some);
        MPI_Group_free(&all);
    }
    return *comm = new_communicator(mpi), ncclSuccess;
}
inline ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId unique_id, int rank) {
    return ncclCommInitRankConfig(comm, nranks, unique_id, rank, nullptr);
}
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
    EMU_CALLED();
    using namespace emu::nccl;
    const char* call = "ncclCommSplit";
    if (const ncclResult_t e = check(call, comm)) return e;
    if (!newcomm) return refuse(ncclInvalidArgument, "%s: newcomm is NULL", call);
    *newcomm = nullptr;
    if (const ncclResult_t e = check_config(call, config)) return e;
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
        return refuse(ncclInvalidArgument, "%s: the color %d is negative", call, color);
    if (comm->error || comm->finalized) return refuse(ncclInvalidUsage, "%s: the communicator is finalized or unusable", call);
    if (group().depth) return refuse(ncclInvalidUsage, "%s: inside of a group it is not emulated", call);
    MPI_Comm mpi;
    MPI_Comm_split(comm->mpi, color == NCCL_SPLIT_NOCOLOR ? MPI_UNDEFINED : color, key, &mpi);
    if (mpi != MPI_COMM_NULL) *newcomm = new_communicator(mpi);
    return ncclSuccess;
}

inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    using namespace emu::nccl;
    if (const ncclResult_t e = check("ncclCommFinalize", comm)) return e;
    if (comm->finalized) return refuse(ncclInvalidArgument, "ncclCommFinalize: for the second time");
    return comm->finalized = true, ncclSuccess;
}
// Ends operations in flight, and keeps MPI's objects: freeing them is collective, and the other ranks may be gone.
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
    using namespace emu::nccl;
    if (!comm) return ncclSuccess;
    if (const ncclResult_t e = check("ncclCommAbort", comm)) return e;
    communicators().remove(comm);
    return comm->aborted = true, ncclSuccess;
}
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    using namespace emu::nccl;
    if (!comm) return ncclSuccess;
    if (const ncclResult_t e = check("ncclCommDestroy", comm)) return e;
    for (const auto& operation : queue())
        if (operation->comm == comm)
            return refuse(ncclInvalidUsage, "ncclCommDestroy: %s is still in an open group", operation->describe().c_str());
    if (comm->error) return ncclCommAbort(comm);
    if (comm->last) emu::streams().finish(comm->last);
    int finalized;
    MPI_Finalized(&finalized);
    if (!finalized) MPI_Comm_free(&comm->mpi);
    communicators().remove(comm);
    cudaFree(comm->buffers);
    return delete comm, ncclSuccess;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    using namespace emu::nccl;
    if (const ncclResult_t e = check("ncclCommGetAsyncError", comm)) return e;
    if (!error) return refuse(ncclInvalidArgument, "ncclCommGetAsyncError: asyncError is NULL");
    return *error = comm->error, ncclSuccess;
}
inline ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    using namespace emu::nccl;
    if (const ncclResult_t e = check("ncclCommCount", comm)) return e;
    if (!count) return refuse(ncclInvalidArgument, "ncclCommCount: count is NULL");
    return *count = comm->size, ncclSuccess;
}
inline ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    using namespace emu::nccl;
    if (const ncclResult_t e = check("ncclCommUserRank", comm)) return e;
    if (!rank) return refuse(ncclInvalidArgument, "ncclCommUserRank: rank is NULL");
    return *rank = comm->rank, ncclSuccess;
}

inline ncclResult_t ncclGroupStart() { return emu::nccl::group().depth++, ncclSuccess; }
// Ends the outermost group: starts its operations, unless one of its calls was refused.
inline ncclResult_t ncclGroupEnd() {
    using namespace emu::nccl;
    emu::nccl::Group& g = group();
    if (!g.depth) return refuse(ncclInvalidUsage, "ncclGroupEnd: there is no group");
    if (--g.depth) return ncclSuccess;
    const ncclResult_t error = g.error;
    g.error = ncclSuccess;
    Operations operations;
    operations.swap(queue());
    std::vector<emu::Ticket> before;
    for (const auto& o : operations) before.push_back(o->comm->last);
    while (!error && !operations.empty()) {  // grouped by stream
        const cudaStream_t stream = operations[0]->stream;
        Operations some, rest;
        for (auto& o : operations) (o->stream == stream ? some : rest).push_back(std::move(o));
        launch(std::move(some), before, false);
        operations = std::move(rest);
    }
    return error;
}

inline ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                  ncclComm_t comm, cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::AllReduce, sendbuff, recvbuff, count, type, op, -1, comm, stream);
}
inline ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               int root, ncclComm_t comm, cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::Reduce, sendbuff, recvbuff, count, type, op, root, comm, stream);
}
inline ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::Broadcast, sendbuff, recvbuff, count, type, ncclSum, root, comm, stream);
}
inline ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::AllGather, sendbuff, recvbuff, sendcount, type, ncclSum, -1, comm, stream);
}
inline ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t type,
                                      ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::ReduceScatter, sendbuff, recvbuff, recvcount, type, op, -1, comm, stream);
}
inline ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::Send, sendbuff, nullptr, count, type, ncclSum, peer, comm, stream);
}
inline ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream) {
    return emu::nccl::start(emu::nccl::Kind::Recv, nullptr, recvbuff, count, type, ncclSum, peer, comm, stream);
}
