// Batches and their masks, in the order tested by test_sample_order.cpp; unusable data.
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "../llmc/data/dataloader.h"
#include "datasets.h"
#include "files.h"
#include "testing.h"

namespace test_dataloader {

using namespace test;

DataOptions options_for(const std::vector<std::string>& words, int T, DataSplit part = DataSplit::whole) {
    DataOptions o;
    o.blend = parse_data_path(words);
    o.T = T;
    o.part = part;
    return o;
}

// First tokens of samples.
Ints firsts(const DataLoader& data) {
    Batch batch;
    Ints tokens;
    for (int64_t i = 0; i < data.n_samples(); i++) {
        data.fetch(i, 1, batch);
        tokens.push_back(batch.tokens[0]);
    }
    return tokens;
}
Ints all_tokens(const DataLoader& data) {
    Batch batch;
    data.fetch(0, (int)data.n_samples(), batch);
    return batch.tokens;
}

// ---- rows over ranks -------------------------------------------------------------------------------------------------------
// A rank has two of the chunks, as far from either end; windows count rows of the whole sequence.
TEST(Cut, RanksHaveTheRowsOfTwoChunks) {
    Batch all;
    all.B = 2;
    all.T = 24;
    for (int i = 0; i < 48; i++) {
        all.tokens.push_back(i);
        all.targets.push_back(100 + i);
        all.positions.push_back(200 + i);
        all.doc_start.push_back(i % 24 / 10 * 10);
    }
    const Ints first = all.first_keys(7);
    std::set<int> seen;
    for (int rank = 0; rank < 3; rank++) {
        const Batch mine = all.cut({3, rank});
        EXPECT_EQ(mine.T, 8);
        ASSERT_EQ(mine.tokens.size(), 16u);
        const Ints windows = mine.first_keys(7);
        for (int i = 0; i < 16; i++) {
            const int row = i / 8 * 24 + (i % 8 < 4 ? 4 * rank + i % 4 : 4 * (5 - rank) + i % 4);
            EXPECT_EQ(mine.tokens[(size_t)i], row);
            EXPECT_EQ(mine.part.row_here(row % 24, 8), i % 8);
            EXPECT_EQ((Zigzag{{3, (rank + 1) % 3}}.row_here(row % 24, 8)), -1);
            EXPECT_EQ(mine.targets[(size_t)i], 100 + row);
            EXPECT_EQ(mine.positions[(size_t)i], 200 + row);
            EXPECT_EQ(mine.doc_start[(size_t)i], all.doc_start[(size_t)row]);
            EXPECT_EQ(windows[(size_t)i], first[(size_t)row]);
            EXPECT_TRUE(seen.insert(row).second);
        }
    }
    EXPECT_EQ(seen.size(), 48u);
}

// ---- the loader: which samples ---------------------------------------------------------------------------------------------
TEST(Loader, OneDatasetIsItsSampleOrder) {
    TemporaryDirectory dir;
    for (const OrderGolden& g : orders) {
        if (g.begin > 0) continue;
        write_dataset(dir / "d", 1 << 20, numbered_documents(g.lengths));
        DataOptions o = options_for({dir / "d"}, g.T);
        o.n_samples = g.n_wanted;
        o.seed = g.seed;
        const DataLoader data(o);
        const size_t n = g.n_wanted > 0 ? (size_t)g.n_wanted : g.first_tokens.size();
        EXPECT_EQ(data.T(), g.T);
        EXPECT_EQ(firsts(data), Ints(g.first_tokens.begin(), g.first_tokens.begin() + n));
    }
}

// From NumPy, after BlendedMegatronDatasetBuilder: document d of dataset j is numbered from 100000 j + 1000 d.
TEST(Loader, BlendsAsMegatron) {
    TemporaryDirectory dir;
    write_dataset(dir / "a", 1 << 20, numbered_documents({5, 3, 9, 4}));
    write_dataset(dir / "b", 1 << 20, numbered_documents({7, 7, 2}, 100000));
    write_dataset(dir / "c", 1 << 20, numbered_documents({30}, 200000));

    DataOptions o = options_for({"5", dir / "a", "3", dir / "b", "2", dir / "c"}, 4);
    o.n_samples = 30;
    EXPECT_EQ(firsts(DataLoader(o)), (Ints{1002, 100002, 200008, 2003, 100001, 2003, 200004, 3003, 101002, 2,
                                           4,    100006, 200024, 2002, 100005, 0,    200000, 1001, 102000, 2007,
                                           3000, 102000, 200016, 2007, 101004, 2006, 200020, 1002, 101006, 3}));
    const std::vector<DataSummary> rows = DataLoader(o).summary();
    ASSERT_EQ(rows.size(), 3u);
    const int64_t samples[] = {15, 9, 6}, tokens[] = {21, 16, 30}, documents[] = {4, 3, 1};
    for (int j = 0; j < 3; j++) {
        EXPECT_EQ(rows[j].name, dir / std::string(1, (char)('a' + j)));
        EXPECT_EQ(rows[j].samples, samples[j]);
        EXPECT_EQ(rows[j].tokens, tokens[j]);
        EXPECT_EQ(rows[j].documents, documents[j]);
        EXPECT_DOUBLE_EQ(rows[j].share, (double)samples[j] / 30);
        EXPECT_DOUBLE_EQ(rows[j].epochs, 4.0 * (double)samples[j] / (double)tokens[j]);
    }

    // by size: there are 5, 3 and 7 samples
    const Ints by_size = {200008, 2000,   100004, 200004, 4,      200024, 101001, 2004,
                          200000, 200016, 0,      100000, 200020, 2008,   200012};
    o = options_for({dir / "a", dir / "b", dir / "c"}, 4);
    EXPECT_EQ(firsts(DataLoader(o)), by_size);
    o.n_samples = 9;
    EXPECT_EQ(firsts(DataLoader(o)), Ints(by_size.begin(), by_size.begin() + 9));
    o.n_samples = 15;
    EXPECT_EQ(firsts(DataLoader(o)), by_size);
    // more than there are: data is repeated, in the same shares
    o.n_samples = 150;
    const std::vector<DataSummary> repeated = DataLoader(o).summary();
    EXPECT_EQ(repeated[0].samples, 50);
    EXPECT_EQ(repeated[1].samples, 30);
    EXPECT_EQ(repeated[2].samples, 70);
    // weights without a number of samples: one pass over everything
    o = options_for({"5", dir / "a", "3", dir / "b", "2", dir / "c"}, 4);
    EXPECT_EQ(firsts(DataLoader(o)), by_size);
}

// Results of Megatron-LM's own GPTDataset and BlendedMegatronDatasetBuilder (August 2026) for 40 steps of global batch 4,
// validated every 10 steps with 2 batches: (40 / 10 + 1) * 2 * 4 = 40 samples; validation k reads from sample 8 k.
TEST(Loader, ValidatesAsMegatron) {
    TemporaryDirectory dir;
    const auto times = [](const Ints& lengths, int n) {
        Ints all;
        while (n-- > 0) all.insert(all.end(), lengths.begin(), lengths.end());
        return all;
    };
    write_dataset(dir / "a", 1 << 20, numbered_documents(times({5, 3, 9, 4}, 5)));
    write_dataset(dir / "b", 1 << 20, numbered_documents(times({7, 7, 2}, 4), 100000));
    write_dataset(dir / "c", 1 << 20, numbered_documents(times({30}, 10), 200000));
    struct Row {
        std::vector<std::string> words;
        const char* split;  // "": all data is for validation
        int n;
        Ints first_tokens;
    };
    const Row rows[] = {
        {{dir / "a"}, "60, 30, 10", 40, {15003, 15003, 14007, 14007, 16000, 12001, 15003, 12003, 14005, 16000,
                                         16001, 16004, 14003, 16002, 12002, 14008, 14003, 17002, 15002, 17002,
                                         14000, 14001, 12004, 13001, 12000, 16004, 13002, 13000, 14003, 16003,
                                         17001, 13002, 17000, 14007, 12002, 14004, 16003, 12000, 15003, 15003}},
        {{"5", dir / "a", "3", dir / "b", "2", dir / "c"},
         "60, 30, 10",
         40,
         {14000,  109003, 206028, 17001,  110001, 14000, 208004, 15001,  108001, 13001, 16003,  109004, 206008, 12002,
          107005, 16003,  206012, 15000,  107004, 14004, 17000,  107000, 206004, 12001, 109000, 16002,  208012, 14008,
          110000, 14006,  17001,  107001, 206020, 14002, 110004, 13002,  206016, 14008, 110002, 12002}},
        {{dir / "a", dir / "b", dir / "c"}, "60, 40", 30, {206028, 17001,  207010, 110002, 206016, 206004, 18008,  209018,
                                                           207002, 107006, 206012, 12003,  209002, 207026, 14000,  207022,
                                                           208012, 109001, 208024, 206000, 18004,  206008, 206024, 18000,
                                                           209014, 107002, 208028, 208016, 14008,  206020}},
        {{"2", dir / "a", "1", dir / "b"}, "", 40, {6000,   101001, 2005,   10000,  104003, 2001,   12001,  108001,
                                                    14003,  5002,   102001, 1000,   6004,   107004, 16000,  19001,
                                                    100002, 4003,   11000,  110000, 13000,  10008,  109003, 16004,
                                                    18000,  107000, 3000,   18004,  101005, 10004,  6008,   110004,
                                                    8001,   2,      100006, 14007,  7000,   106002, 18008,  15003}},
    };
    for (const Row& row : rows) {
        DataOptions o = options_for(row.words, 4, *row.split ? DataSplit::valid : DataSplit::whole);
        if (*row.split) o.split = row.split;
        o.n_samples = row.n;
        const DataLoader data(o);
        EXPECT_EQ(firsts(data), row.first_tokens) << row.words.size();
        std::vector<int64_t> all;
        for (const std::vector<int64_t>& samples : data.samples_by_set(0, row.n)) {
            all.insert(all.end(), samples.begin(), samples.end());
            Batch batch;
            data.gather(samples.data(), (int)samples.size(), batch);
            for (size_t i = 0; i < samples.size(); i++) EXPECT_EQ(batch.tokens[4 * i], row.first_tokens[(size_t)samples[i]]);
        }
        std::sort(all.begin(), all.end());
        for (int64_t i = 0; i < row.n; i++) EXPECT_EQ(all[(size_t)i], i);
    }
}

TEST(Loader, NamesOfSets) {
    TemporaryDirectory dir;
    for (const char* sub : {"x", "y"}) std::filesystem::create_directory(dir / sub);
    for (const char* name : {"x/a", "x/b", "y/a"}) write_dataset(dir / name, 100, {Ints(50, 1)});
    using Names = std::vector<std::string>;
    EXPECT_EQ(DataLoader(options_for({dir / "x/a", dir / "x/b"}, 4)).set_names(), (Names{"a", "b"}));
    EXPECT_EQ(DataLoader(options_for({dir / "x/a", dir / "y/a"}, 4)).set_names(), (Names{dir / "x/a", dir / "y/a"}));
}

// Every small dataset is either split into parts of at least one sample each, or is all for training, or the message names
// a --seq-length that would work. Splits by whole documents, like Megatron's, if these suffice.
TEST(Loader, SmallDataIsSplit) {
    TemporaryDirectory dir;
    int by_documents = 0, by_tokens = 0, only_training = 0, refused = 0;
    for (const Ints& lengths : std::vector<Ints>{{1},
                                                 {2},
                                                 {8},
                                                 {9},
                                                 {16},
                                                 {17},
                                                 {18},
                                                 {19},
                                                 {500},
                                                 {5, 5},
                                                 {0, 20},
                                                 {20, 0},
                                                 {0, 0, 9},
                                                 {1, 1, 1},
                                                 {9, 9},
                                                 {1, 40},
                                                 {40, 1},
                                                 {0, 30, 0, 7},
                                                 {300, 300, 300},
                                                 Ints(17, 1),
                                                 Ints(40, 3),
                                                 Ints(40, 30)}) {
        write_dataset(dir / "d", 1 << 20, numbered_documents(lengths));
        const TokenDataset data = TokenDataset::open(dir / "d");
        const int64_t all = data.n_tokens();
        for (const char* split : {"969, 30, 1", "99, 1, 0", "1, 1", "1, 98, 1", "0, 1, 0", "1"})
            for (const int T : {1, 2, 8, 100}) {
                SCOPED_TRACE(format("split %s, T %d, %zu documents, the first of %d", split, T, lengths.size(), lengths[0]));
                const SplitParts s = split_data(data, split, T, true);
                std::set<int> seen[2];
                int64_t tokens[2];
                for (const int p : {0, 1}) {
                    tokens[p] = s.parts[p].tokens(data);
                    if (tokens[p] <= T) continue;
                    const SampleOrder order(data, s.parts[p], T, 0, 1);
                    Ints sample(T + 1);
                    for (int64_t i = 0; i < order.n_samples(); i++) {
                        order.read(data, i, sample.data());
                        seen[p].insert(sample.begin(), sample.end());
                    }
                    EXPECT_LE((int64_t)seen[p].size(), tokens[p]);
                    EXPECT_GT((int64_t)seen[p].size(), tokens[p] - T);
                }
                for (const int token : seen[0]) EXPECT_EQ(seen[1].count(token), 0u) << token;
                EXPECT_LE(tokens[0] + tokens[1], all);
                const bool trains = has_share(split, DataSplit::train), validates = has_share(split, DataSplit::valid);
                EXPECT_EQ(trains && tokens[0] > T, trains && all > T);
                EXPECT_EQ(validates && tokens[1] > T, validates && all > (trains ? 2 * T + 1 : T));
                if (!trains || !validates || all <= T) continue;
                (s.note.empty() ? by_documents : tokens[1] ? by_tokens : only_training)++;
                if (tokens[1]) continue;
                EXPECT_EQ(tokens[0], all);
                EXPECT_NE(s.note.find("too few for validation"), std::string::npos) << s.note;
            }
        if (all > 100) continue;
        for (const DataSplit part : {DataSplit::train, DataSplit::valid}) {
            DataOptions o = options_for({dir / "d"}, 100, part);
            o.split = part == DataSplit::train ? "969, 30, 1" : "0, 1, 0";
            expect_error([&] { DataLoader loader(o); },
                         {dir / "d", all < 2 ? "HINT: more text" : format("or --seq-length %lld", (long long)all - 1)});
            refused++;
        }
    }
    for (const int n : {by_documents, by_tokens, only_training, refused}) EXPECT_GT(n, 10);
}

// 1000 tokens in one document: splits of 969, 30 and 1.
TEST(Loader, OneDocumentIsSplitByTokens) {
    TemporaryDirectory dir;
    write_dataset(dir / "d", 1 << 20, {[] {
                      Ints x(1000);
                      std::iota(x.begin(), x.end(), 0);
                      return x;
                  }()});
    const auto tokens = [&](DataSplit part, int T, bool validates) {
        DataOptions o = options_for({dir / "d"}, T, part);
        o.validates = validates;
        const DataLoader data(o);
        Ints all = all_tokens(data);
        std::sort(all.begin(), all.end());
        return std::tuple(data.summary()[0].tokens, all.front(), all.back());
    };
    EXPECT_EQ(tokens(DataSplit::train, 4, true), std::tuple(969, 0, 967));
    EXPECT_EQ(tokens(DataSplit::valid, 4, true), std::tuple(30, 969, 996));
    EXPECT_EQ(tokens(DataSplit::train, 49, true), std::tuple(949, 0, 930));
    EXPECT_EQ(tokens(DataSplit::valid, 49, true), std::tuple(50, 949, 997));  // one sample, not 30 tokens
    EXPECT_EQ(tokens(DataSplit::train, 4, false), std::tuple(1000, 0, 995));  // as in Megatron: validation requests none of it
}

// If a run's length is chosen later, more samples are requested, in the order of that length from the start.
TEST(Loader, OrdersMoreSamplesLater) {
    const TemporaryDirectory dir;
    write_dataset(dir / "a", 1 << 20, numbered_documents({30, 50, 20, 40}));
    write_dataset(dir / "b", 1 << 20, numbered_documents({25, 35, 45}, 100000));
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{dir / "a"}, {"0.7", dir / "a", "0.3", dir / "b"}, {dir / "a", dir / "b"}}) {
        DataOptions o = options_for(words, 7);
        o.reshuffle_each_epoch = true;
        o.n_samples = 300;
        const DataLoader whole(o);
        o.n_samples = 10;
        DataLoader later(o);
        Batch expected, found;
        for (const int64_t n : {10, 40, 300, 120}) {
            later.order(n);
            EXPECT_EQ(later.n_samples(), n);
            whole.fetch(0, (int)n, expected);
            later.fetch(0, (int)n, found);
            EXPECT_EQ(found.tokens, expected.tokens) << n;
        }
    }
}

