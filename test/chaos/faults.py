"""The faults. Each is a class; its docstring describes it. A fault is drawn with its own parameters and then either
changes how the trainer is started (prepare), occurs while it runs (strikes), or damages OUT between two starts (between);
lift() removes obstacles to the next start, as the user would.

  refuses          the run may end with an error that gives the reason
  signals          signals that may kill the trainer
  keeps_saves      no checkpoint can be lost or saved at another step, so a rollback finds the same ones
  possible(...)    "" or why it cannot be tried here
"""

import errno
import os
import random
import re
import shutil
import signal
import subprocess

import verify
from attempt import Moment, send


class Fault:
    refuses, keeps_saves, signals = False, False, ()
    when = "during"  # or between
    chance = 1.0

    def __init__(self, rng, scenario, steps):
        self.rng, self.ranks, self.steps = rng, scenario.ranks(), steps
        self.moment = Moment.draw(rng, steps)
        self.draw()

    @classmethod
    def name(cls):
        return re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    def __str__(self):
        return f"{self.name()} {self.detail()}".strip()

    @staticmethod
    def possible(scenario, tools):
        return ""

    def draw(self): ...
    def detail(self):
        return str(self.moment) if self.when == "during" else ""

    def prepare(self, launch, attempt): ...
    def strikes(self):
        return []

    def judge(self, attempt, end, first, last): ...  # trained the steps first to last

    def lift(self, place): ...
    def between(self, place): ...


# ---- processes ---------------------------------------------------------------------------------------------------------------
class Strike(Fault):
    """Occurs once, at its moment."""

    def strikes(self):
        return [(self.moment, self.strike)]


class KillRank(Strike):
    """kill -9 of one rank."""

    keeps_saves, signals, chance = True, (signal.SIGKILL,), 3

    def draw(self):
        self.rank = self.rng.randrange(self.ranks)

    def strike(self, attempt):
        ranks = attempt.ranks()
        if self.rank in ranks:
            send(ranks[self.rank], signal.SIGKILL)


class KillMpirun(Strike):
    """kill -9 of mpirun: its ranks must not survive."""

    keeps_saves, signals, refuses = True, (signal.SIGKILL,), True

    @staticmethod
    def possible(scenario, tools):
        return "" if scenario.ranks() > 1 else "one rank"

    def strike(self, attempt):
        attempt.mains[0].kill()


class KillAll(Strike):
    """kill -9 of everything, as in a machine crash."""

    keeps_saves, signals = True, (signal.SIGKILL,)

    def strike(self, attempt):
        for pid, _ in attempt.processes():
            send(pid, signal.SIGKILL)


class Pause(Strike):
    """SIGSTOP of a rank, or of all, and SIGCONT a little later."""

    keeps_saves = True

    def draw(self):
        self.seconds, self.all, self.rank = self.rng.uniform(0.02, 1.0), self.rng.random() < 0.3, self.rng.randrange(self.ranks)

    def strike(self, attempt):
        pids = [pid for rank, pid in attempt.ranks().items() if self.all or rank == self.rank]
        for pid in pids:
            send(pid, signal.SIGSTOP)
        attempt.later(self.seconds, lambda _: [send(pid, signal.SIGCONT) for pid in pids])


class Freeze(Strike):
    """A rank stops forever while it trains: the others must report it and exit. (Earlier, MPI waits for it without limit.)"""

    refuses, signals, keeps_saves, chance = True, (signal.SIGKILL,), True, 0.5

    @staticmethod
    def possible(scenario, tools):
        return "" if scenario.ranks() > 1 else "one rank"

    def draw(self):
        self.rank, self.moment = self.rng.randrange(self.ranks), Moment("step", self.rng.randint(1, self.steps), self.rng.uniform(0, 0.01))

    def prepare(self, launch, attempt):
        launch.options = launch.options + ["--distributed-timeout", "3s"]

    def strike(self, attempt):
        pid = attempt.ranks().get(self.rank)
        if pid:
            send(pid, signal.SIGSTOP)


