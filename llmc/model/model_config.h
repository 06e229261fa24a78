// The model's configuration: sizes, and the choices of one block that serves every family (families.h).
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../quantized.h"
#include "../shapes.h"
#include "parametrization.h"
#include "rope_scaling.h"

// The adapter of one matrix in files where adapters differ.
struct LoraInFile {
    std::string matrix;  // the end of its name: "3.self_attn.q_proj"
    int rank = 0;        // 0: it has none
    double factor = 1;   // its scale, as a multiple of LoraConfig::scale()
};

// Low-rank adapters (lora.h) as given by the options or an adapter_config.json.
struct LoraConfig {
    int rank = 0;  // 0: no adapters, all parameters are trained; the largest one, if files have several
    double alpha = 0;
    double dropout = 0;                // fraction of the adapters' input that training sets to 0
    bool rank_stabilized = false;      // scale by alpha / sqrt(rank) (Kalajdzievski, 2023)
    std::vector<LoraInFile> in_files;  // every matrix, if they differ: each is read as one of `rank`, padded with zeros
    std::vector<std::string> modules;  // names in the model's files, below a layer's: "self_attn.q_proj"; in the layer's order
    bool on_parameters = false;        // PEFT's target_parameters: one adapter for gate and up of an expert (lora.h)

    bool on() const { return rank > 0; }
    bool operator!=(const LoraConfig& l) const {
        return rank != l.rank || alpha != l.alpha || dropout != l.dropout || rank_stabilized != l.rank_stabilized ||
               modules != l.modules || on_parameters != l.on_parameters;
    }
    // The scale of an adapter of this rank is its alpha divided by this.
    double divisor(double of_rank) const { return rank_stabilized ? std::sqrt(of_rank) : of_rank; }
    double scale() const { return alpha / divisor(rank); }
};

// Virtual tokens (virtual_tokens.h) as given by the options or an adapter_config.json.
struct VirtualTokensConfig {
    int count = 0;          // in front of every sequence; 0: none
    int encoder_width = 0;  // width of the encoder (p-tuning); 0: the rows are trained directly (prompt tuning)
    std::string text;       // its tokens initialized them; empty: tokens drawn from the vocabulary
    bool lstm = false;      // the encoder is an LSTM (prompt_lstm.h), not an MLP

    bool on() const { return count > 0; }
    bool encoded() const { return encoder_width > 0; }
    bool operator!=(const VirtualTokensConfig& v) const {
        return count != v.count || encoder_width != v.encoder_width || text != v.text || lstm != v.lstm;
    }
    // After training: the encoder's output replaces the encoder.
    VirtualTokensConfig computed() const { return {count, 0, text}; }
    // The name as in the option and, in capitals, in PEFT.
    const char* encoder() const { return !encoded() ? "none" : lstm ? "lstm" : "mlp"; }
    std::string in_words() const {
        const std::string them = format("%d virtual token%s", count, count == 1 ? "" : "s");
        return encoded() ? them + format(", computed by an %s of width %d", lstm ? "LSTM" : "MLP", encoder_width) : them;
    }
};

// A mixture of experts in place of the MLPs of layers: each row is processed by `topk` of `experts` MLPs, which a router
// chooses (RouterRule).
struct MixtureConfig {
    int experts = 0;  // 0: none, a dense MLP
    int topk = 2;
    bool sigmoid = false;                // scores are sigmoids, not a softmax
    bool normalize = true;               // the weights of the chosen experts are divided by their sum
    double scale = 1;                    // and multiplied by this
    int width = 0;                       // of each expert; 0: F, and always if no layer is dense
    int shared = 0;                      // width of a further expert that processes every row (train_gpt.cu); 0: none
    bool shared_gate = false;            // its output is multiplied by the sigmoid of a row's product with a vector
    std::vector<int> dense_layers = {};  // in order; these have an MLP of width F instead
    int groups = 1, group_topk = 1;      // choices are from the best `group_topk` of equal groups
    bool bias = false;  // biases of experts, added to the scores for the choice, which training sets by the load

    bool on() const { return experts > 0; }
    // bias: of this layer's experts, or null.
    RouterRule rule(const real* expert_bias) const {
        return {sigmoid, normalize, (real)scale, expert_bias, groups, group_topk};
    }
};

