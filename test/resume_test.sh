#!/usr/bin/env bash
# A run may die at any moment and lose nothing: stopped and resumed runs end with an uninterrupted run's bits, for every
# family, with ramp-up, blending, short epochs and every schedule; kill -9 at random times, during training and saving;
# damaged checkpoints are reported by name and skipped; a full disk and a second run do no harm.
#   TRAIN_GPT=path/to/train_gpt test/resume_test.sh
. "$(dirname "$0")/lib.sh"
trap 'umount "$work/tiny" 2>/dev/null; rm -rf "$work"' EXIT
KILLS=${KILLS:-${ALL:+100}}
KILLS=${KILLS:-25}
[[ -z ${SAN:-} ]] || KILLS=10

# Weights, masters and moments have the same bits.
same() {
    local file
    for file in $(cd "$1/latest" && find . -name '*.safetensors'); do cmp "$1/latest/$file" "$2/latest/$file" || return 1; done
}
same_losses() { [[ "$(losses "$1")" == "$(losses "$2")" ]]; }
valid_losses() { sed -n 's/.*"kind":"valid","step":\([0-9]*\),"loss":\([0-9.e+-]*\).*/\1 \2/p' "$1/log.jsonl"; }
# same_validations A B STEP: run B's validations are run A's after STEP.
same_validations() { [[ "$(valid_losses "$1" | awk "\$1 > $3")" == "$(valid_losses "$2")" ]]; }

kings 500 5 >text.txt
for i in $(seq 1 120); do echo "birds $((i * 3 % 50)) sang in tree $((i % 13))"; [[ $((i % 4)) == 0 ]] && echo; done >small.txt
expect "tokenizer" "$program" tokenizer --input text.txt small.txt --vocab-size 380 --output tok
for name in text small; do expect "prepare $name" "$program" prepare --input $name.txt --output $name --tokenizer tok --split-documents blank; done

small=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --split "90, 10, 0" --seq-length 24 --micro-batch-size 2 --lr 3e-3 --min-lr 1e-4
    --eval-interval 7 --eval-iters 1 --threads 1)
llama=(--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-query-groups 2)
declare -A run=(
    [gpt2]="--data-path text --global-batch-size 4 --train-iters 30 --z-loss 1e-4"
    [bloom]="--position-embedding-type alibi --embed-layernorm --data-path text --global-batch-size 4 --train-iters 30 --recompute full --lr-decay-style linear"
    [llama-wsd]="${llama[*]} --data-path text --global-batch-size 4 --train-iters 30 --lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 4 --exp-avg-sq-dtype fp8"
    [blend-epochs]="${llama[*]} --data-path 0.5 text 0.5 small --global-batch-size 8 --train-iters 30"
    [ramp-up]="${llama[*]} --data-path text small --global-batch-size 16 --rampup-batch-size 4 4 120 --train-samples 360 --skip-train-iteration-range 6-8 13 20-21 --skip-batches 17 --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    [documents]="--data-path small --global-batch-size 4 --train-iters 30 --reset-position-ids --reset-attention-mask --eod-mask-loss --ema-decay 0.9 --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.2 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"
)
train() {
    local name=$1 out=$2
    shift 2
    # shellcheck disable=SC2086
    ${EXEC:-} "$program" train ${run[$name]} "${small[@]}" --out "$out" "$@"
}
for name in "${!run[@]}"; do
    expect "$name: whole" train "$name" "$name-whole" --save-every 4 --keep 0
    steps=$(losses "$name-whole" | wc -l)
    expect "$name: at least 30 steps" test "$steps" -ge 30
    # The run can be resumed from each of its checkpoints.
    for from in 4 12 20 28; do
        expect "$name: resume from step $from" train "$name" "$name-from-$from" --resume "$name-whole/step_$(printf '%08d' $from)" --save-in-foreground
        expect "$name: from step $from to the same bits" same "$name-whole" "$name-from-$from"
        expect "$name: from step $from validated as it, on samples that move on" same_validations "$name-whole" "$name-from-$from" "$from"
    done
    expect "$name: some steps" train "$name" "$name-stopped" --exit-after 0.03s --save-every 5
    for again in 1 2 3; do "$program" true 2>/dev/null; train "$name" "$name-stopped" --exit-after 0.03s --resume auto >again.txt 2>&1; done
    expect "$name: stopped four times, then to the end" train "$name" "$name-stopped" --resume auto
    expect "$name: stopped: the same bits" same "$name-whole" "$name-stopped"
    expect "$name: stopped: the same losses, each step once" same_losses "$name-whole" "$name-stopped"
