// Names of options in other programs (Hugging Face's Trainer, nanoGPT, llm.c, Megatron-LM, Lightning), and their names here.
// They are rejected, with our name in the error.
#pragma once
#include <string>

namespace cli {

struct OtherName {
    const char* commands;  // commands to which the entry applies
    const char* names;     // in other programs; without dashes, except names of one or two letters
    const char* here;
};
inline const OtherName other_names[] = {
    // length and batches
    {"train", "learning-rate max-lr peak-lr -l", "the learning rate is --lr"},
    {"train", "batch-size train-batch-size device-batch-size per-device-train-batch-size per-gpu-train-batch-size -b",
     "--micro-batch-size is per rank and pass, --global-batch-size per step over all ranks"},
    {"eval", "batch-size per-device-eval-batch-size eval-batch-size", "samples at a time are --micro-batch-size"},
    {"train", "gradient-accumulation-steps grad-accum grad-accum-steps accumulate-grad-batches gradient-accumulation",
     "set --global-batch-size to --micro-batch-size x data-parallel ranks x steps of accumulation"},
    {"train", "total-batch-size -d", "--global-batch-size is in samples: tokens of a step / --seq-length"},
    {"train", "epochs num-epochs num-train-epochs max-epochs epoch",
     "the length of a run is --train-iters or --train-samples; an epoch has (tokens of the data) / --seq-length samples, and "
     "the tokens are what `train_gpt inspect PREFIX` shows"},
    {"train",
     "max-steps max-iters num-steps num-iterations num-iters train-steps total-steps num-train-steps num-training-steps "
     "iterations iters max-train-steps -x",
     "the number of steps is --train-iters"},
    {"train", "warmup-steps num-warmup-steps warmup-iters warmup-iterations warmup warmup-num-steps -u",
     "steps of warm-up are --lr-warmup-iters"},
    {"train", "warmup-ratio warmup-fraction", "the warm-up as a part of the decay is --lr-warmup-fraction"},
    {"train", "lr-scheduler lr-scheduler-type scheduler lr-schedule decay-lr -k", "the schedule is --lr-decay-style"},
    {"train", "lr-decay-steps decay-steps", "the end of the decay is --lr-decay-iters"},
    {"train", "min-learning-rate final-learning-rate-frac learning-rate-decay-frac lr-min final-lr-frac -q",
     "the learning rate after the decay is --min-lr, a rate and not a part of --lr"},
    {"train", "max-grad-norm grad-clip gradient-clip-val gradient-clipping clip-grad-norm max-norm",
     "the largest norm of the gradients is --clip-grad"},
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
    {"train", "optim optimizer-type", "the optimizer is --optimizer adamw, muon or normuon"},
    {"train generate", "random-seed", "the seed is --seed"},
    // precision
    {"train generate eval", "fp16", "there is no fp16: the program is built for bf16, or with `make PRECISION=fp32` for fp32"},
    {"train generate eval",
     "bf16 fp32 mixed-precision precision dtype torch-dtype params-dtype amp tf32 float16 bfloat16 half -f",
     "the precision is chosen when the program is built: `make PRECISION=bf16` (the default) or fp32"},
    {"train", "fp8-hybrid", "FP8 is --fp8-format hybrid"},
    {"train", "fp8-e4m3", "FP8 is --fp8-format e4m3"},
    // directories, checkpoints, logs
    {"train", "output-dir out-dir save save-dir checkpoint-dir ckpt-dir output outdir default-root-dir -o",
     "the directory of a run is --out"},
    {"train", "load load-checkpoint resume-from-checkpoint resume-from init-from checkpoint ckpt-path -y",
     "--resume auto resumes the run in --out, --resume DIR from a checkpoint; --model DIR starts a new run from its weights"},
    {"train", "save-interval save-steps checkpoint-interval checkpoint-every checkpointing-steps -n",
     "checkpoints are written --save-every 500 steps, or 30m"},
    {"train", "save-total-limit keep-last -nk", "the number of checkpoints is --keep"},
    {"train", "-nm", "permanent checkpoints are --keep-every"},
    {"train", "overwrite-output-dir", "nothing is overwritten: give a new --out, or --resume auto"},
    {"train", "exit-duration-in-mins time-limit max-time", "the time limit is --exit-after 5h30m"},
    {"train", "logging-steps log-every log-steps", "steps between lines are --log-interval"},
    {"train", "eval-steps eval-every val-loss-every val-check-interval evaluation-interval -v",
     "steps between validations are --eval-interval"},
    {"train", "eval-batches max-val-steps val-max-steps limit-val-batches -m",
     "global batches of a validation are --eval-iters"},
    {"train", "sample-every generate-every -s", "steps between samples are --sample-interval"},
    {"train", "-g", "the length of samples is --sample-tokens"},
    {"train", "wandb wandb-project wandb-log wandb-run-name wandb-exp-name wandb-entity report-to use-wandb project-name",
     "nothing is sent to services: report.html and log.jsonl in --out have the curves"},
    // models
    {"train", "model-name-or-path model-name pretrained-model base-model hf-model model-path model-dir",
     "--model DIR starts from a model on disk, --preset PRESET from random weights in a published shape"},
    {"train", "model-type config-name model-config model-size arch architecture -e", "a published shape is --preset PRESET"},
    {"train", "n-layer n-layers layers num-hidden-layers", "the number of layers is --num-layers"},
    {"train", "depth", "the number of layers is --num-layers; the one dial that sets all the rest is --size 15m"},
    {"train", "n-head n-heads heads num-heads", "the number of attention heads is --num-attention-heads"},
    {"train", "n-kv-heads num-kv-heads num-key-value-heads n-kv-head n-query-groups group-query-attention",
     "the number of key/value heads is --num-query-groups"},
    {"train", "n-embd d-model dim embedding-dim hidden-dim model-dim width embed-dim", "the width is --hidden-size"},
    {"train", "intermediate-size ffn-dim d-ff mlp-dim", "the feed-forward width is --ffn-hidden-size"},
    {"train eval",
     "block-size context-length context-size ctx-len n-ctx max-seq-length max-seq-len max-length seq-len sequence-length -t",
     "the length of a sample is --seq-length"},
    {"train", "n-positions", "the longest sequence is --max-position-embeddings"},
    {"train", "rope-theta rope-base rotary-theta", "the base of rotary positions is --rotary-base"},
    {"train", "use-rotary-position-embeddings use-rope rope", "rotary positions are --position-embedding-type rope"},
    {"train", "rms-norm-eps layer-norm-eps layernorm-epsilon layer-norm-epsilon", "the epsilon of norms is --norm-epsilon"},
    {"train", "initializer-range init-std", "the standard deviation of initial weights is --init-method-std"},
    {"train", "dropout attn-dropout resid-dropout embd-dropout attention-probs-dropout-prob",
     "dropout is --attention-dropout, --hidden-dropout and --embedding-dropout"},
    {"train", "head-dim head-size d-head", "the size of a head is --kv-channels"},
    {"train", "sliding-window window attention-window", "a sliding window is --window-size"},
    {"train", "qk-norm use-qk-norm", "norms of queries and keys are --qk-layernorm"},
    {"train", "partial-rotary-factor rotary-pct", "the rotated part of a head is --rotary-percent"},
    {"train", "hidden-act hidden-activation activation-function act-fn", "the activation is --activation"},
    {"train", "logit-softcapping logit-soft-capping", "soft-capping is --attn-logit-softcapping and --final-logit-softcapping"},
    {"train", "parallel-residual use-parallel-residual", "attention and MLP side by side are --norm-place parallel"},
    {"train", "tie-word-embeddings tie-embeddings",
     "embedding and output layer share weights but in Llama's family: --untie-embeddings-and-output-weights"},
    {"train", "num-experts moe expert-model-parallel-size", "there are no mixtures of experts: all layers are dense"},
    // data and tokenizers
    {"train",
     "dataset dataset-name dataset-path train-file train-files train-data train-data-path data-dir input-bin data-prefix -i",
     "data are named by --data-path PREFIX, which `train_gpt prepare` makes from text"},
    {"train", "validation-file val-file val-data val-data-path val-files eval-data input-val-bin -j",
     "separate validation data are --valid-data-path PREFIX; without, --split takes a share of --data-path"},
    {"train", "validation-split-percentage val-split", "the share of validation is the second number of --split"},
    {"train prepare",
     "tokenizer-name tokenizer-model tokenizer-type tokenizer-path tokenizer-name-or-path vocab-file merge-file",
     "a tokenizer.json or tokenizer.model, or its directory, is --tokenizer"},
    {"train", "num-workers dataloader-num-workers", "data is read from memory-mapped files; there are no workers"},
    {"prepare", "text-column text-key key field", "the key of the text is --json-keys"},
    // machines
    {"train",
     "gradient-checkpointing activation-checkpointing recompute-activations checkpoint-activations "
     "use-activation-checkpointing -r",
     "recomputation is --recompute-granularity selective, mlp or full"},
    {"train", "recompute-modules", "modules are named by --recompute-granularity: selective (norms, activations), mlp or full"},
    {"train", "recompute-method", "--recompute-num-layers is Megatron's method block, of the first layers of each stage"},
    {"train", "num-gpus ngpu n-gpus gpus devices nproc-per-node nproc num-processes nnodes num-nodes world-size",
     "ranks are started around the program: mpirun -n 8 train_gpt train ...; --world plans for ranks that are not there"},
    {"train", "data-parallel-size dp-size dp", "data-parallel ranks are what --tp and --pp leave of all ranks"},
    {"train generate eval", "tensor-parallel-size tp-size tensor-parallel model-parallel-size",
     "tensor parallelism is --tensor-model-parallel-size"},
    {"train generate eval", "pipeline-parallel-size pp-size pipeline-parallel", "stages are --pipeline-model-parallel-size"},
    {"train", "num-layers-per-virtual-pipeline-stage",
     "--num-virtual-stages-per-pipeline-rank says how many groups of layers a rank has, not how large they are"},
    {"train", "context-parallel-size cp", "there is no context parallelism"},
    {"train", "use-distributed-optimizer", "sharding the optimizer's state is the default (--zero 1)"},
    {"train", "zero-stage deepspeed fsdp deepspeed-config -z",
     "--zero 1 shards the optimizer's state over ranks; there are no higher stages"},
    {"train", "grad-reduce-in-bf16", "gradients are stored, and sent between ranks, in bf16 with --main-grads-dtype bf16"},
    {"train", "accumulate-allreduce-grads-in-fp32", "gradients are summed in fp32 unless --main-grads-dtype bf16 is given"},
    {"train", "overlap-grad-reduce overlap-param-gather tp-comm-overlap",
     "communication overlaps with computation unless --no-overlap"},
    {"train generate eval",
     "use-flash-attn flash-attn flash-attention use-flash-attention attn-implementation attention-backend",
     "attention is always flash attention; there is nothing to choose"},
    {"train generate eval", "compile torch-compile use-compile", "the program is compiled already; there is nothing to choose"},
    // generation
    {"generate", "length max-length max-tokens n-predict num-tokens n-tokens", "the most tokens to write are --max-new-tokens"},
    {"generate", "num-return-sequences n", "the number of continuations is --num-samples"},
    {"generate", "temp", "it is --temperature"},
    {"generate", "do-sample greedy", "--temperature 0 always takes the most likely token"},
    {"generate", "text input start", "the text to continue is --prompt"},
    {"generate eval", "checkpoint ckpt model-path model-dir load out-dir out model-name-or-path",
     "the model's directory, or a run's, is --model"},
};

// The advice for an option of another program; empty if it is unknown.
inline std::string advice_on(const std::string& command, const std::string& name) {
    const auto has = [](const std::string& list, const std::string& word) {
        return (" " + list + " ").find(" " + word + " ") != std::string::npos;
    };
    for (const OtherName& o : other_names)
        if (has(o.commands, command) && has(o.names, name)) return o.here;
    return "";
}

}  // namespace cli
