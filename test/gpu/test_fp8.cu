// FP8 linear layers on the GPU: codes, amax and scales have cpu::'s bits; products are compared with sums in double of the
// decoded values, and with the bits of cpu::'s plain loops where every sum is exact. Bound of a sum: Hopper's tensor cores
// add 32 products at a time and truncate each, and the running sum, 13 bits below the leading bit of the largest of these
// 33 numbers (see test/emu/cublasLt.h). If M bounds all products and partial sums, K products have an error of at most K /
// 32 * 33 * 2^-13 M. For products of random signs, in any order independent of them, one partial sum in 10^8 exceeds M = 6
// sqrt(sum of squares). Then fp32 and one rounding to D's type follow.
#include <gtest/gtest.h>

#include <functional>

#include "../../llmc/cpu/fp8_linear.h"
#include "../../llmc/gpu/fp8_linear.cuh"
#include "../../llmc/gpu/mlp.cuh"
#include "../../llmc/gpu/norm.cuh"
#include "../files.h"
#include "device_memory.h"

namespace test_gpu_fp8 {

using namespace test;

// ThreadSanitizer takes half a second for a block of 256 threads: it runs only some of the shapes, and no tests of values.
#ifdef EMU_TSAN
constexpr bool few_shapes = true;
#else
constexpr bool few_shapes = false;
#endif
constexpr Fp8 formats[] = {Fp8::e4m3, Fp8::e5m2};
constexpr float infinity = std::numeric_limits<float>::infinity();

floatX floatx(double x) { return from_double<floatX>(x); }

// Codes, their transpose and amax must have cpu::'s bits.
void expect_cpus_codes(gpu::Ctx& ctx, const std::vector<floatX>& x, int N, int C, Fp8 kind, float scale, float amax_before,
                       const std::string& name) {
    const std::string of = name + format(" (%d, %d) ", N, C) + fp8_name(kind) + format(" scale %g ", scale);
    cpu::Ctx host(1);
    std::vector<uint8_t> codes(x.size()), transposed(x.size());
    float amax = amax_before;
    cpu::quantize(host, {codes.data(), transposed.data(), &amax, &scale, kind}, x.data(), N, C);

    const DeviceMemory<floatX> dx(x, "x");
    const DeviceMemory<float> dscale(std::vector<float>{scale}, "scale");
    for (const bool wanted : {true, false}) {
        DeviceMemory<uint8_t> dcodes(x.size(), "codes"), dtransposed(wanted ? x.size() : 0, "transposed");
        DeviceMemory<float> damax(std::vector<float>{amax_before}, "amax");
        gpu::quantize(ctx, {dcodes.p(), wanted ? dtransposed.p() : nullptr, damax.p(), dscale.p(), kind}, dx.p(), N, C);
        const std::vector<uint8_t> got = dcodes.get();
        // The GPU's conversion drops the sign of a NaN.
        const auto same = [](uint8_t a, uint8_t b) { return a == b || ((a & 127) == 127 && (b & 127) == 127); };
        for (size_t i = 0; i < got.size(); i++)
            ASSERT_PRED2(same, got[i], codes[i]) << of << "code of " << as_double(x[i]) << " at " << i;
        const std::vector<uint8_t> across = dtransposed.get();
        for (size_t i = 0; i < across.size(); i++) ASSERT_PRED2(same, across[i], transposed[i]) << of << "transposed " << i;
        expect_same_bits(damax.get(), std::vector<float>{amax}, of + "amax");
    }
    DeviceMemory<float> alone(std::vector<float>{amax_before}, "amax alone");
    gpu::absolute_max(ctx, alone.p(), dx.p(), x.size());
    expect_same_bits(alone.get(), std::vector<float>{amax}, of + "amax alone");

    // The codes' numbers, and amax, of the first rows only: the others keep their values.
    const int filled = N - N / 3;
    float amax_of_rows = amax_before;
    std::vector<floatX> numbers(x.size(), floatx(-3));
    cpu::absolute_max_of_rows(host, &amax_of_rows, x.data(), {N, C, &filled});
    cpu::fp8_numbers(host, numbers.data(), x.data(), {N, C, &filled}, &scale, kind);
    const DeviceMemory<int> dfilled(std::vector<int>{filled}, "filled");
    DeviceMemory<float> of_rows(std::vector<float>{amax_before}, "amax of rows");
    DeviceMemory<floatX> dnumbers(std::vector<floatX>(x.size(), floatx(-3)), "numbers");
    gpu::absolute_max_of_rows(ctx, of_rows.p(), dx.p(), {N, C, dfilled.p()});
    gpu::fp8_numbers(ctx, dnumbers.p(), dx.p(), {N, C, dfilled.p()}, dscale.p(), kind);
    expect_same_bits(of_rows.get(), std::vector<float>{amax_of_rows}, of + "amax of rows");
    const std::vector<floatX> got = dnumbers.get();
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_TRUE(as_double(got[i]) == as_double(numbers[i]) ||
                    (std::isnan(as_double(got[i])) && std::isnan(as_double(numbers[i]))))
            << of << "number of " << as_double(x[i]) << " at " << i;
}

// ---- codes -----------------------------------------------------------------------------------------------------------------
#ifndef EMU_TSAN
// Every bf16, including NaNs and infinities.
TEST(GpuFp8Codes, EveryBf16) {
    gpu::Ctx ctx;
    std::vector<floatX> x(1 << 16);
    for (uint32_t i = 0; i < 1 << 16; i++) {
        const uint32_t bits = sizeof(floatX) == 4 ? i << 16 : i;
        memcpy((void*)&x[i], &bits, sizeof(floatX));
    }
    for (const Fp8 kind : formats)
        for (const float scale : {1.0f, 0.7f, 0x1p-20f, 3e30f})
            expect_cpus_codes(ctx, x, 256, 256, kind, scale, 0, "every bf16");
}

// Around each code and each midpoint between two codes: the float there, the one below and the one above.
TEST(GpuFp8Codes, RoundingToNearestEven) {
    gpu::Ctx ctx;
    for (const Fp8 kind : formats) {
        std::vector<floatX> x;
        for (int code = 0; code < 127; code++) {
            const float here = fp8_decode((uint8_t)code, kind), next = fp8_decode((uint8_t)(code + 1), kind);
            for (const float at : {here, 0.5f * (here + next)}) {
                if (!std::isfinite(at)) continue;
                for (const float y : {std::nextafter(at, -infinity), at, std::nextafter(at, infinity)}) {
                    x.push_back(floatx(y));
                    x.push_back(floatx(-y));
                }
            }
        }
        x.resize((x.size() + 255) / 256 * 256, floatx(0));
        expect_cpus_codes(ctx, x, 16, (int)x.size() / 16, kind, 1, 0, "middles");
    }
}

TEST(GpuFp8Codes, NanInfinityZerosAndHugeNumbers) {
    gpu::Ctx ctx;
    const int N = 144, C = 144;  // four tiles, so that one of them determines the maximum
    const double largest = as_double(std::numeric_limits<floatX>::is_specialized ? std::numeric_limits<floatX>::max()
                                                                                 : from_double<floatX>(0x1.fep127));
    for (const Fp8 kind : formats) {
        std::vector<floatX> x((size_t)N * C, floatx(0));
        expect_cpus_codes(ctx, x, N, C, kind, 7, 0, "zeros");
        expect_cpus_codes(ctx, x, N, C, kind, 7, 3, "zeros");
        for (const double special : {(double)NAN, (double)infinity, -(double)infinity}) {
            std::fill(x.begin(), x.end(), floatx(special));
            expect_cpus_codes(ctx, x, N, C, kind, 1, 0, "nothing finite");
            x.assign(x.size(), floatx(-0.5));
            x[5] = floatx(special);
            x[(size_t)140 * C + 139] = floatx(special);
            expect_cpus_codes(ctx, x, N, C, kind, 1, 0, "some not finite");
        }
        x.assign(x.size(), floatx(1));
        for (const size_t place : {(size_t)0, (size_t)143, (size_t)143 * C, (size_t)143 * C + 143}) {
            x[place] = floatx(-largest);
            expect_cpus_codes(ctx, x, N, C, kind, 1e-30f, 0, "a huge number");
            expect_cpus_codes(ctx, x, N, C, kind, 1e30f, 0, "a huge number that overflows");
            x[place] = floatx(1);
        }
    }
}
#endif

// Numbers from the definition, so that both backends cannot be wrong together.
TEST(GpuFp8Codes, KnownNumbers) {
    gpu::Ctx ctx;
    struct Known {
        float x;
        int e4m3, e5m2;
    };
    const Known known[] = {{0, 0, 0},         {-0.0f, 0x80, 0x80}, {1, 0x38, 0x3c},        {-1, 0xb8, 0xbc},
                           {448, 0x7e, 0x5f}, {1e9f, 0x7e, 0x7b},  {-1e9f, 0xfe, 0xfb},    {0x1p-9f, 0x01, 0x18},
                           {0x1p-16f, 0, 1},  {0x1p-17f, 0, 0},    {infinity, 0x7f, 0x7f}, {-infinity, 0xff, 0xff},
                           {NAN, 0x7f, 0x7f}, {57344, 0x7e, 0x7b}};
    std::vector<floatX> x(256, floatx(0));
    for (size_t i = 0; i < std::size(known); i++) x[i] = floatx(known[i].x);
    const DeviceMemory<floatX> dx(x);
    const DeviceMemory<float> scale(std::vector<float>{1});
    for (const Fp8 kind : formats) {
        DeviceMemory<uint8_t> codes(256), transposed(256);
        DeviceMemory<float> amax(std::vector<float>{0});
        gpu::quantize(ctx, {codes.p(), transposed.p(), amax.p(), scale.p(), kind}, dx.p(), 16, 16);
        const auto got = codes.get(), turned = transposed.get();
        for (size_t i = 0; i < std::size(known); i++) {
            const int expected = kind == Fp8::e4m3 ? known[i].e4m3 : known[i].e5m2;
            EXPECT_EQ((int)got[i], expected) << known[i].x << " as " << fp8_name(kind);
            EXPECT_EQ((int)turned[i * 16], expected) << known[i].x << " as " << fp8_name(kind);
        }
        EXPECT_EQ(amax.get()[0], as_double(floatx(1e9f)));
    }
}

// Sizes are multiples of 16, tiles of 128: every kind of edge, and several tiles in both dimensions.
TEST(GpuFp8Codes, Shapes) {
    gpu::Ctx ctx;
    const int shapes[][2] = {{16, 16},   {16, 400},  {400, 16},  {128, 128}, {112, 144}, {144, 112},
                             {272, 144}, {144, 272}, {256, 384}, {48, 80},   {16, 2064}, {2064, 16}};
    Rng rng(3);
    for (const auto& [N, C] : shapes) {
        if (few_shapes && !(N == 144 && C == 112) && N != 48) continue;
        const auto x = rng.normals<floatX>((size_t)N * C);
        for (const Fp8 kind : formats) expect_cpus_codes(ctx, x, N, C, kind, 40, N % 32 ? 0.0f : 2.5f, "normals");

        std::vector<uint8_t> codes((size_t)N * C), turned(codes.size());
        for (uint8_t& code : codes) code = (uint8_t)rng.below(256);
        cpu::Ctx host(1);
        cpu::transpose_codes(host, turned.data(), codes.data(), N, C);
        const DeviceMemory<uint8_t> from(codes, "codes");
        DeviceMemory<uint8_t> to(codes.size(), "transposed");
        gpu::transpose_codes(ctx, to.p(), from.p(), N, C);
        expect_same_bits(to.get(), turned, format("transposed (%d, %d)", N, C));
    }
}

TEST(GpuFp8Codes, TwiceTheSameBits) {
    gpu::Ctx ctx;
    const int N = 144, C = 272;
    const DeviceMemory<floatX> x(Rng(4).normals<floatX>((size_t)N * C));
    const DeviceMemory<float> scale(std::vector<float>{30});
    std::vector<uint8_t> codes[2], transposed[2];
    std::vector<float> amax[2];
    for (int run = 0; run < 2; run++) {
        DeviceMemory<uint8_t> c((size_t)N * C), t((size_t)N * C);
        DeviceMemory<float> a(std::vector<float>{0});
        gpu::quantize(ctx, {c.p(), t.p(), a.p(), scale.p(), Fp8::e4m3}, x.p(), N, C);
        codes[run] = c.get();
        transposed[run] = t.get();
        amax[run] = a.get();
    }
    expect_same_bits(codes[0], codes[1], "codes");
    expect_same_bits(transposed[0], transposed[1], "transposed");
    expect_same_bits(amax[0], amax[1], "amax");
}

// The maximum in every kind of position: first, last, in the last pack, beyond it; from addresses of any alignment.
TEST(GpuFp8Codes, AbsoluteMax) {
    gpu::Ctx ctx;
    for (const size_t n : {(size_t)1, (size_t)7, (size_t)8, (size_t)1000, (size_t)20011}) {
        if (few_shapes && n != 1000) continue;
        for (const size_t shift : {0, 1, 3}) {
            Rng rng(n);
            std::vector<floatX> x = rng.normals<floatX>(n + shift);
            for (size_t i = 0; i < shift; i++) x[i] = floatx(1e6);  // must not be read
            for (const size_t place : {(size_t)0, n / 2, n - 1}) {
                std::vector<floatX> y = x;
                y[shift + place] = floatx(place % 2 ? -100 : 100);
                const DeviceMemory<floatX> dy(y);
                DeviceMemory<float> amax(std::vector<float>{0.25f});
                gpu::absolute_max(ctx, amax.p(), dy.p() + shift, n);
                EXPECT_EQ(amax.get()[0], 100) << n << " from " << shift << ", at " << place;
            }
        }
    }
}

TEST(GpuFp8Codes, ScalesHaveTheCpusBits) {
    gpu::Ctx ctx;
    cpu::Ctx host(1);
    for (const Fp8 kind : formats)
        for (const float amax : {0.0f, -1.0f, 1.0f, 448.0f, 3.7e-3f, 1e-38f, 1e-45f, 3.4e38f, infinity, NAN})
            for (const int margin : {0, 1, 5}) {
                const DeviceMemory<float> from(std::vector<float>{amax});
                DeviceMemory<float> scale(1), inverse(1);
                gpu::set_scale(ctx, scale.p(), inverse.p(), from.p(), kind, margin);
                float expected_scale, expected_inverse;
                cpu::set_scale(host, &expected_scale, &expected_inverse, &amax, kind, margin);
                EXPECT_EQ(scale.get()[0], expected_scale) << amax;
                EXPECT_EQ(inverse.get()[0], expected_inverse) << amax;
                const bool measured = amax > 0 && std::isfinite(amax);
                EXPECT_TRUE(measured || (expected_scale == 1 && expected_inverse == 1)) << amax;
            }
}

// The ops that write codes: equal to cpu::quantize() of the numbers computed by this backend's op. On the emulator the sign
// of a computed NaN is the compiler's choice, which may differ when the op writes codes.
std::vector<floatX> with_positive_nans(std::vector<floatX> numbers) {
    for (floatX& x : numbers)
        if (std::isnan((float)x)) x = floatx(NAN);
    return numbers;
}
std::vector<uint8_t> with_positive_nans(std::vector<uint8_t> codes, Fp8 format) {
    for (uint8_t& code : codes)
        if (std::isnan(fp8_decode(code, format))) code &= 127;
    return codes;
}

TEST(GpuFp8Codes, OfTheOpsThatComputeTheNumbers) {
    gpu::Ctx ctx;
    cpu::Ctx host(1);
    Rng rng(6);
    struct Shape {
        int N, F;
        bool norms;
    };
    std::vector<Shape> shapes = {{16, 16, true}, {144, 272, true}};
    if (!few_shapes) shapes.insert(shapes.end(), {{400, 48, true}, {3, 528, true}, {2, 16400, true}, {128, 128, false}});
    for (const auto& [N, F, norms] : shapes) {
        std::vector<floatX> gate_up = rng.normals<floatX>((size_t)N * 2 * F);
        gate_up[5] = floatx(NAN);
        gate_up[(size_t)N * 2 * F - 1] = floatx(infinity);
        gate_up[1] = floatx(-3e4);
        const DeviceMemory<floatX> x(gate_up, "x"), y(rng.normals<floatX>((size_t)N * F), "y"), w(rng.normals<floatX>(F), "w"),
            b(rng.normals<floatX>(F), "b");
        DeviceMemory<floatX> sum((size_t)N * F, "sum");
        DeviceMemory<real> mean(N, "mean"), rstd(N, "rstd");
        const auto check = [&, N = N](const char* name, int columns, bool gradient, const auto& op) {
            const std::string of = name + format(" (%d, %d) ", N, columns);
            const size_t n = (size_t)N * columns;
            DeviceMemory<floatX> numbers(n, "numbers");
            op(Output(numbers.p()));
            const std::vector<floatX> expected = numbers.get();
            for (const Fp8 kind : formats) {
                if (kind == Fp8::e5m2 && !gradient) continue;
                const bool turns = gradient && N % 16 == 0;
                const float scale = 9;
                float amax = 0.125f;
                std::vector<uint8_t> codes(n), transposed(turns ? n : 0);
                cpu::quantize(host, {codes.data(), turns ? transposed.data() : nullptr, &amax, &scale, kind}, expected.data(),
                              N, columns);
                const DeviceMemory<float> dscale(std::vector<float>{scale}, "scale");
                for (const bool both : {false, true}) {
                    DeviceMemory<uint8_t> dcodes(n, "codes"), dtransposed(transposed.size(), "transposed");
                    DeviceMemory<float> damax(std::vector<float>{0.125f}, "amax");
                    DeviceMemory<floatX> again(both ? n : 0, "numbers");
                    op(Output({dcodes.p(), turns ? dtransposed.p() : nullptr, damax.p(), dscale.p(), kind},
                              both ? again.p() : nullptr));
                    const auto same_codes = [&, kind = kind](const auto& a, const auto& b, const char* what) {
                        expect_same_bits(with_positive_nans(a, kind), with_positive_nans(b, kind), of + what);
                    };
                    same_codes(dcodes.get(), codes, "codes");
                    same_codes(dtransposed.get(), transposed, "transposed");
                    expect_same_bits(damax.get(), std::vector<float>{amax}, of + "amax");
                    if (both) expect_same_bits(with_positive_nans(again.get()), with_positive_nans(expected), of + "numbers");
                }
            }
        };
        const int n = N, f = F;
        check("gelu_forward", F, false,
              [&](const Output& out) { gpu::activation_forward(ctx, out, x.p(), n, f, Activation::gelu); });
        check("gelu_backward", F, true,
              [&](const Output& out) { gpu::activation_backward(ctx, out, y.p(), x.p(), n, f, Activation::gelu); });
        check("swiglu_forward", F, false,
              [&](const Output& out) { gpu::activation_forward(ctx, out, x.p(), n, f, Activation::swiglu); });
        check("swiglu_backward", 2 * F, true,
              [&](const Output& out) { gpu::activation_backward(ctx, out, y.p(), x.p(), n, f, Activation::swiglu); });
        if (!norms) continue;
        check("layernorm_forward", F, false, [&](const Output& out) {
            gpu::layernorm_forward(ctx, out, {mean.p(), rstd.p()}, sum.p(), x.p(), y.p(), {w.p(), b.p(), f, 1e-5f}, n);
        });
        check("rmsnorm_forward", F, false, [&](const Output& out) {
            gpu::rmsnorm_forward(ctx, out, {nullptr, rstd.p()}, nullptr, y.p(), nullptr, {w.p(), nullptr, f, 1e-5f}, n);
        });
    }
}

// ---- products --------------------------------------------------------------------------------------------------------------

// A tensor as codes, in both orders. Scales are 16 bytes apart.
struct Tensor {
    int rows, columns;
    Fp8 kind;
    float inverse;
    std::vector<uint8_t> codes, transposed;
    std::vector<double> number_of_code;

