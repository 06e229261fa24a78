#!/usr/bin/env bash
# Command lines, and output for other programs: help, version, exit statuses, JSON, a run's directory as a model, a prompt
# from standard input; the installed manual page and bash completion.
#   TRAIN_GPT=path/to/train_gpt test/cli_test.sh
root=$(realpath "$(dirname "$0")/..")
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "$0")/lib.sh"

# status NAME STATUS COMMAND...: the command exits with STATUS; its output is in out.txt, and standard output by itself in
# stdout.txt.
status() {
    local name=$1 wanted=$2 got
    shift 2
    "$@" >stdout.txt 2>stderr.txt </dev/null
    got=$?
    cat stdout.txt stderr.txt >out.txt
    if [[ $got == "$wanted" ]]; then echo "ok: $name"; else echo "FAILED: $name: status $got, not $wanted"; tail -n 5 out.txt; fi
}
narrow() { [[ $(awk 'length > 80' stdout.txt) == "" ]]; }

# ---- help and version ----
status "no command" 2 "$program"
says "no command: the commands" "^  train  *train a model"
status "help" 0 "$program" help
cp stdout.txt overview.txt
mapfile -t commands < <(sed -n 's/^  \([a-z][a-z]*\)  .*/\1/p' overview.txt | grep -v help)
for command in "${commands[@]}"; do
    status "help $command" 0 env COLUMNS=80 "$program" help "$command" --all
    expect "help $command: no line is wider than 80 columns" narrow
    status "$command --help" 0 "$program" "$command" --help
    says "$command --help: an example" "^    train_gpt $command "
done
status "help of nothing there is" 2 "$program" help trian
says "help of nothing there is: what was meant" "did you mean train?"
status "help presets" 0 env COLUMNS=80 "$program" help presets
says "help presets: a shape" "^  gpt2-124m  *124M parameters, 12 layers, width 768, gpt2$"
expect "help presets: no line is wider than 80 columns" narrow
status "--version" 0 "$program" --version
says "--version: version" "^train_gpt [0-9][0-9.]* ("
for line in backend precision compiler CPU CUDA NCCL MPI; do says "--version: $line" "^  $line  *[A-Za-z0-9]"; done

# ---- exit statuses: 2 for an impossible command line, 1 for failures while running ----
status "an unknown option" 2 "$program" train --learning-rate 1e-3
says "an unknown option: ours" "'--learning-rate' is not an option of train: the learning rate is --lr"
status "an unknown command" 2 "$program" trian
says "an unknown command: what was meant" "did you mean train?"
status "a value out of range" 2 "$program" train --train-iters 99999999999999999999
says "a value out of range: the bound" "from 1 to 9000000000000000"
status "an unknown preset" 2 "$program" train --preset gpt2-125m --train-iters 1 --dry-run
says "an unknown preset: what was meant" "did you mean gpt2-124m or gpt3-125m? HINT: one of quickstart, "
status "an option without a value" 2 "$program" train --out
status "options that exclude each other" 2 "$program" train --preset llama-tiny --vocab-size 300 --train-iters 1 --train-samples 1 --dry-run
says "options that exclude each other: how one is taken back" "HINT: --no-train-samples"
status "an option that is missing" 2 "$program" prepare --input x.txt
status "no model" 2 "$program" train
says "no model: what to do" "HINT: --preset gpt2-124m"
mkdir -p out && mkdir -p out/step_00000001
status "nothing at all: the folder of a run is not looked at" 2 "$program" train
for part in "no model is given" "length of the run is missing" "no data is given"; do says "nothing at all: $part" "$part"; done
rm -r out
status "several mistakes" 2 "$program" train --learning-rate 1 --num-layers 0 stray
says "several mistakes: all are said" "^error: 3 mistakes in the command line:"
status "words without an option" 2 "$program" generate run1 Hello
says "words without an option: what was meant" "did you mean --model run1 --prompt Hello?"
for other in "convert_hf_to_gguf.py:export --model DIR --gguf" "sample.py:generate --model DIR" "chat:generate --chat" "finetune:train --model DIR" "convert:export --model DIR --gguf" "tokenize:prepare --input" "ls:inspect PATH"; do
    status "${other%%:*}, a command of others" 2 "$program" "${other%%:*}"
    says "${other%%:*}: what it is here" "is not a command; HINT: train_gpt ${other#*:}"
