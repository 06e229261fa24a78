"""train_gpt eval --tasks compared with EleutherAI's lm-evaluation-harness: part of `make test-interop`.

A small model is trained here, in fp32, with a multiple-choice and a last-word task of the same kind of text; the harness
evaluates the directory with transformers, train_gpt evaluates it itself. Accuracies must be equal, perplexity within a
relative 1e-4.

    test_harness.py BUILD_FP32     a folder with train_gpt; ends with `N passed, N failed`
"""

import json
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.models.huggingface import HFLM

from cases import runner

PROGRAM = Path(sys.argv[1]).resolve() / "train_gpt"
work = Path(tempfile.mkdtemp(prefix="harness_"))


run = runner(PROGRAM, work)


def make_model():
    random.seed(1)
    names, verbs, things = ["king", "queen", "shepherd", "prophet"], ["gave", "took", "saw", "sold"], ["sheep", "oxen", "bread", "silver"]
    line = lambda: f"In the year {random.randrange(900)} the {random.choice(names)} {random.choice(verbs)} {random.randrange(90)} {random.choice(things)}"
    (work / "text.txt").write_text("\n\n".join(line() + ". 鳥は歌い、" + line() + "!" for _ in range(600)))
    run("tokenizer", "--input", "text.txt", "--vocab-size", 400, "--output", "tok")
    run("prepare", "--input", "text.txt", "--output", "data", "--tokenizer", "tok", "--split-documents", "blank")
    run("train", "--preset", "llama-tiny", "--tokenizer", "tok", "--data-path", "data", "--seq-length", 64, "--max-position-embeddings", 64,
        "--micro-batch-size", 8, "--train-iters", 120, "--lr", "3e-3", "--eval-iters", 0, "--out", "run")
    choices = [{"context": (c := line().rsplit(" ", 1)[0]) + (" " if i % 5 == 0 else ""),
                "choices": [" sheep", " a great many silver coins", " 鳥の歌", " bread, and"], "gold": random.randrange(4), "target_delimiter": ""} for i in range(80)]
    words = [{"context": line().rsplit(" ", 1)[0], "target": " " + random.choice(things)} for _ in range(80)]
    for name, rows in (("choices", choices), ("words", words)):
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def harness():
    data = lambda name: {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(work / f"{name}.jsonl")}}, "test_split": "test"}
    metrics = lambda *names: [{"metric": n, "aggregation": "perplexity" if n == "perplexity" else "mean", "higher_is_better": n != "perplexity"}
                              for n in names]
    tasks = [{"task": "choices", **data("choices"), "output_type": "multiple_choice", "doc_to_text": "{{context}}", "target_delimiter": "",
              "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}", "metric_list": metrics("acc", "acc_norm")},
             {"task": "words", **data("words"), "output_type": "loglikelihood", "doc_to_text": "{{context}}", "target_delimiter": "",
              "doc_to_target": "{{target}}", "metric_list": metrics("acc", "perplexity")}]
    model = HFLM(pretrained=str((work / "run/latest").resolve()), dtype="float32", device="cpu", batch_size=8)
    found = lm_eval.simple_evaluate(model, tasks=tasks, bootstrap_iters=0)["results"]
    return {(task, metric): found[task][f"{metric},none"]
            for task, names in (("choices", ("acc", "acc_norm")), ("words", ("acc", "perplexity"))) for metric in names}


def ours():
    found = {}
    for task in ("choices", "words"):
        text = run("eval", "--model", "run/latest", "--tasks", f"{task}.jsonl")
        for metric in ("acc", "acc_norm", "perplexity"):
            if match := re.search(rf"^ +{metric} +([0-9.]+)", text, re.M):
                found[task, metric] = float(match[1])
    return found


try:
    make_model()
    theirs, mine = harness(), ours()
finally:
    shutil.rmtree(work)
failed = 0
for key, value in theirs.items():
    tolerance = 1e-4 * value + 0.005 if key[1] == "perplexity" else 5e-5  # plus half of the last printed digit
    good = abs(mine[key] - value) <= tolerance
    failed += not good
    print(f"{'ok' if good else 'FAILED'}: {key[0]} {key[1]}: lm-evaluation-harness {value:.4f}, train_gpt {mine[key]:.4f}")
print(f"{len(theirs) - failed} passed, {failed} failed")
sys.exit(failed > 0)
