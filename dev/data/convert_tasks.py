#!/usr/bin/env python3
"""Converts published evaluation sets to task files for `train_gpt eval --tasks`.

    dev/data/convert_tasks.py hellaswag hellaswag_val.jsonl -o hellaswag.jsonl
    dev/data/convert_tasks.py core eval_bundle -o core

Reads the files as published by their authors, downloads nothing and needs only Python's standard library. Prompts are from
EleutherAI's lm-evaluation-harness (for HANS, which it lacks, from the MT-NLG article; for CORE, DCLM's), so that numbers are
comparable. The output format is described in README.md in this directory.
"""
import argparse
import csv
import json
import os
import random
import re
import string
import sys
import tempfile


class BadInput(Exception):
    """An error in the user's files; names FILE:LINE."""


# ---- reading: each yields (where, record) ----------------------------------------------------------------------------------


def lines(path):
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", line.rstrip("\r\n")


def json_lines(paths):
    for path in paths:
        for where, line in lines(path):
            try:
                yield where, json.loads(line)
            except ValueError as error:
                raise BadInput(f"{where}: not valid JSON: {error}") from error


def json_or_plain_lines(paths):
    for path in paths:
        if path.endswith(".jsonl"):
            yield from json_lines([path])
        else:
            yield from ((where, {"text": line}) for where, line in lines(path))


def json_lines_or_tsv(paths):
    for path in paths:
        if path.endswith(".jsonl"):
            yield from json_lines([path])
            continue
        with open(path, encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 2):
                if None in row or None in row.values():
                    raise BadInput(f"{path}:{number}: not as many columns as the first line names")
                yield f"{path}:{number}", row


def json_lines_and_labels(paths):
    if len(paths) != 2:
        raise BadInput("two files are needed: the questions (.jsonl) and their labels (.lst)")
    questions, labels = list(json_lines(paths[:1])), list(lines(paths[1]))
    if len(questions) != len(labels):
        raise BadInput(f"{paths[0]} has {len(questions)} questions, {paths[1]} {len(labels)} labels")
    for (where, record), (_, label) in zip(questions, labels):
        yield where, {**record, "label": label.strip()}


def expanded_json_lines(expand):
    """Lines with several questions each: expand(record) yields them; missing keys are reported with the line."""
    def read(paths):
        for where, record in json_lines(paths):
            try:
                yield from ((where, question) for question in expand(record))
            except (AttributeError, KeyError, TypeError) as error:
                raise BadInput(f"{where}: not a line of that data set: {error!r}") from error
    return read


def parallel_lines(paths):
    """Line n of the first file, in the source language, and of the others, each another person's translation."""
    if len(paths) < 2:
        raise BadInput("two files or more are needed: the source and its translations, such as test.de test.en")
    files = []
    for path in paths:
        with open(path, encoding="utf-8", newline="\n") as file:
            files.append(file.read().split("\n"))
    if len({len(file) for file in files}) != 1:
        raise BadInput(f"{paths[0]} and its translations differ in their number of lines")
    languages = [os.path.basename(path).rpartition(".")[2] for path in paths[:2]]
    for number, (source, *translations) in enumerate(zip(*files), 1):
        if source.strip():
            yield f"{paths[0]}:{number}", {"languages": languages, "source": source, "translations": translations}


def table(delimiter):
    def read(paths):
        for path in paths:
            with open(path, encoding="utf-8", newline="") as file:
                for number, row in enumerate(csv.DictReader(file, delimiter=delimiter), 2):
                    yield f"{path}:{number}", row
    return read


