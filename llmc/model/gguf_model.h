// A model's configuration and tensors as llama.cpp names them in GGUF. The tensors are the rows of parameters.h, with linear
// weights (out, in): the fused projection as it is, or three parts if transformers has three; the gates of all experts of a
// mixture are one tensor, and so are their ups, and downs. They differ in two ways:
//   pairs     llama.cpp rotates neighbors (2 i, 2 i + 1) of a Llama head, transformers and this program (i, i + HS/2): rows of
//             queries and keys are reordered so that both rotate the same
//             (and InternLM2's one matrix of q, k and v is three)
//   plus one  Gemma's norms multiply by 1 + w, and the file stores 1 + w
// GPT-OSS's experts, whose gates and ups alternate in the files of transformers, have a tensor each for gates, ups and their
// biases here.
// Choices that llama.cpp's architecture does not support are refused by name: a configuration is written only if it reads back
// unchanged.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../base/check.h"
#include "gguf.h"
#include "hf_config.h"
#include "parameters.h"

struct GgufArchitecture {
    const char *name, *family;
    bool pairs = false;          // queries and keys are ordered so that neighbors are rotated
    bool free_biases = false;    // proj and the MLP may have biases or not
    bool needs_output = false;   // a tied head is still written
    int window_interval = 0;     // of sliding windows: every n-th layer has none, unless the file says otherwise; 0: no windows
    int scaled_by_width = 0;     // models of this many layers divide attention scores by the root of C / NH, not HS
    bool expert_width = false;   // the width of experts has a key of its own
    bool multipliers = false;    // the keys of Granite's factors; a MiniCPM has no scale of scores
    bool scaled_logits = false;  // "logit_scale" is a factor of the logits, not their divisor as Granite's
    bool split_experts = false;  // a tensor per expert, as in files from before April 2024; only read

    bool mixture() const { return find_family(family)->structure.mixture.on(); }
};
// Reading uses the first of several rows with the same name, of the mixtures of experts or of the others.
inline const std::vector<GgufArchitecture>& gguf_architectures() {
    static const std::vector<GgufArchitecture> rows = {
        {"gpt2", "gpt2"},
        {"bloom", "bloom"},
        {"llama", "llama", true, true},
        {"llama", "mistral", true, true},
        {"llama", "mixtral", true},
        {"llama", "internlm3", true, true},
        {"qwen2", "qwen2"},
        {"qwen3", "qwen3"},
        {"qwen2moe", "qwen2_moe", false, false, false, 0, 0, true},
        {"qwen3moe", "qwen3_moe", false, false, false, 0, 0, true},
        {"olmoe", "olmoe"},
        {"gpt-oss", "gpt_oss", false, false, false, 2, 0, true},
        {"smollm3", "smollm3", true},
        {"olmo2", "olmo2", false, false, true, 4},
        {"gptneox", "gpt_neox", false, false, true},
        {"granite", "granite", true, true, false, 0, 0, false, true},
        {"granitemoe", "granitemoe", true, false, false, 0, 0, false, true},
        {"minicpm", "minicpm", true, true, false, 0, 0, false, true},
        {"command-r", "cohere", true, false, false, 0, 0, false, false, true},
        {"cohere2", "cohere2", true, false, false, 4, 0, false, false, true},
        {"internlm2", "internlm2", true},
        {"mpt", "mpt"},
        {"falcon", "falcon"},
        {"phi2", "phi"},
        {"exaone", "exaone"},
        {"gemma", "gemma"},
        {"gemma2", "gemma2", false, false, false, 2, 46},
        {"gemma3", "gemma3_text", false, false, false, 6, 62},
    };
    return rows;
}

// ---- configuration ---------------------------------------------------------------------------------------------------------
// Granite's factors.
inline constexpr const char* gguf_attention_scale = "attention.scale";
inline constexpr std::pair<const char*, double ModelConfig::*> gguf_multipliers[] = {
    {"embedding_scale", &ModelConfig::embedding_scale},
    {"residual_scale", &ModelConfig::residual_scale},
    {"logit_scale", &ModelConfig::logit_divisor}};