done
# Another matrix unit may round differently: a resumed run uses the checkpoint's, even if another is faster now.
expect "portable: whole" train gpt2 portable-whole --matrix-unit portable --save-every 10 --keep 0
expect "portable: resumed without the option" train gpt2 portable --resume portable-whole/step_00000010
says "portable: still that" "backend  *cpu, 1 thread, portable at"
expect "portable: the same bits" same portable-whole portable
expect "a finished run has nothing to do" train gpt2 gpt2-whole --resume auto
says "it says so" "is finished: 30 of 30"

# ---- kill -9 at random times, while training and while saving every third step ----
killed=0 runs=0
while [[ $killed -lt $KILLS && $runs -lt $((20 * KILLS)) ]]; do
    runs=$((runs + 1))
    [[ $(readlink killed/latest) == step_00000030 ]] && { same blend-epochs-whole killed || echo "FAILED: kill -9: other bits after $killed kills"; rm -rf killed; }
    EXEC=exec train blend-epochs killed --resume auto --save-every 3 >killed.txt 2>&1 &
    pid=$!
    sleep "0.0$((RANDOM % 60 + 10))"
    kill -9 $pid 2>/dev/null && killed=$((killed + 1))
    wait $pid 2>/dev/null
done
expect "$killed kills happened" test "$killed" -ge "$KILLS"
expect "kill -9: then to the end" train blend-epochs killed --resume auto
expect "kill -9: the same bits" same blend-epochs-whole killed
expect "kill -9: the same losses, each step once" same_losses blend-epochs-whole killed
expect "kill -9: nothing half-written is left" test -z "$(find killed -name '.step_*' -o -name '*.tmp*')"

# ---- checkpoints that are never deleted ----
expect "every 8th step is kept, however often a run saves" train gpt2 every --save-every 30m --keep 1 --keep-every 8
expect "and the last" test "$(printf '%s\n' every/step_* | wc -l) $(printf '%s\n' every/step_* | tail -n 2 | tr '\n' ' ')" == "4 every/step_00000024 every/step_00000030 "

