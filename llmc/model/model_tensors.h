// The tensors of a model, in order: each with its shape on this rank, initialization, weight decay, its position in the whole
// tensor, and its names and layouts in Hugging Face files. parameters.h lays them out in a buffer.
//
// Physical layouts: every linear weight is (out, in). The fused projection has rows [q heads | k heads | v heads], fc1 of a
// SwiGLU model [gate | up]; with tensor parallelism these are a rank's own heads and columns. Files split and permute the rows
// of the whole tensor, as HfTensor describes.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../base/enum_table.h"
#include "../base/math.h"
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
    bool transposed = false;      // GPT-2's Conv1D stores (in, out)
    int groups = 0, queries = 0;  // BLOOM, InternLM2: file rows are [q | k | v] per group of heads, which has so many rows of q
    int stacked = 0;              // GPT-OSS, Granite: this many matrices in one tensor; 0: one matrix
    bool gate_up = false;         // whose rows alternate between gate and up, instead of [gate | up]
    bool values_first = false;    // CodeGen: with groups, which are [q | v | k] then
    int paired = 0, rotated = 0;  // GLM: head size, and its first dimensions, whose rows alternate between two halves
    // PEFT's adapters on so many stacked matrices: A, one below the other, and B (rows, rank of B), whose columns alternate.
    int below = 0, alternating = 0;
    int rows_of_matrix() const { return rows / std::max(1, stacked + alternating); }
};

// Rows [row, row + rows) of a rank's part are rows [whole_row, ...) of the whole tensor.
struct RowBlock {
    int row, whole_row, rows;
    double fold = 1;  // a factor that is folded into these rows (parametrization.h)
};

// The groups of the buffer, in their order: matrices; vectors that tp shards (cut); and, whole on every tp rank, biases of proj
// and fc2 (whole), norms (norm), and vectors of whose gradient each rank has a summand, from its own heads or columns: norms of
// every query or key head, and biases of routers (partial).
enum class Group { matrix, cut, whole, norm, partial };
constexpr Group all_groups[] = {Group::matrix, Group::cut, Group::whole, Group::norm, Group::partial};

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
    int experts = 1;           // matrices of equal size that it stacks: a mixture's experts, or this rank's of them
    bool of_mixture = false;   // of a mixture: its router, its experts, the shared expert, or that one's gate
    bool of_experts = false;   // of its experts, which ep spreads over ranks
    // The last `replicated_rows` rows (keys, values) are held by `replicas` consecutive tp ranks, whose gradients are summed.
    int replicated_rows = 0, replicas = 1;

    std::vector<WeightFormat> formats = {};  // of the rows of each of hf; empty: not quantized, else it is in another buffer
    size_t offset = 0;                       // elements from the start of the buffer; quantized: bytes
    bool quantized() const { return !formats.empty(); }
    size_t size() const { return (size_t)rows * cols; }
    bool vector() const { return group != Group::matrix; }  // 1-D in files
    // A router, or a shared expert's gate.
    bool router() const { return of_mixture && !vector() && replicated; }
    int whole_row(int row) const {
        for (const RowBlock& b : blocks)
            if (row < b.row + b.rows) return b.whole_row + row - b.row;
        return -1;
    }
};

// Consecutive rows of a quantized tensor with one format, in nf4-double of one matrix of the model's files, and the bytes of
// the tensor before their codes.
struct CodedRows {
    WeightFormat format;
    int row, rows;
    size_t offset;
};
inline std::vector<CodedRows> coded_rows(const TensorSpec& t) {
    std::vector<CodedRows> all;
    for (size_t i = 0; i < t.formats.size(); i++) {
        const int begin = t.hf[i].row, end = begin + t.hf[i].rows;
        int rows = 0;
        for (const RowBlock& b : t.blocks)
            rows += std::max(0, std::min(b.whole_row + b.rows, end) - std::max(b.whole_row, begin));
        if (!all.empty() && all.back().format == t.formats[i] && !codes_whole_matrices(t.formats[i])) all.back().rows += rows;
        else all.push_back({t.formats[i], all.empty() ? 0 : all.back().row + all.back().rows, rows, 0});
    }
    size_t at = 0;
    for (CodedRows& r : all) {
        r.offset = at;
        at += QuantizedWeights::bytes(r.format, (size_t)r.rows * t.cols);
    }
    return all;
}
inline size_t coded_bytes(const TensorSpec& t) {
    const CodedRows last = coded_rows(t).back();
    return last.offset + QuantizedWeights::bytes(last.format, (size_t)last.rows * t.cols);
}

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
    E *router_w, *router_b;            // (E, C) (E) in a mixture of E experts
    E *fc1_w, *fc1_b;                  // (F1l, C) (F1l); in a mixture (E, F1l, C) (E, F1l), where F is the width of an expert
    E *fc2_w, *fc2_b;                  // (C, Fl) (C); in a mixture (E, C, Fl) (E, C)
    E *shared_fc1_w, *shared_fc1_b;    // (F1l, C) (F1l) of a mixture's shared expert
    E *shared_fc2_w, *shared_fc2_b;    // (C, Fl) (C)
    E* shared_gate_w;                  // (1, C)
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
    E* wpe;                      // (position_offset + T, C) learned positions
    E *emb_norm_w, *emb_norm_b;  // (C) (C) BLOOM's embedding norm
    std::vector<BlockParams<E>> blocks;
    E *final_norm_w, *final_norm_b;  // (C) (C)
    E* head_b;                       // (Vpl) of the logits
    E* head;                         // (Vpl, C); tied: on the first stage the memory of wte, on another last stage a copy of it
};

