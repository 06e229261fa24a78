// Attention and rotary positions in the build's precision (bf16 or fp32): the plain loops and the tiles compared with sums
// in double (attention_reference.h).
#include <gtest/gtest.h>

#include <optional>

#include "../llmc/cpu/attention.h"
#include "../llmc/cpu/rope.h"
#include "../llmc/base/math.h"
#include "attention_reference.h"
#include "matrix_units.h"

namespace test_attention {

using namespace test;
using namespace test::attention;
using test::attention::rounding, test::attention::u;  // not other files'
using Problem = attention::Problem<floatX>;
using Results = attention::Results<floatX>;

// Errors of a weight: its score, the rounded exponent, and one or two exponentials per later tile; in backward one
// exponential. bf16 units multiply rounded weights and rounded gradients of weights. lse is the sum of a score and a
// logarithm, out a sum divided by another.
struct CpuArithmetic : Arithmetic {
    explicit CpuArithmetic(bool rounded_weights) {
        operand = rounded_weights ? rounding<bf16> : 0;
        tile = 64;
        logarithm = 4 * u;
        division = 2 * u;
    }
    double forward_weight(double score, double top, double score_error, int tiles) const override {
        return std::expm1(score_error + of_exponent(score, top) + (4 * tiles + 8) * u);
    }
    double backward_weight(double score, double log_sum, double score_error) const override {
        return std::expm1(score_error + of_exponent(score, log_sum) + 4 * u);
    }
    // lse and out's factor are rounded again; this is an exponential of a difference from lse.
    double lse_with_sink(double) const override { return 16 * u; }
    double out_with_sink(double top) const override { return 16 * u + 4 * u * std::abs(top); }
    double sink_gradient(double exponent) const override { return (8 + 2 * std::abs(exponent)) * u; }

private:
    // Absolute error of the rounded difference. For larger differences weights are 0.
    static double of_exponent(double score, double shift) { return u * std::min(std::abs(score - shift), 100.0); }
};

// Implementations: the plain loops, and tiles on each available matrix unit.
struct Way {
    std::string name;
    std::optional<cpu::AnyUnit> unit;
    CpuArithmetic arithmetic() const {
        return CpuArithmetic(unit && std::holds_alternative<const cpu::MatrixUnit<bf16>*>(*unit));
    }
    void choose(cpu::Ctx& ctx) const {
        ctx.plain = !unit;
        if (unit) ctx.attention = *unit;
    }
};
std::vector<Way> all_ways() {
    std::vector<Way> ways = {{"plain loops", {}}};
    for (const cpu::AnyUnit unit : all_matrix_units(cpu::Products::attention)) ways.push_back({name_of(unit), unit});
    return ways;
}

// Results must not depend on scratch memory: fills it with NaN.
void spoil_scratch(cpu::Ctx& ctx) {
    const size_t bytes = 1 << 21;
    memset(ctx.scratch(bytes), 0xff, bytes);
}

// ---- the op under test ----------------------------------------------------------------------------------------------------
// A problem's inputs, between guards.
struct Inputs {
    Guarded<floatX> qkv, dout, sinks;
    Guarded<real> slopes;
    Guarded<int> doc_start;
    AttentionMask mask;

