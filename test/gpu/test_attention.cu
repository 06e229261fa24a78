// Attention on the GPU: the simple kernels and the tensor-core ones against sums in double. What is allowed: one rounding to
// floatX plus a first order bound on the fp32 arithmetic inside (u = 2^-24), and, for the tensor-core kernels, the rounding of
// weights to bf16. A score s has an absolute error e; p = exp(s - m) then a relative error exp(e) - 1; sums over keys or
// queries add one rounding per term. These bounds hold for the worst case; that the usual error is no larger than it must be, a
// comparison with the CPU's plain loops says: root mean squares, at most twice theirs.
#include <gtest/gtest.h>

#include <set>

#include "../../llmc/cpu/attention.h"
#include "../../llmc/gpu/attention.cuh"
#include "attention_cases.h"
#include "device_memory.h"

namespace test_gpu_attention {

using namespace test;

constexpr double u = roundoff<float>;
constexpr double rounding = roundoff<floatX> * 1.01;  // of a value that was itself computed with small error
constexpr double tiny = 1e-30;                        // weights below e^-86.6 are 0

// Under ThreadSanitizer a block costs a hundred times more: the smaller cases have all kinds of tiles, too.
#ifdef EMU_TSAN
constexpr bool brief = true;
#else
constexpr bool brief = false;
#endif

// ---- the ops under test ----------------------------------------------------------------------------------------------------
struct Results {
    std::vector<floatX> out, dqkv;
    std::vector<float> lse, dsinks;
};

struct Problem {
    Case k;
    float scale;
    std::vector<floatX> qkv, dout, sinks = Rng(3).normals<floatX>(k.NH);
    std::vector<float> slopes;
    std::vector<int> doc_start;

    Problem(const Case& shape, std::vector<floatX> inp, std::vector<floatX> gradient, double factor)
        : k(shape), scale((float)factor), qkv(std::move(inp)), dout(std::move(gradient)), doc_start(k.first_keys()) {
        for (int h = 0; h < k.NH; h++) slopes.push_back((float)std::exp2(-8.0 * (h + 1) / k.NH));
    }
    Problem(const Case& shape, uint64_t seed)
        : Problem(shape, Rng(seed).normals<floatX>(shape.rows() * shape.width(), 1.5),
                  Rng(seed + 1).normals<floatX>(shape.rows() * shape.NH * shape.HS), 1 / std::sqrt((double)shape.HS)) {}

    int first_key(int row) const { return doc_start[row]; }

    Results run(gpu::Ctx& ctx) const {
        const size_t n = k.rows() * k.NH;
        DeviceMemory<floatX> inp(qkv, "qkv"), gradient(dout, "dout"), out(n * k.HS, "out"), dqkv(qkv.size(), "dqkv");
        DeviceMemory<floatX> sink(sinks, "sinks");
        DeviceMemory<float> lse(n, "lse"), bias(slopes, "slopes"), dsinks(std::vector<float>(k.NH), "dsinks");
        DeviceMemory<int> docs(doc_start, "doc_start");
        const AttentionMask mask = {k.masked() ? docs.p() : nullptr, k.alibi ? bias.p() : nullptr};
        const AttentionActs acts = {inp.p(), out.p(), lse.p()};
        gpu::attention_forward(ctx, out.p(), lse.p(), inp.p(), mask, shape());
        if (k.sinks) gpu::sinks_forward(ctx, out.p(), lse.p(), sink.p(), shape());
        gpu::attention_backward(ctx, dqkv.p(), gradient.p(), acts, mask, shape(), nullptr);
        if (k.sinks) gpu::sinks_backward(ctx, dsinks.p(), gradient.p(), acts, sink.p(), shape());
        expect_same_bits(inp.get(), qkv, "qkv, an input");
        expect_same_bits(gradient.get(), dout, "dout, an input");
        return {out.get(), dqkv.get(), lse.get(), dsinks.get()};
    }

    AttentionShape shape() const { return k.shape(scale); }