// Visits every tensor of the model in table order: visit(E*& slot, TensorSpec without offset) for the tensors in `part`. The
// methods up to row_parallel() describe one kind of tensor each; embedding(), block() and head() are the table.
template <class E, class Visit>
class ParameterWalk {
public:
    ParameterWalk(const ModelConfig& config, const Part& of_rank, Params<E>& params, Visit visit_one)
        : c(config), part(of_rank), p(params), visit_one_(visit_one) {}

    void run() {
        p = Params<E>{};
        p.blocks.assign(part.layers.size(), BlockParams<E>{});
        held_ = part.first;
        const TensorSpec wte = embedding();
        BlockParams<E> unused;
        int tensors[2] = {0, 0};  // of a block with a dense MLP, and of one with a mixture
        for (int l = 0, i = 0; l < c.L; l++) {
            held_ = i < (int)part.layers.size() && part.layers[i] == l;
            int& of_block = tensors[c.has_mixture(l)];
            if (of_block && !held_) {
                id_ += of_block;
                continue;
            }
            block_of_rank_ = i;
            const int first = id_;
            block(held_ ? p.blocks[(size_t)i++] : unused, l);
            of_block = id_ - first;
        }
        block_of_rank_ = TensorSpec::head;
        held_ = part.last;
        head(wte);
    }

private:
    void visit(E*& slot, TensorSpec spec) {
        spec.id = id_++;
        spec.block = block_of_rank_;
        spec.of_mixture = in_mixture_;
        if (held_) visit_one_(slot, spec);
    }
    std::string top(const char* name) const { return std::string(names.top) + name; }

