#!/usr/bin/env bash
# The runs of scripts/: each plans (--dry-run) for its layout's number of ranks, with the published number of parameters;
# its header agrees with the plan and with itself; all recipes have the hyperparameters that they share. Then common.sh's
# settings and refusals, and the SLURM job with a fake SLURM. And test/run.sh, which runs all tests: a test that it could not
# run has not passed.
#   TRAIN_GPT=path/to/train_gpt test/scripts_test.sh
scripts=$(realpath "$(dirname "$0")/../scripts")
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"
export TRAIN_GPT=$program
unset DATA TOKENIZER OUT RANKS LAUNCH EXTRA

# verdict NAME CONDITION...: the condition, a command, succeeds.
verdict() {
    local name=$1
    shift
    if "$@"; then echo "ok: $name"; else echo "FAILED: $name: $*"; fi
}

# matches TEXT PATTERN
matches() {
    # shellcheck disable=SC2053  # a pattern
    [[ $1 == $2 ]]
}
# shellcheck disable=SC2016  # as in the scripts
source='. "$(dirname "$0")/common.sh"'

# Name, ranks, parameters, and in a mixture of experts active ones. Published numbers of BLOOM and GPT-2; LLM-jp 172B's 172,394,557,440 has 10 more padded rows of
# vocabulary in embedding and head: 2 x 10 x 12288; MT-NLG's is L (12 h^2 + 13 h) + (V + s + 2) h.
while read -r name ranks parameters active; do
    run=$scripts/run_$name.sh
    plan=plan_$name.txt
    if bash "$run" --dry-run >"$plan" 2>&1; then echo "ok: $name plans"; else echo "FAILED: $name plans"; tail -n 5 "$plan"; fi
    # A row of the table, including its continuation lines.
    row() {
        awk -v row="  $1 " 'on && /^ {12}/ { text = text " " $0; next }
            on { exit }
            index($0, row) == 1 { on = 1; text = substr($0, length(row)) }
            END { gsub(/ +/, " ", text); print text }' "$plan"
    }
    header() { sed -n "s/^#   $1 *//p" "$run"; }

    verdict "$name has $parameters parameters" [ "$(row parameters | sed 's/ (.*//; s/[ ,]//g')" = "$parameters" ]
    verdict "$name plans for $ranks ranks" [ "$(row ranks | sed 's/ ranks.*//; s/[ ,]//g')" = "$ranks" ]
    verdict "$name's header has these parameters" [ "$(header parameters | tr -d ,)" = "$parameters" ]
    verdict "$name's header has the active parameters" [ "$(header active | tr -d ,)" = "$active" ]
    [[ -z $active ]] || verdict "$name has them" matches "$(row experts)" "*: $(awk -v n="$active" 'BEGIN { printf "%.3g", n / 1e9 }')B active*"
    steps=$(row run | sed 's/ steps.*//; s/ //g')
    tokens=$(row run | sed 's/.* samples, //; s/ tokens.*//')
    verdict "$name's header has these steps and tokens" matches "$(header tokens)" "$tokens: $steps steps *"
    if grep -q "bf16 storage" "$plan"; then
        fullest=$(sed -n 's/^  memory of .*  \([0-9.]* GiB\) of .*/\1/p' "$plan" | sort -rg | head -n 1)
        verdict "$name's header has this memory" matches "$(header memory)" "$fullest on the fullest GPU *"
    fi
    # FLOPs = 6 x (active) parameters x tokens; time = FLOPs / (GPUs x share x peak), to the printed digits.
    verdict "$name's header is right in its arithmetic" awk -v parameters="${active:-$parameters}" -v tokens="$tokens" \
        -v flops="$(header FLOPs)" -v time="$(header time)" 'BEGIN {
            sub(/.* = /, "", flops)
            unit["M"] = 1e6; unit["B"] = 1e9; unit["T"] = 1e12
            n = substr(tokens, 1, length(tokens) - 1) * unit[substr(tokens, length(tokens))]
            if (!(flops > 0.99 * 6 * parameters * n && flops < 1.01 * 6 * parameters * n)) exit 1
            gsub(/,/, "", time); gsub(/%/, "", time)
            split(time, w, " ")  # 8 H100 at 40 of 989 TFLOP/s: 2.5 days
            seconds = flops / (w[1] * w[4] / 100 * w[6] * 1e12)
            given = w[8] * (w[9] == "days" ? 86400 : 3600)
            exit !(w[1] == '"$ranks"' && given > 0.9 * seconds && given < 1.1 * seconds)
        }'
    # Nothing but a header, the ranks and one call; the options are the recipe's, all of them.
    code=$(grep -v '^#' "$run")
    verdict "$name is three lines" [ "$code" = "$source"$'\n'"RANKS=\${RANKS:-$ranks}"$'\n''run "$@"' ]
    recipe=$scripts/recipes/$name.toml
    verdict "$name's recipe names the run" grep -q "^# Options of run_$name.sh, " "$recipe"
    verdict "$name's recipe replaces nothing" refused grep -q "Replaced values" "$plan"
    for shared in 'adam-beta1 = 0.9' 'adam-beta2 = 0.95' 'adam-eps = 1e-8' 'weight-decay = 0.1' 'clip-grad = 1.0' 'lr-decay-style = "cosine"'; do
        [[ $name == @(llm-jp-172b-article|llama2-*) ]] && shared=${shared/1e-8/1e-5}
        grep -qx "$shared" "$recipe" || echo "FAILED: $name's recipe has no line '$shared'"
    done
