#!/usr/bin/env python3
"""Writes compile_commands.json, for clangd and other tools: the commands by which make compiles each source for the CPU, or on
the emulator. A test that is compiled together with others gets an entry of its own."""
import json
import os
import re
import shlex
import subprocess

os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
programs = """cpu-bf16/train_gpt cpu-bf16/bench cpu-bf16/host_tests cpu-bf16/kernel_tests cpu-fp32/fp32_tests
              cpu-fp64/fp64_tests emu-bf16/gpu_tests emu-bf16/ladder_gemm emu-bf16/ladder_attention"""
make = ["make", "-n", "-B", "DEPS_ARE_HERE=1", *("build/" + program for program in programs.split())]
commands = subprocess.run(make, check=True, capture_output=True, text=True).stdout.replace("\\\n", "")
entries = {}
for words in map(shlex.split, commands.splitlines()):
    if "-c" not in words:
        continue
    compiler = next(i for i, word in enumerate(words) if re.search(r"(g|clang)\+\+[-\d.]*$", word))
    *words, last = words[compiler:]
    includes = [i + 1 for i, word in enumerate(words) if word == "-include"]
    arguments = [word for i, word in enumerate(words) if i not in includes and i + 1 not in includes]
    for file in [*(words[i] for i in includes), last]:
        entries.setdefault(file, {"directory": os.getcwd(), "file": file, "arguments": arguments + [file]})
with open("compile_commands.json", "w") as file:
    json.dump(list(entries.values()), file, indent=1)
