// Every option, one row each: type, field, short alias, default, what is allowed, group, help. From the row come the struct's
// field, the parser, --help, the config file's key and the JSON in the log. The long name is the field with dashes:
// micro_batch_size is --micro-batch-size. Names are Megatron-LM's where Megatron has the option.
#pragma once
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

using Strings = std::vector<std::string>;
using OptionalDouble = std::optional<double>;

// What values an option takes.
struct Allowed {
    double low = -std::numeric_limits<double>::infinity(), high = std::numeric_limits<double>::infinity();
    bool above = false;  // low itself is excluded
    Strings choices;
    int values = 1;  // how many values a list takes; 0: one or more
};
inline Allowed anything() { return {}; }
inline Allowed at_least(double low) { return {low, std::numeric_limits<double>::infinity(), false, {}, 1}; }
inline Allowed above(double low) { return {low, std::numeric_limits<double>::infinity(), true, {}, 1}; }
inline Allowed between(double low, double high) { return {low, high, false, {}, 1}; }
inline Allowed one_of(Strings choices) { return {0, 0, false, std::move(choices), 1}; }
inline Allowed list(int values = 0) {
    return {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity(), false, {}, values};
}

// X(type, field, alias, default, allowed, group, help)
#define TRAIN_OPTIONS(X)                                                                                                       \
    X(std::string, preset, "", "", anything(), "Model",                                                                        \
      "a published or small shape, e.g. gpt2-124m, bloom-560m, llama2-7b, quickstart")                                         \
    X(std::string, model, "", "", anything(), "Model",                                                                         \
      "start from this Hugging Face model directory instead of random weights")                                                \
    X(int, num_layers, "", 0, between(1, 10000), "Model", "layers")                                                            \
    X(int, hidden_size, "", 0, between(1, 1000000), "Model", "width")                                                          \
    X(int, ffn_hidden_size, "", 0, between(1, 10000000), "Model",                                                              \
      "feed-forward width; default 4 x width, with SwiGLU 8/3 x rounded to 64")                                                \
    X(int, num_attention_heads, "", 0, between(1, 10000), "Model", "query heads")                                              \
    X(int, num_query_groups, "kv-heads", 0, between(1, 10000), "Model", "key/value heads; default: one per query head")        \
    X(int, max_position_embeddings, "", 0, between(1, 100000000), "Model",                                                     \
      "longest sequence of the model; default: the sequence length")                                                           \
    X(int, vocab_size, "", 0, between(1, 100000000), "Model", "vocabulary; default: the tokenizer's, else the preset's")       \
    X(int, make_vocab_size_divisible_by, "", 128, between(1, 65536), "Model",                                                  \
      "pad the vocabulary inside; padded rows take no part")                                                                   \
    X(std::string, normalization, "", "", one_of({"LayerNorm", "RMSNorm"}), "Model", "norm")                                   \
    X(OptionalDouble, norm_epsilon, "", {}, above(0), "Model", "epsilon of the norms (1e-5)")                                  \
    X(std::string, position_embedding_type, "", "", one_of({"learned_absolute", "rope", "alibi"}), "Model", "positions")       \
    X(OptionalDouble, rotary_base, "", {}, above(0), "Model", "base of the rotary angles (10000)")                             \
    X(bool, swiglu, "", false, anything(), "Model", "SwiGLU instead of GeLU")                                                  \
    X(bool, disable_bias_linear, "", false, anything(), "Model", "no biases")                                                  \
    X(bool, untie_embeddings_and_output_weights, "", false, anything(), "Model", "a head of its own")                          \
    X(bool, embed_layernorm, "", false, anything(), "Model", "LayerNorm after the embedding (BLOOM)")                          \
    X(OptionalDouble, init_method_std, "", {}, above(0), "Model",                                                              \
      "standard deviation of initial weights (preset's, else 0.02)")                                                           \
    X(double, attention_dropout, "", 0, between(0, 0), "Model", "only 0: there is no dropout")                                 \
    X(double, hidden_dropout, "", 0, between(0, 0), "Model", "only 0: there is no dropout")                                    \
    X(Strings, data_path, "data", {}, list(), "Data", "prepared data: PATH, or WEIGHT PATH WEIGHT PATH ... to blend")          \
    X(Strings, valid_data_path, "", {}, list(), "Data", "validation data of its own; the split then does not apply")           \
    X(std::string, split, "", "969, 30, 1", anything(), "Data", "shares of documents for training, validation, test")          \
    X(std::string, tokenizer, "", "", anything(), "Data",                                                                      \
      "tokenizer.json or its directory (for samples, the checkpoint, documents' ends)")                                        \
    X(int, seq_length, "seq", 0, between(1, 100000000), "Data", "tokens per sample; default: the model's longest sequence")    \
    X(bool, reset_position_ids, "", false, anything(), "Data", "positions start again after the end of a document")            \
    X(bool, reset_attention_mask, "", false, anything(), "Data", "attention does not cross the end of a document")             \
    X(bool, eod_mask_loss, "", false, anything(), "Data", "no loss for predicting what follows the end of a document")         \
    X(int64_t, seed, "", 1234, at_least(0), "Data", "seed of initial weights, data order and samples")                         \
    X(int, micro_batch_size, "micro-batch", 4, between(1, 1000000), "Batch", "samples per forward and backward pass")          \
    X(int, global_batch_size, "global-batch", 0, between(1, 100000000), "Batch", "samples per step; default: the micro-batch") \
    X(Strings, rampup_batch_size, "", {}, list(3), "Batch",                                                                    \
      "START INCREMENT SAMPLES: grow the global batch over SAMPLES samples")                                                   \
    X(int64_t, train_iters, "steps", 0, at_least(1), "Length", "steps; suffixes k, M, B are understood")                       \
    X(int64_t, train_samples, "", 0, at_least(1), "Length", "samples, instead of steps")                                       \
    X(double, lr, "", 3e-4, above(0), "Optimizer", "highest learning rate")                                                    \
    X(double, min_lr, "", 0, at_least(0), "Optimizer", "learning rate at the end of the decay")                                \
    X(std::string, lr_decay_style, "", "cosine", one_of({"cosine", "linear", "constant", "inverse-square-root", "WSD"}),       \
      "Optimizer", "decay")                                                                                                    \
    X(int64_t, lr_decay_iters, "", 0, at_least(1), "Optimizer", "decay ends here; default: the whole run")                     \
    X(int64_t, lr_decay_samples, "", 0, at_least(1), "Optimizer", "the same, in samples")                                      \
    X(int64_t, lr_warmup_iters, "", 0, at_least(0), "Optimizer", "linear warm-up, in steps")                                   \
    X(int64_t, lr_warmup_samples, "", 0, at_least(0), "Optimizer", "the same, in samples")                                     \
    X(OptionalDouble, lr_warmup_fraction, "", {}, between(0, 1), "Optimizer", "the same, as a part of the decay")              \
    X(double, lr_warmup_init, "", 0, at_least(0), "Optimizer", "learning rate at the start of the warm-up")                    \
    X(std::string, lr_wsd_decay_style, "", "exponential", one_of({"exponential", "linear", "cosine", "minus_sqrt"}),           \
      "Optimizer", "WSD's tail")                                                                                               \
    X(int64_t, lr_wsd_decay_iters, "", 0, at_least(1), "Optimizer", "length of WSD's tail, in steps")                          \
    X(int64_t, lr_wsd_decay_samples, "", 0, at_least(1), "Optimizer", "the same, in samples")                                  \
    X(double, weight_decay, "", 0.1, at_least(0), "Optimizer",                                                                 \
      "decoupled weight decay of everything but gains and biases (Megatron: 0.01)")                                            \
    X(OptionalDouble, start_weight_decay, "", {}, at_least(0), "Optimizer", "with an increment style: decay at the start")     \
    X(OptionalDouble, end_weight_decay, "", {}, at_least(0), "Optimizer", "with an increment style: decay at the end")         \
    X(std::string, weight_decay_incr_style, "", "constant", one_of({"constant", "linear", "cosine"}), "Optimizer",             \
      "how it changes")                                                                                                        \
    X(double, clip_grad, "", 1.0, at_least(0), "Optimizer", "clip the global gradient norm; 0: off")                           \
    X(double, adam_beta1, "", 0.9, between(0, 0.999999), "Optimizer", "AdamW beta1")                                           \
    X(double, adam_beta2, "", 0.95, between(0, 0.9999999), "Optimizer", "AdamW beta2 (Megatron: 0.999)")                       \
    X(double, adam_eps, "", 1e-8, above(0), "Optimizer", "AdamW epsilon")                                                      \
    X(double, z_loss_strength, "z-loss", 0, at_least(0), "Optimizer", "coefficient of the z-loss; 0: off, PaLM used 1e-4")     \
    X(bool, use_z_loss, "", false, anything(), "Optimizer", "the same as --z-loss-strength 1e-4")                              \
    X(std::string, on_spike, "", "warn", one_of({"warn", "skip", "rollback"}), "Stability",                                    \
      "a spike of loss or gradient norm: say so, drop its update, or (several in a row) go back to an older checkpoint and "   \
      "leave these batches out")                                                                                               \
    X(double, spike_loss_deviations, "", 8, above(0), "Stability",                                                             \
      "a spike is a loss this many robust standard deviations above the median")                                               \
    X(double, spike_grad_norm_factor, "", 10, above(1), "Stability", "or a gradient norm this many times its median")          \
    X(int, spike_window, "", 128, between(2, 1000000), "Stability", "of so many steps")                                        \
    X(int, spike_patience, "", 3, between(1, 1000000), "Stability",                                                            \
      "outliers in a row that call for a rollback; with warn or skip: end a run that is lost")                                 \
    X(int64_t, rollback_distance, "", 100, at_least(0), "Stability",                                                           \
      "go back to a checkpoint at least this many steps before the spike")                                                     \
    X(int64_t, rollback_batches, "", 200, at_least(1), "Stability", "and leave out this many batches around it")               \
    X(int, max_rollbacks, "", 5, between(0, 1000000), "Stability", "rollbacks in a run before it ends")                        \
    X(int64_t, log_health_interval, "", 0, at_least(0), "Stability",                                                           \
      "steps between records of every layer: norms of weights, gradients and updates, in 8 bits what is cut off; 0: none")     \
    X(int64_t, check_weight_hash_across_dp_replicas_interval, "check-replicas", 0, at_least(0), "Stability",                   \
      "steps between comparisons of what several ranks hold; also find bits that flip in memory, at every step; 0: neither")   \
    X(int64_t, detect_nondeterminism, "", 0, at_least(0), "Stability",                                                         \
      "steps between gradients that are computed twice and compared bit by bit, to find failing hardware; 0: never")           \
    X(Strings, skip_batches, "", {}, list(), "Stability",                                                                      \
      "batches to leave out, 101-200 or 512: a step each, without update; kept in checkpoints")                                \
    X(Strings, iterations_to_skip, "", {}, list(), "Stability", "the same by Megatron's name, one by one")                     \
    X(Strings, skip_train_iteration_range, "", {}, list(), "Stability",                                                        \
      "LLM-jp's: before iteration 101 of 101-200, 100 batches are drawn and dropped; steps and learning rate stand still")     \
    X(std::string, fp8_format, "fp8", "", one_of({"hybrid", "e4m3"}), "FP8",                                                   \
      "multiply the blocks' matrices in 8 bits: e4m3, hybrid: gradients in e5m2")                                              \
    X(std::string, fp8_recipe, "", "delayed", one_of({"delayed", "current"}), "FP8",                                           \
      "scales from earlier steps' largest elements, or from the tensor itself (tensorwise)")                                   \
    X(std::string, fp8_start, "", "0", anything(), "FP8", "steps in bf16 that come first; auto: until the run is steady")      \
    X(int, fp8_calibration_steps, "", 8, between(1, 1000000), "FP8",                                                           \
      "of them, the last ones measure amax for the delayed recipe")                                                            \
    X(int, fp8_margin, "", 0, between(0, 64), "FP8", "scales are 2^margin below what would fit")                               \
    X(int, fp8_amax_history_len, "", 16, between(1, 100000), "FP8", "steps whose amax counts (Megatron: 1)")                   \
    X(std::string, fp8_amax_compute_algo, "", "max", one_of({"max", "most_recent"}), "FP8",                                    \
      "which amax of them (Megatron: most_recent)")                                                                            \
    X(bool, first_last_layers_bf16, "fp8-first-last-bf16", false, anything(), "FP8", "the first and last layers stay in bf16") \
    X(int, num_layers_at_start_in_bf16, "", 1, between(0, 10000), "FP8", "how many of the first")                              \
    X(int, num_layers_at_end_in_bf16, "", 1, between(0, 10000), "FP8", "how many of the last")                                 \
    X(bool, no_fp8_fast_accumulation, "", false, anything(), "FP8",                                                            \
      "on a GPU: full sums in forward products too, as in backward")                                                           \
    X(std::string, out, "", "out", anything(), "Run", "directory for the model, log.jsonl and report.html")                    \
    X(std::string, name, "", "", anything(), "Run",                                                                            \
      "what console, log and report call the run; default: the name of its output directory")                                  \
    X(std::string, recompute_granularity, "recompute", "none", one_of({"none", "selective", "full"}), "Run",                   \
      "what backward computes again to save memory")                                                                           \
    X(int, head_rows, "", 0, between(0, 10000000), "Run", "rows of logits at a time; 0: as many as suit the device")           \
    X(int64_t, eval_interval, "", 1000, at_least(1), "Run", "steps between validations")                                       \
    X(int64_t, eval_iters, "", 100, at_least(0), "Run", "global batches per validation; 0: no validation")                     \
    X(bool, eval_fixed, "", false, anything(), "Run",                                                                          \
      "every validation reads the same samples, the first of one pass over the validation data, so that two validations "      \
      "differ by the model alone; default: each reads the next ones, in the data's weights, as Megatron-LM")                   \
    X(int64_t, log_interval, "", 0, at_least(0), "Run",                                                                        \
      "steps between lines on the console; default: a line every 10 seconds")                                                  \
    X(int64_t, sample_interval, "", 0, at_least(0), "Run", "steps between samples of generated text; 0: none")                 \
    X(std::string, sample_prompt, "", "", anything(), "Run", "prompt of the samples; default: the end-of-document token")      \
    X(int, sample_tokens, "", 64, between(1, 1000000), "Run", "tokens per sample")                                             \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")                                         \
    X(bool, plain, "", false, anything(), "Run", "plain loops only: slow, the reference that fast paths are tested against")   \
    X(int, tensor_model_parallel_size, "tp", 1, between(1, 1024), "Parallel", "ranks that share each matrix")                  \
    X(int, pipeline_model_parallel_size, "pp", 1, between(1, 1024), "Parallel", "ranks that each hold some of the layers")     \
    X(int, num_virtual_stages_per_pipeline_rank, "vpp", 1, between(1, 1024), "Parallel",                                       \
      "chunks of layers of each such rank (interleaved schedule): a smaller bubble, more messages")                            \
    X(Strings, pipeline_layers, "", {}, list(), "Parallel", "layers of each stage, in order; default: evened out")             \
    X(bool, account_for_embedding_in_pipeline_split, "", false, anything(), "Parallel", "the embedding counts as a layer")     \
    X(bool, account_for_loss_in_pipeline_split, "", false, anything(), "Parallel", "the head counts as a layer")               \
    X(bool, no_sequence_parallel, "", false, anything(), "Parallel",                                                           \
      "with --tp: every rank holds all rows between the matrices (default: its part)")                                         \
    X(int, zero, "", 1, between(0, 1), "Parallel",                                                                             \
      "1: data-parallel ranks share the optimizer's state (ZeRO-1); 0: each has all of it")                                    \
    X(int64_t, ddp_bucket_size, "", 0, between(1, 10000000000), "Parallel",                                                    \
      "parameters per message between data-parallel ranks; default: 40M, or 1M per rank")                                      \
    X(bool, no_overlap, "", false, anything(), "Parallel",                                                                     \
      "data-parallel messages wait until backward or the update has ended, to see what overlap gains")                         \
    X(std::string, distributed_timeout, "", "10m", anything(), "Parallel",                                                     \
      "a rank that waits for others longer than this reports what each is doing, and ends the run")                            \
    X(int, world, "", 0, between(1, 1000000), "Plan", "with --dry-run: plan for this many ranks, without starting them")       \
    X(std::string, device, "", "h100", one_of({"a100", "h100", "h200", "b200", "mi300x"}), "Plan",                             \
      "the GPUs of the plan; sets what is not given below (h100: 989, 450, 50, 3350, 80)")                                     \
    X(OptionalDouble, device_tflops, "", {}, above(0), "Plan",                                                                 \
      "dense bf16 peak of a GPU, in TFLOP/s, for the plan and for MFU")                                                        \
    X(double, device_fp8_speedup, "", 1.4, above(0), "Plan",                                                                   \
      "how much faster layers are in 8 bits (LLM-jp on H100s: 550 after 400 TFLOP/s)")                                         \
    X(double, device_efficiency, "", 0.55, between(0.01, 1), "Plan",                                                           \
      "part of it that a layer reaches on one GPU, as `make bench` measures")                                                  \
    X(int, node_size, "", 8, between(1, 1000000), "Plan", "GPUs per node")                                                     \
    X(OptionalDouble, intra_node_gbs, "", {}, above(0), "Plan", "GB/s each way of a GPU to others in its node")                \
    X(OptionalDouble, inter_node_gbs, "", {}, above(0), "Plan",                                                                \
      "GB/s each way of a GPU to other nodes: a node's ports by its GPUs")                                                     \
    X(OptionalDouble, device_memory_gbs, "", {}, above(0), "Plan", "GB/s of a GPU's memory")                                   \
    X(OptionalDouble, device_memory_gib, "", {}, above(0), "Plan", "GiB of it")                                                \
    X(std::string, gemm_cache, "", "", anything(), "Run",                                                                      \
      "GPU: file of the fastest algorithms for matrix products; default: in ~/.cache; none: no timing")                        \
    X(bool, quiet, "", false, anything(), "Run", "no line per step")                                                           \
    X(bool, dry_run, "", false, anything(), "Run", "print model, memory and batch arithmetic, then stop")                      \
    X(std::string, resume, "", "", anything(), "Checkpoint",                                                                   \
      "auto: go on from the newest intact checkpoint in --out, or start; or a checkpoint's directory")                         \
    X(Strings, override, "", {}, list(), "Checkpoint",                                                                         \
      "names of options that may differ from the checkpoint's, e.g. lr train-iters; data-order: the samples' order may")       \
    X(std::string, save_every, "", "30m", anything(), "Checkpoint",                                                            \
      "a number of steps (500) or a duration (90s, 30m, 2h); 0: only at the end")                                              \
    X(int64_t, keep, "", 2, at_least(0), "Checkpoint", "number of newest checkpoints to keep; 0: all")                         \
    X(int64_t, keep_every, "", 0, at_least(0), "Checkpoint",                                                                   \
      "also keep every checkpoint whose step is a multiple of this; 0: none")                                                  \
    X(std::string, exit_after, "", "", anything(), "Checkpoint", "save and stop after this time (5h30m)")                      \
    X(bool, save_in_foreground, "", false, anything(), "Checkpoint",                                                           \
      "training waits while a checkpoint is written; saves the memory of a copy")

