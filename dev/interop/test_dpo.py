"""Preference training compared with TRL's DPOTrainer: `make test-interop`. The same small Llama, pairs of answers and
AdamW, in fp32; a step uses all pairs, so that their order does not matter. Losses, rewards and accuracies of ten steps, and
the final weights, must equal TRL's.

    test_dpo.py BUILD_FP32     a folder with train_gpt; ends with `N passed, N failed`
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from cases import case, summary

BUILD = Path(sys.argv[1]).resolve()
WORK = Path(tempfile.mkdtemp(prefix="dpo_"))
PAIRS, STEPS, LR, LONGEST = 8, 10, 2e-3, 64


def run(*command):
    done = subprocess.run([str(x) for x in command], cwd=WORK, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ours(loss, beta):
    out = WORK / loss
    run(BUILD / "train_gpt", "train", "--model", "model", "--tokenizer", "tokenizer", "--data-path", "pairs", "--split", "1, 0, 0",
        "--eval-iters", 0, "--dpo-beta", beta, "--dpo-loss", loss, "--seq-length", LONGEST, "--micro-batch-size", PAIRS,
        "--train-iters", STEPS, "--lr", LR, "--lr-decay-style", "constant", "--weight-decay", 0, "--clip-grad", 0, "--adam-beta2", 0.999,
        "--out", out)
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [s for s in steps if s["kind"] == "step"]
    return steps, load_file(out / "latest" / "model.safetensors")


def theirs(loss, beta, pairs, tokenizer):
    options = DPOConfig(output_dir=str(WORK / "trl"), loss_type=[loss], beta=beta, max_length=LONGEST, learning_rate=LR,
                        lr_scheduler_type="constant", per_device_train_batch_size=PAIRS, max_steps=STEPS, logging_steps=1, max_grad_norm=0,
                        weight_decay=0.0, optim="adamw_torch", bf16=False, use_cpu=True, report_to=[], save_strategy="no",
                        disable_tqdm=True, log_level="error", gradient_checkpointing=False)
    model = LlamaForCausalLM.from_pretrained(WORK / "model", dtype=torch.float32)
    trainer = DPOTrainer(model=model, args=options, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    trainer.train()
    return [s for s in trainer.state.log_history if "rewards/chosen" in s], model.state_dict()


def main():
    pairs = [{"prompt": f"Who lives by the sea {i}?", "chosen": f" A fish lives in {i * 7 % 10}.", "rejected": f" No idea about {i * 3 % 10}."}
             for i in range(PAIRS)]
    (WORK / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (WORK / "text.txt").write_text("".join(" ".join(pair.values()) + "\n" for pair in pairs))
    run(BUILD / "train_gpt", "tokenizer", "--input", "text.txt", "--vocab-size", 280, "--output", "tokenizer")
    run(BUILD / "train_gpt", "prepare", "--preference", "--chat-template", "plain", "--input", "pairs.jsonl", "--output", "pairs",
        "--tokenizer", "tokenizer")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(WORK / "tokenizer" / "tokenizer.json"), eos_token="<|endoftext|>",
                                        pad_token="<|endoftext|>")
    torch.manual_seed(3)
    LlamaForCausalLM(LlamaConfig(vocab_size=280, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                 intermediate_size=64, max_position_embeddings=LONGEST, tie_word_embeddings=False, bos_token_id=0,
                                 eos_token_id=0, pad_token_id=None, initializer_range=0.2)).save_pretrained(WORK / "model")
    for loss, beta in (("sigmoid", 0.1), ("sigmoid", 1.0), ("ipo", 0.3)):
        name = f"{loss}, beta {beta}"
        with case(f"{name}: {STEPS} steps have the losses, rewards and accuracies of TRL"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run("rm", "-rf", WORK / loss)
            steps, weights = ours(loss, beta)
            expected, their_weights = theirs(loss, beta, pairs, tokenizer)
            assert len(steps) == len(expected) == STEPS, (len(steps), len(expected))
            worst = 0.0
            for s, e in zip(steps, expected):
                for mine, key in (("loss", "loss"), ("reward_chosen", "rewards/chosen"), ("reward_rejected", "rewards/rejected"),
                                  ("reward_margin", "rewards/margins"), ("reward_accuracy", "rewards/accuracies")):
                    worst = max(worst, abs(s[mine] - e[key]) / max(1, abs(e[key])))
            difference = max((weights[k] - their_weights[k]).abs().max().item() for k in weights)
            print(f"    loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}; largest difference of numbers {worst:.1e}, of weights "
                  f"{difference:.1e}", flush=True)
            assert worst < 1e-3 and difference < LR, (worst, difference)
    sys.exit(summary())


main()
