// The model's configuration: sizes and the few choices in which the three families differ. One block serves them all.
//   gpt2   GPT-2/3, MT-NLG: learned positions, LayerNorm, tanh GeLU, biases, tied head          (GPT2LMHeadModel)
//   bloom  ALiBi, LayerNorm right after the embedding, otherwise as gpt2                         (BloomForCausalLM)
//   llama  Llama-2, LLM-jp: RMSNorm, rotary positions, SwiGLU, grouped queries, no biases        (LlamaForCausalLM)
// Presets hold the published shapes; config.json is read and written in Hugging Face's form, so model directories work in
// transformers and here.
#pragma once
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/similar.h"

enum class Norm { layernorm, rmsnorm };
enum class NormPlace {
    before,    // x + f(norm(x)): GPT-2, BLOOM, Llama
    after,     // x + norm(f(x)): OLMo-2
    both,      // x + norm(f(norm(x))): Gemma
    parallel,  // x + attention(norm1(x)) + mlp(norm2(x)): GPT-NeoX
};
enum class QkNorm {
    none,
    head,   // RMSNorm of every query and key head: Qwen3, Gemma 3
    whole,  // RMSNorm of all query heads together, and of all key heads: OLMo-2
};
enum class Position { learned, rope, alibi, none };
enum class Activation {
    gelu,        // by tanh
    gelu_exact,  // by erf
    relu2,       // max(x, 0)^2
    swiglu,      // silu(gate) up
    geglu,       // gelu(gate) up
};
// One of these gates its output: fc1 then has rows [gate | up].
inline bool gated(Activation a) { return a == Activation::swiglu || a == Activation::geglu; }

struct ModelConfig {
    std::string family = "llama";  // gpt2 | bloom | llama: determines names and layouts in files
    int L = 0;                     // layers
    int C = 0;                     // width
    int NH = 0, NKV = 0;           // query heads, key/value heads
    int F = 0;                     // feed-forward width (of one of gate and up, with SwiGLU)
    int T = 0;                     // longest sequence
    int V = 0, Vp = 0;             // vocabulary, and padded to efficient matrix sizes
    Norm norm = Norm::rmsnorm;
    Position position = Position::rope;
    Activation activation = Activation::swiglu;
    NormPlace norm_place = NormPlace::before;
    bool norm_plus_one = false;  // norms multiply by 1 + w
    QkNorm qk_norm = QkNorm::none;
    bool qkv_bias = false, proj_bias = false, mlp_bias = false;
    int head_size = 0;                                // 0: C / NH
    double attention_scale = 0;                       // factor of q.k; 0: 1 / sqrt(HS)
    double attention_softcap = 0, logit_softcap = 0;  // s: x becomes s tanh(x / s); 0: it stays
    bool sinks = false;                               // a learned logit per query head takes part in its softmax
    int window = 0;                                   // a query sees this many keys, itself included; 0: all before it
    int full_interval = 0;                            // every n-th layer (n, 2n, ...) sees all keys all the same; 0: none does
    int nope_interval = 0;                            // every n-th layer has no positions; 0: all have them
    double rotary_fraction = 1;                       // of each head, its first part, is rotated
    double local_rope_base = 0;                       // base in the layers with a window; 0: as in the others
    double embedding_scale = 1;                       // factor of the token embedding
    double embedding_dropout = 0, attention_dropout = 0, hidden_dropout = 0;
    bool embedding_norm = false;  // LayerNorm right after the token embedding
    bool tied = false;            // the head is the transposed token embedding
    double eps = 1e-5;
    double rope_base = 10000.0;
    double init_std = 0.02;

    int HS() const { return head_size ? head_size : C / NH; }
    int QKV() const { return (NH + 2 * NKV) * HS(); }         // rows of the fused projection: [q heads | k heads | v heads]
    int F1() const { return gated(activation) ? 2 * F : F; }  // rows of fc1: [gate | up] or one
    int rotated() const { return (int)(rotary_fraction * HS()); }
    bool sees_all(int layer) const { return !window || (full_interval && (layer + 1) % full_interval == 0); }
    bool has_positions(int layer) const { return !nope_interval || (layer + 1) % nope_interval != 0; }
};

// Sets the structural choices of a family; sizes are left alone.
inline void set_family(ModelConfig& c, const std::string& family) {
    const bool llama = family == "llama";
    c.family = family;
    c.norm = llama ? Norm::rmsnorm : Norm::layernorm;
    c.position = llama ? Position::rope : family == "bloom" ? Position::alibi : Position::learned;
    c.activation = llama ? Activation::swiglu : Activation::gelu;
    c.qkv_bias = c.proj_bias = c.mlp_bias = !llama;
    c.embedding_norm = family == "bloom";
    c.tied = !llama;
}

