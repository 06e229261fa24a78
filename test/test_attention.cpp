// Attention and rotary positions in the program's precision (bf16 or fp32): the plain loops and the tiles against sums in
// double. What is allowed: one rounding to floatX plus a first order bound on the fp32 arithmetic inside, u = 2^-24. A score s
// has an absolute error e; p = exp(s - m) then a relative error exp(e) - 1; the sums over keys or queries add one rounding per
// term. On a matrix unit weights and their gradients are rounded to bf16 besides.
#include <gtest/gtest.h>

#include <optional>

#include "../llmc/cpu/attention.h"
#include "../llmc/cpu/rope.h"
#include "../llmc/base/math.h"
#include "attention_cases.h"
#include "matrix_units.h"
#include "testing.h"

namespace test_attention {

using namespace test;
using Doubles = std::vector<double>;

constexpr double u = roundoff<real>;
constexpr double rounding = roundoff<floatX> * 1.01;  // of a value that was itself computed with small error
constexpr double tiny = 1e-30;                        // weights below e^-86.6 are 0
const double infinity = std::numeric_limits<double>::infinity();

// Ways to compute it: the plain loops, and tiles on each matrix unit there is.
struct Way {
    std::string name;
    std::optional<cpu::AnyUnit> unit;
    // Units of bf16 multiply rounded weights.
    double weight_rounding() const {
        return unit && std::holds_alternative<const cpu::MatrixUnit<bf16>*>(*unit) ? roundoff<bf16> * 1.01 : 0;
    }
    void choose(cpu::Ctx& ctx) const {
        ctx.plain = !unit;
        if (unit) ctx.attention = *unit;
    }
};
std::vector<Way> all_ways() {
    std::vector<Way> ways = {{"plain loops", {}}};
    for (const cpu::AnyUnit unit : all_matrix_units(cpu::Products::attention)) ways.push_back({name_of(unit), unit});
    return ways;
}

// What earlier ops left in scratch memory must not matter: NaN everywhere.
void spoil_scratch(cpu::Ctx& ctx) {
    const size_t bytes = 1 << 21;
    memset(ctx.scratch(bytes), 0xff, bytes);
}

// ---- the op under test ----------------------------------------------------------------------------------------------------
struct Results {
    std::vector<floatX> out, dqkv;
    std::vector<real> lse, dsinks;
};

struct Problem {
    Case k;
    real scale;
    Guarded<floatX> qkv, dout, sinks;
    Guarded<real> slopes;
    Guarded<int> doc_start;

    Problem(const Case& shape, const std::vector<floatX>& inp, const std::vector<floatX>& gradient, double scale)
        : k(shape),
          scale((real)scale),
          qkv(inp, "qkv"),
          dout(gradient, "dout"),
          sinks(Rng(3).normals<floatX>(k.NH), "sinks"),
          slopes(k.NH, "slopes"),
          doc_start(k.first_keys(), "doc_start") {
        for (int h = 0; h < k.NH; h++) slopes[h] = (real)std::exp2(-8.0 * (h + 1) / k.NH);
    }
    Problem(const Case& shape, uint64_t seed)
        : Problem(shape, Rng(seed).normals<floatX>(shape.rows() * shape.width(), 1.5),
                  Rng(seed + 1).normals<floatX>(shape.rows() * shape.NH * shape.HS), 1 / std::sqrt((double)shape.HS)) {}

    const real* slopes_or_null() const { return k.alibi ? slopes.data() : nullptr; }
    const int* documents_or_null() const { return k.masked() ? doc_start.data() : nullptr; }
    int first_key(int row) const { return doc_start[row]; }

