#!/usr/bin/env bash
# train_gpt tune as a user runs it: published layouts compared with the best it finds, its files, trials, and refusals.
gpu=$(realpath "${GPU_TRAIN_GPT:-build/emu-bf16/tests/train_gpt}")
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

# number JSON-KEY FILE: the first value of this key.
number() { grep -m 1 "\"$1\":" "$2" | sed 's/.*: *//; s/,$//'; }

# Published layouts. Each one's step time, by the plan, is at most 10% above the best that the search finds for the same
# training on the same GPUs. MT-NLG and BLOOM recomputed all layers, and sequence parallelism was not known; LLM-jp could
# have been faster with more memory, so the search is limited to its layout's memory, by the plan with 1.8 GiB for NCCL.
published() { # NAME LAYOUT... -- TRAINING...
    local name=$1 layout=() step best
    shift
    while [[ $1 != -- ]]; do layout+=("$1"); shift; done
    shift
    "$program" train "$@" "${layout[@]}" --dry-run --json >plan.json 2>plan.err
    "$program" tune "$@" --dry-run --json >best.json 2>best.err
    step=$(grep -A 1 '"step": {' plan.json | number seconds /dev/stdin)
    best=$(sed -n '/"best"/,$p' best.json | number seconds /dev/stdin)
    awk -v step="$step" -v best="$best" 'BEGIN { exit !(best > 0 && step >= best * (1 - 1e-9) && step <= 1.1 * best) }' &&
        echo "ok: $name: $step s published, $best s found" || { echo "FAILED: $name: '$step' s published, '$best' s found"; cat ./*.err; }
}
published "MT-NLG 530B on 2,240 A100" --tp 8 --pp 35 --micro-batch-size 1 -- --preset mt-nlg-530b --seq-length 2048 \
    --device a100 --global-batch-size 1920 --rampup-batch-size 32 32 5859375 --train-samples 131835938 --world 2240 \
    --recompute full --no-sequence-parallel
published "BLOOM 176B on 384 A100" --tp 4 --pp 12 --micro-batch-size 2 -- --preset bloom-176b --seq-length 2048 --device a100 \
    --inter-node-gbs 6.25 --global-batch-size 2048 --train-samples 220000000 --world 384 --recompute full \
    --no-sequence-parallel --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
published "LLM-jp 172B on 512 H100" --tp 4 --pp 16 --micro-batch-size 1 -- --preset llm-jp-172b --seq-length 4096 \
    --global-batch-size 1728 --train-iters 292812 --world 512 --recompute selective --device-memory-gib 48

# NeMo's table of FP8 training on H100,
# docs.nvidia.com/nemo-framework/user-guide/24.09/performance/performance_summary.html; shapes of its 5B and 20B models from
# its configuration files.
on_h100=(--fp8-format hybrid --train-iters 100 --vocab-size)
published "NeMo GPT 5B on 64 H100" --tp 1 --pp 1 --micro-batch-size 4 -- --num-layers 24 --hidden-size 4096 \
    --num-attention-heads 32 --seq-length 2048 --global-batch-size 2048 --world 64 "${on_h100[@]}" 51200
published "NeMo GPT 20B on 64 H100" --tp 2 --pp 1 --micro-batch-size 2 -- --num-layers 44 --hidden-size 6144 \
    --num-attention-heads 48 --seq-length 2048 --global-batch-size 256 --world 64 "${on_h100[@]}" 51200
published "NeMo GPT 175B on 128 H100" --tp 4 --pp 8 --vpp 6 --micro-batch-size 1 -- --preset gpt3-175b \
    --seq-length 2048 --global-batch-size 256 --world 128 "${on_h100[@]}" 51200
published "NeMo GPT 175B on 512 H100" --tp 4 --pp 8 --vpp 6 --micro-batch-size 2 -- --preset gpt3-175b \
    --seq-length 2048 --global-batch-size 2048 --world 512 --device-memory-gib 83 "${on_h100[@]}" 51200
published "NeMo Llama 2 7B on 8 H100" --tp 1 --pp 1 --micro-batch-size 1 -- --preset llama2-7b \
    --seq-length 4096 --global-batch-size 128 --world 8 "${on_h100[@]}" 32000
published "NeMo Llama 2 13B on 16 H100" --tp 1 --pp 4 --vpp 10 --micro-batch-size 1 -- --preset llama2-13b \
    --seq-length 4096 --global-batch-size 128 --world 16 "${on_h100[@]}" 32000
published "NeMo Llama 2 70B on 64 H100" --tp 4 --pp 4 --vpp 20 --micro-batch-size 1 -- --preset llama2-70b \
    --seq-length 4096 --global-batch-size 128 --world 64 "${on_h100[@]}" 32000

run=(--preset llama2-7b --vocab-size 32000 --global-batch-size 512 --train-iters 100)
expect "a 7B model on 64 H100" "$program" tune "${run[@]}" --world 64 --tp 2 --out found
says "how many layouts, and how fast" "layouts in .* a second"
says "what is fixed" "fixed  *--tensor-model-parallel-size"
cp out.txt tuned.txt
says "the command for the best" "mpirun -n 64 --bind-to none ./train_gpt train --config found/tune-1.toml"
sed -n '/^The fastest/,/^found/p' tuned.txt >tables.txt
expect "the tables have at most 80 columns" awk 'length > 80 { bad = 1 } END { exit bad || NR < 10 }' tables.txt
expect "five layouts and a chart" test -s found/tune-5.toml -a -s found/tune.html
expect "the chart's axes have titles" grep -q ">memory of a rank, GiB</text>.*>time of a step, s</text>" found/tune.html
expect "the chart is drawn" grep -q '<path class="line train"' found/tune.html
expect "what was fixed is in each" test "$(grep -lx 'tensor-model-parallel-size = 2' found/tune-*.toml | wc -l)" == 5
expect "the best, planned by train" "$program" train --config found/tune-1.toml --world 64 --dry-run
says "has the same step" "step  *$(sed -n 's/^#   step  *\([0-9.]* [a-z]*\):.*/\1/p' found/tune-1.toml):"
expect "again: its own files are replaced" "$program" tune "${run[@]}" --world 64 --out found
expect "FP8 is searched where it is asked for" "$program" tune "${run[@]}" --world 64 --search-fp8 --out fp8
says "both are shown" "fp8 .*  *recompute"
expect "and in the file" grep -qx 'fp8-format = "hybrid"' fp8/tune-1.toml
expect "the energy is in its plan" grep -q '^#  *energy  *at most [0-9.]*[KM]* kWh' fp8/tune-1.toml
cp -r found mine
echo "lr = 1" >mine/tune-2.toml
expect "the user's file is not" refused "$program" tune "${run[@]}" --world 64 --out mine
says "it is named" "mine/tune-2.toml exists and was not written by tune"
expect "nothing was written" cmp mine/tune-1.toml found/tune-1.toml
expect "and it is as it was" test "$(cat mine/tune-2.toml)" == "lr = 1"
expect "--dry-run writes nothing" "$program" tune "${run[@]}" --world 8 --dry-run --out nothing
expect "no folder" test ! -e nothing

refuses() { # NAME PATTERN OPTIONS...
    local name=$1 pattern=$2
    shift 2
    expect "$name: refused" refused "$program" tune "$@" --out refused
    says "$name: says so" "$pattern"
}
refuses "a world that tp does not divide" "64 ranks cannot be divided by --tensor-model-parallel-size 3" "${run[@]}" --world 64 --tp 3
refuses "a micro-batch that divides nothing" "a global batch that micro-batches do not divide" "${run[@]}" --world 64 --micro-batch-size 7
refuses "too little memory" "closest layout needs .* on its fullest rank, which has 1.00 GiB: --tp .* more GPUs" "${run[@]}" --world 64 --device-memory-gib 1
refuses "too little memory here" "closest layout needs 1.*GiB on its fullest rank, which has [0-9.]* [MK]iB: --tp .* HINT: a smaller model" --preset gpt2-124m --vocab-size 50257 --train-iters 9 --global-batch-size 4 --threads 2 --device-memory-gib 0.9
refuses "steps of trials without trials" "trial-steps requires --trials; HINT: add that" "${run[@]}" --world 64 --trial-steps 7
refuses "a machine without figures" "--device is 'z80'; it must be one of a100" "${run[@]}" --world 64 --device z80
refuses "FP8 given and searched" "omit one of them" "${run[@]}" --world 8 --fp8-format hybrid --search-fp8
refuses "FP8 where there is none" "FP8 was requested for --device a100" "${run[@]}" --world 8 --search-fp8 --device a100
refuses "gradients on the host of several GPUs" "gradients is for one GPU, and the run has 8" "${run[@]}" --world 8 --offload gradients --main-grads-dtype bf16
refuses "no global batch" "number of samples per step, the same for every layout, is missing" --preset llama2-7b --vocab-size 32000 --train-iters 9 --world 8
refuses "no length" "length of the run is missing" --preset llama2-7b --vocab-size 32000 --global-batch-size 8 --world 8
refuses "trials elsewhere" "omit one of them" "${run[@]}" --world 8 --trials 2
refuses "a time budget" "time-budget applies to a single run" "${run[@]}" --time-budget 5m
refuses "trials without data" "HINT: --data-path" "${run[@]}" --trials 2
refuses "layers to recompute without recomputation" "requires --recompute-granularity" "${run[@]}" --world 8 --recompute-num-layers 2
refuses "NorMuon where memory is short" "HINT: .*device-memory-gib, or --main-grads-dtype bf16 --exp-avg-dtype bf16$" "${run[@]}" --world 64 --device-memory-gib 1 --optimizer normuon
expect "nothing was written by these" test ! -e refused

# Trials on this machine: the ranks of a trial run this program, too.
for i in $(seq 300); do echo "In the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep"; echo; done >text.txt
"$program" tokenizer --input text.txt --vocab-size 400 --output tok >/dev/null 2>&1
mkdir data
"$program" prepare --input text.txt --split-documents blank --tokenizer tok --output data/text >/dev/null 2>&1
here=(--preset llama-tiny --tokenizer tok --data-path data/text --seq-length 64 --global-batch-size 4 --train-iters 100
    --lr-warmup-iters 50 --threads 2)
expect "three are measured, with batches left out of the run" "$program" tune "${here[@]}" --skip-batches 1-4 --trials 3 --trial-steps 3 --out here
says "the plan against the measurement" "measured  *planned"
says "the plan is corrected" "measured  *3 trials in .*; a step takes [0-9.]* times the planned time"
on_gpus() { EMU_DEVICES=2 EMU_NAME=H100 EMU_MEMORY_MB=$1 "$gpu" tune "${here[@]:0:12}" --out "gpu-$1"; }
for memory in 143360:h200 81920:h100; do
    expect "two GPUs of ${memory%:*} MiB" on_gpus ${memory%:*}
    expect "are what has that memory" grep -q "on 2 x ${memory#*:}" "gpu-${memory%:*}/tune-1.toml"
done
expect "no other machine is named" refused grep -q h100 here/tune-1.toml
expect "three have a time" test "$(grep -lc '^# measured here: ' here/tune-*.toml | wc -l)" == 3
expect "nothing is left of them" test -z "$(find here -name 'trials-*')"
expect "the best trains, with the user's own options" "$program" train --config here/tune-1.toml --train-iters 60 --out trained
expect "its warm-up is the user's" grep -qx 'lr-warmup-iters = 50' here/tune-1.toml
if command -v mpirun >/dev/null; then
    expect "ranks are started for a trial" "$program" tune "${here[@]}" --tp 2 --trials 1 --trial-steps 2 --out ranks
    says "of two ranks" "mpirun -n 2 .* --config ranks/tune-1.toml"
    expect "which share the threads" grep -qx 'threads = 1' ranks/tune-1.toml
    expect "also where the variable of OpenMP says how many" env OMP_NUM_THREADS=2 "$program" tune "${here[@]}" --tp 2 --out "two words"
    says "the command is one that a shell takes" "--config 'two words/tune-1.toml'$"
    expect "two ranks share them" grep -qx 'threads = 1' "two words/tune-1.toml"
    echo '{"context": "In the year", "choices": [" 1", " the king"], "gold": 0}' >task.jsonl
    expect "tasks are not measured in trials" "$program" tune "${here[@]}" --tp 2 --eval-tasks task.jsonl --keep-every 5 --on-spike rollback --trials 1 --trial-steps 2 --out with-tasks
    expect "but the run has them" "$program" train --config with-tasks/tune-1.toml --world 2 --dry-run
    expect "in its file" grep -q "^eval-tasks = .*task.jsonl" with-tasks/tune-1.toml
fi
# The plan includes keys and values for generated answers to tasks.
echo '{"context": "In the year", "references": ["1"], "max_new_tokens": 4}' >written.jsonl
answering=("${here[@]}" --eval-tasks written.jsonl --world 2 --tp 1 --pp 1 --recompute none)
for micro in 1 2; do
    "$program" tune "${answering[@]}" --micro-batch-size $micro --out answering --json >answering.json 2>answering.err
    "$program" train --config answering/tune-1.toml --world 2 --dry-run --json >planned.json 2>planned.err
    planned=$(sed -n '/"memory_of_a_rank"/,$p' planned.json | number bytes /dev/stdin)
    expect "micro-batch $micro: $planned bytes, as train plans" test -n "$planned" -a "$(sed -n '/"best"/,$p' answering.json | number bytes /dev/stdin)" == "$planned.0"
done
# Generation speed, planned and measured.
writes=(--inference --seq-length 1024 --vocab-size 32000)
"$program" tune --preset llama2-7b "${writes[@]}" --world 8 --json --dry-run >writing.json 2>/dev/null
expect "several copies write the most" test "$(grep -A 4 '"best"' writing.json | number copies /dev/stdin)" -ge 4
expect "a token comes soonest from all eight" test "$(grep -A 5 '"front"' writing.json | number tensor_parallel /dev/stdin)" == 8
expect "a bound of its time" "$program" tune --preset llama2-7b "${writes[@]}" --world 8 --max-latency 4 --out bound
says "is kept" "Highest throughput within 4 ms per token"
expect "with a page" grep -q "No other choice is better in both" bound/inference.html
expect "and what was refused" grep -q ">Refused<" bound/inference.html
expect "one text at a time" "$program" tune --preset llama2-7b "${writes[@]}" --world 1 --batch 1 --out one
expect "nothing was refused: no such part" refused grep -q ">Refused<" one/inference.html
refuses "a bound that none keeps" "the shortest time per token is .* ms, with --tp 8" --preset llama2-7b "${writes[@]}" --world 8 --max-latency 0.01
refuses "a model that is too large" "one sequence needs at least .* GiB per rank" --preset gpt3-175b "${writes[@]}" --world 2
refuses "a batch of training" "HINT: omit one of them" --preset llama2-7b "${writes[@]}" --world 8 --global-batch-size 8
refuses "a bound of training" "max-latency requires --inference" "${run[@]}" --world 8 --max-latency 4
refuses "measuring without a model" "HINT: --model DIR" --preset llama-tiny "${writes[@]}" --trials 1
refuses "no room for a prompt" "leaves no room for a prompt" --preset llama2-7b "${writes[@]}" --world 8 --max-new-tokens 1024
refuses "a context of one token" "leaves no room for a prompt" --preset llama2-7b "${writes[@]}" --world 8 --seq-length 1
refuses "a layout that divides no ranks" "8 ranks cannot be divided by --tensor-model-parallel-size 3" --preset llama2-7b "${writes[@]}" --world 8 --tp 3
refuses "more stages than layers" "more pipeline stages than layers" --preset llama2-7b "${writes[@]}" --world 33 --pp 33
expect "no memory is named where none was planned" refused grep -w inf out.txt
refuses "FP8, which is of training" "HINT: omit one of them" --preset llama2-7b "${writes[@]}" --world 8 --fp8-format e4m3
expect "many copies" "$program" tune --preset llama2-7b "${writes[@]}" --world 100000 --dry-run
says "the command is of each" "tokens/s, by [0-9,]* copies of$"
expect "numbers stand apart" awk '/tokens.s  *memory$/ { columns = 1 } NF == 0 { columns = 0 } columns && NF > 7 && NF != 11 { bad = 1 } END { exit bad }' out.txt
expect "batches are measured here" "$program" tune --inference --model trained --threads 2 --batch 4 --trials 2 --out writing
says "the plan against the measurement" "planned  measured"
says "the fastest" "generate --model trained .*--batch [124] "
expect "nothing is left of them" test -z "$(find writing -name 'trials-*')"
# Prompts that nearly fill the context; unsupported measurements; an interrupted search.
long=(--preset llama-tiny --tokenizer tok --data-path data/text --seq-length 320 --micro-batch-size 1
    --global-batch-size 1 --train-iters 1 --threads 2)
expect "a model of a longer context" "$program" train "${long[@]}" --out long
expect "a prompt that fills it" "$program" tune --inference --model long --threads 2 --batch 2 --trials 1 --out filled
refuses "a context without a token to measure" "leaves no room for a prompt" --inference --model long --seq-length 2 --trials 1
cp -rL long mute && rm mute/*/tokenizer*
refuses "trials without a tokenizer" "trials requires a tokenizer" --inference --model mute --trials 1
touch file
expect "a file in the place of the folder" refused "$program" tune --inference --model long --trials 1 --out file
says "is told" "cannot create directory file.*HINT"
ended_by() { # ends tune with this signal in the middle of a trial; OUT is empty afterwards
    local signal=$1 out=$2 tune trial status
    shift 2
    "$program" tune "$@" --out "$out" >tune.txt 2>&1 &
    tune=$!
    comes test -e "$out/trials-$tune/output.txt" || { echo "no trial began"; return 1; }
    trial=$(pgrep -P "$tune")
    kill "-$signal" "$tune"
    wait "$tune"
    status=$?
    refused kill -0 "$trial" && [[ $status == $((128 + $(kill -l "$signal"))) && -z $(find "$out" -name 'trials-*') ]] ||
        { echo "status $status"; find "$out"; cat tune.txt; return 1; }
}
expect "SIGTERM during a trial of writing" ended_by TERM writing-ended --inference --model long --threads 2 --batch 1024 --trials 1
expect "SIGHUP during a trial of training" ended_by HUP training-ended "${here[@]}" --trials 1 --trial-steps 10000

mv data gone
expect "trials that all fail" refused "$program" tune "${here[@]}" --trials 2 --out failed
says "with the reason of each" "note: trial 2 of .*data/text"
says "and in all" "all 2 trials failed"
expect "nothing is left of these" test -z "$(ls failed)"
