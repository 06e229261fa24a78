#!/usr/bin/env bash
# A run with --time-budget ends on time, after as many steps as fit; training for the length it chose gives the same bits
# without a clock, even if stopped and resumed. --eval-tasks gives the results of `eval --tasks` during training and changes
# no bit of the run. scripts/research.sh keeps improvements.
#   TRAIN_GPT=path/to/train_gpt ALL=1 (a run of a minute, within 2%) test/budget_test.sh
root=$(realpath "$(dirname "$0")/..")
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$root/test/lib.sh"
allow_mpirun_everywhere

same() { cmp "$1/latest/model.safetensors" "$2/latest/model.safetensors"; }
between() { awk -v x="$1" -v low="$2" -v high="$3" 'BEGIN { exit !(x >= low && x <= high) }'; }
# of_end DIR KEY: a number in the last record.
of_end() { tail -n 1 "$1/log.jsonl" | sed -n "s/.*\"$2\":\([0-9.e+-]*\).*/\1/p"; }
# instead DIR: the options that, according to the run, do the same without a clock.
instead() { sed -n 's/.*"event":"length".*without a clock: \([^"]*\)".*/\1/p' "$1/log.jsonl"; }

for i in $(seq 1 600); do echo "in the year $((i * 37 % 1000)) the king of city $((i % 17)) gave $((i * 11 % 97)) sheep to his son, and it was good"; [[ $((i % 5)) == 0 ]] && echo; done >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 400 --output tok
expect "prepare" "$program" prepare --input text.txt --output data --tokenizer tok --split-documents blank
train() { # OUT OPTIONS...
    local out=$1
    shift
    ${launcher:-} "$program" train --num-layers 2 --hidden-size 48 --num-attention-heads 6 --tokenizer tok --data-path data --split "90, 10, 0" --seq-length 32 \
        --micro-batch-size 4 --lr 3e-3 --min-lr 1e-4 --lr-warmup-iters 5 --eval-interval 100 --eval-iters 2 --out "$out" --name run "$@"
}

# ---- the number of steps ----
budget=2
[[ -z ${SAN:-} ]] || budget=20
begin=$(date +%s.%N)
expect "a run of $budget s" train timed --time-budget ${budget}s
took=$(awk "BEGIN { print $(date +%s.%N) - $begin }")
says "it says what it has come to" "^result: .* bits per byte, validation loss .* parameters, .* tokens in .* steps and .* s$"
says "and the options without a clock" "the same bits without a clock: --train-iters "
expect "it takes $took s" between "$took" "$(awk "BEGIN { print 0.5 * $budget }")" "$(awk "BEGIN { print 3 * $budget }")"
steps=$(of_end timed step)
lrs() { sed -n 's/.*"kind":"step".*"lr":\([0-9.e+-]*\).*/\1/p' "$1/log.jsonl"; }
expect "the learning rate of its $steps steps rises, stays, and falls to its minimum in a fifth of them" awk -v steps="$steps" '
    { lr[NR] = $1 }
    END {
        for (i = 1; i <= NR && lr[i] < 3e-3; i++) {}
        for (; i <= NR && lr[i] == 3e-3; i++) {}
        for (first = i; i <= NR && lr[i] < lr[i - 1]; i++) {}
        exit !(NR == steps && i == NR + 1 && lr[NR] < 3e-4 && NR - first + 1 > 0.02 * NR && NR - first + 1 < 0.21 * NR)
    }' <(lrs timed)
# shellcheck disable=SC2046
expect "the length that was chosen, without a clock" train counted $(instead timed)
expect "gives the same bits" same timed counted
expect "and the same validation loss" test "$(of_end timed valid_loss)" == "$(of_end counted valid_loss)"
expect "bits per byte are those that eval gives" bash -c "'$program' train --num-layers 1 --hidden-size 32 --num-attention-heads 2 --tokenizer tok --data-path data \
    --split '90, 10, 0' --seq-length 32 --micro-batch-size 4 --train-iters 2 --eval-iters 2 --eval-fixed --out small &&
    '$program' eval --model small --data-path data --split '90, 10, 0' --seq-length 32 --max-samples 8"
says "which are $(of_end small bits_per_byte)" "bits per byte *$(printf '%.4f' "$(of_end small bits_per_byte)")"

expect "stopped in the middle" train stopped --time-budget $((budget + 1))s --exit-after 1s
expect "it is resumed" train stopped --time-budget $((budget + 1))s --resume auto
# shellcheck disable=SC2046
expect "the length chosen then, in one go" train unstopped $(instead stopped)
expect "stopped and resumed: the same bits" same stopped unstopped
seconds=$(of_end stopped seconds)
expect "both parts together take the time: $seconds s" between "$seconds" "$(awk "BEGIN { print 0.5 * ($budget + 1) }")" "$(awk "BEGIN { print 3 * ($budget + 1) }")"
expect "another budget needs --override" refused train stopped --time-budget 1h --resume auto
says "which it names" "override time-budget"

