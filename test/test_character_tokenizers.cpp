// Tokenizers with characters as symbols: SentencePiece models, and tokenizer.json of types unigram and BPE with byte
// fallback, compared with SentencePiece and Hugging Face's library (test/golden/tokenizer/characters*, from
// dev/ref/tokenizer_golden.py). Damaged or unknown content is refused by name.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <set>

#include "../llmc/tokenizer/tokenizer.h"
#include "../llmc/tokenizer/unigram_trainer.h"
#include "files.h"

namespace test_character_tokenizers {

const std::string golden = "test/golden/tokenizer/";
nlohmann::json read_json(const std::string& path) { return nlohmann::json::parse(MappedFile(path).text()); }

std::vector<int> encode(const Tokenizer& tokenizer, const std::string& text, bool special) {
    std::vector<int> tokens;
    tokenizer.encode_append(text, tokens, special);
    return tokens;
}

std::string from_hex(const std::string& hex) {
    std::string bytes;
    for (size_t i = 0; i < hex.size(); i += 2) bytes += (char)std::stoi(hex.substr(i, 2), nullptr, 16);
    return bytes;
}

// A modified copy of another tokenizer.json.
Tokenizer patched(const test::TemporaryDirectory& dir, const std::string& base, const nlohmann::json& patch) {
    test::write_file(dir / "tokenizer.json", read_json(golden + base).patch(patch).dump());
    return Tokenizer::load(dir / "tokenizer.json");
}

TEST(CharacterTokenizers, EncodeAndDecodeLikeTheirLibraries) {
    const auto values = read_json(golden + "characters.json");
    auto texts = values["texts"].get<std::vector<std::string>>();
    const size_t n_texts = texts.size();
    for (const std::string hex : values["invalid"]) texts.push_back(from_hex(hex));
    ASSERT_GE(values["rows"].size(), 14u);
    const test::TemporaryDirectory dir;
    for (const auto& row : values["rows"]) {
        const bool model = row.contains("model");
#if !HAVE_UTF8PROC
        if (!model && row["patch"].dump().find("NF") + 1) continue;
        if (!model && row["patch"].dump().find("Precompiled") + 1) continue;
#endif
        const std::string name = model ? row["model"] : row["name"];
        const Tokenizer tokenizer =
            model ? Tokenizer::load(golden + name) : patched(dir, row["base"].get<std::string>(), row["patch"]);
        ASSERT_EQ(row["tokens"].size(), model ? texts.size() : n_texts);
        for (size_t i = 0; i < row["tokens"].size(); i++) {
            const std::vector<int> tokens = encode(tokenizer, texts[i], !model);
            EXPECT_EQ(tokens, row["tokens"][i].get<std::vector<int>>()) << name << ": " << texts[i];
            EXPECT_EQ(tokenizer.decode(tokens), row["decoded"][i].get<std::string>()) << name << ": " << texts[i];
        }
    }
}

TEST(CharacterTokenizers, TextThatSpellsASpecialTokenStaysText) {
    for (const char* file : {"characters_bpe.model", "characters_unigram.model"}) {
        const Tokenizer tokenizer = Tokenizer::load(golden + file);
        EXPECT_EQ(tokenizer.token_bytes(tokenizer.eod_id()), "</s>");
        EXPECT_EQ(tokenizer.token_bytes(tokenizer.bos_id()), "<s>");
        for (int id : encode(tokenizer, "a</s><s>", false)) EXPECT_FALSE(tokenizer.is_special(id));
        EXPECT_EQ(encode(tokenizer, "</s>", true), std::vector<int>{tokenizer.eod_id()});
        EXPECT_EQ(tokenizer.count_special("a</s><s>"), 2);
    }
}

// Tokens added to a model by transformers' Python tokenizers, through both of their files.
TEST(CharacterTokenizers, TokensAddedBesideAModel) {
    using nlohmann::json;
    const test::TemporaryDirectory dir;
    const int n = Tokenizer::load(golden + "characters_bpe.model").vocab_size();
    test::write_file(dir / "tokenizer.model", test::read_file(golden + "characters_bpe.model"));
    const auto load = [&](const json& settings, const json& added) {
        test::write_file(dir / "tokenizer_config.json", settings.dump());
        test::write_file(dir / "added_tokens.json", added.dump());
        return Tokenizer::load(dir / "");
    };
    const auto token = [](const char* content, bool special, bool lstrip = false) -> json {
        return {{"content", content}, {"special", special}, {"lstrip", lstrip}, {"normalized", !special}};
    };
    const auto id = [&](int i) { return std::to_string(n + i); };
    const json roles = {{"eos_token", "<|im_end|>"}, {"additional_special_tokens", {{{"content", "<|im_start|>"}}}}};
    json settings = roles;
    settings["added_tokens_decoder"] = {{id(2), token("<think>", false)},
                                        {id(0), token("<|im_end|>", true)},
                                        {id(1), token("<|im_start|>", true)},
                                        {"1", token("<s>", true)}};
    const std::string text = "God <think> said<|im_end|>", plain = "God ";
    std::set<std::string> hashes = {load(json::object(), json::object()).identity().hash};
    for (const Tokenizer& t :
         {load(settings, json::object()), load(roles, {{"<|im_start|>", n + 1}, {"<think>", n + 2}, {"<|im_end|>", n}})}) {
        EXPECT_EQ(t.vocab_size(), n + 3);
        EXPECT_EQ(t.eod_id(), n);
        EXPECT_EQ(t.token_to_id("<|im_start|>"), n + 1);
        EXPECT_EQ(t.count_special(text), 1);
        std::vector<int> expected = t.encode(plain);
        expected.push_back(n + 2);
        const std::vector<int> said = t.encode(" said"), found = encode(t, text, true), as_text = t.encode(text);
        expected.insert(expected.end(), said.begin(), said.end());
        expected.push_back(n);
        EXPECT_EQ(found, expected);
        EXPECT_EQ(std::count(as_text.begin(), as_text.end(), n + 2), 1);
        EXPECT_EQ(std::count(as_text.begin(), as_text.end(), n), 0);
        EXPECT_EQ(t.decode({n + 1, n + 2}), "<|im_start|><think>");
        hashes.insert(t.identity().hash);
    }
    EXPECT_EQ(hashes.size(), 2u);
    settings["added_tokens_decoder"][id(2)] = token("<think>", false, true);
    const Tokenizer strips = load(settings, json::object());
    EXPECT_EQ(strips.encode("God <think>"), strips.encode("God<think>"));
    EXPECT_EQ(hashes.count(strips.identity().hash), 0u);

    settings["added_tokens_decoder"][id(4)] = token("<far>", false);
    test::expect_error([&] { load(settings, json::object()); }, {"'<far>' has the id " + id(4), "without gaps"});
    test::expect_error(
        [&] {
            load({{"added_tokens_decoder", {{"5", token("<new>", true)}}}}, json::object());
        },
        {"the id 5 belongs to two tokens", "'<new>'"});
    test::expect_error([&] { load({{"added_tokens_decoder", {{"x", token("<new>", true)}}}}, json::object()); }, {"<new>"});
    test::expect_error([&] { load({{"added_tokens_decoder", {{id(0), 7}}}}, json::object()); }, {"added tokens", "damaged"});
}

TEST(CharacterTokenizers, AnEndThatIsNoTokenIsTold) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "tokenizer.model", test::read_file(golden + "characters_bpe.model"));
    const auto said = [&](const std::string& eos) {
        test::write_file(dir / "tokenizer_config.json", nlohmann::json{{"eos_token", eos}}.dump());
        const Tokenizer t = Tokenizer::load(dir / "");
        EXPECT_EQ(t.token_bytes(t.eod_id()), "</s>");
        testing::internal::CaptureStderr();
        t.warn_of_missing_end();
        return testing::internal::GetCapturedStderr();
    };
    EXPECT_EQ(said("</s>"), "");
    const std::string note = said("<|im_end|>");
    EXPECT_NE(note.find("the eos_token of " +
                        (dir / "/tokenizer.model is '<|im_end|>', which is not one of its tokens: '</s>' ends documents")),
              std::string::npos)
        << note;
}

