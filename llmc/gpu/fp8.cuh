// Encodes matrices as FP8 codes (../fp8.h), from memory or in the op that computes them, with the same bits as cpu::.
//
// One kernel makes the codes for all elementwise ops, each given as a `Source`: a block computes a tile of 128 x 128 numbers,
// rounds them to floatX and encodes them in shared memory, and writes rows and columns from there. quantize() uses a
// source that only loads. amax is the maximum over the tile, then over all tiles by atomicMax on the float's bits, which for
// non-negative numbers order like the numbers. A maximum does not depend on the order, so it has the same bits in every run.
//
// Bound by memory bandwidth, with 16-byte accesses throughout. Bytes per element, from bf16 and with the transpose: quantize()
// 2 + 2; a source that computes the numbers saves the first 2 twice, as they are neither written nor read again.
//
// Limits: C a multiple of 16, for transposes N too; all pointers multiples of 16 bytes.
#pragma once

#include "../ops.h"
#include "device.cuh"

namespace gpu {
namespace detail {

// fp8_encode of four numbers, the first in the lowest byte. The GPU's instruction differs in two ways: infinities become the
// largest number, and NaN loses its sign. x + 0 x is x, but NaN for infinities; the signs are restored.
template <Fp8 format>
__device__ __forceinline__ uint32_t encode_four(const float* x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t pairs[2];
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float low = fmaf(x[2 * i], 0.0f, x[2 * i]), high = fmaf(x[2 * i + 1], 0.0f, x[2 * i + 1]);
        if (format == Fp8::e4m3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(high), "f"(low));
        else asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pairs[i]) : "f"(high), "f"(low));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) bits[i] = __float_as_uint(x[i]);
    const uint32_t highest_bytes =
        __byte_perm(__byte_perm(bits[0], bits[1], 0x73), __byte_perm(bits[2], bits[3], 0x73), 0x5410);
    return ((uint32_t)pairs[0] | (uint32_t)pairs[1] << 16) | (highest_bytes & 0x80808080u);
#else
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) codes |= (uint32_t)fp8_encode<format>(x[i]) << 8 * i;
    return codes;
#endif
}

// The larger of the two; NaN and infinite x are ignored.
__device__ __forceinline__ float larger_finite(float largest, float x) { return fmaxf(largest, fabsf(fmaf(x, 0.0f, x))); }
// *amax = max(*amax, largest).
__device__ __forceinline__ void raise(float* amax, float largest) {
    if (largest > 0) atomicMax((int*)amax, __float_as_int(largest));
}
// *amax = max(*amax, the block's maximum). Contains the barriers of block_max.
__device__ __forceinline__ void raise_amax(float* amax, float largest) {
    largest = block_max(largest);
    if (threadIdx.x == 0) raise(amax, largest);
}

// A tile of codes in shared memory. Rows are eight chunks of 16 bytes, swizzled so that no access has bank conflicts: chunk c
// of row r is at position c ^ (r / 16). A warp writes rows; reads rows, a quarter of a warp at a time; and reads words of four
// codes from each of eight rows that are 16 apart, at four adjacent words: (c ^ r / 16) spreads these over 32 banks.
constexpr int tile_side = 128, tile_threads = 256;
struct alignas(16) CodeTile {
    uint8_t codes[tile_side * tile_side];
    __device__ uint8_t* at(int row, int column) { return codes + row * tile_side + (column ^ (row & 0x70)); }
};

// The position of a block's tile in a matrix (N, C).
struct TilePlace {
    int row, column, rows, columns;  // first row and column, and numbers within the matrix
    __device__ TilePlace(int N, int C) {
        const int across = ceil_div(C, tile_side);
        row = (int)blockIdx.x / across * tile_side;
        column = (int)blockIdx.x % across * tile_side;
        rows = min(tile_side, N - row);
        columns = min(tile_side, C - column);
    }
    static unsigned grid(int N, int C) { return (unsigned)ceil_div(N, tile_side) * (unsigned)ceil_div(C, tile_side); }
};

__device__ __forceinline__ void store_rows(uint8_t* out, CodeTile& tile, const TilePlace& place, int C) {
#pragma unroll
    for (int i = 0; i < tile_side * tile_side / 16 / tile_threads; i++) {
        const int chunk = (int)threadIdx.x + i * tile_threads, row = chunk / 8, column = chunk % 8 * 16;
        if (row < place.rows && column < place.columns)
            store(out + (size_t)(place.row + row) * C + place.column + column, load(tile.at(row, column)));
    }
}

