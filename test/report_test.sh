#!/usr/bin/env bash
# Reporting never changes how a run ends: curves of any shape, files that others delete or that cannot be written, a damaged
# log, a closed console, no more threads.
#   TRAIN_GPT=path/to/train_gpt test/report_test.sh
root=$(realpath "$(dirname "$0")/..")
. "$root/test/lib.sh"

for i in $(seq 1 2000); do echo "in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son"; echo; done >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 380 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents blank

train() { # OUT OPTIONS...
    local out=$1
    shift
    ${EXEC:-} "$program" train --num-layers 1 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --data-path text --seq-length 24 --micro-batch-size 2 --global-batch-size 4 \
        --lr 3e-3 --eval-iters 0 --threads 1 --out "$out" "$@"
}
steps() { seq 1 "$2" | cmp - <(losses "$1" | cut -d ' ' -f 1); }
finished() { tail -n 1 "$1/log.jsonl" | grep -q '"kind":"end".*"status":"finished"'; }
# Waits until a run has logged a step.
started() { for _ in $(seq 1 200); do grep -q '"kind":"step"' "$1/log.jsonl" 2>/dev/null && return; sleep 0.05; done; return 1; }

# ---- curves: the losses of two steps may be any two numbers ----
[[ -n ${SAN:-} ]] || ulimit -v 8000000 # an axis without end would use up all memory
for seed in 1 2 3 4 5 6 7 8; do expect "two steps, seed $seed" train "two-$seed" --train-iters 2 --lr 1e-9 --seed $seed; done
expect "a loss that grows" train grows --lr 10 --train-iters 2
expect "it has its report" grep -q 'id="loss"' grows/report.html
expect "the loss beside it is called smoothed" grep -q "Training loss (smoothed)" grows/report.html
expect "a finger, too, finds the way back from a part" grep -q '<button.*id="whole".*>reset zoom</button>' grows/report.html

# ---- the page rewritten, and several runs on one page, including a running one ----
cp two-1/report.html before.html
expect "report: the page again" "$program" report two-1
expect "report: as training wrote it" diff <(sed 's/data-time.*Updated [^.]*//' before.html) <(sed 's/data-time.*Updated [^.]*//' two-1/report.html)
EXEC=exec train going --train-iters 1000000 >/dev/null 2>&1 &
pid=$!
comes grep -q '"kind":"step"' going/log.jsonl
expect "report: one run elsewhere" "$program" report two-1 --output all.html
expect "report: several runs, and the page of the last time" "$program" report all.html two-2 two-3/log.jsonl two-4/report.html going --output all.html
kill $pid
wait $pid
expect "report: the runs are there" grep -q '{"name":"two-2".*' all.html
expect "report: one goes on" grep -q '<td><span class="status running">' all.html
expect "report: the seeds differ" grep -q '<th>seed</th><td>2</td><td>3</td><td>4</td>' all.html
mkdir -p x/run y/run
cp two-1/log.jsonl x/run
cp two-1/log.jsonl y/run
expect "report: runs of one name" "$program" report x/run y/run/log.jsonl
expect "report: are told apart" grep -q '<h3>\|>x/run</th>' report.html
expect "report: a comparison does not replace a run's own page" refused env -C two-1 "$program" report . ../two-2
says "report: and says so" "own page in this folder; HINT: --output"
echo "mine" >mine.html
"$program" curate --input text.txt --normalize --output curated >/dev/null 2>&1
cp curated/report.html curation.html
for given in "" "none" "tok" "tok/report.html" "text.txt" "two-1 --output mine.html" "two-1 --output curated/report.html" "two-1 --output none/all.html" "$(yes two-1 | head -n 33)"; do
    # shellcheck disable=SC2086
    expect "report is refused: ${given:0:40}" refused "$program" report $given
    says "report says what to do: ${given:0:40}" "HINT\|at most 32\|cannot write"
