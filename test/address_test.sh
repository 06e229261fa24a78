#!/usr/bin/env bash
# Inputs that are not files of this machine: lists, addresses read by curl from a server that breaks off, and --input-command.
# The documents are the same as from local files, byte for byte; a download that fails ends the run, which --resume continues.
server=$(realpath "$(dirname "$0")")/address_server.py
. "$(dirname "$0")/lib.sh"
for needed in python3 curl; do
    command -v $needed >/dev/null || { echo "ok: no $needed here, so nothing is tested"; exit; }
done

mkdir in
for file in a b c d; do
    for i in $(seq 1500); do printf '{"text": "Document %d of %s: %s and its end", "license": "cc0", "id": %d}\n' "$i" "$file" "$((i * i * 7919 % 1000003)) words" "$i"; done >in/$file.jsonl
done
cp in/a.jsonl "in/a \"b\" & c's.jsonl"
gzip -c in/b.jsonl >in/b.jsonl.gz
kings 3000 7 >in/text.txt
expect "setup: a tokenizer" "$program" tokenizer --input in/a.jsonl --vocab-size 300 --output tok
mkfifo keep
python3 "$server" in port <keep &
exec 9>keep
comes test -s port
at=http://127.0.0.1:$(cat port)

prepare() { "$program" prepare --tokenizer tok "$@"; }
files() { for ending in bin idx meta.json; do cksum <"$1.$ending"; done; }
# same NAME LOCAL... -- OPTIONS...: the same data as from the local files.
same() {
    local name=$1 local=()
    shift
    while [[ $1 != -- ]]; do local+=("$1"); shift; done
    expect "$name: local files" prepare --output-prefix one --input "${local[@]}"
    expect "$name" prepare --output-prefix two --input "${@:2}"
    cp out.txt two.txt
    expect "$name: the same bytes" diff <(files one) <(files two)
}

same "a whole file" in/a.jsonl -- "$at/whole/a.jsonl"
same "a query" in/a.jsonl -- "$at/whole/a.jsonl?download=true#here"
same "a broken connection" in/a.jsonl -- "$at/drops/a.jsonl"
same "a broken connection, compressed" in/b.jsonl.gz in/a.jsonl -- "$at/drops/b.jsonl.gz" "$at/drops/a.jsonl"
same "text of a broken connection" in/text.txt -- "$at/drops/text.txt" --split-documents file
same "a server without ranges" in/c.jsonl -- "$at/blind/c.jsonl"
same "a busy server" in/a.jsonl -- "$at/busy/a.jsonl"
expect "a busy server: is noted" grep -q "note: $at/busy/a.jsonl: curl: (22) .* 503; trying again in" two.txt
name="a \"b\" & c's.jsonl"
same "an address with blanks and quotes" "in/$name" -- "$at/whole/$name"
printf '# a list\n\n  in/b.jsonl.gz\r\n%s/drops/a.jsonl\n%s/whole/%s\n' "$at" "$at" "$name" >urls.txt
same "a list" in/b.jsonl.gz in/a.jsonl "in/$name" in/text.txt -- @urls.txt in/text.txt
same "a list from standard input" in/b.jsonl.gz in/a.jsonl "in/$name" -- @- <urls.txt
mkdir -p "in/disk:"
cp in/c.jsonl "in/disk:/"
cp "in/$name" "in/disk:/"
same "a command" in/c.jsonl "in/$name" -- disk://c.jsonl "disk://$name" --input-command 'cat in/{}'
same "a command through a shell" in/c.jsonl -- x://c --input-command "sh -c 'cat \"in/disk:/\${1#x://}.jsonl\"' sh {}"

# ---- failures ----
no "404" "cannot read $at/whole/none.jsonl after 0 bytes: curl ended with status 22:" prepare --output-prefix x --input "$at/whole/none.jsonl"
says "404: says what curl said" "returned error: 404"
no "404 with --skip-bad-files" "returned error: 404" prepare --output-prefix x --input in/a.jsonl "$at/whole/none.jsonl" --skip-bad-files
no "other bytes at the second try" "$at/other/a.jsonl has changed while it was read, at byte" prepare --output-prefix x --input "$at/other/a.jsonl"
no "a command that fails at its end" "cat ended with status 1:" prepare --output-prefix x --input x://c --input-command "cat in/c.jsonl {}"
says "a command that fails: says why" "cat: 'x://c': No such file"
no "a command that is killed" "sh ended with status 143" prepare --output-prefix x --input x://c --input-command "sh -c 'cat in/c.jsonl; kill \$\$' {}"
echo "-x://c" >option.txt
no "an address that looks like an option" "-x://c" prepare --output-prefix x --input @option.txt --input-command "sh -c 'touch ran' {}"
expect "is not passed to the command" test ! -e ran
printf 'PAR1xxxxxxxx' >in/parquet
no "Parquet" "cannot be read from a pipe or an address" prepare --output-prefix x --input "$at/whole/parquet"
printf '\xfd7zXZ\0 and so on' >in/packed.xz
no "xz" "it is xz-compressed; HINT: ... | xzcat | train_gpt prepare --input - " prepare --output-prefix x --input "$at/whole/packed.xz"
expect "xz with --skip-bad-files" prepare --output-prefix x --input "$at/whole/packed.xz" in/a.jsonl --skip-bad-files
says "xz with --skip-bad-files: is noted" "note: 1 file was left out:"
rm x.*
head -c 9000 in/b.jsonl.gz >in/cut.jsonl.gz
no "a file that is cut off" "cut.jsonl.gz is not a complete gzip file" prepare --output-prefix x --input "$at/whole/cut.jsonl.gz"
expect "failures leave no files" test -z "$(find . -maxdepth 1 -name 'x.*')"

