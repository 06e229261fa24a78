// Tasks: questions with known answers, scored as EleutherAI's lm-evaluation-harness scores them, so that numbers can be
// compared. A task is a .jsonl file, one example per line, all of one kind; other keys are ignored (dev/data makes such files):
//   {"context": str, "choices": [str, ...], "gold": int}   multiple choice: which choice continues the context?
//   {"contexts": [str, ...], "target": str, "gold": int}   the choice is inside the context (WinoGrande): after which
//                                                          context is the target most likely?
//   {"context": str, "target": str}                        last word (LAMBADA): would the model write the target?
// Choices and targets are scored as given, usually with a leading space; gold counts from 0. A line's "target_delimiter" is the
// harness's setting of that name, which is put before its choices or target.
//
//   log p(continuation | context) = sum over the continuation's tokens of log p(token | all tokens before it)
//   acc          share of examples whose gold choice has the largest log p; last word: whose every token is the most likely
//   acc_norm     like acc, by log p / characters of the choice without its delimiter: "target_delimiter", or else the
//                leading space
//   acc_bytes    like acc, by log p / bytes of the choice
//   perplexity   exp(-mean log p) over examples, last word only
// Standard errors: sqrt(sample variance / n) for a mean; for the perplexity, exp(-mean) times that of the mean, to first order
// (the harness resamples instead). Ties go to the first choice.
//
// Few-shot: K solved examples and the question, joined by blank lines. The choice of examples is a function of seed and example
// alone. Errors in a task file name FILE:LINE.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/rng.h"
#include "../base/terminal.h"
#include "../base/utf8.h"
#include "text_format.h"
#include "tokenizer.h"

enum class TaskKind { choices, contexts, last_word };

// One of contexts and continuations has an entry per choice, the other a single one.
struct TaskExample {
    std::vector<std::string> contexts, continuations;
    std::optional<size_t> delimiter;  // leading bytes of each continuation that its length leaves out
    int gold = 0;
    int64_t line = 0;

    int n_choices() const { return (int)std::max(contexts.size(), continuations.size()); }
    const std::string& context(int k) const { return contexts[contexts.size() > 1 ? k : 0]; }
    const std::string& continuation(int k) const { return continuations[continuations.size() > 1 ? k : 0]; }
    std::string_view counted(int k) const {
        const std::string_view text = continuation(k);
        return text.substr(delimiter.value_or(!text.empty() && text[0] == ' '));
    }
    std::string solved() const { return context(gold) + continuation(gold); }
};

struct Task {
    std::string file;
    TaskKind kind = TaskKind::choices;
    std::vector<TaskExample> examples;

    std::string where(const TaskExample& e) const { return file + ":" + std::to_string(e.line); }
    int64_t size() const { return (int64_t)examples.size(); }
};

// ---- reading ---------------------------------------------------------------------------------------------------------------
// Reads one line; sets `kind`.
inline TaskExample read_example(const nlohmann::json& j, const char* where, TaskKind& kind) {
    const auto text = [&](const nlohmann::json& value, const std::string& name, bool may_be_empty) {
        if (!value.is_string()) fail("%s: %s is not a text", where, name.c_str());
        const std::string s = value.get<std::string>();
        if (!may_be_empty && (s.empty() || (s == " " && !j.contains("target_delimiter"))))
            fail("%s: %s is empty: there is nothing to score", where, name.c_str());
        return s;
    };
    const auto texts = [&](const char* key, bool may_be_empty) {
        const auto& list = j[key];
        if (!list.is_array() || list.size() < 2) fail("%s: '%s' is not a list of two or more texts", where, key);
        std::vector<std::string> found;
        for (size_t i = 0; i < list.size(); i++) found.push_back(text(list[i], format("%s[%zu]", key, i), may_be_empty));
        return found;
    };
    const bool context = j.contains("context"), contexts = j.contains("contexts"), choices = j.contains("choices"),
               target = j.contains("target");
    if (context == contexts || choices == target || (contexts && choices))
        fail("%s: the keys must be context, choices, gold; or contexts, target, gold; or context, target", where);
    kind = choices ? TaskKind::choices : contexts ? TaskKind::contexts : TaskKind::last_word;

    TaskExample e;
    e.contexts = contexts ? texts("contexts", true) : std::vector{text(j["context"], "'context'", true)};
    e.continuations = choices ? texts("choices", false) : std::vector{text(j["target"], "'target'", false)};
    if (j.contains("target_delimiter")) {
        const std::string delimiter = text(j["target_delimiter"], "'target_delimiter'", true);
        for (std::string& continuation : e.continuations) continuation = delimiter + continuation;
        e.delimiter = delimiter.size();
    }
    if (kind == TaskKind::last_word) return e;
    if (!j.contains("gold")) fail("%s: there is no key 'gold', the index of the right choice", where);
    const auto& gold = j["gold"];
    if (!gold.is_number_integer() || gold < 0 || gold >= e.n_choices())
        fail("%s: 'gold' is %s; it must be a whole number from 0 to %d", where, gold.dump().c_str(), e.n_choices() - 1);
    e.gold = gold.get<int>();
    return e;
}

