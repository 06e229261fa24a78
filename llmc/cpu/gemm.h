// The three products of linear layers on a matrix unit (matrix_unit.h): in bf16, in fp32, in bf16 widened to fp32, or in fp32
// split into bf16 parts (packing.h). On AMX, six products of parts take less time than one fp32 product on AVX-512, and the
// omitted terms are smaller than fp32's own roundings (Henry, Tang and Heinecke, 2019).
//   rows_times      out (N, C) = a (N, K) b (K, C)     forward: inp times weight^T; backward_input: dout times weight
//   columns_times   c (M, C) (+)= a^T b of a (N, M), b (N, C)     backward_weight: dout and inp
// Cache blocking (Goto and van de Geijn, 2008): a packed panel of the right operand, 1024 of k by at most 256 columns (512 on
// AMX), stays in the L2 cache (struct Blocking). The L1 cache holds either 32 columns and 512 of k (256 in fp32) of the panel,
// which are multiplied with 128 rows; or, on AMX, 32 rows and up to 768 of k, which are multiplied with the whole panel: L2
// delivers packed columns faster than scattered rows, and sums need fewer passes over k. Each number from beyond the L2 cache
// is used in at least 512 operations. Right operands are packed when needed, by the thread that uses them: weights are read in
// place, and no packed copies are kept. Left operands are read in place, unless they are split or widened: then they are
// packed, too.
// rows_times: threads share columns, and also rows where that balances better. columns_times: threads pack b together, then
// share the rows of c.
// Epilogue: while the next strip's tiles are multiplied, the sums of a strip of 64 columns are finished row by row
// (OverlappedWork): rounded, with bias, and with an op that would otherwise be separate and memory-bound: GeLU, SwiGLU, their
// derivatives, a residual sum, a rotation. Its inputs are prefetched during the strip's own products; its outputs use
// non-temporal stores where the unit is faster than memory (streams()): two cache lines at once, which memory accepts twice as
// fast as single ones.
// Results have the bits of the separate ops: sums are rounded as if they were stored first.
// Every sum runs over k in order: the bits depend on the unit, not on threads or blocks. K not a multiple of 64 bytes, and N, M
// or C not multiples of 16, are multiplied as zero-padded copies (in columns_times N is padded while packing).
#pragma once
#include <algorithm>
#include <limits>

#include "../base/math.h"
#include "../ops.h"
#include "ctx.h"
#include "packing.h"
#include "parallel.h"
#include "rope.h"
#include "vectors.h"

#if CPU_FAST_PATHS

