// Evaluation of a model (train_gpt eval, and validation): passes over scoring requests, and tables of the results. The function
// that runs the model is a parameter; tasks, requests and metrics are in tasks.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/threads.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/math.h"
#include "../base/clock.h"
#include "../base/progress.h"
#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../data/dataloader.h"
#include "../text/document_reader.h"
#include "../data/tasks.h"
#include "../tokenizer/tokenizer.h"
#include "../model/arena.h"
#include "../model/model_config.h"
#include "../ops.h"
#include "../parallel/ranks.h"
#include "../options/options.h"

// The name and loss of each dataset that has samples; empty if there is only one dataset.
inline std::vector<std::pair<std::string, double>> set_losses(const DataLoader& data, const std::vector<LossSums>& sums) {
    std::vector<std::pair<std::string, double>> losses;
    const std::vector<std::string> names = data.set_names();
    for (size_t j = 0; j < sums.size() && sums.size() > 1; j++)
        if (sums[j].n > 0) losses.emplace_back(names[j], sums[j].loss());
    return losses;
}

// ---- scores of requests ----------------------------------------------------------------------------------------------------
// A row of a pass whose predicted token is scored.
struct ScoredRow {
    size_t row, request;
    int target;
};
// B sequences of T tokens, each of one request.
struct ScoringPass {
    Batch batch;  // without targets
    std::vector<ScoredRow> rows;
    int64_t inputs = 0;  // tokens that are not padding

    // This rank's rows.
    ScoringPass cut(const Axis& cp) const {
        ScoringPass mine;
        mine.batch = batch.cut(cp);
        mine.inputs = inputs;
        const int T = mine.batch.T;
        for (const ScoredRow& r : rows) {
            const int here = mine.batch.part.row_here((int)(r.row % (size_t)batch.T), T);
            if (here >= 0) mine.rows.push_back({r.row / (size_t)batch.T * (size_t)T + (size_t)here, r.request, r.target});
        }
        return mine;
    }
};

// The requests order[first], order[first + 1], ..., as many as fit in B x T tokens, each after the model's virtual tokens.
// Shorter ones are padded at the right, where causal attention never looks; the length is rounded up, so that there are few
// different shapes of matrix products.
inline ScoringPass make_scoring_pass(const std::vector<Request>& requests, const std::vector<size_t>& order, size_t first,
                                     int B, int T, int virtual_tokens, int multiple) {
    ScoringPass pass;
    Batch& batch = pass.batch;
    batch.T = std::min(T - virtual_tokens, round_up(requests[order[first]].n_inputs(), 16));
    const int row_length = round_up(virtual_tokens + batch.T, multiple);
    batch.T = row_length - virtual_tokens;
    batch.B = (int)std::min<size_t>((size_t)(B * T / row_length), order.size() - first);
    batch.tokens.assign((size_t)batch.B * batch.T, 0);
    for (size_t i = 0; i < batch.tokens.size(); i++) batch.positions.push_back((int)i % batch.T);
    for (int b = 0; b < batch.B; b++) {
        const size_t request = order[first + (size_t)b], start = (size_t)b * batch.T;
        const Request& r = requests[request];
        const int n = r.n_inputs();
        std::copy_n(r.tokens.begin(), n, batch.tokens.begin() + (int64_t)start);
        const size_t first_row = (size_t)b * row_length + virtual_tokens;
        for (int t = n - r.n_scored; t < n; t++) pass.rows.push_back({first_row + (size_t)t, request, r.tokens[(size_t)t + 1]});
        pass.inputs += n;
    }
    return pass;
}

