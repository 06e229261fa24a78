#!/usr/bin/env bash
# scripts/gpu_minutes.sh with a pack of fake programs: each experiment has a row with its prediction; a test that fails,
# crashes or hangs, a benchmark that fails, hangs or is missing, or a training run that differs gives a row with FAILED that
# keeps earlier results; missing tools are skipped by name; rows outlive a kill; too few GPUs are refused.
# ALL=1: also with the emulator's programs, from a pack made by scripts/gpu_pack.sh.
root=$(realpath "$(dirname "$0")/..")
TRAIN_GPT=/bin/true
. "$root/test/lib.sh"
mkdir pack bin
cp "$root"/scripts/gpu_{minutes,steps}.sh pack/
echo v1 >pack/VERSION

# program PATH: a script, from standard input.
program() {
    { echo '#!/bin/bash'; cat; } >"$1"
    chmod +x "$1"
}
program bin/nvidia-smi <<'M'
[[ $FAULT != no-gpu ]] || exit 9
case $* in
    -L) echo "GPU 0: NVIDIA ${CARD:-H100}" ;;
    *clocks.sm*) echo "1430 MHz, 700.00 W, 60" ;;
    *memory.used*) echo 77000 ;;
    *) for i in $(seq "${GPUS:-1}"); do echo "NVIDIA H100, 81559 MiB, 580, 700 W, 1980 MHz"; done ;;
esac
M
# The program comes after the options.
program bin/compute-sanitizer <<<'[[ $FAULT != memcheck ]] || exit 9; while [[ $1 != */gpu_tests ]]; do shift; done; "$@"'
program bin/ncu <<'M'
[[ $FAULT != ncu ]] || { echo "==ERROR== no counters"; exit 1; }
echo '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","kernel","GPU Speed Of Light","L1/TEX Cache Throughput","%","81.5"'
M
program pack/bench <<'M'
echo '{"backend":"cuda","device":"stand-in","TFLOP/s":700.5,"copy_GB/s":2999.6,"read_GB/s":2000}'
[[ $FAULT != "bench$1" ]] || { echo "error: no memory" >&2; exit 3; }
case $1 in
    --bounds) sleep 1 ;;
    --profile) for op in attention adamw step; do echo "{\"name\":\"$2, $3x$4\",\"op\":\"$op\",\"calls\":1,\"ms\":2.5,\"share\":0.25,\"tokens_per_s\":1000}"; done ;;
    *) echo '{"name":"gpt2-124m qkv","variant":"first suggestion","ms":2,"value":500,"unit":"TFLOP/s"}'
       echo '{"name":"gpt2-124m fc1","variant":"first suggestion","ms":1,"value":800,"unit":"TFLOP/s"}'
       echo '{"name":"last","note":"skipped: the 5 seconds were over"}' ;;
esac
[[ $FAULT != "hang$1" && $FAULT != hang ]] || sleep 100
M
# Fake tests, one per process; fake training. FAULT: bits: each run has other losses; far: the GPU's differ from the CPU's.
program pack/gpu_tests <<'M'
if [[ $1 != train_gpt ]]; then
    echo "[ RUN      ] A.${GTEST_SHARD_INDEX}"
    case $FAULT$GTEST_SHARD_INDEX in
        test2) echo "[  FAILED  ] A.2 (0 ms)"; exit 1 ;;
        crash1) kill -SEGV $$ ;;
        hang3) sleep 100 ;;
    esac
    echo "[       OK ] A.${GTEST_SHARD_INDEX} (0 ms)"; echo "[  PASSED  ] 1 test."; exit
fi
[[ $FAULT != train ]] || { echo "error: out of memory" >&2; exit 5; }
echo "  total   75.5 GiB"
while (($# > 1)); do
    case $1 in --out) out=$2 ;; --train-iters) steps=$2 ;; esac
    shift