// In a blend, a set too small to be split is only trained on; the others keep their weights.
TEST(Loader, SmallSetsOfABlend) {
    TemporaryDirectory dir;
    write_dataset(dir / "a", 1 << 20, numbered_documents({600}));
    write_dataset(dir / "tiny", 1 << 20, numbered_documents({15}, 100000));
    write_dataset(dir / "b", 1 << 20, numbered_documents({600}, 200000));
    DataOptions o = options_for({"3", dir / "a", "1", dir / "tiny", "1", dir / "b"}, 8, DataSplit::valid);
    o.n_samples = 40;
    const DataLoader valid(o);
    EXPECT_EQ(valid.set_names(), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(valid.summary()[0].samples, 30);
    EXPECT_EQ(valid.summary()[1].samples, 10);
    o.part = DataSplit::train;
    const DataLoader train(o);
    EXPECT_EQ(train.summary()[1].tokens, 15);
    EXPECT_NE(train.summary()[1].note.find("--seq-length 6 "), std::string::npos) << train.summary()[1].note;
    o.blend = parse_data_path({dir / "tiny"});
    o.part = DataSplit::valid;
    EXPECT_EQ(DataLoader(o).n_samples(), 0);
    o.T = 20;
    o.part = DataSplit::train;
    expect_error([&] { DataLoader data(o); }, {"tiny", "15 tokens", "--seq-length 14"});
}

TEST(Loader, OnePassReadsEveryTokenOnce) {
    TemporaryDirectory dir;
    const Ints lengths(50, 13);
    write_dataset(dir / "d", 1 << 20, numbered_documents(lengths));
    DataOptions o = options_for({dir / "d"}, 8, DataSplit::valid);
    o.split = "30, 20";
    const DataLoader data(o);
    EXPECT_EQ(data.n_samples(), (20 * 13 - 1) / 8);
    const Ints tokens = all_tokens(data);
    const std::set<int> distinct(tokens.begin(), tokens.end());
    EXPECT_EQ(distinct.size(), tokens.size());
    for (const int token : tokens) EXPECT_TRUE(token / 1000 >= 30 && token / 1000 < 50) << token;
}

TEST(Loader, PartsOfTheSplitShareNothing) {
    TemporaryDirectory dir;
    write_dataset(dir / "d", 1 << 20, numbered_documents(Ints(40, 6)));
    std::set<int> seen;
    size_t n = 0;
    for (const DataSplit part : {DataSplit::train, DataSplit::valid, DataSplit::test}) {
        DataOptions o = options_for({dir / "d"}, 5, part);
        o.split = "6, 3, 1";
        const Ints tokens = all_tokens(DataLoader(o));
        seen.insert(tokens.begin(), tokens.end());
        n += tokens.size();
    }
    EXPECT_EQ(seen.size(), n);
    EXPECT_GE(n, 40u * 6 - 3 * 5);
}

TEST(Loader, SameSeedSameOrder) {
    TemporaryDirectory dir;
    write_dataset(dir / "d", 1 << 20, numbered_documents({50, 30, 70, 20, 90}));
    DataOptions o = options_for({dir / "d"}, 4);
    o.n_samples = 200;
    const Ints tokens = all_tokens(DataLoader(o));
    EXPECT_EQ(all_tokens(DataLoader(o)), tokens);
    o.seed = 1235;
    EXPECT_NE(all_tokens(DataLoader(o)), tokens);
}

// A longer run has the same order as long as each dataset is read equally often; otherwise it reports how far the order is
// the same.
TEST(Loader, OrderOfALongerRun) {
    TemporaryDirectory dir;
    write_dataset(dir / "a", 1 << 20, numbered_documents({50, 30, 70, 20, 90, 141}));    // 401 tokens: 100 samples of 4
    write_dataset(dir / "b", 1 << 20, numbered_documents({111, 90, 100, 300}, 100000));  // 601: 150
    const auto load = [&](const std::vector<std::string>& words, int64_t n) {
        DataOptions o = options_for(words, 4);
        o.n_samples = n;
        return DataLoader(o);
    };
    for (const auto& words : std::vector<std::vector<std::string>>{
             {dir / "a"}, {dir / "a", dir / "b"}, {"0.5", dir / "a", "0.5", dir / "b"}, {"0.9", dir / "a", "0.1", dir / "b"}}) {
        std::vector<DataLoader> loaders;
        std::vector<Ints> orders;
        for (const int64_t n : {20, 61, 100, 101, 180, 199, 250, 251, 300, 430, 900}) {
            loaders.push_back(load(words, n));
            orders.push_back(firsts(loaders.back()));
        }
        for (size_t i = 0; i < loaders.size(); i++)
            for (size_t j = 0; j < loaders.size(); j++) {
                const int64_t before = loaders[i].n_samples(), now = loaders[j].n_samples();
                SCOPED_TRACE(format("%zu words, %lld samples, then %lld", words.size(), (long long)before, (long long)now));
                const bool same = std::equal(orders[i].begin(), orders[i].begin() + std::min(before, now), orders[j].begin());
                const std::string problem = loaders[j].order_problem(before);
                EXPECT_EQ(problem.empty(), same) << problem;
                if (problem.empty()) continue;
                const bool most = problem.find("at most") != std::string::npos;  // "with at most N samples ..."
                const int64_t kept = atoll(problem.c_str() + problem.find(most ? "at most" : "at least") + (most ? 8 : 9));
                EXPECT_EQ(most, now > before);
                EXPECT_EQ(loaders[i].order_problem(kept), "");
                EXPECT_NE(loaders[i].order_problem(kept + (most ? 1 : -1)), "");
            }
    }
    EXPECT_EQ(load({dir / "a"}, 100).order_problem(20), "");
    const std::string problem = load({dir / "a"}, 150).order_problem(60);
    for (const std::string& part : {dir / "a", std::string("2 epochs, the last apart for 150"), std::string("60 used 1 epoch;"),
                                    std::string("at most 100")})
        EXPECT_NE(problem.find(part), std::string::npos) << part << " not in: " << problem;
}

// Any batch size, start sample and thread: the same rows.
TEST(Loader, BatchesAreRowsOfTheSameOrder) {
    TemporaryDirectory dir;
    write_dataset(dir / "d", 1 << 20, numbered_documents({50, 30, 70, 20, 90}));
    DataOptions o = options_for({dir / "d"}, 4);
    o.n_samples = 96;
    const DataLoader data(o);
    const Ints tokens = all_tokens(data);
    Batch batch;
    for (const int B : {32, 3, 8}) {
        for (int64_t i = 96 - B; i >= 0; i -= B) {
            data.fetch(i, B, batch);
            EXPECT_EQ(batch.B, B);
            EXPECT_EQ(batch.T, 4);
            ASSERT_EQ(batch.tokens, Ints(tokens.begin() + i * 4, tokens.begin() + (i + B) * 4));
        }
    }
    std::vector<Ints> found(4);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&, t] {
            Batch mine;
            data.fetch(24 * t, 24, mine);
            found[t] = mine.tokens;
        });
    for (std::thread& thread : threads) thread.join();
    for (int t = 0; t < 4; t++) EXPECT_EQ(found[t], Ints(tokens.begin() + 96 * t, tokens.begin() + 96 * (t + 1)));
}