done
expect "report: what is no report stays" grep -qx "mine" mine.html
expect "report: as does the page of a curation" cmp curated/report.html curation.html
if command -v node >/dev/null; then passes "the report's script" node "$root/test/report_script.js" two-1/report.html
else echo "ok: the report's script: not tested, there is no node"; fi

# ---- the run record: user and machine, each fact once ----
expect "a run with a name" train named/run-7 --train-iters 2 --name "a name"
says "which the console shows" "name  *a name"
expect "one without is called by its folder" train named/run-8/ --train-iters 2
record='
import json, sys
def once(pairs):
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), keys
    return dict(pairs)
lines = [json.loads(line, object_pairs_hook=once) for line in open(sys.argv[1])]
run, step = lines[0], next(line for line in lines if line["kind"] == "step")
assert run["name"] == sys.argv[2], run["name"]
assert run["summary"]["parameters"].split()[0].replace(",", "").isdigit(), run["summary"]["parameters"]
assert "B" in run["summary"]["memory: parameters"]
assert set(run["machine"]) >= {"processor", "host", "ranks", "peak"} and all(run["machine"].values()), run["machine"]
assert step["memory_bytes"] > 1e6 and 0 < step["mfu"] < 1, step
'
expect "each key of a record once, and the machine is there" python3 -c "$record" named/run-7/log.jsonl "a name"
expect "the folder's name" python3 -c "$record" named/run-8/log.jsonl run-8
expect "the report has the name" grep -q "<title>a name" named/run-7/report.html
expect "the report has the number of parameters" grep -q "<tr><th>parameters</th><td>[0-9,]* (" named/run-7/report.html

# ---- TensorBoard: a run that is killed, resumed, and rolled back has each step once, as in the log ----
board() { train board --tensorboard --save-every 7 --keep 0 --eval-iters 1 --eval-interval 10 --split 90,10,0 "$@"; }
check_board() { python3 "$root/test/tensorboard_check.py" "${1:-board/tensorboard}" board/log.jsonl; }
EXEC=exec board --train-iters 1000000 >board.txt 2>&1 &
pid=$!
comes grep -q '"kind":"step","step":30,' board/log.jsonl
kill -9 $pid
wait $pid 2>/dev/null
steps_so_far=$(losses board | tail -n 1 | cut -d ' ' -f 1)
expect "TensorBoard: resumed after a kill" board --resume auto --train-iters $((steps_so_far + 20)) --override train-iters data-order
expect "TensorBoard: each step once, as the log has it" check_board
expect "TensorBoard: gone back to step 7" board --resume board/step_00000007 --train-iters 40 --override train-iters data-order
expect "TensorBoard: the steps that came again have their new numbers" check_board
expect "TensorBoard: one file for each start" test "$(find board/tensorboard -type f | wc -l)" == 3
expect "TensorBoard: in another folder" board --resume board/step_00000007 --train-iters 30 --override train-iters data-order --tensorboard-dir elsewhere --prometheus board.prom
expect "TensorBoard: which goes on after step 7" refused check_board elsewhere
expect "TensorBoard: and has a file" test "$(find elsewhere -type f | wc -l)" == 1
expect "TensorBoard: a file in the folder's place is refused" refused board --resume auto --train-iters 50 --override train-iters data-order --tensorboard-dir text.txt
says "TensorBoard: by name" "text.txt"

# ---- the file for Prometheus: whole lines in its format, with the newest figures of the log ----
expect "Prometheus: its format" python3 -c "
import json, re
values, seen = {}, set()
for line in open('board.prom'):
    if found := re.fullmatch(r'# (HELP|TYPE) (train_gpt_\w+) \S.*\n', line):
        seen.add((found[1], found[2]))
    else:
        name, value = re.fullmatch(r'(train_gpt_\w+)\{run=\"board\"\} (\S+)\n', line).groups()
        assert {('HELP', name), ('TYPE', name)} <= seen and name not in values, line
        values[name] = float(value)
