// All options, one row each: type, field, short alias, default, allowed values, group, help. The struct's field, the parser,
// --help, the man page, the shell's completion, the config file's key and the JSON in the log are generated from the row. The
// long name is the field with dashes: micro_batch_size is --micro-batch-size. Names are Megatron-LM's where Megatron has the
// option.
#pragma once
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "../base/terminal.h"
#include "../base/text.h"
#include "../model/choices.h"
#include "../model/recompute.h"
#include "../optimizer/optimizers.h"
#include "text_options.h"

using OptionalDouble = std::optional<double>;

// The values that an option allows.
struct Allowed {
    double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
    bool or_zero = false;  // also allows 0
    Strings choices;
    int values = 1;            // number of values in a list; 0: one or more
    bool gathers = false;      // a repeated list is appended, instead of replacing the earlier one
    const char* metavar = "";  // a value's name in the help; DIR and FILE are completed as such
};
inline Allowed anything() { return {}; }
inline Allowed word(const char* metavar) {
    Allowed a;
    a.metavar = metavar;
    return a;
}
inline Allowed list(int values = 0, const char* metavar = "VALUE") {
    Allowed a = word(metavar);
    a.values = values;
    return a;
}
inline Allowed gathered(const char* metavar) {
    Allowed a = list(0, metavar);
    a.gathers = true;
    return a;
}
inline Allowed between(double low, double high) {
    Allowed a;
    a.low = low;
    a.high = high;
    return a;
}
inline Allowed at_least(double low) { return between(low, std::numeric_limits<double>::infinity()); }
inline Allowed zero_or(double low, double high) {
    Allowed a = between(low, high);
    a.or_zero = true;
    return a;
}
inline Allowed one_of(Strings choices) {
    Allowed a;
    a.choices = std::move(choices);
    return a;
}

// X(type, field, alias, default, allowed, group, help). The help describes the option, its unit, and its default behavior; the
// parser's help adds choices and defaults.

// CPU options of all commands that run a model.
#define CPU_OPTIONS(X)                                                                            \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")            \
    X(bool, plain, "", false, anything(), "Run", "slow reference loops instead of the fast code") \
    X(std::string, matrix_unit, "", "", word("NAME"), "Run",                                      \
      "instructions for matrix products on a CPU: AMX, AVX512-BF16, AVX-512, AVX2, NEON-BF16, portable; default: the fastest")

// Options of the commands that divide a model over ranks.
#define PARALLEL_OPTIONS(X)                                                                                              \
    X(int, tensor_model_parallel_size, "tp", 1, between(1, 1024), "Parallel",                                            \
      "tensor-parallel ranks, among which every matrix is split")                                                        \
    X(int, pipeline_model_parallel_size, "pp", 1, between(1, 1024), "Parallel",                                          \
      "pipeline stages, among which the layers are split")                                                               \
    X(int, expert_model_parallel_size, "ep", 1, between(1, 16384), "Parallel",                                           \
      "data-parallel ranks that share the experts of a mixture: each computes some of them, for the rows of all these "  \
      "ranks")                                                                                                           \
    X(std::string, distributed_timeout, "", "10m", word("DURATION"), "Parallel",                                         \
      "maximum wait for other ranks, or for a disk during a save; after it, a rank reports what each rank is doing and " \
      "ends the run (90s, 10m, 1h)")

// Options of the commands that run a model without training it.
#define ADAPTER_OPTIONS(X)                                                                                            \
    X(std::string, adapter, "", "", word("DIR"), "Model",                                                             \
      "adapters to apply to the model (LoRA, virtual tokens): a directory in PEFT's format, or the output of a run; " \
      "without --model: to the model that they name")

#define FORMAT_OPTIONS(X)                                                                                              \
    X(std::string, quantize_base, "", "auto",                                                                          \
      one_of({"auto", "none", "nf4", "nf4-double", "q4_k", "q5_k", "q6_k", "q8_0", "gguf"}), "Model",                  \
      "keep the matrices of the model's blocks in 4 bits per weight (nf4, nf4-double, q4_k), 5 (q5_k), 6 (q6_k) or 8 " \
      "(q8_0), or as they are in a GGUF file (gguf); auto: as --adapter was trained, else gguf for such a file, else none")

// A mixture of experts in place of layers' MLPs.
#define MIXTURE_OPTIONS(X)                                                                                                     \
    X(int, num_experts, "", 0, between(0, 16384), "Model",                                                                     \
      "number of experts (MLPs) in each layer, of which a router chooses --moe-router-topk for each token; 0: one dense MLP; " \
      "default: the preset's, else 0")                                                                                         \
    X(int, moe_router_topk, "", 0, between(1, 16384), "Model",                                                                 \
      "number of experts that process each token; default: the preset's, else 2")                                              \
    X(int, moe_ffn_hidden_size, "", 0, between(1, 10000000), "Model",                                                          \
      "width of each expert; default: the width of feed-forward layers (--ffn-hidden-size)")                                   \
    X(std::string, moe_layer_freq, "", "", word("N"), "Model",                                                                 \
      "layers with a mixture: N: 0, N, 2N, ...; or a list such as [0]*1+[1]*23, with 0 for a dense layer, whose width is "     \
      "--ffn-hidden-size; default: the preset's, else all")                                                                    \
    X(std::string, moe_router_score_function, "", "", one_of({"softmax", "sigmoid"}), "Model",                                 \
      "function that turns the router's logits into scores: as in Mixtral, or as in DeepSeek-V3; default: the preset's, "      \
      "else softmax")                                                                                                          \
    X(bool, moe_router_pre_softmax, "", false, anything(), "Model",                                                            \
      "weight the chosen experts by a softmax over all experts, as OLMoE does, instead of over the chosen ones")               \
    X(OptionalDouble, moe_router_topk_scaling_factor, "", {}, between(1e-6, 1e6), "Model",                                     \
      "factor of the chosen experts' weights; default: the model's, else 1")                                                   \
    X(int, moe_shared_expert_intermediate_size, "", 0, between(0, 10000000), "Model",                                          \
      "width of an expert that processes every token, in addition to the chosen ones; default: the preset's, else 0, none")    \
    X(bool, moe_shared_expert_gate, "", false, anything(), "Model",                                                            \
      "multiply the shared expert's output by a sigmoid, as Qwen2-MoE does")                                                   \
    X(int, moe_router_num_groups, "", 0, between(1, 32), "Model",                                                              \
      "number of equal groups of experts; each token chooses only from the best --moe-router-group-topk of them; "             \
      "default: 1")                                                                                                            \
    X(int, moe_router_group_topk, "", 0, between(1, 32), "Model",                                                              \
      "number of groups that a token chooses from: those with the largest sum of their best (topk / group-topk) scores")       \
    X(bool, moe_router_enable_expert_bias, "", false, anything(), "Model",                                                     \
      "add a bias to each expert's score when experts are chosen, not to their weights; each update moves it by "              \
      "--moe-router-bias-update-rate towards an equal load (DeepSeek-V3)")                                                     \
    X(bool, moe_use_upcycling, "", false, anything(), "Model",                                                                 \
      "start from the dense model in --model: each of --num-experts is a copy of its MLP; the routers are new")                \
    X(double, moe_upcycling_drop_ratio, "", 0, between(0, 1), "Model",                                                         \
      "with --moe-use-upcycling, fraction of each expert's intermediate dimensions that starts from random weights "           \
      "(Drop-Upcycling); 0: exact copies")

