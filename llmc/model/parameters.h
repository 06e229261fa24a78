// The parameter table: one row per tensor that a rank holds (model_tensors.h), with its offset in the buffer. Allocation,
// initialization, weight decay, gradient norm, import and export all iterate over it.
//
// All parameters are in one buffer, in groups, each in table order: matrices, to which weight decay applies, then biases and
// norms, to which it does not. So the decayed elements are one range of the buffer, which is split into buckets (shard.h), and
// all norms are one range, whose gradients sequence parallelism sums over ranks. Each tensor starts at a multiple of 64
// elements; gradients, master weights and Adam's moments use the same offsets. The gaps between tensors are zero and stay zero.
// Backward completes the tensors of each group from its end to its front.
#pragma once
#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../base/math.h"
#include "../base/text.h"
#include "../elements.h"
#include "model_tensors.h"

// Elements [begin, end) of the buffer, and the gaps in them, have the same factors.
struct FactorRange {
    size_t begin, end;
    TensorFactors factors;
};

struct ParameterTable {
    Part part;
    std::vector<TensorSpec> rows;
    std::vector<FactorRange> factors;               // of the whole buffer, in order; one range in the standard parametrization
    size_t size = 0;                                // elements of the buffer, including padding
    size_t quantized_bytes = 0;                     // of the buffer of quantized tensors (frozen_table)
    WeightFormat base_format = WeightFormat::none;  // of ModelConfig, in the table of a frozen model
    size_t decayed = 0;                             // elements before this index are matrices, to which weight decay applies
    size_t shared = 0;   // elements from this index on are whole on every tp rank: row-parallel biases and norms
    size_t partial = 0;  // from this index on each tp rank has a partial sum of the gradient (Group::partial)
    size_t trained = 0;  // parameters as in the model's files: each once, without padding

    // The numbers of decayed and other elements are padded to multiples of `multiple`, so that they divide into equal shards.
    ParameterTable(const Part& held, std::vector<TensorSpec> tensors, size_t multiple) : part(held), rows(std::move(tensors)) {
        for (const Group group : all_groups) {
            if (group == Group::partial) partial = size;
            for (TensorSpec& spec : rows) {
                if (spec.group != group) continue;
                spec.offset = spec.quantized() ? quantized_bytes : size;
                if (spec.quantized()) quantized_bytes += coded_bytes(spec);
                else size = round_up(size + spec.size(), 64);
                for (const HfTensor& t : spec.hf) trained += (size_t)t.rows * spec.whole_cols;
            }
            if (group == Group::matrix) decayed = size = round_up(size, multiple);
            if (group == Group::cut) shared = size;
        }
        const bool has_partial = partial < size;
        size = decayed + round_up(size - decayed, multiple);
        if (!has_partial) partial = size;
        block_begins_.assign(part.layers.size() + 1, decayed);
        for (const TensorSpec& spec : rows)
            if (spec.block >= 0 && !spec.vector() && !spec.quantized())
                block_begins_[spec.block] = std::min(block_begins_[spec.block], spec.offset);
        set_factors();
    }
    explicit ParameterTable(const ModelConfig& c, const Part& held, size_t multiple = 64)
        : ParameterTable(held, tensors_of_model(c, held), multiple) {}
    explicit ParameterTable(const ModelConfig& c) : ParameterTable(c, whole_model(c)) {}

