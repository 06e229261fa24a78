#!/usr/bin/env python3
"""Trains tiny models with random pairs and triples of options, and checks rules that hold whatever they are: `make pairs`.

options.txt has a line per option of `train`: its values, what it requires, and what it may change. A pair or triple is drawn from
it; several that do not contradict each other are tested in one case, some with ranks:

  dry-run   accepts the options or refuses them by name (exit status 2); training then does not refuse them
  first     one rank, only the options that may change numbers. Its weights are the rounded masters, its checksums are right
  eval      of its last checkpoint, its adapters and its averaged weights gives the loss of its last validation, bit for bit
  second    resumes from the middle of `first`, with options that must not change any bit: the same files, the same log. In one
            case of eight it starts from the beginning, is killed, and resumes
  third     other micro-batches or other kernels: close losses
  ranks     two to four ranks, from the start or from the middle of `first`: close losses; eval of its checkpoint is close
  again     the same ranks resume from their middle, with options that must not change any bit: the same files
  back      one rank resumes from their middle: close losses

Every run ends with status 0 and its last step, or it is a failure: a crash, a hang, a refusal that dry-run did not predict.
How close losses must be is derived where CLOSE is set. A failure is reduced: options are left out while it stays; the last lines
are the command lines that repeat it. Its folder is kept.

  pairs.py [--pairs 300] [--seed S] PROGRAM...        every fourth case is of the second program, if there is one
  pairs.py --only "optimizer=muon save-in-foreground=on" PROGRAM     these options, without drawing
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "chaos"))
import verify  # noqa: E402
from attempt import CRASHES, MPI, QUIET_THREADS  # noqa: E402
from verify import Failure, require  # noqa: E402

BASE = {"num-layers": "4", "hidden-size": "64", "num-attention-heads": "4", "seq-length": "16", "micro-batch-size": "2", "global-batch-size": "8",
        "train-iters": "6", "lr": "1e-3", "eval-interval": "100", "eval-iters": "2", "eval-fixed": "on", "threads": "1", "data-path": "text",
        "split": "80,20,0", "tokenizer": "tok", "save-every": "3", "keep": "0", "distributed-timeout": "60s"}  # fmt: skip
PACKED = 4  # pairs in a case
MIDDLE = 3

# Where only the order of sums differs, each product and each stored activation is rounded elsewhere: by 2^-9 of it in bf16, which is
# independent from element to element. A logit, of size 1 in these models, then differs by some 2^-8 after four layers, a loss, the mean
# of 100 tokens and more, by 2^-8 at most. From step to step AdamW moves each weight by up to the rate, 1e-3, in a direction that
# rounding decides where a gradient is almost zero: such weights change the loss least. After 8 steps 0.05 is never reached by that
# and always by a gradient that is off by its size. Grad norms are square roots of sums of many squares: 2^-5 of them.
CLOSE = {"first loss": 2**-7, "loss": 0.05, "first grad_norm": 2**-5}
CLOSE_FP8 = {"first loss": 0.05, "loss": 0.1, "first grad_norm": 0.2}  # FP8 rounds by 2^-4 or, gradients, 2^-3


# ---- the table of options --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    name: str
    kind: str
    values: tuple = ()
    requires: tuple = ()  # (option, (values))
    removes: tuple = ()
    tags: frozenset = frozenset()
    weight: int = 1


def read_table(path):
    """(rows, names of options that are skipped)."""
    rows, skipped = [], set()
    for line in path.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, kind, values, *rest = re.split(r" {2,}", line.strip())
        if kind == "skip":
            skipped.add(name)
            continue
        require(kind in ("numbers", "bits", "order", "layout"), f"options.txt: unknown kind '{kind}'", line)
        words = rest[0].split() if rest else []
        requires, removes, tags, weight = [], [], set(), 1
        for word in words:
            if word[0] == "-":
                removes.append(word[1:])
            elif word[0] == "!":
                tags.add(word[1:])
            elif re.fullmatch(r"x\d+", word):
                weight = int(word[1:])
            else:
                option, _, of = word.partition("=")
                requires.append((option, tuple(v.replace("+", " ") for v in of.split("/"))))
        rows.append(Row(name, kind, tuple(values.split(" / ")), tuple(requires), tuple(removes), frozenset(tags), weight))
    return rows, skipped


def check_table(program, rows, skipped):
    """Names that differ between the table and `train --help-all`, as a list of sentences; choices likewise."""
    text = subprocess.run([program, "train", "--help-all"], capture_output=True, text=True, check=True).stdout
    entries = {}
    for part in re.split(r"\n  --", text)[1:]:
        name = re.match(r"[a-z0-9-]+", part)[0]
        entries[name] = re.sub(r"\s+", " ", part.split("\n\n")[0])
    problems = []
    known = {r.name for r in rows} | skipped
    problems += [f"--{name} has no line" for name in sorted(entries.keys() - known)]
    problems += [f"'{name}' is no option of train" for name in sorted(known - entries.keys())]
    for name, entry in entries.items():
        choices = re.search(r"; one of ([^;]*)", entry)
        values = {v for r in rows if r.name == name for v in r.values}
        if choices and values:
            missing = [c for c in choices[1].strip().split(", ") if c not in values]
            problems += [f"--{name} lacks the choices {', '.join(missing)}"] if missing else []
    return problems


# ---- cases -----------------------------------------------------------------------------------------------------------------------
class Conflict(Exception):
    pass


@dataclass
class Case:
    """Options of each kind: {name: value}."""

    chosen: dict = field(default_factory=dict)
    kinds: dict = field(default_factory=dict)
    removed: set = field(default_factory=set)
    tags: set = field(default_factory=set)
    extra: set = field(default_factory=set)  # names of options that no pair or triple needs

    def copy(self):
        return Case(dict(self.chosen), dict(self.kinds), set(self.removed), set(self.tags), set(self.extra))

    def add(self, row, value, table, rng):
        if self.chosen.get(row.name, value) != value or row.name in self.removed:
            raise Conflict()
        self.chosen[row.name] = value
        self.kinds[row.name] = row.kind
        self.tags |= row.tags
        for name in row.removes:
            if name in self.chosen:
                raise Conflict()
            self.removed.add(name)
        for name, values in row.requires:
            if name in self.removed or self.chosen.get(name, values[0]) not in values:
                raise Conflict()
            if name not in self.chosen:
                kind = next((r.kind for r in table if r.name == name), None)
                self.chosen[name] = rng.choice(values)
                self.kinds[name] = kind
                self.tags |= next((r.tags for r in table if r.name == name and self.chosen[name] in r.values), set())

    def add_set(self, chosen, table, rng):
        trial = self.copy()
        for row, value in chosen:
            trial.add(row, value, table, rng)
        self.__dict__ = trial.__dict__

    def without(self, name):
        c = self.copy()
        c.chosen.pop(name), c.kinds.pop(name), c.extra.discard(name)
        return c

    def of(self, *kinds):
        return {n: v for n, v in self.chosen.items() if self.kinds[n] in kinds}

    def text(self):
        return " ".join(shlex.quote(f"{n}={v}") for n, v in self.chosen.items())


def words_of(options):
    words = []
    for name, value in options.items():
        words += ["--" + name] + ([] if value == "on" else value.split(" ") if name not in ("sample-prompt", "prompt-init-text") else [value])
    return words


def draw_set(table, rng):
    """Two or three options with their values."""
    weights = [r.weight for r in table]
    while True:
        drawn = rng.choices(table, weights, k=2 if rng.random() < 0.7 else 3)
        if len({r.name for r in drawn}) == len(drawn):
            break
    return [(r, rng.choice(r.values)) for r in drawn]


# ---- runs ------------------------------------------------------------------------------------------------------------------------
class Refused(Exception):
    pass


class Runner:
    def __init__(self, program, work, folder, emulated):
        self.program, self.work, self.folder = program, work, folder
        self.commands, self.emulated = [], emulated
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, ranks, words, stem):
        words = [self.program] + words
        if ranks > 1:
            words = ["mpirun", "-n", str(ranks)] + words
        self.commands.append(" ".join(map(shlex.quote, words)))
        environment = {**os.environ, **MPI, **QUIET_THREADS, "OMPI_MCA_pml": "ob1", "HWLOC_COMPONENTS": "-pci,-linuxio"}
        out, err = open(self.folder / f"{stem}.out", "wb"), open(self.folder / f"{stem}.err", "wb")
        return subprocess.Popen(words, cwd=self.work, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)

    def run(self, rule, ranks, words):
        """Returns standard output. Failure: a crash or a hang; Refused: any other end than status 0."""
        process = self.start(ranks, words, rule)
        try:
            status = process.wait(timeout=600 if self.emulated else 90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failure(f"{rule}: hangs") from None
        said = (self.folder / f"{rule}.out").read_text(errors="replace"), (self.folder / f"{rule}.err").read_text(errors="replace")
        if status < 0 or CRASHES.search(said[0] + said[1]):
            raise Failure(f"{rule}: crashes", said[1][-500:])
        if status != 0:
            raise Refused(status, said[1].strip())
        return said[0]

    def train(self, rule, options, extra=(), ranks=1):
        out = self.folder / rule
        if self.emulated:
            options = {**options, "gemm-cache": "none"}
        try:
            output = self.run(rule, ranks, ["train"] + words_of(options) + list(extra) + ["--out", str(out)])
        except Refused as e:
            status, said = e.args
            reason = re.sub(r"[^a-z ].*", "", said.splitlines()[-1].removeprefix("error: --").removeprefix("error: "))[:40]
            raise Failure(f"{rule}: dry-run accepts what training refuses: {reason}", f"status {status}: {said[-400:]}") from None
        require((out / "latest").exists(), f"{rule}: ends with status 0 without a checkpoint")
        finished = "the run is finished:" in output or verify.ending_of(verify.read_log(out / "log.jsonl")) == "finished"
        require(finished, f"{rule}: ends with status 0 before it is finished")
        return out

    def killed(self, rule, options):
        """A run that is killed once it has written a checkpoint, or has ended before."""
        out = self.folder / rule
        process = self.start(1, ["train"] + words_of(options) + ["--out", str(out)], rule + "-killed")
        for _ in range(3000):
            if process.poll() is not None or verify.checkpoints(out):
                break
            time.sleep(0.002)
        process.poll() is not None or os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return self.train(rule, options, ["--resume", "auto"])


def is_named(said, case):
    """A refusal names an option of the case, its line's short name, or one that another option stands for."""
    named = set(re.findall(r"--([a-z0-9][a-z0-9-]*)", said))
    short = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size", "vpp": "num-virtual-stages-per-pipeline-rank",
             "fp8": "fp8-format", "recompute": "recompute-granularity", "check-replicas": "check-weight-hash-across-dp-replicas-interval"}  # fmt: skip
    named |= {short[n] for n in named if n in short}
    return [n for n in case.chosen if n in named or ("-" in n and re.search(rf"(?<![a-z0-9-]){n}(?![a-z0-9-])", said))]


