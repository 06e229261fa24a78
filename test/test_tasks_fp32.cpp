// Tasks: accepted files, prompts and tokens, metrics on numbers worked out by hand, and log-likelihoods of a small random
// model compared with a double loop: one sequence at a time, all logits, softmax in double.
#include <map>
#include <set>

#include "trainer.h"
#include "files.h"
#include "small_tokenizer.h"
#include "testing.h"

namespace test_tasks_fp32 {

using test::small_tokenizer;
using Texts = std::vector<std::string>;

Task task_of(const test::TemporaryDirectory& dir, const std::string& lines) {
    test::write_file(dir / "task.jsonl", lines);
    return read_task(dir / "task.jsonl");
}

// ---- files -----------------------------------------------------------------------------------------------------------------
TEST(ReadTask, AcceptsEachKind) {
    const test::TemporaryDirectory dir;
    Task t = task_of(dir,
                     "{\"context\": \"a\\n\", \"choices\": [\" b\", \" \\u3042\", \" c\"], \"gold\": 2, \"id\": 7}\r\n\n"
                     "{\"context\": \"\", \"choices\": [\"x\", \"y\"], \"gold\": 0}");
    EXPECT_EQ(t.kind, TaskKind::choices);
    ASSERT_EQ(t.size(), 2);
    EXPECT_EQ(t.examples[0].n_choices(), 3);
    EXPECT_EQ(t.examples[0].context(2), "a\n");
    EXPECT_EQ(t.examples[0].continuation(1), " あ");
    EXPECT_EQ(t.examples[0].solved(), "a\n c");
    EXPECT_EQ(t.where(t.examples[1]), dir / "task.jsonl:3");

    t = task_of(dir, R"({"contexts": ["He", "She"], "target": " ran.", "gold": 1})");
    EXPECT_EQ(t.kind, TaskKind::contexts);
    EXPECT_EQ(t.examples[0].n_choices(), 2);
    EXPECT_EQ(t.examples[0].continuation(1), " ran.");
    EXPECT_EQ(t.examples[0].solved(), "She ran.");

    t = task_of(dir, R"({"context": "the end of the", "target": " cat"})");
    EXPECT_EQ(t.kind, TaskKind::last_word);
    EXPECT_EQ(t.examples[0].n_choices(), 1);
    EXPECT_EQ(t.examples[0].solved(), "the end of the cat");
}

TEST(ReadTask, Core) {
    const test::TemporaryDirectory dir;
    const auto line = [](const std::string& keys) { return R"({"context": "a", )" + keys + "}\n"; };
    const std::string choices = R"("choices": ["b", "c"], "gold": 1, "target_delimiter": " ")",
                      core = R"(, "core": {"baseline": 0.25, "num_fewshot": 3})";
    const Task task = task_of(dir, line(choices + core) + line(choices + core));
    EXPECT_EQ(task.kind, TaskKind::choices);
    EXPECT_EQ(task.core->baseline, 0.25);
    EXPECT_EQ(task.core->num_fewshot, 3);
    EXPECT_EQ(task.examples[0].solved(), "a c");
    EXPECT_EQ(limited(task, 1).size(), 1);
    EXPECT_EQ(limited(task, 0).size(), 2);
    EXPECT_EQ(limited(task, 3).size(), 2);
    EXPECT_EQ(limited(task_of(dir, line(choices) + line(choices)), 1).size(), 2);  // others keep their solved examples
    const std::pair<std::string, std::string> bad[] = {
        {choices + R"(, "core": 1)", "'core' needs 'baseline'"},
        {choices + R"(, "core": {"baseline": 1, "num_fewshot": 3})", "from 0 to 0.999"},
        {choices + R"(, "core": {"baseline": 0.5, "num_fewshot": 2.5})", "'num_fewshot', a whole number from 0 to 1000"},
        {choices + R"(, "group": "x")" + core, "group are not in CORE"},
        {R"("references": ["b"])" + core, "'core' belongs to choices"},
        {choices, "differs in kind"}};
    for (const auto& [keys, part] : bad)
        test::expect_error([&, keys = keys] { task_of(dir, line(choices + core) + line(keys)); }, {"task.jsonl:2", part});
}

TEST(ReadTask, WrittenAnswers) {
    const test::TemporaryDirectory dir;
    Task t = task_of(dir, R"({"context": "Q: x\nA:", "references": ["b", ""], "gold": 9})");
    EXPECT_EQ(t.kind, TaskKind::written);
    EXPECT_EQ(t.metrics, (Texts{"exact_match", "f1"}));
    EXPECT_EQ(t.examples[0].stops, Texts{"\n"});
    EXPECT_EQ(t.examples[0].max_new_tokens, 64);
    EXPECT_EQ(t.examples[0].continuations, (Texts{"b", ""}));
    EXPECT_EQ(t.examples[0].solved(), "Q: x\nA: b");
    t = task_of(dir, R"({"context": "A:\n", "references": ["b"], "until": ["."], "max_new_tokens": 5, "metrics": ["bleu"], )"
                     R"("stemmer": true})");
    EXPECT_EQ(t.examples[0].solved(), "A:\nb");
    EXPECT_EQ(t.examples[0].stops, Texts{"."});
    EXPECT_EQ(t.examples[0].max_new_tokens, 5);
    EXPECT_TRUE(t.stemmer);
    t = task_of(dir, R"({"context": "A:", "references": ["b"], "target_delimiter": ""})");
    EXPECT_EQ(t.examples[0].solved(), "A:b");
}

TEST(ReadTask, RefusesWithFileAndLine) {
    const test::TemporaryDirectory dir;
    const std::string fine = R"({"context": "a", "choices": [" b", " c"], "gold": 0})", place = dir / "task.jsonl:2";
    const std::pair<std::string, std::string> bad[] = {
        {R"({"choices": [" b", " c"], "gold": 0})", "keys must be"},
        {R"({"context": "a", "gold": 0})", "keys must be"},
        {R"({"context": "a", "contexts": ["a", "b"], "target": " c", "gold": 0})", "keys must be"},
        {R"({"context": "a", "choices": [" b", " c"], "target": " c", "gold": 0})", "keys must be"},
        {R"({"contexts": ["a", "b"], "choices": [" b", " c"], "gold": 0})", "keys must be"},
        {R"({"context": "a", "choices": [" b", " c"]})", "no key 'gold'"},
        {R"({"contexts": ["a", "b"], "target": " c"})", "no key 'gold'"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": 2})", "'gold' is 2; it must be a whole number from 0 to 1"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": -1})", "'gold' is -1"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": 18446744073709551615})", "'gold' is 1844"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": 0.5})", "'gold' is 0.5"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": "0"})", "'gold' is \"0\""},
        {R"({"context": "a", "choices": [" b", " c"], "gold": true})", "'gold' is true"},
        {R"({"context": "a", "choices": [], "gold": 0})", "'choices' is not a list of two"},
        {R"({"context": "a", "choices": [" b"], "gold": 0})", "'choices' is not a list of two"},
        {R"({"context": "a", "choices": {"0": " b", "1": " c"}, "gold": 0})", "'choices' is not a list of two"},
        {R"({"context": "a", "choices": [" b", ""], "gold": 0})", "choices[1] is empty"},
        {R"({"context": "a", "choices": [" ", " c"], "gold": 0})", "choices[0] is empty"},
        {R"({"context": "a", "choices": [" b", 3], "gold": 0})", "choices[1] is not a string"},
        {R"({"context": 3, "choices": [" b", " c"], "gold": 0})", "'context' is not a string"},
        {R"({"contexts": ["a", null], "target": " c", "gold": 0})", "contexts[1] is not a string"},
        {R"({"contexts": ["a"], "target": " c", "gold": 0})", "'contexts' is not a list of two"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": []})", "'gold' is an empty list"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": [1, 1]})", "'gold' has 1 twice"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": [0, 2]})", "'gold' is 2"},
        {R"({"context": "a", "choices": [" b", " c"], "gold": 0, "share_of": "x"})", "differs in kind from"},
        {R"({"context": "a", "references": []})", "'references' is not a list of one or more"},
        {R"({"context": "a", "references": ["b"], "target": " b"})", "keys must be"},
        {R"({"contexts": ["a", "b"], "references": ["b"]})", "keys must be"},
        {R"({"context": "a", "references": ["b"], "until": [""]})", "'until' has an empty string"},
        {R"({"context": "a", "references": ["b"], "until": "x"})", "'until' is not a list"},
        {R"({"context": "a", "references": ["b"], "max_new_tokens": 0})", "'max_new_tokens' is 0"},
        {R"({"context": "a", "references": ["b"], "metrics": ["blue"]})", "'blue' is not a metric"},
        {R"({"context": "a", "references": ["b"], "stemmer": 1})", "'stemmer' is not true or false"},
        {R"({"context": "a", "target": ""})", "'target' is empty"},
        {R"({"context": "a", "target": " b"})", "differs in kind from"},
        {R"({"context": "a", )", "not valid JSON"},
        {"{\"context\": \"\xff\", \"choices\": [\" b\", \" c\"], \"gold\": 0}", "not valid JSON"},
        {"[1, 2]", "not a JSON object"},
    };
    for (const auto& [line, part] : bad)
        test::expect_error([&, line = line] { task_of(dir, fine + "\n" + line + "\n" + fine); }, {place, part});
    test::expect_error([&] { task_of(dir, "\n \n"); }, {"task.jsonl", "no examples"});
    test::expect_error([&] { read_task(dir / "none.jsonl"); }, {"none.jsonl"});
}

// ---- prompts ---------------------------------------------------------------------------------------------------------------
TEST(FewShot, PromptIsSolvedExamplesAndBlankLines) {
    const test::TemporaryDirectory dir;
    const Task one = task_of(dir, R"({"context": "Q: x\nA:", "choices": [" no", " yes"], "gold": 1})");
    EXPECT_EQ(few_shot_prefix(one, 1, 1234, 5, false), "Q: x\nA: yes\n\n");
    const Task contexts =
        task_of(dir, R"({"contexts": ["Tim, because he", "Tim, because Bob"], "target": " ran.", "gold": 1})");
    EXPECT_EQ(few_shot_prefix(contexts, 1, 1234, 0, false), "Tim, because Bob ran.\n\n");
    EXPECT_EQ(few_shot_prefix(one, 0, 1234, 0, true), "");
}

TEST(FewShot, DrawsDifferentExamplesAndNotTheQuestion) {
    const test::TemporaryDirectory dir;
    std::string lines;
    for (char c = 'a'; c < 'g'; c++) lines += std::string("{\"context\": \"") + c + "\", \"target\": \" z\"}\n";
    const Task task = task_of(dir, lines);
    for (int64_t question = 0; question < task.size(); question++) {
        std::set<std::string> prefixes;
        for (uint64_t seed = 0; seed < 50; seed++) {
            const std::string prefix = few_shot_prefix(task, 5, seed, question, true);
            EXPECT_EQ(prefix, few_shot_prefix(task, 5, seed, question, true));
            std::set<char> drawn;
            ASSERT_EQ(prefix.size(), 5 * std::string("a z\n\n").size());
            for (size_t i = 0; i < prefix.size(); i += 5) {
                EXPECT_EQ(prefix.substr(i + 1, 4), " z\n\n");
                drawn.insert(prefix[i]);
            }
            EXPECT_EQ(drawn.size(), 5u);
            EXPECT_EQ(drawn.count((char)('a' + question)), 0u);
            prefixes.insert(prefix);
        }
        EXPECT_GT(prefixes.size(), 20u);  // of 120 orders, 50 draws give 41 different ones on average
    }
    EXPECT_EQ(few_shot_prefix(task, 6, 1, 0, false).size(), 30u);
    test::expect_error([&] { few_shot_prefix(task, 6, 1, 0, true); }, {"6 examples", "task.jsonl has 5 besides the question"});
    test::expect_error([&] { few_shot_prefix(task, 7, 1, 0, false); }, {"7 examples", "has 6"});
}

// [j for j in range(9) if j != i] sampled by random.Random(1234 + i).
TEST(FewShot, CoreDrawsAsNanochat) {
    const test::TemporaryDirectory dir;
    std::string lines;
    for (char c = '0'; c < '9'; c++)
        lines += std::string("{\"context\": \"") + c + R"(", "target": "z", "core": {"baseline": 0, "num_fewshot": 3}})" + "\n";
    const Task task = task_of(dir, lines);
    EXPECT_EQ(few_shot_prefix(task, 3, 1234, 0, true), "8z\n\n1z\n\n7z\n\n");
    EXPECT_EQ(few_shot_prefix(task, 3, 1234, 5, true), "1z\n\n2z\n\n3z\n\n");
    EXPECT_EQ(few_shot_prefix(task, 3, 1234, 8, true), "1z\n\n4z\n\n2z\n\n");
    EXPECT_EQ(few_shot_prefix(task, 0, 1234, 8, true), "");
    EXPECT_EQ(few_shot_prefix(task, 9, 1234, 8, false).size(), 36u);
    test::expect_error([&] { few_shot_prefix(task, 9, 1234, 8, true); }, {"9 examples", "has 8 besides the question"});
}

