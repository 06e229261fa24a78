#!/usr/bin/env bash
# GPT-2 774M (Radford et al., 2019), "large"
#   parameters   774,030,080
#   tokens       150B: 286,102 steps of 512 samples of 1,024
#   FLOPs        6 x parameters x tokens = 6.97e20
#   memory       55.0 GiB on the fullest GPU (--dry-run)
#   time         8 H100 at 40% of 989 TFLOP/s: 2.5 days
# The learning rate is GPT-3's for this size; the number of steps and the batch size are llm.c's.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-8}
run "$@"
