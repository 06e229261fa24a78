// From text to tokens: cutting long documents changes no token, threads change nothing, and a failed run leaves no files.
// For documents themselves see test_documents.cpp.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <random>
#include <thread>

#include "../llmc/commands/text_commands.h"
#include "files.h"

namespace test_text_commands {

const std::string golden = "test/golden/tokenizer/";

using Texts = std::vector<std::string>;

// Words, numbers, punctuation, Japanese, with blank lines or without any line breaks, `bytes` long.
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
        DocumentReader reader({{file}});
        std::vector<int> tokens;
        Chunk chunk;
        int parts = 0;
        while (reader.next(chunk)) {
            tokenizer.encode_append(chunk.text, tokens);
            parts++;
        }
        EXPECT_GE(parts, 4);
        EXPECT_TRUE(chunk.ends_document);
        EXPECT_TRUE(tokens == tokenizer.encode(text)) << name;
    }
}

PrepareOptions preparation(const std::string& input, const std::string& prefix) {
    PrepareOptions o;
    o.input = {input};
    o.output_prefix = prefix;
    o.tokenizer = golden + "gpt2.json";
    o.workers = 1;
    return o;
}
// Its output.
std::string prepared(const PrepareOptions& o) {
    return test::output_of([&] { EXPECT_EQ(prepare(o, nullptr), 0); });
}
std::string prepared(const std::string& input, const std::string& prefix, int threads, const std::string& split) {
    PrepareOptions o = preparation(input, prefix);
    o.workers = threads;
    o.split_documents = split;
    return prepared(o);
}
Texts texts(const std::string& prefix) {
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    const TokenDataset data = TokenDataset::open(prefix);
    Texts found;
    for (int64_t d = 0; d < data.n_documents(); d++) {
        std::vector<int> tokens((size_t)data.length(d));
        data.read(d, 0, data.length(d), tokens.data());
        if (tokens.back() == tokenizer.eod_id()) tokens.pop_back();
        found.push_back(tokenizer.decode(tokens));
    }
    return found;
}

