// Ops in the program's precision (bf16 or fp32) against plain loops in double. What is allowed: one rounding to floatX, plus a
// bound on the fp32 arithmetic inside, derived beside each test with u = 2^-24 (one fp32 rounding). Outputs are poisoned with
// NaN and lie between guards; sizes are odd, all different, and reach past one vector, one block, one chunk.
#include <gtest/gtest.h>

#include "../llmc/cpu/embed.h"
#include "../llmc/cpu/loss.h"
#include "../llmc/cpu/mlp.h"
#include "../llmc/cpu/norm.h"
#include "../llmc/cpu/optimizer.h"
#include "../llmc/cpu/reduce.h"
#include "testing.h"

using namespace test;
using Doubles = std::vector<double>;

namespace {

constexpr double u = roundoff<real>;
constexpr double rounding = roundoff<floatX> * 1.01;  // of a value that was itself computed with small error
const double infinity = std::numeric_limits<double>::infinity(), not_a_number = std::nan("");

struct Shape {
    int N, C;
};
const Shape norm_shapes[] = {{1, 1}, {1, 769}, {3, 15}, {150, 33}, {70, 512}};

// ---- references -----------------------------------------------------------------------------------------------------------
struct NormReference {
    Doubles y, mean, rstd, y_allowed, mean_allowed, rstd_allowed;
};

// mean and variance: sums of C terms in at least 16 parts, so a relative error below s = (C/16 + 20) u of the sum of
// magnitudes. Of xhat = (x - mean) rstd: s mean|x| rstd from the mean, s |xhat| from rstd, 8 u (|xhat| + |b|) from the rest.
NormReference norm_reference(const Doubles& x, const Doubles& w, const Doubles* b, int N, int C, double eps) {
    NormReference r;
    const double s = (C / 16.0 + 20) * u;
    for (int n = 0; n < N; n++) {
        double mean = 0, magnitude = 0, variance = 0;
        for (int c = 0; c < C; c++) mean += x[n * C + c] / C, magnitude += std::abs(x[n * C + c]) / C;
        if (!b) mean = 0, magnitude = 0;
        for (int c = 0; c < C; c++) variance += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
        const double rstd = 1 / std::sqrt(variance + eps);
        r.mean.push_back(mean), r.mean_allowed.push_back(s * magnitude);
        // An error e of the mean adds e^2 to the variance.
        r.rstd.push_back(rstd), r.rstd_allowed.push_back(rstd * (s + std::pow(s * magnitude * rstd, 2)));
        for (int c = 0; c < C; c++) {
            const double xhat = (x[n * C + c] - mean) * rstd, y = xhat * w[c] + (b ? (*b)[c] : 0);
            const double arithmetic =
                std::abs(w[c]) * (s * magnitude * rstd + (s + 8 * u) * std::abs(xhat)) + 8 * u * std::abs(y);
            r.y.push_back(y), r.y_allowed.push_back(rounding * std::abs(y) + arithmetic);
        }
    }
    return r;
}

// Gradients from given statistics. dx = rstd (g - mean(g) - xhat mean(g xhat)): the two means are sums as above, the rest a
// dozen operations on terms bounded by rstd (|g| + mean|g| + |xhat| mean|g xhat|). dw, db: rows in blocks of 64 or fewer, then
// the blocks: a relative error of (64 + N/64 + 8) u.
struct NormGradient {
    Doubles dx, dw, db, dx_allowed, dw_allowed, db_allowed;
};
NormGradient norm_gradient(const Doubles& dy, const Doubles& x, const Doubles& w, const Doubles& mean, const Doubles& rstd,
                           int N, int C, bool centred) {
    NormGradient r{Doubles(N * C), Doubles(C), Doubles(C), Doubles(N * C), Doubles(C), Doubles(C)};
    const double s = (C / 16.0 + 20) * u, rows = (64 + N / 64.0 + 8) * u;
    for (int n = 0; n < N; n++) {
        const auto xhat = [&](int c) { return (x[n * C + c] - mean[n]) * rstd[n]; };
        double mg = 0, mgx = 0, mg_magnitude = 0, mgx_magnitude = 0;
        for (int c = 0; c < C; c++) {
            const double g = w[c] * dy[n * C + c];
            if (centred) mg += g / C, mg_magnitude += std::abs(g) / C;
            mgx += g * xhat(c) / C, mgx_magnitude += std::abs(g * xhat(c)) / C;
        }
        for (int c = 0; c < C; c++) {
            const int i = n * C + c;
            const double g = w[c] * dy[i];
            r.dx[i] = rstd[n] * (g - mg - xhat(c) * mgx);
            r.dx_allowed[i] =
                rounding * std::abs(r.dx[i]) +
                rstd[n] * (12 * u * std::abs(g) + (s + 12 * u) * (mg_magnitude + std::abs(xhat(c)) * mgx_magnitude));
            r.dw[c] += dy[i] * xhat(c), r.dw_allowed[c] += rows * std::abs(dy[i] * xhat(c));
            r.db[c] += dy[i], r.db_allowed[c] += rows * std::abs(dy[i]);
        }
    }
    return r;
}

// target += extra, allowing the rounding of that sum.
void add_to(Doubles& target, Doubles& allowed, const Doubles& extra, double unit) {
    for (size_t i = 0; i < target.size(); i++) target[i] += extra[i], allowed[i] += unit * std::abs(target[i]);
}

}  // namespace

