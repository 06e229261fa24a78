// Tasks: questions with known answers, scored like EleutherAI's lm-evaluation-harness, so that numbers can be compared. A task
// is a .jsonl file, one example per line, all of one kind; other keys are ignored (dev/data makes such files):
//   {"context": str, "choices": [str, ...], "gold": int}   multiple choice: which choice continues the context?
//   {"contexts": [str, ...], "target": str, "gold": int}   the choice is inside the context (WinoGrande): after which
//                                                          context is the target most likely?
//   {"context": str, "target": str}                        last word (LAMBADA): would the model generate the target?
//   {"context": str, "references": [str, ...]}             generative: the model's output is compared (text_metrics.h)
// Choices and targets are scored as given, usually with a leading space; gold counts from 0, and is a list if several choices
// are right. A line's "target_delimiter" is the harness's setting of that name, inserted before its choices or target.
//
//   log p(continuation | context) = sum over the continuation's tokens of log p(token | all tokens before it)
//   acc          fraction of examples in which a gold choice has the largest log p; last word: in which every token of the
//                target is the most likely
//   acc_norm     like acc, by log p / characters of the choice without its delimiter: "target_delimiter", or else the
//                leading space
//   acc_bytes    like acc, by log p / bytes of the choice
//   perplexity   exp(-mean log p) over examples, last word only
// "group" in a line: acc_GROUP is the group's acc, acc_gap the largest of them minus the smallest. "share_of": "X" in every
// line means that gold choices are not right but X: the fraction is called X and is the only metric.
// Standard errors: sqrt(sample variance / n) for a mean; for the perplexity, exp(-mean) times the mean's, to first order (the
// harness resamples instead); for BLEU over all texts together, the jackknife's. Ties go to the first choice.
//
// Generation is greedy and ends before any of "until" (default: the end of the line), at the model's end-of-text token, or
// after "max_new_tokens" (default: 64). "metrics" (default: exact_match, f1) and "stemmer" (ROUGE's, default: false) must be
// the same in every line. A solved example is the context, a space unless white space or "target_delimiter" is there, and the
// first reference.
//
// Few-shot: K solved examples and the question, joined by blank lines. The choice of examples is a function of only seed and
// example. Errors in a task file name FILE:LINE.
//
// "core": {"baseline": b, "num_fewshot": K} in every line of the first three kinds makes it a task of DCLM's CORE (Li et al.,
// arXiv:2406.11794), scored as in nanochat (karpathy/nanochat, core_eval.py), so that the number is comparable with published
// ones. The prompt is the token that starts a document and the text's tokens, without a template; question number i has the
// solved examples random.Random(seed + i).sample(..., K) of Python. Whole prompts are tokenized, and the scored tokens are
//   choices      all after the longest common start of the prompts
//   contexts     the longest common end of the prompts
//   last word    all after the tokens of the prompt without its target and white space at its end
// and the only metric is
//   acc          fraction of examples in which a gold choice has the largest mean log p per token; last word: as above
//   centred      (acc - b) / (1 - b); CORE is its mean over 22 tasks
// If another choice starts with all tokens of a choice, none of its tokens would remain: scoring then starts one earlier.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/math.h"
#include "../base/rng.h"
#include "../base/text.h"
#include "../base/unicode.h"
#include "../text/text_format.h"
#include "python_random.h"
#include "text_metrics.h"
#include "../tokenizer/tokenizer.h"

enum class TaskKind { choices, contexts, last_word, written };

// A task of CORE.
struct CoreSettings {
    double baseline = 0;  // accuracy that counts as 0
    int num_fewshot = 0;

    bool operator==(const CoreSettings& other) const { return baseline == other.baseline && num_fewshot == other.num_fewshot; }
};

// Properties shared by all examples of a task.
struct TaskForm {
    TaskKind kind = TaskKind::choices;
    std::string share_of{};              // the property of gold choices, if they are not right answers
    std::vector<std::string> metrics{};  // for generative tasks
    bool stemmer = false;
    std::optional<CoreSettings> core{};

