#!/usr/bin/env bash
# The GPU's trainer, on the emulator or a GPU, compared with the CPU's: the same losses for each family and option, the same
# bits when repeated and after a resume, generation, evaluation, and refusals.
#   TRAIN_GPT=build/cpu-bf16/train_gpt GPU_TRAIN_GPT=build/emu-bf16/train_gpt test/gpu_test.sh
gpu=$(realpath "${GPU_TRAIN_GPT:-build/emu-bf16/train_gpt}")
. "$(dirname "$0")/lib.sh"

kings 300 5 >text.txt
expect "tokenizer" "$gpu" tokenizer --input text.txt --vocab-size 380 --output tok
expect "prepare" "$gpu" prepare --input text.txt --output text --tokenizer tok --split-documents blank

small=(--num-layers 2 --tokenizer tok --data-path text --split "90, 10, 0" --seq-length 40 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3
    --lr-warmup-iters 2 --eval-interval 4 --eval-iters 1 --z-loss 1e-4 --quiet --seed 5)
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights)
declare -A run=(
    [gpt2]="--hidden-size 64 --num-attention-heads 4"
    [gpt2-64]="--hidden-size 128 --num-attention-heads 2"
    [bloom]="--hidden-size 64 --num-attention-heads 4 --position-embedding-type alibi --embed-layernorm"
    [bloom-64]="--hidden-size 128 --num-attention-heads 2 --position-embedding-type alibi --embed-layernorm --recompute full --main-grads-dtype bf16"
    [llama]="--hidden-size 64 --num-attention-heads 4 --num-query-groups 2 ${llama[*]}"
    [llama-128]="--hidden-size 64 --num-attention-heads 2 --num-query-groups 1 --kv-channels 128 ${llama[*]} --recompute mlp --recompute-num-layers 1 --recompute-other-layers selective"
    [gemma]="--hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 64 --rope-scaling yarn --rope-scaling-factor 4 --original-max-position-embeddings 16 --softmax-scale 0.1 --add-qkv-bias --add-proj-bias --add-mlp-bias --embedding-dropout 0.1 --normalization RMSNorm --apply-layernorm-1p --norm-place both --qk-layernorm --position-embedding-type rope --activation geglu --disable-bias-linear --window-size 9 --window-attn-skip-freq 2 --rotary-base-local 100 --attn-logit-softcapping 5 --final-logit-softcapping 8 --embedding-scale 8 --softmax-type learnable"
    [neox]="--hidden-size 128 --num-attention-heads 2 --norm-place parallel --position-embedding-type rope --rotary-percent 0.5 --activation gelu-exact --no-rope-freq 2 --window-size 9 --hidden-dropout 0.1 --recompute full"
    [olmo2]="--hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --norm-place after --qk-layernorm-whole --position-embedding-type rope --activation relu2 --attention-dropout 0.1 --recompute selective"
    [dropped]="--hidden-size 128 --num-attention-heads 2 --attention-dropout 0.2 --attn-logit-softcapping 3 --recompute full"
    [mixture]="--hidden-size 64 --num-attention-heads 4 --num-query-groups 2 ${llama[*]} --num-experts 6 --moe-router-topk 2 --ffn-hidden-size 96 --moe-ffn-hidden-size 64 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --recompute selective --main-grads-dtype bf16"
    [documents]="--hidden-size 128 --num-attention-heads 2 ${llama[*]} --reset-position-ids --reset-attention-mask --eod-mask-loss --main-grads-dtype bf16 --exp-avg-dtype bf16"
)
train() { # PROGRAM NAME OUT OPTIONS...
    local trainer=$1 name=$2 out=$3
    shift 3
    # shellcheck disable=SC2086
    "$trainer" train ${run[$name]} "${small[@]}" --out "$out" "$@"
}
# bf16 rounds in other places; in four steps of a small model losses differ by no more than this.
near() { near_losses "$1" "$2" 4 0.01; }
for name in "${!run[@]}"; do
    expect "$name: trains" train "$gpu" "$name" "$name-gpu"
    expect "$name: trains on the CPU" train "$program" "$name" "$name-cpu"
    expect "$name: the CPU's losses" near "$name-cpu" "$name-gpu"
