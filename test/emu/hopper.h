// The instructions of llmc/gpu/hopper.cuh on the CPU.
//
// Layouts are exact: a tensor copy swizzles by the bits of the shared address, wgmma follows its 64-bit descriptors, so a
// wrong descriptor gives wrong numbers here too. Shared addresses count from the block's dynamic shared memory, which starts
// at 1024 as on a GPU (the system keeps the first 1024 bytes).
// Asynchronous work runs as late as possible or, in random order, occasionally at once: a TMA load when a thread waits for its
// mbarrier, a TMA store and a matrix product when its thread waits for its group. A missing wait then results in old or new
// data in the wrong place.
// Errors that end the program: an mbarrier not initialized or with too many arrivals, a copy or product that nobody waits for,
// threads of a warpgroup that issue different products, a product after an access to registers without wgmma_fence in between,
// addresses without the alignment that the hardware requires, ordinary stores to shared memory that a TMA store or a product
// then reads without fence_proxy_async. The storing thread is unknown: a fence covers all earlier stores, in most blocks (a
// copy of the shared memory per thread would be too expensive) for all before the next product or TMA store.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <deque>

#include "../../llmc/base/types.h"

// Last parameters of a function: its caller's place in the source.
#define EMU_CALLER const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define EMU_CALLED_FROM (emu::Where{file_, line_})

namespace emu {

// A random choice; always false in orders other than random.
inline bool by_chance(unsigned one_in) { return config().order == Order::random && block().random() % one_in == 0; }
// The number of times that a thread waiting for asynchronous work lets others run first.
inline unsigned draw_patience() { return by_chance(2) ? 100 : 0; }

// ---- shared addresses and the swizzle --------------------------------------------------------------------------------------
constexpr uint32_t shared_base = 1024;

inline uint32_t shared_address(const void* p, size_t bytes, uint32_t alignment, Where where) {
    const unsigned char *from = block().shared, *at = (const unsigned char*)p;
    if (at < from || at + bytes > from + block().shared_bytes)
        fault("%s:%d: not within the block's dynamic shared memory", where.file, where.line);
    const uint32_t address = shared_base + (uint32_t)(at - from);
    if (address % alignment)
        fault("%s:%d: shared address %u is not a multiple of %u", where.file, where.line, address, alignment);
    return address;
}
inline unsigned char* shared_pointer(uint32_t address, Where where) {
    if (address < shared_base || address - shared_base >= block().shared_bytes)
        fault("%s:%d: shared address %u is outside the block's %zu bytes", where.file, where.line, address,
              block().shared_bytes);
    return block().shared + (address - shared_base);
}
// Within rows of `span` bytes, the number of a 16-byte chunk is XORed with the row's number, counted in rows of 128 bytes.
inline uint32_t swizzled(uint32_t address, unsigned span) {
    return span ? address ^ ((address >> 7 & (span / 16 - 1)) << 4) : address;
}

// ---- fence_proxy_async -----------------------------------------------------------------------------------------------------
inline unsigned char* async_view() {
    Block& b = block();
    if (b.async_view.empty()) {
        b.async_view.assign(b.shared_bytes, 0xff);
        b.fenced = false;
        b.each_fence = by_chance(16);
    }
    return b.async_view.data();
}
// Records that TMA has written there.
inline void see(const void* p, size_t bytes) {
    Quiet quiet;
    memcpy(async_view() + ((const unsigned char*)p - block().shared), p, bytes);
}
inline void fence_proxy_async() {
    Quiet quiet;
    async_view();
    block().fenced = true;
    if (block().each_fence) {
        see(block().shared, block().shared_bytes);
        block().fenced = false;
    }
}
inline void expect_fenced(const void* p, size_t bytes, Where where) {
    unsigned char* const view = async_view();
    if (block().fenced) {
        see(block().shared, block().shared_bytes);
        block().fenced = false;
    }
    if (memcmp(p, view + ((const unsigned char*)p - block().shared), bytes) != 0)
        fault("%s:%d: reads ordinary stores to shared memory that no fence_proxy_async followed", where.file, where.line);
}

// ---- mbarriers -------------------------------------------------------------------------------------------------------------
// A phase ends when `expected` threads and all announced bytes have arrived; then the next one starts.
struct Mbarrier : Object {
    unsigned expected = 0, missing = 0, phase = 0;
    long bytes = 0;  // announced and not arrived; may be negative within a phase
    unsigned patience = 0;
    std::vector<std::function<void()>> copies;  // under way
    std::vector<Thread*> waiting;
    char issued = 0, ended[2] = {0, 0};  // sync objects for ThreadSanitizer

