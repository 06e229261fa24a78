#!/usr/bin/env bash
# GPT-2 1558M (Radford et al., 2019), "XL"
#   parameters   1,557,611,200
#   tokens       33.6B: 32,000 steps of 1024 samples of 1,024
#   FLOPs        6 x parameters x tokens = 3.14e20
#   memory       51.0 GiB on the fullest GPU (--dry-run)
#   time         8 H100 at 40% of 989 TFLOP/s: 28 hours
# The learning rate is GPT-3's for this size; the number of steps and the batch size are llm.c's.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-8}
run "$@"
