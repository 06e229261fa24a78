// Ops of the CPU: the tests of op_tests.h, and tests of only this backend: rows added in order, the same bits for any
// number of threads. And the scalar formulas shared by the backends.
#include <gtest/gtest.h>

#include "../llmc/cpu/embed.h"
#include "../llmc/cpu/experts.h"
#include "../llmc/cpu/lora.h"
#include "../llmc/cpu/loss.h"
#include "../llmc/cpu/matmul.h"
#include "../llmc/cpu/mlp.h"
#include "../llmc/cpu/norm.h"
#include "../llmc/cpu/optimizer.h"
#include "../llmc/cpu/quantized.h"
#include "../llmc/cpu/reduce.h"
#include "testing.h"

namespace backend = cpu;

template <class T>
class Buffer : public test::Guarded<T> {
public:
    using test::Guarded<T>::Guarded;
    T* p() { return this->data(); }
    const T* p() const { return this->data(); }
    void set(const std::vector<T>& values) { std::copy(values.begin(), values.end(), p()); }
    std::vector<T> get() const { return this->values(); }
};

#include "op_tests.h"

namespace test_ops {

// The plain loops as well as the fast path: compared with the same sums in double.
INSTANTIATE_TEST_SUITE_P(PlainOps, Norms, testing::Values(NormKind{true, true}, NormKind{false, true}),
                         [](const auto& p) { return p.param.centred ? "Layer" : "Rms"; });

// ---- scalar formulas ------------------------------------------------------------------------------------------------------
TEST(Math, ExpIsAccurateAndKeepsTheEnds) {
    double worst = 0;
    for (double x = -86.6; x < 88.7228; x += 0.000137) {
        const float argument = (float)x;
        const double exact = std::exp((double)argument);
        const double ulp = (double)(float)exact - (double)std::nextafter((float)exact, 0.0f);
        worst = std::max(worst, std::abs((double)exp_of(argument) - exact) / ulp);
    }
    EXPECT_LE(worst, 1.25) << "units in the last place";
    EXPECT_EQ(exp_of(0.0f), 1);
    EXPECT_EQ(exp_of(-0.0f), 1);
    EXPECT_EQ(exp_of(-88.0f), 0);
    EXPECT_EQ(exp_of(-1e30f), 0);
    EXPECT_EQ(exp_of(-(float)infinity), 0);
    EXPECT_EQ(exp_of(89.0f), (float)infinity);
    EXPECT_EQ(exp_of(1e30f), (float)infinity);
    EXPECT_EQ(exp_of((float)infinity), (float)infinity);
    EXPECT_TRUE(std::isnan(exp_of((float)not_a_number)));
    EXPECT_TRUE(std::isnan(exp_of(-(float)not_a_number)));
}

TEST(Math, WeightHalves) {
    Rng rng(15);
    std::vector<float> numbers;
    for (uint32_t high = 0; high < 65536; high++)
        for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu, (uint32_t)rng.integers(1, 0, 65536)[0]}) {
            const uint32_t bits = high << 16 | low;
            float x;
            memcpy(&x, &bits, sizeof x);
            numbers.push_back(x);
        }
    size_t ties = 0;
    for (const float x : numbers) {
        bf16 upper;
        LowerHalf lower;
        store_weight(&upper, &lower, 0, x);
        const float weight = load_weight(&upper, &lower, 0);
        if (std::isnan(x)) {
            ASSERT_TRUE(std::isnan(weight) && std::isnan((float)upper));
            continue;
        }
        const float kept = std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
        ASSERT_EQ(memcmp(&weight, &kept, sizeof kept), 0) << x << " came back as " << weight;
        const double error = std::abs((double)upper - kept), least = std::abs((double)bf16(kept) - kept);
        ASSERT_TRUE(std::isinf(upper) || error == least) << x << " became " << (float)upper;
        ASSERT_EQ(std::isinf(upper), std::isinf((float)bf16(kept))) << x;
        if ((float)upper == (float)bf16(kept)) continue;
        ties++;
        ASSERT_GT(std::abs((float)upper), std::abs(kept));
    }
    EXPECT_GE(ties, 32000u) << "half of the ties are rounded to the other side than bf16 rounds to";
    // Vectorized: the same bits.
    if constexpr (has_lower_halves)
        for (size_t i = 0; i < numbers.size(); i += 13) {
            const int n = std::min({cpu::lanes, 13, (int)(numbers.size() - i)});
            std::vector<bf16> upper(cpu::lanes), upper1(cpu::lanes);  // zero beyond n
            std::vector<LowerHalf> lower(cpu::lanes), lower1(cpu::lanes);
            std::vector<float> weights(cpu::lanes), weights1(cpu::lanes);
            cpu::store_weights(upper.data(), lower.data(), 0, cpu::load(&numbers[i], n), n);
            cpu::store(weights.data(), cpu::load_weights(upper.data(), lower.data(), 0, n), n);
            for (int k = 0; k < n; k++) {
                store_weight(upper1.data(), lower1.data(), k, numbers[i + k]);
                weights1[k] = load_weight(upper1.data(), lower1.data(), k);
            }
            expect_same_bits(upper, upper1, "upper");
            expect_same_bits(lower, lower1, "lower");
            expect_same_bits(weights, weights1, "weights");
        }
}

