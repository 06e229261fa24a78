// The records of log.jsonl (logger.h) that report.html needs, added one by one while the run writes them, or read back from the
// file.
//   RunLog            a few MB whatever the run's length: curves in buckets, thinned samples, and the last events
//   read_log          log.jsonl -> RunLog: the last run in the file
//   cut_log           removes the records after a step from log.jsonl
#pragma once
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "chart.h"

// ---- records ---------------------------------------------------------------------------------------------------------------
// The numbers of a step that the page shows. The first `curves` of them are kept as curves, the others only from the newest
// step. NaN: unknown.
struct StepNumbers {
    static constexpr size_t curves = 19, count = 25;
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
                                                      "moe_aux_loss",
                                                      "moe_z_loss",
                                                      "moe_busiest_expert",
                                                      "moe_idle_experts",
                                                      "step",
                                                      "consumed_samples",
                                                      "model_tflops",
                                                      "step_ms",
                                                      "eta_s",
                                                      "energy_joules"};
    double values[count];

    StepNumbers() { std::fill_n(values, count, NAN); }
    static constexpr bool is_curve(std::string_view name) {
        for (size_t i = 0; i < curves; i++)
            if (names[i] == name) return true;
        return false;
    }
    static size_t index(std::string_view name) { return std::find(names, names + count, name) - names; }
    double operator[](std::string_view name) const { return values[index(name)]; }
    void set(std::string_view name, double value) {
        if (const size_t i = index(name); i < count) values[i] = value;
    }
};

// Parses a step's line whose values are numbers, nulls, and objects of these, as JsonLines writes nearly all of them, ten times
// as fast as a JSON parser. Returns false and reads nothing for any other line, JSON or not.
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
    json experts;   // the newest record of the load of experts
    json ranks;     // the newest record of the ranks' times
    json run, end;  // the run record; the end record, null during the run
    StepNumbers newest;
    std::array<Curve, StepNumbers::curves> curves;
    Curve valid, valid_ema;  // of the weights, and of their EMA
    using NamedCurves = std::vector<std::pair<std::string, Curve>>;
    NamedCurves valid_sets;  // by dataset if there are several, in the log's order
    NamedCurves tasks;       // the accuracy on each task, or its first metric; BLEU as a fraction
    double best_valid = INFINITY;
    int64_t best_step = 0, events_dropped = 0;
    time_t last_news = 0;  // when the log last grew, of a file that was read; 0: not known
    bool batch_varies = false;
    std::vector<json> samples, events;
    std::vector<int64_t> nonfinite_steps;
    std::vector<std::vector<CurvePart>> abandoned;       // losses of steps that a rollback discarded
    std::vector<std::pair<int64_t, std::string>> notes;  // step and text of notable events

    // Adds one record; returns false if it is not one. Ignores missing fields and fields of other types: a log may be older
    // than the program.
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
        else if (kind == "experts") experts = j;
        else if (kind == "ranks") ranks = j;
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
    // Adds any line of log.jsonl.
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
    // When there are too many, drops every second sample, so that the others cover the whole run.
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
        if (best_step <= step) return;
        best_valid = INFINITY;
        best_step = 0;
        for (const CurvePart& part : valid.parts())
            if (part.low < best_valid) {
                best_valid = part.low;
                best_step = std::llround(part.x);
            }
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
    std::ifstream in = patiently([&] {
        std::ifstream file(path);
        if (!file) fail_to_read(path, errno);
        return file;
    });
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
    if (in.bad()) fail_to_read(path, errno);
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
    double end_seconds;  // duration of a run that ended at this step; NaN: none
    std::string kept;    // a copy of the whole log, if the cut is before a later checkpoint; empty: no copy
};

// Removes the records after `step` from a log: a run that resumes there writes them again. This truncates the file after the
// line of that step; late records of earlier steps in the removed part, such as a checkpoint's, are kept. Everything before is
// unchanged, including steps that a rollback discarded. A cut before a later checkpoint may be a mistake: the log is copied
// first.
inline LogCut cut_log(const std::string& path, int64_t step) {
    int64_t cut = -1, others = 0;
    bool saved_later = false;
    double end_seconds = NAN;
    std::string late;
    for_each_line(path, [&](std::string_view line, int64_t start) {
        constexpr std::string_view step_start = "{\"kind\":\"step\",\"step\":";
        std::string kind = "step";
        double of = NAN;
        bool saved = false;
        if (line.substr(0, step_start.size()) == step_start && line.back() == '}')
            std::from_chars(line.data() + step_start.size(), line.data() + line.size(), of);
        if (!RunLog::is_step(of)) {
            const RunLog::json j = RunLog::parse(line);
            kind = RunLog::text(j, "kind");
            saved = RunLog::text(j, "event") == "checkpoint";
            of = (double)RunLog::whole(j, "step");
            if (kind == "run") end_seconds = NAN;
            if (kind == "end" && of == (double)step) end_seconds = RunLog::number(j, "seconds");
        }
        const bool goes = kind.empty() || kind == "end" || of > (double)step;
        if (kind == "run" || (kind == "step" && !goes)) {
            cut = -1;
            others = 0;
            saved_later = false;
            late.clear();
        } else if (cut < 0 && goes) cut = start;
        else if (cut >= 0 && !goes) late.append(line) += '\n';
        others += cut >= 0 && kind.empty();
        saved_later |= cut >= 0 && goes && saved;
    });
    if (cut < 0) return {0, end_seconds, ""};
    const std::string kept = saved_later ? free_name_beside(path) : "";
    if (saved_later) std::filesystem::copy_file(path, kept);
    // Writes the kept records over the removed part first: a kill in between loses nothing, but may leave part of a line.
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    if (!(file.seekp((std::streamoff)cut) << late).flush()) fail_to_write(path, errno);
    std::filesystem::resize_file(path, (uintmax_t)cut + late.size());
    return {others, end_seconds, kept};
}