done
# Query gradients summed in any order: with rotary positions, grouped heads of 128 and some recomputation; with ALiBi, heads
# of 64 and full recomputation.
for name in llama-128 bloom-64; do
    expect "$name --nondeterministic-attention: trains" train "$gpu" "$name" unordered --nondeterministic-attention
    expect "$name --nondeterministic-attention: the CPU's losses" near "$name-cpu" unordered
    rm -rf unordered
done
expect "--nondeterministic-attention is in the plan" train "$gpu" llama-128 x --dry-run --nondeterministic-attention
says "with its memory" "sums of queries' gradients (fp32)  *256 KiB"
expect "heads that it is not for" train "$gpu" gpt2 x --dry-run --nondeterministic-attention
says "a note that it changes nothing" "note: --nondeterministic-attention has no effect here: .* not heads of 16 on"
expect "--nondeterministic-attention with --detect-nondeterminism: refused" refused train "$gpu" gpt2 x --nondeterministic-attention --detect-nondeterminism 2
expect "--nondeterministic-attention on the CPU: refused" refused train "$program" gpt2 x --nondeterministic-attention
says "where it is for" "is for GPUs"
# In FP8; the tensor cores accumulate with fewer bits than the CPU.
for name in gpt2 llama olmo2 mixture; do
    for options in "--fp8 hybrid --fp8-start 3" "--fp8 e4m3 --fp8-recipe current --main-grads-dtype bf16 --fp8-weight-transpose on-the-fly"; do
        [[ $name != olmo2 || $options == *start* ]] || continue
        # shellcheck disable=SC2086
        { expect "$name $options: trains" train "$gpu" "$name" fp8-gpu $options && expect "$name $options: trains on the CPU" train "$program" "$name" fp8-cpu $options; }
        expect "$name $options: the CPU's losses" near fp8-cpu fp8-gpu
        rm -rf fp8-cpu fp8-gpu
    done
done
if [[ $gpu == *emu* ]]; then  # the kernels' resources, compared with a table in which one needs more, or is missing
    sed 's/^\(| adamw_kernel[^|]*|\) [0-9]*/\1 257/' "${EMU_RESOURCES:?}" >heavy.md
    EMU_RESOURCES=heavy.md expect "a kernel with too many registers: refused" refused train "$gpu" gpt2 heavy
    says "by name" "adamw_kernel.*too many resources requested for launch"
    grep -v '^| adamw_kernel' "$EMU_RESOURCES" >lacks.md
    EMU_RESOURCES=lacks.md expect "a kernel that the table lacks: refused" refused train "$gpu" gpt2 lacks
    says "it says which, and what to do" "lacks adamw_kernel<.*>; HINT: make test-sass WRITE=1"