// Log-likelihoods of continuations, longest sequences first, as many per pass as fit in B x T tokens. Requests are divided
// among copies of the model; all ranks get all scores. run(pass, scores) computes a pass and, on ranks with the head, adds the
// scores of its rows; with context parallelism a rank has some of them. All ranks call stop before each pass, equally often; if
// it returns true, there are no scores.
template <class Run, class Stop>
std::optional<std::vector<Score>> score_requests(const Ranks& ranks, int B, int T, int virtual_tokens,
                                                 const std::vector<Request>& requests, Progress* progress, Run run, Stop stop) {
    const Mesh& mesh = ranks.mesh;
    const int cp = mesh.cp.size, tp = ranks.sequence_parallel ? mesh.tp.size : 1;
    const Axis& copies = cp > 1 ? mesh.samples : mesh.edp;
    const size_t replicas = (size_t)copies.size;
    std::vector<size_t> by_length(requests.size()), order;
    std::iota(by_length.begin(), by_length.end(), 0);
    std::stable_sort(by_length.begin(), by_length.end(),
                     [&](size_t a, size_t b) { return requests[a].n_inputs() > requests[b].n_inputs(); });
    for (size_t i = (size_t)copies.rank; i < by_length.size(); i += replicas) order.push_back(by_length[i]);
    const int multiple = cp > 1 ? cp * std::lcm(2, tp) : tp;
    std::vector<ScoringPass> passes;
    for (size_t first = 0; first < order.size(); first += (size_t)passes.back().batch.B)
        passes.push_back(make_scoring_pass(requests, order, first, B, T, virtual_tokens, multiple));
    std::vector<size_t> of_ranks = {passes.size()};
    if (const size_t mine = passes.size(); mesh.world.size > 1) {
        of_ranks.resize((size_t)mesh.world.size);
        ranks.world->all_gather(&mine, sizeof mine, of_ranks.data());
    }
    std::vector<Score> scores(requests.size());
    int64_t done = 0;
    for (size_t i = 0; i < *std::max_element(of_ranks.begin(), of_ranks.end()); i++) {
        if (stop()) return {};
        if (i >= passes.size()) continue;
        run(passes[i], scores);
        done += passes[i].inputs;
        if (progress) progress->update(done * copies.size);
    }
    if (mesh.world.size == 1) return scores;
    // Each request's score is known to the last stage of the replica that computed it, or is the sum of its cp ranks'.
    std::vector<Score> all(scores.size() * (size_t)mesh.world.size);
    ranks.world->all_gather(scores.data(), scores.size() * sizeof(Score), all.data());
    for (size_t i = 0; i < by_length.size(); i++) {
        Score& sum = scores[by_length[i]] = {};
        for (int part = 0; part < cp; part++) {
            const int dp_rank = (int)(i % replicas) * (mesh.dp.size / copies.size) + part;
            const Score& s = all[(size_t)mesh.rank_of(mesh.pp.size - 1, dp_rank, 0) * scores.size() + by_length[i]];
            sum.log_likelihood += s.log_likelihood;
            sum.tokens += s.tokens;
            sum.greedy = sum.greedy && s.greedy;
        }
    }
    return scores;
}

// The most likely token of each of n rows of logits, over the vocabulary's shards; ties go to the first. statistics: scratch.
inline std::vector<int> most_likely_tokens(be::Ctx& ctx, Ranks& ranks, const LocalSizes& local, floatX* logits /*(n, Vpl)*/,
                                           real* statistics /*(tp, n, 2)*/, size_t n) {
    const Axis& tp = ranks.mesh.tp;
    HostSide<floatX> rows(ctx, logits, n * (size_t)local.Vpl);
    rows.download();
    std::vector<real> best((size_t)tp.size * n * 2);  // (tp, n, 2) largest logit and its token
    real* mine = best.data() + (size_t)tp.rank * n * 2;
    for (size_t i = 0; i < n; i++) {
        const floatX* row = rows.data() + i * (size_t)local.Vpl;
        const auto token = local.Vl ? std::max_element(row, row + local.Vl) - row : 0;
        mine[2 * i] = local.Vl ? (real)row[token] : (real)-INFINITY;
        mine[2 * i + 1] = (real)(local.v0 + token);
    }
    if (tp.size > 1) {
        real* place = statistics + (size_t)tp.rank * n * 2;
        be::upload(ctx, place, mine, n * 2 * sizeof(real));
        be::all_gather(ctx, ranks.tp, statistics, place, n * 2);
        be::download(ctx, best.data(), statistics, best.size() * sizeof(real));
    }
    std::vector<int> tokens(n);
    for (size_t i = 0; i < n; i++) {
        const real* found = best.data() + 2 * i;
        for (int r = 1; r < tp.size; r++)
            if (const real* other = best.data() + ((size_t)r * n + i) * 2; other[0] > found[0]) found = other;
        tokens[i] = (int)found[1];
    }
    return tokens;
}

