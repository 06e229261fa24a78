#!/usr/bin/env bash
# Every kind of bad input, one row each: the program must report the bad value and the remedy, exit with a status other than
# 0, not crash, and leave no file under its final name.
#   TRAIN_GPT=path/to/train_gpt test/bad_input_test.sh
golden=$(realpath "$(dirname "$0")/golden")
. "$(dirname "$0")/lib.sh"

# refuse NAME PATTERN COMMAND...: the command fails and a line of its message matches PATTERN (extended regular expression).
refuse() {
    local name=$1 pattern=$2
    shift 2
    timeout 60 "$@" >out.txt 2>err.txt </dev/null
    local status=$?
    if [[ $status == 0 ]]; then
        echo "FAILED: $name: exit status 0"
    elif [[ $status -ge 124 ]]; then
        echo "FAILED: $name: exit status $status (crash or timeout)"; tail -5 err.txt
    elif ! grep -Eq -- "$pattern" err.txt; then
        echo "FAILED: $name: the message does not match '$pattern':"; tail -5 err.txt
    else
        echo "ok: $name"
    fi
}
# leaves_nothing NAME PATH...: none of the paths exists.
leaves_nothing() {
    local name=$1 path
    shift
    for path; do
        [[ ! -e $path ]] || { echo "FAILED: $name: $path was left behind"; return; }
    done
    echo "ok: $name"
}

# ---- good files, to be damaged below ----
for i in $(seq 1 400); do echo "the quick brown fox number $i jumps over the lazy dog and says hello to $((i * 7)) cats"; [[ $((i % 4)) == 0 ]] && echo; done >good.txt
"$program" tokenizer --input good.txt --vocab-size 300 --output tok >log.txt 2>&1 || { echo "FAILED: setup: tokenizer"; cat log.txt; exit 1; }
"$program" prepare --input good.txt --output good --tokenizer tok --split-documents blank >log.txt 2>&1 || { echo "FAILED: setup: prepare"; cat log.txt; exit 1; }
small=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --seq-length 16 --micro-batch-size 2 --global-batch-size 4
    --train-iters 2 --threads 1)
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights)
train=("$program" train "${llama[@]}" "${small[@]}" --tokenizer tok)
"${train[@]}" --data-path good --out model >log.txt 2>&1 || { echo "FAILED: setup: train"; cat log.txt; exit 1; }

# ---- options ----
refuse "unknown option, nearest name"       "micro-batch-size"              "${train[@]}" --data-path good --micro-batch-sise 2
refuse "unknown subcommand"                 "trian.*|train"                 "$program" trian
refuse "number malformed"                   "12x.*whole number"                           "${train[@]}" --data-path good --num-layers 12x
refuse "number out of range"                "num-layers"                    "${train[@]}" --data-path good --num-layers -3
refuse "learning rate negative"             "lr"                            "${train[@]}" --data-path good --lr -1
refuse "value missing"                      "out"                           "${train[@]}" --data-path good --out
refuse "choice unknown"                     "cosine"                        "${train[@]}" --data-path good --lr-decay-style cosinus
refuse "preset unknown"                     "gpt2-124m"                     "$program" train --preset gpt2-125 --data-path good
refuse "dropout of everything"              "hidden-dropout"                "${train[@]}" --data-path good --hidden-dropout 1
refuse "config file missing"                "nothere.toml"                  "${train[@]}" --data-path good --config nothere.toml
echo 'micro-batch-sise = 3' >bad.toml
refuse "config file with an unknown name"   "micro-batch-sise"              "${train[@]}" --data-path good --config bad.toml
echo '--swiglu = true' >dashes.toml
refuse "config file with dashes"            "dashes.toml:1: .*in a file it has no dashes: swiglu" "${train[@]}" --data-path good --config dashes.toml
echo 'name = "C:\qwen"' >escape.toml
refuse "config file with an unknown escape" "escape.toml:1 has an unknown escape" "${train[@]}" --data-path good --config escape.toml
refuse "steps and samples both given"       "train-(iters|samples)"         "${train[@]}" --data-path good --train-samples 100

