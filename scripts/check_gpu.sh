#!/usr/bin/env bash
# Everything that needs a GPU, in stages of at most 9 minutes:
#   build     tests, trainer, benchmark and ladders for this machine's GPU, and the trainer for its CPU
#   tests     every kernel test and the golden models, in bf16 and fp32
#   train     a small model, twice on the GPU (equal bits) and once on the CPU (close losses), in bf16 and in FP8
#   bench     kernels and training steps, next to cuBLASLt's rate and a copy's
#   speed     the trainer's tokens per second, in bf16 and FP8
#   ladders   dev/kernels: from naive kernels to the trainer's
#   sanitize  compute-sanitizer's four tools on our kernels, memcheck first
#   scripts/check_gpu.sh [STAGE...]      (make check-gpu; make check-gpu-STAGE)     OUT=build/check-gpu: logs and table.txt
# Each row of the table is printed and saved at once. Needs the CUDA toolkit, a C++ compiler and make; from packages or from
# build/deps (scripts/vendor.sh): GoogleTest, nlohmann-json, PCRE2. The stage `build` can run on another machine (ARCHS=90a
# MARCH=x86-64-v3, for an H100); then copy build/. BACKEND=emu rehearses on the emulator, without timing and sanitizers
# (STEPS=3: short training; BUDGET=3600: seconds per stage). Exit status 1 if a row says FAILED, or if time ran out before
# all tests had run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda} out=${OUT:-build/check-gpu} budget=${BUDGET:-540}
export STEPS=${STEPS:-60} out
[[ $backend != emu ]] || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # see test/run.sh
mkdir -p "$out"
XDG_CACHE_HOME=$(realpath "$out")/cache
export XDG_CACHE_HOME
. scripts/gpu_steps.sh
row() { printf '%-38s %-8s %s\n' "$1" "$2" "$3" | tee -a "$out/table.txt"; }
make() { command make -s --no-print-directory BACKEND="$backend" NODEPS=1 "$@"; }
# step NAME SECONDS COMMAND...: the same, with a row.
step() {
    local name=$1 start log
    start=$(now)
    log=$(log_of "$1")
    if attempt "$name" "$2" "$log" "${@:3}"; then row "$name" ok "$(since "$start") s"; return 0; fi
    [[ -n $ended ]] || return 1
    fail "$name" "$ended, see $log"
    tail -n 20 "$log"
    return 1
}
# found PROGRAM...: fails with a row for each program that is not built.
found() {
    local program lacks=0
    (($#)) || { fail "$stage" "make names no programs"; return 1; }
    for program in "$@"; do [[ -x $program ]] || { fail "$(short "$program")" "it is not built; scripts/check_gpu.sh build does that"; lacks=1; }; done
    return $lacks
}
# untimed REASON: on the emulator, adds a row `skipped` with the reason.
untimed() { [[ $backend == emu ]] && row "$stage" skipped "$1"; }

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
    local program programs folder log status start
    programs=$(make print-gpu_programs)
    # shellcheck disable=SC2086  # words
    found $programs
    for program in $programs; do
        [[ -x $program ]] || continue
        folder=${program%/*} log=$out/${program##*/}-${folder##*/}.log
        start=$(now)
        attempt "$(short "$program")" 120 "$log" "$program"
        status=$?
        if [[ -z $ended ]]; then failed=1; continue; fi
        if passed "$log" "$status"; then row "$(short "$program")" ok "$ok passed, $(since "$start") s"
        else
            fail "$(short "$program")" "$ok passed, $bad failed, $ended, see $log"
            failures "$log"
        fi
        grep '^finding: ' "$log" | cut -c1-150
    done
}

# verdict NAME COMMAND...: a row with the output of a comparison.
verdict() {
    local text
    if text=$("${@:2}"); then row "$1" ok "$text"; else fail "$1" "$text"; fi
}
# This program's sources are enough text for a small model.
stage_train() {
    local gpu cpu=build/cpu-bf16/train_gpt
    gpu=$(make print-trainer)
    found $gpu $cpu || return
    export -f trained
    curve() { step "$1" 120 bash -c "trained $2 $out/data $out/tok $out/$3 ${*:4}"; }
    cat llmc/*.h llmc/*/*.h train_gpt.cu >"$out/text.txt"
    rm -rf "$out"/tok "$out"/data.* "$out"/run-{gpu,again,cpu,gpu-fp8,cpu-fp8,speed}  # old runs must not pass for skipped ones
    step "tokenizer" 60 "$gpu" tokenizer --input "$out/text.txt" --vocab-size 1024 --output "$out/tok" &&
        step "data" 60 "$gpu" prepare --input "$out/text.txt" --output "$out/data" --tokenizer "$out/tok" || return
    curve "training on the GPU" "$gpu" run-gpu
    curve "training on the GPU again" "$gpu" run-again
    verdict "the same run twice" same "$out"/run-{gpu,again}/log.jsonl
    curve "training on the CPU" "$cpu" run-cpu
    verdict "GPU and CPU" near "$out"/run-{gpu,cpu}/log.jsonl 0.003
    curve "training in FP8 on the GPU" "$gpu" run-gpu-fp8 --fp8 hybrid --fp8-start $((STEPS / 6))
    curve "training in FP8 on the CPU" "$cpu" run-cpu-fp8 --fp8 hybrid --fp8-start $((STEPS / 6))
    verdict "GPU and CPU in FP8" near "$out"/run-{gpu,cpu}-fp8/log.jsonl 0.01
}

stage_speed() {
    local trainer model text
    untimed "the emulator's speed says nothing of a GPU's" && return
    trainer=$(make print-trainer)
    found "$trainer" || return
    [[ -s $out/data.bin ]] || { fail "speed" "there are no data; the stage train makes them"; return; }
    export -f timed
    for model in "${speeds[@]}"; do
        step "${model%%|*}" 120 bash -c "timed $trainer $out/data $out/tok $out/run-speed ${model#*|}" || continue
        text=$(speed "$out/run-speed/log.jsonl" 5)
        if [[ -n $text ]]; then row "" - "$text"; else fail "${model%%|*}" "its log has no five steps"; fi
    done
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
    for program in $programs; do  # small sizes and no timing on the emulator
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
    # Only kernels in namespace gpu, by their mangled names, not the libraries'. initcheck cannot see what library kernels
    # write, so it skips test_gpu_matmul. racecheck (2025.3) reports bulk copies that are not tensor copies as races, a
    # known problem with FlashAttention too: attention's backward on Hopper reads its statistics with one. Its findings are
    # only shown.
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
    began=$(now)
    "stage_$stage"
done
echo
echo "---- check_gpu.sh ${stages[*]}, $(date -u +%Y-%m-%d) ----"
cat "$out/table.txt"
exit $failed