    Tensor(int rows_, int columns_, Fp8 f, float scale, const std::function<double()>& element)
        : rows(rows_), columns(columns_), kind(f), inverse(1 / scale) {
        codes.resize((size_t)rows * columns);
        transposed.resize(codes.size());
        for (uint8_t& code : codes) code = fp8_encode((float)element() * scale, kind);
        for (int code = 0; code < 256; code++) number_of_code.push_back(fp8_decode((uint8_t)code, kind));
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < columns; j++) transposed[(size_t)j * rows + i] = codes[(size_t)i * columns + j];
    }
    double operator()(int i, int j) const { return number_of_code[codes[(size_t)i * columns + j]]; }
};

struct Results {
    std::vector<floatX> out, out_biased, out_fast, added, dinp;
    std::vector<float> dweight, dweight_set, dbias;
};

struct Layer {
    int N, IC, OC;
    Tensor inp, weight, dout;
    std::vector<floatX> bias, wide_dout;
    std::vector<float> dweight0, dbias0;

    using Numbers = std::function<double()>;
    Layer(int n, int ic, int oc, Fp8 dout_format, float scale, const Numbers& element)
        : N(n),
          IC(ic),
          OC(oc),
          inp(N, IC, Fp8::e4m3, scale, element),
          weight(OC, IC, Fp8::e4m3, 3 * scale, element),
          dout(N, OC, dout_format, 5 * scale, element) {
        for (int i = 0; i < OC; i++) {
            bias.push_back(floatx(element()));
            dbias0.push_back((float)element());
        }
        for (int i = 0; i < OC * IC; i++) dweight0.push_back((float)element());
        for (int i = 0; i < N * OC; i++) wide_dout.push_back(floatx(element()));
    }

