#!/usr/bin/env bash
# Llama 3 70B (Grattafiori et al., 2024, arXiv:2407.21783)
#   parameters   70,553,706,496
#   tokens       15.0T: 1,788,139 steps of 1024 samples of 8,192
#   FLOPs        6 x parameters x tokens = 6.35e24
#   memory       70.2 GiB on the fullest GPU (--dry-run)
#   time         2,048 H100 at 40% of 989 TFLOP/s: 91 days (the share as planned)
# Learning rate, its decay and warm-up are the paper's; Meta names 15T tokens and 6.4M GPU hours of H100. Batch, number of
# GPUs and layout are not published.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-2048}
run "$@"
