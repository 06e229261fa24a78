// Families: each one's config.json as written by transformers 5 and 4 and in published models, tensor names, refusals by
// name, the family of a combination of options, RoPE scalings compared with transformers' numbers, and Hugging Face's
// cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../llmc/cpu/attention.h"
#include "../llmc/model/hf_config.h"
#include "../llmc/model/presets.h"
#include "../llmc/checkpoint/adapter_files.h"
#include "../llmc/checkpoint/checkpoint.h"
#include "../llmc/plan/from_options.h"
#include "../llmc/checkpoint/run_directory.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace test_families {

using nlohmann::json;
using test::expect_error;

std::string golden(const std::string& name) {
    return (std::filesystem::path(__FILE__).parent_path() / "golden" / name).string();
}

ModelConfig read(const std::string& text) { return from_hf_config(json::parse(text), "config.json"); }

// Sizes that every Llama-like class accepts, and `further` keys.
std::string llama_like(const std::string& type, const std::string& further) {
    return R"({"model_type": ")" + type +
           R"(", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 6, "num_attention_heads": 4,
             "max_position_embeddings": 128)" +
           (further.empty() ? "" : ", " + further) + "}";
}

// ---- files of transformers ------------------------------------------------------------------------------------------------
class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, ConfigAndNames) {
    const std::string directory = golden(std::string("families/") + GetParam());
    const ModelConfig c = read_config(directory);
    check_config(c);
    EXPECT_EQ(unknown_keys_of(directory), "");
    EXPECT_EQ(c.family, GetParam());
    EXPECT_TRUE(holds(family_of(c), c));
    const ModelConfig again = from_hf_config(json(to_hf_config(c, "float32")), "what was written");
    EXPECT_TRUE(same_model(c, again)) << to_hf_config(c, "");
    // Every tensor of the file has a parameter, and every parameter a tensor of its shape.
    const ParameterTable table(c);
    std::vector<float> params(table.size);
    read_tensors(directory, c, table, params.data());
}

std::vector<std::string> golden_families() {
    std::vector<std::string> names;
    std::error_code absent;  // a program with these tests may run elsewhere
    for (const auto& entry : std::filesystem::directory_iterator(golden("families"), absent))
        names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}
INSTANTIATE_TEST_SUITE_P(Families, Golden, testing::ValuesIn(golden_families()), [](const auto& test) { return test.param; });

