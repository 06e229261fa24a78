# shellcheck shell=bash
# Shared by the runs of this directory: a run (run_*.sh) sources it, then calls `run` with its own options. Settings, from
# the environment:
#   DATA       prepared data: "PATH", or "WEIGHT PATH WEIGHT PATH ..." to blend; quote a path with blanks inside:
#              DATA="0.7 'my data/web' 0.3 data/code". Required, except with --dry-run
#   TOKENIZER  tokenizer.json or its directory: the one used to prepare the data
#   OUT        directory for checkpoints, log and report; default out/NAME
#   RANKS      GPUs; default: the run's layout
#   LAUNCH     launcher of the ranks: default "mpirun -n $RANKS"; "srun --mpi=pmix"; "" is one rank
#   TRAIN_GPT  the program; default ./train_gpt of this source tree
#   EXTRA      more options of `train_gpt train`; they override the script's arguments, which override its own options.
#              --no-NAME removes an option: EXTRA="--no-rampup-batch-size"
# With --dry-run among the options, one process plans for RANKS ranks without training: it needs no data and no GPU.
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its micro-batch, with a checkpoint. The same command resumes an
# interrupted run.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=words.sh
. "$(dirname "${BASH_SOURCE[0]}")/words.sh"

# For all of these models: AdamW, weight decay and clipping of GPT-3, and a cosine schedule.
recipe=(--adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine)
# Options of model families, used by the runs.
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

# check_data WORD...: each path of DATA must be the prefix of a file name.
check_data() {
    local word
    for word; do
        [[ $word =~ ^[0-9.]+(e[+-]?[0-9]+)?$ ]] && continue  # a weight
        compgen -G "$(printf '%q' "$word")*" >/dev/null ||
            give_up "DATA names '$word', but no file has a name that begins so; HINT: train_gpt prepare --output-prefix $word"
    done
}

# run OPTIONS...: runs with these options, then the script's arguments.
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
