"""The folder of one run: OUT, the trainer's output, the user's files, and everything touched by faults."""

import os
import shutil
import subprocess
from pathlib import Path

import verify
from verify import require


class Place:
    def __init__(self, folder, tools, calls, small_disk=False):
        self.dir = Path(folder)
        self.dir.mkdir(parents=True)
        self.calls, self.shim = calls, tools.get("shim")  # {rank: {call: number of calls in an undisturbed run}}
        self.disk = self.dir / "disk"
        self.disk.mkdir()
        if small_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(self.disk)], check=True)
        self.out = self.disk / "out"
        self.memory = self.dir / "memory"  # of the nodes, for snapshots
        self.memory.mkdir()
        self.nodes = ["a", "b"]
        self.planted = {}  # path below OUT -> content
        self.touched = set()  # by faults: OUT, log, latest, checkpoints
        self.damaged = set()  # names of checkpoints damaged by faults
        self.obstacles = []  # put by faults in place of the trainer's files
        self.read_only, self.other_layout = None, False
        self.forgets_memory = False  # the run in `out` does not know its snapshots any more

    def plant(self, files):
        for name, content in files.items():
            path = self.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self.planted.update(files)

    # ---- the disk ----
    def fill(self, left):
        s = os.statvfs(self.disk)
        try:
            with open(self.disk / "ballast", "wb") as f:
                os.posix_fallocate(f.fileno(), 0, max(4096, s.f_bavail * s.f_frsize - left))
        except OSError:
            pass  # the trainer took the space in the meantime

    def free(self):
        (self.disk / "ballast").unlink(missing_ok=True)

    def make_read_only(self):
        """By a second mount of OUT, made read-only before it covers OUT, so that no file in it can be open for writing."""
        if self.out.is_dir() and not self.read_only:
            aside = self.dir / "aside"
            aside.mkdir(exist_ok=True)
            for words in (["--bind", self.out, aside], ["-o", "remount,ro,bind", aside], ["--bind", aside, self.out]):
                subprocess.run(["mount", *map(str, words)], check=True)
            self.read_only = self.out

    def make_writable(self):
        if self.read_only:
            for path in (self.read_only, self.dir / "aside"):
                subprocess.run(["umount", "-l", str(path)], check=True)
            self.read_only = None

    def clear_obstacles(self):
        """What a user does when told about an obstacle."""
        for path in self.obstacles:
            subprocess.run(["rm", "-rf", str(self.out / path.name)])
        self.obstacles = []

    def remove_checkpoints(self):
        subprocess.run(["rm", "-rf", *map(str, verify.checkpoints(self.out).values()), str(self.out / "latest")])
        self.touched -= {"latest", "checkpoints"}

    def close(self, keep):
        self.make_writable()
        self.free()
        if self.disk.is_mount():
            if keep:
                subprocess.run(["cp", "-a", str(self.disk), str(self.dir / "disk-was")])
            subprocess.run(["umount", "-l", str(self.disk)])
        if not keep:
            shutil.rmtree(self.dir)

    # ---- conditions whenever no process runs ----
    def check_after(self, end, announced, final_step):
        for name, content in self.planted.items():
            path = self.out / name
            require(path.is_file() and path.read_bytes() == content, "a file of the user's is gone or changed", name)
        for folder in verify.checkpoints(self.out).values():
            problem = verify.problem_of(folder)
            if "OUT" in self.touched and problem:
                self.damaged.add(folder.name)
            require(not problem or folder.name in self.damaged, "a checkpoint is not whole under its final name", f"{folder.name}: {problem}")
        latest = verify.latest(self.out)
        if "latest" not in self.touched and "checkpoints" not in self.touched:
            require(not latest.is_symlink() or latest.exists(), "latest points to nothing", os.readlink(latest) if latest.is_symlink() else "")
        spoiled = {int(verify.STEP.match(name)[1]) for name in self.damaged}
        if announced and "OUT" not in self.touched:
            newest = max(announced)
            there = any(step >= newest for step in [*verify.intact_steps(self.out), *spoiled])  # maybe not announced yet
            require(there, "the newest checkpoint that the log announces is not there", f"step {newest}")
        if end in ("finished", "stopped") and not {"latest", "checkpoints", "OUT"} & self.touched:
            if end == "stopped" and not latest.exists() and not any(r.get("kind") == "step" for r in verify.read_log(self.out / "log.jsonl")):
                return  # before the first step there is nothing to save
            require(latest.exists(), f"{end} with status 0, but there is no latest checkpoint")
            step = verify.read_state(latest)["step"]
            require(end != "finished" or step == final_step, "finished, but the latest checkpoint is not the last step's", f"{step}, not {final_step}")

    def check_no_leftovers(self):
        """After a run has ended well, OUT has only the user's files and final names."""
        own = {name.split("/")[0] for name in self.planted}
        for path in [*self.out.iterdir(), *(p for c in verify.checkpoints(self.out).values() for p in c.rglob("*"))]:
            temporary = ".tmp" in path.name or path.name.endswith(".old") or path.name.startswith(".step_")
            require(not temporary or path.name in own, "something temporary is left behind", str(path.relative_to(self.out)))
        left = [p for p in self.memory.rglob("*") if not p.is_dir()]
        require(not left or self.touched or self.forgets_memory, "snapshots are left behind", str(left[:1]))
