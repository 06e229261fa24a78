// Ops in double: every gradient compared with finite differences of the forward pass. Sizes are odd and all different,
// parameter gradients start from nonzero values (they are added to), and memory that must not be read is NaN.
#include <gtest/gtest.h>

#include "../llmc/cpu/embed.h"
#include "../llmc/cpu/loss.h"
#include "../llmc/cpu/mlp.h"
#include "../llmc/cpu/norm.h"
#include "../llmc/cpu/optimizer.h"
#include "../llmc/cpu/reduce.h"
#include "testing.h"

namespace test_ops_fp64 {

using namespace test;

Doubles difference(const Guarded<double>& a, const Doubles& b) {
    Doubles d(b.size());
    for (size_t i = 0; i < d.size(); i++) d[i] = a[i] - b[i];
    return d;
}

// Sizes of a norm, and whether its output gradient is added and a residual is added before the norm.
struct NormCase {
    int N, C;
    Acc acc;
    bool add;
    double offset = 0;  // of the weight
};
// 131 rows: more than one block of rows for summing weight gradients. C below, at and above the vector lengths.
const NormCase norm_cases[] = {{1, 1, Acc::Set, false},    {3, 7, Acc::Add, true},    {5, 37, Acc::Set, true},
                               {131, 16, Acc::Add, false}, {131, 33, Acc::Set, true}, {7, 21, Acc::Set, false, 1}};

TEST(Fp64, Embedding) {
    cpu::Ctx ctx(2);
    const int N = 23, C = 5, P = 7, vocabulary = 13;
    Rng rng(1);
    for (const bool learned_positions : {false, true})
        for (const int v0 : {0, 4}) {  // the whole vocabulary, and a shard in the middle of it
            const int V = v0 == 0 ? vocabulary : 6;
            const std::vector<int> tokens = rng.integers(N, 0, vocabulary), positions = rng.integers(N, 0, P);
            Doubles wte = rng.normals<double>(V * C), wpe = rng.normals<double>(P * C);
            const Doubles dout = rng.normals<double>(N * C), dwte0 = rng.normals<double>(V * C),
                          dwpe0 = rng.normals<double>(P * C);
            Guarded<double> out(N * C, "out"), dwte(dwte0, "dwte"), dwpe(dwpe0, "dwpe");
            const auto loss = [&] {
                cpu::embedding_forward(ctx, out.data(), tokens.data(), learned_positions ? positions.data() : nullptr,
                                       wte.data(), learned_positions ? wpe.data() : nullptr, N, C, {v0, V, V});
                return dot(out.values(), dout);
            };
            cpu::embedding_backward(ctx, dwte.data(), learned_positions ? dwpe.data() : nullptr, dout.data(), tokens.data(),
                                    learned_positions ? positions.data() : nullptr, N, C, {v0, V, V});
            check_gradient(loss, wte.data(), wte.size(), difference(dwte, dwte0).data(), "dwte");
            if (learned_positions) check_gradient(loss, wpe.data(), wpe.size(), difference(dwpe, dwpe0).data(), "dwpe");
            else expect_same_bits(dwpe, dwpe0, "dwpe without learned positions");
        }
}

// LayerNorm (centred) and RMSNorm.
template <bool centred>
void check_norm(uint64_t seed) {
    cpu::Ctx ctx(2);
    Rng rng(seed);
    for (const NormCase& k : norm_cases) {
        const size_t size = (size_t)k.N * k.C;
        const double eps = 1e-2;  // large enough that C = 1 and the eps term are well conditioned
        Doubles inp = rng.normals<double>(size, 1, 0.5), add = rng.normals<double>(size), weight = rng.normals<double>(k.C),
                bias = rng.normals<double>(k.C);
        const Doubles dout = rng.normals<double>(size), dinp0 = rng.normals<double>(size), dweight0 = rng.normals<double>(k.C),
                      dbias0 = rng.normals<double>(k.C);
        Guarded<double> out(size, "out"), mean(k.N, "mean"), rstd(k.N, "rstd"), sum(size, "sum");
        const NormParams params = {weight.data(), centred ? bias.data() : nullptr, k.C, eps, k.offset};
        const NormStatistics statistics = {centred ? mean.data() : nullptr, rstd.data()};
        const auto loss = [&] {
            (centred ? cpu::layernorm_forward : cpu::rmsnorm_forward)(ctx, out.data(), statistics, k.add ? sum.data() : nullptr,
                                                                      inp.data(), k.add ? add.data() : nullptr, params, k.N);
            return dot(out.values(), dout);
        };
        loss();
        Guarded<double> dinp(size, "dinp"), dweight(dweight0, "dweight"), dbias(dbias0, "dbias");
        if (k.acc == Acc::Add) std::copy(dinp0.begin(), dinp0.end(), dinp.data());
        (centred ? cpu::layernorm_backward : cpu::rmsnorm_backward)(
            ctx, dinp.data(), {dweight.data(), centred ? dbias.data() : nullptr}, dout.data(), k.add ? sum.data() : inp.data(),
            params, statistics, k.N, k.acc);
        const Doubles gradient = k.acc == Acc::Add ? difference(dinp, dinp0) : dinp.values();
        check_gradient(loss, inp.data(), size, gradient.data(), "dinp");
        if (k.add) check_gradient(loss, add.data(), size, gradient.data(), "dadd");
        check_gradient(loss, weight.data(), k.C, difference(dweight, dweight0).data(), "dweight");
        if (centred) check_gradient(loss, bias.data(), k.C, difference(dbias, dbias0).data(), "dbias");
    }
}
TEST(Fp64, LayerNorm) { check_norm<true>(2); }
TEST(Fp64, RmsNorm) { check_norm<false>(3); }

// The first `segments` heads of longer rows; the other elements are unchanged.
TEST(Fp64, HeadNorm) {
    cpu::Ctx ctx(2);
    Rng rng(9);
    struct Case {
        int N, C, segments, others;
        double offset;
    };
    for (const Case& k : {Case{1, 1, 1, 0, 0}, Case{3, 7, 2, 5, 0}, Case{67, 4, 3, 8, 1}, Case{5, 36, 1, 11, 0}}) {
        const size_t stride = (size_t)(k.segments * k.C + k.others), size = k.N * stride, rows = (size_t)k.N * k.segments;
        const double eps = 1e-2;
        Doubles inp = rng.normals<double>(size, 1, 0.5), weight = rng.normals<double>(k.C);
        const Doubles dout = rng.normals<double>(size), dweight0 = rng.normals<double>(k.C);
        Guarded<double> kept(rows * k.C, "kept"), rstd(rows, "rstd"), dqkv(dout, "dqkv"), dweight(dweight0, "dweight");
        const NormParams params = {weight.data(), nullptr, k.C, eps, k.offset};
        const HeadRows heads = {k.N, stride, k.segments};
        Doubles out;
        const auto loss = [&] {
            Guarded<double> qkv(inp, "qkv");
            cpu::head_norm_forward(ctx, qkv.data(), kept.data(), rstd.data(), params, heads);
            out = qkv.values();
            return dot(out, dout);
        };
        loss();
        for (size_t i = 0; i < size; i++) {  // from the definition
            const size_t in_row = i % stride, head = in_row / (size_t)k.C;
            if (head >= (size_t)k.segments) {
                EXPECT_EQ(out[i], inp[i]) << "beyond the heads";
                continue;
            }
            double squares = 0;
            for (int c = 0; c < k.C; c++) squares += std::pow(inp[i - in_row % k.C + c], 2);
            EXPECT_NEAR(out[i], inp[i] / std::sqrt(squares / k.C + eps) * (k.offset + weight[in_row % k.C]), 1e-13);
        }
        cpu::head_norm_backward(ctx, dqkv.data(), {dweight.data(), nullptr}, kept.data(), params, rstd.data(), heads);
        check_gradient(loss, inp.data(), size, dqkv.data(), "dqkv");
        check_gradient(loss, weight.data(), k.C, difference(dweight, dweight0).data(), "dweight");
    }
}

TEST(Fp64, Activations) {
    cpu::Ctx ctx(2);
    const int N = 7, F = 31;
    struct Case {
        Activation activation;
        double (*formula)(double x, double up);  // as published
    };
    const auto tanh_gelu = [](double x, double) {
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    };
    for (const Case& k :
         {Case{Activation::gelu, tanh_gelu},
          Case{Activation::gelu_exact, [](double x, double) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }},
          Case{Activation::relu, [](double x, double) { return std::max(x, 0.0); }},
          Case{Activation::relu2, [](double x, double) { return std::pow(std::max(x, 0.0), 2); }},
          Case{Activation::swiglu, [](double x, double up) { return x / (1 + std::exp(-x)) * up; }},
          Case{Activation::clamped_swiglu,
               [](double x, double up) {
                   const double gate = std::min(x, 7.0);
                   return gate / (1 + std::exp(-1.702 * gate)) * (std::clamp(up, -7.0, 7.0) + 1);
               }},
          Case{Activation::geglu, [](double x, double up) {
                   return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) * up;
               }}}) {
        SCOPED_TRACE((int)k.activation);
        Rng rng(4);
        const int columns = gated(k.activation) ? 2 * F : F;
        Doubles inp = rng.normals<double>(N * columns, k.activation == Activation::clamped_swiglu ? 5 : 2);
        const Doubles dout = rng.normals<double>(N * F);
        Guarded<double> out(N * F, "out"), dinp(N * columns, "dinp");
        const auto loss = [&] {
            cpu::activation_forward(ctx, out.data(), inp.data(), N, F, k.activation);
            return dot(out.values(), dout);
        };
        cpu::activation_backward(ctx, dinp.data(), dout.data(), inp.data(), N, F, k.activation);
        check_gradient(loss, inp.data(), inp.size(), dinp.data(), "dinp");
        loss();
        for (int i = 0; i < N * F; i++) {
            const double x = inp[i / F * columns + i % F], expected = k.formula(x, inp[i / F * columns + columns - F + i % F]);
            EXPECT_NEAR(out[i], expected, 1e-13) << "of " << x;
        }
    }
}