class SlowRank(Strike):
    """A rank that gets little CPU time for a while: stopped again and again."""

    keeps_saves = True

    def draw(self):
        self.rank, self.times = self.rng.randrange(self.ranks), self.rng.randint(5, 40)

    def strike(self, attempt):
        pid = attempt.ranks().get(self.rank)
        for i in range(self.times if pid else 0):
            attempt.later(0.02 * i, lambda _: send(pid, signal.SIGSTOP))
            attempt.later(0.02 * i + 0.015, lambda _: send(pid, signal.SIGCONT))


class Nice(Fault):
    """One rank or all at the lowest priority."""

    keeps_saves, chance = True, 0.3

    def prepare(self, launch, attempt):
        launch.prefix = ["nice", "-n", "19"] + launch.prefix


class Signals(Strike):
    """Bursts of the signals of schedulers and terminals: SIGINT, SIGTERM (repeated), SIGUSR1, SIGHUP."""

    chance, refuses = 3, True

    def draw(self):
        kinds = [[signal.SIGINT], [signal.SIGTERM] * self.rng.randint(1, 4), [signal.SIGUSR1] * self.rng.randint(1, 3), [signal.SIGHUP],
                 [signal.SIGHUP, signal.SIGTERM], [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM], [signal.SIGTERM, signal.SIGUSR1]]  # fmt: skip
        self.burst = [(s, self.rng.choice([0, 0.001, 0.02, 0.2])) for s in self.rng.choice(kinds)]
        self.to = self.rng.choice(["main", "rank", "all ranks"])
        self.rank = self.rng.randrange(self.ranks)
        self.signals = tuple(s for s, _ in self.burst) + ((signal.SIGKILL, signal.SIGTERM) if self.ranks > 1 else ())

    def detail(self):
        return " ".join(s.name for s, _ in self.burst) + f" to {self.to} {self.moment}"

    def strike(self, attempt):
        ranks = attempt.ranks()
        pids = [attempt.mains[0].pid] if self.to == "main" else [ranks[self.rank]] if self.to == "rank" and self.rank in ranks else list(ranks.values())
        wait = 0
        for number, gap in self.burst:
            attempt.later(wait, lambda _, n=number: [send(pid, n) for pid in pids])
            wait += gap


class ExitAfter(Fault):
    """--exit-after a short time."""

    def draw(self):
        self.seconds = round(self.rng.uniform(0.005, 0.3), 3)

    def detail(self):
        return f"{self.seconds} s"

    def prepare(self, launch, attempt):
        launch.options = launch.options + ["--exit-after", f"{self.seconds}s"]


class TwoStarters(Strike):
    """A second start in the same folder, at once or later, sometimes with slow locking: one of them must exit."""

    refuses, chance = True, 1.5

    @staticmethod
    def possible(scenario, tools):
        return "the emulator is slow" if scenario.build.startswith("emu") else ""

    def draw(self):
        self.offset = Moment("after", self.rng.choice([0, self.rng.uniform(0, 1)]))
        self.slow_lock = self.rng.choice([0, 0, 0.1, 1])  # seconds

    def detail(self):
        return f"{self.offset}" + (f", whose lock takes {self.slow_lock} s" if self.slow_lock else "")

    def strikes(self):
        return [(self.offset, self.strike)]

    def strike(self, attempt):
        if self.slow_lock and attempt.place.shim:
            attempt.launch.environment.update({"LD_PRELOAD": attempt.place.shim, "CHAOS_OUT": str(attempt.place.out),
                                               "CHAOS_SLOW": f"flock {int(1e6 * self.slow_lock)}"})  # fmt: skip
        attempt.start_one()