// The structure of the model's block, independent of its size.
#define BLOCK_OPTIONS(X)                                                                                                       \
    X(int, kv_channels, "", 0, between(1, 256), "Model", "size of an attention head; default: the width divided by the heads") \
    X(std::string, normalization, "", "", one_of(option_words(choices_of_norm)), "Model",                                      \
      "kind of normalization layers; default: the preset's, else LayerNorm")                                                   \
    X(bool, apply_layernorm_1p, "", false, anything(), "Model",                                                                \
      "normalization layers multiply by 1 + weight, with weights initialized to 0, as in Gemma")                               \
    X(std::string, norm_place, "", "", one_of(option_words(choices_of_norm_place)), "Model",                                   \
      "place of the norms: before attention and MLP (GPT-2, Llama), after them (OLMo-2), or both (Gemma 2); parallel: "        \
      "before them, with both reading the same input (GPT-NeoX); shared: the same with one norm (Cohere); default: the "       \
      "preset's, else before")                                                                                                 \
    X(bool, qk_layernorm, "", false, anything(), "Model", "RMSNorm of every query and key head, as in Qwen3")                  \
    X(bool, qk_layernorm_whole, "", false, anything(), "Model",                                                                \
      "RMSNorm of all query heads together and of all key heads, as in OLMo-2")                                                \
    X(OptionalDouble, norm_epsilon, "", {}, between(1e-30, 1), "Model",                                                        \
      "epsilon that the normalization layers add to the variance; default: the preset's, else 1e-5")                           \
    X(std::string, position_embedding_type, "", "", one_of(option_words(choices_of_position)), "Model",                        \
      "kind of position embeddings; default: the preset's, else learned_absolute")                                             \
    X(OptionalDouble, rotary_base, "", {}, between(1, 1e12), "Model",                                                          \
      "base of rotary position embeddings (rope); default: the preset's, else 10000")                                          \
    X(OptionalDouble, rotary_percent, "", {}, between(0, 1), "Model",                                                          \
      "fraction of each head, from its start, that rope rotates (0 to 1); default: the preset's, else 1")                      \
    X(std::string, rope_scaling, "", "", one_of(option_words(choices_of_rope_scaling)), "Model",                               \
      "method of extending rope beyond the original training length")                                                          \
    X(bool, use_rope_scaling, "", false, anything(), "Model", "the same as --rope-scaling llama3")                             \
    X(OptionalDouble, rope_scaling_factor, "", {}, between(0.001, 1e6), "Model",                                               \
      "factor by which rope scaling extends the length; default: 8")                                                           \
    X(int, original_max_position_embeddings, "", 0, between(1, 100000000), "Model",                                            \
      "original training length, for rope scaling; default: --max-position-embeddings divided by the factor")                  \
    X(Strings, rope_scaling_set, "", {}, list(0, "KEY=VALUE"), "Model",                                                        \
      "further keys of config.json's rope_scaling: beta_fast, beta_slow, mscale, mscale_all_dim, truncate of yarn, "           \
      "low_freq_factor, high_freq_factor of llama3, short_factor, long_factor (1,1.5,2) of longrope, attention_factor of "     \
      "yarn and longrope")                                                                                                     \
    X(int, no_rope_freq, "", 0, between(0, 10000), "Model",                                                                    \
      "every N-th layer has no positions, as in SmolLM3; 0: none; default: the preset's, else none")                           \
    X(int, window_size, "", 0, between(0, 100000000), "Model",                                                                 \
      "number of tokens that a token attends to, including itself; 0: all before it; default: the preset's, else 0")           \
    X(int, window_attn_skip_freq, "", 0, between(0, 10000), "Model",                                                           \
      "every N-th layer attends to all tokens despite --window-size; 0: none; default: the preset's, else none")               \
    X(OptionalDouble, rotary_base_local, "", {}, between(1, 1e12), "Model",                                                    \
      "base of rope in the layers with a window, which then have no rope scaling; default: as in the other layers")            \
    X(std::string, activation, "", "", one_of(option_words(activations)), "Model",                                             \
      "activation of feed-forward layers: GeLU (tanh or exact), ReLU or its square, or gated: SwiGLU, GeGLU, or "              \
      "GPT-OSS's SwiGLU, whose inputs are limited to 7; default: the preset's, else gelu")                                     \
    X(bool, swiglu, "", false, anything(), "Model", "the same as --activation swiglu")                                         \
    X(bool, squared_relu, "", false, anything(), "Model", "the same as --activation relu2")                                    \
    X(bool, disable_bias_linear, "", false, anything(), "Model",                                                               \
      "no biases in linear layers, except those that the next three options add")                                              \
    X(bool, add_qkv_bias, "", false, anything(), "Model", "biases of queries, keys and values, as in Qwen2")                   \
    X(bool, add_proj_bias, "", false, anything(), "Model", "bias of attention's output projection")                            \
    X(bool, add_mlp_bias, "", false, anything(), "Model", "biases of feed-forward layers, or of experts and their router")     \
    X(OptionalDouble, softmax_scale, "", {}, between(1e-6, 1e6), "Model",                                                      \
      "factor of attention scores before softmax; default: the preset's, else 1 / sqrt(head size)")                            \
    X(OptionalDouble, attn_logit_softcapping, "", {}, zero_or(0.01, 1e6), "Model",                                             \
      "softcapping: attention scores x become S tanh(x / S), as in Gemma 2; 0: disabled")                                      \
    X(OptionalDouble, final_logit_softcapping, "", {}, zero_or(0.01, 1e6), "Model",                                            \
      "softcapping: logits x become S tanh(x / S), as in Gemma 2; 0: disabled")                                                \
    X(std::string, softmax_type, "", "", one_of({"vanilla", "learnable"}), "Model",                                            \
      "learnable: a learned logit per head is added to each softmax, so that a head can attend to nothing (attention sinks)")  \
    X(OptionalDouble, embedding_scale, "", {}, between(1e-6, 1e6), "Model",                                                    \
      "factor of the token embedding (Gemma: the square root of the width); default: the preset's, else 1")                    \
    X(bool, untie_embeddings_and_output_weights, "", false, anything(), "Model",                                               \
      "an output layer with its own weights, instead of the token embedding's")                                                \
    X(bool, embed_layernorm, "", false, anything(), "Model", "LayerNorm right after the token embedding, as in BLOOM")         \
    X(OptionalDouble, init_method_std, "", {}, between(1e-9, 100), "Model",                                                    \
      "standard deviation of the random initial weights; default: the preset's, else 0.02")                                    \
    MIXTURE_OPTIONS(X)                                                                                                         \
    X(double, attention_dropout, "", 0, between(0, 0.99), "Model",                                                             \
      "fraction of attention probabilities that training sets to 0")                                                           \
    X(double, hidden_dropout, "", 0, between(0, 0.99), "Model",                                                                \
      "fraction of the outputs of embedding, attention and MLP that training sets to 0 before they enter the residual "        \
      "stream")                                                                                                                \
    X(OptionalDouble, embedding_dropout, "", {}, between(0, 0.99), "Model",                                                    \
      "the same for the embedding only; default: --hidden-dropout")

