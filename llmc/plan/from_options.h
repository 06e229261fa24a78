// Translates the options of a training run for parts that do not know options: the model's configuration, the layout of the
// ranks, FP8, the guard, the data.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../data/dataloader.h"
#include "../tokenizer/tokenizer.h"
#include "../model/fp8_state.h"
#include "../model/adapters.h"
#include "../model/choices.h"
#include "../model/flops.h"
#include "../model/mesh.h"
#include "../model/hf_config.h"
#include "../model/layer_pattern.h"
#include "../model/model_config.h"
#include "../model/presets.h"
#include "../ops.h"
#include "../optimizer/muon.h"
#include "../parallel/pipeline_schedule.h"
#include "../parallel/ranks.h"
#include "../checkpoint/adapter_files.h"
#include "../checkpoint/checkpoint.h"
#include "../options/cli.h"
#include "../options/options.h"
#include "guard.h"
#include "../options/size_rule.h"
#include "../checkpoint/agreement.h"
#include "../checkpoint/training_state.h"

inline std::string run_name(const TrainOptions& o) {
    return o.name.empty() ? std::filesystem::weakly_canonical(o.out).filename().string() : o.name;
}

inline void check_backend_takes(const ModelConfig& c) {
    const std::string wrong = be::attention_limits(c.HS());
    if (!wrong.empty()) fail_usage("%s", wrong.c_str());
}

namespace detail {

// Rejects options that conflict with adapters, which the option `trains` enables.
inline void check_options_of_adapters(const TrainOptions& o, const char* trains) {
    refuse_together(optimizer_row(o.optimizer).whole_matrices, "--optimizer " + o.optimizer, trains,
                    "it only supports a model's own matrices", "--optimizer adamw");
}

inline LoraConfig lora_of(const TrainOptions& o, const ModelConfig& c) {
    LoraConfig lora;
    if (!o.lora_rank) {
        refuse_without(o.lora_alpha.has_value(), "--lora-alpha", "--lora-rank");
        refuse_without(o.lora_dropout.has_value(), "--lora-dropout", "--lora-rank");
        refuse_without(!o.lora_targets.empty(), "--lora-targets", "--lora-rank");
        return lora;
    }
    check_options_of_adapters(o, "--lora-rank");
    lora.rank = o.lora_rank;
    lora.alpha = o.lora_alpha.value_or(2.0 * o.lora_rank);
    lora.dropout = o.lora_dropout.value_or(0);
    lora.modules = lora_modules(c, o.lora_targets.empty() ? Strings{"all"} : o.lora_targets);
    ModelConfig adapted = c;
    adapted.lora = lora;
    for (const LoraTarget& t : lora_targets(adapted))
        refuse_together(lora.dropout > 0 && t.parameter && is_adapted(adapted, t.module),
                        format("--lora-dropout %g", lora.dropout), "adapters on " + t.module,
                        "PEFT has no dropout for experts that are one tensor", "--lora-dropout 0, or --lora-targets qkv proj");
    if (const int most = most_lora_rank(adapted); lora.rank > most)
        fail_usage(
            "--lora-rank %d is too large: the adapted matrices have ranks of at most %d, and training them without adapters "
            "would take fewer parameters; HINT: --lora-rank 16, or omit --lora-rank to train the whole model",
            lora.rank, most);
    return lora;
}

inline VirtualTokensConfig virtual_tokens_of(const TrainOptions& o, const ModelConfig& c) {
    VirtualTokensConfig found;
    if (!o.prompt_tokens) {
        refuse_without(!o.prompt_encoder.empty(), "--prompt-encoder", "--prompt-tokens");
        refuse_without(o.prompt_encoder_width, "--prompt-encoder-width", "--prompt-tokens");
        refuse_without(!o.prompt_init_text.empty(), "--prompt-init-text", "--prompt-tokens");
        return found;
    }
    check_options_of_adapters(o, "--prompt-tokens");
    check_virtual_tokens_of(c);
    refuse_together(o.dpo_beta.has_value(), "--dpo-beta", "--prompt-tokens", "",
                    "--lora-rank 16 trains adapters on pairs of answers");
    refuse_together(o.lora_rank, "--lora-rank", "--prompt-tokens", "both are adapters");
    found.lstm = o.prompt_encoder == "lstm";
    const bool encoded = o.prompt_encoder == "mlp" || found.lstm;
    const std::string encoder = "--prompt-encoder " + o.prompt_encoder;
    refuse_without(o.prompt_encoder_width && !encoded, "--prompt-encoder-width", "--prompt-encoder mlp or lstm");
    refuse_together(encoded && !o.prompt_init_text.empty(), "--prompt-init-text", encoder,
                    "a text cannot initialize the encoder's output");
    refuse_together(encoded && o.ema_decay > 0, "--ema-decay", encoder, "the encoder's weights are not averaged yet");
    refuse_together(o.reset_attention_mask, "--reset-attention-mask", "--prompt-tokens",
                    "later documents of a sample could not attend to the virtual tokens at its start",
                    "omit one, or use train_gpt prepare --chat, where each conversation has its own virtual tokens");
    if (o.prompt_tokens >= c.T || (int64_t)o.prompt_tokens * c.C > INT_MAX)
        fail_usage("--prompt-tokens %d leaves no room in the model's maximum of %d tokens; HINT: fewer", o.prompt_tokens, c.T);
    found.count = o.prompt_tokens;
    found.encoder_width = encoded ? o.prompt_encoder_width ? o.prompt_encoder_width : c.C : 0;
    found.text = o.prompt_init_text;
    return found;
}

}  // namespace detail

