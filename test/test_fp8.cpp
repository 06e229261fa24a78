// FP8 numbers, scales and products: every code and every tie compared with a definition in double, the state that
// determines scales, and products compared with sums in double within bounds derived from the formats.
#include <gtest/gtest.h>

#include <random>

#include "../llmc/cpu/experts.h"
#include "../llmc/cpu/fp8_linear.h"
#include "../llmc/cpu/mlp.h"
#include "../llmc/cpu/norm.h"
#include "../llmc/model/fp8_state.h"
#include "expert_layer.h"
#include "testing.h"

namespace test_fp8 {

constexpr Fp8 formats[] = {Fp8::e4m3, Fp8::e5m2};

// All finite non-negative numbers of a format, from the formula, in ascending order: index = code.
std::vector<double> numbers(Fp8 format) {
    const int mantissa = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    std::vector<double> all;
    for (int exponent = 0;; exponent++)
        for (int fraction = 0; fraction < 1 << mantissa; fraction++) {
            const double x = exponent ? std::pow(2.0, exponent - bias) * (1 + fraction / (double)(1 << mantissa))
                                      : std::pow(2.0, 1 - bias) * fraction / (double)(1 << mantissa);
            all.push_back(x);
            if (x == (double)fp8_max(format)) return all;
        }
}

// Nearest by search; in a tie the even code; never beyond the largest.
uint8_t nearest(const std::vector<double>& all, double x) {
    size_t best = 0;
    x = std::min(x, all.back());
    for (size_t i = 1; i < all.size(); i++) {
        const double before = std::fabs(all[best] - x), now = std::fabs(all[i] - x);
        if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return (uint8_t)best;
}

TEST(Fp8, EveryCodeIsTheNumberOfTheDefinitionAndComesBack) {
    for (const Fp8 format : formats) {
        const std::vector<double> all = numbers(format);
        EXPECT_EQ(all.size(), format == Fp8::e4m3 ? 127u : 124u);
        for (int code = 0; code < 256; code++) {
            const size_t magnitude = (size_t)(code & 0x7f);
            const float x = fp8_decode((uint8_t)code, format);
            if (magnitude < all.size()) {
                EXPECT_EQ((double)x, (code & 0x80 ? -1 : 1) * all[magnitude]) << code;
                EXPECT_EQ(std::signbit(x), (code & 0x80) != 0);
                EXPECT_EQ(fp8_encode(x, format), code);
                EXPECT_EQ((float)bf16(x), x) << "is a part of bf16";
            } else if (format == Fp8::e5m2 && magnitude == 0x7c) {
                EXPECT_TRUE(std::isinf(x));
            } else {
                EXPECT_TRUE(std::isnan(x)) << code;
            }
        }
    }
}

TEST(Fp8, RoundsToNearestTiesToEvenAndSaturates) {
    for (const Fp8 format : formats) {
        const std::vector<double> all = numbers(format);
        const auto check = [&](float x) {
            ASSERT_EQ(fp8_encode(x, format), nearest(all, x)) << fp8_name(format) << " " << x;
            ASSERT_EQ(fp8_encode(-x, format), nearest(all, x) | 0x80) << fp8_name(format) << " " << -x;
        };
        for (size_t i = 0; i + 1 < all.size(); i++) {
            const float tie = (float)((all[i] + all[i + 1]) / 2);  // exact
            check(tie);
            check(std::nextafter(tie, 0.0f));
            check(std::nextafter(tie, INFINITY));
            check((float)all[i]);
            check(std::nextafter((float)all[i], INFINITY));
            if (i) check(std::nextafter((float)all[i], 0.0f));
        }
        for (const float x : {fp8_max(format) * 1.01f, fp8_max(format) * 2, 1e30f, 3.402823466e38f, 1e-30f, 1e-45f, 0.0f})
            check(x);
        for (uint32_t i = 0; i < 200000; i++) {
            const uint32_t bits = (i * 2654435761u) & 0x7fffffffu;
            float x;
            memcpy(&x, &bits, 4);
            if (std::isfinite(x)) check(x);
        }
        for (const float x : {INFINITY, NAN}) {
            EXPECT_TRUE(std::isnan(fp8_decode(fp8_encode(x, format), format)));
            EXPECT_TRUE(std::isnan(fp8_decode(fp8_encode(-x, format), format)));
        }
    }
}

TEST(Fp8, ScalesBringTheLargestElementToTheLargestNumber) {
    EXPECT_EQ(fp8_scale(448, Fp8::e4m3, 0), 1);
    EXPECT_EQ(fp8_scale(7, Fp8::e4m3, 0), 64);
    EXPECT_EQ(fp8_scale(7, Fp8::e4m3, 2), 16);
    EXPECT_EQ(fp8_scale(28672, Fp8::e5m2, 0), 2);
    for (const float nothing : {0.0f, -1.0f, INFINITY, NAN}) EXPECT_EQ(fp8_scale(nothing, Fp8::e4m3, 0), 0);
    EXPECT_EQ(fp8_scale(1e-45f, Fp8::e5m2, 0), 3.402823466e38f);
}

TEST(Fp8State, FollowsTheHistoryByItsLargestOrNewestEntry) {
    for (const bool newest : {false, true}) {
        Fp8Recipe recipe;
        recipe.on = true;
        recipe.history = 3;
        recipe.most_recent = newest;
        Fp8State state(recipe, 1);
        const float amax[] = {4, 16, 8, 2, 1, 0, 0, 0, 0};
        // of the newest three; if all are zero the scale is unchanged
        const float largest[] = {4, 16, 16, 16, 8, 2, 1, 1, 1}, last[] = {4, 16, 8, 2, 1, 1, 1, 1, 1};
        EXPECT_EQ(state.measured(), 0);
        EXPECT_EQ(state.scales[0], 1);
        for (size_t i = 0; i < std::size(amax); i++) {
            state.update(std::vector<float>(fp8_tensors, amax[i]));
            for (const Matrix matrix : all_matrices) {
                EXPECT_EQ(state.scales[fp8_index(0, matrix, Operand::weight)], 448 / (newest ? last : largest)[i]) << i;
                EXPECT_EQ(state.scales[fp8_index(0, matrix, Operand::gradient)], 57344 / (newest ? last : largest)[i]) << i;
            }
            EXPECT_EQ(state.measured(), std::min(3, (int)i + 1));
        }
    }
}

TEST(Fp8State, ComesBackFromAFileAndRefusesOthers) {
    Fp8Recipe recipe;
    recipe.on = true;
    recipe.history = 4;
    Fp8State state(recipe, 2);
    std::mt19937 random(1);
    const auto amax = [&] {
        std::vector<float> v(2 * fp8_tensors);
        for (float& x : v) x = std::ldexp((float)random() / 7, -(int)(random() % 60));
        return v;
    };
    for (int i = 0; i < 6; i++) state.update(amax());
    const auto json = nlohmann::json::parse(state.to_json().dump());
    Fp8State other(recipe, 2);
    other.from_json(json, "file");
    EXPECT_EQ(other.scales, state.scales);
    for (int i = 0; i < 6; i++) {
        const auto next = amax();
        state.update(next);
        other.update(next);
        EXPECT_EQ(other.scales, state.scales);
    }
    Fp8State wrong(recipe, 3);
    EXPECT_THROW(wrong.from_json(json, "file"), Error);
    auto damaged = json;
    damaged["scales"][3] = 0;
    EXPECT_THROW(other.from_json(damaged, "file"), Error);
    damaged = json;
    damaged.erase("amax_history");
    EXPECT_THROW(other.from_json(damaged, "file"), Error);
    other.from_json(nullptr, "file");  // of a run in bf16
}

class Fp8Ops : public testing::TestWithParam<bool> {
protected:
    Fp8Ops() { ctx_.plain = GetParam(); }
    std::vector<uint8_t> codes(size_t n, Fp8 format, uint32_t seed) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        std::vector<uint8_t> v(n);
        for (uint8_t& c : v) c = fp8_encode(normal(random) * fp8_max(format) / 8, format);
        return v;
    }
    cpu::Ctx ctx_;
};
INSTANTIATE_TEST_SUITE_P(PlainAndFast, Fp8Ops, testing::Bool());

TEST_P(Fp8Ops, QuantizeEncodesTransposesAndMeasures) {
    const int N = 80, C = 48;
    std::vector<floatX> x((size_t)N * C);
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (floatX& v : x) v = (floatX)(normal(random) * 100);
    x[5] = (floatX)NAN;
    x[17] = (floatX)INFINITY;
    x[99] = (floatX)-1e30f;
    x[100] = (floatX)0.0f;
    for (const Fp8 format : formats) {
        const float scale = 0.37f;
        float amax = 1;
        std::vector<uint8_t> q((size_t)N * C), t((size_t)N * C);
        cpu::quantize(ctx_, {q.data(), t.data(), &amax, &scale, format}, x.data(), N, C);
        EXPECT_EQ(amax, std::fabs((float)(floatX)-1e30f));
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) {
                const size_t i = (size_t)n * C + c;
                ASSERT_EQ(q[i], fp8_encode((float)x[i] * scale, format));
                ASSERT_EQ(t[(size_t)c * N + n], q[i]);
            }
        EXPECT_TRUE(std::isnan(fp8_decode(q[5], format)) && std::isnan(fp8_decode(q[17], format)));
        EXPECT_EQ(std::fabs(fp8_decode(q[99], format)), fp8_max(format));
        float nothing = 0, s = 5, inverse = 5;
        const std::vector<floatX> zeros(64, (floatX)0.0f);
        cpu::absolute_max(ctx_, &nothing, zeros.data(), zeros.size());
        cpu::set_scale(ctx_, &s, &inverse, &nothing, format, 0);
        EXPECT_TRUE(nothing == 0 && s == 1 && inverse == 1);
        cpu::set_scale(ctx_, &s, &inverse, &amax, format, 1);
        EXPECT_EQ(s, fp8_scale(amax, format, 1));
        EXPECT_EQ(inverse, 1 / s);
    }
}

