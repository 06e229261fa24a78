"""Models and tokens exchanged with Hugging Face's libraries, in both directions: `make test-interop`.

  1  transformers loads directories written by train_gpt: no warning, our logits, our greedy text,
     our texts of a beam search
  2  train_gpt loads directories written by transformers: fp32, bf16 and fp16, one file or several, non-default settings, and the
     older names of published models; trains them further, and transformers loads the result
  3  a directory that requires an unsupported feature is refused by the name of the setting
  4  tokenizers gives our tokens

The logits' tolerance. fp32: 1e-4, for logits of order 1 to 10. bf16: two correct programs differ by their roundings, so the
unit is PyTorch's own error when it computes the same model in bf16, relative to its fp32: ours may be 1.5 times that in the
root mean square, 2 times at the maximum. -v prints both.

    test_interop.py BUILD_FP32 BUILD_BF16 [-v]     folders with train_gpt and dump_logits; ends with `N passed, N failed`
"""

import copy
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoTokenizer, BloomConfig, GPT2Config, LlamaConfig,
                          PreTrainedTokenizerFast)

from cases import case, summary

BUILDS = {"fp32": Path(sys.argv[1]).resolve(), "bf16": Path(sys.argv[2]).resolve()}
WORK = Path(tempfile.mkdtemp(prefix="interop_"))
V, T = 500, 32  # vocabulary and longest sequence of every model here
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def program(precision, *arguments):
    """Runs train_gpt; returns its standard output and its error message, if any."""
    command = [BUILDS[precision] / "train_gpt", *map(str, arguments)]
    done = subprocess.run(command, cwd=WORK, capture_output=True, timeout=300)
    return done.stdout, done.stderr.decode(errors="replace") if done.returncode else None


def train_gpt(precision, *arguments):
    output, error = program(precision, *arguments)
    assert error is None, error
    return output


