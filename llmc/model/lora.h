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
// Each expert of a mixture has its own adapters, on the rows that it processes. Like the experts' matrices they are stacked,
// A (experts, parts r, in) and B (experts, rows, r), and multiplied by the same ops. If the experts' matrices are one tensor
// of the files (GPT-OSS, Granite), PEFT adapts it as a parameter (target_parameters), named as in transformers 5: gate and up
// share one A; all A are (experts r, in), B are (out, r experts). Without names of parameters, PEFT's tensors are named by the
// module: mlp.experts.lora_A is the only adapted parameter or, of two, down_proj; then mlp.experts.base_layer.lora_A is
// gate_up_proj.
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
    std::string module;              // "self_attn.q_proj": its name in the files, below the layer's; without an expert's number
    std::vector<std::string> names;  // all names that select it: "self_attn.q_proj", "q_proj", "q", "qkv"
    std::vector<int> layers;         // that have it
    int experts = 0;                 // of a mixture: each has such a matrix; 0: the layer has one
    bool parameter = false;          // it is all experts' matrices, one of PEFT's target_parameters

    // Its names in the files, below a layer's: "mlp.experts.3.up_proj".
    std::vector<std::string> matrices() const {
        if (!experts) return {module};
        const size_t number = module.rfind('.') + 1;
        std::vector<std::string> all;
        for (int e = 0; e < experts; e++) all.push_back(std::string(module).insert(number, std::to_string(e) + "."));
        return all;
    }
};

namespace detail {

// "model.layers.3.self_attn.q_proj.weight" of layer 3 is the module "self_attn.q_proj", and ...mlp.experts.5.up_proj.weight is
// "mlp.experts.up_proj".
inline std::string module_of(const std::string& name, int layer, bool of_expert) {
    const std::string number = "." + std::to_string(layer) + ".", end = ".weight";
    const size_t begin = name.find(number) + number.size();
    std::string module = name.substr(begin, name.size() - end.size() - begin);
    if (!of_expert) return module;
    const size_t last = module.rfind('.'), expert = module.rfind('.', last - 1);
    return module.erase(expert, last - expert);
}
// The kind of a block's matrix, such as "blocks.3.qkv_w". Null if it is none of the four.
inline const Matrix* matrix_of(const TensorSpec& t) {
    for (const Matrix& matrix : all_matrices)
        if (t.block >= 0 && ends_with(t.name, format(".%s_w", matrix_names[(size_t)matrix]))) return &matrix;
    return nullptr;
}
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

inline std::string parameter_of(const ModelConfig& c, Matrix matrix) {
    return std::string(family_of(c).names.expert_parameters) + (matrix == Matrix::fc1 ? ".gate_up_proj" : ".down_proj");
}
inline bool is_adapted(const ModelConfig& c, const std::string& module) {
    return std::find(c.lora.modules.begin(), c.lora.modules.end(), module) != c.lora.modules.end();
}
// Whether PEFT adapts w, of a mixture, as a parameter.
inline bool is_parameter(const ModelConfig& c, const TensorSpec& w) {
    return w.of_mixture && (c.lora.on_parameters || family_of(c).names.stacks_experts);
}
// The module below a layer's that names the adapter's tensors.
inline std::string module_of_parameter(const ModelConfig& c, const std::string& parameter) {
    const bool inner = parameter == parameter_of(c, Matrix::fc1) && is_adapted(c, parameter_of(c, Matrix::fc2));
    return std::string(family_of(c).names.expert_parameters) + (inner ? ".base_layer" : "");
}
// A matrix with an adapter of its own.
struct LoraPart {
    std::string module, name;  // name: of the adapter's tensors, before ".lora_A"
    HfTensor of;               // the rows of the adapted tensor
};
inline std::vector<LoraPart> parts_of(const ModelConfig& c, const TensorSpec& w, Matrix matrix, int layer) {
    std::vector<LoraPart> parts;
    const std::string top = "base_model.model.", end = ".weight", number = "." + std::to_string(layer) + ".";
    if (!is_parameter(c, w)) {
        for (const HfTensor& t : w.hf)
            parts.push_back({module_of(t.name, layer, w.of_mixture), top + t.name.substr(0, t.name.size() - end.size()), t});
        return parts;
    }
    const std::string module = parameter_of(c, matrix), layers = w.hf[0].name.substr(0, w.hf[0].name.find(number));
    LoraPart part = {module, top + layers + number + module_of_parameter(c, module), {}};
    part.of.rows = w.whole_rows / c.mixture.experts;
    part.of.gate_up = w.hf[0].gate_up;
    for (int e = 0; e < c.mixture.experts; e++, part.of.row += part.of.rows) parts.push_back(part);
    return parts;
}

}  // namespace detail

