// From text to tokens: how files become documents, that long documents are cut without changing a token, that threads change
// nothing, and that a failed run leaves nothing behind.
#include <gtest/gtest.h>

#include <random>

#include "../llmc/text_commands.h"
#include "files.h"

namespace {

const std::string golden = "test/golden/tokenizer/";

std::vector<std::string> documents(const std::string& file, const std::string& split, const std::string& key = "text") {
    DocumentReader reader({file}, key, split);
    std::vector<std::string> found;
    std::string text;
    Chunk chunk;
    while (reader.next(chunk)) {
        text += chunk.text;
        if (chunk.ends_document) found.push_back(text), text.clear();
    }
    EXPECT_EQ(reader.bytes_read(), (int64_t)std::filesystem::file_size(file));
    return found;
}

using Texts = std::vector<std::string>;

TEST(DocumentReader, SplitsAText) {
    const test::TemporaryDirectory dir;
    const std::string file = dir / "a.txt", text = "\n\none\ntwo\r\n\n \t\nthree\n\n\n\nfour";
    test::write_file(file, text);
    EXPECT_EQ(documents(file, "file"), Texts{text});
    EXPECT_EQ(documents(file, "blank"), (Texts{"one\ntwo", "three", "four"}));
    EXPECT_EQ(documents(file, "line"), (Texts{"one", "two", "three", "four"}));
    test::write_file(file, "");
    EXPECT_EQ(documents(file, "file"), Texts{});
    test::write_file(file, "\n\n \n");
    EXPECT_EQ(documents(file, "blank"), Texts{});
    test::write_file(file, std::string("a\0b\nc\xff\n", 7));
    EXPECT_EQ(documents(file, "line"), (Texts{std::string("a\0b", 3), "c\xff"}));
}

TEST(DocumentReader, ReadsJsonLines) {
    const test::TemporaryDirectory dir;
    const std::string file = dir / "a.jsonl";
    test::write_file(file,
                     "{\"text\": \"one\\ntwo \\u3042\", \"id\": 1}\n\n{\"id\": 2, \"text\": \"\"}\n{\"text\": \"three\"}");
    EXPECT_EQ(documents(file, "file"), (Texts{"one\ntwo あ", "three"}));
    test::write_file(file, "{\"text\": \"fine\"}\n{\"text\": 3}\n");
    test::expect_error([&] { documents(file, "file"); }, {file + ":2", "not a text"});
    test::write_file(file, "{\"text\": \"fine\"}\n{\"text\": \n");
    test::expect_error([&] { documents(file, "file"); }, {file + ":2", "JSON"});
    test::expect_error([&] { documents(file, "file", "body"); }, {file + ":1", "body", "--json-keys"});
    test::expect_error([&] { DocumentReader({dir / "none.txt"}, "text", "file"); }, {"none.txt"});
    test::expect_error([&] { DocumentReader({}, "text", "file"); }, {"--input"});
}

// Words, numbers, punctuation, Japanese, blank lines and no lines at all, `bytes` long.
std::string mixed_text(size_t bytes, unsigned seed, bool lines) {
    std::mt19937 random(seed);
    const char* const pieces[] = {"the", " king", " 1234", " x", "言葉", "。",     "!?",
                                  " ",   "  ",    "don't", "\t", ".",    "Zürich", " over"};
    std::string text;
    while (text.size() < bytes) {
        text += pieces[random() % 14];
        if (lines && random() % 12 == 0) text += random() % 4 ? "\n" : "\n\n  ";
    }
    return text;
}

TEST(DocumentReader, CuttingALongDocumentChangesNoToken) {
    const test::TemporaryDirectory dir;
    const std::string file = dir / "long.txt", text = mixed_text(5 << 20, 1, true);
    test::write_file(file, text);
    for (const char* name : {"gpt2", "llama3", "bloom"}) {
        const Tokenizer tokenizer = Tokenizer::load(golden + name + ".json");
        DocumentReader reader({file}, "text", "file");
        std::vector<int> tokens;
        Chunk chunk;
        int parts = 0;
        while (reader.next(chunk)) tokenizer.encode_append(chunk.text, tokens), parts++;
        EXPECT_GE(parts, 4);
        EXPECT_TRUE(chunk.ends_document);
        EXPECT_TRUE(tokens == tokenizer.encode(text)) << name;
    }
}

TEST(DocumentReader, TextWithoutLinesIsWhole) {
    const test::TemporaryDirectory dir;
    const std::string file = dir / "long.txt", text = mixed_text(3 << 20, 2, false);
    test::write_file(file, text);
    EXPECT_EQ(documents(file, "file"), Texts{text});
}

std::string prepared(const std::string& input, const std::string& prefix, int threads, const std::string& split) {
    PrepareOptions o;
    o.input = {input}, o.output_prefix = prefix, o.tokenizer = golden + "gpt2.json", o.workers = threads,
    o.split_documents = split;
    testing::internal::CaptureStdout();
    EXPECT_EQ(prepare_command(o), 0);
    return testing::internal::GetCapturedStdout();
}

TEST(Prepare, WritesTheDocumentsWithTheirEnds) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "one two\n\nthree\n");
    prepared(dir / "a.txt", dir / "data/out", 1, "blank");
    EXPECT_EQ((std::set<std::string>{"out.bin", "out.idx"}), [&] {
        std::set<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(dir / "data")) names.insert(entry.path().filename());
        return names;
    }());
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    const TokenDataset data = TokenDataset::open(dir / "data/out");
    ASSERT_EQ(data.n_documents(), 2);
    for (int d = 0; d < 2; d++) {
        std::vector<int> expected = tokenizer.encode(d ? "three" : "one two"), found((size_t)data.length(d));
        expected.push_back(tokenizer.eod_id());
        data.read(d, 0, data.length(d), found.data());
        EXPECT_EQ(found, expected);
    }
}

