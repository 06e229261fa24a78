#!/usr/bin/env bash
# train_gpt sweep as a user runs it, on a tiny model: it finds the good learning rate among bad ones, despite failing runs
# and interruptions, and with any number of jobs; its files and its refusals.
. "$(dirname "$0")/lib.sh"

for i in $(seq 400); do echo "In the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep"; [[ $((i % 4)) == 0 ]] && echo; done >text.txt
"$program" tokenizer --input text.txt --vocab-size 300 --output tok >/dev/null 2>&1
"$program" prepare --input text.txt --split-documents blank --tokenizer tok --output data >/dev/null 2>&1
tiny=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --tokenizer tok --data-path data --split "90, 10, 0" --seq-length 32
    --micro-batch-size 4 --eval-iters 2 --lr-warmup-iters 9 --min-lr 1e-6 --threads 2)
sweep() { "$program" sweep "${tiny[@]}" --train-iters 90 "$@"; }
# A width of 32 has no 3 heads: half of the configurations die.
planted=(--lr 1e-6 --over "lr=1e-6,1e-5,3e-3" --over "num-attention-heads=2,3" --configs 8 --seeds 2)
# results DIR: every run's result, without its time.
results() { grep -E '"(rung|config|seed|loss|failed)":' "$1/sweep.json"; }
same() { cmp <(results "$1") <(results "$2") && cmp <(grep -v '^#' "$1/best.toml") <(grep -v '^#' "$2/best.toml"); }

# ---- the search ----
expect "a sweep" sweep "${planted[@]}" --out found
cp out.txt found.txt
says "the plan has its rungs" "^  rung 2  *4 runs of 11.5K tokens, 2 seeds of each of 2"
says "a line for each run" "^rung 1, run 6/6: "
says "a run that dies is counted" "^note: 3 of 10 runs failed"
says "with what it said" "^  exit status 2: .*heads"
says "no fit of two computes" "^no fit of loss over compute: a power law needs runs of 3 different computes"
expect "at most 80 columns" awk 'length > 80 { bad = 1 } END { exit bad || NR < 15 }' found.txt
expect "the planted rate is found" grep -q '^lr = 0.003' found/best.toml
expect "for the whole run" grep -qx 'train-iters = 90' found/best.toml
expect "whose warm-up is whole" grep -qx 'lr-warmup-iters = 9' found/best.toml
expect "--min-lr kept its part of --lr" grep -q '^min-lr = 0.00[23]' found/best.toml
expect "the axes of each chart have titles" test "$(grep -o '>validation loss</text>' found/sweep.html | wc -l)" == 4
expect "the page has a chart for each option" test "$(grep -o '<svg' found/sweep.html | wc -l)" == 4
expect "every run has its log" test "$(find found/logs -name '*.jsonl' | wc -l)" -eq 7
expect "a third of the run has a third of the warm-up" grep -q '"lr-warmup-iters":3,' found/logs/rung-1-config-4-seed-0.jsonl
expect "checkpoints are not kept" test -z "$(find found -name '*.safetensors')"
expect "best.toml trains" "$program" train --config found/best.toml --train-iters 12 --lr-warmup-iters 1 --out trained

# ---- the same again ----
expect "the same command: nothing is left to do" sweep "${planted[@]}" --out found
says "it says so" "ended before  *10 runs"
expect "no run is repeated" refused grep -q "^rung 1, run" out.txt
expect "two jobs" sweep "${planted[@]}" --jobs 2 --threads 2 --out jobs
expect "have the bits of one" same found jobs
# ended_by SIGNAL OUT: sends SIGNAL after three runs; sets `status`; all child processes must have ended.
ended_by() {
    local pid trial
    "$program" sweep "${tiny[@]}" --train-iters 90 "${planted[@]}" --out "$2" >"$2.txt" 2>&1 &
    pid=$!
    comes grep -q "^rung 1, run 3/6" "$2.txt"
    trial=$(pgrep -P $pid)
    kill "-$1" $pid
    wait $pid 2>/dev/null
    status=$?
    comes refused kill -0 "$trial"
}
for signal in KILL INT TERM; do
    # As a terminal's child: a background command of a script ignores SIGINT.
    expect "SIG$signal in the middle" eval 'set -m; ended_by $signal ended-$signal'
    expect "SIG$signal ends it" test $status == $((128 + $(kill -l $signal)))
    expect "without an end of the search" test ! -e ended-$signal/best.toml
    [[ $signal == KILL ]] || expect "and it says how it goes on" grep -q "^stopped after [3-9] runs; the same command resumes" ended-$signal.txt
    expect "it goes on" sweep "${planted[@]}" --out ended-$signal
    says "where it was" "ended before  *[3-9] run"
    expect "and finds the same" same found ended-$signal