namespace cpu {
namespace detail {
namespace gemm {

constexpr int narrow = 32;         // columns of one micro-kernel call
constexpr int strip_rows = 32;     // rows of one call on a tile unit; other units process all rows of the block at once
constexpr int tile_depth = 32;     // of k, between two pieces of overlapped work
constexpr int strip_columns = 64;  // finished together: two cache lines of bf16 written at once
template <class E>
constexpr int slab = parts<E> == 1 ? 1024 : 768;
template <class E>
constexpr int most_rows = parts<E> == 1 ? 128 : 64;

// Cache blocking of K and the columns. The L2 cache holds a panel of the right operand: `slab` of k by `columns`. The L1 cache
// holds, for `depth` of k, either 32 of its columns, which are multiplied with `rows` rows of the left operand; or these rows,
// which are multiplied with all columns of the panel.
// In BLIS's terms for rows_times (b is its B): `slab` is KC, `columns` NC, `rows` MC, and a call of the micro-kernel has up to
// `narrow` columns. But BLIS keeps its panel of B in the L3 cache; here it stays in L2, and `depth` cuts KC once more for L1.
template <class E>
struct Blocking {
    int slab = gemm::slab<E>, columns = 256;
    int depth = parts<E> == 1 ? 1024 / (int)sizeof(E) : 128 /*32 columns: 32 KiB, 24 of parts*/, rows = most_rows<E>;
    Streamed streamed = Streamed::left;
    static bool in_tiles(const MatrixUnit<E>& unit) { return unit.tiles && parts<E> == 1; }
    bool keeps_left() const { return streamed == Streamed::right; }
    // With tiles, the L2 cache has 2 MiB: up to `most` of k are one slab, with fewer columns, so that sums need no second pass.
    Blocking(const MatrixUnit<E>& unit, int K, int most) {
        if (!in_tiles(unit)) return;
        columns = 512;
        if (K <= slab) return;
        const int deeper = round_up(std::min(K, most), k_step<E>);
        columns = std::max(slab * columns / deeper / strip_columns, 1) * strip_columns;
        slab = deeper;
    }
    // Keeps rows of the left operand in L1, with a depth that gives few passes over k; each pass loads and stores all sums.
    void keep_left(int K) {
        const int whole = std::min(K, slab), most = whole <= 768 ? 768 : 640;
        columns = std::min(512, 1280 * 512 / whole / strip_columns * strip_columns);
        depth = round_up(ceil_div(whole, ceil_div(whole, most)), k_step<E>);
        rows = strip_rows;
        streamed = Streamed::right;
    }
};

template <class E>
constexpr int k_multiple_of(const MatrixUnit<E>&) {
    return k_multiple<E>;
}

// A packed operand, possibly in bf16 parts.
template <class E>
struct Operand {
    const E* x;
    size_t part;  // elements from one part to the next
};
// A left operand, with rows `stride` elements apart.
template <class E>
struct Left : Operand<E> {
    int stride;
    // Points to these rows: in place, or widened or split at `to`, with the part and stride already set.
    void pack(E* to, const floatX* rows, int rows_stride, int count, int K) {
        if constexpr (as_stored_in<E>) {
            this->x = rows;
            stride = rows_stride;
        } else if constexpr (parts<E> == 1) widen_rows(to, (size_t)stride, rows, (size_t)rows_stride, count, K);
        else split_rows(to, this->part, (size_t)stride, rows, (size_t)rows_stride, count, K);
    }
};

// Divides a result (N, C) among threads into panels of columns, and panels into blocks of rows where that minimizes the time of
// the busiest thread, which packs its panels and reads its rows for each of them. A thread's first tasks are consecutive
// (team.h): they are the panels of its block of rows. Each thread has one block, so a narrow last panel affects all alike.
struct Partition {
    int columns = 0, panels = 0, rows = 0, parts = 0;
    int panel(int task) const { return task % panels; }
    int part(int task) const { return task / panels; }
    Partition(int N, int C, int widest, int threads, bool tiles, int strip) {
        const double packed = tiles ? 250 : 25, read = tiles ? 100 : 10;  // cost per number, in multiply-adds of the unit
        double least = std::numeric_limits<double>::infinity();
        for (int down = 1; down <= threads; down++) {  // threads that share a panel
            if (threads % down != 0) continue;
            const int across = threads / down, share = ceil_div(C, across);
            const int wide = round_up(ceil_div(share, ceil_div(share, widest)), strip), count = ceil_div(C, wide);
            const int high = round_up(ceil_div(N, down), strip_rows), each = ceil_div(count, across);
            const int own = across == 1 ? C : each * wide;  // columns, of all panels if a thread has all
            const double time = (double)own * high + (double)each * (packed * wide + read * high);
            if (time < least) {
                least = time;
                columns = wide;
                panels = count;
                rows = high;
                parts = ceil_div(N, high);
            }
        }
    }
};

// Processes each row of a strip of sums: a function object behind pointers, so that products are compiled once for all
// epilogues.
struct Epilogue {
    int strip;                            // columns finished together
    const void* function;                 // function(row, first column, columns, sums), the columns a constant for whole strips
    void (*finish_row)(OverlappedWork&);  // of a PendingEpilogue: calls it for the next row
};

// The pending epilogue of a strip: the remaining rows.
struct PendingEpilogue : OverlappedWork {
    const Epilogue epilogue;
    int row = 0, first = 0, columns = 0;
    float* sums = nullptr;
    explicit PendingEpilogue(const Epilogue& e) : OverlappedWork{e.finish_row}, epilogue(e) {}
    template <int strip, class F>
    __attribute__((flatten)) static void finish_row(OverlappedWork& work) {
        PendingEpilogue& p = static_cast<PendingEpilogue&>(work);
        const F& function = *static_cast<const F*>(p.epilogue.function);
        const std::integral_constant<int, strip> all;
        if (p.columns == strip) function(p.row, p.first, all, p.sums);
        else function(p.row, p.first, p.columns, p.sums);
        p.row++;
        p.sums += strip;
    }
    // Completes the previous strip and takes over this one.
    void begin_strip(int rows, int row_, int first_, int columns_, float* sums_) {
        finish();
        left = rows;
        row = row_;
        first = first_;
        columns = columns_;
        sums = sums_;
    }
};

// An epilogue that calls f; f must outlive it.
template <int strip = strip_columns, class F>
Epilogue finished_by(const F& f) {
    return {strip, &f, PendingEpilogue::finish_row<strip, F>};
}

// sums (rows, strip) = a b or sums += a b; b has `columns` columns, at most a strip, and b_rows rows, of which K are used.
// Overlaps with pieces of `overlapped`, and prefetches `prefetch`.
template <class E>
void multiply_strip(const MatrixUnit<E>& unit, float* sums, Left<E> a, Operand<E> b, int b_rows, int rows, int columns, int K,
                    const Blocking<E>& blocking, bool add, Prefetch prefetch, PendingEpilogue& overlapped) {
    const int strip = overlapped.epilogue.strip;
    const int passes = ceil_div(K, blocking.depth), step = round_up(ceil_div(K, passes), k_multiple<E>);
    const int high = unit.tiles ? strip_rows : rows;  // without overlapped work: all rows at once
    const int products = ceil_div(rows, high) * ceil_div(columns, narrow);
    const int at_a_time = ceil_div(prefetch.left(), passes * products);
    overlapped.per_step = ceil_div(overlapped.left, products * ceil_div(K, tile_depth));
    for (int n = 0; n < columns; n += narrow)
        for (int k = 0; k < K; k += step)
            for (int m = 0; m < rows; m += high) {
                const int here = std::min(high, rows - m), wide = std::min((int)narrow, columns - n);
                float* const to = sums + m * strip + n;
                const E *const left = a.x + (size_t)m * a.stride + k, *const right = b.x + right_index<E>(k, n, b_rows);
                const int deep = std::min(step, K - k);
                prefetch.issue(at_a_time);
                if constexpr (parts<E> == 1)
                    unit.product(to, strip, left, a.stride, right, b_rows, here, wide, deep, add || k > 0, blocking.streamed,
                                 &overlapped);
                else
                    unit.product_of_parts(to, strip, left, a.part, a.stride, right, b.part, b_rows, here, wide, deep,
                                          add || k > 0, &overlapped);
            }
}

// ---- products --------------------------------------------------------------------------------------------------------------
// A right operand (K, columns): rows of x; the transpose of rows; or of two matrices of F rows each, interleaved, 64 rows of
// each, so that both are in the same strip of 128 columns.
struct RightOperand {
    enum { as_rows, transposed, two_transposed } form;
    const floatX* x;
    size_t stride;
    int F = 0;
    static constexpr int each = strip_columns;
    template <class E>
    void pack(const MatrixUnit<E>& unit, E* to, size_t part, int k, int K, int first, int columns) const {
        const auto pack_rows_from = [&](E* here, int row, int rows) {
            pack_transposed_in_parts(unit, here, part, x + (size_t)row * stride + k, stride, rows, K);
        };
        if (form == as_rows)
            pack_rows_in_parts(unit, to, part, 16 * (size_t)K, x + (size_t)k * stride + first, stride, columns, K, K);
        else if (form == transposed) pack_rows_from(to, first, columns);
        else
            for (int c = first; c < first + columns; c += each)
                pack_rows_from(to + right_index<E>(0, c - first, K), c / (2 * each) * each + c / each % 2 * F, each);
    }
    // A prefetch of the numbers that pack() reads.
    Prefetch lines(int k, int K, int first, int columns) const {
        if (form == as_rows) return Prefetch(x + (size_t)k * stride + first, stride, K, columns);
        return form == transposed ? Prefetch(x + (size_t)first * stride + k, stride, columns, K) : Prefetch();
    }
};

// A stride for rows of K elements that avoids cache-set conflicts: an odd number of cache lines.
template <class E>
int spread(int K) {
    return K / k_step<E> % 2 ? K : K + k_step<E>;
}

// A copy of x (rows, columns), whose rows are `stride` apart, in ctx.copies[i], zero-padded to all_rows and all_columns.
inline const floatX* padded_copy(Ctx& ctx, int i, const floatX* x, size_t stride, int rows, int columns, int all_rows,
                                 int all_columns) {
    ctx.copies[i].resize((size_t)all_rows * all_columns);
    floatX* const copy = ctx.copies[i].data();
    parallel_for(all_rows, [=](int r) {
        floatX* const row = copy + (size_t)r * all_columns;
        const int there = r < rows ? columns : 0;
        std::copy_n(x + (size_t)r * stride, there, row);
        std::fill(row + there, row + all_columns, floatX(0));
    });
    return copy;
}
// x (rows, columns) in place, or such a copy.
inline const floatX* padded(Ctx& ctx, int i, const floatX* x, int rows, int columns, int all_rows, int all_columns) {
    if (rows == all_rows && columns == all_columns) return x;
    return padded_copy(ctx, i, x, (size_t)columns, rows, columns, all_rows, all_columns);
}

// An input of the epilogue: `rows` rows of C elements for each row of a result (N, C).
struct EpilogueInput {
    const floatX* x = nullptr;
    int rows = 1;
};

// The left operand's rows, `columns` numbers each; rows of experts are copied before they are multiplied (padded with zeros).
struct LeftRows {
    ExpertRows rows;
    int columns;
    bool in_place;
};
// A task of a product: rows [row, row + rows) of the result, of which `there` exist, in columns [column, column + columns). Its
// right operand starts `right` elements after the product's.
struct Block {
    int row, rows, there, column, columns;
    size_t right = 0;
};

// Copies `there` of `rows` rows from `row` on, their columns from `column` on, to rows of `wide` numbers, `stride` apart;
// numbers that do not exist are zero.
inline void gather_rows(floatX* to, size_t stride, const ExpertRows& from, int columns, int row, int there, int rows,
                        int column, int wide) {
    for (int r = 0; r < rows; r++, to += stride) {
        const int n = r < there ? std::min(wide, columns - column) : 0;
        if (n > 0) std::copy_n(from.x + from.row(row + r) * (size_t)columns + column, n, to);
        std::fill(to + n, to + wide, floatX(0));
    }
}

// Blocks of out (.., C) = a (.., K) b (K, C); K is a multiple of words. The epilogue receives each part of a row, which it may
// modify. Prefetches lines of `out`, if given and the result needs it in cache, and of `read`, the epilogue's input.
template <class E>
void multiply_blocks(Ctx& ctx, const MatrixUnit<E>& unit, floatX* out, EpilogueInput read, const LeftRows& a, int K, int C,
                     const RightOperand& b, const std::vector<Block>& blocks, Blocking<E> blocking, const Epilogue& epilogue) {
    const int strip = epilogue.strip;
    int widest = 0, tallest = 0;
    for (const Block& block : blocks) {
        widest = std::max(widest, block.columns);
        tallest = std::max(tallest, block.rows);
    }
    const int deepest = std::min(K, blocking.slab), pass = blocking.keeps_left() ? blocking.depth : deepest;
    // Sums of two alternating strips of columns; if they need several passes, of all strips; and with several slabs, of all
    // rows.
    const bool in_turn = K <= pass;
    const int kept = K > blocking.slab ? tallest : std::min(blocking.rows, tallest);
    const int strips = in_turn ? 2 : ceil_div(widest, strip);
    const size_t packed_size = (size_t)deepest * widest, strip_size = (size_t)kept * strip;
    const size_t rows_size = (size_t)blocking.rows * spread<E>(deepest), left_size = as_stored_in<E> ? 0 : rows_size;
    const size_t per_thread = parts<E> * (packed_size + left_size) * sizeof(E) + strips * strip_size * sizeof(float) +
                              (a.in_place ? 0 : rows_size * sizeof(floatX));
    char* memory = (char*)ctx.scratch(per_thread * (size_t)ctx.threads);
    // The prefetch of one pass: rows from n on, below `end`, and k below K_end.
    const auto left_lines = [=, &blocking, &a](int n, int end, int k, int K_end) {
        return n < end ? Prefetch(a.rows.x + (size_t)n * K + k, (size_t)K, std::min(blocking.rows, end - n),
                                  std::min(pass, K_end - k))
                       : Prefetch();
    };
    // The prefetch of the right operand from k on; at its end, of the next block's.
    const auto packed_next = [&](int64_t task, int k) {
        const size_t next = (size_t)task + (k == K);
        if (next == blocks.size()) return Prefetch();
        RightOperand right = b;
        right.x += blocks[next].right;
        return right.lines(k % K, std::min(blocking.slab, K - k % K), blocks[next].column, blocks[next].columns);
    };
    Team::run(ctx.threads, [&](Team::Member& me) {
        float* memory_of_sums = (float*)(memory + per_thread * (size_t)me.number);
        E *packed = (E*)(memory_of_sums + strips * strip_size), *packed_left = packed + parts<E> * packed_size;
        floatX* const gathered = (floatX*)(packed_left + parts<E> * left_size);
        PendingEpilogue pending(epilogue);
        int turn = 0;
        unit.begin();
        me.share((int64_t)blocks.size(), [&](int64_t task) {
            const Block& block = blocks[(size_t)task];
            const int c0 = block.column, columns = block.columns, first = block.row, end = first + block.rows;
            RightOperand right = b;
            right.x += block.right;
            for (int k0 = 0; k0 < K; k0 += blocking.slab) {
                const int deep = std::min(blocking.slab, K - k0);
                right.pack(unit, packed, packed_size, k0, deep, c0, columns);
                if (!a.in_place) {  // an expert's few rows: prefetch the next weights to pack during their products
                    pending.later = packed_next(task, k0 + deep);
                    pending.lines = ceil_div(pending.later.left(), unit.steps(block.rows, columns, deep));
                }
                for (int n0 = first; n0 < end; n0 += blocking.rows)
                    for (int k = 0; k < deep; k += pass) {
                        const int rows = std::min(blocking.rows, end - n0), there = std::min(rows, first + block.there - n0);
                        const int K_here = std::min(pass, deep - k);
                        const bool last = k0 + k + K_here == K;
                        Left<E> left = {{packed_left, left_size}, spread<E>(K_here)};
                        const int stride = a.in_place ? K : left.stride;
                        if (!a.in_place)
                            gather_rows(gathered, (size_t)stride, a.rows, a.columns, n0, there, rows, k0 + k, K_here);
                        left.pack(packed_left, a.in_place ? a.rows.x + (size_t)n0 * K + k0 + k : gathered, stride, rows,
                                  K_here);
                        if (blocking.keeps_left() && a.in_place) {  // prefetch the next rows during the products with the panel
                            const int products = ceil_div(columns, narrow) * ceil_div(K_here, tile_depth);
                            pending.later = k + pass < deep ? left_lines(n0, end, k0 + k + pass, k0 + deep)
                                                            : left_lines(n0 + blocking.rows, end, k0, k0 + deep);
                            pending.lines = ceil_div(pending.later.left(), products);
                        }
                        for (int c = 0; c < columns; c += strip, turn ^= 1) {
                            const int width = std::min(strip, columns - c);
                            float* const sums = memory_of_sums + (in_turn ? turn : c / strip) * strip_size +
                                                (K > blocking.slab ? (size_t)(n0 - first) * strip : 0);
                            if (!in_turn && columns <= strip) pending.finish();  // its epilogue still uses them
                            if (last && out) prefetch_lines<1>(out + (size_t)n0 * C + c0 + c, (size_t)C, width, there);
                            Prefetch reads;
                            if (last && read.x)
                                reads =
                                    Prefetch(read.x + (size_t)n0 * read.rows * C + c0 + c, (size_t)C, there * read.rows, width);
                            multiply_strip(unit, sums, left, {packed + right_index<E>(k, c, deep), packed_size}, deep, rows,
                                           width, K_here, blocking, k0 + k > 0, reads, pending);
                            if (last) pending.begin_strip(there, n0, c0 + c, std::min(width, C - c0 - c), sums);
                        }
                    }
            }
            pending.finish();
            fence();
        });
        unit.end();
    });
}

// The blocking of a product of rows with K of k.
template <class E>
Blocking<E> blocking_of_rows(const MatrixUnit<E>& unit, int K) {
    Blocking<E> blocking(unit, K, K <= 2 * slab<E> ? K : slab<E>);
    if (Blocking<E>::in_tiles(unit)) blocking.keep_left(K);
    return blocking;
}

// multiply_blocks for all of out (N, C) = a (N, K) b (K, C), divided among threads; K of b is padded to whole words, C to 16.
template <class E>
void rows_times(Ctx& ctx, const MatrixUnit<E>& unit, floatX* out, EpilogueInput read, const floatX* a, int N, int K_there,
                int C, const RightOperand& b, const Epilogue& epilogue) {
    const int K = round_up(K_there, k_multiple<E>), wide = round_up(C, 16), tall = round_up(N, 16);
    const Blocking<E> blocking = blocking_of_rows(unit, K);
    const Partition shares(tall, wide, blocking.columns, ctx.threads, unit.tiles, epilogue.strip);
    std::vector<Block> blocks;
    for (int n = 0; n < tall; n += shares.rows)
        for (int c = 0; c < wide; c += shares.columns)
            blocks.push_back({n, std::min(shares.rows, tall - n), N - n, c, std::min(shares.columns, wide - c)});
    const LeftRows rows = {{padded(ctx, 0, a, N, K_there, tall, K)}, K, true};
    multiply_blocks(ctx, unit, out, read, rows, K, C, b, blocks, blocking, epilogue);
}

// c (M, C) (+)= a^T b of a (N, M), b (N, C); the rows of a are a_stride apart. M and C are multiples of 16.
template <class E>
void columns_times(Ctx& ctx, const MatrixUnit<E>& unit, float* c, const floatX* a, size_t a_stride, const floatX* b, int N,
                   int M, int C, Acc acc) {
    const bool streamed = streams(unit, c, (size_t)C * sizeof(float));
    const Blocking<E> blocking(unit, N, 2 * gemm::slab<E>);
    const Partition shares(C, M, blocking.columns, ctx.threads, unit.tiles, strip_rows);  // panels of c's rows
    const int slab = blocking.slab, deepest = std::min(slab, round_up(N, k_multiple<E>));
    const size_t right_size = (size_t)deepest * C, left_size = (size_t)spread<E>(deepest) * shares.columns;
    E* right = (E*)ctx.scratch(parts<E> * (right_size + left_size * (size_t)ctx.threads) * sizeof(E));
    Team::run(ctx.threads, [&](Team::Member& me) {
        E* left = right + parts<E> * (right_size + left_size * (size_t)me.number);
        constexpr int strip = strip_columns;
        alignas(64) float sums_in_turn[2][most_rows<E> * strip];
        int turn = 0;
        bool add = acc == Acc::Add;
        const auto epilogue = [c, C, streamed, &add](int m, int first, auto columns, const float* sums) {
            float* row = c + (size_t)m * C + first;
            if (add) put(false, row, columns, [=](int i, auto) { return load(row + i) + load(sums + i); });
            else put(streamed, row, columns, [=](int i, auto) { return load(sums + i); });
        };
        PendingEpilogue pending(finished_by(epilogue));
        unit.begin();
        for (int k0 = 0; k0 < N; k0 += slab) {
            const int there = std::min(slab, N - k0), K = round_up(there, k_multiple<E>), stride = spread<E>(K);
            add = k0 > 0 || acc == Acc::Add;
            // Each thread packs some rows, over their whole length if not too long: memory reads those fastest.
            const int high = round_up(ceil_div(K, ctx.threads), k_multiple<E>), wide = C <= 1024 ? C : 512;
            me.share(ceil_div(K, high), [&](int64_t share) {
                const int k = (int)share * high;
                for (int c0 = 0; c0 < C; c0 += wide)
                    pack_rows_in_parts(unit, right + (size_t)c0 * K + (size_t)k * 16, right_size, 16 * (size_t)K,
                                       b + (size_t)(k0 + k) * C + c0, (size_t)C, std::min(wide, C - c0), std::min(high, K - k),
                                       there - k);
            });
            me.share(shares.panels * shares.parts, [&](int64_t share) {
                const int task = (int)share;
                const int m0 = shares.panel(task) * shares.columns, c0 = shares.part(task) * shares.rows;
                const int M_here = std::min(shares.columns, M - m0), columns = std::min(shares.rows, C - c0);
                pack_left_in_parts(unit, left, left_size, (size_t)stride, a + (size_t)k0 * a_stride + m0, a_stride, M_here, K,
                                   there);
                for (int n = 0; n < columns; n += strip)
                    for (int m = 0; m < M_here; m += blocking.rows, turn ^= 1) {
                        const int rows = std::min(blocking.rows, M_here - m), width = std::min((int)strip, columns - n);
                        const Prefetch prefetch =
                            add ? Prefetch(c + (size_t)(m0 + m) * C + c0 + n, (size_t)C, rows, width) : Prefetch();
                        float* const sums = sums_in_turn[turn];
                        multiply_strip(unit, sums, {{left + (size_t)m * stride, left_size}, stride},
                                       {right + right_index<E>(0, c0 + n, K), right_size}, K, rows, width, K, blocking, false,
                                       prefetch, pending);
                        pending.begin_strip(rows, m0 + m, c0 + n, width, sums);
                    }
                pending.finish();
                fence();  // the next slab adds to what another thread may have written
            });
        }
        unit.end();
    });
}

// ---- linear layers ---------------------------------------------------------------------------------------------------------
// Calls f(the unit that multiplies layers).
template <class F>
auto on_unit(const Ctx& ctx, F f) {
    return std::visit([&](const auto* unit) { return f(*unit); }, ctx.layers);
}
// True if results, rows of `columns` numbers from y on, use non-temporal stores.
inline bool streams_rows(const Ctx& ctx, const floatX* y, int columns) {
    return on_unit(ctx, [=](const auto& unit) { return streams(unit, y, (size_t)columns * sizeof(floatX)); });
}

// Calls f(value), where value(c, n) is the sums at c plus the bias, if there is one.
template <class F>
void with_bias(const floatX* bias, const float* sums, F f) {
    if (bias) f([=](int c, auto there) { return load(sums + c) + load(bias + c, there); });
    else f([=](int c, auto) { return load(sums + c); });
}
inline const floatX* at_column(const floatX* bias, int c) { return bias ? bias + c : nullptr; }

// A linear layer's operands: inp (N, IC), weight (OC, IC), bias (OC) or null.
struct Layer {
    const floatX *inp, *weight, *bias;
    int N, IC, OC;
};

// out = inp weight^T, stored by the epilogue. Prefetches lines of `out`, if given, and of `read`.
inline void forward(Ctx& ctx, floatX* out, EpilogueInput read, const Layer& l, const Epilogue& epilogue) {
    on_unit(ctx, [&](const auto& unit) {
        const int K = round_up(l.IC, k_multiple_of(unit));
        const floatX* weight = padded(ctx, 1, l.weight, l.OC, l.IC, round_up(l.OC, 16), K);
        const RightOperand right{RightOperand::transposed, weight, (size_t)K};
        rows_times(ctx, unit, out, read, l.inp, l.N, l.IC, l.OC, right, epilogue);
    });
}

inline void linear_forward(Ctx& ctx, floatX* out, const Layer& l) {
    const bool streamed = streams_rows(ctx, out, l.OC);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        with_bias(at_column(l.bias, first), sums,
                  [=](auto value) { put(streamed, out + (size_t)n * l.OC + first, columns, value); });
    };
    forward(ctx, streamed ? nullptr : out, {}, l, finished_by(epilogue));
}

inline void gelu_forward(Ctx& ctx, floatX* out, floatX* pre, const Layer& l) {
    const bool streamed = streams_rows(ctx, out, l.OC) && fills_lines(pre);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        const size_t at = (size_t)n * l.OC + first;
        with_bias(at_column(l.bias, first), sums, [=](auto value) {
            put(streamed, pre + at, columns, value);
            put(streamed, out + at, columns, [=](int c, auto there) { return gelu(as_stored(pre, value(c, there))); });
        });
    };
    forward(ctx, streamed ? nullptr : out, {}, l, finished_by(epilogue));
}

// gate and up (N, 2F), out (N, F); F is a multiple of 64.
inline void swiglu_forward(Ctx& ctx, floatX* out, floatX* gate_up, const Layer& l) {
    constexpr int each = RightOperand::each;
    const int F = l.OC / 2;
    const bool streamed = streams_rows(ctx, out, F) && streams_rows(ctx, gate_up, F);
    const auto epilogue = [=](int n, int first, auto, const float* sums) {
        const int at = first / 2;
        floatX *gate = gate_up + (size_t)n * 2 * F + at, *up = gate + F, *y = out + (size_t)n * F + at;
        with_bias(at_column(l.bias, at), sums, [=](auto g) {
            with_bias(at_column(l.bias, F + at), sums + each, [=](auto u) {
                put(streamed, gate, each, g);
                put(streamed, up, each, u);
                put(streamed, y, each,
                    [=](int c, auto there) { return swiglu(as_stored(gate, g(c, there)), as_stored(up, u(c, there))); });
            });
        });
    };
    on_unit(ctx, [&](const auto& unit) {
        const int K = round_up(l.IC, k_multiple_of(unit));
        const floatX* weight = padded(ctx, 1, l.weight, l.OC, l.IC, l.OC, K);
        const RightOperand both{RightOperand::two_transposed, weight, (size_t)K, F};
        rows_times(ctx, unit, nullptr, {}, l.inp, l.N, l.IC, l.OC, both, finished_by<2 * each>(epilogue));
    });
}

// out = residual + inp weight^T (+ bias).
inline void residual_forward(Ctx& ctx, floatX* out, const floatX* residual, const Layer& l) {
    const bool streamed = streams_rows(ctx, out, l.OC);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        const size_t at = (size_t)n * l.OC + first;
        with_bias(at_column(l.bias, first), sums, [=](auto value) {
            put(streamed, out + at, columns,
                [=](int c, auto there) { return load(residual + at + c, there) + as_stored(out, value(c, there)); });
        });
    };
    forward(ctx, streamed ? nullptr : out, {residual}, l, finished_by(epilogue));
}