// Of every command that reads much text.
#define TEXT_OPTIONS(X)                                                                                              \
    X(Strings, input, "", {}, list(), "Input",                                                                       \
      "files of text or JSON lines (.jsonl, .ndjson, .json), in order; pipes too; - is standard input")              \
    X(std::string, format, "", "", one_of({"text", "jsonl"}), "Input",                                               \
      "take all files as text, or as JSON lines; default: by each file's name and beginning")                        \
    X(std::string, json_keys, "", "text", anything(), "Input", "key of the text in JSON lines")                      \
    X(std::string, on_bad_line, "", "skip", one_of({"skip", "fail"}), "Input",                                       \
      "a line of JSON that cannot be read or has no text: leave it out, count it and show it; or end with an error") \
    X(std::string, max_bad_lines, "", "1%", anything(), "Input",                                                     \
      "end with an error if more lines are left out: 20 in all, or 1% of a file (where one always may be)")          \
    X(bool, allow_binary, "", false, anything(), "Input",                                                            \
      "take any bytes as text; default: refuse what is compressed, and a file of which more than 0.5% is NUL or not UTF-8")

#define PREPARE_OPTIONS(X)                                                                                  \
    TEXT_OPTIONS(X)                                                                                         \
    X(std::string, split_documents, "", "file", one_of({"file", "blank", "line"}), "Input",                 \
      "documents of a text: the file, parts between blank lines, lines")                                    \
    X(std::string, output_prefix, "output", "", anything(), "Output", "writes PREFIX.bin and PREFIX.idx")   \
    X(std::string, tokenizer, "", "", anything(), "Output", "tokenizer.json or its directory")              \
    X(bool, no_append_eod, "", false, anything(), "Output", "no end-of-document token after each document") \
    X(int, workers, "threads", 0, between(1, 4096), "Run", "CPU threads; default: all cores")

