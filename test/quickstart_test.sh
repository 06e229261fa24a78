#!/usr/bin/env bash
# The quick start, shortened: every part produces its files, the model learns more than word frequencies, a second run
# repeats nothing, the user's own texts work, and other settings do not mix with existing files.
#   TRAIN_GPT=path/to/train_gpt test/quickstart_test.sh
script=$(realpath "$(dirname "$0")/../scripts/quickstart.sh")
. "$(dirname "$0")/lib.sh"
export TRAIN_GPT=$program
# A sanitizer build is some ten times slower: there we only look for invalid accesses.
steps=30 small=()
[[ -z ${SAN:-} ]] || { steps=10; small=(PRESET=llama-tiny); }

env STEPS=$steps "${small[@]}" bash "$script" >first.txt 2>&1
expect "the quick start ends well" test $? == 0
for part in Text Tokenizer Data Training Evaluation Writing Done; do expect "it shows the part $part" grep -q "== $part" first.txt; done
for file in tokenizer/tokenizer.json data/0-bible.bin data/1-debian-reference-ja.idx model/report.html model/log.jsonl model/latest/model.safetensors \
    model/latest/config.json model/latest/tokenizer.json model/loss.svg; do
    expect "it makes $file" test -s "quickstart/$file"
done
expect "the report has curves" grep -q "<svg" quickstart/model/report.html
expect "the report is named after the folder" grep -q '"name":"quickstart"' quickstart/model/log.jsonl
expect "nothing temporary is left" test -z "$(find quickstart -name '*.tmp*')"
first=$(grep -o '"kind":"step","step":1,.*' quickstart/model/log.jsonl | sed 's/.*"loss":\([0-9.]*\).*/\1/')
valid=$(grep '"kind":"valid"' quickstart/model/log.jsonl | tail -1 | sed 's/.*"loss":\([0-9.]*\).*/\1/')
unigram=$(sed -n 's/^a unigram model .* validation loss \([0-9.]*\)$/\1/p' first.txt)
expect "the first loss $first is that of a uniform guess, log 4096 = 8.32" awk "BEGIN { exit !($first > 8.2 && $first < 8.6) }"
if [[ -z ${SAN:-} ]]; then
    expect "validation loss $valid is well below the unigram model's $unigram" awk "BEGIN { exit !($valid < $unigram - 0.8) }"
else
    expect "validation loss $valid is below $first" awk "BEGIN { exit !($valid < $first) }"
fi

expect "its last lines fit into 80 columns" bash -c "sed -n '/^== Done/,\$p' first.txt | sed 's|$TRAIN_GPT|./train_gpt|' | awk 'length > 80 { exit 1 }'"

before=$(stat -L -c '%Y %s' quickstart/model/latest/model.safetensors quickstart/data/0-bible.bin quickstart/tokenizer/tokenizer.json)
env STEPS=$steps "${small[@]}" bash "$script" >second.txt 2>&1
expect "a second run ends well" test $? == 0
expect "a second run makes no text, tokenizer or data" test "$(grep -c 'is there already' second.txt)" == 5
expect "a second run trains nothing" grep -q "the run is finished: $steps of $steps steps" second.txt
expect "a second run changes nothing" test "$before" == "$(stat -L -c '%Y %s' quickstart/model/latest/model.safetensors quickstart/data/0-bible.bin quickstart/tokenizer/tokenizer.json)"
expect "other settings are refused" bash -c "! STEPS=1 bash '$script' && STEPS=1 bash '$script' 2>&1 | grep -q 'made with other settings'"

mkdir texts
for i in $(seq 1 3000); do echo "$i. The $((i * 7 % 100)) birds of Mr. O'Hara sang in tree $((i % 13))."; [[ $((i % 6)) == 0 ]] && echo; done >texts/birds.txt
for i in $(seq 1 1500); do echo "第$((i * 3 % 50))章の鳥は$((i % 13))本の木で歌いました。"; [[ $((i % 6)) == 0 ]] && echo; done >texts/鳥.txt
cp texts/birds.txt "texts/more birds.txt"
TEXT="texts/birds.txt texts/鳥.txt 'texts/more birds.txt'" OUT="my own" STEPS=6 VOCAB=500 PRESET=llama-tiny bash "$script" >own.txt 2>&1
expect "own texts" test $? == 0
expect "own texts: all are used" grep -q "my own/data/1-鳥" own.txt
expect "own texts: one with a blank in its name" test -s "my own/data/2-more birds.bin"
expect "own texts: a model in a directory with a blank in its name" test -s "my own/model/latest/model.safetensors"
expect "a text that is not there" refused env TEXT="texts/birds.txt 'not there.txt'" OUT=none bash "$script"
says "a text that is not there is named" "^error: TEXT names 'not there.txt', which is not there$"
expect "and nothing is made before" test ! -e none

# ---- with a search first ----
if [[ -z ${SAN:-} ]]; then
    TUNE=1 TEXT="texts/birds.txt 'texts/more birds.txt'" OUT=tuned STEPS=40 VOCAB=300 PRESET=llama-tiny bash "$script" >tuned.txt 2>&1
    expect "with TUNE=1 it ends well" test $? == 0
    expect "it trains with what was found" bash -c "rate=\$(sed -n 's/^lr = //p' tuned/sweep/best.toml) && [[ -n \$rate ]] && grep -q \"\\\"lr\\\":\$rate,\" tuned/model/log.jsonl"
    tokens=$(tail -n 1 tuned/model/log.jsonl | grep -o '"tokens":[0-9]*')
    expect "for as many tokens" test "$tokens" == "\"tokens\":$((40 * 16 * 256))"
fi

OUT=stopped STEPS=1000000 VOCAB=300 PRESET=llama-tiny TEXT="texts/birds.txt 'texts/more birds.txt'" bash "$script" >stopped.txt 2>&1 &
quickstart=$!
comes grep '"kind":"step","step":3,' stopped/model/log.jsonl
kill -TERM $quickstart
wait $quickstart
expect "told to stop, it does not go on with the rest" test $? == 130
expect "with a checkpoint" test -s stopped/model/latest/model.safetensors
expect "and says how to go on" grep -qFx stopped.txt -e "stopped in the middle of training; to resume: make quickstart OUT=stopped \
STEPS=1000000 TEXT=texts/birds.txt\\ \\'texts/more\\ birds.txt\\' PRESET=llama-tiny VOCAB=300"
