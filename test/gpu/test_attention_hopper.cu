// Attention for Hopper compared with sums in double (attention_reference.h), in bf16 at any precision of the build.
#include <gtest/gtest.h>

#include "../../llmc/gpu/attention_hopper_backward.cuh"
#include "attention_cases.h"
#include "device_memory.h"

namespace test_gpu_attention_hopper {

using namespace test;
using namespace test::attention;
using test::attention::rounding, test::attention::u;  // not other files'
using Problem = attention::Problem<bf16>;
using Results = attention::Results<bf16>;

// ---- the ops under test ----------------------------------------------------------------------------------------------------
// Backward in one kernel accumulates the queries' gradients in memory, in any order.
enum class Backward { none, two_kernels, one_kernel };
Results run(gpu::Ctx& ctx, const Problem& p, Backward backward = Backward::two_kernels) {
    const AttentionShape shape = p.shape();
    const size_t n = p.k.rows() * p.k.NH;
    DeviceMemory<bf16> inp(p.qkv, "qkv"), gradient(p.dout, "dout"), out(n * p.k.HS, "out"), dqkv(p.qkv.size(), "dqkv");
    DeviceMemory<float> lse(n, "lse"), slopes(p.slopes, "slopes");
    DeviceMemory<float> sums(gpu::attention_hopper_sums(shape), "sums of queries' gradients");
    DeviceMemory<int> docs(p.doc_start, "doc_start");
    const AttentionMask mask = {p.k.masked() ? docs.p() : nullptr, p.k.alibi ? slopes.p() : nullptr};
    gpu::attention_forward_hopper(ctx, out.p(), lse.p(), inp.p(), mask, shape);
    if (backward == Backward::none) return {out.get(), dqkv.get(), lse.get(), {}};
    float* dq_sums = backward == Backward::one_kernel ? sums.p() : nullptr;
    gpu::attention_backward_hopper(ctx, dqkv.p(), gradient.p(), out.p(), lse.p(), inp.p(), mask, shape, dq_sums);
    expect_same_bits(inp.get(), p.qkv, "qkv, an input");
    expect_same_bits(gradient.get(), p.dout, "dout, an input");
    return {out.get(), dqkv.get(), lse.get(), {}};
}

// Weights (P, dS) are rounded to bf16. Score and shift are scaled by log2(e) and rounded before the special unit, which has
// an error of 2^-22.
struct HopperArithmetic : GpuKernelArithmetic {
    const int T;
    explicit HopperArithmetic(int T) : GpuKernelArithmetic(rounding<bf16>, 64), T(T) {}
    // The bias is slope times the tile's distance (at most T + 128) plus slope times the column.
    double bias(double slope, int) const override { return 4 * u * slope * (T + 128); }
    double cap(double cap, double value) const override { return tanh_approx_error(cap, value); }

private:
    double exponential(double score, double shift, double score_error, int more) const override {
        return special_unit_error(score - shift, score_error + 3 * u * (std::abs(score) + std::abs(shift)), 8 * u, more);
    }
};

void check(const Problem& p, const Results& r) {
    const Expected expected = attention::check(p, r, HopperArithmetic(p.k.T));
    // The bounds above are for the worst case. The usual error is checked by root mean squares: at most 1.5 times the value
    // for independent roundings, 1 / sqrt(6) of their maximum (1 / sqrt(3) from half a unit in the last place, and 1 /
    // sqrt(2) from numbers within a binade relative to its largest).
    const auto check_usual = [&](const std::vector<bf16>& x, const Bounded& of, int first_head, int heads, int all,
                                 const char* name) {
        double square = 0, allowed = 0;
        for (size_t i = 0; i < x.size(); i++) {
            const int head = (int)(i / p.k.HS % all);
            if (head < first_head || head >= first_head + heads) continue;
            square += std::pow(as_double(x[i]) - of.value[i], 2);
            allowed += of.usual[i];
        }
        const double ratio = std::sqrt(square / (allowed / 6));
        EXPECT_TRUE(ratio <= 1.5) << name << ": root mean square error " << ratio << " times that of independent roundings";
    };
    if (p.k.T == 1) return;  // dq and dk are 0, except for the rounding of D
    const int NH = p.k.NH, NKV = p.k.NKV, all = NH + 2 * NKV;
    check_usual(r.out, expected.out, 0, NH, NH, "out");
    check_usual(r.dqkv, expected.dqkv, 0, NH, all, "dq");
    check_usual(r.dqkv, expected.dqkv, NH, NKV, all, "dk");
    check_usual(r.dqkv, expected.dqkv, NH + NKV, NKV, all, "dv");
}

// ThreadSanitizer takes half a second per block of 384 threads and checks order, not values: small shapes suffice.
#ifdef EMU_TSAN
constexpr bool slow = true;
#else
constexpr bool slow = false;
#endif
#ifdef EMU_ASAN
constexpr unsigned runs = 1;  // this also slows down the emulator
#else
constexpr unsigned runs = 3;
#endif

template <class Base>
class OnHopper : public Base {
protected:
    gpu::Ctx ctx;
    void SetUp() override {
        if (!gpu::attention_hopper_takes(ctx, 64)) GTEST_SKIP() << "wants compute capability 9.0; this is " << ctx.name;
        if (slow && !small()) GTEST_SKIP() << "takes too long under ThreadSanitizer";
    }
    virtual bool small() const { return false; }
};
class AttentionHopper : public OnHopper<testing::TestWithParam<Case>> {
    bool small() const override { return GetParam().B == 1 && GetParam().T * GetParam().NH <= 260; }
};
class AttentionHopperMore : public OnHopper<testing::Test> {};

// T: one token, part of a warpgroup's 64 rows, all of them, one more, two warpgroups, part of a second query tile; then
// enough key tiles for a ring to wrap around within an item (3 of 128 at HS 128, 5 at HS 64).
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionHopper,
                         testing::Values(Case{1, 1, 1, 1, 64, false, false}, Case{2, 17, 2, 1, 64, true, true},
                                         Case{1, 64, 2, 2, 64, false, false}, Case{1, 65, 5, 1, 64, true, false},
                                         Case{1, 260, 1, 1, 64, false, true}, Case{2, 200, 4, 2, 64, true, true},
                                         Case{3, 200, 2, 1, 64, false, true}, Case{1, 1000, 1, 1, 64, false, false},
                                         Case{1, 1, 2, 1, 128, true, true}, Case{2, 17, 5, 1, 128, true, false},
                                         Case{1, 64, 1, 1, 128, false, true}, Case{1, 65, 2, 2, 128, false, false},
                                         Case{1, 128, 4, 2, 128, true, false}, Case{2, 200, 2, 1, 128, true, true},
                                         Case{1, 200, 1, 1, 128, false, false}, Case{1, 400, 1, 1, 128, true, true}));