// Relates the sizes of c to the sizes of the model whose hyperparameters are given.
inline Parametrization parametrization_of(const TrainOptions& o, const ModelConfig& c) {
    const bool on = o.parametrization != "standard", deep = o.parametrization == "completep";
    const struct {
        const char* size;
        int given;
        bool counts;
        const char* with;
    } sizes[] = {{"width", o.mup_base_width, on, "mup"},
                 {"head-size", o.mup_base_head_size, on, "mup"},
                 {"depth", o.mup_base_depth, deep, "completep"}};
    for (const auto& s : sizes)
        refuse_idle(s.given && !s.counts, std::string("--mup-base-") + s.size, std::string("--parametrization ") + s.with);
    if (!on) return {};
    const std::string kind = "--parametrization " + o.parametrization;
    refuse_without(!o.mup_base_width || (deep && !o.mup_base_depth), kind,
                   "the size of the base model, whose learning rate is given",
                   std::string("--mup-base-width 256") + (deep ? " --mup-base-depth 8" : ""));
    refuse_together(o.lora_rank, kind, "--lora-rank", "adapters have no such factors");
    refuse_together(o.prompt_tokens, kind, "--prompt-tokens", "virtual tokens have no such factors");
    refuse_together(optimizer_row(o.optimizer).neurons, kind, "--optimizer normuon", "", "--optimizer adamw or muon");
    refuse_together(!o.size.empty() && !o.given.count("lr"), "--size", kind,
                    "--size sets this model's learning rate, but the base's is needed", "give the base's with --lr");
    Parametrization p;
    p.width = (double)c.C / o.mup_base_width;
    if (deep) p.depth = (double)c.L / o.mup_base_depth;
    if (o.mup_base_head_size) p.head_size = (double)c.HS() / o.mup_base_head_size;
    return p;
}

// Adds the adapters of the options to the model c, and the format of its frozen weights.
inline void set_adapters(const TrainOptions& o, ModelConfig& c) {
    c.base_format = weight_format(o.quantize_base);
    if (c.quantized()) {
        const std::string option = "--quantize-base " + o.quantize_base;
        refuse_without(!o.lora_rank && !o.prompt_tokens, option, "a frozen model",
                       "--lora-rank 16 trains adapters on it; a model whose own weights are trained cannot be quantized");
        refuse_together(!o.fp8_format.empty(), option, "--fp8-format", "products with quantized weights are in bf16",
                        "--quantize-base none, or no --fp8-format");
        refuse_quantized_mixture(c);
        refuse_without(c.base_format == WeightFormat::gguf && c.coded.empty(), option, "--model with a GGUF file");
    }
    c.lora = detail::lora_of(o, c);
    c.virtual_tokens = detail::virtual_tokens_of(o, c);
}

// Sets options that are not given to describe the adapters of c.
inline void take_adapter_options(TrainOptions& o, const ModelConfig& c) {
    if (c.lora.on()) {
        if (!o.lora_rank) o.lora_rank = c.lora.rank;
        if (!o.lora_alpha) o.lora_alpha = c.lora.alpha;
        if (!o.lora_dropout) o.lora_dropout = c.lora.dropout;
        if (o.lora_targets.empty()) o.lora_targets = c.lora.modules;
        return;
    }
    if (!o.prompt_tokens) o.prompt_tokens = c.virtual_tokens.count;
    if (o.prompt_encoder.empty() && c.virtual_tokens.encoded()) o.prompt_encoder = c.virtual_tokens.encoder();
    if (!o.prompt_encoder_width && o.prompt_encoder != "none") o.prompt_encoder_width = c.virtual_tokens.encoder_width;
    if (o.prompt_init_text.empty()) o.prompt_init_text = c.virtual_tokens.text;
}

inline std::string adapters_in_words(const ModelConfig& c) {
    if (c.virtual_tokens.on()) return c.virtual_tokens.in_words();
    const std::string dropout = c.lora.dropout > 0 ? format(", dropout %g", c.lora.dropout) : "";
    return format("rank %d, alpha %g%s on %s", c.lora.rank, c.lora.alpha, dropout.c_str(), joined(c.lora.modules).c_str());
}

