"""One start of the trainer: its processes, faults and their times, and how it ended.

Launch    how it will be started; faults may change this first
Moment    when a fault occurs: some time after the start, at a step, or in the middle of saving
Attempt   starts it, triggers the faults, waits for the end of every process, and returns how it ended
"""

import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import verify
from verify import Failure, require

# Lets Open MPI run as root, with more ranks than cores, and where processes may not read each other's memory (see
# test/lib.sh).
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
       "OMPI_MCA_btl": "self,vader", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}  # fmt: skip
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "ASAN_OPTIONS": "detect_leaks=0", "EMU_DEVICES": "4"}
CRASHES = re.compile(r"internal check failed|terminate called|bad_alloc|Segmentation fault|signal 11|signal 6 \(|signal 7 \(|core dumped"
                     r"|double free|malloc\(\)|free\(\):|stack smashing|runtime error:|Sanitizer|Assertion .* failed|pure virtual")  # fmt: skip
ERROR = re.compile(r"^(error: |error on rank |.*: error while loading shared libraries: )", re.MULTILINE)
ASK_TO_STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}  # only a second SIGINT ends a run at once
# mpirun (Open MPI 4.1.4) itself crashes if it gets a signal while a rank's death ends the job.
LAUNCHER_CRASH = re.compile(r"\*\*\* Process received signal \*\*\*(?:(?!\*\*\* End of error).)*?\] mpirun\(.*?\*\*\* End of error message \*\*\*", re.DOTALL)
OWN_CRASH = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


