// Ops of the GPU: the tests of op_tests.h, and tests of only this backend: rotary positions, memory not aligned to 16
// bytes, more rows than the y dimension of a grid allows, in-place outputs, empty inputs, and the same bits in every run
// whatever the contents of scratch memory.
#include <gtest/gtest.h>

#include "../../llmc/cpu/optimizer.h"
#include "../../llmc/gpu/embed.cuh"
#include "../../llmc/gpu/experts.cuh"
#include "../../llmc/gpu/lora.cuh"
#include "../../llmc/gpu/loss.cuh"
#include "../../llmc/gpu/matmul.cuh"
#include "../../llmc/gpu/memory.cuh"
#include "../../llmc/gpu/mlp.cuh"
#include "../../llmc/gpu/norm.cuh"
#include "../../llmc/gpu/optimizer.cuh"
#include "../../llmc/gpu/quantized.cuh"
#include "../../llmc/gpu/reduce.cuh"
#include "../../llmc/gpu/rope.cuh"
#include "device_memory.h"
#include "library.h"

namespace backend = gpu;

template <class T>
using Buffer = test::DeviceMemory<T>;

#include "../op_tests.h"

namespace test_gpu_ops {

// ---- rotary positions -----------------------------------------------------------------------------------------------------
TEST(Rope, ForwardBackwardAndValuesUntouched) {
    gpu::Ctx ctx;
    Rng rng(20);
    struct Case {
        int N, NH, NKV, HS, P, rotated;
    };
    for (const Case& k : {Case{1, 1, 1, 2, 1, 2}, Case{33, 4, 2, 8, 50, 8}, Case{131, 3, 1, 10, 131, 10},
                          Case{17, 2, 2, 128, 2048, 128}, Case{5, 40, 3, 16, 7, 16}, Case{66000, 1, 1, 2, 9, 2},
                          Case{33, 4, 2, 64, 50, 16}, Case{19, 3, 1, 80, 31, 20}, Case{9, 3, 1, 9, 31, 6}}) {
        if (k.N > most_rows) continue;
        const int half = k.rotated / 2, heads = k.NH + 2 * k.NKV;
        std::vector<real> angles;
        rope_table(angles, k.P, k.rotated, 10000);
        const Input<real> table(angles);
        std::vector<int> at = rng.integers(k.N, 0, k.P);
        at[0] = 0;
        at[k.N - 1] = k.P - 1;
        const Input<int> positions(at);
        const Input<floatX> qkv(rng.normals<floatX>((size_t)k.N * heads * k.HS));
        for (const int direction : {1, -1}) {
            Buffer<floatX> turned(qkv.host(), "qkv");
            const Rope rope = {positions.p(), table.p(), k.rotated};
            const AttentionShape shape = {1, k.N, k.NH, k.NKV, k.HS};
            if (direction == 1) gpu::rope_forward(ctx, turned.p(), rope, shape);
            else gpu::rope_backward(ctx, turned.p(), rope, shape);
            // Two products and their sum, each rounded.
            Doubles expected = doubles(qkv), allowed(expected.size());
            for (size_t i = 0; i < expected.size(); i++) {
                const int c = (int)(i % k.HS);
                const size_t n = i / k.HS / heads;
                if ((int)(i / k.HS % heads) >= k.NH + k.NKV || c >= k.rotated) continue;
                const size_t entry = ((size_t)at[n] * half + c % half) * 2;
                const double cosine = angles[entry], sine = direction * (double)angles[entry + 1];
                const double own = as_double(qkv[i]) * cosine;
                const double other = c < half ? -as_double(qkv[i + half]) * sine : as_double(qkv[i - half]) * sine;
                expected[i] = own + other;
                allowed[i] = 2 * u * (std::abs(own) + std::abs(other)) + rounding * std::abs(own + other);
            }
            expect_close(turned.get(), expected, allowed, direction == 1 ? "forward" : "backward");
        }
    }
}

// ---- only this backend ----------------------------------------------------------------------------------------------------
// Arguments one element past a multiple of 16 bytes give the results of aligned ones, except for the order of sums.
TEST(Unaligned, AsAligned) {
    gpu::Ctx ctx;
    Rng rng(21);
    const int N = 5, C = 64, V = 70, Vp = 72, n = N * C;
    const auto shifted = [](const auto& values) {
        auto result = values;
        result.insert(result.begin(), values[0]);
        return result;
    };
    const auto rest = [](const auto& values) {
        auto result = values;
        result.erase(result.begin());
        return result;
    };
    const auto close = [](const auto& actual, const auto& expected, const char* name) {
        expect_close(actual, doubles(expected), 1e-5, 2 * rounding + 64 * u, name);
    };
    const std::vector<floatX> a = rng.normals<floatX>(n), b = rng.normals<floatX>(n), w = rng.normals<floatX>(C),
                              logits = rng.normals<floatX>(N * Vp), wide = rng.normals<floatX>(2 * n);
    const std::vector<real> moments = rng.normals<real>(n), zeros(n, 0), statistics(N, 1);
    const Input<int> ids(rng.integers(N, 0, N));
    struct Outputs {
        std::vector<floatX> sum, gelu, swiglu, dswiglu, norm, dnorm, embedding, logits, param;
        std::vector<real> dw, dwte, weights;
        double squares;
    } results[2];
    for (const int offset : {0, 1}) {
        const auto in = [&](const auto& values) { return offset ? shifted(values) : values; };
        const auto out = [&](const auto& buffer) { return offset ? rest(buffer.get()) : buffer.get(); };
        const Input<floatX> A(in(a)), B(in(b)), W(in(w)), wide_in(in(wide));
        Buffer<real> ones(statistics);
        const floatX *pa = A.p() + offset, *pb = B.p() + offset, *pw = W.p() + offset;
        Buffer<floatX> x(n + offset), two(2 * n + offset), l(in(logits)), param(in(a));
        Buffer<LowerHalf> lower(n + offset);
        Buffer<real> s1(N), s2(N), s3(N), dw(in(std::vector<real>(C))), db(in(std::vector<real>(C))), dwte(in(zeros)),
            m(in(zeros)), v(in(zeros));
        const Input<real> gradient(in(moments));
        Outputs& r = results[offset];
        gpu::residual_forward(ctx, x.p() + offset, pa, pb, n);
        r.sum = out(x);
        gpu::activation_backward(ctx, x.p() + offset, pa, pb, N, C, Activation::gelu);
        r.gelu = out(x);
        gpu::activation_forward(ctx, x.p() + offset, wide_in.p() + offset, N, C, Activation::swiglu);
        r.swiglu = out(x);
        gpu::activation_backward(ctx, two.p() + offset, pa, wide_in.p() + offset, N, C, Activation::swiglu);
        r.dswiglu = out(two);
        gpu::layernorm_forward(ctx, x.p() + offset, {s1.p(), s2.p()}, nullptr, pa, nullptr, {pw, pw, C, 1e-5f}, N);
        r.norm = out(x);
        gpu::layernorm_backward(ctx, x.p() + offset, {dw.p() + offset, db.p() + offset}, pa, pb, {pw, pw, C, 1e-5f},
                                {ones.p(), ones.p()}, N, Acc::Set);
        r.dnorm = out(x);
        r.dw = out(dw);
        gpu::embedding_forward(ctx, x.p() + offset, ids.p(), nullptr, pa, nullptr, N, C, {0, N, N});
        r.embedding = out(x);
        gpu::embedding_backward(ctx, dwte.p() + offset, nullptr, pa, ids.p(), nullptr, N, C, {0, N, N});
        r.dwte = out(dwte);
        gpu::classifier(ctx, l.p() + offset, {s1.p(), s2.p(), s3.p()}, ids.p(), N, {0, V, Vp}, {1, 0, true});
        r.logits = out(l);
        gpu::adamw(ctx, param.p() + offset, lower.p() + offset, m.p() + offset, v.p() + offset, gradient.p() + offset, n,
                   {0.1f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1}, {});
        r.param = out(param);
        const std::vector<real> weights = whole_weights(param.get(), lower.get());
        r.weights = offset ? rest(weights) : weights;
        r.squares = gpu::sum_of_squares(ctx, gradient.p() + offset, n);
    }
    const Outputs &aligned = results[0], &other = results[1];
    close(other.sum, aligned.sum, "residual");
    close(other.gelu, aligned.gelu, "gelu");
    close(other.swiglu, aligned.swiglu, "swiglu");
    close(other.dswiglu, aligned.dswiglu, "dswiglu");
    close(other.norm, aligned.norm, "norm");
    close(other.dnorm, aligned.dnorm, "dnorm");
    close(other.dw, aligned.dw, "dw");
    close(other.embedding, aligned.embedding, "embedding");
    close(other.dwte, aligned.dwte, "dwte");
    close(other.logits, aligned.logits, "logits");
    close(other.param, aligned.param, "param");
    close(other.weights, aligned.weights, "weights");
    EXPECT_NEAR(other.squares, aligned.squares, 64 * u * aligned.squares);
}

TEST(Rows, MoreThanAGridsOtherDimensions) {
    gpu::Ctx ctx;
    const int N = std::min(66000, most_rows);
    const Input<floatX> gate_up(Rng(22).normals<floatX>(2 * N));
    Buffer<floatX> out(N);
    gpu::activation_forward(ctx, out.p(), gate_up.p(), N, 1, Activation::swiglu);
    Doubles expected(N), allowed(N);
    for (int n = 0; n < N; n++) {
        const double g = as_double(gate_up[2 * n]);
        expected[n] = g / (1 + std::exp(-g)) * as_double(gate_up[2 * n + 1]);
        allowed[n] = (rounding + sigmoid_relative_error(g)) * std::abs(expected[n]) + tiny;
    }
    expect_close(out.get(), expected, allowed, "swiglu");
}

// Small whole numbers, so that the sum is exact.
TEST(SumOfSquares, MoreTilesThanBlocks) {
    gpu::Ctx ctx;
    const size_t n = thorough ? (size_t)512 * 8192 + 5001 : 5001;
    std::vector<real> x(n);
    double expected = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = (real)((int)(i * 2654435761u % 15) - 7);
        expected += (double)x[i] * x[i];
    }
    EXPECT_EQ(gpu::sum_of_squares(ctx, Input<real>(x).p(), n), expected);
}

