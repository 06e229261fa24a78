// Low-rank adapters (LoRA; Hu et al., 2021): the model's parameters are frozen, and for a matrix W (out, in) two small ones are
// trained, A (r, in) and B (out, r):
//   out = x W^T + (alpha / r) (x A^T) B^T
// B starts at zero, so the run starts from the model itself; A starts uniform within 1 / sqrt(in), as in PEFT. Training can
// drop a fraction of the adapters' x (--lora-dropout): PEFT draws a mask for each matrix, here all matrices of one layer
// (below) share it.
//
// Names and layouts are PEFT's: one A and one B for each matrix of the model's files ("module"). Our matrices hold several
// modules (qkv: q_proj, k_proj, v_proj; fc1: gate_proj, up_proj). So the A of a layer's modules are stacked, (parts r, in): one
// product gives all x A^T. Their B are stacked too, (rows, r), and spread into a block-diagonal matrix (out, parts r) for one
// product that adds all of them. This takes `parts` times the operations, still about a thousandth of the layer's.
//
// Backward, with t = x A^T and s = alpha / r: dB = s dout^T t, dt = s dout B, dA = dt^T x, dx += dt A. With dropout D, D(x)
// replaces x and is recomputed, and D(dt A) is added.
//
// Tensor parallelism shards adapters like their layer. Column-parallel layers (qkv, fc1) shard the rows of B; A is whole.
// Row-parallel ones (proj, fc2) shard the columns of A; B is whole, and a rank's x A^T B^T is a partial sum like its x W^T.
// Either way the whole matrix's gradient is a sum over tp ranks (TensorSpec::partial_sum).
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/similar.h"
#include "../base/text.h"
#include "../ops.h"
#include "arena.h"
#include "gradients.h"
#include "parameters.h"

// ---- which matrices ---------------------------------------------------------------------------------------------------------

// A matrix of the model's files that can have an adapter.
struct LoraTarget {
    std::string module;              // "self_attn.q_proj": its name in the files, below the layer's
    std::vector<std::string> names;  // all names that select it: "self_attn.q_proj", "q_proj", "q", "qkv"
    std::vector<int> layers;         // that have it
};

namespace detail {

// "model.layers.3.self_attn.q_proj.weight" of layer 3 is the module "self_attn.q_proj".
inline std::string module_of(const std::string& name, int layer) {
    const std::string number = "." + std::to_string(layer) + ".", end = ".weight";
    const size_t begin = name.find(number) + number.size();
    return name.substr(begin, name.size() - end.size() - begin);
}
// The kind of a block's matrix, such as "blocks.3.qkv_w".
inline Matrix matrix_of(const TensorSpec& t) {
    for (const Matrix matrix : all_matrices)
        if (t.name.find(format(".%s_w", matrix_names[(size_t)matrix])) != std::string::npos) return matrix;
    fail("no adapters for %s", t.name.c_str());
}
// True if the tensor can have adapters: all matrices of a block except those of a mixture of experts.
inline bool can_adapt(const TensorSpec& t) { return t.block >= 0 && !t.vector() && !t.of_mixture; }
// The letters that papers use for the `parts` matrices inside one of ours; "" if there is no such name.
inline std::string letter_of(Matrix matrix, size_t part, size_t parts) {
    static const char* const of_qkv[] = {"q", "k", "v"};
    static const char* const of_fc1[] = {"gate", "up"};
    switch (matrix) {
        case Matrix::qkv: return parts == 3 ? of_qkv[part] : "";
        case Matrix::proj: return "o";
        case Matrix::fc1: return parts == 2 ? of_fc1[part] : "up";
        default: return "down";
    }
}

}  // namespace detail