done
status "a configuration of others" 2 "$program" config/train_gpt2.py --device=cpu
says "a configuration of others: the form of ours" "not a command; HINT: a file of options is TOML.* --config FILE.toml"
status "such a file after a command" 2 "$program" train config/train_gpt2.py
says "such a file after a command: the form" "belongs to no option; HINT: a file of options is TOML"
status "options of llama.cpp without a command" 2 "$program" -p hello
says "options of llama.cpp without a command: the command" "train_gpt generate --model DIR --prompt"
status "options of other trainers" 2 "$program" train --do_train --load_in_4bit --job.config_file x.toml --parallelism.tensor_parallel_degree 2
for part in "validations are --eval-interval" "nf4, q4_k or q8_0" "is --config FILE.toml" "tensor parallelism is --tensor"; do says "options of other trainers: $part" "$part"; done
status "a text of llama.cpp" 2 "$program" eval --model x -f text.txt
says "a text of llama.cpp: the option" "the text file to measure on is --text"
status "a checkpoint by a link's name" 1 "$program" train --preset llama-tiny --vocab-size 300 --train-iters 1 --data-path data --resume latest
says "a checkpoint by a link's name: where it is" "newest checkpoint is RUN/latest; --resume auto finds it"
status "a task by its name" 2 "$program" eval --model x --tasks hellaswag
says "a task by its name: a file" "HINT: hellaswag.jsonl, made by dev/data/convert_tasks.py"
status "a model of the hub without its owner" 1 "$program" generate --model gpt2 --prompt x
says "a model of the hub: its name" "HINT: hf download openai-community/gpt2"
mkdir folder && touch folder/web.idx folder/web.bin && echo text >folder/a.txt
status "a folder as data" 1 "$program" train --preset llama-tiny --vocab-size 300 --train-iters 1 --data-path folder
says "a folder as data: what is in it" "folder is a folder, and data is named by its PREFIX; HINT: folder/web"
status "a text as a tokenizer" 1 "$program" prepare --input folder/a.txt --tokenizer folder/a.txt --output x
says "a text as a tokenizer: what one is" "a.txt is not a tokenizer: .*HINT: --tokenizer DIR"
rm -r folder
status "no vocabulary" 2 "$program" train --preset llama-tiny --train-iters 1 --data-path data
says "no vocabulary: what to do" "HINT: --tokenizer DIR"
status "no data" 2 "$program" train --preset gpt2-124m --train-iters 1
says "no data: what to do" "HINT: --data-path PREFIX"
status "no such model" 1 "$program" generate --model nosuch --prompt x
says "no such model: says so" "nosuch does not exist, neither here nor in Hugging Face.s cache [^ ]*$"
status "a file that is missing" 1 "$program" inspect nothing
status "products too large" 2 "$program" train --preset llama-tiny --vocab-size 300 --seq-length 100000 --max-position-embeddings 100000 \
    --micro-batch-size 1000000 --train-iters 1 --dry-run
says "products too large: which" "micro-batch-size 1000000 x --seq-length 100000"
status "as many products as there are" 2 "$program" train --preset llama-tiny --vocab-size 300 --global-batch-size 100000000 \
    --micro-batch-size 1 --train-iters 9000000000000000 --dry-run
says "as many products as there are: the bound" "the maximum is [0-9]* steps"
echo text >a.txt
status "a special token that is not UTF-8" 2 "$program" tokenizer --input a.txt --vocab-size 300 --output no --special-tokens $'\xff\xfe'
says "a special token that is not UTF-8: why" "--special-tokens has .* not UTF-8"
expect "a special token that is not UTF-8: before anything is made" test ! -e no
status "a prefix without a name" 2 "$program" prepare --input a.txt --tokenizer tok --output-prefix d/
says "a prefix without a name: what to do" "PREFIX must end with a name; HINT: "
status "a word after a flag" 2 "$program" train --swiglu true
says "a word after a flag: why" "'true' belongs to no option: --swiglu takes no value"
status "a word after a value" 2 "$program" train --lr 1e-3 true
says "a word after a value: why" "'true' belongs to no option: --lr was already given a value"
status "a ramp-up that is no number" 2 "$program" train --preset llama-tiny --vocab-size 300 --global-batch-size 4 --micro-batch-size 2 \
    --train-samples 10k --rampup-batch-size 2 2 1x --dry-run
