#!/usr/bin/env bash
# The rooms of llmc/ (llmc/README.md): a header includes its own room and lower ones, never a higher one.
repository=$(realpath "$(dirname "$0")/..")
. "$(dirname "$0")/lib.sh"

# The rooms of FOLDER/llmc from the lowest up, as the table in its README lists them; . is the folder itself.
rooms_of() {
    sed -n '/^## The rooms/,/^## Reading/p' "$1/llmc/README.md" | grep '^|' | cut -d'|' -f2 | sed 's/.*ops\.inl.*/./' | grep -oE '[a-z]+/\]|`[a-z]+/`|^\.' |
        tr -d '`/]'
}
# Prints each include of FOLDER/llmc that goes up or sideways, and fails if there is one. Headers shared by two rooms are in a
# lower room; gpu/ may use cpu/'s host code.
includes_go_down() {
    local bad=0 floors=0 file line room target from to
    local -A floor
    while read -r room; do floor[$room]=$((++floors)); done < <(rooms_of "$repository")
    while IFS=: read -r file line; do
        line=${line#*\"} file=${file#"$1/llmc/"} from=.
        [[ $file != */* ]] || from=${file%/*}
        case $from/$line in
            ./*) target=$line ;;
            */../*) target=${line#../} ;;
            *) target=$from/$line ;;
        esac
        target=${target%%\"*} to=.
        [[ $target != */* ]] || to=${target%/*}
        case "$file $target" in
            "ops.h cpu/ctx.h" | "ops.h gpu/ctx.cuh") continue ;; # each backend's context, an argument of every op
            gpu/*" ../test/emu/"*) continue ;;                   # the emulator's instructions, only in its build
            "data/"*" parallel/"* | "parallel/"*" data/"*) ;;     # these two are independent
            *) [[ -n ${floor[$from]:-} && -n ${floor[$to]:-} && ${floor[$to]} -le ${floor[$from]} ]] && continue ;;
        esac
        echo "llmc/$file includes $target"
        bad=1
    done < <(grep -rHE '^ *#include "' "$1/llmc" --include='*.h' --include='*.cuh' --include='*.inl')
    return $bad
}
expect "includes of llmc/ go down the rooms" includes_go_down "$repository"
mkdir -p tree/llmc/base tree/llmc/run
echo '#include "../options/options.h"' >tree/llmc/base/types.h
expect "an include that goes up is found" refused includes_go_down tree
says "and named" "llmc/base/types.h includes options/options.h"
unnamed() { for room in "$repository"/llmc/*/; do grep -q "\`$(basename "$room")/\`" "$repository/llmc/README.md" || basename "$room"; done; }
expect "each room stands in llmc/README.md" test -z "$(unnamed)"

# Prints each header of FOLDER/llmc that neither the tour nor its room's README names, and fails if there is one.
headers_are_named() {
    local bad=0 room text path header
    for room in "$1"/llmc "$1"/llmc/*/; do
        text=$(cat "$1/llmc/README.md" "$room/README.md" 2>/dev/null)
        for path in "$room"/*.h "$room"/*.cuh "$room"/*.inl; do
            header=${path##*/}
            [[ ! -e $path || $text == *"\`$header\`"* || $text == *"/$header\`"* ]] && continue
            echo "$header of $(basename "$room")/ is named nowhere"
            bad=1
        done
    done
    return $bad
}
expect "every header is named in the tour or in its room's README" headers_are_named "$repository"
touch tree/llmc/run/hidden.h tree/llmc/README.md
expect "one that is not is found" refused headers_are_named tree
says "and named" "hidden.h of run/ is named nowhere"

# No source line is longer than 128 characters (declarations of foreign code keep their layout). Prints longer ones in
# FOLDER, and fails if there is one.
short_lines() {
    find "$1" -path "$1/build" -prune -o -path '*/emu/foreign' -prune -o -regex '.*\.\(h\|cuh\|inl\|cu\|cpp\)' -print0 |
        LC_ALL=C.UTF-8 xargs -0 grep -nE '.{129}' && return 1
    return 0
}
expect "lines have at most 128 characters" short_lines "$repository"
printf '%0128d\n// %s\n' 0 "$(printf 'é%.0s' {1..125})" >tree/llmc/run/hidden.h
expect "as many as that are not too many" short_lines tree
printf '%0129d\n' 0 >>tree/llmc/run/hidden.h
expect "one more is found" refused short_lines tree
says "and named" "run/hidden.h:3:0000"

# Each line of code in dev/HOWTO-ADD.md is in the source. A comment of one word says where the next lines are.
trimmed() { sed 's/^ *//; s/ *$//' "$@"; }
shown() { awk '/^```cpp/ { code = 1; next } /^```/ { code = 0 } code' "$1" | trimmed | grep -vE '^(// [a-z_0-9]+)?$'; }
source_lines() { trimmed "$repository"/train_gpt.cu "$repository"/llmc/*/*.h "$repository"/test/test_model_fp64.cpp; }
gone() { comm -23 <(shown "$1" | sort -u) <(source_lines | sort -u); }
expect "the example of HOWTO-ADD.md is in the source: $(gone "$repository/dev/HOWTO-ADD.md")" test -z "$(gone "$repository/dev/HOWTO-ADD.md")"
expect "and is counted" grep -q ": $(shown <(sed '/^## The test/q' "$repository/dev/HOWTO-ADD.md") | wc -l) lines in" "$repository/dev/HOWTO-ADD.md"
{ cat "$repository/dev/HOWTO-ADD.md"; printf '```cpp\nint nowhere;\n```\n'; } >howto.md
expect "a line that is not is found" test "$(gone howto.md)" == "int nowhere;"

# The contract (llmc/ops.inl) stays readable: an op has at most 8 parameters besides its context, no five ints in a row, and
# no default argument. Prints each op that breaks this, and fails if there is one.
short_signatures() {
    sed -E 's|//.*||; s@/\*([^*]|\*[^/])*\*/@@g' "$1" | tr '\n' ' ' | tr -s ' ' | tr ';' '\n' | grep '(Ctx& ctx\|(const Ctx& ctx' | awk '{
        n = gsub(/,/, ",")
        if (n > 8 || /int [^ ]+, int [^ ]+, int [^ ]+, int [^ ]+, int / || /=/) { print; bad = 1 }
    } END { exit bad }'
}
expect "signatures of ops are short" short_signatures "$repository/llmc/ops.inl"
for parameters in "int a, int b, int c, int d, int e" "int* a, int* b, int* c, int d, int e, int* f, int* g, real h, Acc i" "int a, int b = 0"; do
    echo "void op_forward(Ctx& ctx, $parameters);" >ops.inl
    expect "one that is not: $parameters" refused short_signatures ops.inl
    says "and named" "op_forward"
done

# The Makefile stays readable: at most 215 lines of at most 120 columns, without generated rules or a nested make for
# another configuration; and every kind of program can be built by its path in any configuration.
short_makefile() {
    awk 'length > 120 || /\$\(eval|^define|\$\(MAKE\).*(BACKEND|PRECISION)=/ { print FILENAME ":" FNR ": " $0; bad = 1 }
        END { exit bad || NR > 215 }' "$1"
}
expect "the Makefile is short" short_makefile "$repository/Makefile"
# shellcheck disable=SC2016
printf 'all:\n\t$(MAKE) BACKEND=emu\n' >long.mk
expect "one with a nested make is not" refused short_makefile long.mk
made() { make -C "$repository" -n NODEPS=1 "$@"; }
while read -r program flags; do
    expect "make knows build/$program" made "build/$program"
    says "for its backend and precision" "$flags"
done <<'END'
emu-fp32-x/train_gpt BACKEND_EMU.*PRECISION_FP32
cpu-bf16-address-undefined-x/test_cli fsanitize=address,undefined
cpu-fp64-x/fp64_tests PRECISION_FP64
emu-bf16-x/test_gpu_ops BACKEND_EMU
cpu-fp32-x/bench PRECISION_FP32
emu-bf16-x/parity_check BACKEND_EMU
cpu-bf16-debug/train_gpt -O0 -g3
END
expect "make for another CPU" made CXX=aarch64-linux-gnu-g++ MARCH=neoverse-n1 BACKEND=cpu build/cpu-bf16-x/train_gpt
says "with its compiler's option" "aarch64-linux-gnu-g++ .*-mcpu=neoverse-n1"
expect "make by this CPU's name of its compiler" made CXX="$(uname -m)-linux-gnu-g++" BACKEND=cpu build/cpu-bf16-x/train_gpt
says "is not for another CPU" "-m[a-z]*=native"
expect "make dev" made -B dev
says "compiles several units" "DSEVERAL_UNITS"
expect "make refuses what is no program" refused made build/cpu-bf16/nothing
says "and says so" "no program is called build/cpu-bf16/nothing"

# Optional libraries: linked if their headers are installed, otherwise omitted.
linked() { make -s -C "$repository" NODEPS=1 print-optional "$@"; }
as_installed() {
    local package header flag all
    all=$(linked)
    while read -r package header flag _; do
        [[ $package == \#* || ! -e /usr/include/$header || " $all " == *" $flag "* ]] || { echo "$header"; return 1; }
    done <"$repository/scripts/libraries.txt"
}
expect "optional libraries are linked where they are installed" as_installed
expect "and left out where they are not" test -z "$(linked CXX="g++ -nostdinc -Itest")"
