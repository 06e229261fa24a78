"""The metrics of generated answers compared with sacrebleu, rouge-score and SQuAD's script: part of `make test-interop`.

Hundreds of hostile pairs of a text and its references: empty ones, Unicode, punctuation, numbers, repeated words, lines,
several references. Every number must be equal to 1e-9; and NLTK's stemmer must equal ours on 20,000 generated words.

    test_text_metrics.py BUILD_FP32            a folder with dump_scores; ends with `N passed, N failed`
    test_text_metrics.py BUILD_FP32 --golden   prints rows of test/test_text_metrics.cpp instead
"""

import collections
import json
import logging
import random
import re
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import nltk.stem.porter
import sacrebleu
from rouge_score import rouge_scorer

import cases
from cases import case

PROGRAM = Path(sys.argv[1]).resolve() / "dump_scores"
ROUGE = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
PIECES = """the a an The cat cats running runs nationally relational conditional hopping agreed dying skies news proceed happily
    it's don't U.S. 3.14 1,000 -5 10-20 2019-11-24 a.b ... .. . , ,, ; : ! ? " ' ( ) [ ] { } < > / \\ | @ # $ % ^ & * _ + = ~ `
    &quot; &amp; &lt; &gt; &amp;quot; <skipped> - -- – — « » “ ” ’ … é É ß ẞ ñ naïve Ünïcode ΑΒΓ σίγμα İstanbul K ﬁ Å ½ ² ٣ 東京 は です 。
    、 한국어 مرحبا 😀 👨‍👩‍👧 e\u0301 a\u0301 \u00a0 \u3000 \u2028 \u200b \u00ad \u001c x1 1x 1.x x.1 1-x x-1 100% $5 C++ AT&T""".split(" ")
PIECES = [piece.strip("\n ") or "\u00a0" for piece in PIECES] + ["\n", "\n\n", "-\n", " ", "  ", "\t", "\r\n", "\u00a0", "\u2028"]


def squad(text):
    """normalize_answer of SQuAD's evaluate-v2.0.py."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text).split())


def squad_f1(reference, text):
    expected, words = squad(reference).split(), squad(text).split()
    same = sum((collections.Counter(expected) & collections.Counter(words)).values())
    if not expected or not words:
        return float(expected == words)
    if same == 0:
        return 0.0
    precision, recall = same / len(words), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def hostile_text(most=14):
    return "".join(random.choice(PIECES) + random.choice([" ", " ", " ", ""]) for _ in range(random.randrange(most)))


def hostile_pair():
    references = [hostile_text() for _ in range(random.choice([1, 1, 1, 2, 3, 5]))]
    kind = random.randrange(5)
    if kind == 0:
        return hostile_text(), references
    words = re.split(r"( )", random.choice(references))
    if kind == 1:
        random.shuffle(words)
    elif kind == 2:
        words += words[: len(words) // 2]
    elif kind == 3:
        words = [word if random.random() < 0.8 else random.choice(PIECES) for word in words]
    return "".join(words), references


def expected(text, references):
    found = {"exact_match": max(float(squad(r) == squad(text)) for r in references), "f1": max(squad_f1(r, text) for r in references),
             "bleu": sacrebleu.BLEU().corpus_score([text], [[r] for r in references]).score}
    for end, stem in (("", False), (" stemmed", True)):
        scores = rouge_scorer.RougeScorer(ROUGE, use_stemmer=stem).score_multi(references, text)
        found |= {name + end: score.fmeasure for name, score in scores.items()}
    return found


def ours(pairs):
    with tempfile.TemporaryDirectory() as folder:
        path, result = Path(folder, "pairs.jsonl"), Path(folder, "result.json")
        path.write_text("".join(json.dumps({"text": text, "references": references}) + "\n" for text, references in pairs))
        subprocess.run([PROGRAM, path, result], check=True)
        return json.loads(result.read_text())


def near(name, mine, theirs):
    assert abs(mine - theirs) <= 1e-9 * max(1, abs(theirs)), f"{name}: {mine} here, {theirs} there"


def corpus_bleu(pairs):
    most = max(len(references) for _, references in pairs)
    streams = [[references[i] if i < len(references) else None for _, references in pairs] for i in range(most)]
    return sacrebleu.BLEU().corpus_score([text for text, _ in pairs], streams).score


def print_golden():
    pairs = [("The cat sat on the mat.", ["A cat sat on the mat!", "the cat is on the mat"]), ("", ["x"]), ("", [""]),
             ("the", ["an"]), ("It cost $1,000.50 (10-20% more).", ["It costs $1,000.50, 10-20% more."]),
             ("dogs were running\nhappily in skies", ["a dog runs happily\nin the sky", "running dogs"]),
             ("the the the the the the the", ["the cat is on the mat", "there is a cat on the mat"]),
             ("Ünïcode «naïve»  &quot;text&quot; 東京", ["ünïcode naïve \"text\" 東京"])]
    for text, references in pairs:
        numbers = ", ".join(repr(value) for value in expected(text, references).values())
        print(f"        {{{json.dumps(text, ensure_ascii=False)}, {{{', '.join(json.dumps(r, ensure_ascii=False) for r in references)}}}, {{{numbers}}}}},")
    print("corpus", repr(corpus_bleu(pairs)))


logging.disable()
random.seed(7)
if sys.argv[2:] == ["--golden"]:
    print_golden()
    sys.exit()

# At a word's end Python's lower() turns a Greek sigma into another letter, the one known difference.
pairs = [pair for pair in (hostile_pair() for _ in range(1500)) if "Σ" not in "".join([pair[0], *pair[1]])]
result, theirs = ours(pairs), [expected(*pair) for pair in pairs]
for name in expected("", [""]):
    with case(f"{name} of {len(pairs)} pairs"):
        for pair, mine, other in zip(pairs, result["pairs"], theirs):
            near(f"{name} of {pair}", mine[name], other[name])
for first, last in ((0, 100), (100, 101), (200, 600), (0, len(pairs))):
    with case(f"BLEU of the texts {first} to {last} together"):
        near("BLEU", ours(pairs[first:last])["bleu"], corpus_bleu(pairs[first:last]))
with case("no text"):
    near("BLEU", ours([("", ["a b c d"])] * 3)["bleu"], 0)

SUFFIXES = """s es ies sses ss ed eed ied ing y ational tional enci anci izer bli alli entli eli ousli ization ation ator alism
    iveness fulness ousness aliti iviti biliti fulli logi icate ative alize iciti ical ful ness al ance ence er ic able ible ant
    ement ment ent ion sion tion ou ism ate iti ous ive ize e le ll lle""".split()
stemmer = nltk.stem.porter.PorterStemmer()
words = ["sky", "skies", "dying", "lying", "tying", "news", "innings", "outing", "cannings", "howe", "succeed", "exceed", "proceed"]
while len(words) < 20000:
    words.append("".join(random.choices("aeiouybcdlmnrstwxz7", k=random.randrange(7))) + "".join(random.choices(SUFFIXES, k=random.choice([0, 1, 1, 2]))))
words = [word for word in words if word]
with case(f"the stems of {len(words)} words"):
    stems = ours([(word, [""]) for word in words])["pairs"]
    for word, mine in zip(words, stems):
        theirs = stemmer.stem(word) if len(word) > 3 else word
        assert mine["stems"] == [theirs], f"{word}: {mine['stems']} here, {theirs} there"
sys.exit(cases.summary())
