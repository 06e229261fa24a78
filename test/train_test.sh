#!/usr/bin/env bash
# The program as a user runs it, on a small text: the same seed gives the same bits with any recompute policy, other seeds
# do not; fast and plain loops agree; checkpoints load; Ctrl-C ends cleanly; memory is as planned by --dry-run.
#   TRAIN_GPT=path/to/train_gpt test/train_test.sh
. "$(dirname "$0")/lib.sh"

same() { cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors"; }
differ() { ! same "$1" "$2"; }
# close DIR DIR TOLERANCE: the same number of steps, and losses within TOLERANCE.
close() { paste -d ' ' <(losses "$1") <(losses "$2") | awk -v tolerance="$3" 'NF != 4 || $2 - $4 > tolerance || $4 - $2 > tolerance { bad = 1 } END { exit bad || NR == 0 }'; }

for i in $(seq 1 600); do echo "in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son, and it was good"; [[ $((i % 5)) == 0 ]] && echo; done >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 400 --output tok
expect "prepare" "$program" prepare --input text.txt --output data --tokenizer tok --split-documents blank

declare -A family=(
    [gpt2]=""
    [bloom]="--position-embedding-type alibi --embed-layernorm"
    [llama]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 3"
)
run() {
    local out=$1 name=$2
    shift 2
    # shellcheck disable=SC2086
    ${EXEC:-} "$program" train ${family[$name]} --num-layers 2 --hidden-size 48 --num-attention-heads 6 --tokenizer tok --data-path data --split "90, 10, 0" --seq-length 32 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters 12 --lr 3e-3 --z-loss 1e-4 --eval-interval 6 --eval-iters 2 --eval-fixed --out "$out" "$@"
}
for name in gpt2 bloom llama; do
    expect "$name: train" run "$name" $name
    expect "$name: the same seed gives the same bits" run "$name-again" $name
    expect "$name: same bits" same "$name" "$name-again"
    expect "$name: recompute selective" run "$name-selective" $name --recompute selective
    expect "$name: recompute selective, same bits" same "$name" "$name-selective"
    expect "$name: recompute full" run "$name-full" $name --recompute full
    expect "$name: recompute full, same bits" same "$name" "$name-full"
    expect "$name: recompute mlp in one layer" run "$name-mlp" $name --recompute mlp --recompute-num-layers 1 --recompute-other-layers selective
    expect "$name: recompute mlp in one layer, same bits" same "$name" "$name-mlp"
    expect "$name: another seed" run "$name-seed" $name --seed 7
    expect "$name: another seed, other bits" differ "$name" "$name-seed"
    expect "$name: plain loops" run "$name-plain" $name --plain
    # A step rounds to 8 bits (bf16) in its loop's order; 12 steps from the same start stay this close.
    expect "$name: fast and plain losses agree" close "$name" "$name-plain" 0.02
    expect "$name: one micro-batch instead of two" run "$name-micro" $name --micro-batch-size 8
    expect "$name: micro-batches sum to the same loss" close "$name" "$name-micro" 0.02
    # The saved model is the trained one: the same validation samples, the first ones (--eval-fixed), have the same loss.
    expect "$name: eval" "$program" eval --model "$name/latest" --data-path data --split "90, 10, 0" --seq-length 32 --max-samples 16
    trained=$(sed -n 's/.*"kind":"valid","step":12,"loss":\([0-9.]*\).*/\1/p' "$name/log.jsonl")
    says "$name: eval gives the validation loss $trained" "loss *$(printf '%.4f' "$trained") nats"
    expect "$name: training starts from its directory" "$program" train --model "$name/latest" --data-path data --seq-length 32 --micro-batch-size 4 --global-batch-size 8 \
        --train-iters 2 --eval-iters 0 --out "$name-more"
    last=$(losses "$name" | tail -1 | cut -d ' ' -f 2) first=$(losses "$name" | head -1 | cut -d ' ' -f 2) again=$(losses "$name-more" | head -1 | cut -d ' ' -f 2)
    expect "$name: it starts near the loss it had ($last of $first: $again)" awk "BEGIN { exit !($again < ($last + $first) / 2) }"
    expect "$name: generate" "$program" generate --model "$name/latest" --prompt "in the year" --max-new-tokens 20 --seed 3
    cp out.txt text1
    expect "$name: generate again" "$program" generate --model "$name/latest" --prompt "in the year" --max-new-tokens 20 --seed 3
    # All except the speed, in the last line.
    expect "$name: the same seed writes the same text" test "$(sed '$d' text1)" == "$(sed '$d' out.txt)"
done

# ---- validation: each reads the next samples, as in Megatron; a loss per dataset ----
head -300 text.txt >second.txt
expect "prepare a second set, of one document" "$program" prepare --input second.txt --output second --tokenizer tok
validated() { # OUT OPTIONS...: 12 steps, validated at 4, 8 and 12
    local out=$1
    shift
    "$program" train --model llama/latest --seq-length 32 --micro-batch-size 4 --global-batch-size 8 \
        --train-iters 12 --lr 1e-9 --eval-interval 4 --eval-iters 2 --out "$out" "$@"
}
blend=(--data-path 3 data 1 second --split "80, 20, 0")
valid() { sed -n "s/.*\"kind\":\"valid\",\"step\":$2,.*\"$3\":\([0-9.]*\).*/\1/p" "$1/log.jsonl"; }
# near A B: losses A and B differ by no more than the roundings of an update at a learning rate of 1e-9.
near() { awk "BEGIN { d = $1 - $2; exit !($1 > 0 && d < 1e-3 && d > -1e-3) }"; }
expect "validation: moves on" validated moving "${blend[@]}"
says "validation: says so" "a validation  *16 samples, the next samples each time"
says "validation: one document is split by tokens" "split of second  *by tokens, since its one document"
says "validation: a loss per data set" "^ *[0-9]*\.[0-9]*  second$"
expect "validation: fixed" validated fixed "${blend[@]}" --eval-fixed
says "validation: says so" "a validation  *16 samples, the same samples each time"
expect "validation: fixed: the same samples have the same loss" near "$(valid fixed 4 loss)" "$(valid fixed 12 loss)"
expect "validation: others have another" refused near "$(valid moving 4 loss)" "$(valid moving 12 loss)"
for at in 4 8 12; do
    mean=$(awk "BEGIN { print ($(valid moving $at data) * 12 + $(valid moving $at second) * 4) / 16 }")
    expect "validation: step $at: the mean is by the weights 3 and 1" near "$(valid moving $at loss)" "$mean"
done
expect "validation: apart from a set's own weight" validated apart --data-path data --valid-data-path 2 second
says "validation: of the one set" "validation second .* 100.0% of the samples"

# ---- a text of any size works: training a downloaded model further, as in the README ----
tune() { # LINES SEQUENCE
    rm -rf mine.* tuned
    head -n "$1" text.txt >mine.txt
    "$program" prepare --input mine.txt --tokenizer llama/latest --output-prefix mine &&
        "$program" train --model llama/latest --data-path mine --seq-length "$2" --train-iters 3 --lr 2e-5 --out tuned
}
expect "a text of two samples: training and validation" tune 4 32
says "a text of two samples: says what is for which" "split of mine  *by tokens"
says "a text of two samples: is validated" "best validation"
expect "a text of one sample: only training" tune 2 32
says "a text of one sample: says so" "tokens are for training: too few for validation as well"
expect "a text shorter than a sample: refused" refused tune 1 32
says "a text shorter than a sample: says what would work" "mine has [0-9]* tokens, fewer than one sample .* or --seq-length [0-9]*"
hint=$(sed -n 's/.*or --seq-length \([0-9]*\)$/\1/p' out.txt)
expect "a text shorter than a sample: and $hint does" tune 1 "$hint"
for text in "" "x"; do
    printf '%s' "$text" >tiny.txt
    "$program" prepare --input tiny.txt --tokenizer tok --output-prefix tiny --no-append-eod >out.txt 2>&1
    expect "a text of '$text': refused" refused "$program" train --model llama/latest --data-path tiny --seq-length 32 --train-iters 1 --out tiny-run
    says "a text of '$text': says why" "error: .*tiny.*; HINT"
done

# ---- special tokens in training text are text, unless enabled ----
echo "one<|endoftext|>two" >spelled.txt
expect "prepare a text that spells a special token" "$program" prepare --input spelled.txt --output spelled --tokenizer tok
says "it is text, and said so" "1 place in the text spells a special token and stayed text. HINT: --parse-special-tokens"
as_text=$(stat -c %s spelled.bin)
expect "--parse-special-tokens" "$program" prepare --input spelled.txt --output spelled --tokenizer tok --parse-special-tokens
says "it is a token, and said so" "spells a special token and became that token"
expect "which is shorter" test "$(stat -c %s spelled.bin)" -lt "$as_text"

# ---- a model made by others: its files are kept; ids beyond its tokenizer; a tokenizer that is not its own ----
cp -rL llama/latest given && rm -rf given/training
echo '{"eos_token_id": [0, 399], "temperature": 0.6}' >given/generation_config.json
echo '{{ messages }}' >given/chat_template.jinja
sed -i 's/"eos_token_id": [0-9]*/"eos_token_id": [0, 5], "pad_token_id": 7/' given/config.json
tune_given() { "$program" train --model given --data-path data --seq-length 32 --train-iters 1 --eval-iters 0 --out "$@"; }
expect "a model with two end ids is trained" tune_given given-run
expect "its texts are in the checkpoint" diff -r -x training -x manifest.json -x config.json -x '*.safetensors*' given given-run/latest
expect "its end ids, too" grep -q '"pad_token_id": 7' given-run/latest/config.json
expect "a resumed run" tune_given given-run --train-iters 2 --resume auto --override train-iters
expect "the resumed run keeps them" cmp given/generation_config.json given-run/latest/generation_config.json
echo '{"model": {"type": "WordPiece"}}' >given/tokenizer.json
expect "data that is tokens needs no tokenizer that can be read" tune_given given-run2
says "it says what is not possible" "warning: the model's tokenizer cannot be used: .*WordPiece.*samples cannot be shown"
expect "its tokenizer is kept as it is" cmp given/tokenizer.json given-run2/latest/tokenizer.json
expect "samples are refused" refused tune_given given-run3 --sample-interval 1
says "by the reason" "WordPiece"
expect "eval of tokens needs none either" "$program" eval --model given --data-path data --max-samples 2
n=$(sed -n 's/.*"vocab_size": \([0-9]*\).*/\1/p' llama/latest/config.json)
sed 's/"added_tokens": \[/&{"id": '"$n"', "content": "<|more|>", "special": true},/' llama/latest/tokenizer.json >given/tokenizer.json
expect "generate: an added token that the model lacks is left out" "$program" generate --model given --prompt "a<|more|>" --max-new-tokens 2
says "generate: and it is named" "note: .*it lacks 1 added token of given/tokenizer.json, '<|more|>'"
expect "prepare with it" "$program" prepare --input mine.txt --output given-data --tokenizer given
expect "train with it" "$program" train --model given --tokenizer given --data-path given-data --seq-length 16 --train-iters 1 --out given-run4
says "train: it is named once" "1 added token of given/tokenizer.json"
echo '{"eos_token": "<|more|>"}' >given/tokenizer_config.json
for command in "generate --prompt a" "eval --text text.txt" "eval --data-path data" "train --data-path data --seq-length 32 --train-iters 1 --out more"; do
    # shellcheck disable=SC2086
    expect "${command%% *}: a tokenizer whose end of a text the model lacks is refused" refused "$program" ${command%% *} --model given ${command#* }
    says "${command%% *}: by the id that is missing" "lacks the token $n, '<|more|>'"
done
expect "a vocabulary larger than the tokenizer's" "$program" train --preset llama-tiny --tokenizer tok --vocab-size 4000 --data-path data \
    --seq-length 32 --train-iters 1 --eval-iters 0 --out padded --sample-interval 1
expect "its samples have no ids without a token" refused grep -q "<|id " out.txt
expect "generate from it" "$program" generate --model padded/latest --prompt "a <|endoftext|> b" --max-new-tokens 40 --temperature 5
expect "generates none, either" refused grep -q "<|id " out.txt

expect "a fresh start without a prompt" "$program" generate --model llama/latest --max-new-tokens 5
# A text is evaluated in memory: with the same result as data made by prepare, including the last, shorter sequence, and
# without a file, so that a malicious link could not redirect it.
head -c 20000 text.txt >part.txt
expect "prepare the text as one document" "$program" prepare --input part.txt --output whole --tokenizer tok --no-append-eod
tokens=$(sed -n 's/.* documents*, \([0-9,]*\) tokens.*/\1/p' out.txt | tr -d ,)
expect "eval of it" "$program" eval --model llama/latest --data-path whole --split "0, 1, 0"
cp out.txt eval.txt
mkdir temporary && echo mine >precious
eval_of_a_text() {
    for end in bin idx; do ln -sf "$work/precious" "temporary/train_gpt_eval_$BASHPID.$end.tmp.$BASHPID"; done
    TMPDIR=$work/temporary exec "$program" eval --model llama/latest --text part.txt
}
eval_apart() { (eval_of_a_text); }
expect "eval of a text" eval_apart
says "bits per byte are printed" "bits per byte"
cp out.txt of_text.txt
figure() { sed -n "s/^ *$1 *\\([0-9.,]*\\).*/\\1/p" "$2" | tr -d ,; }
expect "all tokens but the first are predicted" test "$(figure tokens of_text.txt)" == $((tokens - 1))
expect "the loss is that of the data" awk -v a="$(figure loss of_text.txt)" -v b="$(figure loss eval.txt)" \
    'BEGIN { exit !(a > 0 && a - b < 0.02 && b - a < 0.02) }'
echo "the quick" >short.txt
expect "eval of a text shorter than a sequence" "$program" eval --model llama/latest --text short.txt
says "its sequence is as long as it is" "in 1 sample of $(figure tokens out.txt)\$"
printf x >one.txt
expect "eval of one token is refused" refused "$program" eval --model llama/latest --text one.txt
says "by the file's name" "one.txt has 1 tokens"
expect "nothing is written through a link" grep -q mine precious
expect "a run is not written over" refused run llama llama
says "the message says so" "already holds a run"

# ---- threads: the start-up table reports the number ----
threads() { sed -n 's/^ *backend .* \([0-9]*\) thread.*/\1/p' out.txt; }
expect "threads: 3 by option" run threads-option llama --threads 3
expect "threads: says 3" test "$(threads)" == 3
expect "threads: 3 by OMP_NUM_THREADS" env OMP_NUM_THREADS=3 "$program" train --model llama/latest --data-path data --seq-length 32 --train-iters 1 --eval-iters 0 --out threads-variable
expect "threads: says 3" test "$(threads)" == 3

# ---- Ctrl-C ----
EXEC=exec run interrupted llama --train-iters 1000000 --eval-interval 1000000 >interrupted.txt 2>&1 &
pid=$!
comes grep '"kind":"step"' interrupted/log.jsonl
kill -INT $pid
expect "Ctrl-C ends the run with status 0" wait $pid
expect "Ctrl-C: says that it stopped" grep -q "stopped after" interrupted.txt
expect "Ctrl-C: the model is written" "$program" generate --model interrupted/latest --max-new-tokens 2

# ---- memory: planned without data, compared with a run's ----
expect "dry run of a large model without data" "$program" train --preset llm-jp-172b --train-iters 10 --dry-run --seq-length 4096
if [[ ${TRAIN_GPT:-} != *cuda* ]]; then
    says "which says how long it would take" "step  *about [0-9]*.*measured for a second"
    says "and that no memory of this machine is enough" "NOT ENOUGH MEMORY: a rank needs .* TiB"
fi
plan=("$program" train --preset llama2-7b --vocab-size 32000 --train-iters 10 --seq-length 4096 --micro-batch-size 4 --global-batch-size 64 --dry-run --world 2 --device a100)
expect "dry run that does not fit" "${plan[@]}"
says "it says so" "NOT ENOUGH MEMORY: a rank needs 137 GiB, but only 79.5 GiB are available"
says "and what would help" "--recompute full  *78.4 GiB"
says "or on more GPUs" "4 GPUs --tp 2  *69.9 GiB"
expect "with that it fits" "${plan[@]}" --recompute full
says "as it says" "memory of a rank  *78.4 GiB of 79.5 GiB"
says "with logits of as many rows as that GPU would have at a time" "logits (some rows at a time)  *1000 MiB"
expect "nothing is missing" refused grep "NOT ENOUGH" out.txt
gpt2=("$program" train --preset gpt2-124m --num-layers 2 --tokenizer tok --data-path data --split "90, 10, 0" --seq-length 64 --micro-batch-size 4 --train-iters 2 --eval-iters 0 --out gpt2-124m)
if [[ -z ${SAN:-} ]]; then
    expect "dry run of two layers of gpt2-124m" "${gpt2[@]}" --dry-run
    planned=$(sed -n 's/^ *total  *//p' out.txt)
    expect "two layers of gpt2-124m" "${gpt2[@]}"
    peak=$(sed -n 's/^peak memory //p' out.txt)
    # Both in MiB, such as 421 MiB.
    expect "peak memory of $peak is within 10% of the planned $planned" awk "BEGIN { ratio = ${peak% MiB} / ${planned% MiB}; exit !(ratio > 0.9 && ratio < 1.1) }"
fi

# ---- a tokenizer other than the model's ----
expect "beside one that cannot be read any is taken" tune_given given-run3 --tokenizer tok
expect "another tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --special-tokens "<|other|>" "<|endoftext|>" --output other-tok
expect "its data" "$program" prepare --input text.txt --output-prefix other-data --tokenizer other-tok
expect "another tokenizer than the model's: refused" refused "$program" train --model llama/latest --tokenizer other-tok --data-path other-data --seq-length 32 --train-iters 1 --eval-iters 0 --out other
says "it says so" "other-tok/tokenizer.json is not the model's (llama/.*): token 0 is '<|other|>' in one and"
mkdir spaced
python3 -c 'import json, sys; json.dump(json.load(open(sys.argv[1])), open("spaced/tokenizer.json", "w"), indent=7)' given-run/latest/tokenizer.json
expect "the model's own, written otherwise" "$program" train --model given-run/latest --tokenizer spaced --data-path data --seq-length 32 --train-iters 1 --eval-iters 0 --out spaced-run
expect "keeps what the model came with" cmp given-run/latest/generation_config.json spaced-run/latest/generation_config.json

# ---- values that are allowed and hardly ever meant ----
unusual() {
    expect "$1: allowed" run plan gpt2 --dry-run "${@:3}"
    says "$1: with a warning" "^warning: .*$2"
}
unusual "a high learning rate" "lr 2 is above 0.1" --lr 2
unusual "a strong weight decay" "shrinks the weights by 300% in each update" --weight-decay 1000
unusual "wide initial weights" "init-method-std 100 is above 1" --init-method-std 100
unusual "an endless validation" "eval-iters 1,000,000,000 batches, and training only --eval-interval 6" --eval-iters 1B
unusual "more threads than CPUs" "threads [0-9]* on .* CPUs* that this process may use" --threads $((5 * $(nproc)))
expect "usual values" run plan gpt2 --dry-run
expect "have no warning" refused grep warning out.txt
