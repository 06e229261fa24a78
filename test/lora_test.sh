#!/usr/bin/env bash
# Low-rank adapters from the command line: trained, resumed to the same bits, read by eval and generate, merged; the model under them
# stays as it was; bad input is refused by name.
#   TRAIN_GPT=path/to/train_gpt test/lora_test.sh
. "$(dirname "$0")/lib.sh"

same() { (cd "$1/latest" && find . -name '*.safetensors') | while read -r file; do cmp "$1/latest/$file" "$2/latest/$file" || exit 1; done; }
for i in $(seq 1 200); do echo "in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son"; done >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents line
declare -A family=(
    [llama]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2"
    [gpt2]="" [bloom]="--position-embedding-type alibi --embed-layernorm")
train() { "$program" train --data-path text --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --threads 1 --split "90, 10, 0" "$@"; }
loss_of() { "$program" eval --text text.txt --json "$@" | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p' | head -1; }
near() { awk -v a="$1" -v b="$2" -v d="$3" 'BEGIN { exit !(a != "" && b != "" && a - b < d && b - a < d) }'; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a < b) }'; }

for name in llama gpt2 bloom; do
    # shellcheck disable=SC2086
    expect "$name: a model" train ${family[$name]} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --train-iters 4 --lr 1e-3 --out "$name"
    before=$(cat "$name"/latest/*.safetensors | cksum)
    lora=(--model "$name" --lora-rank 4 --train-iters 12 --lr 1e-2)
    expect "$name: adapters on all matrices" train "${lora[@]}" --save-every 4 --keep 0 --out "$name-lora"
    says "$name: the plan has frozen parameters" "parameters (frozen)"
    expect "$name: the model is as it was" test "$before" == "$(cat "$name"/latest/*.safetensors | cksum)"
    expect "$name: resumed in the middle" train --resume "$name-lora/step_00000004" --train-iters 12 --lr 1e-2 --out "$name-resumed"
    expect "$name: to the same bits" same "$name-lora" "$name-resumed"
    plain=$(loss_of --model "$name") adapted=$(loss_of --model "$name" --adapter "$name-lora")
    expect "$name: adapters lower the loss ($plain to $adapted)" below "$adapted" "$plain"
    expect "$name: without --model: on the one that they name" test "$(loss_of --adapter "$name-lora/latest")" == "$adapted"
    expect "$name: merge" "$program" export --merge --adapter "$name-lora" --out "$name-merged"
    merged=$(loss_of --model "$name-merged")
    expect "$name: merged computes the same ($merged)" near "$merged" "$adapted" 0.02
    expect "$name: is intact" "$program" inspect "$name-merged"
    expect "$name: writes text" "$program" generate --adapter "$name-lora" --prompt "in the year" --max-new-tokens 5
done

# ---- refused ----
no() {
    local name=$1 pattern=$2
    shift 2
    expect "refused: $name" refused "$@"
    says "$name: says why" "$pattern"
}
no "rank 0" "lora-rank" train --model llama --lora-rank 0 --train-iters 2 --out x
no "an unknown matrix, with the list" "all, self_attn.q_proj, q_proj, qkv, q," train --model llama --lora-rank 4 --lora-targets query --train-iters 2 --out x
no "a part that GPT-2 does not store alone" "attn.c_attn" train --model gpt2 --lora-rank 4 --lora-targets q --train-iters 2 --out x
no "no model" "none is given" train --preset llama-tiny --vocab-size 300 --lora-rank 4 --train-iters 2 --out x
no "alpha without a rank" "lora-rank 16" train --model llama --lora-alpha 4 --train-iters 2 --out x
no "FP8" "fp8-format" train --model llama --lora-rank 4 --fp8 hybrid --train-iters 2 --out x
no "Muon" "optimizer adamw" train --model llama --lora-rank 4 --optimizer muon --train-iters 2 --out x
no "another rank on resuming" "rank 4, alpha 8" train --resume llama-lora/latest --lora-rank 8 --train-iters 14 --lr 1e-2 --out x
no "adapters in a run of the whole model" "trains the whole model" train --resume llama/latest --lora-rank 4 --train-iters 14 --out x
no "another base" "are not those that the adapters" "$program" eval --text text.txt --model llama-merged --adapter llama-lora
no "another base on resuming" "are not those that the adapters" train --resume llama-lora/latest --model llama-merged --train-iters 14 --lr 1e-2 --out x
no "a base of another family" "are not those that the adapters" "$program" eval --text text.txt --model gpt2 --adapter llama-lora
no "adapters as a model" "holds adapters, not a model" "$program" eval --text text.txt --model llama-lora
no "a model as adapters" "holds no adapters" "$program" eval --text text.txt --adapter llama
no "export without a form" "\-\-merge" "$program" export --model llama --out x
no "export over a directory" "already exists" "$program" export --merge --adapter llama-lora --out llama
mkdir peft && cp llama-lora/latest/adapter_* peft
expect "PEFT's two files suffice" "$program" eval --text text.txt --model llama --adapter peft
no "without base.json, another family by its names" "no adapter for a layer" "$program" eval --text text.txt --model gpt2 --adapter peft
for change in 's/"LORA"/"IA3"/ peft_type' 's/"r": 4/"r": 0/ must.be.at.least.1' 's/"r": 4/"r": 8/ shape' 's/"bias": "none"/"bias": "all"/ bias' \
    's/"inference_mode"/"use_dora": true, "inference_mode"/ use_dora' 's/"inference_mode"/"rank_pattern": {"q_proj": 2}, "inference_mode"/ rank_pattern' \
    's/true,$/"pissa",/ init_lora_weights'; do
    sed "${change% *}" llama-lora/latest/adapter_config.json >peft/adapter_config.json
    no "adapter_config.json ${change% *}" "${change##* }" "$program" eval --text text.txt --model llama --adapter peft
done
no "a directory and a file at once" "merge --out DIR first" "$program" export --merge --adapter llama-lora --out x --gguf x.gguf