def json_files(paths):
    """Replaces directories by the .txt files in them, in numerical order."""
    for path in paths:
        names = [path]
        if os.path.isdir(path):
            names = [os.path.join(path, name) for name in os.listdir(path) if name.endswith(".txt")]
            names.sort(key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
        for name in names:
            with open(name, encoding="utf-8") as file:
                try:
                    yield name, json.load(file)
                except ValueError as error:
                    raise BadInput(f"{name}: not valid JSON: {error}") from error


# ---- prompts: each turns a record into an example --------------------------------------------------------------------------


def one_of(table, record, key):
    value = record[key]
    if value not in table:
        raise BadInput(f"'{key}' is {value!r}; it must be one of {', '.join(map(repr, table))}")
    return table[value]


def multiple_choice(context, choices, gold):
    return {"context": context, "choices": [" " + choice for choice in choices], "gold": gold}


def lambada(record):
    words = record["text"].rstrip().split(" ")
    if len(words) < 2:
        raise BadInput("a passage needs two words or more")
    return {"context": " ".join(words[:-1]), "target": " " + words[-1]}


def hellaswag(record):
    def clean(text):
        """Removes [header], [title] and [step], left over from the WikiHow pages."""
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return multiple_choice(clean(context), [clean(ending) for ending in record["endings"]], int(record["label"]))


def piqa(record):
    gold = one_of({"0": 0, "1": 1}, record, "label")
    return multiple_choice(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], gold)


def winogrande(record):
    """Inserts both options into the sentence; the text after the gap is scored."""
    before, gap, after = record["sentence"].partition("_")
    if not gap:
        raise BadInput("the sentence has no gap '_'")
    gold = one_of({"1": 0, "2": 1}, record, "answer")
    return {"contexts": [before + record["option1"], before + record["option2"]], "target": " " + after.strip(), "gold": gold}


def boolq(record):
    key = "label" if "label" in record else "answer"  # SuperGLUE's name and the original's
    context = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    return multiple_choice(context, ["no", "yes"], one_of({False: 0, True: 1}, record, key))


def race(record):
    """An article and its questions, all but the last one solved."""
    letters = {letter: i for i, letter in enumerate("ABCD")}
    golds = [one_of(letters, {"answers": answer}, "answers") for answer in record["answers"]]
    problems = list(zip(record["questions"], record["options"], golds))
    if len({len(record[key]) for key in ("questions", "options", "answers")}) != 1 or not problems:
        raise BadInput("'questions', 'options' and 'answers' must be lists of one length")
    context = f"Article: {record['article']}\n\n"
    for question, options, gold in problems[:-1]:
        if question.endswith("  _  ."):  # the harness keeps the gap and drops the question; so do we, to be comparable
            context += question[-5:] + options[gold] + "\n"
        else:
            context += f"Question: {question}\nAnswer: {options[gold]}\n"
    question, options, gold = problems[-1]
    return multiple_choice(context + question, options, gold)


def anli(record):
    context = f"{record['context']}\nQuestion: {record['hypothesis']} True, False, or Neither?\nAnswer:"
    return multiple_choice(context, ["True", "Neither", "False"], one_of({"e": 0, "n": 1, "c": 2}, record, "label"))


def hans(record):
    gold = one_of({"entailment": 0, "non-entailment": 1}, record, "gold_label")
    context = f"{record['sentence1']}\nQuestion: {record['sentence2']} True or False?\nAnswer:"
    return multiple_choice(context, ["True", "False"], gold)


def wic(record):
    word = record["sentence1"][int(record["start1"]) : int(record["end1"])]
    context = (
        f"Sentence 1: {record['sentence1']}\nSentence 2: {record['sentence2']}\n"
        f"Question: Is the word '{word}' used in the same way in the two sentences above?\nAnswer:"
    )
    return multiple_choice(context, ["no", "yes"], one_of({False: 0, True: 1}, record, "label"))


def cb(record):
    context = f"{record['premise']}\nQuestion: {record['hypothesis']}. True, False, or Neither?\nAnswer:"
    gold = one_of({"entailment": 0, "contradiction": 1, "neutral": 2}, record, "label")
    return multiple_choice(context, ["True", "False", "Neither"], gold)


def copa(record):
    def decapitalised(choice):
        return choice[0].lower() + choice[1:]

    connector = one_of({"cause": "because", "effect": "therefore"}, record, "question")
    choices = [" " + decapitalised(record["choice1"]), " " + decapitalised(record["choice2"])]  # two spaces, like the harness
    return multiple_choice(f"{record['premise'].strip()[:-1]} {connector}", choices, one_of({0: 0, 1: 1}, record, "label"))


def multirc_questions(record):
    for question in record["passage"]["questions"]:
        for answer in question["answers"]:
            yield {"paragraph": record["passage"]["text"], "question": question["question"], **answer}


