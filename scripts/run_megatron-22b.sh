#!/usr/bin/env bash
# Megatron-LM 22B (Korthikanti et al., 2022, arXiv:2205.05198)
#   parameters   22,074,273,792
#   tokens       8.19M: 1,000 steps of 4 samples of 2,048
#   FLOPs        6 x parameters x tokens = 1.08e18
#   memory       48.3 GiB on the fullest GPU (--dry-run)
#   time         8 A100 at 41.5% of 312 TFLOP/s: 0.3 hours (the share as published)
# The layout of the paper's table 3, which measures steps: a published step takes 1.10 s, with sequence parallelism and
# selective recomputation. The batch is one replica's; the number of steps is not the paper's, nor is the learning rate,
# which is the one of NeMo's ladder for this size.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-8}
run "$@"