// An op with FP8 output writes quantize()'s codes of its numbers, and also the numbers if requested.
TEST_P(Fp8Ops, OpsMakeTheCodesOfTheirNumbers) {
    const int N = 48, F = 80;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto numbers_of = [&](size_t n) {
        std::vector<floatX> v(n);
        for (floatX& x : v) x = (floatX)(3 * normal(random));
        return v;
    };
    std::vector<floatX> x = numbers_of((size_t)N * 2 * F);
    const std::vector<floatX> y = numbers_of((size_t)N * F), add = numbers_of((size_t)N * F), w = numbers_of(F),
                              b = numbers_of(F);
    x[7] = (floatX)NAN;
    x[(size_t)N * F - 1] = (floatX)INFINITY;
    std::vector<floatX> sum((size_t)N * F);
    std::vector<real> mean(N), rstd(N);
    const auto check = [&](const char* name, int columns, bool transposes, const auto& op) {
        const size_t n = (size_t)N * columns;
        for (const Fp8 format : formats) {
            if (format == Fp8::e5m2 && !transposes) continue;
            std::vector<floatX> expected(n), got(n);
            std::vector<uint8_t> codes[3], transposed[3];
            float amax[3] = {2.5f, 2.5f, 2.5f};
            const float scale = 11;
            for (auto* all : {codes, transposed})
                for (int i = 0; i < 3; i++) all[i].assign(n, 1);
            const auto to = [&](int i) {
                return Codes{codes[i].data(), transposes ? transposed[i].data() : nullptr, &amax[i], &scale, format};
            };
            op(Output(expected.data()));
            cpu::quantize(ctx_, to(0), expected.data(), N, columns);
            op(Output(to(1)));
            op(Output(to(2), got.data()));
            ASSERT_EQ(memcmp(got.data(), expected.data(), n * sizeof(floatX)), 0) << name;
            for (int i = 1; i < 3; i++) {
                ASSERT_EQ(codes[i], codes[0]) << name;
                ASSERT_EQ(transposed[i], transposed[0]) << name;
                ASSERT_EQ(amax[i], amax[0]) << name;
            }
            ASSERT_GT(amax[0], 2.5f) << name;
        }
    };
    check("gelu_forward", F, false,
          [&](const Output& out) { cpu::activation_forward(ctx_, out, x.data(), N, F, Activation::gelu); });
    check("gelu_backward", F, true,
          [&](const Output& out) { cpu::activation_backward(ctx_, out, y.data(), x.data(), N, F, Activation::gelu); });
    check("swiglu_forward", F, false,
          [&](const Output& out) { cpu::activation_forward(ctx_, out, x.data(), N, F, Activation::swiglu); });
    check("swiglu_backward", 2 * F, true,
          [&](const Output& out) { cpu::activation_backward(ctx_, out, y.data(), x.data(), N, F, Activation::swiglu); });
    const NormParams params = {w.data(), b.data(), F, 1e-5f};
    check("layernorm_forward", F, false, [&](const Output& out) {
        cpu::layernorm_forward(ctx_, out, {mean.data(), rstd.data()}, sum.data(), x.data(), add.data(), params, N);
    });
    check("rmsnorm_forward", F, false, [&](const Output& out) {
        cpu::rmsnorm_forward(ctx_, out, {nullptr, rstd.data()}, nullptr, y.data(), nullptr, params, N);
    });
}