    void wake_all() {
        for (Thread* t : waiting) block().wake(t);
        waiting.clear();
    }
    bool end_phase_if_complete() {
        if (missing || bytes) return false;
        phase++;
        missing = expected;
        wake_all();
        return true;
    }
    void make_copy() {
        std::function<void()> copy;
        {
            Quiet quiet;
            copy = std::move(copies.front());
            copies.erase(copies.begin());
        }
        acquire(&issued);
        copy();
        release(&ended[phase % 2]);
        Quiet quiet;
        copy = nullptr;
        end_phase_if_complete();
    }
    void block_ended(const char* kernel) override {
        if (!copies.empty()) fault("%s: the block ended while %zu TMA loads were under way", kernel, copies.size());
    }
};

inline Mbarrier& mbarrier(const void* p, Where where) {
    const auto found = block().objects.find(p);
    if (found == block().objects.end()) fault("%s:%d: this mbarrier was not initialized", where.file, where.line);
    return *(Mbarrier*)found->second.get();
}
inline void mbarrier_init(void* p, unsigned count, Where where) {
    Quiet quiet;
    shared_address(p, 8, 8, where);
    auto m = std::make_unique<Mbarrier>();
    m->expected = m->missing = count;
    block().objects[p] = std::move(m);
}
// Returns true if the phase is complete.
inline bool arrive(Mbarrier& m, unsigned bytes, Where where) {
    // Nobody waits for the copies of this phase, and here is the latest possible time.
    while (m.missing == 0 && !m.copies.empty()) m.make_copy();
    Quiet quiet;
    if (m.missing == 0) fault("%s:%d: more than %u arrivals in one phase of an mbarrier", where.file, where.line, m.expected);
    release(&m.ended[m.phase % 2]);
    m.missing--;
    m.bytes += bytes;
    return m.end_phase_if_complete();
}
inline void mbarrier_arrive(void* p, unsigned bytes, Where where) {
    quiet_begin();
    Mbarrier& m = mbarrier(p, where);
    quiet_end();
    if (!arrive(m, bytes, where)) return;
    Quiet quiet;
    block().yield(where);  // waiting threads first
}

// ---- clusters --------------------------------------------------------------------------------------------------------------
inline unsigned cluster_size() { return block().cluster ? (unsigned)block().cluster->blocks.size() : 1; }
// f(p, the same place in its shared memory) on behalf of a block of the cluster; nothing in it may wait.
template <class F>
void in_block(unsigned rank, const void* p, Where where, F f) {
    Block* const mine = block_;
    if (rank >= cluster_size()) fault("%s:%d: block %u of a cluster of %u", where.file, where.line, rank, cluster_size());
    Block* const other = mine->cluster ? mine->cluster->blocks[rank] : mine;
    if (other->is_over()) fault("%s:%d: block %u of the cluster has ended", where.file, where.line, rank);
    block_ = other;
    f(other->shared + ((const unsigned char*)p - mine->shared));
    block_ = mine;
}
inline void mbarrier_arrive_in(void* p, unsigned rank, Where where) {
    {
        Quiet quiet;
        shared_address(p, 8, 8, where);
    }
    bool over = false;
    in_block(rank, p, where, [&](void* there) {
        quiet_begin();
        Mbarrier& m = mbarrier(there, where);
        quiet_end();
        over = arrive(m, 0, where);
    });
    Quiet quiet;
    if (over) block().yield(where);
}
inline void cluster_sync(Where where) {
    Quiet quiet;
    Cluster* c = block().cluster;
    if (!c) return block().barrier(0, 0, true, where);
    char* sync = &c->sync[c->epoch % 2];
    release(sync);
    c->arrived++;
    c->waiting.push_back({&block(), block().current});
    c->open_if_all_arrived();
    block().wait(where);
    acquire(sync);
}

// Returns once the phase with this parity, the current or the previous one, is complete.
inline void mbarrier_wait(const void* p, unsigned parity, Where where) {
    Mbarrier* m;
    {
        Quiet quiet;
        m = &mbarrier(p, where);
    }
    for (;;) {
        bool copy;
        {
            Quiet quiet;
            if (m->phase % 2 != parity) break;
            copy = !m->copies.empty() && !m->patience;
            if (m->patience) {
                m->patience--;
                block().yield(where);
            } else if (!copy) {
                m->waiting.push_back(block().current);
                block().wait(where);
            }
        }
        if (copy) m->make_copy();
    }
    acquire(&m->ended[parity]);
}
// A copy that ends by `bytes` arriving at the mbarrier.
inline void start_copy(void* p, unsigned bytes, std::function<void()> copy, Where where) {
    bool now;
    Mbarrier* m;
    {
        Quiet quiet;
        m = &mbarrier(p, where);
        m->copies.push_back([=] {
            copy();
            Quiet quiet_too;
            m->bytes -= bytes;
        });
        release(&m->issued);
        m->wake_all();
        m->patience = draw_patience();
        now = by_chance(2);
    }
    while (now && !m->copies.empty()) m->make_copy();
}

// ---- TMA -------------------------------------------------------------------------------------------------------------------
struct Box {
    TensorMap map;
    int64_t start[5];
    uint32_t shared;
    Where where;

