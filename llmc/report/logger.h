// The output of a run: lines on the console, OUT/log.jsonl for programs, OUT/report.html for people.
//
// log.jsonl: one JSON object per line, written with one write(), so that a reader never sees half a line. Kinds:
//   run     first line: name, time, total_steps, total_samples, unigram_loss, summary, machine, options
//   change  step, and the fields of the first record that a resumed run has changed: name, total_steps, options, ...
//   step    the fields of StepStats by their names (of MixtureLoad: moe_aux_loss, moe_z_loss, moe_busiest_expert,
//           moe_idle_experts, moe_entropy, and moe_dropped with a capacity); seconds since the start, including earlier parts
//           of a resumed run; eta_s
//   health  step, layers: [{layer, weight_norm, grad_norm, update_ratio, fp8_zero, fp8_largest}]; the last two have 12 numbers:
//           for input, weight and gradient of each of qkv, proj, fc1, fc2
//   experts step, steps, layers: [{layer, entropy, dropped, load}] of the mixtures of experts, means over that number of
//           steps up to this one: the fraction of dropped choices; and, for each expert, its rows in thousandths of an even
//           share (run/expert_watch.h)
//   ranks   if there are several: step, steps, ranks: [{rank, host, worked_ms, waited_ms}], means over that number of steps
//           up to this one, slowest: the rank for which the others wait, if there is one (run/stragglers.h)
//   valid   step, loss, perplexity (for pairs of answers the rewards instead, as in a step), tokens, ms; ema_loss with the
//           weights' EMA; with several datasets also sets: {name: loss}
//   sample  step, prompt, text              text that the model generated
//   tasks   step, tasks: {task: {metric: value}}, stderr: the same for standard errors, ms
//   event   step, level, event, message     level: info | warning | error; event: one word
//   end     step, status (finished | stopped | failed), seconds, message; for a finished run also result: parameters, tokens,
//           valid_loss, bits_per_byte (of the last validation, if the tokenizer is known), energy_joules,
//           grams_of_co2 (if the machine and --carbon-intensity provide them)
// JSON has no NaN: such a value is null, and "nonfinite" names it, {"loss":null,"nonfinite":{"loss":"nan"}}.
// Bytes that are not UTF-8 become U+FFFD.
//
// Console: on a terminal, the newest step is a line rewritten in place; every 10 s or log_interval steps a line is kept,
// aligned under a header that is repeated every 30 lines. Elsewhere only the kept lines are printed, as plain text. `quiet`
// prints only warnings, errors and the last line.
//
// An output directory that cannot be written is an Error at the start. Later, no failure here ends training, because the model
// is worth more than its log: a failure (disk full, no memory) is reported once, loudly, and the write is tried again. A log
// that was deleted or replaced, by itself or with its directory, is written again in full with the next report: its records are
// still in the open file.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "prometheus.h"
#include "report.h"
#include "tensorboard.h"
#include "../base/clock.h"
#include "../base/terminal.h"
#include "../base/text.h"

struct RunInfo {
    using json = nlohmann::ordered_json;
    std::string name;               // the run's name on console, in log and report
    int64_t total_steps = 0;        // 0: not known
    int64_t total_samples = 0;      // of the whole run if the batch size ramps up; 0: the ETA uses steps
    double ends_at = INFINITY;      // monotonic_seconds() at which a run of unknown length ends
    double unigram_loss = NAN;      // cross-entropy of a model that only knows token frequencies
    bool z_loss = false;            // z-loss is on and has a column
    bool batch_ramp = false;        // the batch size ramps up and has a column
    json summary = json::object();  // rows of the report: label -> text
    json machine = json::object();
    json options = json::object();
};

// Means over pairs of answers (model/preference.h).
struct Rewards {
    double chosen, rejected;  // of the answers
    double accuracy;          // fraction of pairs whose chosen answer has the higher reward
    double margin() const { return chosen - rejected; }
};

// The time of a rank's step: its own work, and waiting for others.
struct RankTime {
    double worked_ms = 0, waited_ms = 0;
};

// The mixtures of experts in a step.
struct MixtureLoad {
    double balance = NAN, z = NAN;  // the router's losses, without their coefficients: means over layers
    double busiest = NAN;           // rows of the busiest expert of any layer, as a multiple of the mean
    int64_t idle = 0;               // experts of all layers without a row
    double entropy = NAN;  // of the scores, in nats: the mean over rows and layers; the logarithm of E if all are equal
    int64_t dropped = -1;  // choices dropped in all layers; -1: there is no capacity
    struct Layer {
        int layer;
        double entropy, dropped;   // dropped choices, as a fraction
        std::vector<double> load;  // rows of each expert, as a multiple of the mean
    };
    std::vector<Layer> layers;
};

