#!/usr/bin/env bash
# Qwen3 30B-A3B (Yang et al., 2025, arXiv:2505.09388)
#   parameters   30,532,122,624
#   active       3,353,032,704
#   tokens       30.0T: 3,576,279 steps of 2048 samples of 4,096
#   FLOPs        6 x active parameters x tokens = 6.04e23
#   memory       29.8 GiB on the fullest GPU (--dry-run)
#   time         1,024 H100 at 25% of 989 TFLOP/s: 28 days (the share as planned)
# The report has the first stage, over 30T tokens in samples of 4,096, the configuration the coefficient of the balance loss (of
# the global batch there). Batch, learning rate and number of GPUs are not published: rates are OLMoE's, the layout is ours.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-1024}
run "$@"
