#!/usr/bin/env bash
# Research by trial and error: change an option, train for the same time, keep the change if validation improves, and
# repeat.
# First: make quickstart.
#   CANDIDATES=FILE         the changes to try, in order: a line of train's options each; # starts a comment. Default: those below
#   BUDGET=5m               time of each run (train --time-budget)
#   QUICKSTART=quickstart   folder of the quick start's data
#   BASE="..."              options of all runs; default: the quick start's model on its data
#   OUT=research            folder of the runs
# The first run has no change. Each later run has all changes kept so far and the next candidate. OUT/research.tsv is the
# table of all runs, best first; OUT/report.html has their curves. Runs in the table are not repeated and an interrupted run
# is resumed: the same command with more candidates tries only those. The score is bits per byte, or the validation loss
# without a tokenizer. A failed run counts as no improvement.
set -euo pipefail
export LC_ALL=C.UTF-8  # awk expects a decimal point
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
. "$(dirname "${BASH_SOURCE[0]}")/words.sh"

BUDGET=${BUDGET:-5m}
QUICKSTART=${QUICKSTART:-quickstart}
OUT=${OUT:-research}
TRAIN_GPT=${TRAIN_GPT:-./train_gpt}
if [[ -n ${BASE:-} ]]; then
    split_words "$BASE"
    base=("${words[@]}")
else
    data=$QUICKSTART/data
    [[ -e $data/0-bible.idx ]] || { echo "error: $data/0-bible.idx is not there; HINT: make quickstart" >&2; exit 1; }
    base=(--preset quickstart --tokenizer "$QUICKSTART/tokenizer" --data-path 0.8 "$data/0-bible" 0.2 "$data/1-debian-reference-ja" --split "95, 5, 0"
        --seq-length 256 --micro-batch-size 8 --global-batch-size 16 --optimizer muon --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 30
        --weight-decay 0.1 --eval-interval 1M --eval-iters 16 --eval-fixed)
fi
builtin_candidates() {
    cat <<'END'
--lr 6e-3
--global-batch-size 8
--optimizer normuon
--qk-layernorm
--lr-wsd-decay-style minus_sqrt
--weight-decay 0.2
END
}
if [[ -n ${CANDIDATES:-} ]]; then mapfile -t candidates <"$CANDIDATES"; else mapfile -t candidates < <(builtin_candidates); fi

mkdir -p "$OUT"
table=$OUT/research.tsv
[[ -e $table ]] || printf 'score\tsteps\trun\toptions\n' >"$table"

# number KEY: its value in the last record of the run.
number() { tail -n 1 "$run/log.jsonl" | sed -n "s/.*\"$1\":\([0-9.e+-]*\).*/\1/p"; }
# known OPTIONS: their score, if they are in the table.
known() { awk -F '\t' -v options="$1" 'NR > 1 && $4 == options { print $1; exit }' "$table"; }
# enter SCORE STEPS OPTIONS: adds a row to the sorted table.
enter() {
    { head -n 1 "$table"; { tail -n +2 "$table"; printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$(basename "$run")" "$3"; } | LC_ALL=C sort -g; } >"$table.tmp"
    mv "$table.tmp" "$table"
}
# try OPTIONS: trains with them unless they are in the table; sets `score`, a number or inf.
try() {
    local n=1 status=0
    score=$(known "$1")
    [[ -z $score ]] || return 0
    while run=$OUT/run-$n; [[ -e $run && $(cat "$run.options" 2>/dev/null) != "$1" ]]; do n=$((n + 1)); done
    echo "$1" >"$run.options"
    printf '\n== %s: %s\n' "$run" "${1:-as it is}"
    split_words "$1"
    launch "$TRAIN_GPT" train "${base[@]}" "${words[@]}" --time-budget "$BUDGET" --resume auto --name "$(basename "$run")" --out "$run" || status=$?
    [[ $status -lt 128 ]] || exit "$status"
    if [[ $status == 0 ]] && tail -n 1 "$run/log.jsonl" | grep -q '"status":"stopped"'; then
        echo "stopped; the same command resumes"
        exit 130
    fi
    score=inf
    if [[ $status == 0 ]]; then
        score=$(number bits_per_byte)
        score=${score:-$(number valid_loss)}
    fi
    [[ -n $score ]] || { echo "error: $run has no validation to compare runs by; HINT: --eval-iters, and data for validation" >&2; exit 1; }
    enter "$score" "$(number step)" "$1"
}

try ""
best=$score kept=
for candidate in "${candidates[@]}"; do
    candidate=${candidate%%#*}
    candidate=$(echo "$candidate" | sed 's/^ *//; s/ *$//')
    [[ -n $candidate ]] || continue
    options=${kept:+$kept }$candidate
    try "$options"
    if awk -v new="$score" -v best="$best" 'BEGIN { exit !(best == "inf" && new != "inf" || new + 0 < best + 0 && new != "inf") }'; then
        echo "kept: $candidate: $score after $best"
        best=$score kept=$options
    else echo "not kept: $candidate: $score, the best is $best"; fi
done

# A page has room for 32 runs: the best.
mapfile -t runs < <(tail -n +2 "$table" | grep -v '^inf' | head -n 32 | cut -f 3 | sed "s|^|$OUT/|")
[[ ${#runs[@]} -lt 1 ]] || "$TRAIN_GPT" report "${runs[@]}" --output "$OUT/report.html"
printf '\n'
column -t -s $'\t' "$table" 2>/dev/null || cat "$table"
printf '\nthe best, %s:\n  %s train%s %s --time-budget %s --out best\n' "$best" "$TRAIN_GPT" "$(printf ' %q' "${base[@]}")" "$kept" "$BUDGET"
