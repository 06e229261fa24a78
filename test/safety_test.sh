#!/usr/bin/env bash
# No user file is lost: which files a start may remove, who may write to a folder, the effect of signals, which checkpoints
# are valid.
#   TRAIN_GPT=path/to/train_gpt test/safety_test.sh
here=$(realpath "$(dirname "$0")")
. "$(dirname "$0")/lib.sh"

for i in $(seq 1 2000); do printf 'the sheep %d of city %d\n\n' $((i * 37 % 1000)) $((i % 17)); done >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank
S=(--num-layers 1 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --data-path text --seq-length 24 --micro-batch-size 2
    --global-batch-size 4 --lr 1e-3 --eval-iters 0 --threads 1)
# endless OUT [OPTIONS]: a run that ends only by a signal.
endless() { exec "$program" train "${S[@]}" --train-iters 100000 --out "$@" >"$1.txt" 2>&1; }
# slow OUT [OPTIONS]: the same, with steps that take minutes.
slow() {
    exec "$program" train "${S[@]}" --num-layers 4 --hidden-size 256 --micro-batch-size 1 --global-batch-size 20000 --train-iters 5 \
        --out "$@" >"$1.txt" 2>&1
}
# wait_for PATTERN FILE: waits until the file has a matching line.
wait_for() { comes grep -e "$1" "$2"; }
# error COMMAND...: it exits with status 1, not by a signal.
error() {
    "$@"
    [[ $? == 1 ]]
}
# ends NAME PID [STATUS]: the process exits with this status.
ends() {
    wait "$2"
    local status=$?
    if [[ $status == "${3:-0}" ]]; then echo "ok: $1"; else echo "FAILED: $1: status $status"; fi
}

# This run gets SIGTERM and is then suspended; its message after half a minute is checked at the end of this script.
for _ in 1 2 3 4 5; do # a signal before the first micro-batch would end it at once
    rm -rf late
    slow late --plain --micro-batch-size 500 &
    late=$!
    wait_for '"kind":"run"' late/log.jsonl
    sleep 1
    kill -TERM $late
    wait_for "stopping after this micro-batch" late.txt
    kill -STOP $late
    sleep 0.1
    grep -q '^State:.*T' /proc/$late/status && break
done
told=$SECONDS

# ---- a start removes no user file ----
mkdir -p home/my.tmp.notes home/.step_mine home/step_7 home/.step_00000003.tmp home/.step_00000004.old
echo mine | tee home/my.tmp.notes/a home/.step_mine/a home/report.html.tmp.old home/data.bin.tmp.77 home/log.jsonl home/report.html home/loss.svg home/ranks home/latest home/step_7/a >/dev/null
touch home/report.html.tmp.123
expect "a run in a folder of the user's" "$program" train "${S[@]}" --train-iters 4 --save-every 1 --keep 1 --out home
for file in my.tmp.notes/a .step_mine/a report.html.tmp.old data.bin.tmp.77 log.jsonl.1 report.html.1 loss.svg.1 ranks latest.1 step_7/a; do
    expect "$file is still there" grep -q mine "home/$file"
done
expect "what killed runs left is gone" test ! -e home/report.html.tmp.123 -a ! -e home/.step_00000003.tmp -a ! -e home/.step_00000004.old

mkdir elsewhere
echo mine | tee elsewhere/log.jsonl elsewhere/report.html >/dev/null
expect "a resume of another folder's checkpoint" "$program" train "${S[@]}" --train-iters 5 --override train-iters --resume home/latest --out elsewhere
expect "one that is stopped at once" "$program" train "${S[@]}" --train-iters 5 --override train-iters --resume home/latest --out at-once --exit-after 0.000001s
expect "has a checkpoint to go on from" test "$(readlink at-once/latest)" == step_00000004
expect "into a folder that holds checkpoints of another run: refused" refused "$program" train "${S[@]}" --train-iters 6 --override train-iters --resume at-once/latest --out elsewhere
says "it says what lies there" "elsewhere holds the checkpoints of another run than .*at-once"
expect "and they are whole" "$program" inspect elsewhere
rm -r elsewhere/step_*
expect "a start that finds no checkpoint" "$program" train "${S[@]}" --train-iters 5 --resume auto --out elsewhere
for file in log.jsonl.1 report.html.1; do expect "elsewhere/$file is still there" grep -q mine elsewhere/$file; done

