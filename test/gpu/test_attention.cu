// Attention on the GPU: the simple and the tensor-core kernels compared with sums in double (attention_reference.h). These
// bounds are for the worst case; for the usual error, root mean squares must be at most twice as large as for the
// CPU's plain loops.
#include <gtest/gtest.h>

#include <set>

#include "../../llmc/cpu/attention.h"
#include "../../llmc/gpu/attention.cuh"
#include "attention_cases.h"
#include "device_memory.h"

namespace test_gpu_attention {

using namespace test;
using namespace test::attention;
using test::attention::rounding, test::attention::u;  // not other files'
using Problem = attention::Problem<floatX>;
using Results = attention::Results<floatX>;

// ThreadSanitizer makes a block a hundred times slower: only smaller cases, which also have all kinds of tiles.
#ifdef EMU_TSAN
constexpr bool brief = true;
#else
constexpr bool brief = false;
#endif

// ---- the ops under test ----------------------------------------------------------------------------------------------------
Results run(gpu::Ctx& ctx, const Problem& p) {
    const size_t n = p.k.rows() * p.k.NH;
    const AttentionShape shape = p.shape();
    DeviceMemory<floatX> inp(p.qkv, "qkv"), gradient(p.dout, "dout"), out(n * p.k.HS, "out"), dqkv(p.qkv.size(), "dqkv");
    DeviceMemory<floatX> sinks(p.sinks, "sinks");
    DeviceMemory<float> lse(n, "lse"), slopes(p.slopes, "slopes"), dsinks(std::vector<float>(p.k.NH), "dsinks");
    DeviceMemory<int> docs(p.doc_start, "doc_start");
    const AttentionMask mask = {p.k.masked() ? docs.p() : nullptr, p.k.alibi ? slopes.p() : nullptr};
    const AttentionActs acts = {inp.p(), out.p(), lse.p()};
    gpu::attention_forward(ctx, out.p(), lse.p(), inp.p(), mask, shape);
    if (p.k.sinks) gpu::sinks_forward(ctx, out.p(), lse.p(), sinks.p(), shape);
    gpu::attention_backward(ctx, dqkv.p(), gradient.p(), acts, mask, shape, nullptr);
    if (p.k.sinks) gpu::sinks_backward(ctx, dsinks.p(), gradient.p(), acts, sinks.p(), shape);
    expect_same_bits(inp.get(), p.qkv, "qkv, an input");
    expect_same_bits(gradient.get(), p.dout, "dout, an input");
    return {out.get(), dqkv.get(), lse.get(), dsinks.get()};
}

Results run_plain_loops(const Problem& p) {
    cpu::Ctx ctx(1);
    ctx.plain = true;
    const size_t n = p.k.rows() * p.k.NH;
    Results r{std::vector<floatX>(n * p.k.HS), std::vector<floatX>(p.qkv.size()), std::vector<float>(n), {}};
    const AttentionMask mask = {p.k.masked() ? p.doc_start.data() : nullptr, p.k.alibi ? p.slopes.data() : nullptr};
    const AttentionActs acts = {p.qkv.data(), r.out.data(), r.lse.data()};
    cpu::attention_forward(ctx, r.out.data(), r.lse.data(), p.qkv.data(), mask, p.shape());
    cpu::attention_backward(ctx, r.dqkv.data(), p.dout.data(), acts, mask, p.shape(), nullptr);
    return r;
}

// The kernels for Hopper have their own tests.
struct BeforeHopper : gpu::Ctx {
    BeforeHopper() { capability = capability == 90 ? 80 : capability; }
};

// The implementations that support this head size: plain true or false.
std::vector<bool> implementations(const gpu::Ctx& ctx, const Case& k) {
    if (gpu::choose_attention(ctx, k.shape(1)) == AttentionKernels::simple) return {true};
    return {true, false};
}
const char* name_of(bool plain) { return plain ? "simple" : "tensor cores"; }

// The tensor-core kernels round weights and their gradients to bf16, and score and shift, in units of log2, before
// subtracting.
struct GpuArithmetic : GpuKernelArithmetic {
    const bool simple;
    explicit GpuArithmetic(bool simple) : GpuKernelArithmetic(simple ? 0 : rounding<floatX>, 32), simple(simple) {}
    double cap(double cap, double value) const override {
        return simple ? Arithmetic::cap(cap, value) : tanh_approx_error(cap, value);
    }
    // lse and out's factor are rounded again; this is an exponential of a difference from lse.
    double lse_with_sink(double top) const override { return (32 + 8 * std::abs(top)) * u; }
    double sink_gradient(double exponent) const override { return (16 + 4 * std::abs(exponent)) * u; }

private:
    double exponential(double score, double shift, double score_error, int more) const override {
        const double before = simple ? 0 : 3 * u * (std::abs(score) + std::abs(shift));
        return special_unit_error(score - shift, score_error + before, simple ? 4 * u : 8 * u, more);
    }
};

// ---- some rows of sequences -------------------------------------------------------------------------------------------------
TEST(AttentionRows, ChunksHaveTheResultsOfTheWholeSequence) {
    for (const Case& k : {Case{2, 70, 4, 2, 24, true, true}, Case{1, 150, 2, 1, 64, false, true},
                          Case{1, 140, 2, 2, 128, true, false}, Case{1, 130, 2, 1, 64, false, false, 30, 1.5},
                          Case{1, 70, 2, 1, 64, false, true, 0, 0, 0.3}, Case{1, 70, 1, 1, 256, false, true}})
        for (const std::vector<int>& starts : {std::vector{0, 1, 30}, {0, 64}})
            for (const bool plain : {true, false}) {
                SCOPED_TRACE(testing::Message() << name_of(plain) << ", " << testing::PrintToString(k));
                const Problem p(k, 14);
                gpu::Ctx ctx;
                ctx.plain = plain;
                expect_whole_from_chunks(p, run(ctx, p), starts, [&](const QueryChunk<floatX>& chunk) {
                    const size_t n = chunk.dout.size();
                    DeviceMemory<floatX> qkv(chunk.qkv, "qkv"), kv(chunk.kv, "kv"), dout(chunk.dout, "dout"), out(n, "out"),
                        dqkv(chunk.qkv.size(), "dqkv"), dkv(chunk.kv.size(), "dkv");
                    DeviceMemory<float> lse(n / k.HS, "lse"), slopes(p.slopes, "slopes");
                    DeviceMemory<int> docs(chunk.doc_start, "doc_start");
                    const AttentionMask mask = {k.masked() ? docs.p() : nullptr, k.alibi ? slopes.p() : nullptr};
                    gpu::attention_rows_forward(ctx, out.p(), lse.p(), qkv.p(), kv.p(), mask, chunk.shape);
                    gpu::attention_rows_backward(ctx, dqkv.p(), dkv.p(), dout.p(), {qkv.p(), out.p(), lse.p(), kv.p()}, mask,
                                                 chunk.shape);
                    return ChunkResults<floatX>{out.get(), dqkv.get(), dkv.get(), lse.get()};
                });
            }
}

// ---- values ----------------------------------------------------------------------------------------------------------------
class Attention : public testing::TestWithParam<Case> {};

// T: one token, part of a tile, a tile, one more, several; tiles have 32, 64 or 128 rows. Head sizes that only the simple
// kernels support: smaller than a warp, not a multiple of a pack, above 128.
INSTANTIATE_TEST_SUITE_P(SimpleSizes, Attention,
                         testing::Values(Case{1, 1, 1, 1, 16, false, false}, Case{2, 17, 2, 1, 40, true, true},
                                         Case{1, 65, 4, 2, 16, true, false}, Case{3, 75, 2, 2, 24, false, true},
                                         Case{1, 33, 6, 3, 5, true, false}, Case{1, 20, 2, 1, 144, true, true},
                                         Case{1, 34, 1, 1, 224, false, false}, Case{1, 3, 1, 1, 1, false, false}));
INSTANTIATE_TEST_SUITE_P(TensorCoreSizes, Attention,
                         testing::Values(Case{1, 1, 1, 1, 64, false, false}, Case{2, 17, 2, 1, 64, true, true},
                                         Case{1, 64, 2, 2, 64, false, false}, Case{1, 65, 4, 1, 64, true, false},
                                         Case{3, 130, 2, 1, 64, false, true}, Case{1, 260, 1, 1, 64, false, false},
                                         Case{2, 200, 1, 1, 64, true, true}, Case{1, 1, 2, 1, 80, true, true},
                                         Case{1, 65, 1, 1, 80, false, false}, Case{2, 130, 2, 1, 80, true, true},
                                         Case{1, 64, 2, 1, 96, false, false}, Case{2, 130, 1, 1, 96, true, true},
                                         Case{1, 17, 1, 1, 128, true, false}, Case{1, 128, 2, 2, 128, false, false},
                                         Case{1, 65, 4, 2, 128, true, false}, Case{2, 130, 2, 1, 128, false, true},
                                         Case{1, 200, 1, 1, 128, true, true}, Case{2, 17, 2, 1, 32, true, true},
                                         Case{2, 130, 4, 2, 32, false, true}, Case{1, 200, 2, 1, 32, true, false},
                                         Case{1, 17, 2, 1, 160, true, false}, Case{2, 130, 2, 1, 160, false, true},
                                         Case{1, 65, 1, 1, 192, false, false}, Case{2, 130, 2, 1, 192, true, true},
                                         Case{1, 17, 2, 1, 256, true, false}, Case{1, 64, 1, 1, 256, false, false},
                                         Case{2, 130, 2, 1, 256, false, true}));

// Windows of one key, within a tile, of a tile, of several. Caps, dropout and sinks, separately and together.
INSTANTIATE_TEST_SUITE_P(Options, Attention,
                         testing::Values(Case{1, 70, 2, 1, 16, false, false, 1}, Case{1, 150, 2, 2, 64, true, true, 20},
                                         Case{1, 130, 2, 1, 80, false, false, 64}, Case{2, 40, 4, 2, 32, true, true, 0, 1.5},
                                         Case{1, 70, 2, 1, 64, false, false, 0, 0.7},
                                         Case{1, 40, 2, 2, 16, false, true, 0, 0, 0.3},
                                         Case{2, 33, 4, 2, 64, false, false, 0, 0, 0, true},
                                         Case{1, 70, 2, 1, 24, true, true, 40, 2, 0.2, true}));
// On tensor cores: each head size with caps and dropout, and either by itself.
INSTANTIATE_TEST_SUITE_P(
    TensorCoreOptions, Attention,
    testing::Values(Case{1, 130, 2, 1, 64, false, true, 0, 0, 0.3}, Case{1, 150, 2, 1, 64, true, true, 40, 2, 0.2, true},
                    Case{1, 70, 2, 1, 32, true, false, 0, 1.5, 0.1}, Case{1, 70, 1, 1, 80, false, true, 30, 1.5, 0.1},
                    Case{1, 70, 2, 2, 96, true, false, 0, 1.5, 0.1}, Case{2, 70, 2, 1, 128, true, true, 40, 1.5, 0.1},
                    Case{1, 130, 1, 1, 128, false, false, 0, 0.7}, Case{1, 70, 2, 1, 256, false, false, 40, 1.5},
                    Case{1, 66, 1, 1, 256, true, true, 0, 1.5, 0.1}, Case{1, 70, 2, 1, 160, true, true, 40, 1.5, 0.1, true},
                    Case{1, 66, 1, 1, 160, false, false, 0, 0, 0.3}, Case{1, 70, 2, 1, 192, true, true, 40, 1.5, 0.1},
                    Case{1, 66, 1, 1, 192, false, false, 0, 0.7}));

TEST_P(Attention, EachImplementation) {
    const Problem p(GetParam(), 1);
    if (brief && p.k.rows() * p.k.NH > 270) GTEST_SKIP() << "too long under ThreadSanitizer";
    BeforeHopper ctx;
    for (const bool plain : implementations(ctx, p.k)) {
        SCOPED_TRACE(name_of(plain));
        ctx.plain = plain;
        spoil_scratch(ctx);
        const Results r = run(ctx, p);
        check(p, r, GpuArithmetic(plain));
        expect_first_tokens_unchanged(p, r);
    }
}

TEST(AttentionRuns, TheSameBitsTwice) {
    for (const Case& k :
         {Case{2, 40, 4, 2, 24, true, true}, Case{1, 140, 2, 1, 64, true, true}, Case{1, 70, 4, 1, 128, false, false}}) {
        const Problem p(k, 5);
        BeforeHopper ctx;
        for (const bool plain : implementations(ctx, k)) {
            ctx.plain = plain;
            const Results r = run(ctx, p);
            spoil_scratch(ctx);
            expect_same_results(run(ctx, p), r);
        }
    }
}

// Rounding weights to bf16 adds an independent error about as large as the result's rounding: root mean squares grow by
// about sqrt(2). More than a factor of two would be an avoidable loss.
TEST(AttentionAccuracy, AtMostTwiceTheErrorOfThePlainLoops) {
    if (brief) GTEST_SKIP() << "too long under ThreadSanitizer";
    BeforeHopper ctx;
    for (const Case& k : {Case{1, 150, 2, 1, 64, false, false}, Case{1, 150, 2, 2, 80, true, false},
                          Case{2, 130, 1, 1, 96, false, true}, Case{1, 200, 2, 1, 128, false, false}}) {
        SCOPED_TRACE(testing::PrintToString(k));
        const Problem p(k, 3);
        const GpuArithmetic arithmetic(true);
        const attention::Reference<floatX> reference(p, arithmetic);
        const auto errors = [&](const Results& r) {
            const Expected expected = reference.of(r);
            Doubles squares(4);
            for (size_t i = 0; i < r.out.size(); i++) squares[0] += std::pow(as_double(r.out[i]) - expected.out.value[i], 2);
            for (size_t i = 0; i < r.dqkv.size(); i++) {
                const int head = (int)(i % k.width() / k.HS), part = head < k.NH ? 1 : head < k.NH + k.NKV ? 2 : 3;
                squares[part] += std::pow(as_double(r.dqkv[i]) - expected.dqkv.value[i], 2);
            }
            return squares;
        };
        const Doubles plain_loops = errors(run_plain_loops(p));
        for (const bool plain : implementations(ctx, k)) {
            ctx.plain = plain;
            const Doubles squares = errors(run(ctx, p));
            const char* names[] = {"out", "dq", "dk", "dv"};
            for (int i = 0; i < 4; i++)
                EXPECT_LE(std::sqrt(squares[i]), 2 * std::sqrt(plain_loops[i])) << names[i] << ", " << name_of(plain);
        }
    }
}

TEST(AttentionValues, EqualScoresGiveMeans) {
    const Problem p = equal_scores<floatX>({1, 90, 2, 1, 64, false, false});
    BeforeHopper ctx;
    for (const bool plain : implementations(ctx, p.k)) {
        SCOPED_TRACE(name_of(plain));
        ctx.plain = plain;
        expect_means(p.k, run(ctx, p), GpuArithmetic(plain));
    }
}

// Scores up to half a million, of both signs; sums of whole numbers, so exact in fp32. The weights are 0 and 1, except
// ties. The tensor-core kernels round scores in units of log2, so for them the scores are inexact.
TEST(AttentionValues, LargeScoresDoNotOverflow) {
    BeforeHopper ctx;
    for (const int shift : {0, 8, -8}) {  // whole rows of large positive and of large negative scores
        const Case k{1, 75, 2, 1, 64, false, true};
        Rng rng(7);
        std::vector<floatX> qkv = rng.normals<floatX>(k.rows() * k.width());
        for (size_t i = 0; i < qkv.size(); i++) {
            const size_t head = i % k.width() / k.HS;
            const int any = rng.below(17) - 8, some = rng.below(9);
            if (head < 2) qkv[i] = from_double<floatX>(16 * (shift == 0 ? any : 4));
            if (head == 2) qkv[i] = from_double<floatX>(16 * (shift == 0 ? any : shift > 0 ? some : -some));
        }
        const Problem p(k, qkv, rng.normals<floatX>(k.rows() * k.NH * k.HS), 1);
        for (const bool plain : implementations(ctx, k)) {
            SCOPED_TRACE(testing::Message() << name_of(plain) << ", shift " << shift);
            ctx.plain = plain;
            const Results r = run(ctx, p);
            check(p, r, GpuArithmetic(plain), plain);
            double largest = 0;
            for (const float x : r.lse) largest = std::max(largest, (double)std::abs(x));
            EXPECT_GT(largest, 1e5);
        }
    }
}

// ---- causal masking --------------------------------------------------------------------------------------------------------
TEST(AttentionMask, LaterTokensChangeNothingBefore) {
    const std::vector<int> changes = brief ? std::vector{100} : std::vector{1, 31, 64, 100, 139};
    for (const int HS : {16, 64}) {
        const Problem p({1, 140, 2, 1, HS, true, false}, 8);
        BeforeHopper ctx;
        for (const bool plain : implementations(ctx, p.k)) {
            SCOPED_TRACE(name_of(plain));
            ctx.plain = plain;
            expect_later_tokens_change_nothing(p, changes, [&](const Problem& any) { return run(ctx, any); });
        }
    }
}

TEST(AttentionMask, DocumentsDoNotSeeEachOther) {
    const std::vector<int> starts = brief ? std::vector{64} : std::vector{0, 1, 3, 64, 128, 129};
    for (const int HS : {8, 64}) {
        const Problem p({2, 145, 2, 1, HS, true, true}, 10);
        BeforeHopper ctx;
        for (const bool plain : implementations(ctx, p.k)) {
            SCOPED_TRACE(name_of(plain));
            ctx.plain = plain;
            expect_documents_apart(p, starts, [&](const Problem& any) { return run(ctx, any); });
        }
    }
}

// ---- decoding --------------------------------------------------------------------------------------------------------------
TEST(AttentionDecode, TokenByTokenIsTheWholeSequence) {
    for (Case k : {Case{1, 5, 1, 1, 8, false, false}, Case{2, 70, 4, 2, 24, true, false}, Case{2, 37, 6, 1, 5, false, false},
                   Case{1, 41, 2, 2, 80, true, false}, Case{1, 70, 2, 1, 64, true, false}, Case{1, 40, 2, 1, 256, false, false},
                   Case{2, 50, 4, 2, 24, true, false, 20, 1.5, 0, true}}) {
        if (brief) k.T = std::min(k.T, 7);
        SCOPED_TRACE(testing::PrintToString(k));
        const Problem p(k, 12);
        Decoding<floatX> decoding(p);
        BeforeHopper ctx;
        DeviceMemory<floatX> keys(decoding.keys, "keys"), values(decoding.values, "values"), sinks(p.sinks, "sinks");
        DeviceMemory<float> slopes(p.slopes, "slopes");
        for (int step = 0; step < decoding.steps(); step++) {
            const DecodedRows rows(k, step);
            const AttentionShape shape = decoding.shape(rows);
            DeviceMemory<floatX> tokens(decoding.tokens(rows), "qkv"), out(shape.B * decoding.produced, "out");
            DeviceMemory<int> sequences(rows.sequences, "sequences"), t(rows.t, "t");
            gpu::attention_decode(
                ctx, out.p(), {keys.p(), values.p(), decoding.P}, tokens.p(),
                {sequences.p(), t.p(), k.window, k.alibi ? slopes.p() : nullptr, k.sinks ? sinks.p() : nullptr}, shape);
            decoding.keep(rows, out.get());
        }
        decoding.check(keys.get(), values.get(), GpuArithmetic(true));
    }
}

// ---- limits and plans ------------------------------------------------------------------------------------------------------
TEST(AttentionLimits, RefusedByName) {
    for (const int HS : {1, 16, 40, 64, 80, 96, 128, 160, 192, 256}) EXPECT_EQ(gpu::attention_limits(HS), "") << HS;
    for (const int HS : {257, 512})
        EXPECT_NE(gpu::attention_limits(HS).find(std::to_string(HS) + " exceeds 256"), std::string::npos) << HS;
    BeforeHopper ctx;
    EXPECT_THROW(gpu::attention_forward(ctx, nullptr, nullptr, nullptr, {}, {1, 1, 1, 1, 257, 1}), Error);
}

TEST(AttentionLimits, WhoRuns) {
    BeforeHopper ctx;
    const bool fast = std::is_same<floatX, bf16>::value;
    for (const int HS : {16, 32, 40, 64, 80, 96, 128, 144, 160, 192, 224, 256}) {
        const AttentionShape shape{1, 8, 1, 1, HS, 1};
        const bool fits = HS != 16 && HS != 40 && HS != 144 && HS != 224;
        ctx.plain = false;
        EXPECT_EQ(gpu::choose_attention(ctx, shape) != AttentionKernels::simple, fast && fits) << HS;
        ctx.plain = true;
        EXPECT_EQ(gpu::choose_attention(ctx, shape), AttentionKernels::simple) << HS;
    }
}

// Each tile of each head once; longest tiles first within a section; one section after another.
TEST(AttentionPlan, EachTileOnceLongOnesFirst) {
    for (const gpu::WorkOrder& order : {gpu::WorkOrder{1, 1, 1}, {5, 7, 3}, {4, 6, 6}, {3, 8, 4}, {3, 8, 8}, {2, 5, 1}}) {
        std::set<std::pair<int, int>> seen;
        int section = 0, tile = 0;
        for (int i = 0; i < order.items(); i++) {
            const gpu::WorkOrder::Item item = order.item(i);
            EXPECT_TRUE(item.head >= 0 && item.head < order.heads && item.tile >= 0 && item.tile < order.tiles);
            EXPECT_TRUE(seen.insert({item.head, item.tile}).second);
            if (item.head / order.section != section) {
                section++;
                tile = 0;
            }
            EXPECT_EQ(item.head / order.section, section);
            EXPECT_GE(item.tile, tile);
            tile = item.tile;
        }
        EXPECT_EQ((int)seen.size(), order.items());
    }
}

// Sections consist of whole groups of heads, which read the same keys: at least one group and at most all heads.
TEST(AttentionPlan, SectionsFitTheCache) {
    EXPECT_EQ(gpu::work_order(3, 32, 4, 2 << 20, 16 << 20).section, 32);
    EXPECT_EQ(gpu::work_order(3, 128, 4, 2 << 20, 16 << 20).section, 32);
    EXPECT_EQ(gpu::work_order(3, 32, 4, 64 << 20, 16 << 20).section, 4);
    EXPECT_EQ(gpu::work_order(3, 32, 1, 3 << 20, 16 << 20).section, 5);
}

#ifndef PRECISION_FP32
// Bits of a warp's tile compared with the definition of dropout, for tiles that start at a draw and within one.
template <int N, bool keys_are_rows>
__global__ void kept_kernel(int* kept /*(32, N / 2)*/, AttentionShape a, int b, int h, int t0, int j0) {
    const gpu::KeptWeights<N, keys_are_rows> mine(a, b, h, t0, j0);
    for (int x = 0; x < N / 2; x++) kept[threadIdx.x * (N / 2) + x] = mine(x / 4, x / 2 % 2, x % 2);
}
template <int N, bool keys_are_rows>
void check_kept_weights() {
    gpu::Ctx ctx;
    for (const int T : {512, 301})
        for (const uint64_t first : {(1ull << 34) - 1000, 7ull}) {
            AttentionShape a = Case{2, T, 3, 3, 64, false, false, 0, 0, 0.4}.shape(1);
            a.dropout.draws.first = first;
            const int b = 1, h = 2, t0 = T == 512 ? 144 : 45, j0 = T == 512 ? 16 : 13;
            DeviceMemory<int> memory(std::vector<int>(16 * N), "kept");
            LAUNCH((kept_kernel<N, keys_are_rows>), 1, 32, 0, ctx, memory.p(), a, b, h, t0, j0);
            const std::vector<int> kept = memory.get();
            int dropped = 0;
            for (int lane = 0; lane < 32; lane++)
                for (int x = 0; x < N / 2; x++) {
                    const int row = lane / 4 + x / 2 % 2 * 8, column = x / 4 * 8 + lane % 4 * 2 + x % 2;
                    const int t = t0 + (keys_are_rows ? column : row), j = j0 + (keys_are_rows ? row : column);
                    const bool expected = a.dropout.keeps(a.weight(b, h, t, j));
                    dropped += !expected;
                    ASSERT_EQ(kept[lane * (N / 2) + x], (int)expected)
                        << N << " columns, keys are rows: " << keys_are_rows << ", T " << T << ", row " << row << ", column "
                        << column;
                }
            EXPECT_NEAR(dropped, 0.4 * 16 * N, 5 * std::sqrt(0.24 * 16 * N));
        }
}
TEST(AttentionDropout, KeepsTheWeightsOfTheDefinition) {
    check_kept_weights<16, false>();
    check_kept_weights<32, false>();
    check_kept_weights<64, false>();
    check_kept_weights<128, false>();
    check_kept_weights<16, true>();
    check_kept_weights<32, true>();
    check_kept_weights<64, true>();
    check_kept_weights<128, true>();
}

// ldmatrix reads the same chunk of 8 rows at once, without bank conflicts if the chunks are in 8 different 16-byte columns
// of the banks' 128 bytes. And no two chunks overlap.
template <int HS>
void check_tile_layout() {
    std::set<int> places;
    for (int row = 0; row < 64; row++)
        for (int chunk = 0; chunk < HS / 8; chunk++) {
            const int offset = gpu::mma::tile_offset<HS>(row, chunk);
            EXPECT_TRUE(offset % 8 == 0 && offset >= row * HS && offset < (row + 1) * HS);
            EXPECT_TRUE(places.insert(offset).second);
            if (row % 8 == 0) {
                std::set<int> columns;
                for (int i = 0; i < 8; i++) columns.insert(gpu::mma::tile_offset<HS>(row + i, chunk) / 8 % 8);
                EXPECT_EQ(columns.size(), 8u) << "HS " << HS << ", row " << row << ", chunk " << chunk;
            }
            // As the products compute it.
            const int own_row = row % 16, own_chunk = chunk % 2;
            EXPECT_EQ(gpu::mma::LaneOffset<HS>(own_row, own_chunk)(row / 16, chunk - own_chunk), offset);
        }
}
TEST(AttentionPlan, TilesAreFreeOfBankConflicts) {
    check_tile_layout<32>();
    check_tile_layout<64>();
    check_tile_layout<80>();
    check_tile_layout<96>();
    check_tile_layout<128>();
    check_tile_layout<160>();
    check_tile_layout<192>();
    check_tile_layout<256>();
}

// The most shared memory of a block on GPUs with 100 KB per multiprocessor.
TEST(AttentionPlan, FitsInSharedMemoryOfSmallGpus) {
    const size_t limit = 99 << 10;
    for (const int HS : {128, 256})
        EXPECT_LE(gpu::simple::backward_bytes(HS, HS == 128 ? gpu::simple::block_rows<4> : gpu::simple::block_rows<8>), limit);
}
#endif

}  // namespace test_gpu_attention