// ---- scalar formulas ------------------------------------------------------------------------------------------------------
TEST(Math, ExpIsAccurateAndKeepsTheEnds) {
    double worst = 0;
    for (double x = -86.6; x < 88.7228; x += 0.000137) {
        const float argument = (float)x;
        const double exact = std::exp((double)argument);
        const double ulp = (double)(float)exact - (double)std::nextafter((float)exact, 0.0f);
        worst = std::max(worst, std::abs((double)exp_approx(argument) - exact) / ulp);
    }
    EXPECT_LE(worst, 1.25) << "units in the last place";
    EXPECT_EQ(exp_approx(0), 1);
    EXPECT_EQ(exp_approx(-0.0f), 1);
    EXPECT_EQ(exp_approx(-88), 0);
    EXPECT_EQ(exp_approx(-1e30f), 0);
    EXPECT_EQ(exp_approx(-(float)infinity), 0);
    EXPECT_EQ(exp_approx(89), (float)infinity);
    EXPECT_EQ(exp_approx(1e30f), (float)infinity);
    EXPECT_EQ(exp_approx((float)infinity), (float)infinity);
    EXPECT_TRUE(std::isnan(exp_approx((float)not_a_number)));
    EXPECT_TRUE(std::isnan(exp_approx(-(float)not_a_number)));
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

// ---- embedding ------------------------------------------------------------------------------------------------------------
TEST(Embedding, ForwardRoundsTheSumOnce) {
    cpu::Ctx ctx(2);
    Rng rng(1);
    const int N = 41, P = 9;
    for (const int C : {1, 19, 130}) {
        const std::vector<int> tokens = rng.integers(N, 0, 12), positions = rng.integers(N, 0, P);
        const int v0 = 3, V = 5;
        const std::vector<floatX> wte = rng.normals<floatX>(V * C), wpe = rng.normals<floatX>(P * C);
        for (const bool learned : {false, true}) {
            Doubles expected;
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++) {
                    const int token = tokens[n] - v0;
                    expected.push_back((token >= 0 && token < V ? as_double(wte[token * C + c]) : 0) +
                                       (learned ? as_double(wpe[positions[n] * C + c]) : 0));
                }
            Guarded<floatX> out(N * C, "out");
            cpu::embedding_forward(ctx, out.data(), tokens.data(), learned ? positions.data() : nullptr, wte.data(),
                                   learned ? wpe.data() : nullptr, N, C, v0, V);
            expect_close(out, expected, 0, learned ? rounding : 0, "out");
        }
    }
}

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
        cpu::embedding_backward(ctx, dwte.data(), dwpe.data(), dout.data(), tokens.data(), positions.data(), N, C, v0, V);
        expect_same_bits(dwte, wte_expected, "dwte");
        expect_same_bits(dwpe, wpe_expected, "dwpe");
    }
}

