// Hyperparameters that transfer from a small model to a larger one (--parametrization). muP, the maximal update parametrization
// (Yang et al., 2022, "Tensor Programs V", arXiv:2203.03466, table 8), keeps the best learning rate while the width grows,
// CompleteP (Dey et al., 2025, arXiv:2505.01618, table 1 with alpha = 1) while width and depth grow. The options are tuned for
// a base model; with m = width / base width and l = layers / base layers (muP: l = 1) a tensor uses the options times
//                                        initial std      learning rate   weight decay   AdamW's epsilon
//   embeddings of tokens, positions      1                1               1              1 / m
//   output layer                         1                1               1              1 / m
//   norms outside blocks                 1                1               -              1 / m
//   matrices of blocks                   1 / sqrt(m)      1 / m           m              1 / (m l)
//   biases, norms, sinks in blocks       1                1               -              1 / (m l)
// and the forward pass has three factors: 1 / m on the logits, 1 / l on the outputs of attention and MLP, and sqrt(HS0) / HS
// instead of 1 / sqrt(HS) on attention's scores, where HS0 is the base model's size of a head. The epsilons follow the
// gradients, whose elements shrink as 1 / (m l). The projections into the residual stream start with 1 / sqrt(2 layers of the
// base model) instead of 1 / sqrt(2 layers). Feed-forward width and heads are assumed to grow with the width. At m = l =
// 1 and HS = HS0 all factors are 1, and a run has the bits of the standard parametrization.
//
// The three factors are folded into weights, so that they cost nothing and a checkpoint is an ordinary model: a tensor a W
// computes the same as W followed by a factor a, and trains alike if its initial values and learning rate are a times, its
// weight decay and epsilon 1 / a times those for W, since AdamW's step size is the learning rate, whatever the gradient's
// (tables 3, 8 and 9 of Tensor Programs V differ in the same way). Only clipping sees the difference: gradients are
// 1 / a times as large.
//   1 / m of the logits            is in the gain and bias of the final norm, with an output layer of its own or a tied one
//   1 / l of a branch              is in proj and fc2 with their biases, or in the norms after attention and MLP, if they exist
//   sqrt(HS0 / HS) of the scores   is in the norm of the queries, or without one in the queries' rows of qkv; where the options
//                                  or the family fix the scores' factor, HS0 / HS
// An embedding that is multiplied by sqrt(width) (Gemma) is divided by sqrt(m), and a tied one's logits are multiplied by it.
//
// Muon's update size does not depend on the gradient's either; optimizer/muon.h has its learning rate.
#pragma once
#include <cmath>

// Factors of a tensor's initial standard deviation and optimizer options.
struct TensorFactors {
    double init = 1, lr = 1, weight_decay = 1, eps = 1;

    // The factors of a tensor that has a factor a folded in.
    TensorFactors folded(double a) const { return {init * a, lr * a, weight_decay / a, eps / a}; }
    bool operator==(const TensorFactors& o) const {
        return init == o.init && lr == o.lr && weight_decay == o.weight_decay && eps == o.eps;
    }
};

// Sizes of a model relative to its base model's; all 1 in the standard parametrization.
struct Parametrization {
    double width = 1, depth = 1, head_size = 1;

    TensorFactors outside_blocks() const { return {1, 1, 1, 1 / width}; }
    TensorFactors matrix() const { return {1 / std::sqrt(width), 1 / width, width, 1 / (width * depth)}; }
    TensorFactors vector() const { return {1, 1, 1, 1 / (width * depth)}; }
    // Factors folded into weights. fixed_scale: the factor of the scores does not depend on the size of a head.
    double logits() const { return 1 / width; }
    double branch() const { return 1 / depth; }
    double queries(bool fixed_scale) const { return fixed_scale ? 1 / head_size : 1 / std::sqrt(head_size); }
};
