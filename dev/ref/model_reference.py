#!/usr/bin/env python3
"""Golden values for the trainer: the three model families in plain PyTorch, their gradients by autograd, and 20 training steps.

    python3 dev/ref/model_reference.py                        writes test/golden/FAMILY_tiny/
    python3 dev/ref/model_reference.py --check-transformers   compares those directories with Hugging Face's own models

Nothing here is translated from the trainer: parameters have Hugging Face's names and layouts, gradients come from autograd, the
optimizer is torch.optim.AdamW, clipping is torch.nn.utils.clip_grad_norm_, and a step processes its whole global batch at once,
where the trainer accumulates micro-batches. A fixture directory contains

    config.json, model.safetensors   the model at the start, as saved by transformers
    train.toml                       options of the run, for train_gpt train --config
    golden.safetensors               the references of test/test_golden_fp32.cpp:
        tokens, targets   (S, T)     the S samples; step k uses G of them from k G mod S; target -1: not in the loss
        logits            (G, T, V)  of the first global batch
        ce, z             ()         its loss: mean cross-entropy, mean z-loss
        grad.NAME                    gradient of ce + z by every parameter
        steps.ce, steps.z, steps.norm, steps.lr   (steps)   norm: of the gradients before clipping
        final.NAME                   every parameter after the last step
        noise.KEY         ()         see below

All values are computed in float64 and stored as float32. Then everything is computed again in float32, and noise.KEY is the
largest resulting difference of KEY: the effect of float32 rounding on the same computations, the unit for tolerances.

Needs torch and numpy; --check-transformers also needs transformers (5.23: logits, losses and gradients agree to 6e-7 of a
tensor's largest element; transformers computes the angles of rotary positions in float32).
"""
import argparse
import json
import math
import pathlib
import struct

import numpy as np
import torch
import torch.nn.functional as F

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test" / "golden"
VOCABULARY, T, SAMPLES, GLOBAL_BATCH, STEPS, EOD = 61, 11, 8, 4, 20, 0

# Heads: 2 of size 14; 6 = 4 + 2, so that ALiBi needs its rule for other numbers; 3 query heads per key/value head.
CONFIGS = {
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 28, "n_layer": 2,
        "n_head": 2, "n_positions": 13, "n_inner": 36, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": EOD,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2,
        "n_head": 6, "seq_length": T, "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": EOD,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": T, "hidden_act": "silu", "rms_norm_eps": 1e-4, "rope_theta": 100.0, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": EOD,
    },
}

# An epsilon this large is distinguishable from one in another place, and keeps an update a smooth function of its gradient:
# at 1e-8, a gradient that is zero except for rounding would move its parameter as much as a real one. The learning rate
# passes through warm-up and decay.
OPTIONS = {
    "seq-length": T, "micro-batch-size": 2, "global-batch-size": GLOBAL_BATCH, "train-iters": STEPS, "lr": 0.01,
    "min-lr": 0.002, "lr-warmup-init": 0.001, "lr-warmup-iters": 4, "lr-decay-style": "cosine", "weight-decay": 0.1,
    "adam-beta1": 0.9, "adam-beta2": 0.95, "adam-eps": 1e-4, "z-loss-strength": 0.01, "eod-mask-loss": True,
}
CLIP_GRAD = {"gpt2": 2.0, "bloom": 1.2, "llama": 2.0}  # so that some steps are clipped and some are not


# ---- the models: p maps Hugging Face's names to tensors --------------------------------------------------------------
def layer_norm(p, name, x, eps):
    return F.layer_norm(x, x.shape[-1:], p[name + ".weight"], p[name + ".bias"], eps)