// ---- published models -----------------------------------------------------------------------------------------------------
TEST(Families, PublishedConfigs) {
    const struct {
        const char* what;
        std::string text;
        std::function<bool(const ModelConfig&)> right;
    } rows[] = {
        {"GPT-2: its dropout is not in the way",
         R"({"model_type": "gpt2", "vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128,
             "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1})",
         [](const ModelConfig& c) { return c.attention_dropout == 0.1 && c.F == 256; }},
        {"Llama 3.1", llama_like("llama", R"("rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "llama3"})"),
         [](const ModelConfig& c) {
             return c.rope_scaling.type == RopeScaling::Type::llama3 && c.rope_scaling.original == 64 &&
                    c.rope_scaling.factor == 8 && c.rope_base == 5e5;
         }},
        {"Vicuna: the older key of the type", llama_like("llama", R"("rope_scaling": {"factor": 4.0, "type": "linear"})"),
         [](const ModelConfig& c) { return c.rope_scaling.type == RopeScaling::Type::linear && c.T == 128; }},
        {"dynamic NTK: the longest sequence grows",
         llama_like("llama", R"("rope_scaling": {"factor": 4.0, "type": "dynamic"})"),
         [](const ModelConfig& c) { return c.rope_scaling.original == 128 && c.T == 512; }},
        {"YaRN as Qwen's cards have it: the longest sequence grows",
         llama_like("qwen3",
                    R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100})"),
         [](const ModelConfig& c) { return c.rope_scaling.original == 100 && c.T == 400; }},
        {"YaRN whose longest sequence is given", llama_like("llama", R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 16})"),
         [](const ModelConfig& c) { return c.rope_scaling.original == 16 && c.T == 128; }},
        {"Mistral 7B v0.1", llama_like("mistral", R"("sliding_window": 32, "num_key_value_heads": 2)"),
         [](const ModelConfig& c) { return c.window == 32 && !c.full_interval && c.NKV == 2; }},
        {"Mistral 7B v0.3", llama_like("mistral", R"("sliding_window": null)"),
         [](const ModelConfig& c) { return c.window == 0; }},
        {"Mistral without the key", llama_like("mistral", ""), [](const ModelConfig& c) { return c.window == 4096; }},
        {"Qwen2.5", llama_like("qwen2", R"("use_sliding_window": false, "sliding_window": 131072, "max_window_layers": 21,
                                "tie_word_embeddings": true)"),
         [](const ModelConfig& c) { return c.window == 0 && c.qkv_bias && !c.proj_bias && c.tied; }},
        {"Qwen3", llama_like("qwen3", R"("head_dim": 24)"),
         [](const ModelConfig& c) { return c.qk_norm == QkNorm::head && c.HS() == 24 && !c.qkv_bias; }},
        {"Qwen3: heads of 128 where nothing is said", llama_like("qwen3", ""),
         [](const ModelConfig& c) { return c.HS() == 128; }},
        {"Mixtral 8x7B", llama_like("mixtral", R"("num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": null,
                                "output_router_logits": false, "router_aux_loss_coef": 0.02)"),
         [](const ModelConfig& c) {
             return c.mixture.experts == 8 && c.mixture.topk == 2 && c.mixture.normalize && !c.window && c.rope_base == 1e6;
         }},
        {"Granite 3.1 2B", llama_like("granite", R"("embedding_multiplier": 12.0, "attention_multiplier": 0.015625,
                                "residual_multiplier": 0.22, "logits_scaling": 8.0, "tie_word_embeddings": true)"),
         [](const ModelConfig& c) {
             return c.stream_scale() == 12 / 0.22 && c.stream_eps() == 1e-6 / (0.22 * 0.22) && c.logit_divisor == 8 &&
                    c.attention_scale == 0.015625 && c.tied;
         }},
        {"MiniCPM 2B", llama_like("minicpm", R"("scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "num_experts": 0)"),
         [](const ModelConfig& c) {
             return c.embedding_scale == 12 && c.residual_scale == 1.4 / std::sqrt(6.0) && c.logit_divisor == 4 && c.tied &&
                    json(to_hf_config(c, ""))["scale_depth"] == 1.4;
         }},
        {"Command-R", llama_like("cohere", R"("logit_scale": 0.0625, "layer_norm_eps": 1e-5, "rope_theta": 8000000.0,
                                "use_qk_norm": false, "pad_token_id": 0)"),
         [](const ModelConfig& c) {
             return c.logit_divisor == 16 && c.tied && !c.norm_bias && c.parallel() && c.rope_base == 8e6 && !c.qkv_bias;
         }},
        {"Command-R7B", llama_like("cohere2", R"("logit_scale": 0.25, "sliding_window": 16, "sliding_window_pattern": 4,
                                "rotary_pct": 1.0, "order_of_interleaved_layers": "local_attn_first",
                                "use_gated_activation": true,
                                "use_embedding_sharing": true, "use_parallel_block": true,
                                "position_embedding_type": "rope_gptj")"),
         [](const ModelConfig& c) {
             return c.logit_divisor == 4 && c.window == 16 && c.full_interval == 4 && c.nope_interval == 4 &&
                    c.norm_place == NormPlace::shared;
         }},
        {"OPT 125M", R"({"model_type": "opt", "vocab_size": 99, "hidden_size": 64, "ffn_dim": 80, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 64, "dropout": 0.1,
                        "do_layer_norm_before": true, "activation_function": "relu", "_remove_final_layer_norm": false})",
         [](const ModelConfig& c) {
             return c.position_offset == 2 && c.activation == Activation::relu && c.tied && c.qkv_bias && c.eps == 1e-5;
         }},
        {"InternLM2.5 7B", llama_like("internlm2", R"("bias": false, "rope_theta": 1000000, "pretraining_tp": 1,
                        "rope_scaling": {"factor": 2.0, "type": "dynamic"}, "num_key_value_heads": 2,
                        "attn_implementation": "eager")"),
         [](const ModelConfig& c) { return !c.qkv_bias && c.NKV == 2 && c.T == 256 && c.rope_base == 1e6 && !c.tied; }},
        {"InternLM3 8B", llama_like("internlm3", R"("bias": false, "qkv_bias": false, "head_dim": 16, "rope_theta": 50000000,
                        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "num_key_value_heads": 2)"),
         [](const ModelConfig& c) { return !c.qkv_bias && c.NKV == 2 && c.T == 768 && c.HS() == 16 && c.eps == 1e-5; }},
        {"EXAONE 3.5", R"({"model_type": "exaone", "vocab_size": 99, "hidden_size": 64, "num_layers": 2, "head_dim": 16,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "embed_dropout": 0.0,
                        "activation_function": "silu", "layer_norm_epsilon": 1e-06, "max_position_embeddings": 128,
                        "rope_theta": 1000000.0, "tie_word_embeddings": true})",
         [](const ModelConfig& c) {
             const json written = to_hf_config(c, "");
             return c.L == 2 && c.eps == 1e-6 && c.tied && written["num_layers"] == 2 && written["num_hidden_layers"] == 2;
         }},
        {"GPT-Neo 125M", R"({"model_type": "gpt_neo", "vocab_size": 99, "hidden_size": 64, "num_layers": 4, "num_heads": 4,
                        "intermediate_size": null, "max_position_embeddings": 512, "window_size": 256,
                        "attention_types": [[["global", "local"], 2]], "activation_function": "gelu_new",
                        "attention_layers": ["global", "local", "global", "local"], "resid_dropout": 0, "embed_dropout": 0})",
         [](const ModelConfig& c) {
             return c.window == 256 && c.sees_all(0) && !c.sees_all(1) && c.sees_all(2) && !c.sees_all(3) && c.F == 256 &&
                    c.attention_scale == 1 && !c.qkv_bias && c.proj_bias && c.tied;
         }},
        {"GPT-Neo: all layers local", R"({"model_type": "gpt_neo", "vocab_size": 99, "hidden_size": 64, "num_layers": 3,
                        "num_heads": 4, "attention_types": [[["local"], 3]]})",
         [](const ModelConfig& c) { return c.window == 256 && !c.sees_all(0) && !c.sees_all(2); }},
        {"GPT-Neo: all layers global", R"({"model_type": "gpt_neo", "vocab_size": 99, "hidden_size": 64, "num_layers": 3,
                        "num_heads": 4, "attention_types": [[["global"], 3]]})",
         [](const ModelConfig& c) { return c.window == 0; }},
        {"MPT 7B", R"({"model_type": "mpt", "vocab_size": 99, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128,
                        "expansion_ratio": 4, "no_bias": true, "norm_type": "low_precision_layernorm", "verbose": 0,
                        "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
                        "attn_type": "multihead_attention", "clip_qkv": null, "qk_ln": false, "softmax_scale": null}})",
         [](const ModelConfig& c) {
             return c.F == 256 && c.T == 128 && !c.norm_bias && c.tied && c.position == Position::alibi && !c.mlp_bias &&
                    c.activation == Activation::gelu_exact;
         }},
        {"Phi-2", llama_like("phi", R"("partial_rotary_factor": 0.25, "hidden_act": "gelu_new", "qk_layernorm": false,
                        "embd_pdrop": 0.0, "resid_pdrop": 0.1, "layer_norm_eps": 1e-5, "num_key_value_heads": 4)"),
         [](const ModelConfig& c) {
             return c.rotated() == 4 && c.norm_place == NormPlace::shared && c.head_bias && c.proj_bias && !c.tied &&
                    c.activation == Activation::gelu && c.T == 128;
         }},
        {"GPT-J 6B", R"({"model_type": "gptj", "vocab_size": 99, "n_embd": 176, "n_layer": 2, "n_head": 4, "n_positions": 128,
                        "rotary": true, "rotary_dim": 30, "n_inner": null, "scale_attn_weights": true,
                        "activation_function": "gelu_new", "attn_pdrop": 0.0, "tie_word_embeddings": false})",
         [](const ModelConfig& c) {
             return c.rotated() == 30 && c.F == 704 && c.head_bias && c.mlp_bias && !c.qkv_bias && c.attention_scale == 0;
         }},
        {"Falcon 7B", R"({"model_type": "falcon", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "alibi": false, "bias": false, "multi_query": true, "parallel_attn": true,
                        "new_decoder_architecture": false, "apply_residual_connection_post_layernorm": false})",
         [](const ModelConfig& c) {
             return c.NKV == 1 && c.norm_place == NormPlace::shared && c.F == 256 && c.T == 2048 && c.tied && !c.qkv_bias;
         }},
        {"Falcon 40B", R"({"model_type": "falcon", "vocab_size": 99, "n_embed": 64, "n_layer": 2, "n_head": 4,
                        "num_kv_heads": 2, "new_decoder_architecture": true, "multi_query": true, "parallel_attn": true})",
         [](const ModelConfig& c) { return c.NKV == 2 && c.norm_place == NormPlace::parallel && c.C == 64; }},
        {"Falcon2 11B", R"({"model_type": "falcon", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": true, "activation": "gelu",
                        "num_ln_in_parallel_attn": 1, "ff_factor": 4, "ffn_hidden_size": 256, "rope_theta": 500042.0,
                        "max_position_embeddings": 8192, "tie_word_embeddings": false})",
         [](const ModelConfig& c) { return c.NKV == 2 && c.norm_place == NormPlace::shared && c.rope_base == 500042; }},
        {"Falcon: norms in turn", R"({"model_type": "falcon", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "multi_query": false, "parallel_attn": false, "bias": true})",
         [](const ModelConfig& c) { return c.NKV == 4 && c.norm_place == NormPlace::before && c.mlp_bias; }},
        {"Granite: scores are not scaled by default", llama_like("granitemoe", ""),
         [](const ModelConfig& c) { return c.attention_scale == 1 && c.mixture.experts == 8 && c.stream_scale() == 1; }},
        {"Mixtral: defaults", llama_like("mixtral", R"("sliding_window": 16)"),
         [](const ModelConfig& c) { return c.mixture.experts == 8 && c.mixture.topk == 2 && c.window == 16 && c.F == 80; }},
        {"Qwen3 30B-A3B", llama_like("qwen3_moe", R"("num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": true, "head_dim": 24, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "use_sliding_window": false, "sliding_window": null, "max_window_layers": 48)"),
         [](const ModelConfig& c) {
             return c.mixture.experts == 12 && c.mixture.topk == 3 && c.mixture.normalize && c.F == 24 && c.HS() == 24 &&
                    c.qk_norm == QkNorm::head && !c.window;
         }},
        {"Qwen3-MoE of transformers 5, with windows", llama_like("qwen3_moe", R"("num_local_experts": 12,
            "moe_intermediate_size": 24, "use_sliding_window": true, "sliding_window": 16)"),
         [](const ModelConfig& c) {
             return c.mixture.experts == 12 && c.mixture.topk == 8 && !c.mixture.normalize && c.window == 16 && c.HS() == 16;
         }},
        {"Qwen1.5-MoE", llama_like("qwen2_moe", R"("num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "use_sliding_window": false, "sliding_window": 32768,
            "max_window_layers": 21, "norm_topk_prob": false, "decoder_sparse_step": 1)"),
         [](const ModelConfig& c) {
             return c.F == 24 && c.mixture.shared == 40 && c.mixture.shared_gate && !c.mixture.normalize && c.qkv_bias &&
                    !c.proj_bias && !c.window && c.mixture.dense_layers.empty();
         }},
        {"Qwen3-MoE with dense layers", llama_like("qwen3_moe", R"("num_experts": 12, "moe_intermediate_size": 24,
            "decoder_sparse_step": 2, "mlp_only_layers": [3, 1])"),
         [](const ModelConfig& c) {
             return c.F == 80 && c.expert_width() == 24 && c.mixture.dense_layers == std::vector<int>{0, 1, 2, 3, 4} &&
                    c.mixtures() == 1 && c.has_mixture(5);
         }},
        {"OLMoE", llama_like("olmoe", R"("num_experts": 16, "num_experts_per_tok": 8, "norm_topk_prob": false,
            "clip_qkv": null)"),
         [](const ModelConfig& c) {
             return c.mixture.experts == 16 && c.mixture.topk == 8 && !c.mixture.normalize && c.qk_norm == QkNorm::whole;
         }},
        {"GPT-OSS 20B", llama_like("gpt_oss", R"("num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
            "head_dim": 16, "num_key_value_heads": 2, "attention_bias": true, "hidden_act": "silu", "swiglu_limit": 7.0,
            "initial_context_length": 4096, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention",
            "sliding_attention", "full_attention", "sliding_attention", "full_attention"], "rope_theta": 150000, "rope_scaling":
            {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
            "truncate": false}, "tie_word_embeddings": false, "quantization_config": {"modules_to_not_convert":
            ["lm_head"], "quant_method": "mxfp4"})"),
         [](const ModelConfig& c) {
             return c.mixture.experts == 32 && c.mixture.topk == 4 && c.mixture.normalize && c.mlp_bias && c.proj_bias &&
                    c.sinks && c.activation == Activation::clamped_swiglu && c.window == 16 && c.full_interval == 2 &&
                    c.rope_base == 150000 && c.rope_scaling.factor == 32 && !c.rope_scaling.truncate && c.T == 131072;
         }},
        {"GPT-OSS: defaults", llama_like("gpt_oss", ""),
         [](const ModelConfig& c) {
             return c.mixture.experts == 128 && c.mixture.topk == 4 && c.window == 128 && c.full_interval == 2 &&
                    c.HS() == 64 && c.rope_scaling.type == RopeScaling::Type::yarn && c.rope_scaling.original == 4096 &&
                    c.T == 131072;
         }},
        {"GPT-OSS without scaling",
         llama_like("gpt_oss", R"("rope_scaling": {"rope_type": "default"}, "attention_bias": false)"),
         [](const ModelConfig& c) {
             return c.rope_scaling.type == RopeScaling::Type::none && c.T == 128 && !c.qkv_bias && c.mlp_bias;
         }},
        {"SmolLM3", llama_like("smollm3", R"("no_rope_layers": [1, 1, 0, 1, 1, 0], "no_rope_layer_interval": 4)"),
         [](const ModelConfig& c) { return c.nope_interval == 3 && !c.has_positions(2) && c.tied && c.rope_base == 2e6; }},
        {"OLMo-2", llama_like("olmo2", ""),
         [](const ModelConfig& c) { return c.norm_place == NormPlace::after && c.qk_norm == QkNorm::whole && c.eps == 1e-5; }},
        {"Pythia",
         R"({"model_type": "gpt_neox", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
             "num_attention_heads": 4, "max_position_embeddings": 128, "hidden_act": "gelu", "rotary_emb_base": 1000,
             "rotary_pct": 0.25, "use_parallel_residual": true, "layer_norm_eps": 1e-05, "tie_word_embeddings": false})",
         [](const ModelConfig& c) {
             return c.rotated() == 4 && c.rope_base == 1000 && c.norm_place == NormPlace::parallel && c.mlp_bias && !c.tied &&
                    c.activation == Activation::gelu_exact;
         }},
        {"Gemma", llama_like("gemma", R"("hidden_act": "gelu_pytorch_tanh", "head_dim": 32)"),
         [](const ModelConfig& c) { return c.embedding_scale == 8 && c.norm_plus_one && c.tied && c.HS() == 32; }},
        {"Gemma 1, as published: the class takes the tanh form",
         llama_like("gemma", R"("hidden_act": "gelu", "hidden_activation": null)"),
         [](const ModelConfig& c) { return c.activation == Activation::geglu; }},
        {"Gemma 2: what is not said", llama_like("gemma2", R"("head_dim": 256)"),
         [](const ModelConfig& c) {
             return c.attention_softcap == 50 && c.logit_softcap == 30 && c.window == 4096 && c.full_interval == 2 &&
                    c.attention_scale == 0 && c.norm_place == NormPlace::both;
         }},
        {"Gemma 3, of the first version",
         llama_like("gemma3_text", R"("query_pre_attn_scalar": 100, "rope_local_base_freq": 10000, "rope_theta": 1000000,
            "sliding_window": 16, "sliding_window_pattern": 3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"})"),
         [](const ModelConfig& c) {
             return c.attention_scale == 0.1 && c.local_rope_base == 1e4 && c.rope_base == 1e6 && c.full_interval == 3 &&
                    c.rope(false, 9).scaling.factor == 8 && c.rope(true, 9).scaling.factor == 1 && c.rope(true, 9).base == 1e4;
         }},
        {"Gemma 3 with images",
         R"({"model_type": "gemma3", "vision_config": {}, "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
             "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}})",
         [](const ModelConfig& c) {
             return c.family == "gemma3_text" && c.NH == 8 && c.NKV == 4 && c.V == 262208 && c.L == 34;
         }},
        {"every layer's kind", llama_like("gemma3_text", R"("sliding_window": 16, "layer_types": ["sliding_attention",
            "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"])"),
         [](const ModelConfig& c) { return c.window == 16 && c.full_interval == 2; }},
    };
    for (const auto& [what, text, right] : rows) {
        const ModelConfig c = read(text);
        EXPECT_TRUE(right(c)) << what << to_hf_config(c, "");
        EXPECT_TRUE(holds(family_of(c), c)) << what;
        EXPECT_TRUE(same_model(c, from_hf_config(json(to_hf_config(c, "")), "what was written"))) << what;
    }
}

