#!/usr/bin/env bash
# The chaos suite (test/chaos/chaos.py; in full: make chaos): it must detect trainers broken on purpose, then it tests this one for
# some seconds, instead of ten minutes, always from the same seed.
#   TRAIN_GPT=build/cpu-bf16/train_gpt test/chaos_test.sh
program=$(realpath "${TRAIN_GPT:-./train_gpt}")
cd "$(dirname "$0")" || exit 1
chaos/chaos.py --self-test "$program"
chaos/chaos.py --seed "${CHAOS_SEED:-40000}" --seconds "${CHAOS_SECONDS:-12}" --failures 1 --reduce-seconds 20 "$program"
