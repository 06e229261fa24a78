#!/usr/bin/env bash
# Low-rank adapters from the command line: training, also with dropout and in FP8; resume to the same bits; eval, generate
# and merge; the base model stays unchanged; bad input is refused by name.
#   TRAIN_GPT=path/to/train_gpt test/lora_test.sh
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

kings 200 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents line
declare -A family=(
    [llama]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2"
    [mixture]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 5"
    [gpt-oss]="--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 5 --activation clamped-swiglu --add-qkv-bias --add-proj-bias --add-mlp-bias --softmax-type learnable"
    [granite]="--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 5 --embedding-scale 3"
    [gpt2]="" [bloom]="--position-embedding-type alibi --embed-layernorm")
train() { ${MPI:-} "$program" train --data-path text --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --threads 1 --split "90, 10, 0" "$@"; }
near() { awk -v a="$1" -v b="$2" -v d="$3" 'BEGIN { exit !(a != "" && b != "" && a - b < d && b - a < d) }'; }
below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && a < b) }'; }

for name in llama gpt2 bloom mixture gpt-oss granite; do
    # shellcheck disable=SC2086
    expect "$name: a model" train ${family[$name]} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --train-iters 4 --lr 1e-3 --out "$name"
    before=$(cat "$name"/latest/*.safetensors | cksum)
    lora=(--model "$name" --lora-rank 4 --train-iters 12 --lr 1e-2)
    expect "$name: adapters on all matrices" train "${lora[@]}" --save-every 4 --keep 0 --out "$name-lora"
    says "$name: the plan has frozen parameters" "parameters (frozen)"
    says "$name: and counts its operations" "FLOPs per token  *[0-9.]*[KM] "
    expect "$name: the model is as it was" test "$before" == "$(cat "$name"/latest/*.safetensors | cksum)"
    expect "$name: resumed in the middle" train --resume "$name-lora/step_00000004" --train-iters 12 --lr 1e-2 --out "$name-resumed"
    expect "$name: to the same bits" same_tensors "$name-lora" "$name-resumed"
    plain=$(loss_of --model "$name") adapted=$(loss_of --model "$name" --adapter "$name-lora")
    expect "$name: adapters lower the loss ($plain to $adapted)" below "$adapted" "$plain"
    expect "$name: without --model: on the one that they name" test "$(loss_of --adapter "$name-lora/latest")" == "$adapted"
    expect "$name: the table" "$program" eval --text text.txt --adapter "$name-lora"
    says "$name: names both" "Evaluation of .*/$name/step_00000004 with the adapters $name-lora/step_00000012"
    expect "$name: the run is intact" "$program" inspect "$name-lora"
    says "$name: with its adapters" "^ *rank  *4$"
    says "$name: and its state" "^ *step  *12$"
    expect "$name: so is one checkpoint" "$program" inspect "$name-lora/step_00000004"
    says "$name: by its checksums" "all files are as they were written"
    expect "$name: merge" "$program" export --merge --adapter "$name-lora" --out "$name-merged/"
    merged=$(loss_of --model "$name-merged")
    expect "$name: merged computes the same ($merged)" near "$merged" "$adapted" 0.02
    expect "$name: is intact" "$program" inspect "$name-merged"
    expect "$name: writes text" "$program" generate --adapter "$name-lora" --prompt "in the year" --max-new-tokens 5
done

# ---- samples longer than the model's maximum: as if config.json allowed them, unless positions are learned ----
for name in llama bloom; do
    cp -r "$(realpath "$name/latest")" "$name-longer"
    sed -i 's/"\(max_position_embeddings\|seq_length\)": 24/"\1": 60/' "$name-longer/config.json"
    for of in "" "--adapter $name-lora"; do
        # shellcheck disable=SC2086
        longer=$(loss_of --model "$name-longer" $of --seq-length 60)
        # shellcheck disable=SC2086
        expect "$name: samples of 60 tokens ${of:+with adapters }have the loss $longer" test "$(loss_of --model "$name" $of --seq-length 60)" == "${longer:-none}"
    done
    expect "$name: as a table" "$program" eval --text text.txt --model "$name" --seq-length 60
    says "$name: it says so" "warning: --seq-length 60 is above the model's longest sequence 24"
done
no "longer samples of learned positions" "longest sequence 24" "$program" eval --text text.txt --model gpt2 --seq-length 60

# ---- a model whose files are fp32 ----
mkdir fp32 two-files && cp llama/latest/*.json fp32 && rm fp32/manifest.json && cp llama-lora/latest/adapter_* two-files
cp llama/latest/training/master.safetensors fp32/model.safetensors 2>/dev/null || cp llama/latest/model.safetensors fp32
expect "merge into fp32" "$program" export --merge --model fp32 --adapter two-files --out fp32-merged
expect "its files" "$program" inspect fp32-merged/model.safetensors
says "are fp32" "lm_head.weight .*F32"
expect "and it says so" grep -q '"torch_dtype": "float32"' fp32-merged/config.json

# ---- one process started by a launcher; a damaged checkpoint ----
expect "merge under mpirun" "${MPIRUN:-mpirun}" -n 1 "$program" export --merge --adapter llama-lora --out launched-merged
expect "the same model" cmp launched-merged/model.safetensors llama-merged/model.safetensors
cp -r llama-lora spoiled
printf x | dd of="$(realpath spoiled/latest)/adapter_model.safetensors" bs=1 seek=900 conv=notrunc 2>/dev/null
expect "a damaged adapter" refused "$program" inspect spoiled
says "is told" "adapter_model.safetensors is damaged"

# ---- dropout on the adapters' input ----
dropped=(--model llama --lora-rank 4 --lora-dropout 0.2 --train-iters 6 --lr 1e-2)
expect "dropout" train "${dropped[@]}" --save-every 3 --keep 0 --out dropped
says "the plan says so" "dropout 0.2"
expect "PEFT is told" grep -q '"lora_dropout": 0.2' dropped/latest/adapter_config.json
expect "resumed in the middle" train --resume dropped/step_00000003 --train-iters 6 --lr 1e-2 --out dropped-resumed
expect "the same masks" same_tensors dropped dropped-resumed
no "another dropout of adapters" "dropout 0.2.*omit the options" train --resume dropped/step_00000003 --train-iters 6 --lora-dropout 0.5 --out dropped-other
expect "recomputed, one sample at a time" train "${dropped[@]}" --recompute full --micro-batch-size 1 --out dropped-ones
expect "the same losses" near_losses dropped dropped-ones 6 0.01
expect "another sum of roundings than without dropout" refused near_losses dropped llama-lora 6 0.001

# ---- experts: each has adapters of its own, named as in PEFT ----
experts=(--model mixture --lora-rank 4 --lora-dropout 0.2 --train-iters 6 --lr 1e-2)
expect "experts" train "${experts[@]}" --out experts
expect "a file with a matrix of each" "$program" inspect experts/latest/adapter_model.safetensors
says "the last one" "layers.1.block_sparse_moe.experts.4.w3.lora_B.weight"
expect "PEFT's names of them" grep -q '"w1"' experts/latest/adapter_config.json
for options in "--recompute full --micro-batch-size 1" "--lora-targets w2 o"; do
    # shellcheck disable=SC2086
    expect "experts $options" train "${experts[@]}" $options --out experts-other
    [[ $options == *targets* ]] || expect "experts $options: the same losses" near_losses experts experts-other 6 0.01
    rm -rf experts-other
done
# shellcheck disable=SC2086
for layout in "--tp 2" "--tp 2 --no-sequence-parallel" "--pp 2"; do
    MPI="${MPIRUN:-mpirun} -n 2" expect "experts $layout" train "${experts[@]}" $layout --out experts-two
    expect "experts $layout: the same losses" near_losses experts experts-two 6 0.02
    rm -rf experts-two
done
# ---- experts in one tensor: PEFT's parameters ----
expect "PEFT's parameters" grep -q '"block_sparse_moe.experts.gate_up_proj"' granite-lora/latest/adapter_config.json
expect "a file of both" "$program" inspect granite-lora/latest/adapter_model.safetensors
says "gate and up are the inner one" "layers.1.block_sparse_moe.experts.base_layer.lora_B.weight"
for name in gpt-oss granite; do
    stacked=(--model "$name" --lora-rank 4 --train-iters 6 --lr 1e-2)
    expect "$name: one rank" train "${stacked[@]}" --out stacked
    expect "$name: only down" train "${stacked[@]}" --lora-targets down --out stacked-down
    expect "$name: PEFT needs no modules" grep -q '"target_modules": \[\]' stacked-down/latest/adapter_config.json
    expect "$name: loaded by its name" "$program" eval --text text.txt --adapter stacked-down
    # shellcheck disable=SC2086
    for layout in "2 --tp 2" "2 --tp 2 --no-sequence-parallel" "2 --pp 2" "2 --zero 1"; do
        read -r n options <<<"$layout"
        MPI="${MPIRUN:-mpirun} -n $n" expect "$name $layout" train "${stacked[@]}" $options --out stacked-two
        expect "$name $layout: the same losses" near_losses stacked stacked-two 6 0.02
        rm -rf stacked-two
    done
    no "$name: dropout" "lora-dropout 0.1 and adapters on .*experts.gate_up_proj cannot be combined.*lora-targets qkv proj" train "${stacked[@]}" --lora-dropout 0.1 --out x
    cp -r "$(realpath stacked-down)/latest/." "$name-some" && rm -f "$name-some/manifest.json"
    sed -i 's/"[a-z_.]*experts.down_proj"/"layers.1.mlp.router.weight"/' "$name-some/adapter_config.json"
    no "$name: another parameter" "'target_parameters' .*router.weight.* is not supported; HINT: PEFT merges" "$program" eval --text text.txt --model "$name" --adapter "$name-some"
    rm -rf stacked stacked-down
done
expect "dropout on attention" train --model gpt-oss --lora-rank 4 --lora-dropout 0.1 --lora-targets qkv proj --train-iters 2 --out x-attention

# PEFT's ranks and scales may differ by expert. `cut` lacks the adapter of an expert that `whole` has with zeros.
python3 - <<'END'
import json, os, struct
source = open("experts/latest/adapter_model.safetensors", "rb").read()
(n,) = struct.unpack("<Q", source[:8])
header, data = json.loads(source[8 : 8 + n]), source[8 + n :]
config = json.load(open("experts/latest/adapter_config.json"))
for out, is_cut in [("cut-experts", True), ("whole-experts", False), ("other-experts", False)]:
    tensors, rows = {}, b""
    for name, t in header.items():
        if name == "__metadata__":
            continue
        x = data[slice(*t["data_offsets"])]
        if "layers.1.block_sparse_moe.experts.2.w1." in name:
            if is_cut:
                continue
            x = bytes(len(x)) if out == "whole-experts" else x
        tensors[name] = {"dtype": t["dtype"], "shape": t["shape"], "data_offsets": [len(rows), len(rows) + len(x)]}
        rows += x
    os.mkdir(out)
    text = json.dumps(tensors).encode()
    open(out + "/adapter_model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + rows)
    json.dump(config | ({"target_modules": r".*(w1|w2|w3|proj)"} if is_cut else {}), open(out + "/adapter_config.json", "w"))
END
expect "an expert without an adapter has zeros" test "$(loss_of --model mixture --adapter cut-experts)" == "$(loss_of --model mixture --adapter whole-experts)"
expect "which are not its numbers" test "$(loss_of --model mixture --adapter cut-experts)" != "$(loss_of --model mixture --adapter other-experts)"
sed -i 's/"target_modules": "[^"]*"/"target_modules": ["w1", "w2", "w3", "q_proj", "k_proj", "v_proj", "o_proj"]/' cut-experts/adapter_config.json
no "an expert's adapter is missing" "no adapter for block_sparse_moe.experts.2.w1 of layer 1" "$program" eval --text text.txt --model mixture --adapter cut-experts
sed -i 's/"target_parameters": null/"target_parameters": ["mlp.experts.gate_up_proj"]/' other-experts/adapter_config.json
no "parameters that the file does not adapt" "no adapter for mlp.experts.gate_up_proj of layer 0, which 'target_parameters'" "$program" eval --text text.txt --model mixture --adapter other-experts
no "adapters on a router" "no matrix 'router' for --lora-targets" train --model mixture --lora-rank 4 --lora-targets router --train-iters 2 --out x
# DPO on it, and the plan of a large one
expect "the plan of a large one" "$program" train --preset mixtral-8x7b --vocab-size 32000 --world 8 --tp 8 --seq-length 4096 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lora-rank 16 --dry-run
says "counts its adapters" "experts.w2; 240M"

# ---- in FP8: only the frozen weights' products ----
fp8=(--model fp8 --lora-rank 4 --train-iters 12 --lr 1e-2)
# shellcheck disable=SC2086
expect "a model of multiples of 16" train ${family[llama]} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --tokenizer tok --train-iters 4 --lr 1e-3 --seq-length 32 --out fp8
expect "adapters in bf16 beside it" train "${fp8[@]}" --seq-length 32 --out fp8-none
for options in "" "--fp8-recipe current" "--fp8-start 5" "--lora-targets q v"; do
    # shellcheck disable=SC2086
    expect "FP8 $options" train "${fp8[@]}" --seq-length 32 --fp8 hybrid --out fp8-lora $options
    [[ $options == *targets* ]] || expect "FP8 $options: bf16's losses, nearly" near_losses fp8-none fp8-lora 12 0.1
    expect "FP8 $options: it is another arithmetic" refused near_losses fp8-none fp8-lora 12 0.00001
    # shellcheck disable=SC2086
    expect "FP8 $options, recomputed" train "${fp8[@]}" --seq-length 32 --fp8 hybrid --recompute selective --out fp8-recomputed $options
    expect "FP8 $options, recomputed: the same bits" same_tensors fp8-lora fp8-recomputed
    rm -rf fp8-lora fp8-recomputed
done

# shellcheck disable=SC2086
for options in "" current; do
    both=(train "${fp8[@]}" --seq-length 32 --fp8 hybrid --lora-dropout 0.2 ${options:+--fp8-recipe "$options"})
    expect "FP8 and dropout $options" "${both[@]}" --out one
    for layout in "--tp 2" "--tp 2 --no-sequence-parallel" "--pp 2"; do
        MPI="${MPIRUN:-mpirun} -n 2" expect "two ranks $layout $options" "${both[@]}" $layout --out two
        expect "their losses $layout $options" near_losses one two 12 0.01
        rm -rf two
    done
    rm -rf one
done

# ---- a quantized base (QLoRA) ----
# shellcheck disable=SC2086
expect "a model of multiples of 256" train ${family[llama]} --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --tokenizer tok --train-iters 4 --lr 1e-3 --seq-length 32 --out wide
expect "adapters on it in bf16" train --model wide --lora-rank 4 --train-iters 12 --lr 1e-2 --seq-length 32 --out wide-none
for format in nf4 nf4-double q8_0 q4_k q6_k; do
    model=fp8
    [[ $format == @(nf4-double|q?_k) ]] && model=wide
    coded=(train --model "$model" --lora-rank 4 --train-iters 12 --lr 1e-2 --seq-length 32 --quantize-base "$format")
    expect "$format" "${coded[@]}" --save-every 4 --keep 0 --out "$format"
    says "$format: the plan has its memory" "parameters (frozen, $format)"
    expect "$format: bf16's losses, nearly" near_losses $model-none "$format" 12 0.1
    expect "$format: other weights" refused near_losses $model-none "$format" 12 0.00001
    expect "$format: resumed in the middle" train --resume "$format/step_00000004" --train-iters 12 --lr 1e-2 --seq-length 32 --out "$format-resumed"
    expect "$format: to the same bits" same_tensors "$format" "$format-resumed"
    expect "$format: recomputed" "${coded[@]}" --recompute full --out "$format-full"
    expect "$format: the same bits" same_tensors "$format" "$format-full"
    no "$format: another base on resuming" "override quantize-base" train --resume "$format/step_00000004" --quantize-base none --train-iters 12 --lr 1e-2 --seq-length 32 --out x
    expect "$format: which --override allows" train --resume "$format/step_00000004" --quantize-base none --override quantize-base --train-iters 12 --lr 1e-2 --seq-length 32 --out "$format-none"
    adapted=$(loss_of --adapter "$format")
    cp -rL "$format/latest" "$format-plain" && rm -f "$format-plain/manifest.json" && python3 -c "
import json; p = '$format-plain/base.json'; j = json.load(open(p)); assert j.pop('quantized') == '$format'; json.dump(j, open(p, 'w'))"
    expect "$format: eval has the base that was trained on" test "$(loss_of --adapter "$format-plain")" != "$adapted"
    expect "$format: unless told otherwise" test "$(loss_of --adapter "$format" --quantize-base none)" == "$(loss_of --adapter "$format-plain")"
    quantized=$(loss_of --model $model --quantize-base "$format") plain=$(loss_of --model $model)
    expect "$format: of the model itself, a loss near its own ($quantized, $plain)" near "$quantized" "$plain" 0.05
    expect "$format: and another one" test "$quantized" != "$plain"
    expect "$format: which writes text" "$program" generate --model $model --quantize-base "$format" --prompt "in the year" --max-new-tokens 5
    expect "$format: merge" "$program" export --merge --adapter "$format" --out "$format-merged"
    says "$format: says into what" "weights after $format"
    merged=$(loss_of --model "$format-merged")
    expect "$format: merged computes the same ($merged, $adapted)" near "$merged" "$adapted" 0.005
    expect "$format: writes text" "$program" generate --adapter "$format" --prompt "in the year" --max-new-tokens 5
    layouts=("--pp 2")
    [[ $format != q8_0 ]] || layouts+=("--tp 2" "--tp 2 --no-sequence-parallel")
    for layout in "${layouts[@]}"; do
        # shellcheck disable=SC2086
        MPI="${MPIRUN:-mpirun} -n 2" expect "$format: two ranks $layout" "${coded[@]}" $layout --out two
        expect "$format: their losses $layout" near_losses "$format" two 12 0.01
        rm -rf two
    done
done
expect "virtual tokens on a quantized base" train --model fp8 --prompt-tokens 4 --train-iters 2 --seq-length 28 --quantize-base nf4 --out nf4-prompt
MPI="${MPIRUN:-mpirun} -n 2" no "matrices that ranks would split" "nf4-double requires whole matrices.*2 tensor-parallel ranks.*HINT: --quantize-base nf4" train --model wide --lora-rank 4 --train-iters 2 --seq-length 32 --quantize-base nf4-double --tp 2 --out x
MPI="${MPIRUN:-mpirun} -n 2" no "blocks that ranks would split" "whole blocks of 64.*2 tensor-parallel ranks" train --model fp8 --lora-rank 4 --train-iters 2 --seq-length 32 --quantize-base nf4 --tp 2 --out x
no "a width without whole blocks" "whole blocks of 64.*width: 32" train --model llama --lora-rank 4 --train-iters 2 --quantize-base nf4 --out x
no "a quantized model whose weights are trained" "quantize-base nf4 requires a frozen model; HINT: --lora-rank 16" train --model fp8 --train-iters 2 --seq-length 32 --quantize-base nf4 --out x
no "FP8 with it" "quantize-base nf4 and --fp8-format" train --model fp8 --lora-rank 4 --fp8 hybrid --train-iters 2 --seq-length 32 --quantize-base nf4 --out x
no "a mixture of experts" "quantize-base nf4 and a mixture of experts" train --preset mixtral-8x7b --lora-rank 4 --vocab-size 300 --seq-length 32 --quantize-base nf4 --train-iters 2 --dry-run --world 1 --out x

no "a mixture of experts for inference" "quantize-base q8_0 and a mixture of experts" "$program" eval --text text.txt --model mixture --quantize-base q8_0

# ---- refused ----
# Adapters name their model, which is computed as it was saved: an option that changes it would be lost.
for option in "window-size 5" "activation geglu" "norm-epsilon 1e-3" "rotary-base 500" "rope-scaling linear" "apply-layernorm-1p" "final-logit-softcapping 5"; do
    # shellcheck disable=SC2086
    no "--$option" "--${option%% *} changes the model under the adapters.*omit it" train --model llama --lora-rank 4 --$option --train-iters 2 --out x
done
expect "options that the model has: it trains" train --model llama --lora-rank 4 --swiglu --position-embedding-type rope --hidden-dropout 0.1 --train-iters 2 --out same-model
no "rank 0" "lora-rank" train --model llama --lora-rank 0 --train-iters 2 --out x
no "a rank above that of every matrix" "at most 32" train --model llama --lora-rank 33 --train-iters 2 --out x
no "dropout of everything" "lora-dropout" train --model llama --lora-rank 4 --lora-dropout 1 --train-iters 2 --out x
no "dropout without adapters" "lora-dropout requires --lora-rank" train --model llama --lora-dropout 0.1 --train-iters 2 --out x
no "an unknown matrix, with the list" "all, self_attn.q_proj, q_proj, qkv, q," train --model llama --lora-rank 4 --lora-targets query --train-iters 2 --out x
no "a part that GPT-2 does not store alone" "attn.c_attn" train --model gpt2 --lora-rank 4 --lora-targets q --train-iters 2 --out x
no "no model" "lora-rank requires --model DIR" train --preset llama-tiny --vocab-size 300 --lora-rank 4 --train-iters 2 --out x
no "alpha without a rank" "lora-alpha requires --lora-rank; HINT: add that" train --model llama --lora-alpha 4 --train-iters 2 --out x
no "Muon" "optimizer adamw" train --model llama --lora-rank 4 --optimizer muon --train-iters 2 --out x
no "another rank on resuming" "rank 4, alpha 8" train --resume llama-lora/latest --lora-rank 8 --train-iters 14 --lr 1e-2 --out x
no "adapters in a run of the whole model" "trains the whole model" train --resume llama/latest --lora-rank 4 --train-iters 14 --out x
no "another base" "are not the ones that the adapters" "$program" eval --text text.txt --model llama-merged --adapter llama-lora
no "another base on resuming" "are not the ones that the adapters" train --resume llama-lora/latest --model llama-merged --train-iters 14 --lr 1e-2 --out x
no "a base of another family" "are not the ones that the adapters" "$program" eval --text text.txt --model gpt2 --adapter llama-lora
no "adapters as a model" "holds adapters, not a model" "$program" eval --text text.txt --model llama-lora
no "which can be merged" "export --merge --adapter llama-lora" "$program" export --gguf x.gguf --model llama-lora
no "a model as adapters" "holds no adapters" "$program" eval --text text.txt --adapter llama
no "export without a form" "gguf FILE.gguf, or --out DIR" "$program" export --model llama
expect "export of a model's files" "$program" export --model llama --out slim
expect "without the state of its training" test ! -e slim/training -a -e slim/model.safetensors
expect "with their checksums" "$program" inspect slim
says "which agree" "all files are as they were written"
expect "the same model" cmp slim/model.safetensors llama/latest/model.safetensors
no "export of a model's files with a type" "type requires --gguf" "$program" export --model llama --out slim2 --type f32
no "export over a directory" "already exists" "$program" export --merge --adapter llama-lora --out llama
for content in '[]' '{"path": 3, "files": 5}' '{'; do
    rm -rf damaged && cp -rL llama-lora/latest damaged && echo "$content" >damaged/base.json
    no "base.json $content" "base.json is \(damaged\|not valid\)" "$program" eval --text text.txt --adapter damaged
done
mkdir peft && cp llama-lora/latest/adapter_* peft
expect "PEFT's two files suffice" "$program" eval --text text.txt --model llama --adapter peft
no "without base.json, another family by its names" "no adapter for a layer" "$program" eval --text text.txt --model gpt2 --adapter peft
for change in 's/"LORA"/"IA3"/ peft_type' 's/"r": 4/"r": 0/ must.be.at.least.1' 's/"r": 4/"r": 8/ has.rank.4' 's/"bias": "none"/"bias": "all"/ bias' \
    's/"lora_alpha": 8.0/"lora_alpha": 1e300/ from.-1000000.to.1000000' \
    's/"lora_dropout": 0.0/"lora_dropout": 1.5/ from.0.to.0.99' 's/"r": 4,/"r": 4;/ JSON:.at.line' \
    's/"inference_mode"/"use_dora": true, "inference_mode"/ use_dora' 's/"inference_mode"/"rank_pattern": {"q_proj": 2}, "inference_mode"/ has.rank.4' \
    's/"inference_mode"/"alpha_pattern": {"q_.*": 2}, "inference_mode"/ regular.expression' 's/"inference_mode"/"rank_pattern": {"q_proj": 0.5}, "inference_mode"/ whole.number' \
    's/"r": 4/"r":9999999/ gives.it.rank.9999999' 's/"inference_mode"/"layers_to_transform": 0, "inference_mode"/ has.an.adapter.of.1.self_attn.q_proj' \
    's/"inference_mode"/"layers_to_transform": [7], "inference_mode"/ has.an.adapter.of.0.self_attn.q_proj' \
    's/"inference_mode"/"layers_to_transform": "0", "inference_mode"/ a.list.of.layers' \
    's/"bias"/"target_modules": ["attention"], "bias"/ does.not.name.0.' 's/"bias"/"target_modules": [], "bias"/ does.not.name.0.' \
    's/"q_proj",// does.not.name.0.self_attn.q_proj' \
    's/"bias"/"target_modules": [7], "bias"/ a.list.of.names' 's/"bias"/"target_modules": {}, "bias"/ a.list.of.names' \
    's/"bias"/"exclude_modules": 3, "bias"/ a.list.of.names' 's/"base_model_name_or_path": .*/"base_model_name_or_path": 3,/ a.text.is.expected' \
    's/true,$/1.5,/ true,.false.or.a.string' \
    's/true,$/"pissa",/ init_lora_weights'; do
    sed "${change% *}" llama-lora/latest/adapter_config.json >peft/adapter_config.json
    no "adapter_config.json ${change% *}" "${change##* }" "$program" eval --text text.txt --model llama --adapter peft
done
# PEFT's adapters may differ: by rank and scale (rank_pattern, alpha_pattern) and in the layers that have them. `cut` has two of
# four ranks of q_proj, twice its scale in layer 0, and no v_proj in layer 1; `whole` has zeros and doubled numbers instead.
python3 - <<'END'
import json, os, struct
source = open("llama-lora/latest/adapter_model.safetensors", "rb").read()
(n,) = struct.unpack("<Q", source[:8])
header, data = json.loads(source[8 : 8 + n]), source[8 + n :]
config = json.load(open("llama-lora/latest/adapter_config.json"))
patterns = {"rank_pattern": {r"self_attn\.q_proj": 2}, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 8, "q_proj": 4}}
for out, is_cut in [("cut", True), ("whole", False)]:
    tensors, rows_of = {}, b""
    for name, t in header.items():
        if name == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        (rows, cols), x = t["shape"], data[begin:end]
        size = len(x) // (rows * cols)
        if "layers.1.self_attn.v_proj" in name:
            if is_cut:
                continue
            x = bytes(len(x))
        if ".q_proj.lora_A" in name:
            half = 2 * cols * size
            x = x[:half] + (b"" if is_cut else bytes(len(x) - half))
            rows = 2 if is_cut else rows
        elif ".q_proj.lora_B" in name and is_cut:
            x = b"".join(x[r * cols * size : (r * cols + 2) * size] for r in range(rows))
            cols = 2
        elif ".q_proj.lora_B" in name and "layers.0" in name:
            wide = [struct.unpack("<f", b"\0" * (4 - size) + x[i : i + size])[0] for i in range(0, len(x), size)]
            x = b"".join(struct.pack("<f", 2 * v)[4 - size :] for v in wide)
        tensors[name] = {"dtype": t["dtype"], "shape": [rows, cols], "data_offsets": [len(rows_of), len(rows_of) + len(x)]}
        rows_of += x
    os.makedirs(out)
    text = json.dumps(tensors).encode()
    open(out + "/adapter_model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + rows_of)
    regex = {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"}  # a list would promise v_proj of layer 1
    json.dump({**config, **({**patterns, **regex} if is_cut else {})}, open(out + "/adapter_config.json", "w"))
END
expect "adapters that differ between matrices" test "$(loss_of --model llama --adapter cut)" = "$(loss_of --model llama --adapter whole)"
expect "they count" test "$(loss_of --model llama --adapter cut)" != "$(loss_of --model llama --adapter llama-lora)"
cp -r cut listed && sed 's/"target_modules": "[^"]*"/"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]/' cut/adapter_config.json >listed/adapter_config.json
no "adapters that the configuration promises" "has no adapter for self_attn.v_proj of layer 1, which 'target_modules' in" "$program" eval --text text.txt --model llama --adapter listed
for part in A B; do
    rm -rf half && cp -r peft half && cp llama-lora/latest/adapter_config.json half
    python3 - $part <<'END'
import json, struct, sys
source = open("llama-lora/latest/adapter_model.safetensors", "rb").read()
(n,) = struct.unpack("<Q", source[:8])
text = source[8 : 8 + n].decode().replace(f"layers.1.self_attn.v_proj.lora_{sys.argv[1]}.", f"layers.1.self_attn.w_proj.lora_{sys.argv[1]}.")
open("half/adapter_model.safetensors", "wb").write(source[:8] + text.encode() + source[8 + n :])
END
    no "adapters without a half: $part" "has the tensor '.*layers.1.self_attn.[vw]_proj.lora_[AB].weight', but no '.*layers.1.self_attn.[vw]_proj.lora_[AB].weight'" "$program" eval --text text.txt --model llama --adapter half
done
expect "they are merged" "$program" export --merge --model llama --adapter cut --out merged-cut
expect "as the whole ones" "$program" export --merge --model llama --adapter whole --out merged-whole
expect "into the same weights" cmp merged-cut/model.safetensors merged-whole/model.safetensors
no "adapters as a file of llama.cpp" "first, then --model DIR --gguf FILE" "$program" export --adapter llama-lora --gguf x.gguf
no "a type of a directory" "type requires --gguf; HINT" "$program" export --merge --adapter llama-lora --out x --type q8_0
no "a directory and a file at once" "merge --out DIR first" "$program" export --merge --adapter llama-lora --out x --gguf x.gguf
