// Successive halving, with a fake training that has a known best learning rate; planning, sampling, keeping and fitting.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "../llmc/plan/halving.h"

namespace {

TEST(Sweep, RungsAndTheirTokens) {
    const auto sizes = [](int configs, int eta) {
        std::vector<int> all;
        for (const Rung& r : plan_rungs(configs, eta, 3)) all.push_back(r.configs);
        return all;
    };
    EXPECT_EQ(sizes(16, 3), (std::vector<int>{16, 6, 2}));
    EXPECT_EQ(sizes(16, 4), (std::vector<int>{16, 4}));
    EXPECT_EQ(sizes(27, 3), (std::vector<int>{27, 9, 3}));
    EXPECT_EQ(sizes(2, 3), (std::vector<int>{2}));
    EXPECT_EQ(sizes(1, 2), (std::vector<int>{1}));
    const std::vector<Rung> rungs = plan_rungs(16, 3, 3);
    EXPECT_EQ(rungs[0].seeds, 1);
    EXPECT_EQ(rungs[2].seeds, 3);
    EXPECT_DOUBLE_EQ(rungs[0].tokens, 1.0 / 9);
    EXPECT_DOUBLE_EQ(rungs[2].tokens, 1);
    EXPECT_DOUBLE_EQ(total_tokens(rungs), 16.0 / 9 + 6.0 / 3 + 2 * 3);
}

TEST(Sweep, RangesAreSampledByMagnitudeIfTheyHaveAny) {
    const Dimension lr = {"lr", {}, 1e-4, 1e-2, false}, beta = {"adam-beta2", {}, 0.9, 0.999, false},
                    dropout = {"hidden-dropout", {}, 0, 0.4, false}, batch = {"global-batch-size", {}, 8, 64, true};
    EXPECT_TRUE(lr.logarithmic());
    EXPECT_FALSE(beta.logarithmic());
    EXPECT_FALSE(dropout.logarithmic());
    EXPECT_EQ(lr.at(0), "0.0001");
    EXPECT_EQ(lr.at(0.5), "0.001");
    EXPECT_EQ(dropout.at(0.5), "0.2");
    EXPECT_EQ(batch.at(0.5), "23");  // sqrt(8 * 64) = 22.6
    // Rounded values stay in their range, and in a narrow range remain distinct.
    const std::vector<Dimension> ranges = {beta,
                                           lr,
                                           {"adam-beta2", {}, 0.99, 0.9999, false},
                                           {"x", {}, 0.123456, 0.1234567, false},
                                           {"x", {}, 1.2345, 100, false},
                                           {"x", {}, -2.34567, 3.3333, false}};
    for (const Dimension& d : ranges) {
        std::set<std::string> values;
        for (int i = 0; i < 100; i++) {
            const std::string value = d.at(i / 99.000001);
            EXPECT_GE(std::stod(value), d.low) << d.option;
            EXPECT_LE(std::stod(value), d.high) << d.option;
            values.insert(value);
        }
        EXPECT_GE(values.size(), 95u) << d.low;
    }
}

TEST(Sweep, EveryPartOfARangeIsTried) {
    const std::vector<Dimension> both = {{"lr", {}, 1e-4, 1e-2, false}, {"weight-decay", {"0", "0.1"}, 0, 0, false}};
    const std::vector<Choices> configs = sample_configs(both, 10, 7);
    ASSERT_EQ(configs.size(), 10u);
    std::set<int> parts;
    int without = 0;
    for (const Choices& c : configs) {
        const double u = std::log10(std::stod(c[0]) / 1e-4) / 2;
        parts.insert((int)(u * 10));
        without += c[1] == "0";
    }
    EXPECT_GE(parts.size(), 9u) << "one in each, but for what is rounded over a border";
    EXPECT_EQ(without, 5);
    EXPECT_EQ(configs, sample_configs(both, 10, 7));
    EXPECT_NE(configs, sample_configs(both, 10, 8));
}

TEST(Sweep, ListsGiveTheirGridOrDifferentPointsOfIt) {
    const std::vector<Dimension> lists = {{"lr", {"1", "2", "3"}, 0, 0, false}, {"optimizer", {"adamw", "muon"}, 0, 0, false}};
    const std::vector<Choices> grid = sample_configs(lists, 16, 1), some = sample_configs(lists, 4, 1);
    EXPECT_EQ(grid.size(), 6u);
    EXPECT_EQ(grid[1], (Choices{"1", "muon"}));
    EXPECT_EQ(std::set<Choices>(some.begin(), some.end()).size(), 4u);
    const std::vector<Dimension> huge(30, lists[1]);
    EXPECT_EQ(sample_configs(huge, 5, 1).size(), 5u);
}

TEST(Sweep, HalvingKeepsTheBestOfAStandIn) {
    // The loss falls with tokens towards a floor that depends on the learning rate; above 3e-2 it diverges.
    const auto loss = [](double lr, double tokens, int seed) {
        if (lr > 3e-2) return (double)NAN;
        return 2 + 0.3 * std::pow(std::log10(lr / 2e-3), 2) + std::pow(tokens, -0.5) + 1e-3 * seed;
    };
    const std::vector<Choices> configs = sample_configs({{"lr", {}, 1e-5, 1, false}}, 27, 3);
    const std::vector<Rung> rungs = plan_rungs((int)configs.size(), 3, 3);
    TrialResults results;
    std::vector<int> left;
    for (int c = 0; c < (int)configs.size(); c++) left.push_back(c);
    for (int k = 0; k < (int)rungs.size(); k++) {
        if (k) left = survivors(results, k - 1, rungs[(size_t)k].configs);
        EXPECT_EQ((int)left.size(), rungs[(size_t)k].configs);
        for (const int c : left)
            for (int seed = 0; seed < rungs[(size_t)k].seeds; seed++)
                results[{k, c, seed}].loss = loss(std::stod(configs[(size_t)c][0]), 100 * rungs[(size_t)k].tokens, seed);
    }
    const std::vector<Standing> last = standings(results, 2);
    ASSERT_EQ(last.size(), 3u);
    int nearest = 0;
    for (int c = 0; c < (int)configs.size(); c++)
        if (!(loss(std::stod(configs[(size_t)nearest][0]), 1, 0) <= loss(std::stod(configs[(size_t)c][0]), 1, 0)) &&
            std::isfinite(loss(std::stod(configs[(size_t)c][0]), 1, 0)))
            nearest = c;
    EXPECT_EQ(last[0].config, nearest);
    EXPECT_EQ(last[0].runs, 3);
    EXPECT_NEAR(last[0].error, 1e-3 / std::sqrt(3), 1e-12);
}

TEST(Sweep, FailuresComeLastAndDoNotGoOn) {
    TrialResults results;
    results[{0, 0, 0}].loss = 1;
    results[{0, 0, 1}].why = "died";
    results[{0, 1, 0}].loss = results[{0, 1, 1}].loss = 5;
    results[{0, 2, 0}].why = results[{0, 2, 1}].why = "died";
    const std::vector<Standing> of = standings(results, 0);
    EXPECT_EQ(of[0].config, 1) << "whose runs all end well, before a better one that may die";
    EXPECT_EQ(of[1].config, 0);
    EXPECT_EQ(of[2].failed, 2);
    EXPECT_EQ(survivors(results, 0, 3), (std::vector<int>{0, 1}));
    EXPECT_EQ(survivors(results, 0, 1), (std::vector<int>{1}));
}

TEST(Sweep, PowerLawWithErrors) {
    std::vector<ComputePoint> points;
    for (const double c : {1.0, 10.0, 100.0}) points.push_back({c, 5 * std::pow(c, -0.1)});
    const PowerLaw exact = fit_power_law(points);
    EXPECT_NEAR(exact.a, 5, 1e-12);
    EXPECT_NEAR(exact.b, 0.1, 1e-12);
    EXPECT_NEAR(exact.b_error, 0, 1e-9);
    // The middle point off by e^0.03: residuals -0.01, 0.02, -0.01, variance 6e-4 over one degree of freedom.
    points[1].loss *= std::exp(0.03);
    const PowerLaw noisy = fit_power_law(points);
    const double step = std::log(10.0);
    EXPECT_NEAR(noisy.b, 0.1, 1e-12);
    EXPECT_NEAR(noisy.b_error, std::sqrt(6e-4 / (2 * step * step)), 1e-12);
    EXPECT_NEAR(noisy.a_error / noisy.a, std::sqrt(6e-4 * (1.0 / 3 + 0.5)), 1e-12);
    points.pop_back();
    EXPECT_THROW(fit_power_law(points), Error);
    const auto best = best_at_each_compute({{2, 3}, {1, 4}, {1.04, 3.5}, {1.01, 5}});
    ASSERT_EQ(best.size(), 2u);
    EXPECT_DOUBLE_EQ(best[0].loss, 3.5);
    EXPECT_DOUBLE_EQ(best[1].compute, 2);
}

}  // namespace
