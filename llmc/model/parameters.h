// The parameter table: one row per tensor that a rank holds, with its shape, initialisation, weight decay, its position in the
// whole tensor, and its names and layouts in Hugging Face files. Allocation, initialisation, weight decay, gradient norm,
// import and export all iterate over it.
//
// All parameters are in one buffer, in groups, each in table order: matrices, to which weight decay applies, then biases and
// norms, to which it does not. So the decayed elements are one range of the buffer, which is split into buckets (shard.h), and
// all norms are one range, whose gradients sequence parallelism sums over ranks. Each tensor starts at a multiple of 64
// elements; gradients, master weights and Adam's moments use the same offsets. The gaps between tensors are zero and stay zero.
// Backward completes the tensors of each group from its end to its front.
//
// Physical layouts: every linear weight is (out, in). The fused projection has rows [q heads | k heads | v heads], fc1 of a
// SwiGLU model [gate | up]; with tensor parallelism these are a rank's own heads and columns. Files split and permute the rows
// of the whole tensor, as HfTensor describes.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "../base/enum_table.h"
#include "../base/math.h"
#include "../elements.h"
#include "families.h"
#include "mesh.h"

enum class Init {
    zeros,
    ones,
    gain_less_one,    // zeros: the weights of norms that multiply by 1 + weight
    normal,           // N(0, std)
    scaled_normal,    // N(0, std / sqrt(2 L)): the two projections that write into the residual stream
    kaiming,          // uniform within 1 / sqrt(columns): the matrices A of low-rank adapters
    standard_normal,  // N(0, 1): virtual tokens
};

// A tensor of a Hugging Face file: rows [row, row + rows) of the whole tensor here.
struct HfTensor {
    std::string name;
    int row = 0, rows = 0;
    bool transposed = false;  // GPT-2's Conv1D stores (in, out)
    int interleaved = 0;  // BLOOM, GPT-NeoX: head size HS, as file rows are [q k v] per head, not [q heads | k heads | v heads]
};

// Rows [row, row + rows) of a rank's part are rows [whole_row, ...) of the whole tensor.
struct RowBlock {
    int row, whole_row, rows;
    double fold = 1;  // a factor that is folded into these rows (parametrization.h)
};

// The groups of the buffer, in their order: matrices; vectors that tp shards (cut); and, whole on every tp rank, biases of proj
// and fc2 (whole), norms (norm), and norms of every query or key head (head_norm), where each rank has the gradient from its
// own heads.
enum class Group { matrix, cut, whole, norm, head_norm };
constexpr Group all_groups[] = {Group::matrix, Group::cut, Group::whole, Group::norm, Group::head_norm};

// The four matrices of a block.
enum class Matrix { qkv, proj, fc1, fc2 };
constexpr Matrix all_matrices[] = {Matrix::qkv, Matrix::proj, Matrix::fc1, Matrix::fc2};
constexpr const char* matrix_names[] = {"qkv", "proj", "fc1", "fc2"};
static_assert(std::size(matrix_names) == number_of_values<Matrix>());

struct TensorSpec {
    std::string name;  // "blocks.3.qkv_w"
    int rows = 0, cols = 1;
    Group group = Group::matrix;
    Init init = Init::zeros;
    std::vector<HfTensor> hf;
    TensorFactors factors = {};  // from the parametrization, excluding factors folded into rows
    int id = 0;                  // index in the table of a rank that holds all tensors
    static constexpr int embedding = -1, head = -2;
    int block = embedding;  // index among this rank's blocks, or one of the two above; determines when backward computes it

    // Shape of the whole tensor, and the position of this part in it. With one rank: all of it.
    int whole_rows = 0, whole_cols = 1, first_col = 0;
    std::vector<RowBlock> blocks = {};
    bool replicated = false;   // identical on every tp rank
    bool partial_sum = false;  // each tp rank computes a partial sum of its gradient
    bool copy = false;         // the last stage's copy of a tied embedding: neither counted nor stored
    // The last `replicated_rows` rows (keys, values) are held by `replicas` consecutive tp ranks, whose gradients are summed.
    int replicated_rows = 0, replicas = 1;

    size_t offset = 0;  // elements from the start of the buffer
    size_t size() const { return (size_t)rows * cols; }
    bool vector() const { return group != Group::matrix; }  // 1-D in files
    int whole_row(int row) const {
        for (const RowBlock& b : blocks)
            if (row < b.row + b.rows) return b.whole_row + row - b.row;
        return -1;
    }
};