TEST(Prepare, WritesTheDocumentsWithTheirEnds) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "one two\n\nthree\n");
    prepared(dir / "a.txt", dir / "data/out", 1, "blank");
    EXPECT_EQ((std::set<std::string>{"out.bin", "out.idx", "out.meta.json"}), [&] {
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

// A run that fails in its last file, or is killed, resumes after its last written document: the same bytes as from one run.
TEST(Prepare, ResumesWhereItStopped) {
    const test::TemporaryDirectory dir;
    std::vector<std::string> files;
    for (const std::string name : {"a", "b", "c"}) {
        std::string lines;
        for (int i = 0; i < 200; i++) lines += "{\"text\": \"document " + name + std::to_string(i) + " <|endoftext|>\"}\n";
        files.push_back(dir / (name + ".jsonl"));
        test::write_file(files.back(), lines);
    }
    PrepareOptions o = preparation("", dir / "whole");
    o.input = files;
    prepared(o);
    o.output_prefix = dir / "out";
    o.resume = true;
    const std::string whole = test::read_file(files[2]);
    test::write_file(files[2], "[" + whole.substr(0, whole.find('\n') + 1) + ",");  // truncated after its first document
    test::expect_error([&] { prepared(o); }, {"c.jsonl", "cut off"});
    EXPECT_EQ((std::set<std::string>{"a.jsonl", "b.jsonl", "c.jsonl", "out.bin.partial", "out.idx.partial", "out.resume.json",
                                     "whole.bin", "whole.idx", "whole.meta.json"}),
              dir.names());
    const std::string state = test::read_file(dir / "out.resume.json");
    EXPECT_EQ(nlohmann::json::parse(state)["at"], (nlohmann::json{2, 1}));
    // An impossible resume is refused, and the files are kept.
    const auto refuses = [&](const PrepareOptions& other, const std::string& part) {
        test::expect_error([&] { prepared(other); }, {"out.resume.json", part, "HINT"});
    };
    PrepareOptions other = o;
    other.no_append_eod = true;
    refuses(other, "other options");
    other = o;
    other.input.pop_back();
    refuses(other, "other input files");
    other = o;
    other.tokenizer = golden + "llama3.json";
    refuses(other, "other tokenizer");
    test::write_file(dir / "out.resume.json", "{}");
    refuses(o, "unknown content");
    test::write_file(dir / "out.resume.json", state);
    const std::string first = test::read_file(files[0]);
    const auto modified = std::filesystem::last_write_time(files[0]);
    test::write_file(files[0], first + "\n");
    refuses(o, "input files that have changed");
    std::string same_length = first;
    same_length.replace(first.find("a0"), 2, "a1");
    test::write_file(files[0], same_length);
    refuses(o, "input files that have changed");
    test::write_file(files[0], first);
    std::filesystem::last_write_time(files[0], modified);
    test::write_file(files[2], whole.substr(whole.find('\n') + 1));  // a line before the resume position is gone
    test::expect_error([&] { prepared(o); }, {"c.jsonl has changed since", "HINT"});
    test::write_file(files[2], "");  // nothing is left at the resume position
    test::expect_error([&] { prepared(o); }, {"c.jsonl has changed since", "HINT"});
    EXPECT_EQ(nlohmann::json::parse(test::read_file(dir / "out.resume.json"))["at"], (nlohmann::json{2, 1}));
    // A killed run has written more than its state records.
    test::write_file(dir / "out.bin.partial", test::read_file(dir / "out.bin.partial") + "more");
    test::write_file(files[2], whole);
    o.max_bad_lines = "5";  // another limit is no reason to start over
    const std::string said = prepared(o);
    EXPECT_NE(said.find("resuming after 401 documents"), std::string::npos) << said;
    EXPECT_NE(said.find("600 places"), std::string::npos) << said;
    for (const char* end : {".bin", ".idx", ".meta.json"})
        EXPECT_TRUE(test::read_file(dir / "out" + end) == test::read_file(dir / "whole" + end)) << end;
    EXPECT_EQ(dir.names().count("out.resume.json") + dir.names().count("out.bin.partial"), 0u);
    test::write_file(dir / "out.resume.json", state);
    test::expect_error([&] { prepared(o); }, {"has fewer than"});  // of a later run, whose files are gone
    for (const char* part : {"out.bin.partial", "out.idx.partial"}) std::filesystem::remove(dir / part);
    // Killed before this file was removed.
    std::filesystem::last_write_time(dir / "out.resume.json",
                                     std::filesystem::last_write_time(dir / "out.idx") - std::chrono::seconds(1));
    EXPECT_NE(prepared(o).find("complete already"), std::string::npos);
    EXPECT_TRUE(test::read_file(dir / "out.bin") == test::read_file(dir / "whole.bin"));
    EXPECT_EQ(dir.names().count("out.resume.json") + dir.names().count("out.bin.partial"), 0u);
}

// Its output in the folder that it reads is not input, for later runs either.
TEST(Prepare, DoesNotReadItsOwnFiles) {
    const test::TemporaryDirectory dir;
    std::filesystem::create_directory(dir / "in");
    test::write_file(dir / "in/a.jsonl", "[{\"text\": \"one\"},");
    PrepareOptions o = preparation(dir / "in", dir / "in/out");
    o.resume = true;
    test::expect_error([&] { prepared(o); }, {"a.jsonl", "cut off"});
    test::write_file(dir / "in/a.jsonl", "[{\"text\": \"one\"},{\"text\": \"two\"}]");
    EXPECT_NE(prepared(o).find("resuming after 1 document"), std::string::npos);
    o.resume = false;
    for (const char* input : {"in", "in/*"}) {
        o.input = {dir / input};
        prepared(o);
        EXPECT_EQ(texts(dir / "in/out"), (Texts{"one", "two"})) << input;
    }
    const auto here = std::filesystem::current_path();
    const std::string tokenizer = std::filesystem::absolute(o.tokenizer);
    std::filesystem::current_path(dir / "in");
    o.tokenizer = tokenizer;
    o.input = {"."};
    o.output_prefix = "out";
    prepared(o);
    std::filesystem::current_path(here);
    o.output_prefix = dir / "in/out";
    EXPECT_EQ(texts(dir / "in/out"), (Texts{"one", "two"}));
    o.input = {dir / "in/out.*"};
    test::expect_error([&] { prepared(o); }, {"files of the data that are written"});
    test::write_file(dir / "in/out2.bin", "three");  // only its name starts with the prefix
    o.input = {dir / "in"};
    prepared(o);
    EXPECT_EQ(texts(dir / "in/out"), (Texts{"one", "two", "three"}));
}

// A pair of answers that was half written when a run failed is not part of the resume position.
TEST(Prepare, GoesOnBehindWholePairs) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.jsonl", "{\"prompt\": \"ask\", \"chosen\": \"yes\", \"rejected\": \"no\"}\n");
    DocumentReader reader({{dir / "a.jsonl"}});
    PrepareCounts counts;
    PrepareState state(preparation("", dir / "out"), "hash", {}, reader, counts);
    TokenDatasetWriter writer(dir / "out", {"", "", 300}, state.kept());
    const std::vector<int> tokens = {1, 2, 3};
    const auto add = [&] {
        writer.add(tokens.data(), tokens.size());
        writer.end_document();
    };
    Chunk chunk;
    reader.next(chunk);
    add();
    add();
    state.done(chunk, writer);
    add();  // a chosen answer without its rejected one
    state.save(writer);
    const auto kept = nlohmann::json::parse(test::read_file(dir / "out.resume.json"))["kept"];
    EXPECT_EQ((nlohmann::json{kept[0], kept[1], kept[2], kept[4]}), (nlohmann::json{2, 6, 12, 34 + 4 * 2}));
}

// Bad lines are counted as in one run: here all of them are after the position where the first run stopped.
TEST(Prepare, JudgesAResumedFileAsAWhole) {
    const test::TemporaryDirectory dir;
    std::string lines;
    for (int i = 0; i < 300; i++) lines += i < 298 ? "{\"text\": \"document " + std::to_string(i) + "\"}\n" : "{\n";
    PrepareOptions o = preparation(dir / "a.jsonl", dir / "out");
    o.resume = true;
    size_t cut = 0;
    for (int i = 0; i < 290; i++) cut = lines.find('\n', cut) + 1;
    std::string array = "[" + lines.substr(0, cut);
    for (size_t at = 0; (at = array.find("}\n", at)) != std::string::npos;) array.replace(at, 2, "},");
    test::write_file(dir / "a.jsonl", array);  // the same documents, truncated after the 290th
    test::expect_error([&] { prepared(o); }, {"a.jsonl", "cut off"});
    EXPECT_EQ(nlohmann::json::parse(test::read_file(dir / "out.resume.json"))["at"], (nlohmann::json{0, 290}));
    test::write_file(dir / "a.jsonl", lines);
    const std::string said = prepared(o);
    EXPECT_NE(said.find("2 lines were left out"), std::string::npos) << said;
    EXPECT_EQ(TokenDataset::open(dir / "out").n_documents(), 298);
}

// The end-of-document token is named outside tokenizer.json, whose hash stays the same.
TEST(Prepare, ResumesWithTheSameEndOfDocuments) {
    const test::TemporaryDirectory dir;
    std::filesystem::create_directory(dir / "tok");
    nlohmann::json two_ends = nlohmann::json::parse(test::read_file(golden + "gpt2.json")), end = two_ends["added_tokens"][0];
    end["id"] = two_ends["model"]["vocab"].size();
    end["content"] = "<end>";
    two_ends["added_tokens"].push_back(end);
    test::write_file(dir / "tok/tokenizer.json", two_ends.dump());
    test::write_file(dir / "tok/tokenizer_config.json", "{\"eos_token\": \"<|endoftext|>\"}");
    test::write_file(dir / "a.jsonl", "[{\"text\": \"one\"},");
    PrepareOptions o = preparation(dir / "a.jsonl", dir / "out");
    o.tokenizer = dir / "tok";
    o.resume = true;
    test::expect_error([&] { prepared(o); }, {"a.jsonl", "cut off"});
    test::write_file(dir / "tok/tokenizer_config.json", "{\"eos_token\": \"<end>\"}");
    test::expect_error([&] { prepared(o); }, {"out.resume.json", "other end of documents", "HINT"});
}

// Another program's .idx (such as a film's subtitles) is not removed.
TEST(Prepare, LeavesAnIndexOfOthersAlone) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "one");
    test::write_file(dir / "film.idx", "# VobSub index file");
    test::expect_error([&] { prepared(dir / "a.txt", dir / "film", 1, "file"); }, {"film.idx is not an index", "HINT"});
    EXPECT_EQ(dir.names(), (std::set<std::string>{"a.txt", "film.idx"}));
}

