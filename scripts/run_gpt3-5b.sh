#!/usr/bin/env bash
# GPT-3 5B (NeMo Framework Launcher, conf/training/gpt3)
#   parameters   5,047,365,632
#   tokens       315B: 75,000 steps of 2048 samples of 2,048
#   FLOPs        6 x parameters x tokens = 9.54e21
#   memory       54.8 GiB on the fullest GPU (--dry-run)
#   time         128 A100 at 59% of 312 TFLOP/s: 4.7 days (the share as planned)
# As there, the last 12,500 steps run at the least learning rate. Its dropout of 0.1 is left out.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-128}
run "$@"
