#!/usr/bin/env bash
# Without a GPU: the program compiles with nvcc for every architecture it is meant for, without warnings, and no kernel spills
# more than two registers to memory; what make check-gpu builds beside it gets through nvcc's front end and the host's compiler. Where there is no nvcc there is nothing to check, and the script says so.
#   test/cuda_build_test.sh        NVCC=nvcc  PRECISION=bf16
root=$(realpath "$(dirname "$0")/..")
TRAIN_GPT=/bin/true
. "$root/test/lib.sh"
NVCC=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if [[ ! -x $NVCC ]]; then
    echo "ok: skipped: there is no nvcc"
    exit 0
fi
deps=()
[[ -d $root/build/deps/include && ! -e /usr/include/CLI/CLI.hpp ]] && deps=(-isystem "$root/build/deps/include")
# Runs NAME ARCHITECTURE...: one compilation for several, two at a time.
compile() {
    local archs=()
    for arch in "$@"; do archs+=("-gencode=arch=compute_$arch,code=sm_$arch"); done
    "$NVCC" -x cu -std=c++17 -O3 -t 2 -DBACKEND_CUDA -I"$root" "${deps[@]}" -Werror all-warnings -Xptxas -v \
        -Xcompiler -fopenmp,-Wall,-Wextra,-Wno-parentheses,-O1 "${archs[@]}" -c "$root/train_gpt.cu" -o program.o >ptxas.txt 2>&1
}
architectures=(80 90a)
for arch in 100a 120; do "$NVCC" --list-gpu-code | grep -q "^sm_${arch%a}$" && architectures+=("$arch"); done
expect "compiles for sm_${architectures[*]} without warnings" compile "${architectures[@]}"
# User time of all children: two cores that do nothing else need half of it.
times >times.txt
cpu_seconds=$(awk 'NR == 2 { split($1, t, "m"); print int(t[1] * 60 + t[2]) }' times.txt)
expect "in $cpu_seconds s of CPU time, below 600" test "$cpu_seconds" -gt 0 -a "$cpu_seconds" -lt 600
kernels=$(grep -c "Function properties" ptxas.txt)
expect "$kernels kernels were looked at" test "$kernels" -ge 50
# Two registers outside of inner loops cost nothing that can be seen; more is refused.
awk '/Function properties for/ { name = $NF } /bytes spill stores/ && ($5 > 8 || $9 > 16) { print name ": " $0 }' ptxas.txt >spills.txt
expect "no kernel spills more than two registers" cmp spills.txt /dev/null
cat spills.txt

# Tests, benchmarks and ladders.
host_side() {
    local out precision=()
    out=$(mktemp -p .)
    [[ $1 == *_fp32* ]] && precision=(-DPRECISION_FP32)
    "$NVCC" -x cu -std=c++17 -fdevice-syntax-only -DBACKEND_CUDA "${precision[@]}" -I"$root" "${deps[@]}" -Werror all-warnings \
        -Xcompiler -fopenmp,-Wall,-Wextra,-Wno-parentheses,-O0 -gencode=arch=compute_90a,code=sm_90a -c "$1" -o "$out" >"$out.txt" 2>&1 ||
        { cat "$out.txt"; return 1; }
}
shopt -s nullglob
sources=("$root"/test/gpu/*.cu "$root"/test/comm_check.cu "$root"/dev/bench/*.cu "$root"/dev/kernels/*.cu "$root"/test/test_golden_fp32.cpp)
half=$(((${#sources[@]} + 1) / 2))
check() { # SOURCE...
    local source
    for source in "$@"; do expect "${source#"$root"/} compiles with nvcc" host_side "$source"; done
}
mkdir first
(cd first && check "${sources[@]:0:half}") &  # expect keeps output in the current directory
check "${sources[@]:half}"
wait