# ---- the moving average of the weights ----
few=(--train-iters 8 --lr-decay-iters 8 --eval-interval 4 --eval-fixed)
expect "without an average" train gpt2 plain "${few[@]}"
# A model with fp32 files: training starts from every bit of it.
weights_of() { if [[ -e $1/training/master.safetensors ]]; then echo "$1/training/master.safetensors"; else echo "$1/model.safetensors"; fi; }
mkdir fp32 && cp plain/latest/*.json fp32 && rm fp32/manifest.json && cp "$(weights_of plain/latest)" fp32/model.safetensors
expect "trained further from fp32" "$program" train --model fp32 --data-path text --seq-length 24 --global-batch-size 2 --micro-batch-size 2 --train-iters 1 --lr 1e-20 --out from-fp32
expect "begins with every bit" cmp "$(weights_of from-fp32/latest)" fp32/model.safetensors
expect "with one" train gpt2 averaged "${few[@]}" --ema-decay 0.3 --save-every 1 --keep 0
training_same() { for file in model training/exp_avg training/exp_avg_sq; do cmp "$1/latest/$file.safetensors" "$2/latest/$file.safetensors" || return 1; done; }
expect "an average changes no bit of the training" training_same plain averaged
expect "nor a loss" test "$(losses plain) $(valid_losses plain)" == "$(losses averaged) $(valid_losses averaged)"
# After update t the average is d of itself and 1 - d of the weights, d = min(0.3, t / (9 + t)).
cat >average.py <<'END'
import json, os, struct, sys
def values(step, *names):
    path = next(p for p in (f"averaged/step_{step:08d}/{n}.safetensors" for n in names) if os.path.exists(p))
    data = open(path, "rb").read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    return {n: struct.unpack(f"<{(b - a) // 4}f", data[start + a:start + b]) for n, t in header.items() if n != "__metadata__"
            for a, b in [t["data_offsets"]] if t["dtype"] == "F32"}
for t in range(2, 9):
    before, after = (values(s, "training/ema", "ema/model") for s in (t - 1, t))
    weights, d = values(t, "training/master", "model"), min(0.3, t / (9 + t))
    assert len(weights) > 10
    worst = max(abs(d * a + (1 - d) * w - b) for n in weights for a, w, b in zip(before[n], weights[n], after[n]))
    assert worst < 1e-6, (t, worst)
    assert t < 8 or max(abs(w - b) for n in weights for w, b in zip(weights[n], after[n])) > 1e-5
END
expect "the average is its formula's" python3 average.py
expect "it is validated" grep -q '"kind":"valid","step":8,.*"ema_loss":[0-9]' averaged/log.jsonl
expect "it has its curve" grep -q '"name":"EMA"' averaged/report.html
expect "it is a model" "$program" generate --model averaged/latest/ema --prompt "in the year" --max-new-tokens 4 --temperature 0
expect "resumed without it: refused" refused train gpt2 x "${few[@]}" --resume averaged/step_00000004
says "resumed without it: which option" "--override ema-decay"
expect "begun on a resume" train gpt2 begun "${few[@]}" --resume plain --override ema-decay train-iters --ema-decay 0.9 --train-iters 9
expect "begun on a resume: it is written" test -s begun/latest/ema/model.safetensors

# ---- the run's own global batch size ----
implicit() { "$program" train "${small[@]}" --data-path text --train-iters 8 --save-every 4 --keep 0 --out implicit "$@"; }
expect "without --global-batch-size" implicit
rm -r implicit/step_00000008 && ln -sfn step_00000004 implicit/latest
expect "fewer samples at a time: another batch is refused" refused implicit --resume auto --micro-batch-size 1
says "with what keeps it" "global batch is 1 sample, .* written with 2,.*HINT: --global-batch-size 2 keeps it"
expect "which goes on" implicit --resume auto --micro-batch-size 1 --global-batch-size 2

# ---- latest decides ----
cp -r gpt2-whole unpointed
ln -sfn step_00000020 unpointed/latest
expect "killed between a checkpoint and latest: goes on" train gpt2 unpointed --resume auto --keep 0
expect "killed between a checkpoint and latest: the same bits" same gpt2-whole unpointed
expect "killed between a checkpoint and latest: each step once" same_losses gpt2-whole unpointed
expect "gone back to an older one" train gpt2 unpointed --resume unpointed/step_00000012 --exit-after 0.0001s --keep 1
expect "it is not pushed out by those after it" test -s unpointed/latest/training/state.json
expect "then on from there, not from those after it" train gpt2 unpointed --resume auto --keep 1
expect "gone back: each step once" same_losses gpt2-whole unpointed
expect "gone back: the same bits" same gpt2-whole unpointed
expect "gone back: one checkpoint is kept" test "$(printf '%s ' unpointed/step_????????)" == "unpointed/step_00000030 "
expect "gone back: those after it have other names" test "$(ls -d unpointed/step_00000030.* unpointed/step_00000028.* | tr '\n' ' ')" == "unpointed/step_00000028.1 unpointed/step_00000030.1 unpointed/step_00000030.2 "
cp -r gpt2-whole behind
ln -sfn step_00000020 behind/latest
expect "inspect shows the checkpoint to resume from" "$program" inspect behind
says "not the newest" "step  *20$"

# ---- damage ----
damage() { # NAME COMMAND: damages the newest checkpoint of a fresh copy
    rm -rf damaged
    cp -r gpt2-whole damaged
    rm -rf damaged/step_00000030 damaged/step_00000029
    ln -sfn step_00000028 damaged/latest
    (cd damaged/step_00000028 && eval "$2") || echo "FAILED: damage: $1"
    expect "$1: the older one is taken" train gpt2 damaged --resume auto
    says "$1: and the file named" "warning: .*step_00000028"
    expect "$1: to the same bits" same gpt2-whole damaged
    cp -r gpt2-whole/step_00000028 spoiled
    (cd spoiled && eval "$2")
    expect "$1: by name it is refused" refused train gpt2 "refused" --resume spoiled
    says "$1: with a reason" "cannot resume from spoiled"
    rm -rf spoiled
}
damage "a flipped bit in the model" "printf x | dd of=model.safetensors bs=1 seek=5000 conv=notrunc status=none"
damage "a truncated moment" "truncate -s 5000 training/exp_avg.safetensors"
damage "a missing master" "rm training/master.safetensors 2>/dev/null || rm training/exp_avg_sq.safetensors"
damage "a changed state" "sed -i 's/\"step\": 28/\"step\": 29/' training/state.json"
damage "no manifest" "rm manifest.json"
rm -rf damaged && cp -r gpt2-whole damaged
for dir in damaged/step_*; do rm "$dir/config.json"; done
expect "all damaged: refused" refused train gpt2 damaged --resume auto
says "all damaged: says so" "none of the .* checkpoints"

expect "inspect: an intact checkpoint" "$program" inspect gpt2-whole/step_00000028
says "inspect: its step" "step  *28"
says "inspect: its checksums" "all files are as they were written"
expect "inspect: a run" "$program" inspect gpt2-whole
says "inspect: every checkpoint" "step_00000004 *intact"
expect "inspect: a damaged run" refused "$program" inspect damaged
says "inspect: names the file" "config.json"
expect "inspect: data" "$program" inspect text
says "inspect: documents" "documents *100"
expect "inspect: a tokenizer" "$program" inspect tok
expect "inspect: tensors" "$program" inspect gpt2-whole/latest/model.safetensors
says "inspect: a tensor's shape" "transformer.h.0.attn.c_attn.weight *[BF3216]* \[32, 96\]"
expect "inspect: something else is refused" refused "$program" inspect text.txt

# ---- contradicting options ----
expect "another learning rate is refused" refused train gpt2 x --resume gpt2-whole/step_00000028 --lr 1e-3
says "it is named" "--override lr"
expect "unless it is overridden" train gpt2 overridden --resume gpt2-whole/step_00000028 --lr 1e-3 --override lr
says "which is said" "overridden: lr is 0.001, it was 0.003"
expect "and logged" grep -q '"event":"override","message":"overridden: lr is 0.001, it was 0.003"' overridden/log.jsonl
expect "rope scaling that the checkpoint does not have is refused" refused train llama-wsd x --resume llama-wsd-whole --rope-scaling linear
says "it is named" "the model differs from the checkpoint's.*'rope_scaling' is absent in the checkpoint"
dtype_of() { "$program" inspect "$1/latest/training/$2.safetensors" | grep -o 'BF16\|F32' | sort -u; }
expect "a moment in fewer bits is refused" refused train gpt2 x --resume gpt2-whole/step_00000028 --exp-avg-sq-dtype bf16
says "it is named" "exp-avg-sq-dtype is \"bf16\"; the checkpoint was written with \"fp32\".*--override exp-avg-sq-dtype"
expect "unless it is overridden" train gpt2 narrowed --resume gpt2-whole/step_00000028 --exp-avg-sq-dtype bf16 --override exp-avg-sq-dtype
expect "and is stored so, the other as it was" test "$(dtype_of narrowed exp_avg_sq) $(dtype_of narrowed exp_avg)" == "BF16 F32"
expect "moments in more bits need no leave" train ramp-up widened --resume ramp-up-whole/step_00000028 --main-grads-dtype fp32 --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32
says "which is said" 'overridden: main-grads-dtype is "fp32", it was "bf16"; exp-avg-dtype is "fp32", it was "bf16"; exp-avg-sq-dtype is "fp32", it was "bf16"'
expect "and are stored so" test "$(dtype_of ramp-up-whole exp_avg) $(dtype_of widened exp_avg)" == "BF16 F32"
# A longer run keeps the order of its samples if it reads the data as often.
fixed=(--lr-decay-iters 60 --eval-interval 40)
expect "60 steps" train gpt2 longer-whole "${fixed[@]}" --train-iters 60
expect "30 steps" train gpt2 longer "${fixed[@]}"
# Make the log say that the first part took 1000 seconds and had the best validation.
sed -i 's/"seconds":[0-9.]*/"seconds":1000.5/; s/\("kind":"valid","step":[0-9]*,"loss":\)[0-9.]*/\10.25/' longer/log.jsonl
expect "then 30 more" train gpt2 longer "${fixed[@]}" --resume auto --train-iters 60 --override train-iters --name renamed
says "the time goes on from before" "finished after 60 steps and .* tokens in 16m 4[01]s"
says "and the best validation" "best validation 0.2500 at step 30"
expect "the log tells what has changed" grep -q '{"kind":"change","step":30,"name":"renamed","total_steps":60,' longer/log.jsonl
expect "the report as well" grep -q "renamed" longer/report.html
expect "the report counts to the new end" refused grep -q "of 30" longer/report.html
expect "the log's seconds as well" test "$(grep -o '"seconds":[0-9]*' longer/log.jsonl | tail -n 1 | cut -d : -f 2)" -ge 1000
sed -i 's/"loss":0.25,/"loss":99,/' longer/log.jsonl
expect "are the 60 steps, to the bit" same longer-whole longer
expect "and are validated as they" test "$(valid_losses longer | tail -n 2)" == "$(valid_losses longer-whole)"
expect "into a second epoch: refused" refused train gpt2 longer "${fixed[@]}" --resume auto --train-iters 90 --override train-iters
says "says what happens and what can be done" "text is now read in 2 epochs.* for 360 samples, the checkpoint's 240 used 1 epoch;.* HINT: with at most [0-9]* samples the order is kept; --override data-order"
expect "unless the new order is wanted" train gpt2 longer "${fixed[@]}" --resume auto --train-iters 90 --override train-iters data-order
expect "which then is the run's" train gpt2 longer "${fixed[@]}" --resume auto --train-iters 90
says "as it was" "is finished: 90 of 90"
expect "dropped batches into a second epoch: refused" refused train gpt2 longer-whole "${fixed[@]}" --resume auto --skip-train-iteration-range 61-90 --train-iters 61 --override train-iters
says "by the same words" "--override data-order"

