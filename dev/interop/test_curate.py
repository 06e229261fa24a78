"""train_gpt curate compared with datatrove, Hugging Face's pipeline for FineWeb: part of `make test-interop`.

Both programs apply the rules of Gopher, C4 and FineWeb to thousands of generated documents, most of them near the
thresholds. Each document must be kept by both or dropped by both under the same rule, and C4 must keep the same lines. In
datatrove these are replaced by ours: words and sentences, which it delegates to spaCy (a word is any text between white
space; a sentence ends with . ? ! or 。), and two characters: a single • is not a word, and a line of C4 may end with 。.

    test_curate.py BUILD     a folder with train_gpt; ends with `N passed, N failed`
"""

import collections
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.filters import c4_filters, fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter

PROGRAM = Path(sys.argv[1]).resolve() / "train_gpt"
work = Path(tempfile.mkdtemp(prefix="curate_"))
passed = failed = 0

RULES = {  # datatrove's names -> ours
    "gopher_short_doc": "gopher-min-words", "gopher_long_doc": "gopher-max-words",
    "gopher_below_avg_threshold": "gopher-min-word-length", "gopher_above_avg_threshold": "gopher-max-word-length",
    "gopher_too_many_hashes": "gopher-hashes", "gopher_too_many_ellipsis": "gopher-ellipses",
    "gopher_too_many_bullets": "gopher-bullets", "gopher_too_many_end_ellipsis": "gopher-ellipsis-lines",
    "gopher_below_alpha_threshold": "gopher-alphabetic-words", "gopher_enough_stop_words": "gopher-stop-words",
    "dup_para_frac": "gopher-repeated-paragraphs", "dup_para_char_frac": "gopher-repeated-paragraph-characters",
    "dup_line_frac": "gopher-repeated-lines", "dup_line_char_frac": "gopher-repeated-line-characters",
    **{f"top_{n}_gram": f"gopher-top-{n}-gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"gopher-repeated-{n}-grams" for n in range(5, 11)},
    "lorem_ipsum": "c4-lorem-ipsum", "curly_bracket": "c4-curly-bracket", "too_few_sentences": "c4-sentences",
    "line_punct_ratio": "fineweb-line-ends", "short_line_ratio": "fineweb-short-lines",
    "char_dup_ratio": "fineweb-repeated-line-characters", "list_ratio": "fineweb-lines-per-word", "empty": "fineweb-line-ends",
}  # fmt: skip


def sentences(line, language=None):
    return [part for part in re.split(r"(?<=[.?!])\s+|(?<=。)\s*", line) if re.search(r"[^.?!。\s]", part)]


for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
    module.split_into_words = lambda text, language=None: text.split()
c4_filters.split_into_sentences = sentences
c4_filters.END_PUNCTUATION += ("。",)
gopher_quality_filter.PUNCTUATION_SET |= {"•"}


def check(name, good, detail=""):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print(("ok: " if good else "FAILED: ") + name + ("" if good else f"\n{detail}"), flush=True)


def make_text(r):
    """One document: words, lines and paragraphs with a random amount of each defect."""
    words = ["the", "be", "to", "of", "and", "that", "have", "with"] if r.random() < 0.9 else []
    words += ["".join(r.choice("abcdefghiknorstuvwyé") for _ in range(r.choice([2, 3, 5, 7, 9, 14]))) for _ in range(r.choice([3, 20, 200, 2000]))]
    if r.random() < 0.15:
        words = [w * r.choice([1, 3]) for w in words]
    odd = r.choice([0, 0, 0, 0.05, 0.12, 0.25])
    oddities = r.choice([["#"], ["..."], ["…"], ["12", "3.5", "2024"], ["-", "—", "!"], ["x", "a"], ["{"], ["#", "...", "7"]])
    line_start = r.choice(["", "", "", "- ", "• ", "  - "])
    line_end = r.choice([".", ".", "!", "", "...", "…", '"', " the end?", ";", "。", "[1].", "[edit]"])
    extra = r.choice(["", "", "", "lorem ipsum dolor", "Please enable JavaScript.", "We use cookies here.", "Here is Lorem Ipsum again."])
    lines, phrases = [], []
    for _ in range(r.choice([1, 2, 6, 15, 40])):
        line = [r.choice(oddities) if r.random() < odd else r.choice(words) for _ in range(r.choice([1, 2, 5, 12, 30]))]
        if phrases and r.random() < 0.3:
            line += r.choice(phrases)
        if r.random() < 0.2:
            phrases.append(line[: r.choice([2, 3, 5, 8, 12])])
        if r.random() < 0.3 and len(line) > 4:
            line[len(line) // 2] += "."
        text = (line_start if r.random() < 0.93 else "") + " ".join(line) + (line_end if r.random() < 0.7 else "")
        lines.append(text.replace("{", "{ x }") if r.random() < 0.5 else text.replace("{", "x"))
        if r.random() < 0.12:
            lines.append(r.choice(lines))
    if extra:
        lines.insert(r.randrange(len(lines) + 1), extra)
    out = lines[0]
    for line in lines[1:]:
        out += r.choice(["\n", "\n", "\n\n", "\n\n\n"]) + line
    return out


def ours(texts, rules, *options):
    """The rule that dropped each text, None for kept ones; and their texts."""
    name = f"{rules}{len(list(work.iterdir()))}"
    with open(work / f"{name}.jsonl", "w") as f:
        f.writelines(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts))
    command = [PROGRAM, "curate", "--input", work / f"{name}.jsonl", "--output", work / name, "--heuristics", rules,
               "--output-format", "jsonl", *options]
    done = subprocess.run([*map(str, command), "--samples", "1000"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    found = [None] * len(texts)
    for stage in json.load(open(work / name / "curate.json"))["counts"]["stages"]:
        for rule, counts in stage["rules"].items():
            for sample in counts["samples"]:
                found[sample["number"]] = rule
    lines = [json.loads(line)["text"] for shard in sorted((work / name / "data").glob("part-*.jsonl")) for line in open(shard)]
    return found, dict(zip([i for i, rule in enumerate(found) if rule is None], lines, strict=True))


def theirs(texts, filters):
    found, kept = [], {}
    for i, text in enumerate(texts):
        document, rule = Document(text=text, id=str(i)), None
        for f in filters:
            result = f.filter(document)
            if result is not True and (result is False or result[0] is False):
                rule = RULES[result[1]]
                break
        found.append(rule)
        if rule is None:
            kept[i] = document.text
    return found, kept


r = random.Random(7)
texts = [t for t in (make_text(r) for _ in range(6000)) if t.strip()]
sets = {
    "gopher": [gopher_quality_filter.GopherQualityFilter(), gopher_repetition_filter.GopherRepetitionFilter()],
    "c4": [c4_filters.C4QualityFilter()],
    "fineweb": [fineweb_quality_filter.FineWebQualityFilter(char_duplicates_ratio=0.1)],
}
for name, filters in sets.items():
    found, kept = [], {}
    for begin in range(0, len(texts), 1000):  # the report keeps at most 1,000 documents per rule
        f, k = ours(texts[begin : begin + 1000], name)
        found += f
        kept |= {begin + i: text for i, text in k.items()}
    expected, expected_kept = theirs(texts, filters)
    different = [(i, a, b) for i, (a, b) in enumerate(zip(found, expected)) if a != b]
    check(f"{name}: {len(texts)} documents, each dropped by the same rule", not different,
          "\n".join(f"ours {a}, datatrove {b}: {texts[i]!r:.400}" for i, a, b in different[:5]) + f"\n{len(different)} in all")
    check(f"{name}: the same texts are left", kept == expected_kept,
          "\n".join(f"{kept.get(i)!r:.300}\n{expected_kept.get(i)!r:.300}" for i in range(len(texts)) if kept.get(i) != expected_kept.get(i))[:3000])
    counts = collections.Counter(expected)
    rules = {ours for ours in RULES.values() if ours.startswith(name)} - {"gopher-max-words"}
    check(f"{name}: every rule was met", rules <= set(counts), f"never: {rules - set(counts)}; {counts}")
    print("   ", ", ".join(f"{rule or 'kept'} {n}" for rule, n in counts.most_common()))
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
