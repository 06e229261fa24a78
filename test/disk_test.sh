#!/usr/bin/env bash
# Failing disks and file systems: lost or wrong writes, temporarily unreadable files, no locks, no links. A checkpoint has the written
# bytes or is not saved; an unreadable file is not reported as damaged; two runs never share a folder. chaos/shim.c injects the
# faults.
#   TRAIN_GPT=path/to/train_gpt test/disk_test.sh
here=$(realpath "$(dirname "$0")")
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere
command -v cc >/dev/null || { echo "skipped: there is no C compiler" && exit 0; }
expect "the shim" cc -O1 -shared -fPIC -o shim.so "$here/chaos/shim.c" -ldl

for i in $(seq 1 300); do printf 'the sheep %d of city %d\n\n' $((i * 37 % 1000)) $((i % 17)); done >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
S=(--num-layers 1 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --data-path text --seq-length 16 --micro-batch-size 2
    --global-batch-size 4 --lr 1e-3 --eval-iters 0 --threads 1)
# faulty "VARIABLE=VALUE ..." OUT [OPTIONS]: a run of 20 steps with faults from the shim.
faulty() {
    local faults=$1 out=$2
    shift 2
    # shellcheck disable=SC2086
    env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work/$out" $faults ${launcher:-} "$program" train "${S[@]}" --train-iters 20 --out "$work/$out" "$@"
}
same() {
    local file
    for file in $(cd "$1/latest" && find . -name '*.safetensors'); do cmp "$1/latest/$file" "$2/latest/$file" || return 1; done
}
EPERM=1 EIO=5 EXDEV=18 EINVAL=22 ENOLCK=37 ESTALE=116 always=1000000

# ---- lost or wrong writes: the checkpoint is written again, and has the trained weights ----
expect "undisturbed" faulty "CHAOS_COUNT=count CHAOS_PART=.step_" whole
writes=$(sed -n 's/^pwrite //p' count.0)
expect "a save has $writes writes at positions" test "$writes" -ge 8
for i in 1 2 $((writes / 4)) $((writes / 2)) $((3 * writes / 4 + 1)) "$writes"; do
    [[ $((i % 2)) == 0 ]] && fault=LOSE || fault=WRONG
    expect "pwrite $i, $fault" faulty "CHAOS_$fault=pwrite:$i CHAOS_PART=.step_" "p$i"
    says "pwrite $i, $fault: found and named" "warning: .*/p$i/.step_00000020.tmp/.* differs from the data written to it: .*; the checkpoint is written again"
    expect "pwrite $i, $fault: the same bits" same whole "p$i"
    rm -r "p$i"
done
for i in 1 3 6; do
    expect "write $i, LOSE" faulty "CHAOS_LOSE=write:$i CHAOS_PART=.step_" "w$i"
    says "write $i: found and named" "warning: .* differs from the data written to it"
    expect "write $i: as they were written" "$program" inspect "w$i"
done
expect "always: the run fails" refused faulty "CHAOS_LOSE=pwrite:1:$always CHAOS_PART=training/exp_avg." always
says "always: by the file's name" "error: the last checkpoint could not be written: .*training/exp_avg.safetensors differs from the data written"
expect "always: there is no checkpoint" test ! -e always/latest -a ! -e always/step_00000020
options=(--ema-decay 0.9 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16 --save-in-foreground)
expect "in the foreground, with an average and small moments" faulty "CHAOS_COUNT=count CHAOS_PART=.step_" ema "${options[@]}"
writes=$(sed -n 's/^pwrite //p' count.0)
for i in 2 $((writes / 2)) "$writes"; do
    expect "pwrite $i of them" faulty "CHAOS_LOSE=pwrite:$i CHAOS_PART=.step_" ema-lost "${options[@]}"
    says "pwrite $i of them: found" "differs from the data written to it"
    expect "pwrite $i of them: the same bits" same ema ema-lost
    rm -r ema-lost
done
expect "adapters" faulty "CHAOS_LOSE=pwrite:4 CHAOS_PART=.step_" lora --model whole --lora-rank 2
says "adapters: found" "differs from the data written to it"
expect "adapters: intact" "$program" inspect lora
launcher="mpirun -n 2"
expect "two ranks" faulty CHAOS_PART=.step_ ranks
expect "two ranks, a write of rank 1 is lost" faulty "CHAOS_LOSE=pwrite:3 CHAOS_ONLY_RANK=1 CHAOS_PART=.step_" ranks-lost
says "two ranks: found" "differs from the data written to it"
expect "two ranks: the same bits" same ranks ranks-lost
launcher=