# ---- resuming ----
options=(--input in/b.jsonl "$at/dies/a.jsonl" in/c.jsonl --output-prefix two)
rm two.*
no "a server that dies" "cannot read $at/dies/a.jsonl after [0-9,]* bytes" prepare "${options[@]}" --resume
expect "a server that dies: the position is kept" test -s two.resume.json
touch in/alive
expect "a server that dies: resumes" prepare "${options[@]}" --resume
says "a server that dies: resumes in its file" "resuming after .* documents, in $at/dies/a.jsonl"
expect "a server that dies: local files" prepare --output-prefix one --input in/b.jsonl in/a.jsonl in/c.jsonl
expect "a server that dies: the same bytes" diff <(files one) <(files two)

# interrupted COMMAND...: SIGINT ends the command and the program that it has started, whose process id is in the file `child`.
interrupted() {
    rm -f child
    python3 - "$@" <<'END'
import os, signal, subprocess, sys, time
process = subprocess.Popen(sys.argv[1:])
while not os.path.exists("child"): time.sleep(0.05)
process.send_signal(signal.SIGINT)
assert process.wait(60) == -signal.SIGINT
END
}
ended() { ! kill -0 "$(cat child)"; }
hang="sh -c 'echo \$\$ >child.new; mv child.new child; exec sleep 1000' {}"
expect "Ctrl-C while a command hangs" interrupted "$program" prepare --tokenizer tok --output-prefix x --input x://c --input-command "$hang"
expect "Ctrl-C ends the command" comes ended
# More lines than a batch holds, so that the failure comes while the next batch is being read.
hang="sh -c 'seq 60000; echo \$\$ >child.new; mv child.new child; exec sleep 1000' {}"
no "a failure while a command hangs" "c.jsonl cannot be used" prepare --output-prefix x --input x://c.jsonl --input-command "$hang"
expect "a failure ends the command" comes ended

# ---- other commands ----
expect "curate: local files" "$program" curate --input in/a.jsonl in/b.jsonl.gz --heuristics c4 --output-format jsonl --output cur1
expect "curate" "$program" curate --input "$at/drops/a.jsonl" "$at/whole/b.jsonl.gz" --heuristics c4 --output-format jsonl --output cur2
expect "curate: the same bytes" diff -r cur1/data cur2/data
expect "tokenizer: local files" "$program" tokenizer --input in/a.jsonl in/text.txt --vocab-size 300 --output tok1
expect "tokenizer" "$program" tokenizer --input "$at/drops/a.jsonl" "$at/drops/text.txt" --vocab-size 300 --output tok2
expect "tokenizer: the same bytes" cmp tok1/tokenizer.json tok2/tokenizer.json
head -c 3000 in/text.txt >in/short.txt
expect "setup: data" prepare --output-prefix data --input in/text.txt
expect "setup: a model" "$program" train --size 70k --tokenizer tok --data-path data --train-iters 1 --seq-length 32 --micro-batch-size 2 --global-batch-size 2 --threads 1 --out run
loss() { "$program" eval --model run --json --text "$1" | grep '"loss"'; }
expect "eval" test -n "$(loss in/short.txt)" -a "$(loss in/short.txt)" = "$(loss "$at/whole/short.txt")"

# ---- ranks share whole addresses ----
allow_mpirun_everywhere
if command -v "${MPIRUN:-mpirun}" >/dev/null; then
    printf '%s\n' "$at/drops/a.jsonl" "$at/whole/b.jsonl.gz" in/c.jsonl "$at/drops/d.jsonl" >urls.txt
    expect "ranks: local files" prepare --output-prefix one --input in/a.jsonl in/b.jsonl.gz in/c.jsonl in/d.jsonl
    for n in 2 3; do
        expect "$n ranks" "${MPIRUN:-mpirun}" -n $n "$program" prepare --tokenizer tok --output-prefix two --input @urls.txt
        expect "$n ranks: the same bytes" diff <(files one) <(files two)
    done
fi
exec 9>&-
