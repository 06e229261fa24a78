#!/usr/bin/env python3
"""Golden values of transformers' own models: one tiny model of every family, and numbers of RoPE scalings.

    python3 dev/ref/families_reference.py [NAME...]     writes test/golden/families/NAME/ and test/golden/rope_scaling.json

A directory has config.json and model.safetensors as saved by transformers (weights in bf16), and golden.safetensors,
computed in float32 from these weights: tokens and targets (2, T), logits (2, T, V), the mean cross-entropy ce, and
grad.NAME of each parameter. test/test_golden_fp32.cpp checks them, test/test_families.cpp the scalings. Needs torch and
transformers (5.23).
"""
import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers as t
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import remote_families as remote

torch.set_num_threads(1)
GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
V, T = 37, 17
EAGER = dict(attn_implementation="eager", experts_implementation="eager")  # the fused experts need sizes divisible by 4
IDS = dict(vocab_size=V, bos_token_id=None, eos_token_id=0, pad_token_id=None)
# 5 query heads, 1 key/value head, heads of 6 in a width of 20, unless the class requires the width to be a multiple.
SIZES = dict(hidden_size=20, intermediate_size=24, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1, head_dim=6,
             max_position_embeddings=32, rms_norm_eps=1e-4, **IDS)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 16}
OLMO3_ROPE = {"full_attention": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
                                 "original_max_position_embeddings": 16},
              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
