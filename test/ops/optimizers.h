// Tests of AdamW, Lion, averages and bf16 gradients, and of Muon, for op_tests.h.
#pragma once
#include "inputs.h"

// ---- optimizer ------------------------------------------------------------------------------------------------------------
TEST(SumOfSquares, AgainstDoubleAndNonFinite) {
    backend::Ctx ctx(2);
    Rng rng(12);
    for (const size_t n : {0, 1, 17, 4095, 4097, 100003}) {
        if (!thorough && n != 4097) continue;
        const Input<real> x(rng.normals<real>(n));
        double expected = 0;
        for (const real value : x.host()) expected += (double)value * value;
        // Fixed blocks of 4096 in 16 parts: 256 terms each in fp32.
        EXPECT_NEAR(backend::sum_of_squares(ctx, x.p(), n), expected, (256 + 2) * u * expected);
        Buffer<double> sum(Doubles{1.5}, "sum");
        backend::add_squares(ctx, sum.p(), x.p(), n);
        EXPECT_EQ(sum.get()[0], 1.5 + backend::sum_of_squares(ctx, x.p(), n));
        std::vector<bf16> moments(x.host().begin(), x.host().end());
        double of_moments = 0;
        for (const bf16 value : moments) of_moments += as_double(value) * as_double(value);
        Buffer<double> second(Doubles{1.5}, "sum");
        Buffer<bf16> in_bf16(moments, "moments");
        backend::add_squares(ctx, second.p(), Elements(in_bf16.p()), n);
        EXPECT_NEAR(second.get()[0], 1.5 + of_moments, (256 + 2) * u * of_moments);
        for (const double bad : {not_a_number, infinity, -infinity})
            for (const size_t where : {(size_t)0, n / 2, n - 1}) {
                if (n == 0) continue;
                std::vector<real> y = x.host();
                y[where] = (real)bad;
                EXPECT_FALSE(std::isfinite(backend::sum_of_squares(ctx, Input<real>(y).p(), n)))
                    << bad << " at " << where << " of " << n;
            }
    }
}

TEST(WordSum, AgainstItsDefinitionAndEveryFlippedBit) {
    backend::Ctx ctx(2);
    Rng rng(14);
    for (const size_t n : {0, 1, 17, 8193, 300007}) {
        if (!thorough && n > 8193) continue;
        std::vector<float> x = rng.normals<float>(n);
        const size_t first = 1000 * n;
        uint64_t expected = 0;
        for (size_t i = 0; i < n; i++) {
            uint32_t word;
            memcpy(&word, &x[i], sizeof word);
            expected += (uint64_t)word * (uint32_t)(2 * (first + i) + 1);
        }
        EXPECT_EQ(backend::word_sum(ctx, Input<float>(x).p(), n, first), expected) << n;
        for (int bit = 0; n > 0 && bit < 32; bit += n == 17 ? 1 : 31) {
            std::vector<float> y = x;
            uint32_t word;
            memcpy(&word, &y[n / 2], sizeof word);
            word ^= 1u << bit;
            memcpy(&y[n / 2], &word, sizeof word);
            EXPECT_NE(backend::word_sum(ctx, Input<float>(y).p(), n, first), expected) << bit << " of " << n;
        }
    }
}

