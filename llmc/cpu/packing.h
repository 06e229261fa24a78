// Operands of a matrix unit (matrix_unit.h) from rows of bf16 numbers that lie `stride` elements apart, an even number of them
// where rows are transposed as words. Every number of rows and columns is a multiple of 16, of K 32.
#pragma once
#include "matrix_unit.h"
#include "parallel.h"

namespace cpu {
namespace detail {

// Words of two rows side by side; rows from `there` on are zero.
inline void pair_rows(uint32_t* words, const bf16* x, size_t stride, int columns, int row, int there) {
    if (row + 1 < there) {
        INDEPENDENT_ITERATIONS
        for (int c = 0; c < columns; c++) words[c] = word_of(x[c], x[stride + (size_t)c]);
    } else {
        for (int c = 0; c < columns; c++) words[c] = row < there ? word_of(x[c], bf16(0)) : 0;
    }
}

// The lines of a panel lie far from one another, which the CPU does not foresee: `rows` rows' line at column c is asked for
// ahead.
inline void prefetch_lines(const bf16* x, size_t stride, int c, int rows) {
    constexpr int of_line = 64 / (int)sizeof(bf16);
    if (c % of_line == 0)
        for (int i = 0; i < rows; i++) __builtin_prefetch(x + (size_t)i * stride + c);
}

// Right operand (K, columns) of as many rows, of which those from `there` on are zero. Eight rows at a time, so that what is
// written to a block of 16 columns is 256 bytes in a row.
inline void pack_rows(bf16* to, const bf16* x, size_t stride, int columns, int K, int there) {
    constexpr int rows = 8;
    for (int k = 0; k < K; k += rows)
        for (int c = 0; c < columns; c += 16) {
            if (k + 2 * rows <= there) prefetch_lines(x + (size_t)(k + rows) * stride, stride, c, rows);
            for (int i = k; i < k + rows; i += 2)
                pair_rows((uint32_t*)to + (size_t)c * K / 2 + (size_t)i * 8, x + (size_t)i * stride + c, stride, 16, i, there);
        }
}

// Right operand (K, rows) = the transpose of rows of K: their words, transposed.
inline void pack_transposed(const MatrixUnit& unit, bf16* to, const bf16* x, size_t stride, int rows, int K) {
    for (int r = 0; r < rows; r += 16)
        for (int k = 0; k < K; k += 32)
            unit.transpose((uint32_t*)to + (size_t)r * K / 2 + (size_t)k * 8, 16, (const uint32_t*)(x + (size_t)r * stride + k),
                           stride / 2);
}

// Left operand (columns, K) = the transpose of K rows, of which those from `there` on are zero. Pairs of rows become words,
// words are transposed, and each is a pair of neighbours in a row of the result.
inline void lay_transposed(const MatrixUnit& unit, bf16* to, const bf16* x, size_t stride, int columns, int K, int there) {
    constexpr int rows = 32;
    alignas(64) uint32_t pairs[rows / 2][16];
    for (int k = 0; k < K; k += rows)
        for (int c = 0; c < columns; c += 16) {
            if (k + 2 * rows <= there) prefetch_lines(x + (size_t)(k + rows) * stride, stride, c, rows);
            for (int i = 0; i < rows; i += 2)
                pair_rows(pairs[i / 2], x + (size_t)(k + i) * stride + c, stride, 16, k + i, there);
            unit.transpose((uint32_t*)(to + (size_t)c * K + k), (size_t)K / 2, &pairs[0][0], 16);
        }
}

}  // namespace detail
}  // namespace cpu
