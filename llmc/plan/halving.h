// Successive halving (Karnin et al., 2013; Jamieson & Talwalkar, 2016): many configurations are tried for a short time, the
// best of them for longer, and so on, until few are left, which are tried for as long as the budget allows.
//   Dimension        one searched option: a range of numbers, or a list of values
//   sample_configs   points that cover all dimensions evenly: the whole grid of lists, or a Latin hypercube (McKay et al.,
//                    1979)
//   plan_rungs       N, N/eta, N/eta^2, ... configurations, down to the last that are 2 or more; a rung's runs are eta times as
//                    long as the previous ones. Runs of the last rung are repeated with several seeds
//   standings        mean and standard error of each configuration in a rung, best first
//   fit_power_law    L = a C^-b by least squares of log L over log C, with standard errors of both
// Configurations and runs are opaque here (sweep.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/math.h"
#include "../base/rng.h"

// ---- the search space ------------------------------------------------------------------------------------------------------
struct Dimension {
    std::string option;
    std::vector<std::string> values;  // of a list; empty: a range
    double low = 0, high = 0;
    bool whole = false;  // numbers are rounded to whole ones

    bool range() const { return values.empty(); }
    // A range that spans a factor of 4 or more is searched logarithmically, such as learning rates.
    bool logarithmic() const { return range() && low > 0 && high >= 4 * low; }
    // The value at u, in [0, 1).
    std::string at(double u) const {
        if (!range()) return values[(size_t)(u * (double)values.size())];
        const double x = logarithmic() ? low * std::pow(high / low, u) : low + u * (high - low);
        if (whole) return std::to_string(std::llround(x));
        int digits = 3;  // of its position in the range: more of the number if the range is narrow
        if (!logarithmic())
            for (double width = high - low; width > 0 && width < std::abs(high) && digits < 15; width *= 10) digits++;
        const std::string text = format("%.*g", digits, x);
        const double rounded = std::stod(text);
        return rounded < low ? format("%.15g", low) : rounded > high ? format("%.15g", high) : text;
    }
};

using Choices = std::vector<std::string>;  // a value of each dimension

namespace detail {

// A random order of 0 ... n - 1.
inline std::vector<size_t> shuffled(size_t n, uint64_t seed, uint32_t stream) {
    std::vector<size_t> order(n);
    for (size_t i = 0; i < n; i++) {
        order[i] = i;
        std::swap(order[i], order[(size_t)(uniform_at(seed, RngPurpose::sweep, stream, i) * (double)(i + 1))]);
    }
    return order;
}

}  // namespace detail

// At most n different configurations. For only lists, their grid, or n points of it if it has more. Otherwise each range is
// split into n parts, each used by one configuration; each value of a list is used about equally often.
inline std::vector<Choices> sample_configs(const std::vector<Dimension>& dimensions, size_t n, uint64_t seed) {
    constexpr size_t largest_grid = 1000000;
    size_t grid = 1;
    for (const Dimension& d : dimensions) grid = d.range() || grid > largest_grid ? 2 * largest_grid : grid * d.values.size();
    std::vector<Choices> configs;
    if (grid <= largest_grid) {
        std::vector<size_t> points = detail::shuffled(grid, seed, 0);
        points.resize(std::min(n, grid));
        std::sort(points.begin(), points.end());
        for (size_t point : points) {
            Choices& config = configs.emplace_back(dimensions.size());
            for (size_t d = dimensions.size(); d-- > 0; point /= dimensions[d].values.size())
                config[d] = dimensions[d].values[point % dimensions[d].values.size()];
        }
        return configs;
    }
    configs.resize(n, Choices(dimensions.size()));
    for (uint32_t d = 0; d < dimensions.size(); d++) {
        const std::vector<size_t> parts = detail::shuffled(n, seed, 2 * d);
        for (size_t i = 0; i < n; i++) {
            const double u = ((double)parts[i] + uniform_at(seed, RngPurpose::sweep, 2 * d + 1, i)) / (double)n;
            configs[i][d] = dimensions[d].at(std::min(u, 1 - 1e-12));
        }
    }
    std::set<Choices> seen;
    configs.erase(std::remove_if(configs.begin(), configs.end(), [&](const Choices& c) { return !seen.insert(c).second; }),
                  configs.end());
    return configs;
}

// ---- the plan --------------------------------------------------------------------------------------------------------------
struct Rung {
    int configs = 0, seeds = 1;
    double tokens = 0;  // of a run

    int runs() const { return configs * seeds; }
};