// ---- presets ---------------------------------------------------------------------------------------------------------------
struct Preset {
    const char* name;
    const char* family;
    int L, C, NH, NKV, F, T, V;
    double init_std;
};

inline const std::vector<Preset>& presets() {
    // V = 0: the vocabulary comes from the tokenizer (or --vocab-size).
    static const std::vector<Preset> rows = {
        // small ones, for machines without a GPU
        {"quickstart", "llama", 6, 192, 6, 2, 512, 256, 0, 0.02},
        {"llama-tiny", "llama", 2, 64, 4, 2, 192, 256, 0, 0.02},
        {"gpt2-3m", "gpt2", 6, 192, 6, 6, 768, 256, 0, 0.02},
        {"bloom-3m", "bloom", 6, 192, 6, 6, 768, 256, 0, 0.02},
        {"llama-15m", "llama", 8, 384, 6, 2, 1024, 512, 0, 0.02},
        {"llama-60m", "llama", 12, 640, 10, 5, 1728, 512, 0, 0.02},
        // GPT-2 (Radford et al., 2019)
        {"gpt2-124m", "gpt2", 12, 768, 12, 12, 3072, 1024, 50257, 0.02},
        {"gpt2-350m", "gpt2", 24, 1024, 16, 16, 4096, 1024, 50257, 0.02},
        {"gpt2-774m", "gpt2", 36, 1280, 20, 20, 5120, 1024, 50257, 0.02},
        {"gpt2-1558m", "gpt2", 48, 1600, 25, 25, 6400, 1024, 50257, 0.02},
        // GPT-3 (Brown et al., 2020), head counts of NeMo's ladder; init 0.64/sqrt(C)
        {"gpt3-125m", "gpt2", 12, 768, 12, 12, 3072, 2048, 50257, 0.0231},
        {"gpt3-350m", "gpt2", 24, 1024, 16, 16, 4096, 2048, 50257, 0.02},
        {"gpt3-760m", "gpt2", 24, 1536, 16, 16, 6144, 2048, 50257, 0.0163},
        {"gpt3-1.3b", "gpt2", 24, 2048, 16, 16, 8192, 2048, 50257, 0.0141},
        {"gpt3-2.7b", "gpt2", 32, 2560, 32, 32, 10240, 2048, 50257, 0.0126},
        {"gpt3-6.7b", "gpt2", 32, 4096, 32, 32, 16384, 2048, 50257, 0.01},
        {"gpt3-13b", "gpt2", 40, 5120, 40, 40, 20480, 2048, 50257, 0.0089},
        {"gpt3-175b", "gpt2", 96, 12288, 96, 96, 49152, 2048, 50257, 0.0058},
        // MT-NLG 530B (Smith et al., 2022)
        {"mt-nlg-530b", "gpt2", 105, 20480, 128, 128, 81920, 2048, 50257, 0.004},
        // BLOOM (Le Scao et al., 2022)
        {"bloom-560m", "bloom", 24, 1024, 16, 16, 4096, 2048, 250880, 0.0048},
        {"bloom-1b1", "bloom", 24, 1536, 16, 16, 6144, 2048, 250880, 0.0048},
        {"bloom-1b7", "bloom", 24, 2048, 16, 16, 8192, 2048, 250880, 0.0048},
        {"bloom-3b", "bloom", 30, 2560, 32, 32, 10240, 2048, 250880, 0.0048},
        {"bloom-7b1", "bloom", 30, 4096, 32, 32, 16384, 2048, 250880, 0.0048},
        {"bloom-176b", "bloom", 70, 14336, 112, 112, 57344, 2048, 250880, 0.0048},
        // Llama 2 (Touvron et al., 2023) and TinyLlama
        {"llama-1b", "llama", 22, 2048, 32, 4, 5632, 2048, 32000, 0.02},
        {"llama2-7b", "llama", 32, 4096, 32, 32, 11008, 4096, 32000, 0.02},
        {"llama2-13b", "llama", 40, 5120, 40, 40, 13824, 4096, 32000, 0.02},
        {"llama2-70b", "llama", 80, 8192, 64, 8, 28672, 4096, 32000, 0.02},
        // LLM-jp v3 (dense)
        {"llm-jp-152m", "llama", 12, 512, 8, 8, 2048, 4096, 99574, 0.02},
        {"llm-jp-440m", "llama", 16, 1024, 8, 8, 3584, 4096, 99574, 0.02},
        {"llm-jp-980m", "llama", 20, 1536, 8, 8, 5376, 4096, 99574, 0.02},
        {"llm-jp-1.8b", "llama", 24, 2048, 16, 16, 7168, 4096, 99574, 0.02},
        {"llm-jp-3.8b", "llama", 28, 3072, 24, 24, 8192, 4096, 99574, 0.02},
        {"llm-jp-7.3b", "llama", 32, 4096, 32, 32, 11008, 4096, 99574, 0.02},
        {"llm-jp-13b", "llama", 40, 5120, 40, 40, 13824, 4096, 99574, 0.02},
        {"llm-jp-172b", "llama", 96, 12288, 96, 16, 38464, 4096, 99574, 0.02},
    };
    return rows;
}

