// The search for a layout compared with trying all: the same fastest, the same front, and memory as planned by the trainer,
// on several models and numbers of ranks; and the reasons for rejections.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "files.h"
#include "trainer.h"

namespace test_tune {

struct Case {
    const char* name;
    Strings arguments;
    int ranks;
    double memory;  // of a rank, bytes
    bool fp8 = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

const Strings small = {"--num-layers", "6",   "--hidden-size",       "64", "--num-attention-heads", "4",  "--seq-length", "32",
                       "--vocab-size", "500", "--global-batch-size", "16", "--train-iters",         "100"};
const Strings llama = {"--swiglu",
                       "--normalization",
                       "RMSNorm",
                       "--position-embedding-type",
                       "rope",
                       "--disable-bias-linear",
                       "--untie-embeddings-and-output-weights"};
Strings with(Strings a, const Strings& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// Everything the search works on, with the trainer's own memory plan.
struct Searched {
    World world = World::join();
    Run run;
    LayoutProblem problem;
    explicit Searched(const Case& c) : run{world, {}, be::Ctx(1)} {
        EXPECT_TRUE(cli::parse("train", run.o, c.arguments));
        run.o.world = c.ranks;
        run.o.node_size = 4;
        problem.o = run.o;
        problem.ranks = {c.ranks};
        problem.search_fp8 = c.fp8;
        problem.model = [this](int tp) {
            TrainOptions p = run.o;
            p.tensor_model_parallel_size = tp;
            return configure_model(p, nullptr);
        };
        problem.memory = [memory = c.memory](int) { return memory; };
        problem.memory_of_stage = [this](const TrainOptions& p, const ModelConfig& model, int n, int stage) {
            return memory_of_stage(run, p, model, n, stage);
        };
    }
    double bytes(const TrainOptions& p) const {
        double most = 0;
        for (const RankMemory& m : memory_of_stages(run, p, problem.ranks[0])) most = std::max(most, (double)m.bytes);
        return most;
    }
    // (seconds, bytes) of a layout from the planner and the trainer; throws Error if it is impossible.
    std::pair<double, double> known(const Layout& l) const {
        TrainOptions p = run.o;
        l.apply(p);
        const ModelConfig c = problem.model(l.tp);
        const Mesh mesh = place_rank(l.ranks, 0, layout_of(p), c)->mesh;
        const Schedule s = make_schedule(p, mesh.dp.size);
        const double most = bytes(p);
        return {make_plan(plan_input(p, c, l.ranks, layers_of_stages(p, c, mesh), s.final_batch, sizeof(floatX))).step_seconds,
                most};
    }
};

using Point = std::pair<double, double>;
std::vector<Point> front_of(std::vector<Point> all) {
    std::sort(all.begin(), all.end());
    std::vector<Point> front;
    for (const Point& p : all)
        if (front.empty() || p.second < front.back().second) front.push_back(p);
    return front;
}

class Search : public testing::TestWithParam<Case> {};

TEST_P(Search, FindsWhatTryingAllFinds) {
    const Searched s(GetParam());
    const FoundLayouts found = search_layouts(s.problem);
    ASSERT_FALSE(found.fit.empty());
    // Each layout that fits has the memory planned by the trainer, and no lower bound above its time.
    std::vector<Point> all;
    for (const Candidate& c : found.fit) {
        const auto [seconds, bytes] = s.known(c.layout);
        EXPECT_EQ(bytes, c.bytes) << c.layout.recompute_in_words() << " tp " << c.layout.tp << " pp " << c.layout.pp << " vpp "
                                  << c.layout.vpp << " micro " << c.layout.micro_batch << " zero " << c.layout.zero;
        EXPECT_LE(c.least_seconds, seconds * (1 + 1e-9));
        if (std::isfinite(c.seconds)) {
            EXPECT_EQ(c.seconds, seconds);
        }
        all.push_back({seconds, bytes});
    }
    // Everything else is tried here, and does not fit or is impossible. With 256 rows of logits if it does not fit with
    // all; no micro-batch has more than 512.
    size_t possible = 0, few_rows = 0;
    const bool given = GetParam().arguments.back() == "full";
    std::vector<std::array<std::string, 3>> settings;
    for (const char* recompute : {"none", "selective", "mlp", "full"}) {
        settings.push_back({recompute, "", "auto"});
        for (const char* transposes : {"keep", "on-the-fly"})
            if (GetParam().fp8) settings.push_back({recompute, "hybrid", transposes});
    }
    for (int tp = 1; tp <= GetParam().ranks; tp++)
        for (int pp = 1; tp * pp <= GetParam().ranks; pp++)
            for (int vpp = 1; vpp * pp <= 8; vpp++)
                for (int micro = 1; micro <= 16; micro++)
                    for (const bool cut : {true, false})
                        for (const int zero : {0, 1})
                            for (const auto& [recompute, fp8, transposes] : settings) {
                                const int dp = GetParam().ranks / (tp * pp);
                                if ((tp == 1 && !cut) || (dp == 1 && zero == 0)) continue;
                                if (given && recompute != "full") continue;
                                try {
                                    Layout l;
                                    l.ranks = GetParam().ranks;
                                    l.tp = tp;
                                    l.pp = pp;
                                    l.vpp = vpp;
                                    l.micro_batch = micro;
                                    l.zero = zero;
                                    l.sequence_parallel = cut;
                                    l.recompute = recompute;
                                    l.fp8 = fp8;
                                    l.transposes = transposes;
                                    const double bytes = s.known(l).second, most = GetParam().memory;
                                    possible += bytes <= most;
                                    l.head_rows = 256;
                                    if (bytes > most && micro * 32 > 256 && s.known(l).second <= most) few_rows++;
                                } catch (const Error&) {
                                }
                            }
    const auto whole = std::count_if(found.fit.begin(), found.fit.end(), [](auto& c) { return !c.layout.recompute_layers; });
    const auto few = std::count_if(found.fit.begin(), found.fit.end(),
                                   [](auto& c) { return c.layout.head_rows && !c.layout.recompute_layers; });
    EXPECT_EQ(possible + few_rows, (size_t)whole);
    EXPECT_EQ(few_rows, (size_t)few);
    EXPECT_EQ(few_rows > 0, GetParam().name == std::string("few rows"));
    std::vector<Point> front;
    for (const Candidate& c : found.front) front.push_back({c.seconds, c.bytes});
    EXPECT_EQ(front, front_of(all));
    std::sort(all.begin(), all.end());
    for (size_t i = 0; i < found.best.size(); i++) EXPECT_EQ(found.best[i].seconds, all[i].first) << i;
    EXPECT_EQ(found.best.size(), std::min<size_t>(5, all.size()));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Search,
    testing::Values(
        Case{"gpt2", small, 4, 2.4e6}, Case{"llama", with(small, llama), 6, 1e9},
        Case{"bloom", with(small, {"--position-embedding-type", "alibi", "--embed-layernorm", "--main-grads-dtype", "bf16"}), 4,
             3e6},
        Case{"ramp-up",
             with(with(small, {"--no-train-iters", "--train-samples", "1600", "--rampup-batch-size", "4", "4", "160"}), llama),
             4, 3e6},
        Case{"few rows", small, 1, 16.2e6}, Case{"fp8", with(small, llama), 4, 3e6, true},
        Case{"a width without fp8", with(small, {"--ffn-hidden-size", "200"}), 4, 3e6, true},
        Case{"muon, recomputed", with(with(small, llama), {"--optimizer", "muon", "--recompute-granularity", "full"}), 4, 1e9}),
    [](const auto& info) {
        std::string name;
        for (const char* c = info.param.name; *c; c++)
            if (isalnum((unsigned char)*c)) name += *c;
        return name;
    });

// If a policy fits and the weaker one before it does not, the search finds the smallest number of layers that need it.
TEST(Search, RecomputesAsFewLayersAsFit) {
    const Searched wide({"", small, 1, 1e9});
    std::map<std::string, double> bytes;  // of a micro-batch of 16 with each policy
    const FoundLayouts all = search_layouts(wide.problem);
    for (const Candidate& c : all.fit)
        if (c.layout.micro_batch == 16) bytes[c.layout.recompute] = c.bytes;
    const std::pair<const char*, const char*> pairs[] = {{"none", "selective"}, {"selective", "mlp"}, {"mlp", "full"}};
    for (const auto& [weaker, stronger] : pairs) {
        ASSERT_GT(bytes[weaker], bytes[stronger]);
        const double most = (bytes[weaker] + bytes[stronger]) / 2;
        const Searched s({"", small, 1, most});
        const FoundLayouts some = search_layouts(s.problem);
        int found = 0;
        for (const Candidate& c : some.fit) {
            if (c.layout.micro_batch != 16 || !c.layout.recompute_layers) continue;
            found++;
            EXPECT_EQ(c.layout.recompute, stronger);
            EXPECT_EQ(c.layout.recompute_others, weaker);
            Layout fewer = c.layout;
            EXPECT_EQ(s.known(c.layout).second, c.bytes);
            if (--fewer.recompute_layers) {
                EXPECT_GT(s.known(fewer).second, most);
            }
        }
        EXPECT_EQ(found, 1) << stronger;
    }
}

// The optimizer's state moves to the host if not everything fits, unless its place is given.
TEST(Search, KeepsStateOnTheHostWhereMemoryIsShort) {
    const Strings buckets = with(small, {"--ddp-bucket-size", "8192"});
    Searched wide({"", buckets, 1, 1e9}), narrow({"", buckets, 1, 4.5e6});
    wide.problem.may_offload = true;
    for (const Candidate& c : search_layouts(wide.problem).fit) EXPECT_FALSE(c.layout.offloads());
    const FoundLayouts resident = search_layouts(narrow.problem);
    narrow.problem.may_offload = true;
    const FoundLayouts found = search_layouts(narrow.problem);
    EXPECT_GT(found.fit.size(), resident.fit.size());
    size_t offloads = 0;
    for (const Candidate& c : found.fit) {
        EXPECT_EQ(narrow.known(c.layout).second, c.bytes);
        offloads += c.layout.offloads();
    }
    EXPECT_EQ(found.fit.size(), resident.fit.size() + offloads);
    Searched given({"", with(buckets, {"--offload", "none"}), 1, 4.5e6});
    given.problem.may_offload = true;
    EXPECT_EQ(search_layouts(given.problem).fit.size(), resident.fit.size());
}

// A number of logit rows that is tried only after offloading the state has the memory planned by the trainer.
TEST(Search, CountsRowsOfLogitsWithStateOnTheHost) {
    Searched s({"",
                with(small, {"--ddp-bucket-size", "8192", "--seq-length", "128", "--micro-batch-size", "16", "--vocab-size",
                             "2000", "--recompute-granularity", "full"}),
                1, 1e9});
    s.problem.may_offload = true;
    Layout l;
    l.micro_batch = 16;
    l.recompute = "full";
    l.head_rows = 256;
    const double resident = s.known(l).second;
    l.offload = "optimizer";
    l.head_rows = 512;
    const double most = (resident + s.known(l).second) / 2;
    ASSERT_LT(most, resident);
    s.problem.memory = [=](int) { return most; };
    const FoundLayouts found = search_layouts(s.problem);
    ASSERT_EQ(found.fit.size(), 1u);
    const Candidate& c = found.fit[0];
    EXPECT_TRUE(c.layout.offloads());
    EXPECT_EQ(c.layout.head_rows, 512);
    EXPECT_EQ(s.known(c.layout).second, c.bytes);
}

TEST(Search, WhatIsGivenStays) {
    const Searched s(
        {"", with(small, {"--tp", "2", "--micro-batch-size", "2", "--zero", "0", "--no-sequence-parallel"}), 4, 1e9});
    const FoundLayouts found = search_layouts(s.problem);
    ASSERT_FALSE(found.fit.empty());
    std::set<int> pipelines;
    for (const Candidate& c : found.fit) {
        EXPECT_EQ(std::make_tuple(c.layout.tp, c.layout.micro_batch, c.layout.zero, c.layout.sequence_parallel),
                  std::make_tuple(2, 2, 0, false));
        pipelines.insert(c.layout.pp);
    }
    EXPECT_EQ(pipelines, (std::set<int>{1, 2}));
}

// Deciding what fits includes the memory of libraries.
TEST(Search, CountsTheMemoryOfLibraries) {
    const Strings arguments = with(small, {"--micro-batch-size", "2", "--recompute-granularity", "none", "--zero", "0"});
    Searched s({"", arguments, 4, 1e9});
    double most = 0;
    for (const Candidate& c : search_layouts(s.problem).fit) most = std::max(most, c.bytes);
    s.problem.memory = [=](int) { return most + 100; };
    s.problem.bytes_of_libraries = [](const ModelConfig&, const Layout& l) { return l.dp() > 1 ? 50.0 : 1e9; };
    int pipelines = 0;
    for (const Candidate& c : search_layouts(s.problem).fit) {
        pipelines += c.layout.dp() == 1;
        EXPECT_EQ(c.bytes, s.known(c.layout).second + 50);
    }
    EXPECT_EQ(pipelines, 0);
}

TEST(Search, SaysTheLeastMemory) {
    const Searched s({"", small, 4, 1000}), all({"", small, 4, 1e9});
    const FoundLayouts found = search_layouts(s.problem);
    EXPECT_TRUE(found.fit.empty() && found.best.empty() && found.front.empty());
    EXPECT_GT(found.refused.at("out of memory"), 10);
    EXPECT_EQ(s.known(found.nearest.layout).second, found.nearest.bytes);
    EXPECT_EQ(found.nearest.bytes, search_layouts(all.problem).front.back().bytes);
}

}  // namespace test_tune