// Nor are Megatron's data files replaced, which do not record their tokenizer.
TEST(Prepare, LeavesDataOfOthersAlone) {
    const test::TemporaryDirectory dir;
    const std::vector<int> tokens = {1, 2, 3};
    TokenDatasetWriter others(dir / "data", 300);
    others.add(tokens.data(), tokens.size());
    others.end_document();
    others.commit();
    const std::string before = test::read_file(dir / "data.idx") + test::read_file(dir / "data.bin");
    test::write_file(dir / "a.txt", "one");
    test::expect_error([&] { prepared(dir / "a.txt", dir / "data", 1, "file"); },
                       {"data.idx has no", "data.meta.json", "HINT"});
    EXPECT_EQ(test::read_file(dir / "data.idx") + test::read_file(dir / "data.bin"), before);
    EXPECT_EQ(dir.names(), (std::set<std::string>{"a.txt", "data.bin", "data.idx"}));
}

// Independent of the file's formatting; and every change of the tokens changes it.
TEST(TokenizerHash, IsOfWhatMattersForTokens) {
    const auto file = [](const std::string& name) { return nlohmann::json::parse(test::read_file(golden + name + ".json")); };
    std::set<std::string> hashes;
    for (const std::string name : {"gpt2", "llama3", "bloom"}) {
        const nlohmann::json j = file(name);
        const std::string hash = tokenizer_hash(j);
        EXPECT_EQ(hash.size(), 16u);
        EXPECT_EQ(hash, Tokenizer::load(golden + name + ".json").identity().hash);
        EXPECT_TRUE(hashes.insert(hash).second);
        const auto changed = [&](const std::function<void(nlohmann::json&)>& change) {
            nlohmann::json other = j;
            change(other);
            return tokenizer_hash(other);
        };
        const auto as_pairs = [](nlohmann::json& o) {
            for (auto& merge : o["model"]["merges"]) {
                if (!merge.is_string()) continue;
                const std::string text = merge;
                merge = {text.substr(0, text.find(' ', 1)), text.substr(text.find(' ', 1) + 1)};
            }
        };
        const auto as_texts = [](nlohmann::json& o) {
            for (auto& merge : o["model"]["merges"])
                if (merge.is_array()) merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
        };
        EXPECT_EQ(hash, changed(as_pairs));
        EXPECT_EQ(hash, changed(as_texts));
        EXPECT_EQ(hash, changed([](auto& o) {
                      o["version"] = "9";
                      o["padding"] = "x";
                      o["post_processor"] = nullptr;
                      o["decoder"] = nullptr;
                      o["model"]["fuse_unk"] = false;
                      o["model"]["dropout"] = nullptr;
                      o["normalizer"] = {{"type", "Sequence"}, {"normalizers", nlohmann::json::array()}};
                      o["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {o["pre_tokenizer"]}}};
                      for (auto& t : o["added_tokens"]) {
                          t.erase("rstrip");
                          t.erase("normalized");
                      }
                  }));
        const std::vector<std::string> others = {
            changed([](auto& o) { std::swap(o["model"]["merges"][0], o["model"]["merges"][1]); }),
            changed([](auto& o) { o["model"]["merges"].erase(5); }),
            changed([](auto& o) { std::swap(o["model"]["vocab"]["a"], o["model"]["vocab"]["b"]); }),
            changed([](auto& o) { o["model"]["ignore_merges"] = !o["model"].value("ignore_merges", false); }),
            changed([](auto& o) { o["added_tokens"][0]["special"] = false; }),
            changed([](auto& o) {
                o["pre_tokenizer"] = {{"type", "Digits"}, {"individual_digits", true}};
            }),
            changed([](auto& o) {
                o["normalizer"] = {{"type", "NFC"}};
            }),
        };
        EXPECT_EQ(std::set<std::string>(others.begin(), others.end()).size(), others.size());
        EXPECT_EQ(std::count(others.begin(), others.end(), hash), 0);
    }
}

// For Metaspace, old files have add_prefix_space where new ones have prepend_scheme and split.
TEST(TokenizerHash, IsTheSameForBothSpellingsOfMetaspace) {
    auto j = nlohmann::json::parse(test::read_file(golden + "characters_unigram.json"));
    const auto hash = [&](const nlohmann::json& settings) {
        j["pre_tokenizer"] = {{"type", "Metaspace"}};
        j["pre_tokenizer"].update(settings);
        return tokenizer_hash(j);
    };
    const auto written = [&](const char* scheme, bool split) {
        return hash({{"replacement", "\u2581"}, {"prepend_scheme", scheme}, {"split", split}});
    };
    const std::string always = written("always", true), never = written("never", true);
    EXPECT_EQ(always, "f0205dedfa23d6f5");  // for the new format; must never change
    EXPECT_EQ(hash({{"replacement", "\u2581"}, {"str_rep", "\u2581"}, {"add_prefix_space", true}}), always);
    EXPECT_EQ(hash({{"replacement", "\u2581"}, {"add_prefix_space", true}, {"prepend_scheme", "always"}}), always);
    EXPECT_EQ(hash(nlohmann::json::object()), always);
    EXPECT_EQ(hash({{"replacement", "\u2581"}, {"add_prefix_space", false}}), never);
    EXPECT_EQ(
        (std::set<std::string>{always, never, written("first", true), written("always", false), hash({{"replacement", "_"}})})
            .size(),
        5u);
}

TEST(Prepare, SaysWhichTokenizerMadeTheData) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "some text\n");
    prepared(preparation(dir / "a.txt", dir / "out"));
    const TokenizerIdentity made = TokenDataset::open(dir / "out").tokenizer();
    const Tokenizer tokenizer = Tokenizer::load(golden + "gpt2.json");
    EXPECT_EQ(made.hash, tokenizer.identity().hash);
    EXPECT_EQ(made.vocab_size, tokenizer.vocab_size());
    EXPECT_EQ(made.path, std::filesystem::absolute(golden + "gpt2.json").string());
}