    explicit Inputs(const Problem& p)
        : qkv(p.qkv, "qkv"),
          dout(p.dout, "dout"),
          sinks(p.sinks, "sinks"),
          slopes(p.slopes, "slopes"),
          doc_start(p.doc_start, "doc_start"),
          mask{p.k.masked() ? doc_start.data() : nullptr, p.k.alibi ? slopes.data() : nullptr} {}
};

Results run(cpu::Ctx& ctx, const Problem& p) {
    const Inputs in(p);
    const AttentionShape shape = p.shape();
    const size_t n = p.k.rows() * p.k.NH;
    Guarded<floatX> out(n * p.k.HS, "out"), dqkv(p.qkv.size(), "dqkv");
    Guarded<real> lse(n, "lse"), dsinks(std::vector<real>(p.k.NH), "dsinks");
    const AttentionActs acts = {in.qkv.data(), out.data(), lse.data()};
    cpu::attention_forward(ctx, out.data(), lse.data(), in.qkv.data(), in.mask, shape);
    if (p.k.sinks) cpu::sinks_forward(ctx, out.data(), lse.data(), in.sinks.data(), shape);
    cpu::attention_backward(ctx, dqkv.data(), in.dout.data(), acts, in.mask, shape, nullptr);
    if (p.k.sinks) cpu::sinks_backward(ctx, dsinks.data(), in.dout.data(), acts, in.sinks.data(), shape);
    return {out.values(), dqkv.values(), lse.values(), dsinks.values()};
}

// ---- values ---------------------------------------------------------------------------------------------------------------
class Attention : public testing::TestWithParam<Case> {};

// T: one token, one less than a tile of 64, a tile, one more, several. Head sizes of real models, and some that are not a
// multiple of a vector.
INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         testing::Values(Case{1, 1, 1, 1, 8, false, false}, Case{3, 1, 4, 2, 16, true, true},
                                         Case{2, 3, 2, 1, 32, false, true}, Case{1, 7, 6, 3, 5, true, false},
                                         Case{2, 63, 3, 3, 8, false, false}, Case{1, 64, 2, 2, 16, true, true},
                                         Case{2, 65, 4, 1, 32, true, false}, Case{1, 129, 3, 1, 80, true, true},
                                         Case{1, 131, 2, 2, 128, false, true}, Case{3, 150, 4, 2, 24, true, true},
                                         Case{1, 192, 2, 1, 64, false, false}, Case{1, 200, 2, 1, 96, true, false},
                                         Case{1, 200, 4, 2, 64, false, true}, Case{1, 300, 2, 2, 8, false, false}));

// Windows of one key, within a tile, of a tile, of several; also with documents. Caps, dropout and sinks, separately and
// together.
INSTANTIATE_TEST_SUITE_P(Options, Attention,
                         testing::Values(Case{1, 70, 2, 1, 16, false, false, 1}, Case{2, 150, 2, 2, 24, true, true, 20},
                                         Case{1, 200, 4, 2, 64, false, false, 64}, Case{1, 300, 2, 1, 32, false, false, 130},
                                         Case{2, 65, 4, 1, 32, true, true, 0, 1.5},
                                         Case{1, 150, 2, 1, 80, false, false, 0, 0.7},
                                         Case{1, 90, 2, 2, 16, false, true, 0, 0, 0.3},
                                         Case{2, 65, 4, 2, 32, false, false, 0, 0, 0, true},
                                         Case{1, 131, 2, 1, 64, true, true, 40, 2, 0.2, true}));

TEST_P(Attention, PlainAndTiles) {
    const Problem p(GetParam(), 1);
    for (const Way& way : all_ways()) {
        SCOPED_TRACE(way.name);
        cpu::Ctx ctx(2);
        way.choose(ctx);
        const Results r = run(ctx, p);
        check(p, r, way.arithmetic());
        // In fp32 a value is multiplied by a weight that is 1 except for rounding, and divided by the same.
        expect_first_tokens_unchanged(p, r, std::is_same<floatX, float>::value ? 3 * u : 0);
        spoil_scratch(ctx);
        expect_same_results(run(ctx, p), r);
    }
}

// A new context's scratch memory after f(context) is that for attention of `shape`.
template <class F>
void expect_planned_scratch(int threads, const Way& way, const AttentionShape& shape, F f) {
    cpu::Ctx ctx(threads), planned(threads);
    way.choose(ctx);
    f(ctx);
    planned.scratch(cpu::attention_scratch(ctx, shape));
    EXPECT_EQ(ctx.scratch_bytes(), planned.scratch_bytes());
}

// A head for each thread, more threads than heads, grouped queries, dropout.
TEST(AttentionMemory, IsPlanned) {
    for (const Case& k : {Case{2, 130, 2, 2, 24, true, true}, Case{1, 200, 4, 1, 16, false, false},
                          Case{1, 40, 4, 2, 8, false, false, 0, 0, 0.3}})
        for (const Way& way : all_ways())
            for (const int threads : {1, 7}) {
                SCOPED_TRACE(testing::Message() << way.name << ", " << testing::PrintToString(k) << ", threads " << threads);
                const Problem p(k, 1);
                expect_planned_scratch(threads, way, p.shape(), [&](cpu::Ctx& ctx) { run(ctx, p); });
            }
}