TEST(AdamW, FiftyStepsAgainstDouble) {
    backend::Ctx ctx(2);
    Rng rng(13);
    const double beta1 = (real)0.9, beta2 = (real)0.95, eps = (real)1e-8, decay = (real)0.1, grad_scale = (real)0.25;
    for (const size_t n : {1, 1003}) {
        const std::vector<real> start = rng.normals<real>(n, 0.1);
        std::vector<floatX> upper(n);
        std::vector<LowerHalf> half(n);
        for (size_t i = 0; i < n; i++) store_weight(upper.data(), half.data(), i, start[i]);
        Buffer<floatX> param(upper, "param");
        Buffer<LowerHalf> lower(half, "lower halves");
        Buffer<real> m(std::vector<real>(n, 0), "m"), v(std::vector<real>(n, 0), "v");
        Doubles w = doubles(start), md(n), vd(n), m_allowed(n), v_allowed(n), w_allowed(n);
        for (int step = 1; step <= (thorough ? 50 : 3); step++) {
            const double lr = (real)(1e-2 / step);
            std::vector<real> gradient = rng.normals<real>(n);
            gradient[0] = 0;  // zero gradient: the update must be only the decay, not 0/0
            const Input<real> grad(gradient);
            backend::adamw(ctx, param.p(), has_lower_halves ? lower.p() : nullptr, m.p(), v.p(), grad.p(), n,
                           {(real)lr, (real)beta1, (real)beta2, (real)eps, (real)decay, (real)grad_scale, step}, {});
            const double c1 = 1 - std::pow(beta1, step), c2 = 1 - std::pow(beta2, step);
            for (size_t i = 0; i < n; i++) {
                const double g = grad_scale * (double)grad[i];
                md[i] = beta1 * md[i] + (1 - beta1) * g;
                vd[i] = beta2 * vd[i] + (1 - beta2) * g * g;
                const double root = std::sqrt(vd[i] / c2) + eps, update = md[i] / c1 / root;
                // Errors: those in m and v shrink by beta and gain four roundings; the update has theirs, relative to its own
                // size, and eight roundings; the weight adds lr times that and two roundings.
                m_allowed[i] = beta1 * m_allowed[i] + 4 * u * (std::abs(md[i]) + std::abs(g));
                v_allowed[i] = beta2 * v_allowed[i] + 4 * u * (vd[i] + g * g);
                const double update_error = m_allowed[i] / c1 / root +
                                            std::abs(update) * (vd[i] > 0 ? v_allowed[i] / vd[i] : 0) +
                                            8 * u * std::abs(update);
                w_allowed[i] += lr * (update_error + 4 * u * decay * std::abs(w[i])) + 2 * u * std::abs(w[i]);
                w[i] -= lr * (update + decay * w[i]);
            }
        }
        expect_close(m.get(), md, m_allowed, "m");
        expect_close(v.get(), vd, v_allowed, "v");
        const std::vector<real> weights = whole_weights(param.get(), lower.get());
        expect_close(weights, w, w_allowed, "weights");
        expect_close(param.get(), doubles(weights), 0, roundoff<floatX>, "param is the rounded weight");
    }
}

// Gradients stay away from 0 by a hundredth of the momentum's size, so that the sign of no update depends on rounding.
TEST(Lion, TwentyStepsAgainstDouble) {
    backend::Ctx ctx(2);
    Rng rng(18);
    const double beta1 = (real)0.9, beta2 = (real)0.99, decay = (real)0.1, grad_scale = (real)0.25;
    for (const size_t n : {1, 1003}) {
        const std::vector<real> start = rng.normals<real>(n, 0.1);
        std::vector<floatX> upper(n);
        std::vector<LowerHalf> half(n);
        for (size_t i = 0; i < n; i++) store_weight(upper.data(), half.data(), i, start[i]);
        Buffer<floatX> param(upper, "param");
        Buffer<LowerHalf> lower(half, "lower halves");
        Buffer<real> m(std::vector<real>(n, 0), "m");
        Doubles w = doubles(start), md(n), m_allowed(n), w_allowed(n);
        for (int step = 1; step <= 20; step++) {
            const double lr = (real)(1e-2 / step);
            std::vector<real> gradient = rng.normals<real>(n);
            for (size_t i = 0; i < n; i++) {
                const auto direction = [&] { return beta1 * md[i] + (1 - beta1) * grad_scale * (double)gradient[i]; };
                while (std::abs(direction()) < 1e-3) gradient[i] += real(0.25);
            }
            gradient[0] = 0;  // no gradient so far: the update is only the decay
            const Input<real> grad(gradient);
            backend::lion(ctx, param.p(), has_lower_halves ? lower.p() : nullptr, m.p(), grad.p(), n,
                          {(real)lr, (real)beta1, (real)beta2, 0, (real)decay, (real)grad_scale, step}, {});
            for (size_t i = 0; i < n; i++) {
                const double g = grad_scale * (double)grad[i], direction = beta1 * md[i] + (1 - beta1) * g;
                const double sign = direction > 0 ? 1 : direction < 0 ? -1 : 0;
                w_allowed[i] += 4 * u * (lr * (1 + decay * std::abs(w[i])) + std::abs(w[i]));
                w[i] -= lr * (sign + decay * w[i]);
                m_allowed[i] = beta2 * m_allowed[i] + 4 * u * (std::abs(md[i]) + std::abs(g));
                md[i] = beta2 * md[i] + (1 - beta2) * g;
            }
        }
        expect_close(m.get(), md, m_allowed, "m");
        const std::vector<real> weights = whole_weights(param.get(), lower.get());
        expect_close(weights, w, w_allowed, "weights");
        expect_close(param.get(), doubles(weights), 0, roundoff<floatX>, "param is the rounded weight");
    }
}

