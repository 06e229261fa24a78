#!/usr/bin/env bash
# The pages (*.md) are true. In a new folder every command of every page runs, in order; each page except the first
# continues from the files of README.md. Options, links, anchors and make targets exist.
#   TRAIN_GPT=path/to/train_gpt test/readme_test.sh
# A block marked ```sh is run, and so is `./train_gpt ...` in a sentence; long runs are shortened (see `shorten`). Blocks
# marked ```sh gpu or ```sh cluster need hardware that tests lack: their recipes and `train` commands are planned
# (--dry-run), others only parsed. For `make`, target and variables must exist.
root=$(realpath "$(dirname "$0")/..")
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$root/test/lib.sh"
allow_mpirun_everywhere
export TRAIN_GPT=$program
unset DATA TOKENIZER OUT RANKS LAUNCH EXTRA
mapfile -t others < <(cd "$root" && find . -name build -prune -o -name '*.md' -print | cut -c 3- | grep -v '^README.md$' | sort)
# Known to make: targets, and a `NAME=` for each variable.
{
    sed -n 's/^\([a-z][a-z_. -]*\):.*/\1/p' "$root/Makefile" | tr ' ' '\n'
    grep -oE '\b[A-Z][A-Z_]+\b' "$root/Makefile" | sed 's/$/=/'
} >make.txt

# Files that the pages assume: the program, the user's texts, published questions with answers.
make_files() {
    local i split
    for i in $(seq 900); do
        echo "Once in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son"
        [[ $((i % 5)) == 0 ]] && echo
    done >corpus.txt
    for i in $(seq 600); do
        echo "{\"text\": \"Once there were $i birds in $((i % 13)) trees, and they sang of the sea and of the wind\"}"
    done >more.jsonl
    mkdir web books
    cp more.jsonl web
    cp corpus.txt books
    head -n 40 corpus.txt >held_out.txt
    head -n 400 corpus.txt >mine.txt
    for split in val train; do
        for i in 1 2 3 4; do
            echo "{\"activity_label\": \"Ships\", \"ctx_a\": \"Once there were $i birds.\", \"ctx_b\": \"they\"," \
                '"endings": ["sang.", "swam.", "sank.", "sat."], "label": 0}'
        done >hellaswag_$split.jsonl
    done
    mkdir -p eval_bundle/eval_data
    printf '%s\n' icl_tasks: '- label: birds' '  dataset_uri: birds.jsonl' '  num_fewshot: [2]' '  icl_task_type: multiple_choice' >eval_bundle/core.yaml
    printf '%s\n' 'Eval Task,Random baseline' birds,50 >eval_bundle/eval_meta_data.csv
    for i in 1 2 3 4; do echo "{\"query\": \"Once $i birds\", \"choices\": [\"sang\", \"sank\"], \"gold\": 0}"; done >eval_bundle/eval_data/birds.jsonl
    awk '/^```toml$/ { on = 1; next } /^```/ { on = 0 } on' "$root/llmc/OPTIONS.md" |
        sed 's/^train-iters = .*/train-iters = 8/' >run.toml
    ln -s "$program" train_gpt
    ln -s "$root/scripts" "$root/dev" .
    TEXT=corpus.txt STEPS=4 PRESET=llama-tiny VOCAB=400 OUT=quickstart scripts/quickstart.sh >quickstart.txt 2>&1 || cat quickstart.txt
    cp corpus.txt quickstart/bible.txt
}

# as_download COMMAND: copies the same files of run1/latest. hf ignores --include if files are named, so all must be named.
as_download() {
    local folder
    if [[ $1 =~ ^hf\ download\ [A-Za-z0-9][^\ /]*/[^\ /]+((\ [a-z_]+\.(json|safetensors))+)\ --local-dir\ ([a-z0-9/]+)$ ]]; then
        # A checkpoint may lack generation_config.json and tokenizer_config.json, but not the others.
        folder=${BASH_REMATCH[4]}
        echo "mkdir $folder && for f in${BASH_REMATCH[1]}; do cp run1/latest/\$f $folder || [[ \$f == *_config.json ]] || exit; done"
    else
        echo "echo 'not as hf wants it: hf download OWNER/MODEL FILE... --local-dir FOLDER'; false"
    fi
}

