// A run, or a comparison of several, as one page: report.html, self-contained (inline SVG, one script, no external reference),
// light and dark. It is made from the records of log.jsonl (run_log.h) and their charts (run_charts.h).
//   render_report     RunLog -> HTML; write_report writes it atomically
//   render_comparison several RunLogs -> HTML
//
// A page has bounded size: a curve has at most 750 buckets, however long the run; in a comparison, all runs share the buckets
// of four curves. Buckets keep the minimum and maximum values, so no spike is lost. Without samples, events and options, a
// run's page is below 400 KB and a comparison below 1.5 MB; below 2.5 MB for runs with pairs of answers or with mixtures of
// experts, which have four more charts each (460 KB and 2.8 MB with both).
#pragma once
#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"
#include "chart.h"
#include "report_style.h"
#include "run_charts.h"
#include "run_log.h"

// "2026-11-21 06:46:54 +0900"
inline std::string local_time(time_t t) {
    tm parts{};
    char text[64];
    localtime_r(&t, &parts);
    return std::string(text, strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %z", &parts));
}

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
    // Writes the steps of a curve once, since many curves share them.
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
    const bool compares = !std::isnan(log.newest["reward_margin"]);  // pairs of answers: the loss is not a cross-entropy
    const auto perplexity = [&](double loss) { return compares ? "" : "perplexity " + human_count(std::exp(loss)); };
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

// Seconds without a record after which a run that has not ended was probably killed: a killed run cannot say so.
inline double longest_silence(const RunLog& log) {
    const double step_ms = log.newest["step_ms"];
    return std::max(300.0, std::isfinite(step_ms) ? 20 * step_ms / 1e3 : 0);
}
inline bool is_silent(const RunLog& log) {
    return log.end.is_null() && log.last_news > 0 && difftime(time(nullptr), log.last_news) > longest_silence(log);
}
inline std::string status_of(const RunLog& log) {
    return log.end.is_null() ? is_silent(log) ? "no news" : "running" : RunLog::text(log.end, "status");
}
inline std::string status_badge(const RunLog& log) {
    const std::string status = xml_escape(status_of(log));
    return format("<span class=\"status %s\">%s</span>", is_silent(log) ? "silent" : status.c_str(), status.c_str());
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
    // Why the run has ended, and the command that resumes it.
    const std::string message = is_silent(log) ? "The last record was written at " + local_time(log.last_news) +
                                                     ": the run was killed, or hangs. If its processes are gone, --resume auto "
                                                     "resumes it."
                                               : RunLog::text(log.end, "message");
    const std::string why = message.empty() ? "" : "<p class=\"why\">" + xml_escape(message) + "</p>";
    return format(
        "<header><h1>%s</h1>%s<p>%s <span id=\"updated\" data-time=\"%lld\" data-silence=\"%.0f\">Updated %s.</span></p>"
        "<div class=\"progress\"><div style=\"width:%.1f%%\"></div></div>%s</header>\n",
        xml_escape(name.empty() ? "Training run" : name).c_str(), status_badge(log).c_str(),
        (xml_escape(progress) + ".").c_str(), (long long)now, longest_silence(log), local_time(now).c_str(), 100 * done,
        why.c_str());
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

// The classes of an expert's load, in thousandths of an even share, in a heat map: each up to, without, `below`.
struct LoadClass {
    double below;
    const char *style, *words;
};
constexpr LoadClass load_classes[] = {
    {125, "load0", "below 1/8"}, {500, "load1", "1/8 to 1/2"}, {800, "load2", "1/2 to 0.8"},     {1250, "load3", "about even"},
    {2000, "load4", "up to 2"},  {4000, "load5", "2 to 4"},    {INFINITY, "load6", "4 and more"}};

// The newest record of the load of experts: a heat map with a row per layer, as wide as the window, and a table.
inline std::string report_experts(const RunLog& log) {
    const RunLog::json& record = log.experts;
    if (!record.is_object() || !record.contains("layers") || !record["layers"].is_array()) return "";
    std::string paths[std::size(load_classes)], rows;
    size_t n_layers = 0, widest = 0;
    for (const auto& layer : record["layers"]) {
        if (!layer.is_object() || !layer.contains("load") || !layer["load"].is_array() || layer["load"].empty()) continue;
        double least = INFINITY, most = 0;
        std::vector<size_t> classes;
        for (const auto& share : layer["load"]) {
            const double x = share.is_number() ? share.get<double>() : 0;
            least = std::min(least, x);
            most = std::max(most, x);
            size_t i = 0;
            while (!(x < load_classes[i].below) && i + 1 < std::size(load_classes)) i++;
            classes.push_back(i);
        }
        for (size_t e = 0, next; e < classes.size(); e = next) {
            for (next = e; next < classes.size() && classes[next] == classes[e];) next++;
            paths[classes[e]] += format("M%zu %zu.5h%zu", e, n_layers, next - e);
        }
        n_layers++;
        widest = std::max(widest, classes.size());
        rows +=
            format("<tr><th>%s</th><td>%s</td><td>%.2f</td><td>%.2f</td><td>%s%%</td></tr>\n",
                   short_number(RunLog::number(layer, "layer")).c_str(), short_number(RunLog::number(layer, "entropy")).c_str(),
                   least / 1000, most / 1000, short_number(100 * RunLog::number(layer, "dropped")).c_str());
    }
    if (n_layers == 0) return "";
    std::string map, legend;
    for (size_t i = 0; i < std::size(load_classes); i++) {
        if (!paths[i].empty()) map += format("<path class=\"%s\" d=\"%s\"/>", load_classes[i].style, paths[i].c_str());
        legend += format("<span><i class=\"%s\"></i>%s</span>", load_classes[i].style, load_classes[i].words);
    }
    return "<h2 class=\"part\">Load of experts, mean of " + counted(RunLog::whole(record, "steps"), "step") + " up to " +
           step_title(record) + "</h2>\n" +
           format(
               "<div class=\"card experts\"><svg viewBox=\"0 0 %zu %zu\" preserveAspectRatio=\"none\" style=\"height:%zupx\" "
               "role=\"img\" aria-label=\"load of each expert\">%s</svg>\n<p>Rows: layers. Columns: experts. Multiples of an "
               "even share: %s</p></div>\n",
               widest, n_layers, std::min<size_t>(480, std::max<size_t>(6, 120 / n_layers) * n_layers), map.c_str(),
               legend.c_str()) +
           table("layers",
                 "<tr><th>layer</th><th>entropy of the router</th><th>least load</th><th>largest</th><th>dropped</th></tr>\n" +
                     rows);
}

// The newest record of the ranks' times: how much of a step each worked and waited, the slowest first.
inline std::string report_ranks(const RunLog& log) {
    constexpr size_t most = 64;
    if (!log.ranks.is_object() || !log.ranks.contains("ranks") || !log.ranks["ranks"].is_array()) return "";
    const double slowest = RunLog::number(log.ranks, "slowest");
    struct Row {
        double rank, worked, waited;
        std::string host;
        bool slowest;
    };
    std::vector<Row> all;
    double longest = 0;
    for (const auto& r : log.ranks["ranks"]) {
        const Row row = {RunLog::number(r, "rank"), RunLog::number(r, "worked_ms"), RunLog::number(r, "waited_ms"),
                         RunLog::text(r, "host"), RunLog::number(r, "rank") == slowest};
        if (!RunLog::is_step(row.rank) || !(row.worked >= 0) || !(row.waited >= 0)) continue;
        all.push_back(row);
        longest = std::max(longest, row.worked + row.waited);
    }
    if (all.empty()) return "";
    std::sort(all.begin(), all.end(), [](const Row& a, const Row& b) {
        return std::tuple(b.slowest, b.worked, a.rank) < std::tuple(a.slowest, a.worked, b.rank);
    });
    std::string rows = "<tr><th>rank</th><th>works</th><th>waits</th><th></th></tr>\n";
    for (size_t i = 0; i < std::min(most, all.size()); i++) {
        const Row& row = all[i];
        const auto bar = [&](const char* style, double ms) {
            return format("<i class=\"%s\" style=\"width:%.1f%%\"></i>", style, longest > 0 ? 100 * (ms / longest) : 0);
        };
        rows += format("<tr%s><th>%lld on %s%s</th><td>%s ms</td><td>%s ms</td><td class=\"bar\">%s%s</td></tr>\n",
                       row.slowest ? " class=\"slowest\"" : "", (long long)row.rank, xml_escape(row.host).c_str(),
                       row.slowest ? ", the slowest" : "", short_number(row.worked).c_str(), short_number(row.waited).c_str(),
                       bar(row.slowest ? "valid" : "train", row.worked).c_str(), bar("baseline", row.waited).c_str());
    }
    if (all.size() > most)
        rows += format("<tr><th></th><td colspan=\"3\">%s others are in log.jsonl</td></tr>\n",
                       with_commas((int64_t)(all.size() - most)).c_str());
    return "<h2 class=\"part\">Ranks: a step's time, mean of " + counted(RunLog::whole(log.ranks, "steps"), "step") +
           " up to " + step_title(log.ranks) + "</h2>\n" + table("ranks", rows);
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

// The start of every page, including pages of older versions.
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
        out += "<p class=\"card empty\">No step has finished yet; the curves will appear here.</p>\n";
    }
    return out + below + "</main>\n<script>const page = " + PageData(runs, charts).text() +
           format(", refreshSeconds = %d;\n", refresh_seconds) + report_script + "</script></body></html>\n";
}

// During the run, the page reloads itself every refresh_seconds.
inline std::string render_report(const RunLog& log, time_t now, int refresh_seconds) {
    const std::string name = RunLog::text(log.run, "name");
    return whole_page(name.empty() ? "Training run" : name, {{name, &log}}, report_header(log, now) + report_tiles(log),
                      report_samples(log) + report_experts(log) + report_layers(log) + report_ranks(log) + report_events(log) +
                          report_summary(log),
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
