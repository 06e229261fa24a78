#!/usr/bin/env bash
# Virtual tokens (prompt tuning and p-tuning) from the command line: training, resume to the same bits, eval and generate;
# the base model stays unchanged; bad input is refused by name.
#   TRAIN_GPT=path/to/train_gpt test/virtual_tokens_test.sh
. "$(dirname "$0")/lib.sh"

kings 200 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
tr a-z b-za <text.txt >other.txt  # the models' training text, so that virtual tokens have something to learn
for name in text other; do expect "prepare $name" "$program" prepare --input $name.txt --output $name --tokenizer tok --split-documents line; done
train() { "$program" train --data-path "${data:-text}" --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --threads 1 --split "90, 10, 0" --lr 3e-2 "$@"; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a < b) }'; }
config() { sed -n "s/.*\"$2\": \"\?\([^\",]*\).*/\1/p" "$1/latest/adapter_config.json"; }

llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights)
for name in llama gpt2; do
    family=()
    [[ $name == gpt2 ]] || family=("${llama[@]}")
    data=other expect "$name: a model, whose positions are all trained" train "${family[@]}" --seq-length 40 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 40 --tokenizer tok --train-iters 40 --lr 1e-2 --out "$name"
    before=$(cat "$name"/latest/*.safetensors | cksum) plain=$(loss_of --model "$name")
    for encoder in none mlp lstm; do
        run=$name-$encoder
        tuned=(--model "$name" --prompt-tokens 6 --prompt-encoder "$encoder" --train-iters 12)
        expect "$run: virtual tokens" train "${tuned[@]}" --save-every 4 --keep 0 --log-health-interval 3 --detect-nondeterminism 5 --check-weight-hash-across-dp-replicas-interval 2 --out "$run"
        says "$run: the plan has frozen parameters" "parameters (frozen)"
        says "$run: and says what is trained" "adapters  *6 virtual tokens"
        expect "$run: the model is as it was" test "$before" == "$(cat "$name"/latest/*.safetensors | cksum)"
        expect "$run: resumed in the middle" train --resume "$run/step_00000004" --train-iters 12 --out "$run-resumed"
        expect "$run: to the same bits" same_tensors "$run" "$run-resumed"
        tuned_loss=$(loss_of --model "$name" --adapter "$run")
        expect "$run: lowers the loss ($plain to $tuned_loss)" below "$tuned_loss" "$plain"
        expect "$run: without --model: on the one that it names" test "$(loss_of --adapter "$run/latest")" == "$tuned_loss"
        expect "$run: is intact" "$program" inspect "$run/latest"
        expect "$run: writes text" "$program" generate --adapter "$run" --prompt "in the year" --num-samples 8 --max-new-tokens 50
        says "$run: as far as virtual tokens leave room" "context of 40 tokens is full"
    done
done
allow_mpirun_everywhere
for prompt in "in the year" i; do
    expect "four tensor-parallel ranks write after '$prompt'" "${MPIRUN:-mpirun}" -n 4 "$program" generate --adapter llama-none --tp 4 --prompt "$prompt" --max-new-tokens 5
done
expect "PEFT's name of the one" test "$(config llama-none peft_type)" == PROMPT_TUNING
expect "and of the other" test "$(config llama-mlp peft_type) $(config llama-mlp encoder_hidden_size)" == "P_TUNING 32"
expect "and of its kinds" test "$(config llama-mlp encoder_reparameterization_type) $(config llama-lstm encoder_reparameterization_type)" == "MLP LSTM"

# ---- conversations: several per sample, each after the virtual tokens, next to text ----
for i in $(seq 1 40); do echo "{\"messages\": [{\"role\": \"user\", \"content\": \"city $((i % 17))\"}, {\"role\": \"assistant\", \"content\": \"$((i * 11 % 97)) sheep\"}]}"; done >chat.jsonl
expect "conversations" "$program" prepare --input chat.jsonl --output chat --tokenizer tok --chat --chat-template plain
for encoder in none mlp lstm; do
    talk=(--data-path 2 chat 1 text --seq-length 34 --train-iters 8)
    tuned=(--model llama --prompt-tokens 6 --prompt-encoder "$encoder")
    expect "conversations, $encoder: virtual tokens" train "${talk[@]}" "${tuned[@]}" --save-every 4 --keep 0 --out "talk-$encoder"
    says "conversations, $encoder: are packed" "conversations in [0-9]* samples"
    expect "conversations, $encoder: resumed in the middle" train "${talk[@]}" --resume "talk-$encoder/step_00000004" --out "talk-$encoder-resumed"
    expect "conversations, $encoder: to the same bits" same_tensors "talk-$encoder" "talk-$encoder-resumed"
done
expect "conversations: recomputed" train "${talk[@]}" "${tuned[@]}" --recompute full --out talk-again
expect "conversations: to the same bits" same_tensors talk-lstm talk-again
chat_loss() { "$program" eval --data-path chat --split "0, 1, 0" --seq-length 34 --json "$@" | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p' | head -1; }
data=chat expect "conversations alone" train --model llama --prompt-tokens 6 --seq-length 34 --train-iters 20 --out talk
plain=$(chat_loss --model llama) tuned_loss=$(chat_loss --adapter talk)
expect "conversations: virtual tokens lower the loss ($plain to $tuned_loss)" below "$tuned_loss" "$plain"

# ---- initialization ----
train_one() { train --model llama --prompt-tokens 6 --train-iters 1 "$@"; }
expect "a text" train_one --lr 1e-9 --prompt-init-text "in the year" --out began
expect "is recorded" test "$(config began prompt_tuning_init_text)" == "in the year"
expect "and kept on resuming" train --resume began/latest --train-iters 2 --override train-iters lr --lr 1e-9 --out began-resumed
expect "and still there" test "$(config began-resumed prompt_tuning_init_text)" == "in the year"
greedy() { "$program" generate --temperature 0 --max-new-tokens 20 "$@" 2>/dev/null | tr -d '~'; }
expect "one token" train --model llama --prompt-tokens 1 --train-iters 1 --lr 1e-9 --prompt-init-text "~" --out tilde
expect "writes what the token in its place would" test "$(greedy --adapter tilde --prompt "in the")" == "$(greedy --model llama --prompt "~in the")"
expect "samples while training" train_one --out sampled --sample-interval 1 --sample-tokens 4
expect "an average of the weights" train_one --ema-decay 0.9 --out averaged
expect "is evaluated" "$program" eval --text text.txt --model llama --adapter averaged/latest/ema
expect "bf16 gradients" train_one --main-grads-dtype bf16 --prompt-encoder mlp --prompt-encoder-width 8 --out narrow
expect "FP8" train_one --seq-length 26 --fp8 hybrid --out fp8
expect "the encoder's width is recorded" test "$(config narrow encoder_hidden_size)" == 8
expect "a plan without a model" train --preset llama-15m --vocab-size 300 --prompt-tokens 6 --train-iters 2 --dry-run --world 2 --tp 2

# ---- refused ----
short=(--train-iters 2 --out x)
no "more than the model has room for" "above the model's longest sequence 40; HINT: --seq-length 10" train --model llama --prompt-tokens 30 "${short[@]}"
no "as many as its longest sequence" "leaves no room" train --model llama --prompt-tokens 40 "${short[@]}"
no "no model" "prompt-tokens requires --model DIR" train --preset llama-tiny --vocab-size 300 --prompt-tokens 4 "${short[@]}"
no "an encoder without tokens" "prompt-encoder requires --prompt-tokens" train --model llama --prompt-encoder mlp "${short[@]}"
no "a width without an encoder" "prompt-encoder mlp" train --model llama --prompt-tokens 4 --prompt-encoder-width 8 "${short[@]}"
no "a text for an encoder" "cannot initialize the encoder" train --model llama --prompt-tokens 4 --prompt-encoder mlp --prompt-init-text king "${short[@]}"
no "two kinds of adapters" "both are adapters; HINT: omit one of them" train --model llama --prompt-tokens 4 --lora-rank 4 "${short[@]}"
no "masked documents" "prepare --chat" train --model llama --prompt-tokens 4 --reset-attention-mask --tokenizer tok "${short[@]}"
no "rows that FP8 cannot multiply" "prompt-tokens)) is 60" train --model llama --prompt-tokens 6 --fp8 hybrid "${short[@]}"
no "Muon" "optimizer adamw" train --model llama --prompt-tokens 4 --optimizer muon "${short[@]}"
no "an average of an encoder's weights" "ema-decay" train --model llama --prompt-tokens 4 --prompt-encoder mlp --ema-decay 0.9 "${short[@]}"
no "another encoder on resuming" "computed by an MLP of width 32" train --resume llama-mlp/latest --prompt-encoder lstm --train-iters 14 --out x
no "other virtual tokens on resuming" "6 virtual tokens, computed by an MLP of width 32" train --resume llama-mlp/latest --prompt-tokens 5 --train-iters 14 --out x
no "another text on resuming" "differ from the checkpoint's" train --resume began/latest --prompt-init-text king --train-iters 14 --out x
no "in a run of the whole model" "trains the whole model" train --resume llama/latest --prompt-tokens 6 --train-iters 14 --out x
no "another base" "are not the ones that the adapters" "$program" eval --text text.txt --model gpt2 --adapter llama-none
no "merging" "cannot be merged into matrices" "$program" export --merge --adapter llama-none --out x
no "a sample that does not fit" "longest sequence 34" "$program" eval --text text.txt --adapter gpt2-none --seq-length 35
mkdir peft && cp llama-none/latest/adapter_* peft
expect "PEFT's two files suffice" "$program" eval --text text.txt --model llama --adapter peft
for change in 's/"PROMPT_TUNING"/"PREFIX_TUNING"/ PREFIX_TUNING.*P_TUNING.are.supported' 's/_tokens": 6/_tokens": 5/ shape' 's/_tokens": 6/_tokens": 40/ leave.room' \
    's/_submodules": 1/_submodules": 2/ num_transformer_submodules' 's/"CAUSAL_LM"/"SEQ_CLS"/ task_type'; do
    sed "${change% *}" llama-none/latest/adapter_config.json >peft/adapter_config.json
    no "adapter_config.json ${change% *}" "${change##* }" "$program" eval --text text.txt --model llama --adapter peft
done