namespace detail {

// True if a flag is given as --no-name or false: it turns off a setting of a preset or a model.
inline bool is_off(const TrainOptions& o, const char* flag, bool on) { return !on && o.given.count(flag) > 0; }

// Rejects options that a mixture of experts does not support, or that have no effect without one.
inline void check_mixture(const TrainOptions& o, const ModelConfig& c) {
    const MixtureConfig& m = c.mixture;
    const bool balances = o.moe_router_load_balancing_type != "none";
    const std::string capacity = "--moe-expert-capacity-factor";
    const std::string aux = "--moe-aux-loss-coeff", z = "--moe-z-loss-coeff", type = "--moe-router-load-balancing-type";
    const bool has_aux = o.moe_aux_loss_coeff > 0, has_z = o.moe_z_loss_coeff > 0, pre_softmax = o.moe_router_pre_softmax;
    for (const auto& [given, option] : {std::pair<bool, std::string>{o.moe_router_topk, "--moe-router-topk"},
                                        {o.moe_ffn_hidden_size, "--moe-ffn-hidden-size"},
                                        {!o.moe_layer_freq.empty(), "--moe-layer-freq"},
                                        {o.moe_shared_expert_intermediate_size, "--moe-shared-expert-intermediate-size"},
                                        {o.moe_shared_expert_gate, "--moe-shared-expert-gate"},
                                        {!o.moe_router_score_function.empty(), "--moe-router-score-function"},
                                        {pre_softmax, "--moe-router-pre-softmax"},
                                        {(bool)o.moe_router_topk_scaling_factor, "--moe-router-topk-scaling-factor"},
                                        {o.expert_model_parallel_size > 1, "--expert-model-parallel-size"},
                                        {o.moe_router_num_groups, "--moe-router-num-groups"},
                                        {o.moe_router_group_topk, "--moe-router-group-topk"},
                                        {o.moe_router_enable_expert_bias, "--moe-router-enable-expert-bias"},
                                        {!o.moe_token_dispatcher_type.empty(), "--moe-token-dispatcher-type"},
                                        {!balances, type},
                                        {o.moe_expert_capacity_factor > 0, capacity},
                                        {has_aux, aux},
                                        {has_z, z}})
        refuse_without(given && !m.on(), option, "--num-experts, a mixture of experts");
    refuse_without(o.given.count("moe-router-bias-update-rate") && !m.bias, "--moe-router-bias-update-rate",
                   "--moe-router-enable-expert-bias");
    refuse_without(o.given.count("moe-token-drop-policy") && o.moe_expert_capacity_factor == 0, "--moe-token-drop-policy",
                   capacity);
    if (!m.on()) return;
    refuse_together(o.dpo_beta && o.moe_expert_capacity_factor > 0, capacity, "--dpo-beta",
                    "the reference model has no capacity");
    const std::string mixture = "a mixture of experts";
    refuse_without(o.moe_router_num_groups > 1 && !o.moe_router_group_topk, "--moe-router-num-groups",
                   "--moe-router-group-topk");
    refuse_without(o.moe_router_group_topk && m.groups == 1, "--moe-router-group-topk", "--moe-router-num-groups");
    refuse_together(pre_softmax && m.sigmoid, "--moe-router-pre-softmax", "--moe-router-score-function sigmoid");
    refuse_together(o.num_experts && m.experts == 1 && !m.sigmoid, "--num-experts 1", "a softmax over the experts",
                    "over one expert it is always 1, so the router learns nothing",
                    "--num-experts 2 or more, or --moe-router-score-function sigmoid");
    refuse_together((o.num_experts || o.moe_router_topk) && m.topk == 1 && m.normalize, "--moe-router-topk 1",
                    "a softmax over the chosen experts", "over one expert it is always 1, so the router learns nothing",
                    "--moe-router-pre-softmax");
    for (const bool adapters : {o.lora_rank > 0, o.prompt_tokens > 0})
        refuse_together(adapters && (has_aux || has_z), has_aux ? aux : z, o.lora_rank > 0 ? "--lora-rank" : "--prompt-tokens",
                        "adapters do not train the routers");
    refuse_together(!balances && has_aux, aux + format(" %g", o.moe_aux_loss_coeff), type + " none");
    refuse_together(o.parametrization != "standard", "--parametrization " + o.parametrization, mixture,
                    "it is not derived for experts", "omit --parametrization");
    for (const auto& [given, option] : {std::pair<bool, const char*>{o.lora_rank > 0, "--lora-rank"},
                                        {o.prompt_tokens > 0, "--prompt-tokens"},
                                        {(bool)o.dpo_beta, "--dpo-beta"}})
        refuse_together(o.moe_use_upcycling && given, "--moe-use-upcycling", option, "only the dense model in --model is saved",
                        "train the mixture first, and pass it to --model");
    refuse_without(o.moe_shared_expert_gate && !m.shared, "--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size");
    refuse_together(o.moe_use_upcycling && m.shared, "--moe-use-upcycling", "--moe-shared-expert-intermediate-size",
                    "a dense model has none");
    refuse_together(o.dpo_beta && (has_aux || has_z), has_aux ? aux : z, "--dpo-beta");
}

// Rejects options that contradict each other, or have no effect without another one.
inline void check_model_options(const TrainOptions& o, const ModelConfig& c) {
    const bool rope = c.position == Position::rope, scaled = c.rope_scaling.type != RopeScaling::Type::none;
    const bool other_activation =
        (o.swiglu && c.activation != Activation::swiglu) || (o.squared_relu && c.activation != Activation::relu2);
    const bool other_scaling = o.use_rope_scaling && c.rope_scaling.type != RopeScaling::Type::llama3;
    for (const auto& [option, activation] : {std::pair("swiglu", Activation::swiglu), {"squared-relu", Activation::relu2}})
        if (is_off(o, option, o.swiglu || o.squared_relu) && c.activation == activation)
            fail_usage("--no-%s requires a replacement for the activation; HINT: --activation gelu, or another", option);
    const char* const rotary = "--position-embedding-type rope";
    refuse_together(o.swiglu && o.squared_relu, "--swiglu", "--squared-relu");
    refuse_together(other_activation, o.swiglu ? "--swiglu" : "--squared-relu", "--activation");
    refuse_together(o.qk_layernorm && o.qk_layernorm_whole, "--qk-layernorm", "--qk-layernorm-whole");
    refuse_together(other_scaling, "--use-rope-scaling", "--rope-scaling");
    refuse_without(o.rotary_base && !rope, "--rotary-base", rotary);
    refuse_without(o.rotary_percent && !rope, "--rotary-percent", rotary);
    refuse_without(scaled && !rope, "--rope-scaling", rotary);
    refuse_without(o.rope_scaling_factor && !scaled, "--rope-scaling-factor", "--rope-scaling");
    refuse_without(o.original_max_position_embeddings && !scaled, "--original-max-position-embeddings", "--rope-scaling");
    refuse_without(o.no_rope_freq && (c.position == Position::learned || c.position == Position::none), "--no-rope-freq",
                   "--position-embedding-type rope or alibi");
    refuse_without(o.window_attn_skip_freq && !c.window, "--window-attn-skip-freq", "--window-size");
    refuse_without(o.rotary_base_local && !c.window, "--rotary-base-local", "--window-size");
    refuse_without(o.rotary_base_local && !rope, "--rotary-base-local", rotary);
}

// KEY=VALUE ...: keys that config.json has for this type of scaling.
inline void set_rope_details(const Strings& settings, RopeScaling& s) {
    using Type = RopeScaling::Type;
    const Strings of_yarn = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"},
                  of_longrope = {"short_factor", "long_factor", "attention_factor"},
                  keys = s.type == Type::yarn       ? of_yarn
                         : s.type == Type::llama3   ? Strings{"low_freq_factor", "high_freq_factor"}
                         : s.type == Type::longrope ? of_longrope
                                                    : Strings{};
    nlohmann::json j = nlohmann::json::object();
    for (const std::string& setting : settings) {
        const size_t equals = std::min(setting.find('='), setting.size());
        const std::string key = setting.substr(0, equals), text = setting.substr(std::min(equals + 1, setting.size()));
        if (std::find(keys.begin(), keys.end(), key) == keys.end())
            fail_usage("--rope-scaling-set has '%s'; the keys of this --rope-scaling are: %s", setting.c_str(),
                       keys.empty() ? "none" : joined(keys).c_str());
        if (j.contains(key)) fail_usage("--rope-scaling-set names %s twice", key.c_str());
        const bool list = key == "short_factor" || key == "long_factor";
        const nlohmann::json value = nlohmann::json::parse(list ? "[" + text + "]" : text, nullptr, false);
        j[key] = value.is_discarded() || value.is_null() ? nlohmann::json(text) : value;
    }
    const std::string source = "--rope-scaling-set";
    read_rope_details({j, source}, s);
    if ((j.contains("mscale") || j.contains("mscale_all_dim")) &&
        !(s.mscale > 0 && s.mscale_all_dim > 0 && s.attention_factor == 0))
        fail_usage(
            "--rope-scaling-set: mscale and mscale_all_dim must be given together, both above 0, and without "
            "attention_factor");
}

inline void set_rope_scaling(const TrainOptions& o, ModelConfig& c) {
    using Type = RopeScaling::Type;
    RopeScaling& s = c.rope_scaling;
    if (is_off(o, "use-rope-scaling", o.use_rope_scaling) && s.type == Type::llama3) s = {};
    if (o.rope_scaling == "none") s = {};
    else if (!o.rope_scaling.empty() || o.use_rope_scaling) {
        s = {};
        s.type = Type::llama3;
        for (const auto& row : choices_of_rope_scaling)
            if (o.rope_scaling == row.option) s.type = row.value;
        s.factor = 8;
    }
    set_rope_details(o.rope_scaling_set, s);
    s.factor = o.rope_scaling_factor.value_or(s.factor);
    if (o.original_max_position_embeddings) s.original = o.original_max_position_embeddings;
    const bool needs_original = s.type != Type::none && s.type != Type::linear;
    if (needs_original && !s.original && s.factor > 0) s.original = std::max(1, (int)(c.T / s.factor));
}

// Applies the options of the block, for any initial model.
inline void set_block(const TrainOptions& o, ModelConfig& c) {
    const auto word = [](auto& field, const std::string& given, const auto& choices) {
        for (const auto& row : choices)
            if (given == row.option && !given.empty()) field = row.value;
    };
    const auto flag = [&](bool& field, const char* option, bool on, bool with) {
        if (on) field = with;
        else if (is_off(o, option, on)) field = !with;
    };
    const auto size = [&](int& field, const char* option, int value) {
        if (value || o.given.count(option)) field = value;
    };
    word(c.norm, o.normalization, choices_of_norm);
    flag(c.norm_plus_one, "apply-layernorm-1p", o.apply_layernorm_1p, true);
    word(c.norm_place, o.norm_place, choices_of_norm_place);
    if (is_off(o, "qk-layernorm", o.qk_layernorm) && c.qk_norm == QkNorm::head) c.qk_norm = QkNorm::none;
    if (is_off(o, "qk-layernorm-whole", o.qk_layernorm_whole) && c.qk_norm == QkNorm::whole) c.qk_norm = QkNorm::none;
    if (o.qk_layernorm) c.qk_norm = QkNorm::head;
    if (o.qk_layernorm_whole) c.qk_norm = QkNorm::whole;
    word(c.position, o.position_embedding_type, choices_of_position);
    if (o.squared_relu) c.activation = Activation::relu2;
    if (o.swiglu) c.activation = Activation::swiglu;
    word(c.activation, o.activation, activations);
    for (bool* bias : {&c.qkv_bias, &c.proj_bias, &c.mlp_bias})
        flag(*bias, "disable-bias-linear", o.disable_bias_linear, false);
    flag(c.qkv_bias, "add-qkv-bias", o.add_qkv_bias, true);
    flag(c.proj_bias, "add-proj-bias", o.add_proj_bias, true);
    flag(c.mlp_bias, "add-mlp-bias", o.add_mlp_bias, true);
    size(c.mixture.experts, "num-experts", o.num_experts);
    size(c.mixture.topk, "moe-router-topk", o.moe_router_topk);
    if (c.mixture.on() && !o.moe_layer_freq.empty())
        as_usage([&] { c.mixture.dense_layers = LayerPattern(o.moe_layer_freq, c.L).dense; });
    if (!o.moe_router_score_function.empty()) c.mixture.sigmoid = o.moe_router_score_function == "sigmoid";
    if (o.moe_router_score_function == "sigmoid") c.mixture.normalize = c.mixture.topk > 1;  // as in Megatron-LM
    flag(c.mixture.normalize, "moe-router-pre-softmax", o.moe_router_pre_softmax, false);
    c.mixture.scale = o.moe_router_topk_scaling_factor.value_or(c.mixture.scale);
    size(c.mixture.shared, "moe-shared-expert-intermediate-size", o.moe_shared_expert_intermediate_size);
    flag(c.mixture.shared_gate, "moe-shared-expert-gate", o.moe_shared_expert_gate, true);
    size(c.mixture.groups, "moe-router-num-groups", o.moe_router_num_groups);
    size(c.mixture.group_topk, "moe-router-group-topk", o.moe_router_group_topk);
    flag(c.mixture.bias, "moe-router-enable-expert-bias", o.moe_router_enable_expert_bias, true);
    flag(c.tied, "untie-embeddings-and-output-weights", o.untie_embeddings_and_output_weights, false);
    flag(c.embedding_norm, "embed-layernorm", o.embed_layernorm, true);
    if (!o.softmax_type.empty()) c.sinks = o.softmax_type == "learnable";
    size(c.window, "window-size", o.window_size);
    size(c.full_interval, "window-attn-skip-freq", o.window_attn_skip_freq);
    size(c.nope_interval, "no-rope-freq", o.no_rope_freq);
    c.rotary_fraction = o.rotary_percent.value_or(c.rotary_fraction);
    c.rope_base = o.rotary_base.value_or(c.rope_base);
    c.local_rope_base = o.rotary_base_local.value_or(c.local_rope_base);
    c.attention_scale = o.softmax_scale.value_or(c.attention_scale);
    c.attention_softcap = o.attn_logit_softcapping.value_or(c.attention_softcap);
    c.logit_softcap = o.final_logit_softcapping.value_or(c.logit_softcap);
    c.embedding_scale = o.embedding_scale.value_or(c.embedding_scale);
    c.eps = o.norm_epsilon.value_or(c.eps);
    c.init_std = o.init_method_std.value_or(c.init_std);
    // Dropout is part of this training, not of the initial model.
    c.attention_dropout = o.attention_dropout;
    c.hidden_dropout = o.hidden_dropout;
    c.embedding_dropout = o.embedding_dropout.value_or(o.hidden_dropout);
}

// The tensors of a model's files, with their shapes.
inline std::map<std::string, std::vector<int64_t>> tensors_in_files(const ModelConfig& c) {
    std::map<std::string, std::vector<int64_t>> tensors;
    for (const TensorSpec& spec : ParameterTable(c).rows)
        for (const HfTensor& t : spec.hf) tensors[t.name] = file_shape(spec, t);
    return tensors;
}

// Calls visit(name, changed) for each given option of the model, with the model `saved` as it alone changes it.
template <class Visit>
void for_each_change(const TrainOptions& o, const ModelConfig& saved, Visit visit) {
    TrainOptions all = o;
    const std::vector<Option> options = options_in(all);
    for (size_t i = 0; i < options.size(); i++) {
        const std::string name = option_name(options[i].field);
        if (!o.given.count(name) || std::string(options[i].group) != "Model") continue;
        TrainOptions alone;
        copy_value(options[i], options_in(alone)[i]);
        alone.given = {name};
        ModelConfig changed = saved;
        if (o.max_position_embeddings && name == "max-position-embeddings") changed.T = o.max_position_embeddings;
        set_block(alone, changed);
        const bool scales = name == "rope-scaling" || name == "use-rope-scaling";
        if (scales || saved.rope_scaling.type != RopeScaling::Type::none) set_rope_scaling(alone, changed);
        visit(name, changed);
    }
}

// Refuses options that give the model c other tensors than --model has, `saved`, and names the first one.
inline void check_same_tensors(const TrainOptions& o, const ModelConfig& saved, const ModelConfig& c) {
    const auto before = tensors_in_files(saved), now = tensors_in_files(c);
    if (now == before) return;
    for_each_change(o, saved, [&](const std::string& name, const ModelConfig& changed) {
        const auto tensors = tensors_in_files(changed);
        for (const auto& [tensor, shape] : tensors)
            if (!before.count(tensor))
                fail_usage("--%s requires the tensor '%s', which --model %s does not have; HINT: omit it%s", name.c_str(),
                           tensor.c_str(), o.model.c_str(), name == "num-experts" ? ", or add --moe-use-upcycling" : "");
        for (const auto& [tensor, shape] : before)
            if (!tensors.count(tensor) || tensors.at(tensor) != shape)
                fail_usage("--%s contradicts --model %s, whose tensor '%s' has shape %s; HINT: omit it", name.c_str(),
                           o.model.c_str(), tensor.c_str(), shape_string(shape).c_str());
    });
}

// Refuses options that change how the model c under adapters computes: the adapters name --model, which is computed as it was
// saved wherever they are loaded.
inline void check_same_base(const TrainOptions& o, const ModelConfig& saved, const ModelConfig& c) {
    const auto difference_to = [&](ModelConfig now) {
        ModelConfig before = saved;
        now.T = before.T;
        now.family = before.family = "train_gpt";  // whose config.json has every choice
        return config_difference(before, now);
    };
    const std::string difference = difference_to(c);
    if (difference.empty()) return;
    std::string option;
    for_each_change(o, saved, [&](const std::string& name, const ModelConfig& changed) {
        if (option.empty() && !difference_to(changed).empty()) option = "--" + name + " changes";
    });
    fail_usage("%s the model under the adapters, which were trained on --model %s as it is: %s; HINT: omit it",
               option.empty() ? "the options change" : option.c_str(), o.model.c_str(), difference.c_str());
}

}  // namespace detail

