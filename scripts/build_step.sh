#!/usr/bin/env bash
# One step of a build: names the file to build, runs the compiler, and reports the time that it has taken so far, on a terminal
# every 10 s, in a log every 60 s.
#   scripts/build_step.sh FILE COMMAND...
set -u
file=$1
shift
mkdir -p "${file%/*}" || exit
echo "building $file"
# Reports until the other end of its pipe is closed, however this script ends. The time of the last build is kept next to FILE.
report() {
    local last seconds=60
    [[ ! -t 2 ]] || seconds=10
    last=$(cat "$file.seconds" 2>/dev/null)
    while read -rt $seconds || [[ $? -gt 128 ]]; do
        echo "  $file: compiling ${source##*/}, $SECONDS s${last:+ (last time: $last s)}" >&2
    done
}
source=${!#}
exec 3> >(report)
env GLIBC_TUNABLES=glibc.malloc.hugetlb=1 "$@" 3>&- || exit  # huge pages
exec 3>&-
[[ $SECONDS -lt 10 ]] || { echo "$SECONDS" >"$file.seconds" && echo "built $file in $SECONDS s"; }
