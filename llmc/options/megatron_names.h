// Options of Megatron-LM and its forks that are taken, so that a job's command line can be pasted: those with another name
// here, and those without effect. Each is noted when a run starts. Options that would change the result are not among them: the
// parser refuses these (other_names.h).
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/types.h"
#include "options.h"

namespace cli {

// The options that one of another program becomes, and a note about it.
struct Renamed {
    std::vector<std::pair<std::string, Strings>> options;
    std::string note;
};

struct MegatronName {
    const char* commands;  // to which the entry applies
    const char* names;
    int values;        // 0: a flag; 1: a value; -1: a list
    const char* here;  // the option here, or "NAME=VALUE"; "": the option is ignored
    const char* unit;  // appended to the value
    const char* only;  // the only value that is taken; "": any
    const char* why;   // why it has no effect
};
inline const MegatronName megatron_names[] = {
    // another name
    {"train", "save", 1, "out", "", "", ""},
    {"train", "save-interval", 1, "save-every", "", "", ""},
    {"train", "train-data-path", -1, "data-path", "", "", ""},
    {"train prepare", "tokenizer-model", 1, "tokenizer", "", "", ""},
    {"train", "layernorm-epsilon", 1, "norm-epsilon", "", "", ""},
    {"train", "exit-duration-in-mins", 1, "exit-after", "m", "", ""},
    {"train", "distributed-timeout-minutes", 1, "distributed-timeout", "m", "", ""},
    {"train", "load", 1, "resume", "", "", ""},  // auto if it is --save as well: the parser sees to it
    {"train", "use-rotary-position-embeddings", 0, "position-embedding-type=rope", "", "", ""},
    {"train", "recompute-activations", 0, "recompute-granularity=selective", "", "", ""},
    {"train", "checkpoint-activations", 0, "recompute-granularity=full", "", "", ""},
    // no effect
    {"train", "recompute-method", 1, "", "", "", "--recompute-num-layers is Megatron's block"},  // uniform: see the parser
    {"train generate eval serve", "bf16", 0, "", "", "", "this build computes in bf16"},
    {"train", "use-flash-attn use-flash-attn-v2", 0, "", "", "", "attention is always flash attention"},
    {"train", "transformer-impl attention-backend cross-entropy-fusion-impl", 1, "", "", "",
     "the program has one implementation of each layer"},
    {"train",
     "use-mcore-models no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
     "no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm masked-softmax-fusion bias-gelu-fusion "
     "bias-dropout-fusion "
     "persist-layer-norm cross-entropy-loss-fusion no-async-tensor-model-parallel-allreduce "
     "abort-on-unmet-fused-kernel-constraints",
     0, "", "", "", "the program has one implementation of each layer"},
    {"train", "attention-softmax-in-fp32 no-query-key-layer-scaling", 0, "", "", "", "softmax is in fp32"},
    {"train", "accumulate-allreduce-grads-in-fp32", 0, "", "", "",
     "gradients are summed in fp32 unless --main-grads-dtype bf16 is given"},
    {"train", "use-distributed-optimizer overlap-grad-reduce overlap-param-gather tp-comm-overlap", 0, "", "", "",
     "it is the default"},
    {"train", "group-query-attention", 0, "", "", "", "--num-query-groups enables it"},
    {"train", "no-contiguous-buffers-in-local-ddp delay-grad-reduce no-delay-grad-reduce sync-tp-duplicated-parameters", 0, "",
     "", "", "gradients are always in one buffer, and their order is fixed"},
    {"train", "DDP-impl distributed-backend local-rank", 1, "", "", "", "MPI starts the ranks, and NCCL connects GPUs"},
    {"train", "use-cpu-initialization", 0, "", "", "", "initial weights do not depend on the device or the layout"},
    {"train", "num-workers", 1, "", "", "", "data is read from memory-mapped files"},
    {"train", "data-cache-path", 1, "", "", "", "the order of samples is computed at each start"},
    {"train prepare", "data-impl dataset-impl", 1, "", "", "mmap", "files are memory-mapped"},
    {"train", "dataloader-type", 1, "", "", "single", "it is the default"},
    {"train", "no-mmap-bin-files no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader", 0, "", "", "",
     "data is read from memory-mapped files"},
    {"train prepare", "tokenizer-type", 1, "", "", "", "--tokenizer determines it"},
    {"train", "ckpt-format dist-ckpt-format", 1, "", "", "", "checkpoints have one format, which any layout of ranks reads"},
    {"train",
     "use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure",
     0, "", "", "", "checkpoints have one format, which any layout of ranks reads"},
    {"train", "async-save", 0, "", "", "", "it is the default"},
    {"train", "exit-signal-handler", 0, "", "", "", "signals are always handled"},
    {"train", "check-for-nan-in-loss-and-grad", 0, "", "", "", "steps that are not finite are never applied"},
    {"train", "timing-log-level timing-log-option tensorboard-queue-size tensorboard-log-interval", 1, "", "", "",
     "log.jsonl has all measurements"},
    {"train",
     "log-params-norm log-num-zeros-in-grad log-throughput log-progress log-timers-to-tensorboard "
     "log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard "
     "log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard no-barrier-with-level-1-timing no-one-logger",
     0, "", "", "", "log.jsonl has all measurements"},
    {"train", "wandb-project wandb-exp-name wandb-entity wandb-save-dir", 1, "", "", "",
     "nothing is sent to services: report.html and log.jsonl in --out have the curves"},
    {"train", "loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis", 1, "", "", "",
     "bf16 needs no loss scale"},
    {"train", "manual-gc", 0, "", "", "", "there is no garbage collection"},
    {"train", "manual-gc-interval empty-unused-memory-level", 1, "", "", "", "all memory is allocated once"},
    {"train", "expert-tensor-parallel-size fp8-interval", 1, "", "", "1", "it is the default"},
    {"train", "moe-router-dtype", 1, "", "", "fp32", "the router computes in fp32"},
    {"train", "moe-flex-dispatcher-backend", 1, "", "", "", "--moe-token-dispatcher-type allgather or alltoall"},
    {"train",
     "moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion moe-router-fusion moe-enable-deepep "
     "moe-shared-expert-overlap",
     0, "", "", "", "the program has one implementation of each layer"},
    {"prepare", "partitions", 1, "", "", "1", "it is the default"},
    {"prepare", "chunk-size log-interval", 1, "", "", "", "the program chooses it"},
};

inline bool is_listed(const std::string& list, const std::string& word) {
    return (" " + list + " ").find(" " + word + " ") != std::string::npos;
}

inline const MegatronName* find_megatron_name(const std::string& command, const std::string& name) {
    for (const MegatronName& row : megatron_names)
        if (is_listed(row.commands, command) && is_listed(row.names, name)) return &row;
    return nullptr;
}

// Translates the option `name` with these values; refuses a value that would change the result.
inline Renamed renamed(const MegatronName& row, const std::string& name, const Strings& values) {
    if (row.values != 0 && values.empty()) fail_usage("--%s has no value", name.c_str());
    const std::string value = values.empty() ? "" : values[0];
    if (*row.only && value != row.only)
        fail_usage("--%s is '%s', which is not supported; only %s is", name.c_str(), value.c_str(), row.only);
    if (name == "bf16" && std::string(precision_name) != "bf16")
        fail_usage("--bf16 with a build in %s; HINT: make PRECISION=bf16 train_gpt", precision_name);
    if (!*row.here) return {{}, "--" + name + " has no effect: " + row.why};
    const std::string here = row.here;
    const size_t equals = here.find('=');
    if (equals != std::string::npos)
        return {{{here.substr(0, equals), {here.substr(equals + 1)}}},
                "--" + name + " is --" + here.substr(0, equals) + " " + here.substr(equals + 1)};
    Strings all = values;
    for (std::string& v : all) v += row.unit;
    return {{{here, all}}, "--" + name + " is --" + here};
}

}  // namespace cli
