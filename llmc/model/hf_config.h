// config.json in Hugging Face's form, read and written, so that model directories work in transformers and here. A family's
// form is a list of keys, each of which reads and writes one part of the configuration, so the two directions cannot differ. A
// family can hold a model if writing its form and reading it back gives the same model: match_family tries one family after the
// other.
#pragma once
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "choices.h"
#include "families.h"
#include "hf_keys.h"

namespace detail {

// ---- the families' forms ----------------------------------------------------------------------------------------------------
using C = ModelConfig;

inline Key attention_dropout() { return number("attention_dropout", &C::attention_dropout, 0); }
inline Key hidden_dropout() { return number("hidden_dropout", &C::hidden_dropout, 0); }

// The keys of GPT-2 and GPT-J, with the class's dropouts, and `further` ones.
inline Keys gpt2_keys(double dropout, const Keys& further) {
    return {size("n_embd", &C::C),
            size("n_layer", &C::L),
            size("n_head", &C::NH),
            follows(&C::NKV, &C::NH, 1),
            size("n_positions", &C::T),
            size_or("n_inner", &C::F, &C::C, 4),
            plain_activation("activation_function"),
            number("layer_norm_epsilon", &C::eps, 1e-5),
            number("attn_pdrop", &C::attention_dropout, dropout),
            number("embd_pdrop", &C::embedding_dropout, dropout),
            number("resid_pdrop", &C::hidden_dropout, dropout),
            together(further)};
}
inline Keys gpt2_keys() {
    return gpt2_keys(
        0.1, {scale_attn_weights(), only("scale_attn_by_inverse_layer_idx", false), only("add_cross_attention", false)});
}
inline Keys gpt_neo_keys() {
    return {size("hidden_size", &C::C),
            size("num_layers", &C::L),
            size("num_heads", &C::NH),
            follows(&C::NKV, &C::NH, 1),
            size_or("intermediate_size", &C::F, &C::C, 4),
            size("max_position_embeddings", &C::T, 2048),
            plain_activation("activation_function"),
            number("layer_norm_epsilon", &C::eps, 1e-5),
            local_layers(),
            attention_dropout(),
            number("embed_dropout", &C::embedding_dropout, 0),
            number("resid_dropout", &C::hidden_dropout, 0)};
}
inline Keys bloom_keys() {
    return {size("hidden_size", &C::C, required, "n_embed"),
            size("n_layer", &C::L, required, "num_hidden_layers"),
            size("n_head", &C::NH, required, "num_attention_heads"),
            follows(&C::NKV, &C::NH, 1),
            follows(&C::F, &C::C, 4),
            size("seq_length", &C::T, 2048),
            number("layer_norm_epsilon", &C::eps, 1e-5),
            only_written("apply_residual_connection_post_layernorm", false),
            hidden_dropout(),
            attention_dropout()};
}
inline Keys opt_keys() {
    return {size("hidden_size", &C::C),
            size("ffn_dim", &C::F),
            size("num_hidden_layers", &C::L),
            size("num_attention_heads", &C::NH),
            follows(&C::NKV, &C::NH, 1),
            size("max_position_embeddings", &C::T, 2048),
            plain_activation("activation_function"),
            use_bias(true, "enable_bias"),
            width_again("word_embed_proj_dim"),
            only("do_layer_norm_before", true),
            only("layer_norm_elementwise_affine", true),
            only("_remove_final_layer_norm", false),
            only("layerdrop", 0.0),
            number("dropout", &C::hidden_dropout, 0.1),
            attention_dropout(),
            no_padding_token()};
}
// A dropout of attention is refused: transformers drops outputs of attention and MLP by the same key.
inline Keys mpt_keys() {
    return {size("d_model", &C::C),
            size("n_layers", &C::L),
            size("n_heads", &C::NH),
            follows(&C::NKV, &C::NH, 1),
            follows(&C::F, &C::C, 4),
            only("expansion_ratio", 4),
            size("max_seq_len", &C::T, 2048),
            number("layer_norm_epsilon", &C::eps, 1e-5),
            choice<Norm>("norm_type", &C::norm, {{"low_precision_layernorm", Norm::layernorm}, {"layernorm", Norm::layernorm}}),
            only("no_bias", true),
            only("logit_scale", nullptr),
            only("embedding_fraction", 1.0),
            only("emb_pdrop", 0.0),
            only("resid_pdrop", 0.0),
            within("attn_config",
                   {only("attn_type", "multihead_attention"), only("attn_pdrop", 0.0), only("clip_qkv", nullptr),
                    number_or_null("softmax_scale", &C::attention_scale, 0), only("prefix_lm", false), only("qk_ln", false),
                    only("attn_uses_sequence_id", false), only_written("alibi", true), only("alibi_bias_max", 8)})};
}
inline Keys falcon_keys() {
    return {size("hidden_size", &C::C, required, "n_embed"),
            size("num_hidden_layers", &C::L, required, "n_layer"),
            size("num_attention_heads", &C::NH, required, "n_head"),
            size_or("ffn_hidden_size", &C::F, &C::C, 4),
            size("max_position_embeddings", &C::T, 2048),
            plain_activation("activation"),
            number("layer_norm_epsilon", &C::eps, 1e-5),
            rope(),
            only("alibi", false),
            falcon_block(),
            use_bias(false, "bias"),
            only("apply_residual_connection_post_layernorm", false),
            hidden_dropout(),
            attention_dropout()};
}
// The sizes by the names that most families have, with the keys of their heads; then `further` keys. longest: the default
// sequence length.
inline Keys with_sizes(const Keys& heads, int longest, const Keys& further) {
    return {size("hidden_size", &C::C),
            size("intermediate_size", &C::F),
            size("num_hidden_layers", &C::L),
            size("num_attention_heads", &C::NH),
            together(heads),
            size("max_position_embeddings", &C::T, longest),
            together(further)};
}
inline Key grouped_heads() { return size_or("num_key_value_heads", &C::NKV, &C::NH, 1); }

inline Keys gpt_neox_keys() {
    return with_sizes({follows(&C::NKV, &C::NH, 1)}, 2048,
                      {plain_activation("hidden_act"), number("layer_norm_eps", &C::eps, 1e-5),
                       rope({"rotary_emb_base", 10000, "rotary_pct", 0.25}), parallel_residual(), attention_bias(true),
                       attention_dropout(), hidden_dropout()});
}
inline Keys phi_keys() {
    return with_sizes(
        {grouped_heads()}, 2048,
        {plain_activation("hidden_act"), number("layer_norm_eps", &C::eps, 1e-5),
         rope({"rope_theta", 10000, "partial_rotary_factor", 0.5}), only("qk_layernorm", false),
         number("embd_pdrop", &C::embedding_dropout, 0), number("resid_pdrop", &C::hidden_dropout, 0), attention_dropout()});
}
// The keys that Llama and its descendants share, and `further` keys.
inline Keys llama_keys(const Keys& further, int longest = 2048, int head_size = 0, double eps = 1e-6,
                       const RopeKeys& rope_keys = {}, const Key& activation = gated_activation("hidden_act")) {
    return with_sizes(
        {grouped_heads(), head_dim(head_size)}, longest,
        {activation, number("rms_norm_eps", &C::eps, eps), rope(rope_keys), together(further), attention_dropout()});
}
inline Keys starcoder2_keys() {
    return with_sizes({size("num_key_value_heads", &C::NKV, 2)}, 4096,
                      {plain_activation("hidden_act"), number("norm_epsilon", &C::eps, 1e-5), rope(), window({}),
                       use_bias(true), attention_dropout(), number("embedding_dropout", &C::embedding_dropout, 0),
                       number("residual_dropout", &C::hidden_dropout, 0)});
}
inline Keys stablelm_keys() {
    return with_sizes(
        {grouped_heads()}, 4096,
        {gated_activation("hidden_act"), number("layer_norm_eps", &C::eps, 1e-5),
         rope({"rope_theta", 10000, "partial_rotary_factor", 0.25}), flag("use_qkv_bias", &C::qkv_bias, false),
         only("qk_layernorm", false), only("use_parallel_residual", false), attention_dropout(), hidden_dropout()});
}
inline Keys nemotron_keys() {
    return with_sizes({grouped_heads(), head_dim(0)}, 4096,
                      {plain_activation("hidden_act"), number("norm_eps", &C::eps, 1e-5),
                       rope({"rope_theta", 10000, "partial_rotary_factor", 0.5}), attention_bias(false),
                       flag("mlp_bias", &C::mlp_bias, false), attention_dropout()});
}
// StarCoder 1: a GPT-2 with one key/value head, whose matrices are not transposed.
inline Keys bigcode_keys() {
    return {together(gpt2_keys()),
            only_written("multi_query", true),
            only("num_key_value_heads", 1),
            {[](const HfReader&, ModelConfig& c) { c.NKV = 1; }, [](Json&, const ModelConfig&) {}}};
}
inline Keys cohere_keys(double rope_base, const Keys& further) {
    return with_sizes({grouped_heads(), head_dim(0)}, 8192,
                      {gated_activation("hidden_act"), number("layer_norm_eps", &C::eps, 1e-5), rope({"rope_theta", rope_base}),
                       logit_scale(), attention_bias(false), attention_dropout(), no_padding_token(), together(further)});
}
// Our own form, which supports every choice.
inline Keys own_keys() {
    RopeKeys rope_keys;
    rope_keys.fraction = "partial_rotary_factor";
    return llama_keys({choice<Norm>("normalization", &C::norm, config_words(choices_of_norm)),
                       choice<NormPlace>("norm_place", &C::norm_place, config_words(choices_of_norm_place)),
                       flag("norm_bias", &C::norm_bias, true),
                       flag("norm_plus_one", &C::norm_plus_one, false),
                       choice<QkNorm>("qk_norm", &C::qk_norm, config_words(choices_of_qk_norm)),
                       choice<Position>("positions", &C::position, config_words(choices_of_position)),
                       size("position_offset", &C::position_offset, 0),
                       number("rope_local_base_freq", &C::local_rope_base, 0),
                       size("no_rope_layer_interval", &C::nope_interval, 0),
                       choice<Activation>("activation", &C::activation, config_words(activations)),
                       flag("qkv_bias", &C::qkv_bias, false),
                       flag("proj_bias", &C::proj_bias, false),
                       flag("mlp_bias", &C::mlp_bias, false),
                       flag("head_bias", &C::head_bias, false),
                       number("attention_scale", &C::attention_scale, 0),
                       number_or_null("attn_logit_softcapping", &C::attention_softcap, 0),
                       number_or_null("final_logit_softcapping", &C::logit_softcap, 0),
                       flag("attention_sinks", &C::sinks, false),
                       size_or_null("sliding_window", &C::window, 0),
                       size("full_attention_interval", &C::full_interval, 0),
                       size("full_attention_offset", &C::full_offset, 0),
                       number("embedding_scale", &C::embedding_scale, 1),
                       number("residual_scale", &C::residual_scale, 1),
                       number("logit_divisor", &C::logit_divisor, 1),
                       flag("embedding_norm", &C::embedding_norm, false),
                       number("embedding_dropout", &C::embedding_dropout, 0),
                       hidden_dropout(),
                       own_mixture()},
                      2048, 0, 1e-5, rope_keys);
}

// The keys of a family's config.json.
inline const Keys& keys_of(const std::string& family) {
    const Key scale = root_of_width(), biases = attention_bias(false), mlp_bias = flag("mlp_bias", &C::mlp_bias, false);
    const Key causal = only("use_bidirectional_attention", false), scalar = query_pre_attn_scalar();
    const Key unpadded = no_padding_token();
    const Key attention_cap = number_or_null("attn_logit_softcapping", &C::attention_softcap, 50);
    const Key cap2 = number_or_null("final_logit_softcapping", &C::logit_softcap, 30);
    const Key cap3 = number_or_null("final_logit_softcapping", &C::logit_softcap, 0);
    const Key qwen_window = window({4096, true, true, 0, false, true});
    const Key gemma_activation = gated_activation("hidden_activation");
    const Key jitter = only("router_jitter_noise", 0.0);
    RopeKeys mixtral_rope, smollm3_rope, gemma3_rope, gpt_oss_rope, olmo3_rope;
    olmo3_rope.by_kind = true;
    const RopeKeys half_rope{"rope_theta", 10000, "partial_rotary_factor", 0.5};
    RopeKeys ernie_rope, helium_rope;
    ernie_rope.otherwise = 500000;
    helium_rope.otherwise = 100000;
    const Key qkv_bias = flag("attention_bias", &C::qkv_bias, false);
    gpt_oss_rope.otherwise = 150000;
    mixtral_rope.otherwise = 1e6;
    smollm3_rope.otherwise = 2e6;
    gemma3_rope.otherwise = 1e6;
    gemma3_rope.local = "rope_local_base_freq";
    static const std::vector<std::pair<const char*, Keys>> forms = {
        {"gpt2", gpt2_keys()},
        {"bloom", bloom_keys()},
        {"gpt_neox", gpt_neox_keys()},
        {"llama", llama_keys({biases, mlp_bias, no_window(), only("pretraining_tp", 1)})},
        {"mistral", llama_keys({window({4096})}, 131072)},
        {"qwen2", llama_keys({qwen_window}, 32768)},
        {"qwen3", llama_keys({biases, qwen_window}, 32768, 128)},
        {"mixtral", llama_keys({experts("num_local_experts"), jitter, window({})}, 131072, 0, 1e-5, mixtral_rope)},
        {"qwen2_moe",
         llama_keys({flag("qkv_bias", &C::qkv_bias, true), window({4096, true, false, 0, false, true}), experts("num_experts"),
                     norm_topk_prob(), expert_width(1408), dense_layers(), shared_expert(5632)},
                    32768)},
        {"qwen3_moe", llama_keys({biases, window({4096, true, false, 0, false, false, false, true}), experts("num_experts"),
                                  norm_topk_prob(), expert_width(768), dense_layers()},
                                 32768)},
        {"olmoe",
         llama_keys({unpadded, biases, no_window(), experts("num_experts"), norm_topk_prob(), only("clip_qkv", nullptr)}, 4096,
                    0, 1e-5)},
        {"gpt_oss", llama_keys({default_yarn(), attention_bias(true), experts("num_local_experts"),
                                window({128, false, false, 2, false, true, true})},
                               131072, 64, 1e-5, gpt_oss_rope, clamped_swiglu())},
        {"smollm3", llama_keys({unpadded, biases, mlp_bias, no_rope_layers(), window({0, true, false, 0, false, true})}, 32768,
                               0, 1e-6, smollm3_rope)},
        {"olmo2", llama_keys({unpadded, biases}, 2048, 0, 1e-5)},
        {"gemma", llama_keys({unpadded, gemma_activation, scale, biases, causal}, 8192, 256, 1e-6, {},
                             gated_activation("hidden_act", true))},
        {"gemma2", llama_keys({unpadded, scale, biases, causal, scalar, attention_cap, cap2,
                               window({4096, false, false, 2, false, true, true})},
                              8192, 256, 1e-6, {}, gemma_activation)},
        {"gemma3_text", llama_keys({unpadded, scale, biases, causal, scalar, only("attn_logit_softcapping", nullptr), cap3,
                                    window({4096, false, false, 6, true, true, true})},
                                   131072, 256, 1e-6, gemma3_rope, gemma_activation)},
        {"olmo3",
         llama_keys({unpadded, biases, window({4096, false, false, 4, false, true, true})}, 2048, 0, 1e-5, olmo3_rope)},
        {"ministral", llama_keys({window({4096, false, false, 0, false, true})}, 131072)},
        {"seed_oss", llama_keys({flag("attention_bias", &C::qkv_bias, true), flag("attention_out_bias", &C::proj_bias, false),
                                 mlp_bias, number("residual_dropout", &C::hidden_dropout, 0)},
                                524288, 128)},
        {"arcee", llama_keys({biases, mlp_bias, no_window()}, 4096, 0, 1e-5, {}, plain_activation("hidden_act"))},
        {"exaone4", llama_keys({window({4096, false, false, 4, false, true}), positions_in_windows(4096)}, 2048, 0, 1e-5)},
        {"starcoder2", starcoder2_keys()},
        {"stablelm", stablelm_keys()},
        {"phi3", llama_keys({unpadded, phi3_scaling(), window({}), number("embd_pdrop", &C::embedding_dropout, 0),
                             number("resid_pdrop", &C::hidden_dropout, 0)},
                            4096, 0, 1e-5, {"rope_theta", 10000, "partial_rotary_factor", 1})},
        {"ernie4_5", llama_keys({unpadded, use_bias(false)}, 131072, 128, 1e-5, ernie_rope)},
        {"helium", llama_keys({unpadded, qkv_bias, mlp_bias}, 4096, 128, 1e-8, helium_rope)},
        {"glm", llama_keys({unpadded, flag("attention_bias", &C::qkv_bias, true)}, 131072, 128, 1.5625e-7, half_rope)},
        {"glm4", llama_keys({unpadded, flag("attention_bias", &C::qkv_bias, true)}, 131072, 128, 1.5625e-7, half_rope)},
        {"nemotron", nemotron_keys()},
        {"gpt_bigcode", bigcode_keys()},
        {"granite", llama_keys({multipliers(), biases, no_window(), mlp_bias})},
        {"granitemoe", llama_keys({multipliers(), biases, no_window(), experts("num_local_experts")})},
        {"minicpm",
         llama_keys({depth_multipliers(), biases, no_window(), only("sparse_config", nullptr), only("num_experts", 0)})},
        {"cohere", cohere_keys(500000, {only("use_qk_norm", false)})},
        {"cohere2", cohere_keys(10000, {window({4096, false, false, 4, true, true, true}), positions_in_windows(4096)})},
        {"opt", opt_keys()},
        {"internlm2", llama_keys({attention_bias(true, "bias"), no_window()}, 2048)},
        {"mpt", mpt_keys()},
        {"falcon", falcon_keys()},
        {"phi", phi_keys()},
        {"gptj", gpt2_keys(0, {rotary_dim()})},
        {"codegen", gpt2_keys(0, {rotary_dim(), width_in_shards(4)})},
        {"internlm3",
         llama_keys({only("attention_bias", false), only("mlp_bias", false), only("qkv_bias", false), only("bias", false)},
                    32768, 128, 1e-5)},
        {"exaone",
         {renamed({{"num_layers", "num_hidden_layers"},
                   {"layer_norm_epsilon", "rms_norm_eps"},
                   {"activation_function", "hidden_act"}},
                  llama_keys({only("attention_bias", false), only("mlp_bias", false),
                              number("embed_dropout", &C::embedding_dropout, 0)},
                             4096, 0, 1e-5, ernie_rope))}},
        {"gpt_neo", gpt_neo_keys()},
        {"train_gpt", own_keys()},
    };
    const auto found = std::find_if(forms.begin(), forms.end(), [&](const auto& form) { return family == form.first; });
    CHECK(found != forms.end(), "family %s", family.c_str());
    return found->second;
}

// Defaults that the text part of a multimodal Gemma 3 omits.
inline const nlohmann::json& gemma3_defaults() {
    static const nlohmann::json defaults = {{"vocab_size", 262208},    {"hidden_size", 2304},      {"intermediate_size", 9216},
                                            {"num_hidden_layers", 26}, {"num_attention_heads", 8}, {"num_key_value_heads", 4}};
    return defaults;
}

}  // namespace detail