def our_logits(precision, directory, tokens):
    """(B, T) tokens -> (B, T, V)"""
    tokens.astype(np.int32).tofile(WORK / "tokens")
    command = [BUILDS[precision] / "dump_logits", directory, WORK / "tokens", str(tokens.shape[1]), WORK / "logits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return np.fromfile(WORK / "logits", np.float32).reshape(*tokens.shape, -1)


def rope(theta):
    """The keyword of LlamaConfig; transformers 5 nests it."""
    if transformers.__version__ < "5": return {"rope_theta": theta}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def folder(name):
    return WORK / re.sub(r"\W+", "_", name)


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


@contextmanager
def without_warnings():
    """Fails if transformers logs a warning or Python's warnings module issues one."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
    lines += [str(w.message) for w in caught]
    assert not lines, lines


def open_in_transformers(directory, dtype=torch.float32):
    """Computes in `dtype`, whatever the files' type."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info  # missing, unexpected or mismatched keys
    return model.eval()


def compare_fp32(ours, reference):
    difference = np.abs(ours - reference).max()
    assert difference < 1e-4, f"largest difference {difference:.2e}; largest logit {np.abs(reference).max():.2f}"


def compare_bf16(directory, tokens, reference):
    ours = our_logits("bf16", directory, tokens)
    theirs = their_logits(open_in_transformers(directory, torch.bfloat16), tokens)
    rms = lambda x: float(np.sqrt(np.mean(x**2)))
    a, b = ours - reference, theirs - reference
    text = f"rms {rms(a):.2e} against PyTorch's {rms(b):.2e}, largest {np.abs(a).max():.2e} against {np.abs(b).max():.2e}"
    if "-v" in sys.argv: print(text)
    assert rms(a) <= 1.5 * rms(b) and np.abs(a).max() <= 2 * np.abs(b).max(), text


# ---- text and tokens --------------------------------------------------------------------------------------------------------

PAGE = """The quick brown fox can't jump; it's 3.14159 o'clock, isn't it? I'LL SEE YOU -- "tomorrow" (perhaps) at 10:45.
吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。カタカナ、ひらがな、全角１２３、「引用」…・々〆
한국어 العربية हिन्दी ελληνικά русский naïve café Å Å ﬁ ½ x² ①
for (int i = 0; i < n; ++i) {\n\tsum += a[i] * b[i];   // fused\n}\r\n\r\ndef f(x: float = 1e-5) -> str:\n        return f"{x!r:>10}"\n
😀👩‍👩‍👧‍👦🇯🇵👍🏽 ♥️ ∑∫√ «»„“ \u200b\u00a0\u3000 end   of    runs     of      spaces\t\t\ttabs  \n\n\n\n   lines\n \n
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa https://example.org/a?b=c&d=%20#e
"""


def small_text():
    """A few hundred documents from which a small model can learn, and the page above."""
    lines = [f"in the year {i * 37 % 1000} the king of city {i % 17} gave {i * 11 % 97} sheep to his son, and it was good\n"
             + (f"第{i}章　王は羊を{i % 97}頭与えた。それは良かった。\n" if i % 3 == 0 else "") + ("\n" if i % 5 == 0 else "")
             for i in range(600)]
    return "".join(lines) + PAGE


def prepared_tokens(tokenizer, text):
    """Our tokens of a text, as written by `train_gpt prepare`."""
    (WORK / "page.txt").write_bytes(text.encode())
    train_gpt("fp32", "prepare", "--input", "page.txt", "--output-prefix", "page", "--tokenizer", tokenizer, "--no-append-eod")
    return np.fromfile(WORK / "page.bin", np.uint16).tolist()


def test_tokens():
    for pattern in ("gpt2", "llama3", "bloom"):
        train_gpt("fp32", "tokenizer", "--input", "text.txt", "--vocab-size", V, "--pre-tokenizer", pattern,
                  "--output", f"tokenizer-{pattern}")
        with case(f"{pattern} tokenizer: tokenizers gives our tokens, and the text back"):
            theirs = tokenizers.Tokenizer.from_file(str(WORK / f"tokenizer-{pattern}/tokenizer.json"))
            ours = prepared_tokens(f"tokenizer-{pattern}", PAGE)
            assert theirs.encode(PAGE).ids == ours
            assert theirs.decode(ours) == PAGE


# ---- 1  ours in transformers ------------------------------------------------------------------------------------------------

# A small model of each kind: options of train_gpt (sizes that pad the vocabulary, non-default settings), and the resulting
# values in transformers' view of config.json.
LLAMA = "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --norm-epsilon 1e-4 "
KINDS = {
    "gpt2": ("--ffn-hidden-size 80 --norm-epsilon 1e-4", {"n_inner": 80, "layer_norm_epsilon": 1e-4}),
    "bloom": ("--position-embedding-type alibi --embed-layernorm --norm-epsilon 1e-4", {"layer_norm_epsilon": 1e-4}),
    "llama with grouped queries": (LLAMA + "--num-query-groups 2 --rotary-base 5e5 --untie-embeddings-and-output-weights",
                                   {"num_key_value_heads": 2, "rms_norm_eps": 1e-4, **rope(5e5)}),
    "llama tied": (LLAMA, {"tie_word_embeddings": True, "rms_norm_eps": 1e-4, **rope(1e4)}),
    # Factors of the forward pass that are folded into weights: of the logits, the branches, the scores.
    "gpt2 by muP": ("--parametrization mup --mup-base-width 16 --mup-base-head-size 2", {"tie_word_embeddings": True}),
    "llama by CompleteP": (LLAMA + "--qk-layernorm --untie-embeddings-and-output-weights --parametrization completep "
                           "--mup-base-width 12 --mup-base-depth 1 --mup-base-head-size 2", {"model_type": "qwen3"}),
}


def our_model(precision, kind, trained):
    """The directory of a model of 2 layers, either after a short training run or almost random, with large weights."""
    out = folder(f"{kind} {precision} {trained}")
    train_gpt(precision, "train", *KINDS[kind][0].split(), "--num-layers", 2, "--hidden-size", 48, "--num-attention-heads", 6,
              "--tokenizer", "tokenizer-gpt2", "--data-path", "data", "--split", "1, 0, 0", "--seq-length", T,
              "--micro-batch-size", 8, "--eval-iters", 0, "--out", out,
              *(["--train-iters", 60, "--lr", 5e-3] if trained else
                ["--train-iters", 1, "--lr", 1e-9, "--init-method-std", 0.2]))
    return out / "latest"


def test_ours_in_transformers(kind, precision, trained, tokens):
    name = f"{kind}, {'trained' if trained else 'random'}, {precision}"
    directory = our_model(precision, kind, trained)
    with case(f"{name}: transformers opens it without a warning and sees its settings"), without_warnings():
        model = open_in_transformers(directory)
        assert KINDS[kind][1].items() <= model.config.to_dict().items(), model.config
        assert open_in_transformers(directory, "auto").dtype == DTYPES[precision]
        tokenizer = AutoTokenizer.from_pretrained(directory)
        assert len(tokenizer) == model.config.vocab_size and tokenizer.model_max_length == T
        assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == model.generation_config.eos_token_id
    reference = their_logits(model, tokens)
    with case(f"{name}: same logits in fp32"):
        compare_fp32(our_logits("fp32", directory, tokens), reference)
    if precision == "bf16":
        with case(f"{name}: same logits in bf16, up to rounding"):
            compare_bf16(directory, tokens, reference)
    if not trained: return
    with case(f"{name}: AutoTokenizer gives our tokens"):
        assert tokenizer(PAGE, verbose=False)["input_ids"] == prepared_tokens(directory, PAGE)
    # Ours shows special tokens in a text, but not its end.
    shown = lambda ids: tokenizer.decode([t for t in ids.tolist() if t != tokenizer.eos_token_id]) + "\n"
    with case(f"{name}: same greedy text"), without_warnings():
        for prompt in ("in the year", "the king of city 7", "第3章　王は"):
            ours = train_gpt("fp32", "generate", "--model", directory, "--prompt", prompt, "--temperature", 0,
                             "--max-new-tokens", 20).decode(errors="replace")
            theirs = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=20)
            assert ours == shown(theirs[0]), ours
    with case(f"{name}: same texts by beam search"), without_warnings():
        for prompt, beams, penalty in (("in the year", 4, 1.0), ("the king", 3, 0.0), ("of city 7", 6, 2.0)):
            ours = train_gpt("fp32", "generate", "--model", directory, "--prompt", prompt, "--num-beams", beams,
                             "--length-penalty", penalty, "--num-samples", 2, "--max-new-tokens", 20).decode(errors="replace")
            theirs = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=20,
                                    num_beams=beams, length_penalty=penalty, num_return_sequences=2)
            assert ours == "\n---\n".join(map(shown, theirs)), ours


