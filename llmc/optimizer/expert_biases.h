// The biases of a mixture's experts: balancing without a loss (Wang et al., 2024, "Auxiliary-Loss-Free Load Balancing",
// arXiv 2408.15664; DeepSeek-V3). A bias is added to the expert's score when experts are chosen, and has no part in weights or
// gradients. After each update of the parameters
//   bias_e += rate sign(mean load - load_e)
// where loads are the rows of the global batch that chose each expert of the layer, dropped or not. A step without an update
// leaves the biases as they are. They are fp32 numbers next to the parameters, the same on every rank: neither weight decay nor
// the average of the weights changes them.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "../model/arena.h"
#include "../model/mesh.h"
#include "../model/model_config.h"
#include "../ops.h"

class ExpertBiases {
public:
    void plan(Arena& arena, const ModelConfig& c, const Part& part) {
        if (!c.mixture.bias) return;
        E_ = (size_t)c.mixture.experts;
        layers_ = part.layers;
        values_.assign((size_t)c.L * E_, 0);
        arena.add("parameters", &here_, layers_.size() * E_);
    }
    // The biases of the experts of this rank's block; null: the model has none.
    const real* of_block(int block) const { return here_ ? here_ + (size_t)block * E_ : nullptr; }
    const std::vector<real>& values() const { return values_; }  // (L, E) of all layers
    void set(be::Ctx& ctx, std::vector<real> values) {
        values_ = std::move(values);
        for (size_t i = 0; i < layers_.size() && E_ > 0; i++)
            be::upload(ctx, here_ + i * E_, &values_[(size_t)layers_[i] * E_], E_ * sizeof(real));
    }
    // sums: (L, RouterSums::size(E)) of the global batch.
    void move(be::Ctx& ctx, const std::vector<double>& sums, double rate) {
        std::vector<real> moved = values_;
        for (size_t i = 0; i < moved.size(); i++) {
            const double* const rows = &sums[i / E_ * RouterSums::size((int)E_) + RouterSums::rows];
            double all = 0;  // whole numbers, so that an expert with exactly the mean's rows keeps its bias
            for (size_t e = 0; e < E_; e++) all += rows[e];
            const double missing = all - (double)E_ * rows[i % E_];
            moved[i] += (real)(missing > 0 ? rate : missing < 0 ? -rate : 0);
        }
        set(ctx, std::move(moved));
    }

private:
    size_t E_ = 0;
    std::vector<int> layers_;  // of this rank's blocks
    std::vector<real> values_;
    real* here_ = nullptr;  // (blocks, E)
};
