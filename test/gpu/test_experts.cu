// Mixtures of experts on a GPU against plain loops in double: routing with equal scores and experts without rows, gradients of
// the router against finite differences, and the products of experts with all, few and no rows, in whole tiles or not.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "../../llmc/cpu/experts.h"
#include "../../llmc/gpu/experts.cuh"
#include "../../llmc/gpu/memory.cuh"
#include "device_memory.h"

namespace backend = gpu;

template <class T>
using Buffer = test::DeviceMemory<T>;

#include "../ops/inputs.h"

namespace test_gpu_experts {
namespace {

struct Case {
    MixtureShape shape;
    bool sigmoid, normalize, biased;
    double scale;
    int logits;  // 0: random, 1: all equal, 2: all rows prefer expert 1
    int groups = 1, group_topk = 1, capacity = 0;
    bool by_position = false;
};
const Case cases[] = {{{1, 1, 5, 3}, false, true, false, 1, 0},
                      {{2, 37, 5, 3}, false, false, false, 1, 0},
                      {{1, 40, 64, 8}, false, true, false, 1, 0},
                      {{3, 11, 33, 1}, true, false, true, 2.5, 0},
                      {{1, 700, 4, 2}, true, true, true, 1.5, 0},
                      {{2, 5, 8, 8}, false, true, false, 1, 0},
                      {{1, 30, 40, 3}, false, true, false, 1, 1},
                      {{2, 150, 6, 1}, true, true, false, 1, 2},
                      {{2, 37, 1, 1}, true, false, false, 1, 0},  // the gate of a shared expert
                      {{1, 90, 64, 8}, true, true, true, 2.5, 0, 8, 4},
                      {{2, 20, 36, 4}, false, true, false, 1, 0, 9, 2},
                      {{2, 20, 12, 3}, false, false, false, 1, 1, 4, 3},
                      {{2, 150, 6, 2}, true, true, false, 1, 2, 1, 1, 110},
                      {{2, 150, 6, 2}, false, true, false, 1, 0, 1, 1, 40, true},
                      {{1, 900, 5, 3}, false, false, false, 1, 0, 1, 1, 530},
                      {{1, 40, 6, 2}, false, true, false, 1, 1, 1, 1, 10}};

// The routing as the declarations describe it.
struct Reference {
    std::vector<int> experts, slots, choices, offsets, counts;
    Doubles weights;
};
double lse_of(const double* logits, int E) {
    double sum = 0;
    for (int e = 0; e < E; e++) sum += std::exp(logits[e]);
    return std::log(sum);
}
Doubles scores_of(const double* logits, int E, bool sigmoid) {
    Doubles s(E);
    const double lse = lse_of(logits, E);
    for (int e = 0; e < E; e++) s[e] = sigmoid ? 1 / (1 + std::exp(-logits[e])) : std::exp(logits[e] - lse);
    return s;
}
Doubles weights_of(const Doubles& scores, const int* experts, int K, const RouterRule& rule) {
    Doubles w(K);
    double sum = 0;
    for (int k = 0; k < K; k++) sum += w[k] = scores[experts[k]];
    for (double& x : w) x *= rule.normalize ? rule.scale / sum : rule.scale;
    return w;
}
Reference route(const Doubles& logits, const Doubles& bias, const MixtureShape& s, const RouterRule& rule) {
    Reference r;
    r.counts.resize(s.B * s.E);
    std::vector<std::vector<int>> of_expert(s.E);
    for (int n = 0; n < s.N(); n++) {
        const Doubles scores = scores_of(&logits[n * s.E], s.E, rule.sigmoid);
        std::vector<int> order(s.E);
        for (int e = 0; e < s.E; e++) order[e] = e;
        Doubles keys(s.E);
        for (int e = 0; e < s.E; e++) keys[e] = scores[e] + bias[e];
        if (rule.groups > 1) {
            const int each = s.E / rule.groups;
            std::vector<std::pair<double, int>> groups;
            for (int g = 0; g < rule.groups; g++) {
                Doubles values(keys.begin() + g * each, keys.begin() + (g + 1) * each);
                if (!rule.groups_by_scores()) values.assign(&logits[n * s.E + g * each], &logits[n * s.E + g * each] + each);
                std::sort(values.rbegin(), values.rend());
                groups.push_back({-std::accumulate(values.begin(), values.begin() + s.K / rule.group_topk, 0.0), g});
            }
            std::sort(groups.begin(), groups.end());
            for (int i = rule.group_topk; i < rule.groups; i++) std::fill_n(&keys[groups[i].second * each], each, -INFINITY);
        }
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] > keys[b]; });
        order.resize(s.K);
        for (const double w : weights_of(scores, order.data(), s.K, rule)) r.weights.push_back(w);
        for (int k = 0; k < s.K; k++) {
            of_expert[order[k]].push_back(n * s.K + k);
            r.experts.push_back(order[k]);
            r.counts[n / s.T * s.E + order[k]]++;
        }
    }
    r.slots.assign(s.slots(), -1);
    for (auto& choices : of_expert) {
        r.offsets.push_back((int)r.choices.size());
        if (rule.capacity && (int)choices.size() > rule.capacity) {
            const auto heavier = [&](int a, int b) { return r.weights[a] > r.weights[b]; };
            if (!rule.by_position) std::stable_sort(choices.begin(), choices.end(), heavier);
            choices.resize(rule.capacity);
            std::sort(choices.begin(), choices.end());
        }
        for (const int choice : choices) {
            r.slots[choice] = (int)r.choices.size();
            r.choices.push_back(choice);
        }
    }
    r.offsets.push_back((int)r.choices.size());
    return r;
}