# ---- standard output ---------------------------------------------------------------------------------------------------------
class Output(Fault):
    """Standard output is closed, full, or a pipe whose reader has exited; standard input and error may be closed as well."""

    refuses = False

    @staticmethod
    def possible(scenario, tools):
        return "" if scenario.ranks() == 1 else "mpirun stands between"

    def draw(self):
        self.way = self.rng.choice(["head -1", ">&-", "<&- >&-", "<&- >&- 2>&-", ">/dev/full"])
        self.signals = (signal.SIGPIPE,) if self.way == "head -1" else ()

    def detail(self):
        return self.way

    def prepare(self, launch, attempt):
        if self.way == "head -1":
            launch.head = True
        else:
            launch.shell = self.way


# ---- disk --------------------------------------------------------------------------------------------------------------------
class DiskFull(Strike):
    """OUT is on a small disk of its own, which is filled, and freed some time later."""

    refuses, chance = True, 1.5

    @staticmethod
    def possible(scenario, tools):
        return "" if tools.get("mount") else "mount is not allowed"

    def draw(self):
        self.left = self.rng.choice([0, self.rng.randrange(4 << 10), self.rng.randrange(1 << 20)]) // 4096 * 4096
        self.seconds = self.rng.choice([0.01, 0.1, 0.3, None])

    def detail(self):
        return f"{self.left >> 10} KiB left, for " + (f"{self.seconds} s" if self.seconds else "the attempt") + f" {self.moment}"

    def prepare(self, launch, attempt):
        launch.place.touched |= {"log"}

    def strike(self, attempt):
        attempt.place.fill(self.left)
        if self.seconds:
            attempt.later(self.seconds, lambda a: a.place.free())

    def lift(self, place):
        place.free()


class ReadOnly(Strike):
    """OUT becomes read-only for a while, by a mount."""

    refuses = True

    @staticmethod
    def possible(scenario, tools):
        return "" if tools.get("mount") else "mount is not allowed"

    def draw(self):
        self.seconds = self.rng.choice([0.02, 0.2, None])

    def prepare(self, launch, attempt):
        launch.place.touched |= {"log"}

    def strike(self, attempt):
        attempt.place.make_read_only()
        if self.seconds:
            attempt.later(self.seconds, lambda a: a.place.make_writable())

    def lift(self, place):
        place.make_writable()


class NotMine(Fault):
    """Started by a user who may not write to OUT."""

    refuses, chance = True, 0.4

    @staticmethod
    def possible(scenario, tools):
        if scenario.ranks() > 1:
            return "several ranks"
        return "" if tools.get("setpriv") else "setpriv is not there, or this is not root"

    def prepare(self, launch, attempt):
        launch.prefix = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"] + launch.prefix


class Limit(Fault):
    """Too little memory, too few descriptors, or a limit on file sizes: the run must report whichever it hits."""

    refuses, chance = True, 1.5

    def draw(self):
        self.kind = self.rng.choice(["as", "nofile", "fsize"] if self.ranks == 1 else ["nofile"])
        self.value = {"as": self.rng.randrange(20 << 20, 400 << 20), "nofile": self.rng.randint(4, 14) if self.ranks == 1 else self.rng.randint(24, 40),
                      "fsize": self.rng.randrange(1000, 200000)}[self.kind]  # fmt: skip
        self.signals = (signal.SIGXFSZ,) if self.kind == "fsize" else ()

    def detail(self):
        return f"{self.kind}={self.value}"

    def prepare(self, launch, attempt):
        launch.place.touched |= {"log"} if self.kind == "fsize" else set()
        launch.prefix = launch.prefix + ["prlimit", f"--{self.kind}={self.value}:{self.value}"]
        if self.ranks > 1:
            self.signals = attempt.signals = attempt.signals | {signal.SIGKILL, signal.SIGTERM}