#define TOKENIZER_OPTIONS(X)                                                                                                 \
    TEXT_OPTIONS(X)                                                                                                          \
    X(int, vocab_size, "", 32000, between(257, 10000000), "Tokenizer", "tokens in all, special ones and 256 bytes included") \
    X(std::string, pre_tokenizer, "", "gpt2", one_of({"gpt2", "llama3", "bloom"}), "Tokenizer",                              \
      "how text is split before merging")                                                                                    \
    X(Strings, special_tokens, "", (Strings{"<|endoftext|>"}), list(), "Tokenizer",                                          \
      "special tokens, first ids; the first ends documents")                                                                 \
    X(int, min_frequency, "", 2, between(1, 1000000000), "Tokenizer", "merge pairs that occur at least so often")            \
    X(std::string, output, "", "", anything(), "Output", "directory for tokenizer.json")                                     \
    X(std::string, report, "", "", anything(), "Output", "measure this tokenizer on --input instead of training one")        \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")

#define GENERATE_OPTIONS(X)                                                                                                   \
    X(std::string, model, "", "", anything(), "Model", "Hugging Face model directory")                                        \
    X(std::string, prompt, "", "", anything(), "Text", "text to continue; default: the end-of-document token, a fresh start") \
    X(int, max_new_tokens, "tokens", 200, between(1, 10000000), "Text", "tokens to write at most")                            \
    X(int, num_samples, "", 1, between(1, 1000000), "Text", "how many continuations")                                         \
    X(double, temperature, "", 1.0, between(0, 100), "Sampling", "0: always the most likely token")                           \
    X(int, top_k, "", 0, at_least(0), "Sampling", "only the k most likely tokens; 0: all")                                    \
    X(double, top_p, "", 1.0, between(0, 1), "Sampling", "only the most likely tokens with this probability in all")          \
    X(int64_t, seed, "", 1234, at_least(0), "Sampling", "same seed, same text")                                               \
    X(int, tensor_model_parallel_size, "tp", 1, between(1, 1024), "Parallel", "ranks that share each matrix")                 \
    X(int, pipeline_model_parallel_size, "pp", 1, between(1, 1024), "Parallel", "ranks that each hold some of the layers")    \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")                                        \
    X(bool, plain, "", false, anything(), "Run", "plain loops only")

