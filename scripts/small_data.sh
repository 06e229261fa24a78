#!/usr/bin/env bash
# Little text, many epochs: a model of 1M parameters on a twentieth of the quick start's Bible, plain and with the recipe,
# and a page that shows both. First: make quickstart.
#   QUICKSTART=quickstart   folder of the quick start's data
#   OUT=small_data          folder of the runs
#   STEPS=600               training steps
# The recipe: ten times the weight decay, each epoch shuffled separately, and the moving average of the weights as the final
# model (OUT/recipe/latest/ema). Its effect here: README.md in this directory.
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
