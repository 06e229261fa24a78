// Linear layers, rotary positions and attention in double: every gradient against finite differences of the forward, for the
// plain loops and the tiles. Outputs lie between guards and are NaN before they are set.
#include <gtest/gtest.h>

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
    Doubles table, qkv = rng.normals<double>(N * (NH + 2 * NKV) * HS);
    rope_table(table, P, HS, 100);
    const std::vector<int> positions = {0, 39, 7, 7, 21};
    const Doubles dout = rng.normals<double>(qkv.size());
    const Rope rope = {positions.data(), table.data()};
    const AttentionShape shape = {1, N, NH, NKV, HS};
    const auto loss = [&] {
        Guarded<double> turned(qkv, "qkv");
        cpu::rope_forward(ctx, turned.data(), rope, shape);
        return dot(turned.values(), dout);
    };
    Guarded<double> gradient(dout, "dqkv");
    cpu::rope_backward(ctx, gradient.data(), rope, shape);
    check_gradient(loss, qkv.data(), qkv.size(), gradient.data(), "dqkv");
    cpu::rope_forward(ctx, gradient.data(), rope, shape);
    expect_close(gradient, dout, 1e-14, 0, "back and forth");
}

// A query's product with a key depends on the distance of their positions only.
TEST(Fp64, RopeIsRelative) {
    cpu::Ctx ctx(1);
    Rng rng(3);
    const int HS = 10, P = 100;
    Doubles table;
    rope_table(table, P, HS, 10000);
    const Doubles heads = rng.normals<double>(3 * HS);  // a query, a key, a value
    const auto product = [&](int query_position, int key_position) {
        Doubles q = heads, k = heads;
        cpu::rope_forward(ctx, q.data(), {&query_position, table.data()}, {1, 1, 1, 1, HS});
        cpu::rope_forward(ctx, k.data(), {&key_position, table.data()}, {1, 1, 1, 1, HS});
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
};

// Documents begin at tokens 0, 1, 3, at a tile's edge, and one before the end.
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
    for (const AttentionCase& k : {AttentionCase{1, 1, 1, 1, 2, false, false}, AttentionCase{2, 9, 4, 2, 6, false, false},
                                   AttentionCase{2, 9, 4, 2, 6, true, true}, AttentionCase{1, 11, 6, 1, 3, true, false},
                                   AttentionCase{1, 70, 2, 1, 9, false, false}, AttentionCase{2, 131, 2, 2, 5, true, true}}) {
        SCOPED_TRACE(testing::Message() << "T " << k.T << ", NH " << k.NH << ", NKV " << k.NKV << ", HS " << k.HS);
        Rng rng(seed++);
        const double scale = 1 / std::sqrt((double)k.HS);
        const size_t n = (size_t)k.B * k.T * k.NH;
        Doubles qkv = rng.normals<double>((size_t)k.B * k.T * (k.NH + 2 * k.NKV) * k.HS), slopes;
        for (int h = 0; h < k.NH; h++) slopes.push_back(alibi_slope(h, k.NH));
        const Doubles dout = rng.normals<double>(n * k.HS);
        const std::vector<int> documents = document_starts(k.B, k.T);
        const AttentionMask mask = {k.documents ? documents.data() : nullptr, k.alibi ? slopes.data() : nullptr};
        const AttentionShape shape = {k.B, k.T, k.NH, k.NKV, k.HS, scale};
        Guarded<double> out(n * k.HS, "out"), lse(n, "lse"), dqkv(qkv.size(), "dqkv");
        const auto loss = [&] {
            cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), mask, shape);
            return dot(out.values(), dout);
        };
        loss();
        cpu::attention_backward(ctx, dqkv.data(), dout.data(), {qkv.data(), out.data(), lse.data()}, mask, shape, nullptr);
        check_gradient(loss, qkv.data(), qkv.size(), dqkv.data(), "dqkv");
    }
}

// Two tokens, by hand: query (1, 2), keys (1, 0) and (0, 1), scale 1/2: scores 1/2 and 1; ALiBi takes 1/4 from the first.
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

// Query head h reads key and value head h / (NH / NKV): the same as with each key and value head written out for its group.
TEST_P(Fp64Attention, GroupedHeadsAreRepeatedHeads) {
    cpu::Ctx ctx(1);
    ctx.plain = GetParam();
    Rng rng(20);
    const int T = 67, NH = 6, NKV = 2, HS = 5;
    const Doubles qkv = rng.normals<double>(T * (NH + 2 * NKV) * HS);
    Doubles repeated;
    for (int t = 0; t < T; t++)
        for (int head = 0; head < 3 * NH; head++) {
            const int source =
                head < NH ? head : NH + (head - NH) / 3;  // groups of 3: keys 6, 7 and values 8, 9 follow each other
            const double* from = &qkv[(t * (NH + 2 * NKV) + source) * HS];
            repeated.insert(repeated.end(), from, from + HS);
        }
    Guarded<double> out(T * NH * HS), lse(NH * T), expected(T * NH * HS), expected_lse(NH * T);
    cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), {}, {1, T, NH, NKV, HS, 0.5});
    cpu::attention_forward(ctx, expected.data(), expected_lse.data(), repeated.data(), {}, {1, T, NH, NH, HS, 0.5});
    expect_same_bits(out, expected, "out");
    expect_same_bits(lse, expected_lse, "lse");
}

}  // namespace test_attention_fp64