// ---- tables ---------------------------------------------------------------------------------------------------------
// A note in parentheses, with the spread of a number over draws of solved examples if there are several. Both may be missing.
inline std::string with_spread(std::string note, const std::vector<double>& of_draws, int digits) {
    if (of_draws.size() > 1) {
        const double deviation = mean_with_error(of_draws).error * std::sqrt((double)of_draws.size());
        note += format("%sstd of %zu draws %.*f", note.empty() ? "" : "; ", of_draws.size(), digits, deviation);
    }
    return note.empty() ? "" : "(" + note + ")";
}

// metrics: means over draws; centred: of each draw, for a task of CORE.
inline Table task_table(const Task& task, const TaskRequests& all, const std::vector<Metric>& metrics,
                        const std::vector<double>& centred, int num_fewshot) {
    const std::vector<Request>& requests = all.requests;
    const int64_t n = (int64_t)all.examples.size();
    const double chance = chance_of(task, all.examples);
    const auto truncated = std::count_if(requests.begin(), requests.end(), [](const Request& r) { return r.truncated; });
    Table table;
    table.section(task.file);
    table.row("examples", with_commas(n) + (num_fewshot ? format(", each after %d solved ones", num_fewshot) : ""));
    table.exact(n);
    if (all.left_out)
        table.row("left out",
                  format("%s that cannot be scored; the first, %s", with_commas(all.left_out).c_str(), all.problem.c_str()));
    if (truncated)
        table.row("truncated", format("%s of %s prompts were truncated at the start", with_commas(truncated).c_str(),
                                      with_commas((int64_t)requests.size()).c_str()));
    for (const Metric& metric : metrics) {
        const bool share = metric.name != "perplexity" && metric.name != "bleu";
        const int digits = share ? 4 : 2;
        const auto text = [&](double x) { return format("%.*f", digits, x); };
        const std::string error = std::isfinite(metric.error) ? (utf8_locale() ? " ± " : " +- ") + text(metric.error) : "";
        const bool gap = metric.name.size() > 4 && metric.name.compare(metric.name.size() - 4, 4, "_gap") == 0;
        const bool chosen = (task.kind == TaskKind::choices || task.kind == TaskKind::contexts) && !gap;
        table.row(metric.name, text(metric.value) + error,
                  with_spread(chosen ? "chance " + text(chance) : "", metric.of_draws, digits));
        nlohmann::ordered_json exact = {{"value", metric.value}, {"error", metric.error}};
        if (!metric.of_draws.empty()) exact["draws"] = metric.of_draws;
        table.exact(exact);
    }
    if (task.core) {
        const double mean = mean_with_error(centred).mean;
        table.row("centred", format("%.4f", mean), "((acc - chance) / (1 - chance))");
        table.exact(mean);
    }
    return table;
}

// The result for a text or for data.
struct Evaluation {
    LossSums sums;
    int64_t samples = 0, bytes = 0;  // bytes: of the predicted tokens, without special tokens
    double seconds = 0;
    std::vector<std::pair<std::string, double>> sets;  // the loss on each of several datasets
};

// Bytes of text in tokens: special and masked (-1) tokens have none.
inline int64_t bytes_of(const Tokenizer& tokenizer, const std::vector<int>& tokens) {
    int64_t bytes = 0;
    for (const int token : tokens)
        if (token >= 0 && !tokenizer.is_special(token)) bytes += (int64_t)tokenizer.token_bytes(token).size();
    return bytes;
}
// Bytes of the targets in samples [first, first + n).
inline int64_t bytes_of_targets(const Tokenizer& tokenizer, const DataLoader& data, int64_t first, int64_t n) {
    int64_t bytes = 0;
    Batch batch;
    for (int64_t i = first; i < first + n; i++) {
        data.fetch(i, 1, batch);
        bytes += bytes_of(tokenizer, batch.targets);
    }
    return bytes;
}
inline double bits_per_byte(const LossSums& sums, int64_t bytes) { return sums.ce / std::log(2.0) / (double)bytes; }