// Each thread transposes 16 rows of 4 codes: 16 words of shared memory become 4 chunks of 16 bytes. Eight adjacent lanes write
// 128 contiguous bytes.
__device__ __forceinline__ void store_columns(uint8_t* out, CodeTile& tile, const TilePlace& place, int N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = lane % 8 * 16, column = (warp * 4 + lane / 8) * 4;
    if (row >= place.rows || column >= place.columns) return;
    uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 16; i++) words[i] = *reinterpret_cast<const uint32_t*>(tile.at(row + i, column));
    uint32_t turned[4][4];  // [column][four rows]
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t* w = words + 4 * i;
        const uint32_t low_01 = __byte_perm(w[0], w[1], 0x5140), low_23 = __byte_perm(w[2], w[3], 0x5140);
        const uint32_t high_01 = __byte_perm(w[0], w[1], 0x7362), high_23 = __byte_perm(w[2], w[3], 0x7362);
        turned[0][i] = __byte_perm(low_01, low_23, 0x5410);
        turned[1][i] = __byte_perm(low_01, low_23, 0x7632);
        turned[2][i] = __byte_perm(high_01, high_23, 0x5410);
        turned[3][i] = __byte_perm(high_01, high_23, 0x7632);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        Pack<uint8_t> pack;
        memcpy((void*)&pack, turned[c], 16);
        store(out + (size_t)(place.column + column + c) * N + place.row + row, pack);
    }
}

inline void check_codes(const Codes& q, int N, int C, bool aligned) {
    CHECK((!q.transposed || N % 16 == 0) && C % 16 == 0 && aligned && aligned_16(q.codes, q.transposed),
          "codes (%d, %d) require sizes and addresses that are multiples of 16", N, C);
}

// Writes the codes of a pack of numbers to `codes`, which is aligned to the pack's size.
template <Fp8 format>
__device__ __forceinline__ void encode_pack(uint8_t* codes, const Pack<floatX>& x, float scale, float& largest) {
    constexpr int width = Pack<floatX>::size;
    uint32_t words[width / 4];
#pragma unroll
    for (int w = 0; w < width / 4; w++) {
        float scaled[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float value = (float)x[4 * w + k];
            largest = larger_finite(largest, value);
            scaled[k] = value * scale;
        }
        words[w] = encode_four<format>(scaled);
    }
    if constexpr (width == 8) *reinterpret_cast<uint2*>(codes) = {words[0], words[1]};
    else *reinterpret_cast<uint32_t*>(codes) = words[0];
}

// A Source computes a matrix (N, tiles F) elementwise from `inputs` packs of other matrices:
//   load<packed>(in, row, column, F)   the input packs for this position; `packed` as load_part's
//   compute(in, out)                   the numbers at (row, column), (row, F + column), ...: one pack for each of `tiles`
struct Stored {
    static constexpr int inputs = 1, tiles = 1;
    const floatX* x;
    template <bool packed>
    __device__ void load(Pack<floatX>* in, int row, int column, int F) const {
        in[0] = load_part<packed>(x + (size_t)row * F, column, F);
    }
    __device__ void compute(const Pack<floatX>* in, Pack<floatX>* out) const { out[0] = in[0]; }
};

// If x is not null, the numbers are written, too.
template <Fp8 format, class Source>
__global__ void __launch_bounds__(tile_threads, Source::tiles == 1 ? 4 : 2)
    code_tiles(floatX* x, Codes q, Source source, int N, int F) {
    __shared__ CodeTile tiles[Source::tiles];
    constexpr int width = Pack<floatX>::size, packs_of_row = tile_side / width, in_flight = 4 / Source::inputs;
    constexpr int rows_at_once = tile_threads / packs_of_row, across = Source::tiles;
    const TilePlace place(N, F);
    const int column = (int)threadIdx.x % packs_of_row * width;
    const float scale = *q.scale;
    float largest = 0;
#pragma unroll 1
    for (int first = (int)threadIdx.x / packs_of_row; first < tile_side; first += in_flight * rows_at_once) {
        Pack<floatX> in[in_flight][Source::inputs];
#pragma unroll
        for (int i = 0; i < in_flight; i++) {
            const int row = first + i * rows_at_once;
            if (row < place.rows && column < place.columns)
                source.template load<true>(in[i], place.row + row, place.column + column, F);
        }
#pragma unroll
        for (int i = 0; i < in_flight; i++) {
            const int row = first + i * rows_at_once;
            if (row >= place.rows || column >= place.columns) continue;
            Pack<floatX> out[Source::tiles];
            source.compute(in[i], out);
#pragma unroll
            for (int t = 0; t < Source::tiles; t++) {
                if (x) store(x + ((size_t)(place.row + row) * across + t) * F + place.column + column, out[t]);
                encode_pack<format>(tiles[t].at(row, column), out[t], scale, largest);
            }
        }
    }
    raise_amax(q.amax, largest);  // its barriers also separate writing and reading of the tiles
#pragma unroll
    for (int t = 0; t < Source::tiles; t++) {
        store_rows(q.codes + (size_t)t * F, tiles[t], place, across * F);
        if (q.transposed) store_columns(q.transposed + (size_t)t * F * N, tiles[t], place, N);
    }
}

