// Products of the rows of E experts with each expert's own matrix, all in one launch. The experts have different numbers of
// rows, known only on the GPU, and the host does not wait for them: the grid has as many tiles of rows as there could be,
// ceil(slots / tile) + E, and a block finds its expert and rows from the offsets. Rows of the mixture's input are gathered when
// they are loaded, and no tensor is padded. Like the three products of matmul.cuh:
//   forward          a: rows of slots, b: rows of the weight       the sum is over columns of both
//   backward_input   a: rows of slots, b: rows of the weight       over columns of a and rows of b
//   backward_weight  a, b: rows of slots                           over rows of both, which is the expert's number of rows
//
// Two kernels: mma::product_kernel in bf16, and simple_product_kernel, without tensor cores, in fp32, for columns
// that are not multiples of 8, and for the router's gradients. Sums are in fp32, in the order of k: deterministic.
//
// mma::product_kernel: a block of 4 warps computes 128 x 128 numbers, a warp 64 x 64. cp.async brings steps of 32 k into three
// buffers, two steps ahead of the products. Factors are in shared memory as they are in global memory, with chunks exchanged
// (tensor.cuh); ldmatrix transposes those whose rows are numbered by k.
// Cost: 2 rows IC OC FLOPs each; per step of 16 k a warp reads 4 KB from shared memory for 32 mma. Two blocks share a
// multiprocessor. mma.sync reaches about 60% of the tensor cores' rate on an H100, all of it on an A100; a kernel by wgmma (the
// ladder's in dev/kernels/gemm_hopper.cuh) could take over b's tiles by TMA and a's by cp.async, as gathered rows exclude TMA.
// Not yet measured on a GPU.
#pragma once
#include "../ops.h"
#include "device.cuh"
#include "tensor.cuh"

