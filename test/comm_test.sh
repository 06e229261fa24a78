#!/usr/bin/env bash
# Processes and collectives (llmc/world.h, llmc/*/comm.*): the checks of test/comm_check.cu on 1 to 4 ranks over MPI, the World
# over TCP, and how runs end in which a rank does not come, dies, gives up, or does something else than the others.
#   COMM_CHECK="build/cpu-bf16/comm_check build/emu-bf16/comm_check" test/comm_test.sh        MPIRUN=mpirun  SAN=thread
programs=()
for program in ${COMM_CHECK:-build/cpu-bf16/comm_check build/emu-bf16/comm_check}; do programs+=("$(realpath "$program")"); done
source=$(dirname "$(realpath "$0")")/..
TRAIN_GPT=/bin/true
. "$source/test/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export OMPI_MCA_odls_base_sigkill_timeout=0  # else a run that fails takes mpirun a second
export ASAN_OPTIONS=detect_leaks=0  # MPI keeps some memory
check=${programs[0]}

# fails NAME PATTERN COMMAND...: all processes end with an error within 10 seconds, and say so. 99: see below; from 124 on, they
# had to be ended, or crashed.
fails() {
    local name=$1 pattern=$2 status start=$SECONDS
    shift 2
    "$@" >run.txt 2>&1
    status=$?
    if [[ $status != 0 && $status != 99 && $status -lt 124 && $((SECONDS - start)) -le 10 ]] && grep -q -- "$pattern" run.txt; then
        echo "ok: $name"
    else
        echo "FAILED: $name: status $status after $((SECONDS - start)) s; wanted: '$pattern'"
        tail -n 20 run.txt
    fi
}
# mpi N ARGUMENTS...: under mpirun. A rank that is killed shows as 137.
mpi() {
    local n=$1 status
    shift
    timeout -k 1 60 "$MPIRUN" -n "$n" "$check" "$@"
    status=$?
    [[ $status == 137 ]] && return 1
    return "$status"
}
# processes VARIABLES... -- ARGUMENTS...: a plain process for each word VARIABLES ("RANK=0,WORLD_SIZE=2"), with these in its
# environment. Returns the largest status; 99 if one failed while another ended well.
processes() {
    local started=() environments=() worst=0 well=0 status
    while [[ $1 != -- ]]; do environments+=("$1"); shift; done
    shift
    for environment in "${environments[@]}"; do
        env ${environment//,/ } timeout -k 1 15 "$check" "$@" &
        started+=($!)
    done
    for process in "${started[@]}"; do
        wait "$process" 2>/dev/null
        status=$?
        [[ $status == 137 ]] && status=1
        [[ $status == 0 ]] && well=1
        [[ $status -gt $worst ]] && worst=$status
    done
    [[ $worst != 0 && $well == 1 ]] && worst=99
    return "$worst"
}
# tcp N ARGUMENTS...: N plain processes that meet by a file.
tcp() {
    local n=$1 environments=()
    shift
    for rank in $(seq "$((n - 1))" -1 0); do environments+=("RANK=$rank,WORLD_SIZE=$n,TRAIN_GPT_WORLD_FILE=world"); done
    processes "${environments[@]}" -- "$@"
}
new_port() { port=$((20000 + RANDOM % 10000)); }

# ---- plain processes ----
passes "alone" "$check" world
passes "3 processes, TCP by a file" tcp 3 world
expect "the file is removed" test ! -e world
echo "$(hostname):1 12345" >world
passes "a file that was left over" tcp 2 world
new_port
passes "3 processes, TCP by MASTER_ADDR" processes {RANK=0,RANK=1,RANK=2},WORLD_SIZE=3,MASTER_ADDR=localhost,MASTER_PORT=$port -- world
passes "as torchrun starts them" processes {RANK=0,RANK=1},WORLD_SIZE=2,MASTER_ADDR=127.0.0.1,MASTER_PORT=$((port + 20)),TORCHELASTIC_RUN_ID=x -- world
passes "as srun starts them" processes {SLURM_PROCID=0,SLURM_PROCID=1},SLURM_STEP_NUM_TASKS=2,SLURM_LAUNCH_NODE_IPADDR=127.0.0.1,SLURM_JOB_ID=$port -- world

fails "a rank beyond the world" "RANK is 2 and WORLD_SIZE is 2" processes RANK=2,WORLD_SIZE=2 -- world
fails "a rank without a world" "WORLD_SIZE is not set" processes RANK=0 -- world
fails "a rank that is no number" "RANK is '1x'; it must be a whole number" processes RANK=1x,WORLD_SIZE=2 -- world
fails "no address" "HINT: set MASTER_ADDR" processes RANK=1,WORLD_SIZE=2 -- world
new_port
at=MASTER_ADDR=127.0.0.1,MASTER_PORT=$port
export TRAIN_GPT_JOIN_TIMEOUT=1
fails "nobody listens" "rank 1 of 2 (host .*) did not reach rank 0 at 127.0.0.1:$port within 1 s: Connection refused" processes RANK=1,WORLD_SIZE=2,$at -- world
fails "an address that is not known" "the name 'no.such.host.invalid' is not known" processes RANK=1,WORLD_SIZE=2,MASTER_ADDR=no.such.host.invalid,MASTER_PORT=$port -- world
export TRAIN_GPT_JOIN_TIMEOUT=2
fails "a rank is missing" "rank 2 of 3 did not come to rank 0 (host .*, port $port) within 2 s; here: 0, 1 " processes {RANK=0,RANK=1},WORLD_SIZE=3,$at -- world
expect "and another one hears of it" grep -q "rank 1 of 3 (host .*) was refused: rank 2" run.txt
fails "different sizes" "rank 1 of 3 (host .*) came to rank 0 of 2" processes RANK=0,WORLD_SIZE=2,$at RANK=1,WORLD_SIZE=3,$at -- world
fails "a rank that comes twice" "rank 1 of 3 came twice" processes {RANK=0,RANK=1,RANK=1},WORLD_SIZE=3,$at -- world
export TRAIN_GPT_JOIN_TIMEOUT=1
fails "a port in use" "cannot listen at port $port: Address already in use" processes {RANK=0,RANK=0},WORLD_SIZE=2,$at -- world
fails "another run at the same port" "did not reach rank 0 at .*: another run listens there" processes WORLD_SIZE=2,$at,RANK=0,TORCHELASTIC_RUN_ID=x,TRAIN_GPT_JOIN_TIMEOUT=2 WORLD_SIZE=2,$at,RANK=1,TORCHELASTIC_RUN_ID=y -- world
fails "a file that cannot be written" "cannot write TRAIN_GPT_WORLD_FILE /proc/none" processes RANK=0,WORLD_SIZE=2,TRAIN_GPT_WORLD_FILE=/proc/none -- world
fails "tensors of CPUs need MPI" "need MPI" tcp 2 all
unset TRAIN_GPT_JOIN_TIMEOUT

for who in 0 1; do
    fails "TCP: rank $who is killed" "because of rank $who of 3 (host .*): it was killed" tcp 3 kill $who
    expect "TCP: every other one says so" test "$(grep -c "ends because of rank $who of 3" run.txt)" == 2
    fails "TCP: rank $who is killed while the others compute" "because of rank $who of 3" tcp 3 kill_while_computing $who
    fails "TCP: rank $who gives up" "because of rank $who of 3 (host .*): it gave up" tcp 3 abort $who
    tcp 3 abort $who >/dev/null 2>&1
    expect "TCP: with its status" test $? == 3
    fails "TCP: rank $who has an error" "error: rank $who of 3 (host .*): rank $who does not like it" tcp 3 throw $who
    fails "TCP: and leaves its world" "error: rank $who does not like it" tcp 3 unwind $who
done
fails "TCP: a rank that does not come" "rank [01] of 3 (host .*): waited 2 s in barrier number 4 of group world" tcp 3 late 2 status
expect "TCP: what it does instead" grep -q "rank 2 of 3 (host .*): computing for [12] s after barrier number 3 of group world" run.txt
expect "TCP: what another one does" grep -q "^  rank [01] of 3 (host .*): waiting for [12] s in barrier number 4" run.txt
fails "TCP: different operations" "rank . is in .* number 1 of the world, rank . in .* number 1" tcp 3 mix_world 1
fails "TCP: different sizes" "rank . gathers [45] bytes, rank . [45]" tcp 3 mix_bytes 2
fails "TCP: different groups" "makes 'tensor: 0 1 2', rank 1 makes 'tensor: 1'" tcp 3 mix_groups 1

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
    # NCCL wants a GPU for each rank.
    [[ $name == cuda* ]] && most=$(nvidia-smi -L 2>/dev/null | wc -l)
    for n in 1 2 3 4; do [[ $n -le $most ]] && passes "$name, $n ranks" mpi $n all; done
    [[ $most -ge 3 ]] || continue
    TRAIN_GPT_COMM_PIECE=1000 EMU_NCCL_PIECE=1000 passes "$name, 3 ranks, pieces of 1000 bytes" mpi 3 all
    TRAIN_GPT_CHECK_COMM=1 passes "$name, 3 ranks, compared" mpi 3 all

    fails "$name: a rank that does not come" "rank [01] of 3 (host .*): waited 2 s in all_reduce number 2 of group tensor" mpi 3 late_in_group 2 status
    expect "$name: what it does instead" grep -q "rank 2 of 3 (host .*): computing for [12] s after all_reduce number 1 of group tensor" run.txt
    fails "$name: a rank is killed" "signal 9 (Killed)" mpi 3 kill_in_group 1
    fails "$name: a rank gives up" "" mpi 3 abort 2
    mpi 3 abort 2 >/dev/null 2>&1
    expect "$name: with its status" test $? == 3
    fails "$name: a rank has an error" "error: rank 1 of 3 (host .*): rank 1 does not like it" mpi 3 throw 1
    fails "$name: and leaves its world" "error: rank 1 does not like it" mpi 3 unwind 1
    fails "$name: different operations of the world" "rank . is in .* number [12] of the world, rank . in" mpi 3 mix_world 1
    fails "$name: different groups" "rank 1 makes 'tensor: 1'" mpi 3 mix_groups 1
    export TRAIN_GPT_CHECK_COMM=1
    fails "$name: different counts" "rank . is in all_reduce of \(99\|100\) elements of 4 bytes (number 1), rank . in all_reduce of" mpi 3 mix_counts 1
    fails "$name: different operations" "in group tensor: rank .* in reduce_scatter of" mpi 2 mix_operations 1
    unset TRAIN_GPT_CHECK_COMM
    [[ $name == cuda* ]] && continue
    fails "$name: messages of different sizes" "rank 1 expects 180 bytes with tag 5 from rank 0, which sends 200\|ncclRecv of 90\|ncclSend of 100" mpi 2 mix_messages
    [[ $name == cpu* ]] && fails "$name: messages with different tags" "with tag 6 from rank 0, which sends 200 with tag 5" mpi 2 mix_tags
done
exit 0