    bool operator==(const TaskForm& other) const {
        return std::tie(kind, share_of, metrics, stemmer, core) ==
               std::tie(other.kind, other.share_of, other.metrics, other.stemmer, other.core);
    }
};

// One of contexts and continuations has an entry per choice, the other a single one; for a generative task, continuations are
// the references.
struct TaskExample {
    std::vector<std::string> contexts, continuations;
    std::optional<size_t> delimiter;  // leading bytes of each continuation excluded from its length
    std::vector<int> golds = {0};
    std::string group{};
    std::vector<std::string> stops{};  // for generative tasks
    int max_new_tokens = 0;
    std::string joint{};  // between context and continuation, if they are not adjacent
    int64_t line = 0;

    int n_choices() const { return (int)std::max(contexts.size(), continuations.size()); }
    const std::string& context(int k) const { return contexts[contexts.size() > 1 ? k : 0]; }
    const std::string& continuation(int k) const { return continuations[continuations.size() > 1 ? k : 0]; }
    std::string_view counted(int k) const {
        const std::string_view text = continuation(k);
        return text.substr(delimiter.value_or(!text.empty() && text[0] == ' '));
    }
    bool is_gold(int k) const { return std::find(golds.begin(), golds.end(), k) != golds.end(); }
    double chance() const { return (double)golds.size() / n_choices(); }  // of a correct guess
    std::string solved() const { return context(golds[0]) + joint + continuation(golds[0]); }
};

struct Task : TaskForm {
    std::string file;
    std::vector<TaskExample> examples;

    std::string where(const TaskExample& e) const { return file + ":" + std::to_string(e.line); }
    int64_t size() const { return (int64_t)examples.size(); }
};

inline const std::vector<std::string> written_metrics = {"exact_match", "f1",     "bleu",     "rouge1",
                                                         "rouge2",      "rougeL", "rougeLsum"};

// ---- reading ---------------------------------------------------------------------------------------------------------------
// Reads the values of one line.
class TaskLine {
public:
    TaskLine(const nlohmann::json& j, const char* where) : j_(j), where_(where) {}

    // Sets `form`.
    TaskExample example(TaskForm& form) const {
        const bool context = has("context"), contexts = has("contexts"), choices = has("choices"), target = has("target"),
                   references = has("references");
        if (context == contexts || choices + target + references != 1 || (contexts && !target))
            fail(
                "%s: the keys must be context, choices, gold; or contexts, target, gold; or context, target; or context, "
                "references",
                where_);
        form.kind = choices      ? TaskKind::choices
                    : contexts   ? TaskKind::contexts
                    : references ? TaskKind::written
                                 : TaskKind::last_word;
        TaskExample e;
        e.contexts = contexts ? texts("contexts", 2, true) : std::vector{text(j_["context"], "'context'", true)};
        if (has("core")) form.core = core_settings(references);
        if (references) {
            read_written(e, form);
            return e;
        }
        e.continuations = choices ? texts("choices", 2, false) : std::vector{text(j_["target"], "'target'", false)};
        if (has("target_delimiter")) {
            const std::string delimiter = text(j_["target_delimiter"], "'target_delimiter'", true);
            for (std::string& continuation : e.continuations) continuation = delimiter + continuation;
            e.delimiter = delimiter.size();
        }
        if (has("group")) e.group = text(j_["group"], "'group'", false);
        if (form.kind == TaskKind::last_word) return e;
        if (has("share_of")) form.share_of = text(j_["share_of"], "'share_of'", false);
        e.golds = golds(e.n_choices());
        return e;
    }

private:
    bool has(const char* key) const { return j_.contains(key); }