TEST(Fp64, Residual) {
    cpu::Ctx ctx(2);
    Rng rng(6);
    const Doubles a = rng.normals<double>(101), b = rng.normals<double>(101);
    Guarded<double> out(101, "out");
    cpu::residual_forward(ctx, out.data(), a.data(), b.data(), 101);
    for (int i = 0; i < 101; i++) EXPECT_EQ(out[i], a[i] + b[i]);
}

// The mask depends only on the element's position: computed in parts or by columns it is the same; two sites, two seeds or
// two positions give different masks. A tenth is dropped, and the mean is unchanged.
TEST(Fp64, Dropout) {
    cpu::Ctx ctx(2);
    const size_t rows = 90, columns = 352, n = rows * columns;
    const Doubles ones(n, 1);
    const auto masked = [&](Dropout d) {
        Guarded<double> out(n, "out");
        cpu::dropout_forward(ctx, out.data(), ones.data(), n, d);
        return out.values();
    };
    Dropout dropout;
    dropout.rate = 0.1;
    dropout.draws.key = 1234;
    dropout.draws.tensor = 5;
    dropout.draws.first = (1ull << 34) - 101;  // not at a multiple of 4; a word of the counter ends inside
    const Doubles mask = masked(dropout);
    size_t dropped = 0;
    for (size_t i = 0; i < n; i++) {
        const uint64_t number = dropout.draws.first + i;
        const uint32_t bits = random_bits(1234, RngPurpose::dropout, 5, number / 4)[number % 4];
        ASSERT_EQ(mask[i], bits < 429496729.6 ? 0 : 1 / 0.9) << i;
        dropped += mask[i] == 0;
    }
    EXPECT_NEAR((double)dropped / n, 0.1, 5 * std::sqrt(0.09 / n));
    const auto common = [&](const Doubles& other) {  // dropped in both
        size_t both = 0;
        for (size_t i = 0; i < n; i++) both += mask[i] == 0 && other[i] == 0;
        return (double)both / n;
    };
    for (const int change : {0, 1, 2}) {
        Dropout other = dropout;
        if (change == 0) other.draws.key++;
        if (change == 1) other.draws.tensor++;
        if (change == 2) other.draws.first += n;
        EXPECT_NEAR(common(masked(other)), 0.01, 5 * std::sqrt(0.0099 / n)) << change;
    }
    for (const size_t begin : {(size_t)0, (size_t)1, (size_t)1003}) {
        Dropout part = dropout;
        part.draws.first += begin;
        Guarded<double> out(Doubles(ones.begin() + (long)begin, ones.end()), "out");
        cpu::dropout_forward(ctx, out.data(), out.data(), n - begin, part);
        expect_same_bits(out, Doubles(mask.begin() + (long)begin, mask.end()), "a part");
    }
    for (const size_t cols : {columns / 2, columns / 11}) {
        Dropout slice = dropout;
        slice.draws.first += cols;  // the second slice
        slice.draws.cols = cols;
        slice.draws.whole_cols = columns;
        Guarded<double> out(rows * cols, "out");
        cpu::dropout_forward(ctx, out.data(), ones.data(), rows * cols, slice);
        for (size_t i = 0; i < rows * cols; i++) ASSERT_EQ(out[i], mask[i / cols * columns + cols + i % cols]);
    }
    EXPECT_EQ(masked(Dropout()), ones);
}