# shorten COMMAND: the same command with smaller values, so that it takes a moment. The table: an option, and its new value.
shorten() {
    local command=$1 option value
    case $command in
    *--dry-run*) [[ $command == *--world* || $command == *scripts/* ]] || command+=" --world 1" ;; # without measuring its steps
    "hf download"*) command=$(as_download "$command") ;;
    *)
        while read -r option value; do
            command=$(sed -E "s#(--$option) \"?[0-9][0-9.kM]*\"?#\1 $value#g" <<<"$command")
        done <<'END'
train-iters 8
lr-warmup-iters 1
global-batch-size 8
micro-batch-size 2
eval-interval 4
sample-interval 4
save-every 4
keep-every 4
fp8-start 4
vocab-size 400
max-new-tokens 8
log-health-interval 2
detect-nondeterminism 2
check-replicas 2
distributed-timeout 1m
END
        command=$(sed -E 's/(BUDGET=|--time-budget )[0-9]+m/\11s/g' <<<"$command")
        command=$(sed -E '/mixture-tiny/! s/--preset [a-z0-9.-]+/--preset llama-tiny/; s/--override train-iters/--train-iters 12 &/' \
            <<<"$command")
        case $command in
        *run_*.sh*)
            command+=" --preset llama-tiny --seq-length 64 --train-iters 4 --lr-warmup-iters 1 --global-batch-size 8" ;;
        *" --prompt-tokens "*) command+=" --seq-length 44 --eval-iters 1" ;; # 64 with virtual tokens
        *" train "*) command+=" --seq-length 64 --eval-iters 1" ;;
        *" sweep "*) command+=" --seq-length 64 --eval-iters 1 --train-iters 20 --configs 2 --seeds 1" ;;
        *" eval "*) command+=" --seq-length 44" ;;
        *" serve "*) command="timeout --preserve-status -s INT 3 $command --port 0" ;; # must exit with 0
        esac
        ;;
    esac
    printf '%s' "$command"
}

# commands PAGE: prints a line `MARK<tab>COMMAND` for each command in blocks and each `./train_gpt ...` in sentences. The
# mark is the word after ```sh, or "run".
commands() {
    awk '
        /^```/ { if (fenced) fenced = mark = ""; else { fenced = 1; mark = !/^```sh/ ? "" : $2 == "" ? "run" : $2 }; next }
        mark != "" { line = line $0; if (sub(/\\$/, "", line)) next
                     sub(/^ +/, "", line); gsub(/  +/, " ", line); sub(/ # .*/, "", line)
                     if (line != "" && line !~ /^#/) print mark "\t" line
                     line = "" }
        !fenced { text = $0
                  while (match(text, /`\.\/train_gpt [a-z]+ [^`]*`/)) {
                      inline = substr(text, RSTART + 1, RLENGTH - 2); text = substr(text, RSTART + RLENGTH)
                      if (inline !~ /\.\.\./) print "run\t" inline } }' "$1"
}

# try PAGE MARK COMMAND
try() {
    local page=$1 mark=$2 command=$3
    case $mark:$command in
    *:make\ *)
        command=$(eval "printf '%s\n' ${command%% &&*}" | sed -e 1d -e 's/=.*/=/' -e '/^build\//d' |
            grep -vxF -f "$work/make.txt")
        command=${command:+echo make does not know "$command"; false}
        ;;
    *:*test/run.sh* | *:curl\ http://127.0.0.1*) command="" ;;
    run:*) command=$(shorten "$command") ;;
    *:*scripts/run_*) command="bash $(grep -oE 'scripts/run_.*' <<<"$command") --dry-run" ;;
    *:*" train "*) command="./train_gpt train ${command#* train } --dry-run --world 1" ;;
    *) command="" ;;
    esac
    if ! bash -n -c "$3" 2>out.txt; then
        echo "FAILED: $page: a shell cannot read: $3"
    elif [[ -z $command ]] || bash -c "$command" </dev/null >out.txt 2>&1; then
        echo "ok: $page: $3"
    else
        echo "FAILED: $page: $3"
        echo "  run as: $command"
        tail -n 5 out.txt
    fi
}

# run_page PAGE [LEAST]: runs all its commands, of which there must be at least LEAST.
run_page() {
    local mark command n=0
    while IFS=$'\t' read -r mark command; do
        try "$1" "$mark" "$command"
        n=$((n + 1))
    done < <(commands "$root/$1")
    [[ $n -ge ${2:-0} ]] || echo "FAILED: $1: only $n commands were found"
}

mkdir first
cd first || exit 1
make_files
run_page README.md 12
for page in "${others[@]}"; do
    commands "$root/$page" | grep -q . || continue
    cp -a "$work/first" "$work/page"
    cd "$work/page" || exit 1
    run_page "$page"
    cd "$work" && rm -rf page
done

# ---- names in the pages exist ----
cd "$work" || exit 1
for command in curate tokenizer prepare train init supervise check-node runs tune sweep eval generate serve inspect report export import; do "$program" $command --help-all; done >help.txt 2>&1
# Options of launchers, containers, downloads, the programs in dev/, and aliases of our options (llmc/options/other_names.h).
foreign=" --bind-to --oversubscribe --allow-run-as-root --hostfile --keep-caps --map-by --logdir --mca --mpi --kill-on-bad-exit --nodes
 --nodelist --ntasks --time --account --partition --cpus-per-task --signal --nv --bind --container-image --rm --local-dir --self-test
 --generate --profile --kernel --sizes --learning-rate --batch-size --gradient-accumulation-steps --man --bash --zsh --fish
 --check-transformers --version --units --core --gigabyte --rounds --rates --widths
 --gemms --args --bf16 --fp16 --transformer-impl --use-flash-attn --recompute-activations --save --tokenizer-model --only "
# lost_links PAGE: its broken links. A heading's anchor is in lower case, with dashes for blanks, without punctuation.
lost_links() {
    local path anchor target
    sed '/^```/,/^```$/d' "$root/$1" | grep -oE '\]\([^): ]+' | cut -c 3- | grep -vx https | sort -u | while IFS='#' read -r path anchor; do
        target=$root/$1
        [[ -z $path ]] || target=$root/$(dirname "$1")/$path
        if [[ ! -e $target ]]; then
            echo "$path"
        elif [[ -n $anchor ]]; then
            sed -n 's/^#\{1,6\} //p' "$target" | tr '[:upper:] ' '[:lower:]-' | tr -cd 'a-z0-9_\n-' |
                grep -qx -- "$anchor" || echo "$path#$anchor"
        fi
    done
}
lost_targets() {
    grep -oE '(`|^ *)make [a-z][a-z_-]*(\.json)?' "$root/$1" | awk '{ print $NF }' | sort -u | grep -vxF -f make.txt
}
lost_options() {
    [[ $1 == dev/LOG.md || $1 == dev/CHANGELOG.md ]] && return  # these describe past versions
    grep -oE -- '(^|[ `(])--[a-z][a-z0-9-]+' "$root/$1" | tr -d ' `(' | sort -u | grep -vx -- --no- | while read -r option; do
        [[ $foreign == *[[:space:]]"$option"[[:space:]]* ]] ||
            grep -qE -- "--(${option#--}|${option#--no-})([ ,=]|$)" help.txt || echo "$option"
    done
}
for page in README.md "${others[@]}"; do
    for what in links targets options; do
        lost=$(lost_$what "$page")
        [[ -z $lost ]] && echo "ok: $page: all $what exist" || echo "FAILED: $page: these $what do not exist:" "$lost"
    done
done
for command in $("$program" --help | sed -n 's/^  \([a-z][a-z]*\)  .*/\1/p' | grep -v help); do
    expect "README.md describes $command" grep -q "^| \`$command\`" "$root/README.md"
done
words=$(wc -w <"$root/README.md")
expect "README.md has at most 1,200 words; it has $words" test "$words" -le 1200
