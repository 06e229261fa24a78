#!/usr/bin/env bash
# scripts/gpu_pack.sh with fake programs and a fake make: the folder has everything that gpu_minutes.sh needs, stripped,
# with the libraries that a GPU machine may lack; a folder that is too large, a missing library, or a glibc that is too new
# is refused. (The real pack, a quarter of an hour of nvcc, runs the same checks whenever it is built.)
root=$(realpath "$(dirname "$0")/..")
TRAIN_GPT=/bin/true
. "$root/test/lib.sh"
mkdir -p tree/scripts tree/dev/kernels tree/llmc/x tree/build/cpu-bf16 bin
cp "$root"/scripts/gpu_{pack,minutes,steps}.sh tree/scripts/
touch tree/dev/kernels/adamw.cu tree/llmc/a.h tree/llmc/x/b.h tree/train_gpt.cu

# compiled NAME FLAGS...: compiles standard input.
compiled() { gcc -x c - -g -o "$1" "${@:2}"; }
echo 'int answer(void) { return 42; }' | compiled libanswer.so -shared -fPIC -Wl,-soname,libanswer.so.3
mv libanswer.so libanswer.so.3
echo 'int main(void) { return 0; }' | compiled plain
echo 'int main(void) { return 0; }' | compiled needy -Wl,--no-as-needed -x none ./libanswer.so.3
echo 'char large[60 << 20] = {1}; int main(void) { return 0; }' | compiled large
# Fake make; FAULT=make: the build fails. bench is $BENCH.
cat >bin/make <<'M'
#!/bin/bash
set -e
[[ $FAULT != make ]] || exit 2
echo "$NVCCFLAGS $LDFLAGS $*" >>"$ASKED"
for target in "$@"; do
    [[ $target == build/cuda* ]] || continue
    mkdir -p "${target%/*}"
    cp "$PROGRAMS/plain" "$target"
    [[ $target != */bench ]] || cp "$BENCH" "$target"
done
M
cat >tree/build/cpu-bf16/train_gpt <<'M'
#!/bin/bash
case $1 in tokenizer) mkdir -p "${@: -1}" ;; prepare) echo data >"$5.bin" ;; esac
while (($# > 1)); do [[ $1 != --out ]] || { mkdir -p "$2"; echo '{"kind":"step"}' >"$2/log.jsonl"; }; shift; done
M
chmod +x bin/make tree/build/cpu-bf16/train_gpt
export PATH=$work/bin:$PATH PROGRAMS=$work ASKED=$work/asked BENCH=$work/needy FAULT='' LD_LIBRARY_PATH=$work OUT=$work/pack
unset MPI ARCHS MARCH BACKEND
pack() { tree/scripts/gpu_pack.sh; }
expect "a pack" pack
for name in gpu_tests gpu_tests_fp32 bench ladder_adamw gpu_minutes.sh gpu_steps.sh VERSION data.bin tok cpu.jsonl cpu-fp8.jsonl; do
    expect "it has $name" test -e "pack/$name"
done
expect "with the library that bench needs" test -e pack/libanswer.so.3
expect "and none that every machine has" test ! -e pack/libc.so.6
expect "stripped" refused grep -q debug_info <(readelf -SW pack/gpu_tests)
expect "for Hopper and CPUs since Haswell" grep -q 'MARCH=x86-64-v3 ARCHS=90a' asked
expect "without NCCL and optional libraries" grep -q 'NO_OPTIONAL_LIBRARIES -DHAVE_NCCL=0' asked
expect "which finds libraries next to it" grep -qF 'rpath='"'"'$$ORIGIN' asked
rm asked
MPI=1 ARCHS=80 expect "with MPI, for another GPU" pack
expect "then with NCCL" refused grep -q HAVE_NCCL asked
expect "for that GPU" grep -q 'ARCHS=80' asked

BENCH=$work/large no "more than 50 MiB" "has 60 MiB; at most 50 are carried" pack
LD_LIBRARY_PATH='' no "a library that is nowhere" "bench needs libanswer.so.3, which is not on this machine" pack
printf '#!/bin/bash\necho "DF *UND* 0 (GLIBC_2.38) strlcpy"\n' >bin/objdump
chmod +x bin/objdump
no "a glibc that is too new" "needs GLIBC 2.38, not 2.34: strlcpy" pack
printf '#!/bin/bash\necho "DF *UND* 0 (GLIBCXX_3.4.32) _ZSt7reserve"\n' >bin/objdump
no "a libstdc++ that is too new" "needs GLIBCXX 3.4.32, not 3.4.30: _ZSt7reserve" pack
rm bin/objdump
FAULT=make expect "a build that fails" refused pack
