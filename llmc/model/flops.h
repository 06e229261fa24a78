// Floating-point operations of training, for throughput in FLOP/s and for planning. A multiply-add counts as two.
//
// Model FLOPs (of the formulas, independent of the implementation) per token, forward and backward:
//   6 * P_matmul  +  12 * L * NH * HS * T        every token attends to all T
//   6 * P_matmul  +   6 * L * NH * HS * T        causal: half of the scores are computed
// P_matmul: the weights that multiply a vector per token: QKV, projection, fc1, fc2 of every layer and the LM head (even where
// it is tied to the embedding; an embedding lookup multiplies nothing). 6 = 2 forward + 2 for the input's gradient + 2 for the
// weight's. Attention: Q K^T and P V are 2 T HS each per head, times 3. Norms, activations and softmax are not counted. In a
// layer with a sliding window of W < T keys, W replaces T or, where half of the scores are computed, W (2 - W / T). In a
// mixture of experts, P_matmul has the router and K experts.
//   The full count is exactly Megatron-LM v0.6's (LLM-jp's logs),
//     12 B s L h^2 ((1 + k/a + s/h) (d a / h) + (f/h) (3/2 if SwiGLU) + V / (2 L h)),
//   and 72 B s L h^2 (1 + s/(6h) + V/(12 L h)) of arXiv:2205.05198 where f = 4h.
// Hardware FLOPs with full recomputation add each layer's forward pass once more (but not the head):
//   96 B s L h^2 (1 + s/(6h) + V/(16 L h)) of MT-NLG and BLOOM, arXiv:2104.04473.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "model_config.h"

// Layers, width, query and key/value heads, head size, feed-forward width, computed rows of the LM head (padded), sequence
// length.
struct FlopSizes {
    int64_t L, C, NH, NKV, HS, F, V, T;
    bool gated;            // fc1 has two halves of F rows, gate and up
    int64_t window = 0;    // keys that a query sees in layers with a sliding window
    double windowed = 0;   // the fraction of layers with a window
    int64_t mixtures = 0;  // layers with a mixture of experts; the others have a dense MLP of width F
    int64_t experts = 0, expert_F = 0;
    int64_t topk = 0;          // experts that process a token
    int64_t shared = 0;        // width of an expert that processes all tokens
    bool shared_gate = false;  // with a vector of C weights

    // Weights of an MLP.
    double fc1(int64_t width) const { return (double)C * (double)width * (gated ? 2 : 1); }
    double mlp(int64_t width) const { return fc1(width) + (double)width * (double)C; }
    double router() const { return (double)(experts + shared_gate) * (double)C; }
    // Weights of a mixture that a row multiplies.
    double mixture() const { return router() + (double)topk * mlp(expert_F) + mlp(shared); }
    // The sum over all layers.
    double over_layers(double dense, double mixture) const {
        return (double)(L - mixtures) * dense + (double)mixtures * mixture;
    }
};

enum class AttentionCount { full, causal };

// Products with weights in all layers, per token, forward. In double, because large models and batches exceed 2^63.
inline double layer_products_flops(const FlopSizes& s) {
    const double L = s.L, C = s.C, NH = s.NH, NKV = s.NKV, HS = s.HS;
    const double qkv = C * (NH + 2 * NKV) * HS, proj = NH * HS * C;
    return 2 * (L * (qkv + proj) + s.over_layers(s.mlp(s.F), s.mixture()));
}

// FLOPs of fc1 in all layers, the product that --recompute-granularity mlp recomputes.
inline double fc1_flops(const FlopSizes& s) {
    return 2 * s.over_layers(s.fc1(s.F), (double)s.topk * s.fc1(s.expert_F) + s.fc1(s.shared));
}

// Weights in all layers that `rows` tokens multiply: with experts chosen at random, only some of them for a few rows.
inline double layer_weights(const FlopSizes& s, double rows) {
    const double active = layer_products_flops(s) / 2;
    if (!s.mixtures || !s.experts) return active;
    const double share = (double)s.topk / (double)s.experts;
    const double used = (double)s.experts * (1 - std::pow(1 - share, rows));
    return active + (double)s.mixtures * (used - (double)s.topk) * s.mlp(s.expert_F);
}

