// Linear layers whose factors are 8-bit codes (../fp8.h): the products through cuBLASLt, and the kernels that make the codes.
// What the ops compute is derived in ../cpu/fp8_linear.h and ../cpu/matmul.h.
//
// Products. Tensor cores of Ada and Hopper read both factors of an 8-bit product along the sum, which cuBLASLt calls TN: A
// transposed, B not (as matmul.cuh reads row-major matrices). So each product wants its factors in an order of their own, and
// tensors that occur in two products are kept in both:
//   forward          m = OC, n = N,  k = IC    A = weight (OC, IC)               B = inp (N, IC)
//   backward_input   m = IC, n = N,  k = OC    A = weight_transposed (IC, OC)    B = dout (N, OC)
//   backward_weight  m = IC, n = OC, k = N     A = inp_transposed (IC, N)        B = dout_transposed (OC, N)
// e4m3 x e5m2 is possible, e5m2 x e5m2 is not; D is bf16 or fp32. The library takes the inverse scales where they lie on the
// device, so no op waits for them. Plans, timing and file are matmul.cuh's.
//
// Precision: Hopper's tensor cores keep about 14 bits of a sum of 8-bit products. cuBLASLt therefore adds partial sums up in
// fp32 registers every so many products, unless it is told to be `fast`: then the whole sum stays in the tensor cores. The
// forward pass bears that, gradients do not. Everything else is fp32, rounded once.
//
// Codes. quantize() goes over x once: a block turns a tile of 128 x 128 elements into codes in shared memory, from where rows
// and columns are written. amax is the tile's largest, then the largest of all tiles by atomicMax on the float's bits, which
// order as the numbers do where there is no sign. A maximum does not depend on the order, so it has the same bits in every run.
//
// Cost of quantize(), from bf16: 2 bytes read per element, 1 or 2 written; bound by memory, 16-byte accesses everywhere. Behind
// a product of N x IC x OC, codes of inp and their transpose cost 4 N IC bytes: at 4.3 TB/s and 1400 TFLOP/s that is 650 / OC
// of the product's time, 16% at OC = 4096 (not yet measured on a GPU).
//
// Limits: compute capability 8.9; all sizes multiples of 16, all pointers too, the scales' among them (cuBLASLt 12.9 to 13.1
// asks for that).
#pragma once
#include <cfloat>

#include "../ops.h"
#include "matmul.cuh"

