#!/usr/bin/env python3
"""Lists the lines and branches of llmc/ and train_gpt.cu that the tests have run: `make coverage`.

A line counts as run if any program ran it, a branch if any took it; exception-only branches are omitted. Templates and inline
functions count once for all instances. Lines run by a killed process do not count.

    coverage.py FOLDER...      with programs that were built with --coverage and have run; fails below 95% of lines
"""
import json
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AIM = 95
ROOT = Path(__file__).resolve().parent.parent
# Functions in which a process exits at once (_exit, MPI_Abort) without writing its counts, and the tests that run them.
# They are excluded; an unknown name is an error.
LEFT_OUT = {
    "llmc/base/file.h end_without_pages": "bad_input_test.sh, test_dataset.cpp: a file becomes shorter while it is read",
    "llmc/parallel/world.h abort": "comm_test.sh: a rank gives up",
    "llmc/parallel/world.h end_run": "comm_test.sh: a rank gives up, an error, a wait without end",
    "llmc/parallel/world.h read_status": "comm_test.sh: what the other ranks do, when one does not come",
    "llmc/parallel/world.h report": "comm_test.sh: a rank that does not come",
}


class Coverage:
    """Per file, over all programs: {line: times}, {(line, branch): times}, {(first line, last line, function): times}."""

    def __init__(self, folders: list[str]):
        self.lines, self.branches, self.functions = (defaultdict(lambda: defaultdict(int)) for _ in range(3))
        data = sorted(path for folder in folders for path in Path(folder).rglob("*.gcda"))
        with ThreadPoolExecutor(2) as pool:
            for files in pool.map(self.files_of, data):
                for name, file in files:
                    self.add(name, file)

    @staticmethod
    def files_of(data: Path) -> list:
        output = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", data], stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, check=True).stdout
        named = [((ROOT / file["file"]).resolve(), file) for record in output.splitlines() for file in json.loads(record)["files"]]
        return [(str(path.relative_to(ROOT)), file) for path, file in named
                if path.is_relative_to(ROOT / "llmc") or path == ROOT / "train_gpt.cu"]

    def add(self, name: str, file):
        for line in file["lines"]:
            self.lines[name][line["line_number"]] += line["count"]
            for i, branch in enumerate(b for b in line["branches"] if not b["throw"]):
                self.branches[name][line["line_number"], i] += branch["count"]
        for f in file["functions"]:
            if "{lambda" not in f["demangled_name"] and not f["demangled_name"].startswith("_Z"):  # too long to demangle
                key = f["start_line"], f["end_line"], plain_name(f["demangled_name"])
                self.functions[name][key] += f["execution_count"]

    def leave_out(self, file: str, function: str) -> int:
        """Excludes the function's lines and branches; returns the number of its lines that no test has run."""
        ranges = [range(first, last + 1) for first, last, name in self.functions[file] if name == function]
        gone = {n for lines in ranges for n in lines}
        missed = sum(1 for n, times in self.lines[file].items() if n in gone and not times)
        for table, line_of in (self.lines, lambda k: k), (self.branches, lambda k: k[0]), (self.functions, lambda k: k[0]):
            table[file] = {k: times for k, times in table[file].items() if line_of(k) not in gone}
        return missed if ranges else -1


def plain_name(demangled: str) -> str:
    """std::vector<int> f<int>::g(int) const -> g."""
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", demangled)) != demangled:
        demangled = shorter
    return re.sub(r"( const| &| ?\[.*|\.\w+)*$", "", demangled).split("::")[-1].split(" ")[-1]


def share(counts) -> tuple[int, int]:
    return sum(1 for n in counts if n), len(counts)


def spans(numbers: list[int]) -> str:
    """[3, 4, 5, 9] -> "3-5 9"."""
    runs = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def print_shares(c: Coverage) -> float:
    """A row per folder; percentages are of all lines."""
    rooms = defaultdict(list)
    for name in sorted(c.lines):
        rooms[str(Path(name).parent) if name.count("/") > 1 else name].append(name)
    print(f"{'':28} {'lines':>8} {'run':>7} {'branches':>9} {'taken':>7}")
    total = 0.0
    for room, names in [*rooms.items(), ("all", list(c.lines))]:
        run, all_lines = share([n for name in names for n in c.lines[name].values()])
        taken, all_branches = share([n for name in names for n in c.branches[name].values()])
        total = 100 * run / max(all_lines, 1)
        print(f"{room:28} {all_lines:8} {total:6.1f}% {all_branches:9} {100 * taken / max(all_branches, 1):6.1f}%")
    return total


def print_missed(c: Coverage):
    print("\nlines that no test has run, and functions:")
    for name in sorted(c.lines):
        missed = sorted(n for n, times in c.lines[name].items() if not times)
        functions = sorted({f for (_, _, f), times in c.functions[name].items() if not times} -
                           {f for (_, _, f), times in c.functions[name].items() if times})
        if missed:
            print(f"{name}: {len(missed)} of {len(c.lines[name])}: {spans(missed)}" + "".join(f", {f}()" for f in functions))


def main():
    c = Coverage(sys.argv[1:])
    if not c.lines:
        sys.exit("error: there is no .gcda file in " + " ".join(sys.argv[1:]) + "; HINT: make coverage")
    left_out = {key: c.leave_out(*key.split()) for key in LEFT_OUT}
    total = print_shares(c)
    print_missed(c)
    print("\nleft out, because a process ends in them before it has written its counts:")
    for key, missed in left_out.items():
        if missed < 0:
            sys.exit(f"error: LEFT_OUT has {key}, which is not there")
        print(f"{key}(): {missed} lines: {LEFT_OUT[key]}")
    print(f"\n{total:.1f}% of lines; the aim is {AIM}%")
    sys.exit(total < AIM)


if __name__ == "__main__":
    main()
