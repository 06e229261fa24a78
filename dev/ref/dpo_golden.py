#!/usr/bin/env python3
"""Writes test/golden/dpo.safetensors, the reference for preference training in test/test_preference_fp64.cpp: the loss of
pairs of answers, their rewards, and every gradient, from plain PyTorch in float64 with autograd, on the models of
model_reference.py.

    python3 dev/ref/dpo_golden.py        torch, numpy; reproduces the same bytes

The formulas are from TRL's DPOTrainer, plus the label smoothing of conservative DPO (Mitchell, 2023). The reference is the same
model with its weights times 0.9. The file contains:
    tokens                (2 pairs, longest)   chosen and rejected alternately: a prompt of `prompt` tokens, then the answer; -1: none
    prompt                (pairs)
    CASE.reference        (pairs, 2)           log-probabilities of the chosen and the rejected answer by the reference
    CASE.loss, .rewards   (), (pairs, 2)       the mean loss; the rewards of each pair's answers
    CASE.grad.NAME                             gradients of the mean loss, if requested in CASES
"""
import numpy as np
import torch
import torch.nn.functional as F
from model_reference import CONFIGS, GOLDEN, MODELS, VOCABULARY, read_safetensors, write_safetensors

# family, loss, beta, label smoothing, gradients
CASES = {"llama": ("llama", "sigmoid", 0.5, 0.0, True), "llama.smoothed": ("llama", "sigmoid", 0.3, 0.2, False),
         "gpt2.ipo": ("gpt2", "ipo", 0.4, 0.0, True)}
PAIRS = [(2, 3, 4), (1, 2, 2), (3, 1, 2), (2, 4, 1), (4, 2, 1)]  # tokens of the prompt, of the chosen, of the rejected answer


def log_probability(model, config, parameters, tokens, prompt):
    logits = model(parameters, config, torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
    return logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])][prompt - 1:].sum()


def compute(family, loss, beta, smoothing, pairs):
    parameters = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True)
                  for name, x in read_safetensors(GOLDEN / f"{family}_tiny" / "model.safetensors").items()}
    reference = {name: 0.9 * x.detach() for name, x in parameters.items()}
    losses, rewards, references = [], [], []
    for prompt, *answers in pairs:
        ours, theirs = ([log_probability(MODELS[family], CONFIGS[family], p, tokens, prompt) for tokens in answers]
                        for p in (parameters, reference))
        ratios = [x - y for x, y in zip(ours, theirs)]
        references.append([x.item() for x in theirs])
        rewards.append([beta * x.item() for x in ratios])
        if loss == "ipo":  # per token
            ratios = [x / (len(tokens) - prompt) for x, tokens in zip(ratios, answers)]
        delta = ratios[0] - ratios[1]
        losses.append((delta - 1 / (2 * beta)) ** 2 if loss == "ipo" else
                      -(1 - smoothing) * F.logsigmoid(beta * delta) - smoothing * F.logsigmoid(-beta * delta))
    mean = torch.stack(losses).mean()
    mean.backward()
    return {"reference": np.array(references), "loss": np.array(mean.item()), "rewards": np.array(rewards)}, parameters


def main():
    torch.set_num_threads(1)
    rng = np.random.default_rng(4)
    pairs = []
    for prompt, chosen, rejected in PAIRS:
        begin = rng.integers(1, VOCABULARY, prompt).tolist()
        pairs.append((prompt, *(begin + rng.integers(1, VOCABULARY, n).tolist() for n in (chosen, rejected))))
    answers = [tokens for _, *both in pairs for tokens in both]
    longest = max(map(len, answers))
    file = {"tokens": np.array([tokens + [-1] * (longest - len(tokens)) for tokens in answers], np.int32),
            "prompt": np.array([prompt for prompt, *_ in pairs], np.int32)}
    for case, (*arguments, gradients) in CASES.items():
        numbers, parameters = compute(*arguments, pairs)
        file |= {f"{case}.{name}": x for name, x in numbers.items()}
        if gradients:
            file |= {f"{case}.grad.{name}": p.grad.numpy().astype(np.float32) for name, p in parameters.items()}
    write_safetensors(GOLDEN / "dpo.safetensors", file)


if __name__ == "__main__":
    main()
