// A mixture of experts of random numbers, with all of its ops forward and backward, for test_experts.cpp and its fp64 version.
// Outputs are between guards and start as NaN.
#pragma once
#include <gtest/gtest.h>

#include "../llmc/cpu/experts.h"
#include "testing.h"

namespace test {

struct ExpertCase {
    MixtureShape shape;
    int C, F;
    RouterRule rule;
    Activation activation = Activation::swiglu;
    bool one_expert = false;  // all rows choose the first K experts
    bool biases = false;      // of the experts and the router
};

// The ops of a layer, in order.
struct ExpertLayer {
    const ExpertCase k;
    const int N = k.shape.N(), E = k.shape.E, K = k.shape.K, slots = k.shape.slots(), C = k.C, F = k.F,
              H = gated(k.activation) ? 2 * F : F;
    std::vector<floatX> x, dout, router_weight, fc1, fc2;
    std::vector<floatX> router_bias, fc1_bias, fc2_bias;
    std::vector<real> bias, drouter0, dfc1_0, dfc2_0, drouter_bias0, dfc1_bias0, dfc2_bias0;  // the gradients' initial values
    RouterRule rule = k.rule;
    RouterLossFactors factors = {0.3, 0.07};
    Guarded<real> logits{size(N, E), "logits"}, weights{size(N, K), "weights"}, drouting{size(N, K), "drouting"},
        dlogits{size(N, E), "dlogits"}, drouter, dfc1, dfc2, drouter_bias, dfc1_bias, dfc2_bias;
    Guarded<int> experts{size(N, K), "experts"}, slot_of{size(N, K), "slots"}, choices{size(N, K), "choices"},
        offsets{(size_t)E + 1, "offsets"}, counts{size(k.shape.B, E), "counts"};
    Guarded<floatX> h{size(slots, H), "h"}, act{size(slots, F), "act"}, y{size(slots, C), "y"}, out{size(N, C), "out"},
        dact{size(slots, F), "dact"}, dh{size(slots, H), "dh"}, dx_slots{size(slots, C), "dx of slots"}, dx{size(N, C), "dx"};
    std::vector<floatX> dx_experts;  // dx before the router's gradient
    std::vector<double> sums = std::vector<double>(RouterSums::size(E));
    const Routing r = {logits.data(),  experts.data(), weights.data(), slot_of.data(),
                       choices.data(), offsets.data(), counts.data()};

    static size_t size(int a, int b) { return (size_t)a * b; }

    ExpertLayer(const ExpertCase& c, uint64_t seed) : ExpertLayer(c, Rng(seed)) {}
    ExpertLayer(const ExpertCase& c, Rng rng)
        : k(c),
          x(rng.normals<floatX>(size(N, C))),
          dout(rng.normals<floatX>(size(N, C))),
          router_weight(rng.normals<floatX>(size(E, C), 1 / std::sqrt((double)C))),
          fc1(rng.normals<floatX>(size(E * H, C), 1 / std::sqrt((double)C))),
          fc2(rng.normals<floatX>(size(E * C, F), 1 / std::sqrt((double)F))),
          router_bias(rng.normals<floatX>((size_t)E, 0.5)),
          fc1_bias(rng.normals<floatX>(size(E, H))),
          fc2_bias(rng.normals<floatX>(size(E, C))),
          bias(rng.normals<real>((size_t)E, 0.3)),
          drouter0(rng.normals<real>(size(E, C))),
          dfc1_0(rng.normals<real>(size(E * H, C))),
          dfc2_0(rng.normals<real>(size(E * C, F))),
          drouter_bias0(rng.normals<real>((size_t)E)),
          dfc1_bias0(rng.normals<real>(size(E, H))),
          dfc2_bias0(rng.normals<real>(size(E, C))),
          drouter(drouter0, "dweight of the router"),
          dfc1(dfc1_0, "dweight of fc1"),
          dfc2(dfc2_0, "dweight of fc2"),
          drouter_bias(drouter_bias0, "dbias of the router"),
          dfc1_bias(dfc1_bias0, "dbias of fc1"),
          dfc2_bias(dfc2_bias0, "dbias of fc2") {
        if (k.one_expert)
            for (int e = 0; e < E; e++) bias[(size_t)e] = (real)(-10 * e);
        if (k.rule.bias || k.one_expert) rule.bias = bias.data();
    }

