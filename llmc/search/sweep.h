// train_gpt sweep: finds the best learning rate, batch, weight decay, ... of a training run, by successive halving (halving.h)
// over short trainings. Options of `train` describe the run; --over names the searched ones. Every training is a separate
// process (trials.h) with its own full schedule: warm-up and decay are the same fraction of it as of the whole run, so that the
// final validation losses of one rung can be compared. Trainings that die or diverge are counted, and the search continues.
//
// In --out: sweep.json, the plan and all completed runs, saved after each one, from which the same command resumes; logs/, one
// per run; and at the end best.toml for `train --config` and sweep.html.
#pragma once
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/similar.h"
#include "../base/clock.h"
#include "../base/table.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "../model/flops.h"
#include "../report/run_log.h"
#include "../options/cli.h"
#include "../options/options.h"
#include "../options/config_file.h"
#include "../plan/halving.h"
#include "../run/run.h"
#include "sweep_page.h"
#include "trials.h"

namespace detail {

// ---- the search space ------------------------------------------------------------------------------------------------------
// The reason why an option cannot be swept; empty: it can.
inline std::string why_not_swept(const cli::OptionRow& row) {
    static const std::set<std::string> of_sweep = {
        "train-iters", "train-samples", "time-budget", "rampup-batch-size", "eval-iters",          "seed",
        "split",       "on-spike",      "dpo-beta",    "dpo-loss",          "dpo-label-smoothing", "eod-mask-loss"};
    static const std::set<std::string> of_files = {
        "out",        "resume",  "name",     "dry-run", "json",       "quiet",         "world",          "exit-after",
        "save-every", "threads", "override", "keep",    "keep-every", "eval-interval", "snapshot-every", "snapshot-directory"};
    if (row.several) return "its value is a list";
    if (of_sweep.count(row.name)) return "sweep sets it itself, and losses would not be comparable";
    if (of_files.count(row.name) || row.group.find("Plan") == 0) return "it does not affect the loss";
    return "";
}

// "lr=1e-4..1e-2" or "weight-decay=0.05,0.1".
inline Dimension parse_dimension(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == text.size())
        fail_usage("--over '%s' must be NAME=LOW..HIGH or NAME=A,B,C; HINT: --over lr=1e-4..1e-2", text.c_str());
    std::string name = cli::with_dashes(text.substr(0, equals));
    if (name.compare(0, 2, "--") == 0) name.erase(0, 2);
    const std::string values = text.substr(equals + 1);
    Strings names;
    bool found = false;
    Dimension d;
    TrainOptions o;
    for_each_option(o, [&](const Option& option, auto& value) {
        const cli::OptionRow row = cli::option_row(option, value);
        names.push_back(row.name);
        if (name != row.name && (row.alias.empty() || name != row.alias)) return;
        found = true;
        d.option = row.name;
        if (const std::string why = why_not_swept(row); !why.empty())
            fail_usage("--over %s: --%s cannot be swept: %s", text.c_str(), row.name.c_str(), why.c_str());
        using Value = std::decay_t<decltype(value)>;
        d.whole = std::is_same_v<Value, int> || std::is_same_v<Value, int64_t>;
        const size_t dots = values.find("..");
        if (dots == std::string::npos) return;
        if (!d.whole && !std::is_same_v<Value, double> && !std::is_same_v<Value, OptionalDouble>)
            fail_usage("--over %s: a range is for numbers; HINT: --over %s=A,B,C", text.c_str(), row.name.c_str());
        d.low = cli::number_in_range(row.name, values.substr(0, dots), option.allowed, d.whole);
        d.high = cli::number_in_range(row.name, values.substr(dots + 2), option.allowed, d.whole);
        if (!(d.low < d.high)) fail_usage("--over %s: the range must go from the lower to the higher number", text.c_str());
    });
    if (!found)
        fail_usage("--over %s: '%s' is not an option of train%s HINT: train_gpt train --help-all lists them", text.c_str(),
                   name.c_str(), did_you_mean(name, names, "--").c_str());
    if (d.high > d.low) return d;
    for (size_t begin = 0, end; begin <= values.size(); begin = end + 1) {
        end = std::min(values.find(',', begin), values.size());
        const std::string value = values.substr(begin, end - begin);
        if (value.empty()) fail_usage("--over %s has an empty value", text.c_str());
        if (std::find(d.values.begin(), d.values.end(), value) != d.values.end())
            fail_usage("--over %s has %s twice", text.c_str(), value.c_str());
        TrainOptions checked;
        cli::parse("train", checked, {"--" + d.option + "=" + value});
        d.values.push_back(value);
    }
    return d;
}

inline std::vector<Dimension> parse_dimensions(const Strings& over) {
    refuse_missing(over.empty(), "the option to search over", "--over lr=1e-4..1e-2 --over weight-decay=0.05,0.1,0.2");
    std::vector<Dimension> all;
    for (const std::string& text : over) {
        all.push_back(parse_dimension(text));
        for (size_t i = 0; i + 1 < all.size(); i++)
            if (all[i].option == all.back().option) fail_usage("--over names --%s twice", all[i].option.c_str());
    }
    return all;
}