// eval --text adds the template's tokens before a document, but prepared data have none.
TEST(Prepare, SaysThatDocumentsAreWithoutTheTemplatesTokens) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "some text\n");
    PrepareOptions o = preparation(dir / "a.txt", dir / "out");
    EXPECT_EQ(prepared(o).find("before a text"), std::string::npos);
    auto j = nlohmann::json::parse(test::read_file(golden + "gpt2.json"));
    j["post_processor"] = {{"type", "TemplateProcessing"},
                           {"single", {{{"SpecialToken", {{"id", "<|endoftext|>"}}}}, {{"Sequence", {{"id", "A"}}}}}},
                           {"special_tokens", {{"<|endoftext|>", {{"ids", {0}}}}}}};
    test::write_file(dir / "tokenizer.json", j.dump());
    o.tokenizer = dir / "tokenizer.json";
    const std::string said = prepared(o);
    EXPECT_NE(said.find("note: the tokenizer adds '<|endoftext|>' before a text, as do prompts and eval --text; documents "
                        "are stored without it"),
              std::string::npos)
        << said;
    EXPECT_EQ(said.find("before a text", said.find("before a text") + 1), std::string::npos);
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

TEST(Prepare, SaysWhatIsOddInTheTextAndRefusesMuchOfIt) {
    const test::TemporaryDirectory dir;
    const std::string odd("a\0b\0 \xff caf\xc3\xa9 \xe3\x81", 15);  // 5 odd bytes
    const auto with = [&](size_t more) {
        test::write_file(dir / "a.txt", std::string(more, 'x') + odd);
        return preparation(dir / "a.txt", dir / "out");
    };
    const std::string said = prepared(with(1000 - odd.size()));
    EXPECT_NE(said.find("2 NUL bytes and 3 bytes that are not UTF-8"), std::string::npos) << said;
    test::expect_error([&] { prepared(with(998 - odd.size())); },
                       {"a.txt", "998 bytes", "2 are NUL and 3", "iconv", "--allow-binary"});
    PrepareOptions any = with(0);
    any.allow_binary = true;
    prepared(any);
    EXPECT_EQ(texts(dir / "out"), Texts{odd});

    // A long stream is judged after a megabyte; the rest would have made the fraction small.
    test::write_file(dir / "a.txt", std::string(10000, '\xff') + std::string(1 << 20, 'x') + "\n" + std::string(4 << 20, 'x'));
    test::expect_error([&] { prepared(preparation(dir / "a.txt", dir / "out")); }, {"10,000 are not valid UTF-8"});
    // Each file is judged separately.
    test::write_file(dir / "b.txt", std::string(4 << 20, 'x'));
    test::write_file(dir / "a.txt", odd);
    PrepareOptions two = preparation(dir / "b.txt", dir / "out");
    two.input.push_back(dir / "a.txt");
    test::expect_error([&] { prepared(two); }, {"a.txt is not UTF-8 text"});
}

