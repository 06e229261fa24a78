// The order of samples: Megatron's, from NumPy's numbers and a slow transcription of its algorithm; splits and blends.
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <set>

#include "../llmc/data/blend.h"
#include "../llmc/data/python_random.h"
#include "../llmc/data/sample_order.h"
#include "../llmc/data/split.h"
#include "datasets.h"
#include "testing.h"

namespace test_sample_order {

using namespace test;

// random.Random(seed).sample(range(n), k)
TEST(PythonRandom, SamplesAsPython) {
    using Numbers = std::vector<int64_t>;
    EXPECT_EQ(PythonRandom(1234).sample(100, 4), (Numbers{99, 56, 14, 0}));
    EXPECT_EQ(PythonRandom((1ULL << 40) + 7).sample(1000, 6), (Numbers{628, 765, 834, 960, 967, 654}));
    EXPECT_EQ(PythonRandom(0).sample(21, 21),
              (Numbers{12, 13, 1, 8, 16, 15, 6, 20, 4, 7, 5, 9, 3, 2, 11, 18, 0, 14, 17, 19, 10}));
    EXPECT_EQ(PythonRandom(7).sample(1, 1), Numbers{0});
}

// ---- NumPy's RandomState ---------------------------------------------------------------------------------------------------
TEST(NumpyRandom, ShufflesAsNumpy) {
    struct Row {
        uint32_t seed;
        Ints ten, seventeen, begin, end;
    };
    // r = numpy.random.RandomState(seed); r.shuffle(arange(10)), arange(17), arange(100000): complete for the first two,
    // then 8 first and 4 last
    const Row rows[] = {{0,
                         {2, 8, 4, 9, 1, 6, 7, 3, 0, 5},
                         {5, 2, 3, 16, 11, 0, 9, 12, 15, 14, 1, 10, 13, 8, 6, 7, 4},
                         {31045, 91046, 99301, 52620, 46784, 77705, 8317, 98137},
                         {70608, 67699, 38804, 6921}},
                        {1234,
                         {7, 2, 9, 1, 0, 8, 4, 5, 6, 3},
                         {7, 13, 2, 3, 1, 16, 5, 4, 0, 8, 6, 15, 12, 11, 14, 10, 9},
                         {27737, 90873, 16796, 16367, 19747, 30316, 48543, 89925},
                         {21580, 22267, 3824, 36271}},
                        {UINT32_MAX,
                         {6, 9, 5, 1, 8, 0, 7, 4, 2, 3},
                         {2, 8, 3, 0, 4, 9, 14, 1, 5, 12, 13, 7, 6, 15, 10, 16, 11},
                         {7957, 48976, 9060, 55608, 39885, 31497, 55015, 32455},
                         {75636, 45585, 56022, 81560}}};
    for (const Row& row : rows) {
        NumpyRandom random(row.seed);
        const auto shuffled = [&](int n) {
            Ints x(n);
            std::iota(x.begin(), x.end(), 0);
            random.shuffle(x.data(), n);
            return x;
        };
        EXPECT_EQ(shuffled(10), row.ten) << row.seed;
        EXPECT_EQ(shuffled(17), row.seventeen) << row.seed;
        const Ints x = shuffled(100000);
        EXPECT_EQ(Ints(x.begin(), x.begin() + 8), row.begin) << row.seed;
        EXPECT_EQ(Ints(x.end() - 4, x.end()), row.end) << row.seed;
        EXPECT_EQ(shuffled(0), Ints{});
        EXPECT_EQ(shuffled(1), Ints{0});
    }
}

TEST(NumpyRandom, SumsAsNumpy) {
    // numpy.sum(1 / numpy.arange(1, n + 1)). From n = 128, sequential addition gives other bits.
    const std::pair<int, double> rows[] = {
        {7, 0x1.4be2be2be2be2p+1},   {8, 0x1.5be2be2be2be2p+1},   {9, 0x1.6a1ba1ba1ba1bp+1},
        {23, 0x1.ddfd43a4ec986p+1},  {128, 0x1.5bb8ae9541ca7p+2}, {129, 0x1.5c37b09149ba9p+2},
        {137, 0x1.600dcab4ab08bp+2}, {300, 0x1.92172a3e6965ap+2}, {1000, 0x1.df11f45f4e61ap+2}};
    for (const auto& [n, sum] : rows) {
        std::vector<double> x(n);
        for (int i = 0; i < n; i++) x[i] = 1.0 / (i + 1);
        EXPECT_EQ(numpy_sum(x.data(), x.size()), sum) << n;
    }
    EXPECT_EQ(numpy_sum(nullptr, 0), 0);
}

// ---- splits ----------------------------------------------------------------------------------------------------------------
TEST(Split, RangesAreMegatrons) {
    using Range = std::pair<int64_t, int64_t>;
    const auto ranges = [](const char* split, int64_t n) {
        return std::vector<Range>{split_range(split, DataSplit::train, n), split_range(split, DataSplit::valid, n),
                                  split_range(split, DataSplit::test, n)};
    };
    using Ranges = std::vector<Range>;
    EXPECT_EQ(ranges("969, 30, 1", 1), (Ranges{{0, 1}, {1, 1}, {1, 1}}));
    EXPECT_EQ(ranges("969, 30, 1", 17), (Ranges{{0, 16}, {16, 17}, {17, 17}}));
    EXPECT_EQ(ranges("969, 30, 1", 100), (Ranges{{0, 97}, {97, 100}, {100, 100}}));
    EXPECT_EQ(ranges("969,30,1", 1000), (Ranges{{0, 969}, {969, 999}, {999, 1000}}));
    EXPECT_EQ(ranges("969 30 1", 500000), (Ranges{{0, 484500}, {484500, 499500}, {499500, 500000}}));
    EXPECT_EQ(ranges("949,50,1", 16), (Ranges{{0, 15}, {15, 16}, {16, 16}}));
    EXPECT_EQ(ranges("1000,0,0", 17), (Ranges{{0, 17}, {0, 0}, {0, 0}}));
    EXPECT_EQ(ranges("98, 2", 100), (Ranges{{0, 98}, {98, 100}, {0, 0}}));
    EXPECT_EQ(ranges("0, 1, 0", 5), (Ranges{{0, 0}, {0, 5}, {0, 0}}));
    EXPECT_EQ(ranges("1", 5), (Ranges{{0, 5}, {0, 0}, {0, 0}}));
    EXPECT_EQ(ranges("0.1, 0.2, 0.7", 17), (Ranges{{0, 2}, {2, 5}, {5, 17}}));
    EXPECT_EQ(ranges("1, 1", 1), (Ranges{{0, 0}, {0, 1}, {0, 0}}));  // halves are rounded to even
    EXPECT_EQ(ranges("1, 1", 3), (Ranges{{0, 2}, {2, 3}, {0, 0}}));
    EXPECT_EQ(ranges("1, 1", 5), (Ranges{{0, 2}, {2, 5}, {0, 0}}));
    EXPECT_EQ(split_range("969, 30, 1", DataSplit::whole, 7), (Range{0, 7}));
    EXPECT_EQ(ranges("969, 30, 1", 0), (Ranges{{0, 0}, {0, 0}, {0, 0}}));
}

TEST(Split, Refused) {
    for (const char* split :
         {"", " , ", "0, 0, 0", "1, 2, 3, 4", "-1, 2", "a", "1, b", "1; 2", "1x", "nan", "inf", "1e999", "1-2"})
        expect_error([&] { split_range(split, DataSplit::train, 10); },
                     {"--split", "'" + std::string(split) + "'", "969, 30, 1"});
}

// ---- the order of one dataset's samples ------------------------------------------------------------------------------------
TEST(SampleOrder, NumbersFromNumpy) {
    for (const OrderGolden& g : orders) {
        const NumberedDataset data(g.lengths);
        const SampleOrder order(*data, {g.begin, g.end}, g.T, g.n_wanted, g.seed);
        EXPECT_EQ(order.n_epochs(), g.n_epochs);
        EXPECT_EQ(order.tokens_per_epoch(), std::accumulate(g.lengths.begin() + g.begin, g.lengths.begin() + g.end, 0));
        ASSERT_EQ(order.n_samples(), (int64_t)g.shuffled.size());
        for (size_t e = 0; e < g.documents.size(); e++) EXPECT_EQ(order.document((int64_t)e), g.documents[e]) << e;
        for (size_t i = 0; i < g.shuffled.size(); i++) {
            Ints tokens(g.T + 1);
            order.read(*data, (int64_t)i, tokens.data());
            EXPECT_EQ(order.shuffled((int64_t)i), g.shuffled[i]) << i;
            EXPECT_EQ(tokens[0], g.first_tokens[i]) << i;
        }
    }
}

// Megatron's sample_index here is (0,0) (0,4) (0,8) (1,3) (2,2) (3,2). Seed 10 orders the documents as 2 0 3 1.
TEST(SampleOrder, PlacesOfSamples) {
    const NumberedDataset data({5, 3, 9, 4});
    const SampleOrder order(*data, {0, 4}, 4, 0, 10);
    for (int e = 0; e < 4; e++) ASSERT_EQ(order.document(e), (std::array<int, 4>{2, 0, 3, 1}[e]));
    const std::pair<int64_t, int64_t> expected[] = {{0, 0}, {0, 4}, {0, 8}, {1, 3}, {2, 2}, {3, 2}};
    for (int64_t s = 0; s < 6; s++) {
        const SampleOrder::StreamPosition place = order.place_of(*data, 4 * s);
        EXPECT_EQ(std::make_pair(place.entry, place.token), expected[s]) << s;
    }
    EXPECT_EQ(order.n_samples(), 5);
}

TEST(SampleOrder, EqualsSlowTranscription) {
    test::Rng rng(5);
    int apart = 0, together = 0, longer = 0;
    Ints lengths;
    std::unique_ptr<NumberedDataset> dataset;
    for (int k = 0; k < 300; k++) {
        if (k % 15 == 0) {
            lengths = rng.integers(1 + rng.below(12), 0, 2 + rng.below(30));
            dataset = std::make_unique<NumberedDataset>(lengths);
        }
        const TokenDataset& data = **dataset;
        const int begin = rng.below((int)lengths.size()), end = begin + 1 + rng.below((int)lengths.size() - begin);
        const int tokens = std::accumulate(lengths.begin() + begin, lengths.begin() + end, 0);
        if (tokens < 2) continue;
        const int T = 1 + rng.below(tokens - 1), n_wanted = rng.below(4 * tokens / T + 2);
        const uint32_t seed = (uint32_t)rng.below(1 << 30);
        const SlowOrder slow(numbered_documents(lengths), begin, end, T, n_wanted, seed);
        const SampleOrder order(data, {begin, end}, T, n_wanted, seed);
        ASSERT_EQ(order.n_epochs(), slow.n_epochs) << k;
        ASSERT_EQ(order.n_samples(), (int64_t)slow.samples.size()) << k;
        ASSERT_GE(order.n_samples(), n_wanted) << k;
        for (size_t i = 0; i < slow.samples.size(); i++) {
            Ints sample(T + 1);
            order.read(data, (int64_t)i, sample.data());
            ASSERT_EQ(sample, slow.samples[i]) << "dataset " << k << ", sample " << i;
        }
        (slow.apart ? apart : together) += slow.n_epochs > 1;
        longer += T > *std::max_element(lengths.begin(), lengths.end());
    }
    EXPECT_GT(apart, 30);  // every case occurred
    EXPECT_GT(together, 30);
    EXPECT_GT(longer, 30);
}

TEST(SampleOrder, EachEpochByItself) {
    const Ints lengths = {5, 3, 9, 4, 0, 7, 1, 12, 6, 2};
    const int64_t n = (int64_t)lengths.size(), per_epoch = 49, T = 4;
    const NumberedDataset data(lengths);
    const auto order_of = [&](int64_t epochs, bool each_epoch) {
        return SampleOrder(*data, {0, n}, (int)T, epochs == 1 ? 0 : (epochs * per_epoch - 1) / T, 1234, each_epoch);
    };
    const SampleOrder order = order_of(5, true), shorter = order_of(2, true), one = order_of(1, true),
                      megatron = order_of(1, false);
    ASSERT_EQ(order.n_epochs(), 5);
    std::set<Ints> different;
    for (int64_t e = 0; e < 5; e++) {
        Ints documents, samples, expected;
        for (int64_t d = 0; d < n; d++) documents.push_back(order.document(e * n + d));
        different.insert(documents);
        EXPECT_EQ(std::set<int>(documents.begin(), documents.end()).size(), (size_t)n) << "epoch " << e;
        for (int64_t s = std::max<int64_t>(0, e * per_epoch - 1) / T; s < ((e + 1) * per_epoch - 1) / T; s++) {
            samples.push_back((int)order.shuffled(s));
            expected.push_back((int)s);
        }
        different.insert(samples);
        std::sort(samples.begin(), samples.end());
        EXPECT_EQ(samples, expected) << "epoch " << e;
    }
    EXPECT_EQ(different.size(), 10u);
    for (int64_t s = 0; s < shorter.n_samples(); s++) EXPECT_EQ(shorter.shuffled(s), order.shuffled(s));
    for (int64_t e = 0; e < 2 * n; e++) EXPECT_EQ(shorter.document(e), order.document(e));
    for (int64_t s = 0; s < one.n_samples(); s++) EXPECT_EQ(one.shuffled(s), megatron.shuffled(s));
    for (int64_t e = 0; e < n; e++) EXPECT_EQ(one.document(e), megatron.document(e));
}

// 100 samples per epoch: with 80 or more in the last epoch it is shuffled together with the others, below separately.
TEST(SampleOrder, EightyPercent) {
    const NumberedDataset data({401});
    for (const int from_last : {1, 79, 80, 100}) {
        const SampleOrder order(*data, {0, 1}, 4, 100 + from_last, 1234);
        ASSERT_EQ(order.n_epochs(), 2);
        int64_t largest = 0;  // among the first 100 samples
        for (int64_t i = 0; i < 100; i++) largest = std::max(largest, order.shuffled(i));
        EXPECT_EQ(largest < 100, from_last < 80) << from_last;
    }
}

TEST(SampleOrder, TooMany) {
    const NumberedDataset data({5, 3, 9, 4});
    for (const int64_t n : {INT64_MAX, INT64_MAX / 4, (int64_t)UINT32_MAX + 1})
        expect_error([&] { SampleOrder(*data, {0, 4}, 4, n, 1); }, {"samples", std::to_string(n).substr(0, 7)});
}

// Two ranks, of which the first one orders.
TEST(SampleOrder, IsComputedOncePerNode) {
    struct Node : NodeMemory {
        std::shared_ptr<const char> filled(size_t bytes, const std::string& what, const Fill& fill) const override {
            if (!shared) shared = NodeMemory::filled(bytes_asked = bytes, what, fill);
            else EXPECT_EQ(bytes, bytes_asked);
            return shared;
        }
        mutable std::shared_ptr<const char> shared;
        mutable size_t bytes_asked = 0;
    };
    const NumberedDataset data(test::Rng(8).integers(100, 1, 9));
    const Node node;
    const SampleOrder alone(*data, {0, 100}, 4, 500, 1), first(*data, {0, 100}, 4, 500, 1, false, node),
        second(*data, {0, 100}, 4, 500, 1, false, node);
    EXPECT_GT(alone.n_epochs(), 1);
    for (const SampleOrder* order : {&first, &second})
        for (int64_t i = 0; i < alone.n_samples(); i++) {
            Ints expected(5), sample(5);
            alone.read(*data, i, expected.data());
            order->read(*data, i, sample.data());
            ASSERT_EQ(sample, expected) << i;
        }
    const auto entries = (size_t)(100 * alone.n_epochs());
    EXPECT_LE(node.bytes_asked, 4 * (size_t)alone.n_samples() + 4 * entries + entries / 2 + 8);
}

TEST(SampleOrder, MemoryIsCheckedBefore) {
    expect_error(
        [] { NodeMemory().filled((size_t)1 << 60, "data: the order of 9 samples", [](char*, const auto&) { FAIL(); }); },
        {"data: the order of 9 samples needs 1073741824.00 GiB", "are available", "HINT: "});
}

// ---- blending --------------------------------------------------------------------------------------------------------------
TEST(Blend, DataPath) {
    TemporaryDirectory dir;
    const auto parse = [](const std::vector<std::string>& words) { return parse_data_path(words); };
    EXPECT_TRUE(parse({}).paths.empty());
    EXPECT_EQ(parse({"a"}).paths, (std::vector<std::string>{"a"}));
    EXPECT_EQ(parse({"a", "b"}).paths, (std::vector<std::string>{"a", "b"}));
    EXPECT_TRUE(parse({"a", "b"}).weights.empty());
    EXPECT_EQ(parse({".5", "a", "3e2", "b"}).paths, (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(parse({".5", "a", "3e2", "b"}).weights, (std::vector<double>{0.5, 300}));
    EXPECT_EQ(parse({"1", "2"}).paths, (std::vector<std::string>{"2"}));

    expect_error([&] { parse({"0", "a"}); }, {"weight 0 of a", "above 0"});
    expect_error([&] { parse({"1", "a", "-2", "b"}); }, {"weight -2 of b", "above 0"});
    expect_error([&] { parse({"inf", "a"}); }, {"weight inf of a"});
    for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{{"0.7"},
                                                                                       {"a", "0.7"},
                                                                                       {"0.7", "a", "b"},
                                                                                       {"0.7", "a", "b", "0.3"},
                                                                                       {"a", "0.7", "b", "0.3"},
                                                                                       {"0.7", "a", "0.7", "b", "c"}})
        expect_error([&] { parse(words); }, {"'0.7'", "looks like a weight", "WEIGHT PATH"});

    // a dataset's name may be a number
    write_dataset(dir / "2023", 100, {{1, 2, 3}});
    const std::filesystem::path before = std::filesystem::current_path();
    std::filesystem::current_path(dir / "");
    EXPECT_EQ(parse({"2023"}).paths, (std::vector<std::string>{"2023"}));
    EXPECT_TRUE(parse({"2023", "a", "b"}).weights.empty());
    std::filesystem::current_path(before);
}

std::vector<BlendEntry> blended(const std::vector<double>& weights, const std::vector<int64_t>& available, int64_t n) {
    std::vector<BlendEntry> blend((size_t)n);
    blend_samples(weights, available, n, blend.data(), [] {});
    return blend;
}

TEST(Blend, OrderIsMegatrons) {
    const Ints expected = {0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2, 0, 1, 0, 2, 0, 1, 0};
    const std::vector<BlendEntry> blend = blended({0.5, 0.3, 0.2}, {20, 20, 20}, 20);
    std::array<uint32_t, 3> taken{};
    for (size_t i = 0; i < expected.size(); i++) {
        EXPECT_EQ((int)blend[i].dataset, expected[i]) << i;
        EXPECT_EQ(blend[i].index, taken[expected[i]]++) << i;
    }
    for (const BlendEntry& e : blended({0.25, 0.25, 0.25, 0.25}, {1, 1, 1, 1}, 4)) EXPECT_EQ(e.index, 0u);
}

// After n samples, the greedy choice has taken less than one sample too many from each dataset: it takes only from one with
// lag >= 0, since the lags' sum is 0. So of K datasets none lags by K - 1 or more; with two datasets both bounds are 1.
TEST(Blend, SharesAreKept) {
    test::Rng rng(6);
    for (int k = 0; k < 200; k++) {
        const size_t K = 1 + (size_t)rng.below(6);
        std::vector<double> weights(K);
        for (double& w : weights) w = rng.uniform(0.01, 1);
        weights = normalized(weights);
        const int64_t n = 1 + rng.below(500);
        const std::vector<BlendEntry> blend = blended(weights, std::vector<int64_t>(K, n), n);
        std::vector<int64_t> taken(K, 0);
        for (int64_t i = 0; i < n; i++) {
            ASSERT_EQ(blend[i].index, taken[blend[i].dataset]++);
            for (size_t j = 0; j < K; j++) {
                const double too_many = (double)taken[j] - weights[j] * (double)(i + 1);
                ASSERT_LT(too_many, 1);
                ASSERT_GT(too_many, -std::max(1.0, (double)K - 1));
            }
        }
    }
}

TEST(Blend, TakesAllThatIsThereAndNoMore) {
    test::Rng rng(7);
    for (int k = 0; k < 200; k++) {
        const size_t K = 1 + (size_t)rng.below(6);
        std::vector<int64_t> available(K);
        for (int64_t& a : available) a = 1 + rng.below(k % 2 ? 100 : 3);
        const int64_t n = std::accumulate(available.begin(), available.end(), (int64_t)0);
        // by size, and by weights unrelated to the sizes
        std::vector<double> weights(available.begin(), available.end());
        if (k % 3 == 0) std::reverse(weights.begin(), weights.end());
        std::vector<int64_t> taken(K, 0);
        for (const BlendEntry& e : blended(normalized(weights), available, n)) ASSERT_EQ(e.index, taken[e.dataset]++);
        EXPECT_EQ(taken, available);
    }
}

}  // namespace test_sample_order
