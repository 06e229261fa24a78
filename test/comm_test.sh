#!/usr/bin/env bash
# Processes and collectives (llmc/parallel/world.h, comm_*): the checks of test/comm_check.cu on 1 to 4 ranks, several
# processes started without MPI, and how a run ends if a rank is missing, dies, gives up, or calls something else than the
# others.
#   COMM_CHECK="build/cpu-bf16/host_tests build/emu-bf16/gpu_tests" test/comm_test.sh        MPIRUN=mpirun  SAN=thread
programs=()
for program in ${COMM_CHECK:-build/cpu-bf16/host_tests build/emu-bf16/gpu_tests}; do programs+=("$(realpath "$program")"); done
source=$(dirname "$(realpath "$0")")/..
TRAIN_GPT=/bin/true
. "$source/test/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export OMPI_MCA_odls_base_sigkill_timeout=0  # otherwise mpirun takes a second to end a failed run
export ASAN_OPTIONS=detect_leaks=0  # MPI does not free all its memory
check=${programs[0]}

# fails NAME PATTERN COMMAND...: all processes exit with an error and this message within 10 seconds. A status of 124 or
# more means that they were killed or crashed.
fails() {
    local name=$1 pattern=$2 status start=$SECONDS
    shift 2
    "$@" >run.txt 2>&1
    status=$?
    if [[ $status != 0 && $status -lt 124 && $((SECONDS - start)) -le 10 ]] && grep -q -- "$pattern" run.txt; then
        echo "ok: $name"
    else
        echo "FAILED: $name: status $status after $((SECONDS - start)) s; wanted: '$pattern'"
        tail -n 20 run.txt
    fi
}
# mpi N ARGUMENTS...: runs the check under mpirun. A killed rank gives status 137.
mpi() {
    local n=$1 status
    shift
    timeout -k 1 60 "$MPIRUN" -n "$n" "$check" comm_check "$@"
    status=$?
    [[ $status == 137 ]] && return 1
    return "$status"
}

# ---- processes not started by MPI: a single one runs, several are refused ----
passes "alone" "$check" comm_check world
passes "torchrun, one process" env RANK=0 WORLD_SIZE=1 "$check" comm_check world
passes "in a batch script of SLURM" env SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8 "$check" comm_check world
passes "srun, one task" env SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 "$check" comm_check world
fails "torchrun: refused" "WORLD_SIZE is 2, .*one of 2 processes.*HINT: mpirun -n 2 " env RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost "$check" comm_check world
fails "srun without --mpi: refused" "SLURM_STEP_NUM_TASKS is 4, .*srun --mpi=pmix" env SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 "$check" comm_check world
fails "a number that is none" "WORLD_SIZE is '2x'; it must be a whole number" env WORLD_SIZE=2x "$check" comm_check world
OMPI_COMM_WORLD_SIZE=3 fails "another MPI's launcher" "the launcher started 3 processes, but MPI sees 1" "$check" comm_check world

# ---- MPI. ThreadSanitizer does not understand it ----
if [[ ${SAN:-} == *thread* ]]; then
    echo "ok: skipped: MPI with ThreadSanitizer"
    exit 0
fi
if ! command -v "$MPIRUN" >/dev/null; then
    echo "FAILED: MPI is not installed ($MPIRUN); install it with: $(realpath "$source")/scripts/install_deps.sh"
    exit 1