fi
# On several ranks, with 12 rows of a norm's codes each: only transposed codes need multiples of 16.
if [[ $gpu == *emu* ]]; then
    allow_mpirun_everywhere
    # shellcheck disable=SC2086
    experts() { EMU_DEVICES=2 timeout -k 1 120 "${MPIRUN:-mpirun}" -n 2 "$gpu" train ${run[mixture]} "${small[@]}" --ep 2 --out "$@"; }
    for dispatcher in allgather alltoall; do
        expect "a mixture, its experts on 2 ranks, $dispatcher: trains" experts mixture-$dispatcher --moe-token-dispatcher-type $dispatcher
        expect "a mixture, its experts on 2 ranks, $dispatcher: the CPU's losses" near mixture-cpu mixture-$dispatcher
    done
    ranks() { EMU_DEVICES=4 timeout -k 1 300 "${MPIRUN:-mpirun}" -n 4 "$program_of_ranks" train ${run[llama]} "${small[@]}" --num-query-groups 4 --seq-length 48 --micro-batch-size 1 --fp8 hybrid --tp 4 --out "$@"; }
    program_of_ranks=$gpu expect "FP8 on 4 ranks: trains" ranks fp8-gpu
    program_of_ranks=$program expect "FP8 on 4 ranks: trains on the CPU" ranks fp8-cpu
    expect "FP8 on 4 ranks: the CPU's losses" near fp8-cpu fp8-gpu
    program_of_ranks=$gpu expect "FP8 on 4 ranks: transfers before and after the products" ranks fp8-apart --no-overlap
    same_weights() { cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors"; }
    expect "FP8 on 4 ranks: the bits of transfers during the products" same_weights fp8-gpu fp8-apart
    # The second stage trains nothing: its part of a checkpoint has no bytes, and is written while the first stage
    # continues.
    tuned() { EMU_DEVICES=2 timeout -k 1 60 "${MPIRUN:-mpirun}" -n 2 "$gpu" train --model gpt2-gpu --data-path text --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 --eval-iters 0 --prompt-tokens 4 --pp 2 --save-every 2 --keep 0 --out tuned; }
    expect "prompt tuning over two stages saves on the way" tuned
    expect "three times" test "$(find tuned -maxdepth 1 -name 'step_*' | wc -l)" == 3
    # NCCL allocates at a communicator's first use, which precedes the memory plan. With 90 MiB, the libraries take 32 and NCCL
    # 48; the run needs 20.
    pair() { EMU_DEVICES=2 EMU_MEMORY_MB=$1 EMU_NCCL_MEMORY_MB=48 timeout -k 1 60 "${MPIRUN:-mpirun}" -n 2 "$gpu" train --hidden-size 256 --num-attention-heads 4 "${small[@]}" --eval-iters 0 --out "pair $1" "${@:2}"; }
    expect "NCCL's memory: planned on two ranks" pair 60000 --dry-run
    says "NCCL's memory: one communicator" "NCCL, already allocated  *48.0 MiB"
    expect "NCCL's memory: too little for both is refused" refused pair 90
    says "NCCL's memory: before training" "this run needs .* of GPU memory"
    # Events on its stream show a rank how long it has waited.
    slow() { EMU_DEVICES=2 TRAIN_GPT_FAULTS=slow=1-5:1 timeout -k 1 60 "${MPIRUN:-mpirun}" -n 2 "$gpu" train ${run[llama]} "${small[@]}" --eval-iters 0 --out "slow $1" $1; }
    # Measured times: on a busy machine a rank also waits for a core, so it may take three runs to see the difference.
    seen() {
        for _ in 1 2 3; do
            rm -rf "slow $1"
            slow "$1" || return
            slower 1 0 "slow $1" && return
        done
        return 1
    }
    for options in "--zero 1" "--tp 2" "--pp 2"; do
        expect "a slow rank's own work is longer, the other waits, $options" seen "$options"
    done
    EMU_DEVICES=2 expect "tune: the layouts of all GPUs here" "$gpu" tune --preset gpt2-124m --vocab-size 50257 --global-batch-size 64 --train-iters 10 --lr-warmup-iters 1 --device h100 --dry-run
    says "of one as well" "ranks  *tp"
fi
same() { cmp "$1/latest/training/master.safetensors" "$2/latest/training/master.safetensors"; }
EMU_CALLS=calls-of-4 expect "again" train "$gpu" llama-128 again
if [[ $gpu == *emu* ]]; then  # one-time setup is not repeated in a step
    EMU_CALLS=calls-of-3 expect "fewer steps" train "$gpu" llama-128 fewer --train-iters 3
    once() { grep -E '^(cuTensorMapEncodeTiled|cudaFuncSetAttribute|cudaMalloc|cudaMallocHost|cublasLtMatmulAlgoCheck) ' "$1"; }
    alike() { test "$(once calls-of-3 | wc -l)" == 5 && diff <(once calls-of-3) <(once calls-of-4); }
    expect "tensor maps, attributes, memory, algorithms: as often for 3 steps as for 4" alike
fi
expect "the same bits again" same llama-128-gpu again
expect "without recomputation" train "$gpu" bloom-64 kept --recompute none
expect "the same bits without recomputation" same bloom-64-gpu kept
expect "$gpu: a layer's MLP recomputed" train "$gpu" gpt2-64 mlp --recompute mlp --recompute-num-layers 1
expect "the same bits" same gpt2-64-gpu mlp
expect "saves on the way" train "$gpu" llama-128 whole --save-every 3 --keep 0
expect "resumes" train "$gpu" llama-128 resumed --resume whole/step_00000003
expect "the same bits after a resume" same whole resumed
expect "the file of algorithms" grep -q "cuBLASLt" cache/train_gpt/gemm.txt

# The optimizer's state in host memory: the same files, and each kind's checkpoints resume as the other.
same_files() { diff -r -x state.json -x manifest.json "$1/latest/" "$2/latest/"; }
health() { grep -o '"kind":"health".*' "$1/log.jsonl"; }
same_health() { diff <(health resident) <(health offloaded); }
small_buckets=(--ddp-bucket-size 8192 --save-every 2 --keep 0)
for options in "--exp-avg-dtype bf16 --ema-decay 0.9 --log-health-interval 1 --check-weight-hash-across-dp-replicas-interval 1" "--optimizer muon --ema-decay 0.9 --save-in-foreground" \
    "--skip-batches 1" "--on-spike rollback --spike-patience 1 --rollback-distance 0 --rollback-batches 1" ""; do
    rm -rf resident offloaded
    [[ $options != *rollback* ]] || export TRAIN_GPT_FAULTS=nan-gradient=3 # after the first checkpoint
    # shellcheck disable=SC2086
    { expect "state on the GPU $options" train "$gpu" llama resident "${small_buckets[@]}" $options && expect "--offload optimizer $options" train "$gpu" llama offloaded "${small_buckets[@]}" $options --offload optimizer; }
    expect "--offload optimizer $options: the same files" same_files resident offloaded
    expect "--offload optimizer $options: the same health" same_health
    [[ $options != *rollback* ]] || expect "it went back once" test "$(grep -c '"event":"rollback"' offloaded/log.jsonl)" == 1
    unset TRAIN_GPT_FAULTS
done
expect "an offloaded run's checkpoint resumes on the GPU" train "$gpu" llama from-host --resume offloaded/step_00000002 "${small_buckets[@]}"
expect "to the same files" same_files resident from-host
expect "a resident run's checkpoint resumes offloaded" train "$gpu" llama from-gpu --resume resident/step_00000002 "${small_buckets[@]}" --offload optimizer
expect "to the same files" same_files resident from-gpu
for options in "--model gpt2-gpu --lora-rank 4" "--model gpt2-gpu --prompt-tokens 4 --prompt-encoder mlp --seq-length 32"; do
    adapted() { "$gpu" train --data-path text --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --eval-iters 0 --quiet --out "$@"; }
    rm -rf resident offloaded
    # shellcheck disable=SC2086
    { expect "$options" adapted resident $options && expect "$options --offload optimizer" adapted offloaded $options --offload optimizer; }
    expect "$options --offload optimizer: the same files" same_files resident offloaded
done
# Gradients in host memory, too: products first set, then add to them. On the GPU the library rounds the first ones itself, and
# may choose another algorithm for that.
for options in "--log-health-interval 1 --detect-nondeterminism 2" "--optimizer muon --exp-avg-dtype bf16" "--lora-rank 4 --model gpt2-gpu"; do
    bf16=(--main-grads-dtype bf16)
    rm -rf resident offloaded
    case $options in *lora*) run_it=(adapted) ;; *) run_it=(train "$gpu" llama) ;; esac
    # shellcheck disable=SC2086
    { expect "bf16 gradients on the GPU $options" "${run_it[@]}" resident "${bf16[@]}" $options && expect "--offload gradients $options" "${run_it[@]}" offloaded "${bf16[@]}" $options --offload gradients; }
    expect "--offload gradients $options: close losses" near resident offloaded
