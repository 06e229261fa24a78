// Packs operands of a matrix unit (matrix_unit.h) from rows of numbers that are `stride` elements apart; for transposed rows,
// the stride is a multiple of words. All numbers of rows and columns are multiples of 16, K is a multiple of k_multiple.
// bf16 numbers for an fp32 unit are widened when packed: in the innermost loop, each number of the left operand would be
// converted once for every 32 products, on a port that also multiplies. A widened panel needs twice the cache.
// fp32 numbers for a bf16 unit are split into three bf16 parts, packed `part` elements apart: x = x1 + x2 + x3, where x1 is the
// nearest bf16, x2 the nearest to the remainder, and x3 the last remainder: 3 times 8 bits, the whole mantissa (except for
// numbers below 2^-110, whose last parts are denormal, which the unit treats as zero). Six products of parts are summed for x
// y; x2 y3, x3 y2 and x3 y3 are below 2^-25 of it. Infinity times a number becomes infinity or NaN.
#pragma once
#include "../base/math.h"
#include "ctx.h"
#include "parallel.h"
#include "vectors.h"

#if CPU_FAST_PATHS

namespace cpu {
namespace detail {

template <class E>
constexpr int parts = sizeof(E) < sizeof(floatX) ? 3 : 1;
template <class E>
constexpr bool as_stored_in = std::is_same<E, floatX>::value;  // left operands are read in place
template <class E>
constexpr int k_multiple = std::max(k_step<E>, k_step<floatX>);

// Splits rows of numbers into three parts each.
inline void split_rows(bf16* to, size_t part, size_t to_stride, const float* x, size_t stride, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for_vectors(columns, [&](int c, auto there) {
            __builtin_prefetch(x + (size_t)(r + 2) * stride + c);
            floats rest = load(x + (size_t)r * stride + c, there);
            bf16* at = to + (size_t)r * to_stride + c;
            for (int p = 0; p < parts<bf16>; p++, at += part) {
                store(at, rest, there);
                rest -= as_stored(at, rest);
            }
        });
}

// Widens rows of numbers.
inline void widen_rows(float* to, size_t to_stride, const bf16* x, size_t stride, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c += lanes) store(to + (size_t)r * to_stride + c, load(x + (size_t)r * stride + c));
}

// Interleaves rows from `row` on, as many as a word has elements (Layouts::join); rows from `there` on are zero.
template <class E>
void join_rows(const MatrixUnit<E>& unit, E* to, size_t block, const E* x, size_t stride, int columns, int row, int there) {
    if (row + of_word<E> <= there) return unit.layouts.join(to, block, x, stride, columns);
    E last[of_word<E>][16] = {};  // zeros, or one row and zeros
    for (int c = 0; c < columns; c += 16, to += block) {
        if (row < there) std::copy_n(x + c, 16, last[0]);
        unit.layouts.join(to, block, last[0], 16, 16);
    }
}
inline void join_rows(const MatrixUnit<float>&, float* to, size_t block, const bf16* x, size_t, int columns, int row,
                      int there) {
    for (int c = 0; c < columns; c += 16, to += block)
        for (int i = 0; i < 16; i += lanes) store(to + i, row < there ? load(x + c + i) : floats{});
}

// (K of k_step<X>, 16) = the transpose of 16 rows. Words that hold two numbers are split into separate rows.
template <class E>
void transpose_block(const MatrixUnit<E>& unit, E* to, const E* rows, size_t stride) {
    unit.layouts.transpose_words((uint32_t*)to, 16, (const uint32_t*)rows, stride / of_word<E>, 16);
}
inline void transpose_block(const MatrixUnit<float>& unit, float* to, const bf16* rows, size_t stride) {
    alignas(64) uint32_t pairs[16 * 16];
    unit.layouts.transpose_words(pairs, 16, (const uint32_t*)rows, stride / of_word<bf16>, 16);
    for (int i = 0; i < 16 * 16; i += lanes) {
        words pair;
        memcpy(&pair, pairs + i, sizeof pair);
        float* const first = to + i / 16 * 32 + i % 16;
        store(first, (floats)(pair << 16));
        store(first + 16, (floats)(pair & 0xffff0000u));
    }
}

// True if results at y, in rows of row_bytes, use non-temporal stores.
template <class E>
bool streams(const MatrixUnit<E>& unit, const void* y, size_t row_bytes) {
    return unit.tiles && fills_lines(y) && row_bytes % 64 == 0;
}

// Prefetches the lines of `rows` rows of a panel, which are too far apart for hardware prefetch.
template <int to_write = 0, class E>
void prefetch_lines(const E* x, size_t stride, int columns, int rows) {
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < columns; c += k_step<E>) __builtin_prefetch(x + (size_t)i * stride + c, to_write);
}

// Right operand (K, columns) = K rows, zero from `there` on; `block`: distance between groups of 16 columns.
template <class E, class X>
void pack_rows(const MatrixUnit<E>& unit, E* to, size_t block, const X* x, size_t stride, int columns, int K, int there) {
    constexpr int ahead = 8 * of_word<X>;
    for (int k = 0; k < K; k += of_word<E>) {
        if (k + ahead + of_word<E> <= there) prefetch_lines(x + (size_t)(k + ahead) * stride, stride, columns, of_word<E>);
        join_rows(unit, to + 16 * (size_t)k, block, x + (size_t)k * stride, stride, columns, k, there);
    }
}