log = [json.loads(line) for line in open('board/log.jsonl')]
step = [r for r in log if r['kind'] == 'step'][-1]
valid = [r for r in log if r['kind'] == 'valid'][-1]
expected = {'step': 30, 'tokens': step['tokens'], 'loss': step['loss'], 'validation_loss': valid['loss'], 'running': 0,
            'step_seconds': step['step_ms'] / 1e3, 'learning_rate': step['lr']}
for name, value in expected.items():
    assert abs(values['train_gpt_' + name] - value) <= 1e-9 * abs(value), (name, values, value)
"
no "Prometheus: another file, which would be replaced" "ends with .prom" board --train-iters 50 --prometheus text.txt
no "Prometheus: a folder that does not exist" "cannot write no/such.prom" board --resume auto --train-iters 50 --override train-iters data-order --prometheus no/such.prom

# ---- a terminal of 80 columns: no line in any phase is longer ----
if script -qec true /dev/null </dev/null >/dev/null 2>&1; then
    narrow() { # NAME ARGUMENTS...: its output on such a terminal, with line breaks for carriage returns
        local name=$1
        shift
        script -qec "stty cols 80; $program train --num-layers 1 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --data-path text --split 90,10,0 --seq-length 24 \
            --micro-batch-size 2 --global-batch-size 4 --rampup-batch-size 2 2 20 --train-samples 100000 --eval-iters 2 --z-loss 1e-4 --adam-eps 1e-6 --threads 1 $*" /dev/null </dev/null >raw.txt
        sed 's/\r/\n/g; s/\x1b\[[0-9;]*[mK]//g' raw.txt >"$name.txt"
    }
    fits() { ! grep -nE '^.{81}' "$1"; }
    narrow plan --out narrow-run --dry-run
    expect "80 columns: the plan" grep -q "whole run" plan.txt
    expect "80 columns: the plan fits" fits plan.txt
    narrow run --out narrow-run --exit-after 1s
    expect "80 columns: a run ends in order" grep -q "stopped after" run.txt
    expect "80 columns: it fits" fits run.txt
    expect "80 columns: the newest step is rewritten" grep -qP '\x1b\[K' raw.txt
    narrow refused --out narrow-run
    expect "80 columns: an error" grep -q "already holds a run" refused.txt
    expect "80 columns: it fits" fits refused.txt
else echo "ok: skipped: there is no script(1) for a terminal"; fi

# ---- files that others delete during the run; its end rewrites the report at the latest ----
delete() { # NAME COMMAND: deletes during a run
    EXEC=exec train deleted --train-iters 3000 --save-every 1500 >"$1.txt" 2>&1 &
    local pid=$!
    started deleted && eval "$2"
    expect "$1: the run goes on" wait $pid
    expect "$1: the log is whole" steps deleted 3000
    expect "$1: it is said" grep -q "warning: deleted/log.jsonl was deleted or replaced" "$1.txt"
    expect "$1: there is a report" test -s deleted/report.html
    expect "$1: and a checkpoint" "$program" inspect deleted/step_00003000
    rm -rf deleted
}
delete "log deleted" "rm deleted/log.jsonl"
delete "log replaced" "mv deleted/log.jsonl old; echo '{}' >new.jsonl && mv new.jsonl deleted/log.jsonl"
delete "folder deleted" "mv deleted gone"

# ---- files that cannot be written ----
train taken --train-iters 2 >/dev/null 2>&1
rm taken/loss.svg taken/report.html
mkdir taken/loss.svg taken/report.html
expect "report and curve cannot be written" train taken --train-iters 3 --override train-iters --resume auto
says "the report is missed" "error: the report: "
says "the curve is missed" "error: the loss curve: "
expect "the log has the run" finished taken

# ---- a console that nobody reads ----
closed() { train closed --train-iters 50 | head -n 1; return "${PIPESTATUS[0]}"; }
expect "a console that is closed" closed
expect "a console that is closed: to the end" finished closed