TEST(Prepare, ALineThatCannotBeUsedIsLeftOutCountedAndShown) {
    const test::TemporaryDirectory dir;
    const std::string good = "{\"text\": \"fine\"}\n",
                      bad[] = {"{\"text\": \"\\ud800\"}\n", "broken\n", "{\"id\": 7}\n", "{\"text\": \"\xff\"}\n", "[1]\n"};
    for (const std::string& line : bad) {
        test::write_file(dir / "a.jsonl", good + line + good);
        const std::string said = prepared(preparation(dir / "a.jsonl", dir / "out"));
        EXPECT_NE(said.find("1 line was left out"), std::string::npos) << said;
        EXPECT_NE(said.find("a.jsonl:2: "), std::string::npos) << said;
        EXPECT_EQ(texts(dir / "out"), (Texts{"fine", "fine"}));
        PrepareOptions strict = preparation(dir / "a.jsonl", dir / "out");
        strict.on_bad_line = "fail";
        test::expect_error([&] { prepared(strict); }, {"a.jsonl:2: ", "--on-bad-line skip"});
    }
    const auto with = [&](int n_good, int n_bad) {
        std::string lines;
        for (int i = 0; i < std::max(n_good, n_bad); i++) lines += (i < n_good ? good : "") + (i < n_bad ? bad[1] : "");
        test::write_file(dir / "a.jsonl", lines);
        return preparation(dir / "a.jsonl", dir / "out");
    };
    const auto limited = [&](PrepareOptions o, const std::string& most) {
        o.max_bad_lines = most;
        return o;
    };
    prepared(with(198, 2));
    test::expect_error([&] { prepared(with(197, 2)); }, {"2 of 199 lines", "1%"});
    prepared(limited(with(197, 2), "2"));
    test::expect_error([&] { prepared(limited(with(1000, 3), "2")); }, {"3 of 6 lines", "--max-bad-lines 2"});
    test::expect_error([&] { prepared(with(0, 1)); }, {"1 of 1 line of ", "a.jsonl:1: it is not valid JSON: at column 1: "});
    prepared(limited(with(3, 3), "50%"));
    test::expect_error([&] { prepared(limited(with(99, 1), "0%")); }, {"1 of 100 lines"});
    test::expect_error([&] { prepared(with(1000, 500)); }, {"100 of 200 lines"});  // no need to read further
    for (const char* malformed : {"", "x", "-1", "101%", "1%%", "3 lines", "nan"})
        test::expect_error([&] { prepared(limited(with(1, 0), malformed)); }, {"--max-bad-lines"});
    const std::string said = prepared(limited(with(100, 8), "10%"));
    EXPECT_NE(said.find("8 lines were left out"), std::string::npos) << said;
    EXPECT_NE(said.find("and 3 more"), std::string::npos) << said;
}