template <class Source>
void make_codes(Ctx& ctx, const Output& out, const Source& source, int N, int F) {
    check_codes(out.codes, N, F, aligned_16(out.x));
    if (N == 0 || F == 0) return;
    const auto kernel = out.codes.format == Fp8::e4m3 ? code_tiles<Fp8::e4m3, Source> : code_tiles<Fp8::e5m2, Source>;
    LAUNCH(kernel, TilePlace::grid(N, F), tile_threads, 0, ctx, out.x, out.codes, source, N, F);
}

__global__ void __launch_bounds__(tile_threads) transpose_tile(uint8_t* transposed, const uint8_t* codes, int N, int C) {
    __shared__ CodeTile tile;
    constexpr int chunks = tile_side * tile_side / 16 / tile_threads;
    const TilePlace place(N, C);
    Pack<uint8_t> packs[chunks];
    const int column = (int)threadIdx.x % 8 * 16;
    const auto row_of = [](int i) { return (int)threadIdx.x / 8 + i * (tile_threads / 8); };
#pragma unroll
    for (int i = 0; i < chunks; i++)
        if (row_of(i) < place.rows && column < place.columns)
            packs[i] = load(codes + (size_t)(place.row + row_of(i)) * C + place.column + column);
#pragma unroll
    for (int i = 0; i < chunks; i++)
        if (row_of(i) < place.rows && column < place.columns) store(tile.at(row_of(i), column), packs[i]);
    __syncthreads();
    store_columns(transposed, tile, place, N);
}

// The number of a finite code or NaN, without denormals on the way.
template <Fp8 format>
__device__ __forceinline__ float number_of_code(uint32_t code) {
    constexpr int mantissa = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    const uint32_t magnitude = code & 0x7f, sign = (code & 0x80) << 24;
    constexpr float step = format == Fp8::e4m3 ? 0x1p-9f : 0x1p-16f;  // of codes below the least normal number
    const uint32_t normal = (magnitude << (23 - mantissa)) + ((uint32_t)(127 - bias) << 23);
    const uint32_t bits = magnitude >> mantissa ? normal : __float_as_uint((float)magnitude * step);
    return __uint_as_float(sign | (magnitude == 0x7f ? 0x7fc00000u : bits));
}
template <Fp8 format>
__global__ void __launch_bounds__(256) numbers_of_codes(floatX* out, const floatX* x, FilledRows rows, const float* scale) {
    constexpr int width = Pack<floatX>::size;
    const size_t n = rows.size(), step = (size_t)gridDim.x * blockDim.x * width;
    const float factor = *scale;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * width; i < n; i += step) {
        Pack<floatX> pack = load(x + i);
#pragma unroll
        for (int k = 0; k < width; k += 4) {
            float scaled[4];
#pragma unroll
            for (int j = 0; j < 4; j++) scaled[j] = (float)pack[k + j] * factor;
            const uint32_t codes = encode_four<format>(scaled);
#pragma unroll
            for (int j = 0; j < 4; j++) pack[k + j] = (floatX)number_of_code<format>(codes >> 8 * j & 0xff);
        }
        store(out + i, pack);
    }
}

