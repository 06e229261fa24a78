#!/usr/bin/env bash
# Snapshots of a run on several nodes (checkpoint/node_snapshots.h), which TRAIN_GPT_TEST_NODE emulates on this machine, each with
# a folder of its own: a run that is killed -9 and loses a node resumes from its partner's copy with an undisturbed run's bits,
# on a new node, on fewer, or with ranks on other nodes; without intact parts from the disk.
#   TRAIN_GPT=path/to/train_gpt test/node_snapshots_test.sh
. "$(dirname "$0")/lib.sh"
command -v mpirun >/dev/null || { echo "ok: without mpirun there is one node"; exit; }
allow_mpirun_everywhere
memory=$(mktemp -d /dev/shm/train_gpt_test_XXXXXX)
trap 'umount "$memory/small" 2>/dev/null; rm -rf "$work" "$memory"' EXIT

kings 300 5 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
small=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer tok)
data=(--data-path text --seq-length 24 --micro-batch-size 1 --global-batch-size 4 --train-iters 30 --eval-iters 1 --lr 3e-3 --threads 1)
train() {  # NODES OUT [OPTIONS]: a rank per node that NODES names, with $options
    local nodes=$1 out=$2 ranks=() node
    shift 2
    for node in $nodes; do
        # shellcheck disable=SC2206
        ranks+=(: -n 1 env "TRAIN_GPT_TEST_NODE=$node" "$program" train "${data[@]}" $options --out "$out" "$@")
    done
    exec timeout 120 "${MPIRUN:-mpirun}" "${ranks[@]:1}"
}
root() { basename "$(cat "$1/.snapshots")"; }
copies() { compgen -G "$memory/*/$(root "$1")/step_$2.*-of-*"; }
published() { [[ $(copies "$1" "$2" | grep -vc tmp) == "$3" ]]; }
arriving() { copies "$1" "$2" | grep -q "/b/.*step_$2.0-of-.*tmp"; }
# killed NODES OUT EVENT...: a run that is killed at an event after step 18. Its steps are slow, since a save needs some of them.
killed() {
    local nodes=$1 out=$2 pid status=0
    shift 2
    (TRAIN_GPT_FAULTS="slow=13-99" train "$nodes" "$out" --save-every 13 --snapshot-every 9 --snapshot-directory "$memory") >"$out.txt" 2>&1 &
    pid=$!
    comes "$@" || status=1
    kill -9 $(pgrep -f -- "$program_pattern train .*--out $out ")
    wait $pid 2>/dev/null
    [[ $status == 0 ]] || cat "$out.txt"
    return $status
}
replaced() { published "$1" 00000018 "$2" && ! copies "$1" 00000009; } # the snapshot of step 9
killed_after_18() { killed "$1" "$2" replaced "$2" $((2 * $(wc -w <<<"$1"))); }
resumed_at() { says "$1" "resumed from $2"; }
nothing_left() { expect "$1: nothing is left in memory" test -z "$(find "$memory" -mindepth 2)" -a ! -e "$2/.snapshots"; }