// The maximum sequence length is the transformers class's default if config.json does not have it.
TEST(Families, LongestSequencesOfTheClasses) {
    const std::pair<const char*, int> rows[] = {
        {"llama", 2048},    {"mistral", 131072},  {"qwen2", 32768},     {"qwen3", 32768},     {"smollm3", 32768},
        {"olmo2", 2048},    {"mixtral", 131072},  {"qwen2_moe", 32768}, {"qwen3_moe", 32768}, {"olmoe", 4096},
        {"granite", 2048},  {"granitemoe", 2048}, {"minicpm", 2048},    {"cohere", 8192},     {"cohere2", 8192},
        {"falcon", 2048},   {"internlm2", 2048},  {"gemma", 8192},      {"gemma2", 8192},     {"gemma3_text", 131072},
        {"gpt_neox", 2048}, {"gpt_oss", 131072}};
    for (const auto& [family, longest] : rows) {
        json j = json::parse(llama_like(family, ""));
        j.erase("max_position_embeddings");
        EXPECT_EQ(from_hf_config(j, "config.json").T, longest) << family;
    }
}

// SmolLM3's own padding token, 128004, exceeds a small vocabulary, and transformers then cannot load the model.
TEST(Families, PaddingTokensAreGiven) {
    ModelConfig c;
    set_family(c, "smollm3");
    c.C = c.NH = c.NKV = 8;
    EXPECT_TRUE(to_hf_config(c, "").at("pad_token_id").is_null());
    EXPECT_EQ(to_hf_config(c, "", {{"pad_token_id", 3}}).at("pad_token_id"), 3);
    c.family = "llama";
    EXPECT_FALSE(to_hf_config(c, "").contains("pad_token_id"));
}

TEST(Families, UnsupportedIsNamed) {
    const std::pair<std::string, std::vector<std::string>> rows[] = {
        {llama_like("llama", R"("hidden_act": "gelu")"), {"'hidden_act'", "gelu_pytorch_tanh"}},
        {llama_like("llama", R"("rope_scaling": {"rope_type": "mrope"})"), {"'rope_scaling'", "mrope", "yarn"}},
        {llama_like("llama", R"("partial_rotary_factor": 0.5)"), {"'partial_rotary_factor'"}},
        {llama_like("llama", R"("rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1, 2]})"),
         {"longrope", "8"}},
        {llama_like("llama", R"("rope_scaling": {"type": "linear", "factor": -1})"), {"rope-scaling-factor"}},
        {llama_like("llama", R"("rope_scaling": {"type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1})"),
         {"low_freq_factor"}},
        {llama_like("qwen2", R"("use_sliding_window": true, "max_window_layers": 3)"), {"'max_window_layers'"}},
        {llama_like("gemma2", R"("layer_types": ["full_attention"])"), {"'layer_types'", "each layer"}},
        {llama_like("gemma2", R"("layer_types": ["full_attention", "full_attention", "full_attention", "sliding_attention",
            "full_attention", "full_attention"])"),
         {"'layer_types'", "every n-th layer"}},
        {llama_like("gemma2", R"("layer_types": ["a", "a", "a", "a", "a", "a"])"), {"'layer_types'", "sliding_attention"}},
        {llama_like("gemma3_text", R"("attn_logit_softcapping": 50.0)"), {"'attn_logit_softcapping'"}},
        {llama_like("gemma3_text", R"("use_bidirectional_attention": true)"), {"'use_bidirectional_attention'"}},
        {llama_like("gemma2", R"("query_pre_attn_scalar": 0)"), {"attention scores"}},
        {llama_like("gemma2", R"("query_pre_attn_scalar": 1e300)"), {"attention scores", "1e-150"}},
        {llama_like("gemma2", R"("attn_logit_softcapping": 1e-300)"), {"attn-logit-softcapping", "0.01"}},
        {llama_like("gemma2", R"("final_logit_softcapping": 1e300)"), {"final-logit-softcapping"}},
        {llama_like("llama", R"("rope_scaling": {"type": "dynamic", "factor": 1e-300})"), {"rope-scaling-factor", "0.001"}},
        {llama_like("llama", R"("rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1e300})"), {"cos and sin"}},
        {llama_like("llama", R"("rope_scaling": {"type": "longrope", "factor": 2, "original_max_position_embeddings": 1,
            "short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [1, 1, 1, 1, 1, 1, 1, 1]})"),
         {"cos and sin"}},
        {llama_like("llama", R"("rope_scaling": {"type": "longrope", "factor": 2,
            "short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [1, 1, 1e-300, 1, 1, 1, 1, 1]})"),
         {"longrope", "1e-300"}},
        {llama_like("smollm3", R"("no_rope_layers": [1, 0, 1, 1, 0, 1])"), {"'no_rope_layers'"}},
        {llama_like("llama", R"("rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5})"),
         {"'rope_scaling'", "'rope_parameters'", "contradict"}},
        {llama_like("llama", R"("rope_scaling": {"type": "linear", "factor": 2},
            "rope_parameters": {"rope_type": "linear", "factor": 4})"),
         {"'rope_scaling'", "'rope_parameters'", "contradict"}},
        {llama_like("qwen2", R"("sliding_window": 16, "layer_types": ["sliding_attention", "sliding_attention",
            "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"])"),
         {"'layer_types'", "'use_sliding_window'"}},
        {llama_like("gemma2", R"("sliding_window": null, "layer_types": ["sliding_attention", "full_attention",
            "sliding_attention", "full_attention", "sliding_attention", "full_attention"])"),
         {"'layer_types'", "'sliding_window'"}},
        {llama_like("smollm3", R"("use_sliding_window": true, "sliding_window": 16)"), {"'use_sliding_window'"}},
        {llama_like("deepseek_v3", ""), {"model_type", "deepseek_v3", "gemma3_text"}},
        {llama_like("mixtral", R"("num_local_experts": 0)"), {"'num_local_experts'", "at least 1"}},
        {llama_like("mixtral", R"("num_experts_per_tok": 9)"), {"moe-router-topk is 9", "8"}},
        {llama_like("mixtral", R"("router_jitter_noise": 0.1)"), {"'router_jitter_noise'"}},
        {llama_like("qwen3_moe", R"("decoder_sparse_step": 0)"), {"'decoder_sparse_step'", "at least 1"}},
        {llama_like("qwen3_moe", R"("mlp_only_layers": [0.5])"), {"'mlp_only_layers'", "a list of layers"}},
        {llama_like("qwen2_moe", R"("shared_expert_intermediate_size": 0)"),
         {"'shared_expert_intermediate_size'", "at least 1"}},
        {llama_like("qwen2_moe", R"("use_sliding_window": true)"), {"'use_sliding_window'", "layer_types"}},
        {llama_like("qwen3_moe", R"("num_experts": 8, "num_local_experts": 9)"), {"'num_experts'", "'num_local_experts'"}},
        {llama_like("olmoe", R"("clip_qkv": 8.0)"), {"'clip_qkv'", "null"}},
        {llama_like("granite", R"("residual_multiplier": 0)"), {"residual terms", "0.001"}},
        {llama_like("granitemoe", R"("logits_scaling": 0)"), {"divisor of logits"}},
        {llama_like("granitemoe", R"("quantization_config": {"quant_method": "mxfp4"})"), {"'quantization_config'"}},
        {llama_like("opt", R"("ffn_dim": 80, "word_embed_proj_dim": 32)"), {"'word_embed_proj_dim'", "only 64"}},
        {llama_like("opt", R"("ffn_dim": 80, "do_layer_norm_before": false)"), {"'do_layer_norm_before'", "only true"}},
        {llama_like("cohere", R"("use_qk_norm": true)"), {"'use_qk_norm'", "only false"}},
        {llama_like("cohere", R"("logit_scale": 0)"), {"divisor of logits"}},
        {llama_like("cohere2", R"("sliding_window_pattern": 3)"), {"'sliding_window_pattern'", "layer_types"}},
        {llama_like("mpt", R"("d_model": 64, "n_layers": 2, "n_heads": 4, "attn_config": {"clip_qkv": 6})"),
         {"'clip_qkv'", "only null"}},
        {llama_like("mpt", R"("d_model": 64, "n_layers": 2, "n_heads": 4, "attn_config": {"alibi": false})"),
         {"'alibi'", "only true"}},
        {llama_like("mpt", R"("d_model": 64, "n_layers": 2, "n_heads": 4, "attn_config": 7)"), {"'attn_config'", "an object"}},
        {llama_like("mpt", R"("d_model": 64, "n_layers": 2, "n_heads": 4, "norm_type": "rmsnorm")"),
         {"'norm_type'", "low_precision_layernorm"}},
        {llama_like("phi", R"("qk_layernorm": true)"), {"'qk_layernorm'", "only false"}},
        {R"({"model_type": "gptj", "vocab_size": 9, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8,
             "rotary_dim": null})",
         {"'rotary_dim'", "a number"}},
        {R"({"model_type": "codegen", "vocab_size": 9, "n_embd": 18, "n_layer": 1, "n_head": 3, "n_positions": 8,
             "rotary_dim": 2})",
         {"'n_embd'", "a multiple of 4"}},
        {llama_like("exaone", R"("num_layers": 5)"), {"'num_layers'", "'num_hidden_layers'", "contradict"}},
        {llama_like("internlm3", R"("bias": true)"), {"'bias'", "only false"}},
        {llama_like("gpt_neo", R"("num_layers": 2, "num_heads": 4, "attention_types": [[["local"], 1]])"),
         {"'attention_types'", "each layer"}},
        {llama_like("gpt_neo", R"("num_layers": 2, "num_heads": 4, "attention_types": [["local", 1]])"),
         {"'attention_types'", "times"}},
        {llama_like("gpt_neo", R"("num_layers": 2, "num_heads": 4, "attention_types": [[[], 9000000000000000000]])"),
         {"'attention_types'", "times"}},
        {llama_like("gpt_neo", R"("num_layers": 3, "num_heads": 4, "attention_types": [[["local", "global", "global"], 1]])"),
         {"'attention_types'", "every n-th layer"}},
        {llama_like("gpt_neo", R"("num_layers": 2, "num_heads": 4, "attention_layers": ["local", "local"])"),
         {"'attention_layers'", "only"}},
        {llama_like("falcon", R"("alibi": true)"), {"'alibi'", "only false"}},
        {llama_like("falcon", R"("num_ln_in_parallel_attn": 2)"), {"'num_ln_in_parallel_attn'", "only 1"}},
        {llama_like("falcon", R"("new_decoder_architecture": true, "parallel_attn": false)"), {"'parallel_attn'", "only true"}},
        {llama_like("falcon", R"("new_decoder_architecture": true, "num_kv_heads": 3)"), {"not divisible"}},
        {llama_like("minicpm", R"("num_experts": 8)"), {"'num_experts'", "only 0"}},
        {llama_like("minicpm", R"("sparse_config": {"topk": 64})"), {"'sparse_config'", "null"}},
        {llama_like("minicpm", R"("dim_model_base": 0)"), {"divisor of logits"}},
        {llama_like("train_gpt", R"("residual_scale": 0.5, "norm_place": "both")"), {"residual terms", "--norm-place before"}},
        {llama_like("gpt_oss", R"("swiglu_limit": 6.5)"), {"'swiglu_limit'", "only 7.0"}},
        {llama_like("gpt_oss", R"("swiglu_alpha": 1.5)"), {"'swiglu_alpha'", "only 1.702"}},
        {llama_like("gpt_oss", R"("hidden_act": "gelu")"), {"'hidden_act'", "silu"}},
        {llama_like("gpt_oss", R"("quantization_config": {"quant_method": "gptq"})"), {"'quantization_config'", "mxfp4"}},
        {llama_like("train_gpt", R"("num_experts": 8, "scoring_func": "sqrtsoftplus")"), {"'scoring_func'", "softmax"}},
        {llama_like("train_gpt", R"("num_experts": 8, "topk_method": "noaux_tc")"), {"sigmoid scores"}},
        {llama_like("train_gpt", R"("num_experts": 8, "topk_method": "group_limited_greedy")"), {"'topk_method'"}},
        {llama_like("train_gpt", R"("num_experts": 8, "n_group": 3)"), {"moe-router-num-groups is 3"}},
        {R"({"model_type": "gpt_neox", "vocab_size": 9, "hidden_size": 60, "intermediate_size": 80, "num_hidden_layers": 2,
             "num_attention_heads": 4})",
         {"rotated"}},
    };
    for (const auto& [text, parts] : rows) expect_error([&, &t = text] { check_config(read(t)); }, parts);
    ModelConfig granite;
    set_family(granite, "granite");
    expect_error([&] { check_virtual_tokens_of(granite); }, {"virtual tokens", "granite", "--lora-rank 16"});
}