TEST(Math, ActivationsFarOut) {
    for (const real x : {real(20), real(100), real(1e4), real(1e30)}) {
        EXPECT_EQ(gelu(x), x);
        EXPECT_EQ(gelu(-x), 0);
        EXPECT_EQ(sigmoid(x), 1) << x;
        EXPECT_LT(sigmoid(-x), 1e-8) << x;
    }
    for (const real x : {real(20), real(1e4), real(1e30)}) {
        EXPECT_EQ(gelu_derivative(x), 1) << x;
        EXPECT_EQ(gelu_derivative(-x), 0) << x;
    }
    for (const real x : {real(not_a_number), -real(not_a_number)})
        EXPECT_TRUE(std::isnan(gelu(x)) && std::isnan(gelu_derivative(x)) && std::isnan(sigmoid(x)));
    // Vectorized.
    const auto first = [](cpu::floats x) {
        real numbers[cpu::lanes];
        cpu::store(numbers, x);
        return numbers[0];
    };
    const real infinity = std::numeric_limits<real>::infinity();
    for (const real x : {real(20), real(88), real(89), real(1e4), real(1e30), infinity}) {
        EXPECT_EQ(first(sigmoid(cpu::floats{} + x)), 1) << x;
        EXPECT_LT(first(sigmoid(cpu::floats{} - x)), 1e-8) << x;
        EXPECT_GE(first(sigmoid(cpu::floats{} - x)), 0) << x;
    }
    EXPECT_EQ(first(sigmoid(cpu::floats{})), 0.5);
    EXPECT_TRUE(std::isnan(first(sigmoid(cpu::floats{} + real(not_a_number)))));
}

TEST(Math, AlibiSlopesGoldenValues) {
    const auto slopes = [](int n) {
        std::vector<real> s;
        for (int h = 0; h < n; h++) s.push_back(alibi_slope(h, n));
        return s;
    };
    const std::vector<real> s112 = slopes(112), s16 = slopes(16), s32 = slopes(32);
    const std::vector<real> actual = {s112[0],   s112[1], s112[63], s112[64], s112[65],
                                      s112[111], s16[0],  s16[15],  s32[0],   s32[31]};
    expect_close(actual,
                 {.9170040432, .8408964153, .00390625, .9576032807, .8781260802, .0163167779, .7071067812, .00390625,
                  .8408964153, .00390625},
                 1e-10, u, "slopes");
    expect_close(slopes(6), {0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125}, 0, 0, "slopes of 6 heads");
}

TEST(Math, RopeTable) {
    const int P = 7, HS = 10;
    std::vector<real> table;
    rope_table(table, P, HS, 10000);
    ASSERT_EQ(table.size(), (size_t)P * HS);
    Doubles expected;
    for (int p = 0; p < P; p++)
        for (int j = 0; j < HS / 2; j++)
            for (const double value :
                 {std::cos(p / std::pow(10000.0, 2.0 * j / HS)), std::sin(p / std::pow(10000.0, 2.0 * j / HS))})
                expected.push_back(value);
    expect_close(table, expected, 1e-15, u, "table");
    EXPECT_EQ(table[0], 1);
    EXPECT_EQ(table[1], 0);
}

// ---- only this backend ----------------------------------------------------------------------------------------------------
TEST(Embedding, BackwardAddsRowsInOrder) {
    cpu::Ctx ctx(2);
    Rng rng(2);
    const int N = 67, P = 9, v0 = 3, V = 5;
    for (const int C : {1, 19, 130, 515}) {
        const std::vector<int> tokens = rng.integers(N, 0, 12), positions = rng.integers(N, 0, P);
        const std::vector<floatX> dout = rng.normals<floatX>(N * C);
        std::vector<real> wte_expected = rng.normals<real>(V * C), wpe_expected = rng.normals<real>(P * C);
        Guarded<real> dwte(wte_expected, "dwte"), dwpe(wpe_expected, "dwpe");
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) {
                const int token = tokens[n] - v0;
                if (token >= 0 && token < V) wte_expected[token * C + c] += (real)dout[n * C + c];
                wpe_expected[positions[n] * C + c] += (real)dout[n * C + c];
            }
        cpu::embedding_backward(ctx, dwte.data(), dwpe.data(), dout.data(), tokens.data(), positions.data(), N, C, {v0, V, V});
        expect_same_bits(dwte, wte_expected, "dwte");
        expect_same_bits(dwpe, wpe_expected, "dwpe");
    }
}