// The rungs, whose last runs are 1 token long.
inline std::vector<Rung> plan_rungs(int configs, int eta, int seeds) {
    std::vector<Rung> rungs;
    const auto next = [&](int n) { return (n + eta - 1) / eta; };
    for (int n = configs;; n = next(n)) {
        rungs.push_back({n, 1, 1});
        if (next(n) < 2) break;
    }
    rungs.back().seeds = seeds;
    for (size_t k = rungs.size(); k-- > 0;) rungs[k].tokens = k + 1 == rungs.size() ? 1 : rungs[k + 1].tokens / eta;
    return rungs;
}
inline double total_tokens(const std::vector<Rung>& rungs) {
    double sum = 0;
    for (const Rung& r : rungs) sum += r.runs() * r.tokens;
    return sum;
}

// ---- results ---------------------------------------------------------------------------------------------------------------
struct TrialKey {
    int rung, config, seed;
    bool operator<(const TrialKey& o) const { return std::tie(rung, config, seed) < std::tie(o.rung, o.config, o.seed); }
};
struct TrialResult {
    double loss = NAN, seconds = 0, tokens = 0, flops = 0;
    std::string why;  // it failed
    bool finished() const { return std::isfinite(loss); }
};
using TrialResults = std::map<TrialKey, TrialResult>;

struct Standing {
    int config = 0, runs = 0, failed = 0;
    double mean = INFINITY, error = NAN;  // standard error of the mean; NaN for a single run
};

// The configurations of a rung, best first: by fewer failures, then by the mean of their losses.
inline std::vector<Standing> standings(const TrialResults& results, int rung) {
    std::map<int, std::vector<double>> losses;
    std::map<int, int> failed;
    for (const auto& [key, result] : results) {
        if (key.rung != rung) continue;
        std::vector<double>& of = losses[key.config];
        if (result.finished()) of.push_back(result.loss);
        else failed[key.config]++;
    }
    std::vector<Standing> all;
    for (const auto& [config, of] : losses) {
        Standing s = {config, (int)of.size(), failed[config]};
        if (!of.empty()) {
            const auto [mean, error] = mean_with_error(of);
            s.mean = mean;
            s.error = error;
        }
        all.push_back(s);
    }
    std::stable_sort(all.begin(), all.end(), [](const Standing& a, const Standing& b) {
        return a.failed != b.failed ? a.failed < b.failed : a.mean < b.mean;
    });
    return all;
}
// The configurations that continue from a rung, in their own order; ones without a successful run do not.
inline std::vector<int> survivors(const TrialResults& results, int rung, int most) {
    std::vector<int> best;
    for (const Standing& s : standings(results, rung))
        if (s.runs > 0 && (int)best.size() < most) best.push_back(s.config);
    std::sort(best.begin(), best.end());
    return best;
}

// ---- loss over compute -----------------------------------------------------------------------------------------------------
struct ComputePoint {
    double compute = 0, loss = 0;
};
// The best run at each compute, in ascending order. Computes within 5% of each other are merged: steps are whole.
inline std::vector<ComputePoint> best_at_each_compute(std::vector<ComputePoint> all) {
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.compute < b.compute; });
    std::vector<ComputePoint> best;
    double first = 0;
    for (const ComputePoint& p : all) {
        if (best.empty() || p.compute > 1.05 * first) {
            first = p.compute;
            best.push_back(p);
        } else if (p.loss < best.back().loss) best.back() = p;
    }
    return best;
}

// L = a C^-b, with standard errors.
struct PowerLaw {
    double a = 0, b = 0, a_error = 0, b_error = 0;
    double at(double compute) const { return a * std::pow(compute, -b); }
};
constexpr size_t least_computes = 3;  // a line through two points has no error estimate

inline PowerLaw fit_power_law(const std::vector<ComputePoint>& points) {
    if (points.size() < least_computes)
        fail(
            "a power law needs runs of %zu different computes, there %s %zu; HINT: more --configs make more rungs, or sweep "
            "over sizes, as in --over size=1m,2m,4m",
            least_computes, points.size() == 1 ? "is" : "are", points.size());
    const auto n = (double)points.size();
    double x_mean = 0, y_mean = 0, xx = 0, xy = 0, squares = 0;
    for (const auto& [compute, loss] : points) {
        x_mean += std::log(compute) / n;
        y_mean += std::log(loss) / n;
    }
    for (const auto& [compute, loss] : points) {
        const double x = std::log(compute) - x_mean;
        xx += x * x;
        xy += x * (std::log(loss) - y_mean);
    }
    const double slope = xy / xx, start = y_mean - slope * x_mean;
    for (const auto& [compute, loss] : points) {
        const double error = std::log(loss) - start - slope * std::log(compute);
        squares += error * error;
    }
    const double variance = squares / (n - 2);
    return {std::exp(start), -slope, std::exp(start) * std::sqrt(variance * (1 / n + x_mean * x_mean / xx)),
            std::sqrt(variance / xx)};
}