# ---- one run per folder: the lock comes first ----
endless two --save-every 5 &
first=$!
wait_for "checkpoint two/step" two.txt
cp two/log.jsonl before.jsonl
readlink two/latest >before.txt
expect "a second starter is refused" refused "$program" train "${S[@]}" --train-iters 9 --out two --resume auto
says "and told by whom" "another run is writing to two (process $first)"
expect "it has changed nothing" cmp -n "$(stat -c %s before.jsonl)" before.jsonl two/log.jsonl
kill -USR1 $first
ends "the first one ends well" $first
expect "and its log is whole" grep -q '"status":"stopped"' two/log.jsonl
# A zombie process, whose parent has not waited for it, such as a rank whose mpirun was killed.
bash -c '"$@" >/dev/null 2>&1 & exec sleep 60' - "$program" train "${S[@]}" --train-iters 4 --out unnoticed &
parent=$!
expect "a run that ends unnoticed" comes eval 'grep -q "State:.*Z" "/proc/$(cut -d" " -f1 unnoticed/.lock)/status"'
expect "does not hold its folder" "$program" train "${S[@]}" --train-iters 5 --override train-iters --out unnoticed --resume auto
kill $parent
expect "a refused start leaves no folder behind" refused "$program" train "${S[@]}" --train-iters 4 --lr -1 --out none
expect "none is there" test ! -e none
mkdir locked
echo precious >precious
ln -s ../precious locked/.lock
expect "a lock that is a link is refused" refused "$program" train "${S[@]}" --train-iters 2 --out locked
expect "its target is whole" grep -q precious precious

