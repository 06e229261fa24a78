#!/usr/bin/env bash
# `prepare`, `tokenizer` and `curate` on several ranks: the bytes of one process; errors are reported once; a killed run resumes.
golden=$(realpath "$(dirname "$0")")/golden
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere
MPIRUN=${MPIRUN:-mpirun}
if ! command -v "$MPIRUN" >/dev/null; then echo "ok: no $MPIRUN here, so nothing is tested"; exit; fi

# ---- inputs of all formats, with bad lines, tags and documents of all lengths ----
mkdir in
for file in a b c d e; do
    for i in $(seq 300); do printf '{"text": "Document %d of %s: %s, <|endoftext|> and more.", "id": %d}\n' "$i" "$file" "$(printf 'word%d ' $(seq $((i % 17))))" "$i"; done >in/$file.jsonl
done
echo '{"no": "text"}' >>in/b.jsonl
echo '{"text": ""}' >>in/d.jsonl
echo 'not JSON' >>in/d.jsonl
for i in $(seq 500); do printf 'Line %d of a text.\n%s\n' "$i" "$([[ $((i % 7)) == 0 ]] || echo "It goes on.")"; done >in/long.txt
gzip -c in/a.jsonl >in/packed.jsonl.gz
cp "$golden/parquet/plain-v1-none.parquet" in/table.parquet
printf 'text,number\n"one, two",1\nthree,2\n' >in/rows.csv
printf '\x7fELF\x01\x01\0\0binary' >in/binary.bin
for i in $(seq 40); do printf '{"messages": [{"role": "user", "content": "Question %d?"}, {"role": "assistant", "content": "Answer %d."}]}\n' "$i" "$i"; done >chat1.jsonl
sed 's/Answer/Another/' chat1.jsonl | head -30 >chat2.jsonl
for i in $(seq 20); do printf '{"prompt": "P %d", "chosen": " good %d", "rejected": " bad %d"}\n' "$i" "$i" "$i"; done >pairs1.jsonl
tac pairs1.jsonl >pairs2.jsonl
expect "setup: a tokenizer" "$program" tokenizer --input in --vocab-size 400 --special-tokens "<|endoftext|>" "<fim_prefix>" "<fim_suffix>" "<fim_middle>" --output tok

# ranks N OPTIONS...: prepare on N ranks.
ranks() { "$MPIRUN" -n "$1" "$program" prepare --tokenizer tok "${@:2}"; }
files() { for ending in bin idx meta.json mask; do if [[ -e $1.$ending ]]; then echo "$ending $(cksum <"$1.$ending")"; fi; done; }
# The lines for people, without times, ranks and names of the output.
notes() { grep -E '^(note|input|  |.*(tokens|pairs))' "$1" | grep -v '^learning' | sed "s/$2/OUT/g" | sort; }

# same NAME OPTIONS...: equal files and notes for 1, 2 and 3 ranks.
same() {
    local name=$1
    shift
    expect "$name: one process" "$program" prepare --tokenizer tok --output-prefix "$name.one" "$@"
    notes out.txt "$name.one" >"$name.notes"
    for n in 2 3 7; do
        expect "$name: $n ranks" ranks $n --output-prefix "$name.$n" "$@"
        notes out.txt "$name.$n" >said.txt
        expect "$name: $n ranks write the same bytes" diff <(files "$name.one") <(files "$name.$n")
        expect "$name: $n ranks report the same" diff "$name.notes" said.txt
        expect "$name: $n ranks leave nothing else" test "$(find . -maxdepth 1 -name "$name.$n*" | wc -l)" -le 4
    done
}
same folder --input in --split-documents blank
same whole-files --input in
same limit --input in --max-bad-lines 2 --split-documents line
same packed --input in/packed.jsonl.gz in/a.jsonl in/packed.jsonl.gz --resume
same middle --input in --split-documents blank --fim-rate 0.7
same single --input in/a.jsonl
same conversations --input chat1.jsonl chat2.jsonl --chat --chat-template plain
same pairs --input pairs1.jsonl pairs2.jsonl pairs1.jsonl --preference --chat-template plain

# ---- a tokenizer learned from, and measured on, the files of all ranks ----
learn() { "$program" tokenizer --input in --vocab-size 500 --reserved-tokens 3 "$@"; }
learn_on() { "$MPIRUN" -n "$1" "$program" tokenizer --input in --vocab-size 500 --reserved-tokens 3 "${@:2}"; }
for type in bpe unigram; do
    expect "tokenizer, $type: one process" learn --type $type --output tok-$type-1
    notes out.txt tok-$type-1 >tok.notes
    for n in 2 3 7; do
        expect "tokenizer, $type: $n ranks" learn_on $n --type $type --output tok-$type-$n
        notes out.txt tok-$type-$n >said.txt
        expect "tokenizer, $type: $n ranks learn the same" cmp tok-$type-1/tokenizer.json tok-$type-$n/tokenizer.json
        expect "tokenizer, $type: $n ranks report the same" diff tok.notes said.txt
    done
