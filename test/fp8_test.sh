#!/usr/bin/env bash
# Training in FP8: reaches bf16's loss, switches without a jump, resumes to the bit, gives the same result on every layout
# and with every recompute policy, and refuses unsupported combinations.
#   TRAIN_GPT=build/cpu-bf16/train_gpt test/fp8_test.sh      ALL=1: every family with every recipe and layout (make test-all)
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 # MPI does not free all its memory

# Text with something to learn within some hundred steps: sentences from a few rules, with numbers that determine each
# other.
awk 'BEGIN { srand(3); split("king queen priest farmer smith child", who); split("gave sold showed lent", did); split("sheep bread gold cloth wood", what);
    for (i = 0; i < 4000; i++) { a = int(rand() * 6) + 1; b = int(rand() * 4) + 1; c = (a * b) % 5 + 1; d = int(rand() * 6) + 1;
        printf "the %s of city %d %s %d %s to the %s%s\n", who[a], a * 3 + b, did[b], (a + d) * 2, what[c], who[d], i % 6 == 5 ? "\n" : "" } }' >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 512 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
declare -A family=(
    [gpt2]=""
    [bloom]="--position-embedding-type alibi --embed-layernorm"
    [llama]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2"
    [olmo2]="--normalization RMSNorm --norm-place after --qk-layernorm --position-embedding-type rope --activation relu2 --disable-bias-linear --attention-dropout 0.1"
    [gemma]="--normalization RMSNorm --apply-layernorm-1p --norm-place both --qk-layernorm --position-embedding-type rope --activation geglu --kv-channels 32 --window-size 9 --window-attn-skip-freq 2 --attn-logit-softcapping 5 --softmax-type learnable --hidden-dropout 0.1"
    [mixture]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2 --num-experts 6 --moe-ffn-hidden-size 64 --moe-layer-freq [0]*1+[1]*2 --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate --moe-aux-loss-coeff 0.01"
)
train() { # RANKS FAMILY OUT OPTIONS...
    local n=$1 name=$2 out=$3 launch=()
    shift 3
    [[ $n == 1 ]] || launch=(timeout -k 1 200 "$MPIRUN" -n "$n")
    # shellcheck disable=SC2086
    "${launch[@]}" "$program" train ${family[$name]} --num-layers 3 --hidden-size 64 --num-attention-heads 4 --tokenizer tok --data-path text \
        --split "95, 5, 0" --seq-length 48 --micro-batch-size 2 --global-batch-size 8 --train-iters "${steps:-16}" --lr-decay-iters 400 --lr 2e-3 \
        --lr-warmup-iters 10 --eval-interval 1000 --eval-iters 20 --save-every 0 --quiet --seed 5 --threads "${threads:-1}" --distributed-timeout 60s --out "$out" "$@"
}
same() { cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors" && cmp "$1/latest/training/exp_avg.safetensors" "$2/latest/training/exp_avg.safetensors"; }
state() { sed -n '/"fp8"/,/"fp8_start"/p' "$1/latest/training/state.json"; }
same_state() { [[ -n $(state "$1") && $(state "$1") == "$(state "$2")" ]]; }
valid_loss() { sed -n 's/.*"kind":"valid".*"loss":\([0-9.e+-]*\).*/\1/p' "$1/log.jsonl" | tail -n 1; }
# within PERCENT A B: A exceeds B by at most PERCENT %.
within() { awk -v p="$1" -v a="$2" -v b="$3" 'BEGIN { exit !(b > 0 && a <= (1 + p / 100) * b && a >= (1 - p / 100) * b) }'; }

# Some hundred steps of each family, until the learning rate has decayed: validation loss compared with bf16's. Runs this
# small differ by up to 8% after a single rounding difference, with another seed or another vector unit of the CPU; their
# mean by a half or a third of that.
for name in gpt2 mixture ${ALL:+bloom llama}; do
    steps=400 threads=2 expect "$name in bf16" train 1 $name "$name bf16"
    for recipe in "hybrid --fp8-recipe delayed" "hybrid --fp8-recipe current" "e4m3 --fp8-start 40"; do
        [[ $recipe == *delayed || (($name == gpt2 || $name == mixture) && -n ${ALL:-}) ]] || continue
        # shellcheck disable=SC2086
        steps=400 threads=2 expect "$name, $recipe" train 1 $name run --fp8 $recipe
        expect "$name, $recipe: $(valid_loss run) is within 15% of bf16's $(valid_loss "$name bf16")" within 15 "$(valid_loss run)" "$(valid_loss "$name bf16")"
        echo "$(valid_loss run) $(valid_loss "$name bf16")" >>losses.txt
        rm -rf run
    done
done
mean=$(awk '$2 > 0 { sum += $1 / $2; n++ } END { if (n == 8) print sum / n }' losses.txt)
[[ -z ${ALL:-} ]] || expect "all eight, of bf16's losses on average: $mean, within 4% of 1" within 4 "${mean:-0}" 1
different() { ! cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors" >/dev/null; }

# The switch: no jump, and the steps before have bf16's losses.
steps=60 expect "bf16 for 60 steps" train 1 llama plain
steps=60 expect "FP8 from step 30 on" train 1 llama switch --fp8 hybrid --fp8-start 30 --save-every 20 --keep 0
expect "it is another arithmetic" different plain switch
expect "the steps before are bf16's to the bit" cmp <(losses plain | head -n 30) <(losses switch | head -n 30)
jump() { paste <(losses plain) <(losses switch) | awk 'NR > 30 { d = $4 - $2; sum += d; squares += d * d; n++; if (d > 0.05 || d < -0.05) bad = 1 } END { exit bad || n != 30 || squares == 0 }'; }
expect "the steps after are near" jump
# Resumed before (while measuring), and after the switch.
for step in 20 40; do
    steps=60 expect "resumed at $step" train 1 llama "resumed $step" --fp8 hybrid --fp8-start 30 --resume "switch/step_000000$step"
    expect "resumed at $step: every bit" same switch "resumed $step"
    expect "resumed at $step: and every scale" same_state switch "resumed $step"
done
steps=36 expect "stopped while measuring" train 1 llama stopped --fp8 hybrid --fp8-start 30 --train-iters 26
steps=36 expect "resumed then" train 1 llama stopped --fp8 hybrid --fp8-start 30 --resume auto --override train-iters
expect "the steps until 36 are the undisturbed run's" cmp <(losses switch | head -n 36) <(losses stopped)
steps=60 expect "fast sums backward may be chosen when resuming" train 1 llama fast --fp8 hybrid --fp8-start 30 --fp8-fast-backward --resume switch/step_00000040
expect "on a CPU they are the same" same switch fast
steps=60 expect "other scales are refused" refused train 1 llama other --fp8 hybrid --fp8-start 30 --fp8-margin 1 --resume switch/step_00000040
says "by the option's name" "--fp8-margin is 1"
steps=50 expect "back to bf16" train 1 llama back --resume switch/step_00000040 --override fp8-format fp8-start train-iters
expect "it goes on" test "$(losses back | wc -l)" == 10

# auto: two windows of 64 steady steps after the warm-up of 10, then 8 steps of measuring.
steps=160 expect "auto, on a loss that stands still" train 1 llama auto --fp8 hybrid --fp8-start auto --exp-avg-sq-dtype bf16 --lr 1e-9 --min-lr 0 --save-every 130 --keep 0
switched() { sed -n 's/.*"step":\([0-9]*\),.*"event":"fp8".*/\1/p' "$1/log.jsonl"; }
expect "FP8 begins when it is known" test "$(switched auto)" == 146
steps=160 expect "resumed between" train 1 llama auto2 --fp8 hybrid --fp8-start auto --exp-avg-sq-dtype bf16 --lr 1e-9 --min-lr 0 --resume auto/step_00000130
expect "they begin there too" test "$(switched auto2)" == 146
expect "with the same bits" same auto auto2
steps=160 expect "auto, on a loss that falls" train 1 llama falling --fp8 hybrid --fp8-start auto
expect "stays in bf16" test -z "$(switched falling)"

# Recomputation quantizes to the same codes again; weight transposes are the same whether kept or computed before each
# product.
for options in "--fp8 hybrid" "--fp8 hybrid --fp8-recipe current" "--fp8 hybrid --fp8-start 8 --first-last-layers-bf16"; do
    for name in gpt2 llama olmo2 gemma mixture; do
        [[ -n ${ALL:-} || $name == gpt2 || $name == llama || $options == *start* || ($name == mixture && $options == *current) ]] || continue
        # shellcheck disable=SC2086
        expect "$name $options" train 1 $name none $options
        # Recompute one layer of three: the others keep codes, which the shared block would overwrite.
        for policy in "full" "full --recompute-num-layers 1" "selective --fp8-weight-transpose on-the-fly" "mlp"; do
            # shellcheck disable=SC2086
            expect "$name $options, $policy recomputation" train 1 $name again $options --recompute $policy
            expect "$name $options, $policy: the same bits" same none again
            rm -rf again
        done
        rm -rf none
    done
done
# Nor does another number of micro-batches change the scales' unit.
expect "micro-batches of 2" train 1 llama two --fp8 hybrid --train-iters 4
expect "micro-batches of 4" train 1 llama four --fp8 hybrid --train-iters 4 --micro-batch-size 4
expect "near each other" near_losses two four 4 0.005

# Layouts.
for options in "--fp8 hybrid --fp8-start 5" "--fp8 hybrid --fp8-recipe current"; do
    # shellcheck disable=SC2086
    for name in llama gpt2 mixture; do expect "one rank, $name, $options" train 1 $name "one $name" $options; done
    for layout in "2" "2 --tp 2" "2 --tp 2 --no-sequence-parallel" "2 --pp 2" "4 --tp 2 --pp 2" "4 --tp 4"; do
        read -r n cut <<<"$layout"
        for name in llama gpt2; do
            [[ -n ${ALL:-} || $layout == "4 --tp 2 --pp 2" || ($name == llama && $options == *start*) ]] || continue
            # shellcheck disable=SC2086
            expect "$name $layout, $options" train "$n" $name ranks $options $cut
            expect "$name $layout, $options: one rank's losses" near_losses "one $name" ranks 16 0.01
            rm -rf ranks
        done
    done
    for layout in "2 --ep 2 --zero 2" "2 --tp 2 --recompute full" "4 --ep 2 --tp 2 --recompute mlp" "4 --ep 2 --pp 2 --moe-token-dispatcher-type alltoall"; do
        read -r n cut <<<"$layout"
        [[ -n ${ALL:-} || $options == *start* || $layout == "4 --ep 2 --tp"* ]] || continue
        # shellcheck disable=SC2086
        expect "a mixture, $layout, $options" train "$n" mixture ranks $options $cut
        expect "a mixture, $layout, $options: one rank's losses" near_losses "one mixture" ranks 16 0.01
        rm -rf ranks
    done
    rm -rf one*
done
# Without clipping, since the gradient norm's order of summation differs.
expect "one rank" train 1 llama one --fp8 hybrid --clip-grad 0 --save-every 8 --keep 0
expect "a pipeline" train 2 llama pipeline --fp8 hybrid --clip-grad 0 --pp 2 --fp8-weight-transpose on-the-fly
expect "has one rank's bits" same one pipeline
expect "and scales" same_state one pipeline
expect "four ranks resume one's run" train 4 llama more --fp8 hybrid --clip-grad 0 --tp 2 --pp 2 --resume one/step_00000008 --fp8-weight-transpose on-the-fly
expect "of the steps after" near_losses one more 8 0.01
# The same of a mixture, whose experts' scales do not depend on the ranks that have them.
expect "a mixture on one rank" train 1 mixture experts --fp8 hybrid --clip-grad 0 --save-every 8 --keep 0
expect "a mixture in a pipeline" train 2 mixture stages --fp8 hybrid --clip-grad 0 --pp 2
expect "a mixture in a pipeline has one rank's bits" same experts stages
expect "a mixture in a pipeline has one rank's scales" same_state experts stages
expect "a mixture resumes" train 1 mixture "resumed mixture" --fp8 hybrid --clip-grad 0 --resume experts/step_00000008
expect "a mixture resumes with the same bits" same experts "resumed mixture"
expect "a mixture resumes with the same scales" same_state experts "resumed mixture"
expect "a mixture resumes on four ranks" train 4 mixture "more mixtures" --fp8 hybrid --clip-grad 0 --ep 2 --tp 2 --resume experts/step_00000008
expect "a mixture on four ranks: one rank's losses" near_losses experts "more mixtures" 8 0.01
# Rows that lose all experts are not sent, but measured.
for dispatcher in allgather alltoall; do
    for recipe in delayed current; do
        expect "$dispatcher, $recipe" train 2 mixture "$dispatcher $recipe" --fp8 hybrid --fp8-recipe $recipe --ep 2 --moe-expert-capacity-factor 0.5 --moe-token-dispatcher-type $dispatcher
    done
done
for recipe in delayed current; do
    expect "both dispatchers, $recipe: the same bits" same "allgather $recipe" "alltoall $recipe"
    expect "both dispatchers, $recipe: the same scales" same_state "allgather $recipe" "alltoall $recipe"
done

# Unsupported combinations.
expect "a width that is not a multiple of 16: refused" refused train 1 gpt2 x --fp8 hybrid --hidden-size 72
says "says which" "multiples of 16; the width is 72"
expect "rows that are none: refused" refused train 1 gpt2 x --fp8 hybrid --seq-length 41
says "says which" "rows (--micro-batch-size x --seq-length) is 82"
expect "all layers in bf16: refused" refused train 1 gpt2 x --fp8 hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 3
says "says so" "keeps all 3 layers in bf16"
expect "experts of a width that is not a multiple of 16: refused" refused train 1 mixture x --fp8 hybrid --moe-ffn-hidden-size 40
says "says which" "multiples of 16; a rank's part of an expert's width is 40"
expect "another format: refused" refused train 1 gpt2 x --fp8 int8
expect "a start that is none: refused" refused train 1 gpt2 x --fp8 hybrid --fp8-start soon
says "says what is one" "--fp8-start is 'soon'"
expect "the table says what is planned" train 1 llama x --fp8 hybrid --fp8-start 7k --dry-run

# Transposed weights are kept if they fit: this plan needs 77.3 GiB with them, 71.4 GiB without.
plan() { "$program" train --preset llama2-7b --vocab-size 32000 --micro-batch-size 1 --fp8 hybrid --recompute full --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --train-iters 10 --world 1 --dry-run "$@"; }
for row in "79 keep kept 77.3" "77 on-the-fly on.the.fly 71.4"; do
    read -r gib chosen words needed <<<"$row"
    expect "$gib GiB a rank" plan --device-memory-gib "$gib"
    says "$gib GiB: transposes ${words//./ }" "; transposes $words"
    says "$gib GiB: $needed are needed" "memory of a rank  *$needed GiB of $gib.0 GiB"
    expect "$chosen: the same" plan --device-memory-gib 90 --fp8-weight-transpose "$chosen"
    says "$chosen: $needed are needed" "memory of a rank  *$needed GiB of 90.0 GiB"
done