@dataclass
class Launch:
    place: object
    program: str
    ranks: int
    options: list
    environment: dict = field(default_factory=dict)  # only for the trainer
    prefix: list = field(default_factory=list)  # prlimit, setpriv, nice: before the trainer
    shell: str = ""  # redirections: '>&-'
    head: bool = False  # standard output goes to a reader that exits after the first line
    deadline: float = 120

    def command(self):
        words = [f"{k}={v}" for k, v in self.environment.items()] + self.prefix
        if self.shell:
            words += ["sh", "-c", f'exec "$@" {self.shell}', "sh"]
        words = (["env"] if words else []) + words + [self.program, "train"] + self.options + ["--out", str(self.place.out)]
        if "--snapshot-every" in self.options:
            words += ["--snapshot-directory", str(self.place.memory)]
            # On two nodes, or one if the other is lost and not replaced.
            half, each = str(self.ranks // 2), [["env", f"TRAIN_GPT_TEST_NODE={node}", *words] for node in self.place.nodes]
            return each[0] if self.ranks == 1 else ["mpirun", "-n", half, *each[0], ":", "-n", half, *each[1]]
        return words if self.ranks == 1 else ["mpirun", "-n", str(self.ranks)] + words


@dataclass
class Moment:
    """after: as a fraction of an undisturbed run's time; step: when the log has that step; saving: when that save starts."""

    kind: str
    value: float
    delay: float = 0

    @staticmethod
    def draw(rng, steps):
        kind = rng.choices(["after", "step", "saving"], [0.3, 0.4, 0.3])[0]
        if kind == "after":
            return Moment(kind, rng.uniform(0, 1.1))
        if kind == "step":
            return Moment(kind, rng.randint(1, steps), rng.uniform(0, 0.01))
        return Moment(kind, rng.randint(1, 4), rng.uniform(0, 0.008))

    def __str__(self):
        return {"after": f"after {self.value:.2f} of a run", "step": f"at step {self.value:.0f}", "saving": f"in save {self.value:.0f}"}[self.kind]


def processes(token):
    """[(pid, rank or None for others, such as mpirun)] of live processes with the token."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
            if token.encode() in environment and Path("/proc", entry, "stat").read_text().rsplit(") ", 1)[1][0] not in "ZX":
                rank = re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)", environment)
                found.append((int(entry), int(rank[1]) if rank else None))
        except OSError:
            pass
    return sorted(found)


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Attempt:
    counter = 0

    def __init__(self, launch, faults, typical_seconds, work):
        Attempt.counter += 1
        self.launch, self.place, self.faults = launch, launch.place, faults
        self.token = f"CHAOS_TOKEN={os.getpid()}.{Attempt.counter}."
        self.typical_seconds, self.work = typical_seconds, work
        self.mains, self.agenda = [], []
        self.signals = set()  # sent to it, or possible causes of its death
        self.may_be_refused = any(f.refuses for f in faults)
        for f in faults:
            f.prepare(launch, self)
            self.signals |= set(f.signals)
            for moment, action in f.strikes():
                self.agenda.append((moment, action))
        stem = f"attempt-{len(list(self.place.dir.glob('attempt-*.sh'))) + 1}"
        self.stdout, self.stderr = self.place.dir / f"{stem}.out", self.place.dir / f"{stem}.err"
        script = self.place.dir / f"{stem}.sh"
        script.write_text("# " + "; ".join(map(str, faults)) + "\n" + " ".join(map(_quoted, launch.command())) + "\n")

    def start_one(self):
        """Starts the trainer; a fault may call this a second time."""
        name, value = self.token.split("=")
        environment = {**os.environ, **MPI, **QUIET_THREADS, name: value}
        with open(self.stderr, "ab") as err, open(self.stdout, "ab") as out:
            if self.launch.head:
                reader = subprocess.Popen(["head", "-n", "1"], stdin=subprocess.PIPE, stdout=out)
                out = reader.stdin
            self.mains.append(subprocess.Popen(self.launch.command(), cwd=self.work, env=environment, stdin=subprocess.DEVNULL,
                                               stdout=out, stderr=err, start_new_session=True))  # fmt: skip
            if self.launch.head:
                reader.stdin.close()

    # ---- for faults ----
    def processes(self):
        return processes(self.token)

    def ranks(self):
        """{rank: pid}; with one rank without mpirun the started process is rank 0."""
        if self.launch.ranks == 1:
            return {i: p.pid for i, p in enumerate(self.mains) if p.poll() is None}
        return {rank: pid for pid, rank in self.processes() if rank is not None}

    def later(self, seconds, action):
        self.agenda.append((Moment("at", time.monotonic() + seconds), action))

    # ---- running ----
    def run(self):
        """Returns the end: finished, stopped, refused or killed. Raises Failure for anything else."""
        self.started = time.monotonic()
        self.start_one()
        self.saves_seen, self.saving = 0, False
        try:
            while any(p.poll() is None for p in self.mains) or self.processes():
                self.strike_what_is_due()
                if time.monotonic() - self.started > self.launch.deadline:
                    raise Failure("a process hangs", self.describe_hang())
                busy = any(m.kind != "at" for m, _ in self.agenda)
                time.sleep(0.001 if busy else 0.004)
        finally:
            for pid, _ in self.processes():
                send(pid, signal.SIGKILL)
            for p in self.mains:
                p.wait()
            for f in self.faults:
                f.lift(self.place)
        self.seconds = time.monotonic() - self.started
        return self.judge()

    def strike_what_is_due(self):
        if not self.agenda:
            return
        kinds = {m.kind for m, _ in self.agenda}
        if "saving" in kinds:
            try:
                saving = any(n.startswith(".step_") and n.endswith(".tmp") for n in os.listdir(self.place.out))
            except OSError:
                saving = False
            self.saves_seen += saving and not self.saving
            self.saving = saving
        step = self.logged_step() if "step" in kinds else 0
        now = time.monotonic()
        for item in list(self.agenda):
            moment, action = item
            due = {
                "at": now >= moment.value,
                "after": now - self.started >= moment.value * self.typical_seconds,
                "step": step >= moment.value,
                "saving": self.saves_seen >= moment.value,
            }[moment.kind]
            if due:
                self.agenda.remove(item)
                if moment.delay:
                    self.later(moment.delay, action)
                else:
                    action(self)

    def logged_step(self):
        try:
            with open(self.place.out / "log.jsonl", "rb") as f:
                f.seek(max(0, os.fstat(f.fileno()).st_size - 4000))
                found = re.findall(rb'"kind":"step","step":(\d+)', f.read())
            return int(found[-1]) if found else 0
        except OSError:
            return 0

    # ---- the end ----
    def judge(self):
        said = self.said()
        crash = CRASHES.search(said)
        require(not crash, "the trainer crashes", self.tail())
        require(len(re.findall(r"^finished after", said, re.MULTILINE)) < 2, "a second start does again what the first has done", self.tail())
        ends = [self.end_of(p.returncode, said) for p in self.mains]
        for end in ("finished", "stopped", "killed", "refused"):
            if end in ends:
                return end

    def end_of(self, status, said):
        sent = set(self.signals)
        died_of = -status if status < 0 else status - 128 if 128 < status < 160 else 0
        if died_of and LAUNCHER_CRASH.search(self.all_said()):
            return "killed"
        if died_of:
            require(died_of not in OWN_CRASH, "the trainer crashes", self.tail())
            require(died_of in sent, f"the trainer dies of signal {died_of}, which it was not sent", self.tail())
            asked = died_of in ASK_TO_STOP and self.launch.ranks == 1
            require(not (asked and re.search(r"^step \d", said, re.MULTILINE)), f"signal {died_of} ends training without a checkpoint", self.tail())
            return "killed"
        if status == 0:
            if "the run is finished:" in said or re.search(r"^finished after", said, re.MULTILINE):
                return "finished"
            if re.search(r"^stopped after", said, re.MULTILINE):
                return "stopped"
            ending = verify.ending_of(verify.read_log(self.place.out / "log.jsonl"))
            silent = self.launch.shell or self.launch.head
            require(silent and ending in ("finished", "stopped", ""), "status 0 without having finished or stopped", self.tail())
            return ending or "stopped"
        if ERROR.search(said) or "2>&-" in self.launch.shell:
            require(self.may_be_refused or sent or not self.faults or self.place.obstacles, "the run ends by an error though nothing was in its way", self.tail())
            return "refused"
        require(self.launch.ranks > 1 and sent, f"the run ends with status {status} and does not say why", self.tail())
        return "killed"

    def said(self):
        return LAUNCHER_CRASH.sub("", self.all_said())

    def all_said(self):
        return "".join(p.read_text(errors="replace") for p in (self.stdout, self.stderr) if p.exists())

    def tail(self):
        lines = [line for line in self.said().splitlines() if line.strip() and not line.startswith("---")]
        errors = [line for line in lines if CRASHES.search(line) or ERROR.match(line)]
        return " | ".join((errors or lines)[-4:])[-600:]

    def describe_hang(self):
        states = []
        for pid, rank in self.processes():
            try:
                state = re.search(r"State:\s*(.*)", Path(f"/proc/{pid}/status").read_text())[1]
                where = Path(f"/proc/{pid}/wchan").read_text()
            except OSError:
                continue
            states.append(f"pid {pid} rank {rank}: {state} {where}")
        return f"{self.launch.deadline:.0f} s; " + "; ".join(states) + "; " + self.tail()


def _quoted(word):
    return word if re.fullmatch(r"[\w./=,:+-]+", str(word)) else "'" + str(word).replace("'", "'\\''") + "'"
