#!/usr/bin/env bash
# train_gpt curate: the output is the same for any number of threads and interruptions, and no existing file is lost.
repository=$(realpath "$(dirname "$0")/..")
. "$(dirname "$0")/lib.sh"

# Two files with documents of all kinds: good, short, repetitive, and with mojibake.
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

# Interruptions: at the start, by an unreadable file; then after complete shards, by a folder at the next shard's path. The
# same command resumes, and gives the files of an uninterrupted run.
mkdir raw2 && cp raw/a.jsonl raw2
awk 'BEGIN { for (i = 0; i < 200; i++) print "{\"text\": \"end\"}" }' >raw2/b.jsonl
expect "undisturbed" "$program" curate --input raw2 --output whole "${stages[@]}" --shard-size 50k
cp raw2/b.jsonl mended
sed '1! s/}/ /' mended >raw2/b.jsonl  # a file of bad lines alone is refused before anything is read
continued() { "$program" curate --input raw2 --output cut "${stages[@]}" --shard-size 50k "$@"; }
expect "an interruption" refused continued
mkdir cut/data/part-00003.jsonl
touch cut/data/part-00009.jsonl.tmp.1 cut/data/part-00009.jsonl.tmp.mine
cp mended raw2/b.jsonl
expect "another" refused continued
expect "after whole shards" test -s cut/data/part-00002.jsonl
rmdir cut/data/part-00003.jsonl
expect "which the record says" grep -q '"shards": 3' cut/curate.json
expect "other options are refused" refused "$program" curate --input raw2 --output cut --normalize --output-format jsonl --shard-size 50k
says "by name" "started with --heuristics"
expect "as is another input" refused "$program" curate --input raw --output cut "${stages[@]}" --shard-size 50k
says "with a hint" "HINT"
cp -p raw2/a.jsonl first
sed 's/end\./End./' first >raw2/a.jsonl
expect "as is a file that was read and has other text of the same length" refused continued
says "by name" "has changed since it started: raw2/a.jsonl.*HINT"
cp -p first raw2/a.jsonl
exec 8<"cut"
flock 8
expect "as is an output that another process writes" refused continued
says "and says so" "another process is writing to cut.*HINT"
exec 8<&-
expect "a file of others stays" rm cut/data/part-00009.jsonl.tmp.mine
expect "the same command goes on, with another limit" continued --threads 2 --max-bad-lines 5
says "from there" "continuing the curation in cut after [1-9]"
expect "to the same files" same whole cut
counts_of() { sed -n '/"counts"/,$p' "$1/curate.json" | grep -v -e '"modified"' -e '"max-bad-lines"'; }
expect "and the same counts" test "$(counts_of cut)" = "$(counts_of whole)"

# Bad lines in files before the resume position count, too.
mkdir raw3
for file in a:15 b:10; do
    awk -v n="${file#*:}" 'BEGIN { for (i = 0; i < 200; i++) print "{\"text\": \"document " i " of a file\"}"; for (i = 0; i < n; i++) print "{" }' >"raw3/${file%:*}.jsonl"
done
limited() { "$program" curate --input raw3 --output limited --normalize --output-format jsonl --shard-size 1k --max-bad-lines "$@"; }
expect "more bad lines than 5" refused limited 5
mkdir limited/data/part-00007.jsonl
expect "in the second file it stops" refused limited 40
rmdir limited/data/part-00007.jsonl
expect "15 and 10 bad lines are more than 20" refused limited 20
says "of all files" "(21 including other files), more than --max-bad-lines 20"
expect "but not more than 25" limited 25

# A run that has read nothing fixes no options, so its hint can be followed.
sed 's/"text"/"content"/' raw/a.jsonl >content.jsonl
keys() { "$program" curate --input content.jsonl --output keys --normalize --output-format jsonl "$@"; }
expect "another key is refused" refused keys
says "with a hint" "HINT: --json-keys KEY"
expect "which helps" keys --json-keys content
: >later.jsonl
later() { "$program" curate --input later.jsonl --output later --normalize --output-format jsonl; }
expect "an empty input is refused" refused later
cp raw/a.jsonl later.jsonl
expect "until it is filled" later
# A changed file that options name counts as changed options.
cp -r tok tok2
tokens() { "$program" curate --input raw2 --output tokens "${stages[@]}" --shard-size 50k --tokenizer tok2 --budget 1M; }
sed '1! s/}/ /' mended >raw2/b.jsonl  # a file of bad lines alone is refused before anything is read
expect "an interruption" refused tokens
mkdir -p tokens/.work/documents/part-00001.jsonl{,.zst}
cp mended raw2/b.jsonl
expect "another" refused tokens
echo >>tok2/tokenizer.json
expect "another tokenizer of the same name is refused" refused tokens
says "by name" "tok2/tokenizer.json has changed since the curation in tokens started; HINT"
expect "an output that its input matches is refused" refused "$program" curate --input 'r*/*' --output raw/out --normalize
says "by name" "raw/out is inside --input r.*, so a resumed curation"