says "a ramp-up that is no number: what is one" "--rampup-batch-size is '1x'; it must be a whole number"
status "a ramp-up of 1k" 0 "$program" train --preset llama-tiny --vocab-size 300 --global-batch-size 4 --micro-batch-size 2 \
    --train-samples 10k --rampup-batch-size 2 2 1k --dry-run

# ---- JSON: one object on standard output, nothing else ----
for i in $(seq 1 300); do echo "the quick fox $i jumps over $((i * 7)) cats"; [[ $((i % 4)) == 0 ]] && echo; done >text.txt
expect "a tokenizer" "$program" tokenizer --input text.txt --vocab-size 300 --output tok
expect "a tokenizer: its input is said once" test "$(grep -c "^input: " out.txt)" == 1
"$program" prepare --input text.txt --output data --tokenizer tok --split-documents blank >log.txt 2>&1
status "no vocabulary, prepared data" 2 "$program" train --preset llama-tiny --train-iters 1 --data-path data
says "no vocabulary, prepared data: which tokenizer" "HINT: --tokenizer .*/tok/tokenizer.json (it prepared data), or --vocab-size N"
expect "a run" "$program" train --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 \
    --global-batch-size 4 --train-iters 2 --threads 1 --tokenizer tok --data-path data --out "my run"
says "a run: three lines first" "^2 steps of 64 tokens: 128 tokens$"
head -n 3 out.txt >first.txt
says "a run: numbers of one" "in 2 micro-batches of 2$"
says "a run: the warm-up as there is none" "learning rate .*, no warm-up$"
expect "a run: what it is comes first" grep -q "^gpt2: .* parameters in [a-z0-9]* on .* per rank, into my run$" first.txt
expect "a quiet run" "$program" train --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 \
    --global-batch-size 4 --train-iters 2 --threads 1 --tokenizer tok --data-path data --out quiet --quiet
expect "a quiet run: only its result" test "$(wc -l <out.txt)" -le 4
# Few tokens, many epochs: a note with the length that suffices.
many=(--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --global-batch-size 64 --train-iters 900 --threads 1 --tokenizer tok --data-path data)
epochs() { sed -n 's/^note: the run reads .* times; .* HINT: --train-iters \([0-9]*\) (.* tokens) reads it 4 times.*/\1/p' stderr.txt; }
status "many epochs" 0 "$program" train "${many[@]}" --dry-run
enough=$(epochs)
expect "many epochs: fewer steps suffice" test "${enough:-900}" -lt 900
status "as many as suffice" 0 "$program" train "${many[@]}" --train-iters "${enough:-900}" --dry-run
expect "as many as suffice: no note" test -z "$(epochs)"
status "many epochs, for real" 0 "$program" train "${many[@]}" --train-iters 40 --global-batch-size 640 --eval-iters 0 --save-every never --out many --quiet
expect "many epochs, for real: a note" test -n "$(epochs)"
status "an ending of a file" 0 "$program" prepare --input text.txt --output-prefix ee.bin --tokenizer tok
expect "an ending of a file: is none of the name" test -e ee.bin -a -e ee.idx -a ! -e ee.bin.bin
status "a file where a directory is wanted" 2 "$program" tokenizer --input text.txt --vocab-size 300 --output tok2/tokenizer.json
status "a directory where one file is wanted" 2 "$program" curate --input text.txt --normalize --output clean.jsonl
status "a path that is misspelled" 1 "$program" generate --model "my rn" --prompt x
says "a path that is misspelled: the nearest one" "my rn does not exist.*; did you mean my run?"
expect "a path that is misspelled: nothing to download" refused grep -q "hf download" stderr.txt
status "data that is misspelled" 1 "$program" train --preset llama-tiny --vocab-size 300 --train-iters 1 --data-path dat --out no
says "data that is misspelled: the nearest" "did you mean data?"
status "a plan for GPUs" 0 "$program" train --preset llama2-7b --train-iters 10 --world 512 --micro-batch-size 1 --global-batch-size 512 --dry-run
says "a plan for GPUs: their peak" "^ *peak  *989 TFLOP/s, dense bf16 by the vendor$"
says "a plan for GPUs: not this machine" "^ *backend  *h100 of the plan\|^ *backend .* H100 of the plan"
expect "a plan for GPUs: nothing measured here" refused grep -q "measured$" stdout.txt
status "a plan" 0 "$program" train --preset llama-tiny --vocab-size 300 --micro-batch-size 1 --train-iters 100 --lr-warmup-iters 15 --dry-run
says "a plan: the warm-up as it was given" "learning rate .*, warm-up over 15 steps$"
status "a constant learning rate" 0 "$program" train --preset llama-tiny --vocab-size 300 --micro-batch-size 1 --train-iters 100 --lr-decay-style constant --lr 1e-3 --dry-run
says "a constant learning rate: is one" "learning rate  *constant 0.001, no warm-up$"
says "a plan: one is no plural" "^ *step  *1 sample of 256 tokens = 256 tokens, in 1 micro-batch of 1$"
status "ranks that are missing" 2 "$program" generate --model "my run" --prompt x --tp 2
says "ranks that are missing: what to do" "^error: 1 rank cannot .* HINT: start it with mpirun -n 2$"
# json NAME PYTHON COMMAND...: the output is one JSON object, j, for which the expression is true.
json() {
    local name=$1 holds=$2
    shift 2
    status "$name" 0 "$@"
    expect "$name: JSON" python3 -c "import json; j = json.load(open('stdout.txt')); assert ($holds), j"
}
json "plan" "j['model']['parameters'] == 124439808 and j['plan']['step']['seconds'] > 0 and j['memory']['parameters'] > 0" \
    "$program" train --preset gpt2-124m --train-iters 10 --world 8 --dry-run --json