// fp32 sums of K exact products differ from the exact sum by at most K u (sum of magnitudes); the result is rounded once.
TEST_P(Fp8Ops, ProductsAreThoseOfTheDecodedNumbers) {
    const int N = 48, IC = 112, OC = 80;
    const float a = 0.25f, b = 3.0f;
    const auto check = [&](const char* what, auto result, double start, const std::vector<uint8_t>& x, Fp8 fx, size_t x_at,
                           const std::vector<uint8_t>& y, Fp8 fy, size_t y_at, int K, double bias) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < K; k++) {
            const double p = (double)fp8_decode(x[x_at + k], fx) * fp8_decode(y[y_at + k], fy);
            sum += p;
            magnitude += std::fabs(p);
        }
        const double scale = (double)a * b, expected = start + sum * scale + bias;
        const double unit = test::roundoff<decltype(result)>;
        const double bound =
            (K + 4) * 0x1p-24 * (magnitude * scale + std::fabs(bias) + std::fabs(start)) + unit * std::fabs(expected);
        ASSERT_LE(std::fabs((double)(float)result - expected), bound) << what;
    };
    const auto x = codes((size_t)N * IC, Fp8::e4m3, 1), w = codes((size_t)OC * IC, Fp8::e4m3, 2);
    std::vector<floatX> bias(OC), out((size_t)N * OC);
    for (int o = 0; o < OC; o++) bias[o] = (floatX)(0.5f * (float)o);
    for (const floatX* beta : {(const floatX*)nullptr, (const floatX*)bias.data()}) {
        cpu::fp8_linear_forward(ctx_, out.data(), {x.data(), &a}, {w.data(), &b}, beta, N, IC, OC, true);
        for (int n = 0; n < N; n++)
            for (int o = 0; o < OC; o++)
                check("forward", out[(size_t)n * OC + o], 0, x, Fp8::e4m3, (size_t)n * IC, w, Fp8::e4m3, (size_t)o * IC, IC,
                      beta ? (double)(float)beta[o] : 0);
    }
    for (const Fp8 format : formats) {
        const auto dout = codes((size_t)N * OC, format, 3), wt = codes((size_t)IC * OC, Fp8::e4m3, 4);
        std::vector<floatX> dinp((size_t)N * IC);
        cpu::fp8_linear_backward_input(ctx_, dinp.data(), {dout.data(), &a, format}, {wt.data(), &b}, N, IC, OC, false);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < IC; i++)
                check("input", dinp[(size_t)n * IC + i], 0, dout, format, (size_t)n * OC, wt, Fp8::e4m3, (size_t)i * OC, OC, 0);
        const auto dt = codes((size_t)OC * N, format, 5), xt = codes((size_t)IC * N, Fp8::e4m3, 6);
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            std::vector<real> dw((size_t)OC * IC, real(7));
            cpu::fp8_linear_backward_weight(ctx_, dw.data(), {dt.data(), &a, format}, {xt.data(), &b}, N, IC, OC, acc, false);
            for (int o = 0; o < OC; o++)
                for (int i = 0; i < IC; i++)
                    check("weight", dw[(size_t)o * IC + i], acc == Acc::Add ? 7 : 0, dt, format, (size_t)o * N, xt, Fp8::e4m3,
                          (size_t)i * N, N, 0);
        }
    }
}