    size_t bytes() const {
        size_t n = map.element_bytes;
        for (unsigned d = 0; d < map.rank; d++) n *= map.box[d];
        return n;
    }
    // f(address in the tensor, or null outside it; shared memory; bytes) for each piece of at most 16 bytes.
    template <class F>
    void each_piece(F f) const {
        const unsigned row_bytes = map.box[0] * map.element_bytes;
        const size_t rows = bytes() / row_bytes;
        for (size_t row = 0; row < rows; row++) {
            unsigned char* line = map.address;
            bool inside = true;
            for (size_t d = 1, rest = row; d < map.rank; rest /= map.box[d], d++) {
                const int64_t index = start[d] + (int64_t)(rest % map.box[d]);
                inside = inside && index >= 0 && index <= (int64_t)map.last_index[d];
                line += inside ? (uint64_t)index * map.stride[d - 1] : 0;
            }
            for (unsigned at = 0; at < row_bytes; at += 16) {
                unsigned char* to =
                    shared_pointer(swizzled(shared + (uint32_t)(row * row_bytes) + at, map.swizzle_bytes), where);
                const int64_t first = start[0] + at / map.element_bytes, n = 16 / map.element_bytes;
                if (inside && first >= 0 && first + n - 1 <= (int64_t)map.last_index[0]) {
                    f(line + first * map.element_bytes, to, 16u);
                    continue;
                }
                for (int64_t e = 0; e < n; e++) {
                    const bool there = inside && first + e >= 0 && first + e <= (int64_t)map.last_index[0];
                    f(there ? line + (first + e) * map.element_bytes : nullptr, to + e * map.element_bytes,
                      (unsigned)map.element_bytes);
                }
            }
        }
    }
};

template <int rank>
Box box_of(const void* shared, const CUtensorMap& tensor, const int (&start)[rank], Where where) {
    Box box{};
    memcpy(&box.map, &tensor, sizeof box.map);
    box.where = where;
    if (box.map.mark != TensorMap::written) fault("%s:%d: this is no tensor map", where.file, where.line);
    if (box.map.rank != rank)
        fault("%s:%d: %d coordinates for a tensor map of rank %u", where.file, where.line, rank, box.map.rank);
    if (box.map.swizzle_bytes && box.map.box[0] * box.map.element_bytes != box.map.swizzle_bytes)
        fault("%s:%d: a swizzled box has rows of %u bytes, not of %u", where.file, where.line, box.map.swizzle_bytes,
              box.map.box[0] * box.map.element_bytes);
    for (int d = 0; d < rank; d++) box.start[d] = start[d];
    if (start[0] * (int)box.map.element_bytes % 16)  // an illegal instruction on an H100
        fault("%s:%d: a box begins at element %d of a row, within 16 bytes", where.file, where.line, start[0]);
    box.shared = shared_address(shared, box.bytes(), 128, where);
    return box;
}

// To this block, or with a mask to each block of the cluster whose bit is set, at the same place in its shared memory.
template <int rank>
void tma_load(void* shared, const CUtensorMap& tensor, void* mbarrier, const int (&start)[rank], Where where,
              unsigned mask = 0) {
    quiet_begin();
    const Box box = box_of(shared, tensor, start, where);
    quiet_end();
    const auto copy = [box] {
        box.each_piece([](const unsigned char* from, unsigned char* to, unsigned n) {
            if (from) memcpy(to, from, n);
            else memset(to, 0, n);
            see(to, n);
        });
    };
    if (!mask) return start_copy(mbarrier, (unsigned)box.bytes(), copy, where);
    for (unsigned block = 0; mask >> block; block++)
        if (mask >> block & 1)
            in_block(block, mbarrier, where, [&](void* there) { start_copy(there, (unsigned)box.bytes(), copy, where); });
}
inline void bulk_load(void* shared, const void* from, unsigned bytes, void* mbarrier, Where where) {
    shared_address(shared, bytes, 16, where);
    if ((uintptr_t)from % 16 || bytes % 16) fault("%s:%d: a bulk copy wants multiples of 16", where.file, where.line);
    start_copy(
        mbarrier, bytes,
        [=] {
            memcpy(shared, from, bytes);
            see(shared, bytes);
        },
        where);
}

template <int rank>
void tma_store(const CUtensorMap& tensor, const void* shared, const int (&start)[rank], Where where) {
    quiet_begin();
    const Box box = box_of(shared, tensor, start, where);
    for (const int first : start)  // an illegal instruction on an H100
        if (first < 0) fault("%s:%d: a box is stored at %d", where.file, where.line, first);
    box.each_piece([&](unsigned char* to, const unsigned char* from, unsigned n) {
        if (to) expect_fenced(from, n, where);
    });
    auto& groups = block().current->store_groups;
    if (groups.empty()) groups.emplace_back();
    const bool now = by_chance(4);
    quiet_end();
    const auto copy = [box] {
        box.each_piece([](unsigned char* to, const unsigned char* from, unsigned n) {
            if (to) memcpy(to, from, n);
        });
    };
    if (now) copy();
    else groups.back().push_back(copy);
}
inline void bulk_add(float* to, const float* shared, unsigned bytes, Where where) {
    quiet_begin();
    shared_address(shared, bytes, 16, where);
    if ((uintptr_t)to % 16 || bytes % 16) fault("%s:%d: a bulk addition wants multiples of 16", where.file, where.line);
    expect_fenced(shared, bytes, where);
    auto& groups = block().current->store_groups;
    if (groups.empty()) groups.emplace_back();
    const bool now = by_chance(4);
    quiet_end();
    const auto add = [=] {
        for (unsigned i = 0; i < bytes / sizeof(float); i++) atomicAdd(to + i, shared[i]);
    };
    if (now) add();
    else groups.back().push_back(add);
}
inline void tma_store_commit() {
    auto& groups = block().current->store_groups;
    if (!groups.empty()) groups.emplace_back();  // the last one is open
}
inline void tma_store_wait(size_t pending) {
    auto& groups = block().current->store_groups;
    while (groups.size() > pending + 1) {
        for (const auto& copy : groups.front()) copy();
        groups.erase(groups.begin());
    }
    if (groups.size() == 1 && groups[0].empty()) groups.clear();
}

// ---- wgmma -----------------------------------------------------------------------------------------------------------------
struct WarpgroupProduct {
    int N = 0;
    bool a_in_registers = false, a_by_columns = false, b_by_columns = false, accumulate = false;
    uint64_t a = 0, b = 0;
    unsigned issued = 0, patience = 0;  // issued by so many of 128 threads
    Where where;
    uint32_t registers[128][4];
    float* d[128];
};

// The products of one warpgroup, in the order in which its threads issue them; completed ones are removed.
struct Warpgroup : Object {
    std::deque<WarpgroupProduct> products;
    unsigned first = 0, commits = 0;  // number of completed products; of commits by all threads
    std::vector<Thread*> waiting;
    char issued = 0, done = 0;  // sync objects for ThreadSanitizer

