#!/usr/bin/env bash
# GPT-3 40B (NeMo Framework Launcher, conf/training/gpt3)
#   parameters   39,088,316,416
#   tokens       315B: 75,000 steps of 2048 samples of 2,048
#   FLOPs        6 x parameters x tokens = 7.39e22
#   memory       37.6 GiB on the fullest GPU (--dry-run)
#   time         1,024 A100 at 54% of 312 TFLOP/s: 5.0 days (the share as planned)
# As there, the last 12,500 steps run at the least learning rate. Its dropout of 0.1 is left out.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-1024}
run "$@"