// A case's logits, routed by the backend.
struct Routed {
    const Case& c;
    gpu::Ctx& ctx;
    MixtureShape s = c.shape;
    Rng rng{3};
    Input<real> logits{random_logits()}, bias{rng.normals<real>(s.E, c.biased ? 0.3 : 0)};
    RouterRule rule = {c.sigmoid, c.normalize,  (real)c.scale, c.biased ? bias.p() : nullptr,
                       c.groups,  c.group_topk, c.capacity,    c.by_position};
    Buffer<int> experts{(size_t)s.slots(), "experts"}, slots{(size_t)s.slots(), "slots"}, choices{(size_t)s.slots(), "choices"},
        offsets{(size_t)s.E + 1, "offsets"}, counts{(size_t)(s.B * s.E), "counts"};
    Buffer<real> weights{(size_t)s.slots(), "weights"};
    Routing r = {(real*)logits.p(), experts.p(), weights.p(), slots.p(), choices.p(), offsets.p(), counts.p()};
    Reference expected = route(doubles(logits), doubles(bias), s, rule);

    Routed(const Case& k, gpu::Ctx& context) : c(k), ctx(context) { gpu::route(ctx, r, s, rule); }

private:
    std::vector<real> random_logits() {
        std::vector<real> x = rng.normals<real>(s.N() * s.E, c.logits == 1 ? 0 : 1);
        for (int n = 0; n < s.N() && c.logits == 2; n++) x[n * s.E + 1] += 12;
        return x;
    }
};

// Runs f(routed) for each case.
template <class F>
void for_each_case(F f) {
    gpu::Ctx ctx;
    for (const Case& c : cases) {
        SCOPED_TRACE(testing::Message() << "B " << c.shape.B << " T " << c.shape.T << " E " << c.shape.E << " K " << c.shape.K);
        Routed routed(c, ctx);
        f(ctx, routed);
    }
}

// A score: the argument of the exponential, at most 20 in size here, is rounded once, the exponential errs by 2.4u, the sum of
// E such numbers likewise, and E/32 + 5 roundings of sums, a quotient and a product. A weight: twice that, K + 2 roundings.
double score_error(const MixtureShape& s) { return (2 * (20 + 2.4) + s.E / 32 + 8) * u; }
double weight_error(const MixtureShape& s) { return 2 * score_error(s) + (s.K + 2) * u; }

TEST(Experts, RoutedAndSorted) {
    for_each_case([](gpu::Ctx&, Routed& x) {
        EXPECT_EQ(x.experts.get(), x.expected.experts);
        EXPECT_EQ(x.slots.get(), x.expected.slots);
        std::vector<int> choices = x.choices.get();
        choices.resize(x.expected.choices.size());
        EXPECT_EQ(choices, x.expected.choices);
        EXPECT_EQ(x.offsets.get(), x.expected.offsets);
        EXPECT_EQ(x.counts.get(), x.expected.counts);
        expect_close(x.weights.get(), x.expected.weights, 0, weight_error(x.s), "weights");
    });
}

// Only some experts' choices get slots: the same ones as of all experts, counted from the first of these.
TEST(Experts, SomeExpertsSorted) {
    for_each_case([](gpu::Ctx& ctx, Routed& x) {
        if (x.rule.capacity) return;  // the expected slots include all choices
        const int first = x.s.E / 3, E = ceil_div(x.s.E - first, 2);
        const MixtureShape some = {x.s.B, x.s.T, E, x.s.K};
        const std::vector<int>& offsets = x.expected.offsets;
        const int before = offsets[first], slots = offsets[first + E] - before;
        Buffer<int> slots_of((size_t)x.s.N() * x.s.K, "slots"), choices((size_t)some.slots(), "choices"),
            ends((size_t)E + 1, "offsets"), counts((size_t)(x.s.B * E), "counts");
        const Routing r = {nullptr, x.experts.p(), x.weights.p(), slots_of.p(), choices.p(), ends.p(), counts.p()};
        gpu::sort_choices(ctx, r, some, first);
        std::vector<int> expected_slots, expected_offsets;
        for (const int slot : x.expected.slots)
            expected_slots.push_back(slot >= before && slot < before + slots ? slot - before : -1);
        for (int e = 0; e <= E; e++) expected_offsets.push_back(offsets[first + e] - before);
        EXPECT_EQ(slots_of.get(), expected_slots);
        EXPECT_EQ(ends.get(), expected_offsets);
        const std::vector<int> sorted = choices.get();
        for (int i = 0; i < slots; i++) EXPECT_EQ(sorted[i], x.expected.choices[before + i]);
        // A row's sum of its slots, 0 without any.
        constexpr int C = 12;
        Input<floatX> rows(x.rng.normals<floatX>(std::max(1, some.slots()) * C));
        Buffer<floatX> out((size_t)x.s.N() * C, "out");
        gpu::expert_combine(ctx, out.p(), rows.p(), r, some, C);
        const Doubles inp = doubles(rows);
        const auto sums = out.get();
        for (int n = 0; n < x.s.N(); n++)
            for (int c = 0; c < C; c++) {
                double sum = 0, size = 0;
                for (int k = 0; k < x.s.K; k++)
                    if (const int slot = expected_slots[n * x.s.K + k]; slot >= 0) {
                        sum += inp[slot * C + c];
                        size += std::abs(inp[slot * C + c]);
                    }
                EXPECT_TRUE(std::abs((double)sums[n * C + c] - sum) <= 0.01 * size) << n << " " << c;
            }
    });
}