    std::string text(const nlohmann::json& value, const std::string& name, bool may_be_empty) const {
        if (!value.is_string()) fail("%s: %s is not a string", where_, name.c_str());
        const std::string s = value.get<std::string>();
        if (!may_be_empty && (s.empty() || (s == " " && !has("target_delimiter"))))
            fail("%s: %s is empty: there is nothing to score", where_, name.c_str());
        return s;
    }
    std::vector<std::string> texts(const char* key, size_t least, bool may_be_empty) const {
        const auto& list = j_[key];
        if (!list.is_array() || list.size() < least)
            fail("%s: '%s' is not a list of %s strings", where_, key, least == 2 ? "two or more" : "one or more");
        std::vector<std::string> found;
        for (size_t i = 0; i < list.size(); i++) found.push_back(text(list[i], format("%s[%zu]", key, i), may_be_empty));
        return found;
    }

    std::vector<int> golds(int n_choices) const {
        if (!has("gold")) fail("%s: there is no key 'gold', the index of the right choice", where_);
        const nlohmann::json list = j_["gold"].is_array() ? j_["gold"] : nlohmann::json::array({j_["gold"]});
        if (list.empty()) fail("%s: 'gold' is an empty list", where_);
        std::vector<int> found;
        for (const auto& gold : list) {
            if (!gold.is_number_integer() || gold < 0 || gold >= n_choices)
                fail("%s: 'gold' is %s; it must be a whole number from 0 to %d", where_, gold.dump().c_str(), n_choices - 1);
            if (std::find(found.begin(), found.end(), gold.get<int>()) != found.end())
                fail("%s: 'gold' has %d twice", where_, gold.get<int>());
            found.push_back(gold.get<int>());
        }
        return found;
    }

    CoreSettings core_settings(bool generative) const {
        const auto& core = j_["core"];
        if (generative || has("share_of") || has("group"))
            fail("%s: 'core' belongs to choices, contexts or a target; references, share_of and group are not in CORE", where_);
        CoreSettings settings;
        const auto number = [&](const char* key, double most, bool whole) {
            const nlohmann::json value = core.is_object() ? core.value(key, nlohmann::json()) : nlohmann::json();
            if (!(whole ? value.is_number_integer() : value.is_number()) || value < 0 || value > most)
                fail("%s: 'core' needs '%s', a %snumber from 0 to %g", where_, key, whole ? "whole " : "", most);
            return value.get<double>();
        };
        settings.baseline = number("baseline", 0.999, false);
        settings.num_fewshot = (int)number("num_fewshot", 1000, true);
        return settings;
    }

    void read_written(TaskExample& e, TaskForm& form) const {
        e.continuations = texts("references", 1, true);
        e.stops = has("until") ? texts("until", 1, true) : std::vector<std::string>{"\n"};
        if (std::count(e.stops.begin(), e.stops.end(), "")) fail("%s: 'until' has an empty string", where_);
        const std::string& context = e.contexts[0];
        e.joint = has("target_delimiter") ? text(j_["target_delimiter"], "'target_delimiter'", true)
                  : without_trailing_space(context).size() < context.size() ? ""
                                                                            : " ";
        const nlohmann::json most = j_.value("max_new_tokens", nlohmann::json(64));
        if (!most.is_number_integer() || most < 1 || most > 1000000)
            fail("%s: 'max_new_tokens' is %s; it must be a whole number from 1 to 1000000", where_, most.dump().c_str());
        e.max_new_tokens = most.get<int>();
        form.metrics = has("metrics") ? texts("metrics", 1, false) : std::vector<std::string>{"exact_match", "f1"};
        for (const std::string& name : form.metrics)
            if (!std::count(written_metrics.begin(), written_metrics.end(), name))
                fail("%s: '%s' is not a metric for generated answers; these are %s", where_, name.c_str(),
                     joined(written_metrics).c_str());
        for (const char* name : {"exact_match", "f1"})
            if (std::count(form.metrics.begin(), form.metrics.end(), name)) need_unicode(name);
        const nlohmann::json stemmer = j_.value("stemmer", nlohmann::json(false));
        if (!stemmer.is_boolean()) fail("%s: 'stemmer' is not true or false", where_);
        form.stemmer = stemmer;
    }

