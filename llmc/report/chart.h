// Curves of any length in little memory, and line charts as SVG.
//   Curve   at most 750 buckets of neighboring points; a bucket keeps their mean, minimum and maximum, so no spike is lost
//   Chart   series on nice axes (1-2-5 ticks; optionally logarithmic), drawn by draw_chart(); a style sheet has the colors
// These SVGs are the loss curve's own file, and the page's charts if scripts are disabled. Otherwise the page's script
// (report_style.h) draws the same series at the width of the window. Any data can be drawn: non-finite values are left out,
// values beyond +-largest_drawn are drawn there, and axes never have length zero.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"

// A bucket of neighboring points: means of both coordinates, and the minimum and maximum value.
struct CurvePart {
    double x, y, low, high;
};

// Small enough that sums over all points of a curve, and differences, stay finite.
constexpr double largest_drawn = 1e290;
inline double drawable(double v) { return std::clamp(v, -largest_drawn, largest_drawn); }

class Curve {
public:
    static constexpr size_t max_parts = 750;

    // Adds a point; a non-finite one is ignored. If x decreases, later points are discarded first.
    void add(int64_t x, double y) {
        if (!std::isfinite(y)) return;
        if (!buckets_.empty() && x < last_x_) cut_after(x - 1);
        y = drawable(y);
        if (buckets_.empty() || buckets_.back().key != x / stride_) buckets_.push_back({x / stride_, 0, 0, 0, y, y});
        Bucket& b = buckets_.back();
        b.n++;
        b.sum_x += (double)x;
        b.sum_y += y;
        b.low = std::min(b.low, y);
        b.high = std::max(b.high, y);
        last_x_ = x;
        last_ = y;
        while (buckets_.size() > max_parts) halve();
    }

    bool empty() const { return buckets_.empty(); }
    double last() const { return last_; }

    // Removes and returns the points after x, so that they can be added again.
    std::vector<CurvePart> cut_after(int64_t x) {
        Curve tail;
        const auto kept = [&](const Bucket& b) { return b.sum_x / (double)b.n <= (double)x; };
        const auto end = std::partition_point(buckets_.begin(), buckets_.end(), kept);
        tail.buckets_.assign(end, buckets_.end());
        buckets_.erase(end, buckets_.end());
        last_ = empty() ? NAN : buckets_.back().sum_y / (double)buckets_.back().n;
        last_x_ = x;
        return tail.parts();
    }

    std::vector<CurvePart> parts() const {
        std::vector<CurvePart> parts;
        for (const Bucket& b : buckets_) parts.push_back({b.sum_x / (double)b.n, b.sum_y / (double)b.n, b.low, b.high});
        return parts;
    }

private:
    struct Bucket {
        int64_t key, n;  // x / stride; points
        double sum_x, sum_y, low, high;
    };

    void halve() {
        stride_ *= 2;
        size_t kept = 0;
        for (Bucket b : buckets_) {
            b.key /= 2;
            if (kept == 0 || buckets_[kept - 1].key != b.key) {
                buckets_[kept++] = b;
                continue;
            }
            Bucket& a = buckets_[kept - 1];
            a.n += b.n;
            a.sum_x += b.sum_x;
            a.sum_y += b.sum_y;
            a.low = std::min(a.low, b.low);
            a.high = std::max(a.high, b.high);
        }
        buckets_.resize(kept);
    }

    std::vector<Bucket> buckets_;
    int64_t stride_ = 1, last_x_ = 0;
    double last_ = NAN;
};

// At most n parts, each merged from equally many neighbors.
inline std::vector<CurvePart> thinned(const std::vector<CurvePart>& parts, size_t n) {
    const size_t every = (parts.size() + n - 1) / n;
    if (every <= 1) return parts;
    std::vector<CurvePart> out;
    for (size_t from = 0; from < parts.size(); from += every) {
        const size_t to = std::min(parts.size(), from + every);
        CurvePart sum = {0, 0, INFINITY, -INFINITY};
        for (size_t i = from; i < to; i++) {
            sum.x += parts[i].x / (double)(to - from);
            sum.y += parts[i].y / (double)(to - from);
            sum.low = std::min(sum.low, parts[i].low);
            sum.high = std::max(sum.high, parts[i].high);
        }
        out.push_back(sum);
    }
    return out;
}

