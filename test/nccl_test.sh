#!/usr/bin/env bash
# The emulated NCCL (test/emu/nccl.h): the checks of test/emu/nccl_check.cpp on 1, 2 and 4 ranks, and how a run ends if a
# rank waits forever or gives up. Each launch has 60 seconds.
#   test/nccl_test.sh        MPICXX=mpicxx MPIRUN=mpirun
source=$(dirname "$(realpath "$0")")/..
TRAIN_GPT=/bin/true
. "$source/test/lib.sh"
MPICXX=${MPICXX:-mpicxx} MPIRUN=${MPIRUN:-mpirun}
if ! command -v "$MPICXX" >/dev/null || ! command -v "$MPIRUN" >/dev/null; then
    echo "FAILED: MPI is not installed ($MPICXX, $MPIRUN); install it with: $(realpath "$source")/scripts/install_deps.sh test"
    exit 1
fi
allow_mpirun_everywhere
export EMU_NCCL_TIMEOUT=30

build() {
    "$MPICXX" -std=c++17 -O1 -g -Wall -Wextra -Werror -Wno-unknown-pragmas -DBACKEND_EMU -I"$source" -I"$source/test/emu" \
        "$source/test/emu/nccl_check.cpp" -o nccl_check
}
expect "builds" build
[[ -x nccl_check ]] || exit 1

passes "no launcher" timeout 300 ./nccl_check
for n in 1 2 4; do passes "$n ranks" timeout 300 "$MPIRUN" -n $n ./nccl_check; done
passes "4 ranks, messages of 12 bytes" timeout 300 env EMU_NCCL_PIECE=12 "$MPIRUN" -n 4 ./nccl_check short
passes "2 ranks, MPI left to the library" timeout 300 "$MPIRUN" -n 2 ./nccl_check lazy

# A send that nobody receives waits; the other rank waits at a barrier.
EMU_NCCL_TIMEOUT=1 expect "a send that nobody receives ends with an error" refused timeout 300 "$MPIRUN" -n 2 ./nccl_check hang
says "it says what it waits for" "nothing has moved for 1 s: ncclSend of 4 float32 to rank 1 as rank 0 of 2"
# On one connection to the GPU, a receive waits for the send before it, on whatever streams they are.
CUDA_DEVICE_MAX_CONNECTIONS=1 EMU_NCCL_TIMEOUT=3 expect "streams that share a connection wait for each other" refused timeout 300 "$MPIRUN" -n 2 ./nccl_check short
says "it says what waits" "nothing has moved for 3 s: ncclSend of 1024 float32 to rank 1 as rank 0 of 2"
ends_with() { # STATUS COMMAND...
    local wanted=$1
    shift
    "$@"
    [[ $? == "$wanted" ]]
}
EMU_NCCL_TIMEOUT=60 expect "a rank that gives up ends the others, with its status" ends_with 3 timeout 300 "$MPIRUN" -n 2 ./nccl_check die