#define TRAIN_OPTIONS(X)                                                                                                       \
    X(std::string, preset, "", "", word("PRESET"), "Model",                                                                    \
      "shape of the model, published or small, such as gpt2-124m or quickstart; train_gpt help presets lists them")            \
    X(std::string, model, "", "", word("DIR"), "Model",                                                                        \
      "model to start from instead of random weights: a Hugging Face directory, the output directory of a run, a GGUF "        \
      "file, or the name of a model in Hugging Face's cache (ORG/NAME)")                                                       \
    X(std::string, size, "", "", word("N"), "Model",                                                                           \
      "target parameter count (15m, 350m, 1.5b); unset model, batch, learning-rate, weight-decay, warm-up and length options " \
      "are derived from it by published rules; --dry-run shows them")                                                          \
    X(int, num_layers, "", 0, between(1, 10000), "Model", "number of layers")                                                  \
    X(int, hidden_size, "", 0, between(1, 1000000), "Model", "width of the model: elements of a token's vector")               \
    X(int, ffn_hidden_size, "", 0, between(1, 10000000), "Model",                                                              \
      "width of the feed-forward layers; default: 4 times the hidden size, with SwiGLU 8/3 of it rounded up to a multiple of " \
      "64")                                                                                                                    \
    X(int, num_attention_heads, "", 0, between(1, 10000), "Model", "number of attention heads")                                \
    X(int, num_query_groups, "kv-heads", 0, between(1, 10000), "Model",                                                        \
      "number of key/value heads, for grouped-query attention; default: as many as attention heads")                           \
    X(int, max_position_embeddings, "", 0, between(1, 1 << 24), "Model",                                                       \
      "longest sequence of the model, in tokens; default: the sequence length")                                                \
    X(int, vocab_size, "", 0, between(1, 1 << 24), "Model",                                                                    \
      "number of tokens in the vocabulary; default: the tokenizer's, else the preset's")                                       \
    X(int, make_vocab_size_divisible_by, "", 128, between(1, 65536), "Model",                                                  \
      "pad the vocabulary in memory to a multiple of this; the padding is never predicted and never saved")                    \
    BLOCK_OPTIONS(X)                                                                                                           \
    X(int, lora_rank, "", 0, between(1, 65536), "Adapters",                                                                    \
      "train low-rank adapters (LoRA) of this rank on --model, whose weights are frozen")                                      \
    X(OptionalDouble, lora_alpha, "", {}, between(1e-6, 1e6), "Adapters",                                                      \
      "adapters are multiplied by alpha / rank; default: twice the rank")                                                      \
    X(OptionalDouble, lora_dropout, "", {}, between(0, 0.99), "Adapters",                                                      \
      "fraction of the adapters' input that training sets to 0; default: none")                                                \
    X(Strings, lora_targets, "", {}, list(0, "NAME"), "Adapters",                                                              \
      "matrices that get adapters: q k v o gate up down, qkv proj fc1 fc2, or the names in the model's files; default: "       \
      "all, including the experts' in a mixture")                                                                              \
    X(std::string, quantize_base, "", "none", one_of(weight_format_words()), "Adapters",                                       \
      "keep the matrices of the frozen model's blocks in 4 bits per weight (nf4, nf4-double, q4_k), 5 (q5_k), 6 (q6_k) or 8 "  \
      "(q8_0), or as they are in a GGUF file (gguf: the default if --model is one)")                                           \
    X(int, prompt_tokens, "", 0, between(1, 65536), "Adapters",                                                                \
      "train this many virtual tokens before every sequence (prompt tuning); --model's weights are frozen")                    \
    X(std::string, prompt_encoder, "", "", one_of({"none", "mlp", "lstm"}), "Adapters",                                        \
      "network that computes the virtual tokens and is trained instead of them (p-tuning): an MLP, or an LSTM, which "         \
      "runs on the CPU; default: none")                                                                                        \
    X(int, prompt_encoder_width, "", 0, between(1, 1 << 20), "Adapters",                                                       \
      "width of the hidden layers of the encoder; default: the model's width")                                                 \
    X(std::string, prompt_init_text, "", "", word("TEXT"), "Adapters",                                                         \
      "text whose token embeddings initialize the virtual tokens; default: random tokens of the vocabulary")                   \
    X(OptionalDouble, dpo_beta, "", {}, between(1e-6, 1000), "Preferences",                                                    \
      "train on pairs of answers (`prepare --preference`) with direct preference optimization (DPO) and this beta (0.1): "     \
      "the larger, the closer the model stays to --model, its reference")                                                      \
    X(std::string, dpo_loss, "", "sigmoid", one_of({"sigmoid", "ipo"}), "Preferences",                                         \
      "loss of a pair, as a function of its reward margin; ipo: squared, of log-probabilities per token")                      \
    X(double, dpo_label_smoothing, "", 0, between(0, 0.499), "Preferences",                                                    \
      "assumed fraction of pairs with the wrong answer chosen (conservative DPO)")                                             \
    X(Strings, data_path, "data", {}, list(0, "PREFIX"), "Data",                                                               \
      "data from `train_gpt prepare`, named without .bin or .idx; to blend several: WEIGHT PREFIX WEIGHT "                     \
      "PREFIX ...")                                                                                                            \
    X(Strings, valid_data_path, "", {}, list(0, "PREFIX"), "Data",                                                             \
      "separate data for validation, in the same form; --split then has no effect")                                            \
    X(std::string, split, "", "969, 30, 1", word("A,B,C"), "Data",                                                             \
      "shares of training, validation and test: of the documents, or of the tokens if there are too few documents")            \
    X(std::string, tokenizer, "", "", word("DIR"), "Data",                                                                     \
      "tokenizer of the data: its directory or file, or a model in Hugging Face's cache; needed for samples of text, and "     \
      "copied to checkpoints")                                                                                                 \
    X(int, seq_length, "seq", 0, between(1, 1 << 24), "Data",                                                                  \
      "length of a training sample, in tokens; default: the model's longest sequence")                                         \
    X(bool, reshuffle_each_epoch, "", false, anything(), "Data",                                                               \
      "shuffle each epoch separately, so that every text is seen once before any is seen again; default: shuffle all "         \
      "epochs of the run together, as Megatron-LM does")                                                                       \
    X(bool, reset_position_ids, "", false, anything(), "Data", "restart positions at each document in a sample")               \
    X(bool, reset_attention_mask, "", false, anything(), "Data",                                                               \
      "in a sample of several documents, restrict attention to the current one")                                               \
    X(bool, eod_mask_loss, "", false, anything(), "Data",                                                                      \
      "no loss at the end-of-document token, where the target is the next document's first token")                             \
    X(int64_t, seed, "", 1234, at_least(0), "Data", "seed of the initial weights, the order of samples and generated text")    \
    X(int, micro_batch_size, "micro-batch", 4, between(1, 1000000), "Batch and length",                                        \
      "samples per rank in one forward and backward pass; memory grows with it")                                               \
    X(int, global_batch_size, "global-batch", 0, between(1, 100000000), "Batch and length",                                    \
      "samples per training step over all ranks; default: one micro-batch per rank")                                           \
    X(Strings, rampup_batch_size, "", {}, list(3, "START INCREMENT SAMPLES"), "Batch and length",                              \
      "start with global batches of START samples and grow by INCREMENT up to --global-batch-size, over the first SAMPLES "    \
      "samples")                                                                                                               \
    X(int64_t, train_iters, "steps", 0, at_least(1), "Batch and length", "length of the run in steps (300, 20k, 1M)")          \
    X(int64_t, train_samples, "", 0, at_least(1), "Batch and length", "length of the run in samples, instead of steps")        \
    X(std::string, time_budget, "", "", word("DURATION"), "Batch and length",                                                  \
      "length of the run in time (90s, 5m, 2h), from the start of the program to the last checkpoint: as many steps as "       \
      "fit; sets --lr-decay-style WSD, whose decay can start late, and --reshuffle-each-epoch")                                \
    X(std::string, optimizer, "", "adamw", one_of(optimizer_words()), "Optimizer",                                             \
      "muon, normuon: for the matrices of layers, with AdamW for the rest; adam: Megatron's name for adamw; lion: one "        \
      "moment instead of AdamW's two, with a 3 to 10 times smaller --lr and larger --weight-decay")                            \
    X(double, lion_beta1, "", 0.9, between(0, 0.999999), "Optimizer",                                                          \
      "Lion's beta1: weight of the mean of gradients (exp_avg) in an update's sign (Megatron: 0.95)")                          \
    X(double, lion_beta2, "", 0.99, between(0, 0.9999999), "Optimizer",                                                        \
      "Lion's beta2: decay rate of the mean of gradients (Megatron: 0.98)")                                                    \
    X(double, muon_momentum, "", 0.95, between(0, 0.999999), "Optimizer",                                                      \
      "Muon's momentum: decay rate of the mean of gradients (exp_avg) of the matrices of layers")                              \
    X(double, muon_beta2, "", 0.95, between(0, 0.999999), "Optimizer",                                                         \
      "NorMuon's beta2: decay rate of the mean square of each row of an update")                                               \
    X(std::string, muon_scale_mode, "", "spectral", one_of({"spectral", "shape_scaling"}), "Optimizer",                        \
      "scale of Muon's update of a matrix: the square root of its longer side, or of max(1, rows / columns)")                  \
    X(OptionalDouble, muon_extra_scale_factor, "", {}, between(1e-6, 1e6), "Optimizer",                                        \
      "factor of Muon's update; default: 0.2 with spectral, so that AdamW's learning rates suit it, 1 with shape_scaling")     \
    X(int, muon_num_ns_steps, "", 5, between(1, 99), "Optimizer", "number of Newton-Schulz steps of Muon")                     \
    X(bool, muon_split_heads, "", false, anything(), "Optimizer",                                                              \
      "orthogonalize each query, key and value head separately in Muon")                                                       \
    X(double, lr, "", 3e-4, between(1e-20, 10), "Optimizer", "peak learning rate")                                             \
    X(double, min_lr, "", 0, between(0, 10), "Optimizer", "learning rate at the end of the decay; default: 0")                 \
    X(std::string, lr_decay_style, "", "cosine", one_of({"cosine", "linear", "constant", "inverse-square-root", "WSD"}),       \
      "Optimizer", "how the learning rate falls after the warm-up; WSD: constant, then a short decay (warmup-stable-decay)")   \
    X(int64_t, lr_decay_iters, "", 0, at_least(1), "Optimizer",                                                                \
      "step at which the learning rate reaches its minimum; default: the last step")                                           \
    X(int64_t, lr_decay_samples, "", 0, at_least(1), "Optimizer",                                                              \
      "the end of the decay in samples, instead of --lr-decay-iters")                                                          \
    X(int64_t, lr_warmup_iters, "", 0, at_least(0), "Optimizer",                                                               \
      "steps over which the learning rate rises linearly to its peak; default: 0")                                             \
    X(int64_t, lr_warmup_samples, "", 0, at_least(0), "Optimizer", "the warm-up in samples, instead of --lr-warmup-iters")     \
    X(OptionalDouble, lr_warmup_fraction, "", {}, between(0, 1), "Optimizer",                                                  \
      "the warm-up as a fraction (0 to 1) of the decay's length, instead of --lr-warmup-iters")                                \
    X(double, lr_warmup_init, "", 0, between(0, 10), "Optimizer", "learning rate at the start of the warm-up; default: 0")     \
    X(std::string, lr_wsd_decay_style, "", "exponential", one_of({"exponential", "linear", "cosine", "minus_sqrt"}),           \
      "Optimizer", "shape of the decay at the end of WSD")                                                                     \
    X(int64_t, lr_wsd_decay_iters, "", 0, at_least(1), "Optimizer", "length of the decay at the end of WSD, in steps")         \
    X(int64_t, lr_wsd_decay_samples, "", 0, at_least(1), "Optimizer",                                                          \
      "length of the decay at the end of WSD in samples, instead of --lr-wsd-decay-iters")                                     \
    X(double, weight_decay, "", 0.1, between(0, 1000), "Optimizer",                                                            \
      "weight decay, for all weights except biases and normalization (Megatron: 0.01)")                                        \
    X(OptionalDouble, start_weight_decay, "", {}, between(0, 1000), "Optimizer",                                               \
      "weight decay at the start of the run, with --weight-decay-incr-style linear or cosine")                                 \
    X(OptionalDouble, end_weight_decay, "", {}, between(0, 1000), "Optimizer",                                                 \
      "weight decay at the end of the run, with --weight-decay-incr-style linear or cosine")                                   \
    X(std::string, weight_decay_incr_style, "", "constant", one_of({"constant", "linear", "cosine"}), "Optimizer",             \
      "how the weight decay changes over the run")                                                                             \
    X(double, clip_grad, "", 1.0, zero_or(1e-10, 1e30), "Optimizer",                                                           \
      "maximum norm of all gradients; larger ones are scaled down; 0: no clipping")                                            \
    X(double, adam_beta1, "", 0.9, between(0, 0.999999), "Optimizer",                                                          \
      "AdamW's beta1: decay rate of the mean of gradients (exp_avg)")                                                          \
    X(double, adam_beta2, "", 0.95, between(0, 0.9999999), "Optimizer",                                                        \
      "AdamW's beta2: decay rate of the mean of squared gradients (exp_avg_sq; Megatron: 0.999)")                              \
    X(double, adam_eps, "", 1e-8, between(1e-20, 1), "Optimizer", "AdamW's epsilon, added to the square root of exp_avg_sq")   \
    X(std::string, parametrization, "", "standard", one_of({"standard", "mup", "completep"}), "Optimizer",                     \
      "mup: learning rate, initial weights, weight decay and epsilon are given for a model of --mup-base-width and "           \
      "converted for each tensor; completep: also for one of --mup-base-depth layers")                                         \
    X(int, mup_base_width, "", 0, between(1, 1000000), "Optimizer",                                                            \
      "with --parametrization mup or completep: width (--hidden-size) of the model that the hyperparameters are for")          \
    X(int, mup_base_depth, "", 0, between(1, 10000), "Optimizer",                                                              \
      "with --parametrization completep: number of layers of that model")                                                      \
    X(int, mup_base_head_size, "", 0, between(1, 256), "Optimizer",                                                            \
      "size of that model's attention heads; default: this model's")                                                           \
    X(double, ema_decay, "", 0, between(0, 0.9999999), "Optimizer",                                                            \
      "decay of an exponential moving average (EMA) of the weights (0.999), which is validated as well and saved to "          \
      "step_XXXXXXXX/ema; default: 0, none")                                                                                   \
    X(std::string, main_grads_dtype, "", "fp32", one_of({"fp32", "bf16"}), "Optimizer",                                        \
      "type of the gradients' sums over micro-batches; bf16, rounded stochastically, saves 2 bytes per parameter")             \
    X(std::string, exp_avg_dtype, "", "fp32", one_of({"fp32", "bf16", "fp8"}), "Optimizer",                                    \
      "type of AdamW's exp_avg and of Muon's momentum; bf16 and fp8, rounded stochastically, save 2 and 3 bytes per "          \
      "parameter")                                                                                                             \
    X(std::string, exp_avg_sq_dtype, "", "fp32", one_of({"fp32", "bf16", "fp8"}), "Optimizer",                                 \
      "type of AdamW's exp_avg_sq; bf16 and fp8, rounded stochastically, save 2 and 3 bytes per parameter")                    \
    X(double, z_loss_strength, "z-loss", 0, between(0, 1000), "Optimizer",                                                     \
      "coefficient of the z-loss, which keeps the logits from growing (PaLM: 1e-4); default: 0, none")                         \
    X(bool, use_z_loss, "", false, anything(), "Optimizer", "the same as --z-loss-strength 1e-4")                              \
    X(std::string, moe_router_load_balancing_type, "", "seq_aux_loss", one_of({"seq_aux_loss", "aux_loss", "none"}),           \
      "Optimizer",                                                                                                             \
      "--moe-aux-loss-coeff balances the load of experts within each sequence (seq_aux_loss) or within each micro-batch "      \
      "(aux_loss)")                                                                                                            \
    X(double, moe_aux_loss_coeff, "", 0, between(0, 1000), "Optimizer",                                                        \
      "coefficient of the load balancing loss of a mixture of experts (1e-2); default: 0, none")                               \
    X(double, moe_z_loss_coeff, "", 0, between(0, 1000), "Optimizer",                                                          \
      "coefficient of the routers' z-loss, which keeps their logits small (1e-3); default: 0, none")                           \
    X(double, moe_expert_capacity_factor, "", 0, between(0, 1000), "Optimizer",                                                \
      "in training, an expert keeps at most this multiple of an even share of a micro-batch's choices, and drops the "         \
      "rest (1.25); default: 0, no limit: none is dropped")                                                                    \
    X(std::string, moe_token_drop_policy, "", "probs", one_of({"probs", "position"}), "Optimizer",                             \
      "choices that an expert keeps with --moe-expert-capacity-factor: the ones with the largest weights, or of the "          \
      "first tokens")                                                                                                          \
    X(double, moe_router_bias_update_rate, "", 1e-3, between(0, 1), "Optimizer",                                               \
      "amount by which an update moves each bias of --moe-router-enable-expert-bias")                                          \
    X(std::string, on_spike, "", "warn", one_of({"warn", "skip", "rollback"}), "Stability",                                    \
      "response to a sudden rise of loss or gradient norm: print a warning, drop the update, or return to an older "           \
      "checkpoint and skip these batches")                                                                                     \
    X(double, spike_loss_deviations, "", 8, between(0.1, 1e9), "Stability",                                                    \
      "a loss is a spike if it is more than this many robust standard deviations above the median of recent steps")            \
    X(double, spike_grad_norm_factor, "", 10, between(1.01, 1e9), "Stability",                                                 \
      "a gradient norm is a spike if it is more than this many times the median of recent steps")                              \
    X(int, spike_window, "", 128, between(2, 1000000), "Stability", "number of recent steps that spikes are compared with")    \
    X(int, spike_patience, "", 3, between(1, 1000000), "Stability",                                                            \
      "number of consecutive spikes or non-finite steps after which rollback returns to a checkpoint and skip ends the "       \
      "run; warn ends the run only after as many non-finite steps")                                                            \
    X(int64_t, rollback_distance, "", 100, at_least(0), "Stability",                                                           \
      "a rollback returns to a checkpoint at least this many steps before the spike, or else to the oldest one")               \
    X(int64_t, rollback_batches, "", 200, at_least(1), "Stability",                                                            \
      "number of batches around the spike that are skipped after a rollback")                                                  \
    X(int, max_rollbacks, "", 5, between(0, 1000000), "Stability", "number of rollbacks after which the run ends")             \
    X(int64_t, log_health_interval, "", 0, at_least(0), "Stability",                                                           \
      "steps between log records of every layer: norms of weights, gradients and updates, and in FP8 overflows; default: "     \
      "0, none")                                                                                                               \
    X(int64_t, check_weight_hash_across_dp_replicas_interval, "check-replicas", 0, at_least(0), "Stability",                   \
      "steps between checks that all data-parallel ranks have the same weights; also checks memory for flipped bits at "       \
      "every step; default: 0, neither")                                                                                       \
    X(int64_t, detect_nondeterminism, "", 0, at_least(0), "Stability",                                                         \
      "compute the gradients of every N-th step twice and compare their bits, to find failing hardware; default: 0, never")    \
    X(Strings, skip_batches, "", {}, list(0, "RANGE"), "Stability",                                                            \
      "batches to skip, as 101-200 or 512; each counts as a step without an update; recorded in checkpoints")                  \
    X(Strings, iterations_to_skip, "", {}, list(0, "STEP"), "Stability", "Megatron's name for --skip-batches")                 \
    X(Strings, skip_train_iteration_range, "", {}, list(0, "RANGE"), "Stability",                                              \
      "batches to draw and drop before a step, as LLM-jp does: for 101-200, 100 batches before step 101; steps and learning "  \
      "rate do not advance")                                                                                                   \
    X(std::string, fp8_format, "fp8", "", one_of({"hybrid", "e4m3"}), "FP8",                                                   \
      "multiply the matrices of transformer layers in FP8; hybrid: gradients in e5m2, the rest in e4m3; default: none, "       \
      "bf16")                                                                                                                  \
    X(std::string, fp8_recipe, "", "delayed", one_of({"delayed", "current"}), "FP8",                                           \
      "source of scales: delayed: amax of earlier steps; current: the tensor itself")                                          \
    X(std::string, fp8_start, "", "0", word("N"), "FP8",                                                                       \
      "number of bf16 steps before FP8 starts; auto: until loss and gradient norm are steady")                                 \
    X(int, fp8_calibration_steps, "", 8, between(1, 1000000), "FP8",                                                           \
      "number of the last bf16 steps that measure amax for delayed scales")                                                    \
    X(int, fp8_margin, "", 0, between(0, 64), "FP8", "divide scales by 2^margin, against overflow; default: 0")                \
    X(int, fp8_amax_history_len, "", 16, between(1, 100000), "FP8",                                                            \
      "number of past steps in the amax history of delayed scales (Megatron: 1)")                                              \
    X(std::string, fp8_amax_compute_algo, "", "max", one_of({"max", "most_recent"}), "FP8",                                    \
      "amax of the history that sets the scale: the largest or the newest (Megatron: most_recent)")                            \
    X(bool, first_last_layers_bf16, "fp8-first-last-bf16", false, anything(), "FP8",                                           \
      "keep the first and the last layers in bf16")                                                                            \
    X(int, num_layers_at_start_in_bf16, "", 1, between(0, 10000), "FP8",                                                       \
      "number of first layers that --first-last-layers-bf16 keeps in bf16")                                                    \
    X(int, num_layers_at_end_in_bf16, "", 1, between(0, 10000), "FP8",                                                         \
      "number of last layers that --first-last-layers-bf16 keeps in bf16")                                                     \
    X(bool, no_fp8_fast_accumulation, "", false, anything(), "FP8",                                                            \
      "on a GPU: full-precision accumulation in forward FP8 products, as in backward")                                         \
    X(bool, fp8_fast_backward, "", false, anything(), "FP8",                                                                   \
      "on a GPU: fast accumulation in backward FP8 products as well: sums of about 14 bits, so gradients are less exact")      \
    X(std::string, out, "", "out", word("DIR"), "Run", "directory for checkpoints, log.jsonl and report.html")                 \
    X(std::string, name, "", "", word("TEXT"), "Run",                                                                          \
      "name of the run on the console, in the log and in the report; default: the name of its output directory")               \
    X(bool, dry_run, "", false, anything(), "Run",                                                                             \
      "print the model, its memory and the plan of the run, then stop; needs no GPU and no data")                              \
    X(bool, json, "", false, anything(), "Run", "with --dry-run: print the plan as one JSON object, for other programs")       \
    X(bool, tensorboard, "", false, anything(), "Run", "also write TensorBoard's event files, to OUT/tensorboard")             \
    X(std::string, tensorboard_dir, "", "", word("DIR"), "Run",                                                                \
      "directory for TensorBoard's event files; implies --tensorboard")                                                        \
    X(std::string, prometheus, "", "", word("FILE"), "Run",                                                                    \
      "keep the newest figures in this file, in Prometheus's text format")                                                     \
    X(OptionalDouble, carbon_intensity, "", {}, between(0, 1e6), "Run",                                                        \
      "grams of CO2 per kWh of electricity: adds the run's emissions to results and report if the machine reports its "        \
      "energy, and an upper bound of them to a plan")                                                                          \
    X(bool, quiet, "", false, anything(), "Run", "print only notes, warnings and the result")                                  \
    X(int64_t, log_interval, "", 0, at_least(0), "Run",                                                                        \
      "steps between lines on the console; default: a line every 10 seconds")                                                  \
    CPU_OPTIONS(X)                                                                                                             \
    X(std::string, gemm_cache, "", "", word("FILE"), "Run",                                                                    \
      "on a GPU: file that caches the fastest algorithms for matrix products; none: the library's choice; default: "           \
      "in ~/.cache")                                                                                                           \
    X(bool, nondeterministic_attention, "", false, anything(), "Run",                                                          \
      "on an H100 or H200, with heads of 64 or 128 and without soft caps or attention dropout: attention's backward pass "     \
      "with 5 matrix products instead of 7; gradients are summed in no fixed order, so runs are not reproducible bit by "      \
      "bit")                                                                                                                   \
    X(std::string, recompute_granularity, "recompute", "none",                                                                 \
      one_of({std::begin(recompute_words), std::end(recompute_words)}), "Memory",                                              \
      "activations that backward recomputes instead of storing: selective: outputs of norms and activation functions, "        \
      "which is cheap; mlp: also the output of fc1, a matrix product (Megatron: --recompute-modules layernorm mlp); "          \
      "full: everything inside a layer")                                                                                       \
    X(int, recompute_num_layers, "", 0, between(1, 10000), "Memory",                                                           \
      "number of layers of each pipeline stage or --vpp chunk, counted from its first, to which --recompute-granularity "      \
      "applies (Megatron: --recompute-method block); default: all")                                                            \
    X(std::string, recompute_other_layers, "", "none", one_of({std::begin(recompute_words), std::end(recompute_words) - 1}),   \
      "Memory", "with --recompute-num-layers: a weaker policy for the remaining layers")                                       \
    X(std::string, fp8_weight_transpose, "", "auto", one_of({"auto", "keep", "on-the-fly"}), "Memory",                         \
      "transposed weights for FP8's backward pass: keep: in memory, 1 byte per weight; on-the-fly: made before each "          \
      "product; auto: kept if memory suffices")                                                                                \
    X(int, head_rows, "", 0, between(0, 10000000), "Memory",                                                                   \
      "number of rows (tokens) of logits in memory at once; default: 0, chosen for the device")                                \
    X(std::string, offload, "", "none", one_of({"none", "optimizer", "gradients"}), "Memory",                                  \
      "optimizer: a GPU keeps the lower halves of the fp32 weights, the moments and the average of the weights in "            \
      "page-locked host memory and streams them through the GPU at each update, with the same bits; gradients: also the "      \
      "gradients, to which each micro-batch is added over the link (requires --main-grads-dtype bf16 and one GPU)")            \
    X(int64_t, eval_interval, "", 1000, at_least(1), "Validation and samples", "steps between validations")                    \
    X(int64_t, eval_iters, "", 100, at_least(0), "Validation and samples", "global batches per validation; 0: no validation")  \
    X(bool, eval_fixed, "", false, anything(), "Validation and samples",                                                       \
      "use the same samples, the first ones, in every validation, so that the best checkpoint depends only on the model; "     \
      "default: each validation uses the next samples, as in Megatron-LM")                                                     \
    X(Strings, eval_tasks, "", {}, list(0, "FILE"), "Validation and samples",                                                  \
      "files of questions with answers, as for `eval --tasks`, whose accuracies are measured during training and after "       \
      "the last step; requires a tokenizer")                                                                                   \
    X(int64_t, eval_tasks_interval, "", 0, at_least(0), "Validation and samples",                                              \
      "steps between measurements of --eval-tasks; default: 0, only after the last step")                                      \
    X(int64_t, eval_tasks_samples, "", 0, at_least(0), "Validation and samples",                                               \
      "maximum number of questions from each file of --eval-tasks, from its start; default: 0, all, or 64 for generative "     \
      "tasks")                                                                                                                 \
    X(int64_t, sample_interval, "", 0, at_least(0), "Validation and samples",                                                  \
      "steps between generated samples; default: 0, none")                                                                     \
    X(std::string, sample_prompt, "", "", word("TEXT"), "Validation and samples",                                              \
      "text that the samples continue; default: the end-of-document token, a fresh start")                                     \
    X(int, sample_tokens, "", 64, between(1, 1000000), "Validation and samples", "length of a sample, in tokens")              \
    PARALLEL_OPTIONS(X)                                                                                                        \
    X(int, num_virtual_stages_per_pipeline_rank, "vpp", 1, between(1, 1024), "Parallel",                                       \
      "chunks of layers per pipeline rank (interleaved schedule): less idle time, more messages")                              \
    X(Strings, pipeline_layers, "", {}, list(0, "N"), "Parallel",                                                              \
      "number of layers of each pipeline stage, in order; default: balanced")                                                  \
    X(bool, account_for_embedding_in_pipeline_split, "", false, anything(), "Parallel",                                        \
      "count the embedding as a layer when splitting layers into stages")                                                      \
    X(bool, account_for_loss_in_pipeline_split, "", false, anything(), "Parallel",                                             \
      "count the output layer and the loss as a layer when splitting layers into stages")                                      \
    X(int, context_parallel_size, "cp", 1, between(1, 16384), "Parallel",                                                      \
      "ranks among which the rows of each sample are split, for long sequences; they communicate in attention, as "            \
      "--context-parallel-method sets")                                                                                        \
    X(std::string, context_parallel_method, "", "allgather", one_of({"allgather", "alltoall"}), "Parallel",                    \
      "allgather: each context-parallel rank gathers the keys and values of whole samples, for its own queries; "              \
      "alltoall: they exchange rows for heads, and each computes the attention of whole samples for some heads "               \
      "(DeepSpeed-Ulysses)")                                                                                                   \
    X(bool, no_sequence_parallel, "", false, anything(), "Parallel",                                                           \
      "with tensor parallelism: every rank computes norms and residual stream for all rows, instead of splitting the "         \
      "rows of a sequence")                                                                                                    \
    X(std::string, moe_token_dispatcher_type, "", "", one_of({"allgather", "alltoall"}), "Parallel",                           \
      "with --expert-model-parallel-size: rows are sent to all of its ranks (allgather), or only to those with an expert "     \
      "that they chose (alltoall); default: alltoall if a rank is expected to get at most 2/3 of the rows")                    \
    X(int, zero, "", 1, between(0, 3), "Parallel",                                                                             \
      "1: shard the optimizer's state over data-parallel ranks (ZeRO-1); 2: also the gradients, which are then sent in every " \
      "micro-batch (ZeRO-2); 3: also the parameters, sent twice in every micro-batch (ZeRO-3); 0: each rank has all of them")  \
    X(int64_t, ddp_bucket_size, "", 0, between(1, 10000000000), "Parallel",                                                    \
      "parameters per message between data-parallel ranks; default: 40M, or 1M times the ranks if that is more")               \
    X(bool, no_overlap, "", false, anything(), "Parallel",                                                                     \
      "do not overlap communication with computation: data-parallel communication with backward and update, "                  \
      "tensor-parallel communication with backward's products; for measuring the gain of overlap")                             \
    X(int, world, "", 0, between(1, 1000000), "Plan (with --dry-run)", "number of ranks to plan for, without starting them")   \
    X(std::string, device, "", "h100",                                                                                         \
      one_of({"a100", "h100", "h200", "b200", "mi300x", "h100-pcie", "h100-nvl",     "h20",      "a100-40gb", "l40s",          \
              "l40",  "l4",   "a40",  "a30",  "a10",    "a6000",     "rtx-6000-ada", "rtx-3090", "rtx-4090",  "rtx-5090"}),    \
      "Plan (with --dry-run)",                                                                                                 \
      "GPU to plan for; sets --device-tflops and other unset options of this group (h100: 989 TFLOP/s, 450 and 50 GB/s, 3350 " \
      "GB/s, 80 GiB)")                                                                                                         \
    X(OptionalDouble, device_tflops, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                      \
      "peak of a GPU for dense bf16 products, in TFLOP/s, for the plan and for MFU; default: the device's")                    \
    X(double, device_fp8_speedup, "", 1.62, between(0.01, 100), "Plan (with --dry-run)",                                       \
      "speed of FP8 products with weights relative to bf16 (1.62 on one H100)")                                                \
    X(OptionalDouble, device_efficiency, "", {}, between(0.01, 1), "Plan (with --dry-run)",                                    \
      "fraction of the peak (0.01 to 1) that layers reach on one GPU, as `make bench` measures; default: 0.62; h100 and "      \
      "h200: 0.46 to 0.65, a100: 0.50 to 0.71, by the model's width")                                                          \
    X(int, node_size, "", 8, between(1, 1000000), "Plan (with --dry-run)", "GPUs in a node")                                   \
    X(OptionalDouble, intra_node_gbs, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                     \
      "bandwidth of a GPU to others in its node, in GB/s each way; default: the device's")                                     \
    X(OptionalDouble, inter_node_gbs, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                     \
      "bandwidth of a GPU to other nodes, in GB/s each way: a node's network ports divided by its GPUs; default: the "         \
      "device's")                                                                                                              \
    X(OptionalDouble, device_memory_gbs, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                  \
      "bandwidth of a GPU's memory, in GB/s; default: the device's")                                                           \
    X(OptionalDouble, host_link_gbs, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                      \
      "bandwidth between a GPU and its host, in GB/s each way, for --offload; default: the device's (h100: 50)")               \
    X(OptionalDouble, device_memory_gib, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                  \
      "memory of a GPU, in GiB; default: the device's")                                                                        \
    X(OptionalDouble, host_memory_gib, "", {}, between(1e-6, 1e9), "Plan (with --dry-run)",                                    \
      "memory of a node's host, in GiB, which its GPUs share; default: 233 for each GPU, as in a DGX (2 TB for 8)")            \
    X(double, expert_imbalance, "", 1, between(1, 16384), "Plan (with --dry-run)",                                             \
      "with --expert-model-parallel-size: load of the rank with the busiest experts, as a multiple of the mean")               \
    X(OptionalDouble, device_watts, "", {}, between(1e-6, 1e6), "Plan (with --dry-run)",                                       \
      "maximum power of a GPU, in W, for the energy of a run; default: the device's (h100: 700)")                              \
    X(std::string, resume, "", "", word("DIR|auto"), "Checkpoint",                                                             \
      "auto: resume from the newest intact checkpoint in --out, or start if there is none; or the directory of a "             \
      "checkpoint or of a run to resume")                                                                                      \
    X(Strings, override, "", {}, list(0, "NAME"), "Checkpoint",                                                                \
      "options that may differ from the checkpoint's on a resume, such as lr or train-iters; data-order: the order of "        \
      "samples")                                                                                                               \
    X(std::string, save_every, "", "30m", word("N|DURATION"), "Checkpoint",                                                    \
      "interval between checkpoints, in steps (500) or time (90s, 30m, 2h); 0: only at the end; never: none at all")           \
    X(int64_t, keep, "", 2, at_least(0), "Checkpoint",                                                                         \
      "number of newest checkpoints to keep, and up to two more with --on-spike rollback; 0: all")                             \
    X(int64_t, keep_every, "", 0, at_least(0), "Checkpoint",                                                                   \
      "also save at every multiple of this number of steps, and keep these checkpoints; default: 0, none")                     \
    X(std::string, exit_after, "", "", word("DURATION"), "Checkpoint", "save a checkpoint and stop after this time (5h30m)")   \
    X(int64_t, snapshot_every, "", 0, at_least(0), "Checkpoint",                                                               \
      "steps between snapshots in the nodes' memory, from which --resume auto resumes a killed run; default: 0, none")         \
    X(std::string, snapshot_directory, "", "/dev/shm", word("DIR"), "Checkpoint",                                              \
      "file system in memory that holds snapshots")                                                                            \
    X(bool, save_in_foreground, "", false, anything(), "Checkpoint",                                                           \
      "training waits while a checkpoint is written; on CPUs this saves the memory of a copy")

