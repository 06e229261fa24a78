#!/usr/bin/env bash
# Installs the program, its manual page and its completion for bash, zsh and fish. Called by `make install`.
#   scripts/install.sh PROGRAM FOLDER       such as build/cpu-bf16/train_gpt /usr/local
set -euo pipefail
program=$1 folder=$2
text=$(mktemp)
trap 'rm -f "$text"' EXIT
install -D "$program" "$folder/bin/train_gpt"
while read -r kind file; do
    "$program" help --"$kind" >"$text"
    install -Dm644 "$text" "$folder/share/$file"
done <<'END'
man man/man1/train_gpt.1
bash bash-completion/completions/train_gpt
zsh zsh/site-functions/_train_gpt
fish fish/vendor_completions.d/train_gpt.fish
END
echo "installed train_gpt in $folder"