// The value of an option in --over's form.
inline std::string value_of(const TrainOptions& o, const std::string& option) {
    std::string text;
    for_each_option(const_cast<TrainOptions&>(o), [&](const Option& row, auto& value) {
        using Value = std::decay_t<decltype(value)>;
        if (option_name(row.field) != option) return;
        if constexpr (std::is_same_v<Value, std::string>) text = value;
        else if constexpr (std::is_same_v<Value, double>) text = format("%.10g", value);
        else if constexpr (std::is_same_v<Value, OptionalDouble>) text = format("%.10g", value.value_or(0));
        else if constexpr (!std::is_same_v<Value, Strings>) text = toml_value(value);
    });
    return text;
}

// A value in the list's spelling, where 1e-6 may be 1e-06; empty: it is not in the list or the range.
inline std::string value_in(const Dimension& d, const std::string& value) {
    const double x = strtod(value.c_str(), nullptr);
    if (d.range()) return x >= d.low && x <= d.high ? value : "";
    for (const std::string& other : d.values)
        if (other == value || (is_number(other) && is_number(value) && strtod(other.c_str(), nullptr) == x)) return other;
    return "";
}

// ---- a training ------------------------------------------------------------------------------------------------------------
// The cost of a configuration.
struct TokenCost {
    double tokens_per_step = 0, flops_per_token = 0;
    int64_t steps(double tokens) const { return std::max<int64_t>(1, std::llround(tokens / tokens_per_step)); }
};
struct WholeRun {
    double tokens = 0, steps = 0;
};

// The options of a run with this configuration. --min-lr keeps its ratio to --lr if both are given.
inline TrainOptions options_with(const TrainOptions& base, const std::vector<Dimension>& dimensions, const Choices& config) {
    TrainOptions p = base;
    bool min_lr = false;
    for (size_t d = 0; d < dimensions.size(); d++) {
        cli::parse("train", p, {"--" + dimensions[d].option + "=" + config[d]});
        min_lr = min_lr || dimensions[d].option == "min-lr";
    }
    if (base.given.count("lr") && base.given.count("min-lr") && !min_lr)
        p.min_lr = std::stod(format("%.10g", base.min_lr * (p.lr / base.lr)));
    return p;
}

// The options of a run of `tokens`: lengths given in steps or samples are the same fraction of it as of the whole run.
inline TrainOptions shortened_to(TrainOptions p, const TokenCost& cost, const WholeRun& whole, double tokens) {
    const auto shrink = [](int64_t& length, double part) {
        if (length) length = std::max<int64_t>(1, std::llround((double)length * part));
    };
    p.train_samples = 0;
    p.given.erase("train-samples");
    p.train_iters = cost.steps(tokens);
    p.given.insert("train-iters");
    for (int64_t* steps : {&p.lr_warmup_iters, &p.lr_decay_iters, &p.lr_wsd_decay_iters})
        shrink(*steps, (double)p.train_iters / whole.steps);
    // Keeps the number of validation samples, which are counted in batches.
    p.eval_iters = std::max<int64_t>(1, std::llround((double)p.eval_iters * whole.tokens / whole.steps / cost.tokens_per_step));
    p.given.insert("eval-iters");
    for (int64_t* samples : {&p.lr_warmup_samples, &p.lr_decay_samples, &p.lr_wsd_decay_samples})
        shrink(*samples, (double)p.train_iters * cost.tokens_per_step / whole.tokens);
    return p;
}

// The options of a training in the search: it is validated on the same samples, once, at its end.
inline TrainOptions options_of_trial(TrainOptions p, int threads, int seed) {
    leave_out_of_trials(p);
    p.seed += seed;
    p.threads = threads;
    p.eval_interval = p.train_iters;
    p.eval_fixed = p.quiet = true;
    for (const char* name : {"seed", "threads", "eval-interval", "eval-fixed", "quiet"}) p.given.insert(name);
    return p;
}

// The result in the log of a training that has ended with this status.
inline TrialResult read_result(const std::string& log, const std::string& output, int status, double limit_seconds) {
    TrialResult result;
    if (status != 0) {
        result.why = why_failed(status, output, limit_seconds);
        return result;
    }
    const RunLog::json end = std::filesystem::exists(log) ? read_log(log).end : RunLog::json();
    if (end.contains("result")) result.loss = RunLog::number(end["result"], "valid_loss");
    if (!result.finished()) result.why = "diverged: its validation loss is not finite";
    return result;
}

}  // namespace detail

// ---- the command -----------------------------------------------------------------------------------------------------------
class Sweep {
public:
    Sweep(Run& run, const SweepOptions& o) : run_(run), o_(o), base_(o), talk_(o.json ? stderr : stdout) {}