    AttentionMask mask() const { return {documents_or_null(), slopes_or_null()}; }
    AttentionShape shape() const { return k.shape(scale); }
    Results run(cpu::Ctx& ctx) const {
        const size_t n = k.rows() * k.NH;
        Guarded<floatX> out(n * k.HS, "out"), dqkv(qkv.size(), "dqkv");
        Guarded<real> lse(n, "lse"), dsinks(std::vector<real>(k.NH), "dsinks");
        const AttentionActs acts = {qkv.data(), out.data(), lse.data()};
        cpu::attention_forward(ctx, out.data(), lse.data(), qkv.data(), mask(), shape());
        if (k.sinks) cpu::sinks_forward(ctx, out.data(), lse.data(), sinks.data(), shape());
        cpu::attention_backward(ctx, dqkv.data(), dout.data(), acts, mask(), shape(), nullptr);
        if (k.sinks) cpu::sinks_backward(ctx, dsinks.data(), dout.data(), acts, sinks.data(), shape());
        return {out.values(), dqkv.values(), lse.values(), dsinks.values()};
    }
};

// ---- reference ------------------------------------------------------------------------------------------------------------
struct Bounded {
    Doubles value, allowed;
    explicit Bounded(size_t n) : value(n), allowed(n, tiny) {}
    void add(size_t i, double x, double error) {
        value[i] += x;
        allowed[i] += error;
    }
};

class Reference {
public:
    // exact_scores: the numbers are such that fp32 computes every score without error.
    Reference(const Problem& p, bool exact_scores, double weight_rounding)
        : p_(p), k_(p.k), qkv_(doubles(p.qkv)), exact_(exact_scores), weight_rounding_(weight_rounding) {}

    void forward(Bounded& out, Bounded& lse) const {
        for (int row = 0; row < (int)k_.rows(); row++)
            for (int h = 0; h < k_.NH; h++) {
                const int b = row / k_.T, t = row % k_.T, first = p_.first_key(row);
                const Scores s = scores(b, h, t);
                const double sink = k_.sinks ? as_double(p_.sinks[h]) : -infinity;
                double top = sink, sum = 0;
                for (const double x : s.value) top = std::max(top, x);
                for (const double x : s.value) sum += std::exp(x - top);
                sum += std::exp(sink - top);
                // Weight by weight: its score, its exponent rounded, and an exponential or two per tile passed.
                Doubles weight, relative;
                double weight_error = (k_.T + 4) * u;
                for (size_t j = 0; j < s.value.size(); j++) {
                    weight.push_back(std::exp(s.value[j] - top) / sum);
                    relative.push_back(
                        std::expm1(s.error[j] + u * std::min(top - s.value[j], 100.0) + (4 * (k_.T / 64 + 1) + 8) * u));
                    weight_error += weight[j] * relative[j];
                }
                if (k_.sinks) weight_error += 16 * u;  // lse and the factor of out are rounded again
                lse.add(((size_t)b * k_.NH + h) * k_.T + t, top + std::log(sum),
                        weight_error + 4 * u * (std::abs(top) + std::log(sum)));
                for (int c = 0; c < k_.HS; c++) {
                    double value = 0, error = 0;
                    for (size_t j = 0; j < s.value.size(); j++) {
                        const double v = s.keep[j] * at(b, first + (int)j, value_head(h), c);
                        value += weight[j] * v;
                        error += weight[j] * std::abs(v) * (relative[j] + weight_rounding_ + (k_.T + 4) * u);
                    }
                    out.add(((size_t)row * k_.NH + h) * k_.HS + c, value,
                            error + std::abs(value) * (weight_error + 2 * u + (k_.sinks ? 2 : 1) * rounding +
                                                       (k_.sinks ? 4 * u * std::abs(top) : 0)));
                }
            }
    }

