#!/usr/bin/env python3
"""Trains tiny models while everything goes wrong, and checks that nothing saved is lost: `make chaos`.

A run is drawn from a seed. It has a scenario (scenario.py): a model family with unusual options, a layout of 1, 2 or 4 ranks,
and checkpoint settings. First the scenario is trained undisturbed, as the reference. Then it is trained in one to three
starts with faults (faults.py): processes killed, stopped, signalled; disks full, read-only, slow, failing at the n-th call;
the clock jumping; files deleted, replaced, damaged; a second start in the same folder. Finally it is resumed with
`--resume auto`, without faults, until it is finished. It must end in one of these ways:

  same bits   weights, master weights, moments and counters equal the undisturbed run's, byte by byte, and so does every logged
              step, each once in the log
  near        it was resumed on another number of ranks: each loss is within 0.05 of the undisturbed run's
  recomputed  as `same bits`, after a fault damaged or deleted a checkpoint: training resumed from an older one
  refused     no intact checkpoint was left, and the trainer reported it; without checkpoints it starts over, and ends with the
              same bits. Or the scenario's options cannot be combined

and these are failures:
- a crash (a signal not sent by us, an internal check, an uncaught exception), a hang, status 0 without having finished or
  stopped, an error without a cause, an exit without a message
- an incomplete checkpoint under its final name; a logged checkpoint that is missing; an intact one that is ignored while
  training resumes from an older one; a dangling `latest`; temporary files left after a finished run
- a user file missing or changed
- counters, log and tensors that contradict each other (verify.py reads them without the trainer's code: its own CRC-32C,
  weights compared with rounded masters, samples with the sum of the batches)

A failure is repeated and reduced: faults and options are removed one by one while it persists. The last lines are the command
that reproduces it. Its folder is kept: attempt-N.sh, .out, .err, and OUT.

  chaos.py [--seconds 600 | --runs N] [--seed S] [--leave-out "NAME ..."] [--faults "NAME ..."] PROGRAM...
  chaos.py --self-test PROGRAM     a deliberately broken trainer (broken.py) must be detected

PROGRAM is a build's train_gpt; most runs use the first. Run i of a campaign has the seed S + i. --leave-out names faults and
features to exclude, --faults the only faults to include.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import faults
import scenario
import verify
from attempt import Attempt, Launch
from place import Place
from verify import Failure, require

HERE = Path(__file__).resolve().parent
TOLERANCE = 0.05  # of losses on another layout


# Unsupported combinations in scenarios; any other refusal of an undisturbed run is a failure.
IMPOSSIBLE = re.compile("micro-batches in a step are not a multiple of the")


class Refused(Exception):
    """The scenario's options cannot be combined, as the undisturbed run reports."""


