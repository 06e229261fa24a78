// The families of models, one row each: the structure that defines a family, and the names and layouts of its tensors in files.
// `train_gpt` is the form for combinations of options that no published class supports.
#pragma once
#include <string>
#include <vector>

#include "../base/check.h"
#include "model_config.h"

// Names of tensors in files. A block's tensors have `top`, `layer` and its number in front; ".weight" or ".bias" follows a
// matrix or norm.
struct TensorNames {
    const char *top, *layer;
    const char *wte, *wpe, *emb_norm, *final_norm;
    const char* head;  // without `top`
    const char *norm1, *norm1_after, *norm2, *norm2_after;
    const char* parallel_norms[2] = {};  // norm1 and norm2 where they are parallel, if these have names of their own
    std::vector<const char*> qkv;        // queries, keys, values; or one fused
    const char* proj;
    std::vector<const char*> fc1;  // gate and up; a model without a gate has only the second; or one fused
    const char* fc2;
    const char *q_norm, *k_norm, *sinks;
    const char *router, *experts;         // of a mixture; an expert's matrices have `experts` and its number in front
    const char* expert_biases;            // the whole name below a layer's
    std::vector<const char*> expert_fc1;  // gate and up
    const char* expert_fc2;
    const char *shared_expert, *shared_gate;  // before the names of its matrices, which are an expert's; its gate
    const char* expert_parameters;            // transformers 5's module of gate_up_proj and down_proj of all experts
    bool stacks_experts = false;              // in one tensor, under these names: HfTensor::stacked
    bool transposes_experts = false;          // which has (in, out) matrices: HfTensor::transposed, gate_up
    bool transposed = false;                  // GPT-2's Conv1D stores matrices (in, out)
    bool paired = false;                      // rows of queries and keys alternate between the two halves that rope rotates
    int shards = 0;                           // of heads, in each of which rows of qkv are [q | v | k]: CodeGen's 4
    bool grouped = false;                     // rows of qkv are [q heads | k | v] per key/value head: HfTensor::groups
    // Prefixes of published files whose names differ from those that transformers writes: {ours, theirs}.
    std::vector<std::pair<const char*, const char*>> other_prefixes = {};
    std::vector<const char*> not_ours = {};  // parts of names that are ignored: masks, vision towers
};

struct Family {
    const char *name, *architecture;  // config.json's model_type, and the class in transformers
    ModelConfig structure;            // its sizes are not used
    TensorNames names;
};