class Shim(Fault):
    """A fault of the shim at a chosen call."""

    variable = ""

    @staticmethod
    def possible(scenario, tools):
        return "" if tools.get("shim") else "there is no C compiler"

    def draw(self):
        self.rank = self.rng.randrange(self.ranks) if self.rng.random() < 0.3 else 0
        self.call = self.rng.choices(["open", "write", "pwrite", "ftruncate", "fsync", "rename", "unlink", "symlink", "mkdir", "any"],
                                     [3, 3, 2, 1, 3, 4, 1, 2, 2, 2])[0]  # fmt: skip
        self.part = self.rng.random()

    def prepare(self, launch, attempt):
        counts = attempt.place.calls.get(self.rank, {})
        launch.environment.update({"LD_PRELOAD": attempt.place.shim, "CHAOS_OUT": str(launch.place.out), "CHAOS_ONLY_RANK": str(self.rank)})
        self.at = 1 + int(self.part * counts.get(self.call, 10))
        launch.environment[self.variable] = self.value()

    def detail(self):
        return getattr(self, "at", None) and self.value() or self.call


class DieAtCall(Shim):
    """kill -9 just before the n-th open, write, rename ... of a file in OUT."""

    keeps_saves, signals, variable, chance = True, (signal.SIGKILL,), "CHAOS_DIE", 3

    def value(self):
        return f"{self.call} {self.at}"


class FailAtCall(Shim):
    """The n-th such call fails, or several in a row: disk full, input/output error, quota, interrupted, too many files."""

    refuses, variable, chance = True, "CHAOS_FAIL", 2.5

    def draw(self):
        super().draw()
        self.error, self.times = self.rng.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE, errno.ESTALE, errno.EXDEV]), self.rng.choice([1, 1, 3, 1000000])

    def prepare(self, launch, attempt):
        super().prepare(launch, attempt)
        launch.place.touched |= {"log", "leftovers"}

    def value(self):
        return f"{self.call} {self.at} {self.error} {self.times}"


class LostWrite(Shim):
    """A write into a checkpoint reports success and is lost: the save must be repeated."""

    keeps_saves, variable, chance = True, "CHAOS_LOSE", 2

    def draw(self):
        super().draw()
        self.call = self.rng.choice(["pwrite", "pwrite", "write"])

    def prepare(self, launch, attempt):
        super().prepare(launch, attempt)
        launch.environment["CHAOS_PART"] = ".step_"

    def value(self):
        return f"{self.call} {self.at}"


class WrongWrite(LostWrite):
    """A write into a checkpoint writes one wrong bit."""

    variable = "CHAOS_WRONG"


class ReadFails(Shim):
    """Reading fails with an input/output error or a stale handle: once, or for a second."""

    refuses, keeps_saves, variable, chance = True, True, "CHAOS_FAIL", 2

    def draw(self):
        super().draw()
        self.call, self.error, self.times = self.rng.choice(["pread", "pread", "stat"]), self.rng.choice([errno.EIO, errno.ESTALE]), self.rng.choice([1, 1, 4])

    def value(self):
        return f"{self.call} {self.at} {self.error} {self.times}"


class OddFileSystem(Shim):
    """No symbolic links (latest is a file then), no locks, locks that do nothing, or no fsync, as of some file systems."""

    keeps_saves = True

    def draw(self):
        super().draw()
        lacks = [("CHAOS_FAIL", f"symlink 1 {errno.EPERM} 1000000"), ("CHAOS_FAIL", f"flock 1 {errno.ENOLCK} 1000000"),
                 ("CHAOS_NOTHING", "flock"), ("CHAOS_FAIL", f"fsync 1 {errno.EINVAL} 1000000")]  # fmt: skip
        self.variable, self.lack = self.rng.choice(lacks)

    def value(self):
        return self.lack


class SlowFiles(Shim):
    """Each such call takes some milliseconds longer."""

    keeps_saves, variable = True, "CHAOS_SLOW"

    def draw(self):
        super().draw()
        self.call, self.us = self.rng.choice([("fsync", 3000), ("rename", 5000), ("write", 2000), ("open", 1000)])

    def value(self):
        return f"{self.call} {self.us}"


class ClockJump(Shim):
    """The time of day jumps, by seconds or years, in either direction."""

    keeps_saves, variable = True, "CHAOS_CLOCK"

    def draw(self):
        super().draw()
        self.shift = self.rng.choice([-1, 1]) * self.rng.choice([2, 3600, 86400 * 400, 86400 * 365 * 60])

    def value(self):
        return f"{self.part * 0.4:.3f} {self.shift}"