// The numbers of codes, and amax, of the rows that have values; also in place.
TEST_P(Fp8Ops, NumbersAreThoseOfTheCodes) {
    const int rows = 70, filled = 61, columns = 48;
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    std::vector<floatX> x((size_t)rows * columns, (floatX)INFINITY);
    for (size_t i = 0; i < (size_t)filled * columns; i++) x[i] = (floatX)std::ldexp(normal(random), -(int)(random() % 20));
    x[3] = (floatX)NAN;
    x[70] = (floatX)-9.0f;
    for (size_t i = (size_t)filled * columns; i < x.size(); i++) x[i] = (floatX)1000.0f;
    float amax = 0.5f;
    cpu::absolute_max_of_rows(ctx_, &amax, x.data(), {rows, columns, &filled});
    EXPECT_EQ(amax, 9);
    cpu::absolute_max_of_rows(ctx_, &amax, x.data(), {rows, columns});
    EXPECT_EQ(amax, (float)(floatX)1000.0f);
    for (const Fp8 format : formats) {
        const float scale = 41.3f;
        std::vector<floatX> out(x.size(), (floatX)-7.0f), same = x;
        cpu::fp8_numbers(ctx_, out.data(), x.data(), {rows, columns, &filled}, &scale, format);
        cpu::fp8_numbers(ctx_, same.data(), same.data(), {rows, columns}, &scale, format);
        for (size_t i = 0; i < x.size(); i++) {
            const float expected = fp8_decode(fp8_encode((float)x[i] * scale, format), format);
            if (i == 3) {
                ASSERT_TRUE(std::isnan((float)out[i]) && std::isnan((float)same[i]));
                continue;
            }
            ASSERT_EQ((float)out[i], i < (size_t)filled * columns ? expected : -7.0f) << i;
            ASSERT_EQ((float)same[i], expected) << i;
        }
    }
}

