# shellcheck shell=bash
# Shared by the test scripts, which source it first. Sets `program`, and creates and enters an empty directory, `work`,
# which is removed at the end. A script prints `ok: NAME` or `FAILED: NAME` per test, which test/run.sh counts.
set -u
program=$(realpath "${TRAIN_GPT:-./train_gpt}")
program_pattern=${program//+/[+]} # its path for pgrep -f: builds with clang++ have a plus in theirs
[[ -x $program ]] || { echo "FAILED: there is no $program; HINT: make train_gpt, or TRAIN_GPT=path/to/it" && exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export XDG_CACHE_HOME=$work/cache

# expect NAME COMMAND...: the command succeeds.
expect() {
    local name=$1
    shift
    if "$@" >out.txt 2>&1; then echo "ok: $name"; else echo "FAILED: $name"; tail -n 20 out.txt; fi
}
# says NAME PATTERN: the output of the last expect matches.
says() {
    if grep -q -- "$2" out.txt; then echo "ok: $1"; else echo "FAILED: $1: no '$2' in:"; tail -n 20 out.txt; fi
}
# passes NAME COMMAND...: a check program succeeds. Prints its `ok: ` and `FAILED: ` lines with NAME, and one more for its
# status. Shows the rest of its output if anything failed.
passes() {
    local name=$1 status
    shift
    "$@" >run.txt 2>&1
    status=$?
    sed -n "s/^\(ok\|FAILED\): /\1: $name: /p" run.txt
    if [[ $status == 0 ]]; then echo "ok: $name: ends well"; else echo "FAILED: $name: ends with status $status"; fi
    if [[ $status != 0 ]] || grep -q '^FAILED' run.txt; then grep -v '^ok: ' run.txt | tail -n 20; fi
}
# comes COMMAND...: waits until the command succeeds, for at most a minute. Tests wait for events, never for a fixed time.
comes() {
    for _ in $(seq 600); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
    return 1
}
# refused COMMAND...: the command fails.
refused() { ! "$@"; }
# no NAME PATTERN COMMAND...: the command fails and says why.
no() {
    local name=$1 pattern=$2
    shift 2
    expect "refused: $name" refused "$@"
    says "$name: says why" "$pattern"
}
# kings LINES [EVERY]: a text that small models learn, with an empty line after every EVERY lines, if given.
kings() {
    local i
    for i in $(seq 1 "$1"); do
        echo "in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son"
        [[ -z ${2:-} || $((i % ${2:-1})) != 0 ]] || echo
    done
}
# loss_of OPTIONS...: the loss of a model on text.txt.
loss_of() { "$program" eval --text text.txt --json "$@" | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p' | head -1; }
# same_tensors A B: the newest checkpoints of two runs have tensors with the same bits.
same_tensors() {
    local files file
    mapfile -t files < <(cd "$1/latest" && find . -name '*.safetensors')
    [[ ${#files[@]} -gt 0 ]] || return
    for file in "${files[@]}"; do cmp "$1/latest/$file" "$2/latest/$file" || return; done
}
# losses DIR: step and loss of every step of a run, in the order of its log.
losses() { sed -n 's/.*"kind":"step","step":\([0-9]*\).*"loss":\([0-9.e+-]*\).*/\1 \2/p' "$1/log.jsonl"; }
# near_losses A B STEPS TOLERANCE: run B has the last STEPS steps of run A, with losses within TOLERANCE of A's.
near_losses() {
    paste <(losses "$1" | tail -n "$3") <(losses "$2") | awk -v steps="$3" -v tolerance="$4" \
        '{ d = $2 - $4; if (d < 0) d = -d; if (!(d <= tolerance) || $1 != $3) { print; bad = 1 }; n++ } END { exit bad || n != steps }'
}
# slower A B DIR: in the last record of the ranks' times, rank A works 100 ms per step more than rank B, and B waits 100 ms
# more.
slower() {
    times() { grep '"kind":"ranks"' "$1/log.jsonl" | tail -n 1 | grep -o "\"rank\":$2,[^}]*" | sed 's/.*"worked_ms":\([0-9.]*\),"waited_ms":\([0-9.]*\)/\1 \2/'; }
    echo "$(times "$3" "$1") $(times "$3" "$2")" | awk '{ print } NF != 4 || $1 < $3 + 100 || $4 < $2 + 100 { bad = 1 } END { exit bad }'
}
# Lets Open MPI run as root, with more ranks than cores, and in containers where a process may not read another's memory.
# Only shared memory, since looking for networks takes 0.2 s per start; no scan of the machine's devices, a third of the
# start-up work.
allow_mpirun_everywhere() {
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_NUM_THREADS=1
    export HWLOC_COMPONENTS=-pci,-linuxio
}
