#!/usr/bin/env bash
# muP and CompleteP from the command line: a run with the base's sizes has the bits of the standard parametrization; a
# larger one gives an ordinary model that other programs can load, resumes to the same bits and not with another
# parametrization; the plan shows the factors; contradictions are refused. (test_parametrization_fp32.cpp checks the factors
# themselves, parity_check.cu every layout of ranks.)
#   TRAIN_GPT=path/to/train_gpt test/parametrization_test.sh
. "$(dirname "$0")/lib.sh"
export COLUMNS=200 # each row of the plan on one line

kings 200 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents line
train() { # OUT OPTIONS...
    local out=$1
    shift
    "$program" train --hidden-size 64 --num-layers 4 --num-attention-heads 4 --tokenizer tok --data-path text --seq-length 24 --micro-batch-size 2 \
        --global-batch-size 4 --train-iters 8 --lr 3e-3 --threads 1 --split "90, 10, 0" --eval-iters 2 --eval-interval 8 --save-every 4 --keep 0 --quiet --seed 5 --out "$out" "$@"
}
same() { same_tensors "$1" "$2" && cmp "$1/latest/config.json" "$2/latest/config.json"; }
differ() { ! cmp -s "$1/latest/model.safetensors" "$2/latest/model.safetensors"; }

base=(--mup-base-width 64 --mup-base-head-size 16)
for optimizer in adamw muon lion "adamw --exp-avg-dtype bf16"; do
    # shellcheck disable=SC2086
    expect "$optimizer: standard" train "standard $optimizer" --optimizer $optimizer
    # shellcheck disable=SC2086
    expect "$optimizer: muP at the base's sizes" train "mup $optimizer" --optimizer $optimizer --parametrization mup "${base[@]}"
    expect "$optimizer: has its bits" same "standard $optimizer" "mup $optimizer"
    # shellcheck disable=SC2086
    expect "$optimizer: CompleteP at the base's sizes" train "completep $optimizer" --optimizer $optimizer --parametrization completep "${base[@]}" --mup-base-depth 4
    expect "$optimizer: has them, too" same "standard $optimizer" "completep $optimizer"
done

# Four times as wide as its base, twice as deep, with heads of twice the size.
larger=(--parametrization completep --mup-base-width 16 --mup-base-depth 2 --mup-base-head-size 8)
expect "larger than the base" train larger "${larger[@]}" --ema-decay 0.9
expect "has other weights" differ larger "standard adamw"
expect "with the configuration of any model of its sizes" cmp larger/latest/config.json "standard adamw/latest/config.json"
valid=$(sed -n 's/.*"kind":"valid","step":8,.*"loss":\([0-9.]*\).*/\1/p' larger/log.jsonl | head -1)
expect "inspect" "$program" inspect larger
says "inspect names the parametrization" "mup-base-width *16"
loss_of() { "$program" eval --data-path text --split "90, 10, 0" --seq-length 24 --max-samples 8 --json --model "$1" | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p' | head -1; }
near() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a - b < 0.02 && b - a < 0.02) }'; }
expect "eval, which knows no parametrization, finds the run's loss ($valid)" near "$valid" "$(loss_of larger)"
expect "resumes" train again "${larger[@]}" --ema-decay 0.9 --resume larger/step_00000004
expect "to the same bits" same larger again
expect "another parametrization than the checkpoint's: refused" refused train x --ema-decay 0.9 --resume larger/step_00000004
says "says which" "parametrization is .*standard.*completep"
expect "another base: refused" refused train x "${larger[@]}" --mup-base-width 32 --ema-decay 0.9 --resume larger/step_00000004
says "says which" "mup-base-width is 32; the checkpoint was written with 16"
expect "FP8" train fp8 "${larger[@]}" --seq-length 24 --micro-batch-size 4 --fp8 hybrid

# ---- the plan ----
plan() { train x --dry-run "$@"; }
expect "the plan" plan "${larger[@]}"
says "says how much larger" "width 64 is 4 times the base's 16, 4 layers are 2 times 2, heads 2 times 8"
says "of matrices" "qkv_w  *initial values x 0.5, learning rate x 0.25, weight decay x 4, epsilon x 0.125; as fc1_w"
says "of the final norm" "final_norm_w .*x 0.25, learning rate x 0.25, epsilon x 1; as final_norm_b"
expect "Muon's plan" plan "${larger[@]}" --optimizer muon
says "has Muon's learning rate" "qkv_w  *initial values x 0.5, learning rate x 0.5, weight decay x 2; as fc1_w"
expect "Lion's plan" plan "${larger[@]}" --optimizer lion
says "has AdamW's factors, and no epsilon" "qkv_w  *initial values x 0.5, learning rate x 0.25, weight decay x 4; as fc1_w"
expect "as JSON" plan "${larger[@]}" --json
says "in numbers" '"epsilon": 0.125'

# ---- refused ----
no "no base" "mup-base-width 256" plan --parametrization mup
no "no base's depth" "mup-base-depth 8" plan --parametrization completep --mup-base-width 64
no "a base without muP" "parametrization mup" plan --mup-base-width 64
no "a depth without CompleteP" "parametrization completep" plan --parametrization mup --mup-base-width 64 --mup-base-depth 2
no "an unknown parametrization" "standard, mup" plan --parametrization mu
no "NorMuon" "adamw or muon" plan "${larger[@]}" --optimizer normuon
no "adapters" "lora-rank" plan "${larger[@]}" --lora-rank 4
no "--size with its own learning rate" "base's with --lr" "$program" train --size 1m --tokenizer tok --parametrization mup --mup-base-width 64 --dry-run
expect "--size with the base's learning rate" "$program" train --size 1m --tokenizer tok --parametrization mup --mup-base-width 64 --lr 4e-3 --dry-run
says "keeps it" "0.004 to"
no "Megatron's name" "parametrization mup" plan --use-mup