// A row of NaN is routed to K different experts, and others as without it.
TEST(Experts, NaNIsRouted) {
    gpu::Ctx ctx;
    Routed x(cases[1], ctx);
    std::vector<real> logits = x.logits.host();
    for (int e = 0; e < x.s.E; e++) logits[e] = (real)not_a_number;
    Buffer<real> changed(logits);
    x.r.logits = changed.p();
    gpu::route(ctx, x.r, x.s, x.rule);
    std::vector<int> experts = x.experts.get();
    for (int k = 0; k < x.s.K; k++) EXPECT_EQ(experts[k], k);
    EXPECT_TRUE(std::isnan(x.weights.get()[0]));
    EXPECT_TRUE(std::equal(experts.begin() + x.s.K, experts.end(), x.expected.experts.begin() + x.s.K));
}

// The function of a row's logits whose gradient router_backward sets.
double row_value(const double* logits, const double* drouting, const int* experts, const int* counts, const MixtureShape& s,
                 const RouterRule& rule, const RouterLossFactors& factors, double* losses = nullptr) {  // of RouterSums
    const Doubles scores = scores_of(logits, s.E, rule.sigmoid), weights = weights_of(scores, experts, s.K, rule);
    double value = 0, sum = 0, balance = 0;
    for (int k = 0; k < s.K; k++) value += drouting[k] * weights[k];
    for (int e = 0; e < s.E; e++) {
        sum += rule.sigmoid ? scores[e] : 0;
        balance += (double)s.E / ((double)s.K * s.T * s.T) * counts[e] * scores[e];
    }
    balance /= rule.sigmoid ? sum : 1;
    const double lse = lse_of(logits, s.E);
    for (int e = 0; e < s.E && losses; e++) {
        const double p = scores[e] / (rule.sigmoid ? sum : 1);
        losses[RouterSums::entropy] -= p * std::log(p);
    }
    if (losses) losses[RouterSums::balance] += balance, losses[RouterSums::z] += lse * lse;
    return value + factors.balance * balance + factors.z * lse * lse;
}

// Against finite differences, whose error is about 1e-10 here. Each of the sums in a gradient has few terms, whose magnitudes
// are at most those below.
TEST(Experts, RouterBackward) {
    for_each_case([](gpu::Ctx& ctx, Routed& x) {
        const MixtureShape& s = x.s;
        std::vector<real> of_kept = Rng(5).normals<real>(s.slots());
        Doubles dw;
        for (int i = 0; i < s.slots(); i++) {
            const bool dropped = x.expected.slots[i] < 0;
            dw.push_back(dropped ? 0 : as_double(of_kept[i]));
            if (dropped) of_kept[i] = (real)not_a_number;
        }
        const Input<real> drouting(of_kept);
        Doubles logits = doubles(x.logits);
        for (const RouterLossFactors& factors : {RouterLossFactors{0, 0}, RouterLossFactors{0.5, 0.25}}) {
            Buffer<real> dlogits(s.N() * s.E, "dlogits");
            Buffer<double> sums(Doubles(RouterSums::size(s.E), 0.5));
            gpu::router_backward(ctx, dlogits.p(), factors.z > 0 ? sums.p() : nullptr, drouting.p(), x.r, s, x.rule, factors);
            Doubles expected, allowed, expected_sums(RouterSums::size(s.E), 0.5);
            for (int n = 0; n < s.N(); n++) {
                const int *experts = &x.expected.experts[n * s.K], *counts = &x.expected.counts[n / s.T * s.E];
                double largest = 0, chosen = 0, most = 0;
                row_value(&logits[n * s.E], &dw[n * s.K], experts, counts, s, x.rule, factors, expected_sums.data());
                const Doubles scores = scores_of(&logits[n * s.E], s.E, x.rule.sigmoid);
                for (int k = 0; k < s.K; k++) largest += std::abs(dw[n * s.K + k]), chosen += scores[experts[k]];
                for (int e = 0; e < s.E; e++) most = std::max(most, (double)counts[e]);
                const double magnitude = 2 * largest * x.rule.scale / (x.rule.normalize ? chosen : 1) +
                                         2 * factors.balance * s.E / ((double)s.K * s.T * s.T) * most +
                                         2 * factors.z * std::abs(lse_of(&logits[n * s.E], s.E));
                for (int e = 0; e < s.E; e++) {
                    const double h = 1e-5, kept = logits[n * s.E + e];
                    double sides[2];
                    for (const int side : {0, 1}) {
                        logits[n * s.E + e] = kept + (side ? h : -h);
                        sides[side] = row_value(&logits[n * s.E], &dw[n * s.K], experts, counts, s, x.rule, factors);
                    }
                    logits[n * s.E + e] = kept;
                    expected.push_back((sides[1] - sides[0]) / (2 * h));
                    allowed.push_back(2 * weight_error(s) * magnitude + 1e-9 * (1 + magnitude));
                }
            }
            expect_close(dlogits.get(), expected, allowed, "dlogits");
            if (factors.z == 0) continue;
            expected_sums[RouterSums::dropped] += s.slots() - x.expected.offsets[s.E];
            for (size_t i = 0; i < x.expected.counts.size(); i++)
                expected_sums[RouterSums::rows + i % s.E] += x.expected.counts[i];
            expect_close(sums.get(), expected_sums, 8 * weight_error(s) * s.N(), 2 * weight_error(s), "sums");
        }
    });
}

