#!/usr/bin/env python3
"""A deliberately broken train_gpt: `chaos.py --self-test` must detect every kind. Runs $CHAOS_REAL, then does the damage
named by $CHAOS_BREAK."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.dont_write_bytecode = True
from verify import crc32c

arguments = sys.argv[1:]
kind = os.environ["CHAOS_BREAK"]
training = arguments[:1] == ["train"]
out = Path(arguments[arguments.index("--out") + 1]) if training else None


def real(*extra):
    return subprocess.run([os.environ["CHAOS_REAL"], *arguments, *extra]).returncode


def change(name, at, bits, with_manifest):
    """Flips bits of a file in the latest checkpoint, optionally updating the manifest to match."""
    folder = out / "latest"
    data = bytearray((folder / name).read_bytes())
    data[at] ^= bits
    (folder / name).write_bytes(data)
    if with_manifest:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": len(data), "crc32c": "%08x" % crc32c(bytes(data))}
        (folder / "manifest.json").write_text(json.dumps(manifest))


if not training:
    sys.exit(real())
if kind == "status-0":
    sys.exit(0)
if kind == "silent-error":
    sys.exit(3)
if kind == "needless-error":
    print("error: this is not convenient", file=sys.stderr)
    sys.exit(1)
if kind == "abort":
    print("check.h:1: internal check failed: truth", file=sys.stderr)
    sys.exit(1)
if kind == "older":  # stopped at step 8; then resumes from step 4
    if (out / "latest").exists():
        sys.exit(real("--resume", str(out / "step_00000004")))
    subprocess.run([os.environ["CHAOS_REAL"], *arguments], stdout=subprocess.DEVNULL, check=True)
    (out / "latest").unlink()
    (out / "latest").symlink_to("step_00000008")
    shutil.rmtree(out / "step_00000010")
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(line for line in lines if '"step":10,' not in line))
    print("stopped after 8 steps")
    sys.exit(0)
if (out / "latest").exists():  # once is enough
    sys.exit(real())
status = real()
log = out / "log.jsonl"
if kind == "user-file":
    (out / "notes.txt").unlink(missing_ok=True)
elif kind == "weights":
    change("model.safetensors", -9, 1, False)
elif kind == "weights-and-manifest":  # the lowest bit of a moment
    change("training/exp_avg.safetensors", -4, 1, True)
elif kind == "masters":
    change("model.safetensors", -10, 1, True)
elif kind == "nan":
    data = (out / "latest/training/exp_avg_sq.safetensors").read_bytes()
    for at, byte in ((-1, 0x7F), (-2, 0xF0)):
        change("training/exp_avg_sq.safetensors", at, data[at] ^ byte, True)
elif kind == "half-written":
    with open(out / "latest/model.safetensors", "ab") as f:
        f.truncate(1000)
elif kind == "latest":
    (out / "latest").unlink()
    (out / "latest").symlink_to("step_00000099")
elif kind == "temporary":
    (out / "report.html.tmp.1").write_text("half")
elif kind in ("log-line", "log-twice"):
    lines = log.read_text().splitlines(keepends=True)
    steps = [i for i, line in enumerate(lines) if '"kind":"step","step":5,' in line]
    for i in steps:
        lines[i] = "" if kind == "log-line" else lines[i] * 2
    log.write_text("".join(lines))
elif kind == "tokens":
    text = (out / "latest/training/state.json").read_text()
    change("training/state.json", text.index('"tokens": ') + len('"tokens": '), 1, True)
elif kind == "hang":
    time.sleep(1000)
elif kind == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(status)