// Gaussian average of the means. Its width is 1% of the curve's length, less near the start, so that the first fall stays
// steep.
inline std::vector<CurvePart> smoothed(std::vector<CurvePart> parts) {
    const std::vector<CurvePart> raw = parts;
    size_t from = 0;
    for (CurvePart& at : parts) {
        const double sigma = std::max(1e-9, std::min(0.01 * (raw.back().x - raw[0].x), 0.08 * (at.x - raw[0].x)));
        while (raw[from].x < at.x - 3 * sigma) from++;
        double sum = 0, weights = 0;
        for (size_t i = from; i < raw.size() && raw[i].x <= at.x + 3 * sigma; i++) {
            const double z = (raw[i].x - at.x) / sigma, weight = std::exp(-0.5 * z * z);
            sum += weight * raw[i].y;
            weights += weight;
        }
        at.y = sum / weights;
    }
    return parts;
}

// ---- axes ------------------------------------------------------------------------------------------------------------------
// Valid ends for an axis, whatever the data: finite, in order, and far enough apart that tick labels differ.
inline std::pair<double, double> axis_ends(double lo, double hi) {
    if (!(lo <= hi)) return {0, 1};  // no data, or an end is not a number
    lo = drawable(lo);
    hi = drawable(hi);
    if (hi - lo < 1e-100 || hi - lo < 1e-9 * std::max(std::fabs(lo), std::fabs(hi)))
        hi = lo + (std::fabs(lo) < 1e-12 ? 1e-12 : 0.1 * std::fabs(lo));
    return {lo, hi};
}
// Valid ends for a logarithmic axis: positive.
inline std::pair<double, double> log_axis_ends(double lo, double hi) {
    std::tie(lo, hi) = axis_ends(lo, hi);
    return axis_ends(std::max(lo, 1e-100), std::max(hi, 1e-100));
}

// The smallest of 1, 2, 5 times a power of ten that divides [lo, hi] into at most n parts.
inline double nice_step(double lo, double hi, int n) {
    const double least = std::max((hi - lo) / n, 1e-300), power = std::pow(10, std::floor(std::log10(least)));
    for (const double m : {1.0, 2.0, 5.0})
        if (m * power >= least * (1 - 1e-9)) return m * power;
    return 10 * power;
}

// At most n + 1 ticks, at least `least_step` apart.
inline std::vector<double> linear_ticks(double lo, double hi, int n, double least_step = 0) {
    std::tie(lo, hi) = axis_ends(lo, hi);
    const double step = std::max(least_step, nice_step(lo, hi, n));
    std::vector<double> ticks;
    for (double k = std::ceil(lo / step - 1e-6) + 0.0; k * step <= hi + 1e-6 * step; k++) ticks.push_back(k * step);
    return ticks;
}

// Powers of ten, with 2 and 5 between them if the range is short, every k-th power if it is long.
inline std::vector<double> log_ticks(double lo, double hi, int n) {
    std::tie(lo, hi) = log_axis_ends(lo, hi);
    const int first = (int)std::floor(std::log10(lo)), last = (int)std::ceil(std::log10(hi)),
              every = std::max(1, (last - first + n - 1) / n);
    std::vector<double> ticks;
    for (int e = first; e <= last; e += every)
        for (const double m : {1.0, 2.0, 5.0}) {
            if (m > 1 && last - first > 3) continue;
            const double tick = m * std::pow(10, e);
            if (tick >= lo * (1 - 1e-9) && tick <= hi * (1 + 1e-9)) ticks.push_back(tick);
        }
    return ticks;
}

