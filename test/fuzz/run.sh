#!/usr/bin/env bash
# Runs fuzz targets for some seconds each, one after another, from their corpus (test/fuzz/corpus/TARGET) and inputs found
# by earlier runs (build/fuzz/TARGET/corpus). Failing inputs are written to build/fuzz/TARGET/; run the program with such a
# file to reproduce the failure.
#   test/fuzz/run.sh SECONDS build/fuzz/fuzz_safetensors ...
set -u
seconds=$1
shift
failed=0
export OMP_NUM_THREADS=1
for program in "$@"; do
    target=${program##*/fuzz_}
    out=build/fuzz/$target
    mkdir -p "$out/corpus"
    dictionary=test/fuzz/$target.dict
    [[ -f $dictionary ]] || dictionary=test/fuzz/json.dict
    "$program" -max_total_time="$seconds" -timeout=5 -rss_limit_mb=2048 -max_len=8192 -dict="$dictionary" -use_value_profile=1 \
        -artifact_prefix="$out/" -print_final_stats=1 "$out/corpus" "test/fuzz/corpus/$target" >"$out/log" 2>&1 &
    wait $!
    status=$?
    rm -rf "/dev/shm/train_gpt_fuzz_$!"  # left behind by a crash
    runs=$(awk '/number_of_executed_units/ { print $2 }' "$out/log")
    if [[ $status == 0 ]]; then
        echo "ok: $target: ${runs:-0} inputs in $seconds s"
    else
        echo "FAILED: $target after ${runs:-0} inputs; see $out/log:"
        grep -aE 'ERROR|SUMMARY|runtime error|internal check|Test unit written|terminate|what\(\)' "$out/log" | head -n 12
        failed=1
    fi
done
exit $failed