// A document read in parts has the tokens of the whole: no space is inserted before later parts.
TEST(CharacterTokenizers, PartsOfADocument) {
    const test::TemporaryDirectory dir;
    const auto values = read_json(golden + "characters.json");
    for (const auto& row : values["rows"]) {
        const bool model = row.contains("model");
        if (!model && row["name"] != "Llama 2" && row["name"] != "Mistral" && row["name"] != "words") continue;
        const Tokenizer tokenizer = model ? Tokenizer::load(golden + row["model"].get<std::string>())
                                          : patched(dir, row["base"].get<std::string>(), row["patch"]);
        const std::string first = "In the beginning", second = "\nand the earth";
        std::vector<int> parts = encode(tokenizer, first, false);
        tokenizer.encode_append(second, parts, false, true);
        EXPECT_EQ(parts, encode(tokenizer, first + second, false)) << row.dump().substr(0, 80);
    }
}

// Any bytes round-trip if bytes have tokens and the model does not normalize.
TEST(CharacterTokenizers, BytesThatAreNotUtf8) {
    const test::TemporaryDirectory dir;
    for (const char* base : {"characters_bpe.json", "characters_unigram.json"}) {
        const Tokenizer tokenizer = patched(
            dir, base, nlohmann::json::parse(R"([{"op": "add", "path": "/decoder", "value": {"type": "ByteFallback"}}])"));
        for (const std::string text : {"\xff", "a\xe3\x81z", "\xed\xa0\x80", "x\xc0\xaf\xe3\x81\x82"})
            EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
    }
}