while IFS='|' read -r options pattern; do
    # shellcheck disable=SC2086
    expect "refused: $options" refused "$program" curate $options
    says "and why" "$pattern"
done <<'END'
--input raw|the output is missing.*HINT
--output out|text to read is missing.*HINT
--input raw --output out|nothing to do.*HINT
--input raw --output out --heuristics gophers|gopher, c4 or fineweb
--input raw --output out --heuristics gopher --set gopher-min-word=3|did you mean gopher-min-words
--input raw --output out --heuristics gopher --set gopher-min-words=3 gopher-min-words=4|--set names the rule gopher-min-words twice
--input raw --output out --normalize --set gopher-min-words=3|--set requires --heuristics
--input raw --output out --normalize --exact-folded|--exact-folded requires --exact-duplicates
--input raw --output out --weights raw=2 --temperature 2|cannot be combined: either sets the shares
--input raw --output out --normalize --tokenizer tok|--tokenizer requires --weights, --temperature or --budget
--input raw --output out --normalize --languages en|--languages requires --language-model
--input raw --output out --normalize --quality-pareto 9|--quality-pareto requires --quality-model
--input raw --output out --pii mask --pii-kinds email fax|must be one of email, phone, card, ip, iban, id, key, user
--input raw --output out --normalize --pii-kinds email|requires --pii mask or --pii drop
--input raw --output out --exact-duplicates document|must be documents, paragraphs or lines
--input raw --output out --exact-duplicates paragraphs lines|HINT: use only lines
--input raw --output raw/out --normalize|raw/out is inside --input raw, so a resumed curation
--input raw --output out --weights other=1|other
--input raw one/data --output out --weights raw=1|does not name the source one/data
--input raw --output out --weights raw=1 raw=1|names 'raw' twice
--input raw --output out --budget 1000 --tokenizer missing|missing
--input raw --output out --decontaminate missing.jsonl|missing.jsonl
--train-language en:person.txt ja:person.txt --output mended|is not a classifier; HINT: another --output
--input absent --output out --normalize|cannot open absent
--input /dev/null --output out --normalize|no document was found in /dev/null
--input raw --output out --heuristics fineweb --stop-words x|--stop-words has no effect without --heuristics gopher; HINT
--input raw --output out --heuristics gopher --bad-words raw|--bad-words has no effect without --heuristics c4
--input raw --output out --normalize --min-quality-score 0.9|--min-quality-score has no effect without --quality-model
--input raw --output out --normalize --min-language-score 0.9|--min-language-score has no effect without --language-model
--input raw one/data --output out --weights raw=1e308 one/data=1e308|sum of the weights is not finite
END
# Kinds of personal data, and the user's own words.
line="The children are playing with this old ball behind the house that we have seen today."
echo "$line $line $line Write to ann.lee@example.com or to 8.8.8.8 about it. It is rude, zounds, to read." >person.txt
expect "one kind is masked" "$program" curate --input person.txt --output masked --pii mask --pii-kinds email --output-format jsonl
expect "and no other" grep -q 'Write to <EMAIL> or to 8.8.8.8 about' masked/data/part-00000.jsonl
printf 'gadzooks\r\nZounds\n\n' >bad-words.txt
rude() { "$program" curate --input person.txt --heuristics c4 --output-format jsonl "$@"; }
expect "a rude word is kept" rude --output rude
says "without a list of such words" "1 document in, 1 kept"
expect "and with one dropped" rude --bad-words bad-words.txt --output polite
says "by its rule" "c4-bad-words  dropped 1 document"
printf -- '---\n \n' >no-words.txt
expect "lines without words" rude --bad-words no-words.txt --output marks
says "are in no text" "1 document in, 1 kept"
echo "a line without an end" >endless.txt
expect "a text of which no line is left" "$program" curate --input endless.txt --heuristics c4 --set c4-sentences=off --output-format jsonl --output endless
says "is dropped" "1 document in, 0 kept"
# Pages become text without a stage; --normalize reads other encodings.
printf 'WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello\r\n\r\n' >page.warc
expect "an archive without a stage" "$program" curate --input page.warc --output extracted --output-format jsonl
expect "is text" grep -q '"text":"hello"' extracted/data/part-00000.jsonl
for _ in $(seq 40); do printf 'Die Gr\xf6\xdfe der T\xfcr ist gut.\n'; done >latin1.txt
expect "Latin-1" "$program" curate --input latin1.txt --output german --normalize --output-format jsonl
says "is named" "latin1.txt (WINDOWS-1252)"
expect "and read" grep -q 'Die Größe der Tür ist gut' german/data/part-00000.jsonl
expect "compressed" "$program" curate --input one/data --output packed --normalize
expect "by zstd" zstd -dcq packed/data/part-00000.jsonl.zst
says "as JSON lines" '^{"text":"'
expect "the report shows samples and reasons" grep -q "at least 50 is kept" one/report.html
expect "the rules are listed" "$program" help rules
says "with threshold and source" "gopher-min-words.*at least 50"
printf 'input = ["raw"]\noutput = "from-file"\nnormalize = true\nheuristics = ["gopher", "fineweb"]\nshard-size = 50000\noutput-format = "jsonl"\n' >curate.toml
expect "options in a file" "$program" curate --config curate.toml
expect "are the same options" same one from-file