def same_files(rule, ours, reference, ignore_state, from_step):
    a, b = ours / "latest", reference / "latest"
    names = [sorted(str(p.relative_to(d)) for p in d.resolve().rglob("*.safetensors")) for d in (a.resolve(), b.resolve())]
    require(names[0] == names[1], f"{rule}: other files", f"{names[0]}, not {names[1]}")
    for name in names[0]:
        if ignore_state and name == "training/reference.safetensors":  # has the pairs of the validation, which may differ
            continue
        require((a / name).read_bytes() == (b / name).read_bytes(), f"{rule}: other bits", name)
    x, y = verify.read_state(a), verify.read_state(b)
    for key in y if not ignore_state else []:
        require(x[key] == y[key], f"{rule}: another state", f"{key}: {x[key]}, not {y[key]}")
    x, y = (verify.steps_of(verify.read_log(o / "log.jsonl")) for o in (ours, reference))
    for step in y:
        if step > from_step:
            require(step in x, f"{rule}: a step is not in the log", str(step))
            require(x[step] == y[step], f"{rule}: another line in the log", f"step {step}: {x[step]}, not {y[step]}")


def close(rule, ours, reference, from_step, limits):
    x, y = (verify.steps_of(verify.read_log(o / "log.jsonl")) for o in (ours, reference))
    for step in sorted(y):
        if step <= from_step:
            continue
        require(step in x, f"{rule}: a step is not in the log", str(step))
        first = "first " if step == min(y) else ""
        loss, norm, expected, expected_norm = x[step][0], x[step][1], y[step][0], y[step][1]
        text = f"step {step}: loss {loss}, grad norm {norm}, not {expected}, {expected_norm}"
        require(abs(loss - expected) <= limits[first + "loss"], f"{rule}: losses are not close", text)
        if first:
            require(abs(norm - expected_norm) <= limits["first grad_norm"] * expected_norm, f"{rule}: gradient norms are not close", text)
        require(x[step][3:] == y[step][3:], f"{rule}: other counters", f"step {step}: {x[step]}, not {y[step]}")


