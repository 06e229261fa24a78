#!/usr/bin/env bash
# All exchanges with other programs, one test after another: `make test-interop`. Ends with a line per test and one table of
# the model families; the status is 1 if anything failed.
#   dev/interop/test.sh TRANSFORMERS BUILD_FP32 BUILD_BF16       the major version, 5 or 4; folders with train_gpt and dump_logits,
#                                                            the second with near_duplicates and render_jinja as well
#   INTEROP="models gguf" dev/interop/test.sh ...                only these tests
set -uo pipefail
here=$(dirname "$0") version=$1 fp32=$2 bf16=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export INTEROP_RESULTS=$work/results
: >"$INTEROP_RESULTS"
lines=() failed=0

# with PACKAGES... -- COMMAND...: runs the command with a Python that has the packages.
with() {
    local packages=() python
    while [[ $1 != -- ]]; do packages+=("$1") && shift; done
    python=$("$here/venv.sh" "${packages[@]}") && env ${beside:+PYTHONPATH="$beside"} "$python" "${@:2}"
}
# The same, plus transformers, which has a folder of its own, so that both major versions share one torch.
with_transformers() {
    local folder
    folder=$(realpath "$here/../..")/build/interop-venv/transformers-$version
    if [[ ! -e $folder ]]; then
        echo "installing transformers $version into $folder" >&2
        with torch -- -m pip install -q --target "$folder.tmp" "transformers==$version.*" && mv "$folder.tmp" "$folder" || return
    fi
    beside=$folder with "$@"
}
# stage NAME COMMAND...: one test. Shows its errors if it fails.
stage() {
    local name=$1 begin=$SECONDS result=passed skipped
    shift
    [[ -z ${INTEROP:-} || " $INTEROP " == *" $name "* ]] || return 0
    echo "== $name"
    if ! "$@" 2>"$work/errors" | tee "$work/output"; then
        result=FAILED failed=1
        tail -n 20 "$work/errors"
    fi
    skipped=$(sed -n 's/^skipped: //p' "$work/output" | head -n 1)
    lines+=("$(printf '%-14s %-7s %5d ok %5d s  %s' "$name" "$result" "$(grep -c '^ok' "$work/output")" $((SECONDS - begin)) "${skipped:+skipped: $skipped}")")
}

stage transformers with_transformers torch -- "$here/test_interop.py" "$fp32" "$bf16"
if [[ $version == 4 ]]; then stage models echo "skipped: its models and their settings are those of transformers 5"
else stage models with_transformers torch -- "$here/test_models.py" "$fp32"; fi
stage chat with_transformers torch -- "$here/test_chat.py" "$fp32"
if [[ $version == 4 ]]; then stage jinja echo "skipped: TRL needs transformers 5"
else stage jinja with torch transformers trl -- "$here/test_jinja.py" "$bf16/render_jinja"; fi
stage peft with_transformers torch accelerate peft -- "$here/test_peft.py" "$fp32"
if [[ $version == 4 ]]; then stage qlora echo "skipped: its settings are those of transformers 5"
else stage qlora with_transformers torch accelerate peft bitsandbytes -- "$here/test_qlora.py" "$fp32"; fi
if [[ $version == 4 ]]; then stage dpo echo "skipped: TRL needs transformers 5"
else stage dpo with torch trl -- "$here/test_dpo.py" "$fp32"; fi
stage gguf with_transformers torch gguf llama-cpp-python -- "$here/test_gguf.py" "$fp32"
stage serve with openai -- "$here/test_serve.py" "$fp32"
stage harness with torch 'lm-eval[hf]==0.4.13' -- "$here/test_harness.py" "$fp32"
stage core with_transformers torch -- "$here/test_core.py" "$fp32"
stage text-metrics with sacrebleu rouge-score -- "$here/test_text_metrics.py" "$fp32"
stage curate with datatrove -- "$here/test_curate.py" "$fp32"
stage tensorboard with tensorboard -- "$here/test_tensorboard.py" "$fp32"
stage tokenizers with tokenizers sentencepiece -- "$here/test_tokenizers.py" "$fp32"
stage fim with tokenizers -- "$here/test_fim.py" "$bf16"
stage formats with pyarrow -- "$here/test_formats.py" "$fp32"
stage browser "$here/report_in_browser.sh" "$fp32"
stage page "$here/serve_in_browser.sh" "$fp32"
stage duplicates "$here/../bench/duplicates.py" --program "$bf16/near_duplicates" --check

echo
printf '%s\n' "${lines[@]}"
if [[ -s $INTEROP_RESULTS ]]; then
    echo
    python3 "$here/results.py" "$INTEROP_RESULTS" || failed=1
fi
exit $failed
