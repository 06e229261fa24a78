#!/usr/bin/env bash
# Speed of the trainer on 1, 2 and 4 CPU ranks of one thread each, and the cost of communication. Work grows with
# data-parallel ranks (weak scaling); tensor and pipeline ranks share one rank's work. Every layout runs ROUNDS times, in
# turn; medians over all steps except the first of each run.
#   tok/s        of all ranks; scaling: per rank, relative to a single rank
#   data ...     ms per step in which the first rank waits for others, by group of ranks. "pipeline" is mostly their work,
#                "world" the slowest rank. With --no-overlap "data" is the whole exchange of gradients and parameters, otherwise
#                the exposed part.
#   make bench-ranks        ROUNDS=3 STEPS=6 SEQ=256 MODEL="--num-layers 6 --hidden-size 512 --num-attention-heads 8"
. "$(dirname "$0")/../../test/lib.sh" # defines program; enters a temporary directory
set -e
allow_mpirun_everywhere
read -ra model <<<"${MODEL:---num-layers 6 --hidden-size 512 --num-attention-heads 8}"
rounds=${ROUNDS:-3} steps=${STEPS:-6} sequence=${SEQ:-256} micro_batches=4
# RANKS DATA-PARALLEL-RANKS OPTIONS
layouts=("1 1" "2 2" "2 2 --no-overlap" "2 2 --zero 0" "2 1 --tp 2" "2 1 --pp 2" "4 4" "4 4 --no-overlap" "4 2 --tp 2" "4 2 --pp 2" "4 1 --tp 2 --pp 2")

for i in $(seq 1 4000); do echo "in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son"; done >text.txt
"$program" tokenizer --input text.txt --vocab-size 8192 --output tok >/dev/null 2>&1
"$program" prepare --input text.txt --output text --tokenizer tok >/dev/null 2>&1

for ((run = 0; run < rounds * ${#layouts[@]}; run++)); do
    printf '\rrun %d of %d ' $((run + 1)) $((rounds * ${#layouts[@]})) >&2
    layout=${layouts[run % ${#layouts[@]}]}
    read -r ranks replicas options <<<"$layout"
    launch=()
    [[ $ranks == 1 ]] || launch=(mpirun -n "$ranks")
    # shellcheck disable=SC2086
    "${launch[@]}" "$program" train "${model[@]}" --tokenizer tok --data-path text --split "100, 0, 0" --seq-length "$sequence" --micro-batch-size 1 \
        --global-batch-size $((micro_batches * replicas)) --train-iters "$steps" --threads 1 --ddp-bucket-size 4000000 --quiet --out "run $run" $options \
        >log.txt 2>&1 || { cat log.txt >&2; exit 1; }
    sed -n "2,\$s/^{\"kind\":\"step\".*/$layout\t&/p" "run $run/log.jsonl" | sed 1d >>steps.txt
    rm -rf "run $run"
done
printf '\r                \r' >&2

# The median of a number in the records of a layout; 0 if there is none.
median() { { grep "^$1	" steps.txt | sed -n "s/.*\"$2\":\([0-9.e+-]*\).*/\1/p" | sort -n; } | awk '{ v[NR] = $1 } END { print NR ? v[int((NR + 1) / 2)] : 0 }'; }
one=$(median "${layouts[0]}" tokens_per_s)
printf '%-22s %9s %8s %9s | %9s %9s %9s %9s\n' ranks tok/s scaling "ms a step" data tensor pipeline world
for layout in "${layouts[@]}"; do
    read -r ranks replicas options <<<"$layout"
    speed=$(median "$layout" tokens_per_s)
    printf '%-22s %9.0f %7.0f%% %9.1f | %9.1f %9.1f %9.1f %9.1f\n' "$ranks $options" "$speed" "$(awk "BEGIN { print 100 * $speed / $one / $ranks }")" \
        "$(median "$layout" step_ms)" "$(median "$layout" data)" "$(median "$layout" tensor)" \
        "$(awk "BEGIN { print $(median "$layout" pipeline) + $(median "$layout" "pipeline, backward") }")" "$(median "$layout" world)"
done
