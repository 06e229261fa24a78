// Each feature of cuBLASLt that our products use, compared with sums in double. On the emulator this tests the emulated
// library; built with nvcc it tests that the real one behaves like the emulated one. Wrong numbers fail on both. The real
// library's support, refusals and suggestions differ by version and GPU and are printed as findings: our code queries it
// each time. All sizes differ, leading dimensions exceed the number of rows, and the gaps are NaN before and must be after.
#include <gtest/gtest.h>

#include <memory>

#include "../../llmc/gpu/ctx.cuh"
#include "device_memory.h"
#include "library.h"

namespace test_gpu_cublaslt {

using namespace test;

const Refusals no_chance(false);

// ---- storage types, defined independently ----------------------------------------------------------------------------------
size_t bytes_of(cudaDataType type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }

double fp8_value(int code, cudaDataType type) {
    const int mantissa_bits = type == CUDA_R_8F_E4M3 ? 3 : 2, bias = type == CUDA_R_8F_E4M3 ? 7 : 15;
    const int exponent = (code & 127) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    const double fraction = (double)mantissa / (1 << mantissa_bits), sign = code & 128 ? -1 : 1;
    if (type == CUDA_R_8F_E4M3 && (code & 127) == 127) return NAN;
    if (type == CUDA_R_8F_E5M2 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? fraction * std::pow(2, 1 - bias) : (1 + fraction) * std::pow(2, exponent - bias));
}
// The nearest number, by comparing all; in a tie the one with an even code.
uint8_t fp8_code(double x, cudaDataType type) {
    int best = 0;
    for (int code = 0; code < 128; code++) {
        const double y = fp8_value(code, type), distance = std::abs(std::abs(x) - y),
                     least = std::abs(std::abs(x) - fp8_value(best, type));
        if (std::isfinite(y) && (distance < least || (distance == least && code % 2 == 0))) best = code;
    }
    return (uint8_t)(best | (std::signbit(x) ? 128 : 0));
}
void encode(uint8_t* to, double x, cudaDataType type) {
    const float wide = (float)x;
    const bf16 narrow(wide);
    if (type == CUDA_R_32F) memcpy(to, &wide, 4);
    else if (type == CUDA_R_16BF) memcpy(to, &narrow.bits, 2);
    else *to = fp8_code(x, type);
}
double decode(const uint8_t* from, cudaDataType type) {
    float wide;
    bf16 narrow;
    if (type == CUDA_R_32F) return memcpy(&wide, from, 4), wide;
    if (type == CUDA_R_16BF) return memcpy(&narrow.bits, from, 2), (double)(float)narrow;
    return fp8_value(*from, type);
}
double roundoff_of(cudaDataType type) {
    return type == CUDA_R_32F ? 0x1p-24 : type == CUDA_R_16BF ? 0x1p-8 : type == CUDA_R_8F_E4M3 ? 0x1p-4 : 0x1p-3;
}

// ---- matrices --------------------------------------------------------------------------------------------------------------
// A batch of column-major matrices on the device. All bytes outside elements are 0xff: NaN.
struct Matrix {
    int rows, cols, ld, batch;
    int64_t stride;
    cudaDataType type;
    size_t shift;  // offset in bytes of the first element from an aligned address
    std::vector<uint8_t> bytes;
    std::unique_ptr<DeviceMemory<uint8_t>> memory;
    cublasLtMatrixLayoutOpaque_t layout;