// Rotates the first heads of each row of out, in the first `turned` columns; a strip holds whole heads.
template <int strip>
void rope_forward(Ctx& ctx, floatX* out, const Layer& l, const Rope& rope, int HS, int turned) {
    const bool streamed = streams_rows(ctx, out, l.OC);
    const auto epilogue = [=](int n, int first, auto columns, float* sums) {
        with_bias(at_column(l.bias, first), sums, [=](auto value) {
            put(false, sums, columns, [=](int c, auto there) { return as_stored(out, value(c, there)); });
        });
        for (int c = 0; c < std::min<int>(columns, turned - first); c += HS)
            rotate(sums + c, rope.angles(n), rope.rotated / 2, 1.0f);
        put(streamed, out + (size_t)n * l.OC + first, columns, [=](int c, auto) { return load(sums + c); });
    };
    forward(ctx, streamed ? nullptr : out, {}, l, finished_by<strip>(epilogue));
}

// dinp (N, IC) = dout (N, OC) weight (OC, IC), stored by the epilogue.
inline void backward_input(Ctx& ctx, floatX* dinp, EpilogueInput read, const floatX* dout, const floatX* weight, int N, int IC,
                           int OC, const Epilogue& epilogue) {
    on_unit(ctx, [&](const auto& unit) {
        const int K = round_up(OC, k_multiple_of(unit)), stride = round_up(IC, 16);
        const RightOperand right{RightOperand::as_rows, padded(ctx, 1, weight, OC, IC, K, stride), (size_t)stride};
        rows_times(ctx, unit, dinp, read, dout, N, OC, IC, right, epilogue);
    });
}