namespace gpu {
namespace detail {

// ---- codes -----------------------------------------------------------------------------------------------------------------
// fp8_encode of four numbers, the first in the lowest byte. A GPU's instruction differs from it in two points: infinities
// become the largest number and NaN loses its sign. x + 0 x is x, but NaN for infinities; the signs are put back.
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

// The larger of the two; NaN and infinite x do not count.
__device__ __forceinline__ float larger_finite(float largest, float x) { return fmaxf(largest, fabsf(fmaf(x, 0.0f, x))); }
// *amax = max(*amax, the block's largest). Has block_max's barriers.
__device__ __forceinline__ void raise_amax(float* amax, float largest) {
    largest = block_max(largest);
    if (threadIdx.x == 0 && largest > 0) atomicMax((int*)amax, __float_as_int(largest));
}

// A tile of codes in shared memory. Rows are eight chunks of 16 bytes, and lie so that no access has bank conflicts: chunk c of
// row r is at place c ^ (r / 16). A warp writes rows; reads rows, a quarter of a warp at a time; and reads words of four codes,
// one from each of eight rows that are 16 apart, from four words beside each other: (c ^ r / 16) leads these to 32 banks.
constexpr int tile_side = 128, tile_threads = 256;
struct alignas(16) CodeTile {
    uint8_t codes[tile_side * tile_side];
    __device__ uint8_t* at(int row, int column) { return codes + row * tile_side + (column ^ (row & 0x70)); }
};

// Where a block's tile lies in a matrix (N, C).
struct TilePlace {
    int row, column, rows, columns;  // its first ones, and how many are within the matrix
    __device__ TilePlace(int N, int C) {
        const int across = ceil_div(C, tile_side);
        row = (int)blockIdx.x / across * tile_side, column = (int)blockIdx.x % across * tile_side;
        rows = min(tile_side, N - row), columns = min(tile_side, C - column);
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

// Each thread turns 16 rows of 4 codes around: 16 words of shared memory become 4 chunks of 16 bytes. Eight lanes beside each
// other write 128 bytes in a row.
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
        turned[0][i] = __byte_perm(low_01, low_23, 0x5410), turned[1][i] = __byte_perm(low_01, low_23, 0x7632);
        turned[2][i] = __byte_perm(high_01, high_23, 0x5410), turned[3][i] = __byte_perm(high_01, high_23, 0x7632);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        Pack<uint8_t> pack;
        memcpy((void*)&pack, turned[c], 16);
        store(out + (size_t)(place.column + column + c) * N + place.row + row, pack);
    }
}

inline void check_codes(int N, int C, bool aligned) {
    CHECK(N % 16 == 0 && C % 16 == 0 && aligned, "codes (%d, %d) want sizes and addresses that are multiples of 16", N, C);
}

template <Fp8 format>
__global__ void __launch_bounds__(tile_threads, 4)
    quantize_tile(uint8_t* codes, uint8_t* transposed, float* amax, const floatX* x, int N, int C, const float* scale) {
    __shared__ CodeTile tile;
    constexpr int width = Pack<floatX>::size, packs_of_row = tile_side / width, in_flight = 4;
    constexpr int rows_at_once = tile_threads / packs_of_row;
    const TilePlace place(N, C);
    const int column = (int)threadIdx.x % packs_of_row * width;
    const float factor = *scale;
    float largest = 0;
#pragma unroll 1
    for (int first = (int)threadIdx.x / packs_of_row; first < tile_side; first += in_flight * rows_at_once) {
        Pack<floatX> packs[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; i++) {
            const int row = first + i * rows_at_once;
            if (row < place.rows && column < place.columns)
                packs[i] = load(x + (size_t)(place.row + row) * C + place.column + column);
        }
#pragma unroll
        for (int i = 0; i < in_flight; i++) {
            const int row = first + i * rows_at_once;
            if (row >= place.rows || column >= place.columns) continue;
            uint32_t words[width / 4];
#pragma unroll
            for (int w = 0; w < width / 4; w++) {
                float scaled[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float value = (float)packs[i][4 * w + k];
                    largest = larger_finite(largest, value), scaled[k] = value * factor;
                }
                words[w] = encode_four<format>(scaled);
            }
            if constexpr (width == 8) *reinterpret_cast<uint2*>(tile.at(row, column)) = {words[0], words[1]};
            else *reinterpret_cast<uint32_t*>(tile.at(row, column)) = words[0];
        }
    }
    raise_amax(amax, largest);  // its barriers are also those between writing and reading the tile
    store_rows(codes, tile, place, C);
    if (transposed) store_columns(transposed, tile, place, N);
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

__global__ void scale_of(float* scale, float* inverse, const float* amax, Fp8 format, int margin) {
    const float s = fp8_scale(*amax, format, margin);
    *scale = s > 0 ? s : 1.0f;
    *inverse = 1.0f / *scale;
}

// ---- products --------------------------------------------------------------------------------------------------------------
// D (n, m) in rows = B (n, k) A (m, k)^T.
inline void fp8_gemm(Ctx& ctx, const GemmPointers& p, int m, int n, int k, Fp8 a, Fp8 b, cudaDataType d,
                     cublasLtEpilogue_t epilogue, bool add, bool fast) {
    CHECK(m % 16 == 0 && n % 16 == 0 && k % 16 == 0, "an 8-bit product with m %d, n %d, k %d", m, n, k);
    CHECK(alignment_of({p.d, p.a, p.b, p.bias}) == 16, "an 8-bit product of matrices that are not at multiples of 16 bytes");
    CHECK(aligned_16(p.a_scale, p.b_scale), "inverse scales at %p and %p", (const void*)p.a_scale, (const void*)p.b_scale);
    gemm(ctx, p, {m, n, k, true, false, cublas_type(a), cublas_type(b), d, epilogue, add, 16, fast});
}

// Every row of x, of C elements, becomes `row`.
__global__ void __launch_bounds__(256) repeat_row(floatX* x, const floatX* row, size_t n, int C) {
    constexpr int width = Pack<floatX>::size;
    const size_t stride = (size_t)gridDim.x * blockDim.x * width;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * width; i < n; i += stride)
        store(x + i, load(row + i % (size_t)C));
}

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline std::string fp8_limits(const Ctx& ctx) {
    if (ctx.capability >= 89) return "";
    return format("%s has compute capability %d.%d, and 8-bit matrix products need 8.9 (RTX 40, L40, H100 and later)",
                  ctx.name.c_str(), ctx.capability / 10, ctx.capability % 10);
}

inline void quantize(Ctx& ctx, uint8_t* codes, uint8_t* transposed, float* amax, const floatX* x, int N, int C, Fp8 format,
                     const float* scale) {
    detail::check_codes(N, C, aligned_16(codes, transposed, x));
    if (N == 0 || C == 0) return;
    const unsigned grid = detail::TilePlace::grid(N, C);
    if (format == Fp8::e4m3)
        LAUNCH(detail::quantize_tile<Fp8::e4m3>, grid, detail::tile_threads, 0, ctx, codes, transposed, amax, x, N, C, scale);
    else LAUNCH(detail::quantize_tile<Fp8::e5m2>, grid, detail::tile_threads, 0, ctx, codes, transposed, amax, x, N, C, scale);
}

inline void transpose_codes(Ctx& ctx, uint8_t* transposed, const uint8_t* codes, int N, int C) {
    detail::check_codes(N, C, aligned_16(codes, transposed));
    if (N == 0 || C == 0) return;
    LAUNCH(detail::transpose_tile, detail::TilePlace::grid(N, C), detail::tile_threads, 0, ctx, transposed, codes, N, C);
}

inline void absolute_max(Ctx& ctx, float* amax, const floatX* x, size_t n) {
    if (n == 0) return;
    const size_t n_packs = aligned_16(x) ? n / Pack<floatX>::size : 0;
    const size_t wanted = ceil_div(n_packs ? n_packs : n, (size_t)256 * 4);  // as many as fill the GPU once
    LAUNCH(detail::largest_of, (unsigned)std::min(wanted, (size_t)ctx.multiprocessors * 8), 256, 0, ctx, amax, x, n, n_packs);
}

inline void set_scale(Ctx& ctx, float* scale, float* inverse, const float* amax, Fp8 format, int margin) {
    LAUNCH(detail::scale_of, 1, 1, 0, ctx, scale, inverse, amax, format, margin);
}

inline void fp8_linear_forward(Ctx& ctx, floatX* out, const uint8_t* inp, const uint8_t* weight, const floatX* bias,
                               const float* inp_inverse, const float* weight_inverse, int N, int IC, int OC, bool fast) {
    CHECK(aligned_16(bias), "a bias at %p", (const void*)bias);
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    bool add = false;
    if (bias && std::is_same<floatX, bf16>::value) {
        epilogue = CUBLASLT_EPILOGUE_BIAS;
    } else if (bias) {
        // Beside a D of fp32, too, the library wants a bias of bf16. So D is set to the bias, and the product added to it.
        const size_t n = (size_t)N * OC, blocks = ceil_div(n, (size_t)256 * Pack<floatX>::size);
        LAUNCH(detail::repeat_row, (unsigned)std::min(blocks, (size_t)ctx.multiprocessors * 8), 256, 0, ctx, out, bias, n, OC);
        bias = nullptr, add = true;
    }
    detail::fp8_gemm(ctx, {out, weight, inp, bias, nullptr, weight_inverse, inp_inverse}, OC, N, IC, Fp8::e4m3, Fp8::e4m3,
                     detail::x_type, epilogue, add, fast);
}

inline void fp8_linear_backward_input(Ctx& ctx, floatX* dinp, const uint8_t* dout, const uint8_t* weight_transposed,
                                      const float* dout_inverse, const float* weight_inverse, int N, int IC, int OC,
                                      Fp8 dout_format) {
    detail::fp8_gemm(ctx, {dinp, weight_transposed, dout, nullptr, nullptr, weight_inverse, dout_inverse}, IC, N, OC, Fp8::e4m3,
                     dout_format, detail::x_type, CUBLASLT_EPILOGUE_DEFAULT, false, false);
}

inline void fp8_linear_backward_weight(Ctx& ctx, real* dweight, const uint8_t* dout_transposed, const uint8_t* inp_transposed,
                                       const float* dout_inverse, const float* inp_inverse, int N, int IC, int OC,
                                       Fp8 dout_format) {
    detail::fp8_gemm(ctx, {dweight, inp_transposed, dout_transposed, nullptr, nullptr, inp_inverse, dout_inverse}, IC, OC, N,
                     Fp8::e4m3, dout_format, cublas_type<real>(), CUBLASLT_EPILOGUE_DEFAULT, true, false);
}

inline void bias_backward(Ctx& ctx, real* dbias, const floatX* dout, int N, int OC) {
    detail::bias_backward(ctx, dbias, dout, N, OC, Acc::Add);
}

}  // namespace gpu