done
measure=("$program" tokenizer --report tok --input in)
expect "tokenizer --report: one process" "${measure[@]}"
notes out.txt none >measured.txt
expect "tokenizer --report: 3 ranks" "$MPIRUN" -n 3 "${measure[@]}"
notes out.txt none >said.txt
expect "tokenizer --report: 3 ranks report the same" diff measured.txt said.txt

# ---- errors: one message, from the first rank that has one, and nothing is left ----
# once NAME PATTERN COMMAND...: fails with the message, once.
once() {
    no "$1" "$2" "${@:3}"
    expect "$1: says so once" test "$(grep -c '^error' out.txt)" == 1
}
once "a missing tokenizer" "error on rank 0 of 3.*nowhere" "$MPIRUN" -n 3 "$program" prepare --input in --output-prefix x --tokenizer nowhere
once "standard input" "which ranks cannot share" ranks 2 --input - --output-prefix x
once "too many bad lines of all files" "2 lines of all files cannot be used, more than --max-bad-lines 1" ranks 3 --input in --output-prefix x --max-bad-lines 1
cp in/e.jsonl good.jsonl
sed 's/{/[/' good.jsonl >broken.jsonl
once "a damaged file in another rank's part" "error on rank 1 of 2.*broken.jsonl" ranks 2 --input good.jsonl good.jsonl good.jsonl broken.jsonl --output-prefix x --max-bad-lines 5%
head -c 400 in/packed.jsonl.gz >cut.jsonl.gz
once "a file that is cut off" "cut.jsonl.gz is not a complete gzip file" ranks 3 --input cut.jsonl.gz in/a.jsonl in/b.jsonl --output-prefix x
printf '' >empty1.txt && printf '' >empty2.txt
once "tokenizer: no text" "error on rank 0 of 2.*the input is empty" "$MPIRUN" -n 2 "$program" tokenizer --input empty1.txt empty2.txt --output x-tok
once "tokenizer --report: no text" "error on rank 0 of 2.*the input is empty" "$MPIRUN" -n 2 "$program" tokenizer --report tok --input empty1.txt empty2.txt
once "tokenizer: a damaged file in another rank's part" "error on rank 1 of 2.*broken.jsonl" "$MPIRUN" -n 2 "$program" tokenizer --input good.jsonl good.jsonl good.jsonl broken.jsonl --output x-tok
expect "errors leave no files" test -z "$(find . -maxdepth 1 -name 'x.*')"
no "another command" "train_gpt inspect runs as a single process" "$MPIRUN" -n 2 "$program" inspect tok

# ---- a killed rank ends all, and the same command resumes ----
for i in 1 2 3 4; do for _ in $(seq 60); do cat in/[a-e].jsonl; done >big$i.jsonl; done
big=(--input big?.jsonl --max-bad-lines 5%)
expect "big: one process" "$program" prepare --tokenizer tok "${big[@]}" --output-prefix big.one
(ranks 2 "${big[@]}" --output-prefix "$work/big" --resume --workers 1 >killed.txt 2>&1; echo $? >status.txt) &
comes test -e big.rank-1-of-2.bin.partial
victim=$(pgrep -f "^[^ ]*/train_gpt prepare .*--output-prefix $work/big " | tail -n 1)
kill -KILL "$victim"
wait
expect "a killed rank ends all" test "$(cat status.txt)" != 0
expect "none is left" refused pgrep -f "/train_gpt prepare .*--output-prefix $work/big "
expect "no data yet" test ! -e big.idx
expect "resumes" ranks 2 "${big[@]}" --output-prefix "$work/big" --resume
expect "to the same bytes" diff <(files big.one) <(files big)
expect "and leaves nothing else" test "$(find . -maxdepth 1 -name 'big.*' ! -name 'big.one*' | wc -l)" == 3

# A rank that fails lets all save their positions. The damage does not change the file's size, which fixes the ranks' files.
for i in 1 2 3 4; do gzip -c in/[a-e].jsonl >packed$i.jsonl.gz; done
packed=(--input packed?.jsonl.gz --max-bad-lines 5%)
expect "packed: one process" "$program" prepare --tokenizer tok "${packed[@]}" --output-prefix packed.one
damage() { printf 'oops' | dd of=packed4.jsonl.gz bs=1 seek=$(($(stat -c %s packed4.jsonl.gz) - 8)) conv=notrunc status=none; }
damage
once "a damaged file" "error on rank 1 of 2.*packed4.jsonl.gz is not a complete gzip file" ranks 2 "${packed[@]}" --output-prefix stopped --resume
expect "both ranks keep their positions" test -s stopped.resume.json -a -s stopped.rank-1-of-2.resume.json
once "another number of ranks" "another number of ranks" ranks 3 "${packed[@]}" --output-prefix stopped --resume
no "one process" "another number of ranks" "$program" prepare --tokenizer tok "${packed[@]}" --output-prefix stopped --resume
rm stopped.rank-1-of-2.resume.json # as after a kill before the first save
no "one process does not take rank 0's part" "another number of ranks" "$program" prepare --tokenizer tok "${packed[@]}" --output-prefix stopped --resume
gzip -c in/[a-e].jsonl >packed4.jsonl.gz
expect "resumes after the repair" ranks 2 "${packed[@]}" --output-prefix stopped --resume
says "from its positions" "resuming after [1-9]"
expect "to the same bytes, too" diff <(files packed.one) <(files stopped)
expect "leaves nothing, too" test "$(find . -maxdepth 1 -name 'stopped.*' | wc -l)" == 3