inline const char* const no_model =
    "no model is given; HINT: --preset gpt2-124m (or another), --size 15m, --model DIR, or --num-layers, --hidden-size and "
    "--num-attention-heads";

// The model configuration: a directory or a preset, modified by further options.
inline ModelConfig configure_model(const TrainOptions& o, const Tokenizer* tokenizer) {
    const bool from_directory = !o.model.empty();
    refuse_together(from_directory && !o.preset.empty(), "--model " + o.model, "--preset " + o.preset, "both name a model");
    if (!from_directory && o.preset.empty() && !o.num_layers) fail_usage("%s", no_model);
    ModelConfig c;
    if (from_directory) c = read_config(o.model);
    else if (!o.preset.empty()) c = config_from_preset(o.preset);
    else if (!o.size.empty()) c = family_of_size(o.size);
    else set_family(c, "gpt2");  // Megatron's defaults; the options below modify it
    const auto given = [&](int& size, int value, const char* option) {
        if (from_directory && value && value != size)
            fail_usage("--%s %d contradicts --model %s, which has %d; HINT: omit it", option, value, o.model.c_str(), size);
        if (value) size = value;
    };
    if (from_directory) c.head_size = c.HS();
    ModelConfig saved = c;
    refuse_without(o.moe_use_upcycling && (!from_directory || !o.num_experts), "--moe-use-upcycling",
                   "--model DIR, a dense model, and --num-experts");
    refuse_without(o.moe_upcycling_drop_ratio > 0 && !o.moe_use_upcycling, "--moe-upcycling-drop-ratio", "--moe-use-upcycling");
    refuse_together(o.moe_use_upcycling && saved.mixture.on(), "--moe-use-upcycling", "--model " + o.model,
                    "it is a mixture of experts already", "omit it");
    given(c.L, o.num_layers, "num-layers");
    given(c.C, o.hidden_size, "hidden-size");
    given(c.NKV, o.num_query_groups || from_directory ? o.num_query_groups : o.num_attention_heads, "num-query-groups");
    given(c.NH, o.num_attention_heads, "num-attention-heads");
    given(c.head_size, o.kv_channels, "kv-channels");
    if (o.max_position_embeddings) c.T = o.max_position_embeddings;
    else if (!from_directory && o.seq_length) c.T = o.seq_length + o.prompt_tokens;
    detail::set_block(o, c);
    const bool experts_only = c.mixture.on() && c.mixture.dense_layers.empty();
    if (saved.mixture.on() && !experts_only) c.mixture.width = c.expert_width();  // dense layers may get another
    if (!experts_only || !o.moe_ffn_hidden_size) given(c.F, o.ffn_hidden_size, "ffn-hidden-size");
    int width = experts_only ? c.F : c.expert_width();
    given(width, o.moe_ffn_hidden_size, "moe-ffn-hidden-size");
    if (o.moe_ffn_hidden_size) c.mixture.width = width;
    detail::set_rope_scaling(o, c);
    detail::check_model_options(o, c);
    detail::check_mixture(o, c);
    if (!c.F) c.F = gated(c.activation) ? (8 * c.C / 3 + 63) / 64 * 64 : 4 * c.C;  // Megatron's defaults

    given(c.V, o.vocab_size, "vocab-size");
    if (!o.vocab_size && tokenizer && !from_directory) c.V = tokenizer->vocab_size();
    if (!c.V)
        fail_usage("the size of the vocabulary is not known; HINT: --tokenizer %s, or --vocab-size N",
                   tokenizer_of_data(o.data_path).c_str());
    if (tokenizer) tokenizer->check_fits(c.V);
    as_usage([&] { check_config(c); });
    c = canonical(c);
    if (o.moe_use_upcycling) saved.mixture = c.mixture;
    if (from_directory) detail::check_same_tensors(o, saved, c);
    if (from_directory && (o.lora_rank || o.prompt_tokens)) detail::check_same_base(o, canonical(saved), c);
    match_family(c);
    check_backend_takes(c);
    pad_vocabulary(c, o.make_vocab_size_divisible_by * o.tensor_model_parallel_size);
    c.parametrization = parametrization_of(o, c);
    set_adapters(o, c);
    return c;
}

