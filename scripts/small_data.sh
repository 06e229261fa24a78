#!/usr/bin/env bash
# Few texts, many epochs: a model of 1M parameters on a twentieth of the quick start's Bible, plain and by the recipe, with a page
# that shows both. First: make quickstart.
#   QUICKSTART=quickstart   where the quick start's data is
#   OUT=small_data          where the runs go
#   STEPS=600               training steps
# The recipe: a weight decay ten times as large, every epoch shuffled by itself, and the moving average of the weights as the
# model that is kept (OUT/recipe/latest/ema). What it brings here: README.md beside this file.
# Sources: Kim et al., 2025, "Pre-training under infinite compute", arXiv:2509.14786 (weight decay 30 times the usual one);
# Muennighoff et al., 2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264 (up to 4 epochs are as good as new data).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

QUICKSTART=${QUICKSTART:-quickstart}
OUT=${OUT:-small_data}
STEPS=${STEPS:-600}
TRAIN_GPT=${TRAIN_GPT:-./train_gpt}
[[ -e $QUICKSTART/data/0-bible.idx ]] || { echo "error: $QUICKSTART/data/0-bible.idx is not there; HINT: make quickstart" >&2; exit 1; }

run() { # NAME OPTIONS...
    local name=$1
    shift
    launch "$TRAIN_GPT" train --resume auto --size 1m --tokenizer "$QUICKSTART/tokenizer" --data-path "$QUICKSTART/data/0-bible" \
        --split "5, 10, 85" --seq-length 128 --micro-batch-size 8 --global-batch-size 8 --train-iters "$STEPS" \
        --lr 3e-3 --ema-decay 0.98 --eval-interval $(((STEPS + 11) / 12)) --eval-iters 25 --eval-fixed \
        --name "$name" --out "$OUT/$name" "$@"
}
run plain --weight-decay 0.1
run recipe --weight-decay 1.0 --reshuffle-each-epoch
"$TRAIN_GPT" report "$OUT/plain" "$OUT/recipe" --output "$OUT/report.html"
echo "report: $OUT/report.html"
