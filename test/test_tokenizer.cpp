// The tokenizer compared with Hugging Face's: the same vocabulary and merges learned from the same text, the same encodings
// of texts in many scripts (test/golden/tokenizer, from dev/ref/tokenizer_golden.py); any bytes survive encode and decode;
// damaged files are refused by name.
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "../llmc/tokenizer/tokenizer.h"
#include "../llmc/tokenizer/tokenizer_trainer.h"
#include "files.h"

namespace test_tokenizer {

const std::string golden = "test/golden/tokenizer/";
const char* const pre_tokenizers[] = {"gpt2", "llama3", "bloom"};

nlohmann::json read_json(const std::string& path) { return nlohmann::json::parse(MappedFile(path).text()); }

BpeTrainer trained(const std::string& name, int vocab_size) {
    const MappedFile file(golden + "text.txt");
    PieceCounter counter;
    PreTokenizer(pretokenizer_pattern(name)).split(file.text(), [&](std::string_view piece) {
        counter.add(piece, file.text().data() + file.text().size());
    });
    PieceCounts counts;
    counter.move_to(counts);
    BpeTrainer trainer(counts, {"<|endoftext|>"}, name);
    trainer.train(vocab_size, 2, nullptr);
    return trainer;
}

// More distinct pieces than its table has slots, containing zeros and longer than its keys.
TEST(PieceCounter, CountsAsAMapDoes) {
    std::mt19937 rng(3);
    const auto below = [&](size_t n) { return rng() % n; };
    std::string text;
    for (int i = 0; i < 20000; i++) text += (char)(below(8) ? 'a' + below(3) : 0);
    PieceCounter counter;
    PieceCounts expected, counts;
    for (int i = 0; i < 100000; i++) {
        const size_t n = 1 + below(20), at = below(text.size() - n + 1);
        const std::string_view piece(text.data() + at, n);
        counter.add(piece, text.data() + text.size());
        expected[std::string(piece)]++;
        if (i % 40000 == 0) counter.move_to(counts);
    }
    counter.move_to(counts);
    EXPECT_GT(counts.size(), 1u << 14);
    EXPECT_EQ(counts, expected);
    counter.move_to(counts);
    EXPECT_EQ(counts, expected) << "what was taken is taken once";
}

TEST(Tokenizer, LearnsTheVocabularyAndMergesOfHuggingFace) {
    for (const std::string name : pre_tokenizers) {
        const auto ours = trained(name, 600).to_json(), theirs = nlohmann::ordered_json(read_json(golden + name + ".json"));
        EXPECT_EQ(nlohmann::json(ours["model"]["vocab"]), nlohmann::json(theirs["model"]["vocab"])) << name;
        const auto &a = ours["model"]["merges"], &b = theirs["model"]["merges"];
        ASSERT_EQ(a.size(), b.size()) << name;
        for (size_t i = 0; i < a.size(); i++) {
            // Newer versions of tokenizers write a merge as a pair, older ones as one string.
            const std::string expected =
                b[i].is_string() ? b[i].get<std::string>() : b[i][0].get<std::string>() + " " + b[i][1].get<std::string>();
            ASSERT_EQ(a[i].get<std::string>(), expected) << name << ", merge " << i;
        }
    }
}

TEST(Tokenizer, EncodesLikeHuggingFace) {
    const auto encodings = read_json(golden + "encodings.json");
    const auto texts = encodings["texts"].get<std::vector<std::string>>();
    ASSERT_GE(texts.size(), 20u);
    for (const std::string name : pre_tokenizers) {
        const Tokenizer tokenizer = Tokenizer::load(golden + name + ".json");
        EXPECT_EQ(tokenizer.vocab_size(), 600);
        EXPECT_EQ(tokenizer.eod_id(), 0);
        for (size_t i = 0; i < texts.size(); i++) {
            EXPECT_EQ(tokenizer.encode(texts[i]), encodings[name][i].get<std::vector<int>>()) << name << ": " << texts[i];
            EXPECT_EQ(tokenizer.decode(tokenizer.encode(texts[i])), texts[i]) << name;
        }
    }
}

// Each supported feature of tokenizer.json, on texts made to detect differences.
TEST(Tokenizer, EncodesEveryFeatureLikeHuggingFace) {
    const auto good = read_json(golden + "gpt2.json"), golden_values = read_json(golden + "variants.json");
    const auto texts = golden_values["texts"].get<std::vector<std::string>>();
    ASSERT_GE(golden_values["variants"].size(), 21u);
    const test::TemporaryDirectory dir;
    for (const auto& variant : golden_values["variants"]) {
        const std::string name = variant["name"];
        test::write_file(dir / "tokenizer.json", good.patch(variant["patch"]).dump());
        const Tokenizer tokenizer = Tokenizer::load(dir / "tokenizer.json");
        for (size_t i = 0; i < texts.size(); i++) {
            EXPECT_EQ(tokenizer.encode(texts[i]), variant["training"][i].get<std::vector<int>>()) << name << ": " << texts[i];
            EXPECT_EQ(tokenizer.encode_prompt(texts[i]), variant["prompts"][i].get<std::vector<int>>())
                << name << ": " << texts[i];
            if (!tokenizer.keeps_every_byte()) continue;
            EXPECT_EQ(tokenizer.decode(tokenizer.encode(texts[i])), texts[i]) << name;
        }
    }
}

TEST(Tokenizer, ItsOwnFileLoadsAndEncodesTheSame) {
    const test::TemporaryDirectory dir;
    for (const std::string name : pre_tokenizers) {
        const std::string path = dir / (name + ".json");
        std::ofstream(path) << trained(name, 600).to_json().dump(1);
        const Tokenizer ours = Tokenizer::load(path), theirs = Tokenizer::load(golden + name + ".json");
        const std::string text(MappedFile(golden + "text.txt").text());
        EXPECT_EQ(ours.encode(text), theirs.encode(text)) << name;
    }
}

TEST(Tokenizer, AnyBytesComeBack) {
    std::mt19937 random(1);
    for (const std::string name : pre_tokenizers) {
        const Tokenizer tokenizer = Tokenizer::load(golden + name + ".json");
        for (const std::string& text : {std::string("caf\xe9 \xff\xfe \xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 ok"),
                                        std::string("cut \xe3\x81"), std::string("\0\0", 2)})
            EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << name;
        for (int round = 0; round < 300; round++) {
            std::string text(random() % 200, ' ');
            // Half of the bytes from the range of UTF-8 sequences, so that valid and broken ones both occur.
            for (char& c : text) c = (char)(random() % 2 ? random() % 256 : 0x80 + random() % 0x70);
            EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text) << name << ", round " << round;
        }
    }
}