def multirc(record):
    """Each answer of a question by itself: is it correct?"""
    context = f"{record['paragraph']}\nQuestion: {record['question']}\nAnswer:"
    choices = [f"{record['text']}\nIs the answer correct? {word}" for word in ("yes", "no")]
    return multiple_choice(context, choices, one_of({1: 0, 0: 1}, record, "label"))


def record_questions(record):
    text = record["passage"]["text"]
    entities = {text[entity["start"] : entity["end"] + 1] for entity in record["passage"]["entities"]}
    for question in record["qas"]:
        yield {"text": text, "entities": sorted(entities), "query": question["query"],
               "answers": {answer["text"] for answer in question["answers"]}}


def plain_answer(text):
    """Like the answer comparison of SQuAD's script."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def record_gap(record):
    """Every entity of the passage in the gap; several may be correct."""
    first, *highlights = record["text"].strip().split("\n@highlight\n")
    if "@placeholder" not in record["query"]:
        raise BadInput("the query has no gap '@placeholder'")
    choices = ["  - " + record["query"].replace("@placeholder", entity) for entity in record["entities"]]
    answers = set(map(plain_answer, record["answers"]))
    golds = [i for i, entity in enumerate(record["entities"]) if plain_answer(entity) in answers]
    if not golds:
        raise BadInput("no entity of the passage is an answer")
    context = first + "\n\n" + "".join(f"  - {highlight}.\n" for highlight in highlights)
    return multiple_choice(context, choices, golds)


def rte(record):
    context = f"{record['premise']}\nQuestion: {record['hypothesis']} True or False?\nAnswer:"
    return multiple_choice(context, ["True", "False"], one_of({"entailment": 0, "not_entailment": 1}, record, "label"))


def wsc(record):
    """The pronoun is between asterisks; spaces left by tokenization are removed like in the harness."""
    target, text = record["target"], record["text"]
    pronoun = target["span2_text"]
    before = " ".join(text.split()[: target["span2_index"]])
    passage = f"{before} *{pronoun}*{text[len(before) + len(pronoun) + 1 :]}"
    for old, new in ((" n't", "n't"), (" )", ")"), ("( ", "("), ('" ', '"'), (' "', '"')):
        passage = passage.replace(old, new)
    passage = re.sub(r" (['.,])", r"\1", passage)
    question = f'In the passage above, does the pronoun "*{pronoun}*" refer to "*{target["span1_text"]}*"?'
    context = f"Passage: {passage}\nQuestion: {question}\nAnswer:"
    return multiple_choice(context, ["no", "yes"], one_of({False: 0, True: 1}, record, "label"))


LANGUAGES = {"cs": "Czech", "de": "German", "en": "English", "es": "Spanish", "et": "Estonian", "fi": "Finnish", "fr": "French",
             "gu": "Gujarati", "hi": "Hindi", "is": "Icelandic", "ja": "Japanese", "kk": "Kazakh", "ko": "Korean", "lt": "Lithuanian",
             "lv": "Latvian", "ro": "Romanian", "ru": "Russian", "ta": "Tamil", "tr": "Turkish", "uk": "Ukrainian", "zh": "Chinese"}


def translation(record):
    source, target = (one_of(LANGUAGES, {"language (the end of the file's name)": name}, "language (the end of the file's name)")
                      for name in record["languages"])
    return {"context": f"{source} phrase: {record['source']}\n{target} phrase:", "references": record["translations"],
            "max_new_tokens": 256, "metrics": ["bleu"]}


def summary(record):
    """CNN/DailyMail's and XSum's keys. The prompt is the harness's for the first."""
    article, highlights = ("article", "highlights") if "article" in record else ("document", "summary")
    return {"context": f"Summarize the following article:\n\n{record[article]}\n\nSummary:", "references": [record[highlights]],
            "until": ["\n\n"], "max_new_tokens": 128, "metrics": ["rouge1", "rouge2", "rougeL", "rougeLsum"], "stemmer": True}


def crows_pairs(record):
    """Which of two sentences is more probable: the one with the stereotype, or with its opposite?"""
    return {"context": "", "choices": [record["sent_more"], record["sent_less"]], "gold": 0, "target_delimiter": "",
            "share_of": "stereotype", "group": record["bias_type"]}


