#!/usr/bin/env bash
# dev/data/convert_tasks.py on invented samples in each dataset's published format: the task files are exactly as expected,
# bad input is refused with file and line and leaves no output, and the program evaluates a small model on the results.
#   TRAIN_GPT=path/to/train_gpt test/convert_test.sh
command -v python3 >/dev/null || { echo "ok: skipped, there is no python3"; exit 0; }
converter=$(realpath "$(dirname "$0")/../dev/data/convert_tasks.py")
. "$(dirname "$0")/lib.sh"
allow_mpirun_everywhere

# converts TASK FILE...: the task file equals standard input.
converts() {
    local task=$1
    shift
    cat >expected.jsonl
    rm -f "$task.jsonl"
    if ! python3 "$converter" "$task" "$@" -o "$task.jsonl" >out.txt 2>&1; then
        echo "FAILED: $task: $(tail -n 1 out.txt)"
    elif diff expected.jsonl "$task.jsonl" >out.txt; then
        echo "ok: $task of $1"
    else
        echo "FAILED: $task: expected (<) and written (>) differ"; cat out.txt
    fi
}
# refuses NAME PATTERN TASK FILE...: fails with one matching line, and writes nothing.
refuses() {
    local name=$1 pattern=$2
    shift 2
    if python3 "$converter" "$@" -o none.jsonl >out.txt 2>&1; then echo "FAILED: $name: exit status 0"
    elif ! grep -q -- "$pattern" out.txt || grep -q Traceback out.txt; then echo "FAILED: $name: no '$pattern' in:"; cat out.txt
    elif compgen -G 'none.jsonl*' >/dev/null; then echo "FAILED: $name: a file was left"
    else echo "ok: $name is refused"
    fi
}

# ---- each dataset (HellaSwag: one pass turns pairs of spaces into one, so three become two, as in the harness) ----
cat >lambada.in.jsonl <<'IN'
{"text": "\"Come in,\" said Ann, and he saw the\nold  dog"}
{"text": "in the year 7 the king saw the king"}
IN
converts lambada lambada.in.jsonl <<'OUT'
{"context": "\"Come in,\" said Ann, and he saw the\nold ", "target": " dog"}
{"context": "in the year 7 the king saw the", "target": " king"}
OUT
printf 'he gave a sheep to his son\n\nit was « good »\n' >lambada_plain.txt
converts lambada lambada_plain.txt <<'OUT'
{"context": "he gave a sheep to his", "target": " son"}
{"context": "it was « good", "target": " »"}
OUT

cat >hellaswag.in.jsonl <<'IN'
{"ind": 1, "activity_label": "Shearing sheep", "ctx_a": "A man holds a sheep.", "ctx_b": "he", "ctx": "A man holds a sheep. he", "split": "val", "endings": ["shears it.", "sings.", "flies.", "eats the [substeps] shears."], "label": 0}
{"ind": 2, "activity_label": "Pets", "ctx_a": "", "ctx_b": "[header] How to feed a Dog [title] Buy food. [step] Dogs eat  food.", "endings": ["Feed it. [title] Wait.", "b", "c", "d"], "label": 3}
IN
converts hellaswag hellaswag.in.jsonl <<'OUT'
{"context": "Shearing sheep: A man holds a sheep. He", "choices": [" shears it.", " sings.", " flies.", " eats the shears."], "gold": 0}
{"context": "Pets:  how to feed a dog. buy food. dogs eat food.", "choices": [" Feed it.. Wait.", " b", " c", " d"], "gold": 3}
OUT

cat >valid.jsonl <<'IN'
{"goal": "To dry a cat,", "sol1": "use a towel.", "sol2": "use a stove."}
{"goal": "To open a door,", "sol1": "kick it.", "sol2": "turn the handle."}
IN
printf '0\n1\n' >valid-labels.lst
converts piqa valid.jsonl valid-labels.lst <<'OUT'
{"context": "Question: To dry a cat,\nAnswer:", "choices": [" use a towel.", " use a stove."], "gold": 0}
{"context": "Question: To open a door,\nAnswer:", "choices": [" kick it.", " turn the handle."], "gold": 1}
OUT

