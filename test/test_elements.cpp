// AdamW's moments in bf16 and in 8 bits: their rounding, and that a rank's part of a tensor is rounded like the whole
// tensor.
#include <gtest/gtest.h>

#include <set>

#include "../llmc/model/gradients.h"
#include "../llmc/model/mesh.h"
#include "../llmc/optimizer/shard.h"
#include "testing.h"

namespace test_elements {

using namespace test;

float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
float rounded(float x, uint32_t random) { return from_bits(round_stochastically(x, random) << 16); }

TEST(StochasticRounding, EveryRandomNumberOnceGivesTheNumberItself) {
    Rng rng(1);
    std::vector<float> numbers = {0x1.fffffep+0f, 0x1.fe0002p-1f, 3e38f, -0x1.01p-126f, from_bits(1), from_bits(0x807fffff)};
    for (int i = 0; i < 60; i++) numbers.push_back(from_bits((uint32_t)rng.below(0x7f7f0000) | (uint32_t)(i % 2) << 31));
    for (const float x : numbers) {
        double sum = 0;
        std::set<float> values;
        for (uint32_t random = 0; random < 65536; random++) {
            const float y = rounded(x, random);
            sum += (double)y;
            values.insert(y);
        }
        EXPECT_EQ(sum / 65536, (double)x);
        EXPECT_LE(values.size(), 2u) << x;
    }
}

TEST(StochasticRounding, WhatIsABf16Stays) {
    for (uint32_t high = 0; high < 65536; high++)
        for (const uint32_t random : {0u, 0x7fffu, 0xffffu, 0x1234ffffu}) {
            const float x = from_bits(high << 16);
            if (std::isnan(x)) ASSERT_EQ(round_stochastically(x, random), 0x7fffu);
            else ASSERT_EQ(round_stochastically(x, random), high) << x;
        }
    for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu})
        EXPECT_EQ(round_stochastically(from_bits(nan), 0xffff), 0x7fffu);
}

// A code's value, from the format's definition.
template <class Code>
double defined(uint32_t code, int exponent_bits, int bias) {
    const uint32_t magnitude = code & Code::nan, fraction = magnitude & 3, exponent = magnitude >> 2;
    EXPECT_LT(exponent, 1u << exponent_bits);
    const double sign = code & ~Code::nan ? -1 : 1;
    return sign * (exponent ? std::ldexp(4 + fraction, (int)exponent - bias - 2) : std::ldexp(fraction, 1 - bias - 2));
}
template <class Code>
void check_codes(int exponent_bits, int bias) {
    double before = -1;
    for (uint32_t code = 0; code < 256; code++) {
        Code c;
        c.bits = (uint8_t)code;
        if ((code & Code::nan) == Code::nan) {
            EXPECT_TRUE(std::isnan((float)c));
            continue;
        }
        const double x = defined<Code>(code, exponent_bits, bias);
        EXPECT_EQ((double)(float)c, x) << code;
        EXPECT_EQ((double)(float)bf16((float)c), x) << "every number is a bf16";
        for (const uint32_t random : {0u, 0x7fffu, 0xffffu}) EXPECT_EQ(Code::encode((float)c, random), code);
        EXPECT_EQ(Code((float)c).bits, code);
        // Numbers between two neighbors: over all random numbers they average to the value.
        if (code < Code::nan) {
            if (code > 0) {
                for (const double share : {0.125, 0.5, 0x1p-16}) {
                    const double between = before + share * (x - before);
                    double sum = 0;
                    for (uint32_t random = 0; random < 65536; random++) {
                        Code drawn;
                        drawn.bits = (uint8_t)Code::encode((float)between, random);
                        EXPECT_TRUE(drawn.bits == code || drawn.bits == code - 1);
                        sum += (double)(float)drawn;
                    }
                    EXPECT_EQ(sum / 65536, between) << code;
                }
            }
            before = x;
        }
    }
    Code largest;
    largest.bits = (uint8_t)(Code::nan - 1);
    for (const float much : {2 * (float)largest, 3e38f}) EXPECT_EQ(Code::encode(much, 0xffff), Code::nan - 1);
    for (const float bad : {INFINITY, (float)NAN}) EXPECT_EQ(Code::encode(bad, 0) & Code::nan, Code::nan);
    EXPECT_EQ(Code::encode(0.0f, 0xffff), 0u);
}
TEST(EightBits, CodesAreThoseOfTheFormatAndRoundedToTheirMean) {
    check_codes<signed8>(5, 27);
    check_codes<unsigned8>(6, 60);
    EXPECT_EQ((float)signed8(-24.0f), -24.0f);
    EXPECT_EQ((float)signed8(-100.0f), -24.0f);
    EXPECT_EQ((float)unsigned8(100.0f), 12.0f);
}