TEST(FewShot, RequestsBeginWithThePrefix) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = small_tokenizer(dir);
    const Task pool = task_of(dir, R"({"context": "the cat", "choices": [" sat", " ran"], "gold": 0})"),
               task = task_of(dir, R"({"context": "the dog", "choices": [" sat", " ran"], "gold": 0})");
    const std::vector<Request> requests = make_requests(tokenizer, task, &pool, 1, 1234, 1, 100).requests;
    ASSERT_EQ(requests.size(), 2u);
    EXPECT_EQ(tokenizer.decode(requests[0].tokens), "the cat sat\n\nthe dog sat");
    EXPECT_EQ(tokenizer.decode(requests[1].tokens), "the cat sat\n\nthe dog ran");
}

TEST(MakeRequest, SplitsWhereTheContextsTokensEnd) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = small_tokenizer(dir);
    const auto scored = [&](const std::string& context, const std::string& continuation) {
        const Request r = make_request(tokenizer, context, continuation, 100);
        EXPECT_FALSE(r.truncated);
        return std::pair(tokenizer.decode({r.tokens.begin(), r.tokens.end() - r.n_scored}),
                         tokenizer.decode({r.tokens.end() - r.n_scored, r.tokens.end()}));
    };
    using Pair = std::pair<std::string, std::string>;
    EXPECT_EQ(scored("the cat", " sat"), Pair("the cat", " sat"));
    EXPECT_EQ(scored("the cat ", "sat"), Pair("the cat", " sat"));
    EXPECT_EQ(scored("the cat\n\n", " sat"), Pair("the cat", "\n\n sat"));
    EXPECT_EQ(scored("the cat\xe3\x80\x80", "sat"), Pair("the cat", "\xe3\x80\x80sat"));  // ideographic space
    EXPECT_EQ(scored("", " sat"), Pair("<|endoftext|>", " sat"));
    EXPECT_EQ(scored(" \n", "sat"), Pair("<|endoftext|>", " \nsat"));
    EXPECT_EQ(make_request(tokenizer, "the cat", " sat", 100).n_scored, 1);  // " sat" is one token

    // "th" + "e" is one token: without the tokens of "th" nothing remains for "e".
    ASSERT_EQ(tokenizer.encode("the").size(), 1u);
    const std::string h = "t", e = "he";
    EXPECT_NE(make_request(tokenizer, h, e, 100).problem.find("merges into"), std::string::npos);
    EXPECT_NE(make_request(tokenizer, "a", " sat sat sat", 2).problem.find("has 3 tokens; the model's maximum is 2"),
              std::string::npos);
}