    Results run(gpu::Ctx& ctx) const {
        const DeviceMemory<uint8_t> x(inp.codes, "inp"), xt(inp.transposed, "inp_transposed"), w(weight.codes, "weight"),
            wt(weight.transposed, "weight_transposed"), dy(dout.codes, "dout"), dyt(dout.transposed, "dout_transposed");
        const DeviceMemory<float> scales(std::vector<float>{inp.inverse, 0, 0, 0, weight.inverse, 0, 0, 0, dout.inverse},
                                         "scales");
        const float *x_inverse = scales.p(), *w_inverse = scales.p() + 4, *dy_inverse = scales.p() + 8;
        const DeviceMemory<floatX> b(bias, "bias"), wide(wide_dout, "dout");
        DeviceMemory<floatX> out((size_t)N * OC, "out"), out_biased((size_t)N * OC, "out with bias"),
            out_fast((size_t)N * OC, "out, fast"), added((size_t)N * OC, "out with residual"), dinp((size_t)N * IC, "dinp");
        DeviceMemory<float> dweight(dweight0, "dweight"), dweight_set(dweight0, "dweight, set"), dbias(dbias0, "dbias");
        const Fp8Matrix weight_codes = {w.p(), w_inverse};
        gpu::fp8_linear_forward(ctx, out.p(), {x.p(), x_inverse}, weight_codes, nullptr, N, IC, OC, false);
        gpu::fp8_linear_forward(ctx, out_biased.p(), {x.p(), x_inverse}, weight_codes, b.p(), N, IC, OC, false);
        gpu::fp8_linear_forward(ctx, out_fast.p(), {x.p(), x_inverse}, weight_codes, b.p(), N, IC, OC, true);
        gpu::fp8_linear_residual_forward(ctx, added.p(), {wide.p(), b.p()}, {x.p(), x_inverse}, weight_codes, N, IC, OC, false);
        gpu::fp8_linear_backward_input(ctx, dinp.p(), {dy.p(), dy_inverse, dout.kind}, {wt.p(), w_inverse}, N, IC, OC, false);
        const auto backward_weight = [&](float* dw, Acc acc) {
            gpu::fp8_linear_backward_weight(ctx, dw, {dyt.p(), dy_inverse, dout.kind}, {xt.p(), x_inverse}, N, IC, OC, acc,
                                            false);
        };
        backward_weight(dweight.p(), Acc::Add);
        backward_weight(dweight_set.p(), Acc::Set);
        gpu::bias_backward(ctx, dbias.p(), wide.p(), N, OC);
        return {out.get(),  out_biased.get(), out_fast.get(),    added.get(),
                dinp.get(), dweight.get(),    dweight_set.get(), dbias.get()};
    }