    static Warpgroup& mine() {
        // Warpgroups have no address: their number is used instead.
        auto& object = block().objects[(const void*)(uintptr_t)(block().current->warp / 4 + 1)];
        if (!object) object = std::make_unique<Warpgroup>();
        return *(Warpgroup*)object.get();
    }
    bool ready() const { return !products.empty() && products.front().issued == 128; }
    void run_first();
};

struct MatrixDescriptor {
    uint32_t start, leading, stride;
    MatrixDescriptor(uint64_t bits, Where where)
        : start((uint32_t)(bits & 0x3fff) << 4),
          leading((uint32_t)(bits >> 16 & 0x3fff) << 4),
          stride((uint32_t)(bits >> 32 & 0x3fff) << 4) {
        if (bits >> 62 != 1 || (bits >> 49 & 7))
            fault("%s:%d: only matrix descriptors with a swizzle of 128 bytes and base offset 0 are emulated", where.file,
                  where.line);
    }
    // Rows of 128 bytes along K: eight of them make an atom, atoms of 8 rows are `stride` apart.
    uint32_t by_rows(int row, int k) const {
        return swizzled(start + (uint32_t)(row / 8) * stride + (uint32_t)(row % 8) * 128 + (uint32_t)k * 2, 128);
    }
    // Rows of 128 bytes along M or N, one for each k: atoms of 8 k are `stride` apart, those for 64 columns `leading`.
    uint32_t by_columns(int column, int k) const {
        return swizzled(start + (uint32_t)(column / 64) * leading + (uint32_t)(k / 8) * stride + (uint32_t)(k % 8) * 128 +
                            (uint32_t)(column % 64) * 2,
                        128);
    }
};

inline float shared_bf16(uint32_t address, Where where) {
    bf16 x;
    x.bits = *(const uint16_t*)shared_pointer(address, where);
    return (float)x;
}

template <int N>
EMU_OPTIMIZED EMU_NO_TSAN void multiply(float (&c)[64][N], const float (&a)[64][16], const float (&b)[16][N]) {
    for (int i = 0; i < 64; i++)
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < N; j++) c[i][j] += a[i][k] * b[k][j];
}

