// Runs the threads of one CUDA block on fibers of one OS thread, until all have returned.
//
// A thread runs until it must wait (a barrier, a warp's rendezvous, an mbarrier); then another one is selected, by the Order:
// forward, reverse, or random from a seed. The selection is depth first: one warp runs as far ahead of the others as the
// barriers allow, which exposes missing barriers. A thread that never waits costs no switch.
// If every thread waits, that is a deadlock: the place of each one is printed, and the program ends.
//
// The blocks of a cluster take turns on the same OS thread: when all threads of one wait or have returned, or (random order)
// occasionally, the next one continues. A kernel launched in clusters may only use dynamic shared memory: __shared__ variables
// belong to the OS thread.
//
// Environment: EMU_ORDER=forward|reverse|random (random)  EMU_SEED=N (1)  EMU_THREADS=N blocks at a time (1)
//              EMU_REFUSALS=N cuBLASLt refuses one in N of the products that it may refuse (4; 0: none)
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "fibers.h"
#include "vector_types.h"

// The current position, for conditions of breakpoints: break norm.cuh:68 if emu_block == 3 && emu_thread == 7. (The x of the
// block's index; the thread's number in the block.) Maintained while only one block runs at a time.
inline unsigned emu_block = 0, emu_thread = 0;

namespace emu {

enum class Order { forward, reverse, random };

struct Config {
    Order order = Order::random;
    unsigned seed = 1, threads = 1, refusals = 4;
    Config() {
        const char *o = getenv("EMU_ORDER"), *s = getenv("EMU_SEED"), *t = getenv("EMU_THREADS");
        if (const char* r = getenv("EMU_REFUSALS")) refusals = (unsigned)atoi(r);
        if (o) order = !strcmp(o, "forward") ? Order::forward : !strcmp(o, "reverse") ? Order::reverse : Order::random;
        if (s) seed = (unsigned)atoi(s);
        if (t) threads = (unsigned)std::max(1, atoi(t));
#ifdef EMU_ASAN
        threads = 1;  // __shared__ arrays are then plain statics, with red zones around them
#endif
    }
};
inline Config config_;
EMU_OPTIMIZED inline Config& config() { return config_; }

// An error in a kernel. Prints and ends the program; under gdb, `up` leads to the line.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fault(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emu: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}

// A place in a kernel's source.
struct Where {
    const char* file = "";
    int line = 0;
};
#define EMU_HERE (emu::Where{__FILE__, __LINE__})

struct Thread {
    uint3 id;
    unsigned index, lane, warp;
    Fiber* fiber;
    Where where;
    bool waits;
    // Copies started by this thread that complete when it waits for them: cp.async (tensor.h), TMA stores (hopper.h).
    std::vector<std::vector<std::function<void()>>> copy_groups, store_groups;
    // wgmma (hopper.h): products issued so far; their number at each pending commit; whether a fence followed the last access
    // to registers.
    unsigned products = 0;
    std::vector<unsigned> product_groups = {};
    bool fenced = false;
};

// A meeting of lanes of a warp: each leaves up to 64 bytes, and reads the others' once all have arrived. Two alternating
// tables, as a lane may be one meeting ahead.
struct Meeting {
    uint32_t mask = 0, arrived = 0;
    unsigned epoch = 0;
    alignas(64) unsigned char table[2][32][64];
};

struct Warp {
    uint32_t live = 0, ready = 0, fresh = 0;  // lanes that have not returned; can continue; have not started
    unsigned rank = 0;
    int n_meetings = 0;
    Meeting meetings[4];
};

// bar.sync / bar.arrive: opens when `expected` threads have arrived.
struct Barrier {
    unsigned arrived = 0, epoch = 0;
    Where where;
    char sync[2] = {0, 0};  // sync objects for ThreadSanitizer; alternating, as a thread may be one barrier ahead
    std::vector<Thread*> waiting;
};

// An object in shared memory that needs more state than its bytes hold (mbarrier). Destroyed at the end of the block, when it
// may report incomplete work.
struct Object {
    virtual ~Object() = default;
    virtual void block_ended(const char* kernel) { (void)kernel; }
};

class Block;
// Blocks that run at the same time and can reach each other's shared memory (cluster_sync and others in hopper.h).
struct Cluster {
    std::vector<Block*> blocks;
    unsigned arrived = 0, epoch = 0;  // cluster_sync
    std::vector<std::pair<Block*, Thread*>> waiting;
    char sync[2] = {0, 0};