// Pointers to a block's tensors, with this rank's shapes (LocalSizes). Null where the model has no such tensor.
template <class E>
struct BlockParams {
    E *norm1_w, *norm1_b;              // (C) (C) before attention
    E *qkv_w, *qkv_b;                  // (QKVl, C) (QKVl)
    E *q_norm_w, *k_norm_w;            // (HS) (HS); of all heads together (NHl HS) (NKVl HS)
    E* sinks;                          // (NHl)
    E *proj_w, *proj_b;                // (C, NHl HS) (C)
    E *norm1_after_w, *norm1_after_b;  // (C) (C) after attention
    E *norm2_w, *norm2_b;              // (C) (C) before the MLP
    E *fc1_w, *fc1_b;                  // (F1l, C) (F1l)
    E *fc2_w, *fc2_b;                  // (C, Fl) (C)
    E *norm2_after_w, *norm2_after_b;  // (C) (C) after the MLP

    std::pair<E*, E*> weight_and_bias(Matrix matrix) const {
        switch (matrix) {
            case Matrix::qkv: return {qkv_w, qkv_b};
            case Matrix::proj: return {proj_w, proj_b};
            case Matrix::fc1: return {fc1_w, fc1_b};
            default: return {fc2_w, fc2_b};
        }
    }
};

// Pointers into a buffer of E (parameters: floatX, gradients: real), with this rank's shapes. Null where the model or the rank
// has no such tensor.
template <class E>
struct Params {
    E* wte;                      // (Vpl, C) token embedding
    E* wpe;                      // (T, C) learned positions
    E *emb_norm_w, *emb_norm_b;  // (C) (C) BLOOM's embedding norm
    std::vector<BlockParams<E>> blocks;
    E *final_norm_w, *final_norm_b;  // (C) (C)
    E* head;                         // (Vpl, C); tied: on the first stage the memory of wte, on another last stage a copy of it
};