expect "too little time is one step" train short --time-budget 0.001s --eval-iters 0
expect "which is all" test "$(of_end short step)" == 1
expect "and says that the warm-up is not over" grep -q "time ends before the warm-up" short/log.jsonl
expect "a constant learning rate" train constant --time-budget 1s --lr-decay-style constant
expect "a decay of given length" train given --time-budget 1s --lr-wsd-decay-iters 7
says "of 7 steps" "--lr-decay-style WSD --lr-wsd-decay-iters [1-7]$"
expect "a part of the data that no run reaches is not left out" refused train endless --time-budget 1s --skip-batches 5-10000000000
says "at once" "batches up to 10000000000 are skipped; .* HINT: --train-iters"
for wrong in "--lr-decay-style cosine" "--lr-decay-style linear" "--train-iters 5" "--lr-warmup-fraction 0.1 --no-lr-warmup-iters" "--lr-decay-iters 5" \
    "--on-spike rollback" "--size 1m"; do
    # shellcheck disable=SC2086
    expect "with $wrong it is refused" refused train none --time-budget 3s $wrong
    says "$wrong: with a hint" "HINT: "
done
expect "no time is refused" refused train none --time-budget soon
expect "a plan" train none --time-budget 3s --dry-run
says "says that the length is the time's" "as many steps as fit into 3s"
if [[ $program != *-fp32/* ]] && command -v mpirun >/dev/null; then
    launcher="mpirun -n 2" expect "two ranks agree" train ranks --time-budget 1s
    # shellcheck disable=SC2046
    launcher="mpirun -n 2" expect "on a length" train ranks-counted $(instead ranks)
    expect "of the same bits" same ranks ranks-counted
fi
if [[ -n ${ALL:-} ]]; then
    begin=$(date +%s.%N)
    expect "a minute" train minute --time-budget 60s --hidden-size 96
    took=$(awk "BEGIN { print $(date +%s.%N) - $begin }")
    # The machine's speed may change during the decay, which the run cannot know before.
    change=$(sed -n 's/.*"kind":"step","step":\([0-9]*\),.*"seconds":\([0-9.]*\).*/\1 \2/p' minute/log.jsonl | awk '
        { at[$1] = $2 }
        END { last = NR; first = int(last * 0.8); before = int(first * 0.75)
            d = (at[last] - at[first]) - (last - first) * (at[first] - at[before]) / (first - before); print d < 0 ? -d : d }')
    expect "takes $took s, within 2% and $change s by which its speed has changed" between "$took" "$(awk "BEGIN { print 58.8 - $change }")" "$(awk "BEGIN { print 61.2 + $change }")"
fi

# ---- tasks during training ----
for i in $(seq 40); do
    echo "{\"context\": \"in the year $i the king of\", \"choices\": [\" city\", \" sheep\", \" good $i\"], \"gold\": $((i % 3 == 0))}"
done >choices.jsonl
for i in $(seq 20); do echo "{\"context\": \"gave $i sheep to his son, and it was\", \"target\": \" good\"}"; done >last_word.jsonl
measured() { # OUT OPTIONS...
    train "$@" --train-iters 12 --eval-iters 1 --tensorboard
}
# tasks DIR STEP: the record's metrics.
tasks() { sed -n "s/.*\"kind\":\"tasks\",\"step\":$2,\"tasks\":\(.*\),\"stderr\".*/\1/p" "$1/log.jsonl"; }
expect "training without tasks" measured plain
expect "training with tasks" measured tasked --eval-tasks choices.jsonl last_word.jsonl --eval-tasks-interval 5
says "they are printed" "tasks at step 12: choices acc"
expect "the weights have the same bits" same plain tasked
expect "measured at steps 5, 10, 12" test "$(grep -c '"kind":"tasks","step":\(5\|10\|12\),' tasked/log.jsonl) $(grep -c '"kind":"tasks"' tasked/log.jsonl)" == "3 3"
expect "eval of the same model" "$program" eval --model tasked --tasks choices.jsonl last_word.jsonl --seq-length 32 --json
cp out.txt eval.json
value() { tr -d ' \n' <eval.json | sed -n "s/.*\"$1\":{\(.*\)/\1/p" | grep -oE "\"$2\":\{\"value\":[0-9.e+-]*" | head -1 | sed 's/.*://'; }
for of in choices:acc choices:acc_norm last_word:acc last_word:perplexity; do
    task=${of%:*} metric=${of#*:}
    logged=$(tasks tasked 12 | sed "s/.*\"$task\":{\([^}]*\)}.*/\1/" | grep -oE "\"$metric\":[0-9.e+-]*" | sed 's/.*://')
    expect "$task: $metric $logged is that of eval, $(value "$task.jsonl" "$metric")" bash -c "[[ -n '$logged' ]] && awk 'BEGIN { d = $logged - $(value "$task.jsonl" "$metric"); exit !(d * d < 1e-8 * (1 + $logged * $logged)) }'"
done
expect "their mean is that of eval" test "$(tasks tasked 12 | grep -oE '"centred":-?[0-9.e-]*' | cut -c 11-17)" == "$(tr -d ' \n' <eval.json | grep -oE '"centred_mean":-?[0-9.e-]*' | cut -c 16-22)"
expect "the report has a chart of them" grep -q '<svg id="tasks"' tasked/report.html
expect "TensorBoard has curves of them" grep -qa "tasks/choices/acc" -r tasked/tensorboard
expect "a comparison has a chart for each" "$program" report tasked plain --output both.html
expect "by name" grep -q "Accuracy, last_word" both.html
expect "without an interval: once" measured once --eval-tasks choices.jsonl
expect "at the end" test "$(grep -o '"kind":"tasks","step":[0-9]*' once/log.jsonl)" == '"kind":"tasks","step":12'
# Generated answers, with prompts and passes of their own.
for i in $(seq 9); do echo "{\"context\": \"gave $i sheep to his son, and\", \"references\": [\"it was good\", \"it\"], \"max_new_tokens\": 8, \"metrics\": [\"f1\", \"bleu\", \"rougeL\"]}"; done >written.jsonl
expect "training with written answers" measured written --eval-tasks written.jsonl choices.jsonl --eval-tasks-interval 5 --eval-tasks-samples 7
expect "the weights have the same bits with them" same plain written
expect "eval of these" "$program" eval --model written --tasks written.jsonl --seq-length 32 --json --max-samples 7 --answers answers.jsonl
cp out.txt eval.json
says "seven answers were measured" '"examples": *7'
for metric in f1 bleu rougeL; do
    logged=$(tasks written 12 | sed "s/.*\"written\":{\([^}]*\)}.*/\1/" | grep -oE "\"$metric\":[0-9.e+-]*" | sed 's/.*://')
    expect "$metric $logged is that of eval, $(value written.jsonl $metric)" bash -c "[[ -n '$logged' ]] && awk 'BEGIN { d = $logged - $(value written.jsonl $metric); exit !(d * d < 1e-8 * (1 + $logged * $logged)) }'"
done
expect "the answers are kept" test "$(grep -c '"answer":' answers.jsonl)" == 7
expect "a file of answers is not replaced" refused "$program" eval --model written --tasks written.jsonl --answers answers.jsonl
says "and says why" "exists already"
expect "samples without tasks" refused measured none --eval-tasks-samples 3
if [[ $program != *-fp32/* ]] && command -v mpirun >/dev/null; then
    for layout in "" "--pp 2"; do
        # shellcheck disable=SC2086
        expect "2 ranks ${layout:-share the questions} and" "${MPIRUN:-mpirun}" -n 2 "$program" eval --model written $layout --tasks written.jsonl --seq-length 32 --max-samples 7 --answers "of two$layout.jsonl"
        expect "write the same" cmp answers.jsonl "of two$layout.jsonl"
    done
    # Samples are divided among the ranks the same way with and without tasks.
    for layout in "--global-batch-size 8" "--pp 2 --vpp 2 --num-layers 4 --global-batch-size 8" "--tp 2 --no-sequence-parallel"; do
        # shellcheck disable=SC2086
        launcher="mpirun -n 2" expect "2 ranks, $layout" measured "plain $layout" $layout
        # shellcheck disable=SC2086
        launcher="mpirun -n 2" expect "2 ranks, $layout: with tasks" measured "tasked $layout" $layout --eval-tasks choices.jsonl written.jsonl --eval-tasks-interval 5
        expect "2 ranks, $layout: the same bits" same "plain $layout" "tasked $layout"
        expect "2 ranks, $layout: three times" test "$(grep -c '"kind":"tasks"' "tasked $layout/log.jsonl")" == 3
    done
    # With sequence parallelism each rank has some of the scored rows. A run whose learning rate is almost zero keeps the weights of
    # its model, so that tasks have one rank's values in every layout.
    expect "a model that four ranks divide" measured four --num-layers 4 --num-attention-heads 4 --global-batch-size 8
    still=(--model four --num-layers 4 --num-attention-heads 4 --lr 1e-12 --min-lr 0 --weight-decay 0 --global-batch-size 8)
    asked=(--eval-tasks choices.jsonl last_word.jsonl written.jsonl --eval-tasks-interval 6)
    expect "tasks on one rank" measured "still 1" "${still[@]}" "${asked[@]}"
    for layout in "2 --tp 2" "4 --tp 2 --pp 2" "4 --tp 4 --head-rows 3"; do
        read -r n options <<<"$layout"
        # shellcheck disable=SC2086
        launcher="mpirun -n $n" expect "sequence parallelism, $layout: with tasks" measured "still $layout" "${still[@]}" "${asked[@]}" $options
        for of in choices:acc choices:acc_norm last_word:acc; do
            task=${of%:*} metric=${of#*:}
            metric_of() { tasks "$1" 12 | sed "s/.*\"$task\":{\([^}]*\)}.*/\1/" | grep -oE "\"$metric\":[0-9.e+-]*"; }
            expect "sequence parallelism, $layout: $task, $metric $(metric_of "still 1") is one rank's" bash -c "[[ -n '$(metric_of "still 1")' ]] && awk 'BEGIN { d = $(metric_of "still 1" | cut -d: -f2) - $(metric_of "still $layout" | cut -d: -f2); exit !(d * d <= 0.0026) }'"
        done
        perplexity() { tasks "$1" 12 | grep -oE '"perplexity":[0-9.e+-]*' | cut -d: -f2; }
        expect "sequence parallelism, $layout: perplexity $(perplexity "still 1") is one rank's" awk "BEGIN { d = log($(perplexity "still 1") / $(perplexity "still $layout")); exit !(d * d < 1e-4) }"
        # shellcheck disable=SC2086
        launcher="mpirun -n $n" expect "sequence parallelism, $layout: without tasks" measured "untasked $layout" "${still[@]}" $options
        expect "sequence parallelism, $layout: the same bits" same "still $layout" "untasked $layout"
    done
fi
expect "a task that is not there" refused measured none --eval-tasks nothing.jsonl
expect "two of one name" refused measured none --eval-tasks choices.jsonl ./choices.jsonl
expect "an interval without tasks" refused measured none --eval-tasks-interval 5

# ---- energy: a library in place of NVML reports two GPUs that each use 1800 J between readings ----
if [[ $program == *cpu* ]] && command -v cc >/dev/null; then
    cat >nvml.c <<'END'
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned* n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) { *device = (void*)(i + 1L); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void* device, unsigned long long* mj) { static unsigned long long used[3]; *mj = used[(long)device] += 1800000; return 0; }
END
    expect "a library" cc -shared -fPIC -o libnvidia-ml.so.1 nvml.c
    LD_LIBRARY_PATH=$PWD expect "its energy" train energy --train-iters 12 --carbon-intensity 450
    says "is in the last line" "^result: .* Wh, .* g of CO2$"
    expect "in the log, with what it emits" awk -v joules="$(of_end energy energy_joules)" -v grams="$(of_end energy grams_of_co2)" \
        'BEGIN { d = grams - joules / 3.6e6 * 450; exit !(joules >= 3600 && d * d < 1e-6) }'
    expect "in the report" grep -q "Energy of the machine.*g of CO2" energy/report.html
    ls /sys/class/powercap/intel-rapl:0/energy_uj /dev/nvidia0 >/dev/null 2>&1 || expect "a machine that does not tell has none" refused grep -q energy_joules tasked/log.jsonl
fi

# ---- research.sh: changes that are better after the same time ----
research=$(realpath "$root/scripts/research.sh")
printf '%s\n' "--lr 1e-6  # too low" "" "--hidden-size 47" "--num-layers 1 --name 'a b'" >candidates.txt
search() { env TRAIN_GPT="$program" CANDIDATES=candidates.txt BUDGET=1s BASE="--num-layers 2 --hidden-size 48 --num-attention-heads 6 --tokenizer tok --data-path data \
    --split '90, 10, 0' --seq-length 32 --micro-batch-size 4 --lr 3e-3 --eval-iters 2 --eval-fixed" bash "$research"; }
expect "research" search
says "the first run has no change" "^== research/run-1: as it is"
says "what is worse is not kept" "^not kept: --lr 1e-6: "
says "nor what cannot run" "^not kept: --hidden-size 47: inf"
says "the best is a command" "^  .* train --num-layers 2 .*--eval-fixed .*--time-budget 1s --out best"
expect "the table has all four" test "$(wc -l <research/research.tsv)" == 5
expect "sorted" bash -c "tail -n +2 research/research.tsv | cut -f 1 | LC_ALL=C sort -gc"
expect "a run that fails is last" bash -c "tail -n 1 research/research.tsv | grep -q '^inf.*--hidden-size 47'"
expect "there is a page" grep -q "3 runs" research/report.html
expect "again" search
expect "nothing is trained again" refused grep -q "^== research" out.txt
echo "--num-layers 3" >>candidates.txt
expect "one more candidate" search
expect "is one more run" test "$(wc -l <research/research.tsv) $(ls -d research/run-*/ | wc -l)" == "6 4"
