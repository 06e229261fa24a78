#!/usr/bin/env python3
"""Compares a mixture of 8 experts with the dense model that has the same active parameters and FLOPs, on the quick start's
model, data and optimizer, over three seeds, and prints the table of llmc/OPTIONS.md. First: make quickstart. Finished runs are
not repeated. Uses only Python's standard library.

    dev/bench/mixture.py [--seeds 1 2 3] [--steps 150] [--data quickstart] [--out mixture] [--train-gpt ./train_gpt]
"""
import argparse
import json
import os
import statistics
import subprocess

MODELS = {"dense": [],  # 512 columns
          "2 of 8 experts": ["--num-experts", "8", "--moe-router-topk", "2", "--ffn-hidden-size", "256", "--moe-aux-loss-coeff", "1e-2"]}

parser = argparse.ArgumentParser()
parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--data", default="quickstart")
parser.add_argument("--out", default="mixture")
parser.add_argument("--train-gpt", default="./train_gpt")
o = parser.parse_args()
CHECKS = [o.steps * i // 3 for i in (1, 2, 3)]


def losses(out):
    """Validation losses at CHECKS; None: the run is not finished."""
    if not os.path.exists(f"{out}/log.jsonl"):
        return None
    with open(f"{out}/log.jsonl") as log:
        at = {r["step"]: r["loss"] for r in map(json.loads, log) if r["kind"] == "valid"}
    return [at[step] for step in CHECKS] if o.steps in at else None


def run(model, seed):
    out = f"{o.out}/{model.replace(' ', '-')}-{seed}-{o.steps}"
    if losses(out) is None:
        subprocess.run([o.train_gpt, "train", "--preset", "quickstart", *MODELS[model], "--tokenizer", f"{o.data}/tokenizer",
                        "--data-path", "0.8", f"{o.data}/data/0-bible", "0.2", f"{o.data}/data/1-debian-reference-ja",
                        "--split", "95, 5, 0", "--seq-length", "256", "--micro-batch-size", "8", "--global-batch-size", "16",
                        "--train-iters", str(o.steps), "--optimizer", "muon", "--lr", "4e-3", "--min-lr", "4e-4",
                        "--lr-warmup-iters", str(o.steps // 20), "--weight-decay", "0.1", "--eval-interval", str(CHECKS[0]),
                        "--eval-iters", "16", "--eval-fixed", "--seed", str(seed), "--save-every", str(o.steps), "--quiet",
                        "--on-spike", "warn", "--out", out], check=True, stdout=subprocess.DEVNULL)
    return losses(out)


print("| model | " + " | ".join(f"step {step}" for step in CHECKS) + " |\n" + "|" + " --- |" * (1 + len(CHECKS)))
for model in o.models:
    at_checks = zip(*(run(model, seed) for seed in o.seeds))
    cells = [f"{statistics.mean(of_seeds):.3f} ({min(of_seeds):.3f} to {max(of_seeds):.3f})" for of_seeds in at_checks]
    print(f"| {model} | " + " | ".join(cells) + " |", flush=True)