// Options of `tune`, in addition to train's.
#define TUNE_OPTIONS(X)                                                                                                        \
    X(int, trials, "", 0, between(0, 1000), "Tune",                                                                            \
      "number of layouts, fastest by the plan, to measure on this machine; default: 0")                                        \
    X(int, trial_steps, "", 4, between(2, 10000), "Tune", "training steps per trial; the first one does not count")            \
    X(bool, search_fp8, "", false, anything(), "Tune",                                                                         \
      "also search layouts with FP8 layers (--fp8-format hybrid), which change training results")                              \
    X(bool, inference, "", false, anything(), "Tune", "search for generation instead: the layout of ranks and the batch size") \
    X(int, batch, "", 256, between(1, 65536), "Tune", "with --inference: maximum batch size")                                  \
    X(int, max_new_tokens, "", 0, at_least(0), "Tune",                                                                         \
      "with --inference: number of generated tokens within --seq-length; the rest is the prompt; default: half")               \
    X(double, max_latency, "", 0, between(0, 1e9), "Tune",                                                                     \
      "with --inference: maximum milliseconds per token (planned, or for 99% of the measured ones); default: no limit")

// Options of `sweep`, in addition to train's.
#define SWEEP_OPTIONS(X)                                                                                                   \
    X(Strings, over, "", {}, gathered("NAME=VALUES"), "Sweep",                                                             \
      "an option of train, and the values to try: lr=1e-4..1e-2, sampled on a log scale if it spans a factor of 4 or "     \
      "more, or weight-decay=0.05,0.1,0.2; may be given several times")                                                    \
    X(int, configs, "", 16, between(1, 10000), "Sweep",                                                                    \
      "number of initial configurations; the first is the command line's, if it sets all options of --over")               \
    X(int, eta, "", 3, between(2, 100), "Sweep",                                                                           \
      "the best 1/eta of the configurations continue in runs that are eta times as long")                                  \
    X(int, seeds, "", 3, between(1, 1000), "Sweep", "runs of each configuration in the last rung, each with its own seed") \
    X(std::string, budget, "", "", word("DURATION"), "Sweep",                                                              \
      "time of the whole search (90s, 20m, 8h); runs are as long as it allows, up to --train-iters")                       \
    X(int64_t, budget_tokens, "", 0, at_least(1), "Sweep", "tokens of the whole search (50M), instead of --budget")        \
    X(int, jobs, "", 1, between(1, 4096), "Sweep", "number of concurrent runs, which share the CPU's threads")