TEST(InPlace, OutputsMayBeInputs) {
    gpu::Ctx ctx;
    Rng rng(23);
    const int N = 7, C = thorough ? 520 : 40, n = N * C;
    const Input<floatX> a(rng.normals<floatX>(n)), b(rng.normals<floatX>(n)), w(rng.normals<floatX>(C));
    Buffer<real> rstd(std::vector<real>(N, 1));
    Buffer<floatX> apart(n), together(a.host());
    gpu::activation_forward(ctx, apart.p(), a.p(), N, C, Activation::gelu);
    gpu::activation_forward(ctx, together.p(), together.p(), N, C, Activation::gelu);
    expect_same_bits(together.get(), apart.get(), "gelu");
    together.set(a.host());
    gpu::activation_backward(ctx, apart.p(), a.p(), b.p(), N, C, Activation::gelu);
    gpu::activation_backward(ctx, together.p(), together.p(), b.p(), N, C, Activation::gelu);
    expect_same_bits(together.get(), apart.get(), "gelu backward");
    Buffer<floatX> wide(n / 2 * 2), wide_together(b.host());
    const int F = C / 2;
    gpu::activation_backward(ctx, wide.p(), a.p(), b.p(), N, F, Activation::swiglu);
    gpu::activation_backward(ctx, wide_together.p(), a.p(), wide_together.p(), N, F, Activation::swiglu);
    expect_same_bits(wide_together.get(), wide.get(), "swiglu backward");
    // The residual stream's sum, and a gradient that overwrites its input.
    Buffer<floatX> sum(n), out(n), sum_together(a.host()), out_together(n);
    Buffer<real> r(N);
    const NormParams params = {w.p(), nullptr, C, 1e-5f};
    gpu::rmsnorm_forward(ctx, out.p(), {nullptr, r.p()}, sum.p(), a.p(), b.p(), params, N);
    gpu::rmsnorm_forward(ctx, out_together.p(), {nullptr, r.p()}, sum_together.p(), sum_together.p(), b.p(), params, N);
    expect_same_bits(sum_together.get(), sum.get(), "sum");
    expect_same_bits(out_together.get(), out.get(), "norm of the sum");
    Buffer<real> dw(std::vector<real>(C, 0)), dw_together(std::vector<real>(C, 0));
    together.set(a.host());
    gpu::rmsnorm_backward(ctx, apart.p(), {dw.p(), nullptr}, a.p(), b.p(), params, {nullptr, rstd.p()}, N, Acc::Set);
    gpu::rmsnorm_backward(ctx, together.p(), {dw_together.p(), nullptr}, together.p(), b.p(), params, {nullptr, rstd.p()}, N,
                          Acc::Set);
    expect_same_bits(together.get(), apart.get(), "norm backward");
    expect_same_bits(dw_together.get(), dw.get(), "norm backward, weight");
}

