// Virtual tokens in double: they compute the same as real tokens with these embeddings; every gradient compared with finite
// differences, with and without an encoder, an MLP or an LSTM, for families with each kind of position; conversations
// packed into a sequence compute the same as separate ones; recomputation gives the same bits, and frozen weights stay
// unchanged.
#include <gtest/gtest.h>

#include <random>

#include "../llmc/base/crc32c.h"
#include "trainer.h"
#include "finite_differences.h"
#include "model_files.h"

namespace test_virtual_tokens_fp64 {
namespace {

ModelConfig tiny(const std::string& family, int count, int encoder_width, bool lstm = false) {
    ModelConfig c;
    set_family(c, family);
    c.L = 2;
    c.C = 24;
    c.NH = 6;
    c.NKV = family == "llama" || family == "gemma3_text" ? 3 : 6;
    c.F = family == "bloom" ? 4 * c.C : 20;
    c.T = 14;
    c.V = 29;
    c.init_std = 0.2;
    if (family == "gemma3_text") {
        c.window = 4;
        c.full_interval = 2;
        c.local_rope_base = 100;
        c.embedding_scale = 4.9;
    }
    c.virtual_tokens.count = count;
    c.virtual_tokens.encoder_width = encoder_width;
    c.virtual_tokens.lstm = lstm;
    check_config(c);
    pad_vocabulary(c, 16);
    return c;
}

struct Fixture {
    be::Ctx ctx{2};
    Model m;
    Batch batch;
    double targets;

