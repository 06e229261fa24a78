#!/usr/bin/env bash
# The trainer on several ranks under mpirun: every layout has one rank's losses, checkpoints resume on any other layout, and
# an error ends every rank at once with its reason. (test/parity_check.cu compares gradients of every layout.)
#   TRAIN_GPT=build/cpu-bf16/train_gpt test/parallel_test.sh
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
if ! command -v "$MPIRUN" >/dev/null; then
    echo "FAILED: MPI is not installed ($MPIRUN)"
    exit 1
fi
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 # MPI does not free all its memory

kings 300 5 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 380 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
small=(--hidden-size 64 --num-layers 4 --num-attention-heads 4 --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --tokenizer tok --data-path text --split "90, 10, 0" --seq-length 40 --micro-batch-size 2
    --global-batch-size 8 --lr 3e-3 --lr-warmup-iters 2 --eval-interval 8 --eval-iters 1 --z-loss 1e-4 --quiet --seed 5 --threads 1
    --save-every 3 --keep 0 --distributed-timeout 20s)
length=(--train-iters 8)
train() { # RANKS OUT OPTIONS...
    local n=$1 out=$2 launch=()
    shift 2
    [[ $n == 1 ]] || launch=(timeout -k 1 120 "$MPIRUN" -n "$n")
    "${launch[@]}" "$program" train "${small[@]}" "${length[@]}" --out "$out" "$@"
}
# Losses of bf16 runs, where sums over ranks are rounded in other places.
near() { near_losses "$1" "$2" "$3" 0.01; }
same() { cmp "$1/latest/training/$3.safetensors" "$2/latest/training/$3.safetensors"; }
everything_same() { same "$1" "$2" exp_avg && same "$1" "$2" exp_avg_sq && cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors"; }

# layouts NAME ONE STEM OPTION... -- LAYOUT...: trains with the options on each layout, "RANKS OPTIONS", into "STEM LAYOUT". Its
# losses must equal the run ONE's, in the last 5 steps if it resumes from step 3.
layouts() {
    local what=$1 one=$2 stem=$3 layout n options shared=()
    shift 3
    while [[ $1 != -- ]]; do shared+=("$1") && shift; done
    shift
    for layout in "$@"; do
        read -r n options <<<"$layout"
        # shellcheck disable=SC2086
        expect "$what, $layout" train "$n" "$stem $layout" $options "${shared[@]}"
        expect "$what, $layout: one rank's losses" near "$one" "$stem $layout" "$([[ "${shared[*]} $layout" == *resume* ]] && echo 5 || echo 8)"
    done
}

expect "one rank" train 1 one
layouts "a dense model" one run -- "2 --tp 2" "2 --zero 1" "2 --pp 2 --vpp 2" "4 --tp 2 --pp 2" "3 --pp 3 --pipeline-layers 1 2 1"
# One layer's MLP is recomputed, including gathers, next to layers with less recomputation: the same bits in the same
# layout.
for layout in "2 --tp 2" "2 --pp 2 --vpp 2" "4 --tp 2 --pp 2"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "$layout, an MLP recomputed" train "$n" again $options --recompute mlp --recompute-num-layers 1 --recompute-other-layers selective
    expect "$layout, an MLP recomputed: the same bits" everything_same "run $layout" again
    rm -rf again
done
# Many options of the block: norms on both sides and of heads, a window, sinks, and dropout, whose masks are the same in
# every layout.
many=(--norm-place both --qk-layernorm --kv-channels 32 --window-size 9 --window-attn-skip-freq 2 --final-logit-softcapping 8 --softmax-type learnable --hidden-dropout 0.1
    --attention-dropout 0.1)
expect "many options on one rank" train 1 many "${many[@]}"
layouts "many options" many many "${many[@]}" --check-replicas 4 -- "2 --zero 1" "2 --cp 2" "4 --tp 2 --pp 2" "4 --tp 4 --no-sequence-parallel"
# Attention and MLP side by side after one norm, whose gradient has the terms of both.
shared=(--norm-place shared --normalization LayerNorm)
expect "one norm for both branches on one rank" train 1 shared "${shared[@]}"
layouts "one norm for both branches" shared shared "${shared[@]}" --check-replicas 4 -- "2 --tp 2" "2 --tp 2 --no-sequence-parallel --recompute full"
# A sample's rows cut over ranks: every kind of mask and position, dropout, validation; checkpoints resume in every layout.
# ZeRO-2: no rank keeps whole gradients. With one micro-batch in a step its sums have ZeRO-1's bits, without clipping, as the
# norm's order of summation depends on the sharding.
layouts "ZeRO-2" one sharded --zero 2 --check-replicas 4 -- "2" "4 --tp 2 --resume one/step_00000003" "4 --pp 2 --vpp 2 --main-grads-dtype bf16" "2 --cp 2"
layouts "ZeRO-2, many options" many "many sharded" --zero 2 "${many[@]}" -- "4 --tp 2" "2 --recompute full --ema-decay 0.9"
for stage in 1 2; do expect "ZeRO-$stage, biases" train 2 "biases $stage" --zero $stage --no-disable-bias-linear; done
expect "ZeRO-2 adds the gradients of biases over micro-batches" near_losses "biases 1" "biases 2" 8 0.001
rm -rf biases\ *
# ZeRO-3: nor whole parameters. It has ZeRO-2's bits, whatever is gathered when.
layouts "ZeRO-3" one gathered --zero 3 --check-replicas 4 -- "2" "4 --tp 2 --resume one/step_00000003 --sample-interval 4" "4 --pp 2 --vpp 2 --main-grads-dtype bf16" "2 --cp 2"
for options in "--recompute full --ema-decay 0.9" "--tp 2" "--no-overlap --optimizer muon --no-untie-embeddings-and-output-weights" \
    "--pp 2 --optimizer lion --no-untie-embeddings-and-output-weights --no-disable-bias-linear"; do
    ranks=$([[ $options == *-?p\ * ]] && echo 4 || echo 2)
    # shellcheck disable=SC2086
    for stage in 2 3; do expect "ZeRO-$stage, $options" train "$ranks" "stage $stage" --zero $stage "${many[@]}" $options; done
    expect "the same losses" near_losses "stage 2" "stage 3" 8 0
    expect "the same checkpoints" diff -rq --exclude=state.json --exclude=events "stage 2/latest/training" "stage 3/latest/training"
    rm -rf stage\ *
done
expect "one rank resumes ZeRO-3" train 1 "gathered one" --resume "gathered 2/step_00000003"
expect "with one rank's losses" near one "gathered one" 5
for options in "--lora-rank 4 --model one/latest" "--fp8-format hybrid" "--detect-nondeterminism 2"; do
    # shellcheck disable=SC2086
    expect "ZeRO-3 and $options: refused" refused train 2 x --zero 3 $options
    says "by name" "${options%% *}.*--zero 3"
done
single=(--micro-batch-size 4 --clip-grad 0 --ddp-bucket-size 4096)
for tied in --untie-embeddings-and-output-weights --no-untie-embeddings-and-output-weights; do
    for stage in 1 2 3; do expect "ZeRO-$stage, one micro-batch" train 2 "single $stage" --zero $stage "${single[@]}" $tied; done
    for stage in 2 3; do expect "ZeRO-$stage has ZeRO-1's bits" everything_same "single 1" "single $stage"; done
    expect "ZeRO-3 resumes ZeRO-1" train 2 "single again" --zero 3 "${single[@]}" $tied --resume "single 1/step_00000003"
    expect "with every bit" everything_same "single 1" "single again"
    rm -rf "single again"
    expect "ZeRO-2 resumes ZeRO-1, without overlap, with threads" train 2 "single again" --zero 2 "${single[@]}" $tied --no-overlap --threads 2 --resume "single 1/step_00000003"
    expect "with every bit" everything_same "single 1" "single again"
    rm -rf single\ *
done
expect "ZeRO-2 and gradients computed twice: refused" refused train 2 x --zero 2 --detect-nondeterminism 2
says "by name" "--detect-nondeterminism.*--zero 2"
layouts "context parallel" one context --check-replicas 4 -- "2 --cp 2 --context-parallel-method alltoall" "4 --cp 4 --zero 0 --recompute full" "4 --cp 2 --tp 2 --resume one/step_00000003" "4 --cp 2 --pp 2 --vpp 2 --sample-interval 4"
expect "one rank resumes what cp 4 wrote" train 1 "context one" --resume "context 4 --cp 4 --zero 0 --recompute full/step_00000003"
expect "and goes on with one rank's losses" near one "context one" 5
expect "inspect names the layout" "$program" inspect "context 4 --cp 2 --pp 2 --vpp 2 --sample-interval 4"
says "it" "cp 2, pp 2, vpp 2"
cut=(--position-embedding-type alibi --reset-attention-mask --reset-position-ids --eod-mask-loss --micro-batch-size 1 --optimizer muon --ema-decay 0.9)
expect "documents and ALiBi on one rank" train 1 cut "${cut[@]}"
layouts "documents and ALiBi" cut cut "${cut[@]}" -- "2 --cp 2 --context-parallel-method alltoall" "4 --cp 2 --zero 1 --main-grads-dtype bf16"
expect "FP8 on one rank" train 1 "context fp8" --seq-length 32 --fp8-format hybrid
expect "FP8, cp 2" train 2 "context fp8 2" --seq-length 32 --fp8-format hybrid --cp 2
expect "FP8, cp 2: one rank's losses" near_losses "context fp8" "context fp8 2" 8 0.02
expect "FP8 with rows that are not a multiple of 16: refused" refused train 2 x --fp8-format hybrid --cp 2 --micro-batch-size 1
says "which" "a rank's rows (--micro-batch-size x --seq-length / --context-parallel-size)"
expect "adapters on one rank" train 1 "context adapted" --model one --lora-rank 2 --lora-dropout 0.2
layouts "adapters" "context adapted" adapted --model one --lora-rank 2 --lora-dropout 0.2 --check-replicas 4 -- "2 --cp 2" "4 --cp 2 --tp 2"
# A sequence of 32,768 tokens, an eighth of it in each of two chunks of a rank.
for i in $(seq 1 12); do sed "s/year/year $i/" text.txt; done >long.txt
expect "prepare a long text" "$program" prepare --input long.txt --output long --tokenizer tok
long=(--data-path long --split "100, 0, 0" --eval-iters 0 --seq-length 32768 --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --num-layers 1 --num-attention-heads 1
    --num-query-groups 1 --hidden-size 32 --save-every 2 --lr-warmup-iters 0)
expect "32,768 tokens on one rank" train 1 long1 "${long[@]}" --threads 2
expect "32,768 tokens on four ranks" train 4 long4 "${long[@]}" --cp 4
expect "32,768 tokens: one rank's losses" near long1 long4 2
# memory_grows NAME RANKS BEFORE AFTER OPTIONS...: from the options BEFORE to AFTER rank 0's peak memory grows as planned, within
# 10%.
memory_grows() {
    local name=$1 n=$2 before=$3 after=$4 which run memory=()
    shift 4
    for which in "$before" "$after"; do
        # shellcheck disable=SC2206
        run=("${long[@]}" --num-attention-heads 4 --num-query-groups 2 "$@" $which)
        memory+=("$(train "$n" memory "${run[@]}" --dry-run 2>&1 | sed -n 's/^ *total  *\(.*\) MiB$/\1/p')")
        memory+=("$(train "$n" memory "${run[@]}" 2>&1 | sed -n 's/^peak memory \(.*\) MiB$/\1/p')")
        rm -rf memory
    done
    expect "$name: peak memory grows as planned (planned, peak: ${memory[*]} MiB)" awk -v memory="${memory[*]}" \
        'BEGIN { n = split(memory, m); ratio = (m[4] - m[2]) / (m[3] - m[1]); exit !(n == 4 && ratio > 0.9 && ratio < 1.1) }'
}
if [[ -z ${SAN:-} ]]; then
    window=(--hidden-size 256 --window-size 512)
    memory_grows "8,192 tokens on two ranks" 2 "--seq-length 1024" "--seq-length 8192" "${window[@]}" --cp 2
    memory_grows "the same, by heads" 2 "--seq-length 1024" "--seq-length 8192" "${window[@]}" --cp 2 --context-parallel-method alltoall
    [[ -z ${ALL:-} ]] || memory_grows "32,768 tokens on four ranks" 4 "--seq-length 1024" "--seq-length 32768" "${window[@]}" --cp 4
fi
refuses_context() { # NAME PATTERN OPTIONS...
    local name=$1 pattern=$2
    shift 2
    expect "cp with $name: refused" refused train 2 x --cp 2 "$@"
    says "why" "$pattern"
}
refuses_context "a sequence that it does not divide" "--context-parallel-size 2 cannot split the 42 rows of a sequence into 4 equal parts" --seq-length 42
refuses_context "more ranks than key/value heads" "alltoall requires a --context-parallel-size that divides the 1 key/value head; it is 2" --context-parallel-method alltoall --num-query-groups 1
refuses_context "virtual tokens" "--context-parallel-size 2 is not available for virtual tokens" --model one --prompt-tokens 4 --seq-length 36
refuses_context "capacities of experts" "--context-parallel-size 2 and --moe-expert-capacity-factor cannot be combined" --num-experts 4 --moe-expert-capacity-factor 1
# Questions of different lengths, measured while training: rows of a score are on any rank.
for i in $(seq 1 13); do
    year="in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97))"
    echo "{\"context\": \"${year:0:$((12 + 4 * i))}\", \"target\": \"${year:$((12 + 4 * i))} sheep\"}"
done >target.jsonl
for i in 1 2 3; do echo "{\"context\": \"in the year $i\", \"references\": [\" the\"], \"max_new_tokens\": 4}"; done >written.jsonl
asks=(--eval-tasks target.jsonl written.jsonl --train-iters 4)
measured() { grep '"kind":"tasks"' "$1/log.jsonl" | tail -n 1 | grep -o '"perplexity":[0-9.]*' | head -n 1; }
expect "tasks on one rank" train 1 "asked 1" "${asks[@]}"
for layout in "2 --cp 2" "4 --cp 2 --tp 2" "4 --cp 2 --pp 2" "4 --cp 4" "4 --cp 2"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "tasks, $layout" train "$n" "asked $n" "${asks[@]}" $options
    expect "tasks, $layout: one rank's perplexity" awk -v a="$(measured "asked 1")" -v b="$(measured "asked $n")" \
        'BEGIN { sub(/.*:/, "", a); sub(/.*:/, "", b); b += 0; exit !(a + 0 > 1 && b > a * 0.99 && b < a * 1.01) }'
    rm -rf "asked $n"
done
expect "too few ranks for cp: refused" refused train 2 x --cp 3
says "why" "context-parallel-size 3"
# A mixture of experts: every tp rank has some columns of each expert, and a part of the router's gradient.
mixture=(--num-experts 6 --moe-router-topk 2 --ffn-hidden-size 96 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3)
expect "a mixture on one rank" train 1 mixture "${mixture[@]}"
# With expert parallelism a rank has some of the experts, for the rows of several ranks.
layouts "a mixture, ZeRO-2" mixture "mixture sharded" "${mixture[@]}" --zero 2 -- "2 --ep 2" "4 --ep 2 --recompute mlp"
layouts "a mixture, ZeRO-3" mixture "mixture gathered" "${mixture[@]}" --zero 3 -- "2" "4 --ep 2 --recompute full"
layouts "a mixture" mixture mixture "${mixture[@]}" --check-replicas 4 -- "2 --zero 1 --resume mixture/step_00000003" "2 --cp 2" "4 --cp 4 --ep 2 --recompute full" "4 --tp 2 --pp 2" \
    "4 --tp 4 --no-sequence-parallel --recompute full" "2 --ep 2 --resume mixture/step_00000003" "4 --ep 2 --tp 2 --sample-interval 4" "4 --ep 2 --zero 0 --recompute mlp"
expect "a mixture on three ranks" train 3 "mixture 3" "${mixture[@]}" --check-replicas 4 --ep 3 --global-batch-size 12 --eval-iters 0
# Rows sent only to the ranks of their experts: on CPUs the bits of the all-gather.
for layout in "2 --ep 2" "3 --ep 3 --global-batch-size 12 --eval-iters 0" "4 --ep 2 --tp 2 --recompute selective" "4 --ep 2 --pp 2 --recompute full" "4 --ep 4 --num-experts 4 --zero 0 --recompute mlp"; do
    read -r n options <<<"$layout"
    for dispatcher in allgather alltoall; do
        # shellcheck disable=SC2086
        expect "$layout, $dispatcher" train "$n" $dispatcher "${mixture[@]}" $options --moe-token-dispatcher-type $dispatcher --train-iters 3 --check-replicas 1
    done
    expect "$layout: both dispatchers give the same bits" everything_same allgather alltoall
    rm -rf allgather alltoall
done
layouts "resumed from ep 2, tp 2" mixture "mixture from ep to" "${mixture[@]}" --resume "mixture 4 --ep 2 --tp 2 --sample-interval 4/step_00000003" -- "1" "4 --ep 2 --pp 2"
# A balance loss per micro-batch: with one sequence it is the sequence's, and the same in every layout.
for type in seq_aux_loss aux_loss; do
    expect "$type, one sequence in a micro-batch" train 1 "one $type" "${mixture[@]}" --moe-router-load-balancing-type $type --micro-batch-size 1 --train-iters 3
done
expect "one sequence in a micro-batch: the same bits" everything_same "one seq_aux_loss" "one aux_loss"
of_batches=("${mixture[@]}" --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1)
expect "a balance loss of micro-batches" train 1 batches "${of_batches[@]}"
first_balance() { grep -o '"moe_aux_loss":[0-9.]*' "$1/log.jsonl" | head -n 1; }
expect "it is not that of sequences" test "$(first_balance batches)" != "$(first_balance mixture)"
expect "it is smaller: differences between two sequences cancel" awk -v a="$(first_balance batches | cut -d: -f2)" -v b="$(first_balance mixture | cut -d: -f2)" 'BEGIN { exit !(a > 1 && a < b) }'
expect "a balance loss of micro-batches, on 4 ranks" train 4 "batches 4" "${of_batches[@]}" --ep 2 --tp 2 --moe-token-dispatcher-type alltoall
expect "a balance loss of micro-batches, on 4 ranks: one rank's losses" near batches "batches 4" 8
expect "resumed with other micro-batches: refused" refused train 1 x "${of_batches[@]}" --resume batches/step_00000003 --micro-batch-size 1
says "the balance loss depends on them" "micro-batch-size is 1"
expect "experts that ep does not divide: refused" refused train 2 x --ep 2 --num-experts 5
says "which" "expert-model-parallel-size 2 does not divide the model's 5 experts"
expect "ranks that ep does not divide: refused" refused train 2 x --ep 4 --num-experts 4
says "which" "expert-model-parallel-size 4 does not divide the 2 data-parallel ranks"
expect "experts over more ranks than rows: refused" refused train 4 x --ep 4 --cp 2 --num-experts 4
says "why" "--context-parallel-size 2 and --expert-model-parallel-size 4, which does not divide it"
expect "adapters on attention, with ep" train 2 adapted --ep 2 --model mixture --lora-rank 2 --lora-targets q_proj o_proj --train-iters 3 --check-replicas 1
on_experts=(--model mixture --lora-rank 2 --lr 1e-2)
expect "adapters on experts, on one rank" train 1 on-experts "${on_experts[@]}"
for layout in "4 --ep 2 --tp 2 --moe-token-dispatcher-type allgather" "4 --ep 2 --pp 2 --moe-token-dispatcher-type alltoall" "3 --ep 3 --global-batch-size 12 --eval-iters 0" "2 --ep 2 --zero 0 --resume on-experts/step_00000003"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "adapters on experts, $layout" train "$n" "on-experts $layout" "${on_experts[@]}" $options --check-replicas 4
    [[ $layout == *global* ]] && continue
    expect "adapters on experts, $layout: one rank's losses" near on-experts "on-experts $layout" "$([[ $layout == *resume* ]] && echo 5 || echo 8)"
done
expect "one rank resumes what ep 2, tp 2 wrote" train 1 "on-experts again" "${on_experts[@]}" --resume "on-experts 4 --ep 2 --tp 2 --moe-token-dispatcher-type allgather/step_00000003"
expect "and goes on with one rank's losses" near on-experts "on-experts again" 5
expect "dropout of adapters on experts, with ep: refused" refused train 2 x --ep 2 --model mixture --lora-rank 2 --lora-dropout 0.1
says "why" "lora-dropout cannot be combined for adapters on experts, such as"
# The same with a shared expert, after a dense layer of another width: stages of a pipeline have different layers.
mixture+=(--moe-layer-freq "[0]*1+[1]*3" --moe-ffn-hidden-size 48 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate)
expect "a mixture after a dense layer on one rank" train 1 unequal "${mixture[@]}"
layouts "a mixture after a dense layer" unequal unequal "${mixture[@]}" -- "2 --zero 1 --resume unequal/step_00000003" "4 --ep 2 --pp 2" "3 --pp 3 --recompute mlp"
# GPT-OSS: each tp rank has some of the bias of fc1, one adds the bias of fc2 times the routing weights, and files stack experts, gate
# and up in turn, which ranks of ZeRO write in parts.
oss=(--num-experts 5 --moe-router-topk 3 --ffn-hidden-size 96 --no-swiglu --activation clamped-swiglu --add-qkv-bias --add-proj-bias --add-mlp-bias
    --softmax-type learnable --window-size 9 --window-attn-skip-freq 2 --moe-z-loss-coeff 1e-3)
expect "GPT-OSS on one rank" train 1 oss "${oss[@]}"
expect "it is one" grep -q '"gpt_oss"' oss/latest/config.json
layouts "GPT-OSS" oss oss "${oss[@]}" --check-replicas 4 -- "2 --zero 1" "2 --tp 2 --no-sequence-parallel --main-grads-dtype bf16 --recompute mlp"
layouts "GPT-OSS resumed" oss "oss resumed" "${oss[@]}" --check-replicas 4 --resume "oss 2 --zero 1/step_00000003" -- "2 --tp 2"
# Biases balance its experts: they follow from the rows of all ranks and micro-batches, and are saved with the model.
biased=(--num-experts 6 --moe-router-topk 2 --ffn-hidden-size 96 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01
    --moe-router-num-groups 3 --moe-router-group-topk 2 --clip-grad 0 --ema-decay 0.9)
expect "a mixture balanced by biases on one rank" train 1 biased "${biased[@]}"
layouts "balanced by biases" biased biased "${biased[@]}" --check-replicas 4 -- "2 --zero 0 --resume biased/step_00000003" "2 --pp 2 --vpp 2" "4 --tp 2 --pp 2"
expect "balanced by biases, a pipeline: one rank's bits" everything_same biased "biased 2 --pp 2 --vpp 2"
expect "resumed on one rank" train 1 "biased again" "${biased[@]}" --resume "biased/step_00000003" --threads 2
expect "balanced by biases, resumed: the same bits" everything_same biased "biased again"
capacity=(--num-experts 6 --moe-router-topk 2 --ffn-hidden-size 96 --moe-expert-capacity-factor 0.75)
expect "a capacity on one rank" train 1 capacity "${capacity[@]}"
expect "some choices are dropped" grep -q '"moe_dropped":[1-9]' capacity/log.jsonl
expect "a capacity, cut over ranks" train 4 "capacity 4" "${capacity[@]}" --tp 2 --zero 1 --recompute full
expect "a capacity: one rank's losses" near capacity "capacity 4" 8
for dispatcher in allgather alltoall; do
    expect "a capacity, experts on 2 ranks, $dispatcher" train 4 "capacity $dispatcher" "${capacity[@]}" --ep 2 --moe-token-dispatcher-type $dispatcher
    expect "a capacity, experts on 2 ranks, $dispatcher: one rank's losses" near capacity "capacity $dispatcher" 8
done
expect "a capacity: both dispatchers give the same bits" everything_same "capacity allgather" "capacity alltoall"
dropped() { grep -o '"moe_dropped":[0-9.]*' "$1/log.jsonl" | head -n 2; }
expect "a capacity: ranks of experts drop the same choices at first" test "$(dropped capacity)" == "$(dropped "capacity alltoall")"
expect "resumed with other micro-batches: refused" refused train 1 x "${capacity[@]}" --resume capacity/step_00000003 --micro-batch-size 1
says "a capacity depends on them" "micro-batch-size is 1"
expect "the report has a heat map of experts" grep -q 'class="card experts"' capacity/report.html
expect "the average has the model's biases" grep -q e_score_correction_bias biased/latest/ema/model.safetensors
# A mixture whose experts are copies of a dense model's MLP gives its losses, in every layout.
loss_of() { "$program" eval --model "$1" --data-path text --seq-length 40 | grep -o "loss *[0-9.]*" | grep -o "[0-9.]*$"; }
close_losses() { awk -v a="$(loss_of "$1")" -v b="$(loss_of "$2")" 'BEGIN { exit !(a > 1 && (a - b) ^ 2 < 0.002 ^ 2) }'; }
expect "a mixture from a dense model" train 4 upcycled --ep 2 --pp 2 --model one --num-experts 4 --moe-use-upcycling --train-iters 1 --lr 1e-9 --lr-warmup-iters 0
expect "its loss is the dense model's" close_losses one upcycled
idle() { sed -n 's/.*"moe_idle_experts": *\([0-9.]*\).*/\1/p' "$1/log.jsonl" | tail -n 1; }
expect "its routers are new: every expert has rows" test "$(idle upcycled)" == 0
expect "weights that do not sum to 1" train 1 unequal-start --model one --num-experts 4 --moe-use-upcycling --moe-router-pre-softmax --train-iters 1 --lr 1e-9 --lr-warmup-iters 0
says "it says that this is not the dense model's start" "note: the weights of a token's experts do not sum to 1"
# Drop-Upcycling redraws the same numbers in every layout.
for layout in "1 --threads 2" "4 --tp 2 --pp 2" "2 --zero 1"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "partly new experts, $layout" train "$n" "drop $layout" $options --model one --num-experts 4 --moe-use-upcycling --moe-upcycling-drop-ratio 0.5 --train-iters 1 --lr 1e-9 --lr-warmup-iters 0
    expect "partly new experts, $layout: one rank's loss" close_losses "drop 1 --threads 2" "drop $layout"
done
expect "which is not the dense model's" refused close_losses one "drop 1 --threads 2"
expect "without the option: refused" refused train 1 x --model one --num-experts 4
says "and what to add" "--moe-use-upcycling"
expect "from a mixture: refused" refused train 1 x --model mixture --num-experts 6 --moe-use-upcycling
says "why" "it is a mixture of experts already"
expect "a norm of all heads" train 1 whole --qk-layernorm-whole
expect "cut over two ranks" train 2 "whole 2" --tp 2 --qk-layernorm-whole
expect "one rank's losses" near whole "whole 2" 8
# Virtual tokens are only on the first pipeline stage, and replicated on each of its ranks.
tuned=(--model roomy --prompt-tokens 8 --prompt-encoder mlp)
expect "a model with room for virtual tokens" train 1 roomy --max-position-embeddings 48
expect "virtual tokens on one rank" train 1 virtual "${tuned[@]}"
layouts "virtual tokens" virtual virtual "${tuned[@]}" -- "2 --pp 2 --vpp 2" "4 --tp 2 --zero 1 --check-replicas 4 --sample-interval 4" "2 --tp 2 --no-sequence-parallel --resume virtual/step_00000003"
expect "an odd number of them, split by rows, writes no samples: refused" refused train 2 x --tp 2 --sample-interval 4 --model roomy --prompt-tokens 7 --seq-length 39
says "why" "--sample-interval"
# Conversations, each preceded by its own virtual tokens; without clipping, so that pipeline stages give one rank's bits.
for i in $(seq 1 60); do echo "{\"messages\": [{\"role\": \"user\", \"content\": \"city $((i % 17))\"}, {\"role\": \"assistant\", \"content\": \"$((i * 11 % 97)) sheep\"}]}"; done >chat.jsonl
expect "conversations" "$program" prepare --input chat.jsonl --output chat --tokenizer tok --chat --chat-template plain
chat=("${tuned[@]}" --data-path chat --clip-grad 0)
expect "conversations on one rank" train 1 chat "${chat[@]}"
layouts "conversations" chat chat "${chat[@]}" -- "4 --tp 2 --zero 2" "2 --pp 2 --vpp 2" "4 --tp 2 --zero 1" "2 --zero 0 --recompute full"
expect "conversations, a pipeline: one rank's bits" cmp chat/latest/adapter_model.safetensors "chat 2 --pp 2 --vpp 2/latest/adapter_model.safetensors"
# Gradients and moments in bf16 are rounded by each element's position in the whole model, on whichever rank. Without
# clipping, as the norm's order of summation depends on the sharding.
moments=(--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --clip-grad 0)
expect "bf16 gradients and moments on one rank" train 1 moments "${moments[@]}"
layouts "bf16 gradients and moments" moments moments "${moments[@]}" --check-replicas 4 -- "2 --zero 1 --ddp-bucket-size 4096" "2 --zero 0" "4 --tp 4" "4 --tp 2 --pp 2"
expect "the table says who holds the optimizer's state" grep -q "optimizer state sharded (ZeRO-1)" "moments 2 --zero 1 --ddp-bucket-size 4096/log.jsonl"
expect "bf16 gradients and moments cut by ZeRO-1 or whole: the same bits" everything_same "moments 2 --zero 1 --ddp-bucket-size 4096" "moments 2 --zero 0"
# The scales of 8-bit moments do not depend on the sharding.
eight=(--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8 --clip-grad 0)
layouts "8-bit moments" "eight 1" eight "${eight[@]}" --check-replicas 4 -- "1" "2 --zero 1 --ddp-bucket-size 4096" "2 --zero 0" "2 --tp 2"
expect "8-bit moments cut by ZeRO-1 or whole: the same bits" everything_same "eight 2 --zero 1 --ddp-bucket-size 4096" "eight 2 --zero 0"
expect "8-bit moments resume on another layout" train 2 "eight again" --zero 1 --ddp-bucket-size 4096 "${eight[@]}" --resume "eight 2 --zero 0/step_00000003"
expect "with every bit" everything_same "eight 2 --zero 0" "eight again"
expect "8-bit moments become bf16" train 1 "eight wider" --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --clip-grad 0 --resume "eight 1/step_00000003"
expect "fp32 moments become 8-bit ones: refused" refused train 1 x "${eight[@]}" --clip-grad 1 --resume one/step_00000003
says "says how it can be had" "exp-avg-dtype is \"fp8\"; the checkpoint was written with \"fp32\".*--override exp-avg-dtype"
# Muon's matrices are whole: on one rank of each data-parallel group with ZeRO-1, or gathered from tensor-parallel ranks,
# two of which have the same key/value heads here.
muon=(--exp-avg-dtype bf16 --clip-grad 0 --check-replicas 4)
for layout in "1 --optimizer normuon" "2 --optimizer normuon --zero 1" "2 --optimizer normuon --zero 0" "1 --optimizer muon" "4 --optimizer muon --tp 4"; do
    read -r n _ optimizer options <<<"$layout"
    # shellcheck disable=SC2086
    expect "$optimizer on $n $options" train "$n" "$optimizer $n $options" --optimizer "$optimizer" $options "${muon[@]}"
    expect "$optimizer on $n $options: one rank's losses" near "$optimizer 1 " "$optimizer $n $options" 8
done
expect "NorMuon cut by ZeRO-1 or whole: the same bits" everything_same "normuon 2 --zero 1" "normuon 2 --zero 0"
muon+=(--optimizer muon --resume "muon 4 --tp 4/step_00000003")
expect "Muon resumes" train 4 "muon again" --tp 4 "${muon[@]}"
expect "with every bit" everything_same "muon 4 --tp 4" "muon again"
expect "and on another layout" train 2 "muon elsewhere" "${muon[@]}"
expect "with one rank's losses" near "muon 1 " "muon elsewhere" 5
# Lion has one moment: a checkpoint has no exp_avg_sq, and any layout resumes it.
all_of_lion_same() { same "$1" "$2" exp_avg && cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors"; }
lion=(--optimizer lion --lr 3e-4 --exp-avg-dtype bf16 --clip-grad 0 --check-replicas 4 --ema-decay 0.9)
layouts "Lion" "lion 1" lion "${lion[@]}" -- "1" "2 --zero 1 --ddp-bucket-size 4096" "2 --zero 0" "4 --tp 2 --pp 2"
expect "Lion cut by ZeRO-1 or whole: the same bits" all_of_lion_same "lion 2 --zero 1 --ddp-bucket-size 4096" "lion 2 --zero 0"
expect "it saves no exp_avg_sq" test ! -e "lion 1/latest/training/exp_avg_sq.safetensors" -a -e "lion 1/latest/training/exp_avg.safetensors"
expect "Lion resumes on another layout" train 2 "lion again" --zero 1 --ddp-bucket-size 4096 "${lion[@]}" --resume "lion 2 --zero 0/step_00000003"
expect "with every bit" all_of_lion_same "lion 2 --zero 0" "lion again"
expect "AdamW resumes Lion's" train 2 "lion then adamw" "${lion[@]}" --optimizer adamw --override optimizer --resume "lion 1/step_00000003"
expect "Lion resumes AdamW's" train 2 "adamw then lion" --optimizer lion --override optimizer --resume one/step_00000003
# The saved model is the trained one, in whichever order the optimizer stores it: saving in the foreground and in the
# background gives the same files, and eval gives the run's validation loss.
same_files() { diff -r -x state.json -x manifest.json "$1/latest/" "$2/latest/"; }
valid_loss() { sed -n 's/.*"kind":"valid","step":8,"loss":\([0-9.e+-]*\).*/\1/p' "$1/log.jsonl"; }
for optimizer in adamw muon normuon lion; do
    for n in 1 2; do
        name="$optimizer on $n"
        expect "$name, saved in the background" train "$n" "$name" --optimizer "$optimizer" --eval-fixed --seed 1234
        expect "$name, saved in the foreground" train "$n" "$name, foreground" --optimizer "$optimizer" --eval-fixed --seed 1234 --save-in-foreground
        expect "$name, saved in the foreground: the same files" same_files "$name" "$name, foreground"
        expect "$name: eval" "$program" eval --model "$name, foreground/latest" --data-path text --split "90, 10, 0" --seq-length 40 --max-samples 8
        says "$name: eval gives the validation loss" "loss *$(printf '%.4f' "$(valid_loss "$name, foreground")") nats"
    done
done
expect "adam, Megatron's name of adamw, resumes it" train 1 "one again" --optimizer adam --resume one/step_00000003
expect "with every bit" everything_same one "one again"
expect "another optimizer than the checkpoint's: refused" refused train 1 x "${muon[@]}" --optimizer adamw
says "says which" "optimizer is \"adamw\"; the checkpoint was written with \"muon\""
expect "NorMuon with exp_avg_sq in bf16: refused" refused train 1 x --optimizer normuon --exp-avg-sq-dtype bf16
says "says why" "normuon and --exp-avg-sq-dtype bf16 cannot be combined: it has only one exp_avg_sq per row"
# Batch size ramp-up: 5 steps of 8, 3 of 16, 2 of 24, 2 of 32. In an interleaved pipeline the first stages have more
# micro-batches in flight than the last.
ramp() { local length=(--global-batch-size 32 --train-samples 200 --rampup-batch-size 8 "${increment:-8}" 120); train "$@"; }
expect "ramp-up on one rank" ramp 1 "ramp"
for layout in "4 --pp 2 --vpp 2" "4 --pp 4"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "ramp-up on $layout" ramp "$n" "ramp $layout" $options
    expect "ramp-up on $layout: one rank's losses" near ramp "ramp $layout" 12
done
increment=4 expect "a size of the ramp-up that vpp cannot take: refused" refused ramp 4 x --pp 2 --vpp 2
says "which it is" "reaches a global batch of 12, for which 3 micro-batches"
# The moving average of the weights: of shards, of whole matrices (Muon), and after a resume on another layout.
ema_losses() { sed -n 's/.*"kind":"valid","step":\([0-9]*\).*"ema_loss":\([0-9.]*\).*/\1 \2/p' "$1/log.jsonl"; }
ema_near() { paste <(ema_losses "$1") <(ema_losses "$2") | awk '{ d = $2 - $4; if (!(d <= 0.01 && d >= -0.01) || $1 != $3) bad = 1 } END { exit bad || NR < 1 }'; }
average=(--ema-decay 0.9 --eval-fixed)
expect "EMA on one rank" train 1 ema "${average[@]}"
for layout in "2 --zero 1 --ddp-bucket-size 4096" "4 --tp 2 --pp 2"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "EMA, $layout" train "$n" "ema $layout" $options "${average[@]}" --check-replicas 4
    expect "EMA, $layout: one rank's losses" ema_near ema "ema $layout"
    expect "EMA, $layout: resumed by one rank" train 1 "ema from $layout" "${average[@]}" --resume "ema $layout/step_00000003"
    expect "EMA, $layout: resumed by one rank: its losses" ema_near ema "ema from $layout"
done
expect "EMA and Muon" train 2 "ema muon" "${average[@]}" --optimizer muon
expect "EMA and Muon: resumed to the same bits" train 2 "ema muon again" "${average[@]}" --optimizer muon --resume "ema muon/step_00000003"
same_ema() { cmp "$1/latest/ema/model.safetensors" "$2/latest/ema/model.safetensors"; }
expect "EMA and Muon: the same average" same_ema "ema muon" "ema muon again"
# Communication during computation or after it: the same bits.
expect "many buckets" train 2 overlapped --ddp-bucket-size 4096
expect "without overlap" train 2 waiting --ddp-bucket-size 4096 --no-overlap
expect "overlap changes no bit" everything_same overlapped waiting
# Tensor-parallel transfers overlapped with products, in bf16 and FP8, and without overlap. Gradients in both precisions.
for layout in "2 --tp 2" "4 --tp 4" "4 --tp 2 --pp 2 --fp8-format hybrid --main-grads-dtype bf16"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "transfers during products, $layout" train "$n" "during $layout" $options
    # shellcheck disable=SC2086
    expect "transfers before and after them, $layout" train "$n" "apart $layout" $options --no-overlap
    expect "the same bits, $layout" everything_same "during $layout" "apart $layout"
done
waits() { [[ $(grep -c '"waiting_ms":{.*"data":[0-9]' "$1/log.jsonl") == 8 ]]; }
expect "the log has the time of waiting" waits overlapped

# How the ranks spend their time, and which one the others wait for.
for options in "" "--tp 2" "--pp 2"; do
    # shellcheck disable=SC2086
    TRAIN_GPT_FAULTS=slow=1-16:1 expect "a slow rank $options" train 2 "slow $options" --train-iters $((${#options} ? 4 : 16)) $options
    expect "its own work is longer, the other waits $options" slower 1 0 "slow $options"
done
expect "it is named" grep -q '"event":"straggler","message":"rank 1 on .* is the slowest' "slow /log.jsonl"
expect "in the report as well" grep -q '<tr class="slowest"><th>1 on ' "slow /report.html"
expect "a single rank has no such record" refused grep -q '"kind":"ranks"' one/log.jsonl

# All ranks generate the sample together.
text() { grep -o '"kind":"sample".*"text":"[^"]*"' "$1/log.jsonl"; }
for layout in "1 --tp 1" "2 --pp 2 --vpp 2" "4 --tp 2 --pp 2"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "$layout: writes" train "$n" "writes $n" $options --sample-interval 8 --sample-tokens 16 --sample-prompt "in the year"
done
expect "a pipeline's text is one rank's" test "$(text 'writes 1')" == "$(text 'writes 2')" -a -n "$(text 'writes 1')"
expect "four ranks write text" test -n "$(text 'writes 4')"
# Generation and evaluation of one model on many ranks.
on() { # RANKS COMMAND OPTIONS...: its standard output
    local n=$1
    shift
    timeout -k 1 120 "$MPIRUN" -n "$n" "$program" "$@" --threads 1 2>err.txt
}
# After this prompt the model is sure of its tokens, so that roundings of other sums choose no others.
generate() { local n=$1; shift; on "$n" generate --model one/latest --prompt "the king of" --max-new-tokens 24 --temperature 0 "$@"; }
for i in $(seq 1 40); do
    echo "{\"context\": \"in the year $((i * 37 % 1000)) the king\", \"choices\": [\" of city $((i % 17))\", \" birds\", \" gave\"], \"gold\": 0}"
done >choice.jsonl
for i in $(seq 1 40); do echo "{\"context\": \"in the year $i the king of\", \"target\": \" city\"}"; done >word.jsonl
# The table's numbers: each is within TOLERANCE of one rank's.
table_near() { paste <(grep -oE '^ *[a-z][a-z _]* +[0-9.]+' "$1" | grep -v speed) <(grep -oE '^ *[a-z][a-z _]* +[0-9.]+' "$2" | grep -v speed) |
    awk -v tolerance="$3" '{ d = $(NF / 2) - $NF; if (d < 0) d = -d; if (!(d <= tolerance * ($NF + 1)) || $1 != $(NF / 2 + 1)) { print; bad = 1 } } END { exit bad || NR < 3 }'; }
generate 1 >text1.txt
on 1 eval --model one/latest --data-path text --seq-length 40 --max-samples 13 >loss1.txt
on 1 eval --model one/latest --tasks choice.jsonl word.jsonl >tasks1.txt
expect "one rank writes" grep -q "the king of ..." text1.txt
for layout in "2 --tp 2" "2 --pp 2" "4 --tp 2 --pp 2" "4 --tp 4"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    { generate "$n" $options >text.out; on "$n" eval --model one/latest --data-path text --seq-length 40 --max-samples 13 $options >loss.out; }
    expect "generate $layout: one rank's text" cmp text1.txt text.out
    expect "eval $layout: one rank's loss" table_near loss1.txt loss.out 0.01
done
for layout in "3" "2 --tp 2" "4 --tp 2 --pp 2" "4 --pp 2"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    on "$n" eval --model one/latest --tasks choice.jsonl word.jsonl $options >tasks.out
    expect "tasks $layout: one rank's accuracies" table_near tasks1.txt tasks.out 0.05
done
for layout in "1 --ep 1" "4 --ep 2 --pp 2"; do # of a mixture, with fewer samples in the end than ranks
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    for command in "generate --prompt king --max-new-tokens 8 --temperature 0" "eval --data-path text --seq-length 40 --max-samples 13" "eval --tasks choice.jsonl word.jsonl"; do
        on "$n" $command --model mixture/latest $options
    done >"mixture on $n.txt"
done
expect "a mixture on 4 ranks writes and is measured as on one" table_near "mixture on 1.txt" "mixture on 4.txt" 0.05
text_of() { sed '/^Evaluation/,$d' "$1"; }
expect "a mixture on 4 ranks writes one rank's text" test "$(text_of 'mixture on 1.txt')" == "$(text_of 'mixture on 4.txt')" -a -n "$(text_of 'mixture on 1.txt')"
expect "two ranks that hold the model twice write nothing: refused" refused generate 2
expect "and say what to do" grep -q "2 ranks have 2 copies of the model, but generation uses one; HINT: --tp 2" err.txt

expect "the start-up table names the grid" train 4 x --tp 2 --pp 2 --dry-run
says "its arithmetic" "4 ranks = tensor 2 x data 1 x pipeline 2"

# ZeRO-1: 6 + 10 / D bytes per parameter on each of D ranks, 6 + 6 / D with moments in bf16, 4 + 6 / D with gradients in
# bf16 too; within 10%.
state_bytes() { # RANKS OPTIONS...
    "$program" train --preset gpt2-124m --train-iters 1 --micro-batch-size 1 --global-batch-size 8 --dry-run --world "$@" |
        awk '/^ *(parameters|gradients \((fp32|bf16)\)|master weights \(lower 16 bits\)|Adam moments \((fp32|bf16)\)) .*iB$/ {
            unit = $NF == "GiB" ? 2^30 : $NF == "MiB" ? 2^20 : 2^10; sum += $(NF - 1) * unit } END { printf "%.3f", sum / 124439808 }'
}
for ranks in 1 4 8; do
    for shares in "6 10" "6 8" "6 6" "4 6"; do # bytes on each rank, and bytes sharded among ranks
        read -r own cut <<<"$shares"
        options=()
        [[ $cut == 10 ]] || options+=(--exp-avg-dtype bf16)
        [[ $cut != 6 ]] || options+=(--exp-avg-sq-dtype bf16)
        [[ $own == 6 ]] || options+=(--main-grads-dtype bf16)
        bytes=$(state_bytes $ranks "${options[@]}")
        expect "memory of ZeRO-1 on $ranks ranks ${options[*]}: $bytes bytes per parameter" \
            awk -v b="$bytes" -v d=$ranks -v own="$own" -v cut="$cut" 'BEGIN { w = own + cut / d; exit !(b >= 0.99 * w && b <= 1.1 * w) }'
    done
done
for ranks in 4 8; do # 2 + 14 / D and 16 / D
    for whole in 2 0; do
        bytes=$(state_bytes $ranks --zero $((whole ? 2 : 3)))
        expect "memory of ZeRO-$((whole ? 2 : 3)) on $ranks ranks: $bytes bytes per parameter" \
            awk -v b="$bytes" -v d=$ranks -v own=$whole 'BEGIN { w = own + (16 - own) / d; exit !(b >= 0.99 * w && b <= 1.1 * w) }'
    done
done

# Saved by one layout, resumed by others.
written="run 4 --tp 2 --pp 2"
layouts "resumed from tp 2, pp 2" one resumed --resume "$written/step_00000003" -- "1" "4" "4 --tp 4" "2 --pp 2"
expect "the same layout: resumes" train 4 resumed --tp 2 --pp 2 --resume "$written/step_00000003"
expect "the same layout: every bit" everything_same "$written" resumed
expect "inspect finds the checkpoint intact" "$program" inspect "$written/latest"

# A killed run resumes on fewer ranks.
(train 4 killed --tp 2 --pp 2 --train-iters 100000 --lr-decay-iters 8 >killed.txt 2>&1; echo $? >status.txt) &
comes test -e killed/latest
victim=$(pgrep -f "^$program_pattern train .*--out killed " | tail -n 1) # a rank, not mpirun, whatever their numbers are
start=$SECONDS
kill -9 "$victim"
wait
expect "a killed rank ends all" test "$(cat status.txt)" != 0
expect "within seconds" test $((SECONDS - start)) -le 10
expect "none is left" refused pgrep -f "$program_pattern train .*--out killed "
expect "two ranks go on" train 2 killed --tp 1 --train-iters 12 --lr-decay-iters 8 --resume auto --override train-iters data-order
expect "to the end" test -e killed/step_00000012

# An error is reported once, with the arithmetic, and ends all ranks.
once() { [[ $(grep -c "$1" out.txt) == 1 ]]; }
expect "4 ranks, tp 3: refused" refused train 4 x --tp 3
says "the arithmetic" "4 ranks cannot be divided by --tensor-model-parallel-size 3 x --pipeline-model-parallel-size 1 = 3"
cp out.txt said.txt
expect "said once" test "$(grep -c "cannot be divided" said.txt)" == 1
expect "heads that tp does not divide: refused" refused train 3 x --tp 3
says "which" "does not divide the model's 4 attention heads"
expect "a global batch that does not fit: refused" refused train 4 x --global-batch-size 12
says "says what would" "12 is not divisible by --micro-batch-size 2 x 4 data-parallel ranks = 8"
expect "more stages than layers: refused" refused train 4 x --pp 4 --vpp 2
says "says why" "4 layers"
expect "micro-batches that vpp cannot take: refused" refused train 2 x --pp 2 --vpp 2 --global-batch-size 6
says "says which can" "not a multiple"
expect "another command on several ranks: refused" refused "$MPIRUN" -n 2 "$program" inspect one/latest
says "says so" "train_gpt inspect runs as a single process"
expect "several processes without MPI: refused" refused env RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 "$program" train "${small[@]}" "${length[@]}" --out unmade
says "says what works" "WORLD_SIZE is 2.*HINT: mpirun -n 2 ./train_gpt"
expect "and writes nothing" test ! -e unmade
different() { "$MPIRUN" -n 1 "$program" train "${small[@]}" "${length[@]}" --out x --lr 1e-3 : -n 1 "$program" train "${small[@]}" "${length[@]}" --out x --lr 2e-3; }
expect "ranks with different options: refused" refused different
says "names the option" "different options: --lr is 0.001 on rank 0 and 0.002 on rank 1"
expect "a name that is not UTF-8: the ranks agree on it" train 2 named --train-iters 3 --name $'odd\xff'

# A rank that never comes back.
(train 2 stuck --train-iters 100000 --lr-decay-iters 8 --distributed-timeout 3s >stuck.txt 2>&1; echo $? >status.txt) &
comes test -e stuck/latest
victim=$(pgrep -f "^$program_pattern train .*--out stuck " | tail -n 1) # a rank, not mpirun, whatever their numbers are
start=$SECONDS
kill -STOP "$victim"
while pgrep -f "$program_pattern train .*--out stuck " >/dev/null && [[ $((SECONDS - start)) -lt 30 ]]; do
    sleep 0.5
    [[ $((SECONDS - start)) -gt 8 ]] && kill -CONT "$victim" 2>/dev/null # mpirun cannot end a stopped process
done
wait
expect "a rank that hangs ends the run" test "$(cat status.txt)" != 0
cp stuck.txt out.txt
says "says who waits for what" "rank . of 2 (host .*): waited . s in "
says "and what the others do" "rank . of 2"