done
expect "--offload gradients is in the plan" train "$gpu" llama x --dry-run --offload gradients --main-grads-dtype bf16
says "with gradients on the host" "gradients (bf16) (host)"
expect "--offload gradients in fp32: refused" refused train "$gpu" llama x --offload gradients
says "says what they must be" "requires --main-grads-dtype bf16; HINT: add that"
expect "--offload optimizer is in the plan" train "$gpu" llama x --dry-run --offload optimizer
says "with what lies on the host" "Adam moments (fp32) (host)"
says "and what passes through the GPU" "optimizer's state in transit"
expect "--offload optimizer with NorMuon: refused" refused train "$gpu" llama x --offload optimizer --optimizer normuon
says "says what there is" "HINT: --optimizer muon or adamw"
expect "--offload optimizer on the CPU: refused" refused train "$program" llama x --offload optimizer
says "says why" "on the CPU everything is in host memory"
if [[ $gpu == *emu* ]]; then
    halves() { EMU_DEVICES=2 timeout -k 1 300 "${MPIRUN:-mpirun}" -n 2 "$gpu" train ${run[llama]} "${small[@]}" "${small_buckets[@]}" --check-weight-hash-across-dp-replicas-interval 1 --out "$@"; }
    rm -rf resident offloaded
    expect "ZeRO-1 on 2 ranks" halves resident
    expect "ZeRO-1 on 2 ranks, --offload optimizer" halves offloaded --offload optimizer
    expect "ZeRO-1 on 2 ranks, --offload optimizer: the same files" same_files resident offloaded
    expect "--offload gradients on 2 ranks: refused" refused halves x --offload gradients --main-grads-dtype bf16
    says "says how many it is for" "for one GPU, and the run has 2"
    EMU_LOCKABLE_MB=0 expect "memory that cannot be page-locked: refused" refused train "$gpu" llama x --offload optimizer
    says "says what was refused" "could not page-lock 0.00 GiB"