# Languages and quality: classifiers are trained, evaluated and used; the model is the same for any number of threads.
mkdir texts
for i in 1 2 3 4 5 6 7 8 9 10 11 12; do
    echo "The children $i are playing with this old ball behind the house that we have seen." >>texts/en.txt
    echo "Die Kinder $i spielen mit diesem alten Ball hinter dem Haus, das wir gesehen haben." >>texts/de.txt
    printf 'Later observations have confirmed the theory of light, number %s.\n\n' "$i" >>good.txt
    printf 'Click here to buy now!!! Offer %s, cheap pills, click!!!\n\n' "$i" >>bad.txt
done
expect "train languages" "$program" curate --train-language texts --output one.model --measure-on texts --threads 1
says "and measure them" "accuracy 100.00%"
expect "on two threads" "$program" curate --train-language de:texts/de.txt en:texts/en.txt --output two.model --threads 2
expect "gives the same bits" cmp one.model two.model
expect "which can be measured" "$program" curate --language-model one.model --measure-on texts
says "by language" "de  *F1 100.00%"
expect "train quality" "$program" curate --train-quality good:good.txt bad:bad.txt --output quality.model --measure-on good:good.txt bad:bad.txt
says "and rank by it" "area under the ROC curve  *1.0000"
cat texts/en.txt texts/de.txt bad.txt good.txt >mixed.txt
judged() { "$program" curate --input mixed.txt --split-documents line --output-format jsonl "$@"; }
expect "judge by both" judged --language-model one.model --languages en --min-language-score 0.3 --quality-model quality.model --output judged
says "by language" "^language.*"
says "and by quality" "^quality.*"
expect "German is gone" refused grep -q Kinder judged/data/part-00000.jsonl
expect "offers are, too" refused grep -q Offer judged/data/part-00000.jsonl
expect "good English stays, with its scores" grep -q 'Later.*"language":"en","language_score":.*"quality_score":1.0' judged/data/part-00000.jsonl
drawn() { judged --quality-model quality.model --quality-pareto 9 "$@"; }
expect "draws from Pareto" drawn --output drawn1 --threads 1
expect "on three threads" drawn --output drawn3 --threads 3
expect "are the same" same drawn1 drawn3
expect "fewer offers stay than good texts" test "$(grep -c Offer drawn1/data/part-00000.jsonl)" -lt "$(grep -c Later drawn1/data/part-00000.jsonl)"

while IFS='|' read -r options pattern; do
    # shellcheck disable=SC2086
    expect "refused: $options" refused "$program" curate $options
    says "and why" "$pattern"