cat >winogrande.in.jsonl <<'IN'
{"qID": "A-1", "sentence": "The sheep did not fit in the cart because the _ was too small.", "option1": "sheep", "option2": "cart", "answer": "2"}
{"qID": "A-2", "sentence": "Ann fed Eve's dog, so Eve thanked _ .", "option1": "Ann", "option2": "Eve", "answer": "1"}
IN
converts winogrande winogrande.in.jsonl <<'OUT'
{"contexts": ["The sheep did not fit in the cart because the sheep", "The sheep did not fit in the cart because the cart"], "target": " was too small.", "gold": 1}
{"contexts": ["Ann fed Eve's dog, so Eve thanked Ann", "Ann fed Eve's dog, so Eve thanked Eve"], "target": " .", "gold": 0}
OUT

cat >boolq.in.jsonl <<'IN'
{"question": "is snow white", "title": "Snow", "answer": true, "passage": "Snow is white."}
{"question": "is coal white", "passage": "Coal (carbon) is black.", "idx": 1, "label": false}
IN
converts boolq boolq.in.jsonl <<'OUT'
{"context": "Snow is white.\nQuestion: is snow white?\nAnswer:", "choices": [" no", " yes"], "gold": 1}
{"context": "Coal (carbon) is black.\nQuestion: is coal white?\nAnswer:", "choices": [" no", " yes"], "gold": 0}
OUT

mkdir high
cat >high/10.txt <<'IN'
{"answers": ["B", "A"], "options": [["one", "two", "three", "four"], ["wool", "milk", "eggs", "meat"]], "questions": ["How many sheep were there?", "The king wanted  _  ."], "article": "There were two sheep. The king wanted wool.", "id": "high10.txt"}
IN
cat >high/9.txt <<'IN'
{"answers": ["D", "C", "A"], "options": [["red", "blue", "black", "white"], ["a", "b", "c", "d"], ["yes", "no", "perhaps", "never"]], "questions": ["The sheep were  _  .", "Which?", "Was it good?"], "article": "It was good.\nThe sheep were white.", "id": "high9.txt"}
IN
converts race high <<'OUT'
{"context": "Article: It was good.\nThe sheep were white.\n\n _  .white\nQuestion: Which?\nAnswer: c\nWas it good?", "choices": [" yes", " no", " perhaps", " never"], "gold": 0}
{"context": "Article: There were two sheep. The king wanted wool.\n\nQuestion: How many sheep were there?\nAnswer: two\nThe king wanted  _  .", "choices": [" wool", " milk", " eggs", " meat"], "gold": 0}
OUT

cat >anli.in.jsonl <<'IN'
{"uid": "1", "model_label": "n", "context": "The king gave sheep.", "hypothesis": "Someone gave sheep.", "label": "e"}
{"uid": "2", "context": "The king gave sheep.", "hypothesis": "The king was old.", "label": "n"}
{"uid": "3", "context": "The king gave sheep.", "hypothesis": "Nobody gave sheep.", "label": "c"}
IN
converts anli anli.in.jsonl <<'OUT'
{"context": "The king gave sheep.\nQuestion: Someone gave sheep. True, False, or Neither?\nAnswer:", "choices": [" True", " Neither", " False"], "gold": 0}
{"context": "The king gave sheep.\nQuestion: The king was old. True, False, or Neither?\nAnswer:", "choices": [" True", " Neither", " False"], "gold": 1}
{"context": "The king gave sheep.\nQuestion: Nobody gave sheep. True, False, or Neither?\nAnswer:", "choices": [" True", " Neither", " False"], "gold": 2}
OUT