# ---- machines that compute incorrectly (llmc/run/faults.h) -------------------------------------------------------------------
class WrongMachine(Fault):
    refuses, said = True, ""

    @staticmethod
    def possible(scenario, tools):
        other = {"skip-batches", "skip-iterations", "nan-gradient", "rollback"} & set(scenario.features)
        return "the scenario counts batches in another way" if other else ""

    def draw(self):
        self.rank, self.step = self.rng.randrange(self.ranks), self.rng.randint(1, self.steps)

    def detail(self):
        return f"at step {self.step} on rank {self.rank}"

    def judge(self, attempt, end, first, last):
        if first <= self.step <= last and end != "killed":
            verify.require(self.said in attempt.said(), "a machine that computes wrong is not found out", f"{self}: {attempt.tail()}")


class FlipWeight(WrongMachine):
    """A bit of a weight flips on one of the replicas; --check-replicas compares them after every step."""

    chance, said = 2, "has other bits on rank"

    @staticmethod
    def possible(scenario, tools):
        return WrongMachine.possible(scenario, tools) or ("" if "zero-0" in scenario.layout else "no weight is kept twice")

    def prepare(self, launch, attempt):
        launch.environment["TRAIN_GPT_FAULTS"] = f"flip-weight={self.step}:{self.rank}"
        launch.options = launch.options + ["--check-replicas", "1"]


class FlakyGradient(WrongMachine):
    """The last bit of a gradient is wrong once; --detect-nondeterminism computes each gradient twice."""

    chance, said = 0.5, "has different bits when recomputed"

    def prepare(self, launch, attempt):
        launch.environment["TRAIN_GPT_FAULTS"] = f"flaky-gradient={self.step}:{self.rank}"
        launch.options = launch.options + ["--detect-nondeterminism", "1"]


# ---- deleted or replaced files -----------------------------------------------------------------------------------------------
TARGETS = {"OUT": 1, "log.jsonl": 2, "latest": 2, "report.html": 1, "checkpoint": 2, "a file of a checkpoint": 2, ".lock": 1, ".ranks": 0.5}
TOUCHES = {"OUT": {"OUT", "log", "report", "latest", "checkpoints"}, "log.jsonl": {"log"}, "latest": {"latest"}, "checkpoint": {"checkpoints", "latest"},
           "a file of a checkpoint": {"checkpoints"}, "report.html": {"report"}}  # fmt: skip


class Remove(Strike):
    """Something in OUT is deleted, or OUT itself."""

    refuses = True

    def draw(self):
        self.target, self.pick = self.rng.choices(list(TARGETS), list(TARGETS.values()))[0], random.Random(self.rng.random())

    def detail(self):
        return self.target + (f" {self.moment}" if self.when == "during" else "")

    def find(self, place):
        if self.target == "OUT":
            return place.out
        if "checkpoint" not in self.target:
            return place.out / self.target
        folders = sorted(verify.checkpoints(place.out).values())
        if not folders:
            return None
        folder = folders[-1] if self.pick.random() < 0.6 else self.pick.choice(folders)
        place.damaged.add(folder.name)
        if self.target == "checkpoint":
            return folder
        return self.pick.choice(sorted(p for p in folder.rglob("*") if p.is_file()) or [None])

    def act(self, place, path):
        subprocess.run(["rm", "-rf", str(path)], stderr=subprocess.DEVNULL)

    def happen(self, place):
        path = self.find(place)
        if not path or (self.target != "OUT" and not os.path.lexists(path)):
            return
        place.touched |= TOUCHES.get(self.target, set())
        if self.target == "OUT":
            place.planted.clear()
        self.act(place, path)

    def strike(self, attempt):
        self.happen(attempt.place)

    def between(self, place):
        self.happen(place)