    void open_if_all_arrived();
};

class Block {
public:
    Thread* current = nullptr;
    Cluster* cluster = nullptr;  // null: launched without clusters
    unsigned cluster_rank = 0;
    uint3 id{};
    dim3 size, grid;
    unsigned char* shared = nullptr;  // dynamic shared memory
    size_t shared_bytes = 0;
    const char* kernel = "";
    Barrier barriers[16];
    std::map<const void*, std::unique_ptr<Object>> objects;
    // Shared memory as seen by TMA and wgmma (hopper.h); empty until they or fence_proxy_async are used.
    std::vector<unsigned char> async_view;
    bool fenced = false, each_fence = false;

    Block() = default;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() {
        for (Fiber* f : fibers_) Fiber::destroy(f);
    }

    EMU_OPTIMIZED EMU_NO_TSAN unsigned random() {
        rng_ ^= rng_ << 13;
        rng_ ^= rng_ >> 17;
        rng_ ^= rng_ << 5;
        return rng_;
    }
    unsigned live() const { return live_; }
    Warp& warp() { return warps_[current->warp]; }

    void prepare(dim3 grid_size, dim3 block_size, size_t bytes, const char* name) {
        grid = grid_size;
        size = block_size;
        kernel = name;
        shared_bytes = bytes;
        const unsigned n = size.x * size.y * size.z;
        threads_.resize(n);
        warps_.resize((n + 31) / 32);
        by_rank_.resize(warps_.size());
        for (unsigned i = 0; i < n; i++)
            threads_[i] =
                Thread{{i % size.x, i / size.x % size.y, i / (size.x * size.y)}, i, i % 32, i / 32, nullptr, {}, false, {}, {}};
    }

    // Runs body() once per thread: start, then resume until the block is complete, then finish.
    void start(uint3 block_id, const std::function<void()>& body);
    void resume();
    void finish();
    bool is_over() const { return live_ == 0; }
    bool can_resume() const { return runnable_ != 0; }
    void print_waiting() const;

    // Blocks the current thread until somebody calls wake() for it.
    EMU_OPTIMIZED void wait(Where where) {
        Thread* t = current;
        t->where = where;
        t->waits = true;
        t->fiber = running_;
        bool fresh = false;
        Thread* next = pick(fresh);
        Fiber* f = next ? next->fiber : &main_;
        if (fresh) f = next->fiber = take_fiber(next);
        go(f);
        current->waits = false;
    }
    EMU_OPTIMIZED void wake(Thread* t) { make_ready(warps_[t->warp], 1u << t->lane); }
    // Random order: the current thread continues once the other warps have run as far as they can.
    void yield(Where where) {
        if (config().order != Order::random) return;
        const unsigned mine = current->warp, from = warps_[mine].rank;
        by_rank_.erase(by_rank_.begin() + from);
        by_rank_.push_back(mine);
        wake(current);
        rank_again();
        wait(where);
    }

    // Waits at a barrier of `expected` threads (0: all that have not returned). `blocks` false: arrives and continues.
    EMU_OPTIMIZED void barrier(unsigned number, unsigned expected, bool blocks, Where where) {
        Quiet quiet;
        Barrier& b = barriers[number];
        const bool all = expected == 0;
        if (all && b.arrived && (b.where.line != where.line || strcmp(b.where.file, where.file)))
            fault("%s: divergent __syncthreads: thread %u is at %s:%d, others at %s:%d", kernel, current->index, where.file,
                  where.line, b.where.file, b.where.line);
        b.where = where;
        b.arrived++;
        char* sync = &b.sync[b.epoch % 2];
        release(sync);
        if (blocks) b.waiting.push_back(current);
        if (all) open_if_all_arrived();
        else if (b.arrived == expected) open(b);
        else if (b.arrived > expected) fault("%s: barrier %u of %u threads was reached by more", kernel, number, expected);
        if (blocks) {
            wait(where);
            acquire(sync);
        }
    }

