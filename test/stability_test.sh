#!/usr/bin/env bash
# Runs that recover: skipped batches; outliers that are reported, dropped or rolled back; on one rank and on four; with
# injected faults: noise in the data, a NaN in a gradient, flipped bits in weights and moments.
#   TRAIN_GPT=build/cpu-bf16/train_gpt test/stability_test.sh
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 # MPI does not free all its memory

kings 600 5 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 380 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
train() { # RANKS OUT OPTIONS...
    local n=$1 out=$2 launch=()
    shift 2
    [[ $n == 1 ]] || launch=(timeout -k 1 200 "$MPIRUN" -n "$n" -x TRAIN_GPT_FAULTS)
    "${launch[@]}" "$program" train --num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --position-embedding-type rope \
        --swiglu --disable-bias-linear --tokenizer tok --data-path text --split "95, 5, 0" --seq-length 32 --micro-batch-size 2 --global-batch-size 8 \
        --train-iters "${steps:-20}" --lr-decay-iters 200 --lr 3e-3 --lr-warmup-iters 5 --eval-interval 1000 --eval-iters 20 --quiet --seed 5 --threads 1 \
        --save-every "${every:-0}" --keep 0 --distributed-timeout 60s --spike-window 32 --spike-loss-deviations 5 --rollback-distance 5 --rollback-batches 12 --out "$out" "$@"
}
same() { cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors" && cmp "$1/latest/training/exp_avg.safetensors" "$2/latest/training/exp_avg.safetensors"; }
events() { sed -n "s/.*\"kind\":\"event\",\"step\":\([0-9]*\).*\"event\":\"$2\".*/\1/p" "$1/log.jsonl" | tr '\n' ' '; }
valid_loss() { sed -n 's/.*"kind":"valid".*"loss":\([0-9.e+-]*\).*/\1/p' "$1/log.jsonl" | tail -n 1; }
steps_of() { losses "$1" | cut -d' ' -f1 | tr '\n' ' '; }
field() { sed -n "s/.*\"kind\":\"step\",\"step\":$2,.*\"$3\":\([0-9.e+-]*\).*/\1/p" "$1/log.jsonl" | tail -n 1; }

# ---- skipped batches ----
expect "without skips" train 1 all
every=4 expect "batches 7 to 10 and 13 left out" train 1 skips --skip-batches 7-10,13
expect "they are steps without a line" test "$(steps_of skips)" == "1 2 3 4 5 6 11 12 14 15 16 17 18 19 20 "
expect "the steps before are the undisturbed run's" cmp <(losses all | head -n 6) <(losses skips | head -n 6)
expect "the log says so" test "$(events skips skip-batches)" == "10 13 "
expect "batches 14 to 20 left out" train 1 tail --skip-batches 14-20
expect "the run is finished without them" test "$(steps_of tail | wc -w)" == 13 -a -e tail/latest
expect "the data goes on behind them" test "$(field skips 11 consumed_samples)" == 88
expect "the learning rate stands still" test "$(field skips 11 lr)" == "$(field all 7 lr)"
expect "Megatron's --iterations-to-skip: the same run" train 1 megatron --iterations-to-skip 13 7 8 9 10
expect "to the bit" same skips megatron
every=4 expect "LLM-jp's --skip-train-iteration-range" train 1 llm-jp --skip-train-iteration-range 7-10 9-9
says "the run is as long as without it" "finished after 20 steps"
expect "its steps are counted on" test "$(steps_of llm-jp)" == "$(seq 1 20 | tr '\n' ' ')"
expect "but read the same batches" cmp <(losses skips | sed -n '7,8p' | cut -d' ' -f2) <(losses llm-jp | sed -n '7,8p' | cut -d' ' -f2)
numbers_of() { grep -o "\"$2\":[0-9.e+-]*" "$1/log.jsonl"; }
for name in lr consumed_samples tokens; do expect "$name as without it" cmp <(numbers_of all $name) <(numbers_of llm-jp $name); done
for from in 4 8 12; do # before it, at an iteration that it names, after it
    expect "resumed from $from with it" train 1 "llm-jp $from" --resume "llm-jp/step_$(printf '%08d' $from)" --skip-train-iteration-range 7-10
    expect "to the bit" same llm-jp "llm-jp $from"
done
expect "resumed without it" train 1 "llm-jp without" --resume llm-jp/step_00000004
expect "to the bit" same llm-jp "llm-jp without"
expect "a range that comes to it later" train 1 "llm-jp later" --resume llm-jp/step_00000008 --skip-train-iteration-range 11-12
expect "counts from there" test "$(events "llm-jp later" skip-batches)" == "10 "
expect "a range that has begun: refused" refused train 1 x --resume llm-jp/step_00000008 --skip-train-iteration-range 6-9
says "says where to begin" "6-9 starts before the next iteration; HINT: start with 9"
expect "a range behind the end" train 1 "llm-jp behind" --skip-train-iteration-range 21-25
expect "is never drawn" same all "llm-jp behind"
expect "a range over the end" train 1 "llm-jp over" --skip-train-iteration-range 19-40
expect "is drawn before step 19, which is no shorter for it" test "$(events "llm-jp over" skip-batches) $(steps_of "llm-jp over" | wc -w)" == "18  20"
# Periodic work of a skipped batch is done there or, if it needs a training step, in the next one.
checkpoints_of() { find "$1" -maxdepth 1 -name 'step_*' -printf '%f\n' | sort | sed 's/step_0*//' | tr '\n' ' '; }
steps_with() { sed -n "s/.*\"kind\":\"$2\",\"step\":\([0-9]*\).*/\1/p" "$1/log.jsonl" | tr '\n' ' '; }
for n in 1 2; do
    every=3 expect "due on skipped batches, $n ranks" train $n "due $n" --skip-batches 6-10,13 --keep-every 4 --eval-interval 5 --eval-iters 1 --eval-fixed --sample-interval 7 \
        --sample-tokens 2 --log-health-interval 8 --detect-nondeterminism 13 --check-weight-hash-across-dp-replicas-interval 7
    expect "due on skipped batches, $n ranks: checkpoints" test "$(checkpoints_of "due $n")" == "3 4 6 8 9 12 15 16 18 20 "
    expect "due on skipped batches, $n ranks: validations" test "$(steps_with "due $n" valid)" == "5 10 15 20 "
    expect "due on skipped batches, $n ranks: samples" test "$(steps_with "due $n" sample)" == "7 14 20 "
    expect "due on skipped batches, $n ranks: layers, in the next step" test "$(steps_with "due $n" health)" == "11 16 "
done
expect "due on skipped batches: no bit differs" train 1 undue --skip-batches 6-10,13
expect "without what is due" same undue "due 1"
for from in 6 9 12; do
    expect "resumed from step $from" train 1 "due from $from" --resume "due 1/step_$(printf '%08d' $from)"
    expect "to the bit" same undue "due from $from"
done
expect "a first batch that is skipped: its checkpoint has the initial weights" train 1 untrained --skip-batches 1-2 --keep-every 1
expect "from which a run resumes" train 1 "untrained resumed" --resume untrained/step_00000001
expect "to the bit" same untrained "untrained resumed"
expect "resumed without the option: they are kept" train 1 resumed --resume skips/step_00000004
expect "to the bit" same skips resumed
expect "resumed behind the first range" train 1 resumed2 --resume skips/step_00000012
expect "to the bit" same skips resumed2
expect "given when it is resumed" train 1 later --resume skips/step_00000004 --skip-batches 2-3,7,18-20
says "a note on batches that it has trained on" "note: 2 batches of --skip-batches came before step 5"
expect "the ranges add up" test "$(steps_of later)" == "5 6 11 12 14 15 16 17 "
for layout in "2" "4 --tp 2 --pp 2"; do
    read -r n options <<<"$layout"
    # shellcheck disable=SC2086
    expect "left out on $layout" train "$n" ranks --skip-batches 7-10,13 $options
    expect "the same steps" test "$(steps_of ranks)" == "$(steps_of skips)"
    expect "the same losses" awk '{ d = $2 - $4; if (d < 0) d = -d; if (!(d < 0.01)) bad = 1; n++ } END { exit bad || n != 15 }' <(paste <(losses skips) <(losses ranks))
    rm -rf ranks
done
for wrong in "7-5" "x" "0-3" "3--4"; do
    expect "--skip-batches $wrong: refused" refused train 1 x --skip-batches "$wrong"
    says "by its name" "skip-batches"
done
expect "all batches: refused before anything is written" refused train 1 x --skip-batches 1-9 10-100
says "with the reason" "every batch of the run is skipped (1-100).*HINT"

# ---- outliers ----
faults() { TRAIN_GPT_FAULTS=$1 "${@:2}"; }
expect "an unknown fault: refused" refused faults "hail=3" train 1 x
steps=120 every=10 expect "a clean run" train 1 clean
expect "without any event" test -z "$(events clean spike)$(events clean skip)$(events clean rollback)"
steps=120 expect "noise, warn" faults noise=105 train 1 warn
expect "warn: says it, and applies it" test "$(events warn spike)" == "105 " -a "$(field warn 120 skipped)" == 0
steps=120 expect "noise, skip" faults noise=105 train 1 skip --on-spike skip
expect "skip: drops it" test "$(events skip skip)" == "105 " -a "$(field skip 120 skipped)" == 1
near() { awk -v a="$(valid_loss "$1")" -v b="$(valid_loss "$2")" -v part="$3" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(a > 0 && d < part * b) }'; }
expect "skip: ends near the clean run" near skip clean 0.01
for n in 1 4; do
    layout=()
    [[ $n == 1 ]] || layout=(--tp 2 --pp 2)
    steps=120 expect "a NaN in a gradient on rank $((n - 1)) of $n" faults "nan-gradient=70:$((n - 1))" train "$n" "nan $n" "${layout[@]}"
    expect "is never applied" test "$(events "nan $n" skip)" == "70 " -a "$(field "nan $n" 120 skipped)" == 1
    expect "and does no harm" near "nan $n" clean 0.01
    steps=120 every=10 expect "noise for 5 batches on $n" faults noise=103-107 train "$n" "rollback $n" --on-spike rollback "${layout[@]}"
    expect "three in a row: back to step 90, without batches 97 to 108" test "$(events "rollback $n" rollback)" == "90 "
    expect "the steps say so" test "$(steps_of "rollback $n")" == "$(seq 1 105 | tr '\n' ' ')$(seq 91 96 | tr '\n' ' ')$(seq 109 120 | tr '\n' ' ')"
    steps=120 every=10 expect "a clean run without batches 97 to 108" train "$n" "clean $n" --skip-batches 97-108 "${layout[@]}"
    expect "the healed run ends with its bits" same "clean $n" "rollback $n"
    [[ $n == 1 || -n ${ALL:-} ]] || continue
    steps=120 every=10 expect "a flipped bit of a weight on $n" faults "flip-weight=104:$((n - 1))" train "$n" "flip $n" --on-spike rollback "${layout[@]}"
    expect "is healed by going back once" test "$(events "flip $n" rollback | wc -w)" == 1
    expect "and ends near the run without these batches" near "flip $n" "clean $n" 0.02
done
steps=120 every=10 expect "a rollback over batches that LLM-jp's range drops" faults noise=103-107 train 1 "rollback dropped" --on-spike rollback --skip-train-iteration-range 95-97
expect "to step 90" test "$(events "rollback dropped" rollback)" == "90 "
steps=120 every=10 expect "without batches 97 to 108 from the start" train 1 "clean dropped" --skip-batches 97-108 --skip-train-iteration-range 95-97
expect "ends with its bits" same "clean dropped" "rollback dropped"
expect "the run before is untouched by the way back" cmp <(losses clean | head -n 102) <(losses "rollback 1" | head -n 102)
expect "a checkpoint remembers what is left out" train 1 remembers --resume "rollback 1/step_00000120" --train-iters 122 --override train-iters
expect "and how often" grep -q '"rollbacks": 1' "rollback 1/latest/training/state.json"
steps=120 every=10 expect "a damaged checkpoint is stepped over" faults noise=113-117 train 1 damaged --on-spike rollback --save-in-foreground --rollback-distance 12
expect "the one before serves" test "$(events damaged rollback)" == "100 "
steps=120 every=10 expect "two rows of noise" faults "noise=103-107 noise=113-117" train 1 "rollback twice" --on-spike rollback
expect "to step 90, then to the 100 of the new course, saved on a skipped batch" test "$(events "rollback twice" rollback)" == "90 100 "
expect "whose checkpoints are kept under other names" "$program" inspect "rollback twice/step_00000100.1"
steps=120 every=10 expect "a clean run without batches 97 to 118" train 1 "clean twice" --skip-batches 97-118
expect "ends with its bits" same "clean twice" "rollback twice"
steps=100 every=10 expect "a rollback that leaves every other batch out" faults noise=96-100 train 1 "rollback ends" --on-spike rollback
expect "ends where it went" test "$(events "rollback ends" rollback)" == "90 " -a "$(steps_of "rollback ends" | wc -w)" == 98
expect "with its last validation" grep -q '"kind":"valid","step":90,' "rollback ends/log.jsonl"
steps=120 every=10 expect "the newest two are nearer than the distance" faults noise=103-107 train 1 "rollback far" --on-spike rollback --keep 2 --rollback-distance 25
expect "an older one has been kept" test "$(events "rollback far" rollback)" == "70 "
steps=120 expect "before the first checkpoint of its own" faults noise=103-107 train 1 "rollback other" --on-spike rollback --resume clean/step_00000100
expect "back to the one of another run that it resumed from" test "$(events "rollback other" rollback)$(steps_of "rollback other")" == "100 $(seq 101 105 | tr '\n' ' ')$(seq 109 120 | tr '\n' ' ')"

# ---- LLM-jp's recipe in miniature: bf16 first, then FP8, z-loss, a spike with recovery ----
for layout in "1" ${ALL:+"4 --tp 2"}; do
    read -r n cut <<<"$layout"
    # shellcheck disable=SC2086
    steps=120 every=10 expect "the recipe on $layout" faults noise=103-107 train "$n" "recipe $n" --fp8 hybrid --fp8-start 60 --z-loss 1e-4 --on-spike rollback $cut
    expect "switches" test "$(events "recipe $n" fp8)" == "60 "
    expect "and heals" test "$(events "recipe $n" rollback)" == "90 "
    expect "ends near bf16" near "recipe $n" "clean 1" 0.02
done
steps=120 every=10 expect "a run in FP8 from 60 on" train 1 cross --fp8 hybrid --fp8-start 60
steps=120 every=10 expect "resumed in FP8, rolled back into bf16" faults noise=75-79 train 1 cross --fp8 hybrid --fp8-start 60 --on-spike rollback \
    --rollback-distance 15 --resume cross/step_00000070
expect "to step 50" test "$(events cross rollback)" == "50 "
steps=120 every=10 expect "without these batches from the start" train 1 uncrossed --fp8 hybrid --fp8-start 60 --skip-batches 69-80
expect "ends with the same bits" same cross uncrossed
[[ -z ${ALL:-} ]] || expect "one rank and four end near each other" near "recipe 4" "recipe 1" 0.01

# ---- machines that compute incorrectly ----
expect "gradients computed twice" train 1 twice --detect-nondeterminism 3
expect "change no bit" same all twice
expect "gradients computed twice in FP8 on 4 ranks" train 4 x --detect-nondeterminism 1 --tp 2 --fp8 hybrid --fp8-recipe current
rm -rf x
expect "a last bit that is wrong: found" refused faults flaky-gradient=9 train 1 x --detect-nondeterminism 3
says "the tensor is named" "the gradient of wte of batch 9 has different bits when recomputed on"
rm -rf x
expect "on rank 2 of 4" refused faults flaky-gradient=9:2 train 4 x --detect-nondeterminism 3
says "the rank is named" "recomputed on rank 2 of 4 (host"
rm -rf x
for layout in "1" "4 --tp 2" "4 --tp 4 --num-query-groups 2 --zero 0" "4 --pp 2 --fp8 hybrid --fp8-start 20"; do
    read -r n cut <<<"$layout"
    # shellcheck disable=SC2086
    steps=60 every=25 expect "memory is checked on $layout: no false alarm" train "$n" x --check-replicas 10 $cut
    rm -rf x
done
# found FAULT PATTERN RANKS OPTIONS...: the run ends with this message; ranks are compared at steps 10 and 20.
found() {
    local fault=$1 pattern=$2 n=$3
    shift 3
    steps=20 expect "$fault on $n: found" refused faults "$fault" train "$n" x --check-replicas 10 "$@"
    says "what and where" "$pattern"
    rm -rf x
}
found flip-weight=12:2 "since step 11 the weights on rank 2 (host" 4 --tp 2
found flip-norm=12:1 "since step 11 the weights on rank 1 (host" 4 --tp 2
found flip-norm=12:2 "since step 11 the copies of other ranks' weights on rank 2 (host" 4 --tp 2
found flip-lower=12:3 "since step 11 the lower halves of the fp32 weights on rank 3 (host" 4 --tp 2
found flip-exp-avg=12:2 "since step 11 the moments exp_avg on rank 2 (host" 4 --tp 2
found flip-exp-avg-sq=12:1 "since step 11 the moments exp_avg_sq on rank 1 (host" 4 --tp 2 --exp-avg-sq-dtype bf16
found flip-exp-avg=12:1 "since step 11 the moments exp_avg on rank 1 (host" 4 --zero 0
for place in norm lower exp-avg exp-avg-sq; do found flip-$place=12 "since step 11 the .* on this machine have changed" 1; done
found wrong-update=12:2 "at step 20 .* of .*norm.* has other bits on rank 3 (host .*) than on rank 2 (host" 4 --tp 2
found wrong-update=12:1 "at step 20 .* of .*norm.* has other bits on rank 1 (host .*) than on rank 0 (host" 2 --zero 0 --exp-avg-dtype bf16

# ---- health of the layers ----
steps=12 expect "layers are examined" train 1 health --log-health-interval 6 --fp8 hybrid --fp8-start 8
steps=12 expect "not examined" train 1 unseen --fp8 hybrid --fp8-start 8
expect "no bit changes" same health unseen
steps=12 expect "on four ranks" train 4 health4 --log-health-interval 6 --fp8 hybrid --fp8-start 8 --tp 2
records() { grep '"kind":"health"' "$1/log.jsonl"; }
expect "two records of four layers" test "$(records health | wc -l) $(records health | grep -o '"layer"' | wc -l)" == "2 8"
# The squared gradient norms of the layers add up to the model's.
adds_up() { awk -v whole="$(field "$1" 12 grad_norm)" '{ sum += $1 * $1 } END { d = sqrt(sum) / whole - 1; exit !(NR == 4 && d < 1e-5 && d > -1e-5) }' <(records "$1" | tail -n 1 | grep -o '"grad_norm":[0-9.e+-]*' | cut -d: -f2); }
expect "they add up" adds_up health
expect "on four ranks too" adds_up health4
numbers() { records "$1" | grep -oE "\"$2\":[0-9.e+-]*" | cut -d: -f2; }
for name in weight_norm grad_norm update_ratio; do
    expect "$name is one rank's on four" awk '{ d = $1 / $2 - 1; if (!($1 > 0 && d < 0.03 && d > -0.03)) bad = 1; n++ } END { exit bad || n != 8 }' <(paste <(numbers health $name) <(numbers health4 $name))
done
shares() { records "$1" | tail -n 1 | grep -o "\"$2\":\[[^]]*" | cut -d[ -f2 | tr ',' '\n'; }
expect "shares of 12 tensors in two layers" test "$(shares health fp8_zero | wc -l) $(shares health fp8_largest | wc -l)" == "24 24"
expect "are shares" awk '{ if (!($1 >= 0 && $1 < 0.5)) bad = 1; sum += $1 } END { exit bad || !(sum > 0) }' <(shares health fp8_zero; shares health fp8_largest)
expect "in bf16 there are none" test -z "$(records health | head -n 1 | grep -o fp8_zero)"

# ---- faults without a remedy ----
steps=120 expect "skip, row after row: the run ends" refused faults noise=103-120 train 1 x --on-spike skip
says "and says what to do" "on-spike rollback"
rm -rf x
steps=120 expect "no checkpoint to go back to: the run ends" refused faults noise=103-120 train 1 x --on-spike rollback
says "says so" "no intact checkpoint before step 103"
rm -rf x
steps=120 every=10 expect "as often as allowed: the run ends" refused faults noise=103-120 train 4 x --on-spike rollback --rollback-batches 2 --max-rollbacks 2 --tp 2 --pp 2
says "says how often" "2 rollbacks have not helped"