// The matrices of layers, each name once, in the order of the first layer that has it.
inline std::vector<LoraTarget> lora_targets(const ModelConfig& c) {
    std::vector<LoraTarget> targets;
    for (const TensorSpec& t : ParameterTable(c).rows) {
        const Matrix* const matrix = detail::matrix_of(t);
        if (!matrix) continue;
        const std::vector<detail::LoraPart> all = detail::parts_of(c, t, *matrix, t.block);
        const size_t parts = all.size() / (size_t)t.experts;
        const bool parameter = detail::is_parameter(c, t);
        for (size_t i = 0; i < parts; i++) {
            const std::string& module = all[i].module;
            const auto known = std::find_if(targets.begin(), targets.end(), [&](const auto& x) { return x.module == module; });
            if (known != targets.end()) {
                known->layers.push_back(t.block);
                continue;
            }
            const std::string last = module.substr(module.find_last_of('.') + 1), letter = detail::letter_of(*matrix, i, parts);
            targets.push_back({module, {module, last, matrix_names[(size_t)*matrix]}, {t.block}});
            targets.back().experts = t.of_mixture && !parameter ? t.experts : 0;
            targets.back().parameter = parameter;
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
    bool experts = false;  // each row is multiplied with the matrices of one of rows.experts
    int block = 0;         // of this rank's
    size_t of = 0;         // row of the adapted matrix in the model's table
    Matrix matrix = Matrix::qkv;
    int IC = 0, first_col = 0, whole_cols = 0;  // columns of A, its first column in the whole matrix, and that matrix's columns
    int a_row = 0, b_row = 0;                   // rows in the table of adapters
    const floatX* a = nullptr;                  // (experts, parts rank, in)
    const floatX* b = nullptr;                  // (experts, rows, rank)
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
        const Matrix* const matrix = matrix_of(w);
        if (!matrix) continue;
        const bool row_parallel = *matrix == Matrix::proj || *matrix == Matrix::fc2, experts = w.of_mixture;
        const int OC = w.rows / w.experts;
        // Appends rows, joined with the ones before where they are next to each other.
        const auto append = [](TensorSpec& t, int whole_row, int rows) {
            RowBlock* const before = t.blocks.empty() ? nullptr : &t.blocks.back();
            if (before && before->whole_row + before->rows == whole_row) before->rows += rows;
            else t.blocks.push_back({t.rows, whole_row, rows});
            t.rows += rows;
        };
        TensorSpec a = w, b = w;
        LoraLayer layer;
        for (TensorSpec* t : {&a, &b}) {
            t->hf.clear();
            t->blocks.clear();
            t->rows = t->whole_rows = t->replicated_rows = 0;
        }
        const bool parameter = is_parameter(c, w);
        for (const auto& [module, name, t] : parts_of(c, w, *matrix, part.layers[(size_t)w.block])) {
            if (!is_adapted(c, module)) continue;
            const int index = layer.rows.parts;
            bool held = false;
            for (const RowBlock& block : w.blocks) {
                if (block.whole_row < t.row || block.whole_row >= t.row + t.rows) continue;
                if (block.row < OC) {
                    CHECK(layer.rows.blocks < 3, "adapters on %s", w.name.c_str());
                    layer.rows.block[layer.rows.blocks++] = {block.row, block.rows, b.rows, index};
                    layer.rows.parts = index + 1;
                }
                held = true;
                b.blocks.push_back({b.rows, b.whole_rows + block.whole_row - t.row, block.rows});
                b.rows += block.rows;
                if (block.row >= w.rows - w.replicated_rows) b.replicated_rows += block.rows;
            }
            if (held) append(a, a.whole_rows, rank);
            if (!parameter || a.hf.empty()) {
                const int stacked = parameter ? c.mixture.experts : 0, of_file = std::max(1, stacked);
                a.hf.push_back({name + ".lora_A.weight", a.whole_rows, of_file * rank});
                a.hf.back().below = stacked;
                HfTensor of_b = t;
                of_b.name = name + ".lora_B.weight";
                of_b.row = b.whole_rows;
                of_b.rows *= of_file;
                of_b.transposed = false;
                of_b.alternating = stacked;
                b.hf.push_back(of_b);
            }
            a.whole_rows += rank;
            b.whole_rows += t.rows;
        }
        if (a.hf.empty()) continue;
        layer.rows.rank = rank;
        layer.rows.OC = OC;
        layer.rows.experts = w.experts;
        layer.rows.packed = b.rows / w.experts;
        layer.experts = experts;
        layer.block = w.block;
        layer.of = (size_t)(&w - model.rows.data());
        layer.matrix = *matrix;
        layer.IC = w.cols;
        layer.first_col = w.first_col;
        layer.whole_cols = w.whole_cols;
        layer.scale = (real)c.lora.scale();
        const std::string stem = w.name.substr(0, w.name.size() - 2);
        a.name = stem + "_lora_a";
        a.init = Init::kaiming;
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
        for (const HfTensor& t : b.hf) most = std::max(most, std::min(a.whole_cols, t.rows_of_matrix()));
    });
    return most;
}