class Chaos:
    def __init__(self, programs, work, deadline=None):
        self.work, self.deadline = Path(work), deadline
        self.programs = {Path(p).resolve().parent.name: str(Path(p).resolve()) for p in programs}
        self.reference_programs = dict(self.programs)
        self.references, self.places = {}, 0
        self.tools = self.find_tools()
        self.prepare_data()

    def find_tools(self):
        """The requirements of faults on this machine: {name: available}; prints the missing ones."""
        tools, root = {}, os.geteuid() == 0
        tools["setpriv"] = root and shutil.which("setpriv")
        trial = self.work / "trial"
        trial.mkdir()
        tools["mount"] = root and subprocess.run(["mount", "-t", "tmpfs", "tmpfs", trial], capture_output=True).returncode == 0
        if tools["mount"]:
            subprocess.run(["umount", trial], check=True)
        shim = self.work / "shim.so"
        built = shutil.which("cc") and subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, HERE / "shim.c", "-ldl"]).returncode == 0
        tools["shim"] = str(shim) if built else None
        tools["mpirun"] = shutil.which("mpirun")
        for name, there in tools.items():
            if not there:
                print(f"skipped: what needs {name}, which this machine does not have or allow")
        return tools

    def prepare_data(self):
        lines = [f"in the year {i * 37 % 1000} the king of city {i % 17} gave {i * 11 % 97} sheep to his son" + "\n" * (i % 5 == 0) for i in range(500)]
        (self.work / "text.txt").write_text("\n".join(lines) + "\n")
        lines = [f"birds {i * 3 % 50} sang in tree {i % 13}" + "\n" * (i % 4 == 0) for i in range(120)]
        (self.work / "small.txt").write_text("\n".join(lines) + "\n")
        program = next(iter(self.reference_programs.values()))
        run = lambda *words: subprocess.run([program, *words], cwd=self.work, check=True, capture_output=True)
        run("tokenizer", "--input", "text.txt", "small.txt", "--vocab-size", "380", "--output", "tok")
        for name in ("text", "small"):
            run("prepare", "--input", name + ".txt", "--output", name, "--tokenizer", "tok", "--split-documents", "blank")

    def prepare_model(self, s):
        """The model that a scenario's adapters are on."""
        name = scenario.model_name(s.family, s.layers)
        if s.has("lora") and not (self.work / name).exists():
            words = [*scenario.BASE, *scenario.FAMILIES[s.family].split(), "--num-layers", str(s.layers), "--max-position-embeddings", "24"]
            words += "--seq-length 24 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --data-path text --eval-iters 0".split()
            subprocess.run([next(iter(self.reference_programs.values())), "train", *words, "--out", name], cwd=self.work, check=True, capture_output=True)

    def place(self, calls=None, small_disk=False):
        self.places += 1
        return Place(self.work / f"run-{self.places}", self.tools, calls or {}, small_disk)

    def launch(self, place, s, program, extra, layout=None):
        deadline = self.deadline or (600 if s.build.startswith("emu") else 120)
        return Launch(place, program, s.ranks(layout), s.options(layout) + extra, dict(s.environment), deadline=deadline)

    # ---- the undisturbed run ----
    def reference(self, s):
        """(its folder, seconds, final step, calls); computed once."""
        self.prepare_model(s)
        key = hashlib.sha256(json.dumps([s.build, s.options(), s.ranks(), s.environment]).encode()).hexdigest()
        if key not in self.references:
            self.references[key] = self.compute_reference(s)
        return self.references[key]

    def compute_reference(self, s):
        place = self.place()
        launch = self.launch(place, s, self.reference_programs[s.build], [])
        if self.tools["shim"]:
            launch.environment.update({"LD_PRELOAD": self.tools["shim"], "CHAOS_OUT": str(place.out), "CHAOS_COUNT": str(place.dir / "calls")})
        attempt = Attempt(launch, [], 1, self.work)
        try:
            end = attempt.run()
            if end == "refused" and IMPOSSIBLE.search(attempt.said()):
                raise Refused(attempt.tail())
            require(end == "finished", "it does not finish", attempt.tail())
            place.check_no_leftovers()
            verify.check_alone(place.out, s.ranks(), self.plain(s), set())
        except Failure as e:
            place.close(keep=True)
            raise Failure("undisturbed: " + e.kind, f"{e}; {place.dir}") from None
        calls = {}
        for path in place.dir.glob("calls.*"):
            calls[int(path.suffix[1:])] = {name: int(n) for name, n in (line.split() for line in path.read_text().splitlines())}
        step = verify.read_state(verify.latest(place.out))["step"]
        for folder in verify.checkpoints(place.out).values():
            if folder.name != "step_%08d" % step:
                shutil.rmtree(folder)
        return place.out, attempt.seconds, step, calls

    @staticmethod
    def plain(s):
        return not any(s.has(n) for n in ("skip-batches", "skip-iterations", "rollback"))

    # ---- one disturbed run ----
    def case(self, seed, leave_out=(), only=(), keep=False):
        return Case(self, seed, leave_out, only).run(keep)