    // Leaves `bytes` in the table, waits for the lanes of `mask`, returns the table. last(table) runs once, before any lane
    // continues.
    template <class Last>
    EMU_OPTIMIZED unsigned char (*meet(uint32_t mask, const void* value, size_t bytes, Where where, Last last))[64] {
        Quiet quiet;
        Thread* t = current;
        Warp& w = warps_[t->warp];
        const uint32_t bit = 1u << t->lane;
        if (!(mask & bit)) fault("%s:%d: lane %u is not in its own mask %08x", where.file, where.line, t->lane, mask);
        Meeting& m = meeting(w, mask);
        auto* table = m.table[m.epoch % 2];
        if (bytes) memcpy(table[t->lane], value, bytes);
        m.arrived |= bit;
        release(table);
        if (m.arrived == (mask & w.live)) {
            forget_absent(m);
            last(table);
            m.arrived = 0;
            m.epoch++;
            make_ready(w, mask & w.live & (config().order == Order::forward ? ~bit : ~0u));
            if (config().order != Order::forward) wait(where);
        } else {
            wait(where);
        }
        acquire(table);
        return table;
    }
    EMU_OPTIMIZED unsigned char (*meet(uint32_t mask, const void* value, size_t bytes, Where where))[64] {
        return meet(mask, value, bytes, where, [](auto) {});
    }

private:
    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    std::vector<unsigned> by_rank_;
    unsigned live_ = 0, runnable_ = 0, rng_ = 1;  // runnable_: a bit per warp, by rank
    Fiber main_, *running_ = nullptr;
    std::vector<Fiber*> fibers_, idle_;
    const std::function<void()>* body_ = nullptr;

    EMU_OPTIMIZED void make_ready(Warp& w, uint32_t lanes) {
        w.ready |= lanes;
        if (lanes) runnable_ |= 1u << w.rank;
    }
    EMU_OPTIMIZED void open(Barrier& b) {
        b.arrived = 0;
        b.epoch++;
        for (Thread* t : b.waiting) wake(t);
        b.waiting.clear();
        if (config().order == Order::random) draw_ranks();
    }
    EMU_OPTIMIZED void open_if_all_arrived() {
        if (live_ && barriers[0].arrived == live_) open(barriers[0]);
    }
    EMU_OPTIMIZED Meeting& meeting(Warp& w, uint32_t mask) {
        for (int i = 0; i < w.n_meetings; i++)
            if (w.meetings[i].mask == mask) return w.meetings[i];
        Meeting* m = nullptr;
        if (w.n_meetings < 4) m = &w.meetings[w.n_meetings++];
        else
            for (Meeting& old : w.meetings)
                if (!old.arrived) m = &old;
        if (!m) fault("%s: more than 4 lane masks wait at once", kernel);
        m->mask = mask;
        m->arrived = 0;
        return *m;
    }

    // Values that returned lanes left in the table are no longer valid.
    static void forget_absent(Meeting& m) {
        for (uint32_t absent = m.mask & ~m.arrived; absent; absent &= absent - 1)
            memset(m.table[m.epoch % 2][__builtin_ctz(absent)], 0xff, sizeof m.table[0][0]);
    }

    EMU_OPTIMIZED void draw_ranks() {
        const unsigned n = (unsigned)warps_.size();
        for (unsigned i = 0; i < n; i++) by_rank_[i] = config().order == Order::reverse ? n - 1 - i : i;
        if (config().order == Order::random)
            for (unsigned i = n - 1; i > 0; i--) std::swap(by_rank_[i], by_rank_[random() % (i + 1)]);
        rank_again();
    }
    EMU_OPTIMIZED void rank_again() {
        runnable_ = 0;
        for (unsigned i = 0; i < by_rank_.size(); i++) {
            Warp& w = warps_[by_rank_[i]];
            w.rank = i;
            if (w.ready | w.fresh) runnable_ |= 1u << i;
        }
    }

    EMU_OPTIMIZED static unsigned nth_lane(uint32_t lanes, unsigned n) {
#ifdef __BMI2__
        return (unsigned)__builtin_ctz(__builtin_ia32_pdep_si(1u << n, lanes));
#else
        for (; n > 0; n--) lanes &= lanes - 1;
        return (unsigned)__builtin_ctz(lanes);
#endif
    }
    // The thread that runs next; null: all have returned, or it is another block's turn.
    EMU_OPTIMIZED Thread* pick(bool& fresh) {
        if (!runnable_) {
            if (!live_ || cluster) return nullptr;
            deadlock();
        }
        if (cluster && config().order == Order::random && random() % 61 == 0) return nullptr;
        if (config().order == Order::random && random() % 61 == 0) draw_ranks();
        Warp& w = warps_[by_rank_[(unsigned)__builtin_ctz(runnable_)]];
        const uint32_t lanes = w.ready | w.fresh;
        unsigned lane = (unsigned)__builtin_ctz(lanes);
        if (config().order == Order::reverse) lane = 31 - (unsigned)__builtin_clz(lanes);
        if (config().order == Order::random) {
            lane = nth_lane(lanes, random() % (unsigned)__builtin_popcount(lanes));
        }
        const uint32_t bit = 1u << lane;
        fresh = w.fresh & bit;
        w.ready &= ~bit;
        w.fresh &= ~bit;
        if (!(lanes & ~bit)) runnable_ &= ~(1u << w.rank);
        return &threads_[(size_t)(&w - warps_.data()) * 32 + lane];
    }

