// The tests of ops, for whatever backend the program that includes this has chosen before:
//   namespace backend = cpu;            // or gpu
//   template <class T> Buffer           // memory of that backend: guarded, poisoned; set(), get(), p()
// Ops in the program's precision (bf16 or fp32) against plain loops in double. What is allowed: one rounding to floatX, plus a
// bound on the fp32 arithmetic inside, derived beside each test with u = 2^-24 (one fp32 rounding). Outputs are poisoned with
// NaN and lie between guards; sizes are odd or whole packs, all different, and reach past one vector, one block, one chunk.
#pragma once
#include <gtest/gtest.h>

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
#ifdef EMU_TSAN  // takes milliseconds for each thread of a kernel: only what differs for it
constexpr bool thorough = false;
constexpr int most_rows = 300;
const Shape norm_shapes[] = {{1, 1}, {3, 15}, {9, 33}, {11, 264}};
#else
constexpr bool thorough = true;
constexpr int most_rows = 1 << 20;
const Shape norm_shapes[] = {{1, 1},   {1, 769},  {3, 15},   {150, 33},  {70, 512},
                             {37, 96}, {21, 776}, {3, 8208}, {2, 16384}, {2, 16392}};
#endif

// An op's input: on the host for the reference, and in the backend's memory.
template <class T>
class Input {
public:
    explicit Input(std::vector<T> values) : host_(std::move(values)), buffer_(host_, "input") {}
    const T* p() const { return buffer_.p(); }
    const T& operator[](size_t i) const { return host_[i]; }
    size_t size() const { return host_.size(); }
    const std::vector<T>& host() const { return host_; }

private:
    std::vector<T> host_;
    Buffer<T> buffer_;
};

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
        for (int c = 0; c < C; c++) {
            mean += x[n * C + c] / C;
            magnitude += std::abs(x[n * C + c]) / C;
        }
        if (!b) {
            mean = 0;
            magnitude = 0;
        }
        for (int c = 0; c < C; c++) variance += (x[n * C + c] - mean) * (x[n * C + c] - mean) / C;
        const double rstd = 1 / std::sqrt(variance + eps);
        r.mean.push_back(mean);
        r.mean_allowed.push_back(s * magnitude);
        // An error e of the mean adds e^2 to the variance.
        r.rstd.push_back(rstd);
        r.rstd_allowed.push_back(rstd * (s + std::pow(s * magnitude * rstd, 2)));
        for (int c = 0; c < C; c++) {
            const double xhat = (x[n * C + c] - mean) * rstd, y = xhat * w[c] + (b ? (*b)[c] : 0);
            const double arithmetic =
                std::abs(w[c]) * (s * magnitude * rstd + (s + 8 * u) * std::abs(xhat)) + 8 * u * std::abs(y);
            r.y.push_back(y);
            r.y_allowed.push_back(rounding * std::abs(y) + arithmetic);
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
            if (centred) {
                mg += g / C;
                mg_magnitude += std::abs(g) / C;
            }
            mgx += g * xhat(c) / C;
            mgx_magnitude += std::abs(g * xhat(c)) / C;
        }
        for (int c = 0; c < C; c++) {
            const int i = n * C + c;
            const double g = w[c] * dy[i];
            r.dx[i] = rstd[n] * (g - mg - xhat(c) * mgx);
            r.dx_allowed[i] =
                rounding * std::abs(r.dx[i]) +
                rstd[n] * (12 * u * std::abs(g) + (s + 12 * u) * (mg_magnitude + std::abs(xhat(c)) * mgx_magnitude));
            r.dw[c] += dy[i] * xhat(c);
            r.dw_allowed[c] += rows * std::abs(dy[i] * xhat(c));
            r.db[c] += dy[i];
            r.db_allowed[c] += rows * std::abs(dy[i]);
        }
    }
    return r;
}

Doubles plus(Doubles x, double offset) {
    for (double& value : x) value += offset;
    return x;
}

// target += extra, allowing the rounding of that sum.
void add_to(Doubles& target, Doubles& allowed, const Doubles& extra, double unit) {
    for (size_t i = 0; i < target.size(); i++) {
        target[i] += extra[i];
        allowed[i] += unit * std::abs(target[i]);
    }
}

}  // namespace

// ---- embedding ------------------------------------------------------------------------------------------------------------
TEST(Embedding, ForwardRoundsTheSumOnce) {
    backend::Ctx ctx(2);
    Rng rng(1);
    const int N = 41, P = 9;
    for (const int C : {1, 19, 130, 264}) {
        const Input<int> tokens(rng.integers(N, 0, 12)), positions(rng.integers(N, 0, P));
        const int v0 = 3, V = 5;
        const Input<floatX> wte(rng.normals<floatX>(V * C)), wpe(rng.normals<floatX>(P * C));
        for (const bool learned : {false, true}) {
            Doubles expected;
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++) {
                    const int token = tokens[n] - v0;
                    expected.push_back((token >= 0 && token < V ? as_double(wte[token * C + c]) : 0) +
                                       (learned ? as_double(wpe[positions[n] * C + c]) : 0));
                }
            Buffer<floatX> out(N * C, "out");
            backend::embedding_forward(ctx, out.p(), tokens.p(), learned ? positions.p() : nullptr, wte.p(),
                                       learned ? wpe.p() : nullptr, N, C, {v0, V, V});
            expect_close(out.get(), expected, 0, learned ? rounding : 0, "out");
        }
    }
}

