#!/usr/bin/env bash
# Random pairs and triples of options (test/pairs/pairs.py): 100 of them, always the same, ALL=1: 1,000.
#   TRAIN_GPT=build/cpu-bf16/train_gpt test/pairs_test.sh      PAIRS=N PAIRS_SEED=S
program=$(realpath "${TRAIN_GPT:-./train_gpt}")
cd "$(dirname "$0")" || exit 1
pairs/pairs.py --pairs "${PAIRS:-$([[ -n ${ALL:-} ]] && echo 1000 || echo 100)}" --seed "${PAIRS_SEED:-1}" --failures 3 "$program"