    Results run_plain_loops() const {
        cpu::Ctx ctx(1);
        ctx.plain = true;
        const size_t n = k.rows() * k.NH;
        Results r{std::vector<floatX>(n * k.HS), std::vector<floatX>(qkv.size()), std::vector<float>(n), {}};
        const AttentionMask mask = {k.masked() ? doc_start.data() : nullptr, k.alibi ? slopes.data() : nullptr};
        cpu::attention_forward(ctx, r.out.data(), r.lse.data(), qkv.data(), mask, shape());
        cpu::attention_backward(ctx, r.dqkv.data(), dout.data(), {qkv.data(), r.out.data(), r.lse.data()}, mask, shape(),
                                nullptr);
        return r;
    }
};

// The kernels for Hopper have tests of their own.
struct BeforeHopper : gpu::Ctx {
    BeforeHopper() { capability = capability == 90 ? 80 : capability; }
};

// The implementations that take heads of this size: plain true or false.
std::vector<bool> implementations(const gpu::Ctx& ctx, const Case& k) {
    if (gpu::choose_attention(ctx, k.shape(1)) == gpu::AttentionKernels::simple) return {true};
    return {true, false};
}
const char* name_of(bool plain) { return plain ? "simple" : "tensor cores"; }

// ---- reference -------------------------------------------------------------------------------------------------------------
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
    // simple: the bounds of the simple kernels. exact_scores: the numbers are such that fp32 computes every score exactly.
    Reference(const Problem& p, bool simple, bool exact_scores = false)
        : p_(p), k_(p.k), qkv_(doubles(p.qkv)), simple_(simple), exact_(exact_scores), operand_(simple ? 0 : rounding) {}

    void forward(Bounded& out, Bounded& lse) const {
        for (int b = 0; b < k_.B; b++)
            for (int t = 0; t < k_.T; t++)
                for (int h = 0; h < k_.NH; h++) {
                    const int first = p_.first_key(b * k_.T + t);
                    const Scores s = scores(b, h, t);
                    const double sink = k_.sinks ? as_double(p_.sinks[h]) : -std::numeric_limits<double>::infinity();
                    double top = sink, sum = 0;
                    for (const double x : s.value) top = std::max(top, x);
                    for (const double x : s.value) sum += std::exp(x - top);
                    sum += std::exp(sink - top);
                    // Weight by weight: its score, its exponential, and one or two more per tile passed.
                    Doubles weight, relative;
                    double weight_error = (k_.T + 4) * u;
                    for (size_t j = 0; j < s.value.size(); j++) {
                        weight.push_back(std::exp(s.value[j] - top) / sum);
                        relative.push_back(exponential_error(s.value[j], top, s.error[j], k_.T / 32 + 1));
                        weight_error += weight[j] * relative[j];
                    }
                    if (k_.sinks) weight_error += (32 + 8 * std::abs(top)) * u;  // lse and the factor of out are rounded again
                    lse.add(k_.statistic(b, t, h), top + std::log(sum), weight_error + 8 * u * (std::abs(top) + std::log(sum)));
                    for (int c = 0; c < k_.HS; c++) {
                        double value = 0, error = 0;
                        for (size_t j = 0; j < s.value.size(); j++) {
                            const double v = s.keep[j] * at(b, first + (int)j, k_.value_head(h), c);
                            value += weight[j] * v;
                            error += weight[j] * std::abs(v) * (relative[j] + operand_ + (k_.T + 4) * u);
                        }
                        out.add(k_.output(b, t, h, c), value,
                                error + std::abs(value) * (weight_error + 4 * u + (k_.sinks ? 2 : 1) * rounding));
                    }
                }
    }