# ---- model and batch arithmetic ----
refuse "heads do not divide width"          "hidden-size 33"                "${train[@]}" --data-path good --hidden-size 33
refuse "groups do not divide heads"         "num-query-groups 3"            "${train[@]}" --data-path good --num-query-groups 3
refuse "global batch does not divide"       "global-batch-size"             "${train[@]}" --data-path good --global-batch-size 5
refuse "two activations"                    "swiglu.*squared-relu"          "${train[@]}" --data-path good --swiglu --squared-relu
refuse "rotary base without rope"           "rotary-base.*position-emb"     "${train[@]}" --data-path good --position-embedding-type alibi --rotary-base 5e5
refuse "two norms of queries"               "qk-layernorm.*whole"           "${train[@]}" --data-path good --qk-layernorm --qk-layernorm-whole
refuse "layers without a window, no window" "skip-freq.*window-size"        "${train[@]}" --data-path good --window-attn-skip-freq 2
refuse "Muon's options without Muon"        "muon-momentum has no effect without --optimizer muon; HINT: add that" "${train[@]}" --data-path good --muon-momentum 0.9
refuse "Lion's option without Lion"         "lion-beta2 has no effect without --optimizer lion" "${train[@]}" --data-path good --lion-beta2 0.9
refuse "AdamW's option with Lion"           "adam-eps has no effect with --optimizer lion.*HINT" "${train[@]}" --data-path good --optimizer lion --adam-eps 1e-6
refuse "a second moment's type with Lion"   "exp-avg-sq-dtype has no effect.*one moment.*HINT" "${train[@]}" --data-path good --optimizer lion --exp-avg-sq-dtype bf16
refuse "FP8 that waits for exp_avg_sq"      "fp8-start auto and --optimizer lion.*HINT: --fp8-start" "${train[@]}" --data-path good --optimizer lion --fp8-format hybrid --fp8-start auto
refuse "AdamW's rule of the rate with Lion" "size and --optimizer lion cannot be combined.*HINT: give --lr" "${train[@]}" --data-path good --optimizer lion --size 1m
refuse "FP8's options without FP8"          "fp8-start requires --fp8-format" "${train[@]}" --data-path good --fp8-start 5
refuse "FP8's transposes without FP8"        "fp8-weight-transpose requires --fp8-format" "${train[@]}" --data-path good --fp8-weight-transpose keep
refuse "layers to recompute without a policy" "requires --recompute-granularity.*HINT" "${train[@]}" --data-path good --recompute-num-layers 1
refuse "a policy of other layers, for all"    "requires --recompute-num-layers.*HINT" "${train[@]}" --data-path good --recompute full --recompute-other-layers mlp
refuse "others that recompute no less"        "must recompute less than.*HINT" "${train[@]}" --data-path good --recompute mlp --recompute-num-layers 1 --recompute-other-layers mlp
refuse "NorMuon's state on the host"         "offload optimizer and --optimizer normuon cannot be combined.*HINT" "${train[@]}" --data-path good --offload optimizer --optimizer normuon
refuse "fast sums backward without FP8"      "fp8-fast-backward requires --fp8-format" "${train[@]}" --data-path good --fp8-fast-backward
refuse "fast sums backward, exact forward"   "fp8-fast-backward and --no-fp8-fast-accumulation cannot be combined" "${train[@]}" --data-path good --fp8-format hybrid --fp8-fast-backward --no-fp8-fast-accumulation
refuse "how many layers stay in bf16"       "num-layers-at-end-in-bf16.*first-last-layers-bf16" "${train[@]}" --data-path good --fp8-format hybrid --num-layers-at-end-in-bf16 2
refuse "WSD's options without WSD"          "lr-wsd-decay-iters requires --lr-decay-style WSD; HINT: add that" "${train[@]}" --data-path good --lr-wsd-decay-iters 1
refuse "NorMuon's option with Muon"         "muon-beta2 has no effect without --optimizer normuon" "${train[@]}" --data-path good --optimizer muon --muon-beta2 0.9
refuse "a sample's prompt above a sample"   "shorter --sample-prompt"       "${train[@]}" --data-path good --sample-interval 1 --sample-prompt "$(seq 40)"
refuse "no memory for the model"            "GiB"                           "${train[@]}" --data-path good --hidden-size 65536 --num-attention-heads 512 --num-layers 200
refuse "vocabulary below the data's"        "vocab"                         "$program" train "${llama[@]}" "${small[@]}" --vocab-size 100 --data-path good
refuse "minutes without their unit"         "exit-after is '1h30'; it must be a duration" "${train[@]}" --data-path good --exit-after 1h30
refuse "positions beyond any model"         "max-position-embeddings is '100000000'; it must be" "${train[@]}" --data-path good --max-position-embeddings 100000000
refuse "a warm-up longer than the run"      "lr-warmup-iters 100 is a warm-up of 400 samples.*ends at 8 \(the length of the run\); HINT" "${train[@]}" --data-path good --lr-warmup-iters 100
refuse "sequence longer than the data"      "seq-length|sequence|tokens"    "${train[@]}" --data-path good --seq-length 1000000 --dry-run

# ---- options that nothing in this run uses ----
expect "options without effect" "${train[@]}" --data-path good --train-iters 1 --device-memory-gib 40 --sample-prompt a --eval-iters 0 \
    --eval-interval 5 --save-every never --keep 2 --rollback-batches 3 --snapshot-directory /dev/shm --lr-warmup-init 1e-5 --out idle
for option in "device-memory-gib has no effect: it is for plans; HINT: add --dry-run" sample-prompt eval-interval keep rollback-batches \
    snapshot-directory lr-warmup-init; do says "a note on --${option%% *}" "note: --$option"; done

# ---- options are judged before --out, whose files stay as they are ----
before=$(find model -printf '%p %T@ %s\n' | sort)
taken=("${train[@]}" --data-path good --out model)
refuse "a width, before the directory"      "hidden-size 33"                "${taken[@]}" --hidden-size 33
refuse "a batch, before the directory"      "global-batch-size 5"           "${taken[@]}" --global-batch-size 5
refuse "a split, before the directory"      "split"                         "${taken[@]}" --split nan,1,1
refuse "a schedule, before the directory"   "min-lr 1 is above"             "${taken[@]}" --min-lr 1
refuse "ranks, before the directory"        "mpirun -n 3"                   "${taken[@]}" --tp 3
refuse "a tokenizer, before the directory"  "nothere does not exist"        "${taken[@]}" --tokenizer nothere
refuse "a question for the plan"            "world requires --dry-run"      "${taken[@]}" --world 4
refuse "an override, before the directory"  "'lrr'.*did you mean lr"        "${taken[@]}" --override lrr
refuse "batches, before the directory"      "skip-batches has 'x'"          "${taken[@]}" --skip-batches x
refuse "a run that is there"                "already holds a run"           "${taken[@]}"
expect "files of the run that is there stay" test "$before" == "$(find model -printf '%p %T@ %s\n' | grep -v '^model/.lock ' | cat - <(grep '^model/.lock ' <<<"$before") | sort)"
mkdir adapters && echo '{}' >adapters/adapter_config.json
refuse "a checkpoint as --out"              "contains a model, which would be read in place of the run's checkpoints" "${train[@]}" --data-path good --out model/step_00000002
refuse "adapters as --out"                  "contains adapters, which would be read" "${train[@]}" --data-path good --out adapters --resume auto
expect "no lock in either" test ! -e model/step_00000002/.lock -a ! -e adapters/.lock
mkdir damaged && cp -r model/step_00000002 damaged/ && echo >damaged/step_00000002/model.safetensors
damaged=("${train[@]}" --data-path good --out damaged --resume auto)
refuse "an override, before the checkpoint" "'lrr'.*did you mean lr"        "${damaged[@]}" --override lrr
refuse "batches, before the checkpoint"     "skip-batches has 'x'"          "${damaged[@]}" --skip-batches x
refuse "a word for the newest checkpoint"   "resume is 'last'.*--resume auto" "${train[@]}" --data-path good --out model --resume last