// A key that may change another program's results is reported, unless its value disables it.
TEST(Families, UnknownKeysAreNamed) {
    const auto unknown = [](const std::string& text) { return unknown_keys(json::parse(text), "config.json"); };
    using Names = std::vector<std::string>;
    EXPECT_EQ(unknown(llama_like("llama", R"("embedding_multiplier": 12.0, "logits_scaling": 8, "torch_dtype": "bfloat16",
        "residual_multiplier": null, "use_mup": false, "_attn_implementation": "sdpa", "bos_token_id": 1, "extras": {},
        "cfg": [3])")),
              (Names{"cfg", "embedding_multiplier", "logits_scaling"}));
    EXPECT_EQ(unknown(llama_like("llama", R"("rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [2, 3]})")),
              Names{"rope_scaling.mrope_section"});
    EXPECT_EQ(unknown(llama_like("llama", R"("sliding_window": 4096, "use_sliding_window": false)")), Names{});
    EXPECT_EQ(unknown(llama_like("qwen2", R"("sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": false)")),
              Names{});
}

// Files of transformers 4, saved again by a newer version, have both keys.
TEST(Families, BothKeysOfRopeScaling) {
    const std::string scaling = R"("rope_scaling": {"type": "linear", "factor": 4})";
    const ModelConfig older = read(llama_like("llama", scaling));
    EXPECT_EQ(older.rope_scaling.factor, 4);
    for (const char* newer : {R"({"rope_type": "default"})", R"({"rope_theta": 10000.0, "rope_type": "default"})", "{}",
                              R"({"rope_type": "linear", "factor": 4.0})"}) {
        const ModelConfig both = read(llama_like("llama", scaling + R"(, "rope_parameters": )" + newer));
        EXPECT_TRUE(same_model(both, older)) << newer;
    }
    const ModelConfig newer =
        read(llama_like("llama", R"("rope_scaling": {}, "rope_parameters": {"type": "linear", "factor": 4})"));
    EXPECT_TRUE(same_model(newer, older));
}

// ---- the family of a combination ------------------------------------------------------------------------------------------
struct Combination {
    const char* family;
    std::function<void(ModelConfig&)> set;
};

TEST(Families, CombinationsFindTheirClass) {
    const std::vector<Combination> rows = {
        {"llama", [](ModelConfig&) {}},
        {"llama", [](ModelConfig& c) { c.qkv_bias = c.proj_bias = c.mlp_bias = true; }},
        {"llama", [](ModelConfig& c) { c.activation = Activation::geglu; }},
        {"llama", [](ModelConfig& c) { c.hidden_dropout = c.attention_dropout = 0.1; }},
        {"mistral", [](ModelConfig& c) { c.C = 63; }},  // transformers' Llama requires the width to be a multiple of the heads
        {"mistral", [](ModelConfig& c) { c.window = 8; }},
        {"qwen2", [](ModelConfig& c) { c.qkv_bias = true; }},
        {"qwen3", [](ModelConfig& c) { c.qk_norm = QkNorm::head; }},
        {"qwen3",
         [](ModelConfig& c) {
             c.qk_norm = QkNorm::head;
             c.window = 8;
             c.full_interval = 2;
         }},
        {"smollm3", [](ModelConfig& c) { c.nope_interval = 2; }},
        {"olmo2",
         [](ModelConfig& c) {
             c.norm_place = NormPlace::after;
             c.qk_norm = QkNorm::whole;
         }},
        {"gpt2",
         [](ModelConfig& c) {
             set_family(c, "gpt2");
             c.attention_scale = 1;
             c.activation = Activation::relu2;
             c.tied = false;
         }},
        {"gpt_neox",
         [](ModelConfig& c) {
             set_family(c, "gpt_neox");
             c.norm_place = NormPlace::before;
             c.qkv_bias = c.proj_bias = false;
         }},
        {"gemma2",
         [](ModelConfig& c) {
             set_family(c, "gemma2");
             c.logit_softcap = 20;
             c.window = 8;
         }},
        {"mixtral", [](ModelConfig& c) { c.mixture.experts = 5; }},
        {"mixtral", [](ModelConfig& c) { set_family(c, "mixtral"); }},
        {"gpt_oss",
         [](ModelConfig& c) {
             set_family(c, "gpt_oss");
             c.mixture = {5, 3};
             c.window = 0;
         }},
        {"qwen3_moe",
         [](ModelConfig& c) {
             c.mixture = {5, 3, false, false};
             c.qk_norm = QkNorm::head;
             c.window = 7;
         }},
        {"qwen3_moe",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.mixture.width = 24;
             c.mixture.dense_layers = {0, 2};
             c.qk_norm = QkNorm::head;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.mixture.dense_layers = {3};
         }},
        {"llama",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.mixture.dense_layers = {3, 2, 0, 1, 9};
         }},
        {"qwen2_moe",
         [](ModelConfig& c) {
             set_family(c, "qwen2_moe");
             c.mixture.dense_layers = {1};
             c.window = 8;
             c.full_interval = 2;
         }},
        {"qwen2_moe",
         [](ModelConfig& c) {
             c.mixture = {5, 3, false, false};
             c.mixture.shared = 40;
             c.mixture.shared_gate = true;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             set_family(c, "qwen2_moe");
             c.mixture.shared_gate = false;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             set_family(c, "qwen2_moe");
             c.qk_norm = QkNorm::head;
         }},
        {"olmoe",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.qk_norm = QkNorm::whole;
             c.qkv_bias = c.proj_bias = true;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.qk_norm = QkNorm::whole;
             c.head_size = 24;  // OLMoE's heads divide the width
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.mixture = {5, 3, true};
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.mixture = {5, 3, false, false};
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.mixture = {5, 3, false, true, 2.5};
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.activation = Activation::gelu;
         }},
        {"mistral",
         [](ModelConfig& c) {
             set_family(c, "mixtral");
             c.mixture.experts = 0;
             c.window = 8;
         }},
        {"train_gpt", [](ModelConfig& c) { c.sinks = true; }},
        {"train_gpt", [](ModelConfig& c) { c.position = Position::none; }},
        {"train_gpt", [](ModelConfig& c) { c.norm_place = NormPlace::after; }},
        {"train_gpt", [](ModelConfig& c) { c.embedding_norm = true; }},
        {"granite", [](ModelConfig& c) { c.embedding_scale = 2; }},
        {"granite", [](ModelConfig& c) { c.attention_scale = 0.3; }},
        {"granite",
         [](ModelConfig& c) {
             c.residual_scale = 0.22;
             c.logit_divisor = 8;
         }},
        {"granitemoe",
         [](ModelConfig& c) {
             c.mixture = {5, 3};
             c.residual_scale = 0.22;
         }},
        {"opt", [](ModelConfig& c) { set_family(c, "opt"); }},
        {"internlm2",
         [](ModelConfig& c) {
             set_family(c, "internlm2");
             c.qkv_bias = c.proj_bias = true;
         }},
        {"mpt",
         [](ModelConfig& c) {
             set_family(c, "mpt");
             c.F = 256;
             c.attention_scale = 0.3;
         }},
        {"falcon", [](ModelConfig& c) { set_family(c, "falcon"); }},
        {"gpt_neo",
         [](ModelConfig& c) {
             set_family(c, "gpt_neo");
             c.window = 8;
             c.full_interval = 2;
             c.full_offset = 1;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.window = 8;
             c.full_interval = 2;
             c.full_offset = 1;
         }},
        {"internlm3", [](ModelConfig& c) { set_family(c, "internlm3"); }},
        {"exaone", [](ModelConfig& c) { set_family(c, "exaone"); }},
        {"phi",
         [](ModelConfig& c) {
             set_family(c, "phi");
             c.rotary_fraction = 0.25;
         }},
        {"gptj",
         [](ModelConfig& c) {
             set_family(c, "gptj");
             c.rotary_fraction = 0.75;
         }},
        {"codegen", [](ModelConfig& c) { set_family(c, "codegen"); }},
        {"falcon",
         [](ModelConfig& c) {
             set_family(c, "falcon");
             c.norm_place = NormPlace::parallel;
             c.qkv_bias = c.proj_bias = c.mlp_bias = true;
         }},
        {"starcoder2",
         [](ModelConfig& c) {
             set_family(c, "falcon");
             c.norm_place = NormPlace::before;  // a Falcon has it only with one key/value head, or as many as query heads
         }},
        {"cohere",
         [](ModelConfig& c) {
             set_family(c, "cohere");
             c.logit_divisor = 1 / 0.3;
         }},
        {"cohere2",
         [](ModelConfig& c) {
             set_family(c, "cohere2");
             c.window = 8;
             c.full_interval = 4;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             set_family(c, "cohere");
             c.norm_bias = true;
         }},
        {"minicpm",
         [](ModelConfig& c) {
             set_family(c, "minicpm");
             c.residual_scale = 1.4 / std::sqrt(4.0);
             c.logit_divisor = 9;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c.qk_norm = QkNorm::head;
             c.residual_scale = 0.22;
         }},
        {"phi3", [](ModelConfig& c) { c.rotary_fraction = 0.5; }},
        {"olmo3",
         [](ModelConfig& c) {
             set_family(c, "olmo2");
             c.window = 8;
             c.full_interval = 4;
         }},
        {"exaone4",
         [](ModelConfig& c) {
             set_family(c, "exaone4");
             c.window = 8;
             c.full_interval = c.nope_interval = 4;
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             set_family(c, "exaone4");
             c.window = 8;
             c.full_interval = 4;  // the class has no positions in layers without a window
         }},
        {"arcee", [](ModelConfig& c) { c.activation = Activation::relu2; }},
        {"seed_oss", [](ModelConfig& c) { c.qkv_bias = c.mlp_bias = true; }},
        {"starcoder2",
         [](ModelConfig& c) {
             set_family(c, "starcoder2");
             c.window = 8;
         }},
        {"stablelm", [](ModelConfig& c) { c.norm = Norm::layernorm; }},
        {"train_gpt",
         [](ModelConfig& c) {
             set_family(c, "bloom");
             c.F = 100;  // the class fixes 4 times the width
         }},
        {"train_gpt",
         [](ModelConfig& c) {
             c = ModelConfig{};
             c.norm = Norm::layernorm;
             c.norm_place = NormPlace::parallel;
             c.norm_plus_one = c.qkv_bias = c.sinks = c.embedding_norm = c.tied = true;
             c.qk_norm = QkNorm::whole;
             c.position = Position::alibi;
             c.activation = Activation::relu2;
             c.head_size = 24;
             c.attention_scale = 0.17;
             c.attention_softcap = 11;
             c.logit_softcap = 12;
             c.window = 7;
             c.full_interval = 3;
             c.nope_interval = 2;
             c.embedding_scale = 1.7;
             c.eps = 1e-3;
             c.init_std = 0.3;
         }},
    };
    for (size_t i = 0; i < rows.size(); i++) {
        ModelConfig c;
        rows[i].set(c);
        c.L = 4;
        if (!c.C) c.C = 64;
        c.NH = 4;
        const std::set<std::string> ungrouped = {"gpt2", "bloom", "gpt_neox", "opt", "mpt", "gptj", "codegen", "gpt_neo"};
        c.NKV = ungrouped.count(c.family) ? 4 : 2;
        if (c.C % c.NH) c.head_size = 16;
        if (!c.F) c.F = 80;
        c.T = 32;
        c.V = 50;
        if (c.family == "gemma2") c.embedding_scale = 8;
        check_config(c);
        const ModelConfig before = c;
        match_family(c);
        EXPECT_EQ(c.family, rows[i].family) << "row " << i;
        const ModelConfig again = from_hf_config(json(to_hf_config(c, "")), "what was written");
        EXPECT_TRUE(same_model(again, before)) << "row " << i << to_hf_config(c, "");
        // The comparison detects a changed field.
        ModelConfig other = before;
        other.eps *= 2;
        EXPECT_FALSE(same_model(other, before));
    }
}

