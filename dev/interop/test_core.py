"""train_gpt eval on tasks of CORE compared with a plain implementation here, in PyTorch: part of `make test-interop`.

A small bundle of all three kinds of tasks is made in the layout of the published one, converted by dev/data/convert_tasks.py and
evaluated by train_gpt, on one process and on two. The same bundle is evaluated below with transformers, one prompt at a time:
prompts from text, solved examples from Python's random, tokens from the fast tokenizer, log p from logits in fp32. Which tokens are
scored, their log-likelihoods (to 1e-3) and each question's decision must be equal, and so must CORE.

    test_core.py BUILD_FP32     a folder with train_gpt; ends with `N passed, N failed`
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cases import runner

PROGRAM = Path(sys.argv[1]).resolve() / "train_gpt"
CONVERTER = Path(__file__).resolve().parent.parent / "data/convert_tasks.py"
LONGEST = 96  # tokens
MODELS = {"gpt2": ("--num-layers", 2, "--hidden-size", 64, "--num-attention-heads", 4), "llama": ("--preset", "llama-tiny")}
# label: kind, solved examples, baseline in percent, delimiter (None: the default)
TASKS = {"city": ("multiple_choice", 0, 33.3, None), "trade": ("multiple_choice", 3, 25, "\nAnswer: "), "wino": ("schema", 0, 50, None),
         "wino_shots": ("schema", 2, 50, None), "gift": ("language_modeling", 0, 0, None), "year": ("language_modeling", 4, 0, "\nA: ")}
QUESTIONS = 150

work = Path(tempfile.mkdtemp(prefix="core_"))
run = runner(PROGRAM, work)
draw = random.Random(1)

NAMES, VERBS, THINGS = ["king", "queen", "shepherd", "prophet"], ["gave", "took", "saw", "sold"], ["sheep", "oxen", "bread", "silver"]


def sentence():
    return f"In the year {draw.randrange(900)} the {draw.choice(NAMES)} {draw.choice(VERBS)} {draw.randrange(90)} {draw.choice(THINGS)}"


def make_bundle():
    """Some choices start with another one; some contexts end in white space, are long or in another script."""
    (work / "bundle/eval_data/all").mkdir(parents=True)
    config = "icl_tasks:\n"
    meta = "Eval Task,Task Category,Random baseline,Description\n"
    for label, (kind, shots, baseline, delimiter) in TASKS.items():
        config += f"-\n  label: {label}\n  dataset_uri: all/{label}.jsonl\n  num_fewshot: [{shots}]\n  icl_task_type: {kind}\n"
        if delimiter is not None:
            config += f"  continuation_delimiter: {json.dumps(delimiter)} # a comment\n"
        meta += f'{label},kings,{baseline},"Kings, and what they did"\n'
        rows = []
        for i in range(QUESTIONS):
            words = sentence().split(" ")
            beginning = (sentence() + ". 鳥は歌い、") * (i % 7 == 3) + " ".join(words[:-1])
            if kind == "multiple_choice":
                choices = draw.sample(THINGS, 3)
                choices.append(draw.choice(["a king", *(draw.choice(choices) + more for more in ("1", " bread", " 鳥"))]))
                rows.append({"query": beginning, "choices": choices, "gold": draw.randrange(4)})
            elif kind == "schema":
                options = [f"{sentence()}, because the {name}" for name in draw.sample(NAMES, 2)]
                rows.append({"context_options": options, "continuation": " ".join(words[4:]), "gold": draw.randrange(2)})
            else:
                cut = draw.choice([-1, -1, -2])
                rows.append({"context": " ".join(words[:cut]) + " " * (i % 5 == 0), "continuation": draw.choice(THINGS) if cut == -1 else " ".join(words[cut:]),
                             "aliases": ["x"]})
        (work / f"bundle/eval_data/all/{label}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (work / "bundle/core.yaml").write_text(config)
    (work / "bundle/eval_meta_data.csv").write_text(meta)
    subprocess.run([sys.executable, CONVERTER, "core", "bundle", "-o", "tasks"], cwd=work, check=True, stdout=subprocess.DEVNULL)


def make_models():
    answered = lambda: "\nA: ".join(sentence().rsplit(" ", 1))
    (work / "text.txt").write_text("\n\n".join(sentence() + ". 鳥は歌い、" + sentence() + "!\n" + answered() for _ in range(600)))
    run("tokenizer", "--input", "text.txt", "--vocab-size", 400, "--output", "tok")
    run("prepare", "--input", "text.txt", "--output", "data", "--tokenizer", "tok", "--split-documents", "blank")
    for model, shape in MODELS.items():
        run("train", *shape, "--tokenizer", "tok", "--data-path", "data", "--seq-length", LONGEST, "--max-position-embeddings", LONGEST,
            "--micro-batch-size", 8, "--train-iters", 150, "--lr", "3e-3", "--eval-iters", 0, "--out", model)


# ---- the plain implementation ----------------------------------------------------------------------------------------------------


def solved(kind, row, delimiter):
    if kind == "multiple_choice":
        return row["query"] + delimiter + row["choices"][row["gold"]]
    if kind == "schema":
        return row["context_options"][row["gold"]] + delimiter + row["continuation"]
    return row["context"].strip() + delimiter + row["continuation"]


def equal_length(sequences):
    n = 0
    while n < min(map(len, sequences)) and len({s[n] for s in sequences}) == 1:
        n += 1
    return n


class Plain:
    def __init__(self, directory):
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def tokens(self, text):
        first = self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.tokenizer.eos_token_id
        return [first] + self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def prompts(self, kind, row, delimiter, before):
        """(tokens, number of scored ones) of each prompt."""
        if kind == "language_modeling":
            start = before + row["context"].strip() + delimiter
            whole, context = self.tokens(start + row["continuation"]), self.tokens(start.strip())
            if context != whole[: len(context)] or len(context) == len(whole):
                return None
            return [(whole, len(whole) - len(context))]
        if kind == "schema":
            all_tokens = [self.tokens(before + option + delimiter + row["continuation"]) for option in row["context_options"]]
            n = equal_length([t[::-1] for t in all_tokens])
            return [(t, n) for t in all_tokens]
        all_tokens = [self.tokens(before + row["query"] + delimiter + choice) for choice in row["choices"]]
        n = min(equal_length(all_tokens), min(map(len, all_tokens)) - 1)
        return [(t, len(t) - n) for t in all_tokens]

    @torch.no_grad()
    def score(self, tokens, scored):
        tokens = tokens[-LONGEST:]
        logits = self.model(torch.tensor([tokens])).logits[0, :-1].double()
        targets = torch.tensor(tokens[1:])
        log_p = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0][-scored:]
        return log_p.sum().item(), bool((logits.argmax(-1) == targets)[-scored:].all())

    def task(self, label, seed=1234):
        """For each question None, or (decision, right, log-likelihoods, numbers of tokens)."""
        kind, shots, _, delimiter = TASKS[label]
        delimiter = " " if delimiter is None else delimiter
        rows = [json.loads(line) for line in open(work / f"bundle/eval_data/all/{label}.jsonl")]
        random.Random(1337).shuffle(rows)
        results = []
        for i, row in enumerate(rows):
            others = random.Random(seed + i).sample([j for j in range(len(rows)) if j != i], shots)
            prompts = self.prompts(kind, row, delimiter, "".join(solved(kind, rows[j], delimiter) + "\n\n" for j in others))
            if prompts is None:
                results.append(None)
                continue
            scores = [self.score(*prompt) for prompt in prompts]
            means = [log_p / n for (log_p, _), (_, n) in zip(scores, prompts)]
            decision = scores[0][1] if kind == "language_modeling" else means.index(max(means))
            right = decision if kind == "language_modeling" else decision == row["gold"]
            results.append((decision, right, [log_p for log_p, _ in scores], [n for _, n in prompts]))
        return results


# ---- the comparison ----------------------------------------------------------------------------------------------------------------


def ours(model, *more, launcher=()):
    """Decisions by task and question, and the result."""
    (work / "answers.jsonl").unlink(missing_ok=True)
    command = [*launcher, PROGRAM, "eval", "--model", f"{model}/latest", "--tasks", *(f"tasks/{label}.jsonl" for label in TASKS), "--answers", "answers.jsonl", "--json"]
    text = subprocess.run([*command, *more], cwd=work, check=True, capture_output=True, text=True).stdout
    found = {label: [None] * QUESTIONS for label in TASKS}
    for line in map(json.loads, open(work / "answers.jsonl")):
        found[Path(line["task"]).stem][line["line"] - 1] = line
    return found, json.loads(text)


passed = failed = 0


def check(name, good, more=""):
    global passed, failed
    print(f"{'ok' if good else 'FAILED'}: {name}{more}")
    passed, failed = passed + good, failed + (not good)


def decision(line):
    return None if line is None else line.get("choice", line.get("greedy"))


try:
    make_bundle()
    make_models()
    mpi = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2") if shutil.which("mpirun") else None
    for model in MODELS:
        plain = Plain(work / model / "latest")
        lines, result = ours(model)
        centred = []
        for label, (kind, _, baseline, _) in TASKS.items():
            expected = plain.task(label)
            answered = [e for e in expected if e]
            different = sum(decision(l) != (e and e[0]) for l, e in zip(lines[label], expected))
            tokens = sum(l["tokens"] != e[3] for l, e in zip(lines[label], expected) if l and e)
            largest = max(abs(a - b) for l, e in zip(lines[label], expected) if l and e for a, b in zip(l["log_likelihoods"], e[2]))
            accuracy = sum(e[1] for e in answered) / len(answered)
            centred.append((accuracy - 0.01 * baseline) / (1 - 0.01 * baseline))
            check(f"{model}: {label}", not different and not tokens and largest < 1e-3 and len({e[0] for e in answered}) > 1,
                  f": accuracy {accuracy:.4f} of {len(answered)}, {different} decisions and {tokens} numbers of tokens differ, log p by {largest:.1e}")
        core = sum(centred) / len(centred)
        check(f"{model}: CORE {core:.6f}", abs(result["core"] - core) < 1e-9)
        for layout in ((), ("--tp", "2")) if mpi else ():
            other, _ = ours(model, *layout, launcher=mpi)
            check(f"{model}: two ranks {' '.join(layout)}", all(list(map(decision, other[t])) == list(map(decision, lines[t])) for t in TASKS))
finally:
    shutil.rmtree(work)
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