// sum_k a[k] b[k] of numbers apart by the strides, and the error of K products and sums in fp32, in any order.
struct Dot {
    double sum = 0, error = 0;
    template <class A, class B>
    Dot(const A& a, size_t a0, size_t a_step, const B& b, size_t b0, size_t b_step, int K) {
        for (int k = 0; k < K; k++) {
            const double term = as_double(a[a0 + k * a_step]) * as_double(b[b0 + k * b_step]);
            sum += term;
            error += 2 * (K + 2) * u * std::abs(term);
        }
    }
};

TEST(Experts, RouterLogits) {
    gpu::Ctx ctx;
    Rng rng(7);
    for (const auto& [N, E, C] :
         {std::array{3, 5, 16}, std::array{70, 1, 24}, std::array{70, 33, 72}, std::array{600, 8, 20}}) {
        const MixtureShape shape = {1, N, E, 1};
        const Input<floatX> inp(rng.normals<floatX>(N * C)), weight(rng.normals<floatX>(E * C)), bias(rng.normals<floatX>(E)),
            dinp_before(rng.normals<floatX>(N * C));
        const Input<real> dlogits(rng.normals<real>(N * E)), before(rng.normals<real>(E * C));
        Doubles expected, allowed;
        const auto add = [&](const Dot& dot, double more, double unit) {
            expected.push_back(more + dot.sum);
            allowed.push_back(dot.error + (unit + 2 * u) * std::abs(more + dot.sum));
        };
        Buffer<real> logits(N * E, "logits");
        gpu::router_logits(ctx, logits.p(), inp.p(), weight.p(), bias.p(), shape, C);
        for (int n = 0; n < N; n++)
            for (int e = 0; e < E; e++) add({inp, (size_t)n * C, 1, weight, (size_t)e * C, 1, C}, as_double(bias[e]), 0);
        expect_close(logits.get(), expected, allowed, "logits");
        const Input<floatX> ones(std::vector<floatX>(N, from_double<floatX>(1)));
        Buffer<real> dbias(std::vector<real>(before.host().begin(), before.host().begin() + E), "dbias");
        gpu::router_backward_bias(ctx, dbias.p(), dlogits.p(), shape);
        expected.clear(), allowed.clear();
        for (int e = 0; e < E; e++) add({dlogits, (size_t)e, (size_t)E, ones, 0, 1, N}, as_double(before[e]), 0);
        expect_close(dbias.get(), expected, allowed, "dbias");
        for (const Acc acc : {Acc::Add, Acc::Set}) {
            Buffer<floatX> dinp(dinp_before.host(), "dinp");
            Buffer<real> dweight(before.host(), "dweight");
            gpu::router_backward_input(ctx, dinp.p(), dlogits.p(), weight.p(), shape, C);
            gpu::router_backward_weight(ctx, dweight.p(), dlogits.p(), inp.p(), shape, C, acc);
            expected.clear(), allowed.clear();
            for (int n = 0; n < N; n++)
                for (int c = 0; c < C; c++)
                    add({dlogits, (size_t)n * E, 1, weight, (size_t)c, (size_t)C, E}, as_double(dinp_before[n * C + c]),
                        rounding);
            expect_close(dinp.get(), expected, allowed, "dinp");
            expected.clear(), allowed.clear();
            for (int e = 0; e < E; e++)
                for (int c = 0; c < C; c++)
                    add({dlogits, (size_t)e, (size_t)E, inp, (size_t)c, (size_t)C, N},
                        acc == Acc::Add ? as_double(before[e * C + c]) : 0, 0);
            expect_close(dweight.get(), expected, allowed, "dweight");
        }
    }
}

