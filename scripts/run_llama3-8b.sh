#!/usr/bin/env bash
# Llama 3 8B (Grattafiori et al., 2024, arXiv:2407.21783)
#   parameters   8,030,261,248
#   tokens       15.0T: 3,576,279 steps of 512 samples of 8,192
#   FLOPs        6 x parameters x tokens = 7.23e23
#   memory       72.2 GiB on the fullest GPU (--dry-run)
#   time         512 H100 at 55% of 989 TFLOP/s: 30 days (the share as planned)
# Learning rate, its decay and warm-up are the paper's; Meta names 15T tokens and 1.3M GPU hours of H100. Batch, number of
# GPUs and layout are not published.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-512}
run "$@"