namespace detail {

// Visits every tensor of the model in table order: visit_one(E*& slot, TensorSpec without offset) for the tensors in `part`.
// One function although it is longer than a screen: it is the table.
template <class E, class Visit>
void walk_parameters(const ModelConfig& c, const Part& part, Params<E>& p, Visit visit_one) {
    p = Params<E>{};
    p.blocks.assign(part.layers.size(), BlockParams<E>{});
    const TensorNames& names = family_of(c).names;
    const bool biased_norm = c.norm == Norm::layernorm;
    const Init gain = c.norm_plus_one ? Init::gain_less_one : Init::ones;
    const LocalSizes n(c, part.tp);
    const Axis& tp = part.tp;
    const bool before = c.norm_before(), after = c.norm_after();
    const Parametrization& scale = c.parametrization;
    const TensorFactors outside = scale.outside_blocks(), inside = scale.vector(), branch_end = inside.folded(scale.branch());
    int id = 0, block_of_rank = TensorSpec::embedding;
    bool held = part.first;  // whether this rank has the current layer's tensors
    const auto visit = [&](E*& slot, TensorSpec spec) {
        spec.id = id++;
        spec.block = block_of_rank;
        if (held) visit_one(slot, spec);
    };

    const auto plain = [&](const std::string& hf, int rows) { return std::vector<HfTensor>{{hf, 0, rows}}; };
    const auto vocab = [&](const char* name, const std::string& hf) {  // files hold the vocabulary without padding
        TensorSpec t{name, n.Vpl, c.C, Group::matrix, Init::normal, plain(hf, c.V), outside};
        t.whole_rows = c.Vp;
        t.whole_cols = c.C;
        t.blocks = {{0, n.v0, n.Vpl}};
        return t;
    };
    const auto vector = [&](const std::string& name, Group group, Init init, const std::vector<HfTensor>& hf,
                            const TensorFactors& factors) {
        const int rows = hf[0].rows;
        TensorSpec t{name, rows, 1, group, init, hf, factors};
        t.whole_rows = rows;
        t.blocks = {{0, 0, rows}};
        t.replicated = true;
        return t;
    };
    const auto norm = [&](E*& w, E*& b, const std::string& name, const std::string& hf, const TensorFactors& factors) {
        visit(w, vector(name + "_w", Group::norm, gain, plain(hf + ".weight", c.C), factors));
        if (biased_norm) visit(b, vector(name + "_b", Group::norm, Init::zeros, plain(hf + ".bias", c.C), factors));
    };
    const auto named = [&](std::vector<HfTensor> parts, const char* ending, bool transposed) {
        for (HfTensor& t : parts) {
            t.name += ending;
            t.transposed = transposed;
        }
        return parts;
    };
    // The weight's rows are sharded over tp: a rank computes some columns of the output.
    const auto column_parallel = [&](E*& w, E*& b, const std::string& name, int whole_rows, const std::vector<RowBlock>& blocks,
                                     const std::vector<HfTensor>& parts, int replicated_rows, bool bias) {
        const int rows = blocks.back().row + blocks.back().rows;
        TensorSpec t{name + "_w", rows, c.C, Group::matrix, Init::normal, named(parts, ".weight", names.transposed)};
        t.factors = scale.matrix();
        t.whole_rows = whole_rows;
        t.whole_cols = c.C;
        t.blocks = blocks;
        t.replicated_rows = n.replicas > 1 ? replicated_rows : 0;
        t.replicas = n.replicas;
        visit(w, t);
        if (!bias) return;
        t.name = name + "_b";
        t.cols = t.whole_cols = 1;
        t.group = Group::cut;
        t.init = Init::zeros;
        t.factors = inside;
        t.hf = named(parts, ".bias", false);
        visit(b, t);
    };
    // The weight's columns are sharded over tp: a rank computes a partial sum of the output, and the bias is added once.
    // It ends a branch unless a norm follows.
    const auto row_parallel = [&](E*& w, E*& b, const std::string& name, int whole_cols, const std::string& hf, bool bias) {
        TensorSpec t{name + "_w",          c.C,
                     whole_cols / tp.size, Group::matrix,
                     Init::scaled_normal,  named(plain(hf, c.C), ".weight", names.transposed)};
        t.factors = scale.matrix().folded(after ? 1 : scale.branch());
        t.factors.init *= std::sqrt(scale.depth);  // relative to the base model's depth
        t.whole_rows = c.C;
        t.whole_cols = whole_cols;
        t.first_col = tp.rank * t.cols;
        t.blocks = {{0, 0, c.C}};
        visit(w, t);
        if (!bias) return;
        const std::vector<HfTensor> in_files = named(plain(hf, c.C), ".bias", false);
        visit(b, vector(name + "_b", Group::whole, Init::zeros, in_files, after ? inside : branch_end));
    };

    // A vector of `size` numbers per head, sharded over tp with its heads.
    const auto cut_vector = [&](E*& w, const std::string& name, Init init, const std::string& hf, int size, int whole_heads,
                                const RowBlock& heads, int replicas, const TensorFactors& factors) {
        TensorSpec t = vector(name, Group::cut, init, plain(hf, whole_heads * size), factors);
        t.rows = heads.rows * size;
        t.blocks = {{0, heads.whole_row * size, t.rows}};
        t.replicated = false;
        t.replicated_rows = replicas > 1 ? t.rows : 0;
        t.replicas = replicas;
        visit(w, t);
    };

    const auto top = [&](const char* name) { return std::string(names.top) + name; };
    TensorSpec wte = vocab("wte", top(names.wte) + ".weight");
    const double grown =
        c.embedding_scale == std::sqrt((double)c.C) ? std::sqrt(scale.width) : 1;  // the embedding's own factor
    wte.factors = outside.folded(1 / grown);
    visit(p.wte, wte);
    if (c.position == Position::learned) {
        TensorSpec t = vector("wpe", Group::matrix, Init::normal, plain(top(names.wpe) + ".weight", c.T), outside);
        t.rows = t.whole_rows = c.T;
        t.cols = t.whole_cols = c.C;
        t.blocks = {{0, 0, c.T}};
        visit(p.wpe, t);
    }
    if (c.embedding_norm) norm(p.emb_norm_w, p.emb_norm_b, "emb_norm", top(names.emb_norm), outside);

    const int HS = c.HS(), Q = c.NH * HS, K = c.NKV * HS, Ql = n.NHl * HS, Kl = n.NKVl * HS;
    const int h0 = tp.rank * n.NHl, kv0 = tp.rank / n.replicas * n.NKVl, q0 = h0 * HS, k0 = kv0 * HS, f0 = tp.rank * n.Fl;
    const double queries = scale.queries(c.attention_scale != 0), query_rows = c.qk_norm == QkNorm::none ? queries : 1;
    const TensorFactors query_norm = inside.folded(queries);
    BlockParams<E> unused;
    const int id_of_first = id;
    for (int l = 0, i = 0, tensors = 0; l < c.L; l++) {  // tensors: number per block
        held = i < (int)part.layers.size() && part.layers[i] == l;
        if (l == 1) tensors = id - id_of_first;
        if (l > 0 && !held) {
            id += tensors;
            continue;
        }
        block_of_rank = i;
        BlockParams<E>& b = held ? p.blocks[(size_t)i++] : unused;
        const std::string name = "blocks." + std::to_string(l) + ".";
        const auto hf = [&](const char* of_block) { return top(names.layer) + std::to_string(l) + "." + of_block; };
        std::vector<HfTensor> qkv = {{hf(names.qkv[0]), 0, c.QKV(), false, names.interleaved ? HS : 0}};
        if (names.qkv.size() == 3) qkv = {{hf(names.qkv[0]), 0, Q}, {hf(names.qkv[1]), Q, K}, {hf(names.qkv[2]), Q + K, K}};
        std::vector<HfTensor> fc1 = plain(hf(names.fc1.back()), c.F);
        std::vector<RowBlock> fc1_blocks = {{0, f0, n.Fl}};
        if (gated(c.activation)) {
            fc1 = {{hf(names.fc1[0]), 0, c.F}, {hf(names.fc1.back()), c.F, c.F}};
            fc1_blocks.push_back({n.Fl, c.F + f0, n.Fl});
        }

        if (before) norm(b.norm1_w, b.norm1_b, name + "norm1", hf(names.norm1), inside);
        column_parallel(b.qkv_w, b.qkv_b, name + "qkv", c.QKV(),
                        {{0, q0, Ql, query_rows}, {Ql, Q + k0, Kl}, {Ql + Kl, Q + K + k0, Kl}}, qkv, 2 * Kl, c.qkv_bias);
        const std::string q_norm = hf(names.q_norm) + ".weight", k_norm = hf(names.k_norm) + ".weight";
        if (c.qk_norm == QkNorm::head) {
            visit(b.q_norm_w, vector(name + "q_norm_w", Group::head_norm, gain, plain(q_norm, HS), query_norm));
            visit(b.k_norm_w, vector(name + "k_norm_w", Group::head_norm, gain, plain(k_norm, HS), inside));
        }
        if (c.qk_norm == QkNorm::whole) {
            cut_vector(b.q_norm_w, name + "q_norm_w", gain, q_norm, HS, c.NH, {0, h0, n.NHl}, 1, query_norm);
            cut_vector(b.k_norm_w, name + "k_norm_w", gain, k_norm, HS, c.NKV, {0, kv0, n.NKVl}, n.replicas, inside);
        }
        if (c.sinks) cut_vector(b.sinks, name + "sinks", Init::zeros, hf(names.sinks), 1, c.NH, {0, h0, n.NHl}, 1, inside);
        row_parallel(b.proj_w, b.proj_b, name + "proj", Q, hf(names.proj), c.proj_bias);
        if (after) norm(b.norm1_after_w, b.norm1_after_b, name + "norm1_after", hf(names.norm1_after), branch_end);
        if (before) norm(b.norm2_w, b.norm2_b, name + "norm2", hf(names.norm2), inside);
        column_parallel(b.fc1_w, b.fc1_b, name + "fc1", c.F1(), fc1_blocks, fc1, 0, c.mlp_bias);
        row_parallel(b.fc2_w, b.fc2_b, name + "fc2", c.F, hf(names.fc2), c.mlp_bias);
        if (after) norm(b.norm2_after_w, b.norm2_after_b, name + "norm2_after", hf(names.norm2_after), branch_end);
    }
    block_of_rank = TensorSpec::head;
    held = part.last;
    norm(p.final_norm_w, p.final_norm_b, "final_norm", top(names.final_norm),
         outside.folded(scale.logits() * (c.tied ? grown : 1)));
    if (!c.tied) return visit(p.head, vocab("head", std::string(names.head) + ".weight"));
    wte.copy = true;
    wte.id = 0;
    wte.block = TensorSpec::head;
    if (part.last && !part.first) visit_one(p.head, wte);
}

inline std::vector<TensorSpec> tensors_of_model(const ModelConfig& c, const Part& part) {
    std::vector<TensorSpec> tensors;
    Params<char> unused;
    walk_parameters(c, part, unused, [&](char*&, const TensorSpec& spec) { tensors.push_back(spec); });
    return tensors;
}

}  // namespace detail

