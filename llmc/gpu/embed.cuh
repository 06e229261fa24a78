// Embedding: out = scale wte[token] (+ wpe[position]). Backward adds each row of dout, times scale, to its token's row of dwte,
// and to its position's row of dwpe; sums in fp32, no atomics, the same bits in every run.
//
// Several rows may have the same token, so backward first sorts the pairs (token, row): merge sort, 2048 pairs at a time in
// shared memory, then passes over all pairs. Merging is by rank: an element's position in the merged run is its own index plus
// the number of smaller elements in the other run, found by binary search; every element is placed independently.
// Then a warp processes 32 consecutive pairs (a piece) and 32 packs of channels, and adds the rows of each token in registers.
// If all rows of a token are in the piece, the sum goes directly to dwte. Otherwise the token leaves one sum per piece in
// scratch memory, and a second kernel adds those in order: a token that fills the whole batch costs no more than others.
// Gradients in bf16 need no buffer for sums in fp32: either kernel rounds a token's sum when it is complete.
//
// Cost: forward is a copy. Backward reads dout once, and reads and writes each named row of dwte once; sorting 65,536 pairs
// takes six short kernels. Bound by memory bandwidth. The sums differ from the CPU's in the last bits, since there each row is
// added to dwte.
#pragma once
#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

// One warp per row.
template <bool packed>
__global__ void __launch_bounds__(256)
    embedding_forward_kernel(floatX* __restrict__ out, const int* __restrict__ tokens, const int* __restrict__ positions,
                             const floatX* __restrict__ wte, const floatX* __restrict__ wpe, int N, int C,
                             const VocabularyShard shard) {
    constexpr int size = Pack<floatX>::size;
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= (size_t)N) return;
    const int token = tokens[n] - shard.v0;
    const bool known = token >= 0 && token < shard.V;
    const floatX* te = wte + (known ? (size_t)token * C : 0);
    const floatX* pe = wpe ? wpe + (size_t)positions[n] * C : nullptr;
#pragma unroll 4
    for (int c = threadIdx.x * size; c < C; c += 32 * size) {
        Pack<floatX> x = load_part<packed>(te, c, known ? C : 0);
        Pack<floatX> p{};
        if (pe) p = load_part<packed>(pe, c, C);
#pragma unroll
        for (int j = 0; j < size; j++) {
            const float scaled = shard.scale * (float)x[j];
            x[j] = (floatX)(pe ? scaled + (float)p[j] : scaled);
        }
        store_part<packed>(out + n * C, c, C, x);
    }
}

// ---- sorting ---------------------------------------------------------------------------------------------------------------
// A pair is id << 32 | row, and pairs differ, so rows of one id are in row order. Rows without an id get `nothing` and come
// last.
constexpr uint32_t nothing = 0xffffffffu;
constexpr int sort_tile = 2048, sort_threads = 512;

__device__ __forceinline__ uint32_t id_of(uint64_t pair) { return (uint32_t)(pair >> 32); }

// The number of smaller pairs among n sorted ones.
__device__ __forceinline__ int count_below(const uint64_t* pairs, int n, uint64_t pair) {
    int low = 0;
    while (n > 0) {
        const int half = n / 2;
        if (pairs[low + half] < pair) {
            low += half + 1;
            n -= half + 1;
        } else n = half;
    }
    return low;
}

// pairs (n) consists of sorted runs. The position of pair i after each two neighboring runs are merged.
__device__ __forceinline__ int merged_place(const uint64_t* pairs, int n, int run, int i) {
    const int own = i / run * run, left = own / run % 2 == 0 ? own : own - run;
    const int other = own == left ? own + run : left;
    return left + (i - own) + (other < n ? count_below(pairs + other, min(run, n - other), pairs[i]) : 0);
}

// Makes the pairs of ids[..] - first_id in [0, n_ids), and sorts each tile of them.
__global__ void __launch_bounds__(sort_threads)
    sort_tiles_kernel(uint64_t* pairs, const int* __restrict__ ids, int N, int first_id, int n_ids) {
    __shared__ uint64_t tiles[2][sort_tile];
    const int begin = blockIdx.x * sort_tile, n = min(sort_tile, N - begin);
    for (int i = threadIdx.x; i < n; i += sort_threads) {
        const int id = ids[begin + i] - first_id;
        tiles[0][i] = (uint64_t)(id >= 0 && id < n_ids ? (uint32_t)id : nothing) << 32 | (uint32_t)(begin + i);
    }
    int now = 0;
    for (int run = 1; run < n; run *= 2, now ^= 1) {
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += sort_threads) tiles[now ^ 1][merged_place(tiles[now], n, run, i)] = tiles[now][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += sort_threads) pairs[begin + i] = tiles[now][i];
}

__global__ void __launch_bounds__(256) merge_runs_kernel(uint64_t* to, const uint64_t* __restrict__ from, int n, int run) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n) to[merged_place(from, n, run, i)] = from[i];
}