namespace gpu {
namespace detail {

// A factor of a product: a matrix with rows of `columns` numbers. If there are choices, its row i is row choices[i] / K of x.
template <class T>
struct Factor {
    const T* x;
    int columns;
    const int* choices = nullptr;
    uint32_t inverse = 0;  // 2^32 / K rounded up, which gives the quotients of numbers below 2^32 / K; 0 if K is 1
    __device__ __forceinline__ int row_of_choice(int choice) const {
        return inverse == 0 ? choice : (int)((uint64_t)(uint32_t)choice * inverse >> 32);
    }
    __device__ __forceinline__ const T* row(int i) const {
        return x + (size_t)(choices ? row_of_choice(choices[i]) : i) * columns;
    }
};
inline Factor<floatX> factor_of(const ExpertRows& rows, const ExpertGroups& groups, int columns) {
    const uint64_t K = (uint64_t)rows.K, most = (uint64_t)1 << 32;
    CHECK(!rows.choices || (uint64_t)groups.slots * K <= most, "%d slots of %d choices each", groups.slots, rows.K);
    return {rows.x, columns, rows.choices, K == 1 ? 0 : (uint32_t)ceil_div(most, K)};
}

// The result: numbers are set or added to. Sums start at the bias, unless they are scaled: then it is added to them.
template <class T>
struct Sums {
    T* x;
    int columns;
    bool add;
    ExpertBias bias = {};
    Fp8Scales scales = {};
    __device__ __forceinline__ bool starts_at_bias() const { return bias.x && !scales.a; }
    __device__ __forceinline__ float bias_of(int expert, int row, int column) const {
        return bias.factor(row) * (float)bias.x[(size_t)expert * columns + column];
    }
    __device__ __forceinline__ float scaled(float sum, float scale, int expert, int row, int column) const {
        return bias.x ? sum * scale + bias_of(expert, row, column) : sum * scale;
    }
};

// The rows of a product that a block computes, and the k that it adds up for each. All are numbers of rows or columns of the
// factors: an expert's rows start at its offset.
struct ProductTile {
    int row, rows_end, k, k_end;
    size_t right = 0;  // the right factor starts at this element
    int expert = 0;
    int64_t result = 0;  // row 0 of the result starts at this element
};

// Tiles of rows, and within each all tiles of columns, are the first dimension of a grid: others are limited to 65535 blocks.
inline dim3 grid_of(int tiles_of_rows, int columns, int tile, int z = 1) {
    return dim3(tiles_of_rows * ceil_div(columns, tile), 1, z);
}
__device__ __forceinline__ int grid_column(int columns, int tile) { return (int)blockIdx.x % ceil_div(columns, tile); }
__device__ __forceinline__ int grid_row(int columns, int tile) { return (int)blockIdx.x / ceil_div(columns, tile); }

// Blocks (tiles of rows and columns) of the products of each expert's rows with its matrix.
struct TilesOfExperts {
    ExpertGroups groups;
    int K;
    size_t matrix;  // elements of an expert's matrix
    dim3 blocks(int columns, int tile) const { return grid_of(ceil_div(groups.slots, tile) + groups.E, columns, tile); }
    bool in_packs() const { return true; }
    template <int tile>
    __device__ __forceinline__ bool find(ProductTile& t, int columns) const {
        int y = grid_row(columns, tile);
#pragma unroll 4
        for (int e = 0; e < groups.E; e++) {
            const int first = groups.offsets[e], end = groups.offsets[e + 1], tiles = ceil_div(end - first, tile);
            if (y < tiles) {
                t = {first + y * tile, end, 0, K, e * matrix, e};
                return true;
            }
            y -= tiles;
        }
        return false;
    }
};
// Blocks (tiles of rows and columns, experts) of the sums over each expert's rows, for rows [row, row + rows) of E
// matrices of OC rows.
struct TilesOfMatrices {
    const int* offsets;
    int row, rows, OC;
    dim3 blocks(int columns, int tile) const {
        return grid_of(ceil_div(std::min(rows, OC), tile), columns, tile, ceil_div(rows, OC));
    }
    bool in_packs() const { return row % 8 == 0; }
    template <int tile>
    __device__ __forceinline__ bool find(ProductTile& t, int columns) const {
        const int e = row / OC + (int)blockIdx.z, first = row % OC;  // 0 unless the rows belong to one expert
        t = {first + grid_row(columns, tile) * tile, min(first + rows, OC), offsets[e], offsets[e + 1]};
        t.result = ((int64_t)e * OC - row) * columns;
        return true;
    }
};
// Blocks (tiles of rows and columns, parts of the sum) of one product; each part has its own result.
struct TilesOfParts {
    int rows, K, of_part;
    dim3 blocks(int columns, int tile) const { return grid_of(ceil_div(rows, tile), columns, tile, ceil_div(K, of_part)); }
    template <int tile>
    __device__ __forceinline__ bool find(ProductTile& t, int columns) const {
        t = {grid_row(columns, tile) * tile, rows, (int)blockIdx.z * of_part, min((int)(blockIdx.z + 1) * of_part, K)};
        t.result = (int64_t)blockIdx.z * rows * columns;
        return true;
    }
};

// ---- without tensor cores --------------------------------------------------------------------------------------------------
// Every type and size: 64 x 64 results per block, 4 x 4 per thread. a_by_k, b_by_k: the factor's rows are numbered by k, and
// its columns are the result's rows (a) or columns (b); else the other way around.
constexpr int simple_tile = 64, simple_k = 16;

template <bool by_k, class T>
__device__ __forceinline__ void load_simple(float (&to)[simple_k][simple_tile + 1], const Factor<T>& factor, size_t start,
                                            int first, int end, int k, int k_end) {
#pragma unroll
    for (int n = 0; n < simple_k * simple_tile / 256; n++) {
        const int at = n * 256 + (int)threadIdx.x, i = by_k ? at % simple_tile : at / simple_k,
                  j = by_k ? at / simple_tile : at % simple_k;
        float x = 0;
        if (first + i < end && k + j < k_end)
            x = (float)(by_k ? factor.row(k + j) + first + i : factor.row(first + i) + k + j)[start];
        to[j][i] = x;
    }
}

template <bool a_by_k, bool b_by_k, class Tiles, class A, class B, class Result>
__global__ void __launch_bounds__(256) simple_product_kernel(Sums<Result> result, Factor<A> a, Factor<B> b, Tiles tiles) {
    __shared__ float left[simple_k][simple_tile + 1], right[simple_k][simple_tile + 1];
    ProductTile t;
    if (!tiles.template find<simple_tile>(t, result.columns)) return;
    const int column = grid_column(result.columns, simple_tile) * simple_tile, x = threadIdx.x % 16, y = threadIdx.x / 16;
    float sum[4][4] = {};
    if (result.starts_at_bias()) {
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int i = t.row + y + 16 * m, j = column + x + 16 * n;
                if (i < t.rows_end && j < result.columns) sum[m][n] = result.bias_of(t.expert, i, j);
            }
    }
    for (int k = t.k; k < t.k_end; k += simple_k) {
        load_simple<a_by_k>(left, a, 0, t.row, t.rows_end, k, t.k_end);
        load_simple<b_by_k>(right, b, t.right, column, result.columns, k, t.k_end);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < simple_k; j++)
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) sum[m][n] += left[j][y + 16 * m] * right[j][x + 16 * n];
        __syncthreads();
    }
    const float scale = result.scales.a ? result.scales.product() : 1;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = t.row + y + 16 * m, j = column + x + 16 * n;
            if (i >= t.rows_end || j >= result.columns) continue;
            if (result.scales.a) sum[m][n] = result.scaled(sum[m][n], scale, t.expert, i, j);
            Result* to = result.x + t.result + (int64_t)i * result.columns + j;
            *to = (Result)(result.add ? (float)*to + sum[m][n] : sum[m][n]);
        }
}