// Muon or NorMuon for the matrices of blocks, if --optimizer is one of them.
inline MuonRecipe muon_recipe(const TrainOptions& o) {
    MuonRecipe r;
    r.on = optimizer_row(o.optimizer).whole_matrices;
    r.neurons = optimizer_row(o.optimizer).neurons;
    r.heads = o.muon_split_heads;
    r.momentum = (real)o.muon_momentum;
    r.beta2 = (real)o.muon_beta2;
    r.iterations = o.muon_num_ns_steps;
    r.shape_scaling = o.muon_scale_mode == "shape_scaling";
    r.factor = o.muon_extra_scale_factor.value_or(r.shape_scaling ? 1 : 0.2);
    static const TrainOptions defaults;
    const std::pair<const char*, bool> of_muon[] = {{"--muon-momentum", o.muon_momentum != defaults.muon_momentum},
                                                    {"--muon-scale-mode", o.muon_scale_mode != defaults.muon_scale_mode},
                                                    {"--muon-extra-scale-factor", (bool)o.muon_extra_scale_factor},
                                                    {"--muon-num-ns-steps", o.muon_num_ns_steps != defaults.muon_num_ns_steps},
                                                    {"--muon-split-heads", o.muon_split_heads}};
    for (const auto& [option, given] : of_muon) refuse_idle(given && !r.on, option, "--optimizer muon");
    refuse_idle(o.muon_beta2 != defaults.muon_beta2 && !r.neurons, "--muon-beta2", "--optimizer normuon");
    refuse_together(r.neurons && o.exp_avg_sq_dtype != "fp32", "--optimizer normuon",
                    "--exp-avg-sq-dtype " + o.exp_avg_sq_dtype, "it has only one exp_avg_sq per row");
    return r;
}