TEST(Embedding, BackwardAddsRows) {
    backend::Ctx ctx(2);
    Rng rng(2);
    struct Case {
        int N, C, P, v0, V, vocabulary;
    };
    // Few rows of many tokens and the reverse, one token alone, tokens outside the shard only, more rows than one tile is
    // sorted.
    const Case cases[] = {
        {67, 1, 9, 3, 5, 12},  {67, 19, 9, 3, 5, 12},           {67, 130, 9, 3, 5, 12}, {131, 264, 131, 0, 700, 700},
        {200, 8, 1, 0, 1, 1},  {45, 16, 2, 30, 4, 20},          {1, 264, 1, 0, 7, 7},   {5000, 8, 40, 0, 90, 90},
        {4097, 3, 1, 0, 1, 1}, {2048, 8, 2048, 1000, 9, 50000}, {2100, 8, 3, 0, 4, 4}};
    for (const Case& k : cases) {
        if (k.N > most_rows) continue;
        const Input<int> tokens(rng.integers(k.N, 0, k.vocabulary)), positions(rng.integers(k.N, 0, k.P));
        const Input<floatX> dout(rng.normals<floatX>((size_t)k.N * k.C));
        const std::vector<real> wte0 = rng.normals<real>(k.V * k.C), wpe0 = rng.normals<real>(k.P * k.C);
        // As many roundings as terms at most, in whatever order.
        Doubles wte = doubles(wte0), wpe = doubles(wpe0), wte_allowed(wte.size()), wpe_allowed(wpe.size());
        std::vector<int> wte_terms(k.V, 3), wpe_terms(k.P, 3);
        for (int n = 0; n < k.N; n++) {
            const int token = tokens[n] - k.v0;
            if (token >= 0 && token < k.V) wte_terms[token]++;
            wpe_terms[positions[n]]++;
        }
        const auto add = [&](Doubles& sum, Doubles& allowed, size_t i, double x, int terms) {
            sum[i] += x;
            allowed[i] += terms * u * std::abs(x);
        };
        for (size_t i = 0; i < wte.size(); i++) wte_allowed[i] = wte_terms[i / k.C] * u * std::abs(wte[i]);
        for (size_t i = 0; i < wpe.size(); i++) wpe_allowed[i] = wpe_terms[i / k.C] * u * std::abs(wpe[i]);
        for (int n = 0; n < k.N; n++)
            for (int c = 0; c < k.C; c++) {
                const int token = tokens[n] - k.v0, position = positions[n];
                const double d = as_double(dout[(size_t)n * k.C + c]);
                if (token >= 0 && token < k.V) add(wte, wte_allowed, (size_t)token * k.C + c, d, wte_terms[token]);
                add(wpe, wpe_allowed, (size_t)position * k.C + c, d, wpe_terms[position]);
            }
        Buffer<real> dwte(wte0, "dwte"), dwpe(wpe0, "dwpe"), alone(wte0, "dwte without positions");
        backend::embedding_backward(ctx, dwte.p(), dwpe.p(), dout.p(), tokens.p(), positions.p(), k.N, k.C, {k.v0, k.V, k.V});
        backend::embedding_backward(ctx, alone.p(), nullptr, dout.p(), tokens.p(), nullptr, k.N, k.C, {k.v0, k.V, k.V});
        expect_close(dwte.get(), wte, wte_allowed, "dwte");
        expect_close(dwpe.get(), wpe, wpe_allowed, "dwpe");
        expect_same_bits(alone.get(), dwte.get(), "dwte without positions");
    }
}

// ---- norms ----------------------------------------------------------------------------------------------------------------
struct NormKind {
    bool centred;  // LayerNorm, else RMSNorm
    bool plain;
};
class Norms : public testing::TestWithParam<NormKind> {
protected:
    const bool centred = GetParam().centred;
    backend::Ctx ctx{2};
    Norms() { ctx.plain |= GetParam().plain; }

    void forward(Buffer<floatX>& out, Buffer<real>& mean, Buffer<real>& rstd, Buffer<floatX>* sum, const Input<floatX>& inp,
                 const Input<floatX>* add, const Input<floatX>& w, const Input<floatX>& b, const Shape& k, double eps,
                 double offset = 0) {
        floatX* s = sum ? sum->p() : nullptr;
        const floatX* a = add ? add->p() : nullptr;
        const auto forward = centred ? backend::layernorm_forward : backend::rmsnorm_forward;
        forward(ctx, out.p(), {mean.p(), rstd.p()}, s, inp.p(), a, {w.p(), b.p(), k.C, (real)eps, (real)offset}, k.N);
    }
};
INSTANTIATE_TEST_SUITE_P(Ops, Norms, testing::Values(NormKind{true, false}, NormKind{false, false}),
                         [](const auto& p) { return p.param.centred ? "Layer" : "Rms"; });

TEST_P(Norms, Forward) {
    Rng rng(3);
    for (const Shape& k : norm_shapes)
        for (const bool with_add : {false, true}) {
            const size_t size = (size_t)k.N * k.C;
            const Input<floatX> inp(rng.normals<floatX>(size, 1, 2)), add(rng.normals<floatX>(size)),
                w(rng.normals<floatX>(k.C)), b(rng.normals<floatX>(k.C));
            Buffer<floatX> out(size, "out"), sum(size, "sum");
            Buffer<real> mean(k.N, "mean"), rstd(k.N, "rstd");
            const double offset = k.N == 37 || k.N == 11 ? 1 : 0;
            forward(out, mean, rstd, with_add ? &sum : nullptr, inp, with_add ? &add : nullptr, w, b, k, 1e-5, offset);
            Doubles x = doubles(inp);
            if (with_add) {
                for (size_t i = 0; i < size; i++) x[i] += as_double(add[i]);
                expect_close(sum.get(), x, 0, rounding, "sum");
                x = doubles(sum.get());  // what is normalised is the rounded sum
            }
            const Doubles bias = doubles(b);
            const NormReference r =
                norm_reference(x, plus(doubles(w), offset), centred ? &bias : nullptr, k.N, k.C, (double)(real)1e-5);
            expect_close(out.get(), r.y, r.y_allowed, "out");
            expect_close(rstd.get(), r.rstd, r.rstd_allowed, "rstd");
            if (centred) expect_close(mean.get(), r.mean, r.mean_allowed, "mean");
        }
}

TEST_P(Norms, Backward) {
    Rng rng(4);
    for (const Shape& k : norm_shapes)
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            const size_t size = (size_t)k.N * k.C;
            const Input<floatX> inp(rng.normals<floatX>(size, 1, 2)), dout(rng.normals<floatX>(size)),
                w(rng.normals<floatX>(k.C));
            const std::vector<floatX> dinp0 = rng.normals<floatX>(size);
            const std::vector<real> dw0 = rng.normals<real>(k.C), db0 = rng.normals<real>(k.C);
            // Any statistics: backward takes what it is given.
            std::vector<real> means = centred ? rng.normals<real>(k.N) : std::vector<real>(k.N), rstds(k.N);
            for (real& r : rstds) r = (real)rng.uniform(0.5, 2);
            Buffer<real> mean(means, "mean"), rstd(rstds, "rstd");
            const real offset = k.N == 37 || k.N == 11 ? 1 : 0;
            NormGradient r = norm_gradient(doubles(dout), doubles(inp), plus(doubles(w), offset), doubles(means),
                                           doubles(rstds), k.N, k.C, centred);
            add_to(r.dw, r.dw_allowed, doubles(dw0), (k.N / 64 + 1) * u);
            add_to(r.db, r.db_allowed, doubles(db0), (k.N / 64 + 1) * u);
            if (acc == Acc::Add) add_to(r.dx, r.dx_allowed, doubles(dinp0), rounding);

            Buffer<floatX> dinp(size, "dinp");
            if (acc == Acc::Add) dinp.set(dinp0);
            Buffer<real> dw(dw0, "dweight"), db(db0, "dbias");
            const auto backward = centred ? backend::layernorm_backward : backend::rmsnorm_backward;
            backward(ctx, dinp.p(), {dw.p(), db.p()}, dout.p(), inp.p(), {w.p(), nullptr, k.C, 0, offset}, {mean.p(), rstd.p()},
                     k.N, acc);
            expect_close(dinp.get(), r.dx, r.dx_allowed, "dinp");
            expect_close(dw.get(), r.dw, r.dw_allowed, "dweight");
            if (centred) expect_close(db.get(), r.db, r.db_allowed, "dbias");
            else expect_same_bits(db.get(), db0, "dbias");
        }
}