done
mkdir -p "$out"
for ((i = 1; i <= steps && i <= 8; i++)); do
    loss=$((100 - i))
    [[ $FAULT != bits ]] || loss=$loss$RANDOM
    [[ $FAULT != far ]] || loss=1$loss
    echo "{\"kind\":\"step\",\"step\":$i,\"loss\":$loss,\"step_ms\":2.5,\"tokens_per_s\":1000,\"model_tflops\":300}"
done >"$out/log.jsonl"
((steps < 1000)) || sleep 100
M
cp pack/gpu_tests pack/gpu_tests_fp32
for ladder in adamw classifier rmsnorm_backward attention gemm; do program "pack/ladder_$ladder" <<<'echo "rung 4: 98% of copy"'; done
for ((i = 1; i <= 8; i++)); do echo "{\"kind\":\"step\",\"step\":$i,\"loss\":$((100 - i)),\"step_ms\":2.5}"; done | tee pack/cpu.jsonl >pack/cpu-fp8.jsonl
export PATH=$work/bin:$PATH OUT=$work/out STEPS=8 FAULT=
# part NAME STATUS ARGUMENT...: the experiments, starting with an empty table, exit with this status.
part() {
    local name=$1 status=$2 got
    rm -rf out
    pack/gpu_minutes.sh "${@:3}" >out.txt 2>&1
    got=$?
    if [[ $got == "$status" ]]; then echo "ok: $name"; else echo "FAILED: $name: status $got, not $status"; cat out.txt; fi
}
# row NAME PATTERN: the last table has this row.
row() {
    if grep -q "^| .*$2" out/table.md; then echo "ok: $1"; else echo "FAILED: $1: no '$2' in:"; cat out/table.md; fi
}
# fault NAME FAULT EXPERIMENT PATTERN: the experiment detects an injected fault.
fault() {
    FAULT=$2 part "$1: status 1" 1 "$3"
    row "$1: a row" "FAILED: .*$4"
}

part "everything passes" 0 first
expect "a row for each experiment" test "$(grep -c '^| .* ok, [0-9]* s: ' out/table.md)" == 10
expect "the card, the commit" grep -q "^## 20.*NVIDIA H100, 81559 MiB.*; first; commit v1" out/table.md
row "with what was predicted, and what it decides" "cuBLASLt 8192^3.*690-730.*this clock, not 989"
row "the clock under load" "copy 3000 GB/s; under load: 1430 MHz, 700.00 W"
row "tests of both precisions" "bf16: 4 passed, 0 failed; fp32: 4 passed, 0 failed"
row "products: the rate of all together" "gpt2-124m: first suggestion 600; 1 figures skipped"
row "a step by op" "gpt2-124m, 64x1024: 2.5 ms, 1000 tok/s: attention 25% adamw 25%"
row "speeds" "Llama 1B, 16x2048, FP8: 1000 tok/s"
row "memory against the plan" "peak 75.2 GiB, planned 75.5 GiB"
row "the same digits" "twice: every loss has the same digits; and the CPU: mean difference of a loss: 0.0000"
row "counters" "L1/TEX Cache Throughput 81.5"
expect "figures as lines of JSON" test "$(grep -c '^{' out/figures.jsonl)" -gt 20
expect "at most 8 files to bring back" test "$(find out -type f | wc -l)" -le 8
part "the second part" 0 second
row "ladders" "adamw rung 4: 98% of copy"
row "the own product" "gemm rung 4: 98% of copy"
row "7B with its state on the host" "7B in FP8, bf16 state on the host: 1000 tok/s"
row "and with its gradients" "7B, bf16 state and gradients on the host: 1000 tok/s, .*; peak 75.2 GiB, planned 75.5 GiB.*6.6k tok/s in 20.2 GiB.*24 GB"
row "what is for another card is skipped" "skipped: this is no H200"
CARD=H200 part "on an H200" 0 h200 h200_7b
row "all logits at once" "124M, logits of all rows: 1000 tok/s"

