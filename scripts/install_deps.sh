#!/usr/bin/env bash
# Installs the packages missing to build, test and run on Debian or Ubuntu: as root, or with sudo if it needs no password.
# Otherwise prints the exact command. Returns quickly if nothing is missing. The optional libraries of libraries.txt are not
# required: if they cannot be installed, it prints a note.
#   scripts/install_deps.sh [build|clang|aarch64|lint|interop|test|chaos|quickstart]...      (default: build)
#   scripts/install_deps.sh --list GROUP...       prints the packages, and installs nothing
set -euo pipefail

declare -A need=(
    [build]="make g++ libpcre2-dev nlohmann-json3-dev openmpi-bin libopenmpi-dev"
    [clang]="clang libomp-dev libclang-rt-14-dev"
    [aarch64]="g++-aarch64-linux-gnu qemu-user-static"
    [lint]="clang clang-tidy clang-format libomp-dev shellcheck"
    [interop]="python3-venv"
    [test]="libgtest-dev"
    [chaos]="python3"
    [quickstart]="bible-kjv debian-reference-ja"
)
packages=() lists=
[[ ${1:-} != --list ]] || { lists=1 && shift; }
for group in build "$@"; do
    [[ -n ${need[$group]:-} ]] || { echo "error: group '$group' is unknown; one of: ${!need[*]}" >&2; exit 1; }
    for package in ${need[$group]}; do packages+=("$package"); done
done
mapfile -t libraries < <(awk '!/^#/ { print $1 }' "$(dirname "$0")/libraries.txt")
[[ -z $lists ]] || { echo "${packages[*]} ${libraries[*]}" && exit; }

if ! command -v dpkg-query >/dev/null; then
    echo "error: this system has no dpkg; install what corresponds to: ${packages[*]}; HINT: if it is there, make NODEPS=1 ..." >&2
    exit 1
fi
exec 9>"${TMPDIR:-/tmp}/train_gpt_deps.$(id -u)" && flock 9  # make -j starts several of these
# A cross compiler has only the C and C++ libraries of its CPU; the others are unpacked into a folder.
[[ " $* " != *" aarch64 "* ]] || "$(dirname "$0")/sysroot.sh" aarch64-linux-gnu
is_missing() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) != installed ]]; }
missing=() optional=()
for package in $(printf '%s\n' "${packages[@]}" | sort -u); do ! is_missing "$package" || missing+=("$package"); done
for package in "${libraries[@]}"; do ! is_missing "$package" || optional+=("$package"); done
[[ ${#missing[@]} -gt 0 || ${#optional[@]} -gt 0 ]] || exit 0

command="apt-get install -y --no-install-recommends"
without="note: without these packages some files are not read, or nothing is served: ${optional[*]}"
if [[ $(id -u) == 0 ]]; then
    run=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    run=(sudo)
elif [[ ${#missing[@]} == 0 ]]; then
    echo "$without" >&2
    exit 0
else
    echo "error: these packages are missing: ${missing[*]}" >&2
    echo "Install them with:  sudo apt-get update && sudo $command ${missing[*]} ${optional[*]}" >&2
    echo "HINT: if what they hold is there without packages, make NODEPS=1 ..." >&2
    exit 1
fi
echo "installing: ${missing[*]} ${optional[*]}"
install() { "${run[@]}" env DEBIAN_FRONTEND=noninteractive $command -q "$@" >/dev/null; }
# Package lists may be absent (fresh containers) or stale: update them, but fail only if the install itself fails.
"${run[@]}" apt-get update -q >/dev/null || echo "note: apt-get update failed; trying with the lists that are here" >&2
[[ ${#missing[@]} == 0 ]] || install "${missing[@]}"
[[ ${#optional[@]} == 0 ]] || install "${optional[@]}" || echo "$without" >&2