def attention(q, k, v, bias=None):
    """Causal softmax(q k^T / sqrt(d) + bias) v; q, k, v are (B, T, heads, d)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def gpt2(p, c, tokens):
    eps, heads = c["layer_norm_epsilon"], c["n_head"]

    def conv1d(name, x):  # weights are (in, out)
        return x @ p[name + ".weight"] + p[name + ".bias"]

    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(c["n_layer"]):
        h = f"transformer.h.{layer}."
        qkv = conv1d(h + "attn.c_attn", layer_norm(p, h + "ln_1", x, eps))
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in qkv.chunk(3, -1))
        x = x + conv1d(h + "attn.c_proj", attention(q, k, v))
        inner = F.gelu(conv1d(h + "mlp.c_fc", layer_norm(p, h + "ln_2", x, eps)), approximate="tanh")
        x = x + conv1d(h + "mlp.c_proj", inner)
    return layer_norm(p, "transformer.ln_f", x, eps) @ p["transformer.wte.weight"].T


def alibi_slopes(n):
    """As in the paper (Press et al., 2022): 2^(-8/n) and its powers; for other n, every second slope of 2c heads fills up."""
    if math.log2(n).is_integer():
        first = 2.0 ** (-8.0 / n)
        return [first ** (i + 1) for i in range(n)]
    c = 2 ** math.floor(math.log2(n))
    return alibi_slopes(c) + alibi_slopes(2 * c)[0::2][: n - c]


def bloom(p, c, tokens):
    eps, heads = c["layer_norm_epsilon"], c["n_head"]

    def linear(name, x):
        return F.linear(x, p[name + ".weight"], p[name + ".bias"])

    x = p["transformer.word_embeddings.weight"][tokens]
    bias = torch.tensor(alibi_slopes(heads), dtype=x.dtype)[:, None, None] * torch.arange(tokens.shape[1])
    x = layer_norm(p, "transformer.word_embeddings_layernorm", x, eps)
    for layer in range(c["n_layer"]):
        h = f"transformer.h.{layer}."
        qkv = linear(h + "self_attention.query_key_value", layer_norm(p, h + "input_layernorm", x, eps))
        q, k, v = qkv.unflatten(-1, (heads, 3, -1)).unbind(-2)  # rows are [q k v] of each head in turn
        x = x + linear(h + "self_attention.dense", attention(q, k, v, bias))
        y = layer_norm(p, h + "post_attention_layernorm", x, eps)
        inner = F.gelu(linear(h + "mlp.dense_h_to_4h", y), approximate="tanh")
        x = x + linear(h + "mlp.dense_4h_to_h", inner)
    return layer_norm(p, "transformer.ln_f", x, eps) @ p["transformer.word_embeddings.weight"].T


def llama(p, c, tokens):
    eps, d = c["rms_norm_eps"], c["head_dim"]

    def norm(name, x):
        return F.rms_norm(x, x.shape[-1:], p[name + ".weight"], eps)

    def heads(name, x):
        return F.linear(x, p[name + ".weight"]).unflatten(-1, (-1, d))

    x = p["model.embed_tokens.weight"][tokens]
    frequencies = c["rope_theta"] ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
    angles = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None] * frequencies

    def rotate(y):  # (B, T, heads, d): dimensions j and j + d/2 are one complex number
        z = torch.complex(y[..., : d // 2], y[..., d // 2 :]) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
        return torch.cat([z.real, z.imag], -1)

    group = c["num_attention_heads"] // c["num_key_value_heads"]
    for layer in range(c["num_hidden_layers"]):
        h = f"model.layers.{layer}."
        y = norm(h + "input_layernorm", x)
        q, k, v = (heads(h + f"self_attn.{which}_proj", y) for which in "qkv")
        k, v = rotate(k).repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        x = x + F.linear(attention(rotate(q), k, v), p[h + "self_attn.o_proj.weight"])
        y = norm(h + "post_attention_layernorm", x)
        inner = F.silu(F.linear(y, p[h + "mlp.gate_proj.weight"])) * F.linear(y, p[h + "mlp.up_proj.weight"])
        x = x + F.linear(inner, p[h + "mlp.down_proj.weight"])
    return norm("model.norm", x) @ p["lm_head.weight"].T


MODELS = {"gpt2": gpt2, "bloom": bloom, "llama": llama}


def parameter_shapes(family, c):
    """Name and shape of every parameter, in the model's order."""
    shapes = {}

    def linear(name, n_in, n_out):
        shapes[name + ".weight"] = (n_in, n_out) if family == "gpt2" else (n_out, n_in)
        if family != "llama":
            shapes[name + ".bias"] = (n_out,)

    def norm(name):
        shapes[name + ".weight"] = (C,)
        if family != "llama":
            shapes[name + ".bias"] = (C,)

    if family == "gpt2":
        C = c["n_embd"]
        shapes["transformer.wte.weight"] = (VOCABULARY, C)
        shapes["transformer.wpe.weight"] = (c["n_positions"], C)
        for layer in range(c["n_layer"]):
            h = f"transformer.h.{layer}."
            norm(h + "ln_1"), linear(h + "attn.c_attn", C, 3 * C), linear(h + "attn.c_proj", C, C)
            norm(h + "ln_2"), linear(h + "mlp.c_fc", C, c["n_inner"]), linear(h + "mlp.c_proj", c["n_inner"], C)
        norm("transformer.ln_f")
    elif family == "bloom":
        C = c["hidden_size"]
        shapes["transformer.word_embeddings.weight"] = (VOCABULARY, C)
        norm("transformer.word_embeddings_layernorm")
        for layer in range(c["n_layer"]):
            h = f"transformer.h.{layer}."
            norm(h + "input_layernorm")
            linear(h + "self_attention.query_key_value", C, 3 * C), linear(h + "self_attention.dense", C, C)
            norm(h + "post_attention_layernorm")
            linear(h + "mlp.dense_h_to_4h", C, 4 * C), linear(h + "mlp.dense_4h_to_h", 4 * C, C)
        norm("transformer.ln_f")
    else:
        C, inner, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]
        shapes["model.embed_tokens.weight"] = (VOCABULARY, C)
        for layer in range(c["num_hidden_layers"]):
            h = f"model.layers.{layer}."
            norm(h + "input_layernorm")
            linear(h + "self_attn.q_proj", C, C), linear(h + "self_attn.k_proj", C, kv), linear(h + "self_attn.v_proj", C, kv)
            linear(h + "self_attn.o_proj", C, C)
            norm(h + "post_attention_layernorm")
            linear(h + "mlp.gate_proj", C, inner), linear(h + "mlp.up_proj", C, inner), linear(h + "mlp.down_proj", inner, C)
        norm("model.norm")
        shapes["lm_head.weight"] = (VOCABULARY, C)
    return shapes