// Both merge algorithms, for short and for long pieces, follow the definition: always the earliest learned pair first.
TEST(Tokenizer, LongPiecesMergeLikeShortOnes) {
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    const auto merges = read_json(golden + "gpt2.json")["model"]["merges"];
    std::map<std::pair<std::string, std::string>, int> rank;
    for (size_t i = 0; i < merges.size(); i++) {
        std::string left, right;
        if (merges[i].is_string()) {
            const std::string both = merges[i];
            left = both.substr(0, both.find(' ', 1));
            right = both.substr(both.find(' ', 1) + 1);
        } else {
            left = merges[i][0];
            right = merges[i][1];
        }
        rank[{left, right}] = (int)i;
    }
    std::mt19937 random(2);
    for (int round = 0; round < 200; round++) {
        std::string piece(1 + random() % 120, ' ');
        for (char& c : piece) c = "aehinostr"[random() % 9];
        std::vector<std::string> symbols;
        for (char c : piece) symbols.emplace_back(1, c);
        while (true) {
            int best = INT_MAX;
            size_t at = 0;
            for (size_t i = 0; i + 1 < symbols.size(); i++)
                if (const auto found = rank.find({symbols[i], symbols[i + 1]}); found != rank.end() && found->second < best) {
                    best = found->second;
                    at = i;
                }
            if (best == INT_MAX) break;
            symbols[at] += symbols[at + 1];
            symbols.erase(symbols.begin() + (long)at + 1);
        }
        std::vector<std::string> ours;
        for (int id : tokenizer.encode(piece)) ours.push_back(tokenizer.token_bytes(id));
        EXPECT_EQ(ours, symbols) << piece;
    }
}

