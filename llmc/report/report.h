// A run, or a comparison of several, as one page: report.html, self-contained (inline SVG, one script, no external reference),
// light and dark. It is made from the records of log.jsonl (see logger.h), in memory during the run or read back afterwards.
//   RunLog            what the page needs from the records, a few MB whatever the run's length: curves in buckets, thinned
//                     samples, and the last events
//   read_log          log.jsonl -> RunLog: the last run in the file
//   cut_log           removes the records after a step from log.jsonl
//   render_report     RunLog -> HTML; write_report writes it atomically
//   render_comparison several RunLogs -> HTML
//   write_loss_svg    RunLog -> the loss curve alone as an .svg file
//
// A page has bounded size: a curve has at most 750 buckets, however long the run; in a comparison, all runs share the buckets
// of four curves. Buckets keep the minimum and maximum values, so no spike is lost. Without samples, events and options, a
// run's page is below 400 KB and a comparison below 1.5 MB; below 2.5 MB if the runs compare answers, which four charts show.
#pragma once
#include <array>
#include <charconv>
#include <ctime>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chart.h"
#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "report_style.h"

// "2026-11-21 06:46:54 +0900"
inline std::string local_time(time_t t) {
    tm parts{};
    char text[64];
    localtime_r(&t, &parts);
    return std::string(text, strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %z", &parts));
}

// ---- records ---------------------------------------------------------------------------------------------------------------
// The numbers of a step that the page shows. The first `curves` of them are kept as curves, the others from the newest step
// only. NaN: not known.
struct StepNumbers {
    static constexpr size_t curves = 15, count = 21;
    static constexpr std::string_view names[count] = {"loss",
                                                      "z_loss",
                                                      "grad_norm",
                                                      "lr",
                                                      "tokens_per_s",
                                                      "global_batch",
                                                      "lse_mean",
                                                      "mfu",
                                                      "memory_bytes",
                                                      "tokens",
                                                      "seconds",
                                                      "reward_margin",
                                                      "reward_accuracy",
                                                      "reward_chosen",
                                                      "reward_rejected",
                                                      "step",
                                                      "consumed_samples",
                                                      "model_tflops",
                                                      "step_ms",
                                                      "eta_s",
                                                      "energy_joules"};
    double values[count];

    StepNumbers() { std::fill_n(values, count, NAN); }
    static size_t index(std::string_view name) { return std::find(names, names + count, name) - names; }
    double operator[](std::string_view name) const { return values[index(name)]; }
    void set(std::string_view name, double value) {
        if (const size_t i = index(name); i < count) values[i] = value;
    }
};

// Parses the line of a step whose values are numbers, nulls, and objects of these, as JsonLines writes nearly all of them, ten
// times as fast as a JSON parser. Returns false and reads nothing for any other line, JSON or not.
inline bool scan_step(std::string_view line, StepNumbers& step) {
    constexpr std::string_view start = "{\"kind\":\"step\",";
    if (line.substr(0, start.size()) != start) return false;
    const char *at = line.data() + start.size(), *const end = line.data() + line.size();
    StepNumbers found;
    const auto is = [&](char c) {
        const bool there = at < end && *at == c;
        if (there) at++;
        return there;
    };
    bool inside = false;  // inside an object that is a value
    for (;;) {
        const char* const name = at + 1;
        if (!is('"')) return false;
        while (at < end && (*at == '_' || (*at >= 'a' && *at <= 'z'))) at++;
        const size_t length = at - name;
        if (!is('"') || !is(':')) return false;
        if (!inside && is('{')) {
            inside = true;
            continue;
        }
        double value = NAN;
        if (end - at > 4 && memcmp(at, "null", 4) == 0) at += 4;
        else {
            const auto [after, error] = std::from_chars(at, end, value);
            if (error != std::errc() || !std::isfinite(value)) return false;
            at = after;
        }
        if (!inside) found.set({name, length}, value);
        if (inside && is('}')) inside = false;
        if (is('}')) break;
        if (!is(',')) return false;
    }
    if (inside || at != end) return false;
    step = found;
    return true;
}

struct RunLog {
    using json = nlohmann::ordered_json;
    static constexpr size_t max_samples = 24, max_events = 200, max_marks = 200, max_abandoned = 50, max_sets = 16;

    json health;    // the newest health record
    json run, end;  // the run record; the end record, null during the run
    StepNumbers newest;
    std::array<Curve, StepNumbers::curves> curves;
    Curve valid, valid_ema;  // of the weights, and of their EMA
    using NamedCurves = std::vector<std::pair<std::string, Curve>>;
    NamedCurves valid_sets;  // of each dataset if there are several, in the log's order
    NamedCurves tasks;       // the accuracy on each, or its first metric; BLEU as a share
    double best_valid = INFINITY;
    int64_t best_step = 0, events_dropped = 0;
    bool batch_varies = false;
    std::vector<json> samples, events;
    std::vector<int64_t> nonfinite_steps;
    std::vector<std::vector<CurvePart>> abandoned;       // losses of steps that a rollback discarded
    std::vector<std::pair<int64_t, std::string>> notes;  // step and text of notable events

    // Adds one record; returns false if it is not one. Fields that are missing or of another type are ignored: a log may be
    // older than the program.
    bool add(const json& j) {
        const std::string kind = text(j, "kind");
        if (!is_record(j)) return false;
        if (kind == "run") {
            *this = RunLog();
            run = j;
        } else if (kind == "change") add_changes(j);
        else if (kind == "step") add_step(step_numbers(j));
        else if (kind == "valid") add_valid(j);
        else if (kind == "tasks") add_tasks(j);
        else if (kind == "health") health = j;
        else if (kind == "sample") add_sample(j);
        else if (kind == "event") add_event(j);
        else if (kind == "end") end = j;
        else return false;
        return true;
    }
    bool add_numbers(const StepNumbers& step) {
        if (!is_step(step["step"])) return false;
        add_step(step);
        return true;
    }
    // Adds a line of log.jsonl, whatever it holds.
    bool add_line(std::string_view line) {
        StepNumbers step;
        return scan_step(line, step) ? add_numbers(step) : add(parse(line));
    }

    // Null for a line that is not a record, or is nested deeper than one: copying it would recurse.
    static json parse(std::string_view line) {
        json j = json::parse(line, nullptr, false);
        return is_record(j) && !nested_deeper_than(j, 16) ? j : json();
    }
    static bool is_record(const json& j) { return j.is_object() && (text(j, "kind") == "run" || is_step(number(j, "step"))); }
    static bool is_step(double step) { return step >= 0 && step < 9e15; }

    static std::string text(const json& j, const char* key) {
        return j.contains(key) && j[key].is_string() ? j[key].get<std::string>() : "";
    }
    static double number(const json& j, const char* key) {
        return j.contains(key) && j[key].is_number() ? j[key].get<double>() : NAN;
    }
    // A count of steps, tokens, ...; 0 if it is missing.
    static int64_t whole(double x) { return is_step(x) ? (int64_t)x : 0; }
    static int64_t whole(const json& j, const char* key) { return whole(number(j, key)); }
    const Curve& curve(std::string_view name) const { return curves[StepNumbers::index(name)]; }
    bool has_steps() const { return !std::isnan(newest["step"]); }
    int64_t step() const { return whole(newest["step"]); }

private:
    static StepNumbers step_numbers(const json& j) {
        StepNumbers step;
        for (const auto& [name, value] : j.items())
            if (value.is_number()) step.set(name, value.get<double>());
        return step;
    }
    void add_step(StepNumbers s) {
        const int64_t step = whole(s["step"]);
        // Older versions restarted `seconds` on a resume.
        const double before = newest["seconds"];
        if (s["seconds"] >= before) earlier_ = 0;
        else if (s["seconds"] + earlier_ < before) earlier_ = before;
        s.set("seconds", s["seconds"] + earlier_);
        for (size_t i = 0; i < StepNumbers::curves; i++) curves[i].add(step, s.values[i]);
        if (!std::isfinite(s["loss"]) || !std::isfinite(s["grad_norm"]))
            if (nonfinite_steps.size() < max_marks) nonfinite_steps.push_back(step);
        if (std::fabs(s["global_batch"] - newest["global_batch"]) > 0) batch_varies = true;
        newest = s;
        end = nullptr;  // the run was resumed
    }
    void add_changes(const json& j) {
        if (!run.is_object()) return;
        for (const auto& [key, value] : j.items())
            if (key != "kind" && key != "step") run[key] = value;
    }
    void add_valid(const json& j) {
        const int64_t step = whole(j, "step");
        const double loss = number(j, "loss");
        valid.add(step, loss);
        if (const double ema_loss = number(j, "ema_loss"); std::isfinite(ema_loss)) valid_ema.add(step, ema_loss);
        if (j.contains("sets") && j["sets"].is_object())
            for (const auto& [name, value] : j["sets"].items())
                if (Curve* curve = named(valid_sets, name); curve && value.is_number()) curve->add(step, value.get<double>());
        if (loss < best_valid) {
            best_valid = loss;
            best_step = step;
        }
    }
    void add_tasks(const json& j) {
        if (!j.contains("tasks") || !j["tasks"].is_object()) return;
        for (const auto& [name, metrics] : j["tasks"].items())
            if (Curve* curve = named(tasks, name); curve && metrics.is_object() && !metrics.empty()) {
                const std::string metric = metrics.contains("acc") ? "acc" : metrics.begin().key();
                curve->add(whole(j, "step"), number(metrics, metric.c_str()) / (metric == "bleu" ? 100 : 1));
            }
    }
    // When there are too many, every second sample is dropped, so that those left cover the whole run.
    void add_sample(const json& j) {
        samples.push_back(j);
        if (samples.size() <= max_samples) return;
        std::vector<json> kept;
        for (size_t i = 0; i < samples.size(); i += 2) kept.push_back(samples[i]);
        samples = kept;
    }
    void add_event(const json& j) {
        if (events.size() >= max_events) {
            events.erase(events.begin());
            events_dropped++;
        }
        events.push_back(j);
        const std::string event = text(j, "event");
        const int64_t step = whole(j, "step");
        if (notes.size() >= max_marks) return;
        if (event == "fp8") notes.emplace_back(step, "FP8");
        if (event == "rollback") roll_back(step);
    }
    // Discards the steps after this one, which will be repeated.
    void roll_back(int64_t step) {
        notes.emplace_back(this->step(), "rollback");
        if (abandoned.size() == max_abandoned) abandoned.erase(abandoned.begin());
        for (size_t i = 0; i < StepNumbers::curves; i++) {
            std::vector<CurvePart> tail = curves[i].cut_after(step);
            if (i == 0) abandoned.push_back(std::move(tail));
        }
        valid.cut_after(step);
        valid_ema.cut_after(step);
        for (NamedCurves* all : {&valid_sets, &tasks})
            for (auto& [name, curve] : *all) curve.cut_after(step);
    }
    static Curve* named(NamedCurves& all, const std::string& name) {
        for (auto& [known, curve] : all)
            if (known == name) return &curve;
        return all.size() < max_sets ? &all.emplace_back(name, Curve()).second : nullptr;
    }
    double earlier_ = 0;  // seconds of the run before it was resumed
};

// ---- log.jsonl -------------------------------------------------------------------------------------------------------------
// Calls take(line, offset) for each line, without its newline. Memory use is bounded: a line longer than any record is passed
// as an empty one.
template <class Take>
void for_each_line(const std::string& path, Take take) {
    std::ifstream in(path);
    if (!in) fail("cannot read %s: %s", path.c_str(), strerror(errno));
    std::vector<char> line(1 << 20);
    for (int64_t at = 0; in.getline(line.data(), (std::streamsize)line.size()).gcount() > 0;) {
        const int64_t start = at;
        at += in.gcount();
        const bool too_long = in.fail();
        const size_t length = too_long ? 0 : (size_t)(in.gcount() - !in.eof());
        if (too_long) {
            in.clear();
            in.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
            at += in.gcount();
        }
        take(std::string_view(line.data(), length), start);
    }
    if (in.bad()) fail("cannot read %s: %s", path.c_str(), strerror(errno));
}

// The last run in the file. Lines that are not records (after a crash in the middle of a write) are counted and ignored.
inline RunLog read_log(const std::string& path, int64_t* passed_over = nullptr) {
    RunLog log;
    int64_t records = 0, others = 0;
    for_each_line(path, [&](std::string_view line, int64_t) { (log.add_line(line) ? records : others)++; });
    if (records == 0)
        fail("%s holds no records; HINT: it is the log.jsonl that a training run writes into its --out directory",
             path.c_str());
    if (passed_over) *passed_over = others;
    return log;
}

struct LogCut {
    int64_t others;      // removed lines that were not records
    double end_seconds;  // duration of a run that ended at this step; NaN: none did
};

// Removes the records after `step` from a log: a run that resumes there writes them again. This truncates the file after the
// line of that step; late records of earlier steps in the removed part, such as a checkpoint's, are kept. Everything before is
// left alone, including steps that a rollback discarded.
inline LogCut cut_log(const std::string& path, int64_t step) {
    int64_t cut = -1, others = 0;
    double end_seconds = NAN;
    std::string late;
    for_each_line(path, [&](std::string_view line, int64_t start) {
        constexpr std::string_view step_start = "{\"kind\":\"step\",\"step\":";
        std::string kind = "step";
        double of = NAN;
        if (line.substr(0, step_start.size()) == step_start && line.back() == '}')
            std::from_chars(line.data() + step_start.size(), line.data() + line.size(), of);
        if (!RunLog::is_step(of)) {
            const RunLog::json j = RunLog::parse(line);
            kind = RunLog::text(j, "kind");
            of = (double)RunLog::whole(j, "step");
            if (kind == "run") end_seconds = NAN;
            if (kind == "end" && of == (double)step) end_seconds = RunLog::number(j, "seconds");
        }
        const bool goes = kind.empty() || kind == "end" || of > (double)step;
        if (kind == "run" || (kind == "step" && !goes)) {
            cut = -1;
            others = 0;
            late.clear();
        } else if (cut < 0 && goes) cut = start;
        else if (cut >= 0 && !goes) late.append(line) += '\n';
        others += cut >= 0 && kind.empty();
    });
    if (cut < 0) return {0, end_seconds};
    std::filesystem::resize_file(path, (uintmax_t)cut);
    if (!(std::ofstream(path, std::ios::app) << late).flush()) fail("cannot write %s: %s", path.c_str(), strerror(errno));
    return {others, end_seconds};
}

// ---- charts of runs --------------------------------------------------------------------------------------------------------
struct NamedRun {
    std::string name;
    const RunLog* log;
};

// Sets the y range to that of the curves without their start: the first fall of the loss, or the first steps with cold caches,
// would flatten everything else. A short curve, or one whose start is no higher, is shown whole.
inline void set_range(Chart& c, double below, double above) {
    const auto range = [&](double skip) {
        double lo = INFINITY, hi = -INFINITY;
        for (const Series& s : c.series) {
            if (s.pale || s.parts.empty()) continue;
            const double from = s.parts.size() < 50 ? -INFINITY : s.parts[0].x + skip * (s.parts.back().x - s.parts[0].x);
            for (const CurvePart& p : s.parts)
                if (p.x >= from) {
                    lo = std::min(lo, p.low);
                    hi = std::max(hi, p.high);
                }
        }
        return std::pair{lo, hi};
    };
    const double all_hi = range(0).second;
    std::tie(c.lo, c.hi) = range(c.skip);
    if (all_hi - c.lo < 1.3 * (c.hi - c.lo)) c.hi = all_hi;
    if (std::isfinite(c.baseline)) {
        c.lo = std::min(c.lo, c.baseline);
        c.hi = std::max(c.hi, c.baseline);
    }
    if (c.from_zero) c.lo = std::min(c.lo, 0.0);
    std::tie(c.lo, c.hi) = axis_ends(c.lo, c.hi);
    const double length = c.hi - c.lo;
    c.lo -= c.from_zero ? 0 : below * length;
    c.hi += above * length;
}

// In a comparison each run has its color; on a run's own page each quantity has one.
inline std::string style_of(const std::vector<NamedRun>& runs, size_t run, const char* alone) {
    return runs.size() == 1 ? alone : format(run / 8 % 2 ? "run%zu dashed" : "run%zu", run % 8);
}
// A run's share of the buckets: all runs of a page together have no more than four curves.
inline std::vector<CurvePart> shared_parts(const std::vector<NamedRun>& runs, const Curve& curve) {
    return thinned(curve.parts(), std::max<size_t>(1, std::min(Curve::max_parts, 4 * Curve::max_parts / runs.size())));
}

// Training loss; for a single run also its validation loss, the unigram baseline and notable events.
inline Chart loss_chart(const std::vector<NamedRun>& runs, int width, int height) {
    Chart c;
    c.id = "loss";
    c.title = runs.size() == 1 ? "Loss" : "Training loss";
    c.width = width;
    c.height = height;
    c.decimals = 3;
    c.skip = 0.04;
    for (size_t i = 0; i < runs.size(); i++)
        c.series.push_back({runs.size() == 1 ? "train" : runs[i].name, style_of(runs, i, "train"),
                            shared_parts(runs, runs[i].log->curve("loss")), true, false, false, false, (int)i});
    if (runs.size() == 1) {
        const RunLog& log = *runs[0].log;
        if (!log.valid.empty()) c.series.push_back({"validation", "valid", log.valid.parts(), false, true});
        if (!log.valid_ema.empty()) c.series.push_back({"EMA", "other", log.valid_ema.parts(), false, true});
        for (const std::vector<CurvePart>& parts : log.abandoned)
            c.series.push_back({"", "abandoned", parts, false, false, false, true});
        c.marks = log.nonfinite_steps;
        c.notes = log.notes;
        c.baseline = RunLog::number(log.run, "unigram_loss");
        c.baseline_name = "unigram";
    }
    set_range(c, 0.05, 0.05);
    return c;
}

// For a single run: a curve for each validation dataset, or for each task.
inline Chart chart_by_name(const char* id, const char* title, const RunLog::NamedCurves& curves) {
    Chart c;
    c.id = id;
    c.title = title;
    c.decimals = 3;
    c.skip = 0.04;
    for (const auto& [name, curve] : curves)
        c.series.push_back({name, format("run%zu", c.series.size() % 8), curve.parts(), false, true});
    set_range(c, 0.05, 0.05);
    return c;
}

// For several runs: adds a chart of curve_of(log), which may be null, if one has such a curve.
template <class CurveOf>
void add_comparison(std::vector<Chart>& charts, const std::vector<NamedRun>& runs, const std::string& id,
                    const std::string& title, CurveOf curve_of) {
    Chart c;
    c.id = id;
    c.title = title;
    c.decimals = 3;
    c.skip = 0.04;
    bool any = false;
    for (size_t i = 0; i < runs.size(); i++) {
        const Curve none, *found = curve_of(*runs[i].log), &curve = found ? *found : none;
        any |= !curve.empty();
        c.series.push_back({runs[i].name, style_of(runs, i, ""), shared_parts(runs, curve), false, true, false, false, (int)i});
    }
    set_range(c, 0.05, 0.05);
    if (any) charts.push_back(std::move(c));
}
// A chart for each name that a run has.
inline void add_comparisons_by_name(std::vector<Chart>& charts, const std::vector<NamedRun>& runs, const char* id,
                                    const char* title, RunLog::NamedCurves RunLog::*curves) {
    std::vector<std::string> names;
    for (const NamedRun& run : runs)
        for (const auto& [name, curve] : run.log->*curves)
            if (std::find(names.begin(), names.end(), name) == names.end() && names.size() < RunLog::max_sets)
                names.push_back(name);
    for (size_t i = 0; i < names.size(); i++)
        add_comparison(charts, runs, format("%s%zu", id, i + 1), title + (", " + names[i]), [&](const RunLog& log) {
            const auto found = std::find_if((log.*curves).begin(), (log.*curves).end(),
                                            [&](const auto& one) { return one.first == names[i]; });
            return found == (log.*curves).end() ? nullptr : &found->second;
        });
}
// What is measured now and then has charts of its own: the validation loss, that of each dataset if there are several, and tasks.
inline std::vector<Chart> validation_charts(const std::vector<NamedRun>& runs) {
    std::vector<Chart> charts;
    if (runs.size() > 1) {
        add_comparison(charts, runs, "valid0", "Validation loss", [](const RunLog& log) { return &log.valid; });
        add_comparisons_by_name(charts, runs, "valid", "Validation loss", &RunLog::valid_sets);
        add_comparisons_by_name(charts, runs, "task", "Accuracy", &RunLog::tasks);
        return charts;
    }
    const RunLog& log = *runs[0].log;
    if (log.valid_sets.size() > 1) charts.push_back(chart_by_name("valid_sets", "Validation loss by data set", log.valid_sets));
    if (!log.tasks.empty()) charts.push_back(chart_by_name("tasks", "Accuracy on tasks", log.tasks));
    return charts;
}

// A quantity of a step that gets a chart if the log has it.
struct Quantity {
    const char *field, *title;
    double scale;  // factor from the log's unit to the title's
    bool smooth, from_zero, steps;
};
constexpr Quantity quantities[] = {
    {"reward_margin", "Margin of rewards", 1, true, false, false},
    {"reward_accuracy", "Pairs with the higher reward for the chosen answer, %", 100, true, true, false},
    {"reward_chosen", "Reward of chosen answers", 1, true, false, false},
    {"reward_rejected", "Reward of rejected answers", 1, true, false, false},
    {"lr", "Learning rate", 1, false, true, false},
    {"grad_norm", "Gradient norm", 1, true, true, false},
    {"tokens_per_s", "Tokens per second", 1, true, true, false},
    {"mfu", "Model FLOPs utilization (MFU), %", 100, true, true, false},
    {"memory_bytes", "Memory in use, GiB", 1.0 / (1 << 30), false, true, false},
    {"z_loss", "z-loss", 1, true, true, false},
    {"lse_mean", "log Z", 1, true, false, false},
    {"global_batch", "Global batch, sequences", 1, false, true, true}};

inline Chart quantity_chart(const std::vector<NamedRun>& runs, Quantity q) {
    Chart c;
    c.id = q.field;
    c.title = q.title;
    c.from_zero = q.from_zero;
    c.skip = q.smooth ? 0.005 : 0;
    if (c.id == "memory_bytes" && std::all_of(runs.begin(), runs.end(), [](const NamedRun& run) {
            return !(run.log->curve("memory_bytes").last() >= 1 << 30);
        })) {
        q.scale = 1.0 / (1 << 20);
        c.title = "Memory in use, MiB";
    }
    for (size_t i = 0; i < runs.size(); i++) {
        std::vector<CurvePart> parts = shared_parts(runs, runs[i].log->curve(q.field));
        for (CurvePart& p : parts) {
            p.y *= q.scale;
            p.low *= q.scale;
            p.high *= q.scale;
        }
        c.series.push_back({runs.size() == 1 ? c.title : runs[i].name, style_of(runs, i, "other"), parts, q.smooth, false,
                            q.steps, false, (int)i});
    }
    set_range(c, 0.06, 0.06);
    if (q.field == std::string_view("grad_norm")) {
        double lo = INFINITY, hi = 0;
        for (const Series& s : c.series)
            for (const CurvePart& p : s.parts) {
                lo = std::min(lo, p.low);
                hi = std::max(hi, p.high);
            }
        if (lo > 0 && hi > 20 * lo) {
            c.logarithmic = true;
            c.lo = lo / 1.2;
            c.hi = hi * 1.2;
        }
    }
    return c;
}

inline std::vector<Chart> small_charts(const std::vector<NamedRun>& runs) {
    std::vector<Chart> charts = validation_charts(runs);
    for (const Quantity& q : quantities) {
        const std::string_view field = q.field;
        const bool shown = std::any_of(runs.begin(), runs.end(), [&](const NamedRun& run) {
            if (field == "z_loss") return run.log->curve(field).last() > 0;
            return field == "global_batch" ? run.log->batch_varies : !run.log->curve(field).empty();
        });
        if (shown) charts.push_back(quantity_chart(runs, q));
    }
    return charts;
}

// ---- the page --------------------------------------------------------------------------------------------------------------

// The last value of a series.
inline std::string last_value(const Chart& c, const Series& s) {
    const double last = s.line().back().y;
    return c.decimals >= 0 && std::isfinite(last) ? with_decimals(last, c.decimals) : short_number(last);
}

// Line and name of a series with its last value; only the value where the chart's title already names it.
inline std::string legend_entry(const Chart& c, const Series& s, size_t index) {
    if (s.name.empty() || s.parts.empty()) return "";
    const std::string value = format("<b data-series=\"%zu\">%s</b>", index, last_value(c, s).c_str());
    if (s.name == c.title) return "<span class=\"key\">" + value + "</span>";
    return format("<button type=\"button\" class=\"key\" data-toggle=\"%zu\"><i class=\"%s\"></i>%s %s</button>", index,
                  s.style.c_str(), xml_escape(s.name).c_str(), value.c_str());
}

inline std::string chart_card(const Chart& c) {
    std::string legend, said = c.title + " over steps";  // said: the text for screen readers
    for (size_t i = 0; i < c.series.size(); i++) {
        const Series& s = c.series[i];
        legend += legend_entry(c, s, i);
        if (!s.name.empty() && !s.parts.empty())
            said += (i ? ", " : ": ") + (s.name == c.title ? "" : s.name + " ") + last_value(c, s) + " at step " +
                    with_commas(RunLog::whole(s.parts.back().x));
    }
    if (std::isfinite(c.baseline))
        legend += format("<span class=\"key\"><i class=\"baseline\"></i>%s <b>%s</b></span>",
                         xml_escape(c.baseline_name).c_str(), with_decimals(c.baseline, 3).c_str());
    const std::string title = xml_escape(c.title), svg = draw_chart(c);
    return format(
               "<figure class=\"card\"><figcaption><h2>%s</h2><span class=\"keys\"><span class=\"at\"></span>%s</span>"
               "<span class=\"tools\" hidden=\"\"><button type=\"button\" data-do=\"log\" aria-pressed=\"%s\" "
               "aria-label=\"%s: logarithmic axis\">log</button>"
               "<button type=\"button\" data-do=\"csv\" aria-label=\"%s: save as CSV\">CSV</button></span></figcaption>"
               "<svg id=\"%s\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s\">",
               title.c_str(), legend.c_str(), c.logarithmic ? "true" : "false", title.c_str(), title.c_str(), c.id.c_str(),
               c.width, c.height, xml_escape(said).c_str()) +
           svg + "</svg></figure>\n";
}

// ---- the page's numbers, for its script ----
// JSON that is safe inside a script element.
inline std::string script_json(const RunLog::json& j) {
    std::string out;
    for (const char c : json_text(j)) {
        if (c == '<') out += "\\u003c";
        else out += c;
    }
    return out;
}

inline void append_number(std::string& out, double v, int digits) {
    char text[40];
    const auto end = std::to_chars(text, text + sizeof text, drawable(v), std::chars_format::general, digits).ptr;
    out.append(text, end);
}

class PageData {
public:
    PageData(const std::vector<NamedRun>& runs, const std::vector<Chart>& charts) {
        std::string run_list, chart_list;
        for (const NamedRun& run : runs) {
            run_list += run_list.empty() ? "" : ",\n";
            run_list += "{\"name\":" + script_json(printable(run.name));
            for (const char* unit : {"tokens", "seconds"}) {
                const std::vector<CurvePart> parts = shared_parts(runs, run.log->curve(unit));
                if (parts.empty()) continue;
                run_list += format(",\"%s\":{\"x\":%zu,\"y\":", unit, place(parts));
                run_list += list(
                                parts, [](const CurvePart& p) { return p.y; }, 7) +
                            "}";
            }
            run_list += "}";
        }
        for (const Chart& c : charts) chart_list += (chart_list.empty() ? "" : ",\n") + chart(c);
        text_ = "{\"runs\":[" + run_list + "],\n\"charts\":[" + chart_list + "],\n\"x\":[";
        for (size_t i = 0; i < places_.size(); i++) text_ += (i ? ",\n" : "") + places_[i];
        text_ += "]}";
    }
    const std::string& text() const { return text_; }

private:
    template <class Get>
    static std::string list(const std::vector<CurvePart>& parts, Get get, int digits) {
        std::string out = "[";
        for (const CurvePart& p : parts) {
            if (!drawn(p)) continue;
            if (out.size() > 1) out += ',';
            append_number(out, get(p), digits);
        }
        return out + "]";
    }
    // The steps of a curve, which many curves share, are written once.
    size_t place(const std::vector<CurvePart>& parts) {
        std::string x = list(
            parts, [](const CurvePart& p) { return p.x; }, 10);
        const auto found = std::find(places_.begin(), places_.end(), x);
        const auto place = (size_t)(found - places_.begin());
        if (found == places_.end()) places_.push_back(std::move(x));
        return place;
    }
    std::string chart(const Chart& c) {
        std::string out =
            format("{\"id\":\"%s\",\"title\":%s,\"digits\":%d,\"log\":%s,\"zero\":%s,\"skip\":%g,\"base\":", c.id.c_str(),
                   script_json(printable(c.title)).c_str(), c.decimals, c.logarithmic ? "true" : "false",
                   c.from_zero ? "true" : "false", c.skip);
        if (std::isfinite(c.baseline)) append_number(out, c.baseline, 5);
        else out += "null";
        out += ",\"marks\":" + RunLog::json(c.marks).dump() + ",\"notes\":" + script_json(c.notes) + ",\"series\":[";
        for (const Series& s : c.series) {
            if (&s != &c.series.front()) out += ",\n";
            out +=
                format("{\"run\":%d,\"name\":%s,\"style\":\"%s\",\"smooth\":%s,\"dots\":%s,\"steps\":%s,\"pale\":%s,\"x\":%zu",
                       s.run, script_json(printable(s.name)).c_str(), s.style.c_str(), s.smooth ? "true" : "false",
                       s.dots ? "true" : "false", s.steps ? "true" : "false", s.pale ? "true" : "false", place(s.parts));
            out += ",\"y\":" + list(
                                   s.parts, [](const CurvePart& p) { return p.y; }, 6);
            if (s.smooth || s.pale) {
                out += ",\"low\":" + list(
                                         s.parts, [](const CurvePart& p) { return p.low; }, 5);
                out += ",\"high\":" + list(
                                          s.parts, [](const CurvePart& p) { return p.high; }, 5);
            }
            out += "}";
        }
        return out + "]}";
    }

    std::vector<std::string> places_;
    std::string text_;
};

// ---- parts of the page ----
inline std::string tile(const std::string& label, const std::string& value, const std::string& note) {
    return format("<div class=\"card tile\"><span>%s</span><strong>%s</strong><small>%s</small></div>\n",
                  xml_escape(label).c_str(), xml_escape(value).c_str(), xml_escape(note).c_str());
}

inline std::string speed_note(const StepNumbers& step) {
    const double mfu = step["mfu"], tflops = step["model_tflops"];
    if (mfu >= 0) return format("%.1f%% of peak", 100 * mfu);
    return tflops > 0
               ? three_digits(tflops * 1e12, 1000, {" FLOP/s", " KFLOP/s", " MFLOP/s", " GFLOP/s", " TFLOP/s", " PFLOP/s"})
               : "";
}

inline double last_smoothed(const RunLog& log, const char* field) {
    const std::vector<CurvePart> line = smoothed(log.curve(field).parts());
    return line.empty() ? NAN : line.back().y;
}
inline double seconds_of(const RunLog& log) {
    const double end = RunLog::number(log.end, "seconds"), newest = log.newest["seconds"];
    return end >= newest || std::isnan(newest) ? end : newest;
}

inline std::string report_tiles(const RunLog& log) {
    const StepNumbers& s = log.newest;
    std::string out = "<section class=\"tiles\">\n";
    const double loss = last_smoothed(log, "loss"), speed = last_smoothed(log, "tokens_per_s");
    const auto perplexity = [](double loss) { return "perplexity " + human_count(std::exp(loss)); };
    if (!std::isnan(loss)) out += tile("Training loss (smoothed)", with_decimals(loss, 3), perplexity(loss));
    if (!log.valid.empty())
        out += tile("Validation loss", with_decimals(log.valid.last(), 3),
                    log.valid.last() <= log.best_valid
                        ? perplexity(log.best_valid)
                        : "best " + with_decimals(log.best_valid, 3) + " at step " + with_commas(log.best_step));
    if (log.has_steps()) out += tile("Tokens", human_count(s["tokens"]), human_count(s["consumed_samples"]) + " sequences");
    if (!std::isnan(speed)) out += tile("Tokens per second", human_count(speed), speed_note(s));
    if (log.has_steps())
        out += tile(
            "Time", human_duration(seconds_of(log)),
            log.end.is_null()
                ? human_duration(s["eta_s"]) + " to go"
                : (s["step_ms"] < 9.5 ? format("%.2g ms", s["step_ms"]) : human_duration(s["step_ms"] / 1e3)) + " per step");
    if (const double wh = s["energy_joules"] / 3600; std::isfinite(wh)) {
        const double per_kwh = log.run.contains("options") ? RunLog::number(log.run["options"], "carbon-intensity") : NAN;
        out += tile("Energy of the machine", short_number(wh) + " Wh",
                    std::isfinite(per_kwh) ? short_number(wh / 1e3 * per_kwh) + " g of CO2" : "");
    }
    return out + "</section>\n";
}

inline std::string status_of(const RunLog& log) { return log.end.is_null() ? "running" : RunLog::text(log.end, "status"); }
inline std::string status_badge(const RunLog& log) {
    const std::string status = xml_escape(status_of(log));
    return format("<span class=\"status %s\">%s</span>", status.c_str(), status.c_str());
}
// "12 of 100, 12%"
inline std::string progress_of(const RunLog& log) {
    const int64_t total = RunLog::whole(log.run, "total_steps");
    std::string text = with_commas(log.step());
    if (total > 0)
        text += format(" of %s, %.0f%%", with_commas(total).c_str(),
                       std::floor(100.0 * (double)std::min(log.step(), total) / (double)total));
    return text;
}

inline std::string report_header(const RunLog& log, time_t now) {
    const std::string name = RunLog::text(log.run, "name");
    const int64_t total = RunLog::whole(log.run, "total_steps");
    const double done = total > 0 ? std::min(1.0, (double)log.step() / (double)total) : 0, left = log.newest["eta_s"];
    std::string progress = "step " + progress_of(log);
    if (log.end.is_null() && left > 0 && left < 1e10)
        progress += format(", done about %s", local_time(now + (time_t)left).substr(0, 16).c_str());
    // Why the run has ended, and what goes on with it.
    const std::string message = RunLog::text(log.end, "message");
    const std::string why = message.empty() ? "" : "<p class=\"why\">" + xml_escape(message) + "</p>";
    return format(
        "<header><h1>%s</h1>%s<p>%s <span id=\"updated\" data-time=\"%lld\">Updated %s.</span></p>"
        "<div class=\"progress\"><div style=\"width:%.1f%%\"></div></div>%s</header>\n",
        xml_escape(name.empty() ? "Training run" : name).c_str(), status_badge(log).c_str(),
        (xml_escape(progress) + ".").c_str(), (long long)now, local_time(now).c_str(), 100 * done, why.c_str());
}

inline std::string sample_card(const std::string& title, const RunLog::json& sample) {
    return format("<article class=\"card\"><h3>%s</h3><blockquote tabindex=\"0\"><b>%s</b>%s</blockquote></article>\n",
                  xml_escape(title).c_str(), xml_escape(RunLog::text(sample, "prompt")).c_str(),
                  xml_escape(RunLog::text(sample, "text")).c_str());
}
inline std::string sample_section(const std::string& cards) {
    return cards.empty() ? "" : "<h2 class=\"part\">Samples</h2>\n<section class=\"samples\">\n" + cards + "</section>\n";
}
inline std::string step_title(const RunLog::json& record) { return "step " + with_commas(RunLog::whole(record, "step")); }

inline std::string report_samples(const RunLog& log) {
    std::string newest, others;
    for (auto s = log.samples.rbegin(); s != log.samples.rend(); ++s)
        (s - log.samples.rbegin() < 6 ? newest : others) += sample_card(step_title(*s), *s);
    if (others.empty()) return sample_section(newest);
    return sample_section(newest) + "<details><summary>Earlier ones</summary>\n<section class=\"samples\">\n" + others +
           "</section></details>\n";
}

// A table that is wider than the window scrolls by itself.
inline std::string table(const char* style, const std::string& rows) {
    return format("<div class=\"card wide\"><table class=\"%s\">\n%s</table></div>\n", style, rows.c_str());
}

// The newest health record of the layers; with FP8, the worst of a layer's twelve tensors.
inline std::string report_layers(const RunLog& log) {
    const RunLog::json& h = log.health;
    if (!h.is_object() || !h.contains("layers") || !h["layers"].is_array()) return "";
    const auto worst = [](const RunLog::json& layer, const char* key) {
        double most = -1;
        if (layer.contains(key) && layer[key].is_array())
            for (const auto& share : layer[key])
                if (share.is_number()) most = std::max(most, share.get<double>());
        return most < 0 ? std::string("-") : format("%.2g%%", 100 * most);
    };
    std::string rows;
    bool in_fp8 = false;
    for (const auto& layer : h["layers"]) {
        const std::string zero = worst(layer, "fp8_zero"), largest = worst(layer, "fp8_largest");
        if (zero != "-" || largest != "-") in_fp8 = true;
    }
    for (const auto& layer : h["layers"]) {
        if (!layer.is_object()) continue;
        rows += "<tr><th>" + xml_escape(RunLog::text(layer, "layer")) + "</th>";
        for (const char* key : {"weight_norm", "grad_norm", "update_ratio"})
            rows += "<td>" + short_number(RunLog::number(layer, key)) + "</td>";
        if (in_fp8) rows += "<td>" + worst(layer, "fp8_zero") + "</td><td>" + worst(layer, "fp8_largest") + "</td>";
        rows += "</tr>\n";
    }
    if (rows.empty()) return "";
    const std::string head = std::string("<tr><th>layer</th><th>weights</th><th>gradients</th><th>update / weights</th>") +
                             (in_fp8 ? "<th>FP8: became 0</th><th>became the largest</th>" : "") + "</tr>\n";
    return "<h2 class=\"part\">Layers at " + step_title(h) + "</h2>\n" + table("layers", head + rows);
}

inline std::string report_events(const RunLog& log) {
    if (log.events.empty()) return "";
    std::string rows;
    for (auto e = log.events.rbegin(); e != log.events.rend(); ++e)
        rows += format("<tr class=\"%s\"><th>%s</th><td>%s</td></tr>\n", xml_escape(RunLog::text(*e, "level")).c_str(),
                       step_title(*e).c_str(), xml_escape(RunLog::text(*e, "message")).c_str());
    if (log.events_dropped > 0)
        rows +=
            format("<tr><th></th><td>%s earlier ones are in log.jsonl</td></tr>\n", with_commas(log.events_dropped).c_str());
    return "<h2 class=\"part\">Events</h2>\n" + table("events", rows);
}

// A JSON value as a person would write it: strings without quotes.
inline std::string plain_value(const RunLog::json& v) { return v.is_string() ? v.get<std::string>() : json_text(v); }

inline std::string table_rows(const RunLog::json& object) {
    std::string out;
    if (object.is_object())
        for (const auto& [key, value] : object.items())
            out += format("<tr><th>%s</th><td>%s</td></tr>\n", xml_escape(key).c_str(), xml_escape(plain_value(value)).c_str());
    return out;
}

inline std::string report_summary(const RunLog& log) {
    std::string out;
    for (const auto& [key, title] : {std::pair{"summary", "Run"}, {"machine", "Machine"}}) {
        const std::string rows = log.run.contains(key) ? table_rows(log.run[key]) : "";
        if (!rows.empty()) out += format("<div><h2 class=\"part\">%s</h2>", title) + table("facts", rows) + "</div>\n";
    }
    if (!out.empty()) out = "<section class=\"pair\">\n" + out + "</section>\n";
    const std::string options = log.run.contains("options") ? table_rows(log.run["options"]) : "";
    if (!options.empty()) out += "<details><summary>All options</summary>" + table("facts options", options) + "</details>\n";
    return out;
}

// The beginning of every page, including those of older versions.
inline const std::string page_start =
    "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
    "content=\"width=device-width\">\n";

// A page from the HTML above and below its charts. refresh_seconds: the interval at which it reloads itself; 0: never.
inline std::string whole_page(const std::string& title, const std::vector<NamedRun>& runs, const std::string& above,
                              const std::string& below, int refresh_seconds) {
    std::string out = page_start;
    if (refresh_seconds > 0)  // without scripts; the script reloads when the reader is idle
        out += format("<noscript><meta http-equiv=\"refresh\" content=\"%d\"></noscript>\n", refresh_seconds);
    out += "<title>" + xml_escape(title) + "</title>\n<style>" + report_colors + report_style + "</style></head>\n" +
           (runs.size() > 1 ? "<body class=\"several\"><main>\n" : "<body><main>\n");
    out += above;
    std::vector<Chart> charts;
    if (std::any_of(runs.begin(), runs.end(), [](const NamedRun& run) { return run.log->has_steps(); })) {
        charts.push_back(loss_chart(runs, 1148, 380));
        out += report_controls + chart_card(charts[0]) + "<section class=\"pair\">\n";
        for (Chart& c : small_charts(runs)) {
            out += chart_card(c);
            charts.push_back(std::move(c));
        }
        out += "</section>\n";
    } else {
        out += "<p class=\"card empty\">No step is done yet; the curves appear here.</p>\n";
    }
    return out + below + "</main>\n<script>const page = " + PageData(runs, charts).text() +
           format(", refreshSeconds = %d;\n", refresh_seconds) + report_script + "</script></body></html>\n";
}

// During the run, the page reloads itself every refresh_seconds.
inline std::string render_report(const RunLog& log, time_t now, int refresh_seconds) {
    const std::string name = RunLog::text(log.run, "name");
    return whole_page(name.empty() ? "Training run" : name, {{name, &log}}, report_header(log, now) + report_tiles(log),
                      report_samples(log) + report_layers(log) + report_events(log) + report_summary(log),
                      log.end.is_null() ? refresh_seconds : 0);
}

inline void write_report(const std::string& path, const RunLog& log, int refresh_seconds) {
    write_file_atomically(path, render_report(log, time(nullptr), refresh_seconds));
}

// ---- several runs ----
inline std::string run_table(const std::vector<NamedRun>& runs) {
    std::string rows =
        "<tr><th>run</th><th>training loss</th><th>validation loss</th><th>step</th><th>tokens</th><th>tokens/s</th>"
        "<th>time</th><th>status</th></tr>\n";
    const auto loss = [](double v) { return std::isfinite(v) ? with_decimals(v, 3) : "-"; };
    const auto many = [](double v) { return std::isfinite(v) ? human_count(v) : "-"; };
    for (size_t i = 0; i < runs.size(); i++) {
        const RunLog& log = *runs[i].log;
        const std::string last = loss(log.valid.last()), best = loss(log.best_valid);
        rows +=
            format("<tr><th><i class=\"%s\"></i>%s</th>", style_of(runs, i, "train").c_str(), xml_escape(runs[i].name).c_str());
        for (const std::string& cell :
             {loss(last_smoothed(log, "loss")), last + (best == last ? "" : ", best " + best), progress_of(log),
              many(log.newest["tokens"]), many(last_smoothed(log, "tokens_per_s")), human_duration(seconds_of(log))})
            rows += "<td>" + xml_escape(cell) + "</td>";
        rows += "<td>" + status_badge(log) + "</td></tr>\n";
    }
    return table("runs", rows);
}

// Options and facts that differ between the runs. A key that a run's version did not know is left blank.
inline std::string difference_table(const std::vector<NamedRun>& runs) {
    std::string rows;
    for (const char* part : {"options", "machine"}) {
        std::vector<std::string> keys;
        for (const NamedRun& run : runs)
            if (run.log->run.contains(part) && run.log->run[part].is_object())
                for (const auto& [key, value] : run.log->run[part].items())
                    if (std::find(keys.begin(), keys.end(), key) == keys.end() && key != "out" && key != "name")
                        keys.push_back(key);
        for (const std::string& key : keys) {
            std::string cells;
            bool differ = false;
            const auto value_of = [&](const NamedRun& run) {
                const RunLog::json& j = run.log->run;
                return j.contains(part) && j[part].is_object() && j[part].contains(key) ? plain_value(j[part][key]) : "-";
            };
            for (const NamedRun& run : runs) {
                cells += "<td>" + xml_escape(value_of(run)) + "</td>";
                differ |= value_of(run) != value_of(runs[0]);
            }
            if (differ) rows += "<tr><th>" + xml_escape(key) + "</th>" + cells + "</tr>\n";
        }
    }
    const std::string title = "<h2 class=\"part\">Options and machines that differ</h2>\n";
    if (rows.empty()) return title + "<p>None: the runs had the same options on the same machine.</p>\n";
    std::string head = "<tr><th></th>";
    for (const NamedRun& run : runs) head += "<td>" + xml_escape(run.name) + "</td>";
    return title + table("facts differences", head + "</tr>\n" + rows);
}

inline std::string render_comparison(const std::vector<NamedRun>& runs, time_t now) {
    std::string cards;
    for (const NamedRun& run : runs)
        if (!run.log->samples.empty())
            cards += sample_card(run.name + ", " + step_title(run.log->samples.back()), run.log->samples.back());
    const std::string title = format("%zu runs", runs.size());
    return whole_page(
        title, runs,
        format("<header><h1>%s</h1><p>Written %s.</p></header>\n", title.c_str(), local_time(now).c_str()) + run_table(runs),
        difference_table(runs) + sample_section(cards), 0);
}

// ---- the loss curve alone --------------------------------------------------------------------------------------------------
inline std::string render_loss_svg(const RunLog& log) {
    Chart c = loss_chart({{"", &log}}, 860, 360);
    c.direct_labels = true;
    const std::string name = RunLog::text(log.run, "name");
    return format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-16 -40 %d %d\" width=\"%d\" height=\"%d\" "
               "font-family=\"system-ui, sans-serif\">\n",
               c.width + 32, c.height + 56, c.width + 32, c.height + 56) +
           "<style>" + report_colors + svg_style + "</style>\n" +
           format("<rect class=\"paper\" x=\"-15.5\" y=\"-39.5\" width=\"%d\" height=\"%d\" rx=\"8\"/>", c.width + 31,
                  c.height + 55) +
           format(
               "<text class=\"title\" x=\"4\" y=\"-14\">%s</text><text class=\"tick\" x=\"%d\" y=\"-14\" "
               "text-anchor=\"end\">loss over steps</text>\n",
               xml_escape(name.empty() ? "Loss" : name).c_str(), c.width - 4) +
           draw_chart(c) + "\n</svg>\n";
}

inline void write_loss_svg(const RunLog& log, const std::string& path) {
    if (log.curve("loss").empty()) fail("%s cannot be drawn: the run has no training steps", path.c_str());
    write_file_atomically(path, render_loss_svg(log));
}