// The average against double; after exchanging it with the weights and back, both have their previous bits.
TEST(AverageOfWeights, AgainstDoubleAndExchangedExactly) {
    backend::Ctx ctx(2);
    Rng rng(15);
    const double keep = (real)0.9;
    for (const size_t n : {1, 1003}) {
        const std::vector<real> w = rng.normals<real>(n), before = rng.normals<real>(n);
        std::vector<floatX> upper(n);
        std::vector<LowerHalf> half(n);
        for (size_t i = 0; i < n; i++) store_weight(upper.data(), half.data(), i, w[i]);
        Buffer<floatX> param(upper, "param");
        Buffer<LowerHalf> lower(half, "lower halves");
        Buffer<real> average(before, "average"), fresh(std::vector<real>(n, 0), "fresh");
        LowerHalf* const low = has_lower_halves ? lower.p() : nullptr;
        backend::average_weights(ctx, average.p(), param.p(), low, n, (real)keep);
        Doubles expected(n), allowed(n);
        for (size_t i = 0; i < n; i++) {
            expected[i] = keep * before[i] + (1 - keep) * w[i];
            allowed[i] = 4 * u * (std::abs((double)before[i]) + std::abs((double)w[i]));
        }
        expect_close(average.get(), expected, allowed, "average");
        const std::vector<real> kept = average.get();
        backend::swap_weights(ctx, average.p(), param.p(), low, n);
        EXPECT_EQ(whole_weights(param.get(), lower.get()), kept);
        EXPECT_EQ(average.get(), w);
        backend::average_weights(ctx, fresh.p(), param.p(), low, n, 0);
        EXPECT_EQ(fresh.get(), kept) << "an average that begins";
        backend::swap_weights(ctx, average.p(), param.p(), low, n);
        EXPECT_EQ(whole_weights(param.get(), lower.get()), w);
        EXPECT_EQ(average.get(), kept);
    }
}

// Elements that are updated or added to, in whole tensors and in parts of their rows.
std::vector<Rounding> places_in_tensors() {
    std::vector<Rounding> places(6);
    places[1].first = 4096;
    places[2].first = 4098;
    places[3].first = (1ull << 34) - 64;  // 3: at the end of a word of the counter
    places[4].first = 1024;
    places[4].cols = 192;
    places[4].whole_cols = 768;
    places[4].at = 64;
    places[5].first = 21;
    places[5].cols = 7;
    places[5].whole_cols = 21;
    places[5].at = 3;
    for (uint32_t i = 0; i < places.size(); i++) {
        places[i].key = rounding_key(1234, 7);
        places[i].tensor = 5 + i;
    }
    return places;
}
// The random number of one element, by its place in the whole tensor.
uint32_t random_of(const Rounding& r, size_t i) {
    const size_t at = r.at + i;
    const uint64_t place = r.cols ? r.first + at / r.cols * r.whole_cols + at % r.cols : r.first + i;
    return random_bits(r.key, RngPurpose::rounding, r.tensor, place / 4)[place % 4];
}

