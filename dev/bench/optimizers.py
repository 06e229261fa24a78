#!/usr/bin/env python3
"""Compares Muon with AdamW on the quick start's model and data: both over the same learning rates and seeds, then Muon at
its best rate in runs of a fraction of the steps, each with its own schedule. Prints the tables of llmc/OPTIONS.md. First:
make quickstart. Finished runs are not repeated. Uses only Python's standard library.

    dev/bench/optimizers.py [--rates 1e-3 ...] [--seeds 1 2 3] [--steps 150] [--parts 0.33 ...] [--data quickstart] [--out optimizers]
"""
import argparse
import json
import os
import statistics
import subprocess

parser = argparse.ArgumentParser()
parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2])
parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--parts", type=float, nargs="+", default=[0.2, 0.27, 0.33, 0.5, 0.67])
parser.add_argument("--data", default="quickstart")
parser.add_argument("--out", default="optimizers")
parser.add_argument("--train-gpt", default="./train_gpt")
o = parser.parse_args()


def validation_loss(out, steps):
    """From the last step; None: the run is not finished."""
    path = f"{out}/log.jsonl"
    if not os.path.exists(path):
        return None
    with open(path) as log:
        found = [r["loss"] for r in map(json.loads, log) if r["kind"] == "valid" and r["step"] == steps]
    return found[-1] if found else None


def run(optimizer, rate, seed, steps):
    out = f"{o.out}/{optimizer}-{rate:g}-{seed}-{steps}"
    if (loss := validation_loss(out, steps)) is None:
        subprocess.run([o.train_gpt, "train", "--preset", "quickstart", "--tokenizer", f"{o.data}/tokenizer", "--data-path", "0.8",
                        f"{o.data}/data/0-bible", "0.2", f"{o.data}/data/1-debian-reference-ja", "--split", "95, 5, 0",
                        "--seq-length", "256", "--micro-batch-size", "8", "--global-batch-size", "16", "--train-iters", str(steps),
                        "--optimizer", optimizer, "--lr", f"{rate:g}", "--min-lr", f"{rate / 10:g}", "--lr-warmup-iters",
                        str(steps // 20), "--weight-decay", "0.1", "--eval-interval", str(steps), "--eval-iters", "16", "--eval-fixed",
                        "--seed", str(seed), "--save-every", str(steps), "--quiet", "--on-spike", "warn", "--out", out],
                       check=True, stdout=subprocess.DEVNULL)
        loss = validation_loss(out, steps)
    return loss


def row(optimizer, rate, steps):
    losses = [run(optimizer, rate, seed, steps) for seed in o.seeds]
    return statistics.mean(losses), min(losses), max(losses)


def cell(losses):
    mean, low, high = losses
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def print_row(cells):
    print("| " + " | ".join(cells) + " |", flush=True)


print_row(["optimizer", "steps"] + [f"{rate:g}" for rate in o.rates])
print_row(["---"] * (2 + len(o.rates)))
best = {}
for optimizer in ("adamw", "muon"):
    rows = [row(optimizer, rate, o.steps) for rate in o.rates]
    best[optimizer] = min(zip(rows, o.rates))
    print_row([optimizer, str(o.steps)] + [cell(r) for r in rows])
print("\nbest rates: " + ", ".join(f"{name} {rate:g}, {cell(losses)}" for name, (losses, rate) in best.items()) + "\n")
for part in o.parts:
    steps = round(o.steps * part)
    print_row(["muon", str(steps), f"{steps / o.steps:.0%}", cell(row("muon", best["muon"][1], steps))])
