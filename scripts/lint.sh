#!/usr/bin/env bash
# What a compiler's warnings and the tests do not see: `make lint`, or single stages of it.
#   scripts/lint.sh [format|shell|headers|warnings|tidy]...      (default: all)
# Prints the seconds of each stage; fails if one found something.
#   format    every source is as clang-format leaves it
#   shell     shellcheck
#   headers   every header of llmc/ compiles alone, in bf16, fp32 and fp64; those of gpu/ with the emulator
#   warnings  of clang++ and g++, more than the build's, on the trainer, that of GPUs too
#   tidy      clang-tidy on the trainer; .clang-tidy says which checks and why
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
CXX=${CXX:-g++}

mpi=()
for word in $(mpicxx --showme:compile 2>/dev/null || mpicxx -compile-info 2>/dev/null); do
    [[ $word != -I* ]] || mpi+=(-isystem "${word#-I}")
done
[[ ${#mpi[@]} -gt 0 ]] || mpi=(-DHAVE_MPI=0)
language=(-std=c++17 -fopenmp -march=native -I. "${mpi[@]}")

lint_format() {
    # test/emu/foreign declares what other programs include, in their layout.
    git ls-files '*.h' '*.cuh' '*.cu' '*.cpp' ':!test/emu/foreign' | xargs clang-format --dry-run -Werror
}

# SC2154, SC2034: variables of the scripts that are sourced. SC2209: EXEC=exec before a command is meant.
lint_shell() { git ls-files '*.sh' '*.sbatch' .ci/run | xargs shellcheck -S warning -e SC2154,SC2034,SC2209; }

# header_alone HEADER: a header that reads the same in two precisions is compiled in one of them. In a process of its own, as many
# at a time as there are cores.
header_alone() {
    local bad=0 precision sum flags
    local -A seen=()
    for precision in BF16 FP32 FP64; do
        flags=("${language[@]}" "-DPRECISION_$precision")
        if [[ $1 == *.cuh ]]; then
            [[ $precision != FP64 ]] || continue # no GPU's
            flags+=(-DBACKEND_EMU -Itest/emu -Wno-unknown-pragmas)
        fi
        sum=$(echo "#include \"$1\"" | "$CXX" -x c++ "${flags[@]}" -E - 2>/dev/null | md5sum)
        [[ -z ${seen[$sum]:-} ]] || continue
        seen[$sum]=1
        echo "#include \"$1\"" | "$CXX" -x c++ "${flags[@]}" -fsyntax-only -Wall -Wextra -Wno-psabi -Werror - && continue
        echo "$1 does not compile alone in $precision"
        bad=1
    done
    return $bad
}
lint_headers() { git ls-files 'llmc/*.h' 'llmc/*.cuh' | xargs -n 1 -P "$(nproc)" "$0" header; }

# Beside -Wall -Wextra:
#   -Wcomma               one statement a line
#   -Wshadow              a name that hides another
#   -Wshorten-64-to-32    counts of tokens and bytes in an int; what -Wconversion adds is counts in doubles, which are meant
#   -Wcast-qual -Wextra-semi -Wunreachable-code -Wconditional-uninitialized -Wnon-virtual-dtor   what they say
#   GCC's -Wduplicated-cond -Wlogical-op -Wredundant-decls   conditions and declarations that stand twice
# Not -Wold-style-cast: (int)x is the house's cast. Not -Wdouble-promotion, -Wuseless-cast: what is useless in one precision or
# type is not in another. -Wnull-dereference needs an optimizer and is wrong about std::vector.
clang_warnings=(-Wcomma -Wshadow -Wshorten-64-to-32 -Wcast-qual -Wextra-semi -Wunreachable-code -Wconditional-uninitialized
    -Wnon-virtual-dtor -Wno-pass-failed)
gcc_warnings=(-Wduplicated-cond -Wlogical-op -Wredundant-decls -Wextra-semi)
lint_warnings() {
    local bad=0 precision
    for precision in BF16 FP32; do
        clang++ -x c++ "${language[@]}" "-DPRECISION_$precision" -fsyntax-only -Wall -Wextra "${clang_warnings[@]}" -Werror \
            train_gpt.cu || bad=1
    done
    # Operands of a GPU's product are pointers to const, those that it sets as well.
    clang++ -x c++ "${language[@]}" -DBACKEND_EMU -isystem test/emu -Wno-unknown-pragmas -fsyntax-only -Wall -Wextra \
        "${clang_warnings[@]}" -Wno-cast-qual -Werror train_gpt.cu || bad=1
    "$CXX" -x c++ "${language[@]}" -fsyntax-only -Wall -Wextra -Wno-psabi "${gcc_warnings[@]}" -Werror train_gpt.cu || bad=1
    return $bad
}

lint_tidy() { clang-tidy --quiet --warnings-as-errors='*' train_gpt.cu -- -x c++ "${language[@]}" 2>/dev/null; }

if [[ ${1:-} == header ]]; then
    header_alone "$2"
    exit
fi
[[ $# -gt 0 ]] || set -- format shell headers warnings tidy
failed=()
for stage in "$@"; do
    declare -F "lint_$stage" >/dev/null || { echo "error: '$stage' is no stage; one of: format shell headers warnings tidy" >&2; exit 1; }
    start=$SECONDS
    "lint_$stage" || failed+=("$stage")
    echo "lint $stage: $((SECONDS - start)) s"
done
[[ ${#failed[@]} -eq 0 ]] || { echo "error: found something: ${failed[*]}" >&2; exit 1; }
