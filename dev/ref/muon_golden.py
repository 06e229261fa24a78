#!/usr/bin/env python3
"""Writes test/golden/muon.json, the reference for Muon and NorMuon in test/test_muon.cpp: the matrices of one block (width
6, 3 heads, 1 key/value head, feed-forward width 8) after three steps of torch.optim.Muon from weights and gradients
computed on both sides.

  python3 dev/ref/muon_golden.py        torch 2.9 or later; reproduces the same bytes

"bf16": torch.optim.Muon unchanged. "exact": the same with Newton-Schulz steps in float64. NorMuon is not in PyTorch: its
formulas (arXiv 2510.05491, algorithm 1) are below, around torch's Newton-Schulz steps.
"""
import json
import math
import pathlib

import torch
from torch.optim import _muon

WIDTH, HEAD, FEED_FORWARD = 6, 2, 8
SHAPES = {"q": (WIDTH, WIDTH), "k": (HEAD, WIDTH), "v": (HEAD, WIDTH), "proj": (WIDTH, WIDTH), "gate": (FEED_FORWARD, WIDTH),
          "up": (FEED_FORWARD, WIDTH), "fc2": (WIDTH, FEED_FORWARD)}
STEPS, LR, WEIGHT_DECAY, MOMENTUM, BETA2 = 3, 0.02, 0.1, 0.95, 0.95
IN_BF16 = _muon._zeropower_via_newtonschulz


def number(salt, i):
    """A number in [-0.5, 0.5) that is exact in fp32; test_muon.cpp has the same."""
    h = ((i + 1) * 2654435761 + (salt + 1) * 2246822519) & 0xFFFFFFFF
    h ^= h >> 15
    h = h * 3266489917 & 0xFFFFFFFF
    h ^= h >> 13
    return (h >> 8) / 2**24 - 0.5


def tensor(salt, shape):
    return torch.tensor([number(salt, i) for i in range(shape[0] * shape[1])], dtype=torch.float64).reshape(shape)


def exact(gradient, coefficients, steps, eps):
    a, b, c = coefficients
    x = gradient.T if gradient.size(0) > gradient.size(1) else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if gradient.size(0) > gradient.size(1) else x


def matrices(heads):
    """Name and rows of every separately orthogonalized matrix."""
    for name, (rows, _) in SHAPES.items():
        height = HEAD if heads and name in "qkv" else rows
        for row in range(0, rows, height):
            yield name, slice(row, row + height)


def gradient(step, name):
    return tensor(100 * step + 50 + list(SHAPES).index(name), SHAPES[name])


def muon(dtype, heads, adjust):
    weights = {name: tensor(i, shape).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}
    parts = [(name, rows, torch.nn.Parameter(weights[name][rows].clone())) for name, rows in matrices(heads)]
    optimizer = torch.optim.Muon([p for _, _, p in parts], lr=LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, adjust_lr_fn=adjust)
    for step in range(STEPS):
        for name, rows, p in parts:
            p.grad = gradient(step, name)[rows].to(dtype)
        optimizer.step()
    return torch.cat([p.detach().flatten() for _, _, p in parts])


def normuon(dtype, newton_schulz):
    weights = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        w = tensor(i, shape).to(dtype)
        m, v = torch.zeros_like(w), torch.zeros(shape[0], 1, dtype=dtype)
        for step in range(STEPS):
            g = gradient(step, name).to(dtype)
            m = MOMENTUM * m + (1 - MOMENTUM) * g
            nesterov = (1 - MOMENTUM) * g + MOMENTUM * m
            o = newton_schulz(nesterov, (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), 5, _muon.EPS).to(dtype)
            v = BETA2 * v + (1 - BETA2) * (o * o).mean(dim=1, keepdim=True)
            o = o / (v.sqrt() + 1e-10)
            w = w - LR * WEIGHT_DECAY * w - 0.2 * LR * math.sqrt(o.numel()) / o.norm() * o
        weights.append(w.flatten())
    return torch.cat(weights)


def main():
    golden = {}
    for precision, dtype, newton_schulz in (("bf16", torch.float32, IN_BF16), ("exact", torch.float64, exact)):
        _muon._zeropower_via_newtonschulz = newton_schulz
        for name, values in {"spectral": muon(dtype, False, "match_rms_adamw"),
                             "shape_scaling": muon(dtype, False, "original"),
                             "heads": muon(dtype, True, "match_rms_adamw"),
                             "normuon": normuon(dtype, newton_schulz)}.items():
            golden.setdefault(name, {})[precision] = [float(f"{x:.7g}") for x in values.tolist()]
    path = pathlib.Path(__file__).parents[2] / "test/golden/muon.json"
    lines = [f' "{name}": {{\n' + ",\n".join(f'  "{p}": {json.dumps(v)}' for p, v in both.items()) + "}" for name, both in golden.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