// A question that cannot be scored is skipped with all its choices, and counted.
TEST(MakeRequest, QuestionsThatCannotBeScoredAreCounted) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = small_tokenizer(dir);
    const std::string fine = R"({"context": "the cat", "choices": [" sat", " ran"], "gold": 0})",
                      merges = R"({"context": "t", "choices": [" sat", "he"], "gold": 0})";
    const TaskRequests all = make_requests(tokenizer, task_of(dir, fine + "\n" + merges + "\n" + fine), nullptr, 0, 1, 3, 100);
    EXPECT_EQ(all.requests.size(), 4u);
    EXPECT_EQ(all.examples, (std::vector<int64_t>{0, 2}));
    EXPECT_EQ(all.left_out, 1);
    EXPECT_NE(all.problem.find("task.jsonl:2: its continuation merges"), std::string::npos) << all.problem;
    test::expect_error([&] { make_requests(tokenizer, task_of(dir, merges), nullptr, 0, 1, 1, 100); },
                       {"task.jsonl:1", "merges into"});
}

// As lm-evaluation-harness encodes: the template's token before each text, unless the text already starts with it; special
// tokens in the text are recognized.
TEST(MakeRequest, FollowsTheTokenizersTemplate) {
    const test::TemporaryDirectory dir;
    small_tokenizer(dir);
    auto j = nlohmann::json::parse(test::read_file(dir / "tok/tokenizer.json"));
    const nlohmann::json end = "<|endoftext|>", text = {{"Sequence", {{"id", "A"}}}};
    j["post_processor"] = {{"type", "TemplateProcessing"},
                           {"single", {{{"SpecialToken", {{"id", end}}}}, text}},
                           {"special_tokens", {{end, {{"ids", {0}}}}}}};
    test::write_file(dir / "tok/tokenizer.json", j.dump());
    const Tokenizer tokenizer = Tokenizer::load(dir / "tok");
    const std::vector<int> plain = tokenizer.encode("the cat sat"), sat = tokenizer.encode(" sat");
    const auto with_first = [](std::vector<int> tokens) {
        tokens.insert(tokens.begin(), 0);
        return tokens;
    };
    for (const char* context : {"the cat", "<|endoftext|>the cat"}) {
        const Request r = make_request(tokenizer, context, " sat", 100);
        EXPECT_EQ(r.tokens, with_first(plain)) << context;
        EXPECT_EQ(r.n_scored, 1) << context;
    }
    for (const char* context : {"", "\n"}) EXPECT_EQ(make_request(tokenizer, context, " sat", 100).tokens[0], 0);
    EXPECT_EQ(make_request(tokenizer, "", "<|endoftext|> sat", 100).tokens, with_first(sat));
    EXPECT_EQ(tokenizer.encode_prompt("the cat sat"), with_first(plain));
}

