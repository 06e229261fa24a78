#!/usr/bin/env bash
# scripts/check_gpu.sh with fake programs and a fake make: a fault in any stage gives a row with FAILED and exit status 1, a
# hanging program is ended, a stage without time left says so, rows outlive a kill, unknown stages are refused.
root=$(realpath "$(dirname "$0")/..")
TRAIN_GPT=/bin/true
. "$root/test/lib.sh"

# A copy, with its own build/.
mkdir -p tree/scripts tree/build/cpu-bf16 tree/build/deps tree/llmc/x bin programs
cp "$root"/scripts/{check_gpu,gpu_steps}.sh tree/scripts/
touch tree/llmc/a.h tree/llmc/x/b.h tree/train_gpt.cu
for header in gtest/gtest.h nlohmann/json.hpp pcre2.h; do
    mkdir -p "tree/build/deps/include/$(dirname "$header")"
    touch "tree/build/deps/include/$header"
done

# program PATH: a script, from standard input.
program() {
    { echo '#!/bin/bash'; cat; } >"$1"
    chmod +x "$1"
}
# Fake make. FAULT=build, build-cpu: that build fails; no-trainer, no-bench: the printed path does not exist.
program bin/make <<'M'
case "$FAULT ${!#}" in
no-trainer\ print-trainer | no-bench\ print-benchmark) echo $PROGRAMS/none; exit ;;
esac
case "${!#}" in
print-gpu_programs) echo $GPU_PROGRAMS ;;
print-trainer) echo $PROGRAMS/train_gpt ;;
print-benchmark) echo $PROGRAMS/bench ;;
print-ladders) echo $LADDER_PROGRAMS ;;
build/cpu-*) [[ $FAULT != build-cpu ]] ;;
*) [[ $FAULT != build ]] ;;
esac
M
program bin/nvidia-smi <<<'echo "Stand-in, 1.0, 80 GiB"'
program bin/nvcc <<<'echo "release 13.0, V13.0.1"'
# The tool's name is the argument after --tool; the program comes after the options.
program bin/compute-sanitizer <<<'[[ $FAULT != $2 ]]'
program programs/test_gpu_good <<<'echo "[       OK ] A (0 ms)"; echo "[  PASSED  ] 1 test."'
program programs/test_gpu_bad <<<'echo "[       OK ] A (0 ms)"; echo "[  FAILED  ] B (0 ms)"; exit 1'
program programs/test_gpu_crash <<<'echo "[       OK ] A (0 ms)"; kill -SEGV $$'
program programs/test_gpu_silent <<<'exit 0'
program programs/test_gpu_hang <<<'trap "" TERM; echo begun; while :; do sleep 1; done'
program programs/bench <<<'echo "what the bench says"; [[ $FAULT != bench$1 ]]'
program programs/ladder_good <<<'echo "what the ladder says"'
program programs/ladder_bad <<<'exit 3'
# Fake training. FAULT: tokenizer, prepare, train: that command fails; bits: each run has other losses; far: the GPU's
# losses differ from the CPU's; nan, short: null losses, or one step too few in the log.
program programs/train_gpt <<'M'
[[ $FAULT != "$1" ]] || exit 5
[[ $1 == train ]] || { echo data >"$OUT/data.bin"; exit 0; }
while (($# > 1)); do
    case $1 in --out) out=$2 ;; --train-iters) steps=$2 ;; esac
    shift
done
[[ $FAULT != short ]] || steps=$((steps - 1))
mkdir -p "$out"
for ((i = 1; i <= steps; i++)); do
    loss=$((100 - i))
    [[ $FAULT != bits ]] || loss=$loss$RANDOM
    [[ $FAULT != far || $0 != *programs* ]] || loss=1$loss
    [[ $FAULT != far-fp8 || $0 != *programs* || $out != *fp8* ]] || loss=1$loss
    [[ $FAULT != nan ]] || loss=null
    [[ $FAULT != silent ]] || break
    echo "{\"kind\":\"step\",\"step\":$i,\"loss\":$loss,\"step_ms\":2.5,\"tokens_per_s\":1000,\"model_tflops\":300}"