inline ModelConfig config_from_preset(const std::string& name) {
    std::vector<std::string> known;
    for (const Preset& p : presets()) {
        if (name == p.name) {
            ModelConfig c;
            set_family(c, p.family);
            c.L = p.L;
            c.C = p.C;
            c.NH = p.NH;
            c.NKV = p.NKV;
            c.F = p.F;
            c.T = p.T;
            c.V = p.V;
            c.init_std = p.init_std;
            return c;
        }
        known.emplace_back(p.name);
    }
    std::string all;
    for (const std::string& p : known) all += (all.empty() ? "" : ", ") + p;
    fail_usage("preset '%s' is unknown%s HINT: one of %s", name.c_str(), did_you_mean(name, known).c_str(), all.c_str());
}

// ---- checks ----------------------------------------------------------------------------------------------------------------
inline void check_config(const ModelConfig& c) {
    struct Size {
        const char* name;
        int value, most;  // far above any model; these keep all sizes within 64 bits
    };
    const Size sizes[] = {
        {"num-layers", c.L, 10000},           {"hidden-size", c.C, 1 << 20},     {"num-attention-heads", c.NH, 1 << 20},
        {"num-query-groups", c.NKV, 1 << 20}, {"ffn-hidden-size", c.F, 1 << 22}, {"seq-length", c.T, 1 << 24},
        {"vocab-size", c.V, 1 << 24}};
    for (const auto& [name, value, most] : sizes) {
        if (value <= 0)
            fail("the model's %s is %d; it must be at least 1. HINT: give --preset, --model or --%s", name, value, name);
        if (value > most) fail("the model's %s is %d; it must be at most %d", name, value, most);
    }
    if (c.C % c.NH)
        fail("hidden-size %d is not divisible by num-attention-heads %d; every head needs the same size", c.C, c.NH);
    if (c.NH % c.NKV)
        fail(
            "num-attention-heads %d is not divisible by num-query-groups %d; each key/value head serves the same number of "
            "query heads",
            c.NH, c.NKV);
    if (c.family != "llama" && c.NKV != c.NH)
        fail("family %s has one key/value head per query head, but num-query-groups is %d of %d heads", c.family.c_str(), c.NKV,
             c.NH);
    if (c.position == Position::rope && c.HS() % 2)
        fail("head size %d (hidden-size %d / heads %d) is odd; rotary positions rotate pairs, so it must be even", c.HS(), c.C,
             c.NH);
    if (c.HS() > 256)
        fail("head size %d (hidden-size %d / heads %d) is above 256, the largest that attention supports", c.HS(), c.C, c.NH);
    if (!(c.eps >= 1e-30 && c.eps <= 1)) fail("norm-epsilon is %g; it must be above 0 and at most 1", c.eps);
    if (c.position == Position::rope && !(c.rope_base >= 1)) fail("rotary-base is %g; it must be at least 1", c.rope_base);
}

inline void pad_vocabulary(ModelConfig& c, int divisible_by) { c.Vp = (c.V + divisible_by - 1) / divisible_by * divisible_by; }

// Megatron's options for norm, positions, activation and so on must add up to one of the three families.
inline void match_family(ModelConfig& c) {
    for (const char* family : {"gpt2", "bloom", "llama"}) {
        ModelConfig f = c;
        set_family(f, family);
        if (f.norm == c.norm && f.position == c.position && f.activation == c.activation && f.qkv_bias == c.qkv_bias &&
            f.embedding_norm == c.embedding_norm && (f.tied == c.tied || f.family == "llama")) {
            c.family = family;
            return;
        }
    }
    fail(
        "this combination of normalization, positions, activation, biases, embedding norm and head matches no family:\n"
        "  gpt2   LayerNorm, learned_absolute, GeLU, biases, tied head\n"
        "  bloom  LayerNorm, alibi, GeLU, biases, embedding LayerNorm, tied head\n"
        "  llama  RMSNorm, rope, SwiGLU, no biases, head tied or not\n"
        "HINT: start from a --preset of the family and override sizes only");
}