{
    printf 'gold_label\tsentence1_binary_parse\tsentence1\tsentence2\tpairID\theuristic\n'
    printf 'non-entailment\t( a b )\tThe "king saw the son .\tThe son saw the king .\tex0\tlexical_overlap\n'
    printf 'entailment\t( a b )\tThe king and the son ran .\tThe king ran .\tex1\tlexical_overlap\n'
} >hans.txt
converts hans hans.txt <<'OUT'
{"context": "The \"king saw the son .\nQuestion: The son saw the king . True or False?\nAnswer:", "choices": [" True", " False"], "gold": 1}
{"context": "The king and the son ran .\nQuestion: The king ran . True or False?\nAnswer:", "choices": [" True", " False"], "gold": 0}
OUT
echo '{"gold_label": "entailment", "sentence1": "The king ran .", "sentence2": "He ran .", "pairID": "ex2"}' >hans.in.jsonl
converts hans hans.in.jsonl <<'OUT'
{"context": "The king ran .\nQuestion: He ran . True or False?\nAnswer:", "choices": [" True", " False"], "gold": 0}
OUT

cat >wic.in.jsonl <<'IN'
{"word": "drive", "sentence1": "He drove the sheep.", "sentence2": "He drove to town.", "idx": 0, "label": false, "start1": 3, "start2": 3, "end1": 8, "end2": 8, "version": 1.1}
{"word": "son", "sentence1": "His son ran.", "sentence2": "A son is good.", "idx": 1, "label": true, "start1": 4, "start2": 2, "end1": 7, "end2": 5, "version": 1.1}
IN
converts wic wic.in.jsonl <<'OUT'
{"context": "Sentence 1: He drove the sheep.\nSentence 2: He drove to town.\nQuestion: Is the word 'drove' used in the same way in the two sentences above?\nAnswer:", "choices": [" no", " yes"], "gold": 0}
{"context": "Sentence 1: His son ran.\nSentence 2: A son is good.\nQuestion: Is the word 'son' used in the same way in the two sentences above?\nAnswer:", "choices": [" no", " yes"], "gold": 1}
OUT

cat >cb.in.jsonl <<'IN'
{"premise": "B: Is it cold? A: I think so.", "hypothesis": "it is cold", "label": "entailment", "idx": 0}
{"premise": "It may snow.", "hypothesis": "it snows", "label": "neutral", "idx": 1}
IN
converts cb cb.in.jsonl <<'OUT'
{"context": "B: Is it cold? A: I think so.\nQuestion: it is cold. True, False, or Neither?\nAnswer:", "choices": [" True", " False", " Neither"], "gold": 0}
{"context": "It may snow.\nQuestion: it snows. True, False, or Neither?\nAnswer:", "choices": [" True", " False", " Neither"], "gold": 2}
OUT

cat >copa.in.jsonl <<'IN'
{"premise": "The grass was wet.", "choice1": "It had rained.", "choice2": "The sheep ate it.", "question": "cause", "label": 0, "idx": 0}
{"premise": "The dog barked. ", "choice1": "The cat sang.", "choice2": "The sheep ran.", "question": "effect", "label": 1, "idx": 1}
IN
converts copa copa.in.jsonl <<'OUT'
{"context": "The grass was wet because", "choices": ["  it had rained.", "  the sheep ate it."], "gold": 0}
{"context": "The dog barked therefore", "choices": ["  the cat sang.", "  the sheep ran."], "gold": 1}
OUT

cat >multirc.in.jsonl <<'IN'
{"idx": 0, "version": 1.1, "passage": {"text": "Ann has two dogs.", "questions": [{"question": "What has Ann?", "answers": [{"text": "Dogs", "idx": 0, "label": 1}, {"text": "A cat", "idx": 1, "label": 0}], "idx": 0}]}}
IN
converts multirc multirc.in.jsonl <<'OUT'
{"context": "Ann has two dogs.\nQuestion: What has Ann?\nAnswer:", "choices": [" Dogs\nIs the answer correct? yes", " Dogs\nIs the answer correct? no"], "gold": 0}
{"context": "Ann has two dogs.\nQuestion: What has Ann?\nAnswer:", "choices": [" A cat\nIs the answer correct? yes", " A cat\nIs the answer correct? no"], "gold": 1}
OUT