// Vocabularies of a few letters, with conflicting merges everywhere. Some have two merges to the same token, some a merge
// before its parts' merges, for which finish() reports that they are not encoded from left to right.
TEST(BytePairEncoder, FromLeftToRightTheTokensOfMerging) {
    std::mt19937 random(5);
    const auto below = [&](size_t n) { return (size_t)random() % n; };
    int from_left = 0, by_merging = 0;
    for (int round = 0; round < 200; round++) {
        const size_t letters = 1 + below(4);
        std::vector<std::string> tokens;
        std::map<std::string, int> id;
        const auto add = [&](const std::string& bytes) {
            if (id.emplace(bytes, (int)tokens.size()).second) tokens.push_back(bytes);
        };
        for (size_t c = 0; c < letters; c++) add(std::string(1, (char)('a' + c)));
        std::set<std::pair<std::string, std::string>> pairs;
        std::vector<std::pair<std::string, std::string>> merges;
        for (size_t i = 5 + below(60); i > 0; i--) {
            const std::string left = tokens[below(tokens.size())], right = tokens[below(tokens.size())];
            if (left.size() + right.size() > 200 || !pairs.emplace(left, right).second) continue;
            add(left + right);
            merges.emplace_back(left, right);
        }
        if (round % 3 == 0) std::shuffle(merges.begin(), merges.end(), random);
        for (int b = 0; b < 256; b++) add(std::string(1, (char)b));
        BytePairEncoder plain, fast;
        for (BytePairEncoder* e : {&plain, &fast}) {
            for (const auto& [bytes, number] : id) e->add_token(bytes, number);
            for (const auto& [left, right] : merges) e->add_merge(id[left], id[right], id[left + right]);
        }
        (fast.finish() ? from_left : by_merging)++;
        for (int k = 0; k < 40; k++) {
            std::string piece(1 + below(k % 8 == 0 ? 600 : 40), ' ');
            for (char& c : piece) c = (char)('a' + below(letters + (k % 4 == 0)));
            std::vector<int> found[2];
            for (int i = 0; i < 2; i++) {
                BytePairEncoder::Run run(i ? fast : plain, piece, found[i]);
                run(piece);
                run.finish();
            }
            ASSERT_EQ(found[1], found[0]) << piece << ", round " << round;
        }
    }
    EXPECT_GT(from_left, 100);
    EXPECT_GT(by_merging, 16);
}

TEST(Tokenizer, ALongRunWithoutSpacesIsNotQuadratic) {
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    const std::string text(2000000, 'e');
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);  // quadratic would take hours
}

TEST(Tokenizer, TheTextOfASpecialTokenIsTextButInPrompts) {
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    for (int id : tokenizer.encode("a <|endoftext|> b")) EXPECT_FALSE(tokenizer.is_special(id));
    EXPECT_TRUE(tokenizer.is_special(0));
    EXPECT_EQ(tokenizer.token_to_id("<|endoftext|>"), 0);
    EXPECT_EQ(tokenizer.count_special("a <|endoftext|> b<|endoftext|>"), 2);
    const std::vector<int> prompt = tokenizer.encode_prompt("a <|endoftext|> b");
    EXPECT_EQ(std::count(prompt.begin(), prompt.end(), 0), 1);
}

TEST(Tokenizer, IdsBeyondItsOwnHaveANameAndNoText) {
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    EXPECT_EQ(tokenizer.decode({tokenizer.token_to_id("<|endoftext|>"), 600, 1 << 30}),
              "<|endoftext|><|id 600|><|id 1073741824|>");
    EXPECT_FALSE(tokenizer.has_text(600));
    EXPECT_TRUE(tokenizer.is_special(600));
    tokenizer.check_fits(600);
    tokenizer.check_fits(1000);
    test::expect_error([&] { tokenizer.check_fits(599); }, {"gpt2.json", "600 tokens", "599", "lacks the token 599"});
}

