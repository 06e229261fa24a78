#!/usr/bin/env python3
"""Tokens and decoded texts equal Hugging Face's tokenizers' and SentencePiece's.

Trains a model of each type and with each option with these libraries, on texts from Debian's packages, and compares on 2,000
hostile strings and on a page in each of 20 or more languages.

    dev/interop/test_tokenizers.py BUILD        a folder with dump_tokens
"""
import base64
import gettext
import io
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unicodedata

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

BUILD = pathlib.Path(sys.argv[1])
WORK = pathlib.Path(tempfile.mkdtemp())
LANGUAGES = "ja de ru ar hi th ko zh_CN zh_TW el he ta bn fa ka am fr es pt_BR it pl cs tr uk vi fi hu sv da nl id ro".split()
HOSTILE = 2000
failed = 0


def test(name, right, why=""):
    global failed
    failed += not right
    print(("ok: " if right else "FAILED: ") + name + ("" if right else " " + why), flush=True)


# ---- texts ----
def pages():
    """A page in each language: translated messages of the installed programs."""
    found = {}
    for language in LANGUAGES:
        text = ""
        for path in sorted(pathlib.Path("/usr/share/locale", language, "LC_MESSAGES").glob("*.mo")):
            if len(text) > 30000: break
            if path.name.startswith("iso_"): continue
            try: catalog = gettext.GNUTranslations(path.open("rb"))._catalog
            except Exception: continue
            text += "\n".join(v for k, v in catalog.items() if k and isinstance(v, str)) + "\n"
        if len(text) > 2000: found[language] = text[:30000]
    return found


def hostile(special, count=HOSTILE):
    r = random.Random(7)
    assigned = [c for c in range(1, 0x110000) if unicodedata.category(chr(c)) not in ("Cs", "Cn", "Co")]
    marks = [c for c in assigned if unicodedata.category(chr(c))[0] == "M"]
    compatible = [c for c in assigned if unicodedata.decomposition(chr(c))]
    spaces = [" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2003", "\u200b", "\u2028", "\u0085", "▁", "▁▁", " ▁", "\ufeff"]
    emoji = ["👩‍👩‍👧‍👦", "👍🏽", "🇯🇵🇫🇷", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "1️⃣", "😀"]
    words = ["the", "The", "of", "beginning", "God", "日本語", "テキスト", "ﾊﾝｶｸ", "Ｗｉｄｅ", "don't", "naïve", "e\u0301", "Straße", "İstanbul", "ﬁ", "①②",
             "12345", "３４", "½", "x=y+1;", "<0x0A>", "<0xE3>", "<unk>", "हिन्दी", "العربية", "한국어", "ไทย", "\u1100\u1161\u11a8", "㍿", "ΣΑΣ"]
    kinds = [
        lambda: chr(r.choice(assigned)), lambda: chr(r.choice(assigned[:3000])), lambda: chr(r.randrange(32, 127)),
        lambda: r.choice(spaces), lambda: r.choice(spaces) * r.randrange(1, 5), lambda: r.choice(emoji), lambda: r.choice(words) + " ",
        lambda: r.choice(words), lambda: chr(r.choice(marks)), lambda: "e" + chr(r.choice(marks)) + chr(r.choice(marks)),
        lambda: chr(r.choice(compatible)), lambda: chr(r.randrange(1, 32)), lambda: chr(r.randrange(127, 160)), lambda: r.choice(special),
        lambda: chr(r.choice(range(0xe000, 0xf8ff))), lambda: chr(r.randrange(0xac00, 0xd7a4)), lambda: chr(r.randrange(0x4e00, 0x9fff)) * 2,
        lambda: "\ufffd", lambda: "\x00", lambda: r.choice(words)[::-1],
    ]
    texts = ["", " ", "  ", "\n", "▁", "a", " a", "a ", "a  b", "\x00", special[0], special[0] + " a", " " + special[0], "a" * 300, "the" * 100, " " * 100]
    while len(texts) < count:
        some = r.sample(kinds, r.randrange(1, 6))
        texts.append("".join(r.choice(some)() for _ in range(r.randrange(1, 30))))
    return texts


def invalid(count=300):
    """Invalid UTF-8."""
    r = random.Random(8)
    parts = [b"\xff", b"\xc0\xaf", b"\xe3\x81", b"\xed\xa0\x80\xed\xb0\x80", b"\xf4\x90\x80\x80", b"\x80", " the ".encode(), "日本".encode(), b" ", b"a"]
    return [b"".join(r.choice(parts) for _ in range(r.randrange(1, 12))) for _ in range(count)]