// The same with attention.
inline double layers_forward_flops(const FlopSizes& s, AttentionCount attention) {
    const double L = s.L, NH = s.NH, HS = s.HS, T = s.T;
    const double W = s.windowed > 0 ? std::min<double>(s.window, T) : T;
    const auto of = [&](double all, double causal) { return attention == AttentionCount::causal ? causal : all; };
    // Average keys per query, up to the diagonal.
    const double keys = (1 - s.windowed) * of(T, T / 2) + s.windowed * of(W, W - W * W / (2 * T));
    return layer_products_flops(s) + L * 4 * NH * HS * keys;
}

inline double head_forward_flops(const FlopSizes& s) { return 2.0 * s.C * s.V; }

// Model FLOPs per token, forward and backward.
inline double model_flops_per_token(const FlopSizes& s, AttentionCount attention) {
    return 3 * (layers_forward_flops(s, attention) + head_forward_flops(s));
}

// FLOPs per token when backward recomputes every layer's forward pass.
inline double full_recompute_flops_per_token(const FlopSizes& s, AttentionCount attention) {
    return model_flops_per_token(s, attention) + layers_forward_flops(s, attention);
}

inline FlopSizes flop_sizes(const ModelConfig& c, int T) {
    int windowed = 0;
    for (int layer = 0; layer < c.L; layer++) windowed += !c.sees_all(layer);
    FlopSizes s = {c.L, c.C, c.NH, c.NKV, c.HS(), c.F, c.Vp, T, gated(c.activation), c.window, (double)windowed / c.L};
    if (c.mixture.on()) {
        s.mixtures = c.mixtures();
        s.experts = c.mixture.experts;
        s.topk = c.mixture.topk;
        s.expert_F = c.expert_width();
        s.shared = c.mixture.shared;
        s.shared_gate = c.mixture.shared_gate;
    }
    return s;
}
// One layer, with a mixture or a dense MLP, and windows as in the average layer.
inline FlopSizes flop_sizes_of_layer(const ModelConfig& c, int T, bool mixture) {
    FlopSizes s = flop_sizes(c, T);
    s.L = 1;
    s.mixtures = mixture;
    return s;
}
// Relative costs of the layers, forward.
inline std::vector<double> costs_of_layers(const ModelConfig& c, int T) {
    std::vector<double> costs;
    for (int layer = 0; layer < c.L; layer++)
        costs.push_back(layers_forward_flops(flop_sizes_of_layer(c, T, c.has_mixture(layer)), AttentionCount::causal));
    return costs;
}
// FLOPs of training per token, causal attention counted as half. Weights frozen under adapters (adapters.h) have no gradient;
// the adapters' own products, some thousandths, are not counted, nor are virtual tokens, which have no targets.
inline double model_flops_per_token(const ModelConfig& c, int T) {
    const FlopSizes s = flop_sizes(c, T);
    const double all = model_flops_per_token(s, AttentionCount::causal);
    return c.adapted() ? all - layer_products_flops(s) - head_forward_flops(s) : all;
}

// FLOPs of an update by Muon (optimizer/muon.h): all matrices of a layer (with a mixture, if any layer has one), and the most
// expensive one.
struct MuonFlops {
    double layer = 0, largest = 0;
};
inline MuonFlops muon_flops(const FlopSizes& s, int newton_schulz_steps, bool heads) {
    MuonFlops flops;
    const auto add = [&](double count, double rows, double cols) {
        const double k = std::min(rows, cols);
        const double one = newton_schulz_steps * (4 * rows * cols * k + 2 * k * k * k);
        flops.layer += count * one;
        flops.largest = std::max(flops.largest, one);
    };
    const double C = (double)s.C, F = (double)(s.mixtures ? s.expert_F : s.F), NH = (double)s.NH, NKV = (double)s.NKV,
                 HS = (double)s.HS;
    add(heads ? NH : 1, heads ? HS : NH * HS, C);
    add(heads ? 2 * NKV : 2, heads ? HS : NKV * HS, C);
    add(1, C, NH * HS);
    const double mlps = s.mixtures ? (double)s.experts : 1;
    add(mlps * (s.gated ? 2 : 1), F, C);
    add(mlps, C, F);
    if (!s.mixtures) return flops;
    add(1, (double)s.experts, C);
    add(s.gated ? 2 : 1, (double)s.shared, C);
    add(1, C, (double)s.shared);
    add(s.shared_gate, 1, C);
    return flops;
}