// Chunks of one row, of tiles, of parts of tiles; several threads divide tiles if there are few heads.
TEST(AttentionRows, ChunksHaveTheResultsOfTheWholeSequence) {
    for (const Case& k : {Case{1, 40, 2, 1, 16, false, false}, Case{2, 256, 4, 2, 24, true, true},
                          Case{1, 300, 1, 1, 32, false, false}, Case{1, 256, 2, 1, 64, true, false, 70},
                          Case{2, 200, 4, 2, 16, false, true, 0, 1.5}, Case{2, 40, 2, 1, 16, false, true, 0, 0, 0.3}})
        for (const std::vector<int>& starts : {std::vector{0, 64, 192}, {0, 1, 30, 128}, {0, 128}})
            for (const Way& way : all_ways()) {
                SCOPED_TRACE(testing::Message() << way.name << ", " << testing::PrintToString(k));
                const Problem p(k, 14);
                cpu::Ctx ctx(3);
                way.choose(ctx);
                std::vector<int> within;
                for (const int start : starts)
                    if (start < k.T) within.push_back(start);
                expect_whole_from_chunks(p, run(ctx, p), within, [&](const QueryChunk<floatX>& chunk) {
                    const size_t n = chunk.dout.size();
                    Guarded<floatX> qkv(chunk.qkv, "qkv"), kv(chunk.kv, "kv"), dout(chunk.dout, "dout"), out(n, "out"),
                        dqkv(chunk.qkv.size(), "dqkv"), dkv(chunk.kv.size(), "dkv");
                    Guarded<real> lse(n / k.HS, "lse"), slopes(p.slopes, "slopes");
                    Guarded<int> doc_start(chunk.doc_start, "doc_start");
                    const AttentionMask mask = {k.masked() ? doc_start.data() : nullptr, k.alibi ? slopes.data() : nullptr};
                    const auto compute = [&](cpu::Ctx& any) {
                        cpu::attention_rows_forward(any, out.data(), lse.data(), qkv.data(), kv.data(), mask, chunk.shape);
                        cpu::attention_rows_backward(any, dqkv.data(), dkv.data(), dout.data(),
                                                     {qkv.data(), out.data(), lse.data(), kv.data()}, mask, chunk.shape);
                    };
                    expect_planned_scratch(3, way, chunk.shape, compute);
                    spoil_scratch(ctx);
                    compute(ctx);
                    return ChunkResults<floatX>{out.values(), dqkv.values(), dkv.values(), lse.values()};
                });
            }
}

TEST(AttentionThreads, SameBitsForAnyNumberOfThreads) {
    for (const Case& k :
         {Case{3, 10, 4, 2, 16, true, true}, Case{1, 200, 3, 1, 80, true, false}, Case{2, 170, 4, 2, 24, false, true},
          Case{1, 200, 3, 3, 16, false, true}, Case{1, 170, 4, 2, 16, true, true, 70, 1.5, 0, true},
          Case{1, 70, 2, 1, 16, false, false, 0, 1, 0.5, true}}) {
        const Problem p(k, 5);
        const auto run_with = [&](int threads, const Way& way) {
            cpu::Ctx ctx(threads);
            way.choose(ctx);
            return run(ctx, p);
        };
        for (const Way& way : all_ways()) {
            const Results r = run_with(1, way);
            for (const int threads : {1, 2, 2, 5, 16}) expect_same_results(run_with(threads, way), r);
        }
    }
}

// A context's scratch memory is divided among its own threads, not among the newest context's.
TEST(AttentionThreads, ContextsSideBySide) {
    const Problem p(Case{1, 130, 4, 4, 64, false, false}, 6);
    cpu::Ctx one(1), four(4);
    const Results r = run(four, p);
    expect_same_results(run(one, p), r);
}

TEST(AttentionValues, EqualScoresGiveMeans) {
    const Problem p = equal_scores<floatX>({1, 90, 2, 1, 16, false, false});
    for (const Way& way : all_ways()) {
        SCOPED_TRACE(way.name);
        cpu::Ctx ctx(2);
        way.choose(ctx);
        expect_means(p.k, run(ctx, p), way.arithmetic());
    }
}