// Elements [begin, end) of the buffer, and the gaps in them, have the same factors.
struct FactorRange {
    size_t begin, end;
    TensorFactors factors;
};

struct ParameterTable {
    Part part;
    std::vector<TensorSpec> rows;
    std::vector<FactorRange> factors;  // of the whole buffer, in order; one range in the standard parametrization
    size_t size = 0;                   // elements of the buffer, including padding
    size_t decayed = 0;                // elements before this index are matrices, to which weight decay applies
    size_t shared = 0;                 // elements from this index on are whole on every tp rank: row-parallel biases and norms
    size_t head_norms = 0;             // from this index on: norms of every query and key head
    size_t trained = 0;                // parameters as in the model's files: each once, without padding

    // The numbers of decayed and other elements are padded to multiples of `multiple`, so that they divide into equal shards.
    ParameterTable(const Part& held, std::vector<TensorSpec> tensors, size_t multiple) : part(held), rows(std::move(tensors)) {
        for (const Group group : all_groups) {
            if (group == Group::head_norm) head_norms = size;
            for (TensorSpec& spec : rows) {
                if (spec.group != group) continue;
                spec.offset = size;
                size = round_up(size + spec.size(), 64);
                for (const HfTensor& t : spec.hf) trained += (size_t)t.rows * spec.whole_cols;
            }
            if (group == Group::matrix) decayed = size = round_up(size, multiple);
            if (group == Group::cut) shared = size;
        }
        size = decayed + round_up(size - decayed, multiple);
        block_begins_.assign(part.layers.size() + 1, decayed);
        for (const TensorSpec& spec : rows)
            if (spec.block >= 0 && !spec.vector()) block_begins_[spec.block] = std::min(block_begins_[spec.block], spec.offset);
        set_factors();
    }
    explicit ParameterTable(const ModelConfig& c, const Part& held, size_t multiple = 64)
        : ParameterTable(held, detail::tensors_of_model(c, held), multiple) {}
    explicit ParameterTable(const ModelConfig& c) : ParameterTable(c, whole_model(c)) {}