enum class Norm { layernorm, rmsnorm };
enum class NormPlace {
    before,    // x + f(norm(x)): GPT-2, BLOOM, Llama
    after,     // x + norm(f(x)): OLMo-2
    both,      // x + norm(f(norm(x))): Gemma
    parallel,  // x + attention(norm1(x)) + mlp(norm2(x)): GPT-NeoX
    shared,    // x + attention(norm(x)) + mlp(norm(x)): Cohere, Falcon, GPT-J
};
enum class QkNorm {
    none,
    head,   // RMSNorm of every query and key head: Qwen3, Gemma 3
    whole,  // RMSNorm of all query heads together, and of all key heads: OLMo-2
};
enum class Position { learned, rope, alibi, none };
struct ModelConfig {
    std::string family = "llama";  // determines names and layouts in files
    int L = 0;                     // layers
    int C = 0;                     // width
    int NH = 0, NKV = 0;           // query heads, key/value heads
    int F = 0;                     // feed-forward width (of one of gate and up, with SwiGLU); see expert_width()
    int T = 0;                     // longest sequence
    int V = 0, Vp = 0;             // vocabulary, and padded to efficient matrix sizes
    Norm norm = Norm::rmsnorm;
    Position position = Position::rope;
    Activation activation = Activation::swiglu;
    NormPlace norm_place = NormPlace::before;
    bool norm_bias = true;       // of a LayerNorm
    bool norm_plus_one = false;  // norms multiply by 1 + w
    QkNorm qk_norm = QkNorm::none;
    bool qkv_bias = false, proj_bias = false, mlp_bias = false, head_bias = false;
    MixtureConfig mixture;
    int head_size = 0;                                // 0: C / NH
    double attention_scale = 0;                       // factor of q.k; 0: 1 / sqrt(HS)
    double attention_softcap = 0, logit_softcap = 0;  // s: x becomes s tanh(x / s); 0: no cap
    bool sinks = false;                               // a learned logit per query head takes part in its softmax
    int window = 0;                                   // number of keys that a query sees, itself included; 0: all before it
    int full_interval = 0;                            // every n-th layer (n, 2n, ...) ignores the window; 0: none does
    int full_offset = 0;                              // and layers n - offset, 2n - offset, ... do then
    int nope_interval = 0;                            // every n-th layer has no positions; 0: all have them
    int position_offset = 0;                          // rows of learned positions before the first one's
    double rotary_fraction = 1;                       // fraction of each head, from its start, that is rotated
    double local_rope_base = 0;                       // in layers with a window, without scaling; 0: as in the others
    double embedding_scale = 1;                       // factor of the token embedding
    double residual_scale = 1;                        // factor of the outputs of attention and MLP; see stream_scale()
    double logit_divisor = 1;                         // logits are divided by this
    double embedding_dropout = 0, attention_dropout = 0, hidden_dropout = 0;
    bool embedding_norm = false;  // LayerNorm right after the token embedding
    bool tied = false;            // the head is the transposed token embedding
    double eps = 1e-5;
    double rope_base = 10000.0;
    RopeScaling rope_scaling = {};
    double init_std = 0.02;
    // How a run trains it, which is not part of the model:
    Parametrization parametrization;                // muP, CompleteP: factors of each tensor
    LoraConfig lora;                                // low-rank adapters, trained while the model's parameters are frozen
    VirtualTokensConfig virtual_tokens;             // or virtual tokens, trained in the same way
    WeightFormat base_format = WeightFormat::none;  // of the frozen matrices of blocks
    std::map<std::string, std::vector<WeightFormat>> coded;  // the formats of a GGUF file's matrices (gguf_weights.h)

    bool adapted() const { return lora.on() || virtual_tokens.on(); }
    bool quantized() const { return base_format != WeightFormat::none; }
    bool frozen() const { return adapted() || quantized(); }
    int room() const { return T - virtual_tokens.count; }  // tokens of the longest sequence after virtual ones

