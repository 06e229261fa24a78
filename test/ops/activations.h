// Tests of activations, dropout, sums of two tensors, and low-rank adapters, for op_tests.h.
#pragma once
#include "inputs.h"

// ---- activations ----------------------------------------------------------------------------------------------------------
namespace {

// Values near zero, in the bends and far out, both signs.
std::vector<floatX> activation_inputs(size_t n) {
    std::vector<floatX> x = Rng(6).normals<floatX>(n, 3);
    const double special[] = {0, 1e-30, -1e-30, 8, -8, 12, -12, 100, -100, 3e4, -3e4};
    for (size_t i = 0; i < std::min(n, std::size(special)); i++) x[i] = from_double<floatX>(special[i]);
    return x;
}

// exp(-z) has a relative error of (|z| + 3) u: z is rounded several times, exp errs by two ulp, or by 3.7e-6 if results are
// rounded to bf16. Below e^-87 it is 0.
double sigmoid_relative_error(double z) {
    return (4 * std::abs(z) + 12) * u + (std::is_same<floatX, bf16>::value ? 3.7e-6 : 0);
}
const double tiny = 1e-35;

double gelu_inner(double x) { return 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }

constexpr double tanh_error = !backend::memory_is_host && std::is_same<floatX, bf16>::value ? 0x1p-10 * 0.504 : 0;  // 2^-10.987

// The GeLU of a product, fused or separate: if separate, pre is rounded to floatX before GeLU, and the product before its
// multiplication with the derivative, so both bounds allow for that too. Sums of K terms as in test_matmul.cpp: 2 (K + 2) u of
// the magnitudes. |gelu'| < 1.13, |gelu''| < 1.13. Fused on a GPU, in bf16, tanh t has 11 bits: x (1 + t) / 2 errs by half of
// that times x, and the derivative (1 + t) / 2 + x (1 - t^2) inner' / 2 by (1/2 + |x t| inner') of it.
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
            // s (1 - s) dz and not its parts: for large |z| s (1 - s) falls faster than x dz grows
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

// Phi of gelu_exact has the relative errors 1e-7 and e^(-x^2/2)'s, whose exponent is rounded and at most 87.
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

// Fused products have the bits of the separate ops; a library's may differ by the roundings in between, as it may add the
// residual stream and the bias before or after it rounds the product.
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

namespace {
void check_swiglu(Activation activation) {
    backend::Ctx ctx(2);
    const bool clamps = activation == Activation::clamped_swiglu;
    const double slope = clamps ? 1.702 : 1, limit = clamps ? 7 : INFINITY;
    for (const Shape& k : {Shape{1, 1}, Shape{1, 45}, Shape{7, 129}, Shape{5, 264}, Shape{2, 5000}}) {
        const int N = k.N, F = k.C;
        const Input<floatX> gate_up(activation_inputs(N * 2 * F)), dout(Rng(8).normals<floatX>(N * F));
        Buffer<floatX> out(N * F, "out"), dgate_up(N * 2 * F, "dgate_up");
        backend::activation_forward(ctx, out.p(), gate_up.p(), N, F, activation);
        backend::activation_backward(ctx, dgate_up.p(), dout.p(), gate_up.p(), N, F, activation);
        Doubles y(N * F), y_allowed(N * F), d(N * 2 * F), d_allowed(N * 2 * F);
        for (int n = 0; n < N; n++)
            for (int f = 0; f < F; f++) {
                const int i = n * F + f, gi = n * 2 * F + f, ui = gi + F;
                const double gate = as_double(gate_up[gi]), linear = as_double(gate_up[ui]), dy = as_double(dout[i]);
                const double g = std::min(gate, limit), z = slope * g, up = std::clamp(linear, -limit, limit) + clamps;
                const double s = 1 / (1 + std::exp(-z)), not_s = 1 / (1 + std::exp(z));
                const double error = sigmoid_relative_error(z) + (clamps ? (4 + 2 * std::abs(z) * not_s) * u : 0);
                y[i] = g * s * up;
                y_allowed[i] = (rounding + error) * std::abs(y[i]) + tiny;
                d[ui] = std::abs(linear) > limit ? 0 : dy * g * s;
                d_allowed[ui] = (rounding + error) * std::abs(d[ui]) + tiny;
                d[gi] = gate > limit ? 0 : dy * up * s * (1 + z * not_s);
                d_allowed[gi] = rounding * std::abs(d[gi]) +
                                std::abs(dy * up * s) * ((1 + std::abs(z) * not_s) * error + 4 * u * std::abs(z) * (z < 20)) +
                                tiny;
            }
        expect_close(out.get(), y, y_allowed, "out");
        expect_close(dgate_up.get(), d, d_allowed, "dgate_up");
    }
}
}  // namespace

TEST(SwiGlu, ForwardAndBackward) { check_swiglu(Activation::swiglu); }
TEST(SwiGlu, Clamped) { check_swiglu(Activation::clamped_swiglu); }

// The product with `up` of gelu's result.
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

// The mask of every element is a function of its place in the whole run, for any start of a part.
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

// A slot has the mask of its choice or, with K choices per row, of its row. Rows after the last slot keep their numbers.
TEST(Dropout, OfSlots) {
    backend::Ctx ctx(2);
    Rng rng(14);
    const int slots = 8;
    const Input<int> offsets({0, 3, 3, 7}), choices({5, 0, 3, 6, 2, 9, 4, 1});
    for (const int columns : {24, 67})
        for (const int K : {1, 2})
            for (const Acc acc : {Acc::Set, Acc::Add}) {
                Dropout d;
                d.rate = real(0.25);
                d.draws.key = 77;
                d.draws.tensor = 3;
                d.draws.first = 24;
                d.draws.cols = columns == 24 ? 24 : 0;
                d.draws.whole_cols = columns == 24 ? 96 : 0;
                const Input<floatX> inp(rng.normals<floatX>(slots * columns)), before(rng.normals<floatX>(slots * columns));
                Buffer<floatX> out(before.host(), "out");
                backend::expert_dropout(ctx, out.p(), inp.p(), {nullptr, choices.p(), K}, {offsets.p(), 3, slots}, columns, d,
                                        acc);
                Doubles expected, allowed;
                for (int slot = 0; slot < slots; slot++)
                    for (int i = 0; i < columns; i++) {
                        const double old = as_double(before[(size_t)(slot * columns + i)]);
                        const double x = as_double(inp[(size_t)(slot * columns + i)]) / 0.75;
                        const bool kept = d.keeps((size_t)(choices[(size_t)slot] / K * columns + i));
                        const double sum = (acc == Acc::Add ? old : 0) + (kept ? x : 0);
                        expected.push_back(slot == 7 ? old : sum);
                        allowed.push_back(slot == 7 ? 0 : rounding * std::abs(sum) + 2 * u * std::abs(x));
                    }
                expect_close(out.get(), expected, allowed, "out");
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

TEST(Scale, RoundsOnceAtAnyAddress) {
    backend::Ctx ctx(2);
    Rng rng(10);
    for (const size_t n : {0, 1, 7, 64, 1001})
        for (const size_t first : {0, 1}) {
            std::vector<floatX> before = rng.normals<floatX>(n + first);
            Buffer<floatX> x(before, "x");
            backend::scale_elements(ctx, x.p() + first, n, (real)0.3);
            Doubles expected = doubles(before);
            for (size_t i = first; i < expected.size(); i++) expected[i] *= 0.3;
            expect_close(x.get(), expected, 0, rounding + 4 * u, "x");
        }
}

// ---- low-rank adapters ----------------------------------------------------------------------------------------------------
// Rows 2 .. 8 of a layer of 13 have the first of two adapters, rows 8 .. 11 the second; the others none. Experts are stacked.
void check_lora_blocks(int experts) {
    backend::Ctx ctx(2);
    const int rank = 3, OC = 13, packed = 9, width = 2 * rank, all = experts * packed;
    const LoraRows rows = {{{2, 6, 0, 0}, {8, 3, 6, 1}, {}}, 2, 2, rank, OC, experts, packed};
    Rng rng(5);
    const Input<floatX> b(rng.normals<floatX>(all * rank));
    const Input<real> dwide(rng.normals<real>(experts * OC * width)), before(rng.normals<real>(all * rank));
    Doubles wide(experts * OC * width), set(all * rank), added(all * rank);
    for (int row = 0; row < all; row++)
        for (int k = 0; k < rank; k++) {
            const int r = row % packed, i = row * rank + k;
            const int place = (row / packed * OC + 2 + r) * width + (r < 6 ? 0 : rank) + k;
            wide[place] = 1.75 * as_double(b[i]);
            set[i] = 1.75 * as_double(dwide[place]);
            added[i] = as_double(before[i]) + set[i];
        }
    Buffer<floatX> out(experts * OC * width, "wide");
    backend::lora_spread(ctx, out.p(), b.p(), rows, 1.75);
    expect_close(out.get(), wide, 0, rounding, "wide");
    Buffer<real> db(before.host(), "db");
    backend::lora_collect(ctx, db.p(), dwide.p(), rows, 1.75, Acc::Add);
    expect_close(db.get(), added, 4 * u, 4 * u, "added");
    backend::lora_collect(ctx, db.p(), dwide.p(), rows, 1.75, Acc::Set);
    expect_close(db.get(), set, 0, 2 * u, "set");
}
TEST(LoraBlocks, SpreadAndCollectedWhereTheyBelong) {
    check_lora_blocks(1);
    check_lora_blocks(4);
}
