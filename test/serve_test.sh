#!/usr/bin/env bash
# Batched generation: generate --batch and --prompts, and train_gpt serve as a client uses it (test/serve_check.py).
#   TRAIN_GPT=path/to/train_gpt test/serve_test.sh
checks=$(realpath "$(dirname "$0")/serve_check.py")
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

# Two models that have hardly learned: their output is nonsense, but depends on every token before it.
for i in $(seq 40); do
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"Who lives in house $i?\"}, {\"role\": \"assistant\", \"content\": \"A fish or a goat lives there, and nobody knows why.\"}]}"
done >chats.jsonl
tr -d '{}[]' <chats.jsonl >chats.txt
"$program" tokenizer --input chats.txt --vocab-size 300 --special-tokens "<|endoftext|>" "<|im_start|>" "<|im_end|>" --output tok >out.txt 2>&1
"$program" prepare --input chats.txt --split-documents line --output data --tokenizer tok >>out.txt 2>&1
cp -r tok tok-chat
cat >tok-chat/chat_template.jinja <<'END'
{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
END
model() { # model OUT TOKENIZER OPTIONS...
    "$program" train --num-layers 2 --hidden-size 64 --num-attention-heads 4 --tokenizer "$2" --data-path data --split 1,0,0 \
        --micro-batch-size 1 --global-batch-size 1 --train-iters 12 --lr 5e-3 --lr-decay-style constant --init-method-std 0.2 --out "$1" "${@:3}"
}
expect "a model" model gpt tok --seq-length 1024
expect "a model with a chat template" model chat tok-chat --seq-length 128 --normalization RMSNorm --position-embedding-type rope --swiglu

# Samples are the same, and in the same order, for any batch size.
sampled() { "$program" generate --model gpt --prompt "A fish" --num-samples 5 --max-new-tokens 30 --batch "$@" 2>speed.txt; }
# (A CPU's tile unit has different kernels for one sequence and for many.)
sampled 1 --matrix-unit portable >alone.txt
sampled 3 >three.txt
for batch in 2 5 8; do
    sampled "$batch" --matrix-unit portable >together.txt
    expect "five samples, $batch at a time, are those that are written alone" cmp alone.txt together.txt
    sampled "$batch" >together.txt
    expect "and on the fastest unit those that are written three at a time" cmp three.txt together.txt
done
cp speed.txt out.txt
says "the speed is told" "^[0-9]* tokens in .*tokens/s; milliseconds per token of a sequence: p50 [0-9.]*, p99 [0-9.]*$"
expect "samples differ" test "$(awk 'BEGIN { RS = "\n---\n" } { print }' alone.txt | sort -u | wc -l)" -gt 5
sampled 5 --seed 5 >other.txt
expect "so do seeds" refused cmp -s alone.txt other.txt
for layout in "--tp 2" "--pp 2"; do
    # shellcheck disable=SC2086  # two words
    "${MPIRUN:-mpirun}" -n 2 "$program" generate --model gpt --prompt "A fish" --num-samples 5 --max-new-tokens 30 --temperature 0 --batch 3 $layout >ranks.txt 2>out.txt
    sampled 1 --temperature 0 >one.txt
    expect "two ranks write them together, too: $layout" test "$(wc -l <ranks.txt)" == "$(wc -l <one.txt)"
done

# The batch size.
measured() { "$program" generate --model gpt --prompt "A fish" --max-new-tokens 12 --measure-batches --batch 5 "$@"; }
expect "numbers of texts are measured" measured
says "and the fastest is named" "^highest throughput: --batch [1-5], [0-9]* tokens/s$"
cp out.txt measured.txt
expect "1, 2, 4, 5 of them" test "$(awk 'NF == 8 && $3 == "ms" && $4 > 0 && $5 >= $4 && $6 > 0 { printf "%d ", $1 }' measured.txt)" == "1 2 4 5 "
expect "in 80 columns" test -z "$(awk 'length > 80' measured.txt)"
expect "a bound that all keep" measured --max-latency 100000
says "it is kept" "within --max-latency: --batch"
expect "a bound that none keeps" refused measured --max-latency 0.00001
says "it says what is possible" "no batch size meets --max-latency 1e-05: the closest is --batch [1-5] with [0-9.]* ms"
expect "too few tokens to measure any" refused "$program" generate --model gpt --prompt "A fish" --max-new-tokens 2 --measure-batches
says "which it says" "HINT: --max-new-tokens 50"
[[ -n ${SAN:-} ]] || (
    ulimit -v 20000000
    expect "more threads than there can be" refused "$program" serve --model gpt --port 0 --max-queue 4096
    says "with what helps" "HINT: a smaller --max-queue"
)
expect "a bound without the measurement" refused "$program" generate --model gpt --max-latency 5
search() { "$program" generate --model gpt --num-beams 4 --max-new-tokens 12 --matrix-unit portable "$@"; }
expect "beam search" search --prompt "A fish" --num-samples 2
says "its speed" "12 tokens in .*tokens/s"
search --prompt "A fish" --num-samples 2 >two.txt 2>/dev/null
search --prompt "A fish" >best.txt 2>/dev/null
expect "the best text comes first" diff best.txt <(head -n "$(wc -l <best.txt)" two.txt)
printf 'A fish\nA king\n' >searched.txt
search --prompts searched.txt --num-samples 3 >searched.jsonl 2>/dev/null
expect "a search after each prompt" test "$(grep -c '"sample": *[0-2]' searched.jsonl)" == 6
search --prompt "A fish" --threads 1 >one.txt 2>/dev/null
expect "beam search: the same text on one thread" diff best.txt one.txt
on_ranks() { "${MPIRUN:-mpirun}" -n 2 "$program" generate --model gpt --prompt "A fish" --num-beams 4 --max-new-tokens 12 --matrix-unit portable "$@"; }
on_ranks --pp 2 >ranks.txt 2>out.txt
expect "beam search, --pp 2: one rank's text" diff best.txt ranks.txt
expect "beam search, --tp 2" on_ranks --tp 2
for wrong in "--temperature 0" "--batch 2" "--measure-batches" "--num-samples 5"; do
    # shellcheck disable=SC2086
    expect "beam search with $wrong" refused search $wrong
done
expect "beam search in a conversation" refused "$program" generate --model chat --chat --num-beams 2
says "says why" "num-beams requires --prompt or --prompts"
expect "a length penalty without a search" refused "$program" generate --model gpt --length-penalty 2
expect "a measurement of many prompts" refused "$program" generate --model gpt --measure-batches --num-samples 2

# Prompts from a file.
printf 'A fish\n\nWho "lives"\nhouse\n' >prompts.txt
expect "prompts of lines" "$program" generate --model gpt --prompts prompts.txt --num-samples 2 --max-new-tokens 20 --seed 3 --matrix-unit portable
grep '^{' out.txt >lines.jsonl
expect "become lines of JSON in order" test "$(sed 's/,"text".*//' lines.jsonl)" == '{"prompt":"A fish","sample":0
{"prompt":"A fish","sample":1
{"prompt":"Who \"lives\"","sample":0
{"prompt":"Who \"lives\"","sample":1
{"prompt":"house","sample":0
{"prompt":"house","sample":1'
printf '{"prompt": "A fish", "x": 1}\n{"prompt": "Who \\"lives\\""}\n{"prompt":"house"}\n' >prompts.jsonl
expect "prompts of .jsonl" "$program" generate --model gpt --prompts prompts.jsonl --num-samples 2 --max-new-tokens 20 --seed 3 --batch 1 --matrix-unit portable
grep '^{' out.txt >again.jsonl
expect "give the same" cmp again.jsonl lines.jsonl
echo '{"text": "A fish"}' >bad.jsonl
expect "a line without a prompt" refused "$program" generate --model gpt --prompts bad.jsonl
says "it is named" 'bad.jsonl, line 1, is not a JSON object with a string under "prompt"'
expect "prompts twice" refused "$program" generate --model gpt --prompts prompts.txt --prompt x
: >empty.txt
expect "an empty file" refused "$program" generate --model gpt --prompts empty.txt
says "it says so" "has no prompts"

# The server.
if ! "$program" serve --model nowhere 2>&1 | grep -q libcpp-httplib-dev; then
    passes "serve" python3 "$checks" "$program"
    expect "several ranks" refused "${MPIRUN:-mpirun}" -n 2 "$program" serve --model gpt
    says "are refused" "train_gpt serve runs as a single process"
else
    echo "ok: serve is refused by the package's name; without it no more is tested"
fi
