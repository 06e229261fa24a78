// Checks of World and Comm, on any number of ranks, for test/comm_test.sh; built for the CPU and for the GPU or the
// emulator. Rank 0 prints `ok: NAME` or `FAILED: NAME`, combining the results of all ranks.
//   comm_check all      everything except waiting (default)   comm_check world    only the World
//   comm_check waiting  how long ranks wait for a late one
//   comm_check choices FILE   how ranks agree on algorithms for matrix products, some common and some of a single rank
//   comm_check groups   each communicator of a layout of 8 ranks, used once
//   comm_check bench    times of large operations     comm_check CASE R   a run that must fail because of rank R: see
//   fail_as_told
// Values are small integers that depend on rank and element: sums are exact in bf16 too, and mixed-up ranks, elements or
// messages are detected.
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <random>

#include "llmc/ops.h"
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "llmc/gpu/ops.cuh"
#include "llmc/parallel/comm_gpu.cuh"
#else
#include "llmc/parallel/comm_cpu.h"
#include "llmc/cpu/memory.h"
#endif
#include "llmc/parallel/memory_of_node.h"
#include "llmc/parallel/node_text.h"
#include "llmc/parallel/partners.h"
#include "llmc/parallel/pipeline_schedule.h"
#include "llmc/parallel/ranks.h"
#include "llmc/parallel/world.h"
#include "programs.h"

namespace comm_check {

struct Test {
    World& world;
    be::Ctx& ctx;
    int failed = 0;