# ---- 2  transformers' in ours -----------------------------------------------------------------------------------------------

COMMON = dict(vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=0)
LLAMA_SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=T, **COMMON)
CONFIGS = {
    "gpt2": GPT2Config(n_embd=48, n_layer=2, n_head=6, n_positions=T, n_inner=80, layer_norm_epsilon=1e-2, **COMMON),
    "bloom": BloomConfig(hidden_size=48, n_layer=2, n_head=6, seq_length=T, layer_norm_epsilon=1e-2, **COMMON),
    "llama with grouped queries": LlamaConfig(num_key_value_heads=2, intermediate_size=80, rms_norm_eps=1e-2, **rope(5e5),
                                              tie_word_embeddings=False, **LLAMA_SIZES),
    "llama tied": LlamaConfig(intermediate_size=128, rms_norm_eps=1e-1, **rope(100.0), tie_word_embeddings=True, **LLAMA_SIZES),
}
DEFAULTS = {"gpt2": {"layer_norm_epsilon": 1e-5}, "bloom": {"layer_norm_epsilon": 1e-5}, "llama": {"rms_norm_eps": 1e-6, **rope(1e4)}}


def their_model(kind):
    """A transformers model whose parameters are all random and large enough to matter, including gains and biases."""
    torch.manual_seed(len(kind))
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[kind])).eval()
    for name, p in model.named_parameters():
        p.data = 0.2 * torch.randn_like(p) + (1.0 if p.dim() == 1 and name.endswith("weight") else 0.0)
    model.tie_weights()
    return model


def test_theirs_in_ours(kind, tokens):
    for dtype in DTYPES:
        for shards in (False, True):
            name = f"{kind}, {dtype}, {'several files' if shards else 'one file'}"
            directory = folder(name)
            their_model(kind).to(DTYPES[dtype]).save_pretrained(directory, max_shard_size="40KB" if shards else "5GB")
            reference = their_logits(open_in_transformers(directory), tokens)
            with case(f"{name}: train_gpt has transformers' logits"):
                assert (directory / "model.safetensors").exists() != shards
                compare_fp32(our_logits("fp32", directory, tokens), reference)
            if dtype == "bf16":
                with case(f"{name}: train_gpt has transformers' logits in bf16, up to rounding"):
                    compare_bf16(directory, tokens, reference)


    for key, default in DEFAULTS[kind.split()[0]].items():
        with case(f"{kind}: these logits need the {key} that config.json gives"):
            other = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **{key: default}).eval()
            assert np.abs(their_logits(other, tokens) - reference).max() > 1e-2


