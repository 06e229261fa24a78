#!/usr/bin/env bash
# Supervised fine-tuning as a user does it: prepare conversations, train a small model until it knows them by heart, and let
# it answer; every layout has the same losses and a resumed run the same bits; impossible combinations are refused.
#   TRAIN_GPT=path/to/train_gpt test/chat_test.sh
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

places=(sea wood hill town) animals=(fish deer goat cat)
for i in 0 1 2 3; do
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"Who lives by the ${places[i]}?\"}, {\"role\": \"assistant\", \"content\": \"A ${animals[i]} lives there.\"}, {\"role\": \"user\", \"content\": \"What is it?\"}, {\"role\": \"assistant\", \"content\": \"It is a ${animals[i]}.\"}]}"
done >chats.jsonl
tr -d '{}[]' <chats.jsonl >chats.txt
expect "a tokenizer with the template's tokens" "$program" tokenizer --input chats.txt --vocab-size 300 --special-tokens "<|endoftext|>" "<|im_start|>" "<|im_end|>" --output tok
expect "without a template" refused "$program" prepare --chat --input chats.jsonl --output chat --tokenizer tok
says "it says which there are" "has no chat template; HINT: --chat-template NAME, one of chatml, llama-2"
cat >tok/chat_template.jinja <<'END'
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
END
cp tok/chat_template.jinja chat.jinja
expect "prepare" "$program" prepare --chat --input chats.jsonl --output chat --tokenizer tok
says "the template is found" "4 conversations with the template of tok/chat_template.jinja"
expect "inspect" "$program" inspect chat
says "it tells what is learned" "learned  *[0-9]* tokens"
expect "options of plain text" "$program" train --preset llama-tiny --tokenizer tok --seq-length 96 --train-iters 2 --data-path chat \
    --eod-mask-loss --reset-attention-mask --split 1,1,0 --valid-data-path chat --dry-run
for option in eod-mask-loss reset-attention-mask split; do says "options of plain text: a note on --$option" "note: --$option has no effect: "; done
for _ in 1 2 3 4 5 6; do tr -d '{}[]"' <chats.jsonl; done >plain.txt
expect "prepare running text" "$program" prepare --input plain.txt --output plain --tokenizer tok --split-documents line
expect "prepare with another template" "$program" prepare --chat --chat-template plain --input chats.jsonl --output other --tokenizer tok
expect "conversations and running text" "$program" train --preset llama-tiny --tokenizer tok --seq-length 96 --train-iters 2 --data-path chat plain \
    --reset-attention-mask --split 1,1,0 --dry-run
cp out.txt mixed.txt
expect "an option of plain text: it has an effect there" refused grep -q "reset-attention-mask has no effect" mixed.txt
expect "two templates" "$program" train --preset llama-tiny --tokenizer tok --seq-length 96 --train-iters 2 --data-path chat other --split 1,1,0 --dry-run
says "the model has the tokenizer's" "warning: conversations use the template plain, but the model has another one"
rm tok/chat_template.jinja
expect "two templates, none of the tokenizer" "$program" train --preset llama-tiny --tokenizer tok --seq-length 96 --train-iters 2 --data-path chat other --split 1,1,0 --dry-run
says "the model gets the first one" "warning: conversations use the template plain, but the model has another one"
cp chat.jinja tok/chat_template.jinja

run() {
    local out=$1
    shift
    ${MPI:-} "$program" train --num-layers 2 --hidden-size 64 --num-attention-heads 4 --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --tokenizer tok --data-path chat --valid-data-path chat --seq-length 96 \
        --micro-batch-size 1 --global-batch-size 2 --lr 3e-3 --lr-decay-style constant --eval-iters 2 --eval-fixed --out "$out" "$@"
}
expect "train" run one --train-iters 80 --eval-interval 40
says "packing is told" "packing of chat  *4 conversations in"
for i in 0 3; do
    expect "it answers" "$program" generate --chat --model one --temperature 0 --prompt "Who lives by the ${places[i]}?"
    expect "with what it has learned, and stops" test "$(head -n 1 out.txt)" == "A ${animals[i]} lives there."