// Rejects options that --optimizer does not use.
inline void check_optimizer(const TrainOptions& o) {
    const OptimizerRow& row = optimizer_row(o.optimizer);
    const bool lion = row.value == OptimizerKind::lion;
    static const TrainOptions defaults;
    refuse_idle(o.lion_beta1 != defaults.lion_beta1 && !lion, "--lion-beta1", "--optimizer lion");
    refuse_idle(o.lion_beta2 != defaults.lion_beta2 && !lion, "--lion-beta2", "--optimizer lion");
    if (row.second_moment()) return;
    for (const auto& [option, given] : {std::pair("adam-beta1", o.adam_beta1 != defaults.adam_beta1),
                                        {"adam-beta2", o.adam_beta2 != defaults.adam_beta2},
                                        {"adam-eps", o.adam_eps != defaults.adam_eps},
                                        {"exp-avg-sq-dtype", o.exp_avg_sq_dtype != defaults.exp_avg_sq_dtype}})
        if (given)
            fail_usage("--%s has no effect with --optimizer %s, which has one moment, exp_avg; HINT: omit it", option,
                       row.word);
    const std::string optimizer = std::string("--optimizer ") + row.word;
    refuse_together(o.fp8_start == "auto", "--fp8-start auto", optimizer, "FP8 starts when exp_avg_sq is steady",
                    "--fp8-start 1000, a step");
    refuse_together(!o.size.empty() && !o.given.count("lr"), "--size", optimizer, "--size sets AdamW's learning rate",
                    "give --lr, 3 to 10 times smaller");
}

// The type of gradients or of a moment, by its name in options.
inline ElementType element_type(const std::string& name, ElementType eight_bits) {
    return name == "fp32" ? ElementType::fp32 : name == "bf16" ? ElementType::bf16 : eight_bits;
}

