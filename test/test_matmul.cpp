// Linear layers in the build's precision (bf16 or fp32): the plain loops and the fast paths compared with sums in double.
// In a sum of K products and a start value each term is rounded at most K + 1 times, in any order of summation, and the
// product once, so the computed and the exact sum differ by at most (K + 2) u times the sum of magnitudes, u = 2^-24. The
// result is that sum rounded once; rounding is monotonic, so it is between the rounded ends of the interval.
#include <gtest/gtest.h>

#include <functional>

#include "../llmc/cpu/fp8.h"
#include "../llmc/cpu/matmul.h"
#include "matrix_units.h"
#include "testing.h"

namespace test_matmul {

using namespace test;
using Doubles = std::vector<double>;

constexpr double u = roundoff<real>;
constexpr double tiny = 1e-35;  // products below the smallest normal number may be flushed to zero

struct Shape {
    int N, IC, OC;
};

// ---- reference ------------------------------------------------------------------------------------------------------------
// A strided view of a matrix, and a matrix product with the sums of magnitudes that bound its error.
struct View {
    const floatX* x;
    int row, col;
    double operator()(int i, int j) const { return as_double(x[(size_t)i * row + (size_t)j * col]); }
};
struct Product {
    Doubles value, magnitude;
    int K;
};

// start(m, n) + sum_k a(m, k) b(k, n)
Product multiply(const View& a, const View& b, int M, int N, int K, const std::function<double(int, int)>& start) {
    Product p{Doubles(M * N), Doubles(M * N), K};
    Doubles column(K);
    for (int n = 0; n < N; n++) {
        for (int k = 0; k < K; k++) column[k] = b(k, n);
        for (int m = 0; m < M; m++) {
            double value = start(m, n), magnitude = std::abs(value);
            for (int k = 0; k < K; k++) {
                const double term = a(m, k) * column[k];
                value += term;
                magnitude += std::abs(term);
            }
            p.value[m * N + n] = value;
            p.magnitude[m * N + n] = magnitude;
        }
    }
    return p;
}

double zero(int, int) { return 0; }

template <class Buffer>
void expect_product(const Buffer& actual, const Product& p, const std::string& name) {
    using T = std::decay_t<decltype(actual[0])>;
    Doubles allowed(p.value.size());
    for (size_t i = 0; i < allowed.size(); i++) {
        const double error = (p.K + 2) * u * p.magnitude[i] + tiny;
        const double low = as_double(from_double<T>(p.value[i] - error)), high = as_double(from_double<T>(p.value[i] + error));
        allowed[i] = std::max(p.value[i] - low, high - p.value[i]);
    }
    expect_close(actual, p.value, allowed, name);
}

// ---- one layer ------------------------------------------------------------------------------------------------------------
struct Results {
    std::vector<floatX> out, out_biased, dinp;
    std::vector<real> dweight_set, dbias_set, dweight_add, dbias_add, dweight_alone;
};

struct Layer {
    Shape k;
    Guarded<floatX> inp, weight, bias, dout;
    std::vector<real> dweight0, dbias0;  // initial values for Acc::Add

    using Fill = std::function<std::vector<floatX>(size_t)>;
    Layer(const Shape& shape, const Fill& fill)
        : k(shape),
          inp(fill((size_t)k.N * k.IC), "inp"),
          weight(fill((size_t)k.OC * k.IC), "weight"),
          bias(fill(k.OC), "bias"),
          dout(fill((size_t)k.N * k.OC), "dout") {
        for (const floatX x : fill((size_t)k.OC * k.IC)) dweight0.push_back((real)x);
        for (const floatX x : fill(k.OC)) dbias0.push_back((real)x);
    }

