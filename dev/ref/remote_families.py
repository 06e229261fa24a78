"""Families whose code comes with their models, not with transformers: the published formulas on transformers' Llama."""
import math

import torch
import transformers as t
from transformers.models.llama import modeling_llama as llama


class MiniCPMConfig(t.LlamaConfig):
    model_type = "minicpm"
    scale_emb: float = 1
    scale_depth: float = 1
    dim_model_base: float = 1
    tie_word_embeddings: bool = True


class MiniCPMEmbedding(torch.nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class MiniCPMAttention(llama.LlamaAttention):
    def forward(self, *inputs, **settings):
        out, weights = super().forward(*inputs, **settings)
        return out * (self.config.scale_depth / math.sqrt(self.config.num_hidden_layers)), weights


class MiniCPMMLP(llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) * (self.config.scale_depth / math.sqrt(self.config.num_hidden_layers))


class MiniCPMHead(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x / self.divisor)


class MiniCPMForCausalLM(t.LlamaForCausalLM):
    config_class = MiniCPMConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.__class__, self.model.embed_tokens.scale = MiniCPMEmbedding, config.scale_emb
        self.lm_head.__class__, self.lm_head.divisor = MiniCPMHead, config.hidden_size / config.dim_model_base
        for layer in self.model.layers:
            layer.self_attn.__class__, layer.mlp.__class__ = MiniCPMAttention, MiniCPMMLP


class InternLM2Config(t.LlamaConfig):
    model_type = "internlm2"
    bias: bool = True


def by_another_name(name):
    return property(lambda self: self._modules[name])


def rows_of_wqkv(first, end):
    """The product with these heads of each key/value head's group, of which each has its queries, its key and its value."""
    def product(self, x):
        heads = self.wqkv(x).unflatten(-1, (self.config.num_key_value_heads, -1, self.head_dim))
        return heads[..., first:end, :].flatten(-3)
    return property(lambda self: lambda x: product(self, x))


class InternLM2Attention(llama.LlamaAttention):
    q_proj, k_proj, v_proj, o_proj = rows_of_wqkv(0, -2), rows_of_wqkv(-2, -1), rows_of_wqkv(-1, None), by_another_name("wo")


class InternLM2MLP(llama.LlamaMLP):
    gate_proj, up_proj, down_proj = map(by_another_name, ("w1", "w3", "w2"))


class InternLM2Layer(llama.LlamaDecoderLayer):
    self_attn, mlp, input_layernorm, post_attention_layernorm = map(
        by_another_name, ("attention", "feed_forward", "attention_norm", "ffn_norm"))


class InternLM2Model(t.LlamaModel):
    embed_tokens = by_another_name("tok_embeddings")


class InternLM2ForCausalLM(t.LlamaForCausalLM):
    """A Llama with other names, and queries, keys and values in one matrix."""
    config_class = InternLM2Config
    _tied_weights_keys = {"output.weight": "model.tok_embeddings.weight"}
    lm_head = by_another_name("output")

    def __init__(self, config):
        super().__init__(config)
        rename(self, InternLM2ForCausalLM, lm_head="output")
        rename(self.model, InternLM2Model, embed_tokens="tok_embeddings")
        for layer in self.model.layers:
            attention = layer._modules["self_attn"]
            sizes = [attention._modules.pop(name).out_features for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
            rename(attention, InternLM2Attention)
            attention.wqkv = torch.nn.Linear(config.hidden_size, sum(sizes[:3]), bias=config.bias)
            attention.wo = torch.nn.Linear(sizes[0], config.hidden_size, bias=config.bias)
            rename(layer._modules["mlp"], InternLM2MLP, gate_proj="w1", up_proj="w3", down_proj="w2")
            rename(layer, InternLM2Layer, self_attn="attention", mlp="feed_forward", input_layernorm="attention_norm",
                   post_attention_layernorm="ffn_norm")


def rename(module, kind, **names):
    module.__class__ = kind
    for ours, theirs in names.items(): module._modules[theirs] = module._modules.pop(ours)


def register(config, model):
    t.AutoConfig.register(config.model_type, config)
    t.AutoModelForCausalLM.register(config, model)


register(MiniCPMConfig, MiniCPMForCausalLM)
register(InternLM2Config, InternLM2ForCausalLM)
