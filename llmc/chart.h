// Curves of any length in little memory, and line charts as SVG.
//   Curve   at most 750 buckets of neighbouring points; a bucket keeps count, sum, smallest and largest: no spike is lost
//   Chart   series on nice axes (1-2-5 ticks; logarithmic where asked), drawn by draw_chart(); a style sheet has the colours
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "terminal.h"

struct Point {
    double x, y;
};

class Curve {
public:
    static constexpr size_t max_buckets = 750;  // and so at most 1500 points of extremes()

    // x must not decrease; what is not finite is left out.
    void add(int64_t x, double y) {
        if (!std::isfinite(y)) return;
        if (buckets_.empty() || buckets_.back().key != x / stride_)
            buckets_.push_back({x / stride_, 0, 0, 0, {(double)x, y}, {(double)x, y}});
        Bucket& b = buckets_.back();
        b.n++, b.sum_x += (double)x, b.sum_y += y;
        if (y < b.low.y) b.low = {(double)x, y};
        if (y > b.high.y) b.high = {(double)x, y};
        last_ = y;
        while (buckets_.size() > max_buckets) halve();
    }

    bool empty() const { return buckets_.empty(); }
    double last() const { return last_; }

    // Takes away what comes after x, so that points there can be added anew; returns it as extremes() would.
    std::vector<Point> cut_after(int64_t x) {
        Curve tail;
        const auto kept = [&](const Bucket& b) { return b.sum_x / (double)b.n <= (double)x; };
        const auto end = std::partition_point(buckets_.begin(), buckets_.end(), kept);
        tail.buckets_.assign(end, buckets_.end());
        buckets_.erase(end, buckets_.end());
        if (!buckets_.empty()) last_ = buckets_.back().sum_y / (double)buckets_.back().n;
        return tail.extremes();
    }

    std::vector<Point> means() const {
        std::vector<Point> points;
        for (const Bucket& b : buckets_) points.push_back({b.sum_x / b.n, b.sum_y / b.n});
        return points;
    }

    // The smallest and the largest point of every bucket, in order of x: the curve's envelope.
    std::vector<Point> extremes() const {
        std::vector<Point> points;
        for (const Bucket& b : buckets_) {
            const Point &first = b.low.x <= b.high.x ? b.low : b.high, &second = b.low.x <= b.high.x ? b.high : b.low;
            points.push_back(first);
            if (second.x > first.x) points.push_back(second);
        }
        return points;
    }

    // Gaussian average of the means. Its width is 1% of the curve's length, less near the start: the first fall stays steep.
    std::vector<Point> smoothed() const {
        const std::vector<Point> raw = means();
        std::vector<Point> points;
        if (raw.empty()) return points;
        size_t from = 0;
        for (const Point& at : raw) {
            const double sigma = std::max(1e-9, std::min(0.01 * (raw.back().x - raw[0].x), 0.08 * (at.x - raw[0].x)));
            while (raw[from].x < at.x - 3 * sigma) from++;
            double sum = 0, weights = 0;
            for (size_t i = from; i < raw.size() && raw[i].x <= at.x + 3 * sigma; i++) {
                const double z = (raw[i].x - at.x) / sigma, weight = buckets_[i].n * std::exp(-0.5 * z * z);
                sum += weight * raw[i].y, weights += weight;
            }
            points.push_back({at.x, sum / weights});
        }
        return points;
    }

private:
    struct Bucket {
        int64_t key, n;  // x / stride; points
        double sum_x, sum_y;
        Point low, high;
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
            a.n += b.n, a.sum_x += b.sum_x, a.sum_y += b.sum_y;
            if (b.low.y < a.low.y) a.low = b.low;
            if (b.high.y > a.high.y) a.high = b.high;
        }
        buckets_.resize(kept);
    }

    std::vector<Bucket> buckets_;
    int64_t stride_ = 1;
    double last_ = NAN;
};

