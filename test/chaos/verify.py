"""A run's folder, read without the trainer's code: checksums, tensors, counters, the log.

Checks raise Failure(kind, detail); kind is the same for the same mistake whatever the numbers, so that failures can be reduced.
"""

import array
import functools
import json
import os
import re
from pathlib import Path

STEP = re.compile(r"step_(\d+)$")
MASTERS = {"model.safetensors": "training/master.safetensors", "adapter_model.safetensors": "training/master.safetensors",
           "ema/model.safetensors": "training/ema.safetensors", "ema/adapter_model.safetensors": "training/ema.safetensors"}  # fmt: skip
TENSOR_FILES = list(dict.fromkeys([*MASTERS, *MASTERS.values()])) + ["training/exp_avg.safetensors", "training/exp_avg_sq.safetensors"]


class Failure(Exception):
    def __init__(self, kind, detail=""):
        super().__init__(kind + (": " + detail if detail else ""))
        self.kind = kind


def require(truth, kind, detail=""):
    if not truth:
        raise Failure(kind, detail)


# ---- checksums ---------------------------------------------------------------------------------------------------------------
def _crc_tables():
    """Tables for four bytes at a time of CRC-32C (Castagnoli's polynomial, reflected)."""
    first = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        first.append(byte)
    tables = [first]
    for _ in range(3):
        tables.append([first[c & 255] ^ c >> 8 for c in tables[-1]])
    return tables


_T0, _T1, _T2, _T3 = _crc_tables()