struct StepStats {
    int64_t step = 0;              // completed global batches, including this one
    int64_t consumed_samples = 0;  // sequences so far
    int64_t tokens = 0;            // tokens so far
    double loss = NAN;             // cross-entropy per token, without z-loss
    double z_loss = 0, grad_norm = NAN, lr = NAN;
    int global_batch = 0;  // sequences in this step
    double step_ms = 0, tokens_per_s = 0;
    double model_tflops = 0;               // model FLOPs per second / 1e12 (flops.h); 0: not known
    double mfu = -1;                       // model FLOPs utilization; negative: not known
    int64_t memory_bytes = 0;              // in use, by the process or on the GPU (machine.h)
    double lse_mean = NAN, lse_max = NAN;  // log Z of the logits
    int64_t skipped = 0;                   // steps so far whose update was skipped
    bool applied = true;                   // whether this step's update was applied
    std::optional<Rewards> rewards;        // for pairs of answers; then `loss` is theirs
    std::optional<MixtureLoad> mixture;
    double energy_joules = NAN;                // of rank 0's machine since the program started; NaN: unknown
    std::map<std::string, double> waiting_ms;  // share of step_ms that this rank waited, by group of ranks

    // on_device: the host waits in the world's messages ("world", and "" for the vote), the device in the groups'.
    RankTime rank_time(bool on_device) const {
        double of_host = 0, of_groups = 0;
        for (const auto& [group, ms] : waiting_ms)
            (on_device && (group.empty() || group == "world") ? of_host : of_groups) += ms;
        const double waited = std::min(std::max(of_host, of_groups), step_ms);  // may include time before the step
        return {step_ms - waited, waited};
    }
};

// The mean times of every rank over some steps.
struct RankTimes {
    int64_t steps = 0;
    std::vector<std::string> hosts;
    std::vector<RankTime> ranks;
    int slowest = -1;  // the rank for which the others wait; -1: none
};

