#!/usr/bin/env python3
"""Training a tokenizer on one core: ours, Hugging Face's, rustbpe and SentencePiece, with the same text and size.

    $(dev/interop/venv.sh tokenizers sentencepiece rustbpe) dev/bench/tokenizer_training.py --program build/cpu-bf16/train_gpt TEXT

Prints for each the seconds, the text's MB/s, and the bytes per token on every tenth line, which is held out. Lines are
documents. The programs run in turn, --rounds times; the shortest time counts.
"""
import argparse
import io
import json
import os
import pathlib
import subprocess
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
import rustbpe
import sentencepiece
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", required=True)
    p.add_argument("--vocab-size", type=int, default=8000)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("text")
    a = p.parse_args()
    lines = [line for line in pathlib.Path(a.text).read_text(errors="replace").split("\n") if line.strip()]
    held_out, lines = lines[::10], [line for i, line in enumerate(lines) if i % 10]
    size, held_size = (sum(len(line.encode()) for line in some) for some in (lines, held_out))
    work = pathlib.Path(tempfile.mkdtemp())
    (work / "text.jsonl").write_text("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines))

    def ours(kind):
        subprocess.run([a.program, "tokenizer", "--type", kind, "--input", work / "text.jsonl", "--vocab-size", str(a.vocab_size),
                        "--special-tokens", "<|endoftext|>", "--output", work / kind, "--threads", "1"], check=True, capture_output=True)
        t = Tokenizer.from_file(str(work / kind / "tokenizer.json"))
        return lambda line: t.encode(line, add_special_tokens=False).ids

    def huggingface():
        t = Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=a.vocab_size, special_tokens=["<|endoftext|>"], show_progress=False,
                                                         initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        return lambda line: t.encode(line).ids

    def rust():
        t = rustbpe.Tokenizer()
        t.train_from_iterator(iter(lines), a.vocab_size - 1, pattern=GPT2)
        return t.encode

    def sp():
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=out, model_type="unigram", vocab_size=a.vocab_size, byte_fallback=True, num_threads=1,
            minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            max_sentence_length=1000000)
        return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).encode

    rows = {"BPE, ours": lambda: ours("bpe"), "BPE, Hugging Face": huggingface, "BPE, rustbpe": rust, "unigram, ours": lambda: ours("unigram"),
            "unigram, SentencePiece": sp}
    seconds, tokens = {name: 1e9 for name in rows}, {}
    for _ in range(a.rounds):
        for name, train in rows.items():
            begin = time.perf_counter()
            encode = train()
            seconds[name] = min(seconds[name], time.perf_counter() - begin)
            tokens[name] = sum(len(encode(line)) for line in held_out)
    print(f"{size / 1e6:.1f} MB of text, {a.vocab_size} tokens")
    for name in rows:
        print(f"| {name} | {seconds[name]:.2f} s | {size / 1e6 / seconds[name]:.2f} MB/s | {held_size / tokens[name]:.3f} bytes per token |", flush=True)


main()