// Slots of E experts, the last `more` of which belong to none; rows of inputs in their order, or gathered by choices.
struct Products {
    gpu::Ctx& ctx;
    int E, IC, OC;
    std::vector<int> offsets;
    int n = offsets.back(), more = 70, K = 2, rows = (n + more) / K + 1;
    Rng rng{11};
    std::vector<int> choices = different_choices();
    Input<int> offsets_in{offsets}, choices_in{choices};
    ExpertGroups groups = {offsets_in.p(), E, n + more};
    Input<floatX> x{rng.normals<floatX>((size_t)(n + more) * IC)}, dout{rng.normals<floatX>((size_t)(n + more) * OC)},
        weight{rng.normals<floatX>((size_t)E * OC * IC)}, bias{rng.normals<floatX>((size_t)E * OC)};
    Input<real> weights{rng.normals<real>((size_t)rows * K)};  // of choices
    bool fp8 = false;                                          // sums are scaled
    Input<float> inverse{std::vector<float>{0.37f, 2.3f}};
    Fp8Scales scales = {inverse.p(), inverse.p() + 1};
    double scale() const { return fp8 ? as_double(inverse[0]) * as_double(inverse[1]) : 1; }

    std::vector<int> different_choices() {
        std::vector<int> all(rows * K);
        for (int i = 0; i < (int)all.size(); i++) {
            const int j = rng.integers(1, 0, i + 1)[0];
            all[i] = all[j];
            all[j] = i;
        }
        all.resize(n + more);
        return all;
    }
    ExpertRows rows_of(const Input<floatX>& from, bool gathered) const {
        return gathered ? ExpertRows{from.p(), choices_in.p(), K} : ExpertRows{from.p()};
    }
    size_t row(int slot, bool gathered) const { return gathered ? choices[slot] / K : slot; }
    int expert_of(int slot) const {
        int e = 0;
        while (slot >= offsets[e + 1]) e++;
        return e;
    }
    // Rows after the last slot keep their bits, which are NaN.
    void expect(const Buffer<floatX>& out, int columns, Doubles expected, Doubles allowed, const char* name) const {
        std::vector<floatX> values = out.get();
        for (size_t i = (size_t)n * columns; i < values.size(); i++) ASSERT_TRUE(std::isnan(as_double(values[i]))) << name;
        values.resize((size_t)n * columns);
        expect_close(values, expected, allowed, name);
    }

