#!/usr/bin/env bash
# LLM-jp-3 3.8B, published as 3.7B (LLM-jp's training scripts)
#   parameters   3,782,851,584
#   tokens       2.07T: 494,120 steps of 1024 samples of 4,096
#   FLOPs        6 x parameters x tokens = 4.70e22
#   memory       39.5 GiB on the fullest GPU (--dry-run)
#   time         128 H100 at 40% of 989 TFLOP/s: 11 days
# As in the original, the last 2,000 steps run at the minimum learning rate.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-128}
run "$@"