// ---- the loader: contents of a batch ----------------------------------------------------------------------------------------
// One document, so that an epoch's only sample is its start.
class Masks : public ::testing::Test {
protected:
    static constexpr int eod = 9;
    void write(const Ints& tokens) { write_dataset(dir_ / "d", 10, {tokens}); }
    Batch fetch(int T, bool positions, bool attention, bool loss) {
        DataOptions o = options_for({dir_ / "d"}, T);
        o.eod = eod;
        o.reset_position_ids = positions;
        o.reset_attention_mask = attention;
        o.eod_mask_loss = loss;
        const DataLoader data(o);
        EXPECT_EQ(data.n_samples(), 1);
        Batch batch;
        data.fetch(0, 1, batch);
        EXPECT_EQ(data.unmasked(0, 1), T - std::count(batch.targets.begin(), batch.targets.end(), -1));
        return batch;
    }
    TemporaryDirectory dir_;
};

TEST_F(Masks, None) {
    write({5, 6, 9, 7, 9, 9, 3, 4, 9});
    const Batch batch = fetch(8, false, false, false);
    EXPECT_EQ(batch.tokens, (Ints{5, 6, 9, 7, 9, 9, 3, 4}));
    EXPECT_EQ(batch.targets, (Ints{6, 9, 7, 9, 9, 3, 4, 9}));
    EXPECT_EQ(batch.positions, (Ints{0, 1, 2, 3, 4, 5, 6, 7}));
    EXPECT_TRUE(batch.doc_start.empty());
}