def winogender(record):
    """A name such as technician.customer.1.male.txt encodes who is meant: 0 the occupation, 1 the participant."""
    occupation, participant, answer, gender, _ = record["sentid"].split(".")
    gold = one_of({"0": 0, "1": 1}, {"sentid's number": answer}, "sentid's number")
    pronouns = one_of({"male": r"he|him|his", "female": r"she|her|hers", "neutral": r"they|them|their|theirs"}, {"gender": gender}, "gender")
    found = re.search(rf"\b({pronouns})\b", record["sentence"], re.IGNORECASE)
    if not found:
        raise BadInput(f"the sentence has no {gender} pronoun")
    example = multiple_choice(f"{record['sentence']} ‘{found[0].capitalize()}’ refers to the", [occupation, participant], gold)
    return example | ({"group": gender} if gender != "neutral" else {})


# name: reader, prompt, the published files
TASKS = {
    "lambada": (json_or_plain_lines, lambada, "lambada_test.jsonl (OpenAI) or lambada_test_plain_text.txt"),
    "hellaswag": (json_lines, hellaswag, "hellaswag_val.jsonl"),
    "piqa": (json_lines_and_labels, piqa, "valid.jsonl valid-labels.lst"),
    "winogrande": (json_lines, winogrande, "dev.jsonl"),
    "boolq": (json_lines, boolq, "dev.jsonl, or BoolQ/val.jsonl of SuperGLUE"),
    "race": (json_files, race, "RACE/test/high, a directory of .txt files"),
    "anli": (json_lines, anli, "anli_v1.0/R2/test.jsonl"),
    "hans": (json_lines_or_tsv, hans, "heuristics_evaluation_set.txt or .jsonl"),
    "wic": (json_lines, wic, "WiC/val.jsonl of SuperGLUE"),
    "cb": (json_lines, cb, "CB/val.jsonl of SuperGLUE"),
    "copa": (json_lines, copa, "COPA/val.jsonl of SuperGLUE"),
    "multirc": (expanded_json_lines(multirc_questions), multirc, "MultiRC/val.jsonl of SuperGLUE"),
    "record": (expanded_json_lines(record_questions), record_gap, "ReCoRD/val.jsonl of SuperGLUE"),
    "rte": (json_lines, rte, "RTE/val.jsonl of SuperGLUE"),
    "wsc": (json_lines, wsc, "WSC/val.jsonl of SuperGLUE"),
    "translation": (parallel_lines, translation, "newstest2014.de newstest2014.en (source, then translations)"),
    "summary": (json_lines, summary, ".jsonl with article and highlights, or document and summary"),
    "crows-pairs": (table(","), crows_pairs, "crows_pairs_anonymized.csv"),
    "winogender": (table("\t"), winogender, "all_sentences.tsv"),
}


# ---- DCLM's CORE: a folder of tasks ------------------------------------------------------------------------------------------

# The example of a record of each kind; the delimiter is inserted when the task is read.
CORE_KINDS = {
    "multiple_choice": lambda r: {"context": r["query"], "choices": r["choices"], "gold": r["gold"]},
    "schema": lambda r: {"contexts": r["context_options"], "target": r["continuation"], "gold": r["gold"]},
    "language_modeling": lambda r: {"context": r["context"].strip(), "target": r["continuation"]},
}


def core_yaml(path):
    """The list icl_tasks, in the part of YAML that core.yaml uses; Python has no reader."""
    def scalar(text):
        if text[:1] in ('"', "["):
            return json.JSONDecoder().raw_decode(text)[0]
        quoted = re.match(r"'((?:[^']|'')*)'", text)
        return quoted[1].replace("''", "'") if quoted else text.partition(" #")[0].strip()

    tasks, first, key = [], None, None
    for where, line in lines(path):
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text.startswith("#") or (first is None and not text.startswith("-")):
            continue
        if text.startswith("-"):
            first = indent if first is None else first
            text = text[1:].strip()
            if indent > first and isinstance(tasks[-1].get(key), list):
                tasks[-1][key].append(int(text) if text.isdigit() else scalar(text))
                continue
            tasks.append({})
        elif indent <= first:
            break
        if text and not text.startswith("#"):
            key, colon, value = text.partition(":")
            value = value.strip()
            try:
                tasks[-1][key] = scalar(value) if value and not value.startswith("#") else []
            except ValueError as error:
                raise BadInput(f"{where}: {text!r} is no value: {error}") from error
            if not colon:
                raise BadInput(f"{where}: {text!r} is no KEY: VALUE")
    if not tasks:
        raise BadInput(f"{path} has no list 'icl_tasks'")
    return tasks


