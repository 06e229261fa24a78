#!/usr/bin/env bash
# BLOOM 7b1 (Le Scao et al., 2022; BigScience's job scripts)
#   parameters   7,069,016,064
#   tokens       451B: 442,197 steps up to 512 samples of 2,048
#   FLOPs        6 x parameters x tokens = 1.91e22
#   memory       14.1 GiB on the fullest GPU (--dry-run)
#   time         128 A100 at 30% of 312 TFLOP/s: 18 days
# The original was trained in fp16, on 4-GPU nodes; here bf16. Its dropout of 0.1 is omitted (--hidden-dropout 0.1
# --attention-dropout 0.1 add it).
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-128}
run "$@"