// Heads within longer rows, whose other numbers stay: one to a lane and more than one, several to a warp, longer than a warp.
TEST_P(Norms, OfHeads) {
    if (centred) return;  // heads have RMSNorm
    Rng rng(12);
    struct Case {
        int N, C, segments, others;
        real offset;
    };
    for (const Case& k : {Case{1, 1, 1, 0, 0}, Case{5, 7, 3, 2, 0}, Case{19, 64, 4, 128, 0}, Case{7, 80, 2, 80, 1},
                          Case{130, 24, 2, 40, 0}, Case{9, 128, 1, 8, 0}, Case{3, 264, 1, 16, 1}, Case{2, 1000, 1, 3, 0}}) {
        if (!thorough && k.N > 20) continue;
        const size_t stride = (size_t)(k.segments * k.C + k.others), size = k.N * stride, C = (size_t)k.C;
        const int rows = k.N * k.segments;
        const std::vector<floatX> qkv0 = rng.normals<floatX>(size, 1, 0.5), dqkv0 = rng.normals<floatX>(size);
        const Input<floatX> w(rng.normals<floatX>(C));
        const std::vector<real> dw0 = rng.normals<real>(C);
        const auto place = [&](size_t i) { return i / C / k.segments * stride + i / C % k.segments * C + i % C; };
        const auto heads_of = [&](const std::vector<floatX>& all) {
            std::vector<floatX> heads;
            for (size_t i = 0; i < rows * C; i++) heads.push_back(all[place(i)]);
            return heads;
        };
        const auto with_heads = [&](const std::vector<floatX>& all, const Doubles& heads, double others) {
            Doubles result = doubles(all);
            if (others == 0) std::fill(result.begin(), result.end(), 0);
            for (size_t i = 0; i < heads.size(); i++) result[place(i)] = heads[i];
            return result;
        };
        Buffer<floatX> qkv(qkv0, "qkv"), kept(rows * C, "kept"), dqkv(dqkv0, "dqkv");
        Buffer<real> rstd(rows, "rstd"), dw(dw0, "dweight");
        const NormParams params = {w.p(), nullptr, k.C, (real)1e-5, k.offset};
        const HeadRows heads = {k.N, stride, k.segments};
        backend::head_norm_forward(ctx, qkv.p(), kept.p(), rstd.p(), params, heads);
        const Doubles weight = plus(doubles(w), k.offset);
        const NormReference r = norm_reference(doubles(heads_of(qkv0)), weight, nullptr, rows, k.C, (double)(real)1e-5);
        expect_same_bits(kept.get(), heads_of(qkv0), "kept");
        expect_close(rstd.get(), r.rstd, r.rstd_allowed, "rstd");
        expect_close(qkv.get(), with_heads(qkv0, r.y, 1), with_heads(qkv0, r.y_allowed, 0), "qkv");
        NormGradient g = norm_gradient(doubles(heads_of(dqkv0)), doubles(heads_of(qkv0)), weight, Doubles(rows),
                                       doubles(rstd.get()), rows, k.C, false);
        add_to(g.dw, g.dw_allowed, doubles(dw0), (rows / 64 + 1) * u);
        backend::head_norm_backward(ctx, dqkv.p(), {dw.p(), nullptr}, kept.p(), params, rstd.p(), heads);
        expect_close(dqkv.get(), with_heads(dqkv0, g.dx, 1), with_heads(dqkv0, g.dx_allowed, 0), "dqkv");
        expect_close(dw.get(), g.dw, g.dw_allowed, "dweight");
    }
}