[[ $program == *-fp32/* ]] && ema="--ema-decay 0.9" || ema="--ema-decay 0.9 --exp-avg-dtype bf16"
cases=0
for case in "a b|--zero 1 $ema" "a b|--zero 2 --optimizer muon" "a a b b|--zero 3" "a a b b|--tp 2 --pp 2" "a b|--model base --lora-rank 2 --zero 1"; do
    nodes=${case%%|*} options=${case#*|} name="case$((++cases))"
    if [[ $options == *--model* ]]; then cp -r "case1-whole/latest/" base; else options+=" ${small[*]}"; fi
    expect "$case: whole" eval "(train '${nodes//b/a}' $name-whole)"
    expect "$case: killed after a snapshot" killed_after_18 "$nodes" $name
    rm -r "${memory:?}/b"
    expect "$case: node b is replaced" eval "(train '${nodes//b/c}' $name --resume auto --snapshot-every 9 --snapshot-directory $memory)"
    resumed_at "$case: from the copies on node a" "$name/step_00000018"
    expect "$case: the same bits" same_tensors "$name-whole" $name
    expect "$case: each step once in the log" test "$(losses "$name-whole")" = "$(losses $name)"
    nothing_left "$case" $name
done

options="${small[*]} --zero 1"
expect "whole" eval "(train 'a a' whole)"
expect "killed, then all ranks on one node" killed_after_18 "a b" fewer
expect "a new run does not replace it" refused eval "(train 'a b' fewer)"
rm -r "${memory:?}/a"
expect "a new run does not replace it, though its first rank has no part" refused eval "(train 'a b' fewer)"
cp -r "$memory" kept && cp fewer/.snapshots kept-name
expect "one node fewer" eval "(train 'b b' fewer --resume auto)"
resumed_at "one node fewer: the copies" "fewer/step_00000018"
expect "one node fewer: the same bits" same_tensors whole fewer
nothing_left "one node fewer" fewer
cp -r kept/. "$memory" && cp kept-name fewer/.snapshots
expect "killed at its end, before it removes them" eval "(train 'b b' fewer --resume auto)"
says "it is finished" "the run is finished"
nothing_left "killed at its end" fewer

expect "killed, then one rank" killed_after_18 "a b" single
rm -r "${memory:?}/b"
expect "one rank" eval "(train a single --resume auto --snapshot-every 3 --snapshot-directory $memory)"
resumed_at "one rank: the copies" "single/step_00000018"
nothing_left "one rank" single

expect "killed, then ranks on other nodes" killed_after_18 "a a b b" moved
expect "ranks on other nodes" eval "(train 'b a c a' moved --resume auto)"
resumed_at "ranks on other nodes: the parts" "moved/step_00000018"
expect "four ranks: whole" eval "(train 'a a a a' whole4)"
expect "ranks on other nodes: the same bits" same_tensors whole4 moved
nothing_left "ranks on other nodes" moved

damage() { printf x | dd of="$1" bs=1 seek=3000 conv=notrunc status=none; }
expect "killed, then a part is damaged" killed_after_18 "a b" torn
damage "$memory/a/$(root torn)/step_00000018.1-of-2"
expect "a damaged part" eval "(train 'a b' torn --resume auto)"
says "is named" "step_00000018.1-of-2 is damaged: its checksum differs"
resumed_at "and its copy is read" "torn/step_00000018"
expect "a damaged part: the same bits" same_tensors whole torn

expect "killed, then both are damaged" killed_after_18 "a b" both
damage "$memory/a/$(root both)/step_00000018.1-of-2" && damage "$memory/b/$(root both)/step_00000018.1-of-2"
expect "both are damaged" eval "(train 'a b' both --resume auto)"
says "the part is named" "no node has an intact part 1 of 2"
resumed_at "and the disk is read" "both/step_00000013"
expect "both are damaged: the same bits" same_tensors whole both
nothing_left "damaged parts" both

expect "killed while node b receives a copy" killed "a b" half arriving half 00000018
expect "no part of step 18 is complete" published half 00000018 0
rm -r "${memory:?}/b"
expect "killed while node b receives a copy: resumes" eval "(train 'a b' half --resume auto)"
resumed_at "from the disk, which is newer than the snapshot of step 9" "half/step_00000013"
expect "while node b receives a copy: the same bits" same_tensors whole half
expect "killed while node b receives a copy" killed "a b" older arriving older 00000018
rm -r older/step_00000013 older/latest "${memory:?}/b"
expect "without the disk" eval "(train 'a b' older --resume auto)"
resumed_at "the older snapshot" "older/step_00000009"
expect "the older snapshot: the same bits" same_tensors whole older
nothing_left "the older snapshot" older

expect "a run" killed_after_18 "a b" mine
expect "another run" killed_after_18 "a b" theirs
cp "$memory/b/$(root theirs)/step_00000018.1-of-2" "$memory/a/$(root mine)"
rm -r "$memory/b/$(root mine)"
cp -r mine copy
expect "a part of another save" eval "(train 'a b' mine --resume auto)"
resumed_at "is not read" "mine/step_00000013"
expect "a copy of a run" eval "(train 'a b' copy --resume auto)"
resumed_at "reads no parts" "copy/step_00000013"
expect "the other run" eval "(train 'a b' theirs --resume auto)"
resumed_at "resumes" "theirs/step_00000018"
expect "the other run: the same bits" same_tensors whole theirs
nothing_left "other runs" theirs

expect "the plan" eval "(train 'a b' planned --snapshot-every 5 --dry-run)"
says "has the copies" "snapshots .*every 5 steps in /dev/shm of 2 nodes"
if mkdir "$memory/small" && mount -t tmpfs -o size=64k tmpfs "$memory/small" 2>/dev/null; then
    expect "a partner whose memory is full" eval "(train 'a small' full --snapshot-every 9 --snapshot-directory $memory)"
    says "is named" "the snapshot of step 9 was not saved: rank 1: cannot write $memory/small/.*No space left.*training continues"
    expect "a partner whose memory is full: the same bits" same_tensors whole full
    umount "$memory/small"
    nothing_left "a partner whose memory is full" full
fi
