#!/usr/bin/env bash
# A GGUF file as the model: eval, generate, adapters on its codes, and training its weights have the results of the model that
# import writes from it, to the last bit.
#   TRAIN_GPT=path/to/train_gpt test/gguf_base_test.sh
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

kings 200 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok --split-documents line
train() { ${MPI:-} "$program" train --data-path text --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --threads 1 --split "90, 10, 0" "$@"; }
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2)
sizes=(--num-layers 2 --num-attention-heads 4 --tokenizer tok --train-iters 4 --lr 1e-3)
expect "a Llama" train "${llama[@]}" "${sizes[@]}" --hidden-size 256 --ffn-hidden-size 512 --out llama
expect "a GPT-2" train "${sizes[@]}" --hidden-size 256 --out gpt2

# Layer 1 has its values and down projections in Q6_K; rows of 64 have Q8_0.
for name in llama gpt2; do
    for type in q4_k_m q8_0; do
        file=$name-$type.gguf dir=$name-$type
        expect "$file" "$program" export --model "$name" --gguf "$file" --type $type
        expect "$dir" "$program" import --gguf "$file" --out "$dir"
        coded=$(loss_of --model "$file") widened=$(loss_of --model "$dir")
        expect "$file: import's loss ($coded, $widened)" test "$coded" == "$widened" -a -n "$coded"
        expect "$file: another one than the model's" test "$coded" != "$(loss_of --model $name)"
        expect "$file: as numbers" test "$coded" == "$(loss_of --model "$file" --quantize-base none)"
        lora=(--lora-rank 4 --train-iters 6 --lr 1e-2)
        expect "$file: adapters" train --model "$file" "${lora[@]}" --save-every 3 --keep 0 --out "$dir-lora"
        says "$file: the plan has its codes" "parameters (frozen, gguf)"
        expect "$dir: adapters" train --model "$dir" "${lora[@]}" --out "$dir-wide"
        expect "$file: the same bits" same_tensors "$dir-lora" "$dir-wide"
        expect "$file: resumed" train --resume "$dir-lora/step_00000003" --train-iters 6 --lr 1e-2 --out "$dir-resumed"
        expect "$file: to the same bits" same_tensors "$dir-lora" "$dir-resumed"
        expect "$file: its adapters find it" test "$(loss_of --adapter "$dir-lora")" == "$(loss_of --adapter "$dir-wide")"
        expect "$file: text" "$program" generate --adapter "$dir-lora" --prompt "in the year" --max-new-tokens 5
        expect "$file: merge" "$program" export --merge --adapter "$dir-lora" --out "$dir-merged"
    done
done
expect "no temporary directories stay" test -z "$(find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'train_gpt-gguf-*' -newer text.txt)"
expect "its tokenizer" "$program" prepare --input text.txt --output again --tokenizer llama-q8_0.gguf --split-documents line
expect "gives the same tokens" cmp text.bin again.bin
expect "requantized" train --model llama-q8_0.gguf "${lora[@]}" --quantize-base nf4 --out nf4
says "in NF4" "parameters (frozen, nf4)"
expect "trained as a whole" train --model llama-q8_0.gguf --train-iters 2 --out whole
for ratio in 0 0.5; do
    upcycled=(--num-experts 3 --moe-use-upcycling --moe-upcycling-drop-ratio "$ratio" --train-iters 1 --lr 1e-20)
    expect "experts from a file, $ratio new" train --model llama-q8_0.gguf "${upcycled[@]}" --out "experts-$ratio"
    expect "experts from a directory, $ratio new" train --model llama-q8_0 "${upcycled[@]}" --out "experts-wide-$ratio"
    expect "experts, $ratio new: the same bits" same_tensors "experts-$ratio" "experts-wide-$ratio"
done
MPI="${MPIRUN:-mpirun} -n 2" no "several ranks" "model llama-q8_0.gguf and several ranks.*import --gguf" train --model llama-q8_0.gguf "${lora[@]}" --pp 2 --out x
no "codes of a model that has none" "quantize-base gguf requires --model with a GGUF file" train --model llama "${lora[@]}" --quantize-base gguf --out x
no "the same for inference" "quantize-base gguf requires --model with a GGUF file" "$program" eval --text text.txt --model llama --quantize-base gguf
expect "a mixture" train "${llama[@]}" "${sizes[@]}" --hidden-size 64 --num-experts 4 --out mixture
expect "its file" "$program" export --model mixture --gguf mixture.gguf
no "a mixture of experts" "train_gpt import --gguf mixture.gguf" "$program" eval --text text.txt --model mixture.gguf
mv llama-q8_0.gguf moved.gguf
no "a file that is gone" "base model of the adapters.*is missing" "$program" eval --text text.txt --adapter llama-q8_0-lora
