// The page of a sweep: charts of the loss over each searched option, the rungs, and compute; tables of all runs.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../data/shares.h"
#include "../report/chart.h"
#include "../report/report.h"
#include "../options/config_file.h"
#include "../plan/halving.h"

struct SweepFindings {
    const std::vector<Dimension>& dimensions;
    const std::vector<Choices>& configs;
    const std::vector<Rung>& rungs;
    const TrialResults& results;
    const std::vector<Standing>& found;  // of the last rung
    std::vector<ComputePoint> points;    // the best at each compute, in 10^15 FLOP
    PowerLaw law;
    std::string no_law;  // the reason why there is none
};

inline std::string law_in_words(const PowerLaw& law) {
    return format("loss = a C^-b, C in 10^15 FLOP: a = %.4g +- %.2g, b = %.4f +- %.4f", law.a, law.a_error, law.b, law.b_error);
}

namespace detail {

inline bool is_number(const std::string& text) { return !std::isnan(parse_number(text)); }
inline bool has_words(const Dimension& d) { return !std::all_of(d.values.begin(), d.values.end(), is_number); }
// The position of a value on the axis of its option: numbers by value, words by their place in the list.
inline double place_of(const Dimension& d, const std::string& value) {
    if (!has_words(d)) return strtod(value.c_str(), nullptr);
    return (double)(std::find(d.values.begin(), d.values.end(), value) - d.values.begin()) + 1;
}

inline CurvePart point(double x, double y) { return {x, y, y, y}; }

// The y axis ends above four fifths of the losses: hopeless ones are drawn at its edge.
inline void set_loss_range(Chart& c) {
    std::vector<double> all;
    for (const Series& s : c.series)
        for (const CurvePart& p : s.parts) all.push_back(p.y);
    if (all.empty()) return;
    std::sort(all.begin(), all.end());
    const double low = all[0], high = all[(all.size() - 1) * 4 / 5];
    c.lo = low - 0.05 * (high - low);
    c.hi = high + 0.1 * (high - low);
    for (Series& series : c.series)
        for (CurvePart& p : series.parts) p.y = p.low = p.high = std::min(p.y, c.hi);
}

// Loss over the values of one option, a series for each rung.
inline Chart option_chart(const SweepFindings& f, size_t d) {
    const Dimension& of = f.dimensions[d];
    Chart chart;
    chart.id = "option-" + std::to_string(d);
    chart.x_title = of.option;
    chart.y_title = "validation loss";
    chart.x_step = 0;
    double low = INFINITY, high = 0;
    for (size_t k = 0; k < f.rungs.size(); k++) {
        Series series;
        series.name = format("rung %zu", k + 1);
        series.style = k + 1 == f.rungs.size() ? "train" : k == 0 ? "other" : "valid";
        series.scatter = true;
        for (const Standing& s : standings(f.results, (int)k)) {
            if (s.runs == 0) continue;
            const double x = place_of(of, f.configs[(size_t)s.config][d]);
            low = std::min(low, x);
            high = std::max(high, x);
            series.parts.push_back(point(x, s.mean));
        }
        std::sort(series.parts.begin(), series.parts.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
        if (!series.parts.empty()) chart.series.push_back(std::move(series));
    }
    chart.log_x = !has_words(of) && low > 0 && high >= 4 * low;
    if (has_words(of)) chart.x_step = 1;
    set_loss_range(chart);
    return chart;
}

// Loss over the tokens of a run: a line for each configuration of the last rung, points for the others.
inline Chart rungs_chart(const SweepFindings& f) {
    Chart chart;
    chart.id = "rungs";
    chart.x_title = "tokens of a run";
    chart.y_title = "validation loss";
    chart.log_x = true;
    std::vector<Series> of_configs(f.configs.size());
    for (size_t k = 0; k < f.rungs.size(); k++)
        for (const Standing& s : standings(f.results, (int)k))
            if (s.runs > 0) of_configs[(size_t)s.config].parts.push_back(point(f.rungs[k].tokens, s.mean));
    for (int config = 0; config < (int)f.configs.size(); config++) {
        const auto place = std::find_if(f.found.begin(), f.found.end(), [&](const Standing& s) { return s.config == config; });
        Series& series = of_configs[(size_t)config];
        series.style = place == f.found.end() ? "other" : place == f.found.begin() ? "train" : "valid";
        series.dots = true;
        if (!series.parts.empty()) chart.series.push_back(std::move(series));
    }
    set_loss_range(chart);
    return chart;
}

inline Chart compute_chart(const SweepFindings& f) {
    Chart chart;
    chart.id = "compute";
    chart.x_title = "compute, 10^15 FLOP";
    chart.y_title = "validation loss";
    chart.log_x = chart.logarithmic = true;
    Series best, line;
    best.style = "train";
    best.scatter = true;
    line.style = "valid";
    double low = INFINITY, high = 0;
    const auto add = [&](Series& to, double x, double y) {
        to.parts.push_back(point(x, y));
        low = std::min(low, y);
        high = std::max(high, y);
    };
    for (const ComputePoint& p : f.points) add(best, p.compute, p.loss);
    const double first = f.points.front().compute, last = f.points.back().compute;
    for (int i = 0; i <= 20 && f.no_law.empty(); i++) {
        const double x = first * std::pow(last / first, i / 20.0);
        add(line, x, f.law.at(x));
    }
    chart.series = {line, best};
    chart.lo = low / 1.02;
    chart.hi = high * 1.02;
    return chart;
}

inline std::string run_rows(const SweepFindings& f) {
    std::string rows = "<tr><th>rung</th><th>tokens</th><th>seed</th>";
    for (const Dimension& d : f.dimensions) rows += "<th>" + xml_escape(d.option) + "</th>";
    rows += "<th>loss</th><th>seconds</th></tr>\n";
    for (const auto& [key, r] : f.results) {
        rows += format("<tr><td>%d</td><td>%s</td><td>%d</td>", key.rung + 1, human_count(r.tokens).c_str(), key.seed);
        for (const std::string& value : f.configs[(size_t)key.config]) rows += "<td>" + xml_escape(value) + "</td>";
        rows += format("<td>%s</td><td>%.1f</td></tr>\n",
                       r.finished() ? format("%.4f", r.loss).c_str() : xml_escape(r.why).c_str(), r.seconds);
    }
    return table("runs", rows);
}

}  // namespace detail

inline std::string sweep_page(const SweepFindings& f) {
    const auto part = [](const std::string& title, const std::string& body) {
        return "<h2 class=\"part\">" + xml_escape(title) + "</h2>\n" + body + "\n";
    };
    std::string best, charts;
    for (size_t d = 0; d < f.dimensions.size(); d++) {
        const Dimension& of = f.dimensions[d];
        best += (d ? ", " : "") + of.option + " " + f.configs[(size_t)f.found[0].config][d];
        std::string values;
        for (size_t i = 0; i < of.values.size() && detail::has_words(of); i++)
            values += format("%s%zu is %s", i ? ", " : ": ", i + 1, of.values[i].c_str());
        charts += part("Loss over " + of.option + values, whole_svg(detail::option_chart(f, d)));
    }
    const std::string title = format("The best of %zu configurations: %s", f.configs.size(), best.c_str());
    return page_start + "<!-- " + written_by("sweep") + " --><title>" + xml_escape(title) + "</title>\n<style>" +
           report_colors + svg_style + report_style + "</style></head>\n<body><main>\n<header><h1>" + xml_escape(title) +
           "</h1><p>" +
           format(
               "Validation loss %.4f%s after %s tokens. Dots are the mean of a configuration; in the last rung they have the "
               "first color.",
               f.found[0].mean, f.found[0].runs > 1 ? format(" &plusmn; %.4f", f.found[0].error).c_str() : "",
               human_count(f.rungs.back().tokens).c_str()) +
           "</p></header>\n" + charts + part("Loss over the tokens of a run", whole_svg(detail::rungs_chart(f))) +
           part("Loss over compute: " + (f.no_law.empty() ? law_in_words(f.law) : f.no_law),
                whole_svg(detail::compute_chart(f))) +
           part("All runs", detail::run_rows(f)) + "</main></body></html>\n";
}
