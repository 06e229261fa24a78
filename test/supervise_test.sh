#!/usr/bin/env bash
# train_gpt supervise: jobs that are restarted until they are finished, on the right nodes; given up or stopped when they should.
#   TRAIN_GPT=build/cpu-bf16/train_gpt test/supervise_test.sh
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 # MPI does not free all its memory

supervise() { timeout -k 5 240 "$program" supervise --restart-wait 0 "$@"; }
field() { grep -o "\"$2\":[^,}]*" "$1/supervise.jsonl" | cut -d: -f2- | tr -d '"' | tr '\n' ' '; }

# ---- jobs without a model: a script that keeps a count of its starts, and logs steps ----
cat >job <<'END'
#!/usr/bin/env bash
# job KIND COUNT PLACE...: does KIND in its first COUNT starts, then ends well. PLACE is noted.
mkdir -p out
n=$(($(cat starts 2>/dev/null || echo 0) + 1))
echo $n >starts
echo "${*:3}" >>places
step() { echo "{\"kind\":\"step\",\"step\":$1,\"loss\":1,\"step_ms\":100}" >>out/log.jsonl; }
[[ $n -le $2 ]] || { step $((n * 10)); exit 0; }
case $1 in
    fails) step $n; echo "error: something" >&2; exit 1 ;;
    same) step 7; echo "error: a fault of the program" >&2; exit 1 ;;
    usage) echo "error: '--x' is not an option" >&2; exit 2 ;;
    dies) step $n; echo "mpirun noticed that process rank 3 with PID 7 on node n2 exited on signal 9 (Killed)." >&2; exit 137 ;;
    wrong) step $n; echo "error on rank 0 of 8 (host n1): since step 7 the weights on rank 5 (host n2) have changed in memory without being written; HINT: resume from a checkpoint, without that machine" >&2; exit 1 ;;
    either) step $n; echo "error on rank 0 of 8 (host n1): at step 7 w has other bits on rank 5 (host n2) than on rank 1 (host n1); HINT: resume from a checkpoint, without that machine" >&2; exit 1 ;;
    stalls) step $n; sleep 1000 ;;
    leaves) step $n; (trap "" TERM; sleep 1000) & (setsid sleep 1001 &); exit 1 ;;
    saves) step $n; mkdir -p out/step_0000000$n && ln -sfn step_0000000$n out/latest; exit 1 ;;
esac
END
chmod +x job
fresh() { rm -rf out starts places; }
expect "a job that ends well" supervise --run out -- ./job fails 0
says "is started once" "^supervise: 0 restarts in"
fresh
expect "one that fails four times, further each time" supervise --run out -- ./job fails 4
says "is restarted four times" "^supervise: 4 restarts in .*% of that time in steps that count"
expect "each is on record" test "$(field out step)" == "1 2 3 4 "
expect "with its evidence" test "$(field out evidence | sed 's/ *$//')" == "error: something error: something error: something error: something"
fresh
expect "one that fails at the same step again and again" refused supervise --run out -- ./job same 100
says "is given up after three" "^error: supervise gives up: it ended 3 times in a row at step 7; the last cause: error: a fault of the program"
expect "was started three times" test "$(cat starts)" == 3
fresh
expect "one with a wrong command line" refused supervise --run out -- ./job usage 100
says "is given up at once" "gives up: the command line is wrong; the last cause: error: '--x' is not an option"
expect "was started once" test "$(cat starts)" == 1
fresh
expect "at most --restarts" refused supervise --run out --restarts 2 -- ./job fails 100
says "are made" "gives up: it was restarted 2 times without a new checkpoint (--restarts)"
fresh
expect "restarts after a checkpoint" supervise --run out --restarts 1 -- ./job saves 4
says "are not counted" "^supervise: 4 restarts in"
fresh
expect "a command that does not exist" refused supervise --run out -- ./no-such-job
says "is named" "cannot run ./no-such-job"
fresh
expect "a job whose log has no news" supervise --run out --stall-timeout 3 -- ./job stalls 2
says "is ended and restarted" "^supervise: 2 restarts in"
expect "the record says why" test "$(field out evidence)" == "log.jsonl has had no news for 3.0s log.jsonl has had no news for 3.0s "
fresh
expect "processes that a job leaves behind" supervise --run out -- ./job leaves 1
expect "are ended" refused pgrep -f "^sleep 100[01]"
fresh
expect "waits double without checkpoints" supervise --run out --restart-wait 0.2 -- ./job fails 4
expect "up to a limit" test "$(field out wait)" == "0.2 0.4 0.8 1.6 "
fresh
supervise --run out --restart-wait 0.1 -- ./job saves 3 >out.txt 2>&1
expect "but not where checkpoints were saved" test "$(field out wait)" == "0.1 0.1 0.1 "

