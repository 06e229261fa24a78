#!/usr/bin/env bash
# Installs what is missing to build, test and run on Debian or Ubuntu: as root, or through sudo where that needs no password.
# Otherwise prints the exact command. Does nothing, quickly, when everything is there.
#   scripts/install_deps.sh [build|clang|lint|interop|test|chaos|quickstart]...      (default: build)
set -euo pipefail

declare -A need=(
    [build]="make g++ pkg-config libpcre2-dev nlohmann-json3-dev openmpi-bin libopenmpi-dev"
    [clang]="clang libomp-dev libclang-rt-14-dev"
    [lint]="clang clang-tidy clang-format libomp-dev shellcheck"
    [interop]="python3-venv"
    [test]="libgtest-dev"
    [chaos]="python3"
    [quickstart]="bible-kjv debian-reference-ja"
)
packages=()
for group in build "$@"; do
    [[ -n ${need[$group]:-} ]] || { echo "error: group '$group' is unknown; one of: ${!need[*]}" >&2; exit 1; }
    for package in ${need[$group]}; do packages+=("$package"); done
done

if ! command -v dpkg-query >/dev/null; then
    echo "error: this system has no dpkg; install what corresponds to: ${packages[*]}" >&2
    exit 1
fi
missing=()
for package in $(printf '%s\n' "${packages[@]}" | sort -u); do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [[ $status == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

command="apt-get install -y --no-install-recommends ${missing[*]}"
if [[ $(id -u) == 0 ]]; then
    run=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    run=(sudo)
else
    echo "error: these packages are missing: ${missing[*]}" >&2
    echo "Install them with:  sudo apt-get update && sudo $command" >&2
    exit 1
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Package lists may be absent (fresh containers) or stale: fetch them, but let the install itself decide about success.
"${run[@]}" apt-get update -q >/dev/null || echo "note: apt-get update failed; trying with the lists that are here" >&2
"${run[@]}" env DEBIAN_FRONTEND=noninteractive $command -q >/dev/null
