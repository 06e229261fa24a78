#!/usr/bin/env python3
"""Writes test/golden/nf4.json, the reference of test/ops/quantized.h: NF4 codes of bitsandbytes for numbers that both sides
compute, the scale of each block of 64, and the decoded numbers; and the same scales of another matrix after double quantization.

  pip install torch bitsandbytes; python3 dev/ref/nf4_golden.py        on a CPU; reproduces the same bytes
"""
import json
import pathlib

import torch
from bitsandbytes import functional

BLOCKS = 10


def number(i):
    """A number in [-0.5, 0.5) that is exact in fp32; test/ops/quantized.h has the same."""
    h = (i + 1) * 2654435761 & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 3266489917 & 0xFFFFFFFF
    h ^= h >> 13
    return (h >> 8) / 2**24 - 0.5


x = torch.tensor([number(i) for i in range(64 * BLOCKS)], dtype=torch.float32).reshape(BLOCKS, 64)
x[1] *= 2**-6
x[2] = x[2] * x[2] * x[2]  # mostly small
x[3] = 0
levels = functional.get_4bit_type("nf4", device="cpu")
x[4, :15] = (levels[:-1] + levels[1:]) / 2  # ties: the block's largest magnitude is 1
x[4, 15:] = -1
x[5] *= 2.0**-140  # denormal
x[6] *= 2.0**100
x[7, 1:] = 0
x[8] = x[8].to(torch.bfloat16).float()
codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
decoded = functional.dequantize_4bit(codes, state)
state.dtype = torch.bfloat16
golden = {
    "codes": codes.flatten().numpy().tobytes().hex(),
    "scales": state.absmax.view(torch.int32).tolist(),
    "fp32": decoded.flatten().view(torch.int32).tolist(),
    "bf16": functional.dequantize_4bit(codes, state).flatten().view(torch.int16).tolist(),
}
BLOCKS = 300
x = torch.tensor([number(i) for i in range(64 * BLOCKS)], dtype=torch.float32).reshape(BLOCKS, 64)
x *= torch.tensor([1 + block % 7 for block in range(BLOCKS)], dtype=torch.float32)[:, None]
plain = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")[1]
state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)[1]
assert state.offset == plain.absmax.double().mean().float(), "PyTorch's sum in fp32 is rounded differently"
golden["double"] = {
    "levels": state.state2.code.view(torch.int32).tolist(),
    "codes": state.absmax.flatten().tolist(),
    "factors_and_mean": torch.cat([state.state2.absmax, state.offset[None]]).view(torch.int32).tolist(),
    "scales": (functional.dequantize_blockwise(state.absmax, state.state2) + state.offset).flatten().view(torch.int32).tolist(),
}
path = pathlib.Path(__file__).parents[2] / "test/golden/nf4.json"
path.write_text(json.dumps(golden) + "\n")
