#!/usr/bin/env python3
"""Golden encodings of the three pre-tokenizers, made with Hugging Face's tokenizers.

Trains a byte-level BPE tokenizer of 600 tokens on test/golden/tokenizer/text.txt for each pre-tokenizer, encodes a list of texts
with it, and writes test/golden/tokenizer/{gpt2,llama3,bloom}.json (the tokenizer) and encodings.json (text -> ids).
The tests train on the same text, compare every token and merge, and encode the same texts.

    pip install tokenizers && python3 dev/ref/tokenizer_golden.py
"""
import json
import pathlib

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

OUT = pathlib.Path(__file__).resolve().parents[2] / "test/golden/tokenizer"
PATTERNS = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "bloom": " ?[^(\\s|[.,!?…。，、।۔،])]+",
}
TEXTS = [
    "",
    " ",
    "a",
    "In the beginning God created the heaven and the earth.",
    "  two spaces, three   spaces and a tab\tand trailing   ",
    "line\nline\n\n\nline\r\nlast\n",
    "I'll don't WE'RE they've 'tis O'Neil",
    "0 12 123 1234 12345678 3.14159 1e-5 0x7f",
    "初めに神は天と地を創造された。地は形なく、むなしく。",
    "Debian リファレンス（バージョン 2）は「ユーザーズガイド」です。ﾊﾝｶｸ Ｗｉｄｅ １２３",
    "emoji: 😀 👍🏽 👩‍👩‍👧‍👦 🇯🇵 ❤️",
    "Ünïcödé é (e + U+0301) ß İ ǅ ﬁ",
    "العربية، עברית हिन्दी। ไทย 한국어",
    "for (int i = 0; i < n; ++i) { x[i] += y[i] * 2; } // sum\n\treturn x->y;",
    "<|endoftext|> is text here",
    "nbsp\u00a0here ideographic\u3000space zero\u200bwidth line\u2028separator",
    "NUL \u0000 and control \u0001\u001f\u007f\u0085",
    "!?...---___***(((]]]",
    "x" * 200 + " " + "the" * 60,
    "(a|b) |c| (|) ((d)",
]


def train(pattern, lines):
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    trainer = trainers.BpeTrainer(vocab_size=600, min_frequency=2, special_tokens=["<|endoftext|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def main():
    text = (OUT / "text.txt").read_bytes().decode()
    encodings = {"texts": TEXTS}
    for name, pattern in {"gpt2": None, **PATTERNS}.items():
        tokenizer = train(pattern, [text])
        tokenizer.save(str(OUT / f"{name}.json"), pretty=False)
        special = tokenizer.token_to_id("<|endoftext|>")
        tokenizer_without_special = json.loads((OUT / f"{name}.json").read_text())
        tokenizer_without_special["added_tokens"] = []  # text that spells a special token is text
        plain = Tokenizer.from_str(json.dumps(tokenizer_without_special))
        encodings[name] = [plain.encode(t).ids for t in TEXTS]
        assert special == 0
    (OUT / "encodings.json").write_text(json.dumps(encodings, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
