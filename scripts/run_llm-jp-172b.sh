#!/usr/bin/env bash
# LLM-jp-3 172B, experiment 2: the scripts that, by their dates, trained the released model (see run_llm-jp-172b-article.sh)
#   parameters   172,394,311,680
#   tokens       2.07T: 292,812 steps of 1728 samples of 4,096
#   FLOPs        6 x parameters x tokens = 2.14e24
#   memory       46.6 GiB on the fullest GPU (--dry-run)
#   time         512 H100 at 40% of 989 TFLOP/s: 122 days
# BF16 throughout. 400 TFLOP/s per GPU, as Megatron-LM counts, are 40% of peak; 37.5 s per step. As in the original, the
# last 2,000 steps run at the minimum learning rate.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-512}
run "$@"