// The matrices of layers, each name once, in the order of the first layer that has it.
inline std::vector<LoraTarget> lora_targets(const ModelConfig& c) {
    std::vector<LoraTarget> targets;
    for (const TensorSpec& t : ParameterTable(c).rows) {
        if (!detail::can_adapt(t)) continue;
        const Matrix matrix = detail::matrix_of(t);
        for (size_t i = 0; i < t.hf.size(); i++) {
            const std::string module = detail::module_of(t.hf[i].name, t.block);
            const auto known =
                std::find_if(targets.begin(), targets.end(), [&](const LoraTarget& other) { return other.module == module; });
            if (known != targets.end()) {
                known->layers.push_back(t.block);
                continue;
            }
            const std::string last = module.substr(module.find_last_of('.') + 1);
            const std::string letter = detail::letter_of(matrix, i, t.hf.size());
            targets.push_back({module, {module, last, matrix_names[(size_t)matrix]}, {t.block}});
            if (!letter.empty()) targets.back().names.push_back(letter);
        }
    }
    return targets;
}

// The modules that the given names select ("all": every one), in the order of the layer.
inline std::vector<std::string> lora_modules(const ModelConfig& c, const std::vector<std::string>& given) {
    const std::vector<LoraTarget> targets = lora_targets(c);
    const auto chooses = [](const std::string& name, const LoraTarget& t) {
        return name == "all" || std::find(t.names.begin(), t.names.end(), name) != t.names.end();
    };
    for (const std::string& name : given) {
        if (std::any_of(targets.begin(), targets.end(), [&](const LoraTarget& t) { return chooses(name, t); })) continue;
        std::vector<std::string> known = {"all"};
        for (const LoraTarget& t : targets)
            for (const std::string& other : t.names)
                if (std::find(known.begin(), known.end(), other) == known.end()) known.push_back(other);
        if (c.mixture.on())
            fail_usage("--lora-targets %s: the matrices of a mixture of experts cannot have adapters; HINT: one of %s",
                       name.c_str(), joined(known).c_str());
        fail_usage("this model has no matrix '%s' for --lora-targets%s HINT: a %s model has %s", name.c_str(),
                   did_you_mean(name, known).c_str(), c.family.c_str(), joined(known).c_str());
    }
    std::vector<std::string> modules;
    for (const LoraTarget& t : targets)
        if (std::any_of(given.begin(), given.end(), [&](const std::string& name) { return chooses(name, t); }))
            modules.push_back(t.module);
    return modules;
}

// ---- tensors ----------------------------------------------------------------------------------------------------------------

// The adapters on one of a block's matrices: this rank's part.
struct LoraLayer {
    LoraRows rows{};
    int block = 0;  // of this rank's
    size_t of = 0;  // row of the adapted matrix in the model's table
    Matrix matrix = Matrix::qkv;
    int IC = 0, first_col = 0, whole_cols = 0;  // columns of A, its first column in the whole matrix, and that matrix's columns
    int a_row = 0, b_row = 0;                   // rows in the table of adapters
    const floatX* a = nullptr;                  // (parts rank, in)
    const floatX* b = nullptr;                  // (rows, rank)
    real *da = nullptr, *db = nullptr;
    real scale = 0;
};

