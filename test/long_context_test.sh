#!/usr/bin/env bash
# Long sequences cut over ranks. A needle in a haystack: a model trained on 32 tokens continues on 256 with RoPE scaling and
# --context-parallel-size 2, and retrieves the values of keys that the other rank holds, as one rank does.
#   TRAIN_GPT=path/to/train_gpt test/long_context_test.sh
. "$(dirname "$0")/lib.sh"
MPIRUN=${MPIRUN:-mpirun}
allow_mpirun_everywhere
export ASAN_OPTIONS=detect_leaks=0 # MPI does not free all its memory

# A haystack of ten kinds of straw hides four needles, each a token that stands for one of four keys and one of eight values.
# The last token is one of the keys, whose value follows. In the tasks all needles are in the second and third quarter, which
# one rank holds; the other has the question. So chance is an eighth.
python3 - <<'END'
import json, random, string
tokens = string.ascii_letters + string.digits
needles, keys, values, straw = tokens[:32], tokens[32:36], tokens[36:44], tokens[44:54]
rng = random.Random(1)

def sample(n, places):
    rows = rng.choices(straw, k=n - 3)
    hidden = [rng.randrange(8) for _ in range(4)]
    for key, at in enumerate(rng.sample(places, 4)): rows[at] = needles[8 * key + hidden[key]]
    key = rng.randrange(4)
    return "".join(rows) + keys[key], values[hidden[key]]

for name, n, count in ("short", 32, 8000), ("long", 256, 1000):
    with open(name + ".jsonl", "w") as out:
        for _ in range(count): print(json.dumps(dict(zip(("prompt", "completion"), sample(n, range(n - 3))))), file=out)
    with open(name + "_task.jsonl", "w") as out:
        for _ in range(200): print(json.dumps(dict(zip(("context", "target"), sample(n, range(n // 4, 3 * n // 4))))), file=out)
END
for _ in $(seq 50); do echo "~~ ~~"; done >other.txt # its merge is not in the samples: a token per character
expect "tokenizer" "$program" tokenizer --input other.txt --vocab-size 260 --output tok
for name in short long; do expect "prepare $name" "$program" prepare --chat --chat-template plain --input $name.jsonl --output $name --tokenizer tok; done
train() { ${MPI:-} "$program" train --threads 1 --quiet --eval-iters 0 --split "100, 0, 0" --out "$@"; }
accuracy() { "$program" eval --model "$1" --tasks "$2_task.jsonl" | sed -n 's/^ *acc  *\([0-9.]*\) .*/\1/p'; }
above() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && a > b) }'; }

expect "32 tokens" train short --data-path short --tokenizer tok --seq-length 32 --num-layers 2 --hidden-size 64 --num-attention-heads 2 \
    --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
    --micro-batch-size 32 --global-batch-size 32 --train-iters 1000 --lr 2e-3 --lr-warmup-iters 20
at_32=$(accuracy short short) untrained=$(accuracy short long)
expect "it finds $at_32 of the needles in 32 tokens" above "$at_32" 0.95
expect "and fewer, $untrained, in 256" above 0.7 "$untrained"
longer=(--model short --data-path long --seq-length 256 --max-position-embeddings 256 --rope-scaling yarn --rope-scaling-factor 8
    --original-max-position-embeddings 32 --micro-batch-size 8 --global-batch-size 8 --train-iters 200 --lr 1e-3 --lr-warmup-iters 10)
expect "256 tokens on one rank" train one "${longer[@]}"
MPI="$MPIRUN -n 2" expect "on two" train two "${longer[@]}" --context-parallel-size 2
expect "with one rank's losses" near_losses one two 200 0.1
one=$(accuracy one long) two=$(accuracy two long)
expect "one rank's model finds $one of them" above "$one" 0.95
expect "two ranks' model finds $two of them" above "$two" 0.95
