#!/usr/bin/env bash
# Prints a Python with the named packages, in build/interop-venv or build/$VENV; pip installs missing ones there.
#   dev/interop/venv.sh torch lm-eval[hf]==0.4.13 ...
set -euo pipefail
venv=$(dirname "$0")/../../build/${VENV:-interop-venv}
[[ -x $venv/bin/pip ]] || python3 -m venv "$venv" >&2
for package in "$@"; do
    installed=$venv/${package%%[[=]*}.installed
    [[ -e $installed ]] && continue
    echo "installing $package into $(realpath "$venv")" >&2
    "$venv/bin/pip" install -q "$package" >&2
    touch "$installed"
done
echo "$venv/bin/python"