    void run() {
        check_options();
        prepare();
        const bool known = load();
        const SignalsHeld held;
        if (!known) plan();
        if (SignalsHeld::any()) return;
        print_plan();
        if (o_.dry_run) return;
        if (data_.empty()) data_ = data_in_words();
        if (!known) save();
        for (size_t k = 0; k < rungs_.size(); k++) {
            if (k > 0) keep_time(k);
            run_rung((int)k);
            if (SignalsHeld::any())
                return print_line(talk_, format("stopped after %s; the same command resumes",
                                                counted((int64_t)results_.size(), "run").c_str()));
        }
        report();
    }

private:
    static constexpr int64_t least_steps = 10;   // of a run; fewer are meaningless
    static constexpr int64_t probe_steps = 6;    // of the runs that measure the speed, without the first
    static constexpr double planned_part = 0.9;  // of --budget

    // ---- before the search ----
    void check_options() {
        const bool parallel = o_.tensor_model_parallel_size * o_.pipeline_model_parallel_size > 1;
        const struct {
            bool wrong;
            const char *what, *hint;
        } rows[] = {
            {run_.world.size() > 1 || parallel, "each training of a sweep is one process", "omit mpirun, --tp and --pp"},
            {!o_.time_budget.empty(), "--time-budget is the length of one run", "--budget limits the search; --train-iters"},
            {o_.budget_tokens && !o_.budget.empty(), "--budget and --budget-tokens are both given", "omit one of them"},
            {o_.data_path.empty(), "there is no data to train on", "--data-path PREFIX"},
            {!has_validation(o_), "configurations are compared by their validation loss, and there is no validation data",
             "--split 95,5,0 or --valid-data-path, and --eval-iters above 0"},
            {!o_.rampup_batch_size.empty(), "--rampup-batch-size has a length of its own", "omit it"},
            {o_.world > 0, "--world plans for machines that are not here", "omit it"},
            {!o_.resume.empty(), "--resume resumes a single run", "the same sweep command resumes the search"},
            {o_.jobs > run_.ctx.threads, "--jobs divides the CPU's threads, of which there are fewer", "fewer --jobs"},
            {o_.jobs > 1 && !be::memory_is_host, "--jobs divides the CPU's threads, and this program trains on a GPU",
             "omit it"},
            {o_.dry_run && !o_.budget.empty(), "--budget is planned by a measurement, which --dry-run forbids",
             "--budget-tokens"},
        };
        for (const auto& [wrong, what, hint] : rows)
            if (wrong) fail_usage("%s; HINT: %s", what, hint);
        if (!o_.budget.empty()) duration_of("--budget", o_.budget);
    }

    // Checks the run as given, and finds the configurations and their costs.
    void prepare() {
        dimensions_ = detail::parse_dimensions(o_.over);
        run_.o.quiet = true;
        detail::adjust_options(run_);
        detail::load_tokenizer(run_);
        detail::check_options_of_backend(run_);
        take_base_of_mup();
        detail::derive_from_size(run_);
        detail::set_up_model(run_);
        base_.model = run_.o.model;  // for a run, its newest checkpoint now
        refuse_missing(!run_.o.train_iters && !run_.o.train_samples,
                       "the length of the run, of which each trial trains a fraction,", "--train-iters or --train-samples");
        const detail::TokenCost cost = cost_of(base_);
        whole_.steps = run_.o.train_iters ? (double)run_.o.train_iters
                                          : (double)run_.o.train_samples * run_.o.seq_length / cost.tokens_per_step;
        whole_.tokens = whole_.steps * cost.tokens_per_step;

        bool all_given = true;
        Choices given;
        for (const Dimension& d : dimensions_) {
            given.push_back(detail::value_in(d, detail::value_of(o_, d.option)));
            all_given = all_given && o_.given.count(d.option) && !given.back().empty();
        }
        configs_ = sample_configs(dimensions_, (size_t)o_.configs, (uint64_t)o_.seed);
        if (all_given && std::find(configs_.begin(), configs_.end(), given) == configs_.end()) {
            configs_.insert(configs_.begin(), given);
            if (configs_.size() > (size_t)o_.configs) configs_.pop_back();
        }
        for (const Choices& config : configs_) try {
                costs_.push_back(cost_of(detail::options_with(base_, dimensions_, config)));
            } catch (const Error&) {
                costs_.push_back(cost);  // its training will report the error
            }
    }

    // Hyperparameters found here are tuned for this model's width and depth.
    void take_base_of_mup() {
        if (base_.parametrization == "standard") return;
        TrainOptions p = run_.o;
        p.parametrization = "standard";
        p.mup_base_width = p.mup_base_depth = p.mup_base_head_size = 0;
        const auto configure = [&](const TrainOptions& of) { return configure_model(of, run_.tokenizer.get()); };
        if (!p.size.empty()) apply_size(p, 1, configure);
        const ModelConfig c = configure(p);
        const struct {
            const char *option, *swept;
            int TrainOptions::*base;
            int size;
            bool counts;
        } rows[] = {{"mup-base-width", "hidden-size", &TrainOptions::mup_base_width, c.C, true},
                    {"mup-base-depth", "num-layers", &TrainOptions::mup_base_depth, c.L, base_.parametrization == "completep"},
                    {"mup-base-head-size", "kv-channels", &TrainOptions::mup_base_head_size, c.HS(), true}};
        for (const auto& [option, swept, base, size, counts] : rows) {
            if (!counts || base_.*base) continue;
            for (const Dimension& d : dimensions_)
                if (d.option == swept || d.option == "size" || d.option == "preset")
                    fail_usage("--over %s changes the size that --%s defaults to; HINT: --%s %d", d.option.c_str(), option,
                               option, size);
            base_.*base = run_.o.*base = size;
            base_.given.insert(option);
        }
    }