// A number in few characters: 0, 12,000, 150K, 0.25, 3e-4
inline std::string short_number(double v) {
    const double size = std::fabs(v);
    if (!std::isfinite(v)) return "-";
    if (size == 0) return "0";
    if (size >= 99999.5) return human_count(v);
    if (size >= 1000) return with_commas(std::llround(v));
    if (size >= 0.00995) return format("%.4g", v);
    std::string s = format("%.2e", v);  // 3.00e-04 -> 3e-4
    size_t e = s.find('e');
    while (s[e - 1] == '0' || s[e - 1] == '.') {
        const bool point = s[e - 1] == '.';
        s.erase(--e, 1);
        if (point) break;
    }
    while (s.size() > e + 3 && s[e + 2] == '0') s.erase(e + 2, 1);
    return s;
}

inline std::string tick_label(double v) {
    if (std::fabs(v) < 99999.5) return short_number(v);
    for (const auto& [unit, suffix] : {std::pair{1e12, "T"}, {1e9, "B"}, {1e6, "M"}, {1e3, "K"}})
        if (std::fabs(v) >= unit * 0.9999) return format("%.5g%s", v / unit, suffix);
    return short_number(v);
}

// ---- charts ----------------------------------------------------------------------------------------------------------------
struct Series {
    std::string name;   // in the legend and at the cursor; empty: in neither
    std::string style;  // class of the line: train, valid, ...
    std::vector<CurvePart> parts;
    bool smooth = false;   // an averaged line, drawn over the pale raw values
    bool dots = false;     // mark every point (while they are few)
    bool steps = false;    // a step function
    bool pale = false;     // only the range from minimum to maximum
    int run = 0;           // index of the run in a comparison
    bool scatter = false;  // points without a line

    std::vector<CurvePart> line() const { return smooth ? smoothed(parts) : parts; }
};

struct Chart {
    std::string id, title;
    std::string x_title = "step", y_title{};  // of the axes; y_title: empty where the chart's title has it
    std::vector<Series> series;
    double lo = 0, hi = 1;  // range of the y axis
    double skip = 0;        // fraction of the length, at the start, that the y range ignores
    bool from_zero = false, logarithmic = false;
    double baseline = NAN;  // a dashed horizontal line ...
    std::string baseline_name;
    std::vector<int64_t> marks;                          // x of ticks at the upper edge: steps whose value is not finite
    std::vector<std::pair<int64_t, std::string>> notes;  // vertical lines with a word: an event at this step
    int decimals = -1;                                   // decimals of the caption's values; negative: as short_number()
    bool direct_labels = false;                          // names and last values next to the ends of the lines
    int width = 560, height = 230;
    double x_step = 1;   // minimum distance of its ticks, if it is linear: steps are whole
    bool log_x = false;  // a logarithmic x axis
};

// Maps a chart's values to coordinates in its picture; values out of range are clamped near its edges.
struct Frame {
    double left, right, top, bottom, x0, x1, y0, y1;
    bool logarithmic, log_x;
    static double log_part(double v, double from, double to) {
        return part(std::log(std::max(v, 1e-300)), std::log(from), std::log(to));
    }
    static double part(double v, double from, double to) { return std::clamp((drawable(v) - from) / (to - from), -1.0, 2.0); }
    double x(double v) const { return left + (right - left) * (log_x ? log_part(v, x0, x1) : part(v, x0, x1)); }
    double y(double v) const { return bottom - (bottom - top) * (logarithmic ? log_part(v, y0, y1) : part(v, y0, y1)); }
};

inline bool drawn(const CurvePart& p) {
    return std::isfinite(p.x) && std::isfinite(p.y) && std::isfinite(p.low) && std::isfinite(p.high);
}

