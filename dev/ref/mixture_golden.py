#!/usr/bin/env python3
"""Writes test/golden/mixture.json, the reference of test/test_experts_fp64.cpp: output and gradients of the mixtures of
Mixtral, Qwen3-MoE without normalized weights, and DeepSeek-V3 (without its shared expert) in transformers' own classes, in
float64 except their routers, which round to float32. Numbers are computed on both sides.

  python3 dev/ref/mixture_golden.py        torch, transformers 5; reproduces the same bytes
"""
import pathlib

import torch
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from muon_golden import number

N, E, K, C, F = 4, 5, 3, 4, 3
SIZES = {"hidden_size": C, "num_experts_per_tok": K}


def tensor(salt, *shape):
    return torch.tensor([2 * number(salt, i) for i in range(torch.Size(shape).numel())], dtype=torch.float64).reshape(shape)


def deepseek():
    block = DeepseekV3MoE(DeepseekV3Config(n_routed_experts=E, moe_intermediate_size=F, n_group=1, topk_group=1,
                                           routed_scaling_factor=2.5, norm_topk_prob=True, n_shared_experts=1, **SIZES))
    block.gate.e_score_correction_bias.copy_(tensor(5, E))
    for parameter in block.shared_experts.parameters():
        torch.nn.init.zeros_(parameter)
    return block


def results(block):
    x = tensor(0, 1, N, C).requires_grad_()
    with torch.no_grad():
        block.double()
        block.gate.weight.copy_(tensor(1, E, C))
        block.experts.gate_up_proj.copy_(tensor(2, E, 2 * F, C))
        block.experts.down_proj.copy_(tensor(3, E, C, F))
    out = block(x)
    out.backward(tensor(4, 1, N, C))
    tensors = {"out": out, "dx": x.grad, "drouter": block.gate.weight.grad, "dfc1": block.experts.gate_up_proj.grad,
               "dfc2": block.experts.down_proj.grad}
    return {name: [round(v, 8) for v in t.flatten().tolist()] for name, t in tensors.items()}


def main():
    golden = {"mixtral": MixtralSparseMoeBlock(MixtralConfig(num_local_experts=E, intermediate_size=F, **SIZES)),
              "qwen3_moe": Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(num_experts=E, moe_intermediate_size=F,
                                                                 norm_topk_prob=False, **SIZES)),
              "deepseek_v3": deepseek()}
    path = pathlib.Path(__file__).parents[2] / "test/golden/mixture.json"
    lines = [f' "{name}": {{\n' + ",\n".join(f'  "{t}": {v}' for t, v in results(block).items()) + "}"
             for name, block in golden.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