#define GENERATE_OPTIONS(X)                                                                                                  \
    X(std::string, model, "", "", word("DIR"), "Model",                                                                      \
      "model for generation: a Hugging Face directory, the output directory of a run (its newest checkpoint), a GGUF file, " \
      "or the name of a model in Hugging Face's cache")                                                                      \
    ADAPTER_OPTIONS(X)                                                                                                       \
    FORMAT_OPTIONS(X)                                                                                                        \
    X(std::string, prompt, "", "", word("TEXT"), "Text",                                                                     \
      "text to continue; -: read it from standard input; default: the end-of-document token, a fresh start")                 \
    X(std::string, prompts, "", "", word("FILE"), "Text",                                                                    \
      "file of prompts, one per line, or .jsonl with \"prompt\"; the output is lines of JSON, in order")                     \
    X(bool, chat, "", false, anything(), "Text",                                                                             \
      "treat the prompt as a user's message and answer it; without --prompt, each line of standard input is a message of "   \
      "one conversation")                                                                                                    \
    X(std::string, chat_template, "", "", word("NAME"), "Text",                                                              \
      "chat template: chatml, llama-2, llama-3, llama-3.1, mistral, mistral-v0.1, gemma, gemma-3, qwen3, olmo-2, plain; "    \
      "default: the model's own")                                                                                            \
    X(std::string, system, "", "", word("TEXT"), "Text", "system message at the start of the conversation")                  \
    X(int, max_new_tokens, "tokens", 200, between(1, 10000000), "Text", "maximum number of tokens to generate")              \
    X(int, num_samples, "", 1, between(1, 1000000), "Text", "number of continuations")                                       \
    X(int, num_beams, "", 1, between(1, 1024), "Text",                                                                       \
      "search for the most likely text with this many beams, instead of sampling; --num-samples prints as many of the "      \
      "texts found, the best first; memory grows with it")                                                                   \
    X(double, length_penalty, "", 1.0, between(0, 100), "Text",                                                              \
      "with --num-beams: texts are compared by log-probability / length^P; a larger P prefers longer texts")                 \
    X(int, batch, "", 8, between(1, 4096), "Text", "maximum batch size; memory grows with it")                               \
    X(bool, measure_batches, "", false, anything(), "Text",                                                                  \
      "instead of text, print a table of generation speed at batch sizes 1, 2, 4, ... up to --batch")                        \
    X(double, max_latency, "", 0.0, between(0, 1e9), "Text",                                                                 \
      "with --measure-batches: maximum milliseconds for 99% of a sequence's tokens; default: no limit")                      \
    X(double, temperature, "", 1.0, between(0, 100), "Sampling",                                                             \
      "randomness: below 1, likely tokens become likelier; 0: greedy")                                                       \
    X(int, top_k, "", 0, at_least(0), "Sampling", "sample only from this many of the most likely tokens; default: 0, all")   \
    X(double, top_p, "", 1.0, between(0, 1), "Sampling",                                                                     \
      "sample only from the most likely tokens with this total probability; 1: all")                                         \
    X(int64_t, seed, "", 1234, at_least(0), "Sampling", "seed of sampling: the same seed generates the same text")           \
    PARALLEL_OPTIONS(X)                                                                                                      \
    CPU_OPTIONS(X)

