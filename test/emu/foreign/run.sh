#!/usr/bin/env bash
# Runs other projects' kernels, known to be right on GPUs, on the emulator (README.md lists them with results):
#   test/emu/foreign/run.sh CHECKOUT...     of github.com/karpathy/llm.c, github.com/pranjalssh/fast.cu or
#                                           github.com/NVIDIA/cutlass     CXX=g++
# Reads their sources from the checkouts and writes modified ones to build/foreign; keeps none. Prints one line per kernel;
# the status is not 0 if a kernel gave wrong numbers that the README's list (expected_to_fail below) does not explain.
# shellcheck disable=SC2317  # report calls functions by name
set -u
source=$(realpath "$(dirname "$0")/../../..")
here=$source/test/emu/foreign
out=$source/build/foreign
CXX=${CXX:-g++} cpu=$(make -s -C "$source" print-for_cpu)
mkdir -p "$out"
failed=0 run=$out/run

compile() { # FLAGS... SOURCE -o PROGRAM
    "$CXX" -std=c++17 -O1 -g1 "$cpu" -w -Wno-narrowing -fopenmp -DBACKEND_EMU -I"$here/include" -I"$source/test/emu" \
        -include adapter.h -I"$out" -x c++ "$@"
}
build() { # PROGRAM FLAGS... SOURCE
    compile "${@:2}" -o "$out/$1" 2>"$out/log" && return
    echo "$1: does not build: $(grep -m1 error "$out/log")"
    failed=1
    return 1
}
report() { # NAME EXPECTED-TO-FAIL COMMAND...
    local name=$1 expected=$2 result=right why=
    shift 2
    "$@" >"$out/log" 2>&1 || { result=wrong why=$(grep -im1 'mismatch\|emu:\|off by\|invalid\|assert\|error' "$out/log"); }
    if [[ $result == wrong && -n $expected ]]; then result="wrong, as expected ($expected)"
    elif [[ $result == wrong ]]; then failed=1
    elif [[ -n $expected ]]; then result="right, against expectation ($expected)" failed=1
    fi
    echo "$name: $result ${why:0:150}"
}

