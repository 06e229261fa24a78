// Soft caps and dropout on the accumulators of tensor cores, for attention_mma.cuh and attention_hopper.cuh. The formulas are
// in llmc/cpu/attention.h. Kernels have a version with them (template parameter capped_or_dropped) and one without.
//
// Layout: of a warp's 16 rows of N columns, lane (g, q) = (lane / 4, lane % 4) holds at 4i + 2r + e row g + 8r and column
// 8i + 2q + e.
//
// Cap: tanh x = 1 - 2 / (1 + e^2x) by two operations of the special function unit. Its absolute error is at most 11 x 2^-24, a
// capped score's cap times as much.
//
// Dropout: whether a weight is kept is a function of its index ((sample heads + head) T + t) T + j (dropout.h), the same in
// every kernel and on the CPU. Four keys share a draw of Philox, which takes about 90 instructions. So lanes divide the draws
// of a tile, and exchange their results as bits: a draw is made once per tile or, if T is not a multiple of 4 so that tiles
// start within a draw, at most 5 are made for 4.
#pragma once
#include "attention_order.cuh"
#include "device.cuh"

namespace gpu {

__device__ __forceinline__ float reciprocal_approx(float x) {
#ifdef __CUDACC__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1 / x;
#endif
}
__device__ __forceinline__ float tanh_approx(float x) {
    return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(x * (2 * log2_e))), 1.0f);
}

// Factors that the host computes: kernel parameters need no registers. Scores are in units of log2(e).
struct CapAndDropout {
    bool capped;
    float argument;  // of tanh, per product
    float scale;     // of tanh, or without a cap of the product
    float square;    // 1 + square tanh^2 is the cap's derivative; a factor, as a branch per score would split the loop
    float keep;      // of weights that are kept
    explicit CapAndDropout(const AttentionShape& a)
        : capped(a.softcap > 0),
          argument(capped ? a.scale / a.softcap : 0.0f),
          scale((capped ? a.softcap : a.scale) * log2_e),
          square(capped ? -1.0f : 0.0f),
          keep(a.dropout.factor()) {
        CHECK(a.dropout.draws.cols == 0, "the weights of a head are consecutive");
    }
};

// n products become their scores' tanh, if there is a cap.
template <int n>
__device__ __forceinline__ void tanh_of_scores(float* s, const CapAndDropout& cap) {
    if (cap.capped)
#pragma unroll
        for (int i = 0; i < n; i++) s[i] = tanh_approx(s[i] * cap.argument);
}
// The same, and the capped scores.
template <int n>
__device__ __forceinline__ void cap_scores(float* s, const CapAndDropout& cap) {
#pragma unroll
    for (int i = 0; i < n; i++) s[i] = cap.scale * tanh_approx(s[i] * cap.argument);
}

// Which weights of a warp's tile of N columns are kept, and the factor of kept weights.
template <int N, bool keys_are_rows>
struct KeptWeights {
    uint32_t word[2];

    // Queries are rows: t0 is the first, j0 the first of N keys. Keys are rows: j0 is the first, t0 the first of N queries.
    __device__ __forceinline__ KeptWeights(const AttentionShape& a, int b, int h, int t0, int j0) {
        if (a.dropout.rate == 0) {
            word[0] = word[1] = ~0u;
            return;
        }
        word[0] = word[1] = 0;
        if constexpr (keys_are_rows) draw_columns(a, b, h, t0, j0);
        else draw_rows(a, b, h, t0, j0);
    }
    // True if the weight of a lane's number 4i + 2r + e is kept.
    __device__ __forceinline__ bool operator()(int i, int r, int e) const {
        return keys_are_rows ? word[i / 8] >> (8 * (r + 2 * e) + i % 8) & 1 : word[r] >> (8 * (i % 4) + 2 * (i / 4) + e) & 1;
    }

private:
    // A bit for each of n keys from j on that row t sees, the first in bit 0.
    template <int n>
    static __device__ __forceinline__ uint32_t run(const AttentionShape& a, int b, int h, int t, int j) {
        const uint64_t first = a.dropout.draws.first + a.weight(b, h, t, j);
        const unsigned threshold = a.dropout.threshold();
        const int groups = n / 4 + (a.weight_rows() % 4 != 0 || a.dropout.draws.first % 4 != 0);  // the same for all lanes
        uint64_t bits = 0;
#pragma unroll 1
        for (int k = 0; k < groups; k++) {
            const uint64_t group = first / 4 + k;
            uint32_t words[4];
            a.dropout.draws.draw(words, (uint32_t)group, (uint32_t)(group >> 32));
            uint32_t kept = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) kept |= (uint32_t)(words[i] >= threshold) << i;
            bits |= (uint64_t)kept << (4 * k);
        }
        return (uint32_t)(bits >> first % 4) & (n == 32 ? ~0u : (1u << n % 32) - 1);
    }

    // The four lanes with a pair of rows divide them into pieces.
    __device__ __forceinline__ void draw_rows(const AttentionShape& a, int b, int h, int t0, int j0) {
        constexpr int size = N >= 64 ? 32 : N / 2, of_row = N / size, mine = of_row / 2;
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        uint32_t pieces[mine];
#pragma unroll
        for (int k = 0; k < mine; k++) {
            const int piece = 4 * k + q;
            pieces[k] = run<size>(a, b, h, t0 + g + piece / of_row * 8, j0 + piece % of_row * size);
        }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int c = 0; c < of_row; c++) {
                const int piece = r * of_row + c, i = c * size / 8;
                const uint32_t bits = __shfl_sync(all_lanes, pieces[piece / 4], 4 * g + piece % 4);
                word[r] |= (bits >> (2 * q) & 0x03030303u) << (8 * (i % 4) + 2 * (i / 4));
            }
    }

    // The eight lanes with the same columns divide these: one or more pairs, or one column, of 16 keys each.
    __device__ __forceinline__ void draw_columns(const AttentionShape& a, int b, int h, int t0, int j0) {
        constexpr int pairs = N / 64;
        const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        uint32_t pieces[pairs ? pairs : 1];
        const auto column = [&](int i, int e) { return run<16>(a, b, h, t0 + 8 * i + 2 * q + e, j0); };
#pragma unroll
        for (int k = 0; k < pairs; k++) pieces[k] = column(g + 8 * k, 0) | column(g + 8 * k, 1) << 16;
        if (pairs == 0) pieces[0] = column(g % (N / 4) / 2, g % 2);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint32_t bits = pairs ? __shfl_sync(all_lanes, pieces[i / 8], 4 * (i % 8) + q)
                                        : __shfl_sync(all_lanes, pieces[0], 4 * (2 * i) + q) |
                                              __shfl_sync(all_lanes, pieces[0], 4 * (2 * i + 1) + q) << 16;
            word[i / 8] |= (bits >> g & 0x01010101u) << (i % 8);
        }
    }
};

// For kernels of models without dropout.
struct AllKept {
    __device__ AllKept(const AttentionShape&, int, int, int, int) {}
    __device__ bool operator()(int, int, int) const { return true; }
};
template <int N, bool keys_are_rows, bool capped_or_dropped>
using Kept = std::conditional_t<capped_or_dropped, KeptWeights<N, keys_are_rows>, AllKept>;

}  // namespace gpu