done >"$out/log.jsonl"
M
cp programs/train_gpt tree/build/cpu-bf16/
export PATH=$work/bin:$PATH PROGRAMS=$work/programs OUT=$work/out STEPS=8 FAULT=
export GPU_PROGRAMS=$PROGRAMS/test_gpu_good LADDER_PROGRAMS=$PROGRAMS/ladder_good
check=$work/tree/scripts/check_gpu.sh
# row NAME PATTERN: the last run's table has this row.
row() {
    if grep -q "^$2" out/table.txt; then echo "ok: $1"; else echo "FAILED: $1: no '$2' in:"; cat out/table.txt; fi
}
# stage NAME STATUS STAGE...: the stages, starting with an empty table, exit with this status.
stage() {
    local name=$1 status=$2 got
    shift 2
    rm -f out/table.txt
    "$check" "$@" >out.txt 2>&1
    got=$?
    if [[ $got == "$status" ]]; then echo "ok: $name"; else echo "FAILED: $name: status $got, not $status"; cat out.txt; fi
}
# fault NAME FAULT STAGE PATTERN: the stage detects an injected fault.
fault() {
    FAULT=$2 stage "$1: status 1" 1 "$3"
    row "$1: a row" "$4"
}

stage "everything passes" 0
row "built" "build for the GPU *ok"
row "tests passed" "programs/test_gpu_good *ok *1 passed"
row "the same bits" "the same run twice *ok"
row "near losses" "GPU and CPU in FP8 *ok"
row "a speed" " *- *1000 tok/s, 300 TFLOP/s"
row "ladders" "ladder good *ok"
row "sanitized" "racecheck test_gpu_good *ok"
says "the bench's output is shown" "what the bench says"
says "the ladder's output is shown" "what the ladder says"
expect "no row says FAILED or skipped" refused grep 'FAILED\|skipped' out/table.txt

fault "a build that fails" build build "build for the GPU *FAILED *exit status 1"
row "the CPU's is built nevertheless" "build for the CPU *ok"
fault "a build for the CPU that fails" build-cpu build "build for the CPU *FAILED *exit status 1"
rm tree/build/deps/include/gtest/gtest.h
if echo '#include <gtest/gtest.h>' | g++ -E -x c++ - >/dev/null 2>&1; then echo "ok: skipped: this machine has every header"
else fault "a header that is missing" "" build "build *FAILED *these headers are missing: gtest/gtest.h"; fi

GPU_PROGRAMS="$PROGRAMS/test_gpu_bad $PROGRAMS/test_gpu_crash $PROGRAMS/test_gpu_silent $PROGRAMS/test_gpu_none $PROGRAMS/test_gpu_good"
stage "tests that fail: status 1" 1 tests
row "a test that fails" "programs/test_gpu_bad *FAILED *1 passed, 1 failed, exit status 1"
row "a crash" "programs/test_gpu_crash *FAILED *1 passed, 0 failed, exit status 139"
row "no test at all" "programs/test_gpu_silent *FAILED *0 passed"
row "a program that is not there" "programs/test_gpu_none *FAILED *it is not built"
row "the others run nevertheless" "programs/test_gpu_good *ok"

program programs/test_gpu_slow <<<'sleep 100'
GPU_PROGRAMS=$PROGRAMS/test_gpu_slow BUDGET=1 fault "a test that does not end" "" tests "programs/test_gpu_slow *FAILED .*not over after 1 s"
# A program that ignores SIGTERM.
GPU_PROGRAMS="$PROGRAMS/test_gpu_hang $PROGRAMS/test_gpu_good"
BUDGET=2 stage "a hang: status 1" 1 tests
row "a hang is cut" "programs/test_gpu_hang *FAILED *0 passed, 0 failed, .* within [12] s"
row "then the stage's time is over" "programs/test_gpu_good *skipped *the 2 s are over"

