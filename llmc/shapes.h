// Arguments of ops that belong together, as plain structs: sizes and tensors. Shapes stand at the right, row-major, slowest
// first; a pointer marked `or null` may be null. All memory is the backend's.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "fp8.h"

// Rows [v0, v0 + V) of a vocabulary, in matrices of Vp rows or columns: those after the first V are padding. An unsharded
// vocabulary has v0 = 0.
struct VocabularyShard {
    int v0, V, Vp;
};

// Parameters of LayerNorm or RMSNorm over rows of C numbers.
struct NormParams {
    const floatX* weight;  // (C)
    const floatX* bias;    // (C); null for RMSNorm
    int C;
    real eps;
};
struct NormGrads {
    real* weight;  // (C)
    real* bias;    // (C); null for RMSNorm
};
struct NormStatistics {
    real* mean;  // (N); null for RMSNorm
    real* rstd;  // (N)
};

// An operand of an FP8 product: codes represent code * inverse_scale.
struct Fp8Matrix {
    const uint8_t* codes;
    const float* inverse_scale;  // one number
    Fp8 format = Fp8::e4m3;
};

// Sizes of attention, and the layout of heads in the fused projection qkv (B, T, NH + 2*NKV, HS).
struct AttentionShape {
    int B, T, NH, NKV, HS;
    real scale = 0;  // scale of scores; not used by rope

    HD int N() const { return B * T; }
    HD int group() const { return NH / NKV; }
    HD size_t row() const { return (size_t)(NH + 2 * NKV) * HS; }
    HD size_t query(int b, int t, int h) const { return ((size_t)b * T + t) * row() + (size_t)h * HS; }
    HD size_t key(int b, int t, int g) const { return query(b, t, NH + g); }
    HD size_t value(int b, int t, int g) const { return query(b, t, NH + NKV + g); }
    HD size_t output_row() const { return (size_t)NH * HS; }
    HD size_t output(int b, int t, int h) const { return ((size_t)b * T + t) * output_row() + (size_t)h * HS; }
    HD size_t statistic(int b, int t, int h) const { return ((size_t)b * NH + h) * T + t; }
};
// Which keys a query sees, and what is added to its scores. Default: all keys up to its own position, and nothing.
struct AttentionMask {
    const int* doc_start = nullptr;  // (B, T) or null: the first key that a row sees; does not decrease within a sequence
    const real* slopes = nullptr;    // (NH) or null: ALiBi
};
// The results of the forward pass that the backward pass reads.
struct AttentionActs {
    const floatX* qkv;  // (B, T, NH + 2*NKV, HS)
    const floatX* out;  // (B, T, NH, HS)
    const real* lse;    // (B, NH, T)
};
// Keys and values of the tokens so far, with capacity P.
struct AttentionCache {
    floatX* keys;    // (B, P, NKV, HS)
    floatX* values;  // (B, P, NKV, HS)
    int P;
};
// Rotary positions: the position of each row, and (cos, sin) of position * base^(-2j/HS).
struct Rope {
    const int* positions;  // (N)
    const real* cos_sin;   // (P, HS/2, 2)
};

// Losses per row; lse is log Z.
struct RowLosses {
    real* loss;   // (N)
    real* zloss;  // (N)
    real* lse;    // (N)
};
struct LossConstants {
    real loss_scale;  // factor of the gradients
    real z_coef;
    bool write_gradient;
};

// Sums over the unmasked targets of one or more micro-batches, and over the squares of their gradients.
struct LossSums {
    double ce = 0, z = 0;                 // cross-entropy, z-loss
    double lse = 0, lse_max = -INFINITY;  // log Z: sum and maximum
    int64_t n = 0;                        // unmasked targets
    double squares = 0;
};

// The constants of a step of AdamW; `step` counts from 1.
struct AdamW {
    real lr, beta1, beta2, eps, weight_decay;
    real grad_scale;  // factor of the gradient
    int64_t step;
};