inline void linear_backward_input(Ctx& ctx, floatX* dinp, const floatX* dout, const floatX* weight, int N, int IC, int OC) {
    const bool streamed = streams_rows(ctx, dinp, IC);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        put(streamed, dinp + (size_t)n * IC + first, columns, [=](int c, auto) { return load(sums + c); });
    };
    backward_input(ctx, streamed ? nullptr : dinp, {}, dout, weight, N, IC, OC, finished_by(epilogue));
}

inline void gelu_backward_input(Ctx& ctx, floatX* dpre, const floatX* dout, const floatX* weight, const floatX* pre, int N,
                                int IC, int OC) {
    const bool streamed = streams_rows(ctx, dpre, IC);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        const size_t at = (size_t)n * IC + first;
        put(streamed, dpre + at, columns,
            [=](int c, auto there) { return as_stored(dpre, load(sums + c)) * gelu_derivative(load(pre + at + c, there)); });
    };
    backward_input(ctx, streamed ? nullptr : dpre, {pre}, dout, weight, N, IC, OC, finished_by(epilogue));
}

// gate_up and its gradient (N, 2F), weight (OC, F).
inline void swiglu_backward_input(Ctx& ctx, floatX* dgate_up, const floatX* dout, const floatX* weight, const floatX* gate_up,
                                  int N, int F, int OC) {
    const bool streamed = streams_rows(ctx, dgate_up, F);
    const auto epilogue = [=](int n, int first, auto columns, const float* sums) {
        const size_t at = (size_t)n * 2 * F + first;
        const floatX *gate = gate_up + at, *up = gate + F;
        floatX *dgate = dgate_up + at, *dup = dgate + F;
        floats g_gradients[strip_columns / lanes], u_gradients[strip_columns / lanes];
        for_vectors(columns, [&](int c, auto there) {
            const auto d = swiglu_gradient(load(gate + c, there), load(up + c, there), as_stored(dgate, load(sums + c)));
            g_gradients[c / lanes] = d.gate;
            u_gradients[c / lanes] = d.up;
        });
        put(streamed, dgate, columns, [&](int c, auto) { return g_gradients[c / lanes]; });
        put(streamed, dup, columns, [&](int c, auto) { return u_gradients[c / lanes]; });
    };
    backward_input(ctx, nullptr, {gate_up, 2}, dout, weight, N, F, OC, finished_by(epilogue));
}

