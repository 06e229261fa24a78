"""Speed and memory of our training step on this CPU, PyTorch's best, and llm.c's: `make bench-cpu`.

The programs take turns: in every round each runs some steps while the others sleep, so that other load on the machine, and its
temperature, affect all equally. Figures are medians over all steps except warm-up (which includes torch.compile's compilation),
with the quartiles in brackets; memory is the peak of the whole process (VmHWM), including compilation. "of peak": the model's
FLOPs, as counted by bench, relative to the peak of all cores in that precision, measured in the same run. At the end of a
configuration all run steps next to one process that keeps a core busy; threads with a fair share of n cores keep n / (n + 1)
of their speed. Uses only Python's standard library.

    make bench-cpu      CONFIGS="gpt2-124m:1x1024 quickstart:8x256"   PRECISIONS="bf16 fp32"   LLMC=/path/to/llm.c   UNITS=all
    cpu.py --bench 'build/cpu-{precision}{march}/bench' [--configs ...] [--precisions ...] [--llmc DIR] [--units ...]
    (unset options are taken from the environment's CONFIGS, PRECISIONS, LLMC, UNITS)

With units (AVX2, AVX-512, ... or all that this CPU has) each configuration is measured on each: ours is compiled for and
restricted to that unit, PyTorch's libraries are restricted to the same instructions by environment variables; without the
busy-process row. `all` omits bf16 on AVX2, where PyTorch has plain loops that take minutes per step.
"""
import argparse
import array
import contextlib
import math
import os
import platform
import queue
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("ours", "eager", "compiled")
OF_MIXTURES = ("ours", "dense", "eager", "grouped_mm")  # dense: our dense model with the same FLOPs
ROUND_SECONDS, MIN_ROUNDS, MAX_ROUNDS, CONFIG_SECONDS = 1.5, 5, 9, 50
TIME_LIMIT = 600  # per request, such as compiling a model
# For PyTorch: no GPU, no compilation processes that would outlive it, and memory is kept between steps instead of being
# returned to the system, which clears it again.
PYTORCH_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "8000000000",
                       "MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TOP_PAD_": "67108864"}
# Our matrix units: the architecture to compile for, and variables that restrict oneDNN, MKL and PyTorch's own loops to it.
UNITS = {"AMX": ("", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}),
         "AVX512-BF16": ("", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
         "AVX-512": ("-x86-64-v4", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512",
                                    "ATEN_CPU_CAPABILITY": "avx512"}),
         "AVX2": ("-x86-64-v3", {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                                 "ATEN_CPU_CAPABILITY": "avx2"})}
GIB = 1024**3


class Failure(Exception):
    """A program that failed its request."""


# ---- programs ----
class Worker:
    """A program that reads counts and prints the milliseconds of that many steps."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
                                        env={**os.environ, **(environment or {})}, start_new_session=True)
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.times: list[float] = []
        self.busy_times: list[float] = []

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.strip())
        self.lines.put("")  # the end

    def answer(self) -> str:
        try:
            line = self.lines.get(timeout=TIME_LIMIT)
        except queue.Empty:
            raise Failure(f"no answer within {TIME_LIMIT} s") from None
        if not line:
            raise Failure(self._why_it_ended())
        return line

    def _why_it_ended(self) -> str:
        status = self.process.wait()
        self.errors.seek(0)
        if status < 0:
            return f"ended by signal {-status}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
        said = [line.strip() for line in self.errors if line.strip()] or [f"ended with status {status}"]
        # The first error is the cause of later ones: a compiler's or ours, otherwise an exception.
        for pattern in (r"\berror: ", r"\w(Error|Exception): "):
            for line in said:
                if re.search(pattern, line):
                    return line
        return said[-1]

    def steps(self, n: int) -> list[float]:
        try:
            print(n, file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failure(self._why_it_ended()) from None
        return [float(word) for word in self.answer().split()]

    def finish(self) -> int:
        """Ends the program; returns its peak memory in bytes."""
        self.process.stdin.close()
        return int(self.answer())

    def cpu_seconds(self) -> float:
        """Of the program and its finished children."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@contextlib.contextmanager
def busy_process():
    process = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        time.sleep(0.5)
        yield
    finally:
        process.kill()
        process.wait()