// f(row, column, index): element (row, column) of a (64, columns) matrix is register `index` of thread `thread`: warp w holds
// rows 16w .. 16w+15 and, of each 8 columns, the same elements as in mma.m16n8.
template <class F>
void each_register(int thread, int columns, F f) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int j = 0; j < columns / 8; j++)
        for (int r = 0; r < 4; r++) f(row + r / 2 * 8, 8 * j + column + r % 2, 4 * j + r);
}

// In pieces of 16 bytes, eight elements.
inline void expect_fenced_operands(const WarpgroupProduct& p) {
    const auto expect = [&](uint32_t address) { expect_fenced(shared_pointer(address, p.where), 16, p.where); };
    const MatrixDescriptor b(p.b, p.where);
    for (int i = 0; i < p.N * 2; i++) expect(p.b_by_columns ? b.by_columns(i / 16 * 8, i % 16) : b.by_rows(i / 2, i % 2 * 8));
    if (p.a_in_registers) return;
    const MatrixDescriptor a(p.a, p.where);
    for (int i = 0; i < 128; i++) expect(p.a_by_columns ? a.by_columns(i / 16 * 8, i % 16) : a.by_rows(i / 2, i % 2 * 8));
}

// Reads the operands as the waiting thread (ThreadSanitizer sees these accesses), writes the results for all.
template <int N>
void run_product(const WarpgroupProduct& p) {
    float a[64][16], b[16][N], c[64][N];
    const MatrixDescriptor b_matrix(p.b, p.where);
    for (int k = 0; k < 16; k++)
        for (int j = 0; j < N; j++)
            b[k][j] = shared_bf16(p.b_by_columns ? b_matrix.by_columns(j, k) : b_matrix.by_rows(j, k), p.where);
    if (p.a_in_registers) {
        Quiet quiet;
        for (int t = 0; t < 128; t++)
            each_register(t, 16, [&](int row, int column, int i) {
                bf16 x;
                x.bits = (uint16_t)(p.registers[t][i / 2] >> i % 2 * 16);
                a[row][column] = (float)x;
            });
    } else {
        const MatrixDescriptor a_matrix(p.a, p.where);
        for (int i = 0; i < 64; i++)
            for (int k = 0; k < 16; k++)
                a[i][k] = shared_bf16(p.a_by_columns ? a_matrix.by_columns(i, k) : a_matrix.by_rows(i, k), p.where);
    }
    Quiet quiet;
    for (int t = 0; t < 128; t++)
        each_register(t, N, [&](int row, int column, int i) { c[row][column] = p.accumulate ? p.d[t][i] : 0; });
    multiply<N>(c, a, b);
    for (int t = 0; t < 128; t++) each_register(t, N, [&](int row, int column, int i) { p.d[t][i] = c[row][column]; });
}