// ---- norms ----------------------------------------------------------------------------------------------------------------
class Norm : public testing::TestWithParam<bool> {
protected:
    const bool centred = GetParam();  // LayerNorm, else RMSNorm
    cpu::Ctx ctx{2};

    void forward(Guarded<floatX>& out, Guarded<real>& mean, Guarded<real>& rstd, Guarded<floatX>* sum,
                 const std::vector<floatX>& inp, const std::vector<floatX>* add, const std::vector<floatX>& w,
                 const std::vector<floatX>& b, const Shape& k, double eps) {
        floatX* s = sum ? sum->data() : nullptr;
        const floatX* a = add ? add->data() : nullptr;
        if (centred)
            cpu::layernorm_forward(ctx, out.data(), mean.data(), rstd.data(), s, inp.data(), a, w.data(), b.data(), k.N, k.C,
                                   (real)eps);
        else cpu::rmsnorm_forward(ctx, out.data(), rstd.data(), s, inp.data(), a, w.data(), k.N, k.C, (real)eps);
    }
};
INSTANTIATE_TEST_SUITE_P(Ops, Norm, testing::Values(true, false), [](const auto& p) { return p.param ? "Layer" : "Rms"; });

TEST_P(Norm, Forward) {
    Rng rng(3);
    for (const Shape& k : norm_shapes)
        for (const bool with_add : {false, true}) {
            const size_t size = (size_t)k.N * k.C;
            const std::vector<floatX> inp = rng.normals<floatX>(size, 1, 2), add = rng.normals<floatX>(size),
                                      w = rng.normals<floatX>(k.C), b = rng.normals<floatX>(k.C);
            Guarded<floatX> out(size, "out"), sum(size, "sum");
            Guarded<real> mean(k.N, "mean"), rstd(k.N, "rstd");
            forward(out, mean, rstd, with_add ? &sum : nullptr, inp, with_add ? &add : nullptr, w, b, k, 1e-5);
            Doubles x = doubles(inp);
            if (with_add) {
                for (size_t i = 0; i < size; i++) x[i] += as_double(add[i]);
                expect_close(sum, x, 0, rounding, "sum");
                x = doubles(sum);  // what is normalised is the rounded sum
            }
            const Doubles bias = doubles(b);
            const NormReference r = norm_reference(x, doubles(w), centred ? &bias : nullptr, k.N, k.C, (double)(real)1e-5);
            expect_close(out, r.y, r.y_allowed, "out");
            expect_close(rstd, r.rstd, r.rstd_allowed, "rstd");
            if (centred) expect_close(mean, r.mean, r.mean_allowed, "mean");
        }
}

TEST_P(Norm, Backward) {
    Rng rng(4);
    for (const Shape& k : norm_shapes)
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            const size_t size = (size_t)k.N * k.C;
            const std::vector<floatX> inp = rng.normals<floatX>(size, 1, 2), dout = rng.normals<floatX>(size),
                                      w = rng.normals<floatX>(k.C), dinp0 = rng.normals<floatX>(size);
            const std::vector<real> dw0 = rng.normals<real>(k.C), db0 = rng.normals<real>(k.C);
            std::vector<real> mean(k.N), rstd(k.N);  // any numbers: backward takes what it is given
            for (int n = 0; n < k.N; n++) mean[n] = centred ? (real)rng.normal() : 0, rstd[n] = (real)rng.uniform(0.5, 2);
            NormGradient r =
                norm_gradient(doubles(dout), doubles(inp), doubles(w), doubles(mean), doubles(rstd), k.N, k.C, centred);
            add_to(r.dw, r.dw_allowed, doubles(dw0), (k.N / 64 + 1) * u);
            add_to(r.db, r.db_allowed, doubles(db0), (k.N / 64 + 1) * u);
            if (acc == Acc::Add) add_to(r.dx, r.dx_allowed, doubles(dinp0), rounding);

            Guarded<floatX> dinp(size, "dinp");
            if (acc == Acc::Add) std::copy(dinp0.begin(), dinp0.end(), dinp.data());
            Guarded<real> dw(dw0, "dweight"), db(db0, "dbias");
            if (centred)
                cpu::layernorm_backward(ctx, dinp.data(), dw.data(), db.data(), dout.data(), inp.data(), w.data(), mean.data(),
                                        rstd.data(), k.N, k.C, acc);
            else
                cpu::rmsnorm_backward(ctx, dinp.data(), dw.data(), dout.data(), inp.data(), w.data(), rstd.data(), k.N, k.C,
                                      acc);
            expect_close(dinp, r.dx, r.dx_allowed, "dinp");
            expect_close(dw, r.dw, r.dw_allowed, "dweight");
            if (centred) expect_close(db, r.db, r.db_allowed, "dbias");
            else expect_same_bits(db, db0, "dbias");
        }
}