// A field missing in our own format would be lost silently, so change each one.
TEST(Families, OurFormHasEveryField) {
    ModelConfig plain;
    plain.family = "train_gpt";
    plain.L = 4;
    plain.C = 64;
    plain.NH = plain.NKV = 4;
    plain.F = 80;
    plain.T = 32;
    plain.V = 50;
    plain.window = 8;
    const std::vector<std::function<void(ModelConfig&)>> changes = {
        [](ModelConfig& c) { c.L = 5; },
        [](ModelConfig& c) { c.C = 128; },
        [](ModelConfig& c) { c.NH = 8; },
        [](ModelConfig& c) { c.NKV = 2; },
        [](ModelConfig& c) { c.F = 81; },
        [](ModelConfig& c) { c.T = 33; },
        [](ModelConfig& c) { c.V = 51; },
        [](ModelConfig& c) { c.norm = Norm::layernorm; },
        [](ModelConfig& c) { c.norm_place = NormPlace::both; },
        [](ModelConfig& c) { c.norm_place = NormPlace::shared; },
        [](ModelConfig& c) {
            c.norm = Norm::layernorm;
            c.norm_bias = false;
        },
        [](ModelConfig& c) { c.norm_plus_one = true; },
        [](ModelConfig& c) { c.qk_norm = QkNorm::head; },
        [](ModelConfig& c) { c.position = Position::none; },
        [](ModelConfig& c) {
            c.position = Position::learned;
            c.position_offset = 2;
        },
        [](ModelConfig& c) { c.activation = Activation::gelu_exact; },
        [](ModelConfig& c) { c.qkv_bias = true; },
        [](ModelConfig& c) { c.proj_bias = true; },
        [](ModelConfig& c) { c.mlp_bias = true; },
        [](ModelConfig& c) { c.head_bias = true; },
        [](ModelConfig& c) { c.head_size = 24; },
        [](ModelConfig& c) { c.attention_scale = 0.3; },
        [](ModelConfig& c) { c.attention_softcap = 3; },
        [](ModelConfig& c) { c.logit_softcap = 3; },
        [](ModelConfig& c) { c.sinks = true; },
        [](ModelConfig& c) { c.window = 9; },
        [](ModelConfig& c) { c.full_interval = 2; },
        [](ModelConfig& c) {
            c.full_interval = 2;
            c.full_offset = 1;
        },
        [](ModelConfig& c) { c.nope_interval = 2; },
        [](ModelConfig& c) { c.rotary_fraction = 0.5; },
        [](ModelConfig& c) { c.local_rope_base = 77; },
        [](ModelConfig& c) { c.embedding_scale = 3; },
        [](ModelConfig& c) { c.residual_scale = 3; },
        [](ModelConfig& c) { c.logit_divisor = 3; },
        [](ModelConfig& c) { c.embedding_norm = true; },
        [](ModelConfig& c) { c.tied = true; },
        [](ModelConfig& c) { c.eps = 1e-2; },
        [](ModelConfig& c) { c.rope_base = 77; },
        [](ModelConfig& c) { c.init_std = 0.3; },
        [](ModelConfig& c) { c.mixture.experts = 8; },
        [](ModelConfig& c) {
            c.mixture = {8, 3, true, false, 2.5};
        },
        [](ModelConfig& c) { c.mixture = {8, 4, true, true, 1, 0, 0, false, {}, 4, 2, true}; },
        [](ModelConfig& c) {
            c.mixture = {8, 3};
            c.mixture.dense_layers = {1};
        },
        [](ModelConfig& c) {
            c.mixture = {8, 3};
            c.mixture.width = 24;
            c.mixture.dense_layers = {1};
        },
        [](ModelConfig& c) {
            c.mixture = {8, 3};
            c.mixture.shared = 24;
        },
        [](ModelConfig& c) {
            c.mixture = {8, 3};
            c.mixture.shared = 24;
            c.mixture.shared_gate = true;
        },
        [](ModelConfig& c) {
            c.rope_scaling = {RopeScaling::Type::yarn, 4, 8};
            c.rope_scaling.beta_fast = 9;
            c.rope_scaling.mscale = c.rope_scaling.mscale_all_dim = 0.5;
            c.rope_scaling.truncate = false;
            c.rope_scaling.attention_factor = 1.5;
        },
        [](ModelConfig& c) {
            c.rope_scaling = {RopeScaling::Type::yarn, 4, 16};  // which could be longer
        },
        [](ModelConfig& c) {
            c.rope_scaling = {RopeScaling::Type::llama3, 4, 8, 2, 3};
        },
        [](ModelConfig& c) {
            c.rope_scaling = {RopeScaling::Type::longrope, 4, 8};
            c.rope_scaling.short_factor = c.rope_scaling.long_factor = {1, 2, 3, 4, 5, 6, 7, 8};
        },
        [](ModelConfig& c) {
            c.rope_scaling = {RopeScaling::Type::dynamic, 4, 8};
        },
    };
    for (size_t i = 0; i < changes.size(); i++) {
        ModelConfig c = plain;
        changes[i](c);
        check_config(c);
        EXPECT_FALSE(same_model(c, plain)) << "change " << i;
        EXPECT_TRUE(same_model(c, from_hf_config(json(to_hf_config(c, "")), "ours"))) << "change " << i;
    }
}

