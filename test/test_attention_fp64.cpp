// Linear layers, rotary positions and attention in double: every gradient compared with finite differences of the forward
// pass, for the plain loops and the tiles. Outputs are between guards and start as NaN.
#include <gtest/gtest.h>

#include <numeric>

#include "../llmc/cpu/attention.h"
#include "../llmc/cpu/matmul.h"
#include "../llmc/cpu/rope.h"
#include "../llmc/base/math.h"
#include "testing.h"

namespace test_attention_fp64 {

using namespace test;

// ---- linear ---------------------------------------------------------------------------------------------------------------
TEST(Fp64, Linear) {
    cpu::Ctx ctx(1);
    Rng rng(1);
    struct Case {
        int N, IC, OC;
        bool bias;
        Acc acc;
    };
    for (const Case& k : {Case{1, 1, 1, true, Acc::Set}, Case{3, 17, 5, false, Acc::Add}, Case{4, 5, 65, true, Acc::Add},
                          Case{19, 7, 3, true, Acc::Set}, Case{65, 3, 17, false, Acc::Set}}) {
        Doubles inp = rng.normals<double>(k.N * k.IC), weight = rng.normals<double>(k.OC * k.IC),
                bias = rng.normals<double>(k.OC);
        const Doubles dout = rng.normals<double>(k.N * k.OC), dweight0 = rng.normals<double>(k.OC * k.IC),
                      dbias0 = rng.normals<double>(k.OC);
        Guarded<double> out(k.N * k.OC, "out"), dinp(k.N * k.IC, "dinp"), dweight(k.OC * k.IC, "dweight"), dbias(k.OC, "dbias");
        const auto loss = [&] {
            cpu::linear_forward(ctx, out.data(), inp.data(), weight.data(), k.bias ? bias.data() : nullptr, k.N, k.IC, k.OC);
            return dot(out.values(), dout);
        };
        if (k.acc == Acc::Add) {
            std::copy(dweight0.begin(), dweight0.end(), dweight.data());
            std::copy(dbias0.begin(), dbias0.end(), dbias.data());
        }
        cpu::linear_backward_input(ctx, dinp.data(), dout.data(), weight.data(), k.N, k.IC, k.OC);
        cpu::linear_backward_weight(ctx, dweight.data(), k.bias ? dbias.data() : nullptr, dout.data(), inp.data(), k.N, k.IC,
                                    k.OC, k.acc);
        Doubles weight_gradient = dweight.values(), bias_gradient = dbias.values();
        for (size_t i = 0; i < weight_gradient.size() && k.acc == Acc::Add; i++) weight_gradient[i] -= dweight0[i];
        for (size_t i = 0; i < bias_gradient.size() && k.acc == Acc::Add; i++) bias_gradient[i] -= dbias0[i];
        check_gradient(loss, inp.data(), inp.size(), dinp.data(), "dinp");
        check_gradient(loss, weight.data(), weight.size(), weight_gradient.data(), "dweight");
        if (k.bias) check_gradient(loss, bias.data(), bias.size(), bias_gradient.data(), "dbias");
    }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------------
TEST(Fp64, Rope) {
    cpu::Ctx ctx(1);
    Rng rng(2);
    const int N = 5, NH = 4, NKV = 2, HS = 6, P = 40;
    const std::vector<int> positions = {0, 39, 7, 7, 21};
    const AttentionShape shape = {1, N, NH, NKV, HS};
    for (const int rotated : {6, 4, 2}) {  // of each head
        Doubles table, qkv = rng.normals<double>(N * (NH + 2 * NKV) * HS);
        rope_table(table, P, rotated, 100);
        const Doubles dout = rng.normals<double>(qkv.size());
        const Rope rope = {positions.data(), table.data(), rotated};
        Doubles turned_heads;
        const auto loss = [&] {
            Guarded<double> turned(qkv, "qkv");
            cpu::rope_forward(ctx, turned.data(), rope, shape);
            turned_heads = turned.values();
            return dot(turned_heads, dout);
        };
        Guarded<double> gradient(dout, "dqkv");
        cpu::rope_backward(ctx, gradient.data(), rope, shape);
        check_gradient(loss, qkv.data(), qkv.size(), gradient.data(), "dqkv");
        loss();
        for (size_t i = 0; i < qkv.size(); i++)
            if ((int)(i % HS) >= rotated) {
                EXPECT_EQ(turned_heads[i], qkv[i]) << "beyond what is rotated";
            }
        cpu::rope_forward(ctx, gradient.data(), rope, shape);
        expect_close(gradient, dout, 1e-14, 0, "back and forth");
    }
}

// The product of a query with a key depends only on the distance of their positions.
TEST(Fp64, RopeIsRelative) {
    cpu::Ctx ctx(1);
    Rng rng(3);
    const int HS = 10, P = 100;
    Doubles table;
    rope_table(table, P, HS, 10000);
    const Doubles heads = rng.normals<double>(3 * HS);  // a query, a key, a value
    const auto product = [&](int query_position, int key_position) {
        Doubles q = heads, k = heads;
        cpu::rope_forward(ctx, q.data(), {&query_position, table.data(), HS}, {1, 1, 1, 1, HS});
        cpu::rope_forward(ctx, k.data(), {&key_position, table.data(), HS}, {1, 1, 1, 1, HS});
        return dot(Doubles(q.begin(), q.begin() + HS), Doubles(k.begin() + HS, k.begin() + 2 * HS));
    };
    EXPECT_NEAR(product(50, 43), product(7, 0), 1e-13);
    EXPECT_NEAR(product(99, 92), product(7, 0), 1e-13);
    EXPECT_GT(std::abs(product(8, 0) - product(7, 0)), 1e-3);
}

// ---- attention ------------------------------------------------------------------------------------------------------------

struct AttentionCase {
    int B, T, NH, NKV, HS;
    bool alibi, documents;
    double softcap = 0, dropout = 0;
    bool sinks = false;
    int window = 0;  // window size; 0: all keys

    AttentionShape shape() const {
        AttentionShape s{B, T, NH, NKV, HS, 1 / std::sqrt((double)HS), softcap};
        s.dropout.rate = dropout;
        s.dropout.draws.key = 99;
        s.dropout.draws.first = 1001;
        s.all_heads = 2 * NH;
        return s;
    }
};

// Documents start at tokens 0, 1, 3, at a tile's edge, and one before the end.
std::vector<int> document_starts(int B, int T) {
    std::vector<int> starts;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) starts.push_back(t == T - 1 ? t : t >= 64 ? 64 : t >= 3 + b ? 3 + b : t >= 1 ? 1 : 0);
    return starts;
}

class Fp64Attention : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Fp64, Fp64Attention, testing::Values(true, false),
                         [](const auto& p) { return p.param ? "Plain" : "Tiles"; });

