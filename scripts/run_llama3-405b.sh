#!/usr/bin/env bash
# Llama 3 405B (Grattafiori et al., 2024, arXiv:2407.21783)
#   parameters   405,853,388,800
#   tokens       15.6T: 929,832 steps of 2048 samples of 8,192
#   FLOPs        6 x parameters x tokens = 3.80e25
#   memory       61.5 GiB on the fullest GPU (--dry-run)
#   time         8,192 H100 at 43% of 989 TFLOP/s: 126 days (the share as published)
# The paper's layout on 8,192 GPUs, of which it reports 43% of peak (430 TFLOP/s): 126 layers, one less on the first and the
# last stage. There the batch grew from 4M over 8M to 16M tokens; here it is 16M from the start.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-8192}
run "$@"