namespace detail {

inline ModelConfig gpt2_structure() {
    ModelConfig c;
    c.norm = Norm::layernorm;
    c.position = Position::learned;
    c.activation = Activation::gelu;
    c.qkv_bias = c.proj_bias = c.mlp_bias = c.tied = true;
    return c;
}
inline ModelConfig gpt_neo_structure() {
    ModelConfig c = gpt2_structure();
    c.qkv_bias = false;
    c.attention_scale = 1;
    return c;
}
inline ModelConfig opt_structure() {
    ModelConfig c = gpt2_structure();
    c.activation = Activation::relu;
    c.position_offset = 2;
    return c;
}
inline ModelConfig bloom_structure() {
    ModelConfig c = gpt2_structure();
    c.position = Position::alibi;
    c.embedding_norm = true;
    return c;
}
inline ModelConfig gptj_structure() {
    ModelConfig c;
    c.norm = Norm::layernorm;
    c.norm_place = NormPlace::shared;
    c.activation = Activation::gelu;
    c.mlp_bias = c.head_bias = true;
    return c;
}
inline ModelConfig phi_structure() {
    ModelConfig c = gptj_structure();
    c.qkv_bias = c.proj_bias = true;
    return c;
}
inline ModelConfig gpt_neox_structure() {
    ModelConfig c = gpt2_structure();
    c.position = Position::rope;
    c.activation = Activation::gelu_exact;
    c.norm_place = NormPlace::parallel;
    c.rotary_fraction = 0.25;
    c.tied = false;
    return c;
}
inline ModelConfig qwen2_structure() {
    ModelConfig c;
    c.qkv_bias = true;
    return c;
}
inline ModelConfig qwen3_structure() {
    ModelConfig c;
    c.qk_norm = QkNorm::head;
    return c;
}
inline ModelConfig mixtral_structure() {
    ModelConfig c;
    c.mixture.experts = 8;
    c.rope_base = 1e6;
    return c;
}
inline ModelConfig granite_moe_structure() {
    ModelConfig c;
    c.mixture.experts = 8;
    return c;
}
inline ModelConfig qwen2_moe_structure() {
    ModelConfig c = qwen2_structure();
    c.mixture.experts = 60;
    c.mixture.topk = 4;
    c.mixture.normalize = false;
    c.mixture.shared = 5632;
    c.mixture.shared_gate = true;
    return c;
}
inline ModelConfig qwen3_moe_structure() {
    ModelConfig c = qwen3_structure();
    c.mixture.experts = 128;
    c.mixture.topk = 8;
    return c;
}
inline ModelConfig olmoe_structure() {
    ModelConfig c;
    c.qk_norm = QkNorm::whole;
    c.mixture.experts = 64;
    c.mixture.topk = 8;
    c.mixture.normalize = false;
    return c;
}
inline ModelConfig gpt_oss_structure() {
    ModelConfig c;
    c.qkv_bias = c.proj_bias = c.mlp_bias = c.sinks = true;
    c.activation = Activation::clamped_swiglu;
    c.mixture.experts = 128;
    c.mixture.topk = 4;
    return c;
}
inline ModelConfig smollm3_structure() {
    ModelConfig c;
    c.tied = true;
    c.rope_base = 2e6;
    c.nope_interval = 4;
    return c;
}
inline ModelConfig olmo2_structure() {
    ModelConfig c;
    c.norm_place = NormPlace::after;
    c.qk_norm = QkNorm::whole;
    return c;
}
inline ModelConfig arcee_structure() {
    ModelConfig c;
    c.activation = Activation::relu2;
    return c;
}
inline ModelConfig exaone4_structure() {
    ModelConfig c = olmo2_structure();
    c.qk_norm = QkNorm::head;
    return c;
}
inline ModelConfig starcoder2_structure() {
    ModelConfig c = gpt2_structure();
    c.position = Position::rope;
    return c;
}
inline ModelConfig stablelm_structure() {
    ModelConfig c;
    c.norm = Norm::layernorm;
    c.rotary_fraction = 0.25;
    return c;
}
inline ModelConfig tied_structure() {
    ModelConfig c;
    c.tied = true;
    return c;
}
inline ModelConfig cohere_structure() {
    ModelConfig c;
    c.norm = Norm::layernorm;
    c.norm_bias = false;
    c.norm_place = NormPlace::shared;
    c.tied = true;
    return c;
}
inline ModelConfig falcon_structure() {
    ModelConfig c = cohere_structure();
    c.norm_bias = true;
    c.activation = Activation::gelu_exact;
    return c;
}
inline ModelConfig mpt_structure() {
    ModelConfig c = cohere_structure();
    c.norm_place = NormPlace::before;
    c.position = Position::alibi;
    c.activation = Activation::gelu_exact;
    return c;
}
inline ModelConfig cohere2_structure() {
    ModelConfig c = cohere_structure();
    c.nope_interval = 4;
    return c;
}
inline ModelConfig glm_structure() {
    ModelConfig c = qwen2_structure();
    c.rotary_fraction = 0.5;
    return c;
}
inline ModelConfig glm4_structure() {
    ModelConfig c = glm_structure();
    c.norm_place = NormPlace::both;
    return c;
}
inline ModelConfig nemotron_structure() {
    ModelConfig c;
    c.norm = Norm::layernorm;
    c.norm_plus_one = true;
    c.activation = Activation::relu2;
    c.rotary_fraction = 0.5;
    return c;
}
inline ModelConfig gemma_structure() {
    ModelConfig c;
    c.norm_plus_one = c.tied = true;
    c.activation = Activation::geglu;
    return c;
}
inline ModelConfig gemma2_structure() {
    ModelConfig c = gemma_structure();
    c.norm_place = NormPlace::both;
    return c;
}
inline ModelConfig gemma3_structure() {
    ModelConfig c = gemma2_structure();
    c.qk_norm = QkNorm::head;
    return c;
}

// Our own names: Llama's and Gemma's, and new ones for tensors that neither has. The other families start from them, so that
// every tensor has a name.
inline TensorNames own_names() {
    TensorNames n;
    n.top = "model.";
    n.layer = "layers.";
    n.wte = "embed_tokens";
    n.wpe = "embed_positions";
    n.emb_norm = "embed_norm";
    n.final_norm = "norm";
    n.head = "lm_head";
    n.norm1 = "input_layernorm";
    n.norm1_after = "post_attention_layernorm";
    n.norm2 = "pre_feedforward_layernorm";
    n.norm2_after = "post_feedforward_layernorm";
    n.qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
    n.proj = "self_attn.o_proj";
    n.fc1 = {"mlp.gate_proj", "mlp.up_proj"};
    n.fc2 = "mlp.down_proj";
    n.q_norm = "self_attn.q_norm";
    n.k_norm = "self_attn.k_norm";
    n.sinks = "self_attn.sinks";
    n.router = "mlp.gate";
    n.experts = "mlp.experts.";
    n.expert_biases = "mlp.gate.e_score_correction_bias";
    n.expert_fc1 = {"gate_proj", "up_proj"};
    n.expert_fc2 = "down_proj";
    n.expert_parameters = "mlp.experts";
    n.shared_expert = "mlp.shared_expert.";
    n.shared_gate = "mlp.shared_expert_gate";
    return n;
}
inline TensorNames gemma3_names() {
    TensorNames n = own_names();
    n.other_prefixes = {
        {"model.", "language_model.model."}, {"model.", "model.language_model."}, {"lm_head.", "language_model.lm_head."}};
    n.not_ours = {"vision_tower.", "multi_modal_projector."};
    return n;
}
inline TensorNames llama_names() {
    TensorNames n = own_names();
    n.norm2 = "post_attention_layernorm";
    return n;
}
inline TensorNames mixtral_names() {
    TensorNames n = llama_names();
    n.router = "block_sparse_moe.gate";
    n.experts = "block_sparse_moe.experts.";
    n.expert_fc1 = {"w1", "w3"};
    n.expert_fc2 = "w2";
    return n;
}
inline TensorNames gpt_oss_names() {
    TensorNames n = llama_names();
    n.router = "mlp.router";
    n.expert_fc1 = {"gate_up_proj"};
    n.stacks_experts = n.transposes_experts = true;
    return n;
}
inline TensorNames granite_moe_names() {
    TensorNames n = llama_names();
    n.router = "block_sparse_moe.router.layer";
    n.experts = "block_sparse_moe.";
    n.expert_fc1 = {"input_linear"};
    n.expert_fc2 = "output_linear";
    n.expert_parameters = "block_sparse_moe.experts";
    n.stacks_experts = true;
    return n;
}
inline TensorNames starcoder2_names() {
    TensorNames n = llama_names();
    n.fc1 = {"mlp.c_fc"};
    n.fc2 = "mlp.c_proj";
    return n;
}
inline TensorNames paired_names() {
    TensorNames n = llama_names();
    n.paired = true;
    return n;
}
inline TensorNames glm_names() {
    TensorNames n = paired_names();
    n.fc1 = {"mlp.gate_up_proj"};
    return n;
}
inline TensorNames glm4_names() {
    TensorNames n = glm_names();
    n.norm1_after = "post_self_attn_layernorm";
    n.norm2_after = "post_mlp_layernorm";
    return n;
}
inline TensorNames phi3_names() {
    TensorNames n = llama_names();
    n.qkv = {"self_attn.qkv_proj"};
    n.fc1 = {"mlp.gate_up_proj"};
    return n;
}
inline TensorNames gpt2_names() {
    TensorNames n = own_names();
    n.top = "transformer.";
    n.layer = "h.";
    n.wte = "wte";
    n.wpe = "wpe";
    n.final_norm = "ln_f";
    n.norm1 = "ln_1";
    n.norm2 = "ln_2";
    n.qkv = {"attn.c_attn"};
    n.proj = "attn.c_proj";
    n.fc1 = {"mlp.c_fc"};
    n.fc2 = "mlp.c_proj";
    n.transposed = true;
    n.other_prefixes = {{"transformer.", ""}};
    n.not_ours = {".attn.bias", ".attn.masked_bias"};
    return n;
}
inline TensorNames bigcode_names() {
    TensorNames n = gpt2_names();
    n.transposed = false;
    return n;
}
inline TensorNames gptj_names() {
    TensorNames n = bigcode_names();
    n.qkv = {"attn.q_proj", "attn.k_proj", "attn.v_proj"};
    n.proj = "attn.out_proj";
    n.fc1 = {"mlp.fc_in"};
    n.fc2 = "mlp.fc_out";
    n.paired = true;
    return n;
}
inline TensorNames codegen_names() {
    TensorNames n = gptj_names();
    n.qkv = {"attn.qkv_proj"};
    n.shards = 4;
    n.not_ours.push_back(".attn.causal_mask");
    return n;
}
inline TensorNames phi_names() {
    TensorNames n = own_names();
    n.final_norm = "final_layernorm";
    n.proj = "self_attn.dense";
    n.fc1 = {"mlp.fc1"};
    n.fc2 = "mlp.fc2";
    return n;
}
inline TensorNames exaone_names() {
    TensorNames n = bigcode_names();
    n.qkv = {"attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"};
    n.proj = "attn.attention.out_proj";
    n.fc1 = {"mlp.c_fc_0", "mlp.c_fc_1"};
    return n;
}
inline TensorNames gpt_neo_names() {
    TensorNames n = exaone_names();
    n.fc1 = {"mlp.c_fc"};
    n.not_ours = {".attn.attention.bias", ".attn.attention.masked_bias"};
    return n;
}
inline TensorNames mpt_names() {
    TensorNames n = bigcode_names();
    n.layer = "blocks.";
    n.final_norm = "norm_f";
    n.norm1 = "norm_1";
    n.norm2 = "norm_2";
    n.qkv = {"attn.Wqkv"};
    n.proj = "attn.out_proj";
    n.fc1 = {"ffn.up_proj"};
    n.fc2 = "ffn.down_proj";
    return n;
}
inline TensorNames opt_names() {
    TensorNames n = own_names();
    n.top = "model.decoder.";
    n.final_norm = n.norm2 = "final_layer_norm";
    n.norm1 = "self_attn_layer_norm";
    n.proj = "self_attn.out_proj";
    n.fc1 = {"fc1"};
    n.fc2 = "fc2";
    n.other_prefixes = {{"model.decoder.", "decoder."}};
    return n;
}
inline TensorNames internlm2_names() {
    TensorNames n = llama_names();
    n.wte = "tok_embeddings";
    n.head = "output";
    n.norm1 = "attention_norm";
    n.norm2 = "ffn_norm";
    n.qkv = {"attention.wqkv"};
    n.proj = "attention.wo";
    n.fc1 = {"feed_forward.w1", "feed_forward.w3"};
    n.fc2 = "feed_forward.w2";
    n.grouped = true;
    return n;
}
inline TensorNames bloom_names() {
    TensorNames n = llama_names();
    n.top = "transformer.";
    n.layer = "h.";
    n.wte = "word_embeddings";
    n.emb_norm = "word_embeddings_layernorm";
    n.final_norm = "ln_f";
    n.qkv = {"self_attention.query_key_value"};
    n.proj = "self_attention.dense";
    n.fc1 = {"mlp.dense_h_to_4h"};
    n.fc2 = "mlp.dense_4h_to_h";
    n.grouped = true;
    n.other_prefixes = {{"transformer.", ""}};
    return n;
}
inline TensorNames falcon_names() {
    TensorNames n = bloom_names();
    n.parallel_norms[0] = "ln_attn";
    n.parallel_norms[1] = "ln_mlp";
    return n;
}
inline TensorNames gpt_neox_names() {
    TensorNames n = bloom_names();
    n.top = "gpt_neox.";
    n.layer = "layers.";
    n.wte = "embed_in";
    n.final_norm = "final_layer_norm";
    n.head = "embed_out";
    n.qkv = {"attention.query_key_value"};
    n.proj = "attention.dense";
    n.other_prefixes = {{"embed_out.", "lm_head."}};
    n.not_ours = {".attention.bias", ".attention.masked_bias"};
    return n;
}

}  // namespace detail

