// Linear layers on the GPU, compared with sums in double and with the plain loops of cpu::; and how their algorithms are
// chosen, saved to a file and loaded.
// Bounds as in test/test_matmul.cpp: K products and a start value, each term rounded at most K + 1 times, in any order: (K
// + 2) u times the sum of magnitudes, u = 2^-24; doubled on a GPU, whose tensor cores truncate. The result is that sum
// rounded once, so it is between the rounded ends of the interval.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "../../llmc/cpu/matmul.h"
#include "../../llmc/gpu/matmul.cuh"
#include "../files.h"
#include "device_memory.h"
#include "library.h"

namespace test_gpu_matmul {

using namespace test;

constexpr double u = roundoff<float>;
// ThreadSanitizer takes half a second for a block of the bias gradient: it runs only some of the shapes.
#ifdef EMU_TSAN
constexpr bool few_shapes = true;
#else
constexpr bool few_shapes = false;
#endif

struct Shape {
    int N, IC, OC;
};
// Made by Layer::run with separate bias gradients: forward without and with a bias, backward_input, backward_weight with Set;
// for either of two parts of the weight's rows Add, Set, and Set in bf16 (in an fp32 build equal to the Set before it).
constexpr int products = std::is_same<floatX, bf16>::value ? 10 : 8;
// Among these the products of fp32 gradients with a bias, whose sums may be fused: one set, two added, in fp32 two set.
constexpr int products_with_bias = std::is_same<floatX, bf16>::value ? 3 : 5;
struct Results {
    std::vector<floatX> out, out_biased, dinp;
    std::vector<float> dweight_set, dbias_set, dweight_add, dbias_add, dweight_alone;
    std::vector<floatX> dweight_stored;  // like gradients in bf16
    std::vector<float> dbias_beside;
};

// ---- reference -------------------------------------------------------------------------------------------------------------
// sums[m][n] = start(m, n) + sum_k a(m, k) b(k, n), with the sums of magnitudes that bound its error.
using Element = std::function<double(int, int)>;
template <class Buffer>
void expect_product(const Buffer& actual, int M, int N, int K, const Element& a, const Element& b, const Element& start,
                    const std::string& name) {
    using T = std::decay_t<decltype(actual[0])>;
    Doubles value((size_t)M * N), allowed((size_t)M * N);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            double sum = start(m, n), magnitude = std::abs(sum);
            for (int k = 0; k < K; k++) {
                const double term = a(m, k) * b(k, n);
                sum += term;
                magnitude += std::abs(term);
            }
            // The library may round a product to D's type before adding a bias of that type.
            const double before = sum - start(m, n),
                         rounded = start(m, n) == 0 || std::is_same<T, float>::value ? 0 : std::abs(before) * roundoff<T>;
            const double error = 2 * (K + 2) * u * magnitude + rounded + 1e-35;
            const double low = as_double(from_double<T>(sum - error)), high = as_double(from_double<T>(sum + error));
            const size_t i = (size_t)m * N + n;
            value[i] = sum;
            allowed[i] = std::max(sum - low, high - sum);
        }
    expect_close(actual, value, allowed, name);
}
double zero(int, int) { return 0; }

// ---- one layer -------------------------------------------------------------------------------------------------------------
// Each buffer starts `shift` elements later, so that pointers are only aligned to elements.
template <class T>
std::vector<T> shifted(const std::vector<T>& x, size_t shift) {
    std::vector<T> y(shift, from_double<T>(std::nan("")));
    y.insert(y.end(), x.begin(), x.end());
    return y;
}

struct Layer {
    Shape k;
    std::vector<floatX> inp, weight, bias, dout;
    std::vector<float> dweight0, dbias0;  // initial values for Acc::Add

    Layer(const Shape& shape, uint64_t seed) : k(shape) {
        Rng rng(seed);
        inp = rng.normals<floatX>((size_t)k.N * k.IC);
        weight = rng.normals<floatX>((size_t)k.OC * k.IC);
        bias = rng.normals<floatX>((size_t)k.OC);
        dout = rng.normals<floatX>((size_t)k.N * k.OC);
        dweight0 = rng.normals<float>((size_t)k.OC * k.IC);
        dbias0 = rng.normals<float>((size_t)k.OC);
    }