TEST(Empty, NothingHappens) {
    gpu::Ctx ctx;
    gpu::embedding_forward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 8, {0, 8, 8});
    gpu::embedding_backward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 8, {0, 8, 8});
    gpu::layernorm_forward(ctx, nullptr, {}, nullptr, nullptr, nullptr, {nullptr, nullptr, 8, 1e-5f}, 0);
    gpu::layernorm_backward(ctx, nullptr, {}, nullptr, nullptr, {nullptr, nullptr, 8, 1e-5f}, {}, 0, Acc::Set);
    gpu::rope_forward(ctx, nullptr, {}, {0, 8, 1, 1, 2});
    gpu::activation_forward(ctx, nullptr, nullptr, 0, 8, Activation::gelu);
    gpu::activation_forward(ctx, nullptr, nullptr, 0, 8, Activation::swiglu);
    gpu::activation_backward(ctx, nullptr, nullptr, nullptr, 0, 8, Activation::swiglu);
    gpu::classifier(ctx, nullptr, {}, nullptr, 0, {0, 8, 8}, {1, 0, true});
    gpu::loss_sums(ctx, nullptr, {}, nullptr, 0);
    gpu::adamw(ctx, nullptr, nullptr, {}, {}, {}, 0, {1, 0, 0, 1, 0, 1, 1}, {});
}