# ---- nodes ----
on_nodes() { supervise --run out --hosts n1:4 n2:4 "$@" '{ranks}' '{hosts}'; }
fresh
expect "a node that dies twice" on_nodes --spare n3:2 n4:4 -- ./job dies 3
says "is replaced by a spare that is large enough" "node n2 is no longer used; n4 takes its place"
expect "after the second time" cmp places <(printf '8 n1:4,n2:4\n8 n1:4,n2:4\n8 n1:4,n4:4\n8 n1:4,n4:4\n')
fresh
expect "a node that computes wrong results" on_nodes --spare n3:4 -- ./job wrong 1
expect "is replaced at once" cmp places <(printf '8 n1:4,n2:4\n8 n1:4,n3:4\n')
fresh && mkdir out
echo '{"kind":"run","options":{"tensor-model-parallel-size":2,"pipeline-model-parallel-size":1,"global-batch-size":8,"micro-batch-size":1}}' >out/log.jsonl
expect "without a spare" on_nodes -- ./job wrong 1
says "the job shrinks" "node n2 is no longer used; 4 ranks are left"
expect "to a number that fits its layout" cmp places <(printf '8 n1:4,n2:4\n4 n1:4\n')
fresh && mkdir out
echo '{"kind":"run","options":{"tensor-model-parallel-size":8,"pipeline-model-parallel-size":1,"global-batch-size":8,"micro-batch-size":1}}' >out/log.jsonl
expect "a layout that fits no fewer ranks" refused on_nodes -- ./job wrong 1
says "is given up rather than trusted" "gives up: node n2 is broken, and no other nodes fit the layout"
fresh && mkdir out
expect "two nodes of which one computes wrong results" on_nodes --spare n3:4 -- ./job either 1
expect "are both used again" cmp places <(printf '8 n1:4,n2:4\n8 n1:4,n2:4\n')
fresh && mkdir out
expect "a node that only dies" on_nodes -- ./job dies 3
expect "is used again then" cmp places <(for _ in 1 2 3 4; do echo "8 n1:4,n2:4"; done)

fresh
expect "a node that fails its check" on_nodes --spare n3:4 --check 'test {host} == n1' -- ./job dies 1
says "is named" "--check fails on n2"
expect "and replaced at once" cmp places <(printf '8 n1:4,n2:4\n8 n1:4,n3:4\n')
fresh
expect "one that passes it" on_nodes --spare n3:4 --check 'test {host} = n2' -- ./job dies 1
expect "is used again" cmp places <(printf '8 n1:4,n2:4\n8 n1:4,n2:4\n')

# ---- check-node ----
expect "a machine that is well" "$program" check-node --seconds 0.1
for check in products memory disk; do says "its $check" "^$check  *[0-9]"; done
expect "two ranks" timeout 100 "$MPIRUN" -n 2 "$program" check-node --seconds 0.1 --threads 1
says "and their links" "^links *rank 1 (host .*): .* sums* of 16"
for fault in product memory disk link; do
    n=$([[ $fault == link ]] && echo 2 || echo 1)
    export TRAIN_GPT_FAULTS="flip-$fault=1:$((n - 1))"
    expect "a wrong bit: $fault" refused timeout 100 "$MPIRUN" -n $n -x TRAIN_GPT_FAULTS "$program" check-node --seconds 0.01 --threads 1
    says "is found: $fault" "^error.*$fault.*; HINT: do not use that machine"