TEST_P(Norms, NanStaysInItsRow) {
    Rng rng(5);
    for (const Shape& k : {Shape{3, 35}, Shape{3, 40}, Shape{3, 776}}) {
        std::vector<floatX> values = rng.normals<floatX>(k.N * k.C);
        values[k.C + k.C - 1] = from_double<floatX>(not_a_number);
        const Input<floatX> inp(values), w(rng.normals<floatX>(k.C)), b(rng.normals<floatX>(k.C));
        Buffer<floatX> out(k.N * k.C);
        Buffer<real> mean(k.N), rstd(k.N);
        forward(out, mean, rstd, nullptr, inp, nullptr, w, b, k, 1e-5);
        const Doubles y = doubles(out.get());
        for (int i = 0; i < k.N * k.C; i++) ASSERT_EQ(std::isnan(y[i]), i / k.C == 1) << "element " << i;
    }
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

// exp(-z) has a relative error of (|z| + 3) u: z is rounded several times, exp errs by two ulp, or by 3.7e-6 where results are
// rounded to bf16. Below e^-87 it is 0.
double sigmoid_relative_error(double z) {
    return (4 * std::abs(z) + 12) * u + (std::is_same<floatX, bf16>::value ? 3.7e-6 : 0);
}
const double tiny = 1e-35;

double gelu_inner(double x) { return 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }

constexpr double tanh_error = !backend::memory_is_host && std::is_same<floatX, bf16>::value ? 0x1p-10 * 0.504 : 0;  // 2^-10.987

// The GeLU of a product, fused or separate: if separate, pre is rounded to floatX before GeLU sees it and the product before it
// meets the derivative, so both bounds allow for that too. Sums of K terms as in test_matmul.cpp: 2 (K + 2) u of the
// magnitudes. |gelu'| < 1.13, |gelu''| < 1.13. Fused on a GPU, in bf16, tanh t has 11 bits: x (1 + t) / 2 errs by half of that
// times x, and the derivative (1 + t) / 2 + x (1 - t^2) inner' / 2 by (1/2 + |x t| inner') of it.
void check_linear_gelu(backend::Ctx& ctx) {
    for (const int N : {1, 19}) {
        const int IC = 40, OC = thorough ? 72 : 24;  // fc1: IC -> OC; fc2 back: its input is OC wide, its output IC
        Rng rng(31);
        const Input<floatX> inp(rng.normals<floatX>(N * IC)), w1(rng.normals<floatX>(OC * IC, 0.2)), b(rng.normals<floatX>(OC)),
            dout(rng.normals<floatX>(N * IC)), w2(rng.normals<floatX>(IC * OC, 0.2));
        for (const bool biased : {true, false}) {
            SCOPED_TRACE(testing::Message() << "N " << N << ", biased " << biased);
            Buffer<floatX> out(N * OC, "out"), pre(N * OC, "pre"), dpre(N * OC, "dpre");
            backend::linear_gelu_forward(ctx, out.p(), pre.p(), inp.p(), w1.p(), biased ? b.p() : nullptr, N, IC, OC);
            backend::linear_gelu_backward_input(ctx, dpre.p(), dout.p(), w2.p(), pre.p(), N, OC, IC);
            Doubles x(N * OC), x_allowed(N * OC), y(N * OC), y_allowed(N * OC), dx(N * OC), dx_allowed(N * OC);
            const std::vector<floatX> given = pre.get();
            for (int n = 0; n < N; n++)
                for (int o = 0; o < OC; o++) {
                    const int i = n * OC + o;
                    double sum = biased ? as_double(b[o]) : 0, magnitude = std::abs(sum), back = 0, back_magnitude = 0;
                    for (int k = 0; k < IC; k++) {
                        const double term = as_double(inp[n * IC + k]) * as_double(w1[o * IC + k]);
                        const double back_term = as_double(dout[n * IC + k]) * as_double(w2[k * OC + o]);
                        sum += term;
                        magnitude += std::abs(term);
                        back += back_term;
                        back_magnitude += std::abs(back_term);
                    }
                    const double error = 2 * (IC + 2) * u * magnitude, back_error = 2 * (IC + 2) * u * back_magnitude;
                    x[i] = sum;
                    x_allowed[i] = error + rounding * std::abs(sum);
                    const double s = 1 / (1 + std::exp(-gelu_inner(sum)));
                    y[i] = sum * s;
                    y_allowed[i] = 1.13 * x_allowed[i] + (rounding + sigmoid_relative_error(gelu_inner(sum))) * std::abs(y[i]) +
                                   tanh_error * std::abs(sum) / 2;
                    const double at = as_double(given[i]), derivative = gelu_derivative(at);
                    const double inner_slope = std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * at * at);
                    dx[i] = back * derivative;
                    dx_allowed[i] = std::abs(derivative) * (back_error + rounding * std::abs(back)) +
                                    rounding * std::abs(dx[i]) +
                                    (64 * u + tanh_error * (0.5 + std::abs(at) * inner_slope)) * std::abs(back);
                }
            expect_close(pre.get(), x, x_allowed, "pre");
            expect_close(out.get(), y, y_allowed, "out");
            expect_close(dpre.get(), dx, dx_allowed, "dpre");
        }
    }
}

}  // namespace

TEST(Gelu, ForwardAndBackward) {
    backend::Ctx ctx(2);
    for (const size_t n : {1, 17, 1003, 9000}) {
        const Input<floatX> inp(activation_inputs(n)), dout(Rng(7).normals<floatX>(n));
        Buffer<floatX> out(n, "out"), dinp(n, "dinp");
        backend::activation_forward(ctx, out.p(), inp.p(), 1, (int)n, Activation::gelu);
        backend::activation_backward(ctx, dinp.p(), dout.p(), inp.p(), 1, (int)n, Activation::gelu);
        Doubles y, dx, y_allowed, dx_allowed;
        for (size_t i = 0; i < n; i++) {
            const double x = as_double(inp[i]), z = gelu_inner(x), dz = 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
            // s (1 - s) dz and not its parts: far out s (1 - s) falls faster than x dz grows
            const double s = 1 / (1 + std::exp(-z)), bend = x * s / (1 + std::exp(z)) * dz, error = sigmoid_relative_error(z);
            y.push_back(x * s);
            dx.push_back(as_double(dout[i]) * (s + bend));
            y_allowed.push_back((rounding + error) * std::abs(y[i]) + tiny);
            // s and 1 - s err by `error` s (1 - s) (their slope), and 1 - s by u where it was subtracted from 1.
            const double absolute =
                std::isfinite(bend) ? (s + std::abs(bend)) * error + 4 * u * std::abs(x * dz) * s * (z > 0 && z < 20) : 0;
            dx_allowed.push_back(rounding * std::abs(dx[i]) + std::abs(as_double(dout[i])) * absolute + tiny);
        }
        expect_close(out.get(), y, y_allowed, "out");
        expect_close(dinp.get(), dx, dx_allowed, "dinp");
    }
}

// Of gelu_exact Phi has a relative error of 1e-7 and that of e^(-x^2/2), whose exponent is rounded and at most 87.
TEST(Activations, OfOneInput) {
    backend::Ctx ctx(2);
    for (const size_t n : {1, 17, 1003, 9000}) {
        const Input<floatX> inp(activation_inputs(n)), dout(Rng(7).normals<floatX>(n));
        for (const Activation activation : {Activation::gelu_exact, Activation::relu, Activation::relu2}) {
            Buffer<floatX> out(n, "out"), dinp(n, "dinp");
            backend::activation_forward(ctx, out.p(), inp.p(), 1, (int)n, activation);
            backend::activation_backward(ctx, dinp.p(), dout.p(), inp.p(), 1, (int)n, activation);
            Doubles y, dx, y_allowed, dx_allowed;
            for (size_t i = 0; i < n; i++) {
                const double x = as_double(inp[i]), dy = as_double(dout[i]), r = std::max(x, 0.0);
                const bool erf = activation == Activation::gelu_exact;
                const double cumulative = std::erfc(-x / std::sqrt(2)) / 2,
                             density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
                const double error = erf ? 1.5e-7 + (4 * std::min(x * x, 174.0) + 12) * u : 2 * u;
                double value = r, slope = x > 0;
                if (activation == Activation::relu2) {
                    value = r * r;
                    slope = 2 * r;
                }
                if (erf) {
                    value = x * cumulative;
                    slope = cumulative + x * density;
                }
                y.push_back(value);
                dx.push_back(dy * slope);
                y_allowed.push_back((rounding + error) * std::abs(value) + (1 + std::abs(x)) * tiny);
                dx_allowed.push_back(
                    rounding * std::abs(dx[i]) +
                    std::abs(dy) * ((erf ? cumulative + std::abs(x) * density : slope) * error + std::abs(x) * tiny) + tiny);
            }
            expect_close(out.get(), y, y_allowed, "out");
            expect_close(dinp.get(), dx, dx_allowed, "dinp");
        }
    }
}

