#!/usr/bin/env python3
"""The best learning rate for several widths, in the standard parametrization and with muP: short runs on the quick start's
Bible, every width with every rate. Prints the table of llmc/TRANSFER.md and draws its chart. First: make quickstart.
Finished runs are not repeated. Uses only Python's standard library.

    dev/bench/transfer.py [--widths 64 128 256] [--rates 1e-3 ...] [--steps 200] [--data quickstart] [--out transfer] [--svg FILE]
"""
import argparse
import json
import math
import os
import subprocess

parser = argparse.ArgumentParser()
parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--data", default="quickstart")
parser.add_argument("--out", default="transfer")
parser.add_argument("--svg", default="dev/img/transfer.svg")
parser.add_argument("--train-gpt", default="./train_gpt")
o = parser.parse_args()
kinds = {"standard": [], "mup": ["--parametrization", "mup", "--mup-base-width", str(o.widths[0])]}


def validation_loss(out):
    """From the last step; None: the run is not finished."""
    path = f"{out}/log.jsonl"
    if not os.path.exists(path):
        return None
    with open(path) as log:
        found = [r["loss"] for r in map(json.loads, log) if r["kind"] == "valid" and r["step"] == o.steps]
    return found[-1] if found else None


def run(kind, width, rate):
    out = f"{o.out}/{kind}-{width}-{rate:g}"
    if (loss := validation_loss(out)) is None:
        subprocess.run([o.train_gpt, "train", "--num-layers", "4", "--hidden-size", str(width), "--num-attention-heads", str(width // 32),
                        "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu", "--disable-bias-linear",
                        "--untie-embeddings-and-output-weights", "--ffn-hidden-size", str(3 * width),
                        "--tokenizer", f"{o.data}/tokenizer", "--data-path", f"{o.data}/data/0-bible", "--split", "90, 10, 0",
                        "--seq-length", "128", "--micro-batch-size", "8", "--global-batch-size", "8", "--train-iters", str(o.steps),
                        "--lr", f"{rate:g}", "--lr-warmup-iters", str(o.steps // 10), "--eval-interval", str(o.steps),
                        "--eval-iters", "20", "--eval-fixed", "--seed", "1", "--save-every", str(o.steps), "--quiet",
                        "--on-spike", "warn", "--out", out] + kinds[kind], check=True, stdout=subprocess.DEVNULL)
        loss = validation_loss(out)
    return loss if loss is not None and math.isfinite(loss) else math.inf


losses = {kind: {w: [run(kind, w, r) for r in o.rates] for w in o.widths} for kind in kinds}
print("| parametrization | width | " + " | ".join(f"{r:g}" for r in o.rates) + " |")
print("| --- " * (2 + len(o.rates)) + "|")
for kind, by_width in losses.items():
    for width, row in by_width.items():
        print(f"| {kind} | {width} | " + " | ".join(f"**{x:.3f}**" if x == min(row) else f"{x:.3f}" for x in row) + " |")

# ---- the chart: a panel per parametrization ----------------------------------------------------------------------------
W, H, gap = 330, 260, 60
seen = [x for by_width in losses.values() for row in by_width.values() for x in row if math.isfinite(x)]
low = math.floor(min(seen) * 5) / 5
high = min(math.ceil(max(seen) * 5) / 5, low + 2.4)  # worse ones are cut off
at_x = lambda i: 20 + i * (W - 40) / max(1, len(o.rates) - 1)
at_y = lambda loss: H * (high - min(loss, high)) / (high - low)
styles = ["var(--a)", "var(--b)", "var(--c)", "var(--d)"]
svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-60 -50 {2 * W + gap + 80} {H + 110}" font-family="system-ui, sans-serif" '
       'font-size="12">', "<style>", ":root { color-scheme: light dark; --card: #ffffff; --ink: #1c2127; --soft: #6b7280; --grid: #ecebe6;",
       "  --a: #2563c9; --b: #0f766e; --c: #d9570b; --d: #7c3aed; }", "@media (prefers-color-scheme: dark) {",
       ":root { --card: #171b21; --ink: #e7e9ec; --soft: #929aa6; --grid: #242a32; --a: #6ea4ff; --b: #4fd1bd; --c: #ff9a57; --d: #b794ff; } }",
       "text { fill: var(--soft); }", "</style>",
       f'<rect x="-60" y="-50" width="{2 * W + gap + 80}" height="{H + 110}" rx="8" fill="var(--card)"/>']
for panel, (kind, by_width) in enumerate(losses.items()):
    svg.append(f'<g transform="translate({panel * (W + gap)} 0)">')
    svg.append(f'<text x="0" y="-24" font-size="14" style="fill: var(--ink)">{kind}</text>')
    steps = round((high - low) / 0.4)
    for tick in [low + 0.4 * k for k in range(steps + 1)]:
        svg.append(f'<line x2="{W}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}" stroke="var(--grid)"/>'
                   f'<text x="-8" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for i, rate in enumerate(o.rates):
        svg.append(f'<text x="{at_x(i):.1f}" y="{H + 20}" text-anchor="middle">{rate:g}</text>')
    svg.append(f'<text x="{W / 2}" y="{H + 42}" text-anchor="middle">learning rate; dots: the best of a width</text>')
    for k, (width, row) in enumerate(by_width.items()):
        points = " ".join(f"{at_x(i):.1f},{at_y(x):.1f}" for i, x in enumerate(row))
        best = row.index(min(row))
        svg.append(f'<polyline points="{points}" fill="none" stroke="{styles[k % 4]}" stroke-width="2"/>'
                   f'<circle cx="{at_x(best):.1f}" cy="{at_y(row[best]):.1f}" r="5" fill="{styles[k % 4]}"/>'
                   f'<text x="{W - 225 + 75 * k}" y="-24" style="fill: {styles[k % 4]}">width {width}</text>')
    svg.append("</g>")
svg.append("</svg>")
with open(o.svg, "w") as file:
    file.write("\n".join(svg) + "\n")
print(f"chart: {o.svg}")
