"""prepare --fim-rate compared with a plain loop here, with Hugging Face's tokenizers: part of `make test-interop`.

Documents are read from JSON lines, drawn, split at characters, encoded part by part and put in order by the loop below, with random
numbers of its own (Philox, Salmon et al. 2011). All tokens must be equal, for one process and, with mpirun, for three.

    test_fim.py BUILD     a folder with train_gpt; ends with `N passed, N failed`
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

from tokenizers import Tokenizer

from cases import runner

PROGRAM = Path(sys.argv[1]).resolve() / "train_gpt"
work = Path(tempfile.mkdtemp(prefix="fim_"))
run = runner(PROGRAM, work)
SENTINELS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
INFILLING = 11  # RngPurpose in llmc/base/rng.h


def philox(counter, key):
    """Philox4x32-10."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        low, high = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(high >> 32) ^ c[1] ^ k0, high & 0xFFFFFFFF, (low >> 32) ^ c[3] ^ k1, low & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def uniform(seed, file, index):
    c = philox([index & 0xFFFFFFFF, index >> 32, file, INFILLING], [seed & 0xFFFFFFFF, seed >> 32])
    return ((c[0] << 32 | c[1]) >> 11) * 2.0**-53


def document(tokenizer, text, file, number, rate, spm_rate, seed):
    pre, suf, mid = map(tokenizer.token_to_id, SENTINELS)
    ids = lambda part: tokenizer.encode(part, add_special_tokens=False).ids
    draw = lambda i: uniform(seed, file, 4 * number + i)
    end = [tokenizer.token_to_id("<|endoftext|>")]
    if draw(0) >= rate:
        return ids(text) + end
    first, second = sorted(int(draw(i) * (len(text) + 1)) for i in (2, 3))
    prefix, middle, suffix = ids(text[:first]), ids(text[first:second]), ids(text[second:])
    if draw(1) < spm_rate:
        return [pre, suf, *suffix, mid, *prefix, *middle] + end
    return [pre, *prefix, suf, *suffix, mid, *middle] + end


passed = failed = 0
try:
    draw = random.Random(1)
    words = ["def", "return", "  if x:\n", "值", "🙂 ", "été", "for i in range(10):\n\t", "x = y + 1", "# a comment\n", "{}"]
    files = []
    for name in "abc":
        texts = [" ".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(500)]
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        files.append(texts)
    inputs = [f"{name}.jsonl" for name in "abc"]
    run("tokenizer", "--input", *inputs, "--vocab-size", 400, "--special-tokens", "<|endoftext|>", *SENTINELS, "--output", "tok")
    tokenizer = Tokenizer.from_file(str(work / "tok/tokenizer.json"))
    mpi = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "3") if shutil.which("mpirun") else None
    for rate, spm_rate, seed in ((0.5, 0.5, 1234), (1, 0, 0), (0.9, 1, 2**40 + 3), (0.3, 0.7, 5)):
        expected = []
        for file, texts in enumerate(files):
            for number, text in enumerate(texts):
                expected += document(tokenizer, text, file, number, rate, spm_rate, seed)
        for launcher in ((), mpi) if mpi else ((),):
            subprocess.run([*launcher, PROGRAM, "prepare", "--input", *inputs, "--tokenizer", "tok", "--output-prefix", "data", "--fim-rate", str(rate),
                            "--fim-spm-rate", str(spm_rate), "--seed", str(seed)], cwd=work, check=True, capture_output=True)
            found = array("H", (work / "data.bin").read_bytes()).tolist()
            good = found == expected
            print(f"{'ok' if good else 'FAILED'}: rate {rate}, SPM {spm_rate}, seed {seed}{', three ranks' * bool(launcher)}: {len(expected)} tokens")
            passed, failed = passed + good, failed + (not good)
finally:
    shutil.rmtree(work)
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
