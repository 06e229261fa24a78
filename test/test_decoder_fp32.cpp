// Texts that are written together (llmc/model/decoder.h), in fp32 and fp64: what a text says, and its logits, are bit by bit
// what they are when it is written alone, whoever joins and leaves meanwhile; where a text ends.
#include <gtest/gtest.h>

#include <set>

#include "trainer.h"

namespace test_decoder {

// Names of families, and a window in every second layer (0: none), beside wide enough layers for the fast kernels.
struct Variant {
    const char* family;
    int NKV, window;
};
const Variant variants[] = {{"gpt2", 4, 0}, {"bloom", 4, 0}, {"llama", 2, 0}, {"mistral", 2, 5}, {"train_gpt", 1, 5}};

ModelConfig config_of(const Variant& v) {
    ModelConfig c;
    set_family(c, v.family);
    c.L = 3;
    c.C = 64;
    c.NH = 4;
    c.NKV = v.NKV;
    c.F = 256;
    c.T = 40;
    c.V = 200;
    c.init_std = 0.2;  // or every text would repeat one token
    c.window = v.window;
    if (std::string(v.family) == "train_gpt") c.full_interval = 2;
    pad_vocabulary(c, 16);
    return c;
}

// The fastest matrix unit, and one that is no tile unit; the plain loops have none.
bool choose_unit([[maybe_unused]] cpu::Ctx& ctx, size_t number) {
#if CPU_FAST_PATHS
    if (number == 1) ctx.layers = cpu::portable();
    return number < 2;
#else
    return number == 0;
#endif
}

struct Fixture {
    be::Ctx ctx{2};
    Model m;
    Fixture(const ModelConfig& c, TextRoom room, size_t unit = 0, int pass_rows = 40) : m(c) {
        choose_unit(ctx, unit);
        plan_memory(m, Recompute::inference, 1, pass_rows, 1, room);
        allocate(ctx, m);
        initialize(ctx, m, 42);
    }
};

struct Text {
    std::vector<int> tokens;
    TextEnd end = TextEnd::abandoned;
    bool operator==(const Text& other) const { return tokens == other.tokens && end == other.end; }
};
void PrintTo(const Text& text, std::ostream* os) {
    *os << testing::PrintToString(text.tokens) << " ended by " << (int)text.end;
}

// Prompts of different lengths; every second text is greedy, the others are drawn; lengths and seeds differ.
TextRequest request(const ModelConfig& c, int i, Text& text) {
    TextRequest r;
    for (int t = 0; t < 1 + 5 * i % 17; t++) r.prompt.push_back((i * 31 + t * 7) % c.V);
    r.max_new_tokens = 3 + 4 * i % 19;
    r.sampling = {i % 2 ? 1.0 : 0.0, i % 4 == 1 ? 20 : 0, i % 4 == 3 ? 0.9 : 1.0};
    r.seed = 5;
    r.sample = (uint32_t)i;
    r.emit = [&text](int token) {
        text.tokens.push_back(token);
        return true;
    };
    r.ended = [&text](TextEnd end) { text.end = end; };
    return r;
}

constexpr int n_texts = 11;
std::vector<Text> write(const ModelConfig& c, TextRoom room, size_t unit, bool alone = false) {
    Fixture f(c, room, unit);
    Generator generator(f.ctx, f.m);
    Decoder<Generator> decoder(generator);
    std::vector<Text> texts(n_texts);
    for (int i = 0; i < n_texts; i++) {
        decoder.add(request(c, i, texts[(size_t)i]));
        while (alone && decoder.step()) {
        }
    }
    while (decoder.step()) {
    }
    return texts;
}

class Decoding : public testing::TestWithParam<Variant> {};

TEST_P(Decoding, TextsAreTheSameAloneAndTogether) {
    const ModelConfig c = config_of(GetParam());
    cpu::Ctx ctx(2);
    for (size_t unit = 0; choose_unit(ctx, unit); unit++) {
        const std::vector<Text> alone = write(c, {2, 0}, unit, true);
        std::set<int> different;
        for (size_t i = 0; i < alone.size(); i++) {
            EXPECT_EQ(alone[i].tokens.size(), (size_t)(3 + 4 * (int)i % 19)) << i;
            EXPECT_EQ(alone[i].end, TextEnd::length);
            different.insert(alone[i].tokens.begin(), alone[i].tokens.end());
        }
        EXPECT_GT(different.size(), 20u);  // or equality would say little
        for (const int together : {5, n_texts}) EXPECT_EQ(write(c, {together, 0}, unit), alone) << together << " on " << unit;
        EXPECT_EQ(write(c, {5, 36}, unit), alone);  // with less room in the cache
#if CPU_FAST_PATHS
        if (!cpu::detail::takes_few_rows(ctx, cpu::detail::few_rows)) continue;
#endif
        EXPECT_EQ(write(c, {1, 0}, unit), alone);
        EXPECT_EQ(write(c, {8, 0}, unit), alone);
    }
}

// Sequences of other lengths join, leave and are replaced; the logits of one have the bits that it has alone.
TEST_P(Decoding, LogitsDoNotDependOnTheOthers) {
    const ModelConfig c = config_of(GetParam());
    const auto token = [&](int sequence, int t) { return (sequence * 31 + t * 7) % c.V; };
    const auto prompt = [&](int sequence, int n) {
        std::vector<int> tokens;
        for (int t = 0; t < n; t++) tokens.push_back(token(sequence, t));
        return tokens;
    };
    Fixture one(c, {2, 0}), four(c, {4, 0});
    Generator alone(one.ctx, one.m), together(four.ctx, four.m);
    const auto row = [&](Generator& g, size_t i) {
        const std::vector<float>& logits = g.logits();
        return std::vector<float>(logits.begin() + (long)i * c.V, logits.begin() + (long)(i + 1) * c.V);
    };
    alone.prompt(0, prompt(2, 4));
    together.prompt(3, prompt(9, 13));
    together.prompt(2, prompt(2, 4));
    EXPECT_EQ(row(together, 0), row(alone, 0));
    for (int t = 4; t < 30; t++) {
        alone.append({{0, token(2, t)}});
        std::vector<NextToken> next = {{2, token(2, t)}};
        if (t % 3) next.push_back({3, token(9, t)});
        if (t == 6 || t == 20) together.prompt(0, prompt(t, 5));
        if (t >= 6) next.insert(next.begin(), {0, token(0, t)});
        together.append(next);
        const size_t i = t >= 6;
        ASSERT_EQ(row(together, i), row(alone, 0)) << t;
    }
    EXPECT_EQ(together.length(2), 30);
}

INSTANTIATE_TEST_SUITE_P(Decoder, Decoding, testing::ValuesIn(variants),
                         [](const auto& test) { return std::string(test.param.family) + std::to_string(test.index); });

// A prompt longer than the activations is read as far as they go at once, then token by token: the same but for roundings.
TEST(Decoder, LongPromptsAreReadInParts) {
    const ModelConfig c = config_of(variants[2]);
    std::vector<float> logits[2];
    for (const int i : {0, 1}) {
        Fixture f(c, {2, 0}, 0, i ? 40 : 6);
        Generator generator(f.ctx, f.m);
        std::vector<int> tokens(30);
        for (size_t t = 0; t < tokens.size(); t++) tokens[t] = (int)t * 7 % c.V;
        generator.prompt(1, tokens);
        logits[i] = generator.logits();
    }
    for (size_t i = 0; i < logits[0].size(); i++) EXPECT_NEAR(logits[0][i], logits[1][i], 1e-4) << i;
}

// After a failure of the generator, such as a GPU's, texts that nobody wants any more end without it.
TEST(Decoder, EndsWhatIsUnwantedAfterAFailure) {
    struct Broken {
        std::vector<float> none{};
        int sequences() const { return 2; }
        int capacity() const { return 10; }
        int length(int) const { return 1; }
        void prompt(int, const std::vector<int>&) { throw std::runtime_error("broken"); }
        void append(const std::vector<NextToken>&) { throw std::runtime_error("broken"); }
        const std::vector<float>& logits() { return none; }
    } broken;
    Decoder<Broken> decoder(broken);
    bool wanted = true;
    int ended = 0;
    for (int i = 0; i < 3; i++) {
        TextRequest text;
        text.prompt = {1};
        text.ended = [&](TextEnd how) { ended += how == TextEnd::abandoned; };
        text.wanted = [&] { return wanted; };
        decoder.add(std::move(text));
    }
    EXPECT_THROW(decoder.step(), std::runtime_error);
    EXPECT_EQ(ended, 0);
    wanted = false;
    EXPECT_FALSE(decoder.step());
    EXPECT_EQ(ended, 3);
}

// The five ways to end; a text that has ended makes room for the next.
TEST(Decoder, EndsAndRoom) {
    const ModelConfig c = config_of(variants[0]);
    Fixture f(c, {1, 0});
    Generator generator(f.ctx, f.m);
    Text text;
    const auto end_of = [&](auto change) {
        text = {};
        TextRequest r = request(c, 2, text);
        r.max_new_tokens = 1000;
        change(r);
        Decoder<Generator> decoder(generator);
        decoder.add(std::move(r));
        while (decoder.step()) {
        }
        EXPECT_EQ(decoder.tokens(), (int64_t)text.tokens.size());
        return text.end;
    };
    EXPECT_EQ(end_of([](TextRequest&) {}), TextEnd::context);
    EXPECT_EQ(text.tokens.size(), 40u - 11u);
    const std::vector<int> all = text.tokens;
    EXPECT_EQ(end_of([&](TextRequest& r) { r.ends = {all[5]}; }), TextEnd::token);
    EXPECT_EQ(text.tokens, std::vector<int>(all.begin(), std::find(all.begin(), all.end(), all[5])));
    EXPECT_EQ(end_of([&](TextRequest& r) {
                  r.emit = [&](int token) { return text.tokens.push_back(token), text.tokens.size() < 4; };
              }),
              TextEnd::stopped);
    EXPECT_EQ(text.tokens.size(), 4u);
    EXPECT_EQ(end_of([](TextRequest& r) { r.max_new_tokens = 7; }), TextEnd::length);
    EXPECT_EQ(text.tokens.size(), 7u);
    EXPECT_EQ(end_of([&](TextRequest& r) { r.wanted = [&] { return text.tokens.size() < 3; }; }), TextEnd::abandoned);
    EXPECT_EQ(text.tokens.size(), 3u);
    EXPECT_EQ(end_of([&](TextRequest& r) { r.prompt.resize(40, 1); }), TextEnd::context);  // a prompt without room
    EXPECT_TRUE(text.tokens.empty());

    // Unwanted ones that wait are dropped as well.
    Text first, dropped, last;
    Decoder<Generator> decoder(generator);
    decoder.add(request(c, 1, first));
    decoder.add(request(c, 2, dropped));
    decoder.add(request(c, 3, last));
    bool wanted = true;
    TextRequest unwanted = request(c, 4, dropped);
    unwanted.wanted = [&] { return wanted; };
    decoder.add(std::move(unwanted));
    wanted = false;
    EXPECT_TRUE(decoder.step());
    EXPECT_EQ(dropped.end, TextEnd::abandoned);
    EXPECT_EQ(decoder.waiting(), 2u);
    while (decoder.step()) {
    }
    EXPECT_EQ(first.end, TextEnd::length);
    EXPECT_EQ(last.end, TextEnd::length);
}

}  // namespace test_decoder
