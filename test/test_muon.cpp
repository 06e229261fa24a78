// Muon and NorMuon: compared with torch.optim.Muon (test/golden/muon.json, from dev/ref/muon_golden.py) and with
// Newton-Schulz steps in double; results are nearly orthogonal; and which rank has which matrix. test_muon_fp32.cpp and
// gpu/test_muon.cu include this for the other precision and the other backend; runs on several ranks are in parity_check.cu
// and parallel_test.sh.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#if defined(BACKEND_CUDA) || defined(BACKEND_EMU)
#include "../llmc/gpu/ops.cuh"
#else
#include "../llmc/cpu/matmul.h"
#include "../llmc/cpu/memory.h"
#include "../llmc/cpu/optimizer.h"
#include "../llmc/cpu/reduce.h"
#endif
#include "../llmc/optimizer/training_memory.h"
#include "testing.h"

namespace test_muon {

using namespace test;

ModelConfig small_config() {
    ModelConfig c;
    set_family(c, "llama");
    c.L = 1;
    c.C = 6;
    c.NH = 3;
    c.NKV = 1;
    c.F = 8;
    c.T = 4;
    c.V = 10;
    pad_vocabulary(c, 64);
    return c;
}

// In [-0.5, 0.5), exact in fp32; the same as in muon_golden.py.
real number(uint32_t salt, uint32_t i) {
    uint32_t h = (i + 1) * 2654435761u + (salt + 1) * 2246822519u;
    h ^= h >> 15;
    h *= 3266489917u;
    h ^= h >> 13;
    return (real)((double)(h >> 8) / 0x1p24 - 0.5);
}

struct Trained {
    std::vector<real> weights, exp_avg, exp_avg_sq;  // of the matrices, in the order of the buffer; without gaps
};

// The matrices of small_config's block after three steps, as in muon_golden.py.
Trained train(const MuonRecipe& recipe) {
    be::Ctx ctx(2);
    auto ranks = std::make_shared<Ranks>();
    ranks->whole_matrices = true;
    TrainingMemory m(small_config(), ranks, {1});
    m.muon.recipe = recipe;
    Arena arena;
    m.plan(arena, true);
    arena.allocate();
    const std::vector<MuonMatrix> whole = Muon::matrices(m.c, m.table, m.shards, false);
    EXPECT_EQ(whole.size(), 7u);
    HostSide<floatX> params(ctx, m.params, m.table.size);
    HostSide<LowerHalf> lower(ctx, m.master_low_bits, m.master_low_bits ? m.table.size : 0);
    HostSide<real> grads(ctx, (real*)m.grads.data, m.table.size);
    for (size_t k = 0; k < whole.size(); k++)
        for (size_t i = 0; i < whole[k].elements(); i++)
            m.shards.for_each_part(whole[k].first + i, 1, [&](size_t, size_t shard, size_t) {
                store_weight(params.data() + whole[k].first + i, lower.data() + shard, 0, number((uint32_t)k, (uint32_t)i));
            });
    params.upload();
    lower.upload();
    size_t updated = 0;
    for (uint32_t step = 0; step < 3; step++) {
        for (size_t k = 0; k < whole.size(); k++)
            for (size_t i = 0; i < whole[k].elements(); i++)  // twice the gradient; clipping halves it
                grads.data()[whole[k].first + i] = 2 * number(100 * step + 50 + (uint32_t)k, (uint32_t)i);
        grads.upload();
        m.muon.update(ctx, m, {real(0.02), real(0.1), real(0.5), 7}, [&](const Bucket&) { updated++; });
    }
    EXPECT_EQ(updated, 3 * 4u);
    params.download();
    lower.download();
    HostSide<real> exp_avg(ctx, (real*)m.exp_avg.data, m.shards.size);
    HostSide<real> exp_avg_sq(ctx, (real*)m.exp_avg_sq.data, m.size_of_exp_avg_sq());
    exp_avg.download();
    exp_avg_sq.download();
    Trained result;
    for (const MuonMatrix& matrix : whole)
        m.shards.for_each_part(matrix.first, matrix.elements(), [&](size_t from, size_t shard, size_t n) {
            for (size_t i = 0; i < n; i++) {
                result.weights.push_back(load_weight(params.data() + matrix.first + from, lower.data() + shard, i));
                result.exp_avg.push_back(exp_avg.data()[shard + i]);
                if (shard + i < m.size_of_exp_avg_sq()) result.exp_avg_sq.push_back(exp_avg_sq.data()[shard + i]);
            }
        });
    return result;
}

TEST(Muon, EqualsPyTorchs) {
    const nlohmann::json golden = nlohmann::json::parse(std::ifstream("test/golden/muon.json"));
    struct Case {
        const char* name;
        bool neurons, heads, shape_scaling;
    };
    for (const Case& k : {Case{"spectral", false, false, false},
                          {"shape_scaling", false, false, true},
                          {"heads", false, true, false},
                          {"normuon", true, false, false}}) {
        MuonRecipe recipe;
        recipe.on = true;
        recipe.neurons = k.neurons;
        recipe.heads = k.heads;
        recipe.shape_scaling = k.shape_scaling;
        if (k.shape_scaling) recipe.factor = 1;
        const Trained trained = train(recipe);
        // Each of three steps moves weights by 0.004 on average, 0.01 with the other scale. torch's own bf16 differs from
        // exact arithmetic by at most 1/40 of that, and ours may too.
        const std::vector<double> exact = golden[k.name]["exact"], in_bf16 = golden[k.name]["bf16"];
        const double moved = k.shape_scaling ? 0.024 : 0.012, allowed = std::is_same_v<floatX, bf16> ? moved / 25 : 2e-6;
        expect_close(trained.weights, exact, allowed, 0, k.name);
        expect_close(trained.weights, in_bf16, std::is_same_v<floatX, bf16> ? moved / 20 : moved / 25, 0, k.name);
    }
}

TEST(Muon, StateIsTheMomentumAndOneNumberPerRow) {
    MuonRecipe recipe;
    recipe.on = recipe.neurons = true;
    const Trained trained = train(recipe);
    const int rows[] = {6, 2, 2, 6, 8, 8, 6}, cols[] = {6, 6, 6, 6, 6, 6, 8};
    size_t at = 0;
    for (uint32_t k = 0; k < 7; k++)
        for (int r = 0; r < rows[k]; r++)
            for (int c = 0; c < cols[k]; c++, at++) {
                double m = 0;
                for (uint32_t step = 0; step < 3; step++)
                    m = 0.95 * m + 0.05 * number(100 * step + 50 + k, (uint32_t)(r * cols[k] + c));
                EXPECT_NEAR(trained.exp_avg[at], m, 1e-7);
                if (c > 0) EXPECT_EQ(trained.exp_avg_sq[at], 0);
                else EXPECT_GT(trained.exp_avg_sq[at], 0);
            }
    recipe.neurons = false;
    EXPECT_TRUE(train(recipe).exp_avg_sq.empty());  // Muon needs none
}

// ---- the Newton-Schulz steps -----------------------------------------------------------------------------------------------
using Doubles = std::vector<double>;
Doubles product(const Doubles& a, const Doubles& b, int n, int k, int m) {  // (n, k) (k, m)
    Doubles c((size_t)(n * m));
    for (int i = 0; i < n; i++)
        for (int j = 0; j < k; j++)
            for (int l = 0; l < m; l++) c[(size_t)(i * m + l)] += a[(size_t)(i * k + j)] * b[(size_t)(j * m + l)];
    return c;
}
Doubles transposed(const Doubles& a, int n, int m) {
    Doubles t(a.size());
    for (int i = 0; i < n; i++)
        for (int j = 0; j < m; j++) t[(size_t)(j * n + i)] = a[(size_t)(i * m + j)];
    return t;
}
Doubles newton_schulz(Doubles x, int n, int m) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    for (double& value : x) value /= std::max(std::sqrt(squares), 1e-7);
    for (int step = 0; step < 5; step++) {
        const Doubles gram = product(x, transposed(x, n, m), n, m, n), square = product(gram, gram, n, n, n);
        Doubles p(gram.size());
        for (size_t i = 0; i < p.size(); i++)
            p[i] = (i % (size_t)(n + 1) == 0 ? 3.4445 : 0) - 4.7750 * gram[i] + 2.0315 * square[i];
        x = product(p, x, n, n, m);
    }
    return x;
}