    Matrix(cudaDataType type_, int rows_, int cols_, int gap = 0, int batch_ = 1, int64_t batch_gap = 0, size_t shift_ = 0)
        : rows(rows_),
          cols(cols_),
          ld(rows_ + gap),
          batch(batch_),
          stride((int64_t)(rows_ + gap) * cols_ + batch_gap),
          type(type_),
          shift(shift_) {
        const size_t elements = (size_t)(stride * (batch - 1) + (int64_t)ld * (cols - 1) + rows);
        bytes.assign(shift + elements * bytes_of(type), 0xff);
        memory = std::make_unique<DeviceMemory<uint8_t>>(bytes.size(), "matrix");
        CUBLAS(cublasLtMatrixLayoutInit(&layout, type, (uint64_t)rows, (uint64_t)cols, ld));
        CUBLAS(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
        CUBLAS(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
    }
    uint8_t* at(std::vector<uint8_t>& from, int i, int j, int b) const {
        return from.data() + shift + (size_t)(i + (int64_t)j * ld + b * stride) * bytes_of(type);
    }
    void* p() const { return memory->p() + shift; }
    template <class F>
    Matrix& fill(F value) {  // from value(i, j, batch)
        for (int b = 0; b < batch; b++)
            for (int j = 0; j < cols; j++)
                for (int i = 0; i < rows; i++) encode(at(bytes, i, j, b), value(i, j, b), type);
        memory->set(bytes);
        return *this;
    }
    Matrix& random(uint64_t seed, double scale = 1) {
        Rng rng(seed);
        return fill([&](int, int, int) { return scale * rng.normal(); });
    }
    // Small whole numbers: their sums are exact in fp32, and in the shorter accumulators of fp8.
    Matrix& integers(uint64_t seed, int largest = 3) {
        Rng rng(seed);
        return fill([&](int, int, int) { return (double)(rng.below(2 * largest + 1) - largest); });
    }
    double operator()(int i, int j, int b = 0) { return decode(at(bytes, i, j, b), type); }
    double op(bool transposed, int i, int j, int b = 0) { return transposed ? (*this)(j, i, b) : (*this)(i, j, b); }
    // Downloads the matrix. The gaps must be unchanged.
    void download() {
        std::vector<uint8_t> now = memory->get();
        std::vector<uint8_t> gaps = now;
        for (int b = 0; b < batch; b++)
            for (int j = 0; j < cols; j++)
                for (int i = 0; i < rows; i++) memset(at(gaps, i, j, b), 0xff, bytes_of(type));
        for (const uint8_t byte : gaps) ASSERT_EQ(byte, 0xff) << "written between the columns";
        bytes = now;
    }
};

// ---- one product -----------------------------------------------------------------------------------------------------------
struct Product {
    gpu::Ctx& ctx;
    Matrix &a, &b, &c, &d;
    bool a_t, b_t;
    float alpha = 1, beta = 0;
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatmulPreferenceOpaque_t preference;
    size_t workspace_bytes = gpu::Ctx::workspace_bytes;

    Product(gpu::Ctx& ctx_, Matrix& a_, Matrix& b_, Matrix& c_, Matrix& d_, bool a_t_, bool b_t_,
            cublasComputeType_t compute = CUBLAS_COMPUTE_32F)
        : ctx(ctx_), a(a_), b(b_), c(c_), d(d_), a_t(a_t_), b_t(b_t_) {
        CUBLAS(cublasLtMatmulDescInit(&op, compute, CUDA_R_32F));
        set(CUBLASLT_MATMUL_DESC_TRANSA, a_t ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(CUBLASLT_MATMUL_DESC_TRANSB, b_t ? CUBLAS_OP_T : CUBLAS_OP_N);
        CUBLAS(cublasLtMatmulPreferenceInit(&preference));
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)workspace_bytes);
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
        uintptr_t bits = 16;
        for (const Matrix* x : {&a, &b, &c, &d}) bits |= (uintptr_t)x->p();
        for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                 CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
            prefer(which, (uint32_t)(bits & (~bits + 1)));
    }
    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        CUBLAS(cublasLtMatmulDescSetAttribute(&op, attribute, &value, sizeof value));
    }
    template <class T>
    void prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
        CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    }
    void epilogue(cublasLtEpilogue_t e) { set(CUBLASLT_MATMUL_DESC_EPILOGUE, e); }

    std::vector<cublasLtMatmulHeuristicResult_t> algorithms(int most = 32) {
        std::vector<cublasLtMatmulHeuristicResult_t> found((size_t)most), usable;
        int n = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(ctx.cublas, &op, &a.layout, &b.layout, &c.layout,
                                                                     &d.layout, &preference, most, found.data(), &n);
        for (int i = 0; i < n && status == CUBLAS_STATUS_SUCCESS; i++)
            if (found[(size_t)i].state == CUBLAS_STATUS_SUCCESS) usable.push_back(found[(size_t)i]);
        return usable;
    }
    cublasStatus_t start(const cublasLtMatmulAlgo_t* algo) {
        const cublasStatus_t status =
            cublasLtMatmul(ctx.cublas, &op, &alpha, a.p(), &a.layout, b.p(), &b.layout, &beta, c.p(), &c.layout, d.p(),
                           &d.layout, algo, ctx.workspace, workspace_bytes, ctx.stream);
        CUDA(cudaStreamSynchronize(ctx.stream));
        return status;
    }
    // With the library's first suggestion.
    void run() {
        const auto found = algorithms(1);
        ASSERT_FALSE(found.empty()) << "no algorithm";
        ASSERT_EQ(start(&found[0].algo), CUBLAS_STATUS_SUCCESS);
        d.download();
    }
    // Never starts products that the real library should refuse: if it accepts one by mistake, that can destroy the
    // device's context.
    bool refused() {
        const auto found = algorithms(1);
        return found.empty() || (library_is_emulated && start(&found[0].algo) != CUBLAS_STATUS_SUCCESS);
    }

    struct Sum {
        double value, magnitude;
    };
    Sum sum(int i, int j, int batch) {  // alpha op(A) op(B) + beta C before the epilogue
        const int k = a_t ? a.rows : a.cols;
        Sum s = {0, 0};
        for (int l = 0; l < k; l++) {
            const double term = a.op(a_t, i, l, batch) * b.op(b_t, l, j, batch);
            s.value += term;
            s.magnitude += std::abs(term);
        }
        s = {alpha * s.value, std::abs(alpha) * s.magnitude};
        if (beta != 0) {
            s.value += beta * c0(i, j, batch);
            s.magnitude += std::abs(beta * c0(i, j, batch));
        }
        return s;
    }
    std::vector<double> c_before;  // for products in place
    double c0(int i, int j, int batch) {
        return c_before.empty() ? c(i, j, batch) : c_before[(size_t)((batch * c.cols + j) * c.rows + i)];
    }
    void keep_c() {
        for (int b_ = 0; b_ < c.batch; b_++)
            for (int j = 0; j < c.cols; j++)
                for (int i = 0; i < c.rows; i++) c_before.push_back(c(i, j, b_));
    }
    // fp32 sums in any order (k + 3 roundings, doubled for truncating accumulators), one rounding to D's type.
    double error(const Sum& s) const { return 2 * ((a_t ? a.rows : a.cols) + 3) * 0x1p-24 * s.magnitude; }

