# shellcheck shell=bash
# Shared by the runs of this directory: a run (run_NAME.sh) sources it, then calls `run`. Its options are in
# recipes/NAME.toml. Settings, from the environment:
#   DATA       prepared data: "PATH", or "WEIGHT PATH WEIGHT PATH ..." to blend; quote a path with blanks inside:
#              DATA="0.7 'my data/web' 0.3 data/code". Required, except with --dry-run
#   TOKENIZER  tokenizer.json or its directory: the one used to prepare the data
#   OUT        directory for checkpoints, log and report; default out/NAME
#   RANKS      GPUs; default: the run's layout
#   LAUNCH     launcher of the ranks: default "mpirun -n $RANKS"; "srun --mpi=pmix"; "" is one rank
#   TRAIN_GPT  the program; default ./train_gpt of this source tree
#   EXTRA      more options of `train_gpt train`; they override the script's arguments, which override the recipe. A config
#              file among them (--config tune/tune-1.toml) overrides the recipe, too. --no-NAME removes an option:
#              EXTRA="--no-rampup-batch-size"
# With --dry-run among the options, one process plans for RANKS ranks without training: it needs no data and no GPU.
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a run after its micro-batch, with a checkpoint. The same command resumes an
# interrupted run.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=words.sh
. "$(dirname "${BASH_SOURCE[0]}")/words.sh"

give_up() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# check_data WORD...: each path of DATA must be the prefix of a file name.
check_data() {
    local word
    for word; do
        [[ $word =~ ^[0-9.]+(e[+-]?[0-9]+)?$ ]] && continue  # a weight
        word=${word/#\~\//$HOME/}
        compgen -G "$(printf '%q' "$word")*" >/dev/null ||
            give_up "DATA names '$word', but no file has a name that begins so; HINT: train_gpt prepare --output-prefix $word"
    done
}

# in_config NAME WORD...: succeeds if a config file among the words sets this option.
in_config() {
    local name=$1 before="" word
    shift
    for word; do
        [[ $word != --config=* ]] || { before=--config && word=${word#--config=}; }
        if [[ $before == --config ]]; then grep -qsE "^[[:space:]]*${name}[[:space:]]*=" "${word/#\~\//$HOME/}" && return; fi
        before=$word
    done
    return 1
}

# run OPTIONS...: runs the recipe with the script's arguments.
run() {
    local name program command=() launch=() extra=() data=() words=() given=()
    name=$(basename "$0" .sh)
    name=${name#run_}
    program=${TRAIN_GPT:-$(dirname "${BASH_SOURCE[0]}")/../train_gpt}
    [[ -x $program ]] || give_up "there is no program at $program; HINT: make train_gpt, or set TRAIN_GPT"
    split_words "${EXTRA:-}"
    extra=("${words[@]}")
    given=("$@" "${extra[@]}")
    # Defaults, which a config file of the user's may replace.
    [[ -z ${OUT:-} ]] && in_config out "${given[@]}" || command=(--out "${OUT:-out/$name}")
    in_config resume "${given[@]}" || command+=(--resume auto)
    command=("$program" train --config "$(dirname "${BASH_SOURCE[0]}")/recipes/$name.toml" "${command[@]}"
        ${TOKENIZER:+--tokenizer "$TOKENIZER"} "${given[@]}")
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