    // Of the out and lse that the op was given.
    void backward(Bounded& d, const Doubles& dout, const Doubles& out, const Doubles& lse) const {
        const int HS = k_.HS;
        const double terms = (double)k_.T * (k_.NH / k_.NKV) + k_.T / 64 + 8;  // of the longest sum
        for (int row = 0; row < (int)k_.rows(); row++)
            for (int h = 0; h < k_.NH; h++) {
                const int b = row / k_.T, t = row % k_.T, first = p_.first_key(row);
                const Scores s = scores(b, h, t);
                const double *dy = &dout[((size_t)row * k_.NH + h) * HS], *y = &out[((size_t)row * k_.NH + h) * HS];
                const double log_sum = lse[((size_t)b * k_.NH + h) * k_.T + t];
                double correction = 0, correction_magnitude = 0;
                for (int c = 0; c < HS; c++) {
                    correction += dy[c] * y[c];
                    correction_magnitude += std::abs(dy[c] * y[c]);
                }
                for (int j = first; j <= t; j++) {
                    const double exponent = s.value[j - first] - log_sum, w = std::exp(exponent);
                    const double w_error = w * std::expm1(s.error[j - first] + u * std::min(std::abs(exponent), 100.0) + 4 * u);
                    double dw = 0, dw_magnitude = 0;
                    for (int c = 0; c < HS; c++) {
                        const double x = s.keep[j - first] * dy[c] * at(b, j, value_head(h), c);
                        dw += x;
                        dw_magnitude += std::abs(x);
                    }
                    const double scale = (double)p_.scale, keep = s.keep[j - first], slope = s.derivative[j - first];
                    const double ds = scale * slope * w * (dw - correction);
                    const double ds_error = scale * ((slope * (w_error + 4 * u * w) + s.derivative_error[j - first] * w) *
                                                         std::abs(dw - correction) +
                                                     (w + w_error) * (HS + 2) * u * (dw_magnitude + correction_magnitude)) +
                                            weight_rounding_ * std::abs(ds);
                    for (int c = 0; c < HS; c++) {
                        const double q = at(b, t, h, c), key = at(b, j, key_head(h), c);
                        d.add(index(b, j, value_head(h), c), keep * w * dy[c],
                              keep * std::abs(dy[c]) * (w_error + (terms * u + weight_rounding_) * w));
                        d.add(index(b, t, h, c), ds * key, std::abs(key) * (ds_error + terms * u * std::abs(ds)));
                        d.add(index(b, j, key_head(h), c), ds * q, std::abs(q) * (ds_error + terms * u * std::abs(ds)));
                    }
                }
            }
        for (size_t i = 0; i < d.value.size(); i++) d.allowed[i] += rounding * std::abs(d.value[i]);
    }
    Bounded sinks_backward(const Doubles& dout, const Doubles& out, const Doubles& lse) const {
        Bounded d((size_t)k_.NH);
        for (size_t i = 0; i < out.size(); i++) {
            const size_t h = i / k_.HS % k_.NH, row = i / k_.HS / k_.NH;
            const double exponent = as_double(p_.sinks[h]) - lse[(row / k_.T * k_.NH + h) * k_.T + row % k_.T];
            const double term = k_.sinks ? std::exp(exponent) * dout[i] * out[i] : 0;
            d.add(h, -term, std::abs(term) * (k_.HS + 8 + 2 * std::abs(exponent) + (double)k_.rows()) * u);
        }
        return d;
    }

private:
    struct Scores {
        Doubles value, error, derivative, derivative_error, keep;
    };
    int key_head(int h) const { return k_.NH + h / (k_.NH / k_.NKV); }
    int value_head(int h) const { return key_head(h) + k_.NKV; }
    size_t index(int b, int t, int head, int c) const { return ((size_t)b * k_.T + t) * k_.width() + (size_t)head * k_.HS + c; }
    double at(int b, int t, int head, int c) const { return qkv_[index(b, t, head, c)]; }

    Scores scores(int b, int h, int t) const {
        Scores s;
        for (int j = p_.first_key(b * k_.T + t); j <= t; j++) {
            double dot = 0, magnitude = 0;
            for (int c = 0; c < k_.HS; c++) {
                const double x = at(b, t, h, c) * at(b, j, key_head(h), c);
                dot += x;
                magnitude += std::abs(x);
            }
            const double bias = k_.alibi ? (double)p_.slopes[h] * (j - t) : 0, scale = (double)p_.scale;
            const Capped score(scale * dot, exact_ ? 0 : u * (k_.HS + 3) * scale * magnitude, k_.softcap, u);
            s.value.push_back(score.value + bias);
            s.error.push_back(exact_ ? 0 : score.error + 4 * u * std::abs(bias));
            s.derivative.push_back(score.derivative);
            s.derivative_error.push_back(score.derivative_error);
            s.keep.push_back((double)shape_.dropout.of(shape_.weight(b, h, t, j)));
        }
        return s;
    }