    // Of the out and lse that the op was given.
    void backward(Bounded& d, const Doubles& dout, const Doubles& out, const Doubles& lse) const {
        const int HS = k_.HS;
        const double scale = p_.scale, terms = (double)k_.T * k_.group() + k_.T / 32 + 8;  // of the longest sum
        for (int b = 0; b < k_.B; b++)
            for (int t = 0; t < k_.T; t++)
                for (int h = 0; h < k_.NH; h++) {
                    const int first = p_.first_key(b * k_.T + t);
                    const Scores s = scores(b, h, t);
                    const double *dy = &dout[k_.output(b, t, h, 0)], *y = &out[k_.output(b, t, h, 0)];
                    double correction = 0, correction_magnitude = 0;
                    for (int c = 0; c < HS; c++) {
                        correction += dy[c] * y[c];
                        correction_magnitude += std::abs(dy[c] * y[c]);
                    }
                    for (int j = first; j <= t; j++) {
                        const double score = s.value[j - first], log_sum = lse[k_.statistic(b, t, h)];
                        const double w = std::exp(score - log_sum);
                        const double w_error = w * exponential_error(score, log_sum, s.error[j - first], 1);
                        double dw = 0, dw_magnitude = 0;
                        for (int c = 0; c < HS; c++) {
                            const double x = s.keep[j - first] * dy[c] * at(b, j, k_.value_head(h), c);
                            dw += x;
                            dw_magnitude += std::abs(x);
                        }
                        const double keep = s.keep[j - first], slope = s.derivative[j - first];
                        const double ds = scale * slope * w * (dw - correction);
                        const double ds_error =
                            scale * ((slope * (w_error + (4 * u + operand_) * w) + s.derivative_error[j - first] * w) *
                                         std::abs(dw - correction) +
                                     (w + w_error) * (HS + 2) * u * (dw_magnitude + correction_magnitude));
                        for (int c = 0; c < HS; c++) {
                            const double q = at(b, t, h, c), key = at(b, j, k_.key_head(h), c);
                            d.add(k_.index(b, j, k_.value_head(h), c), keep * w * dy[c],
                                  keep * std::abs(dy[c]) * (w_error + (terms * u + operand_) * w));
                            d.add(k_.index(b, t, h, c), ds * key, std::abs(key) * (ds_error + terms * u * std::abs(ds)));
                            d.add(k_.index(b, j, k_.key_head(h), c), ds * q,
                                  std::abs(q) * (ds_error + terms * u * std::abs(ds)));
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
            d.add(h, -term, std::abs(term) * (k_.HS + 16 + 4 * std::abs(exponent) + (double)k_.rows()) * u);
        }
        return d;
    }

private:
    struct Scores {
        Doubles value, error, derivative, derivative_error, keep;
    };
    double at(int b, int t, int head, int c) const { return qkv_[k_.index(b, t, head, c)]; }

    // Relative error of exp(score - shift), after n further factors of that kind. The difference is rounded, and the special
    // unit works with its product with log2(e), rounded again; the tensor-core kernels round score and shift before.
    double exponential_error(double score, double shift, double error, int n) const {
        const double x = std::min(std::abs(score - shift), 100.0);
        const double each = simple_ ? 4 * u : 8 * u;
        const double before = simple_ ? 0 : 3 * u * (std::abs(score) + std::abs(shift));
        return std::expm1(error + before + 3 * u * x + 4 * u + (2 * n + 1) * each);
    }

    Scores scores(int b, int h, int t) const {
        Scores s;
        for (int j = p_.first_key(b * k_.T + t); j <= t; j++) {
            double dot = 0, magnitude = 0;
            for (int c = 0; c < k_.HS; c++) {
                const double x = at(b, t, h, c) * at(b, j, k_.key_head(h), c);
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
    const bool simple_, exact_;
    const double operand_;
};

void check(const Problem& p, const Results& r, bool simple, bool exact_scores = false) {
    const Reference reference(p, simple, exact_scores);
    Bounded out(r.out.size()), lse(r.lse.size()), dqkv(r.dqkv.size());
    reference.forward(out, lse);
    expect_close(r.out, out.value, out.allowed, "out");
    expect_close(r.lse, lse.value, lse.allowed, "lse");
    reference.backward(dqkv, doubles(p.dout), doubles(r.out), doubles(r.lse));
    expect_close(r.dqkv, dqkv.value, dqkv.allowed, "dqkv");
    const Bounded dsinks = reference.sinks_backward(doubles(p.dout), doubles(r.out), doubles(r.lse));
    expect_close(r.dsinks, dsinks.value, dsinks.allowed, "dsinks");
}

// A row that sees only itself has weight 1: its value comes out unchanged.
void expect_first_tokens_unchanged(const Problem& p, const Results& r) {
    const Case& k = p.k;
    for (int b = 0; b < k.B; b++)
        for (int t = 0; t < k.T; t++)
            for (int h = 0; h < k.NH && p.first_key(b * k.T + t) == t && !k.sinks && k.dropout == 0; h++)
                for (int c = 0; c < k.HS; c++)
                    ASSERT_EQ(as_double(r.out[k.output(b, t, h, c)]), as_double(p.qkv[k.index(b, t, k.value_head(h), c)]))
                        << "sequence " << b << ", row " << t << ", head " << h;
}

void expect_same_results(const Results& a, const Results& b) {
    expect_same_bits(a.out, b.out, "out");
    expect_same_bits(a.lse, b.lse, "lse");
    expect_same_bits(a.dqkv, b.dqkv, "dqkv");
    expect_same_bits(a.dsinks, b.dsinks, "dsinks");
}

// ---- values ----------------------------------------------------------------------------------------------------------------
class Attention : public testing::TestWithParam<Case> {};

// T: one token, part of a tile, a tile, one more, several; tiles have 32, 64 or 128 rows. Head sizes that only the simple
// kernels take: smaller than a warp, no whole number of packs, above 128, the largest.
INSTANTIATE_TEST_SUITE_P(SimpleSizes, Attention,
                         testing::Values(Case{1, 1, 1, 1, 16, false, false}, Case{2, 17, 2, 1, 40, true, true},
                                         Case{1, 65, 4, 2, 16, true, false}, Case{3, 75, 2, 2, 24, false, true},
                                         Case{1, 33, 6, 3, 5, true, false}, Case{1, 20, 2, 1, 160, true, true},
                                         Case{1, 34, 1, 1, 256, false, false}, Case{1, 3, 1, 1, 1, false, false}));
INSTANTIATE_TEST_SUITE_P(TensorCoreSizes, Attention,
                         testing::Values(Case{1, 1, 1, 1, 64, false, false}, Case{2, 17, 2, 1, 64, true, true},
                                         Case{1, 64, 2, 2, 64, false, false}, Case{1, 65, 4, 1, 64, true, false},
                                         Case{3, 130, 2, 1, 64, false, true}, Case{1, 260, 1, 1, 64, false, false},
                                         Case{2, 200, 1, 1, 64, true, true}, Case{1, 1, 2, 1, 80, true, true},
                                         Case{1, 65, 1, 1, 80, false, false}, Case{2, 130, 2, 1, 80, true, true},
                                         Case{1, 64, 2, 1, 96, false, false}, Case{2, 130, 1, 1, 96, true, true},
                                         Case{1, 17, 1, 1, 128, true, false}, Case{1, 128, 2, 2, 128, false, false},
                                         Case{1, 65, 4, 2, 128, true, false}, Case{2, 130, 2, 1, 128, false, true},
                                         Case{1, 200, 1, 1, 128, true, true}));

// Windows of one key, within a tile, of a tile, of several. Caps, dropout, sinks, alone and together.
INSTANTIATE_TEST_SUITE_P(Options, Attention,
                         testing::Values(Case{1, 70, 2, 1, 16, false, false, 1}, Case{1, 150, 2, 2, 64, true, true, 20},
                                         Case{1, 130, 2, 1, 80, false, false, 64}, Case{2, 40, 4, 2, 32, true, true, 0, 1.5},
                                         Case{1, 70, 2, 1, 64, false, false, 0, 0.7},
                                         Case{1, 40, 2, 2, 16, false, true, 0, 0, 0.3},
                                         Case{2, 33, 4, 2, 64, false, false, 0, 0, 0, true},
                                         Case{1, 70, 2, 1, 24, true, true, 40, 2, 0.2, true}));

TEST_P(Attention, EachImplementation) {
    const Problem p(GetParam(), 1);
    if (brief && p.k.rows() * p.k.NH > 270) GTEST_SKIP() << "too long under ThreadSanitizer";
    BeforeHopper ctx;
    for (const bool plain : implementations(ctx, p.k)) {
        SCOPED_TRACE(name_of(plain));
        ctx.plain = plain;
        spoil_scratch(ctx);
        const Results r = p.run(ctx);
        check(p, r, plain);
        expect_first_tokens_unchanged(p, r);
    }
}

TEST(AttentionRuns, TheSameBitsTwice) {
    for (const Case& k :
         {Case{2, 40, 4, 2, 24, true, true}, Case{1, 140, 2, 1, 64, true, true}, Case{1, 70, 4, 1, 128, false, false}}) {
        const Problem p(k, 5);
        BeforeHopper ctx;
        for (const bool plain : implementations(ctx, k)) {
            ctx.plain = plain;
            const Results r = p.run(ctx);
            spoil_scratch(ctx);
            expect_same_results(p.run(ctx), r);
        }
    }
}

// Rounding weights to bf16 adds an error about as large as that of rounding the result, and independent of it: root mean
// squares grow by about sqrt(2). More than twice would be a loss that a kernel could avoid.
TEST(AttentionAccuracy, AtMostTwiceTheErrorOfThePlainLoops) {
    if (brief) GTEST_SKIP() << "too long under ThreadSanitizer";
    BeforeHopper ctx;
    for (const Case& k : {Case{1, 150, 2, 1, 64, false, false}, Case{1, 150, 2, 2, 80, true, false},
                          Case{2, 130, 1, 1, 96, false, true}, Case{1, 200, 2, 1, 128, false, false}}) {
        SCOPED_TRACE(testing::PrintToString(k));
        const Problem p(k, 3);
        const Reference reference(p, true);
        // Gradients of each implementation's own out and lse, as the op is defined.
        const auto errors = [&](const Results& r) {
            Bounded out(r.out.size()), lse(r.lse.size()), dqkv(r.dqkv.size());
            reference.forward(out, lse);
            reference.backward(dqkv, doubles(p.dout), doubles(r.out), doubles(r.lse));
            Doubles squares(4);
            for (size_t i = 0; i < r.out.size(); i++) squares[0] += std::pow(as_double(r.out[i]) - out.value[i], 2);
            for (size_t i = 0; i < r.dqkv.size(); i++) {
                const int head = (int)(i % k.width() / k.HS), part = head < k.NH ? 1 : head < k.NH + k.NKV ? 2 : 3;
                squares[part] += std::pow(as_double(r.dqkv[i]) - dqkv.value[i], 2);
            }
            return squares;
        };
        const Doubles plain_loops = errors(p.run_plain_loops());
        for (const bool plain : implementations(ctx, k)) {
            ctx.plain = plain;
            const Doubles squares = errors(p.run(ctx));
            const char* names[] = {"out", "dq", "dk", "dv"};
            for (int i = 0; i < 4; i++)
                EXPECT_LE(std::sqrt(squares[i]), 2 * std::sqrt(plain_loops[i])) << names[i] << ", " << name_of(plain);
        }
    }
}

// Equal scores: each row is the mean of the values so far, lse the logarithm of their number.
TEST(AttentionValues, EqualScoresGiveMeans) {
    const Case k{1, 90, 2, 1, 64, false, false};
    std::vector<floatX> qkv(k.rows() * k.width(), from_double<floatX>(0));
    for (int t = 0; t < k.T; t++)
        for (int c = 0; c < k.HS; c++) qkv[k.index(0, t, 3, c)] = from_double<floatX>(t % 8 - c);
    const Problem p(k, qkv, Rng(6).normals<floatX>(k.rows() * k.NH * k.HS), 1);
    BeforeHopper ctx;
    for (const bool plain : implementations(ctx, k)) {
        ctx.plain = plain;
        const Results r = p.run(ctx);
        double sum = 0;
        for (int t = 0; t < k.T; t++) {
            sum += t % 8;
            for (int h = 0; h < k.NH; h++) {
                EXPECT_NEAR(r.lse[k.statistic(0, t, h)], std::log(t + 1.0), 8 * u * (1 + std::log(t + 1.0)));
                for (int c = 0; c < k.HS; c++) {
                    const double mean = sum / (t + 1) - c;  // the sums are whole numbers, weights are 1, both exact
                    EXPECT_NEAR(as_double(r.out[k.output(0, t, h, c)]), mean, (rounding + 4 * u) * std::abs(mean));
                }
            }
        }
    }
}

// Scores up to half a million, of both signs; as sums of whole numbers they are exact in fp32. The weights are 0 and 1 but for
// ties. The tensor-core kernels round scores in units of log2: for them they count as inexact.
TEST(AttentionValues, LargeScoresDoNotOverflow) {
    BeforeHopper ctx;
    for (const int shift : {0, 8, -8}) {  // whole rows of large positive and of large negative scores
        const Case k{1, 75, 2, 1, 64, false, true};
        Rng rng(7);
        std::vector<floatX> qkv = rng.normals<floatX>(k.rows() * k.width());
        for (size_t i = 0; i < qkv.size(); i++) {
            const size_t head = i % k.width() / k.HS;
            const int any = rng.below(17) - 8, some = rng.below(9);
            if (head < 2) qkv[i] = from_double<floatX>(16 * (shift == 0 ? any : 4));
            if (head == 2) qkv[i] = from_double<floatX>(16 * (shift == 0 ? any : shift > 0 ? some : -some));
        }
        const Problem p(k, qkv, rng.normals<floatX>(k.rows() * k.NH * k.HS), 1);
        for (const bool plain : implementations(ctx, k)) {
            SCOPED_TRACE(testing::Message() << name_of(plain) << ", shift " << shift);
            ctx.plain = plain;
            const Results r = p.run(ctx);
            check(p, r, plain, plain);
            double largest = 0;
            for (const float x : r.lse) largest = std::max(largest, (double)std::abs(x));
            EXPECT_GT(largest, 1e5);
        }
    }
}

// ---- what a row may see ----------------------------------------------------------------------------------------------------
// Later tokens turn into others, a million million times larger: rows before keep their bits, out and lse and their queries'
// gradients.
TEST(AttentionMask, LaterTokensChangeNothingBefore) {
    BeforeHopper ctx;
    for (const int HS : {16, 64}) {
        const Case k{1, 140, 2, 1, HS, true, false};
        const Problem p(k, 8);
        for (const bool plain : implementations(ctx, k)) {
            ctx.plain = plain;
            const Results before = p.run(ctx);
            for (const int changed : brief ? std::vector{100} : std::vector{1, 31, 64, 100, 139}) {
                SCOPED_TRACE(testing::Message() << name_of(plain) << ", tokens from " << changed << " on changed");
                Problem other = p;
                const std::vector<floatX> noise = Rng(9).normals<floatX>(other.qkv.size(), 1e12);
                std::copy(noise.begin() + changed * k.width(), noise.end(), other.qkv.begin() + changed * k.width());
                const Results after = other.run(ctx);
                const auto until = [&](const auto& x, size_t row) { return std::vector(x.begin(), x.begin() + changed * row); };
                expect_same_bits(until(after.out, k.NH * k.HS), until(before.out, k.NH * k.HS), "out");
                for (int t = 0; t < changed; t++)
                    for (int h = 0; h < k.NH; h++) {
                        ASSERT_EQ(after.lse[k.statistic(0, t, h)], before.lse[k.statistic(0, t, h)]) << "lse of row " << t;
                        for (int c = 0; c < k.HS; c++)
                            ASSERT_EQ(as_double(after.dqkv[k.index(0, t, h, c)]), as_double(before.dqkv[k.index(0, t, h, c)]))
                                << "query gradient of row " << t;
                    }
                ASSERT_NE(as_double(after.out[k.output(0, changed, 0, 0)]), as_double(before.out[k.output(0, changed, 0, 0)]))
                    << "the change shows";
            }
        }
    }
}

// One document changes, tokens and gradients: all others keep their bits, gradients included, and so does the other sequence.
TEST(AttentionMask, DocumentsDoNotSeeEachOther) {
    BeforeHopper ctx;
    for (const int HS : {8, 64}) {
        const Case k{2, 145, 2, 1, HS, true, true};
        const Problem p(k, 10);
        for (const bool plain : implementations(ctx, k)) {
            ctx.plain = plain;
            const Results before = p.run(ctx);
            for (const int start : brief ? std::vector{64} : std::vector{0, 1, 3, 64, 128, 129}) {
                SCOPED_TRACE(testing::Message() << name_of(plain) << ", document at " << start << " changed");
                Problem other = p;
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
}

// ---- decoding --------------------------------------------------------------------------------------------------------------
// Token by token over caches whose later rows are NaN, against the same attention over whole sequences, which begin one after
// another (DecodedRows).
TEST(AttentionDecode, TokenByTokenIsTheWholeSequence) {
    for (Case k : {Case{1, 5, 1, 1, 8, false, false}, Case{2, 70, 4, 2, 24, true, false}, Case{2, 37, 6, 1, 5, false, false},
                   Case{1, 41, 2, 2, 80, true, false}, Case{1, 70, 2, 1, 64, true, false}, Case{1, 40, 2, 1, 256, false, false},
                   Case{2, 50, 4, 2, 24, true, false, 20, 1.5, 0, true}}) {
        if (brief) k.T = std::min(k.T, 7);
        SCOPED_TRACE(testing::PrintToString(k));
        const Problem p(k, 12);
        AttentionShape shape = p.shape();
        shape.T = 1;
        DeviceMemory<floatX> sinks(p.sinks, "sinks");
        const int P = k.T + 3;  // rows of the cache
        const size_t cached = (size_t)k.NKV * k.HS, produced = (size_t)k.NH * k.HS;
        BeforeHopper ctx;
        DeviceMemory<floatX> keys((k.B + 1) * P * cached, "keys"), values((k.B + 1) * P * cached, "values");
        DeviceMemory<float> slopes(p.slopes, "slopes");
        std::vector<floatX> expected_keys = keys.get(), expected_values = values.get(), out(k.rows() * produced);
        for (int step = 0; step < k.T + k.B - 1; step++) {
            const DecodedRows rows(k, step);
            shape.B = (int)rows.t.size();
            std::vector<floatX> tokens(shape.B * k.width());
            for (int i = 0; i < shape.B; i++) {
                const size_t at = (size_t)(rows.sequences[i] * P + rows.t[i]) * cached;
                const floatX* row = &p.qkv[rows.row(i) * k.width()];
                std::copy_n(row, k.width(), &tokens[i * k.width()]);
                std::copy_n(row + produced, cached, &expected_keys[at]);
                std::copy_n(row + produced + cached, cached, &expected_values[at]);
            }
            DeviceMemory<floatX> qkv(tokens, "qkv"), token_out(shape.B * produced, "out");
            DeviceMemory<int> sequences(rows.sequences, "sequences"), t(rows.t, "t");
            gpu::attention_decode(
                ctx, token_out.p(), {keys.p(), values.p(), P}, qkv.p(),
                {sequences.p(), t.p(), k.window, k.alibi ? slopes.p() : nullptr, k.sinks ? sinks.p() : nullptr}, shape);
            const std::vector<floatX> result = token_out.get();
            for (int i = 0; i < shape.B; i++) std::copy_n(&result[i * produced], produced, &out[rows.row(i) * produced]);
        }
        expect_same_bits(keys.get(), expected_keys, "keys");
        expect_same_bits(values.get(), expected_values, "values");
        Bounded expected(out.size()), lse(k.rows() * k.NH);
        Reference(p, true).forward(expected, lse);
        expect_close(out, expected.value, expected.allowed, "out");
    }
}

// ---- limits and plans ------------------------------------------------------------------------------------------------------
TEST(AttentionLimits, RefusedByName) {
    for (const int HS : {1, 16, 40, 64, 80, 96, 128, 256}) EXPECT_EQ(gpu::attention_limits(HS), "") << HS;
    for (const int HS : {257, 512})
        EXPECT_NE(gpu::attention_limits(HS).find(std::to_string(HS) + " is above 256"), std::string::npos) << HS;
    BeforeHopper ctx;
    EXPECT_THROW(gpu::attention_forward(ctx, nullptr, nullptr, nullptr, {}, {1, 1, 1, 1, 257, 1}), Error);
}

TEST(AttentionLimits, WhoRuns) {
    BeforeHopper ctx;
    const bool fast = std::is_same<floatX, bf16>::value;
    for (const int HS : {16, 40, 64, 80, 96, 128, 256}) {
        const bool fits = HS == 64 || HS == 80 || HS == 96 || HS == 128;
        ctx.plain = false;
        EXPECT_EQ(gpu::choose_attention(ctx, HS) != gpu::AttentionKernels::simple, fast && fits) << HS;
        ctx.plain = true;
        EXPECT_EQ(gpu::choose_attention(ctx, HS), gpu::AttentionKernels::simple) << HS;
    }
}

// Each tile of each head once; within a section long tiles first; sections one after another.
TEST(AttentionPlan, EachTileOnceLongOnesFirst) {
    for (const gpu::WorkOrder& order : {gpu::WorkOrder{1, 1, 1}, {5, 7, 3}, {4, 6, 6}, {3, 8, 4}, {3, 8, 8}, {2, 5, 1}}) {
        std::set<std::pair<int, int>> seen;
        int section = 0, tile = 0;
        for (int i = 0; i < order.items(); i++) {
            const gpu::WorkOrder::Item item = order.item(i);
            EXPECT_TRUE(item.head >= 0 && item.head < order.heads && item.tile >= 0 && item.tile < order.tiles);
            EXPECT_TRUE(seen.insert({item.head, item.tile}).second);
            if (item.head / order.section != section) {
                section++;
                tile = 0;
            }
            EXPECT_EQ(item.head / order.section, section);
            EXPECT_GE(item.tile, tile);
            tile = item.tile;
        }
        EXPECT_EQ((int)seen.size(), order.items());
    }
}

// Sections hold whole groups of heads, which read the same keys, at least one group and at most all heads.
TEST(AttentionPlan, SectionsFitTheCache) {
    EXPECT_EQ(gpu::work_order(3, 32, 4, 2 << 20, 16 << 20).section, 32);
    EXPECT_EQ(gpu::work_order(3, 128, 4, 2 << 20, 16 << 20).section, 32);
    EXPECT_EQ(gpu::work_order(3, 32, 4, 64 << 20, 16 << 20).section, 4);
    EXPECT_EQ(gpu::work_order(3, 32, 1, 3 << 20, 16 << 20).section, 5);
}

#ifndef PRECISION_FP32
// ldmatrix reads the same chunk of 8 rows at once: free of bank conflicts if they lie in 8 different 16-byte columns of the 128
// bytes that all banks hold. And each chunk has a place of its own.
template <int HS>
void check_tile_layout() {
    std::set<int> places;
    for (int row = 0; row < 64; row++)
        for (int chunk = 0; chunk < HS / 8; chunk++) {
            const int offset = gpu::mma::tile_offset<HS>(row, chunk);
            EXPECT_TRUE(offset % 8 == 0 && offset >= row * HS && offset < (row + 1) * HS);
            EXPECT_TRUE(places.insert(offset).second);
            if (row % 8 == 0) {
                std::set<int> columns;
                for (int i = 0; i < 8; i++) columns.insert(gpu::mma::tile_offset<HS>(row + i, chunk) / 8 % 8);
                EXPECT_EQ(columns.size(), 8u) << "HS " << HS << ", row " << row << ", chunk " << chunk;
            }
            // The way in which products compute it.
            const int own_row = row % 16, own_chunk = chunk % 2;
            EXPECT_EQ(gpu::mma::LaneOffset<HS>(own_row, own_chunk)(row / 16, chunk - own_chunk), offset);
        }
}
TEST(AttentionPlan, TilesAreFreeOfBankConflicts) {
    check_tile_layout<64>();
    check_tile_layout<80>();
    check_tile_layout<96>();
    check_tile_layout<128>();
}

// What a block may ask for on GPUs with 100 KB of shared memory per multiprocessor.
TEST(AttentionPlan, FitsInSharedMemoryOfSmallGpus) {
    const size_t limit = 99 << 10;
    EXPECT_LE(gpu::mma::Forward<128>::bytes, limit);
    EXPECT_LE(gpu::mma::BackwardQueries<128>::bytes, limit);
    EXPECT_LE(gpu::mma::BackwardQueries<96>::bytes, limit);
    EXPECT_LE(gpu::mma::BackwardKeys<128>::bytes, limit);
    for (const int HS : {128, 256})
        EXPECT_LE(gpu::simple::backward_bytes(HS, HS == 128 ? gpu::simple::block_rows<4> : gpu::simple::block_rows<8>), limit);
}
#endif

}  // namespace test_gpu_attention