// The classes of Gemma 2 and 3 build the window's mask in every pass and fail if sliding_window is null. Only keys that a
// class checks before use may be null.
TEST(Families, NothingIsNullThatTransformersNeeds) {
    const std::set<std::string> may_be_null = {"pad_token_id", "attn_logit_softcapping", "final_logit_softcapping"};
    for (const Family& f : families())
        for (const int window : {0, 7, 999})
            for (const int interval : {0, 1, 2})
                for (const int layers : {1, 3}) {
                    ModelConfig c;
                    set_family(c, f.name);
                    c.L = layers;
                    c.C = 64;
                    c.NH = 4;
                    c.NKV = std::string(f.name) == "gpt2" || std::string(f.name) == "bloom" || std::string(f.name) == "gpt_neox"
                                ? 4
                                : 2;
                    c.F = std::string(f.name) == "bloom" ? 256 : 80;
                    c.T = 32;
                    c.V = 50;
                    c.window = window;
                    c.full_interval = interval;
                    if (std::string(f.name).find("gemma") == 0) c.embedding_scale = 8;
                    const ModelConfig wanted = c;
                    match_family(c);
                    const json written = to_hf_config(c, "float32");
                    EXPECT_TRUE(same_model(from_hf_config(written, "what was written"), wanted)) << written;
                    const std::set<std::string> may_lack_windows = {"mistral", "mixtral",    "ministral", "exaone4",
                                                                    "phi3",    "starcoder2", "train_gpt"};
                    const bool windows_by_switch = may_lack_windows.count(c.family) || written.contains("use_sliding_window");
                    for (const auto& [key, value] : written.items())
                        EXPECT_TRUE(!value.is_null() || may_be_null.count(key) ||
                                    (key == "sliding_window" && windows_by_switch))
                            << key << " in " << written;
                }
}

// A golden model under other names of its tensors: `wrapped` of each.
void write_wrapped(const std::string& from, const std::string& to, const std::function<std::string(std::string)>& wrapped) {
    const std::string file = read_whole_file(from + "/model.safetensors");
    uint64_t length = 0;
    memcpy(&length, file.data(), 8);
    const auto given = nlohmann::ordered_json::parse(file.substr(8, length));
    nlohmann::ordered_json header;
    for (const auto& [name, entry] : given.items()) header[name == "__metadata__" ? name : wrapped(name)] = entry;
    test::write_file(to + "/model.safetensors", safetensors_start(header) + file.substr(8 + length));
    test::write_file(to + "/config.json", read_whole_file(from + "/config.json"));
}

TEST(Families, NamesOfWrappedModules) {
    test::TemporaryDirectory dir;
    const std::string from = golden("families/llama");
    const ModelConfig c = read_config(from);
    const ParameterTable table(c);
    std::vector<float> wanted(table.size), got(table.size);
    read_tensors(from, c, table, wanted.data());
    const std::string layer = "layers.0.";
    const std::function<std::string(std::string)> forms[] = {
        [](const std::string& n) { return "_orig_mod." + n; }, [](const std::string& n) { return "module." + n; },
        [](const std::string& n) { return "module._orig_mod." + n; },
        [](const std::string& n) { return "_fsdp_wrapped_module." + n; },
        [&](std::string n) {
            if (const size_t at = n.find(layer); at != std::string::npos)
                n.insert(at + layer.size(), "_fsdp_wrapped_module._checkpoint_wrapped_module.");
            return n;
        }};
    for (const auto& form : forms) {
        write_wrapped(from, dir / "", form);
        std::fill(got.begin(), got.end(), 0.f);
        read_tensors(dir / "", read_config(dir / ""), table, got.data());
        EXPECT_EQ(got, wanted) << form("model.layers.0.x");
    }
    write_wrapped(from, dir / "", [](const std::string& n) { return "other." + n; });
    expect_error([&] { read_tensors(dir / "", c, table, got.data()); }, {"has no tensor"});
}

// Files of other formats, and places of files, are named with the command that converts them; they are not called damaged.
TEST(Families, OtherFormatsAreNamed) {
    test::TemporaryDirectory dir;
    const auto unsupported = [](const std::function<void()>& f, const std::vector<std::string>& parts) {
        EXPECT_THROW(f(), Unsupported);
        expect_error(f, parts);
    };
    const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123456\n";
    const std::string model = dir / "model.safetensors", tokenizer = dir / "tokenizer.json";
    test::write_file(model, pointer);
    unsupported([&] { SafetensorsReader::open(dir / ""); }, {"model.safetensors is a Git LFS pointer", "git -C", "lfs pull"});
    test::write_file(tokenizer, pointer);
    unsupported([&] { Tokenizer::load(dir / ""); }, {"tokenizer.json is a Git LFS pointer"});
    unsupported([&] { FileSource source(tokenizer); }, {"is a Git LFS pointer"});
    std::filesystem::remove(model);
    std::filesystem::remove(tokenizer);
    for (const char* name : {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"}) {
        test::write_file(dir / name, "x");
        unsupported([&] { SafetensorsReader::open(dir / ""); }, {name, "pickle", "python3 -c", "save_pretrained"});
        std::filesystem::remove(dir / name);
    }
    test::write_file(dir / "training_args.bin", "x");
    expect_error([&] { SafetensorsReader::open(dir / ""); }, {"neither model.safetensors"});
    for (const auto& [name, content, part] :
         {std::tuple{"tekken.json", "{}", "tekken"}, std::tuple{"qwen.tiktoken", "IQ== 0\nIg== 1\n", "TikTokenConverter"},
          std::tuple{"tokenizer.model", "IQ== 0\nIg== 1\n", "TikTokenConverter"}}) {
        test::write_file(dir / name, content);
        unsupported([&, n = name] { Tokenizer::load(dir / n); }, {name, part, "HINT"});
        if (std::string(name) != "tokenizer.model") unsupported([&] { Tokenizer::load(dir / ""); }, {name, part});
        std::filesystem::remove(dir / name);
    }
    test::write_file(dir / "vocab.json", "{}");
    test::write_file(dir / "merges.txt", "");
    unsupported([&] { Tokenizer::load(dir / ""); }, {"vocab.json and merges.txt", "AutoTokenizer"});
    EXPECT_THROW(read(llama_like("deepseek_v3", "")), Unsupported);
    EXPECT_THROW(read(llama_like("llama", R"("quantization_config": {"bits": 4})")), Unsupported);
}

// GPT-OSS's experts in MXFP4 have the bits that transformers widens them to (dev/ref/mxfp4_golden.py), on every tp rank.
TEST(Families, MXFP4IsWidened) {
    const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int byte = 0; byte < 256; byte++)
        for (int scale = 0; scale < 255; scale++)
            for (const size_t i : {0, 1}) {
                const char code = (char)byte, power = (char)scale;
                const int bits = i ? byte >> 4 : byte & 15;
                const double x = std::ldexp(magnitudes[bits & 7], scale - 127);
                EXPECT_EQ(mxfp4_number(&code, &power, i), (float)(bits & 8 ? -x : x));
            }
    ModelConfig c;
    set_family(c, "gpt_oss");
    c.L = 1;
    c.C = c.F = 32;
    c.NH = c.NKV = 2;
    c.T = 16;
    c.V = 9;
    c.mixture = {3, 2};
    pad_vocabulary(c, 2);
    const test::TemporaryDirectory dir;
    const SafetensorsReader files = SafetensorsReader::open(golden("mxfp4.safetensors"));
    const std::string experts = "model.layers.0.mlp.experts.";
    // Writes a model with these tensors of the experts, and returns its parameters on a rank.
    const auto model_with = [&](const std::vector<std::string>& given) {
        SafetensorsWriter writer(dir / "model.safetensors");
        std::vector<std::pair<std::string, std::string>> tensors;
        const auto add = [&](const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape,
                             const std::string& bytes) {
            writer.declare(name, dtype, shape);
            tensors.emplace_back(name, bytes);
        };
        for (const std::string& name : given) {
            const TensorView& view = *files.find(name);
            add(experts + name, view.dtype, view.shape, {view.data, view.bytes});
        }
        const ParameterTable table(c);
        for (const TensorSpec& spec : table.rows)
            for (const HfTensor& t : spec.hf)
                if (!files.find(t.name.substr(std::min(t.name.size(), experts.size()))))
                    add(t.name, "BF16", file_shape(spec, t), std::string((size_t)t.rows * (size_t)spec.whole_cols * 2, '\0'));
        for (const auto& [name, bytes] : tensors) writer.write(name, bytes.data(), bytes.size());
        writer.finish();
        std::vector<floatX> params;
        for (const int rank : {0, 1}) {
            Part part = whole_model(c);
            part.tp = {2, rank};
            const ParameterTable of_rank(c, part);
            std::vector<floatX> mine(of_rank.size);
            read_tensors(dir / "model.safetensors", c, of_rank, mine.data());
            params.insert(params.end(), mine.begin(), mine.end());
        }
        std::filesystem::remove(dir / "model.safetensors");
        return params;
    };
    const std::vector<std::string> packed = {"gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks",
                                             "down_proj_scales"};
    const std::vector<floatX> widened = model_with(packed);
    test::expect_same_bits(widened, model_with({"gate_up_proj", "down_proj"}), "parameters");
    EXPECT_GT(std::count_if(widened.begin(), widened.end(), [](floatX x) { return (float)x != 0; }), 7000);
    expect_error([&] { model_with({packed[0], packed[2], packed[3]}); }, {"gate_up_proj_blocks", "no scale"});
    expect_error([&] { model_with({packed[0], packed[1], packed[2], packed[3], "down_proj"}); }, {"down_proj_blocks"});
}