done
unset TRAIN_GPT_FAULTS
no "a folder that cannot be written" "cannot write none/.train_gpt-check" "$program" check-node --seconds 0.01 --path none

# ---- a run on two ranks, whose ranks are killed while it trains ----
kings 300 >text.txt
expect "tokenizer" "$program" tokenizer --input text.txt --vocab-size 380 --output tok
expect "prepare" "$program" prepare --input text.txt --output text --tokenizer tok
options=(--num-layers 2 --hidden-size 32 --num-attention-heads 4 --tokenizer tok --data-path text --seq-length 32 --micro-batch-size 2
    --global-batch-size 8 --train-iters 40 --lr 3e-3 --eval-interval 1000 --eval-iters 0 --quiet --threads 1 --save-every 5)
expect "the undisturbed run" timeout 100 "$MPIRUN" -n 2 "$program" train "${options[@]}" --out calm
export TRAIN_GPT_FAULTS="slow=1-40" # 0.5 s per step, so that there is time to kill
kill_ranks() { # kills a rank each time that two more checkpoints are there, three times
    for step in 5 15 25; do
        comes test -e "stormy/step_$(printf '%08d' $step)" -o -e "stormy/step_$(printf '%08d' $((step + 5)))" || return
        pkill -KILL -n -f "^[^ ]*train_gpt train .*--out stormy --resume auto" || return
    done
}
kill_ranks &
killer=$!
expect "one whose ranks are killed" supervise -- "$MPIRUN" -n 2 "$program" train "${options[@]}" --save-every 5 --out stormy --resume auto
wait $killer
says "is restarted each time" "^supervise: 3 restarts in"
expect "and has the same weights" cmp calm/latest/model.safetensors stormy/latest/model.safetensors
expect "and moments" cmp calm/latest/training/exp_avg.safetensors stormy/latest/training/exp_avg.safetensors
supervise -- "$MPIRUN" -n 2 "$program" train "${options[@]}" --out stopped --resume auto >stopped.txt 2>&1 &
comes grep -q '"step":2' stopped/log.jsonl
pkill -TERM -f "^[^ ]*train_gpt supervise .*--out stopped"
expect "SIGTERM ends the job and its supervisor" wait $!
expect "with a checkpoint" test -e stopped/latest/model.safetensors
expect "without a restart" grep -q "^supervise: 0 restarts" stopped.txt
unset TRAIN_GPT_FAULTS

# ---- refusals ----
no "no command" "the command behind -- is missing" supervise --run out
no "a command without --" "the command behind -- is missing" supervise --run out mpirun -n 2
no "no directory" "the run's directory is missing" supervise -- ./job fails 0
no "hosts that the command does not use" "--hosts requires {hosts} and {ranks} in the command" supervise --run out --hosts a:2 -- ./job
no "no hosts for the command" "{hosts} requires --hosts" supervise --run out -- ./job '{hosts}'
no "spares alone" "--spare requires --hosts" supervise --run out --spare a:2 -- ./job
no "a check without its node" "--check is './check'; it must be a command with {host}" supervise --run out --hosts a:2 --check ./check -- ./job '{ranks}' '{hosts}'
no "a host without a number" "--hosts is 'a:many'; it must be HOST or HOST:RANKS" supervise --run out --hosts a:many -- ./job '{ranks}' '{hosts}'
no "a run that would start anew" "requires --resume auto in the command" supervise -- "$program" train --out out
no "a wait that is none" "--restart-wait is 'soon'; it must be a duration" supervise --run out --restart-wait soon -- ./job
