// Tests of the classifier and of the sums of losses, for op_tests.h.
#pragma once
#include "inputs.h"

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

// Shards of the vocabulary, one of them without columns, give the same result as the whole: the sums are different ones, so to
// within their error, (V / 16 + 20) u of log Z and of the gradients.
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
    // A masked part of the vocabulary: -inf has probability 0 in any place, also if whole chunks are masked.
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
            const Classified masked(x, {3, -1}, V, V + 4, 1, 1e-4);  // a masked row has no effect, regardless of its content
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
        }  // a masked row has no effect
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
        const double allowed = N * 0x1p-50 * (N + 10);  // terms around one, summed in double
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