// ---- computing --------------------------------------------------------------------------------------------------------------

// Dropout of rows of sequences that may be cut over ranks (Zigzag): all ranks together drop the same numbers as one rank. The
// numbers of `of_samples` are counted from the first row of the micro-batch of whole sequences; T: this rank's rows of each.
struct RowDropout {
    Dropout of_samples;
    Zigzag part;
    int T = 0;

    bool on() const { return of_samples.rate > 0; }
    // out and inp: n rows, the first of which is row `first` of the micro-batch. out may be inp.
    void forward(be::Ctx& ctx, floatX* out, const floatX* inp, int first, int n, int columns) const {
        const bool cut = part.cp.size > 1;
        for (int row = first, next = 0; row < first + n; row = next) {
            next = cut ? std::min(first + n, (row / (T / 2) + 1) * (T / 2)) : first + n;  // in the same chunk
            const size_t in_batch = cut ? part.row_of_batch((size_t)row, (size_t)T) : (size_t)row,
                         at = (size_t)(row - first) * columns;
            be::dropout_forward(ctx, out + at, inp + at, (size_t)(next - row) * columns, of_samples.from(in_batch * columns));
        }
    }
};

// The adapters on this rank's layers, and the memory in which they are computed, one layer after another.
class Lora {
public:
    std::vector<LoraLayer> layers;

    // N: maximum number of rows, in layers of experts of slots; widest: maximum row length of the other layers' inputs and
    // outputs.
    void plan(Arena& arena, const ModelConfig& c, const Part& part, size_t N, size_t slots, size_t widest, bool training) {
        layers.clear();
        detail::walk_adapters(c, part, [&](const TensorSpec&, const TensorSpec&, LoraLayer layer) {
            layer.a_row = 2 * (int)layers.size();
            layer.b_row = layer.a_row + 1;
            layers.push_back(layer);
        });
        size_t low_rank = 0, spread = 0, inputs = 0;
        for (const LoraLayer& l : layers) {
            const size_t rows = l.experts ? slots : N, width = (size_t)l.rows.width();
            inputs = std::max(inputs, rows * (size_t)l.IC);
            low_rank = std::max(low_rank, rows * width);
            spread = std::max(spread, (size_t)l.rows.experts * l.rows.OC * width);
        }
        const char* const purpose = "adapters: activations";
        at_once_ = std::min<size_t>(N, 512);
        arena.add(purpose, &t_, low_rank);
        arena.add(purpose, &wide_, spread);
        arena.add(purpose, &some_, at_once_ * widest);
        if (!training) return;
        arena.add(purpose, &dropped_, c.lora.dropout > 0 ? inputs : 0);
        arena.add(purpose, &dt_, low_rank);
        arena.add(purpose, &dwide_, spread);
    }
    // After allocation: points the layers at their matrices.
    template <class GradientOf>
    void bind(const ParameterTable& table, const floatX* params, GradientOf gradient_of) {
        for (LoraLayer& l : layers) {
            l.a = params + table.rows[l.a_row].offset;
            l.b = params + table.rows[l.b_row].offset;
            l.da = gradient_of((size_t)l.a_row);
            l.db = gradient_of((size_t)l.b_row);
        }
    }

    // out += scale (D(x) A^T) B^T
    void forward(be::Ctx& ctx, const LoraLayer& l, floatX* out /*(N, OC)*/, const floatX* x /*(N, IC)*/, int N,
                 const RowDropout& dropout) const {
        const int OC = l.rows.OC, width = l.rows.width();
        project(ctx, l, x, N, dropout);
        add_in_pieces(ctx, out, N, OC, [&](size_t row, int n) {
            be::linear_forward(ctx, some_, t_ + row * width, wide_, nullptr, n, width, OC);
        });
    }
    // Sets or adds the gradients of A and B, and keeps dt for backward_input.
    void backward_weight(be::Ctx& ctx, const LoraLayer& l, const floatX* dout /*(N, OC)*/, const floatX* x /*(N, IC)*/, int N,
                         const RowDropout& dropout, Acc acc) const {
        const int OC = l.rows.OC, width = l.rows.width();
        const floatX* inp = project(ctx, l, x, N, dropout);
        be::linear_backward_weight(ctx, dwide_, nullptr, dout, t_, N, width, OC, Acc::Set);
        be::lora_collect(ctx, l.db, dwide_, l.rows, l.scale, acc);
        be::linear_backward_input(ctx, dt_, dout, wide_, N, width, OC);
        be::linear_backward_weight(ctx, l.da, nullptr, dt_, inp, N, l.IC, width, acc);
    }
    // dx += D(dt A)
    void backward_input(be::Ctx& ctx, const LoraLayer& l, floatX* dx /*(N, IC)*/, int N, const RowDropout& dropout) const {
        const int width = l.rows.width();
        add_in_pieces(ctx, dx, N, l.IC, [&](size_t row, int n) {
            be::linear_backward_input(ctx, some_, dt_ + row * width, l.a, n, l.IC, width);
            if (dropout.on()) dropout.forward(ctx, some_, some_, (int)row, n, l.IC);
        });
    }