namespace detail {

// visit(A, B, layer) for the adapters on each matrix of `part`, in the order of the model.
template <class Visit>
void walk_adapters(const ModelConfig& c, const Part& part, Visit visit) {
    const int rank = c.lora.rank;
    const ParameterTable model(c, part);
    for (const TensorSpec& w : model.rows) {
        if (!can_adapt(w)) continue;
        const bool row_parallel = matrix_of(w) == Matrix::proj || matrix_of(w) == Matrix::fc2;
        TensorSpec a = w, b = w;
        LoraLayer layer;
        a.hf.clear();
        b.hf.clear();
        b.blocks.clear();
        b.rows = b.whole_rows = b.replicated_rows = 0;
        for (const HfTensor& t : w.hf) {
            const std::string module = module_of(t.name, part.layers[(size_t)w.block]);
            if (std::find(c.lora.modules.begin(), c.lora.modules.end(), module) == c.lora.modules.end()) continue;
            const std::string name = "base_model.model." + t.name.substr(0, t.name.size() - std::string(".weight").size());
            for (const RowBlock& block : w.blocks) {
                if (block.whole_row < t.row || block.whole_row >= t.row + t.rows) continue;
                CHECK(layer.rows.blocks < 3, "adapters on %s", w.name.c_str());
                layer.rows.block[layer.rows.blocks++] = {block.row, block.rows, b.rows, layer.rows.parts};
                b.blocks.push_back({b.rows, b.whole_rows + block.whole_row - t.row, block.rows});
                b.rows += block.rows;
                if (block.row >= w.rows - w.replicated_rows) b.replicated_rows += block.rows;
            }
            a.hf.push_back({name + ".lora_A.weight", rank * layer.rows.parts, rank});
            b.hf.push_back({name + ".lora_B.weight", b.whole_rows, t.rows, false, t.interleaved});
            b.whole_rows += t.rows;
            layer.rows.parts++;
        }
        if (a.hf.empty()) continue;
        layer.rows.rank = rank;
        layer.rows.OC = w.rows;
        layer.block = w.block;
        layer.of = (size_t)(&w - model.rows.data());
        layer.matrix = matrix_of(w);
        layer.IC = w.cols;
        layer.first_col = w.first_col;
        layer.whole_cols = w.whole_cols;
        layer.scale = (real)c.lora.scale();
        const std::string stem = w.name.substr(0, w.name.size() - 2);
        a.name = stem + "_lora_a";
        a.rows = a.whole_rows = layer.rows.width();
        a.blocks = {{0, 0, a.rows}};
        a.init = Init::kaiming;
        a.replicated_rows = 0;
        b.name = stem + "_lora_b";
        b.cols = b.whole_cols = rank;
        b.first_col = 0;
        b.init = Init::zeros;
        TensorSpec& whole = row_parallel ? b : a;
        whole.replicated = whole.partial_sum = part.tp.size > 1;
        a.id = 2 * w.id;  // 0 is the token embedding, which is outside the blocks
        b.id = 2 * w.id + 1;
        visit(a, b, layer);
    }
}

}  // namespace detail

// The tensors of the adapters.
inline std::vector<TensorSpec> lora_tensors(const ModelConfig& c, const Part& part) {
    std::vector<TensorSpec> tensors;
    detail::walk_adapters(c, part, [&](const TensorSpec& a, const TensorSpec& b, const LoraLayer&) {
        tensors.push_back(a);
        tensors.push_back(b);
    });
    return tensors;
}

// The largest useful rank for any adapter of c: the largest of the smaller sides of the adapted matrices.
inline int most_lora_rank(const ModelConfig& c) {
    int most = 0;
    detail::walk_adapters(c, whole_model(c), [&](const TensorSpec& a, const TensorSpec& b, const LoraLayer&) {
        for (const HfTensor& t : b.hf) most = std::max(most, std::min(a.whole_cols, t.rows));
    });
    return most;
}

// ---- computing --------------------------------------------------------------------------------------------------------------

// The adapters on this rank's layers, and the memory in which they are computed, one layer after another.
class Lora {
public:
    std::vector<LoraLayer> layers;

    // N: maximum number of rows; widest: maximum row length of the layers' inputs and outputs.
    void plan(Arena& arena, const ModelConfig& c, const Part& part, size_t N, size_t widest, bool training) {
        layers.clear();
        detail::walk_adapters(c, part, [&](const TensorSpec&, const TensorSpec&, LoraLayer layer) {
            layer.a_row = 2 * (int)layers.size();
            layer.b_row = layer.a_row + 1;
            layers.push_back(layer);
        });
        size_t width = 0, spread = 0, inputs = 0;
        for (const LoraLayer& l : layers) {
            inputs = std::max(inputs, (size_t)l.IC);
            width = std::max(width, (size_t)l.rows.width());
            spread = std::max(spread, (size_t)l.rows.OC * l.rows.width());
        }
        const char* const purpose = "adapters: activations";
        at_once_ = std::min<size_t>(N, 512);
        arena.add(purpose, &t_, N * width);
        arena.add(purpose, &wide_, spread);
        arena.add(purpose, &some_, at_once_ * widest);
        if (!training) return;
        arena.add(purpose, &dropped_, c.lora.dropout > 0 ? N * inputs : 0);
        arena.add(purpose, &dt_, N * width);
        arena.add(purpose, &dwide_, spread);
    }
    // After allocation: points the layers at their matrices.
    void bind(const ParameterTable& table, const floatX* params, const Elements& grads, const BlockGradients& micro_grads) {
        for (LoraLayer& l : layers) {
            l.a = params + table.rows[l.a_row].offset;
            l.b = params + table.rows[l.b_row].offset;
            l.da = gradient_of(table, (size_t)l.a_row, grads, micro_grads);
            l.db = gradient_of(table, (size_t)l.b_row, grads, micro_grads);
        }
    }