// ---- adding rows -----------------------------------------------------------------------------------------------------------
constexpr int piece = 32;        // sorted pairs per warp: one per lane
constexpr int pieces_warps = 8;  // warps that add the sums of a token's pieces

// Two kinds of tables, to which the kernels add sums of consecutive elements from column c of a row on: loads the elements to
// start sums with, and stores the sums.
struct TableOfSums {
    real* rows;

    template <bool packed>
    __device__ __forceinline__ Pack<real> load_at(size_t row, int c, int C) const {
        return load_part<packed>(rows + row * C, c, C);
    }
    template <bool packed>
    __device__ __forceinline__ void store_at(size_t row, int c, int C, const Pack<real>& x) const {
        store_part<packed>(rows + row * C, c, C, x);
    }
};
// In bf16: sums start with zero, and are rounded as in accumulate_kernel.
template <bool add>
struct RoundedTable {
    bf16* rows;
    Rounding rounding;
    struct alignas(2 * Pack<real>::size) Part {
        bf16 x[Pack<real>::size];
    };

    template <bool packed>
    __device__ __forceinline__ Pack<real> load_at(size_t, int, int) const {
        return {};
    }
    template <bool packed>
    __device__ __forceinline__ void store_at(size_t row, int c, int C, const Pack<real>& x) const {
        if (c >= C) return;
        const size_t first = row * C + c;
        Part part;
        if (packed && add) part = *(const Part*)(rows + first);
#pragma unroll
        for (int k = 0; k < Pack<real>::size; k++) {
            if (!packed && c + k >= C) return;
            bf16& sum = packed ? part.x[k] : rows[first + k];
            if (add) sum.bits = (uint16_t)round_stochastically((float)sum + x[k], rounding.word(first + k));
            else sum = x[k];
        }
        if (packed) *(Part*)(rows + first) = part;
    }
};

// Blocks (pieces, channels / channels per block). sums (pieces, 2, C): for the token that extends into the piece from the
// previous one, and for the token that starts in it and extends into the next.
template <bool packed, class Table>
__global__ void __launch_bounds__(128) add_pieces_kernel(Table table, real* __restrict__ sums, const floatX* __restrict__ dout,
                                                         const uint64_t* __restrict__ pairs, int N, int C, float scale) {
    constexpr int size = Pack<floatX>::size, in_flight = 4;
    const int lane = threadIdx.x % 32, c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * size;
    if (c - lane * size >= C) return;  // the whole warp
    const int begin = blockIdx.x * piece, n = min(piece, N - begin);
    const uint64_t pair = lane < n ? pairs[begin + lane] : ~(uint64_t)0;
    const uint32_t id = id_of(pair), before = begin > 0 ? id_of(pairs[begin - 1]) : nothing;
    const uint32_t after = begin + n < N ? id_of(pairs[begin + n]) : nothing;
    const auto store_to = [&](const auto& to, size_t row, const float(&sum)[size], bool set) {
#pragma unroll
        for (int j = 0; j < size; j += Pack<real>::size) {
            Pack<real> x;
            if (!set) x = to.template load_at<packed>(row, c + j, C);
#pragma unroll
            for (int i = 0; i < Pack<real>::size; i++) x[i] = set ? sum[j + i] : x[i] + sum[j + i];
            to.template store_at<packed>(row, c + j, C, x);
        }
    };

    float sum[size] = {};
    bool begins_here = __shfl_sync(all_lanes, id, 0) != before;
    for (int first = 0; first < piece; first += in_flight) {
        Pack<floatX> d[in_flight];
        uint32_t of_row[in_flight + 1];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const uint64_t p = __shfl_sync(all_lanes, pair, first + k);
            of_row[k] = id_of(p);
            d[k] = load_part<packed>(dout + (uint32_t)p * (size_t)C, c, of_row[k] != nothing ? C : 0);
        }
        const uint32_t next = __shfl_sync(all_lanes, id, (first + in_flight) % piece);
        of_row[in_flight] = first + in_flight < n ? next : after;
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            if (of_row[k] == nothing) return;  // uniform in the warp; nothing follows
#pragma unroll
            for (int j = 0; j < size; j++) sum[j] += scale * (float)d[k][j];
            if (of_row[k + 1] == of_row[k] && first + k + 1 < n) continue;
            const bool ends_here = of_row[k + 1] != of_row[k];
            if (begins_here && ends_here) store_to(table, of_row[k], sum, false);
            else store_to(TableOfSums{sums}, (size_t)blockIdx.x * 2 + begins_here, sum, true);
            begins_here = true;
#pragma unroll
            for (int j = 0; j < size; j++) sum[j] = 0;
        }
    }
}

