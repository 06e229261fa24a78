#!/usr/bin/env bash
# LLM-jp-3 980M (LLM-jp's training scripts)
#   parameters   990,150,144
#   tokens       2.07T: 988,240 steps of 512 samples of 4,096
#   FLOPs        6 x parameters x tokens = 1.23e22
#   memory       22.9 GiB on the fullest GPU (--dry-run)
#   time         32 H100 at 40% of 989 TFLOP/s: 11 days
# As in the original, the last 2,000 steps run at the minimum learning rate.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-32}
run "$@"