    void route(cpu::Ctx& ctx) {
        const floatX* const b = k.biases ? router_bias.data() : nullptr;
        cpu::router_logits(ctx, logits.data(), x.data(), router_weight.data(), b, k.shape, C);
        cpu::route(ctx, r, k.shape, rule);
    }
    void losses(cpu::Ctx& ctx) {
        std::vector<real> unused(size(N, E));
        std::fill(sums.begin(), sums.end(), 0.0);
        cpu::router_backward(ctx, unused.data(), sums.data(), drouting.data(), r, k.shape, rule, factors);
    }
    bool dropped(int choice) const { return slot_of[(size_t)choice] < 0; }
    // The rows of a tensor of slots that have a choice.
    template <class T>
    std::vector<T> filled(const Guarded<T>& x, int columns) const {
        return {x.data(), x.data() + (size_t)offsets[(size_t)E] * columns};
    }
    // The rows of x or dout that belong to the slots.
    ExpertRows gathered(const std::vector<floatX>& rows) const { return {rows.data(), choices.data(), K}; }
    ExpertGroups groups() const { return {offsets.data(), E, slots}; }
    ExpertBias bias_of_fc1() const { return {k.biases ? fc1_bias.data() : nullptr}; }
    ExpertBias bias_of_fc2() const { return {k.biases ? fc2_bias.data() : nullptr, weights.data(), choices.data()}; }