    // Each op once; outputs are between guards and start as NaN.
    Results run(cpu::Ctx& ctx) const {
        const int N = k.N, IC = k.IC, OC = k.OC;
        Guarded<floatX> out((size_t)N * OC, "out"), out_biased((size_t)N * OC, "out with bias"), dinp((size_t)N * IC, "dinp");
        Guarded<real> dweight_set((size_t)OC * IC, "dweight set"), dbias_set(OC, "dbias set"),
            dweight_add(dweight0, "dweight added"), dbias_add(dbias0, "dbias added"),
            dweight_alone((size_t)OC * IC, "dweight without dbias");
        cpu::linear_forward(ctx, out.data(), inp.data(), weight.data(), nullptr, N, IC, OC);
        cpu::linear_forward(ctx, out_biased.data(), inp.data(), weight.data(), bias.data(), N, IC, OC);
        cpu::linear_backward_input(ctx, dinp.data(), dout.data(), weight.data(), N, IC, OC);
        cpu::linear_backward_weight(ctx, dweight_set.data(), dbias_set.data(), dout.data(), inp.data(), N, IC, OC, Acc::Set);
        for (int row = 0, rows = std::max(1, OC / 3); row < OC; row += rows, rows = OC - row) {
            const auto part = [&](real* dweight, real* dbias, Acc acc) {
                cpu::linear_backward_weight_rows(ctx, dweight + (size_t)row * IC, dbias ? dbias + row : nullptr,
                                                 {&dout[(size_t)row], OC}, inp.data(), N, IC, rows, acc);
            };
            part(dweight_add.data(), dbias_add.data(), Acc::Add);
            part(dweight_alone.data(), nullptr, Acc::Set);
        }
        return {out.values(),       out_biased.values(),  dinp.values(),      dweight_set.values(),
                dbias_set.values(), dweight_add.values(), dbias_add.values(), dweight_alone.values()};
    }

