// Drop-Upcycling (Nakamura et al., 2025, arXiv 2502.19261): a mixture whose experts are copies of a dense model's MLP learns
// slowly, because the copies remain similar. So a fraction of each expert's F intermediate dimensions is drawn, and in each of
// its three matrices the rows (gate, up) or columns (down) of these dimensions are replaced by random numbers, which are
// normally distributed, with the mean and the standard deviation of the replaced numbers of this matrix.
// Everything is a function of the seed, the tensor and the place in it: equal in every layout.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "../base/rng.h"
#include "../cpu/parallel.h"
#include "../model/parameters.h"
#include "checkpoint.h"

namespace detail {

// The sums of an MLP's numbers, and of their squares, by intermediate dimension.
struct SumsByDimension {
    std::vector<double> sum, squares;  // (F)
    size_t each = 0;                   // numbers of a dimension

    // x: number i of dimension f is x[f * next_dimension + i * next].
    SumsByDimension(const float* x, int F, size_t next_dimension, size_t n, size_t next)
        : sum((size_t)F), squares((size_t)F), each(n) {
        cpu::parallel_for(F, [&](int f) {
            for (size_t i = 0; i < n; i++) {
                const double number = x[(size_t)f * next_dimension + i * next];
                sum[(size_t)f] += number;
                squares[(size_t)f] += number * number;
            }
        });
    }
};
struct NormalLike {
    double mean = 0, std = 0;
    NormalLike() = default;
    NormalLike(const SumsByDimension& sums, const std::vector<int>& dimensions) {
        double sum = 0, squares = 0;
        for (const int f : dimensions) {
            sum += sums.sum[(size_t)f];
            squares += sums.squares[(size_t)f];
        }
        const double n = (double)dimensions.size() * (double)sums.each;
        mean = sum / n;
        std = std::sqrt(std::max(0.0, squares - n * mean * mean) / std::max(1.0, n - 1));
    }
};

// `n` of F numbers, in their order, for an expert: the start of a shuffled list (Fisher and Yates).
inline std::vector<int> draw_dimensions(int F, int n, uint64_t seed, uint32_t tensor, int expert) {
    std::vector<int> all((size_t)F);
    std::iota(all.begin(), all.end(), 0);
    for (int i = 0; i < n; i++) {
        const double u =
            uniform_at(seed, RngPurpose::upcycled_dimensions, tensor, (uint64_t)expert * (uint64_t)F + (uint64_t)i);
        const int other = i + std::min(F - i - 1, (int)(u * (F - i)));
        std::swap(all[(size_t)i], all[(size_t)other]);
    }
    all.resize((size_t)n);
    std::sort(all.begin(), all.end());
    return all;
}

// Replaces a rank's elements of one of the two tensors. kind(whole row): the index in `like` of the matrix that has this row of
// an expert; dropped(expert, row of an expert, whole column).
template <class E, class Kind, class Dropped>
void redraw(const TensorSpec& t, int rows_of_expert, E* weights, uint64_t seed,
            const std::vector<std::vector<NormalLike>>& like, Kind kind, Dropped dropped) {
    for (const RowBlock& block : t.blocks)
        cpu::parallel_for(block.rows, [&](int r) {
            const int whole_row = block.whole_row + r, expert = whole_row / rows_of_expert, row = whole_row % rows_of_expert;
            const NormalLike& normal = like[(size_t)expert][(size_t)kind(row)];
            E* const to = weights + t.offset + (size_t)(block.row + r) * (size_t)t.cols;
            for (int c = 0; c < t.cols; c++) {
                const int column = t.first_col + c;
                const uint64_t place = (uint64_t)whole_row * (uint64_t)t.whole_cols + (uint64_t)column;
                if (!dropped(expert, row, column)) continue;
                const double z = normal_at(seed, RngPurpose::upcycled_weights, (uint32_t)t.id, place);
                to[c] = (E)(float)std::fma(normal.std, z, normal.mean);
            }
        });
}

}  // namespace detail

// Redraws a fraction of the dimensions of all experts on this rank, which are copies of the MLPs of the dense model in `dir`.
template <class E>
void redraw_experts(const std::string& dir, const ModelConfig& c, const ParameterTable& table, E* weights, double ratio,
                    uint64_t seed) {
    using namespace detail;
    const ModelConfig dense = as_stored(dir, c);
    const TensorSource source(dir, dense);
    const int F = c.expert_width(), C = c.C, rows = c.F1(F), gates = rows / F, dropped = (int)(ratio * F);
    if (dropped == 0) return;
    for (size_t block = 0; block < table.part.layers.size(); block++) {
        Part part;
        part.layers.assign(1, table.part.layers[block]);
        if (!c.has_mixture(part.layers[0])) continue;
        part.first = part.last = false;
        std::vector<SumsByDimension> sums;  // gate, up, down
        for (const TensorSpec& w : ParameterTable(dense, part).rows) {
            const bool fc1 = ends_with(w.name, ".fc1_w");
            if (!fc1 && !ends_with(w.name, ".fc2_w")) continue;
            std::vector<float> x(w.size());
            source.read(w, x.data());
            for (int i = 0; i < gates && fc1; i++) sums.emplace_back(&x[(size_t)i * F * C], F, (size_t)C, (size_t)C, (size_t)1);
            if (!fc1) sums.emplace_back(x.data(), F, (size_t)1, (size_t)C, (size_t)F);
        }
        const auto of_block = [&](const char* end) {
            return *std::find_if(table.rows.begin(), table.rows.end(),
                                 [&](const TensorSpec& t) { return t.block == (int)block && ends_with(t.name, end); });
        };
        const TensorSpec fc1 = of_block(".fc1_w"), fc2 = of_block(".fc2_w");
        std::vector<std::vector<NormalLike>> like;
        std::vector<std::vector<bool>> drops;
        for (int e = 0; e < c.mixture.experts; e++) {
            const std::vector<int> dimensions = draw_dimensions(F, dropped, seed, (uint32_t)fc1.id, e);
            like.emplace_back();
            for (const SumsByDimension& s : sums) like.back().emplace_back(s, dimensions);
            drops.emplace_back((size_t)F);
            for (const int f : dimensions) drops.back()[(size_t)f] = true;
        }
        redraw(
            fc1, rows, weights, seed, like, [&](int row) { return row / F; },
            [&](int e, int row, int) { return drops[(size_t)e][(size_t)(row % F)]; });
        redraw(
            fc2, C, weights, seed, like, [&](int) { return gates; },
            [&](int e, int, int column) { return drops[(size_t)e][(size_t)column]; });
    }
}