TEST(Families, PresetsAreOfTheirFamily) {
    for (const Preset& preset : presets()) {
        ModelConfig c = config_from_preset(preset.name);
        if (!c.V) c.V = 300;
        check_config(c);
        EXPECT_TRUE(holds(family_of(c), c)) << preset.name;
    }
    const std::pair<const char*, size_t> published[] = {
        {"llama3-8b", 8030261248},    {"smollm2-135m", 134515008},        {"mistral-7b", 7241732096},
        {"qwen2.5-7b", 7615616512},   {"qwen3-0.6b", 596049920},          {"olmo2-1b", 1484916736},
        {"pythia-160m", 162322944},   {"gemma3-270m", 268098176},         {"mixtral-8x7b", 46702792704},
        {"olmoe-1b-7b", 6919161856},  {"qwen1.5-moe-a2.7b", 14315784192}, {"qwen3-30b-a3b", 30532122624},
        {"gpt-oss-20b", 20914757184},
    };
    for (const auto& [name, count] : published) EXPECT_EQ(ParameterTable(config_from_preset(name)).trained, count) << name;
    const std::pair<const char*, const char*> counts[] = {
        {"mixtral-8x7b", "46.7B parameters, 12.9B active"},   {"olmoe-1b-7b", "6.92B parameters, 1.28B active"},
        {"gpt-oss-20b", "20.9B parameters, 4.19B active"},    {"qwen1.5-moe-a2.7b", "14.3B parameters, 2.69B active"},
        {"qwen3-30b-a3b", "30.5B parameters, 3.35B active"},  {"llm-jp-3-8x1.8b", "9.27B parameters, 2.92B active"},
        {"llm-jp-3-8x13b", "73.2B parameters, 22.2B active"}, {"llama3-8b", "8.03B parameters"}};
    for (const auto& [name, words] : counts) EXPECT_EQ(parameters_in_words(config_from_preset(name)), words) << name;
    // As published, without embeddings.
    for (const auto& [name, count] :
         {std::pair<const char*, size_t>{"llm-jp-3-8x1.8b", 8858863616}, {"llm-jp-3-8x13b", 72144081920}}) {
        const ModelConfig c = config_from_preset(name);
        EXPECT_EQ(ParameterTable(c).trained - 2 * (size_t)c.V * (size_t)c.C, count) << name;
    }
}

// Options can disable a preset's features; without them nothing changes.
TEST(Families, OptionsTakeAwayWhatAPresetHas) {
    const auto configured = [](const std::vector<std::string>& arguments) {
        TrainOptions o;
        EXPECT_TRUE(cli::parse("train", o, arguments));
        return configure_model(o, nullptr);
    };
    const struct {
        const char* preset;
        std::vector<std::string> options;
        std::function<bool(const ModelConfig&)> has;
    } rows[] = {
        {"bloom-560m", {"--no-embed-layernorm"}, [](const ModelConfig& c) { return c.embedding_norm; }},
        {"bloom-560m", {"--embed-layernorm=false"}, [](const ModelConfig& c) { return c.embedding_norm; }},
        {"bloom-560m", {"--embed-layernorm", "--no-embed-layernorm"}, [](const ModelConfig& c) { return c.embedding_norm; }},
        {"llama2-7b", {"--no-untie-embeddings-and-output-weights"}, [](const ModelConfig& c) { return !c.tied; }},
        {"llama2-7b", {"--no-disable-bias-linear"}, [](const ModelConfig& c) { return !(c.qkv_bias && c.mlp_bias); }},
        {"bloom-560m", {"--no-add-qkv-bias"}, [](const ModelConfig& c) { return c.qkv_bias; }},
        {"bloom-560m", {"--no-add-proj-bias"}, [](const ModelConfig& c) { return c.proj_bias; }},
        {"bloom-560m", {"--no-add-mlp-bias"}, [](const ModelConfig& c) { return c.mlp_bias; }},
        {"qwen3-0.6b", {"--no-qk-layernorm"}, [](const ModelConfig& c) { return c.qk_norm == QkNorm::head; }},
        {"olmo2-1b", {"--no-qk-layernorm-whole"}, [](const ModelConfig& c) { return c.qk_norm == QkNorm::whole; }},
        {"gemma3-270m", {"--no-apply-layernorm-1p"}, [](const ModelConfig& c) { return c.norm_plus_one; }},
        {"gemma3-270m", {"--window-attn-skip-freq", "0"}, [](const ModelConfig& c) { return c.full_interval > 0; }},
        {"mistral-7b", {"--window-size", "0"}, [](const ModelConfig& c) { return c.window > 0; }},
        {"mixture-tiny", {"--num-experts", "0"}, [](const ModelConfig& c) { return c.mixture.on(); }},
        {"mixture-tiny", {"--moe-router-pre-softmax"}, [](const ModelConfig& c) { return c.mixture.normalize; }},
        {"olmoe-1b-7b", {"--no-moe-router-pre-softmax"}, [](const ModelConfig& c) { return !c.mixture.normalize; }},
        {"olmoe-1b-7b", {"--moe-ffn-hidden-size", "96"}, [](const ModelConfig& c) { return c.F == 1024; }},
    };
    for (const auto& [preset, options, has] : rows) {
        std::vector<std::string> arguments = {"--preset", preset, "--vocab-size", "300"};
        EXPECT_TRUE(has(configured(arguments))) << preset << options[0];
        arguments.insert(arguments.end(), options.begin(), options.end());
        EXPECT_FALSE(has(configured(arguments))) << preset << options[0];
    }
    // The same for a model directory's features.
    const test::TemporaryDirectory dir;
    const auto model = [&](const std::string& text) {
        test::write_file(dir / "config.json", text);
        return std::vector<std::string>{"--model", dir / ""};
    };
    const auto with = [&](std::vector<std::string> arguments, const std::vector<std::string>& options) {
        arguments.insert(arguments.end(), options.begin(), options.end());
        return configured(arguments);
    };
    const auto smollm3 = model(llama_like("smollm3", ""));
    EXPECT_EQ(with(smollm3, {}).nope_interval, 4);
    EXPECT_EQ(with(smollm3, {"--no-rope-freq", "0"}).nope_interval, 0);
    const auto scaled = model(llama_like("llama", R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0})"));
    EXPECT_EQ(with(scaled, {}).rope_scaling.type, RopeScaling::Type::llama3);
    for (const std::vector<std::string>& off : {std::vector<std::string>{"--no-use-rope-scaling"}, {"--rope-scaling", "none"}})
        EXPECT_EQ(with(scaled, off).rope_scaling.type, RopeScaling::Type::none) << off[0];
    EXPECT_EQ(with(scaled, {"--no-use-rope-scaling", "--rope-scaling", "linear"}).rope_scaling.type, RopeScaling::Type::linear);
    expect_error([&] { with(scaled, {"--rope-scaling", "none", "--rope-scaling-factor", "4"}); }, {"--rope-scaling-factor"});
    // Disabling an activation requires another one.
    const std::vector<std::string> llama = {"--preset", "llama2-7b"};
    expect_error([&] { with(llama, {"--no-swiglu"}); }, {"--no-swiglu", "--activation gelu"});
    EXPECT_EQ(with(llama, {"--no-swiglu", "--activation", "gelu"}).activation, Activation::gelu);
    EXPECT_EQ(with(llama, {"--no-swiglu", "--squared-relu"}).activation, Activation::relu2);
}