fault "a test that fails" test tests "exit status 1; bf16: FAILED A.2; bf16: 3 passed, 1 failed; fp32"
fault "a crash" crash tests "bf16: process 1 ended with status 139 in A.1"
BUDGET=20 fault "a test that hangs" hang tests "process 3 ended with status 124 in A.3.*3 passed, 0 failed"
fault "a finding of memcheck" memcheck memcheck "memcheck: process 0 ended with status 9"
for name in attention gemms profile experts; do
    fault "bench --$name that fails" "bench--$name" $name "exit status 3: error: no memory"
done
BUDGET=15 fault "a bench that hangs" hang--gemms gemms "exit status 124.*first suggestion 600"  # earlier results are kept
mv pack/bench bench
fault "a program that is not there" "" gemms "bench is not in .*make gpu-pack builds it"
mv bench pack/
fault "a training that fails" train speed "Llama 1B, 16x2048: FAILED: exit status 5: error: out of memory"
fault "other bits the second time" bits same "twice: 8 and 8 losses of 8, where they differ"
fault "a GPU far from the CPU" far same "and the CPU: mean difference and steps: 100"
fault "no counters" ncu ncu "nothing was measured: ==ERROR== no counters"
FAULT=bench--attention part "the others run nevertheless: status 1" 1 attention gemms
row "and have a row" "ok, .*gpt2-124m: first suggestion"
mv bin/ncu bin/compute-sanitizer .
expect "tools that are not there" env PATH="$work/bin:/usr/bin:/bin" pack/gpu_minutes.sh ncu memcheck
says "are skipped by name" "skipped: there is no ncu"
says "each" "skipped: there is no compute-sanitizer"
mv ncu compute-sanitizer bin/

# Time runs out in the middle: earlier rows stay; experiments without time left say so.
FAULT=hang BUDGET=4 part "no time left: status 1" 1 attention gemms profile ncu
row "is said" "skipped: the 4 s are over"
rm -rf out
FAULT=hang--attention pack/gpu_minutes.sh clock attention gemms >out.txt 2>&1 &
running=$!
comes grep -q 'under load' out/table.md
kill "$running"
began=$SECONDS
wait "$running"
status=$?
expect "a signal ends it (status $status, $((SECONDS - began)) s)" test $status == 130 -a $((SECONDS - began)) -lt 30
row "rows outlive it" "under load: 1430"

part "an unknown experiment: status 2" 2 nonsense
says "says where to look" "no experiment 'nonsense'; HINT: --list"
part "the list" 0 --list
says "has them all" "second *40  *h200_7b"
part "nothing asked for: status 2" 2
FAULT=no-gpu part "no GPU: status 1" 1 first
says "says so" "nvidia-smi finds no GPU"
part "a node of one GPU: status 1" 1 node
says "says how many it needs" "node needs 8 GPUs, nvidia-smi finds 1"
program bin/mpirun <<<'while [[ $1 != */gpu_tests ]]; do shift; done; exec "$@"'
GPUS=8 part "a node" 0 node
row "ZeRO-1 on 8" "ZeRO-1 on 8: 1000 tok/s"
row "interleaved stages" "PP 8, VPP 2, 32 connections: 1000 tok/s.*; PP 8, VPP 2, 8 connections: 1000 tok/s"
row "a rank that is killed" "ended after [01] s with status 137"
row "without nccl-tests" "skipped: there is no all_reduce_perf"

[[ -n ${ALL:-} ]] || exit 0
cd "$root" || exit 1
export OMP_WAIT_POLICY=passive
rehearse() { BACKEND=emu OUT=$work/emulated STEPS=4 scripts/gpu_pack.sh; }
expect "a pack of the emulator's programs" rehearse
BACKEND=emu STEPS=4 BUDGET=3600 expect "rehearsed on the emulator" "$work/emulated/gpu_minutes.sh" clock attention gemms profile speed whole7b