// Numbers of few bits and factors of few bits: nothing is rounded on the way to the moments, for any order or fused
// multiply-adds in a backend, and the moments must have the bits that elements.h defines.
TEST(AdamW, Bf16MomentsAreRoundedByTheElementsPlace) {
    backend::Ctx ctx(2);
    Rng rng(16);
    const size_t most = thorough ? 20003 : 203;
    for (const Rounding& r : places_in_tensors()) {
        for (const size_t n : {(size_t)1, (size_t)67, most}) {
            std::vector<real> m(n), v(n), gradient(n);
            for (size_t i = 0; i < n; i++) {
                m[i] = (real)(rng.integers(1, -127, 128)[0] / 64.0);
                v[i] = (real)(rng.integers(1, 0, 128)[0] / 64.0);
                gradient[i] = (real)(rng.integers(1, -64, 65)[0] / 8.0);
            }
            const std::vector<floatX> start = rng.normals<floatX>(n);
            const auto bf16_of = [&](const std::vector<real>& x) { return std::vector<bf16>(x.begin(), x.end()); };
            const Input<real> grad(gradient);  // representable in bf16
            const Input<bf16> grad_bf16(bf16_of(gradient));
            std::vector<real>
                weights;  // with all in fp32, then with moments in bf16, one of them and both, then with gradients
            for (int in_bf16 = 0; in_bf16 < 8; in_bf16++) {
                Buffer<floatX> param(start, "param");
                Buffer<LowerHalf> lower(std::vector<LowerHalf>(n, 0), "lower halves");
                Buffer<real> m_real(m, "m"), v_real(v, "v");
                Buffer<bf16> m_bf16(bf16_of(m), "m"), v_bf16(bf16_of(v), "v");
                backend::adamw(ctx, param.p(), has_lower_halves ? lower.p() : nullptr,
                               in_bf16 & 1 ? Elements(m_bf16.p()) : Elements(m_real.p()),
                               in_bf16 & 2 ? Elements(v_bf16.p()) : Elements(v_real.p()),
                               in_bf16 & 4 ? Elements(grad_bf16.p()) : Elements(grad.p()), n,
                               {real(0.01), real(0.875), real(0.75), real(1e-8), real(0.1), real(0.5), 3}, r);
                const std::vector<real> updated = whole_weights(param.get(), lower.get());
                if (in_bf16 == 0) weights = updated;
                expect_close(updated, doubles(weights), 16 * u, 4 * u, "weights");
                const auto ms = m_bf16.get(), vs = v_bf16.get();
                for (size_t i = 0; i < n; i++) {
                    const uint32_t random = random_of(r, i);
                    const float g = 0.5f * (float)gradient[i];
                    const float exact[] = {0.875f * (float)m[i] + 0.125f * g, 0.75f * (float)v[i] + 0.25f * g * g};
                    for (const int k : {0, 1}) {
                        if (!(in_bf16 >> k & 1)) continue;
                        uint32_t bits;
                        memcpy(&bits, &exact[k], sizeof bits);
                        ASSERT_EQ((k ? vs : ms)[i].bits, (bits + (k ? random >> 16 : random & 0xffff)) >> 16)
                            << "element " << i << " of " << n << " from " << r.first << ", " << (k ? "v" : "m");
                    }
                }
            }
        }
    }
}

// As with AdamW, numbers of few bits; gradients are whole, so that no update's sign depends on rounding. A NaN reaches the
// weight.
TEST(Lion, Bf16MomentumIsRoundedByTheElementsPlace) {
    backend::Ctx ctx(2);
    Rng rng(19);
    for (const Rounding& r : places_in_tensors())
        for (const size_t n : {(size_t)1, (size_t)67, (size_t)203}) {
            std::vector<real> m(n), gradient(n);
            for (size_t i = 0; i < n; i++) {
                m[i] = (real)(rng.integers(1, -127, 128)[0] / 64.0);
                gradient[i] = (real)rng.integers(1, -8, 9)[0];
            }
            gradient[n / 2] = not_a_number;
            const std::vector<floatX> start = rng.normals<floatX>(n);
            const Input<real> grad(gradient);
            const Input<bf16> grad_bf16(std::vector<bf16>(gradient.begin(), gradient.end()));
            std::vector<real> weights;  // with all in fp32, then with the momentum in bf16, the gradients, and both
            for (int in_bf16 = 0; in_bf16 < 4; in_bf16++) {
                Buffer<floatX> param(start, "param");
                Buffer<LowerHalf> lower(std::vector<LowerHalf>(n, 0), "lower halves");
                Buffer<real> m_real(m, "m");
                Buffer<bf16> m_bf16(std::vector<bf16>(m.begin(), m.end()), "m");
                backend::lion(ctx, param.p(), has_lower_halves ? lower.p() : nullptr,
                              in_bf16 & 1 ? Elements(m_bf16.p()) : Elements(m_real.p()),
                              in_bf16 & 2 ? Elements(grad_bf16.p()) : Elements(grad.p()), n,
                              {real(0.01), real(0.875), real(0.75), 0, real(0.1), real(0.5), 3}, r);
                std::vector<real> updated = whole_weights(param.get(), lower.get());
                EXPECT_TRUE(std::isnan((float)updated[n / 2]));
                updated[n / 2] = 0;
                if (in_bf16 == 0) weights = updated;
                expect_close(updated, doubles(weights), 16 * u, 4 * u, "weights");
                const std::vector<bf16> rounded = m_bf16.get();
                for (size_t i = 0; i < n && in_bf16 & 1; i++) {
                    if (i == n / 2) continue;
                    const float exact = 0.75f * (float)m[i] + 0.25f * (0.5f * (float)gradient[i]);
                    uint32_t bits;
                    memcpy(&bits, &exact, sizeof bits);
                    ASSERT_EQ(rounded[i].bits, (bits + (random_of(r, i) & 0xffff)) >> 16) << i << " of " << n;
                }
            }
        }
}