    static std::vector<HfTensor> plain(const std::string& hf, int rows) { return {{hf, 0, rows}}; }
    std::vector<HfTensor> weights(std::vector<HfTensor> parts) const {
        for (HfTensor& t : parts) {
            const bool turned = t.stacked && names.transposes_experts;
            t.name += turned ? "" : ".weight";
            t.transposed = names.transposed || turned;
        }
        return parts;
    }
    static std::vector<HfTensor> biases(std::vector<HfTensor> parts) {
        for (HfTensor& t : parts) t.name += t.stacked ? "_bias" : ".bias";
        return parts;
    }
    // Files hold the vocabulary without padding.
    TensorSpec vocab(const char* name, const std::string& hf) const {
        TensorSpec t{name, n.Vpl, c.C, Group::matrix, Init::normal, plain(hf, c.V), outside};
        t.whole_rows = c.Vp;
        t.whole_cols = c.C;
        t.blocks = {{0, n.v0, n.Vpl}};
        return t;
    }
    static TensorSpec vector(const std::string& name, Group group, Init init, const std::vector<HfTensor>& hf,
                             const TensorFactors& factors) {
        int rows = 0;
        for (const HfTensor& part : hf) rows += part.rows;
        TensorSpec t{name, rows, 1, group, init, hf, factors};
        t.whole_rows = rows;
        t.blocks = {{0, 0, rows}};
        t.replicated = true;
        return t;
    }
    void norm(E*& w, E*& b, const std::string& name, const std::string& hf, const TensorFactors& factors) {
        visit(w, vector(name + "_w", Group::norm, gain, plain(hf + ".weight", c.C), factors));
        if (c.norm == Norm::layernorm && c.norm_bias)
            visit(b, vector(name + "_b", Group::norm, Init::zeros, plain(hf + ".bias", c.C), factors));
    }
    // A vector of `size` numbers per head, sharded over tp with its heads.
    void cut_vector(E*& w, const std::string& name, Init init, const std::string& hf, int size, int whole_heads,
                    const RowBlock& heads, int replicas, const TensorFactors& factors) {
        TensorSpec t = vector(name, Group::cut, init, plain(hf, whole_heads * size), factors);
        t.rows = heads.rows * size;
        t.blocks = {{0, heads.whole_row * size, t.rows}};
        t.replicated = false;
        t.replicated_rows = replicas > 1 ? t.rows : 0;
        t.replicas = replicas;
        visit(w, t);
    }
    // The matrices that a tensor stacks: the MLP, or this rank's experts.
    struct Experts {
        bool on = false;
        int first = 0, held = 1;
    };
    // The weight's rows are sharded over tp: a rank computes some columns of the output.
    void column_parallel(E*& w, E*& b, const std::string& name, int whole_rows, const std::vector<RowBlock>& blocks,
                         const std::vector<HfTensor>& parts, int replicated_rows, bool bias, const Experts& experts = {}) {
        const int rows = blocks.back().row + blocks.back().rows;
        TensorSpec t{name + "_w", rows, c.C, Group::matrix, Init::normal, weights(parts)};
        t.factors = scale.matrix();
        t.experts = experts.held;
        t.of_experts = experts.on;
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
        t.hf = biases(parts);
        visit(b, t);
    }
    // The weight's columns are sharded over tp: a rank computes a partial sum of the output, and the bias is added once.
    // It ends a branch unless a norm follows. Several parts, or stacked ones, are matrices of C rows each: experts, of which
    // this rank holds some.
    void row_parallel(E*& w, E*& b, const std::string& name, int whole_cols, const std::vector<HfTensor>& parts, bool bias,
                      const Experts& experts = {}) {
        TensorSpec t{name + "_w", 0, whole_cols / tp.size, Group::matrix, Init::scaled_normal, weights(parts)};
        t.factors = scale.matrix().folded(after ? 1 : scale.branch());
        t.factors.init *= std::sqrt(scale.depth);  // relative to the base model's depth
        t.experts = experts.held;
        t.of_experts = experts.on;
        t.rows = t.experts * c.C;
        t.whole_rows = std::max((int)parts.size(), parts[0].stacked) * c.C;
        t.whole_cols = whole_cols;
        t.first_col = tp.rank * t.cols;
        for (int e = 0; e < t.experts; e++) t.blocks.push_back({e * c.C, (experts.first + e) * c.C, c.C});
        visit(w, t);
        if (!bias) return;
        TensorSpec v = vector(name + "_b", Group::whole, Init::zeros, biases(parts), after ? inside : branch_end);
        v.rows = t.rows;
        v.whole_rows = t.whole_rows;
        v.blocks = t.blocks;
        v.experts = t.experts;
        v.of_experts = t.of_experts;
        visit(b, v);
    }

