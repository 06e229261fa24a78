// Checks of NCCL's collectives, for the emulated library (nccl.h in this folder), run by test/nccl_test.sh on several
// ranks. Rank 0 prints `ok: NAME` or `FAILED: NAME` per check. Except under BACKEND_EMU, it relies only on guarantees of
// the real library, and so can check that too, with a GPU per rank:
//   nvcc -std=c++17 -x cu test/emu/nccl_check.cpp -I/usr/lib/x86_64-linux-gnu/openmpi/include -lmpi -lnccl -o nccl_check
//   mpirun -n 2 ./nccl_check
// Numbers are small integers, exact in every type; 1/n must be a power of two for avg to be exact (1, 2, 4, 8 ranks).
//   nccl_check              all checks; initializes MPI here
//   nccl_check short        all checks, with nothing larger than 12 kB
//   nccl_check lazy         a few; the library initializes MPI
//   nccl_check hang|die     a few, then a send that nobody receives; a rank that gives up while others wait
#define OMPI_SKIP_MPICXX 1  // without the C++ bindings, which were removed from MPI
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

static int world_rank, world_size;

static void report(const std::string& name, bool passed) {
    int mine = passed, all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (world_rank != 0) return;
    printf("%s: %s\n", all ? "ok" : "FAILED", name.c_str());
    fflush(stdout);
}
static bool good(ncclResult_t result) {
    if (result != ncclSuccess)
        fprintf(stderr, "rank %d: %s: %s\n", world_rank, ncclGetErrorString(result), ncclGetLastError(nullptr));
    return result == ncclSuccess;
}
static void must(ncclResult_t result) {
    if (!good(result)) exit(1);
}
static void must(cudaError_t e) {
    if (e == cudaSuccess) return;
    fprintf(stderr, "rank %d: %s\n", world_rank, cudaGetErrorString(e));
    exit(1);
}

// ---- types -----------------------------------------------------------------------------------------------------------------
struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(double x) {  // exact for the numbers used here
        const float f = (float)x;
        uint32_t u;
        memcpy(&u, &f, 4);
        bits = (uint16_t)(u >> 16);
    }
    operator double() const {
        const uint32_t u = (uint32_t)bits << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
};
template <class T>
struct Type;
#define TYPE(T, value)                              \
    template <>                                     \
    struct Type<T> {                                \
        static constexpr ncclDataType_t id = value; \
        static constexpr const char* name = #value; \
    };
TYPE(int8_t, ncclInt8)
TYPE(uint8_t, ncclUint8)
TYPE(int32_t, ncclInt32)
TYPE(uint32_t, ncclUint32)
TYPE(int64_t, ncclInt64)
TYPE(uint64_t, ncclUint64)
TYPE(float, ncclFloat32)
TYPE(double, ncclFloat64)
TYPE(bf16, ncclBfloat16)