TEST(Fp64, Classifier) {
    cpu::Ctx ctx(2);
    Rng rng(7);
    struct Case {
        int N, V, Vp;
        double softcap;
    };
    // 1201: more than one chunk of the online sum; logits increase along the row, so later chunks raise the maximum.
    for (const Case& k : {Case{1, 1, 1, 0}, Case{5, 37, 48, 0}, Case{3, 64, 64, 0}, Case{3, 1201, 1216, 0}, Case{5, 37, 48, 3},
                          Case{3, 1201, 1216, 2}}) {
        const double loss_scale = 0.37, z_coef = 0.03;
        const auto cap = [&](double logit) { return k.softcap > 0 ? k.softcap * std::tanh(logit / k.softcap) : logit; };
        Doubles x = rng.normals<double>(k.N * k.V, 2);
        for (int i = 0; i < k.N * k.V; i++) x[i] += 3.0 * (i % k.V) / k.V;
        std::vector<int> targets = rng.integers(k.N, 0, k.V);
        if (k.N > 1) targets[1] = -1;
        Guarded<double> logits(k.N * k.Vp, "logits"), loss(k.N, "loss"), zloss(k.N, "zloss"), lse(k.N, "lse");
        const auto run = [&](bool write_gradient) {  // the padding stays NaN
            for (int n = 0; n < k.N; n++) std::copy_n(&x[n * k.V], k.V, &logits[n * k.Vp]);
            cpu::classifier(ctx, logits.data(), {loss.data(), zloss.data(), lse.data()}, targets.data(), k.N, {0, k.V, k.Vp},
                            {loss_scale, z_coef, write_gradient, k.softcap});
            double total = 0;
            for (int n = 0; n < k.N; n++) total += loss_scale * (loss[n] + zloss[n]);
            return total;
        };
        const double without_gradient = run(false);
        for (int n = 0; n < k.N; n++)
            EXPECT_EQ(memcmp(&logits[n * k.Vp], &x[n * k.V], k.V * sizeof(double)), 0) << "logits were changed";
        const double with_gradient = run(true);
        EXPECT_EQ(with_gradient, without_gradient);
        Doubles gradient(k.N * k.V);
        for (int n = 0; n < k.N; n++) {
            std::copy_n(&logits[n * k.Vp], k.V, &gradient[n * k.V]);
            for (int i = k.V; i < k.Vp; i++) EXPECT_EQ(logits[n * k.Vp + i], 0) << "padding column " << i;
            double top = -1e300, z = 0;
            for (int i = 0; i < k.V; i++) top = std::max(top, cap(x[n * k.V + i]));
            for (int i = 0; i < k.V; i++) z += std::exp(cap(x[n * k.V + i]) - top);
            EXPECT_NEAR(lse[n], top + std::log(z), 1e-13);
            if (targets[n] < 0) continue;
            EXPECT_NEAR(loss[n], top + std::log(z) - cap(x[n * k.V + targets[n]]), 1e-13);
            EXPECT_NEAR(zloss[n], z_coef * std::pow(top + std::log(z), 2), 1e-13);
        }
        Guarded<double> gradient_kept(gradient);
        for (int n = 0; n < k.N; n++) std::fill(&logits[n * k.Vp] + k.V, &logits[n * k.Vp] + k.Vp, std::nan(""));
        check_gradient([&] { return run(false); }, x.data(), x.size(), gradient_kept.data(), "dlogits");
        if (k.N > 1) {
            EXPECT_EQ(loss[1], 0);
            EXPECT_EQ(zloss[1], 0);
            for (int i = 0; i < k.V; i++) EXPECT_EQ(gradient[k.V + i], 0);
        }
    }
}

TEST(Fp64, ClassifierGoldenValuesWithZLoss) {
    cpu::Ctx ctx(1);
    Doubles logits = {2, .5, -1, 3};
    double loss, zloss, lse;
    const int target = 3;
    cpu::classifier(ctx, logits.data(), {&loss, &zloss, &lse}, &target, 1, {0, 4, 4}, {1, 1e-4, true});
    EXPECT_NEAR(lse, 3.3840917013, 1e-10);
    EXPECT_NEAR(loss, 0.3840917013, 1e-10);
    EXPECT_NEAR(zloss, 0.0011452077, 1e-10);
    expect_close(logits, {0.2507208496, 0.0559433833, 0.0124826561, -0.3184700706}, 1e-10, 0, "dlogits");
}

TEST(Fp64, SumOfSquares) {
    cpu::Ctx ctx(2);
    Rng rng(8);
    for (const size_t n : {0, 1, 15, 17, 4096, 12345}) {
        const Doubles x = rng.normals<double>(n);
        EXPECT_NEAR(cpu::sum_of_squares(ctx, x.data(), n), dot(x, x), 1e-12 * (double)(n + 1));
    }
}

}  // namespace test_ops_fp64
