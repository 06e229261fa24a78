# shellcheck shell=bash
# Shared by check_gpu.sh and gpu_minutes.sh, which source it: steps with a time limit, table rows that are saved at once,
# short training runs and checks of their logs. The sourcing script sets `out` (a folder), `budget` (seconds) and `began`
# (start time of the budget), and defines row NAME STATUS TEXT.
failed=0 child=
# (bash 5.2 loses a signal during a command with two substitutions, such as a=$(b) c=$(d), so use one per command here.)
trap '[[ -z $child ]] || kill "$child"; exit 130' INT TERM
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.0f", b - a }'; }
fail() { row "$1" FAILED "$2"; failed=1; }
short() { echo "$(basename "$(dirname "$1")")/$(basename "$1")"; }
log_of() { echo "$out/$(tr 'A-Z' 'a-z' <<<"$1" | tr -cs 'a-z0-9\n' -).log"; }
# limit SECONDS: time limit of a step: SECONDS, but at most the remaining budget. On the emulator: the remaining budget.
limit() {
    local left=$((budget - $(since "$began")))
    if [[ ${backend:-cuda} == emu ]] || ((left < $1)); then echo $left; else echo "$1"; fi
}
# attempt NAME SECONDS LOG COMMAND...: runs a program and saves its output; sets `ended` to how it ended. If skipped: status
# 1 and an empty `ended`. The program gets its time limit in LIMIT.
attempt() {
    local name=$1 seconds log=$3 status
    seconds=$(limit "$2") ended=
    shift 3
    if ((seconds < 1)); then row "$name" skipped "the $budget s are over"; return 1; fi
    LIMIT=$seconds timeout -k 5 "$seconds" "$@" >"$log" 2>&1 &  # in the background, so that signals are handled at once
    child=$!
    wait "$child"
    status=$? child=
    ended="exit status $status"
    # 137: killed, by timeout or by the system when memory ran out.
    [[ $status != 124 ]] || ended="not over after $seconds s"
    [[ $status != 137 ]] || ended="killed, within $seconds s"
    return $status
}

# ---- programs of GoogleTest --------------------------------------------------------------------------------------------------
# passed LOG STATUS: succeeds if a test program passed all its tests; sets ok and bad to the numbers of passed and failed
# tests.
passed() {
    ok=$(grep -c '^\[       OK \]' "$1") bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$1")
    [[ $2 == 0 ]] && grep -q '^\[  PASSED  \]' "$1"
}
# failures LOG: the failed tests and their messages.
failures() {
    grep -E '^\[  FAILED  \] .*ms\)$|what\(\)' "$1" | head -n 10
    grep -A6 'Failure$' "$1" | head -n 24
    [[ $bad -gt 0 ]] || tail -n 3 "$1"
}

# ---- short training runs -----------------------------------------------------------------------------------------------------
# trained PROGRAM DATA TOKENIZER FOLDER OPTION...: trains a small model for STEPS steps.
trained() {
    rm -rf "${4:?}"
    $1 train --num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope \
        --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --data-path "$2" --tokenizer "$3" --seq-length 128 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$STEPS" --lr 5e-4 --lr-warmup-iters $((STEPS / 12)) --eval-iters 0 --save-every 0 --out "$4" --quiet "${@:5}"
}
losses() { sed -n 's/.*"kind":"step","step":\([0-9]*\).*"loss":\([0-9.e+-]\+\).*/\1 \2/p' "$1" 2>/dev/null; }
# same LOG LOG: reports whether all STEPS losses are equal in every digit.
same() {
    if [[ $(losses "$1" | wc -l) == "$STEPS" && $(losses "$1") == "$(losses "$2")" ]]; then echo "every loss has the same digits"
    else
        echo "$(losses "$1" | wc -l) and $(losses "$2" | wc -l) losses of $STEPS, where they differ: $(diff <(losses "$1") <(losses "$2") | head -n 4 | tr '\n' ' ')"
        return 1
    fi
}
# near LOG LOG LIMIT: reports the mean absolute difference of the losses.
near() {
    local difference
    difference=$(paste <(losses "$1") <(losses "$2") | awk '{ d = $2 - $4; sum += d < 0 ? -d : d; n++ } END { printf "%.4f %d", n ? sum / n : 1, n }')
    if [[ ${difference#* } == "$STEPS" ]] && awk -v d="${difference% *}" -v most="$3" 'BEGIN { exit !(d < most) }'; then
        echo "mean difference of a loss: ${difference% *}, $3 are allowed"
    else
        echo "mean difference and steps: $difference ($3 and $STEPS are expected)"
        return 1
    fi
}
# speed LOG N: the median speed of the last N steps.
speed() {
    sed -n 's/.*"kind":"step".*"step_ms":\([0-9.]*\),"tokens_per_s":\([0-9.]*\),"model_tflops":\([0-9.]*\).*/\2 \3 \1/p' "$1" 2>/dev/null | tail -n "$2" | sort -g |
        sed -n "$((($2 + 1) / 2))p" | awk '{ printf "%d tok/s, %.0f TFLOP/s (%.1f%% of 989), %.1f ms a step", $1, $2, $2 / 9.89, $3 }'
}
# Models to measure: NAME|OPTIONS, with the model's real vocabulary size.
speeds=(
    "GPT-2 124M, 64x1024|--preset gpt2-124m --vocab-size 50257 --micro-batch-size 64 --global-batch-size 512 --seq-length 1024"
    "Llama 1B, 16x2048|--preset llama-1b --vocab-size 32000 --micro-batch-size 16 --global-batch-size 128 --seq-length 2048"
    "Llama 1B, 16x2048, FP8|--preset llama-1b --vocab-size 32000 --micro-batch-size 16 --global-batch-size 128 --seq-length 2048 --fp8 hybrid"
    "Llama 2 7B, 12 layers, 2x4096|--preset llama2-7b --vocab-size 32000 --num-layers 12 --micro-batch-size 2 --global-batch-size 32 --seq-length 4096"
    "Llama 2 7B, 12 layers, 2x4096, FP8|--preset llama2-7b --vocab-size 32000 --num-layers 12 --micro-batch-size 2 --global-batch-size 32 --seq-length 4096 --fp8 hybrid"
)
# timed PROGRAM DATA TOKENIZER FOLDER OPTION...: a training run to measure speed.
timed() {
    rm -rf "${4:?}"
    $1 train --data-path "$2" --tokenizer "$3" --lr 1e-4 --lr-warmup-iters 2 --eval-iters 0 --save-every 0 --out "$4" --quiet --train-iters 8 "${@:5}"
}