def random_parameters(family, c, rng):
    """float32, large enough that attention is far from uniform; gains different from 1 and biases from 0."""
    parameters = {}
    for name, shape in parameter_shapes(family, c).items():
        values = rng.standard_normal(shape) * (0.3 if len(shape) == 1 else 0.2)
        if len(shape) == 1 and name.endswith(".weight"):
            values += 1  # a norm's gain
        parameters[name] = values.astype(np.float32)
    return parameters


# ---- loss and training -----------------------------------------------------------------------------------------------
def losses(logits, targets):
    """Means over the unmasked targets of the cross-entropy and of the z-loss (PaLM): strength * (log sum exp logits)^2."""
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    log_z = logits.logsumexp(-1)[targets >= 0]
    return ce, OPTIONS["z-loss-strength"] * log_z.square().mean()


def learning_rate(step):
    """The learning rate after `step` steps: linear warm-up, then cosine (Megatron-LM)."""
    o = OPTIONS
    lr, low, warmup = o["lr"], o["min-lr"], o["lr-warmup-iters"]
    if step <= warmup:
        return o["lr-warmup-init"] + (lr - o["lr-warmup-init"]) * step / warmup
    ratio = (step - warmup) / (o["train-iters"] - warmup)
    return low + 0.5 * (math.cos(math.pi * ratio) + 1) * (lr - low)


def compute(family, parameters, tokens, targets, dtype):
    """Every golden value, in `dtype`."""
    o, c, model = OPTIONS, CONFIGS[family], MODELS[family]
    tokens, targets = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()
    p = {name: torch.tensor(x, dtype=dtype, requires_grad=True) for name, x in parameters.items()}  # copies
    decayed = [x for x in p.values() if x.dim() > 1]
    others = [x for x in p.values() if x.dim() == 1]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": o["weight-decay"]}, {"params": others, "weight_decay": 0.0}],
                              lr=o["lr"], betas=(o["adam-beta1"], o["adam-beta2"]), eps=o["adam-eps"])
    golden, history = {}, {"ce": [], "z": [], "norm": [], "lr": []}
    for step in range(o["train-iters"]):
        rows = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH) % SAMPLES
        adamw.zero_grad()
        logits = model(p, c, tokens[rows])
        ce, z = losses(logits, targets[rows])
        (ce + z).backward()
        if step == 0:
            golden.update(logits=logits.detach().clone(), ce=ce.detach(), z=z.detach())
            golden.update({"grad." + name: x.grad.clone() for name, x in p.items()})
        norm = torch.nn.utils.clip_grad_norm_(p.values(), CLIP_GRAD[family])
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step)
        adamw.step()
        for key, value in (("ce", ce.item()), ("z", z.item()), ("norm", norm.item()), ("lr", learning_rate(step))):
            history[key].append(value)
    golden.update({"steps." + key: torch.tensor(values, dtype=torch.float64) for key, values in history.items()})
    golden.update({"final." + name: x.detach() for name, x in p.items()})
    return {name: x.double().numpy() for name, x in golden.items()}