# ---- comparing ----
def ours(path, texts, *options):
    file, result = WORK / "texts", WORK / "result"
    file.write_bytes(b"".join(struct.pack("<I", len(t)) + t for t in texts))
    run = subprocess.run([BUILD / "dump_tokens", path, file, result, *options], capture_output=True, text=True)
    if run.returncode: raise RuntimeError(run.stderr.strip())
    data, at, all = result.read_bytes(), 0, []
    for _ in texts:
        n, = struct.unpack_from("<I", data, at)
        ids = list(struct.unpack_from(f"<{n}i", data, at + 4))
        at += 4 + 4 * n
        n, = struct.unpack_from("<I", data, at)
        all.append((ids, data[at + 4:at + 4 + n]))
        at += 4 + n
    return all


def is_utf8(data):
    """Tokens that together are invalid UTF-8 stay these bytes in our decoder; the libraries output U+FFFD for each."""
    try: return data.decode() is not None
    except UnicodeDecodeError: return False


def compare(name, path, texts, encode, decode, *options):
    try:
        got = ours(path, [t if isinstance(t, bytes) else t.encode() for t in texts], *options)
    except RuntimeError as e:
        return test(name, False, str(e))
    wrong = []
    for text, (ids, decoded) in zip(texts, got):
        expected = encode(text)
        if ids != expected: wrong.append(f"{text!r}: {ids[:40]} instead of {expected[:40]}")
        elif decoded != decode(ids).encode() and is_utf8(decoded): wrong.append(f"{text!r}: decoded as {decoded!r} instead of {decode(ids)!r}")
    for line in wrong[:int(sys.argv[2]) if len(sys.argv) > 2 else 3]: print("   ", line[:600])
    test(f"{name}: {len(texts)} texts", not wrong, f"{len(wrong)} differ")


def compare_hf(name, tokenizer, page):
    path = WORK / "tokenizer.json"
    tokenizer.save(str(path))
    tokenizer = Tokenizer.from_file(str(path))
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    encode = lambda t: tokenizer.encode(t, add_special_tokens=False).ids
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    compare(name, path, hostile(special) + page, encode, decode, "prompt")


def compare_sp(name, model, page):
    path = WORK / "m.model"
    path.write_bytes(model)
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    special = [sp.id_to_piece(i) for i in range(sp.vocab_size()) if sp.is_control(i)] + ["<user>", "<a b>"]
    compare(name, path, hostile(special) + page + invalid(), lambda t: sp.encode(t), lambda ids: sp.decode(ids))


# ---- models ----
def train_sp(text, **options):
    out = io.BytesIO()
    settings = {"vocab_size": 3000, "character_coverage": 0.9995, "num_threads": 1, "minloglevel": 2, "max_sentence_length": 100000,
                "byte_fallback": True, "hard_vocab_limit": False, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(text.splitlines()), model_writer=out, **settings)
    return out.getvalue()


def proto_fields(data):
    """The fields of a protobuf message: number -> values."""
    at, fields = 0, {}
    def number():
        nonlocal at
        value = shift = 0
        while True:
            b = data[at]; at += 1
            value |= (b & 127) << shift; shift += 7
            if b < 128: return value
    while at < len(data):
        tag = number()
        if tag & 7 == 0: value = number()
        elif tag & 7 == 5: value, at = data[at:at + 4], at + 4
        elif tag & 7 == 1: value, at = data[at:at + 8], at + 8
        else:
            n = number()
            value, at = data[at:at + n], at + n
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def pieces_of(model):
    pieces = []
    for p in proto_fields(model)[1]:
        f = proto_fields(p)
        pieces.append((f[1][0].decode(), struct.unpack("<f", f[2][0])[0] if 2 in f else 0.0, f.get(3, [1])[0]))
    return pieces


def specials(tokenizer, normalized=False):
    tokenizer.add_special_tokens([AddedToken(t, normalized=normalized) for t in ("<unk>", "<s>", "</s>")])


def unigram_from(model, byte_fallback=True):
    """Like transformers' conversion of SentencePiece's unigram models."""
    return Tokenizer(models.Unigram([(p, s) for p, s, _ in pieces_of(model)], 0, byte_fallback=byte_fallback))


def bpe_from(model, **options):
    """Like transformers' conversion of SentencePiece's BPE models: merges are all splits of a piece into two."""
    vocabulary = {p: i for i, (p, _, _) in enumerate(pieces_of(model))}
    merges = []
    for piece, score, kind in pieces_of(model):
        local = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocabulary and piece[i:] in vocabulary]
        merges += [(vocabulary[piece], *m) for m in sorted(local, key=lambda m: (vocabulary[m[0]], vocabulary[m[1]]))]
    return Tokenizer(models.BPE(vocabulary, [(a, b) for _, a, b in sorted(merges, key=lambda m: m[0])], unk_token="<unk>", fuse_unk=True,
                                byte_fallback=True, **options))


