#!/usr/bin/env bash
# From raw text to a trained model that generates text, on this machine, in a few minutes. Called by `make quickstart`.
#   TEXT="a.txt b.txt"   your own text files instead of the King James Bible blended with Japanese; quote a name with blanks
#                        inside: TEXT="a.txt 'my b.txt'"
#   OUT=quickstart       output folder
#   STEPS=600            training steps
#   TUNE=1               first searches learning rate, momentum and weight decay (train_gpt sweep), then trains with the best
#                        values, for the same number of tokens; TUNE_BUDGET=5m: time of the search
# Finished parts (texts, tokenizer, data, model) are kept and reused; remove OUT to start over.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
. "$(dirname "${BASH_SOURCE[0]}")/words.sh"

OUT=${OUT:-quickstart}
STEPS=${STEPS:-600}
PRESET=${PRESET:-quickstart}
TRAIN_GPT=${TRAIN_GPT:-./train_gpt}
VOCAB=${VOCAB:-4096}
TUNE=${TUNE:-}
TUNE_BUDGET=${TUNE_BUDGET:-5m}

step() { printf '\n\033[1m== %s\033[0m\n' "$*" | if [[ -t 1 ]]; then cat; else sed 's/\x1b\[[0-9;]*m//g'; fi; }
# make_once FILE COMMAND...: runs the command unless FILE exists.
make_once() {
    local file=$1
    shift
    if [[ -e $file ]]; then echo "$file is there already"; else "$@"; fi
}

# Check the files before anything is created, so that correcting a name does not count as a changed setting.
split_words "${TEXT:-}"
texts=("${words[@]}")
for file in "${texts[@]}"; do
    [[ -e $file ]] || { echo "error: TEXT names '$file', which is not there" >&2; exit 1; }
done

mkdir -p "$OUT"
# Everything below depends on the texts and sizes; if they change, start over instead of mixing.
recipe="TEXT=${TEXT:-} VOCAB=$VOCAB PRESET=$PRESET STEPS=$STEPS${TUNE:+ TUNE=$TUNE TUNE_BUDGET=$TUNE_BUDGET}"
if [[ -e $OUT/recipe && $(cat "$OUT/recipe") != "$recipe" ]]; then
    echo "error: $OUT was made with other settings:" >&2
    echo "  there: $(cat "$OUT/recipe")" >&2
    echo "  now:   $recipe" >&2
    echo "HINT: remove $OUT or give another OUT=..." >&2
    exit 1
fi
echo "$recipe" >"$OUT/recipe"

step "Text"
# One document per chapter of the Bible; removes the reference before each verse.
bible_chapters() {
    bible -f gen1:1-rev22:21 |
        awk '{ chapter = $1; sub(/:.*/, "", chapter); if (NR > 1 && chapter != last) print ""; last = chapter; sub(/^[^ ]* /, ""); print }'
}
japanese() { zcat /usr/share/debian-reference/debian-reference.ja.txt.gz; }
write_text() { "$2" >"$1.tmp" && mv "$1.tmp" "$1"; }
if [[ -n ${TEXT:-} ]]; then
    weights=()
    prompt=${PROMPT:-}
else
    make_once "$OUT/bible.txt" write_text "$OUT/bible.txt" bible_chapters
    make_once "$OUT/debian-reference-ja.txt" write_text "$OUT/debian-reference-ja.txt" japanese
    texts=("$OUT/bible.txt" "$OUT/debian-reference-ja.txt")
    weights=(0.8 0.2)
    prompt=${PROMPT:-And God said}
fi
stat -Lc '%s %n' "${texts[@]}" | awk '{ size = $1; sub(/^[0-9]+ /, ""); printf "%8.2f MB  %s\n", size / 1e6, $0 }'

step "Tokenizer"
make_once "$OUT/tokenizer/tokenizer.json" "$TRAIN_GPT" tokenizer --input "${texts[@]}" --vocab-size "$VOCAB" --output "$OUT/tokenizer"

step "Data"
data=()
for i in "${!texts[@]}"; do
    name=$(basename -- "${texts[$i]}")
    prefix="$OUT/data/$i-${name%.*}"
    mkdir -p "$OUT/data"
    make_once "$prefix.idx" "$TRAIN_GPT" prepare --input "${texts[$i]}" --output "$prefix" --tokenizer "$OUT/tokenizer" --split-documents blank
    data+=(${weights[$i]:+"${weights[$i]}"} "$prefix")
done

training=(--preset "$PRESET" --tokenizer "$OUT/tokenizer" --data-path "${data[@]}" --split "95, 5, 0"
    --seq-length 256 --micro-batch-size 8 --global-batch-size 16 --train-iters "$STEPS"
    --optimizer muon --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters $((STEPS / 20)) --weight-decay 0.1 --z-loss 1e-4 --eval-iters 8)
if [[ -n $TUNE ]]; then
    step "Search"
    make_once "$OUT/sweep/best.toml" launch "$TRAIN_GPT" sweep "${training[@]}" --over lr=2e-3..1.2e-2 \
        --over muon-momentum=0.7,0.8,0.9,0.95 --over weight-decay=0.05,0.1,0.2 --configs 9 --seeds 1 --budget "$TUNE_BUDGET" --out "$OUT/sweep"
    training=(--config "$OUT/sweep/best.toml")
fi

step "Training"
# --resume auto resumes an interrupted run and does nothing for a finished one.
launch "$TRAIN_GPT" train --resume auto "${training[@]}" \
    --eval-interval $((STEPS / 8 + 1)) --sample-interval $((STEPS / 4 + 1)) ${prompt:+--sample-prompt "$prompt"} \
    --name "$(basename "$OUT")" --out "$OUT/model"
if tail -n 1 "$OUT/model/log.jsonl" | grep -q '"kind":"end".*"status":"stopped"'; then
    goes_on="make quickstart OUT=$(printf '%q' "$OUT")"
    settings=(STEPS=600 TEXT= PRESET=quickstart VOCAB=4096 PROMPT= TUNE= TUNE_BUDGET=5m) # the defaults
    for setting in "${settings[@]}"; do
        name=${setting%%=*} value=${!name:-}
        [[ $name=$value == "$setting" ]] || goes_on+=" $name=$(printf '%q' "$value")"
    done
    echo "stopped in the middle of training; to resume: $goes_on"
    exit 130
fi

step "Evaluation"
"$TRAIN_GPT" eval --model "$OUT/model/latest" --data-path "${data[@]}" --split "95, 5, 0" --seq-length 256

step "Writing"
"$TRAIN_GPT" generate --model "$OUT/model/latest" ${prompt:+--prompt "$prompt"} --max-new-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1

step "Done"
cat <<END
  model      $OUT/model/latest (a Hugging Face directory)
  report     $OUT/model/report.html (open it in a browser)
  log        $OUT/model/log.jsonl
  tokenizer  $OUT/tokenizer/tokenizer.json
  more text  $TRAIN_GPT generate --model $(printf '%q' "$OUT/model") --prompt "..."
END