    // y(i, j, batch, sum): the epilogue's result. Before C or a bias is added, some of the library's algorithms round the
    // sum to a D of bf16.
    template <class F>
    void expect(F&& epilogue) {
        std::vector<double> actual, expected, allowed;
        for (int batch = 0; batch < d.batch; batch++)
            for (int j = 0; j < d.cols; j++)
                for (int i = 0; i < d.rows; i++) {
                    const Sum s = sum(i, j, batch);
                    const double y = epilogue(i, j, batch, s.value);
                    actual.push_back(d(i, j, batch));
                    expected.push_back(y);
                    const double product = s.value - (beta != 0 ? beta * c0(i, j, batch) : 0);
                    const bool added = d.type == CUDA_R_16BF && y != product;
                    allowed.push_back(
                        2 * error(s) +
                        roundoff_of(d.type) * (std::abs(y) + (added ? std::abs(product) + std::abs(s.value) : 0)) + 1e-30);
                }
        expect_close(actual, expected, allowed, "D");
    }
    void expect() {
        expect([](int, int, int, double y) { return y; });
    }
};

struct Types {
    cudaDataType in, out;
};
const Types type_pairs[] = {{CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F}, {CUDA_R_32F, CUDA_R_32F}};

// The operands of op(A) (m, k) op(B) (k, n).
struct Operands {
    Matrix a, b, c, d;
    Operands(Types t, int m, int n, int k, bool a_t, bool b_t, int gap = 0, int batch = 1)
        : a(t.in, a_t ? k : m, a_t ? m : k, gap, batch, 3 * gap),
          b(t.in, b_t ? n : k, b_t ? k : n, gap ? gap + 1 : 0, batch),
          c(t.out, m, n, gap ? gap + 2 : 0, batch, gap),
          d(t.out, m, n, gap ? gap + 4 : 0, batch, 2 * gap) {
        a.random(1);
        b.random(2);
        c.random(3);
    }
};

double gelu_value(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
    const double t = std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}
constexpr double gelu_slack = 0x1p-9;  // the GPU's tanh has 11 bits

// ---- layout ----------------------------------------------------------------------------------------------------------------
TEST(CublasLt, EveryTransposeAndTypeWithGaps) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs)
        for (const bool a_t : {false, true})
            for (const bool b_t : {false, true})
                for (const int gap : {0, 3}) {
                    SCOPED_TRACE(testing::Message() << "types " << t.in << " to " << t.out << (a_t ? " T" : " N")
                                                    << (b_t ? "T" : "N") << ", gap " << gap);
                    Operands x(t, 37, 21, 70, a_t, b_t, gap);
                    Product p(ctx, x.a, x.b, x.c, x.d, a_t, b_t);
                    p.alpha = -1.5f;
                    p.beta = 0.75f;
                    p.run();
                    p.expect();
                }
}

TEST(CublasLt, OneElement) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs) {
        Operands x(t, 1, 1, 1, false, true);
        Product p(ctx, x.a, x.b, x.d, x.d, false, true);
        p.run();
        p.expect();
    }
}

TEST(CublasLt, CIsNotReadWithoutBeta) {
    gpu::Ctx ctx;
    Operands x({CUDA_R_16BF, CUDA_R_32F}, 24, 16, 40, true, false);
    Product p(ctx, x.a, x.b, x.d, x.d, true, false);  // in place over NaNs
    p.run();
    p.expect();
}

TEST(CublasLt, AddsInPlace) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs) {
        Operands x(t, 24, 16, 40, false, true);
        x.d.random(4);
        Product p(ctx, x.a, x.b, x.d, x.d, false, true);
        p.beta = 1;
        p.keep_c();
        p.run();
        p.expect();
    }
}

TEST(CublasLt, ScalarsOnTheDevice) {
    gpu::Ctx ctx;
    Operands x({CUDA_R_32F, CUDA_R_32F}, 5, 6, 7, false, false);
    Product p(ctx, x.a, x.b, x.c, x.d, false, false);
    p.set(CUBLASLT_MATMUL_DESC_POINTER_MODE, (int32_t)CUBLASLT_POINTER_MODE_DEVICE);
    DeviceMemory<float> scalars(std::vector<float>{2, -0.5f}, "alpha and beta");
    const auto found = p.algorithms(1);
    ASSERT_FALSE(found.empty());
    ASSERT_EQ(
        cublasLtMatmul(ctx.cublas, &p.op, scalars.p(), x.a.p(), &x.a.layout, x.b.p(), &x.b.layout, scalars.p() + 1, x.c.p(),
                       &x.c.layout, x.d.p(), &x.d.layout, &found[0].algo, ctx.workspace, p.workspace_bytes, ctx.stream),
        CUBLAS_STATUS_SUCCESS);
    x.d.download();
    p.alpha = 2;
    p.beta = -0.5f;
    p.expect();
}