    Results run_on_cpu() const {
        cpu::Ctx ctx(1);
        ctx.plain = true;
        Results r = {std::vector<floatX>((size_t)N * OC),
                     std::vector<floatX>((size_t)N * OC),
                     std::vector<floatX>((size_t)N * OC),
                     {},
                     std::vector<floatX>((size_t)N * IC),
                     dweight0,
                     dweight0,
                     dbias0};
        const auto forward = [&](auto& out, const floatX* with) {
            cpu::fp8_linear_forward(ctx, out.data(), {inp.codes.data(), &inp.inverse}, {weight.codes.data(), &weight.inverse},
                                    with, N, IC, OC, false);
        };
        forward(r.out, nullptr);
        forward(r.out_biased, bias.data());
        forward(r.out_fast, bias.data());
        cpu::fp8_linear_backward_input(ctx, r.dinp.data(), {dout.codes.data(), &dout.inverse, dout.kind},
                                       {weight.transposed.data(), &weight.inverse}, N, IC, OC, false);
        for (const Acc acc : {Acc::Add, Acc::Set})
            cpu::fp8_linear_backward_weight(ctx, (acc == Acc::Add ? r.dweight : r.dweight_set).data(),
                                            {dout.transposed.data(), &dout.inverse, dout.kind},
                                            {inp.transposed.data(), &inp.inverse}, N, IC, OC, acc, false);
        cpu::bias_backward(ctx, r.dbias.data(), wide_dout.data(), N, OC);
        return r;
    }