    detail::TokenCost cost_of(TrainOptions p) {
        const auto configure = [&](const TrainOptions& of) { return configure_model(of, run_.tokenizer.get()); };
        p.train_samples = 0;  // so that --size does not choose a batch: a training's length is in steps
        p.train_iters = 1;
        if (!p.size.empty()) apply_size(p, 1, configure);
        const ModelConfig c = configure(p);
        const int T = p.seq_length ? p.seq_length : c.room();
        return {(double)(p.global_batch_size ? p.global_batch_size : p.micro_batch_size) * T, model_flops_per_token(c, T)};
    }

    // ---- the plan ----
    void plan() {
        for (const char* name : {"best.toml", "sweep.html"}) check_replaceable(file(name), "sweep");
        rungs_ = plan_rungs((int)configs_.size(), o_.eta, o_.seeds);
        const double most = o_.budget_tokens ? (double)o_.budget_tokens / total_tokens(rungs_) : whole_.tokens;
        for (Rung& r : rungs_) r.tokens *= std::min(whole_.tokens, most);
        check_lengths();
        if (o_.dry_run) return;
        make_directory(o_.out);
        lock_.emplace(o_.out);
        probe();
        if (!o_.budget.empty()) shorten(0, planned_part * parse_duration(o_.budget) - spent());
        check_lengths();
    }
    void check_lengths() const {
        for (const detail::TokenCost& cost : costs_)
            if (const double steps = rungs_[0].tokens / cost.tokens_per_step; steps < least_steps)
                fail_usage("%s gives the runs of the first of %zu rungs %.1f steps; the minimum is %lld; HINT: %s",
                           limit_in_words().c_str(), rungs_.size(), std::max(0.0, steps), (long long)least_steps,
                           !o_.budget_tokens && o_.budget.empty() ? "more --train-iters, or fewer --configs"
                           : o_.seeds > 1                         ? "a larger budget, fewer --configs, or fewer --seeds"
                                                                  : "a larger budget, or fewer --configs");
    }
    std::string limit_in_words() const {
        return !o_.budget.empty() ? "--budget " + o_.budget
               : o_.budget_tokens ? format("--budget-tokens %lld", (long long)o_.budget_tokens)
                                  : "a length of " + counted(std::llround(whole_.steps), "step");
    }

    // Measures the speed of as many concurrent runs as there will be, with the first configuration that can be trained.
    void probe() {
        std::vector<size_t> order(configs_.size());
        for (size_t i = 0; i < order.size(); i++) order[i] = i;
        std::stable_sort(order.begin(), order.end(),
                         [&](size_t a, size_t b) { return costs_[a].flops_per_token > costs_[b].flops_per_token; });
        run_.begin("measuring the speed");
        std::string why;
        for (const size_t config : order) {
            const detail::TokenCost& cost = costs_[config];
            std::list<Training> all;
            for (int j = 0; j < o_.jobs; j++)
                start(all, {-1, (int)config, j}, (double)probe_steps * cost.tokens_per_step, INFINITY);
            double seconds = 0, step_seconds = 0;
            for (Training& training : all) {
                while (!training.ended) {
                    for (Training& one : all) poll(one);
                    wait_a_little();
                }
                if (!training.result.why.empty()) why = training.result.why;
                seconds = std::max(seconds, training.result.seconds);
                step_seconds = std::max(step_seconds, training.step_seconds);
            }
            if (SignalsHeld::any()) return run_.phase.done();
            if (!(step_seconds > 0)) continue;
            seconds_per_flop_ = step_seconds / (cost.tokens_per_step * cost.flops_per_token);
            startup_seconds_ = std::max(0.0, seconds - (double)probe_steps * step_seconds);
            return run_.phase.done();
        }
        fail("none of the %zu configurations can be trained; the last one: %s", configs_.size(), why.c_str());
    }

