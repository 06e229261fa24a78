"""Adapters exchanged with PEFT, in both directions, for each family: `make test-interop`.

  1  adapters trained by train_gpt: PEFT loads them on the same model and gives our logits; so does transformers for the merged
     model; the gradients of adapters on the experts of a mixture are PEFT's
  2  adapters written by PEFT, on all matrices and on some, with other scales: train_gpt gives PEFT's logits
  3  virtual tokens, trained directly or computed by an encoder of each kind, in both directions: the same logits at and after
     them; the encoders' gradients are PyTorch's; the loss of packed conversations is PEFT's of separate ones

    test_peft.py BUILD_FP32     a folder with train_gpt and dump_logits; ends with `N passed, N failed`
    FAMILIES="gpt_oss olmoe" test_peft.py ...     only these families
"""

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from peft import LoraConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
import transformers
from transformers import (AutoModelForCausalLM, BloomConfig, CohereConfig, Gemma2Config, Gemma3TextConfig, GPT2Config, GPTNeoXConfig,
                          GptOssConfig, GraniteMoeConfig, LlamaConfig, MixtralConfig, Olmo2Config, OlmoeConfig, Qwen3Config,
                          Qwen3MoeConfig)
from transformers.utils import logging

from cases import case, summary

BUILD = Path(sys.argv[1]).resolve()
WORK = Path(tempfile.mkdtemp(prefix="peft_"))
V, T, VIRTUAL = 499, 32, 5
COMMON = dict(vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=0)
SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80,
             max_position_embeddings=T, **COMMON)
LLAMA = dict(tie_word_embeddings=False, **SIZES)
GEMMA = dict(head_dim=20, sliding_window=7, query_pre_attn_scalar=30, **SIZES)
# transformers 5 stacks experts: PEFT converts our adapters on all their matrices; its own are on these parameters.
SEPARATE = transformers.__version__.startswith("4.")
MIXTURE = dict(num_experts=5, num_experts_per_tok=2, **LLAMA)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GRANITE = ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"]
# Our names of matrices for training, and PEFT's for some of them.
FAMILIES = {
    "llama": (LlamaConfig(**LLAMA),
              ["all", "q v", "k o gate"], [["q_proj", "v_proj"], ["k_proj", "up_proj", "down_proj"]]),
    "gpt2": (GPT2Config(n_embd=48, n_layer=2, n_head=6, n_positions=T, n_inner=80, **COMMON),
             ["all", "o"], [["c_attn"], ["attn.c_proj", "c_fc"]]),
    "bloom": (BloomConfig(hidden_size=48, n_layer=2, n_head=6, seq_length=T, **COMMON),
              ["all", "qkv down"], [["query_key_value"], ["dense", "dense_h_to_4h", "dense_4h_to_h"]]),
    "gpt_neox": (GPTNeoXConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=80, max_position_embeddings=T,
                               **COMMON),
                 ["all"], [["query_key_value", "dense", "dense_h_to_4h"]]),
    "cohere": (CohereConfig(logit_scale=0.3, **SIZES), ["all"], [["q_proj", "o_proj", "up_proj"]]),
    "qwen3": (Qwen3Config(head_dim=20, **LLAMA), ["all"], [["q_proj", "v_proj", "down_proj"]]),
    "olmo2": (Olmo2Config(**LLAMA), ["all"], [["k_proj", "o_proj", "up_proj"]]),
    "gemma2": (Gemma2Config(attn_logit_softcapping=5.0, final_logit_softcapping=3.0, **GEMMA), ["all"], [["q_proj", "o_proj", "down_proj"]]),
    "mixtral": (MixtralConfig(num_local_experts=5, num_experts_per_tok=2, sliding_window=None, **LLAMA),
                ["all", *(["q w2"] if SEPARATE else [])], [["q_proj", "o_proj"], *([["w1", "w2", "v_proj"]] if SEPARATE else [["v_proj", *EXPERTS], EXPERTS[1:]])]),
    "qwen3_moe": (Qwen3MoeConfig(moe_intermediate_size=24, norm_topk_prob=True, head_dim=20, **MIXTURE),
                  ["all"], [["up_proj", "down_proj"]] if SEPARATE else [["k_proj"], ["q_proj", *EXPERTS]]),
    "olmoe": (OlmoeConfig(**MIXTURE), ["all"], [["gate_proj", "q_proj"]] if SEPARATE else [["k_proj"], EXPERTS]),
    "gemma3_text": (Gemma3TextConfig(sliding_window_pattern=2, **GEMMA), ["all"], [["k_proj", "v_proj", "gate_proj"]]),
}
STACKED = {} if SEPARATE else {
    "gpt_oss": (GptOssConfig(num_local_experts=5, num_experts_per_tok=2, head_dim=20, sliding_window=7, **LLAMA),
                ["all", "down", "fc1 q"], [["q_proj", *EXPERTS], EXPERTS[:1], EXPERTS[1:]]),
    "granitemoe": (GraniteMoeConfig(num_local_experts=5, num_experts_per_tok=2, attention_multiplier=0.3, **LLAMA),
                   ["all", "down", "gate_up_proj q"], [["q_proj", *GRANITE], GRANITE[:1], GRANITE[1:]]),
}
FAMILIES |= STACKED


