// Hyperparameters that carry over from a small model to a larger one (--parametrization). muP, the maximal update
// parametrization (Yang et al., 2022, "Tensor Programs V", arXiv:2203.03466, table 8), keeps the best learning rate while the
// width grows, CompleteP (Dey et al., 2025, arXiv:2505.01618, table 1 with alpha = 1) while width and depth grow. The options
// are those that suit a base model; with m = width / base width and l = layers / base layers (muP: l = 1) a tensor's own are
// the options times
//                                        initial std      learning rate   weight decay   AdamW's epsilon
//   embeddings of tokens, positions      1                1               1              1 / m
//   output layer                         1                1               1              1 / m
//   norms outside blocks                 1                1               -              1 / m
//   matrices of blocks                   1 / sqrt(m)      1 / m           m              1 / (m l)
//   biases, norms, sinks in blocks       1                1               -              1 / (m l)
// and the forward pass has three factors: 1 / m of the logits, 1 / l of what attention and MLP add to the residual stream, and
// of attention's scores sqrt(HS0) / HS instead of 1 / sqrt(HS), where HS0 is the base model's size of a head. The epsilons
// follow the gradients, whose elements shrink as 1 / (m l). The projections into the residual stream begin with 1 / sqrt(2
// layers of the base model) for 1 / sqrt(2 layers). Feed-forward width and heads are taken to grow with the width. At m = l = 1
// and HS = HS0 all factors are 1, and a run has the bits of the standard parametrization.
//
// The three factors are folded into weights, so that nothing is computed for them and a checkpoint is a model like any other: a
// tensor a W computes what W does with a factor a behind it, and trains alike if its initial values and learning rate are a
// times, its weight decay and epsilon 1 / a times those of W, since AdamW's steps have the size of the learning rate, whatever
// that of the gradient (so do tables 3, 8 and 9 of Tensor Programs V differ). Clipping alone sees the difference: gradients are
// 1 / a times as large.
//   1 / m of the logits            is in the gain and bias of the final norm, with an output layer of its own or a tied one
//   1 / l of a branch              is in proj and fc2 with their biases, or in the norms after attention and MLP, if there are
//                                  such
//   sqrt(HS0 / HS) of the scores   is in the norm of the queries, or without one in the queries' rows of qkv; where the options
//                                  or the family fix the scores' factor, HS0 / HS
// An embedding that is multiplied by sqrt(width) (Gemma) is divided by sqrt(m), and a tied one's logits are multiplied by it.
//
// Muon's updates have the same size whatever the gradient's, too; what its learning rate becomes stands in parallel/muon.h.
#pragma once
#include <cmath>

// What a tensor's initial values and optimizer are, times those of the options.
struct TensorFactors {
    double init = 1, lr = 1, weight_decay = 1, eps = 1;

    // Of a tensor that has the factor a folded in.
    TensorFactors folded(double a) const { return {init * a, lr * a, weight_decay / a, eps / a}; }
    bool operator==(const TensorFactors& o) const {
        return init == o.init && lr == o.lr && weight_decay == o.weight_decay && eps == o.eps;
    }
};

// Sizes of a model relative to its base model's; the standard parametrization has ones.
struct Parametrization {
    double width = 1, depth = 1, head_size = 1;

    TensorFactors outside_blocks() const { return {1, 1, 1, 1 / width}; }
    TensorFactors matrix() const { return {1 / std::sqrt(width), 1 / width, width, 1 / (width * depth)}; }
    TensorFactors vector() const { return {1, 1, 1, 1 / (width * depth)}; }
    // What is folded into weights. fixed_scale: the factor of the scores does not depend on the size of a head.
    double logits() const { return 1 / width; }
    double branch() const { return 1 / depth; }
    double queries(bool fixed_scale) const { return fixed_scale ? 1 / head_size : 1 / std::sqrt(head_size); }
};
