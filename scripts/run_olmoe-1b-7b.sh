#!/usr/bin/env bash
# OLMoE 1B-7B (Muennighoff et al., 2024, arXiv:2409.02060)
#   parameters   6,919,161,856
#   active       1,282,017,280
#   tokens       5.13T: 1,223,842 steps of 1024 samples of 4,096
#   FLOPs        6 x active parameters x tokens = 3.95e22
#   memory       49.6 GiB on the fullest GPU (--dry-run)
#   time         256 H100 at 43% of 989 TFLOP/s: 4.2 days (the share as planned)
# Batch, rates, both losses of the router and steps are the paper's, the warm-up comes from its configuration files: a cosine over
# 5T tokens. The authors report about 10 days on 256 H100. Not done here: their last 100B tokens with a linear decay to 0, their
# initialization cut off at three standard deviations, and the decay of norms. Their balance loss is a mean over each micro-batch.
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-256}
run "$@"