TEST(LinearGelu, ForwardAndBackward) {
    backend::Ctx ctx(2);
    check_linear_gelu(ctx);
}

// Fused products have the bits of the separate ops; a library's may differ by the roundings between
// them, as it may add the residual stream and the bias before or after it rounds the product.
TEST(LinearFused, BitsOfTheOpsOneAfterAnother) {
    backend::Ctx ctx(2);
    const int N = 21, IC = 40, NH = 4, NKV = 2, HS = 16, OC = (NH + 2 * NKV) * HS, F = OC / 2;
    Rng rng(33);
    const Input<floatX> inp(rng.normals<floatX>(N * IC)), weight(rng.normals<floatX>(OC * IC, 0.2)), b(rng.normals<floatX>(OC)),
        residual(rng.normals<floatX>(N * OC)), dout(rng.normals<floatX>(N * IC)), back(rng.normals<floatX>(IC * F, 0.2));
    std::vector<real> angles;
    rope_table(angles, 50, HS, 10000);
    const Input<real> table(angles);
    const Input<int> positions(rng.integers(N, 0, 50));
    Buffer<floatX> product(N * OC, "product"), out(N * OC, "out"), apart(N * OC, "apart"), act(N * F, "act"),
        act_apart(N * F, "act apart"), dact(N * F, "dact");
    backend::linear_forward(ctx, product.p(), inp.p(), weight.p(), b.p(), N, IC, OC);

    backend::linear_residual_forward(ctx, out.p(), residual.p(), inp.p(), weight.p(), b.p(), N, IC, OC);
    backend::residual_forward(ctx, apart.p(), residual.p(), product.p(), (size_t)N * OC);
    const Doubles sum = doubles(apart.get()), terms = doubles(product.get()), bias = doubles(b.host());
    Doubles allowed;
    for (size_t i = 0; i < sum.size(); i++)
        allowed.push_back(rounding * (3 * std::abs(terms[i]) + 2 * std::abs(bias[i % bias.size()]) + 2 * std::abs(sum[i])) +
                          10 * IC * u);  // of products in another order
    if (backend::memory_is_host) expect_same_bits(out.get(), apart.get(), "residual");
    else expect_close(out.get(), sum, allowed, "residual");

    Buffer<floatX> turned(product.get(), "turned");
    const Rope rope = {positions.p(), table.p(), HS};
    const AttentionShape shape = {1, N, NH, NKV, HS};
    backend::linear_rope_forward(ctx, out.p(), inp.p(), weight.p(), b.p(), IC, rope, shape);
    backend::rope_forward(ctx, turned.p(), rope, shape);
    expect_same_bits(out.get(), turned.get(), "rope");

    backend::linear_swiglu_forward(ctx, act.p(), out.p(), inp.p(), weight.p(), b.p(), N, IC, F);
    backend::activation_forward(ctx, act_apart.p(), product.p(), N, F, Activation::swiglu);
    expect_same_bits(out.get(), product.get(), "gate and up");
    expect_same_bits(act.get(), act_apart.get(), "swiglu");

    backend::linear_swiglu_backward_input(ctx, out.p(), dact.p(), dout.p(), back.p(), product.p(), N, F, IC);
    backend::linear_backward_input(ctx, dact.p(), dout.p(), back.p(), N, F, IC);
    backend::activation_backward(ctx, apart.p(), dact.p(), product.p(), N, F, Activation::swiglu);
    expect_same_bits(out.get(), apart.get(), "swiglu backward");
}

TEST(SwiGlu, ForwardAndBackward) {
    backend::Ctx ctx(2);
    for (const Shape& k : {Shape{1, 1}, Shape{1, 45}, Shape{7, 129}, Shape{5, 264}, Shape{2, 5000}}) {
        const int N = k.N, F = k.C;
        const Input<floatX> gate_up(activation_inputs(N * 2 * F)), dout(Rng(8).normals<floatX>(N * F));
        Buffer<floatX> out(N * F, "out"), dgate_up(N * 2 * F, "dgate_up");
        backend::activation_forward(ctx, out.p(), gate_up.p(), N, F, Activation::swiglu);
        backend::activation_backward(ctx, dgate_up.p(), dout.p(), gate_up.p(), N, F, Activation::swiglu);
        Doubles y(N * F), y_allowed(N * F), d(N * 2 * F), d_allowed(N * 2 * F);
        for (int n = 0; n < N; n++)
            for (int f = 0; f < F; f++) {
                const int i = n * F + f, gi = n * 2 * F + f, ui = gi + F;
                const double g = as_double(gate_up[gi]), up = as_double(gate_up[ui]), dy = as_double(dout[i]);
                const double s = 1 / (1 + std::exp(-g)), not_s = 1 / (1 + std::exp(g)), error = sigmoid_relative_error(g);
                y[i] = g * s * up;
                y_allowed[i] = (rounding + error) * std::abs(y[i]) + tiny;
                d[ui] = dy * g * s;
                d_allowed[ui] = (rounding + error) * std::abs(d[ui]) + tiny;
                d[gi] = dy * up * s * (1 + g * not_s);
                d_allowed[gi] = rounding * std::abs(d[gi]) +
                                std::abs(dy * up * s) * ((1 + std::abs(g) * not_s) * error + 4 * u * std::abs(g) * (g < 20)) +
                                tiny;
            }
        expect_close(out.get(), y, y_allowed, "out");
        expect_close(dgate_up.get(), d, d_allowed, "dgate_up");
    }
}

// The product with `up` of what gelu gives.
TEST(GeGlu, ForwardAndBackward) {
    backend::Ctx ctx(2);
    for (const Shape& k : {Shape{1, 1}, Shape{7, 129}, Shape{5, 264}}) {
        const int N = k.N, F = k.C;
        const Input<floatX> gate_up(activation_inputs(N * 2 * F)), dout(Rng(8).normals<floatX>(N * F));
        Buffer<floatX> out(N * F, "out"), dgate_up(N * 2 * F, "dgate_up");
        backend::activation_forward(ctx, out.p(), gate_up.p(), N, F, Activation::geglu);
        backend::activation_backward(ctx, dgate_up.p(), dout.p(), gate_up.p(), N, F, Activation::geglu);
        Doubles y(N * F), y_allowed(N * F), d(N * 2 * F), d_allowed(N * 2 * F);
        for (int i = 0; i < N * F; i++) {
            const int gi = i / F * 2 * F + i % F, ui = gi + F;
            const double x = as_double(gate_up[gi]), up = as_double(gate_up[ui]), dy = as_double(dout[i]), z = gelu_inner(x);
            const double dz = 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x), s = 1 / (1 + std::exp(-z));
            const double bend = x * s / (1 + std::exp(z)) * dz, error = sigmoid_relative_error(z);
            const double bend_error =
                std::isfinite(bend) ? (s + std::abs(bend)) * error + 4 * u * std::abs(x * dz) * s * (z > 0 && z < 20) : 0;
            y[i] = x * s * up;
            y_allowed[i] = (rounding + error + 2 * u) * std::abs(y[i]) + std::abs(up) * tiny;
            d[ui] = dy * x * s;
            d_allowed[ui] = (rounding + error + 2 * u) * std::abs(d[ui]) + tiny;
            d[gi] = dy * up * (s + bend);
            d_allowed[gi] = (rounding + 2 * u) * std::abs(d[gi]) + std::abs(dy * up) * (bend_error + tiny) + tiny;
        }
        expect_close(out.get(), y, y_allowed, "out");
        expect_close(dgate_up.get(), d, d_allowed, "dgate_up");
    }
}

