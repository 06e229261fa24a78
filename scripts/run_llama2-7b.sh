#!/usr/bin/env bash
# Llama 2 7B (Touvron et al., 2023, arXiv:2307.09288)
#   parameters   6,738,415,616
#   tokens       2.00T: 476,837 steps of 1024 samples of 4,096
#   FLOPs        6 x parameters x tokens = 8.09e22
#   memory       55.5 GiB on the fullest GPU (--dry-run)
#   time         256 A100 at 58% of 312 TFLOP/s: 20 days (the share as planned)
# Hyperparameters are the paper's: 2T tokens in batches of 4M. It took 184,320 GPU hours of A100. The number of GPUs is not
# published; the layout is from NeMo's configuration. The epsilon of AdamW is the paper's, and large (see the warning).
# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(dirname "$0")/common.sh"
RANKS=${RANKS:-256}
run "$@"