template <bool a_by_k, bool b_by_k, class A, class B, class Result, class Tiles>
void simple_product(Ctx& ctx, const Sums<Result>& result, const Factor<A>& a, const Factor<B>& b, const Tiles& tiles) {
    LAUNCH((simple_product_kernel<a_by_k, b_by_k, Tiles, A, B, Result>), tiles.blocks(result.columns, simple_tile), 256, 0, ctx,
           result, a, b, tiles);
}

}  // namespace detail

// ---- on tensor cores -------------------------------------------------------------------------------------------------------
#if !defined(PRECISION_FP32)
namespace mma {

using namespace detail;
constexpr int product_tile = 128, product_k = 32, product_buffers = 3, product_threads = 128;
constexpr int product_elements = product_tile * product_k;  // of a factor in a buffer
constexpr size_t product_bytes = sizeof(bf16) * 2 * product_elements * product_buffers;

// Copies steps of a factor to shared memory, in order of k; numbers outside of the factor become zero. In each step a thread
// copies the same chunk of four rows of a tile.
template <bool by_k>
struct FactorSteps {  // tiles (product_tile, product_k)
    static constexpr int width = product_k, chunks = width / 8, at_once = product_threads / chunks,
                         copies = product_tile / at_once;
    const int row = (int)threadIdx.x / chunks, chunk = (int)threadIdx.x % chunks, k_end;
    const bf16* from[copies];
    bool present[copies];

    __device__ __forceinline__ FactorSteps(const Factor<bf16>& factor, size_t start, int first, int end, int, int last_k)
        : k_end(last_k) {
#pragma unroll
        for (int n = 0; n < copies; n++) {
            const int i = first + row + n * at_once;
            present[n] = i < end;
            from[n] = (present[n] ? factor.row(i) : factor.x) + start + chunk * 8;
        }
    }
    __device__ __forceinline__ void copy(bf16* tile, int k) {
#pragma unroll
        for (int n = 0; n < copies; n++)
            copy_async_16(tile + tile_offset<width>(row + n * at_once, chunk), from[n] + k,
                          present[n] && k + chunk * 8 < k_end);
    }
};
template <>
struct FactorSteps<true> {  // tiles (product_k, product_tile)
    static constexpr int width = product_tile, chunks = width / 8, at_once = product_threads / chunks,
                         copies = product_k / at_once;
    const int row = (int)threadIdx.x / chunks, chunk = (int)threadIdx.x % chunks, k_end;
    const Factor<bf16> factor;
    const bf16* const column;
    const bool present;
    int next[copies];  // rows of the next step, found one step ahead, as they may have to be loaded