// The cost is the text's length times the longest piece's, whatever its words.
TEST(CharacterTokenizers, LongRunsTakeLinearTime) {
    const test::TemporaryDirectory dir;
    const auto values = read_json(golden + "characters.json");
    for (const auto& row : values["rows"]) {
        if (row.contains("model") || row["name"].get<std::string>().find("NFK") != std::string::npos) continue;
        if (row["name"] == "steps" || row["name"] == "unigram, Precompiled" || row["name"] == "unigram, unknown tokens")
            continue;
        const Tokenizer tokenizer = patched(dir, row["base"].get<std::string>(), row["patch"]);
        for (const std::string unit : {"a", "th", "x ", "\u3042", "\u0c15"}) {
            std::string text;
            while (text.size() < 200000) text += unit;
            const auto start = std::chrono::steady_clock::now();
            EXPECT_GT(tokenizer.encode(text).size(), 0u);
            EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 5.0);
        }
    }
}

// ---- training ----
nlohmann::ordered_json trained(const std::string& text, int size, int threads) {
    PieceCounts counts;
    TextSteps(nlohmann::json(unigram_pre_tokenizer())).split(text, true, false, [&](std::string_view word) {
        counts[std::string(word)]++;
    });
    UnigramTrainer trainer(counts, threads);
    trainer.train(size - (int)UnigramTrainer::other_tokens({"<|end|>"}), nullptr);
    return trainer.to_json({"<|end|>"});
}

TEST(UnigramTrainer, LearnsTheSameWithAnyNumberOfThreadsAndLoads) {
    const std::string text(MappedFile(golden + "text.txt").text());
    nlohmann::ordered_json json = trained(text, 800, 1);
    EXPECT_EQ(json, trained(text, 800, 3));
    EXPECT_EQ(json["model"]["vocab"].size(), 800u);
    EXPECT_EQ(reserve_tokens(json, 800, 20, 128), 896);
    const test::TemporaryDirectory dir;
    test::write_file(dir / "tokenizer.json", json.dump());
    const Tokenizer tokenizer = Tokenizer::load(dir / "");
    EXPECT_EQ(tokenizer.vocab_size(), 896);
    EXPECT_EQ(tokenizer.token_bytes(0), "<|end|>");
    EXPECT_EQ(tokenizer.token_bytes(1), "<unk>");
    EXPECT_EQ(tokenizer.token_bytes(895), "<|reserved_special_token_95|>");
    EXPECT_TRUE(tokenizer.is_special(895));
    const std::vector<int> tokens = tokenizer.encode(text);
    EXPECT_EQ(tokenizer.decode(tokens), text);
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 1), 0);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("\xff \u0c15\n  x")), "\xff \u0c15\n  x");
    // SentencePiece's model of this text, with 797 pieces, needs 3,867 tokens for its lines.
    EXPECT_LE(tokens.size(), 3867u);
}

// No word occurs twice, but all share a part.
TEST(UnigramTrainer, FindsThePartsThatWordsHaveInCommon) {
    std::string text;
    for (char a = 'p'; a <= 'v'; a++)
        for (char z = 'p'; z <= 'v'; z++) text += std::string(" ") + a + "bcde" + z;
    std::vector<std::string> pieces;
    const auto json = trained(text, 280, 1);
    for (const auto& piece : json["model"]["vocab"]) pieces.push_back(piece[0]);
    for (const char* part : {"\u2581pbcde", "\u2581vbcde", "q"})
        EXPECT_EQ(std::count(pieces.begin(), pieces.end(), part), 1) << part;
    EXPECT_EQ(std::count(pieces.begin(), pieces.end(), "\u2581pbcdeq"), 0);  // the whole word occurs only once
}

