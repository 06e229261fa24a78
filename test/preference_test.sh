#!/usr/bin/env bash
# Preference training as a user does it: prepare pairs of answers, train a small model to prefer the chosen ones, with all
# weights or adapters; every layout has the same losses and a resumed run the same bits; impossible combinations are
# refused.
#   TRAIN_GPT=path/to/train_gpt test/preference_test.sh
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

for i in $(seq 0 59); do
    echo "{\"prompt\": \"Who lives by the sea $i?\", \"chosen\": \" A fish lives in $((i * 7 % 10)).\", \"rejected\": \" No idea about $((i * 3 % 10)).\"}"
done >pairs.jsonl
tr -d '{}[]' <pairs.jsonl >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "text" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents line
{ cat pairs.jsonl; printf '%s\n' '{"prompt": "x", "chosen": "y", "rejected": "y"}' '{"prompt": "x", "chosen": "y"}'; } >more.jsonl
expect "prepare" "$program" prepare --preference --chat-template plain --input more.jsonl --output pairs --tokenizer tok --max-bad-lines 2
says "pairs are counted" "60 pairs of answers with the template plain"
says "two equal answers are shown" "more.jsonl:61: chosen and rejected are the same"
says "so is a missing one" "more.jsonl:62: it has no key 'rejected'"
expect "inspect" "$program" inspect pairs
says "it tells of pairs" "pairs of answers  *60, with the template plain"

train() { ${MPI:-} "$program" train --threads 1 --tokenizer tok --micro-batch-size 2 --global-batch-size 4 "$@"; }
expect "a model" train --num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm --position-embedding-type rope \
    --swiglu --disable-bias-linear --data-path text --seq-length 48 --train-iters 10 --out base
dpo() { train --model base --dpo-beta 0.1 --data-path pairs --seq-length 48 --lr 1e-3 --eval-iters 1 --eval-interval 20 --eval-fixed "$@"; }
value() { sed -n "s/.*\"kind\":\"$2\",\"step\":$3,.*\"$4\":\([0-9.e+-]*\).*/\1/p" "$1/log.jsonl"; }
above() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a > b) }'; }

expect "train" dpo --train-iters 40 --save-every 20 --keep 0 --out tuned
says "packing is told" "packing of pairs  *[0-9]* pairs of answers in"
says "the plan tells of the comparison" "DPO, sigmoid loss, beta 0.1"
says "validation has the margin" "validation at step 40: loss .*margin .* right"
expect "it begins with no preference" test "$(value tuned step 1 loss | cut -c 1-6),$(value tuned step 1 reward_margin)" == 0.6931,0.0
expect "and learns which answers are chosen" above "$(value tuned valid 40 reward_accuracy)" 0.99
expect "by a margin" above "$(value tuned valid 40 reward_margin)" 0.5
expect "chosen answers become likelier" above "$(value tuned valid 40 reward_chosen)" 0
expect "the report has the rewards" grep -q "Margin of rewards" tuned/report.html
expect "and no perplexity, as their loss is no cross-entropy" test "$(grep -c perplexity tuned/report.html)" = 0
expect "the checkpoint names its reference" grep -q '"reference": {' tuned/latest/training/state.json

same() { cmp "$1/latest/$3" "$2/latest/$3"; }
expect "twenty steps more" train --resume tuned/step_00000020 --dpo-beta 0.1 --data-path pairs --seq-length 48 --lr 1e-3 --eval-iters 1 \
    --eval-interval 20 --eval-fixed --train-iters 40 --out resumed
