#!/usr/bin/env python3
"""Golden encodings of the three pre-tokenizers and of character tokenizers, from Hugging Face's tokenizers and SentencePiece.

Trains a byte-level BPE tokenizer of 600 tokens on test/golden/tokenizer/text.txt for each pre-tokenizer, encodes a list of
texts with it, and writes test/golden/tokenizer/{gpt2,llama3,bloom}.json (the tokenizer) and encodings.json (text -> ids).
The tests train on the same text, compare every token and merge, and encode the same texts. variants.json has changes to
gpt2.json (JSON Patch, RFC 6902), one per feature of tokenizer.json, and the resulting tokens of hostile texts: as training
data, where special tokens are text, and as prompts.

characters_{bpe,unigram}.model are SentencePiece's, learned from the same text, characters_{bpe,unigram}.json the same for
Hugging Face's library; characters.json has the changes to these, tokens of texts, and the decoded texts.

    pip install tokenizers sentencepiece && python3 dev/ref/tokenizer_golden.py
"""
import contextlib
import io
import json
import pathlib
import tempfile

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

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

HOSTILE = [
    "the <|im_start|> user\n<think> 1234567 </think><|im_end|>\n\nthe end",
    "ab<|im_start|><|im<|im_end|>  <think>\t x<think>y <think>\u3000_<think>",
    "12345 ½² ٣٤٥ a1b22c333",
    "the then that's CAN'T'S we'll 'ſ naïve \u180e \u00a0\u2028x\r\ny $5.00 (a.b) [x]",
    "漢字々かなカナー、العربية हिन्दी 한국어 😀",
    "ますます、12²3½ 1234567 ,,.. x",
]
added = lambda id, content, **flags: {"op": "add", "path": "/added_tokens/-", "value": {
    "id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False, **flags}}
byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
steps = lambda *parts: {"op": "add", "path": "/pre_tokenizer", "value": {"type": "Sequence", "pretokenizers": [*parts, byte_level]}}
split = lambda pattern, behavior="Isolated", invert=False: {
    "type": "Split", "pattern": pattern if isinstance(pattern, dict) else {"Regex": pattern}, "behavior": behavior, "invert": invert}
model = lambda key, value: {"op": "add", "path": f"/model/{key}", "value": value}
before, text, after = ({"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}})
template = {"type": "TemplateProcessing", "single": [before, text, after], "pair": [before, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {t: {"id": t, "ids": [id], "tokens": [t]} for t, id in (("<|im_start|>", 600), ("<|im_end|>", 601))}}
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT = [added(600, "<|im_start|>", special=True), added(601, "<|im_end|>", special=True), added(602, "<|im", special=True)]
VARIANTS = {
    "special tokens": CHAT,
    "template": CHAT + [{"op": "add", "path": "/post_processor", "value": {"type": "Sequence", "processors": [byte_level, template]}}],
    "added tokens that are not special": CHAT + [added(603, "<think>"), added(604, "</think>", normalized=True), added(605, "  ")],
    "lstrip": [added(600, "<think>", lstrip=True)],
    "rstrip": [added(600, "<think>", rstrip=True), added(601, " x")],
    "single_word": [added(600, "<think>", single_word=True), added(601, "22", single_word=True)],
    "normalized tokens come second": [added(600, "k> 1", normalized=True), added(601, "1234"), added(602, "<think", normalized=True)],
    "digits one by one": [steps({"type": "Digits", "individual_digits": True}, split(PATTERNS["llama3"]))],
    "digits together": [steps({"type": "Digits", "individual_digits": False})],
    "sequences that are empty": [{"op": "add", "path": "/normalizer", "value": {"type": "Sequence", "normalizers": []}},
                                 steps({"type": "Sequence", "pretokenizers": []})],
    "possessive": [steps(split(r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s"))],
    "o200k, GPT-OSS": CHAT + [model("ignore_merges", True), steps(split(O200K))],
    "Falcon": [{"op": "add", "path": "/pre_tokenizer", "value": {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"}, {**byte_level, "use_regex": True},
        {"type": "Digits", "individual_digits": False}, split("[0-9][0-9][0-9]")]}}],
    "removed": [steps(split(r"\w+|[^\w\s]+", "Removed", True))],
    "contiguous": [steps(split(r"\d", "Contiguous"), split({"String": "a.b"}, "Removed"))],
    "merged with previous": [steps(split(r"\s", "MergedWithPrevious"))],
    "merged with next": [steps(split(r"[[:space:]]", "MergedWithNext"))],
    "scripts and words": [steps(split(r"[\p{Han}\p{Katakana}]+|^\w\b|\b\w+$|\h{2}+|[a-z[0-9]]{2}?y"))],
    "a pair of merges listed twice": [{"op": "copy", "from": f"/model/merges/{i}", "path": "/model/merges/-"} for i in (0, 3, 5)],
    "ignore_merges": [model("ignore_merges", True), steps(split(r" ?\p{L}+"))],
    "a byte without token": [{"op": "remove", "path": "/model/vocab/Ø"}],
    "unknown token": [{"op": "remove", "path": "/model/vocab/Ø"}, {"op": "remove", "path": "/model/vocab/Ù"}, model("unk_token", "!")],
    "unknown tokens fused": [{"op": "remove", "path": f"/model/vocab/{c}"} for c in "ØÙì"] + [model("unk_token", "!"), model("fuse_unk", True)],
}


def patched(document, patch):
    """JSON Patch, as far as needed here."""
    document = json.loads(json.dumps(document))

    def find(path):
        *parents, last = path.split("/")[1:]
        at = document
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        return at, int(last) if isinstance(at, list) and last != "-" else last

    for change in patch:
        at, key = find(change["path"])
        value = change.get("value")
        if change["op"] == "copy":
            source, i = find(change["from"])
            value = source[i]
        if change["op"] == "remove": del at[key]
        elif isinstance(at, list): at.append(value)
        else: at[key] = value
    return document


def write_variants():
    base = json.loads((OUT / "gpt2.json").read_text())
    lines = []
    for name, patch in VARIANTS.items():
        removed = [c["path"][-1] for c in patch if c["op"] == "remove"]  # ids have no gaps: the last tokens move there
        vocabulary = base["model"]["vocab"]
        last = sorted(vocabulary, key=vocabulary.get)[len(vocabulary) - len(removed):]
        patch = patch + [model(f"vocab/{token}", vocabulary[c]) for token, c in zip(last, removed)]
        tokenizer = Tokenizer.from_str(json.dumps(patched(base, patch)))
        prompts = [tokenizer.encode(t).ids for t in HOSTILE]
        tokenizer.encode_special_tokens = True  # a special token spelled out in text is text
        training = [tokenizer.encode(t, add_special_tokens=False).ids for t in HOSTILE]
        lines.append(json.dumps({"name": name, "patch": patch, "training": training, "prompts": prompts}, separators=(",", ":")))
    (OUT / "variants.json").write_text(f'{{"texts": {json.dumps(HOSTILE)}, "variants": [\n' + ",\n".join(lines) + "\n]}\n")


CHARACTERS = TEXTS + [
    "  <s> the</s>the <s>", "the▁God ▁▁ x", "ﬁ Ａ\u00a0\u3000x e\u0301e\u0302 \u0001\r\n", "<0x41> <unk>x", "𐞃 e\u1df6\u0301 ㋿ İΣ", "日本 の God's  beginning", "   ", "x  ", "12 3.4, 5!"]
INVALID = ["ff", "61ff62", "e381", "20c0af20", "eda080", "f4908080", "e38182e381"]
prepend, spaces = {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
metaspace = lambda scheme, split=True: {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}
sequence = lambda kind, *parts: {"type": "Sequence", kind: list(parts)}
regex = lambda pattern, content: {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
put = lambda key, value: {"op": "add", "path": "/" + key, "value": value}
normalizer = lambda *parts: put("normalizer", sequence("normalizers", *parts))
pre_tokenizer = lambda *parts: put("pre_tokenizer", sequence("pretokenizers", *parts))
decoder = lambda *parts: put("decoder", sequence("decoders", *parts))
fallback, fuse = {"type": "ByteFallback"}, {"type": "Fuse"}
llama = decoder({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, fallback, fuse, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
step = lambda type, **fields: {"type": type, **fields}
OF_CHARACTERS = {
    "Llama 2": ("bpe", [normalizer(prepend, spaces), llama]),
    "Mistral": ("bpe", [put("pre_tokenizer", metaspace("first", False)), llama]),
    "words": ("bpe", [put("pre_tokenizer", metaspace("always")), decoder(fallback, metaspace("always"))]),
    "no space before": ("bpe", [put("pre_tokenizer", metaspace("never")), decoder(fallback, metaspace("never"))]),
    "steps": ("bpe", [normalizer(step("Strip", strip_left=True, strip_right=True), step("NFD"), step("Lowercase"), regex(" {2,}", "_")),
                      pre_tokenizer(metaspace("first"), step("Digits", individual_digits=True), step("Punctuation", behavior="MergedWithPrevious")),
                      decoder(fallback, metaspace("first"))]),
    "ignore_merges": ("bpe", [model("ignore_merges", True), put("pre_tokenizer", metaspace("always")), decoder(fallback, metaspace("always"))]),
    "unknown tokens": ("bpe", [model("byte_fallback", False), pre_tokenizer(step("Whitespace")), decoder(fuse)]),
    "unknown tokens apart": ("bpe", [model("byte_fallback", False), model("fuse_unk", False), pre_tokenizer(step("WhitespaceSplit")), decoder(fuse)]),
    "unigram": ("unigram", [put("pre_tokenizer", metaspace("always")), decoder(fallback, metaspace("always"))]),
    "unigram, NFKC": ("unigram", [put("normalizer", step("NFKC")), pre_tokenizer(metaspace("first", False), split(r"\p{N}|[\p{Han}\p{Hiragana}]+|▁*[a-z]+")), llama]),
    "unigram, unknown tokens": ("unigram", [model("byte_fallback", False), put("normalizer", sequence("normalizers", step("NFKD"), step("NFC"))),
                                            pre_tokenizer(step("WhitespaceSplit"), metaspace("always")), put("decoder", metaspace("always"))]),
    "unigram, Precompiled": ("unigram", [normalizer(step("Precompiled", precompiled_charsmap="CHARSMAP"), regex(" {2,}", " ")),
                                         put("pre_tokenizer", metaspace("always")), decoder(fallback, metaspace("always"))]),
}
RULES = [("ﬁ", "fi"), ("Ａ", "A"), ("\u00a0", " "), ("\u3000", " "), ("e\u0301", "é"), ("\u0001", ""), ("\r", " "), ("\n", " "), ("\t", " ")]


def train_sentencepiece(type, **options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((OUT / "text.txt").read_text().splitlines()), model_writer=out, model_type=type, vocab_size=500, byte_fallback=True,
        character_coverage=0.99, num_threads=1, minloglevel=2, hard_vocab_limit=False, user_defined_symbols=["<user>"], **options)
    return out.getvalue()


def of_huggingface(type, sp):
    pieces = [sp.id_to_piece(i) for i in range(sp.vocab_size())]
    if type == "unigram":
        tokenizer = Tokenizer(models.Unigram([(p, sp.get_score(i)) for i, p in enumerate(pieces)], 0, byte_fallback=True))
    else:
        ids = {p: i for i, p in enumerate(pieces)}
        merges = [(i, p[:n], p[n:]) for i, p in enumerate(pieces) for n in range(1, len(p)) if p[:n] in ids and p[n:] in ids]
        merges = sorted(merges, key=lambda m: (m[0], ids[m[1]], ids[m[2]]))
        tokenizer = Tokenizer(models.BPE(ids, [m[1:] for m in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<user>", normalized=False), AddedToken("God", normalized=True)])
    return tokenizer


def write_characters():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # the model contains the file's name
        numbers = lambda s: " ".join(f"{ord(c):X}" for c in s)
        pathlib.Path("rules.tsv").write_text("".join(f"{numbers(a)}\t{numbers(b)}\n" for a, b in RULES))
        trained = {"unigram": train_sentencepiece("unigram", normalization_rule_tsv="rules.tsv"),
                   "bpe": train_sentencepiece("bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)}
    rows, base = [], {}
    for type, proto in trained.items():
        (OUT / f"characters_{type}.model").write_bytes(proto)
        sp = sentencepiece.SentencePieceProcessor(model_proto=proto)
        texts = [t.encode() for t in CHARACTERS] + [bytes.fromhex(h) for h in INVALID]
        tokens = [sp.encode(t) for t in texts]
        rows.append({"model": f"characters_{type}.model", "tokens": tokens, "decoded": [sp.decode(ids) for ids in tokens]})
        base[type] = of_huggingface(type, sp)
        base[type].save(str(OUT / f"characters_{type}.json"), pretty=False)
    normalizer_spec = sentencepiece_charsmap(trained["unigram"])
    for name, (type, patch) in OF_CHARACTERS.items():
        patch = json.loads(json.dumps(patch).replace("CHARSMAP", normalizer_spec))
        tokenizer = Tokenizer.from_str(json.dumps(patched(json.loads(base[type].to_str()), patch)))
        tokens = [tokenizer.encode(t, add_special_tokens=False).ids for t in CHARACTERS]
        decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in tokens]
        rows.append({"name": name, "base": f"characters_{type}.json", "patch": patch, "tokens": tokens, "decoded": decoded})
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (OUT / "characters.json").write_text(f'{{"texts": {json.dumps(CHARACTERS)},\n"invalid": {json.dumps(INVALID)},\n"rows": [\n{text}\n]}}\n')


def sentencepiece_charsmap(proto):
    tokenizer = Tokenizer(models.Unigram([("a", 0.0)], 0))
    at = proto.index(b"user_defined\x12") if b"user_defined\x12" in proto else -1  # NormalizerSpec: name, precompiled_charsmap
    length, shift, i = 0, 0, at + len(b"user_defined\x12")
    while True:
        length |= (proto[i] & 127) << shift
        shift, i = shift + 7, i + 1
        if proto[i - 1] < 128: break
    tokenizer.normalizer = normalizers.Precompiled(proto[i:i + length])
    return json.loads(tokenizer.to_str())["normalizer"]["precompiled_charsmap"]


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
        tokenizer_without_special["added_tokens"] = []  # a special token spelled out in text is text
        plain = Tokenizer.from_str(json.dumps(tokenizer_without_special))
        encodings[name] = [plain.encode(t).ids for t in TEXTS]
        assert special == 0
    (OUT / "encodings.json").write_text(json.dumps(encodings, ensure_ascii=True) + "\n")
    write_variants()
    write_characters()


if __name__ == "__main__":
    main()
