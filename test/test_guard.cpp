// The guard: every rule of its policies, on curves with medians known by hand; then long synthetic curves, where exactly
// the planted outliers must be found.
#include <gtest/gtest.h>

#include <functional>

#include "../llmc/plan/guard.h"
#include "../llmc/base/json.h"
#include "files.h"
#include "testing.h"

namespace test_guard {

GuardOptions options(const std::string& policy) { return {policy, 128, 8, 10, 3, 5, 100, 200}; }
const char* const policies[] = {"warn", "skip", "rollback"};

// A guard, and the numbers of the next step and its batch, which may differ.
struct Training {
    Guard guard;
    int64_t step = 1, batch = 1001;
    explicit Training(const GuardOptions& o) : guard(o) {}
    explicit Training(const std::string& policy) : guard(options(policy)) {}

    Verdict judge(double loss, double norm) { return guard.judge(step++, batch++, loss, norm); }
    // n normal steps. Losses cycle through 2.9, 3.0, 3.1: median 3, MAD 0.1. Norms 0.4, 0.5, 0.6: median 0.5.
    void calm(int n = 33) {
        for (int i = 0; i < n; i++) {
            const Verdict v = judge(2.9 + 0.1 * (i % 3), 0.4 + 0.1 * (i % 3));
            ASSERT_EQ(v.kind, Verdict::normal) << v.reason;
        }
    }
    Verdict normal() { return judge(3, 0.5); }
    Verdict spike() { return judge(30, 0.5); }
    Verdict nonfinite() { return judge(NAN, 0.5); }
    std::string window() const { return guard.state()["window"].dump(); }
};

void expect(const Verdict& v, Verdict::Kind kind, bool apply) {
    EXPECT_EQ(v.kind, kind) << v.reason;
    EXPECT_EQ(v.apply, apply) << v.reason;
    EXPECT_FALSE(v.rollback) << v.reason;
    EXPECT_FALSE(v.give_up) << v.reason;
    EXPECT_EQ(v.reason.empty(), kind == Verdict::normal) << v.reason;
    EXPECT_EQ(v.first_outlier_step == 0, kind == Verdict::normal);
}

bool says(const Verdict& v, const std::string& part) { return v.reason.find(part) != std::string::npos; }

// ---- statistics -------------------------------------------------------------------------------------------------------------
TEST(Median, AgainstSorting) {
    EXPECT_EQ(median({5}), 5);
    EXPECT_EQ(median({5, 1}), 3);
    EXPECT_EQ(median({5, 1, 2}), 2);
    EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
    EXPECT_EQ(median_deviation({1, 2, 4, 8, 100}, 4), 3);  // distances 3, 2, 0, 4, 96
    test::Rng rng(1);
    for (int n = 1; n < 70; n++) {
        std::vector<double> x = rng.normals<double>((size_t)n), sorted = x;
        if (n % 3 == 0) x[0] = sorted[0] = x.back();  // equal ones
        std::sort(sorted.begin(), sorted.end());
        const double low = sorted[(size_t)(n - 1) / 2], high = sorted[(size_t)n / 2];
        EXPECT_DOUBLE_EQ(median(x), (low + high) / 2) << n;
    }
}

// ---- outliers --------------------------------------------------------------------------------------------------------------
TEST(Guard, LossSpikeIsEightRobustDeviationsAboveTheMedian) {
    const double highest = 3 + 8 * 1.4826 * 0.1;
    Training run("skip");
    run.calm();
    expect(Training(run).judge(highest - 1e-6, 0.5), Verdict::normal, true);
    expect(Training(run).judge(highest + 1e-6, 0.5), Verdict::spike, false);
    const Verdict v = run.judge(4.5, 0.5);
    EXPECT_TRUE(says(v, "loss 4.5 is above 4.1861 = median 3 + 8 standard deviations of 0.148")) << v.reason;

    GuardOptions o = options("skip");
    o.loss_deviations = 2;
    Training strict(o);
    strict.calm();
    expect(Training(strict).judge(3 + 2 * 1.4826 * 0.1 - 1e-6, 0.5), Verdict::normal, true);
    expect(strict.judge(3 + 2 * 1.4826 * 0.1 + 1e-6, 0.5), Verdict::spike, false);
}

TEST(Guard, NormSpikeIsTenTimesTheMedian) {
    Training run("skip");
    run.calm();
    expect(Training(run).judge(3, 5 - 1e-6), Verdict::normal, true);
    expect(Training(run).judge(3, 5 + 1e-6), Verdict::spike, false);
    const Verdict v = run.judge(3, 50);
    EXPECT_TRUE(says(v, "gradient norm 50 is above 5 = 10 x median 0.5")) << v.reason;

    GuardOptions o = options("skip");
    o.norm_factor = 2;
    Training strict(o);
    strict.calm();
    expect(Training(strict).judge(3, 1 - 1e-6), Verdict::normal, true);
    expect(strict.judge(3, 1 + 1e-6), Verdict::spike, false);
}

TEST(Guard, OnlyWhatLiesAboveCounts) {
    Training run("skip");
    run.calm();
    expect(run.judge(0.01, 0.5), Verdict::normal, true);
    expect(run.judge(-20, 0.5), Verdict::normal, true);
    expect(run.judge(3, 0), Verdict::normal, true);
}

// A window without noise, at several levels: the smallest MAD is 0.5% of the median, and 0.001.
TEST(Guard, QuietWindowDoesNotCryWolf) {
    for (const double level : {3.0, 10.0, 0.01, 0.0, -2.0}) {
        const double highest = level + 8 * 1.4826 * std::max(0.005 * std::abs(level), 0.001);
        Training run("skip");
        for (int i = 0; i < 40; i++) expect(run.judge(level, 0.5), Verdict::normal, true);
        expect(Training(run).judge(highest - 1e-6, 0.5), Verdict::normal, true);
        expect(Training(run).judge(highest + 1e-6, 0.5), Verdict::spike, false);
    }
    Training run("skip");  // no gradients so far: no norm to compare with
    for (int i = 0; i < 40; i++) run.judge(3, 0);
    expect(run.judge(3, 1), Verdict::normal, true);
}

TEST(Guard, NoSpikesBeforeTheWindowHoldsEnough) {
    Training run("skip");
    run.calm(31);
    expect(Training(run).judge(1e6, 1e6), Verdict::normal, true);
    for (int i = 0; i < 2; i++) expect(run.nonfinite(), Verdict::nonfinite, false);  // judged, but not counted towards `least`
    expect(Training(run).judge(1e6, 1e6), Verdict::normal, true);
    run.calm(1);
    EXPECT_EQ(run.judge(1e6, 1e6).kind, Verdict::spike);

    GuardOptions o = options("skip");  // a window shorter than `least`
    o.window = 8;
    Training shorter(o);
    shorter.calm(7);
    expect(Training(shorter).spike(), Verdict::normal, true);
    shorter.calm(1);
    expect(shorter.spike(), Verdict::spike, false);
}

TEST(Guard, NonfiniteIsNeverAppliedNorRemembered) {
    const double bad[][2] = {{NAN, 0.5}, {INFINITY, 0.5}, {-INFINITY, 0.5}, {3, NAN}, {3, INFINITY}, {NAN, NAN}};
    for (const char* policy : policies)
        for (const int before : {0, 5, 40})
            for (const auto& [loss, norm] : bad) {
                Training run(policy);
                run.calm(before);
                const std::string window = run.window();
                expect(run.judge(loss, norm), Verdict::nonfinite, false);
                EXPECT_EQ(run.window(), window);
                EXPECT_EQ(run.guard.nonfinite(), 1);
                EXPECT_EQ(run.guard.spikes(), 0);
                EXPECT_EQ(run.guard.skipped(), 1);
            }
}

TEST(Guard, WindowHoldsTheLatestNormalSteps) {
    GuardOptions o = options("skip");
    o.window = 40;
    Training run(o);
    run.calm(100);
    for (int i = 0; i < 19; i++) expect(run.judge(4.1, 0.5), Verdict::normal, true);
    expect(Training(run).judge(6, 0.5), Verdict::spike, false);  // 21 of 40 are still about 3: median 3.1, MAD 0.2
    for (int i = 0; i < 21; i++) expect(run.judge(4.1, 0.5), Verdict::normal, true);
    expect(Training(run).judge(4.1 + 8 * 1.4826 * 0.005 * 4.1 - 1e-6, 0.5), Verdict::normal, true);  // all are 4.1
    expect(Training(run).judge(4.1 + 8 * 1.4826 * 0.005 * 4.1 + 1e-6, 0.5), Verdict::spike, false);
    EXPECT_EQ(run.guard.state()["window"]["losses"].size(), 40u);
    EXPECT_EQ(run.guard.state()["window"]["grad_norms"].size(), 40u);

    Training usual("skip");
    usual.calm(300);
    EXPECT_EQ(usual.guard.state()["window"]["losses"].size(), 128u);
}

// ---- rows of outliers -------------------------------------------------------------------------------------------------------
TEST(Guard, RowKnowsItsFirstOutlier) {
    for (const char* policy : policies) {
        Training run(policy);
        run.calm(40);
        EXPECT_EQ(run.normal().first_outlier_step, 0);
        for (int i = 0; i < 2; i++) {
            const Verdict v = i == 0 ? run.spike() : run.nonfinite();
            EXPECT_EQ(v.first_outlier_step, 42) << policy;
            EXPECT_EQ(v.first_outlier_batch, 1042) << policy;
            EXPECT_EQ(says(v, "outlier 2 since step 42"), i == 1) << v.reason;
        }
        EXPECT_EQ(run.normal().first_outlier_step, 0);
        run.calm(11);
        const Verdict v = run.spike();
        EXPECT_EQ(v.first_outlier_step, 56) << policy;
        EXPECT_EQ(v.first_outlier_batch, 1056) << policy;
    }
}

// One normal step under warn, 4 x patience = 12 under the others.
TEST(Guard, NormalStepsEndTheRow) {
    for (const char* policy : policies)
        for (const bool finite : {true, false}) {
            Training run(policy);
            run.calm();
            for (int i = 0; i < 20; i++) {
                for (int k = 0; k < 2; k++) {
                    const Verdict v = finite ? run.spike() : run.nonfinite();
                    expect(v, finite ? Verdict::spike : Verdict::nonfinite, finite && policy == std::string("warn"));
                    EXPECT_FALSE(says(v, "new level"));
                }
                run.calm(policy == std::string("warn") ? 1 : 12);
            }
            EXPECT_EQ(run.guard.spikes(), finite ? 40 : 0);
            EXPECT_EQ(run.guard.nonfinite(), finite ? 0 : 40);
            EXPECT_EQ(run.guard.skipped(), finite && policy == std::string("warn") ? 0 : 40);
        }
}

TEST(Guard, AFewNormalStepsDoNot) {
    for (const char* policy : {"skip", "rollback"}) {
        Training run(policy);
        run.calm();
        EXPECT_EQ(run.spike().first_outlier_step, 34);
        run.calm(11);
        EXPECT_EQ(run.spike().first_outlier_step, 34);
        run.calm(11);
        const Verdict v = run.nonfinite();
        EXPECT_EQ(v.first_outlier_step, 34);
        EXPECT_EQ(v.rollback, policy == std::string("rollback"));
        EXPECT_EQ(v.give_up, policy == std::string("skip"));
        if (!v.rollback) continue;
        // No row is longer, so no rollback needs an earlier checkpoint.
        const int64_t last = 34 + 2 * 12, far = last - run.guard.way_back();
        EXPECT_EQ(run.guard.plan_rollback({far, far + 1}, v.first_outlier_step), far);
    }
    EXPECT_EQ(Guard(options("skip")).way_back(), -1);
}

TEST(Guard, SkipGivesUpAfterARow) {
    for (int pattern = 0; pattern < 8; pattern++) {  // spikes and non-finite steps in any order
        Training run("skip");
        run.calm();
        for (int i = 0; i < 3; i++) {
            const bool finite = pattern >> i & 1;
            const Verdict v = finite ? run.spike() : run.nonfinite();
            EXPECT_FALSE(v.apply);
            EXPECT_FALSE(v.rollback);
            EXPECT_EQ(v.give_up, i == 2) << pattern;
            EXPECT_EQ(says(v, "HINT: --on-spike rollback"), i == 2) << v.reason;
            EXPECT_EQ(says(v, "lower --lr"), i == 2) << v.reason;
            EXPECT_EQ(v.first_outlier_step, 34);
        }
    }
    GuardOptions o = options("skip");
    o.patience = 1;
    Training run(o);
    run.calm();
    EXPECT_TRUE(run.spike().give_up);
}

TEST(Guard, WarnAppliesSpikesButDoesNotRememberThem) {
    Training run("warn");
    run.calm();
    const std::string window = run.window();
    expect(run.spike(), Verdict::spike, true);
    expect(run.judge(3, 500), Verdict::spike, true);
    EXPECT_EQ(run.window(), window);
    EXPECT_EQ(run.guard.spikes(), 2);
    EXPECT_EQ(run.guard.skipped(), 0);
}

TEST(Guard, WarnStartsAnewAtANewLevel) {
    Training run("warn");
    run.calm(100);
    expect(run.judge(6.0, 0.5), Verdict::spike, true);
    expect(run.judge(6.1, 0.6), Verdict::spike, true);
    const Verdict v = run.judge(6.2, 0.7);
    expect(v, Verdict::spike, true);
    EXPECT_TRUE(says(v, "new level")) << v.reason;
    EXPECT_EQ(run.window(), R"({"losses":[6.0,6.1,6.2],"grad_norms":[0.5,0.6,0.7]})");
    // After 29 more at the new level, steps are judged by it.
    for (int i = 0; i < 29; i++) expect(run.judge(6.0 + 0.1 * (i % 3), 0.5), Verdict::normal, true);
    const Verdict next = run.judge(9, 0.5);
    expect(next, Verdict::spike, true);
    EXPECT_TRUE(says(next, "median 6.1")) << next.reason;
    EXPECT_FALSE(says(next, "in a row")) << next.reason;  // the first of a new row
}

TEST(Guard, WarnGivesUpWhenNothingIsFiniteAnyMore) {
    for (const int before : {0, 40}) {
        Training run("warn");
        run.calm(before);
        expect(run.nonfinite(), Verdict::nonfinite, false);
        expect(run.nonfinite(), Verdict::nonfinite, false);
        const Verdict v = run.nonfinite();
        EXPECT_TRUE(v.give_up);
        EXPECT_FALSE(v.apply);
        EXPECT_TRUE(says(v, "HINT")) << v.reason;
    }
    // A spike in between is a finite step: only consecutive non-finite steps count.
    Training run("warn");
    run.calm();
    for (int i = 0; i < 2; i++) expect(run.nonfinite(), Verdict::nonfinite, false);
    expect(run.spike(), Verdict::spike, true);
    for (int i = 0; i < 2; i++) expect(run.nonfinite(), Verdict::nonfinite, false);
    EXPECT_TRUE(run.nonfinite().give_up);
}

// Spikes with a non-finite step in between still establish a new level, without the non-finite step.
TEST(Guard, WarnKeepsNonfiniteOutOfTheNewLevel) {
    Training run("warn");
    run.calm();
    run.judge(6.0, 0.5);
    run.nonfinite();
    run.judge(6.1, 0.6);
    run.nonfinite();
    EXPECT_TRUE(says(run.judge(6.2, 0.7), "new level"));
    EXPECT_EQ(run.window(), R"({"losses":[6.0,6.1,6.2],"grad_norms":[0.5,0.6,0.7]})");
}

// ---- rollback ---------------------------------------------------------------------------------------------------------------
TEST(Guard, RollsBackAFewTimesThenGivesUp) {
    GuardOptions o = options("rollback");
    o.max_rollbacks = 2;
    o.patience = 4;
    Training run(o);
    run.calm();
    const Guard saved = run.guard;
    for (int i = 0; i < 3; i++) {
        const int64_t first = run.step, first_batch = run.batch;
        for (int k = 0; k < 3; k++) {
            const bool finite = (i + k) % 2;
            expect(finite ? run.spike() : run.nonfinite(), finite ? Verdict::spike : Verdict::nonfinite, false);
        }
        const Verdict v = run.spike();
        EXPECT_FALSE(v.apply);
        EXPECT_EQ(v.rollback, i < 2);
        EXPECT_EQ(v.give_up, i == 2);
        EXPECT_EQ(says(v, "HINT"), i == 2) << v.reason;
        EXPECT_EQ(v.first_outlier_step, first);
        EXPECT_EQ(v.first_outlier_batch, first_batch);
        EXPECT_EQ(run.guard.rollbacks(), std::min(i, 2));
        if (i < 2) run.guard.rolled_back(saved);
    }
    EXPECT_EQ(run.guard.spikes() + run.guard.nonfinite(), 12);  // the counts continue
    EXPECT_EQ(run.guard.skipped(), 12);

    o.max_rollbacks = 0;
    Training never(o);
    for (int i = 0; i < 3; i++) EXPECT_FALSE(never.nonfinite().give_up);
    EXPECT_TRUE(never.nonfinite().give_up);
}

// Restores the checkpoint's window: losses were higher then. The row is over.
TEST(Guard, RollbackTakesTheCheckpointsWindow) {
    Training run("rollback");
    for (int i = 0; i < 200; i++) run.judge(8 - 0.001 * i, 0.5);
    const Guard saved = run.guard;
    const std::string window = run.window();
    for (int i = 0; i < 800; i++) run.judge(7.8 - 0.005 * i, 0.5);
    expect(Training(run).judge(7.8, 0.5), Verdict::spike, false);
    for (int i = 0; i < 3; i++) run.spike();
    run.guard.rolled_back(saved);
    EXPECT_EQ(run.window(), window);
    expect(Training(run).judge(7.8, 0.5), Verdict::normal, true);
    expect(Training(run).spike(), Verdict::spike, false);  // the first of a new row

    run.guard.rolled_back(Guard(options("rollback")));  // a checkpoint without a guard
    EXPECT_EQ(run.window(), R"({"losses":[],"grad_norms":[]})");
    EXPECT_EQ(run.guard.rollbacks(), 2);
}

TEST(Guard, PlansTheRollback) {
    const Guard guard(options("rollback"));
    using Step = std::optional<int64_t>;
    EXPECT_EQ(guard.plan_rollback({100, 200, 300, 400}, 350), Step(200));
    EXPECT_EQ(guard.plan_rollback({400, 200, 100, 300}, 350), Step(200));  // in any order
    EXPECT_EQ(guard.plan_rollback({100, 200, 300}, 301), Step(200));       // 100 steps between: 201 to 300
    EXPECT_EQ(guard.plan_rollback({100, 200, 300}, 300), Step(100));
    EXPECT_EQ(guard.plan_rollback({300, 250, 400}, 310), Step(250));  // all too close: the oldest
    EXPECT_EQ(guard.plan_rollback({300}, 301), Step(300));
    EXPECT_EQ(guard.plan_rollback({300}, 300), Step());  // the outlier's own
    EXPECT_EQ(guard.plan_rollback({300, 400}, 200), Step());
    EXPECT_EQ(guard.plan_rollback({}, 200), Step());
    EXPECT_EQ(guard.plan_rollback({0, 50}, 101), Step(0));
    EXPECT_EQ(guard.plan_rollback({0, 50}, 60), Step(0));
    GuardOptions o = options("rollback");
    o.rollback_distance = 0;
    EXPECT_EQ(Guard(o).plan_rollback({100, 200, 300}, 301), Step(300));
    EXPECT_EQ(Guard(o).plan_rollback({100, 200, 300}, 300), Step(200));
}

TEST(Guard, LeavesOutTheBatchesAroundTheFirstOutlier) {
    using Range = BatchRanges::Range;
    GuardOptions o = options("rollback");
    EXPECT_EQ(Guard(o).rollback_range(1000), (Range{900, 1099}));
    EXPECT_EQ(Guard(o).rollback_range(101), (Range{1, 200}));
    EXPECT_EQ(Guard(o).rollback_range(50), (Range{1, 149}));
    EXPECT_EQ(Guard(o).rollback_range(1), (Range{1, 100}));
    o.rollback_batches = 1;
    EXPECT_EQ(Guard(o).rollback_range(1000), (Range{1000, 1000}));
    o.rollback_batches = 5;
    EXPECT_EQ(Guard(o).rollback_range(1000), (Range{998, 1002}));
}

// A complete run with a stretch of bad batches, as driven by a trainer: checkpoints, rollbacks, skip ranges. It recovers,
// has skipped all the bad batches, and has applied none of them.
TEST(Guard, RunComesThroughABadStretchOfData) {
    GuardOptions o = options("rollback");
    Guard guard(o);
    struct Checkpoint {
        int64_t step, batch;
        std::string guard;
    };
    std::vector<Checkpoint> checkpoints;
    BatchRanges skip;
    test::Rng rng(3);
    std::vector<int64_t> applied;
    int64_t step = 0, batch = 0, rollbacks = 0;
    while (step < 3000) {
        step++;
        batch = skip.next(batch + 1);
        const bool bad = batch >= 1500 && batch < 1750;
        const double loss = 2 + 40.0 / (double)(step + 10) + (bad ? 3 : 0.02 * rng.normal());
        const Verdict v = guard.judge(step, batch, loss, bad ? 20 : 0.5);
        ASSERT_FALSE(v.give_up) << v.reason;
        ASSERT_EQ(v.kind == Verdict::spike, bad) << "step " << step << ": " << v.reason;
        if (v.apply) applied.push_back(batch);
        if (v.rollback) {
            std::vector<int64_t> steps;
            for (const Checkpoint& c : checkpoints) steps.push_back(c.step);
            const std::optional<int64_t> to = guard.plan_rollback(steps, v.first_outlier_step);
            ASSERT_TRUE(to);
            ASSERT_LT(*to, v.first_outlier_step - o.rollback_distance);
            const auto range = guard.rollback_range(v.first_outlier_batch);
            skip.add(range.first, range.last);
            while (checkpoints.back().step > *to) checkpoints.pop_back();
            Guard saved(o);
            saved.restore(parse_json(checkpoints.back().guard, "checkpoint"), "checkpoint");
            guard.rolled_back(saved);
            step = checkpoints.back().step;
            batch = checkpoints.back().batch;
            rollbacks++;
        } else if (step % 200 == 0) {
            checkpoints.push_back({step, batch, guard.state().dump()});
        }
    }
    EXPECT_EQ(rollbacks, 3);
    EXPECT_EQ(guard.rollbacks(), 3);
    EXPECT_EQ(skip.text(), "1400-1799");  // 1400-1599 around 1500, then around 1600 and 1700
    for (const int64_t b : applied) EXPECT_FALSE(b >= 1500 && b < 1750) << b;
}

// ---- long curves ------------------------------------------------------------------------------------------------------------
// A falling loss with normal noise, and a gradient norm with log-normal noise that is high at first.
struct Curve {
    test::Rng rng;
    double noise;
    explicit Curve(uint64_t seed, double noise) : rng(seed), noise(noise) {}
    std::pair<double, double> at(int64_t step) {
        const double t = (double)step;
        const double loss = 2 + 9 * std::pow(t, -0.35) + noise * rng.normal();
        const double norm = (0.3 + 3 / (1 + t / 50)) * std::exp(0.35 * rng.normal());
        return {loss, norm};
    }
};

TEST(Guard, NoFalseAlarmOnLongCurves) {
    const std::pair<const char*, double> runs[] = {{"warn", 0}, {"skip", 0.001}, {"rollback", 0.03}, {"skip", 0.3}};
    for (const auto& [policy, noise] : runs) {
        Curve curve(17, noise);
        Training run(policy);
        for (int64_t step = 1; step <= 20000; step++) {
            const auto [loss, norm] = curve.at(step);
            const Verdict v = run.judge(loss, norm);
            ASSERT_EQ(v.kind, Verdict::normal) << "noise " << noise << ", step " << step << ": " << v.reason;
            ASSERT_TRUE(v.apply);
        }
    }
}

// Spikes of all sizes, single or in pairs, are found and nothing else; the window is the same as without them.
TEST(Guard, FindsWhatIsPlanted) {
    for (const char* policy : policies) {
        Curve curve(18, 0.03);
        Training run(policy), undisturbed(policy);
        test::Rng rng(19);
        const double rises[] = {0.7, 1, 3, 10, 1e4, 1e300}, factors[] = {60, 200, 1e6, 1e300};
        int planted = 0;
        for (int64_t step = 1; step <= 20000; step++) {
            const auto [loss, norm] = curve.at(step);
            for (int k = step > 1000 && rng.below(100) == 0 ? 1 + rng.below(2) : 0; k > 0; k--) {
                const int kind = planted++ % 13;  // 0 to 5: losses, 6 to 9: norms, then non-finite values
                const double bad_loss = kind < 6 ? loss + rises[kind] : kind == 10 ? NAN : kind == 11 ? INFINITY : loss;
                const double bad_norm = kind == 12 ? NAN : kind >= 6 && kind < 10 ? norm * factors[kind - 6] : norm;
                const Verdict v = run.judge(bad_loss, bad_norm);
                ASSERT_EQ(v.kind, kind < 10 ? Verdict::spike : Verdict::nonfinite) << "kind " << kind << ", step " << step;
                ASSERT_EQ(v.apply, kind < 10 && policy == std::string("warn"));
            }
            ASSERT_EQ(run.judge(loss, norm).kind, Verdict::normal) << step;
            ASSERT_EQ(undisturbed.judge(loss, norm).kind, Verdict::normal) << step;
        }
        EXPECT_GT(planted, 200);
        EXPECT_EQ(run.guard.spikes() + run.guard.nonfinite(), planted);
        EXPECT_EQ(run.window(), undisturbed.window());
    }
}

// ---- state ------------------------------------------------------------------------------------------------------------------
// Saved as text and read back at any step, the guard continues with the same verdicts and the same state.
TEST(Guard, StateComesBackExactly) {
    for (const char* policy : policies) {
        Curve curve(5, 0.1);
        test::Rng rng(6);
        Training run(policy), resumed(policy);
        const Guard start = run.guard;
        for (int64_t step = 1; step <= 800; step++) {
            auto [loss, norm] = curve.at(step);
            loss += rng.below(20) ? 0 : 10;
            norm *= rng.below(20) ? 1 : 100;
            if (rng.below(40) == 0) loss = NAN;
            const Verdict a = run.judge(loss, norm), b = resumed.judge(loss, norm);
            ASSERT_EQ(a.kind, b.kind);
            ASSERT_EQ(a.apply, b.apply);
            ASSERT_EQ(a.rollback, b.rollback);
            ASSERT_EQ(a.give_up, b.give_up);
            ASSERT_EQ(a.reason, b.reason);
            ASSERT_EQ(a.first_outlier_step, b.first_outlier_step);
            ASSERT_EQ(a.first_outlier_batch, b.first_outlier_batch);
            if (a.rollback) {
                run.guard.rolled_back(start);
                resumed.guard.rolled_back(start);
            }
            const std::string text = resumed.guard.state().dump();
            resumed.guard = Guard(options(policy));
            resumed.guard.restore(parse_json(text, "state"), "state");
            ASSERT_EQ(resumed.guard.state().dump(), text);
            ASSERT_EQ(run.guard.state().dump(), text);
        }
        EXPECT_GT(run.guard.spikes(), 30);
        EXPECT_GT(run.guard.nonfinite(), 10);
    }
}

TEST(Guard, StateKeepsTheBitsOfDoubles) {
    test::Rng rng(7);
    GuardOptions o = options("skip");
    o.window = 2000;
    o.least = 2000;
    Guard guard(o), read(o);
    std::vector<double> losses = {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, -0.0, 3, 1e23};
    while (losses.size() < 2000) losses.push_back(std::ldexp(rng.normal(), rng.below(200) - 100));
    for (size_t i = 0; i < losses.size(); i++) guard.judge((int64_t)i + 1, (int64_t)i + 1, losses[i], std::abs(losses[i]));
    read.restore(parse_json(guard.state().dump(), "state"), "state");
    const std::vector<double> back = read.state()["window"]["losses"], norms = read.state()["window"]["grad_norms"];
    ASSERT_EQ(back.size(), losses.size());
    for (size_t i = 0; i < losses.size(); i++) {
        EXPECT_EQ(memcmp(&back[i], &losses[i], sizeof(double)), 0) << losses[i];
        EXPECT_EQ(norms[i], std::abs(losses[i]));
    }
}

TEST(Guard, StateOfALongerWindowIsCut) {
    Training run("skip");
    for (int i = 0; i < 100; i++) run.judge(1 + i, 0.5 + i);
    GuardOptions o = options("skip");
    o.window = 2;
    Guard shorter(o);
    shorter.restore(run.guard.state(), "state");
    EXPECT_EQ(shorter.state()["window"].dump(), R"({"losses":[99.0,100.0],"grad_norms":[98.5,99.5]})");
}

using Damage = std::function<void(nlohmann::json&)>;

TEST(Guard, RefusesDamagedState) {
    Training run("warn");
    run.calm();
    run.spike();
    run.nonfinite();
    const nlohmann::json good = nlohmann::json::parse(run.guard.state().dump());
    Guard(options("warn")).restore(good, "state");
    std::vector<Damage> damages = {
        [](auto& j) { j = nullptr; },
        [](auto& j) { j = nlohmann::json::array(); },
        [](auto& j) { j["window"] = 3; },
        [](auto& j) { j["window"]["losses"] = "3"; },
        [](auto& j) { j["window"]["losses"][3] = nullptr; },  // as NaN is written
        [](auto& j) { j["window"]["losses"][3] = "3"; },
        [](auto& j) { j["window"]["grad_norms"][0] = true; },
        [](auto& j) { j["window"]["losses"].push_back(3.0); },
        [](auto& j) { j["window"].erase("grad_norms"); },
        [](auto& j) { j["row"] = nlohmann::json::array(); },
        [](auto& j) {
            j["row"]["spikes"]["losses"] = {1.0, 2.0};
        },
        [](auto& j) { j["row"]["length"] = 1; },   // has a spike and a non-finite step
        [](auto& j) { j["row"]["length"] = 99; },  // the run has had two outliers
        [](auto& j) { j["row"]["nonfinite"] = 2; },
        [](auto& j) { j["row"]["step"] = 3.5; },
    };
    for (const char* key : {"window", "row", "spikes", "nonfinite", "skipped", "rollbacks"})
        damages.push_back([key](auto& j) { j.erase(key); });
    for (const char* key : {"length", "nonfinite", "step", "batch", "spikes"})
        damages.push_back([key](auto& j) { j["row"].erase(key); });
    for (const nlohmann::json& count : {nlohmann::json(-1), nlohmann::json(1.5), nlohmann::json("1"), nlohmann::json(nullptr),
                                        nlohmann::json(true), nlohmann::json(18446744073709551615ull)})
        damages.push_back([count](auto& j) { j["skipped"] = count; });
    for (size_t i = 0; i < damages.size(); i++) {
        nlohmann::json j = good;
        damages[i](j);
        Training other("warn");
        other.calm(5);
        const std::string before = other.guard.state().dump();
        test::expect_error([&] { other.guard.restore(j, "training/state.json"); }, {"training/state.json is damaged: "});
        EXPECT_EQ(other.guard.state().dump(), before) << "damage " << i;
    }
}

TEST(GuardDeathTest, RefusesOptionsThatMakeNoSense) {
    const auto broken = [](const std::function<void(GuardOptions&)>& change) {
        GuardOptions o = options("warn");
        change(o);
        EXPECT_DEATH(Guard{o}, "internal check failed");
    };
    broken([](auto& o) { o.policy = "rolback"; });
    broken([](auto& o) { o.window = 0; });
    broken([](auto& o) { o.patience = 0; });
    broken([](auto& o) { o.loss_deviations = NAN; });
    broken([](auto& o) { o.norm_factor = 0; });
    broken([](auto& o) { o.rollback_batches = 0; });
}

// ---- steadiness -------------------------------------------------------------------------------------------------------------
// Observes n steps with this loss and norm, and returns the first step after which it was steady; 0 if there was none.
struct Watch {
    Steadiness steadiness;
    int64_t step = 0, steady_at = 0;
    void observe(int n, double loss, double norm, double moments = 0.1) {
        for (int i = 0; i < n; i++) {
            steadiness.observe(++step, loss, norm, moments);
            if (steady_at == 0 && steadiness.steady()) steady_at = step;
        }
    }
};

TEST(Steadiness, NeedsTwoWindowsThatAgree) {
    Watch w;
    w.observe(1000, 3, 0.5);
    EXPECT_EQ(w.steady_at, 128);
    for (const double loss : {2.941, 3.059}) {  // less than 2% from 3
        Watch near;
        near.observe(64, 3, 0.5);
        near.observe(64, loss, 0.5);
        EXPECT_EQ(near.steady_at, 128) << loss;
    }
    for (const double loss : {2.939, 3.061}) {
        Watch far;
        far.observe(64, 3, 0.5);
        far.observe(64, loss, 0.5);
        EXPECT_EQ(far.steady_at, 0) << loss;
        far.observe(64, loss, 0.5);
        EXPECT_GT(far.steady_at, 128);  // as soon as the older window's median has moved too
        EXPECT_LT(far.steady_at, 192);
    }
}

TEST(Steadiness, NeedsASteadyGradientNorm) {
    for (const double norm : {0.2501, 0.7499}) {
        Watch near;
        near.observe(64, 3, 0.5);
        near.observe(64, 3, norm);
        EXPECT_EQ(near.steady_at, 128) << norm;
    }
    for (const double norm : {0.2499, 0.7501}) {
        Watch far;
        far.observe(64, 3, 0.5);
        far.observe(64, 3, norm);
        EXPECT_EQ(far.steady_at, 0) << norm;
    }
}

TEST(Steadiness, NeedsSteadyMoments) {
    for (const double moments : {0.91, 1.09}) {
        Watch near;
        near.observe(64, 3, 0.5, 1);
        near.observe(64, 3, 0.5, moments);
        EXPECT_EQ(near.steady_at, 128) << moments;
    }
    for (const double moments : {0.89, 1.11}) {
        Watch far;
        far.observe(64, 3, 0.5, 1);
        far.observe(64, 3, 0.5, moments);
        EXPECT_EQ(far.steady_at, 0) << moments;
        far.observe(64, 3, 0.5, moments);
        EXPECT_GT(far.steady_at, 128);
    }
}

TEST(Steadiness, OutlierStartsBothWindowsAnew) {
    Watch w;
    w.observe(127, 3, 0.5);
    w.step++;  // an outlier, not observed
    w.observe(127, 3, 0.5);
    EXPECT_EQ(w.steady_at, 0);
    w.observe(1, 3, 0.5);
    EXPECT_EQ(w.steady_at, 256);
    w.step -= 200;  // a rollback; once steady, always steady
    w.observe(64, 9, 0.5);
    w.observe(64, 4, 0.5);
    EXPECT_TRUE(w.steadiness.steady());

    Watch back;
    back.observe(100, 3, 0.5);
    back.step -= 50;
    back.observe(127, 3, 0.5);
    EXPECT_EQ(back.steady_at, 0);
}

// On a falling curve it waits until 64 steps improve the loss by only 2%. A median of 64 steps has an error of 1.25 x noise
// / 8 = 0.0008, so the ratio of two may have an error of several times 0.0003.
TEST(Steadiness, WaitsForTheCurveToFlatten) {
    Watch w;
    test::Rng rng(8);
    const auto level = [](int64_t step) { return 2 + 400.0 / (double)(100 + step); };
    for (int64_t step = 1; step <= 2000; step++)
        w.observe(1, level(step) + 0.005 * rng.normal(), 0.5 * std::exp(0.3 * rng.normal()));
    ASSERT_GT(w.steady_at, 200);
    EXPECT_NEAR(level(w.steady_at - 32) / level(w.steady_at - 96), 0.98, 0.002);
}

TEST(Steadiness, State) {
    Watch w, resumed;
    test::Rng rng(9);
    for (int i = 0; i < 400; i++) {
        const double loss = 3 + 2.0 * std::exp(-i / 100.0) + 0.05 * rng.normal(), norm = std::exp(rng.normal());
        if (i == 100) {
            w.step++;
            resumed.step++;
        }
        w.observe(1, loss, norm);
        resumed.observe(1, loss, norm);
        const std::string text = resumed.steadiness.state().dump();
        ASSERT_EQ(w.steadiness.state().dump(), text);
        resumed.steadiness = {};
        resumed.steadiness.restore(parse_json(text, "state"), "state");
        ASSERT_EQ(resumed.steadiness.state().dump(), text);
        ASSERT_EQ(w.steadiness.steady(), resumed.steadiness.steady());
    }
    EXPECT_GT(w.steady_at, 228);

    const nlohmann::json good = nlohmann::json::parse(w.steadiness.state().dump());
    for (const Damage& damage :
         std::vector<Damage>{[](auto& j) { j = 3; }, [](auto& j) { j.erase("steady"); }, [](auto& j) { j["steady"] = 1; },
                             [](auto& j) { j["last_step"] = -1; }, [](auto& j) { j["latest"]["losses"].push_back(3.0); },
                             [](auto& j) { j["latest"]["grad_norms"][0] = nullptr; }, [](auto& j) { j.erase("moments"); },
                             [](auto& j) { j["moments"].push_back(1.0); },
                             [](auto& j) {
                                 j["latest"]["losses"].push_back(3.0);
                                 j["latest"]["grad_norms"].push_back(3.0);
                                 j["moments"].push_back(3.0);
                             }}) {
        nlohmann::json j = good;
        damage(j);
        test::expect_error([&] { Steadiness().restore(j, "training/state.json"); }, {"training/state.json is damaged: "});
    }
}

}  // namespace test_guard