// Sets to the nearest bf16, ties to even; adds with rounding by the element's place.
TEST(Accumulate, RoundsOnceByTheElementsPlace) {
    backend::Ctx ctx(2);
    Rng rng(17);
    const size_t most = thorough ? 20003 : 203;
    const auto bits_of = [](float x) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        return bits;
    };
    for (const Rounding& r : places_in_tensors())
        for (const size_t n : {(size_t)0, (size_t)1, (size_t)67, most}) {
            std::vector<real> summand = rng.normals<real>(n);
            const std::vector<bf16> start = rng.normals<bf16>(n);
            const float odd[] = {0x1.01p0f, 0x1.03p0f, -0x1.01p0f, 0.0f, -0.0f, INFINITY, 0x1.fffffep127f};
            for (size_t i = 0; i < std::min(n, std::size(odd)); i++) summand[n - 1 - i] = odd[i];
            if (n > 10) summand[0] = not_a_number;
            const Input<real> x(summand);
            for (const Acc acc : {Acc::Set, Acc::Add}) {
                Buffer<bf16> sum(start, "sum");
                backend::accumulate(ctx, sum.p(), x.p(), n, acc, r);
                const std::vector<bf16> result = sum.get();
                for (size_t i = 0; i < n; i++) {
                    const float exact = acc == Acc::Add ? (float)start[i] + (float)summand[i] : (float)summand[i];
                    const uint16_t expected = std::isnan(exact) ? 0x7fff
                                              : acc == Acc::Set ? bf16(exact).bits
                                                                : (bits_of(exact) + (random_of(r, i) & 0xffff)) >> 16;
                    ASSERT_EQ(result[i].bits, expected)
                        << "element " << i << " of " << n << " from " << r.first << ", " << exact;
                }
            }
        }
}

// 512 summands of 2^-10, each a quarter of the amount that rounding to the nearest would lose next to 1.
TEST(Accumulate, SmallSummandsAreNotLost) {
    ASSERT_EQ((float)bf16(1.0f + 0x1p-10f), 1.0f);
    backend::Ctx ctx(2);
    const size_t n = thorough ? 20000 : 400;
    const int summands = 512;
    const Input<real> x(std::vector<real>(n, 0x1p-10f));
    Buffer<bf16> sum(std::vector<bf16>(n, 1.0f), "sum");
    for (int k = 0; k < summands; k++) {
        Rounding r;
        r.key = rounding_key(5, k, RngPurpose::gradients);
        backend::accumulate(ctx, sum.p(), x.p(), n, Acc::Add, r);
    }
    double mean = 0;
    for (const bf16 value : sum.get()) mean += as_double(value) / (double)n;
    // A summand's error has the standard deviation sqrt(p (1 - p)) 2^-7, p = 1/8: five times the mean's.
    EXPECT_NEAR(mean, 1 + summands * 0x1p-10, 5 * std::sqrt(7.0 / 64 * summands / (double)n) * 0x1p-7);
}

// ---- Muon -----------------------------------------------------------------------------------------------------------------
const size_t muon_sizes[] = {1, 67, thorough ? (size_t)20003 : (size_t)203};