TEST_F(Masks, EachAlone) {
    write({5, 6, 9, 7, 9, 9, 3, 4, 9});
    const Batch plain = fetch(8, false, false, false);

    const Batch positions = fetch(8, true, false, false);
    EXPECT_EQ(positions.positions, (Ints{0, 1, 2, 0, 1, 0, 0, 1}));
    EXPECT_EQ(positions.targets, plain.targets);
    EXPECT_TRUE(positions.doc_start.empty());

    const Batch attention = fetch(8, false, true, false);
    EXPECT_EQ(attention.doc_start, (Ints{0, 0, 0, 3, 3, 5, 6, 6}));
    EXPECT_EQ(attention.positions, plain.positions);
    EXPECT_EQ(attention.targets, plain.targets);

    const Batch loss = fetch(8, false, false, true);  // the target EOD is in the loss, the token after it is not
    EXPECT_EQ(loss.targets, (Ints{6, 9, -1, 9, -1, -1, 4, 9}));
    EXPECT_EQ(loss.positions, plain.positions);
    EXPECT_TRUE(loss.doc_start.empty());
    for (const Batch* b : {&positions, &attention, &loss}) EXPECT_EQ(b->tokens, plain.tokens);
}

TEST_F(Masks, AllTogetherAtTheBorders) {
    write({9, 1, 2, 9, 9});  // EOD as first and as last input
    const Batch batch = fetch(4, true, true, true);
    EXPECT_EQ(batch.tokens, (Ints{9, 1, 2, 9}));
    EXPECT_EQ(batch.targets, (Ints{-1, 2, 9, -1}));
    EXPECT_EQ(batch.positions, (Ints{0, 0, 1, 2}));
    EXPECT_EQ(batch.doc_start, (Ints{0, 1, 1, 1}));
    write({9, 9, 9});
    EXPECT_EQ(fetch(2, true, true, true).targets, (Ints{-1, -1}));
    write({1, 2, 3});
    EXPECT_EQ(fetch(2, true, true, true).doc_start, (Ints{0, 0}));
}