// The products of experts in FP8 have the bits of their products in floatX on the dequantized numbers, which powers of two as
// scales keep exact. An expert without rows, rows that are gathered, and a bias.
TEST_P(Fp8Ops, ExpertsMultiplyTheDequantizedNumbers) {
    const int E = 4, IC = 48, OC = 80, rows = 90, K = 2, slots = 170;
    const int offsets[] = {0, 60, 60, 101, slots};
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    std::vector<int> choices;
    for (int i = 0; i < slots; i++) choices.push_back((int)(random() % (rows * K)));
    const ExpertGroups groups = {offsets, E, slots};
    struct Operand {
        std::vector<floatX> numbers, dequantized;
        float inverse;
    };
    const auto operand = [&](size_t n, Fp8 format, int exponent) {
        Operand o = {{}, {}, std::ldexp(1.0f, exponent)};
        for (size_t i = 0; i < n; i++) {
            const float number = fp8_decode(fp8_encode(normal(random) * fp8_max(format) / 8, format), format);
            o.numbers.push_back((floatX)number);
            o.dequantized.push_back((floatX)(number * o.inverse));
        }
        return o;
    };
    const auto same = [](const auto& a, const auto& b, const char* what) {
        ASSERT_EQ(memcmp(a.data(), b.data(), a.size() * sizeof a[0]), 0) << what;
    };
    const Operand w = operand((size_t)E * OC * IC, Fp8::e4m3, -9);
    std::vector<floatX> bias;
    for (int i = 0; i < E * OC; i++) bias.push_back((floatX)normal(random));
    for (const bool gathered : {false, true}) {
        const auto rows_of = [&](const std::vector<floatX>& x) {
            return gathered ? ExpertRows{x.data(), choices.data(), K} : ExpertRows{x.data()};
        };
        const Operand x = operand((size_t)slots * IC, Fp8::e4m3, -7), dy = operand((size_t)slots * OC, Fp8::e5m2, -20);
        for (const ExpertBias& b : {ExpertBias{}, ExpertBias{bias.data()}}) {
            std::vector<floatX> out((size_t)slots * OC), expected = out;
            cpu::fp8_expert_linear_forward(ctx_, out.data(), rows_of(x.numbers), w.numbers.data(), {&x.inverse, &w.inverse}, b,
                                           groups, IC, OC);
            cpu::expert_linear_forward(ctx_, expected.data(), rows_of(x.dequantized), w.dequantized.data(), b, groups, IC, OC,
                                       Acc::Set);
            same(out, expected, "forward");
        }
        std::vector<floatX> dinp((size_t)slots * IC), expected = dinp;
        cpu::fp8_expert_linear_backward_input(ctx_, dinp.data(), rows_of(dy.numbers), w.numbers.data(),
                                              {&dy.inverse, &w.inverse}, groups, IC, OC);
        cpu::expert_linear_backward_input(ctx_, expected.data(), rows_of(dy.dequantized), w.dequantized.data(), groups, IC, OC,
                                          Acc::Set);
        same(dinp, expected, "backward_input");
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            const int row = OC, count = 2 * OC;  // of two experts, one without rows
            std::vector<real> dw((size_t)count * IC, real(0.25)), expected_dw = dw;
            cpu::fp8_expert_linear_backward_weight(ctx_, {dw.data(), row, count}, rows_of(dy.numbers), {x.numbers.data()},
                                                   {&dy.inverse, &x.inverse}, groups, IC, OC, acc);
            cpu::expert_linear_backward_weight(ctx_, {expected_dw.data(), row, count}, rows_of(dy.dequantized),
                                               {x.dequantized.data()}, groups, IC, OC, acc);
            same(dw, expected_dw, "backward_weight");
            EXPECT_NE(dw.back(), real(0.25));
        }
    }
}

