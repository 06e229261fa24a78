// The parameter table: one row per tensor, with its shape, initialisation, weight decay and its names and layout in Hugging
// Face files. Allocation, initialisation, the decay mask, the norm, import and export all walk it.
//
// All parameters lie in one buffer: first the matrices, which weight decay shrinks, then the vectors (norm gains, biases),
// which it does not; each group in table order, so that AdamW updates it in one go. Each tensor starts at a multiple of 64
// elements; gradients, master weights and Adam's moments use the same offsets. What lies between tensors is zero and stays
// zero. Backward finishes the tensors of each group from its end to its front.
//
// Physical layouts: every linear weight is (out, in). The fused projection has rows [q heads | k heads | v heads], fc1 of a
// SwiGLU model [gate | up]. Files cut and permute those rows: HfTensor says how.
#pragma once
#include <string>
#include <vector>

#include "model_config.h"

enum class Init {
    zeros,
    ones,
    normal,         // N(0, std)
    scaled_normal,  // N(0, std / sqrt(2 L)): the two projections that write into the residual stream
};

// A tensor of a Hugging Face file: rows [row, row + rows) of ours.
struct HfTensor {
    std::string name;
    int row = 0, rows = 0;
    bool transposed = false;  // GPT-2's Conv1D keeps (in, out)
    int interleaved = 0;  // BLOOM: head size HS if file rows are [q k v] per head, where ours are [q heads | k heads | v heads]
};

struct TensorSpec {
    std::string name;  // ours: "blocks.3.qkv_w"
    int rows = 0, cols = 1;
    bool vector = false;  // 1-D: a norm gain or a bias
    Init init = Init::zeros;
    bool decay = false;  // AdamW's weight decay: everything but 1-D tensors
    std::vector<HfTensor> hf;
    size_t offset = 0;  // elements from the start of the buffer
    size_t size() const { return (size_t)rows * cols; }
};

template <class E>
struct BlockParams {
    E *norm1_w, *norm1_b;  // (C) (C)
    E *qkv_w, *qkv_b;      // (QKV, C) (QKV)
    E *proj_w, *proj_b;    // (C, C) (C)
    E *norm2_w, *norm2_b;  // (C) (C)
    E *fc1_w, *fc1_b;      // (F1, C) (F1)
    E *fc2_w, *fc2_b;      // (C, F) (C)
};

// Pointers into a buffer of E (parameters: floatX, gradients: real). Null where the family has no such tensor.
template <class E>
struct Params {
    E* wte;                      // (Vp, C) token embedding
    E* wpe;                      // (T, C) learned positions
    E *emb_norm_w, *emb_norm_b;  // (C) (C) BLOOM's embedding norm
    std::vector<BlockParams<E>> blocks;
    E *final_norm_w, *final_norm_b;  // (C) (C)
    E* head;                         // (Vp, C); the same memory as wte when tied
};