def test_published(kind, tokens):
    """Names and settings written by older versions, as in most published directories."""
    directory = folder(f"published {kind}")
    model = their_model(kind)
    model.save_pretrained(directory)
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(directory / "model.safetensors").items()}
    config = json.loads((directory / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype", "float32")
    if kind == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, T, T).tril()  # the causal mask was a buffer
        config["n_ctx"] = T
    elif kind == "bloom":
        config["n_embed"], config["num_attention_heads"] = config.pop("hidden_size"), config.pop("n_head")
        config |= {"offset_alibi": 100, "seq_length": T, "skip_bias_add": True, "pretraining_tp": 2}
    else:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        if "rope_parameters" in config: config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config |= {"rope_scaling": None, "pretraining_tp": 1}
        del config["head_dim"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    with case(f"{kind}: names as first published"):
        compare_fp32(our_logits("fp32", directory, tokens), their_logits(model, tokens))


def test_fine_tuning():
    """Trains a transformers directory further here, and loads the result in transformers."""
    directory = WORK / "downloaded"
    their_model("llama with grouped queries").save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_file=str(WORK / "tokenizer-gpt2/tokenizer.json"),
                            eos_token="<|endoftext|>").save_pretrained(directory)
    with case("fine-tuning: a model and tokenizer that transformers wrote are trained"):
        train_gpt("bf16", "prepare", "--input", "text.txt", "--output-prefix", "tuning", "--tokenizer", directory)
        train_gpt("bf16", "train", "--model", directory, "--data-path", "tuning", "--split", "1, 0, 0", "--seq-length", T,
                  "--micro-batch-size", 8, "--train-iters", 30, "--lr", 5e-3, "--eval-iters", 0, "--out", "tuned")
        losses = [line["loss"] for line in map(json.loads, open(WORK / "tuned/log.jsonl")) if line["kind"] == "step"]
        assert losses[-1] < losses[0] - 1, losses
    with case("fine-tuning: transformers opens the result, with the settings it had"), without_warnings():
        before, after = CONFIGS["llama with grouped queries"].to_dict(), open_in_transformers(WORK / "tuned/latest").config
        changed = {key for key, value in after.to_dict().items() if value != before[key]}
        assert changed <= {"architectures", "dtype", "pad_token_id", "_name_or_path"}, changed


# ---- 3  refusals ------------------------------------------------------------------------------------------------------------

REFUSED = {
    "llama tied": {
        "model_type": "mixtral", "hidden_act": "gelu", "sliding_window": 16, "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "mrope", "factor": 2.0}, "quantization_config": {"quant_method": "fp8"},
    },
    "gpt2": {
        "model_type": "gptj", "activation_function": "quick_gelu", "scale_attn_by_inverse_layer_idx": True,
        "add_cross_attention": True,
    },
    "bloom": {"model_type": "falcon", "apply_residual_connection_post_layernorm": True},
}


def test_refusals(kind):
    directory = folder(f"refused {kind}")
    their_model(kind).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    open_it = ("train", "--model", directory, "--train-iters", 1, "--dry-run", "--out", "refused")
    with case(f"{kind}: accepted as it is"):
        train_gpt("fp32", *open_it)
    for key, value in REFUSED[kind].items():
        (directory / "config.json").write_text(json.dumps({**config, key: value}))
        with case(f"{kind}: {key} = {json.dumps(value)} is refused by name"):
            _, error = program("fp32", *open_it)
            assert error and key in error, error


def main():
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, torch {torch.__version__}")
    (WORK / "text.txt").write_text(small_text(), newline="")
    test_tokens()
    train_gpt("fp32", "prepare", "--input", "text.txt", "--output-prefix", "data", "--tokenizer", "tokenizer-gpt2",
              "--split-documents", "blank")
    tokens = np.random.default_rng(1).integers(0, V, (3, T))
    for kind in KINDS:
        for precision in BUILDS:
            for trained in (False, True): test_ours_in_transformers(kind, precision, trained, tokens)
    for kind in CONFIGS:
        test_theirs_in_ours(kind, tokens)
        test_published(kind, tokens)
    test_fine_tuning()
    for kind in REFUSED: test_refusals(kind)
    return summary()


try:
    status = main()
finally:
    shutil.rmtree(WORK)
sys.exit(status)