TEST(CublasLt, StridedBatches) {
    gpu::Ctx ctx;
    for (const bool shared_b : {false, true}) {
        Operands x({CUDA_R_16BF, CUDA_R_16BF}, 9, 12, 33, true, true, 5, 3);
        const int64_t nothing = 0;
        if (shared_b) {  // one B for all
            CUBLAS(cublasLtMatrixLayoutSetAttribute(&x.b.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &nothing, 8));
            x.b.stride = 0;
        }
        Matrix bias(CUDA_R_16BF, 9, 1, 0, 3, 4);
        bias.random(7);
        Product p(ctx, x.a, x.b, x.c, x.d, true, true);
        p.beta = 2;
        p.epilogue(CUBLASLT_EPILOGUE_BIAS);
        p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.p());
        p.set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, bias.stride);
        p.run();
        p.expect([&](int i, int, int batch, double y) { return y + bias(i, 0, batch); });
    }
}

// Pointers aligned to only their elements, as the preference must state.
TEST(CublasLt, PointersNeedNoMoreThanTheirElements) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs) {
        const size_t in = bytes_of(t.in), out = bytes_of(t.out);
        Matrix a(t.in, 64, 32, 0, 1, 0, in), b(t.in, 64, 48, 0, 1, 0, 3 * in), c(t.out, 32, 48, 0, 1, 0, out),
            d(t.out, 32, 48, 0, 1, 0, 5 * out);
        a.random(1);
        b.random(2);
        c.random(3);
        Product p(ctx, a, b, c, d, true, false);
        p.beta = 1;
        p.run();
        p.expect();
    }
}

// ---- epilogues -------------------------------------------------------------------------------------------------------------
TEST(CublasLt, Bias) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs) {
        Operands x(t, 24, 17, 40, true, false);
        Matrix bias(t.out, 24, 1);
        bias.random(5, 10);
        Product p(ctx, x.a, x.b, x.c, x.d, true, false);
        p.alpha = 0.5f;
        p.beta = 3;  // neither touches the bias
        p.epilogue(CUBLASLT_EPILOGUE_BIAS);
        p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.p());
        p.run();
        p.expect([&](int i, int, int, double y) { return y + bias(i, 0); });
    }
}

TEST(CublasLt, Gelu) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs)
        for (const bool with_bias : {false, true})
            for (const bool with_aux : {false, true}) {
                SCOPED_TRACE(testing::Message() << (with_bias ? "bias " : "") << (with_aux ? "aux" : ""));
                Operands x(t, 24, 17, 40, true, false);
                x.a.random(1, 0.25);
                Matrix bias(t.out, 24, 1), aux(t.out, 24, 17, 8);
                bias.random(5, 0.5);
                Product p(ctx, x.a, x.b, x.d, x.d, true, false);
                p.epilogue(with_bias  ? with_aux ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_BIAS
                           : with_aux ? CUBLASLT_EPILOGUE_GELU_AUX
                                      : CUBLASLT_EPILOGUE_GELU);
                if (with_bias) p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.p());
                if (with_aux) {
                    p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.p());
                    p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux.ld);
                }
                p.run();
                const auto before = [&](int i, double y) { return y + (with_bias ? bias(i, 0) : 0); };
                // GELU's error is absolute (x times tanh's error) near cancellation, so compare relative to x.
                std::vector<double> actual, expected, allowed;
                for (int j = 0; j < 17; j++)
                    for (int i = 0; i < 24; i++) {
                        const Product::Sum s = p.sum(i, j, 0);
                        const double y = before(i, s.value);
                        actual.push_back(x.d(i, j));
                        expected.push_back(gelu_value(y));
                        allowed.push_back(2 * p.error(s) + roundoff_of(t.out) * std::abs(gelu_value(y)) +
                                          gelu_slack * std::abs(y));
                    }
                expect_close(actual, expected, allowed, "GELU");
                if (!with_aux) continue;
                aux.download();
                Product stored(ctx, x.a, x.b, aux, aux, true, false);  // aux is GELU's input
                stored.expect([&](int i, int, int, double y) { return before(i, y); });
            }
}