llama_decoder = lambda: decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def main():
    languages = pages()
    test("texts in 20 languages", len(languages) >= 20, f"only {len(languages)}: {' '.join(languages)}; HINT: install Debian's locales")
    page = [t[:4000] for t in languages.values()]
    text = "\n".join(languages.values())
    bpe = train_sp(text, model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
                   allow_whitespace_only_pieces=True)
    unigram = train_sp(text)

    # SentencePiece's own files
    compare_sp("SentencePiece: BPE as Llama 2", bpe, page)
    compare_sp("SentencePiece: unigram, NMT_NFKC, byte fallback", unigram, page)
    compare_sp("SentencePiece: unigram without byte fallback", train_sp(text, byte_fallback=False, character_coverage=0.98), page)
    compare_sp("SentencePiece: BPE without byte fallback", train_sp(text, byte_fallback=False, character_coverage=0.98, model_type="bpe"), page)
    compare_sp("SentencePiece: unigram, NFKC_CF, user defined pieces, no prefix",
               train_sp(text, normalization_rule_name="nmt_nfkc_cf", user_defined_symbols=["<user>", "<a b>", "Ａ"], add_dummy_prefix=False), page)
    compare_sp("SentencePiece: BPE, user defined pieces, NFKC",
               train_sp(text, model_type="bpe", normalization_rule_name="nfkc", user_defined_symbols=["<user>", "<a b>", "を"]), page)
    compare_sp("SentencePiece: unigram, identity, spaces kept",
               train_sp(text, normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True), page)

    # Hugging Face's
    t = bpe_from(bpe)
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = llama_decoder()
    specials(t)
    compare_hf("tokenizer.json: Llama 2 (Prepend, Replace)", t, page)
    for scheme in ("first", "always", "never"):
        for split in (False, True):
            t = bpe_from(bpe)
            t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
            t.decoder = llama_decoder() if scheme != "always" else decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
            specials(t)
            compare_hf(f"tokenizer.json: BPE, Metaspace {scheme}, split {split}", t, page)
    t = bpe_from(bpe, ignore_merges=True)
    t.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFD(), normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}|\\t"), "_")])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()])
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    specials(t, normalized=True)
    t.add_tokens([AddedToken("beginning", single_word=True), AddedToken("日本", lstrip=True), AddedToken("God", rstrip=True, normalized=False)])
    compare_hf("tokenizer.json: BPE, many steps, ignore_merges, added tokens", t, page)

    charsmap = proto_fields(proto_fields(unigram)[3][0])[2][0]
    t = unigram_from(unigram)
    t.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), normalizers.Replace(Regex(" {2,}"), " ")])
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    specials(t)
    compare_hf("tokenizer.json: unigram, Precompiled", t, page)
    t = unigram_from(unigram)
    t.normalizer = normalizers.NFKC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
                                               pre_tokenizers.Split(Regex(r"\p{N}|[\p{Han}\p{Hiragana}\p{Katakana}ー]+|▁*[a-zA-Z]+"), "isolated")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    specials(t)
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    compare_hf("tokenizer.json: unigram as LLM-jp (NFKC, scripts apart, byte fallback)", t, page)
    t = unigram_from(train_sp(text, byte_fallback=False, character_coverage=0.98), byte_fallback=False)
    t.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.NFC()])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    t.decoder = decoders.Metaspace()
    specials(t)
    compare_hf("tokenizer.json: unigram without byte fallback, WhitespaceSplit", t, page)
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("merged_with_previous")])
    t.train_from_iterator([text], trainers.BpeTrainer(vocab_size=3000, special_tokens=["<unk>"], limit_alphabet=500, show_progress=False))
    t.decoder = decoders.Fuse()
    compare_hf("tokenizer.json: BPE of characters, Whitespace, unknown tokens", t, page)
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.train_from_iterator([text], trainers.BpeTrainer(vocab_size=3000, special_tokens=["<unk>"], show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.decoder = decoders.ByteLevel()
    compare_hf("tokenizer.json: bytes after NFC (Qwen)", t, page)

    # Our own unigram models: loaded by Hugging Face's library, and as good on held-out lines as SentencePiece's of the same
    # size.
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    learn, held_out = [line for i, line in enumerate(lines) if i % 10], lines[::10]
    (WORK / "learn.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in learn))
    subprocess.run([BUILD / "train_gpt", "tokenizer", "--type", "unigram", "--input", WORK / "learn.jsonl",
                    "--vocab-size", "4000", "--output", WORK, "--reserved-tokens", "200", "--pad-vocab-to-multiple", "128"],
                   check=True, capture_output=True)
    t = Tokenizer.from_file(str(WORK / "tokenizer.json"))
    test("reserved tokens, and a multiple of 128", t.get_vocab_size() == 4224, f"{t.get_vocab_size()} tokens")
    compare_hf("tokenizer.json: our own unigram", t, page)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=train_sp(
        "\n".join(learn), vocab_size=4000, normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True))
    a, b = sum(map(len, theirs.encode(held_out))), sum(len(e.ids) for e in t.encode_batch(held_out, add_special_tokens=False))
    test(f"our unigram takes {b} tokens, SentencePiece's {a}, for the same lines", b <= 1.01 * a)
    sys.exit(failed > 0)


main()