done <<'END'
--train-language texts|the output is missing.*HINT
--train-language texts --output x --normalize|--normalize has no effect with
--train-language en:texts/en.txt --output x|at least two
--train-language en:texts/fr.txt de:texts/de.txt --output x|cannot open texts/fr.txt
--train-language texts --train-quality good:good.txt --output x|use two commands
--train-quality texts --output x|the labels must be good and bad
--measure-on texts|measures a model; HINT: --language-model FILE or --quality-model
--measure-on fr:texts/en.txt --language-model one.model|the model knows de, en
--input mixed.txt --output x --languages en|--languages requires --language-model
--input mixed.txt --output x --quality-pareto 9|--quality-pareto requires --quality-model
--input mixed.txt --output x --language-model one.model --languages fr|does not know the language 'fr'; it knows de, en
--input mixed.txt --output x --quality-model one.model|does not judge quality.*HINT
--input mixed.txt --output x --language-model good.txt|is not a classifier.*HINT
END
expect "no model is left of those refused" test ! -e x
# The whole corpus: b has a copy of a document of a, one that differs in a word, one with a task's question, a repeated
# line.
mkdir two
awk 'BEGIN {
    for (i = 0; i < 12; i++) {
        text = "A line that all have."
        for (w = 0; w < 240; w++) {
            name = (i * 240 + w) ""
            word = "w"
            for (k = 1; k <= length(name); k++) word = word substr("abcdefghij", substr(name, k, 1) + 1, 1)
            text = text (w % 12 ? " " : ".\\n") word
        }
        print "{\"text\": \"" text ".\"}"
    }
}' >two/a.jsonl
{
    sed -n 3p two/a.jsonl
    sed -n '5s/wbaaa/changed/p' two/a.jsonl
    sed 's/\bw/x/g; 2s/xdgf/What is the name of the first of the four winds of the northern sea/' two/a.jsonl
} >two/b.jsonl
echo '{"context": "What is the name of the first of the four winds of the northern sea?", "choices": [" a", " b"], "gold": 0}' >task.jsonl
whole=(--exact-duplicates documents --near-duplicates fineweb --decontaminate task.jsonl --output-format jsonl)
for threads in 1 3; do
    expect "duplicates and decontamination on $threads threads" "$program" curate --input two/a.jsonl two/b.jsonl --output "two-$threads" "${whole[@]}" \
        --threads $threads --memory-limit 1M
    says "the copy" "exact-duplicate  *dropped 1 document"
    says "the other" "near-duplicate  *dropped 1 document"
    says "the task's text" "task-text  *changed 1 place"
done
expect "the same files" same two-1 two-3
mkdir -p two-1/.work/kept && touch two-1/.work/kept/part-00000.jsonl.tmp.1
expect "what a kill at the very end leaves" refused "$program" curate --input two/a.jsonl two/b.jsonl --output two-1 "${whole[@]}"
expect "is removed" test ! -e two-1/.work
lines_of() { cat "$1"/data/*.jsonl | wc -l; }
expect "nothing else is dropped, and one is cut into two" test "$(lines_of two-1)" = 25
expect "repeated lines" "$program" curate --input two/a.jsonl two/b.jsonl --output lines --exact-duplicates documents lines --output-format jsonl
says "go, but the first" "repeated-line  *changed 43 places in 24 documents"
expect "nothing intermediate stays" test ! -e two-1/.work
expect "mixing" "$program" curate --input two/a.jsonl two/b.jsonl --output mixed --weights a=0.75 b=0.25 --output-format jsonl
says "says its epochs" "75.0%, 1.6"
expect "and repeats documents" test "$(lines_of mixed)" -gt 20
expect "to their weights" awk '/ x/ { b++; next } { a++ } END { exit !(a > 2 * b) }' mixed/data/part-00000.jsonl
expect "a source without a weight is refused" refused "$program" curate --input two/a.jsonl two/b.jsonl --output refused --weights a=1
says "and named" "two/b.jsonl=0 excludes it"

# The page has each rule of `help rules`, with its threshold.
COLUMNS=1000 "$program" help rules | { tr '\n' ' '; echo; } | sed 's/  \(gopher\|c4\|fineweb\)-/\n\1-/g' |
    sed -n 's/^\([a-z][a-z0-9-]*\) .*: \(.*\) (.*/`\1` \2/p' >rules.txt
expect "37 rules" test "$(wc -l <rules.txt)" = 37
missing() {
    while read -r rule threshold; do grep -F "| $rule |" "$repository/dev/data/README.md" | grep -qF "| $threshold |" || echo "$rule $threshold"; done <rules.txt
}
expect "stand in dev/data/README.md" test -z "$(missing)"

# Memory does not grow with the corpus, which here has ten times the limit.
if [[ -n ${ALL:-} ]]; then
    for i in $(seq 60); do
        sed "s/\bword/word$i/g" raw/a.jsonl
    done | awk '{ for (i = 0; i < 12; i++) { print; gsub(/of-/, "of-" i) } }' >large.jsonl
    expect "the corpus has 160 MB" test "$(stat -c %s large.jsonl)" -gt 160000000
    peak() { python3 -c 'import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)' "$@"; }
    mib=$(peak "$program" curate --input large.jsonl --output large --normalize --exact-duplicates lines --near-duplicates fineweb --memory-limit 16M --threads 2)
    expect "and takes at most 150 MiB of memory: $mib" test "$mib" -lt 150
fi