    const nlohmann::json& j_;
    const char* where_;
};

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
        TaskForm form;
        task.examples.push_back(TaskLine(j, where.c_str()).example(form));
        task.examples.back().line = line;
        if (task.size() == 1) static_cast<TaskForm&>(task) = form;
        if (!(form == task))
            fail("%s differs in kind from %s; HINT: one kind per file, with the same metrics, stemmer, share_of and core",
                 where.c_str(), task.where(task.examples[0]).c_str());
    }
    if (task.examples.empty()) fail("%s holds no examples", file.c_str());
    return task;
}

// A task of CORE of at most n questions; 0: all. Its solved examples are then drawn from these, as in nanochat.
inline Task limited(Task task, int64_t n) {
    if (task.core && n > 0 && n < task.size()) task.examples.resize((size_t)n);
    return task;
}

// ---- prompts ---------------------------------------------------------------------------------------------------------------
// K different solved examples of the pool, each followed by a blank line. `number` is the index of the question in its task;
// `same`: the pool is that task, and excludes the question itself.
inline std::string few_shot_prefix(const Task& pool, int K, uint64_t seed, int64_t number, bool same) {
    if (K > pool.size() - same)
        fail("%d examples before each question were requested, but %s has %lld%s", K, pool.file.c_str(),
             (long long)(pool.size() - same), same ? " besides the question" : "");
    std::vector<int64_t> drawn;
    if (pool.core && K > 0) {
        drawn = PythonRandom(seed + (uint64_t)number).sample(pool.size() - same, K);
        for (int64_t& i : drawn) i += same && i >= number;  // of all examples but the question
    }
    for (uint64_t draw = 0; (int)drawn.size() < K; draw++) {
        const double uniform = uniform_at(seed, RngPurpose::sampling, (uint32_t)number, draw);
        const int64_t i = (int64_t)(uniform * (double)pool.size());
        if ((same && i == number) || std::find(drawn.begin(), drawn.end(), i) != drawn.end()) continue;
        drawn.push_back(i);
    }
    std::string prefix;
    for (const int64_t i : drawn) prefix += pool.examples[i].solved() + "\n\n";
    return prefix;
}

// A sequence whose last n_scored tokens are scored.
struct Request {
    std::vector<int> tokens;
    int n_scored = 0;
    bool truncated = false;                                  // the start of the context was dropped
    std::string problem;                                     // the reason why nothing can be scored
    int n_inputs() const { return (int)tokens.size() - 1; }  // the last token is only predicted
};

// A text with special tokens and the tokenizer's template, whose first token is not doubled.
inline std::vector<int> encode_context(const Tokenizer& tokenizer, const std::string& text) {
    const int first = tokenizer.bos_id();
    const std::string first_text = first < 0 ? "" : tokenizer.token_bytes(first);
    if (first < 0 || text.compare(0, first_text.size(), first_text) != 0) return tokenizer.encode_prompt(text);
    std::vector<int> tokens;
    tokenizer.encode_append(text, tokens, true);
    return tokens;
}
// Limits a request to `most` tokens by dropping its start.
inline void cut_beginning(Request& r, int most) {
    if ((int)r.tokens.size() <= most) return;
    r.tokens.erase(r.tokens.begin(), r.tokens.end() - most);
    r.truncated = true;
}
const char* const no_first_token = "the context is empty and the tokenizer has no start token";

// Context and continuation as tokens, with special tokens and the tokenizer's template. White space at the end of the context
// moves to the continuation, since tokenizers attach it to the next word; the continuation's tokens are the whole text's minus
// the number for only the context. An empty context becomes the token that starts a document. A sequence longer than the
// model's T loses its start.
inline Request make_request(const Tokenizer& tokenizer, const std::string& context, const std::string& continuation, int T) {
    const int first = tokenizer.bos_id();
    Request r;
    size_t n_context = 0;
    if (context.empty()) {
        tokenizer.encode_append(continuation, r.tokens, true);
        n_context = !r.tokens.empty() && r.tokens[0] == first;
    } else {
        n_context = encode_context(tokenizer, std::string(without_trailing_space(context))).size();
        r.tokens = encode_context(tokenizer, context + continuation);
    }
    if (n_context == 0) {
        r.tokens.insert(r.tokens.begin(), first);
        n_context = 1;
    }
    r.n_scored = (int)r.tokens.size() - (int)n_context;
    if (r.tokens[0] < 0) r.problem = no_first_token;
    else if (r.n_scored <= 0) r.problem = "its continuation merges into the context's last token; HINT: start it with a space";
    else if (r.n_scored > T) r.problem = format("its continuation has %d tokens; the model's maximum is %d", r.n_scored, T);
    if (r.problem.empty()) cut_beginning(r, T + 1);
    return r;
}

