#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under ten minutes: builds for this machine's GPU, runs every kernel test and the
# golden models in both precisions, compute-sanitizer's four tools, trains the same small model on GPU and CPU, measures kernels
# and steps; one table at the end. Needs the CUDA toolkit, a C++ compiler and make; from packages or from build/deps (see
# scripts/vendor.sh): GoogleTest, nlohmann-json, CLI11, PCRE2. What is missing is said, and what depends on it skipped.
#   scripts/check_gpu.sh          (make check-gpu)    OUT=build/check-gpu: logs
set -uo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-build/check-gpu}
mkdir -p "$out"
export XDG_CACHE_HOME=$(realpath "$out")/cache
rows=()
failed=0
row() { rows+=("$(printf '%-34s %-8s %s' "$1" "$2" "$3")"); echo "${rows[-1]}"; }
seconds() { awk -v a="$1" -v b="$(date +%s.%N)" 'BEGIN { printf "%.0f s", b - a }'; }
# step NAME LOG COMMAND...: runs it, keeps its output, adds a row.
step() {
    local name=$1 log=$out/$2.log start
    shift 2
    start=$(date +%s.%N)
    if "$@" >"$log" 2>&1; then row "$name" ok "$(seconds "$start")"; return 0; fi
    row "$name" FAILED "$(seconds "$start"), see $log"
    tail -n 30 "$log"
    failed=1
    return 1
}
skip() { row "$1" skipped "$2"; }

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[[ -x $nvcc ]] || { echo "error: there is no nvcc; install the CUDA toolkit (12.8 or later) or put it on PATH" >&2; exit 1; }
gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
[[ -n $gpu ]] || { echo "error: nvidia-smi finds no GPU; make test checks the kernels on an emulator" >&2; exit 1; }
row "GPU" - "$gpu"
row "toolkit" - "$("$nvcc" --version | grep -o 'V[0-9.]*')"

lacks=""
for header in gtest/gtest.h nlohmann/json.hpp CLI/CLI.hpp pcre2.h; do
    [[ $header == pcre2.h ]] && define="-DPCRE2_CODE_UNIT_WIDTH=8" || define=""
    echo "#include <$header>" | "${CXX:-g++}" $define -I build/deps/include -E -x c++ - >/dev/null 2>&1 || lacks="$lacks $header"
done
make() { command make -s --no-print-directory BACKEND=cuda NODEPS=1 NVCC="$nvcc" "$@"; }
jobs=$(nproc)

tests_run=0
if [[ -z $lacks ]]; then
    step "build (tests, trainer, bench)" build make -j"$jobs" gpu-programs PRECISION=bf16 &&
        for program in $(make print-gpu-programs); do
            name=$(basename "$(dirname "$program")")/$(basename "$program")
            start=$(date +%s.%N)
            timeout 120 "$program" >"$out/$(basename "$program")-$(basename "$(dirname "$program")").log" 2>&1
            status=$?
            log=$out/$(basename "$program")-$(basename "$(dirname "$program")").log
            ok=$(grep -c '^\[       OK \]' "$log") bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$log") skipped=$(grep -c '^\[  SKIPPED \] .*ms)$' "$log")
            tests_run=$((tests_run + ok))
            if [[ $status == 0 ]]; then row "$name" ok "$ok passed, $skipped skipped, $(seconds "$start")"
            else row "$name" FAILED "$ok passed, $bad failed, exit $status, see $log"; grep -A12 'Failure$' "$log" | head -n 40; failed=1; fi
        done
else
    skip "tests and trainer" "these headers are missing:$lacks; scripts/vendor.sh on a Debian machine gathers them in build/deps"
