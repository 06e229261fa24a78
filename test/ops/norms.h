// Tests of embedding and norms, for op_tests.h.
#pragma once
#include "inputs.h"

namespace {

struct NormReference {
    Doubles y, mean, rstd, y_allowed, mean_allowed, rstd_allowed;
};

// mean and variance: sums of C terms in at least 16 parts, so a relative error below s = (C/16 + 20) u of the sum of
// magnitudes. Errors of xhat = (x - mean) rstd: s mean|x| rstd from the mean, s |xhat| from rstd, 8 u (|xhat| + |b|) from other
// steps.
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

// Gradients from given statistics. dx = rstd (g - mean(g) - xhat mean(g xhat)): the two means are sums as above, the others a
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
    // Few rows of many tokens and the reverse, a single token, only tokens outside the shard, more rows than fit in one sorting
    // tile.
    const Case cases[] = {
        {67, 1, 9, 3, 5, 12},  {67, 19, 9, 3, 5, 12},           {67, 130, 9, 3, 5, 12}, {131, 264, 131, 0, 700, 700},
        {200, 8, 1, 0, 1, 1},  {45, 16, 2, 30, 4, 20},          {1, 264, 1, 0, 7, 7},   {5000, 8, 40, 0, 90, 90},
        {4097, 3, 1, 0, 1, 1}, {2048, 8, 2048, 1000, 9, 50000}, {2100, 8, 3, 0, 4, 4}};
    for (const Case& k : cases) {
        if (k.N > most_rows) continue;
        const Input<int> tokens(rng.integers(k.N, 0, k.vocabulary)), positions(rng.integers(k.N, 0, k.P));
        const Input<floatX> dout(rng.normals<floatX>((size_t)k.N * k.C));
        const std::vector<real> wte0 = rng.normals<real>(k.V * k.C), wpe0 = rng.normals<real>(k.P * k.C);
        // At most as many roundings as terms, in any order.
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

// Each row's sum in fp32, rounded once by the element's place, as accumulate() does for all rows.
TEST(Embedding, BackwardRoundsEachRowOnce) {
    backend::Ctx ctx(2);
    Rng rng(3);
    struct Case {
        int N, C, v0, V, vocabulary;
    };
    for (const Case& k :
         {Case{67, 19, 3, 5, 12}, {131, 264, 0, 700, 700}, {400, 72, 5, 3, 9}, {1, 264, 0, 7, 7}, {2100, 8, 0, 4, 4}}) {
        if (k.N > most_rows) continue;
        const size_t n = (size_t)k.V * k.C;
        const Input<int> ids(rng.integers(k.N, 0, k.vocabulary));
        const Input<floatX> dout(rng.normals<floatX>((size_t)k.N * k.C));
        const VocabularyShard shard = {k.v0, k.V, k.V, (real)1.5};
        Buffer<real> sums(std::vector<real>(n), "sums");
        backend::embedding_backward(ctx, sums.p(), nullptr, dout.p(), ids.p(), nullptr, k.N, k.C, shard);
        const Input<real> x(sums.get());
        const std::vector<bf16> start = rng.normals<bf16>(n);
        Rounding r;
        r.key = 9;
        r.tensor = 4;
        r.first = (uint64_t)k.v0 * k.C;
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            Buffer<bf16> expected(start, "all"), table(start, "table");
            backend::accumulate(ctx, expected.p(), x.p(), n, acc, r);
            backend::embedding_backward_rounded(ctx, table.p(), dout.p(), ids.p(), k.N, k.C, shard, acc, r);
            const std::vector<bf16> one = table.get(), other = expected.get();
            for (size_t i = 0; i < n; i++) ASSERT_EQ(one[i].bits, other[i].bits) << i << " of " << k.V << "x" << k.C;
        }
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
                x = doubles(sum.get());  // the rounded sum is normalized
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
            // Any statistics: backward accepts all.
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
            const NormParams params = {w.p(), nullptr, k.C, 0, offset};
            backward(ctx, dinp.p(), {dw.p(), db.p()}, dout.p(), inp.p(), params, {mean.p(), rstd.p()}, k.N, acc);
            expect_close(dinp.get(), r.dx, r.dx_allowed, "dinp");
            expect_close(dw.get(), r.dw, r.dw_allowed, "dweight");
            if (centred) expect_close(db.get(), r.db, r.db_allowed, "dbias");
            else expect_same_bits(db.get(), db0, "dbias");

            // With the sums of dinp's columns: the same dinp, and the sums of the stored values, in any order.
            if (!backend::norm_sums_columns(k.C)) continue;
            Buffer<floatX> dinp_too(size, "dinp with sums");
            if (acc == Acc::Add) dinp_too.set(dinp0);
            Buffer<real> dw_too(dw0, "dweight with sums"), db_too(db0, "dbias with sums"), columns(db0, "sums of columns");
            backward(ctx, dinp_too.p(), {dw_too.p(), db_too.p(), columns.p()}, dout.p(), inp.p(), params, {mean.p(), rstd.p()},
                     k.N, acc);
            expect_same_bits(dinp_too.get(), dinp.get(), "dinp with sums");
            expect_close(dw_too.get(), r.dw, r.dw_allowed, "dweight with sums");
            if (centred) expect_close(db_too.get(), r.db, r.db_allowed, "dbias with sums");
            const std::vector<floatX> stored = dinp_too.get();
            Doubles sums = doubles(db0), allowed(k.C);
            for (int c = 0; c < k.C; c++) {
                double magnitude = std::abs(sums[c]);
                for (int n = 0; n < k.N; n++) {
                    sums[c] += as_double(stored[(size_t)n * k.C + c]);
                    magnitude += std::abs(as_double(stored[(size_t)n * k.C + c]));
                }
                allowed[c] = (k.N + 1) * u * magnitude;
            }
            expect_close(columns.get(), sums, allowed, "sums of columns");
        }
}

// Heads within longer rows, whose other numbers are unchanged: one per lane and more than one, several per warp, longer than a
// warp.
TEST_P(Norms, OfHeads) {
    if (centred) return;  // heads have RMSNorm
    Rng rng(12);
    struct Case {
        int N, C, segments, others;
        real offset;
    };
    for (const Case& k :
         {Case{1, 1, 1, 0, 0}, Case{5, 7, 3, 2, 0}, Case{19, 64, 4, 128, 0}, Case{7, 80, 2, 80, 1}, Case{130, 24, 2, 40, 0},
          Case{9, 128, 1, 8, 0}, Case{3, 40, 1, 20, 0}, Case{3, 264, 1, 16, 1}, Case{2, 1000, 1, 3, 0}}) {
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
        const HeadRows heads = {k.N, stride, k.segments};
        const Doubles weight = plus(doubles(w), k.offset);
        const NormReference r = norm_reference(doubles(heads_of(qkv0)), weight, nullptr, rows, k.C, (double)(real)1e-5);
        for (const bool given : {false, true}) {  // the sums of rows, as for a row's parts on several ranks
            Buffer<floatX> qkv(qkv0, "qkv"), kept(rows * C, "kept"), dqkv(dqkv0, "dqkv");
            Buffer<real> rstd(rows, "rstd"), dw(dw0, "dweight"), sums(rows, "sums");
            NormParams params = {w.p(), nullptr, k.C, (real)1e-5, k.offset};
            params.means = {given ? sums.p() : nullptr, 1 / (real)k.C};
            if (given) backend::head_norm_squares(ctx, sums.p(), qkv.p(), k.C, heads);
            backend::head_norm_forward(ctx, qkv.p(), kept.p(), rstd.p(), params, heads);
            expect_same_bits(kept.get(), heads_of(qkv0), "kept");
            expect_close(rstd.get(), r.rstd, r.rstd_allowed, "rstd");
            expect_close(qkv.get(), with_heads(qkv0, r.y, 1), with_heads(qkv0, r.y_allowed, 0), "qkv");
            NormGradient g = norm_gradient(doubles(heads_of(dqkv0)), doubles(heads_of(qkv0)), weight, Doubles(rows),
                                           doubles(rstd.get()), rows, k.C, false);
            add_to(g.dw, g.dw_allowed, doubles(dw0), (rows / 64 + 1) * u);
            if (given) backend::head_norm_products(ctx, sums.p(), dqkv.p(), kept.p(), params, rstd.p(), heads);
            backend::head_norm_backward(ctx, dqkv.p(), {dw.p(), nullptr}, kept.p(), params, rstd.p(), heads);
            expect_close(dqkv.get(), with_heads(dqkv0, g.dx, 1), with_heads(dqkv0, g.dx_allowed, 0), "dqkv");
            expect_close(dw.get(), g.dw, g.dw_allowed, "dweight");
        }
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
