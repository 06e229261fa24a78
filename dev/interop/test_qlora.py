"""Adapters on a model quantized to NF4, compared with PEFT and bitsandbytes on a CPU: `make test-interop`.

  1  export --merge of adapters that add nothing has the weights that bitsandbytes decodes, bit by bit
  2  the losses of 20 steps from the same adapters
  3  after them, PEFT gives our logits on the quantized model, as of 1 and 2 with and without double quantization
  4  folders that transformers saves in 4 bits (NF4 and FP4, plain and nested, each dtype, tied and untied heads): its logits,
     generate, eval, and adapters' losses, which for plain NF4 are those of quantizing the original model

    test_qlora.py BUILD_FP32     a folder with train_gpt and dump_logits; ends with `N passed, N failed`
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit, quantize_blockwise
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig
from transformers.utils import logging

from cases import case, runner, summary

BUILD = Path(sys.argv[1]).resolve()
WORK = Path(tempfile.mkdtemp(prefix="qlora_"))
STEPS, RATE, V = 20, 1e-2, 499
COMMON = dict(vocab_size=V, bos_token_id=0, eos_token_id=0, pad_token_id=0)
FAMILIES = {
    "llama": LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=192,
                         max_position_embeddings=64, tie_word_embeddings=False, **COMMON),
    "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, n_inner=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **COMMON),
}
run = runner(BUILD / "train_gpt", WORK)


def decoded(w, double):
    codes, state = quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
    if double:  # PyTorch's sum in fp32 may differ from ours in double
        scales = quantize_4bit(w, blocksize=64, quant_type="nf4")[1].absmax
        mean = scales.double().mean().float()
        assert abs(state.offset - mean) < 1e-6 * mean, f"{state.offset} {mean}"
        state.offset = mean
        state.absmax, state.state2 = quantize_blockwise(scales - mean, blocksize=256)
    return dequantize_4bit(codes, state)


def quantized(family, double):
    """In training mode: in the other one bitsandbytes computes in bf16 on CPUs, with scales in bf16."""
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
                             bnb_4bit_use_double_quant=double)
    return AutoModelForCausalLM.from_pretrained(WORK / family, quantization_config=nf4, dtype=torch.float32, attn_implementation="eager",
                                                device_map="cpu")


def train(family, steps, rate, length, out, double=False):
    run("train", "--model", WORK / family, "--lora-rank", 4, "--quantize-base", "nf4-double" if double else "nf4", "--data-path", "same", "--split", "1, 0, 0",
        "--seq-length", length, "--micro-batch-size", 2, "--train-iters", steps, "--lr", rate, "--lr-decay-style", "constant",
        "--lr-warmup-iters", 0, "--weight-decay", 0, "--clip-grad", 0, "--eval-iters", 0, "--out", out)
    log = [json.loads(line) for line in (WORK / out / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in log if row["kind"] == "step"]


def save_family(family):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for name, p in model.named_parameters():
        p.data = 0.2 * torch.randn_like(p) + (1.0 if p.dim() == 1 and name.endswith("weight") else 0.0)
    model.tie_weights()
    model.save_pretrained(WORK / family)


def test_family(family, sample, double):
    name = family + ("-double" if double else "")
    first = WORK / f"{name}-first"
    train(family, 1, 1e-20, len(sample), first, double)
    # The adapters before the first step: B is zero.
    adapters = first / "latest/adapter_model.safetensors"
    start = {name: t * (".lora_A." in name) for name, t in load_file(adapters).items()}
    with case(f"{name}: merged without an effect, bitsandbytes' weights"):
        merged, without = WORK / f"{name}-merged", WORK / f"{name}-without"
        shutil.copytree(first / "latest", without)
        (without / "manifest.json").unlink()
        save_file(start, without / "adapter_model.safetensors", {"format": "pt"})
        run("export", "--merge", "--adapter", without, "--out", merged)
        files, of_model, coded = load_file(merged / "model.safetensors"), load_file(WORK / family / "model.safetensors"), 0
        for tensor, ours in files.items():
            theirs = of_model[tensor]
            if ours.dim() == 2 and ("layers." in tensor or ".h." in tensor):
                w = decoded(theirs.T.contiguous() if family == "gpt2" else theirs, double)  # Conv1D is (in, out)
                theirs, coded = w.T if family == "gpt2" else w, coded + 1
                assert not torch.equal(theirs, of_model[tensor]), tensor
            assert torch.equal(ours, theirs.contiguous()), f"{tensor}: {(ours - theirs).abs().max()}"
        assert coded == (14 if family == "llama" else 8), coded
    ours = train(family, STEPS, RATE, len(sample), f"{name}-trained", double)
    peft = PeftModel.from_pretrained(quantized(family, double), first / "latest", is_trainable=True).train()
    missing = [tensor for tensor, p in peft.named_parameters() if p.requires_grad and tensor.replace(".default", "") not in start]
    assert not missing and len(start) == sum(p.requires_grad for p in peft.parameters()), missing
    for tensor, p in peft.named_parameters():
        if p.requires_grad: p.data = start[tensor.replace(".default", "")].clone()
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    x, theirs = torch.from_numpy(sample)[None], []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(peft(x).logits[0].float(), x[0].roll(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    with case(f"{name}: the losses of {STEPS} steps are PEFT's"):
        off = np.abs(np.array(ours) - theirs)
        print(f"{name}: losses {ours[0]:.4f} to {ours[-1]:.4f}, largest difference {off.max():.1e}")
        # fp32 sums in another order differ by 1e-6 of a loss of up to 10, which Adam's division by small moments enlarges.
        assert len(ours) == STEPS and off.max() < 1e-4 and ours[-1] < ours[0] - 0.5, f"{ours} {theirs}"
    with case(f"{name}: PEFT gives our logits on the quantized model"):
        trained = WORK / f"{name}-trained"
        x.numpy().astype(np.int32).tofile(WORK / "tokens")
        subprocess.run([BUILD / "dump_logits", WORK / family, "tokens", str(len(sample)), "logits", "--adapter", trained], cwd=WORK,
                       check=True)
        logits = np.fromfile(WORK / "logits", np.float32).reshape(len(sample), V)
        with torch.no_grad(): theirs = PeftModel.from_pretrained(quantized(family, double), trained / "latest").train()(x).logits[0].float().numpy()
        assert np.abs(logits - theirs).max() < 1e-4 * max(1, np.abs(theirs).max()), np.abs(logits - theirs).max()


# Name, model, levels, double quantization, dtype: bitsandbytes rounds the numbers to it, we keep them in fp32.
FOLDERS = [("nf4", "llama", "nf4", False, torch.float32), ("nf4-nested", "llama", "nf4", True, torch.float32),
           ("fp4-nested", "tied", "fp4", True, torch.float32), ("gpt2-fp4", "gpt2", "fp4", False, torch.float32),
           ("bf16-nested", "tied", "nf4", True, torch.bfloat16), ("fp16", "llama", "fp4", False, torch.float16)]


def test_folder(name, family, kind, nested, dtype, sample):
    folder = WORK / name
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested,
                                  bnb_4bit_compute_dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(WORK / family, quantization_config=settings, dtype=dtype, device_map="cpu").save_pretrained(folder)
    with case(f"{name}: transformers' logits"):
        assert any("quant_state" in t for t in load_file(folder / "model.safetensors"))
        sample.astype(np.int32).tofile(WORK / "tokens")
        subprocess.run([BUILD / "dump_logits", folder, "tokens", str(len(sample)), "logits"], cwd=WORK, check=True)
        ours = np.fromfile(WORK / "logits", np.float32).reshape(len(sample), V)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", device_map="cpu").train()
        with torch.no_grad(): theirs = model(torch.from_numpy(sample)[None]).logits[0].float().numpy()
        off = np.abs(ours - theirs).max() / np.abs(theirs).max()
        print(f"{name}: logits differ by {off:.1e}")
        assert off < {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}[dtype], off
    with case(f"{name}: generate, eval, adapters"):
        shutil.copytree(WORK / "tokenizer", folder, dirs_exist_ok=True)
        run("generate", "--model", folder, "--prompt", "in the year", "--max-new-tokens", 4)
        run("eval", "--model", folder, "--text", "same.txt")
        losses = train(folder, 4, RATE, len(sample), f"{name}-trained")
        assert losses[-1] < losses[0], losses
        if name == "nf4": assert losses == train(WORK / family, 4, RATE, len(sample), f"{name}-original"), losses


def main():
    logging.disable_progress_bar()
    line = "in the year 37 the king of city 3 gave 11 sheep to his son\n"
    (WORK / "same.txt").write_text(line * 200)
    (WORK / "text.txt").write_text("".join(line.replace("37", str(i)) for i in range(600)))
    run("tokenizer", "--input", "text.txt", "--vocab-size", V, "--output", "tokenizer")
    run("prepare", "--input", "same.txt", "--output", "same", "--tokenizer", "tokenizer", "--no-append-eod")
    same = np.fromfile(WORK / "same.bin", np.uint16).astype(np.int64)
    for family in FAMILIES:
        save_family(family)
        for double in (False, True): test_family(family, same[:len(same) // 200], double)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**FAMILIES["llama"].to_dict(), "tie_word_embeddings": True}))
    model.save_pretrained(WORK / "tied")
    for folder in FOLDERS: test_folder(*folder, same[:len(same) // 200])
    sys.exit(summary())


main()