# The first row is there while the second program runs; a signal ends the script and its program, and the row stays.
GPU_PROGRAMS="$PROGRAMS/test_gpu_good $PROGRAMS/test_gpu_hang"
rm -f out/table.txt out/test_gpu_hang-programs.log
"$check" tests >out.txt 2>&1 &
running=$!
comes grep begun out/test_gpu_hang-programs.log
row "a row is written as soon as it is known" "programs/test_gpu_good *ok"
kill "$running"
began=$SECONDS
wait "$running"
status=$?
expect "a signal ends the script (status $status, $((SECONDS - began)) s)" test $status == 130 -a $((SECONDS - began)) -lt 5
row "rows outlive it" "programs/test_gpu_good *ok"

GPU_PROGRAMS=
stage "no programs: status 1" 1 tests
row "no programs" "tests *FAILED *make names no programs"
GPU_PROGRAMS=$PROGRAMS/test_gpu_good

fault "a tokenizer that fails" tokenizer train "tokenizer *FAILED *exit status 5"
fault "data that fail" prepare train "data *FAILED *exit status 5"
fault "a training that fails" train train "training on the GPU *FAILED *exit status 5"
row "and has no losses of a run before" "the same run twice *FAILED"
fault "other bits the second time" bits train "the same run twice *FAILED"
fault "a GPU far from the CPU" far train "GPU and CPU  *FAILED"
fault "FP8 far from the CPU" far-fp8 train "GPU and CPU in FP8 *FAILED"
row "and not bf16" "GPU and CPU  *ok"
fault "a trainer that is not built" no-trainer train "programs/none *FAILED *it is not built"
fault "losses that are no numbers" nan train "the same run twice *FAILED"
fault "a run that stops early" short train "the same run twice *FAILED *7 and 7 losses of 8"

echo data >out/data.bin
fault "a speed that crashes" train speed "GPT-2 124M.*FAILED *exit status 5"
fault "a log without steps" silent speed "GPT-2 124M.*FAILED *its log has no five steps"
fault "no trainer for speed" no-trainer speed "programs/none *FAILED *it is not built"
rm out/data.bin
fault "no data for speed" "" speed "speed *FAILED *there are no data"
fault "a benchmark of kernels that fails" bench--ops bench "benchmark of kernels *FAILED *exit status 1"
row "the other benchmark runs" "benchmark of steps *ok"
fault "a benchmark of steps that fails" bench--steps bench "benchmark of steps *FAILED *exit status 1"
fault "a benchmark that is not built" no-bench bench "programs/none *FAILED *it is not built"
LADDER_PROGRAMS="$PROGRAMS/ladder_bad $PROGRAMS/ladder_good"
fault "a ladder that fails" "" ladders "ladder bad *FAILED *exit status 3"
row "the other ladder runs" "ladder good *ok"
LADDER_PROGRAMS='' fault "no ladders" "" ladders "ladders *FAILED *make names no programs"
LADDER_PROGRAMS=$PROGRAMS/none fault "a ladder that is not built" "" ladders "programs/none *FAILED *it is not built"
for tool in memcheck synccheck initcheck racecheck; do fault "a finding of $tool" $tool sanitize "$tool test_gpu_good *FAILED *exit status 1"; done

GPU_PROGRAMS='' fault "nothing to sanitize" "" sanitize "sanitize *FAILED *make names no programs"
GPU_PROGRAMS=$PROGRAMS/none fault "what is not built is not sanitized" "" sanitize "programs/none *FAILED *it is not built"
LADDER_PROGRAMS=$PROGRAMS/ladder_good
FAULT=racecheck stage "a fault in the last of all stages: status 1" 1
row "after stages that pass" "ladder good *ok"
row "is in the same table" "racecheck test_gpu_good *FAILED"

stage "an unknown stage: status 2" 2 tests nonsense
says "and which there are" "there is no stage 'nonsense'; there are build, tests"
program bin/nvidia-smi <<<'exit 9'
stage "no GPU: status 1" 1 tests
says "and what to do" "nvidia-smi finds no GPU"
BACKEND=emu stage "the emulator in its place" 0 tests train bench speed sanitize
for name in bench speed sanitize; do row "$name on the emulator" "$name *skipped"; done