    TensorSpec embedding() {
        TensorSpec wte = vocab("wte", top(names.wte) + ".weight");
        wte.factors = outside.folded(1 / grown);
        visit(p.wte, wte);
        if (c.position == Position::learned) {
            const int rows = c.position_offset + c.T;
            TensorSpec t = vector("wpe", Group::matrix, Init::normal, plain(top(names.wpe) + ".weight", rows), outside);
            t.cols = t.whole_cols = c.C;
            visit(p.wpe, t);
        }
        if (c.embedding_norm) norm(p.emb_norm_w, p.emb_norm_b, "emb_norm", top(names.emb_norm), outside);
        return wte;
    }
    void block(BlockParams<E>& b, int l) {
        const int HS = c.HS(), Q = c.NH * HS, K = c.NKV * HS, Ql = n.NHl * HS, Kl = n.NKVl * HS;
        const int h0 = tp.rank * n.NHl, kv0 = tp.rank / n.replicas * n.NKVl, q0 = h0 * HS, k0 = kv0 * HS;
        const double queries = scale.queries(c.attention_scale != 0), query_rows = c.qk_norm == QkNorm::none ? queries : 1;
        const TensorFactors query_norm = inside.folded(queries);
        const std::string name = "blocks." + std::to_string(l) + ".";
        const auto hf = [&](const char* of_block) { return top(names.layer) + std::to_string(l) + "." + of_block; };
        std::vector<HfTensor> qkv = {{hf(names.qkv[0]), 0, c.QKV()}};
        qkv[0].groups = names.grouped ? c.NKV : names.shards;
        qkv[0].queries = qkv[0].groups ? Q / qkv[0].groups : 0;
        qkv[0].values_first = names.shards > 0;
        if (names.qkv.size() == 3) qkv = {{hf(names.qkv[0]), 0, Q}, {hf(names.qkv[1]), Q, K}, {hf(names.qkv[2]), Q + K, K}};

        for (size_t i = 0; names.paired && i < std::min<size_t>(2, qkv.size()); i++) {
            qkv[i].paired = HS;
            qkv[i].rotated = c.rotated();
        }
        const bool parallel = c.norm_place == NormPlace::parallel && names.parallel_norms[0];
        const char* const norm1 = parallel ? names.parallel_norms[0] : names.norm1;
        const char* const norm2 = parallel ? names.parallel_norms[1] : names.norm2;
        if (before) norm(b.norm1_w, b.norm1_b, name + "norm1", hf(norm1), inside);
        column_parallel(b.qkv_w, b.qkv_b, name + "qkv", c.QKV(),
                        {{0, q0, Ql, query_rows}, {Ql, Q + k0, Kl}, {Ql + Kl, Q + K + k0, Kl}}, qkv, 2 * Kl, c.qkv_bias);
        const std::string q_norm = hf(names.q_norm) + ".weight", k_norm = hf(names.k_norm) + ".weight";
        if (c.qk_norm == QkNorm::head) {
            visit(b.q_norm_w, vector(name + "q_norm_w", Group::partial, gain, plain(q_norm, HS), query_norm));
            visit(b.k_norm_w, vector(name + "k_norm_w", Group::partial, gain, plain(k_norm, HS), inside));
        }
        if (c.qk_norm == QkNorm::whole) {
            cut_vector(b.q_norm_w, name + "q_norm_w", gain, q_norm, HS, c.NH, {0, h0, n.NHl}, 1, query_norm);
            cut_vector(b.k_norm_w, name + "k_norm_w", gain, k_norm, HS, c.NKV, {0, kv0, n.NKVl}, n.replicas, inside);
        }
        if (c.sinks) cut_vector(b.sinks, name + "sinks", Init::zeros, hf(names.sinks), 1, c.NH, {0, h0, n.NHl}, 1, inside);
        row_parallel(b.proj_w, b.proj_b, name + "proj", Q, plain(hf(names.proj), c.C), c.proj_bias);
        if (after) norm(b.norm1_after_w, b.norm1_after_b, name + "norm1_after", hf(names.norm1_after), branch_end);
        if (before && c.norm_place != NormPlace::shared) norm(b.norm2_w, b.norm2_b, name + "norm2", hf(norm2), inside);
        in_mixture_ = c.has_mixture(l);
        mlp(b, name, hf(""));
        in_mixture_ = false;
        if (after) norm(b.norm2_after_w, b.norm2_after_b, name + "norm2_after", hf(names.norm2_after), branch_end);
    }
    // The MLP; or a router, stacked experts, and the shared expert.
    void mlp(BlockParams<E>& b, const std::string& name, const std::string& hf) {
        if (!in_mixture_) return mlps(b.fc1_w, b.fc1_b, b.fc2_w, b.fc2_b, name, {hf}, names.fc1, names.fc2, c.F);
        const MixtureConfig& m = c.mixture;
        router(b.router_w, name + "router_w", hf + names.router + ".weight", m.experts);
        if (c.mlp_bias)
            visit(b.router_b, vector(name + "router_b", Group::partial, Init::zeros,
                                     plain(hf + names.router + ".bias", m.experts), inside));
        std::vector<std::string> experts;
        for (int e = 0; e < m.experts; e++)
            experts.push_back(hf + names.experts + (names.stacks_experts ? "" : std::to_string(e) + "."));
        const int held = m.experts / part.ep.size;
        mlps(b.fc1_w, b.fc1_b, b.fc2_w, b.fc2_b, name, experts, names.expert_fc1, names.expert_fc2, c.expert_width(),
             {true, part.ep.rank * held, held});
        if (!m.shared) return;
        mlps(b.shared_fc1_w, b.shared_fc1_b, b.shared_fc2_w, b.shared_fc2_b, name + "shared_", {hf + names.shared_expert},
             names.expert_fc1, names.expert_fc2, m.shared);
        if (m.shared_gate) router(b.shared_gate_w, name + "shared_gate_w", hf + names.shared_gate + ".weight", 1);
    }
    // One MLP, or several of equal size with the same rows for each; hf: the beginnings of their names in files.
    void mlps(E*& fc1_w, E*& fc1_b, E*& fc2_w, E*& fc2_b, const std::string& name, const std::vector<std::string>& hf,
              const std::vector<const char*>& fc1_names, const char* fc2_name, int F, const Experts& experts = {}) {
        const int Fl = F / tp.size, f0 = tp.rank * Fl, F1 = c.F1(F), gate = F1 - F, n_mlps = (int)hf.size();
        std::vector<RowBlock> blocks;
        std::vector<HfTensor> fc1, fc2;
        for (int e = 0; e < n_mlps; e++) {
            const int row = e * F1, local_row = (e - experts.first) * c.F1(Fl);
            const bool fused = gate && fc1_names.size() == 1;
            if (gate) fc1.push_back({hf[(size_t)e] + fc1_names[0], row, fused ? F1 : F});
            if (!fused) fc1.push_back({hf[(size_t)e] + fc1_names.back(), row + gate, F});
            fc2.push_back({hf[(size_t)e] + fc2_name, e * c.C, c.C});
            if (e < experts.first || e >= experts.first + experts.held) continue;
            if (gate) blocks.push_back({local_row, row + f0, Fl});
            blocks.push_back({local_row + (gate ? Fl : 0), row + gate + f0, Fl});
        }
        if (in_mixture_ && names.stacks_experts) {
            fc1 = {{fc1[0].name, 0, n_mlps * F1, false, 0, 0, n_mlps, gate > 0 && names.transposes_experts}};
            fc2 = {{fc2[0].name, 0, n_mlps * c.C, false, 0, 0, n_mlps}};
        }
        column_parallel(fc1_w, fc1_b, name + "fc1", n_mlps * F1, blocks, fc1, 0, c.mlp_bias, experts);
        row_parallel(fc2_w, fc2_b, name + "fc2", F, fc2, c.mlp_bias, experts);
    }
    // Whole on every tp rank. Each has the part of its gradient that its columns of the experts contribute.
    void router(E*& w, const std::string& name, const std::string& hf, int experts) {
        TensorSpec t = vector(name, Group::matrix, Init::normal, plain(hf, experts), scale.matrix());
        t.cols = t.whole_cols = c.C;
        t.partial_sum = tp.size > 1;
        visit(w, t);
    }
    void head(TensorSpec wte) {
        norm(p.final_norm_w, p.final_norm_b, "final_norm", top(names.final_norm),
             outside.folded(scale.logits() * (c.tied ? grown : 1)));
        if (c.head_bias) {
            TensorSpec t = vector("head_b", Group::cut, Init::zeros, plain(std::string(names.head) + ".bias", c.V), outside);
            t.rows = n.Vpl;
            t.whole_rows = c.Vp;
            t.blocks = {{0, n.v0, n.Vpl}};
            t.replicated = false;
            visit(p.head_b, t);
        }
        if (!c.tied) return visit(p.head, vocab("head", std::string(names.head) + ".weight"));
        wte.copy = true;
        wte.id = 0;
        wte.block = TensorSpec::head;
        if (part.last && !part.first) visit_one_(p.head, wte);
    }

