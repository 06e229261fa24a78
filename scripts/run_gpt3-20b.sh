#!/usr/bin/env bash
# GPT-3 20B (NeMo Framework Launcher, conf/training/gpt3)
#   parameters   20,256,221,184
#   tokens       315B: 75,000 steps of 2048 samples of 2,048
#   FLOPs        6 x parameters x tokens = 3.83e22
#   memory       41.5 GiB on the fullest GPU (--dry-run)
#   time         512 A100 at 56% of 312 TFLOP/s: 4.9 days (the share as planned)
# As there, the last 12,500 steps run at the least learning rate. Its dropout of 0.1 is left out.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-512}
run "$@"