// Scores up to a million, of both signs; sums of whole numbers, so exact in fp32. The weights are 0 and 1, except ties.
TEST(AttentionValues, LargeScoresDoNotOverflow) {
    for (const bool documents : {false, true}) {
        const Case k{2, 140, 2, 1, 16, false, documents};
        Rng rng(7);
        for (const int shift : {0, 8, -8}) {  // whole rows of large positive or large negative scores
            std::vector<floatX> qkv = rng.normals<floatX>(k.rows() * k.width());
            for (size_t i = 0; i < qkv.size(); i++) {
                const size_t head = i % k.width() / k.HS;
                if (head < 2) qkv[i] = from_double<floatX>(16 * (shift == 0 ? rng.below(17) - 8 : 8));
                if (head == 2)
                    qkv[i] = from_double<floatX>(16 * (shift == 0  ? rng.below(17) - 8
                                                       : shift > 0 ? rng.below(9)
                                                                   : -rng.below(9)));
            }
            const Problem p(k, qkv, rng.normals<floatX>(k.rows() * k.NH * k.HS), 1);
            for (const Way& way : all_ways()) {
                SCOPED_TRACE(testing::Message() << way.name << ", shift " << shift << ", documents " << documents);
                cpu::Ctx ctx(2);
                way.choose(ctx);
                const Results r = run(ctx, p);
                check(p, r, way.arithmetic(), true);
                double largest = 0;
                for (const real x : r.lse) largest = std::max(largest, (double)std::abs(x));
                EXPECT_GT(largest, 1e5);
            }
        }
    }
}

// ---- causal masking -------------------------------------------------------------------------------------------------------
TEST(AttentionMask, LaterTokensChangeNothingBefore) {
    const Problem p({1, 150, 4, 2, 16, true, false}, 8);
    for (const Way& way : all_ways()) {
        SCOPED_TRACE(way.name);
        cpu::Ctx ctx(2);
        way.choose(ctx);
        expect_later_tokens_change_nothing(p, {1, 63, 64, 100, 149}, [&](const Problem& any) { return run(ctx, any); });
    }
}

TEST(AttentionMask, DocumentsDoNotSeeEachOther) {
    const Problem p({2, 170, 4, 2, 16, true, true}, 10);
    for (const Way& way : all_ways()) {
        SCOPED_TRACE(way.name);
        cpu::Ctx ctx(2);
        way.choose(ctx);
        expect_documents_apart(p, {0, 1, 3, 64, 128, 129}, [&](const Problem& any) { return run(ctx, any); });
    }
}