json "plan without room" "all(r['bytes'] > 1e9 and '--' in r['options'] for r in j['not_enough_memory'].values()) and 'gradients_fp32' in j['memory']" \
    "$program" train --preset llama2-7b --train-iters 10 --world 1 --dry-run --json
json "plan for a host without room" "j['plan']['memory_of_a_rank']['of_host'] == 64 * 2**30 and 'not_enough_memory' not in j and
  all(r['bytes'] <= 64 * 2**30 for r in j['not_enough_host_memory'].values())" \
    "$program" train --preset llama2-7b --train-iters 10 --world 1 --recompute full --micro-batch-size 1 --offload optimizer --host-memory-gib 64 --dry-run --json
status "a combination that no class of transformers has" 0 "$program" train --preset gpt2-124m --norm-place after --train-iters 10 --dry-run
expect "a combination that no class of transformers has: it says so" grep -q '^warning: no transformers class .* gets model_type "train_gpt", which only this program can load$' stderr.txt
status "a combination of a class" 0 "$program" train --preset gpt2-124m --norm-epsilon 1e-6 --train-iters 10 --dry-run
expect "a combination of a class: nothing to say" refused grep -q "no transformers class" stderr.txt
json "a size" "j['model']['parameters'] / 15e6 - 1 < 0.1 and j['size']['global_batch'] == j['batch']['step']['samples'] and j['size']['learning_rate'][0] > 1e-3" \
    "$program" train --size 15m --vocab-size 4096 --world 8 --dry-run --json
