#!/usr/bin/env bash
# Megatron-Turing NLG 530B (Smith et al., 2022)
#   parameters   529,581,506,560
#   tokens       270B: 80,086 steps up to 1920 samples of 2,048
#   FLOPs        6 x parameters x tokens = 8.58e23
#   memory       18.3 GiB on the fullest GPU (--dry-run)
#   time         2,240 A100 at 30% of 312 TFLOP/s: 47 days
# 280 GPUs hold a replica: tensor parallelism within each node, 35 pipeline stages of 3 layers. A published step of 60.1 s
# is 30% of peak in model FLOPs, 40% with recomputation. The published 50.2 and 44.4 s on 2800 and 3360 GPUs were with the
# full batch: their 10 and 12 data parallel ranks do not divide the ramp-up's 32. The original may have used dropout; here
# there is none.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-2240}
run "$@"