// ---- JSON ------------------------------------------------------------------------------------------------------------------
// j[key] = x; a non-finite x becomes null and is named under "nonfinite".
inline void put_number(nlohmann::ordered_json& j, const char* key, double x) {
    if (std::isfinite(x)) {
        j[key] = x;
        return;
    }
    j[key] = nullptr;
    j["nonfinite"][key] = std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

inline void put_rewards(nlohmann::ordered_json& j, const std::optional<Rewards>& rewards) {
    if (!rewards) return;
    put_number(j, "reward_chosen", rewards->chosen);
    put_number(j, "reward_rejected", rewards->rejected);
    put_number(j, "reward_margin", rewards->margin());
    put_number(j, "reward_accuracy", rewards->accuracy);
}

inline nlohmann::ordered_json to_json(const StepStats& s) {
    nlohmann::ordered_json j = {
        {"kind", "step"}, {"step", s.step}, {"consumed_samples", s.consumed_samples}, {"tokens", s.tokens}};
    put_number(j, "loss", s.loss);
    put_number(j, "z_loss", s.z_loss);
    put_number(j, "grad_norm", s.grad_norm);
    put_number(j, "lr", s.lr);
    put_rewards(j, s.rewards);
    if (s.mixture) {
        put_number(j, "moe_aux_loss", s.mixture->balance);
        put_number(j, "moe_z_loss", s.mixture->z);
        put_number(j, "moe_busiest_expert", s.mixture->busiest);
        j["moe_idle_experts"] = s.mixture->idle;
        put_number(j, "moe_entropy", s.mixture->entropy);
        if (s.mixture->dropped >= 0) j["moe_dropped"] = s.mixture->dropped;
    }
    j["global_batch"] = s.global_batch;
    // round to microseconds, which are precise enough and print shorter
    put_number(j, "step_ms", std::round(s.step_ms * 1e3) / 1e3);
    put_number(j, "tokens_per_s", std::round(s.tokens_per_s * 10) / 10);
    if (s.model_tflops > 0) put_number(j, "model_tflops", s.model_tflops);
    if (s.mfu >= 0) put_number(j, "mfu", std::round(s.mfu * 1e5) / 1e5);
    if (s.memory_bytes > 0) j["memory_bytes"] = s.memory_bytes;
    put_number(j, "lse_mean", s.lse_mean);
    put_number(j, "lse_max", s.lse_max);
    j["skipped"] = s.skipped;
    if (std::isfinite(s.energy_joules)) put_number(j, "energy_joules", std::round(s.energy_joules * 10) / 10);
    for (const auto& [group, ms] : s.waiting_ms) j["waiting_ms"][group] = std::round(ms * 1e3) / 1e3;
    return j;
}

inline nlohmann::ordered_json to_json(const RankTimes& times) {
    nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
    for (size_t r = 0; r < times.ranks.size(); r++) {
        ranks.push_back({{"rank", r},
                         {"host", times.hosts[r]},
                         {"worked_ms", std::round(times.ranks[r].worked_ms * 1e3) / 1e3},
                         {"waited_ms", std::round(times.ranks[r].waited_ms * 1e3) / 1e3}});
    }
    nlohmann::ordered_json j = {{"steps", times.steps}, {"ranks", ranks}};
    if (times.slowest >= 0) j["slowest"] = times.slowest;
    return j;
}

// A file that grows by whole lines, which are kept even if the file is deleted in the meantime.
class JsonLines {
public:
    explicit JsonLines(const std::string& path) : path_(path) {
        fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd_ < 0) fail_to_write(path, errno, "give another --out");
        if (struct stat st; fstat(fd_, &st) != 0 || !S_ISREG(st.st_mode)) {
            close(fd_);
            fail("%s is not a regular file; HINT: give another --out", path.c_str());
        }
        // A killed run may have left half a line: start the next record on a new line.
        const off_t size = lseek(fd_, 0, SEEK_END);
        char last = '\n';
        if (size > 0 && pread(fd_, &last, 1, size - 1) == 1 && last != '\n') (void)!::write(fd_, "\n", 1);
    }
    JsonLines(const JsonLines&) = delete;
    JsonLines& operator=(const JsonLines&) = delete;
    ~JsonLines() { close(fd_); }

    void append(const nlohmann::ordered_json& j) {
        const std::string line = json_text(j) + "\n";
        append_whole(fd_, path_, line);
    }

    // True if the open file still is the one under its name.
    bool in_place() const {
        struct stat mine, there;
        if (fstat(fd_, &mine) != 0) fail("cannot read %s: %s", path_.c_str(), strerror(errno));
        return stat(path_.c_str(), &there) == 0 && there.st_dev == mine.st_dev && there.st_ino == mine.st_ino;
    }
    // Copies the open file to its name again. Renames a file that now has the name.
    void restore() {
        make_directory(std::filesystem::path(path_).parent_path().string());
        FileWriter copy(path_);
        std::vector<char> part(1 << 20);
        while (const ssize_t n = pread(fd_, part.data(), part.size(), (off_t)copy.written())) {
            if (n < 0) fail("cannot read %s: %s", path_.c_str(), strerror(errno));
            copy.write(part.data(), (size_t)n);
        }
        set_aside(path_);
        copy.commit();
        const int fd = open(path_.c_str(), O_RDWR | O_APPEND | O_CLOEXEC);
        if (fd < 0) fail_to_write(path_, errno);
        close(std::exchange(fd_, fd));
    }

private:
    std::string path_;
    int fd_ = -1;
};

// Time left, from a moving average of the time per unit of work (steps or samples). It includes everything between two steps:
// validation, samples, checkpoints. The first unit, slow while caches are cold, is dropped once there are others.
class Eta {
public:
    void add(double done, double now) {
        if (last_time_ >= 0 && done > last_done_) {
            const double each = (now - last_time_) / (done - last_done_);
            n_++;
            // the plain mean at first, then over the last 100 or so
            seconds_ = n_ <= 2 ? each : seconds_ + (each - seconds_) / std::min<double>(n_ - 1, 100);
        }
        last_time_ = now;
        last_done_ = done;
    }
    double seconds_left(double total) const { return n_ > 0 && total > 0 ? std::max(0.0, total - last_done_) * seconds_ : NAN; }

private:
    double seconds_ = 0, last_time_ = -1, last_done_ = 0;
    int64_t n_ = 0;
};

// ---- console ---------------------------------------------------------------------------------------------------------------
// One column of a step's line.
struct StepColumn {
    std::string title;
    int width;
    std::function<std::string(const StepStats&, double eta)> cell;
};