def random_samples(rng):
    """Sample s is T tokens; the token after the last is the first again. There is no loss where the input ends a document."""
    tokens = rng.integers(1, VOCABULARY, (SAMPLES, T)).astype(np.int32)
    for sample in range(SAMPLES):
        tokens[sample, rng.choice(T, sample % 4, replace=False)] = EOD  # samples differ in their number of targets
    return tokens, np.where(tokens == EOD, -1, np.roll(tokens, -1, 1)).astype(np.int32)


# ---- files -----------------------------------------------------------------------------------------------------------
def write_safetensors(path, tensors):
    """8 bytes of header length, the header in JSON, the data; everything little-endian."""
    header, begin = {"__metadata__": {"format": "pt"}}, 0
    for name, x in tensors.items():
        dtype, end = {"float32": "F32", "float64": "F64", "int32": "I32"}[x.dtype.name], begin + x.nbytes
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            out.write(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")).tobytes())


def write_fixture(family):
    rng = np.random.default_rng(20 + list(MODELS).index(family))
    parameters = random_parameters(family, CONFIGS[family], rng)
    tokens, targets = random_samples(rng)
    exact = compute(family, parameters, tokens, targets, torch.float64)
    rounded = compute(family, parameters, tokens, targets, torch.float32)

    norms = exact["steps.norm"]
    clipped = int((norms > CLIP_GRAD[family]).sum())
    n_parameters, ce = sum(x.size for x in parameters.values()), exact["steps.ce"]
    print(f"{family}: {n_parameters} parameters, ce {ce[0]:.4f} to {ce[-1]:.4f}, z {exact['z']:.4f},"
          f" norm {norms[0]:.3f} to {norms[-1]:.3f}, {clipped} of {STEPS} steps clipped")
    assert 4 <= clipped <= STEPS - 4, "some steps should be clipped and some not"

    directory = GOLDEN / f"{family}_tiny"
    directory.mkdir(parents=True, exist_ok=True)
    options = {**OPTIONS, "clip-grad": CLIP_GRAD[family]}
    (directory / "config.json").write_text(json.dumps(CONFIGS[family], indent=2) + "\n")
    (directory / "train.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items()))
    write_safetensors(directory / "model.safetensors", parameters)
    golden = {"tokens": tokens, "targets": targets}
    golden.update({name: x.astype(np.float32) for name, x in exact.items()})
    golden.update({"noise." + name: np.abs(rounded[name] - x).max().astype(np.float32) for name, x in exact.items()})
    write_safetensors(directory / "golden.safetensors", golden)


def read_safetensors(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    tensors = {}
    for name, t in header.items():
        begin, end = (8 + length + offset for offset in t["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], {"F32": "<f4", "I32": "<i4"}[t["dtype"]]).reshape(t["shape"])
    return tensors


def check_transformers(family):
    """Loads the directory with transformers, in float64, and compares logits, losses and gradients."""
    from transformers import AutoModelForCausalLM

    directory = GOLDEN / f"{family}_tiny"
    golden = read_safetensors(directory / "golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    logits = model(torch.from_numpy(golden["tokens"][:GLOBAL_BATCH].copy()).long()).logits
    ce, z = losses(logits, torch.from_numpy(golden["targets"][:GLOBAL_BATCH].copy()).long())
    (ce + z).backward()
    theirs = {"logits": logits, "ce": ce, "z": z, **{"grad." + name: x.grad for name, x in model.named_parameters()}}
    assert set(theirs) == {name for name in golden if name in ("logits", "ce", "z") or name.startswith("grad.")}
    worst = {name: np.abs(x.detach().numpy() - golden[name]).max() / np.abs(golden[name]).max() for name, x in theirs.items()}
    name = max(worst, key=worst.get)
    print(f"{family}: {len(worst)} tensors differ from transformers' by at most {worst[name]:.1e} of their largest ({name})")
    assert worst[name] <= 1e-5


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-transformers", action="store_true", help="compare with transformers, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    for family in MODELS:
        (check_transformers if arguments.check_transformers else write_fixture)(family)