    Results run(gpu::Ctx& ctx, size_t shift = 0) const {
        const int N = k.N, IC = k.IC, OC = k.OC;
        const DeviceMemory<floatX> x(shifted(inp, shift), "inp"), w(shifted(weight, shift), "weight"),
            b(shifted(bias, shift), "bias"), dy(shifted(dout, shift), "dout");
        DeviceMemory<floatX> out(shift + (size_t)N * OC, "out"), out_biased(shift + (size_t)N * OC, "out with bias"),
            dinp(shift + (size_t)N * IC, "dinp");
        DeviceMemory<float> dweight_set(shift + (size_t)OC * IC, "dweight set"), dbias_set(shift + (size_t)OC, "dbias set"),
            dweight_add(shifted(dweight0, shift), "dweight added"), dbias_add(shifted(dbias0, shift), "dbias added"),
            dweight_alone(shift + (size_t)OC * IC, "dweight without dbias");
        DeviceMemory<floatX> dweight_stored(shift + (size_t)OC * IC, "dweight in bf16");
        DeviceMemory<float> dbias_beside(shift + (size_t)OC, "dbias beside it");
        const auto at = [&](auto& buffer) { return buffer.p() + shift; };
        gpu::linear_forward(ctx, at(out), at(x), at(w), nullptr, N, IC, OC);
        gpu::linear_forward(ctx, at(out_biased), at(x), at(w), at(b), N, IC, OC);
        gpu::linear_backward_input(ctx, at(dinp), at(dy), at(w), N, IC, OC);
        gpu::linear_backward_weight(ctx, at(dweight_set), at(dbias_set), at(dy), at(x), N, IC, OC, Acc::Set);
        for (int row = 0, rows = std::max(1, OC / 3); row < OC; row += rows, rows = OC - row) {
            const auto part = [&](const Elements& dweight, float* dbias, Acc acc) {
                gpu::linear_backward_weight_rows(ctx, dweight.from((size_t)row * IC), dbias ? dbias + row : nullptr,
                                                 {at(dy) + row, OC}, at(x), N, IC, rows, acc);
            };
            part(at(dweight_add), at(dbias_add), Acc::Add);
            part(at(dweight_alone), nullptr, Acc::Set);
            part(at(dweight_stored), at(dbias_beside), Acc::Set);
        }
        const auto get = [&](const auto& buffer) {
            auto values = buffer.get();
            values.erase(values.begin(), values.begin() + (std::ptrdiff_t)shift);
            return values;
        };
        EXPECT_EQ(x.get().size(), shift + inp.size());  // waits, and checks the guards
        return {get(out),         get(out_biased), get(dinp),          get(dweight_set),    get(dbias_set),
                get(dweight_add), get(dbias_add),  get(dweight_alone), get(dweight_stored), get(dbias_beside)};
    }

    void check(const Results& r) const {
        const int N = k.N, IC = k.IC, OC = k.OC;
        SCOPED_TRACE(testing::Message() << "N " << N << ", IC " << IC << ", OC " << OC);
        const auto matrix = [](const auto& x, int columns) {
            return [&x, columns](int i, int j) { return as_double(x[(size_t)i * columns + j]); };
        };
        const auto transposed = [](const auto& x, int columns) {
            return [&x, columns](int i, int j) { return as_double(x[(size_t)j * columns + i]); };
        };
        const auto one = [](int, int) { return 1.0; };
        expect_product(r.out, N, OC, IC, matrix(inp, IC), transposed(weight, IC), zero, "out");
        expect_product(
            r.out_biased, N, OC, IC, matrix(inp, IC), transposed(weight, IC), [&](int, int o) { return as_double(bias[o]); },
            "out with bias");
        expect_product(r.dinp, N, IC, OC, matrix(dout, OC), matrix(weight, IC), zero, "dinp");
        for (const auto* dweight : {&r.dweight_set, &r.dweight_alone})
            expect_product(*dweight, OC, IC, N, transposed(dout, OC), matrix(inp, IC), zero, "dweight set");
        expect_product(r.dweight_stored, OC, IC, N, transposed(dout, OC), matrix(inp, IC), zero, "dweight in bf16");
        expect_product(r.dweight_add, OC, IC, N, transposed(dout, OC), matrix(inp, IC), matrix(dweight0, IC), "dweight added");
        for (const auto* dbias : {&r.dbias_set, &r.dbias_beside})
            expect_product(*dbias, OC, 1, N, transposed(dout, OC), one, zero, "dbias set");
        expect_product(
            r.dbias_add, OC, 1, N, transposed(dout, OC), one, [&](int o, int) { return dbias0[o]; }, "dbias added");
    }
};

void expect_same_results(const Results& a, const Results& b, const std::string& when) {
    expect_same_bits(a.out, b.out, "out " + when);
    expect_same_bits(a.out_biased, b.out_biased, "out with bias " + when);
    expect_same_bits(a.dinp, b.dinp, "dinp " + when);
    expect_same_bits(a.dweight_set, b.dweight_set, "dweight set " + when);
    expect_same_bits(a.dweight_add, b.dweight_add, "dweight added " + when);
    expect_same_bits(a.dweight_stored, b.dweight_stored, "dweight in bf16 " + when);
    expect_same_bits(a.dweight_alone, b.dweight_alone, "dweight without dbias " + when);
    expect_same_bits(a.dbias_set, b.dbias_set, "dbias set " + when);
    expect_same_bits(a.dbias_add, b.dbias_add, "dbias added " + when);
}

// ---- values ----------------------------------------------------------------------------------------------------------------
TEST(GpuLinear, OddShapes) {
    gpu::Ctx ctx;
    const Shape shapes[] = {{1, 1, 1},    {9, 1, 1},    {1, 7, 1},    {1, 1, 9},     {5, 7, 300},
                            {17, 65, 3},  {65, 17, 33}, {33, 3, 65},  {64, 64, 64},  {63, 16, 64},
                            {2, 130, 65}, {4, 33, 70},  {70, 24, 40}, {129, 57, 65}, {48, 130, 260}};
    uint64_t seed = 1;
    for (const Shape& k : shapes) {
        seed++;
        if (few_shapes && seed % 5) continue;
        const Layer layer(k, seed);
        layer.check(layer.run(ctx));
    }
}

