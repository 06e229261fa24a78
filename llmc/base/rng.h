// Stateless random numbers: every draw is a function of only (seed, purpose, stream, index), so it does not change on resuming,
// in other parallel layouts or with other thread counts. Philox4x32-10 (Salmon et al., SC'11): ten rounds of multiply and xor
// turn a 128-bit counter under a 64-bit key into 128 random bits. They are the same on every machine: see normal_at.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "types.h"

// The purpose of a draw; part of the counter, so that no two purposes share numbers.
enum class RngPurpose : uint32_t {
    init = 1,
    sampling = 2,
    rounding = 3,
    gradients = 4,
    classifier = 5,
    documents = 6,
    dropout = 7,
    sweep = 8,
    upcycled_dimensions = 9,
    upcycled_weights = 10,
    infilling = 11
};

// The two halves of a 64-bit product. W: a 32-bit word, or a vector of them (cpu/vectors.h).
template <class W>
struct WideProduct {
    W high, low;
    HD WideProduct(uint32_t factor, W x) {
        const uint64_t product = (uint64_t)factor * x;
        high = (W)(product >> 32);
        low = (W)product;
    }
};
// Turns a counter into random bits.
template <class W>
HD inline void philox_rounds(W (&c)[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        const WideProduct<W> a(0xD2511F53u, c[0]), b(0xCD9E8D57u, c[2]);
        c[0] = b.high ^ c[1] ^ key0;
        c[1] = b.low;
        c[2] = a.high ^ c[3] ^ key1;
        c[3] = a.low;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    philox_rounds(c, key[0], key[1]);
    return {c[0], c[1], c[2], c[3]};
}

// index occupies two words of the counter; stream (a tensor, a sample) and purpose one each, so all counters differ.
inline std::array<uint32_t, 4> random_bits(uint64_t seed, RngPurpose purpose, uint32_t stream, uint64_t index) {
    return philox({(uint32_t)index, (uint32_t)(index >> 32), stream, (uint32_t)purpose},
                  {(uint32_t)seed, (uint32_t)(seed >> 32)});
}

// Uniform in [0, 1), a multiple of 2^-53.
inline double uniform_at(uint64_t seed, RngPurpose purpose, uint32_t stream, uint64_t index) {
    const auto r = random_bits(seed, purpose, stream, index);
    return (double)((((uint64_t)r[0] << 32) | r[1]) >> 11) * 0x1p-53;
}

// Standard normal by Box and Muller (1958): sqrt(-2 ln u) cos(theta), u in (0, 1], theta in [-pi, pi). Largest |value|: 6.66.
// Math libraries differ in their last bits, and compilers in whether they fuse a multiply and an add. So ln and cos are written
// as series in double with explicit fused multiply-adds, and no other product feeds a sum: IEEE 754 leaves no choice, and every
// compiler and machine gives the same bits. The series' errors (below 1e-13) are far below the precision of a float.
HD inline float normal_at(uint64_t seed, RngPurpose purpose, uint32_t stream, uint64_t index) {
    uint32_t r[4] = {(uint32_t)index, (uint32_t)(index >> 32), stream, (uint32_t)purpose};
    philox_rounds(r, (uint32_t)seed, (uint32_t)(seed >> 32));

    // ln u = e ln 2 + ln m, m in [0.7, 1.4];  ln m = 2 artanh s = 2 s (1 + s^2/3 + s^4/5 + ...), s = (m - 1) / (m + 1).
    const double u = ((double)r[0] + 1) * 0x1p-32;
    int64_t bits;
    memcpy(&bits, &u, 8);
    const int64_t bits_of_sqrt_half = 0x3FE6A09E667F3BCD, exponent = (bits - bits_of_sqrt_half) >> 52;
    bits -= exponent * (1ll << 52);
    double m;
    memcpy(&m, &bits, 8);
    const double s = (m - 1) / (m + 1), s2 = s * s;
    double artanh = 1.0 / 17;
    for (int k = 15; k >= 1; k -= 2) artanh = fma(artanh, s2, 1.0 / k);
    const double log_u = fma((double)exponent, 0.693147180559945309, 2 * s * artanh);

    // theta = 2 pi turn, turn = integer / 2^32;  cos theta = sin y, y = pi/2 - |theta| in [-pi/2, pi/2]: the Taylor series.
    const int64_t turn = (int32_t)r[1], quarter = 1ll << 30;
    const double y = (double)(quarter - (turn < 0 ? -turn : turn)) * (6.283185307179586477 * 0x1p-32), y2 = y * y;
    double sine = 1;
    for (int k = 19; k >= 3; k -= 2) sine = fma(sine, -y2 / (k * (k - 1)), 1.0);
    return (float)(sqrt(-2 * log_u) * (y * sine));
}

// Random numbers for a tensor's elements, 32 bits each, by the element's index in the whole tensor. Four consecutive elements
// of the whole tensor, the first at a multiple of 4, share a draw.
template <RngPurpose purpose>
struct Draws {
    uint64_t key = 0;
    uint32_t tensor = 0;  // unique for each tensor
    // The elements start at element `first` of the whole tensor. If `cols` is 0, they are consecutive. Else they are a slice of
    // columns: rows of `cols` elements, each part of a row of whole_cols; the first row starts at `first`, and the elements at
    // element `at` of the slice.
    uint64_t first = 0;
    size_t cols = 0, whole_cols = 0, at = 0;

    HD uint64_t number(size_t i) const {
        return cols == 0 ? first + i : first + (at + i) / cols * whole_cols + (at + i) % cols;
    }
    // The number of elements from i on that are consecutive in the whole tensor.
    size_t run(size_t i) const { return cols == 0 ? SIZE_MAX : cols - (at + i) % cols; }
    // True if every eighth element starts two draws that cover exactly it and the next seven.
    bool in_eights() const { return first % 4 == 0 && cols % 8 == 0 && whole_cols % 4 == 0 && at % 8 == 0; }

    // Draws for the elements 4 group to 4 group + 3.
    template <class W>
    HD void draw(W (&words)[4], W group, uint32_t group_high) const {
        const W zero = group & 0u;
        words[0] = group;
        words[1] = zero + group_high;
        words[2] = zero + tensor;
        words[3] = zero + (uint32_t)purpose;
        philox_rounds(words, (uint32_t)key, (uint32_t)(key >> 32));
    }
    HD uint32_t word(size_t i) const {
        const uint64_t n = number(i);
        uint32_t words[4];
        draw(words, (uint32_t)(n / 4), (uint32_t)(n >> 34));
        return n % 2 ? (n % 4 == 3 ? words[3] : words[1]) : (n % 4 == 2 ? words[2] : words[0]);
    }
};

// The initial weights of a block of a tensor: rows from whole_row on, columns from first_col on.
struct InitialWeights {
    uint64_t seed;
    uint32_t tensor;  // TensorSpec::id
    double std;       // 0: all are `constant`
    real constant;
    int live;  // rows of the whole tensor from this index on are padding: zero
    int whole_row, first_col, cols, whole_cols;

    HD real at(size_t row, size_t col) const {
        const uint64_t in_whole = (uint64_t)whole_row + row;
        if (in_whole >= (uint64_t)live) return 0;
        if (std == 0) return constant;
        return (real)(std * normal_at(seed, RngPurpose::init, tensor, in_whole * whole_cols + first_col + col));
    }
};
