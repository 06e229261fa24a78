#!/usr/bin/env bash
# Megatron-LM 1T (Korthikanti et al., 2022, arXiv:2205.05198)
#   parameters   1,008,038,758,400
#   tokens       1.05B: 1,000 steps of 512 samples of 2,048
#   FLOPs        6 x parameters x tokens = 6.35e21
#   memory       51.1 GiB on the fullest GPU (--dry-run)
#   time         512 A100 at 56.3% of 312 TFLOP/s: 19.6 hours (the share as published)
# The layout of the paper's table 3, which measures steps: a published step takes 71.49 s, with sequence parallelism and
# selective recomputation. The batch is one replica's; the number of steps is not the paper's, nor is the learning rate,
# which is the one of NeMo's ladder for this size.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-512}
run "$@"
