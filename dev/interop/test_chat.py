#!/usr/bin/env python3
"""Supervised fine-tuning compared with transformers: `prepare --chat` gives the tokens and masks of apply_chat_template on
hostile conversations, a run's first loss equals PyTorch's on each conversation by itself, and `generate --chat` gives the
same text as transformers' greedy generate.

    dev/interop/test_chat.py BUILD_FP32        a folder with train_gpt; templates and tokenizers are from dev/ref/chat_golden.py
"""
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders

BUILD = pathlib.Path(sys.argv[1]).resolve()
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "ref"))
import chat_golden

WORK = pathlib.Path(tempfile.mkdtemp())
failed = 0


def test(name, right, why=""):
    global failed
    failed += not right
    print(("ok: " if right else "FAILED: ") + name + ("" if right else f" {why}"), flush=True)


def train_gpt(*arguments, **more):
    done = subprocess.run([BUILD / "train_gpt", *map(str, arguments)], cwd=WORK, capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def conversations(count):
    """Messages of unusual characters and white space; user and assistant take turns."""
    r = random.Random(3)
    pieces = ["the", " king", "  ", "\n", "\n\n", "\t", "言葉", "😀", "e\u0301", "'s", "12", " 345", "<|im_", "[/INST]", "<end_of_turn", "x=y;", "\u00a0",
              "▁", "\u3000", "ing", ".", "!?", "Zürich", "God", "<<SYS>>", "\x1c"]
    text = lambda: "".join(r.choice(pieces) for _ in range(r.randrange(1, 12)))
    some = lambda: next(t for t in iter(text, None) if t.strip())
    result = []
    for _ in range(count):
        turns = [f(some()) for _ in range(r.randrange(1, 4)) for f in (chat_golden.U, chat_golden.A)]
        result.append(([chat_golden.S(some())] if r.random() < 0.3 else []) + turns)
    return result


def with_thoughts(conversation):
    """Adds thoughts to every second answer."""
    return [m if m["role"] != "assistant" or i % 4 == 1 else chat_golden.A(f"<think>\n{m['content']}\n</think>\n\n{m['content']}")
            for i, m in enumerate(conversation)]


def read(prefix):
    """Tokens and mask of each conversation, read with only NumPy."""
    index = (WORK / f"{prefix}.idx").read_bytes()
    count = int.from_bytes(index[18:26], "little")
    ends = np.cumsum(np.frombuffer(index, np.int32, count, 34))
    tokens, mask = np.fromfile(WORK / f"{prefix}.bin", np.uint16), np.fromfile(WORK / f"{prefix}.mask", np.uint8)
    assert len(tokens) == len(mask) == ends[-1]
    return [(tokens[b:e].tolist(), mask[b:e].tolist()) for b, e in zip([0, *ends[:-1]], ends)]


def load(name):
    t = chat_golden.TOKENIZERS[name]
    folder = WORK / name
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(t["file"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": t["bos"], "eos_token": t["eos"]}))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")), bos_token=t["bos"], eos_token=t["eos"])


def straddles(tokenizer, template, conversation):
    """Whether a token in transformers crosses from the prompt into an answer."""
    render = lambda c, **more: tokenizer.apply_chat_template(c, chat_template=template, tokenize=False, **more)
    borders = [len(render(conversation[:i], add_generation_prompt=True)) for i, m in enumerate(conversation) if m["role"] == "assistant"]
    whole = render(conversation)
    spans = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return any(begin < border < end for border in borders for begin, end in spans)