    // before: tokens that precede every sequence's own, and are not targets.
    explicit Fixture(const ModelConfig& c, Recompute recompute = Recompute::none, const std::vector<int>& before = {})
        : Fixture(c, text(c, before), recompute) {}
    Fixture(const ModelConfig& c, const Batch& given, Recompute recompute) : m(c), batch(given) {
        targets = (double)std::count_if(batch.targets.begin(), batch.targets.end(), [](int t) { return t >= 0; });
        plan_memory(m, recompute, batch.B, batch.T, 7);
        allocate(ctx, m);
        initialize(ctx, m, 42);
        upload(ctx, m, batch, m.a.micro_batch());
    }
    static Batch text(const ModelConfig& c, const std::vector<int>& before) {
        std::mt19937 rng(7);
        Batch batch;
        batch.B = 2;
        batch.T = 9 + (int)before.size();
        for (int b = 0; b < batch.B; b++) {
            batch.tokens.insert(batch.tokens.end(), before.begin(), before.end());
            batch.targets.insert(batch.targets.end(), before.size(), -1);
            for (int t = 0; t < 9; t++) {
                batch.tokens.push_back((int)(rng() % c.V));
                batch.targets.push_back(t % 5 == 3 ? -1 : (int)(rng() % c.V));
            }
            for (int t = 0; t < batch.T; t++) batch.positions.push_back(t);
        }
        return batch;
    }
    void move_biases() {
        std::mt19937 rng(3);
        for (const TensorSpec& t : m.table.rows)
            if (t.vector())
                for (size_t i = 0; i < t.size(); i++) m.params[t.offset + i] = 0.3 * ((rng() % 1000) / 500.0 - 1);
    }
    Pass pass() { return {ctx, m, m.a.micro_batch()}; }
    real* grads() { return (real*)m.grads.data; }
    double loss() {
        clear_sums(ctx, m);
        model_forward(pass());
        head(pass(), 0, 1e-2, false);
        const LossSums sums = read_sums(ctx, m);
        EXPECT_EQ(sums.n, targets);
        return (sums.ce + sums.z) / targets;
    }
    void gradients(Acc acc = Acc::Set) {
        pass().in.gradients = acc;
        if (acc == Acc::Set) begin_gradients(ctx, m);
        model_forward(pass());
        head(pass(), 1.0 / targets, 1e-2, true);
        model_backward(pass(), [](int) {});
    }
};

struct Case {
    const char* family;
    int count, encoder_width;
    bool lstm = false;
};
const Case cases[] = {{"llama", 3, 0}, {"gpt2", 1, 0},  {"bloom", 4, 0},       {"gemma3_text", 5, 0}, {"llama", 3, 7},
                      {"gpt2", 2, 24}, {"bloom", 3, 9}, {"llama", 4, 5, true}, {"gpt2", 2, 3, true}};

TEST(VirtualTokens, ComputeWhatTokensWithTheirEmbeddingsDo) {
    const std::vector<int> text = {5, 28, 5, 11};
    for (const char* family : {"llama", "gpt2", "bloom", "gemma3_text"}) {
        Fixture f(tiny(family, (int)text.size(), 0)), plain(tiny(family, 0, 0), Recompute::none, text);
        for (size_t i = 0; i < text.size(); i++)
            for (int k = 0; k < f.m.c.C; k++)
                f.m.params[i * f.m.c.C + k] = f.m.c.embedding_scale * f.m.p.wte[text[i] * f.m.c.C + k];
        EXPECT_NEAR(f.loss(), plain.loss(), 1e-12) << family;
        f.m.params[0] += 1;
        EXPECT_GT(std::abs(f.loss() - plain.loss()), 1e-6) << family;
    }
}

TEST(VirtualTokens, GradientsEqualFiniteDifferencesAndTheModelStaysFrozen) {
    for (const Case& k : cases) {
        Fixture f(tiny(k.family, k.count, k.encoder_width, k.lstm));
        f.move_biases();
        const uint32_t before = crc32c(f.m.frozen->params, f.m.frozen->table.size * sizeof(floatX));
        f.gradients();
        EXPECT_EQ(f.m.table.rows.size(), k.lstm ? 21u : k.encoder_width ? 7u : 1u);
        test::expect_finite_differences(f.m.table, f.m.params, f.grads(), 12, k.family, [&] { return f.loss(); });
        EXPECT_EQ(crc32c(f.m.frozen->params, f.m.frozen->table.size * sizeof(floatX)), before);
    }
}

// Conversations of these lengths: each row's in one sequence of T tokens, after n virtual tokens; each conversation has its
// own virtual tokens.
Batch conversations(const std::vector<std::vector<int>>& rows, int T, int n, int V) {
    Batch batch;
    batch.B = (int)rows.size();
    batch.T = T;
    std::mt19937 rng(9);
    for (const std::vector<int>& row : rows) {
        const size_t end = batch.tokens.size() + (size_t)T;
        const auto place = [&](int token, int target, int position, int start) {
            batch.tokens.push_back(token);
            batch.targets.push_back(target);
            batch.positions.push_back(position);
            batch.doc_start.push_back(start);
        };
        int first = 0;
        for (const int length : row) {
            for (int t = first ? -n : 0; t < 0; t++) place(-1, -1, t, first - n);
            for (int t = 0; t < length; t++) {
                const int token = (int)(rng() % V), target = (int)(rng() % V);
                place(token, t % 3 == 1 ? -1 : target, t, first - n);
            }
            first += length + n;
        }
        first -= n;
        for (int t = 0; batch.tokens.size() < end; t++) place(0, -1, t, first);
    }
    return batch;
}

TEST(VirtualTokens, StandBeforeEveryConversationOfASequence) {
    for (const Case& k : cases) {
        ModelConfig c = tiny(k.family, k.count, k.encoder_width, k.lstm);
        c.T = 24;
        Fixture packed(c, conversations({{4, 3, 1}, {2, 5}}, 18, k.count, c.V), Recompute::none);
        Fixture alone(c, conversations({{4}, {3}, {1}, {2}, {5}}, 7, k.count, c.V), Recompute::none);
        for (Fixture* f : {&packed, &alone}) {
            f->move_biases();
            f->gradients();
        }
        EXPECT_EQ(packed.pass().in.virtual_rows.size(), 5u);
        EXPECT_NEAR(packed.loss(), alone.loss(), 1e-12) << k.family;
        for (size_t i = 0; i < packed.m.table.trained; i++)
            ASSERT_NEAR(packed.grads()[i], alone.grads()[i], 1e-14 + 1e-11 * std::abs(alone.grads()[i]))
                << k.family << " " << i;
        test::expect_finite_differences(packed.m.table, packed.m.params, packed.grads(), 6, k.family,
                                        [&] { return packed.loss(); });
    }
}

TEST(VirtualTokens, MicroBatchesAddAndRecomputationKeepsTheBits) {
    for (const auto& [encoder_width, lstm] : {std::pair{0, false}, {7, false}, {7, true}}) {
        ModelConfig c = tiny("llama", 3, encoder_width, lstm);
        c.embedding_dropout = c.attention_dropout = c.hidden_dropout = 0.1;
        const auto gradients = [](Fixture& f, Acc acc) {
            f.move_biases();
            f.pass().in.drops = true;
            f.pass().in.seed = 4;
            f.gradients(acc);
        };
        Fixture none(c);
        gradients(none, Acc::Set);
        const std::vector<real> once(none.grads(), none.grads() + none.m.table.size);
        for (const Recompute recompute : {Recompute::selective, Recompute::mlp, Recompute::full}) {
            Fixture other(c, recompute);
            gradients(other, Acc::Set);
            EXPECT_EQ(memcmp(once.data(), other.grads(), once.size() * sizeof(real)), 0) << (int)recompute;
        }
        gradients(none, Acc::Add);
        for (size_t i = 0; i < once.size(); i++) ASSERT_NEAR(none.grads()[i], 2 * once[i], 1e-15 + 1e-12 * std::abs(once[i]));
        gradients(none, Acc::Set);  // for the next step
        EXPECT_EQ(memcmp(once.data(), none.grads(), once.size() * sizeof(real)), 0);
    }
}

// From the cache, token by token, as from the whole forward pass.
TEST(VirtualTokens, AreInTheContextOfAGeneratedText) {
    for (const Case& k : cases) {
        const ModelConfig c = tiny(k.family, k.count, k.encoder_width, k.lstm);
        be::Ctx ctx(2);
        Model m(c);
        const int room = c.room();
        plan_memory(m, Recompute::inference, 1, room, room + k.count, {1});
        allocate(ctx, m);
        initialize(ctx, m, 42);
        std::vector<int> tokens;
        for (int i = 0; i < room; i++) tokens.push_back(i * 7 % c.V);
        const auto logits_after = [&](size_t at_once, size_t n) {
            Generator generator(ctx, m);
            generator.prompt(0, {tokens.begin(), tokens.begin() + (long)at_once});
            for (size_t i = at_once; i < n; i++) generator.append({{0, tokens[i]}});
            EXPECT_EQ(generator.length(0), k.count + (int)n);
            return generator.logits();
        };
        const std::vector<float> whole = logits_after((size_t)room, (size_t)room), parts = logits_after(1, (size_t)room);
        for (int i = 0; i < c.V; i++) EXPECT_NEAR(whole[(size_t)i], parts[(size_t)i], 1e-5) << k.family;
        const std::vector<float> short_text = logits_after(3, 3);
        m.params[0] += 1;
        EXPECT_NE(logits_after(3, 3), short_text) << k.family;
    }
}

TEST(VirtualTokens, TablesHavePeftsNames) {
    const ModelConfig c = tiny("llama", 3, 7);
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const TensorSpec& t : trained_table(c).rows) shapes[t.hf[0].name] = file_shape(t, t.hf[0]);
    using Shape = std::vector<int64_t>;
    EXPECT_EQ(shapes.size(), 7u);
    EXPECT_EQ(shapes.at("prompt_encoder.embedding.weight"), (Shape{3, 24}));
    EXPECT_EQ(shapes.at("prompt_encoder.mlp_head.0.weight"), (Shape{7, 24}));
    EXPECT_EQ(shapes.at("prompt_encoder.mlp_head.2.bias"), (Shape{7}));
    EXPECT_EQ(shapes.at("prompt_encoder.mlp_head.4.weight"), (Shape{24, 7}));
    EXPECT_EQ(trained_table(c).trained, 3u * 24 + 2 * 24 * 7 + 7 * 7 + 7 + 7 + 24);
    shapes.clear();
    for (const TensorSpec& t : trained_table(tiny("llama", 3, 7, true)).rows) shapes[t.hf[0].name] = file_shape(t, t.hf[0]);
    EXPECT_EQ(shapes.size(), 21u);
    EXPECT_EQ(shapes.at("prompt_encoder.lstm_head.weight_ih_l0"), (Shape{28, 24}));
    EXPECT_EQ(shapes.at("prompt_encoder.lstm_head.weight_ih_l1_reverse"), (Shape{28, 14}));
    EXPECT_EQ(shapes.at("prompt_encoder.lstm_head.weight_hh_l0_reverse"), (Shape{28, 7}));
    EXPECT_EQ(shapes.at("prompt_encoder.lstm_head.bias_hh_l1"), (Shape{28}));
    EXPECT_EQ(shapes.at("prompt_encoder.mlp_head.0.weight"), (Shape{14, 14}));
    EXPECT_EQ(shapes.at("prompt_encoder.mlp_head.2.weight"), (Shape{24, 14}));
    ModelConfig computed = c;
    computed.virtual_tokens = c.virtual_tokens.computed();
    const ParameterTable table = trained_table(computed);
    ASSERT_EQ(table.rows.size(), 1u);
    EXPECT_EQ(table.rows[0].hf[0].name, "prompt_embeddings");
    Part last = whole_model(c);
    last.first = false;
    EXPECT_EQ(trained_table(c, last).size, 0u);  // on another stage
}

}  // namespace
}  // namespace test_virtual_tokens_fp64