#define SERVE_OPTIONS(X)                                                                                                     \
    X(std::string, model, "", "", word("DIR"), "Model",                                                                      \
      "model to serve: a Hugging Face directory, the output directory of a run (its newest checkpoint), a GGUF file, or "    \
      "the name of a model in Hugging Face's cache")                                                                         \
    ADAPTER_OPTIONS(X)                                                                                                       \
    FORMAT_OPTIONS(X)                                                                                                        \
    X(std::string, served_model_name, "", "", word("NAME"), "Model",                                                         \
      "the model's name in requests; default: its directory's name")                                                         \
    X(std::string, chat_template, "", "", word("NAME"), "Model", "chat template, as for generate; default: the model's own") \
    X(std::string, host, "", "127.0.0.1", word("ADDRESS"), "Network",                                                        \
      "address to listen on; 0.0.0.0: all addresses of this machine. There are no passwords and no encryption")              \
    X(int, port, "", 8080, between(0, 65535), "Network", "port to listen on; 0: a free one, which is printed")               \
    X(Strings, allowed_hosts, "", {}, list(0, "NAME"), "Network",                                                            \
      "further host names under which browsers and proxies may access this server (Host), or whose pages may access it "     \
      "(Origin); *: any; default: addresses, localhost and this machine's name")                                             \
    X(int, batch, "", 8, between(1, 4096), "Limits", "maximum batch size; memory grows with it")                             \
    X(int, max_queue, "", 64, between(0, 4096), "Limits", "maximum number of queued requests; any more get status 503")      \
    X(int, max_new_tokens, "", 4096, between(1, 10000000), "Limits",                                                         \
      "maximum number of tokens that a request may generate per completion")                                                 \
    X(int, seq_length, "seq", 0, between(1, 100000000), "Limits",                                                            \
      "maximum number of tokens of a prompt and its completion; memory grows with it; default: the model's maximum")         \
    X(int64_t, max_body, "", 1 << 20, between(1024, 1 << 30), "Limits", "maximum request size in bytes")                     \
    X(int, request_timeout, "", 30, between(1, 1000000), "Limits",                                                           \
      "seconds for a request to arrive, and for the client to read a finished response, plus one per MiB")                   \
    X(int, timeout, "", 600, between(1, 1000000), "Limits",                                                                  \
      "seconds after which a completion is cut off; a request whose generation has not started by then gets status 503")     \
    CPU_OPTIONS(X)