TEST_P(Norm, NanStaysInItsRow) {
    Rng rng(5);
    const Shape k{3, 35};
    std::vector<floatX> inp = rng.normals<floatX>(k.N * k.C);
    inp[k.C + 34] = (floatX)(real)not_a_number;
    const std::vector<floatX> w = rng.normals<floatX>(k.C), b = rng.normals<floatX>(k.C);
    Guarded<floatX> out(k.N * k.C);
    Guarded<real> mean(k.N), rstd(k.N);
    forward(out, mean, rstd, nullptr, inp, nullptr, w, b, k, 1e-5);
    for (int i = 0; i < k.N * k.C; i++) EXPECT_EQ(std::isnan(as_double(out[i])), i / k.C == 1) << "element " << i;
}

// ---- activations ----------------------------------------------------------------------------------------------------------
namespace {

// Values near zero, in the bends and far out, both signs.
std::vector<floatX> activation_inputs(size_t n) {
    std::vector<floatX> x = Rng(6).normals<floatX>(n, 3);
    const double special[] = {0, 1e-30, -1e-30, 8, -8, 12, -12, 100, -100, 3e4, -3e4};
    for (size_t i = 0; i < std::min(n, std::size(special)); i++) x[i] = from_double<floatX>(special[i]);
    return x;
}

// exp(-z) has a relative error of (|z| + 3) u: z is rounded several times, exp errs by two ulp. Below e^-87 it is 0.
double sigmoid_relative_error(double z) { return (4 * std::abs(z) + 12) * u; }
const double tiny = 1e-35;

double gelu_inner(double x) { return 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }

}  // namespace

TEST(Gelu, ForwardAndBackward) {
    cpu::Ctx ctx(2);
    for (const size_t n : {1, 17, 1003}) {
        const std::vector<floatX> inp = activation_inputs(n), dout = Rng(7).normals<floatX>(n);
        Guarded<floatX> out(n, "out"), dinp(n, "dinp");
        cpu::gelu_forward(ctx, out.data(), inp.data(), n);
        cpu::gelu_backward(ctx, dinp.data(), dout.data(), inp.data(), n);
        Doubles y, dx, y_allowed, dx_allowed;
        for (size_t i = 0; i < n; i++) {
            const double x = as_double(inp[i]), z = gelu_inner(x), dz = 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
            // s (1 - s) dz and not its parts: far out s (1 - s) falls faster than x dz grows
            const double s = 1 / (1 + std::exp(-z)), bend = x * s / (1 + std::exp(z)) * dz, error = sigmoid_relative_error(z);
            y.push_back(x * s), dx.push_back(as_double(dout[i]) * (s + bend));
            y_allowed.push_back((rounding + error) * std::abs(y[i]) + tiny);
            // s and 1 - s err by `error` s (1 - s) (their slope), and 1 - s by u where it was subtracted from 1.
            const double absolute =
                std::isfinite(bend) ? (s + std::abs(bend)) * error + 4 * u * std::abs(x * dz) * s * (z > 0 && z < 20) : 0;
            dx_allowed.push_back(rounding * std::abs(dx[i]) + std::abs(as_double(dout[i])) * absolute + tiny);
        }
        expect_close(out, y, y_allowed, "out");
        expect_close(dinp, dx, dx_allowed, "dinp");
    }
}