// Rows of a batch are independent, and a reused batch keeps nothing of its previous contents.
TEST_F(Masks, ManyRows) {
    test::Rng rng(8);
    write(rng.integers(4001, 5, 10));
    DataOptions o = options_for({dir_ / "d"}, 40);
    o.eod = eod;
    o.reset_position_ids = o.reset_attention_mask = o.eod_mask_loss = true;
    const DataLoader data(o);
    ASSERT_EQ(data.n_samples(), 100);
    Batch batch;
    int64_t unmasked = 0;
    for (int64_t first = 0; first < 100; first += 20) {
        data.fetch(first, 20, batch);
        ASSERT_EQ(batch.targets.size(), 800u);
        for (int b = 0; b < 20; b++) {
            int start = 0;
            for (int t = 0; t < 40; t++) {
                const int i = 40 * b + t;
                ASSERT_EQ(batch.doc_start[i], start);
                ASSERT_EQ(batch.positions[i], t - start);
                const bool ends = batch.tokens[i] == eod;
                if (ends) start = t + 1;
                ASSERT_EQ(batch.targets[i] == -1, ends);
                if (!ends && t < 39) {
                    ASSERT_EQ(batch.targets[i], batch.tokens[i + 1]);
                }
                unmasked += !ends;
            }
        }
    }
    EXPECT_EQ(data.unmasked(0, 100), unmasked);
    EXPECT_EQ(data.unmasked(0, 30) + data.unmasked(30, 70), unmasked);
    EXPECT_EQ(data.unmasked(7, 0), 0);
}

