#!/usr/bin/env bash
# Finds problems that the build's warnings and the tests miss: `make lint`, or single stages.
#   scripts/lint.sh [format|shell|prose|headers|warnings|tidy]...      (default: all)
# Prints the seconds of each stage; fails if a stage found something.
#   format    every source is formatted by clang-format
#   shell     shellcheck
#   prose     no file has more words of scripts/prose.txt than scripts/prose_counts.txt allows; titles of the last 20 commits
#             have at most 72 characters
#   headers   every header of llmc/ compiles by itself, gpu/ with the emulator; in bf16: an include that is missing is missing in
#             every precision, and the tests compile the others
#   warnings  more warnings of clang++ and g++ than in the build, on the trainer for CPU and GPU
#   tidy      clang-tidy on the trainer; .clang-tidy has the checks and the reasons
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
CXX=${CXX:-g++}

mpi=()
for word in $(mpicxx --showme:compile 2>/dev/null || mpicxx -compile-info 2>/dev/null); do
    [[ $word != -I* ]] || mpi+=(-isystem "${word#-I}")
done
[[ ${#mpi[@]} -gt 0 ]] || mpi=(-DHAVE_MPI=0)
language=(-std=c++17 -fopenmp "$(make -s BACKEND=cpu print-for_cpu)" -I. "${mpi[@]}")

lint_format() {
    # test/emu/foreign has other programs' declarations, in their layout.
    git ls-files '*.h' '*.cuh' '*.cu' '*.cpp' ':!test/emu/foreign' | xargs clang-format --dry-run -Werror
}

# SC2154, SC2034: variables of sourced scripts. SC2209: EXEC=exec before a command is intended.
lint_shell() { git ls-files '*.sh' '*.sbatch' .ci/run | xargs shellcheck -S warning -e SC2154,SC2034,SC2209; }

lint_prose() {
    local bad=0
    scripts/prose.py || bad=1
    git log --no-merges -20 --format=%s | grep -E '.{73}' && echo "these titles are longer than 72 characters" && bad=1
    return $bad
}

# header_alone HEADER: runs in its own process, as many at a time as there are cores. clang++ needs three quarters of g++'s time.
header_alone() {
    local flags=("${language[@]}")
    [[ $1 != *.cuh ]] || flags+=(-DBACKEND_EMU -Itest/emu -Wno-unknown-pragmas)
    echo "#include \"$1\"" | clang++ -x c++ "${flags[@]}" -fsyntax-only -Wall -Wextra -Werror - && return
    echo "$1 does not compile alone"
    return 1
}
lint_headers() { git ls-files 'llmc/*.h' 'llmc/*.cuh' | xargs -n 1 -P "$(nproc)" "$0" header; }

# In addition to -Wall -Wextra:
#   -Wcomma               one statement per line
#   -Wshadow              a name that hides another
#   -Wshorten-64-to-32    counts of tokens and bytes in an int; -Wconversion would add counts in doubles, which are intended
#   -Wcast-qual -Wextra-semi -Wunreachable-code -Wconditional-uninitialized -Wnon-virtual-dtor   as named
#   GCC's -Wduplicated-cond -Wlogical-op -Wredundant-decls   duplicate conditions and declarations
# Not -Wold-style-cast: we write (int)x. Not -Wdouble-promotion, -Wuseless-cast: a cast that is useless in one precision or
# type is needed in another. -Wnull-dereference needs optimization and is wrong about std::vector.
clang_warnings=(-Wcomma -Wshadow -Wshorten-64-to-32 -Wcast-qual -Wextra-semi -Wunreachable-code -Wconditional-uninitialized
    -Wnon-virtual-dtor -Wno-pass-failed)
gcc_warnings=(-Wduplicated-cond -Wlogical-op -Wredundant-decls -Wextra-semi)
lint_warnings() {
    local bad=0 precision unit
    for precision in BF16 FP32; do
        clang++ -x c++ "${language[@]}" "-DPRECISION_$precision" -fsyntax-only -Wall -Wextra "${clang_warnings[@]}" -Werror \
            train_gpt.cu || bad=1
    done
    # A GPU product's operands are pointers to const, even its outputs.
    clang++ -x c++ "${language[@]}" -DBACKEND_EMU -isystem test/emu -Wno-unknown-pragmas -fsyntax-only -Wall -Wextra \
        "${clang_warnings[@]}" -Wno-cast-qual -Werror train_gpt.cu || bad=1
    # As `make dev` compiles them.
    for unit in "-DSEVERAL_UNITS train_gpt.cu" dev/units/ops.cpp dev/units/host_commands.cpp; do
        # shellcheck disable=SC2086
        "$CXX" -x c++ "${language[@]}" -fsyntax-only -Wall -Wextra -Wno-psabi "${gcc_warnings[@]}" -Werror $unit || bad=1
    done
    return $bad
}

lint_tidy() { clang-tidy --quiet --warnings-as-errors='*' train_gpt.cu -- -x c++ "${language[@]}" 2>/dev/null; }

if [[ ${1:-} == header ]]; then
    header_alone "$2"
    exit
fi
[[ $# -gt 0 ]] || set -- format shell prose headers warnings tidy
failed=()
for stage in "$@"; do
    declare -F "lint_$stage" >/dev/null || { echo "error: '$stage' is no stage; one of: format shell prose headers warnings tidy" >&2; exit 1; }
    start=$SECONDS
    "lint_$stage" || failed+=("$stage")
    echo "lint $stage: $((SECONDS - start)) s"
done
[[ ${#failed[@]} -eq 0 ]] || { echo "error: found something: ${failed[*]}" >&2; exit 1; }