// Tensors start anywhere in the parameters' buffer.
TEST(GpuLinear, BuffersNeedNoAlignment) {
    gpu::Ctx ctx;
    for (const Shape& k : {Shape{35, 64, 32}, Shape{64, 33, 65}, Shape{2, 40, 24}}) {
        const Layer layer(k, 5);
        for (const size_t shift : {1, 2, 3, 4}) layer.check(layer.run(ctx, shift));
        if (few_shapes) break;
    }
}

// Bias gradients fused into the product and from a separate kernel.
TEST(GpuLinear, BiasGradientFusedAndApart) {
    const Shape shape = few_shapes ? Shape{9, 16, 8} : Shape{150, 24, 40};
    int runs = 0;
    for (const auto fusion : {gpu::Fusion::always, gpu::Fusion::never, gpu::Fusion::always}) {
        const bool refused = runs++ == 2;  // by the library
        if (refused && !library_is_emulated) break;
        const Refusals refusals(refused);
        gpu::Ctx ctx;
        gpu::use_gemm_cache(ctx, "", false);
        ctx.plans->fusion = fusion;
        const Layer layer(shape, 5);
        layer.check(layer.run(ctx));
        int fused = 0;
        for (const auto& [key, plan] : ctx.plans->plans) fused += key.epilogue == CUBLASLT_EPILOGUE_BGRADB && !plan->apart;
        const int expected = fusion == gpu::Fusion::always && !refused ? products_with_bias : 0;
        EXPECT_OF_LIBRARY(fused == expected) << fused << " bias gradients are fused, not " << expected;
    }
}

// The product added to the residual stream by the library, and by a separate kernel. Integers, so that nothing is rounded.
TEST(GpuLinear, ResidualFusedAndApart) {
    constexpr int N = 24, IC = 16, OC = 40;
    std::vector<floatX> inp, weight, bias, residual;
    std::vector<double> expected;
    for (int i = 0; i < N * IC; i++) inp.push_back((floatX)(float)(i % 3 - 1));
    for (int i = 0; i < OC * IC; i++) weight.push_back((floatX)(float)(i % 5 - 2));
    for (int i = 0; i < OC; i++) bias.push_back((floatX)(float)(i % 7));
    for (int i = 0; i < N * OC; i++) {
        residual.push_back((floatX)(float)(i % 11 - 5));
        double sum = i % 11 - 5 + i % OC % 7;
        for (int k = 0; k < IC; k++) sum += (double)inp[i / OC * IC + k] * (double)weight[i % OC * IC + k];
        expected.push_back(sum);
    }
    const DeviceMemory<floatX> x(inp), w(weight), b(bias), r(residual);
    for (const auto fusion : {gpu::Fusion::always, gpu::Fusion::never}) {
        gpu::Ctx ctx;
        gpu::use_gemm_cache(ctx, "", false);
        ctx.plans->fusion = fusion;
        DeviceMemory<floatX> out(N * OC);
        gpu::linear_residual_forward(ctx, out.p(), r.p(), x.p(), w.p(), b.p(), N, IC, OC);
        expect_close(out.get(), expected, 0, 0, "out");
        int fused = 0;
        for (const auto& [key, plan] : ctx.plans->plans) fused += key.add && !plan->apart;
        EXPECT_OF_LIBRARY(fused == (fusion == gpu::Fusion::always)) << fused << " products are fused";
    }
}

TEST(GpuLinear, GoldenValues) {
    gpu::Ctx ctx;
    const auto values = [](std::initializer_list<double> x) {
        std::vector<floatX> y;
        for (const double value : x) y.push_back(from_double<floatX>(value));
        return y;
    };
    const DeviceMemory<floatX> inp(values({1, 2, 3, -1, 0, 0.5})), weight(values({1, 0, -1, 2, 1, 4})),
        bias(values({0.25, -3})), dout(values({1, -2, 0.5, 3}));
    DeviceMemory<floatX> out(4), dinp(6);
    DeviceMemory<float> dweight(6), dbias(2);
    gpu::linear_forward(ctx, out.p(), inp.p(), weight.p(), bias.p(), 2, 3, 2);
    gpu::linear_backward_input(ctx, dinp.p(), dout.p(), weight.p(), 2, 3, 2);
    gpu::linear_backward_weight(ctx, dweight.p(), dbias.p(), dout.p(), inp.p(), 2, 3, 2, Acc::Set);
    expect_close(out.get(), {-1.75, 13, -1.25, -3}, 0, 0, "out");
    expect_close(dinp.get(), {-3, -2, -9, 6.5, 3, 11.5}, 0, 0, "dinp");
    expect_close(dweight.get(), {0.5, 2, 3.25, -5, -4, -4.5}, 0, 0, "dweight");
    expect_close(dbias.get(), {1.5, 1}, 0, 0, "dbias");
}