    ExpertBias bias_of(bool biased, bool weighted) const {
        if (!biased) return {};
        return weighted ? ExpertBias{bias.p(), weights.p(), choices_in.p()} : ExpertBias{bias.p()};
    }
    double factor(int slot, bool weighted) const { return weighted ? as_double(weights[choices[slot]]) : 1; }
    Dot scaled(Dot dot) const {
        dot.sum *= scale();
        dot.error *= scale();
        if (fp8) dot.error += 4 * u * std::abs(dot.sum);
        return dot;
    }
    // The sum is rounded before it is added, and after.
    static void add_expected(const Dot& dot, double before, Acc acc, Doubles& expected, Doubles& allowed) {
        const double added = acc == Acc::Add ? before : 0;
        expected.push_back(added + dot.sum);
        allowed.push_back(dot.error + rounding * (std::abs(dot.sum) + (acc == Acc::Add ? std::abs(added + dot.sum) : 0)));
    }
    // A result to set, or to add to; rows after the last slot are NaN.
    std::vector<floatX> before(int columns, Acc acc) {
        std::vector<floatX> x((size_t)(n + more) * columns, from_double<floatX>(NAN));
        const std::vector<floatX> numbers = rng.normals<floatX>((size_t)n * columns);
        if (acc == Acc::Add) std::copy(numbers.begin(), numbers.end(), x.begin());
        return x;
    }
    // Sets without a bias and with a weighted one, adds with a bias.
    void forward(bool gathered, Acc acc) {
        for (const int biases : {0, 1, 2}) {
            if ((acc == Acc::Add) != (biases == 1)) continue;
            const std::vector<floatX> first = before(OC, acc);
            Buffer<floatX> out(first, "out");
            const ExpertBias beta = bias_of(biases > 0, biases > 1);
            if (fp8)
                gpu::fp8_expert_linear_forward(ctx, out.p(), rows_of(x, gathered), weight.p(), scales, beta, groups, IC, OC);
            else gpu::expert_linear_forward(ctx, out.p(), rows_of(x, gathered), weight.p(), beta, groups, IC, OC, acc);
            Doubles expected, allowed;
            for (int i = 0; i < n; i++)
                for (int o = 0; o < OC; o++) {
                    const size_t at = (size_t)expert_of(i) * OC + o;
                    Dot dot = scaled(Dot(x, row(i, gathered) * IC, 1, weight, at * IC, 1, IC));
                    const double more = biases ? factor(i, biases > 1) * as_double(bias[at]) : 0;
                    dot.sum += more;
                    dot.error += 2 * (IC + 2) * u * std::abs(more);
                    add_expected(dot, as_double(first[(size_t)i * OC + o]), acc, expected, allowed);
                }
            expect(out, OC, expected, allowed, "out");
        }
    }
    void backward_bias(bool gathered) {
        for (const bool weighted : {false, true}) {
            const Input<real> before(rng.normals<real>((size_t)E * OC)), dweights_before(rng.normals<real>((size_t)rows * K));
            Buffer<real> dbias(before.host(), "dbias"), drouting(dweights_before.host(), "drouting");
            gpu::expert_bias_backward(ctx, dbias.p(), rows_of(dout, gathered), bias_of(weighted, weighted), groups, OC);
            Doubles expected = doubles(before), allowed((size_t)E * OC), products = doubles(dweights_before),
                    products_allowed(products.size());
            for (int i = 0; i < n; i++)
                for (int o = 0; o < OC; o++) {
                    const size_t at = (size_t)expert_of(i) * OC + o;
                    const double d = as_double(dout[row(i, gathered) * OC + o]), term = factor(i, weighted) * d;
                    expected[at] += term;
                    allowed[at] += 2 * (n + 3) * u * std::abs(term);
                    products[choices[i]] += d * as_double(bias[at]);
                    products_allowed[choices[i]] += 2 * (OC + 3) * u * std::abs(d * as_double(bias[at]));
                }
            for (size_t i = 0; i < allowed.size(); i++) allowed[i] += 2 * u * std::abs(as_double(before[i]));
            expect_close(dbias.get(), expected, allowed, "dbias");
            if (!weighted) continue;
            for (size_t i = 0; i < products.size(); i++) products_allowed[i] += 2 * u * std::abs(as_double(dweights_before[i]));
            gpu::expert_bias_backward_routing(ctx, drouting.p(), rows_of(dout, gathered), bias_of(true, true), groups, OC);
            expect_close(drouting.get(), products, products_allowed, "drouting");
        }
    }
    void backward_input(bool gathered, Acc acc) {
        const std::vector<floatX> first = before(IC, acc);
        Buffer<floatX> dinp(first, "dinp");
        if (fp8)
            gpu::fp8_expert_linear_backward_input(ctx, dinp.p(), rows_of(dout, gathered), weight.p(), scales, groups, IC, OC);
        else gpu::expert_linear_backward_input(ctx, dinp.p(), rows_of(dout, gathered), weight.p(), groups, IC, OC, acc);
        Doubles expected, allowed;
        for (int i = 0; i < n; i++)
            for (int c = 0; c < IC; c++) {
                const Dot dot = scaled(Dot(dout, row(i, gathered) * OC, 1, weight, (size_t)expert_of(i) * OC * IC + c, IC, OC));
                add_expected(dot, as_double(first[(size_t)i * IC + c]), acc, expected, allowed);
            }
        expect(dinp, IC, expected, allowed, "dinp");
    }
    void backward_weight(bool gather_dout, bool gather_x, int first, int count, Acc acc) {
        const Input<real> before(rng.normals<real>((size_t)count * IC));
        Buffer<real> dweight(before.host(), "dweight");
        const StackedRows to = {dweight.p(), first, count};
        const ExpertRows left = rows_of(dout, gather_dout), right = rows_of(x, gather_x);
        if (fp8) gpu::fp8_expert_linear_backward_weight(ctx, to, left, right, scales, groups, IC, OC, acc);
        else gpu::expert_linear_backward_weight(ctx, to, left, right, groups, IC, OC, acc);
        Doubles expected(count * (size_t)IC), magnitudes(expected.size()), allowed;
        for (int r = 0; r < count; r++) {
            const int e = (first + r) / OC, o = (first + r) % OC;
            for (int i = offsets[e]; i < offsets[e + 1]; i++)
                for (int c = 0; c < IC; c++) {
                    const double term =
                        scale() * as_double(dout[row(i, gather_dout) * OC + o]) * as_double(x[row(i, gather_x) * IC + c]);
                    expected[(size_t)r * IC + c] += term;
                    magnitudes[(size_t)r * IC + c] += 2 * (offsets[e + 1] - offsets[e] + 4) * u * std::abs(term);
                }
        }
        for (size_t i = 0; i < expected.size(); i++) {
            if (acc == Acc::Add) expected[i] += as_double(before[i]);
            allowed.push_back(magnitudes[i] + 2 * u * std::abs(expected[i]));
        }
        expect_close(dweight.get(), expected, allowed, "dweight");
    }
};

