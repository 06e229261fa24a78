#!/usr/bin/env bash
# Runs test programs and scripts. Those that mostly start ranks, and one that measures time, run one after another, because
# ranks slow each other down; at the same time JOBS others run at lower priority (default: one more than there are cores, as
# many wait). JOBS=1: one at a time. The longest start first, so that none is left at the end. Ends with the slowest tests
# and `N passed, N failed`: each GoogleTest case and each `ok:`/`FAILED:` line of a script counts as one. Shows the output
# of failed tests. Exit status 1 if any failed, or if none ran.
#   test/run.sh build/cpu-bf16/test_ops test/fp8_test.sh ...      JOBS=2
set -u
# Waiting threads sleep instead of spinning: on a busy machine spinning makes short parallel regions tens of times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
# The emulator refuses launches that need more than an H100 has (test/emu/resources.h).
EMU_RESOURCES=$(realpath "$(dirname "$0")/../dev/kernels/resources.md")
export EMU_RESOURCES
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export logs

# show_failures LOG: a short log whole; of a long one the lines around its first failures, then its end.
show_failures() {
    local lines last=40
    lines=$(wc -l <"$1")
    if [[ $lines -gt 240 ]]; then
        head -n $((lines - last)) "$1" | grep -n -m 8 -B 40 -A 4 -E '^FAILED: |^\[  FAILED  \] .*ms\)$'
        echo "... the last $last of $lines lines:"
        tail -n "$last" "$1"
    else cat "$1"; fi
}

# run_one TEST: prints a row, and the output if it failed; writes "PASSED FAILED SECONDS CPU-SECONDS NAME" to a file of its
# own.
run_one() {
    local test=$1 start status ok bad seconds cpu log
    log=$(mktemp -p "$logs") start=$(date +%s.%N)
    if [[ $test == *.sh ]]; then
        timeout 900 bash "$test" >"$log" 2>&1
        status=$? ok=$(grep -c '^ok: ' "$log") bad=$(grep -c '^FAILED: ' "$log")
    else
        timeout 600 "$test" --gtest_brief=0 >"$log" 2>&1
        status=$? ok=$(grep -c '^\[       OK \]' "$log") bad=$(grep -c '^\[  FAILED  \] .*ms)$' "$log")
    fi
    # A crash or an abort fails without a line of its own; a program without tests fails too.
    [[ $status == 0 || $bad -gt 0 ]] || bad=1
    [[ $((ok + bad)) -gt 0 ]] || bad=1
    seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    # CPU time, more informative on a busy machine; line 2 is the time of child processes.
    times >"$log.times"
    cpu=$(awk -F '[ms ]+' 'NR == 2 { printf "%.1f", 60 * ($1 + $3) + $2 + $4 }' "$log.times")
    echo "$ok $bad $seconds $cpu ${test##*/}" >"$log.result"
    [[ $bad == 0 ]] || { grep -E '^FAILED: |^\[  FAILED  \] .*ms\)$' "$log" || echo "status $status"; } |
        sed "s/^\(FAILED: \|\[  FAILED  \] \)*/failed: ${test##*/}: /" >"$log.failed"
    { # written at once, so that parallel tests do not mix
        printf '%-36s %4d passed %3d failed  %6.1f s, %6.1f s of a core\n' "${test##*/}" "$ok" "$bad" "$seconds" "$cpu"
        [[ $bad == 0 ]] || show_failures "$log"
    } >"$log.shown"
    flock "$logs" cat "$log.shown"
}
export -f run_one show_failures

# run_all JOBS TEST...
run_all() {
    [[ $# -gt 1 ]] || return 0
    # shellcheck disable=SC2016  # the inner shell expands it
    printf '%s\0' "${@:2}" | xargs -0 -r -n 1 -P "$1" bash -c 'run_one "$0"' ||
        echo "0 1 0 0 run.sh:not-all-were-run" >"$(mktemp -p "$logs" stopped.XXXX.result)"  # a runner was killed
}
ranks=() long=() others=()
for test in "$@"; do
    case ${test##*/} in
        aarch64_test.sh | budget_test.sh | comm_test.sh | long_context_test.sh | node_snapshots_test.sh | parallel_test.sh | parity_test.sh | snapshots_test.sh) ranks+=("$test") ;;
        cuda_build_test.sh | gpu_test.sh | nccl_test.sh | stability_test.sh) long+=("$test") ;;
        *) others+=("$test") ;;
    esac
done
jobs=${JOBS:-$(($(nproc) + 1))}
if [[ $jobs == 1 ]]; then run_all 1 "$@"; else
    run_all 1 "${ranks[@]}" &
    # Ranks that wait for each other have priority; the others use the remaining time.
    (renice -n 19 -p $BASHPID >"$logs/nice" && run_all "$jobs" "${long[@]}" "${others[@]}")
    wait
fi
cat "$logs"/*.result >"$logs/all" 2>/dev/null
# Repeat the failures at the end, where everyone looks first.
cat "$logs"/*.failed 2>/dev/null | cut -c 1-200 | head -n 40
echo "slowest: $(sort -k3rn "$logs/all" | awk 'NR <= 8 { printf "%s%s %.0f s", (NR > 1 ? ", " : ""), $5, $3 }')"
echo "in $SECONDS s, $(awk '{ sum += $4 } END { printf "%.0f", sum }' "$logs/all") s of a core"
awk '{ passed += $1; failed += $2 } END { printf "%d passed, %d failed\n", passed, failed; exit !(failed == 0 && passed > 0) }' "$logs/all"
