#!/usr/bin/env python3
"""Which lines and branches of llmc/ and train_gpt.cu the tests have run: `make coverage`.

A line counts as run if any program ran it, as a branch if any took it; branches that only exceptions take are left out. Templates
and inline functions count once, whatever they were compiled for. What a killed process ran is not counted.

    coverage.py FOLDER...      with programs that were built with --coverage and have run; lists what 95% of lines is not reached by
"""
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

AIM = 95
ROOT = Path(__file__).resolve().parent.parent


def read(folders: list[str]):
    """Per file {line: times} and {(line, branch): times}, over all programs."""
    lines, branches = defaultdict(lambda: defaultdict(int)), defaultdict(lambda: defaultdict(int))
    for data in sorted(path for folder in folders for path in Path(folder).rglob("*.gcda")):
        output = subprocess.run(["gcov", "--json-format", "--stdout", "--branch-probabilities", data], stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL, check=True).stdout
        for record in output.splitlines():
            for file in json.loads(record)["files"]:
                path = (ROOT / file["file"]).resolve()
                if not path.is_relative_to(ROOT / "llmc") and path != ROOT / "train_gpt.cu":
                    continue
                name = str(path.relative_to(ROOT))
                for line in file["lines"]:
                    lines[name][line["line_number"]] += line["count"]
                    for i, branch in enumerate(b for b in line["branches"] if not b["throw"]):
                        branches[name][line["line_number"], i] += branch["count"]
    return lines, branches


def share(counts) -> tuple[int, int]:
    return sum(1 for n in counts if n), len(counts)


def ranges(numbers: list[int]) -> str:
    """[3, 4, 5, 9] -> "3-5 9"."""
    runs = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def main():
    lines, branches = read(sys.argv[1:])
    if not lines:
        sys.exit("error: there is no .gcda file in " + " ".join(sys.argv[1:]) + "; HINT: make coverage")
    rooms = defaultdict(list)
    for name in sorted(lines):
        rooms[str(Path(name).parent) if name.count("/") > 1 else name].append(name)
    print(f"{'':28} {'lines':>8} {'run':>7} {'branches':>9} {'taken':>7}")
    total = []
    for room, names in [*rooms.items(), ("all", list(lines))]:
        run, all_lines = share([n for name in names for n in lines[name].values()])
        taken, all_branches = share([n for name in names for n in branches[name].values()])
        total = 100 * run / all_lines
        print(f"{room:28} {all_lines:8} {total:6.1f}% {all_branches:9} {100 * taken / max(all_branches, 1):6.1f}%")
    print("\nlines that no test has run:")
    for name in sorted(lines):
        missed = sorted(n for n, times in lines[name].items() if not times)
        if missed:
            print(f"{name}: {len(missed)} of {len(lines[name])}: {ranges(missed)}")
    print(f"\n{total:.1f}% of lines; the aim is {AIM}%")
    sys.exit(total < AIM)


if __name__ == "__main__":
    main()
