#!/usr/bin/env bash
# BLOOM 176b (Le Scao et al., 2022; BigScience's job scripts)
#   parameters   176,247,271,424
#   tokens       451B: 115,311 steps up to 2048 samples of 2,048
#   FLOPs        6 x parameters x tokens = 4.76e23
#   memory       32.7 GiB on the fullest GPU (--dry-run)
#   time         384 A100 at 36% of 312 TFLOP/s: 128 days
# The original used dropout 0.1, omitted here (--hidden-dropout 0.1 --attention-dropout 0.1 add it), and micro-batches of 1
# until its batch had grown to 784. Its steps of 104.7 s are 36% of peak in model FLOPs (48% in its log, which includes
# recomputation). The embedding and the head, 3.6 billion parameters each, count as layers in the pipeline split: 5 + 10 x 6
# + 5.
# Nodes of 8 GPUs had 4 ports of 100 Gb/s.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-384}
run "$@"
