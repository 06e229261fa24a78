#!/usr/bin/env bash
# Experiments for a few minutes on a GPU, most valuable first, each with a prediction, the decision that depends on it, and
# a time limit. Needs the folder built by `make gpu-pack`, which contains this script; compiles and installs nothing.
#   build/gpu-pack/gpu_minutes.sh first|second|node [NAME...]     at most 480, 200, 480 s
#   build/gpu-pack/gpu_minutes.sh NAME...                         only these experiments; --list: lists all
#     OUT=gpu-minutes: table.md (each row is saved at once), figures.jsonl, log.txt        BUDGET=480: total seconds
# node: for 8 GPUs and a pack built with MPI=1. BACKEND=emu: rehearses with the emulator's programs and small sizes.
# Exit status 1 if a row says FAILED. Missing tools (ncu, compute-sanitizer, cuDNN) are reported and their experiments
# skipped.
# To add an experiment: add a line to `experiments` and a function run_NAME, which runs in its own process. It prints each
# result after "> ", one per line, so that a timeout loses only later ones; it returns 0, 77 (skipped) or another status
# (failed).
set -uo pipefail
export pack
pack=$(dirname "$(realpath "$0")")
[[ ${1:-} != --run ]] || part=run
backend=${BACKEND:-cuda} out=${OUT:-gpu-minutes}
export backend STEPS=${STEPS:-60}
[[ $backend != emu ]] || export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
. "$pack/gpu_steps.sh"

# part | seconds | name | experiment | predicted | decides
experiments=(
    "first|15|clock|clock and power under load; cuBLASLt 8192^3 in bf16 and FP8; a copy|690-730; 1,250-1,400 TFLOP/s; 3.0 TB/s (H200: 4.2)|what rates are a share of: this clock, not 989"
    "first|60|tests|kernel tests in both precisions, four processes at a time|1 to 3 tolerances fail|what of the code that no GPU has seen works"
    "first|25|memcheck|compute-sanitizer's memcheck on new kernels|silent|whether they stay within their arrays"
    "first|45|attention|attention by shape: forward, backward in two kernels and in one, cuDNN|one kernel 300-320 at heads of 64, T 1024 (two: 236), 440-500 at heads of 128, T 4096 (419)|the default; whether a persistent backward is worth writing"
    "first|60|gemms|matrix products of five models: first suggestion, best of 32, epilogues, sums of bf16 gradients, FP8|124M 560-600 on average, 1B and 7B 690-730; FP8 1,250; 7B added to bf16: in parts at most 1.02 of the product's time, whole 1.06|an own GEMM or not; fast accumulation; bias sums; parts of bf16 gradients"
    "first|50|profile|a step by op: 124M, 1B, 12 layers of 7B, micro-batches of 1, 2, 4, FP8|2x4096 7% above 1x4096|the order of work on kernels; the planner's micro-batch term"
    "first|75|speed|the trainer's speed: 124M, 1B, 7B of 12 layers, FP8|566k, 81k and 119k, 38.5k and 57k tok/s, or better|regressions"
    "first|65|whole7b|all 32 layers of Llama-2-7B on this card: bf16, FP8; peak memory against the plan|12.4k, 13.9k tok/s|what memory is worth: offload, codes, recomputation"
    "first|35|same|two runs; GPU against CPU; the same in FP8|the same digits; 0.0007; 0.0017|determinism"
    "first|45|ncu|hardware counters of five kernels|attention's keys at heads of 64: 50-60% of issue slots; one kernel: L1 80%|the next edit of each"
    "second|25|gemm|dev/kernels: an own product by wgmma next to cuBLASLt|95 to 102% of cuBLASLt at 8192^3; 97% is asked|whether layers use it: SwiGLU in its epilogue, grouped products"
    "second|20|experts|mixtures of experts next to a dense MLP of as many rows: OLMoE-1B-7B, Mixtral-8x7B|products 350-430 TFLOP/s of 690-730 (mma.sync); the layer 50-60% of dense, 40-50% at 512 rows per expert|a grouped product by wgmma"
    "second|45|offload7b|all of Llama-2-7B with the optimizer's state on the host: bf16, FP8; peak memory against the plan|10.5k, 13.9k tok/s (updates are a quarter of such short steps)|whether copies overlap; the default for 7B on 80 GB"
    "second|25|gradients7b|the same with the gradients on the host, too: bf16, full recomputation, 4x4096; peak memory against the plan|6.6k tok/s in 20.2 GiB|whether additions over the link must overlap with products; 7B on 24 GB"
    "second|25|ladders|dev/kernels, rung by rung: AdamW, attention, classifier, RMSNorm backward, ...|95-98% (AdamW), 89% (classifier), 85% (RMSNorm) of a copy|the tables of dev/kernels/README.md"
    "second|20|h200|on an H200: 124M at 64x1024, logits of all rows at once (3.3e9 elements)|at most the speed of two parts|whether the limit of 2^31 elements costs anything"
    "second|40|h200_7b|on an H200: all of Llama-2-7B with fp32 gradients and moments|12.5k tok/s|the table nobody has published"
    "node|60|nccl|NCCL's bandwidth (all_reduce_perf)|450 GB/s of bus|the planner's link speeds"
    "node|180|zero|ZeRO-1 on 1, 2, 4, 8 GPUs: Llama 1B|95% on 8|overlap, buckets"
    "node|60|tp8|tensor parallelism of 8: layers of Llama-2-7B|70% of one GPU's rate per GPU|overlap of transfers with products"
    "node|60|pp8|pipeline of 8: Llama-2-7B|85% of one GPU's rate per GPU|streams and priorities of edges"
    "node|60|interleaved|interleaved stages, with 32 connections to each GPU and with CUDA's 8|32: the rate of the pipeline of 8 or better; 8: may hang|whether ctx.cuh must ask for 32"
    "node|60|killed|a rank is killed|all end within 60 s, and say which|the watchdog"
)
field() { cut -d'|' -f"$2" <<<"$1"; }
line_of() { local line; for line in "${experiments[@]}"; do [[ $(field "$line" 3) != "$1" ]] || echo "$line"; done; }