// Right operand (K, rows) = the transpose of rows of length K: their words, transposed.
template <class E, class X>
void pack_transposed(const MatrixUnit<E>& unit, E* to, size_t block, const X* x, size_t stride, int rows, int K) {
    for (int r = 0; r < rows; r += 16)
        for (int k = 0; k < K; k += k_step<X>) {
            const X* from = x + (size_t)r * stride + k;
            if (r + 16 < rows) prefetch_lines(from + 16 * stride, stride, k_step<X>, 16);
            transpose_block(unit, to + (size_t)(r / 16) * block + 16 * (size_t)k, from, stride);
        }
}

// Copies 16 numbers in the unit's type.
inline void copy_16(bf16* to, const bf16* x) { memcpy((void*)to, x, 16 * sizeof *x); }
inline void copy_16(float* to, const float* x) { memcpy(to, x, 16 * sizeof *x); }
inline void copy_16(float* to, const bf16* x) {
    for (int i = 0; i < 16; i += lanes) store(to + i, load(x + i));
}

// Left operand (columns, K), rows to_stride apart, = the transpose of K rows, zero from `there` on. Pieces are copied first:
// rows a power of two apart would evict each other from the L1 cache.
template <class E, class X>
void pack_left_transposed(const MatrixUnit<E>& unit, E* to, size_t to_stride, const X* x, size_t stride, int columns, int K,
                          int there) {
    constexpr int rows = k_step<E>, wide = 64, ahead = 2 * k_step<X>, apart = wide + k_step<E>;
    alignas(64) E piece[rows * apart];
    for (int k = 0; k < K; k += rows)
        for (int c = 0; c < columns; c += wide) {
            const int width = std::min((int)wide, columns - c);
            for (int i = 0; i < rows; i++) {
                const X* row = x + (size_t)(k + i) * stride + c;
                if (k + i >= there) {
                    std::fill_n(piece + i * apart, width, E(0));
                    continue;
                }
                for (int j = 0; j < width; j += 16) {
                    if (k + i + ahead < there) __builtin_prefetch(row + ahead * stride + j, 0, 2);
                    copy_16(piece + i * apart + j, row + j);
                }
            }
            unit.layouts.transpose(to + (size_t)c * to_stride + k, to_stride, piece, apart, width);
        }
}

// ---- packing in as many parts as the unit needs ----------------------------------------------------------------------------
// Calls f(p, k, c, rows, columns, part p of these) for pieces of (K, columns) numbers whose parts fit in the L1 cache. Rows
// from `there` on are neither read nor split.
template <int high, int wide, class F>
void for_split_pieces(const float* x, size_t stride, int K, int columns, int there, F f) {
    constexpr size_t part = high * wide;
    alignas(64) bf16 pieces[parts<bf16> * part];
    for (int k = 0; k < K; k += high)
        for (int c = 0; c < columns; c += wide) {
            const int rows = std::min((int)high, K - k), width = std::min((int)wide, columns - c);
            split_rows(pieces, part, wide, x + (size_t)k * stride + c, stride, std::max(0, std::min(rows, there - k)), width);
            for (int p = 0; p < parts<bf16>; p++) f(p, k, c, rows, width, pieces + p * part);
        }
}
template <class E>
void pack_rows_in_parts(const MatrixUnit<E>& unit, E* to, size_t part, size_t block, const floatX* x, size_t stride,
                        int columns, int K, int there) {
    if constexpr (parts<E> == 1) pack_rows(unit, to, block, x, stride, columns, K, there);
    else
        for_split_pieces<32, 128>(x, stride, K, columns, there, [&](int p, int k, int c, int rows, int width, const E* piece) {
            pack_rows(unit, to + p * part + (size_t)(c / 16) * block + 16 * (size_t)k, block, piece, 128, width, rows,
                      there - k);
        });
}
template <class E>
void pack_transposed_in_parts(const MatrixUnit<E>& unit, E* to, size_t part, const floatX* x, size_t stride, int rows, int K) {
    const size_t block = 16 * (size_t)K;
    if constexpr (parts<E> == 1) pack_transposed(unit, to, block, x, stride, rows, K);
    else
        for_split_pieces<16, 256>(x, stride, rows, K, rows, [&](int p, int r, int k, int height, int width, const E* piece) {
            pack_transposed(unit, to + p * part + (size_t)(r / 16) * block + 16 * (size_t)k, block, piece, 256, height, width);
        });
}
template <class E>
void pack_left_in_parts(const MatrixUnit<E>& unit, E* to, size_t part, size_t to_stride, const floatX* x, size_t stride,
                        int columns, int K, int there) {
    if constexpr (parts<E> == 1) pack_left_transposed(unit, to, to_stride, x, stride, columns, K, there);
    else
        for_split_pieces<32, 128>(x, stride, K, columns, there, [&](int p, int k, int c, int rows, int width, const E* piece) {
            pack_left_transposed(unit, to + p * part + (size_t)c * to_stride + k, to_stride, piece, 128, width, rows,
                                 there - k);
        });
}

}  // namespace detail
}  // namespace cpu
#endif  // CPU_FAST_PATHS