void check_products(gpu::Ctx& ctx, int IC, int OC) {
    SCOPED_TRACE(testing::Message() << "IC " << IC << " OC " << OC);
    Products p = {ctx, 5, IC, OC, {0, 3, 3, 135, 136, 300}};  // an expert without rows, two of more than a tile
    for (const bool gathered : {false, true}) {
        for (const Acc acc : {Acc::Set, Acc::Add}) {
            p.forward(gathered, acc);
            p.backward_input(gathered, acc);
        }
        p.backward_bias(gathered);
    }
    p.backward_weight(false, true, 0, 5 * OC, Acc::Set);
    p.backward_weight(true, false, 2 * OC, 2 * OC, Acc::Add);
    p.backward_weight(false, false, OC, OC, Acc::Set);             // the expert without rows
    p.backward_weight(false, true, 2 * OC + 8, OC - 9, Acc::Add);  // some of an expert's
    p.backward_weight(false, true, 4 * OC + 3, OC - 3, Acc::Set);
    p.fp8 = true;
    for (const bool gathered : {false, true}) {
        p.forward(gathered, Acc::Set);
        p.backward_input(gathered, Acc::Set);
        p.backward_weight(!gathered, gathered, 0, 5 * OC, gathered ? Acc::Set : Acc::Add);
    }
}

// Columns that are whole packs, for which there are tensor cores in bf16, and others. Sums of fewer and more k than are in
// flight.
TEST(Experts, Products) {
    gpu::Ctx ctx;
    check_products(ctx, 72, 136);
    check_products(ctx, 200, 16);
    check_products(ctx, 33, 17);
    Products all = {ctx, 3, 8, 8, {0, 0, 40, 40}};  // all rows belong to one expert
    all.forward(true, Acc::Set);
    all.backward_weight(false, true, 0, 24, Acc::Set);
}

TEST(Experts, ProductsWithoutTensorCores) {
    gpu::Ctx ctx;
    ctx.plain = true;
    check_products(ctx, 72, 80);
}

// The activations' own errors are below 64u of the magnitudes, and are tested with activation_forward.
template <class Act, bool gates>
void check_activation(gpu::Ctx& ctx, Routed& x, Activation activation, int F) {
    const int n = x.s.slots(), inputs = gates ? 2 : 1;
    const Input<floatX> inp(x.rng.normals<floatX>((size_t)n * inputs * F)), dout(x.rng.normals<floatX>((size_t)n * F));
    Buffer<floatX> out((size_t)n * F, "out"), dinp(inp.size(), "dinp");
    Buffer<real> drouting(n, "drouting");
    gpu::expert_activation_forward(ctx, out.p(), inp.p(), x.r, x.s, F, activation);
    gpu::expert_activation_backward(ctx, dinp.p(), drouting.p(), dout.p(), inp.p(), x.r, x.s, F, activation);
    Doubles expected, allowed, dexpected(inp.size()), dallowed(inp.size()), dw(n), dw_allowed(n);
    const double error = rounding + weight_error(x.s) + 64 * u + (std::is_same<floatX, bf16>::value ? 4e-6 : 0);
    for (int slot = 0; slot < n; slot++) {
        const int choice = x.expected.choices[slot];
        const double weight = x.expected.weights[choice];
        for (int f = 0; f < F; f++) {
            const size_t at = (size_t)slot * inputs * F + f;
            const double a = as_double(inp[at]), b = gates ? as_double(inp[at + F]) : 1;
            const double dy = as_double(dout[(size_t)slot * F + f]);
            const double up = std::abs(b) + (activation == Activation::clamped_swiglu);  // clamped SwiGLU adds 1
            double y;
            if constexpr (gates) {
                y = Act::forward(a, b);
                const GateUp<double> d = Act::gradient(a, b, weight * dy);
                dexpected[at] = d.gate;
                dexpected[at + F] = d.up;
                dallowed[at + F] = error * std::abs(weight * dy) * (1 + std::abs(a));
            } else {
                y = Act::forward(a);
                dexpected[at] = Act::gradient(a, weight * dy);
            }
            dallowed[at] = error * std::abs(weight * dy) * up * 2 * (1 + std::abs(a));
            expected.push_back(weight * y);
            allowed.push_back(error * (std::abs(weight * y) + 1e-3 * std::abs(weight) * up));
            dw[choice] += dy * y;
            dw_allowed[choice] += (error - rounding + 2 * (F + 4) * u) * (std::abs(dy * y) + 1e-3 * std::abs(dy) * up);
        }
    }
    expect_close(out.get(), expected, allowed, "out");
    expect_close(dinp.get(), dexpected, dallowed, "dinp");
    expect_close(drouting.get(), dw, dw_allowed, "drouting");
}

TEST(Experts, Activations) {
    gpu::Ctx ctx;
    Routed x(cases[1], ctx);
    for (const int F : {24, 37}) {
        check_activation<activation::Swiglu, true>(ctx, x, Activation::swiglu, F);
        check_activation<activation::ClampedSwiglu, true>(ctx, x, Activation::clamped_swiglu, F);
        check_activation<activation::Relu2, false>(ctx, x, Activation::relu2, F);
    }
    check_activation<activation::Geglu, true>(ctx, x, Activation::geglu, 8);
    check_activation<activation::Gelu, false>(ctx, x, Activation::gelu, 2056);
}