    // Seconds for the runs of a rung: their starts, and their steps for each token of a run. The surviving configurations are
    // unknown: the slowest are assumed.
    std::pair<double, double> seconds_of(const Rung& r) const {
        std::vector<double> flops;
        for (const detail::TokenCost& cost : costs_) flops.push_back(cost.flops_per_token);
        std::sort(flops.rbegin(), flops.rend());
        double mean = 0;
        const size_t n = std::min(flops.size(), (size_t)r.configs);
        for (size_t i = 0; i < n; i++) mean += flops[i] / (double)n;
        const double turns = std::ceil((double)r.runs() / o_.jobs) * pace();
        return {turns * startup_seconds_, turns * mean * seconds_per_flop_};
    }
    double seconds_from(size_t rung) const {
        double sum = 0;
        for (size_t k = rung; k < rungs_.size(); k++) {
            const auto [starts, each] = seconds_of(rungs_[k]);
            sum += starts + each * rungs_[k].tokens;
        }
        return sum;
    }
    // Shortens the runs from a rung on, if they would take longer than `seconds`.
    void shorten(size_t from, double seconds) {
        double starts = 0, steps = 0;
        for (size_t k = from; k < rungs_.size(); k++) {
            const auto [start, each] = seconds_of(rungs_[k]);
            starts += start;
            steps += each * rungs_[k].tokens;
        }
        const double part = std::min(1.0, (seconds - starts) / std::max(steps, 1e-9));
        for (size_t k = from; k < rungs_.size(); k++) rungs_[k].tokens *= part;
    }
    // Before a later rung: shortens it to the remaining --budget, by the speed so far.
    void keep_time(size_t rung) {
        if (o_.budget.empty() || has_begun((int)rung)) return;
        const double before = rungs_[rung].tokens, least = rungs_[rung - 1].tokens;
        shorten(rung, parse_duration(o_.budget) - spent());
        for (size_t k = rung; k < rungs_.size(); k++) rungs_[k].tokens = std::max(rungs_[k].tokens, least);
        if (rungs_[rung].tokens < 0.999 * before)
            print_line(talk_, format("rung %zu is shortened to runs of %s tokens, so that it ends in time", rung + 1,
                                     human_count(rungs_[rung].tokens).c_str()));
        save();
    }
    bool has_begun(int rung) const {
        const auto first = results_.lower_bound({rung, 0, 0});
        return first != results_.end() && first->first.rung == rung;
    }
    // Actual over planned time of the runs so far.
    double pace() const {
        double taken = 0, planned = 0;
        for (const auto& [key, r] : results_) {
            if (!r.finished()) continue;
            taken += r.seconds;
            planned += startup_seconds_ + r.flops * seconds_per_flop_;
        }
        return planned > 0 ? taken / planned : 1;
    }
    double spent() const { return spent_before_ + monotonic_seconds() - program_start; }

    void print_plan() const {
        Table table;
        table.section(format("A sweep over %s of %s", counted((int64_t)configs_.size(), "configuration").c_str(),
                             counted((int64_t)dimensions_.size(), "option").c_str()));
        for (size_t d = 0; d < dimensions_.size(); d++)
            table.row(dimensions_[d].option,
                      o_.over[d].substr(o_.over[d].find('=') + 1) + (dimensions_[d].logarithmic() ? ", by magnitude" : ""));
        for (size_t k = 0; k < rungs_.size(); k++)
            table.row(
                format("rung %zu", k + 1),
                format(
                    "%s of %s tokens%s%s", counted(rungs_[k].runs(), "run").c_str(), human_count(rungs_[k].tokens).c_str(),
                    rungs_[k].seeds > 1 ? format(", %d seeds of each of %d", rungs_[k].seeds, rungs_[k].configs).c_str() : "",
                    startup_seconds_ > 0
                        ? format(", about %s", human_duration(seconds_from(k) - seconds_from(k + 1)).c_str()).c_str()
                        : ""));
        table.row("total",
                  format("%s tokens%s; the whole run has %s", human_count(total_tokens(rungs_)).c_str(),
                         startup_seconds_ > 0 ? format(", about %s", human_duration(seconds_from(0)).c_str()).c_str() : "",
                         human_count(whole_.tokens).c_str()));
        if (!results_.empty()) table.row("ended before", counted((int64_t)results_.size(), "run"));
        fputs(table.str(Paint::for_terminal(is_terminal(talk_)), 80).c_str(), talk_);
        fputs("\n", talk_);
        fflush(talk_);
    }

    // ---- trainings ----
    struct Training {
        TrialKey key;
        TrialResult result;
        std::string folder;
        double limit_seconds, step_seconds = NAN;
        std::optional<Apart> process;
        bool ended = false;
    };
    std::string file(const std::string& name) const { return o_.out + "/" + name; }
    static std::string name_of(const TrialKey& key) {
        return key.rung < 0 ? format("speed-%d", key.seed)
                            : format("rung-%d-config-%d-seed-%d", key.rung + 1, key.config, key.seed);
    }

    void start(std::list<Training>& all, const TrialKey& key, double tokens, double limit_seconds) {
        const detail::TokenCost& cost = costs_[(size_t)key.config];
        const TrainOptions p = detail::options_of_trial(
            detail::shortened_to(detail::options_with(base_, dimensions_, configs_[(size_t)key.config]), cost, whole_, tokens),
            std::max(1, run_.ctx.threads / o_.jobs), key.rung < 0 ? 0 : key.seed);
        Training& training = all.emplace_back();
        training.key = key;
        training.result.tokens = (double)p.train_iters * cost.tokens_per_step;
        training.result.flops = training.result.tokens * cost.flops_per_token;
        training.folder = file("running/" + name_of(key));
        training.limit_seconds = limit_seconds;
        std::filesystem::remove_all(training.folder);  // of an interrupted search
        make_directory(training.folder);
        const std::string config = training.folder + "/run.toml";
        write_file_atomically(config, config_text(p));
        training.process.emplace(
            Strings{path_of_this_program(), "train", "--config", config, "--out", training.folder + "/run"}, "/dev/null",
            training.folder + "/output.txt", limit_seconds);
    }

