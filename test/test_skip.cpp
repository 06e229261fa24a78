// Batches skipped in training: ranges compared with a plain set, and the conversion from iterations with LLM-jp's
// procedure, step by step.
#include <gtest/gtest.h>

#include <deque>
#include <set>

#include "../llmc/base/json.h"
#include "../llmc/options/schedule.h"
#include "../llmc/options/skip.h"
#include "files.h"
#include "testing.h"

namespace test_skip {

BatchRanges parsed(const Strings& ranges) { return BatchRanges::parse(ranges, "--skip-batches"); }
BatchRanges iterations(const Strings& ranges) { return BatchRanges::from_iterations(ranges, "--skip-train-iteration-range"); }

TEST(BatchRanges, SortedAndMerged) {
    EXPECT_EQ(parsed({"9", "3-5"}).text(), "3-5,9");
    EXPECT_EQ(parsed({"3-5,9"}).text(), "3-5,9");
    EXPECT_EQ(parsed({"3-7", "5-9", "4"}).text(), "3-9");    // overlapping, inside
    EXPECT_EQ(parsed({"6-9", "1-2", "3-5"}).text(), "1-9");  // touching
    EXPECT_EQ(parsed({"1", "3"}).text(), "1,3");             // not touching
    EXPECT_EQ(parsed({"1,3,5,7", "2-6"}).text(), "1-7");     // one contains several
    EXPECT_EQ(parsed({"007-8"}).text(), "7-8");
    EXPECT_EQ(parsed({"9007199254740992"}).text(), "9007199254740992");  // 2^53
    EXPECT_EQ(parsed({}).text(), "");
    EXPECT_TRUE(parsed({}).empty());
    EXPECT_TRUE(parsed({"3-5"}) == parsed({"3,4,5"}));
    EXPECT_TRUE(parsed({"3-5"}) != parsed({"3-6"}));
    EXPECT_FALSE(parsed({"3-5"}) != parsed({"3-5"}));
}

TEST(BatchRanges, LooksUpByHand) {
    const BatchRanges r = parsed({"3-5,9"});
    EXPECT_FALSE(r.contains(2));
    EXPECT_TRUE(r.contains(3));
    EXPECT_TRUE(r.contains(5));
    EXPECT_FALSE(r.contains(6));
    EXPECT_EQ(r.next(2), 2);
    EXPECT_EQ(r.next(3), 6);
    EXPECT_EQ(r.next(5), 6);
    EXPECT_EQ(r.next(9), 10);
    EXPECT_EQ(r.next(10), 10);
    EXPECT_EQ(r.count_before(3), 0);
    EXPECT_EQ(r.count_before(4), 1);
    EXPECT_EQ(r.count_before(6), 3);
    EXPECT_EQ(r.count_before(9), 3);
    EXPECT_EQ(r.count_before(10), 4);
    EXPECT_EQ(parsed({}).next(7), 7);
    EXPECT_EQ(parsed({}).count_before(7), 0);
}

// In any order of insertion, the ranges equal the set of batches: same members, lengths, text and saved state.
TEST(BatchRanges, AreASet) {
    test::Rng rng(1);
    for (int trial = 0; trial < 300; trial++) {
        BatchRanges ranges;
        std::set<int64_t> set;
        for (int i = rng.below(12); i > 0; i--) {
            const int first = 1 + rng.below(60), last = first + rng.below(trial % 2 ? 3 : 12);
            ranges.add(first, last);
            for (int batch = first; batch <= last; batch++) set.insert(batch);
        }
        const std::vector<BatchRanges::Range>& r = ranges.ranges();
        for (size_t i = 0; i < r.size(); i++) {
            ASSERT_LE(r[i].first, r[i].last);
            ASSERT_GT(r[i].first, i > 0 ? r[i - 1].last + 1 : 0) << ranges.text();
        }
        for (int64_t batch = 1; batch < 80; batch++) {
            ASSERT_EQ(ranges.contains(batch), set.count(batch) > 0) << ranges.text() << ": " << batch;
            ASSERT_EQ(ranges.count_before(batch), std::distance(set.begin(), set.lower_bound(batch))) << ranges.text();
            int64_t next = batch;
            while (set.count(next)) next++;
            ASSERT_EQ(ranges.next(batch), next) << ranges.text() << ": " << batch;
        }
        ASSERT_TRUE(ranges.empty() || parsed({ranges.text()}) == ranges) << ranges.text();
        ASSERT_TRUE(BatchRanges::restore(parse_json(ranges.state().dump(), "state"), "state") == ranges) << ranges.text();
    }
}

TEST(BatchRanges, State) {
    EXPECT_EQ(parsed({"3-5,9"}).state().dump(), "[[3,5],[9,9]]");
    EXPECT_EQ(parsed({}).state().dump(), "[]");
    EXPECT_EQ(BatchRanges::restore(parsed({"3-5,9"}).state(), "state").text(), "3-5,9");  // not through text
    for (const char* damaged : {"null", "{}", "7", "\"3-5\"", "[3,5]", "[[3]]", "[[3,5,7]]", "[[5,3]]", "[[0,3]]", "[[-1,3]]",
                                "[[3,5.5]]", "[[3,\"5\"]]", "[[3,null]]", "[[1,9007199254740993]]",
                                "[[1,18446744073709551615]]", "[[1,1e3]]", "[[true,3]]", "[[3,5],[]]"})
        test::expect_error([&] { BatchRanges::restore(nlohmann::json::parse(damaged), "training/state.json"); },
                           {"training/state.json is damaged"});
}

TEST(BatchRanges, RefusesJunk) {
    for (const char* text : {"",
                             ",",
                             "3-5,",
                             ",3",
                             "3,,5",
                             "x",
                             "3x",
                             "-",
                             "3-",
                             "-3",
                             "--3",
                             "3-5-7",
                             "0",
                             "0-3",
                             "3-0",
                             "-3--1",
                             "3 - 5",
                             " 3",
                             "3 ",
                             "+3",
                             "3.5",
                             "1e3",
                             "0x10",
                             "9007199254740993",
                             "1-9007199254740993",
                             "9223372036854775808",
                             "18446744073709551617",
                             "99999999999999999999999999",
                             "3:5",
                             "3\n"})
        test::expect_error(
            [&] {
                parsed({"1-2", text});
            },
            {"--skip-batches has '" + std::string(text) + "'", "is not a range of batches", "HINT"});
    test::expect_error([] { parsed({"1-2", "3,5-4"}); }, {"--skip-batches has '3,5-4'", "'5-4' ends before it starts", "HINT"});
    test::expect_error([] { iterations({"5-4"}); }, {"--skip-train-iteration-range has '5-4'", "HINT"});
    test::expect_error([] { iterations({"1-9007199254740992", "x"}); }, {"'x'"});
    // The second range would move beyond the largest number.
    test::expect_error([] { iterations({"1-9007199254740000", "9007199254740990"}); }, {"discarded", "9007199254740992"});
}

TEST(BatchRanges, FromIterationsByHand) {
    EXPECT_EQ(iterations({"101-200", "251-300"}).text(), "101-200,351-400");
    EXPECT_EQ(iterations({"251-300", "101-200"}).text(), "101-200,351-400");
    EXPECT_EQ(iterations({"101-200,251-300"}).text(), "101-200,351-400");
    EXPECT_EQ(iterations({"101-200", "150-220"}).text(), "101-220");  // overlapping
    EXPECT_EQ(iterations({"3-5", "5"}).text(), "3-5");
    EXPECT_EQ(iterations({"3-5", "6-9"}).text(), "3-5,9-12");  // touching: 3, 4 and 5 read the batches 6, 7 and 8
    EXPECT_EQ(iterations({"1"}).text(), "1");
    EXPECT_EQ(iterations({}).text(), "");
}

// LLM-jp's procedure, literally: sort; merge overlapping ranges; then, before each iteration, if the next one is in the
// first remaining range, draw and discard batches up to its end and remove the range, without advancing the iteration.
std::vector<int64_t> batches_read(std::vector<std::pair<int, int>> given, int train_iters) {
    std::sort(given.begin(), given.end());
    std::deque<std::pair<int, int>> ranges;
    for (const auto& [start, end] : given) {
        if (ranges.empty() || ranges.back().second < start) ranges.push_back({start, end});
        else ranges.back().second = std::max(ranges.back().second, end);
    }
    std::vector<int64_t> read;
    int iteration = 0;
    int64_t drawn = 0;
    while (iteration < train_iters) {
        if (!ranges.empty() && ranges.front().first <= iteration + 1 && iteration + 1 <= ranges.front().second) {
            const int end = ranges.front().second;
            ranges.pop_front();
            for (int skipping = iteration; skipping + 1 <= end; skipping++) drawn++;
            continue;
        }
        read.push_back(++drawn);
        iteration++;
    }
    return read;
}

// A few ranges, some overlapping; as numbers and as text.
std::pair<std::vector<std::pair<int, int>>, Strings> some_ranges(test::Rng& rng) {
    std::vector<std::pair<int, int>> given;
    Strings texts;
    for (int i = rng.below(8); i > 0; i--) {
        const int start = 1 + rng.below(60), end = start + rng.below(10);
        given.push_back({start, end});
        texts.push_back(std::to_string(start) + "-" + std::to_string(end));
    }
    return {given, texts};
}

TEST(BatchRanges, FromIterationsReadsTheBatchesThatLlmJpReads) {
    test::Rng rng(2);
    for (int trial = 0; trial < 500; trial++) {
        const auto [given, texts] = some_ranges(rng);
        const BatchRanges skip = iterations(texts);
        int64_t batch = 0;
        for (const int64_t expected : batches_read(given, 120)) {
            batch = skip.next(batch + 1);
            ASSERT_EQ(batch, expected) << skip.text();
        }
        ASSERT_EQ(batch - skip.count_before(batch), 120) << skip.text();  // 120 steps were run
    }
}

// ---- in a run --------------------------------------------------------------------------------------------------------------
Schedule schedule_of(int64_t samples, bool rampup) {
    TrainOptions o;
    o.micro_batch_size = 2;
    o.global_batch_size = 16;
    o.train_samples = samples;
    o.seq_length = 4096;
    if (rampup) o.rampup_batch_size = {"4", "4", "150"};
    return make_schedule(o, 1);
}

TEST(LeftOut, LlmJpsRangesDoNotShortenTheRun) {
    const Schedule s = schedule_of(480, false);
    const auto read = [&](const Strings& ranges) { return s.samples_read({}, iterations(ranges)); };
    EXPECT_EQ(s.total_steps, 30);
    EXPECT_EQ(read({}), 480);
    EXPECT_EQ(read({"11-15"}), 480 + 5 * 16);
    EXPECT_EQ(read({"11-15", "13-20", "14"}), 480 + 10 * 16);  // overlapping
    EXPECT_EQ(read({"30-40"}), 480 + 11 * 16);                 // drawn to its end, as LLM-jp does
    EXPECT_EQ(read({"11-15", "31-40"}), 480 + 5 * 16);         // never reached
    const Counters at = s.next({10, 160, 0, 0}, {}, iterations({"11-15"}));
    EXPECT_EQ(at.step, 10);
    EXPECT_EQ(at.consumed, 160);
    EXPECT_EQ(at.discarded, 5);
    EXPECT_EQ(at.sample(), 240);
    EXPECT_EQ(at.batch(), 16);
    // Megatron's ranges are steps, and consume samples.
    const Counters skipped = s.next({10, 160, 0, 0}, parsed({"11-15"}), {});
    EXPECT_EQ(skipped.step, 15);
    EXPECT_EQ(skipped.sample(), 240);
    EXPECT_EQ(skipped.discarded, 0);
    EXPECT_EQ(s.next({10, 160, 0, 0}, parsed({"11-9007199254740992"}), {}).step, 30);
    test::expect_error([&] { read({"5-9007199254740000"}); }, {"--skip-train-iteration-range", "step 5", "maximum"});
}

// LLM-jp's procedure with growing batches: a dropped batch is as large as the next step's, and the count of consumed
// samples is unchanged. From any step, as after a resume, the same samples are read, and their number is known from the
// start.
TEST(LeftOut, ReadsTheSamplesThatLlmJpReads) {
    test::Rng rng(3);
    for (int trial = 0; trial < 300; trial++) {
        const Schedule s = schedule_of(900, trial % 2);
        const auto [given, texts] = some_ranges(rng);
        const BatchRanges discards = iterations(texts);
        std::vector<int64_t> expected;  // the first sample of each step
        int64_t drawn = 0, consumed = 0, batch = 0;
        for (const int64_t read : batches_read(given, (int)s.total_steps)) {
            const int64_t size = s.global_batch(consumed);
            drawn += (read - batch - 1) * size;
            batch = read;
            expected.push_back(drawn);
            drawn += size;
            consumed += size;
        }
        ASSERT_EQ(consumed, s.total_samples);
        Counters at;
        for (size_t step = 0; step < expected.size(); step++) {
            ASSERT_EQ(s.samples_read(at, discards), drawn) << discards.text() << " from step " << step;
            at = s.next(at, {}, discards);
            ASSERT_EQ(at.sample(), expected[step]) << discards.text() << ", step " << step + 1;
            ASSERT_EQ(at.step, (int64_t)step);
            at.consumed += s.global_batch(at.consumed);
            at.step++;
        }
        at = s.next(at, {}, discards);
        ASSERT_EQ(at.step, s.total_steps);
        ASSERT_EQ(at.sample(), drawn);  // a range after the end is not drawn
    }
}

// Batches in both kinds of ranges are dropped; a rollback's ranges among them have no effect.
TEST(LeftOut, DroppedRatherThanSkipped) {
    const Schedule s = schedule_of(480, false);
    const BatchRanges discards = iterations({"7-10", "20-25"});  // batches 7-10, 24-29
    const auto run = [&](const BatchRanges& skips) {
        std::vector<int64_t> steps;
        Counters at;
        while ((at = s.next(at, skips, discards)).step < s.total_steps) {
            at.consumed += s.global_batch(at.consumed);
            at.step++;
            steps.push_back(at.step);
        }
        EXPECT_EQ(at.sample(), s.samples_read({}, discards));
        return steps;
    };
    EXPECT_EQ(run({}).size(), 30u);
    EXPECT_EQ(run(parsed({"8-9", "25"})), run({}));
    std::vector<int64_t> without;  // batches 5, 6 and 11, 12; the latter are steps 7 and 8
    for (int64_t step = 1; step <= 30; step++)
        if (step < 5 || step > 8) without.push_back(step);
    EXPECT_EQ(run(parsed({"5-12"})), without);
}

}  // namespace test_skip