status "a size without a vocabulary" 2 "$program" train --size 15m --dry-run
says "a size without a vocabulary: what to do" "HINT: --tokenizer DIR"
status "a size and a preset" 2 "$program" train --size 15m --preset llama-tiny --vocab-size 300 --dry-run
json "eval" "j['evaluation']['tokens'] > 0 and 3 < j['evaluation']['loss'] < 7" "$program" eval --model "my run" --data-path data --json
json "inspect a run" "j['intact'] and j['run'] == {'step_00000002': 'intact'} and j['training']['step'] == 2" "$program" inspect "my run" --json
status "inspect" 0 "$program" inspect "my run"
says "inspect: the optimizer" "^ *--optimizer  *adamw$"
says "inspect: the step size" "^ *learning rate  *[0-9.e-]*$"
says "inspect: what wrote it" "^ *written on  *[a-z]*, [a-z0-9]*, 1 rank, 1 thread$"
says "inspect: an option as it is typed" "^ *--data-path  *data$"
expect "inspect: no option that was not given" refused grep -q "train-samples" stdout.txt
json "inspect data" "j['data']['documents'] == 75 and j['data']['tokens'] > 1000" "$program" inspect data --json
json "inspect a tokenizer" "j['tokenizer']['tokens'] == 300" "$program" inspect tok --json
# ---- GGUF: a model as one file for llama.cpp, and back ----
written() { "$program" generate --model "$1" --prompt "the quick" --max-new-tokens 20 --temperature 0 2>/dev/null; }
status "export" 0 "$program" export --model "my run" --gguf model.gguf
says "export: what it wrote" "^model.gguf: .*iB of architecture gpt2, bf16, tokenizer included$"
status "import" 0 "$program" import --gguf model.gguf --out imported/
status "inspect of a GGUF file" 0 "$program" inspect model.gguf
says "inspect of a GGUF file: its model" "family  *gpt2"
says "inspect of a GGUF file: its types" "tensors of type BF16"
status "rows that are no blocks of Q4_K" 0 "$program" export --model "my run" --gguf small.gguf --type q4_k_m
says "rows that are no blocks of Q4_K: a note" "note: .* are in Q8_0 or F16: their rows are not multiples of 256"
status "half the name of a type" 2 "$program" export --model "my run" --gguf small2.gguf --type q4_k
says "half the name of a type: the whole" "did you mean q4_k_m?"
status "--gguf of a command that reads models" 2 "$program" generate --gguf model.gguf
says "--gguf of a command that reads models: --model" "a GGUF file is a model as any other: --model FILE.gguf"
status "a GGUF file without an option" 2 "$program" eval model.gguf text.txt
says "a GGUF file without an option: --model" "did you mean --model model.gguf --text text.txt?"
expect "import: the model writes the same text" test "$(written "my run")" == "$(written imported)"
status "inspect an imported model" 0 "$program" inspect imported
cp model.gguf first.gguf
status "export over a file" 1 "$program" export --model "my run" --gguf model.gguf --type q8_0
says "export over a file: what to do" "model.gguf exists; HINT: give another name, or --overwrite"
expect "export over a file: it is there still" cmp model.gguf first.gguf
status "export over a file, as told" 0 "$program" export --model "my run" --gguf model.gguf --type q8_0 --overwrite --weights-only
says "export over a file, as told: what it wrote" "q8_0, without a tokenizer$"
status "import over a directory" 1 "$program" import --gguf first.gguf --out imported
says "import over a directory: says so" "imported exists; HINT"
status "import of no GGUF" 1 "$program" import --gguf text.txt --out never
says "import of no GGUF: says so" "text.txt is not a GGUF file"
head -c 5000 first.gguf >cut.gguf
status "import of a cut file" 1 "$program" import --gguf cut.gguf --out never
says "import of a cut file: where" "cut.gguf: .*(at byte [0-9]* of 5000): it is damaged"
status "no file to write" 2 "$program" export --model "my run"
status "a type of no kind" 2 "$program" export --model "my run" --gguf x.gguf --type q3
expect "what failed left nothing" test ! -e never -a ! -e x.gguf -a -z "$(find . -name '*.tmp*')"

printf '{"context": "the quick", "choices": [" fox", " cats"], "gold": 0}\n' >questions.jsonl
json "eval of tasks" "0 <= j['tasks']['questions.jsonl']['acc']['value'] <= 1" "$program" eval --model "my run" --tasks questions.jsonl --json
status "JSON of a run" 2 "$program" train --json --preset gpt2-124m --train-iters 10 --data-path data
for given in "--out no --save-every 5x" "--out no --split nan,1,1" "--out no --split=" "--resume auto --override nonsense"; do
    # shellcheck disable=SC2086 # several words
    status "$given" 2 "$program" train --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --global-batch-size 4 \
        --train-iters 2 --threads 1 --tokenizer tok --data-path data --out "my run" $given
done
gzip -k questions.jsonl
status "compressed tasks" 1 "$program" eval --model "my run" --tasks questions.jsonl.gz
says "compressed tasks: what they are and what to do" "it is gzip-compressed; HINT: zcat questions.jsonl.gz >text.jsonl"

# ---- a full standard output is an error, except for a run, which has its log ----
full() { "$@" >/dev/full; }
status "full: eval" 1 full "$program" eval --model "my run" --data-path data --json
says "full: eval: it is said" "^error: cannot write to standard output"
status "full: generate" 1 full "$program" generate --model "my run" --prompt "the quick" --max-new-tokens 5
status "full: inspect" 1 full "$program" inspect "my run" --json
status "full: plan" 1 full "$program" train --preset gpt2-124m --train-iters 10 --dry-run --json
status "full: help" 1 full "$program" help --man
# once NAME COMMAND...: the reader leaves after one line, which is not an error.
once() { "$@" | head -n 1; [[ ${PIPESTATUS[0]} == @(0|141) ]]; }
expect "a reader that leaves" once "$program" help --man

