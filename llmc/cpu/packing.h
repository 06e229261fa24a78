// Operands of a matrix unit (matrix_unit.h) from rows of numbers that lie `stride` elements apart; where rows are transposed, whole
// words apart. Every number of rows and columns is a multiple of 16, of K one of 64 bytes.
#pragma once
#include "matrix_unit.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// Words of 16 columns: in bf16 of two rows side by side, in fp32 of one. Rows from `there` on are zero.
inline void join_rows(uint32_t* words, const bf16* x, size_t stride, int row, int there) {
    const auto word_of = [](bf16 first, bf16 second) { return (uint32_t)first.bits | (uint32_t)second.bits << 16; };
    if (row + 1 < there) {
        INDEPENDENT_ITERATIONS
        for (int c = 0; c < 16; c++) words[c] = word_of(x[c], x[stride + (size_t)c]);
    } else {
        for (int c = 0; c < 16; c++) words[c] = row < there ? word_of(x[c], bf16(0)) : 0;
    }
}
inline void join_rows(uint32_t* words, const float* x, size_t, int row, int there) {
    if (row < there) memcpy(words, x, 64);
    else memset(words, 0, 64);
}

// The lines of a panel lie far from one another, which the CPU does not foresee: `rows` rows' line at column c is asked for
// ahead.
template <class E>
void prefetch_lines(const E* x, size_t stride, int c, int rows) {
    if (c % k_step<E> == 0)
        for (int i = 0; i < rows; i++) __builtin_prefetch(x + (size_t)i * stride + c);
}

// Right operand (K, columns) of as many rows, of which those from `there` on are zero. Eight rows at a time, so that what is
// written to a block of 16 columns is 256 bytes in a row.
template <class E>
void pack_rows(E* to, const E* x, size_t stride, int columns, int K, int there) {
    constexpr int rows = 8;
    for (int k = 0; k < K; k += rows)
        for (int c = 0; c < columns; c += 16) {
            if (k + 2 * rows <= there) prefetch_lines(x + (size_t)(k + rows) * stride, stride, c, rows);
            for (int i = k; i < k + rows; i += of_word<E>)
                join_rows((uint32_t*)(to + right_index<E>(i, c, K)), x + (size_t)i * stride + c, stride, i, there);
        }
}

// Right operand (K, rows) = the transpose of rows of K: their words, transposed.
template <class E>
void pack_transposed(const MatrixUnit<E>& unit, E* to, const E* x, size_t stride, int rows, int K) {
    for (int r = 0; r < rows; r += 16)
        for (int k = 0; k < K; k += k_step<E>)
            unit.transpose((uint32_t*)(to + right_index<E>(k, r, K)), 16, (const uint32_t*)(x + (size_t)r * stride + k),
                           stride / of_word<E>);
}

// Left operand (columns, K) = the transpose of K rows, of which those from `there` on are zero. Rows are joined to words, and
// words transposed: each is a word of a row of the result.
template <class E>
void lay_transposed(const MatrixUnit<E>& unit, E* to, const E* x, size_t stride, int columns, int K, int there) {
    constexpr int rows = k_step<E>;
    alignas(64) uint32_t joined[16][16];
    for (int k = 0; k < K; k += rows)
        for (int c = 0; c < columns; c += 16) {
            if (k + 2 * rows <= there) prefetch_lines(x + (size_t)(k + rows) * stride, stride, c, rows);
            for (int i = 0; i < 16; i++) {
                const int row = k + i * of_word<E>;
                join_rows(joined[i], x + (size_t)row * stride + c, stride, row, there);
            }
            unit.transpose((uint32_t*)(to + (size_t)c * K + k), (size_t)K / of_word<E>, &joined[0][0], 16);
        }
}

}  // namespace detail
}  // namespace cpu