    // y (M, K') = start + inverse * sum over k of a(m, k) b(k, n), within the bound at the top of this file.
    using Element = std::function<double(int, int)>;
    template <class Buffer>
    static void expect_product(const Buffer& actual, int M, int columns, int K, double inverse, const Element& a,
                               const Element& b, const Element& start, const std::string& name) {
        using T = std::decay_t<decltype(actual[0])>;
        Doubles value, allowed;
        for (int m = 0; m < M; m++)
            for (int n = 0; n < columns; n++) {
                double sum = 0, largest = 0, squares = 0, magnitude = 0;
                for (int k = 0; k < K; k++) {
                    const double term = a(m, k) * b(k, n);
                    sum += term;
                    squares += term * term;
                    magnitude += std::abs(term);
                    largest = std::max(largest, std::abs(term));
                }
                const double cut = (K + 31) / 32 * 33 * 0x1p-13 * std::max(largest, 6 * std::sqrt(squares));
                const double y = start(m, n) + inverse * sum;
                const double error = inverse * (cut + 8 * 0x1p-24 * magnitude) + 4 * 0x1p-24 * std::abs(start(m, n)) + 1e-35;
                const double low = as_double(from_double<T>(y - error)), high = as_double(from_double<T>(y + error));
                value.push_back(y);
                allowed.push_back(std::max(y - low, high - y));
            }
        expect_close(actual, value, allowed, name);
    }
    void check(const Results& r) const {
        SCOPED_TRACE(testing::Message() << "N " << N << ", IC " << IC << ", OC " << OC << ", dout " << fp8_name(dout.kind));
        const auto zero = [](int, int) { return 0.0; };
        const auto biases = [&](int, int o) { return as_double(bias[(size_t)o]); };
        const auto turned = [](const Tensor& x) { return [&x](int i, int j) { return x(j, i); }; };
        const double y = (double)inp.inverse * weight.inverse;
        expect_product(r.out, N, OC, IC, y, std::cref(inp), turned(weight), zero, "out");
        expect_product(r.out_biased, N, OC, IC, y, std::cref(inp), turned(weight), biases, "out with bias");
        expect_product(r.out_fast, N, OC, IC, y, std::cref(inp), turned(weight), biases, "out, fast");
        const auto stream = [&](int n, int o) { return biases(n, o) + as_double(wide_dout[(size_t)n * OC + o]); };
        expect_product(r.added, N, OC, IC, y, std::cref(inp), turned(weight), stream, "out with residual");
        expect_product(r.dinp, N, IC, OC, (double)dout.inverse * weight.inverse, std::cref(dout), std::cref(weight), zero,
                       "dinp");
        expect_product(
            r.dweight, OC, IC, N, (double)dout.inverse * inp.inverse, turned(dout), std::cref(inp),
            [&](int o, int i) { return dweight0[(size_t)o * IC + i]; }, "dweight");
        expect_product(r.dweight_set, OC, IC, N, (double)dout.inverse * inp.inverse, turned(dout), std::cref(inp), zero,
                       "dweight, set");
        Doubles sums, allowed;
        for (int o = 0; o < OC; o++) {
            double sum = dbias0[(size_t)o], magnitude = std::abs(sum);
            for (int n = 0; n < N; n++) {
                const double term = as_double(wide_dout[(size_t)n * OC + o]);
                sum += term;
                magnitude += std::abs(term);
            }
            sums.push_back(sum);
            allowed.push_back((N + 2) * 0x1p-24 * magnitude);
        }
        expect_close(r.dbias, sums, allowed, "dbias");
    }
};

