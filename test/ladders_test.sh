#!/usr/bin/env bash
# Every kernel of every ladder (dev/kernels) against the CPU's plain loops, at small odd sizes; and the ladders' options.
#   LADDERS="build/emu-bf16/ladder_adamw ..." test/ladders_test.sh
# shellcheck disable=SC2086
tests=$(realpath "$(dirname "$0")")
LADDERS=${LADDERS:-$(for source in "$tests"/../dev/kernels/*.cu; do echo "build/emu-bf16/ladder_$(basename "$source" .cu)"; done)}
ladders=$(realpath $LADDERS)
. "$tests/lib.sh"

for ladder in $ladders; do
    name=$(basename "$ladder")
    "$ladder" --sizes small >rungs.txt 2>&1
    status=$?
    grep '^ok: \|^FAILED: \|^skipped: ' rungs.txt
    # A crash prints no FAILED for a kernel, so check the status too.
    expect "$name: every rung is right" test $status == 0 -a "$(grep -c '^ok: ' rungs.txt)" -ge 3
    expect "$name: one rung alone" "$ladder" --sizes small --kernel 2
    says "$name: rung 2" "^ok: .* 2, "
    grep '^ok: ' out.txt >rungs.txt
    expect "$name: and no other" refused grep -v ' 2, ' rungs.txt
done

ladder=${ladders%%[[:space:]]*}
expect "a rung that is not there: refused" refused "$ladder" --kernel 99
says "the rungs that are" "rungs 1 to [0-9]"
expect "an unknown option: refused" refused "$ladder" --size small
says "where to look" "HINT: --help"
expect "--help" "$ladder" --help
says "what there is" "--kernel N"

# Without Hopper's instructions the kernel that needs them is reported as skipped, not failed.
for ladder in $ladders; do
    [[ $ladder == *emu*/ladder_attention ]] || continue
    expect "before Hopper" env EMU_CAPABILITY=80 "$ladder" --kernel 4
    says "wgmma is left out" "^skipped: .* 4, .*needs a GPU of compute capability 9.0, this is 8.0"
done