// Keeps some thirty of several hundred candidates: the frequent words, and none of the others.
TEST(UnigramTrainer, PrunesWhatIsSeldomUsed) {
    std::mt19937 random(3);
    std::set<std::string> words;
    while (words.size() < 320) {
        std::string word = " ";
        for (int i = 0; i < 7; i++) word += (char)('a' + random() % 10);
        words.insert(word);
    }
    const std::vector<std::string> all(words.begin(), words.end());
    std::string text;
    for (size_t i = 0; i < all.size(); i++)
        for (int n = i % 20 ? 2 : 60; n > 0; n--) text += all[i];  // 16 words are frequent
    for (int n = 0; n < 40; n++)                                   // and so is each character, so any word can be composed
        for (const char c : std::string(" abcdefghij")) text += std::string("\n") + c;
    const auto json = trained(text, 258 + 12 + 16, 2);
    std::set<std::string> pieces;
    for (const auto& piece : json["model"]["vocab"]) pieces.insert(piece[0]);
    EXPECT_EQ(pieces.size(), 258u + 12 + 16);
    for (size_t i = 0; i < all.size(); i++) EXPECT_EQ(pieces.count("\u2581" + all[i].substr(1)), i % 20 == 0) << all[i];
}

TEST(UnigramTrainer, TextsThatTeachNothing) {
    for (const std::string text : {"a", " ", "\n", "\xff", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}) {
        const auto json = trained(text, 300, 1);
        EXPECT_GE(json["model"]["vocab"].size(), 258u);
        EXPECT_LE(json["model"]["vocab"].size(), 300u);
    }
}

// Later parts of a long text have no start to strip.
TEST(CharacterTokenizers, StripOfAPart) {
    const Normalizer strip(nlohmann::json{{"type", "Strip"}});
    EXPECT_EQ(strip.normalize("\n a b ", false), "a b");
    EXPECT_EQ(strip.normalize("\n a b ", true), "\n a b");
}

// ---- refusals ----
void expect_refused(const nlohmann::json& json, const std::string& part) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "tokenizer.json", json.dump());
    test::expect_error([&] { Tokenizer::load(dir / "tokenizer.json"); }, {part, dir / "tokenizer.json"});
}

TEST(CharacterTokenizers, RefuseWhatIsUnknownByName) {
    for (const char* base : {"characters_bpe.json", "characters_unigram.json"}) {
        auto good = read_json(golden + base);
        good["decoder"] = {{"type", "ByteFallback"}};
        const auto with = [&](const char* key, const nlohmann::json& value) {
            auto j = good;
            j[key] = value;
            return j;
        };
        for (const char* type : {"Nmt", "BertNormalizer", "StripAccents", "ByteLevel", "Odd"})
            expect_refused(with("normalizer", {{"type", type}}), type);
        for (const char* type : {"BertPreTokenizer", "UnicodeScripts", "FixedLength", "Odd"})
            expect_refused(with("pre_tokenizer", {{"type", type}}), type);
        for (const char* type : {"WordPiece", "BPEDecoder", "CTC", "Odd"})
            expect_refused(with("decoder", {{"type", type}}), type);
        expect_refused(with("decoder", nullptr), "decoder 'null'");
        expect_refused(with("pre_tokenizer", {{"type", "Metaspace"}, {"prepend_scheme", "often"}}), "often");
        expect_refused(with("normalizer", {{"type", "Replace"}}), "pattern");
        expect_refused(
            with("decoder", {{"type", "Replace"}, {"pattern", {{"String", "e"}}}, {"content", std::string(8 << 20, 'x')}}),
            "makes more than 268435456 bytes");
        auto j = good;
        auto& vocabulary = j["model"]["vocab"];
        if (vocabulary.is_object()) {
            const int id = vocabulary["<0x0A>"];
            vocabulary.erase("<0x0A>");
            vocabulary["zzz"] = id;
        } else {
            for (auto& piece : vocabulary)
                if (piece[0] == "<0x0A>") piece[0] = "zzz";
        }
        expect_refused(j, "<0x0A>");
    }
    auto j = read_json(golden + "characters_unigram.json");
    j["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", false}};
    expect_refused(j, "ByteLevel");
}