TEST(Experts, Combined) {
    gpu::Ctx ctx;
    for (const Case& c : {cases[1], cases[2]}) {
        Routed x(c, ctx);
        for (const int C : {8, 37, 264}) {
            const Input<floatX> inp(x.rng.normals<floatX>((size_t)x.s.slots() * C));
            Buffer<floatX> out((size_t)x.s.N() * C, "out");
            gpu::expert_combine(ctx, out.p(), inp.p(), x.r, x.s, C);
            Doubles expected, allowed;
            for (int n = 0; n < x.s.N(); n++)
                for (int j = 0; j < C; j++) {
                    double sum = 0, magnitude = 0;
                    for (int k = 0; k < x.s.K; k++) {
                        const double term = as_double(inp[(size_t)x.expected.slots[n * x.s.K + k] * C + j]);
                        sum += term;
                        magnitude += std::abs(term);
                    }
                    expected.push_back(sum);
                    allowed.push_back(x.s.K * u * magnitude + rounding * std::abs(sum));
                }
            expect_close(out.get(), expected, allowed, "out");
        }
    }
}

// Rows for the ranks of their experts: the CPU's, bit for bit. -1 is no expert.
TEST(Experts, SentToRanks) {
    gpu::Ctx ctx;
    cpu::Ctx host;
    for (const auto& [ranks, each] : {std::pair(3, 2), {2, 4}, {5, 1}}) {
        Rng rng(7);
        const int N = 300, K = 3;
        const MixtureShape s = {1, N, ranks, std::min(K, ranks)};
        std::vector<int> experts((size_t)N * K);
        for (int& e : experts) e = rng.below(ranks * each + 1) - 1;
        for (int k = 0; k < K; k++) experts[(size_t)k] = -1;  // a row that goes nowhere
        const size_t n = (size_t)s.slots();
        std::vector<int> places(n), slots(n), choices(n), offsets((size_t)ranks + 1), counts((size_t)ranks);
        const Routing r = {nullptr, places.data(), nullptr, slots.data(), choices.data(), offsets.data(), counts.data()};
        cpu::ranks_of_experts(host, places.data(), experts.data(), s, K, each);
        cpu::sort_choices(host, r, s, 0);
        for (int i = 0; i < N; i++) {
            std::set<int> expected;
            for (int k = 0; k < K; k++)
                if (const int e = experts[(size_t)(i * K + k)]; e >= 0) expected.insert(e / each);
            std::vector<int> of_row(expected.begin(), expected.end());
            of_row.resize((size_t)s.K, -1);
            EXPECT_TRUE(std::equal(of_row.begin(), of_row.end(), places.begin() + (size_t)i * (size_t)s.K));
        }
        const Buffer<int> given(experts);
        Buffer<int> out(n, "ranks");
        gpu::ranks_of_experts(ctx, out.p(), given.p(), s, K, each);
        EXPECT_EQ(out.get(), places);

        const int sent = offsets.back();
        const Buffer<int> sent_choices(choices), sent_slots(slots);
        for (const size_t columns : {(size_t)8, (size_t)5}) {  // rows of 16 bytes, and odd ones
            const std::vector<floatX> rows = rng.normals<floatX>((int)(N * columns));
            const Buffer<floatX> inp(rows);
            Buffer<floatX> packed(n * columns, "packed");
            gpu::gather_rows(ctx, packed.p(), inp.p(), sent_choices.p(), s.K, sent, columns * sizeof(floatX));
            std::vector<floatX> expected(n * columns);
            cpu::gather_rows(host, expected.data(), rows.data(), choices.data(), s.K, sent, columns * sizeof(floatX));
            EXPECT_EQ(memcmp(packed.get().data(), expected.data(), (size_t)sent * columns * sizeof(floatX)), 0);
        }
        const std::vector<real> returned = rng.normals<real>((int)n * K);
        const Buffer<real> inp(returned);
        Buffer<real> sums((size_t)N * K, "sums");
        std::vector<real> expected((size_t)N * K);
        cpu::expert_combine_real(host, expected.data(), returned.data(), r, s, K);
        // Choices without a slot are no experts.
        Buffer<int> kept(n, "kept");
        const Routing some = {nullptr, (int*)given.p(), nullptr, (int*)sent_slots.p(), nullptr, nullptr, nullptr};
        gpu::kept_experts(ctx, kept.p(), some, s);
        std::vector<int> of_kept(n);
        for (size_t i = 0; i < n; i++) of_kept[i] = slots[i] < 0 ? -1 : experts[i];
        EXPECT_EQ(kept.get(), of_kept);
        const Routing on_device = {nullptr, nullptr, nullptr, (int*)sent_slots.p(), nullptr, nullptr, nullptr};
        gpu::expert_combine_real(ctx, sums.p(), inp.p(), on_device, s, K);
        EXPECT_EQ(sums.get(), expected);
    }
}

}  // namespace
}  // namespace test_gpu_experts
