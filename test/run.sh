#!/usr/bin/env bash
# Runs every test program and script given, one after another, and ends with `N passed, N failed`: each GoogleTest case and each
# `ok:`/`FAILED:` line of a script counts as one. Shows the output of what fails. Exit status 1 if anything did, or if nothing ran.
#   test/run.sh build/cpu-bf16/test_ops test/quickstart_short.sh ...
set -u
# Threads that wait sleep instead of spinning: on a busy machine spinning makes short parallel regions tens of times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
# The emulator refuses launches that ask for more than an H100 has (test/emu/resources.h).
EMU_RESOURCES=$(realpath "$(dirname "$0")/../dev/kernels/resources.md")
export EMU_RESOURCES
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for test in "$@"; do
    start=$(date +%s.%N)
    if [[ $test == *.sh ]]; then timeout 900 bash "$test" >"$log" 2>&1; else timeout 600 "$test" --gtest_brief=0 >"$log" 2>&1; fi
    status=$?
    if [[ $test == *.sh ]]; then
        ok=$(grep -c '^ok: ' "$log") bad=$(grep -c '^FAILED: ' "$log")
    else
        ok=$(grep -c '^\[       OK \]' "$log") bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$log")
    fi
    # A crash or an abort fails without a line of its own; a program without any test is a failure too.
    [[ $status == 0 || $bad -gt 0 ]] || bad=1
    [[ $((ok + bad)) -gt 0 ]] || bad=1
    passed=$((passed + ok)) failed=$((failed + bad))
    printf '%-44s %4d passed %3d failed  %6.1f s\n' "${test##*/}" "$ok" "$bad" "$(awk -v a="$start" -v b="$(date +%s.%N)" "BEGIN { print b - a }")"
    [[ $bad == 0 ]] || tail -n 200 "$log"
done
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed -gt 0 ]]
