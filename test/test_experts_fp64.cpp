// A mixture of experts in double: the routing and both losses by their definitions, and the gradients of the router and of a
// whole layer against finite differences.
#include <fstream>

#include <nlohmann/json.hpp>

#include "expert_layer.h"

namespace test_experts_fp64 {

using namespace test;

TEST(ExpertsFp64, RoutingFollowsItsDefinition) {
    cpu::Ctx ctx(2);
    uint64_t seed = 1;
    for (const ExpertCase& k : expert_cases()) {
        ExpertLayer layer(k, seed++);
        layer.route(ctx);
        expect_routing(layer);
        if (!k.one_expert) continue;
        for (int n = 0; n < layer.N; n++) EXPECT_EQ(layer.experts[(size_t)(n * layer.K)], 0);
    }
}

TEST(ExpertsFp64, EqualScoresGoToTheLowerIndex) {
    cpu::Ctx ctx(1);
    const real bias[] = {0, 0, 0, 0.5, 0};
    for (const bool sigmoid : {false, true})
        for (const bool biased : {false, true}) {
            ExpertLayer layer({{1, 3, 5, 3}, 1, 1, {}}, 1);
            const RouterRule rule = {sigmoid, true, 1, biased ? bias : nullptr};
            const Doubles logits = {0, 0, 0, 0, 0, 1, 2, 2, 1, 2, 2, 0, 1, 1, 1};
            std::copy(logits.begin(), logits.end(), layer.logits.data());
            cpu::route(ctx, layer.r, layer.k.shape, rule);
            const std::vector<int> chosen = {0, 1, 2, 1, 2, 4, 0, 2, 3}, with_bias = {3, 0, 1, 3, 1, 2, 3, 0, 2};
            EXPECT_EQ(layer.experts.values(), biased ? with_bias : chosen);
        }
}

// The losses by their definitions, and the gradient of the logits.
TEST(ExpertsFp64, RouterBackward) {
    cpu::Ctx ctx(2);
    uint64_t seed = 20;
    for (const ExpertCase& k : expert_cases()) {
        ExpertLayer l(k, seed);
        const int E = l.E, T = k.shape.T;
        Rng rng(seed++);
        Doubles logits = rng.normals<double>(l.logits.size()), g = rng.normals<double>(l.weights.size());
        const auto loss = [&] {
            std::copy(logits.begin(), logits.end(), l.logits.data());
            cpu::route(ctx, l.r, k.shape, l.rule);
            l.losses(ctx);
            double weighted = 0;
            for (int i = 0; i < l.N * l.K; i++) weighted += l.dropped(i) ? 0 : l.weights[(size_t)i] * g[(size_t)i];
            return weighted + l.factors.balance * l.sums[RouterSums::balance] + l.factors.z * l.sums[RouterSums::z];
        };
        loss();
        double balance = 0, z = 0, entropy = 0;
        const int kept = l.offsets[(size_t)E];
        for (int n = 0; n < l.N; n++) {
            const double* const x = &logits[(size_t)(n * E)];
            double exponentials = 0, sum = 0, of_row = 0;
            const auto score = [&](int e) { return l.rule.sigmoid ? 1 / (1 + std::exp(-x[e])) : std::exp(x[e]); };
            for (int e = 0; e < E; e++) {
                exponentials += std::exp(x[e]);
                sum += score(e);
                of_row += l.counts[(size_t)(n / T * E + e)] * score(e);
            }
            for (int e = 0; e < E; e++) entropy -= score(e) / sum * std::log(score(e) / sum);
            balance += E / ((double)l.K * T * T) * of_row / sum;
            z += std::pow(std::log(exponentials), 2);
        }
        EXPECT_NEAR(l.sums[RouterSums::balance], balance, 1e-13 * balance);
        EXPECT_NEAR(l.sums[RouterSums::z], z, 1e-12 * z);
        EXPECT_NEAR(l.sums[RouterSums::entropy], entropy, 1e-13 * (entropy + l.N));
        EXPECT_EQ(l.sums[RouterSums::dropped], l.N * l.K - kept);
        for (int e = 0; e < E; e++)
            EXPECT_EQ(l.sums[(size_t)(RouterSums::rows + e)], std::count(l.experts.data(), l.experts.data() + l.N * l.K, e));
        cpu::router_backward(ctx, l.dlogits.data(), nullptr, g.data(), l.r, k.shape, l.rule, l.factors);
        check_gradient(loss, logits.data(), logits.size(), l.dlogits.data(), "dlogits");
    }
}

TEST(ExpertsFp64, Layer) {
    cpu::Ctx ctx(2);
    uint64_t seed = 40;
    for (const ExpertCase& k : expert_cases()) {
        SCOPED_TRACE(testing::Message() << "E " << k.shape.E << ", K " << k.shape.K << ", N " << k.shape.N());
        ExpertLayer l(k, seed++);
        const auto loss = [&] {
            l.forward(ctx);
            return dot(l.out.values(), l.dout) + l.factors.balance * l.sums[RouterSums::balance] +
                   l.factors.z * l.sums[RouterSums::z];
        };
        loss();
        l.backward(ctx);
        const auto added = [](const Guarded<double>& d, const Doubles& before) {
            Doubles sum = d.values();
            for (size_t i = 0; i < sum.size(); i++) sum[i] -= before[i];
            return sum;
        };
        const Doubles dx = l.dx.values();
        check_gradient(loss, l.x.data(), l.x.size(), dx.data(), "dx");
        check_gradient(loss, l.router_weight.data(), l.router_weight.size(), added(l.drouter, l.drouter0).data(), "drouter");
        check_gradient(loss, l.fc1.data(), l.fc1.size(), added(l.dfc1, l.dfc1_0).data(), "dfc1");
        check_gradient(loss, l.fc2.data(), l.fc2.size(), added(l.dfc2, l.dfc2_0).data(), "dfc2");
        if (!k.biases) continue;
        const auto check_bias = [&](Doubles& b, const Guarded<double>& d, const Doubles& before) {
            check_gradient(loss, b.data(), b.size(), added(d, before).data(), "dbias");
        };
        check_bias(l.router_bias, l.drouter_bias, l.drouter_bias0);
        check_bias(l.fc1_bias, l.dfc1_bias, l.dfc1_bias0);
        check_bias(l.fc2_bias, l.dfc2_bias, l.dfc2_bias0);
    }
}

// The same numbers as in muon_golden.py, which are exact in fp32.
Doubles numbers(uint32_t salt, size_t n) {
    Doubles x;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t h = (i + 1) * 2654435761u + (salt + 1) * 2246822519u;
        h ^= h >> 15;
        h *= 3266489917u;
        h ^= h >> 13;
        x.push_back(2 * ((double)(h >> 8) / 0x1p24 - 0.5));
    }
    return x;
}

