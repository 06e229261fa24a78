#!/usr/bin/env bash
# Layouts of several ranks compared with one rank (test/parity_check.cu): on the CPU in fp32 some of 2 and 4 ranks; for the
# GPU's trainer, on the emulator with NCCL over MPI, some of 4. ALL=1 (make test-all): on the CPU every one of 2, 4 and 8, and
# the main ones of 2 and 4 on the GPU's trainer.
#   PARITY_CHECK="build/cpu-fp32/fp32_tests build/emu-bf16/gpu_tests" test/parity_test.sh      ALL=1
programs=()
for program in ${PARITY_CHECK:-build/cpu-fp32/fp32_tests build/emu-bf16/gpu_tests}; do programs+=("$(realpath "$program")"); done
TRAIN_GPT=/bin/true
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 EMU_DEVICES=8  # MPI does not free all its memory

for program in "${programs[@]}"; do
    build=$(basename "$(dirname "$program")")
    mkdir "$build"
    passes "$build" timeout -k 1 900 "$program" parity_check "$build" reference
    for n in 2 4 8; do
        which=some
        [[ -z ${ALL:-} ]] || which=main
        [[ $build != cpu* || -z ${ALL:-} ]] || which=all
        [[ $n == 4 || $which == all || ($n == 2 && ($build == cpu* || -n ${ALL:-})) ]] || continue
        passes "$build" timeout -k 1 900 "$MPIRUN" -n "$n" "$program" parity_check "$build" "$which"
    done
done