TEST(SwiGlu, ForwardAndBackward) {
    cpu::Ctx ctx(2);
    for (const Shape& k : {Shape{1, 1}, Shape{1, 45}, Shape{7, 129}}) {
        const int N = k.N, F = k.C;
        const std::vector<floatX> gate_up = activation_inputs(N * 2 * F), dout = Rng(8).normals<floatX>(N * F);
        Guarded<floatX> out(N * F, "out"), dgate_up(N * 2 * F, "dgate_up");
        cpu::swiglu_forward(ctx, out.data(), gate_up.data(), N, F);
        cpu::swiglu_backward(ctx, dgate_up.data(), dout.data(), gate_up.data(), N, F);
        Doubles y(N * F), y_allowed(N * F), d(N * 2 * F), d_allowed(N * 2 * F);
        for (int n = 0; n < N; n++)
            for (int f = 0; f < F; f++) {
                const int i = n * F + f, gi = n * 2 * F + f, ui = gi + F;
                const double g = as_double(gate_up[gi]), up = as_double(gate_up[ui]), dy = as_double(dout[i]);
                const double s = 1 / (1 + std::exp(-g)), not_s = 1 / (1 + std::exp(g)), error = sigmoid_relative_error(g);
                y[i] = g * s * up, y_allowed[i] = (rounding + error) * std::abs(y[i]) + tiny;
                d[ui] = dy * g * s, d_allowed[ui] = (rounding + error) * std::abs(d[ui]) + tiny;
                d[gi] = dy * up * s * (1 + g * not_s);
                d_allowed[gi] = rounding * std::abs(d[gi]) +
                                std::abs(dy * up * s) * ((1 + std::abs(g) * not_s) * error + 4 * u * std::abs(g) * (g < 20)) +
                                tiny;
            }
        expect_close(out, y, y_allowed, "out");
        expect_close(dgate_up, d, d_allowed, "dgate_up");
    }
}

TEST(Residual, RoundsTheSumOnceAlsoInPlace) {
    cpu::Ctx ctx(2);
    Rng rng(9);
    const size_t n = 1001;
    const std::vector<floatX> a = rng.normals<floatX>(n), b = rng.normals<floatX>(n);
    Doubles expected(n);
    for (size_t i = 0; i < n; i++) expected[i] = as_double(a[i]) + as_double(b[i]);
    Guarded<floatX> out(n, "out"), in_place(a, "in place");
    cpu::residual_forward(ctx, out.data(), a.data(), b.data(), n);
    cpu::residual_forward(ctx, in_place.data(), in_place.data(), b.data(), n);
    expect_close(out, expected, 0, rounding, "out");
    expect_same_bits(out, in_place, "in place");
}

// ---- classifier -----------------------------------------------------------------------------------------------------------
namespace {

// Logits between guards with NaN in the padding, and the outputs of a run over them.
struct Classified {
    Guarded<floatX> logits;
    Guarded<real> loss, zloss, lse;
    Classified(const std::vector<floatX>& x /*(N, V)*/, const std::vector<int>& targets, int V, int Vp, double loss_scale,
               double z_coef, bool write_gradient = true)
        : logits(targets.size() * Vp, "logits"),
          loss(targets.size(), "loss"),
          zloss(targets.size(), "zloss"),
          lse(targets.size(), "lse") {
        const int N = (int)targets.size();
        for (int n = 0; n < N; n++) std::copy_n(&x[(size_t)n * V], V, &logits[(size_t)n * Vp]);
        cpu::Ctx ctx(2);
        cpu::classifier(ctx, logits.data(), loss.data(), zloss.data(), lse.data(), targets.data(), N, V, Vp, (real)loss_scale,
                        (real)z_coef, write_gradient);
    }
};

}  // namespace

