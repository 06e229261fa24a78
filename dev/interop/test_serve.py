#!/usr/bin/env python3
"""OpenAI's client queries `train_gpt serve`: part of `make test-interop`.

A small model is trained on conversations in fp32; the client must get the same text as from `train_gpt generate`.

    test_serve.py BUILD_FP32     a folder with train_gpt; ends with `N passed, N failed`
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import openai

from cases import case, runner, summary

program = Path(sys.argv[1]).resolve() / "train_gpt"
work = Path(tempfile.mkdtemp(prefix="serve_"))


run = runner(program, work)


def written(*arguments):
    """The output of `generate`. A CPU's tile unit has different kernels for one sequence and for many, so neither side uses
    it."""
    return run("generate", "--matrix-unit", "portable", "--model", "run", *arguments)


def make_model():
    chats = [{"messages": [{"role": "user", "content": f"Who lives in house {i}?"},
                           {"role": "assistant", "content": f"A {'cat fish goat'.split()[i % 3]} lives there."}]} for i in range(60)]
    (work / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    (work / "text.txt").write_text("\n".join(m["content"] for c in chats for m in c["messages"]))
    run("tokenizer", "--input", "text.txt", "--vocab-size", 300, "--special-tokens", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "--output", "tok")
    run("prepare", "--chat", "--chat-template", "chatml", "--input", "chats.jsonl", "--output", "chat", "--tokenizer", "tok")
    run("train", "--preset", "llama-tiny", "--tokenizer", "tok", "--data-path", "chat", "--seq-length", 128, "--micro-batch-size", 4,
        "--train-iters", 60, "--lr", "3e-3", "--eval-iters", 0, "--out", "run")


make_model()
server = subprocess.Popen([str(program), "serve", "--model", "run", "--port", "0", "--batch", "4", "--matrix-unit", "portable"], stdout=subprocess.PIPE, text=True, cwd=work)
address = re.search(r"http://\S+/ ", server.stdout.readline()).group().strip() + "v1"
client = openai.OpenAI(base_url=address, api_key="any", max_retries=0)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Who lives in house 7?"}]
text = dict(model=model, prompt="A cat", max_tokens=20, temperature=0)

with case("models"):
    assert model == "run" and client.models.retrieve(model).id == model
with case("a completion"):
    answer = client.completions.create(**text)
    assert "A cat" + answer.choices[0].text == written("--prompt", "A cat", "--max-new-tokens", 20, "--temperature", 0)[:-1]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
with case("its stream"):
    parts = list(client.completions.create(**text, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts if p.choices) == answer.choices[0].text
    assert parts[-1].usage == answer.usage and parts[-2].choices[0].finish_reason == answer.choices[0].finish_reason
with case("samples by seed"):
    several = client.completions.create(model=model, prompt=["A cat", "Who"], n=3, seed=5, max_tokens=20)
    assert [c.index for c in several.choices] == list(range(6)) and len({c.text for c in several.choices}) > 3
    texts = written("--prompt", "A cat", "--num-samples", 3, "--seed", 5, "--max-new-tokens", 20)[:-1]
    assert ["A cat" + c.text for c in several.choices[:3]] == texts.split("\n\n---\n")
with case("a conversation"):
    chat = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=30)
    assert chat.choices[0].message.role == "assistant"
    assert chat.choices[0].message.content + "\n" == written("--chat", "--prompt", question[0]["content"], "--temperature", 0, "--max-new-tokens", 30)
with case("its stream"):
    with client.chat.completions.stream(model=model, messages=question, temperature=0, max_completion_tokens=30) as stream:
        for event in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.message.role, final.finish_reason) == (chat.choices[0].message.content, "assistant", chat.choices[0].finish_reason)
with case("twenty at the same time"):
    async def ask():
        several = openai.AsyncOpenAI(base_url=address, api_key="any", max_retries=0)
        return await asyncio.gather(*(several.completions.create(**text) for _ in range(20)))
    assert {a.choices[0].text for a in asyncio.run(ask())} == {answer.choices[0].text}
for name, error, change in (("another model", openai.NotFoundError, {"model": "gpt-4"}), ("logprobs", openai.BadRequestError, {"logprobs": 2}),
                            ("a prompt that is too long", openai.BadRequestError, {"prompt": "cat " * 500})):
    with case(f"refused: {name}"):
        try:
            client.completions.create(**{**text, **change})
        except error as e:
            assert e.body["message"] and e.body["type"] == "invalid_request_error", e.body
        else:
            raise AssertionError("it was answered")
with case("a stream that is left, and the end"):
    with client.completions.create(**text, stream=True) as stream:
        next(iter(stream))
    client.close()
    server.terminate()
    assert server.wait(timeout=30) == 0
sys.exit(summary())
