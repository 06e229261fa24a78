#!/usr/bin/env bash
# Megatron-LM 175B (Korthikanti et al., 2022, arXiv:2205.05198)
#   parameters   174,615,846,912
#   tokens       131M: 1,000 steps of 64 samples of 2,048
#   FLOPs        6 x parameters x tokens = 1.37e20
#   memory       53.4 GiB on the fullest GPU (--dry-run)
#   time         64 A100 at 51.4% of 312 TFLOP/s: 3.7 hours (the share as published)
# The layout of the paper's table 3, which measures steps: a published step takes 13.75 s, with sequence parallelism and
# selective recomputation. The batch is one replica's; the number of steps is not the paper's, nor is the learning rate,
# which is the one of NeMo's ladder for this size.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-64}
run "$@"