# ---- data files ----
refuse "data missing"                       "nothere"                       "${train[@]}" --data-path nothere
cp good.bin cut.bin; head -c 40 good.idx >cut.idx
refuse "index truncated"                    "cut.idx"                       "${train[@]}" --data-path cut
cp good.idx half.idx; head -c 500 good.bin >half.bin
refuse "tokens truncated"                   "half.(bin|idx)"                "${train[@]}" --data-path half
cp good.bin foreign.bin; head -c 4096 /dev/zero >foreign.idx
refuse "index foreign"                      "foreign.idx"                   "${train[@]}" --data-path foreign
# loses_data NAME FILE COMMAND...: truncating a run's data file during training ends the run with an error that names the
# file.
loses_data() {
    local name=$1 data=$2 out=lost-${2%.*} pid status
    shift 2
    for end in bin idx; do cp good.$end "${data%.*}.$end"; done
    "$@" --data-path "${data%.*}" --out "$out" --train-iters 1000000 --lr-decay-iters 1000000 --eval-iters 0 >out.txt 2>err.txt </dev/null &
    pid=$!
    comes grep '"kind":"step"' "$out/log.jsonl"
    truncate -s 0 "$data"
    comes refused kill -0 $pid
    kill -KILL $pid 2>/dev/null
    wait $pid
    status=$?
    if [[ $status == 1 ]] && grep -q "^error: $data became shorter.*HINT: .*--resume auto" err.txt; then echo "ok: $name"
    else echo "FAILED: $name: exit status $status"; tail -5 err.txt; fi
}
loses_data "tokens lost while training"     lost1.bin                       "${train[@]}"
loses_data "index lost while training"      lost2.idx                       "${train[@]}"
if command -v mpirun >/dev/null; then
    (allow_mpirun_everywhere
    loses_data "tokens lost while two ranks train" lost3.bin                mpirun -np 2 "${train[@]}")
fi
refuse "weight without a path"              "data-path|weight"              "${train[@]}" --data-path 0.5 good 0.5
refuse "weights all zero"                   "weight"                        "${train[@]}" --data-path 0 good
refuse "weights without a finite sum"       "sum of the weights is not finite" "${train[@]}" --data-path 1e308 good 1e308 good
refuse "split malformed"                    "split"                         "${train[@]}" --data-path good --split "a,b"
refuse "split without training documents"   "split"                         "${train[@]}" --data-path good --split "0, 1, 0"

# ---- data and a tokenizer that do not match, although every id is in range ----
"$program" tokenizer --input good.txt --vocab-size 300 --output tok2 --pre-tokenizer llama3 >log.txt 2>&1
"$program" prepare --input good.txt --output good2 --tokenizer tok2 --split-documents blank >log.txt 2>&1 || { echo "FAILED: setup: second data"; cat log.txt; }
other="the data's .*/tok2/tokenizer.json \\(300 tokens, hash "
refuse "another tokenizer's data"           "$other"                        "${train[@]}" --data-path good2
refuse "and which one is the run's"         "the run's .*/tok/tokenizer.json \\(300 tokens, hash .{16}\\)$" "${train[@]}" --data-path good2
refuse "and what to do"                     "HINT: train_gpt prepare --tokenizer [^ ]*/tok/tokenizer.json" "${train[@]}" --data-path good2
refuse "one of two data sets"               "good2 was prepared with another" "${train[@]}" --data-path good good2
refuse "validation data"                    "good2 was prepared with another" "${train[@]}" --data-path good --valid-data-path good2
refuse "with the model's own tokenizer"     "$other"                        "$program" train --model model/latest "${small[@]}" --data-path good2
refuse "on resume"                          "$other"                        "$program" train "${llama[@]}" "${small[@]}" --resume auto --out model --data-path good2
refuse "eval of another tokenizer's data"   "$other"                        "$program" eval --model model/latest --data-path good2
refuse "two data sets without a tokenizer"  "good2 was prepared with another" "$program" train "${llama[@]}" "${small[@]}" --vocab-size 300 --data-path good good2
refuse "inspect with another tokenizer"     "is not the data's tokenizer"          "$program" inspect good2 --tokenizer tok
cp good2.bin nometa.bin; cp good2.idx nometa.idx
expect "data that do not say whose they are" "${train[@]}" --data-path nometa --out model2
expect "eval of the right data"             "$program" eval --model model/latest --data-path good --split "0,1,0"
mkdir moved; cp good.bin good.idx good.meta.json moved; python3 -m json.tool tok/tokenizer.json >moved/tokenizer.json
expect "the tokenizer written down otherwise" "${train[@]}" --tokenizer moved/tokenizer.json --data-path moved/good --out model3
expect "inspect shows the tokenizer and texts" "$program" inspect good
says "the tokenizer of the data"            "tokenizer  *.*/tok/tokenizer.json (300 tokens, hash "
says "the first text"                       "document 0  *the quick brown fox"
expect "inspect with a tokenizer"           "$program" inspect nometa.idx --tokenizer tok2
says "the first text then"                  "document 0  *the quick brown fox"
python3 -c 'import struct, sys
sys.stdout.buffer.write(struct.pack("<256i", 20240520, 1, 5, *[0] * 253) + struct.pack("<5H", 1, 2, 3, 4, 5))' >shard_000001.bin
cp shard_000001.bin shard_without_a_name
for path in shard_000001.bin shard_000001 'shard_*.bin' shard_without_a_name; do
    expect "inspect of a shard as $path" "$program" inspect "$path"
    says "its kind as $path" "llm.c token shard"
done
sed -i 's/"tokens": [0-9]*/"tokens": 5/' moved/good.meta.json
refuse "a .meta.json of other data"              "good.meta.json does not match the data" "${train[@]}" --data-path moved/good
echo "my notes" >mine.meta.json
refuse "prepare: a file of the user's there" "mine.meta.json is not"        "$program" prepare --input good.txt --output mine --tokenizer tok
expect "it is left as it is"                grep -x "my notes" mine.meta.json

# ---- terminal control characters are not passed on ----
escape=$'\033'
refuse "escapes in a name, not passed on"   "nothing.\\[31m"                "$program" inspect "nothing${escape}[31m"
expect "they are not in the message"        refused grep -q "$escape" err.txt
mkdir "tok${escape}[31m" && cp tok/tokenizer.json "tok${escape}[31m"
expect "inspect of such a name"             "$program" inspect "tok${escape}[31m"
cp out.txt table.txt
expect "they are not in the table"          refused grep -q "$escape" table.txt