cat >record.in.jsonl <<'IN'
{"source": "Daily mail", "passage": {"text": "Ann met Bob in Rome.\n@highlight\nBob lives in the Rome\n@highlight\nThey sang", "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 15, "end": 18}, {"start": 45, "end": 52}]}, "qas": [{"query": "She came to @placeholder", "answers": [{"start": 15, "end": 18, "text": "Rome"}], "idx": 0}], "idx": 0}
IN
converts record record.in.jsonl <<'OUT'
{"context": "Ann met Bob in Rome.\n\n  - Bob lives in the Rome.\n  - They sang.\n", "choices": ["   - She came to Ann", "   - She came to Bob", "   - She came to Rome", "   - She came to the Rome"], "gold": [2, 3]}
OUT

echo '{"premise": "Snow is white.", "hypothesis": "Snow is black.", "label": "not_entailment", "idx": 0}' >rte.in.jsonl
converts rte rte.in.jsonl <<'OUT'
{"context": "Snow is white.\nQuestion: Snow is black. True or False?\nAnswer:", "choices": [" True", " False"], "gold": 1}
OUT

cat >wsc.in.jsonl <<'IN'
{"text": "Ann did n't thank Eve , who had \" helped \" her .", "target": {"span1_index": 0, "span1_text": "Ann", "span2_index": 11, "span2_text": "her"}, "idx": 0, "label": true}
IN
converts wsc wsc.in.jsonl <<'OUT'
{"context": "Passage: Ann didn't thank Eve, who had\"helped\"*her*.\nQuestion: In the passage above, does the pronoun \"*her*\" refer to \"*Ann*\"?\nAnswer:", "choices": [" no", " yes"], "gold": 1}
OUT

printf 'Ein Schaf.\n\nEin König.\n' >news.de
printf 'A sheep.\n\nA king.\n' >news.en
printf 'One sheep.\n\nOne king.\n' >other.en
converts translation news.de news.en other.en <<'OUT'
{"context": "German phrase: Ein Schaf.\nEnglish phrase:", "references": ["A sheep.", "One sheep."], "max_new_tokens": 256, "metrics": ["bleu"]}
{"context": "German phrase: Ein König.\nEnglish phrase:", "references": ["A king.", "One king."], "max_new_tokens": 256, "metrics": ["bleu"]}
OUT

cat >summary.in.jsonl <<'IN'
{"article": "Ann has a sheep. It is good.", "highlights": "Ann's sheep .\nIt is good .", "id": "1"}
{"document": "The king ran.", "summary": "A king ran.", "id": "2"}
IN
converts summary summary.in.jsonl <<'OUT'
{"context": "Summarize the following article:\n\nAnn has a sheep. It is good.\n\nSummary:", "references": ["Ann's sheep .\nIt is good ."], "until": ["\n\n"], "max_new_tokens": 128, "metrics": ["rouge1", "rouge2", "rougeL", "rougeLsum"], "stemmer": true}
{"context": "Summarize the following article:\n\nThe king ran.\n\nSummary:", "references": ["A king ran."], "until": ["\n\n"], "max_new_tokens": 128, "metrics": ["rouge1", "rouge2", "rougeL", "rougeLsum"], "stemmer": true}
OUT

cat >crows.csv <<'IN'
,sent_more,sent_less,stereo_antistereo,bias_type,annotations,anon_writer,anon_annotators
0,"Old kings, they say, sleep.","Young kings, they say, sleep.",stereo,age,[[]],a0,[]
1,He cannot ran.,She cannot run.,antistereo,gender,[[]],a0,[]
IN
converts crows-pairs crows.csv <<'OUT'
{"context": "", "choices": ["Old kings, they say, sleep.", "Young kings, they say, sleep."], "gold": 0, "target_delimiter": "", "share_of": "stereotype", "group": "age"}
{"context": "", "choices": ["He cannot ran.", "She cannot run."], "gold": 0, "target_delimiter": "", "share_of": "stereotype", "group": "gender"}
OUT

printf 'sentid\tsentence\n' >wino.tsv
printf '%s\t%s\n' technician.customer.1.male.txt "The technician told the customer that he could pay." technician.customer.0.female.txt "The technician told the customer that she had repaired it." technician.someone.1.neutral.txt "The technician told someone that they could pay." >>wino.tsv
converts winogender wino.tsv <<'OUT'
{"context": "The technician told the customer that he could pay. ‘He’ refers to the", "choices": [" technician", " customer"], "gold": 1, "group": "male"}
{"context": "The technician told the customer that she had repaired it. ‘She’ refers to the", "choices": [" technician", " customer"], "gold": 0, "group": "female"}
{"context": "The technician told someone that they could pay. ‘They’ refers to the", "choices": [" technician", " someone"], "gold": 1}
OUT

# DCLM's CORE: a folder of tasks, shuffled as by random.Random(1337); the context of a language modeling task is stripped.
mkdir -p eval_bundle/eval_data/kinds
cat >eval_bundle/core.yaml <<'IN'
icl_tasks:
-
  label: city_zeroshot
  dataset_uri: kinds/city.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
  continuation_delimiter: "\nAnswer: " # separates question and answer
- label: wino
  dataset_uri: kinds/wino.jsonl
  num_fewshot:
  - 2
  icl_task_type: schema
- label: year
  dataset_uri: kinds/year.jsonl
  num_fewshot: [3]
  icl_task_type: language_modeling
  has_categories: true
IN
printf 'Eval Task,Task Category,Random baseline,Description\n' >eval_bundle/eval_meta_data.csv
printf '%s\n' 'city_zeroshot,x,33.3,"Cities, of kings"' 'wino,x,50,' 'year,x,0,' >>eval_bundle/eval_meta_data.csv
for i in 1 2 3; do
    echo "{\"query\": \"In the year $i\", \"choices\": [\"a king\", \"a sheep\", \"a king $i\"], \"gold\": $((i - 1))}" >>eval_bundle/eval_data/kinds/city.jsonl
    echo "{\"context_options\": [\"The king $i\", \"His son\"], \"continuation\": \"gave it\", \"gold\": $((i % 2))}" >>eval_bundle/eval_data/kinds/wino.jsonl
done
for i in 1 2 3 4; do echo "{\"context\": \"in the year $i \", \"continuation\": \"the king\", \"category\": \"kings\"}" >>eval_bundle/eval_data/kinds/year.jsonl; done
expect "CORE" python3 "$converter" core eval_bundle -o core
says "a line for each task" "core/year.jsonl: 4 examples"
cat core/*.jsonl >core.txt
expect "CORE's lines" diff core.txt - <<'OUT'
{"context": "In the year 1", "choices": ["a king", "a sheep", "a king 1"], "gold": 0, "target_delimiter": "\nAnswer: ", "core": {"baseline": 0.33299999999999996, "num_fewshot": 0}}
{"context": "In the year 2", "choices": ["a king", "a sheep", "a king 2"], "gold": 1, "target_delimiter": "\nAnswer: ", "core": {"baseline": 0.33299999999999996, "num_fewshot": 0}}
{"context": "In the year 3", "choices": ["a king", "a sheep", "a king 3"], "gold": 2, "target_delimiter": "\nAnswer: ", "core": {"baseline": 0.33299999999999996, "num_fewshot": 0}}
{"contexts": ["The king 1", "His son"], "target": "gave it", "gold": 1, "target_delimiter": " ", "core": {"baseline": 0.5, "num_fewshot": 2}}
{"contexts": ["The king 2", "His son"], "target": "gave it", "gold": 0, "target_delimiter": " ", "core": {"baseline": 0.5, "num_fewshot": 2}}
{"contexts": ["The king 3", "His son"], "target": "gave it", "gold": 1, "target_delimiter": " ", "core": {"baseline": 0.5, "num_fewshot": 2}}
{"context": "in the year 2", "target": "the king", "target_delimiter": " ", "core": {"baseline": 0.0, "num_fewshot": 3}}
{"context": "in the year 1", "target": "the king", "target_delimiter": " ", "core": {"baseline": 0.0, "num_fewshot": 3}}
{"context": "in the year 4", "target": "the king", "target_delimiter": " ", "core": {"baseline": 0.0, "num_fewshot": 3}}
{"context": "in the year 3", "target": "the king", "target_delimiter": " ", "core": {"baseline": 0.0, "num_fewshot": 3}}
OUT
sed -i 's/schema/question_answering/' eval_bundle/core.yaml
refuses "a task of another kind" "core.yaml: wino is of kind question_answering; CORE has multiple_choice" core eval_bundle
sed -i '/question_answering/d' eval_bundle/core.yaml
refuses "a task without a kind" "core.yaml: not a task of CORE: .*wino" core eval_bundle
sed -i '/^wino/d' eval_bundle/eval_meta_data.csv
sed -i 's/label: wino/&\n  icl_task_type: schema/' eval_bundle/core.yaml
refuses "a task without a baseline" "eval_meta_data.csv: no line for wino" core eval_bundle
refuses "a file for the folder" "eval_bundle/core.yaml is not a directory" core eval_bundle/core.yaml

# ---- bad input ----
refuses "another set's file" "lambada.in.jsonl:1: there is no 'goal'" piqa lambada.in.jsonl valid-labels.lst
refuses "a missing labels file" "two files are needed" piqa valid.jsonl
printf '0\n' >short.lst
refuses "too few labels" "has 2 questions, short.lst 1 labels" piqa valid.jsonl short.lst
refuses "a missing file" "No such file.*missing.jsonl" wic missing.jsonl
printf '{"text": "fine so far"}\n{"text": "cut o' >cut.jsonl
refuses "a cut line" "cut.jsonl:2: not valid JSON" lambada cut.jsonl
echo '{"text": "one"}' >one.jsonl
refuses "a passage of one word" "one.jsonl:1: a passage needs" lambada one.jsonl
echo '[1]' >list.jsonl
refuses "a line that is no object" "list.jsonl:1: not an example of boolq" boolq list.jsonl
sed 's/"answer": "2"/"answer": ""/' winogrande.in.jsonl >unlabeled.jsonl
refuses "a test set without answers" "unlabeled.jsonl:1: 'answer' is ''; it must be one of '1', '2'" winogrande unlabeled.jsonl
sed 's/"label": 3/"label": 4/' hellaswag.in.jsonl >beyond.jsonl
refuses "an answer beyond the choices" "beyond.jsonl:2: the answer 4 is not among the choices" hellaswag beyond.jsonl
printf 'gold_label\tsentence1\tsentence2\nentailment\tThe king ran .\n' >columns.txt
refuses "a row with too few columns" "columns.txt:2: not as many columns" hans columns.txt
: >empty.jsonl
refuses "an empty file" "holds no examples" anli empty.jsonl
refuses "a line of another set" "boolq.in.jsonl:1: not a line of that data set" multirc boolq.in.jsonl
cp news.de news.xx
printf 'One line.\n' >short.en
refuses "translations that are not parallel" "differ in their number of lines" translation news.de short.en
refuses "a language without a name" "must be one of 'cs'" translation news.xx news.de
refuses "a sentence without its pronoun" "there is no 'sentid'" winogender columns.txt
refuses "an unknown task" "invalid choice: 'squad'" squad lambada.in.jsonl

# ---- the program on the results ----
for i in $(seq 1 400); do echo "in the year $((i * 37 % 1000)) the king gave $((i * 11 % 97)) sheep to his son, and it was good"; done >text.txt
setup() {
    "$program" tokenizer --input text.txt --vocab-size 400 --output tok && "$program" prepare --input text.txt --output data --tokenizer tok &&
        "$program" train --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --tokenizer tok --data-path data --split "1, 0, 0" --train-iters 3 --out run
}
expect "a small model" setup
model=(--model run/latest)
rejects() { ! "$program" eval "${model[@]}" "$@"; }
sed -i 's/"max_new_tokens": [0-9]*/"max_new_tokens": 8/' translation.jsonl summary.jsonl
expect "eval of the others" "$program" eval "${model[@]}" --tasks {cb,copa,multirc,record,rte,wsc,translation,summary,crows-pairs,winogender}.jsonl --micro-batch-size 2 --seq-length 63 --answers answers.jsonl
for line in "stereotype_gender  *[01]" "acc_gap  *[01]" "(chance 0.5000)"; do says "eval says $line" "$line"; done
says "and the mean above chance" "centred mean  *-\?[01]\.[0-9]*"
expect "the answers are in a file" test "$(grep -c '"answer":' answers.jsonl)" == 4
expect "eval of all tasks" "$program" eval "${model[@]}" --tasks {lambada,hellaswag,piqa,winogrande,boolq,race,anli,hans,wic}.jsonl
for line in "perplexity  *[0-9]" "acc_norm  *[01]\.[0-9]* .* (chance 0\.2500)" "prompts were truncated at the start"; do says "eval says $line" "$line"; done
expect "few-shot" "$program" eval "${model[@]}" --tasks piqa.jsonl --num-fewshot 1
says "eval says how many" "2, each after 1 solved"
grep acc out.txt >first.txt
expect "few-shot again" "$program" eval "${model[@]}" --tasks piqa.jsonl --num-fewshot 1
grep acc out.txt >second.txt  # expect overwrites out.txt
expect "the same seed, the same numbers" cmp first.txt second.txt
expect "few-shot from other files" "$program" eval "${model[@]}" --tasks piqa.jsonl anli.jsonl --num-fewshot 2 --fewshot hellaswag.jsonl boolq.jsonl --max-samples 1
expect "CORE with the solved examples of each task" "$program" eval "${model[@]}" --tasks core/*.jsonl --answers core_answers.jsonl
for line in "3, each after 2 solved" "4, each after 3 solved" "(chance 0.3330)" "centred  *-\?[01]\." "CORE, 3 of 22 tasks" "CORE  *-\?[01]\.[0-9]*  *(mean"; do
    says "eval says $line" "$line"
done
cp out.txt first.txt
expect "the choices are in a file" test "$(grep -c '"choice":[0-2],"gold":\[[0-2]\],"log_likelihoods":\[-[0-9.e, -]*\],"tokens":\[[0-9, ]*\]' core_answers.jsonl) $(grep -c '"greedy":' core_answers.jsonl)" == "6 4"
if command -v mpirun >/dev/null; then
    on_two_ranks() { mpirun -n 2 --bind-to none "$program" eval "${model[@]}" --tasks core/*.jsonl --tp 2 2>notes.txt; }
    expect "CORE on two ranks" on_two_ranks
    cp out.txt second.txt
    expect "gives the same" diff <(grep -E '^ +(acc|centred|CORE)' first.txt) <(grep -E '^ +(acc|centred|CORE)' second.txt)
fi
expect "other solved examples" "$program" eval "${model[@]}" --tasks core/wino.jsonl --num-fewshot 1 --seed 3 --json
says "one task has a CORE, too" '"core": -\?[01]'
expect "CORE while training" "$program" train --model run/latest --data-path data --split "1, 0, 0" --train-iters 1 --eval-tasks core/*.jsonl --out trained
says "its value" "tasks at step 1: .*mean of tasks centred"
expect "three draws of solved examples" "$program" eval "${model[@]}" --tasks core/*.jsonl piqa.jsonl --fewshot-draws 3
for line in "acc .* (chance 0.5000; std of 3 draws [01]" "centred mean .* (as CORE; std of 3 draws [01]"; do says "eval says $line" "$line"; done
sed 's/, "core".*/}/; s/"in the/"and in the/' core/year.jsonl >years.jsonl
draws() { "$program" eval "${model[@]}" --tasks years.jsonl --num-fewshot 2 --fewshot core/year.jsonl --json "$@" 2>/dev/null | python3 -c 'import json, sys; p = json.load(sys.stdin)["tasks"]["years.jsonl"]["perplexity"]; print(*p.get("draws", [p["value"]]))'; }
expect "each draw" draws --fewshot-draws 2
cp out.txt draws.txt  # expect overwrites out.txt
expect "has a seed" test "$(cat draws.txt)" == "$(draws) $(draws --seed 1001234)"
expect "of its own" test "$(tr ' ' '\n' <draws.txt | sort -u | wc -l)" == 2
expect "draws without examples" rejects --tasks piqa.jsonl --fewshot-draws 2
says "the message says what to give" "fewshot-draws has no effect without --num-fewshot"
expect "answers of several draws" rejects --tasks core/wino.jsonl --fewshot-draws 2 --answers two.jsonl
says "the message says why" "--answers saves the answers of one draw"
expect "a seed without examples" rejects --tasks piqa.jsonl --seed 3
says "the message says what to give" "seed has no effect without --num-fewshot"
expect "too few examples to draw from" rejects --tasks piqa.jsonl --num-fewshot 2
says "the message says so" "piqa.jsonl has 1 besides the question"
expect "a file too few" rejects --tasks piqa.jsonl anli.jsonl --num-fewshot 1 --fewshot boolq.jsonl
says "the message counts them" "--fewshot has 1 files, --tasks 2"
expect "--fewshot without a number" rejects --tasks piqa.jsonl --fewshot boolq.jsonl
expect "tasks beside a text" rejects --tasks piqa.jsonl --text text.txt
says "the message says what to give" "exactly one of --data-path, --text and --tasks"
printf '{"context": "a", "choices": [" b", " c"]}\n' >nogold.jsonl
expect "a task without answers" rejects --tasks nogold.jsonl
says "the message names the line" "nogold.jsonl:1: there is no key 'gold'"

# Text for language models from packages: the text that remains without markup, and the paragraphs dropped.
cat >texts_check.py <<'END'
import sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
from language_texts import fortunes, gnome_help, is_prose, manual_page, office_help

page = r""".TH LS 1
.\" a comment
.SH "NAME"
ls \- list \fIfiles\fR and
.B directories
of a\-b \(co
.PP
Second \&paragraph with
.BR ls (1).
.EX
code()
.EE
"""
assert [" ".join(p.split()) for p in manual_page(page) if p.strip()] == [
    "NAME", "ls - list files and directories of a-b ©", "Second paragraph with ls(1)."]
html = '<h1 id="a">Ein <b>Titel</b></h1><p class="code">x = 1</p><p class="paragraph">Gr&uuml;&szlig;e</p>'
assert list(office_help(html)) == ["Ein Titel", "Grüße"]
assert list(gnome_help("<page><title>Ett</title><p>tv<em>å</em></p></page>")) == ["Ett", "två"]
assert [p.strip() for p in fortunes("one\n%\ntwo\n")] == ["one", "two"]
for text, language, kept in (("Le chat est dans la maison.", "fr", True), ("The file that is given by the user", "fr", False),
                             ("The file that is given by the user", "en", True), ("--a=1 | grep 22 > x.y", "en", False),
                             ("今日は学校", "ja", True), ("Open the file", "ja", False), ("ls", "en", False)):
    assert is_prose(text, language) == kept, (text, language)
END
expect "texts of packages lose their markup" python3 texts_check.py "$(dirname "$converter")"
