#!/usr/bin/env bash
# The emulator (test/emu) finds each mistake of test/emu/faults.cu, and nothing in the same kernels without it. Built here
# three times: plain, with AddressSanitizer and UBSan, with ThreadSanitizer.
#   test/emulator_test.sh        CXX=g++
source=$(dirname "$(realpath "$0")")/..
TRAIN_GPT=/bin/true
. "$source/test/lib.sh"
CXX=${CXX:-g++}
SEEDS=20

build() { # NAME FLAGS...
    local name=$1
    shift
    "$CXX" -std=c++17 -O0 -g -Wall -Wextra -Werror -Wno-unknown-pragmas -DBACKEND_EMU -I"$source" -I"$source/test/emu" -fopenmp "$@" \
        -x c++ "$source/test/emu/faults.cu" -o "$name"
}
expect "builds" build plain
expect "builds with AddressSanitizer" build asan -fsanitize=address,undefined -fno-sanitize-recover=all
expect "builds with ThreadSanitizer" build tsan -fsanitize=thread
export TSAN_OPTIONS=halt_on_error=0:exitcode=66
# Some kernels randomize addresses by more bits than ThreadSanitizer supports; this requests a fixed layout where that is
# allowed.
fixed_layout=()
setarch -R true 2>/dev/null && fixed_layout=(setarch -R)

# Correct kernels give no report in any order.
right() { [[ $("$@" 2>&1) == right ]]; }
for name in $(./plain); do
    ok=1
    for seed in $(seq 1 $SEEDS); do EMU_SEED=$seed right ./plain "$name" fixed || ok=0; done
    EMU_ORDER=forward right ./plain "$name" fixed && EMU_ORDER=reverse right ./plain "$name" fixed || ok=0
    right ./asan "$name" fixed || ok=0
    right "${fixed_layout[@]}" ./tsan "$name" fixed || ok=0
    expect "$name: nothing is found once it is fixed" test $ok == 1
done

# A wrong result in each of 20 random orders.
for name in missing_barrier missing_barrier_before_overwrite missing_barrier_in_loop uninitialized_shared uninitialized_global; do
    found=0
    for seed in $(seq 1 $SEEDS); do [[ $(EMU_SEED=$seed ./plain "$name") == wrong ]] && found=$((found + 1)); done
    expect "$name: a wrong result in $found of $SEEDS orders" test $found == $SEEDS
done
found=0
for seed in $(seq 1 $SEEDS); do [[ $(EMU_SEED=$seed ./plain missing_copy_wait) == wrong ]] && found=$((found + 1)); done
expect "missing_copy_wait: a wrong result in $found of $SEEDS orders" test $found -ge $((SEEDS * 9 / 10))

# line PATTERN: the number of the first matching line of faults.cu.
line() { grep -n -- "$1" "$source/test/emu/faults.cu" | head -n 1 | cut -d: -f1; }
report() { # NAME PROGRAM FAULT PATTERN...: PROGRAM FAULT fails, and its report has every pattern
    local name=$1 program=$2 fault=$3 pattern
    shift 3
    expect "$name" refused "${fixed_layout[@]}" "./$program" "$fault"
    for pattern in "$@"; do says "$name: $pattern" "$pattern"; done
}
report "divergent barrier" plain divergent_barrier "divergent __syncthreads" "faults.cu:$(($(line 'threadIdx.x < 64') + 1))" "faults.cu:$(($(line 'threadIdx.x < 64') + 3))"
report "absent lanes" plain absent_lanes "deadlock in" "faults.cu:$(line 'threadIdx.x % 32 < 8')" "96 threads wait"
report "static shared memory" asan static_shared_out_of_bounds "out of bounds\|overflow" "faults.cu:$(($(line 'void static_shared') + 2))"
report "dynamic shared memory" asan dynamic_shared_out_of_bounds "AddressSanitizer" "faults.cu:$(($(line 'void dynamic_shared') + 2))"
report "global memory" asan global_out_of_bounds "AddressSanitizer" "faults.cu:$(line 'void global_out_of_bounds')"
report "misaligned access" asan misaligned "misaligned address" "faults.cu:$(($(line 'void misaligned') + 3))"
for name in missing_barrier missing_barrier_before_overwrite missing_barrier_in_loop race; do
    report "data race: $name" tsan "$name" "data race" "faults.cu:[0-9]*"
done
report "both lines of a race" tsan missing_barrier_before_overwrite "faults.cu:$(line 'const float neighbor')" "faults.cu:$(line 'x.threadIdx.x. = neighbor')"

# The script for other projects' kernels (test/emu/foreign/run.sh), on a program of ours in their style.
foreign=$source/test/emu/foreign
sed -E -f "$foreign/launches.sed" "$foreign/smoke.cu" >smoke.cu
expect "a foreign program builds" "$CXX" -std=c++17 -O0 -w -DBACKEND_EMU -I"$foreign/include" -I"$source/test/emu" -include adapter.h -fopenmp \
    -x c++ smoke.cu -o smoke
expect "and is right" ./smoke