# ---- prepare and tokenizer ----
: >empty.txt
refuse "prepare: text missing"              "nothere.txt"                   "$program" prepare --input nothere.txt --output p --tokenizer tok
refuse "prepare: text empty"                "empty"                         "$program" prepare --input empty.txt --output p --tokenizer tok
refuse "prepare: tokenizer missing"         "notok"                         "$program" prepare --input good.txt --output p --tokenizer notok
printf '{"text": "fine"}\n{"text": broken}\n' >bad.jsonl
refuse "prepare: broken JSON line"          "bad.jsonl:2"                   "$program" prepare --input bad.jsonl --output p --tokenizer tok --on-bad-line fail
printf '{"body": "fine"}\n' >nokey.jsonl
refuse "prepare: key missing"               "text"                          "$program" prepare --input nokey.jsonl --output p --tokenizer tok
refuse "prepare: directory not writable"    "/proc/p"                       "$program" prepare --input good.txt --output /proc/p --tokenizer tok
refuse "prepare: a folder without text"     "folder nothing holds no file"  bash -c "mkdir nothing; '$program' prepare --input nothing --output p --tokenizer tok"
refuse "prepare: a pattern of nothing"      "none matches it as a pattern"  "$program" prepare --input 'none*.txt' --output p --tokenizer tok
refuse "prepare: a limit that is none"      "20, 0.5%"                      "$program" prepare --input bad.jsonl --output p --tokenizer tok --max-bad-lines few
# Every command that reads text refuses other files by name, with the command that helps.
gzip -c good.txt >good.txt.gz
printf 'BZh91AY&SY' >good.bz2
printf '\xfd7zXZ\0' >good.xz
printf '%%PDF-1.7\n' >good.pdf
iconv -f UTF-8 -t UTF-16 good.txt >utf16.txt
iconv -f UTF-8 -t UTF-16LE good.txt >utf16le.txt
head -c 20000 /dev/urandom >noise.txt
printf 'caf\xe9 cr\xe8me br\xfbl\xe9e\n' >latin1.txt
cp good.bin tokens.txt
printf '[{"text": "one"}, {"text": "two"' >array.json
head -c 300 good.txt.gz >cut.txt
python3 -c 'import sys; b = bytearray(open("good.txt.gz", "rb").read()); b[-6] ^= 1; open("damaged.gz", "wb").write(b)'
printf '<?xml version="1.0"?>\n<a>text</a>\n' >good.xml
printf 'id,name\n1,x\n' >names.csv
printf 'PK\3\4\24\0\0\0word/document.xml' >good.docx
not_text() {
    local name=$1 option=$2
    shift 2
    refuse "$name: bzip2"                   "bzcat good.bz2 \| train_gpt $option - " "$@" good.bz2
    refuse "$name: xz"                      "xzcat good.xz \|"              "$@" good.xz
    refuse "$name: gzip that is cut off"    "cut.txt is not a complete gzip file: at byte .*, it is cut off; HINT" "$@" cut.txt
    refuse "$name: gzip that is damaged"    "damaged.gz is not a complete gzip file: .*it is damaged" "$@" damaged.gz
    refuse "$name: PDF"                     "pdftotext good.pdf - \|"       "$@" good.pdf
    refuse "$name: UTF-16"                  "iconv -f UTF-16 -t UTF-8 utf16.txt \|" "$@" utf16.txt
    refuse "$name: UTF-16 without mark"     "iconv -f UTF-16LE -t UTF-8 utf16le.txt \|" "$@" utf16le.txt
    refuse "$name: noise"                   "noise.txt is not UTF-8 text.*--allow-binary" "$@" noise.txt
    refuse "$name: Latin-1"                 "iconv -f ENCODING -t UTF-8 latin1.txt \|" "$@" latin1.txt
    refuse "$name: tokens"                  "tokens.txt is not UTF-8 text"  "$@" tokens.txt
    refuse "$name: XML"                     "good.xml is not plain text: it is XML .*HINT: .*good.xml \\| train_gpt $option - " "$@" good.xml
    refuse "$name: a table without texts"   "names.csv has no column 'text'; .* id, name; HINT" "$@" names.csv
    refuse "$name: Word"                    "good.docx is not UTF-8 text: it is a Word document .*pandoc" "$@" good.docx
    refuse "$name: JSON array that is cut off" "array.json:1: the file ends within a value" "$@" array.json
}
not_text "prepare" "prepare --input"        "$program" prepare --output p --tokenizer tok --input
not_text "tokenizer" "tokenizer --input"    "$program" tokenizer --vocab-size 300 --output t --input
expect "options of learning beside --report" refused "$program" tokenizer --report tok --input good.txt --vocab-size 500
says "are refused by name" "--report measures a tokenizer; --vocab-size only applies"
not_text "tokenizer --report" "tokenizer --report DIR --input" "$program" tokenizer --report tok --input
not_text "eval --text" "eval --text"        "$program" eval --model model/latest --text
head -c 3000 "$golden/parquet/plain-v1-none.parquet" >cut.parquet
refuse "prepare: Parquet that is cut off"   "cut.parquet cannot be read as Parquet: it is cut off: the footer" "$program" prepare --output p --tokenizer tok --input cut.parquet
refuse "prepare: Parquet from a pipe"       "standard input is Parquet.*cannot be read from a pipe or an address; HINT: give a file" bash -c "cat '$golden/parquet/plain-v1-none.parquet' | '$program' prepare --input - --output p --tokenizer tok"
refuse "prepare: another column"            "has no column 'body'; its columns are id, text, .*HINT: --json-keys" "$program" prepare --output p --tokenizer tok --input "$golden/parquet" --json-keys body
printf 'WARC/1.0\r\nContent-Length: 50\r\n\r\ncut' >cut.warc
refuse "prepare: WARC that is cut off"      "record 1 of cut.warc is cut off" "$program" prepare --output p --tokenizer tok --input cut.warc
refuse "prepare: the last of several files" "bzcat good.bz2"                "$program" prepare --output p --tokenizer tok --input good.txt good.bz2
refuse "prepare: bzip2 on standard input"   "standard input .* \.\.\. \| bzcat \| train_gpt prepare --input - " bash -c "'$program' prepare --input - --output p --tokenizer tok <good.bz2"
leaves_nothing "prepare: nothing left"      p.bin p.idx
# A folder is judged as a whole; what can be read of it is read.
mkdir odd; cp good.xml names.csv odd; for _ in $(seq 50); do printf 'sch\xf6n '; done >odd/latin1.txt
printf 'id,text\n1,"one ""two"""\n' >odd/table.csv
refuse "prepare: every bad file at once"    "3 files cannot be read:" "$program" prepare --input odd --output p --tokenizer tok
refuse "prepare: by name"                   "names.csv has no column 'text'" "$program" prepare --input odd --output p --tokenizer tok
expect "prepare: without the bad files"     "$program" prepare --input odd --output odd-data --tokenizer tok --skip-bad-files
says "how many"                             "note: 3 files were left out:"
expect "what is left is read"               "$program" inspect odd-data
says "with quotes undone"                   'document 0  *one "two"'
expect "prepare: in another encoding"       "$program" prepare --input odd/latin1.txt --output latin1 --tokenizer tok --encoding latin1
refuse "prepare: an encoding that is none"  "which iconv does not know.*iconv -l" "$program" prepare --input good.txt --output p --tokenizer tok --encoding klingon
refuse "tokenizer: text empty"              "empty"                         "$program" tokenizer --input empty.txt --vocab-size 300 --output t
refuse "tokenizer: vocabulary too small"    "vocab-size"                    "$program" tokenizer --input good.txt --vocab-size 10 --output t
for token in § Ġthe; do refuse "tokenizer: a special token of bytes" "'$token', tokenizer.json's name for a .*sequence of bytes; HINT" "$program" tokenizer --input good.txt --vocab-size 300 --special-tokens $token --output t; done
for token in é '<0x0A>'; do refuse "tokenizer: a special token of one character" "'$token', tokenizer.json's name for a .*character or byte; HINT" "$program" tokenizer --type unigram --input good.txt --vocab-size 400 --special-tokens $token --output t; done
leaves_nothing "tokenizer: nothing left"    t/tokenizer.json
echo '{"model": {"type": "Unigram"}}' >unigram.json
refuse "tokenizer: another model"           "unigram.json"                      "$program" prepare --input good.txt --output p --tokenizer unigram.json
head -c 300 tok/tokenizer.json >cut.json
for i in $(seq 100); do echo "the EOS of $i EOS </s> and EOS <|reserved_special_token_0|>"; done >specials.txt
for type in bpe unigram; do
    learned=("$program" tokenizer --input specials.txt --type "$type" --vocab-size 300 --output "specials-$type")
    expect "$type: special tokens that the text has"    "${learned[@]}" --special-tokens "</s>" EOS "<|reserved_special_token_0|>" --reserved-tokens 2
    expect "$type: prepares it"                         "$program" prepare --input specials.txt --output specials --tokenizer specials-$type
    expect "$type: no text becomes one of them"         refused grep -qE '"(EO S|E OS)"' specials-$type/tokenizer.json