inline void Warpgroup::run_first() {
    acquire(&issued);
    const WarpgroupProduct& p = products.front();
    switch (p.N) {
        case 32: run_product<32>(p); break;
        case 64: run_product<64>(p); break;
        case 128: run_product<128>(p); break;
        case 192: run_product<192>(p); break;
        case 256: run_product<256>(p); break;
        default: fault("%s:%d: wgmma with N = %d is not emulated", p.where.file, p.where.line, p.N);
    }
    release(&done);
    Quiet quiet;
    products.pop_front();
    first++;
}

template <int N>
void issue_product(float (&d)[N / 2], const uint32_t* a_registers, uint64_t a, bool a_by_columns, uint64_t b, bool b_by_columns,
                   bool accumulate, Where where) {
    Quiet quiet;
    Thread* t = block().current;
    Warpgroup& w = Warpgroup::mine();
    if (!t->fenced) fault("%s:%d: wgmma without wgmma_fence since registers were accessed", where.file, where.line);
    const unsigned number = t->products++;
    while (w.first + w.products.size() <= number) w.products.emplace_back();
    WarpgroupProduct& p = w.products[number - w.first];
    if (p.issued == 0) {
        p.N = N;
        p.a_in_registers = a_registers;
        p.a_by_columns = a_by_columns;
        p.b_by_columns = b_by_columns;
        p.accumulate = accumulate;
        p.a = a;
        p.b = b;
        p.where = where;
    } else if (p.N != N || p.a_in_registers != (a_registers != nullptr) || p.a_by_columns != a_by_columns ||
               p.b_by_columns != b_by_columns || p.accumulate != accumulate || p.a != a || p.b != b) {
        fault("%s:%d: a thread of the warpgroup issues another wgmma than the one at %s:%d, or with other descriptors",
              where.file, where.line, p.where.file, p.where.line);
    }
    const unsigned index = t->index % 128;
    if (a_registers) memcpy(p.registers[index], a_registers, sizeof p.registers[index]);
    p.d[index] = d;
    release(&w.issued);
    if (++p.issued == 128) {
        expect_fenced_operands(p);
        p.patience = draw_patience();
        for (Thread* other : w.waiting) block().wake(other);
        w.waiting.clear();
    }
}
inline void commit_products(Where where) {
    block().meet(~0u, nullptr, 0, where);  // a wgmma waits for all lanes of its warp; once per group is enough
    quiet_begin();
    Thread* t = block().current;
    Warpgroup& w = Warpgroup::mine();
    t->product_groups.push_back(t->products);
    const bool now = ++w.commits % 128 == 0 && by_chance(4);  // once per group
    quiet_end();
    while (now && w.ready()) w.run_first();
}
inline void wait_products(size_t pending, Where where) {
    quiet_begin();
    Thread* t = block().current;
    Warpgroup& w = Warpgroup::mine();
    auto& groups = t->product_groups;
    t->fenced = false;
    if (groups.size() > pending) {
        const unsigned wanted = groups[groups.size() - pending - 1];
        groups.erase(groups.begin(), groups.end() - (long)pending);
        while (w.first < wanted) {
            if (!w.ready()) {
                w.waiting.push_back(t);
                block().wait(where);
                continue;
            }
            if (w.products.front().patience) {
                w.products.front().patience--;
                block().yield(where);
                continue;
            }
            quiet_end();
            w.run_first();
            quiet_begin();
        }
    }
    quiet_end();
    acquire(&w.done);
}