GEMMA_ROPE = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
GRANITE = dict(embedding_multiplier=7.5, residual_multiplier=0.3, attention_multiplier=0.2, logits_scaling=3)
MINICPM = dict(scale_emb=7.5, scale_depth=0.4, dim_model_base=8)
COHERE = {k: v for k, v in SIZES.items() if k != "rms_norm_eps"}
MODELS = {
    "llama": t.LlamaConfig(rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True, tie_word_embeddings=False, **SIZES),
    "mistral": t.MistralConfig(sliding_window=5, **SIZES),
    "qwen2": t.Qwen2Config(tie_word_embeddings=True, **SIZES),
    "qwen3": t.Qwen3Config(tie_word_embeddings=False, **SIZES),
    "smollm3": t.SmolLM3Config(no_rope_layer_interval=2, **SIZES),
    "olmo2": t.Olmo2Config(**SIZES),
    "gpt_neox": t.GPTNeoXConfig(hidden_size=24, intermediate_size=28, num_hidden_layers=2, num_attention_heads=3,
                                max_position_embeddings=32, rotary_pct=0.5, **IDS),
    "gemma": t.GemmaConfig(**SIZES),
    "gemma2": t.Gemma2Config(sliding_window=5, query_pre_attn_scalar=9, final_logit_softcapping=3.0, attn_logit_softcapping=2.0,
                             **SIZES),
    "gemma3_text": t.Gemma3TextConfig(sliding_window=5, query_pre_attn_scalar=9, sliding_window_pattern=2,
                                      rope_parameters=GEMMA_ROPE, **SIZES),
    "mixtral": t.MixtralConfig(sliding_window=5, num_local_experts=5, num_experts_per_tok=3, **SIZES),
    "qwen3_moe": t.Qwen3MoeConfig(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=14, norm_topk_prob=True, **SIZES),
    "olmoe": t.OlmoeConfig(num_experts=5, num_experts_per_tok=3, **{**SIZES, "head_dim": 4}),
    "gpt_oss": t.GptOssConfig(sliding_window=5, num_local_experts=5, num_experts_per_tok=3, rope_parameters=YARN, **SIZES),
    "qwen2_moe": t.Qwen2MoeConfig(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=14, mlp_only_layers=[0],
                                  shared_expert_intermediate_size=10, use_sliding_window=True, sliding_window=5, **SIZES),
    "olmo3": t.Olmo3Config(sliding_window=5, layer_types=["sliding_attention", "full_attention"], rope_parameters=OLMO3_ROPE, **SIZES),
    "ministral": t.MinistralConfig(sliding_window=5, layer_types=["sliding_attention", "full_attention"], **SIZES),
    "seed_oss": t.SeedOssConfig(attention_out_bias=True, mlp_bias=True, **SIZES),
    "arcee": t.ArceeConfig(attention_bias=True, mlp_bias=True, **SIZES),
    "exaone4": t.Exaone4Config(sliding_window=5, layer_types=["sliding_attention", "full_attention"], **SIZES),
    "starcoder2": t.Starcoder2Config(hidden_size=20, intermediate_size=24, num_hidden_layers=2, num_attention_heads=5,
                                     num_key_value_heads=1, max_position_embeddings=32, sliding_window=5, **IDS),
    "stablelm": t.StableLmConfig(hidden_size=40, intermediate_size=24, num_hidden_layers=2, num_attention_heads=5,
                                 num_key_value_heads=1, max_position_embeddings=32, use_qkv_bias=True,
                                 rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}, **IDS),
    "ernie4_5": t.Ernie4_5Config(use_bias=True, **SIZES),
    "helium": t.HeliumConfig(attention_bias=True, **{**SIZES, "hidden_size": 30}),
    "glm": t.GlmConfig(rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}, **{**SIZES, "head_dim": 8}),
    "glm4": t.Glm4Config(rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}, **{**SIZES, "head_dim": 8}),
    "nemotron": t.NemotronConfig(rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}, mlp_bias=True,
                                 norm_eps=1e-4, **{k: v for k, v in {**SIZES, "head_dim": 8}.items() if k != "rms_norm_eps"}),
    "gpt_bigcode": t.GPTBigCodeConfig(n_embd=20, n_layer=2, n_head=5, n_positions=32, n_inner=24, **IDS),
    "granite": t.GraniteConfig(attention_bias=True, mlp_bias=True, **GRANITE, **SIZES),
    "granitemoe": t.GraniteMoeConfig(num_local_experts=5, num_experts_per_tok=3, **GRANITE, **SIZES),
    "cohere": t.CohereConfig(attention_bias=True, logit_scale=0.3, layer_norm_eps=1e-4, **COHERE),
    "cohere2": t.Cohere2Config(sliding_window=5, layer_types=["sliding_attention", "full_attention"], logit_scale=0.3,
                               layer_norm_eps=1e-4, **{**COHERE, "hidden_size": 30}),
    "opt": t.OPTConfig(hidden_size=20, ffn_dim=24, num_hidden_layers=2, num_attention_heads=5, max_position_embeddings=32,
                       word_embed_proj_dim=20, **IDS),
    "minicpm": remote.MiniCPMConfig(attention_bias=True, **MINICPM, **SIZES),
    "phi3": t.Phi3Config(sliding_window=5, original_max_position_embeddings=16, rope_parameters={
        "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 3.0]}, **{**SIZES, "hidden_size": 40, "head_dim": 8}),
    "internlm2": remote.InternLM2Config(bias=True, **SIZES | dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2,
                                                                  head_dim=4)),
    "mpt": t.MptConfig(d_model=20, n_layers=2, n_heads=5, max_seq_len=32, layer_norm_epsilon=1e-4, **IDS),
    "falcon": t.FalconConfig(new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=28, bias=True, hidden_size=24,
                             num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=32, **IDS),
    "phi": t.PhiConfig(hidden_size=40, intermediate_size=24, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1,
                       max_position_embeddings=32, layer_norm_eps=1e-4,
                       rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5}, **IDS),
    "gptj": t.GPTJConfig(n_embd=40, n_layer=2, n_head=4, n_positions=32, rotary_dim=6, n_inner=24, **IDS),
    "codegen": t.CodeGenConfig(n_embd=40, n_layer=2, n_head=4, n_positions=32, rotary_dim=6, n_inner=24, **IDS),
    "internlm3": t.InternLM3Config(**SIZES),
    "exaone": t.ExaoneConfig(rope_parameters=LLAMA3, **SIZES),
    "gpt_neo": t.GPTNeoConfig(hidden_size=20, num_layers=3, num_heads=5, max_position_embeddings=32, intermediate_size=24,
                              window_size=5, attention_types=[[["global", "local"], 1], [["global"], 1]], **IDS),
}
SCALINGS = {  # rope_parameters, and the length of the sequence
    "default": ({"rope_type": "default"}, 16),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 16),
    "dynamic, short": ({"rope_type": "dynamic", "factor": 4.0}, 100),
    "dynamic, long": ({"rope_type": "dynamic", "factor": 4.0}, 300),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 300),
    "yarn, all settings": ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "beta_fast": 16,
                            "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}, 300),
    "yarn, attention factor": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                                "attention_factor": 1.25}, 300),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128}, 300),
    "longrope, short": ({"rope_type": "longrope", "short_factor": [1.0 + 0.1 * j for j in range(8)],
                         "long_factor": [2.0 + j for j in range(8)], "original_max_position_embeddings": 64}, 60),
    "longrope, long": ({"rope_type": "longrope", "short_factor": [1.0 + 0.1 * j for j in range(8)],
                        "long_factor": [2.0 + j for j in range(8)], "original_max_position_embeddings": 64}, 128),
}