// dweight (+)= dout^T inp; the rows of dout are `stride` apart.
inline void backward_weight(Ctx& ctx, float* dweight, const floatX* dout, size_t stride, const floatX* inp, int N, int IC,
                            int OC, Acc acc) {
    const int M = round_up(OC, 16), C = round_up(IC, 16);
    const auto multiply = [&](float* c, const floatX* a, size_t a_stride, const floatX* b, Acc add) {
        on_unit(ctx, [&](const auto& unit) { columns_times(ctx, unit, c, a, a_stride, b, N, M, C, add); });
    };
    if (M == OC && C == IC) return multiply(dweight, dout, stride, inp, acc);
    std::vector<float> sums((size_t)M * C);
    const floatX* const b = padded(ctx, 1, inp, N, IC, N, C);
    if (M == OC) multiply(sums.data(), dout, stride, b, Acc::Set);
    else multiply(sums.data(), padded_copy(ctx, 0, dout, stride, N, OC, N, M), (size_t)M, b, Acc::Set);
    for (int o = 0; o < OC; o++)
        for (int i = 0; i < IC; i++) {
            const float sum = sums[(size_t)o * C + i];
            float& d = dweight[(size_t)o * IC + i];
            d = acc == Acc::Add ? d + sum : sum;
        }
}

}  // namespace gemm
}  // namespace detail
}  // namespace cpu
#endif  // CPU_FAST_PATHS