    __device__ __forceinline__ FactorSteps(const Factor<bf16>& f, size_t start, int first, int end, int first_k, int last_k)
        : k_end(last_k), factor(f), column(f.x + start + first + chunk * 8), present(first + chunk * 8 < end) {
        find_rows(first_k);
    }
    __device__ __forceinline__ void copy(bf16* tile, int k) {
#pragma unroll
        for (int n = 0; n < copies; n++)
            copy_async_16(tile + tile_offset<width>(row + n * at_once, chunk), column + (int64_t)next[n] * factor.columns,
                          present && k + row + n * at_once < k_end);
        find_rows(k + product_k);
    }
    __device__ __forceinline__ void find_rows(int k) {
#pragma unroll
        for (int n = 0; n < copies; n++) {
            const int i = k + row + n * at_once;
            next[n] = factor.choices && i < k_end ? factor.row_of_choice(factor.choices[i]) : i;
        }
    }
};

// c (64, 64) += a b, for a warp's part of the tiles of a step.
template <bool a_by_k, bool b_by_k>
__device__ __forceinline__ void add_step(float (&c)[4][8][4], const bf16* a, const bf16* b) {
    const int lane = threadIdx.x % 32, two_rows = lane % 8 + lane / 16 * 8, two_chunks = lane / 8 % 2;
    const LaneOffset<FactorSteps<a_by_k>::width> of_left(a_by_k ? two_rows : lane % 16, a_by_k ? two_chunks : lane / 16);
    const LaneOffset<FactorSteps<b_by_k>::width> of_right(b_by_k ? lane % 16 : two_rows, b_by_k ? lane / 16 : two_chunks);
#pragma unroll
    for (int k = 0; k < product_k / 16; k++) {
        uint32_t left[4][4];
#pragma unroll
        for (int m = 0; m < 4; m++) {
            if constexpr (a_by_k) ldmatrix_x4_trans(left[m], a + of_left(k, 2 * m));
            else ldmatrix_x4(left[m], a + of_left(m, 2 * k));
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t right[4];
            if constexpr (b_by_k) ldmatrix_x4_trans(right, b + of_right(k, 2 * n));
            else ldmatrix_x4(right, b + of_right(n, 2 * k));
            const uint32_t even[2] = {right[0], right[1]}, odd[2] = {right[2], right[3]};
#pragma unroll
            for (int m = 0; m < 4; m++) {
                mma_m16n8k16(c[m][2 * n], left[m], even, c[m][2 * n]);
                mma_m16n8k16(c[m][2 * n + 1], left[m], odd, c[m][2 * n + 1]);
            }
        }
    }
}

// Stores a warp's results, whose first is (row, column). Sets or adds to numbers of bf16, 16 bytes at a time, staged in `tile`;
// the results are rounded before they are added.
__device__ __forceinline__ void store_results(const Sums<bf16>& result, const ProductTile& t, int row, int column,
                                              const float (&c)[4][8][4], bf16* tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                *reinterpret_cast<uint32_t*>(tile + tile_offset<64>(16 * m + 8 * i + lane / 4, n) + lane % 4 * 2) =
                    pack_bf16(c[m][n][2 * i], c[m][n][2 * i + 1]);
    __syncwarp();
    column += lane % 8 * 8;
#pragma unroll 4
    for (int i = lane / 8; i < 64; i += 4) {
        if (row + i >= t.rows_end || column >= result.columns) continue;
        bf16* to = result.x + t.result + (int64_t)(row + i) * result.columns + column;
        Pack<bf16> numbers = load(tile + tile_offset<64>(i, lane % 8));
        if (result.add) {
            const Pack<bf16> before = load(to);
#pragma unroll
            for (int j = 0; j < 8; j++) numbers[j] = (bf16)((float)before[j] + (float)numbers[j]);
        }
        store(to, numbers);
    }
}
// Sets or adds to numbers of fp32: a warp accesses 32 bytes of each of 8 rows at once.
__device__ __forceinline__ void store_results(const Sums<float>& result, const ProductTile& t, int row, int column,
                                              const float (&c)[4][8][4], bf16*) {
    const int lane = threadIdx.x % 32;
    column += lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = row + 16 * m + 8 * i + lane / 4;
            if (r >= t.rows_end) continue;
            float* to = result.x + t.result + (int64_t)r * result.columns;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                if (column + 8 * n >= result.columns) continue;
                float2 sum = {c[m][n][2 * i], c[m][n][2 * i + 1]};
                float2* const pair = reinterpret_cast<float2*>(to + column + 8 * n);
                if (result.add) {
                    const float2 before = *pair;
                    sum = {before.x + sum.x, before.y + sum.y};
                }
                *pair = sum;
            }
        }
}