// ---- axes ------------------------------------------------------------------------------------------------------------------
// The smallest of 1, 2, 5 times a power of ten that cuts [lo, hi] into at most n parts.
inline double nice_step(double lo, double hi, int n) {
    const double least = std::max((hi - lo) / n, 1e-300), power = std::pow(10, std::floor(std::log10(least)));
    for (const double m : {1.0, 2.0, 5.0})
        if (m * power >= least * (1 - 1e-9)) return m * power;
    return 10 * power;
}

inline std::vector<double> linear_ticks(double lo, double hi, int n) {
    const double step = nice_step(lo, hi, n);
    std::vector<double> ticks;
    for (double k = std::ceil(lo / step - 1e-6) + 0.0; k * step <= hi + 1e-6 * step; k++) ticks.push_back(k * step);
    return ticks;
}

// Powers of ten, with 2 and 5 between them where the range is short, every k-th power where it is long.
inline std::vector<double> log_ticks(double lo, double hi, int n) {
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

inline std::string tick_label(double v, double step) {
    if (std::fabs(v) < 1e-9 * step) return "0";
    if (std::fabs(v) < 99999.5) return short_number(v);
    for (const auto& [unit, suffix] : {std::pair{1e12, "T"}, {1e9, "B"}, {1e6, "M"}, {1e3, "K"}})
        if (std::fabs(v) >= unit * 0.9999) return format("%.5g%s", v / unit, suffix);
    return short_number(v);
}

// ---- charts ----------------------------------------------------------------------------------------------------------------
struct Series {
    std::string name;   // shown in the legend; empty: in none, and not under the cursor
    std::string style;  // class of the line: raw, train, valid, ...
    std::vector<Point> points;
    bool dots = false;   // mark every point (while they are few)
    bool steps = false;  // constant from one point to the next
};

struct Chart {
    std::string id, title;
    std::vector<Series> series;
    double lo = 0, hi = 1;  // range of y
    bool logarithmic = false;
    double baseline = NAN;  // a dashed horizontal line ...
    std::string baseline_name;
    std::vector<int64_t> marks;                          // x of ticks at the upper edge: steps whose value is not finite
    std::vector<std::pair<int64_t, std::string>> notes;  // vertical lines with a word: what happened at this step
    int decimals = -1;           // of the values in the caption; negative: as many as short_number() takes
    bool direct_labels = false;  // names and last values beside the ends of the lines
    int width = 560, height = 230;
};

// Where a chart's values lie in its picture.
struct Frame {
    double left, right, top, bottom, x0, x1, y0, y1;
    bool logarithmic;
    double x(double v) const { return left + (right - left) * (v - x0) / (x1 - x0); }
    double y(double v) const {
        const double part = logarithmic ? std::log(std::max(v, 1e-300) / y0) / std::log(y1 / y0) : (v - y0) / (y1 - y0);
        return bottom - (bottom - top) * std::clamp(part, -1.0, 2.0);
    }
};

inline Frame frame_of(const Chart& c) {
    Frame f{54,           c.width - (c.direct_labels ? 124.0 : 24.0), 12, c.height - 30.0, INFINITY, -INFINITY, c.lo, c.hi,
            c.logarithmic};
    for (const Series& s : c.series)
        for (const Point& p : s.points) f.x0 = std::min(f.x0, p.x), f.x1 = std::max(f.x1, p.x);
    if (!(f.x0 <= f.x1)) f.x0 = 0, f.x1 = 1;
    if (f.x0 < 0.05 * f.x1) f.x0 = 0;  // a run starts at 0, though its first record is step 1
    if (f.x1 <= f.x0) f.x1 = f.x0 + 1;
    return f;
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

inline std::string svg_path(const Frame& f, const Series& s) {
    std::string d;
    double last_y = 0;
    for (size_t i = 0; i < s.points.size(); i++) {
        const double x = f.x(s.points[i].x), y = f.y(s.points[i].y);
        if (s.steps && i > 0) d += format("L%.1f %.1f", x, last_y);
        d += format("%c%.1f %.1f", i == 0 ? 'M' : 'L', x, y);
        last_y = y;
    }
    return d;
}

inline std::string svg_axes(const Chart& c, const Frame& f) {
    std::string out;
    const int x_parts = std::max(3, c.width / 110), y_parts = std::max(3, c.height / 44);
    const std::vector<double> y_ticks = c.logarithmic ? log_ticks(f.y0, f.y1, y_parts) : linear_ticks(f.y0, f.y1, y_parts);
    const double y_step = c.logarithmic ? f.y0 : nice_step(f.y0, f.y1, y_parts),
                 x_step = std::max(1.0, nice_step(f.x0, f.x1, x_parts));
    for (const double v : y_ticks)
        out += format(
            "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/><text class=\"tick\" x=\"%.1f\" y=\"%.1f\" "
            "text-anchor=\"end\">%s</text>",
            f.left, f.y(v), f.right, f.left - 8, f.y(v) + 4, tick_label(v, y_step).c_str());
    for (double v = std::ceil(f.x0 / x_step) * x_step; v <= f.x1 * (1 + 1e-9); v += x_step)
        out += format(
            "<path class=\"axis\" d=\"M%.1f %.1fv5\"/><text class=\"tick\" x=\"%.1f\" y=\"%.1f\" "
            "text-anchor=\"middle\">%s</text>",
            f.x(v), f.bottom, f.x(v), f.bottom + 19, tick_label(v, x_step).c_str());
    return out + format("<path class=\"axis\" d=\"M%.1f %.1fH%.1f\"/>", f.left, f.bottom, f.right);
}

// Names and last values at the right of the lines' ends, moved apart where they would overlap.
inline std::string svg_end_labels(const Chart& c, const Frame& f) {
    struct Label {
        double y;
        std::string style, text;
    };
    std::vector<Label> labels;
    for (const Series& s : c.series)
        if (!s.name.empty() && !s.points.empty())
            labels.push_back({f.y(s.points.back().y), s.style, format("%s %.3f", s.name.c_str(), s.points.back().y)});
    if (std::isfinite(c.baseline))
        labels.push_back({f.y(c.baseline), "baseline", format("%s %.3f", c.baseline_name.c_str(), c.baseline)});
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
                             c.id.c_str(), f.left, f.top - 4, f.right - f.left + 5, f.bottom - f.top + 4);
    out += svg_axes(c, f) + format("<g clip-path=\"url(#clip-%s)\">", c.id.c_str());
    if (std::isfinite(c.baseline))
        out += format("<path class=\"line baseline\" d=\"M%.1f %.1fH%.1f\"/>", f.left, f.y(c.baseline), f.right);
    for (const auto& [x, word] : c.notes)
        out += format(
            "<path class=\"note\" d=\"M%.1f %.1fV%.1f\"/><text class=\"tick\" x=\"%.1f\" y=\"%.1f\" "
            "text-anchor=\"%s\">%s</text>",
            f.x((double)x), f.top, f.bottom, f.x((double)x) + (f.x((double)x) > f.right - 80 ? -5 : 5), f.bottom - 8,
            f.x((double)x) > f.right - 80 ? "end" : "start", xml_escape(word).c_str());
    for (const Series& s : c.series) {
        if (s.points.empty()) continue;
        out += format("<path class=\"line %s\" d=\"%s\"/>", s.style.c_str(), svg_path(f, s).c_str());
        // a line of one point would show nothing
        if (s.points.size() == 1 || (s.dots && s.points.size() <= 80))
            for (const Point& p : s.points)
                out +=
                    format("<circle class=\"dot %s\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"/>", s.style.c_str(), f.x(p.x), f.y(p.y));
    }
    for (const int64_t x : c.marks)
        out += format("<path class=\"mark\" d=\"M%.1f %.1fl-4 -7h8z\"><title>step %lld: not finite</title></path>",
                      f.x((double)x), f.top + 5, (long long)x);
    out += "</g>";
    return out + (c.direct_labels ? svg_end_labels(c, f) : "");
}