# ---- names and paths are bytes: invalid UTF-8 becomes U+FFFD in JSON, and such a run resumes ----
odd=$'odd\xff'
cp -r tok "$odd tok" && for end in bin idx meta.json; do cp "data.$end" "$odd data.$end"; done
bytes() { # OPTIONS...
    "$program" train --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --threads 1 \
        --tokenizer "$odd tok" --data-path "$odd data" --out "$odd run" --name "$odd" --lr-decay-iters 4 \
        --sample-prompt "$odd" --sample-interval 2 --sample-tokens 4 "$@"
}
expect "odd bytes: a run" bytes --train-iters 2
expect "odd bytes: its checkpoint" test -d "$odd run/step_00000002"
expect "odd bytes: resumed" bytes --train-iters 4 --resume auto --override train-iters
says "odd bytes: from its checkpoint" "step_00000002"
expect "odd bytes: its second checkpoint" test -d "$odd run/step_00000004"
json "odd bytes: inspect" "j['intact']" "$program" inspect "$odd run" --json

# ---- a run's directory instead of a model's; a prompt from standard input ----
status "generate with a run" 0 "$program" generate --model "my run" --prompt "the quick" --max-new-tokens 5
cp stdout.txt given.txt
printf 'the quick\n' | "$program" generate --model "my run" --prompt - --max-new-tokens 5 >piped.txt 2>log.txt
expect "a prompt from standard input is the same" cmp given.txt piped.txt
small=(--seq-length 16 --global-batch-size 4 --train-iters 3 --tokenizer tok --data-path data --threads 1)
status "train from a run" 0 "$program" train --model "my run" --out other "${small[@]}"
status "resume a run" 0 "$program" train --resume "my run" --out third "${small[@]}" --override train-iters
says "resume a run: from its checkpoint" "my run/step_00000002"

# ---- built ----
status "make help" 0 make -s -C "$root" help
expect "make help: no line is wider than 80 columns" narrow
mkdir -p source/dev/interop && cp -r "$root"/{Makefile,scripts} source && cp "$root"/dev/interop/dump_tokens.cpp source/dev/interop
cat >source/linker <<'END'
#!/usr/bin/env bash
# Compiles nothing, and leaves half a program when it links.
file=$(sed 's/.* -o \([^ ]*\).*/\1/' <<<" $* ")
echo half >"$file"
[[ $file == *.o ]]
END
chmod +x source/linker
half=(make -s -C source NODEPS=1 CXX=./linker build/cpu-bf16-linker/dump_tokens)
status "a linker that fails" 2 "${half[@]}"
status "a linker that fails: again, for it left no half program" 2 "${half[@]}"
touch source/build/none
status "a folder that cannot be made" 2 make -s -C source NODEPS=1 CXX=./linker build/none/dump_tokens
expect "a folder that cannot be made: ends there" refused grep -q building stdout.txt

# ---- init ----
plan() { "$program" train --dry-run --world 1 "$@" | grep -E '^  (shape|family|parameters|step|run) |cosine'; }
sized=(--size 300k --vocab-size 300 --seed 7 --micro-batch-size 4)
status "init" 0 "$program" init "${sized[@]}" --out sized --file sized.toml
says "init: names the command" "train --config sized.toml"
expect "init: the plan is that of its options" test -n "$(plan --config sized.toml)" -a "$(plan --config sized.toml)" = "$(plan "${sized[@]}")"
for line in '^seed = 7$' '^num-layers = 6$' '^# learning rate at the end of the decay' '^# eval-iters = 100$' '^# fp8-format = NAME$' \
    '^# *layers x width: 6 x 64'; do
    expect "init: has $line" grep -q -- "$line" sized.toml
done
status "init: again" 0 "$program" init --preset gpt2-124m --file sized.toml
echo 'lr = 1' >mine.toml
status "init: another file" 1 "$program" init --preset gpt2-124m --file mine.toml
says "init: another file: is kept" "mine.toml exists and was not written by init"
status "init: no model" 2 "$program" init
says "init: no model: says so" "no model"
status "init: of a plan" 2 "$program" init --preset gpt2-124m --dry-run
says "init: of a plan: says so" "--dry-run is for a start of the run"