class Case:
    def __init__(self, chaos, seed, leave_out, only):
        self.chaos, self.seed = chaos, seed
        self.s = scenario.draw(seed, list(chaos.programs), leave_out)
        self.leave_out, self.only = leave_out, only
        self.tried, self.plan, self.lost = [], [], 0
        self.outcome, self.failure, self.place, self.refusal = "", None, None, ""

    def run(self, keep):
        start = time.monotonic()
        try:
            self.outcome = self.go()
        except Refused as e:
            self.outcome, self.refusal = "refused", str(e)
        except Failure as e:
            self.outcome, self.failure = "FAILED", e
        finally:
            if self.place:
                self.place.close(keep=keep and self.failure is not None)
        self.seconds = time.monotonic() - start
        return self

    def go(self):
        s, chaos = self.s, self.chaos
        self.reference, typical, self.final_step, calls = chaos.reference(s)
        self.plan, before = faults.draw(self.seed, s, self.final_step, chaos.tools, self.leave_out, self.only)
        small_disk = any(isinstance(f, faults.DiskFull) for attempt in self.plan for f in attempt)
        self.place = place = chaos.place(calls, small_disk)
        for f in before:
            f.before(place)
            self.tried.append(f)
        for chosen in self.plan:
            self.attempt([f for f in chosen if f.when == "during"], typical)
            for f in chosen:
                if f.when == "between":
                    f.between(place)
                    self.tried.append(f)
        layout, elsewhere = s.other if place.other_layout else None, False
        for _ in range(6):
            end = self.attempt([], typical, layout)
            elsewhere = layout is not None and (elsewhere or "the run is finished:" not in self.last.said())
            if end == "finished":
                outcome = self.check_the_end(layout, elsewhere)
                return "refused" if self.refusal else outcome
            steps = verify.checkpoints(place.out)
            if steps and not verify.intact_steps(place.out) and not (place.obstacles and "intact" not in self.last.said()):
                require("intact" in self.last.said(), "no checkpoint is intact, and the refusal does not say so", self.last.tail())
                self.refusal = self.last.tail()
                place.remove_checkpoints()  # as the hint says
                continue
            require(place.obstacles, "a resume that nothing disturbs does not finish", f"{end}: {self.last.tail()}")
            place.clear_obstacles()
        raise Failure("six resumes do not finish the run", self.last.tail())

    def attempt(self, chosen, typical, layout=None):
        place, s = self.place, self.s
        earlier = verify.read_log(place.out / "log.jsonl")
        before = verify.announced_steps(earlier)
        intact = verify.intact_steps(place.out)
        announced = [step for step in before if step in intact]
        launch = self.chaos.launch(place, s, self.chaos.programs[s.build], ["--resume", "auto"], layout)
        self.tried += chosen
        self.last = attempt = Attempt(launch, chosen, typical, self.chaos.work)
        attempt.may_be_refused |= bool(verify.checkpoints(place.out)) and not intact
        end = attempt.run()
        records = verify.read_log(place.out / "log.jsonl")
        resumed = verify.events_of(records, "resume")
        if resumed and not chosen and end != "refused" and "the run is finished:" not in attempt.said():
            step = int(re.search(r"step_(\d+)$", resumed[-1]["message"])[1])
            if announced and "latest" not in place.touched:
                require(step >= max(announced), "training goes on from an older checkpoint than it could", f"{step}, not {max(announced)}")
            self.lost += max(0, max(before, default=0) - step)
        logged = [r["step"] for r in records if r.get("kind") == "step"]
        begun = resumed[-1]["message"].rsplit("step_", 1)[1] if resumed else 0
        for f in chosen if "log" not in place.touched and records != earlier else []:
            f.judge(attempt, end, int(begun) + 1, max(logged, default=0))
        now = verify.announced_steps(records) if "log" not in place.touched else set()
        place.check_after(end, now, self.final_step)
        if end == "finished" and not any(f.refuses for f in chosen):
            place.check_no_leftovers()
        return end

    def check_the_end(self, layout, elsewhere):
        place, s = self.place, self.s
        log_is_whole = "log" not in place.touched
        verify.check_alone(place.out, s.ranks(layout), self.chaos.plain(s), place.touched)
        target = verify.latest(place.out) if place.damaged else place.out
        inspected = subprocess.run([self.chaos.programs[s.build], "inspect", target], capture_output=True, text=True)
        require(inspected.returncode == 0, "inspect finds fault with the finished run", (inspected.stdout + inspected.stderr)[-400:])
        signalled = any(isinstance(f, (faults.Signals, faults.ExitAfter)) for f in self.tried)
        if elsewhere:
            verify.compare_logs(place.out, self.reference, log_is_whole, TOLERANCE)
            return "near"
        verify.compare(place.out, self.reference, log_is_whole, signalled)
        return "recomputed" if self.lost and place.damaged else "same bits"

    def names(self):
        """Names that can be excluded from it."""
        return list(dict.fromkeys([f.name() for f in self.tried] + [f.name() for a in self.plan for f in a] + self.s.names()))