    void check(const Results& r) const {
        const int N = k.N, IC = k.IC, OC = k.OC;
        SCOPED_TRACE(testing::Message() << "N " << N << ", IC " << IC << ", OC " << OC);
        const floatX one = from_double<floatX>(1);
        const View x{inp.data(), IC, 1}, w{weight.data(), IC, 1}, dy{dout.data(), OC, 1}, w_t{weight.data(), 1, IC},
            dy_t{dout.data(), 1, OC}, ones{&one, 0, 0};
        const auto add_bias = [&](int, int o) { return as_double(bias[o]); };
        const auto add_dweight = [&](int o, int i) { return as_double(dweight0[(size_t)o * IC + i]); };
        const auto add_dbias = [&](int o, int) { return as_double(dbias0[o]); };
        expect_product(r.out, multiply(x, w_t, N, OC, IC, zero), "out");
        expect_product(r.out_biased, multiply(x, w_t, N, OC, IC, add_bias), "out with bias");
        expect_product(r.dinp, multiply(dy, w, N, IC, OC, zero), "dinp");
        const Product dweight = multiply(dy_t, x, OC, IC, N, zero);
        expect_product(r.dweight_set, dweight, "dweight set");
        expect_product(r.dweight_alone, dweight, "dweight without dbias");
        expect_product(r.dweight_add, multiply(dy_t, x, OC, IC, N, add_dweight), "dweight added");
        expect_product(r.dbias_set, multiply(dy_t, ones, OC, 1, N, zero), "dbias set");
        expect_product(r.dbias_add, multiply(dy_t, ones, OC, 1, N, add_dbias), "dbias added");
    }
};

Layer random_layer(const Shape& k, uint64_t seed) {
    Rng rng(seed);
    return Layer(k, [&](size_t n) { return rng.normals<floatX>(n); });
}

void check_both_paths(cpu::Ctx& ctx, const Shape& k, uint64_t seed) {
    const Layer layer = random_layer(k, seed);
    for (const bool plain : {true, false}) {
        SCOPED_TRACE(plain ? "plain loops" : "fast path");
        ctx.plain = plain;
        layer.check(layer.run(ctx));
    }
}

void expect_same_results(const Results& a, const Results& b, const std::string& when) {
    expect_same_bits(a.out, b.out, "out " + when);
    expect_same_bits(a.out_biased, b.out_biased, "out with bias " + when);
    expect_same_bits(a.dinp, b.dinp, "dinp " + when);
    expect_same_bits(a.dweight_set, b.dweight_set, "dweight set " + when);
    expect_same_bits(a.dweight_add, b.dweight_add, "dweight added " + when);
    expect_same_bits(a.dweight_alone, b.dweight_alone, "dweight without dbias " + when);
    expect_same_bits(a.dbias_set, b.dbias_set, "dbias set " + when);
    expect_same_bits(a.dbias_add, b.dbias_add, "dbias added " + when);
}

// ---- values ---------------------------------------------------------------------------------------------------------------
TEST(Linear, OddShapes) {
    cpu::Ctx ctx(2);
    // 64 columns are one task of the bias gradient; the last shapes exceed the library's blocks.
    const Shape shapes[] = {{9, 1, 1},    {5, 7, 300},  {17, 65, 3},    {65, 17, 33},    {33, 3, 65},
                            {64, 64, 64}, {63, 16, 64}, {129, 257, 65}, {300, 130, 129}, {48, 520, 260}};
    uint64_t seed = 1;
    for (const Shape& k : shapes) check_both_paths(ctx, k, seed++);
}

TEST(Linear, FewRows) {
    cpu::Ctx ctx(1);
    uint64_t seed = 100;
    for (int N = 1; N <= 8; N++)
        for (const Shape& k : {Shape{N, 1, 1}, {N, 15, 3}, {N, 16, 65}, {N, 17, 1}, {N, 33, 3}, {N, 130, 65}})
            check_both_paths(ctx, k, seed++);
}

// Sums of small integers are exact in fp32 in any order: every path must give the exact sum, rounded once.
TEST(Linear, WholeNumbersAreExact) {
    cpu::Ctx ctx(2);
    for (const Shape& k : {Shape{3, 300, 37}, Shape{4, 65, 130}, Shape{77, 300, 37}, Shape{300, 33, 65}}) {
        Rng rng(3);
        const Layer layer(k, [&](size_t n) {
            std::vector<floatX> x(n);
            for (floatX& value : x) value = from_double<floatX>(rng.below(17) - 8);
            return x;
        });
        const int N = k.N, IC = k.IC, OC = k.OC;
        const View x{layer.inp.data(), IC, 1}, w{layer.weight.data(), IC, 1}, w_t{layer.weight.data(), 1, IC},
            dy{layer.dout.data(), OC, 1}, dy_t{layer.dout.data(), 1, OC};
        const auto rounded = [](const Product& p) {
            std::vector<floatX> y;
            for (const double value : p.value) y.push_back(from_double<floatX>(value));
            return y;
        };
        const std::vector<floatX> out = rounded(multiply(x, w_t, N, OC, IC, zero)),
                                  out_biased = rounded(
                                      multiply(x, w_t, N, OC, IC, [&](int, int o) { return as_double(layer.bias[o]); })),
                                  dinp = rounded(multiply(dy, w, N, IC, OC, zero));
        const Doubles dweight = multiply(dy_t, x, OC, IC, N, zero).value,
                      dweight_added = multiply(dy_t, x, OC, IC, N, [&](int o, int i) {
                                          return as_double(layer.dweight0[(size_t)o * IC + i]);
                                      }).value;
        for (const bool plain : {true, false}) {
            ctx.plain = plain;
            const Results r = layer.run(ctx);
            const std::string path = plain ? "plain" : "fast";
            for (size_t i = 0; i < out.size(); i++) ASSERT_EQ(as_double(r.out[i]), as_double(out[i])) << path << " out " << i;
            for (size_t i = 0; i < out.size(); i++)
                ASSERT_EQ(as_double(r.out_biased[i]), as_double(out_biased[i])) << path << " out with bias " << i;
            for (size_t i = 0; i < dinp.size(); i++)
                ASSERT_EQ(as_double(r.dinp[i]), as_double(dinp[i])) << path << " dinp " << i;
            expect_close(r.dweight_set, dweight, 0, 0, path + " dweight set");
            expect_close(r.dweight_add, dweight_added, 0, 0, path + " dweight added");
        }
    }
}

TEST(Linear, GoldenValues) {
    cpu::Ctx ctx(2);
    const auto values = [](std::initializer_list<double> x) {
        std::vector<floatX> y;
        for (const double value : x) y.push_back(from_double<floatX>(value));
        return y;
    };
    const std::vector<floatX> inp = values({1, 2, 3, -1, 0, 0.5}), weight = values({1, 0, -1, 2, 1, 4}),
                              bias = values({0.25, -3}), dout = values({1, -2, 0.5, 3});
    for (const bool plain : {true, false}) {
        ctx.plain = plain;
        Guarded<floatX> out(4), dinp(6);
        Guarded<real> dweight(6), dbias(2);
        cpu::linear_forward(ctx, out.data(), inp.data(), weight.data(), bias.data(), 2, 3, 2);
        cpu::linear_backward_input(ctx, dinp.data(), dout.data(), weight.data(), 2, 3, 2);
        cpu::linear_backward_weight(ctx, dweight.data(), dbias.data(), dout.data(), inp.data(), 2, 3, 2, Acc::Set);
        expect_close(out, {-1.75, 13, -1.25, -3}, 0, 0, "out");
        expect_close(dinp, {-3, -2, -9, 6.5, 3, 11.5}, 0, 0, "dinp");
        expect_close(dweight, {0.5, 2, 3.25, -5, -4, -4.5}, 0, 0, "dweight");
        expect_close(dbias, {1.5, 1}, 0, 0, "dbias");
    }
}

TEST(Linear, NanStaysInItsRow) {
    cpu::Ctx ctx(2);
    for (const int N : {3, 21}) {
        const Shape k{N, 37, 19};
        Layer layer = random_layer(k, 4);
        layer.inp[k.IC + 36] = layer.dout[k.OC + 18] = from_double<floatX>(std::nan(""));
        for (const bool plain : {true, false}) {
            ctx.plain = plain;
            const Results r = layer.run(ctx);
            for (int i = 0; i < N * k.OC; i++) ASSERT_EQ(std::isnan(as_double(r.out[i])), i / k.OC == 1) << "out " << i;
            for (int i = 0; i < N * k.IC; i++) ASSERT_EQ(std::isnan(as_double(r.dinp[i])), i / k.IC == 1) << "dinp " << i;
            for (int i = 0; i < k.OC * k.IC; i++)
                ASSERT_EQ(std::isnan(r.dweight_set[i]), i / k.IC == 18 || i % k.IC == 36) << "dweight " << i;
            for (int o = 0; o < k.OC; o++) ASSERT_EQ(std::isnan(r.dbias_set[o]), o == 18) << "dbias " << o;
        }
    }
}

// Tensors start anywhere in the parameters' buffer.
TEST(Linear, BuffersNeedNoAlignment) {
    cpu::Ctx ctx(2);
    for (const int N : {2, 35}) {
        const int IC = 65, OC = 33;
        const Layer layer = random_layer({N, IC, OC}, 5);
        Results r = layer.run(ctx);
        const auto shifted = [](const auto& x) {
            using T = std::decay_t<decltype(x[0])>;
            std::vector<T> y(x.size() + 1);
            std::copy(x.data(), x.data() + x.size(), y.data() + 1);
            return y;
        };
        const std::vector<floatX> inp = shifted(layer.inp), weight = shifted(layer.weight), bias = shifted(layer.bias),
                                  dout = shifted(layer.dout);
        Guarded<floatX> out(1 + N * OC), dinp(1 + N * IC);
        Guarded<real> dweight(shifted(layer.dweight0)), dbias(shifted(layer.dbias0));
        cpu::linear_forward(ctx, &out[1], &inp[1], &weight[1], &bias[1], N, IC, OC);
        cpu::linear_backward_input(ctx, &dinp[1], &dout[1], &weight[1], N, IC, OC);
        cpu::linear_backward_weight(ctx, &dweight[1], &dbias[1], &dout[1], &inp[1], N, IC, OC, Acc::Add);
        std::copy_n(&out[1], N * OC, r.out_biased.data());
        std::copy_n(&dinp[1], N * IC, r.dinp.data());
        std::copy_n(&dweight[1], OC * IC, r.dweight_add.data());
        std::copy_n(&dbias[1], OC, r.dbias_add.data());
        layer.check(r);
    }
}

// ---- matrix units -----------------------------------------------------------------------------------------------------------
// Every available unit, including AMX's emulation.

// Panels of 256 and 512 columns, slabs of 1024 and 2048, k in parts of 512, 640 and 768, one or more strips of 64 columns,
// tiles of 16 and 32, rows shared by threads if there are few columns: below, at and above each. At the end, sizes that do
// not fill words or tiles.
const Shape of_units[] = {{5, 32, 16},     {16, 64, 64},   {17, 96, 80},   {33, 1056, 48},  {128, 64, 112},
                          {129, 544, 144}, {40, 32, 1088}, {300, 32, 48},  {1100, 64, 272}, {270, 1056, 32},
                          {2100, 32, 48},  {40, 2112, 32}, {70, 800, 192}, {40, 768, 64},   {70, 64, 2112},
                          {2100, 64, 544}, {40, 33, 64},   {40, 64, 33},   {37, 48, 40},    {270, 17, 290}};

const std::vector<cpu::AnyUnit> units = all_matrix_units(cpu::Products::layers);

// c = a b, or c += a b, with operands packed by hand.
template <class E>
void check_products(const cpu::MatrixUnit<E>& unit) {
    for (const int M : {16, 32, 48, 64})
        for (const int N : {16, 48, 64})
            for (const int K : {32, 96, 16 * cpu::of_word<E>}) {
                const int lda = K + 6, ldc = N + 3, b_rows = K + 32;
                Rng rng(12);
                const Guarded<E> a(rng.normals<E>((size_t)M * lda), "a"), b(rng.normals<E>((size_t)K * N), "b");
                std::vector<E> packed((size_t)b_rows * N, E(std::nanf("")));
                for (int k = 0; k < K; k++)
                    for (int n = 0; n < N; n++) packed[cpu::right_index<E>(k, n, b_rows)] = b[(size_t)k * N + n];
                using cpu::Streamed;
                for (const auto& [add, streamed] : {std::pair(false, Streamed::neither),
                                                    {true, Streamed::neither},
                                                    {false, Streamed::left},
                                                    {true, Streamed::left},
                                                    {false, Streamed::right},
                                                    {true, Streamed::right}}) {
                    Guarded<float> c(std::vector<float>((size_t)M * ldc, add ? 0.5f : std::nanf("")), "c");
                    unit.begin();
                    unit.product(c.data(), ldc, a.data(), lda, packed.data(), b_rows, M, N, K, add, streamed, nullptr);
                    unit.end();
                    for (int m = 0; m < M; m++)
                        for (int n = 0; n < N; n++) {
                            double sum = add ? 0.5 : 0, magnitude = sum;
                            for (int k = 0; k < K; k++) {
                                const double x = as_double(a[(size_t)m * lda + k]) * as_double(b[(size_t)k * N + n]);
                                sum += x;
                                magnitude += std::abs(x);
                            }
                            ASSERT_NEAR(c[(size_t)m * ldc + n], sum, (K + 2) * u * magnitude) << m << " " << n;
                        }
                }
            }
}

TEST(MatrixUnits, ProductsOfPackedOperands) {
    for (const cpu::AnyUnit unit : units) {
        SCOPED_TRACE(name_of(unit));
        std::visit([](const auto* u) { check_products(*u); }, unit);
    }
}

TEST(MatrixUnits, LinearLayers) {
    for (const cpu::AnyUnit unit : units) {
        SCOPED_TRACE(name_of(unit));
        uint64_t seed = 40;
        for (const Shape& k : of_units) {
            const Layer layer = random_layer(k, seed++);
            Results first;
            for (const int threads : {1, 2, 7}) {
                cpu::Ctx ctx(threads);
                ctx.layers = unit;
                const Results r = layer.run(ctx);
                if (threads == 1) {
                    layer.check(r);
                    first = r;
                } else expect_same_results(r, first, "with more threads");
            }
        }
    }
}

#if !defined(PRECISION_FP32)
// Products of bf16 are exact in fp32, and fp32 units sum them in the same order: any of them gives the same bits, with
// fused multiply-adds or without.
TEST(MatrixUnits, SameBitsOfBf16OnUnitsOfFp32) {
    for (const Shape& k : {Shape{40, 1056, 80}, Shape{270, 32, 290}}) {
        const Layer layer = random_layer(k, 50);
        cpu::Ctx ctx(2);
        ctx.layers = cpu::portable();
        const Results portable = layer.run(ctx);
        for (const cpu::AnyUnit unit : units) {
            if (!std::holds_alternative<const cpu::MatrixUnit<float>*>(unit)) continue;
            SCOPED_TRACE(name_of(unit));
            ctx.layers = unit;
            expect_same_results(layer.run(ctx), portable, "on another unit");
        }
    }
}
#endif

// Between 2^-40 and 2^40, so that splitting into bf16 parts must handle each number's own exponent.
TEST(MatrixUnits, NumbersOfAllSizes) {
    for (const cpu::AnyUnit unit : units) {
        SCOPED_TRACE(name_of(unit));
        Rng rng(61);
        cpu::Ctx ctx(2);
        ctx.layers = unit;
        for (const Shape& k : {Shape{37, 48, 40}, Shape{70, 1056, 64}}) {
            const Layer layer(k, [&](size_t n) {
                std::vector<floatX> x = rng.normals<floatX>(n);
                for (floatX& value : x) value = from_double<floatX>(std::ldexp(as_double(value), (int)rng.below(81) - 40));
                return x;
            });
            layer.check(layer.run(ctx));
        }
    }
}

// A product with fused ops has the bits of the separate ops. N: several parts, and few rows; IC: one slab and several; OC
// and F: full strips, and partial ones.
TEST(MatrixUnits, WhatAProductTakesAlong) {
    for (const cpu::AnyUnit unit : units)
        for (const Shape& k : {Shape{150, 64, 128}, Shape{3, 40, 128}, Shape{37, 1100, 192}, Shape{290, 96, 80}}) {
            SCOPED_TRACE(testing::Message() << name_of(unit) << ", N " << k.N << ", IC " << k.IC << ", OC " << k.OC);
            const int N = k.N, IC = k.IC, OC = k.OC, F = OC / 2;
            const Layer layer = random_layer(k, 60);
            const floatX *inp = layer.inp.data(), *weight = layer.weight.data(), *dout = layer.dout.data();
            Rng rng(62);
            const std::vector<floatX> rows = rng.normals<floatX>((size_t)N * OC), pre = rng.normals<floatX>((size_t)N * IC),
                                      gate_up = rng.normals<floatX>((size_t)N * 2 * IC);
            cpu::Ctx ctx(2);
            ctx.layers = unit;
            Guarded<floatX> product((size_t)N * OC), wide((size_t)N * OC), wide_alone((size_t)N * OC), narrow((size_t)N * F),
                narrow_alone((size_t)N * F);
            for (const floatX* bias : {layer.bias.data(), (const floatX*)nullptr}) {
                cpu::linear_forward(ctx, product.data(), inp, weight, bias, N, IC, OC);

                Guarded<floatX> kept((size_t)N * OC);
                cpu::linear_gelu_forward(ctx, wide.data(), kept.data(), inp, weight, bias, N, IC, OC);
                cpu::activation_forward(ctx, wide_alone.data(), product.data(), N, OC, Activation::gelu);
                expect_same_bits(kept, product, "what GeLU is given");
                expect_same_bits(wide, wide_alone, "GeLU");

                cpu::linear_swiglu_forward(ctx, narrow.data(), kept.data(), inp, weight, bias, N, IC, F);
                cpu::activation_forward(ctx, narrow_alone.data(), product.data(), N, F, Activation::swiglu);
                expect_same_bits(kept, product, "gate and up");
                expect_same_bits(narrow, narrow_alone, "SwiGLU");

                cpu::linear_residual_forward(ctx, wide.data(), rows.data(), inp, weight, bias, N, IC, OC);
                cpu::residual_forward(ctx, wide_alone.data(), rows.data(), product.data(), (size_t)N * OC);
                expect_same_bits(wide, wide_alone, "residual");

                for (const int HS : {4, 16, 64, 128}) {
                    const int heads = OC / HS, NKV = heads / 3, NH = heads - 2 * NKV;
                    if (heads * HS != OC || NH < 1) continue;
                    std::vector<real> angles;
                    rope_table(angles, 60, HS, 10000);
                    const std::vector<int> positions = rng.integers(N, 0, 60);
                    const Rope rope = {positions.data(), angles.data(), HS};
                    const AttentionShape shape = {1, N, NH, NKV, HS};
                    cpu::linear_rope_forward(ctx, wide.data(), inp, weight, bias, IC, rope, shape);
                    Guarded<floatX> turned(product.values());
                    cpu::rope_forward(ctx, turned.data(), rope, shape);
                    expect_same_bits(wide, turned, "rotary positions");
                }
            }
            Guarded<floatX> dinp((size_t)N * IC), dpre((size_t)N * IC), dpre_alone((size_t)N * IC), dact((size_t)N * IC),
                dgate_up((size_t)N * 2 * IC), dgate_up_alone((size_t)N * 2 * IC);
            cpu::linear_backward_input(ctx, dinp.data(), dout, weight, N, IC, OC);

            cpu::linear_gelu_backward_input(ctx, dpre.data(), dout, weight, pre.data(), N, IC, OC);
            cpu::activation_backward(ctx, dpre_alone.data(), dinp.data(), pre.data(), N, IC, Activation::gelu);
            expect_same_bits(dpre, dpre_alone, "GeLU's gradient");

            cpu::linear_swiglu_backward_input(ctx, dgate_up.data(), dact.data(), dout, weight, gate_up.data(), N, IC, OC);
            cpu::activation_backward(ctx, dgate_up_alone.data(), dinp.data(), gate_up.data(), N, IC, Activation::swiglu);
            expect_same_bits(dgate_up, dgate_up_alone, "SwiGLU's gradient");
        }
}

// ---- determinism and the cache --------------------------------------------------------------------------------------------
TEST(Linear, SameBitsOnEveryRun) {
    for (const Shape& k : {Shape{1, 130, 65}, Shape{4, 33, 70}, Shape{131, 257, 129}}) {
        const Layer layer = random_layer(k, 7);
        for (const bool plain : {true, false}) {
            cpu::Ctx first(2), second(2);
            first.plain = second.plain = plain;
            const Results r = layer.run(first);
            expect_same_results(layer.run(first), r, "in a second run");
            expect_same_results(layer.run(second), r, "compiled again");
        }
    }
}

// Guaranteed for the plain loops, for few rows and for bias gradients.
TEST(Linear, SameBitsForAnyNumberOfThreads) {
    for (const Shape& k : {Shape{2, 130, 65}, Shape{67, 130, 195}}) {
        const Layer layer = random_layer(k, 8);
        const auto run = [&](int threads, bool plain) {
            cpu::Ctx ctx(threads);
            ctx.plain = plain;
            return layer.run(ctx);
        };
        const Results plain = run(1, true), fast = run(1, false);
        for (const int threads : {2, 7}) {
            expect_same_results(run(threads, true), plain, "with more threads");
            const Results r = run(threads, false);
            expect_same_bits(r.dbias_set, fast.dbias_set, "dbias set");
            expect_same_bits(r.dbias_add, fast.dbias_add, "dbias added");
            if (k.N > cpu::detail::few_rows) continue;
            expect_same_bits(r.out, fast.out, "out");
            expect_same_bits(r.out_biased, fast.out_biased, "out with bias");
        }
    }
}

// Each of a few rows is computed as if it were the only one, so a sequence does not depend on others in its batch: up to
// few_rows, on a tile unit up to half as many, or as many as requested.
TEST(Linear, FewRowsDoNotDependOnEachOther) {
    const int IC = 131, OC = 67, few = cpu::detail::few_rows;
    for (const cpu::AnyUnit& unit : test::all_matrix_units(cpu::Products::layers))
        for (const bool steady : {false, true}) {
            cpu::Ctx ctx(2);
            ctx.layers = unit;
            const bool tiles = !cpu::detail::takes_few_rows(ctx, few);
            const int N = steady ? 3 * few : tiles ? few / 2 : few;
            ctx.steady_rows = steady ? N : 0;
            const Layer layer = random_layer({N, IC, OC}, 9);
            const Results all = layer.run(ctx);
            for (int n = 0; n < N; n++) {
                Guarded<floatX> out(OC);
                cpu::linear_forward(ctx, out.data(), &layer.inp[n * IC], layer.weight.data(), layer.bias.data(), 1, IC, OC);
                expect_same_bits(out, std::vector<floatX>(&all.out_biased[n * OC], &all.out_biased[n * OC] + OC), "row");
            }
        }
}

// Two or four threads each compute about the same number of a result's elements in their own tasks (team.h), even if the
// last panel of columns is narrow.
TEST(Linear, ThreadsShareAResultEvenly) {
    const int N = 2048;
    for (const int threads : {2, 4})
        for (const int C : {192, 512, 640, 768, 1600, 2752}) {
            const cpu::detail::gemm::Partition shares(N, C, 256, threads, false, 64);
            const int tasks = shares.panels * shares.parts;
            int64_t busiest = 0, all = 0;
            for (int owner = 0; owner < threads; owner++) {
                int64_t numbers = 0;
                for (int task = tasks * owner / threads; task < tasks * (owner + 1) / threads; task++) {
                    const int c0 = shares.panel(task) * shares.columns, n0 = shares.part(task) * shares.rows;
                    numbers += (int64_t)std::min(shares.columns, C - c0) * std::min(shares.rows, N - n0);
                }
                busiest = std::max(busiest, numbers);
                all += numbers;
            }
            EXPECT_EQ(all, (int64_t)N * C) << C;
            EXPECT_LE((double)busiest * threads, 1.05 * (double)all) << C << " columns, " << threads << " threads";
        }
}

}  // namespace test_matmul