// The mask of every element is a function of its place in the whole run, wherever a part of it begins.
TEST(Dropout, BitsOfTheElementsPlace) {
    backend::Ctx ctx(2);
    Rng rng(13);
    Dropout whole, off, odd, slice, crossing;
    for (Dropout* d : {&whole, &odd, &slice, &crossing}) {
        d->rate = real(0.25);
        d->draws.key = 77;
        d->draws.tensor = 3;
    }
    odd.draws.first = 1003;
    slice.draws.first = 24;
    slice.draws.cols = 24;
    slice.draws.whole_cols = 96;
    crossing.draws.first = (1ull << 34) - 64;
    for (const Dropout& d : {whole, off, odd, slice, crossing})
        for (const size_t n : {(size_t)0, (size_t)1, (size_t)67, (size_t)(thorough ? 20003 : 203)}) {
            const Input<floatX> inp(rng.normals<floatX>(n));
            Buffer<floatX> out(n, "out"), in_place(inp.host(), "in place");
            backend::dropout_forward(ctx, out.p(), inp.p(), n, d);
            backend::dropout_forward(ctx, in_place.p(), in_place.p(), n, d);
            std::vector<floatX> expected;
            for (size_t i = 0; i < n; i++) {
                const uint64_t at = d.draws.cols ? d.draws.first + i / 24 * 96 + i % 24 : d.draws.first + i;
                const bool kept = d.rate == 0 || random_bits(77, RngPurpose::dropout, 3, at / 4)[at % 4] >= 1u << 30;
                expected.push_back(kept ? (floatX)((real)inp[i] * (1 / (1 - d.rate))) : floatX(0));
            }
            expect_same_bits(out.get(), expected, "out");
            expect_same_bits(in_place.get(), out.get(), "in place");
        }
}

TEST(Residual, RoundsTheSumOnceAlsoInPlace) {
    backend::Ctx ctx(2);
    Rng rng(9);
    const size_t n = 1001;
    const Input<floatX> a(rng.normals<floatX>(n)), b(rng.normals<floatX>(n));
    Doubles expected(n);
    for (size_t i = 0; i < n; i++) expected[i] = as_double(a[i]) + as_double(b[i]);
    Buffer<floatX> out(n, "out"), in_place(a.host(), "in place");
    backend::residual_forward(ctx, out.p(), a.p(), b.p(), n);
    backend::residual_forward(ctx, in_place.p(), in_place.p(), b.p(), n);
    expect_close(out.get(), expected, 0, rounding, "out");
    expect_same_bits(out.get(), in_place.get(), "in place");
}

// ---- low-rank adapters ----------------------------------------------------------------------------------------------------
// Rows 2 .. 8 of a layer of 13 have the first of two adapters, rows 8 .. 11 the second; the others none.
TEST(LoraBlocks, SpreadAndCollectedWhereTheyBelong) {
    backend::Ctx ctx(2);
    const int rank = 3, OC = 13, packed = 9, width = 2 * rank;
    const LoraRows rows = {{{2, 6, 0, 0}, {8, 3, 6, 1}, {}}, 2, 2, rank, OC};
    Rng rng(5);
    const Input<floatX> b(rng.normals<floatX>(packed * rank));
    const Input<real> dwide(rng.normals<real>(OC * width)), before(rng.normals<real>(packed * rank));
    Doubles wide(OC * width), set(packed * rank), added(packed * rank);
    for (int r = 0; r < packed; r++)
        for (int k = 0; k < rank; k++) {
            const int place = (2 + r) * width + (r < 6 ? 0 : rank) + k, i = r * rank + k;
            wide[place] = 1.75 * as_double(b[i]);
            set[i] = 1.75 * as_double(dwide[place]);
            added[i] = as_double(before[i]) + set[i];
        }
    Buffer<floatX> out(OC * width, "wide");
    backend::lora_spread(ctx, out.p(), b.p(), rows, 1.75);
    expect_close(out.get(), wide, 0, rounding, "wide");
    Buffer<real> db(before.host(), "db");
    backend::lora_collect(ctx, db.p(), dwide.p(), rows, 1.75, Acc::Add);
    expect_close(db.get(), added, 4 * u, 4 * u, "added");
    backend::lora_collect(ctx, db.p(), dwide.p(), rows, 1.75, Acc::Set);
    expect_close(db.get(), set, 0, 2 * u, "set");
}

// ---- classifier -----------------------------------------------------------------------------------------------------------
namespace {

// Logits between guards with NaN in the padding, and the outputs of a run over them.
struct Classified {
    std::vector<floatX> logits;
    std::vector<real> loss, zloss, lse;
    Classified(const std::vector<floatX>& x /*(N, V)*/, const std::vector<int>& targets, int V, int Vp, double loss_scale,
               double z_coef, bool write_gradient = true, double softcap = 0, const std::vector<real>& weight = {})
        : logits(targets.size() * Vp, from_double<floatX>(not_a_number)) {
        const int N = (int)targets.size();
        for (int n = 0; n < N; n++) std::copy_n(&x[(size_t)n * V], V, &logits[(size_t)n * Vp]);
        Buffer<floatX> in_place(logits, "logits");
        Buffer<real> l(N, "loss"), z(N, "zloss"), s(N, "lse");
        const Input<real> weights(weight);
        backend::Ctx ctx(2);
        backend::classifier(
            ctx, in_place.p(), {l.p(), z.p(), s.p()}, Input<int>(targets).p(), N, {0, V, Vp},
            {(real)loss_scale, (real)z_coef, write_gradient, (real)softcap, weight.empty() ? nullptr : weights.p()});
        logits = in_place.get();
        loss = l.get();
        zloss = z.get();
        lse = s.get();
    }
};

}  // namespace