    int HS() const { return head_size ? head_size : C / NH; }
    int QKV() const { return (NH + 2 * NKV) * HS(); }  // rows of the fused projection: [q heads | k heads | v heads]
    int F1(int width) const { return gated(activation) ? 2 * width : width; }  // rows of fc1: [gate | up] or one
    int F1() const { return F1(F); }
    bool has_mixture(int layer) const {
        return mixture.on() && !std::binary_search(mixture.dense_layers.begin(), mixture.dense_layers.end(), layer);
    }
    int mixtures() const {  // the number of layers with one
        int n = 0;
        for (int layer = 0; layer < L; layer++) n += has_mixture(layer);
        return n;
    }
    int expert_width() const { return mixture.width ? mixture.width : F; }
    int rotated() const { return (int)(rotary_fraction * HS() + 1e-6); }  // 30 of 44, although 30.0 / 44 * 44 is below 30
    // With a residual scale r the stream x + r f(norm(x)) is kept divided by r, x / r + f(norm(x)), so that no op multiplies by
    // r: a norm gives the same for x / r with eps / r^2 as for x with eps.
    double stream_scale() const { return embedding_scale / residual_scale; }  // factor of the token embedding in the stream
    double stream_eps() const { return eps / (residual_scale * residual_scale); }  // of norms of the stream
    bool norm_before() const { return norm_place != NormPlace::after; }
    bool norm_after() const { return norm_place == NormPlace::after || norm_place == NormPlace::both; }
    bool parallel() const { return norm_place == NormPlace::parallel || norm_place == NormPlace::shared; }
    bool lacks_norm_bias() const { return norm == Norm::layernorm && !norm_bias; }
    bool sees_all(int layer) const { return !window || (full_interval && (layer + 1 + full_offset) % full_interval == 0); }
    // The angles for layers without or with a window, for sequences of up to `tokens`.
    RopeTable rope(bool windowed, int tokens) const {
        if (windowed && local_rope_base > 0) return {tokens, rotated(), local_rope_base, {}};
        return {tokens, rotated(), rope_base, rope_scaling};
    }
    bool has_positions(int layer) const { return !nope_interval || (layer + 1) % nope_interval != 0; }
};

// The same mixture, or none if all layers are dense. Without dense layers F is the experts' width.
inline void make_canonical(MixtureConfig& m, int& F, int L) {
    std::vector<int>& dense = m.dense_layers;
    std::sort(dense.begin(), dense.end());
    dense.erase(std::unique(dense.begin(), dense.end()), dense.end());
    dense.erase(std::lower_bound(dense.begin(), dense.end(), L), dense.end());
    if (!m.on() || (int)dense.size() == L) m = {};
    if (m.dense_layers.empty() && m.width) F = m.width;
    if (m.width == F) m.width = 0;
    if (!m.shared) m.shared_gate = false;
}

// The same model, with unused fields at their defaults.
inline ModelConfig canonical(ModelConfig c) {
    const ModelConfig defaults;
    if (c.NH > 0 && c.C % c.NH == 0 && c.head_size == c.C / c.NH) c.head_size = 0;
    if (c.NH > 0 && c.attention_scale == 1 / std::sqrt((double)c.HS())) c.attention_scale = 0;
    if (c.norm == Norm::rmsnorm) c.norm_bias = defaults.norm_bias;
    if (c.position != Position::rope) {
        c.rotary_fraction = defaults.rotary_fraction;
        c.rope_base = defaults.rope_base;
        c.rope_scaling = {};
    }
    if (c.position != Position::learned) c.position_offset = 0;
    if (c.position == Position::learned || c.position == Position::none || c.nope_interval > c.L) c.nope_interval = 0;
    make_canonical(c.mixture, c.F, c.L);
    if (c.mixture.groups == c.mixture.group_topk) c.mixture.groups = c.mixture.group_topk = 1;
    if (c.full_interval == 1) c.window = 0;
    if (!c.window || c.full_interval > c.L + c.full_offset) c.full_interval = 0;
    if (!c.full_interval) c.full_offset = 0;
    const bool same_base = c.local_rope_base == c.rope_base && c.rope_scaling.type == RopeScaling::Type::none;
    if (!c.window || c.position != Position::rope || same_base) c.local_rope_base = 0;
    return c;
}

