#!/usr/bin/env bash
# Every layout of 2 and 4 ranks against one rank (test/parity_check.cu): on the CPU in fp32, and the main ones on the GPU's trainer,
# on the emulator with NCCL over MPI.
#   PARITY_CHECK="build/cpu-fp32/parity_check build/emu-bf16/parity_check" test/parity_test.sh      RANKS="2 4 8"
programs=()
for program in ${PARITY_CHECK:-build/cpu-fp32/parity_check build/emu-bf16/parity_check}; do programs+=("$(realpath "$program")"); done
TRAIN_GPT=/bin/true
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 EMU_DEVICES=8  # MPI keeps some memory

for program in "${programs[@]}"; do
    build=$(basename "$(dirname "$program")") which=all
    [[ $build == cpu* ]] || which=main
    mkdir "$build"
    passes "$build" timeout -k 1 400 "$program" "$build" reference
    for n in ${RANKS:-2 4}; do passes "$build" timeout -k 1 400 "$MPIRUN" -n "$n" "$program" "$build" "$which"; done
done