expect "another dropout is refused" refused train gpt2 x --resume gpt2-whole/step_00000028 --hidden-dropout 0.1
says "it is named" "hidden-dropout is 0.1; the checkpoint was written with 0.*--override hidden-dropout"
expect "unless it is overridden" train gpt2 dropout --resume gpt2-whole/step_00000028 --hidden-dropout 0.1 --override hidden-dropout

expect "from a model" "$program" train "${small[@]}" --model gpt2-whole --data-path text --train-iters 2 --out from-model
expect "resumed with another model" "$program" train "${small[@]}" --model plain --data-path text --train-iters 2 --resume from-model --out from-model
says "a note that it is not read" "note: --model plain/step_00000008 is not read: resuming from-model/step_00000002, whose run started from gpt2-whole/step_00000030"
expect "another size is refused" refused train gpt2 x --resume gpt2-whole/step_00000028 --hidden-size 64
says "the field is named" "'n_embd' is 32 in the checkpoint and 64"
expect "another family is refused" refused train llama-wsd x --resume gpt2-whole/step_00000028
expect "other data is refused" refused train gpt2 x --resume gpt2-whole/step_00000028 --data-path small
says "the data is named" "--override data-path"
expect "a directory without training state is refused" bash -c "cp -r gpt2-whole/step_00000028 bare; rm -r bare/training; ! '$program' train ${run[gpt2]} --resume bare --tokenizer tok"

