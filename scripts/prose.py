#!/usr/bin/env python3
"""Finds the words of scripts/prose.txt in comments, messages and pages.

  scripts/prose.py             compares each file's count with scripts/prose_counts.txt; counts may only fall
  scripts/prose.py FILE...     prints each match in these files, with its replacement
  scripts/prose.py --write     writes the current counts
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTS = ROOT / "scripts/prose_counts.txt"
OURSELVES = ("scripts/prose.txt", "scripts/prose_counts.txt", "dev/CHANGELOG.md", "dev/LOG.md")
C_SOURCE = re.compile(r'//(?P<comment>[^\n]*)|"(?P<string>(?:[^"\\\n]|\\.)*)"|\'(?:[^\'\\\n]|\\.)+\'')
HASH_COMMENT = re.compile(r"(?:^|(?<=\s))#(?P<comment>[^\n]*)", re.M)
CODE_BLOCK = re.compile(r"^```.*?^```|`[^`\n]+`", re.M | re.S)


def patterns():
    for line in (ROOT / "scripts/prose.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, replacement = line.split("\t")
            yield re.compile(pattern, re.I if not re.search("[A-Z]", re.sub(r"\\.", "", pattern)) else 0), replacement


def passages(path):
    """Yields (line, text): comments and strings of a source file, a page without code."""
    text = (ROOT / path).read_text(errors="replace")
    if path.endswith(".md"):
        blanked = CODE_BLOCK.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        yield from enumerate(blanked.splitlines(), 1)
        return
    c = path.endswith((".h", ".cuh", ".cu", ".cpp", ".inl"))
    for match in (C_SOURCE if c else HASH_COMMENT).finditer(text):
        words = match["comment"] or (match["string"] if c else None)
        if words and " " in words.strip():
            yield text.count("\n", 0, match.start()) + 1, words.strip()


def found(path, rules):
    for line, text in passages(path):
        for pattern, replacement in rules:
            for match in pattern.finditer(text):
                yield line, match[0].strip(), replacement


def files():
    kinds = ["*.md", "*.h", "*.cuh", "*.cu", "*.cpp", "*.inl", "*.sh", "*.py", "Makefile"]
    names = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in names.splitlines() if name not in OURSELVES]


def main():
    rules = list(patterns())
    if sys.argv[1:] and sys.argv[1] != "--write":
        for path in sys.argv[1:]:
            for line, words, replacement in found(path, rules):
                print(f"{path}:{line}: '{words}': {replacement}")
        return 0
    now = {path: sum(1 for _ in found(path, rules)) for path in files()}
    if sys.argv[1:]:
        COUNTS.write_text("".join(f"{count} {path}\n" for path, count in sorted(now.items()) if count))
        print(sum(now.values()), "left")
        return 0
    allowed = {path: int(count) for count, path in (line.split() for line in COUNTS.read_text().splitlines())}
    worse = [path for path, count in now.items() if count > allowed.get(path, 0)]
    for path in worse:
        print(f"{path}: {now[path]} words of scripts/prose.txt, {allowed.get(path, 0)} allowed:")
        for line, words, replacement in found(path, rules):
            print(f"  {path}:{line}: '{words}': {replacement}")
    better = [path for path in allowed if now.get(path, 0) < allowed[path]]
    if better:
        print(f"fewer than allowed in {', '.join(better)}: scripts/prose.py --write")
    return 1 if worse or better else 0


if __name__ == "__main__":
    sys.exit(main())