# ---- files of other commands: a lost or wrong write is an error, and there is no file ----
# lost "FAULT ..." FILE COMMAND...: with faults in the writes of FILE.
lost() {
    local faults=$1 file=$2 name=${2##*/} fault
    shift 2
    for fault in $faults; do
        expect "$name, $fault" refused env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work" CHAOS_"$fault" CHAOS_PART="$name" "$@"
        says "$name, $fault: found and named" "error: .*$name differs from the data written to it: .*; HINT: check the disk"
        expect "$name, $fault: there is no file" test ! -e "$file"
    done
    expect "$name: written" "$@"
    expect "$name: it is there" test -s "$file"
}
both="LOSE=write:1 WRONG=write:1"
printf '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' >chat.jsonl
lost "$both" disk.bin "$program" prepare --input text.txt --output disk --tokenizer tok
rm disk.*
lost "WRONG=write:1 LOSE=pwrite:1" disk.idx "$program" prepare --input text.txt --output disk --tokenizer tok --split-documents blank
rm disk.*
lost "$both" disk.meta.json "$program" prepare --input text.txt --output disk --tokenizer tok
lost "$both" chat.mask "$program" prepare --input chat.jsonl --output chat --tokenizer tok --chat --chat-template plain
lost "$both" disk-tok/tokenizer.json "$program" tokenizer --input text.txt --vocab-size 280 --output disk-tok
lost "$both" disk.gguf "$program" export --model whole --gguf disk.gguf
lost "$both" slim/model.safetensors "$program" export --model whole --out slim
lost "LOSE=pwrite:1 WRONG=pwrite:1" import/model.safetensors "$program" import --gguf disk.gguf --out import
lost "LOSE=pwrite:1 WRONG=pwrite:1" merged/model.safetensors "$program" export --merge --adapter lora --out merged
lost "$both" clean0/data/part-00000.jsonl "$program" curate --input text.txt --output clean0 --output-format jsonl --normalize
expect "an earlier file stays" refused env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work" CHAOS_LOSE=write:1 CHAOS_PART=.bin "$program" prepare --input text.txt --output text --tokenizer tok
expect "and can be read" "$program" inspect text
# ---- a file that cannot be read for a while is not damaged ----
expect "two checkpoints" "$program" train "${S[@]}" --train-iters 20 --save-every 10 --keep 0 --out two
resumed() { faulty "$1" again --resume auto --train-iters 21 --override train-iters; }
# kept NAME: nothing was renamed, and the run can be resumed from its newest checkpoint.
kept() {
    expect "$1: nothing is renamed" test -e again/step_00000020 -a ! -e again/step_00000020.1 -a "$(readlink again/latest)" != step_00000010
    expect "$1: the newest checkpoint is intact" "$program" inspect again/step_00000020
}
for fault in open:{1,2,4,7,10,13}:$ESTALE pread:{1,6}:$EIO stat:{2,9}:$ESTALE; do
    rm -rf again && cp -r two again
    expect "once: $fault" resumed "CHAOS_FAIL=$fault:1"
    says "once: $fault: from the newest" "step 20\b.*again/step_00000020\|again/step_00000020"
    kept "once: $fault"
done
for fault in "open:1:$ESTALE CHAOS_PART=training/master" "pread:1:$EIO CHAOS_PART=step_00000020" "stat:1:$ESTALE CHAOS_PART=step_00000020"; do
    rm -rf again && cp -r two again
    expect "for ever: $fault: refused" refused resumed "CHAOS_FAIL=${fault/ /:$always }"
    says "for ever: $fault: by name" "error: cannot .*again/.*: .*"
    kept "for ever: $fault"
done
expect "inspect does not call it damaged" refused env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work/again" CHAOS_FAIL="pread:1:$EIO:$always" CHAOS_PART=exp_avg_sq "$program" inspect "$work/again"
says "inspect says that it cannot read it" "error: cannot read .*exp_avg_sq.safetensors: Input/output error"

# ---- no links, no locks, no fsync ----
expect "no links" faulty "CHAOS_FAIL=symlink:1:$EPERM:$always" nolinks --save-every 10 --keep 0
expect "no links: latest is a file" test -f nolinks/latest -a ! -L nolinks/latest
expect "no links: it names the checkpoint" grep -qx step_00000020 nolinks/latest
expect "no links: generate" "$program" generate --model nolinks/latest --prompt the --max-new-tokens 2
expect "no links: inspect" "$program" inspect nolinks/latest
expect "no links: resume" faulty "CHAOS_FAIL=symlink:1:$EPERM:$always" nolinks --keep 0 --resume auto --train-iters 22 --override train-iters
expect "no links: resumed" grep -qx step_00000022 nolinks/latest
expect "no links: back to an older one" "$program" train "${S[@]}" --train-iters 20 --out nolinks --resume nolinks/step_00000010
expect "no links: the same bits" same whole nolinks
expect "no locks" faulty "CHAOS_FAIL=flock:1:$ENOLCK:$always" nolocks
expect "no locks: the same bits" same whole nolocks
expect "no fsync" faulty "CHAOS_FAIL=fsync:1:$EINVAL:$always" nosync
expect "no fsync: the same bits" same whole nosync
expect "a folder is not renamed" refused faulty "CHAOS_FAIL=rename:1:$EXDEV:$always CHAOS_PART=step_00000020" norename
says "a folder is not renamed: by name" "error: .*norename/.*step_00000020.*: Invalid cross-device link"

# ---- locks that do nothing ----
endless() { exec env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work/$1" CHAOS_NOTHING=flock CHAOS_HOST="$2" "$program" train "${S[@]}" --train-iters 60000 --save-every 500 --out "$work/$1" "${@:3}" >"$2.txt" 2>&1; }
endless shared a &
first=$!
comes test -e shared/latest
expect "another on the same host is refused" refused faulty "CHAOS_NOTHING=flock CHAOS_HOST=a" shared --resume auto
says "it says by whom" "another run is writing to .*/shared (process $first)"
endless shared b --resume auto &
second=$!
wait $first
expect "the first run ends when another host has taken the folder: status $?" test $? == 1
expect "it says by whom" grep -q "error: the run ends at step .*another run (process $second on b) has been writing to .*/shared" a.txt
kill -TERM $second
wait $second
expect "the second one ends well: status $?" test $? == 0
expect "each step once" test -z "$(losses shared | cut -d ' ' -f 1 | sort | uniq -d)"

# ---- every wait is watched ----
expect "a save that hangs ends the run" refused timeout 30 env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work/hangs" CHAOS_PART=.step_ CHAOS_SLOW=fsync:60000000 "$program" train "${S[@]}" --train-iters 20 --distributed-timeout 1s --out "$work/hangs"
says "it says why" "error: .*: waited [0-9]* s in a save that makes no progress"
says "it says where to look" "HINT: look at the disk or the file system of --out"
for command in "generate --prompt the --max-new-tokens 2 --tp 2" "eval --data-path text --split 0,100,0 --tp 2"; do
    # shellcheck disable=SC2086
    expect "${command%% *}: a rank that hangs ends the others" refused timeout 30 env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work/whole" CHAOS_SLOW=open:60000000 CHAOS_ONLY_RANK=1 \
        mpirun -n 2 "$program" $command --model "$work/whole" --distributed-timeout 4s
    says "${command%% *}: it says what it waited for" "error: rank 0 of 2 (host .*): waited [0-9]* s in "
done
expect "a rank that never starts ends the others" refused timeout 30 mpirun -n 1 "$program" eval --model whole --data-path text --distributed-timeout 1s : -n 1 sleep 60
says "it says so" "waited [0-9]* s in MPI_Init, for the other ranks to start"

# ---- a killed rank ----
timeout 60 mpirun -n 2 "$program" train "${S[@]}" --train-iters 1000000 --out killed >killed.txt 2>&1 &
killed=$!
comes grep -q '"kind":"step","step":5,' killed/log.jsonl
kill -KILL "$(pgrep -f "^[^ ]*train_gpt train .*--out killed\$" | tail -n 1)" || kill -KILL $killed
wait $killed
cp killed.txt out.txt
expect "a killed rank: nobody promises a save" refused grep -q "will be saved" killed.txt
cp killed.txt out.txt
says "a killed rank: it says that nothing is saved" "another rank has died, so that nothing more can be saved"
touch -d '20 minutes ago' killed/log.jsonl
expect "a killed rank: the report" "$program" report killed
expect "a killed rank: it is not running" grep -q '<span class="status silent">no news</span>' killed/report.html
expect "a killed rank: the report says since when" grep -q 'The last record was written at .*: the run was killed, or hangs' killed/report.html

# ---- the log ----
expect "the log is synced" faulty "CHAOS_COUNT=count CHAOS_PART=log.jsonl" synced
expect "the log: before the checkpoint has its name" test "$(sed -n 's/^fdatasync //p' count.0)" -ge 1

# ---- what kill -9 leaves behind ----
# killed_at CALL COMMAND...: kill -9 just before a call for a file in this folder.
killed_at() {
    local call=$1
    shift
    refused env LD_PRELOAD="$work/shim.so" CHAOS_OUT="$work" CHAOS_DIE="$call" "$@"
}
left() { find . -name '*.tmp.*' -o -name '*.bin.[0-9]*' | grep .; }
declare -A commands=(
    [tokenizer]="tokenizer --input text.txt --vocab-size 290 --output $work/tok2"
    [export]="export --model whole --gguf $work/whole.gguf"
    [report]="report two --output $work/page.html"
    [prepare]="prepare --input text.txt --output $work/again2 --tokenizer tok --split-documents blank"
    [curate]="curate --input text.txt --output $work/clean --normalize"
)
rm -rf ./*.tmp.* hangs
for name in "${!commands[@]}"; do
    # shellcheck disable=SC2086
    expect "$name is killed" killed_at rename:1 "$program" ${commands[$name]}
    # shellcheck disable=SC2086
    expect "$name again" "$program" ${commands[$name]}
    expect "$name: nothing is left" refused left
done
for at in 1 2 3; do
    rm -f pair.*
    expect "prepare is killed before rename $at" killed_at rename:$at "$program" prepare --input text.txt --output "$work/pair" --tokenizer tok --split-documents blank
    expect "prepare again, after rename $at" "$program" prepare --input text.txt --output "$work/pair" --tokenizer tok --split-documents blank
    expect "prepare: it keeps no copy of its own tokens, after rename $at" refused left
    expect "prepare: the same, after rename $at" cmp pair.bin text.bin
    [[ $at -lt 3 ]] || continue # one of its renames is of its state
    rm -f part.*
    expect "prepare --resume is killed before rename $at" killed_at rename:$((at + 1)) "$program" prepare --resume --input text.txt --output "$work/part" --tokenizer tok --split-documents blank
    expect "prepare --resume again, after rename $at" "$program" prepare --resume --input text.txt --output "$work/part" --tokenizer tok --split-documents blank
    expect "prepare --resume: the same, after rename $at" cmp part.bin text.bin
done
for i in 1 2 3; do echo "{\"context\": \"the sheep $i of\", \"references\": [\"city\"], \"max_new_tokens\": 4}"; done >written.jsonl
answers() { "$program" eval --model whole --tasks written.jsonl written.jsonl --threads 1 --answers "$work/$1"; }
expect "answers" answers answers.jsonl
expect "answers to both tasks" test "$(wc -l <answers.jsonl)" == 6
for call in open:1 write:1 fsync:1 rename:1; do
    expect "eval --answers is killed before $call" killed_at $call "$program" eval --model whole --tasks written.jsonl written.jsonl --threads 1 --answers "$work/killed.jsonl"
    expect "eval --answers: no answers before they are complete, $call" test ! -e killed.jsonl
    expect "eval --answers again, after $call" answers killed.jsonl
    expect "eval --answers: the same, after $call" cmp killed.jsonl answers.jsonl
    expect "eval --answers: nothing is left, after $call" refused left
    rm -f killed.jsonl
done
expect "a model that is too large is refused before its samples are ordered" refused timeout 60 "$program" train --size 70b --tokenizer tok --data-path text --out big
says "by its memory" "error: .* memory"

# ---- a GGUF file as the model: its texts are in memory ----
mkdir temporary
export TMPDIR=$work/temporary
gguf=(--model whole.gguf --data-path text --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --threads 1)
timeout 60 "$program" train "${gguf[@]}" --train-iters 1000000 --out gguf >gguf.txt 2>&1 &
killed=$!
comes grep -q '"kind":"step","step":5,' gguf/log.jsonl
kill -KILL "$(pgrep -P $killed)"
wait $killed
expect "data of another tokenizer" "$program" prepare --input text.txt --output of-tok2 --tokenizer tok2 --split-documents blank
expect "data by a GGUF file's tokenizer" "$program" prepare --input text.txt --output of-gguf --tokenizer whole.gguf --split-documents blank
no "a GGUF model with these" "HINT: train_gpt prepare --tokenizer [^ ]*/whole.gguf/tokenizer.json" "$program" train "${gguf[@]}" --data-path of-tok2 --train-iters 2 --out x
expect "that tokenizer, as the hint names it" "$program" prepare --input text.txt --output of-hint --tokenizer "$work/whole.gguf/tokenizer.json" --split-documents blank
expect "the same tokens" cmp of-gguf.bin of-hint.bin
expect "inspect finds the tokenizer of the data" "$program" inspect of-gguf
says "their text" "document 0 .*the sheep"
no "a GGUF file exported as a directory" "train_gpt import --gguf whole.gguf --out x" "$program" export --model whole.gguf --out x
expect "killed and refused commands leave nothing in the folder for temporary files" test -z "$(ls temporary)"