// dtype: may be empty, if no file is written. ids: bos_token_id and the like.
inline nlohmann::ordered_json to_hf_config(const ModelConfig& c, const std::string& dtype,
                                           const nlohmann::ordered_json& ids = nlohmann::ordered_json::object()) {
    nlohmann::ordered_json j;
    j["architectures"] = {family_of(c).architecture};
    j["model_type"] = c.family;
    j["vocab_size"] = c.V;
    for (const detail::Key& key : detail::keys_of(c.family)) key.write(j, c);
    j["initializer_range"] = c.init_std;
    j["tie_word_embeddings"] = c.tied;
    j.update(ids);
    if (!dtype.empty()) j["torch_dtype"] = dtype;
    j["use_cache"] = true;
    return j;
}

namespace detail {

// The part of a config.json that describes the text model.
inline nlohmann::json text_config(const nlohmann::json& file, const std::string& source) {
    if (!file.is_object()) fail("%s does not hold a JSON object", source.c_str());
    if (file.value("model_type", nlohmann::json()) != "gemma3" || !file.contains("text_config") ||
        !file["text_config"].is_object())
        return file;
    nlohmann::json j = gemma3_defaults();
    j.update(file["text_config"]);
    j["model_type"] = "gemma3_text";
    return j;
}

// The type of weights, which is only checked: the files have their own. transformers accepts floating-point types.
inline void check_dtype(const HfReader& in, const char* key) {
    const std::string word = in.text(key, "float32");
    for (const char* known : {"float64", "double", "float32", "float", "float16", "half", "bfloat16"})
        if (word == known) return;
    if (word.rfind("float8_", 0) != 0) in.wrong(key, "float32, float16, bfloat16, float64 or an 8-bit type, \"float8_...\",");
}
// The ids of a token, or of several. Ids outside of the vocabulary are allowed (Llama 1's padding is -1).
inline std::vector<int64_t> ids_of(const HfReader& in, const char* key) {
    std::vector<int64_t> ids;
    if (in.absent(key)) return ids;
    for (const nlohmann::json& id : in.j[key].is_array() ? in.j[key] : nlohmann::json::array({in.j[key]})) {
        if (!id.is_number_integer()) in.wrong(key, "the id of a token, a list of ids, or null");
        ids.push_back(id.is_number_unsigned() ? (int64_t)std::min(id.get<uint64_t>(), (uint64_t)INT64_MAX) : id.get<int64_t>());
    }
    return ids;
}
inline constexpr const char* keys_of_ids[] = {"bos_token_id", "eos_token_id", "pad_token_id"};

// Keys that change nothing here, of which transformers rejects other types.
inline void check_idle_keys(const HfReader& in) {
    for (const char* key : keys_of_ids) ids_of(in, key);
    for (const char* key : {"torch_dtype", "dtype"}) check_dtype(in, key);
    in.flag("use_cache", true);
}

inline ModelConfig read_config_keys(const HfReader& in) {
    const std::string type = in.text("model_type", "");
    const Family* family = find_family(type);
    if (!family) {
        const std::string known = joined(families(), [](const Family& f) { return f.name; });
        fail_unsupported("%s: model_type is '%s'; supported are %s", in.source.c_str(), type.c_str(), known.c_str());
    }
    ModelConfig c;
    set_family(c, type);
    if (const char* key = "quantization_config"; !in.absent(key)) {  // the tensors' names show the rest
        const nlohmann::json& q = in.j[key];
        if (!q.is_object()) in.wrong(key, "an object");
        const nlohmann::json method = q.value("quant_method", nlohmann::json());
        const bool mxfp4 = family->names.transposes_experts;
        if (!(mxfp4 && method == "mxfp4") && !(method == "bitsandbytes" && q.value("load_in_4bit", nlohmann::json()) == true))
            in.unsupported(key, std::string(mxfp4 ? "the 'quant_method' \"mxfp4\" or " : "") +
                                    "bitsandbytes in 4 bits; HINT: take the model that was quantized, or widen this one with "
                                    "transformers: from_pretrained(DIR).dequantize().save_pretrained(OUT)");
    }
    c.V = in.count("vocab_size");
    for (const Key& key : keys_of(type)) key.read(in, c);
    c.tied = in.flag("tie_word_embeddings", c.tied);
    c.init_std = in.number("initializer_range", 0.02);
    check_idle_keys(in);
    return canonical(c);
}

// Keys that do not change a model's results: the file's origin, generation settings, and fields that transformers stores for
// other kinds of models. Keys that start with _ are private to it.
inline bool has_no_effect(const std::string& key) {
    static const std::string keys =
        " architectures transformers_version init_std torch_dtype dtype use_cache auto_map cache_implementation "
        "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id "
        "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
        "begin_suppress_tokens bad_words_ids max_length min_length do_sample early_stopping num_beams "
        "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
        "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
        "exponential_decay_length_penalty remove_invalid_values return_dict return_dict_in_generate "
        "output_scores output_attentions output_hidden_states torchscript use_bfloat16 tf_legacy_loss "
        "pruned_heads chunk_size_feed_forward is_decoder is_encoder_decoder cross_attention_hidden_size "
        "tie_encoder_decoder finetuning_task id2label label2id num_labels problem_type task_specific_params "
        "tokenizer_class prefix gradient_checkpointing classifier_dropout classifier_dropout_prob "
        "summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx "
        "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32 masked_softmax_fusion "
        "bias_dropout_fusion skip_bias_add skip_bias_add_qkv slow_but_exact offset_alibi pretraining_tp max_window_layers "
        "output_router_logits router_aux_loss_coef experts_per_token initial_context_length attn_implementation "
        "attn_impl init_device init_config learned_pos_emb tokenizer_name verbose "
        "hidden_act full_attention sliding_attention type original_max_position_embeddings ";
    return key.empty() || key[0] == '_' || keys.find(' ' + key + ' ') != std::string::npos;
}

}  // namespace detail