def random_model(config, seed):
    """Every parameter random and large enough to matter, including gains and biases."""
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    for name, p in model.named_parameters():
        gain = p.dim() == 1 and name.endswith("weight") and "gemma" not in config.model_type
        std = 5.0 if name.endswith("gate_up_proj_bias") else 0.25  # beyond GPT-OSS's limits of 7
        p.data = (std * torch.randn_like(p) + (1.0 if gain else 0.0)).bfloat16().float()
    model.tie_weights()
    return model


EXAONE = {"model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
          "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
          "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj"}


def by_file(name, key, gradient):
    """Gradients by the names in files: transformers 5 stacks the matrices of experts, and an EXAONE is a Llama there."""
    for ours, in_file in EXAONE.items():
        if name == "exaone": key = key.replace(ours, in_file)
    mlp, fc1, fc2 = ("block_sparse_moe", ("w1", "w3"), "w2") if name == "mixtral" else ("mlp", ("gate_proj", "up_proj"), "down_proj")
    key = key.replace(".mlp.", f".{mlp}.") if name == "mixtral" else key
    if name == "granitemoe":
        for theirs, in_file in ("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight"), \
                               ("router.weight", "router.layer.weight"):
            key = key.replace(theirs, in_file)
        return {key: gradient}
    if name == "gpt_oss":
        return {key: gradient}  # whose files have them stacked
    if key.endswith(".experts.gate_up_proj"):
        stem = key[:-len("gate_up_proj")]
        return {f"{stem}{e}.{fc1[half]}.weight": g for e, both in enumerate(gradient) for half, g in enumerate(both.chunk(2))}
    if key.endswith(".experts.down_proj"):
        return {f"{key[:-len('down_proj')]}{e}.{fc2}.weight": g for e, g in enumerate(gradient)}
    return {key: gradient}


def write_family(name, config, seed):
    directory = GOLDEN / "families" / name
    shutil.rmtree(directory, ignore_errors=True)
    model = random_model(config, seed)
    model.bfloat16().save_pretrained(directory)
    for other in directory.iterdir():
        if other.name not in ("config.json", "model.safetensors"): other.unlink()
    model = t.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **EAGER).eval()
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, V, (2, T)))
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -1)], 1)
    logits = model(tokens).logits
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    ce.backward()
    golden = {"tokens": tokens.int(), "targets": targets.int(), "logits": logits.detach(), "ce": ce.detach()}
    for key, p in model.named_parameters():
        golden |= {"grad." + file: g for file, g in by_file(name, key, p.grad).items()}
    save_file({k: x.contiguous() for k, x in golden.items()}, directory / "golden.safetensors")
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, ce {ce:.4f}, logits up to {logits.abs().max():.2f}")


def write_scalings():
    rows = []
    for name, (rope, length) in SCALINGS.items():
        config = t.LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=128, num_hidden_layers=1,
                               intermediate_size=32, vocab_size=V, rope_parameters={"rope_theta": 500.0, **rope})
        if rope["rope_type"] == "default":
            frequencies, factor = 500.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=length)
        rows.append({"name": name, "config": json.loads(config.to_json_string()), "length": length,
                     "frequencies": [float(x) for x in frequencies], "attention_factor": float(factor)})
    (GOLDEN / "rope_scaling.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    for seed, (name, config) in enumerate(MODELS.items()):
        if not sys.argv[1:] or name in sys.argv[1:]:
            write_family(name, config, seed)
    if not sys.argv[1:]:
        write_scalings()