TEST(CublasLt, GeluBackward) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs)
        for (const bool with_bias : {false, true}) {
            Operands x(t, 24, 17, 40, false, false);
            Matrix bias(t.out, 24, 1), aux(t.out, 24, 17, 16);
            aux.random(6);
            Product p(ctx, x.a, x.b, x.d, x.d, false, false);
            p.epilogue(with_bias ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU);
            p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.p());
            p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux.ld);
            if (with_bias) p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.p());
            p.run();
            std::vector<double> actual, expected, allowed, sums(24), sums_allowed(24), sums_actual;
            for (int j = 0; j < 17; j++)
                for (int i = 0; i < 24; i++) {
                    const Product::Sum s = p.sum(i, j, 0);
                    const double y = s.value * gelu_slope(aux(i, j));
                    const double error = 4 * p.error(s) + 4 * gelu_slack * std::abs(s.value);
                    actual.push_back(x.d(i, j));
                    expected.push_back(y);
                    allowed.push_back(error + roundoff_of(t.out) * std::abs(y));
                    sums[(size_t)i] += y;
                    sums_allowed[(size_t)i] += error + roundoff_of(t.out) * std::abs(y);
                }
            expect_close(actual, expected, allowed, "dGELU");
            if (!with_bias) continue;
            bias.download();
            for (int i = 0; i < 24; i++) {
                sums_actual.push_back(bias(i, 0));
                sums_allowed[(size_t)i] += roundoff_of(t.out) * std::abs(sums[(size_t)i]);
            }
            expect_close(sums_actual, sums, sums_allowed, "bias gradient");
        }
}

TEST(CublasLt, BiasGradientOfAnOperand) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs)
        for (const bool of_b : {false, true}) {
            Operands x(t, 24, 16, 40, false, true);
            const int length = of_b ? 16 : 24;
            Matrix bias(t.out, length, 1);
            Product p(ctx, x.a, x.b, x.d, x.d, false, true);
            p.epilogue(of_b ? CUBLASLT_EPILOGUE_BGRADB : CUBLASLT_EPILOGUE_BGRADA);
            p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.p());
            p.run();
            p.expect();
            bias.download();
            std::vector<double> actual, expected, allowed;
            for (int i = 0; i < length; i++) {
                double sum = 0, magnitude = 0;
                for (int l = 0; l < 40; l++) {
                    const double term = of_b ? x.b.op(true, l, i) : x.a.op(false, i, l);
                    sum += term;
                    magnitude += std::abs(term);
                }
                actual.push_back(bias(i, 0));
                expected.push_back(sum);
                allowed.push_back(80 * 0x1p-24 * magnitude + roundoff_of(t.out) * std::abs(sum));
            }
            expect_close(actual, expected, allowed, "bias gradient");
        }
}

// ---- fp8 -------------------------------------------------------------------------------------------------------------------
bool has_fp8(const gpu::Ctx& ctx) { return ctx.capability >= 89; }
const char* const no_fp8 = "this GPU has no fp8 (compute capability 8.9)";
constexpr cudaDataType e4m3 = CUDA_R_8F_E4M3, e5m2 = CUDA_R_8F_E5M2;

TEST(CublasLtFp8, KnownNumbers) {
    EXPECT_EQ(fp8_value(0x7e, e4m3), 448);
    EXPECT_EQ(fp8_value(0x38, e4m3), 1);
    EXPECT_EQ(fp8_value(0x81, e4m3), -0x1p-9);
    EXPECT_EQ(fp8_value(0x7b, e5m2), 57344);
    EXPECT_EQ(fp8_value(0x3c, e5m2), 1);
    EXPECT_EQ(fp8_value(0x01, e5m2), 0x1p-16);
}

// Each finite code times one; D row i is A's column i.
TEST(CublasLtFp8, EveryNumberIsRead) {
    gpu::Ctx ctx;
    if (!has_fp8(ctx)) GTEST_SKIP() << no_fp8;
    for (const cudaDataType type : {e4m3, e5m2})
        for (const bool as_b : {false, true}) {
            Matrix codes(type, 16, 16), one(e4m3, 16, 16), d(CUDA_R_32F, 16, 16);
            one.fill([](int i, int j, int) { return i == j; });
            codes.fill([&](int i, int j, int) {
                const double x = fp8_value(16 * j + i, type);
                return std::isfinite(x) ? x : 0;
            });
            Product p(ctx, as_b ? one : codes, as_b ? codes : one, d, d, true, false);
            p.run();
            for (int code = 0; code < 256; code++) {
                const int i = code % 16, j = code / 16;
                ASSERT_EQ(as_b ? d(i, j) : d(j, i), codes(i, j)) << "code " << code << " of type " << type;
            }
        }
}

TEST(CublasLtFp8, ScalesMultiply) {
    gpu::Ctx ctx;
    if (!has_fp8(ctx)) GTEST_SKIP() << no_fp8;
    DeviceMemory<float> scales(std::vector<float>{0.5f, 0, 0, 0, 3.0f, 0, 0, 0}, "scales");  // aligned to 16 bytes
    const Types outputs[] = {{e4m3, CUDA_R_32F}, {e5m2, CUDA_R_32F}, {e4m3, CUDA_R_16BF}};
    for (const Types& t : outputs) {
        Matrix a(t.in, 64, 48, 16), b(e4m3, 64, 32), c(t.out, 48, 32, 16), d(t.out, 48, 32, 32), bias(CUDA_R_16BF, 48, 1);
        a.integers(1);
        b.integers(2);
        c.integers(3, 9);
        bias.integers(4, 9);
        Product p(ctx, a, b, c, d, true, false);
        p.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void*)scales.p());
        p.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void*)(scales.p() + 4));
        p.epilogue(CUBLASLT_EPILOGUE_BIAS);
        p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.p());  // bf16, also where D is fp32
        p.alpha = 0.25f;
        p.beta = 2;
        p.run();
        p.alpha = 0.25f * 0.5f * 3.0f;
        p.expect([&](int i, int, int, double y) { return y + bias(i, 0); });
    }
}