// Momentum of few bits: exp_avg is rounded only to bf16, by the element's place.
TEST(Muon, MomentumIsNesterovsAndItsBf16IsRoundedByTheElementsPlace) {
    backend::Ctx ctx(2);
    Rng rng(21);
    for (const Rounding& r : places_in_tensors())
        for (const size_t n : muon_sizes) {
            std::vector<real> m(n), gradient(n);
            for (size_t i = 0; i < n; i++) {
                m[i] = (real)(rng.integers(1, -127, 128)[0] / 64.0);
                gradient[i] = (real)(rng.integers(1, -64, 65)[0] / 8.0);
            }
            const Input<real> grad(gradient);
            const Input<bf16> grad_bf16(std::vector<bf16>(gradient.begin(), gradient.end()));
            for (int in_bf16 = 0; in_bf16 < 4; in_bf16++) {
                Buffer<real> m_real(m, "m");
                Buffer<bf16> m_bf16(std::vector<bf16>(m.begin(), m.end()), "m");
                Buffer<floatX> update(n, "update");
                backend::muon_momentum(ctx, update.p(), in_bf16 & 1 ? Elements(m_bf16.p()) : Elements(m_real.p()),
                                       in_bf16 & 2 ? Elements(grad_bf16.p()) : Elements(grad.p()), n, {real(0.875), real(0.5)},
                                       r);
                const auto ms = m_real.get();
                const auto rounded = m_bf16.get();
                const auto updates = update.get();
                for (size_t i = 0; i < n; i++) {
                    const float share = 0.125f * 0.5f * (float)gradient[i], mean = 0.875f * (float)m[i] + share;
                    uint32_t bits;
                    memcpy(&bits, &mean, sizeof bits);
                    if (in_bf16 & 1) ASSERT_EQ(rounded[i].bits, (bits + (random_of(r, i) & 0xffff)) >> 16) << i << " of " << n;
                    else ASSERT_EQ((float)ms[i], mean) << i << " of " << n;
                    ASSERT_NEAR(as_double(updates[i]), (double)share + 0.875 * (double)mean,
                                rounding * (std::abs((double)share) + std::abs((double)mean)));
                }
            }
        }
}

TEST(Muon, NumbersAreDividedByTheirNorm) {
    backend::Ctx ctx(2);
    Rng rng(22);
    for (const size_t n : muon_sizes)
        for (const double norm : {3.0, 1e-3, 1e-9}) {  // the last one is below the smallest divisor
            const std::vector<floatX> values = rng.normals<floatX>(n);
            Buffer<floatX> x(values, "x");
            const Input<double> squares(std::vector<double>{norm * norm});
            backend::divide_by_norm(ctx, x.p(), n, squares.p());
            Doubles expected = doubles(values);
            for (double& value : expected) value /= std::max(norm, 1e-7);
            expect_close(x.get(), expected, 0, rounding + 4 * u, "x");
        }
}

TEST(Muon, PolynomialOfASquareMatrix) {
    backend::Ctx ctx(2);
    Rng rng(23);
    for (const int n : {1, 2, 3, 7, 8, 33, thorough ? 150 : 40}) {
        const std::vector<floatX> squares = rng.normals<floatX>((size_t)(n * n));
        const Input<floatX> gram(rng.normals<floatX>((size_t)(n * n)));
        Buffer<floatX> square(squares, "square");
        backend::newton_schulz_polynomial(ctx, square.p(), gram.p(), n);
        Doubles expected, allowed;
        for (size_t i = 0; i < squares.size(); i++) {
            const double a = i % (size_t)(n + 1) == 0 ? 3.4445 : 0, b = -4.7750 * as_double(gram[i]),
                         c = 2.0315 * as_double(squares[i]);
            expected.push_back(a + b + c);
            allowed.push_back(rounding * std::abs(a + b + c) + 8 * u * (a + std::abs(b) + std::abs(c)));
        }
        expect_close(square.get(), expected, allowed, "square");
    }
}