// Reads a config.json. Unsupported features are refused by name, never ignored. `source` names the file.
inline ModelConfig from_hf_config(const nlohmann::json& file, const std::string& source) {
    const nlohmann::json j = detail::text_config(file, source);
    return detail::read_config_keys({j, source});
}

// Unsupported keys of a config.json, which may change the results of other programs but have no effect here. Keys inside an
// object are listed with its name: rope_scaling.factor.
inline std::vector<std::string> unknown_keys(const nlohmann::json& file, const std::string& source) {
    const nlohmann::json j = detail::text_config(file, source);
    std::set<std::string> read;
    detail::read_config_keys({j, source, &read});
    std::vector<std::string> unknown;
    const auto look = [&](const nlohmann::json& object, const std::string& before) {
        for (const auto& [key, value] : object.items()) {
            const bool off = value.is_null() || value == false || (value.is_structured() && value.empty());
            if (!off && !read.count(key) && !detail::has_no_effect(key)) unknown.push_back(before + key);
        }
    };
    look(j, "");
    for (const char* key : {"rope_scaling", "rope_parameters", "attn_config"})
        if (j.contains(key) && j[key].is_object()) look(j[key], key + std::string("."));
    return unknown;
}

// Token ids of a config.json that its vocabulary does not have: "'eos_token_id' 100000".
inline std::vector<std::string> ids_outside_vocabulary(const nlohmann::json& file, const std::string& source) {
    const nlohmann::json j = detail::text_config(file, source);
    const detail::HfReader in{j, source};
    std::vector<std::string> outside;
    for (const char* key : detail::keys_of_ids)
        for (const int64_t id : detail::ids_of(in, key))
            if (id < 0 || id >= in.count("vocab_size")) outside.push_back(format("'%s' %lld", key, (long long)id));
    return outside;
}