// D in fp8: the result times D's scale, rounded to nearest, ties to even, and saturated; amax is the maximum before
// scaling.
TEST(CublasLtFp8, ResultsAreScaledAndLimited) {
    gpu::Ctx ctx;
    if (!has_fp8(ctx)) GTEST_SKIP() << no_fp8;
    for (const cudaDataType out : {e4m3, e5m2}) {
        // The product of two 4-bit significands has 8 bits: every kind of rounding occurs. One row is far too large.
        Matrix a(out == e5m2 ? e5m2 : e4m3, 16, 32), b(e4m3, 16, 48), c(CUDA_R_16BF, 32, 48), d(out, 32, 48);
        Rng rng(9);
        a.fill([&](int l, int i, int) { return l == i % 16 ? (i == 31 ? 16384 : 1) * rng.normal() : 0; });
        b.fill([&](int, int, int) { return rng.normal(); });
        DeviceMemory<float> scale(std::vector<float>{4.0f}, "D's scale"), amax(1, "amax");
        Product p(ctx, a, b, c, d, true, false);
        p.set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (const void*)scale.p());
        p.set(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, (void*)amax.p());
        p.run();
        double largest = 0;
        for (int j = 0; j < 48; j++)
            for (int i = 0; i < 32; i++) {
                const double y = p.sum(i, j, 0).value;
                largest = std::max(largest, std::abs(y));
                ASSERT_EQ(d(i, j), fp8_value(fp8_code(4 * y, out), out)) << i << ", " << j << ": " << 4 * y;
            }
        EXPECT_EQ((double)amax.get()[0], largest);
    }
}

TEST(CublasLtFp8, Refusals) {
    gpu::Ctx ctx;
    if (!has_fp8(ctx)) GTEST_SKIP() << no_fp8;
    const auto refused = [&](cudaDataType in_a, cudaDataType in_b, bool a_t, bool b_t, int k, auto&& change) {
        Matrix a(in_a, a_t ? k : 32, a_t ? 32 : k), b(in_b, b_t ? 48 : k, b_t ? k : 48), d(CUDA_R_16BF, 32, 48);
        a.integers(1);
        b.integers(2);
        Product p(ctx, a, b, d, d, a_t, b_t);
        change(p);
        return p.refused();
    };
    const auto as_it_is = [](Product&) {};
    EXPECT_OF_LIBRARY(!refused(e4m3, e4m3, true, false, 64, as_it_is));
    EXPECT_OF_LIBRARY(!refused(e5m2, e4m3, true, false, 64, as_it_is));
    EXPECT_OF_LIBRARY(!refused(e4m3, e5m2, true, false, 64, as_it_is));
    EXPECT_OF_LIBRARY(refused(e5m2, e5m2, true, false, 64, as_it_is)) << "two e5m2";
    EXPECT_OF_LIBRARY(refused(e4m3, e4m3, true, false, 72, as_it_is)) << "k not a multiple of 16";
    if (ctx.capability == 90) {
        EXPECT_OF_LIBRARY(refused(e4m3, e4m3, false, false, 64, as_it_is)) << "NN";
        EXPECT_OF_LIBRARY(refused(e4m3, e4m3, true, true, 64, as_it_is)) << "TT";
        EXPECT_OF_LIBRARY(refused(e4m3, e4m3, false, true, 64, as_it_is)) << "NT";
    }
    DeviceMemory<float> scale(std::vector<float>{1}, "scale");
    EXPECT_OF_LIBRARY(refused(e4m3, e4m3, true, false, 64, [&](Product& p) {
        p.set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (const void*)scale.p());
    })) << "a scale for a bf16 D";
}