    void forward(cpu::Ctx& ctx) {
        route(ctx);
        cpu::expert_linear_forward(ctx, h.data(), gathered(x), fc1.data(), bias_of_fc1(), groups(), C, H, Acc::Set);
        cpu::expert_activation_forward(ctx, act.data(), h.data(), r, k.shape, F, k.activation);
        cpu::expert_linear_forward(ctx, y.data(), {act.data()}, fc2.data(), bias_of_fc2(), groups(), F, C, Acc::Set);
        cpu::expert_combine(ctx, out.data(), y.data(), r, k.shape, C);
        losses(ctx);
    }
    // Weights' gradients are added.
    void backward(cpu::Ctx& ctx) {
        cpu::expert_linear_backward_input(ctx, dact.data(), gathered(dout), fc2.data(), groups(), F, C, Acc::Set);
        cpu::expert_linear_backward_weight(ctx, {dfc2.data(), 0, E * C}, gathered(dout), {act.data()}, groups(), F, C,
                                           Acc::Add);
        cpu::expert_activation_backward(ctx, dh.data(), drouting.data(), dact.data(), h.data(), r, k.shape, F, k.activation);
        if (k.biases) {
            cpu::expert_bias_backward(ctx, dfc2_bias.data(), gathered(dout), bias_of_fc2(), groups(), C);
            cpu::expert_bias_backward_routing(ctx, drouting.data(), gathered(dout), bias_of_fc2(), groups(), C);
            cpu::expert_bias_backward(ctx, dfc1_bias.data(), {dh.data()}, {}, groups(), H);
        }
        cpu::expert_linear_backward_input(ctx, dx_slots.data(), {dh.data()}, fc1.data(), groups(), C, H, Acc::Set);
        cpu::expert_linear_backward_weight(ctx, {dfc1.data(), 0, E * H}, {dh.data()}, gathered(x), groups(), C, H, Acc::Add);
        cpu::expert_combine(ctx, dx.data(), dx_slots.data(), r, k.shape, C);
        dx_experts = dx.values();
        cpu::router_backward(ctx, dlogits.data(), nullptr, drouting.data(), r, k.shape, rule, factors);
        cpu::router_backward_input(ctx, dx.data(), dlogits.data(), router_weight.data(), k.shape, C);
        cpu::router_backward_weight(ctx, drouter.data(), dlogits.data(), x.data(), k.shape, C, Acc::Add);
        if (k.biases) cpu::router_backward_bias(ctx, drouter_bias.data(), dlogits.data(), k.shape);
    }
};

// Every rule, E not a multiple of a vector, K = E, E = 1, fewer rows than experts, all rows on one expert, several sequences,
// groups, and capacities, also so small that some rows lose all experts.
inline std::vector<ExpertCase> expert_cases() {
    static const real bias = 0;  // ExpertLayer has its own
    RouterRule softmax, raw_softmax, sigmoid, raw_sigmoid;
    raw_softmax.normalize = false;
    raw_softmax.bias = &bias;
    sigmoid.sigmoid = raw_sigmoid.sigmoid = true;
    sigmoid.bias = &bias;
    sigmoid.scale = 2.5;
    raw_sigmoid.normalize = false;
    const auto grouped = [](RouterRule rule, int groups, int best) {
        rule.groups = groups;
        rule.group_topk = best;
        return rule;
    };
    const auto limited = [](RouterRule rule, int capacity, bool by_position) {
        rule.capacity = capacity;
        rule.by_position = by_position;
        return rule;
    };
    return {{{2, 7, 5, 3}, 6, 9, softmax},
            {{1, 4, 5, 5}, 7, 4, raw_softmax, Activation::gelu},
            {{3, 2, 1, 1}, 5, 3, raw_sigmoid},
            {{1, 3, 17, 2}, 9, 5, sigmoid, Activation::geglu},
            {{2, 9, 5, 1}, 8, 6, softmax, Activation::relu2, true},
            {{2, 6, 5, 3}, 7, 5, softmax, Activation::clamped_swiglu, false, true},
            {{1, 8, 4, 2}, 3, 6, raw_sigmoid, Activation::gelu, true, true},
            {{2, 5, 6, 4}, 4, 7, sigmoid},
            {{1, 11, 6, 2}, 3, 8, raw_softmax},
            {{1, 6, 4, 2}, 5, 2, raw_sigmoid, Activation::swiglu, true},
            {{2, 7, 12, 4}, 5, 3, grouped(sigmoid, 4, 2)},
            {{1, 9, 8, 2}, 4, 3, grouped(raw_softmax, 2, 1)},
            {{1, 9, 10, 3}, 4, 3, grouped(softmax, 5, 3)},
            {{2, 7, 5, 3}, 6, 9, limited(softmax, 6, false)},
            {{2, 9, 6, 2}, 6, 5, limited(grouped(sigmoid, 3, 1), 4, true)},
            {{1, 11, 4, 2}, 5, 4, limited(raw_softmax, 3, false), Activation::swiglu, true}};
}

// The routing follows from the logits as its definition says.
inline void expect_routing(const ExpertLayer& l) {
    const int N = l.N, E = l.E, K = l.K, T = l.k.shape.T;
    std::vector<int> counts((size_t)l.k.shape.B * E), expected_choices, expected_offsets = {0};
    for (int n = 0; n < N; n++) {
        const real* const x = &l.logits[(size_t)n * E];
        std::vector<double> scores((size_t)E), keys;
        const double top = (double)*std::max_element(x, x + E);
        double sum = 0, chosen_sum = 0, error = 0;
        for (int e = 0; e < E; e++) sum += std::exp(x[e] - top);
        for (int e = 0; e < E; e++) {
            scores[(size_t)e] = l.rule.sigmoid ? 1 / (1 + std::exp(-(double)x[e])) : std::exp(x[e] - top) / sum;
            keys.push_back(l.rule.bias ? scores[(size_t)e] + l.rule.bias[e] : (double)x[e]);
            // of an exponential 3 u, of its argument u, of a sum E u
            error = std::max(error, (E + 8 + std::abs(x[e]) + top - x[e]) * roundoff<real>);
        }
        std::vector<int> order((size_t)E);
        for (int e = 0; e < E; e++) order[(size_t)e] = e;
        if (l.rule.groups > 1) {
            const int each = E / l.rule.groups;
            std::vector<std::pair<double, int>> groups;
            for (int g = 0; g < l.rule.groups; g++) {
                std::vector<double> values;
                for (int e = g * each; e < (g + 1) * each; e++)
                    values.push_back(l.rule.bias                           ? keys[(size_t)e]
                                     : l.rule.sigmoid || !l.rule.normalize ? scores[(size_t)e]
                                                                           : (double)x[e]);
                std::sort(values.rbegin(), values.rend());
                double value = 0;
                for (int i = 0; i < K / l.rule.group_topk; i++) value += values[(size_t)i];
                groups.push_back({-value, g});
            }
            std::sort(groups.begin(), groups.end());
            for (int i = l.rule.group_topk; i < l.rule.groups; i++)
                std::fill_n(keys.begin() + groups[(size_t)i].second * each, each, -INFINITY);
        }
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[(size_t)a] > keys[(size_t)b]; });
        for (int k = 0; k < K; k++) {
            const int e = l.experts[(size_t)(n * K + k)];
            EXPECT_EQ(e, order[(size_t)k]) << "choice " << k << " of row " << n;
            chosen_sum += scores[(size_t)e];
            counts[(size_t)(n / T * E + e)]++;
        }
        for (int k = 0; k < K; k++) {
            const double w = l.rule.scale * scores[(size_t)order[(size_t)k]] / (l.rule.normalize ? chosen_sum : 1);
            EXPECT_TRUE(std::abs(l.weights[(size_t)(n * K + k)] - w) <= 2 * error * w)
                << "weight " << k << " of row " << n << ": " << l.weights[(size_t)(n * K + k)] << ", expected " << w;
        }
    }
    std::vector<int> expected_slots((size_t)N * K, -1);
    for (int e = 0; e < E; e++) {
        std::vector<int> kept;
        for (int i = 0; i < N * K; i++)
            if (l.experts[(size_t)i] == e) kept.push_back(i);
        const auto heavier = [&](int a, int b) { return l.weights[(size_t)a] > l.weights[(size_t)b]; };
        if (l.rule.capacity && (int)kept.size() > l.rule.capacity) {
            if (!l.rule.by_position) std::stable_sort(kept.begin(), kept.end(), heavier);
            kept.resize((size_t)l.rule.capacity);
            std::sort(kept.begin(), kept.end());
        }
        for (const int i : kept) {
            expected_slots[(size_t)i] = (int)expected_choices.size();
            expected_choices.push_back(i);
        }
        expected_offsets.push_back((int)expected_choices.size());
    }
    EXPECT_EQ(l.filled(l.choices, 1), expected_choices);
    EXPECT_EQ(l.offsets.values(), expected_offsets);
    EXPECT_EQ(l.counts.values(), counts);
    EXPECT_EQ(l.slot_of.values(), expected_slots);
}

}  // namespace test
