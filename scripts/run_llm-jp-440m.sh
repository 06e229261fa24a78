#!/usr/bin/env bash
# LLM-jp-3 440M (LLM-jp's training scripts)
#   parameters   447,230,976
#   tokens       2.07T: 988,240 steps of 512 samples of 4,096
#   FLOPs        6 x parameters x tokens = 5.56e21
#   memory       20.8 GiB on the fullest GPU (--dry-run)
#   time         64 H100 at 40% of 989 TFLOP/s: 2.5 days
# As in the original, the last 2,000 steps run at the minimum learning rate. The number of GPUs is not published; this is
# the 152M model's.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-64}
run "$@"