TEST_P(Fp64Attention, Gradients) {
    cpu::Ctx ctx(1);
    ctx.plain = GetParam();
    uint64_t seed = 4;
    for (const AttentionCase& k :
         {AttentionCase{1, 1, 1, 1, 2, false, false}, AttentionCase{2, 9, 4, 2, 6, false, false},
          AttentionCase{2, 9, 4, 2, 6, true, true}, AttentionCase{1, 11, 6, 1, 3, true, false},
          AttentionCase{1, 70, 2, 1, 5, false, false}, AttentionCase{1, 131, 1, 1, 2, true, true},
          AttentionCase{2, 9, 4, 2, 6, true, true, 1.5}, AttentionCase{1, 70, 2, 1, 3, false, true, 0.7},
          AttentionCase{2, 9, 4, 2, 6, true, true, 0, 0.3}, AttentionCase{1, 70, 2, 2, 3, false, false, 2, 0.2},
          AttentionCase{2, 9, 4, 2, 6, false, false, 0, 0, true}, AttentionCase{1, 66, 2, 1, 2, true, true, 1.5, 0.3, true},
          AttentionCase{2, 9, 2, 1, 4, false, false, 0, 0, false, 1},
          AttentionCase{1, 140, 2, 1, 1, false, true, 0, 0, true, 50}}) {
        SCOPED_TRACE(testing::Message() << "T " << k.T << ", NH " << k.NH << ", NKV " << k.NKV << ", HS " << k.HS
                                        << ", softcap " << k.softcap << ", dropout " << k.dropout << ", window " << k.window);
        Rng rng(seed++);
        const size_t n = (size_t)k.B * k.T * k.NH;
        Doubles qkv = rng.normals<double>((size_t)k.B * k.T * (k.NH + 2 * k.NKV) * k.HS), slopes;
        for (int h = 0; h < k.NH; h++) slopes.push_back(alibi_slope(h, k.NH));
        const Doubles dout = rng.normals<double>(n * k.HS);
        std::vector<int> first_keys = document_starts(k.B, k.T);
        for (int i = 0; i < k.B * k.T; i++) {
            if (!k.documents) first_keys[i] = 0;
            if (k.window) first_keys[i] = std::max(first_keys[i], i % k.T + 1 - k.window);
        }
        const AttentionMask mask = {k.documents || k.window ? first_keys.data() : nullptr, k.alibi ? slopes.data() : nullptr};
        const AttentionShape shape = k.shape();
        Doubles sinks = rng.normals<double>(k.NH);
        const Doubles dsinks0 = rng.normals<double>(k.NH);
        Guarded<double> out(n * k.HS, "out"), lse(n, "lse"), dqkv(qkv.size(), "dqkv"), dsinks(dsinks0, "dsinks");
        const auto loss = [&] {
            cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), mask, shape);
            if (k.sinks) cpu::sinks_forward(ctx, out.data(), lse.data(), sinks.data(), shape);
            return dot(out.values(), dout);
        };
        loss();
        const AttentionActs acts = {qkv.data(), out.data(), lse.data()};
        cpu::attention_backward(ctx, dqkv.data(), dout.data(), acts, mask, shape, nullptr);
        if (k.sinks) cpu::sinks_backward(ctx, dsinks.data(), dout.data(), acts, sinks.data(), shape);
        check_gradient(loss, qkv.data(), qkv.size(), dqkv.data(), "dqkv");
        Doubles gradient = dsinks.values();
        for (size_t h = 0; h < gradient.size(); h++) gradient[h] -= dsinks0[h];
        check_gradient(loss, sinks.data(), sinks.size(), gradient.data(), "dsinks");  // zero without sinks
    }
}

