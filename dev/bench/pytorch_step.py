"""One training step in PyTorch, written for speed, as a worker for cpu.py: the equivalent of `bench --serve`.

    pytorch_step.py KEY=VALUE...    the lines of `bench --describe`, and B, T, threads, precision (bf16 or fp32) and
                                    variant (eager or compiled; of a mixture of experts eager or grouped_mm)

Prints "ready" and its configuration; for each count read from stdin runs that many steps and prints the milliseconds of
each; at the end of the input prints the peak memory of the process in bytes.

A step is the same as ours: forward, loss over all logits, backward, gradient norm and clipping, AdamW. Weights are fp32 in both
precisions; bf16 runs under autocast, as in usual training. One projection computes queries, keys and values, one gate and up;
attention is scaled_dot_product_attention, AdamW the fused one. A mixture is transformers' OLMoE with either of its
implementations of experts.

Tried without gain: the residual stream in bf16 (RMSNorm and LayerNorm are fp32 under autocast), cross-entropy of bf16
logits, huge pages. cpu.py makes glibc's malloc keep memory between steps, which makes eager steps 13-16% shorter.
"""
import re
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class GPT2Block(nn.Module):
    """Pre-LayerNorm block with biases and tanh GELU."""

    def __init__(self, s: dict):
        super().__init__()
        self.n_heads = s["NH"]
        self.ln_1, self.ln_2 = nn.LayerNorm(s["C"], s["eps"]), nn.LayerNorm(s["C"], s["eps"])
        self.qkv, self.attention_out = nn.Linear(s["C"], 3 * s["C"]), nn.Linear(s["C"], s["C"])
        self.fc, self.fc_out = nn.Linear(s["C"], s["F"]), nn.Linear(s["F"], s["C"])

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # (B, NH, T, HS) each
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Learned positions, head tied to the embedding."""

    def __init__(self, s: dict):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(s["V"], s["C"]), nn.Embedding(s["positions"], s["C"])
        self.blocks = nn.ModuleList(GPT2Block(s) for _ in range(s["L"]))
        self.ln_f = nn.LayerNorm(s["C"], s["eps"])

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.ln_f(x), self.wte.weight).flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    """Pre-RMSNorm block with rotary positions, grouped queries and SwiGLU, without biases."""

    def __init__(self, s: dict):
        super().__init__()
        self.heads = [s["NH"], s["NKV"], s["NKV"]]
        size = s["C"] // s["NH"]
        self.norm_1, self.norm_2 = nn.RMSNorm(s["C"], s["eps"]), nn.RMSNorm(s["C"], s["eps"])
        self.qkv = nn.Linear(s["C"], sum(self.heads) * size, bias=False)
        self.attention_out = nn.Linear(s["C"], s["C"], bias=False)
        self.gate_up, self.down = nn.Linear(s["C"], 2 * s["F"], bias=False), nn.Linear(s["F"], s["C"], bias=False)

    def forward(self, x, cos, sin):
        n_q, n_k, n_v = self.heads
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (n_q + n_k + n_v, -1))
        qk, v = qkv.split([n_q + n_k, n_v], 2)
        a, b = qk.chunk(2, -1)
        qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)  # queries and keys at once
        q, k = qk.split([n_q, n_k], 2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                           enable_gqa=n_q != n_k)
        x = x + self.attention_out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Embedding and head are two matrices."""

    def __init__(self, s: dict):
        super().__init__()
        self.embedding, self.head = nn.Embedding(s["V"], s["C"]), nn.Linear(s["C"], s["V"], bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(s) for _ in range(s["L"]))
        self.norm = nn.RMSNorm(s["C"], s["eps"])
        size = s["C"] // s["NH"]
        angles = torch.arange(s["T"])[:, None] / s["rope_base"] ** (torch.arange(0, size, 2) / size)
        dtype = torch.bfloat16 if s["precision"] == "bf16" else torch.float32  # fp32 factors would widen queries and keys
        self.register_buffer("cos", angles.cos()[:, None].to(dtype))  # (T, 1, HS/2)
        self.register_buffer("sin", angles.sin()[:, None].to(dtype))

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Olmoe(nn.Module):
    """transformers' mixture of experts."""

    def __init__(self, s: dict):
        from transformers import OlmoeConfig, OlmoeForCausalLM
        super().__init__()
        config = OlmoeConfig(hidden_size=s["C"], intermediate_size=s["F"], num_hidden_layers=s["L"], vocab_size=s["V"],
                             num_attention_heads=s["NH"], num_key_value_heads=s["NKV"], num_experts=s["experts"],
                             num_experts_per_tok=s["topk"], rms_norm_eps=s["eps"], max_position_embeddings=s["positions"],
                             pad_token_id=None, bos_token_id=None, eos_token_id=None)
        self.model = OlmoeForCausalLM._from_config(config, experts_implementation=s["variant"], attn_implementation="sdpa")

    def forward(self, tokens, targets):
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_adamw(parameters):
    """The fused optimizer, which this PyTorch may not have for CPUs."""
    options = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    try:
        return torch.optim.AdamW(parameters, fused=True, **options), "fused"
    except RuntimeError:
        return torch.optim.AdamW(parameters, foreach=True, **options), "foreach"


def make_step(s: dict):
    """Returns the step, its model, and the kind of its AdamW."""
    torch.manual_seed(1)
    model = {"gpt2": GPT2, "llama": Llama, "olmoe": Olmoe}[s["family"]](s)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    parameters = list(model.parameters())
    adamw, kind = make_adamw(parameters)
    tokens, targets = torch.randint(s["V"], (2, s["B"], s["T"]))
    loss_of = torch.compile(model) if s["variant"] == "compiled" else model

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=s["precision"] == "bf16"):
            loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step, model, kind


def peak_memory() -> int:
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read())[1])


def main():
    import_bytes = peak_memory()
    s = dict(word.split("=", 1) for word in sys.argv[1:])
    for key in s.keys() - {"family", "precision", "variant"}:
        s[key] = float(s[key]) if key in ("eps", "rope_base", "flops") else int(s[key])
    torch.set_num_threads(s["threads"])
    step, model, kind = make_step(s)
    n_parameters = sum(p.numel() for p in model.parameters())
    onednn = re.search(r"MKL-DNN v([\d.]+)", torch.__config__.show())
    print("ready", f"torch={torch.__version__}", f"oneDNN={onednn[1] if onednn else 'none'}", f"adamw={kind}",
          f"import={import_bytes}", f"parameters={n_parameters}", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        print(*(f"{t:.4f}" for t in times), flush=True)
    print(peak_memory(), flush=True)


if __name__ == "__main__":
    main()