TEST(Classifier, AgainstDouble) {
    Rng rng(10);
    struct Case {
        int N, V, Vp;
        double spread;
    };
    for (const Case& k : {Case{1, 3, 8, 1}, Case{6, 37, 48, 3}, Case{5, 513, 640, 1}, Case{3, 50257, 50304, 2}}) {
        const double loss_scale = (real)0.013, z_coef = (real)1e-2;
        const std::vector<floatX> x = rng.normals<floatX>((size_t)k.N * k.V, k.spread);
        std::vector<int> targets = rng.integers(k.N, 0, k.V);
        if (k.N > 2) targets[2] = -1;
        const Classified out(x, targets, k.V, k.Vp, loss_scale, z_coef),
            without(x, targets, k.V, k.Vp, loss_scale, z_coef, false);
        expect_same_bits(without.loss, out.loss, "loss without gradient");
        expect_same_bits(without.zloss, out.zloss, "zloss without gradient");
        Doubles loss, zloss, lse, gradient, gradient_allowed;
        double largest_error = 0;
        for (int n = 0; n < k.N; n++) {
            const floatX* row = &x[(size_t)n * k.V];
            expect_same_bits(std::vector<floatX>(row, row + k.V),
                             std::vector<floatX>(&without.logits[(size_t)n * k.Vp], &without.logits[(size_t)n * k.Vp] + k.V),
                             "logits without gradient");
            double z = 0;
            for (int i = 0; i < k.V; i++) z += std::exp(as_double(row[i]));
            const double log_z = std::log(z), at_target = targets[n] < 0 ? 0 : as_double(row[targets[n]]);
            const bool masked = targets[n] < 0;
            lse.push_back(log_z), loss.push_back(masked ? 0 : log_z - at_target),
                zloss.push_back(masked ? 0 : z_coef * log_z * log_z);
            // The sum: chunks of 512 in 16 parts, one more rounding and rescaling (3 u) per chunk, exp within two ulp of an
            // argument rounded once. log Z then errs by that (relative to Z), plus its own roundings.
            const double sum_error = (512 / 16 + 16 + 4 * (k.V / 512) + 8 + 8 * k.spread) * u,
                         error = sum_error + 3 * u * std::abs(log_z);
            largest_error = std::max(largest_error, error);
            const double factor = loss_scale * (1 + 2 * z_coef * log_z);
            for (int i = 0; i < k.Vp; i++) {
                const double p = i < k.V && !masked ? std::exp(as_double(row[i]) - log_z) : 0;
                const double g = masked || i >= k.V ? 0 : factor * p - loss_scale * (i == targets[n]);
                const double p_error = error + (std::abs(i < k.V ? as_double(row[i]) : 0) + 8) * u;
                gradient.push_back(g),
                    gradient_allowed.push_back(rounding * std::abs(g) + 2 * p_error * factor * p + 2 * u * std::abs(g));
            }
        }
        expect_close(out.lse, lse, largest_error, u, "lse");
        expect_close(out.loss, loss, largest_error, 4 * u, "loss");
        expect_close(out.zloss, zloss, 0, 2 * largest_error + 4 * u, "zloss");
        expect_close(out.logits, gradient, gradient_allowed, "dlogits");
    }
}

TEST(Classifier, GoldenValuesWithZLoss) {  // all of these logits are bf16 numbers
    const Classified out({2.f, .5f, -1.f, 3.f}, {3}, 4, 8, 1, 1e-4);
    EXPECT_NEAR(out.lse[0], 3.3840917013, 4 * u * 3.4);
    EXPECT_NEAR(out.loss[0], 0.3840917013, 4 * u * 3.4);
    EXPECT_NEAR(out.zloss[0], 0.0011452077, 8 * u * 0.0011452077 + 1e-10);
    expect_close(out.logits, {0.2507208496, 0.0559433833, 0.0124826561, -0.3184700706, 0, 0, 0, 0}, 16 * u, rounding,
                 "dlogits");
}

TEST(Classifier, LargeAndInfiniteLogits) {
    const int V = 1300;
    std::vector<floatX> x(V, from_double<floatX>(-3e4));
    x[1250] = from_double<floatX>(2e4), x[7] = from_double<floatX>(1e4);
    const Classified large(x, {1250}, V, V, 1, 0), wrong(x, {7}, V, V, 1, 0);
    EXPECT_EQ(large.loss[0], 0);
    EXPECT_EQ(as_double(wrong.loss[0]), as_double(x[1250]) - as_double(x[7]));
    EXPECT_EQ(as_double(wrong.logits[7]), -1);
    EXPECT_EQ(as_double(wrong.logits[1250]), 1);
    // A masked part of the vocabulary: -inf has probability 0, wherever it stands, also where whole chunks are masked.
    std::fill(x.begin(), x.begin() + 1200, from_double<floatX>(-infinity));
    std::fill(x.begin() + 1200, x.end(), from_double<floatX>(-200));
    const Classified masked(x, {1299}, V, V, 1, 0);
    EXPECT_NEAR(masked.loss[0], std::log(100), 1e-4);  // lse = -200 + log 100, rounded to fp32: 2^-24 * 200 = 1.2e-5
    EXPECT_EQ(as_double(masked.logits[0]), 0);
    EXPECT_NEAR(as_double(masked.logits[1200]), 0.01, 0.01 * (rounding + 1e-4));
}