// The columns that this run needs, the most important first: a narrow terminal shows as many as fit. `first`, the first step,
// determines which throughput unit is known.
inline std::vector<StepColumn> step_columns(const RunInfo& run, const StepStats& first) {
    using S = const StepStats&;
    const std::string total = run.total_steps > 0 ? "/" + std::to_string(run.total_steps) : "";
    std::vector<StepColumn> columns = {
        {"step", std::max(7, 2 * (int)total.size() - 1), [=](S s, double) { return std::to_string(s.step) + total; }},
        {"loss", 8, [](S s, double) { return format("%.4f", s.loss); }},
        {"tok/s", 6, [](S s, double) { return human_count(s.tokens_per_s); }}};
    if (first.rewards) {
        columns.push_back({"margin", 7, [](S s, double) { return format("%.3f", s.rewards ? s.rewards->margin() : NAN); }});
        columns.push_back(
            {"right", 5, [](S s, double) { return format("%.0f%%", s.rewards ? 100 * s.rewards->accuracy : NAN); }});
    }
    if (first.mixture)
        columns.push_back({"busiest", 7, [](S s, double) { return format("%.1fx", s.mixture ? s.mixture->busiest : NAN); }});
    if (first.mfu >= 0) columns.push_back({"MFU", 5, [](S s, double) { return format("%.1f%%", 100 * s.mfu); }});
    else if (first.model_tflops >= 1)
        columns.push_back({"TFLOP/s", 7, [](S s, double) { return three_digits(s.model_tflops, 1000, {""}); }});
    else if (first.model_tflops > 0)
        columns.push_back({"GFLOP/s", 7, [](S s, double) { return three_digits(1e3 * s.model_tflops, 1000, {""}); }});
    columns.push_back({"ETA", 7, [](S, double eta) { return human_duration(eta); }});
    columns.push_back({"grad norm", 9, [](S s, double) { return format(s.grad_norm < 1000 ? "%.3f" : "%.2e", s.grad_norm); }});
    columns.push_back({"lr", 8, [](S s, double) { return format("%.2e", s.lr); }});
    columns.push_back({"ms", 6, [](S s, double) {
                           return format(s.step_ms < 9.95 ? "%.2f" : s.step_ms < 99.5 ? "%.1f" : "%.0f", s.step_ms);
                       }});
    if (run.batch_ramp) columns.push_back({"batch", 6, [](S s, double) { return std::to_string(s.global_batch); }});
    if (run.z_loss) columns.push_back({"z-loss", 8, [](S s, double) { return format("%.2e", s.z_loss); }});
    return columns;
}

// The leading columns that fit into a line, at least one.
inline std::vector<StepColumn> columns_that_fit(const std::vector<StepColumn>& columns, int width) {
    std::vector<StepColumn> fit;
    for (const StepColumn& c : columns)
        if (width -= c.width + 2; width > 0 || fit.empty()) fit.push_back(c);
        else break;
    return fit;
}

class Logger {
public:
    // terminal: whether the console is a terminal. log_interval: steps between kept lines; 0: one every 10 s (no others in a
    // pipe). console: where lines are printed. hold: called before a file in out_dir is replaced; throws if the directory now
    // belongs to another run.
    Logger(const std::string& out_dir, bool quiet, bool terminal, int64_t log_interval = 0, FILE* console = stdout,
           std::function<void()> hold = {})
        : out_dir_(out_dir),
          file_(((void)make_directory(out_dir), out_dir + "/log.jsonl")),
          quiet_(quiet),
          terminal_(terminal),
          log_interval_(log_interval),
          console_(console),
          status_(console),
          paint_(Paint::for_terminal(terminal)),
          hold_(std::move(hold)),
          start_(monotonic_seconds()) {}
    Logger(const Logger&) = delete;
    Logger& operator=(const Logger&) = delete;
    // A run that ends by an exception is marked as failed, so that its report does not wait for more records.
    ~Logger() {
        if (started_ && !ended_) end("failed", "the run ended with an error");
    }

    // Also writes the numbers of the following records to event files in `dir`; `step`: the last completed step.
    void also_tensorboard(const std::string& dir, int64_t step) { tensorboard_ = std::make_unique<TensorBoard>(dir, step); }
    void also_prometheus(const std::string& file, const std::string& run) {
        prometheus_ = std::make_unique<PrometheusFile>(file, run);
    }