    // The same for the adapters of experts. x: all rows and their choices, or slots; dropout: of the rows, or of choices.
    void experts_forward(be::Ctx& ctx, const LoraLayer& l, floatX* out /*(slots, OC)*/, const ExpertRows& x /*(slots, IC)*/,
                         const Routing& routing, const MixtureShape& shape, const RowDropout& dropout) const {
        const int width = l.rows.width();
        project_experts(ctx, l, x, routing, shape, dropout);
        be::expert_linear_forward(ctx, out, {t_}, wide_, {}, routing.groups(shape), width, l.rows.OC, Acc::Add);
    }
    // Both parts of backward; dx must be the gradient through the frozen matrices.
    void experts_backward(be::Ctx& ctx, const LoraLayer& l, floatX* dx /*(slots, IC)*/, const ExpertRows& dout /*(slots, OC)*/,
                          const ExpertRows& x /*(slots, IC)*/, const Routing& routing, const MixtureShape& shape,
                          const RowDropout& dropout, Acc acc) const {
        const int OC = l.rows.OC, width = l.rows.width(), E = l.rows.experts;
        const ExpertGroups groups = routing.groups(shape);
        const ExpertRows inp = project_experts(ctx, l, x, routing, shape, dropout);
        be::expert_linear_backward_weight(ctx, {dwide_, 0, E * OC}, dout, {t_}, groups, width, OC, Acc::Set);
        be::lora_collect(ctx, l.db, dwide_, l.rows, l.scale, acc);
        be::expert_linear_backward_input(ctx, dt_, dout, wide_, groups, width, OC, Acc::Set);
        be::expert_linear_backward_weight(ctx, {l.da, 0, E * width}, {dt_}, inp, groups, l.IC, width, acc);
        const bool drops = dropout.on();
        be::expert_linear_backward_input(ctx, drops ? dropped_ : dx, {dt_}, l.a, groups, l.IC, width,
                                         drops ? Acc::Set : Acc::Add);
        if (drops) be::expert_dropout(ctx, dx, dropped_, places(x, routing), groups, l.IC, dropout.of_samples, Acc::Add);
    }

private:
    // The rows in whose order the elements of x draw their masks: x's own, or the choices.
    static ExpertRows places(const ExpertRows& x, const Routing& routing) {
        return {nullptr, routing.choices, x.choices ? x.K : 1};
    }
    // t = D(x) A^T of experts, and their scaled block-diagonal matrices of all B. Returns D(x).
    ExpertRows project_experts(be::Ctx& ctx, const LoraLayer& l, const ExpertRows& x, const Routing& routing,
                               const MixtureShape& shape, const RowDropout& dropout) const {
        ExpertRows inp = x;
        if (dropout.on()) {
            inp.x = dropped_;
            if (x.choices) dropout.forward(ctx, dropped_, x.x, 0, shape.N(), l.IC);
            else
                be::expert_dropout(ctx, dropped_, x.x, places(x, routing), routing.groups(shape), l.IC, dropout.of_samples,
                                   Acc::Set);
        }
        be::expert_linear_forward(ctx, t_, inp, l.a, {}, routing.groups(shape), l.IC, l.rows.width(), Acc::Set);
        be::lora_spread(ctx, wide_, l.b, l.rows, l.scale);
        return inp;
    }
    // t = D(x) A^T, and the scaled block-diagonal matrix of all B. Returns D(x).
    const floatX* project(be::Ctx& ctx, const LoraLayer& l, const floatX* x, int N, const RowDropout& dropout) const {
        const floatX* inp = dropout.on() ? dropped_ : x;
        if (dropout.on()) dropout.forward(ctx, dropped_, x, 0, N, l.IC);
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
    floatX* wide_ = nullptr;               // (experts, OC, width) block-diagonal matrices of all B
    real* dwide_ = nullptr;                // (experts, OC, width)
    floatX* some_ = nullptr;               // (at_once, widest)
    floatX* dropped_ = nullptr;            // (N, IC) D(x), and of experts dt A; allocated only for dropout
};