// ---- refusals --------------------------------------------------------------------------------------------------------------
TEST(CublasLt, WrongAttributes) {
    gpu::Ctx ctx;
    cublasLtMatmulDescOpaque_t op;
    CUBLAS(cublasLtMatmulDescInit(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const int32_t transpose = CUBLAS_OP_T;
    const int64_t wide = 1;
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(&op, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, 4), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(&op, CUBLASLT_MATMUL_DESC_TRANSA, &wide, 8), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(&op, CUBLASLT_MATMUL_DESC_TRANSA, nullptr, 4), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(&op, (cublasLtMatmulDescAttributes_t)1000, &transpose, 4),
              CUBLAS_STATUS_INVALID_VALUE);
    int32_t read = -1;
    size_t written = 0;
    EXPECT_EQ(cublasLtMatmulDescGetAttribute(&op, CUBLASLT_MATMUL_DESC_TRANSA, &read, 4, &written), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(read, CUBLAS_OP_T);
    EXPECT_EQ(written, 4u);
    EXPECT_EQ(cublasLtMatmulDescGetAttribute(&op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr, 0, &written),
              CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(written, sizeof(void*));
}

TEST(CublasLt, RefusesWhatDoesNotFit) {
    gpu::Ctx ctx;
    const auto refused = [&](auto&& change) {
        Operands x({CUDA_R_16BF, CUDA_R_16BF}, 24, 16, 40, true, false);
        Product p(ctx, x.a, x.b, x.c, x.d, true, false);
        change(p, x);
        return p.refused();
    };
    const auto lay_out = [](Matrix& x, cublasLtMatrixLayoutAttribute_t attribute, auto value) {
        CUBLAS(cublasLtMatrixLayoutSetAttribute(&x.layout, attribute, &value, sizeof value));
    };
    EXPECT_OF_LIBRARY(!refused([](Product&, Operands&) {}));
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.a, CUBLASLT_MATRIX_LAYOUT_ROWS, (uint64_t)39); }))
        << "k of A and B";
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.a, CUBLASLT_MATRIX_LAYOUT_COLS, (uint64_t)23); }))
        << "m of A and D";
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.b, CUBLASLT_MATRIX_LAYOUT_COLS, (uint64_t)15); }))
        << "n of B and D";
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.c, CUBLASLT_MATRIX_LAYOUT_COLS, (uint64_t)15); }))
        << "C and D";
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.a, CUBLASLT_MATRIX_LAYOUT_LD, (int64_t)39); }))
        << "ld too small";
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.d, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (int32_t)2); }))
        << "batches";
    EXPECT_OF_LIBRARY(refused([&](Product&, Operands& x) { lay_out(x.c, CUBLASLT_MATRIX_LAYOUT_TYPE, (uint32_t)CUDA_R_32F); }))
        << "C's type";
    EXPECT_OF_LIBRARY(refused([&](Product& p, Operands&) { p.set(CUBLASLT_MATMUL_DESC_SCALE_TYPE, (int32_t)CUDA_R_16F); }))
        << "scale type";
    EXPECT_OF_LIBRARY(refused([&](Product& p, Operands&) { p.epilogue((cublasLtEpilogue_t)7); })) << "no such epilogue";
    Matrix aux(CUDA_R_16BF, 24, 16, 8);
    const auto with_aux = [&](int64_t ld) {
        return [&aux, ld](Product& p, Operands&) {
            p.epilogue(CUBLASLT_EPILOGUE_GELU_AUX);
            p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.p());
            p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
        };
    };
    EXPECT_OF_LIBRARY(!refused(with_aux(32)));
    EXPECT_OF_LIBRARY(refused(with_aux(16))) << "aux ld too small";
    EXPECT_OF_LIBRARY(refused(with_aux(28))) << "aux ld not a multiple of 8";
}

#ifndef __CUDACC__
// Refuses some products with an epilogue that is not always fused, the same ones each time; none with a bias.
TEST(CublasLt, RefusesSomeEpilogues) {
    gpu::Ctx ctx;
    emu::config().refusals = 4;
    const auto refusals = [&](cublasLtEpilogue_t epilogue) {
        std::string all;
        for (int m = 16; m <= 512; m += 16) {
            Operands x({CUDA_R_16BF, CUDA_R_16BF}, m, 1, 8, false, false);
            Matrix aux(CUDA_R_16BF, m, 1);
            Product p(ctx, x.a, x.b, x.c, x.d, false, false);
            p.epilogue(epilogue);
            p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.p());
            p.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux.ld);
            all += p.algorithms().empty() ? '1' : '0';
        }
        return all;
    };
    for (const auto epilogue : {CUBLASLT_EPILOGUE_GELU_AUX, CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_BGRADB}) {
        const std::string once = refusals(epilogue);
        EXPECT_NE(once.find('1'), std::string::npos) << epilogue;
        EXPECT_NE(once.find('0'), std::string::npos) << epilogue;
        EXPECT_EQ(refusals(epilogue), once);
    }
    EXPECT_EQ(refusals(CUBLASLT_EPILOGUE_BIAS).find('1'), std::string::npos);
    emu::config().refusals = 0;
}
#endif

TEST(CublasLt, Fp32OperandsHaveFp32Results) {
    gpu::Ctx ctx;
    Operands x({CUDA_R_32F, CUDA_R_16BF}, 24, 16, 40, true, false);
    EXPECT_OF_LIBRARY(Product(ctx, x.a, x.b, x.c, x.d, true, false).refused());
}