inline Frame frame_of(const Chart& c) {
    double first = INFINITY, last = -INFINITY;
    for (const Series& s : c.series)
        for (const CurvePart& p : s.parts)
            if (drawn(p)) {
                first = std::min(first, p.x);
                last = std::max(last, p.x);
            }
    if (!c.log_x && first < 0.05 * last)
        first = std::min(first, 0.0);  // show 0, where a run starts, although its first record is step 1
    const auto [x0, x1] = c.log_x ? log_axis_ends(first, last) : axis_ends(first, last);
    const auto [y0, y1] = c.logarithmic ? log_axis_ends(c.lo, c.hi) : axis_ends(c.lo, c.hi);
    return {60,
            c.width - (c.direct_labels ? 124.0 : 24.0),
            12,
            c.height - 30.0,
            x0,
            c.log_x ? x1 : std::max(x1, x0 + c.x_step),
            y0,
            y1,
            c.logarithmic,
            c.log_x};
}

inline std::string xml_escape(const std::string& text) {
    std::string out;
    for (const char c : printable(text)) {
        if (c == '&') out += "&amp;";
        else if (c == '<') out += "&lt;";
        else if (c == '>') out += "&gt;";
        else if (c == '"') out += "&quot;";
        else if (c == '\'') out += "&#39;";
        else out += c;
    }
    return out;
}

inline std::string svg_path(const Frame& f, const std::vector<CurvePart>& parts, bool steps) {
    std::string d;
    double last_y = 0;
    for (const CurvePart& p : parts) {
        if (!drawn(p)) continue;
        const double x = f.x(p.x), y = f.y(p.y);
        if (steps && !d.empty()) d += format("L%.1f %.1f", x, last_y);
        d += format("%c%.1f %.1f", d.empty() ? 'M' : 'L', x, y);
        last_y = y;
    }
    return d;
}

// The area between the minimum and maximum values.
inline std::string svg_envelope(const Frame& f, const Series& s, size_t n) {
    std::string low, high;
    for (const CurvePart& p : thinned(s.parts, n)) {
        if (!drawn(p)) continue;
        low += format("%c%.1f %.1f", low.empty() ? 'M' : 'L', f.x(p.x), f.y(p.low));
        high = format("L%.1f %.1f", f.x(p.x), f.y(p.high)) + high;
    }
    return format("<path class=\"pale %s\" d=\"%s\"/>", s.style.c_str(), (low + high).c_str());
}

inline std::string svg_axes(const Chart& c, const Frame& f) {
    std::string out;
    const int x_parts = std::max(3, c.width / 110), y_parts = std::max(3, c.height / 44);
    const std::vector<double> y_ticks = c.logarithmic ? log_ticks(f.y0, f.y1, y_parts) : linear_ticks(f.y0, f.y1, y_parts);
    for (const double v : y_ticks)
        out += format(
            "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/><text class=\"tick\" x=\"%.1f\" y=\"%.1f\" "
            "text-anchor=\"end\">%s</text>",
            f.left, f.y(v), f.right, f.left - 8, f.y(v) + 4, tick_label(v).c_str());
    for (const double v : c.log_x ? log_ticks(f.x0, f.x1, x_parts) : linear_ticks(f.x0, f.x1, x_parts, c.x_step))
        out += format(
            "<path class=\"axis\" d=\"M%.1f %.1fv5\"/><text class=\"tick\" x=\"%.1f\" y=\"%.1f\" "
            "text-anchor=\"middle\">%s</text>",
            f.x(v), f.bottom, f.x(v), f.bottom + 19, tick_label(v).c_str());
    const char* const words = "<text class=\"tick\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>";
    if (!c.x_title.empty()) out += format(words, f.right, f.bottom - 6, "end", xml_escape(c.x_title).c_str());
    if (!c.y_title.empty()) out += format(words, f.left + 6, f.top + 4, "start", xml_escape(c.y_title).c_str());
    return out + format("<path class=\"axis\" d=\"M%.1f %.1fH%.1f\"/>", f.left, f.bottom, f.right);
}