done
refuse "tokenizer: truncated"               "cut.json"                      "$program" prepare --input good.txt --output p --tokenizer cut.json

# ---- model directories ----
refuse "model missing"                      "nomodel does not exist, neither here nor in Hugging Face's cache [^ ]*; did you mean model[?]$" "$program" generate --model nomodel --prompt a
refuse "model of the cache missing"         "hf download org/nomodel"       "$program" generate --model org/nomodel --prompt a
refuse "more tokens than can be counted"    "exceeds the maximum of .* tokens per pass" "$program" train --size 70k --tokenizer tok --data-path good --train-iters 1 --micro-batch-size 50000 --global-batch-size 50000 --seq-length 50000
refuse "a sequence that ranks cannot split"  "cannot split the 33 rows of a sequence .* into 2 equal" "$program" train --size 70k --vocab-size 300 --train-iters 1 --seq-length 33 --micro-batch-size 2 --global-batch-size 2 --tp 2 --world 2 --dry-run
mkdir -p other && echo '{}' >other/tokenizer.json && echo mine >other/data.bin
expect "a tokenizer where another is"       "$program" tokenizer --input good.txt --vocab-size 300 --output other
says "says what became of it"               "note: another other/tokenizer.json was there and is now other/tokenizer.json.1"
expect "which is as it was"                 test "$(cat other/tokenizer.json.1)" == '{}'
mkdir -p other/of/tokenizer.json
expect "a tokenizer where a folder is"      "$program" tokenizer --input good.txt --vocab-size 300 --output other/of
expect "which is as it was"                 test -d other/of/tokenizer.json.1 -a -f other/of/tokenizer.json
expect "the same tokenizer once more"       "$program" tokenizer --input good.txt --vocab-size 300 --output other
expect "replaces itself"                    test ! -e other/tokenizer.json.2
expect "data where a file of its name is"   "$program" prepare --input good.txt --output-prefix other/data --tokenizer tok
says "says so, too"                         "note: other/data.bin, which is not prepared data, is now other/data.bin.1"
expect "and leaves it"                      test "$(cat other/data.bin.1)" == mine
expect "its own data once more"             "$program" prepare --input good.txt --output-prefix other/data --tokenizer tok
expect "is replaced"                        test ! -e other/data.bin.2
refuse "inspect: an option of data"         "tokenizer requires prepared data" "$program" inspect model --tokenizer tok
cp -rL model/latest foreign && sed -i 's/"model_type": "[a-z0-9_]*"/"model_type": "deepseek_v3"/' foreign/config.json && rm -rf foreign/manifest.json foreign/training
expect "inspect of an unsupported model"    "$program" inspect foreign
says "names the reason"                     "not supported .*model_type is 'deepseek_v3'"
expect "and does not call it damaged"       refused grep -q damaged out.txt
refuse "inspect of the cache missing"       "hf download org/nomodel"       "$program" inspect org/nomodel
refuse "tokenizer of the cache missing"     "hf download org/nomodel"       "$program" prepare --input good.txt --output p --tokenizer org/nomodel
mkdir -p cache/models--org--there/{refs,snapshots/1} && echo 1 >cache/models--org--there/refs/main && cp -L model/latest/* cache/models--org--there/snapshots/1 2>/dev/null
expect "a tokenizer of the cache"           env HF_HUB_CACHE="$PWD/cache" "$program" prepare --input good.txt --output cached --tokenizer org/there
# A size that contradicts the model; the model's own size is accepted.
continue=("$program" train --model model --data-path good --seq-length 16 --micro-batch-size 2 --train-iters 1 --threads 1 --out resized)
for size in "num-layers 2" "hidden-size 64" "num-attention-heads 4" "kv-channels 8" "ffn-hidden-size 96" "num-query-groups 1" "vocab-size 200"; do
    # shellcheck disable=SC2086
    refuse "a model and --$size"            "$size contradicts --model .*HINT: omit it" "${continue[@]}" --$size
done
leaves_nothing "nothing is left of them"    resized
expect "a model and its own sizes"          "${continue[@]}" --num-layers 1 --hidden-size 32 --num-attention-heads 2 --kv-channels 16 --vocab-size 300
rm -r resized
refuse "biases that a model has not"        "add-qkv-bias requires the tensor '.*bias', which --model .*HINT: omit it" "${continue[@]}" --add-qkv-bias
refuse "and before any data is read"        "qk-layernorm requires the tensor" "$program" train --model model --qk-layernorm --dry-run --train-iters 1
refuse "positions that a model has not"     "position-embedding-type requires the tensor" "${continue[@]}" --position-embedding-type learned_absolute
refuse "a norm that a model has not"        "embed-layernorm requires"      "${continue[@]}" --embed-layernorm
expect "an option that a model has: it trains" "${continue[@]}" --disable-bias-linear --untie-embeddings-and-output-weights
refuse "eval: examples of a text"           "fewshot has no effect without --tasks.*HINT"     "$program" eval --model model --text good.txt --num-fewshot 5
refuse "eval: a split of a text"            "split has no effect without --data-path.*HINT"   "$program" eval --model model --text good.txt --split 1,1,0
refuse "eval: samples of a text"            "max-samples has no effect without --data-path.*HINT" "$program" eval --model model --text good.txt --max-samples 5
refuse "eval: an encoding of tasks"         "encoding has no effect without --text.*HINT" "$program" eval --model model --tasks none.jsonl --encoding latin1
refuse "eval: a seed of a text"              "seed has no effect without --tasks.*HINT" "$program" eval --model model --text good.txt --seed 3
refuse "eval: a key of plain text"          "json-keys has no effect: no file of eval --text is JSON, .*HINT: omit it" "$program" eval --model model --text good.txt --json-keys K
refuse "prepare: gaps without their tokens" "tok.* has no tokens for prefix, suffix and middle .*HINT" "$program" prepare --output p --tokenizer tok --input good.txt --fim-rate 0.5
refuse "prepare: gaps in conversations"     "fim-rate.* --chat.*the middle of a text" "$program" prepare --output p --tokenizer tok --input good.txt --fim-rate 0.5 --chat
refuse "prepare: a seed without gaps"       "seed has no effect without --fim-rate.*HINT" "$program" prepare --output p --tokenizer tok --input good.txt --seed 5
refuse "prepare: an order without gaps"     "fim-spm-rate has no effect without --fim-rate.*HINT" "$program" prepare --output p --tokenizer tok --input good.txt --fim-spm-rate 0.5
for option in "json-keys text" "on-bad-line fail" "max-bad-lines 3"; do
    # shellcheck disable=SC2086
    refuse "prepare: text with $option"     "${option% *} has no effect: no file of prepare --input is JSON.*HINT" "$program" prepare --output p --tokenizer tok --input good.txt --$option
done
refuse "prepare: documents of a table"      "split-documents has no effect: no file of prepare --input is plain text; HINT" "$program" prepare --output p --tokenizer tok --input "$golden/parquet" --split-documents line
refuse "prepare: the encoding of Parquet"   "encoding has no effect: no file of prepare --input is text; HINT" "$program" prepare --output p --tokenizer tok --input "$golden/parquet" --encoding latin1
expect "a pipe is judged when it is read"   bash -c "'$program' prepare --input - --output p --tokenizer tok --json-keys K <good.txt"
says "with a note"                          "note: --json-keys has no effect"
refuse "prepare: an address of S3"          "s3://b/a.txt is an address of s3, which needs a command .*HINT: --input-command 'aws s3 cp [{][}] -'" "$program" prepare --output p --tokenizer tok --input s3://b/a.txt
refuse "prepare: a command without a place" "which has no [{][}] for the address; HINT" "$program" prepare --output p --tokenizer tok --input s3://b/a.txt --input-command cat
refuse "prepare: a command for a shell"     "which needs a shell for '|'; HINT: no shell runs it" "$program" prepare --output p --tokenizer tok --input s3://b/a.txt --input-command "cat {} | zcat"
refuse "prepare: a quote without its end"   "which has a ' without its end" "$program" prepare --output p --tokenizer tok --input s3://b/a.txt --input-command "cat '{}"
refuse "prepare: no such command"           "there is no program catt; HINT: install it" "$program" prepare --output p --tokenizer tok --input s3://b/a.txt --input-command "catt {}"
refuse "prepare: a command for no address"  "input-command has no effect without an address" "$program" prepare --output p --tokenizer tok --input good.txt --input-command "cat {}"
refuse "prepare: no curl"                   "is read by curl, which is not installed; HINT: install curl, or --input-command" env PATH=/nowhere "$program" prepare --output p --tokenizer tok --input https://b/a.txt
refuse "eval: a command without a text"     "input-command has no effect without --text" "$program" eval --model model --data-path good --input-command "cat {}"
printf '\n# nothing\n' >empty.list
printf 'good.txt\n./self.list\n' >self.list
printf '@empty.list\n' >nested.list
refuse "prepare: an empty list"             "the list empty.list names no file; HINT: one path or address per line" "$program" prepare --output p --tokenizer tok --input @empty.list
refuse "prepare: a list in itself"          "self.list:2 names the list itself; HINT" "$program" prepare --output p --tokenizer tok --input @self.list
refuse "prepare: a list in a list"          "nested.list:1 names a list, and lists do not nest; HINT" "$program" prepare --output p --tokenizer tok --input @nested.list
refuse "prepare: no such list"              "cannot open nothing.list" "$program" prepare --output p --tokenizer tok --input @nothing.list
refuse "prepare: prepared data"             "good2.bin is not plain text: it is prepared data, next to its index; HINT: --data-path good2" "$program" prepare --output p --tokenizer tok --input good2.bin
: >empty.json
refuse "prepare: an empty tokenizer"        "empty.json is empty; HINT: copy or download it again" "$program" prepare --output p --tokenizer empty.json --input good.txt
printf '{"body": "caf\\u00e9 noir"}\n' >key.jsonl; printf 'caf\xe9 noir' >latin1-text.txt; printf 'café noir' >utf8-text.txt
loss_of() { "$program" eval --model model --json --text "$@" | grep '"loss"'; }
expect "eval: the key of a text, and its encoding" test "$(loss_of utf8-text.txt)" = "$(loss_of key.jsonl --json-keys body)" -a \
    "$(loss_of utf8-text.txt)" = "$(loss_of latin1-text.txt --encoding latin1)"
spoil() { rm -rf "$1"; cp -rL model/latest "$1"; rm "$1/manifest.json"; } # like a downloaded model
spoil m1; rm m1/config.json
refuse "model without config.json"          "m1 holds no model.*config.json; HINT" "$program" generate --model m1 --prompt a
mkdir -p empty
refuse "a run as a tokenizer"               "model holds no tokenizer.*HINT: model/latest" "$program" prepare --input good.txt --output p --tokenizer model
refuse "no tokenizer at all"                "empty holds no tokenizer.*HINT" "$program" prepare --input good.txt --output p --tokenizer empty
refuse "a model as adapters"                "adapter: model/.* holds no adapters.* but a model; HINT: --model" "$program" generate --model model --adapter model --prompt a
refuse "a tokenizer as adapters"            "adapter: tok holds no adapters.*HINT: give the output" "$program" generate --model model --adapter tok --prompt a
refuse "a file as adapters"                 "adapter is good.txt, a file"   "$program" generate --model model --adapter good.txt --prompt a
spoil m2; sed -i 's/"llama"/"mamba"/' m2/config.json
refuse "model of another family"            "mamba"                         "$program" generate --model m2 --prompt a
spoil m3; sed -i 's/"hidden_act": "silu"/"hidden_act": "tanh"/' m3/config.json
refuse "feature not supported"              "hidden_act.*gelu_pytorch_tanh"                "$program" generate --model m3 --prompt a
spoil m4; sed -i 's/"intermediate_size": 64/"intermediate_size": 96/' m4/config.json
refuse "shape other than config.json's"     "mlp"                           "$program" generate --model m4 --prompt a
for layers in 0 2; do
    spoil m4; sed -i "s/\"num_hidden_layers\": 1/\"num_hidden_layers\": $layers/" m4/config.json
    refuse "$layers layers for one"         "m4.*(has no tensor|is 0).*HINT: co" "$program" generate --model m4 --prompt a
done
spoil m5; echo '[3]' >m5/tokenizer_config.json
refuse "settings that are no object"        "m5/tokenizer_config.json does not hold a JSON object" "$program" generate --model m5 --prompt a
echo '{"eos_token": 3}' >m5/tokenizer_config.json
refuse "an end that is no token"            "m5/tokenizer.json: 'eos_token' is 3" "$program" generate --model m5 --prompt a
echo '{"chat_template": {"default": 4}}' >m5/tokenizer_config.json
refuse "a chat template that is no text"    "tokenizer_config.json: 'chat_template' is .*must be a string" "$program" generate --model m5 --chat --prompt a
refuse "a folder in place of a file"        "tok is a folder; it must be a file" "$program" generate --model model --prompts tok
spoil zero; sed -i 's/"rope_theta": [0-9.]*/"rope_theta": 0/' zero/config.json
for use in "generate --prompt a" "eval --text good.txt" "export --out never" "export --gguf never.gguf" "train --data-path good --train-iters 1 --out never"; do
    # shellcheck disable=SC2086 # several words
    refuse "${use%% --p*}: a size by its file"  "^error: zero/config.json: 'rope_theta' is 0" "$program" $use --model zero