__global__ void __launch_bounds__(256) largest_of(float* amax, const floatX* x, size_t n, size_t n_packs) {
    constexpr int width = Pack<floatX>::size, unroll = 4;
    const size_t thread = (size_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (size_t)gridDim.x * blockDim.x;
    float largest = 0;
    size_t p = thread;
    for (; p + (unroll - 1) * threads < n_packs; p += unroll * threads) {
        Pack<floatX> packs[unroll];
#pragma unroll
        for (int u = 0; u < unroll; u++) packs[u] = load(x + (p + u * threads) * width);
#pragma unroll
        for (int u = 0; u < unroll; u++)
#pragma unroll
            for (int k = 0; k < width; k++) largest = larger_finite(largest, (float)packs[u][k]);
    }
    for (; p < n_packs; p += threads) {
        const Pack<floatX> pack = load(x + p * width);
#pragma unroll
        for (int k = 0; k < width; k++) largest = larger_finite(largest, (float)pack[k]);
    }
    for (size_t i = n_packs * width + thread; i < n; i += threads) largest = larger_finite(largest, (float)x[i]);
    raise_amax(amax, largest);
}

__global__ void __launch_bounds__(256) largest_of_rows(float* amax, const floatX* x, FilledRows rows) {
    constexpr int width = Pack<floatX>::size;
    const size_t n = rows.size(), step = (size_t)gridDim.x * blockDim.x * width;
    float largest = 0;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * width; i < n; i += step) {
        const Pack<floatX> pack = load(x + i);
#pragma unroll
        for (int k = 0; k < width; k++) largest = larger_finite(largest, (float)pack[k]);
    }
    raise_amax(amax, largest);
}
// As many blocks as fill the GPU once, of packs of the rows that there may be.
inline unsigned blocks_for_rows(const Ctx& ctx, const FilledRows& rows, const floatX* x, const floatX* out) {
    CHECK(rows.columns % 16 == 0 && aligned_16(x, out), "FP8 numbers of rows of %d columns at %p", rows.columns,
          (const void*)x);
    const size_t packs = (size_t)rows.rows * (size_t)rows.columns / Pack<floatX>::size;
    return (unsigned)std::min(ceil_div(packs, (size_t)256), (size_t)ctx.multiprocessors * 8);
}

__global__ void scale_of(float* scale, float* inverse, const float* amax, Fp8 format, int margin) {
    const float s = fp8_scale(*amax, format, margin);
    *scale = s > 0 ? s : 1.0f;
    *inverse = 1.0f / *scale;
}

}  // namespace detail

inline void quantize(Ctx& ctx, const Codes& out, const floatX* x, int N, int C) {
    CHECK(aligned_16(x), "quantize from %p", (const void*)x);
    detail::make_codes(ctx, out, detail::Stored{x}, N, C);
}

inline void transpose_codes(Ctx& ctx, uint8_t* transposed, const uint8_t* codes, int N, int C) {
    detail::check_codes({nullptr, transposed, nullptr, nullptr, Fp8::e4m3}, N, C, aligned_16(codes));
    if (N == 0 || C == 0) return;
    LAUNCH(detail::transpose_tile, detail::TilePlace::grid(N, C), detail::tile_threads, 0, ctx, transposed, codes, N, C);
}

inline void absolute_max(Ctx& ctx, float* amax, const floatX* x, size_t n) {
    if (n == 0) return;
    const size_t n_packs = aligned_16(x) ? n / Pack<floatX>::size : 0;
    const size_t wanted = ceil_div(n_packs ? n_packs : n, (size_t)256 * 4);  // as many blocks as fill the GPU once
    LAUNCH(detail::largest_of, (unsigned)std::min(wanted, (size_t)ctx.multiprocessors * 8), 256, 0, ctx, amax, x, n, n_packs);
}

inline void absolute_max_of_rows(Ctx& ctx, float* amax, const floatX* x, const FilledRows& rows) {
    if (const unsigned blocks = detail::blocks_for_rows(ctx, rows, x, x))
        LAUNCH(detail::largest_of_rows, blocks, 256, 0, ctx, amax, x, rows);
}

inline void fp8_numbers(Ctx& ctx, floatX* out, const floatX* x, const FilledRows& rows, const float* scale, Fp8 format) {
    const auto kernel = format == Fp8::e4m3 ? detail::numbers_of_codes<Fp8::e4m3> : detail::numbers_of_codes<Fp8::e5m2>;
    if (const unsigned blocks = detail::blocks_for_rows(ctx, rows, x, out))
        LAUNCH(kernel, blocks, 256, 0, ctx, out, x, rows, scale);
}

inline void set_scale(Ctx& ctx, float* scale, float* inverse, const float* amax, Fp8 format, int margin) {
    LAUNCH(detail::scale_of, 1, 1, 0, ctx, scale, inverse, amax, format, margin);
}

}  // namespace gpu