def core_tasks(bundle):
    """Yields (label, file, keys of each line, prompt) of the tasks in core.yaml."""
    meta = os.path.join(bundle, "eval_meta_data.csv")
    baselines = {row.get("Eval Task"): row.get("Random baseline") for _, row in table(",")([meta])}
    path = os.path.join(bundle, "core.yaml")
    for task in core_yaml(path):
        try:
            label, kind = task["label"], task["icl_task_type"]
            if kind not in CORE_KINDS:
                raise BadInput(f"{path}: {label} is of kind {kind}; CORE has {', '.join(CORE_KINDS)}")
            if label not in baselines:
                raise BadInput(f"{meta}: no line for {label}")
            keys = {"target_delimiter": task.get("continuation_delimiter", " "),
                    "core": {"baseline": 0.01 * float(baselines[label]), "num_fewshot": task["num_fewshot"][0]}}
            yield label, os.path.join(bundle, "eval_data", task["dataset_uri"]), keys, CORE_KINDS[kind]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"{path}: not a task of CORE: {task}: {error!r}") from error


def convert_core(bundle, output):
    """The questions are shuffled as in nanochat, so that the first N of each file are its N."""
    if not os.path.isdir(bundle):
        raise BadInput(f"{bundle} is not a directory; core reads the one with core.yaml, eval_meta_data.csv and eval_data")
    tasks = list(core_tasks(bundle))
    os.makedirs(output, exist_ok=True)
    for label, path, keys, prompt in tasks:
        records = list(json_lines([path]))
        random.Random(1337).shuffle(records)
        name = os.path.join(output, label + ".jsonl")
        print(f"{name}: {write(name, convert(label, records, lambda record: prompt(record) | keys))} examples")


# ---- writing -----------------------------------------------------------------------------------------------------------------


def convert(task, records, prompt):
    """Yields lines of output."""
    for where, record in records:
        try:
            example = prompt(record)
            gold = example.get("gold", 0)
            if isinstance(gold, int) and not 0 <= gold < len(example.get("choices", example.get("contexts", [""]))):
                raise BadInput(f"the answer {example['gold']} is not among the choices")
            yield json.dumps(example, ensure_ascii=False).encode() + b"\n"
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from error
        except KeyError as error:
            raise BadInput(f"{where}: there is no {error}; is it a file of {task}?") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"{where}: not an example of {task}: {error}") from error


def write(path, converted):
    """Creates the file under its name only when it is complete. Returns the number of lines."""
    directory = os.path.dirname(os.path.abspath(path))
    count = 0
    file = tempfile.NamedTemporaryFile(dir=directory, prefix=os.path.basename(path) + ".tmp.", delete=False)
    try:
        with file:
            for line in converted:
                file.write(line)
                count += 1
            if count == 0:
                raise BadInput("the input holds no examples")
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(file.name, 0o666 & ~mask)
        os.replace(file.name, path)
    except BaseException:
        os.unlink(file.name)
        raise
    return count


def main():
    files = "\n".join(f"  {name:12}{published}" for name, (_, _, published) in TASKS.items())
    files += "\n  core        eval_bundle, a directory with core.yaml, eval_meta_data.csv and eval_data"
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="tasks and their files:\n" + files, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=[*TASKS, "core"], metavar="TASK", help="one of the tasks below")
    parser.add_argument("files", nargs="+", metavar="FILE", help="the published files, see below")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="task file to write (.jsonl); of core, a directory")
    arguments = parser.parse_args()
    try:
        if arguments.task == "core":
            if len(arguments.files) != 1:
                parser.error("core reads one directory")
            convert_core(arguments.files[0], arguments.output)
            return
        read, prompt, _ = TASKS[arguments.task]
        count = write(arguments.output, convert(arguments.task, read(arguments.files), prompt))
    except (BadInput, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.output}: {count} examples")


if __name__ == "__main__":
    main()
