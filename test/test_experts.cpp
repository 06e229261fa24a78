// A mixture of experts in the build's precision (bf16 or fp32): every op, plain loops and the fast path of each matrix unit,
// compared with sums in double of the numbers that it read. Products are bounded as in test_matmul.cpp: a sum of K products
// errs by (K + 2) u times the sum of magnitudes, u = 2^-24, and is rounded once.
#include "expert_layer.h"

#include "matrix_units.h"

namespace test_experts {

using namespace test;

constexpr double u = roundoff<real>, tiny = 1e-35;  // numbers below the smallest normal one may be flushed to zero
// of a sigmoid or exponential of z; results that are rounded to bf16 use a shorter polynomial (cpu/vectors.h)
double exponential_error(double z) { return (4 * std::abs(z) + 16) * u + (std::is_same<floatX, bf16>::value ? 3.7e-6 : 0); }

// Sums in double, and how far the op's may be from them before they are rounded.
struct Sums {
    Doubles value, error;
    void add(double v, double e) {
        value.push_back(v);
        error.push_back(e);
    }
    // The sum of term(i) for i below n, after `start`.
    template <class F>
    void sum(int n, F term, double start = 0) {
        double v = start, magnitude = std::abs(start);
        for (int i = 0; i < n; i++) {
            const double t = term(i);
            v += t;
            magnitude += std::abs(t);
        }
        add(v, (n + 2) * u * magnitude);
    }
};
template <class Buffer>
void expect_sums(const Buffer& actual, const Sums& s, const std::string& name) {
    using T = std::decay_t<decltype(actual[0])>;
    Doubles allowed(s.value.size());
    for (size_t i = 0; i < allowed.size(); i++) {
        const double v = s.value[i], e = s.error[i] + tiny;
        const double low = as_double(from_double<T>(v - e)), high = as_double(from_double<T>(v + e));
        allowed[i] = std::max(v - low, high - v);
    }
    expect_close(actual, s.value, allowed, name);
}

// w act(h) of one number or of a gate and an up, its derivatives times dy, and the factor of exponential_error in them.
struct Activated {
    double y, dh[2], scale, z;
};
Activated activate(Activation a, double h, double up, double dy) {
    const double size = std::abs(h) + 1, z = std::max(std::abs(h), std::abs(1.6 * (h + 0.045 * h * h * h)));
    Activated r = {};
    with_activation(
        a,
        [&](auto act) {
            r = {act.forward(h), {act.gradient(h, dy)}, size * size, z};
        },
        [&](auto act) {
            const auto d = act.gradient(h, up, dy);
            r = {act.forward(h, up), {d.gate, d.up}, size * (std::abs(up) + 1), z};
        });
    return r;
}

void check_layer(const ExpertLayer& l) {
    const int N = l.N, E = l.E, K = l.K, C = l.C, F = l.F, H = l.H, T = l.k.shape.T;
    const auto at = [](const auto& x, size_t row, int columns, int i) {
        return as_double(x[row * (size_t)columns + (size_t)i]);
    };
    const auto for_slots = [&](auto f) {
        for (int e = 0; e < E; e++)
            for (int slot = l.offsets[(size_t)e]; slot < l.offsets[(size_t)e + 1]; slot++)
                f((size_t)slot, (size_t)l.choices[(size_t)slot], (size_t)l.choices[(size_t)slot] / K, (size_t)e);
    };
    Sums logits, h, act, y, out, dact, drouting, dh, dx_slots, dx_experts, dlogits, drouter, dx, dfc1, dfc2, drouter_bias,
        dfc1_bias, dfc2_bias;
    const auto bias = [&](const std::vector<floatX>& b, size_t e, int columns, int i) {
        return l.k.biases ? at(b, e, columns, i) : 0.0;
    };
    for (size_t n = 0; n < (size_t)N; n++)
        for (int e = 0; e < E; e++)
            logits.sum(
                C, [&](int c) { return at(l.x, n, C, c) * at(l.router_weight, e, C, c); }, bias(l.router_bias, 0, E, e));
    expect_sums(l.logits, logits, "logits");
    expect_routing(l);
    drouting.value.resize((size_t)N * K);
    drouting.error.resize((size_t)N * K);
    for_slots([&](size_t slot, size_t choice, size_t n, size_t e) {
        const double w = (double)l.weights[choice];
        for (int o = 0; o < H; o++)
            h.sum(
                C, [&](int c) { return at(l.x, n, C, c) * at(l.fc1, e * H + o, C, c); }, bias(l.fc1_bias, e, H, o));
        for (int o = 0; o < C; o++)
            y.sum(
                F, [&](int f) { return at(l.act, slot, F, f) * at(l.fc2, e * C + o, F, f); }, w * bias(l.fc2_bias, e, C, o));
        for (int f = 0; f < F; f++) dact.sum(C, [&](int c) { return at(l.dout, n, C, c) * at(l.fc2, e * C + c, F, f); });
        for (int c = 0; c < C; c++) dx_slots.sum(H, [&](int o) { return at(l.dh, slot, H, o) * at(l.fc1, e * H + o, C, c); });
        double sum = 0, error = 0;
        Sums ups, of_bias;
        for (int f = 0; f < F; f++) {
            const double d = at(l.dact, slot, F, f);
            const Activated a = activate(l.k.activation, at(l.h, slot, H, f), H > F ? at(l.h, slot, H, F + f) : 0, w * d);
            const double each = a.scale * exponential_error(a.z);
            act.add(w * a.y, std::abs(w) * each);
            sum += d * a.y;
            error += std::abs(d) * (each + (F + 2) * u * std::abs(a.y));
            dh.add(a.dh[0], 4 * std::abs(w * d) * each);
            if (H > F) ups.add(a.dh[1], 4 * std::abs(w * d) * each);
        }
        dh.value.insert(dh.value.end(), ups.value.begin(), ups.value.end());
        dh.error.insert(dh.error.end(), ups.error.begin(), ups.error.end());
        of_bias.sum(
            C, [&](int c) { return at(l.dout, n, C, c) * bias(l.fc2_bias, e, C, c); }, sum);
        drouting.value[choice] = of_bias.value[0];
        drouting.error[choice] = error + of_bias.error[0];
    });
    std::vector<real> dweights_of_slots = l.drouting.values();
    for (size_t i = 0; i < dweights_of_slots.size(); i++)
        if (l.dropped((int)i)) dweights_of_slots[i] = 0;
    expect_sums(l.filled(l.h, H), h, "fc1 forward");
    expect_sums(l.filled(l.act, F), act, "activation");
    expect_sums(l.filled(l.y, C), y, "fc2 forward");
    expect_sums(l.filled(l.dact, F), dact, "fc2 backward");
    expect_sums(dweights_of_slots, drouting, "drouting");
    expect_sums(l.filled(l.dh, H), dh, "activation backward");
    expect_sums(l.filled(l.dx_slots, C), dx_slots, "fc1 backward");

    for (size_t n = 0; n < (size_t)N; n++) {
        const auto of_slot = [&](const auto& x, int k, int c) {
            const int slot = l.slot_of[n * K + k];
            return slot < 0 ? 0.0 : at(x, (size_t)slot, C, c);
        };
        for (int c = 0; c < C; c++) {
            out.sum(K, [&](int k) { return of_slot(l.y, k, c); });
            dx_experts.sum(K, [&](int k) { return of_slot(l.dx_slots, k, c); });
            dx.sum(
                E, [&](int e) { return at(l.dlogits, n, E, e) * at(l.router_weight, e, C, c); }, at(l.dx_experts, n, C, c));
        }
        // As in RouterBackward, whose formulas finite differences check in double.
        const real* const x = &l.logits[n * E];
        Doubles s((size_t)E), d((size_t)E);
        double top = (double)*std::max_element(x, x + E), exponentials = 0, all = 1, sum = 1, mean = 0, largest = 0;
        for (int e = 0; e < E; e++) exponentials += std::exp(x[e] - top);
        const double lse = top + std::log(exponentials);
        for (int e = 0; e < E; e++) s[(size_t)e] = l.rule.sigmoid ? 1 / (1 + std::exp(-(double)x[e])) : std::exp(x[e] - lse);
        if (l.rule.sigmoid) all = dot(s, Doubles(s.size(), 1.0));
        const auto c = [&](int e) { return E / ((double)K * T * T) * l.counts[n / T * E + (size_t)e]; };
        for (int e = 0; e < E && l.rule.sigmoid; e++) mean += c(e) * s[(size_t)e] / all;
        for (int e = 0; e < E; e++) d[(size_t)e] = l.factors.balance * (c(e) - mean) / all;
        double magnitude = l.factors.balance * (mean + E) / all;
        const auto chosen = [&](int k) { return s[(size_t)l.experts[n * K + k]]; };
        const auto g = [&](int k) { return (double)dweights_of_slots[n * K + k]; };
        mean = 0;
        if (l.rule.normalize) sum = 0;
        for (int k = 0; k < K && l.rule.normalize; k++) sum += chosen(k);
        for (int k = 0; k < K && l.rule.normalize; k++) mean += g(k) * chosen(k) / sum;
        for (int k = 0; k < K; k++) {
            d[(size_t)l.experts[n * K + k]] += l.rule.scale / sum * (g(k) - mean);
            magnitude += l.rule.scale / sum * (std::abs(g(k)) * 2);
        }
        mean = dot(s, d);
        for (int e = 0; e < E; e++) {
            const double se = s[(size_t)e], z = 2 * l.factors.z * lse * std::exp(x[e] - lse);
            largest = std::max(largest, std::abs((double)x[e]));
            dlogits.add(l.rule.sigmoid ? d[(size_t)e] * se * (1 - se) + z : se * (d[(size_t)e] - mean) + z,
                        8 * (E + K + 8 + 4 * largest + top - x[e]) * u * (se * magnitude + std::abs(z)));
        }
    }
    expect_sums(l.out, out, "combine forward");
    expect_sums(l.dx_experts, dx_experts, "combine backward");
    expect_sums(l.dlogits, dlogits, "dlogits");
    expect_sums(l.dx, dx, "dx of the router");
    for (int e = 0; e < E; e++) {
        const int first = l.offsets[(size_t)e], rows = l.offsets[(size_t)e + 1] - first;
        const auto row = [&](int i) { return (size_t)l.choices[(size_t)(first + i)] / (size_t)K; };
        const auto weight = [&](int i) { return (double)l.weights[(size_t)l.choices[(size_t)(first + i)]]; };
        drouter_bias.sum(
            N, [&](int n) { return at(l.dlogits, n, E, e); }, l.drouter_bias0[(size_t)e]);
        for (int o = 0; o < H; o++)
            dfc1_bias.sum(
                rows, [&](int i) { return at(l.dh, (size_t)(first + i), H, o); }, at(l.dfc1_bias0, e, H, o));
        for (int c = 0; c < C; c++)
            dfc2_bias.sum(
                rows, [&](int i) { return weight(i) * at(l.dout, row(i), C, c); }, at(l.dfc2_bias0, e, C, c));
        for (int c = 0; c < C; c++)
            drouter.sum(
                N, [&](int n) { return at(l.dlogits, n, E, e) * at(l.x, n, C, c); }, at(l.drouter0, e, C, c));
        for (int o = 0; o < H; o++)
            for (int c = 0; c < C; c++)
                dfc1.sum(
                    rows, [&](int i) { return at(l.dh, (size_t)(first + i), H, o) * at(l.x, row(i), C, c); },
                    at(l.dfc1_0, (size_t)(e * H + o), C, c));
        for (int c = 0; c < C; c++)
            for (int f = 0; f < F; f++)
                dfc2.sum(
                    rows, [&](int i) { return at(l.dout, row(i), C, c) * at(l.act, (size_t)(first + i), F, f); },
                    at(l.dfc2_0, (size_t)(e * C + c), F, f));
    }
    expect_sums(l.drouter, drouter, "drouter");
    expect_sums(l.dfc1, dfc1, "dfc1");
    expect_sums(l.dfc2, dfc2, "dfc2");
    if (!l.k.biases) return;
    expect_sums(l.drouter_bias, drouter_bias, "drouter_bias");
    expect_sums(l.dfc1_bias, dfc1_bias, "dfc1_bias");
    expect_sums(l.dfc2_bias, dfc2_bias, "dfc2_bias");
}

void expect_same_results(const ExpertLayer& a, const ExpertLayer& b) {
    expect_same_bits(a.logits, b.logits, "logits");
    EXPECT_EQ(a.choices.values(), b.choices.values());
    EXPECT_EQ(a.slot_of.values(), b.slot_of.values());
    EXPECT_EQ(a.counts.values(), b.counts.values());
    expect_same_bits(a.weights, b.weights, "weights");
    expect_same_bits(a.out, b.out, "out");
    expect_same_bits(a.drouting, b.drouting, "drouting");
    expect_same_bits(a.dlogits, b.dlogits, "dlogits");
    expect_same_bits(a.dx, b.dx, "dx");
    expect_same_bits(a.drouter, b.drouter, "drouter");
    expect_same_bits(a.dfc1, b.dfc1, "dfc1");
    expect_same_bits(a.dfc2, b.dfc2, "dfc2");
    expect_same_bits(a.drouter_bias, b.drouter_bias, "drouter_bias");
    expect_same_bits(a.dfc1_bias, b.dfc1_bias, "dfc1_bias");
    expect_same_bits(a.dfc2_bias, b.dfc2_bias, "dfc2_bias");
    EXPECT_EQ(a.sums, b.sums);
}

// The small cases, whose experts have a few rows; whole vectors and blocks, and their tails; more than one block of rows and of
// columns; more rows than are packed at a time.
std::vector<ExpertCase> cases() {
    std::vector<ExpertCase> all = expert_cases();
    all.push_back({{2, 80, 5, 3}, 70, 45, {}, Activation::clamped_swiglu, false, true});
    all.push_back({{1, 64, 4, 2}, 64, 32, {}, Activation::gelu});
    all.push_back({{1, 70, 3, 2}, 144, 80, {}});
    all.push_back({{3, 11, 2, 1}, 1100, 17, {}});
    all.push_back({{1, 1100, 3, 1}, 8, 8, {}, Activation::swiglu, true});
    return all;
}

TEST(Experts, EveryOp) {
    for (const cpu::AnyUnit& unit : all_matrix_units(cpu::Products::layers))
        for (const bool plain : {false, true}) {
            if (plain && unit != all_matrix_units(cpu::Products::layers)[0]) continue;
            uint64_t seed = 70;
            for (const ExpertCase& k : cases()) {
                SCOPED_TRACE(testing::Message() << (plain ? "plain loops" : name_of(unit)) << ", E " << k.shape.E << ", K "
                                                << k.shape.K << ", N " << k.shape.N());
                cpu::Ctx ctx(2);
                ctx.layers = unit;
                ctx.plain = plain;
                ExpertLayer layer(k, seed++);
                layer.forward(ctx);
                layer.backward(ctx);
                check_layer(layer);
            }
        }
}

TEST(Experts, SameBitsForAnyNumberOfThreads) {
    for (const cpu::AnyUnit& unit : all_matrix_units(cpu::Products::layers)) {
        SCOPED_TRACE(name_of(unit));
        uint64_t seed = 90;
        for (const ExpertCase& k : cases()) {
            const auto run = [&](int threads) {
                cpu::Ctx ctx(threads);
                ctx.layers = unit;
                auto layer = std::make_unique<ExpertLayer>(k, seed);
                layer->forward(ctx);
                layer->backward(ctx);
                return layer;
            };
            const auto one = run(1);
            for (const int threads : {2, 3, 4}) expect_same_results(*run(threads), *one);
            seed++;
        }
    }
}

// Rows of a weight's gradient, whole experts or a part of one, have the bits of the whole; set is added to zero. With more rows
// than are packed at a time, too.
TEST(Experts, RowsOfTheWeightsGradient) {
    cpu::Ctx ctx(2);
    for (const auto& [C, T] : {std::pair{40, 60}, {48, 60}, {8, 1100}}) {
        ExpertLayer l({{1, T, 4, 2}, C, 37, {}, Activation::swiglu, T > 1000}, 110);
        l.forward(ctx);
        l.backward(ctx);
        const int E = l.E, F = l.F;
        const auto compute = [&, C = C](const std::vector<real>& before, int row, Acc acc) {
            Guarded<real> d(before, "rows");
            const StackedRows rows = {d.data(), row, (int)(before.size() / (size_t)F)};
            cpu::expert_linear_backward_weight(ctx, rows, l.gathered(l.dout), {l.act.data()}, l.groups(), F, C, acc);
            return d.values();
        };
        const std::vector<real> zeros((size_t)(E * C * F)), poison(zeros.size(), (real)NAN);
        const std::vector<real> whole_set = compute(poison, 0, Acc::Set);
        expect_same_bits(compute(zeros, 0, Acc::Add), whole_set, "added to zero");
        for (const auto& [row, rows] : {std::pair{0, 2 * C}, {C, 3 * C}, {3 * C, C}, {16, 16}, {C + 3, 20}, {2 * C - 1, 1}}) {
            const auto part = [&, first = row, n = rows](const auto& x) {
                return std::vector<real>(x.begin() + first * F, x.begin() + (first + n) * F);
            };
            expect_same_bits(compute(part(poison), row, Acc::Set), part(whole_set), "set");
            expect_same_bits(compute(part(l.dfc2_0), row, Acc::Add), part(l.dfc2.values()), "added");
        }
    }
}

// Results that are added to others are rounded once more. Rows that are gathered, and an expert with a few rows.
TEST(Experts, ProductsAreAdded) {
    const int E = 4, IC = 40, OC = 37, slots = 60;
    const int offsets[] = {0, 20, 20, 23, slots};
    Rng rng(115);
    const std::vector<floatX> x = rng.normals<floatX>((size_t)slots * IC), weight = rng.normals<floatX>((size_t)E * OC * IC),
                              before = rng.normals<floatX>((size_t)slots * OC);
    const std::vector<int> choices = rng.integers(slots, 0, slots);
    const ExpertGroups groups = {offsets, E, slots};
    const auto check = [&](cpu::Ctx& ctx) {
        for (const bool forward : {true, false}) {
            const auto product = [&](std::vector<floatX>& out, Acc acc) {
                const ExpertRows rows = {x.data(), choices.data(), 2};
                if (forward)
                    cpu::expert_linear_forward(ctx, out.data(), rows, weight.data(), {weight.data()}, groups, IC, OC, acc);
                else cpu::expert_linear_backward_input(ctx, out.data(), rows, weight.data(), groups, IC, OC, acc);
            };
            const int columns = forward ? OC : IC;
            std::vector<floatX> set((size_t)slots * columns), sum(before.begin(), before.end());
            sum.resize(set.size(), from_double<floatX>(0.5));
            const std::vector<floatX> first = sum;
            product(set, Acc::Set);
            product(sum, Acc::Add);
            for (size_t i = 0; i < sum.size(); i++) {
                const double a = as_double(set[i]), b = as_double(first[i]);
                EXPECT_NEAR(as_double(sum[i]), a + b, 1.01 * roundoff<floatX> * (std::abs(a) + std::abs(a + b))) << i;
            }
        }
    };
    cpu::Ctx plain(2);
    plain.plain = true;
    check(plain);
    for (const cpu::AnyUnit& unit : all_matrix_units(cpu::Products::layers)) {
        cpu::Ctx ctx(2);
        ctx.layers = unit;
        check(ctx);
    }
}

// Rows after the last slot are neither read nor set, an expert without rows has a gradient of zero, and infinite weights of one
// expert stay in its rows.
TEST(Experts, ExpertsDoNotMix) {
    const int slots = 70, IC = 21, OC = 35, E = 5;
    const std::vector<int> offsets = {0, 20, 20, 23, 60, 61};
    Rng rng(120);
    Guarded<floatX> inp(rng.normals<floatX>((size_t)slots * IC)), dout(rng.normals<floatX>((size_t)slots * OC)),
        weight(rng.normals<floatX>((size_t)E * OC * IC));
    const auto poison = [](Guarded<floatX>& x, size_t first, size_t end, double with) {
        std::fill(x.data() + first, x.data() + end, from_double<floatX>(with));
    };
    poison(inp, (size_t)offsets[E] * IC, inp.size(), NAN);
    poison(dout, (size_t)offsets[E] * OC, dout.size(), NAN);
    for (const int bad : {1, 2, 3}) {
        Guarded<floatX> w(weight.values());
        poison(w, (size_t)bad * OC * IC, (size_t)(bad + 1) * OC * IC, INFINITY);
        for (const cpu::AnyUnit& unit : all_matrix_units(cpu::Products::layers)) {
            SCOPED_TRACE(name_of(unit));
            cpu::Ctx ctx(2);
            ctx.layers = unit;
            Guarded<floatX> out((size_t)slots * OC), dinp((size_t)slots * IC);
            Guarded<real> dweight((size_t)E * OC * IC);
            const ExpertGroups groups = {offsets.data(), E, slots};
            cpu::expert_linear_forward(ctx, out.data(), {inp.data()}, w.data(), {}, groups, IC, OC, Acc::Set);
            cpu::expert_linear_backward_input(ctx, dinp.data(), {dout.data()}, w.data(), groups, IC, OC, Acc::Set);
            cpu::expert_linear_backward_weight(ctx, {dweight.data(), 0, E * OC}, {dout.data()}, {inp.data()}, groups, IC, OC,
                                               Acc::Set);
            for (int slot = 0; slot < slots; slot++) {
                const bool finite = slot < offsets[E] && !(slot >= offsets[(size_t)bad] && slot < offsets[(size_t)bad + 1]);
                for (int o = 0; o < OC; o++)
                    EXPECT_EQ(std::isfinite(as_double(out[(size_t)(slot * OC + o)])), finite) << "out " << slot;
                for (int i = 0; i < IC; i++)
                    EXPECT_EQ(std::isfinite(as_double(dinp[(size_t)(slot * IC + i)])), finite) << "dinp " << slot;
                if (slot < offsets[E]) continue;
                EXPECT_TRUE(std::isnan(as_double(out[(size_t)(slot * OC)])));
            }
            for (size_t i = 0; i < dweight.size(); i++) {
                EXPECT_TRUE(std::isfinite(dweight[i])) << i;
                EXPECT_TRUE(i / (OC * IC) != 1 || dweight[i] == 0) << i;
            }
        }
    }
}

// In generation, a row's bits depend neither on the other rows of its expert nor, with steady_rows, on their number.
TEST(Experts, FewRowsDoNotDependOnEachOther) {
    const int IC = 131, OC = 67;
    for (const cpu::AnyUnit& unit : all_matrix_units(cpu::Products::layers))
        for (const bool steady : {false, true}) {
            cpu::Ctx ctx(2);
            ctx.layers = unit;
            const int few = cpu::detail::most_few_rows(ctx), N = steady ? 3 * few : few;
            ctx.steady_rows = steady ? N : 0;
            Rng rng(130);
            const std::vector<floatX> inp = rng.normals<floatX>((size_t)N * IC), weight = rng.normals<floatX>((size_t)OC * IC);
            Guarded<floatX> all((size_t)N * OC);
            const int offsets[] = {0, N}, one[] = {0, 1};
            cpu::expert_linear_forward(ctx, all.data(), {inp.data()}, weight.data(), {}, {offsets, 1, N}, IC, OC, Acc::Set);
            for (int n = 0; n < N; n++) {
                Guarded<floatX> out((size_t)OC);
                cpu::expert_linear_forward(ctx, out.data(), {&inp[(size_t)(n * IC)]}, weight.data(), {}, {one, 1, 1}, IC, OC,
                                           Acc::Set);
                expect_same_bits(out, std::vector<floatX>(&all[(size_t)(n * OC)], &all[(size_t)(n * OC)] + OC), "row");
            }
        }
}

}  // namespace test_experts
