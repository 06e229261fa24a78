// Attention for Hopper against sums in double, in bf16 whatever the program's precision. What is allowed: one rounding of
// results and one of weights (P, dS) to bf16, plus a first order bound on the fp32 arithmetic inside, u = 2^-24. A score s has
// an absolute error e; p = exp(s - m) then a relative error exp(e) - 1; sums over keys or queries add one rounding per term.
#include <gtest/gtest.h>

#include "../../llmc/gpu/attention_hopper_backward.cuh"
#include "attention_cases.h"
#include "device_memory.h"

namespace test_gpu_attention_hopper {

using namespace test;

constexpr double u = roundoff<float>;
constexpr double rounding = roundoff<bf16> * 1.01;  // of a value that was itself computed with small error
constexpr double tiny = 1e-30;                      // weights below 2^-126 are 0

// ---- the ops under test ----------------------------------------------------------------------------------------------------
struct Results {
    std::vector<bf16> out, dqkv;
    std::vector<float> lse;
};

struct Problem {
    Case k;
    float scale;
    std::vector<bf16> qkv, dout;
    std::vector<float> slopes;
    std::vector<int> doc_start;

    Problem(const Case& shape, uint64_t seed)
        : k(shape),
          scale((float)(1 / std::sqrt((double)shape.HS))),
          qkv(Rng(seed).normals<bf16>(shape.rows() * shape.width(), 1.5)),
          dout(Rng(seed + 1).normals<bf16>(shape.rows() * shape.NH * shape.HS)),
          doc_start(document_starts(k.B, k.T)) {
        for (int h = 0; h < k.NH; h++) slopes.push_back((float)std::exp2(-8.0 * (h + 1) / k.NH));
    }

    int first_key(int b, int t) const { return k.documents ? doc_start[b * k.T + t] : 0; }

    AttentionShape shape() const { return {k.B, k.T, k.NH, k.NKV, k.HS, scale}; }

    // Backward in one kernel adds up queries' gradients in memory, in any order.
    enum class Backward { none, two_kernels, one_kernel };
    Results run(gpu::Ctx& ctx, Backward backward = Backward::two_kernels) const {
        const size_t n = k.rows() * k.NH;
        DeviceMemory<bf16> inp(qkv, "qkv"), gradient(dout, "dout"), out(n * k.HS, "out"), dqkv(qkv.size(), "dqkv");
        DeviceMemory<float> lse(n, "lse"), bias(slopes, "slopes"),
            sums(gpu::attention_hopper_sums(shape()), "sums of queries' gradients");
        DeviceMemory<int> docs(doc_start, "doc_start");
        const AttentionMask mask = {k.documents ? docs.p() : nullptr, k.alibi ? bias.p() : nullptr};
        gpu::attention_forward_hopper(ctx, out.p(), lse.p(), inp.p(), mask, shape());
        if (backward == Backward::none) return {out.get(), dqkv.get(), lse.get()};
        float* dq_sums = backward == Backward::one_kernel ? sums.p() : nullptr;
        gpu::attention_backward_hopper(ctx, dqkv.p(), gradient.p(), out.p(), lse.p(), inp.p(), mask, shape(), dq_sums);
        expect_same_bits(inp.get(), qkv, "qkv, an input");
        expect_same_bits(gradient.get(), dout, "dout, an input");
        return {out.get(), dqkv.get(), lse.get()};
    }
};

// ---- reference -------------------------------------------------------------------------------------------------------------
struct Bounded {
    Doubles value, allowed, plain;  // plain: squared error to expect of one rounding per result and per weight
    explicit Bounded(size_t n) : value(n), allowed(n, tiny), plain(n) {}
    void add(size_t i, double x, double error, double weight_rounding) {
        value[i] += x;
        allowed[i] += error;
        plain[i] += weight_rounding * weight_rounding;
    }
};

class Reference {
public:
    explicit Reference(const Problem& p) : p_(p), k_(p.k), qkv_(doubles(p.qkv)) {}

    void forward(Bounded& out, Bounded& lse) const {
        each_row([&](int b, int t, int h) {
            const int first = p_.first_key(b, t);
            const Scores s = scores(b, h, t);
            double top = -1e300, sum = 0;
            for (const double x : s.value) top = std::max(top, x);
            for (const double x : s.value) sum += std::exp(x - top);
            Doubles weight, relative;
            double weight_error = (k_.T + 4) * u;
            for (size_t j = 0; j < s.value.size(); j++) {
                weight.push_back(std::exp(s.value[j] - top) / sum);
                relative.push_back(exponential_error(s.value[j], top, s.error[j], k_.T / 64 + 1));
                weight_error += weight[j] * relative[j];
            }
            lse.add(k_.statistic(b, t, h), top + std::log(sum), weight_error + 8 * u * (std::abs(top) + std::log(sum)), 0);
            for (int c = 0; c < k_.HS; c++) {
                const size_t i = k_.output(b, t, h, c);
                for (size_t j = 0; j < s.value.size(); j++) {
                    const double x = weight[j] * at(b, first + (int)j, k_.value_head(h), c);
                    out.add(i, x, std::abs(x) * (relative[j] + rounding + (k_.T + 4) * u), x * rounding);
                }
                out.allowed[i] += std::abs(out.value[i]) * (weight_error + 4 * u + rounding);
            }
        });
        finish(out);
    }