    // Checks whether a training has ended, and reads its result. Keeps its log, removes its checkpoint.
    void poll(Training& training) {
        if (training.ended) return;
        const std::optional<int> status = SignalsHeld::status_of(*training.process);
        if (!status) return;
        training.ended = true;
        const std::string log = training.folder + "/run/log.jsonl";
        const double seconds = training.process->seconds();
        TrialResult result = detail::read_result(log, training.folder + "/output.txt", *status, training.limit_seconds);
        result.seconds = seconds;
        result.tokens = training.result.tokens;
        result.flops = training.result.flops;
        training.result = result;
        training.step_seconds = median_step_seconds(log);
        if (training.key.rung >= 0 && !SignalsHeld::any() && std::filesystem::exists(log)) {
            make_directory(file("logs"));
            std::filesystem::rename(log, file("logs/" + name_of(training.key) + ".jsonl"));
        }
        std::filesystem::remove_all(training.folder);
        std::error_code error;
        std::filesystem::remove(file("running"), error);  // if it is empty
    }

    // Runs the trainings of a rung that are missing from the table.
    void run_rung(int rung) {
        const Rung& r = rungs_[(size_t)rung];
        std::vector<int> chosen;
        if (rung > 0) chosen = survivors(results_, rung - 1, r.configs);
        else
            for (int i = 0; i < (int)configs_.size(); i++) chosen.push_back(i);
        if (chosen.empty()) fail("every run of rung %d has failed%s", rung, first_reason(rung - 1).c_str());
        std::vector<TrialKey> todo;
        for (const int config : chosen)
            for (int seed = 0; seed < r.seeds; seed++)
                if (!results_.count({rung, config, seed})) todo.push_back({rung, config, seed});
        const size_t all = chosen.size() * (size_t)r.seeds;
        std::list<Training> running;
        for (size_t next = 0; next < todo.size() || !running.empty(); wait_a_little()) {
            if (SignalsHeld::any()) next = todo.size();
            for (; next < todo.size() && (int)running.size() < o_.jobs; next++) {
                const detail::TokenCost& cost = costs_[(size_t)todo[next].config];
                start(running, todo[next], r.tokens,
                      60 + 20 * pace() * (startup_seconds_ + r.tokens * cost.flops_per_token * seconds_per_flop_));
            }
            for (auto training = running.begin(); training != running.end();) {
                poll(*training);
                if (!training->ended) {
                    ++training;
                    continue;
                }
                if (!SignalsHeld::any()) {
                    results_[training->key] = training->result;
                    save();
                    print_run(*training, all);
                }
                training = running.erase(training);
            }
        }
    }
    std::string first_reason(int rung) const {
        for (const auto& [key, r] : results_)
            if (key.rung == rung && !r.why.empty()) return "; the first one: " + r.why;
        return "";
    }

    std::string in_words(int config) const {
        std::string words;
        for (size_t d = 0; d < dimensions_.size(); d++)
            words += (d ? " " : "") + dimensions_[d].option + "=" + configs_[(size_t)config][d];
        return words;
    }
    void print_run(const Training& training, size_t all) const {
        const TrialResult& r = training.result;
        size_t done = 0;
        for (const auto& [key, other] : results_) done += key.rung == training.key.rung;
        double left = seconds_from((size_t)training.key.rung + 1);
        const auto [starts, each] = seconds_of(rungs_[(size_t)training.key.rung]);
        left += (starts + each * rungs_[(size_t)training.key.rung].tokens) * (double)(all - done) / (double)all;
        const std::string right = format("  %.1f s, %s left", r.seconds, human_duration(left).c_str());
        const std::string words = format("rung %d, run %zu/%zu: ", training.key.rung + 1, done, all) +
                                  (r.finished() ? format("loss %.4f, ", r.loss) : "failed, ") +
                                  (rungs_[(size_t)training.key.rung].seeds > 1 ? format("seed %d, ", training.key.seed) : "");
        const int room = 80 - display_width(right);
        const Choices& values = configs_[(size_t)training.key.config];
        std::string choices = in_words(training.key.config);
        if (display_width(words + choices) > room) choices = joined(values);  // in the plan's order
        print_line(talk_, pad_right(cut_text(words + choices, room), room) + right);
        if (!r.finished()) print_line(talk_, cut_text("  " + r.why, 80));
    }