TEST(Classifier, NonFiniteLogitsAreNotSilent) {
    const int V = 700;
    for (const double bad : {not_a_number, infinity})
        for (const int where : {0, 5, 511, 512, 699}) {
            std::vector<floatX> x = Rng(11).normals<floatX>(2 * V);
            x[V + where] = from_double<floatX>(bad);
            const Classified out(x, {3, 3}, V, V + 4, 1, 1e-4);
            EXPECT_TRUE(std::isfinite(out.loss[0]) && std::isfinite(out.zloss[0]));
            EXPECT_FALSE(std::isfinite(out.loss[1])) << bad << " at " << where;
            EXPECT_FALSE(std::isfinite(out.zloss[1])) << bad << " at " << where;
            EXPECT_FALSE(std::isfinite(as_double(out.logits[V + 4 + 3])));
            const Classified masked(x, {3, -1}, V, V + 4, 1, 1e-4);  // a masked row says nothing, whatever is in it
            EXPECT_EQ(masked.loss[1], 0);
            EXPECT_EQ(masked.zloss[1], 0);
            for (int i = 0; i < V + 4; i++) EXPECT_EQ(as_double(masked.logits[V + 4 + i]), 0);
        }
}

// ---- optimizer ------------------------------------------------------------------------------------------------------------
TEST(SumOfSquares, AgainstDoubleAndNonFinite) {
    cpu::Ctx ctx(2);
    Rng rng(12);
    for (const size_t n : {0, 1, 17, 4095, 4097, 100003}) {
        const std::vector<real> x = rng.normals<real>(n);
        double expected = 0;
        for (const real value : x) expected += (double)value * value;
        // Fixed blocks of 4096 in 16 parts: 256 terms each in fp32.
        EXPECT_NEAR(cpu::sum_of_squares(ctx, x.data(), n), expected, (256 + 2) * u * expected);
        for (const double bad : {not_a_number, infinity, -infinity})
            for (const size_t where : {(size_t)0, n / 2, n - 1}) {
                if (n == 0) continue;
                std::vector<real> y = x;
                y[where] = (real)bad;
                EXPECT_FALSE(std::isfinite(cpu::sum_of_squares(ctx, y.data(), n))) << bad << " at " << where << " of " << n;
            }
    }
}

