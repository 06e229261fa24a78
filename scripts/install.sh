#!/usr/bin/env bash
# Installs the program, its manual page and its completion for bash. Called by `make install`.
#   scripts/install.sh PROGRAM FOLDER       such as build/cpu-bf16/train_gpt /usr/local
set -euo pipefail
program=$1 folder=$2
text=$(mktemp)
trap 'rm -f "$text"' EXIT
install -D "$program" "$folder/bin/train_gpt"
"$program" help --man >"$text"
install -Dm644 "$text" "$folder/share/man/man1/train_gpt.1"
"$program" help --bash >"$text"
install -Dm644 "$text" "$folder/share/bash-completion/completions/train_gpt"
echo "installed train_gpt in $folder"