    // resumed_at: the step whose checkpoint is resumed. If a log of the earlier part exists, its records up to that step are
    // kept and new ones are appended.
    void run(const RunInfo& info, std::optional<int64_t> resumed_at = {}) {
        info_ = info;
        started_ = true;
        last_.step = resumed_at.value_or(0);
        if (resumed_at) attempt("the log of the earlier part", [&] { take_over(*resumed_at); });
        else eta_.add(0, monotonic_seconds());
        attempt("the log", [&] {
            if (!records_.run.is_null()) return record_changes(info, last_.step);
            if (records_.has_steps()) return;
            nlohmann::ordered_json j = {{"kind", "run"},
                                        {"name", info.name},
                                        {"time", local_time(time(nullptr))},
                                        {"total_steps", info.total_steps},
                                        {"total_samples", info.total_samples}};
            put_number(j, "unigram_loss", info.unigram_loss);
            j["summary"] = info.summary;
            j["machine"] = info.machine;
            j["options"] = info.options;
            record(j);
        });
        refresh_report(true);
    }

    void step(const StepStats& s) {
        last_ = s;
        attempt("the log", [&] {
            if (columns_.empty()) columns_ = step_columns(info_, s);
            const bool by_samples = info_.total_samples > 0;
            eta_.add((double)(by_samples ? s.consumed_samples : s.step), monotonic_seconds());
            const double eta = std::isfinite(info_.ends_at)
                                   ? std::max(0.0, info_.ends_at - monotonic_seconds())
                                   : eta_.seconds_left((double)(by_samples ? info_.total_samples : info_.total_steps));
            nlohmann::ordered_json j = to_json(s);
            j["seconds"] = rounded_seconds();
            if (std::isfinite(eta)) j["eta_s"] = std::round(eta * 10) / 10;
            record(j);
            print_step(s, eta);
        });
        refresh_report(false);
    }

    // The length of a run, once it is known.
    void length(int64_t step, int64_t total_steps) {
        info_.total_steps = total_steps;
        columns_.clear();
        columns_shown_ = 0;
        attempt("the log", [&] { record({{"kind", "change"}, {"step", step}, {"total_steps", total_steps}}); });
    }

    // layers: a list with one object per layer; non-finite numbers become null.
    void health(int64_t step, const nlohmann::ordered_json& layers) {
        attempt("the log", [&] { record({{"kind", "health"}, {"step", step}, {"layers", layers}}); });
    }

    // record: from ExpertWatch.
    void experts(const nlohmann::ordered_json& record_of_step) {
        attempt("the log", [&] { record(record_of_step); });
    }

    void ranks(int64_t step, const RankTimes& times) {
        attempt("the log", [&] {
            nlohmann::ordered_json j = {{"kind", "ranks"}, {"step", step}};
            j.update(to_json(times));
            record(j);
        });
    }

    // sets: names and losses of the datasets, if there are several; ema_loss: with the weights' moving average, if there is
    // one; rewards: for pairs of answers, whose loss has no perplexity
    void valid(int64_t step, double loss, int64_t tokens, double ms,
               const std::vector<std::pair<std::string, double>>& sets = {}, double ema_loss = NAN,
               const std::optional<Rewards>& rewards = {}) {
        const bool best = loss < records_.best_valid;
        attempt("the log", [&] {
            nlohmann::ordered_json j = {{"kind", "valid"}, {"step", step}};
            put_number(j, "loss", loss);
            if (!rewards) put_number(j, "perplexity", std::exp(loss));
            put_rewards(j, rewards);
            if (std::isfinite(ema_loss)) j["ema_loss"] = ema_loss;
            j["tokens"] = tokens;
            j["ms"] = std::round(ms * 10) / 10;
            for (const auto& [name, set_loss] : sets) {
                if (std::isfinite(set_loss)) j["sets"][name] = set_loss;
                else j["sets"][name] = nullptr;
            }
            record(j);
            if (!quiet_) print_valid(step, loss, best, tokens, ms, ema_loss, rewards);
            if (!quiet_ && sets.size() > 1) print_sets(sets);
        });
    }