TEST_F(Masks, NeedTheEndOfDocumentToken) {
    write({1, 2, 3});
    for (bool DataOptions::*flag :
         {&DataOptions::reset_position_ids, &DataOptions::reset_attention_mask, &DataOptions::eod_mask_loss}) {
        DataOptions o = options_for({dir_ / "d"}, 2);
        o.*flag = true;
        expect_error([&] { DataLoader data(o); }, {"end-of-document", "--tokenizer"});
    }
}

// ---- llm.c's shards --------------------------------------------------------------------------------------------------------
void write_shard(const std::string& path, const std::vector<uint16_t>& tokens) {
    std::string bytes = bytes_of<int32_t>(20240520) + bytes_of<int32_t>(1) + bytes_of<int32_t>((int)tokens.size());
    bytes.resize(1024);
    for (const uint16_t token : tokens) bytes += bytes_of(token);
    write_file(path, bytes);
}

TEST(Loader, ShardsWithoutWeightsAreOneStream) {
    TemporaryDirectory dir;
    write_shard(dir / "x_0.bin", {0, 1, 2});
    write_shard(dir / "x_1.bin", {1000, 1001});
    write_shard(dir / "y.bin", {2000, 2001, 2002, 2003});
    const DataLoader data(options_for({dir / "x_*.bin", dir / "y.bin"}, 2));
    EXPECT_EQ(data.n_samples(), 4);
    ASSERT_EQ(data.summary().size(), 1u);
    EXPECT_EQ(data.summary()[0].documents, 3);
    EXPECT_EQ(data.summary()[0].tokens, 9);
    const SlowOrder slow({{0, 1, 2}, {1000, 1001}, {2000, 2001, 2002, 2003}}, 0, 3, 2, 0, 1234);
    Batch batch;
    for (int i = 0; i < 4; i++) {
        data.fetch(i, 1, batch);
        EXPECT_EQ(batch.tokens, Ints(slow.samples[i].begin(), slow.samples[i].end() - 1));
        EXPECT_EQ(batch.targets, Ints(slow.samples[i].begin() + 1, slow.samples[i].end()));
    }
    // with weights each is a separate dataset
    DataOptions weighted = options_for({"1", dir / "x_*.bin", "1", dir / "y.bin"}, 2);
    weighted.n_samples = 10;
    EXPECT_EQ(DataLoader(weighted).summary().size(), 2u);

    // one shard is split by tokens: its 4 are too few for two samples of 3
    DataOptions o = options_for({dir / "y.bin"}, 2, DataSplit::valid);
    EXPECT_EQ(DataLoader(o).n_samples(), 0);
    o.T = 1;
    EXPECT_EQ(DataLoader(o).n_samples(), 1);
}

