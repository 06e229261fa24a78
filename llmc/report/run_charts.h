// Charts of a run, or of several in comparison, from their records (run_log.h): the loss, periodic measurements, and the
// quantities of a step; and the loss curve as a separate .svg file (write_loss_svg). In a comparison, all runs share the
// buckets of four curves.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/file.h"
#include "chart.h"
#include "report_style.h"
#include "run_log.h"

struct NamedRun {
    std::string name;
    const RunLog* log;
};

// Sets the y range from the curves without their start: the first fall of the loss, or the first steps with cold caches, would
// flatten everything else. A short curve, or one whose start is no higher, is shown whole.
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
// Periodic measurements have separate charts: the validation loss, each dataset's loss if there are several, and tasks.
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
    {"moe_aux_loss", "Balance of experts (1: the same load)", 1, true, false, false},
    {"moe_z_loss", "Router z-loss", 1, true, true, false},
    {"moe_busiest_expert", "Rows of the busiest expert, times the mean", 1, true, true, false},
    {"moe_idle_experts", "Experts without rows", 1, false, true, true},
    {"lr", "Learning rate", 1, false, true, false},
    {"grad_norm", "Gradient norm", 1, true, true, false},
    {"tokens_per_s", "Tokens per second", 1, true, true, false},
    {"mfu", "Model FLOPs utilization (MFU), %", 100, true, true, false},
    {"memory_bytes", "Memory in use, GiB", 1.0 / (1 << 30), false, true, false},
    {"z_loss", "z-loss", 1, true, true, false},
    {"lse_mean", "log Z", 1, true, false, false},
    {"global_batch", "Global batch, sequences", 1, false, true, true}};
constexpr bool are_kept(const Quantity* first, const Quantity* last) {
    for (; first < last; first++)
        if (!StepNumbers::is_curve(first->field)) return false;
    return true;
}
static_assert(are_kept(std::begin(quantities), std::end(quantities)), "a quantity that run_log.h does not keep");

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