// Sums of -1, 0 and 1 are exact in any order, and in bf16 below 257: the same bits as the CPU's plain loops.
TEST(GpuLinear, WholeNumbersGiveTheCpusBits) {
    gpu::Ctx ctx;
    cpu::Ctx host(1);
    host.plain = true;
    for (const Shape& k : {Shape{3, 130, 37}, Shape{77, 96, 40}, Shape{130, 33, 65}}) {
        Layer layer(k, 3);
        Rng rng(3);
        for (auto* x : {&layer.inp, &layer.weight, &layer.bias, &layer.dout})
            for (floatX& value : *x) value = from_double<floatX>(rng.below(3) - 1);
        for (auto* x : {&layer.dweight0, &layer.dbias0})
            for (float& value : *x) value = (float)(rng.below(17) - 8);
        const Results r = layer.run(ctx);
        std::vector<floatX> out(r.out.size()), out_biased(r.out.size()), dinp(r.dinp.size());
        std::vector<float> dweight(layer.dweight0), dbias(layer.dbias0);
        const int N = k.N, IC = k.IC, OC = k.OC;
        cpu::linear_forward(host, out.data(), layer.inp.data(), layer.weight.data(), nullptr, N, IC, OC);
        cpu::linear_forward(host, out_biased.data(), layer.inp.data(), layer.weight.data(), layer.bias.data(), N, IC, OC);
        cpu::linear_backward_input(host, dinp.data(), layer.dout.data(), layer.weight.data(), N, IC, OC);
        cpu::linear_backward_weight(host, dweight.data(), dbias.data(), layer.dout.data(), layer.inp.data(), N, IC, OC,
                                    Acc::Add);
        for (size_t i = 0; i < out.size(); i++) ASSERT_EQ(as_double(r.out[i]), as_double(out[i])) << "out " << i;
        for (size_t i = 0; i < out.size(); i++)
            ASSERT_EQ(as_double(r.out_biased[i]), as_double(out_biased[i])) << "biased " << i;
        for (size_t i = 0; i < dinp.size(); i++) ASSERT_EQ(as_double(r.dinp[i]), as_double(dinp[i])) << "dinp " << i;
        for (size_t i = 0; i < dweight.size(); i++) ASSERT_EQ(r.dweight_add[i], dweight[i]) << "dweight " << i;
        for (size_t i = 0; i < dbias.size(); i++) ASSERT_EQ(r.dbias_add[i], dbias[i]) << "dbias " << i;
    }
}

TEST(GpuLinear, NanStaysInItsRow) {
    gpu::Ctx ctx;
    const Shape k{21, 37, 19};
    Layer layer(k, 4);
    layer.inp[(size_t)k.IC + 36] = layer.dout[(size_t)k.OC + 18] = from_double<floatX>(std::nan(""));
    const Results r = layer.run(ctx);
    for (int i = 0; i < k.N * k.OC; i++) ASSERT_EQ(std::isnan(as_double(r.out[(size_t)i])), i / k.OC == 1) << "out " << i;
    for (int i = 0; i < k.N * k.IC; i++) ASSERT_EQ(std::isnan(as_double(r.dinp[(size_t)i])), i / k.IC == 1) << "dinp " << i;
    for (int i = 0; i < k.OC * k.IC; i++)
        ASSERT_EQ(std::isnan(r.dweight_set[(size_t)i]), i / k.IC == 18 || i % k.IC == 36) << "dweight " << i;
    for (int o = 0; o < k.OC; o++) ASSERT_EQ(std::isnan(r.dbias_set[(size_t)o]), o == 18) << "dbias " << o;
}

// dweight accumulates in fp32, where bf16 would lose bits: 8 to 65536.
TEST(GpuLinear, GradientsAccumulateInFp32) {
    gpu::Ctx ctx;
    const std::vector<floatX> ones(64, from_double<floatX>(1));
    const DeviceMemory<floatX> inp(ones), dout(ones);
    DeviceMemory<float> dweight(std::vector<float>(64, 65536)), dbias(std::vector<float>(8, 65536));
    for (int i = 0; i < 3; i++) gpu::linear_backward_weight(ctx, dweight.p(), dbias.p(), dout.p(), inp.p(), 8, 8, 8, Acc::Add);
    expect_close(dweight.get(), Doubles(64, 65560), 0, 0, "dweight");
    expect_close(dbias.get(), Doubles(8, 65560), 0, 0, "dbias");
}

// One part, several parts, a short last part; columns that are a multiple of a pack, and others.
TEST(GpuLinear, BiasGradientOfManyRows) {
    gpu::Ctx ctx;
    for (const int N : {1, 15, 16, 63, 64, 127, 128, 641, 1000})
        for (const int OC : {1, 8, 13, 264, 519}) {
            if (few_shapes && !(N == 641 && OC == 13) && !(N == 128 && OC == 264)) continue;
            SCOPED_TRACE(testing::Message() << "N " << N << ", OC " << OC);
            Rng rng((uint64_t)(N + OC));
            const std::vector<floatX> values = rng.normals<floatX>((size_t)N * OC);
            const std::vector<float> before = rng.normals<float>((size_t)OC);
            const DeviceMemory<floatX> dout(values, "dout");
            DeviceMemory<float> set((size_t)OC, "set"), added(before, "added");
            gpu::detail::bias_backward(ctx, set.p(), dout.p(), OC, N, OC, Acc::Set);
            gpu::detail::bias_backward(ctx, added.p(), dout.p(), OC, N, OC, Acc::Add);
            const auto dout_t = [&](int o, int n) { return as_double(values[(size_t)n * OC + o]); };
            const auto one = [](int, int) { return 1.0; };
            expect_product(set.get(), OC, 1, N, dout_t, one, zero, "set");
            expect_product(
                added.get(), OC, 1, N, dout_t, one, [&](int o, int) { return before[(size_t)o]; }, "added");
        }
}