// The requests of an example of CORE after solved ones.
inline std::vector<Request> make_core_requests(const Tokenizer& tokenizer, TaskKind kind, const TaskExample& e,
                                               const std::string& prefix, int T) {
    const auto tokens_of = [&](std::string_view text) {
        std::vector<int> tokens;
        if (tokenizer.bos_id() >= 0) tokens.push_back(tokenizer.bos_id());
        tokenizer.encode_append(text, tokens);
        return tokens;
    };
    std::vector<Request> requests((size_t)e.n_choices());
    std::vector<std::vector<int>> texts;
    for (int k = 0; k < e.n_choices(); k++) {
        requests[k].tokens = tokens_of(prefix + e.context(k) + e.continuation(k));
        texts.push_back(requests[k].tokens);
    }
    if (kind == TaskKind::last_word) {
        const std::string context = prefix + e.context(0) + e.continuation(0).substr(0, e.delimiter.value_or(0));
        texts.push_back(tokens_of(without_trailing_space(context)));
    }
    size_t shortest = texts[0].size(), shared = 0;
    for (const auto& text : texts) shortest = std::min(shortest, text.size());
    const auto all_equal = [&](size_t i) {  // the i-th token from the start, or from the end
        return std::all_of(texts.begin(), texts.end(), [&](const std::vector<int>& text) {
            return kind == TaskKind::contexts ? text.rbegin()[i] == texts[0].rbegin()[i] : text[i] == texts[0][i];
        });
    };
    while (shared < shortest && all_equal(shared)) shared++;
    const bool merges = kind == TaskKind::last_word && (shared < texts[1].size() || shared == texts[0].size());
    if (kind != TaskKind::last_word) shared = std::min(shared, shortest - 1);
    for (Request& r : requests) {
        r.n_scored = (int)(kind == TaskKind::contexts ? shared : r.tokens.size() - shared);
        if (merges || r.n_scored == 0) r.problem = "its continuation merges into the context's last token";
        else if (r.n_scored == (int)r.tokens.size()) r.problem = no_first_token;
        else if (r.n_scored >= T)
            r.problem = format("%d of its tokens are scored; the model's maximum is %d", r.n_scored, T - 1);
        if (r.problem.empty()) cut_beginning(r, T);
    }
    return requests;
}

// The prompt of a generative task, unchanged, in sequences of T tokens including the answer.
inline Request make_prompt(const Tokenizer& tokenizer, const std::string& context, int max_new_tokens, int T) {
    Request r;
    r.tokens = encode_context(tokenizer, context);
    if (r.tokens.empty()) r.tokens = {tokenizer.bos_id()};
    if (r.tokens[0] < 0) r.problem = no_first_token;
    else if (max_new_tokens >= T)
        r.problem = format("its answer may have %d tokens, the model's sequences hold %d with the question", max_new_tokens, T);
    else cut_beginning(r, T - max_new_tokens);
    return r;
}

// All choices of the examples that can be scored, in order, or the prompts of generative examples.
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
        if (task.core) choices = make_core_requests(tokenizer, task.kind, e, prefix, T);
        else if (task.kind == TaskKind::written) choices = {make_prompt(tokenizer, prefix + e.context(0), e.max_new_tokens, T)};
        else
            for (int k = 0; k < e.n_choices() && (k == 0 || choices.back().problem.empty()); k++)
                choices.push_back(make_request(tokenizer, prefix + e.context(k), e.continuation(k), T));
        std::string problem;
        for (const Request& r : choices)
            if (problem.empty()) problem = r.problem;
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