TEST(Classifier, AgainstDouble) {
    Rng rng(10);
    struct Case {
        int N, V, Vp;
        double spread, softcap = 0;
        bool weighted = false;
    };
    for (const Case& k :
         {Case{1, 3, 8, 1}, Case{6, 37, 48, 3}, Case{5, 513, 640, 1}, Case{2, 2051, 2051, 2}, Case{3, 50257, 50304, 2},
          Case{6, 37, 48, 3, 2}, Case{5, 1203, 1216, 8, 30}, Case{6, 37, 48, 3, 2, true}, Case{5, 2051, 2056, 2, 0, true}}) {
        const double loss_scale = (real)0.013, z_coef = (real)1e-2;
        const std::vector<floatX> x = rng.normals<floatX>((size_t)k.N * k.V, k.spread);
        std::vector<int> targets = rng.integers(k.N, 0, k.V);
        if (k.N > 2) targets[2] = -1;
        const std::vector<real> weight = k.weighted ? rng.normals<real>(k.N) : std::vector<real>();
        const Classified out(x, targets, k.V, k.Vp, loss_scale, z_coef, true, k.softcap, weight),
            without(x, targets, k.V, k.Vp, loss_scale, z_coef, false, k.softcap);
        const auto cap = [&](floatX logit) {
            return k.softcap > 0 ? k.softcap * std::tanh(as_double(logit) / k.softcap) : as_double(logit);
        };
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
            for (int i = 0; i < k.V; i++) z += std::exp(cap(row[i]));
            const double log_z = std::log(z), at_target = targets[n] < 0 ? 0 : cap(row[targets[n]]);
            const bool masked = targets[n] < 0;
            lse.push_back(log_z);
            loss.push_back(masked ? 0 : log_z - at_target);
            zloss.push_back(masked ? 0 : z_coef * log_z * log_z);
            // The sum: chunks of 512 in 16 parts, one more rounding and rescaling (3 u) per chunk, exp within two ulp of an
            // argument rounded once. log Z then errs by that (relative to Z), plus its own roundings.
            // A capped logit errs by 6 u of the cap at most.
            const double sum_error = (512 / 16 + 16 + 4 * (k.V / 512) + 8 + 8 * k.spread + 6 * k.softcap) * u,
                         error = sum_error + 3 * u * std::abs(log_z);
            largest_error = std::max(largest_error, error);
            const double scale = loss_scale * (k.weighted ? (double)weight[n] : 1), factor = scale * (1 + 2 * z_coef * log_z);
            for (int i = 0; i < k.Vp; i++) {
                const double logit = i < k.V ? cap(row[i]) : 0, p = i < k.V && !masked ? std::exp(logit - log_z) : 0;
                const double slope = k.softcap > 0 ? 1 - std::pow(logit / k.softcap, 2) : 1;
                const double of_capped = masked || i >= k.V ? 0 : factor * p - scale * (i == targets[n]);
                const double g = of_capped * slope, p_error = error + (std::abs(logit) + 8) * u;
                gradient.push_back(g);
                gradient_allowed.push_back(rounding * std::abs(g) + 2 * p_error * std::abs(factor) * p + 2 * u * std::abs(g) +
                                           (k.softcap > 0 ? 20 * u * std::abs(of_capped) : 0));
            }
        }
        expect_close(out.lse, lse, largest_error, u, "lse");
        expect_close(out.loss, loss, largest_error, 4 * u, "loss");
        expect_close(out.zloss, zloss, 0, 2 * largest_error + 4 * u, "zloss");
        expect_close(out.logits, gradient, gradient_allowed, "dlogits");
    }
}