// ---- config.json -----------------------------------------------------------------------------------------------------------
// ids: bos_token_id and the like.
inline nlohmann::ordered_json to_hf_config(const ModelConfig& c, const std::string& dtype,
                                           const nlohmann::ordered_json& ids = nlohmann::ordered_json::object()) {
    nlohmann::ordered_json j;
    const bool llama = c.family == "llama";
    j["architectures"] = {llama ? "LlamaForCausalLM" : c.family == "bloom" ? "BloomForCausalLM" : "GPT2LMHeadModel"};
    j["model_type"] = c.family;
    j["vocab_size"] = c.V;
    if (llama) {
        j["hidden_size"] = c.C;
        j["intermediate_size"] = c.F;
        j["num_hidden_layers"] = c.L;
        j["num_attention_heads"] = c.NH;
        j["num_key_value_heads"] = c.NKV;
        j["head_dim"] = c.HS();
        j["max_position_embeddings"] = c.T;
        j["hidden_act"] = "silu";
        j["rms_norm_eps"] = c.eps;
        j["rope_theta"] = c.rope_base;
        j["attention_bias"] = false;
        j["mlp_bias"] = false;
        j["attention_dropout"] = 0.0;
    } else if (c.family == "bloom") {
        j["hidden_size"] = c.C;
        j["n_layer"] = c.L;
        j["n_head"] = c.NH;
        j["seq_length"] = c.T;
        j["layer_norm_epsilon"] = c.eps;
        j["apply_residual_connection_post_layernorm"] = false;
        j["hidden_dropout"] = 0.0;
        j["attention_dropout"] = 0.0;
    } else {
        j["n_embd"] = c.C;
        j["n_layer"] = c.L;
        j["n_head"] = c.NH;
        j["n_positions"] = c.T;
        j["n_inner"] = c.F;
        j["activation_function"] = "gelu_new";
        j["layer_norm_epsilon"] = c.eps;
        j["attn_pdrop"] = 0.0;
        j["embd_pdrop"] = 0.0;
        j["resid_pdrop"] = 0.0;
    }
    j["initializer_range"] = c.init_std;
    j["tie_word_embeddings"] = c.tied;
    j.update(ids);
    j["torch_dtype"] = dtype;
    j["use_cache"] = true;
    return j;
}

namespace detail {

// Reads the values of a config.json, refusing by name what has the wrong type or what is not supported.
struct HfReader {
    const nlohmann::json& j;
    const std::string& source;  // names the file

    bool absent(const char* key) const { return !j.contains(key) || j[key].is_null(); }
    [[noreturn]] void wrong(const char* key, const char* expected) const {
        fail("%s: '%s' is %.200s; %s is expected", source.c_str(), key, j[key].dump().c_str(), expected);
    }
    int count(const char* key) const {
        if (absent(key)) fail("%s has no '%s'", source.c_str(), key);
        if (!j[key].is_number_integer() || j[key] < 0 || j[key] > 1 << 28) wrong(key, "a count");
        return j[key];
    }
    int count(const char* key, int otherwise) const { return absent(key) ? otherwise : count(key); }
    double number(const char* key, double otherwise) const {
        if (!absent(key) && !j[key].is_number()) wrong(key, "a number");
        return absent(key) ? otherwise : j[key].get<double>();
    }
    std::string text(const char* key, const char* otherwise) const {
        if (!absent(key) && !j[key].is_string()) wrong(key, "a text");
        return absent(key) ? std::string(otherwise) : j[key].get<std::string>();
    }
    bool flag(const char* key, bool otherwise) const {
        if (!absent(key) && !j[key].is_boolean()) wrong(key, "true or false");
        return absent(key) ? otherwise : j[key].get<bool>();
    }
    // Refuses a feature unless it is absent, null, or has the one supported value.
    void only(const char* key, const nlohmann::json& allowed) const {
        if (!absent(key) && j[key] != allowed)
            fail("%s: '%s' is %s; only %s is supported", source.c_str(), key, j[key].dump().c_str(), allowed.dump().c_str());
    }
};

// transformers 5 nests the rotary base: {"rope_parameters": {"rope_theta": ..., "rope_type": "default"}}
inline void read_rope(const HfReader& in, ModelConfig& c) {
    using json = nlohmann::json;
    c.rope_base = in.number("rope_theta", 10000.0);
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        if (in.absent(key)) continue;
        if (!in.j[key].is_object()) in.wrong(key, "an object");
        const auto part = [&](const char* name) { return in.j[key].value(name, json()); };
        const auto is = [&](const char* name, const json& allowed) { return part(name).is_null() || part(name) == allowed; };
        if (!is("rope_type", "default") || !is("type", "default") || !is("partial_rotary_factor", 1.0))
            fail("%s: '%s' is %s; only rope_type 'default' over the whole head is supported", in.source.c_str(), key,
                 in.j[key].dump().c_str());
        if (part("rope_theta").is_number()) c.rope_base = part("rope_theta").get<double>();
        else if (!part("rope_theta").is_null()) in.wrong(key, "a number as its 'rope_theta'");
    }
    in.only("partial_rotary_factor", 1.0);
}

