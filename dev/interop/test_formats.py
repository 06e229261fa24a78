"""Text files written by other programs and read by train_gpt: part of `make test-interop`.

  Parquet by pyarrow: pages v1 and v2, plain, dictionary, delta-length and delta, uncompressed, snappy, gzip and zstd, with
  nulls, several row groups and many pages; unsupported files are refused by name

`prepare` must give the same tokens as for the same texts in a .jsonl.

    test_formats.py BUILD              a folder with train_gpt; ends with `N passed, N failed`
    test_formats.py --golden FOLDER    writes the small files of test/golden/parquet, read by test/test_documents.cpp
"""

import itertools
import json
import random
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ENCODINGS = ["PLAIN", "DICTIONARY", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"]
CODECS = ["NONE", "SNAPPY", "GZIP", "ZSTD"]


def write(path, texts, encoding, version, codec, **more):
    table = pa.table({
        "id": pa.array(range(len(texts)), pa.int64()),
        "text": pa.array(texts, pa.string()),
        "score": pa.array([i / 4 for i in range(len(texts))], pa.float64()),
        "good": pa.array([i % 3 == 0 for i in range(len(texts))], pa.bool_()),
        "tags": pa.array([["a", "b"]] * len(texts), pa.list_(pa.string())),
        "meta": pa.array([{"url": "x"}] * len(texts)),
        "year": pa.array([2000 + i % 7 if i % 5 else None for i in range(len(texts))], pa.int32()),
        "hash": pa.array([2**63 + i for i in range(len(texts))], pa.uint64()),
        "crc": pa.array([2**32 - 1 - i for i in range(len(texts))], pa.uint32()),
        "price": pa.array([Decimal(i) / 4 for i in range(len(texts))], pa.decimal128(9, 2)),
    })
    by_dictionary = encoding == "DICTIONARY"
    pq.write_table(table, path, compression=codec, data_page_version=version, store_schema=False,
                   use_dictionary=["text", "year"] if by_dictionary else False,
                   column_encoding=None if by_dictionary else {"text": encoding, "id": "DELTA_BINARY_PACKED"},
                   store_decimal_as_integer=True, **more)


# Expected by test_documents.cpp in the small files.
SMALL = [None if i % 7 == 3 else "" if i % 7 == 5 else f"document {i % 9}, Größe, 日本\n" * (i % 4 + 1) for i in range(60)]


def write_golden(folder):
    for encoding, version, codec in [("PLAIN", "1.0", "NONE"), ("DICTIONARY", "1.0", "SNAPPY"), ("PLAIN", "2.0", "GZIP"),
                                     ("DICTIONARY", "2.0", "ZSTD"), ("DELTA_LENGTH_BYTE_ARRAY", "2.0", "SNAPPY"),
                                     ("DELTA_BYTE_ARRAY", "1.0", "ZSTD")]:
        write(folder / f"{encoding.lower()}-v{version[0]}-{codec.lower()}.parquet", SMALL, encoding, version, codec,
              row_group_size=25, data_page_size=200, write_batch_size=8, write_page_checksum=version == "1.0")
    # Conversations with a column of lists, in a folder of their own.
    pairs = pa.array([[["a", "b"]]], pa.list_(pa.list_(pa.string())))
    lists = folder.parent / "parquet_lists"
    lists.mkdir(exist_ok=True)
    pq.write_table(pa.table({"instruction": ["c"], "output": ["d"], "history": pairs}), lists / "history.parquet", store_schema=False)


def main():
    program = Path(sys.argv[1]).resolve() / "train_gpt"
    work = Path(tempfile.mkdtemp(prefix="formats_"))
    passed = failed = 0

    def report(name, error):
        nonlocal passed, failed
        passed, failed = passed + (not error), failed + bool(error)
        print(f"FAILED: {name}\n{error}" if error else f"ok: {name}", flush=True)

    def prepare(source, *options):
        done = subprocess.run([program, "prepare", "--input", source, "--tokenizer", work, "--output-prefix", work / "out", *options],
                              capture_output=True, text=True, timeout=300)
        return done.stderr if done.returncode else None, done.stderr

    draw = random.Random(1)
    words = [chr(97 + i % 26) * (i % 9 + 1) for i in range(300)] + ["日本", "Größe", "\n", "\t", "😀"]
    texts = [None if draw.random() < 0.1 else " ".join(draw.choices(words, k=draw.randrange(200))) for _ in range(20000)]
    texts[100] = "long " * 300000
    (work / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts if t))
    done = subprocess.run([program, "tokenizer", "--input", work / "a.jsonl", "--vocab-size", "400", "--output", work],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert prepare(work / "a.jsonl")[0] is None
    expected = (work / "out.bin").read_bytes(), (work / "out.idx").read_bytes()
    nulls = sum(t is None for t in texts)
    for encoding, version, codec in itertools.product(ENCODINGS, ["1.0", "2.0"], CODECS):
        write(work / "a.parquet", texts, encoding, version, codec, row_group_size=7000, data_page_size=50000)
        error, said = prepare(work / "a.parquet")
        if not error and ((work / "out.bin").read_bytes(), (work / "out.idx").read_bytes()) != expected: error = "other tokens"
        if not error and f"{nulls:,} rows whose text is null" not in said: error = said
        report(f"Parquet, {encoding}, pages v{version[0]}, {codec}", error)
    for codec in ["BROTLI", "LZ4"]:
        write(work / "a.parquet", texts[:100], "PLAIN", "1.0", codec)
        said = prepare(work / "a.parquet")[0]
        report(f"{codec} is refused by name", None if said and codec.lower() in said.lower() and "HINT" in said else said)
    for column, part in [("id", "INT64"), ("tags", "nested"), ("meta", "nested"), ("none", "its columns are id, text, score")]:
        said = prepare(work / "a.parquet", "--json-keys", column)[0]
        report(f"column {column} is refused", None if said and part in said else f"said: {said}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--golden": write_golden(Path(sys.argv[2]))
    else: main()
