// Matrix products with fp32 sums (micro-kernels), on the fastest instructions of this CPU, detected at run time: for bf16, AMX
// tiles, AVX-512's dot product or ARM's small matrix product; for fp32 (bf16 is widened when packed), multiply-adds of AVX-512,
// AVX2, or the target of the compilation, such as NEON.
//   c (M, N) = a (M, K) b (K, N), or c += a b;   M and N multiples of 16, K of 64 bytes: 32 in bf16, 16 in fp32
//   left     a, row-major, rows lda elements apart
//   right    b packed in the layout of all units: blocks of 16 columns one after another; within a block, row by row, the 16
//            columns' 32-bit words. A word is an element (k, n), in bf16 a pair (k, n), (k + 1, n): see right_index().
//   c        row-major fp32, rows ldc elements apart
// AMX: a tile holds 16 rows of 64 bytes; TDPBF16PS adds the product of a tile of a (16, 32) and one of b (32, 16) to one of c
// (16, 16). Four tiles of c stay in registers, so each loaded tile of a and b is used twice: 4 loads for 4 products of 16
// cycles; of fp32 in three bf16 parts, 14 for 24. AVX-512: 8 rows and 32 columns of c stay in registers (AVX2: 6 and 16); a
// word of a is broadcast and multiplied with a row of words of b. Sums have a fixed order: the same bits for any number of
// threads, but different bits on another unit. (Intel, Architecture Instruction Set Extensions Programming Reference, chapter
// 3: AMX; section 2.1: AVX512_BF16. Arm, Architecture Reference Manual for A-profile, section C7.2: BFMMLA.)
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "../base/math.h"
#include "../base/types.h"

#if defined(__x86_64__)
#define X86_UNITS 1
// Attributes of functions that contain a unit's instructions.
#define FOR_DOTS __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512bw")))
#define FOR_AVX2 __attribute__((target("avx2,fma")))
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define X86_UNITS 0
#endif
#if defined(__aarch64__) && defined(__linux__)
#define ARM_UNITS 1
#include <sys/auxv.h>
#else
#define ARM_UNITS 0
#endif

// Unrolls a loop over an array of registers early, before the compiler decides to keep the array in memory.
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