TEST(CharacterTokenizers, RefuseHostileUnigramFiles) {
    auto good = read_json(golden + "characters_unigram.json");
    good["decoder"] = {{"type", "ByteFallback"}};
    const auto with = [&](const char* path, const nlohmann::json& value) {
        auto j = good;
        j[nlohmann::json::json_pointer(path)] = value;
        return j;
    };
    const std::string again = good["model"]["vocab"][300][0];
    expect_refused(with("/model/vocab/301/0", again), "listed twice");
    expect_refused(with("/model/vocab/301/0", ""), "empty");
    expect_refused(with("/model/vocab/301/0", std::string(200000, 'x')), "a token has 200000 bytes; at most 4096");
    expect_refused(with("/model/vocab/301/0", 5), "not a valid");
    expect_refused(with("/model/vocab/301/1", "5"), "not a valid");
    expect_refused(with("/model/vocab/301/1", nullptr), "not a valid");
    expect_refused(with("/model/vocab/301", nlohmann::json::array()), "not a valid");
    expect_refused(with("/model/vocab", nlohmann::json::array()), "unk_id");
    for (const nlohmann::json& id :
         {nlohmann::json(nullptr), nlohmann::json(-1), nlohmann::json(2147483648), nlohmann::json("0")})
        expect_refused(with("/model/unk_id", id), "unk_id");
    const test::TemporaryDirectory dir;
    auto folded = good;  // an added token that the normalizer changes into another one
    folded["normalizer"] = {{"type", "Lowercase"}};
    folded["model"]["vocab"][300][0] = "qqq";
    folded["model"]["vocab"][301][0] = "QQQ";
    folded["added_tokens"].push_back({{"id", 301},
                                      {"content", "QQQ"},
                                      {"special", false},
                                      {"normalized", true},
                                      {"single_word", false},
                                      {"lstrip", false},
                                      {"rstrip", false}});
    test::write_file(dir / "tokenizer.json", folded.dump());
    EXPECT_FALSE(Tokenizer::load(dir / "tokenizer.json").encode("aQQQ").empty());
    std::string text = with("/model/vocab/301/1", 12345.5).dump();
    text.replace(text.find("12345.5"), 7, "1e999");
    test::write_file(dir / "tokenizer.json", text);
    test::expect_error([&] { Tokenizer::load(dir / "tokenizer.json"); }, {dir / "tokenizer.json"});
#if HAVE_UTF8PROC
    for (const char* map : {"", "AA", "!!!!", "AAAAAA==", "/////wAAAAA="})
        expect_refused(with("/normalizer", {{"type", "Precompiled"}, {"precompiled_charsmap", map}}), "precompiled_charsmap");
#endif
}

// A piece of a SentencePiece model.
std::string piece(const std::string& text, float score, int kind) {
    std::string bytes = (char)10 + std::string(1, (char)text.size()) + text + (char)21;
    bytes.append((const char*)&score, 4);
    bytes += (char)24;
    bytes += (char)kind;
    return (char)10 + std::string(1, (char)bytes.size()) + bytes;
}

TEST(CharacterTokenizers, RefuseHostileModels) {
    const test::TemporaryDirectory dir;
    const auto refused = [&](const std::string& bytes, const std::string& part) {
        test::write_file(dir / "tokenizer.model", bytes);
        test::expect_error([&] { Tokenizer::load(dir / ""); }, {part, dir / "/tokenizer.model"});
    };
    const std::string unknown = piece("<unk>", 0, 2), a = piece("a", -1, 1);
    test::write_file(dir / "tokenizer.model", unknown + a);
    EXPECT_EQ(Tokenizer::load(dir / "").encode("ab"), (std::vector<int>{0, 1, 0}));  // the space is unknown, too
    refused(unknown + a + a, "listed twice");
    refused(unknown + piece("", 0, 1), "empty");
    refused(unknown + piece("x", NAN, 1), "score");
    refused(unknown + piece("x", -INFINITY, 1), "score");
    refused(unknown + piece("x", 0, 9), "has an unknown kind");
    refused(unknown + piece("<0x41>", 0, 6), "marked as a byte");
    refused(unknown + piece("<u>", 0, 2), "two unknown");
    refused(a, "no unknown token");
    refused(unknown + a + std::string("\x12\x02\x18\x03"), "WORD");
    refused(unknown + a + std::string("\x12\x03\xc0\x01\x01", 5), "treat_whitespace_as_suffix");
    refused(unknown + a + std::string("\x12\x03\x98\x02\x01", 5), "byte_fallback");
    refused(unknown + a + std::string("\x1a\x06\x12\x04\xff\xff\xff\xff"), "precompiled_charsmap");
    refused(unknown + a + std::string("\x12\x02\x1a\x01"), "damaged");
    refused(unknown + a + std::string("\x0b"), "damaged");
    refused(unknown + a + std::string(12, '\xff'), "damaged");
    const std::string whole = std::string(MappedFile(golden + "characters_unigram.model").text());
    int survived = 0;
    for (size_t n = 1; n < whole.size(); n += 397) {
        test::write_file(dir / "tokenizer.model", whole.substr(0, n));
        try {
            Tokenizer::load(dir / "");
            survived++;
        } catch (const Error&) {
        }
    }
    EXPECT_LE(survived, 4);  // cut between two fields after the pieces
}

}  // namespace test_character_tokenizers