# ---- a failure -----------------------------------------------------------------------------------------------------------------
def command_of(chaos, case, leave_out, only):
    words = [f"CHAOS_SEED={case.seed} CHAOS_RUNS=1", f'CHAOS_BUILDS="{" ".join(chaos.programs)}"']
    words += [f'CHAOS_FAULTS="{" ".join(only)}"'] if only else []
    words += [f'CHAOS_LEAVE_OUT="{" ".join(leave_out)}"'] if leave_out else []
    return "make chaos " + " ".join(words)


def reduce(chaos, failed, leave_out, only, seconds):
    """Excludes faults and features one by one while the same failure occurs. Returns the excluded names, how often the rest
    fails, and in how many tries."""
    until = time.monotonic() + seconds
    kind = failed.failure.kind
    if "hangs" in kind:
        chaos.deadline = 30

    def fails(names, tries):
        for _ in range(tries):
            if time.monotonic() > until:
                return False
            case = chaos.case(failed.seed, names, only)
            if case.failure and case.failure.kind == kind:
                return True
        return False

    names = list(leave_out)
    for candidate in failed.names():
        if candidate not in names and fails(names + [candidate], 3):
            names.append(candidate)
    tries = again = 0
    while tries < 5 and (tries == 0 or time.monotonic() < until):
        case = chaos.case(failed.seed, names, only)
        tries, again = tries + 1, again + bool(case.failure and case.failure.kind == kind)
    chaos.deadline = None
    return names, again, tries


# ---- a campaign ----------------------------------------------------------------------------------------------------------------
OUTCOMES = ["same bits", "near", "recomputed", "refused", "FAILED"]


def report(number, case):
    names = ", ".join(dict.fromkeys(f.name() for f in case.tried)) or "no fault"
    wrapped = textwrap.wrap(f"{number:4} seed {case.seed}: {case.s.text()}: {names}", 60, subsequent_indent=" " * 8)
    for line in wrapped[:-1]:
        print(line)
    print(f"{wrapped[-1]:60} {case.outcome:>11} {case.seconds:5.1f} s", flush=True)
    if case.refusal:
        print(textwrap.indent(textwrap.fill(case.refusal, 72), " " * 8))


def table(counts):
    print(f"\n{'fault':22}{'tried':>7}{'same bits':>11}{'near':>6}{'recomputed':>12}{'refused':>9}{'FAILED':>8}")
    for name in sorted(counts):
        c = counts[name]
        print(f"{name:22}{sum(c.values()):7}{c['same bits']:11}{c['near']:6}{c['recomputed']:12}{c['refused']:9}{c['FAILED']:8}")


def campaign(chaos, arguments):
    counts, outcomes = collections.defaultdict(collections.Counter), collections.Counter()
    failures = {}  # kind -> [command, number of times]
    start, number = time.monotonic(), 0
    while number < arguments.runs if arguments.runs else time.monotonic() - start < arguments.seconds:
        case = chaos.case(arguments.seed + number, arguments.leave_out, arguments.faults, keep=True)
        number += 1
        report(number, case)
        outcomes[case.outcome] += 1
        for name in {f.name() for f in case.tried} or {"no fault"}:
            counts[name][case.outcome] += 1
        if not case.failure:
            continue
        print(textwrap.fill(f"{case.failure}", 110, initial_indent="        ", subsequent_indent="        "))
        for f in case.tried:
            print(f"        fault: {f}")
        if case.place:
            print(f"        kept in {case.place.dir}")
        if case.failure.kind in failures:
            failures[case.failure.kind][1] += 1
            continue
        left_out, again, tries = reduce(chaos, case, arguments.leave_out, arguments.faults, arguments.reduce_seconds)
        command = command_of(chaos, case, left_out, arguments.faults)
        print(f"        repeats in {again} of {tries} tries:\n        {command}", flush=True)
        failures[case.failure.kind] = [command, 1]
        if len(failures) >= arguments.failures:
            break
    table(counts)
    minutes = (time.monotonic() - start) / 60
    print(f"\n{number} runs in {minutes:.1f} minutes: " + ", ".join(f"{outcomes[o]} {o}" for o in OUTCOMES if outcomes[o]))
    for kind, (command, times) in failures.items():
        print(f"FAILED: chaos: {kind}, in {times} of {number} runs: {command}")
    if not failures:
        print(f"ok: chaos: {number} runs clean")
    return not failures


