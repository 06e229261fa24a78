// A model's configuration and tensors as llama.cpp names them in GGUF. The tensors are those of parameters.h, whose linear
// weights are (out, in): the fused projection as it stands there, or its three parts where transformers has three. They differ
// in two things:
//   pairs     llama.cpp rotates neighbours (2 i, 2 i + 1) of a Llama head, transformers and this program (i, i + HS/2): the
//             rows of queries and keys are put in the order in which both rotate the same
//   plus one  of Gemma, whose norms multiply by 1 + w, the file holds 1 + w
// What an architecture of llama.cpp cannot say is refused by name: a configuration is written only if it reads back as it was.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "gguf.h"
#include "model_config.h"
#include "parameters.h"

struct GgufArchitecture {
    const char *name, *family;
    bool pairs;         // queries and keys are ordered so that neighbours are rotated
    bool window;        // it has sliding windows
    bool needs_output;  // a tied head is written all the same
};
inline const std::vector<GgufArchitecture>& gguf_architectures() {
    static const std::vector<GgufArchitecture> rows = {
        {"gpt2", "gpt2", false, false, false},
        {"bloom", "bloom", false, false, false},
        {"llama", "llama", true, false, false},
    };
    return rows;
}

// ---- configuration ---------------------------------------------------------------------------------------------------------
// The values that say what a model is. A window that the architecture does not have must have been taken out.
inline nlohmann::ordered_json gguf_metadata(const ModelConfig& c, const GgufArchitecture& a) {
    nlohmann::ordered_json m = {{"general.architecture", a.name}};
    const auto set = [&](const char* key, const nlohmann::ordered_json& value) { m[std::string(a.name) + "." + key] = value; };
    set("vocab_size", c.V);
    set("context_length", c.T);
    set("embedding_length", c.C);
    set("block_count", c.L);
    set("feed_forward_length", c.F);
    set("attention.head_count", c.NH);
    set("attention.head_count_kv", c.NKV);
    set(c.norm == Norm::rmsnorm ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", c.eps);
    if (c.norm_place == NormPlace::parallel) set("use_parallel_residual", true);
    if (c.position == Position::rope) {
        set("attention.key_length", c.HS());
        set("attention.value_length", c.HS());
        set("rope.dimension_count", c.rotated());
        set("rope.freq_base", c.rope_base);
    }
    if (c.local_rope_base != 0) set("rope.freq_base_swa", c.local_rope_base);
    if (c.window != 0) {
        set("attention.sliding_window", c.window);
        set("attention.sliding_window_pattern", c.full_interval);
    }
    if (c.attention_softcap != 0) set("attn_logit_softcapping", c.attention_softcap);
    if (c.logit_softcap != 0) set("final_logit_softcapping", c.logit_softcap);
    return m;
}

namespace detail {

// The shortest decimal number that is this one in single precision: 1e-5 is stored as 9.99999975e-06.
inline double shortest_decimal(double stored) {
    for (int digits = 6; digits < 9; digits++)
        if (const std::string text = format("%.*g", digits, stored); strtof(text.c_str(), nullptr) == (float)stored)
            return strtod(text.c_str(), nullptr);
    return stored;
}

// Refuses values of the architecture that no line of gguf_config reads, unless they are what goes without saying.
inline void check_gguf_keys(const HfReader& in, const std::string& architecture) {
    const nlohmann::json& metadata = in.j;
    static const char* const read[] = {"vocab_size",
                                       "context_length",
                                       "embedding_length",
                                       "block_count",
                                       "feed_forward_length",
                                       "attention.head_count",
                                       "attention.head_count_kv",
                                       "attention.key_length",
                                       "attention.value_length",
                                       "attention.layer_norm_rms_epsilon",
                                       "attention.layer_norm_epsilon",
                                       "use_parallel_residual",
                                       "rope.dimension_count",
                                       "rope.freq_base",
                                       "rope.freq_base_swa",
                                       "attention.sliding_window",
                                       "attention.sliding_window_pattern",
                                       "attn_logit_softcapping",
                                       "final_logit_softcapping"};
    static const std::vector<std::pair<const char*, nlohmann::json>> harmless = {
        {"expert_count", 0},           {"expert_used_count", 0},
        {"attention.causal", true},    {"attention.max_alibi_bias", 8},
        {"rope.scaling.type", "none"}, {"rope.scaling.factor", 1},
        {"rope.scale_linear", 1},      {"tensor_data_layout", "Meta AI original pth"}};
    for (const auto& [key, value] : metadata.items()) {
        if (key.compare(0, architecture.size() + 1, architecture + ".") != 0) continue;
        const std::string rest = key.substr(architecture.size() + 1);
        const bool known = std::find(std::begin(read), std::end(read), rest) != std::end(read);
        const auto allowed = std::find_if(harmless.begin(), harmless.end(), [&](const auto& h) { return h.first == rest; });
        if (!known && allowed == harmless.end())
            fail("%s: '%s' is %.200s; models with this value are not supported", in.source.c_str(), key.c_str(),
                 value.dump().c_str());
        if (allowed != harmless.end()) in.only(key.c_str(), allowed->second);
    }
}

}  // namespace detail

inline const GgufArchitecture& gguf_architecture(const nlohmann::json& metadata, const std::string& source) {
    const std::string name = detail::HfReader{metadata, source}.text("general.architecture", "");
    std::string all;
    for (const GgufArchitecture& a : gguf_architectures()) {
        if (name == a.name) return a;
        all += (all.empty() ? "" : ", ") + std::string(a.name);
    }
    fail("%s: general.architecture is '%s'; supported are %s", source.c_str(), name.c_str(), all.c_str());
}

inline const GgufArchitecture& gguf_architecture_of(const ModelConfig& c) {
    std::string all;
    for (const GgufArchitecture& a : gguf_architectures()) {
        if (c.family == a.family) return a;
        all += (all.empty() ? "" : ", ") + std::string(a.family);
    }
    fail("llama.cpp has no architecture for models of the family %s; GGUF is written of %s", c.family.c_str(), all.c_str());
}

// The configuration that the values and the tensors' names say. has(name): whether there is such a tensor.
inline ModelConfig gguf_config(const nlohmann::json& metadata, const std::string& source,
                               const std::function<bool(const std::string&)>& has) {
    const GgufArchitecture& a = gguf_architecture(metadata, source);
    const detail::HfReader in{metadata, source};
    std::string key;  // of the value that was asked for last
    const auto named = [&](const char* name) { return (key = std::string(a.name) + "." + name).c_str(); };
    const auto number = [&](const char* name, double otherwise) {
        return detail::shortest_decimal(in.number(named(name), otherwise));
    };
    detail::check_gguf_keys(in, a.name);
    ModelConfig c;
    set_family(c, a.family);
    const auto tokens = metadata.find("tokenizer.ggml.tokens");
    c.V = tokens != metadata.end() && in.absent(named("vocab_size")) ? (int)tokens->size() : in.count(named("vocab_size"));
    c.T = in.count(named("context_length"));
    c.C = in.count(named("embedding_length"));
    c.L = in.count(named("block_count"));
    c.F = in.count(named("feed_forward_length"));
    c.NH = in.count(named("attention.head_count"));
    c.NKV = in.count(named("attention.head_count_kv"), c.NH);
    if (c.NH < 1) in.wrong(named("attention.head_count"), "a number above 0");
    const int head_size = in.count(named("attention.key_length"), c.C / c.NH);
    if (head_size != c.C / c.NH) c.head_size = head_size;
    in.only(named("attention.value_length"), head_size);
    c.eps = number(c.norm == Norm::rmsnorm ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", 1e-5);
    if (c.norm_place == NormPlace::parallel || c.family == "gpt_neox")
        c.norm_place = in.flag(named("use_parallel_residual"), true) ? NormPlace::parallel : NormPlace::before;
    if (c.position == Position::rope) {
        c.rope_base = number("rope.freq_base", 10000);
        const int rotated = in.count(named("rope.dimension_count"), head_size);
        c.rotary_fraction = rotated == head_size || head_size == 0 ? 1 : (double)rotated / head_size;
        c.local_rope_base = number("rope.freq_base_swa", c.local_rope_base);
    }
    if (a.window) {
        c.window = in.count(named("attention.sliding_window"), 0);
        if (c.window != 0) c.full_interval = in.count(named("attention.sliding_window_pattern"), c.full_interval);
        else c.full_interval = 0;
    }
    c.attention_softcap = number("attn_logit_softcapping", 0);
    c.logit_softcap = number("final_logit_softcapping", 0);
    c.qkv_bias = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
    c.proj_bias = has("blk.0.attn_output.bias");
    c.mlp_bias = has("blk.0.ffn_up.bias");
    c.tied = !has("output.weight");
    return c;
}

// ---- tensors ---------------------------------------------------------------------------------------------------------------
// A tensor of a GGUF file: rows [row, row + rows) of ours.
struct GgufPart {
    std::string name;
    int row = 0, rows = 0;
    int paired_heads = 0;  // 0: the rows are in our order
};

inline std::vector<GgufPart> gguf_parts(const ModelConfig& c, const GgufArchitecture& a, const TensorSpec& spec) {
    struct Names {
        const char *ours, *theirs;
    };
    static const Names whole[] = {{"wte", "token_embd"},
                                  {"wpe", "position_embd"},
                                  {"emb_norm", "token_embd_norm"},
                                  {"final_norm", "output_norm"},
                                  {"head", "output"}};
    static const Names of_block[] = {{"norm1", "attn_norm"},
                                     {"norm2", "ffn_norm"},
                                     {"norm1_after", "post_attention_norm"},
                                     {"norm2_after", "post_ffw_norm"},
                                     {"q_norm", "attn_q_norm"},
                                     {"k_norm", "attn_k_norm"},
                                     {"qkv", "attn_qkv"},
                                     {"proj", "attn_output"},
                                     {"fc1", "ffn_up"},
                                     {"fc2", "ffn_down"}};
    std::string stem = spec.name, before, ending = ".weight";
    if (const size_t dot = stem.rfind('.'); dot != std::string::npos) {  // "blocks.3.qkv_w"
        before = "blk." + stem.substr(7, dot - 6);
        stem.erase(0, dot + 1);
    }
    if (const size_t n = stem.size(); n > 2 && stem[n - 2] == '_') {
        if (stem[n - 1] == 'b') ending = ".bias";
        stem.erase(n - 2);
    }
    const auto part = [&](const char* name, size_t i, int paired_heads) {
        return GgufPart{before + name + ending, spec.hf[i].row, spec.hf[i].rows, paired_heads};
    };
    if (stem == "qkv" && spec.hf.size() == 3)
        return {part("attn_q", 0, a.pairs ? c.NH : 0), part("attn_k", 1, a.pairs ? c.NKV : 0), part("attn_v", 2, 0)};
    if (stem == "fc1" && spec.hf.size() == 2) return {part("ffn_gate", 0, 0), part("ffn_up", 1, 0)};
    const auto named = [&](const Names& n) { return stem == n.ours; };
    const Names* const end = before.empty() ? std::end(whole) : std::end(of_block);
    const Names* const found = std::find_if(before.empty() ? std::begin(whole) : std::begin(of_block), end, named);
    if (found == end || spec.hf.size() != 1)
        fail("GGUF has no name for the tensor '%s' of this model: llama.cpp cannot run it", spec.hf[0].name.c_str());
    return {part(found->theirs, 0, 0)};
}

// Rows of heads: (heads, 2, HS/2, cols) becomes (heads, HS/2, 2, cols), or back.
inline void reorder_pairs(const float* in, float* out, const GgufPart& part, int cols, bool back) {
    const int HS = part.rows / part.paired_heads;
    for (int row = 0; row < part.rows; row++) {
        const int half = row % HS / (HS / 2), i = row % (HS / 2), paired = row / HS * HS + 2 * i + half;
        const int from = back ? paired : row, to = back ? row : paired;
        std::copy_n(in + (size_t)from * cols, cols, out + (size_t)to * cols);
    }
}

// The type of a tensor in a file whose matrices have `type`: as llama.cpp's converter decides.
inline GgufType gguf_type_of(const TensorSpec& spec, GgufType type) {
    if (spec.vector() || spec.name == "wpe") return GgufType::F32;
    return spec.whole_cols % (int)gguf_type(type).elements == 0 ? type : GgufType::F16;
}

// Refuses a configuration that GGUF would not give back.
inline void check_gguf_says(const ModelConfig& c, const GgufArchitecture& a) {
    std::vector<std::string> names;
    for (const TensorSpec& spec : ParameterTable(c).rows)
        for (const GgufPart& part : gguf_parts(c, a, spec)) names.push_back(part.name);
    const auto has = [&](const std::string& name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    const ModelConfig said = gguf_config(gguf_metadata(c, a), "the GGUF file", has);
    const nlohmann::json ours = to_hf_config(c, ""), theirs = to_hf_config(said, "");
    for (const auto& [key, value] : ours.items()) {
        const nlohmann::json other = theirs.value(key, nlohmann::json());
        const bool same =
            value == other || (value.is_number() && other.is_number() && value.get<float>() == other.get<float>());
        const bool matters = key != "initializer_range" && key.find("drop") == std::string::npos;
        if (!same && matters)
            fail("the model's '%s' is %.200s, which GGUF's architecture %s cannot say (but %.200s): llama.cpp cannot run it",
                 key.c_str(), value.dump().c_str(), a.name, other.dump().c_str());
    }
}