// A single matrix in memory of its own size.
struct OneMatrix {
    ModelConfig c;
    std::unique_ptr<TrainingMemory> m;
    Arena arena;
    floatX *x = nullptr, *y = nullptr;
    OneMatrix(int rows, int cols) {
        c = small_config();
        c.NH = c.NKV = 1;
        c.C = std::min(rows, cols);
        c.F = std::max(rows, cols);
        auto ranks = std::make_shared<Ranks>();
        ranks->whole_matrices = true;
        m = std::make_unique<TrainingMemory>(c, ranks, std::vector<int>{1});
        m->muon.recipe.on = true;
        m->muon.plan(arena, c, m->table, m->shards);
        for (floatX** p : {&x, &y}) arena.add("a matrix", p, (size_t)rows * (size_t)cols);
        arena.allocate();
    }
    Doubles orthogonal(const std::vector<floatX>& values, int rows, int cols) {
        be::Ctx ctx(2);
        be::upload(ctx, x, values.data(), values.size() * sizeof(floatX));
        const floatX* const result = m->muon.orthogonalize(ctx, x, y, rows, cols);
        std::vector<floatX> numbers(values.size());
        be::download(ctx, numbers.data(), result, values.size() * sizeof(floatX));
        Doubles d;
        for (const floatX value : numbers) d.push_back(as_double(value));
        return d;
    }
};

