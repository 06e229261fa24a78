#!/usr/bin/env bash
# BLOOM 560m (Le Scao et al., 2022; BigScience's job scripts)
#   parameters   559,214,592
#   tokens       451B: 868,457 steps up to 256 samples of 2,048
#   FLOPs        6 x parameters x tokens = 1.51e21
#   memory       6.64 GiB on the fullest GPU (--dry-run)
#   time         32 A100 at 30% of 312 TFLOP/s: 5.8 days
# The original was trained in fp16, on 4-GPU nodes; here bf16. Its dropout of 0.1 is omitted (--hidden-dropout 0.1
# --attention-dropout 0.1 add it).
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-32}
run "$@"