// Every key of config.json's rope_scaling exists as an option, and is read back.
TEST(Families, DetailsOfRopeScaling) {
    const auto configured = [](std::vector<std::string> arguments) {
        const std::vector<std::string> sizes = {"--normalization",
                                                "RMSNorm",
                                                "--swiglu",
                                                "--disable-bias-linear",
                                                "--untie-embeddings-and-output-weights",
                                                "--position-embedding-type",
                                                "rope",
                                                "--num-layers",
                                                "1",
                                                "--hidden-size",
                                                "16",
                                                "--num-attention-heads",
                                                "2",
                                                "--vocab-size",
                                                "99",
                                                "--max-position-embeddings",
                                                "64",
                                                "--rope-scaling"};
        arguments.insert(arguments.begin(), sizes.begin(), sizes.end());
        TrainOptions o;
        EXPECT_TRUE(cli::parse("train", o, arguments));
        return configure_model(o, nullptr);
    };
    using Arguments = std::vector<std::string>;
    const std::pair<Arguments, const char*> rows[] = {
        {{"yarn", "--rope-scaling-set", "beta_fast=16", "beta_slow=2", "attention_factor=1.5", "truncate=false"},
         R"({"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": false,
             "attention_factor": 1.5, "original_max_position_embeddings": 8})"},
        {{"yarn", "--rope-scaling-set", "mscale=0.7", "mscale_all_dim=0.5"},
         R"({"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.5,
             "original_max_position_embeddings": 8})"},
        {{"llama3", "--rope-scaling-set", "low_freq_factor=2", "high_freq_factor=3"},
         R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0,
             "original_max_position_embeddings": 8})"},
        {{"longrope", "--rope-scaling-factor", "4", "--rope-scaling-set", "short_factor=1,1,1.5,2", "long_factor=1,2,4,8"},
         R"({"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.0, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0],
             "original_max_position_embeddings": 16})"}};
    for (const auto& [arguments, expected] : rows) {
        const ModelConfig c = configured(arguments);
        const auto written = to_hf_config(c, "float32", nlohmann::ordered_json::object());
        EXPECT_EQ(nlohmann::json(written["rope_scaling"]), nlohmann::json::parse(expected)) << arguments[0];
        const test::TemporaryDirectory dir;
        test::write_file(dir / "config.json", written.dump());
        EXPECT_TRUE(same_model(read_config(dir / ""), c)) << arguments[0];
    }
    const std::pair<Arguments, const char*> refused[] = {
        {{"none", "--rope-scaling-set", "beta_fast=16"}, "are: none"},
        {{"linear", "--rope-scaling-set", "factor=2"}, "are: none"},
        {{"yarn", "--rope-scaling-set", "long_factor=1"}, "are: beta_fast, beta_slow"},
        {{"yarn", "--rope-scaling-set", "beta_fast"}, "a number is expected"},
        {{"yarn", "--rope-scaling-set", "beta_fast=1,2"}, "a number is expected"},
        {{"yarn", "--rope-scaling-set", "truncate=1"}, "true or false is expected"},
        {{"yarn", "--rope-scaling-set", "beta_fast=9", "beta_fast=8"}, "names beta_fast twice"},
        {{"yarn", "--rope-scaling-set", "beta_fast=1", "beta_slow=2"}, "at most beta_fast"},
        {{"yarn", "--rope-scaling-set", "mscale=1"}, "must be given together"},
        {{"yarn", "--rope-scaling-set", "mscale=1", "mscale_all_dim=1", "attention_factor=1"}, "must be given together"},
        {{"yarn", "--rope-scaling-set", "attention_factor=-1"}, "multiplies cos and sin by -1"},
        {{"longrope"}, "has 0 factors; one per rotated pair is needed, 4"},
        {{"longrope", "--rope-scaling-set", "short_factor=1,1,1,x", "long_factor=1,1,1,1"}, "a list of numbers is expected"}};
    for (const auto& [arguments, message] : refused) expect_error([&, a = arguments] { configured(a); }, {message});
}

// ---- tensors --------------------------------------------------------------------------------------------------------------
// Over all tp ranks of a layout, each tensor's parts make up the whole exactly once, including norms and sinks, which are
// sharded with their heads.
TEST(Families, TensorsOfRanksMakeUpTheWhole) {
    for (const QkNorm norm : {QkNorm::head, QkNorm::whole})
        for (const int tp : {1, 2, 4}) {
            ModelConfig c;
            c.family = "train_gpt";
            c.L = 2;
            c.C = 20;
            c.NH = 8;
            c.NKV = 2;
            c.head_size = 6;
            c.F = 24;
            c.T = 16;
            c.V = 50;
            c.norm_place = NormPlace::both;
            c.qk_norm = norm;
            c.sinks = true;
            pad_vocabulary(c, 16);
            const ParameterTable whole(c);
            std::vector<int> seen(whole.size);
            for (int rank = 0; rank < tp; rank++) {
                Part part = whole_model(c);
                part.tp = {tp, rank};
                const ParameterTable table(c, part);
                ASSERT_EQ(table.rows.size(), whole.rows.size());
                for (size_t i = 0; i < table.rows.size(); i++) {
                    const TensorSpec &t = table.rows[i], &w = whole.rows[i];
                    EXPECT_EQ(t.group == Group::partial,
                              norm == QkNorm::head && t.name.find("_norm_w") != std::string::npos &&
                                  (t.name.find("q_norm") != std::string::npos || t.name.find("k_norm") != std::string::npos))
                        << t.name;
                    EXPECT_EQ(t.whole_rows, w.rows) << t.name;
                    for (int row = 0; row < t.rows; row++)
                        for (int col = 0; col < t.cols; col++) {
                            if (t.replicated && rank > 0) continue;
                            if (row >= t.rows - t.replicated_rows && rank % t.replicas) continue;
                            seen[w.offset + (size_t)t.whole_row(row) * w.cols + t.first_col + col]++;
                        }
                }
            }
            for (const TensorSpec& w : whole.rows)
                for (size_t i = 0; i < w.size(); i++) ASSERT_EQ(seen[w.offset + i], 1) << w.name << ", tp " << tp;
        }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------------
TEST(RopeScaling, AsTransformers) {
    const json rows = json::parse(test::read_file(golden("rope_scaling.json")));
    ASSERT_GE(rows.size(), 10u);
    for (const json& row : rows) {
        const std::string name = row["name"];
        const ModelConfig c = from_hf_config(row["config"], name);
        check_config(c);
        const RopeTable rope = c.rope(false, row["length"]);
        const std::vector<double> expected = row["frequencies"], found = rope_frequencies(rope);
        ASSERT_EQ(found.size(), expected.size()) << name;
        for (size_t j = 0; j < found.size(); j++) EXPECT_NEAR(found[j] / expected[j], 1, 2e-6) << name << " pair " << j;
        EXPECT_NEAR(rope_attention_factor(rope.scaling), row["attention_factor"], 1e-12) << name;
        std::vector<real> table;
        rope_table(table, rope);
        ASSERT_EQ(table.size(), (size_t)rope.T * rope.rotated) << name;
        const double factor = rope_attention_factor(rope.scaling), angle = 7 * found[1];
        EXPECT_NEAR(table[(7 * found.size() + 1) * 2], factor * std::cos(angle), 1e-6) << name;
        EXPECT_NEAR(table[(7 * found.size() + 1) * 2 + 1], factor * std::sin(angle), 1e-6) << name;
    }
}

// ---- Hugging Face's cache -------------------------------------------------------------------------------------------------
TEST(Hub, FindsDownloadedModels) {
    const test::TemporaryDirectory dir;
    const std::string model = dir / "hub/models--some-org--a.model", snapshot = model + "/snapshots/0123abcd";
    std::filesystem::create_directories(snapshot);
    std::filesystem::create_directories(model + "/refs");
    test::write_file(model + "/refs/main", "0123abcd");
    ASSERT_EQ(setenv("HF_HOME", (dir / "").c_str(), 1), 0);
    unsetenv("HF_HUB_CACHE");
    unsetenv("HUGGINGFACE_HUB_CACHE");
    expect_error([&] { model_directory("some-org/a.model"); }, {"some-org/a.model", "hf download some-org/a.model"});
    for (const char* file : {"/config.json", "/adapter_config.json", "/tokenizer.json", "/tokenizer.model"}) {
        test::write_file(snapshot + file, "{}");
        EXPECT_TRUE(std::filesystem::equivalent(model_directory("some-org/a.model"), snapshot)) << file;
        std::filesystem::remove(snapshot + file);
    }
    test::write_file(snapshot + "/config.json", "{}");
    // Published adapters name their base model like this.
    test::write_file(dir / "adapter_config.json", R"({"base_model_name_or_path": "some-org/a.model"})");
    EXPECT_TRUE(std::filesystem::equivalent(base_of_adapter(dir / ""), snapshot));
    test::write_file(dir / "adapter_config.json", R"({"base_model_name_or_path": "some-org/another"})");
    expect_error([&] { base_of_adapter(dir / ""); }, {"some-org/another", "--model DIR"});
    ASSERT_EQ(setenv("HF_HUB_CACHE", (dir / "nothing").c_str(), 1), 0);
    expect_error([&] { model_directory("some-org/a.model"); }, {dir / "nothing", "hf download"});
    unsetenv("HF_HUB_CACHE");
    unsetenv("HF_HOME");
    ASSERT_EQ(setenv("XDG_CACHE_HOME", (dir / "").c_str(), 1), 0);
    EXPECT_NE(hub_cache().find("huggingface/hub"), std::string::npos);
    unsetenv("XDG_CACHE_HOME");
    for (const char* path : {"../a/b", "./a", "a/b/c", "/a", "a/", "a b/c"}) EXPECT_FALSE(is_hub_name(path)) << path;
    expect_error([&] { model_directory("./nowhere"); }, {"./nowhere", "does not exist", "output directory"});
}

}  // namespace test_families