#define EVAL_OPTIONS(X)                                                                                                       \
    X(std::string, model, "", "", anything(), "Model", "Hugging Face model directory")                                        \
    X(Strings, data_path, "data", {}, list(), "Data", "prepared data: PATH, or WEIGHT PATH WEIGHT PATH ...")                  \
    X(std::string, split, "", "0, 1, 0", anything(), "Data", "shares of documents; the second is evaluated")                  \
    X(std::string, text, "", "", anything(), "Data", "a text file instead of prepared data")                                  \
    X(int, seq_length, "seq", 0, between(1, 100000000), "Data", "tokens per sample; default: the model's longest sequence")   \
    X(int, micro_batch_size, "micro-batch", 4, between(1, 1000000), "Data", "samples per pass")                               \
    X(int64_t, max_samples, "limit", 0, at_least(0), "Data", "at most this many samples, or examples of each task; 0: all")   \
    X(Strings, tasks, "", {}, list(), "Tasks", "questions with answers (.jsonl, see dev/data/README.md): accuracies")         \
    X(int, num_fewshot, "", 0, between(0, 1000), "Tasks", "solved examples before each question")                             \
    X(Strings, fewshot, "", {}, list(), "Tasks", "where they come from, a file per task; default: the task's other examples") \
    X(int64_t, seed, "", 1234, at_least(0), "Tasks", "draws the solved examples")                                             \
    X(int, tensor_model_parallel_size, "tp", 1, between(1, 1024), "Parallel", "ranks that share each matrix")                 \
    X(int, pipeline_model_parallel_size, "pp", 1, between(1, 1024), "Parallel", "ranks that each hold some of the layers")    \
    X(int, threads, "", 0, between(1, 4096), "Run", "CPU threads; default: all cores")                                        \
    X(bool, plain, "", false, anything(), "Run", "plain loops only")