// True if the optimizer's state is kept in the host's memory.
inline bool offloads_optimizer(const TrainOptions& o) {
    if (o.offload == "none") return false;
    refuse_together(!optimizer_row(o.optimizer).can_offload(), "--offload " + o.offload, "--optimizer normuon",
                    "NorMuon updates need whole rows", "--optimizer muon or adamw");
    return true;
}
// True if the gradients are, too.
inline bool offloads_gradients(const TrainOptions& o, int ranks) {
    if (o.offload != "gradients") return false;
    refuse_without(o.main_grads_dtype != "bf16", "--offload gradients", "--main-grads-dtype bf16",
                   "add that, or use --offload optimizer");
    if (ranks > 1)
        fail_usage(
            "--offload gradients is for one GPU, and the run has %d, which sum gradients in GPU memory; HINT: --offload "
            "optimizer",
            ranks);
    return true;
}

// The preference loss, if there are pairs of answers.
inline Preference preference_of(const TrainOptions& o) {
    Preference p;
    p.beta = o.dpo_beta.value_or(0);
    p.ipo = o.dpo_loss == "ipo";
    p.label_smoothing = o.dpo_label_smoothing;
    refuse_without(!p.on() && p.ipo, "--dpo-loss", "--dpo-beta");
    refuse_without(!p.on() && p.label_smoothing > 0, "--dpo-label-smoothing", "--dpo-beta");
    refuse_without(p.ipo && p.label_smoothing > 0, "--dpo-label-smoothing", "--dpo-loss sigmoid");
    refuse_together(p.on() && (o.z_loss_strength > 0 || o.use_z_loss), "--z-loss-strength", "--dpo-beta",
                    "DPO has no cross-entropy");
    return p;
}

// Rejects options that are not available with context parallelism.
inline void check_context_parallel_options(const TrainOptions& o) {
    if (o.context_parallel_size == 1) return;
    const std::string option = format("--context-parallel-size %d", o.context_parallel_size);
    refuse_together(o.moe_expert_capacity_factor > 0, option, "--moe-expert-capacity-factor",
                    "a rank's drops would depend on its rows of a sample", "--moe-aux-loss-coeff 0.01 balances experts");
    refuse_together(o.nondeterministic_attention, option, "--nondeterministic-attention");
}

// Rejects options that are not available with sharded parameters.
inline void check_sharded_parameters(const TrainOptions& o) {
    if (o.zero < 3) return;
    const std::string instead = "--zero 2, which shards the gradients and the optimizer's state";
    refuse_together(o.lora_rank, "--lora-rank", "--zero 3", "a frozen model is not sharded yet", instead);
    refuse_together(o.prompt_tokens, "--prompt-tokens", "--zero 3", "a frozen model is not sharded yet", instead);
    refuse_together(!o.fp8_format.empty(), "--fp8-format", "--zero 3", "each rank would have the FP8 codes of all weights",
                    instead);
    refuse_together(!o.eval_tasks.empty(), "--eval-tasks", "--zero 3", "ranks would make different passes",
                    instead + ", or measure checkpoints with train_gpt eval --tasks");
}

// The layout of the run over its ranks. generates: it generates text while it trains.
inline RankLayout layout_of(const TrainOptions& o, bool generates = false) {
    RankLayout layout;
    layout.tp = o.tensor_model_parallel_size;
    layout.pp = o.pipeline_model_parallel_size;
    layout.vpp = o.num_virtual_stages_per_pipeline_rank;
    layout.ep = o.expert_model_parallel_size;
    layout.cp = o.context_parallel_size;
    layout.exchanges_heads = exchanges_heads(o);
    check_context_parallel_options(o);
    check_sharded_parameters(o);
    layout.sequence_parallel = !o.no_sequence_parallel;
    layout.zero = o.zero;
    layout.whole_matrices = muon_recipe(o).on;
    layout.bucket_elements = (size_t)o.ddp_bucket_size;
    layout.rows = (int64_t)o.seq_length + o.prompt_tokens;
    layout.trains = true;
    layout.overlap = !o.no_overlap;
    layout.generates = generates;
    return layout;
}

// The number of layers of each stage of the pipeline.
inline std::vector<int> layers_of_stages(const TrainOptions& o, const ModelConfig& c, const Mesh& mesh) {
    std::vector<int> given;
    for (const std::string& n : o.pipeline_layers)
        given.push_back((int)cli::number_in_range("pipeline-layers", n, between(0, 10000), true));
    return as_usage([&] {
        return split_layers(costs_of_layers(c, o.seq_length), mesh.pp.size * mesh.vpp,
                            o.account_for_embedding_in_pipeline_split, o.account_for_loss_in_pipeline_split, given);
    });
}

inline Fp8Recipe fp8_recipe(const TrainOptions& o) {
    Fp8Recipe r;
    r.on = !o.fp8_format.empty();
    r.current = o.fp8_recipe == "current";
    r.gradient = o.fp8_format == "e4m3" ? Fp8::e4m3 : Fp8::e5m2;
    r.margin = o.fp8_margin;
    r.history = o.fp8_amax_history_len;
    r.most_recent = o.fp8_amax_compute_algo == "most_recent";
    static const TrainOptions defaults;
    const std::pair<const char*, bool> of_fp8[] = {
        {"--fp8-recipe", o.fp8_recipe != defaults.fp8_recipe},
        {"--fp8-start", o.fp8_start != defaults.fp8_start},
        {"--fp8-calibration-steps", o.fp8_calibration_steps != defaults.fp8_calibration_steps},
        {"--fp8-margin", o.fp8_margin != defaults.fp8_margin},
        {"--fp8-amax-history-len", o.fp8_amax_history_len != defaults.fp8_amax_history_len},
        {"--fp8-amax-compute-algo", o.fp8_amax_compute_algo != defaults.fp8_amax_compute_algo},
        {"--first-last-layers-bf16", o.first_last_layers_bf16},
        {"--no-fp8-fast-accumulation", o.no_fp8_fast_accumulation},
        {"--fp8-fast-backward", o.fp8_fast_backward},
        {"--fp8-weight-transpose", o.fp8_weight_transpose != defaults.fp8_weight_transpose}};
    for (const auto& [option, given] : of_fp8) refuse_without(given && !r.on, option, "--fp8-format");
    refuse_together(o.fp8_fast_backward && o.no_fp8_fast_accumulation, "--fp8-fast-backward", "--no-fp8-fast-accumulation");
    for (const auto& [option, given] :
         {std::pair("--num-layers-at-start-in-bf16", o.num_layers_at_start_in_bf16 != defaults.num_layers_at_start_in_bf16),
          {"--num-layers-at-end-in-bf16", o.num_layers_at_end_in_bf16 != defaults.num_layers_at_end_in_bf16}})
        refuse_without(given && !o.first_last_layers_bf16, option, "--first-last-layers-bf16");
    return r;
}