# ---- curate: the documents, numbers, samples and counts of one process ----
mkdir raw
for i in 1 2 3 4 5; do
    awk -v f="$i" 'BEGIN {
        for (i = 0; i < 150; i++) {
            printf "{\"text\": \""
            for (w = 0; w < 70; w++) printf "the%s%d of-%d ", i % 7 == 3 ? "" : "word", i % 7 == 3 ? 0 : f * i * 80 + w, (i * 31 + w * w) % 97
            printf "%s\", \"id\": %d}\n", i % 5 ? "and that is cafÃ©." : "end.", i
        }
        print "{\"text\": \"too short\"}\n{\"text\": \"\"}\n{\"none\": 1}"
    }' >raw/f$i.jsonl
done
printf "A text with invalid \xff\xfe bytes: %s\n" "$(seq -s " word" 2000)" >raw/invalid.txt
curate() { "$program" curate --shard-size 20k "$@"; }
curate_ranks() { "$MPIRUN" -n "$1" "$program" curate --shard-size 20k "${@:2}"; }
curated() { (cd "$1" && find . -name '*.jsonl*' -print0 | sort -z | xargs -0 cksum && sed -n '/"counts"/,$p' curate.json | grep -v '"modified"' && grep -c . report.html); }
# The report of the last expect, without progress and names of the output.
summary() { grep -v -E "^[a-z ]+: .* in [0-9.]+ ?m?s|$1" out.txt | sort; }
# same_curation NAME OPTIONS...: equal files, counts and samples for 1, 2 and 3 ranks.
same_curation() {
    local name=$1
    shift
    expect "$name: one process" curate --output "$name.one" "$@"
    summary "$name" >"$name.said"
    for n in 2 3; do
        expect "$name: $n ranks" curate_ranks $n --output "$name.$n" "$@"
        summary "$name" >said.txt
        expect "$name: $n ranks report the same" diff "$name.said" said.txt
        expect "$name: $n ranks write the same" diff <(curated "$name.one") <(curated "$name.$n")
        expect "$name: $n ranks leave no intermediate set" test ! -e "$name.$n/.work"
    done
}
same_curation rules --input raw --normalize --heuristics gopher fineweb --pii mask --output-format jsonl
same_curation plain --input raw/f[12345].jsonl raw/invalid.txt --heuristics gopher --samples 2
same_curation duplicates --input raw --exact-duplicates documents --near-duplicates fineweb --heuristics gopher
same_curation mixed --input raw/f1.jsonl raw/f2.jsonl raw/f3.jsonl --normalize --weights raw/f1.jsonl=0.5 raw/f2.jsonl=0.3 raw/f3.jsonl=0.2

once "curate: nothing to do" "there is nothing to do" "$MPIRUN" -n 2 "$program" curate --input raw --output y
once "curate: a classifier" "by a single process" "$MPIRUN" -n 2 "$program" curate --train-quality good:raw bad:raw --output y
# Interrupted by a folder at the path of rank 1's third file.
options=(--input raw --normalize --heuristics gopher fineweb --pii mask --output-format jsonl --output cut)
blocked() {
    for _ in $(seq 1000); do
        mkdir cut/.work/rank-1-of-2/part-00002.jsonl.zst && return
        sleep 0.01
    done
}
blocked 2>/dev/null &
no "curate: an interruption" "error on rank 1 of 2.*part-00002" curate_ranks 2 "${options[@]}"
wait
expect "curate: rank 1 has whole files" grep -q '"shards":2' cut/.work/rank-1-of-2/state.json
no "curate: another number of ranks" "started on 2 ranks, now there are 3; HINT: mpirun -n 2" curate_ranks 3 "${options[@]}"
no "curate: one process" "started on 2 ranks, now there are 1" curate "${options[@]}"
no "curate: other options" "other options" curate_ranks 2 "${options[@]}" --set gopher-min-words=40
rmdir cut/.work/rank-1-of-2/part-00002.jsonl.zst
expect "curate: resumes" curate_ranks 2 "${options[@]}"
says "curate: from its position" "continuing the curation"
expect "curate: to the same files" diff <(curated rules.one) <(curated cut)