// GeLU fused into the product and in a separate kernel; from Hopper on fused unless that is slower.
TEST(LinearGelu, FusedAndApart) {
    int runs = 0;
    for (const auto fusion : {gpu::Fusion::always, gpu::Fusion::never, gpu::Fusion::if_faster, gpu::Fusion::always}) {
        const bool refused = runs++ == 3;  // by the library
        if (refused && !test::library_is_emulated) break;
        const test::Refusals refusals(refused);
        gpu::Ctx ctx;
        gpu::use_gemm_cache(ctx, "", false);
        ctx.plans->fusion = fusion;
        check_linear_gelu(ctx);
        int fused = 0;
        for (const auto& [key, plan] : ctx.plans->plans)
            fused += (key.epilogue == CUBLASLT_EPILOGUE_GELU_AUX || key.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
                      key.epilogue == CUBLASLT_EPILOGUE_DGELU) &&
                     !plan->apart;
        const bool wanted =
            !refused && (fusion == gpu::Fusion::always || (fusion == gpu::Fusion::if_faster && ctx.capability >= 90));
        const int expected =
            wanted && std::is_same<floatX, bf16>::value ? 6 : 0;  // in fp32 never: the library's tanh has 11 bits
        EXPECT_OF_LIBRARY(fused == expected) << fused << " GeLUs are fused, not " << expected;
    }
}