# Why a kernel of llm.c is not right here; empty if it must be.
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
        # B, T, C, V: small, but within the sources' unstated requirements (T a multiple of the block, V larger than it).
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
            # Kernels 8 and 9 read inactive lanes if a block has fewer than four warps.
            matmul_backward_bias) kernels="1 2 3 4 7 8 9" more='s/block_sizes\[\] = .*/block_sizes[] = {128, 256, 512, 1024};/' ;;
            trimat_forward) kernels="0 1 2 3 4" T=128 ;;
            permute) kernels=1 more='s/repeat_times = 1/repeat_times = 0/' ;;  # its benchmark calls a kernel like a function
            nccl_all_reduce) continue ;;
            *) echo "$name: left out" && continue ;;
        esac
        sed -E -f "$here/launches.sed" -e "s/(int|int64_t) B = (4|8|32);/\1 B = 2;/; s/(int|int64_t) T = 1024;/\1 T = $T;/
            s/(int|int64_t) V = 50257;/\1 V = $V;/; s/int C = (768|1600);/int C = $C;/; s/int OC = 768 \* 4;/int OC = 768;/
            s/int NH = 12;/int NH = 3;/; s/repeat_times = [0-9]+/repeat_times = 1/; s/num_parameters = 1048576/num_parameters = 10007/
            s/int L = 12/int L = 1/" -e "$more" "$file" >"$out/$name.cu"
        build "$name" "$out/$name.cu" || continue
        for kernel in $kernels; do
            report "$name $kernel" "$(expected_to_fail "$name" "$kernel")" timeout 300 "$out/$name" "$kernel"
        done
    done
    mkdir -p "$out/llmc"
    for file in "$1"/llmc/*h; do sed -E -f "$here/launches.sed" "$file" >"$out/llmc/$(basename "$file")"; done
    build llmc_kernels "$here/llmc_kernels.cu" && report "llmc/*.cuh" "" timeout 300 "$out/llmc_kernels"
}

# llm.c's complete trainer. llmc_reference.c lets its train_gpt2.c train a small model on the CPU: ten losses, and the
# gradients for test_gpt2.cu.
llm_c_trainer() { # CHECKOUT
    local checkout=$1 file precision
    mkdir -p "$run/dev/data/tinyshakespeare"
    if ! { "${CC:-cc}" -O2 "$cpu" -fopenmp -w -I"$checkout" "$here/llmc_reference.c" -o "$out/llmc_reference" -lm &&
        (cd "$run" && "$out/llmc_reference" >losses.txt); } 2>"$out/log"; then
        echo "train_gpt2.c: does not build or run" && failed=1
        return
    fi
    cp "$run/tokens.bin" "$run/dev/data/tinyshakespeare/tiny_shakespeare_val.bin"
    # NCCL's counts are in elements: counts in bytes exceed the buffers, which ends the emulator.
    for file in "$checkout"/llmc/*h "$checkout"/t*_gpt2.cu; do
        sed -E -f "$here/launches.sed" -e 's/sizeof\(float\), ncclFloat/1, ncclFloat/' \
            -e '/float expected_losses\[10\] = \{/,/\};/c #include "expected_losses.h"' "$file" >"$out/${file#"$checkout/"}"
    done
    build test_gpt2 -DENABLE_FP32 -I"$run" "$out/test_gpt2.cu" &&
        report "test_gpt2.cu in FP32" "a barrier is missing in softmax_autoregressive_backward_inplace_kernel" tests_pass
    # A loop around blockReduce, whose documentation asks for its second argument in loops.
    sed -i 's/local_sum = blockReduce<warpReduceSum>(local_sum/&, true/' "$out/llmc/attention.cuh"
    for precision in FP32 BF16; do
        build test_gpt2 -DENABLE_$precision -I"$run" "$out/test_gpt2.cu" &&
            report "test_gpt2.cu in $precision, with that barrier" "" tests_pass
    done
    command -v mpicxx >/dev/null || { echo "train_gpt2.cu: left out: its processes want MPI" && return; }
    export OMPI_CXX=$CXX OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 EMU_DEVICES=2
    CXX=mpicxx
    build train_gpt2_FP32 -DENABLE_FP32 -DMULTI_GPU -DUSE_MPI "$out/train_gpt2.cu" || return
    report "train_gpt2.cu in FP32" "" trains 1 2e-5 FP32 "-b 2"
    report "train_gpt2.cu in FP32, 2 micro-batches" "its constant False is true, so that a bias gradient is not added to" \
        trains 1 2e-5 FP32 "-b 1 -d 128"
    sed -i 's/std::bool_constant<true> False/std::bool_constant<false> False/' "$out/llmc/cuda_common.h"
    for precision in FP32 BF16; do
        build train_gpt2_$precision -DENABLE_$precision -DMULTI_GPU -DUSE_MPI "$out/train_gpt2.cu" || return
    done
    report "train_gpt2.cu in FP32, 2 micro-batches, layer norms recomputed, with that mended" "" \
        trains 1 2e-5 FP32 "-b 1 -d 128 -r 2"
    report "train_gpt2.cu in FP32, 2 ranks" "" trains 2 2e-5 FP32 "-b 1 -z 0"
    report "train_gpt2.cu in FP32, 2 ranks, ZeRO-1" "" trains 2 2e-5 FP32 "-b 1 -z 1"
    report "train_gpt2.cu in BF16, 2 ranks, ZeRO-1" "" trains 2 4e-3 BF16 "-b 1 -z 1"
    # cuBLASLt may refuse a fused GeLU, which ends llm.c.
    EMU_REFUSALS=0 report "train_gpt2.cu in BF16, fused GeLU, no fp32 weights" "" trains 1 4e-3 BF16 "-b 2 -r 0 -w 0 -ge 2"
    sed -E -f "$here/launches.sed" -e 's/32 \* 1024 \* 1024/32 * 1024/' "$checkout/dev/cuda/nccl_all_reduce.cu" \
        >"$out/nccl_all_reduce.cu"
    build nccl_all_reduce "$out/nccl_all_reduce.cu" && report "nccl_all_reduce" "" all_good 2
    CXX=$OMPI_CXX
}
# The test accepts a NaN and prints OK; its losses must not.
tests_pass() (
    cd "$run" && timeout 300 "$out/test_gpt2" | tee tests.txt
    ! grep -iw nan tests.txt && grep -q '^overall okay: 1$' tests.txt
)
# Three losses of train_gpt2.cu within LIMIT of train_gpt2.c's, and gradient norms within a hundredth.
trains() ( # RANKS LIMIT PRECISION OPTIONS
    model=gpt2_124M.bin
    [[ $3 == FP32 ]] || model=gpt2_124M_bf16.bin
    cd "$run" || exit
    # shellcheck disable=SC2086  # words
    timeout 300 mpirun --oversubscribe -np "$1" "$out/train_gpt2_$3" -e $model -i tokens.bin -j tokens.bin -t 64 -l 1e-4 -a 1 \
        -x 3 -v 100 -s 0 -m 1 -f 0 $4 >trained.txt || exit
    awk -v limit="$2" 'function far(x, y, most) { return !(x - y <= most && y - x <= most) }
        NR == FNR { loss[$1] = $2; norm[$1] = $3; next }
        /^step/ { print; n++ }
        /^step/ && ($5 != $5 + 0 || far($5, loss[n], limit) || far($8, norm[n], norm[n] / 100)) {
            print "off by " $5 - loss[n] ", norm " $8 - norm[n]
            bad = 1
        }
        END { exit bad || n != 3 }' losses.txt trained.txt
)
all_good() { # RANKS
    timeout 100 mpirun --oversubscribe -np "$1" "$out/nccl_all_reduce" | tee "$out/all_good.txt"
    [[ $(grep -c 'All good!' "$out/all_good.txt") == "$1" ]]
}

fast_cu() { # CHECKOUT
    local k
    for k in 1 2 3 4 5 6 7; do
        perl -0p "$here/fast_cu.pl" "$1/examples/matmul/matmul_$k.cuh" | sed -E -f "$here/launches.sed" >"$out/matmul_$k.cuh"
    done
    build fast_cu -DFOREIGN_HOPPER "$here/fast_cu.cu" || return
    for k in 1 2 3 4 5 6 7; do report "fast.cu matmul_$k" "" timeout 300 "$out/fast_cu" $k; done
    for k in 8 9 10 11 12; do
        grep -q __cluster_dims__ "$1/examples/matmul/matmul_$k.cuh" && echo "fast.cu matmul_$k: left out, its clusters are an attribute"
    done
}

# Descriptors, tensor maps and layouts: CuTe's and ours.
cute() { # CHECKOUT
    local cuda=${CUDA_HOME:-/usr/local/cuda}
    [[ -f $cuda/include/cuda_fp8.h ]] || { echo "CuTe: left out: no CUDA toolkit in $cuda (CUDA_HOME)" && return; }
    if "$CXX" -std=c++17 -w -D__CUDACC_VER_MAJOR__=12 -I"$1/include" -I"$cuda/include" -I"$cuda/include/cccl" \
        "$here/cute_facts.cpp" -o "$out/cute_facts" 2>"$out/log" &&
        "$CXX" -std=c++17 -w "$cpu" -fopenmp -DBACKEND_EMU -I"$source/test/emu" -x c++ "$here/our_facts.cu" \
            -o "$out/our_facts" -rdynamic -ldl 2>"$out/log"; then
        report "CuTe" "" same_facts
    else echo "CuTe: does not build: $(grep -m1 error "$out/log")" && failed=1
    fi
}
same_facts() {
    "$out/cute_facts" | sort >"$out/cute.txt" && "$out/our_facts" | sort >"$out/ours.txt" &&
        [[ $(wc -l <"$out/cute.txt") -gt 50000 ]] && { diff "$out/cute.txt" "$out/ours.txt" || { echo mismatch; false; }; }
}

[[ $# -gt 0 ]] || { sed -n '2,6s/^# //p' "$0" >&2 && exit 2; }
for checkout in "$@"; do
    checkout=$(realpath "$checkout")
    if [[ -d $checkout/dev/cuda ]]; then llm_c "$checkout"; llm_c_trainer "$checkout"
    elif [[ -d $checkout/examples/matmul ]]; then fast_cu "$checkout"
    elif [[ -d $checkout/include/cute ]]; then cute "$checkout"
    else echo "run.sh: $checkout is a checkout of none of llm.c, fast.cu and CUTLASS" >&2 && exit 2
    fi
done
exit $failed