def crc32c(data):
    crc = 0xFFFFFFFF
    whole = len(data) // 4 * 4
    for word in array.array("I", data[:whole]):
        crc ^= word
        crc = _T3[crc & 255] ^ _T2[crc >> 8 & 255] ^ _T1[crc >> 16 & 255] ^ _T0[crc >> 24]
    for byte in data[whole:]:
        crc = _T0[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


@functools.lru_cache(maxsize=2000)
def _crc_of_version(path, inode, changed_ns, size):
    return crc32c(Path(path).read_bytes())


def crc_of(path):
    """The checksum of a file, cached until the file changes."""
    s = os.stat(path)
    return _crc_of_version(str(path), s.st_ino, (s.st_mtime_ns, s.st_ctime_ns), s.st_size)


def problem_of(checkpoint):
    """The first mismatch between a checkpoint and its manifest, or ""."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
        if not files:
            return "the manifest lists no files"
        for name, entry in files.items():
            path = checkpoint / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has another size"
            if "%08x" % crc_of(path) != entry["crc32c"]:
                return f"{name} has a wrong checksum"
        return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return str(e)


def checkpoints(out):
    """{step: folder} of OUT/step_N."""
    try:
        return {int(m[1]): p for p in out.iterdir() if (m := STEP.match(p.name)) and p.is_dir()}
    except OSError:
        return {}


def intact_steps(out):
    return sorted(step for step, folder in checkpoints(out).items() if not problem_of(folder))


# ---- tensors -----------------------------------------------------------------------------------------------------------------
def tensors(path):
    """{name: (dtype, values as unsigned integers)} of a .safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, t in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            code = {"BF16": "H", "F32": "I"}[t["dtype"]]
            found[name] = (t["dtype"], array.array(code, data[8 + length + begin : 8 + length + end]))
    return found


def check_tensors(checkpoint):
    """All numbers are finite, and weights and averaged weights are the fp32 ones rounded to nearest, halves away from zero."""
    found = {name: tensors(checkpoint / name) for name in TENSOR_FILES if (checkpoint / name).exists()}
    for file, content in found.items():
        for name, (dtype, values) in content.items():
            exponent = 0x7F80 if dtype == "BF16" else 0x7F800000
            require(all(v & exponent != exponent for v in values), "a number is not finite", f"{file}: {name}")
    for weights, masters in MASTERS.items():
        if weights not in found or masters not in found:
            continue
        for name, (_, values) in found[weights].items():
            if name not in found[masters]:  # virtual tokens that an encoder computes
                continue
            rounded = array.array("H", ((v + 0x8000) >> 16 for v in found[masters][name][1]))
            require(values == rounded, "weights are not the rounded masters", f"{weights}: {name}")


def check_manifest(checkpoint):
    """The checkpoint is intact, and every file is listed."""
    require(not problem_of(checkpoint), "a checkpoint is not intact", f"{checkpoint}: {problem_of(checkpoint)}")
    listed = set(json.loads((checkpoint / "manifest.json").read_bytes())["files"])
    there = {str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*") if p.is_file()} - {"manifest.json"}
    require(listed == there, "the manifest lists other files than there are", str(sorted(listed ^ there)))


# ---- the log -----------------------------------------------------------------------------------------------------------------
def read_log(path, whole=False):
    """Records of log.jsonl; with `whole` every line must be one, otherwise half lines are skipped."""
    records = []
    try:
        text = path.read_bytes()
    except OSError:
        text = b""
    for line in text.splitlines():
        try:
            record = json.loads(line)
            records.append(record)
        except ValueError:
            require(not whole, "a line of log.jsonl is not JSON", repr(line[:100]))
    return [r for r in records if isinstance(r, dict)]


def steps_of(records):
    """{step: (loss, grad_norm, lr, batch, samples, skipped)}; after a rollback the last pass over a step counts."""
    fields = ("loss", "grad_norm", "lr", "global_batch", "consumed_samples", "tokens", "skipped")
    return {r["step"]: tuple(r.get(f) for f in fields) for r in records if r.get("kind") == "step"}


def events_of(records, name):
    return [r for r in records if r.get("kind") == "event" and r.get("event") == name]


def announced_steps(records):
    """Steps of checkpoints that the log reports as written, except those discarded by a rollback."""
    steps = set()
    for r in records:
        if r.get("kind") == "event" and r["event"] == "checkpoint" and r["level"] == "info":
            steps.add(r["step"])
        if r.get("kind") == "event" and r["event"] == "rollback":
            steps = {s for s in steps if s <= int(re.search(r"step_(\d+)", r["message"])[1])}
    return steps


def ending_of(records):
    ends = [r["status"] for r in records if r.get("kind") == "end"]
    return ends[-1] if ends else ""


# ---- a whole run -------------------------------------------------------------------------------------------------------------
def latest(out):
    """OUT/latest: a link to the newest checkpoint, or what a file names where there are no links."""
    path = out / "latest"
    return out / path.read_text().strip() if path.is_file() and STEP.match(path.read_text(errors="replace").strip()) else path


def read_state(checkpoint):
    state = json.loads((checkpoint / "training/state.json").read_bytes())
    return {k: v for k, v in state.items() if k not in ("options", "layout")}


def check_alone(out, ranks, plain, touched):
    """A finished run is consistent. plain: no batch was skipped; touched: what faults have changed."""
    log_is_whole = "log" not in touched
    newest = latest(out)
    require(newest.exists() and (newest.is_symlink() or newest.name != "latest"), "latest is not a link to a checkpoint", str(newest))
    check_manifest(newest)
    check_tensors(newest)
    state = read_state(newest)
    require(state["updates"] == state["step"] - state["skipped_steps"], "updates are not the steps that were not skipped")
    require((out / "report.html").exists() or {"report", "log"} & touched, "there is no report")
    require(newest.resolve().name == "step_%08d" % state["step"], "latest is of another step than its state says")
    records = read_log(out / "log.jsonl", whole=log_is_whole)
    if not log_is_whole:
        return
    steps = steps_of(records)
    last = max(steps)
    rolled_back = events_of(records, "rollback")
    lines = [r["step"] for r in records if r.get("kind") == "step"]
    require(rolled_back or lines == sorted(set(lines)), "a step is in the log twice or in disorder", str(lines))
    require(steps[last][6] == state["skipped_steps"], "the log counts other skipped steps than the state")
    if plain:
        batches = sum(s[3] for s in steps.values())
        require(state["step"] == last == len(steps), "the log has other steps than the state", f"{last}, {len(steps)}")
        require(state["consumed_samples"] == batches == steps[last][4], "samples are not the sum of the batches", str(batches))
        require(state["tokens"] == steps[last][5], "the log counts other tokens than the state")
        require(abs(state["loss"] - steps[last][0]) < 1e-12, "the log ends with another loss than the state")
    status = out / ".ranks"
    if ranks > 1 and status.exists():
        names = [line.split(" of ")[0] for line in status.read_text(errors="replace").splitlines()]
        require(names == [f"rank {r}" for r in range(ranks)], "the status of the ranks is not one line each", str(names))


def compare(ours, reference, log_is_whole, validations_may_miss):
    """Every bit, counter and logged loss equals the undisturbed run's."""
    a, b = ours / "latest", reference / "latest"
    for name in TENSOR_FILES:
        if (b / name).exists():
            require((a / name).read_bytes() == (b / name).read_bytes(), "other bits than the undisturbed run", name)
    for name in ("config.json", "adapter_config.json"):
        if (b / name).exists():
            require((b / name).read_bytes() == (a / name).read_bytes(), "another " + name)
    ignored = {"valid_loss"} if validations_may_miss else set()
    x, y = read_state(a), read_state(b)
    for key in y:
        require(key in ignored or x[key] == y[key], "other state than the undisturbed run", f"{key}: {x[key]}, not {y[key]}")
    compare_logs(ours, reference, log_is_whole, 0)


def compare_logs(ours, reference, log_is_whole, tolerance):
    """Losses of each step; with tolerance 0 also all other fields of a step."""
    x, y = (steps_of(read_log(o / "log.jsonl")) for o in (ours, reference))
    require(not log_is_whole or x.keys() == y.keys(), "the log has other steps than the undisturbed run's", str(sorted(x.keys() ^ y.keys())))
    for step in x.keys() & y.keys():
        if tolerance == 0:
            require(x[step] == y[step], "the log has other numbers than the undisturbed run's", f"step {step}: {x[step]}, not {y[step]}")
        else:
            near = x[step][0] is not None and abs(x[step][0] - y[step][0]) <= tolerance
            require(near and x[step][3:6] == y[step][3:6], "losses far from the undisturbed run's", f"step {step}: {x[step]}, not {y[step]}")