    // Of the out and lse that the op was given.
    void backward(Bounded& d, const Doubles& dout, const Doubles& out, const Doubles& lse) const {
        const int HS = k_.HS;
        const double scale = p_.scale, terms = (double)k_.T * k_.group() + k_.T / 64 + 8;  // of the longest sum
        each_row([&](int b, int t, int h) {
            const int first = p_.first_key(b, t);
            const Scores s = scores(b, h, t);
            const double *dy = &dout[k_.output(b, t, h, 0)], *y = &out[k_.output(b, t, h, 0)];
            double correction = 0, correction_magnitude = 0;
            for (int c = 0; c < HS; c++) {
                correction += dy[c] * y[c];
                correction_magnitude += std::abs(dy[c] * y[c]);
            }
            for (int j = first; j <= t; j++) {
                const double score = s.value[j - first], log_sum = lse[k_.statistic(b, t, h)];
                const double w = std::exp(score - log_sum),
                             w_error = w * exponential_error(score, log_sum, s.error[j - first], 1);
                double dw = 0, dw_magnitude = 0;
                for (int c = 0; c < HS; c++) {
                    const double x = dy[c] * at(b, j, k_.value_head(h), c);
                    dw += x;
                    dw_magnitude += std::abs(x);
                }
                const double ds = scale * w * (dw - correction);
                const double ds_error = scale * ((w_error + (4 * u + rounding) * w) * std::abs(dw - correction) +
                                                 (w + w_error) * (HS + 2) * u * (dw_magnitude + correction_magnitude));
                for (int c = 0; c < HS; c++) {
                    const double q = at(b, t, h, c), key = at(b, j, k_.key_head(h), c);
                    d.add(k_.index(b, j, k_.value_head(h), c), w * dy[c],
                          std::abs(dy[c]) * (w_error + (terms * u + rounding) * w), w * dy[c] * rounding);
                    d.add(k_.index(b, t, h, c), ds * key, std::abs(key) * (ds_error + terms * u * std::abs(ds)),
                          ds * key * rounding);
                    d.add(k_.index(b, j, k_.key_head(h), c), ds * q, std::abs(q) * (ds_error + terms * u * std::abs(ds)),
                          ds * q * rounding);
                }
            }
        });
        for (size_t i = 0; i < d.value.size(); i++) d.allowed[i] += rounding * std::abs(d.value[i]);
        finish(d);
    }

private:
    struct Scores {
        Doubles value, error;
    };
    template <class F>
    void each_row(F f) const {
        for (int b = 0; b < k_.B; b++)
            for (int t = 0; t < k_.T; t++)
                for (int h = 0; h < k_.NH; h++) f(b, t, h);
    }
    static void finish(Bounded& x) {
        for (size_t i = 0; i < x.value.size(); i++) x.plain[i] += std::pow(x.value[i] * rounding, 2);
    }
    double at(int b, int t, int head, int c) const { return qkv_[k_.index(b, t, head, c)]; }

    // Relative error of exp(score - shift), after n further factors of that kind: score and shift are scaled by log2(e) and
    // rounded before the special unit, whose error is 2^-22.
    static double exponential_error(double score, double shift, double error, int n) {
        const double x = std::min(std::abs(score - shift), 100.0);
        return std::expm1(error + 3 * u * (std::abs(score) + std::abs(shift) + x) + 4 * u + (2 * n + 1) * 8 * u);
    }

    Scores scores(int b, int h, int t) const {
        Scores s;
        for (int j = p_.first_key(b, t); j <= t; j++) {
            double dot = 0, magnitude = 0;
            for (int c = 0; c < k_.HS; c++) {
                const double x = at(b, t, h, c) * at(b, j, k_.key_head(h), c);
                dot += x;
                magnitude += std::abs(x);
            }
            // The bias is put together from slope times the tile's distance (at most T + 128) and slope times the column.
            const double slope = k_.alibi ? (double)p_.slopes[h] : 0;
            s.value.push_back((double)p_.scale * dot + slope * (j - t));
            s.error.push_back(u * ((k_.HS + 3) * (double)p_.scale * magnitude + 4 * slope * (k_.T + 128)));
        }
        return s;
    }