    // values, errors: {task: {metric: number}}; errors are standard errors.
    void tasks(int64_t step, const nlohmann::ordered_json& values, const nlohmann::ordered_json& errors, double ms) {
        attempt("the log", [&] {
            record(
                {{"kind", "tasks"}, {"step", step}, {"tasks", values}, {"stderr", errors}, {"ms", std::round(ms * 10) / 10}});
            if (quiet_) return;
            std::string text;
            for (const auto& [task, metrics] : values.items())
                for (const auto& [metric, value] : metrics.items())
                    text += format("%s%s %s %.4g", text.empty() ? "" : ", ", task.c_str(), metric.c_str(), value.get<double>());
            print(format("tasks at step %lld: %s", (long long)step, printable(text).c_str()), plain, terminal_ ? 2 : 0);
        });
    }

    void sample(int64_t step, const std::string& prompt, const std::string& text) {
        attempt("the log", [&] {
            record({{"kind", "sample"}, {"step", step}, {"prompt", prompt}, {"text", text}});
            if (!quiet_) print_sample(step, printable(prompt) + printable(text));
        });
    }

    // Prints a line for people, without a record in the log.
    void say(const std::string& text) {
        attempt("the console", [&] { print(printable(text), plain); });
    }

    // level: info, warning or error. name: one word for programs, such as skip or checkpoint.
    void event(int64_t step, const std::string& level, const std::string& name, const std::string& message) {
        attempt("the log", [&] {
            record({{"kind", "event"}, {"step", step}, {"level", level}, {"event", name}, {"message", message}});
            if (level == "info" && quiet_) return;
            const std::string text = printable(message);
            if (level == "info") print(text, &Paint::dim, terminal_ ? 2 : 0);
            else if (level == "warning") print("warning: " + text, &Paint::warning);
            else print("error: " + text, &Paint::bad);
        });
    }

    // status: finished, stopped (by the user) or failed. reason: why. command: the command that resumes the run. result: final
    // figures of a finished run; may be null. Also draws OUT/loss.svg.
    void end(const std::string& status, const std::string& reason = "", const std::string& command = "",
             const nlohmann::ordered_json& result = {}) {
        if (std::exchange(ended_, true)) return;
        const std::string message = reason + (command.empty() ? "" : "; to resume: " + command);
        const double seconds = monotonic_seconds() - start_;
        keep_log();
        attempt("the log", [&] {
            nlohmann::ordered_json j = {{"kind", "end"},
                                        {"step", last_.step},
                                        {"status", status},
                                        {"seconds", rounded_seconds()},
                                        {"message", message}};
            if (!result.is_null()) j["result"] = result;
            record(j);
        });
        refresh_report(true);
        if (records_.has_steps())
            attempt("the loss curve", [&] {
                if (hold_) hold_();
                write_loss_svg(records_, out_dir_ + "/loss.svg");
            });
        attempt("the console", [&] {
            print_end(status, terminal_ ? reason : message, seconds);
            if (terminal_ && !command.empty()) print_command(command);
        });
    }

    const RunLog& records() const { return records_; }

private:
    double rounded_seconds() const { return std::round((monotonic_seconds() - start_) * 1e3) / 1e3; }
    using Style = std::string (Paint::*)(const std::string&) const;
    static constexpr Style plain = nullptr;

    void print(const std::string& line) {
        StatusLine::clear_any();
        fprintf(console_, "%s\n", line.c_str());
        fflush(console_);
    }
    // On a terminal: wrapped, and indented by `indent` columns; `head` replaces the indent on the first line.
    void print(const std::string& text, Style style, int indent = 0, const std::string& head = "") {
        const std::vector<std::string> lines =
            terminal_ ? wrap_text(text, std::max(10, width_() - indent)) : std::vector<std::string>{text};
        for (size_t i = 0; i < lines.size(); i++)
            print((i == 0 && !head.empty() ? head : std::string((size_t)indent, ' ')) +
                  (style ? (paint_.*style)(lines[i]) : lines[i]));
    }
    int width_() const { return terminal_width(console_); }
    int indent_() const { return columns_.empty() ? 2 : columns_[0].width + 2; }
    static const char* bar_() { return utf8_locale() ? "  │ " : "  | "; }

    // Runs something that training can do without: any failure is reported the first time.
    template <class F>
    void attempt(const char* what, F&& f) {
        try {
            try {
                f();
            } catch (const std::exception& e) {
                if (said_.insert(what).second)
                    print(format("error: %s: %s; training is not affected", what, printable(e.what()).c_str()), &Paint::bad);
            }
        } catch (...) {  // out of memory for the message itself
        }
    }

