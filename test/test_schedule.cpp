// Learning rate, weight decay and batch ramp-up compared with Megatron-LM's formulas worked out by hand, with the numbers
// of published runs.
#include <gtest/gtest.h>

#include "../llmc/plan/energy.h"
#include "../llmc/options/schedule.h"
#include "../llmc/run/stragglers.h"
#include "../llmc/run/time_budget.h"
#include "files.h"

namespace test_schedule {

TrainOptions options(int64_t steps, int batch = 1) {
    TrainOptions o;
    o.micro_batch_size = 1;
    o.global_batch_size = batch;
    o.train_iters = steps;
    return o;
}

// Compares LR with a table of (samples, value).
void expect_lr(const Schedule& s, const std::vector<std::pair<int64_t, double>>& table) {
    for (const auto& [n, value] : table) EXPECT_NEAR(s.lr(n), value, 1e-12 * value) << s.style << " at " << n;
}

TEST(Schedule, Cosine) {
    TrainOptions o = options(1100);
    o.lr = 1e-3;
    o.min_lr = 1e-4;
    o.lr_warmup_iters = 100;
    const Schedule s = make_schedule(o, 1);
    // After the warm-up, progress is (n - 100) / 1000.
    expect_lr(s, {{0, 0},
                  {1, 1e-5},
                  {50, 5e-4},
                  {100, 1e-3},
                  {350, 1e-4 + 9e-4 * (1 + std::sqrt(0.5)) / 2},
                  {600, 5.5e-4},
                  {1100, 1e-4},
                  {5000, 1e-4}});
}

TEST(Schedule, LinearConstantAndInverseSquareRoot) {
    TrainOptions o = options(1100);
    o.lr = 1e-3;
    o.min_lr = 1e-4;
    o.lr_warmup_iters = 100;
    o.lr_decay_style = "linear";
    expect_lr(make_schedule(o, 1), {{100, 1e-3}, {600, 5.5e-4}, {1000, 1.9e-4}, {1100, 1e-4}, {1200, 1e-4}});
    o.lr_decay_style = "constant";
    expect_lr(make_schedule(o, 1), {{50, 5e-4}, {100, 1e-3}, {1100, 1e-3}, {9999, 1e-3}});
    o.lr_decay_style = "inverse-square-root";
    expect_lr(make_schedule(o, 1), {{100, 1e-3}, {400, 5e-4}, {900, 1e-3 / 3}, {1101, 1e-4}});
}

TEST(Schedule, WarmupStableDecay) {
    TrainOptions o = options(1000);
    o.lr = 1e-3;
    o.min_lr = 2e-4;
    o.lr_warmup_iters = 100;
    o.lr_decay_style = "WSD";
    o.lr_wsd_decay_iters = 200;
    const auto tail = [&](const char* style) {
        o.lr_wsd_decay_style = style;
        return make_schedule(o, 1);
    };
    // The tail runs from 800 to 1000; x = 1/4 at 850, 1/2 at 900.
    expect_lr(tail("linear"), {{100, 1e-3}, {500, 1e-3}, {800, 1e-3}, {850, 8e-4}, {900, 6e-4}, {1000, 2e-4}});
    expect_lr(tail("exponential"), {{800, 1e-3},
                                    {850, 2e-4 + 8e-4 * (2 * std::pow(0.5, 0.25) - 1)},
                                    {900, 2e-4 + 8e-4 * (std::sqrt(2.0) - 1)},
                                    {1000, 2e-4}});
    expect_lr(tail("cosine"), {{900, 6e-4}, {1000, 2e-4}});
    expect_lr(tail("minus_sqrt"), {{850, 6e-4}, {900, 2e-4 + 8e-4 * (1 - std::sqrt(0.5))}, {1000, 2e-4}});
}

TEST(Schedule, StepsCountInFinalBatches) {
    TrainOptions o = options(100, 8);
    o.lr_warmup_iters = 10;
    o.lr_decay_iters = 50;
    o.lr = 1;
    const Schedule s = make_schedule(o, 1);
    EXPECT_EQ(s.warmup, 80);
    EXPECT_EQ(s.decay, 400);
    EXPECT_EQ(s.total_samples, 800);
    EXPECT_DOUBLE_EQ(s.lr(40), 0.5);
}

// Megatron-LM requests (train_iters / eval_interval + 1) * eval_iters global batches for validation, and each validation
// continues.
TEST(Schedule, ValidationsFollowEachOther) {
    TrainOptions o = options(250, 8);
    o.eval_interval = 100;
    o.eval_iters = 3;
    const Schedule s = make_schedule(o, 1);
    EXPECT_EQ(s.valid_samples, 24);
    EXPECT_EQ(s.samples_of_all_validations(), 3 * 24);
    for (const auto& [step, first] : std::vector<std::pair<int64_t, int64_t>>{{100, 0}, {200, 24}, {250, 48}})
        EXPECT_EQ(s.first_sample_of_validation(step), first) << step;
    for (const int64_t steps : {1, 99, 100, 101, 200})
        for (const int64_t interval : {1, 7, 100, 1000}) {
            o.train_iters = steps;
            o.eval_interval = interval;
            const Schedule t = make_schedule(o, 1);  // the last step is validated as well
            EXPECT_LE(t.first_sample_of_validation(steps) + t.valid_samples, t.samples_of_all_validations());
        }
    o.train_iters = (int64_t)1 << 40;
    o.eval_interval = 1;
    test::expect_error([&] { make_schedule(o, 1).samples_of_all_validations(); }, {"--eval-interval", "--eval-fixed"});
}

TEST(Schedule, WeightDecayRises) {
    TrainOptions o = options(100);
    o.weight_decay_incr_style = "linear";
    o.start_weight_decay = 0.1;
    o.end_weight_decay = 0.5;
    EXPECT_DOUBLE_EQ(make_schedule(o, 1).weight_decay(0), 0.1);
    EXPECT_DOUBLE_EQ(make_schedule(o, 1).weight_decay(25), 0.2);
    EXPECT_DOUBLE_EQ(make_schedule(o, 1).weight_decay(1000), 0.5);
    o.weight_decay_incr_style = "cosine";
    EXPECT_NEAR(make_schedule(o, 1).weight_decay(50), 0.3, 1e-15);
    EXPECT_NEAR(make_schedule(o, 1).weight_decay(25), 0.1 + 0.4 * 0.5 * (1 - std::sqrt(0.5)), 1e-15);
}

// BLOOM 176B: 192 to 2,048 by 16 over 9,765,625 samples, 220 million samples in total: 115,311 steps (from its published
// training log).
TEST(Schedule, RampupOfBloom) {
    TrainOptions o;
    o.micro_batch_size = 2;
    o.global_batch_size = 2048;
    o.train_samples = 220000000;
    o.rampup_batch_size = {"192", "16", "9765625"};
    o.lr = 6e-5;
    o.min_lr = 6e-6;
    o.lr_warmup_samples = 183105;
    o.lr_decay_samples = 200000000;
    const Schedule s = make_schedule(o, 8);
    EXPECT_EQ(s.total_steps, 115311);
    EXPECT_EQ(s.global_batch(0), 192);
    const double per_increment = 9765625.0 / 116;
    EXPECT_EQ(s.global_batch((int64_t)per_increment), 192);
    EXPECT_EQ(s.global_batch((int64_t)per_increment + 1), 208);
    EXPECT_EQ(s.global_batch(9765626), 2048);
    EXPECT_NEAR(s.lr(9841584), 5.969e-5, 5e-9);
}

// steps_for equals the loop's result.
TEST(Schedule, RampupCountsAgreeWithTheLoop) {
    TrainOptions o;
    o.micro_batch_size = 2;
    o.global_batch_size = 24;
    o.rampup_batch_size = {"8", "4", "300"};
    for (int64_t samples : {8, 20, 100, 299, 300, 301, 1000}) {
        o.train_samples = samples;
        const Schedule s = make_schedule(o, 1);
        int64_t consumed = 0, steps = 0;
        while (steps < s.total_steps) {
            consumed += s.global_batch(consumed);
            steps++;
        }
        EXPECT_EQ(consumed, s.total_samples) << samples;
        // One by one, and from within the ramp-up.
        steps = consumed = 0;
        while (consumed <= 300 && consumed < samples) {
            EXPECT_EQ(s.samples_for(steps), consumed);
            EXPECT_EQ(s.samples_for(3, consumed), s.samples_for(steps + 3)) << consumed;
            consumed += s.global_batch(consumed);
            steps++;
        }
        EXPECT_EQ(s.steps_for(samples), steps + std::max<int64_t>(samples - consumed, 0) / 24) << samples;
    }
    // A ramp-up of 10^14 steps takes no longer, where a loop took days.
    o.rampup_batch_size = {"8", "4", "1600000000000000"};
    o.train_samples = 2400000000000000;
    const Schedule s = make_schedule(o, 1);
    EXPECT_NEAR((double)s.total_steps, 4e14 * (1 / 8. + 1 / 12. + 1 / 16. + 1 / 20.) + 8e14 / 24, 10);
}

// The interleaved schedule needs a multiple of the pipeline's ranks as the number of micro-batches, at each size of the
// ramp-up.
TEST(Schedule, RampupThroughAPipeline) {
    TrainOptions o;
    o.micro_batch_size = 2;
    o.train_samples = 1000;
    o.pipeline_model_parallel_size = 2;
    o.global_batch_size = 32;
    o.rampup_batch_size = {"8", "8", "160"};
    EXPECT_EQ(make_schedule(o, 2).global_batches(), (std::vector<int64_t>{8, 16, 24, 32}));
    EXPECT_EQ(make_schedule(o, 2).micro_batches(), (std::vector<int>{2, 4, 6, 8}));
    o.num_virtual_stages_per_pipeline_rank = 2;
    make_schedule(o, 2);
    o.rampup_batch_size = {"16", "4", "100"};  // the first and the last size would be valid
    test::expect_error([&] { make_schedule(o, 2); }, {"--rampup-batch-size", "global batch of 20", "5 micro-batches", "2 ranks",
                                                      "HINT", "START, INCREMENT", "multiples of 8"});
    o.num_virtual_stages_per_pipeline_rank = 1;
    EXPECT_EQ(make_schedule(o, 2).micro_batches(), (std::vector<int>{4, 5, 6, 7, 8}));
    o.rampup_batch_size = {"32", "8", "100"};  // starts with the last
    EXPECT_EQ(make_schedule(o, 2).global_batches(), (std::vector<int64_t>{32}));
    o.rampup_batch_size.clear();
    EXPECT_EQ(make_schedule(o, 2).global_batches(), (std::vector<int64_t>{32}));
    o.num_virtual_stages_per_pipeline_rank = 2;
    o.global_batch_size = 20;
    test::expect_error([&] { make_schedule(o, 2); }, {"5 micro-batches", "the nearest are 4 and 6"});
}

// Until its length is chosen, a run knows only its warm-up; then its schedule equals a run of this length.
TEST(Schedule, LengthChosenLate) {
    TrainOptions o = options(0, 8);
    o.time_budget = "5m";
    o.lr = 1e-3;
    o.min_lr = 1e-4;
    o.lr_warmup_iters = 10;
    apply_time_budget(o);
    Schedule late = make_schedule(o, 1);
    EXPECT_TRUE(late.open);
    expect_lr(late, {{40, 5e-4}, {80, 1e-3}, {8 * 1000000, 1e-3}});
    late.end_after(500, 100);
    o.time_budget = "";
    o.train_iters = 500;
    o.lr_wsd_decay_iters = 100;
    const Schedule given = make_schedule(o, 1);
    EXPECT_EQ(late.total_steps, given.total_steps);
    EXPECT_EQ(late.total_samples, given.total_samples);
    for (int64_t n = 0; n <= 8 * 510; n += 8) EXPECT_EQ(late.lr(n), given.lr(n)) << n;
    EXPECT_LT(late.lr(8 * 499), 1.2e-4);
}

TEST(TimeBudget, ChoosesTheLengthWhereTheDecayIsAFifth) {
    TrainOptions o = options(0, 8);
    o.time_budget = "1000000";
    apply_time_budget(o);
    // Steps of 100 s, validations of 500 s every 100 steps, a checkpoint of 2000 s. The test's own time is subtracted.
    const auto budget = [&](double spent) {
        auto b = std::make_unique<TimeBudget>(o, BudgetSpent{spent - (monotonic_seconds() - program_start), 0, 0});
        b->took(TimeBudget::step, 5000);  // the first is slow
        for (int i = 0; i < 50; i++) b->took(TimeBudget::step, i < 30 ? 70 : 100);
        b->expect(TimeBudget::validation, 100, 50);
        b->took(TimeBudget::validation, 500);
        b->took(TimeBudget::save, 2000);
        return b;
    };
    EXPECT_DOUBLE_EQ(budget(0)->step_seconds(), 100);
    EXPECT_NEAR(budget(0)->seconds_until_end(100, 250), 150 * 100 + 3 * 500 + 2000, 1);  // validations after 100, 200, 250
    EXPECT_NEAR(budget(0)->seconds_until_end(101, 300), 199 * 100 + 2 * 500 + 2000, 1);
    EXPECT_EQ(budget(780000)->decide(7400).steps, 0);  // 2000 more would fit, more than a quarter of 7400
    const RunLength length = budget(820000)->decide(7801);
    EXPECT_NEAR((double)length.steps, 7801 + (180000 - 2000 - 17 * 500) / 100, 2);
    EXPECT_EQ(length.decay, length.steps - 7801);
    EXPECT_LT(length.decay, 7801 / 4);
    o.lr_wsd_decay_iters = 30;
    EXPECT_EQ(budget(820000)->decide(7801).steps, 0);
    EXPECT_NEAR((double)budget(995000)->decide(9801).decay, 25, 1);
    const RunLength over = budget(2000000)->decide(9801);
    EXPECT_EQ(over.steps, 9801);
    EXPECT_EQ(over.decay, 1);
}

// The given decay is longer than the steps that would fit if all were as slow as the first.
TEST(TimeBudget, ASlowFirstStepDoesNotBeginTheDecay) {
    TrainOptions o = options(0, 8);
    o.time_budget = "1000000";
    o.lr_wsd_decay_iters = 150;
    apply_time_budget(o);
    TimeBudget budget(o, {-(monotonic_seconds() - program_start), 0, 0});
    budget.took(TimeBudget::step, 10000);
    EXPECT_EQ(budget.decide(1).steps, 0);
    budget.took(TimeBudget::step, 1000);
    EXPECT_EQ(budget.decide(2).steps, 0);
    budget.took(TimeBudget::step, 1000);
    EXPECT_EQ(budget.decide(3).steps, 0);
    TimeBudget over(o, {2e6, 0, 0});
    over.took(TimeBudget::step, 10000);
    EXPECT_EQ(over.decide(1).steps, 1);
}

TEST(TimeBudget, TheFirstStepAfterAResumeDoesNotEndTheRun) {
    TrainOptions o = options(0, 8);
    o.time_budget = "1000000";
    apply_time_budget(o);
    TimeBudget resumed(o, {100000, 900, 100});
    resumed.took(TimeBudget::step, 5000);
    EXPECT_EQ(resumed.decide(1001).steps, 0);
    for (int i = 0; i < 100; i++) resumed.took(TimeBudget::step, 10);  // on a faster machine
    EXPECT_DOUBLE_EQ(resumed.step_seconds(), 10);
    EXPECT_EQ(resumed.so_far().steps, 357);
    EXPECT_DOUBLE_EQ(resumed.so_far().step_seconds, 10);
}

TEST(Stragglers, TheSlowestOfItsStage) {
    std::vector<RankTime> stages;  // the second stage has more work
    for (const double worked : {10.0, 10.0, 11.5, 10.0, 20.0, 20.0, 20.0, 20.0}) stages.push_back({worked, 25 - worked});
    Stragglers s({"a", "a", "b", "b", "c", "c", "d", "d"}, 2);
    std::string found;
    std::optional<RankTimes> times;
    for (int i = 0; i < 40 && !times; i++) times = s.add(stages, i);
    ASSERT_TRUE(times);
    EXPECT_EQ(times->steps, 16);
    EXPECT_EQ(times->slowest, 2);
    EXPECT_NEAR(times->ranks[2].worked_ms, 11.5, 1e-9);
    EXPECT_NEAR(times->ranks[2].waited_ms, 13.5, 1e-9);
    EXPECT_FALSE(s.rest()) << "no step is left";
    found = s.sentence(*times);
    EXPECT_NE(found.find("rank 2 on b"), std::string::npos) << found;
    EXPECT_NE(found.find("11.5 ms a step, 15% more than the median 10.0 ms"), std::string::npos) << found;
    times.reset();
    for (int i = 40; !times; i++) times = s.add(stages, i);
    EXPECT_EQ(s.sentence(*times), "") << "said once";
    Stragglers even({"a", "b"}, 1);
    even.add({{10, 10}, {20, 0}}, 0);
    times = even.rest();  // a run of one step
    ASSERT_TRUE(times);
    EXPECT_EQ(times->slowest, -1);
    EXPECT_EQ(even.sentence(*times), "");
    for (int i = 0; i < 16; i++) even.add({{10, 1}, {11, 0}}, 1);
    times = even.rest();
    ASSERT_TRUE(times);
    EXPECT_EQ(times->slowest, -1) << "a tenth is little";
}

TEST(Energy, ProcessorsThatWrapAndOthersThatDoNotTell) {
    const test::TemporaryDirectory dir;
    const auto zone = [&](const std::string& name, const std::string& what, double uj) {
        std::filesystem::create_directories(dir / name);
        std::ofstream(dir / name + "/name") << what;
        std::ofstream(dir / name + "/max_energy_range_uj") << 262143328850;
        std::ofstream(dir / name + "/energy_uj") << std::fixed << uj;
    };
    EXPECT_TRUE(std::isnan(EnergyMeter(dir / "none", "libnone.so").joules()));
    zone("intel-rapl:0", "package-0", 262143328850 - 3e6);
    zone("intel-rapl:0:0", "core", 0);
    zone("intel-rapl:1", "psys", 0);
    EnergyMeter meter(dir / "", "libnone.so");
    EXPECT_EQ(meter.joules_now(), 0);
    zone("intel-rapl:0", "package-0", 4e6);
    zone("intel-rapl:1", "psys", 9e9);
    EXPECT_NEAR(meter.joules_now(), 7, 1e-6);
    EXPECT_NEAR(grams_of_co2(3.6e6, 450), 450, 1e-9);
}

TEST(Schedule, RefusesWhatContradictsItself) {
    const auto refused = [](const std::function<void(TrainOptions&)>& change, const std::string& part) {
        TrainOptions o = options(100, 8);
        change(o);
        test::expect_error([&] { make_schedule(o, 1); }, {part});
    };
    refused([](auto& o) { o.micro_batch_size = 3; }, "nearest are 6 and 9");
    refused([](auto& o) { o.train_iters = 0; }, "--train-iters, --train-samples or --time-budget");
    refused([](auto& o) { o.train_samples = 5; }, "both");
    refused([](auto& o) { o.lr_warmup_iters = 100; }, "--lr-warmup-iters 100 is a warm-up of");
    refused(
        [](auto& o) {
            o.lr_warmup_iters = 1;
            o.lr_warmup_samples = 1;
        },
        "lr-warmup");
    refused([](auto& o) { o.lr_decay_style = "WSD"; }, "--lr-wsd-decay-iters");
    refused([](auto& o) { o.min_lr = 1; }, "--min-lr");
    refused([](auto& o) { o.start_weight_decay = 0; }, "--weight-decay-incr-style");
    refused([](auto& o) { o.weight_decay_incr_style = "linear"; }, "--start-weight-decay");
    refused(
        [](auto& o) {
            o.train_iters = 0;
            o.train_samples = 100;
            o.rampup_batch_size = {"5", "2", "100"};
        },
        "not a multiple");
    refused(
        [](auto& o) {
            o.train_iters = 0;
            o.train_samples = 100;
            o.rampup_batch_size = {"x", "2", "100"};
        },
        "'x'");
    refused([](auto& o) { o.rampup_batch_size = {"4", "2", "100"}; }, "--train-samples");
    refused(
        [](auto& o) {
            o.train_iters = 0;
            o.train_samples = 5;
        },
        "less than one global batch");
}

// Steps times samples times tokens: products beyond 2^62 are refused with the option's name and the maximum.
TEST(Schedule, RefusesWhatCannotBeCounted) {
    const int64_t many = 9000000000000000;  // the command line takes no larger number
    const int64_t most = ((int64_t)1 << 62) / 4096 / 2048;
    const auto schedule = [&](const std::function<void(TrainOptions&)>& change) {
        TrainOptions o = options(100, 2048);
        o.seq_length = 4096;
        o.eval_iters = 1;
        change(o);
        return make_schedule(o, 1);
    };
    EXPECT_EQ(schedule([&](auto& o) { o.train_iters = most; }).total_samples, most * 2048);
    EXPECT_EQ(schedule([&](auto& o) { o.lr_decay_iters = most; }).decay, most * 2048);
    EXPECT_EQ(schedule([&](auto& o) { o.eval_iters = most; }).valid_samples, most * 2048);
    const auto refused = [&](const char* option, const std::function<void(TrainOptions&, int64_t)>& set) {
        for (const int64_t n : {most + 1, many})
            test::expect_error([&] { schedule([&](auto& o) { set(o, n); }); },
                               {std::string("--") + option, std::to_string(n), "maximum is " + std::to_string(most)});
    };
    refused("train-iters", [](auto& o, int64_t n) { o.train_iters = n; });
    refused("lr-decay-iters", [](auto& o, int64_t n) { o.lr_decay_iters = n; });
    refused("lr-warmup-iters", [](auto& o, int64_t n) { o.lr_warmup_iters = n; });
    refused("lr-wsd-decay-iters", [](auto& o, int64_t n) { o.lr_wsd_decay_iters = n; });
    refused("eval-iters", [](auto& o, int64_t n) { o.eval_iters = n; });
    test::expect_error(
        [&] {
            schedule([&](auto& o) {
                o.train_iters = 0;
                o.train_samples = many;
            });
        },
        {"--train-samples", "maximum is " + std::to_string(((int64_t)1 << 62) / 4096)});
    for (const char* text : {"99999999999999999999", "9000000000000000"})
        test::expect_error(
            [&] {
                schedule([&](auto& o) {
                    o.train_iters = 0;
                    o.train_samples = 1 << 20;
                    o.rampup_batch_size = {"8", "8", text};
                });
            },
            {"--rampup-batch-size", text, "a whole number from 1 to"});
}

}  // namespace test_schedule