// c = f(c, row, column) for the numbers that store_results stores.
template <class T, class F>
__device__ __forceinline__ void for_sums(float (&c)[4][8][4], const Sums<T>& result, const ProductTile& t, int row, int column,
                                         F f) {
    const int lane = threadIdx.x % 32;
    column += lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + 16 * m + i / 2 * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < 8; n++)
                if (r < t.rows_end && column + 8 * n < result.columns) c[m][n][i] = f(c[m][n][i], r, column + 8 * n + i % 2);
        }
}

template <bool a_by_k, bool b_by_k, class Tiles, class Result>
__global__ void __launch_bounds__(product_threads, 2)
    product_kernel(Sums<Result> result, Factor<bf16> a, Factor<bf16> b, Tiles tiles) {
    DYNAMIC_SHARED(bf16, shared);
    ProductTile t;
    if (!tiles.template find<product_tile>(t, result.columns)) return;
    const int warp = threadIdx.x / 32, row = warp / 2 * 64, column = warp % 2 * 64;  // the warp's part of the tile
    const int first_column = grid_column(result.columns, product_tile) * product_tile;
    FactorSteps<a_by_k> left(a, 0, t.row, t.rows_end, t.k, t.k_end);
    FactorSteps<b_by_k> right(b, t.right, first_column, result.columns, t.k, t.k_end);
    const auto a_tile = [&](int buffer) { return shared + buffer * 2 * product_elements; };
    const auto b_tile = [&](int buffer) { return a_tile(buffer) + product_elements; };
    const auto copy_step = [&](int buffer, int k) {
        if (k < t.k_end) {
            left.copy(a_tile(buffer), k);
            right.copy(b_tile(buffer), k);
        }
        copy_async_commit();  // also an empty group, which keeps their number
    };

    float c[4][8][4] = {};
    if constexpr (!a_by_k && !b_by_k)  // forward
        if (result.starts_at_bias())
            for_sums(c, result, t, t.row + row, first_column + column,
                     [&](float, int i, int j) { return result.bias_of(t.expert, i, j); });
    int buffer = 0;
    copy_step(0, t.k);
    copy_step(1, t.k + product_k);
    for (int k = t.k; k < t.k_end; k += product_k) {
        copy_async_wait<product_buffers - 2>();
        __syncthreads();  // this step has arrived, and all warps are done with the previous one
        copy_step(buffer == 0 ? 2 : buffer - 1, k + 2 * product_k);
        add_step<a_by_k, b_by_k>(c, a_tile(buffer) + (a_by_k ? row : row * product_k),
                                 b_tile(buffer) + (b_by_k ? column : column * product_k));
        buffer = buffer == product_buffers - 1 ? 0 : buffer + 1;
    }
    if (result.scales.a) {
        const float scale = result.scales.product();
        for_sums(c, result, t, t.row + row, first_column + column,
                 [&](float sum, int i, int j) { return result.scaled(sum, scale, t.expert, i, j); });
    }
    __syncthreads();  // all warps are done with the buffers
    store_results(result, t, t.row + row, first_column + column, c, shared + warp * 64 * 64);
}

}  // namespace mma
#endif

// ---- the choice ------------------------------------------------------------------------------------------------------------
namespace detail {

template <bool a_by_k, bool b_by_k, class Result, class Tiles>
void grouped_product(Ctx& ctx, const Sums<Result>& result, const Factor<floatX>& a, const Factor<floatX>& b,
                     const Tiles& tiles) {
#if !defined(PRECISION_FP32)
    if (!ctx.plain && (a.columns | b.columns | result.columns) % 8 == 0 && tiles.in_packs() && aligned_16(a.x, b.x, result.x)) {
        LAUNCH((mma::product_kernel<a_by_k, b_by_k, Tiles, Result>), tiles.blocks(result.columns, mma::product_tile),
               mma::product_threads, mma::product_bytes, ctx, result, a, b, tiles);
        return;
    }
#endif
    simple_product<a_by_k, b_by_k>(ctx, result, a, b, tiles);
}

}  // namespace detail
}  // namespace gpu