# ---- installed ----
expect "make install" make -s -C "$root" install TRAIN_GPT="$program" DESTDIR="$work/root" PREFIX=/usr
expect "the program is installed" "$work/root/usr/bin/train_gpt" --version
page=$work/root/usr/share/man/man1/train_gpt.1
if command -v man groff >/dev/null; then
    status "the manual page" 0 env LC_ALL=C.UTF-8 MANWIDTH=80 man --warnings -l "$page"
    says "the manual page: an option" "^ *--global-batch-size, --global-batch N"
    expect "the manual page: no warnings" test ! -s stderr.txt
fi
completion=$work/root/usr/share/bash-completion/completions/train_gpt
expect "the completion parses" bash -n "$completion"
# completes NAME EXPECTED WORD...: completion of the last word gives EXPECTED.
completes() {
    local name=$1 expected=$2 got
    shift 2
    got=$(bash -c '. "$1"; shift; COMP_WORDS=(train_gpt "$@"); COMP_CWORD=$#; _train_gpt; echo "${COMPREPLY[*]}"' - "$completion" "$@")
    if [[ $got == "$expected" ]]; then echo "ok: completion: $name"; else echo "FAILED: completion: $name: '$got'"; fi
}
completes "commands" "train tune tokenizer" t
completes "options of sweep" "--override --over" sweep --ove
completes "options" "--global-batch-size --global-batch" train --glo
completes "options of another command" "--max-new-tokens" generate --max-n
completes "options without a command" "--global-batch-size --global-batch" --glo
completes "choices" "cosine constant" train --lr-decay-style co
completes "choices after other options" "hybrid" train --lr 1 --fp8 h
completes "presets" "bloom-7b1" train --preset bloom-7
completes "directories" "my run" generate --model my
completes "files" "text.txt" tokenizer --input te
completes "further files" "text.txt" tokenizer --input text.txt te
completes "what inspect takes" "text.txt" inspect te
completes "help" "generate" help gen
# The same in zsh, whose own completers are replaced, and in fish.
zsh_completion=$work/root/usr/share/zsh/site-functions/_train_gpt
in_zsh() {
    zsh -fc 'compdef() { :; }; compadd() { shift; local w; for w; do [[ $w != ${words[-1]}* ]] || print -rn -- "$w "; done; }
        _files() { print -rn -- "files $*"; }; . "$1"; shift; words=(train_gpt "$@"); CURRENT=${#words}; _train_gpt' - "$zsh_completion" "$@"
}
in_fish() { fish -N -c '. "$argv[1]"; complete -C "$argv[2]"' "$work/root/usr/share/fish/vendor_completions.d/train_gpt.fish" "$1" | cut -f 1 | sort | xargs; }
# completed NAME EXPECTED COMMAND...
completed() {
    local got
    got=$("${@:3}")
    if [[ ${got% } == "$2" ]]; then echo "ok: completion: $1"; else echo "FAILED: completion: $1: '$got'"; fi
}
if command -v zsh >/dev/null; then
    completed "zsh: commands" "train tune tokenizer" in_zsh t
    completed "zsh: options" "--global-batch-size --global-batch" in_zsh train --glo
    completed "zsh: options without a command" "--global-batch-size --global-batch" in_zsh --glo
    completed "zsh: choices" "hybrid" in_zsh train --lr 1 --fp8-format h
    completed "zsh: directories" "files -/" in_zsh generate --model my
    completed "zsh: files" "files" in_zsh inspect te
else echo "ok: skipped: there is no zsh"; fi
if command -v fish >/dev/null; then
    completed "fish: commands" "tokenizer train tune" in_fish "train_gpt t"
    completed "fish: options" "--global-batch --global-batch-size" in_fish "train_gpt train --glo"
    completed "fish: options without a command" "--global-batch --global-batch-size" in_fish "train_gpt --glo"
    completed "fish: choices" "hybrid" in_fish "train_gpt train --lr 1 --fp8-format h"
    completed "fish: directories" "my run/" in_fish "train_gpt generate --model my"
    completed "fish: files" "text.txt" in_fish "train_gpt inspect te"
else echo "ok: skipped: there is no fish"; fi