# ---- a second run in the same directory ----
EXEC=exec train gpt2 busy --train-iters 1000000 >busy.txt 2>&1 &
pid=$!
comes grep '"kind":"step"' busy/log.jsonl
expect "a second run in the same directory is refused" refused train gpt2 busy --train-iters 1000000
says "it says who is there" "another run is writing to busy (process $pid)"
kill -USR1 $pid
expect "SIGUSR1 saves and ends with status 0" wait $pid
expect "it wrote a checkpoint" test -s busy/latest/training/state.json

# ---- disk full while training: the run continues, older checkpoints stay, and saving is tried again ----
if mkdir tiny && mount -t tmpfs -o size=6000k tmpfs tiny 2>/dev/null; then
    head -c 5000000 /dev/zero >tiny/ballast
    EXEC=exec train llama-wsd tiny/out --train-iters 1000000 --save-every 0.2s --keep 1 --lr-wsd-decay-iters 8 >tiny.txt 2>&1 &
    pid=$!
    expect "disk full: it says so, loudly" comes grep -q "was NOT saved: no space" tiny.txt
    rm tiny/ballast
    expect "disk full: with space again it saves" comes test -e tiny/out/latest
    kill -USR1 $pid
    expect "disk full, then space again: ends well" wait $pid
    expect "the last checkpoint is intact" "$program" inspect tiny/out
    expect "nothing half-written is left" test -z "$(find tiny/out -name '.step_*')"
    umount tiny
fi

# ---- a disk with room for fewer than --keep + 1 checkpoints ----
one=$(du -sk --apparent-size gpt2-whole/step_00000030 | cut -f1)
if mkdir -p tiny && mount -t tmpfs -o size=$((one * 28 / 10))k tmpfs tiny 2>/dev/null; then
    expect "room for two and a half, --keep 2" train gpt2 tiny/out --save-every 5 --keep 2 --save-in-foreground
    says "it is said in the beginning" "free space .*less than 3 more"
    expect "room for two and a half: no save fails" refused grep -q "NOT saved" tiny/out/log.jsonl
    expect "room for two and a half: the last ones are there" test "$(ls -d tiny/out/step_* | tr '\n' ' ')" == "tiny/out/step_00000025 tiny/out/step_00000030 "
    umount tiny
fi
