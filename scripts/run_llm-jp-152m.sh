#!/usr/bin/env bash
# LLM-jp-3 152M (LLM-jp's training scripts)
#   parameters   152,308,224
#   tokens       2.07T: 988,240 steps of 512 samples of 4,096
#   FLOPs        6 x parameters x tokens = 1.89e21
#   memory       10.7 GiB on the fullest GPU (--dry-run)
#   time         64 H100 at 40% of 989 TFLOP/s: 21 hours
# As in the original, the last 2,000 steps run at the minimum learning rate.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-64}
run "$@"