fi
export EMU_NCCL_TIMEOUT=60
for check in "${programs[@]}"; do
    name=$(basename "$(dirname "$check")")
    most=4
    # NCCL needs a GPU per rank.
    [[ $name == cuda* ]] && most=$(nvidia-smi -L 2>/dev/null | wc -l)
    for n in 1 2 3 4; do [[ $n -le $most ]] && passes "$name, $n ranks" mpi $n all; done
    [[ $most -ge 3 ]] || continue
    TRAIN_GPT_COMM_PIECE=1000 EMU_NCCL_PIECE=1000 passes "$name, 3 ranks, pieces of 1000 bytes" mpi 3 all
    TRAIN_GPT_CHECK_COMM=1 passes "$name, 3 ranks, compared" mpi 3 all
    passes "$name, 3 ranks" mpi 3 waiting
    TRAIN_GPT_CHECK_COMM=1 passes "$name, 3 ranks, compared" mpi 3 waiting

    fails "$name: a rank that does not come" "rank [01] of 3 (host .*): waited 2 s in all_reduce number 2 of group tensor" mpi 3 late_in_group 2 status
    expect "$name: what it does instead" grep -q "rank 2 of 3 (host .*): computing for [12] s after all_reduce number 1 of group tensor" run.txt
    fails "$name: and in the World" "rank [01] of 3 (host .*): waited 2 s in barrier number 5 of group world" mpi 3 late 2 status
    fails "$name: and for what was started" "rank [01] of 3 (host .*): waited 2 s in all_gather number 2 of group tensor" mpi 3 late_started 2 status
    passes "$name: a suspended job does not wait" mpi 2 suspended 0 status
    fails "$name: and of a driver that does not answer" "rank [0-2] of 3 (host .*): waited 2 s in a question to the GPU's driver" mpi 3 late_driver 2 status
    fails "$name: a message that does not come" "rank 0 of 2 (host .*): waited 2 s in recv number 1 of group pipeline" mpi 2 late_message 1 status
    if [[ $name == emu* ]]; then
        EMU_PCI_BUS_ID=0000:01:00.0 fails "$name: two ranks on one GPU" "ranks 0 and 1 share the GPU 0000:01:00.0 of host" mpi 2 kill_in_group 3
        passes "$name: a long kernel is no wait" mpi 2 long_kernel 0 status
        rm -f choices.txt && passes "$name: 4 ranks choose algorithms" mpi 4 choices choices.txt
        # On each of 8 ranks, communicators: tensor, data, stages, key/value heads, embedding and 4 edges; streams: the
        # ops', one for data parallelism, 2 for sends.
        # shellcheck disable=SC2016  # the inner shell expands it
        passes "$name: 8 ranks" timeout -k 1 100 "$MPIRUN" -n 8 bash -c 'EMU_CALLS=calls.$OMPI_COMM_WORLD_RANK exec "$0" comm_check groups' "$check"
        expect "$name: events are used again" awk '/^cudaEventCreateWithFlags / { n++; bad += $2 > 100 } END { exit bad || n < 8 }' calls.*
        expect "$name: 9 communicators and 4 streams each" test "$(cat calls.* | grep -c "ncclCommInitRankConfig 9$\|cudaStreamCreateWithFlags 4$")" = 16
        EMU_NCCL_HANG=2:6 fails "$name: an error that NCCL meets later" "error: rank [01] of 3 (host .*): all_reduce number 2 of group tensor failed: remote process exited" mpi 3 late_in_group 2 status
    fi
    for who in 0 1; do
        fails "$name: rank $who is killed" "process rank $who .* exited on signal 9 (Killed)" mpi 3 kill $who
        fails "$name: rank $who is killed while the others compute" "process rank $who .* exited on signal 9" mpi 3 kill_while_computing $who
        fails "$name: rank $who is killed while the others wait for its part" "process rank $who .* exited on signal 9" mpi 3 kill_in_group $who
    done
    fails "$name: a rank gives up" "" mpi 3 abort 2
    mpi 3 abort 2 >/dev/null 2>&1
    expect "$name: with its status" test $? == 3
    fails "$name: a rank has an error" "error: rank 1 of 3 (host .*): rank 1 does not like it" mpi 3 throw 1
    fails "$name: and leaves its world" "error: rank 1 does not like it" mpi 3 unwind 1
    fails "$name: different operations of the world" "rank . is in .* number [12] of the world, rank . in" mpi 3 mix_world 1
    fails "$name: different sizes" "rank . gathers [45] bytes, rank . [45]" mpi 3 mix_bytes 2
    fails "$name: different groups" "rank 1 'tensor: 1'" mpi 3 mix_groups 1
    export TRAIN_GPT_CHECK_COMM=1
    fails "$name: different counts" "rank . is in all_reduce of \(99\|100\) elements of 4 bytes (number 1), rank . in all_reduce of" mpi 3 mix_counts 1
    fails "$name: different operations" "in group tensor: rank .* in reduce_scatter of" mpi 2 mix_operations 1
    unset TRAIN_GPT_CHECK_COMM
    [[ $name == cuda* ]] && continue
    fails "$name: messages of different sizes" "rank 1 expects 180 bytes with tag 5 from rank 0, which sends 200\|rank . of 2 (host .*): \(recv\|send\) number 1 of group pipeline failed: invalid argument (nccl\(Recv of 90\|Send of 100\)" mpi 2 mix_messages
    [[ $name == cpu* ]] && fails "$name: messages with different tags" "with tag 6 from rank 0, which sends 200 with tag 5" mpi 2 mix_tags
done
exit 0