// The allocation ends with dout, so that AddressSanitizer (or compute-sanitizer) detects reads past the end.
TEST(GpuLinear, BiasGradientReadsNothingBehindItsInput) {
    gpu::Ctx ctx;
    for (const int OC : {5, 16, 33}) {
        const int N = 65;
        const std::vector<floatX> ones((size_t)N * OC, from_double<floatX>(1));
        floatX* dout;
        CUDA(cudaMalloc(&dout, ones.size() * sizeof(floatX)));
        CUDA(cudaMemcpy(dout, ones.data(), ones.size() * sizeof(floatX), cudaMemcpyHostToDevice));
        CUDA(cudaDeviceSynchronize());
        DeviceMemory<float> dbias((size_t)OC);
        gpu::detail::bias_backward(ctx, dbias.p(), dout, OC, N, OC, Acc::Set);
        expect_close(dbias.get(), Doubles((size_t)OC, N), 0, 0, "dbias");
        CUDA(cudaFree(dout));
    }
}

TEST(GpuLinear, SameBitsOnEveryRun) {
    for (const Shape& k : {Shape{1, 130, 65}, Shape{131, 64, 264}}) {
        if (few_shapes && k.OC > 100) continue;
        const Layer layer(k, 7);
        gpu::Ctx first, second;
        const Results r = layer.run(first);
        expect_same_results(r, layer.run(first), "again");
        expect_same_results(r, layer.run(second), "in another context");
    }
}

TEST(GpuLinearDeathTest, EmptyProducts) {
    gpu::Ctx ctx;
    DeviceMemory<floatX> x(1);
    EXPECT_DEATH(gpu::linear_forward(ctx, x.p(), x.p(), x.p(), nullptr, 0, 1, 1), "empty matrix product");
}

// ---- plans -----------------------------------------------------------------------------------------------------------------
TEST(GpuGemmPlans, MadeOncePerProduct) {
    gpu::Ctx ctx;
    gpu::use_gemm_cache(ctx, "", false);
    ctx.plans->fusion = gpu::Fusion::never;
    const Layer layer({24, 16, 32}, 1);
    layer.run(ctx);
    ASSERT_EQ(ctx.plans->plans.size(), products);
    const gpu::GemmPlan* plan = ctx.plans->plans.begin()->second.get();
    layer.run(ctx);
    EXPECT_EQ(ctx.plans->plans.size(), products);
    EXPECT_EQ(ctx.plans->plans.begin()->second.get(), plan);
    EXPECT_EQ(ctx.plans->timed, 0);
    Layer({25, 16, 32}, 1).run(ctx);
    EXPECT_EQ(ctx.plans->plans.size(), 2 * products);
    layer.run(ctx, 1);  // other alignments have other plans
    EXPECT_EQ(ctx.plans->plans.size(), 3 * products);
}

// Everything that changes the algorithm changes the key's text, its name in the file.
TEST(GpuGemmPlans, KeysDiffer) {
    const gpu::GemmKey key = {1,
                              2,
                              3,
                              false,
                              false,
                              CUDA_R_16BF,
                              CUDA_R_16BF,
                              CUDA_R_16BF,
                              CUBLASLT_EPILOGUE_DEFAULT,
                              false,
                              gpu::GemmPointers{nullptr, nullptr, nullptr}};
    std::vector<gpu::GemmKey> all(18, key);
    all[1].m = 9;
    all[2].n = 9;
    all[3].k = 9;
    all[4].a_t = true;
    all[5].b_t = true;
    all[6].a = CUDA_R_8F_E4M3;
    all[7].b = CUDA_R_8F_E4M3;
    all[8].d = CUDA_R_32F;
    all[9].epilogue = CUBLASLT_EPILOGUE_BIAS;
    all[10].add = true;
    all[11].alignment.a = 8;
    all[14].alignment.b = 8;
    all[15].alignment.d = 8;
    all[16].alignment.bias = 8;
    all[17].alignment.aux = 8;
    all[12].fast = true;
    all[13].a = all[13].b = CUDA_R_8F_E5M2;
    for (size_t i = 0; i < all.size(); i++)
        for (size_t j = 0; j < i; j++) {
            EXPECT_NE(all[i].text(), all[j].text());
            EXPECT_TRUE(all[i] < all[j] || all[j] < all[i]) << i << " and " << j;
        }
}

// Per matrix: a bias at any address does not limit the algorithms for the others.
TEST(GpuGemmPlans, AlignmentIsEachPointersOwn) {
    const auto at = [](uintptr_t address) { return (void*)address; };
    const gpu::GemmAlignment alignment = gpu::GemmPointers{at(4096), at(264), at(260), at(258), nullptr};
    EXPECT_EQ(alignment.fields(), std::make_tuple(16, 8, 4, 2, 16));
}