void expect_same_results(const Results& a, const Results& b, const std::string& when) {
    expect_same_bits(a.out, b.out, "out " + when);
    expect_same_bits(a.out_biased, b.out_biased, "out with bias " + when);
    expect_same_bits(a.out_fast, b.out_fast, "out, fast " + when);
    expect_same_bits(a.dinp, b.dinp, "dinp " + when);
    expect_same_bits(a.dweight, b.dweight, "dweight " + when);
    expect_same_bits(a.dweight_set, b.dweight_set, "dweight, set " + when);
    expect_same_bits(a.dbias, b.dbias, "dbias " + when);
}

#define SKIP_WITHOUT_FP8(ctx) \
    if (const std::string why = gpu::fp8_limits(ctx); !why.empty()) GTEST_SKIP() << why

Layer random_layer(int N, int IC, int OC, Fp8 dout_format, uint64_t seed) {
    Rng rng(seed);
    return Layer(N, IC, OC, dout_format, 11, [&] { return rng.normal(); });
}

TEST(GpuFp8Linear, RandomNumbers) {
    gpu::Ctx ctx;
    SKIP_WITHOUT_FP8(ctx);
    const int shapes[][3] = {{16, 16, 16}, {48, 80, 32}, {64, 160, 96}, {272, 48, 64}, {16, 512, 16}};
    for (const auto& [N, IC, OC] : shapes)
        for (const Fp8 kind : formats) {
            if (few_shapes && N + IC + OC > 160) continue;
            const Layer layer = random_layer(N, IC, OC, kind, (uint64_t)(N + IC));
            layer.check(layer.run(ctx));
        }
}

// Whole numbers whose sums stay below 2^13 are exact in any order, also in the tensor cores' short sums: cpu::'s bits. A
// single missing or misplaced product is detected.
TEST(GpuFp8Linear, WholeNumbersGiveTheCpusBits) {
    gpu::Ctx ctx;
    SKIP_WITHOUT_FP8(ctx);
    const int shapes[][3] = {{16, 16, 16}, {32, 48, 80}, {144, 64, 112}, {80, 240, 48}};
    for (const auto& [N, IC, OC] : shapes)
        for (const Fp8 kind : formats) {
            if (few_shapes && N > 32) continue;
            Rng rng(5);
            const auto numbers = [&] { return (double)(rng.below(9) - 4); };
            Layer layer(N, IC, OC, kind, 1, numbers);
            layer.weight = Tensor(OC, IC, Fp8::e4m3, 1, numbers);
            layer.dout = Tensor(N, OC, kind, 1, numbers);
            layer.inp.inverse = 0.5f;
            layer.weight.inverse = 4;
            layer.dout.inverse = 0.25f;  // all different
            expect_same_results(layer.run(ctx), layer.run_on_cpu(), "as cpu::");
        }
}

TEST(GpuFp8Linear, NanStaysInItsRow) {
    gpu::Ctx ctx;
    SKIP_WITHOUT_FP8(ctx);
    Layer layer = random_layer(32, 48, 16, Fp8::e5m2, 6);
    layer.inp.codes[(size_t)3 * layer.IC + 47] = 0x7f;
    layer.dout.codes[(size_t)5 * layer.OC] = 0xff;
    const Results r = layer.run(ctx);
    for (int i = 0; i < layer.N * layer.OC; i++)
        for (const auto* out : {&r.out, &r.out_biased, &r.out_fast})
            ASSERT_EQ(std::isnan(as_double((*out)[(size_t)i])), i / layer.OC == 3) << i;
    for (int i = 0; i < layer.N * layer.IC; i++) ASSERT_EQ(std::isnan(as_double(r.dinp[(size_t)i])), i / layer.IC == 5) << i;
}