    void record(const nlohmann::ordered_json& j) {
        attempt("the log", [&] {
            if (hold_) hold_();
            file_.append(j);
        });
        const auto also = [&](const char* what, const auto& file) {
            if (!file) return;
            attempt(what, [&] {
                if (hold_) hold_();
                file->add(j);
            });
        };
        also("TensorBoard's file", tensorboard_);
        also("Prometheus' file", prometheus_);
        attempt("the report", [&] { records_.add(j); });
    }

    // Records the fields of the first record that a resumed run has changed.
    void record_changes(const RunInfo& info, int64_t step) {
        const nlohmann::ordered_json now = {{"name", info.name},
                                            {"total_steps", info.total_steps},
                                            {"total_samples", info.total_samples},
                                            {"options", info.options}};
        nlohmann::ordered_json changes = {{"kind", "change"}, {"step", step}};
        for (const auto& [key, value] : now.items())
            if (records_.run.value(key, nlohmann::ordered_json()) != value) changes[key] = value;
        if (changes.size() > 2) record(changes);
    }
    void take_over(int64_t step) {
        const std::string path = out_dir_ + "/log.jsonl";
        if (std::filesystem::file_size(path) == 0) return;
        int64_t passed_over = 0;
        const LogCut cut = cut_log(path, step);
        records_ = read_log(path, &passed_over);
        last_.tokens = RunLog::whole(records_.newest["tokens"]);
        last_.loss = records_.newest["loss"];
        // The run's time continues from the end of its earlier part, including its last validation and save if there were any.
        if (const double before = std::fmax(records_.newest["seconds"], cut.end_seconds); before > 0) start_ -= before;
        if (!cut.kept.empty()) event(step, "info", "log", "the records of later steps are kept in " + cut.kept);
        if (const int64_t lines = cut.others + passed_over; lines > 0)
            event(step, "warning", "log",
                  format("%s of %s %s no record%s of a run: ignored", counted(lines, "line").c_str(), path.c_str(),
                         lines == 1 ? "is" : "are", lines == 1 ? "" : "s"));
    }

    void keep_log() {
        attempt("the log", [&] {
            if (file_.in_place()) return;
            if (hold_) hold_();
            file_.restore();
            event(last_.step, "warning", "log",
                  out_dir_ + "/log.jsonl was deleted or replaced; it has been written again in full");
        });
    }

    void print_valid(int64_t step, double loss, bool best, int64_t tokens, double ms, double ema_loss,
                     const std::optional<Rewards>& rewards) {
        const std::string average = std::isfinite(ema_loss) ? format("EMA %.4f, ", ema_loss) : "";
        const std::string quality = rewards ? format("margin %.3f, %.1f%% right", rewards->margin(), 100 * rewards->accuracy)
                                            : "perplexity " + human_count(std::exp(loss));
        const std::string detail = average + format("%s, %s tokens in %s", quality.c_str(), human_count((double)tokens).c_str(),
                                                    human_duration(ms / 1e3).c_str());
        const std::string note =
            best ? "" : format(", best %.4f at step %lld", records_.best_valid, (long long)records_.best_step);
        if (terminal_) {
            const int left = width_() > indent_() + 60 ? indent_() : 0;  // in the column of the losses, if there is room
            print(detail + note, &Paint::dim, left + 24,
                  std::string((size_t)left + 2, ' ') + paint_.bold(format("%8.4f", loss)) + "  " + paint_.accent("validation") +
                      "  ");
        } else print(format("validation at step %lld: loss %.4f, %s%s", (long long)step, loss, detail.c_str(), note.c_str()));
    }

    // One line per dataset, below the mean.
    void print_sets(const std::vector<std::pair<std::string, double>>& sets) {
        const int left = 2 + (terminal_ && width_() > indent_() + 60 ? indent_() : 0);
        for (const auto& [name, loss] : sets)
            print(printable(name), &Paint::dim, left + 10, std::string((size_t)left, ' ') + format("%8.4f  ", loss));
    }

    void print_sample(int64_t step, const std::string& written) {
        if (!terminal_) {
            print(format("sample at step %lld:", (long long)step));
            for (const std::string& line : wrap_text(written, 100)) print("    " + line);
            return;
        }
        print(paint_.dim(format("  sample at step %lld", (long long)step)));
        for (const std::string& line : wrap_text(written, std::max(20, std::min(100, width_() - 5))))
            print(paint_.accent(bar_()) + line);
    }