TEST(StochasticRounding, KeysDifferFromStepToStepAndBySeed) {
    std::set<uint64_t> keys;
    for (uint64_t seed = 0; seed < 8; seed++)
        for (int64_t step = 1; step <= 1000; step++) keys.insert(rounding_key(seed, step));
    EXPECT_EQ(keys.size(), 8000u);
}

// Contributions of ranks with rows of the same samples err independently: the variance of their sum is the sum of theirs.
TEST(StochasticRounding, RanksWithRowsOfTheSameSamplesErrIndependently) {
    const int ranks = 8, sums = 4000;
    Rng rng(3);
    std::set<uint64_t> keys;
    double alone = 0, together = 0;
    for (int sample = 0; sample < sums; sample++) {
        double sum = 0;
        for (int rank = 0; rank < ranks; rank++) {
            const uint64_t key = contribution_key(1, sample, {ranks, rank});
            keys.insert(key);
            const float x = from_bits((uint32_t)(0x3f800000 + rng.below(0x800000)));
            const double error = (double)rounded(x, random_bits(key, RngPurpose::rounding, 0, 0)[0]) - (double)x;
            alone += error * error;
            sum += error;
        }
        together += sum * sum;
    }
    EXPECT_EQ(keys.size(), (size_t)sums * ranks);
    EXPECT_NEAR(together / alone, 1, 0.15);
    EXPECT_EQ(contribution_key(1, 5, {}), rounding_key(1, 5, RngPurpose::gradients));
}

// Every element of every rank, in every layout: its tensor and its position in the whole tensor, each exactly once.
TEST(StochasticRounding, PartsOfTensorsKnowTheirPlace) {
    ModelConfig llama;
    set_family(llama, "llama");
    llama.L = 3;
    llama.C = 48;
    llama.NH = 4;
    llama.NKV = 2;
    llama.F = 80;
    llama.V = 100;
    llama.T = 16;
    ModelConfig gpt2;
    set_family(gpt2, "gpt2");
    gpt2.L = 2;
    gpt2.C = 32;
    gpt2.NH = gpt2.NKV = 4;
    gpt2.F = 128;
    gpt2.V = 90;
    gpt2.T = 16;
    for (ModelConfig c : {llama, gpt2}) {
        pad_vocabulary(c, 128);
        for (const int tp : {1, 2, 4})
            for (const int dp : {1, 3}) {
                for (int rank = 0; rank < tp * dp; rank++) {
                    Part part = whole_model(c);
                    part.tp.rank = rank % tp;
                    part.tp.size = tp;
                    const ParameterTable table(c, part, (size_t)dp * 64);
                    const Shards shards(table, make_mesh(tp * dp, rank, tp, 1, 1, 1), true, 1000);
                    size_t seen = 0, mine = 0;
                    for (const Bucket& b : shards.buckets)
                        for_each_rounding(table, b.mine, b.mine + b.n, 9, [&](size_t first, size_t n, const Rounding& r) {
                            ASSERT_TRUE(first >= b.mine && first + n <= b.mine + b.n);
                            const TensorSpec* spec = nullptr;
                            for (const TensorSpec& t : table.rows)
                                if (t.offset <= first && first < t.offset + t.size()) spec = &t;
                            ASSERT_TRUE(spec);
                            ASSERT_EQ(r.tensor, (uint32_t)spec->id);
                            for (size_t i = 0; i < n; i++) {
                                const size_t at = first - spec->offset + i;
                                const int row = spec->whole_row((int)(at / spec->cols));
                                ASSERT_EQ(r.number(i), (uint64_t)row * spec->whole_cols + spec->first_col + at % spec->cols)
                                    << spec->name << ", element " << at << ", rank " << rank << " of " << tp << " x " << dp;
                                const auto words = random_bits(9, RngPurpose::rounding, r.tensor, r.number(i) / 4);
                                ASSERT_EQ(r.word(i), words[r.number(i) % 4]);
                                ASSERT_TRUE(i + 1 == n || r.run(i) == 1 || r.number(i + 1) == r.number(i) + 1);
                            }
                            seen += n;
                        });
                    for (const TensorSpec& t : table.rows)
                        shards.for_each_part(t.offset, t.size(), [&](size_t, size_t, size_t n) { mine += n; });
                    EXPECT_EQ(seen, mine);
                }
            }
    }
}

}  // namespace test_elements
