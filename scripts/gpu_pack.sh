#!/usr/bin/env bash
# Builds a folder with everything that scripts/gpu_minutes.sh needs on a GPU machine, where nothing is compiled or
# installed:
#   gpu_tests, gpu_tests_fp32   kernel tests, a program per precision; the first is also the trainer (gpu_tests train_gpt)
#   bench, ladder_*             benchmarks, and the steps of the kernels in dev/kernels
#   data.*, tok, cpu*.jsonl     a small text with its tokenizer, and the losses of a short training run on this CPU
#   gpu_minutes.sh, VERSION     the script itself, and the commit
#   scripts/gpu_pack.sh        (make gpu-pack)     OUT=build/gpu-pack  ARCHS=90a  MARCH=x86-64-v3  MPI=0  STEPS=60
#     MPI=1: with MPI and NCCL, which the machine must then have (gpu_minutes.sh node)
#     CUDNN_FRONTEND=DIR: a folder with cudnn_frontend.h (from PyPI's nvidia-cudnn-frontend), to measure cuDNN too
#     BACKEND=emu: the emulator's programs, for a rehearsal
# Then, on that machine: build/gpu-pack/gpu_minutes.sh first. Fails if the folder exceeds 50 MiB, or if a program needs a
# library that is neither in the folder nor in LIBRARIES, a glibc later than 2.34, or a libstdc++ later than GCC 12's (both are in
# Ubuntu 22.04).
set -euo pipefail
cd "$(dirname "$0")/.."
backend=${BACKEND:-cuda} out=${OUT:-build/gpu-pack} march=${MARCH:-x86-64-v3}
[[ $(uname -m) == x86_64 || -n ${MARCH:-} ]] || march=native
export STEPS=${STEPS:-60} MPI=${MPI:-0} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
most_mib=50
declare -A newest=([GLIBC]=2.34 [GLIBCXX]=3.4.30)
libraries="libcublasLt.so.13 libcublasLt.so.12 libgomp.so.1 libstdc++.so.6 libgcc_s.so.1 libm.so.6 libc.so.6 libpthread.so.0 libdl.so.2 librt.so.1 ld-linux-x86-64.so.2 ld-linux-aarch64.so.1"
[[ $MPI != 1 ]] || libraries+=" libmpi.so.40 libmpi.so.12 libnccl.so.2"
die() { echo "error: $*" >&2; exit 1; }

# Optional libraries are only for reading text; NCCL only for several GPUs.
without=(-DNO_OPTIONAL_LIBRARIES) variables=(optional=)
[[ $MPI == 1 ]] || { without+=(-DHAVE_NCCL=0) variables+=(nccl=); }
[[ -z ${CUDNN_FRONTEND:-} ]] || without+=(-isystem "$CUDNN_FRONTEND")
if [[ $backend == emu ]]; then folder=build/emu variables=() tail=
else folder=build/cuda variables+=(SUFFIX=-pack MARCH="$march" ARCHS="${ARCHS:-90a}") tail=-$march-pack; fi
names=(bf16"$tail"/gpu_tests bf16"$tail"/bench fp32"$tail"/gpu_tests)
for ladder in dev/kernels/*.cu; do names+=(bf16"$tail/ladder_$(basename "$ladder" .cu)"); done
# shellcheck disable=SC2016  # make expands it
build() { env -u MAKEFLAGS -u MFLAGS NVCCFLAGS="${without[*]}" LDFLAGS='-Xlinker=-rpath='"'"'$$ORIGIN'"'" make -s --no-print-directory "$@"; }
if [[ $backend == emu ]]; then env -u MAKEFLAGS -u MFLAGS make -s --no-print-directory BACKEND=emu "${names[@]/#/$folder-}"
else build BACKEND=cuda "${variables[@]}" "${names[@]/#/$folder-}"; fi
env -u MAKEFLAGS -u MFLAGS make -s --no-print-directory BACKEND=cpu build/cpu-bf16/train_gpt

rm -rf "$out"
mkdir -p "$out"
for name in "${names[@]}"; do
    target=$(basename "$name")
    [[ $name != fp32* ]] || target+=_fp32
    strip -o "$out/$target" "$folder-$name"
done
cp scripts/gpu_minutes.sh scripts/gpu_steps.sh "$out"
git describe --always --dirty >"$out/VERSION" 2>/dev/null || echo "not built from git" >"$out/VERSION"

needed() { readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }
is_elf() { [[ -f $1 && $(head -c 4 "$1") == $'\x7fELF' ]]; }
# add_libraries FILE: copies its libraries that are not in LIBRARIES, and their dependencies.
add_libraries() {
    local library path
    for library in $(needed "$1"); do
        [[ " $libraries " != *" $library "* && ! -e $out/$library ]] || continue
        path=$(ldd "$1" | awk -v name="$library" '$1 == name && $2 == "=>" { print $3 }')
        [[ -e $path ]] || die "$1 needs $library, which is not on this machine"
        cp -L "$path" "$out/$library"
        add_libraries "$out/$library"
    done
}
[[ $backend == emu ]] || for file in "$out"/*; do is_elf "$file" && add_libraries "$file"; done

# A text with its tokenizer, and the CPU's losses on it.
. scripts/gpu_steps.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cpu=build/cpu-bf16/train_gpt
cat llmc/*.h llmc/*/*.h train_gpt.cu >"$work/text.txt"
$cpu tokenizer --input "$work/text.txt" --vocab-size 1024 --output "$out/tok" >"$work/log"
$cpu prepare --input "$work/text.txt" --output "$out/data" --tokenizer "$out/tok" >"$work/log"
trained $cpu "$out/data" "$out/tok" "$work/cpu" >"$work/log"
trained $cpu "$out/data" "$out/tok" "$work/cpu-fp8" --fp8 hybrid --fp8-start $((STEPS / 6)) >"$work/log"
for run in cpu cpu-fp8; do cp "$work/$run/log.jsonl" "$out/$run.jsonl"; done

# The folder's contents, and whether they can run elsewhere.
bad=0
for file in "$out"/*; do
    is_elf "$file" || continue
    printf '%-24s %6.1f MiB\n' "$(basename "$file")" "$(stat -c %s "$file" | awk '{ print $1 / 1048576 }')"
    [[ $backend == cuda ]] || continue
    for library in $(needed "$file"); do
        [[ " $libraries " == *" $library "* || -e $out/$library ]] || { echo "error: $file needs $library" >&2; bad=1; }
    done
    for interface in GLIBC GLIBCXX; do
        version=$(objdump -T "$file" | sed -n "s/.*\b${interface}_\([0-9.]*\).*/\1/p" | sort -V | tail -n 1)
        [[ $(printf '%s\n' "${newest[$interface]}" "${version:-0}" | sort -V | tail -n 1) == "${newest[$interface]}" ]] ||
            { echo "error: $file needs $interface $version, not ${newest[$interface]}: $(objdump -T "$file" | grep "${interface}_$version" | awk '{ print $NF }' | head -n 5 | tr '\n' ' ')" >&2; bad=1; }
    done
done
bytes=$(du -sb "$out" | cut -f1)
echo "$out: $((bytes / 1048576)) MiB, at most $most_mib"
[[ $backend == emu ]] || ((bytes <= most_mib << 20)) || die "$out has $((bytes / 1048576)) MiB; at most $most_mib are carried"
exit $bad