// Every output of every op, at sizes that do not divide evenly among threads.

Doubles everything(int threads) {
    cpu::Ctx ctx(threads);
    Rng rng(14);
    Doubles all;
    const auto collect = [&](const auto& buffer) {
        const Doubles d = doubles(buffer);
        all.insert(all.end(), d.begin(), d.end());
    };
    const int N = 201, C = 83, V = 997, Vp = 1000;
    const std::vector<int> tokens = rng.integers(N, 0, V), positions = rng.integers(N, 0, N);
    const std::vector<floatX> wte = rng.normals<floatX>(V * C), wpe = rng.normals<floatX>(N * C), w = rng.normals<floatX>(C),
                              b = rng.normals<floatX>(C), dout = rng.normals<floatX>(N * C),
                              gate_up = rng.normals<floatX>(N * 2 * C);
    std::vector<floatX> out(N * C), sum(N * C), dinp(N * C), wide(N * 2 * C), logits = rng.normals<floatX>(N * Vp);
    std::vector<real> mean(N), rstd(N), dw(C), db(C), dwte(V * C), dwpe(N * C), loss(N), zloss(N), lse(N);
    cpu::embedding_forward(ctx, out.data(), tokens.data(), positions.data(), wte.data(), wpe.data(), N, C, {0, V, V});
    collect(out);
    cpu::embedding_backward(ctx, dwte.data(), dwpe.data(), dout.data(), tokens.data(), positions.data(), N, C, {0, V, V});
    collect(dwte);
    collect(dwpe);
    const NormParams params = {w.data(), b.data(), C, real(1e-5)};
    const NormStatistics statistics = {mean.data(), rstd.data()};
    const NormGrads grads = {dw.data(), db.data()};
    cpu::layernorm_forward(ctx, out.data(), statistics, sum.data(), wpe.data(), dout.data(), params, N);
    collect(out);
    collect(sum);
    collect(mean);
    collect(rstd);
    cpu::layernorm_backward(ctx, dinp.data(), grads, dout.data(), sum.data(), params, statistics, N, Acc::Set);
    collect(dinp);
    collect(dw);
    collect(db);
    cpu::rmsnorm_forward(ctx, out.data(), statistics, nullptr, wpe.data(), nullptr, params, N);
    cpu::rmsnorm_backward(ctx, dinp.data(), grads, dout.data(), wpe.data(), params, statistics, N, Acc::Add);
    collect(out);
    collect(dinp);
    collect(dw);
    cpu::activation_forward(ctx, out.data(), wpe.data(), N, C, Activation::gelu);
    cpu::activation_backward(ctx, dinp.data(), dout.data(), wpe.data(), N, C, Activation::gelu);
    collect(out);
    collect(dinp);
    cpu::activation_forward(ctx, out.data(), gate_up.data(), N, C, Activation::swiglu);
    cpu::activation_backward(ctx, wide.data(), dout.data(), gate_up.data(), N, C, Activation::swiglu);
    collect(out);
    collect(wide);
    cpu::residual_forward(ctx, out.data(), wpe.data(), dout.data(), out.size());
    collect(out);
    cpu::classifier(ctx, logits.data(), {loss.data(), zloss.data(), lse.data()}, tokens.data(), N, {0, V, Vp},
                    {1, real(1e-4), true});
    collect(logits);
    collect(loss);
    collect(zloss);
    collect(lse);
    all.push_back(cpu::sum_of_squares(ctx, dwte.data(), dwte.size()));
    std::vector<real> m(V * C), v(V * C);
    std::vector<LowerHalf> lower(V * C);
    std::vector<floatX> param(V * C);
    cpu::adamw(ctx, param.data(), lower.data(), m.data(), v.data(), dwte.data(), dwte.size(),
               {real(1e-3), real(0.9), real(0.95), real(1e-8), real(0.1), 1, 3}, {});
    collect(param);
    collect(lower);
    collect(m);
    collect(v);
    return all;
}

TEST(Ops, SameBitsForAnyNumberOfThreads) {
    const Doubles one = everything(1);
    for (const double x : one) ASSERT_TRUE(std::isfinite(x));
    for (const int threads : {2, 3, 4, 7, 16}) expect_same_bits(everything(threads), one, std::to_string(threads) + " threads");
}

}  // namespace test_ops
