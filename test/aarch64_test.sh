#!/usr/bin/env bash
# The program on ARM, emulated: the cross compiler builds the trainer and the tests of kernels, and qemu runs them: a small
# training, resumed with the same bits, on 2 ranks with the same losses, close to this machine's, and a text from it.
# Skipped without compiler, qemu and libraries (scripts/install_deps.sh aarch64).
source=$(dirname "$(realpath "$0")")/..
. "$source/test/lib.sh"
compiler=aarch64-linux-gnu-g++ sysroot=$source/build/sysroot-aarch64-linux-gnu
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static || echo qemu-aarch64)
for tool in $compiler $qemu "$sysroot/complete"; do
    [[ -e $tool ]] || command -v "$tool" >/dev/null ||
        { echo "ok: skipped: there is no $tool; scripts/install_deps.sh aarch64 gets it" && exit; }
done

build=build/cpu-bf16-$compiler
compiles() { env -u MAKEFLAGS make -C "$source" -s -j2 DEPS_ARE_HERE=1 BACKEND=cpu CXX=$compiler "$build$1"; }
expect "the tests of kernels compile" compiles /kernel_tests
expect "the trainer compiles" compiles -dev/train_gpt
# Without the longest tests, and those that measure time, count threads or start themselves.
kernels() (
    cd "$source" && $qemu -cpu max -L "$sysroot" $build/kernel_tests --gtest_brief=1 \
        --gtest_filter='-MatrixUnits.LinearLayers:AttentionRows.Chunks*:Experts.SameBits*:*Threads.SameBits*:UnitChoice.*:Team.*'
)
expect "kernels" kernels

here=$program
printf '#!/bin/sh\nexec %s -cpu max -L "%s" "%s" "$@"\n' $qemu "$sysroot" "$source/$build-dev/train_gpt" >arm
chmod +x arm
program=$work/arm
expect "it knows its CPU" "$program" --version
says "NEON" "built for NEON"
kings 500 >text.txt
expect "a tokenizer" "$program" tokenizer --input text.txt --vocab-size 280 --output tok
expect "this machine's" "$here" tokenizer --input text.txt --vocab-size 280 --output tok-here
expect "has the same bits" cmp tok/tokenizer.json tok-here/tokenizer.json
expect "prepared data" "$program" prepare --input text.txt --tokenizer tok --output-prefix data
expect "this machine's" "$here" prepare --input text.txt --tokenizer tok --output-prefix data-here
for end in bin idx; do expect "has the same bits: $end" cmp data.$end data-here.$end; done

train=(train --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --global-batch-size 4
    --tokenizer tok --data-path data --train-iters 6 --lr 3e-3 --save-interval 3 --eval-iters 1)
expect "trains" "$program" "${train[@]}" --threads 2 --out whole
expect "resumes" "$program" "${train[@]}" --threads 1 --out parts --resume whole/step_00000003
expect "with the same bits" same_tensors whole parts
expect "this machine trains" "$here" "${train[@]}" --out here
expect "with close losses" near_losses whole here 6 0.01
expect "a run of this machine resumes" "$program" "${train[@]}" --out moved --resume here/step_00000003
expect "with close losses" near_losses here moved 3 0.01
expect "this machine evaluates it" "$here" eval --model whole --text text.txt
expect "writes a text" "$program" generate --model whole --prompt "in the" --max-new-tokens 8
says "from the prompt" "^in the"
if command -v mpirun >/dev/null; then
    # mpirun is this machine's: it and the ranks cannot share the tables of their runtime.
    allow_mpirun_everywhere
    export PMIX_MCA_gds=hash
    expect "2 ranks" timeout 300 mpirun -n 2 --bind-to none "$program" "${train[@]}" --tp 2 --out ranks
    expect "have close losses" near_losses whole ranks 6 0.01
else
    echo "ok: skipped: ranks: there is no mpirun"
fi