// Output and gradients of transformers' classes (dev/ref/mixture_golden.py), whose routers round to fp32: errors of 1e-6.
TEST(ExpertsFp64, EqualsTransformers) {
    std::ifstream file("test/golden/mixture.json");
    const auto golden = nlohmann::json::parse(file);
    cpu::Ctx ctx(2);
    for (const auto& [name, expected] : golden.items()) {
        RouterRule rule;
        const real biased = 0;  // the layer has its own bias
        if (name == "qwen3_moe") rule.normalize = false;
        if (name == "deepseek_v3") rule = {true, true, 2.5, &biased};
        ExpertLayer l({{1, 4, 5, 3}, 4, 3, rule}, 1);
        l.x = numbers(0, l.x.size());
        l.router_weight = numbers(1, l.router_weight.size());
        l.fc1 = numbers(2, l.fc1.size());
        l.fc2 = numbers(3, l.fc2.size());
        l.dout = numbers(4, l.dout.size());
        l.bias = numbers(5, l.bias.size());
        if (rule.bias) l.rule.bias = l.bias.data();
        l.factors = {};
        for (Guarded<double>* d : {&l.drouter, &l.dfc1, &l.dfc2}) std::fill_n(d->data(), d->size(), 0.0);
        l.forward(ctx);
        l.backward(ctx);
        const auto expect = [&, &family = name, &values = expected](const Guarded<double>& actual, const char* tensor) {
            expect_close(actual, values.at(tensor).get<Doubles>(), 1e-6, 1e-6, family + " " + tensor);
        };
        expect(l.out, "out");
        expect(l.dx, "dx");
        expect(l.drouter, "drouter");
        expect(l.dfc1, "dfc1");
        expect(l.dfc2, "dfc2");
    }
}

// Rows of a weight's gradient, whole experts or a part of one, set and added, equal the whole.
TEST(ExpertsFp64, RowsOfTheWeightsGradient) {
    cpu::Ctx ctx(2);
    ExpertLayer l({{1, 6, 4, 2}, 5, 3, {}}, 60);
    l.forward(ctx);
    l.backward(ctx);
    for (const auto& [row, rows] : {std::pair{0, 20}, {5, 10}, {15, 5}, {7, 2}, {12, 3}, {0, 1}})
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            Guarded<double> part(Doubles(&l.dfc2_0[(size_t)row * 3], &l.dfc2_0[(size_t)(row + rows) * 3]), "rows");
            cpu::expert_linear_backward_weight(ctx, {part.data(), row, rows}, l.gathered(l.dout), {l.act.data()}, l.groups(), 3,
                                               5, acc);
            for (size_t i = 0; i < part.size(); i++) {
                const size_t at = (size_t)row * 3 + i;
                EXPECT_NEAR(part[i], l.dfc2[at] - (acc == Acc::Set ? l.dfc2_0[at] : 0), 1e-14);
            }
        }
}

}  // namespace test_experts_fp64
