// The counter RNG: Random123's known answers, bits that must never change (initial weights depend on them), the shape of
// the distributions, and independence of neighboring keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "../llmc/base/rng.h"

namespace test_rng {

using Words = std::array<uint32_t, 4>;

std::vector<double> normals(size_t n, uint64_t seed, uint32_t stream) {
    std::vector<double> x(n);
    for (size_t i = 0; i < n; i++) x[i] = normal_at(seed, RngPurpose::init, stream, i);
    return x;
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum / (double)a.size();
}

TEST(Rng, PhiloxKnownAnswers) {
    EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    const uint32_t f = 0xffffffff;
    EXPECT_EQ(philox({f, f, f, f}, {f, f}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, EveryPartOfTheKeyCounts) {
    const auto reference = random_bits(1, RngPurpose::init, 2, 3);
    EXPECT_NE(random_bits(1 + (1ull << 32), RngPurpose::init, 2, 3), reference);
    EXPECT_NE(random_bits(2, RngPurpose::init, 2, 3), reference);
    EXPECT_NE(random_bits(1, RngPurpose::sampling, 2, 3), reference);
    EXPECT_NE(random_bits(1, RngPurpose::init, 3, 3), reference);
    EXPECT_NE(random_bits(1, RngPurpose::init, 2, 4), reference);
    EXPECT_NE(random_bits(1, RngPurpose::init, 2, 3 + (1ull << 32)), reference);
}

// The normal's series compared with the C library in long double, including the ends of the range: at most one rounding to
// float apart.
TEST(Rng, NormalIsBoxMuller) {
    for (uint64_t i = 0; i < 100000; i++) {
        const auto r = random_bits(9, RngPurpose::init, 4, i);
        const long double u = ((long double)r[0] + 1) / 4294967296.0L,
                          theta = 2 * 3.14159265358979323846264L * r[1] / 4294967296.0L;
        const double expected = (double)(std::sqrt(-2 * std::log(u)) * std::cos(theta)),
                     actual = normal_at(9, RngPurpose::init, 4, i);
        ASSERT_TRUE(std::abs(actual - expected) <= 0x1.0001p-24 * std::abs(expected) + 1e-12)
            << "element " << i << ": " << actual << ", " << expected;
    }
}

// These values are fixed: a change here changes every model's initial weights.
TEST(Rng, NormalGoldenBits) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over the bits of the first million
    for (uint64_t i = 0; i < 1000000; i++) {
        const float x = normal_at(1234, RngPurpose::init, 7, i);
        uint32_t bits;
        memcpy(&bits, &x, 4);
        hash = (hash ^ bits) * 0x100000001b3;
    }
    EXPECT_EQ(hash, 0x429b8466cd790eaaull);
    EXPECT_EQ(normal_at(1234, RngPurpose::init, 7, 0), 0x1.e58f22p-1f);
    EXPECT_EQ(normal_at(1234, RngPurpose::init, 7, 1), 0x1.a9a5c6p+0f);
    EXPECT_EQ(normal_at(~0ull, RngPurpose::sampling, ~0u, ~0ull), -0x1.5bec2ap+0f);
    EXPECT_EQ(uniform_at(1234, RngPurpose::sampling, 7, 0), 0x1.8276ea3b34c1p-5);
}

// Moments of a million normals, each within five standard deviations of the estimate: sqrt(1, 2, 15, 96 / n).
TEST(Rng, NormalMoments) {
    const size_t n = 1000000;
    double moment[5] = {};
    for (const double x : normals(n, 42, 0)) {
        double power = 1;
        for (int k = 0; k < 5; k++) {
            moment[k] += power / (double)n;
            power *= x;
        }
    }
    const double sigma = std::sqrt(1.0 / (double)n);
    EXPECT_NEAR(moment[1], 0, 5 * sigma);
    EXPECT_NEAR(moment[2], 1, 5 * std::sqrt(2.0) * sigma);
    EXPECT_NEAR(moment[3], 0, 5 * std::sqrt(15.0) * sigma);
    EXPECT_NEAR(moment[4], 3, 5 * std::sqrt(96.0) * sigma);
}

// Kolmogorov-Smirnov: the largest distance of the empirical from the true distribution function, below the 0.1% point.
TEST(Rng, NormalAndUniformDistributionFunctions) {
    const size_t n = 200000;
    const double limit = 1.95 / std::sqrt((double)n);
    std::vector<double> x = normals(n, 5, 1), u(n);
    for (size_t i = 0; i < n; i++) u[i] = uniform_at(5, RngPurpose::sampling, 1, i);
    std::sort(x.begin(), x.end());
    std::sort(u.begin(), u.end());
    EXPECT_GE(u.front(), 0);
    EXPECT_LT(u.back(), 1);
    double furthest_x = 0, furthest_u = 0;
    for (size_t i = 0; i < n; i++) {
        const double below = (double)i / (double)n;
        furthest_x = std::max(furthest_x, std::abs(0.5 * std::erfc(-x[i] / std::sqrt(2.0)) - below));
        furthest_u = std::max(furthest_u, std::abs(u[i] - below));
    }
    EXPECT_LT(furthest_x, limit);
    EXPECT_LT(furthest_u, limit);
}

TEST(Rng, NeighborsAreUncorrelated) {
    const size_t n = 200000;
    const double limit = 5 / std::sqrt((double)n);
    const std::vector<double> x = normals(n, 42, 3);
    EXPECT_NEAR(correlation(x, normals(n, 43, 3)), 0, limit) << "seeds";
    EXPECT_NEAR(correlation(x, normals(n, 42, 4)), 0, limit) << "streams";
    std::vector<double> next(x.begin() + 1, x.end());
    next.push_back(0);
    EXPECT_NEAR(correlation(x, next), 0, limit) << "elements";
}

}  // namespace test_rng