// A linear layer in FP8 compared with double: each factor has an error of at most half a step of its format, relative 2^-4
// for e4m3 and 2^-3 for e5m2 if it is normal after scaling.
TEST_P(Fp8Ops, ALayerIsWithinTheFormatsBound) {
    const int N = 32, IC = 64, OC = 48;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<floatX> x((size_t)N * IC), w((size_t)OC * IC), out((size_t)N * OC);
    for (floatX& v : x) v = (floatX)normal(random);
    for (floatX& v : w) v = (floatX)(0.02f * normal(random));
    float amax[2] = {}, scale[2], inverse[2];
    std::vector<uint8_t> xq(x.size()), wq(w.size());
    cpu::absolute_max(ctx_, &amax[0], x.data(), x.size());
    cpu::absolute_max(ctx_, &amax[1], w.data(), w.size());
    for (int i = 0; i < 2; i++) cpu::set_scale(ctx_, &scale[i], &inverse[i], &amax[i], Fp8::e4m3, 0);
    cpu::quantize(ctx_, {xq.data(), nullptr, &amax[0], &scale[0], Fp8::e4m3}, x.data(), N, IC);
    cpu::quantize(ctx_, {wq.data(), nullptr, &amax[1], &scale[1], Fp8::e4m3}, w.data(), OC, IC);
    cpu::fp8_linear_forward(ctx_, out.data(), {xq.data(), &inverse[0]}, {wq.data(), &inverse[1]}, nullptr, N, IC, OC, false);
    double errors = 0, norms = 0;
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            double sum = 0, bound = 0;
            for (int i = 0; i < IC; i++) {
                const double a = (double)(float)x[(size_t)n * IC + i], b = (double)(float)w[(size_t)o * IC + i];
                // half a step: 2^-4 of the number, at least half of the smallest step, 2^-10 over the scale
                const double ea = std::max(std::fabs(a) * 0x1p-4, 0x1p-10 / scale[0]),
                             eb = std::max(std::fabs(b) * 0x1p-4, 0x1p-10 / scale[1]);
                sum += a * b;
                bound += ea * std::fabs(b) + eb * std::fabs(a) + ea * eb;
            }
            const double error = std::fabs((double)(float)out[(size_t)n * OC + o] - sum);
            ASSERT_LE(error, bound + 0x1p-8 * std::fabs(sum));
            errors += error * error;
            norms += sum * sum;
        }
    EXPECT_LT(std::sqrt(errors / norms), 0x1p-4);  // errors are independent: far below the worst case
    EXPECT_GT(std::sqrt(errors / norms), 0x1p-8);  // and it is really 8 bits
}