TEST(AdamW, FiftyStepsAgainstDouble) {
    cpu::Ctx ctx(2);
    Rng rng(13);
    const double beta1 = (real)0.9, beta2 = (real)0.95, eps = (real)1e-8, decay = (real)0.1, grad_scale = (real)0.25;
    for (const size_t n : {1, 1003}) {
        const std::vector<real> start = rng.normals<real>(n, 0.1);
        Guarded<real> master(start, "master"), m(std::vector<real>(n, 0), "m"), v(std::vector<real>(n, 0), "v"),
            aliased(start, "aliased"), m2(std::vector<real>(n, 0), "m2"), v2(std::vector<real>(n, 0), "v2");
        Guarded<floatX> param(n, "param");
        // In fp32 the parameters may be the masters themselves.
        constexpr bool one_type = std::is_same<floatX, real>::value;
        floatX* aliased_param = reinterpret_cast<floatX*>(aliased.data());
        Doubles w = doubles(start), md(n), vd(n), m_allowed(n), v_allowed(n), w_allowed(n);
        for (int step = 1; step <= 50; step++) {
            const double lr = (real)(1e-2 / step);
            std::vector<real> grad = rng.normals<real>(n);
            grad[0] = 0;  // never a gradient: the update must be the decay alone, not 0/0
            cpu::adamw(ctx, param.data(), master.data(), m.data(), v.data(), grad.data(), n, (real)lr, (real)beta1, (real)beta2,
                       (real)eps, (real)decay, (real)grad_scale, step);
            if (one_type)
                cpu::adamw(ctx, aliased_param, aliased.data(), m2.data(), v2.data(), grad.data(), n, (real)lr, (real)beta1,
                           (real)beta2, (real)eps, (real)decay, (real)grad_scale, step);
            const double c1 = 1 - std::pow(beta1, step), c2 = 1 - std::pow(beta2, step);
            for (size_t i = 0; i < n; i++) {
                const double g = grad_scale * (double)grad[i];
                md[i] = beta1 * md[i] + (1 - beta1) * g;
                vd[i] = beta2 * vd[i] + (1 - beta2) * g * g;
                const double root = std::sqrt(vd[i] / c2) + eps, update = md[i] / c1 / root;
                // Errors: those of m and v shrink by beta and gain four roundings; the update has theirs, relative to its own
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
        expect_close(m, md, m_allowed, "m");
        expect_close(v, vd, v_allowed, "v");
        expect_close(master, w, w_allowed, "master");
        expect_close(param, doubles(master), 0, roundoff<floatX>, "param is the rounded master");
        if (one_type) expect_same_bits(aliased, master, "param and master in one place");
    }
}

// ---- all ------------------------------------------------------------------------------------------------------------------
// Every output of every op, at sizes that do not divide evenly between threads.
namespace {

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
    cpu::embedding_forward(ctx, out.data(), tokens.data(), positions.data(), wte.data(), wpe.data(), N, C, 0, V);
    collect(out);
    cpu::embedding_backward(ctx, dwte.data(), dwpe.data(), dout.data(), tokens.data(), positions.data(), N, C, 0, V);
    collect(dwte), collect(dwpe);
    cpu::layernorm_forward(ctx, out.data(), mean.data(), rstd.data(), sum.data(), wpe.data(), dout.data(), w.data(), b.data(),
                           N, C, real(1e-5));
    collect(out), collect(sum), collect(mean), collect(rstd);
    cpu::layernorm_backward(ctx, dinp.data(), dw.data(), db.data(), dout.data(), sum.data(), w.data(), mean.data(), rstd.data(),
                            N, C, Acc::Set);
    collect(dinp), collect(dw), collect(db);
    cpu::rmsnorm_forward(ctx, out.data(), rstd.data(), nullptr, wpe.data(), nullptr, w.data(), N, C, real(1e-5));
    cpu::rmsnorm_backward(ctx, dinp.data(), dw.data(), dout.data(), wpe.data(), w.data(), rstd.data(), N, C, Acc::Add);
    collect(out), collect(dinp), collect(dw);
    cpu::gelu_forward(ctx, out.data(), wpe.data(), out.size());
    cpu::gelu_backward(ctx, dinp.data(), dout.data(), wpe.data(), out.size());
    collect(out), collect(dinp);
    cpu::swiglu_forward(ctx, out.data(), gate_up.data(), N, C);
    cpu::swiglu_backward(ctx, wide.data(), dout.data(), gate_up.data(), N, C);
    collect(out), collect(wide);
    cpu::residual_forward(ctx, out.data(), wpe.data(), dout.data(), out.size());
    collect(out);
    cpu::classifier(ctx, logits.data(), loss.data(), zloss.data(), lse.data(), tokens.data(), N, V, Vp, 1, real(1e-4), true);
    collect(logits), collect(loss), collect(zloss), collect(lse);
    all.push_back(cpu::sum_of_squares(ctx, dwte.data(), dwte.size()));
    std::vector<real> master(V * C), m(V * C), v(V * C);
    std::vector<floatX> param(V * C);
    cpu::adamw(ctx, param.data(), master.data(), m.data(), v.data(), dwte.data(), dwte.size(), real(1e-3), real(0.9),
               real(0.95), real(1e-8), real(0.1), 1, 3);
    collect(param), collect(master), collect(m), collect(v);
    return all;
}

}  // namespace

TEST(Ops, SameBitsForAnyNumberOfThreads) {
    const Doubles one = everything(1);
    for (const double x : one) ASSERT_TRUE(std::isfinite(x));
    expect_same_bits(everything(2), one, "two threads");
    expect_same_bits(everything(5), one, "five threads");
}