#define INSPECT_OPTIONS(X)                           \
    X(std::string, path, "", "", anything(), "What", \
      "model directory, run directory, prepared data, tokenizer.json or .safetensors file; the name may be left out")

#define OPTION_FIELD(type, field, alias, default_value, allowed, group, help) type field = default_value;
#define OPTION_VISIT(type, field, alias, default_value, allowed, group, help) \
    visit(#field, alias, o.field, allowed, group, help);
#define OPTION_STRUCT(Name, ROWS)                \
    struct Name {                                \
        ROWS(OPTION_FIELD)                       \
    };                                           \
    template <class Visit>                       \
    void for_each_option(Name& o, Visit visit) { \
        ROWS(OPTION_VISIT)                       \
    }

OPTION_STRUCT(TrainOptions, TRAIN_OPTIONS)
OPTION_STRUCT(PrepareOptions, PREPARE_OPTIONS)
OPTION_STRUCT(TokenizerOptions, TOKENIZER_OPTIONS)
OPTION_STRUCT(GenerateOptions, GENERATE_OPTIONS)
OPTION_STRUCT(EvalOptions, EVAL_OPTIONS)
OPTION_STRUCT(InspectOptions, INSPECT_OPTIONS)

// "micro_batch_size" -> "micro-batch-size"
inline std::string option_name(std::string field) {
    for (char& c : field)
        if (c == '_') c = '-';
    return field;
}

template <class Options>
nlohmann::ordered_json options_to_json(Options o) {
    nlohmann::ordered_json j;
    for_each_option(o, [&](const char* field, const char*, auto& value, const Allowed&, const char*, const char*) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, OptionalDouble>)
            j[option_name(field)] = value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
        else j[option_name(field)] = value;
    });
    return j;
}