TEST(Prepare, ThreadsChangeNothing) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", mixed_text(1 << 20, 3, true));
    for (const char* split : {"file", "blank", "line"}) {
        prepared(dir / "a.txt", dir / "one", 1, split);
        prepared(dir / "a.txt", dir / "three", 3, split);
        EXPECT_TRUE(test::read_file(dir / "one.bin") == test::read_file(dir / "three.bin")) << split;
        EXPECT_TRUE(test::read_file(dir / "one.idx") == test::read_file(dir / "three.idx")) << split;
    }
}

TEST(Prepare, SaysWhatIsOddInTheText) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", std::string("a\0b\0 \xff caf\xc3\xa9 \xe3\x81", 15));
    const std::string output = prepared(dir / "a.txt", dir / "out", 1, "file");
    EXPECT_NE(output.find("2 NUL bytes and 3 bytes that are not UTF-8"), std::string::npos) << output;
}

TEST(Prepare, AFailureLeavesWhatWasThere) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "good.txt", "fine\n"), test::write_file(dir / "bad.jsonl", "{\"text\": \"fine\"}\n{broken\n");
    prepared(dir / "good.txt", dir / "out", 1, "file");
    const std::string before = test::read_file(dir / "out.bin");
    test::expect_error([&] { prepared(dir / "bad.jsonl", dir / "out", 1, "file"); }, {"bad.jsonl:2"});
    testing::internal::GetCapturedStdout();
    EXPECT_EQ(test::read_file(dir / "out.bin"), before);
    EXPECT_EQ(dir.names(), (std::set<std::string>{"bad.jsonl", "good.txt", "out.bin", "out.idx"}));
}

TEST(Prepare, APatternThatTakesTooLongIsRefusedWithTheDocument) {
    const test::TemporaryDirectory dir;
    auto j = nlohmann::json::parse(test::read_file(golden + "llama3.json"));
    j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+b|.";
    test::write_file(dir / "tokenizer.json", j.dump());
    const std::string good = "{\"text\": \"fine\"}\n", bad = "{\"text\": \"" + std::string(1000, 'a') + "\"}\n";
    test::write_file(dir / "a.jsonl", good + good + bad),
        test::write_file(dir / "a.txt", "fine\n\n\n" + std::string(1000, 'a'));
    for (const std::string& where : {dir / "a.jsonl:3: ", dir / "a.txt:4: "}) {
        PrepareOptions o;
        o.input = {where.substr(0, where.rfind(':', where.size() - 3))}, o.output_prefix = dir / "out";
        o.tokenizer = dir / "tokenizer.json", o.split_documents = "blank";
        test::expect_error([&] { prepare_command(o); }, {where + (dir / "tokenizer.json") + ": ", "(a+)+b|."});
    }
}

TEST(TokenizerCommand, RefusesWhatCannotWork) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "some words to learn from, some words to learn from\n");
    TokenizerOptions o;
    o.input = {dir / "a.txt"}, o.output = dir / "tok", o.vocab_size = 270;
    testing::internal::CaptureStdout();
    EXPECT_EQ(tokenizer_command(o), 0);
    testing::internal::GetCapturedStdout();
    EXPECT_EQ(Tokenizer::load(dir / "tok").vocab_size(), 270);
    const auto refused = [&](const std::function<void(TokenizerOptions&)>& change, const std::string& part) {
        TokenizerOptions bad = o;
        change(bad);
        test::expect_error([&] { tokenizer_command(bad); }, {part});
    };
    refused([](auto& b) { b.output = ""; }, "--output");
    refused([](auto& b) { b.vocab_size = 257; }, "257");
    refused([](auto& b) { b.special_tokens = {"<a>", "<a>"}; }, "<a>");
    refused([](auto& b) { b.special_tokens = {"<a>", "x"}; }, "'x'");
    refused([](auto& b) { b.special_tokens = {""}; }, "special");
    refused([&](auto& b) { b.output = dir / "a.txt"; }, "a.txt");
}

}  // namespace