// Added tokens without embeddings in the model are no longer matched; if text or its template needs them, that is an error.
TEST(Tokenizer, FitsAModelThatLacksAddedTokens) {
    const test::TemporaryDirectory dir;
    auto j = read_json(golden + "gpt2.json");
    for (const bool special : {true, false})
        j["added_tokens"].push_back(
            {{"id", special ? 600 : 601}, {"content", special ? "<image>" : "<more>"}, {"special", special}});
    const auto load = [&](const nlohmann::json& file, const std::string& settings = "{}") {
        test::write_file(dir / "tokenizer.json", file.dump());
        test::write_file(dir / "tokenizer_config.json", settings);
        return Tokenizer::load(dir / "");
    };
    const auto said = [](Tokenizer& t, int vocabulary) {
        testing::internal::CaptureStderr();
        t.fit(vocabulary, true);
        return testing::internal::GetCapturedStderr();
    };
    const std::string text = "a<image><more> <|endoftext|>";
    Tokenizer t = load(j);
    const std::string hash = t.identity().hash;
    EXPECT_EQ(said(t, 602), "");
    const std::string note = said(t, 600);
    EXPECT_NE(note.find("it lacks 2 added tokens of " + (dir / "/tokenizer.json, '<image>' and so on")), std::string::npos)
        << note;
    EXPECT_EQ(said(t, 600), "");
    EXPECT_EQ(t.vocab_size(), 600);
    EXPECT_EQ(t.identity().hash, hash);
    EXPECT_EQ(t.token_to_id("<image>"), -1);
    EXPECT_EQ(t.count_special(text), 1);
    EXPECT_EQ(t.encode_prompt(text), Tokenizer::load(golden + "gpt2.json").encode_prompt(text));
    EXPECT_EQ(t.decode(t.encode(text)), text);

    const auto refused = [&](Tokenizer tokenizer, int vocabulary, const std::string& token) {
        test::expect_error([&] { tokenizer.fit(vocabulary, true); }, {"lacks the token " + token, "the model's own"});
    };
    refused(load(j), 599, "599");
    refused(load(j, R"({"eos_token": "<image>"})"), 600, "600, '<image>'");
    refused(load(j, R"({"bos_token": "<image>"})"), 600, "600, '<image>'");
    auto framed = j;
    framed["post_processor"] = {{"type", "TemplateProcessing"},
                                {"single", {{{"SpecialToken", {{"id", "<image>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                                {"special_tokens", {{"<image>", {{"ids", {600}}}}}}};
    refused(load(framed), 600, "600, '<image>'");
    // The last piece of the vocabulary is also an added token.
    auto learned = read_json(golden + "llama3.json");
    learned["added_tokens"].push_back({{"id", 596}, {"content", "ish"}});
    for (const char* name : {"\u0120she", "\u0120nak", "\u0120name"}) learned["model"]["vocab"].erase(name);
    auto& merges = learned["model"]["merges"];
    merges.erase(merges.end() - 3, merges.end());
    refused(load(learned), 596, "596, 'ish'");
}

// tokenizer_config.json names the tokens at the start and end of a text. Only the template adds tokens around a text, except
// for transformers classes with a template of their own.
TEST(Tokenizer, RolesComeFromTheFilesBesideIt) {
    const test::TemporaryDirectory dir;
    auto j = read_json(golden + "gpt2.json");
    for (const char* name : {"<|bos|>", "<|eos|>"})
        j["added_tokens"].push_back({{"id", 599 + j["added_tokens"].size()}, {"content", name}, {"special", true}});
    test::write_file(dir / "tokenizer.json", j.dump());
    const auto load = [&](const std::string& settings) {
        test::write_file(dir / "tokenizer_config.json", settings);
        return Tokenizer::load(dir / "");
    };
    const auto roles = [&](const std::string& settings) {
        const Tokenizer t = load(settings);
        return std::pair{t.bos_id(), t.eod_id()};
    };
    EXPECT_EQ(roles("{}"), (std::pair{0, 0}));
    EXPECT_EQ(roles(R"({"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}})"), (std::pair{600, 601}));
    EXPECT_EQ(roles(R"({"bos_token": null, "eos_token": "nothing"})"), (std::pair{0, 0}));
    EXPECT_TRUE(load("{}").encode_prompt("").empty());
    EXPECT_EQ(load(R"({"bos_token": "<|bos|>", "add_bos_token": true})").encode_prompt(""), std::vector<int>());
    const auto around = [&](const std::string& name, nlohmann::json settings) {
        settings.update({{"bos_token", "<|bos|>"}, {"eos_token", "<|eos|>"}, {"tokenizer_class", name}});
        return load(settings.dump()).encode_prompt("");
    };
    const auto single = [](const char* before, const char* after) -> nlohmann::json {
        return {{"type", "TemplateProcessing"},
                {"single",
                 {{{"SpecialToken", {{"id", before}}}}, {{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", after}}}}}},
                {"special_tokens", {{"<|bos|>", {{"ids", {600}}}}, {"<|eos|>", {{"ids", {601}}}}}}};
    };
    const nlohmann::json both = {{"add_bos_token", true}, {"add_eos_token", true}};
    for (const char* name : {"LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "CodeLlamaTokenizerFast"})
        EXPECT_EQ(around(name, both), (std::vector<int>{600, 601})) << name;
    EXPECT_EQ(around("PreTrainedTokenizerFast", both), std::vector<int>());
    j["post_processor"] = single("<|eos|>", "<|bos|>");
    test::write_file(dir / "tokenizer.json", j.dump());
    EXPECT_EQ(around("LlamaTokenizer", nlohmann::json::object()), (std::vector<int>{601, 600}));
    EXPECT_EQ(around("LlamaTokenizer", {{"add_bos_token", nullptr}}), (std::vector<int>{601, 600}));
    EXPECT_EQ(around("LlamaTokenizer", {{"add_eos_token", false}}), std::vector<int>{601});
    EXPECT_EQ(around("LlamaTokenizer", {{"add_bos_token", false}}), std::vector<int>{600});
    EXPECT_EQ(around("LlamaTokenizer", both), (std::vector<int>{600, 601}));
    EXPECT_EQ(around("PreTrainedTokenizerFast", both), (std::vector<int>{601, 600}));
    test::write_file(dir / "special_tokens_map.json", R"({"eos_token": "<|eos|>", "bos_token": "<|eos|>"})");
    EXPECT_EQ(roles(R"({"bos_token": "<|bos|>"})"), (std::pair{600, 601}));
}

// In Gemma's vocabulary </s> is an HTML tag.
TEST(Tokenizer, OnlySpecialTokensEndATextByTheirName) {
    const test::TemporaryDirectory dir;
    const auto roles = [&](const std::vector<std::pair<std::string, bool>>& added) {
        auto j = read_json(golden + "gpt2.json");
        j["added_tokens"] = nlohmann::json::array();
        for (const auto& [name, special] : added)
            j["added_tokens"].push_back({{"id", 600 + j["added_tokens"].size()}, {"content", name}, {"special", special}});
        test::write_file(dir / "tokenizer.json", j.dump());
        const Tokenizer t = Tokenizer::load(dir / "");
        return std::pair{t.bos_id(), t.eod_id()};
    };
    EXPECT_EQ(roles({{"</s>", false}, {"<s>", false}, {"<eos>", true}, {"<bos>", true}}), (std::pair{603, 602}));
    EXPECT_EQ(roles({{"</s>", true}, {"<s>", true}, {"<eos>", false}, {"<bos>", false}}), (std::pair{601, 600}));
    EXPECT_EQ(roles({{"</s>", true}, {"<s>", true}, {"<eos>", true}, {"<bos>", true}}), (std::pair{603, 602}));
    EXPECT_EQ(roles({{"</s>", false}, {"<s>", false}}), (std::pair{-1, -1}));
}

// A normalizer may shorten a text; only bytes without a token count as lost.
TEST(Tokenizer, CountsLostBytes) {
    const test::TemporaryDirectory dir;
    auto j = read_json(golden + "gpt2.json");
    const auto lost = [&](const std::string& text) {
        test::write_file(dir / "tokenizer.json", j.dump());
        const Tokenizer t = Tokenizer::load(dir / "");
        return t.count_lost(text, t.encode(text));
    };
    EXPECT_EQ(lost("a\1bb\1"), 0);
    j["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "bb"}}}, {"content", "b"}};
    EXPECT_EQ(lost("a\1bb\1"), 0);
    j["normalizer"] = nullptr;
    j["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {{{"type", "WhitespaceSplit"}}, j["pre_tokenizer"]}}};
    EXPECT_EQ(lost("a b\1"), 1);
    j = read_json(golden + "gpt2.json");
    auto& vocabulary = j["model"]["vocab"];
    vocabulary["another"] = vocabulary["\u0101"];  // the byte 1
    vocabulary.erase("\u0101");
    EXPECT_EQ(lost("a\1bb\1"), 2);
}

// ---- long runs, and slow patterns ------------------------------------------------------------------------------------------
std::vector<std::string_view> pieces_of(const PreTokenizer& p, std::string_view text) {
    std::vector<std::string_view> pieces;
    p.split(text, [&](std::string_view piece) { pieces.push_back(piece); });
    return pieces;
}

// A run of spaces is one piece, except the space before a word. For 12 million of them Llama-3's pattern needs more steps
// than PCRE2's default limit.
TEST(PreTokenizer, TwelveMillionOfAKind) {
    const size_t n = 12000000;
    std::string mixed(n, ' ');
    std::mt19937 random(3);
    for (char& c : mixed) c = random() % 2 ? ' ' : '\n';
    mixed.back() = ' ';
    const std::string spaces(n, ' '), letters(n, 'a');
    const auto start = std::chrono::steady_clock::now();
    for (const auto& [name, by_hand] : {std::pair{"gpt2", true}, {"gpt2", false}, {"llama3", true}, {"llama3", false}}) {
        const PreTokenizer p({Splitter(pretokenizer_pattern(name), SplitBehavior::isolated, false, by_hand)});
        EXPECT_EQ(pieces_of(p, spaces), std::vector<std::string_view>{spaces}) << name;
        EXPECT_EQ(pieces_of(p, letters), std::vector<std::string_view>{letters}) << name;
        const std::vector<std::string_view> pieces = pieces_of(p, spaces + "a");
        ASSERT_EQ(pieces.size(), 2u) << name;
        EXPECT_EQ(pieces[0].size(), n - 1) << name;  // the last one belongs to the letter
        // Llama-3's \s*[\r\n]+ ends at the last newline; GPT-2's \s+ does not.
        const size_t last_newline = name == std::string("gpt2") ? n : mixed.rfind('\n') + 1;
        EXPECT_EQ(pieces_of(p, mixed).at(0).size(), last_newline) << name;
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

// Tokens of 2, 4, ... 64 spaces: a run becomes as many of the longest as fit, then shorter ones.
TEST(Tokenizer, TwoMillionSpaces) {
    auto j = read_json(golden + "llama3.json");
    auto& vocabulary = j["model"]["vocab"];
    const bool pairs = !j["model"]["merges"][0].is_string();
    size_t next = vocabulary.size();
    for (const auto& token : j["added_tokens"]) next += !vocabulary.contains(token["content"].get<std::string>());
    std::string half = "Ġ";
    for (int length = 2; length <= 64; length *= 2, half += half) {
        if (!vocabulary.contains(half + half)) vocabulary[half + half] = next++;
        if (pairs) j["model"]["merges"].push_back({half, half});
        else j["model"]["merges"].push_back(half + " " + half);
    }
    const test::TemporaryDirectory dir;
    test::write_file(dir / "tokenizer.json", j.dump());
    const Tokenizer tokenizer = Tokenizer::load(dir / "tokenizer.json");
    const size_t n = 2000000 - 2000000 % 64 + 37;
    const std::vector<int> tokens = tokenizer.encode(std::string(n, ' '));
    ASSERT_EQ(tokens.size(), n / 64 + 3);  // 37 = 32 + 4 + 1
    for (size_t i = 0; i < n / 64; i++) ASSERT_EQ(tokenizer.token_bytes(tokens[i]).size(), 64u) << i;
}

// Searching nearby first, and the whole text only if needed, gives the same result as searching the whole text.
TEST(PreTokenizer, NearOrFarTheSamePieces) {
    const auto whole = [](const std::string& pattern, const std::string& text) {
        int error = 0;
        size_t at = 0, done = 0;
        const std::string translated = pcre2_pattern(pattern);
        pcre2_code* code = pcre2_compile((PCRE2_SPTR)translated.data(), translated.size(),
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &at, nullptr);
        pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
        std::vector<std::string_view> pieces;
        while (done < text.size()) {
            const int found = pcre2_match(code, (PCRE2_SPTR)text.data(), text.size(), done, 0, data, nullptr);
            const size_t *range = pcre2_get_ovector_pointer(data), begin = found < 0 ? text.size() : range[0],
                         end = found < 0 ? text.size() : range[1];
            if (begin > done) pieces.push_back(std::string_view(text).substr(done, begin - done));
            if (end > begin) pieces.push_back(std::string_view(text).substr(begin, end - begin));
            done = end;
        }
        pcre2_match_data_free(data);
        pcre2_code_free(code);
        return pieces;
    };
    std::vector<std::string> patterns = {
        R"(\w+\b|\s+$|\S)",           R"((?<=a)b+|a+(?=b{3})|[^ab]+)", R"([^\n]+\n|\n+\z|.)", R"((?>a+)c?|x{300,}|\X)",
        R"(a{1,400}(?!a)|\s+(?!\S))", R"([[:^space:]]{250,260}|b+c)",  R"((?:ab|a)+?c|\S+ )"};
    for (const char* name : pre_tokenizers) patterns.push_back(pretokenizer_pattern(name));
    std::mt19937 random(5);
    const char* const parts[] = {" ", "\n", "a", "b", "c", "é", "日", "😀", "\r\n", "9", "'s", ".", "x", "\u0301"};
    for (int round = 0; round < 60; round++) {
        std::string text;
        while (text.size() < 3000) {
            const std::string part = parts[random() % 14];
            for (size_t n = random() % 4 ? 1 + random() % 5 : 200 + random() % 400; n > 0; n--) text += part;
        }
        for (const std::string& pattern : patterns)
            ASSERT_EQ(pieces_of(PreTokenizer(pattern), text), whole(pattern, text)) << pattern << "\n" << text;
    }
}

TEST(PreTokenizer, APatternThatTakesTooLongIsRefused) {
    const auto start = std::chrono::steady_clock::now();
    const std::string letters(1000000, 'a');
    for (const std::string pattern :
         {"(a+)+b|.", "[ab]*c", "[ab]*c|.", "a*a*a*b|a", "(?:a|a?)+b|.", "(?=(?:a*)*b)a|.", "(?:aa|a)+(?:b|c)|."})
        test::expect_error([&] { pieces_of(PreTokenizer(pattern), letters); }, {pattern});
    test::expect_error([&] { PreTokenizer("(a+)b\\1"); }, {"(a+)b\\1", "back reference"});
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

// Patterns that Oniguruma reads differently from PCRE2 and that cannot be translated.
TEST(PreTokenizer, RefusesWhatPcre2ReadsInAnotherWay) {
    for (const std::string pattern :
         {"[a-z&&[^b]]", "[a[^b]]", "[[:^alpha:]]", "[\\W]", "a(?i)b|c", "(?x) a", "(?i:ss)", "(?i:é)", "\\xe9", "\\Qa.\\E",
          "\\u00e9", "\\p{IsL}", "\\pL", "\\H", "(?~a)", "(?(1)a)", "\\g<1>", "+a", "a|*b"})
        test::expect_error([&] { PreTokenizer{pattern}; }, {pattern, "not understood"});
}

void expect_refused(const nlohmann::json& json, const std::string& part) {
    const test::TemporaryDirectory dir;
    const std::string path = dir / "tokenizer.json";
    test::write_file(path, json.dump());
    test::expect_error([&] { Tokenizer::load(path); }, {part, path});
}

void expect_loads(const nlohmann::json& json) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "tokenizer.json", json.dump());
    Tokenizer::load(dir / "tokenizer.json");
}

TEST(Tokenizer, RefusesWhatItCannotDoByName) {
    const auto good = read_json(golden + "llama3.json");
    auto j = good;
    j["model"]["type"] = "WordPiece";
    expect_refused(j, "WordPiece");
    j = good;
    j["normalizer"] = {{"type", "BertNormalizer"}};
    expect_refused(j, "BertNormalizer");
    for (const auto& [key, value] : {std::pair<const char*, nlohmann::json>{"dropout", 0.1},
                                     {"end_of_word_suffix", "</w>"},
                                     {"continuing_subword_prefix", "##"}}) {
        j = good;
        j["model"][key] = value;
        expect_refused(j, std::string(key) + " " + value.dump());
        j = good;
        j["model"][key] = nullptr;
        expect_loads(j);
    }
    j = good;
    j["pre_tokenizer"]["pretokenizers"].push_back({{"type", "Metaspace"}});
    expect_refused(j, "'Metaspace' after ByteLevel");
    j = good;
    j["pre_tokenizer"]["pretokenizers"].push_back({{"type", "WhitespaceSplit"}});
    expect_refused(j, "drops text, after ByteLevel");
    j = good;
    j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Odd";
    expect_refused(j, "behavior 'Odd'");
    j = good;
    j["post_processor"] = {{"type", "RobertaProcessing"}};
    expect_refused(j, "RobertaProcessing");
    j = good;
    j["post_processor"] = {{"type", "TemplateProcessing"}, {"single", nlohmann::json::array()}};
    expect_refused(j, "without the text");
    const auto added = [](int id, const char* content) { return nlohmann::json{{"id", id}, {"content", content}}; };
    j = good;
    j["added_tokens"].insert(j["added_tokens"].end(), {added(600, "x1"), added(601, "x1")});
    expect_refused(j, "listed twice");
    j = good;
    j["added_tokens"].insert(j["added_tokens"].end(), {added(601, "x1"), added(600, "x2")});
    expect_refused(j, "before a smaller one");
    j = good;
    j["added_tokens"].push_back(added(600, "a"));
    expect_refused(j, "two tokens");
    j = good;
    j["pre_tokenizer"] = {{"type", "Metaspace"}};
    expect_refused(j, "Metaspace");
    j = good;
    j["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true;
    expect_refused(j, "add_prefix_space");
    j = good;
    j["model"]["vocab"].erase("a");
    expect_refused(j, "has no token");
    j = good;
    j["model"]["merges"].push_back("zz qq");
    expect_refused(j, "is not a token");
    j = good;
    j["model"]["vocab"]["twice"] = 5;
    expect_refused(j, "two tokens");
    j = good;
    j["model"]["vocab"]["far"] = 100000;
    expect_refused(j, "100000");
    expect_refused(nlohmann::json::array(), "not a tokenizer.json");
}

TEST(Tokenizer, RefusesHostileFiles) {
    const auto good = read_json(golden + "llama3.json");
    auto j = good;
    for (const nlohmann::json& id : {nlohmann::json(1e300), nlohmann::json(-1.5), nlohmann::json("5"), nlohmann::json(true)}) {
        j = good;
        j["model"]["vocab"]["far"] = id;
        expect_refused(j, "not a whole number");
    }
    for (const nlohmann::json& id : {nlohmann::json(INT64_MIN), nlohmann::json(-1), nlohmann::json(UINT64_MAX)}) {
        j = good;
        j["model"]["vocab"]["far"] = id;
        expect_refused(j, "ids must be");
    }
    // An added token may repeat a token of the vocabulary, but not change its text: decode(encode(x)) would differ from x.
    const int a = good["model"]["vocab"]["a"];
    j = good;
    j["added_tokens"].push_back({{"id", a}, {"content", "zzz"}});
    expect_refused(j, "belongs to two tokens");
    const test::TemporaryDirectory dir;
    const auto load = [&](const nlohmann::json& json) {
        test::write_file(dir / "tokenizer.json", json.dump());
        return Tokenizer::load(dir / "tokenizer.json");
    };
    j = good;
    j["added_tokens"].push_back({{"id", a}, {"content", "a"}});
    EXPECT_EQ(load(j).encode("a"), std::vector<int>{a});
    // A literal space is itself only in special tokens: the byte's token uses another character.
    j = good;
    j["model"]["vocab"][" "] = (int)good["model"]["vocab"].size();
    for (auto& token : j["added_tokens"])
        if (token["id"] == j["model"]["vocab"][" "]) token["id"] = (int)j["model"]["vocab"].size();
    EXPECT_EQ(load(j).encode(" "), load(good).encode(" "));

    const std::string nested = std::string(1 << 18, '[') + std::string(1 << 18, ']');
    test::write_file(dir / "tokenizer.json",
                     R"({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": )" + nested + "}}");
    test::expect_error([&] { Tokenizer::load(dir / "tokenizer.json"); }, {dir / "tokenizer.json", "nested"});
}

TEST(Tokenizer, RefusesAPipeAndADevice) {
    const test::TemporaryDirectory dir;
    ASSERT_EQ(mkfifo((dir / "tokenizer.json").c_str(), 0600), 0);
    alarm(60);  // instead of waiting forever
    test::expect_error([&] { Tokenizer::load(dir / ""); }, {dir / "/tokenizer.json", "regular file"});
    test::expect_error([&] { Tokenizer::load("/dev/zero"); }, {"/dev/zero", "regular file"});
    alarm(0);
}

// Patterns that would never reach the end of the text, or cut characters in two.
TEST(Tokenizer, RefusesPatternsThatDoNotCutText) {
    const auto pieces = [](const std::string& pattern, const std::string& text) {
        std::vector<std::string> found;
        PreTokenizer(pattern).split(text, [&](std::string_view piece) { found.emplace_back(piece); });
        return found;
    };
    for (const std::string pattern : {"a*", "(a?)", "(a)?", "()", "(b)|(a?)", "(?=a)", "(?=(a))", "a\\K", "(?<=(a))|b"})
        test::expect_error([&] { pieces(pattern, "xaab"); }, {pattern, "empty"});
    for (const std::string pattern : {"\\C", "(?<=\\Ka)b", "(?=a\\K)", "(", "[", "(?<n>", "a{99999}"})
        test::expect_error([&] { pieces(pattern, "é"); }, {pattern, "not understood"});
    EXPECT_EQ(pieces("(a+)|(b)", "xaab"), (std::vector<std::string>{"x", "aa", "b"}));  // groups are allowed
    EXPECT_EQ(pieces("xa\\Ka", "xaab"), (std::vector<std::string>{"xa", "a", "b"}));
}

}  // namespace test_tokenizer