    const Problem& p_;
    const Case& k_;
    const AttentionShape shape_ = p_.shape();
    const Doubles qkv_;
    const bool exact_;
    const double weight_rounding_;
};

void check(const Problem& p, const Results& r, const Way& way, bool exact_scores = false) {
    const Reference reference(p, exact_scores, way.weight_rounding());
    Bounded out(r.out.size()), lse(r.lse.size()), dqkv(r.dqkv.size());
    reference.forward(out, lse);
    expect_close(r.out, out.value, out.allowed, "out");
    expect_close(r.lse, lse.value, lse.allowed, "lse");
    reference.backward(dqkv, doubles(p.dout), doubles(r.out), doubles(r.lse));
    expect_close(r.dqkv, dqkv.value, dqkv.allowed, "dqkv");
    const Bounded dsinks = reference.sinks_backward(doubles(p.dout), doubles(r.out), doubles(r.lse));
    expect_close(r.dsinks, dsinks.value, dsinks.allowed, "dsinks");
}

// A row that sees only itself has weight 1: its value comes out unchanged (in fp32 times a weight that is 1 but for a rounding,
// and divided by the same).
void expect_first_tokens_unchanged(const Problem& p, const Results& r) {
    const Case& k = p.k;
    for (int row = 0; row < (int)k.rows(); row++)
        for (int h = 0; h < k.NH && p.first_key(row) == row % k.T && !k.sinks && k.dropout == 0; h++)
            for (int c = 0; c < k.HS; c++) {
                const size_t v = row * k.width() + (size_t)(k.NH + k.NKV + h / (k.NH / k.NKV)) * k.HS + c;
                const double x = as_double(p.qkv[v]), allowed = std::is_same<floatX, float>::value ? 3 * u * std::abs(x) : 0;
                ASSERT_NEAR(as_double(r.out[((size_t)row * k.NH + h) * k.HS + c]), x, allowed)
                    << "row " << row << ", head " << h;
            }
}

void expect_same_results(const Results& a, const Results& b) {
    expect_same_bits(a.out, b.out, "out");
    expect_same_bits(a.lse, b.lse, "lse");
    expect_same_bits(a.dqkv, b.dqkv, "dqkv");
    expect_same_bits(a.dsinks, b.dsinks, "dsinks");
}

// ---- values ---------------------------------------------------------------------------------------------------------------
class Attention : public testing::TestWithParam<Case> {};

// T: one token, one short of a tile of 64, a tile, one more, several. Head sizes of real models, and some that fill no vector.
INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         testing::Values(Case{1, 1, 1, 1, 8, false, false}, Case{3, 1, 4, 2, 16, true, true},
                                         Case{2, 3, 2, 1, 32, false, true}, Case{1, 7, 6, 3, 5, true, false},
                                         Case{2, 63, 3, 3, 8, false, false}, Case{1, 64, 2, 2, 16, true, true},
                                         Case{2, 65, 4, 1, 32, true, false}, Case{1, 129, 3, 1, 80, true, true},
                                         Case{1, 131, 2, 2, 128, false, true}, Case{3, 150, 4, 2, 24, true, true},
                                         Case{1, 192, 2, 1, 64, false, false}, Case{1, 200, 2, 1, 96, true, false},
                                         Case{1, 200, 4, 2, 64, false, true}, Case{1, 300, 2, 2, 8, false, false}));

// Windows of one key, within a tile, of a tile, of several; with documents, too. Caps, dropout, sinks, alone and together.
INSTANTIATE_TEST_SUITE_P(Options, Attention,
                         testing::Values(Case{1, 70, 2, 1, 16, false, false, 1}, Case{2, 150, 2, 2, 24, true, true, 20},
                                         Case{1, 200, 4, 2, 64, false, false, 64}, Case{1, 300, 2, 1, 32, false, false, 130},
                                         Case{2, 65, 4, 1, 32, true, true, 0, 1.5},
                                         Case{1, 150, 2, 1, 80, false, false, 0, 0.7},
                                         Case{1, 90, 2, 2, 16, false, true, 0, 0, 0.3},
                                         Case{2, 65, 4, 2, 32, false, false, 0, 0, 0, true},
                                         Case{1, 131, 2, 1, 64, true, true, 40, 2, 0.2, true}));