// Two tokens, by hand: query (1, 2), keys (1, 0) and (0, 1), scale 1/2: scores 1/2 and 1; ALiBi subtracts 1/4 from the
// first.
TEST_P(Fp64Attention, GoldenValues) {
    cpu::Ctx ctx(1);
    ctx.plain = GetParam();
    const Doubles qkv = {3, -1, 1, 0, 10, 20, /**/ 1, 2, 0, 1, -5, 7};
    const double slope = 0.25;
    for (const bool alibi : {false, true}) {
        Guarded<double> out(4), lse(2);
        cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), {nullptr, alibi ? &slope : nullptr},
                               {1, 2, 1, 1, 2, 0.5});
        const double a = std::exp(alibi ? 0.25 : 0.5), b = std::exp(1.0), w = a / (a + b);
        expect_close(out, {10, 20, 10 * w - 5 * (1 - w), 20 * w + 7 * (1 - w)}, 1e-13, 0, "out");
        expect_close(lse, {1.5, std::log(a + b)}, 1e-14, 0, "lse");
    }
}

// By hand: two tokens as above, the query's scores capped at 1, its first key dropped or not, and a sink.
TEST_P(Fp64Attention, GoldenValuesOfCapsDropoutAndSinks) {
    cpu::Ctx ctx(1);
    ctx.plain = GetParam();
    const Doubles qkv = {3, -1, 1, 0, 10, 20, /**/ 1, 2, 0, 1, -5, 7};
    const double sink = 0.3;
    Guarded<double> out(4), lse(2);
    AttentionShape shape = {1, 2, 1, 1, 2, 0.5, 1};
    cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), {}, shape);
    const double a = std::exp(std::tanh(0.5)), b = std::exp(std::tanh(1.0)), c = std::exp(sink), w = a / (a + b);
    expect_close(out, {10, 20, 10 * w - 5 * (1 - w), 20 * w + 7 * (1 - w)}, 1e-13, 0, "out");
    cpu::sinks_forward(ctx, out.data(), lse.data(), &sink, shape);
    const double first = std::exp(std::tanh(1.5));
    expect_close(lse, {std::log(first + c), std::log(a + b + c)}, 1e-14, 0, "lse");
    expect_close(
        out,
        {10 * first / (first + c), 20 * first / (first + c), (10 * a - 5 * b) / (a + b + c), (20 * a + 7 * b) / (a + b + c)},
        1e-13, 0, "out with a sink");
    shape.all_heads = 1;
    shape.dropout.rate = 0.5;
    int seen[2][2] = {};
    for (uint64_t seed = 0; seed < 100; seed++) {  // the second row's two weights are dropped or doubled
        shape.dropout.draws.key = seed;
        cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), {}, shape);
        const double p = shape.dropout.keeps(2) ? 2 * w : 0, q = shape.dropout.keeps(3) ? 2 * (1 - w) : 0;
        seen[p > 0][q > 0]++;
        EXPECT_NEAR(out[2], 10 * p - 5 * q, 1e-13);
        EXPECT_NEAR(lse[1], std::log(a + b), 1e-14);
    }
    for (const auto& row : seen)
        for (const int count : row) EXPECT_GE(count, 8);  // 25 of 100 expected, with a standard deviation of 4.3
}