def start(program: str, config: "Config", bench: Path, threads: int) -> tuple[Worker, dict[str, str]]:
    """Starts a program on a configuration; returns it when it is ready, and its description of itself."""
    if program in ("ours", "dense"):
        preset = config.preset + ("-dense" if program == "dense" else "")
        worker = Worker([bench, "--serve", preset, str(config.B), str(config.T)],
                        {"OMP_NUM_THREADS": str(threads), "TRAIN_GPT_MATRIX_UNIT": config.unit})
    else:
        words = {**config.sizes, "B": config.B, "T": config.T, "threads": threads, "precision": config.precision,
                 "variant": program}
        worker = Worker([sys.executable, Path(__file__).with_name("pytorch_step.py"), *(f"{k}={v}" for k, v in words.items())],
                        {**PYTORCH_ENVIRONMENT, **(UNITS[config.unit][1] if config.unit else {})})
    try:
        said = dict(word.split("=", 1) for word in worker.answer().split()[1:])
        if said and said["parameters"] != config.sizes["parameters"]:
            raise Failure(f"its model has {said['parameters']} parameters, ours {config.sizes['parameters']}")
    except BaseException:
        worker.kill()
        raise
    return worker, said


# ---- measurements ----
@dataclass
class Result:
    """Of a program on a configuration: its steps' milliseconds and its memory, or the reason for a failure."""

    times: list[float] = field(default_factory=list)
    memory: int = 0
    busy_times: list[float] = field(default_factory=list)  # next to one busy process
    failure: str = ""

    @property
    def ms(self) -> float:
        return statistics.median(self.times)


@dataclass
class Config:
    preset: str
    B: int
    T: int
    precision: str
    sizes: dict[str, str]  # from `bench --describe`
    unit: str = ""  # the matrix unit that all are restricted to
    results: dict[str, Result] = field(default_factory=dict)

    @property
    def mixture(self) -> bool:
        return self.sizes["experts"] != "0"

    @property
    def programs(self) -> tuple[str, ...]:
        return OF_MIXTURES if self.mixture else PROGRAMS

    @property
    def name(self) -> str:
        return f"{self.preset} {self.B}x{self.T}" + (f" on {self.unit}" if self.unit else "")

    @property
    def weight(self) -> float:
        """Rough seconds on two cores; only its fraction of the total is used."""
        return 40 + float(self.sizes["flops"]) * 70e-12 * (2 if self.precision == "fp32" else 1)


def properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def ask(bench: Path, *arguments: str) -> dict[str, str]:
    try:
        return properties(subprocess.run([bench, *arguments], check=True, capture_output=True, text=True).stdout)
    except (OSError, subprocess.CalledProcessError) as e:
        raise SystemExit(f"error: {bench} {' '.join(arguments)}: {getattr(e, 'stderr', '') or e}") from None