// Selects a rank's layers that are computed in FP8; rejects unsupported sizes.
inline std::vector<char> blocks_in_fp8(const be::Ctx& ctx, const TrainOptions& o, const ModelConfig& c, const Part& part) {
    if (const std::string problem = be::fp8_limits(ctx); !problem.empty()) fail("%s", problem.c_str());
    const int first = o.first_last_layers_bf16 ? o.num_layers_at_start_in_bf16 : 0;
    const int last = c.L - (o.first_last_layers_bf16 ? o.num_layers_at_end_in_bf16 : 0);
    if (first >= last)
        fail_usage("--first-last-layers-bf16 keeps all %d layers in bf16, so --fp8-format has no effect; HINT: omit one", c.L);
    const auto check = [](int64_t n, const char* what) {
        if (n % 16) fail_usage("--fp8-format requires sizes that are multiples of 16; %s is %lld", what, (long long)n);
    };
    const LocalSizes n(c, part.tp);
    check(c.C, "the width");
    check(n.QKVl, "a rank's part of queries, keys and values");
    check((int64_t)n.NHl * c.HS(), "a rank's part of the heads");
    if (c.mixtures() < c.L) check(c.F / part.tp.size, "a rank's part of the feed-forward width");
    if (c.mixtures()) check(c.expert_width() / part.tp.size, "a rank's part of an expert's width");
    check(c.mixture.shared / part.tp.size, "a rank's part of the shared expert's width");
    check((int64_t)o.micro_batch_size * (o.seq_length + o.prompt_tokens) / o.context_parallel_size,
          o.context_parallel_size > 1
              ? "the number of a rank's rows (--micro-batch-size x --seq-length / --context-parallel-size)"
          : o.prompt_tokens ? "the number of rows (--micro-batch-size x (--seq-length + --prompt-tokens))"
                            : "the number of rows (--micro-batch-size x --seq-length)");
    std::vector<char> blocks;
    for (const int layer : part.layers) blocks.push_back(layer >= first && layer < last);
    return blocks;
}

// The number of bf16 steps before the first FP8 step; with `auto` unknown until the run is steady.
inline int64_t fp8_start(const TrainOptions& o, const TrainingState& s) {
    if (o.fp8_start == "auto") return s.fp8_start < 0 ? INT64_MAX : s.fp8_start;
    return (int64_t)cli::number_in_range("fp8-start", o.fp8_start, at_least(0), true);
}

inline GuardOptions guard_options(const TrainOptions& o) {
    GuardOptions g{};
    g.policy = o.on_spike;
    g.loss_deviations = o.spike_loss_deviations;
    g.norm_factor = o.spike_grad_norm_factor;
    g.window = o.spike_window;
    g.patience = o.spike_patience;
    g.max_rollbacks = o.max_rollbacks;
    g.rollback_distance = o.rollback_distance;
    g.rollback_batches = o.rollback_batches;
    return g;
}

inline DataOptions data_options(const TrainOptions& o, const ModelConfig& c, const Tokenizer* tokenizer, DataSplit part,
                                int64_t n_samples) {
    DataOptions d;
    const bool own = !o.valid_data_path.empty();  // validation data is separate, and both are used whole
    d.blend = parse_data_path(own && part == DataSplit::valid ? o.valid_data_path : o.data_path);
    if (own && d.blend.paths.size() == 1) d.blend.weights.clear();  // as Megatron
    d.validates = o.eval_iters > 0;
    d.split = o.split;
    d.part = own ? DataSplit::whole : part;
    d.T = o.seq_length;
    d.seed = (uint32_t)(o.seed ^ o.seed >> 32);
    d.n_samples = n_samples;
    d.pairs = o.dpo_beta.has_value();
    d.vocab_size = c.V;
    d.virtual_tokens = c.virtual_tokens.count;
    if (tokenizer) {
        d.eod = tokenizer->eod_id();
        d.tokenizer = tokenizer->identity();
    }
    d.reshuffle_each_epoch = o.reshuffle_each_epoch;
    d.reset_position_ids = o.reset_position_ids;
    d.reset_attention_mask = o.reset_attention_mask;
    d.eod_mask_loss = o.eod_mask_loss;
    return d;
}

inline bool has_validation(const TrainOptions& o) {
    return o.eval_iters > 0 && (!o.valid_data_path.empty() || has_share(o.split, DataSplit::valid));
}

// Adds the batches that the options skip to the state's; returns the ones to be drawn and dropped.
inline BatchRanges add_skips(TrainingState& s, const TrainOptions& o) {
    s.skips.add(BatchRanges::parse(o.skip_batches, "--skip-batches"));
    s.skips.add(BatchRanges::parse(o.iterations_to_skip, "--iterations-to-skip"));
    const char* const option = "--skip-train-iteration-range";
    for (const std::string& range : o.skip_train_iteration_range) {
        if (std::find(s.iterations.begin(), s.iterations.end(), range) != s.iterations.end()) continue;
        const BatchRanges given = BatchRanges::parse({range}, option);
        if (given.empty() || given.ranges().back().last <= s.step) continue;  // as LLM-jp: past ranges are ignored
        if (given.ranges().front().first <= s.step)
            fail("%s %s starts before the next iteration; HINT: start with %lld", option, range.c_str(), (long long)s.step + 1);
        s.iterations.push_back(range);
    }
    return BatchRanges::from_iterations(s.iterations, option);
}
