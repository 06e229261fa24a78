// Names of options in other programs (Hugging Face's Trainer, nanoGPT, litgpt, llm.c, llama.cpp, vLLM, lm-eval, Megatron-LM,
// Lightning), and their names here. They are not accepted, but their refusal names the option to use. And the options that
// words without one are meant for.
#pragma once
#include <algorithm>
#include <filesystem>
#include <string>

#include "../model/presets.h"
#include "options.h"
#include "megatron_names.h"

namespace cli {

struct OtherName {
    const char* commands;  // commands to which the entry applies; "": it is a command
    const char* names;     // in other programs; without dashes, except names of one or two letters
    const char* here;
};
inline const OtherName other_names[] = {
    // commands
    {"", "pretrain pre-train fit", "train trains a new model, or --model DIR further"},
    {"", "finetune finetune_full finetune_lora fine-tune sft dpo lora", "train --model DIR, with --lora-rank for adapters"},
    {"", "chat", "generate --chat --model DIR"},
    {"", "run sample infer inference complete completion cli llama-cli main", "generate --model DIR --prompt TEXT"},
    {"", "server api llama-server", "serve --model DIR"},
    {"", "evaluate evaluation benchmark bench lm-eval lm_eval test perplexity llama-perplexity", "eval --model DIR"},
    {"", "tokenize encode preprocess preprocess-data preprocess_data", "prepare --input FILE --tokenizer DIR --output PREFIX"},
    {"", "dedup deduplicate filter clean", "curate --input FILE --output DIR"},
    {"", "convert quantize convert-hf-to-gguf convert_hf_to_gguf convert_hf_to_gguf_update llama-quantize",
     "export --model DIR --gguf FILE writes a file of llama.cpp; import --gguf FILE reads one"},
    {"", "merge merge-lora merge_lora", "export --merge --adapter DIR --out DIR"},
    {"", "plan estimate", "train --dry-run --world N, or tune for the best layout"},
    {"", "search hpo hyperopt", "sweep"},
    {"", "info show list ls stat", "inspect PATH"},
    {"", "download pull", "help; models are downloaded by `hf download ORG/NAME`"},
    // length and batches
    {"train", "learning-rate max-lr lr-max peak-lr -l", "the learning rate is --lr"},
    {"train", "batch-size train-batch-size device-batch-size per-device-train-batch-size per-gpu-train-batch-size -b",
     "--micro-batch-size is per rank and pass, --global-batch-size per step over all ranks"},
    {"eval", "batch-size per-device-eval-batch-size eval-batch-size",
     "the number of samples per forward pass is --micro-batch-size"},
    {"train", "gradient-accumulation-steps grad-accum grad-accum-steps accumulate-grad-batches gradient-accumulation",
     "set --global-batch-size to --micro-batch-size x data-parallel ranks x steps of accumulation"},
    {"train", "total-batch-size -d", "--global-batch-size is in samples: tokens of a step / --seq-length"},
    {"train", "epochs num-epochs num-train-epochs max-epochs epoch",
     "the length of a run is --train-iters or --train-samples; an epoch has (tokens of the data) / --seq-length samples; "
     "`train_gpt inspect PREFIX` shows the number of tokens"},
    {"train", "tokens total-tokens train-tokens max-tokens num-tokens n-tokens token-budget",
     "the length of a run is --train-samples, tokens / --seq-length, or --train-iters"},
    {"train",
     "max-steps max-iters num-steps num-iterations num-iters train-steps total-steps num-train-steps num-training-steps "
     "iterations iters max-train-steps -x",
     "the number of steps is --train-iters"},
    {"train", "warmup-steps num-warmup-steps warmup-iters warmup-iterations warmup warmup-num-steps -u",
     "the number of warm-up steps is --lr-warmup-iters"},
    {"train",
     "do-train do-eval evaluation-strategy eval-strategy save-strategy logging-strategy always-save-checkpoint eval-only",
     "validations are --eval-interval steps apart, checkpoints --save-every, lines of the log --log-interval"},
    {"train", "warmup-ratio warmup-fraction", "the warm-up as a fraction of the decay is --lr-warmup-fraction"},
    {"train", "lr-scheduler lr-scheduler-type scheduler lr-schedule decay-lr -k", "the schedule is --lr-decay-style"},
    {"train", "lr-decay-steps decay-steps", "the end of the decay is --lr-decay-iters"},
    {"train", "min-learning-rate final-learning-rate-frac learning-rate-decay-frac lr-min final-lr-frac -q",
     "the learning rate after the decay is --min-lr, a rate, not a fraction of --lr"},
    {"train", "max-grad-norm grad-clip clip gradient-clip-val gradient-clipping clip-grad-norm max-norm",
     "the maximum norm of the gradients is --clip-grad"},
    {"train", "wd -c", "weight decay is --weight-decay"},
    {"train", "ema", "an average of the weights is --ema-decay 0.999"},
    {"train", "beta1", "AdamW's beta1 is --adam-beta1"},
    {"train", "beta2", "AdamW's beta2 is --adam-beta2"},
    {"train", "adam-epsilon eps epsilon", "AdamW's epsilon is --adam-eps"},
    {"train", "use-mup mup scaling-recipe parameterization",
     "muP is --parametrization mup, CompleteP is --parametrization completep"},
    {"train", "mup-base-hidden-size scaling-base-hidden-size", "the width of the base model is --mup-base-width"},
    {"train", "scaling-base-num-layers", "the number of layers of the base model is --mup-base-depth"},
    {"train", "mup-base-head-dim scaling-base-head-dim", "the size of the base model's heads is --mup-base-head-size"},
    {"train", "optim optimizer-type muon adafactor adamw lion", "the optimizer is --optimizer adamw, muon, normuon or lion"},
    {"train generate", "random-seed seed-everything", "the seed is --seed"},
    // precision
    {"train generate eval", "fp16", "there is no fp16: the program is built for bf16, or with `make PRECISION=fp32` for fp32"},
    {"train generate eval",
     "fp32 mixed-precision precision dtype torch-dtype params-dtype amp tf32 matmul-precision "
     "bf16-full-eval float16 bfloat16 half",
     "the precision is chosen when the program is built: `make PRECISION=bf16` (the default) or fp32"},
    {"train", "fp8-hybrid", "FP8 is --fp8-format hybrid"},
    {"train", "fp8-e4m3", "FP8 is --fp8-format e4m3"},
    // directories, checkpoints, logs
    {"train", "output-dir out-dir save-dir checkpoint-dir ckpt-dir output outdir default-root-dir -o",
     "the directory of a run is --out"},
    {"train",
     "load-checkpoint resume-from-checkpoint resume-from resume-training continue-from init-from checkpoint checkpoint-path "
     "ckpt ckpt-path -y",
     "--resume auto resumes the run in --out, --resume DIR from a checkpoint; --model DIR starts a new run from its weights"},
    {"train", "save-steps save-freq checkpoint-interval checkpoint-every ckpt-every checkpointing-steps -n",
     "checkpoints are written --save-every 500 steps, or 30m"},
    {"train", "save-total-limit keep-last -nk", "the number of checkpoints is --keep"},
    {"train", "-nm", "permanent checkpoints are --keep-every"},
    {"train", "overwrite-output-dir overwrite force", "nothing is overwritten: give a new --out, or --resume auto"},
    {"train", "time-limit max-time", "the time limit is --exit-after 5h30m"},
    {"train", "logging-steps log-every log-steps log-freq", "steps between lines are --log-interval"},
    {"train", "eval-steps eval-every val-every val-loss-every val-check-interval evaluation-interval -v",
     "steps between validations are --eval-interval"},
    {"train", "eval-batches max-val-steps val-max-steps limit-val-batches -m",
     "global batches of a validation are --eval-iters"},
    {"train", "sample-every generate-every -s", "steps between samples are --sample-interval"},
    {"train", "-g", "the length of samples is --sample-tokens"},
    {"train", "wandb wandb-log wandb-run-name wandb-project report-to use-wandb project-name push-to-hub hub-model-id",
     "nothing is sent to services: report.html and log.jsonl in --out have the curves"},
    {"train", "run-name exp-name experiment experiment-name", "the name of a run in reports is --name"},
    {"train", "logging-dir", "the curves are in report.html in --out; files for TensorBoard are --tensorboard-dir DIR"},
    {"train", "early-stopping-patience early-stopping load-best-model-at-end metric-for-best-model",
     "a run ends at --train-iters; it names the step of the best validation, whose checkpoint --keep or --keep-every keeps"},
    {"train", "profile profiler debug verbose", "the log has the time of each step; --log-interval 1 prints every one"},
    {"train", "estimate", "a plan of memory and time without training is --dry-run"},
    {"train", "cpu no-cuda use-cpu backend", "the program is built for a CPU or for GPUs: `make BACKEND=cpu` or cuda"},
    // models
    {"train",
     "model-name-or-path model-name pretrained-model base-model hf-model model-path model-dir from-pretrained pretrained",
     "--model DIR starts from a model on disk, --preset PRESET from random weights in a published shape"},
    {"train", "model-type config-name model-config model-size arch architecture -e", "a published shape is --preset PRESET"},
    {"train", "n-layer n-layers layers num-hidden-layers", "the number of layers is --num-layers"},
    {"train", "depth", "the number of layers is --num-layers; --size 15m derives all other sizes"},
    {"train", "n-head n-heads heads num-heads", "the number of attention heads is --num-attention-heads"},
    {"train", "n-kv-heads num-kv-heads num-key-value-heads n-kv-head n-query-groups",
     "the number of key/value heads is --num-query-groups"},
    {"train", "n-embd d-model dim embedding-dim hidden-dim model-dim width embed-dim", "the width is --hidden-size"},
    {"train", "intermediate-size ffn-dim d-ff mlp-dim", "the feed-forward width is --ffn-hidden-size"},
    {"train eval",
     "block-size context-length context-size ctx-len ctx n-ctx max-seq-length max-seq-len max-length "
     "seq-len seqlen sequence-length -t",
     "the length of a sample is --seq-length"},
    {"train", "n-positions", "the longest sequence is --max-position-embeddings"},
    {"train", "rope-theta rope-base rotary-theta", "the base of rotary positions is --rotary-base"},
    {"train", "use-rope rope", "rotary positions are --position-embedding-type rope"},
    {"train", "rms-norm-eps layer-norm-eps layer-norm-epsilon", "the epsilon of norms is --norm-epsilon"},
    {"train", "initializer-range init-std", "the standard deviation of initial weights is --init-method-std"},
    {"train", "dropout attn-dropout resid-dropout embd-dropout attention-probs-dropout-prob",
     "dropout is --attention-dropout, --hidden-dropout and --embedding-dropout"},
    {"train", "head-dim head-size d-head", "the size of a head is --kv-channels"},
    {"train", "sliding-window window attention-window", "a sliding window is --window-size"},
    {"train", "qk-norm use-qk-norm", "norms of queries and keys are --qk-layernorm"},
    {"train", "partial-rotary-factor rotary-pct", "the rotated fraction of a head is --rotary-percent"},
    {"train", "quick-geglu activation-func-clamp-value glu-linear-offset swiglu-limit",
     "the activation of GPT-OSS, with its limit 7 and offset 1, is --activation clamped-swiglu"},
    {"train", "hidden-act hidden-activation activation-function act-fn", "the activation is --activation"},
    {"train", "logit-softcapping logit-soft-capping", "soft-capping is --attn-logit-softcapping and --final-logit-softcapping"},
    {"train", "parallel-residual use-parallel-residual", "attention and MLP side by side are --norm-place parallel"},
    {"train", "tie-word-embeddings tie-embeddings",
     "embedding and output layer share weights except in Llama's family: --untie-embeddings-and-output-weights"},
    {"train", "moe n-experts num-local-experts n-routed-experts", "the number of a mixture's experts is --num-experts"},
    {"train", "num-experts-per-tok num-experts-per-token moe-top-k moe-topk top-k",
     "the number of experts for each token is --moe-router-topk"},
    {"train", "first-k-dense-replace mlp-only-layers decoder-sparse-step",
     "dense layers among mixtures are a list such as --moe-layer-freq [0]*1+[1]*23"},
    {"train", "moe-intermediate-size expert-hidden-size", "the width of each expert is --moe-ffn-hidden-size"},
    {"train", "router-aux-loss-coef aux-loss-coef", "the coefficient of the balancing loss is --moe-aux-loss-coeff"},
    {"train", "moe-pad-expert-input-to-capacity", "not available: the rows of experts are never padded"},
    {"train", "shared-expert-intermediate-size n-shared-experts",
     "the total width of shared experts is --moe-shared-expert-intermediate-size"},
    {"train", "moe-input-jitter-eps", "not available: the router's input has no noise"},
    // data and tokenizers
    {"train",
     "dataset datasets dataset-name dataset-path train-file train-files train-data train-path data-dir "
     "input-bin data-prefix -i",
     "data is named by --data-path PREFIX, which `train_gpt prepare` creates from text"},
    {"train", "validation-file val-file val-data val-data-path val-files eval-data eval-file input-val-bin -j",
     "separate validation data is --valid-data-path PREFIX; without it, --split takes a share of --data-path"},
    {"train", "validation-split-percentage val-split", "the share of validation is the second number of --split"},
    {"train prepare", "tokenizer-name tokenizer-path tokenizer-name-or-path vocab-file merge-file",
     "a tokenizer.json or tokenizer.model, or its directory, is --tokenizer"},
    {"train", "num-threads n-threads cpu-threads", "CPU threads of a rank are --threads"},
    {"train", "dataloader-num-workers workers num-workers", "data is read from memory-mapped files; there are no workers"},
    {"prepare", "text-column text-key key field", "the key of the text is --json-keys"},
    {"train", "lora use-lora peft use-peft lora-r lora-dim peft-rank", "the rank of adapters is --lora-rank"},
    {"train", "target-modules lora-target-modules lora-target lora-layers", "the matrices with adapters are --lora-targets"},
    {"train", "packing pack group-by-length",
     "samples are always full: documents follow each other; --reset-attention-mask separates them"},
    {"train", "chat-template response-template completion-only-loss assistant-only-loss train-on-inputs",
     "the loss is on the answers only, which `train_gpt prepare` marks in conversations"},
    {"train", "beta", "the strength of preferences is --dpo-beta; AdamW has --adam-beta1 and --adam-beta2"},
    {"train", "reference-model ref-model", "the reference of preference training is --model"},
    {"train generate eval serve", "bits quant", "weights in 4 to 8 bits are --quantize-base nf4, q4_k or q8_0"},
    {"train generate eval serve", "double-quant use-double-quant bnb-4bit-use-double-quant",
     "double quantization is --quantize-base nf4-double"},
    {"sweep", "trials max-trials num-trials n-trials", "the number of configurations is --configs"},
    {"tune", "max-trials num-trials n-trials", "the number of layouts to measure is --trials"},
    {"sweep", "time time-limit", "the time of a search is --budget"},
    {"sweep", "search param params parameters grid space search-space",
     "the searched options are given as --over lr=1e-4..1e-2"},
    {"train generate eval serve prepare curate tokenizer sweep tune", "config-file config-path yaml",
     "a file of options is --config FILE.toml"},
    // machines
    {"train", "gradient-checkpointing activation-checkpointing use-activation-checkpointing -r",
     "recomputation is --recompute-granularity selective, mlp or full"},
    {"train", "recompute-modules",
     "modules are chosen by --recompute-granularity: selective (norms, activations), mlp or "
     "full"},
    {"train",
     "num-gpus num-gpu ngpu n-gpus n-gpu gpus gpu devices nproc-per-node nproc num-processes nnodes num-nodes nodes "
     "world-size ddp master-addr master-port rdzv-endpoint",
     "start ranks with a launcher: mpirun -n 8 train_gpt train ...; --world plans for ranks without starting them"},
    {"train", "data-parallel-size dp-size dp data-parallel-shard-degree data-parallel-replicate-degree",
     "the number of data-parallel ranks is all ranks / (--tp x --pp)"},
    {"train generate eval", "tensor-parallel-size tp-size tensor-parallel model-parallel-size tensor-parallel-degree",
     "tensor parallelism is --tensor-model-parallel-size"},
    {"train generate eval", "pipeline-parallel-size pp-size pipeline-parallel pipeline-parallel-degree",
     "stages are --pipeline-model-parallel-size"},
    {"train", "num-layers-per-virtual-pipeline-stage",
     "--num-virtual-stages-per-pipeline-rank sets the number of chunks of layers per rank, not their size"},
    {"train", "context-parallel-degree context-parallel cp-size ring-attention ulysses",
     "context parallelism is --context-parallel-size, in Ulysses' way with --context-parallel-method alltoall"},
    {"train", "zero-stage zero2 zero3 deepspeed fsdp fsdp-config deepspeed-config -z",
     "--zero 1 shards the optimizer's state over ranks, --zero 2 also the gradients, --zero 3 also the parameters"},
    {"train", "expert-parallel-size expert-parallel ep-size", "expert parallelism is --expert-model-parallel-size"},
    {"train", "cpu-offload optimizer-offload offload-optimizer",
     "the optimizer's state is on the host with --offload optimizer"},
    {"train", "sp", "sequence parallelism follows from --tensor-model-parallel-size; --no-sequence-parallel disables it"},
    {"train", "grad-reduce-in-bf16", "gradients are stored, and sent between ranks, in bf16 with --main-grads-dtype bf16"},
    {"train generate eval",
     "use-flash-attn flash-attn flash-attention use-flash-attention attn-implementation attention-backend",
     "attention is always flash attention; there is nothing to choose"},
    {"train generate eval", "compile torch-compile use-compile", "the program is compiled already; there is nothing to choose"},
    // writing
    {"generate", "length max-length max-tokens n-predict num-tokens n-tokens max-new-token -n",
     "the maximum number of generated tokens is --max-new-tokens"},
    {"generate", "num-return-sequences n-samples n", "the number of continuations is --num-samples"},
    {"generate", "temp", "it is --temperature"},
    {"generate", "topk", "it is --top-k"},
    {"generate", "topp", "it is --top-p"},
    {"generate", "output output-file o -o stream", "the text goes to standard output as it is generated: add > FILE"},
    {"generate", "stop stop-token stop-tokens stop-strings stop-sequences eos ignore-eos",
     "a text ends at the model's end tokens, or after --max-new-tokens; requests to `train_gpt serve` may have \"stop\""},
    {"generate", "grammar json-schema logprobs json format draft-model speculative",
     "not available here; requests to `train_gpt serve` may ask for JSON and log-probabilities"},
    {"generate serve eval", "tokenizer tokenizer-path", "the tokenizer is in the directory of --model"},
    {"generate", "do-sample greedy", "--temperature 0 always takes the most likely token"},
    {"generate", "text input start -p", "the text to continue is --prompt"},
    {"train", "-f", "the precision is chosen when the program is built: `make PRECISION=bf16` (the default) or fp32"},
    {"train", "prompt -p", "text is generated by train_gpt generate --model DIR --prompt TEXT"},
    {"generate", "file prompt-file prompts-file input-file -f",
     "texts to continue, one per line, are --prompts FILE; --prompt - reads one from standard input"},
    {"generate", "interactive conversation interactive-first -i cnv -cnv", "a conversation is --chat"},
    {"generate", "system-prompt -sys sys", "the system's message is --system"},
    {"generate serve",
     "repeat-penalty repetition-penalty presence-penalty frequency-penalty min-p typical-p mirostat "
     "no-repeat-ngram-size",
     "not supported: tokens are sampled by temperature, top-k and top-p"},
    {"serve", "num-beams", "beam search is in train_gpt generate"},
    {"generate serve eval",
     "checkpoint ckpt checkpoint-dir model-path model-dir load out-dir out model-name-or-path hf-repo hf-model hf -m -hf",
     "the model's directory, or a run's, is --model"},
    {"eval", "model-args", "the model's directory, or a run's, is --model; tasks are files: --tasks hellaswag.jsonl"},
    {"eval", "stride window", "a token is read once: windows of --seq-length follow each other"},
    {"eval", "file -f input text-file perplexity ppl", "the text file to measure on is --text"},
    {"eval", "dataset dataset-path", "prepared data is --data-path PREFIX, a text file is --text"},
    {"eval", "n-shot num-shots shots nshot fewshots", "the number of solved examples is --num-fewshot"},
    {"eval", "output-path log-samples output", "the answers go to --answers FILE, the result to standard output: --json"},
    {"eval", "num-samples n-samples max-docs max-batches eval-iters limit-samples",
     "the maximum number of samples is --max-samples"},
    {"generate serve eval export", "lora lora-path lora-modules enable-lora peft adapters adapter-path",
     "adapters are --adapter DIR"},
    {"generate serve eval", "num-threads n-threads cpu-threads -t threads-batch", "CPU threads are --threads"},
    {"generate serve eval", "n-gpu-layers gpu-layers device gpu-memory-utilization tensor-split cuda -ngl ngl",
     "the build decides: one for GPUs has the whole model on them; there is nothing to choose"},
    {"train generate serve eval", "quantize quantization qlora load-in-8bit load-in-4bit bnb-4bit-quant-type",
     "weights in 4 to 8 bits are --quantize-base nf4, q4_k or q8_0; train takes them with adapters only"},
    {"generate serve eval", "kv-cache-dtype cache-type-k cache-type-v", "the key/value cache is in the precision of the build"},
    {"generate serve", "trust-remote-code enforce-eager no-mmap mlock flash-attn-type",
     "not needed: the program runs no code of a model, and attention is always flash attention"},
    {"generate", "ctx-size ctx n-ctx context context-size max-model-len context-length seq-length max-seq-len -c",
     "the context is the prompt and --max-new-tokens, up to the model's longest sequence"},
    {"generate", "batch-size -b parallel", "the maximum batch size is --batch"},
    {"serve", "ctx-size n-ctx context-size max-model-len context-length max-seq-len max-seq-length -c",
     "the maximum length of a prompt and its completion is --seq-length"},
    {"serve", "max-num-seqs max-batch max-concurrency parallel batch-size max-batch-size -np np -b",
     "the maximum batch size is --batch"},
    {"serve", "n-predict max-tokens -n", "the maximum length of a completion is --max-new-tokens"},
    {"serve", "tensor-parallel-size tensor-model-parallel-size tp pipeline-parallel-size", "serve is one process, on one GPU"},
    {"serve", "address bind ip listen", "the address is --host"},
    {"serve", "metrics prometheus enable-metrics", "not available; a run of train writes files for Prometheus"},
    {"serve", "alias model-name -a", "the name that requests use is --served-model-name"},
    {"serve", "api-key ssl ssl-keyfile ssl-certfile tls-cert tls-key",
     "there are no passwords and no encryption: put a proxy before it"},
    {"serve", "dtype precision torch-dtype fp16 half",
     "the precision is chosen when the program is built: `make PRECISION=bf16` or fp32"},
    // text and data
    {"prepare", "shuffle", "the order of documents is a choice of train"},
    {"prepare", "overwrite force", "existing data of the same name is replaced"},
    {"prepare", "train-on-inputs mask-inputs response-template", "--chat has the loss on the answers only"},
    {"prepare", "filter dedup lang language", "texts are filtered by train_gpt curate"},
    {"prepare", "dtype", "tokens have 2 bytes, or 4 in a vocabulary above 65,535"},
    {"prepare", "append-eos add-eos", "it is the default; --no-append-eod omits it"},
    {"prepare", "output-dir out out-dir output-path destination-path destination outfile -o",
     "the output files PREFIX.bin and PREFIX.idx are --output PREFIX"},
    {"prepare curate tokenizer",
     "input-dir input-file input-files files file source-path data data-path dataset text corpus -i",
     "the files, folders or patterns to read are --input"},
    {"prepare", "num-proc num-workers nproc processes num-processes -j", "CPU threads are --workers"},
    {"tokenizer", "workers", "CPU threads are --threads"},
    {"curate tokenizer", "num-proc num-workers nproc processes num-processes -j", "CPU threads are --threads"},
    {"prepare", "eos eos-token eod", "the tokenizer decides its end-of-document token"},
    {"prepare", "max-length max-len max-seq-length seq-length block-size pack packing chunk-size",
     "documents stay whole: the length of a sample is a choice of train"},
    {"prepare", "split val-split val-frac test-size validation-split",
     "the shares of training and validation are a choice of train"},
    {"prepare curate tokenizer", "text-column text-key key field column text-field content-key jsonl-keys",
     "the key of the text is --json-keys"},
    {"curate", "out out-dir output-dir output-path output-folder destination -o", "the directory to write is --output"},
    {"curate", "dedup deduplicate exact-dedup",
     "duplicates are dropped by --exact-duplicates documents, near ones by --near-duplicates fineweb"},
    {"curate", "minhash minhash-dedup fuzzy-dedup simhash", "near duplicates are dropped by --near-duplicates fineweb"},
    {"curate", "lang language", "languages to keep are --languages, with --language-model"},
    {"curate", "filters filter quality-filter", "published rules are --heuristics gopher c4 fineweb"},
    {"curate", "compression", "the format of the files is --output-format jsonl.zst, jsonl.gz or jsonl"},
    {"tokenizer", "out out-dir output-dir output-path model-prefix model-name save -o",
     "the directory for tokenizer.json is --output"},
    {"tokenizer", "model-type model kind algorithm", "the algorithm is --type bpe or unigram"},
    {"tokenizer", "vocab vocabsize n-vocab vocabulary-size num-tokens -v", "the size of the vocabulary is --vocab-size"},
    {"tokenizer", "special user-defined-symbols control-symbols unk bos eos", "special tokens are --special-tokens"},
    {"tokenizer", "min-freq min-count", "it is --min-frequency"},
    {"tokenizer", "regex pattern pretokenizer pre-tokenizer-type",
     "words are split as by --pre-tokenizer gpt2, llama3 or bloom"},
    // one file, reports
    {"export", "outfile output output-file out-file out-dir -o",
     "the file to write is --gguf FILE; with --merge, the directory is --out"},
    {"export", "merge-lora merge-adapter", "--merge --adapter DIR --out DIR merges adapters into their model"},
    {"export", "base base-model", "the adapters' model is --model, if it is not at the path that they name"},
    {"export", "format to safetensors",
     "--gguf FILE.gguf writes a file of llama.cpp; --out DIR copies the files of a model; --merge its adapters"},
    {"export", "outtype quantize quantization ftype dtype torch-dtype precision",
     "the type of the matrices is --type q4_k_m, q8_0, bf16, ..."},
    {"export", "checkpoint ckpt checkpoint-dir model-path model-dir model-name-or-path -m",
     "the model\'s directory, or a run\'s, is --model"},
    {"import", "input file model model-path -m", "the file to read is --gguf FILE"},
    {"train tune sweep eval generate serve", "gguf gguf-file", "a GGUF file is a model as any other: --model FILE.gguf"},
    {"import", "outfile output output-dir out-dir -o", "the directory to write is --out"},
    {"report", "out out-file outfile html -o", "the page to write is --output FILE"},
    {"report", "run dir logdir log-dir input", "the runs are named without an option: train_gpt report RUN ..."},
    {"inspect", "model data data-path run checkpoint dir file input checkpoint-dir model-path",
     "what to inspect is named without an option: train_gpt inspect PATH"},
};

// The advice for an option of another program; empty if it is unknown.
inline std::string advice_on(const std::string& command, const std::string& name) {
    for (const OtherName& o : other_names)
        if ((command == o.commands || is_listed(o.commands, command)) && is_listed(o.names, name)) return o.here;
    return "";
}

// A hint for a file of another program's options; "" for other words.
inline std::string foreign_config(const std::string& word) {
    const std::string ending = std::filesystem::path(word).extension().string();
    const bool is_one = ending == ".py" || ending == ".yaml" || ending == ".yml" || ending == ".json";
    return is_one ? "; HINT: a file of options is TOML, with lines like micro-batch-size = 4: --config FILE.toml" : "";
}

// The options that words without one are probably meant for: "--model run1 --prompt Hello"; "" if that is not clear.
// has_model: --model was given before them.
inline std::string meant_by(const std::string& command, const Strings& words, bool has_model) {
    namespace fs = std::filesystem;
    const auto ends = [](const std::string& word, const std::string& with) {
        return word.size() > with.size() && word.compare(word.size() - with.size(), with.size(), with) == 0;
    };
    const auto option = [&](const std::string& word) -> std::string {
        std::error_code error;
        const bool folder = fs::is_directory(word, error);
        if (ends(word, ".toml")) return "--config " + word;
        if (command == "train" || command == "tune" || command == "sweep") {
            for (const char* end : {".bin", ".idx"})
                if (ends(word, end)) return "--data-path " + word.substr(0, word.size() - 4);
            for (const Preset& p : presets())
                if (word == p.name) return "--preset " + word;
            if (fs::exists(word + ".bin", error)) return "--data-path " + word;
            return folder || ends(word, ".gguf") ? "--model " + word : "";
        }
        if (command == "import")
            return fs::is_regular_file(word, error) || ends(word, ".gguf") ? "--gguf " + word : "--out " + word;
        if (ends(word, ".gguf")) return (command == "export" ? "--gguf " : "--model ") + word;
        if (command == "eval" && ends(word, ".jsonl")) return "--tasks " + word;
        if (command == "eval" && fs::exists(word + ".bin", error)) return "--data-path " + word;
        if (command == "eval" && (ends(word, ".txt") || fs::is_regular_file(word, error))) return "--text " + word;
        if (has_model) return "";
        if (command == "generate" || command == "serve" || command == "eval" || command == "export") return "--model " + word;
        return command == "prepare" || command == "curate" || command == "tokenizer" ? "--input " + word : "";
    };
    std::string text, rest;
    for (const std::string& word : words) {
        const bool prompt = command == "generate" && (has_model || text.find("--model") == 0);
        const std::string meant = prompt ? "" : option(word);
        const std::string name = meant.substr(0, meant.find(' '));
        if (prompt) rest += (rest.empty() ? "" : " ") + word;
        else if (name == "--input" && text.find("--input") != std::string::npos) text += " " + word;
        else if (command == "export" && name == "--model" && text.find("--model") == 0) text += " --out " + word;
        else if (meant.empty() || (!text.empty() && text.find(name + " ") != std::string::npos)) return "";
        else text += (text.empty() ? "" : " ") + meant;
    }
    const bool quotes = rest.find(' ') != std::string::npos;
    return rest.empty() ? text : text + (text.empty() ? "" : " ") + "--prompt " + (quotes ? "\"" + rest + "\"" : rest);
}

}  // namespace cli