# ---- shared by experiments --------------------------------------------------------------------------------------------------
say() { echo "> $*"; }
skip() { say "skipped: $*"; exit 77; }
program() { [[ -x $pack/$1 ]] || { say "$1 is not in $pack; make gpu-pack builds it"; exit 1; }; }
# within LESS: the experiment's seconds minus LESS, at least one.
within() { echo $((LIMIT > $1 + 1 ? LIMIT - $1 : 1)); }
# figures SECONDS ARGUMENT...: bench's lines of JSON, also appended to figures.jsonl. Ends bench after SECONDS.
figures() {
    program bench
    timeout -k 1 "$1" "$pack/bench" "${@:2}" --json >"$work/figures" 2>&1
    local status=$?
    tee -a "$figures_file" <"$work/figures"
    [[ $status == 0 ]] || say "bench ${*:2}: exit status $status: $(tail -n 1 "$work/figures" | cut -c1-200)"
    return $status
}
# rates: each name with its variants and TFLOP/s, then skipped ones.
rates() {
    awk -F'"' '/"variant"/ { match($0, /"value":[0-9.e+-]+/); before = ($4 in of) ? of[$4] ", " : ""; if (before == "") names[++n] = $4
            of[$4] = before sprintf("%s %.4g", $8, substr($0, RSTART + 8, RLENGTH - 8)) }
        /"note"/ { notes = notes "> " $4 ": " $8 "\n" } END { for (i = 1; i <= n; i++) print "> " names[i] ": " of[names[i]]; printf "%s", notes }' "$work/figures"
}
# sharded NAME PROGRAM SECONDS OPTION...: runs a test program in four processes; reports the number of passed tests and the
# names of failed ones. PREFIX: command to run it with.
sharded() {
    local name=$1 seconds=$3 i status=0 all=0 failing=0 pids=() test
    program "$2"
    for i in 0 1 2 3; do
        # shellcheck disable=SC2086  # words
        OMP_NUM_THREADS=$((($(nproc) + 3) / 4)) GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX=$i timeout -k 2 "$seconds" ${PREFIX:-} "$pack/$2" "${@:4}" >"$work/shard$i" 2>&1 &
        pids+=($!)
    done
    for i in 0 1 2 3; do
        wait "${pids[i]}"
        ended=$?
        cat "$work/shard$i"
        if ! passed "$work/shard$i" $ended; then
            status=1
            for test in $(sed -n 's/^\[  FAILED  \] \(.*\) (.*ms)$/\1/p' "$work/shard$i" | tr -d ,); do say "$name: FAILED $test"; done
            [[ $bad -gt 0 ]] || say "$name: process $i ended with status $ended in $(sed -n 's/^\[ RUN      \] //p' "$work/shard$i" | tail -n 1) $(tail -n 1 "$work/shard$i" | cut -c1-120)"
        fi
        all=$((all + ok)) failing=$((failing + bad))
    done
    say "$name: $all passed, $failing failed"
    return $status
}
# training NAME STEPS MODEL OPTION...: reports the median speed of the last STEPS - 1 steps. MODEL: the model's options (on
# the emulator, a tiny model's). RANKS: launcher for several ranks.
training() {
    local name=$1 steps=$2 model=$3 status text
    program gpu_tests
    [[ $backend != emu ]] || model="--preset llama-tiny --micro-batch-size 1 --global-batch-size 2 --seq-length 32"
    # shellcheck disable=SC2086  # words
    timed "${RANKS:-} $pack/gpu_tests train_gpt" "$pack/data" "$pack/tok" "$work/speed" $model --train-iters "$steps" "${@:4}" >"$work/training" 2>&1
    status=$?
    cat "$work/training"
    text=$(speed "$work/speed/log.jsonl" $((steps - 1)))
    [[ $status == 0 && -n $text ]] || { say "$name: FAILED: exit status $status: $(grep -i 'error\|hint' "$work/training" | head -n 1 | cut -c1-200)"; return 1; }
    say "$name: $text"
}

