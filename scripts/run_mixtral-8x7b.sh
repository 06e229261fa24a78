#!/usr/bin/env bash
# Mixtral 8x7B (Jiang et al., 2024, arXiv:2401.04088)
#   parameters   46,702,792,704
#   active       12,879,925,248
#   tokens       524B: 500,000 steps of 256 samples of 4,096
#   FLOPs        6 x active parameters x tokens = 4.05e22
#   memory       30.1 GiB on the fullest GPU (--dry-run)
#   time         64 H100 at 42% of 989 TFLOP/s: 18 days (the share as planned)
# Mistral has published the model only: no data, tokens, batch or rates, and samples of 32,768 tokens. Batch, rates, their decay
# over 320,000 steps and the coefficient of the balance loss follow Megatron-LM's example for this model; the layout is ours.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-64}
run "$@"