TEST(GpuFp8Linear, RunTwiceTheSameBits) {
    gpu::Ctx ctx, other;
    SKIP_WITHOUT_FP8(ctx);
    const Layer layer = random_layer(48, 160, 32, Fp8::e5m2, 7);
    const Results first = layer.run(ctx);
    expect_same_results(layer.run(ctx), first, "in the second run");
    expect_same_results(layer.run(other), first, "of another context");
}

// From tensors to gradients, as in training: quantized here, and within the codes' own precision of the exact product.
TEST(GpuFp8Linear, QuantizedHere) {
    gpu::Ctx ctx;
    SKIP_WITHOUT_FP8(ctx);
    const int N = 48, IC = 144, OC = 32;
    Rng rng(8);
    const auto x = rng.normals<floatX>((size_t)N * IC, 1e-3), w = rng.normals<floatX>((size_t)OC * IC, 50);
    const DeviceMemory<floatX> dx(x), dw(w);
    DeviceMemory<float> scales(std::vector<float>(24, 0)), amax(std::vector<float>(2, 0));
    DeviceMemory<uint8_t> x_codes(x.size()), w_codes(w.size()), w_transposed(w.size());
    DeviceMemory<floatX> out((size_t)N * OC);
    gpu::absolute_max(ctx, amax.p(), dx.p(), x.size());
    gpu::absolute_max(ctx, amax.p() + 1, dw.p(), w.size());
    float *x_scale = scales.p(), *w_scale = scales.p() + 8;
    gpu::set_scale(ctx, x_scale, x_scale + 4, amax.p(), Fp8::e4m3, 0);
    gpu::set_scale(ctx, w_scale, w_scale + 4, amax.p() + 1, Fp8::e4m3, 0);
    gpu::quantize(ctx, {x_codes.p(), nullptr, amax.p(), x_scale, Fp8::e4m3}, dx.p(), N, IC);
    gpu::quantize(ctx, {w_codes.p(), w_transposed.p(), amax.p() + 1, w_scale, Fp8::e4m3}, dw.p(), OC, IC);
    gpu::fp8_linear_forward(ctx, out.p(), {x_codes.p(), x_scale + 4}, {w_codes.p(), w_scale + 4}, nullptr, N, IC, OC, true);
    // Each factor has an error of at most 2^-4 of itself or, if it is small, 2^-10 of 1/448 of the maximum.
    Doubles value, allowed;
    const double x_least = amax.get()[0] * 0x1p-10 / 448, w_least = amax.get()[1] * 0x1p-10 / 448;
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            double sum = 0, error = 0, squares = 0;
            for (int i = 0; i < IC; i++) {
                const double a = as_double(x[(size_t)n * IC + i]), b = as_double(w[(size_t)o * IC + i]);
                const double a_error = std::abs(a) * 0x1p-4 + x_least, b_error = std::abs(b) * 0x1p-4 + w_least;
                sum += a * b;
                error += std::abs(a) * b_error + std::abs(b) * a_error + a_error * b_error;
                squares += a * a * b * b;
            }
            value.push_back(sum);
            allowed.push_back(error + IC / 32 * 33 * 0x1p-13 * 6 * std::sqrt(squares) + 2 * roundoff<floatX> * std::abs(sum));
        }
    expect_close(out.get(), value, allowed, "out");
}

// ---- plans -----------------------------------------------------------------------------------------------------------------
// A layer has three or, where the residual stream is added by the product, four forward, one of dinp, two of dweight.
constexpr int products = std::is_same<floatX, bf16>::value ? 7 : 6;

TEST(GpuFp8Plans, AreKeptAndNamed) {
    gpu::Ctx ctx;
    SKIP_WITHOUT_FP8(ctx);
    const Layer layer = random_layer(16, 32, 48, Fp8::e5m2, 9), plain = random_layer(16, 32, 48, Fp8::e4m3, 9);
    layer.run(ctx);
    const size_t plans = ctx.plans->plans.size();
    EXPECT_EQ(plans, (size_t)products);
    const auto* first = ctx.plans->plans.begin()->second.get();
    layer.run(ctx);
    EXPECT_EQ(ctx.plans->plans.size(), plans);
    EXPECT_EQ(ctx.plans->plans.begin()->second.get(), first);
    plain.run(ctx);
    EXPECT_EQ(ctx.plans->plans.size(), plans + 3);  // another dout

    int fast = 0, mixed = 0;
    for (const auto& [key, plan] : ctx.plans->plans) {
        int8_t accumulation = -1;
        size_t written = 0;
        CUBLAS(cublasLtMatmulDescGetAttribute(&plan->product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &accumulation,
                                              sizeof accumulation, &written));
        EXPECT_EQ(accumulation, key.fast) << key.text();
        EXPECT_EQ(key.text().find(" fast") != std::string::npos, key.fast) << key.text();
        EXPECT_NE(key.text().find("e4m3"), std::string::npos) << key.text();
        fast += key.fast;
        mixed += key.text().find("e4m3 x e5m2") != std::string::npos;
    }
    EXPECT_EQ(fast, 1);
    EXPECT_EQ(mixed, 3);
}