// Query head h reads key/value head h / (NH / NKV): the same as with key/value heads repeated for each head of their group.
TEST_P(Fp64Attention, GroupedHeadsAreRepeatedHeads) {
    cpu::Ctx ctx(1);
    ctx.plain = GetParam();
    Rng rng(20);
    const int T = 67, NH = 6, NKV = 2, HS = 5;
    const Doubles qkv = rng.normals<double>(T * (NH + 2 * NKV) * HS);
    Doubles repeated;
    for (int t = 0; t < T; t++)
        for (int head = 0; head < 3 * NH; head++) {
            const int source = head < NH ? head : NH + (head - NH) / 3;  // groups of 3: keys 6, 7, then values 8, 9
            const double* from = &qkv[(t * (NH + 2 * NKV) + source) * HS];
            repeated.insert(repeated.end(), from, from + HS);
        }
    Guarded<double> out(T * NH * HS), lse(NH * T), expected(T * NH * HS), expected_lse(NH * T);
    cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), {}, {1, T, NH, NKV, HS, 0.5});
    cpu::attention_forward(ctx, expected.data(), expected_lse.data(), repeated.data(), {}, {1, T, NH, NH, HS, 0.5});
    expect_same_bits(out, expected, "out");
    expect_same_bits(lse, expected_lse, "lse");
}

// Token by token equals all at once: with windows, caps, sinks and ALiBi.
TEST(Fp64, DecodeIsForward) {
    cpu::Ctx ctx(1);
    Rng rng(21);
    for (const AttentionCase& k : {AttentionCase{2, 20, 4, 2, 6, true, false, 1.5, 0, true, 0},
                                   AttentionCase{1, 20, 2, 1, 3, false, false, 0, 0, true, 5},
                                   AttentionCase{1, 20, 2, 1, 3, true, false, 0, 0, false, 1}}) {
        const int P = 23;
        const Doubles qkv = rng.normals<double>((size_t)k.B * k.T * (k.NH + 2 * k.NKV) * k.HS),
                      sinks = rng.normals<double>(k.NH), slopes = rng.normals<double>(k.NH);
        std::vector<int> first_keys;
        for (int i = 0; i < k.B * k.T; i++) first_keys.push_back(k.window ? std::max(0, i % k.T + 1 - k.window) : 0);
        Guarded<double> out((size_t)k.B * k.T * k.NH * k.HS), lse((size_t)k.B * k.T * k.NH);
        AttentionShape shape = k.shape();
        const double* slopes_or_null = k.alibi ? slopes.data() : nullptr;
        const double* sinks_or_null = k.sinks ? sinks.data() : nullptr;
        cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), {first_keys.data(), slopes_or_null}, shape);
        if (k.sinks) cpu::sinks_forward(ctx, out.data(), lse.data(), sinks.data(), shape);
        const size_t row = shape.row(), width = (size_t)k.NH * k.HS, T = (size_t)k.T;
        Guarded<double> keys((size_t)k.B * P * k.NKV * k.HS), values((size_t)k.B * P * k.NKV * k.HS), token_out(k.B * width);
        shape.T = 1;
        std::vector<int> sequences((size_t)k.B);
        std::iota(sequences.begin(), sequences.end(), 0);
        for (size_t t = 0; t < T; t++) {
            const std::vector<int> now((size_t)k.B, (int)t);
            Doubles token;
            for (size_t b = 0; b < (size_t)k.B; b++)
                token.insert(token.end(), &qkv[(b * T + t) * row], &qkv[(b * T + t) * row] + row);
            cpu::attention_decode(ctx, token_out.data(), {keys.data(), values.data(), P}, token.data(),
                                  {sequences.data(), now.data(), k.window, slopes_or_null, sinks_or_null}, shape);
            for (size_t i = 0; i < k.B * width; i++)
                EXPECT_NEAR(token_out[i], out[(i / width * T + t) * width + i % width], 1e-13) << t;
        }
    }
}

}  // namespace test_attention_fp64