// The metadata that describes a model. A window that the architecture does not have must have been removed.
inline nlohmann::ordered_json gguf_metadata(const ModelConfig& c, const GgufArchitecture& a) {
    nlohmann::ordered_json m = {{"general.architecture", a.name}};
    const auto set = [&](const char* key, const nlohmann::ordered_json& value) { m[std::string(a.name) + "." + key] = value; };
    set("vocab_size", c.V);
    set("context_length", c.T);
    set("embedding_length", c.C);
    set("block_count", c.L);
    set("feed_forward_length", c.F);
    if (!c.mixture.dense_layers.empty())
        fail("llama.cpp has no dense layers among mixtures of experts for the family %s", c.family.c_str());
    if (c.mixture.on()) {
        set("expert_count", c.mixture.experts);
        set("expert_used_count", c.mixture.topk);
        if (a.expert_width) set("expert_feed_forward_length", c.expert_width());
        if (c.mixture.shared) set("expert_shared_feed_forward_length", c.mixture.shared);
    }
    set("attention.head_count", c.NH);
    set("attention.head_count_kv", c.NKV);
    set(c.norm == Norm::rmsnorm ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", c.eps);
    if (c.norm_place == NormPlace::parallel || c.family == "gpt_neox")
        set("use_parallel_residual", c.norm_place == NormPlace::parallel);
    if (c.position == Position::rope) {
        set("attention.key_length", c.HS());
        set("attention.value_length", c.HS());
        set("rope.dimension_count", c.rotated());
        set("rope.freq_base", c.rope_base);
    }
    using Type = RopeScaling::Type;
    const RopeScaling& scaling = c.rope_scaling;
    if (scaling.type == Type::linear || scaling.type == Type::yarn) {
        set("rope.scaling.type", scaling.type == Type::yarn ? "yarn" : "linear");
        set("rope.scaling.factor", scaling.factor);
    }
    if (scaling.type == Type::yarn) {
        set("rope.scaling.original_context_length", scaling.original);
        set("rope.scaling.yarn_beta_fast", scaling.beta_fast);
        set("rope.scaling.yarn_beta_slow", scaling.beta_slow);
    }
    if (a.window_interval != 0 && (c.window != 0 || c.family != "olmo2")) {
        set("attention.sliding_window", c.window);
        if (c.family != "cohere2") set("attention.sliding_window_pattern", c.full_interval);  // llama.cpp's is 4
        set("rope.freq_base_swa", c.local_rope_base != 0 ? c.local_rope_base : c.rope_base);
    }
    if (a.multipliers) {
        const double scale = c.attention_scale != 0 ? c.attention_scale : 1 / std::sqrt((double)c.HS());
        if (c.family != "minicpm") set(gguf_attention_scale, scale);
        for (const auto& [key, factor] : gguf_multipliers) set(key, c.*factor);
    }
    if (a.scaled_logits) set("logit_scale", 1 / c.logit_divisor);
    if (c.family == "mpt") set("attention.max_alibi_bias", 8.0);
    if (c.family == "falcon") set("tensor_data_layout", "jploski");
    if (c.attention_softcap != 0) set("attn_logit_softcapping", c.attention_softcap);
    if (c.logit_softcap != 0) set("final_logit_softcapping", c.logit_softcap);
    return m;
}

namespace detail {

// The shortest decimal number that equals this one in single precision: 1e-5 is stored as 9.99999975e-06. With a divisor: of a
// shortest one.
inline double shortest_decimal(double stored, double divisor = 1) {
    for (int digits = 6; digits < 9; digits++)
        if (const double x = strtod(format("%.*g", digits, stored * divisor).c_str(), nullptr) / divisor;
            (float)x == (float)stored)
            return x;
    return stored;
}

// Rejects metadata of the architecture that gguf_config does not read, unless it holds its no-op value.
inline void check_gguf_keys(const HfReader& in, const GgufArchitecture& a) {
    const nlohmann::json& metadata = in.j;
    const std::string architecture = a.name;
    static const char* const read[] = {"vocab_size",
                                       "context_length",
                                       "embedding_length",
                                       "block_count",
                                       "feed_forward_length",
                                       "expert_count",
                                       "expert_used_count",
                                       "expert_feed_forward_length",
                                       "expert_shared_feed_forward_length",
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
                                       "final_logit_softcapping",
                                       "rope.scaling.type",
                                       "rope.scaling.factor",
                                       "rope.scaling.original_context_length",
                                       "rope.scaling.yarn_beta_fast",
                                       "rope.scaling.yarn_beta_slow",
                                       "rope.scaling.finetuned"};
    const std::vector<std::pair<const char*, nlohmann::json>> harmless = {
        {"expert_gating_func", 1},
        {"expert_weights_scale", 1},
        {"attention.causal", true},
        {"attention.max_alibi_bias", 8},
        {"rope.scale_linear", 1},
        {"tensor_data_layout", a.name == std::string("falcon") ? "jploski" : "Meta AI original pth"}};
    for (const auto& [key, value] : metadata.items()) {
        if (key.compare(0, architecture.size() + 1, architecture + ".") != 0) continue;
        const std::string rest = key.substr(architecture.size() + 1);
        const bool factor =
            rest == gguf_attention_scale || std::any_of(std::begin(gguf_multipliers), std::end(gguf_multipliers),
                                                        [&](const auto& multiplier) { return rest == multiplier.first; });
        const bool known = (a.multipliers && factor) || (a.scaled_logits && rest == "logit_scale") ||
                           std::find(std::begin(read), std::end(read), rest) != std::end(read);
        const auto allowed = std::find_if(harmless.begin(), harmless.end(), [&](const auto& h) { return h.first == rest; });
        if (!known && allowed == harmless.end())
            fail("%s: '%s' is %.200s; models with this value are not supported", in.source.c_str(), key.c_str(),
                 value.dump().c_str());
        if (allowed != harmless.end()) in.only(key.c_str(), allowed->second);
    }
}

}  // namespace detail

inline const GgufArchitecture& gguf_architecture(const nlohmann::json& metadata, const std::string& source) {
    const detail::HfReader in{metadata, source};
    const std::string name = in.text("general.architecture", ""), experts = name + ".expert_count";
    const bool mixture = in.count(experts.c_str(), 0) > 0;
    std::string all;
    for (const bool mixtures : {mixture, !mixture})
        for (const GgufArchitecture& a : gguf_architectures()) {
            if (a.mixture() != mixtures) continue;
            if (name == a.name && mixtures != mixture) in.wrong(experts.c_str(), mixture ? "0" : "at least 1");
            if (name == a.name) return a;
            if ((", " + all + ",").find(format(", %s,", a.name)) == std::string::npos)
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
    fail("GGUF files of the family %s are not supported; supported are %s", c.family.c_str(), all.c_str());
}

namespace detail {

inline void read_gguf_scaling(const HfReader& in, const GgufArchitecture& a, ModelConfig& c) {
    using Type = RopeScaling::Type;
    const auto key = [&](const char* name) { return std::string(a.name) + ".rope.scaling." + name; };
    const auto number = [&](const char* name, double otherwise) {
        return shortest_decimal(in.number(key(name).c_str(), otherwise));
    };
    RopeScaling& s = c.rope_scaling;
    s.factor = number("factor", 1);
    const std::string type = in.text(key("type").c_str(), s.factor != 1 ? "linear" : "none");
    if (type == "none" || (type == "linear" && s.factor == 1)) {
        s = {};
        return;
    }
    if (type != "linear" && type != "yarn") in.unsupported(key("type").c_str(), "none, linear and yarn");
    s.type = type == "yarn" ? Type::yarn : Type::linear;
    if (s.type == Type::linear) return;
    s.original = in.count(key("original_context_length").c_str(), c.T);
    s.beta_fast = number("yarn_beta_fast", s.beta_fast);
    s.beta_slow = number("yarn_beta_slow", s.beta_slow);
    s.truncate = c.family != "gpt_oss";  // no key has it; llama.cpp itself always truncates
}

}  // namespace detail

// Llama 3's scaling of rotary positions is a tensor in GGUF: the divisor of each pair's frequency.
inline constexpr const char* gguf_rope_factors = "rope_freqs.weight";
inline std::vector<float> rope_factors(const ModelConfig& c) {
    RopeTable table = c.rope(false, c.T);
    const std::vector<double> scaled = rope_frequencies(table);
    table.scaling = {};
    const std::vector<double> plain = rope_frequencies(table);
    std::vector<float> factors;
    for (size_t j = 0; j < plain.size(); j++) factors.push_back((float)(plain[j] / scaled[j]));
    return factors;
}
// The scaling with these factors, among the ones that models of the Llama 3 family use.
inline RopeScaling scaling_of_factors(ModelConfig c, const std::vector<float>& factors, const std::string& source) {
    c.rope_scaling.type = RopeScaling::Type::llama3;
    c.rope_scaling.factor = factors.empty() ? 1 : *std::max_element(factors.begin(), factors.end());
    for (c.rope_scaling.original = 16; c.rope_scaling.original <= 1 << 20; c.rope_scaling.original *= 2) {
        const std::vector<float> expected = rope_factors(c);
        const auto same = [](float x, float y) { return std::fabs(x - y) <= 1e-4f * std::fabs(y); };
        if (std::equal(factors.begin(), factors.end(), expected.begin(), expected.end(), same)) return c.rope_scaling;
    }
    fail("%s: the rotary frequency factors in %s are not Llama 3's, which is not supported", source.c_str(), gguf_rope_factors);
}

// The configuration described by the metadata and the tensors' names. has(name): whether there is such a tensor.
inline ModelConfig gguf_config(const nlohmann::json& metadata, const std::string& source,
                               const std::function<bool(const std::string&)>& has) {
    const GgufArchitecture& a = gguf_architecture(metadata, source);
    const detail::HfReader in{metadata, source};
    std::string key;  // of the value read last
    const auto named = [&](const char* name) { return (key = std::string(a.name) + "." + name).c_str(); };
    const auto number = [&](const char* name, double otherwise) {
        return detail::shortest_decimal(in.number(named(name), otherwise));
    };
    detail::check_gguf_keys(in, a);
    ModelConfig c;
    set_family(c, a.family);
    const auto tokens = metadata.find("tokenizer.ggml.tokens");
    c.V = tokens != metadata.end() && in.absent(named("vocab_size")) ? (int)tokens->size() : in.count(named("vocab_size"));
    c.T = in.count(named("context_length"));
    c.C = in.count(named("embedding_length"));
    c.L = in.count(named("block_count"));
    if (c.mixture.on()) {
        c.mixture.experts = in.count(named("expert_count"));
        c.mixture.topk = in.count(named("expert_used_count"));
    } else {
        for (const char* of_experts : {"expert_used_count", "expert_feed_forward_length"}) in.only(named(of_experts), 0);
    }
    const bool own_width = c.mixture.on() && !in.absent(named("expert_feed_forward_length"));
    c.F = in.count(named(own_width ? "expert_feed_forward_length" : "feed_forward_length"));
    const int without_key = in.count(named("feed_forward_length"), c.F);
    if (c.mixture.shared) c.mixture.shared = in.count(named("expert_shared_feed_forward_length"), without_key);
    else in.only(named("expert_shared_feed_forward_length"), 0);
    c.NH = in.count(named("attention.head_count"));
    c.NKV = in.count(named("attention.head_count_kv"), c.NH);
    if (c.NH < 1) in.wrong(named("attention.head_count"), "a number above 0");
    const int head_size = in.count(named("attention.key_length"), c.C / c.NH);
    if (head_size != c.C / c.NH) c.head_size = head_size;
    in.only(named("attention.value_length"), head_size);
    c.eps = number(c.norm == Norm::rmsnorm ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon", 1e-5);
    if (c.family == "gpt_neox")
        c.norm_place = in.flag(named("use_parallel_residual"), true) ? NormPlace::parallel : NormPlace::before;
    if (c.family == "falcon") c.norm_place = has("blk.0.attn_norm_2.weight") ? NormPlace::parallel : NormPlace::shared;
    if (c.position == Position::rope) {
        c.rope_base = number("rope.freq_base", 10000);
        const int rotated = in.count(named("rope.dimension_count"), head_size);
        c.rotary_fraction = rotated == head_size || head_size == 0 ? 1 : (double)rotated / head_size;
        read_gguf_scaling(in, a, c);
    }
    if (a.window_interval != 0) {
        c.window = in.count(named("attention.sliding_window"), c.family == "gemma2" ? 4096 : 0);
        c.full_interval = in.count(named("attention.sliding_window_pattern"), a.window_interval);
        c.local_rope_base = number("rope.freq_base_swa", c.family == "gemma3_text" ? 10000 : c.rope_base);
        if (c.local_rope_base == c.rope_base && c.family != "gemma3_text") c.local_rope_base = 0;
    }
    if (c.norm_plus_one) c.embedding_scale = std::sqrt((double)c.C);
    if (a.scaled_by_width == c.L) c.attention_scale = 1 / std::sqrt((double)c.C / c.NH);
    if (a.multipliers) {  // llama.cpp takes 0 for 1, and for the usual scale of scores
        c.attention_scale = number(gguf_attention_scale, 0);
        for (const auto& [name, factor] : gguf_multipliers) {
            if (c.family == "minicpm" && in.absent(named(name)))  // llama.cpp assumes MiniCPM 2B's
                fail("%s has no '%s'; HINT: convert the model again by llama.cpp's converter", source.c_str(), key.c_str());
            const bool by_depth = c.family == "minicpm" && factor == &ModelConfig::residual_scale;
            const double given = detail::shortest_decimal(in.number(named(name), 0), by_depth ? std::sqrt((double)c.L) : 1);
            c.*factor = given == 0 ? 1 : given;
        }
    }
    if (a.scaled_logits) c.logit_divisor = 1 / number("logit_scale", 1);
    c.attention_softcap = number("attn_logit_softcapping", 0);
    c.logit_softcap = number("final_logit_softcapping", 0);
    c.qkv_bias = has("blk.0.attn_q.bias") || has("blk.0.attn_qkv.bias");
    if (a.free_biases) c.proj_bias = has("blk.0.attn_output.bias");
    if (a.free_biases) c.mlp_bias = has("blk.0.ffn_up.bias");
    c.tied = !has("output.weight");
    return c;
}

// ---- tensors ---------------------------------------------------------------------------------------------------------------
// A tensor of a GGUF file: rows [row, row + rows) of ours; or a stack of matrices, each `next` rows after the one before.
struct GgufPart {
    std::string name;
    int row = 0, rows = 0;
    int paired_heads = 0;     // 0: the rows are in our order
    int stack = 0, next = 0;  // matrices; 0: it is not a stack

    int matrices() const { return std::max(stack, 1); }
    std::vector<int64_t> shape(const TensorSpec& spec) const {
        if (spec.vector()) return stack ? std::vector<int64_t>{stack, rows} : std::vector<int64_t>{rows};
        return stack ? std::vector<int64_t>{stack, rows, spec.cols} : std::vector<int64_t>{rows, spec.cols};
    }
};

// The parts of stacked experts; `names`: an expert's matrices, in the order of their rows.
inline std::vector<GgufPart> expert_parts(const ModelConfig& c, const GgufArchitecture& a, const TensorSpec& spec,
                                          const std::string& block, const std::vector<const char*>& names,
                                          const std::string& ending) {
    const int E = c.mixture.experts, each = spec.rows / E, rows = each / (int)names.size();
    std::vector<GgufPart> parts;
    for (int i = 0; i < (int)names.size(); i++) {
        if (!a.split_experts) parts.push_back({block + names[(size_t)i] + "_exps" + ending, i * rows, rows, 0, E, each});
        for (int e = 0; e < E && a.split_experts; e++)
            parts.push_back({format("%s%s.%d.weight", block.c_str(), names[(size_t)i], e), e * each + i * rows, rows});
    }
    return parts;
}

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
                                     {"sinks", "attn_sinks"},
                                     {"router", "ffn_gate_inp"},
                                     {"shared_gate", "ffn_gate_inp_shexp"},
                                     {"shared_fc2", "ffn_down_shexp"},
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
    if (c.mixture.on() && stem == "fc1") return expert_parts(c, a, spec, before, {"ffn_gate", "ffn_up"}, ending);
    if (c.mixture.on() && stem == "fc2") return expert_parts(c, a, spec, before, {"ffn_down"}, ending);
    if (c.norm_place == NormPlace::parallel && c.family == "falcon" && (stem == "norm1" || stem == "norm2"))
        return {part(stem == "norm1" ? "attn_norm_2" : "attn_norm", 0, 0)};
    if (stem == "norm2" && c.family == "gpt_oss") return {part("post_attention_norm", 0, 0)};
    if (stem == "qkv" && (spec.hf.size() == 3 || a.pairs)) {  // llama.cpp splits InternLM2's
        const int Q = c.NH * c.HS(), K = c.NKV * c.HS();
        return {{before + "attn_q" + ending, 0, Q, a.pairs ? c.NH : 0},
                {before + "attn_k" + ending, Q, K, a.pairs ? c.NKV : 0},
                {before + "attn_v" + ending, Q + K, K}};
    }
    if (stem == "shared_fc1") return {part("ffn_gate_shexp", 0, 0), part("ffn_up_shexp", 1, 0)};
    if (stem == "fc1" && spec.hf.size() == 2) return {part("ffn_gate", 0, 0), part("ffn_up", 1, 0)};
    const auto named = [&](const Names& n) { return stem == n.ours; };
    const Names* const end = before.empty() ? std::end(whole) : std::end(of_block);
    const Names* const found = std::find_if(before.empty() ? std::begin(whole) : std::begin(of_block), end, named);
    if (found == end || spec.hf.size() != 1)
        fail("GGUF has no name for the tensor '%s' of this model: llama.cpp cannot run it", spec.hf[0].name.c_str());
    return {part(found->theirs, 0, 0)};
}

// The row in the file of our row, where heads' rows (heads, 2, HS/2) are stored as (heads, HS/2, 2).
inline int paired_row(const GgufPart& part, int row) {
    const int HS = part.rows / part.paired_heads, half = row % HS / (HS / 2), i = row % (HS / 2);
    return row / HS * HS + 2 * i + half;
}
// Reorders rows of heads to the file's order, or back.
inline void reorder_pairs(const float* in, float* out, const GgufPart& part, int cols, bool back) {
    for (int row = 0; row < part.rows; row++) {
        const int paired = paired_row(part, row);
        const int from = back ? paired : row, to = back ? row : paired;
        std::copy_n(in + (size_t)from * cols, cols, out + (size_t)to * cols);
    }
}

// True if the file stores 1 + w: norms of the block, and of queries and keys.
inline bool is_one_more(const ModelConfig& c, const TensorSpec& spec) {
    return c.norm_plus_one && spec.name.find("norm") != std::string::npos;
}

// A choice of types for the matrices of a file, as in llama.cpp.
struct GgufFileType {
    const char* word;        // of --type
    int id;                  // general.file_type
    GgufType most;           // of most matrices
    GgufType fused, finest;  // of fused queries, keys and values; of the matrices whose errors matter most
};
inline constexpr GgufFileType gguf_file_types[] = {{"f32", 0, GgufType::F32, GgufType::F32, GgufType::F32},
                                                   {"f16", 1, GgufType::F16, GgufType::F16, GgufType::F16},
                                                   {"bf16", 32, GgufType::BF16, GgufType::BF16, GgufType::BF16},
                                                   {"q8_0", 7, GgufType::Q8_0, GgufType::Q8_0, GgufType::Q8_0},
                                                   {"q6_k", 18, GgufType::Q6_K, GgufType::Q6_K, GgufType::Q6_K},
                                                   {"q5_k_m", 17, GgufType::Q5_K, GgufType::Q6_K, GgufType::Q6_K},
                                                   {"q4_k_m", 15, GgufType::Q4_K, GgufType::Q5_K, GgufType::Q6_K}};

// True if llama.cpp's mixtures of types keep a matrix in the finest type: the head, and the values and the down projections in
// the first and last eighth of the layers and in every third between.
inline bool has_finest_type(const ModelConfig& c, const std::string& part) {
    if (part == "output.weight" || (c.tied && part == "token_embd.weight")) return true;
    if (part.find(".attn_v.") == std::string::npos && part.find(".ffn_down") == std::string::npos) return false;
    const int layer = atoi(part.c_str() + strlen("blk.")), eighth = c.L / 8;
    return layer < eighth || layer >= 7 * c.L / 8 || (layer - eighth) % 3 == 2;
}

// The type of a tensor's part in a file, chosen like llama.cpp's converter and quantizer. Rows that are not whole blocks have a
// type with smaller blocks.
inline GgufType gguf_type_of(const ModelConfig& c, const TensorSpec& spec, const std::string& part, const GgufFileType& file) {
    if (spec.vector() || spec.router() || spec.name == "wpe") return GgufType::F32;
    const bool fused = part.find(".attn_qkv.") != std::string::npos;
    GgufType type = has_finest_type(c, part) ? file.finest : fused ? file.fused : file.most;
    for (const GgufType next : {GgufType::Q8_0, GgufType::F16})
        if (spec.whole_cols % (int)gguf_type(type).elements) type = next;
    return type;
}

// Rejects a configuration that would not survive a round trip through GGUF.
inline void check_gguf_says(const ModelConfig& c, const GgufArchitecture& a) {
    std::vector<std::string> names;
    for (const TensorSpec& spec : ParameterTable(c).rows)
        for (const GgufPart& part : gguf_parts(c, a, spec)) names.push_back(part.name);
    const auto has = [&](const std::string& name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    ModelConfig said = gguf_config(gguf_metadata(c, a), "the GGUF file", has);
    const bool has_factors =
        c.rope_scaling.type == RopeScaling::Type::llama3 && (a.name == std::string("llama") || c.family == "exaone");
    if (has_factors) said.rope_scaling = c.rope_scaling;
    const auto every_choice = [](ModelConfig m) {
        m = canonical(m);
        m.family = "train_gpt";
        m.embedding_dropout = m.attention_dropout = m.hidden_dropout = m.init_std = 0;
        return nlohmann::json(to_hf_config(m, ""));
    };
    const nlohmann::json ours = every_choice(c), theirs = every_choice(said);
    for (const auto& [key, value] : ours.items()) {
        const nlohmann::json other = theirs.value(key, nlohmann::json());
        if (value == other || (value.is_number() && other.is_number() && value.get<float>() == other.get<float>())) continue;
        fail("the model's '%s' is %.200s, but GGUF's architecture %s can only express %.200s: llama.cpp cannot run it",
             key.c_str(), value.dump().c_str(), a.name, other.dump().c_str());
    }
}
