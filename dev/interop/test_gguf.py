"""llama.cpp's files, in both directions: part of `make test-interop`.

  1  `train_gpt export --gguf` of a transformers model, read by gguf: every tensor under the name that llama.cpp's converter
     uses, bit by bit in F32, F16, BF16 and Q8_0, and the metadata
  2  files written by gguf (eleven types), read by `train_gpt import`: numbers equal gguf's, bit by bit
  3  llama.cpp runs the exported model: our tokens, our loss and our greedy text

llama.cpp is part of the package llama-cpp-python, which pip compiles: a quarter of an hour on two cores. Its loss may
differ from ours by 2e-3, as it computes GeLU from a table in fp16, in Q8_0 by 3e-2.

    test_gguf.py BUILD_FP32     a folder with train_gpt; ends with `N passed, N failed`
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import gguf
import llama_cpp.llama_cpp
import numpy as np
import torch
import transformers
from llama_cpp import Llama
from safetensors.numpy import load_file

import cases
import results
sys.path.append(str(Path(__file__).resolve().parents[1] / "ref"))
import remote_families
from cases import case, summary

PROGRAM = Path(sys.argv[1]).resolve() / "train_gpt"
GOLDEN = Path(__file__).resolve().parents[2] / "test/golden/tokenizer"
WORK = Path(tempfile.mkdtemp(prefix="gguf_"))
V, T = 640, 64  # more ids than the tokenizer has
TEXT = "In the year 1234 the king gave 12 sheep to his son, and it was good.\n" * 2

SIZES = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": T, "num_hidden_layers": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
          "original_max_position_embeddings": 32}
GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 4.0}
# A family: its config class, its settings, and gguf's architecture.
FAMILIES = {
    "gpt2": ("GPT2Config", {"vocab_size": V, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": T}, "GPT2"),
    "bloom": ("BloomConfig", {"vocab_size": V, "hidden_size": 64, "n_layer": 2, "n_head": 4, "seq_length": T}, "BLOOM"),
    "llama": ("LlamaConfig", SIZES | {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}, "LLAMA"),
    "llama3": ("LlamaConfig", SIZES | {"tie_word_embeddings": True, "rope_scaling": LLAMA3, "attention_bias": True}, "LLAMA"),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": None, "head_dim": 24}, "LLAMA"),
    "qwen2": ("Qwen2Config", SIZES | {"tie_word_embeddings": False}, "QWEN2"),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 24, "tie_word_embeddings": True}, "QWEN3"),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2}, "LLAMA"),
    "qwen2_moe": ("Qwen2MoeConfig", SIZES | {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 80, "num_experts": 5,
                                             "num_experts_per_tok": 3}, "QWEN2MOE"),
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | {"head_dim": 24, "moe_intermediate_size": 96, "num_experts": 5,
                                             "num_experts_per_tok": 3, "norm_topk_prob": True}, "QWEN3MOE"),
    "olmoe": ("OlmoeConfig", SIZES | {"num_experts": 5, "num_experts_per_tok": 3}, "OLMOE"),
    "granite": ("GraniteConfig", SIZES | GRANITE | {"tie_word_embeddings": True}, "GRANITE"),
    "granitemoe": ("GraniteMoeConfig", SIZES | GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 3}, "GRANITE_MOE"),
    "minicpm": ("MiniCPMConfig", SIZES | {"scale_emb": 6.0, "scale_depth": 0.5, "dim_model_base": 16}, "MINICPM"),
    "cohere": ("CohereConfig", SIZES | {"logit_scale": 0.25}, "COMMAND_R"),
    "cohere2": ("Cohere2Config", SIZES | {"logit_scale": 0.25, "sliding_window": 16, "num_hidden_layers": 5}, "COHERE2"),
    "internlm2": ("InternLM2Config", SIZES | {"bias": False}, "INTERNLM2"),
    "mpt": ("MptConfig", {"vocab_size": V, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": T}, "MPT"),
    "falcon": ("FalconConfig", {"vocab_size": V, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                                "max_position_embeddings": T}, "FALCON"),
    "falcon 40B": ("FalconConfig", {"vocab_size": V, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
                                    "new_decoder_architecture": True, "num_kv_heads": 2, "max_position_embeddings": T}, "FALCON"),
    "phi": ("PhiConfig", SIZES | {"num_key_value_heads": 4, "intermediate_size": 256}, "PHI2"),
    "internlm3": ("InternLM3Config", SIZES, "LLAMA"),
    "exaone": ("ExaoneConfig", SIZES | {"rope_parameters": LLAMA3}, "EXAONE"),
    "smollm3": ("SmolLM3Config", SIZES | {"num_hidden_layers": 5}, "SMOLLM3"),
    "olmo2": ("Olmo2Config", SIZES, "OLMO2"),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {"intermediate_size": 256},
                 "GPTNEOX"),
    "gemma": ("GemmaConfig", SIZES | {"head_dim": 24}, "GEMMA"),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 16,
                                        "num_hidden_layers": 26}, "GEMMA2"),  # older llama.cpp supports no other number
    "gemma3": ("Gemma3TextConfig", SIZES | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 16,
                                            "num_hidden_layers": 7}, "GEMMA3"),
}


def config_class(family):
    name = FAMILIES[family][0]
    return getattr(transformers, name, None) or getattr(remote_families, name)


EXPERT = r"(?<=experts\.)\d+\."  # its number in the name of a tensor


def train_gpt(*arguments):
    done = subprocess.run([PROGRAM, *map(str, arguments)], cwd=WORK, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout


def make_model(family, dtype=torch.float32):
    """A directory with random weights, none of them zero or one, and a byte-level tokenizer."""
    torch.manual_seed(1)
    settings = FAMILIES[family][1]
    config = config_class(family)(**settings, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.1 if p.ndim > 1 else 0.2))
    folder = WORK / family
    model.to(dtype).save_pretrained(folder)
    shutil.copy(GOLDEN / "gpt2.json", folder / "tokenizer.json")
    return folder, config


def expected_tensors(folder, config, arch):
    """The weights as converted by llama.cpp's converter: {name: fp32 array}."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), config.num_hidden_layers)
    heads, expected, experts = config.num_attention_heads, {}, {}
    for name, w in load_file(folder / "model.safetensors").items():
        w = w.astype(np.float32)
        if arch == "GPT2" and ("attn.c_" in name or "mlp.c_" in name):
            w = w.T
        if "query_key_value" in name or "wqkv" in name:
            groups = getattr(config, "num_key_value_heads", 0) or (
                heads if arch != "FALCON" else config.num_kv_heads if config.new_decoder_architecture else 1)
            grouped = w.reshape(groups, heads // groups + 2, -1, *w.shape[1:])
            q, k, v = (x.reshape(-1, *w.shape[1:]) for x in (grouped[:, :-2], grouped[:, -2], grouped[:, -1]))
            w = np.concatenate([q, k, v])
            if arch == "INTERNLM2":
                for part, x, n in ("q", q, heads), ("k", k, groups), ("v", v, 0):
                    x = x.reshape(n, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(x.shape) if n else x
                    expected[f"blk.{name.split('.')[2]}.attn_{part}.weight"] = np.ascontiguousarray(x)
                continue
        if arch in ("LLAMA", "SMOLLM3", "GRANITE", "GRANITE_MOE", "MINICPM") and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else config.num_key_value_heads
            w = w.reshape(n, 2, w.shape[0] // n // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if arch.startswith("GEMMA") and name.endswith("norm.weight"):
            w = w + 1
        if name.endswith("input_linear.weight"):  # Granite: gate and up of all experts in one tensor
            for part, half in zip(("gate", "up"), np.split(w, 2, axis=1)):
                expected[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = np.ascontiguousarray(half)
            continue
        stem = name.removeprefix("transformer.") if arch == "BLOOM" else name
        expert = re.search(EXPERT, stem)
        found = names.get_name(re.sub(EXPERT, "", stem), try_suffixes=(".weight", ".bias"))
        assert found, name
        if expert:
            experts.setdefault(found, {})[int(expert[0][:-1])] = w
        else:
            expected[found] = np.ascontiguousarray(w)
    for name, matrices in experts.items():
        expected[name] = np.stack([matrices[e] for e in range(len(matrices))])
    if arch in ("OLMO2", "GPTNEOX") and "output.weight" not in expected:
        expected["output.weight"] = expected["token_embd.weight"]
    return expected


TYPES = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16,
         "q8_0": gguf.GGMLQuantizationType.Q8_0}


def check_tensors(reader, expected, kind):
    tensors = {t.name: t for t in reader.tensors}
    assert set(tensors) - {"rope_freqs.weight"} == set(expected), set(tensors) ^ set(expected)
    for name, w in expected.items():
        wide = w.ndim == 1 or name == "position_embd.weight" or "ffn_gate_inp" in name  # routers
        t, kind_of = tensors[name], TYPES["f32" if wide else kind]
        if w.ndim > 1 and kind_of == TYPES["q8_0"] and w.shape[-1] % 32:
            kind_of = TYPES["f16"]
        assert t.tensor_type == kind_of, (name, t.tensor_type)
        assert list(t.shape) == list(w.shape[::-1]), (name, t.shape, w.shape)
        assert t.data.tobytes() == gguf.quantize(w, kind_of).tobytes(), name


def check_metadata(reader, config, arch):
    fields = {key: field.contents() for key, field in reader.fields.items()}
    name = gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, arch)]
    assert fields["general.architecture"] == name and fields["general.quantization_version"] == 2
    of = lambda key: fields[f"{name}.{key}"]
    assert of("block_count") == config.num_hidden_layers and of("embedding_length") == config.hidden_size
    assert of("context_length") == T and of("attention.head_count") == config.num_attention_heads
    assert of("feed_forward_length") == (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    if "ffn_gate_inp" in " ".join(t.name for t in reader.tensors):
        assert of("expert_count") == 5 and of("expert_used_count") == config.num_experts_per_tok
    eps = next(getattr(config, k) for k in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") if hasattr(config, k))
    if hasattr(config, "residual_multiplier"):
        for key, multiplier in ("attention.scale", "attention"), ("embedding_scale", "embedding"), ("residual_scale", "residual"):
            assert of(key) == np.float32(getattr(config, f"{multiplier}_multiplier")), key
        assert of("logit_scale") == np.float32(config.logits_scaling)
    if hasattr(config, "scale_depth"):
        assert of("embedding_scale") == config.scale_emb and of("logit_scale") == config.hidden_size / config.dim_model_base
        assert of("residual_scale") == np.float32(config.scale_depth / config.num_hidden_layers**0.5)
    if arch in ("COMMAND_R", "COHERE2"):
        assert of("logit_scale") == config.logit_scale
    rms = hasattr(config, "rms_norm_eps")
    assert of("attention.layer_norm_rms_epsilon" if rms else "attention.layer_norm_epsilon") == np.float32(eps)
    tokenizer = json.loads((GOLDEN / "gpt2.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    assert len(tokens) == V and tokens[:len(vocabulary)] == vocabulary
    assert merges == [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    assert len(fields["tokenizer.ggml.token_type"]) == V and fields["tokenizer.ggml.eos_token_id"] == 0


def without_amx(defaults=llama_cpp.llama_cpp.llama_model_default_params):
    """Weights unchanged: repacked for AMX, products in Q8_0 of these sizes end in a segmentation fault (0.3.36)."""
    params = defaults()
    params.use_extra_bufts = False
    return params


class LlamaCpp:
    """A model in llama.cpp, on one thread, with an fp32 cache."""

    def __init__(self, path):
        fp32 = int(TYPES["f32"])
        llama_cpp.llama_cpp.llama_model_default_params = without_amx
        self.llama = Llama(str(path), n_ctx=T, n_batch=T, n_threads=1, n_threads_batch=1, logits_all=True, flash_attn=False,
                           type_k=fp32, type_v=fp32, verbose=False)

    def tokens(self, text):
        return self.llama.tokenize(text.encode(), add_bos=False)

    def loss(self, tokens):
        self.llama.eval(tokens)
        rows = self.llama.scores[:len(tokens) - 1].astype(np.float64)
        most = rows.max(axis=1)
        sums = most + np.log(np.exp(rows - most[:, None]).sum(axis=1))
        return float(np.mean(sums - rows[np.arange(len(rows)), tokens[1:]]))

    def greedy(self, tokens, n):
        self.llama.eval(tokens)
        written = []
        for at in range(len(tokens) - 1, len(tokens) - 1 + n):
            token = int(self.llama.scores[at].argmax())
            if token == 0:
                break
            written.append(token)
            self.llama.eval([token])
        return self.llama.detokenize(written)


def exported(family):
    """The difference of llama.cpp's loss from ours in single precision."""
    differences = []
    folder, config = make_model(family)
    arch = FAMILIES[family][2]
    expected = expected_tensors(folder, config, arch)
    files = {kind: WORK / f"{family}.{kind}.gguf" for kind in TYPES}
    for kind, path in files.items():
        with case(f"{family}: gguf reads our {kind}"):
            train_gpt("export", "--model", folder, "--gguf", path, "--type", kind)
            reader = gguf.GGUFReader(path)
            check_tensors(reader, expected, kind)
            check_metadata(reader, config, arch)
    for kind, tolerance in (("f32", 2e-3), ("q8_0", 3e-2)):
        with case(f"{family}: llama.cpp's loss in {kind} is ours"):
            theirs = LlamaCpp(files[kind])
            tokens = theirs.tokens(TEXT)[:T]
            # this text's tokens, so that ours is one sample of as many
            (WORK / "short.txt").write_bytes(theirs.llama.detokenize(tokens))
            found = json.loads(train_gpt("eval", "--model", folder, "--text", "short.txt", "--json"))["evaluation"]
            assert found["tokens"] == len(tokens) - 1, (found, len(tokens))
            loss = theirs.loss(tokens)
            differences.append(abs(loss - found["loss"]))
            assert abs(loss - found["loss"]) < tolerance, (loss, found["loss"])
    with case(f"{family}: llama.cpp's greedy text is ours"):
        prompt = "In the year 12"
        ours = train_gpt("generate", "--model", folder, "--prompt", prompt, "--max-new-tokens", 24, "--temperature", 0)
        theirs = LlamaCpp(files["f32"])
        text = theirs.greedy(theirs.tokens(prompt), 24)
        ours = re.sub(rb"<\|id \d+\|>", b"", ours)  # ids missing in the tokenizer
        assert ours == prompt.encode() + text + b"\n", (ours, text)
    return differences[0]


def imported(kind, experts):
    """A Llama or, with experts, a Mixtral with matrices of this type, written by gguf."""
    random = np.random.default_rng(1)
    quant = gguf.GGMLQuantizationType[kind]
    path, out = WORK / f"{kind}-{experts}.gguf", WORK / f"from-{kind}-{experts}"
    elements, size = gguf.GGML_QUANT_SIZES[quant]
    writer = gguf.GGUFWriter(path, "llama")
    C, F = 256, 512
    for add, x in ((writer.add_context_length, T), (writer.add_embedding_length, C), (writer.add_block_count, 1),
                   (writer.add_feed_forward_length, F), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
                   (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, V)):
        add(x)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        mlp = {"blk.0.ffn_gate_inp": (experts, C), "blk.0.ffn_gate_exps": (experts, F, C), "blk.0.ffn_up_exps": (experts, F, C),
               "blk.0.ffn_down_exps": (experts, C, F)}
    else:
        mlp = {"blk.0.ffn_gate": (F, C), "blk.0.ffn_up": (F, C), "blk.0.ffn_down": (C, F)}
    numbers = {}
    for name, shape in (mlp | {"token_embd": (V, C), "output": (V, C), "output_norm": (C,), "blk.0.attn_norm": (C,),
                        "blk.0.ffn_norm": (C,), "blk.0.attn_q": (C, C), "blk.0.attn_k": (C // 2, C), "blk.0.attn_v": (C // 2, C),
                        "blk.0.attn_output": (C, C)}).items():
        w = random.standard_normal(shape).astype(np.float32)
        if len(shape) > 1 and kind != "F32" and "gate_inp" not in name:
            try:
                data = gguf.quantize(w, quant)
            except NotImplementedError:  # gguf only reads these: any bytes are valid numbers, except the scales
                data = random.integers(0, 256, shape[:-1] + (shape[-1] // elements, size), dtype=np.uint8)
                for at in {"Q6_K": [208]}.get(kind, [0, 2]):
                    data[..., at:at + 2] = random.standard_normal(data.shape[:-1] + (1,)).astype(np.float16).view(np.uint8)
                data = data.reshape(shape[:-1] + (-1,))
            w = gguf.dequantize(data, quant)
            writer.add_tensor(name + ".weight", data, raw_dtype=quant)
        else:
            writer.add_tensor(name + ".weight", w)
        if len(shape) == 3:
            numbers |= {f"{name}.weight {e}": w[e] for e in range(experts)}
        else:
            numbers[name + ".weight"] = w
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    train_gpt("import", "--gguf", path, "--out", out)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    from safetensors import safe_open
    with safe_open(out / "model.safetensors", "pt") as file:
        for name in file.keys():
            expert = re.search(EXPERT, name)
            found = names.get_name(re.sub(EXPERT, "", name), try_suffixes=(".weight",))
            w = numbers.pop(f"{found} {expert[0][:-1]}" if expert else found)
            n = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
            if n:
                w = w.reshape(n, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
            assert file.get_tensor(name).float().numpy().tobytes() == w.tobytes(), name
    assert not numbers


def main():
    for family in FAMILIES:
        before, difference = cases.failed, None
        with case(f"{family}: all"):
            difference = exported(family)
        results.record(config_class(family).model_type, {"GGUF": difference if cases.failed == before else None})
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"):
        for experts in (0, 3):
            with case(f"import of gguf's {kind}{', experts' if experts else ''}"):
                imported(kind, experts)
    shutil.rmtree(WORK)
    sys.exit(summary())


if __name__ == "__main__":
    main()
