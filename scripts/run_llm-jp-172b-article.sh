#!/usr/bin/env bash
# LLM-jp-3 172B as NVIDIA's and LLM-jp's article describes it, experiment 1
#   parameters   172,394,311,680
#   tokens       2.10T: 296,699 steps of 1728 samples of 4,096
#   FLOPs        6 x parameters x tokens = 2.17e24
#   memory       51.9 GiB on the fullest GPU (--dry-run)
#   time         512 H100 at 56% of 989 TFLOP/s: 89 days
# FP8 from step 7000, with Megatron's defaults for its scales: LLM-jp measured 400 TFLOP/s before and 550 after. LLM-jp
# later found that this epsilon of AdamW had caused two failed models; run_llm-jp-172b.sh has their later value.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-512}
run "$@"