def validations(out):
    return [r for r in verify.read_log(out / "log.jsonl") if r.get("kind") == "valid"]


def evaluate(runner, rule, out, options):
    """(what eval gives of the last checkpoint, what the run's last validation gave), for the model and its average."""
    logged = validations(out)[-1]
    valid = options.get("valid-data-path")
    seq = int(options["seq-length"])
    words = ["--data-path", *(valid or options["data-path"]).split(" "), "--split", "0,1,0" if valid else options["split"], "--json"]
    words += ["--seq-length", str(seq), "--micro-batch-size", options["micro-batch-size"], "--max-samples", str(logged["tokens"] // seq), "--threads", "1"]
    for name, key in (("latest", "loss"), ("latest/ema", "ema_loss")):
        if not (out / name).exists() or key not in logged:
            continue
        adapted = (out / name / "adapter_config.json").exists()
        try:
            said = runner.run(f"{rule}-eval", 1, ["eval", "--adapter" if adapted else "--model", str(out / name), *words])
        except Refused as e:
            raise Failure(f"{rule}: eval refuses a checkpoint", e.args[1][-400:]) from None
        yield name, json.loads(said)["evaluation"]["loss"], logged[key]


def number_of_ranks(case, rng):
    o = case.of("layout")
    ranks = int(o.get("tensor-model-parallel-size", 1)) * int(o.get("pipeline-model-parallel-size", 1))
    least = int(o.get("expert-model-parallel-size", 1))
    cut = int(o.get("context-parallel-size", 1))
    if cut > 1:
        return ranks * cut
    return ranks * (rng.choice([2, 4]) if ranks == 1 else rng.choice([least, 2]) if ranks == 2 else 1)


def run_case(case, runner, seed):
    """Raises Failure, or Refused with what was said."""
    rng = random.Random(seed)
    options = {**{n: v for n, v in BASE.items() if n not in case.removed}, **case.of("numbers")}
    bits, order, layout = case.of("bits"), case.of("order"), case.of("layout")
    # Which choices are dropped depends on the micro-batches, and so does a balance loss of each.
    if "moe-expert-capacity-factor" in options or options.get("moe-router-load-balancing-type") == "aux_loss":
        order.pop("micro-batch-size", None)
    if "model" in options:  # its sizes are its own
        options = {n: v for n, v in options.items() if n not in ("num-layers", "hidden-size", "num-attention-heads") or n in case.chosen}
    ranks = number_of_ranks(case, rng)
    planned_bits = {name: value for name, value in bits.items() if name != "eval-iters"}  # 0 would not open the data that `first` opens
    plans = [("dry-run", 1, {**options, **planned_bits, **order})] + ([("dry-run-ranks", ranks, {**options, **layout, **planned_bits})] if layout else [])
    for rule, world, planned in plans:
        try:
            runner.run(rule, 1, ["train"] + words_of(planned) + ["--dry-run"] + (["--world", str(world)] if world > 1 else []))
        except Refused as e:
            status, said = e.args
            require(status == 2, "a refusal has not status 2", f"{status}: {said[-400:]}")
            require(is_named(said, case), "a refusal names no option that was given", said[-400:])
            raise Refused(said) from None
    limits = CLOSE_FP8 if "fp8-format" in options else CLOSE

    first = runner.train("first", options)
    verify.check_manifest(first / "latest")
    verify.check_tensors(first / "latest")
    compared = "eval" not in case.tags and validations(first)
    for name, loss, expected in evaluate(runner, "first", first, options) if compared else []:
        require(loss == expected, "eval is not the validation", f"{name}: {loss}, not {expected}")
    middle = first / ("step_%08d" % MIDDLE)
    require(middle.exists(), "a checkpoint that is due is not there", f"step {MIDDLE} of {sorted(verify.checkpoints(first))}")
    if rng.random() < 1 / 8:
        second = runner.killed("second", {**options, **bits})
        same_files("second", second, first, "state" in case.tags, 0)
    else:
        second = runner.train("second", {**options, **bits}, ["--resume", str(middle)])
        same_files("second", second, first, "state" in case.tags, MIDDLE)
    if order:
        third = runner.train("third", {**options, **order})
        close("third", third, first, 0, limits)
    if not layout:
        return
    resumed = rng.random() < 0.5
    parallel = runner.train("ranks", {**options, **layout}, ["--resume", str(middle)] if resumed else [], ranks)
    close("ranks", parallel, first, MIDDLE if resumed else 0, limits)
    for name, loss, expected in evaluate(runner, "ranks", parallel, options) if compared else []:
        require(abs(loss - expected) <= limits["first loss"], "ranks: eval is not close to the validation", f"{name}: {loss}, not {expected}")
    if resumed:
        return
    middle = parallel / ("step_%08d" % MIDDLE)
    if rng.random() < 0.5:
        back = runner.train("back", options, ["--resume", str(middle)])
        close("back", back, first, MIDDLE, limits)
    again = runner.train("again", {**options, **layout, **bits}, ["--resume", str(middle)], ranks)
    same_files("again", again, parallel, "state" in case.tags, MIDDLE)


# ---- a failure -------------------------------------------------------------------------------------------------------------------
def reduce(case, failure, run, seconds=120):
    """Leaves options out while the same rule fails: many at a time, then fewer."""
    until = time.monotonic() + seconds

    def fails(smaller):
        try:
            run(smaller)
        except Failure as e:
            return e.kind == failure.kind
        except Refused:
            pass
        return False

    size = len(case.chosen)
    while size >= 1:
        names = [n for n in case.chosen if n in case.extra] + [n for n in case.chosen if n not in case.extra]
        for at in range(0, len(names), size):
            smaller = case
            for name in names[at : at + size]:
                smaller = smaller.without(name)
            if time.monotonic() < until and smaller.chosen and fails(smaller):
                case = smaller
        size = size // 2 if size > 1 or len(case.chosen) == len(names) or time.monotonic() > until else 1
    fails(case)  # the command lines are those of the last run
    return case


# ---- all of it -------------------------------------------------------------------------------------------------------------------
def prepare_data(program, work):
    run = lambda *words: subprocess.run([program, *words], cwd=work, check=True, capture_output=True)
    lines = [f"in the year {i * 37 % 1000} the king of city {i % 17} gave {i * 11 % 97} sheep to his son" + "\n" * (i % 5 == 0) for i in range(300)]
    (work / "text.txt").write_text("\n".join(lines) + "\n")
    (work / "small.txt").write_text("\n".join(f"birds {i * 3 % 50} sang in tree {i % 13}" + "\n" * (i % 3 == 0) for i in range(60)) + "\n")
    (work / "chat.jsonl").write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"city {i % 17}"}, {"role": "assistant", "content": f"{i * 11 % 97} sheep"}]}) + "\n" for i in range(200)))
    (work / "answers.jsonl").write_text("".join(json.dumps({"prompt": f"year {i}?", "chosen": f" {i * 7 % 10} sheep", "rejected": f" no {i * 3 % 10}"}) + "\n" for i in range(150)))
    (work / "choices.jsonl").write_text("".join(json.dumps({"context": f"the king of city {i}", "choices": [" gave", " sheep"], "gold": 0}) + "\n" for i in range(4)))
    (work / "written.jsonl").write_text("".join(json.dumps({"context": f"the king of city {i}", "target": " gave"}) + "\n" for i in range(4)))
    run("tokenizer", "--input", "text.txt", "small.txt", "--vocab-size", "300", "--output", "tok")
    for name in ("text", "small"):
        run("prepare", "--input", name + ".txt", "--output", name, "--tokenizer", "tok", "--split-documents", "blank")
    run("prepare", "--input", "chat.jsonl", "--output", "chat", "--tokenizer", "tok", "--chat", "--chat-template", "plain")
    run("prepare", "--input", "answers.jsonl", "--output", "answers", "--tokenizer", "tok", "--preference", "--chat-template", "plain")
    llama = {"normalization": "RMSNorm", "position-embedding-type": "rope", "swiglu": "on", "disable-bias-linear": "on", "untie-embeddings-and-output-weights": "on"}
    for name, family in (("base-gpt2", {}), ("base-llama", llama), ("base-mixture", llama | {"num-experts": "5"})):
        run("train", *words_of({**BASE, **family, "max-position-embeddings": "64", "eval-iters": "0"}), "--out", name)


