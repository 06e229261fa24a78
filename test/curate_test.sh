#!/usr/bin/env bash
# train_gpt curate: what comes out is the same for any number of threads and interruptions, and nothing that is there is lost.
. "$(dirname "$0")/lib.sh"

# Documents of all kinds in two files: sound ones, short ones, repetitive ones, with mojibake.
mkdir -p raw/more
awk 'BEGIN {
    for (i = 0; i < 400; i++) {
        printf "{\"text\": \""
        for (w = 0; w < 80; w++) printf "the%s%d of-%d ", i % 7 == 3 ? "" : "word", i % 7 == 3 ? 0 : i * 80 + w, (i * 31 + w * w) % 97
        printf "%s\", \"id\": %d}\n", i % 5 ? "and that is cafÃ©." : "end.", i
    }
    print "{\"text\": \"too short\", \"id\": 400}"
}' >raw/a.jsonl
for i in 1 2 3; do printf 'A file of text with \r\n mixed line ends, the %s of them.\n\n\n\n' "$i"; done >raw/more/b.txt
stages=(--normalize --heuristics gopher fineweb --output-format jsonl)

expect "curate" "$program" curate --input raw --output one "${stages[@]}" --threads 1 --shard-size 50k
says "its summary" "gopher-min-words  *dropped"
says "names the mended places" "encoding-repair  *changed"
expect "on three threads" "$program" curate --input raw --output three "${stages[@]}" --threads 3 --shard-size 50k
same() { diff -r -x curate.json -x report.html "$1" "$2"; }
expect "gives the same files" same one three
expect "several of them" test -s one/data/part-00003.jsonl
expect "with the other keys" grep -q '"id": *[1-9]' one/data/part-00000.jsonl
expect "which prepare reads" "$program" tokenizer --input one/data --vocab-size 300 --output tok
expect "a finished output is refused" refused "$program" curate --input raw --output one "${stages[@]}"
says "and says so" "is finished.*HINT"
expect "so is a folder of other files" refused "$program" curate --input raw --output raw "${stages[@]}"
says "by name" "raw is not empty"

# Interruptions: at its start, by a file that cannot be used; then after whole shards, by a folder where the next one shall be.
# The same command goes on; what it writes is what an undisturbed one writes.
mkdir raw2 && cp raw/a.jsonl raw2
awk 'BEGIN { for (i = 0; i < 200; i++) print "{\"text\": \"end\"}" }' >raw2/b.jsonl
expect "undisturbed" "$program" curate --input raw2 --output whole "${stages[@]}" --shard-size 50k
cp raw2/b.jsonl mended
tr '}' ' ' <mended >raw2/b.jsonl
continued() { "$program" curate --input raw2 --output cut "${stages[@]}" --shard-size 50k "$@"; }
expect "an interruption" refused continued
mkdir cut/data/part-00003.jsonl
touch cut/data/part-00009.jsonl.tmp.1
cp mended raw2/b.jsonl
expect "another" refused continued
expect "after whole shards" test -s cut/data/part-00002.jsonl
rmdir cut/data/part-00003.jsonl
expect "which the record says" grep -q '"shards": 3' cut/curate.json
expect "other options are refused" refused "$program" curate --input raw2 --output cut --normalize --output-format jsonl --shard-size 50k
says "by name" "began with --heuristics"
expect "as is another input" refused "$program" curate --input raw --output cut "${stages[@]}" --shard-size 50k
says "with a hint" "HINT"
expect "the same command goes on" continued --threads 2
says "from there" "continuing the curation in cut after [1-9]"
expect "to the same files" same whole cut
expect "and the same counts" test "$(grep -A 99999 '"counts"' cut/curate.json)" = "$(grep -A 99999 '"counts"' whole/curate.json)"

while IFS='|' read -r options pattern; do
    # shellcheck disable=SC2086
    expect "refused: $options" refused "$program" curate $options
    says "and why" "$pattern"
done <<'END'
--input raw|the output is missing.*HINT
--output out|no text to read.*HINT
--input raw --output out|nothing to do.*HINT
--input raw --output out --heuristics gophers|gopher, c4, fineweb
--input raw --output out --heuristics gopher --set gopher-min-word=3|did you mean gopher-min-words
--input raw --output out --normalize --set gopher-min-words=3|--heuristics, which is not given
--input empty --output out --normalize|empty
END
expect "compressed" "$program" curate --input one/data --output packed --normalize
expect "by zstd" zstd -dcq packed/data/part-00000.jsonl.zst
says "as JSON lines" '^{"text":"'
expect "the report shows samples and reasons" grep -q "at least 50 is kept" one/report.html
expect "the rules are listed" "$program" help rules
says "with threshold and source" "gopher-min-words.*at least 50"
printf 'input = ["raw"]\noutput = "from-file"\nnormalize = true\nheuristics = ["gopher", "fineweb"]\nshard-size = 50000\noutput-format = "jsonl"\n' >curate.toml
expect "options in a file" "$program" curate --config curate.toml
expect "are the same options" same one from-file