inline void check_rope(const ModelConfig& c) {
    using Type = RopeScaling::Type;
    const RopeScaling& s = c.rope_scaling;
    refuse_value<Error>(!(c.rotary_fraction > 0 && c.rotary_fraction <= 1), "--rotary-percent", c.rotary_fraction,
                        "above 0 and at most 1");
    if (c.rotated() % 2 || c.rotated() == 0)
        fail(
            "head size %d (--hidden-size %d / heads %d, or --kv-channels): %d of its dimensions would be rotated; rotary "
            "positions need an even number above 0",
            c.HS(), c.C, c.NH, c.rotated());
    refuse_value<Error>(!(c.rope_base >= 1), "--rotary-base", c.rope_base, "at least 1");
    const real local = c.local_rope_base;
    refuse_value<Error>(local != 0 && !(local >= 1), "--rotary-base-local", local, "at least 1");
    if (s.type == Type::none) return;
    refuse_value<Error>(!(s.factor >= 1e-3 && s.factor <= 1e6), "--rope-scaling-factor", s.factor, "between 0.001 and 1000000");
    if (const double grown = rope_attention_factor(s); !(grown >= 1e-6 && grown <= 1e6))
        fail("rope scaling multiplies cos and sin by %g; it must be between 1e-06 and 1000000", grown);
    if (s.type != Type::linear && s.original <= 0)
        fail("scaled rotary positions need the original length; HINT: --original-max-position-embeddings N");
    if (s.type == Type::llama3 && !(s.low_freq_factor > 0 && s.low_freq_factor < s.high_freq_factor))
        fail("rope scaling llama3: low_freq_factor %g must be above 0 and below high_freq_factor %g", s.low_freq_factor,
             s.high_freq_factor);
    if (s.type == Type::yarn && !(s.beta_slow > 0 && s.beta_slow <= s.beta_fast && c.rope_base > 1))
        fail("rope scaling yarn: beta_slow %g must be above 0 and at most beta_fast %g, and --rotary-base %g above 1",
             s.beta_slow, s.beta_fast, c.rope_base);
    if (s.type != Type::longrope) return;
    for (const std::vector<double>* list : {&s.short_factor, &s.long_factor}) {
        if ((int)list->size() != c.rotated() / 2)
            fail("rope scaling longrope: a list has %zu factors; one per rotated pair is needed, %d", list->size(),
                 c.rotated() / 2);
        for (const double factor : *list)
            if (!(factor >= 1e-3 && factor <= 1e6))
                fail("rope scaling longrope: the factor %g is not between 0.001 and 1000000", factor);
    }
}

inline void check_mixture(const ModelConfig& c) {
    const MixtureConfig& m = c.mixture;
    if (m.experts > 16384) fail("the model has %d experts; it must have at most 16384", m.experts);
    if (m.topk < 1 || m.topk > m.experts)
        fail("--moe-router-topk is %d; it must be between 1 and --num-experts, %d", m.topk, m.experts);
    if (!(m.scale >= 1e-6 && m.scale <= 1e6))
        fail("--moe-router-topk-scaling-factor is %g; it must be between 1e-06 and 1000000", m.scale);
    if (m.groups < 1 || m.groups > 32 || m.experts % m.groups)
        fail("--moe-router-num-groups is %d; it must divide --num-experts, %d, and be between 1 and 32", m.groups, m.experts);
    if (m.group_topk < 1 || m.group_topk > m.groups || m.topk % m.group_topk || m.topk / m.group_topk > m.experts / m.groups)
        fail(
            "--moe-router-group-topk is %d; it must be at most --moe-router-num-groups, %d, and divide --moe-router-topk, %d, "
            "into at most %d experts of a group",
            m.group_topk, m.groups, m.topk, m.experts / m.groups);
    if (m.bias && !m.sigmoid)
        fail(
            "expert biases need sigmoid scores, as in Megatron-LM; HINT: --moe-router-score-function sigmoid, or "
            "--no-moe-router-enable-expert-bias");
    refuse_value<Error>(m.width < 0 || m.width > 1 << 22, "--moe-ffn-hidden-size", m.width,
                        "between 1 and " + std::to_string(1 << 22));
    refuse_value<Error>(m.shared < 0 || m.shared > 1 << 22, "--moe-shared-expert-intermediate-size", m.shared,
                        "between 0 and " + std::to_string(1 << 22));
    if ((int64_t)m.experts * std::max(c.F1(c.expert_width()), c.C) > INT_MAX)
        fail("%d experts of width %d: the matrices of a layer's experts have more than %d rows", m.experts, c.expert_width(),
             INT_MAX);
    if (c.parallel())
        fail("--norm-place parallel or shared and a mixture of experts cannot be combined; HINT: --norm-place before");
}

