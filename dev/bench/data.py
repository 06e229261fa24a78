#!/usr/bin/env python3
"""Speed of encoding: ours, tiktoken and Hugging Face's tokenizers on the same texts and vocabulary: `make bench-data`.

All three use one vocabulary of GPT-2's size, 50,257 tokens, learned by our trainer from every other block of Debian's
texts; the blocks in between are encoded. In each round each program runs by itself in turn: it starts, loads, and encodes
all documents several times. Cold is the first pass, without any word seen before; warm are later ones. Figures are the best
of the rounds, as other processes only add time. Tokens are compared before any time is reported.

    data.py build/cpu-bf16 [--megabytes 2] [--rounds 3]         its train_gpt and encode_bench
    data.py --encode LIBRARY TOKENIZER FILE THREADS PASSES     one run of a round
"""
import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIBRARIES = ("ours", "tiktoken", "tokenizers")
BLOCK = 1 << 16
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def blocks_of(text):
    """The text in blocks of 64 KiB, cut at lines."""
    blocks = [""]
    for line in text.replace("\0", "").splitlines(keepends=True):
        if len(blocks[-1]) >= BLOCK:
            blocks.append("")
        blocks[-1] += line
    return blocks


def texts(characters):
    """English, Japanese and C++ texts of Debian's packages."""
    def headers():
        for folder in ("/usr/include/c++", "/usr/include"):
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file() and path.stat().st_size < 1 << 20:
                    yield path.read_text(errors="ignore")

    def first(parts):
        text = ""
        for part in itertools.takewhile(lambda _: len(text) < 2 * characters, parts):
            text += part
        return text[:2 * characters]
    bible = subprocess.run(["bible", "gen1:1-rev22:21"], capture_output=True, text=True, check=True).stdout
    japanese = gzip.open("/usr/share/debian-reference/debian-reference.ja.txt.gz", "rt").read()
    return {"English": first([bible]), "Japanese": first([japanese]), "C++": first(headers())}


def encode(library, tokenizer, file, threads, passes):
    """The same as encode_bench, with another library."""
    documents = Path(file).read_bytes().decode().split("\0")[:-1]
    if library == "tiktoken":
        import tiktoken
        vocabulary = json.loads(Path(tokenizer).read_text())["model"]["vocab"]
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        byte = {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}
        ranks = {bytes(byte[c] for c in token): i for token, i in vocabulary.items() if not token.startswith("<|")}
        coder = tiktoken.Encoding("ours", pat_str=GPT2, mergeable_ranks=ranks, special_tokens={t: i for t, i in vocabulary.items() if t.startswith("<|")})
        run = lambda: coder.encode_ordinary_batch(documents, num_threads=threads)
        if threads == 1:
            run = lambda: [coder.encode_ordinary(d) for d in documents]
    else:
        os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true" if threads > 1 else "false")
        import tokenizers
        coder = tokenizers.Tokenizer.from_file(tokenizer)
        run = lambda: coder.encode_batch_fast(documents, add_special_tokens=False)
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    if library == "tokenizers":
        result = [r.ids for r in result]
    print(json.dumps({"seconds": seconds, "tokens": result}))


def main():
    if sys.argv[1:2] == ["--encode"]:
        library, tokenizer, file, threads, passes = sys.argv[2:]
        return encode(library, tokenizer, file, int(threads), int(passes))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="the folder of train_gpt and encode_bench")
    parser.add_argument("--megabytes", type=float, default=2, help="at most, of each text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    venv = Path(__file__).parent.parent / "interop" / "venv.sh"
    python = subprocess.run([venv, "tiktoken", "tokenizers"], check=True, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        files, learned = {}, Path(folder, "learned.txt")
        with open(learned, "w") as out:
            for name, text in texts(int(options.megabytes * 1e6)).items():
                blocks = blocks_of(text)
                out.write("".join(blocks[0::2]))
                files[name] = Path(folder, name)
                files[name].write_bytes("".join(b + "\0" for b in blocks[1::2]).encode())
        learn = ["--input", learned, "--output", folder, "--vocab-size", "50257", "--min-frequency", "1"]
        subprocess.run([options.build / "train_gpt", "tokenizer", *learn], check=True, capture_output=True)
        tokenizer = str(Path(folder, "tokenizer.json"))
        print("MB/s, cold / warm:\n\n| text | MB | cores | " + " | ".join(LIBRARIES) + " | tokens |")
        print("| --- " * (len(LIBRARIES) + 4) + "|")
        for (name, file), threads in itertools.product(files.items(), options.threads):
            times, tokens = {library: [] for library in LIBRARIES}, {}
            for _, library in itertools.product(range(options.rounds), LIBRARIES):
                program = [options.build / "encode_bench"] if library == "ours" else [python, __file__, "--encode", library]
                done = subprocess.run([*program, tokenizer, file, str(threads), "4"], check=True, capture_output=True)
                result = json.loads(done.stdout)
                times[library].append((result["seconds"][0], min(result["seconds"][1:])))
                tokens[library] = result["tokens"]
            equal = "equal" if all(t == tokens["ours"] for t in tokens.values()) else "DIFFERENT"
            size = file.stat().st_size / 1e6
            speed = [" / ".join(f"{size / min(t):.1f}" for t in zip(*times[library])) for library in LIBRARIES]
            print(f"| {name} | {size:.1f} | {threads} | " + " | ".join(speed) + f" | {equal} |", flush=True)
            if equal != "equal":
                sys.exit(f"the tokens of {name} differ")


if __name__ == "__main__":
    main()