    const Problem& p_;
    const Case& k_;
    const Doubles qkv_;
};

void check(const Problem& p, const Results& r) {
    const Reference reference(p);
    Bounded out(r.out.size()), lse(r.lse.size()), dqkv(r.dqkv.size());
    reference.forward(out, lse);
    expect_close(r.out, out.value, out.allowed, "out");
    expect_close(r.lse, lse.value, lse.allowed, "lse");
    reference.backward(dqkv, doubles(p.dout), doubles(r.out), doubles(r.lse));
    expect_close(r.dqkv, dqkv.value, dqkv.allowed, "dqkv");

    // The bounds above hold for the worst case. That the usual error is no larger than it must be, root mean squares say: at
    // most 1.5 times that of independent roundings, which is 1 / sqrt(6) of their largest (1 / sqrt(3) of the half unit in the
    // last place, which relative to numbers of one binade is 1 / sqrt(2) of its largest).
    const auto check_usual = [&](const std::vector<bf16>& x, const Bounded& expected, int first_head, int heads, int all,
                                 const char* name) {
        double square = 0, allowed = 0;
        for (size_t i = 0; i < x.size(); i++) {
            const int head = (int)(i / p.k.HS % all);
            if (head < first_head || head >= first_head + heads) continue;
            square += std::pow(as_double(x[i]) - expected.value[i], 2);
            allowed += expected.plain[i];
        }
        const double ratio = std::sqrt(square / (allowed / 6));
        EXPECT_TRUE(ratio <= 1.5) << name << ": root mean square error " << ratio << " times that of independent roundings";
    };
    if (p.k.T == 1) return;  // dq and dk are 0, but for the rounding of D
    const int NH = p.k.NH, NKV = p.k.NKV, all = NH + 2 * NKV;
    check_usual(r.out, out, 0, NH, NH, "out");
    check_usual(r.dqkv, dqkv, 0, NH, all, "dq");
    check_usual(r.dqkv, dqkv, NH, NKV, all, "dk");
    check_usual(r.dqkv, dqkv, NH + NKV, NKV, all, "dv");
}

// A row that sees only itself has weight 1: its value comes out unchanged.
void expect_first_tokens_unchanged(const Problem& p, const Results& r) {
    const Case& k = p.k;
    for (int b = 0; b < k.B; b++)
        for (int t = 0; t < k.T; t++)
            for (int h = 0; h < k.NH && p.first_key(b, t) == t; h++)
                for (int c = 0; c < k.HS; c++)
                    ASSERT_EQ(as_double(r.out[k.output(b, t, h, c)]), as_double(p.qkv[k.index(b, t, k.value_head(h), c)]))
                        << "sequence " << b << ", row " << t << ", head " << h;
}

void expect_same_results(const Results& a, const Results& b) {
    expect_same_bits(a.out, b.out, "out");
    expect_same_bits(a.lse, b.lse, "lse");
    expect_same_bits(a.dqkv, b.dqkv, "dqkv");
}

// ThreadSanitizer takes half a second per block of 384 threads and looks at order, not at values: the small shapes will do.
#ifdef EMU_TSAN
constexpr bool slow = true;
#else
constexpr bool slow = false;
#endif
#ifdef EMU_ASAN
constexpr unsigned runs = 1;  // it makes the emulator slow, too
#else
constexpr unsigned runs = 3;
#endif

template <class Base>
class OnHopper : public Base {
protected:
    gpu::Ctx ctx;
    void SetUp() override {
        if (!gpu::attention_hopper_takes(ctx, 64)) GTEST_SKIP() << "wants compute capability 9.0; this is " << ctx.name;
        if (slow && !small()) GTEST_SKIP() << "takes too long under ThreadSanitizer";
    }
    virtual bool small() const { return false; }
};
class AttentionHopper : public OnHopper<testing::TestWithParam<Case>> {
    bool small() const override { return GetParam().B == 1 && GetParam().T * GetParam().NH <= 260; }
};
class AttentionHopperMore : public OnHopper<testing::Test> {};

// T: one token, part of a warpgroup's 64 rows, all of them, one more, two warpgroups, part of a second tile of queries; then
// enough tiles of keys for a ring to go round within an item (3 of 128 at HS 128, 5 at HS 64).
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionHopper,
                         testing::Values(Case{1, 1, 1, 1, 64, false, false}, Case{2, 17, 2, 1, 64, true, true},
                                         Case{1, 64, 2, 2, 64, false, false}, Case{1, 65, 5, 1, 64, true, false},
                                         Case{1, 260, 1, 1, 64, false, true}, Case{2, 200, 4, 2, 64, true, true},
                                         Case{3, 200, 2, 1, 64, false, true}, Case{1, 1000, 1, 1, 64, false, false},
                                         Case{1, 1, 2, 1, 128, true, true}, Case{2, 17, 5, 1, 128, true, false},
                                         Case{1, 64, 1, 1, 128, false, true}, Case{1, 65, 2, 2, 128, false, false},
                                         Case{1, 128, 4, 2, 128, true, false}, Case{2, 200, 2, 1, 128, true, true},
                                         Case{1, 200, 1, 1, 128, false, false}, Case{1, 400, 1, 1, 128, true, true}));