fi

expect "generates" "$gpu" generate --model llama-128-gpu/latest --prompt "in the year" --max-new-tokens 8 --temperature 0
grep -v tokens/s out.txt >gpu.txt
expect "generates on the CPU" "$program" generate --model llama-128-gpu/latest --prompt "in the year" --max-new-tokens 8 --temperature 0
grep -v tokens/s out.txt >cpu.txt
expect "the same text" cmp gpu.txt cpu.txt

expect "--dry-run" train "$gpu" llama x --dry-run
says "it names the device" "GPU"
says "and what lies where" "copy for checkpoints (host)"

if [[ $gpu == *emu* ]]; then
    for capability in 80 120; do
        expect "compute capability $capability" env EMU_CAPABILITY=$capability "$gpu" train ${run[gpt2-64]} "${small[@]}" --out on-$capability
        expect "compute capability $capability: the CPU's losses" near gpt2-64-cpu on-$capability
    done
    none() { EMU_DEVICES=0 train "$gpu" llama x; }
    expect "no GPU: refused" refused none
    says "no GPU: says so" "error: no GPU: no CUDA-capable device"
    plan() { EMU_DEVICES=0 train "$gpu" llama x --dry-run "$@"; }
    expect "no GPU: a plan needs none" plan --fp8 hybrid
    says "no GPU: it is one for an H100" "backend  *emu, H100 of the plan (--device); there is no GPU here"
    says "no GPU: whose peak is the vendor's" "peak  *989 TFLOP/s, dense bf16 by the vendor"
    expect "no GPU: a plan for an A100 has no FP8" refused plan --device a100 --fp8 hybrid
    says "no GPU: says why" "FP8 matrix products need 8.9"
    old() { EMU_CAPABILITY=75 train "$gpu" llama x; }
    expect "an old GPU: refused" refused old
    says "an old GPU: says what is needed" "compute capability 7.5; 8.0 or later"
    little() { EMU_MEMORY_MB=33 train "$gpu" llama x; }
    expect "too little memory: refused" refused little
    says "too little memory: says how much for what" "GiB of GPU memory"
    says "too little memory: says what to do" "HINT: to reduce it, use a smaller --micro-batch-size"
fi
expect "a head size that no kernel takes: refused" refused "$gpu" train --hidden-size 1024 --num-attention-heads 2 "${small[@]}"
says "its limits" "head size 512 .*is not between 1 and 256"
expect "--matrix-unit on a GPU: refused" refused "$gpu" train "${small[@]}" --matrix-unit AVX2
says "says what there is" "for CPUs; HINT: on a GPU, use --gemm-cache"
expect "--gemm-cache on the CPU: refused" refused "$program" train --data-path text --train-iters 1 --gemm-cache x
