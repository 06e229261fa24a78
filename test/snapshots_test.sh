#!/usr/bin/env bash
# Snapshots in the memory of the node (--snapshot-every): a run that is killed -9 between checkpoints resumes from the newest
# intact one with an undisturbed run's bits, for 1, 2 and 4 ranks; else from the disk. A run that ends well leaves none, and
# none of another run is read or removed.
#   TRAIN_GPT=path/to/train_gpt test/snapshots_test.sh
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere
memory=$(mktemp -d /dev/shm/train_gpt_test_XXXXXX)
trap 'rm -rf "$work" "$memory"' EXIT

kings 300 5 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
small=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer tok)
data=(--data-path text --seq-length 24 --micro-batch-size 1 --global-batch-size 4 --train-iters 20 --eval-iters 1 --lr 3e-3 --threads 1)
train() {  # OUT [OPTIONS]: of $ranks ranks, with $options
    local out=$1 launcher=()
    shift
    [[ $ranks == 1 ]] || launcher=("${MPIRUN:-mpirun}" -n "$ranks")
    # shellcheck disable=SC2086
    exec "${launcher[@]}" "$program" train "${data[@]}" $options --out "$out" "$@"
}
snapshots() { cat "$1/.snapshots"; }
holds() { [[ -e $(snapshots "$1")/$2/manifest.json ]]; }
# killed OUT: a run that is killed when it has the snapshot of step 12, with step 8 as its newest checkpoint.
# The steps after it are slow, since a save needs some steps to end.
killed() {
    (TRAIN_GPT_FAULTS="slow=8-99" train "$1" --save-every 8 --snapshot-every 6 --snapshot-directory "$memory") >"$1.txt" 2>&1 &
    local pid=$! status=0
    comes holds "$1" step_00000012 || status=1
    if [[ $ranks == 1 ]]; then kill -9 $pid; else kill -9 $(pgrep -P $pid); fi
    wait $pid 2>/dev/null
    return $status
}
resumed_at() { says "$1" "resumed from $2"; }
whole_and_killed() {  # NAME
    expect "$1: whole" eval "(train '$1-whole')"
    expect "$1: killed after a snapshot" killed "$1"
    expect "$1: a new run does not replace it" refused eval "(train '$1')"
}
[[ $program == *-fp32/* ]] && ema="--ema-decay 0.9" || ema="--ema-decay 0.9 --exp-avg-dtype bf16"
mpi=2 cases=0
command -v mpirun >/dev/null || mpi=
for case in "1 $ema" ${mpi:+"2 --zero 1" "2 --zero 2 --optimizer muon" "4 --zero 3"} "1 --model base --lora-rank 2"; do
    ranks=${case%% *} options=${case#* } name="case$((++cases))"
    if [[ $options == *--model* ]]; then cp -r "case1-whole/latest/" base; else options+=" ${small[*]}"; fi
    whole_and_killed "$name"
    root=$(snapshots "$name")
    expect "$case: resumes" eval "(train $name --resume auto)"
    resumed_at "$case: from the snapshot" "$root/step_00000012"
    expect "$case: the same bits" same_tensors "$name-whole" "$name"
    expect "$case: each step once in the log" test "$(losses "$name-whole")" = "$(losses "$name")"
    expect "$case: nothing is left in memory" test -z "$(ls -A "$memory")" -a ! -e "$name/.snapshots"
done

ranks=1 options="${small[*]}"
whole_and_killed torn
root=$(snapshots torn)
printf x | dd of="$root/step_00000012/model.safetensors" bs=1 seek=3000 conv=notrunc status=none
expect "a second run beside it" killed other
cp -r torn copy
expect "a damaged snapshot" eval "(train torn --resume auto)"
says "is named" "model.safetensors is damaged"
resumed_at "and the disk is read" "torn/step_00000008"
expect "then: the same bits" same_tensors torn-whole torn
expect "the second run's snapshots are still there" holds other step_00000012
expect "a copy of a run reads no snapshot of it" eval "(train copy --resume auto)"
resumed_at "but the disk" "copy/step_00000008"
expect "the second run resumes" eval "(train other --resume auto)"
resumed_at "from its snapshot" "$memory/.*/step_00000012"
expect "with the same bits" same_tensors torn-whole other

whole_and_killed lost
rm -r "$(snapshots lost)"
expect "lost snapshots" eval "(train lost --resume auto)"
resumed_at "the disk is read" "lost/step_00000008"
expect "lost: the same bits" same_tensors torn-whole lost
expect "a checkpoint older than the snapshot" killed back
expect "is resumed by name" eval "(train back --resume back/step_00000008)"
expect "back: the same bits" same_tensors torn-whole back
expect "the plan" eval "(train planned --snapshot-every 5 --dry-run)"
says "names the snapshots" "snapshots .*every 5 steps in /dev/shm, at most 2 of"
no "snapshots without checkpoints" "needs checkpoints" eval "(train none --snapshot-every 5 --save-every never)"
no "a directory that is none" "is not a directory" eval "(train none --snapshot-every 5 --snapshot-directory /nowhere)"
expect "nothing is left in memory" test -z "$(ls -A "$memory")"