// Device memory between two guards.
template <class T>
struct Buffer {
    static constexpr size_t guard = 256 / sizeof(T);
    T* base = nullptr;
    size_t count;
    explicit Buffer(size_t n) : count(n) {
        must(cudaMalloc((void**)&base, (n + 2 * guard) * sizeof(T)));
        must(cudaMemset(base, 0xff, (n + 2 * guard) * sizeof(T)));
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(base); }
    T* data() const { return base + guard; }
    void fill(size_t at, size_t n, const std::function<double(size_t)>& value) {
        std::vector<T> host(n);
        for (size_t i = 0; i < n; i++) host[i] = (T)value(i);
        must(cudaMemcpy(data() + at, host.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> host() const {
        must(cudaDeviceSynchronize());
        std::vector<T> all(count + 2 * guard);
        must(cudaMemcpy(all.data(), base, all.size() * sizeof(T), cudaMemcpyDeviceToHost));
        return all;
    }
    // Elements [at, at + n) have these values, and the guards are intact.
    bool holds(size_t at, size_t n, const std::function<double(size_t)>& value) const {
        const std::vector<T> all = host();
        for (size_t i = 0; i < n; i++)
            if (!((double)all[guard + at + i] == value(i))) {
                fprintf(stderr, "rank %d: element %zu is %g, not %g\n", world_rank, i, (double)all[guard + at + i], value(i));
                return false;
            }
        return untouched(all, 0, guard) && untouched(all, guard + count, guard);
    }
    static bool untouched(const std::vector<T>& all, size_t at, size_t n) {
        const unsigned char* bytes = (const unsigned char*)(all.data() + at);
        for (size_t i = 0; i < n * sizeof(T); i++)
            if (bytes[i] != 0xff) return fprintf(stderr, "rank %d: a guard was written\n", world_rank), false;
        return true;
    }
    bool untouched() const { return untouched(host(), 0, count + 2 * guard); }
};

// ---- collectives, in one type ----------------------------------------------------------------------------------------------
struct Op {
    ncclRedOp_t id;
    const char* name;
};
static const Op all_ops[] = {{ncclSum, "sum"}, {ncclProd, "prod"}, {ncclMax, "max"}, {ncclMin, "min"}, {ncclAvg, "avg"}};

// Rank r's element i: 1 to 5, or 1 and 2 for products. Periods that share no factor with the sizes of blocks.
static double input(ncclRedOp_t op, int rank, size_t i) {
    return op == ncclProd ? (double)(1 + (i + (size_t)rank) % 2) : (double)(1 + (3 * (size_t)rank + i + i / 7) % 5);
}
static double reduced(ncclRedOp_t op, int n, size_t i, bool integer) {
    double r = input(op, 0, i);
    for (int rank = 1; rank < n; rank++) {
        const double x = input(op, rank, i);
        r = op == ncclProd ? r * x : op == ncclMax ? (x > r ? x : r) : op == ncclMin ? (x < r ? x : r) : r + x;
    }
    return op != ncclAvg ? r : integer ? (double)((long)r / n) : r / n;
}

template <class T>
static void check_type(ncclComm_t comm, int rank, int n, cudaStream_t stream) {
    const ncclDataType_t type = Type<T>::id;
    const bool integer = (T)0.5 == (T)0;
    const std::string in_type = std::string(" ") + (Type<T>::name + 4);
    const size_t ranks = (size_t)n, r = (size_t)rank;
    bool ok = true;
    for (const Op& op : all_ops) {
        for (size_t count : {37, 1, 3}) {  // also fewer elements than ranks
            auto mine = [&](size_t i) { return input(op.id, rank, i); };
            auto sum = [&](size_t i) { return reduced(op.id, n, i, integer); };
            Buffer<T> a(count), b(count);
            a.fill(0, count, mine);
            ok = good(ncclAllReduce(a.data(), b.data(), count, type, op.id, comm, stream)) && b.holds(0, count, sum) &&
                 a.holds(0, count, mine) && ok;
            ok = good(ncclAllReduce(a.data(), a.data(), count, type, op.id, comm, stream)) && a.holds(0, count, sum) && ok;
        }
        if (!ok) fprintf(stderr, "rank %d: in operation %s\n", rank, op.name);
    }
    report("all-reduce" + in_type, ok);

    ok = true;
    for (const Op& op : all_ops) {
        const size_t count = 29;
        auto mine = [&](size_t i) { return input(op.id, rank, i); };
        auto sum = [&](size_t i) { return reduced(op.id, n, i, integer); };
        for (int root = 0; root < n; root++) {
            Buffer<T> a(count), b(count);
            a.fill(0, count, mine);
            ok = good(ncclReduce(a.data(), rank == root ? b.data() : nullptr, count, type, op.id, root, comm, stream)) &&
                 a.holds(0, count, mine) && ok;
            ok = (rank == root ? b.holds(0, count, sum) : b.untouched()) && ok;
            ok = good(ncclReduce(a.data(), a.data(), count, type, op.id, root, comm, stream)) &&
                 (rank != root || a.holds(0, count, sum)) && ok;
        }
    }
    report("reduce" + in_type, ok);

    ok = true;
    for (const Op& op : all_ops) {
        const size_t count = 11;
        auto mine = [&](size_t i) { return input(op.id, rank, i); };
        auto sum = [&](size_t i) { return reduced(op.id, n, r * count + i, integer); };
        Buffer<T> a(count * ranks), b(count);
        a.fill(0, count * ranks, mine);
        ok = good(ncclReduceScatter(a.data(), b.data(), count, type, op.id, comm, stream)) && b.holds(0, count, sum) &&
             a.holds(0, count * ranks, mine) && ok;
        ok = good(ncclReduceScatter(a.data(), a.data() + r * count, count, type, op.id, comm, stream)) &&
             a.holds(r * count, count, sum) && ok;
    }
    report("reduce-scatter" + in_type, ok);

    {
        const size_t count = 13;
        auto everyone = [&](size_t i) { return input(ncclSum, (int)(i / count), i % count); };
        Buffer<T> a(count), b(count * ranks), c(count * ranks);
        a.fill(0, count, [&](size_t i) { return input(ncclSum, rank, i); });
        ok = good(ncclAllGather(a.data(), b.data(), count, type, comm, stream)) && b.holds(0, count * ranks, everyone);
        c.fill(r * count, count, [&](size_t i) { return input(ncclSum, rank, i); });
        ok = good(ncclAllGather(c.data() + r * count, c.data(), count, type, comm, stream)) &&
             c.holds(0, count * ranks, everyone) && ok;
        report("all-gather" + in_type, ok);
    }
    ok = true;
    for (int root = 0; root < n; root++) {
        const size_t count = 31;
        auto roots = [&](size_t i) { return input(ncclSum, root, i); };
        Buffer<T> a(count), b(count);
        a.fill(0, count, [&](size_t i) { return input(ncclSum, rank, i); });
        ok = good(ncclBroadcast(rank == root ? a.data() : nullptr, b.data(), count, type, root, comm, stream)) &&
             b.holds(0, count, roots) && ok;
        ok = good(ncclBroadcast(a.data(), a.data(), count, type, root, comm, stream)) && a.holds(0, count, roots) && ok;
    }
    report("broadcast" + in_type, ok);

    {
        const size_t count = 17;
        const int next = (rank + 1) % n, previous = (rank + n - 1) % n;
        Buffer<T> a(count), b(count);
        a.fill(0, count, [&](size_t i) { return input(ncclSum, rank, i); });
        must(ncclGroupStart());
        ok = good(ncclSend(a.data(), count, type, next, comm, stream));
        ok = good(ncclRecv(b.data(), count, type, previous, comm, stream)) && ok;
        ok = good(ncclGroupEnd()) && b.holds(0, count, [&](size_t i) { return input(ncclSum, previous, i); }) && ok;
        report("ring of send and receive" + in_type, ok);
    }
}

// ---- send and receive, groups ----------------------------------------------------------------------------------------------
static void check_groups(ncclComm_t comm, int rank, int n, size_t large, cudaStream_t stream) {
    const size_t count = 19, ranks = (size_t)n;
    auto value = [](int from, int to, size_t i) { return (double)(100 * from + 10 * to) + (double)(i % 7); };
    {
        // All to all, including this rank, in two messages to each rank that must stay in order.
        Buffer<float> a(2 * count * ranks), b(2 * count * ranks);
        for (int peer = 0; peer < n; peer++)
            a.fill(2 * count * (size_t)peer, 2 * count, [&](size_t i) { return value(rank, peer, i); });
        must(ncclGroupStart());
        for (int peer = 0; peer < n; peer++) {
            for (size_t at : {2 * count * (size_t)peer, 2 * count * (size_t)peer + count}) {
                must(ncclSend(a.data() + at, count, ncclFloat32, peer, comm, stream));
                must(ncclRecv(b.data() + at, count, ncclFloat32, peer, comm, stream));
            }
        }
        bool ok = good(ncclGroupEnd());
        for (int peer = 0; peer < n; peer++)
            ok = b.holds(2 * count * (size_t)peer, 2 * count, [&](size_t i) { return value(peer, rank, i); }) && ok;
        report("all to all in a group", ok);
    }
    {
        // Large: more than MPI sends without waiting for the receiver. Rank 0 to the last rank and back, without a group.
        Buffer<float> a(large);
        bool ok = true;
        if (n > 1 && (rank == 0 || rank == n - 1)) {
            a.fill(0, large, [&](size_t i) { return rank == 0 ? (double)(i % 1000) : 0.0; });
            if (rank == 0)
                ok = good(ncclSend(a.data(), large, ncclFloat32, n - 1, comm, stream)) &&
                     good(ncclRecv(a.data(), large, ncclFloat32, n - 1, comm, stream));
            else
                ok = good(ncclRecv(a.data(), large, ncclFloat32, 0, comm, stream)) &&
                     good(ncclSend(a.data(), large, ncclFloat32, 0, comm, stream));
            ok = a.holds(0, large, [](size_t i) { return (double)(i % 1000); }) && ok;
        }
        report("send there and back", ok);
    }
    {
        // Several collectives and nested groups; results are available after the outermost end.
        Buffer<float> a(count), b(count), c(count * ranks);
        a.fill(0, count, [&](size_t i) { return input(ncclSum, rank, i); });
        must(ncclGroupStart());
        must(ncclAllReduce(a.data(), b.data(), count, ncclFloat32, ncclSum, comm, stream));
        must(ncclGroupStart());
        must(ncclAllGather(a.data(), c.data(), count, ncclFloat32, comm, stream));
        must(ncclGroupEnd());
        bool ok = true;
#ifdef BACKEND_EMU
        ok = b.untouched() && c.untouched();
#endif
        ok = good(ncclGroupEnd()) && ok;
        ok = b.holds(0, count, [&](size_t i) { return reduced(ncclSum, n, i, false); }) && ok;
        ok = c.holds(0, count * ranks, [&](size_t i) { return input(ncclSum, (int)(i / count), i % count); }) && ok;
        report("collectives in nested groups", ok);
    }
    {
        must(ncclGroupStart());
        must(ncclGroupEnd());
        Buffer<float> a(1);
        report("nothing to do: an empty group, a count of 0",
               good(ncclAllReduce(a.data(), a.data(), 0, ncclFloat32, ncclSum, comm, stream)) && a.untouched());
    }
    {
        // Any floats: all ranks and both runs have the same bits.
        const size_t many = 1003;
        Buffer<float> a(many), b(many), c(many);
        a.fill(0, many, [&](size_t i) { return 1.0 / (double)(1 + i * ranks + (size_t)rank); });
        must(ncclAllReduce(a.data(), b.data(), many, ncclFloat32, ncclSum, comm, stream));
        must(ncclAllReduce(a.data(), c.data(), many, ncclFloat32, ncclSum, comm, stream));
        const std::vector<float> first = b.host(), second = c.host();
        std::vector<float> of_rank_0 = first;
        MPI_Bcast(of_rank_0.data(), (int)of_rank_0.size(), MPI_FLOAT, 0, MPI_COMM_WORLD);
        report("the same bits on all ranks, twice", !memcmp(first.data(), second.data(), first.size() * 4) &&
                                                        !memcmp(first.data(), of_rank_0.data(), first.size() * 4));
    }
}

// ---- communicators ---------------------------------------------------------------------------------------------------------
static ncclComm_t communicator(int first_rank, int n, int rank) {  // of n ranks; the world's first_rank creates the id
    std::vector<ncclUniqueId> ids((size_t)world_size);
    ncclUniqueId own;
    must(ncclGetUniqueId(&own));
    MPI_Allgather(&own, sizeof own, MPI_BYTE, ids.data(), sizeof own, MPI_BYTE, MPI_COMM_WORLD);
    ncclComm_t comm;
    must(ncclCommInitRank(&comm, n, ids[(size_t)first_rank], rank));
    return comm;
}
static bool sums_to(ncclComm_t comm, double own, double sum, cudaStream_t stream) {
    Buffer<float> a(5);
    a.fill(0, 5, [&](size_t) { return own; });
    return good(ncclAllReduce(a.data(), a.data(), 5, ncclFloat32, ncclSum, comm, stream)) &&
           a.holds(0, 5, [&](size_t) { return sum; });
}
static bool is_rank(ncclComm_t comm, int rank, int size) {
    int r = -1, n = -1;
    return good(ncclCommUserRank(comm, &r)) && good(ncclCommCount(comm, &n)) && r == rank && n == size;
}

static void check_grid(ncclComm_t row, ncclComm_t column, int columns, const std::string& name, cudaStream_t stream) {
    const int rows = world_size / columns, y = world_rank / columns, x = world_rank % columns;
    double row_sum = 0, column_sum = 0;
    for (int i = 0; i < columns; i++) row_sum += 1 + y * columns + i;
    for (int i = 0; i < rows; i++) column_sum += 1 + i * columns + x;
    report(name + ": ranks and sizes", is_rank(row, x, columns) && is_rank(column, y, rows));
    bool ok = sums_to(row, 1 + world_rank, row_sum, stream) && sums_to(column, 1 + world_rank, column_sum, stream);
    ok = sums_to(column, 1 + world_rank, column_sum, stream) && sums_to(row, 1 + world_rank, row_sum, stream) && ok;
    report(name + ": sums", ok);
}
static void check_communicators(ncclComm_t world, cudaStream_t stream) {
    // 2 x 2 on four ranks, 1 x 2 on two, 1 x 1 on one.
    const int columns = world_size % 2 ? 1 : 2, rows = world_size / columns, y = world_rank / columns, x = world_rank % columns;
    ncclComm_t row, column;
    must(ncclCommSplit(world, y, x, &row, nullptr));
    must(ncclCommSplit(world, x, y, &column, nullptr));
    check_grid(row, column, columns, "grid by split", stream);
    must(ncclCommDestroy(row));
    must(ncclCommDestroy(column));
    row = communicator(y * columns, columns, x);
    column = communicator(x, rows, y);
    check_grid(row, column, columns, "grid by ids", stream);
    must(ncclCommFinalize(row));
    must(ncclCommDestroy(row));
    must(ncclCommDestroy(column));

    // Keys reverse the order; a rank without a color is in no communicator.
    ncclComm_t reversed, others;
    must(ncclCommSplit(world, 7, -world_rank, &reversed, nullptr));
    report("split in reverse order", is_rank(reversed, world_size - 1 - world_rank, world_size));
    must(ncclCommDestroy(reversed));
    must(ncclCommSplit(world, world_rank == 0 ? NCCL_SPLIT_NOCOLOR : 0, world_rank, &others, nullptr));
    report("split without rank 0",
           world_rank == 0 ? others == nullptr
                           : is_rank(others, world_rank - 1, world_size - 1) && sums_to(others, 1, world_size - 1, stream));
    if (others) must(ncclCommDestroy(others));
    // The id's creator is rank 1 of the communicator, unless there is only one.
    ncclComm_t turned = communicator(0, world_size, (world_rank + 1) % world_size);
    report("an id made by rank 1",
           is_rank(turned, (world_rank + 1) % world_size, world_size) && sums_to(turned, 1, world_size, stream));
    must(ncclCommDestroy(turned));
    ncclResult_t state = ncclInternalError;
    report("no asynchronous error", good(ncclCommGetAsyncError(world, &state)) && state == ncclSuccess);
}

// ---- refusals --------------------------------------------------------------------------------------------------------------
static bool refused(ncclResult_t result, ncclResult_t expected = ncclInvalidArgument) {
    if (result == expected && strlen(ncclGetLastError(nullptr)) > 0) return true;
    fprintf(stderr, "rank %d: got '%s', expected '%s'\n", world_rank, ncclGetErrorString(result), ncclGetErrorString(expected));
    return false;
}
// As documented for NCCL: waits for the stream, or for an asynchronous error.
static ncclResult_t end_or_error(ncclComm_t comm, cudaStream_t stream) {
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess && cudaStreamQuery(stream) == cudaErrorNotReady) must(ncclCommGetAsyncError(comm, &state));
    return state;
}

// Operations that other ranks have not reached block neither the host nor other streams nor other communicators.
static void check_streams(ncclComm_t comm, int rank, int n, size_t count, cudaStream_t stream) {
    cudaStream_t side;
    must(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    ncclComm_t other;
    must(ncclCommSplit(comm, 0, rank, &other, nullptr));
    if (n > 1) {
        // Every rank sends to the next one before it receives, with a communicator and stream for each direction of an edge.
        const int previous = (rank + n - 1) % n;
        std::vector<ncclComm_t> edges((size_t)n);  // from u to u + 1: ranks 0 and 1
        for (int u = 0; u < n; u++) {
            const bool member = u == rank || u == previous;
            must(ncclCommSplit(comm, member ? 0 : NCCL_SPLIT_NOCOLOR, u == rank ? 0 : 1, &edges[(size_t)u], nullptr));
        }
        Buffer<float> out(count), in(count);
        out.fill(0, count, [&](size_t i) { return rank + (double)(i % 100); });
        must(cudaDeviceSynchronize());  // `side` does not wait for the copy
        bool ok = good(ncclSend(out.data(), count, ncclFloat32, 1, edges[(size_t)rank], side));
        ok = good(ncclRecv(in.data(), count, ncclFloat32, 0, edges[(size_t)previous], stream)) && ok;
        must(cudaStreamSynchronize(stream));
        must(cudaStreamSynchronize(side));
        ok = in.holds(0, count, [&](size_t i) { return previous + (double)(i % 100); }) && ok;
        report("all ranks send to the next one before they receive", ok);
        for (ncclComm_t edge : {edges[(size_t)rank], edges[(size_t)previous]}) must(ncclCommDestroy(edge));

        // The last rank reaches the first collective after the others have finished the second one's communicator.
        Buffer<float> a(5), b(5);
        a.fill(0, 5, [](size_t) { return 1; });
        b.fill(0, 5, [](size_t) { return 2; });
        must(cudaDeviceSynchronize());
        const bool late = rank == n - 1;
        const auto first = [&] { return good(ncclAllReduce(a.data(), a.data(), 5, ncclFloat32, ncclSum, comm, side)); };
        const auto second = [&] { return good(ncclAllReduce(b.data(), b.data(), 5, ncclFloat32, ncclSum, other, stream)); };
        ok = late ? second() : first() && second();
        must(cudaStreamSynchronize(stream));
        ok = (late || cudaStreamQuery(side) == cudaErrorNotReady) && ok;
        MPI_Barrier(MPI_COMM_WORLD);
        ok = (!late || first()) && ok;
        must(cudaStreamSynchronize(side));
        ok = a.holds(0, 5, [&](size_t) { return n; }) && b.holds(0, 5, [&](size_t) { return 2 * n; }) && ok;
        report("a communicator that waits blocks no other one", ok);

        // A missing rank: another thread aborts the communicator, and the stream continues.
        ncclComm_t doomed;
        must(ncclCommSplit(comm, 0, rank, &doomed, nullptr));
        ok = late || good(ncclAllReduce(a.data(), a.data(), 5, ncclFloat32, ncclSum, doomed, side));
        std::atomic<bool> waited{false};
        std::thread watchdog([&] {
            while (!waited) std::this_thread::yield();
            must(ncclCommAbort(doomed));
        });
        for (int i = 0; i < 100; i++) ok = (late || cudaStreamQuery(side) == cudaErrorNotReady) && ok;
        waited = true;
        must(cudaStreamSynchronize(side));
        watchdog.join();
        report("aborted by a watchdog: the stream continues", ok && sums_to(comm, 1, n, stream));
    }
    must(ncclCommDestroy(other));
    must(cudaStreamDestroy(side));
}

static void check_refusals(ncclComm_t comm, int n, cudaStream_t stream) {
    Buffer<float> a(64), b(64);
    float* const p = a.data();
    bool ok = refused(ncclAllReduce(nullptr, p, 4, ncclFloat32, ncclSum, comm, stream));
    ok = refused(ncclAllReduce(p, nullptr, 4, ncclFloat32, ncclSum, comm, stream)) && ok;
    ok = refused(ncclAllGather(nullptr, p, 4, ncclFloat32, comm, stream)) && ok;
    ok = refused(ncclReduceScatter(p, nullptr, 4, ncclFloat32, ncclSum, comm, stream)) && ok;
    ok = refused(ncclSend(nullptr, 4, ncclFloat32, 0, comm, stream)) &&
         refused(ncclRecv(nullptr, 4, ncclFloat32, 0, comm, stream)) && ok;
    report("refused: buffers that are NULL", ok);
    ok = true;
    for (int root : {-1, n}) {
        ok = refused(ncclBroadcast(p, p, 4, ncclFloat32, root, comm, stream)) && ok;
        ok = refused(ncclReduce(p, p, 4, ncclFloat32, ncclSum, root, comm, stream)) && ok;
        ok = refused(ncclSend(p, 4, ncclFloat32, root, comm, stream)) &&
             refused(ncclRecv(p, 4, ncclFloat32, root, comm, stream)) && ok;
    }
    report("refused: roots and peers that do not exist", ok);
    ok = refused(ncclAllReduce(p, p, 4, (ncclDataType_t)ncclNumTypes, ncclSum, comm, stream));
    ok = refused(ncclAllReduce(p, p, 4, (ncclDataType_t)15, ncclSum, comm, stream)) && ok;
    ok = refused(ncclAllReduce(p, p, 4, ncclFloat32, ncclNumOps, comm, stream)) && ok;
    ok = refused(ncclAllReduce(p, p, 4, ncclFloat32, ncclSum, nullptr, stream)) && ok;
    report("refused: a type, an operation, a communicator that does not exist", ok);
    ncclUniqueId id;
    ncclComm_t none;
    must(ncclGetUniqueId(&id));
    ok = refused(ncclCommInitRank(&none, 2, id, -1)) && refused(ncclCommInitRank(&none, 2, id, 2)) &&
         refused(ncclCommInitRank(&none, 0, id, 0));
    report("refused: a communicator's rank outside of its size", ok);
    ok = refused(ncclGroupEnd(), ncclInvalidUsage);
    report("refused: the end of no group", ok);
    must(ncclGroupStart());
    ok = refused(ncclBroadcast(p, p, 4, ncclFloat32, n, comm, stream));
    ok = refused(ncclGroupEnd()) && ok;
    report("refused: a group in which a call was refused", ok);
    report("works after refusals", sums_to(comm, 1, n, stream));
    int version = 0;
    report("version", good(ncclGetVersion(&version)) && version >= 20000 && refused(ncclGetVersion(nullptr)));
}

#ifdef BACKEND_EMU
// Errors and guarantees of only the emulated library.
static void check_emulation(ncclComm_t world, int rank, int n, cudaStream_t stream) {
    Buffer<float> a(64), b(64);
    float* const p = a.data();
    const size_t r = (size_t)rank;
    float host[64];
    bool ok = refused(ncclAllReduce(host, p, 4, ncclFloat32, ncclSum, world, stream));
    ok = refused(ncclAllReduce(p, p, 100 + 4096, ncclFloat32, ncclSum, world, stream)) && ok;
    ok = refused(ncclAllReduce((char*)p + 2, p, 4, ncclFloat32, ncclSum, world, stream)) && ok;
    report("emulated: refused: not device memory, too long, not aligned", ok);
    ok = refused(ncclAllReduce(p, p + 1, 4, ncclFloat32, ncclSum, world, stream));
    ok = refused(ncclAllGather(p + r * 3 + 1, p, 3, ncclFloat32, world, stream)) && ok;
    if (n > 1) {
        ok = refused(ncclAllGather(p + (r + 1) % (size_t)n * 3, p, 3, ncclFloat32, world, stream)) && ok;
        ok = refused(ncclReduceScatter(p, p + (r + 1) % (size_t)n * 3, 3, ncclFloat32, ncclSum, world, stream)) && ok;
    }
    report("emulated: refused: buffers that overlap", ok);
    ok = refused(ncclAllReduce(p, p, 4, ncclFloat16, ncclSum, world, stream));
    report("emulated: refused: sums in fp16", ok && good(ncclBroadcast(p, p, 4, ncclFloat16, 0, world, stream)));

    {
        // bf16 is rounded after each addition, in ring order: 256 + 1 is 256 again, 1 + 1 + 1 is 3.
        const size_t count = 8 * (size_t)n;
        Buffer<bf16> x(count);
        x.fill(0, count, [&](size_t) { return rank == 0 ? 256.0 : 1.0; });
        auto round = [](double s) { return s < 256 ? s : s + (long)s % 2 * ((long)s / 2 % 2 ? 1 : -1); };
        ok = good(ncclAllReduce(x.data(), x.data(), count, ncclBfloat16, ncclSum, world, stream));
        ok = x.holds(0, count, [&](size_t i) {
            double sum = 0;
            for (int k = 1; k <= n; k++) sum = round(sum + (((int)(i / 8) + k) % n == 0 ? 256.0 : 1.0));
            return sum;
        }) && ok;
        report("emulated: bf16 sums are rounded at each step of the ring", ok);
        Buffer<float> y(4);
        y.fill(0, 4, [&](size_t i) { return rank == 0 && i == 1 ? NAN : (double)rank; });
        must(ncclAllReduce(y.data(), y.data(), 4, ncclFloat32, ncclMax, world, stream));
        if (n > 1) report("emulated: max drops NaN", y.holds(0, 4, [&](size_t) { return n - 1; }));
        y.fill(0, 4, [&](size_t) { return rank == 0 ? NAN : 1.0; });
        must(ncclAllReduce(y.data(), y.data(), 4, ncclFloat32, ncclSum, world, stream));
        const std::vector<float> sum = y.host();
        report("emulated: a sum keeps NaN", sum[y.guard] != sum[y.guard]);
    }
    if (n > 1) {
        // If ranks disagree, all refuse, and the communicator is unusable afterwards.
        struct Case {
            const char* name;
            std::function<ncclResult_t(ncclComm_t)> call;
        };
        const bool odd = rank == n - 1;
        const Case cases[] = {
            {"counts", [&](ncclComm_t c) { return ncclAllReduce(p, p, odd ? 5 : 4, ncclFloat32, ncclSum, c, stream); }},
            {"types", [&](ncclComm_t c) { return ncclAllGather(p, b.data(), 2, odd ? ncclInt32 : ncclFloat32, c, stream); }},
            {"operations",
             [&](ncclComm_t c) { return ncclAllReduce(p, p, 4, ncclFloat32, odd ? ncclAvg : ncclSum, c, stream); }},
            {"roots", [&](ncclComm_t c) { return ncclBroadcast(p, p, 4, ncclFloat32, odd ? 1 : 0, c, stream); }},
            {"collectives",
             [&](ncclComm_t c) {
                 return odd ? ncclReduce(p, p, 4, ncclFloat32, ncclSum, 0, c, stream)
                            : ncclAllReduce(p, p, 4, ncclFloat32, ncclSum, c, stream);
             }},
            {"the counts of send and receive",
             [&](ncclComm_t c) {
                 must(ncclGroupStart());
                 must(ncclSend(p, 4, ncclFloat32, (rank + 1) % n, c, stream));
                 must(ncclRecv(b.data(), 5, ncclFloat32, (rank + n - 1) % n, c, stream));
                 return ncclGroupEnd();
             }},
        };
        for (const Case& c : cases) {
            ncclComm_t comm = communicator(0, n, rank);
            ok = good(c.call(comm)) && refused(end_or_error(comm, stream)) && cudaStreamQuery(stream) == cudaErrorNotReady;
            ok = refused(ncclAllReduce(p, p, 4, ncclFloat32, ncclSum, comm, stream)) && ok;
            must(ncclCommAbort(comm));
            ok = cudaStreamSynchronize(stream) == cudaSuccess && ok;
            report(std::string("emulated: refused by all: ") + c.name + " that differ", ok);
        }
        std::vector<ncclUniqueId> ids(1);
        ncclComm_t comm;
        must(ncclGetUniqueId(&ids[0]));
        MPI_Bcast(ids.data(), sizeof ids[0], MPI_BYTE, 0, MPI_COMM_WORLD);
        report("emulated: refused by all: a rank given twice",
               refused(ncclCommInitRank(&comm, n, ids[0], odd ? 0 : rank)) && !comm);
        report("emulated: refused by all: an id used again", refused(ncclCommInitRank(&comm, n, ids[0], rank)) && !comm);
    }
    ncclUniqueId garbage;
    memset(&garbage, 1, sizeof garbage);
    ncclComm_t comm = communicator(rank, 1, 0), none;
    report("emulated: refused: bytes that are no id", refused(ncclCommInitRank(&none, 1, garbage, 0)));
    must(ncclCommFinalize(comm));
    ok = refused(ncclAllReduce(p, p, 4, ncclFloat32, ncclSum, comm, stream), ncclInvalidUsage);
    must(ncclCommDestroy(comm));
    report("emulated: refused: a finalized, a destroyed communicator",
           refused(ncclAllReduce(p, p, 4, ncclFloat32, ncclSum, comm, stream)) && ok);
    {
        // Two communicators used in different orders: within one group this is no deadlock here.
        ncclComm_t other;
        must(ncclCommSplit(world, 0, rank, &other, nullptr));
        a.fill(0, 64, [](size_t) { return 1; });
        must(ncclGroupStart());
        for (int i = 0; i < 2; i++)
            must(ncclAllReduce(p + 32 * i, p + 32 * i, 32, ncclFloat32, ncclSum, (i + rank) % 2 ? world : other, stream));
        ok = good(ncclGroupEnd());
        must(ncclCommDestroy(other));
        report("emulated: two communicators in a group", ok && a.holds(0, 64, [&](size_t) { return n; }));
    }
    // 10,000 operations: more than there are tags.
    Buffer<int32_t> counter(1);
    counter.fill(0, 1, [](size_t) { return 1; });
    ok = true;
    for (int i = 0; i < 5000 && ok; i++) {
        ok = good(ncclAllReduce(counter.data(), counter.data(), 1, ncclInt32, ncclMax, world, stream));
        if (n == 1) continue;
        const int peer = rank ^ 1;
        if (peer < n && rank % 2 == 0) ok = good(ncclSend(counter.data(), 1, ncclInt32, peer, world, stream)) && ok;
        if (peer < n && rank % 2 == 1) ok = good(ncclRecv(counter.data(), 1, ncclInt32, peer, world, stream)) && ok;
    }
    report("emulated: 10,000 operations", ok && counter.holds(0, 1, [](size_t) { return 1; }));
}
#endif

int main(int argc, char** argv) {
    const std::string mode = argc > 1 ? argv[1] : "all";
    setenv("NCCL_CHECK_POINTERS", "1", 1);
    ncclUniqueId id;
    const bool lazy = mode == "lazy" || mode == "hang" || mode == "die";
    if (!lazy) MPI_Init(&argc, &argv);
    must(ncclGetUniqueId(&id));
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    int devices = 0;
    must(cudaGetDeviceCount(&devices));
    must(cudaSetDevice(world_rank % devices));
    cudaStream_t stream;
    must(cudaStreamCreate(&stream));
    ncclComm_t comm;
    must(ncclCommInitRank(&comm, world_size, id, world_rank));

    if (mode == "hang" || mode == "die") {
        Buffer<float> a(4);
        if (mode == "die" && world_rank == world_size - 1) exit(3);
        if (world_rank == 0) {
            must(ncclSend(a.data(), 4, ncclFloat32, world_size - 1, comm, stream));
            must(cudaStreamSynchronize(stream));
        }
        MPI_Barrier(MPI_COMM_WORLD);
        return 0;
    }
    report(mode + ": rank and size", is_rank(comm, world_rank, world_size));
    report(mode + ": sum", sums_to(comm, 1 + world_rank, world_size * (world_size + 1) / 2, stream));
    if (mode == "all" || mode == "short") {
        check_type<int8_t>(comm, world_rank, world_size, stream);
        check_type<uint8_t>(comm, world_rank, world_size, stream);
        check_type<int32_t>(comm, world_rank, world_size, stream);
        check_type<uint32_t>(comm, world_rank, world_size, stream);
        check_type<int64_t>(comm, world_rank, world_size, stream);
        check_type<uint64_t>(comm, world_rank, world_size, stream);
        check_type<float>(comm, world_rank, world_size, stream);
        check_type<double>(comm, world_rank, world_size, stream);
        check_type<bf16>(comm, world_rank, world_size, stream);
        check_groups(comm, world_rank, world_size, mode == "all" ? 3000001 : 3001, stream);
        check_communicators(comm, stream);
        check_streams(comm, world_rank, world_size, mode == "all" ? 1 << 20 : 1 << 10, stream);
        check_refusals(comm, world_size, stream);
#ifdef BACKEND_EMU
        check_emulation(comm, world_rank, world_size, stream);
#endif
    }
    must(ncclCommDestroy(comm));
    must(cudaStreamDestroy(stream));
    if (!lazy) MPI_Finalize();
    return 0;
}
