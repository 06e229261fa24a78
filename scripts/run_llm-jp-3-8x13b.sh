#!/usr/bin/env bash
# LLM-jp-3 8x13B (LLM-jp, 2025)
#   parameters   73,163,719,680
#   active       22,202,926,080
#   tokens       2.07T: 494,120 steps of 1024 samples of 4,096
#   FLOPs        6 x active parameters x tokens = 2.76e23
#   memory       23.6 GiB on the fullest GPU (--dry-run)
#   time         512 H100 at 37% of 989 TFLOP/s: 17 days (the share as planned)
# LLM-jp started from llm-jp-3-13b by Drop-Upcycling (Nakamura et al., 2025, arXiv:2502.19261), and saw 2.1T tokens:
#   run_llm-jp-3-8x13b.sh --no-preset --model DENSE --num-experts 8 --moe-use-upcycling --moe-upcycling-drop-ratio 0.5
# Batch, rates and ratio follow the paper's runs, over 500B tokens; for the released model they are not published, nor is its
# layout. LLM-jp counts 73,162,828,800 parameters, with 87 rows of the vocabulary less.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-512}
run "$@"