// The scored tokens of a task of CORE are found in whole prompts. "the", " cat", " sat", " dog", " on" are tokens.
TEST(MakeRequest, CoreScoresWhereThePromptsDiffer) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = small_tokenizer(dir);
    const auto core = [&](const std::string& keys, int T = 100) {
        const Task task = task_of(dir, "{" + keys + R"(, "core": {"baseline": 0, "num_fewshot": 0}})");
        return make_core_requests(tokenizer, task.kind, task.examples[0], "the\n\n", T);
    };
    const auto scored = [&](const std::vector<Request>& requests) {
        Texts texts;
        for (const Request& r : requests) {
            EXPECT_EQ(r.problem, "");
            EXPECT_EQ(r.tokens[0], tokenizer.bos_id());
            texts.push_back(tokenizer.decode({r.tokens.end() - r.n_scored, r.tokens.end()}));
        }
        return texts;
    };
    const auto problem = [](const std::vector<Request>& requests) { return requests.back().problem; };
    EXPECT_EQ(scored(core(R"("context": "the", "choices": ["dog on", "dog sat on"], "gold": 0, "target_delimiter": " ")")),
              (Texts{" on", " sat on"}));
    EXPECT_EQ(scored(core(R"("context": "the", "choices": ["dog", "dog on"], "gold": 0, "target_delimiter": " ")")),
              (Texts{" dog", " dog on"}));  // the second starts with the first
    EXPECT_EQ(scored(core(R"("context": "the ", "choices": [" a", " a"], "gold": 0)")), (Texts{"a", "a"}));  // equal
    EXPECT_EQ(scored(core(R"("contexts": ["the dog", "the log cat"], "target": "sat on", "gold": 0, "target_delimiter": " ")")),
              (Texts{" sat on", " sat on"}));
    EXPECT_EQ(scored(core(R"("contexts": ["the cat", "the dog cat"], "target": " sat", "gold": 0)")),
              (Texts{" cat sat", " cat sat"}));
    EXPECT_EQ(scored(core(R"("context": "the dog", "target": "sat on", "target_delimiter": " ")")), Texts{" sat on"});
    EXPECT_EQ(scored(core(R"("context": "the dog", "target": "5", "target_delimiter": "\nA: ")")), Texts{" 5"});
    EXPECT_EQ(scored(core(R"("context": "<|endoftext|>", "target": " sat")")), Texts{" sat"});  // plain text
    EXPECT_NE(problem(core(R"("context": "t", "target": "he")")).find("merges into"), std::string::npos);
    EXPECT_NE(problem(core(R"("contexts": ["the", "dog"], "target": " dog sat on", "gold": 0)", 3)).find("3 of its tokens"),
              std::string::npos);
    const Request cut = core(R"("context": "the dog", "target": " sat")", 3)[0];
    EXPECT_TRUE(cut.truncated);
    EXPECT_EQ(tokenizer.decode(cut.tokens), "the dog sat");
}

TEST(TextRequests, CoverTheTextAndItsTail) {
    const std::vector<int> tokens = {0, 1, 2, 3, 4, 5, 6};
    for (int T = 1; T <= 8; T++) {
        int scored = 0;
        for (const Request& r : text_requests(tokens, T)) {
            EXPECT_LE(r.n_inputs(), T);
            EXPECT_EQ(r.n_scored, r.n_inputs());
            EXPECT_EQ(r.tokens[0], scored);
            scored += r.n_scored;
        }
        EXPECT_EQ(scored, 6) << T;
    }
    EXPECT_TRUE(text_requests({7}, 3).empty());
}

TEST(MakeRequest, CutsLongContextsOnTheLeft) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = small_tokenizer(dir);
    std::string context = "the";
    for (int i = 0; i < 30; i++) context += i % 2 ? " cat" : " dog";
    const std::vector<int> whole = tokenizer.encode(context + " sat");
    ASSERT_EQ(whole.size(), 32u);
    for (int T : {30, 8, 1}) {
        const Request r = make_request(tokenizer, context, " sat", T);
        EXPECT_TRUE(r.truncated);
        EXPECT_EQ(r.n_inputs(), T);
        EXPECT_EQ(r.n_scored, 1);
        EXPECT_EQ(r.tokens, std::vector<int>(whole.end() - (T + 1), whole.end()));
    }
    EXPECT_EQ(make_request(tokenizer, context, " sat", 31).tokens, whole);
    EXPECT_FALSE(make_request(tokenizer, context, " sat", 31).truncated);
}

