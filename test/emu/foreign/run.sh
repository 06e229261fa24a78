#!/usr/bin/env bash
# Runs foreign kernels, which are known to be right on GPUs, on the emulator (README.md says which and what came of it):
#   test/emu/foreign/run.sh CHECKOUT...     of github.com/karpathy/llm.c or github.com/pranjalssh/fast.cu      CXX=g++
# Their sources are read from the checkouts and rewritten under build/foreign; nothing of theirs is kept. Prints one line for each
# kernel; the status is not 0 if one gave wrong numbers that the README's list (expected_to_fail below) does not explain.
set -u
source=$(realpath "$(dirname "$0")/../../..")
here=$source/test/emu/foreign
out=$source/build/foreign
CXX=${CXX:-g++}
mkdir -p "$out"
failed=0

compile() { # FLAGS... SOURCE -o PROGRAM
    "$CXX" -std=c++17 -O1 -g1 -march=native -w -Wno-narrowing -fopenmp -DBACKEND_EMU -I"$here/include" -I"$source/test/emu" \
        -include adapter.h -I"$out" -x c++ "$@"
}
report() { # NAME EXPECTED-TO-FAIL PROGRAM ARGUMENTS...
    local name=$1 expected=$2 result=right why=
    shift 2
    timeout 300 "$@" >"$out/log" 2>&1 || { result=wrong why=$(grep -im1 'mismatch\|emu:\|off by\|invalid\|assert' "$out/log"); }
    if [[ $result == wrong && -n $expected ]]; then result="wrong, as expected ($expected)"
    elif [[ $result == wrong ]]; then failed=1
    elif [[ -n $expected ]]; then result="right, against expectation ($expected)" failed=1
    fi
    echo "$name: $result ${why:0:150}"
}

# Why a kernel of llm.c's is not right here; empty for those that must be.
expected_to_fail() {
    case "$1 $2" in
        "softmax_forward 4" | "attention_backward 7" | "attention_backward 8") echo "a barrier is missing in it" ;;
    esac
}

llm_c() { # CHECKOUT
    local folder=$1/dev/cuda file name kernel kernels
    sed -E -f "$here/launches.sed" "$folder/common.h" >"$out/common.h"
    for file in "$folder"/*.cu; do
        name=$(basename "$file" .cu)
        kernels=
        # B, T, C, V: small, but such as the sources' unwritten rules allow (T a multiple of the block, V larger than it).
        local T=512 C=192 V=1103 more=
        case $name in
            adamw | gelu_* | residual_forward | encoder_backward) kernels="1 2" ;;
            encoder_forward) kernels="1 2 3" ;;
            crossentropy_*) kernels=1 T=32 ;;
            softmax_forward) kernels="1 2 3 4 5 6 7 8" T=32 ;;
            classifier_fused) kernels="1 2 3 4 5" T=32 ;;
            global_norm | matmul_forward) kernels="1 2 3 4" ;;
            layernorm_forward | fused_residual_forward) kernels="1 2 3 4 5 6" C=768 ;;
            layernorm_backward) kernels="2 3 4 5 6 7 8 9 10" C=768 ;;
            attention_forward) kernels="1 2 3 4 5" T=128 ;;
            # Kernel 6 writes whole blocks of each row.
            attention_backward) kernels="1 2 3 4 5 6 7 8" T=128 more='s/block_sizes\[\] = .*/block_sizes[] = {32, 64, 128};/' ;;
            matmul_backward) kernels=1 ;;
            # Kernels 8 and 9 read lanes that take no part if a block has fewer than four warps.
            matmul_backward_bias) kernels="1 2 3 4 7 8 9" more='s/block_sizes\[\] = .*/block_sizes[] = {128, 256, 512, 1024};/' ;;
            trimat_forward) kernels="0 1 2 3 4" T=128 ;;
            permute) kernels=1 more='s/repeat_times = 1/repeat_times = 0/' ;;  # its benchmark calls a kernel like a function
            *) echo "$name: left out" && continue ;;
        esac
        sed -E -f "$here/launches.sed" -e "s/(int|int64_t) B = (4|8|32);/\1 B = 2;/; s/(int|int64_t) T = 1024;/\1 T = $T;/
            s/(int|int64_t) V = 50257;/\1 V = $V;/; s/int C = (768|1600);/int C = $C;/; s/int OC = 768 \* 4;/int OC = 768;/
            s/int NH = 12;/int NH = 3;/; s/repeat_times = [0-9]+/repeat_times = 1/; s/num_parameters = 1048576/num_parameters = 10007/
            s/int L = 12/int L = 1/" -e "$more" "$file" >"$out/$name.cu"
        if ! compile "$out/$name.cu" -o "$out/$name" 2>"$out/log"; then
            echo "$name: does not build: $(grep -m1 error "$out/log")" && failed=1
            continue
        fi
        for kernel in $kernels; do report "$name $kernel" "$(expected_to_fail "$name" "$kernel")" "$out/$name" "$kernel"; done
    done
    mkdir -p "$out/llmc"
    for file in "$1"/llmc/*h; do sed -E -f "$here/launches.sed" "$file" >"$out/llmc/$(basename "$file")"; done
    if compile "$here/llmc_kernels.cu" -o "$out/llmc_kernels" 2>"$out/log"; then report "llmc/*.cuh" "" "$out/llmc_kernels"
    else echo "llmc/*.cuh: does not build: $(grep -m1 error "$out/log")" && failed=1
    fi
}

fast_cu() { # CHECKOUT
    local k
    for k in 1 2 3 4 5 6 7; do
        perl -0p "$here/fast_cu.pl" "$1/examples/matmul/matmul_$k.cuh" | sed -E -f "$here/launches.sed" >"$out/matmul_$k.cuh"
    done
    if ! compile -DFOREIGN_HOPPER "$here/fast_cu.cu" -o "$out/fast_cu" 2>"$out/log"; then
        echo "fast.cu: does not build: $(grep -m1 error "$out/log")" && failed=1
        return
    fi
    for k in 1 2 3 4 5 6 7; do report "fast.cu matmul_$k" "" "$out/fast_cu" $k; done
    for k in 8 9 10 11 12; do
        grep -q __cluster_dims__ "$1/examples/matmul/matmul_$k.cuh" && echo "fast.cu matmul_$k: left out, it needs clusters"
    done
}

[[ $# -gt 0 ]] || { sed -n '2,5s/^# //p' "$0" >&2 && exit 2; }
for checkout in "$@"; do
    if [[ -d $checkout/dev/cuda ]]; then llm_c "$checkout"
    elif [[ -d $checkout/examples/matmul ]]; then fast_cu "$checkout"
    else echo "run.sh: $checkout is a checkout of neither llm.c nor fast.cu" >&2 && exit 2
    fi
done
exit $failed