    const ModelConfig& c;
    const Part& part;
    Params<E>& p;
    Visit visit_one_;
    const TensorNames& names = family_of(c).names;
    const Init gain = c.norm_plus_one ? Init::gain_less_one : Init::ones;
    const LocalSizes n{c, part.tp};
    const Axis& tp = part.tp;
    const bool before = c.norm_before(), after = c.norm_after();
    const Parametrization& scale = c.parametrization;
    const TensorFactors outside = scale.outside_blocks(), inside = scale.vector(), branch_end = inside.folded(scale.branch());
    // The embedding's own factor.
    const double grown = c.embedding_scale == std::sqrt((double)c.C) ? std::sqrt(scale.width) : 1;
    int id_ = 0, block_of_rank_ = TensorSpec::embedding;
    bool held_ = false;        // whether this rank has the current layer's tensors
    bool in_mixture_ = false;  // whether the current tensor is part of a mixture
};

template <class E, class Visit>
void walk_parameters(const ModelConfig& c, const Part& part, Params<E>& p, Visit visit) {
    ParameterWalk<E, Visit>(c, part, p, visit).run();
}

inline std::vector<TensorSpec> tensors_of_model(const ModelConfig& c, const Part& part) {
    std::vector<TensorSpec> tensors;
    Params<char> unused;
    walk_parameters(c, part, unused, [&](char*&, const TensorSpec& spec) { tensors.push_back(spec); });
    return tensors;
}