namespace cpu {

template <class E>
constexpr int of_word = (int)(4 / sizeof(E));  // elements per word
template <class E>
constexpr int k_step = (int)(64 / sizeof(E));

// Prefetches the cache lines of `rows` rows, a few at a time between other work.
class Prefetch {
    const char* row = nullptr;
    size_t stride = 0;
    int lines = 0, rows = 0, line = 0;

public:
    Prefetch() = default;
    template <class E>
    Prefetch(const E* x, size_t stride, int rows, int columns)
        : row((const char*)x), stride(stride * sizeof(E)), lines(ceil_div(columns, k_step<E>)), rows(rows) {}
    int left() const { return rows * lines - line; }
    void issue(int n) {
        for (; n > 0 && rows > 0; n--) {
            __builtin_prefetch(row + 64 * line, 0, 2);
            if (++line == lines) {
                line = 0;
                row += stride;
                rows--;
            }
        }
    }
};

// Other work in small pieces, a few per step of tiles: the tile unit works asynchronously, so other instructions overlap with
// it and cost little time. Other units leave all pieces to finish(). `later`: prefetch for a later product, `lines` cache lines
// per step of 64 bytes of k, on every unit.
struct OverlappedWork {
    void (*piece)(OverlappedWork&);
    int left = 0, per_step = 1;  // pieces left; pieces per step
    Prefetch later = {};
    int lines = 0;
    void step() {
        later.issue(lines);
        for (int i = 0; i < per_step && left > 0; i++) {
            left--;
            piece(*this);
        }
    }
    void finish() {
        while (left > 0) {
            left--;
            piece(*this);
        }
    }
};

// The end of the part of K that starts at k: all of K, or a step of k that overlaps with prefetches.
inline int next_step(int k, int step, int K, OverlappedWork* overlapped) {
    if (!overlapped || overlapped->later.left() == 0) return K;
    overlapped->later.issue(overlapped->lines);
    return std::min(k + step, K);
}

// The operand that is streamed: it is not reused soon and need not stay in the L1 cache.
enum class Streamed { neither, left, right };

// Packing routines, independent of the unit.
template <class E>
struct Layouts {
    // Transposes k_step rows of `columns` columns, a multiple of 16, into rows to_stride apart. In elements, and in words.
    void (*transpose)(E* to, size_t to_stride, const E* rows, size_t stride, int columns);
    void (*transpose_words)(uint32_t* to, size_t to_stride, const uint32_t* rows, size_t stride, int columns);
    // Interleaves as many rows as a word has elements; each 16 columns' words are `block` elements after the previous ones.
    void (*join)(E* to, size_t block, const E* rows, size_t stride, int columns);
};

template <class E>  // bf16 or float
struct MatrixUnit {
    using Element = E;
    const char* name;
    bool tiles;       // a tile unit: 16 rows at a time, and outputs faster than their cache lines can be fetched
    int high, wide;   // rows and columns of c in registers
    void (*begin)();  // called by a thread before its products; end() after them
    void (*end)();
    void (*product)(float* c, int ldc, const E* a, int lda, const E* b, int b_rows, int M, int N, int K, bool add,
                    Streamed streamed, OverlappedWork* overlapped /*or null*/);
    Layouts<E> layouts;
    // Product of fp32 numbers split into three bf16 parts, a_part and b_part elements apart (packing.h); null if not supported.
    void (*product_of_parts)(float* c, int ldc, const E* a, size_t a_part, int lda, const E* b, size_t b_part, int b_rows,
                             int M, int N, int K, bool add, OverlappedWork* overlapped) = nullptr;
    // Without tiles, M may be a multiple of only row_multiple(), and K of a word.
    int row_multiple() const { return !tiles && 8 % high == 0 ? 8 : 16; }
    // The number of times that a product prefetches (OverlappedWork).
    int steps(int M, int N, int K) const { return ceil_div(M, high) * ceil_div(N, wide) * ceil_div(K, k_step<E>); }
};

// The index of element (k, n) of a packed right operand with K rows.
template <class E>
constexpr size_t right_index(int k, int n, int K) {
    constexpr int w = of_word<E>;
    return (size_t)(n / 16) * (size_t)K * 16 + (size_t)(k / w) * 16 * w + (size_t)(n % 16) * w + (size_t)(k % w);
}

namespace detail {

// ---- AMX -------------------------------------------------------------------------------------------------------------------
// Tiles 0 to 3 hold c, 4 and 5 a, 6 and 7 b. The same kernel runs on the unit and on its emulation in plain C++, which lets
// tests run on any machine.
struct EmulatedTiles {
    struct Tile {
        uint32_t words[16][16];
    };
    static Tile& tile(int i) {
        static thread_local Tile tiles[8];
        return tiles[i];
    }
    static void begin() {
        for (int i = 0; i < 8; i++) memset(&tile(i), 0xff, sizeof(Tile));  // NaN: detects reads of tiles that were not set
    }
    static void end() {}
    template <int t>
    static void zero() {
        memset(&tile(t), 0, sizeof(Tile));
    }
    template <int t>
    static void load(const void* p, size_t stride) {
        for (size_t i = 0; i < 16; i++) memcpy(tile(t).words[i], (const char*)p + i * stride, 64);
    }
    template <int t>
    static void load_once(const void* p, size_t stride) {
        load<t>(p, stride);
    }
    template <int t>
    static void store(void* p, size_t stride) {
        for (size_t i = 0; i < 16; i++) memcpy((char*)p + i * stride, tile(t).words[i], 64);
    }
    template <int c, int a, int b>
    static void multiply() {
        const auto number = [](uint32_t bits) {
            float x;
            memcpy(&x, &bits, 4);
            return x;
        };
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++)
                for (int n = 0; n < 16; n++) {
                    const uint32_t x = tile(a).words[m][k], y = tile(b).words[k][n];
                    float sum = number(tile(c).words[m][n]);
                    sum += number(x << 16) * number(y << 16) + number(x & 0xffff0000u) * number(y & 0xffff0000u);
                    memcpy(&tile(c).words[m][n], &sum, 4);
                }
    }
};

#if X86_UNITS
// The AMX instructions. GCC 12's intrinsic for ldtilecfg declares only 8 of the 64 bytes that are read, so the others would not
// be stored, and its load intrinsics do not declare their memory reads.
struct AmxTiles {
    static void begin() {
        const struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shapes;
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    static void end() { asm volatile("tilerelease"); }
    template <int t>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t));
    }
    template <int t>
    static void load(const void* p, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int t>  // non-temporal: need not stay in L1
    static void load_once(const void* p, size_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    static void store(void* p, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int c, int a, int b>  // c += a b
    static void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};
#endif

// c (16 R, 16 W), R and W 1 or 2, of operands in one or three parts.
template <class Tiles, int R, int W, int parts, Streamed streamed>
inline void tiles_block(float* c, int ldc, const bf16* a, size_t a_part, int lda, const bf16* b, size_t b_part, int b_rows,
                        int K, bool add, OverlappedWork* overlapped) {
    const size_t c_stride = (size_t)ldc * 4, a_stride = (size_t)lda * 2;
    float* const c_low = c + 16 * (size_t)ldc;
    const bf16 *const a_low = a + 16 * (size_t)lda, *const b_right = b + 16 * (size_t)b_rows;
    if (add) {
        Tiles::template load<0>(c, c_stride);
        if constexpr (W == 2) Tiles::template load<1>(c + 16, c_stride);
        if constexpr (R == 2) Tiles::template load<2>(c_low, c_stride);
        if constexpr (R == 2 && W == 2) Tiles::template load<3>(c_low + 16, c_stride);
    } else {
        Tiles::template zero<0>();
        if constexpr (W == 2) Tiles::template zero<1>();
        if constexpr (R == 2) Tiles::template zero<2>();
        if constexpr (R == 2 && W == 2) Tiles::template zero<3>();
    }
    const auto load_left = [&](auto tile, const bf16* from) {
        if constexpr (streamed == Streamed::left) Tiles::template load_once<tile>(from, a_stride);
        else Tiles::template load<tile>(from, a_stride);
    };
    const auto load_right = [&](auto tile, const bf16* from) {
        if constexpr (streamed == Streamed::right) Tiles::template load_once<tile>(from, 64);
        else Tiles::template load<tile>(from, 64);
    };
    // Part i of a times part j of b; loads the flagged tiles.
    const auto multiply = [&](int k, size_t i, bool load_a, size_t j, bool load_b) {
        if (load_b) load_right(std::integral_constant<int, 6>(), b + j * b_part + (size_t)k * 16);
        if (load_a) load_left(std::integral_constant<int, 4>(), a + i * a_part + k);
        Tiles::template multiply<0, 4, 6>();
        if constexpr (W == 2) {
            if (load_b) load_right(std::integral_constant<int, 7>(), b_right + j * b_part + (size_t)k * 16);
            Tiles::template multiply<1, 4, 7>();
        }
        if constexpr (R == 2) {
            if (load_a) load_left(std::integral_constant<int, 5>(), a_low + i * a_part + k);
            Tiles::template multiply<2, 5, 6>();
        }
        if constexpr (R == 2 && W == 2) Tiles::template multiply<3, 5, 7>();
    };
    for (int k = 0; k < K; k += 32) {
        if constexpr (parts == 1) multiply(k, 0, true, 0, true);
        else {  // 14 loads for 24 products
            multiply(k, 0, true, 2, true);
            multiply(k, 0, false, 1, true);
            multiply(k, 0, false, 0, true);
            multiply(k, 2, true, 0, false);
            multiply(k, 1, true, 0, false);
            multiply(k, 1, false, 1, true);
        }
        if (overlapped) overlapped->step();
    }
    Tiles::template store<0>(c, c_stride);
    if constexpr (W == 2) Tiles::template store<1>(c + 16, c_stride);
    if constexpr (R == 2) Tiles::template store<2>(c_low, c_stride);
    if constexpr (R == 2 && W == 2) Tiles::template store<3>(c_low + 16, c_stride);
}

template <class Tiles, int parts, Streamed streamed = Streamed::left>
void tiles_product_of(float* c, int ldc, const bf16* a, size_t a_part, int lda, const bf16* b, size_t b_part, int b_rows, int M,
                      int N, int K, bool add, OverlappedWork* overlapped) {
    using Block = void (*)(float*, int, const bf16*, size_t, int, const bf16*, size_t, int, int, bool, OverlappedWork*);
    constexpr Block blocks[2][2] = {{tiles_block<Tiles, 1, 1, parts, streamed>, tiles_block<Tiles, 1, 2, parts, streamed>},
                                    {tiles_block<Tiles, 2, 1, parts, streamed>, tiles_block<Tiles, 2, 2, parts, streamed>}};
    for (int n = 0; n < N; n += 32)
        for (int m = 0; m < M; m += 32)
            blocks[M - m > 16][N - n > 16](c + (size_t)m * ldc + n, ldc, a + (size_t)m * lda, a_part, lda,
                                           b + (size_t)n * b_rows, b_part, b_rows, K, add, overlapped);
}
// c (M, 16) for K of at most 64: the tiles of b stay in registers, and each sum is completed before the next one, so that it is
// stored while others are computed.
template <class Tiles, bool two>
inline void tiles_column(float* c, int ldc, const bf16* a, int lda, const bf16* b, int M, bool add) {
    const size_t c_stride = (size_t)ldc * 4, a_stride = (size_t)lda * 2;
    Tiles::template load_once<6>(b, 64);
    if constexpr (two) Tiles::template load_once<7>(b + 32 * 16, 64);
    const auto sum = [&](auto tile, int m) {
        if (m >= M) return;
        float* const at = c + (size_t)m * ldc;
        const bf16* const left = a + (size_t)m * lda;
        if (add) Tiles::template load<tile>(at, c_stride);
        else Tiles::template zero<tile>();
        Tiles::template load<4>(left, a_stride);
        Tiles::template multiply<tile, 4, 6>();
        if constexpr (two) {
            Tiles::template load<5>(left + 32, a_stride);
            Tiles::template multiply<tile, 5, 7>();
        }
        Tiles::template store<tile>(at, c_stride);
    };
    for (int m = 0; m < M; m += 64) {
        sum(std::integral_constant<int, 0>(), m);
        sum(std::integral_constant<int, 1>(), m + 16);
        sum(std::integral_constant<int, 2>(), m + 32);
        sum(std::integral_constant<int, 3>(), m + 48);
    }
}
template <class Tiles>
void tiles_product(float* c, int ldc, const bf16* a, int lda, const bf16* b, int b_rows, int M, int N, int K, bool add,
                   Streamed streamed, OverlappedWork* overlapped) {
    if (N == 16 && K <= 64) return (K > 32 ? tiles_column<Tiles, true> : tiles_column<Tiles, false>)(c, ldc, a, lda, b, M, add);
    (streamed == Streamed::left ? tiles_product_of<Tiles, 1, Streamed::left>
     : streamed == Streamed::right
         ? tiles_product_of<Tiles, 1, Streamed::right>
         : tiles_product_of<Tiles, 1, Streamed::neither>)(c, ldc, a, 0, lda, b, 0, b_rows, M, N, K, add, overlapped);
}

#if defined(__clang__)
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif
// In pieces of 16 bytes, which every CPU interleaves in two instructions; with 64-byte vectors, in pieces of 64.
inline void join_8(bf16* to, const bf16* rows, size_t stride) {
    typedef uint16_t halves_t __attribute__((vector_size(16)));
    halves_t a, b;
    memcpy(&a, rows, sizeof a);
    memcpy(&b, rows + stride, sizeof b);
    const halves_t joined[2] = {SHUFFLE(halves_t, a, b, 0, 8, 1, 9, 2, 10, 3, 11),
                                SHUFFLE(halves_t, a, b, 4, 12, 5, 13, 6, 14, 7, 15)};
    memcpy((void*)to, joined, sizeof joined);
}
__attribute__((always_inline)) inline void join_32(bf16* first, bf16* second, const bf16* rows, size_t stride) {
    typedef uint16_t halves_t __attribute__((vector_size(64)));
    halves_t a, b;
    memcpy(&a, rows, sizeof a);
    memcpy(&b, rows + stride, sizeof b);
    const halves_t low = SHUFFLE(halves_t, a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42,
                                 11, 43, 12, 44, 13, 45, 14, 46, 15, 47),
                   high = SHUFFLE(halves_t, a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25,
                                  57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
    memcpy((void*)first, &low, sizeof low);
    memcpy((void*)second, &high, sizeof high);
}
inline void join_plain(bf16* to, size_t block, const bf16* rows, size_t stride, int columns) {
    for (int c = 0; c < columns; c += 16, to += block) {
        join_8(to, rows + c, stride);
        join_8(to + 16, rows + c + 8, stride);
    }
}
inline void join_plain(float* to, size_t block, const float* rows, size_t, int columns) {
    for (int c = 0; c < columns; c += 16, to += block) memcpy(to, rows + c, 64);
}
template <class X>
void transpose_plain(X* to, size_t to_stride, const X* rows, size_t stride, int columns) {
    for (size_t c = 0; c < (size_t)columns; c++)
        for (size_t r = 0; r < k_step<X>; r++)  // X may be a word type
            memcpy((void*)(to + c * to_stride + r), (const void*)(rows + r * stride + c), sizeof(X));
}
template <class E>
constexpr Layouts<E> plain_layouts = {transpose_plain<E>, transpose_plain<uint32_t>, join_plain};

// ---- fp32 multiply-adds ----------------------------------------------------------------------------------------------------
// c (R, 16 W) in vectors of L floats.
template <int L, int R, int W>
__attribute__((always_inline)) inline void fp32_block(float* c, int ldc, const float* a, int lda, const float* b, int b_rows,
                                                      int K, bool add, OverlappedWork* overlapped) {
    typedef float floats __attribute__((vector_size(4 * L)));
    constexpr int of_block = 16 / L, vectors = W * of_block;
    floats sum[R][vectors] = {};
    for (int k = 0, end; k < K;) {
        end = next_step(k, k_step<float>, K, overlapped);
        for (; k < end; k++) {
            floats right[vectors];
            UNROLLED
            for (int v = 0; v < vectors; v++)
                memcpy(&right[v], b + (size_t)(v / of_block) * 16 * b_rows + (size_t)k * 16 + v % of_block * L, sizeof(floats));
            UNROLLED
            for (int r = 0; r < R; r++) {
                UNROLLED
                for (int v = 0; v < vectors; v++) sum[r][v] += a[(size_t)r * lda + k] * right[v];
            }
        }
    }
    UNROLLED
    for (int r = 0; r < R; r++) {
        UNROLLED
        for (int v = 0; v < vectors; v++) {
            float* const at = c + (size_t)r * ldc + v * L;
            floats before = {};
            if (add) memcpy(&before, at, sizeof before);
            sum[r][v] += before;
            memcpy(at, &sum[r][v], sizeof(floats));
        }
    }
}
// Blocks of R rows; if 16 is not a multiple of R, also of R - 1.
template <int L, int R, int W>
__attribute__((always_inline)) inline void fp32_blocks(float* c, int ldc, const float* a, int lda, const float* b, int b_rows,
                                                       int M, int N, int K, bool add, OverlappedWork* overlapped) {
    constexpr int fewer = 16 % R == 0 ? R : R - 1;
    static_assert(W == 1 || fewer == R, "a product has 16 columns more than whole blocks, or rows, but not both");
    for (int n = 0; n < N; n += 16 * W)
        for (int m = 0, rows; m < M; m += rows) {
            rows = (M - m) / ceil_div(M - m, R);  // nearly equal blocks
            float* const at = c + (size_t)m * ldc + n;
            const float *const left = a + (size_t)m * lda, *const right = b + (size_t)n * b_rows;
            if (W > 1 && N - n < 16 * W) fp32_block<L, R, 1>(at, ldc, left, lda, right, b_rows, K, add, overlapped);
            else if (rows == R) fp32_block<L, R, W>(at, ldc, left, lda, right, b_rows, K, add, overlapped);
            else fp32_block<L, fewer, W>(at, ldc, left, lda, right, b_rows, K, add, overlapped);
        }
}
// Vectors of 16 bytes: 4 per row of 16 columns, and as many rows as fit in the registers.
#if defined(__x86_64__) && !defined(__AVX512VL__)
constexpr int portable_rows = 3;  // 16 registers
#else
constexpr int portable_rows = 4;  // 32 registers, as on ARM
#endif
inline void fp32_product(float* c, int ldc, const float* a, int lda, const float* b, int b_rows, int M, int N, int K, bool add,
                         Streamed, OverlappedWork* overlapped) {
    fp32_blocks<4, portable_rows, 1>(c, ldc, a, lda, b, b_rows, M, N, K, add, overlapped);
}

#if X86_UNITS
FOR_AVX2 inline void fp32_product_avx2(float* c, int ldc, const float* a, int lda, const float* b, int b_rows, int M, int N,
                                       int K, bool add, Streamed, OverlappedWork* overlapped) {
    fp32_blocks<8, 6, 1>(c, ldc, a, lda, b, b_rows, M, N, K, add, overlapped);
}
// Transposes 8 rows of 4 words into 4 rows of 8, like transpose_quarters below, with two halves.
FOR_AVX2 inline void transpose_halves(void* to, size_t to_stride, const void* rows, size_t stride) {
    constexpr int n = 4;
    __m256i x[n], y[n];
    const auto half = [=](int row) { return _mm_loadu_si128((const __m128i*)((const uint32_t*)rows + (size_t)row * stride)); };
    UNROLLED
    for (int i = 0; i < n; i++) x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(half(i)), half(n + i), 1);
    UNROLLED
    for (int round = 1; round < n; round *= 2) {
        UNROLLED
        for (int i = 0; i < n / 2; i++) {
            y[2 * i] = _mm256_unpacklo_epi32(x[i], x[i + n / 2]);
            y[2 * i + 1] = _mm256_unpackhi_epi32(x[i], x[i + n / 2]);
        }
        UNROLLED
        for (int i = 0; i < n; i++) x[i] = y[i];
    }
    UNROLLED
    for (int i = 0; i < n; i++) _mm256_storeu_si256((__m256i*)((uint32_t*)to + (size_t)i * to_stride), x[i]);
}
template <class Word>  // uint32_t or float
FOR_AVX2 inline void transpose_avx2(Word* to, size_t to_stride, const Word* rows, size_t stride, int columns) {
    for (int c = 0; c < columns; c += 4)
        for (int r = 0; r < 16; r += 8)
            transpose_halves(to + (size_t)c * to_stride + r, to_stride, rows + (size_t)r * stride + c, stride);
}
constexpr Layouts<float> avx2_layouts = {transpose_avx2<float>, transpose_avx2<uint32_t>, join_plain};

FOR_AVX512 inline void fp32_product_avx512(float* c, int ldc, const float* a, int lda, const float* b, int b_rows, int M, int N,
                                           int K, bool add, Streamed, OverlappedWork* overlapped) {
    fp32_blocks<16, 8, 2>(c, ldc, a, lda, b, b_rows, M, N, K, add, overlapped);
}

// ---- AVX512-BF16 -----------------------------------------------------------------------------------------------------------
// c (8, 16 W)
template <int W>
FOR_DOTS inline void dot_block(float* c, int ldc, const bf16* a, int lda, const bf16* b, int b_rows, int K, bool add,
                               OverlappedWork* overlapped) {
    constexpr int R = 8;
    __m512 sum[R][W];
    UNROLLED
    for (int r = 0; r < R; r++) {
        UNROLLED
        for (int w = 0; w < W; w++) sum[r][w] = _mm512_setzero_ps();
    }
    for (int k = 0, end; k < K;) {
        end = next_step(k, k_step<bf16>, K, overlapped);
        for (; k < end; k += 2) {
            __m512i words[W];
            UNROLLED
            for (int w = 0; w < W; w++) words[w] = _mm512_loadu_si512(b + (size_t)w * 16 * b_rows + (size_t)k * 16);
            UNROLLED
            for (int r = 0; r < R; r++) {
                int pair;
                memcpy(&pair, a + (size_t)r * lda + k, 4);
                const __m512i left = _mm512_set1_epi32(pair);
                UNROLLED
                for (int w = 0; w < W; w++) sum[r][w] = _mm512_dpbf16_ps(sum[r][w], (__m512bh)left, (__m512bh)words[w]);
            }
        }
    }
    UNROLLED
    for (int r = 0; r < R; r++) {
        UNROLLED
        for (int w = 0; w < W; w++) {
            float* const at = c + (size_t)r * ldc + 16 * w;
            _mm512_storeu_ps(at, add ? _mm512_add_ps(_mm512_loadu_ps(at), sum[r][w]) : sum[r][w]);
        }
    }
}

FOR_DOTS inline void dot_product(float* c, int ldc, const bf16* a, int lda, const bf16* b, int b_rows, int M, int N, int K,
                                 bool add, Streamed, OverlappedWork* overlapped) {
    for (int n = 0; n < N; n += 32)
        for (int m = 0; m < M; m += 8) {
            float* const at = c + (size_t)m * ldc + n;
            const bf16 *const left = a + (size_t)m * lda, *const right = b + (size_t)n * b_rows;
            if (N - n > 16) dot_block<2>(at, ldc, left, lda, right, b_rows, K, add, overlapped);
            else dot_block<1>(at, ldc, left, lda, right, b_rows, K, add, overlapped);
        }
}

FOR_AVX512 inline void join_vectors(bf16* to, size_t block, const bf16* rows, size_t stride, int columns) {
    int c = 0;
    for (; c + 32 <= columns; c += 32, to += 2 * block) join_32(to, to + block, rows + c, stride);
    if (c < columns) join_plain(to, block, rows + c, stride, columns - c);
}
inline void join_vectors(float* to, size_t block, const float* rows, size_t stride, int columns) {
    join_plain(to, block, rows, stride, columns);
}
// Transposes 16 bytes of each of k_step rows. Quarter q of x[i] holds row q * n + i. Each round interleaves the first half of x
// with the second: if an element's row and column are written as the digits of one number, the first digit becomes the last,
// until row and column have changed places.
template <class X>
FOR_AVX512 inline void transpose_quarters(X* to, size_t to_stride, const X* rows, size_t stride) {
    constexpr int n = 16 / sizeof(X);
    constexpr __mmask16 all = 0xffff;  // without a mask GCC 12 warns about its own intrinsics
    __m512i x[n], y[n];
    const auto quarter = [=](int row) { return _mm_loadu_si128((const __m128i*)(rows + (size_t)row * stride)); };
    UNROLLED
    for (int i = 0; i < n; i++) {
        x[i] = _mm512_castsi128_si512(quarter(i));
        x[i] = _mm512_inserti32x4(x[i], quarter(n + i), 1);
        x[i] = _mm512_inserti32x4(x[i], quarter(2 * n + i), 2);
        x[i] = _mm512_inserti32x4(x[i], quarter(3 * n + i), 3);
    }
    UNROLLED
    for (int round = 1; round < n; round *= 2) {
        UNROLLED
        for (int i = 0; i < n / 2; i++) {
            const __m512i a = x[i], b = x[i + n / 2];
            if constexpr (n == 8) {
                y[2 * i] = _mm512_unpacklo_epi16(a, b);
                y[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
            } else {
                y[2 * i] = _mm512_maskz_unpacklo_epi32(all, a, b);
                y[2 * i + 1] = _mm512_maskz_unpackhi_epi32(all, a, b);
            }
        }
        UNROLLED
        for (int i = 0; i < n; i++) x[i] = y[i];
    }
    UNROLLED
    for (int i = 0; i < n; i++) _mm512_storeu_si512(to + (size_t)i * to_stride, x[i]);
}
template <class X>
FOR_AVX512 inline void transpose_vectors(X* to, size_t to_stride, const X* rows, size_t stride, int columns) {
    constexpr int n = 16 / sizeof(X);
    for (int c = 0; c < columns; c += n) transpose_quarters(to + (size_t)c * to_stride, to_stride, rows + c, stride);
}
template <class E>
constexpr Layouts<E> vector_layouts = {transpose_vectors<E>, transpose_vectors<uint32_t>, join_vectors};
#endif

// ---- NEON with bf16 ---------------------------------------------------------------------------------------------------------
#if ARM_UNITS
typedef float four_floats __attribute__((vector_size(16)));
typedef uint32_t four_words __attribute__((vector_size(16)));
typedef uint64_t two_rows __attribute__((vector_size(16)));

// c (2, 2) + a (2, 4) b (4, 2): c and a row by row, b column by column. In assembler, as for intrinsics the whole program
// would have to be compiled for CPUs that have the instruction.
inline four_floats multiply_add(four_floats c, four_words a, four_words b) {
    asm(".arch_extension bf16\n\tbfmmla %0.4s, %1.8h, %2.8h" : "+w"(c) : "w"(a), "w"(b));
    return c;
}

// c (4, 16). Two rows of b's words, interleaved, have the columns as the instruction needs them.
inline void mmla_block(float* c, int ldc, const bf16* a, int lda, const bf16* b, int K, bool add, OverlappedWork* overlapped) {
    four_floats sum[2][8] = {};                                                     // for each two rows and each two columns
    const auto add_words = [&](int k, auto words) __attribute__((always_inline)) {  // for two words of k or, at the end, one
        four_words left[2], right[8];
        UNROLLED
        for (int p = 0; p < 2; p++) {
            uint64_t rows[2] = {};
            for (int i = 0; i < 2; i++) memcpy(&rows[i], a + (size_t)(2 * p + i) * lda + k, 4 * words);
            left[p] = (four_words)two_rows{rows[0], rows[1]};
        }
        UNROLLED
        for (int q = 0; q < 4; q++) {
            four_words first, second = {};
            memcpy(&first, b + (size_t)k * 16 + 8 * q, sizeof first);
            if constexpr (words == 2) memcpy(&second, b + (size_t)(k + 2) * 16 + 8 * q, sizeof second);
            right[2 * q] = SHUFFLE(four_words, first, second, 0, 4, 1, 5);
            right[2 * q + 1] = SHUFFLE(four_words, first, second, 2, 6, 3, 7);
        }
        UNROLLED
        for (int q = 0; q < 8; q++) {
            UNROLLED
            for (int p = 0; p < 2; p++) sum[p][q] = multiply_add(sum[p][q], left[p], right[q]);
        }
    };
    for (int k = 0, end; k < K;) {
        end = next_step(k, k_step<bf16>, K, overlapped);
        for (; k + 4 <= end; k += 4) add_words(k, std::integral_constant<int, 2>());
        if (k < end) add_words(k, std::integral_constant<int, 1>());
        k = end;
    }
    UNROLLED
    for (int p = 0; p < 2; p++) {
        UNROLLED
        for (int q = 0; q < 4; q++) {
            const four_floats x = sum[p][2 * q], y = sum[p][2 * q + 1];
            const four_floats rows[2] = {SHUFFLE(four_words, x, y, 0, 1, 4, 5), SHUFFLE(four_words, x, y, 2, 3, 6, 7)};
            UNROLLED
            for (int i = 0; i < 2; i++) {
                float* const at = c + (size_t)(2 * p + i) * ldc + 4 * q;
                four_floats before = {};
                if (add) memcpy(&before, at, sizeof before);
                before += rows[i];
                memcpy(at, &before, sizeof before);
            }
        }
    }
}
inline void mmla_product(float* c, int ldc, const bf16* a, int lda, const bf16* b, int b_rows, int M, int N, int K, bool add,
                         Streamed, OverlappedWork* overlapped) {
    for (int n = 0; n < N; n += 16)
        for (int m = 0; m < M; m += 4)
            mmla_block(c + (size_t)m * ldc + n, ldc, a + (size_t)m * lda, lda, b + (size_t)n * b_rows, K, add, overlapped);
}
inline bool has_mmla() {
    constexpr unsigned long bf16_instructions = 1ul << 14;  // HWCAP2_BF16
    return getauxval(AT_HWCAP2) & bf16_instructions;
}
#endif
#undef SHUFFLE

#if X86_UNITS
// ---- detection --------------------------------------------------------------------------------------------------------------
inline bool has_avx512_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
// The kernel grants a process the tiles' state on request.
inline bool has_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
#if defined(__linux__)
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace detail

inline const MatrixUnit<bf16>* emulated_amx() {
    static const MatrixUnit<bf16> unit = {"emulated AMX",
                                          true,
                                          32,
                                          32,
                                          detail::EmulatedTiles::begin,
                                          detail::EmulatedTiles::end,
                                          detail::tiles_product<detail::EmulatedTiles>,
                                          detail::plain_layouts<bf16>,
                                          detail::tiles_product_of<detail::EmulatedTiles, 3>};
    return &unit;
}

// Multiply-adds, which every CPU supports.
inline const MatrixUnit<float>* portable() {
    static const MatrixUnit<float> unit = {"portable", false, detail::portable_rows, 16,
                                           [] {},      [] {}, detail::fp32_product,  detail::plain_layouts<float>};
    return &unit;
}

#if X86_UNITS
inline const MatrixUnit<bf16>* amx() {
    static const bool there = detail::has_amx();
    static const MatrixUnit<bf16> unit = {"AMX",
                                          true,
                                          32,
                                          32,
                                          detail::AmxTiles::begin,
                                          detail::AmxTiles::end,
                                          detail::tiles_product<detail::AmxTiles>,
                                          detail::vector_layouts<bf16>,
                                          detail::tiles_product_of<detail::AmxTiles, 3>};
    return there ? &unit : nullptr;
}
inline const MatrixUnit<bf16>* avx512_bf16() {
    static const bool there = detail::has_avx512_bf16();
    static const MatrixUnit<bf16> unit = {
        "AVX512-BF16", false, 8, 32, [] {}, [] {}, detail::dot_product, detail::vector_layouts<bf16>};
    return there ? &unit : nullptr;
}
inline const MatrixUnit<float>* avx512() {
    __builtin_cpu_init();
    static const MatrixUnit<float> unit = {
        "AVX-512", false, 8, 32, [] {}, [] {}, detail::fp32_product_avx512, detail::vector_layouts<float>};
    return __builtin_cpu_supports("avx512bw") ? &unit : nullptr;
}
inline const MatrixUnit<float>* avx2() {
    __builtin_cpu_init();
    static const MatrixUnit<float> unit = {"AVX2", false, 6, 16, [] {}, [] {}, detail::fp32_product_avx2, detail::avx2_layouts};
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &unit : nullptr;
}
#else
inline const MatrixUnit<bf16>* amx() { return nullptr; }
inline const MatrixUnit<bf16>* avx512_bf16() { return nullptr; }
inline const MatrixUnit<float>* avx512() { return nullptr; }
inline const MatrixUnit<float>* avx2() { return nullptr; }
#endif
#if ARM_UNITS
inline const MatrixUnit<bf16>* neon_bf16() {
    static const bool there = detail::has_mmla();
    static const MatrixUnit<bf16> unit = {
        "NEON-BF16", false, 4, 16, [] {}, [] {}, detail::mmla_product, detail::plain_layouts<bf16>};
    return there ? &unit : nullptr;
}
#else
inline const MatrixUnit<bf16>* neon_bf16() { return nullptr; }
#endif

// A unit for either type. Operands of another storage type are converted when packed (packing.h).
using AnyUnit = std::variant<const MatrixUnit<bf16>*, const MatrixUnit<float>*>;
inline const char* name_of(AnyUnit unit) {
    return std::visit([](const auto* u) { return u->name; }, unit);
}

// Kinds of products, which may use different units.
enum class Products { layers, attention };

// The units of this CPU for numbers stored as X. Attention's probabilities are not split into parts.
template <class X>
std::vector<AnyUnit> matrix_units(Products kind) {
    constexpr bool in_bf16 = std::is_same<X, bf16>::value;
    std::vector<AnyUnit> units;
    const auto add = [&](const auto* unit) {
        if (unit) units.push_back(unit);
    };
    if (in_bf16 || kind == Products::layers) add(amx());
    if (in_bf16) {
        add(avx512_bf16());
        add(neon_bf16());
    }
    add(avx512());
    add(avx2());
    add(portable());
    return units;
}
template <class X>
std::optional<AnyUnit> unit_named(Products kind, const std::string& name) {
    for (const AnyUnit unit : matrix_units<X>(kind))
        if (name == name_of(unit)) return unit;
    return {};
}
template <class X>
std::string unit_names() {
    std::string names;
    for (const AnyUnit unit : matrix_units<X>(Products::layers))
        names += (names.empty() ? "" : ", ") + std::string(name_of(unit));
    return names;
}
// For tests: the unit of every program that is not given one.
inline std::string unit_of_environment() {
    const char* name = getenv("TRAIN_GPT_MATRIX_UNIT");
    return name ? name : "";
}
template <class X>
AnyUnit default_unit(Products kind) {
    return unit_named<X>(kind, unit_of_environment()).value_or(matrix_units<X>(kind).front());
}

}  // namespace cpu
