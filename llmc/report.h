// A run as one page: report.html, self-contained (inline SVG, a few lines of script, no outside reference), light and dark.
// Works from the records of log.jsonl (logger.h says what they hold), in memory while a run is on or read back afterwards.
//   RunLog            what the page needs of the records, a few MB whatever the run's length: numbers of steps as curves in
//                     buckets, samples thinned, and the last of the events
//   read_log          log.jsonl -> RunLog: the last run in the file
//   cut_log           takes from log.jsonl what came after a step
//   render_report     RunLog -> HTML; write_report writes it atomically
//   write_loss_svg    RunLog -> the loss curve alone as an .svg file
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
#include "check.h"
#include "file.h"
#include "json.h"
#include "report_style.h"

// "2026-11-21 06:46:54 +0900"
inline std::string local_time(time_t t) {
    tm parts{};
    char text[64];
    localtime_r(&t, &parts);
    return std::string(text, strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %z", &parts));
}

// ---- records ---------------------------------------------------------------------------------------------------------------
// The numbers of a step that the page shows: the first of them as curves, the others of the newest step. NaN: not known.
struct StepNumbers {
    static constexpr size_t curves = 8, count = 16;
    static constexpr std::string_view names[count] = {
        "loss", "z_loss", "grad_norm",        "lr",  "tokens_per_s", "global_batch", "lse_mean", "lse_max",
        "step", "tokens", "consumed_samples", "mfu", "model_tflops", "step_ms",      "seconds",  "eta_s"};
    double values[count];

    StepNumbers() { std::fill_n(values, count, NAN); }
    static size_t index(std::string_view name) { return std::find(names, names + count, name) - names; }
    double operator[](std::string_view name) const { return values[index(name)]; }
    void set(std::string_view name, double value) {
        if (const size_t i = index(name); i < count) values[i] = value;
    }
};

// Reads the line of a step whose values are numbers, nulls, and objects of such, as JsonLines writes nearly all of them: in a
// tenth of the time of a JSON parser. False, and nothing is read, for any other line, JSON or not.
inline bool scan_step(std::string_view line, StepNumbers& step) {
    constexpr std::string_view start = "{\"kind\":\"step\",";
    if (line.substr(0, start.size()) != start) return false;
    const char *at = line.data() + start.size(), *const end = line.data() + line.size();
    StepNumbers found;
    const auto is = [&](char c) { return at < end && *at == c && (at++, true); };
    bool inside = false;  // an object that is a value
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
    static constexpr size_t max_samples = 24, max_events = 200, max_marks = 200, max_abandoned = 50;

    json health;    // the newest record of the layers
    json run, end;  // the run record; the end record, null while the run is on
    StepNumbers newest;
    std::array<Curve, StepNumbers::curves> curves;
    Curve valid;
    double best_valid = INFINITY;
    int64_t best_step = 0, events_dropped = 0;
    bool batch_varies = false;
    std::vector<json> samples, events;
    std::vector<int64_t> nonfinite_steps;
    std::vector<std::vector<Point>> abandoned;           // losses of steps that a rollback has undone
    std::vector<std::pair<int64_t, std::string>> notes;  // what happened to the run, and when

    // Takes in one record; false if it is none. Fields that are missing or of another type are left out: a log may be older
    // than the program.
    bool add(const json& j) {
        const std::string kind = text(j, "kind");
        if (!is_record(j)) return false;
        if (kind == "run") *this = RunLog(), run = j;
        else if (kind == "step") add_step(step_numbers(j));
        else if (kind == "valid") add_valid(j);
        else if (kind == "health") health = j;
        else if (kind == "sample") add_sample(j);
        else if (kind == "event") add_event(j);
        else if (kind == "end") end = j;
        else return false;
        return true;
    }
    // The same for a line of log.jsonl, whatever it holds.
    bool add_line(std::string_view line) {
        if (StepNumbers step; scan_step(line, step)) return is_step(step["step"]) && (add_step(step), true);
        return add(parse(line));
    }

    // Null for a line that is no record, or is nested deeper than one: what copies it recurses.
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
    // A count of steps, tokens, ...; 0 where there is none.
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
    void add_step(const StepNumbers& s) {
        const int64_t step = whole(s["step"]);
        for (size_t i = 0; i < StepNumbers::curves; i++) curves[i].add(step, s.values[i]);
        if (!std::isfinite(s["loss"]) || !std::isfinite(s["grad_norm"]))
            if (nonfinite_steps.size() < max_marks) nonfinite_steps.push_back(step);
        if (std::fabs(s["global_batch"] - newest["global_batch"]) > 0) batch_varies = true;
        newest = s;
        end = nullptr;  // the run has gone on
    }
    void add_valid(const json& j) {
        const int64_t step = whole(j, "step");
        const double loss = number(j, "loss");
        valid.add(step, loss);
        if (loss < best_valid) best_valid = loss, best_step = step;
    }
    // Many samples are thinned to every second one, so that they still tell the whole story.
    void add_sample(const json& j) {
        samples.push_back(j);
        if (samples.size() <= max_samples) return;
        std::vector<json> kept;
        for (size_t i = 0; i < samples.size(); i += 2) kept.push_back(samples[i]);
        samples = kept;
    }
    void add_event(const json& j) {
        if (events.size() >= max_events) events.erase(events.begin()), events_dropped++;
        events.push_back(j);
        const std::string event = text(j, "event");
        const int64_t step = whole(j, "step");
        if (notes.size() >= max_marks) return;
        if (event == "fp8") notes.push_back({step, "8 bits"});
        if (event == "rollback") roll_back(step);
    }
    // The steps after this one will come again.
    void roll_back(int64_t step) {
        notes.push_back({this->step(), "rollback"});
        if (abandoned.size() == max_abandoned) abandoned.erase(abandoned.begin());
        for (size_t i = 0; i < StepNumbers::curves; i++) {
            std::vector<Point> tail = curves[i].cut_after(step);
            if (i == 0) abandoned.push_back(std::move(tail));
        }
        valid.cut_after(step);
    }
};

// ---- log.jsonl -------------------------------------------------------------------------------------------------------------
// Calls take(line, its place in the file) for each line, without its end. A file of any size takes little memory: a line longer
// than any record comes as an empty one.
template <class Take>
void for_each_line(const std::string& path, Take take) {
    std::ifstream in(path);
    if (!in) fail("cannot read %s: %s", path.c_str(), strerror(errno));
    std::vector<char> line(1 << 20);
    for (int64_t at = 0; in.getline(line.data(), (std::streamsize)line.size()), in.gcount() > 0;) {
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

// The last run in the file. Lines that are no records (a crash in the middle of a write) are counted and passed over.
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

// Takes from a log what came after `step`: a run that resumes there writes it again. That is the file's end, from the line
// after the last step that stays; records in it that came late, such as that of a checkpoint, stay too. What is before it is
// not touched, not even steps that a rollback has undone. Returns how many of the lines that went were no records.
inline int64_t cut_log(const std::string& path, int64_t step) {
    int64_t cut = -1, others = 0;
    std::string late;
    for_each_line(path, [&](std::string_view line, int64_t start) {
        constexpr std::string_view step_start = "{\"kind\":\"step\",\"step\":";
        std::string kind = "step";
        double of = NAN;
        if (line.substr(0, step_start.size()) == step_start && line.back() == '}')
            std::from_chars(line.data() + step_start.size(), line.data() + line.size(), of);
        if (!RunLog::is_step(of)) {
            const RunLog::json j = RunLog::parse(line);
            kind = RunLog::text(j, "kind"), of = (double)RunLog::whole(j, "step");
        }
        const bool goes = kind.empty() || kind == "end" || of > (double)step;
        if (kind == "run" || (kind == "step" && !goes)) cut = -1, others = 0, late.clear();
        else if (cut < 0 && goes) cut = start;
        else if (cut >= 0 && !goes) late.append(line) += '\n';
        others += cut >= 0 && kind.empty();
    });
    if (cut < 0) return 0;
    std::filesystem::resize_file(path, (uintmax_t)cut);
    if (!(std::ofstream(path, std::ios::app) << late).flush()) fail("cannot write %s: %s", path.c_str(), strerror(errno));
    return others;
}

// ---- charts of a run -------------------------------------------------------------------------------------------------------
inline std::pair<double, double> range_of(const std::vector<const std::vector<Point>*>& curves, double from_x) {
    double lo = INFINITY, hi = -INFINITY;
    for (const auto* points : curves)
        for (const Point& p : *points)
            if (p.x >= from_x) lo = std::min(lo, p.y), hi = std::max(hi, p.y);
    return {lo, hi};
}

inline void add_margins(Chart& c, double below, double above) {
    std::tie(c.lo, c.hi) = axis_ends(c.lo, c.hi);
    const double length = c.hi - c.lo;
    c.lo -= below * length, c.hi += above * length;
}

// Training loss as it was (thin) and smoothed, validation loss, unigram baseline. The first fall is steep and would press
// everything else flat: the range is that of the curve after its first 4%, the start is cut at the upper edge.
inline Chart loss_chart(const RunLog& log, int width, int height) {
    Chart c;
    c.id = "loss", c.title = "Loss", c.width = width, c.height = height, c.marks = log.nonfinite_steps, c.decimals = 3;
    c.notes = log.notes;
    const Curve& loss = log.curve("loss");
    const std::vector<Point> raw = loss.extremes(), smooth = loss.smoothed(), valid = log.valid.means();
    c.series = {{"", "raw train", raw}, {"train", "train", smooth}, {"validation", "valid", valid, true}};
    if (valid.empty()) c.series.pop_back();
    for (const std::vector<Point>& points : log.abandoned) c.series.push_back({"", "raw abandoned", points});
    const double length = smooth.empty() ? 0 : smooth.back().x - smooth[0].x;
    const auto [lo, all_hi] = range_of({&raw, &valid}, 0);
    const double hi = range_of({&raw, &valid}, smooth.empty() ? 0 : smooth[0].x + 0.04 * length).second;
    c.lo = lo, c.hi = smooth.size() < 50 || all_hi - lo < 1.3 * (hi - lo) ? all_hi : hi;
    c.baseline = RunLog::number(log.run, "unigram_loss"), c.baseline_name = "unigram";
    if (std::isfinite(c.baseline)) c.lo = std::min(c.lo, c.baseline), c.hi = std::max(c.hi, c.baseline);
    add_margins(c, 0.05, 0.05);
    return c;
}

// One quantity: smoothed over its own raw curve, or as it is.
inline Chart small_chart(const RunLog& log, const char* field, const std::string& title, bool smooth, bool from_zero) {
    Chart c;
    c.id = field, c.title = title;
    const Curve& curve = log.curve(field);
    const std::vector<Point> raw = curve.extremes();
    if (smooth) c.series = {{"", "raw other", raw}, {title, "other", curve.smoothed()}};
    else c.series = {{title, "other", curve.means()}};
    // with the first steps left out (warming up of caches, the first gradients): they would set the scale
    const double skip = smooth && raw.size() > 100 ? raw[0].x + 0.005 * (raw.back().x - raw[0].x) : 0;
    std::tie(c.lo, c.hi) = range_of({&raw}, skip);
    if (from_zero) c.lo = std::min(c.lo, 0.0);
    add_margins(c, from_zero ? 0 : 0.06, 0.06);
    return c;
}

inline std::vector<Chart> small_charts(const RunLog& log) {
    std::vector<Chart> charts;
    charts.push_back(small_chart(log, "lr", "Learning rate", false, true));
    Chart norm = small_chart(log, "grad_norm", "Gradient norm", true, true);
    const auto [lo, hi] = range_of({&norm.series[0].points}, 0);
    if (lo > 0 && hi > 20 * lo) norm.logarithmic = true, norm.lo = lo / 1.2, norm.hi = hi * 1.2;
    charts.push_back(norm);
    charts.push_back(small_chart(log, "tokens_per_s", "Tokens per second", true, true));
    if (log.curve("z_loss").last() > 0) charts.push_back(small_chart(log, "z_loss", "z-loss", true, true));
    if (!log.curve("lse_mean").empty() && (charts.size() % 2 || log.batch_varies))  // one more, to complete the last row
        charts.push_back(small_chart(log, "lse_mean", "log Z", true, false));
    if (log.batch_varies) {
        Chart batch = small_chart(log, "global_batch", "Global batch, sequences", false, true);
        batch.series[0].steps = true;
        charts.push_back(batch);
    }
    return charts;
}

// ---- the page --------------------------------------------------------------------------------------------------------------

// Line and name of a series with its last value; the value alone where the chart's title says what it is.
inline std::string legend_entry(const Chart& c, const Series& s, int index) {
    if (s.name.empty()) return "";
    const double last = s.points.empty() ? NAN : s.points.back().y;
    const std::string value = c.decimals >= 0 && std::isfinite(last) ? with_decimals(last, c.decimals) : short_number(last);
    const std::string key =
        s.name == c.title ? "" : format("<i class=\"%s\"></i>%s ", s.style.c_str(), xml_escape(s.name).c_str());
    return format("<span class=\"key\">%s<b data-s=\"%d\">%s</b></span>", key.c_str(), index, value.c_str());
}

inline std::string chart_card(const Chart& c) {
    std::string legend, cursor;
    int index = 0;
    for (const Series& s : c.series) {
        legend += legend_entry(c, s, index++);
        cursor += s.name.empty() ? "" : format("<circle class=\"dot %s\" r=\"4\"/>", s.style.c_str());
    }
    if (std::isfinite(c.baseline))
        legend += format("<span class=\"key\"><i class=\"baseline\"></i>%s <b>%s</b></span>",
                         xml_escape(c.baseline_name).c_str(), with_decimals(c.baseline, 3).c_str());
    const Frame f = frame_of(c);
    return format(
        "<figure class=\"card\"><figcaption><h2>%s</h2><span class=\"keys\"><span class=\"at\"></span>%s</span></figcaption>"
        "<svg id=\"%s\" viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"%s over steps\">%s"
        "<g class=\"cursor\" visibility=\"hidden\"><path d=\"M0 %.1fV%.1f\"/>%s</g></svg></figure>\n",
        xml_escape(c.title).c_str(), legend.c_str(), c.id.c_str(), c.width, c.height, xml_escape(c.title).c_str(),
        draw_chart(c).c_str(), f.top, f.bottom, cursor.c_str());
}

// What the script needs to answer "what were the values at this step": per chart its frame and named series.
inline std::string chart_data(const std::vector<Chart>& charts) {
    std::string out = "[";
    for (const Chart& c : charts) {
        const Frame f = frame_of(c);
        out += format("%s{id:\"%s\",l:%g,r:%g,t:%g,b:%g,x0:%.12g,x1:%.12g,y0:%.12g,y1:%.12g,log:%d,d:%d,s:[",
                      out.size() > 1 ? ",\n" : "", c.id.c_str(), f.left, f.right, f.top, f.bottom, f.x0, f.x1, f.y0, f.y1,
                      (int)f.logarithmic, c.decimals);
        for (size_t i = 0; i < c.series.size(); i++) {
            if (c.series[i].name.empty()) continue;
            std::string x, y;
            for (const Point& p : c.series[i].points)
                if (drawn(p)) x += format("%.7g,", p.x), y += format("%.5g,", p.y);
            out += format("{i:%zu,x:[%s],y:[%s]},", i, x.c_str(), y.c_str());
        }
        out += "]}";
    }
    return out + "]";
}

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

inline std::string report_tiles(const RunLog& log) {
    const StepNumbers& s = log.newest;
    std::string out = "<section class=\"tiles\">\n";
    const std::vector<Point> loss = log.curve("loss").smoothed(), speed = log.curve("tokens_per_s").smoothed();
    const auto perplexity = [](double loss) { return "perplexity " + human_count(std::exp(loss)); };
    if (!loss.empty()) out += tile("Training loss", with_decimals(loss.back().y, 3), perplexity(loss.back().y));
    if (!log.valid.empty())
        out += tile("Validation loss", with_decimals(log.valid.last(), 3),
                    log.valid.last() <= log.best_valid
                        ? perplexity(log.best_valid)
                        : "best " + with_decimals(log.best_valid, 3) + " at step " + with_commas(log.best_step));
    if (log.has_steps()) out += tile("Tokens", human_count(s["tokens"]), human_count(s["consumed_samples"]) + " sequences");
    if (!speed.empty()) out += tile("Tokens per second", human_count(speed.back().y), speed_note(s));
    if (log.has_steps()) {
        const bool running = log.end.is_null();
        out += tile("Time", human_duration(running ? s["seconds"] : RunLog::number(log.end, "seconds")),
                    running ? human_duration(s["eta_s"]) + " to go" : human_duration(s["step_ms"] / 1e3) + " per step");
    }
    return out + "</section>\n";
}

inline std::string report_header(const RunLog& log, time_t now) {
    const std::string name = RunLog::text(log.run, "name"),
                      status = log.end.is_null() ? "running" : RunLog::text(log.end, "status");
    const int64_t total = RunLog::whole(log.run, "total_steps");
    const double done = total > 0 ? std::min(1.0, (double)log.step() / (double)total) : 0, left = log.newest["eta_s"];
    std::string progress = "step " + with_commas(log.step());
    if (total > 0) progress += format(" of %s, %.0f%%", with_commas(total).c_str(), std::floor(100 * done));
    if (log.end.is_null() && left > 0 && left < 1e10)
        progress += format(", done about %s", local_time(now + (time_t)left).substr(0, 16).c_str());
    // Why the run has ended, and what goes on with it.
    const std::string message = RunLog::text(log.end, "message");
    const std::string why = message.empty() ? "" : "<p class=\"why\">" + xml_escape(message) + "</p>";
    return format(
        "<header><h1>%s</h1><span class=\"status %s\">%s</span>"
        "<p>%s <span id=\"updated\" data-time=\"%lld\">Updated %s.</span></p>"
        "<div class=\"progress\"><div style=\"width:%.1f%%\"></div></div>%s</header>\n",
        xml_escape(name.empty() ? "Training run" : name).c_str(), xml_escape(status).c_str(), xml_escape(status).c_str(),
        (xml_escape(progress) + ".").c_str(), (long long)now, local_time(now).c_str(), 100 * done, why.c_str());
}

inline std::string report_samples(const RunLog& log) {
    if (log.samples.empty()) return "";
    std::string out = "<h2 class=\"part\">What it writes</h2>\n<section class=\"samples\">\n";
    for (auto s = log.samples.rbegin(); s != log.samples.rend(); ++s)
        out += format("<article class=\"card\"><h3>step %s</h3><blockquote><b>%s</b>%s</blockquote></article>\n",
                      with_commas(RunLog::whole(*s, "step")).c_str(), xml_escape(RunLog::text(*s, "prompt")).c_str(),
                      xml_escape(RunLog::text(*s, "text")).c_str());
    return out + "</section>\n";
}

// The layers when they were last examined; in 8 bits the worst of a layer's twelve tensors.
inline std::string report_layers(const RunLog& log) {
    const RunLog::json& h = log.health;
    if (!h.is_object() || !h.contains("layers") || !h["layers"].is_array()) return "";
    std::string out = format(
        "<h2 class=\"part\">Layers at step %s</h2>\n<table class=\"card layers\">\n<tr><th>layer</th><th>weights</th>"
        "<th>gradients</th><th>update / weights</th><th>8 bits: became 0</th><th>became the largest</th></tr>\n",
        with_commas(RunLog::whole(h, "step")).c_str());
    const auto worst = [](const RunLog::json& layer, const char* key) {
        double most = -1;
        if (layer.contains(key) && layer[key].is_array())
            for (const auto& share : layer[key])
                if (share.is_number()) most = std::max(most, share.get<double>());
        return most < 0 ? std::string("-") : format("%.2g%%", 100 * most);
    };
    for (const auto& layer : h["layers"]) {
        if (!layer.is_object()) continue;
        out +=
            format("<tr><th>%s</th><td>%s</td><td>%s</td><td>%s</td><td>%s</td><td>%s</td></tr>\n",
                   xml_escape(RunLog::text(layer, "layer")).c_str(), short_number(RunLog::number(layer, "weight_norm")).c_str(),
                   short_number(RunLog::number(layer, "grad_norm")).c_str(),
                   short_number(RunLog::number(layer, "update_ratio")).c_str(), worst(layer, "fp8_zero").c_str(),
                   worst(layer, "fp8_largest").c_str());
    }
    return out + "</table>\n";
}

inline std::string report_events(const RunLog& log) {
    if (log.events.empty()) return "";
    std::string out = "<h2 class=\"part\">Events</h2>\n<table class=\"card events\">\n";
    for (auto e = log.events.rbegin(); e != log.events.rend(); ++e)
        out += format("<tr class=\"%s\"><th>step %s</th><td>%s</td></tr>\n", xml_escape(RunLog::text(*e, "level")).c_str(),
                      with_commas(RunLog::whole(*e, "step")).c_str(), xml_escape(RunLog::text(*e, "message")).c_str());
    if (log.events_dropped > 0)
        out += format("<tr><th></th><td>%s earlier ones are in log.jsonl</td></tr>\n", with_commas(log.events_dropped).c_str());
    return out + "</table>\n";
}

// A JSON value as a person would write it: strings without quotes.
inline std::string plain_value(const RunLog::json& v) {
    return v.is_string() ? v.get<std::string>() : v.dump(-1, ' ', false, RunLog::json::error_handler_t::replace);
}

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
        if (!rows.empty())
            out += format("<div><h2 class=\"part\">%s</h2><table class=\"card\">\n%s</table></div>\n", title, rows.c_str());
    }
    if (!out.empty()) out = "<section class=\"pair\">\n" + out + "</section>\n";
    const std::string options = log.run.contains("options") ? table_rows(log.run["options"]) : "";
    if (!options.empty())
        out += "<details><summary>All options</summary><table class=\"card options\">\n" + options + "</table></details>\n";
    return out;
}

// While the run is on, the page reloads itself every refresh_seconds.
inline std::string render_report(const RunLog& log, time_t now, int refresh_seconds) {
    const std::string name = RunLog::text(log.run, "name");
    std::string out =
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
        "content=\"width=device-width\">\n";
    if (log.end.is_null()) out += format("<meta http-equiv=\"refresh\" content=\"%d\">\n", refresh_seconds);
    out += "<title>" + xml_escape(name.empty() ? "Training run" : name) + "</title>\n<style>" + report_colors + report_style +
           "</style></head>\n<body><main>\n";
    out += report_header(log, now) + report_tiles(log);

    std::vector<Chart> charts = small_charts(log);
    if (log.has_steps()) {
        const Chart loss = loss_chart(log, 1148, 380);
        out += chart_card(loss) + "<section class=\"pair\">\n";
        for (const Chart& c : charts) out += chart_card(c);
        out += "</section>\n";
        charts.push_back(loss);
    } else {
        charts.clear();
        out += "<p class=\"card empty\">No step is done yet; the curves appear here.</p>\n";
    }
    out += report_samples(log) + report_layers(log) + report_events(log) + report_summary(log);
    return out + "</main>\n<script>const charts=" + chart_data(charts) + ";\n" + report_script + "</script></body></html>\n";
}

inline void write_report(const std::string& path, const RunLog& log, int refresh_seconds) {
    write_file_atomically(path, render_report(log, time(nullptr), refresh_seconds));
}

// ---- the loss curve alone --------------------------------------------------------------------------------------------------
inline std::string render_loss_svg(const RunLog& log) {
    Chart c = loss_chart(log, 860, 360);
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
