#!/usr/bin/env bash
# Everything that needs a GPU, in stages, each of which ends within 9 minutes:
#   build     tests, trainer, benchmark and ladders for this machine's GPU, and the trainer for its CPU
#   tests     every kernel test and the golden models, in bf16 and fp32
#   train     a small model on the GPU twice (the same bits) and on the CPU (near losses), in bf16 and in FP8
#   bench     kernels and training steps against cuBLASLt's and a copy's rates
#   speed     tokens per second of the trainer itself, in bf16 and FP8
#   ladders   dev/kernels: from naive kernels to the trainer's
#   sanitize  compute-sanitizer's four tools over our kernels, memcheck first
#   scripts/check_gpu.sh [STAGE...]      (make check-gpu; make check-gpu-STAGE)     OUT=build/check-gpu: logs and table.txt
# A row of the table is printed and kept as soon as it is known. Needs the CUDA toolkit, a C++ compiler and make; from packages or
# from build/deps (scripts/vendor.sh): GoogleTest, nlohmann-json, PCRE2. The stage `build` can be run on another machine
# (ARCHS=90a MARCH=x86-64-v3, for an H100), and build/ carried over. BACKEND=emu rehearses it on the emulator, where nothing is
# timed or sanitized (STEPS=3: short trainings; BUDGET=3600: seconds of a stage). Exit status 1 if a row says FAILED, or if the
# time was over before all tests had run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda} out=${OUT:-build/check-gpu} budget=${BUDGET:-540}
export STEPS=${STEPS:-60} out
[[ $backend != emu ]] || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # see test/run.sh
mkdir -p "$out"
XDG_CACHE_HOME=$(realpath "$out")/cache
export XDG_CACHE_HOME
failed=0 child=
trap '[[ -z $child ]] || kill "$child"; exit 130' INT TERM
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.0f", b - a }'; }
row() { printf '%-38s %-8s %s\n' "$1" "$2" "$3" | tee -a "$out/table.txt"; }
fail() { row "$1" FAILED "$2"; failed=1; }
make() { command make -s --no-print-directory BACKEND="$backend" NODEPS=1 "$@"; }
# limit SECONDS: what a step may take: so many, or what is left of the stage's time; the emulator is held to that alone.
limit() {
    local left=$((budget - $(since "$stage_began")))
    if [[ $backend == emu ]] || ((left < $1)); then echo $left; else echo "$1"; fi
}
# attempt NAME SECONDS LOG COMMAND...: runs a program and keeps its output; `ended` says how it ended. Skipped: status 1, no
# `ended`.
attempt() {
    local name=$1 seconds log=$3 status
    seconds=$(limit "$2") ended=
    shift 3
    if ((seconds < 1)); then row "$name" skipped "the stage's $budget s are over"; return 1; fi
    timeout -k 5 "$seconds" "$@" >"$log" 2>&1 &  # waited for, so that signals to this script are not put off
    child=$!
    wait "$child"
    status=$? child=
    ended="exit status $status"
    # 137: it had to be killed, by timeout or by the system for want of memory.
    [[ $status != 124 ]] || ended="not over after $seconds s"
    [[ $status != 137 ]] || ended="killed, within $seconds s"
    return $status
}
# step NAME SECONDS COMMAND...: the same with a row.
step() {
    local name=$1 began log
    began=$(now) log=$out/$(tr 'A-Z' 'a-z' <<<"$1" | tr -cs 'a-z0-9\n' -).log
    if attempt "$name" "$2" "$log" "${@:3}"; then row "$name" ok "$(since "$began") s"; return 0; fi
    [[ -n $ended ]] || return 1
    fail "$name" "$ended, see $log"
    tail -n 20 "$log"
    return 1
}
# found PROGRAM...: they are built.
found() {
    local program lacks=0
    (($#)) || { fail "$stage" "make names no programs"; return 1; }
    for program in "$@"; do [[ -x $program ]] || { fail "$(short "$program")" "it is not built; scripts/check_gpu.sh build does that"; lacks=1; }; done
    return $lacks
}
# untimed: on the emulator, a row that says so.
untimed() { [[ $backend == emu ]] && row "$stage" skipped "$1"; }
short() { echo "$(basename "$(dirname "$1")")/$(basename "$1")"; }

stage_build() {
    local lacks="" header define nvcc
    for header in gtest/gtest.h nlohmann/json.hpp pcre2.h; do
        [[ $header == pcre2.h ]] && define="-DPCRE2_CODE_UNIT_WIDTH=8" || define=""
        echo "#include <$header>" | "${CXX:-g++}" $define -I build/deps/include -E -x c++ - >/dev/null 2>&1 || lacks="$lacks $header"
    done
    if [[ -n $lacks ]]; then fail "build" "these headers are missing:$lacks; scripts/vendor.sh on a Debian machine gathers them in build/deps"; return; fi
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    if [[ $backend == cuda && ! -x $nvcc ]]; then fail "build" "there is no nvcc; install the CUDA toolkit (12.8 or later) or put it on PATH"; return; fi
    [[ $backend != cuda ]] || row "toolkit" - "$("$nvcc" --version | grep -o 'V[0-9.]*')"
    step "build for the GPU" 540 make -s --no-print-directory -j"$(nproc)" BACKEND="$backend" NODEPS=1 gpu-programs
    step "build for the CPU" 540 make -s --no-print-directory BACKEND=cpu NODEPS=1 build/cpu-bf16/train_gpt
}

stage_tests() {
    local program programs log status began ok bad
    programs=$(make print-gpu_programs)
    # shellcheck disable=SC2086  # words
    found $programs
    for program in $programs; do
        [[ -x $program ]] || continue
        log=$out/$(basename "$program")-$(basename "$(dirname "$program")").log began=$(now)
        attempt "$(short "$program")" 120 "$log" "$program"
        status=$?
        if [[ -z $ended ]]; then failed=1; continue; fi
        ok=$(grep -c '^\[       OK \]' "$log") bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$log")
        if [[ $status == 0 ]] && grep -q '^\[  PASSED  \]' "$log"; then row "$(short "$program")" ok "$ok passed, $(since "$began") s"
        else
            fail "$(short "$program")" "$ok passed, $bad failed, $ended, see $log"
            grep -E '^\[  FAILED  \] .*ms\)$|what\(\)' "$log" | head -n 10
            grep -A6 'Failure$' "$log" | head -n 24
            [[ $bad -gt 0 ]] || tail -n 3 "$log"
        fi
        grep '^finding: ' "$log" | cut -c1-150
    done
}

# The sources of this program are text enough for a small model.
curve() { # PROGRAM RUN OPTION...
    rm -rf "${out:?}/$2"
    "$1" train --num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope \
        --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --tokenizer "$out/tok" --data-path "$out/data" --seq-length 128 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$STEPS" --lr 5e-4 --lr-warmup-iters $((STEPS / 12)) --eval-iters 0 --save-every 0 --out "$out/$2" --quiet "${@:3}"
}
losses() { sed -n 's/.*"kind":"step","step":\([0-9]*\).*"loss":\([0-9.e+-]\+\).*/\1 \2/p' "$out/$1/log.jsonl" 2>/dev/null; }
same() { # NAME RUN RUN
    if [[ $(losses "$2" | wc -l) == "$STEPS" && $(losses "$2") == "$(losses "$3")" ]]; then row "$1" ok "every loss has the same digits"
    else fail "$1" "$(losses "$2" | wc -l) and $(losses "$3" | wc -l) losses of $STEPS, where they differ: $(diff <(losses "$2") <(losses "$3") | head -n 4 | tr '\n' ' ')"; fi
}
near() { # NAME RUN RUN LIMIT: the mean difference of a loss
    local difference
    difference=$(paste <(losses "$2") <(losses "$3") | awk '{ d = $2 - $4; sum += d < 0 ? -d : d; n++ } END { printf "%.4f %d", n ? sum / n : 1, n }')
    if [[ ${difference#* } == "$STEPS" ]] && awk -v d="${difference% *}" -v most="$4" 'BEGIN { exit !(d < most) }'; then
        row "$1" ok "mean difference of a loss: ${difference% *}, $4 are allowed"
    else fail "$1" "mean difference and steps: $difference ($4 and $STEPS are expected)"; fi
}
stage_train() {
    local gpu cpu=build/cpu-bf16/train_gpt
    gpu=$(make print-trainer)
    found $gpu $cpu || return
    export -f curve
    cat llmc/*.h llmc/*/*.h train_gpt.cu >"$out/text.txt"
    rm -rf "$out"/tok "$out"/data.* "$out"/run-{gpu,again,cpu,gpu-fp8,cpu-fp8,speed}  # a run of before is not to stand for one that is skipped
    step "tokenizer" 60 "$gpu" tokenizer --input "$out/text.txt" --vocab-size 1024 --output "$out/tok" &&
        step "data" 60 "$gpu" prepare --input "$out/text.txt" --output "$out/data" --tokenizer "$out/tok" || return
    step "training on the GPU" 120 bash -c "curve $gpu run-gpu"
    step "training on the GPU again" 120 bash -c "curve $gpu run-again"
    same "the same run twice" run-gpu run-again
    step "training on the CPU" 120 bash -c "curve $cpu run-cpu"
    near "GPU and CPU" run-gpu run-cpu 0.003
    step "training in FP8 on the GPU" 120 bash -c "curve $gpu run-gpu-fp8 --fp8 hybrid --fp8-start $((STEPS / 6))"
    step "training in FP8 on the CPU" 120 bash -c "curve $cpu run-cpu-fp8 --fp8 hybrid --fp8-start $((STEPS / 6))"
    near "GPU and CPU in FP8" run-gpu-fp8 run-cpu-fp8 0.01
}

# speed NAME OPTION...: 8 steps on the stage train's data; the median of the last five.
speed() {
    local name=$1 median
    shift
    rm -rf "$out/run-speed"
    step "$name" 120 "$(make print-trainer)" train "$@" --data-path "$out/data" --tokenizer "$out/tok" --train-iters 8 --lr 1e-4 --lr-warmup-iters 2 \
        --eval-iters 0 --save-every 0 --out "$out/run-speed" --quiet || return
    median=$(sed -n 's/.*"kind":"step".*"step_ms":\([0-9.]*\),"tokens_per_s":\([0-9.]*\),"model_tflops":\([0-9.]*\).*/\2 \3 \1/p' "$out/run-speed/log.jsonl" |
        tail -n 5 | sort -g | sed -n 3p | awk '{ printf "%d tok/s, %.0f TFLOP/s (%.1f%% of 989), %.1f ms a step", $1, $2, $2 / 9.89, $3 }')
    if [[ -n $median ]]; then row "" - "$median"; else fail "$name" "its log has no five steps"; fi
}
stage_speed() {
    untimed "the emulator's speed says nothing of a GPU's" && return
    found "$(make print-trainer)" || return
    [[ -s $out/data.bin ]] || { fail "speed" "there are no data; the stage train makes them"; return; }
    speed "GPT-2 124M, 64x1024" --preset gpt2-124m --vocab-size 50257 --micro-batch-size 64 --global-batch-size 512 --seq-length 1024
    speed "Llama 1B, 16x2048" --preset llama-1b --vocab-size 32000 --micro-batch-size 16 --global-batch-size 128 --seq-length 2048
    speed "Llama 1B, 16x2048, FP8" --preset llama-1b --vocab-size 32000 --micro-batch-size 16 --global-batch-size 128 --seq-length 2048 --fp8 hybrid
    speed "Llama 2 7B, 12 layers, 2x4096" --preset llama2-7b --vocab-size 32000 --num-layers 12 --micro-batch-size 2 --global-batch-size 32 --seq-length 4096
    speed "Llama 2 7B, 12 layers, 2x4096, FP8" --preset llama2-7b --vocab-size 32000 --num-layers 12 --micro-batch-size 2 --global-batch-size 32 --seq-length 4096 --fp8 hybrid
}

stage_bench() {
    local bench
    untimed "the emulator's speed says nothing of a GPU's" && return
    bench=$(make print-benchmark)
    found $bench || return
    step "benchmark of kernels" 240 "$bench" --ops && cat "$out/benchmark-of-kernels.log"
    step "benchmark of steps" 300 "$bench" --steps && cat "$out/benchmark-of-steps.log"
}

stage_ladders() {
    local program programs
    programs=$(make print-ladders)
    # shellcheck disable=SC2086  # words
    found $programs
    for program in $programs; do  # on the emulator small sizes, untimed
        [[ ! -x $program ]] || step "$(basename "$program" | tr _ ' ')" 150 "$program" &&
            cat "$out/$(basename "$program" | tr _ -).log"
    done
}

stage_sanitize() {
    local sanitizer tool program programs
    untimed "its tools look at a GPU" && return
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    if [[ -z $sanitizer ]]; then row "compute-sanitizer" skipped "it is not there"; return; fi
    programs=$(make print-gpu_programs | tr ' ' '\n' | grep -v 'golden\|cublaslt\|fp32')
    # shellcheck disable=SC2086  # words
    found $programs
    # Kernels in namespace gpu, by their mangled names: the libraries' are not ours to check. What they write is unknown to
    # initcheck then, so that it does without test_gpu_matmul. racecheck (2025.3) takes bulk copies that are not tensor copies for
    # races, as is known of FlashAttention: attention's backward on Hopper reads its statistics by one. Its findings are shown.
    for tool in memcheck synccheck initcheck racecheck; do
        for program in $programs; do
            [[ ! -x $program || ($tool == initcheck && $program == *matmul) ]] && continue
            step "$tool $(basename "$program")" 60 "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-name kernel_substring=3gpu \
                "$program" --gtest_brief=1
        done
    done
}

stages=("$@")
((${#stages[@]})) || stages=(build tests train bench speed ladders sanitize)
for stage in "${stages[@]}"; do
    [[ $(type -t "stage_$stage") == function ]] || { echo "error: there is no stage '$stage'; there are build, tests, train, bench, speed, ladders, sanitize" >&2; exit 2; }
done
[[ ${stages[0]} != build ]] || : >"$out/table.txt"
if [[ $backend == cuda && "${stages[*]}" != build ]]; then
    gpu=$(nvidia-smi -L >/dev/null 2>&1 && nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1)
    [[ -n $gpu ]] || { echo "error: nvidia-smi finds no GPU; make test checks the kernels on an emulator" >&2; exit 1; }
    row "GPU" - "$gpu"
fi
for stage in "${stages[@]}"; do
    stage_began=$(now)
    "stage_$stage"
done
echo
echo "---- check_gpu.sh ${stages[*]}, $(date -u +%Y-%m-%d) ----"
cat "$out/table.txt"
exit $failed