// Two steps: rows of all sizes, one of them zero, get about the same size, and the whole has the norm of an orthogonal matrix.
TEST(Muon, NeuronsAreDividedByTheRootOfTheirSecondMoment) {
    backend::Ctx ctx(2);
    Rng rng(24);
    for (const auto& [rows, cols] : {std::pair(1, 1), {3, 5}, {70, 33}, {33, thorough ? 1031 : 70}}) {
        std::vector<floatX> values = rng.normals<floatX>((size_t)(rows * cols));
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++)
                values[(size_t)(r * cols + c)] =
                    from_double<floatX>(as_double(values[(size_t)(r * cols + c)]) * (rows > 1 ? r : 1));
        Buffer<real> second_moment(std::vector<real>((size_t)rows, 0), "v");
        Doubles v((size_t)rows);
        for (int step = 0; step < 2; step++) {
            Buffer<floatX> x(values, "x");
            backend::normalize_neurons(ctx, x.p(), second_moment.p(), rows, cols, real(0.75));
            Doubles expected = doubles(values);
            double total = 0;
            for (int r = 0; r < rows; r++) {
                double mean = 0;
                for (int c = 0; c < cols; c++)
                    mean += expected[(size_t)(r * cols + c)] * expected[(size_t)(r * cols + c)] / cols;
                v[(size_t)r] = 0.75 * v[(size_t)r] + 0.25 * mean;
                for (int c = 0; c < cols; c++) {
                    double& value = expected[(size_t)(r * cols + c)];
                    value /= std::sqrt(v[(size_t)r]) + 1e-10;
                    total += value * value;
                }
            }
            for (double& value : expected) value *= std::sqrt(std::min(rows, cols) / total);
            // Sums of squares in at least 16 parts, as in norm_reference.
            const double s = ((rows + cols) / 16.0 + 20) * u;
            expect_close(x.get(), expected, 0, rounding + s, "x");
            expect_close(second_moment.get(), v, 0, s, "v");
        }
        // Nothing to update.
        Buffer<floatX> zero(std::vector<floatX>((size_t)(rows * cols), from_double<floatX>(0)), "zero");
        Buffer<real> none(std::vector<real>((size_t)rows, 0), "v");
        backend::normalize_neurons(ctx, zero.p(), none.p(), rows, cols, real(0.75));
        for (const floatX value : zero.get()) ASSERT_EQ(as_double(value), 0);
    }
}

TEST(Muon, UpdateIsAppliedToTheFp32Weights) {
    backend::Ctx ctx(2);
    Rng rng(25);
    for (const size_t n : muon_sizes) {
        const std::vector<real> start = rng.normals<real>(n, 0.1);
        std::vector<floatX> upper(n);
        std::vector<LowerHalf> half(n);
        for (size_t i = 0; i < n; i++) store_weight(upper.data(), half.data(), i, start[i]);
        Buffer<floatX> param(upper, "param");
        Buffer<LowerHalf> lower(half, "lower halves");
        const Input<floatX> update(rng.normals<floatX>(n));
        backend::apply_update(ctx, param.p(), has_lower_halves ? lower.p() : nullptr, update.p(), n, real(0.0625), real(0.125));
        Doubles expected;
        for (size_t i = 0; i < n; i++) expected.push_back(0.875 * (double)start[i] - 0.0625 * as_double(update[i]));
        expect_close(whole_weights(param.get(), lower.get()), expected, 2 * u, 4 * u, "weights");
    }
}