expect "the same bits" same tuned resumed model.safetensors
expect "the reference is kept" same tuned resumed training/reference.safetensors
expect "adapters" dpo --train-iters 40 --lora-rank 4 --lr 1e-2 --save-every 20 --keep 0 --out lora
expect "they learn it, too" above "$(value lora valid 40 reward_accuracy)" 0.99
expect "the model under them is their reference" same tuned lora training/reference.safetensors
expect "adapters, resumed" dpo --resume lora/step_00000020 --train-iters 40 --lr 1e-2 --out lora-resumed
expect "their bits" same lora lora-resumed adapter_model.safetensors
coded=(--lora-rank 4 --lr 1e-2 --quantize-base q8_0 --train-iters 40)
expect "adapters on a quantized model" dpo "${coded[@]}" --save-every 20 --keep 0 --out coded
expect "they begin with no preference" test "$(value coded step 1 loss | cut -c 1-6),$(value coded step 1 reward_margin)" == 0.6931,0.0
expect "they learn it, too" above "$(value coded valid 40 reward_accuracy)" 0.99
expect "the quantized model is their reference" refused same lora coded training/reference.safetensors
expect "on a quantized model, resumed" dpo --resume coded/step_00000020 "${coded[@]}" --out coded-resumed
expect "to the same bits" same coded coded-resumed adapter_model.safetensors
expect "ipo, recomputed" dpo --train-iters 40 --dpo-loss ipo --recompute full --out ipo
expect "it learns it" above "$(value ipo valid 40 reward_accuracy)" 0.99
expect "smoothed labels, twice computed" dpo --train-iters 6 --dpo-label-smoothing 0.2 --detect-nondeterminism 2 --out smoothed
expect "end at another loss" above "$(value smoothed step 6 loss)" "$(value tuned step 6 loss)"
expect "in FP8" dpo --train-iters 40 --fp8 hybrid --out fp8
expect "it begins near no preference" awk -v loss="$(value fp8 step 1 loss)" 'BEGIN { exit !(loss > 0.68 && loss < 0.71) }'
expect "the reference is that of bf16" same tuned fp8 training/reference.safetensors
expect "it learns it" above "$(value fp8 valid 40 reward_accuracy)" 0.99
expect "too short for some" dpo --seq-length 39 --eval-iters 0 --train-iters 1 --out short
expect "what is left out is counted" grep -q "[0-9] pairs were dropped, longer than --seq-length 39 including their prompts; all fit in [34][0-9]" short/log.jsonl

# The same losses and the same reference in every layout.
expect "six steps" dpo --train-iters 6 --out whole
# shellcheck disable=SC2086  # none, or two words
for layout in "" "--tp 2" "--pp 2" "--cp 2"; do
    MPI="${MPIRUN:-mpirun} -n 2" expect "two ranks $layout" dpo --micro-batch-size 1 --train-iters 6 $layout --out "ranks$layout"
    expect "their losses $layout" near_losses whole "ranks$layout" 6 0.02
done

# ---- refused ----
no "no model" "dpo-beta requires --model DIR" train --preset llama-tiny --vocab-size 300 --data-path pairs --dpo-beta 0.1 --train-iters 1 --out x
no "pairs without a comparison" "contains pairs of answers.*--dpo-beta" train --model base --data-path pairs --seq-length 48 --train-iters 1 --out x
no "text for a comparison" "contains no pairs of answers.*prepare --preference" dpo --data-path text --train-iters 1 --out x
no "text beside pairs" "text contains no pairs" dpo --data-path 0.5 pairs 0.5 text --train-iters 1 --out x
no "eval of pairs" "contains pairs of answers" "$program" eval --model base --data-path pairs
no "a loss alone" "dpo-loss requires --dpo-beta; HINT: add that" train --model base --data-path text --seq-length 48 --dpo-loss ipo --train-iters 1 --out x
no "smoothed labels with ipo" "label-smoothing requires --dpo-loss sigmoid" dpo --dpo-loss ipo --dpo-label-smoothing 0.1 --train-iters 1 --out x
no "z-loss" "z-loss-strength and --dpo-beta cannot be combined" dpo --z-loss 1e-4 --train-iters 1 --out x
no "another beta on resuming" "dpo-beta is 0.2" dpo --dpo-beta 0.2 --resume tuned/step_00000020 --train-iters 40 --out x
no "a run that compared nothing" "without preference training" dpo --resume base/latest --override dpo-beta data-path lr seq-length train-iters --train-iters 20 --out x
no "another reference" "is not the resumed run's reference" dpo --model ipo --resume tuned/step_00000020 --train-iters 40 --out x
head -n 59 pairs.jsonl >other.jsonl
echo '{"prompt": "Who lives by the sea 59?", "chosen": " A fish lives in 3.", "rejected": " No idea about 6."}' >>other.jsonl
expect "other pairs" "$program" prepare --preference --chat-template plain --input other.jsonl --output other --tokenizer tok
no "other pairs on resuming" "differ from those scored in" dpo --data-path other --resume tuned/step_00000020 --train-iters 40 --override data-path --out x
no "longer samples on resuming" "log-probability of answers in .* is missing" dpo --resume short/latest --seq-length 48 --eval-iters 0 --train-iters 20 --override seq-length train-iters data-path --out x
no "no pair is short enough" "HINT: all fit in --seq-length [34][0-9]" dpo --seq-length 8 --train-iters 1 --out x