done
spoil jinja; printf '{{ x' >jinja/chat_template.jinja
refuse "a chat template by its file"        "jinja/chat_template.jinja: line 1"  "$program" generate --model jinja --chat --prompt a
rm jinja/chat_template.jinja; sed -i '0,/{/s//{"chat_template": "{{ x",/' jinja/tokenizer_config.json
refuse "one among the tokenizer's settings" "jinja/tokenizer_config.json: line 1" "$program" generate --model jinja --chat --prompt a
spoil m5; head -c 1000 model/latest/model.safetensors >m5/model.safetensors
refuse "weights truncated"                  "model.safetensors.*HINT: download" "$program" generate --model m5 --prompt a
spoil m7
python3 -c 'b = open("m7/model.safetensors", "rb").read(); open("m7/model.safetensors", "wb").write(b[:-2] + b"\x80\x7f")'
refuse "weights that are not finite"        "not finite; HINT: download"    "$program" generate --model m7 --prompt a
: >m5/model.safetensors
refuse "weights empty"                      "has 0 bytes.*HINT: download"   "$program" generate --model m5 --prompt a
rm m5/model.safetensors
refuse "weights missing"                    "neither model.safetensors nor .*HINT" "$program" generate --model m5 --prompt a
echo '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}' >m5/model.safetensors.index.json
refuse "a shard missing"                    "index.json names .*00001-of-00002.safetensors, which does not exist; HINT" "$program" generate --model m5 --prompt a

