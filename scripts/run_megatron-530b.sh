#!/usr/bin/env bash
# Megatron-LM 530B (Korthikanti et al., 2022, arXiv:2205.05198)
#   parameters   529,600,819,200
#   tokens       573M: 1,000 steps of 280 samples of 2,048
#   FLOPs        6 x parameters x tokens = 1.82e21
#   memory       51.5 GiB on the fullest GPU (--dry-run)
#   time         280 A100 at 56% of 312 TFLOP/s: 10.3 hours (the share as published)
# The layout of the paper's table 3, which measures steps: a published step takes 37.83 s, with sequence parallelism and
# selective recomputation. The batch is one replica's; the number of steps is not the paper's, nor is the learning rate,
# which is the one of NeMo's ladder for this size.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-280}
run "$@"