// ---- metrics ---------------------------------------------------------------------------------------------------------------
TEST(Metrics, NormalizeByCharactersAndBytes) {
    const test::TemporaryDirectory dir;
    // Sizes without the leading space: 2 characters of 2 bytes; 4 characters of 12 bytes. Per unit:
    //             log p           / character     / byte
    //   line 1    -3   -5         -1.5   -1.25    -1.5   -0.417    gold 0: acc only
    //   line 2    -3   -5         the same                         gold 1: acc_norm, acc_bytes
    //   line 3    -2   -6         -1     -1.5     -1     -0.5      gold 1: acc_bytes only
    //   line 4    -2   -2         -1     -0.5     -1     -0.167    gold 0: acc (a tie goes to the first)
    std::string lines;
    for (int gold : {0, 1, 1, 0})
        lines += "{\"context\": \"x\", \"choices\": [\" ab\", \" \\u3042\\u3044\\u3046\\u3048\"], \"gold\": " +
                 std::to_string(gold) + "}\n";
    const Task task = task_of(dir, lines);
    const std::vector<Score> scores = {{-3, true}, {-5, true}, {-3, true}, {-5, true},
                                       {-2, true}, {-6, true}, {-2, true}, {-2, true}};
    const std::vector<Metric> m = task_metrics(task, {0, 1, 2, 3}, scores);
    ASSERT_EQ(m.size(), 3u);
    EXPECT_EQ(m[0].name, "acc");
    EXPECT_DOUBLE_EQ(m[0].value, 0.5);
    EXPECT_DOUBLE_EQ(m[0].error, std::sqrt(4 * 0.25 / 3 / 4));
    EXPECT_EQ(m[1].name, "acc_norm");
    EXPECT_DOUBLE_EQ(m[1].value, 0.25);
    EXPECT_DOUBLE_EQ(m[1].error, std::sqrt((0.5625 + 3 * 0.0625) / 3 / 4));
    EXPECT_EQ(m[2].name, "acc_bytes");
    EXPECT_DOUBLE_EQ(m[2].value, 0.5);

    std::vector<Score> broken = scores;
    broken[3].log_likelihood = NAN;
    test::expect_error([&] { task_metrics(task, {0, 1, 2, 3}, broken); }, {"task.jsonl:2", "nan"});
    EXPECT_DOUBLE_EQ(task_metrics(task, {0, 1}, {scores.begin(), scores.begin() + 4})[0].value, 0.5);  // only the first two
}

// The harness's target_delimiter is scored but not counted in lengths; without it, a leading space belongs to the choice.
TEST(Metrics, LengthsDoNotCountTheDelimiter) {
    const test::TemporaryDirectory dir;
    const auto example = [&](const std::string& keys) {
        return task_of(dir, R"({"context": "a", "choices": [" b", "cd"], "gold": 0)" + keys + "}").examples[0];
    };
    const auto expect = [](const TaskExample& e, const Texts& continuations, const Texts& counted) {
        EXPECT_EQ(e.continuations, continuations);
        for (int k = 0; k < 2; k++) EXPECT_EQ(e.counted(k), counted[(size_t)k]);
    };
    expect(example(""), {" b", "cd"}, {"b", "cd"});
    expect(example(R"(, "target_delimiter": "")"), {" b", "cd"}, {" b", "cd"});
    expect(example(R"(, "target_delimiter": ": ")"), {":  b", ": cd"}, {" b", "cd"});
    test::expect_error([&] { example(R"(, "target_delimiter": 1)"); }, {"'target_delimiter' is not a string"});
}

TEST(Metrics, LastWordAndContexts) {
    const test::TemporaryDirectory dir;
    const std::string line = "{\"context\": \"a\", \"target\": \" b\"}\n";
    const Task words = task_of(dir, line + line);
    const std::vector<Metric> m = task_metrics(words, {0, 1}, {{-1, true}, {-4, false}});
    ASSERT_EQ(m.size(), 2u);
    EXPECT_DOUBLE_EQ(m[0].value, 0.5);
    EXPECT_EQ(m[1].name, "perplexity");
    EXPECT_DOUBLE_EQ(m[1].value, std::exp(2.5));
    EXPECT_DOUBLE_EQ(m[1].error, std::exp(2.5) * 1.5);  // deviations of 1.5: sqrt(4.5 / 1 / 2)

    const Task contexts = task_of(dir, R"({"contexts": ["a", "bcdefgh"], "target": " b", "gold": 1})");
    const std::vector<Metric> c = task_metrics(contexts, {0}, {{-3, false}, {-2, false}});
    ASSERT_EQ(c.size(), 1u);
    EXPECT_DOUBLE_EQ(c[0].value, 1);
    EXPECT_TRUE(std::isnan(c[0].error));
}