    // Collective.
    void report(const std::string& name, bool ok) {
        int n_bad = 0;
        for (const std::string& s : world.all_gather(std::string(ok ? "1" : ""))) n_bad += s.empty();
        failed += n_bad > 0;
        if (world.rank() == 0) {
            printf(n_bad ? "FAILED: %s (%d ranks)\n" : "ok: %s\n", name.c_str(), n_bad);
            fflush(stdout);
        }
    }
};

// Device memory between two guards, with a host copy of all three.
template <class E>
class Buffer {
public:
    Buffer(be::Ctx& ctx, size_t n) : ctx_(ctx), n_(n), host_(n + 2 * guard, E(-77.0f)) {
        memory_ = (E*)be::allocate_memory(bytes());
        send();
    }
    ~Buffer() { be::release_memory(memory_, bytes()); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    E* data() { return memory_ + guard; }
    E* host() { return host_.data() + guard; }
    size_t size() const { return n_; }
    void send() { be::upload(ctx_, memory_, host_.data(), bytes()); }
    template <class F>
    void set(F value) {
        for (size_t i = 0; i < n_; i++) host()[i] = E((float)value(i));
        send();
    }
    // Downloads; true if the guards are intact.
    bool fetch() {
        be::download(ctx_, host_.data(), memory_, bytes());
        for (size_t i = 0; i < guard; i++)
            if ((float)host_[i] != -77.0f || (float)host_[guard + n_ + i] != -77.0f) return false;
        return true;
    }
    template <class F>
    bool equals(F value) {
        if (!fetch()) return false;
        for (size_t i = 0; i < n_; i++)
            if ((float)host()[i] != (float)value(i)) return false;
        return true;
    }

private:
    static constexpr size_t guard = 64;
    size_t bytes() const { return (n_ + 2 * guard) * sizeof(E); }
    be::Ctx& ctx_;
    size_t n_;
    std::vector<E> host_;
    E* memory_;
};

inline int value(int rank, size_t i, int salt) { return (int)((rank * 37 + i * 11 + (i >> 6) * 5 + (size_t)salt * 17) % 61); }
inline int sum_of_values(const std::vector<int>& ranks, size_t i, int salt) {
    int sum = 0;
    for (const int r : ranks) sum += value(r, i, salt);
    return sum;
}

// ---- the World -------------------------------------------------------------------------------------------------------------
static void check_world(Test& t) {
    World& w = t.world;
    const int rank = w.rank(), size = w.size();
    const std::string mine = std::string((size_t)rank * 3, (char)('a' + rank));
    bool ok = true;
    const auto all = w.all_gather(mine);
    for (int r = 0; r < size; r++) ok &= all[r] == std::string((size_t)r * 3, (char)('a' + r));
    t.report("strings of different lengths", ok && (int)all.size() == size);

    struct {
        int rank;
        double x;
    } one = {rank, rank * 0.5}, many[64];
    w.all_gather(&one, sizeof one, many);
    ok = true;
    for (int r = 0; r < size; r++) ok &= many[r].rank == r && many[r].x == r * 0.5;
    t.report("structs", ok);

    // A host's memory, with some of 10,000 bytes in use: the other ranks' planned allocations there are subtracted.
    Ranks ranks;
    ranks.world = &w;
    size_t others = 0, first_here = (size_t)size;
    for (int r = size - 1; r >= 0; r--)
        if (w.is_here(r)) {
            first_here = (size_t)r;
            others += r == rank ? 0 : 100 * ((size_t)r + 1);
        }
    t.report("memory that ranks share", memory_for_rank(ranks, 100 * ((size_t)rank + 1), 10000 + (size_t)rank) ==
                                            10000 + (size == 1 ? (size_t)rank : first_here) - others);

    const size_t n = (10 << 20) / sizeof(int) + 3;  // above one slice of all_gather
    std::vector<int> large(n), large_of_all(n * (size_t)size, -1);
    for (size_t i = 0; i < n; i++) large[i] = value(rank, i, 2);
    w.all_gather(large.data(), n * sizeof(int), large_of_all.data());
    ok = true;
    for (int r = 0; r < size; r++)
        for (size_t i = 0; i < n; i++) ok &= large_of_all[(size_t)r * n + i] == value(r, i, 2);
    t.report("more than one slice", ok);

    w.barrier();
    int lower = 0;
    for (int r = 0; r < rank; r++) lower += w.is_here(r);
    t.report("local rank and hosts", w.local_rank() == lower && (int)w.hosts().size() == size && !w.host().empty());
}

// Each rank sends to the next one while all use the World, too; the last rank starts late, and the others notice.
static void check_partners(Test& t) {
    World& w = t.world;
    const int rank = w.rank(), size = w.size(), next = (rank + 1) % size, before = (rank + size - 1) % size;
    if (size == 1) return;  // perhaps without MPI
    const auto bytes_of = [](int r) { return ((size_t)20 << 20) * (size_t)(r % 3) + (size_t)r + 1; };
    const auto byte_of = [](int r, size_t i) { return (char)value(r, i, 3); };
    std::vector<char> mine(bytes_of(rank)), theirs(bytes_of(before));
    for (size_t i = 0; i < mine.size(); i++) mine[i] = byte_of(rank, i);
    PartnerTransfer transfer(w);
    bool ok = true, done = false, stalled = false;
    for (int repetition = 0; repetition < 2; repetition++) {
        const bool late = rank == size - 1 && repetition == 1;
        if (!late) transfer.start({next, mine.data(), mine.size()}, {{before, theirs.data(), theirs.size()}});
        for (done = false; !late && transfer.stalled() < 0.05 && !done;) done = transfer.poll(0.01);
        stalled = transfer.stalled() >= 0.05;
        w.barrier();
        if (late) transfer.start({next, mine.data(), mine.size()}, {{before, theirs.data(), theirs.size()}});
        for (bool all = false; !all;) {
            done = done || transfer.poll(0.001);
            all = true;
            for (const std::string& other : w.all_gather(done ? "1" : "")) all &= !other.empty();
        }
        for (size_t i = 0; i < theirs.size(); i++) ok &= theirs[i] == byte_of(before, i);
        std::fill(theirs.begin(), theirs.end(), 0);
    }
    t.report("bytes for partners", ok);
    t.report("a partner that does not come is noticed", stalled || before != size - 1);
}

// ---- collectives -----------------------------------------------------------------------------------------------------------
static const std::vector<size_t> sizes = {0, 1, 2, 3, 7, 64, 1000, 4097, 100003};

// ranks: World ranks, in comm's order.
template <class E>
bool check_collectives(Test& t, be::Comm& comm, const std::vector<int>& ranks) {
    be::Ctx& ctx = t.ctx;
    const int rank = comm.rank(), size = comm.size();
    const int me = t.world.rank();
    bool ok = size == (int)ranks.size() && ranks[rank] == me;
    for (const size_t n : sizes) {
        Buffer<E> x(ctx, n), part(ctx, n), all(ctx, n * (size_t)size);
        x.set([&](size_t i) { return value(me, i, 0); });
        be::all_reduce(ctx, comm, x.data(), n);
        ok &= x.equals([&](size_t i) { return sum_of_values(ranks, i, 0); });

        const auto gathered = [&](size_t i) { return value(ranks[i / n], i % n, 1); };
        part.set([&](size_t i) { return value(me, i, 1); });
        be::all_gather(ctx, comm, all.data(), (const E*)part.data(), n);
        ok &= all.equals(gathered) && part.equals([&](size_t i) { return value(me, i, 1); });
        all.set([&](size_t i) { return (int)(i / n) == rank ? value(me, i % n, 1) : -5; });
        be::all_gather(ctx, comm, all.data(), (const E*)all.data() + (size_t)rank * n, n);
        ok &= all.equals(gathered);

        for (int root = 0; root < size; root++) {  // two at once
            x.set([&](size_t i) { return value(me, i, root); });
            part.set([&](size_t i) { return value(me, i, 3); });
            be::Pending sum = be::start_reduce(ctx, comm, x.data(), n, root);
            be::Pending sent = be::start_broadcast(ctx, comm, part.data(), n, root);
            be::finish(ctx, sent);
            be::finish(ctx, sum);
            ok &= part.equals([&](size_t i) { return value(ranks[(size_t)root], i, 3); });
            ok &= rank == root ? x.equals([&](size_t i) { return sum_of_values(ranks, i, root); }) : x.fetch();
        }

        const auto mine = [&](size_t i) { return value(me, i, 2); };
        const auto reduced = [&](size_t i) { return sum_of_values(ranks, (size_t)rank * n + i, 2); };
        all.set(mine);
        be::reduce_scatter(ctx, comm, part.data(), (const E*)all.data(), n);
        ok &= part.equals(reduced) && all.equals(mine);
        be::reduce_scatter(ctx, comm, all.data() + (size_t)rank * n, (const E*)all.data(), n);
        ok &= all.fetch();
        for (size_t i = 0; i < n; i++) ok &= (float)all.host()[(size_t)rank * n + i] == (float)reduced(i);
    }
    return ok;
}

// Rank r sends itself r + 1 rows, and the rank i places after it (r + 2 i) % 4 rows, some of them none.
static bool check_all_to_all(Test& t, be::Comm& comm, const std::vector<int>& ranks) {
    const int rank = comm.rank(), size = comm.size();
    const auto rows = [&](int from, int to) { return from == to ? from + 1 : (from + 2 * ((to - from + size) % size)) % 4; };
    const auto number = [&](int from, int to, size_t i) { return (uint8_t)(1 + from * 31 + to * 7 + (int)(i % 97)); };
    bool ok = true;
    for (const size_t row_bytes : {(size_t)1, (size_t)12, (size_t)50003}) {
        std::vector<int> sent = {0}, received = {0};
        std::vector<uint8_t> in, expected;
        for (int r = 0; r < size; r++) {
            const int to = ranks[r], me = ranks[rank];
            sent.push_back(sent.back() + rows(rank, r));
            received.push_back(received.back() + rows(r, rank));
            for (size_t i = 0; i < (size_t)rows(rank, r) * row_bytes; i++) in.push_back(number(me, to, i));
            for (size_t i = 0; i < (size_t)rows(r, rank) * row_bytes; i++) expected.push_back(number(to, me, i));
        }
        std::vector<uint8_t> out(expected.size() + 1, 77);
        auto* const x = (uint8_t*)be::allocate_memory(in.size());
        auto* const y = (uint8_t*)be::allocate_memory(out.size());
        be::upload(t.ctx, x, in.data(), in.size());
        be::upload(t.ctx, y, out.data(), out.size());
        be::all_to_all(t.ctx, comm, y, received, x, sent, row_bytes);
        be::download(t.ctx, out.data(), y, out.size());
        be::release_memory(x, in.size());
        be::release_memory(y, out.size());
        ok &= out.back() == 77;
        out.pop_back();
        ok &= out == expected;
    }
    return ok;
}

// As FP8 needs them: codes gathered as bytes, and the maximum of floats, which ignores NaN.
static bool check_in_fp8(Test& t, be::Comm& comm, const std::vector<int>& ranks) {
    be::Ctx& ctx = t.ctx;
    const size_t rank = (size_t)comm.rank(), size = (size_t)comm.size();
    const int me = t.world.rank();
    const auto code = [](int r, size_t i) { return (uint8_t)(r * 31 + (int)(i % 251)); };
    bool ok = true;
    for (const size_t n : sizes) {
        std::vector<uint8_t> codes(n * size, 7);
        for (size_t i = 0; i < n; i++) codes[rank * n + i] = code(me, i);
        uint8_t* all = (uint8_t*)be::allocate_memory(codes.size() + 1);
        be::upload(ctx, all, codes.data(), codes.size());
        be::all_gather(ctx, comm, all, (const uint8_t*)all + rank * n, n);
        be::download(ctx, codes.data(), all, codes.size());
        be::release_memory(all, codes.size() + 1);
        for (size_t i = 0; i < codes.size(); i++) ok &= codes[i] == code(ranks[i / n], i % n);

        Buffer<float> x(ctx, n);
        x.set([&](size_t i) { return i % 5 == 1 && rank == i % size && size > 1 ? NAN : (float)value(me, i, 3); });
        be::all_reduce_max(ctx, comm, x.data(), n);
        ok &= x.fetch();
        for (size_t i = 0; i < n; i++) {
            float largest = -INFINITY;
            for (size_t r = 0; r < size; r++)
                if (!(i % 5 == 1 && r == i % size && size > 1)) largest = std::max(largest, (float)value(ranks[r], i, 3));
            ok &= x.host()[i] == largest;
        }
    }
    return ok;
}

// Several in flight, of different sizes and both kinds, finished in another order, with a blocking operation in between.
template <class E>
bool check_started(Test& t, be::Comm& comm, const std::vector<int>& ranks) {
    be::Ctx& ctx = t.ctx;
    const int rank = comm.rank(), me = t.world.rank();
    const size_t size = (size_t)comm.size(), ns[] = {5000, 0, 70001, 1, 300, 20000};
    std::vector<std::unique_ptr<Buffer<E>>> buffers;
    std::vector<be::Pending> pending;
    for (size_t k = 0; k < 6; k++) {
        const size_t n = ns[k];
        buffers.push_back(std::make_unique<Buffer<E>>(ctx, n * size));
        const bool gathers = k % 3 == 2;
        buffers[k]->set(
            [&](size_t i) { return gathers ? ((int)(i / n) == rank ? value(me, i % n, (int)k) : -5) : value(me, i, (int)k); });
        pending.push_back(gathers ? be::start_all_gather(ctx, comm, buffers[k]->data(), n)
                                  : be::start_reduce_scatter(ctx, comm, buffers[k]->data(), n));
    }
    Buffer<E> x(ctx, 1000);
    x.set([&](size_t i) { return value(me, i, 9); });
    be::all_reduce(ctx, comm, x.data(), x.size());
    bool ok = x.equals([&](size_t i) { return sum_of_values(ranks, i, 9); });
    for (const size_t k : {1, 0, 3, 2, 5, 4}) {
        be::finish(ctx, pending[k]);
        be::finish(ctx, pending[k]);  // already finished
        const size_t n = ns[k];
        ok &= buffers[k]->fetch();
        const E* host = buffers[k]->host();
        if (k % 3 == 2) {
            for (size_t i = 0; i < n * size; i++) ok &= (float)host[i] == (float)value(ranks[i / n], i % n, (int)k);
        } else {
            for (size_t i = (size_t)rank * n; i < (size_t)(rank + 1) * n; i++)
                ok &= (float)host[i] == (float)sum_of_values(ranks, i, (int)k);
        }
    }
    return ok;
}

// Random numbers: the same bits on all ranks and in a second run; on the CPU they equal a sum in rank order.
template <class E>
bool check_bits(Test& t, be::Comm& comm) {
    be::Ctx& ctx = t.ctx;
    const size_t n = 30011, size = (size_t)comm.size();
    std::mt19937 random(7u + (unsigned)t.world.rank());
    std::normal_distribution<float> normal;
    std::vector<float> input(n);
    for (float& v : input) v = normal(random) * 100;
    Buffer<E> x(ctx, n), again(ctx, n), all(ctx, n * size), part(ctx, n);
    x.set([&](size_t i) { return input[i]; });
    again.set([&](size_t i) { return input[i]; });
    part.set([&](size_t i) { return input[i]; });
    be::all_gather(ctx, comm, all.data(), (const E*)part.data(), n);
    be::all_reduce(ctx, comm, x.data(), n);
    be::all_reduce(ctx, comm, again.data(), n);
    bool ok = x.fetch() && again.fetch() && all.fetch() && memcmp(x.host(), again.host(), n * sizeof(E)) == 0;
    for (size_t i = 0; i < n; i++) {
        real sum = (real)all.host()[i];
        for (size_t r = 1; r < size; r++) sum += (real)all.host()[r * n + i];
        const E expected = E(sum);
        if (be::memory_is_host) ok &= memcmp(&expected, x.host() + i, sizeof(E)) == 0;
        else ok &= std::abs((float)x.host()[i] - (float)sum) < 6;
    }
    // Gather the results, to compare all ranks' on each.
    be::all_gather(ctx, comm, all.data(), (const E*)x.data(), n);
    ok &= all.fetch();
    for (size_t r = 0; r < size; r++) ok &= memcmp(all.host() + r * n, x.host(), n * sizeof(E)) == 0;
    return ok;
}

static bool check_all(Test& t, be::Comm& comm, const std::vector<int>& ranks) {
    bool ok = check_collectives<floatX>(t, comm, ranks) && check_collectives<real>(t, comm, ranks);
    return ok && check_started<floatX>(t, comm, ranks) && check_started<real>(t, comm, ranks);
}

// ---- messages --------------------------------------------------------------------------------------------------------------
// Two rings of all ranks: to the next rank and to the previous one.
struct Rings {
    be::Comm down, up;
    Rings(Test& t, const std::vector<int>& ranks, const std::string& name)
        : down(t.ctx, t.world, ranks, name, {1, true}), up(t.ctx, t.world, ranks, name + ", up", {-1, true}) {}
};

// Every rank sends to the next one, or to both neighbors, before it receives; `between` runs after the sends.
template <class F>
bool check_neighbors(Test& t, Rings& rings, size_t n, bool both, F between) {
    const int rank = rings.down.rank(), size = rings.down.size(), next = (rank + 1) % size, previous = (rank + size - 1) % size;
    Buffer<floatX> down(t.ctx, n), up(t.ctx, n), from_above(t.ctx, n), from_below(t.ctx, n);
    down.set([&](size_t i) { return value(rank, i, 3); });
    up.set([&](size_t i) { return value(rank, i, 4); });
    be::Pending a = be::start_send(t.ctx, rings.down, down.data(), n, next, 1), b;
    if (both) b = be::start_send(t.ctx, rings.up, up.data(), n, previous, 2);
    between();
    be::recv(t.ctx, rings.down, from_above.data(), n, previous, 1);
    if (both) be::recv(t.ctx, rings.up, from_below.data(), n, next, 2);
    be::finish(t.ctx, a);
    be::finish(t.ctx, b);
    return from_above.equals([&](size_t i) { return value(previous, i, 3); }) &&
           (!both || from_below.equals([&](size_t i) { return value(next, i, 4); })) &&
           down.equals([&](size_t i) { return value(rank, i, 3); });
}

// Messages of many sizes from each rank to the next, all in flight at once, received in order.
static bool check_order(Test& t, be::Comm& comm) {
    const int rank = comm.rank(), size = comm.size(), next = (rank + 1) % size, previous = (rank + size - 1) % size;
    std::vector<std::unique_ptr<Buffer<floatX>>> out, in;
    std::vector<be::Pending> sends;
    for (size_t k = 0; k < sizes.size(); k++) {  // first, as allocating memory waits for the device
        out.push_back(std::make_unique<Buffer<floatX>>(t.ctx, sizes[k]));
        in.push_back(std::make_unique<Buffer<floatX>>(t.ctx, sizes[k]));
        out[k]->set([&](size_t i) { return value(rank, i, (int)k); });
    }
    for (size_t k = 0; k < sizes.size(); k++) sends.push_back(be::start_send(t.ctx, comm, out[k]->data(), sizes[k], next, 0));
    bool ok = true;
    for (size_t k = 0; k < sizes.size(); k++) {
        be::recv(t.ctx, comm, in[k]->data(), sizes[k], previous, 0);
        ok &= in[k]->equals([&](size_t i) { return value(previous, i, (int)k); });
    }
    for (be::Pending& p : sends) be::finish(t.ctx, p);
    return ok;
}

// A pipeline step: each stage receives, checks, and sends on. A send is finished one pass later, before its buffer is
// reused for the next message in that direction.
static bool check_pipeline(Test& t, Rings& rings, int vpp, int micro_batches, size_t n) {
    const int pp = rings.down.size(), rank = rings.down.rank(), last = pp * vpp - 1;
    Buffer<floatX> in(t.ctx, n), out[2] = {{t.ctx, n}, {t.ctx, n}};
    be::Pending sent[2];
    bool ok = true;
    for (const PipelineEvent& e : pipeline_schedule(pp, rank, vpp, micro_batches)) {
        const bool forward = e.direction == Direction::forward;
        be::Comm& comm = forward ? rings.down : rings.up;
        const int stage = virtual_stage(pp, rank, e.chunk), step = forward ? 1 : -1, tag = e.micro_batch * 2 + !forward;
        const auto content = [&](int from) { return [=](size_t i) { return value(from, i, tag); }; };
        if (stage != (forward ? 0 : last)) {
            be::recv(t.ctx, comm, in.data(), n, (rank + pp - step) % pp, tag);
            ok &= in.equals(content(stage - step));
        }
        if (stage != (forward ? last : 0)) {
            be::finish(t.ctx, sent[forward]);
            out[forward].set(content(stage));
            sent[forward] = be::start_send(t.ctx, comm, out[forward].data(), n, (rank + pp + step) % pp, tag);
        }
    }
    for (be::Pending& p : sent) be::finish(t.ctx, p);
    return ok;
}

static void check_comm(Test& t) {
    World& w = t.world;
    const int size = w.size(), rank = w.rank();
    {
        be::Comm alone;
        t.report("a group of one", check_all(t, alone, {rank}) && alone.name() == "alone");
        be::Comm named(t.ctx, w, {rank}, "mine");
        t.report("groups of one, made by all", check_all(t, named, {rank}) && named.name() == "mine");
    }
    std::vector<int> everyone;
    for (int r = 0; r < size; r++) everyone.push_back(r);
    be::Comm all(t.ctx, w, everyone, "everyone");
    t.report("collectives of floatX", check_collectives<floatX>(t, all, everyone));
    t.report("collectives of real", check_collectives<real>(t, all, everyone));
    t.report("collectives of codes, and the largest", check_in_fp8(t, all, everyone));
    t.report("rows from all to all", check_all_to_all(t, all, everyone));
    t.report("several started operations", check_started<floatX>(t, all, everyone) && check_started<real>(t, all, everyone));
    t.report("the same bits on all ranks", check_bits<floatX>(t, all) && check_bits<real>(t, all));
    if (size == 1) return;

    {
        std::vector<int> reversed(everyone.rbegin(), everyone.rend());
        be::Comm moved(t.ctx, w, reversed, "reversed"), comm = std::move(moved);
        t.report("ranks in another order", check_all(t, comm, reversed) && comm.rank() == size - 1 - rank);
        be::Comm ends(t.ctx, w, {0, size - 1}, "ends");
        const bool end = rank == 0 || rank == size - 1;
        const std::vector<int> members = end ? std::vector<int>{0, size - 1} : std::vector<int>{rank};
        t.report("a group of the ends", check_all(t, ends, members));
    }
    if (size == 4) {
        const int row = rank / 2, column = rank % 2;
        const std::vector<int> along = {row * 2, row * 2 + 1}, down = {column, column + 2};
        be::Comm rows(t.ctx, w, along, "row"), columns(t.ctx, w, down, "column");
        bool ok = check_all(t, rows, along) && check_all(t, columns, down);
        Buffer<real> x(t.ctx, 777);
        x.set([&](size_t i) { return value(rank, i, 0); });
        be::all_reduce(t.ctx, rows, x.data(), x.size());
        be::all_reduce(t.ctx, columns, x.data(), x.size());
        ok &= x.equals([&](size_t i) { return sum_of_values(everyone, i, 0); });
        t.report("rows and columns of a grid", ok);
    }

    {
        // A chain: the first rank receives nothing, the last one sends nothing.
        be::Comm chain(t.ctx, w, everyone, "chain", {1, false});
        Buffer<floatX> x(t.ctx, 1000);
        x.set([&](size_t i) { return value(0, i, 7); });
        be::Pending sent;
        if (rank > 0) be::recv(t.ctx, chain, x.data(), x.size(), rank - 1, 3);
        if (rank < size - 1) sent = be::start_send(t.ctx, chain, x.data(), x.size(), rank + 1, 3);
        be::finish(t.ctx, sent);
        t.report("a message along a chain", x.equals([&](size_t i) { return value(0, i, 7); }));
    }
    Rings rings(t, everyone, "ring");
    const auto nothing = [] {};
    for (const size_t length : {(size_t)0, (size_t)1, (size_t)3001, (size_t)3 << 20}) {
        t.report(format("a ring where all send %zu first", length), check_neighbors(t, rings, length, false, nothing));
        t.report(format("neighbors that send %zu first", length), check_neighbors(t, rings, length, true, nothing));
    }
    // With collectives in flight: more messages than there are receive buffers.
    const size_t n = 300;
    Buffer<real> x(t.ctx, n), y[3] = {{t.ctx, n * (size_t)size}, {t.ctx, n * (size_t)size}, {t.ctx, n * (size_t)size}};
    be::Pending pending[3];
    for (int k = 0; k < 3; k++) {
        y[k].set([&](size_t i) { return value(rank, i, k); });
        pending[k] = be::start_reduce_scatter(t.ctx, all, y[k].data(), n);
    }
    x.set([&](size_t i) { return value(rank, i, 5); });
    bool ok = check_neighbors(t, rings, 200000, true, [&] {
        be::all_reduce(t.ctx, all, x.data(), n);
        w.barrier();
    });
    ok &= x.equals([&](size_t i) { return sum_of_values(everyone, i, 5); });
    for (int k = 0; k < 3; k++) {
        be::finish(t.ctx, pending[k]);
        ok &= y[k].fetch();
        for (size_t i = (size_t)rank * n; i < (size_t)(rank + 1) * n; i++)
            ok &= (float)y[k].host()[i] == (float)sum_of_values(everyone, i, k);
    }
    t.report("collectives between sends and receives", ok);
    t.report("messages of many sizes, in order", check_order(t, rings.down));
    for (const size_t length : {(size_t)100, (size_t)300000}) {
        t.report(format("1F1B, messages of %zu", length), check_pipeline(t, rings, 1, 7, length));
        t.report(format("interleaved stages, messages of %zu", length), check_pipeline(t, rings, 2, 2 * size, length));
    }
    // Here ranks have had different numbers of messages.
    t.report("collectives after messages", check_collectives<real>(t, all, everyone));
}

// The late rank records no waiting time; the others do, in each kind of operation.
static void check_waiting(Test& t) {
    World& w = t.world;
    std::vector<int> everyone;
    for (int r = 0; r < w.size(); r++) everyone.push_back(r);
    be::Comm comm(t.ctx, w, everyone, "waiting");
    be::Comm messages(t.ctx, w, everyone, "waiting", {1, true});
    Buffer<real> x(t.ctx, 100 * (size_t)w.size());
    Buffer<floatX> message(t.ctx, 100);
    const int late = w.size() - 1;
    const auto times = [&](const std::string& name, const std::vector<int>& waits, const std::function<void()>& operation) {
        x.fetch();
        w.barrier();
        const double before = w.monitor()->waited()["waiting"];
        if (w.rank() == late) usleep(800000);
        operation();
        x.fetch();
        const double waited = w.monitor()->waited()["waiting"] - before;
        const bool is_to_wait = std::count(waits.begin(), waits.end(), w.rank()) > 0;
        t.report("the time of waiting: " + name, is_to_wait ? waited > 0.4 && waited < 30 : waited < 0.4);
    };
    const std::vector<int> others(everyone.begin(), everyone.end() - 1);
    times("all_reduce", others, [&] { be::all_reduce(t.ctx, comm, x.data(), 100); });
    times("a started all_gather", others, [&] {
        be::Pending pending = be::start_all_gather(t.ctx, comm, x.data(), 100);
        be::finish(t.ctx, pending);
    });
    times("a collective behind a started one", others, [&] {
        be::Pending pending = be::start_all_gather(t.ctx, comm, x.data(), 100);
        be::all_reduce(t.ctx, comm, x.data(), 100);
        be::finish(t.ctx, pending);
    });
    times("a message", {0}, [&] {
        be::Pending pending;
        if (w.rank() == late) pending = be::start_send(t.ctx, messages, message.data(), 100, 0, 5);
        if (w.rank() == 0) be::recv(t.ctx, messages, message.data(), 100, late, 5);
        be::finish(t.ctx, pending);
    });
}

// A rank has a communicator for each group and each edge that its run uses, and few streams (comm_test.sh counts both).
static void check_groups(Test& t) {
    ModelConfig c;
    c.L = 4;
    c.C = 32;
    c.NH = 2;
    c.NKV = 1;
    c.F = 64;
    c.V = c.Vp = 64;
    c.tied = true;
    RankLayout layout;
    layout.tp = layout.pp = layout.vpp = 2;
    layout.trains = true;
    const auto ranks = join_groups(t.ctx, t.world, layout, c);
    be::Comm* const all[] = {&ranks->tp, &ranks->dp, &ranks->pp, &ranks->kv, &ranks->ends};
    Buffer<real> x(t.ctx, 20), y(t.ctx, 20);
    bool ok = true;
    for (be::Comm* comm : all) {
        x.set([](size_t) { return 1; });
        be::all_reduce(t.ctx, *comm, x.data(), 20);
        ok &= comm->size() == 2 && x.equals([](size_t) { return 2; });
    }
    be::Pending shard = be::start_all_gather(t.ctx, ranks->dp, y.data(), 10);
    Buffer<floatX> activation(t.ctx, 30), gradient(t.ctx, 30), in(t.ctx, 30), din(t.ctx, 30);
    const int rank = ranks->mesh.pp.rank, other = 1 - rank;
    activation.set([&](size_t) { return rank; });
    gradient.set([&](size_t) { return 10 + rank; });
    be::Pending a = be::start_send(t.ctx, ranks->forward, activation.data(), 30, other, 0);
    be::Pending b = be::start_send(t.ctx, ranks->backward, gradient.data(), 30, other, 1);
    be::recv(t.ctx, ranks->forward, in.data(), 30, other, 0);
    be::recv(t.ctx, ranks->backward, din.data(), 30, other, 1);
    for (be::Pending* p : {&shard, &a, &b}) be::finish(t.ctx, *p);
    ok &= in.equals([&](size_t) { return other; }) && din.equals([&](size_t) { return 10 + other; });
    for (int i = 0; i < 200; i++) {  // reuses events
        be::all_reduce(t.ctx, ranks->tp, x.data(), 20);
        if (i % 10 == 0) x.fetch();
    }
    t.report("the groups of a layout", ok);
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
    const char* const connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    const int streams = 4 + 2 * 9;  // the program's, and NCCL's of each communicator
    t.report("a connection to the GPU for each stream", connections && atoi(connections) >= streams);
#endif
}

#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
// All ranks of a node use the first rank's choice, and each choice is written once.
static void check_choices(Test& t, const char* file) {
    const int rank = t.world.rank(), size = t.world.size(), common = 20;
    const auto choice = [](int word) {
        gpu::GemmChoice c = {{}, 1, 2};
        for (uint64_t& w : c.algo.data) w = (uint64_t)word;
        return c;
    };
    gpu::GemmChoices mine;
    mine.read(file);
    mine.share(text_of_node(t.world));
    std::vector<uint64_t> words;
    for (int m = 0; m < common; m++) {
        const std::string product = format("a GPU\ta version\tm %d", m);
        words.push_back(mine.add(product, choice(1 + rank * common + m)).algo.data[0]);
        if (m % 5 == 0) mine.add(format("a GPU\ta version\tof rank %d m %d", rank, m), choice(7));
    }
    std::vector<uint64_t> all(words.size() * (size_t)size);
    t.world.all_gather(words.data(), words.size() * sizeof(uint64_t), all.data());
    bool ok = true;
    for (size_t i = 0; i < all.size(); i++)
        ok &= all[i] == words[i % words.size()] && (all[i] - 1) % common == i % words.size();
    ok &= mine.find_in_node(format("a GPU\ta version\tof rank %d m 5", (rank + 1) % size)) != nullptr;
    ok &= mine.find_in_node("unknown") == nullptr;
    t.report("ranks of a node take the same choices", ok);
    int writes = mine.writes(), sum = 0;
    std::vector<int> of_all((size_t)size);
    t.world.all_gather(&writes, sizeof writes, of_all.data());
    for (const int n : of_all) sum += n;
    t.report("and write each once", sum == common + 4 * size);
    gpu::GemmChoices later;
    later.read(file);
    ok = true;
    for (int m = 0; m < common; m++) ok &= later.find(format("a GPU\ta version\tm %d", m))->algo.data[0] == words[(size_t)m];
    t.report("which a later run finds", ok);
}
#endif

// ---- memory of a node -----------------------------------------------------------------------------------------------------
// One rank fills it, the others see its result; a rank that cannot open a file fills memory of its own.
static void memory_is_shared(Test& t) {
    constexpr size_t n = 100000;
    for (const bool opens : {true, false}) {
        const std::shared_ptr<NodeMemory> node = memory_of_node(t.world);
        rlimit limit, none;
        getrlimit(RLIMIT_NOFILE, &limit);
        none = {0, limit.rlim_max};
        int fills = 0, sum = 0;
        if (!opens && t.world.rank() > 0) setrlimit(RLIMIT_NOFILE, &none);
        const std::shared_ptr<const char> memory = node->filled(n * sizeof(int), "a test", [&](char* x, const auto&) {
            fills++;
            for (size_t i = 0; i < n; i++) ((int*)x)[i] = (int)(i * i);
        });
        setrlimit(RLIMIT_NOFILE, &limit);
        bool ok = true;
        for (size_t i = 0; i < n; i++) ok &= ((const int*)memory.get())[i] == (int)(i * i);
        std::vector<int> of_all((size_t)t.world.size());
        t.world.all_gather(&fills, sizeof fills, of_all.data());
        for (const int f : of_all) sum += f;
        t.report(format("memory of a node, %s", opens ? "filled once" : "which others cannot open"),
                 ok && sum == (opens ? 1 : t.world.size()));
    }
    if (t.world.size() == 1) return;
    t.world.watch(0.5, "");
    const auto slow = [](char* x, const std::function<void()>& tick) {
        for (int i = 0; i < 25; i++) {
            usleep(100000);
            tick();
        }
        *x = 1;
    };
    const bool ok = *memory_of_node(t.world)->filled(1, "a test", slow) == 1;
    t.world.watch(600, "");
    t.report("memory of a node, filled for longer than a wait may take", ok);
}

// ---- times -----------------------------------------------------------------------------------------------------------------
static void bench(Test& t) {
    World& w = t.world;
    std::vector<int> everyone;
    for (int r = 0; r < w.size(); r++) everyone.push_back(r);
    be::Comm all(t.ctx, w, everyone, "everyone");
    be::Comm ring = w.size() > 1 ? be::Comm(t.ctx, w, everyone, "ring", {1, true}) : be::Comm();
    const auto time = [&](const char* name, size_t bytes, auto operation) {
        double best = 1e30;
        for (int i = 0; i < 7; i++) {
            char x;
            be::download(t.ctx, &x, t.ctx.scratch(1), 1);
            w.barrier();
            const double start = monotonic_seconds();
            operation();
            be::download(t.ctx, &x, t.ctx.scratch(1), 1);
            w.barrier();
            if (i > 1) best = std::min(best, monotonic_seconds() - start);
        }
        if (w.rank() == 0) printf("%-28s %9.3f ms  %7.2f GB/s\n", name, best * 1e3, bytes / best * 1e-9);
    };
    const size_t n = 24 << 20, size = (size_t)w.size();
    Buffer<real> x(t.ctx, n);
    Buffer<floatX> y(t.ctx, n);
    x.set([](size_t) { return 1; });
    y.set([](size_t) { return 1; });
    time("all_reduce real", n * sizeof(real), [&] { be::all_reduce(t.ctx, all, x.data(), n); });
    time("reduce_scatter real", n * sizeof(real), [&] {
        be::Pending p = be::start_reduce_scatter(t.ctx, all, x.data(), n / size);
        be::finish(t.ctx, p);
    });
    time("all_reduce floatX", n * sizeof(floatX), [&] { be::all_reduce(t.ctx, all, y.data(), n); });
    time("all_gather floatX", n * sizeof(floatX), [&] {
        be::Pending p = be::start_all_gather(t.ctx, all, y.data(), n / size);
        be::finish(t.ctx, p);
    });
    time("all_reduce of 4 real", 16, [&] { be::all_reduce(t.ctx, all, x.data(), 4); });
    time("world barrier", 0, [&] { w.barrier(); });
    if (size == 1) return;
    time("send and recv floatX", n * sizeof(floatX), [&] {
        be::Pending p;
        if (w.rank() == 0) p = be::start_send(t.ctx, ring, y.data(), n, 1, 0);
        if (w.rank() == 1) be::recv(t.ctx, ring, y.data(), n, 0, 0);
        be::finish(t.ctx, p);
    });
}

// ---- runs that must fail ----------------------------------------------------------------------------------------------------
static void fail_as_told(Test& t, const std::string& how, int who, const char* status_file) {
    World& w = t.world;
    const bool me = w.rank() == who;
    std::vector<int> everyone;
    for (int r = 0; r < w.size(); r++) everyone.push_back(r);
    if (how == "late") {  // one rank computes forever, or waits elsewhere
        w.barrier();
        w.watch(1.5, status_file);
        w.barrier();
        if (me) sleep(600);
        w.barrier();
    } else if (how == "suspended") {  // must succeed: a wait is long because the job is suspended for a while
        w.barrier();
        w.watch(1.5, status_file);
        w.barrier();
        if (const pid_t parent = getpid(); fork() == 0) {
            usleep(300000);
            kill(parent, SIGSTOP);
            sleep(5);
            kill(parent, SIGCONT);
            _exit(0);
        }
        if (me) sleep(1);
        w.barrier();
    } else if (how == "late_driver") {  // the driver does not answer the watchdog
        w.watch(1.5, status_file);
        w.monitor()->add(&t, [] {
            sleep(600);
            return Activity();
        });
        sleep(600);
    } else if (how == "late_in_group" || how == "late_started") {
        be::Comm comm(t.ctx, w, everyone, "tensor");
        w.watch(1.5, status_file);
        Buffer<real> x(t.ctx, 100 * everyone.size());
        be::all_reduce(t.ctx, comm, x.data(), 100);
        x.fetch();
        if (me) sleep(600);
        be::Pending p;
        if (how == "late_started") p = be::start_all_gather(t.ctx, comm, x.data(), 100);
        else be::all_reduce(t.ctx, comm, x.data(), 100);
        be::finish(t.ctx, p);
        x.fetch();
#ifdef BACKEND_EMU
    } else if (how == "long_kernel") {  // must succeed: a collective after a kernel that takes longer than the limit
        be::Comm comm(t.ctx, w, everyone, "tensor");
        w.watch(1.5, status_file);
        Buffer<real> x(t.ctx, 100);
        const emu::Ticket kernel = emu::streams().hang(t.ctx.stream);
        be::all_reduce(t.ctx, comm, x.data(), 100);
        sleep(3);
        kernel->over = true;
        x.fetch();
#endif
    } else if (how == "late_message") {  // rank 0 expects one from rank 1
        be::Comm comm(t.ctx, w, everyone, "pipeline", {1, true});
        w.watch(1.5, status_file);
        Buffer<floatX> x(t.ctx, 100);
        if (me) sleep(600);
        if (w.rank() == 0) be::recv(t.ctx, comm, x.data(), 100, 1, 5);
        x.fetch();
    } else if (how == "kill") {
        if (me) raise(SIGKILL);
        w.barrier();
    } else if (how == "kill_while_computing") {  // the others are not in an operation
        w.barrier();
        if (me) raise(SIGKILL);
        sleep(600);
    } else if (how == "kill_in_group") {
        be::Comm comm(t.ctx, w, everyone, "tensor");
        if (me) raise(SIGKILL);
        Buffer<real> x(t.ctx, 100);
        be::all_reduce(t.ctx, comm, x.data(), 100);
        x.fetch();
    } else if (how == "abort") {
        if (me) w.abort(3);
        w.barrier();
    } else if (how == "throw" || how == "unwind") {
        if (me) fail("rank %d does not like it", who);
        w.barrier();
    } else if (how == "mix_world") {
        if (me) w.all_gather("x");
        else w.barrier();
    } else if (how == "mix_bytes") {
        char all[1024];
        w.all_gather(all, me ? 5 : 4, all);
    } else if (how == "mix_groups") {
        be::Comm comm(t.ctx, w, me ? std::vector<int>{who} : everyone, "tensor");
    } else if (how == "mix_counts") {  // with TRAIN_GPT_CHECK_COMM
        be::Comm comm(t.ctx, w, everyone, "tensor");
        Buffer<real> x(t.ctx, 100);
        be::all_reduce(t.ctx, comm, x.data(), me ? 99 : 100);
        x.fetch();
    } else if (how == "mix_operations") {
        be::Comm comm(t.ctx, w, everyone, "tensor");
        Buffer<real> x(t.ctx, 100);
        if (me) be::reduce_scatter(t.ctx, comm, x.data(), (const real*)x.data(), 100 / everyone.size());
        else be::all_reduce(t.ctx, comm, x.data(), 100);
        x.fetch();
    } else if (how == "mix_messages" || how == "mix_tags") {
        be::Comm comm(t.ctx, w, everyone, "pipeline", {1, true});
        w.watch(1.5, "");
        Buffer<floatX> x(t.ctx, 100);
        be::Pending p;
        if (w.rank() == 0) p = be::start_send(t.ctx, comm, x.data(), 100, 1, 5);
        if (w.rank() == 1) be::recv(t.ctx, comm, x.data(), how == "mix_tags" ? 100 : 90, 0, how == "mix_tags" ? 6 : 5);
        be::finish(t.ctx, p);
        x.fetch();
    } else {
        fail("'%s' is unknown", how.c_str());
    }
}

static int run(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "all";
    const int who = argc > 2 ? atoi(argv[2]) : 0;
    try {
        World world = World::join();
        be::Ctx ctx(1);
        Test t{world, ctx};
        try {
            if (what == "world" || what == "all") check_world(t), check_partners(t), memory_is_shared(t);
            if (what == "all") check_comm(t);
            else if (what == "waiting") check_waiting(t);
#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
            else if (what == "choices") check_choices(t, argc > 2 ? argv[2] : "");
#endif
            else if (what == "groups") check_groups(t);
            else if (what == "bench") bench(t);
            else if (what != "world") fail_as_told(t, what, who, argc > 3 ? argv[3] : "");
        } catch (const Error& e) {
            if (what == "unwind") throw;  // through the World's scope
            fprintf(stderr, "error: %s: %s\n", world.description().c_str(), e.what());
            world.abort(1);
        }
        return t.failed > 0;
    } catch (const Error& e) {
        fprintf(stderr, "error: %s\n", e.what());
        return 1;
    }
}

static const bool added = test::add_program("comm_check", run);

}  // namespace comm_check