TEST_P(AttentionHopper, ForwardAndBackward) {
    const Problem p(GetParam(), 1);
    spoil_scratch(ctx);
    const Results r = run(ctx, p);
    check(p, r);
    expect_first_tokens_unchanged(p, r);
}

// Caps, dropout, both, with everything else that changes scores; sequence lengths that are not a multiple of a draw's four
// keys.
INSTANTIATE_TEST_SUITE_P(Options, AttentionHopper,
                         testing::Values(Case{2, 70, 4, 2, 64, false, false, 0, 0.7}, Case{1, 150, 2, 2, 64, true, true, 20, 2},
                                         Case{2, 65, 2, 1, 64, false, true, 0, 0, 0.3},
                                         Case{1, 260, 2, 1, 64, true, false, 0, 1.5, 0.2},
                                         Case{1, 130, 2, 1, 128, false, false, 0, 0.7},
                                         Case{2, 130, 2, 1, 128, true, true, 40, 2, 0.2},
                                         Case{1, 200, 2, 2, 128, false, false, 0, 0, 0.1}));

TEST_P(AttentionHopper, BackwardInOneKernel) {
    if (GetParam().softcap > 0 || GetParam().dropout > 0) GTEST_SKIP() << "takes two kernels";
    const Problem p(GetParam(), 1);
    spoil_scratch(ctx);
    check(p, run(ctx, p, Backward::one_kernel));
}

// Repeated runs, with rings that wrap around several times: a missing wait would sometimes change bits.
TEST_F(AttentionHopperMore, TheSameBitsInEveryRun) {
    for (const Case& k :
         {Case{2, 200, 4, 2, 64, true, true}, Case{1, 700, 1, 1, 64, false, false}, Case{1, 600, 2, 1, 128, false, false}}) {
        const Problem p(k, 5);
        const Results r = run(ctx, p);
        for (unsigned i = 1; i <= runs; i++) {
#ifndef __CUDACC__
            emu::config().seed += i;  // another order of threads
#endif
            spoil_scratch(ctx);
            expect_same_results(run(ctx, p), r);
        }
    }
}

// Many short items, two blocks: a stride; three: a counter.
TEST_F(AttentionHopperMore, ItemsByStrideOrCounter) {
    const Problem p(Case{4, 20, 8, 4, 64, true, true}, 6);
    ctx.multiprocessors = 3;
    const Results counted = run(ctx, p, Backward::none);
    ctx.multiprocessors = 2;
    expect_same_results(run(ctx, p, Backward::none), counted);
}

// Large scores of both signs: whole rows far above and far below zero.
TEST_F(AttentionHopperMore, LargeScoresDoNotOverflow) {
    for (const double sign : {1.0, -1.0}) {
        Problem p(Case{1, 140, 2, 1, 64, false, true}, 7);
        for (size_t i = 0; i < p.qkv.size(); i++) {
            const size_t head = i % p.k.width() / p.k.HS;
            if (head < 2) p.qkv[i] = bf16(64.0f);
            if (head == 2) p.qkv[i] = bf16((float)(sign * (16 + i % 7)));
        }
        const Results r = run(ctx, p);
        check(p, r);
        for (const float x : r.lse) ASSERT_GT(sign * x, 5000);
    }
}

TEST_F(AttentionHopperMore, LaterTokensChangeNothingBefore) {
    const Problem p({1, 210, 2, 1, 64, true, false}, 8);
    expect_later_tokens_change_nothing(p, {1, 63, 64, 128, 200}, [&](const Problem& any) { return run(ctx, any); });
}

TEST_F(AttentionHopperMore, DocumentsDoNotSeeEachOther) {
    const Problem p({2, 200, 2, 1, 128, true, true}, 10);
    expect_documents_apart(p, {0, 1, 3, 64, 129}, [&](const Problem& any) { return run(ctx, any); });
}

}  // namespace test_gpu_attention_hopper