// adapter: on the model; empty: none.
inline Table evaluation_table(const Evaluation& e, const std::string& model, const std::string& adapter, int T,
                              const Tokenizer* tokenizer) {
    const double n = (double)e.sums.n, loss = e.sums.ce / n;
    Table table;
    table.section("Evaluation of " + model + (adapter.empty() ? "" : " with the adapters " + adapter));
    const auto row = [&](const std::string& label, const std::string& text, const nlohmann::ordered_json& exact) {
        table.row(label, text);
        table.exact(exact);
    };
    row("tokens", format("%s in %s of %d", with_commas(e.sums.n).c_str(), counted(e.samples, "sample").c_str(), T), e.sums.n);
    row("loss", format("%.4f nats per token", loss), loss);
    row("perplexity", format("%.3f", std::exp(loss)), std::exp(loss));
    for (const auto& [name, of_set] : e.sets) row("loss of " + name, format("%.4f", of_set), of_set);
    const double bits = bits_per_byte(e.sums, e.bytes);
    if (tokenizer) row("bits per byte", format("%.4f (%.3f bytes per token)", bits, (double)e.bytes / n), bits);
    row("speed", format("%s tokens/s", human_count(n / e.seconds).c_str()), n / e.seconds);
    return table;
}

inline void print_result(const Table& table, bool json) {
    if (json) print_json(table.json());
    else table.print();
}

// ---- train_gpt eval --------------------------------------------------------------------------------------------------------
inline void check_options_of_eval(const EvalOptions& o, int ranks) {
    if (!o.text.empty() + !o.data_path.empty() + !o.tasks.empty() != 1)
        fail_usage("exactly one of --data-path, --text and --tasks is required");
    if (!o.text.empty() && ranks > 1) fail_usage("--text runs on a single rank; HINT: prepare the text and give --data-path");
    refuse_without(!o.answers.empty() && o.tasks.empty(), "--answers", "--tasks");
    if (!o.answers.empty() && o.fewshot_draws > 1)
        fail_usage("--answers saves the answers of one draw of solved examples; HINT: instead of --fewshot-draws, --seed");
    if (!o.answers.empty() && std::filesystem::exists(o.answers))
        fail_usage("--answers %s exists already; HINT: another name", o.answers.c_str());
    const auto given = [&](const char* name) { return o.given.count(name) > 0; };
    const bool no_text = o.text.empty();
    const std::tuple<bool, const char*, const char*> rows[] = {
        {o.tasks.empty() && o.num_fewshot, "--num-fewshot", "--tasks"},
        {o.tasks.empty() && !o.fewshot.empty(), "--fewshot", "--tasks"},
        {o.tasks.empty() && given("seed"), "--seed", "--tasks"},
        {o.tasks.empty() && given("fewshot-draws"), "--fewshot-draws", "--tasks"},
        {o.data_path.empty() && given("split"), "--split", "--data-path"},
        {no_text && given("format"), "--format", "--text"},
        {no_text && given("json-keys"), "--json-keys", "--text"},
        {no_text && given("on-bad-line"), "--on-bad-line", "--text"},
        {no_text && given("max-bad-lines"), "--max-bad-lines", "--text"},
        {no_text && given("allow-binary"), "--allow-binary", "--text"},
        {no_text && given("encoding"), "--encoding", "--text"},
        {no_text && given("input-command"), "--input-command", "--text"},
        {no_text && given("skip-bad-files"), "--skip-bad-files", "--text"},
        {!o.text.empty() && given("max-samples"), "--max-samples", "--data-path and --tasks"}};
    for (const auto& [wrong, option, needed] : rows) refuse_idle(wrong, option, needed);
    if (o.tasks.empty()) return;
    for (const std::string& file : o.tasks)
        if (!file_exists(file) && file.find_first_of("./") == std::string::npos)
            fail_usage(
                "--tasks has '%s', which is not a file; HINT: %s.jsonl, made by dev/data/convert_tasks.py from the published "
                "files",
                file.c_str(), file.c_str());
    if (!o.fewshot.empty() && o.fewshot.size() != o.tasks.size())
        fail_usage("--fewshot has %zu files, --tasks %zu; give one per task", o.fewshot.size(), o.tasks.size());
}
inline int64_t limited(int64_t samples, const EvalOptions& o) {
    return o.max_samples ? std::min(o.max_samples, samples) : samples;
}