# ---- a damaged log ----
expect "to be resumed" train damaged --train-iters 20 --save-every 10 --keep 0
rm -r damaged/step_00000020
ln -sfn step_00000010 damaged/latest
{
    sed -n 1,6p damaged/log.jsonl
    head -c 200000 /dev/zero | tr '\0' '['
    printf '\n{"kind":5}\n{"kind":"step","step":"x"}\n{"kind":"step","step":3,"lo\n\xff\xfe\n{"kind":"event","step":[]}\n'
    printf '{"kind":"event","step":1,"message":'
    head -c 100000 /dev/zero | tr '\0' '['
    head -c 100000 /dev/zero | tr '\0' ']'
    printf '}\n'
    head -c 20000000 /dev/zero | tr '\0' 'x'
    printf '\n'
    sed -n '7,$p' damaged/log.jsonl
} >hostile.jsonl
cp hostile.jsonl damaged/log.jsonl
expect "a damaged log: resumed" train damaged --train-iters 20 --resume auto
says "a damaged log: it is said" "warning: 8 lines of damaged/log.jsonl"
expect "a damaged log: each step once" steps damaged 20

# ---- no more threads: from the first step the kernel refuses new ones to the run's user ----
if command -v setpriv prlimit >/dev/null && [[ $(id -u) == 0 && -z ${SAN:-} ]]; then
    chmod 755 "$work" && mkdir -m 777 few
    nobody="setpriv --reuid 65534 --clear-groups"
    EXEC="exec $nobody" train few/run --train-iters 3000 --save-every 1500 >few.txt 2>&1 &
    pid=$!
    started few/run
    # shellcheck disable=SC2086
    expect "no more threads: from now on" $nobody prlimit --pid $pid --nproc=1
    expect "no more threads: the run goes on" wait $pid
    expect "no more threads: checkpoints are written all the same" "$program" inspect few/run/step_00001500
    expect "no more threads: the last one too" "$program" inspect few/run/step_00003000
fi

# ---- runs: a line for each ----
mkdir -p list/b list/deep/a list/deep/er/still/too
echo '{"kind":"run","name":"first","total_steps":10}
{"kind":"step","step":4,"loss":2.5,"tokens":4096,"seconds":61,"step_ms":100}
{"kind":"valid","step":4,"loss":2.25}' >list/b/log.jsonl
echo '{"kind":"run","name":"second","total_steps":10}
{"kind":"step","step":10,"loss":3.5,"tokens":8192,"seconds":30,"step_ms":100}
{"kind":"valid","step":10,"loss":1.75}
{"kind":"end","step":10,"status":"finished","seconds":31}' >list/deep/a/log.jsonl
echo 'no record' >list/deep/er/log.jsonl
cp list/b/log.jsonl list/deep/er/still/too
expect "runs in a folder" "$program" runs list
says "have a head" "^run  *status  *step  *tokens  *loss  *valid  *time  *last news$"
says "a running one" "^list/b  *running  *4 of 10, 40%  *4.10K  *2.500  *2.250  *1m 01s  .* ago$"
says "a finished one, deeper" "^list/deep/a  *finished  *10 of 10, 100%  *8.19K  *3.500  *1.750  *31s  .* ago$"
order() { "$program" runs list "$@" 2>/dev/null | cut -d' ' -f1 | tr '\n' ' '; }
expect "in the order of their names" test "$(order)" == "run list/b list/deep/a "
expect "best first" test "$(order --sort valid)" == "run list/deep/a list/b "
touch -d '1 hour ago' list/b/log.jsonl
expect "newest first" test "$(order --sort news)" == "run list/deep/a list/b "
expect "one without news for long" "$program" runs list/b
says "is marked" "^list/b  *no news .* 1h 00m ago$"
expect "as JSON" "$program" runs list --json
says "with exact numbers" '"valid_loss": 1.75'
mkdir bare
no "a folder without runs" "there are no runs in bare" "$program" runs bare
expect "a run by its log" "$program" runs list/b/log.jsonl
says "is its folder" "^list/b  *no news "
no "a file instead of a folder" "lost.txt is a file; HINT: give the folder of a run" bash -c "echo >lost.txt; exec '$program' runs lost.txt"
no "a folder that does not exist" "there is no folder lost" "$program" runs lost
