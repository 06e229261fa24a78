# shellcheck shell=bash
# What the runs of this directory share; a run (run_*.sh) sources it, then calls `run` with what is its own. Settings, from the
# environment:
#   DATA       prepared data: "PATH", or "WEIGHT PATH WEIGHT PATH ..." to blend; a path with blanks stands in quotes of its own:
#              DATA="0.7 'my data/web' 0.3 data/code". Needed but for --dry-run
#   TOKENIZER  tokenizer.json or its directory, with which the data was prepared
#   OUT        directory of checkpoints, log and report; out/NAME
#   RANKS      GPUs; by default as many as the run's layout is made for
#   LAUNCH     how ranks are started: "mpirun -n $RANKS"; "srun --mpi=pmix"; "" is one rank
#   TRAIN_GPT  the program; ./train_gpt of this source tree
#   EXTRA      more options of `train_gpt train`; they win over the script's arguments, which win over what is written in it.
#              --no-NAME takes an option back: EXTRA="--no-rampup-batch-size"
# With --dry-run among the options one process plans for RANKS ranks, and nothing is trained: no data, no GPU.
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its micro-batch, with a checkpoint. An interrupted run goes on when the same
# command is given again.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=words.sh
. "$(dirname "${BASH_SOURCE[0]}")/words.sh"

# All of these models: AdamW, decay and clipping of GPT-3, and a cosine.
recipe=(--adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine)
# Families of them; for the runs.
# shellcheck disable=SC2034
gpt2=(--seq-length 1024 --lr-warmup-iters 700)
# shellcheck disable=SC2034
bloom=(--seq-length 2048 --lr-warmup-samples 183105 --lr-decay-samples 200000000 --train-samples 220000000 --seed 42
    --device a100)
# shellcheck disable=SC2034
llm_jp=(--seq-length 4096 --lr-warmup-iters 2000 --use-z-loss --recompute-granularity selective --seed 1234
    --split "1000, 0, 0" --eval-iters 0)

give_up() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# check_data WORD...: each path of DATA begins the name of a file.
check_data() {
    local word
    for word; do
        [[ $word =~ ^[0-9.]+(e[+-]?[0-9]+)?$ ]] && continue  # a weight
        compgen -G "$(printf '%q' "$word")*" >/dev/null ||
            give_up "DATA names '$word', but no file has a name that begins so; HINT: train_gpt prepare --output-prefix $word"
    done
}

# run OPTIONS...: the run's own options, then its script's arguments.
run() {
    local name program command=() launch=() extra=() data=() words=()
    name=$(basename "$0" .sh)
    name=${name#run_}
    program=${TRAIN_GPT:-$(dirname "${BASH_SOURCE[0]}")/../train_gpt}
    [[ -x $program ]] || give_up "there is no program at $program; HINT: make train_gpt, or set TRAIN_GPT"
    split_words "${EXTRA:-}"
    extra=("${words[@]}")
    command=("$program" train --out "${OUT:-out/$name}" --resume auto ${TOKENIZER:+--tokenizer "$TOKENIZER"}
        "${recipe[@]}" "$@" "${extra[@]}")
    if [[ " ${command[*]} " == *" --dry-run "* ]]; then
        exec "${command[@]:0:2}" --world "$RANKS" "${command[@]:2}"
    fi
    [[ -n ${DATA:-} ]] ||
        give_up "DATA is not set; HINT: DATA=\"PATH\" or DATA=\"WEIGHT PATH WEIGHT PATH ...\"; or --dry-run, to plan"
    split_words "$DATA"
    data=("${words[@]}")
    check_data "${data[@]}"
    [[ $RANKS == 1 ]] || launch=(mpirun -n "$RANKS")
    [[ -z ${LAUNCH+set} ]] || read -ra launch <<<"$LAUNCH"
    [[ ${#launch[@]} == 0 ]] || command -v "${launch[0]}" >/dev/null ||
        give_up "RANKS is $RANKS and there is no ${launch[0]} to start them; HINT: install it, or set LAUNCH (\"\": one rank)"
    command=("${launch[@]}" "${command[@]}" --data-path "${data[@]}")
    printf '%q ' "${command[@]}"
    echo
    exec "$(dirname "${BASH_SOURCE[0]}")/launch.sh" "${command[@]}"
}