// A mixture in FP8 with current scales, as expert_layer.h computes it: its output and gradients are near floatX's, by the
// errors of two products forward and three backward, and are not floatX's.
TEST_P(Fp8Ops, AMixtureIsNearFloatX) {
    test::ExpertLayer l({{2, 40, 5, 2}, 64, 48, {}}, 21);
    const int N = l.N, E = l.E, C = l.C, F = l.F, H = l.H, slots = l.slots;
    l.forward(ctx_);
    l.backward(ctx_);
    struct Numbers {
        std::vector<floatX> x;
        float inverse;
    };
    const auto in_fp8 = [&](const floatX* x, const FilledRows& rows, Fp8 format) {
        Numbers n = {std::vector<floatX>((size_t)rows.rows * (size_t)rows.columns), 0};
        float amax = 0, scale = 0;
        cpu::absolute_max_of_rows(ctx_, &amax, x, rows);
        cpu::set_scale(ctx_, &scale, &n.inverse, &amax, format, 0);
        cpu::fp8_numbers(ctx_, n.x.data(), x, rows, &scale, format);
        return n;
    };
    const auto near = [&](const auto& got, const auto& expected, const auto& before, double most, const char* what) {
        double error = 0, norm = 0;
        for (size_t i = 0; i < got.size(); i++) {
            const double x = (double)(float)expected[i] - (double)before(i), d = (double)(float)got[i] - x;
            error += d * d;
            norm += x * x;
        }
        EXPECT_LT(std::sqrt(error / norm), most) << what;
        EXPECT_GT(std::sqrt(error / norm), 0.02) << what;
    };
    const auto zero = [](size_t) { return 0.0f; };
    const auto of = [&](int rows, int columns) { return std::vector<floatX>((size_t)rows * (size_t)columns); };
    const auto slot_rows = [&](int columns) { return FilledRows{slots, columns, l.offsets.data() + E}; };
    const ExpertGroups groups = l.groups();
    const Numbers x = in_fp8(l.x.data(), {N, C}, Fp8::e4m3), dout = in_fp8(l.dout.data(), {N, C}, Fp8::e5m2),
                  fc1 = in_fp8(l.fc1.data(), {E * H, C}, Fp8::e4m3), fc2 = in_fp8(l.fc2.data(), {E * C, F}, Fp8::e4m3);
    std::vector<floatX> h = of(slots, H), act = of(slots, F), y = of(slots, C), out = of(N, C), dact = of(slots, F),
                        dh = of(slots, H), dx_slots = of(slots, C), dx = of(N, C);
    std::vector<real> drouting((size_t)N * (size_t)l.K), dfc1(l.fc1.size()), dfc2(l.fc2.size());
    cpu::fp8_expert_linear_forward(ctx_, h.data(), l.gathered(x.x), fc1.x.data(), {&x.inverse, &fc1.inverse}, {}, groups, C, H);
    cpu::expert_activation_forward(ctx_, act.data(), h.data(), l.r, l.k.shape, F, l.k.activation);
    const Numbers a = in_fp8(act.data(), slot_rows(F), Fp8::e4m3);
    cpu::fp8_expert_linear_forward(ctx_, y.data(), {a.x.data()}, fc2.x.data(), {&a.inverse, &fc2.inverse}, {}, groups, F, C);
    cpu::expert_combine(ctx_, out.data(), y.data(), l.r, l.k.shape, C);
    near(out, l.out, zero, 0.1, "out");

    cpu::fp8_expert_linear_backward_input(ctx_, dact.data(), l.gathered(dout.x), fc2.x.data(), {&dout.inverse, &fc2.inverse},
                                          groups, F, C);
    cpu::fp8_expert_linear_backward_weight(ctx_, {dfc2.data(), 0, E * C}, l.gathered(dout.x), {a.x.data()},
                                           {&dout.inverse, &a.inverse}, groups, F, C, Acc::Set);
    cpu::expert_activation_backward(ctx_, dh.data(), drouting.data(), dact.data(), h.data(), l.r, l.k.shape, F, l.k.activation);
    const Numbers d = in_fp8(dh.data(), slot_rows(H), Fp8::e5m2);
    cpu::fp8_expert_linear_backward_input(ctx_, dx_slots.data(), {d.x.data()}, fc1.x.data(), {&d.inverse, &fc1.inverse}, groups,
                                          C, H);
    cpu::fp8_expert_linear_backward_weight(ctx_, {dfc1.data(), 0, E * H}, {d.x.data()}, l.gathered(x.x),
                                           {&d.inverse, &x.inverse}, groups, C, H, Acc::Set);
    cpu::expert_combine(ctx_, dx.data(), dx_slots.data(), l.r, l.k.shape, C);
    near(
        dfc2, l.dfc2.values(), [&](size_t i) { return l.dfc2_0[i]; }, 0.15, "dfc2");
    near(
        dfc1, l.dfc1.values(), [&](size_t i) { return l.dfc1_0[i]; }, 0.2, "dfc1");
    near(dx, l.dx_experts, zero, 0.2, "dx");
    near(drouting, l.drouting.values(), zero, 0.2, "drouting");
}

}  // namespace test_fp8