// ---- choosing by timing, and the file --------------------------------------------------------------------------------------

struct GpuGemmCache : testing::Test {
    TemporaryDirectory dir;
    std::string file = dir / "gemms.txt";
    Layer layer{few_shapes ? Shape{8, 16, 8} : Shape{40, 64, 72}, 11};

    struct Run {
        Results results;
        std::vector<cublasLtMatmulAlgo_t> algorithms;
        int timed, apart = 0;
        std::string warnings;
    };
    gpu::Fusion fusion = gpu::Fusion::never;
    Run run(bool autotune, const std::string& path, const std::function<void(gpu::Ctx&)>& change = {}) {
        gpu::Ctx ctx;
        if (change) change(ctx);
        testing::internal::CaptureStderr();
        gpu::use_gemm_cache(ctx, path, autotune);
        ctx.plans->fusion = fusion;
        Run run;
        run.results = layer.run(ctx);
        run.warnings = testing::internal::GetCapturedStderr();
        for (const auto& [key, plan] : ctx.plans->plans) {
            run.algorithms.push_back(plan->algo);
            run.apart += plan->apart;
        }
        run.timed = ctx.plans->timed;
        layer.check(run.results);
        return run;
    }
    Run run(bool autotune) { return run(autotune, file); }
    static bool same(const Run& a, const Run& b) {
        return a.algorithms.size() == b.algorithms.size() &&
               !memcmp(a.algorithms.data(), b.algorithms.data(), a.algorithms.size() * sizeof a.algorithms[0]);
    }
    size_t lines() const {
        const std::string text = read_whole_file(file);
        return (size_t)std::count(text.begin(), text.end(), '\n');
    }
};

TEST_F(GpuGemmCache, AutotuneNeedsNoFile) {
    const Run r = run(true, "");
    EXPECT_EQ(r.timed, products);
    EXPECT_EQ(r.warnings, "");
}

#ifndef EMU_TSAN  // nothing below runs in parallel
TEST_F(GpuGemmCache, WrittenAndFoundAgain) {
    const Run first = run(true);
    EXPECT_EQ(first.timed, products);
    EXPECT_EQ(first.warnings, "");
    EXPECT_EQ(lines(), 1 + products);
    const std::string text = read_whole_file(file);
    const Run again = run(true), frozen = run(false);
    for (const Run* r : {&again, &frozen}) {
        EXPECT_EQ(r->timed, 0);
        EXPECT_EQ(r->warnings, "");
        EXPECT_TRUE(same(*r, first));
        expect_same_results(r->results, first.results, "with the file");
    }
    EXPECT_EQ(read_whole_file(file), text);
}

TEST_F(GpuGemmCache, NothingIsTimedOrWrittenWithoutAutotune) {
    const Run r = run(false);
    EXPECT_EQ(r.timed, 0);
    EXPECT_FALSE(std::filesystem::exists(file));
    gpu::Ctx plain;
    expect_same_results(layer.run(plain), r.results, "without a file");
}

// Timing uses its own matrices: the result is the chosen algorithm's for the caller's matrices, computed once.
TEST_F(GpuGemmCache, TimingTouchesNobodysData) {
    const Run timed = run(true), later = run(false);
    expect_same_results(timed.results, later.results, "in the run that timed");
}

TEST_F(GpuGemmCache, NewProductsAreAdded) {
    run(true);
    const std::string text = read_whole_file(file);
    layer = Layer({41, 64, 72}, 11);
    EXPECT_EQ(run(true).timed, products);
    EXPECT_EQ(lines(), 1 + 2 * products);
    layer = Layer({40, 64, 72}, 11);
    EXPECT_EQ(run(true).timed, 0);
}

// Ranks of one machine share the file: each rank also uses choices timed by others in the meantime, and no line is lost.
TEST_F(GpuGemmCache, RanksShareTheirChoices) {
    const auto key = [](int m) { return format("a GPU\ta version\tm %d", m); };
    const auto choice = [](uint64_t word) {
        gpu::GemmChoice c = {{}, 1, 2};
        for (uint64_t& w : c.algo.data) w = word;
        return c;
    };
    gpu::GemmChoices a, b;
    a.read(file);
    b.read(file);
    EXPECT_EQ(a.add(key(1), choice(11)).algo.data[0], 11u);
    EXPECT_EQ(b.add(key(2), choice(22)).algo.data[0], 22u);
    EXPECT_EQ(b.add(key(1), choice(33)).algo.data[0], 11u);  // the first rank's
    EXPECT_EQ(lines(), 3u);
    // Lines are appended: the file is only rewritten after a damaged line.
    const auto inode = [&] {
        struct stat s;
        return stat(file.c_str(), &s) == 0 ? s.st_ino : 0;
    };
    const auto before = inode();
    std::string text = read_whole_file(file);
    EXPECT_EQ(a.add(key(3), choice(44)).algo.data[0], 44u);
    EXPECT_EQ(inode(), before);
    EXPECT_EQ(read_whole_file(file).substr(0, text.size()), text);
    std::ofstream(file, std::ios::app) << "a GPU\ta ver";  // a writer died
    EXPECT_EQ(b.add(key(4), choice(55)).algo.data[0], 55u);
    EXPECT_NE(inode(), before);
    EXPECT_EQ(lines(), 5u);
    gpu::GemmChoices later;
    later.read(file);
    EXPECT_EQ(later.find(key(1))->algo.data[0], 11u);
    EXPECT_EQ(later.find(key(2))->algo.data[0], 22u);
    EXPECT_EQ(later.find(key(4))->algo.data[0], 55u);

    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 4; rank++) {
        if (const pid_t pid = fork()) {
            ranks.push_back(pid);
            continue;
        }
        gpu::GemmChoices mine;
        mine.read(file);
        for (int m = 0; m < 20; m++) mine.add(key(100 + 20 * rank + m), choice(5));
        _exit(0);
    }
    for (const pid_t pid : ranks) waitpid(pid, nullptr, 0);
    EXPECT_EQ(lines(), 85u);
}