#define EVAL_OPTIONS(X)                                                                                                       \
    X(std::string, model, "", "", word("DIR"), "Model",                                                                       \
      "model to evaluate: a Hugging Face directory, the output directory of a run (its newest checkpoint), a GGUF file, "     \
      "or the name of a model in Hugging Face's cache")                                                                       \
    ADAPTER_OPTIONS(X)                                                                                                        \
    FORMAT_OPTIONS(X)                                                                                                         \
    X(Strings, data_path, "data", {}, list(0, "PREFIX"), "Data",                                                              \
      "data from `train_gpt prepare`: PREFIX PREFIX ...; each sample is read once, weights are ignored")                      \
    X(std::string, split, "", "0, 1, 0", word("A,B,C"), "Data", "shares of the documents; the second share is evaluated")     \
    X(std::string, text, "", "", word("FILE"), "Data",                                                                        \
      "text to evaluate, instead of prepared data: a file as in prepare --input")                                             \
    READING_OPTIONS(X)                                                                                                        \
    X(int, seq_length, "seq", 0, between(1, 100000000), "Data",                                                               \
      "length of a sample, in tokens; default: the model's longest sequence, which it may exceed unless positions are "       \
      "learned")                                                                                                              \
    X(int, micro_batch_size, "micro-batch", 4, between(1, 1000000), "Data", "samples per forward pass; memory grows with it") \
    X(int64_t, max_samples, "limit", 0, at_least(0), "Data",                                                                  \
      "maximum number of samples, or of questions per task; default: 0, all")                                                 \
    X(Strings, tasks, "", {}, list(0, "FILE"), "Tasks",                                                                       \
      "files of questions with answers to measure accuracies on (.jsonl; dev/data/README.md says how to make them)")          \
    X(int, num_fewshot, "", 0, between(0, 1000), "Tasks",                                                                     \
      "number of solved examples before each question; default: 0, and a file of CORE has its own")                           \
    X(Strings, fewshot, "", {}, list(0, "FILE"), "Tasks",                                                                     \
      "files that the solved examples are drawn from, one per task; default: the task's other questions")                     \
    X(int64_t, seed, "", 1234, at_least(0), "Tasks", "seed for drawing the solved examples")                                  \
    X(int, fewshot_draws, "", 1, between(1, 1000), "Tasks",                                                                   \
      "number of draws of the solved examples to evaluate: prints their mean and spread")                                     \
    X(std::string, answers, "", "", word("FILE"), "Tasks",                                                                    \
      "new file for the model's choices and generated answers, as lines of JSON")                                             \
    PARALLEL_OPTIONS(X)                                                                                                       \
    X(bool, json, "", false, anything(), "Run", "print the result as one JSON object, for other programs")                    \
    CPU_OPTIONS(X)

#define INSPECT_OPTIONS(X)                                                                                          \
    X(std::string, path, "", "", word("PATH"), "What",                                                              \
      "model directory or name in Hugging Face's cache, output directory of a run, prepared data, tokenizer.json, " \
      "tokenizer.model, .safetensors or .gguf file; the option's name may be omitted")                              \
    X(std::string, tokenizer, "", "", word("DIR"), "What",                                                          \
      "tokenizer for showing the first texts of prepared data; default: the one that made the data")                \
    X(bool, json, "", false, anything(), "Run", "print the result as one JSON object, for other programs")

#define REPORT_OPTIONS(X)                                                                                                 \
    X(Strings, runs, "", {}, list(0, "RUN"), "What",                                                                      \
      "runs, each as its output directory, log.jsonl or report.html, running or ended; the option's name may be omitted") \
    X(std::string, output, "", "", word("FILE"), "What",                                                                  \
      "page to write; default: report.html, in the run's directory or, for several runs, in the current one")

#define CHECK_NODE_OPTIONS(X)                                                                                           \
    X(std::string, seconds, "", "10s", word("DURATION"), "Run", "time for each check")                                  \
    X(std::string, path, "", ".", word("DIR"), "Run", "folder in which a file of up to 1 GiB is written and read back") \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")                                  \
    X(std::string, distributed_timeout, "", "10m", word("DURATION"), "Run", "time limit for waiting for other ranks")

#define SUPERVISE_OPTIONS(X)                                                                                               \
    X(Strings, hosts, "", {}, list(0, "HOST:RANKS"), "Nodes",                                                              \
      "nodes of the job, each with its number of ranks; the command must contain {hosts} (n1:8,n2:8) or {nodes} (n1,n2), " \
      "{ranks} and, if needed, {node-count}")                                                                              \
    X(Strings, spare, "", {}, list(0, "HOST:RANKS"), "Nodes",                                                              \
      "nodes that replace failed ones; when none is left, a job continues on fewer ranks if its layout and batch permit")  \
    X(std::string, check, "", "", word("COMMAND"), "Nodes",                                                                \
      "shell command that tests {host}, a node named as the cause of a failure; if it fails, the node is no longer used")  \
    X(std::string, run, "", "", word("DIR"), "Job", "output directory of the run; default: --out in the command")          \
    X(int64_t, restarts, "", 20, between(0, 1e6), "Job", "restarts in a row without a new checkpoint before giving up")    \
    X(std::string, restart_wait, "", "10s", word("DURATION"), "Job",                                                       \
      "wait before a restart; doubled, up to 10 minutes, after each further start that saved no checkpoint")               \
    X(std::string, stall_timeout, "", "1h", word("DURATION"), "Job",                                                       \
      "end and restart a job that has written nothing to log.jsonl for this long; 0: never")

#define RUNS_OPTIONS(X)                                                                                   \
    X(Strings, folders, "", {}, list(0, "FOLDER"), "What",                                                \
      "folders to search, three levels deep; default: the current one; the option's name may be omitted") \
    X(std::string, sort, "", "", one_of({"valid", "news"}), "Run",                                        \
      "order: by validation loss, or by the latest news; default: by name")                               \
    X(bool, json, "", false, anything(), "Run", "print a JSON array, for other programs")