# ---- files of llama.cpp ----
expect "export"                             "$program" export --model model --gguf good.gguf
bytes=$(stat -c %s good.gguf)
for n in 0 3 100 3000 $((bytes / 2)) $((bytes - 1)); do
    head -c "$n" good.gguf >cut.gguf
    refuse "GGUF cut to $n of $bytes bytes" "cut.gguf(: .*HINT: download| is not a GGUF file; HINT)" "$program" import --gguf cut.gguf --out from-gguf
done
python3 -c 'b = open("good.gguf", "rb").read(); open("nan.gguf", "wb").write(b[:-600] + 600 * b"\xff")'
refuse "GGUF with numbers that are none"    "nan.gguf: tensor .*not finite" "$program" import --gguf nan.gguf --out from-gguf
refuse "GGUF as a model, damaged"           "nan.gguf: tensor .*not finite" "$program" generate --model nan.gguf --prompt a
refuse "import: a place that is none"       "cannot write /proc/x: No such file or directory; HINT" "$program" import --gguf good.gguf --out /proc/x
refuse "import: below a file"               "cannot write good.txt/x: Not a directory; HINT" "$program" import --gguf good.gguf --out good.txt/x
refuse "export: a folder that is not there" "cannot write nowhere/x.gguf: .*HINT" "$program" export --model model --gguf nowhere/x.gguf
leaves_nothing "import: nothing left"       from-gguf .from-gguf.tmp
# Manifests that name files outside the directory: reading stops at once and reports the name.
list() { printf '{"checksum": "crc32c", "files": {"%s": {"bytes": 1, "crc32c": "00000000"}}}' "$1" >m6/manifest.json; }
spoil m6; mkfifo m6/pipe; ln -s /dev/zero m6/zeros
refuse_names() {
    local name
    for name in ../good.txt /dev/zero pipe zeros training; do
        list "$name"
        timeout 20 "$program" inspect m6 >names.txt 2>&1
        [[ $? == 1 ]] && tr -s ' \n' ' ' <names.txt | grep -q "checksums .*$name" || { echo "$name"; cat names.txt; return 1; }
    done
}
expect "manifest with odd names"            refuse_names
list ../good.txt
refuse "manifest with odd names, resumed"   "manifest.json names a file outside its directory: '../good.txt'" "${train[@]}" --data-path good --resume m6 --out m6-more
refuse "out is a file"                      "good.txt"                      "${train[@]}" --data-path good --out good.txt
refuse "out not writable"                   "/proc/model"                   "${train[@]}" --data-path good --out /proc/model
refuse "nothing to write"                   "max-new-tokens"                "$program" generate --model model/latest --prompt "" --max-new-tokens 0