TEST_P(Attention, PlainAndTiles) {
    const Problem p(GetParam(), 1);
    for (const Way& way : all_ways()) {
        SCOPED_TRACE(way.name);
        cpu::Ctx ctx(2);
        way.choose(ctx);
        const Results r = p.run(ctx);
        check(p, r, way);
        expect_first_tokens_unchanged(p, r);
        spoil_scratch(ctx);
        expect_same_results(p.run(ctx), r);
    }
}

TEST(AttentionThreads, SameBitsForAnyNumberOfThreads) {
    for (const Case& k :
         {Case{3, 10, 4, 2, 16, true, true}, Case{1, 200, 3, 1, 80, true, false}, Case{2, 170, 4, 2, 24, false, true},
          Case{1, 200, 3, 3, 16, false, true}, Case{1, 170, 4, 2, 16, true, true, 70, 1.5, 0, true},
          Case{1, 70, 2, 1, 16, false, false, 0, 1, 0.5, true}}) {
        const Problem p(k, 5);
        const auto run = [&](int threads, const Way& way) {
            cpu::Ctx ctx(threads);
            way.choose(ctx);
            return p.run(ctx);
        };
        for (const Way& way : all_ways()) {
            const Results r = run(1, way);
            for (const int threads : {1, 2, 2, 5, 16}) expect_same_results(run(threads, way), r);
        }
    }
}

// The scratch memory of a context is cut for its own threads, not for those of the context made last.
TEST(AttentionThreads, ContextsSideBySide) {
    const Problem p(Case{1, 130, 4, 4, 64, false, false}, 6);
    cpu::Ctx one(1), four(4);
    const Results r = p.run(four);
    expect_same_results(p.run(one), r);
}

// Equal scores: each row is the mean of the values so far, lse the logarithm of their number.
TEST(AttentionValues, EqualScoresGiveMeans) {
    const Case k{1, 90, 2, 1, 16, false, false};
    std::vector<floatX> qkv(k.rows() * k.width(), from_double<floatX>(0));
    for (int t = 0; t < k.T; t++)
        for (int c = 0; c < k.HS; c++) qkv[t * k.width() + 3 * k.HS + c] = from_double<floatX>(t % 8 - c);
    const Problem p(k, qkv, Rng(6).normals<floatX>(k.rows() * k.NH * k.HS), 1);
    for (const Way& way : all_ways()) {
        cpu::Ctx ctx(2);
        way.choose(ctx);
        const Results r = p.run(ctx);
        double sum = 0;
        for (int t = 0; t < k.T; t++) {
            sum += t % 8;
            for (int h = 0; h < k.NH; h++) {
                EXPECT_NEAR(r.lse[h * k.T + t], std::log(t + 1.0), 8 * u * (1 + std::log(t + 1.0)));
                for (int c = 0; c < k.HS; c++) {
                    const double mean = sum / (t + 1) - c;  // the sums are whole numbers and exact
                    EXPECT_NEAR(as_double(r.out[(t * k.NH + h) * k.HS + c]), mean, (rounding + 2 * u) * std::abs(mean));
                }
            }
        }
    }
}

// Scores up to a million, of both signs; as sums of whole numbers they are exact in fp32. The weights are 0 and 1 but for ties.
TEST(AttentionValues, LargeScoresDoNotOverflow) {
    for (const bool documents : {false, true}) {
        const Case k{2, 140, 2, 1, 16, false, documents};
        Rng rng(7);
        for (const int shift : {0, 8, -8}) {  // whole rows of large positive and of large negative scores
            std::vector<floatX> qkv = rng.normals<floatX>(k.rows() * k.width());
            for (size_t i = 0; i < qkv.size(); i++) {
                const size_t head = i % k.width() / k.HS;
                if (head < 2) qkv[i] = from_double<floatX>(16 * (shift == 0 ? rng.below(17) - 8 : 8));
                if (head == 2)
                    qkv[i] = from_double<floatX>(16 * (shift == 0  ? rng.below(17) - 8
                                                       : shift > 0 ? rng.below(9)
                                                                   : -rng.below(9)));
            }
            const Problem p(k, qkv, rng.normals<floatX>(k.rows() * k.NH * k.HS), 1);
            for (const Way& way : all_ways()) {
                SCOPED_TRACE(testing::Message() << way.name << ", shift " << shift << ", documents " << documents);
                cpu::Ctx ctx(2);
                way.choose(ctx);
                const Results r = p.run(ctx);
                check(p, r, way, true);
                double largest = 0;
                for (const real x : r.lse) largest = std::max(largest, (double)std::abs(x));
                EXPECT_GT(largest, 1e5);
            }
        }
    }
}

