#!/usr/bin/env bash
# Without a GPU: nvcc compiles the trainer's kernels for Hopper without warnings, none spills more than two registers to
# memory, and if cuobjdump exists, the machine code passes test/sass.py. Without nvcc the script checks nothing, and says
# so.
#   test/cuda_build_test.sh        NVCC=nvcc  ONLY=  ALL=  WRITE=
#   ONLY=host: only nvcc's front end on the benchmark, which includes the trainer (CI: the full test takes three times as long)
#   ONLY=sass: installs cuobjdump if needed (make test-sass); WRITE=1 updates dev/kernels/resources.md
#   ALL=1: the complete trainer for every supported architecture, and sm_90a machine code of the other programs of
#   make check-gpu, in their precisions (make test-all)
root=$(realpath "$(dirname "$0")/..")
TRAIN_GPT=/bin/true
. "$root/test/lib.sh"
NVCC=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if [[ ! -x $NVCC ]]; then
    echo "ok: skipped: there is no nvcc"
    exit 0
fi
deps=()
[[ -d $root/build/deps/include && ! -e /usr/include/nlohmann/json.hpp ]] && deps=(-isystem "$root/build/deps/include")
# compile WHAT SOURCE ARCHITECTURE...: one compilation for several architectures, two at a time. WHAT: -cubin for device
# code only.
compile() {
    local what=$1 source=$2 archs=()
    shift 2
    for arch in "$@"; do archs+=("-gencode=arch=compute_$arch,code=sm_$arch"); done
    "$NVCC" -x cu -std=c++17 -O3 -t 2 -DBACKEND_CUDA -I"$root" "${deps[@]}" -Werror all-warnings -Xptxas -v \
        -Xcompiler -fopenmp,-Wall,-Wextra,-Wno-parentheses,-O1 "${archs[@]}" "$what" "$source" -o program.o >ptxas.txt 2>&1
}
# no_spills PTXAS-OUTPUT: spilling two registers outside of inner loops costs nothing measurable; more is refused.
no_spills() {
    ! awk '/Function properties for/ { name = $NF } /bytes spill stores/ && ($5 > 8 || $9 > 16) { print name ": " $0 }' "$1" | grep .
}
# C7510 to C7519: ptxas serializes products or adds waits. These are notes, not warnings.
as_written() { ! grep 'C751[0-9]' "$1"; }
install_cuda_tools() { python3 -m venv "$1" && "$1/bin/pip" install -q nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm; }
trainer() {
    # Kernels are launched within these headers, so this gives the trainer's machine code in a third of the time.
    local architectures=(90a) what=-cubin source=kernels.cu arch kernels folder compiler
    # Also the ladder's matrix product, which no header of the trainer includes.
    local trainer=("$root"/llmc/ops.h "$root"/llmc/gpu/ops.cuh)
    [[ -z ${ALL:-} ]] || trainer=("$root"/train_gpt.cu)
    printf '#include "%s"\n' "${trainer[@]}" "$root"/dev/kernels/gemm_hopper.cuh >kernels.cu
    if [[ -n ${ALL:-} ]]; then
        architectures=(80 90a) what=-c
        for arch in 89 100 120; do "$NVCC" --list-gpu-code | grep -q "^sm_$arch$" && architectures+=("$arch"); done
    fi
    expect "compiles for sm_${architectures[*]} without warnings" compile $what "$source" "${architectures[@]}"
    kernels=$(grep -c "Function properties" ptxas.txt)
    expect "$kernels kernels were looked at" test "$kernels" -ge 50
    expect "no kernel spills more than two registers" no_spills ptxas.txt
    expect "ptxas takes wgmma as it is written" as_written ptxas.txt

    # cuobjdump and nvdisasm, which it calls: from the toolkit or, if that is incomplete, from pip; make test-sass installs
    # them.
    for folder in "$(dirname "$(realpath "$NVCC")")" "$root"/build/cuda-tools/lib/python*/site-packages/nvidia/*/bin; do PATH=$PATH:$folder; done
    if [[ ${ONLY:-} == sass ]] && ! command -v cuobjdump >cuobjdump.txt; then
        expect "cuobjdump and nvdisasm" install_cuda_tools "$root/build/cuda-tools"
        PATH=$PATH:$(ls -d "$root"/build/cuda-tools/lib/python*/site-packages/nvidia/*/bin | tr '\n' :)
    fi
    if command -v cuobjdump >cuobjdump.txt; then
        compiler=$("$NVCC" --version | sed -n 's/.*release.* V\([0-9.]*\)$/\1/p')
        passes "machine code" python3 "$root/test/sass.py" --compiler "$compiler" ${WRITE:+--write} program.o
    elif [[ ${ONLY:-} == sass ]]; then echo "FAILED: there is no cuobjdump"
    else echo "ok: skipped: machine code: there is no cuobjdump; make test-sass gets it"; fi
}
[[ ${ONLY:-} == host ]] || trainer
[[ ${ONLY:-} == host || -n ${ALL:-} ]] || exit 0

# The benchmark: syntax only, as compiled for the device. ALL: also tests and ladders, to machine code.
compiled() { # SOURCE PRECISION
    local flags=(-fdevice-syntax-only -cubin) out
    [[ -z ${ALL:-} ]] || flags=(-cubin -Xptxas -v)
    [[ $2 == bf16 ]] || flags+=(-DPRECISION_FP32)
    out=$(mktemp -p .)
    "$NVCC" -x cu -std=c++17 -DBACKEND_CUDA "${flags[@]}" -I"$root" "${deps[@]}" -Werror all-warnings \
        -Xcompiler -fopenmp,-Wall,-Wextra,-Wno-parentheses,-O0 -gencode=arch=compute_90a,code=sm_90a "$1" -o "$out" >"$out.txt" 2>&1 &&
        as_written "$out.txt" && { [[ $2 == fp32 ]] || no_spills "$out.txt"; } && return  # norm_backward_kernel: six in fp32
    cat "$out.txt"
    return 1
}
programs=("$root/dev/bench/bench.cu bf16")
if [[ -n ${ALL:-} ]]; then
    for source in "$root"/test/gpu/*.cu "$root"/test/*_check.cu "$root"/dev/kernels/*.cu "$root"/test/test_golden_fp32.cpp; do
        [[ $source == *_fp32* ]] || programs+=("$source bf16")
        [[ $source != *_fp32* && $source != */test/gpu/* ]] || programs+=("$source fp32")
    done
fi
half=$(((${#programs[@]} + 1) / 2))
check() { # "SOURCE PRECISION"...
    local program
    for program in "$@"; do expect "$(basename "$program") compiles with nvcc" compiled "${program% *}" "${program##* }"; done
}
mkdir first
(cd first && check "${programs[@]:0:half}") &  # in its own directory, as expect writes to the current one
check "${programs[@]:half}"
wait
times >times.txt
echo "in $(awk 'NR == 2 { split($1, t, "m"); print int(t[1] * 60 + t[2]) }' times.txt) s of CPU time"
