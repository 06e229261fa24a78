"""A scenario: a model, its training options, and the ranks. Drawn from a seed, made of named features that can be excluded.

Sizes are tiny: two layers of width 32, some dozens of steps that take a millisecond each.
"""

import random
from dataclasses import dataclass, field

BASE = "--hidden-size 32 --num-attention-heads 4 --tokenizer tok --threads 1 --min-lr 1e-4 --distributed-timeout 60s".split()
LAYOUTS = {
    1: [{}],
    2: [{"tp": 2}, {"tp": 2, "no-sp": 1}, {"dp": 2}, {"dp": 2, "zero-0": 1}, {"pp": 2}, {"pp": 2, "vpp": 2}],
    4: [{"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"dp": 4}, {"tp": 4}, {"tp": 2, "dp": 2, "zero-0": 1}],
}
# Each is chosen with this probability; the functions below define it.
CHANCES = {"grouped-queries": 0.3, "z-loss": 0.2, "fp8": 0.2, "ramp-up": 0.2, "blend": 0.2, "epochs": 0.25, "documents": 0.15,
           "skip-batches": 0.15, "skip-iterations": 0.1, "recompute": 0.15, "rollback": 0.12, "nan-gradient": 0.1, "samples": 0.1,
           "no-validation": 0.1, "check-replicas": 0.1, "health": 0.1, "wsd": 0.2, "weight-decay": 0.1, "keep-every": 0.2,
           "in-foreground": 0.3, "buckets": 0.15, "no-overlap": 0.1, "quiet": 0.2, "muon": 0.15, "normuon": 0.1, "ema": 0.2,
           "bf16-gradients": 0.1, "bf16-moments": 0.1, "fp8-moments": 0.1, "dropout": 0.15, "lora": 0.15, "snapshots": 0.3}  # fmt: skip
FAMILIES = {
    "gpt2": "",
    "bloom": "--position-embedding-type alibi --embed-layernorm",
    "llama": "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights",
}


def model_name(family, layers):
    """Of a model for adapters, which chaos.py trains."""
    return f"model-{family}-{layers}"


@dataclass
class Scenario:
    family: str
    build: str
    layers: int
    layout: dict
    other: dict  # another layout, for resuming
    features: dict = field(default_factory=dict)  # name -> options
    environment: dict = field(default_factory=dict)  # TRAIN_GPT_FAULTS

    def ranks(self, layout=None):
        layout = self.layout if layout is None else layout
        return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)

    def options(self, layout=None):
        layout = self.layout if layout is None else layout
        words = list(BASE) + ["--num-layers", str(self.layers)]
        for options in self.features.values():
            words += options
        for name in ("tp", "pp", "vpp"):
            if name in layout:
                words += ["--" + name, str(layout[name])]
        if not self.build.startswith("cpu"):  # the fastest algorithms may be others next time, with other bits
            words += ["--gemm-cache", "none"]
        words += ["--no-sequence-parallel"] if "no-sp" in layout else []
        words += ["--zero", "0"] if "zero-0" in layout else []
        return words

    def names(self):
        """Names that can be excluded, in the order to try."""
        hidden = ("family", "steps", "sizes", "save", "keep", "data", "evaluation")
        return [n for n in self.features if n not in hidden] + list(self.layout)

    def text(self):
        layout = "".join(f" {k}{v}" if k in ("tp", "pp", "dp", "vpp") else f" {k}" for k, v in self.layout.items())
        return f"{self.build} {self.family}{layout}"

    def has(self, name):
        return name in self.features


def draw(seed, builds, leave_out):
    """builds: their names. Whatever is excluded, the rest is drawn the same."""
    r = random.Random(f"{seed} scenario")
    choice = random.Random(f"{seed} build").random()
    build = builds[0] if choice < 0.7 else builds[int((choice - 0.7) / 0.3 * len(builds))]
    family = r.choice(["gpt2", "bloom", "llama"])
    ranks = r.choices([1, 2, 4], [0.5, 0.3, 0.2])[0]
    layout, other = r.choice(LAYOUTS[ranks]), r.choice(LAYOUTS[r.choice([1, 2, 4])])
    chosen = {name for name, chance in CHANCES.items() if r.random() < chance}
    steps, seq, micro, batches = r.randint(12, 40), r.choice([16, 24]), r.choice([1, 2]), r.choice([1, 1, 2])
    layers, save, keep = r.choice([1, 2]), r.choice("3 4 5 7 10 0 0.03s 0.1s".split()), r.choice("0 1 2 3".split())
    start, noise, rank = r.choice(["4", "4", "1"]), r.randint(24, 30), r.randrange(4)
    trainer_seed, brief = r.randrange(4), r.random() < 0.08

    leave_out = set(leave_out)
    layout = {k: v for k, v in layout.items() if k not in leave_out}
    if "vpp" in layout and "pp" not in layout:
        del layout["vpp"]
    chosen -= leave_out
    if "lora" in chosen:  # of a model that is trained without them
        chosen -= {"grouped-queries", "muon", "normuon"}
    if "muon" in chosen or "fp8-moments" in chosen:
        chosen -= {"normuon"}
    if "fp8-moments" in chosen or "normuon" in chosen:
        chosen -= {"bf16-moments"}
    if layout.get("tp") == 4 or other.get("tp") == 4 or family != "llama":
        chosen -= {"grouped-queries"}
    if layout.get("tp") == 4:
        chosen -= {"fp8"}
    if "fp8" in chosen:  # needs sizes in multiples of sixteen
        seq, micro = 16, 2
    if not (layout.get("dp", 1) > 1):
        chosen -= {"check-replicas", "buckets"}
    if build.startswith("emu"):  # a hundred times slower
        steps, chosen = min(steps, 6), chosen - {"rollback", "samples"}
    if brief:
        steps, chosen = 1 + trainer_seed % 3, chosen - {"skip-batches", "skip-iterations", "wsd", "fp8", "nan-gradient", "rollback", "ramp-up"}
    if "rollback" in chosen:  # needs undisturbed steps, and checkpoints at fixed steps
        chosen -= {"skip-batches", "skip-iterations", "ramp-up", "nan-gradient", "epochs", "no-validation", "snapshots"}
        steps, keep, save = 40, "0", "5"
    if "epochs" in chosen:
        chosen -= {"blend"}
    if "skip-batches" in chosen:
        chosen -= {"skip-iterations"}
    world = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)
    layers = max(layers, layout.get("pp", 1) * layout.get("vpp", 1), other.get("pp", 1) * other.get("vpp", 1))
    batch = micro * 4 * batches  # for four replicas as well

    s = Scenario(family, build, layers, layout, other)
    f = s.features
    f["family"] = FAMILIES[family].split()
    if "lora" in chosen:
        f["family"] = ["--model", model_name(family, layers)]
    f["sizes"] = ["--seq-length", str(seq), "--micro-batch-size", str(micro), "--global-batch-size", str(batch), "--seed", str(trainer_seed)]
    f["steps"] = ["--train-iters", str(steps), "--lr", "1e-3"]
    f["data"] = ["--split", "90,10,0", "--data-path"] + (["0.5", "text", "0.5", "small"] if "blend" in chosen else ["small"] if "epochs" in chosen else ["text"])
    f["evaluation"] = ["--eval-interval", "7", "--eval-iters", "0" if "no-validation" in chosen else "1"]
    f["save"] = ["--save-every", save]
    f["keep"] = ["--keep", keep]
    if "ramp-up" in chosen:
        first = 4 * micro if start == "4" else micro * max(layout.get("dp", 1), other.get("dp", 1))
        batch = 16 * micro
        samples = batch * steps // 2
        f["sizes"][5] = str(batch)
        f["steps"] = ["--train-samples", str(samples), "--lr", "1e-3"]
        f["ramp-up"] = ["--rampup-batch-size", str(first), str(4 * micro if start == "4" else first), str(samples // 3)]
        if (batch - first) % int(f["ramp-up"][2]):
            f["ramp-up"][2] = str(batch - first)
    middle = steps // 2
    meanings = {
        "grouped-queries": "--num-query-groups 2",
        "z-loss": "--z-loss 1e-4",
        "fp8": f"--fp8 hybrid --fp8-start {middle} --fp8-calibration-steps 3",
        "documents": "--reset-position-ids --reset-attention-mask --eod-mask-loss",
        "skip-batches": f"--skip-batches {middle}-{middle + 2},{middle + 5}",
        "skip-iterations": f"--skip-train-iteration-range {middle}-{middle + 1} {middle + 1}-{middle + 1}",
        "recompute": "--recompute full",
        "samples": "--sample-interval 9 --sample-tokens 4",
        "no-validation": "",
        "blend": "",
        "epochs": "",
        "check-replicas": "--check-replicas 4",
        "health": "--log-health-interval 5",
        "wsd": f"--lr-decay-style WSD --lr-wsd-decay-iters {max(2, steps // 4)}" if "ramp-up" not in chosen else "--lr-decay-style linear",
        "weight-decay": "--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.2",
        "keep-every": "--keep-every 6",
        "in-foreground": "--save-in-foreground",
        "buckets": "--ddp-bucket-size 4096",
        "no-overlap": "--no-overlap",
        "quiet": "--quiet",
        "muon": "--optimizer muon",
        "normuon": "--optimizer normuon",
        "ema": "--ema-decay 0.9",
        "bf16-gradients": "--main-grads-dtype bf16",
        "bf16-moments": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
        "fp8-moments": "--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8",
        "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
        "lora": "--lora-rank 4 --lora-dropout 0.1",
        "snapshots": "--snapshot-every 3",
        "nan-gradient": "",
        "rollback": "--on-spike rollback --spike-window 16 --spike-loss-deviations 5 --rollback-distance 3 --rollback-batches 4",
    }
    for name in CHANCES:
        if name in chosen and name in meanings:
            f[name] = meanings[name].split()
    if "nan-gradient" in chosen:
        s.environment["TRAIN_GPT_FAULTS"] = f"nan-gradient={middle}:{rank % world}"
    if "rollback" in chosen:
        s.environment["TRAIN_GPT_FAULTS"] = f"noise={noise}-{noise + 3}"
    return s