// Tasks of CORE compare log p per token, and say what accuracy counts as 0.
TEST(Metrics, CoreDividesByTokens) {
    const test::TemporaryDirectory dir;
    const std::string line =
        R"({"context": "a", "choices": ["bcdefgh", "b"], "gold": 1, "core": {"baseline": 0.2, "num_fewshot": 0}})"
        "\n";
    const Task task = task_of(dir, line + line + line);
    const std::vector<Metric> m = task_metrics(
        task, {0, 1, 2}, {{-4, true, 2}, {-3, true, 1}, {-4, true, 1}, {-6, true, 2}, {-2, true, 2}, {-3, true, 3}});
    ASSERT_EQ(m.size(), 1u);
    EXPECT_DOUBLE_EQ(m[0].value, 1 / 3.0);  // the last is a tie, which goes to the first
    EXPECT_NEAR(*centred_accuracy(task, {0, 1, 2}, m), (1 / 3.0 - 0.2) / 0.8, 1e-15);
    const Task last = task_of(dir, R"({"context": "a", "target": "b", "core": {"baseline": 0, "num_fewshot": 0}})");
    EXPECT_EQ(task_metrics(last, {0}, {{-1, true, 1}}).size(), 1u);
    EXPECT_EQ(task_metrics(last, {0}, {{-1, true, 1}})[0].value, 1);
    EXPECT_EQ(task_metrics(last, {0}, {{-1, false, 1}})[0].value, 0);
}

TEST(Metrics, SeveralGoldsGroupsAndShares) {
    const test::TemporaryDirectory dir;
    const auto line = [](const std::string& more) {
        return R"({"context": "a", "choices": [" b", " c", " d"], )" + more + "}\n";
    };
    const Task task = task_of(dir, line(R"("gold": [0, 2], "group": "x")") + line(R"("gold": 1, "group": "y")") +
                                       line(R"("gold": 0, "group": "y")") + line(R"("gold": 1)"));
    const std::vector<int64_t> all = {0, 1, 2, 3};
    // Correct: the third choice, the second, none, the second.
    const std::vector<Score> scores = {{-2, true}, {-3, true}, {-1, true}, {-2, true}, {-1, true}, {-3, true},
                                       {-2, true}, {-1, true}, {-3, true}, {-2, true}, {-1, true}, {-3, true}};
    std::map<std::string, double> found;
    for (const Metric& m : task_metrics(task, all, scores)) found[m.name] = m.value;
    EXPECT_EQ(found["acc"], 0.75);
    EXPECT_EQ(found["acc_x"], 1);
    EXPECT_EQ(found["acc_y"], 0.5);
    EXPECT_EQ(found["acc_gap"], 0.5);
    const double chance = (2 + 1 + 1 + 1) / 3.0 / 4;
    EXPECT_NEAR(*centred_accuracy(task, all, task_metrics(task, all, scores)), (0.75 - chance) / (1 - chance), 1e-15);

    const Task pairs = task_of(dir, R"({"context": "", "choices": ["b", "c"], "gold": 0, "share_of": "stereotype"})");
    const std::vector<Metric> share = task_metrics(pairs, {0}, {{-1, true}, {-2, true}});
    ASSERT_EQ(share.size(), 1u);
    EXPECT_EQ(share[0].name, "stereotype");
    EXPECT_EQ(share[0].value, 1);
    EXPECT_FALSE(centred_accuracy(pairs, {0}, share));
}

TEST(Metrics, WrittenAnswers) {
    const test::TemporaryDirectory dir;
    const auto line = [](const std::string& references) {
        return R"({"context": "q", "references": [)" + references +
               R"(], "metrics": ["exact_match", "bleu", "rougeL", "f1"]})" + "\n";
    };
    const Task task =
        task_of(dir, line(R"("the red cat sat down")") + line(R"("x", "A dog ran to the log.")") + line(R"("y")"));
    const Texts answers = {"red cat sat down", "a dog ran to the house", "no"};
    const std::vector<Metric> m = answer_metrics(task, {0, 1, 2}, answers);
    ASSERT_EQ(m.size(), 4u);
    EXPECT_EQ(m[0].name, "exact_match");
    EXPECT_DOUBLE_EQ(m[0].value, 1 / 3.0);
    BleuCounts all;
    std::vector<BleuCounts> each;
    for (size_t i = 0; i < 3; i++) {
        each.push_back(bleu_counts(answers[i], task.examples[i].continuations));
        all += each.back();
    }
    EXPECT_EQ(m[1].name, "bleu");
    EXPECT_EQ(m[1].value, bleu(all));
    double mean = 0, squares = 0;  // the jackknife
    for (const BleuCounts& c : each) mean += bleu(all - c) / 3;
    for (const BleuCounts& c : each) squares += std::pow(bleu(all - c) - mean, 2);
    EXPECT_NEAR(m[1].error, std::sqrt(squares * 2 / 3), 1e-12);
    EXPECT_NEAR(m[2].value, (8.0 / 9 + 10.0 / 12 + 0) / 3, 1e-12);
    EXPECT_NEAR(m[3].value, (1 + 6.0 / 8 + 0) / 3, 1e-12);
    EXPECT_DOUBLE_EQ(*centred_accuracy(task, {0, 1, 2}, m), 1 / 3.0);
    EXPECT_TRUE(std::isnan(answer_metrics(task, {0}, Texts{"x"})[1].error));
    EXPECT_TRUE(std::isnan(answer_metrics(task, {0}, Texts{"x"})[0].error));
}

TEST(MakePrompt, LeavesRoomForTheAnswer) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = small_tokenizer(dir);
    std::string context = "the";
    for (int i = 0; i < 30; i++) context += " cat";
    const std::vector<int> whole = tokenizer.encode(context);
    const Request r = make_prompt(tokenizer, context, 8, 20);
    EXPECT_TRUE(r.truncated);
    EXPECT_EQ(r.tokens, std::vector<int>(whole.end() - 12, whole.end()));
    EXPECT_EQ(tokenizer.decode(make_prompt(tokenizer, "the cat ", 8, 20).tokens), "the cat ");  // unchanged
    EXPECT_EQ(make_prompt(tokenizer, "", 8, 20).tokens, std::vector<int>{tokenizer.bos_id()});
    EXPECT_NE(make_prompt(tokenizer, "the", 20, 20).problem.find("20 tokens"), std::string::npos);
    // One prompt per example, however many references it has.
    const Task task = task_of(dir, R"({"context": "the cat", "references": ["a", "b", "c"], "max_new_tokens": 2})");
    EXPECT_EQ(make_requests(tokenizer, task, nullptr, 0, 1, 1, 20).requests.size(), 1u);
}