TEST_P(AttentionHopper, ForwardAndBackward) {
    const Problem p(GetParam(), 1);
    spoil_scratch(ctx);
    const Results r = p.run(ctx);
    check(p, r);
    expect_first_tokens_unchanged(p, r);
}

TEST_P(AttentionHopper, BackwardInOneKernel) {
    const Problem p(GetParam(), 1);
    spoil_scratch(ctx);
    check(p, p.run(ctx, Problem::Backward::one_kernel));
}

// Run after run, with rings that go round several times: whoever waits too little gets other bits sometimes.
TEST_F(AttentionHopperMore, TheSameBitsInEveryRun) {
    for (const Case& k :
         {Case{2, 200, 4, 2, 64, true, true}, Case{1, 700, 1, 1, 64, false, false}, Case{1, 600, 2, 1, 128, false, false}}) {
        const Problem p(k, 5);
        const Results r = p.run(ctx);
        for (unsigned i = 1; i <= runs; i++) {
#ifndef __CUDACC__
            emu::config().seed += i;  // another order of threads
#endif
            spoil_scratch(ctx);
            expect_same_results(p.run(ctx), r);
        }
    }
}

// Many short items, two blocks: a stride; three: a counter.
TEST_F(AttentionHopperMore, ItemsByStrideOrCounter) {
    const Problem p(Case{4, 20, 8, 4, 64, true, true}, 6);
    ctx.multiprocessors = 3;
    const Results counted = p.run(ctx, Problem::Backward::none);
    ctx.multiprocessors = 2;
    expect_same_results(p.run(ctx, Problem::Backward::none), counted);
}

// Large scores of both signs: whole rows far above and far below zero.
TEST_F(AttentionHopperMore, LargeScoresDoNotOverflow) {
    for (const double sign : {1.0, -1.0}) {
        Problem p(Case{1, 140, 2, 1, 64, false, true}, 7);
        for (size_t i = 0; i < p.qkv.size(); i++) {
            const size_t head = i % p.k.width() / p.k.HS;
            if (head < 2) p.qkv[i] = bf16(64.0f);
            if (head == 2) p.qkv[i] = bf16((float)(sign * (16 + i % 7)));
        }
        const Results r = p.run(ctx);
        check(p, r);
        for (const float x : r.lse) ASSERT_GT(sign * x, 5000);
    }
}

// Later tokens turn into others, a million million times larger: rows before keep their bits, out and lse and their queries'
// gradients.
TEST_F(AttentionHopperMore, LaterTokensChangeNothingBefore) {
    const Case k{1, 210, 2, 1, 64, true, false};
    const Problem p(k, 8);
    const Results before = p.run(ctx);
    for (const int changed : {1, 63, 64, 128, 200}) {
        SCOPED_TRACE(testing::Message() << "tokens from " << changed << " on changed");
        Problem other = p;
        const std::vector<bf16> noise = Rng(9).normals<bf16>(other.qkv.size(), 1e12);
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

// One document changes, tokens and gradients: all others keep their bits, gradients included, and so does the other sequence.
TEST_F(AttentionHopperMore, DocumentsDoNotSeeEachOther) {
    const Case k{2, 200, 2, 1, 128, true, true};
    const Problem p(k, 10);
    const Results before = p.run(ctx);
    for (const int start : {0, 1, 3, 64, 129}) {
        SCOPED_TRACE(testing::Message() << "document at " << start << " changed");
        Problem other = p;
        Rng rng(11);
        const auto touched = [&](size_t row) { return row < (size_t)k.T && p.doc_start[row] == start; };
        for (size_t i = 0; i < other.qkv.size(); i++)
            if (touched(i / k.width())) other.qkv[i] = bf16((float)(100 * rng.normal()));
        for (size_t i = 0; i < other.dout.size(); i++)
            if (touched(i / (k.NH * k.HS))) other.dout[i] = bf16((float)(100 * rng.normal()));
        const Results after = other.run(ctx);
        const auto kept = [&](const std::vector<bf16>& x) {
            std::vector<bf16> y;
            for (size_t i = 0; i < x.size(); i++)
                if (!touched(i / (x.size() / k.rows()))) y.push_back(x[i]);
            return y;
        };
        expect_same_bits(kept(after.out), kept(before.out), "out");
        expect_same_bits(kept(after.dqkv), kept(before.dqkv), "dqkv");
    }
}

}  // namespace test_gpu_attention_hopper