TEST_F(GpuGemmCache, DamagedLinesAreIgnored) {
    run(true);
    const std::string whole = read_whole_file(file);
    std::string text = whole;
    const size_t second_line = text.find('\n') + 1, at = text.find('\n', second_line) - 20;
    text[at] = text[at] == '0' ? '1' : '0';  // in the last digits of the algorithm
    write_file_atomically(file, text);
    Run r = run(false);
    EXPECT_EQ(r.warnings, "warning: " + file + ": 1 damaged lines are ignored\n");
    r = run(true);
    EXPECT_EQ(r.timed, 1);
    EXPECT_EQ(lines(), 1 + products);
    // Truncated at every byte of the last line, and in the middle of the first.
    for (size_t size = whole.rfind('\n', whole.size() - 2) + 2; size < whole.size() - 1; size += 37) {
        write_file_atomically(file, whole.substr(0, size));
        r = run(false);
        EXPECT_NE(r.warnings.find("1 damaged lines"), std::string::npos) << r.warnings;
    }
    write_file_atomically(file, whole.substr(0, whole.size() - 1));  // only the last newline is missing
    EXPECT_EQ(run(true).timed, 0);
}

TEST_F(GpuGemmCache, AnotherFileIsNeitherUsedNorOverwritten) {
    for (const std::string& text : {std::string("{\"model\": 1}\n"), std::string("\0\xff\x80", 3), std::string("# algor")}) {
        write_file_atomically(file, text);
        const Run r = run(true);
        EXPECT_EQ(r.timed, products);
        EXPECT_NE(r.warnings.find("is not a list of matrix products"), std::string::npos) << r.warnings;
        EXPECT_EQ(read_whole_file(file), text);
    }
    write_file_atomically(file, "");  // an empty file is a list without lines
    EXPECT_EQ(run(true).warnings, "");
    EXPECT_EQ(lines(), 1 + products);
}

TEST_F(GpuGemmCache, WhatCannotBeReadOrWrittenIsAWarning) {
    const Run directory = run(true, dir / "");
    EXPECT_NE(directory.warnings.find("is a folder"), std::string::npos) << directory.warnings;
    const Run missing = run(true, dir / "none/gemms.txt");
    EXPECT_EQ(missing.timed, products);
    EXPECT_NE(missing.warnings.find("cannot write"), std::string::npos) << missing.warnings;
    EXPECT_EQ(std::count(missing.warnings.begin(), missing.warnings.end(), '\n'), 1) << "one warning, not one per product";
}

// Whether an epilogue is faster than a separate kernel is measured once, and saved in the file like the algorithm.
TEST_F(GpuGemmCache, FusionIsChosenByTimeAndKept) {
    const Refusals none(false);
    fusion = gpu::Fusion::if_faster;
    const Run first = run(true);
    EXPECT_GE(first.timed, products);
    const Run again = run(true), frozen = run(false);
    for (const Run* r : {&again, &frozen}) {
        EXPECT_EQ(r->timed, 0);
        EXPECT_EQ(r->apart, first.apart);
        expect_same_results(r->results, first.results, "with the file");
    }
    std::string text = read_whole_file(file), changed;
    int lines_changed = 0;
    for (size_t at = 0; at < text.size();) {
        const size_t end = text.find('\n', at);
        std::string line = text.substr(at, end - at);
        at = end + 1;
        if (line.find("epilogue 512") != std::string::npos) {
            const size_t crc = line.rfind('\t'), algorithm = line.rfind('\t', crc - 1);
            line = line.substr(0, algorithm + 1) + std::string(8 * 16, '0');
            line += format("\t%08x", crc32c(line.data(), line.size()));
            lines_changed++;
        }
        changed += line + "\n";
    }
    EXPECT_EQ(lines_changed, products_with_bias);
    write_file_atomically(file, changed);
    const Run apart = run(true);
    EXPECT_EQ(apart.apart, products_with_bias);
    EXPECT_EQ(apart.warnings, "");
}

TEST_F(GpuGemmCache, OtherGpusHaveLinesOfTheirOwn) {
    run(true);
    const auto other_gpu = [](gpu::Ctx& ctx) { ctx.name = "another GPU"; };
    const auto fewer_multiprocessors = [](gpu::Ctx& ctx) { ctx.multiprocessors--; };
    EXPECT_EQ(run(false, file, other_gpu).timed, 0);
    EXPECT_EQ(run(true, file, other_gpu).timed, products);
    EXPECT_EQ(lines(), 1 + 2 * products);
    EXPECT_EQ(run(true, file, fewer_multiprocessors).timed, products);
    EXPECT_EQ(lines(), 1 + 3 * products);
    EXPECT_EQ(run(true).timed, 0);  // none was lost
}

