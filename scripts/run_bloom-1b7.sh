#!/usr/bin/env bash
# BLOOM 1b7 (Le Scao et al., 2022; BigScience's job scripts)
#   parameters   1,722,408,960
#   tokens       451B: 441,356 steps up to 512 samples of 2,048
#   FLOPs        6 x parameters x tokens = 4.66e21
#   memory       7.59 GiB on the fullest GPU (--dry-run)
#   time         64 A100 at 30% of 312 TFLOP/s: 9.0 days
# The original was trained in fp16, on 4-GPU nodes; here bf16. Its dropout of 0.1 is omitted (--hidden-dropout 0.1
# --attention-dropout 0.1 add it).
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-64}
run "$@"