// A task, and the source of its solved examples, if it is another file.
struct TaskFile {
    Task task;
    std::optional<Task> pool;
};
// The number of solved examples before a question: a task of CORE has its own.
inline int solved_examples(const Task& task, const EvalOptions& o) {
    return task.core && !o.given.count("num-fewshot") ? task.core->num_fewshot : o.num_fewshot;
}
inline std::vector<TaskFile> read_tasks(const EvalOptions& o) {
    std::vector<TaskFile> files;
    for (const std::string& file : o.tasks) files.push_back({limited(read_task(file), o.max_samples), {}});
    for (size_t i = 0; i < o.fewshot.size() && i < files.size(); i++) files[i].pool = read_task(o.fewshot[i]);
    const auto draws = [&](const TaskFile& f) { return solved_examples(f.task, o) > 0; };
    if (std::any_of(files.begin(), files.end(), draws)) return files;
    refuse_idle(o.given.count("seed") > 0, "--seed", "--num-fewshot");
    refuse_idle(o.fewshot_draws > 1, "--fewshot-draws", "--num-fewshot");
    refuse_without(!o.fewshot.empty(), "--fewshot", "--num-fewshot, how many examples to draw from it");
    return files;
}

inline bool any_written(const std::vector<TaskFile>& tasks) {
    return std::any_of(tasks.begin(), tasks.end(), [](const TaskFile& t) { return t.task.kind == TaskKind::written; });
}

// The model's choices as lines of JSON, with the numbers that decide.
inline std::string score_lines(const Task& task, const TaskRequests& all, const std::vector<Score>& scores) {
    std::string lines;
    const Score* own = scores.data();
    for (const int64_t i : all.examples) {
        const TaskExample& e = task.examples[i];
        nlohmann::ordered_json line = {{"task", task.file}, {"line", e.line}};
        if (e.n_choices() > 1) line.update({{"choice", chosen(task, e, own)}, {"gold", e.golds}});
        else line["greedy"] = own->greedy;
        for (int k = 0; k < e.n_choices(); k++, own++) {
            line["log_likelihoods"].push_back(own->log_likelihood);
            line["tokens"].push_back(own->tokens);
        }
        lines += json_text(line) + "\n";
    }
    return lines;
}
// The answers to a task as lines of JSON.
inline std::string answer_lines(const Task& task, const TaskRequests& all, const std::vector<std::string>& answers) {
    std::string lines;
    for (size_t i = 0; i < answers.size(); i++) {
        const TaskExample& e = task.examples[all.examples[i]];
        lines += json_text(nlohmann::ordered_json{
                     {"task", task.file}, {"line", e.line}, {"answer", answers[i]}, {"references", e.continuations}}) +
                 "\n";
    }
    return lines;
}

// Evaluates tasks: scores of requests, and answers to a task; on all ranks; the progress may be null. Nothing if it was
// stopped.
struct TaskFunctions {
    std::function<std::optional<std::vector<Score>>(const std::vector<Request>&, Progress*)> score;
    std::function<std::optional<std::vector<std::string>>(const Task&, const TaskRequests&, Progress*)> answer;

    // lines: set to the answers as lines of JSON, unless null.
    std::optional<std::vector<Metric>> measure(const Task& task, const TaskRequests& all, Progress* progress,
                                               std::string* lines) const {
        if (task.kind != TaskKind::written) {
            const auto scores = score(all.requests, progress);
            if (!scores) return {};
            if (lines) *lines = score_lines(task, all, *scores);
            return task_metrics(task, all.examples, *scores);
        }
        const auto answers = answer(task, all, progress);
        if (!answers) return {};
        if (lines) *lines = answer_lines(task, all, *answers);
        return answer_metrics(task, all.examples, *answers);
    }
};