inline const std::vector<Family>& families() {
    using namespace detail;
    static const std::vector<Family> rows = {
        {"gpt2", "GPT2LMHeadModel", gpt2_structure(), gpt2_names()},
        {"bloom", "BloomForCausalLM", bloom_structure(), bloom_names()},
        {"llama", "LlamaForCausalLM", {}, llama_names()},
        {"mistral", "MistralForCausalLM", {}, llama_names()},
        {"qwen2", "Qwen2ForCausalLM", qwen2_structure(), llama_names()},
        {"qwen3", "Qwen3ForCausalLM", qwen3_structure(), llama_names()},
        {"mixtral", "MixtralForCausalLM", mixtral_structure(), mixtral_names()},
        {"qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe_structure(), llama_names()},
        {"qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe_structure(), llama_names()},
        {"olmoe", "OlmoeForCausalLM", olmoe_structure(), llama_names()},
        {"gpt_oss", "GptOssForCausalLM", gpt_oss_structure(), gpt_oss_names()},
        {"smollm3", "SmolLM3ForCausalLM", smollm3_structure(), llama_names()},
        {"olmo2", "Olmo2ForCausalLM", olmo2_structure(), own_names()},
        {"gpt_neox", "GPTNeoXForCausalLM", gpt_neox_structure(), gpt_neox_names()},
        {"gemma", "GemmaForCausalLM", gemma_structure(), llama_names()},
        {"gemma2", "Gemma2ForCausalLM", gemma2_structure(), own_names()},
        {"gemma3_text", "Gemma3ForCausalLM", gemma3_structure(), gemma3_names()},
        {"olmo3", "Olmo3ForCausalLM", olmo2_structure(), own_names()},
        {"ministral", "MinistralForCausalLM", {}, llama_names()},
        {"seed_oss", "SeedOssForCausalLM", qwen2_structure(), llama_names()},
        {"arcee", "ArceeForCausalLM", arcee_structure(), llama_names()},
        {"exaone4", "Exaone4ForCausalLM", exaone4_structure(), own_names()},
        {"starcoder2", "Starcoder2ForCausalLM", starcoder2_structure(), starcoder2_names()},
        {"stablelm", "StableLmForCausalLM", stablelm_structure(), llama_names()},
        {"phi3", "Phi3ForCausalLM", {}, phi3_names()},
        {"ernie4_5", "Ernie4_5ForCausalLM", tied_structure(), paired_names()},
        {"helium", "HeliumForCausalLM", {}, paired_names()},
        {"glm", "GlmForCausalLM", glm_structure(), glm_names()},
        {"glm4", "Glm4ForCausalLM", glm4_structure(), glm4_names()},
        {"nemotron", "NemotronForCausalLM", nemotron_structure(), llama_names()},
        {"gpt_bigcode", "GPTBigCodeForCausalLM", gpt2_structure(), bigcode_names()},
        {"granite", "GraniteForCausalLM", {}, llama_names()},
        {"granitemoe", "GraniteMoeForCausalLM", granite_moe_structure(), granite_moe_names()},
        {"minicpm", "MiniCPMForCausalLM", tied_structure(), llama_names()},
        {"cohere", "CohereForCausalLM", cohere_structure(), paired_names()},
        {"cohere2", "Cohere2ForCausalLM", cohere2_structure(), paired_names()},
        {"opt", "OPTForCausalLM", opt_structure(), opt_names()},
        {"internlm2", "InternLM2ForCausalLM", {}, internlm2_names()},
        {"mpt", "MptForCausalLM", mpt_structure(), mpt_names()},
        {"falcon", "FalconForCausalLM", falcon_structure(), falcon_names()},
        {"phi", "PhiForCausalLM", phi_structure(), phi_names()},
        {"gptj", "GPTJForCausalLM", gptj_structure(), gptj_names()},
        {"codegen", "CodeGenForCausalLM", gptj_structure(), codegen_names()},
        {"internlm3", "InternLM3ForCausalLM", {}, llama_names()},
        {"exaone", "ExaoneForCausalLM", {}, exaone_names()},
        {"gpt_neo", "GPTNeoForCausalLM", gpt_neo_structure(), gpt_neo_names()},
        {"train_gpt", "TrainGptForCausalLM", {}, own_names()},
    };
    return rows;
}

// The family with this name; null if there is none.
inline const Family* find_family(const std::string& name) {
    for (const Family& f : families())
        if (name == f.name) return &f;
    return nullptr;
}
inline const Family& family_of(const ModelConfig& c) {
    const Family* f = find_family(c.family);
    CHECK(f, "family %s", c.family.c_str());
    return *f;
}

// Makes c an empty model of a family, without sizes.
inline void set_family(ModelConfig& c, const std::string& family) {
    c = find_family(family)->structure;
    c.family = family;
}