# ---- first ------------------------------------------------------------------------------------------------------------------
run_clock() {
    ( while :; do nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader; sleep 0.5; done >"$work/clock" 2>&1 ) &
    local sampler=$!
    figures "$(within 1)" --bounds
    local status=$?
    kill $sampler
    rates
    awk -F'"' '/copy_GB/ { match($0, /"copy_GB\/s":[0-9.e+-]+/); printf "> copy %.0f GB/s\n", substr($0, RSTART + 12, RLENGTH - 12) }' "$work/figures"
    # The lowest clock of the five samples with the highest power.
    say "under load: $(sort -t, -k2 -rg "$work/clock" | head -n 5 | tail -n 1)"
    return $status
}
run_tests() {
    local status=0
    sharded "bf16" gpu_tests $((LIMIT * 2 / 3)) || status=1
    sharded "fp32" gpu_tests_fp32 $((LIMIT / 3)) || status=1
    return $status
}
run_memcheck() {
    local tool
    tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
    [[ -n $tool ]] || skip "there is no compute-sanitizer"
    # Only kernels in namespace gpu, not the libraries'.
    PREFIX="$tool --tool memcheck --error-exitcode 9 --kernel-name kernel_substring=3gpu" sharded memcheck gpu_tests "$(within 2)" \
        --gtest_filter="*BackwardInOneKernel*:AttentionHopperMore.*:LinearGelu.*:GpuLinear.ResidualFusedAndApart:Ops.*:InPlace.*:InitialWeights.*:Memory.*:*Lion*:*Muon*:Unaligned.*:Experts.*"
}
run_attention() {
    figures "$(within 2)" --attention --seconds "$(within 7)"
    local status=$?
    rates
    return $status
}
run_gemms() {
    figures "$(within 2)" --gemms --seconds "$(within 8)"
    local status=$?
    # Per model and variant: the rate of all its products together.
    awk -F'"' '/"variant"/ { split($4, word, " "); key = word[1] ": " $8; match($0, /"ms":[0-9.e+-]+/); ms = substr($0, RSTART + 5, RLENGTH - 5)
            match($0, /"value":[0-9.e+-]+/); work[key] += ms * substr($0, RSTART + 8, RLENGTH - 8); time[key] += ms; if (!(key in seen)) keys[++n] = key; seen[key] = 1 }
        /skipped: the/ { cut++ } END { for (i = 1; i <= n; i++) printf "> %s %.4g\n", keys[i], work[keys[i]] / time[keys[i]]; if (cut) print "> " cut " figures skipped: the time was over" }' "$work/figures"
    return $status
}
run_profile() {
    local status=0 arguments
    local all=("gpt2-124m 64 1024" "llama2-7b 1,2,4 4096 none 12" "llama2-7b 1,2 4096 none 12 --fp8" "llama-1b 16 2048" "llama-1b 16 2048 --fp8")
    [[ $backend != emu ]] || all=("llama-tiny 1,2 16" "llama-tiny 1 16 --fp8")
    local each=$((LIMIT / ${#all[@]} > 1 ? LIMIT / ${#all[@]} : 1))
    for arguments in "${all[@]}"; do
        # shellcheck disable=SC2086
        figures $((LIMIT > SECONDS + 2 ? LIMIT - SECONDS - 1 : 1)) --profile $arguments --seconds "$each" || status=1
        # The step, and its three slowest ops.
        awk -F'"' '/"note"/ { print "> " $4 ": " $8 } !/"op"/ { next }
            { match($0, /"ms":[0-9.e+-]+/); ms = substr($0, RSTART + 5, RLENGTH - 5); match($0, /"share":[0-9.e+-]+/); share = 100 * substr($0, RSTART + 8, RLENGTH - 8) }
            $8 == "step" { match($0, /"tokens_per_s":[0-9.e+-]+/); printf "> %s: %.1f ms, %.0f tok/s:%s\n", $4, ms, substr($0, RSTART + 15, RLENGTH - 15), top; top = ""; n = 0; next }
            n++ < 3 { top = top sprintf(" %s %.0f%%", $8, share) }' "$work/figures"
    done
    return $status
}
run_speed() {
    local status=0 model
    for model in "${speeds[@]}"; do training "${model%%|*}" 4 "${model#*|}" || status=1; done
    return $status
}
# peak COMMAND...: reports the GPU's peak memory use while the command runs.
peak() {
    ( while :; do nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; sleep 0.5; done >"$work/memory" 2>&1 ) &
    local sampler=$! status
    "$@"
    status=$?
    kill $sampler
    say "peak $(sort -g "$work/memory" | tail -n 1 | awk '{ printf "%.1f GiB", $1 / 1024 }'), planned $(awk '/^ *total / { print $(NF - 1), $NF; exit }' "$work/training")"
    return $status
}
whole="--preset llama2-7b --vocab-size 32000 --micro-batch-size 1 --global-batch-size 8 --seq-length 4096 --save-in-foreground"
in_bf16=(--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16)
run_whole7b() {
    local status=0
    peak training "7B, bf16 state, selective" 4 "$whole" --recompute selective "${in_bf16[@]}" || status=1
    peak training "7B in FP8, bf16 state, full" 4 "$whole" --recompute full --fp8 hybrid "${in_bf16[@]}" || status=1
    return $status
}
run_same() {
    local status=0 run text options
    program gpu_tests
    for run in a b fp8; do
        [[ $run != fp8 ]] && options=() || options=(--fp8 hybrid --fp8-start $((STEPS / 6)))
        trained "$pack/gpu_tests train_gpt" "$pack/data" "$pack/tok" "$work/$run" "${options[@]}" || { say "training $run: exit status $?"; return 1; }
    done
    text=$(same "$work"/{a,b}/log.jsonl) || status=1
    say "twice: $text"
    text=$(near "$work/a/log.jsonl" "$pack/cpu.jsonl" 0.003) || status=1
    say "and the CPU: $text"
    text=$(near "$work/fp8/log.jsonl" "$pack/cpu-fp8.jsonl" 0.01) || status=1
    say "and the CPU in FP8: $text"
    return $status
}
run_ncu() {
    command -v ncu >/dev/null || skip "there is no ncu"
    program bench
    local number='(\(int\))?' boolean='(\(bool\))?' kernel status=1
    local kernels=("--attention|keys_kernel<${number}64, ${boolean}(0|false)[,>]" "--attention|keys_kernel<${number}64, ${boolean}(1|true)[,>]"
        "--attention|queries_kernel<${number}64[,>]" "--attention|attention_forward_kernel<${number}64" "--profile llama-1b 4 2048 none 2|norm_backward_kernel")
    for kernel in "${kernels[@]}"; do
        # shellcheck disable=SC2086
        ncu --clock-control none --kernel-name-base demangled -k "regex:${kernel#*|}" -s 1 -c 1 --csv --section SpeedOfLight \
            --section ComputeWorkloadAnalysis "$pack/bench" ${kernel%%|*} --seconds 4 >"$work/ncu" 2>&1
        cat "$work/ncu"
        text=$(awk -F'","' '/"Metric Name"/ { for (i = 1; i <= NF; i++) { if ($i == "Metric Name") name = i; if ($i ~ /^Metric Value/) value = i } next }
            value && $name ~ /^(Issue Slots Busy|(L1.TEX Cache|L2 Cache|DRAM) Throughput|Duration)$/ { x = $value; gsub(/"/, "", x); printf " %s %s", $name, x }' "$work/ncu")
        say "${kernel#*|}:${text:- nothing was measured: $(grep '==ERROR==' "$work/ncu" | head -n 1)}"
        [[ -z $text ]] || status=0
    done
    return $status
}

# ---- second -------------------------------------------------------------------------------------------------------------------
# ladder PROGRAM: the rows of its table that have a share.
ladder() {
    local status
    program "$1"
    timeout -k 2 30 "$pack/$1" >"$work/ladder" 2>&1
    status=$?
    [[ $status == 0 ]] || say "$1: exit status $status: $(grep '^FAILED' "$work/ladder" | head -n 2 | tr '\n' ' ')"
    cat "$work/ladder"
    grep '%' "$work/ladder" | cut -c1-110 | sed "s/^/> ${1#ladder_} /"
    return $status
}
run_gemm() { ladder ladder_gemm; }
run_experts() {
    figures "$(within 2)" --experts --seconds "$(within 7)"
    local status=$?
    rates
    return $status
}
run_offload7b() {
    local status=0 two=${whole/micro-batch-size 1/micro-batch-size 2}
    peak training "7B, bf16 state on the host" 4 "$two" --offload optimizer "${in_bf16[@]}" || status=1
    peak training "7B in FP8, bf16 state on the host" 4 "$two" --offload optimizer --fp8 hybrid "${in_bf16[@]}" || status=1
    return $status
}
run_gradients7b() {
    peak training "7B, bf16 state and gradients on the host" 2 "${whole/micro-batch-size 1/micro-batch-size 4}" --offload gradients --recompute full "${in_bf16[@]}"
}
run_ladders() {
    local path status=0
    for path in "$pack"/ladder_*; do
        [[ $path == */ladder_gemm ]] || ladder "${path##*/}" || status=1
    done
    return $status
}
is_h200() { [[ $backend == emu ]] || nvidia-smi -L | grep -q 'H200\|B200\|B100\|GB200'; }
run_h200() {
    is_h200 || skip "this is no H200"
    local status=0
    training "124M, logits in parts" 4 "${speeds[0]#*|}" || status=1
    training "124M, logits of all rows" 4 "${speeds[0]#*|}" --head-rows 65536 || status=1
    return $status
}
run_h200_7b() {
    is_h200 || skip "this is no H200"
    peak training "7B, fp32 state, selective" 4 "$whole" --recompute selective
}

# ---- node: 8 GPUs -------------------------------------------------------------------------------------------------------------
ranks() { echo "mpirun --allow-run-as-root -n $1"; }
run_nccl() {
    command -v all_reduce_perf >/dev/null || skip "there is no all_reduce_perf (nccl-tests)"
    all_reduce_perf -b 64M -e 1G -f 4 -g 8 | tee "$work/nccl"
    say "all-reduce: $(grep 'Avg bus' "$work/nccl")"
}
run_zero() {
    local n status=0
    for n in 1 2 4 8; do RANKS=$(ranks $n) training "ZeRO-1 on $n" 4 "${speeds[1]#*|}" || status=1; done
    return $status
}
run_tp8() { RANKS=$(ranks 8) training "TP 8" 4 "$whole" --tp 8; }
run_pp8() { RANKS=$(ranks 8) training "PP 8" 4 "$whole" --pp 8; }
run_interleaved() {
    local n status=0
    for n in 32 8; do
        CUDA_DEVICE_MAX_CONNECTIONS=$n RANKS="timeout 28 $(ranks 8)" training "PP 8, VPP 2, $n connections" 2 "$whole" --pp 8 --vpp 2 || ((n == 8)) || status=1
    done
    return $status
}
run_killed() {
    local log=$work/killed run=$work/run-killed began running victim status
    program gpu_tests
    rm -rf "$run"
    STEPS=100000 trained "$(ranks 8) $pack/gpu_tests train_gpt" "$pack/data" "$pack/tok" "$run" --global-batch-size 32 >"$log" 2>&1 &
    running=$!
    for _ in $(seq 300); do [[ $(losses "$run/log.jsonl" | wc -l) -lt 3 ]] || break; sleep 0.1; done
    victim=$(pgrep -f "gpu_tests train_gpt.*$run" | tail -n 1)
    [[ -n $victim ]] || { say "no rank was found: $(tail -n 1 "$log")"; return 1; }
    began=$(now)
    kill -9 "$victim"
    wait $running
    status=$?
    cat "$log"
    say "ended after $(since "$began") s with status $status: $(grep -i 'error\|signal' "$log" | head -n 1 | cut -c1-160)"
    [[ $status != 0 ]]
}

# ---- one experiment, in a process of its own ----------------------------------------------------------------------------------
if [[ ${part:-} == run ]]; then
    "run_$2"
    exit
fi

# ---- the table ------------------------------------------------------------------------------------------------------------------
usage() {
    sed -n '2,/^set /p' "$0" | grep '^#' | cut -c3-
    printf '\n%-8s %5s  %-10s %s\n' "" s NAME experiment
    local line
    for line in "${experiments[@]}"; do printf '%-8s %5s  %-10s %s\n' "$(field "$line" 1)" "$(field "$line" 2)" "$(field "$line" 3)" "$(field "$line" 4)"; done
}
names=() part=
for word in "$@"; do
    case $word in
        --help | -h | --list) usage; exit 0 ;;
        first | second | node) part=$word; for line in "${experiments[@]}"; do [[ $(field "$line" 1) != "$word" ]] || names+=("$(field "$line" 3)"); done ;;
        *) [[ -n $(line_of "$word") ]] || { echo "error: there is no experiment '$word'; HINT: --list" >&2; exit 2; }; names+=("$word") ;;
    esac
done
((${#names[@]})) || { usage >&2; exit 2; }
[[ $part != second ]] && budget=${BUDGET:-480} || budget=${BUDGET:-200}
began=$(now)
gpus=$([[ $backend == emu ]] && echo emulator || nvidia-smi --query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm --format=csv,noheader 2>/dev/null)
[[ -n $gpus ]] || { echo "error: nvidia-smi finds no GPU" >&2; exit 1; }
if [[ $part == node ]]; then
    n=$(wc -l <<<"$gpus")
    [[ $backend == emu ]] || ((n >= 8)) || { echo "error: node needs 8 GPUs, nvidia-smi finds $n" >&2; exit 1; }
    command -v mpirun >/dev/null || { echo "error: node needs mpirun, and a pack built with make gpu-pack MPI=1" >&2; exit 1; }
fi
mkdir -p "$out"
export work figures_file
work=$(mktemp -d) figures_file=$(realpath "$out")/figures.jsonl
trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache
# Prefer the toolkit's libraries, then the ones in Python packages, which the loader does not find itself.
for folder in "$pack" /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 $(python3 -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null | tr ' ' '\n' | sed 's|$|/*/lib|'); do
    [[ ! -d $folder ]] || LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH

table=$out/table.md
# row NAME STATUS TEXT: prints the current experiment's row.
row() { printf '| %s | %s: %s | %s | %s |\n' "$(field "$line" 4)" "$2" "$3" "$(field "$line" 5)" "$(field "$line" 6)" | tee -a "$table"; }
today=$(date -u +%Y-%m-%d)
card=$(sort <<<"$gpus" | uniq -c | sed 's/^ *1 //; s/^ *//')
commit=$(cat "$pack/VERSION")
printf '%s\n' "## $today: $card; ${*}; commit $commit" "" "| experiment | measured | predicted | decides |" "| --- | --- | --- | --- |" | tee -a "$table"
for name in "${names[@]}"; do
    line=$(line_of "$name")
    start=$(now)
    log=$work/log
    attempt "$name" "$(field "$line" 2)" "$log" bash "$pack/gpu_minutes.sh" --run "$name"
    status=$?
    if [[ -z $ended ]]; then failed=1; continue; fi
    { echo "==== $name: $ended, $(since "$start") s"; cat "$log"; } >>"$out/log.txt"
    text=$(sed -n 's/^> //p' "$log" | tr '|\n' '/;' | sed 's/;$//; s/;/; /g' | cut -c1-3000)
    case $status in
        0) row "$name" "ok, $(since "$start") s" "$text" ;;
        77) row "$name" skipped "${text#skipped: }" ;;
        *) fail "$name" "$ended${text:+; $text}"; tail -n 15 "$log" | cut -c1-200 ;;
    esac
done
exit $failed