fi

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
if [[ -n $sanitizer && $tests_run -gt 0 ]]; then
    for tool in memcheck racecheck synccheck initcheck; do
        for program in $(make print-gpu-programs | tr ' ' '\n' | grep -v 'golden\|cublaslt'); do
            step "$tool $(basename "$(dirname "$program")")/$(basename "$program")" "$tool-$(basename "$program")-$(basename "$(dirname "$program")")" \
                timeout 60 "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-name-exclude kernel_substring=cublas "$program" --gtest_brief=1
        done
    done
else
    skip "compute-sanitizer" "it is not there, or there are no tests"
fi

if [[ -z $lacks ]]; then
    # The sources of this program are text enough for a small model; the same run on the CPU, and on the GPU twice.
    train_gpt=$(make print-train-gpt)
    step "build for the CPU" build-cpu command make -s --no-print-directory -j"$jobs" BACKEND=cpu NODEPS=1 build/cpu-bf16/train_gpt
    cat llmc/*.h llmc/*/*.h train_gpt.cu >"$out/text.txt"
    rm -rf "$out"/run-*
    step "tokenizer and data" data bash -c "'$train_gpt' tokenizer --input '$out/text.txt' --vocab-size 1024 --output '$out/tok' &&
        '$train_gpt' prepare --input '$out/text.txt' --output '$out/data' --tokenizer '$out/tok'"
    curve() { # PROGRAM OUT
        "$1" train --num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --normalization RMSNorm --position-embedding-type rope \
            --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --tokenizer "$out/tok" --data-path "$out/data" --seq-length 128 \
            --micro-batch-size 4 --global-batch-size 8 --train-iters 60 --lr 2e-3 --lr-warmup-iters 5 --eval-iters 0 --save-every 0 --out "$2" --quiet "${@:3}"
    }
    step "training on the GPU" train-gpu curve "$train_gpt" "$out/run-gpu"
    step "training on the GPU again" train-again curve "$train_gpt" "$out/run-again"
    step "training on the CPU" train-cpu curve build/cpu-bf16/train_gpt "$out/run-cpu"
    losses() { sed -n 's/.*"kind":"step","step":\([0-9]*\).*"loss":\([0-9.e+-]*\).*/\1 \2/p' "$1/log.jsonl"; }
    if [[ -s $out/run-gpu/log.jsonl && $(losses "$out/run-gpu") == "$(losses "$out/run-again")" ]]; then row "the same run twice" ok "every loss has the same digits"
    else row "the same run twice" FAILED "the losses differ"; failed=1; fi
    near() { # NAME RUN RUN
        local difference
        difference=$(paste <(losses "$out/$2") <(losses "$out/$3") | awk '{ d = $2 - $4; if (d < 0) d = -d; if (d > worst) worst = d; n++ } END { printf "%.4f %d", worst, n }')
        if [[ ${difference#* } == 60 ]] && awk -v d="${difference% *}" 'BEGIN { exit !(d < 0.03) }'; then row "$1" ok "largest difference of a loss over 60 steps: ${difference% *}"
        else row "$1" FAILED "largest difference and steps: $difference (0.03 and 60 are expected)"; failed=1; fi
    }
    near "GPU and CPU" run-gpu run-cpu
    step "in 8 bits on the GPU" train-gpu-fp8 curve "$train_gpt" "$out/run-gpu-fp8" --fp8 hybrid --fp8-start 10
    step "in 8 bits on the CPU" train-cpu-fp8 curve build/cpu-bf16/train_gpt "$out/run-cpu-fp8" --fp8 hybrid --fp8-start 10
    near "GPU and CPU in 8 bits" run-gpu-fp8 run-cpu-fp8
    step "benchmarks" bench timeout 240 "$(make print-bench)" && cat "$out/bench.log"
    for program in $(make print-ladders); do
        name=$(basename "$program")
        step "$name" "$name" timeout 120 "$program" && cat "$out/$name.log"
    done
fi

echo
echo "---- make check-gpu, $(date -u +%Y-%m-%d) ----"
printf '%s\n' "${rows[@]}" | tee "$out/table.txt"
exit $failed