    // ---- the table of runs ----
    // Identifies the data of a search, which may change under the same name.
    std::string data_in_words() const {
        std::string text;
        for (const Strings* words : {&o_.data_path, &o_.valid_data_path})
            for (const std::string& path : words->empty() ? Strings() : parse_data_path(*words).paths) {
                const TokenDataset data = TokenDataset::open(path);
                text += format("%s%lld documents of %lld tokens with checksum %08x", text.empty() ? "" : ", ",
                               (long long)data.n_documents(), (long long)data.n_tokens(), data.checksum_of_ends());
            }
        return text;
    }
    // The options that must match when a search is resumed.
    nlohmann::ordered_json identity() const {
        static const std::set<std::string> free = {"out", "jobs", "threads", "json", "quiet", "dry-run"};
        nlohmann::ordered_json all = nlohmann::ordered_json::object();
        SweepOptions o = o_;
        for_each_option(o, [&](const Option& option, auto& value) {
            const std::string name = option_name(option.field);
            if (o.given.count(name) && !free.count(name)) all[name] = toml_value(value);
        });
        return all;
    }
    void save() const {
        nlohmann::ordered_json j = {{"about", written_by("sweep")},
                                    {"options", identity()},
                                    {"data", data_},
                                    {"seconds", spent()},
                                    {"startup_seconds", startup_seconds_},
                                    {"seconds_per_flop", seconds_per_flop_}};
        for (const Rung& r : rungs_) j["rungs"].push_back({{"configs", r.configs}, {"seeds", r.seeds}, {"tokens", r.tokens}});
        j["runs"] = nlohmann::ordered_json::array();
        for (const auto& [key, r] : results_) {
            nlohmann::ordered_json run = {{"rung", key.rung}, {"config", key.config}, {"seed", key.seed}};
            for (size_t d = 0; d < dimensions_.size(); d++) run[dimensions_[d].option] = configs_[(size_t)key.config][d];
            run["loss"] = r.finished() ? nlohmann::ordered_json(r.loss) : nlohmann::ordered_json();
            run["seconds"] = r.seconds;
            run["tokens"] = r.tokens;
            run["flops"] = r.flops;
            if (!r.why.empty()) run["failed"] = r.why;
            j["runs"].push_back(std::move(run));
        }
        write_file_atomically(file("sweep.json"), json_text(j, 1) + "\n");
    }
    // Returns true if --out contains this search, which is then resumed; fails if it contains a different one.
    bool load() {
        const std::string path = file("sweep.json");
        std::error_code error;
        if (!std::filesystem::exists(path, error)) return false;
        lock_.emplace(o_.out);
        const nlohmann::ordered_json j = nlohmann::ordered_json::parse(read_whole_file(path), nullptr, false);
        if (j.is_discarded() || !j.is_object() || RunLog::text(j, "about") != written_by("sweep"))
            fail("%s is damaged, or was not written by sweep; HINT: give another --out", path.c_str());
        try {
            check_same(j.at("options"), identity());
            data_ = data_in_words();
            if (const std::string before = RunLog::text(j, "data"); !before.empty() && before != data_)
                fail_usage("%s has a sweep over other data: %s there, %s now; HINT: that data, or another --out",
                           o_.out.c_str(), before.c_str(), data_.c_str());
            spent_before_ = j.at("seconds");
            startup_seconds_ = j.at("startup_seconds");
            seconds_per_flop_ = j.at("seconds_per_flop");
            for (const auto& r : j.at("rungs")) rungs_.push_back({r.at("configs"), r.at("seeds"), r.at("tokens")});
            for (const auto& run : j.at("runs")) {
                TrialResult r;
                if (run.at("loss").is_number()) r.loss = run["loss"];
                r.seconds = run.at("seconds");
                r.tokens = run.at("tokens");
                r.flops = run.at("flops");
                r.why = RunLog::text(run, "failed");
                const TrialKey key = {run.at("rung"), run.at("config"), run.at("seed")};
                if (key.config < 0 || key.config >= (int)configs_.size()) throw std::out_of_range("config");
                results_[key] = r;
            }
        } catch (const Error&) {
            throw;
        } catch (const std::exception&) {
            fail("%s is damaged; HINT: give another --out", path.c_str());
        }
        return true;
    }
    void check_same(const nlohmann::ordered_json& there, const nlohmann::ordered_json& now) const {
        const auto value = [](const nlohmann::ordered_json& of, const std::string& name) {
            return of.contains(name) ? of[name].get<std::string>() : std::string("not given");
        };
        Strings names;
        for (const auto* of : {&there, &now})
            for (const auto& [name, unused] : of->items()) names.push_back(name);
        for (const std::string& name : names)
            if (value(there, name) != value(now, name))
                fail_usage("%s has a sweep with another --%s: %s there, %s now; HINT: the same options, or another --out",
                           o_.out.c_str(), name.c_str(), value(there, name).c_str(), value(now, name).c_str());
    }

    // ---- results
    // ---------------------------------------------------------------------------------------------------------------
    void report() {
        const auto last = (int)rungs_.size() - 1;
        const std::vector<Standing> found = standings(results_, last);
        if (found.empty() || found[0].runs == 0) fail("every run of the last rung has failed%s", first_reason(last).c_str());
        write_best(found[0]);
        std::vector<ComputePoint> points;
        for (int k = 0; k <= last; k++)
            for (const Standing& s : standings(results_, k))
                if (s.runs > 0) points.push_back({results_.lower_bound({k, s.config, 0})->second.flops / 1e15, s.mean});
        SweepFindings all = {dimensions_, configs_, rungs_, results_, found, best_at_each_compute(points), {}, ""};
        try {
            all.law = fit_power_law(all.points);
        } catch (const Error& e) {
            all.no_law = e.what();
        }
        write_file_atomically(file("sweep.html"), sweep_page(all));
        if (o_.json) return print_json(result_json(all));
        print_result(all);
    }
    std::string command() const { return "./train_gpt train --config " + shell_word(file("best.toml")); }