    // out += scale (D(x) A^T) B^T
    void forward(be::Ctx& ctx, const LoraLayer& l, floatX* out /*(N, OC)*/, const floatX* x /*(N, IC)*/, int N,
                 const Dropout& dropout) const {
        const int OC = l.rows.OC, width = l.rows.width();
        project(ctx, l, x, N, dropout);
        add_in_pieces(ctx, out, N, OC, [&](size_t row, int n) {
            be::linear_forward(ctx, some_, t_ + row * width, wide_, nullptr, n, width, OC);
        });
    }
    // Sets or adds the gradients of A and B, and keeps dt for backward_input.
    void backward_weight(be::Ctx& ctx, const LoraLayer& l, const floatX* dout /*(N, OC)*/, const floatX* x /*(N, IC)*/, int N,
                         const Dropout& dropout, Acc acc) const {
        const int OC = l.rows.OC, width = l.rows.width();
        const floatX* inp = project(ctx, l, x, N, dropout);
        be::linear_backward_weight(ctx, dwide_, nullptr, dout, t_, N, width, OC, Acc::Set);
        be::lora_collect(ctx, l.db, dwide_, l.rows, l.scale, acc);
        be::linear_backward_input(ctx, dt_, dout, wide_, N, width, OC);
        be::linear_backward_weight(ctx, l.da, nullptr, dt_, inp, N, l.IC, width, acc);
    }
    // dx += D(dt A)
    void backward_input(be::Ctx& ctx, const LoraLayer& l, floatX* dx /*(N, IC)*/, int N, const Dropout& dropout) const {
        const int width = l.rows.width();
        add_in_pieces(ctx, dx, N, l.IC, [&](size_t row, int n) {
            be::linear_backward_input(ctx, some_, dt_ + row * width, l.a, n, l.IC, width);
            if (dropout.rate > 0) be::dropout_forward(ctx, some_, some_, (size_t)n * l.IC, dropout.from(row * (size_t)l.IC));
        });
    }

private:
    // t = D(x) A^T, and the scaled block-diagonal matrix of all B. Returns D(x).
    const floatX* project(be::Ctx& ctx, const LoraLayer& l, const floatX* x, int N, const Dropout& dropout) const {
        const floatX* inp = dropout.rate > 0 ? dropped_ : x;
        if (dropout.rate > 0) be::dropout_forward(ctx, dropped_, x, (size_t)N * l.IC, dropout);
        be::linear_forward(ctx, t_, inp, l.a, nullptr, N, l.IC, l.rows.width());
        be::lora_spread(ctx, wide_, l.b, l.rows, l.scale);
        return inp;
    }
    // sum += the output `some_` of compute(row, n), for a few rows at a time, which stay in the cache.
    template <class Compute>
    void add_in_pieces(be::Ctx& ctx, floatX* sum, int N, int columns, Compute compute) const {
        for (size_t row = 0; row < (size_t)N; row += at_once_) {
            const size_t n = std::min(at_once_, (size_t)N - row);
            floatX* rows = sum + row * columns;
            compute(row, (int)n);
            be::residual_forward(ctx, rows, rows, some_, n * columns);
        }
    }

    size_t at_once_ = 0;
    floatX *t_ = nullptr, *dt_ = nullptr;  // (N, width) x A^T, and its gradient
    floatX* wide_ = nullptr;               // (OC, width) block-diagonal matrix of all B
    real* dwide_ = nullptr;                // (OC, width)
    floatX* some_ = nullptr;               // (at_once, widest)
    floatX* dropped_ = nullptr;            // (N, IC) D(x); allocated only for dropout
};