done <<'END'
gpt2-124m 8 124439808
gpt2-350m 8 354823168
gpt2-774m 8 774030080
gpt2-1558m 8 1557611200
bloom-560m 32 559214592
bloom-1b1 32 1065314304
bloom-1b7 64 1722408960
bloom-3b 128 3002557440
bloom-7b1 128 7069016064
bloom-176b 384 176247271424
llm-jp-152m 64 152308224
llm-jp-440m 64 447230976
llm-jp-980m 32 990150144
llm-jp-1.8b 32 1867573248
llm-jp-3.8b 128 3782851584
llm-jp-7.3b 128 7291981824
llm-jp-13b 128 13707822080
llm-jp-172b 512 172394311680
llm-jp-172b-article 512 172394311680
mt-nlg-530b 2240 529581506560
gpt3-5b 128 5047365632
gpt3-20b 512 20256221184
gpt3-40b 1024 39088316416
gpt3-175b 1024 174604259328
megatron-22b 8 22074273792
megatron-175b 64 174615846912
megatron-530b 280 529600819200
megatron-1t 512 1008038758400
llama2-7b 256 6738415616
llama2-13b 512 13015864320
llama2-70b 1024 68976648192
llama3-8b 512 8030261248
llama3-70b 2048 70553706496
llama3-405b 8192 405853388800
mixtral-8x7b 64 46702792704 12879925248
olmoe-1b-7b 256 6919161856 1282017280
qwen3-30b-a3b 1024 30532122624 3353032704
llm-jp-3-8x1.8b 64 9266718720 2924931072
llm-jp-3-8x13b 512 73163719680 22202926080
END
there=("$scripts"/run_*.sh) tested=(plan_*.txt) recipes=("$scripts"/recipes/*.toml)
verdict "each run is tested above" [ ${#there[@]} = ${#tested[@]} ]
verdict "each recipe has a run" [ ${#there[@]} = ${#recipes[@]} ]

# Published layouts, on which the plan depends.
layout() { sed -n 's/^  ranks *//p' "plan_$1.txt"; }
verdict "BLOOM 176b's layout" [ "$(layout bloom-176b)" = "384 ranks = tensor 4 x data 8 x pipeline 12" ]
verdict "LLM-jp 172B's layout" [ "$(layout llm-jp-172b)" = "512 ranks = tensor 4 x data 8 x pipeline 16" ]
verdict "MT-NLG's layout" [ "$(layout mt-nlg-530b)" = "2240 ranks = tensor 8 x data 8 x pipeline 35" ]
verdict "BLOOM 176b's stages" grep -q "layers of the stages: 5 6 6 6 6 6 6 6 6 6 6 5" plan_bloom-176b.txt
verdict "BLOOM 176b's steps" grep -q "115,311 steps" plan_bloom-176b.txt

verdict "BLOOM 3b's head takes as long as several layers" grep -q "faster split *--pipeline-layers [0-9]* [0-9]* [0-9]* [0-4]: 1.[0-9]* instead of 1.[0-9]* s per step" plan_bloom-3b.txt
verdict "MT-NLG's layers are split well" refused grep -q "faster split" plan_mt-nlg-530b.txt

# MT-NLG on 280, 350 and 420 nodes: published are 60.1, 50.2 and 44.4 s per step; the latter two have too many replicas for
# the ramp-up's batch sizes. Their program had neither sequence parallelism nor FlashAttention, and DeepSpeed's run was slower than
# plans with its own settings (test_published_steps.cpp), so plans are up to 35% faster.
for case in 2240:60.1 2800:50.2 3360:44.4; do
    ranks=${case%:*}
    expect "MT-NLG on $ranks GPUs" env RANKS="$ranks" EXTRA="--no-rampup-batch-size --json" bash "$scripts/run_mt-nlg-530b.sh" --dry-run
    planned=$(awk '/"plan": / { plan = 1 } plan && /"step": / { getline; gsub(/[^0-9.]/, ""); print; exit }' out.txt)
    verdict "MT-NLG on $ranks GPUs: $planned s for a step, published ${case#*:}" awk -v planned="$planned" -v published="${case#*:}" \
        'BEGIN { exit !(planned > 0.65 * published && planned < 1.15 * published) }'
done
expect "MT-NLG with the ramp-up on 2800 GPUs" refused env RANKS=2800 bash "$scripts/run_mt-nlg-530b.sh" --dry-run
says "MT-NLG with the ramp-up on 2800 GPUs: what to do" "HINT: --no-rampup-batch-size"
expect "another ramp-up" env EXTRA="--rampup-batch-size 64 64 5859375" bash "$scripts/run_mt-nlg-530b.sh" --dry-run
says "another ramp-up: the later one" "ramp-up  *from 64 by 64 over 5,859,375 samples"
expect "steps instead of samples" env EXTRA="--no-rampup-batch-size --no-train-samples --train-iters 30k" bash "$scripts/run_bloom-560m.sh" --dry-run
says "steps instead of samples" "30,000 steps"

# ---- a config file overrides the recipe, and the command line both; the table lists replaced values ----
cat >tuned.toml <<'END'
tensor-model-parallel-size = 8
pipeline-model-parallel-size = 4
fp8-format = []
END
expect "a tuned layout" bash "$scripts/run_llm-jp-172b.sh" --config tuned.toml --dry-run
says "a tuned layout is planned" "512 ranks = tensor 8 x data 16 x pipeline 4"
says "a tuned layout: what it replaces" "tensor-model-parallel-size *8, instead of 4"
expect "a tuned layout by EXTRA" env EXTRA="--config=tuned.toml" bash "$scripts/run_llm-jp-172b.sh" --dry-run --tp 4
says "a tuned layout by EXTRA: the command line wins" "512 ranks = tensor 4 x data 32 x pipeline 4"
says "a tuned layout by EXTRA: what the command line replaces" "tensor-model-parallel-size *4, instead of 8 in tuned.toml:1"
expect "a recipe without its script" "$program" tune --config "$scripts/recipes/bloom-560m.toml" --world 32 --dry-run
says "a recipe's layout is searched" "note: the search also chooses these options of the config file: .*--micro-batch-size"
printf 'out = "of the file"\nresume = ""\n' >out.toml
expect "a directory of a config file" bash "$scripts/run_gpt2-124m.sh" --config out.toml --dry-run
says "a directory of a config file: it wins over the default" "output *of the file"

# ---- settings ----
touch corpus.bin corpus.idx
mkdir bin
printf '#!/bin/sh\necho "launched $*"\n' >bin/mpirun
printf '#!/bin/bash\nprintf "<%%s> " "$@" | sed "s/ $//"\n' >bin/words
chmod +x bin/*
small=$scripts/run_gpt2-124m.sh
expect "settings reach the command" env DATA="0.3 corpus 7e-1 corpus" TOKENIZER=tok OUT=here LAUNCH="echo mpirun -n 3" \
    EXTRA="--seed 5" bash "$small" --seed 4
says "settings: launcher" "^mpirun -n 3 $program train --config .*recipes/gpt2-124m.toml --out here --resume auto --tokenizer tok "
says "settings: EXTRA comes after the arguments" "--seed 4 --seed 5 --data-path 0.3 corpus 7e-1 corpus$"
mkdir "my data" && touch "my data/web.bin"
expect "settings: blanks in names" env DATA="0.3 'my data/web' 0.7 corpus" OUT="my run" EXTRA="--name 'a b'" LAUNCH= TRAIN_GPT="$work/bin/words" bash "$small"
says "settings: blanks in names: each is one word" "<--out> <my run> .*<--name> <a b> <--data-path> <0.3> <my data/web> <0.7> <corpus>$"
expect "settings: one name with a blank" env DATA="my data/web" LAUNCH= TRAIN_GPT="$work/bin/words" bash "$small"
says "settings: one name with a blank" "<--data-path> <my data/web>$"
expect "settings: the number of ranks" env DATA=corpus RANKS=5 LAUNCH=echo bash "$small"
expect "settings: ranks of the launcher" env PATH="$work/bin:$PATH" DATA=corpus RANKS=5 bash "$small"
says "settings: mpirun by default" "^launched -n 5 $program train --config .* --out out/gpt2-124m "
expect "settings: one rank needs no launcher" env DATA=corpus RANKS=1 TRAIN_GPT=/bin/echo bash "$small"
says "settings: one rank" "^train --config .* --out out/gpt2-124m "
# shellcheck disable=SC2088
expect "settings: a home directory in quotes" env HOME="$work" DATA='~/corpus' RANKS=1 TRAIN_GPT=/bin/echo bash "$small"
expect "--world of one's own" bash "$small" --dry-run --world 4
says "--world of one's own wins" "  4 ranks = "
expect "without data" refused bash "$small"
says "without data: says so" "DATA is not set; HINT: .*--dry-run"
expect "with data that is not there" refused env DATA="0.5 corpus 0.5 other" bash "$small"
says "with data that is not there: names it" "'other'.*HINT: train_gpt prepare"
expect "without the program" refused env TRAIN_GPT=./nothing bash "$small"
says "without the program: says so" "./nothing; HINT: make train_gpt"
expect "without the launcher" refused env DATA=corpus LAUNCH=no-such-launcher bash "$small"
says "without the launcher: names it" "no no-such-launcher"

# ---- SLURM: a job with time for 1 second of training, or plenty ----
mkdir slurm
printf '#!/bin/sh\nshift 2\nexec "$@"\n' >slurm/srun  # like srun --mpi=pmix --kill-on-bad-exit=1, one task
printf '#!/bin/sh\necho "scontrol $*"\n' >slurm/scontrol
printf '#!/bin/sh\ndate -d "+2 hours" +%%Y-%%m-%%dT%%H:%%M:%%S\n' >slurm/squeue
# shellcheck disable=SC2016
printf '#!/bin/sh\necho "trains $*"\neval "${TRAINER:-}"\nsleep "${WORK:-0}"\nexit "${STATUS:-0}"\n' >slurm/trainer
chmod +x slurm/*
job() {
    env PATH="$work/slurm:$PATH" SLURM_SUBMIT_DIR="$work" SLURM_JOB_ID=77 SLURM_NTASKS=1 DATA=corpus \
        TRAIN_GPT="$work/slurm/trainer" bash "$scripts/slurm/train.sbatch" "$@"
}
soon() { echo $(($(date +%s) + 602)); }  # 600 seconds are the margin
SLURM_JOB_END_TIME=$(($(date +%s) + 7800)) expect "SLURM: training is told when to stop" job "$small" --seed 3
says "SLURM: it stops before the limit" "trains train .*--seed 3 --exit-after 7[12][0-9][0-9]s"
verdict "SLURM: a run that ends is not queued again" refused grep -q scontrol out.txt
expect "SLURM: the end is asked for" job "$small"
says "SLURM: the end is asked for, and used" "--exit-after 6[56][0-9][0-9]s"
# Three jobs whose time ends at once: one continues, one fails, one was restarted too often.
stopped() { SLURM_JOB_END_TIME=$(soon) WORK=2.2 job "$small"; }
stopped >goes-on.txt 2>&1 & jobs=($!)
STATUS=3 stopped >fails.txt 2>&1 & jobs+=($!)
SLURM_RESTART_COUNT=3 MAX_RESTARTS=3 stopped >too-often.txt 2>&1 & jobs+=($!)
verdict "SLURM: a run that is stopped" wait "${jobs[0]}"
verdict "SLURM: a run that is stopped is queued again" grep -q "^scontrol requeue 77$" goes-on.txt
verdict "SLURM: a run that fails" refused wait "${jobs[1]}"
verdict "SLURM: a run that fails is not queued again" refused grep -q "scontrol requeue" fails.txt
verdict "SLURM: a job that was started again too often" refused wait "${jobs[2]}"
verdict "SLURM: it says how to go on" grep -q "MAX_RESTARTS=3 times; HINT: submit it again" too-often.txt
verdict "SLURM: it is not queued again" refused grep -q "scontrol requeue" too-often.txt
SLURM_RESTART_COUNT=4 MAX_RESTARTS=3 expect "SLURM: a job that nodes fail under for ever" refused job "$small"
says "SLURM: it ends before training" "started again 4 times, and MAX_RESTARTS is 3"
verdict "SLURM: it does not train" refused grep -q "^trains" out.txt
echo 'export NCCL_DEBUG=WARN' >site.sh
# shellcheck disable=SC2016
CONTAINER="env IN_A_CONTAINER=yes" SETUP=site.sh SLURM_CPUS_PER_TASK=6 TRAINER='echo "has $IN_A_CONTAINER $NCCL_DEBUG $SRUN_CPUS_PER_TASK"' \
    expect "SLURM: container, setup, cores" job "$small"
says "SLURM: ranks start in the container, after the setup, with their cores" "^has yes WARN 6$"
SETUP=nothing.sh expect "SLURM: a setup that is not there" refused job "$small"
says "SLURM: a setup that is not there: names it" "SETUP: 'nothing.sh'"
SLURM_JOB_END_TIME=$(date +%s) expect "SLURM: too little time" refused job "$small"
says "SLURM: too little time: says so" "MARGIN=600.*HINT"
expect "SLURM: not a run" refused job nothing.sh
says "SLURM: not a run: says so" "'nothing.sh' is not a run"

# The second test kills its runner: the third is not run.
echo 'echo "ok: it"' | tee first_test.sh >third_test.sh
# shellcheck disable=SC2016
echo 'read -r _ _ _ runner _ </proc/$PPID/stat; kill -9 "$runner"' >second_test.sh
JOBS=1 expect "run.sh: a test that passes" "$scripts"/../test/run.sh first_test.sh third_test.sh
says "run.sh: counts" "^2 passed, 0 failed"
JOBS=1 expect "run.sh: a killed runner is a failure" refused "$scripts"/../test/run.sh first_test.sh second_test.sh third_test.sh
says "run.sh: counts it" "^1 passed, 1 failed"
echo 'echo reason; echo "FAILED: early"; seq 1000' >long_test.sh
JOBS=1 expect "run.sh: an early failure of a long test" refused "$scripts"/../test/run.sh long_test.sh
says "run.sh: an early failure of a long test: shows the lines around it" "^1-reason"
says "run.sh: an early failure of a long test: shows its end" "^999$"

if command -v shellcheck >/dev/null; then
    expect "shellcheck" shellcheck -x "$scripts"/common.sh "$scripts"/run_*.sh "$scripts"/slurm/train.sbatch
fi
