#!/usr/bin/env bash
# Without a GPU: the program compiles with nvcc for every architecture it is meant for, without warnings, and no kernel spills
# more than two registers to memory, and Hopper's machine code is as test/sass.py wants it; what make check-gpu builds beside it
# gets through nvcc's front end and the host's compiler. Where there is no nvcc there is nothing to check, and the script says so.
#   test/cuda_build_test.sh        NVCC=nvcc  ONLY=  WRITE=
#   ONLY=sass: Hopper's machine code alone (make test-sass), and with WRITE=1 write dev/kernels/resources.md
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
[[ ${ONLY:-} != sass ]] || architectures=(90a)
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
# C7510 to C7519: ptxas runs products one after another, or adds waits of its own. It only informs, which is no warning.
expect "ptxas takes wgmma as it is written" refused grep 'C751[0-9]' ptxas.txt

# cuobjdump and the nvdisasm that it calls: of the toolkit, or make test-sass puts them under build/.
for folder in "$(dirname "$(realpath "$NVCC")")" "$root"/build/cuda-tools/lib/python*/site-packages/nvidia/*/bin; do PATH=$PATH:$folder; done
if command -v cuobjdump >cuobjdump.txt; then
    compiler=$("$NVCC" --version | sed -n 's/.*release.* V\([0-9.]*\)$/\1/p')
    passes "machine code" python3 "$root/test/sass.py" --compiler "$compiler" ${WRITE:+--write} program.o
elif [[ ${ONLY:-} == sass ]]; then echo "FAILED: there is no cuobjdump"
else echo "ok: skipped: machine code: there is no cuobjdump; make test-sass gets it"; fi
[[ ${ONLY:-} != sass ]] || exit 0

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