// ---- unusable data ----------------------------------------------------------------------------------------------------------
TEST(Refused, NoData) {
    TemporaryDirectory dir;
    expect_error([&] { DataLoader data(options_for({}, 4)); }, {"the data is missing", "--data-path"});
    expect_error([&] { DataLoader data(options_for({dir / "nothing"}, 4)); }, {"nothing", "prepare"});
    write_dataset(dir / "empty", 100, {});
    expect_error([&] { DataLoader data(options_for({dir / "empty"}, 4)); }, {"empty", "no tokens"});
    write_dataset(dir / "blank", 100, {{}, {}});
    expect_error([&] { DataLoader data(options_for({dir / "blank"}, 4)); }, {"blank", "no tokens"});
    write_shard(dir / "shard.bin", {});
    expect_error([&] { DataLoader data(options_for({dir / "shard.bin"}, 4)); }, {"shard.bin", "no tokens"});
    write_dataset(dir / "good", 100, {Ints(100, 1)});
    expect_error([&] { DataLoader data(options_for({dir / "good", dir / "empty"}, 4)); }, {"empty", "no tokens"});
}

TEST(Refused, TooLittleForOneSample) {
    TemporaryDirectory dir;
    write_dataset(dir / "d", 100, {{1, 2, 3}, {4}, {5, 6}});
    for (const int T : {6, 7, 1 << 30})
        expect_error([&] { DataLoader data(options_for({dir / "d"}, T)); },
                     {dir / "d", "6 tokens", "--seq-length " + std::to_string(T), "or --seq-length 5"});
    EXPECT_EQ(DataLoader(options_for({dir / "d"}, 5)).n_samples(), 1);

    DataOptions o = options_for({dir / "d"}, 3, DataSplit::valid);
    o.split = "1, 0, 1";
    expect_error([&] { DataLoader data(o); }, {dir / "d", "no data for validation", "1, 0, 1", "is 0"});
    o.split = "1, x";
    expect_error([&] { DataLoader data(o); }, {"--split", "1, x"});
}