    // The start of a block's matrices on this rank; for the block after the last: the end of all matrices.
    size_t begin_of_block(int block) const { return block_begins_[block]; }

private:
    void set_factors() {
        std::vector<FactorRange> of_rows;
        for (const TensorSpec& t : rows)
            for (const RowBlock& b : t.blocks)
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

// Points p's tensors into a buffer: each row of the table to place(row).
template <class E, class Place>
void bind_parameters(const ModelConfig& c, const ParameterTable& table, Params<E>& p, E* buffer, Place place) {
    size_t row = 0;
    detail::walk_parameters(c, table.part, p, [&](E*& slot, const TensorSpec&) { slot = buffer + place(row++); });
    if (c.tied && table.part.first) p.head = p.wte;
}
// Points p's tensors into a buffer that is laid out by the table.
template <class E>
void bind_parameters(const ModelConfig& c, const ParameterTable& table, Params<E>& p, E* buffer) {
    bind_parameters(c, table, p, buffer, [&](size_t row) { return table.rows[row].offset; });
}

// Maps a rank's part of a tensor to its place in a file: visit(ours, stride, file, n) for runs of n elements, ours[ours + k
// stride] and file[file + k]; offsets count elements from the start of the part and of the HfTensor.
template <class Visit>
void for_each_run(const TensorSpec& spec, const HfTensor& t, Visit visit) {
    const int heads = t.interleaved ? t.rows / (3 * t.interleaved) : 0;
    const auto file_row = [&](int whole_row) {
        int r = whole_row - t.row;
        if (t.interleaved) {  // here (which of q k v, head, element), in the file (head, which, element)
            const int HS = t.interleaved, which = r / (heads * HS), head = r / HS % heads;
            r = (head * 3 + which) * HS + r % HS;
        }
        return (size_t)r;
    };
    for (const RowBlock& block : spec.blocks) {
        const int first = std::max(block.whole_row, t.row), last = std::min(block.whole_row + block.rows, t.row + t.rows);
        if (first >= last) continue;
        const int row = block.row + first - block.whole_row;
        if (t.transposed) {
            for (int col = 0; col < spec.cols; col++)
                visit((size_t)row * spec.cols + col, (size_t)spec.cols,
                      (size_t)(spec.first_col + col) * t.rows + file_row(first), (size_t)(last - first));
        } else if (!t.interleaved && spec.cols == spec.whole_cols) {
            visit((size_t)row * spec.cols, (size_t)1, file_row(first) * spec.cols, (size_t)(last - first) * spec.cols);
        } else {
            for (int r = first; r < last; r++)
                visit((size_t)(row + r - first) * spec.cols, (size_t)1, file_row(r) * spec.whole_cols + spec.first_col,
                      (size_t)spec.cols);
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