# ---- unusual but valid text ----
# gives NAME TEXTS COMMAND...: the command prepares `made` with TEXTS documents.
gives() {
    local name=$1 documents=$2
    shift 2
    expect "$name" "$@" --output made --tokenizer tok
    says "$name: $documents" "made.idx: $documents documents*,"
}
printf 'a\0b \xff\xfe caf\xc3\xa9\n\n\xf0\x9f\x98\x80\n' >odd.txt
gives "any bytes, if one insists"           1 "$program" prepare --input odd.txt --allow-binary
says "and they are counted"                 "1 NUL byte and 2 bytes that are not UTF-8 were kept"
printf '{"text": "one"}\n{"text": "two"}\n' >two
for name in two.json two.ndjson two.JSONL; do cp two $name; gives "JSON lines as $name" 2 "$program" prepare --input $name; done
gives "JSON lines under another name"       2 "$program" prepare --input two
says "what was taken is said"               "two as JSON lines (the text under 'text')"
gives "JSON lines as text, if one insists"  1 "$program" prepare --input two --format text
on_input() { "$program" prepare --input "$1" "${@:2}" <two; }
gives "JSON lines on standard input"        2 on_input -
says "what was taken is said"               "standard input as JSON lines"
gives "JSON lines from /dev/stdin"          2 on_input /dev/stdin
piped() { "$program" prepare --input <(cat two) "$@"; }
gives "JSON lines from <(command)"          2 piped
gzip -c two >two.gz
cat two.gz two.gz >members
printf '[{"text": "one"},\n {"text": "two"}]' >array2.json
printf 'one\r\ntwo\nthree\r\n\r\nfour' >ends.txt
yes '{"text": ""}' | head -n 100000 | cat two - >empties.jsonl
ln -s "$golden" golden
page=$(printf 'HTTP/1.1 200 OK\nContent-Type: text/html\n\n<p>'; head -n 8 good.txt)
printf 'WARC/1.0\nWARC-Type: response\nContent-Type: application/http\nContent-Length: %s\n\n%s\n\n' "${#page}" "$page" >page.warc
mkdir -p folder/below
cp two.gz "folder/a name"$'\n'"of two lines.jsonl"
cp two folder/below/
touch folder/.hidden
while read -r input documents options; do
    # shellcheck disable=SC2086
    gives "$input"                          "$documents" "$program" prepare --input "$input" $options
done <<'END'
two.gz 2
members 4
golden/parquet 258
page.warc 1
array2.json 2
ends.txt 4 --split-documents line
folder 4
fol*/* 4
empties.jsonl 2
END
says "empty documents are counted"          "left out: 100,000 empty documents"
packed() { "$program" prepare --input - "$@" <members; }
gives "gzip on standard input"              4 packed
printf '{"text": "one"}\n{"text": "\\ud800"}\n{"text": "two", "score": nil}\n{"text": "three"}\n' >surrogate.jsonl
gives "a bad line or two are left out"      2 "$program" prepare --input surrogate.jsonl --max-bad-lines 2
says "with place and reason"                "surrogate.jsonl:2: .*surrogate"
says "and the other"                        "surrogate.jsonl:3: .*literal"
expect "tokenizer: brackets in special tokens" "$program" tokenizer --input good.txt --vocab-size 300 --output special --special-tokens "<|end|>" "[MASK]" "[a,b]" "{}"
expect "they are stored as they are"        grep -c '"content": "\(\[MASK\]\|\[a,b\]\|{}\)"' special/tokenizer.json
says "all three"                            3

# ---- full disk, simulated by a small file size limit ----
head -c 3000000 /dev/urandom | base64 >big.txt
(trap '' XFSZ; ulimit -f 256; refuse "prepare: disk full" "full.(bin|idx)|[Ff]ile too large|No space" "$program" prepare --input big.txt --output full --tokenizer tok)
leaves_nothing "prepare: disk full leaves nothing" full.bin full.idx
if [[ -c /dev/full ]] && mkdir tiny 2>/dev/null && mount -t tmpfs -o size=64k tmpfs tiny 2>/dev/null; then
    refuse "model: disk full" "[Nn]o space|full" "${train[@]}" --data-path good --out tiny/model --num-layers 4
    leaves_nothing "model: disk full leaves no half checkpoint" tiny/model/latest
    umount tiny
fi