// A task's results: the metrics of each draw of solved examples, and the requests of the first.
struct TaskResult {
    TaskRequests all;
    std::vector<std::vector<Metric>> draws;
    std::vector<double> centred;  // the accuracy of each draw above chance, if there is one
};
// The draws have the seeds --seed + 1,000,000 i, so that questions of one draw have none of another's. writer: for answers.
inline TaskResult measure_task(const TaskFile& file, int num_fewshot, const EvalOptions& o, const Tokenizer& tokenizer, int T,
                               bool main_rank, const TaskFunctions& functions, std::optional<FileWriter>& writer) {
    const Task& task = file.task;
    const bool written = task.kind == TaskKind::written;
    const int draws = num_fewshot ? o.fewshot_draws : 1;
    TaskResult result;
    for (int draw = 0; draw < draws; draw++) {
        TaskRequests all = make_requests(tokenizer, task, file.pool ? &*file.pool : nullptr, num_fewshot,
                                         (uint64_t)o.seed + 1000000 * (uint64_t)draw, limited(task.size(), o), T);
        int64_t tokens = 0;
        for (const Request& r : all.requests) tokens += r.n_inputs();
        std::optional<Progress> progress;
        if (main_rank)
            progress.emplace(std::filesystem::path(task.file).stem().string(), written ? (int64_t)all.requests.size() : tokens,
                             written ? "answers" : "tokens");
        std::string lines;
        result.draws.push_back(
            functions.measure(task, all, progress ? &*progress : nullptr, writer ? &lines : nullptr).value());
        if (writer) writer->write(lines);
        if (progress) progress->finish();
        if (const auto accuracy = centred_accuracy(task, all.examples, result.draws.back()))
            result.centred.push_back(*accuracy);
        if (draw == 0) result.all = std::move(all);
    }
    return result;
}

// Prints the table of each task, and the mean of their centred accuracies.
inline void evaluate_tasks(const std::vector<TaskFile>& files, const EvalOptions& o, const Tokenizer& tokenizer, int T,
                           bool main_rank, const TaskFunctions& functions) {
    nlohmann::ordered_json results;
    std::vector<std::vector<double>> centred;  // of each task with an accuracy
    const bool core = std::all_of(files.begin(), files.end(), [](const TaskFile& f) { return f.task.core.has_value(); });
    std::optional<FileWriter> writer;
    if (main_rank && !o.answers.empty()) writer.emplace(o.answers);  // fails here, before all the work
    for (const TaskFile& file : files) {
        const int num_fewshot = solved_examples(file.task, o);
        const TaskResult result = measure_task(file, num_fewshot, o, tokenizer, T, main_rank, functions, writer);
        if (!result.centred.empty()) centred.push_back(result.centred);
        if (!main_rank) continue;
        const Table table = task_table(file.task, result.all, mean_of_draws(result.draws), result.centred, num_fewshot);
        if (o.json) results[file.task.file] = table.json().begin().value();
        else table.print();
    }
    if (writer) writer->commit();
    if (!main_rank) return;
    nlohmann::ordered_json json = {{"tasks", results}};
    if (core || centred.size() > 1) {
        std::vector<double> of_draws;
        size_t draws = 1;
        for (const auto& task : centred) draws = std::max(draws, task.size());
        for (size_t draw = 0; draw < draws; draw++) {
            std::vector<double> of_tasks;
            for (const auto& task : centred) of_tasks.push_back(task[std::min(draw, task.size() - 1)]);
            of_draws.push_back(mean_with_error(of_tasks).mean);
        }
        const double mean = mean_with_error(of_draws).mean;
        Table table;
        table.section(format(core ? "CORE, %zu of 22 tasks" : "All %zu tasks with an accuracy", centred.size()));
        const std::string note = core ? "mean of centred" : draws > 1 ? "as CORE" : "(acc - chance) / (1 - chance), as CORE";
        table.row(core ? "CORE" : "centred mean", format("%.4f", mean), with_spread(note, of_draws, 4));
        json[core ? "core" : "centred_mean"] = mean;
        if (draws > 1) json[core ? "core_draws" : "centred_mean_draws"] = of_draws;
        if (!o.json) table.print();
    }
    if (o.json) print_json(json);
}