TEST(Muon, NewtonSchulzStepsAreThoseInDouble) {
    Rng rng(3);
    for (const auto& [rows, cols] : {std::pair(1, 1), {2, 7}, {7, 2}, {33, 33}, {40, 130}, {130, 40}, {96, 65}}) {
        // Matrices of any scale; the last column of a head that never learns is zero.
        for (const double scale : {1.0, 1e-4, 0.0}) {
            std::vector<floatX> values = rng.normals<floatX>((size_t)(rows * cols), scale);
            OneMatrix one(rows, cols);
            const Doubles result = one.orthogonal(values, rows, cols);
            Doubles start;
            for (const floatX value : values) start.push_back(as_double(value));
            const Doubles expected = rows > cols
                                         ? transposed(newton_schulz(transposed(start, rows, cols), cols, rows), cols, rows)
                                         : newton_schulz(start, rows, cols);
            double error = 0, size = 0;
            for (size_t i = 0; i < result.size(); i++) {
                error += (result[i] - expected[i]) * (result[i] - expected[i]);
                size += expected[i] * expected[i];
            }
            // Each step adds some roundings of its numbers, in fp32 also of sums of up to 130 products; the first steps
            // magnify small singular values, and errors in them, by up to 3.4 each.
            const double roundings = std::is_same_v<floatX, bf16> ? 8 : 32;
            EXPECT_LE(std::sqrt(error), roundings * roundoff<floatX> * std::sqrt(size))
                << rows << " x " << cols << ", " << scale;
        }
    }
}

TEST(Muon, ResultsAreNearlyOrthogonal) {
    Rng rng(4);
    for (const auto& [rows, cols] : {std::pair(40, 130), {130, 40}, {64, 256}}) {
        OneMatrix one(rows, cols);
        const Doubles x = one.orthogonal(rng.normals<floatX>((size_t)(rows * cols), 1e-3), rows, cols);
        const int n = std::min(rows, cols), m = std::max(rows, cols);
        const Doubles wide = rows > cols ? transposed(x, rows, cols) : x;
        for (int k = 0; k < 30; k++) {  // all singular values are in this range
            const Doubles z = rng.normals<double>((size_t)n), y = product(z, wide, 1, n, m);
            const double ratio = std::sqrt(product(y, y, 1, m, 1)[0] / product(z, z, 1, n, 1)[0]);
            EXPECT_GT(ratio, 0.65);
            EXPECT_LT(ratio, 1.25);
        }
    }
}

// ---- which rank has which matrix --------------------------------------------------------------------------------------------
TEST(Muon, ShardsAreWholeMatricesBalancedBySize) {
    ModelConfig c = small_config();
    c.L = 5;
    c.C = 12;
    c.F = 40;
    for (const bool tied : {true, false})
        for (const int dp : {1, 2, 3, 8, 50}) {
            c.tied = tied;
            const ParameterTable table(c, whole_model(c), (size_t)dp * 64);
            std::vector<int> holders(table.size);
            std::vector<size_t> sizes;
            for (int rank = 0; rank < dp; rank++) {
                const Shards shards(table, make_mesh(dp, rank, 1, 1, 1, 1), true, 700, true);
                EXPECT_FALSE(shards.in_order);  // matrices come last in memory, also on one rank
                EXPECT_EQ(Shards(table, make_mesh(dp, rank, 1, 1, 1, 1), true, 700).in_order, dp == 1);
                EXPECT_TRUE(Shards(table, make_mesh(dp, rank, 1, 1, 1, 1), false, 700).in_order);
                EXPECT_FALSE(Shards(table, make_mesh(dp, rank, 1, 1, 1, 1), false, 700, true).in_order);
                size_t end = 0, mine = 0;
                for (const Bucket& b : shards.buckets) {
                    EXPECT_EQ(b.begin, end);
                    end = b.end;
                    for (size_t i = b.mine; i < b.mine + b.n; i++) holders[i]++;
                    if (b.whole_matrix()) {
                        EXPECT_TRUE(b.n == 0 || b.n == b.end - b.begin);
                        mine += b.n;
                    }
                }
                EXPECT_EQ(end, table.size);
                sizes.push_back(mine);
            }
            EXPECT_EQ(holders, std::vector<int>(table.size, 1));
            EXPECT_LE(*std::max_element(sizes.begin(), sizes.end()) - *std::min_element(sizes.begin(), sizes.end()), 2 * 480u);
            // AdamW's shards are equal.
            for (int rank = 0; rank < dp; rank++)
                EXPECT_EQ(Shards(table, make_mesh(dp, rank, 1, 1, 1, 1), true, 700).size, table.size / (size_t)dp);
        }
}