@contextmanager
def strictly():
    """Treats warnings as errors, except one of transformers about PEFT, and PEFT's about ranks that it changes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def run(*command):
    done = subprocess.run([str(x) for x in command], cwd=WORK, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def our_logits(directory, tokens, *adapter):
    tokens.astype(np.int32).tofile(WORK / "tokens")
    run(BUILD / "dump_logits", directory, "tokens", tokens.shape[1], "logits", *(["--adapter", *adapter] if adapter else []))
    return np.fromfile(WORK / "logits", np.float32).reshape(len(tokens), -1, V)


def their_logits(model, tokens):
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.float().numpy()


def base(family):
    return opened(WORK / family)


def opened(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")  # includes caps


def compare(ours, theirs, plain):
    assert ours.shape == theirs.shape, f"{ours.shape} and {theirs.shape}"
    difference, effect = np.abs(ours - theirs).max(), np.abs(theirs[:, -plain.shape[1]:] - plain).max()
    assert difference < 1e-4 and effect > 1e-2, f"largest difference {difference:.2e}, effect of the adapters {effect:.2e}"


def test_ours(family, targets, tokens, plain):
    name = f"{family}, our adapters on {targets}"
    out = WORK / f"{family} {targets}".replace(" ", "-")
    with case(f"{name}: trained"):
        run(BUILD / "train_gpt", "train", "--model", WORK / family, "--lora-rank", 4, "--lora-targets", *targets.split(), "--data-path",
            "data", "--split", "1, 0, 0", "--seq-length", T, "--micro-batch-size", 4, "--train-iters", 12, "--lr", 2e-2, "--eval-iters",
            0, "--out", out)
    ours = our_logits(WORK / family, tokens, out)
    with case(f"{name}: PEFT gives our logits"), strictly():
        model = PeftModel.from_pretrained(base(family), out / "latest")
        compare(ours, their_logits(model, tokens), plain)
        model.save_pretrained(f"{out}-resaved")  # perhaps converted to adapters on parameters
        compare(our_logits(WORK / family, tokens, f"{out}-resaved"), ours, plain)
    with case(f"{name}: transformers gives them of the merged model"):
        run(BUILD / "train_gpt", "export", "--merge", "--adapter", out, "--out", f"{out}-merged")
        compare(ours, their_logits(opened(f"{out}-merged"), tokens), plain)


def test_gradients_of_experts(family, sample):
    """With a beta1 of 0 Adam's first moment is the gradient of the last step, here of one sequence, which the data contain 200
    times."""
    with case(f"{family}: the gradients of adapters on experts are PEFT's"):
        out = WORK / f"{family} gradients"
        run(BUILD / "train_gpt", "train", "--model", WORK / family, "--lora-rank", 4, "--data-path", "same", "--split", "1, 0, 0",
            "--seq-length", len(sample), "--micro-batch-size", 2, "--train-iters", 6, "--lr", 2e-2, "--adam-beta1", 0, "--clip-grad", 0,
            "--weight-decay", 0, "--eval-iters", 0, "--save-every", 1, "--keep", 0, "--out", out)
        model = PeftModel.from_pretrained(base(family), out / "step_00000005", is_trainable=True).eval()
        x = torch.from_numpy(sample)[None]
        torch.nn.functional.cross_entropy(model(x).logits[0], x[0].roll(-1)).backward()
        ours = load_file(out / "step_00000006/training/exp_avg.safetensors")
        theirs = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            grad = torch.zeros_like(ours[name]) if grad is None else grad  # of an expert without rows
            off = (ours[name] - grad).abs().max().item()
            assert off <= 1e-4 * grad.abs().max().item(), f"{name}: off by {off:.1e}"


def test_theirs(family, targets, options, tokens, plain):
    with case(f"{family}, PEFT's adapters on {targets} {options}: train_gpt gives PEFT's logits"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about GPT-2's fan_in_fan_out, which PEFT sets itself
        torch.manual_seed(len(targets))
        modules = [t for t in targets if "." not in t or "experts" not in t]
        parameters = [t for t in targets if t not in modules]
        if parameters: options = {k: v for k, v in options.items() if k != "lora_dropout"}  # which PEFT refuses
        model = get_peft_model(base(family), LoraConfig(task_type="CAUSAL_LM", target_modules=modules, init_lora_weights=False,
                                                        target_parameters=parameters, **options))
        directory = WORK / "theirs"
        model.save_pretrained(directory)
        compare(our_logits(WORK / family, tokens, directory), their_logits(model, tokens), plain)


def test_our_virtual_tokens(family, options, tokens, plain):
    name = f"{family}, our virtual tokens {' '.join(options)}"
    out = WORK / f"{family} {' '.join(options)}".replace(" ", "-").replace("--", "-")
    with case(f"{name}: trained"):
        run(BUILD / "train_gpt", "train", "--model", WORK / family, "--prompt-tokens", VIRTUAL, *options, "--data-path", "data", "--split",
            "1, 0, 0", "--seq-length", T - VIRTUAL, "--micro-batch-size", 4, "--train-iters", 12, "--lr", 2e-2, "--eval-iters", 0, "--out",
            out)
    with case(f"{name}: PEFT gives our logits"), strictly():
        theirs = their_logits(PeftModel.from_pretrained(base(family), out / "latest"), tokens)
        compare(our_logits(WORK / family, tokens, out), theirs, plain)


def test_gradients_of_encoder(family, encoder, sample):
    """Adam's first moment after one step is a tenth of its batch's gradient: of one sequence, which the data contain 200
    times."""
    with case(f"{family}, {encoder}: the gradients of the encoder are PyTorch's"), strictly():
        out = WORK / f"{family} {encoder} gradients"
        run(BUILD / "train_gpt", "train", "--model", WORK / family, "--prompt-tokens", VIRTUAL, "--prompt-encoder", encoder,
            "--prompt-encoder-width", 40, "--data-path", "same", "--split", "1, 0, 0", "--seq-length", len(sample), "--micro-batch-size", 3,
            "--train-iters", 1, "--lr", 1e-9, "--clip-grad", 0, "--weight-decay", 0, "--eval-iters", 0, "--out", out)
        config = PromptEncoderConfig(encoder_reparameterization_type=encoder.upper(), encoder_hidden_size=40, task_type="CAUSAL_LM",
                                     num_virtual_tokens=VIRTUAL)
        model = get_peft_model(base(family), config)
        theirs = model.prompt_encoder["default"]
        names = lambda tensors: {name.removeprefix("prompt_encoder."): t for name, t in tensors.items()}
        theirs.load_state_dict(names(load_file(out / "latest/training/master.safetensors")))
        x = torch.from_numpy(sample)[None]
        logits = model(x).logits[0, VIRTUAL:]
        torch.nn.functional.cross_entropy(logits, x[0].roll(-1)).backward()
        ours = names(load_file(out / "latest/training/exp_avg.safetensors"))
        assert ours.keys() == dict(theirs.named_parameters()).keys()
        for name, p in theirs.named_parameters():
            largest = p.grad.abs().max().item()
            off = (10 * ours[name] - p.grad).abs().max().item()
            assert largest > 0 and off < 1e-4 * largest, f"{name}: off by {off:.1e} of {largest:.1e}"


def test_packed_conversations(family):
    """The loss of a step over all samples, with packed conversations, before the update."""
    with case(f"{family}, virtual tokens before conversations: PEFT's loss of each alone"), strictly():
        out = WORK / f"{family} chat"
        train = ["train", "--model", WORK / family, "--prompt-tokens", VIRTUAL, "--data-path", "chat", "--split", "1, 0, 0", "--seq-length",
                 T - VIRTUAL, "--micro-batch-size", 1, "--train-iters", 1, "--lr", 1e-9, "--eval-iters", 0]
        planned = run(BUILD / "train_gpt", *train, "--dry-run")
        found = re.search(r"packing of \S+\s+(\d+) conversations in (\d+)\s+samples", planned)
        conversations, samples = map(int, found.groups())
        run(BUILD / "train_gpt", *train, "--global-batch-size", samples, "--out", out)
        log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        ours = next(row["loss"] for row in log if row["kind"] == "step")
        model = PeftModel.from_pretrained(base(family), out / "latest").eval()
        ids, learned = np.fromfile(WORK / "chat.bin", np.uint16).astype(np.int64), np.fromfile(WORK / "chat.mask", np.uint8)
        ends = np.flatnonzero(ids == 0) + 1
        total = count = 0
        for begin, end in zip([0, *ends[:-1]], ends):
            with torch.no_grad(): logits = model(torch.from_numpy(ids[begin:end])[None]).logits[0, VIRTUAL:].double()
            of = torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(ids[begin + 1:end]), reduction="none")
            weight = torch.from_numpy(learned[begin + 1:end])
            total, count = total + (of * weight).sum().item(), count + weight.sum().item()
        assert conversations == len(ends) > 2 * samples and samples > 3, f"{conversations} in {samples} samples, {len(ends)}"
        assert abs(ours - total / count) < 2e-5 * total / count, f"{ours} and {total / count}"


def test_their_virtual_tokens(family, config, tokens, plain):
    with case(f"{family}, PEFT's virtual tokens, {config.peft_type.value}: train_gpt gives PEFT's logits"):
        torch.manual_seed(5)
        model = get_peft_model(base(family), config)
        directory = WORK / "theirs-virtual"
        model.save_pretrained(directory)
        compare(our_logits(WORK / family, tokens, directory), their_logits(model, tokens), plain)


def main():
    logging.disable_progress_bar()
    lines = [f"in the year {i * 37 % 1000} the king of city {i % 17} gave {i * 11 % 97} sheep to his son\n" for i in range(600)]
    (WORK / "text.txt").write_text("".join(lines))
    run(BUILD / "train_gpt", "tokenizer", "--input", "text.txt", "--vocab-size", V, "--output", "tokenizer")
    run(BUILD / "train_gpt", "prepare", "--input", "text.txt", "--output", "data", "--tokenizer", "tokenizer")
    (WORK / "same.txt").write_text(lines[0] * 200)
    run(BUILD / "train_gpt", "prepare", "--input", "same.txt", "--output", "same", "--tokenizer", "tokenizer", "--no-append-eod")
    talk = lambda i: {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "a" * (i % 4 + 1)}]}
    (WORK / "chat.jsonl").write_text("".join(json.dumps(talk(i)) + "\n" for i in range(30)))
    run(BUILD / "train_gpt", "prepare", "--chat", "--chat-template", "plain", "--input", "chat.jsonl", "--output", "chat", "--tokenizer",
        "tokenizer")
    same = np.fromfile(WORK / "same.bin", np.uint16).astype(np.int64)
    sample = same[:len(same) // 200]
    assert len(sample) <= T - VIRTUAL and (same.reshape(200, -1) == sample).all(), len(same)
    tokens = np.random.default_rng(1).integers(0, V, (3, T))
    only = os.environ.get("FAMILIES", "").split()
    for family, (config, ours, theirs) in FAMILIES.items():
        if only and family not in only: continue
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        for name, p in model.named_parameters():
            p.data = 0.2 * torch.randn_like(p) + (1.0 if p.dim() == 1 and name.endswith("weight") and "gemma" not in family else 0.0)
        model.tie_weights()
        model.save_pretrained(WORK / family)
        plain = their_logits(base(family), tokens)
        for targets in ours:
            test_ours(family, targets, tokens, plain)
        for targets in theirs:
            for options in ({"r": 3, "lora_alpha": 6}, {"r": 8, "lora_alpha": 4, "use_rslora": True, "lora_dropout": 0.1},
                            {"r": 2, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"down_proj": 3}}):
                if "rank_pattern" not in options or any("down_proj" in t for t in targets):
                    test_theirs(family, targets, options, tokens, plain)
        if family in STACKED or SEPARATE and "experts" in model.config.to_json_string():
            test_gradients_of_experts(family, sample)
        if family in STACKED: continue
        few = tokens[:, :T - VIRTUAL]  # after virtual tokens
        of_few = their_logits(base(family), few)
        for options in (["--prompt-init-text", "in the year", "--tokenizer", "tokenizer"],
                        ["--prompt-encoder", "mlp", "--prompt-encoder-width", "40"],
                        ["--prompt-encoder", "lstm", "--prompt-encoder-width", "40"]):
            test_our_virtual_tokens(family, options, few, of_few)
        for encoder in ("mlp", "lstm"):
            test_gradients_of_encoder(family, encoder, sample)
        test_packed_conversations(family)
        common = dict(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
        for config in (PromptTuningConfig(prompt_tuning_init="RANDOM", **common), PromptEncoderConfig(encoder_hidden_size=40, **common),
                       PromptEncoderConfig(encoder_reparameterization_type="LSTM", encoder_hidden_size=40, **common)):
            test_their_virtual_tokens(family, config, few, of_few)
    sys.exit(summary())


main()