// Shards of the vocabulary, one of them without a column of its own, together give what the whole gives: the sums are other
// ones, so to within their error, (V / 16 + 20) u of log Z and of the gradients.
void check_shards(real softcap) {
    backend::Ctx ctx(2);
    const int N = 7, V = 83, Vp = 96, per_shard = 48, shards = 3;
    Rng rng(41);
    std::vector<floatX> logits = rng.normals<floatX>(N * Vp, 2);
    std::vector<int> targets = {0, 47, 48, 82, -1, 5, 60};
    const Input<int> ids(targets);
    Buffer<floatX> whole(logits);
    Buffer<real> loss(N), zloss(N), lse(N), statistics(shards * 2 * N, "statistics");
    const RowLosses losses = {loss.p(), zloss.p(), lse.p()};
    const Input<real> weight(std::vector<real>{1, -1, real(0.5), real(-0.25), 1, real(0.75), -1});
    const LossConstants constants = {real(0.25), real(1e-3), true, softcap, weight.p()};
    backend::classifier(ctx, whole.p(), losses, ids.p(), N, {0, V, Vp}, constants);
    std::vector<std::unique_ptr<Buffer<floatX>>> parts;
    const auto columns = [&](int shard) { return std::max(0, std::min(per_shard, V - shard * per_shard)); };
    for (int r = 0; r < shards; r++) {
        std::vector<floatX> part((size_t)N * per_shard, from_double<floatX>(not_a_number));  // padding is never read
        for (int n = 0; n < N; n++)
            for (int i = 0; i < columns(r); i++) part[(size_t)n * per_shard + i] = logits[(size_t)n * Vp + r * per_shard + i];
        parts.push_back(std::make_unique<Buffer<floatX>>(part));
        backend::classifier_statistics(ctx, statistics.p() + (size_t)r * 2 * N, parts[r]->p(), ids.p(), N,
                                       {r * per_shard, columns(r), per_shard}, constants.softcap);
    }
    const double allowed = (V / 16.0 + 20) * u * 10;
    const Doubles expected_lse = doubles(lse.get()), expected_loss = doubles(loss.get()), expected_z = doubles(zloss.get());
    const std::vector<floatX> gradient = whole.get();
    for (int r = 0; r < shards; r++) {
        Buffer<real> l(N), z(N), s(N);
        backend::classifier_shard(ctx, parts[r]->p(), {l.p(), z.p(), s.p()}, ids.p(), statistics.p(), shards, N,
                                  {r * per_shard, columns(r), per_shard}, constants);
        expect_close(s.get(), expected_lse, Doubles(N, allowed), "lse");
        expect_close(l.get(), expected_loss, Doubles(N, allowed), "loss");
        expect_close(z.get(), expected_z, Doubles(N, allowed), "zloss");
        Doubles dx, dx_allowed;
        for (int n = 0; n < N; n++)
            for (int i = 0; i < per_shard; i++) {
                const double g = i < columns(r) ? as_double(gradient[(size_t)n * Vp + r * per_shard + i]) : 0;
                dx.push_back(g);
                dx_allowed.push_back(2 * rounding * std::abs(g) + allowed * (std::abs(g) + 0.25e-3));
            }
        expect_close(parts[r]->get(), dx, dx_allowed, "gradient");
    }
    // A NaN in any shard is seen by all.
    std::vector<real> all = statistics.get();
    all[2 * N + 3] = (real)not_a_number;
    statistics.set(all);
    backend::classifier_shard(ctx, parts[0]->p(), losses, ids.p(), statistics.p(), shards, N, {0, per_shard, per_shard},
                              {1, 0, false});
    for (int n = 0; n < N; n++) EXPECT_EQ(std::isnan(as_double(lse.get()[n])), n == 3) << n;
}
TEST(Classifier, ShardsAsTheWhole) {
    check_shards(0);
    check_shards(3);
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
    x[1250] = from_double<floatX>(2e4);
    x[7] = from_double<floatX>(1e4);
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

TEST(LossSums, AddsUnmaskedRowsAndShowsNan) {
    backend::Ctx ctx(2);
    Rng rng(15);
    for (const int N : {1, 3, 1000, 2500}) {
        if (!thorough && N != 1000) continue;
        std::vector<real> losses = rng.normals<real>(N), zlosses = rng.normals<real>(N), lses = rng.normals<real>(N, 5);
        std::vector<int> target = rng.integers(N, -3, 9);
        if (N > 1) {
            losses[1] = lses[1] = (real)not_a_number;
            target[1] = -1;
        }  // a masked row says nothing
        const auto run = [&](const LossSums& start) {
            Buffer<real> loss(losses), zloss(zlosses), lse(lses);
            const Input<int> targets(target);
            Doubles memory(sizeof(LossSums) / sizeof(double));
            memcpy(memory.data(), &start, sizeof start);
            Buffer<double> sums(memory, "sums");
            backend::loss_sums(ctx, (LossSums*)sums.p(), {loss.p(), zloss.p(), lse.p()}, targets.p(), N);
            memory = sums.get();
            LossSums result;
            memcpy((void*)&result, memory.data(), sizeof result);
            return result;
        };
        LossSums start{3, 4, 5, -INFINITY, 6}, expected = start;
        for (int n = 0; n < N; n++)
            if (target[n] >= 0) {
                expected.ce += losses[n];
                expected.z += zlosses[n];
                expected.lse += lses[n];
                expected.n++;
                expected.lse_max = std::max(expected.lse_max, (double)lses[n]);
            }
        const LossSums sums = run(start);
        const double allowed = N * 0x1p-50 * (N + 10);  // terms of order one, summed in double
        EXPECT_NEAR(sums.ce, expected.ce, allowed);
        EXPECT_NEAR(sums.z, expected.z, allowed);
        EXPECT_NEAR(sums.lse, expected.lse, 5 * allowed);
        EXPECT_EQ(sums.lse_max, expected.lse_max);
        EXPECT_EQ(sums.n, expected.n);
        start.lse_max = 1e9;
        EXPECT_EQ(run(start).lse_max, 1e9);
        start.lse_max = not_a_number;
        EXPECT_TRUE(std::isnan(run(start).lse_max));
        start.lse_max = 1;
        for (const int bad : {0, N / 2, N - 1}) {
            const std::vector<int> before = target;
            const real saved = lses[bad];
            lses[bad] = (real)not_a_number;
            target[bad] = 2;
            EXPECT_TRUE(std::isnan(run(start).lse_max)) << bad << " of " << N;
            lses[bad] = saved;
            target = before;
        }
    }
}

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
            gradient[0] = 0;  // never a gradient: the update must be the decay alone, not 0/0
            const Input<real> grad(gradient);
            backend::adamw(ctx, param.p(), has_lower_halves ? lower.p() : nullptr, m.p(), v.p(), grad.p(), n,
                           {(real)lr, (real)beta1, (real)beta2, (real)eps, (real)decay, (real)grad_scale, step}, {});
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
        expect_close(m.get(), md, m_allowed, "m");
        expect_close(v.get(), vd, v_allowed, "v");
        const std::vector<real> weights = whole_weights(param.get(), lower.get());
        expect_close(weights, w, w_allowed, "weights");
        expect_close(param.get(), doubles(weights), 0, roundoff<floatX>, "param is the rounded weight");
    }
}

// The average against double; exchanged for the weights and back, both have the bits that they had.
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
    places[3].first = (1ull << 34) - 64;  // 3: where a word of the counter ends
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
// The random number of one of them, by its place in the whole tensor.
uint32_t random_of(const Rounding& r, size_t i) {
    const size_t at = r.at + i;
    const uint64_t place = r.cols ? r.first + at / r.cols * r.whole_cols + at % r.cols : r.first + i;
    return random_bits(r.key, RngPurpose::rounding, r.tensor, place / 4)[place % 4];
}

// Numbers of few bits and factors of few bits: nothing is rounded on the way to the moments, whatever order or fused
// multiply-adds a backend has, and these must have the bits that elements.h defines.
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
            const Input<real> grad(gradient);  // whose numbers bf16 holds
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

// To the nearest bf16 where it sets, of two the even one; by the element's place where it adds.
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

// 512 summands of 2^-10, each a quarter of what rounding to the nearest would take for nothing beside 1.
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
    // A summand's error has the standard deviation sqrt(p (1 - p)) 2^-7, p = 1/8: five times that of the mean.
    EXPECT_NEAR(mean, 1 + summands * 0x1p-10, 5 * std::sqrt(7.0 / 64 * summands / (double)n) * 0x1p-7);
}

// ---- Muon -----------------------------------------------------------------------------------------------------------------
const size_t muon_sizes[] = {1, 67, thorough ? (size_t)20003 : (size_t)203};

// Momentum of few bits: exp_avg is not rounded but to bf16, by the element's place.
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
        for (const double norm : {3.0, 1e-3, 1e-9}) {  // the last one is below the smallest that is divided by
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

// Two steps: rows of all sizes, one that is zero, get about the same size, and the whole has the norm of an orthogonal matrix.
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
    // A step's error has the standard deviation of at most half the distance of two bf16 below 1; five times that of the mean.
    const double left = std::pow(0.999, steps), allowed = 5 * 0x1p-9 * std::sqrt(steps / (double)n);
    const auto mean = [&](const std::vector<bf16>& x) {
        double sum = 0;
        for (const bf16 value : x) sum += as_double(value);
        return sum / (double)n;
    };
    EXPECT_NEAR(mean(v.get()), 0.9 + 0.1 * left, allowed);
    EXPECT_NEAR(mean(m.get()), std::sqrt(0.9) + (1 - std::sqrt(0.9)) * left, allowed);
}