# ---- signals ----
for signals in "TERM" "INT" "HUP" "USR1" "TERM TERM TERM" "USR1 TERM HUP USR1" "TERM INT" "INT TERM TERM"; do
    out=run-${signals// /-}
    endless "$out" &
    run=$!
    wait_for '"kind":"step","step":3,' "$out/log.jsonl"
    for signal in $signals; do kill -"$signal" $run 2>/dev/null; done
    ends "$signals: status 0" $run
    cp "$out.txt" out.txt
    says "$signals: it says so at once" "^SIG\(${signals// /\\|}\): stopping after this micro-batch"
    says "$signals: it says why it stopped" "^stopped after .*: by SIG\(${signals// /\\|}\); to resume: .* --train-iters 100000 --out $out --resume auto$"
    expect "$signals: one checkpoint" test "$(ls -d "$out"/step_* | wc -l)" == 1
    expect "$signals: which is intact" "$program" inspect "$out"
done
slow twice --plain --micro-batch-size 500 &
run=$!
wait_for '"kind":"run"' twice/log.jsonl
sleep 1
kill -INT $run
sleep 0.5
kill -INT $run
ends "a second Ctrl-C ends it at once" $run 130
slow micro &
run=$!
wait_for '"kind":"run"' micro/log.jsonl
start=$SECONDS
kill -TERM $run
ends "a long step is left between micro-batches: status 0" $run
expect "a long step is left between micro-batches: at once" test $((SECONDS - start)) -le 10
expect "a long step is left between micro-batches: nothing to save" test ! -e micro/latest
# left NAME OUT: the run gets SIGTERM during the work after its first step; it must end well, soon, and with that step
# saved.
left() {
    wait_for '"kind":"step","step":1,' "$2/log.jsonl"
    sleep 0.5
    local start=$SECONDS
    kill -TERM $run
    ends "$1: status 0" $run
    expect "$1: soon" test $((SECONDS - start)) -le 10
    expect "$1: the step before it is saved" test "$(readlink "$2/latest")" == step_00000001
}
slow valid --plain --global-batch-size 2 --train-iters 2 --eval-interval 1 --eval-iters 5000 --split "50, 50, 0" &
run=$!
left "within validation" valid
expect "within validation: it was not finished" test -s valid/log.jsonl
expect "within validation: its result is not logged" refused grep -q '"kind":"valid"' valid/log.jsonl
for i in $(seq 20000); do echo '{"context": "the sheep", "choices": [" of city", " of the king"], "gold": 0}'; done >questions.jsonl
slow tasks --plain --global-batch-size 2 --train-iters 2 --eval-tasks questions.jsonl --eval-tasks-interval 1 &
run=$!
left "within tasks" tasks
expect "within tasks: a part of them is not logged" refused grep -q '"kind":"tasks"' tasks/log.jsonl
# 20,000 tokens of generated text: the tokenizer has no end-of-document token that could end it early.
expect "a tokenizer without such a token" "$program" tokenizer --input text.txt --vocab-size 300 --special-tokens "<pad>" --output endless-tok
expect "and its data" "$program" prepare --input text.txt --output endless --tokenizer endless-tok --split-documents blank --no-append-eod
slow sample --tokenizer endless-tok --data-path endless --global-batch-size 2 --train-iters 2 --sample-interval 1 --sample-prompt the --sample-tokens 20000 \
    --max-position-embeddings 20100 &
run=$!
left "within a sample" sample
expect "within a sample: half a text is not logged" refused grep -q '"kind":"sample"' sample/log.jsonl
for pause in 0 0.01 0.02 0.03 0.05 0.08; do
    endless start-$pause &
    run=$!
    sleep $pause
    kill -TERM $run
    wait $run 2>/dev/null
    status=$?
    # Before the first step there is nothing to save; before main() runs, the signal has its usual effect.
    if [[ $status == 0 && -e start-$pause/report.html || $status == 143 && ! -e start-$pause/latest ]]; then
        echo "ok: SIGTERM after $pause s: status $status"
    else
        echo "FAILED: SIGTERM after $pause s: status $status"
    fi
done
# The steps before the dropped one are saved, and the resumed run has an uninterrupted run's bits.
expect "whole" "$program" train "${S[@]}" --train-iters 40 --out whole
"$program" train "${S[@]}" --train-iters 40 --out dropped --exit-after 0.02s >dropped.txt 2>&1
for _ in 1 2 3 4 5 6 7 8; do "$program" train "${S[@]}" --train-iters 40 --out dropped --exit-after 0.01s --resume auto >>dropped.txt 2>&1; done
expect "stopped and resumed" "$program" train "${S[@]}" --train-iters 40 --out dropped --resume auto
expect "stopped anywhere: the same bits" cmp whole/latest/model.safetensors dropped/latest/model.safetensors
expect "stopped anywhere: each step once" test "$(losses whole)" == "$(losses dropped)"
"$program" train "${S[@]}" --train-iters 30 --out pipe | head -n 1 >/dev/null
expect "output that nobody reads ends nothing" test -e pipe/step_00000030

# ---- a copied run ----
expect "a run" "$program" train "${S[@]}" --train-iters 6 --save-every 2 --keep 0 --out orig
cp -rL orig copy
expect "a copy that followed links resumes" "$program" train "${S[@]}" --train-iters 9 --override train-iters --resume auto --keep 1 --out copy
expect "latest is a link again" test "$(readlink copy/latest)" == step_00000009
expect "the copied folder is set aside" test -e copy/latest.1/config.json
expect "and old checkpoints are pruned" test "$(ls -d copy/step_* | wc -l)" == 1
mkdir alone
cp -rL orig/latest alone/latest
expect "a copy of latest alone resumes" "$program" train "${S[@]}" --train-iters 9 --override train-iters --resume auto --out alone
says "from its step" "alone/step_00000006"
rm copy/latest
expect "a finished run without latest has nothing to do" "$program" train "${S[@]}" --train-iters 9 --override train-iters --resume auto --out copy
expect "but points it again" test "$(readlink copy/latest)" == step_00000009
endless replaced --save-every 20 --keep 1 &
run=$!
wait_for "checkpoint replaced/step" replaced.txt
put_folder() { rm -f replaced/latest && mkdir replaced/latest; } # between two checkpoints of the run, so possibly after a retry
expect "latest is replaced by a folder while running" comes put_folder
sleep 1
kill -TERM $run
ends "latest replaced by a folder while running: status 0" $run
expect "latest replaced by a folder while running: a link again" test -L replaced/latest
expect "latest replaced by a folder while running: one checkpoint is kept" test "$(ls -d replaced/step_* | wc -l)" == 1
endless deleted --save-every 50 &
run=$!
wait_for "checkpoint deleted/step" deleted.txt
mv deleted deleted-now  # rm by itself would race with the run's writes
expect "the folder is deleted while running" rm -rf deleted-now
sleep 1
expect "the folder deleted while running: nobody else gets in" refused "$program" train "${S[@]}" --train-iters 9 --out deleted
kill -TERM $run
ends "the folder deleted while running: status 0" $run
endless lost --save-every 50 --log-interval 1000 &
run=$!
wait_for "checkpoint lost/step" lost.txt
kill -STOP $run
mv lost lost.moved
"$program" train "${S[@]}" --train-iters 100000 --out lost --save-every 50 >thief.txt 2>&1 &
thief=$!
wait_for '"kind":"step","step":100,' lost/log.jsonl
inode=$(stat -c %i lost/log.jsonl)
kill -CONT $run
sleep 1
expect "a folder that another run took: its log is left alone" test "$(stat -c %i lost/log.jsonl)" == "$inode"
kill -TERM $run
ends "a folder that another run took: the first one cannot save there" $run 1
expect "a folder that another run took: and says why" grep -q "another run (process [0-9]*) has been writing to lost since this one took it" lost.txt
kill -TERM $thief
ends "a folder that another run took: that one ends well" $thief
expect "a folder that another run took: with its own log" test "$(stat -c %i lost/log.jsonl)" == "$inode"
expect "the folder deleted while running: the last checkpoint is there" "$program" inspect deleted

# ---- which checkpoint is valid ----
damage() { rm -rf bad; cp -r orig bad; } # copies the checkpoints to bad, for one to be damaged
expect "intact to begin with" "$program" inspect orig
for file in model.safetensors config.json training/state.json training/exp_avg.safetensors training/exp_avg_sq.safetensors $(cd orig/latest && ls training/master* 2>/dev/null); do
    damage
    python3 - "bad/step_00000006/manifest.json" "$file" <<'END'
import json, sys
manifest = json.load(open(sys.argv[1]))
del manifest["files"][sys.argv[2]]
json.dump(manifest, open(sys.argv[1], "w"))
END
    expect "a manifest without $file: inspect says so" refused "$program" inspect bad
    says "by name" "$file"
    expect "a manifest without $file: an older one is resumed" "$program" train "${S[@]}" --train-iters 7 --override train-iters --resume auto --out bad
    says "and this is reported" "does not list $file"
done
for counter in '"updates": 99' '"consumed_samples": 900000000' '"consumed_samples": -4' '"tokens": "x"' '"scheduled_samples": 18446744073709551615'; do
    damage
    name=${counter%%:*}
    sed -i "s/^  $name: [0-9]*/  $counter/" bad/latest/training/state.json
    rm -f bad/latest/manifest.json
    python3 - bad/latest <<'END'
import json, os, sys
table = [0] * 256
for i in range(256):
    c = i
    for _ in range(8): c = c >> 1 ^ (0x82f63b78 if c & 1 else 0)
    table[i] = c
def crc(data):
    c = 0xffffffff
    for b in data: c = table[(c ^ b) & 255] ^ c >> 8
    return "%08x" % (c ^ 0xffffffff)
top, files = sys.argv[1], {}
for folder, _, names in os.walk(top):
    for name in names:
        path = os.path.join(folder, name)
        data = open(path, "rb").read()
        files[os.path.relpath(path, top)] = {"bytes": len(data), "crc32c": crc(data)}
json.dump({"checksum": "crc32c", "files": files}, open(top + "/manifest.json", "w"))
END
    expect "state.json with $counter: an error" error "$program" train "${S[@]}" --train-iters 8 --override train-iters --resume auto --out bad
    says "which names it" "state.json.*$(tr -d '"' <<<"$name")"
done

# ---- no checkpoints, for measurements ----
expect "--save-every never" "$program" train "${S[@]}" --train-iters 2 --save-every never --out unsaved
expect "saves nothing" test -z "$(find unsaved -name 'step_*' -o -name latest)"
expect "and has its log" grep -q '"status":"finished"' unsaved/log.jsonl
for option in "--exit-after 1h" "--keep-every 2" "--on-spike rollback"; do
    # shellcheck disable=SC2086
    expect "with $option it is refused" refused "$program" train "${S[@]}" --train-iters 2 --save-every never $option --out never
    says "$option: by its name" "${option%% [0-9]*} and --save-every never cannot be combined: .*HINT: "
done
endless unsaved-endless --save-every never &
pid=$!
wait_for '"step":3,' unsaved-endless/log.jsonl
kill -TERM $pid
ends "told to stop it ends" $pid
expect "and promises no checkpoint" grep -q "stopping after this micro-batch; nothing is saved" unsaved-endless.txt
expect "of which there is none" test -z "$(find unsaved-endless -name 'step_*' -o -name latest)"

# ---- weights that changed after they were saved are not used ----
cp -r home flipped
printf x | dd of="$(realpath flipped/latest)/model.safetensors" bs=1 seek=5000 conv=notrunc 2>/dev/null
for use in "generate --prompt a --model" "eval --text text.txt --model" "export --gguf x.gguf --model" \
    "train ${S[*]:6} --train-iters 2 --out tuned --model"; do
    # shellcheck disable=SC2086
    expect "${use%% *}: changed weights are refused" refused "$program" $use flipped/latest
    says "${use%% *}: with what to do" "model.safetensors is damaged.*HINT: .*manifest.json"
done
echo '{"name": "a model of another program"}' >"$(realpath flipped/latest)/manifest.json"
expect "a manifest that is not ours says nothing" "$program" eval --text text.txt --model flipped/latest
rm "$(realpath flipped/latest)/manifest.json"
expect "without a manifest they are taken" "$program" eval --text text.txt --model flipped/latest
expect "with an average of the weights" "$program" train "${S[@]}" --train-iters 2 --ema-decay 0.9 --out averaged
expect "it is taken" "$program" eval --text text.txt --model averaged/latest/ema
printf x | dd of="$(realpath averaged/latest)/ema/model.safetensors" bs=1 seek=5000 conv=notrunc 2>/dev/null
expect "if it has changed it is not" refused "$program" eval --text text.txt --model averaged/latest/ema/
says "by its name" "ema/model.safetensors is damaged"
expect "the weights beside it are" "$program" eval --text text.txt --model averaged/latest

# ---- a tokenizer that cannot be saved ----
cp -r tok kept
expect "no room for a tokenizer: an error" error bash -c "trap '' XFSZ; ulimit -f 4; exec '$program' tokenizer --input text.txt --vocab-size 320 --output kept"
expect "the one before is in its place" cmp tok/tokenizer.json kept/tokenizer.json
expect "and alone" test "$(ls kept)" == tokenizer.json

# ---- non-finite values: weights whose exponents are flipped and that each update multiplies by -9,999 ----
steep=(--lr 10 --min-lr 10 --weight-decay 1000 --train-iters 3)
export TRAIN_GPT_FAULTS="flip-weight=1 flip-weight=2"
expect "weights that are not finite: the run does not end well" error "$program" train "${S[@]}" "${steep[@]}" --save-every 2 --out nan
unset TRAIN_GPT_FAULTS
says "and says which" "weight of model.safetensors is not finite"
expect "weights that are not finite: no checkpoint, and latest names none" test -z "$(ls -d nan/step_* nan/latest 2>/dev/null)"
expect "a last loss that is not finite: the run does not end well" error "$program" train "${S[@]}" "${steep[@]}" --out nan
says "and says so" "the last loss is not finite"
expect "the log says so in its only end" grep -q '"status":"failed".*the last loss is not finite' <(grep '"kind":"end"' nan/log.jsonl)
expect "which is written once" test "$(grep -c '"kind":"end"' nan/log.jsonl)" == 1
expect "neither says finished" refused grep -h '"status":"finished"' nan/log.jsonl nan/log.jsonl.1

# ---- a checkpoint that takes too long ----
while [[ $((SECONDS - told)) -lt 32 ]]; do sleep 0.2; done
kill -CONT $late
wait_for "30 s after the signal" late.txt
expect "half a minute after the signal it warns" grep -q "30 s after the signal the checkpoint is not complete" late.txt
kill -INT $late
sleep 0.5
kill -INT $late
ends "and goes on until a second Ctrl-C" $late 130

# ---- several ranks under a launcher: ten short steps, then one that takes minutes ----
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0  # MPI's own
launcher=$(realpath "$here/../scripts/launch.sh")
long=(train "${S[@]}" --num-layers 4 --hidden-size 128 --global-batch-size 20000 --rampup-batch-size 4 19996 40 --train-samples 90000 --out)
# stopped NAME OUT PID SIGNAL...: the launcher's run ends well, soon, and with a checkpoint of the tenth step.
stopped() {
    local name=$1 out=$2 pid=$3 start
    shift 3
    wait_for '"kind":"step","step":10,' "$out/log.jsonl"
    sleep 0.5
    start=$SECONDS
    for signal; do kill -"$signal" "$pid"; done
    ends "$name: status 0" "$pid"
    expect "$name: soon" test $((SECONDS - start)) -le 15
    expect "$name: the last whole step is saved" test "$(readlink "$out/latest")" == step_00000010
    expect "$name: and says why" grep -q '"status":"stopped".*by SIG.* 2 ranks of .* --resume auto"' "$out/log.jsonl"
}
for layout in "" ${ALL:+"--tp 2" "--pp 2"} "--pp 2 --vpp 2"; do
    out=ranks${layout//[ -]/}
    # shellcheck disable=SC2086
    "$launcher" mpirun -n 2 "$program" "${long[@]}" "$out" $layout >"$out.txt" 2>&1 &
    stopped "2 ranks $layout: SIGTERM to the launcher" "$out" $! TERM
done
"$launcher" mpirun -n 2 "$program" "${long[@]}" one >one.txt 2>&1 &
launched=$!
wait_for '"kind":"step","step":10,' one/log.jsonl
sleep 0.5
pkill -TERM -n -f "^$program_pattern train .* --out one\$"
ends "2 ranks: SIGTERM to one of them: status 0" $launched
expect "2 ranks: SIGTERM to one of them: the last whole step is saved" test "$(readlink one/latest)" == step_00000010
expect "2 ranks: goes on from there" bash -c "'$launcher' mpirun -n 2 '$program' ${long[*]} one --resume auto --exit-after 0.5s"
mpirun -n 2 "$program" "${long[@]}" usr1 >usr1.txt 2>&1 &
stopped "2 ranks: SIGUSR1 to mpirun itself" usr1 $! USR1
"$launcher" "$program" "${long[@]}" plain >plain.txt 2>&1 &
wait_for '"kind":"step","step":10,' plain/log.jsonl
kill -HUP $!
ends "one rank under the launcher: SIGHUP: status 0" $!
expect "the launcher's status is the command's" bash -c "'$launcher' bash -c 'exit 7'; [[ \$? == 7 ]]"
