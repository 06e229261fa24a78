// The pipeline's schedules compared with the papers' figures and formulas, and their properties for every small size: each
// pass once, no deadlock, first in first out between ranks, memory. Then the split of the layers and the picture.
#include <gtest/gtest.h>

#include <cctype>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <tuple>

#include "../llmc/parallel/pipeline_schedule.h"
#include "files.h"

namespace test_pipeline {

using test::expect_error;
using Events = std::vector<PipelineEvent>;

// Calls f(pp, vpp, m) for every size with a schedule, up to 8 ranks, 4 chunks and 24 micro-batches.
void for_all_sizes(const std::function<void(int, int, int)>& f) {
    int sizes = 0;
    for (int pp = 1; pp <= 8; pp++)
        for (int vpp = 1; vpp <= 4; vpp++)
            for (int m = 1; m <= 24; m++) {
                if (!pipeline_problem(pp, vpp, m).empty()) continue;
                SCOPED_TRACE(format("pp %d, vpp %d, m %d", pp, vpp, m));
                f(pp, vpp, m);
                sizes++;
                if (testing::Test::HasFailure()) return;  // the first failing size suffices
            }
    // vpp 1: 8 x 24; vpp 2, 3, 4: the multiples of pp up to 24, 12 + 8 + 6 + 4 + 4 + 3 + 3
    EXPECT_EQ(sizes, 192 + 3 * 40);
}

// As in the papers' figures, with micro-batches counted from 1: "1 2 [1]", and with chunks "1a 2a 1b [1b]".
std::string figure(int pp, int rank, int vpp, int m) {
    std::string out;
    for (const PipelineEvent& e : pipeline_schedule(pp, rank, vpp, m)) {
        const std::string name = std::to_string(e.micro_batch + 1) + (vpp > 1 ? std::string(1, (char)('a' + e.chunk)) : "");
        out += (out.empty() ? "" : " ") + (e.direction == Direction::forward ? name : "[" + name + "]");
    }
    return out;
}

TEST(PipelineSchedule, OneForwardOneBackwardAsInMegatronsFigure3) {
    EXPECT_EQ(figure(4, 0, 1, 8), "1 2 3 4 [1] 5 [2] 6 [3] 7 [4] 8 [5] [6] [7] [8]");
    EXPECT_EQ(figure(4, 1, 1, 8), "1 2 3 [1] 4 [2] 5 [3] 6 [4] 7 [5] 8 [6] [7] [8]");
    EXPECT_EQ(figure(4, 2, 1, 8), "1 2 [1] 3 [2] 4 [3] 5 [4] 6 [5] 7 [6] 8 [7] [8]");
    EXPECT_EQ(figure(4, 3, 1, 8), "1 [1] 2 [2] 3 [3] 4 [4] 5 [5] 6 [6] 7 [7] 8 [8]");
    EXPECT_EQ(figure(4, 0, 1, 2), "1 2 [1] [2]");  // fewer micro-batches than ranks
    EXPECT_EQ(figure(1, 0, 1, 3), "1 [1] 2 [2] 3 [3]");
}

TEST(PipelineSchedule, InterleavedAsInMegatronsFigure4) {
    EXPECT_EQ(figure(4, 0, 2, 8),
              "1a 2a 3a 4a 1b 2b 3b 4b 5a 6a 7a [1b] 8a [2b] 5b [3b] 6b [4b] 7b [1a] 8b [2a] [3a] [4a] [5b] [6b] [7b] [8b] "
              "[5a] [6a] [7a] [8a]");
    EXPECT_EQ(figure(4, 2, 2, 8),
              "1a 2a 3a 4a 1b 2b 3b [1b] 4b [2b] 5a [3b] 6a [4b] 7a [1a] 8a [2a] 5b [3a] 6b [4a] 7b [5b] 8b [6b] [7b] [8b] "
              "[5a] [6a] [7a] [8a]");
    EXPECT_EQ(figure(4, 3, 2, 8),
              "1a 2a 3a 4a 1b [1b] 2b [2b] 3b [3b] 4b [4b] 5a [1a] 6a [2a] 7a [3a] 8a [4a] 5b [5b] 6b [6b] 7b [7b] 8b [8b] "
              "[5a] [6a] [7a] [8a]");
    // As many micro-batches as ranks: all forward, then all backward.
    EXPECT_EQ(figure(2, 0, 2, 2), "1a 2a 1b 2b [1b] [2b] [1a] [2a]");
    EXPECT_EQ(figure(2, 1, 2, 2), "1a 2a 1b 2b [1b] [2b] [1a] [2a]");
    EXPECT_EQ(figure(2, 1, 3, 4),
              "1a 2a 1b 2b 1c [1c] 2c [2c] 3a [1b] 4a [2b] 3b [1a] 4b [2a] 3c [3c] 4c [4c] [3b] [4b] [3a] [4a]");
}

TEST(PipelineSchedule, EveryPassOnceBackwardAfterForward) {
    for_all_sizes([](int pp, int vpp, int m) {
        for (int rank = 0; rank < pp; rank++) {
            const Events events = pipeline_schedule(pp, rank, vpp, m);
            EXPECT_EQ((int)events.size(), 2 * m * vpp);
            std::set<std::pair<int, int>> forward, backward;
            for (const PipelineEvent& e : events) {
                EXPECT_TRUE(e.micro_batch >= 0 && e.micro_batch < m && e.chunk >= 0 && e.chunk < vpp);
                const std::pair<int, int> pass(e.micro_batch, e.chunk);
                if (e.direction == Direction::backward) {
                    EXPECT_TRUE(forward.count(pass)) << "backward before forward";
                }
                EXPECT_TRUE((e.direction == Direction::forward ? forward : backward).insert(pass).second) << "twice";
            }
        }
    });
}

TEST(PipelineSchedule, SizesWithoutAScheduleAreRefused) {
    for (const auto& [pp, vpp, m] : std::vector<std::tuple<int, int, int>>{{1, 1, 1}, {7, 1, 5}, {2, 2, 2}, {4, 3, 12}})
        EXPECT_EQ(pipeline_problem(pp, vpp, m), "") << pp << " " << vpp << " " << m;
    const auto expect = [](int pp, int vpp, int m, const std::vector<std::string>& parts) {
        const std::string problem = pipeline_problem(pp, vpp, m);
        for (const std::string& part : parts)
            EXPECT_NE(problem.find(part), std::string::npos) << part << " not in: " << problem;
    };
    expect(4, 2, 6, {"6 micro-batches", "4 ranks", "2 virtual stages", "HINT: the nearest are 4 and 8"});
    expect(4, 2, 3, {"3 micro-batches", "HINT: the fewest are 4"});
    expect(1, 2, 4, {"1 rank", "interleave", "HINT"});
    expect(0, 1, 4, {"0 ranks"});
    expect(4, 0, 4, {"0 virtual stages"});
    expect(4, 1, 0, {"0 micro-batches", "HINT"});
}

// ---- time ------------------------------------------------------------------------------------------------------------------
TEST(PipelineTime, EqualStagesTakeTheFormulasTime) {
    for (const double backward : {2., 1., 3., 0.5})  // relative to forward's time; 3: with recomputation
        for_all_sizes([&](int pp, int vpp, int m) {
            const int n = pp * vpp;
            const Timeline t = simulate_pipeline(pp, vpp, m, std::vector<double>(n, 1), std::vector<double>(n, backward), 0);
            EXPECT_EQ(t.total, (m * vpp + pp - 1) * (1 + backward));
            EXPECT_DOUBLE_EQ(t.bubble, bubble_fraction(pp, vpp, m));
            EXPECT_DOUBLE_EQ(t.bubble, (pp - 1) / (double)(vpp * m));
        });
}

// Stages of different lengths and slow messages: a pass starts only when its rank is free and its input has arrived.
TEST(PipelineTime, NoPassStartsBeforeItsInput) {
    for_all_sizes([](int pp, int vpp, int m) {
        const int n = pp * vpp;
        const double p2p = 0.25;
        std::vector<double> forward(n), backward(n);
        for (int s = 0; s < n; s++) {
            forward[s] = 1 + s * 7 % 5;
            backward[s] = 2 + s * 5 % 7;
        }
        const Timeline t = simulate_pipeline(pp, vpp, m, forward, backward, p2p);
        std::map<std::tuple<Direction, int, int>, double> start, end;  // by pass, stage, micro-batch
        for (int rank = 0; rank < pp; rank++) {
            const Events events = pipeline_schedule(pp, rank, vpp, m);
            double free_at = 0;
            for (size_t i = 0; i < events.size(); i++) {
                const PipelineEvent& e = events[i];
                const int stage = e.chunk * pp + rank;
                EXPECT_GE(t.start[rank][i], free_at);
                EXPECT_EQ(t.duration[rank][i], (e.direction == Direction::forward ? forward : backward)[stage]);
                free_at = t.start[rank][i] + t.duration[rank][i];
                start[{e.direction, stage, e.micro_batch}] = t.start[rank][i];
                end[{e.direction, stage, e.micro_batch}] = free_at;
            }
            EXPECT_GE(t.total, free_at);
        }
        for (int i = 0; i < m; i++)
            for (int s = 0; s < n; s++) {
                if (s > 0) {
                    EXPECT_GE(start.at({Direction::forward, s, i}), end.at({Direction::forward, s - 1, i}) + p2p);
                }
                if (s + 1 < n) {
                    EXPECT_GE(start.at({Direction::backward, s, i}), end.at({Direction::backward, s + 1, i}) + p2p);
                }
                EXPECT_GE(start.at({Direction::backward, s, i}), end.at({Direction::forward, s, i}));
            }
    });
}

TEST(PipelineTime, UnequalStagesByHand) {
    // Rank 0: forward 0-1 and 1-2; rank 1: forward 1.5-4.5, backward 4.5-9.5, 9.5-12.5, 12.5-17.5; rank 0: backward 10-12,
    // 18-20.
    const Timeline t = simulate_pipeline(2, 1, 2, {1, 3}, {2, 5}, 0.5);
    EXPECT_EQ(t.start, (std::vector<std::vector<double>>{{0, 1, 10, 18}, {1.5, 4.5, 9.5, 12.5}}));
    EXPECT_EQ(t.total, 20);
    EXPECT_DOUBLE_EQ(t.bubble, (2 * 20 - 22) / 22.);
    EXPECT_EQ(simulate_pipeline(1, 1, 3, {1}, {2}, 0.5).total, 9);  // one rank sends nothing
}

// For steps of many micro-batches only a few are simulated; the result equals the full simulation: with equal stages, a
// slow last stage, a slow rank in the middle, nearly equal stages (steady only late), and messages from none to slower than
// a pass.
TEST(PipelineTime, AFewSimulatedMicroBatchesTellTheTimeOfAll) {
    for (const auto& [pp, vpp] : {std::pair(1, 1), {2, 1}, {3, 1}, {7, 1}, {12, 1}, {2, 2}, {3, 4}, {8, 2}})
        for (const double p2p : {0., 0.01, 0.4, 3.})
            for (const char* kind : {"equal", "head", "middle", "hardly", "any"}) {
                std::vector<double> forward((size_t)(pp * vpp), 1.1), backward((size_t)(pp * vpp), 2.3);
                for (size_t s = 0; s < forward.size(); s++) {
                    if (kind == std::string("head") && s + 1 == forward.size()) backward[s] += 1;
                    if (kind == std::string("middle") && (int)s % pp == pp / 2) forward[s] += 0.3;
                    if (kind == std::string("hardly")) forward[s] += 1e-3 * (double)(s * 7 % 5);
                    if (kind == std::string("any")) {
                        forward[s] += 0.1 * (double)(s * 3 % 7);
                        backward[s] += 0.1 * (double)(s * 5 % 11);
                    }
                }
                for (const int groups : {17, 60, 400}) {
                    const int m = groups * pp + (vpp == 1 ? pp / 2 : 0);
                    const Timeline all = simulate_pipeline(pp, vpp, m, forward, backward, p2p);
                    const StepTime few = step_time(pp, vpp, m, forward, backward, p2p);
                    const auto what = format("%d x %d ranks, %d micro-batches, messages of %g, %s", pp, vpp, m, p2p, kind);
                    EXPECT_NEAR(few.total, all.total, 1e-10 * all.total) << what;
                    if (kind != std::string("hardly")) {
                        EXPECT_GT(find_repetition(pp, vpp, m, all).passes, 0) << what;
                    }
                    EXPECT_NEAR(few.bubble, all.bubble, 1e-9 * (1 + all.bubble)) << what;
                }
            }
}

TEST(PipelineTime, PublishedRuns) {
    EXPECT_EQ(format("%.1f%%", 100 * bubble_fraction(16, 1, 216)), "6.9%");  // LLM-jp 172B
    const Timeline t = simulate_pipeline(16, 1, 216, std::vector<double>(16, 1), std::vector<double>(16, 2), 0);
    EXPECT_EQ(format("%.1f%%", 100 * t.bubble), "6.9%");
}

// The simulation detects deadlocks: rank 1 needs the second micro-batch first, rank 0 sends it only after the first one's
// gradient.
TEST(PipelineDeathTest, DeadlockIsNoticed) {
    std::vector<Events> schedules = {pipeline_schedule(2, 0, 1, 2), pipeline_schedule(2, 1, 1, 2)};
    EXPECT_EQ(simulate_schedules(schedules, {1, 1}, {2, 2}, 0).total, 9);
    schedules[1] = {
        {Direction::forward, 1, 0}, {Direction::backward, 1, 0}, {Direction::forward, 0, 0}, {Direction::backward, 0, 0}};
    EXPECT_EQ(schedules[0][2], (PipelineEvent{Direction::backward, 0, 0}));
    schedules[0] = {
        {Direction::forward, 0, 0}, {Direction::backward, 0, 0}, {Direction::forward, 1, 0}, {Direction::backward, 1, 0}};
    EXPECT_DEATH(simulate_schedules(schedules, {1, 1}, {2, 2}, 0), "deadlock: rank 0 of 2");
}

// ---- messages --------------------------------------------------------------------------------------------------------------
// Messages from one rank to another, in the order in which `rank` sends them (or, for the receiver, needs them).
struct Message {
    Direction pass;
    int to_stage, micro_batch;
    bool operator==(const Message& b) const { return pass == b.pass && to_stage == b.to_stage && micro_batch == b.micro_batch; }
};
std::vector<Message> sent(int pp, int from, int to, int vpp, int m) {
    std::vector<Message> messages;
    for (const PipelineEvent& e : pipeline_schedule(pp, from, vpp, m)) {
        const int stage = e.chunk * pp + from + (e.direction == Direction::forward ? 1 : -1);  // the receiver of the result
        if (stage >= 0 && stage < pp * vpp && stage % pp == to) messages.push_back({e.direction, stage, e.micro_batch});
    }
    return messages;
}
std::vector<Message> needed(int pp, int from, int to, int vpp, int m) {
    std::vector<Message> messages;
    for (const PipelineEvent& e : pipeline_schedule(pp, to, vpp, m)) {
        const int stage = e.chunk * pp + to, origin = stage + (e.direction == Direction::forward ? -1 : 1);
        if (origin >= 0 && origin < pp * vpp && origin % pp == from) messages.push_back({e.direction, stage, e.micro_batch});
    }
    return messages;
}

// Between every two ranks, also around the ring and where activations and gradients share a connection: no tags are needed.
TEST(PipelineMessages, FirstInFirstOut) {
    for_all_sizes([](int pp, int vpp, int m) {
        size_t messages = 0;
        for (int from = 0; from < pp; from++)
            for (int to = 0; to < pp; to++) {
                const std::vector<Message> out = sent(pp, from, to, vpp, m);
                EXPECT_TRUE(out == needed(pp, from, to, vpp, m)) << from << " to " << to;
                const bool neighbors = to == (from + 1) % pp || from == (to + 1) % pp;
                EXPECT_TRUE(out.empty() || neighbors);
                messages += out.size();
            }
        EXPECT_EQ(messages, 2u * m * (pp * vpp - 1));
    });
}

// ---- memory ----------------------------------------------------------------------------------------------------------------
TEST(PipelineMemory, InFlight) {
    for_all_sizes([](int pp, int vpp, int m) {
        for (int rank = 0; rank < pp; rank++) {
            const int in_flight = most_in_flight(pipeline_schedule(pp, rank, vpp, m), -1);
            if (vpp == 1) {
                EXPECT_EQ(in_flight, std::min(m, pp - rank));
                EXPECT_EQ(micro_batches_in_flight(pp, rank, 1, {m}, 0), in_flight);
            } else if (m == pp) {
                EXPECT_EQ(in_flight, m * vpp);
            } else {
                EXPECT_EQ(in_flight, 2 * (pp - rank - 1) + (vpp - 1) * pp + 1);
                // arXiv:2205.05198: the first rank keeps the activations of L (1 + (pp - 1) / (pp vpp)) layers
                if (rank == 0) {
                    EXPECT_DOUBLE_EQ(in_flight / (double)(pp * vpp), 1 + (pp - 1) / (double)(pp * vpp));
                }
            }
        }
    });
}

// A step with real slots: no value is overwritten while needed, and no slot is unused.
TEST(PipelineMemory, SlotsHoldWhatIsInFlight) {
    for_all_sizes([](int pp, int vpp, int m) {
        for (int rank = 0; rank < pp; rank++) {
            const Events events = pipeline_schedule(pp, rank, vpp, m);
            std::map<std::pair<int, int>, int> own;  // (chunk, slot): micro-batch
            std::set<std::pair<int, int>> own_used;
            for (const PipelineEvent& e : events) {
                const std::pair<int, int> slot(e.chunk, e.micro_batch % micro_batches_in_flight(pp, rank, vpp, {m}, e.chunk));
                own_used.insert(slot);
                if (e.direction == Direction::forward) {
                    EXPECT_TRUE(own.emplace(slot, e.micro_batch).second) << "slot " << slot.second << " is taken";
                } else {
                    EXPECT_EQ(own.at(slot), e.micro_batch);
                    own.erase(slot);
                }
            }
            int slots = 0;
            for (int chunk = 0; chunk < vpp; chunk++) slots += micro_batches_in_flight(pp, rank, vpp, {m}, chunk);
            EXPECT_EQ((int)own_used.size(), slots);
            EXPECT_LE(most_in_flight(events, -1), slots);  // the chunks reach their maxima at different times
            EXPECT_LE(slots, 2 * pp * vpp);
        }
    });
    EXPECT_EQ(micro_batches_in_flight(4, 0, 2, {8}, 0), 8);
    EXPECT_EQ(micro_batches_in_flight(4, 0, 2, {8}, 1), 4);
    EXPECT_EQ(most_in_flight(pipeline_schedule(4, 0, 2, 8), -1), 11);
}

// In a ramp-up: as many as any batch size needs, which is not always the last one.
TEST(PipelineMemory, SlotsHoldWhatAnyStepHasInFlight) {
    EXPECT_EQ(micro_batches_in_flight(2, 1, 2, {8}, 1), 1);
    EXPECT_EQ(micro_batches_in_flight(2, 1, 2, {2, 4, 6, 8}, 1), 2);
    for_all_sizes([](int pp, int vpp, int m) {
        std::vector<int> sizes;
        for (int n = pp; n <= m; n += pp) sizes.push_back(n);
        for (int rank = 0; rank < pp; rank++)
            for (int chunk = 0; chunk < vpp; chunk++) {
                int most = 0;
                for (const int n : sizes) most = std::max(most, most_in_flight(pipeline_schedule(pp, rank, vpp, n), chunk));
                if (!sizes.empty()) {
                    EXPECT_EQ(micro_batches_in_flight(pp, rank, vpp, sizes, chunk), most)
                        << "rank " << rank << ", chunk " << chunk;
                }
            }
    });
}

// ---- layers ----------------------------------------------------------------------------------------------------------------
using Layers = std::vector<int>;

TEST(SplitLayers, Balanced) {
    EXPECT_EQ(split_layers(96, 16, false, false, {}), Layers(16, 6));  // LLM-jp 172B
    Layers bloom(12, 6);
    bloom.front() = bloom.back() = 5;
    EXPECT_EQ(split_layers(70, 12, true, true, {}), bloom);  // BLOOM 176B
    EXPECT_EQ(split_layers(12, 1, true, true, {}), Layers{12});
    EXPECT_EQ(split_layers(7, 4, false, true, {}), (Layers{2, 2, 2, 1}));
    EXPECT_EQ(split_layers(7, 4, true, false, {}), (Layers{1, 2, 2, 2}));
    EXPECT_EQ(split_layers(2, 4, true, true, {}), (Layers{0, 1, 1, 0}));
    // the remainder goes to stages from the second-to-last forwards
    EXPECT_EQ(split_layers(9, 4, false, false, {}), (Layers{2, 2, 3, 2}));
    EXPECT_EQ(split_layers(10, 4, false, false, {}), (Layers{2, 3, 3, 2}));
    EXPECT_EQ(split_layers(11, 4, false, false, {}), (Layers{3, 3, 3, 2}));
    EXPECT_EQ(split_layers(11, 4, true, true, {}), (Layers{2, 3, 4, 2}));
}

// The placement of the remaining layers: no other one takes less time per micro-batch; at equal time none keeps fewer
// layers' activations; and the fastest at filling and draining the pipeline saves only a few layers' time per step.
TEST(SplitLayers, NoBetterPlaceForTheRemainder) {
    struct Cost {
        double per_micro_batch;
        int memory;
        double total;
    };
    for (const auto& [pp, vpp] : std::vector<std::pair<int, int>>{{4, 1}, {5, 1}, {3, 2}, {2, 3}, {4, 2}})
        for (int extra = 1; extra < pp * vpp; extra++) {
            const int n = pp * vpp, m = 4 * pp;
            const auto cost = [&, pp = pp, vpp = vpp](const Layers& layers) {
                std::vector<double> forward(layers.begin(), layers.end()), backward;
                forward.back() += 0.25;  // the head, in layers
                for (const double f : forward) backward.push_back(2 * f);
                int memory = 0;
                for (int rank = 0; rank < pp; rank++) {
                    int held = 0;
                    for (int c = 0; c < vpp; c++)
                        held += layers[c * pp + rank] * micro_batches_in_flight(pp, rank, vpp, {m}, c);
                    memory = std::max(memory, held);
                }
                const double total = simulate_pipeline(pp, vpp, m, forward, backward, 0).total;
                const double twice = simulate_pipeline(pp, vpp, 2 * m, forward, backward, 0).total;
                return Cost{(twice - total) / m, memory, total};
            };
            const Cost ours = cost(split_layers(2 * n + extra, n, false, false, {}));
            for (int mask = 0; mask < 1 << n; mask++) {
                if (__builtin_popcount(mask) != extra) continue;
                Layers layers(n, 2);
                for (int s = 0; s < n; s++) layers[s] += mask >> s & 1;
                const Cost other = cost(layers);
                SCOPED_TRACE(format("pp %d, vpp %d, extra %d, mask %x", pp, vpp, extra, mask));
                EXPECT_LE(ours.per_micro_batch, other.per_micro_batch);
                if (ours.per_micro_batch == other.per_micro_batch) {
                    EXPECT_LE(ours.memory, other.memory);
                }
                EXPECT_LE(ours.total, other.total + (n - 2) * 3);  // forward and backward of n - 2 layers
            }
        }
}

// Layers of different costs: the most expensive stage is as cheap as possible.
TEST(Layers, SplitByCost) {
    const auto split = [](const std::vector<double>& costs, int n, bool embedding, bool head) {
        return split_layers(costs, n, embedding, head, {});
    };
    EXPECT_EQ(split({1, 2, 2, 2}, 2, false, false), (Layers{2, 2}));
    EXPECT_EQ(split({4, 4, 1, 1, 1, 1}, 2, false, false), (Layers{2, 4}));
    EXPECT_EQ(split({5, 1, 1, 1, 1, 1}, 2, false, false), (Layers{1, 5}));
    EXPECT_EQ(split({5, 1, 1, 1}, 4, false, false), (Layers{1, 1, 1, 1}));
    EXPECT_EQ(split({3, 1, 1, 1}, 2, true, false), (Layers{1, 3}));
    EXPECT_EQ(split({1, 2}, 4, true, true), (Layers{0, 1, 1, 0}));
    EXPECT_THROW(split({1, 2}, 3, false, false), Error);
    // Every split of up to eight layers over three stages.
    std::mt19937 rng(1);
    for (int repeat = 0; repeat < 50; repeat++) {
        std::vector<double> costs(3 + rng() % 6);
        for (double& cost : costs) cost = 1 + (double)(rng() % 5);
        costs[0] = 7;
        const int L = (int)costs.size();
        const auto most = [&](const Layers& layers) {
            double most = 0;
            for (int s = 0, at = 0; s < 3; at += layers[(size_t)s++])
                most = std::max(most, std::accumulate(&costs[(size_t)at], &costs[(size_t)at] + layers[(size_t)s], 0.0));
            return most;
        };
        double best = INFINITY;
        for (int a = 1; a < L - 1; a++)
            for (int b = 1; a + b < L; b++) best = std::min(best, most({a, b, L - a - b}));
        const Layers found = split(costs, 3, false, false);
        EXPECT_EQ(found[0] + found[1] + found[2], L);
        EXPECT_EQ(most(found), best);
    }
}

TEST(SplitLayers, Given) {
    EXPECT_EQ(split_layers(12, 4, false, false, {2, 4, 4, 2}), (Layers{2, 4, 4, 2}));
    EXPECT_EQ(split_layers(4, 4, false, false, {0, 2, 2, 0}), (Layers{0, 2, 2, 0}));
}

TEST(SplitLayers, Errors) {
    const auto split = [](int L, int n, bool embedding, bool head, const Layers& given) {
        return [=] { split_layers(L, n, embedding, head, given); };
    };
    expect_error(split(3, 4, false, false, {}), {"3 layers are too few for 4", "HINT: use at most 3"});
    expect_error(split(3, 6, true, true, {}), {"3 layers, even with the embedding or the head counted,", "at most 5"});
    expect_error(split(12, 4, false, false, {4, 4, 4}), {"3 stages (4,4,4)", "has 4", "HINT"});
    expect_error(split(12, 4, false, false, {4, 4, 4, 1}), {"(4,4,4,1)", "13", "12 layers", "HINT: take away 1"});
    expect_error(split(12, 4, false, false, {4, 4, 1, 1}), {"adds up to 10", "HINT: add 2"});
    expect_error(split(12, 4, false, false, {6, 0, 3, 3}), {"stage 1", "0 layers", "HINT: only the first and the last"});
    expect_error(split(12, 4, false, false, {13, 1, 1, -3}), {"stage 3", "-3 layers", "the minimum is 0"});
    expect_error(split(12, 4, true, false, {3, 3, 3, 3}), {"(3,3,3,3)", "HINT: omit one of them"});
}

// ---- picture ---------------------------------------------------------------------------------------------------------------
TEST(DrawPipeline, OneForwardOneBackward) {
    EXPECT_EQ(draw_pipeline(4, 1, 8, 0.4104, 80),
              "Pipeline: 4 ranks, 8 micro-batches per step\n"
              "r0 0 1 2 3 .........[0]4 [1]5 [2]6 [3]7 [4]..[5]..[6]..[7]\n"
              "r1 ..0 1 2 ......[0]3 [1]4 [2]5 [3]6 [4]7 [5]..[6]..[7]...\n"
              "r2 ....0 1 ...[0]2 [1]3 [2]4 [3]5 [4]6 [5]7 [6]..[7]......\n"
              "r3 ......0 [0]1 [1]2 [2]3 [3]4 [4]5 [5]6 [6]7 [7].........\n"
              "0 forward, [0] backward of micro-batch 0; . idle; not to scale\n"
              "Bubble (idle / work): 37.5% = (ranks - 1) / micro-batches; simulated 41.0%\n");
}

TEST(DrawPipeline, Interleaved) {
    EXPECT_EQ(draw_pipeline(2, 2, 4, 0.125, 100),
              "Pipeline: 2 ranks, 2 chunks of layers each (a-b), 4 micro-batches per step\n"
              "r0 0a 1a 0b 1b 2a .[0b]3a [1b]2b [0a]3b [1a]...[2b]...[3b][2a][3a]\n"
              "r1 ...0a 1a 0b [0b]1b [1b]2a [0a]3a [1a]2b [2b]3b [3b][2a][3a]....\n"
              "0a forward, [0a] backward of micro-batch 0 in chunk a; . idle; not to scale\n"
              "Bubble (idle / work): 12.5% = (ranks - 1) / (chunks x micro-batches); simulated 12.5%\n");
}

// A long schedule shows whole passes of its start and end.
TEST(DrawPipeline, LongSchedules) {
    EXPECT_EQ(draw_pipeline(2, 1, 100, 0.01, 60),
              "Pipeline: 2 ranks, 100 micro-batches per step\n"
              "r0 01...[0]2[1]3[2]4[3]5[4]6[5]7   ...  6[5]7[6]8[7]9[8].[9]\n"
              "r1 .0[0]1[1]2[2]3[3]4[4]5[5]6[6]7  ...   6[6]7[7]8[8]9[9]...\n"
              "0 forward, [0] backward of micro-batch 0 (last digit); .\n"
              "idle; not to scale\n"
              "Bubble (idle / work): 1.0% = (ranks - 1) / micro-batches;\n"
              "simulated 1.0%\n");
}

TEST(DrawPipeline, FitsTheWidth) {
    for (int width = 40; width <= 140; width++)
        for (const auto& [pp, vpp, m] : std::vector<std::tuple<int, int, int>>{
                 {1, 1, 1}, {4, 1, 8}, {4, 2, 8}, {16, 1, 216}, {8, 4, 32}, {2, 60, 4}, {40, 1, 500}}) {
            SCOPED_TRACE(format("width %d, pp %d, vpp %d, m %d", width, pp, vpp, m));
            std::istringstream lines(draw_pipeline(pp, vpp, m, 0, width));
            int rows = 0, longest = 0;
            for (std::string line; std::getline(lines, line);) {
                longest = std::max(longest, (int)line.size());
                rows += line[0] == 'r' && isdigit(line[1]);
                EXPECT_FALSE(line.empty() || line.back() == ' ');
            }
            EXPECT_LE(longest, width);
            EXPECT_EQ(rows, std::min(pp, 16));
        }
    // complete if any style fits: last digits need (12 + 3) (2 + 3) columns
    for (int width = 78; width <= 140; width++)
        EXPECT_EQ(draw_pipeline(4, 1, 12, 0, width).find(" ... "), std::string::npos) << width;
    // the most common sizes are complete
    for (const int width : {100, 120})
        for (const int vpp : {1, 2}) EXPECT_EQ(draw_pipeline(4, vpp, 8, 0, width).find(" ... "), std::string::npos);
}

}  // namespace test_pipeline