// ---- stmatrix --------------------------------------------------------------------------------------------------------------
inline void stmatrix_of_lane(void* row, const uint32_t (&r)[4], Where where) {
    if ((uintptr_t)row % 16) fault("%s:%d: stmatrix to an address that is not a multiple of 16", where.file, where.line);
    auto table = block().meet(~0u, &row, sizeof row, where);
    const unsigned lane = block().current->lane;
    for (unsigned m = 0; m < 4; m++) {
        unsigned char* to;
        quiet_begin();
        memcpy(&to, table[m * 8 + lane / 4], sizeof to);
        quiet_end();
        memcpy(to + lane % 4 * 4, &r[m], 4);
    }
}

}  // namespace emu

namespace gpu::hopper {

inline void mbarrier_init(uint64_t* barrier, unsigned count, EMU_CALLER) {
    emu::mbarrier_init(barrier, count, EMU_CALLED_FROM);
}
inline void mbarrier_fence() {}
inline void mbarrier_arrive(uint64_t* barrier, EMU_CALLER) { emu::mbarrier_arrive(barrier, 0, EMU_CALLED_FROM); }
inline void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes, EMU_CALLER) {
    emu::mbarrier_arrive(barrier, bytes, EMU_CALLED_FROM);
}
inline void mbarrier_wait(uint64_t* barrier, unsigned parity, EMU_CALLER) {
    emu::mbarrier_wait(barrier, parity, EMU_CALLED_FROM);
}

inline unsigned cluster_rank() { return emu::block().cluster_rank; }
inline void cluster_sync(EMU_CALLER) { emu::cluster_sync(EMU_CALLED_FROM); }
inline void mbarrier_arrive_in(uint64_t* barrier, unsigned rank, EMU_CALLER) {
    emu::mbarrier_arrive_in(barrier, rank, EMU_CALLED_FROM);
}