// ---- decoding -------------------------------------------------------------------------------------------------------------
TEST(AttentionDecode, TokenByTokenIsTheWholeSequence) {
    for (const Case& k :
         {Case{1, 5, 1, 1, 8, false, false}, Case{3, 70, 4, 2, 24, true, false}, Case{2, 37, 6, 1, 5, false, false},
          Case{1, 41, 2, 2, 80, true, false}, Case{2, 70, 4, 2, 24, true, false, 20, 1.5, 0, true}}) {
        SCOPED_TRACE(testing::PrintToString(k));
        const Problem p(k, 12);
        const Inputs in(p);
        Decoding<floatX> decoding(p);
        cpu::Ctx ctx(k.B);  // one, two and three threads
        Guarded<floatX> keys(decoding.keys, "keys"), values(decoding.values, "values");
        for (int step = 0; step < decoding.steps(); step++) {
            const DecodedRows rows(k, step);
            const AttentionShape shape = decoding.shape(rows);
            Guarded<floatX> tokens(decoding.tokens(rows), "qkv"), out(shape.B * decoding.produced, "out");
            spoil_scratch(ctx);
            cpu::attention_decode(
                ctx, out.data(), {keys.data(), values.data(), decoding.P}, tokens.data(),
                {rows.sequences.data(), rows.t.data(), k.window, in.mask.slopes, k.sinks ? in.sinks.data() : nullptr}, shape);
            decoding.keep(rows, out.values());
        }
        decoding.check(keys.values(), values.values(), CpuArithmetic(false));
    }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------------

struct Rotation {
    int N, NH, NKV, HS, P;
    std::vector<int> positions;
    std::vector<real> table;
    std::vector<floatX> qkv;
    int rotated;  // dimensions per head
    Rotation(int N, int NH, int NKV, int HS, int P, uint64_t seed, int rotated)
        : N(N), NH(NH), NKV(NKV), HS(HS), P(P), rotated(rotated) {
        Rng rng(seed);
        positions = rng.integers(N, 0, P);
        positions[0] = 0;
        positions[N - 1] = P - 1;
        rope_table(table, P, rotated, 10000);
        qkv = rng.normals<floatX>((size_t)N * (NH + 2 * NKV) * HS);
    }
    bool stays(size_t i) const { return (int)(i / HS % (NH + 2 * NKV)) >= NH + NKV || (int)(i % HS) >= rotated; }

    // Rotated by direction * angle: two products and their sum, each rounded.
    Bounded expected(const Doubles& x, int direction) const {
        Bounded y(x.size());
        for (size_t i = 0; i < x.size(); i++) {
            const int c = (int)(i % HS), half = rotated / 2, position = positions[i / HS / (NH + 2 * NKV)];
            if (stays(i)) {
                y.value[i] = x[i];
                y.allowed[i] = 0;
                continue;
            }
            const size_t entry = ((size_t)position * half + c % half) * 2;
            const double cosine = table[entry], sine = direction * (double)table[entry + 1];
            const double own = x[i] * cosine, other = c < half ? -x[i + half] * sine : x[i - half] * sine;
            y.add(i, own + other, 2 * u * (std::abs(own) + std::abs(other)) + rounding<floatX> * std::abs(own + other));
        }
        return y;
    }
};

TEST(Rope, ForwardBackwardAndBack) {
    const Rotation shapes[] = {{1, 1, 1, 2, 1, 13, 2},         {33, 4, 2, 8, 50, 14, 8},   {131, 3, 1, 10, 131, 15, 10},
                               {17, 2, 2, 128, 2048, 16, 128}, {33, 4, 2, 64, 50, 17, 16}, {9, 3, 1, 10, 31, 18, 6}};
    for (const Rotation& k : shapes)
        for (const int threads : {1, 2}) {
            cpu::Ctx ctx(threads);
            const Rope rope = {k.positions.data(), k.table.data(), k.rotated};
            const AttentionShape shape = {1, k.N, k.NH, k.NKV, k.HS};
            Guarded<floatX> turned(k.qkv, "qkv"), gradient(k.qkv, "dqkv");
            cpu::rope_forward(ctx, turned.data(), rope, shape);
            cpu::rope_backward(ctx, gradient.data(), rope, shape);
            const Bounded forward = k.expected(doubles(k.qkv), 1), backward = k.expected(doubles(k.qkv), -1);
            expect_close(turned, forward.value, forward.allowed, "qkv");
            expect_close(gradient, backward.value, backward.allowed, "dqkv");

            // Forward and back: the errors of a rotated pair are at most `rounding` times its length; then one more
            // rounding.
            Guarded<floatX> back(turned.values(), "there and back");
            cpu::rope_backward(ctx, back.data(), rope, shape);
            const Doubles x = doubles(k.qkv);
            Doubles allowed(x.size());
            for (size_t i = 0; i < x.size(); i++) {
                const size_t half = (size_t)k.rotated / 2, partner = i % (size_t)k.HS < half ? i + half : i - half;
                const double length = std::hypot(x[i], k.stays(i) ? 0 : x[partner]);
                allowed[i] = k.stays(i) ? 0 : rounding<floatX> * (length + std::abs(x[i])) + 8 * u * length;
            }
            expect_close(back, x, allowed, "there and back");
        }
}

// Gradients of unrotated queries and keys have the bits of the two separate ops. Heads that are rotated while being stored,
// and one too large for that; a task per key/value head, and per query head.
TEST(Rope, BackwardWithAttention) {
    for (const Case& k :
         {Case{2, 150, 4, 4, 32, false, true}, Case{1, 70, 4, 1, 64, false, false}, Case{2, 67, 2, 2, 10, false, false},
          Case{1, 65, 2, 1, 128, false, true}, Case{1, 70, 2, 1, 32, false, false, 0, 1.5}}) {
        const Problem p(k, 17);
        const Inputs in(p);
        std::vector<real> angles;
        const int rotated = k.HS == 64 ? 16 : k.HS;
        rope_table(angles, k.T, rotated, 10000);
        std::vector<int> positions;
        for (size_t row = 0; row < k.rows(); row++) positions.push_back((int)row % k.T - p.first_key((int)row));
        for (const Way& way : all_ways()) {
            SCOPED_TRACE(testing::Message() << way.name << ", HS " << k.HS);
            cpu::Ctx ctx(2);
            way.choose(ctx);
            const Results r = run(ctx, p);
            Guarded<floatX> apart(r.dqkv, "apart"), together(p.qkv.size(), "together");
            const Rope rope = {positions.data(), angles.data(), rotated};
            cpu::rope_backward(ctx, apart.data(), rope, p.shape());
            cpu::attention_rope_backward(ctx, together.data(), in.dout.data(), {in.qkv.data(), r.out.data(), r.lse.data()},
                                         in.mask, rope, p.shape(), nullptr);
            expect_same_bits(together, apart, "dqkv");
        }
    }
}

}  // namespace test_attention