    void print_end(const std::string& status, const std::string& message, double seconds) {
        std::string line = format("%s after %s and %s tokens in %s", status.c_str(), counted(last_.step, "step").c_str(),
                                  human_count((double)last_.tokens).c_str(), human_duration(seconds).c_str());
        if (last_.step > 0) line += format(", loss %.4f", last_.loss);
        if (std::isfinite(records_.best_valid))
            line += format(", best validation %.4f at step %lld", records_.best_valid, (long long)records_.best_step);
        if (last_.skipped > 0) line += format(", %s skipped", with_commas(last_.skipped).c_str());
        if (!message.empty()) line += ": " + printable(message);
        print(line, status == "finished" ? &Paint::good : &Paint::warning);
        if (!quiet_) print("report: " + printable(out_dir_) + "/report.html", &Paint::dim);
    }

    // Wraps a command so that it can be copied: lines end with a backslash; a command with quotes is unchanged.
    void print_command(const std::string& command) {
        print("to resume:");
        std::string text;
        const bool quoted = command.find_first_of("'\"") != std::string::npos;
        for (const std::string& part : quoted ? std::vector<std::string>{command} : wrap_text(command, width_() - 6))
            text += (text.empty() ? "  " : " \\\n    ") + part;
        print(printable(text));
    }

    void print_step(const StepStats& s, double eta) {
        if (quiet_) return;
        const double now = monotonic_seconds();
        // Also where the step at which a line was due was skipped.
        const int64_t before = std::min(std::exchange(last_step_, s.step), s.step - 1);
        const bool due = log_interval_ > 0 ? s.step / log_interval_ > before / log_interval_ : now - printed_at_ >= interval_s;
        const bool skipped = !s.applied, stays = due || lines_ == 0 || s.step == info_.total_steps || skipped;
        if (!stays && (!terminal_ || now - shown_at_ < 0.1)) return;
        shown_at_ = now;
        if (stays) printed_at_ = now;
        std::string line, header;
        if (!terminal_) {
            for (const StepColumn& c : columns_) line += (line.empty() ? "" : "  ") + c.title + " " + c.cell(s, eta);
            print(line + (skipped ? "  skipped" : ""));
            lines_++;
            return;
        }
        const std::vector<StepColumn> columns = columns_that_fit(columns_, width_());
        for (const StepColumn& c : columns) {
            header += "  " + pad_left(c.title, c.width);
            line += "  " + pad_left(c.cell(s, eta), c.width);
        }
        if (lines_ % header_every == 0 || columns.size() != columns_shown_) {
            print(paint_.dim(header));
            lines_ = 0;
        }
        columns_shown_ = columns.size();
        if (!stays) return status_.show(line);
        if (skipped && display_width(line) + 9 < width_()) line += "  skipped";
        print(skipped ? paint_.warning(line) : line);
        lines_++;
    }

    // Often in a young run, later every 10 s, and for at most half a percent of the run's time, not counting a single stall of
    // the disk.
    void refresh_report(bool now) {
        const double begin = monotonic_seconds();
        if (!now && begin < report_due_) return;
        keep_log();
        sync_file(out_dir_ + "/log.jsonl");
        attempt("the report", [&] {
            if (hold_) hold_();
            write_report(out_dir_ + "/report.html", records_, records_.step() == 0 ? 2 : (int)report_interval_s);
        });
        const double end = monotonic_seconds(), took = end - begin;
        const double usual = std::min(took, std::exchange(report_took_, took));
        report_due_ =
            records_.step() == 0 ? end : end + std::max(std::min(report_interval_s, 0.2 * (end - start_)), 200 * usual);
    }

    static constexpr int header_every = 30;
    static constexpr double interval_s = 10, report_interval_s = 10;
    std::string out_dir_;
    JsonLines file_;
    std::unique_ptr<TensorBoard> tensorboard_;
    std::unique_ptr<PrometheusFile> prometheus_;
    bool quiet_, terminal_;
    int64_t log_interval_, last_step_ = INT64_MAX;
    FILE* console_;
    StatusLine status_;
    Paint paint_;
    std::function<void()> hold_;
    double start_, printed_at_ = -INFINITY, shown_at_ = -INFINITY, report_due_ = 0, report_took_ = 0;
    RunInfo info_;
    RunLog records_;
    Eta eta_;
    std::vector<StepColumn> columns_;
    size_t columns_shown_ = 0;
    StepStats last_;
    int64_t lines_ = 0;
    bool started_ = false, ended_ = false;
    std::set<std::string> said_;
};