class Campaign:
    def __init__(self, arguments, work):
        self.work, self.seed = work, arguments.seed
        self.programs = [str(Path(p).resolve()) for p in arguments.programs]
        self.rows, self.skipped = read_table(HERE / "options.txt")
        self.counts, self.failures, self.number, self.runs = {"held": 0, "refused": 0}, {}, 0, 0
        self.verbose, self.most_failures = arguments.verbose, arguments.failures

    def run(self, case, folder, seed):
        emulated = "/emu-" in self.program
        shutil.rmtree(folder, ignore_errors=True)
        self.runner = Runner(self.program, self.work, folder, emulated)
        run_case(case, self.runner, seed)
        self.runs += len(self.runner.commands)

    def test(self, case):
        """True: the rules hold; a string: the refusal; None: a failure, which is reported."""
        self.number += 1
        self.program = self.programs[0] if self.number % 4 else self.programs[-1]
        folder, seed = self.work / f"case-{self.number}", f"{self.seed} case {self.number}"
        if self.verbose:
            print(f"{self.number}: {case.text()}", flush=True)
        try:
            self.run(case, folder, seed)
            shutil.rmtree(folder)
            return True
        except Refused as e:
            shutil.rmtree(folder)
            return str(e.args[0])
        except Failure as e:
            self.report(case, e, folder, seed)
            return None

    def report(self, case, failure, folder, seed):
        if failure.kind in self.failures:
            self.failures[failure.kind] += 1
            return
        self.failures[failure.kind] = 1
        small = reduce(case, failure, lambda c: self.run(c, folder, seed))
        print(f"FAILED: pairs: seed {self.seed}, case {self.number}: {failure}"[:600])
        print(f"    fewest options: {small.text()}")
        print("\n".join("    " + c for c in self.runner.commands))
        print(f"    kept in {folder}; data in {self.work}; again: test/pairs/pairs.py --only {shlex.quote(small.text())} {self.program}", flush=True)

    def go(self, pairs):
        rng = random.Random(f"{self.seed} pairs")
        queue = []  # (set, how often it was refused with others)
        while self.counts["held"] + self.counts["refused"] < pairs and len(self.failures) < self.most_failures:
            missing = pairs - self.counts["held"] - self.counts["refused"] - len(queue)
            queue += [(draw_set(self.rows, rng), 0) for _ in range(max(0, missing))]
            has_ranks = lambda s: any(r.kind == "layout" for r, _ in s)
            queue.sort(key=lambda q: has_ranks(q[0]))  # stable: those with ranks last, together
            case, packed = Case(), []
            alone = queue[0][1] > 0
            for q in list(queue):
                if len(packed) == (1 if alone else PACKED) or (packed and has_ranks(q[0]) != has_ranks(packed[0][0])):
                    break
                if packed and q[1] > 0:
                    continue
                try:
                    case.add_set(q[0], self.rows, rng)
                    packed.append(q)
                    queue.remove(q)
                except Conflict:
                    if not packed:  # it contradicts itself
                        queue.remove(q)
                        break
            if not packed:
                continue
            self.add_bits(case, rng)
            result = self.test(case)
            while isinstance(result, str) and case.extra & set(is_named(result, case)):
                for name in case.extra & set(is_named(result, case)):
                    case = case.without(name)
                result = self.test(case)
            if result is True or result is None:
                self.counts["held"] += len(packed)
                continue
            if len(packed) == 1 and packed[0][1] > 1:
                self.counts["refused"] += 1
                if self.verbose:
                    print("   refused: " + result)
                continue
            named = set(is_named(result, case))
            for chosen, tries in packed:
                guilty = any(r.name in named or any(n in named for n, _ in r.requires) for r, _ in chosen)
                queue.append((chosen, tries + (1 if guilty or len(packed) == 1 else 0)))

    def add_bits(self, case, rng):
        """Most options that change no bit cost nothing in a case: a quarter of them, at random, more of those drawn more often."""
        for row in self.rows:
            if row.kind == "bits" and rng.random() < 0.25 * row.weight**0.5 and not any(n == "fp8-format" for n, _ in row.requires):
                before = set(case.chosen)
                trial = case.copy()
                try:
                    trial.add(row, rng.choice(row.values), self.rows, rng)
                except Conflict:
                    continue
                case.__dict__ = trial.__dict__
                case.extra |= set(case.chosen) - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--pairs", type=int, default=int(os.environ.get("PAIRS") or 300))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PAIRS_SEED") or 0) or None)
    parser.add_argument("--only", default="")
    parser.add_argument("--failures", type=int, default=3, help="end after so many kinds")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1, 10**9)
    start = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="pairs-"))
    campaign = Campaign(arguments, work)
    problems = check_table(campaign.programs[0], campaign.rows, campaign.skipped)
    for problem in problems:
        print(f"FAILED: test/pairs/options.txt: {problem}")
    if not problems:
        print("ok: every option of train has its line in test/pairs/options.txt")
    prepare_data(campaign.programs[0], work)
    print(f"pairs: seed {arguments.seed}", flush=True)
    if arguments.only:
        case, rng = Case(), random.Random(arguments.seed)
        for word in shlex.split(arguments.only):
            name, _, value = word.partition("=")
            row = next((r for r in campaign.rows if r.name == name), None) or parser.error(f"no option '{name}' in options.txt")
            case.chosen[name], case.kinds[name] = value, row.kind
            case.tags |= row.tags
            case.removed |= set(row.removes)
        result = campaign.test(case)
        print("ok: the rules hold" if result is True else result or "the rules do not hold")
    else:
        campaign.go(arguments.pairs)
    counts = campaign.counts
    cores = os.times()
    print(f"{campaign.number} cases, {campaign.runs} runs in {time.monotonic() - start:.0f} s, {cores.children_user + cores.children_system + cores.user + cores.system:.0f} s of a core")
    if not campaign.failures and not arguments.only:
        print(f"ok: pairs: the rules hold for {counts['held']} pairs and triples; {counts['refused']} are refused by name")
    if not campaign.failures:
        shutil.rmtree(work)
    return 1 if campaign.failures or problems else 0


if __name__ == "__main__":
    sys.exit(main())