done
expect "another sweep in its place is refused" refused sweep "${planted[@]}" --seq-length 16 --out found
says "by the option that differs" "found has a sweep with another --seq-length: 32 there, 16 now"
tr a-z b-za <text.txt >other.txt
mkdir kept
mv data.* kept
expect "other data of the same name" "$program" prepare --input other.txt --split-documents blank --tokenizer tok --output data
expect "is refused" refused sweep "${planted[@]}" --out found
says "by what it is" "found has a sweep over other data: .*checksum .* there, .*checksum .* now"
mv kept/* .
expect "runs that cannot go back skip" sweep --over lr=1e-3,3e-3 --configs 2 --seeds 1 --on-spike rollback --keep-every 40 --out spikes
expect "what is recommended is as it was" grep -qx 'on-spike = "rollback"' spikes/best.toml
cp -r found damaged
head -c 300 found/sweep.json >damaged/sweep.json
expect "a damaged table is refused" refused sweep "${planted[@]}" --out damaged
mkdir mine
echo "lr = 1" >mine/best.toml
expect "the user's file stays" refused sweep "${planted[@]}" --out mine
expect "as it was" test "$(cat mine/best.toml)" == "lr = 1"

# ---- budgets, compute, widths ----
sized=(--tokenizer tok --data-path data --split "90, 10, 0" --seq-length 32 --micro-batch-size 4 --global-batch-size 4 --eval-iters 2 --lr 3e-3 --train-iters 90)
expect "sizes" "$program" sweep "${sized[@]}" --size 70k --over "size=70k,118k,167k" --seeds 1 --budget-tokens 20k --out sizes
says "a fit of three computes" "^loss = a C^-b, C in 10^15 FLOP: a = [0-9.]* +- [0-9.]*, b = [0-9.]* +- [0-9.]*; of"
says "the whole budget and no more" "^  total  *[12][0-9.]*K tokens"
expect "a budget of time" sweep --over lr=1e-3..1e-2 --configs 2 --seeds 1 --budget 20s --out timed
says "with its time" "^  total  .*, about .*s; the whole run has"
expect "runs that would be too short" refused sweep --over global-batch-size=4..16 --configs 8 --seeds 1 --train-iters 20 --out short
says "whose length and number can be changed, no seeds" "HINT: more --train-iters, or fewer --configs$"
mup=(--lr 3e-3 --parametrization mup --over lr=1e-3..1e-2 --configs 2 --seeds 1)
expect "muP" sweep "${mup[@]}" --out mup
says "the command of a wider model" "hidden-size 128 --num-attention-heads 8$"
expect "the base is the width of the sweep" grep -qx 'mup-base-width = 32' mup/best.toml
expect "a wider model trains with it" "$program" train --config mup/best.toml --hidden-size 64 --num-attention-heads 4 --train-iters 2 --lr-warmup-iters 1 --dry-run
says "as twice the base" "width 64 is 2 times the base's 32"
begin=(--data-path data --split "90, 10, 0" --micro-batch-size 4 --global-batch-size 4 --eval-iters 2 --lr 3e-3)
expect "a run" "$program" train --tokenizer tok --size 70k --seq-length 32 "${begin[@]}" --train-iters 2 --lr-warmup-iters 1 --out run
expect "a sweep from its newest checkpoint" "$program" sweep --model run "${begin[@]}" --train-iters 20 --over lr=1e-3,2e-3 --configs 2 --seeds 1 --out of-run
expect "a plan writes nothing" sweep "${planted[@]}" --dry-run --out nothing
expect "no folder" test ! -e nothing

echo '{"context": "In the year", "choices": [" 1", " the king"], "gold": 0}' >task.jsonl
expect "tasks of the run are not measured in trials" sweep --over lr=1e-3..1e-2 --configs 2 --seeds 1 --eval-tasks task.jsonl --eval-tasks-samples 1 --eval-tasks-interval 5 --out tasks

# ---- refusals ----
no() { # NAME PATTERN OPTIONS...
    local name=$1 pattern=$2
    shift 2
    expect "$name: refused" refused sweep "$@" --out refused
    says "$name: by name" "$pattern"
}
no "nothing to search" "option to search over is missing; HINT: --over lr="
no "no values" "\-\-over 'lr' must be NAME=LOW..HIGH or NAME=A,B,C" --over lr
no "an unknown option" "'learnin-rate' is not an option of train" --over learnin-rate=1,2
no "a range of words" "a range is for numbers" --over optimizer=a..b
no "a range that goes down" "from the lower to the higher" --over lr=1e-2..1e-4
no "a value that is not allowed" "\-\-lr is '-1'; it must be a number from 1e-20 to 10" --over lr=1e-3,-1
no "the same value twice" "has 0.1 twice" --over weight-decay=0.1,0.1
no "an empty value" "has an empty value" --over weight-decay=0.1,,0.2
no "an option twice" "\-\-over names --lr twice" --over lr=1e-3,1e-2 lr=1e-4..1e-2
no "the length" "\-\-train-iters cannot be swept" --over train-iters=5,10
no "what the loss is" "\-\-dpo-beta cannot be swept: .*comparable" --over dpo-beta=0.1,0.2
no "a list" "its value is a list" --over data-path=a,b
no "too small a budget" "budget-tokens 1000 gives the runs of the first of 2 rungs .* steps" "${planted[@]}" --budget-tokens 1000
no "too little time" "budget 0.1s gives the runs" "${planted[@]}" --budget 0.1s
no "no time" "budget is 'soon'; it must be a duration" "${planted[@]}" --budget soon
no "no validation" "there is no validation data; HINT: --split" "${planted[@]}" --eval-iters 0
no "more jobs than threads" "jobs divides the CPU's threads" "${planted[@]}" --jobs 8 --threads 2
no "widths under muP without a base" "HINT: --mup-base-width 32" --parametrization mup --over "hidden-size=32,64"
no "a model that cannot be" "none of the 2 configurations can be trained; .*HINT" --over "hidden-size=33,35"