class RemoveBetween(Remove):
    """The same between two starts."""

    when = "between"


class Replace(Remove):
    """Something in OUT is replaced by a folder, a dangling link, an empty file or garbage."""

    def draw(self):
        super().draw()
        if self.target == "OUT":
            self.target = "latest"
        self.by = self.rng.choice(["folder", "link", "empty file", "garbage"])

    def detail(self):
        return f"{self.target} by {self.by}" + (f" {self.moment}" if self.when == "during" else "")

    def act(self, place, path):
        super().act(place, path)
        place.obstacles.append(path)
        try:
            if self.by == "folder":
                path.mkdir()
                (path / "inside").write_text("of the user")
            elif self.by == "link":
                path.symlink_to("/nowhere/at/all")
            else:
                path.write_bytes(b"" if self.by == "empty file" else self.pick.randbytes(3000))
        except OSError:
            pass  # the trainer was faster


class ReplaceBetween(Replace):
    """The same between two starts."""

    when = "between"


# ---- between two starts ------------------------------------------------------------------------------------------------------
class Damage(Fault):
    """One file of the newest checkpoint, or of several, changes between two starts."""

    when = "between"

    def draw(self):
        self.which, self.pick = self.rng.choices(["newest", "any", "all"], [6, 3, 1])[0], random.Random(self.rng.random())

    def detail(self):
        return f"in {self.which}"

    def between(self, place):
        folders = sorted(verify.checkpoints(place.out).values())
        if not folders:
            return
        place.touched |= {"checkpoints"}
        for folder in folders if self.which == "all" else folders[-1:] if self.which == "newest" else [self.pick.choice(folders)]:
            files = sorted(p for p in folder.rglob("*") if p.is_file())
            if files:
                place.damaged.add(folder.name)
                self.spoil(self.pick.choice(files))


class FlipBit(Damage):
    """One bit of one file of a checkpoint, manifest and state included."""

    chance = 2

    def spoil(self, path):
        data = bytearray(path.read_bytes())
        if data:
            data[self.pick.randrange(len(data))] ^= 1 << self.pick.randrange(8)
            path.write_bytes(data)


class Truncate(Damage):
    """A file of a checkpoint is truncated or extended."""

    def spoil(self, path):
        data = path.read_bytes()
        path.write_bytes(data + b"x" * 7 if self.pick.random() < 0.2 else data[: self.pick.randrange(max(1, len(data)))])


class InMemory(Fault):
    """Of snapshots in the memory of nodes."""

    when = "between"

    @staticmethod
    def possible(scenario, tools):
        return "" if scenario.has("snapshots") else "no snapshots"

    def draw(self):
        self.number = self.rng.randrange(1000)

    def files(self, place):
        return sorted(p for p in place.memory.rglob("*") if p.is_file() and p.name != "run")


class LoseNode(InMemory):
    """A node is lost with its memory; another takes its place, or its ranks move to the node that is left."""

    chance = 3

    def between(self, place):
        lost = self.number % 2
        shutil.rmtree(place.memory / place.nodes[lost], ignore_errors=True)
        place.nodes[lost] = place.nodes[1 - lost] if self.number % 3 == 0 else f"c{self.number}"
        place.forgets_memory = True


class FlipBitInMemory(InMemory):
    """One bit flips in the memory that a node has of a snapshot."""

    def between(self, place):
        files = self.files(place)
        if files:
            path = files[self.number % len(files)]
            data = bytearray(path.read_bytes())
            if data:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                path.write_bytes(data)


class HalfLine(Fault):
    """The log ends with half a line, or has a line that is not a record."""

    when = "between"

    def draw(self):
        self.text = self.rng.choice([b'{"kind":"step","step":3,"lo', b"\x00" * 700, b"[]\n", b"12\n", b'{"kind":5,"step":"x"}\n', b"\xff\xfe{}\n"])

    def detail(self):
        return repr(self.text[:24])

    def between(self, place):
        try:
            with open(place.out / "log.jsonl", "ab") as f:
                f.write(self.text)
            place.touched |= {"log"}
        except OSError:
            pass