// ---- the model -------------------------------------------------------------------------------------------------------------
struct Fixture {
    be::Ctx ctx{1};
    test::TemporaryDirectory dir;
    Tokenizer tokenizer = small_tokenizer(dir);
    Model m;

    static ModelConfig config(const std::string& family, int V) {
        ModelConfig c;
        set_family(c, family);
        c.L = 2;
        c.C = 24;
        c.NH = 6;
        c.NKV = family == "llama" ? 3 : 6;
        c.F = 96;
        c.T = 24;
        c.V = V;
        c.init_std = 0.3;
        check_config(c);
        pad_vocabulary(c, 64);
        return c;
    }
    Fixture(const std::string& family, int B, int head_rows) : m(config(family, tokenizer.vocab_size())) {
        plan_memory(m, Recompute::inference, B, m.c.T, head_rows);
        allocate(ctx, m);
        initialize(ctx, m, 42);
    }

    // Logits of every row of one sequence, without its last token.
    std::vector<floatX> logits(const std::vector<int>& tokens) {
        const int T = (int)tokens.size() - 1;
        CHECK(m.a.head_rows >= T, "all logits at once");
        Batch batch;
        batch.B = 1;
        batch.T = T;
        batch.tokens.assign(tokens.begin(), tokens.end() - 1);
        batch.targets.assign(T, -1);
        batch.positions.resize(T);
        std::iota(batch.positions.begin(), batch.positions.end(), 0);
        const Pass pass = upload(ctx, m, batch, m.a.micro_batch());
        model_forward(pass);
        head(pass, 0, 0, false);
        HostSide<floatX> host(ctx, m.a.logits, (size_t)T * m.c.Vp);
        host.download();
        return {host.data(), host.data() + (size_t)T * m.c.Vp};
    }
    int likeliest(const floatX* row) const {
        int best = 0;
        for (int i = 1; i < m.c.V; i++)
            if (row[i] > row[best]) best = i;
        return best;
    }
    // log p of the last n tokens and whether each is the most likely one, in double.
    Score plain_score(const std::vector<int>& tokens, int n) {
        const std::vector<floatX> all = logits(tokens);
        Score score;
        for (size_t t = tokens.size() - 1 - n; t + 1 < tokens.size(); t++) {
            const floatX* row = all.data() + t * m.c.Vp;
            double total = 0;
            for (int i = 0; i < m.c.V; i++) total += std::exp((double)row[i]);
            score.log_likelihood += (double)row[tokens[t + 1]] - std::log(total);
            score.greedy = score.greedy && likeliest(row) == tokens[t + 1];
        }
        return score;
    }
    // The same through the command's code.
    std::vector<Score> scores(const std::vector<Request>& requests) {
        const std::unique_ptr<FILE, int (*)(FILE*)> nowhere(fopen("/dev/null", "w"), fclose);
        Progress progress("test", 1, "tokens", nowhere.get());
        return *score_requests(ctx, m, requests, &progress, [] { return false; });
    }
};

// Texts of all lengths, so that passes mix rows with much and with little padding; some exceed the model's 24 tokens.
std::string random_words(test::Rng& rng, int n) {
    const Texts words = {" the", " cat", " sat", " on", " mat", " and", " dog", " x", " zebra"};
    std::string s;
    for (int i = 0; i < n; i++) s += words[rng.below((int)words.size())];
    return s;
}

class TaskFamilies : public testing::TestWithParam<const char*> {};