// transformers' Granite and MiniCPM also multiply virtual tokens by the factor of the embedding.
inline void check_virtual_tokens_of(const ModelConfig& c) {
    if (c.residual_scale != 1 || c.family.rfind("granite", 0) == 0 || c.family == "minicpm")
        fail("virtual tokens in front of a model of the family %s are not supported; HINT: --lora-rank 16", c.family.c_str());
}

inline void check_config(const ModelConfig& c) {
    struct Size {
        std::string name;
        int value, most;  // far above any model; these limits keep all sizes within 64 bits
    };
    const Size sizes[] = {
        {"--num-layers", c.L, 10000},           {"--hidden-size", c.C, 1 << 20},     {"--num-attention-heads", c.NH, 1 << 20},
        {"--num-query-groups", c.NKV, 1 << 20}, {"--ffn-hidden-size", c.F, 1 << 22}, {"--seq-length", c.T, 1 << 24},
        {"--vocab-size", c.V, 1 << 24}};
    for (const auto& [name, value, most] : sizes) {
        refuse_value<Error>(value <= 0, name, value, "at least 1", "--preset, --model or " + name);
        refuse_value<Error>(value > most, name, value, "at most " + std::to_string(most));
    }
    if (!c.head_size && c.C % c.NH)
        fail(
            "--hidden-size %d is not divisible by --num-attention-heads %d; every head needs the same size. HINT: "
            "--kv-channels N",
            c.C, c.NH);
    if (c.NH % c.NKV)
        fail(
            "--num-attention-heads %d is not divisible by --num-query-groups %d; each key/value head serves the same number of "
            "query heads",
            c.NH, c.NKV);
    if (c.HS() > 256 || c.HS() < 1)
        fail("head size %d (--hidden-size %d / heads %d, or --kv-channels) is not between 1 and 256, which attention supports",
             c.HS(), c.C, c.NH);
    const auto within = [](const char* name, double value, double low, double high) {
        refuse_value<Error>(!(value >= low && value <= high), name, value, format("between %g and %g", low, high));
    };
    refuse_value<Error>(!(c.eps >= 1e-30 && c.eps <= 1), "--norm-epsilon", c.eps, "above 0 and at most 1");
    if (c.attention_scale != 0) within("the factor of attention scores", c.attention_scale, 1e-6, 1e6);
    if (c.attention_softcap != 0) within("--attn-logit-softcapping", c.attention_softcap, 0.01, 1e6);
    if (c.logit_softcap != 0) within("--final-logit-softcapping", c.logit_softcap, 0.01, 1e6);
    within("--embedding-scale", c.embedding_scale, 1e-6, 1e6);
    within("the factor of residual terms", c.residual_scale, 1e-3, 1e3);
    within("the divisor of logits", c.logit_divisor, 1e-6, 1e6);
    if (c.residual_scale != 1 && (c.norm_after() || c.embedding_norm || c.position == Position::learned))
        fail(
            "a factor of residual terms, %g, requires norms before attention and MLP only, and neither learned positions nor a "
            "norm of the embedding; HINT: --norm-place before, --position-embedding-type rope",
            c.residual_scale);
    within("--window-size", c.window, 0, 1 << 28);
    within("--embedding-dropout", c.embedding_dropout, 0, 0.99);
    within("--attention-dropout", c.attention_dropout, 0, 0.99);
    within("--hidden-dropout", c.hidden_dropout, 0, 0.99);
    within("--init-method-std", c.init_std, 0, 100);
    if (c.position == Position::rope) check_rope(c);
    if (c.mixture.on()) check_mixture(c);
}
inline void pad_vocabulary(ModelConfig& c, int divisible_by) { c.Vp = (c.V + divisible_by - 1) / divisible_by * divisible_by; }