// The same bits in every run, whatever earlier ops left in scratch memory.
TEST(Ops, SameBitsInEachRun) {
    const auto run = [](int left_behind) {
        gpu::Ctx ctx;
        Rng rng(24);
        Doubles all;
        const auto collect = [&](const auto& buffer) {
            const Doubles d = doubles(buffer.get());
            all.insert(all.end(), d.begin(), d.end());
            const size_t bytes = 4 << 20;
            CUDA(cudaMemset(ctx.scratch(bytes), left_behind, bytes));
            CUDA(cudaDeviceSynchronize());
        };
        const int N = thorough ? 301 : 75, C = thorough ? 264 : 72, V = 97, Vp = 104;
        const Input<int> tokens(rng.integers(N, 0, V)), positions(rng.integers(N, 0, 5));
        const Input<floatX> dout(rng.normals<floatX>(N * C)), inp(rng.normals<floatX>(N * C)), w(rng.normals<floatX>(C));
        Buffer<real> ones(std::vector<real>(N, 1));
        Buffer<floatX> dinp(N * C), logits(rng.normals<floatX>(N * Vp));
        Buffer<real> dwte(rng.normals<real>(V * C)), dwpe(rng.normals<real>(5 * C)), dw(rng.normals<real>(C)),
            db(rng.normals<real>(C)), loss(N), zloss(N), lse(N);
        const NormParams params = {w.p(), nullptr, C, 1e-5f};
        const NormStatistics statistics = {ones.p(), ones.p()};
        const RowLosses losses = {loss.p(), zloss.p(), lse.p()};
        const size_t bytes = 4 << 20;
        CUDA(cudaMemset(ctx.scratch(bytes), left_behind, bytes));
        CUDA(cudaDeviceSynchronize());
        gpu::embedding_backward(ctx, dwte.p(), dwpe.p(), dout.p(), tokens.p(), positions.p(), N, C, {0, V, V});
        collect(dwte);
        collect(dwpe);
        gpu::layernorm_backward(ctx, dinp.p(), {dw.p(), db.p()}, dout.p(), inp.p(), params, statistics, N, Acc::Set);
        collect(dinp);
        collect(dw);
        collect(db);
        gpu::rmsnorm_backward(ctx, dinp.p(), {dw.p(), db.p()}, dout.p(), inp.p(), params, statistics, N, Acc::Add);
        collect(dinp);
        collect(dw);
        gpu::classifier(ctx, logits.p(), losses, tokens.p(), N, {0, V, Vp}, {1, 1e-4f, true});
        collect(logits);
        collect(loss);
        collect(zloss);
        collect(lse);
        Buffer<double> sums(Doubles(sizeof(LossSums) / sizeof(double), 0));
        gpu::loss_sums(ctx, (LossSums*)sums.p(), losses, tokens.p(), N);
        collect(sums);
        all.push_back(gpu::sum_of_squares(ctx, dwte.p(), dwte.size()));
        return all;
    };
    const Doubles once = run(0xff);
    for (const double x : once) ASSERT_TRUE(std::isfinite(x));
    expect_same_bits(run(0), once, "a second run");
}

// Memory is zero when allocate_memory returns, whichever stream is used next.
TEST(Memory, ClearingComesBeforeUploads) {
    gpu::Ctx ctx;
    const std::vector<int> values(1000, 7);
    for (int i = 0; i < 100; i++) {
        std::vector<int> got(2 * values.size(), -1);
        const size_t bytes = got.size() * sizeof(int);
        int* memory = (int*)gpu::allocate_memory(bytes);
        gpu::upload(ctx, memory, values.data(), values.size() * sizeof(int));
        gpu::download(ctx, got.data(), memory, bytes);
        gpu::release_memory(memory, bytes);
        for (size_t k = 0; k < got.size(); k++) ASSERT_EQ(got[k], k < values.size() ? 7 : 0) << k << ", round " << i;
    }
}

TEST(InitialWeights, BitsOfTheCpu) {
    gpu::Ctx ctx;
    cpu::Ctx host(2);
    const int rows = 9, cols = 33;
    const InitialWeights drawn{1234567890123, 5, 0.02, 0, 50, 45, 3, cols, 70}, constant{1, 2, 0, 1, 50, 41, 0, cols, cols};
    for (const InitialWeights& w : {drawn, constant})
        for (const size_t first : {(size_t)0, (size_t)70}) {
            const size_t n = rows * cols - first;
            std::vector<floatX> param(n);
            std::vector<LowerHalf> lower(n);
            Buffer<floatX> device_param(n, "param"), alone(n, "param alone");
            Buffer<LowerHalf> device_lower(n, "lower");
            cpu::initialize_weights(host, param.data(), lower.data(), w, first, n);
            gpu::initialize_weights(ctx, device_param.p(), device_lower.p(), w, first, n);
            gpu::initialize_weights(ctx, alone.p(), nullptr, w, first, n);
            expect_same_bits(device_param.get(), param, "param");
            expect_same_bits(alone.get(), param, "param alone");
            if (has_lower_halves) {
                EXPECT_EQ(device_lower.get(), lower);
            }
        }
}