// The same for moments in 8 bits, by the neighbors of the exact number in the format and the fraction of the distance to the
// upper one.
template <class Code>
uint8_t drawn_code(float exact, uint32_t random) {
    const auto number = [](uint32_t code) {
        Code c;
        c.bits = (uint8_t)code;
        return (double)(float)c;
    };
    const double size = std::abs((double)exact);
    uint32_t code = 0;
    while (code + 1 < Code::nan && number(code + 1) <= size) code++;
    const double share = (size - number(code)) / (number(code + 1) - number(code));
    code += code + 1 < Code::nan && share * 65536 + (double)random >= 65536;
    return (uint8_t)(code | (exact < 0 ? 0x80u : 0u));
}
TEST(AdamW, EightBitMomentsAreRoundedByTheElementsPlace) {
    backend::Ctx ctx(2);
    Rng rng(18);
    const size_t most = thorough ? 20003 : 203;
    for (const Rounding& r : places_in_tensors()) {
        for (const size_t n : {(size_t)1, (size_t)67, most}) {
            std::vector<signed8> m(n);
            std::vector<unsigned8> v(n);
            std::vector<real> gradient(n);
            for (size_t i = 0; i < n; i++) {
                m[i] = (float)(rng.integers(1, -127, 128)[0] / 64.0);
                v[i] = (float)(rng.integers(1, 0, 128)[0] / 64.0);
                gradient[i] = (real)(rng.integers(1, -64, 65)[0] / 8.0);
            }
            const auto wide = [](const auto& x) {
                std::vector<real> w;
                for (const auto& value : x) w.push_back((real)(float)value);
                return w;
            };
            const Input<real> grad(gradient);
            const std::vector<floatX> start = rng.normals<floatX>(n);
            std::vector<real> weights;  // with all in fp32, then with one moment or both in 8 bits
            for (int in_8_bits = 0; in_8_bits < 4; in_8_bits++) {
                Buffer<floatX> param(start, "param");
                Buffer<LowerHalf> lower(std::vector<LowerHalf>(n, 0), "lower halves");
                Buffer<real> m_real(wide(m), "m"), v_real(wide(v), "v");
                Buffer<signed8> m_8(m, "m");
                Buffer<unsigned8> v_8(v, "v");
                backend::adamw(ctx, param.p(), has_lower_halves ? lower.p() : nullptr,
                               in_8_bits & 1 ? Elements(m_8.p()) : Elements(m_real.p()),
                               in_8_bits & 2 ? Elements(v_8.p()) : Elements(v_real.p()), grad.p(), n,
                               {real(0.01), real(0.875), real(0.75), real(1e-8), real(0.1), real(0.5), 3}, r);
                const std::vector<real> updated = whole_weights(param.get(), lower.get());
                if (in_8_bits == 0) weights = updated;
                expect_close(updated, doubles(weights), 16 * u, 4 * u, "weights");
                const auto ms = m_8.get();
                const auto vs = v_8.get();
                for (size_t i = 0; i < n; i++) {
                    const uint32_t random = random_of(r, i);
                    const float g = 0.5f * (float)gradient[i];
                    if (in_8_bits & 1) {
                        ASSERT_EQ(ms[i].bits, drawn_code<signed8>(0.875f * (float)m[i] + 0.125f * g, random & 0xffff)) << i;
                    }
                    if (in_8_bits & 2) {
                        ASSERT_EQ(vs[i].bits, drawn_code<unsigned8>(0.75f * (float)v[i] + 0.25f * g * g, random >> 16)) << i;
                    }
                }
            }
        }
    }
}
TEST(SumOfSquares, OfEightBits) {
    backend::Ctx ctx(2);
    Rng rng(19);
    std::vector<unsigned8> x(4103);
    double expected = 1.5;
    for (unsigned8& value : x) {
        value = (float)std::abs(rng.normal());
        expected += (double)(float)value * (double)(float)value;
    }
    Buffer<double> sum(Doubles{1.5}, "sum");
    Buffer<unsigned8> codes(x, "moments");
    backend::add_squares(ctx, sum.p(), Elements(codes.p()), x.size());
    EXPECT_NEAR(sum.get()[0], expected, (256 + 2) * u * expected);
}

// 0.999 v + 0.001 g^2 with v = 1 and g^2 = 0.9: rounded to the nearest bf16, v would be 1 for ever.
TEST(AdamW, Bf16MomentsMoveAsTheirExpectedValues) {
    ASSERT_EQ((float)bf16(0.999f + 0.001f * 0.9f), 1.0f);
    backend::Ctx ctx(2);
    const size_t n = thorough ? 20000 : 400;
    const int steps = 100;
    const Input<real> grad(std::vector<real>(n, (real)std::sqrt(0.9)));
    Buffer<floatX> param(std::vector<floatX>(n, 0), "param");
    Buffer<LowerHalf> lower(std::vector<LowerHalf>(n, 0), "lower halves");
    Buffer<bf16> m(std::vector<bf16>(n, 1.0f), "m"), v(std::vector<bf16>(n, 1.0f), "v");
    for (int step = 1; step <= steps; step++) {
        Rounding r;
        r.key = rounding_key(5, step);
        backend::adamw(ctx, param.p(), has_lower_halves ? lower.p() : nullptr, m.p(), v.p(), grad.p(), n,
                       {real(0), real(0.999), real(0.999), real(1e-8), real(0), real(1), step}, r);
    }
    // A step's error has the standard deviation of at most half the distance of two bf16 below 1; five times the mean's.
    const double left = std::pow(0.999, steps), allowed = 5 * 0x1p-9 * std::sqrt(steps / (double)n);
    const auto mean = [&](const std::vector<bf16>& x) {
        double sum = 0;
        for (const bf16 value : x) sum += as_double(value);
        return sum / (double)n;
    };
    EXPECT_NEAR(mean(v.get()), 0.9 + 0.1 * left, allowed);
    EXPECT_NEAR(mean(m.get()), std::sqrt(0.9) + (1 - std::sqrt(0.9)) * left, allowed);
}