// The tokens of a whole text, in memory. Each document is encoded like a text in transformers: with the tokens of the
// tokenizer's template around it, and with special tokens recognized.
inline std::vector<int> encode_text(TextInput input, const Tokenizer& tokenizer, int threads) {
    DocumentReader reader(std::move(input));
    std::vector<int> all;
    std::vector<std::vector<int>> tokens;
    const auto append = [&](const std::vector<int>& more) { all.insert(all.end(), more.begin(), more.end()); };
    bool begins = true;
    for_each_chunk(
        reader, cpu::thread_count(threads), "preparing",
        [&](const Chunk& chunk, size_t i) {
            tokens[i].clear();
            tokenizer.encode_append(chunk.text, tokens[i], true, chunk.continues);
        },
        [&](const Chunk& chunk, size_t i) {
            if (begins) append(tokenizer.template_before());
            append(tokens[i]);
            if (chunk.ends_document) append(tokenizer.template_after());
            begins = chunk.ends_document;
        },
        [&](size_t n) { tokens.resize(n); });
    return all;
}

// The tokens of a whole text, which may be shorter than the model's sequence.
inline std::vector<int> text_to_evaluate(const EvalOptions& o, const Tokenizer& tokenizer) {
    const std::vector<int> text = encode_text(text_input(o, {o.text}, "eval --text", "file"), tokenizer, o.threads);
    if (text.size() < 2)
        fail("%s has %zu tokens; at least 2 are needed, one to predict after another", o.text.c_str(), text.size());
    return text;
}
template <class ScoreRequests>
Evaluation evaluate_text(const std::vector<int>& text, const EvalOptions& o, int T, const Tokenizer& tokenizer,
                         ScoreRequests score) {
    std::vector<Request> requests = text_requests(text, T);
    Evaluation e;
    e.samples = limited((int64_t)requests.size(), o);
    requests.resize((size_t)e.samples);
    const double start = monotonic_seconds();
    const auto scores = score(requests, nullptr);
    for (const Score& s : *scores) e.sums.ce -= s.log_likelihood;
    e.seconds = monotonic_seconds() - start;
    for (const Request& r : requests) {
        e.sums.n += r.n_scored;
        e.bytes += bytes_of(tokenizer, {r.tokens.begin() + 1, r.tokens.end()});
    }
    return e;
}

// losses(data, samples): of each data set, over the first `samples` samples, on all ranks. tokenizer: may be null.
// memory: for the order of the samples.
template <class Losses>
Evaluation evaluate_data(const EvalOptions& o, const ModelConfig& c, int T, const Tokenizer* tokenizer, bool main_rank,
                         std::shared_ptr<NodeMemory> memory, Losses losses) {
    DataOptions d;
    d.T = T;
    d.vocab_size = c.V;
    d.virtual_tokens = c.virtual_tokens.count;
    if (tokenizer) d.tokenizer = tokenizer->identity();
    d.blend = parse_data_path(o.data_path);
    d.split = o.split;
    d.part = DataSplit::valid;
    d.memory = std::move(memory);
    const DataLoader data(d);
    if (data.n_samples() == 0)
        fail("the data is too small to be split; HINT: --split \"0, 1, 0\" evaluates all of it, a smaller --seq-length a part");
    Evaluation e;
    e.samples = limited(data.n_samples(), o);
    const double start = monotonic_seconds();
    const std::vector<LossSums> of_sets = losses(data, e.samples);
    e.seconds = monotonic_seconds() - start;
    e.sums = sum_of(of_sets);
    e.sets = set_losses(data, of_sets);
    if (tokenizer && main_rank) e.bytes = bytes_of_targets(*tokenizer, data, 0, e.samples);
    return e;
}