// True if both are the same model, even in different families. Dropout is part of training, not of the model.
inline bool same_model(const ModelConfig& a, const ModelConfig& b) {
    const auto all = [](ModelConfig c) {
        c = canonical(c);
        c.family = "train_gpt";
        c.embedding_dropout = c.attention_dropout = c.hidden_dropout = 0;
        return to_hf_config(c, "");
    };
    return all(a) == all(b);
}

// True if files of this family can represent all of c.
inline bool holds(const Family& family, ModelConfig c) {
    // transformers' classes require this although they have a head_dim.
    for (const char* name : {"llama", "gemma2", "gemma3_text", "internlm3", "exaone"})
        if (std::string(name) == family.name && c.C % c.NH) return false;
    // Their classes ignore head_dim: OLMoE's in transformers 4, Cohere 2's also in 5.
    for (const char* name : {"olmoe", "cohere2", "internlm2"})
        if (std::string(name) == family.name && c.HS() * c.NH != c.C) return false;
    c.family = family.name;
    try {
        return same_model(from_hf_config(to_hf_config(c, ""), family.name), c);
    } catch (const Error&) {  // not representable
        return false;
    }
}

// Sets c's family to one whose files hold it: its own, else the first that does; train_gpt holds any, but no other program
// reads it.
inline void match_family(ModelConfig& c) {
    if (holds(family_of(c), c)) return;
    for (const Family& f : families())
        if (holds(f, c)) return void(c.family = f.name);
    CHECK(false, "no family holds the model");
}