    // The options of the whole run with the best configuration: as long in tokens as the given run.
    void write_best(const Standing& best) const {
        const TrainOptions p = detail::shortened_to(detail::options_with(base_, dimensions_, configs_[(size_t)best.config]),
                                                    costs_[(size_t)best.config], whole_, whole_.tokens);
        write_file_atomically(
            file("best.toml"),
            format("# %s: the best of %zu configurations\n# %s: validation loss %.4f%s after %s tokens\n# %s\n",
                   written_by("sweep").c_str(), configs_.size(), in_words(best.config).c_str(), best.mean,
                   best.runs > 1 ? format(" +- %.4f", best.error).c_str() : "", human_count(rungs_.back().tokens).c_str(),
                   command().c_str()) +
                config_text(p));
    }

    void print_result(const SweepFindings& all) const {
        printf("\nThe last rung, by the mean validation loss after %s tokens\n    loss  std. error  runs  configuration\n",
               human_count(rungs_.back().tokens).c_str());
        for (const Standing& s : all.found)
            puts(cut_text(format("%8s  %10s  %4s  %s", s.runs ? format("%.4f", s.mean).c_str() : "failed",
                                 s.runs > 1 ? format("%.4f", s.error).c_str() : "-",
                                 format("%d/%d", s.runs, s.runs + s.failed).c_str(), in_words(s.config).c_str()),
                          80)
                     .c_str());
        Strings lines;
        if (all.found.size() > 1 && all.found[0].runs > 1 && all.found[1].runs > 1 &&
            all.found[1].mean - all.found[0].mean <
                2 * std::sqrt(all.found[0].error * all.found[0].error + all.found[1].error * all.found[1].error))
            lines.push_back("note: the second is no worse within twice the standard error");
        for (const std::string& note : edges(all.found[0])) lines.push_back("note: " + note);
        size_t failed = 0;
        for (const auto& [key, r] : results_) failed += !r.finished();
        if (failed) lines.push_back(format("note: %zu of %s failed", failed, counted((int64_t)results_.size(), "run").c_str()));
        lines.push_back(all.no_law.empty() ? law_in_words(all.law) + format("; of %zu computes", all.points.size())
                                           : "no fit of loss over compute: " + all.no_law);
        for (const std::string& line : lines)
            for (const std::string& part : wrap_text(line, 80)) puts(part.c_str());
        printf("\n%s has charts. The whole run with the best:\n  %s\n", file("sweep.html").c_str(), command().c_str());
        if (base_.parametrization != "standard")
            printf("and of a model of four times the width:\n  %s \\\n      --hidden-size %d --num-attention-heads %d\n",
                   command().c_str(), 4 * run_.c.C, 4 * run_.c.NH);
    }
    // Notes about ranges with the best value near an end: values beyond it may be better.
    Strings edges(const Standing& best) const {
        Strings notes;
        for (size_t d = 0; d < dimensions_.size(); d++) {
            const Dimension& of = dimensions_[d];
            if (!of.range()) continue;
            const double x = std::stod(configs_[(size_t)best.config][d]);
            const double u =
                of.logarithmic() ? std::log(x / of.low) / std::log(of.high / of.low) : (x - of.low) / (of.high - of.low);
            if (u < 0.1 || u > 0.9)
                notes.push_back(format("the best %s, %s, is near the %s end of %s; HINT: a wider range", of.option.c_str(),
                                       configs_[(size_t)best.config][d].c_str(), u < 0.5 ? "lower" : "upper",
                                       o_.over[d].c_str()));
        }
        return notes;
    }
    nlohmann::ordered_json result_json(const SweepFindings& all) const {
        nlohmann::ordered_json j = {{"command", command()}, {"last_rung", nlohmann::ordered_json::array()}};
        for (const Standing& s : all.found) {
            nlohmann::ordered_json row;
            for (size_t d = 0; d < dimensions_.size(); d++)
                row["configuration"][dimensions_[d].option] = configs_[(size_t)s.config][d];
            row["loss"] = s.mean;
            row["standard_error"] = s.error;
            row["runs"] = s.runs;
            row["failed"] = s.failed;
            j["last_rung"].push_back(row);
        }
        if (all.no_law.empty())
            j["loss_over_compute"] = {
                {"a", all.law.a}, {"b", all.law.b}, {"a_error", all.law.a_error}, {"b_error", all.law.b_error}};
        else j["loss_over_compute"] = all.no_law;
        return j;
    }

    Run& run_;
    const SweepOptions& o_;
    TrainOptions base_;  // as given
    FILE* talk_;
    std::optional<DirectoryLock> lock_;
    std::vector<Dimension> dimensions_;
    std::vector<Choices> configs_;
    std::vector<detail::TokenCost> costs_;  // of each
    detail::WholeRun whole_;
    std::string data_;  // data_in_words, once it is needed
    std::vector<Rung> rungs_;
    TrialResults results_;
    double startup_seconds_ = 0, seconds_per_flop_ = 0, spent_before_ = 0;
};