    [[noreturn]] void deadlock() {
        print_waiting();
        abort();
    }

    EMU_OPTIMIZED EMU_NO_TSAN void enter(Thread* t) {
        current = t;
        if (t && config().threads == 1) {
            emu_block = id.x;
            emu_thread = t->index;
        }
    }
    Fiber* take_fiber(Thread* owner);
    EMU_OPTIMIZED EMU_NO_TSAN void go(Fiber* to) {
        Fiber* from = running_;
        running_ = to;
        enter((Thread*)to->owner);
        if (from != to) switch_fiber(from, to);
    }
    static void fiber_entry();
    void run_threads();
    void thread_returned();
};

inline thread_local Block* block_ = nullptr;
EMU_OPTIMIZED inline Block& block() { return *block_; }

inline void Block::print_waiting() const {
    fprintf(stderr, "emu: deadlock in %s, block (%u, %u, %u): %u threads have not returned and none can go on\n", kernel, id.x,
            id.y, id.z, live_);
    std::map<std::pair<std::string, int>, std::vector<unsigned>> places;
    for (const Thread& t : threads_)
        if (t.waits) places[{t.where.file, t.where.line}].push_back(t.index);
    for (const auto& [place, waiting] : places)
        fprintf(stderr, "  %zu threads wait at %s:%d, the first is thread %u\n", waiting.size(), place.first.c_str(),
                place.second, waiting[0]);
}

inline void Cluster::open_if_all_arrived() {
    unsigned live = 0;
    for (const Block* b : blocks) live += b->live();
    if (arrived == 0 || arrived != live) return;
    arrived = 0;
    epoch++;
    for (const auto& [b, thread] : waiting) b->wake(thread);
    waiting.clear();
}

inline Fiber* Block::take_fiber(Thread* owner) {
    Fiber* f;
    if (!idle_.empty()) {
        f = idle_.back();
        idle_.pop_back();
    } else fibers_.push_back(f = Fiber::create(fiber_entry));
    f->owner = owner;
    return f;
}

inline void Block::fiber_entry() {
    entered_fiber(&block().main_);
    block().run_threads();
}

inline void Block::thread_returned() {
    Thread* t = current;
    if (!t->product_groups.empty()) fault("%s: thread %u returned with a wgmma that nobody waits for", kernel, t->index);
    if (!t->store_groups.empty()) fault("%s: thread %u returned with a TMA store that nobody waits for", kernel, t->index);
    Warp& w = warps_[t->warp];
    w.live &= ~(1u << t->lane);
    live_--;
    for (int i = 0; i < w.n_meetings; i++) {  // lanes may have waited only for this one
        Meeting& m = w.meetings[i];
        if (!m.arrived || m.arrived != (m.mask & w.live)) continue;
        forget_absent(m);
        make_ready(w, m.arrived);
        m.arrived = 0;
        m.epoch++;
    }
    open_if_all_arrived();
    if (cluster) cluster->open_if_all_arrived();
}

// A fiber's life: one thread after another.
inline void Block::run_threads() {
    quiet_begin();
    for (;;) {
        acquire(&live_);
        quiet_end();
        (*body_)();
        quiet_begin();
        release(&runnable_);
        thread_returned();
        bool fresh = false;
        Thread* next = pick(fresh);
#ifdef EMU_TSAN
        // A separate fiber for each thread of a block, or ThreadSanitizer would confuse two threads.
        Fiber* f = !next ? &main_ : fresh ? (next->fiber = take_fiber(next)) : next->fiber;
        quiet_end();
        go(f);
#else
        if (fresh) {
            running_->owner = next;
            next->fiber = running_;
            enter(next);
            continue;
        }
        idle_.push_back(running_);
        go(next ? next->fiber : &main_);
#endif
    }
}

inline void Block::start(uint3 block_id, const std::function<void()>& body) {
    id = block_id;
    body_ = &body;
    live_ = (unsigned)threads_.size();
    for (size_t i = 0; i < warps_.size(); i++) {
        Warp& w = warps_[i];
        const unsigned lanes = std::min<unsigned>(32, (unsigned)(threads_.size() - i * 32));
        w.live = w.fresh = lanes == 32 ? ~0u : (1u << lanes) - 1;
        w.ready = 0;
        w.n_meetings = 0;
    }
    for (Barrier& b : barriers) {
        b.arrived = 0;
        b.waiting.clear();
    }
    for (Thread& t : threads_) {
        t.products = 0;
        t.fenced = false;
    }
    objects.clear();
    async_view.clear();
    if (shared_bytes) memset(shared, 0xff, shared_bytes);  // NaNs, never zeros
    rng_ = (config().seed * 2654435761u + id.x * 40503u + id.y * 9973u + id.z * 31u) | 1;
    random();
    random();
    draw_ranks();
#ifdef EMU_TSAN
    main_.tsan = __tsan_get_current_fiber();
    for (Fiber* f : fibers_) Fiber::destroy(f);
    fibers_.clear();
    idle_.clear();
    // All fibers are created here: creating a thread orders it after its creator.
    for (size_t i = 0; i < threads_.size(); i++) fibers_.push_back(Fiber::create(fiber_entry));
    idle_ = fibers_;
#endif
    release(&live_);
}
// Until all threads have returned or, in a cluster, until it is another block's turn.
inline void Block::resume() {
    running_ = &main_;
    bool fresh = false;
    Thread* next = pick(fresh);
    if (!next) return;
    if (fresh) next->fiber = take_fiber(next);
    go(next->fiber);
}
inline void Block::finish() {
    acquire(&runnable_);
    for (const Barrier& b : barriers)
        if (b.arrived) fault("%s: %u threads arrived at a barrier that never opened", kernel, b.arrived);
    for (const auto& [address, object] : objects) object->block_ended(kernel);
}

// Runs the blocks of a cluster, or one block; the first has this index, the others follow along x.
inline void run_cluster(const std::vector<Block*>& blocks, uint3 first, const std::function<void()>& body) {
    Cluster cluster;
    cluster.blocks = blocks;
    for (unsigned rank = 0; rank < blocks.size(); rank++) {
        Block* b = block_ = blocks[rank];
        b->cluster = blocks.size() > 1 ? &cluster : nullptr;
        b->cluster_rank = rank;
        b->start({first.x + rank, first.y, first.z}, body);
    }
    const auto over = [](const Block* b) { return b->is_over(); };
    while (!std::all_of(blocks.begin(), blocks.end(), over)) {
        if (std::none_of(blocks.begin(), blocks.end(), [](const Block* b) { return b->can_resume(); })) {
            for (const Block* b : blocks) b->print_waiting();
            abort();
        }
        for (Block* b : blocks) {
            block_ = b;
            if (b->can_resume()) b->resume();
        }
    }
    for (Block* b : blocks) {
        block_ = b;
        b->finish();
        b->cluster = nullptr;
    }
}

// One pool for all kernels: a block keeps the fibers of its last run.
inline std::vector<std::unique_ptr<Block>>& block_pool() {
    static thread_local std::vector<std::unique_ptr<Block>> pool;
    return pool;
}

// Runs a whole grid: clusters of `cluster` blocks along x, in order, or config().threads at a time.
template <class Body>
void launch(dim3 grid, dim3 size, size_t shared_bytes, const char* kernel, const Body& body, unsigned cluster = 1) {
    Quiet quiet;
    const long n_clusters = (long)grid.x * grid.y * grid.z / cluster;
    std::vector<std::unique_ptr<Block>>& pool = block_pool();
    const unsigned n = (unsigned)std::min<long>(n_clusters, config().threads);
    while (pool.size() < n * cluster) pool.push_back(std::make_unique<Block>());
    const std::function<void()> call = body;
    std::atomic<long> next{0};
    const auto work = [&](unsigned worker) {
        Quiet quiet_too;
        Block* const before = block_;
        const size_t room = (shared_bytes + 255) / 128 * 128;
        std::vector<Block*> blocks;
        for (unsigned i = 0; i < cluster; i++) {
            Block* b = pool[worker * cluster + i].get();
            b->prepare(grid, size, shared_bytes, kernel);
            b->shared = (unsigned char*)aligned_alloc(1024, (room + 1023) / 1024 * 1024);  // TMA needs up to 1024
#ifdef EMU_ASAN
            __asan_poison_memory_region(b->shared + shared_bytes, room - shared_bytes);
#endif
            blocks.push_back(b);
        }
        for (long i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_clusters;) {
            const long first = i * cluster;
            run_cluster(
                blocks,
                {(unsigned)(first % grid.x), (unsigned)(first / grid.x % grid.y), (unsigned)(first / ((long)grid.x * grid.y))},
                call);
        }
        for (Block* b : blocks) {
#ifdef EMU_ASAN
            __asan_unpoison_memory_region(b->shared, room);
#endif
            free(b->shared);
        }
        block_ = before;
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < n; i++) others.emplace_back(work, i);
    work(0);
    for (std::thread& t : others) t.join();
}

}  // namespace emu