inline Task read_task(const std::string& file) {
    Task task;
    task.file = file;
    const MappedFile mapped(file);
    const std::string_view text = mapped.text();
    refuse_other_formats(text, file, "");
    int64_t line = 0;
    for (size_t begin = 0, end; begin < text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        const std::string_view bytes = text.substr(begin, end - begin);
        line++;
        if (bytes.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        const std::string where = file + ":" + std::to_string(line);
        const nlohmann::json j = parse_json(bytes, where);
        if (!j.is_object()) fail("%s is not a JSON object", where.c_str());
        TaskKind kind;
        task.examples.push_back(read_example(j, where.c_str(), kind));
        task.examples.back().line = line;
        if (task.size() == 1) task.kind = kind;
        if (kind != task.kind)
            fail("%s is of another kind than %s; HINT: one kind per file", where.c_str(), task.where(task.examples[0]).c_str());
    }
    if (task.examples.empty()) fail("%s holds no examples", file.c_str());
    return task;
}

// ---- prompts ---------------------------------------------------------------------------------------------------------------
// K different solved examples of the pool, each followed by a blank line. `number` is the index of the question in its task;
// `same`: the pool is that task, and the question itself is not drawn.
inline std::string few_shot_prefix(const Task& pool, int K, uint64_t seed, int64_t number, bool same) {
    if (K > pool.size() - same)
        fail("%d examples before each question were asked for, %s has %lld%s", K, pool.file.c_str(),
             (long long)(pool.size() - same), same ? " besides the question" : "");
    std::vector<int64_t> drawn;
    std::string prefix;
    for (uint64_t draw = 0; (int)drawn.size() < K; draw++) {
        const double uniform = uniform_at(seed, RngPurpose::sampling, (uint32_t)number, draw);
        const int64_t i = (int64_t)(uniform * (double)pool.size());
        if ((same && i == number) || std::find(drawn.begin(), drawn.end(), i) != drawn.end()) continue;
        drawn.push_back(i);
        prefix += pool.examples[i].solved() + "\n\n";
    }
    return prefix;
}

// Length of `s` in bytes without trailing Unicode white space (as Python's str.rstrip).
inline size_t length_without_trailing_space(const std::string& s) {
    size_t length = 0;
    for (size_t i = 0; i < s.size();) {
        const uint32_t c = next_codepoint(s, i);
        const bool space = (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
                           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
                           c == 0x3000;
        if (!space) length = i;
    }
    return length;
}

// A sequence whose last n_scored tokens are scored.
struct Request {
    std::vector<int> tokens;
    int n_scored = 0;
    bool truncated = false;                                  // the beginning of the context was cut off
    std::string problem;                                     // why nothing can be scored
    int n_inputs() const { return (int)tokens.size() - 1; }  // the last token is only predicted
};

// Context and continuation as tokens, with special tokens and the tokenizer's template. White space at the end of the context
// goes to the continuation, since tokenizers attach it to the word that follows; the continuation's tokens are those of the
// whole text minus the number that the context alone has. An empty context becomes the token that begins a document. A sequence
// longer than the model's T loses its beginning.
inline Request make_request(const Tokenizer& tokenizer, const std::string& context, const std::string& continuation, int T) {
    const int first = tokenizer.bos_id();
    const std::string first_text = first < 0 ? "" : tokenizer.token_bytes(first);
    const auto encode = [&](const std::string& text) {
        if (first < 0 || text.compare(0, first_text.size(), first_text) != 0) return tokenizer.encode_prompt(text);
        std::vector<int> tokens;  // the text itself begins with that token
        tokenizer.encode_append(text, tokens, true);
        return tokens;
    };
    Request r;
    size_t n_context = 0;
    if (context.empty()) {
        tokenizer.encode_append(continuation, r.tokens, true);
        n_context = !r.tokens.empty() && r.tokens[0] == first;
    } else {
        n_context = encode(context.substr(0, length_without_trailing_space(context))).size();
        r.tokens = encode(context + continuation);
    }
    if (n_context == 0) {
        r.tokens.insert(r.tokens.begin(), first);
        n_context = 1;
    }
    r.n_scored = (int)r.tokens.size() - (int)n_context;
    if (r.tokens[0] < 0) r.problem = "the context is empty and the tokenizer has no token to begin with";
    else if (r.n_scored <= 0) r.problem = "its continuation merges into the context's last token; HINT: begin it with a space";
    else if (r.n_scored > T) r.problem = format("its continuation has %d tokens, the model's sequences hold %d", r.n_scored, T);
    if (r.problem.empty() && r.n_inputs() > T) {
        r.tokens.erase(r.tokens.begin(), r.tokens.end() - (T + 1));
        r.truncated = true;
    }
    return r;
}

// All choices of the examples that can be scored, in order.
struct TaskRequests {
    std::vector<Request> requests;
    std::vector<int64_t> examples;  // their indices in the task
    int64_t left_out = 0;           // examples with a choice that cannot be scored
    std::string problem;            // of the first one left out
};

inline TaskRequests make_requests(const Tokenizer& tokenizer, const Task& task, const Task* pool, int K, uint64_t seed,
                                  int64_t n_examples, int T) {
    TaskRequests all;
    for (int64_t i = 0; i < n_examples; i++) {
        const TaskExample& e = task.examples[i];
        const std::string prefix = K > 0 ? few_shot_prefix(pool ? *pool : task, K, seed, i, !pool) : "";
        std::vector<Request> choices;
        std::string problem;
        for (int k = 0; k < e.n_choices() && problem.empty(); k++) {
            choices.push_back(make_request(tokenizer, prefix + e.context(k), e.continuation(k), T));
            problem = choices.back().problem;
        }
        if (problem.empty()) {
            all.examples.push_back(i);
            all.requests.insert(all.requests.end(), choices.begin(), choices.end());
        } else if (all.left_out++ == 0) {
            all.problem = task.where(e) + ": " + problem;
        }
    }
    if (all.examples.empty()) fail("no question can be scored. The first, %s", all.problem.c_str());
    return all;
}

// Splits a text into sequences of T predicted tokens, each predicted from those before it in its sequence; the last is shorter
// if need be.
inline std::vector<Request> text_requests(const std::vector<int>& tokens, int T) {
    std::vector<Request> requests;
    for (size_t begin = 0; begin + 1 < tokens.size(); begin += (size_t)T) {
        const size_t end = std::min(tokens.size(), begin + (size_t)T + 1);
        Request r;
        r.tokens.assign(tokens.begin() + (long)begin, tokens.begin() + (long)end);
        r.n_scored = r.n_inputs();
        requests.push_back(std::move(r));
    }
    return requests;
}

// ---- metrics ---------------------------------------------------------------------------------------------------------------
struct Score {
    double log_likelihood = 0;  // sum over the scored tokens
    bool greedy = true;         // each scored token was the most likely one
};

struct Metric {
    std::string name;
    double value = 0, error = 0;  // error: standard error; NaN for a single example
};

inline Metric mean_metric(const std::string& name, const std::vector<double>& x) {
    const double n = (double)x.size(), mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
    double squares = 0;
    for (double value : x) squares += (value - mean) * (value - mean);
    return {name, mean, std::sqrt(squares / (n - 1) / n)};
}

// scores: one per choice of these examples.
inline std::vector<Metric> task_metrics(const Task& task, const std::vector<int64_t>& examples,
                                        const std::vector<Score>& scores) {
    std::vector<double> correct, correct_characters, correct_bytes, log_likelihood;
    size_t first = 0;
    for (int64_t i : examples) {
        const TaskExample& e = task.examples[i];
        // Whether the gold choice has the largest log p / size.
        const auto gold_is_best = [&](auto size) {
            int best = 0;
            double highest = 0;
            for (int k = 0; k < e.n_choices(); k++) {
                const double s = scores[first + k].log_likelihood;
                if (!std::isfinite(s)) fail("the model gives %s a log-likelihood of %g", task.where(e).c_str(), s);
                const double normalised = s / (double)size(e.counted(k));
                if (k == 0 || normalised > highest) {
                    best = k;
                    highest = normalised;
                }
            }
            return best == e.gold ? 1.0 : 0.0;
        };
        const double plain = gold_is_best([](std::string_view) { return 1; });
        if (task.kind == TaskKind::choices) {
            correct_characters.push_back(gold_is_best(count_characters));
            correct_bytes.push_back(gold_is_best([](std::string_view s) { return s.size(); }));
        }
        correct.push_back(task.kind == TaskKind::last_word ? (double)scores[first].greedy : plain);
        log_likelihood.push_back(scores[first].log_likelihood);
        first += (size_t)e.n_choices();
    }
    CHECK(first == scores.size(), "%zu scores for %zu choices", scores.size(), first);
    std::vector<Metric> metrics = {mean_metric("acc", correct)};
    if (task.kind == TaskKind::choices) {
        metrics.push_back(mean_metric("acc_norm", correct_characters));
        metrics.push_back(mean_metric("acc_bytes", correct_bytes));
    }
    if (task.kind == TaskKind::last_word) {
        const Metric mean = mean_metric("", log_likelihood);
        metrics.push_back({"perplexity", std::exp(-mean.value), std::exp(-mean.value) * mean.error});
    }
    return metrics;
}