def self_test(arguments):
    """A trainer broken in a known way must be detected; an unbroken one must pass."""
    expected = {
        "nothing": "",
        "user-file": "a file of the user's",
        "status-0": "status 0 without",
        "weights": "not whole under its final name",
        "weights-and-manifest": "other bits",
        "masters": "older checkpoint than it could",
        "nan": "not finite",
        "half-written": "not whole under its final name",
        "latest": "latest",
        "temporary": "temporary",
        "log-line": "the log has other steps",
        "log-twice": "twice",
        "tokens": "the log counts other tokens",
        "hang": "hangs",
        "segfault": "crashes",
        "abort": "crashes",
        "silent-error": "does not say why",
        "needless-error": "not convenient",
        "older": "older checkpoint",
    }
    bad = 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as work:
        os.chmod(work, 0o755)
        chaos = Chaos([arguments.programs[0]], work, deadline=20)
        name = next(iter(chaos.programs))
        os.environ["CHAOS_REAL"] = chaos.programs[name]
        chaos.programs[name] = str(HERE / "broken.py")
        for kind, words in expected.items():
            os.environ["CHAOS_BREAK"] = kind
            chaos.deadline = 5 if kind == "hang" else 60
            case = SelfTestCase(chaos, 1, (), ()).run(False)
            said = str(case.failure) if case.failure else ""
            good = bool(re.search(words, said)) if words else (not case.failure) == (kind == "nothing")
            bad += not good
            print(f"{'ok' if good else 'FAILED'}: chaos self-test: {kind}: {said[:100] or case.outcome}", flush=True)
    return bad == 0


class SelfTestCase(Case):
    """One rank, ten steps, one user file, no fault."""

    def __init__(self, chaos, *arguments):
        super().__init__(chaos, *arguments)
        self.s = scenario.Scenario("gpt2", next(iter(chaos.programs)), 1, {}, {})
        self.s.features["all"] = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 --data-path text --split 90,10,0 --eval-iters 1 --save-every 4 --keep 0".split()

    def go(self):
        self.reference, typical, self.final_step, calls = self.chaos.reference(self.s)
        self.place = self.chaos.place(calls)
        self.place.plant({"notes.txt": b"mine"})
        self.attempt([], typical)
        end = self.attempt([], typical)
        require(end == "finished", "a resume that nothing disturbs does not finish", self.last.tail())
        return self.check_the_end(None, False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--leave-out", type=str.split, default=[])
    parser.add_argument("--faults", type=str.split, default=[])
    parser.add_argument("--failures", type=int, default=3, help="end the campaign after so many kinds")
    parser.add_argument("--reduce-seconds", type=float, default=90, help="for reducing a failure")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name in arguments.leave_out + arguments.faults:
        known = [f.name() for f in faults.ALL] + list(scenario.CHANCES) + ["tp", "pp", "vpp", "dp", "no-sp", "zero-0"]
        if name not in known:
            parser.error(f"'{name}' is neither a fault nor a feature; they are: {' '.join(known)}")
    if arguments.self_test:
        return 0 if self_test(arguments) else 1
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1, 10**6) * 1000
    work = tempfile.mkdtemp(prefix="chaos-")
    os.chmod(work, 0o755)
    print(f"chaos: seed {arguments.seed}, in {work}")
    clean = False
    try:
        clean = campaign(Chaos(arguments.programs, work), arguments)
    finally:
        if clean:
            shutil.rmtree(work)
    return 0 if clean else 1


def in_own_mounts():
    """Restarts this program with private mounts that vanish with it, if permitted."""
    if os.geteuid() == 0 and "CHAOS_UNSHARED" not in os.environ and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0:
        os.environ["CHAOS_UNSHARED"] = "1"
        os.execvp("unshare", ["unshare", "-m", sys.executable, *sys.argv])


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    in_own_mounts()
    sys.exit(main())