// ---- algorithms ------------------------------------------------------------------------------------------------------------
TEST(CublasLt, EverySuggestedAlgorithmIsRight) {
    gpu::Ctx ctx;
    for (const Types& t : type_pairs) {
        Operands x(t, 64, 48, 200, true, false);
        Product p(ctx, x.a, x.b, x.c, x.d, true, false);
        p.beta = 1;
        const auto all = p.algorithms();
        ASSERT_FALSE(all.empty());
        EXPECT_OF_LIBRARY(all.size() >= 2) << "nothing to choose from";
        EXPECT_EQ(p.algorithms(1).size(), 1u);
        for (const auto& found : all) {
            uint32_t scheme = 99;
            int32_t id = -1, splits = -1;
            size_t written = 0;
            CUBLAS(cublasLtMatmulAlgoConfigGetAttribute(&found.algo, CUBLASLT_ALGO_CONFIG_ID, &id, 4, &written));
            CUBLAS(
                cublasLtMatmulAlgoConfigGetAttribute(&found.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, 4, &written));
            CUBLAS(cublasLtMatmulAlgoConfigGetAttribute(&found.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, 4, &written));
            SCOPED_TRACE(testing::Message() << "algorithm " << id << ", splits " << splits << ", reduction " << scheme);
            EXPECT_TRUE(scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
            EXPECT_LE(found.workspaceSize, p.workspace_bytes);
            // Copied as bytes, like an algorithm stored in a file.
            cublasLtMatmulAlgo_t again;
            memcpy(&again, &found.algo, sizeof again);
            cublasLtMatmulHeuristicResult_t checked = {};
            ASSERT_EQ(cublasLtMatmulAlgoCheck(ctx.cublas, &p.op, &x.a.layout, &x.b.layout, &x.c.layout, &x.d.layout, &again,
                                              &checked),
                      CUBLAS_STATUS_SUCCESS);
            EXPECT_OF_LIBRARY(checked.workspaceSize == found.workspaceSize);
            ASSERT_EQ(p.start(&again), CUBLAS_STATUS_SUCCESS);
            x.d.download();
            p.expect();
            const std::vector<uint8_t> first = x.d.bytes;
            ASSERT_EQ(p.start(&again), CUBLAS_STATUS_SUCCESS);
            x.d.download();
            EXPECT_EQ(first, x.d.bytes) << "other bits the second time";
            if (found.workspaceSize > 0) {
                p.workspace_bytes = found.workspaceSize - 1;
                EXPECT_OF_LIBRARY(p.start(&again) != CUBLAS_STATUS_SUCCESS) << "the workspace is too small";
                p.workspace_bytes = gpu::Ctx::workspace_bytes;
            }
        }
        p.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)0);
        for (const auto& found : p.algorithms()) EXPECT_EQ(found.workspaceSize, 0u);
        ASSERT_EQ(p.start(nullptr), CUBLAS_STATUS_SUCCESS) << "without an algorithm the library chooses";
        x.d.download();
        p.expect();
    }
}

TEST(CublasLt, ForeignAlgorithmsAreRefused) {
    gpu::Ctx ctx;
    Operands x({CUDA_R_16BF, CUDA_R_32F}, 64, 48, 200, true, false), y({CUDA_R_32F, CUDA_R_32F}, 64, 48, 200, true, false);
    const auto of_floats = Product(ctx, y.a, y.b, y.c, y.d, true, false).algorithms(1);
    ASSERT_FALSE(of_floats.empty());
    Product p(ctx, x.a, x.b, x.c, x.d, true, false);
    cublasLtMatmulHeuristicResult_t checked = {};
    cublasLtMatmulAlgo_t zeros = {};
    for (const cublasLtMatmulAlgo_t* algo : {&of_floats[0].algo, (const cublasLtMatmulAlgo_t*)&zeros})
        EXPECT_OF_LIBRARY(cublasLtMatmulAlgoCheck(ctx.cublas, &p.op, &x.a.layout, &x.b.layout, &x.c.layout, &x.d.layout, algo,
                                                  &checked) != CUBLAS_STATUS_SUCCESS);
}

// ---- only on the emulator --------------------------------------------------------------------------------------------------
#ifndef __CUDACC__
TEST(CublasLtEmulator, LeastAccurateFirst) {
    gpu::Ctx ctx;
    Operands x({CUDA_R_16BF, CUDA_R_16BF}, 64, 48, 200, true, false);
    Product p(ctx, x.a, x.b, x.c, x.d, true, false);
    p.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_MASK);
    const auto found = p.algorithms(1);
    uint32_t scheme = 0;
    size_t written;
    CUBLAS(cublasLtMatmulAlgoConfigGetAttribute(&found[0].algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, 4, &written));
    EXPECT_EQ(scheme, (uint32_t)CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
}

TEST(CublasLtEmulatorDeathTest, LeavingDeviceMemoryEndsTheProgram) {
    gpu::Ctx ctx;
    Operands x({CUDA_R_16BF, CUDA_R_16BF}, 24, 16, 40, true, false);
    Product p(ctx, x.a, x.b, x.c, x.d, true, false);
    const auto found = p.algorithms(1);
    std::vector<uint16_t> host(24 * 16 + 8);
    const float one = 1, zero = 0;
    const auto run = [&](const void* a, void* d) {
        (void)cublasLtMatmul(ctx.cublas, &p.op, &one, a, &x.a.layout, x.b.p(), &x.b.layout, &zero, d, &x.d.layout, d,
                             &x.d.layout, &found[0].algo, ctx.workspace, p.workspace_bytes, ctx.stream);
    };
    EXPECT_DEATH(run((const char*)x.a.p() + 512, x.d.p()), "A: .* not device memory");  // past the guard after it
    void* of_host = (void*)(((uintptr_t)host.data() + 15) / 16 * 16);
    EXPECT_DEATH(run(x.a.p(), of_host), "D: .* not device memory");
}
#endif

}  // namespace test_gpu_cublaslt