inline void read_llama(const HfReader& in, ModelConfig& c) {
    c.L = in.count("num_hidden_layers");
    c.C = in.count("hidden_size");
    c.F = in.count("intermediate_size");
    c.NH = in.count("num_attention_heads");
    c.NKV = in.count("num_key_value_heads", c.NH);
    c.T = in.count("max_position_embeddings", 2048);
    c.eps = in.number("rms_norm_eps", 1e-6);
    read_rope(in, c);
    in.only("attention_bias", false);
    in.only("mlp_bias", false);
    if (in.absent("use_sliding_window") || in.flag("use_sliding_window", true)) in.only("sliding_window", nullptr);
    if (in.text("hidden_act", "silu") != "swish") in.only("hidden_act", "silu");  // two names of one function
    if (c.NH > 0 && !in.absent("head_dim") && in.j["head_dim"] != c.C / c.NH)
        fail("%s: 'head_dim' is %s; only hidden_size / num_attention_heads = %d is supported", in.source.c_str(),
             in.j["head_dim"].dump().c_str(), c.C / c.NH);
    in.only("pretraining_tp", 1);
    c.tied = in.flag("tie_word_embeddings", false);
}

inline void read_bloom(const HfReader& in, ModelConfig& c) {
    c.C = in.count(in.absent("hidden_size") ? "n_embed" : "hidden_size");
    c.L = in.count(in.absent("n_layer") ? "num_hidden_layers" : "n_layer");
    c.NH = in.count(in.absent("n_head") ? "num_attention_heads" : "n_head");
    c.T = in.count("seq_length", 2048);
    c.eps = in.number("layer_norm_epsilon", 1e-5);
    c.NKV = c.NH;
    c.F = 4 * c.C;
    in.only("apply_residual_connection_post_layernorm", false);
    in.only("tie_word_embeddings", true);
}

inline void read_gpt2(const HfReader& in, ModelConfig& c) {
    c.C = in.count("n_embd");
    c.L = in.count("n_layer");
    c.NH = in.count("n_head");
    c.T = in.count("n_positions");
    c.F = in.count("n_inner", 4 * c.C);
    c.NKV = c.NH;
    c.eps = in.number("layer_norm_epsilon", 1e-5);
    const std::string act = in.text("activation_function", "gelu_new");
    if (act != "gelu_new" && act != "gelu_pytorch_tanh") in.only("activation_function", "gelu_new");
    in.only("scale_attn_weights", true);
    in.only("scale_attn_by_inverse_layer_idx", false);
    in.only("add_cross_attention", false);
    in.only("tie_word_embeddings", true);
}

}  // namespace detail

// Reads a config.json of the three families. Unsupported features are refused by name, never ignored. `source` names the file.
inline ModelConfig from_hf_config(const nlohmann::json& j, const std::string& source) {
    if (!j.is_object()) fail("%s does not hold a JSON object", source.c_str());
    const detail::HfReader in{j, source};
    const std::string type = in.text("model_type", "");
    if (type != "llama" && type != "gpt2" && type != "bloom")
        fail("%s: model_type is '%s'; supported are gpt2, bloom and llama", source.c_str(), type.c_str());
    ModelConfig c;
    set_family(c, type);
    in.only("quantization_config", nullptr);
    c.V = in.count("vocab_size");
    (type == "llama" ? detail::read_llama : type == "bloom" ? detail::read_bloom : detail::read_gpt2)(in, c);
    c.init_std = in.number("initializer_range", 0.02);
    return c;
}

inline const char* family_description(const ModelConfig& c) {
    return c.family == "llama"   ? "RMSNorm, rotary positions, SwiGLU, no biases"
           : c.family == "bloom" ? "LayerNorm also after the embedding, ALiBi, GeLU, biases"
                                 : "LayerNorm, learned positions, GeLU, biases";
}