def compare_tokens():
    everything = conversations(300)
    for tokenizer_name in chat_golden.TOKENIZERS:
        tokenizer = load(tokenizer_name)
        for name, template, marked in chat_golden.TEMPLATES:
            if tokenizer_name == "characters" and "bos" not in template and name not in ("chatml", "qwen3"): continue
            kept, expected = [], []
            for c in map(with_thoughts, everything) if name == "qwen3" else everything:
                try: tokens = tokenizer.apply_chat_template(c, chat_template=template, return_dict=True)["input_ids"]
                except Exception: continue
                kept.append(c)
                mask = tokenizer.apply_chat_template(c, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"] if marked else None
                expected.append((tokens, mask))
            (WORK / tokenizer_name / "chat_template.jinja").write_text(template)
            (WORK / "c.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in kept))
            train_gpt("prepare", "--chat", "--input", "c.jsonl", "--output", "c", "--tokenizer", tokenizer_name, "--on-bad-line", "fail", "--threads", 1)
            equal = other = 0
            for c, (tokens, mask), (ours, learned) in zip(kept, expected, read("c"), strict=True):
                if straddles(tokenizer, template, c): other += 1
                elif ours == tokens and mask in (None, learned): equal += 1
                else: test(f"{name}, {tokenizer_name}", False, f"{c}\n  theirs {tokens}\n  {mask}\n  ours   {ours}\n  {learned}"); break
            test(f"{name}, {tokenizer_name}: {equal} conversations equal, {other} with a token across the border", equal + other == len(kept) and equal > 40,
                 f"of {len(kept)}")


def compare_training():
    """Continues training a transformers Llama; compares the loss of the first step over all conversations."""
    tokenizer = load("bytes")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(WORK / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"): (WORK / "model" / file).write_text((WORK / "bytes" / file).read_text())
    template = chat_golden.CHATML
    (WORK / "model/chat_template.jinja").write_text(template)
    (WORK / "c.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in conversations(24)))
    train_gpt("prepare", "--chat", "--input", "c.jsonl", "--output", "c", "--tokenizer", "model")
    total = count = 0
    for tokens, mask in read("c"):
        with torch.no_grad(): logits = model(torch.tensor([tokens])).logits[0].double()
        for i in range(1, len(tokens)):
            if mask[i]:
                total -= torch.log_softmax(logits[i - 1], 0)[tokens[i]].item()
                count += 1
    run = ["train", "--model", "model", "--data-path", "c", "--valid-data-path", "c", "--seq-length", 256, "--micro-batch-size", 1, "--lr", 1e-4,
           "--eval-iters", 1, "--threads", 1]
    planned = train_gpt(*run, "--train-iters", 1, "--global-batch-size", 1, "--dry-run")
    samples = int(re.search(r"packing of c.* conversations in (\d+) samples", planned)[1])
    train_gpt(*run, "--train-iters", 1, "--global-batch-size", samples, "--out", "out")
    log = [json.loads(line) for line in (WORK / "out/log.jsonl").read_text().splitlines()]
    loss = next(row["loss"] for row in log if row["kind"] == "step")
    test(f"the loss of {count} targets in {samples} samples: {loss:.6f}, PyTorch's of each conversation alone {total / count:.6f}", abs(loss - total / count) < 2e-5)

    messages = [chat_golden.U("the king")]
    ids = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids.pop("token_type_ids", None)  # transformers 4 adds them, but none of these models uses them
    with torch.no_grad(): theirs = model.generate(**ids, do_sample=False, max_new_tokens=40, eos_token_id=[0, end], pad_token_id=0)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    text = tokenizer.backend_tokenizer.decode(theirs[0, ids["input_ids"].shape[1]:].tolist(), skip_special_tokens=False).split("<|im_end|>")[0]
    done = subprocess.run([BUILD / "train_gpt", "generate", "--chat", "--model", "model", "--prompt", "the king", "--temperature", "0", "--max-new-tokens", "40"],
                          cwd=WORK, capture_output=True, timeout=300)
    ours = done.stdout.decode(errors="replace")
    test("generate --chat writes what transformers does", ours.rstrip("\n") == text.rstrip("\n"), f"{ours!r} {text!r} {done.stderr.decode()}")


def compare_templates():
    """A model without a template gets its conversations' template; transformers then renders as with the published one."""
    tokenizer = load("bytes")
    (WORK / "bytes/chat_template.jinja").unlink()
    for name in ("chatml", "llama-2", "llama-3", "mistral", "mistral-v0.1", "gemma", "olmo-2", "plain"):
        some = [c for c in conversations(20) if c[0]["role"] == "user"]
        (WORK / "c.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in some))
        train_gpt("prepare", "--chat", "--chat-template", name, "--input", "c.jsonl", "--output", "c", "--tokenizer", "bytes")
        train_gpt("train", "--preset", "quickstart", "--num-layers", 1, "--hidden-size", 32, "--num-attention-heads", 2, "--tokenizer", "bytes", "--data-path",
                  "c", "--seq-length", 64, "--micro-batch-size", 1, "--global-batch-size", 1, "--train-iters", 1, "--eval-iters", 0, "--out", f"as-{name}")
        published = next(t for n, t, _ in chat_golden.TEMPLATES if n == name)
        opened = transformers.AutoTokenizer.from_pretrained(WORK / f"as-{name}/latest")
        render = lambda template: [tokenizer.apply_chat_template(c, chat_template=template, tokenize=False, add_generation_prompt=True) for c in some]
        ends = json.loads((WORK / f"as-{name}/latest/generation_config.json").read_text())["eos_token_id"]
        last = tokenizer.apply_chat_template(some[0], chat_template=published, return_dict=True)["input_ids"]
        right = opened.chat_template and render(opened.chat_template) == render(published) and any(e in last[-2:] for e in np.atleast_1d(ends))
        test(f"{name}: the template that a model gets", right, f"{opened.chat_template} {ends}")


compare_tokens()
compare_training()
compare_templates()
sys.exit(failed > 0)