TEST(Prepare, ReadsPipes) {
    const test::TemporaryDirectory dir;
    const std::string pipe = dir / "pipe", line = "{\"text\": \"one\"}\n";
    ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
    for (const std::string& text : {line + line, std::string("some text\n")}) {
        std::thread writer([&] { test::write_file(pipe, text); });
        const std::string said = prepared(preparation(pipe, dir / "out"));
        writer.join();
        const size_t bytes = text == "some text\n" ? text.size() : 6;  // of text, without JSON's braces
        const double per_token = (double)bytes / (double)TokenDataset::open(dir / "out").n_tokens();
        EXPECT_NE(said.find(format("%.3f bytes per token", per_token)), std::string::npos) << said;
        EXPECT_EQ(texts(dir / "out"), text == "some text\n" ? Texts{text} : (Texts{"one", "one"}));
    }
}

TEST(Prepare, AFailureLeavesWhatWasThere) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "good.txt", "fine\n");
    test::write_file(dir / "bad.jsonl", "{\"text\": 1}\n{broken\n");
    prepared(dir / "good.txt", dir / "out", 1, "file");
    const std::string before = test::read_file(dir / "out.bin");
    test::expect_error([&] { prepared(dir / "bad.jsonl", dir / "out", 1, "file"); }, {"bad.jsonl:2"});
    EXPECT_EQ(test::read_file(dir / "out.bin"), before);
    EXPECT_EQ(dir.names(), (std::set<std::string>{"bad.jsonl", "good.txt", "out.bin", "out.idx", "out.meta.json"}));
}