    // The start of a block's matrices on this rank; for the block after the last: the end of all matrices.
    size_t begin_of_block(int block) const { return block_begins_[block]; }

private:
    void set_factors() {
        std::vector<FactorRange> of_rows;
        for (const TensorSpec& t : rows)
            for (const RowBlock& b : t.blocks)
                if (!t.quantized())
                    of_rows.push_back({t.offset + (size_t)b.row * (size_t)t.cols, size, t.factors.folded(b.fold)});
        std::sort(of_rows.begin(), of_rows.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
        for (const FactorRange& r : of_rows) {
            if (!factors.empty() && factors.back().factors == r.factors) continue;
            if (!factors.empty()) factors.back().end = r.begin;
            factors.push_back(r);
        }
    }

    std::vector<size_t> block_begins_;
};

// Parameters that process a token: in a mixture of experts only its chosen experts count.
inline int64_t active_parameters(const ModelConfig& c) {
    const int64_t idle = c.mixture.on() ? c.mixture.experts - c.mixture.topk : 0;
    const int64_t width = c.expert_width(), F1 = c.F1((int)width), of_expert = c.C * (F1 + width);
    return (int64_t)ParameterTable(c).trained - idle * c.mixtures() * (of_expert + (c.mlp_bias ? F1 + c.C : 0));
}
// "8, 2 for each token: 12.9B active parameters; softmax over the chosen ones"
inline std::string mixture_in_words(const ModelConfig& c) {
    const MixtureConfig& m = c.mixture;
    const char* const weights = m.sigmoid     ? m.normalize ? "normalized sigmoids" : "sigmoids"
                                : m.normalize ? "softmax over the chosen ones"
                                              : "softmax over all";
    const std::string some = format(" in %d of %d layers, of width %d", c.mixtures(), c.L, c.expert_width());
    const std::string shared = format(" and a%s shared one of width %d", m.shared_gate ? " gated" : "", m.shared);
    std::string text =
        format("%d%s, %d%s for each token: %s active parameters; %s", m.experts, m.dense_layers.empty() ? "" : some.c_str(),
               m.topk, m.shared ? shared.c_str() : "", human_count((double)active_parameters(c)).c_str(), weights);
    if (m.scale != 1) text += format(", times %g", m.scale);
    if (m.groups > 1) text += format("; from the best %d of %d groups", m.group_topk, m.groups);
    return text + (m.bias ? "; balanced by biases" : "");
}
inline nlohmann::ordered_json mixture_in_json(const ModelConfig& c) {
    nlohmann::ordered_json j = {
        {"experts", c.mixture.experts}, {"per_token", c.mixture.topk}, {"active_parameters", active_parameters(c)}};
    if (!c.mixture.dense_layers.empty()) j.update({{"layers", c.mixtures()}, {"expert_width", c.expert_width()}});
    if (c.mixture.shared) j["shared_expert_width"] = c.mixture.shared;
    return j;
}
// "46.7B parameters, 12.9B active"
inline std::string parameters_in_words(const ModelConfig& c) {
    const std::string active = human_count((double)active_parameters(c));
    return human_count((double)ParameterTable(c).trained) + " parameters" + (c.mixture.on() ? ", " + active + " active" : "");
}

// Points p's tensors to memory: each row of the table to place(row).
template <class E, class Place>
void bind_rows(const ModelConfig& c, const ParameterTable& table, Params<E>& p, Place place) {
    size_t row = 0;
    walk_parameters(c, table.part, p, [&](E*& slot, const TensorSpec&) { slot = place(row++); });
    if (c.tied && table.part.first) p.head = p.wte;
}

// n consecutive elements of an HfTensor, from `file` on: element file + k is element place(k) of our part.
struct TensorRun {
    size_t ours, stride, file, n;
    size_t half = 0;  // not 0: they alternate between two runs of ours, `half` elements apart: gate and up
    size_t place(size_t k) const { return half ? ours + k % 2 * half + k / 2 * stride : ours + k * stride; }
};
// Maps a rank's part of a tensor to its place in a file: visit(TensorRun), whose numbers count elements from the start of the
// part and of the HfTensor.
template <class Visit>
void for_each_run(const TensorSpec& spec, const HfTensor& t, Visit visit) {
    const int group = t.groups ? t.rows / t.groups : 0, keys = (group - t.queries) / 2;
    const int paired_rows = t.paired ? t.rows - t.groups * keys : 0;  // not values
    const auto cols = (size_t)spec.cols, whole_cols = (size_t)spec.whole_cols, each = (size_t)t.rows_of_matrix();
    const auto file_row = [&](int whole_row) {
        int r = whole_row - t.row;
        if (r < paired_rows && r % t.paired < t.rotated) {  // here (head, half, element), in the file (head, element, half)
            const int e = r % t.paired, half = t.rotated / 2;
            r += e % half * 2 + e / half - e;
        }
        if (t.groups) {  // here (q, k or v; group; element), in the file (group; q, k or v; element)
            const int after_q = r - t.groups * t.queries, which = after_q / (t.groups * keys),
                      row = after_q % (t.groups * keys);
            r = after_q < 0 ? r / t.queries * group + r % t.queries
                            : row / keys * group + t.queries + (which ^ (int)t.values_first) * keys + row % keys;
        }
        if (t.gate_up) {  // here (matrix, gate or up, element), in the file (matrix, element, gate or up)
            const int F = (int)each / 2, half = r / F % 2;
            r += half + r % F - half * F;
        }
        return (size_t)r;
    };
    if (t.alternating) {  // here (matrix, row, column), in the file (row, column, matrix)
        const size_t n = (size_t)t.alternating, rows = spec.size() / cols / (size_t)spec.experts;
        for (size_t r = 0; r < rows; r++) {
            const size_t at = file_row(spec.whole_row((int)r));
            for (size_t col = 0; col < cols; col++)
                visit(TensorRun{r * cols + col, rows * cols, (at % each * cols + col) * n + at / each, (size_t)spec.experts});
        }
        return;
    }
    for (size_t i = 0; i < spec.blocks.size(); i++) {
        const RowBlock& block = spec.blocks[i];
        const int first = std::max(block.whole_row, t.row), last = std::min(block.whole_row + block.rows, t.row + t.rows);
        if (first >= last) continue;
        const size_t row = (size_t)(block.row + first - block.whole_row), rows = (size_t)(last - first);
        if (t.transposed) {  // a block lies in one matrix; with gate_up, the next block has its rows of up
            const size_t at = file_row(first), matrix = at / each * each * whole_cols;
            const size_t half = t.gate_up ? (size_t)(spec.blocks[++i].row - block.row) * cols : 0;
            for (size_t col = 0; col < cols; col++)
                visit(TensorRun{row * cols + col, cols, matrix + ((size_t)spec.first_col + col) * each + at % each,
                                half ? 2 * rows : rows, half});
        } else if (!t.groups && !t.paired && !t.gate_up && cols == whole_cols) {
            visit(TensorRun{row * cols, 1, file_row(first) * cols, rows * cols});
        } else {
            for (size_t r = 0; r < rows; r++)
                visit(TensorRun{(row + r) * cols, 1, file_row(first + (int)r) * whole_cols + (size_t)spec.first_col, cols});
        }
    }
}

// Calls visit(first, n, rounding) for each part of a tensor in elements [begin, end) of the buffer: n elements from `first` on,
// and the random numbers that round them.
template <class Visit>
void for_each_rounding(const TensorSpec& t, size_t begin, size_t end, uint64_t key, Visit visit) {
    for (const RowBlock& rows : t.blocks) {
        const size_t start = t.offset + (size_t)rows.row * t.cols;
        const size_t first = std::max(begin, start), last = std::min(end, start + (size_t)rows.rows * t.cols);
        if (first >= last) continue;
        Rounding r;
        r.key = key;
        r.tensor = (uint32_t)t.id;
        r.first = (uint64_t)rows.whole_row * t.whole_cols + t.first_col;
        if (t.cols == t.whole_cols) r.first += first - start;
        else {
            r.cols = t.cols;
            r.whole_cols = t.whole_cols;
            r.at = first - start;
        }
        visit(first, last - first, r);
    }
}
// The same for all tensors. Skips the gaps between them, which are zero.
template <class Visit>
void for_each_rounding(const ParameterTable& table, size_t begin, size_t end, uint64_t key, Visit visit) {
    for (const TensorSpec& t : table.rows) for_each_rounding(t, begin, end, key, visit);
}