TEST(Refused, TokensOutsideTheVocabulary) {
    TemporaryDirectory dir;
    const auto message = [&](DataOptions o, int vocab_size, const std::vector<std::string>& parts) {
        o.vocab_size = vocab_size;
        const DataLoader data(o);
        Batch batch;
        expect_error([&] { data.fetch(0, (int)data.n_samples(), batch); }, parts);
        o.vocab_size = 77778;
        DataLoader(o).fetch(0, (int)data.n_samples(), batch);
        o.vocab_size = 0;
        DataLoader(o).fetch(0, (int)data.n_samples(), batch);
    };
    write_dataset(dir / "d", 100000, {{1, 2, 3}, {4, 5, 77777, 6}, {7, 8}});
    message(options_for({dir / "d"}, 2), 77777, {dir / "d", "token 2 of document 1", "77777", "77777 tokens", "tokenizer"});
    message(options_for({dir / "d"}, 8), 100, {dir / "d", "token 2 of document 1", "is 77777", "vocabulary of 100 tokens"});
    // only as a target
    write_dataset(dir / "last", 100000, {{1, 2, 77777}});
    message(options_for({dir / "last"}, 2), 100, {dir / "last", "token 2 of document 0", "is 77777"});
    // the right one of several, after the first documents of a split
    write_dataset(dir / "many", 100000, {{1, 2, 3}, {4, 5, 6}, {7, 77777, 8}});
    DataOptions o = options_for({dir / "last", dir / "many"}, 2, DataSplit::valid);
    o.split = "0, 1";
    o.blend.paths.erase(o.blend.paths.begin());
    message(o, 100, {dir / "many", "token 1 of document 2", "is 77777"});
    write_shard(dir / "s.bin", {1, 2, 50256, 3});
    message(options_for({dir / "s.bin"}, 3), 50256, {dir / "s.bin", "token 2", "is 50256", "vocabulary of 50256"});

    // negative tokens are not in any vocabulary
    const auto index = std::string("MMIDIDX\0\0", 9) + bytes_of<uint64_t>(1) + bytes_of<uint8_t>(4) + bytes_of<uint64_t>(1) +
                       bytes_of<uint64_t>(2) + bytes_of<int32_t>(3) + bytes_of<int64_t>(0) + bytes_of<int64_t>(0) +
                       bytes_of<int64_t>(1);
    write_file(dir / "n.idx", index);
    write_file(dir / "n.bin", bytes_of<int32_t>(1) + bytes_of<int32_t>(-7) + bytes_of<int32_t>(2));
    for (const int vocab_size : {0, 100}) {
        DataOptions negative = options_for({dir / "n"}, 2);
        negative.vocab_size = vocab_size;
        Batch batch;
        expect_error([&] { DataLoader(negative).fetch(0, 1, batch); }, {dir / "n", "token 1 of document 0", "is -1"});
    }
}

}  // namespace test_dataloader