#define EXPORT_OPTIONS(X)                                                                                               \
    X(std::string, model, "", "", word("DIR"), "What",                                                                  \
      "model to export: a Hugging Face directory, or the output directory of a run (its newest checkpoint)")            \
    ADAPTER_OPTIONS(X)                                                                                                  \
    X(bool, merge, "", false, anything(), "Merge", "merge the adapters into the model: W + (alpha / rank) B A")         \
    X(std::string, out, "", "", word("DIR"), "Merge",                                                                   \
      "directory for the model, which must not exist; without --merge: a copy of its files without the training state") \
    X(std::string, gguf, "", "", word("FILE"), "GGUF", "GGUF file to write, the format of llama.cpp")                   \
    X(std::string, type, "", "", one_of({"f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"}), "GGUF",            \
      "type of the matrices; q8_0 to q4_k_m: 8 to 4 bits, with scales for groups of 16 to 32 weights; default: the "    \
      "model's own")                                                                                                    \
    X(bool, weights_only, "", false, anything(), "GGUF", "omit the tokenizer")                                          \
    X(bool, overwrite, "", false, anything(), "GGUF", "overwrite an existing file")

#define IMPORT_OPTIONS(X)                                                                  \
    X(std::string, gguf, "", "", word("FILE"), "GGUF", "GGUF file of llama.cpp to read")   \
    X(std::string, out, "", "", word("DIR"), "GGUF",                                       \
      "directory to write, which must not exist: a Hugging Face model with its tokenizer") \
    X(bool, weights_only, "", false, anything(), "GGUF", "omit the tokenizer")

// The options of train, tune and sweep that are commonly used: --help shows these, --help-all all.
inline const Strings& everyday_options() {
    static const Strings names = {"preset",
                                  "model",
                                  "size",
                                  "num-layers",
                                  "hidden-size",
                                  "num-attention-heads",
                                  "data-path",
                                  "valid-data-path",
                                  "split",
                                  "tokenizer",
                                  "seq-length",
                                  "seed",
                                  "micro-batch-size",
                                  "global-batch-size",
                                  "train-iters",
                                  "time-budget",
                                  "lr",
                                  "min-lr",
                                  "lr-decay-style",
                                  "lr-warmup-iters",
                                  "weight-decay",
                                  "clip-grad",
                                  "optimizer",
                                  "lora-rank",
                                  "on-spike",
                                  "fp8-format",
                                  "out",
                                  "file",
                                  "dry-run",
                                  "threads",
                                  "recompute-granularity",
                                  "eval-interval",
                                  "eval-iters",
                                  "sample-interval",
                                  "sample-prompt",
                                  "tensor-model-parallel-size",
                                  "pipeline-model-parallel-size",
                                  "world",
                                  "device",
                                  "resume",
                                  "save-every",
                                  "keep",
                                  "exit-after",
                                  "search-fp8",
                                  "inference",
                                  "max-latency",
                                  "trials",
                                  "trial-steps",
                                  "over",
                                  "configs",
                                  "eta",
                                  "seeds",
                                  "budget",
                                  "budget-tokens",
                                  "jobs"};
    return names;
}

// An option of a command: its row, and the location of its value.
using OptionValue = std::variant<bool*, int*, int64_t*, double*, OptionalDouble*, std::string*, Strings*>;
struct Option {
    const char *field, *alias;
    OptionValue value;
    Allowed allowed;
    const char *group, *help;
};

#define OPTION_FIELD(type, field, alias, default_value, allowed, group, help) type field = default_value;
#define OPTION_ADD(type, field, alias, default_value, allowed, group, help) \
    options.push_back({#field, alias, &o.field, allowed, group, help});
// A value of a config file that a later file or the command line replaced; *_where: FILE:LINE, or "" for the command line.
struct Replaced {
    std::string option, value, where, old_value, old_where;
    std::string text() const {
        return value + ", instead of " + old_value + " in " + old_where + (where.empty() ? "" : "; from " + where);
    }
};

// given: names of the options that the command line or a config file sets; from_files: those whose value is a config file's.
// notes: on options of other programs that were taken.
#define OPTION_STRUCT(Name, ROWS)                    \
    struct Name {                                    \
        ROWS(OPTION_FIELD)                           \
        std::set<std::string> given, from_files;     \
        std::vector<Replaced> replaced;              \
        Strings notes;                               \
    };                                               \
    inline std::vector<Option> options_in(Name& o) { \
        std::vector<Option> options;                 \
        ROWS(OPTION_ADD)                             \
        return options;                              \
    }

OPTION_STRUCT(TrainOptions, TRAIN_OPTIONS)
// Whether ranks of context parallelism, if there are several, exchange heads.
inline bool exchanges_heads(const TrainOptions& o) { return o.context_parallel_method == "alltoall"; }
// The options of train for a command in which some have another meaning: these fields have other help.
inline std::vector<Option> options_of_train(TrainOptions& o, const std::map<std::string, const char*>& other_help) {
    std::vector<Option> options = options_in(o);
    for (Option& option : options)
        if (const auto other = other_help.find(option.field); other != other_help.end()) option.help = other->second;
    return options;
}
// Options of a layout, which tune searches unless they are given.
inline const Strings& searched_options() {
    static const Strings names = {"tensor-model-parallel-size",
                                  "pipeline-model-parallel-size",
                                  "num-virtual-stages-per-pipeline-rank",
                                  "expert-model-parallel-size",
                                  "context-parallel-size",
                                  "micro-batch-size",
                                  "no-sequence-parallel",
                                  "zero",
                                  "recompute-granularity",
                                  "recompute-num-layers",
                                  "recompute-other-layers",
                                  "head-rows",
                                  "fp8-format",
                                  "fp8-weight-transpose",
                                  "offload"};
    return names;
}
// The options of a run whose layout is searched, and of the search.
struct TuneOptions : TrainOptions {
    TUNE_OPTIONS(OPTION_FIELD)
    TuneOptions() { out = "tune"; }
};
inline std::vector<Option> options_in(TuneOptions& o) {
    std::vector<Option> options =
        options_of_train(o, {{"out", "directory for the layouts (tune-1.toml, ...) and tune.html, or inference.html"},
                             {"dry_run", "search, but write no files"},
                             {"json", "print the result as one JSON object, for other programs"}});
    TUNE_OPTIONS(OPTION_ADD)
    return options;
}
// The options of a run that a file gets.
#define INIT_OPTIONS(X) \
    X(std::string, file, "", "run.toml", word("FILE"), "Init", "file to write, for `train --config`; replaced if init wrote it")
struct InitOptions : TrainOptions {
    INIT_OPTIONS(OPTION_FIELD)
};
inline std::vector<Option> options_in(InitOptions& o) {
    std::vector<Option> options = options_in((TrainOptions&)o);
    INIT_OPTIONS(OPTION_ADD)
    return options;
}
// The options of a run whose hyperparameters are searched, and of the search.
struct SweepOptions : TrainOptions {
    SWEEP_OPTIONS(OPTION_FIELD)
    SweepOptions() { out = "sweep"; }
};
inline std::vector<Option> options_in(SweepOptions& o) {
    std::vector<Option> options = options_of_train(o, {{"out", "directory for best.toml, sweep.html and the table of runs"},
                                                       {"dry_run", "print the plan of the search, then stop"},
                                                       {"json", "print the result as one JSON object, for other programs"}});
    SWEEP_OPTIONS(OPTION_ADD)
    return options;
}
OPTION_STRUCT(PrepareOptions, PREPARE_OPTIONS)
OPTION_STRUCT(CurateOptions, CURATE_OPTIONS)
OPTION_STRUCT(TokenizerOptions, TOKENIZER_OPTIONS)
OPTION_STRUCT(GenerateOptions, GENERATE_OPTIONS)
OPTION_STRUCT(ServeOptions, SERVE_OPTIONS)
OPTION_STRUCT(EvalOptions, EVAL_OPTIONS)
OPTION_STRUCT(InspectOptions, INSPECT_OPTIONS)
OPTION_STRUCT(ReportOptions, REPORT_OPTIONS)
OPTION_STRUCT(CheckNodeOptions, CHECK_NODE_OPTIONS)
OPTION_STRUCT(SuperviseOptions, SUPERVISE_OPTIONS)
OPTION_STRUCT(RunsOptions, RUNS_OPTIONS)
OPTION_STRUCT(ExportOptions, EXPORT_OPTIONS)
OPTION_STRUCT(ImportOptions, IMPORT_OPTIONS)

// Reports on stderr how the command line was read: values that replace others in config files, options of other programs. A run
// has this in its table instead.
template <class Options>
void print_notes(const Options& o) {
    for (const std::string& note : o.notes) print_line(stderr, "note: " + note);
    for (const Replaced& r : o.replaced) print_line(stderr, "note: --" + r.option + " is " + r.text());
}
inline void print_notes(const TrainOptions&) {}

// Calls visit(option, value) for each option, with the value as its own type.
template <class Options, class Visit>
void for_each_option(Options& o, Visit visit) {
    for (const Option& option : options_in(o)) std::visit([&](auto* value) { visit(option, *value); }, option.value);
}

// Gives an option the value of the same option in other options.
inline void copy_value(const Option& from, const Option& to) {
    std::visit([&](auto* value) { *value = *std::get<decltype(value)>(from.value); }, to.value);
}

// "micro_batch_size" -> "micro-batch-size"
inline std::string option_name(std::string field) {
    for (char& c : field)
        if (c == '_') c = '-';
    return field;
}

template <class Options>
nlohmann::ordered_json options_to_json(Options o) {
    nlohmann::ordered_json j;
    for_each_option(o, [&](const Option& option, auto& value) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, OptionalDouble>)
            j[option_name(option.field)] = value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
        else j[option_name(option.field)] = value;
    });
    return j;
}