TEST(Prepare, APatternThatTakesTooLongIsRefusedWithTheDocument) {
    const test::TemporaryDirectory dir;
    auto j = nlohmann::json::parse(test::read_file(golden + "llama3.json"));
    j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+b|.";
    test::write_file(dir / "tokenizer.json", j.dump());
    const std::string good = "{\"text\": \"fine\"}\n", bad = "{\"text\": \"" + std::string(1000, 'a') + "\"}\n";
    test::write_file(dir / "a.jsonl", good + good + bad);
    test::write_file(dir / "a.txt", "fine\n\n\n" + std::string(1000, 'a'));
    for (const std::string& where : {dir / "a.jsonl:3: ", dir / "a.txt:4: "}) {
        PrepareOptions o;
        o.input = {where.substr(0, where.rfind(':', where.size() - 3))};
        o.output_prefix = dir / "out";
        o.tokenizer = dir / "tokenizer.json";
        o.split_documents = "blank";
        test::expect_error([&] { prepare(o, nullptr); }, {where + (dir / "tokenizer.json") + ": ", "(a+)+b|."});
    }
}

TEST(TokenizerCommand, RefusesWhatCannotWork) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "some words to learn from, some words to learn from\n");
    TokenizerOptions o;
    o.input = {dir / "a.txt"};
    o.output = dir / "tok";
    o.vocab_size = 270;
    testing::internal::CaptureStdout();
    EXPECT_EQ(tokenizer_command(o, nullptr), 0);
    testing::internal::GetCapturedStdout();
    EXPECT_EQ(Tokenizer::load(dir / "tok").vocab_size(), 270);
    const auto refused = [&](const std::function<void(TokenizerOptions&)>& change, const std::string& part) {
        TokenizerOptions bad = o;
        change(bad);
        test::expect_error([&] { tokenizer_command(bad, nullptr); }, {part});
    };
    refused([](auto& b) { b.output = ""; }, "--output");
    refused([](auto& b) { b.vocab_size = 257; }, "257");
    refused([](auto& b) { b.special_tokens = {"<a>", "<a>"}; }, "<a>");
    refused([](auto& b) { b.special_tokens = {"<a>", "x"}; }, "'x'");
    refused([](auto& b) { b.special_tokens = {""}; }, "special");
    refused([&](auto& b) { b.output = dir / "a.txt"; }, "a.txt");
    refused(
        [](auto& b) {
            b.type = "unigram";
            b.pre_tokenizer = "llama3";
        },
        "--pre-tokenizer");
    refused(
        [](auto& b) {
            b.type = "unigram";
            b.min_frequency = 3;
        },
        "--min-frequency");
    refused(
        [](auto& b) {
            b.type = "unigram";
            b.vocab_size = 258;
        },
        "258");
}

