#!/usr/bin/env python3
"""Writes test/golden/mxfp4.safetensors: the matrices of three experts of 32 rows and columns in MXFP4, as in GPT-OSS's files, all
codes and scales among them, and in bf16, as transformers widens them.

  python3 dev/ref/mxfp4_golden.py        torch, transformers 5; reproduces the same bytes
"""
import pathlib

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E, C, F = 3, 32, 32


def main():
    torch.manual_seed(0)
    golden = {}
    for name, rows in {"gate_up_proj": 2 * F, "down_proj": C}.items():
        blocks = torch.randint(0, 256, (E, rows, C // 32, 16)).byte()
        scales = torch.arange(E * rows).add(30).clamp(max=251).byte().reshape(E, rows, C // 32)  # 252 and above: infinite
        golden |= {f"{name}_blocks": blocks, f"{name}_scales": scales, name: convert_moe_packed_tensors(blocks, scales)}
    save_file(golden, pathlib.Path(__file__).parents[2] / "test/golden/mxfp4.safetensors")


main()