// ---- what a row may see ---------------------------------------------------------------------------------------------------
// Later tokens turn into others, a million million times larger: rows before keep their bits, out and lse and their queries'
// gradients.
TEST(AttentionMask, LaterTokensChangeNothingBefore) {
    const Case k{1, 150, 4, 2, 16, true, false};
    const Problem p(k, 8);
    for (const Way& way : all_ways()) {
        cpu::Ctx ctx(2);
        way.choose(ctx);
        const Results before = p.run(ctx);
        for (const int changed : {1, 63, 64, 100, 149}) {
            SCOPED_TRACE(testing::Message() << way.name << ", tokens from " << changed << " on changed");
            Problem other(k, 8);
            const std::vector<floatX> noise = Rng(9).normals<floatX>(other.qkv.size(), 1e12);
            std::copy(noise.begin() + changed * k.width(), noise.end(), other.qkv.data() + changed * k.width());
            const Results after = other.run(ctx);
            const auto until = [&](const auto& x, size_t row) { return std::vector(x.begin(), x.begin() + changed * row); };
            expect_same_bits(until(after.out, k.NH * k.HS), until(before.out, k.NH * k.HS), "out");
            for (int t = 0; t < changed; t++)
                for (int h = 0; h < k.NH; h++) {
                    ASSERT_EQ(after.lse[h * k.T + t], before.lse[h * k.T + t]) << "lse of row " << t;
                    for (int c = 0; c < k.HS; c++) {
                        const size_t i = t * k.width() + h * k.HS + c;
                        ASSERT_EQ(as_double(after.dqkv[i]), as_double(before.dqkv[i])) << "query gradient of row " << t;
                    }
                }
            ASSERT_NE(as_double(after.out[changed * k.NH * k.HS]), as_double(before.out[changed * k.NH * k.HS]))
                << "the change shows";
        }
    }
}

// One document changes, tokens and gradients: all others keep their bits, gradients included, and so does the other sequence.
TEST(AttentionMask, DocumentsDoNotSeeEachOther) {
    const Case k{2, 170, 4, 2, 16, true, true};
    const Problem p(k, 10);
    for (const Way& way : all_ways()) {
        cpu::Ctx ctx(2);
        way.choose(ctx);
        const Results before = p.run(ctx);
        for (const int start : {0, 1, 3, 64, 128, 129}) {
            SCOPED_TRACE(testing::Message() << way.name << ", document at " << start << " changed");
            Problem other(k, 10);
            Rng rng(11);
            const auto touched = [&](size_t row) { return row < (size_t)k.T && p.doc_start[row] == start; };
            for (size_t i = 0; i < other.qkv.size(); i++)
                if (touched(i / k.width())) other.qkv[i] = from_double<floatX>(100 * rng.normal());
            for (size_t i = 0; i < other.dout.size(); i++)
                if (touched(i / (k.NH * k.HS))) other.dout[i] = from_double<floatX>(100 * rng.normal());
            const Results after = other.run(ctx);
            const auto kept = [&](const std::vector<floatX>& x) {
                std::vector<floatX> y;
                for (size_t i = 0; i < x.size(); i++)
                    if (!touched(i / (x.size() / k.rows()))) y.push_back(x[i]);
                return y;
            };
            expect_same_bits(kept(after.out), kept(before.out), "out");
            expect_same_bits(kept(after.dqkv), kept(before.dqkv), "dqkv");
        }
    }
}

