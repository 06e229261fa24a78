#!/usr/bin/env python3
"""Prints the relative errors of llama.cpp's encoders of Q4_K, Q5_K and Q6_K for the numbers of test/test_gguf.cpp,
QuantizesBetterThanLlamaCpp. llama.cpp is in the package xllamacpp.

  pip install numpy gguf xllamacpp; python3 dev/ref/k_quants_errors.py
"""
import ctypes
import importlib.util
import os
from pathlib import Path

import gguf
import numpy as np

BLOCKS = 512
library = next(Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("xllamacpp*.so"))
llama_cpp = ctypes.CDLL(str(library), mode=os.RTLD_LAZY)
seed, random = 11, np.empty(BLOCKS * 256 * 4, np.int64)
for i in range(random.size):
    seed = (seed * 1664525 + 1013904223) & 0xFFFFFFFF
    random[i] = seed >> 24
shift = np.arange(BLOCKS * 256) // 32 * 7 % 5
x = ((2 * random.reshape(-1, 4).sum(1) - 1020) * 2.0 ** (-10 - shift)).astype(np.float32)
for name in ("Q4_K", "Q5_K", "Q6_K"):
    kind = gguf.GGMLQuantizationType[name]
    blocks = np.zeros(BLOCKS * gguf.GGML_QUANT_SIZES[kind][1], np.uint8)
    encode = getattr(llama_cpp, f"quantize_row_{name[:2].lower()}_K_ref")
    encode(x.ctypes.data_as(ctypes.c_void_p), blocks.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size))
    errors = gguf.quants.dequantize(blocks, kind).astype(np.float64) - x
    print(name, np.sqrt((errors**2).sum() / (x.astype(np.float64)**2).sum()))