// Splits a text into sequences of T predicted tokens, each predicted from the earlier ones in its sequence; the last may be
// shorter.
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
    int tokens = 0;             // that were scored
};

struct Metric {
    std::string name;
    double value = 0, error = 0;     // error: standard error; NaN for a single example
    std::vector<double> of_draws{};  // the values of several draws of solved examples, if there are several
};

inline Metric mean_metric(const std::string& name, const std::vector<double>& x) {
    const auto [mean, error] = mean_with_error(x);
    return {name, mean, error};
}

// The fraction in each group of examples, and the gap between them, if there are several.
inline void add_groups(const Task& task, const std::vector<int64_t>& examples, const std::vector<double>& correct,
                       const std::string& share, std::vector<Metric>& metrics) {
    std::map<std::string, std::vector<double>> groups;
    for (size_t i = 0; i < examples.size(); i++)
        if (const std::string& group = task.examples[examples[i]].group; !group.empty()) groups[group].push_back(correct[i]);
    if (groups.size() < 2) return;
    std::vector<Metric> of_groups;
    for (const auto& [group, values] : groups) of_groups.push_back(mean_metric(share + "_" + group, values));
    const auto [low, high] = std::minmax_element(of_groups.begin(), of_groups.end(),
                                                 [](const Metric& a, const Metric& b) { return a.value < b.value; });
    const Metric gap = {share + "_gap", high->value - low->value,
                        std::sqrt(high->error * high->error + low->error * low->error)};
    metrics.insert(metrics.end(), of_groups.begin(), of_groups.end());
    metrics.push_back(gap);
}

// The choice with the largest log p / size(k); ties go to the first.
template <class F>
int best_choice(const Task& task, const TaskExample& e, const Score* scores, F size) {
    int best = 0;
    double highest = 0;
    for (int k = 0; k < e.n_choices(); k++) {
        const double s = scores[k].log_likelihood;
        if (!std::isfinite(s)) fail("the model gives %s a log-likelihood of %g", task.where(e).c_str(), s);
        const double normalized = s / (double)size(k);
        if (k == 0 || normalized > highest) {
            best = k;
            highest = normalized;
        }
    }
    return best;
}
// The choice that `acc` compares.
inline int chosen(const Task& task, const TaskExample& e, const Score* scores) {
    return best_choice(task, e, scores, [&](int k) { return task.core ? scores[k].tokens : 1; });
}

// scores: one per choice of these examples.
inline std::vector<Metric> task_metrics(const Task& task, const std::vector<int64_t>& examples,
                                        const std::vector<Score>& scores) {
    std::vector<double> correct, correct_characters, correct_bytes, log_likelihood;
    size_t first = 0;
    for (int64_t i : examples) {
        const TaskExample& e = task.examples[i];
        const Score* const own = scores.data() + first;
        const auto gold_is_best = [&](auto size) {
            return (double)e.is_gold(best_choice(task, e, own, [&](int k) { return size(e.counted(k)); }));
        };
        if (task.kind == TaskKind::choices) {
            correct_characters.push_back(gold_is_best(count_characters));
            correct_bytes.push_back(gold_is_best([](std::string_view s) { return s.size(); }));
        }
        const bool best = e.is_gold(chosen(task, e, own));
        correct.push_back(task.kind == TaskKind::last_word ? own->greedy : best);
        log_likelihood.push_back(own->log_likelihood);
        first += (size_t)e.n_choices();
    }
    CHECK(first == scores.size(), "%zu scores for %zu choices", scores.size(), first);
    const std::string share = task.share_of.empty() ? "acc" : task.share_of;
    std::vector<Metric> metrics = {mean_metric(share, correct)};
    add_groups(task, examples, correct, share, metrics);
    if (task.core) return metrics;
    if (task.kind == TaskKind::choices && task.share_of.empty()) {
        metrics.push_back(mean_metric("acc_norm", correct_characters));
        metrics.push_back(mean_metric("acc_bytes", correct_bytes));
    }
    if (task.kind == TaskKind::last_word) {
        const Metric mean = mean_metric("", log_likelihood);
        metrics.push_back({"perplexity", std::exp(-mean.value), std::exp(-mean.value) * mean.error});
    }
    return metrics;
}

