#!/usr/bin/env python3
"""Writes test/golden/bitsandbytes.safetensors: matrices in 4 bits as transformers saves them with bitsandbytes (NF4, NF4 with double
quantization, FP4), and the last 1,000 numbers of each as bitsandbytes decodes them.

  python3 dev/ref/bitsandbytes_golden.py        torch, bitsandbytes; reproduces the same bytes
"""
import pathlib

import torch
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, quantize_4bit
from safetensors.torch import save_file

# Double quantization has groups of 256 blocks of 64; the second matrix has 257. The CPU code of bitsandbytes 0.50.2 decodes rows of 96
# numbers with the factors of other blocks than it encoded them with: an even width that is not a multiple of the block.
MATRICES = {"plain": (24, 128, "nf4", False), "nested": (257, 64, "nf4", True), "fp4": (16, 70, "fp4", False)}


def main():
    torch.manual_seed(0)
    golden = {}
    for name, (rows, cols, kind, nested) in MATRICES.items():
        w = 0.2 * torch.randn(rows, cols)
        codes, state = quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=nested)
        golden[name + ".weight"] = codes
        for key, tensor in state.as_dict(packed=True).items(): golden[f"{name}.weight.{key}"] = tensor
        factors = dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
        two = codes.flatten()[:, None] >> torch.tensor([4, 0]) & 15  # the first number is in the upper half
        decoded = (state.code[two.flatten().long()][:w.numel()] * factors.repeat_interleave(64)[:w.numel()])
        assert torch.equal(decoded, dequantize_4bit(codes, state).flatten()), name
        golden[name + ".decoded"] = decoded[-1000:]
    save_file({key: t.contiguous() for key, t in golden.items()}, pathlib.Path(__file__).parents[2] / "test/golden/bitsandbytes.safetensors")


main()