inline void tma_prefetch(const CUtensorMap&) {}
inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1, EMU_CALLER) {
    emu::tma_load<2>(to, map, barrier, {x0, x1}, EMU_CALLED_FROM);
}
inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1, int x2, EMU_CALLER) {
    emu::tma_load<3>(to, map, barrier, {x0, x1, x2}, EMU_CALLED_FROM);
}
inline void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1, int x2, int x3, EMU_CALLER) {
    emu::tma_load<4>(to, map, barrier, {x0, x1, x2, x3}, EMU_CALLED_FROM);
}
inline void tma_store(const CUtensorMap& map, const void* from, int x0, int x1, EMU_CALLER) {
    emu::tma_store<2>(map, from, {x0, x1}, EMU_CALLED_FROM);
}
inline void tma_store(const CUtensorMap& map, const void* from, int x0, int x1, int x2, EMU_CALLER) {
    emu::tma_store<3>(map, from, {x0, x1, x2}, EMU_CALLED_FROM);
}
inline void tma_store(const CUtensorMap& map, const void* from, int x0, int x1, int x2, int x3, EMU_CALLER) {
    emu::tma_store<4>(map, from, {x0, x1, x2, x3}, EMU_CALLED_FROM);
}
inline void tma_load_multicast(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1, uint16_t blocks,
                               EMU_CALLER) {
    emu::tma_load<2>(to, map, barrier, {x0, x1}, EMU_CALLED_FROM, blocks);
}
inline void bulk_add(float* to, const float* from, unsigned bytes, EMU_CALLER) {
    emu::bulk_add(to, from, bytes, EMU_CALLED_FROM);
}
inline void tma_store_commit() { emu::tma_store_commit(); }
template <int pending>
void tma_store_wait() {
    emu::tma_store_wait(pending);
}
inline void bulk_load(void* to, const void* from, unsigned bytes, uint64_t* barrier, EMU_CALLER) {
    emu::bulk_load(to, from, bytes, barrier, EMU_CALLED_FROM);
}
inline void fence_proxy_async() { emu::fence_proxy_async(); }

inline uint32_t descriptor_address(const void* p, EMU_CALLER) { return emu::shared_address(p, 16, 16, EMU_CALLED_FROM); }
inline void wgmma_fence() { emu::block().current->fenced = true; }
template <int R>
void wgmma_fence(float (&)[R]) {
    wgmma_fence();
}
template <int R, int S>
void wgmma_fence(float (&)[R], uint32_t (&)[S][4]) {
    wgmma_fence();
}
template <int N, Major b_major, Major a_major = Major::rows>
void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, EMU_CALLER) {
    emu::issue_product<N>(d, nullptr, a, a_major == Major::columns, b, b_major == Major::columns, accumulate, EMU_CALLED_FROM);
}
template <int N, Major b_major, Major a_major = Major::rows>
void wgmma_set(float (&d)[N / 2], uint64_t a, uint64_t b, EMU_CALLER) {
    wgmma<N, b_major, a_major>(d, a, b, false, file_, line_);
}
template <int N, Major b_major>
void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate, EMU_CALLER) {
    emu::issue_product<N>(d, a, 0, false, b, b_major == Major::columns, accumulate, EMU_CALLED_FROM);
}
inline void wgmma_commit(EMU_CALLER) { emu::commit_products(EMU_CALLED_FROM); }
template <int pending, int R>
void wgmma_wait(float (&)[R], EMU_CALLER) {
    emu::wait_products(pending, EMU_CALLED_FROM);
}
template <int pending>
void wgmma_wait(EMU_CALLER) {
    emu::wait_products(pending, EMU_CALLED_FROM);
}

inline void stmatrix_x4(void* row, const uint32_t (&r)[4], EMU_CALLER) { emu::stmatrix_of_lane(row, r, EMU_CALLED_FROM); }

inline void end_of_basic_block(bool) {}

inline void named_barrier_sync(unsigned number, unsigned threads, EMU_CALLER) {
    emu::block().barrier(number, threads, true, EMU_CALLED_FROM);
}
inline void named_barrier_arrive(unsigned number, unsigned threads, EMU_CALLER) {
    emu::block().barrier(number, threads, false, EMU_CALLED_FROM);
}
template <int n>
void registers_decrease() {
    static_assert(n % 8 == 0 && n >= 24 && n <= 256, "what setmaxnreg takes");
}
template <int n>
void registers_increase() {
    static_assert(n % 8 == 0 && n >= 24 && n <= 256, "what setmaxnreg takes");
}

}  // namespace gpu::hopper