TEST_P(TaskFamilies, ScoresEqualAPlainLoop) {
    Fixture plain(GetParam(), 1, 24);
    test::Rng rng(5);
    std::vector<Request> requests;
    int truncated = 0;
    for (int i = 0; i < 60; i++) {
        const std::string context = random_words(rng, rng.below(30));
        Request r = make_request(plain.tokenizer, context, random_words(rng, 1 + rng.below(4)), plain.m.c.T);
        // Half of them end as the model would continue, otherwise hardly any would be greedy.
        for (size_t t = r.tokens.size() - r.n_scored; t < r.tokens.size() && i % 2; t++) {
            const std::vector<floatX> all = plain.logits({r.tokens.begin(), r.tokens.begin() + t + 1});
            r.tokens[t] = plain.likeliest(all.data() + (t - 1) * plain.m.c.Vp);
        }
        truncated += r.truncated;
        requests.push_back(r);
    }
    EXPECT_GT(truncated, 5);
    std::vector<Score> expected;
    for (const Request& r : requests) expected.push_back(plain.plain_score(r.tokens, r.n_scored));
    const auto greedy = std::count_if(expected.begin(), expected.end(), [](const Score& s) { return s.greedy; });
    EXPECT_GE(greedy, 30);
    EXPECT_LT(greedy, 60);

    // One sequence per pass, several, all of them; the head in one chunk and in many.
    for (const auto& [B, head_rows] : {std::pair(1, 24), {3, 7}, {3, 1000}, {100, 5}}) {
        Fixture f(GetParam(), B, head_rows);
        const std::vector<Score> scores = f.scores(requests);
        ASSERT_EQ(scores.size(), expected.size());
        for (size_t i = 0; i < scores.size(); i++) {
            // A matrix product of another shape may sum in another order: per token, the logit and log Z (both below 16)
            // each differ by a few roundings, here 32 in total.
            const double allowed = requests[i].n_scored * 32 * 16 * test::roundoff<float>;
            EXPECT_TRUE(std::abs(scores[i].log_likelihood - expected[i].log_likelihood) <= allowed)
                << i << ": " << scores[i].log_likelihood << ", expected " << expected[i].log_likelihood;
            EXPECT_EQ(scores[i].greedy, expected[i].greedy) << i;
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Model, TaskFamilies, testing::Values("gpt2", "bloom", "llama"));

// Whole tasks, from file to metrics, compared with texts and tokens assembled by hand.
TEST(Tasks, MetricsEqualAPlainLoop) {
    Fixture f("gpt2", 4, 16), plain("gpt2", 1, 24);
    test::Rng rng(9);
    std::string choices, words;
    const int n = 25;
    double correct = 0, normalized = 0, greedy = 0, total = 0;
    for (int i = 0; i < n; i++) {
        const std::string context = "the" + random_words(rng, 1 + rng.below(30));
        const std::vector<int> context_tokens = f.tokenizer.encode(context);
        const auto score = [&](const std::string& continuation) {
            std::vector<int> whole = f.tokenizer.encode(context + continuation);
            const int scored = (int)(whole.size() - context_tokens.size());
            if (whole.size() > 25) whole.erase(whole.begin(), whole.end() - 25);
            return plain.plain_score(whole, scored);
        };
        nlohmann::json j = {{"context", context}, {"choices", nlohmann::json::array()}, {"gold", rng.below(3)}};
        std::vector<double> logs, per_character;
        for (int k = 0; k < 3; k++) {
            const std::string choice = random_words(rng, 1 + rng.below(3));
            j["choices"].push_back(choice);
            logs.push_back(score(choice).log_likelihood);
            per_character.push_back(logs[k] / (double)(choice.size() - 1));
        }
        choices += j.dump() + "\n";
        correct += std::max_element(logs.begin(), logs.end()) - logs.begin() == j["gold"];
        normalized += std::max_element(per_character.begin(), per_character.end()) - per_character.begin() == j["gold"];
        const std::string target = random_words(rng, 1);
        words += nlohmann::json({{"context", context}, {"target", target}}).dump() + "\n";
        greedy += score(target).greedy;
        total += score(target).log_likelihood;
    }
    const auto metrics = [&](const std::string& lines) {
        const Task task = task_of(f.dir, lines);
        const TaskRequests all = make_requests(f.tokenizer, task, nullptr, 0, 1, task.size(), f.m.c.T);
        return task_metrics(task, all.examples, f.scores(all.requests));
    };
    const std::vector<Metric> multiple = metrics(choices), last = metrics(words);
    EXPECT_DOUBLE_EQ(multiple[0].value, correct / n);
    EXPECT_DOUBLE_EQ(multiple[1].value, normalized / n);
    EXPECT_NE(correct, normalized);  // otherwise a mix-up would go unnoticed
    EXPECT_DOUBLE_EQ(last[0].value, greedy / n);
    EXPECT_NEAR(last[1].value / std::exp(-total / n), 1, 3 * 32 * 16 * test::roundoff<float>);  // at most 3 tokens a word
}

// Batched answers equal a plain loop's: always the most likely next token, until a stop.
TEST(WrittenAnswers, EqualAPlainLoop) {
    Fixture plain("llama", 1, 24);
    Model batched(Fixture::config("llama", plain.tokenizer.vocab_size()));
    plan_memory(batched, Recompute::inference, 3, batched.c.T, 24, {3, 0});
    allocate(plain.ctx, batched);
    initialize(plain.ctx, batched, 42);
    Generator generator(plain.ctx, batched);
    test::Rng rng(3);
    std::string lines;
    Texts expected;
    int stopped = 0;
    for (int i = 0; i < 20; i++) {
        const std::string context = random_words(rng, 1 + rng.below(8));
        const int most = 1 + i % 7;
        std::vector<int> tokens = make_prompt(plain.tokenizer, context, most, 24).tokens;
        std::string text;
        for (int n = 0; n < most; n++) {
            tokens.push_back(0);
            const std::vector<floatX> logits = plain.logits(tokens);
            tokens.back() = plain.likeliest(logits.data() + (tokens.size() - 2) * plain.m.c.Vp);
            text += plain.tokenizer.token_bytes(tokens.back());
        }
        // Half of them stop at an ASCII character, if there is one.
        const auto stop = std::find_if(text.begin(), text.end(), [&](char c) { return i % 2 && c > 0; });
        const std::string until = stop == text.end() ? "no stop" : std::string(1, *stop);
        stopped += stop != text.end();
        expected.emplace_back(text.begin(), stop);
        lines +=
            nlohmann::json{{"context", context}, {"references", {"x"}}, {"max_new_tokens", most}, {"until", {until}}}.dump();
        lines += "\n";
    }
    EXPECT_GT(stopped, 3);
    const Task task = task_of(plain.dir, lines);
    const TaskRequests all = make_requests(plain.tokenizer, task, nullptr, 0, 1, task.size(), 24);
    const auto answers = [&](const std::function<bool()>& stop) {
        return generate_answers(*batched.ranks, generator, plain.tokenizer, {}, task, all, nullptr, stop);
    };
    int asked = 0;
    EXPECT_FALSE(answers([&] { return ++asked == 3; }));
    EXPECT_EQ(asked, 3);
    EXPECT_EQ(answers([] { return false; }), expected);  // the stopped ones leave no trace
    EXPECT_EQ(plain.ctx.steady_rows, 0);                 // later training is unaffected
    const std::vector<std::string> texts = {"", "a:b", "12:", "\xff\n"};
    EXPECT_EQ(detail::unpacked_texts(detail::packed_texts(texts)), texts);
}

}  // namespace test_tasks_fp32