TEST(TokenizerCommand, ReservesTokensAndMeasuresEachFile) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.txt", "some words to learn from, some words to learn from\n");
    test::write_file(dir / "b.txt", "other words\n");
    for (const char* type : {"bpe", "unigram"}) {
        TokenizerOptions o;
        o.input = {dir / "a.txt", dir / "b.txt"};
        o.output = dir / type;
        o.type = type;
        o.vocab_size = 280;
        o.reserved_tokens = 20;
        o.pad_vocab_to_multiple = 64;
        testing::internal::CaptureStdout();
        EXPECT_EQ(tokenizer_command(o, nullptr), 0);
        const std::string said = testing::internal::GetCapturedStdout();
        for (const std::string& part :
             {"tokens per word; " + (dir / "a.txt"), "tokens per word; " + (dir / "b.txt"), std::string("320 tokens")})
            EXPECT_NE(said.find(part), std::string::npos) << said;
        const Tokenizer tokenizer = Tokenizer::load(dir / type);
        EXPECT_EQ(tokenizer.vocab_size(), 320);
        EXPECT_TRUE(tokenizer.is_special(319));
        EXPECT_EQ(tokenizer.token_bytes(319).compare(0, 11, "<|reserved_"), 0);
        EXPECT_EQ(tokenizer.eod_id(), 0);
        EXPECT_EQ(tokenizer.decode(tokenizer.encode("some other words\n")), "some other words\n");
    }
}

TEST(TokenizerCommand, ListsTheFilesThatFitWorstIfThereAreMany) {
    const test::TemporaryDirectory dir;
    TokenizerOptions o;
    for (int i = 0; i < 30; i++) {
        o.input.push_back(dir / ("words" + std::to_string(i) + ".txt"));
        test::write_file(o.input.back(), i == 7 ? "\x01\x02\x03\x04\x05\x06\n" : "some words to learn from\n");
    }
    o.output = dir / "tok";
    o.vocab_size = 280;
    testing::internal::CaptureStdout();
    EXPECT_EQ(tokenizer_command(o, nullptr), 0);
    const std::string said = testing::internal::GetCapturedStdout();
    EXPECT_NE(said.find("the 20 of 30 files with the fewest bytes per token:\n  1.000 bytes per token"), std::string::npos)
        << said;
    EXPECT_LT(said.find("words7.txt"), said.find("words0.txt"));
    EXPECT_EQ(said.find("words20.txt"), std::string::npos);
    EXPECT_NE(said.find("280 tokens; "), std::string::npos);
}

}  // namespace test_text_commands