#ifndef EMU_TSAN
TEST(GpuFp8Plans, TimedOnceAndReadFromTheFile) {
    TemporaryDirectory dir;
    const std::string file = dir / "gemms.txt";
    const Layer layer = random_layer(32, 64, 48, Fp8::e5m2, 10);
    const auto run = [&](bool autotune, int timed) {
        gpu::Ctx ctx;
        testing::internal::CaptureStderr();
        gpu::use_gemm_cache(ctx, file, autotune);
        const Results results = layer.run(ctx);
        EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
        EXPECT_EQ(ctx.plans->timed, timed);
        layer.check(results);
        return results;
    };
    {
        gpu::Ctx ctx;
        SKIP_WITHOUT_FP8(ctx);
    }
    const Results first = run(true, products);
    const std::string text = read_whole_file(file);
    EXPECT_NE(text.find("e4m3 x e5m2 to"), std::string::npos) << text;
    EXPECT_NE(text.find(" fast\t"), std::string::npos) << text;
    expect_same_results(run(true, 0), first, "with the file");
    expect_same_results(run(false, 0), first, "with the file, not timing");
    EXPECT_EQ(read_whole_file(file), text);
}
#endif

#ifndef __CUDACC__
// 128 large products, 128 small ones, and the negated large ones: next to the large sum the small ones are lost, unless
// that has been moved out of the tensor cores.
TEST(GpuFp8Linear, FastSumsHaveFewerBits) {
    gpu::Ctx ctx;
    const int N = 16, IC = 384, OC = 16;
    int calls = 0;
    const auto factors = [&](double last) {
        return [&calls, last] {
            const int third = calls++ / 128 % 3;
            return third == 0 ? 256 : third == 1 ? 1 : last;
        };
    };
    const Tensor inp(N, IC, Fp8::e4m3, 1, factors(256)), weight(OC, IC, Fp8::e4m3, 1, factors(-256));
    const DeviceMemory<uint8_t> x(inp.codes), w(weight.codes);
    const DeviceMemory<float> one(std::vector<float>{1});
    DeviceMemory<floatX> out((size_t)N * OC);
    for (const bool fast : {false, true}) {
        gpu::fp8_linear_forward(ctx, out.p(), {x.p(), one.p()}, {w.p(), one.p()}, nullptr, N, IC, OC, fast);
        expect_close(out.get(), Doubles((size_t)N * OC, fast ? 0 : 128), 0, 0, fast ? "fast" : "in fp32");
        // The same sums as gradients: of an input with OC and IC exchanged, of a weight over IC rows.
        DeviceMemory<float> dweight((size_t)N * OC);
        gpu::fp8_linear_backward_input(ctx, out.p(), {x.p(), one.p()}, {w.p(), one.p()}, N, OC, IC, fast);
        gpu::fp8_linear_backward_weight(ctx, dweight.p(), {x.p(), one.p()}, {w.p(), one.p()}, IC, OC, N, Acc::Set, fast);
        expect_close(out.get(), Doubles((size_t)N * OC, fast ? 0 : 128), 0, 0, fast ? "dinp, fast" : "dinp, in fp32");
        expect_close(dweight.get(), Doubles((size_t)N * OC, fast ? 0 : 128), 0, 0, fast ? "dweight, fast" : "dweight, in fp32");
    }
}

TEST(GpuFp8Limits, OlderGpusSaySo) {
    const int major = emu::device().major, minor = emu::device().minor;
    EXPECT_EQ(gpu::fp8_limits(gpu::Ctx()), "");
    emu::device().major = 8;
    emu::device().minor = 9;
    EXPECT_EQ(gpu::fp8_limits(gpu::Ctx()), "");
    emu::device().minor = 6;
    EXPECT_NE(gpu::fp8_limits(gpu::Ctx()).find("compute capability 8.6"), std::string::npos);
    emu::device().major = major;
    emu::device().minor = minor;
}
#endif

// Inputs that the library would refuse, or worse, are refused with a reason.
TEST(GpuFp8Limits, SizesAndAddressesAreMultiplesOf16) {
    gpu::Ctx ctx;
    DeviceMemory<uint8_t> codes(4096), turned(4096);
    DeviceMemory<floatX> x(4096);
    DeviceMemory<float> floats(std::vector<float>(64, 1));
    const auto quantize = [&](int N, int C, size_t shift, uint8_t* transposed = nullptr) {
        gpu::quantize(ctx, {codes.p() + shift, transposed, floats.p(), floats.p(), Fp8::e4m3}, x.p(), N, C);
    };
    quantize(16, 32, 16, turned.p());
    quantize(23, 32, 0);  // on one rank, which has part of the rows
    EXPECT_DEATH(quantize(24, 32, 0, turned.p()), "internal check");
    EXPECT_DEATH(quantize(16, 40, 0), "internal check");
    EXPECT_DEATH(quantize(16, 32, 8), "internal check");
    EXPECT_DEATH(gpu::transpose_codes(ctx, codes.p() + 2048, codes.p(), 16, 8), "internal check");
    SKIP_WITHOUT_FP8(ctx);
    const auto multiply = [&](int N, int IC, size_t codes_shift, size_t scale_shift) {
        gpu::fp8_linear_forward(ctx, x.p(), {codes.p() + codes_shift, floats.p() + scale_shift}, {codes.p() + 2048, floats.p()},
                                nullptr, N, IC, 16, false);
    };
    multiply(16, 32, 16, 4);
    EXPECT_DEATH(multiply(24, 32, 0, 0), "internal check");
    EXPECT_DEATH(multiply(16, 40, 0, 0), "internal check");
    EXPECT_DEATH(multiply(16, 32, 8, 0), "internal check");
    EXPECT_DEATH(multiply(16, 32, 0, 1), "internal check") << "cuBLASLt 12.9 to 13.1 want scales at multiples of 16";
}

}  // namespace test_gpu_fp8