def faster(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    """The output of `bench --machine`, with the higher of each bound, as something else may have run during one measurement."""
    return {**b, **{key: max(a[key], b[key], key=float) for key in ("fp32", "bf16", "copy") if a}}


def machine_seconds() -> float:
    """CPU time used by everything on this machine, including time stolen by its host."""
    words = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = words
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")


class Progress:
    """One line on stderr; a new one each time if that is not a terminal."""

    def __init__(self, configs: list[Config]):
        self.configs, self.begin = configs, time.monotonic()
        self.all = sum(config.weight for config in configs)

    def show(self, index: int, what: str, part: float):
        done = sum(config.weight for config in self.configs[:index]) + part * self.configs[index].weight
        elapsed = time.monotonic() - self.begin
        # Until some are done, the weights themselves are the estimate.
        left = (self.all - done) * (elapsed + 30) / (done + 30)
        config = self.configs[index]
        text = (f"config {index + 1} of {len(self.configs)} ({config.name} {config.precision}), {what}, "
                f"about {max(1, round(left / 60))} min left")
        self.write(f"\r{text:<110}" if sys.stderr.isatty() else text + "\n")

    def note(self, text: str):
        self.write(("\r" + " " * 110 + "\r" if sys.stderr.isatty() else "") + text + "\n")

    @staticmethod
    def write(text: str):
        sys.stderr.write(text)
        sys.stderr.flush()


class Bystanders:
    """CPU time of other processes while one program was measured, as a fraction of all cores."""

    def __init__(self):
        self.wall = self.idle = self.other = 0.0

    def measure(self, worker: Worker, all_workers: list[Worker], work):
        before, machine, begin = [w.cpu_seconds() for w in all_workers], machine_seconds(), time.monotonic()
        result = work()
        used = [w.cpu_seconds() - b for w, b in zip(all_workers, before)]
        self.wall += time.monotonic() - begin
        self.idle += sum(u for w, u in zip(all_workers, used) if w is not worker)
        self.other += max(0.0, machine_seconds() - machine - sum(used))
        return result

    def notes(self) -> list[str]:
        if not self.wall:
            return []
        idle, other = self.idle / self.wall, self.other / self.wall / os.cpu_count()
        return [f"While one was measured, those that waited used {idle:.1%} of a core" +
                (": TOO MUCH, the figures are not good." if idle > 0.02 else ".") +
                f" All other programs used {other:.1%} of the machine" +
                (": TOO MUCH, the figures are not good." if other > 0.05 else ".")]


def measure(config: Config, index: int, bench: Path, threads: int, progress: Progress,
            bystanders: Bystanders) -> dict[str, str]:
    """Fills in config.results; returns PyTorch's description of itself."""
    workers: dict[str, Worker] = {}
    steps_a_round: dict[str, int] = {}
    pytorch: dict[str, str] = {}

    def attempt(program: str, work):
        """Returns work()'s result; None if it fails, and then drops the program."""
        try:
            return work()
        except Failure as failure:
            progress.note(f"{config.name} {config.precision}, {program}: {failure}")
            config.results[program] = Result(failure=str(failure))
            if program in workers:
                workers.pop(program).kill()

    def warm_up(program: str):
        worker = workers[program]
        worker.steps(1)  # allocates, compiles
        ms = worker.steps(1)[0]
        if ms < 500:
            ms = statistics.median(worker.steps(math.ceil(1000 / ms)))
        steps_a_round[program] = math.ceil(1000 * ROUND_SECONDS / ms)
        return steps_a_round[program] * ms / 1000

    try:
        round_seconds = 0.0
        for i, program in enumerate(config.programs):
            progress.show(index, f"starting {program}", 0.1 * i)
            begun = attempt(program, lambda: start(program, config, bench, threads))
            if begun:
                workers[program], said = begun
                pytorch = said or pytorch
                round_seconds += attempt(program, lambda: warm_up(program)) or 0
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(CONFIG_SECONDS / max(round_seconds, 1))))
        for r in range(rounds):
            progress.show(index, f"round {r + 1} of {rounds}", 0.3 + 0.7 * r / rounds)
            for program, worker in list(workers.items()):
                times = attempt(program, lambda: bystanders.measure(worker, list(workers.values()),
                                                                    lambda: worker.steps(steps_a_round[program])))
                worker.times += times or []
        if not config.unit and not config.mixture:
            progress.show(index, "beside a busy process", 0.95)
            with busy_process():
                for program, worker in list(workers.items()):
                    worker.busy_times = attempt(program, lambda: worker.steps(max(3, steps_a_round[program] // 2))) or []
        for program, worker in list(workers.items()):
            memory = attempt(program, worker.finish)
            if memory:
                config.results[program] = Result(worker.times, memory, worker.busy_times)
    finally:
        for worker in workers.values():
            worker.kill()
    return pytorch


# ---- llm.c: its own source with other sizes and counts, on random inputs ----
class LlmC:
    """Builds and runs its train_gpt2.c in a temporary directory."""

    STEPS = 4  # the first warms up

    def __init__(self, source: Path, build: Path):
        self.source = source
        self.holder = tempfile.TemporaryDirectory(prefix="llmc-", dir=build)
        self.work = Path(self.holder.name)
        self.inputs_written = False

    def write_inputs(self):
        """Writes its input files: a header of 256 ints, then the numbers."""
        L, C, T, V, Vp = 12, 768, 1024, 50257, 50304
        rng = random.Random(1)
        some = array.array("f", (rng.gauss(0, 0.02) for _ in range(1 << 18)))
        ones = array.array("f", [1]) * (1 << 18)
        tensors = [(Vp * C, some), (T * C, some), (L * C, ones), (L * C, some), (L * 3 * C * C, some), (L * 3 * C, some),
                   (L * C * C, some), (L * C, some), (L * C, ones), (L * C, some), (L * 4 * C * C, some), (L * 4 * C, some),
                   (L * 4 * C * C, some), (L * C, some), (C, ones), (C, some)]
        with open(self.work / "gpt2_124M.bin", "wb") as out:
            array.array("i", [20240326, 3, T, V, L, 12, C, Vp] + [0] * 248).tofile(out)
            for size, numbers in tensors:
                for begin in range(0, size, len(numbers)):
                    numbers[: min(len(numbers), size - begin)].tofile(out)
        n_tokens = 64 * 1024 + 1
        data = self.work / "dev/data/tinyshakespeare"
        data.mkdir(parents=True)
        for part in ("train", "val"):
            with open(data / f"tiny_shakespeare_{part}.bin", "wb") as out:
                array.array("i", [20240520, 1, n_tokens] + [0] * 253).tofile(out)
                array.array("H", (rng.randrange(V) for _ in range(n_tokens))).tofile(out)

    def build(self, B: int, T: int):
        code = (self.source / "train_gpt2.c").read_text()
        for old, new in (("int B = 4;", f"int B = {B};"), ("int T = 64;", f"int T = {T};"),
                         ("step <= 40;", f"step < {self.STEPS};"), ("val_num_batches = 5;", "val_num_batches = 1;")):
            if code.count(old) != 1:
                raise Failure(f"train_gpt2.c does not have '{old}' once")
            code = code.replace(old, new)
        (self.work / "train_gpt2.c").write_text(code)
        command = ["gcc", "-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w", f"-I{self.source}", "train_gpt2.c", "-lm",
                   "-o", "train_gpt2"]
        built = subprocess.run(command, cwd=self.work, capture_output=True, text=True)
        if built.returncode:
            raise Failure(f"{shlex.join(command)}: {built.stderr.strip().splitlines()[-1]}")

    def run(self, config: Config, threads: int) -> Result:
        try:
            if not self.inputs_written:
                self.write_inputs()
                self.inputs_written = True
            self.build(config.B, config.T)
        except (Failure, OSError) as e:
            return Result(failure=str(e))
        result = Result()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(["./train_gpt2"], cwd=self.work, stdout=output, stderr=output, start_new_session=True,
                                       env={**os.environ, "OMP_NUM_THREADS": str(threads)})
            try:
                limit = time.monotonic() + 2 * TIME_LIMIT
                while process.poll() is None:
                    if time.monotonic() > limit:
                        return Result(failure=f"not done within {2 * TIME_LIMIT} s")
                    result.memory = max(result.memory, resident_peak(process.pid))
                    time.sleep(0.2)
            finally:
                process.kill()
                process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        result.times = [float(ms) for ms in re.findall(r"\(took ([\d.]+) ms\)", text)][1:]
        if process.returncode or len(result.times) != self.STEPS - 1:
            result.failure = f"ended with status {process.returncode}: {text.strip().splitlines()[-1:]}"
        return result


def resident_peak(pid: int) -> int:
    try:
        found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        found = None
    return 1024 * int(found[1]) if found else 0


# ---- the table ----
def speed(config: Config, result: Result) -> str:
    """Tokens per second: the median, and the quartiles."""
    if result.failure:
        return "failed: " + result.failure.replace("|", "/")[:80]
    rate = sorted(1000 * config.B * config.T / ms for ms in result.times)
    low, _, high = statistics.quantiles(rate, n=4, method="inclusive") if len(rate) > 1 else rate * 3
    return f"{1000 * config.B * config.T / result.ms:,.0f} ({low:,.0f}-{high:,.0f})"


def gib(n: int) -> str:
    return f"{n / GIB:.2f} GiB"


def row(config: Config, machine: dict[str, str]) -> str:
    ours, pytorch = config.results["ours"], {p: config.results[p] for p in config.programs[1 + config.mixture:]}
    good = {p: r for p, r in pytorch.items() if not r.failure}
    best = min(good, key=lambda p: good[p].ms) if good else None
    cells = [config.name, config.precision, speed(config, ours)]
    if ours.failure:
        cells.append("")
    else:
        rate = float(config.sizes["flops"]) / ours.ms * 1000
        cells.append(f"{rate / peak(config.precision, machine):.0%}")
    if config.mixture:
        dense = config.results["dense"]
        cells.append(speed(config, dense) + ("" if dense.failure or ours.failure else f", {dense.ms / ours.ms:.0%} of it"))
    cells += [f"**{speed(config, r)}**" if p == best else speed(config, r) for p, r in pytorch.items()]
    both = best and not ours.failure
    cells.append(f"{good[best].ms / ours.ms:.2f}" if both else "")
    cells.append("" if ours.failure else gib(ours.memory))
    cells.append(gib(good[best].memory) if best else "")
    cells.append(f"{ours.memory / good[best].memory:.2f}" if both else "")
    return "| " + " | ".join(cells) + " |"


def busy_row(config: Config, threads: int) -> str:
    """By the mean of all steps, as the other process interrupts only some of them."""
    good = {p: r for p, r in config.results.items() if p in config.programs and r.busy_times}
    rates = {p: 1000 * config.B * config.T / statistics.mean(r.busy_times) for p, r in good.items()}
    kept = {p: r.ms / statistics.mean(r.busy_times) for p, r in good.items()}
    cells = [config.name, config.precision, f"{threads / (threads + 1):.0%}"]
    cells += [f"{rates[p]:,.0f} ({kept[p]:.0%})" if p in good else "" for p in PROGRAMS]
    best = max((rates[p] for p in PROGRAMS[1:] if p in good), default=0)
    cells.append(f"{rates['ours'] / best:.2f}" if best and "ours" in good else "")
    return "| " + " | ".join(cells) + " |"


def llmc_row(config: Config) -> str:
    ours, theirs = config.results["ours"], config.results["llm.c"]
    cells = [config.name, config.precision, speed(config, theirs)]
    both = not ours.failure and not theirs.failure
    cells += [f"{theirs.ms / ours.ms:.1f}", gib(theirs.memory), f"{ours.memory / theirs.memory:.2f}"] if both else [""] * 3
    return "| " + " | ".join(cells) + " |"


def peak(precision: str, machine: dict[str, str]) -> float:
    """FLOP/s; for a CPU with bf16 slower than fp32, the fp32 rate."""
    fp32, bf16 = float(machine["fp32"]), float(machine["bf16"])
    return max(fp32, bf16) if precision == "bf16" else fp32


def header(machine: dict[str, str], pytorch: dict[str, str]) -> list[str]:
    model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    memory = int(re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    lines = [f"{time.strftime('%Y-%m-%d')}, {model[1] if model else platform.machine()}, {os.cpu_count()} cores, "
             f"{gib(memory)}, {machine['isa']}.",
             f"Registers: fp32 {float(machine['fp32']) / 1e9:.0f} GFLOP/s (multiply-adds, or a sixth of AMX's products), "
             + (f"{machine['bf16_name']} {float(machine['bf16']) / 1e9:.0f} GFLOP/s" if float(machine["bf16"]) else "no bf16 products")
             + f"; copy {float(machine['copy']) / 1e9:.1f} GB/s.",
             f"Ours: {machine['compiler']}."]
    if pytorch:
        lines.append(f"PyTorch: {pytorch['torch']}, oneDNN {pytorch['oneDNN']}, AdamW {pytorch['adamw']}, fp32 weights, bf16 "
                     f"by autocast; in bold its best, whose memory is shown ({gib(int(pytorch['import']))} of it is there "
                     "without any model).")
    return lines


def print_table(configs: list[Config], machine: dict[str, str], pytorch: dict[str, str], notes: list[str]):
    print("\n".join(header(machine, pytorch)) + "\n")
    for mixtures in (False, True):
        some = [config for config in configs if config.mixture == mixtures]
        if not some:
            continue
        programs = "dense model | PyTorch eager | grouped_mm" if mixtures else "PyTorch eager | PyTorch compiled"
        print(f"| model, batch x length | precision | ours, tok/s | of peak | {programs} | ours / best "
              "| memory, ours | PyTorch | ours / PyTorch |")
        print("|" + " --- |" * (11 if mixtures else 10))
        for config in some:
            print(row(config, machine))
    busy = [config for config in configs if config.results["ours"].busy_times and not config.mixture]
    if busy:
        print_busy_table(busy, int(machine["threads"]))
    if any("llm.c" in config.results for config in configs):
        print("\n| model, batch x length | precision | llm.c, tok/s | ours / llm.c | memory, llm.c | ours / llm.c |")
        print("|" + " --- |" * 6)
        for config in configs:
            if "llm.c" in config.results:
                print(llmc_row(config))
    print("\n" + "\n".join(notes))


def print_busy_table(configs: list[Config], threads: int):
    print("\nBeside one busy process, and how much of the speed without it that is:\n\n"
          "| model, batch x length | precision | fair share | ours, tok/s | PyTorch eager | PyTorch compiled | ours / best |")
    print("|" + " --- |" * 7)
    for config in configs:
        print(busy_row(config, threads))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True, help="our program; {precision} in it becomes bf16 or fp32")
    given = os.environ.get
    parser.add_argument("--configs", help="PRESET:BxT, several with spaces between",
                        default=given("CONFIGS") or "gpt2-124m:1x1024 gpt2-124m:4x256 llama-60m:4x512 quickstart:8x256")
    parser.add_argument("--precisions", default=given("PRECISIONS") or "bf16 fp32")
    parser.add_argument("--llmc", type=Path, default=given("LLMC") or None, help="a checkout of llm.c")
    parser.add_argument("--units", default=given("UNITS", ""), help="matrix units to hold all to: " + ", ".join(UNITS) + ", or all")
    options = parser.parse_args()
    for word in options.configs.split():
        if not re.fullmatch(r"[^:]+:[1-9]\d*x[1-9]\d*", word):
            parser.error(f"'{word}' is not of the form PRESET:BxT, such as quickstart:8x256")
    for word in options.precisions.split():
        if word not in ("bf16", "fp32"):
            parser.error(f"precision '{word}' must be bf16 or fp32")
    for word in options.units.split():
        if word not in (*UNITS, "all"):
            parser.error(f"unit '{word}' must be one of {', '.join(UNITS)}, or all")
    if options.llmc:
        options.llmc = options.llmc.resolve()
        if not (options.llmc / "train_gpt2.c").exists():
            parser.error(f"{options.llmc} has no train_gpt2.c")
    return options


def units_of(bench: Path, asked: str, precision: str) -> list[str]:
    """The matrix units to measure; by default one without a name, where each program uses its best."""
    if not asked:
        return [""]
    here = ask(bench, "--machine")["units"].split(", ")
    of_all = [u for u in UNITS if (u, precision) != ("AVX2", "bf16")]
    units = [u for u in UNITS if u in here and u in (of_all if asked == "all" else asked.split())]
    for word in asked.split():
        if word != "all" and word not in here:
            sys.stderr.write(f"{word} is left out: {bench} has {', '.join(here)} on this CPU\n")
    return units


def main():
    options = parse()

    def bench_of(precision: str, unit: str = "") -> Path:
        return Path(options.bench.format(precision=precision, march=UNITS[unit][0] if unit else "")).resolve()

    configs = []
    for word in options.configs.split():
        preset, B, T = re.fullmatch(r"(.+):(\d+)x(\d+)", word).groups()
        for precision in options.precisions.split():
            sizes = ask(bench_of(precision), "--describe", preset, B, T)
            for unit in units_of(bench_of(precision), options.units, precision):
                configs.append(Config(preset, int(B), int(T), precision, sizes, unit))
    llmc = LlmC(options.llmc, bench_of(configs[0].precision).parent) if options.llmc else None

    progress, bystanders, pytorch = Progress(configs), Bystanders(), {}
    machine: dict[str, str] = {}
    try:
        for i, config in enumerate(configs):
            progress.show(i, "the machine's bounds", 0)
            machine = faster(machine, ask(bench_of(config.precision), "--machine"))
            threads = int(machine["threads"])
            pytorch = measure(config, i, bench_of(config.precision, config.unit), threads, progress, bystanders) or pytorch
            if llmc and config.preset == "gpt2-124m" and config.precision == "fp32" and config.unit == configs[0].unit:
                progress.show(i, "llm.c", 1)
                config.results["llm.c"] = llmc.run(config, threads)
    finally:  # an interrupted run shows its results so far
        progress.note("")
        print_table([c for c in configs if all(p in c.results for p in c.programs)], machine, pytorch, bystanders.notes())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
