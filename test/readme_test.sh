#!/usr/bin/env bash
# The README says nothing that is not so: its commands run, shortened, in the order in which they stand; its options, files and make
# targets exist; every command of the program is described.
#   TRAIN_GPT=path/to/train_gpt test/readme_test.sh
root=$(realpath "$(dirname "$0")/..")
. "$root/test/lib.sh"

# ---- the shell block: each command as it stands, but with a small model and few steps behind it (a later option wins) ----
for i in $(seq 1 900); do echo "Once in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son"; [[ $((i % 5)) == 0 ]] && echo; done >corpus.txt
for i in $(seq 1 600); do echo "{\"text\": \"Once there were $i birds in $((i % 13)) trees, and they sang of the sea and of the wind\"}"; done >more.jsonl
head -40 corpus.txt >held_out.txt
ln -s "$program" train_gpt
ln -s "$root/scripts" scripts
awk '/^```sh$/ { on = 1; next } /^```$/ { on = 0 } on' "$root/README.md" | sed -e ':join' -e '/\\$/ { N; s/\\\n *//; b join' -e '}' |
    sed 's/ *#.*//' | grep -E '^(scripts/launch.sh mpirun -n [0-9]+ )?\./train_gpt ' >commands.txt
allow_mpirun_everywhere
n=0
while read -r command; do
    n=$((n + 1))
    case $command in
    *mpirun*) small="--preset llama-tiny --train-iters 4 --lr-warmup-iters 1 --seq-length 32 --global-batch-size 8 --eval-iters 1 --distributed-timeout 1m" ;;
    "./train_gpt tokenizer"*) small="--vocab-size 400" ;;
    *"--model run1/latest --data-path"*) small="--train-iters 2 --seq-length 32 --micro-batch-size 2 --eval-iters 0" ;;
    "./train_gpt train"*"--dry-run"*) small="" ;;
    *"--fp8-start 2000"*) small="--preset llama-tiny --train-iters 4 --lr-warmup-iters 1 --seq-length 32 --global-batch-size 8 --eval-iters 1 --fp8-start 2" ;;
    "./train_gpt train"*) small="--preset llama-tiny --train-iters 4 --lr-warmup-iters 1 --seq-length 32 --global-batch-size 8 --eval-iters 1 --sample-interval 4 --sample-tokens 4" ;;
    "./train_gpt eval"*) small="--seq-length 32" ;;
    *"--resume auto"*) small="--preset llama-tiny --train-iters 6 --lr-warmup-iters 1 --seq-length 32 --global-batch-size 8 --eval-iters 1 --override train-iters" ;;
    "./train_gpt generate"*) small="--max-new-tokens 8" ;;
    *) small="" ;;
    esac
    if bash -c "$command $small" </dev/null >out.txt 2>&1; then echo "ok: $command"; else echo "FAILED: $command"; tail -n 5 out.txt; fi
done <commands.txt
[[ $n -ge 8 ]] && echo "ok: $n commands were run" || echo "FAILED: only $n commands were found"

# ---- what it names exists ----
for path in $(grep -oE '\]\([^)#:]+\)' "$root/README.md" | tr -d '()]' | sort -u); do
    [[ -e $root/$path ]] && echo "ok: $path exists" || echo "FAILED: $path does not exist"
done
for command in tokenizer prepare train eval generate inspect; do "$program" $command --help; done >help.txt 2>&1
for option in $(sed 's/\(mpirun\|srun\) --[a-z-]*//g' "$root/README.md" | grep -oE -- '--[a-z][a-z0-9-]+' | sort -u); do  # the launchers' are their own
    grep -qE -- "$option( |,|$)" help.txt && echo "ok: $option exists" || echo "FAILED: $option is no option"
done
for target in $(grep -oE '`?make [a-z][a-z_-]*' "$root/README.md" | tr -d '`' | cut -d ' ' -f 2 | sort -u); do
    make -C "$root" -n "$target" >/dev/null 2>&1 && echo "ok: make $target exists" || echo "FAILED: make $target does not exist"
done
for command in $("$program" --help | sed -n 's/^  train_gpt \([a-z]*\) .*/\1/p'); do
    grep -q "^| \`$command\`" "$root/README.md" && echo "ok: $command is described" || echo "FAILED: the README does not describe $command"
done