// Blocks as above, of 8 warps and 32 packs: if a token starts in this piece and extends into the next, adds its pieces' sums.
template <bool packed, class Table>
__global__ void __launch_bounds__(32 * pieces_warps)
    join_pieces_kernel(Table table, const real* __restrict__ sums, const uint64_t* __restrict__ pairs, int N, int C) {
    constexpr int size = Pack<real>::size;
    __shared__ Pack<real> of_warp[pieces_warps][32];
    const int begin = blockIdx.x * piece, end = begin + piece, lane = threadIdx.x, warp = threadIdx.y;
    if (end >= N) return;
    const uint32_t id = id_of(pairs[end - 1]);
    if (id == nothing || id_of(pairs[end]) != id) return;
    if (begin > 0 && id_of(pairs[begin - 1]) == id) return;  // started in an earlier piece
    const int last = (end + count_below(pairs + end, N - end, (uint64_t)(id + 1) << 32) - 1) / piece,
              c = (blockIdx.y * 32 + lane) * size;
    Pack<real> sum{};
#pragma unroll 4
    for (int p = blockIdx.x + warp; p <= last; p += pieces_warps) {
        const Pack<real> part = load_part<packed>(sums + ((size_t)p * 2 + (p == (int)blockIdx.x)) * C, c, C);
#pragma unroll
        for (int j = 0; j < size; j++) sum[j] += part[j];
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
    Pack<real> total = table.template load_at<packed>(id, c, C);
    for (int w = 0; w < pieces_warps; w++)
#pragma unroll
        for (int j = 0; j < size; j++) total[j] += of_warp[w][lane][j];
    table.template store_at<packed>(id, c, C, total);
}

// table (rows.V, C): row ids[n] - rows.v0 += rows.scale times row n of dout, if it is one of these rows.
template <class Table>
void add_rows_by_id(Ctx& ctx, const Table& table, const floatX* dout, const int* ids, int N, int C,
                    const VocabularyShard& rows) {
    const int pieces = ceil_div(N, piece);
    const size_t pairs_bytes = ceil_div((size_t)N * sizeof(uint64_t), (size_t)256) * 256;
    char* scratch = (char*)ctx.scratch(2 * pairs_bytes + sizeof(real) * 2 * pieces * C);
    uint64_t *pairs = (uint64_t*)scratch, *other = (uint64_t*)(scratch + pairs_bytes);
    real* sums = (real*)(scratch + 2 * pairs_bytes);

    LAUNCH(sort_tiles_kernel, ceil_div(N, sort_tile), sort_threads, 0, ctx, pairs, ids, N, rows.v0, rows.V);
    for (int64_t run = sort_tile; run < N; run *= 2) {
        LAUNCH(merge_runs_kernel, ceil_div(N, 256), 256, 0, ctx, other, pairs, N, (int)run);
        std::swap(pairs, other);
    }

    constexpr int size = Pack<floatX>::size;
    const bool packed = C % size == 0 && aligned_16(table.rows, dout);
    const int threads = std::min(4, ceil_div(C, 32 * size)) * 32;
    const auto add = packed ? add_pieces_kernel<true, Table> : add_pieces_kernel<false, Table>;
    LAUNCH(add, dim3(pieces, ceil_div(C, threads * size)), threads, 0, ctx, table, sums, dout, pairs, N, C, rows.scale);
    const auto join = packed ? join_pieces_kernel<true, Table> : join_pieces_kernel<false, Table>;
    LAUNCH(join, dim3(pieces, ceil_div(C, 32 * Pack<real>::size)), dim3(32, pieces_warps), 0, ctx, table, sums, pairs, N, C);
}

}  // namespace detail

inline void embedding_forward(Ctx& ctx, floatX* out, const int* tokens, const int* positions, const floatX* wte,
                              const floatX* wpe, int N, int C, const VocabularyShard& shard) {
    if (N == 0) return;
    const bool packed = C % Pack<floatX>::size == 0 && aligned_16(out, wte, wpe);
    const auto kernel = packed ? detail::embedding_forward_kernel<true> : detail::embedding_forward_kernel<false>;
    LAUNCH(kernel, ceil_div(N, 8), dim3(32, 8), 0, ctx, out, tokens, positions, wte, wpe, N, C, shard);
}

inline void embedding_backward(Ctx& ctx, real* dwte, real* dwpe, const floatX* dout, const int* tokens, const int* positions,
                               int N, int C, const VocabularyShard& shard) {
    if (N == 0) return;
    detail::add_rows_by_id(ctx, detail::TableOfSums{dwte}, dout, tokens, N, C, shard);
    const VocabularyShard all = {0, std::numeric_limits<int>::max(), 0};
    if (dwpe) detail::add_rows_by_id(ctx, detail::TableOfSums{dwpe}, dout, positions, N, C, all);
}

inline void embedding_backward_rounded(Ctx& ctx, bf16* table, const floatX* dout, const int* ids, int N, int C,
                                       const VocabularyShard& shard, Acc acc, const Rounding& rounding) {
    if (acc == Acc::Set) clear(ctx, table, (size_t)shard.V * C * sizeof *table);
    if (N == 0) return;
    if (acc == Acc::Add) detail::add_rows_by_id(ctx, detail::RoundedTable<true>{table, rounding}, dout, ids, N, C, shard);
    else detail::add_rows_by_id(ctx, detail::RoundedTable<false>{table, rounding}, dout, ids, N, C, shard);
}

}  // namespace gpu
