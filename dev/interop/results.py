"""The final table of `make test-interop`: for each model family and comparison the largest difference over its models.
Tests append their figures to the file named by $INTEROP_RESULTS, if set.

    results.py FILE     prints the table; the status is 1 if an expected figure is missing
"""

import json
import os
import sys

OF_MODELS = ("load", "logits", "gradients", "train", "write", "reload")
COLUMNS = (*OF_MODELS, "GGUF")


def record(family, figures):
    """`figures`: the largest difference per column, 0 if there is nothing to measure, None if the test failed."""
    if path := os.environ.get("INTEROP_RESULTS"):
        with open(path, "a") as file: file.write(json.dumps([family, figures]) + "\n")


def cell(figures):
    if not figures: return "not run"
    if None in figures: return "FAILED"
    return f"{max(figures):.1e}" if max(figures) else "passed"


def table(lines):
    found = {}  # family: {column: [figure of each model]}
    for family, figures in lines:
        for column, figure in figures.items(): found.setdefault(family, {}).setdefault(column, []).append(figure)
    rows = [["family", "models", *COLUMNS]]
    for family, columns in found.items():
        models = max(len(figures) for figures in columns.values())
        rows.append([family, str(models), *(cell(columns.get(column)) for column in COLUMNS)])
    return rows


def main():
    rows = table(map(json.loads, open(sys.argv[1])))
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows: print("| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |")
    return len(rows) == 2 or any("FAILED" in row for row in rows)


if __name__ == "__main__": sys.exit(main())