// Over all texts together; the standard error is the jackknife's, from the values without one text each.
inline Metric bleu_metric(const std::vector<BleuCounts>& counts) {
    BleuCounts all;
    for (const BleuCounts& c : counts) all += c;
    std::vector<double> without;
    for (const BleuCounts& c : counts) without.push_back(bleu(all - c));
    return {"bleu", bleu(all), mean_metric("", without).error * (double)(counts.size() - 1)};
}

// answers: the model's output for each of these examples.
inline std::vector<Metric> answer_metrics(const Task& task, const std::vector<int64_t>& examples,
                                          const std::vector<std::string>& answers) {
    CHECK(answers.size() == examples.size(), "%zu answers to %zu questions", answers.size(), examples.size());
    const auto mean = [&](const std::string& name, auto measure) {
        std::vector<double> values;
        for (size_t i = 0; i < answers.size(); i++)
            values.push_back(measure(answers[i], task.examples[examples[i]].continuations));
        return mean_metric(name, values);
    };
    using Texts = std::vector<std::string>;
    std::vector<Metric> metrics;
    for (const std::string& name : task.metrics) {
        if (name == "bleu") {
            std::vector<BleuCounts> counts;
            for (size_t i = 0; i < answers.size(); i++)
                counts.push_back(bleu_counts(answers[i], task.examples[examples[i]].continuations));
            metrics.push_back(bleu_metric(counts));
        } else if (name == "exact_match") metrics.push_back(mean(name, exact_match));
        else if (name == "f1") metrics.push_back(mean(name, word_f1));
        else
            metrics.push_back(mean(name, [&](const std::string& text, const Texts& references) {
                return name == "rougeL"      ? rouge_l(text, references, task.stemmer)
                       : name == "rougeLsum" ? rouge_lsum(text, references, task.stemmer)
                                             : rouge_n(text, references, name == "rouge1" ? 1 : 2, task.stemmer);
            }));
    }
    return metrics;
}

// Means over draws of solved examples, of values and standard errors.
inline std::vector<Metric> mean_of_draws(const std::vector<std::vector<Metric>>& draws) {
    std::vector<Metric> mean = draws[0];
    if (draws.size() == 1) return mean;
    for (size_t i = 0; i < mean.size(); i++) {
        std::vector<double> errors;
        for (const auto& metrics : draws) {
            mean[i].of_draws.push_back(metrics.at(i).value);
            errors.push_back(metrics[i].error);
        }
        mean[i].value = mean_with_error(mean[i].of_draws).mean;
        mean[i].error = mean_with_error(errors).mean;
    }
    return mean;
}

// ---- several tasks ---------------------------------------------------------------------------------------------------------
// The accuracy of random guesses: a task of CORE has its own; else 0 for a last word and exact matches of generative tasks.
inline double chance_of(const Task& task, const std::vector<int64_t>& examples) {
    if (task.core) return task.core->baseline;
    double chance = 0;
    if (task.kind == TaskKind::choices || task.kind == TaskKind::contexts)
        for (int64_t i : examples) chance += task.examples[i].chance() / (double)examples.size();
    return chance;
}
// Accuracy above chance, as averaged over tasks in DCLM's CORE (Li et al., arXiv:2406.11794): (acc - chance) / (1 - chance), 0
// for guesses and 1 for all right. Nothing for tasks without an accuracy.
inline std::optional<double> centred_accuracy(const Task& task, const std::vector<int64_t>& examples,
                                              const std::vector<Metric>& metrics) {
    const double chance = chance_of(task, examples);
    for (const Metric& metric : metrics)
        if (metric.name == (task.kind == TaskKind::written ? "exact_match" : "acc") && chance < 1)
            return (metric.value - chance) / (1 - chance);
    return {};
}