// ---- errors that name a file's keys -----------------------------------------------------------------------------------------
namespace detail {

// A quantity in the messages of check_config(): an option, or words for a number computed from a key. keys: its names in
// config.json, a dot before one of an object's, and its name in GGUF.
struct NameInFiles {
    const char *in_messages, *keys;
};
inline constexpr NameInFiles names_in_files[] = {
    {"--num-layers", "num_hidden_layers n_layer n_layers num_layers block_count"},
    {"--hidden-size", "hidden_size n_embd n_embed d_model embedding_length"},
    {"--num-attention-heads", "num_attention_heads n_head n_heads attention.head_count"},
    {"--num-query-groups", "num_key_value_heads num_kv_heads attention.head_count_kv"},
    {"--ffn-hidden-size", "intermediate_size n_inner ffn_dim ffn_hidden_size feed_forward_length"},
    {"--kv-channels", "head_dim attention.key_length"},
    {"--seq-length", "max_position_embeddings n_positions seq_length max_seq_len context_length"},
    {"--vocab-size", "vocab_size"},
    {"--norm-epsilon",
     "rms_norm_eps layer_norm_epsilon layer_norm_eps norm_epsilon norm_eps attention.layer_norm_rms_epsilon "
     "attention.layer_norm_epsilon"},
    {"--init-method-std", "initializer_range"},
    {"--attention-dropout", "attention_dropout attn_pdrop"},
    {"--hidden-dropout", "hidden_dropout resid_pdrop residual_dropout dropout"},
    {"--embedding-dropout", "embedding_dropout embd_pdrop embed_dropout"},
    {"--rotary-base-local", "rope_local_base_freq rope.freq_base_swa"},
    {"--rotary-base", "rope_parameters.rope_theta rope_theta rotary_emb_base rope.freq_base"},
    {"--rotary-percent",
     "rope_parameters.partial_rotary_factor partial_rotary_factor rotary_pct rotary_dim rope.dimension_count"},
    {"--rope-scaling-factor", "rope_scaling.factor rope_parameters.factor rope.scaling.factor"},
    {"--window-size", "sliding_window attention.sliding_window"},
    {"--attn-logit-softcapping", "attn_logit_softcapping"},
    {"--final-logit-softcapping", "final_logit_softcapping"},
    {"--embedding-scale", "embedding_multiplier scale_emb embedding_scale"},
    {"the factor of attention scores",
     "query_pre_attn_scalar attention_multiplier attention_scale attn_config.softmax_scale attention.scale"},
    {"factor of residual terms", "residual_multiplier scale_depth residual_scale"},
    {"the divisor of logits", "logits_scaling logit_scale dim_model_base logit_divisor"},
    {"--num-experts", "num_experts num_local_experts expert_count"},
    {"--moe-router-topk-scaling-factor", "routed_scaling_factor"},
    {"--moe-router-topk", "num_experts_per_tok expert_used_count"},
    {"--moe-router-num-groups", "n_group"},
    {"--moe-router-group-topk", "topk_group"},
    {"--moe-ffn-hidden-size", "moe_intermediate_size expert_feed_forward_length"},
    {"--moe-shared-expert-intermediate-size", "shared_expert_intermediate_size expert_shared_feed_forward_length"}};

// The first of these keys that the file has; prefix: of GGUF's keys, "llama.".
inline std::string key_in_file(const nlohmann::json& j, const std::string& keys, const std::string& prefix) {
    std::istringstream words(keys);
    for (std::string key; words >> key;) {
        if (j.contains(prefix + key)) return prefix + key;
        const size_t dot = key.find('.');
        const std::string object = key.substr(0, dot);
        if (dot != std::string::npos && j.contains(object) && j[object].is_object() && j[object].contains(key.substr(dot + 1)))
            return key;
    }
    return "";
}
// The message with a file's keys in place of options, and without hints on options.
inline std::string with_keys(std::string message, const nlohmann::json& j, const std::string& prefix) {
    message.erase(std::min(message.find("HINT:"), message.size()));
    message.erase(message.find_last_not_of(" ;.") + 1);
    for (const auto& [name, keys] : names_in_files) {
        const std::string key = key_in_file(j, keys, prefix), first = std::string(keys).substr(0, strcspn(keys, " "));
        const size_t length = strlen(name);
        for (size_t at = 0; (at = message.find(name, at)) != std::string::npos; at += length) {
            const char next = message.c_str()[at + length];
            if (name[0] != '-' && !key.empty()) message.insert(at + length, " (from '" + key + "')");
            if (name[0] == '-' && next != '-') message.replace(at, length, "'" + (key.empty() ? first : key) + "'");
        }
    }
    return message;
}

}  // namespace detail

// check_config() for the configuration in a file, whose keys its errors name. prefix: of GGUF's keys.
inline void check_config_of(const nlohmann::json& file, const std::string& source, const ModelConfig& c,
                            const std::string& prefix = "") {
    try {
        check_config(c);
    } catch (const Error& e) {
        const nlohmann::json j = detail::text_config(file, source);
        fail("%s: %s; HINT: correct it, or copy or download the file again", source.c_str(),
             detail::with_keys(e.what(), j, prefix).c_str());
    }
}