TEST_F(GpuGemmCache, ProductsOfTextsAreNotTimed) {
    EXPECT_EQ(run(true, file, [](gpu::Ctx& ctx) { ctx.autotune = false; }).timed, 0);
    EXPECT_FALSE(std::filesystem::exists(file));
    EXPECT_EQ(run(true).timed, products);
}

// A line whose checksum is right, but whose algorithm the library refuses.
TEST_F(GpuGemmCache, RefusedAlgorithmsAreChosenAgain) {
    run(true);
    std::string text = read_whole_file(file), rewritten;
    for (size_t at = 0; at < text.size();) {
        const size_t end = text.find('\n', at);
        std::string line = text.substr(at, end - at);
        at = end + 1;
        const size_t crc = line.rfind('\t');
        if (crc != std::string::npos) {
            line.replace(crc - 128, 128, std::string(128, 'f'));
            line.resize(crc);
            line += format("\t%08x", crc32c(line.data(), line.size()));
        }
        rewritten += line + "\n";
    }
    write_file_atomically(file, rewritten);
    const Run r = run(true);
    EXPECT_EQ(r.timed, products);
    EXPECT_NE(r.warnings.find("has an algorithm that cuBLASLt refuses"), std::string::npos) << r.warnings;
    EXPECT_EQ(run(true).warnings, "");
}
#endif

#ifndef __CUDACC__
// If a model fills the GPU, products are timed on their own data, with the same results.
TEST_F(GpuGemmCache, WithoutMemoryProductsAreTimedInPlace) {
    const auto fill = [](gpu::Ctx& ctx) {
        ctx.scratch(1 << 16);
        emu::device().memory_bytes = emu::device().used_bytes + 100;
    };
    const size_t before = emu::device().memory_bytes;
    const int n = 64;
    const DeviceMemory<floatX> x(std::vector<floatX>((size_t)n * n, from_double<floatX>(1)));
    DeviceMemory<floatX> out((size_t)n * n);
    DeviceMemory<real> dw((size_t)n * n), db((size_t)n);
    gpu::Ctx ctx;
    gpu::use_gemm_cache(ctx, file, true);
    fill(ctx);
    testing::internal::CaptureStderr();
    gpu::linear_forward(ctx, out.p(), x.p(), x.p(), nullptr, n, n, n);
    expect_close(out.get(), Doubles((size_t)n * n, n), 0, 0, "out");
    gpu::linear_residual_forward(ctx, out.p(), x.p(), x.p(), x.p(), nullptr, n, n, n);
    expect_close(out.get(), Doubles((size_t)n * n, n + 1), 0, 0, "out with the residual");
    gpu::linear_backward_weight(ctx, dw.p(), db.p(), x.p(), x.p(), n, n, n, Acc::Set);
    expect_close(dw.get(), Doubles((size_t)n * n, n), 0, 0, "dweight");
    expect_close(db.get(), Doubles((size_t)n, n), 0, 0, "dbias");
    EXPECT_EQ(ctx.plans->timed_in_place, ctx.plans->timed);
    EXPECT_GE(ctx.plans->timed, 3);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");

    // Acc::Add needs memory for a copy of the gradient, so that the product is added only once.
    const int timed = ctx.plans->timed;
    testing::internal::CaptureStderr();
    gpu::linear_backward_weight(ctx, dw.p(), db.p(), x.p(), x.p(), n, n, n, Acc::Add);
    EXPECT_NE(testing::internal::GetCapturedStderr().find("no GPU memory left"), std::string::npos);
    EXPECT_EQ(ctx.plans->timed, timed);
    ctx.plans->plans.clear();
    emu::device().memory_bytes = emu::device().used_bytes + 20000;  // for dweight, not for all three matrices
    gpu::linear_backward_weight(ctx, dw.p(), db.p(), x.p(), x.p(), n, n, n, Acc::Add);
    emu::device().memory_bytes = before;
    EXPECT_GT(ctx.plans->timed, timed);
    expect_close(dw.get(), Doubles((size_t)n * n, 3 * n), 0, 0, "dweight, added to twice");
    expect_close(db.get(), Doubles((size_t)n, 3 * n), 0, 0, "dbias, added to twice");
}

#ifndef PRECISION_FP32  // which every GPU multiplies
TEST(GpuGemmPlans, NoAlgorithmIsAClearError) {
    const int before = emu::device().major;
    gpu::Ctx ctx;
    DeviceMemory<floatX> x(64);
    emu::device().major = 7;  // has no bf16
    try {
        gpu::linear_forward(ctx, x.p(), x.p(), x.p(), nullptr, 8, 8, 8);
        ADD_FAILURE() << "no error";
    } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("knows no algorithm"), std::string::npos) << e.what();
    }
    emu::device().major = before;
    EXPECT_TRUE(ctx.plans->plans.empty());
}
#endif
#endif

}  // namespace test_gpu_matmul