// With expert parallelism every element of a tensor has one owner among the ranks that hold it, is counted once, and all ranks
// have the same buckets.
TEST(Muon, ShardsOfExperts) {
    ModelConfig c = small_config();
    c.L = 2;
    c.mixture = {6, 2};
    for (const bool whole : {false, true})
        for (const bool zero : {false, true})
            for (const auto& [dp, ep] : {std::pair(2, 2), {4, 2}, {6, 3}, {12, 2}}) {
                std::vector<std::map<std::pair<std::string, size_t>, int>> held(2);  // counted, owned: of elements of the model
                std::vector<size_t> ends;
                for (int rank = 0; rank < dp; rank++) {
                    const Mesh mesh = make_mesh(dp, rank, 1, 1, 1, ep);
                    const ParameterTable table(c, part_of(c, mesh, {c.L}), (size_t)dp * 64);
                    const Shards shards(table, mesh, zero, 700, whole);
                    std::vector<size_t> mine;
                    for (const Bucket& b : shards.buckets) mine.push_back(b.of_experts ? b.end + 1 : b.end);
                    if (rank == 0) ends = mine;
                    EXPECT_EQ(mine, ends);
                    EXPECT_EQ(ends.back(), table.size);
                    const auto count = [&](std::map<std::pair<std::string, size_t>, int>& of, size_t begin, size_t end) {
                        for (const TensorSpec& t : table.rows)
                            for (size_t i = std::max(begin, t.offset); i < std::min(end, t.offset + t.size()); i++) {
                                const size_t at = i - t.offset, cols = (size_t)t.cols;
                                of[{t.name, (size_t)t.whole_row((int)(at / cols)) * cols + at % cols}]++;
                            }
                    };
                    for (const Range& r : shards.not_duplicated(table)) count(held[0], r.begin, r.end);
                    for (const Bucket& b : shards.buckets) count(held[1], b.mine, b.mine + b.n);
                }
                size_t elements = 0;
                for (const TensorSpec& t : ParameterTable(c).rows) elements += t.size();
                EXPECT_EQ(held[0].size(), elements);
                EXPECT_EQ(held[1].size(), elements);
                for (const auto& [place, times] : held[0]) EXPECT_EQ(times, 1) << place.first;
                for (const auto& [place, times] : held[1])
                    EXPECT_EQ(times, zero ? 1 : place.first.find(".fc") != std::string::npos ? dp / ep : dp) << place.first;
            }
}

// Over all tensor-parallel ranks, the parts of each matrix cover it exactly once.
TEST(Muon, PartsOfTensorParallelRanksMakeWholeMatrices) {
    ModelConfig c = small_config();
    c.L = 2;
    c.C = 16;
    c.NH = 8;
    c.NKV = 2;
    c.F = 24;
    for (const bool heads : {false, true})
        for (const int tp : {1, 2, 4, 8}) {
            std::vector<std::vector<int>> times;  // per matrix: number of copies of each element
            size_t found = 0;
            for (int rank = 0; rank < tp; rank++) {
                Part part = whole_model(c);
                part.tp = {tp, rank};
                const ParameterTable table(c, part, 64);
                const auto all = Muon::matrices(c, table, Shards(table, {}, true, 1000, true), heads);
                if (rank == 0) times.resize(all.size());
                ASSERT_EQ(all.size(), times.size());
                found = all.size();
                for (size_t k = 0; k < all.size(); k++) {
                    const MuonMatrix& m = all[k];
                    times[k].resize(m.whole_elements());
                    if (heads && m.whole_rows == c.HS()) {
                        EXPECT_FALSE(m.cut());
                        continue;
                    }
                    for (int r = 0; r < m.rows && m.first_holder; r++)
                        for (int col = 0; col < m.cols; col++) times[k][(size_t)((m.row + r) * m.whole_cols + m.col + col)]++;
                }
            }
            // Two blocks of q, k, v, proj, gate, up, fc2; or this rank's heads of q, k, v.
            const int of_qkv = heads ? c.NH / tp + 2 * std::max(1, c.NKV / tp) : 3;
            EXPECT_EQ(found, (size_t)(2 * (of_qkv + 4)));
            for (const std::vector<int>& t : times) {
                const bool head = heads && t.size() == (size_t)(c.HS() * c.C);
                EXPECT_EQ(t, std::vector<int>(t.size(), head ? 0 : 1)) << tp;
            }
        }
}

}  // namespace test_muon