class Copy(Fault):
    """The run is copied with cp -rL, following links, and continues in the copy."""

    when = "between"

    def between(self, place):
        copy = place.out.with_name(place.out.name + "-copy")
        if copy.exists() or not place.out.is_dir():
            return
        subprocess.run(["cp", "-rL", str(place.out), str(copy)], stderr=subprocess.DEVNULL)
        shutil.rmtree(place.out)
        place.out = copy
        place.forgets_memory = True
        place.touched |= {"latest"}


class OtherLayout(Fault):
    """Resumes on another number of ranks; compared within a tolerance."""

    when, chance = "between", 1.5

    @staticmethod
    def possible(scenario, tools):
        left_out = {"fp8", "nan-gradient", "rollback", "check-replicas"}
        if left_out & set(scenario.features) or scenario.build.startswith("emu"):
            return "its numbers depend on the layout"
        return "" if scenario.other != scenario.layout else "the same layout"

    def between(self, place):
        place.other_layout = place.forgets_memory = True  # of a node that it does not use


class UserFiles(Fault):
    """The user's own files are in OUT, under names much like the trainer's: they must stay."""

    when, keeps_saves, chance = "before", True, 3

    def before(self, place):
        place.plant({"notes.txt": b"mine", "notes.tmp.txt": b"1", "my.tmp.notes": b"22", ".step_mine": b"333", "data.tmp.1/inside": b"4444",
                    "step_mine": b"5", "step_00000004.txt": b"6", "report.html.tmp.old": b"7", "log.jsonl.bak": b"8"})  # fmt: skip


ALL = [KillRank, KillMpirun, KillAll, Pause, Freeze, SlowRank, Nice, Signals, ExitAfter, TwoStarters, Output, DiskFull, ReadOnly, NotMine,
       Limit, DieAtCall, FailAtCall, LostWrite, WrongWrite, ReadFails, OddFileSystem, SlowFiles, ClockJump, Remove, RemoveBetween, Replace, ReplaceBetween, FlipBit, Truncate, LoseNode, FlipBitInMemory, HalfLine, Copy,
       OtherLayout, UserFiles, FlipWeight, FlakyGradient]  # fmt: skip
ALONE = {DiskFull, ReadOnly, TwoStarters, NotMine, Freeze, FlipWeight, FlakyGradient}  # at most one of these per attempt


def draw(seed, scenario, steps, tools, leave_out, only):
    """[[faults of a start, ...], [faults before all]]: two or three starts, each with some faults during and after it."""
    r = random.Random(f"{seed} faults")
    plan, before = [], []
    usable = []
    for kind in ALL:
        if only and kind.name() not in only:
            continue
        if (kind.keeps_saves or not scenario.has("rollback")) and not kind.possible(scenario, tools):  # rollback needs every checkpoint
            usable.append(kind)
    during, after = [k for k in usable if k.when == "during"], [k for k in usable if k.when == "between"]
    if UserFiles in usable and r.random() < 0.5:
        before.append(UserFiles(random.Random(f"{seed} user"), scenario, steps))
    for i in range(r.choices([1, 2, 3], [0.35, 0.45, 0.2])[0]):
        chosen = []
        for kinds, chance in ((during, (0.1, 0.6, 0.3)), (after, (0.5, 0.4, 0.1))):
            if not kinds:
                continue
            for _ in range(r.choices([0, 1, 2], chance)[0]):
                kind = r.choices(kinds, [k.chance for k in kinds])[0]
                clash = any(type(c) is kind or (isinstance(c, Shim) and issubclass(kind, Shim)) or (type(c) in ALONE and kind in ALONE) for c in chosen)
                if not clash:
                    chosen.append(kind(random.Random(f"{seed} {i} {kind.name()}"), scenario, steps))
        plan.append([c for c in chosen if c.name() not in leave_out])
    return plan, [b for b in before if b.name() not in leave_out]