// A sixteenth of the memory, at least 1024 rows, at most 2^31 - 1 logits.
TEST(Memory, RowsOfLogitsAtATime) {
    gpu::Ctx ctx;
    const size_t gpt2 = 50304 * sizeof(floatX);
    ctx.memory_bytes = (size_t)1 << 30;
    EXPECT_EQ(gpu::logits_rows(ctx, gpt2), 1024u);
    ctx.memory_bytes = (size_t)48 << 30;
    EXPECT_EQ(gpu::logits_rows(ctx, gpt2), ((size_t)3 << 30) / gpt2 / 128 * 128);
    ctx.memory_bytes = (size_t)640 << 30;
    EXPECT_EQ(gpu::logits_rows(ctx, gpt2), 42624u);
    EXPECT_LE(gpu::logits_rows(ctx, gpt2) * 50304, (size_t)INT_MAX);
}

// Below, at and above the size of the page-locked slots used for copies, each slot used more than once.
TEST(Memory, CopiesOfAnyLength) {
    gpu::Ctx ctx;
    const size_t slot = gpu::Staging::slot_bytes, ring = slot * gpu::Staging::n_slots;
    uint8_t* memory = (uint8_t*)gpu::allocate_memory(2 * ring + 6);
    std::vector<uint8_t> values(2 * ring + 5), got;
    for (size_t i = 0; i < values.size(); i++) values[i] = (uint8_t)(i * 2654435761u >> 23);
    for (const size_t n : {(size_t)0, (size_t)1, slot, slot + 1, ring, 2 * ring + 5}) {
        got.assign(n + 1, 99);
        gpu::upload(ctx, memory + 1, values.data(), n);
        gpu::download(ctx, got.data(), memory + 1, n);
        EXPECT_TRUE(std::equal(values.begin(), values.begin() + (long)n, got.begin())) << n << " bytes";
        EXPECT_EQ(got[n], 99) << "beyond " << n << " bytes";
        gpu::clear(ctx, memory, 2 * ring + 6);
    }
    gpu::release_memory(memory, 2 * ring + 6);
}

#ifndef __CUDACC__
// Two unordered streams, and a source that is overwritten too early.
TEST(Emulator, ShowsMissingOrderOfStreams) {
    const emu::Config before = emu::config();
    emu::config().order = emu::Order::random;
    cudaStream_t writes, reads;
    cudaEvent_t written;
    CUDA(cudaStreamCreateWithFlags(&writes, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&reads, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
    uint8_t* x;
    CUDA(cudaMalloc(&x, 1));
    const auto wrong_of_40 = [&](bool waits) {
        int wrong = 0;
        for (unsigned seed = 1; seed <= 40; seed++) {
            emu::config().seed = seed;
            uint8_t got = 0;
            CUDA(cudaMemset(x, 0, 1));
            CUDA(cudaDeviceSynchronize());
            CUDA(cudaMemsetAsync(x, 1, 1, writes));
            CUDA(cudaEventRecord(written, writes));
            if (waits) CUDA(cudaStreamWaitEvent(reads, written));
            CUDA(cudaMemcpyAsync(&got, x, 1, cudaMemcpyDeviceToHost, reads));
            wrong += got != 1;
        }
        return wrong;
    };
    EXPECT_EQ(wrong_of_40(true), 0);
    EXPECT_GE(wrong_of_40(false), 5);  // of about 20

    void* page_locked;
    CUDA(cudaMallocHost(&page_locked, 1));
    uint8_t pageable = 0, got[2] = {};
    for (uint8_t* source : {(uint8_t*)page_locked, &pageable}) {
        *source = 1;
        CUDA(cudaMemcpyAsync(x, source, 1, cudaMemcpyHostToDevice, writes));
        *source = 2;  // without waiting
        CUDA(cudaMemcpyAsync(&got[source == &pageable], x, 1, cudaMemcpyDeviceToHost, writes));
    }
    EXPECT_EQ(got[0], 2) << "page-locked memory is read late";
    EXPECT_EQ(got[1], 1) << "pageable memory is read at once";
    CUDA(cudaFree(x));
    CUDA(cudaFreeHost(page_locked));
    CUDA(cudaEventDestroy(written));
    CUDA(cudaStreamDestroy(writes));
    CUDA(cudaStreamDestroy(reads));
    emu::config() = before;
}
#endif

}  // namespace test_gpu_ops
