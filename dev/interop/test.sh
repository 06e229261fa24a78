#!/usr/bin/env bash
# All that is exchanged with other programs, one test after another: `make test-interop`.
#   dev/interop/test.sh TRANSFORMERS BUILD_FP32 BUILD_BF16       the major version, 5 or 4; folders with train_gpt and dump_logits,
#                                                            the second with near_duplicates as well
set -euo pipefail
here=$(dirname "$0") version=$1 fp32=$2 bf16=$3
python=$("$here/venv.sh" torch)
# transformers in a folder of its own, so that both lines share one torch.
transformers=$(realpath "$here/../..")/build/interop-venv/transformers-$version
if [[ ! -e $transformers ]]; then
    echo "installing transformers $version into $transformers"
    "$python" -m pip install -q --target "$transformers.tmp" "transformers==$version.*"
    mv "$transformers.tmp" "$transformers"
fi
PYTHONPATH=$transformers "$python" "$here/test_interop.py" "$fp32" "$bf16"
[[ $version == 4 ]] || PYTHONPATH=$transformers "$python" "$here/test_models.py" "$fp32"
PYTHONPATH=$transformers "$python" "$here/test_chat.py" "$fp32"
PYTHONPATH=$transformers "$("$here/venv.sh" torch accelerate peft)" "$here/test_peft.py" "$fp32"
PYTHONPATH=$transformers "$("$here/venv.sh" torch gguf llama-cpp-python)" "$here/test_gguf.py" "$fp32"
"$("$here/venv.sh" torch 'lm-eval[hf]==0.4.13')" "$here/test_harness.py" "$fp32" 2>/dev/null
"$("$here/venv.sh" datatrove)" "$here/test_curate.py" "$fp32"
"$("$here/venv.sh" tensorboard)" "$here/test_tensorboard.py" "$fp32"
"$("$here/venv.sh" tokenizers sentencepiece)" "$here/test_tokenizers.py" "$fp32"
"$("$here/venv.sh" pyarrow)" "$here/test_formats.py" "$fp32"
"$here/report_in_browser.sh" "$fp32"
"$here/../bench/duplicates.py" --program "$bf16/near_duplicates" --check
