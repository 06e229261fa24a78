#!/usr/bin/env bash
# GPT-2 124M (Radford et al., 2019)
#   parameters   124,439,808
#   tokens       10.0B: 19,073 steps of 512 samples of 1,024
#   FLOPs        6 x parameters x tokens = 7.47e18
#   memory       23.7 GiB on the fullest GPU (--dry-run)
#   time         8 H100 at 46% of 989 TFLOP/s: 0.6 hours (the share that one H100 reached; 37 minutes by --dry-run)
# The learning rate is GPT-3's for this size; the number of steps and the batch size are llm.c's.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-8}
run "$@"
