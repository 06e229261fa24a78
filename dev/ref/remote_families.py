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


def register(config, model):
    t.AutoConfig.register(config.model_type, config)
    t.AutoModelForCausalLM.register(config, model)


register(MiniCPMConfig, MiniCPMForCausalLM)