// Names and last values at the right ends of the lines, moved apart if they would overlap. Plain points have no last value.
inline std::string svg_end_labels(const Chart& c, const Frame& f) {
    struct Label {
        double y;
        std::string style, text;
    };
    std::vector<Label> labels;
    for (const Series& s : c.series)
        if (const std::vector<CurvePart> line = s.line(); !s.name.empty() && !line.empty() && drawn(line.back()))
            labels.push_back({f.y(line.back().y), s.style,
                              s.scatter ? s.name : s.name + " " + with_decimals(line.back().y, line.back().y < 1000 ? 3 : 0)});
    if (std::isfinite(c.baseline))
        labels.push_back({f.y(c.baseline), "baseline", c.baseline_name + " " + with_decimals(c.baseline, 3)});
    std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
    std::string out;
    double free = f.top + 4;
    for (size_t i = 0; i < labels.size(); i++) {
        const double lowest = f.bottom - 16.0 * (labels.size() - 1 - i);  // leaves room for the labels below
        const double y = std::min(std::max(labels[i].y, free), lowest);
        out += format("<text class=\"label %s\" x=\"%.1f\" y=\"%.1f\">%s</text>", labels[i].style.c_str(), f.right + 8, y + 4,
                      xml_escape(labels[i].text).c_str());
        free = y + 16;
    }
    return out;
}

// The chart without its <svg> element.
inline std::string draw_chart(const Chart& c) {
    const Frame f = frame_of(c);
    std::string out = format("<clipPath id=\"clip-%s\"><rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/></clipPath>",
                             c.id.c_str(), f.left - 5, f.top - 4, f.right - f.left + 10, f.bottom - f.top + 4);
    out += svg_axes(c, f) + format("<g clip-path=\"url(#clip-%s)\">", c.id.c_str());
    if (std::isfinite(c.baseline))
        out += format("<path class=\"line baseline\" d=\"M%.1f %.1fH%.1f\"/>", f.left, f.y(c.baseline), f.right);
    int row = 0;  // notes of nearby steps go to different rows
    for (const auto& [x, word] : c.notes)
        out += format(
            "<path class=\"note\" d=\"M%.1f %.1fV%.1f\"/><text class=\"tick\" x=\"%.1f\" y=\"%.1f\" "
            "text-anchor=\"%s\">%s</text>",
            f.x((double)x), f.top, f.bottom, f.x((double)x) + (f.x((double)x) > f.right - 80 ? -5 : 5),
            f.bottom - 8 - 15 * (row++ % 3), f.x((double)x) > f.right - 80 ? "end" : "start", xml_escape(word).c_str());
    for (const Series& s : c.series) {
        if (s.parts.empty()) continue;
        const size_t n = (size_t)std::max(c.width, 4) / 2;  // more points than pixels would not be visible
        if (s.smooth || s.pale) out += svg_envelope(f, s, n);
        if (s.pale) continue;
        const std::vector<CurvePart> line = thinned(s.line(), n);
        if (!s.scatter)
            out += format("<path class=\"line %s\" d=\"%s\"/>", s.style.c_str(), svg_path(f, line, s.steps).c_str());
        // a line of one point would show nothing
        if (line.size() == 1 || s.scatter || (s.dots && line.size() <= 80))
            for (const CurvePart& p : line)
                if (drawn(p))
                    out += format("<circle class=\"dot %s\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>", s.style.c_str(), f.x(p.x),
                                  f.y(p.y));
    }
    for (const int64_t x : c.marks)
        out += format("<path class=\"mark\" d=\"M%.1f %.1fl-4 -7h8z\"><title>step %lld: not finite</title></path>",
                      f.x((double)x), f.top + 5, (long long)x);
    out += "</g>";
    return out + (c.direct_labels ? svg_end_labels(c, f) : "");
}

inline std::string whole_svg(const Chart& c) {
    return format("<svg viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" font-family=\"system-ui, sans-serif\">", c.width,
                  c.height, c.width, c.height) +
           draw_chart(c) + "</svg>";
}