namespace detail {

// Visits every tensor of the model in table order: visit(E*& slot, TensorSpec without offset).
template <class E, class Visit>
void walk_parameters(const ModelConfig& c, Params<E>& p, Visit visit) {
    p = Params<E>{};
    p.blocks.assign(c.L, BlockParams<E>{});
    const bool llama = c.family == "llama", gpt2 = c.family == "gpt2", biased_norm = c.norm == Norm::layernorm;

    const auto plain = [&](const std::string& hf, int rows) { return std::vector<HfTensor>{{hf, 0, rows}}; };
    const auto vocab = [&](E*& slot, const char* name, const std::string& hf) {  // files hold the true vocabulary only
        visit(slot, TensorSpec{name, c.Vp, c.C, false, Init::normal, true, plain(hf, c.V)});
    };
    const auto norm = [&](E*& w, E*& b, const std::string& name, const std::string& hf) {
        visit(w, TensorSpec{name + "_w", c.C, 1, true, Init::ones, false, plain(hf + ".weight", c.C)});
        if (biased_norm) visit(b, TensorSpec{name + "_b", c.C, 1, true, Init::zeros, false, plain(hf + ".bias", c.C)});
    };
    const auto linear = [&](E*& w, E*& b, const std::string& name, int rows, int cols, Init init, std::vector<HfTensor> parts) {
        std::vector<HfTensor> weights = parts, biases = parts;
        for (HfTensor& t : weights) t.name += ".weight", t.transposed = gpt2;
        for (HfTensor& t : biases) t.name += ".bias";
        visit(w, TensorSpec{name + "_w", rows, cols, false, init, true, weights});
        if (c.bias) visit(b, TensorSpec{name + "_b", rows, 1, true, Init::zeros, false, biases});
    };

    const std::string top = llama ? "model." : "transformer.";
    vocab(p.wte, "wte", top + (llama ? "embed_tokens.weight" : gpt2 ? "wte.weight" : "word_embeddings.weight"));
    if (c.position == Position::learned)
        visit(p.wpe, TensorSpec{"wpe", c.T, c.C, false, Init::normal, true, plain("transformer.wpe.weight", c.T)});
    if (c.embedding_norm) norm(p.emb_norm_w, p.emb_norm_b, "emb_norm", "transformer.word_embeddings_layernorm");

    const int Q = c.NH * c.HS(), K = c.NKV * c.HS();
    for (int l = 0; l < c.L; l++) {
        BlockParams<E>& b = p.blocks[l];
        const std::string name = "blocks." + std::to_string(l) + ".";
        const std::string hf = top + (llama ? "layers." : "h.") + std::to_string(l) + ".";
        const std::vector<HfTensor> qkv =
            llama  ? std::vector<HfTensor>{{hf + "self_attn.q_proj", 0, Q},
                                           {hf + "self_attn.k_proj", Q, K},
                                           {hf + "self_attn.v_proj", Q + K, K}}
            : gpt2 ? plain(hf + "attn.c_attn", c.QKV())
                   : std::vector<HfTensor>{{hf + "self_attention.query_key_value", 0, c.QKV(), false, c.HS()}};
        const std::vector<HfTensor> fc1 =
            llama ? std::vector<HfTensor>{{hf + "mlp.gate_proj", 0, c.F}, {hf + "mlp.up_proj", c.F, c.F}}
                  : plain(hf + (gpt2 ? "mlp.c_fc" : "mlp.dense_h_to_4h"), c.F);

        norm(b.norm1_w, b.norm1_b, name + "norm1", hf + (gpt2 ? "ln_1" : "input_layernorm"));
        linear(b.qkv_w, b.qkv_b, name + "qkv", c.QKV(), c.C, Init::normal, qkv);
        linear(b.proj_w, b.proj_b, name + "proj", c.C, Q, Init::scaled_normal,
               plain(hf + (llama  ? "self_attn.o_proj"
                           : gpt2 ? "attn.c_proj"
                                  : "self_attention.dense"),
                     c.C));
        norm(b.norm2_w, b.norm2_b, name + "norm2", hf + (gpt2 ? "ln_2" : "post_attention_layernorm"));
        linear(b.fc1_w, b.fc1_b, name + "fc1", c.F1(), c.C, Init::normal, fc1);
        linear(b.fc2_w, b.fc2_b, name + "fc2", c.C, c.F, Init::scaled_normal,
               plain(hf + (llama  ? "mlp.down_proj"
                           : gpt2 ? "mlp.c_proj"
                                  : "mlp.dense_4h_to_h"),
                     c.C));
    }
    norm(p.final_norm_w, p.final_norm_b, "final_norm", llama ? "model.norm" : "transformer.ln_f");
    if (!c.tied) vocab(p.head, "head", "lm_head.weight");
}

}  // namespace detail

struct ParameterTable {
    std::vector<TensorSpec> rows;
    size_t size = 0;     // elements of the buffer, with padding between tensors
    size_t decayed = 0;  // elements before this one belong to tensors with weight decay, the others do not
    size_t trained = 0;  // parameters that exist in the model's files: no padded vocabulary rows, no gaps

    explicit ParameterTable(const ModelConfig& c) {
        Params<char> unused;
        detail::walk_parameters(c, unused, [&](char*&, const TensorSpec& spec) { rows.push_back(spec); });
        for (const bool decay : {true, false}) {
            for (TensorSpec& spec : rows) {
                if (spec.decay != decay) continue;
                spec.offset = size;
                size = (size + spec.size() + 63) / 64 * 64;
                for (const HfTensor& t : spec.hf) trained += (size_t)t.rows * spec.cols;
            }
            if (decay) decayed = size;
        }
    }
};

// Points p's tensors into a buffer laid out by `table`.
template <class E>
void bind_parameters(const ModelConfig& c, const ParameterTable& table, Params<E>& p, E* buffer) {
    size_t row = 0;
    detail::walk_parameters(c, p, [&](E*& slot, const TensorSpec&) { slot = buffer + table.rows[row++].offset; });
    if (c.tied) p.head = p.wte;
}

// Copies one tensor between our layout and a file's. `ours` points at the tensor (rows, cols), `file` at the HfTensor.
// to_file: ours -> file, else file -> ours.
template <class E>
void convert_layout(const TensorSpec& spec, const HfTensor& t, E* ours, E* file, bool to_file) {
    const int heads = t.interleaved ? t.rows / (3 * t.interleaved) : 0;
#pragma omp parallel for schedule(static) if (spec.size() > 1 << 15)
    for (int r = 0; r < t.rows; r++) {
        int row = t.row + r;
        if (t.interleaved) {  // file row r is (head, which of q k v, element)
            const int HS = t.interleaved, head = r / (3 * HS), which = r / HS % 3;
            row = (which * heads + head) * HS + r % HS;
        }
        for (int col = 0; col < spec.cols; col++) {
            E& a = ours[(size_t)row * spec.cols + col];
            E& b = t.transposed ? file[(size_t)col * t.rows + r] : file[(size_t)r * spec.cols + col];
            if (to_file) b = a;
            else a = b;
        }
    }
}