done
printf 'Who lives by the hill?\nWhat is it?\n' >asked.txt
# shellcheck disable=SC2016
expect "a conversation by lines" bash -c '"$0" generate --chat --model one --temperature 0 <asked.txt' "$program"
expect "each is answered in it" test "$(head -n 2 out.txt)" == $'A goat lives there.\nIt is a goat.'
# Commands in a conversation: /clear starts a new one, which answers as the first time; /system also sets its system message.
printf 'Who lives by the hill?\n\n/clear\nWho lives by the hill?\n/system Be brief.\n/system\nWho lives by the hill?\n' >asked.txt
expect "commands of a conversation" bash -c '"$0" generate --chat --model one --temperature 0 <asked.txt' "$program"
says "each is confirmed" "^(a new conversation with this system message)$"
expect "and starts a new one" test "$(grep -c '^A goat lives there.$' out.txt)" == 3
# A conversation that outgrows the context continues without its oldest messages.
for i in $(seq 12); do echo "Who lives by the hill?"; done >asked.txt
expect "a long conversation" bash -c '"$0" generate --chat --model one --temperature 0 --max-new-tokens 20 <asked.txt' "$program"
says "drops its oldest messages" "oldest messages were dropped)$"
expect "training of the result on conversations" "$program" train --model one --data-path chat --seq-length 96 --micro-batch-size 1 --global-batch-size 1 --split 1,0,0 --train-iters 1 --eval-iters 0 --out again
expect "eval of conversations" "$program" eval --model one --data-path chat --split "0, 1, 0" --seq-length 96
trained=$(sed -n 's/.*"kind":"valid","step":80,"loss":\([0-9.e-]*\).*/\1/p' one/log.jsonl)
says "it gives the validation loss $trained" "loss *$(printf '%.4f' "$trained") nats"

# The same losses in every layout; the same bits after a resume. A model without a template gets the conversations'
# template.
mv tok/chat_template.jinja .
expect "six steps" run whole --train-iters 6
expect "a template stands beside the model" "$program" generate --chat --model whole --prompt "Who?" --max-new-tokens 5
expect "its answers end in transformers, too" grep -qz '"eos_token_id": \[[^]]*0,[^]]*2' whole/latest/generation_config.json
# shellcheck disable=SC2086  # none, or two words
for layout in "" "--tp 2" "--pp 2"; do
    MPI="${MPIRUN:-mpirun} -n 2" expect "two ranks $layout" run "ranks$layout" --train-iters 6 $layout
    expect "their losses $layout" near_losses whole "ranks$layout" 6 0.02
done
expect "three steps" run part --train-iters 3
expect "and three more" run part --train-iters 6 --resume auto --override train-iters
expect "the same bits" cmp whole/latest/model.safetensors part/latest/model.safetensors

# Adapters on a model without a template get the conversations' template, and so does the merged model.
cp -rL one/latest bare && rm -r bare/chat_template.jinja bare/generation_config.json bare/training bare/manifest.json
expect "the model alone has none" refused "$program" generate --chat --model bare --prompt "Who?"
says "it says so" "has no chat template"
expect "adapters on it" "$program" train --model bare --lora-rank 4 --data-path chat --seq-length 96 --micro-batch-size 1 --global-batch-size 2 --lr 1e-4 --train-iters 2 --out adapted
expect "they answer" "$program" generate --chat --adapter adapted --temperature 0 --prompt "Who lives by the sea?"
expect "by their template" test "$(head -n 1 out.txt)" == "A fish lives there."
expect "and end without --chat" "$program" generate --adapter adapted --temperature 0 --prompt $'<|im_start|>user\nWho lives by the sea?<|im_end|>\n<|im_start|>assistant\n'
says "where a turn ends" "A fish lives there.$"
expect "merged" "$program" export --merge --adapter adapted --out merged
expect "it answers" "$program" generate --chat --model merged --temperature 0 --prompt "Who lives by the sea?"
expect "as the adapters" test "$(head -n 1 out.txt)" == "A fish lives there."
expect "its answers end in transformers, too" grep -qz '"eos_token_id": \[[^]]*0,[^]]*2' merged/generation_config.json

# Incompatible options.
expect "no answer within the sequence" refused run short --train-iters 1 --seq-length 4
says "it says so" "chat has no conversation with an answer in its first 5 tokens; HINT: a longer --seq-length"
expect "answers cut by the sequence" run cut --train-iters 1 --seq-length 24
says "they are counted" "conversations were cut at --seq-length 24"
cp -r tok tok-endless
sed "s/ + '<|im_end|>'//" chat_template.jinja >tok-endless/chat_template.jinja
expect "a template without an end" refused "$program" prepare --chat --input chats.jsonl --output endless --tokenizer tok-endless
says "it says so" "which is not a token of .*HINT: --chat-template NAME"
rm chat.mask
expect "data without its mask" refused run bad --train-iters 1
says "it says what is missing" "chat.mask is missing.*HINT"
expect "a template of another model" refused "$program" generate --chat --chat-template gemma --model one --prompt x
says "its token is named" "no token '<start_of_turn>'"
printf '{"prompt": "Who?"}\n{"prompt": ""}\n' >one-empty.jsonl
for prompts in "--prompts one-empty.jsonl" "--prompt ''"; do
    expect "an empty message, to which a template adds nothing, of $prompts" refused bash -c "'$program' generate --chat --chat-template plain --model one $prompts <asked.txt"
    says "is refused" "the message is empty.*HINT"
done
expect "--system without --chat" refused "$program" generate --model one --system x
says "it says so" "--system requires --chat"
