#!/usr/bin/env bash
# GPT-2 350M (Radford et al., 2019), "medium"
#   parameters   354,823,168
#   tokens       31.5B: 60,000 steps of 512 samples of 1,024
#   FLOPs        6 x parameters x tokens = 6.70e19
#   memory       55.7 GiB on the fullest GPU (--dry-run)
#   time         8 H100 at 40% of 989 TFLOP/s: 5.9 hours
# The learning rate is GPT-3's for this size; the number of steps and the batch size are llm.c's.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-8}
run "$@"
