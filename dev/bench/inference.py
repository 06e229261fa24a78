"""Reading a prompt and generating a completion, one at a time, compared with llama.cpp.

A random model of each shape is exported in its own precision (`export --gguf`) and run by both on the same number of
threads, in turns; figures are medians over the rounds. Prompt: prompt tokens per second until the first new token. Text:
the median time of a later token, including its logits. llama.cpp is llama-cpp-python's, compiled by pip for this CPU; its
keys and values are in fp16, its default, ours in the model's precision.

    make bench-inference      MODELS="gpt2-124m llama-60m"   PRECISIONS="bf16 fp32"
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

THREADS = len(os.sched_getaffinity(0))
os.environ["OMP_NUM_THREADS"] = str(THREADS)
# llama.cpp uses OpenMP threads, which are fastest when they spin. Ours does not; its OpenMP threads, which only load the
# model, would get in the way.
SPINNING = os.environ | {"OMP_WAIT_POLICY": "active"}

VOCABULARIES = {"gpt2-124m": 50257, "llama-60m": 32000}


def run(*arguments, **options):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done


def make_model(program, folder, preset, most):
    """A model that has hardly learned, its tokenizer of 300 tokens, and the same as GGUF."""
    folder.mkdir()
    lines = (f"in the year {i} the king gave {i * 7 % 97} sheep to his son, and it was good\n" for i in range(400))
    (folder / "text.txt").write_text("".join(lines))
    run(program, "tokenizer", "--input", "text.txt", "--vocab-size", 300, "--output", "tok", cwd=folder)
    run(program, "prepare", "--input", "text.txt", "--output", "data", "--tokenizer", "tok", cwd=folder)
    run(program, "train", "--preset", preset, "--vocab-size", VOCABULARIES.get(preset, 32000), "--tokenizer", "tok", "--data-path", "data",
        "--split", "1,0,0", "--seq-length", 16, "--max-position-embeddings", most, "--micro-batch-size", 1, "--global-batch-size", 1,
        "--train-iters", 1, "--eval-iters", 0, "--out", "run", cwd=folder)
    run(program, "export", "--model", "run", "--gguf", "model.gguf", cwd=folder)


class Ours:
    def __init__(self, program, folder, prompt_tokens, new_tokens):
        self.program, self.folder, self.new_tokens = program, folder, new_tokens
        self.tokens, self.prompt = prompt_tokens, "a" * prompt_tokens  # a token each: the tokenizer has no merges of them

    def milliseconds(self, *options):
        out = run(self.program, "generate", "--model", "run", "--prompt", self.prompt, "--temperature", 0, "--batch", 1, "--threads",
                  THREADS, *options, cwd=self.folder).stderr
        return float(re.search(r"p50 ([0-9.]+)", out)[1])

    def measure(self):
        """Milliseconds of the prompt, and of a token."""
        return self.milliseconds("--num-samples", 5, "--max-new-tokens", 1), self.milliseconds("--max-new-tokens", self.new_tokens)


def measure_llama_cpp(model, prompt_tokens, new_tokens):
    """The same for llama.cpp, in this process."""
    import llama_cpp

    def timed(tokens):
        begin = time.perf_counter()
        llama.eval(tokens)
        return (time.perf_counter() - begin) * 1e3

    llama = llama_cpp.Llama(model, n_ctx=prompt_tokens + new_tokens, n_batch=2048, n_ubatch=512, n_threads=THREADS,
                            n_threads_batch=THREADS, verbose=False)
    letter = llama.tokenize(b"aa", add_bos=False)[-1]
    prompts = []
    for _ in range(5):
        llama.reset()
        prompts.append(timed([letter] * prompt_tokens))
    return statistics.median(prompts), statistics.median(timed([letter]) for _ in range(new_tokens - 1))


class LlamaCpp:
    """A new process each time, so that its spinning threads do not slow ours down."""
    def __init__(self, folder, prompt_tokens, new_tokens):
        self.arguments = folder / "model.gguf", prompt_tokens, new_tokens

    def measure(self):
        return tuple(map(float, run(sys.executable, __file__, "--measure-llama-cpp", *self.arguments, env=SPINNING).stdout.split()))


def main():
    if sys.argv[1:2] == ["--measure-llama-cpp"]:
        return print(*measure_llama_cpp(sys.argv[2], *map(int, sys.argv[3:])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/cpu-{precision}/train_gpt")
    parser.add_argument("--models", nargs="+", default=os.environ.get("MODELS", "gpt2-124m llama-60m").split())
    parser.add_argument("--precisions", nargs="+", default=os.environ.get("PRECISIONS", "bf16 fp32").split())
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    o = parser.parse_args()
    print(f"{THREADS} threads, llama-cpp-python {version('llama-cpp-python')}, a prompt of {o.prompt_tokens} tokens and {o.new_tokens} new ones, "
          f"medians of {o.rounds} rounds\n\n| model | precision | prompt, ours, tok/s | llama.cpp | ours / theirs | text, ours, tok/s | "
          "llama.cpp | ours / theirs |\n| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="inference_") as work:
        for precision in o.precisions:
            program = Path(o.program.format(precision=precision)).resolve()
            for preset in o.models:
                folder = Path(work, f"{preset}-{precision}")
                make_model(program, folder, preset, -(-(o.prompt_tokens + o.new_tokens) // 256) * 256)
                sides = [Ours(program, folder, o.prompt_tokens, o.new_tokens), LlamaCpp(folder, o.prompt_tokens, o.new_tokens)]
                rounds = [[side.measure() for side in sides] for _ in range(o.rounds)]
                cells = []
                for what, tokens in ((0, o.prompt_tokens), (1, 1)):
                    speeds = [1e3 * tokens / statistics.median(one[side][what] for one in rounds) for side in (0, 1)]
                    cells += [f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[0] / speeds[1]:.2f}"]
                print(f"| {preset} | {precision} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