// ---- decoding -------------------------------------------------------------------------------------------------------------
// Token by token over caches whose later rows are NaN, against the same attention over whole sequences: sequence b begins b
// steps after the first, and is as much longer than the others' rows in every step; it lies in place B - b of the cache, of
// which place 0 stays as it is.
TEST(AttentionDecode, TokenByTokenIsTheWholeSequence) {
    for (const Case& k :
         {Case{1, 5, 1, 1, 8, false, false}, Case{3, 70, 4, 2, 24, true, false}, Case{2, 37, 6, 1, 5, false, false},
          Case{1, 41, 2, 2, 80, true, false}, Case{2, 70, 4, 2, 24, true, false, 20, 1.5, 0, true}}) {
        SCOPED_TRACE(testing::PrintToString(k));
        const Problem p(k, 12);
        AttentionShape shape = p.shape();
        shape.T = 1;
        const int P = k.T + 3;  // rows of the cache
        const size_t cached = (size_t)k.NKV * k.HS, produced = (size_t)k.NH * k.HS;
        cpu::Ctx ctx(k.B);  // one, two and three threads
        Guarded<floatX> keys((k.B + 1) * P * cached, "keys"), values((k.B + 1) * P * cached, "values");
        std::vector<floatX> expected_keys = keys.values(), expected_values = values.values(), out(k.rows() * produced);
        for (int step = 0; step < k.T + k.B - 1; step++) {
            const DecodedRows rows(k, step);
            shape.B = (int)rows.t.size();
            Guarded<floatX> token(shape.B * k.width(), "qkv"), token_out(shape.B * produced, "out");
            for (int i = 0; i < shape.B; i++) {
                const size_t at = (size_t)(rows.sequences[i] * P + rows.t[i]) * cached;
                const floatX* row = &p.qkv[rows.row(i) * k.width()];
                std::copy_n(row, k.width(), &token[i * k.width()]);
                std::copy_n(row + produced, cached, &expected_keys[at]);
                std::copy_n(row + produced + cached, cached, &expected_values[at]);
            }
            spoil_scratch(ctx);
            cpu::attention_decode(
                ctx, token_out.data(), {keys.data(), values.data(), P}, token.data(),
                {rows.sequences.data(), rows.t.data(), k.window, p.slopes_or_null(), k.sinks ? p.sinks.data() : nullptr},
                shape);
            for (int i = 0; i < shape.B; i++) std::copy_n(&token_out[i * produced], produced, &out[rows.row(i) * produced]);
        }
        expect_same_bits(keys, expected_keys, "keys");
        expect_same_bits(values, expected_values, "values");
        Bounded expected(out.size()), lse(k.rows() * k.NH);
        Reference(p, false, 0).forward(expected, lse);
        expect_close(out, expected.value, expected.allowed, "out");
    }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------------

struct Rotation {
    int N, NH, NKV, HS, P;
    std::vector<int> positions;
    std::vector<real> table;
    std::vector<floatX> qkv;
    int rotated;  // numbers of a head
    Rotation(int N, int NH, int NKV, int HS, int P, uint64_t seed, int rotated)
        : N(N), NH(NH), NKV(NKV), HS(HS), P(P), rotated(rotated) {
        Rng rng(seed);
        positions = rng.integers(N, 0, P);
        positions[0] = 0;
        positions[N - 1] = P - 1;
        rope_table(table, P, rotated, 10000);
        qkv = rng.normals<floatX>((size_t)N * (NH + 2 * NKV) * HS);
    }
    bool stays(size_t i) const { return (int)(i / HS % (NH + 2 * NKV)) >= NH + NKV || (int)(i % HS) >= rotated; }

    // Turned by direction * angle: two products and their sum, each rounded.
    Bounded expected(const Doubles& x, int direction) const {
        Bounded y(x.size());
        for (size_t i = 0; i < x.size(); i++) {
            const int c = (int)(i % HS), half = rotated / 2, position = positions[i / HS / (NH + 2 * NKV)];
            if (stays(i)) {
                y.value[i] = x[i];
                y.allowed[i] = 0;
                continue;
            }
            const size_t entry = ((size_t)position * half + c % half) * 2;
            const double cosine = table[entry], sine = direction * (double)table[entry + 1];
            const double own = x[i] * cosine, other = c < half ? -x[i + half] * sine : x[i - half] * sine;
            y.add(i, own + other, 2 * u * (std::abs(own) + std::abs(other)) + rounding * std::abs(own + other));
        }
        return y;
    }
};

TEST(Rope, ForwardBackwardAndBack) {
    const Rotation shapes[] = {{1, 1, 1, 2, 1, 13, 2},         {33, 4, 2, 8, 50, 14, 8},   {131, 3, 1, 10, 131, 15, 10},
                               {17, 2, 2, 128, 2048, 16, 128}, {33, 4, 2, 64, 50, 17, 16}, {9, 3, 1, 10, 31, 18, 6}};
    for (const Rotation& k : shapes)
        for (const int threads : {1, 2}) {
            cpu::Ctx ctx(threads);
            const Rope rope = {k.positions.data(), k.table.data(), k.rotated};
            const AttentionShape shape = {1, k.N, k.NH, k.NKV, k.HS};
            Guarded<floatX> turned(k.qkv, "qkv"), gradient(k.qkv, "dqkv");
            cpu::rope_forward(ctx, turned.data(), rope, shape);
            cpu::rope_backward(ctx, gradient.data(), rope, shape);
            const Bounded forward = k.expected(doubles(k.qkv), 1), backward = k.expected(doubles(k.qkv), -1);
            expect_close(turned, forward.value, forward.allowed, "qkv");
            expect_close(gradient, backward.value, backward.allowed, "dqkv");

            // There and back: the roundings of a pair, turned, are at most `rounding` times its length; then its own once more.
            Guarded<floatX> back(turned.values(), "there and back");
            cpu::rope_backward(ctx, back.data(), rope, shape);
            const Doubles x = doubles(k.qkv);
            Doubles allowed(x.size());
            for (size_t i = 0; i < x.size(); i++) {
                const size_t half = (size_t)k.rotated / 2, partner = i % (size_t)k.HS < half ? i + half : i - half;
                const double length = std::hypot(x[i], k.stays(i) ? 0 : x[partner]);
                allowed[i] = k.stays(i) ? 0 : rounding * (length + std::abs(x[i])) + 8 * u * length;
            }
            expect_close(back, x, allowed, "there and back");
        }
}

// Gradients of queries and keys before they were turned have the bits of the two ops one after another. Heads that are turned
// as they are stored, and one that is too large for that; a task per key/value head, and per query head.
TEST(Rope, BackwardWithAttention) {
    for (const Case& k :
         {Case{2, 150, 4, 4, 32, false, true}, Case{1, 70, 4, 1, 64, false, false}, Case{2, 67, 2, 2, 10, false, false},
          Case{1, 65, 2, 1, 128, false, true}, Case{1, 70, 2, 1, 32, false, false, 0, 1.5}}) {
        const Problem p(k, 17);
        std::vector<real> angles;
        const int rotated = k.HS == 64 ? 16 : k.HS;
        rope_table(angles, k.T, rotated, 10000);
        std::vector<int> positions;
        for (size_t row = 0; row < k.rows(); row++) positions.push_back((int)row % k.T - p.first_key((int)row));
        for (const Way& way : all_ways()) {
            SCOPED_TRACE(testing::Message() << way.name << ", HS " << k.HS);
            cpu::Ctx ctx(2);
            way.choose(ctx);
            const Results r = p.run(ctx);
            Guarded<floatX> apart(r.dqkv, "apart"), together(p.qkv.size(), "together");
            const Rope rope = {positions.data(), angles.data(), rotated};
            cpu::rope_backward(ctx, apart.data(), rope, p.shape());
            cpu::attention_rope_backward(ctx, together.data(), p.dout.data(), {p.qkv.data(), r.out.data(), r.lse.data()},
                                         p.mask(), rope, p.shape(), nullptr);
            expect_same_bits(together, apart, "dqkv");
        }
    }
}

}  // namespace test_attention
