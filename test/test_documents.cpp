// How files become documents: detecting formats, splitting, compression, folders and patterns; and that written files can
// be read back.
#include <gtest/gtest.h>

#include <random>

#include "../llmc/text/document_reader.h"
#include "../llmc/text/document_writer.h"
#include "files.h"

namespace test_documents {

std::vector<std::string> documents(const std::string& file, const std::string& split, const std::string& key = "text") {
    TextInput input;
    input.files = {file};
    input.json_key = key;
    input.split = split;
    input.allow_binary = true;
    DocumentReader reader(input);
    InputJudge judge(input);
    std::vector<std::string> found;
    std::string text;
    Chunk chunk;
    while (reader.next(chunk)) {
        open_chunk(chunk, input);
        if (!judge.take(chunk)) continue;
        text += chunk.text;
        if (chunk.ends_document) {
            found.push_back(text);
            text.clear();
        }
    }
    judge.end_file();
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
    test::write_file(file, "{\"text\": 3}\n\n{\"text\": \n");
    test::expect_error([&] { documents(file, "file"); }, {file + ":1", "not a string", file + ":3", "JSON"});
    test::expect_error([&] { documents(file, "file", "body"); }, {file + ":1", "body", "--json-keys"});
    test::expect_error([&] { DocumentReader({{dir / "none.txt"}}); }, {"none.txt"});
    test::expect_error([&] { DocumentReader reader(TextInput{}); }, {"--input"});
}

// ---- file formats -----------------------------------------------------------------------------------------------------------
TEST(TextFormat, OtherFormatsAreRefusedByNameWithTheCommandThatHelps) {
    const test::TemporaryDirectory dir;
    const auto utf16 = [](const std::string& text, bool little) {
        std::string wide;
        for (const char c : text) wide += little ? std::string{c, '\0'} : std::string{'\0', c};
        return wide;
    };
    const std::string nul(1, '\0'), tar(257, 'x');
    const std::vector<std::array<std::string, 3>> table = {
        {"BZh91AY&SY", "bzip2", "bzcat FILE |"},
        {"\xfd"
         "7zXZ" +
             nul,
         "xz-", "xzcat FILE |"},
        {"\x04\x22\x4d\x18", "lz4", "lz4cat FILE |"},
        {"PK\x03\x04", "zip", "unzip -p FILE |"},
        {tar + "ustar", "tar", "tar -xOf FILE |"},
        {"%PDF-1.7", "PDF", "pdftotext FILE - |"},
        {"{\\rtf1", "RTF", "unrtf --text FILE |"},
        {"\xff\xfe" + utf16("a text", true), "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE |"},
        {"\xfe\xff" + utf16("a text", false), "UTF-16", "iconv -f UTF-16 -t UTF-8 FILE |"},
        {utf16("a text", true), "UTF-16", "iconv -f UTF-16LE"},
        {utf16("a text", false), "UTF-16", "iconv -f UTF-16BE"},
        {std::string("MMIDIDX\0\0", 9), "prepared data", "--data-path"},
        {"\x89PNG\r\n", "PNG", "text or JSON lines"},
    };
    for (const auto& [bytes, name, hint] : table) {
        const std::string file = dir / "a file.txt", quoted = "'" + file + "'";
        test::write_file(file, bytes);
        std::string expected = hint;
        if (const size_t at = expected.find("FILE"); at != std::string::npos) expected.replace(at, 4, quoted);
        test::expect_error([&] { DocumentReader({{file}}); }, {file, name, expected});
        TextInput any;
        any.files = {file};
        any.allow_binary = true;
        DocumentReader reader(any);
    }
    for (const std::string fine : {"BZh is how it begins", "BZh", "7z", "PK", "a\nb", "%PDF"}) {
        test::write_file(dir / "a.txt", fine);
        EXPECT_EQ(documents(dir / "a.txt", "file"), Texts{fine});
    }
    for (const std::string end : {"BZh", "BZh9", "\xff\xff\xff\xff"}) EXPECT_EQ(find_signature(end), nullptr);
}

TEST(TextFormat, JsonLinesByNameOrBeginning) {
    const test::TemporaryDirectory dir;
    const std::string line = "{\"text\": \"one\"}\n";
    for (const char* name : {"a.jsonl", "a.JSONL", "a.ndjson", "a.json", "a.txt", "a"}) {
        for (const char* before : {"", "\n \n", "\xef\xbb\xbf"}) {
            test::write_file(dir / name, before + line + line);
            EXPECT_EQ(documents(dir / name, "file"), (Texts{"one", "one"})) << name;
        }
    }
    test::write_file(dir / "a.txt", "\xef\xbb\xbfone\ntwo\n");
    EXPECT_EQ(documents(dir / "a.txt", "line"), (Texts{"one", "two"})) << "a byte order mark is no part of a text";
    for (const std::string text : {"{one} two\n", "{\n  \"text\": 1\n}\n", "[1] a note\n", " "}) {
        test::write_file(dir / "a.txt", text);
        EXPECT_EQ(documents(dir / "a.txt", "file"), Texts{text});
    }
    const auto refused = [&](const std::string& name, const std::string& text, const std::string& part) {
        test::write_file(dir / name, text);
        test::expect_error([&] { documents(dir / name, "file"); }, {name, part});
    };
    refused("a.txt", "{'text': 'one'}\n", "a.txt:1: it is not valid JSON");
    refused("a.txt", "{\"id\": 1, \"body\": \"one\"}\n", "its keys are body, id");
    TextInput input;
    test::write_file(dir / "a.jsonl", line);
    input.files = {dir / "a.jsonl"};
    input.format = "text";
    DocumentReader reader(input);
    Chunk chunk;
    ASSERT_TRUE(reader.next(chunk));
    EXPECT_EQ(chunk.text, line);
}

// Eight ASCII bytes at a time or not: the same counts.
TEST(OddBytes, AreCountedWhereverTheyStand) {
    for (const std::string& odd : {std::string(1, '\0'), std::string("\xff"), std::string("\xe3\x81"), std::string("\x01"),
                                   std::string("\x7f"), std::string("あ"), std::string("\x80")})
        for (size_t at = 0; at < 20; at++)
            for (size_t after = 0; after < 20; after++) {
                const OddBytes found = count_odd_bytes(std::string(at, 'a') + odd + std::string(after, '\n'));
                EXPECT_EQ(found.bytes, (int64_t)(at + odd.size() + after));
                EXPECT_EQ(found.nul, odd[0] == 0);
                EXPECT_EQ(found.invalid, odd == "\xff" || odd == "\x80" ? 1 : odd == "\xe3\x81" ? 2 : 0);
            }
}

// ---- JSON that is not one object per line -----------------------------------------------------------------------------------
TEST(JsonValues, ArraysAndObjectsOverSeveralLines) {
    const test::TemporaryDirectory dir;
    const std::string one = "{\"text\": \"one, [\\\" ]}\"}", two = "{\n  \"id\": [1, {\"a\": \"}\"}],\n  \"text\": \"two\"\n}";
    const Texts both = {"one, [\" ]}", "two"};
    const std::string separate = "\xef\xbb\xbf[" + one + " ,\n" + two + "\n]\n";
    for (const std::string& text : {"[" + one + "," + two + "]", "\n[\n" + one + ",\n\n" + two + "]\n\n", separate}) {
        test::write_file(dir / "a.json", text);
        EXPECT_EQ(documents(dir / "a.json", "file"), both) << text;
    }
    for (const std::string& text : {two + "\n" + one, "\n" + two + one + "\n", two + " \n\n" + one}) {
        test::write_file(dir / "a.json", text);
        Texts expected = both;
        std::swap(expected[0], expected[1]);
        EXPECT_EQ(documents(dir / "a.json", "file"), expected) << text;
    }
    test::write_file(dir / "a.txt", "[ {\"text\": \"one\"}]");  // the start suffices
    EXPECT_EQ(documents(dir / "a.txt", "file"), Texts{"one"});
    test::write_file(dir / "a.json", "[]");
    EXPECT_EQ(documents(dir / "a.json", "file"), Texts{});
    const std::vector<std::array<std::string, 2>> table = {
        {"[{\"text\": \"one\"},\n{\"text\": \"two\"}\n", "a.json:3: the file is cut off"},
        {"[{\"text\": \"one\"},\n{\"text\": \"two", "a.json:2: the file ends within a value"},
        {"[{\"text\": \"one\"}{\"text\": \"two\"}]", "without a comma"},
        {"[{\"text\": \"one\"},]", "a comma after its last value"},
        {"[{\"text\": \"one\"}] x", "continues after its array"},
        {"[1, \"two\", null\n, [3]]", "a.json:1: it is not a JSON object but number"},
        {"{\n\"text\": \"one\"", "a.json:1: it is not valid JSON"},
    };
    for (const auto& [text, part] : table) {
        test::write_file(dir / "a.json", text);
        test::expect_error([&] { documents(dir / "a.json", "file"); }, {part});
    }
}

// ---- one key of a line ----
// Whatever the scan accepts, nlohmann::json accepts with the same text; and the scan accepts common corpora.
TEST(JsonScan, AgreesWithTheParser) {
    const Texts usual = {
        R"({"text": "one"})",
        R"( { "id" : 12 , "text":"a \"quoted\" \\ \/ \b\f\n\r\t é 日本 \u3042\ud83d\ude00 and more than sixteen bytes", )"
        R"("meta": null } )",
        R"({"meta":{"a":[1,-2.5,0,[],{}],"b":{"text":"not this"}},"t":[true,false,null,"x\u0000"],"text":"","z":[{"q":[[]]}]})",
        "{\"text\":\"\"}\r\n",
    };
    for (const std::string& line : usual) {
        std::string text;
        EXPECT_TRUE(JsonScan::find(line, "text", text)) << line;
        EXPECT_EQ(text, nlohmann::json::parse(line)["text"].get<std::string>()) << line;
    }
    const std::string bytes = "{}[]\",:\\u0d8eE+-.tn 1\x01\x7f\x80\xc3\xa9\xff\n";
    std::mt19937 random(1);
    int accepted = 0;
    for (int round = 0; round < 60000; round++) {
        std::string line = usual[random() % usual.size()];
        for (unsigned n = random() % 3 + 1; n > 0 && !line.empty(); n--) {
            const size_t at = random() % line.size();
            const char byte = bytes[random() % bytes.size()];
            if (random() % 3 == 0) line.erase(at, random() % 4);
            else if (random() % 2) line.insert(at, 1, byte);
            else line[at] = byte;
        }
        std::string text;
        if (!JsonScan::find(line, "text", text)) continue;
        accepted++;
        const auto j = nlohmann::json::parse(line, nullptr, false);
        ASSERT_TRUE(j.is_object()) << line;
        ASSERT_EQ(text, j["text"].get<std::string>()) << line;
    }
    EXPECT_GT(accepted, 5000);
    std::string none;
    for (const char* left : {R"({"text":"a","text":"b"})", R"({"text":1})", R"({"a":"text"})", "[]", ""})
        EXPECT_FALSE(JsonScan::find(left, "text", none)) << left;
}

// Fields next to the text are copied unchanged, in time linear in their length.
TEST(JsonScan, KeepsFieldsAsTheyAreWritten) {
    const test::TemporaryDirectory dir;
    std::string many = R"({"text":"t")", nested = R"({"text":"t","x":)";
    for (int i = 0; i < 100000; i++) many += ",\"k" + std::to_string(i) + "\":0";
    for (int i = 0; i < 1000000; i++) nested += '[';
    const std::string deep = nested + std::string(1000000, ']') + "}";
    struct Row {
        std::string line, expected;
    };
    const std::vector<Row> rows = {
        {R"({"id":12345678901234567890123,"text":"t","f":0.1000000000000000055511,"e":1E5,"z":-0,)"
         R"("k":1,"k":2,"a":[1, {"b":"\u00e9"}]})",
         R"({"text":"t","id":12345678901234567890123,"f":0.1000000000000000055511,"e":1E5,"z":-0,)"
         R"("k":1,"k":2,"a":[1, {"b":"\u00e9"}]})"},
        {R"({"te\u0078t":"t","a\"b":1})", R"({"text":"t","a\"b":1})"},
        {R"({"content":"t","text":"its title"})", R"({"text":"t","other_text":"its title"})"},
        {many + "}", many + "}"},
        {deep, "it is nested more than 60 levels deep"},
        {R"({"text":"t","n":1e400})", "it is not valid JSON: number overflow parsing '1e400'"},
    };
    for (const auto& [line, expected] : rows) {
        TextInput input;
        input.files = {dir / "a.jsonl"};
        input.keep_fields = true;
        input.json_key = line.rfind(R"({"content)", 0) == 0 ? "content" : "text";
        Chunk chunk;
        chunk.holds = Chunk::json;
        chunk.text = line;
        open_chunk(chunk, input);
        if (!chunk.problem.empty()) {
            EXPECT_EQ(chunk.problem, expected);
            continue;
        }
        DocumentWriter writer(dir / "out.jsonl");
        writer.write(document_line(chunk.text, chunk.fields));
        writer.finish();
        EXPECT_EQ(test::read_file(dir / "out.jsonl"), expected + "\n");
    }
    TextInput input;  // values over several lines
    input.files = {dir / "a.json"};
    input.keep_fields = true;
    test::write_file(input.files[0], "[\n {\n  \"text\": \"t\",\n  \"a\": {\r\n   \"b\": [1,\n2]}\n }\n]\n");
    DocumentReader reader(input);
    Chunk chunk;
    ASSERT_TRUE(reader.next(chunk));
    open_chunk(chunk, input);
    EXPECT_EQ(chunk.fields.object(), R"({"a":{   "b": [1,2]}})");
}

// A long text without a newline is not cut within a character.
TEST(DocumentReader, PartsAreOfWholeCharacters) {
    const test::TemporaryDirectory dir;
    TextInput input;
    input.files = {dir / "a.txt"};
    std::string text = "a";
    for (int i = 0; i < 6 << 20; i++) text += "\u65e5";
    test::write_file(input.files[0], text);
    DocumentReader reader(input);
    Chunk chunk;
    int parts = 0;
    std::string all;
    for (; reader.next(chunk); parts++) {
        EXPECT_EQ(whole_characters(chunk.text), chunk.text.size());
        all += chunk.text;
    }
    EXPECT_EQ(parts, 2);
    EXPECT_TRUE(all == text);
}

// Every byte at each of eight positions, and random texts of escaped, invalid and other characters.
TEST(Json, AppendedStringsAreThoseOfTheLibrary) {
    const auto check = [](const std::string& text) {
        std::string ours = "[";
        append_json_string(ours, text);
        ASSERT_EQ(ours, "[" + json_text(nlohmann::json(text)));
    };
    for (size_t length = 0; length < 20; length++)
        for (size_t at = 0; at < length; at++)
            for (int byte = 0; byte < 256; byte++) {
                std::string text(length, 'x');
                text[at] = (char)byte;
                check(text);
            }
    std::mt19937 random(3);
    const Texts parts = {
        "\"",   "\\", "\n",       "\x1f",         "\x7f", std::string(1, 0), "word ",           "longer text without", "é",
        "日本", "😀",  "\xc0\xaf", "\xed\xa0\x80", "\xff", "\xe3\x81",        "\xf4\x90\x80\x80"};
    for (int round = 0; round < 20000; round++) {
        std::string text;
        for (size_t n = random() % 12; n > 0; n--) text += parts[random() % (round % 2 ? parts.size() : 11)];
        check(text);
    }
}

// ---- compression -----------------------------------------------------------------------------------------------------------
void write_documents(const std::string& path, const Texts& texts) {
    DocumentWriter writer(path);
    for (size_t i = 0; i < texts.size(); i++) {
        JsonFields fields;
        fields.set("id", i);
        writer.write(document_line(texts[i], fields));
    }
    EXPECT_FALSE(std::filesystem::exists(path));
    writer.finish();
}

std::vector<std::string> endings() {
    return {
        ".jsonl",
#ifdef HAVE_ZLIB
        ".jsonl.gz",
#endif
#ifdef HAVE_ZSTD
        ".jsonl.zst",
#endif
    };
}

TEST(Compression, WhatIsWrittenReadsBack) {
    const test::TemporaryDirectory dir;
    Texts texts = {"one", "two\nlines \"quoted\"", "日本", std::string(3 << 20, 'x')};
    for (int i = 0; i < 5000; i++) texts.push_back("document " + std::to_string(i * 7919));
    for (const std::string& ending : endings()) {
        const std::string file = dir / ("a" + ending);
        write_documents(file, texts);
        EXPECT_TRUE(documents(file, "file") == texts) << ending;
        // Concatenated members and frames; the file's name does not matter.
        const std::string bytes = test::read_file(file);
        Texts twice = texts;
        twice.insert(twice.end(), texts.begin(), texts.end());
        test::write_file(dir / "b.jsonl", bytes + bytes);
        EXPECT_TRUE(documents(dir / "b.jsonl", "file") == twice) << ending;
        EXPECT_EQ(bytes, (write_documents(dir / ("c" + ending), texts), test::read_file(dir / ("c" + ending))));
        std::filesystem::remove(dir / ("c" + ending));
    }
    { DocumentWriter unfinished(dir / "none.jsonl"); }
    EXPECT_EQ(dir.names().count("none.jsonl"), 0u);
    EXPECT_EQ(dir.names().size(), endings().size() + 1);
}

TEST(Compression, FieldsAreKept) {
    const test::TemporaryDirectory dir;
    TextInput input;
    input.files = {dir / "a.jsonl"};
    input.keep_fields = true;
    write_documents(input.files[0], {"one"});
    DocumentReader reader(input);
    Chunk chunk;
    ASSERT_TRUE(reader.next(chunk));
    open_chunk(chunk, reader.input());
    EXPECT_EQ(chunk.text, "one");
    EXPECT_EQ(chunk.fields.object(), R"({"id":0})");
}

// Cut anywhere, or with a byte changed: an error that names the file and the position, never silently other documents.
TEST(Compression, DamagedFilesAreRefused) {
    const test::TemporaryDirectory dir;
    Texts texts;
    for (int i = 0; i < 300; i++) texts.push_back("a document with the number " + std::to_string(i * 104729 % 7919));
    for (const std::string& ending : endings()) {
        if (ending == ".jsonl") continue;
        write_documents(dir / ("a" + ending), texts);
        const std::string whole = test::read_file(dir / ("a" + ending)), file = dir / "b.jsonl";
        for (size_t cut = 5; cut < whole.size(); cut += cut < 40 || cut + 40 > whole.size() ? 1 : 97) {
            std::filesystem::remove(file);
            test::write_file(file, whole.substr(0, cut));
            test::expect_error([&] { documents(file, "file"); }, {file, "cut off"});
            test::write_file(file, whole + whole.substr(0, cut));
            test::expect_error([&] { documents(file, "file"); }, {file, " 2, which starts at byte", "cut off"});
        }
        for (size_t at = whole.size() / 4; at < whole.size(); at += 53) {
            std::string other = whole;
            other[at] ^= 0x20;
            std::filesystem::remove(file);
            test::write_file(file, other);
            test::expect_error([&] { documents(file, "file"); }, {file, "HINT"});
        }
        test::write_file(file, whole + "and more");
        test::expect_error([&] { documents(file, "file"); }, {file, ending == ".jsonl.gz" ? "other data follow" : "damaged"});
    }
}

// A small file that expands to a gigabyte: no more of a line is kept than the limit.
TEST(Compression, ALineLongerThanTheLimitIsLeftOut) {
    const test::TemporaryDirectory dir;
    const std::string file = dir / ("a" + endings().back());
    write_documents(file, {"one", std::string(most_document_bytes + (1 << 20), 'x'), "three"});
    TextInput input;
    input.files = {file};
    DocumentReader reader(input);
    Chunk chunk;
    for (const char* problem : {"", "longer than 64 MiB", ""}) {
        ASSERT_TRUE(reader.next(chunk));
        EXPECT_LE(chunk.text.capacity(), 2 * most_document_bytes);
        EXPECT_NE(chunk.problem.find(problem), std::string::npos) << chunk.problem;
    }
    EXPECT_FALSE(reader.next(chunk));
}

// ---- folders and patterns ---------------------------------------------------------------------------------------------------
TEST(InputFiles, FoldersAndPatternsInOrder) {
    const test::TemporaryDirectory dir;
    std::filesystem::create_directories(dir / "d/b/.git");
    std::filesystem::create_directories(dir / "empty");
    for (const char* name : {"d/c.txt", "d/a.txt", "d/b/x\ny.txt", "d/.hidden", "d/b/.git/config", "[1].txt"})
        test::write_file(dir / name, name);
    const auto read = [&](const Strings& files) {
        TextInput input;
        for (const std::string& file : files) input.files.push_back(dir / file);
        DocumentReader reader(input);
        Texts texts;
        Chunk chunk;
        while (reader.next(chunk)) texts.push_back(chunk.text);
        return std::make_pair(texts, reader.notes());
    };
    EXPECT_EQ(read({"d"}).first, (Texts{"d/a.txt", "d/b/x\ny.txt", "d/c.txt"}));
    EXPECT_EQ(read({"d"}).second, Strings{"note: skipped in folders: 2 hidden files or folders"});
    EXPECT_EQ(read({"d/*.txt"}).first, (Texts{"d/a.txt", "d/c.txt"}));
    EXPECT_EQ(read({"d/c.txt", "[1].txt", "d/?"}).first, (Texts{"d/c.txt", "[1].txt", "d/b/x\ny.txt"}));
    test::expect_error([&] { read({"empty"}); }, {"empty", "holds no file"});
    test::expect_error([&] { read({"d/*.none"}); }, {"d/*.none", "none matches"});
    test::write_file(dir / "empty/a.png", "\x89PNG\r\n");
    test::expect_error([&] { read({"empty"}); }, {"holds no text", "a.png (a PNG image)"});
    std::filesystem::rename(dir / "empty/a.png", dir / "d/a.png");
    EXPECT_EQ(read({"d"}).first, (Texts{"d/a.txt", "d/b/x\ny.txt", "d/c.txt"}));
    EXPECT_NE(read({"d"}).second.back().find("a.png (a PNG image)"), std::string::npos);
}

// Each file of a folder is read or counted, or the folder is refused: no file is ignored silently.
TEST(InputFiles, FoldersAreReadAsAWhole) {
    const test::TemporaryDirectory dir;
    std::filesystem::permissions(dir / "", std::filesystem::perms(0755));
    for (const char* folder : {"d/a", "d/b", "d/c"}) std::filesystem::create_directories(dir / folder);
    for (const char* name : {"d/a/x.txt", "d/b/x.txt", "d/c/x.txt", "d/c/part-0.jsonl.tmp.123", "d/c/my.tmp.file"})
        test::write_file(dir / name, name);
    std::filesystem::create_symlink(dir / "d/a/x.txt", dir / "d/link.txt");
    std::filesystem::create_symlink(dir / "nowhere", dir / "d/dangling.txt");
    std::filesystem::create_directory_symlink(dir / "d/a", dir / "d/linked");
    ASSERT_EQ(mkfifo((dir / "d/pipe").c_str(), 0644), 0);
    LeftOut left_out;
    EXPECT_EQ(input_files({dir / "d"}, left_out).size(), 5u);
    EXPECT_EQ(in_words(left_out), "1 link to a folder, 1 link to nothing, 1 pipe or device, 1 unfinished file");
    testing::internal::CaptureStderr();
    EXPECT_EQ(input_files({dir / "d", dir / "d/../d/b/*.txt"}, left_out).size(), 6u);
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find("2 files will be read more than once, "), std::string::npos) << said;
    std::filesystem::permissions(dir / "d/b", std::filesystem::perms::none);
    const bool is_root = geteuid() == 0;
    if (is_root) {
        ASSERT_EQ(seteuid(65534), 0);
    }
    test::expect_error([&] { input_files({dir / "d"}, left_out); }, {"cannot read folder", "denied"});
    if (is_root) {
        ASSERT_EQ(seteuid(0), 0);
    }
    std::filesystem::permissions(dir / "d/b", std::filesystem::perms(0755));
}

// Small files, here of 30 bytes, must not need as much memory as large ones, as a batch has many.
TEST(InputFiles, SmallFilesTakeLittleMemory) {
    const test::TemporaryDirectory dir;
    TextInput input;
    for (int i = 0; i < 20; i++) {
        input.files.push_back(dir / format("%02d.txt", i));
        test::write_file(input.files.back(), "a document of thirty bytes ...");
    }
    DocumentReader reader(input);
    Chunk chunk;
    for (size_t i = 0; i < input.files.size(); i++) {
        ASSERT_TRUE(reader.next(chunk));
        EXPECT_LT(chunk.text.capacity(), 100u);
        EXPECT_LT(chunk.bytes(), sizeof(Chunk) + 100);
        chunk = {};
    }
}

// More files than the read-ahead: their order is kept.
TEST(InputFiles, ReadAheadKeepsTheOrder) {
    const test::TemporaryDirectory dir;
    TextInput input;
    Texts expected;
    for (int i = 0; i < 12; i++) {
        Texts texts;
        for (int k = 0; k < (i % 3 == 1 ? 1 : 3000); k++)
            texts.push_back(std::to_string(i) + " " + std::string(900, 'a') + std::to_string(k));
        input.files.push_back(dir / (std::to_string(i) + endings()[i % endings().size()]));
        write_documents(input.files.back(), texts);
        expected.insert(expected.end(), texts.begin(), texts.end());
    }
    DocumentReader reader(input);
    Texts found;
    Chunk chunk;
    while (reader.next(chunk)) {
        open_chunk(chunk, reader.input());
        found.push_back(chunk.text);
        EXPECT_EQ(std::to_string(chunk.file), chunk.text.substr(0, chunk.text.find(' ')));
    }
    EXPECT_TRUE(found == expected);
    EXPECT_EQ(reader.bytes_read(), reader.total_bytes());
    DocumentReader half(input);  // ends while threads read
    ASSERT_TRUE(half.next(chunk));
}

// ---- Parquet ----------------------------------------------------------------------------------------------------------------
// Written by pyarrow: dev/interop/test_formats.py, which also compares many more.
const std::string parquet_folder = "test/golden/parquet/";
std::vector<std::string> parquet_files() {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(parquet_folder)) files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
    return files;
}
// Its chunks, open for reading.
std::vector<Chunk> chunks(const TextInput& input) {
    DocumentReader reader(input);
    std::vector<Chunk> found;
    Chunk chunk;
    while (reader.next(chunk)) {
        open_chunk(chunk, reader.input());
        found.push_back(chunk);
    }
    return found;
}

TEST(Parquet, EveryEncodingGivesTheTextsAndFields) {
    ASSERT_EQ(parquet_files().size(), 6u);
    for (const std::string& file : parquet_files()) {
        TextInput input;
        input.files = {file};
        input.keep_fields = true;
        const std::vector<Chunk> found = chunks(input);
        ASSERT_EQ(found.size(), 60u) << file;
        for (int i = 0; i < 60; i++) {
            const Chunk& c = found[(size_t)i];
            std::string text;
            for (int k = 0; k < i % 4 + 1; k++) text += format("document %d, Größe, 日本\n", i % 9);
            const bool is_null = i % 7 == 3, is_empty = i % 7 == 5;
            EXPECT_EQ(c.text, is_null || is_empty ? "" : text) << file << " " << i;
            EXPECT_EQ(c.left_out, is_null ? "rows whose text is null" : is_empty ? "empty documents" : "") << file << " " << i;
            EXPECT_EQ(c.line, i + 1);
            const nlohmann::ordered_json year = i % 5 ? nlohmann::ordered_json(2000 + i % 7) : nullptr;
            const nlohmann::ordered_json fields = {{"id", i},      {"score", i / 4.0},         {"good", i % 3 == 0},
                                                   {"year", year}, {"hash", (1ull << 63) + i}, {"crc", UINT32_MAX - i}};
            EXPECT_EQ(nlohmann::ordered_json::parse(c.fields.object()), fields) << file << " " << i;
        }
    }
}

TEST(Parquet, WhatIsNotAColumnOfTextsIsRefusedByName) {
    const std::vector<std::array<std::string, 2>> table = {
        {"id", "column 'id' of " + parquet_folder},
        {"id", "is INT64"},
        {"tags", "is nested"},
        {"meta", "is nested"},
        {"none", "has no column 'none'; its columns are id, text, score, good, tags, meta, year, hash, crc, price"}};
    for (const auto& [column, part] : table) {
        TextInput input;
        input.files = {parquet_files()[0]};
        input.json_key = column;
        test::expect_error([&] { DocumentReader reader(input); }, {part, "--json-keys"});
    }
}

// Lists of messages, as pyarrow writes them: with a dictionary, in two row groups; in pages v2 of a few rows.
TEST(Parquet, ListsOfMessages) {
    for (const char* name : {"messages", "messages_v2"}) {
        TextInput input;
        input.files = {std::string("test/golden/parquet_lists/") + name + ".parquet"};
        std::vector<nlohmann::json> records;
        input.open_record = [&](const nlohmann::json& record, Chunk&) { records.push_back(record); };
        ASSERT_EQ(chunks(input).size(), 39u) << name;
        const auto message = [](const char* role, const nlohmann::json& content) {
            return nlohmann::json{{"role", role}, {"content", content}};
        };
        using List = std::vector<nlohmann::json>;
        EXPECT_EQ(records[0]["messages"], nlohmann::json(List{message("user", "a\n\nb"), message("assistant", "c")}));
        EXPECT_EQ(records[1]["messages"],
                  nlohmann::json(List{message("system", "s"), message("user", "Größe"), message("assistant", "日本")}));
        EXPECT_EQ(records[2]["messages"], nlohmann::json::array());
        EXPECT_EQ(records[3]["messages"], nullptr);
        EXPECT_EQ(records[4]["messages"], nlohmann::json(List{message("user", nullptr), message("assistant", "x")}));
        for (int i = 6; i < 40; i++) {
            List list;
            for (int k = 0; k < 1 + i % 3; k++) {
                list.push_back(message("user", format("q%d", i)));
                list.push_back(message("assistant", format("a%d", i)));
            }
            EXPECT_EQ(records[(size_t)i - 1]["messages"], nlohmann::json(list)) << name << i;
            EXPECT_EQ(records[(size_t)i - 1]["id"], i);
        }
    }
}

// A column of lists that belongs to a conversation and cannot be read is refused, not left out.
TEST(Parquet, ListsOfConversationsAreRefused) {
    TextInput input;
    input.open_record = [](const nlohmann::json&, Chunk&) {};
    test::expect_error([&] { ParquetDocuments("test/golden/parquet_lists/history.parquet", input); },
                       {"'history'", "lists", "JSON", "HINT"});
}

// Cut anywhere, or with any byte changed: the same texts, or an error that names the file, but never a crash.
TEST(Parquet, DamagedFilesAreRefused) {
    const test::TemporaryDirectory dir;
    TextInput input;
    input.files = {dir / "a.parquet"};
    const auto read_all = [&] {
        ParquetDocuments documents(input.files[0], input);
        Chunk chunk;
        while (documents.next(chunk)) chunk = {};
    };
    for (const std::string& file : parquet_files()) {
        const std::string whole = test::read_file(file);
        for (size_t cut = 4; cut < whole.size(); cut += 53) {
            std::filesystem::remove(input.files[0]);
            test::write_file(input.files[0], whole.substr(0, cut));
            test::expect_error([&] { read_all(); }, {input.files[0], "cut off"});
        }
        int refused = 0;
        for (size_t at = 4; at < whole.size(); at += 3) {
            std::string other = whole;
            other[at] = (char)(other[at] ^ (1 << at % 8));
            std::filesystem::remove(input.files[0]);  // overwriting a file would flush it to disk
            test::write_file(input.files[0], other);
            try {
                read_all();
            } catch (const Error& e) {
                EXPECT_NE(std::string(e.what()).find(input.files[0]), std::string::npos) << e.what();
                refused++;
            }
        }
        EXPECT_GT(refused, 50) << file;
    }
    for (const char* text : {"PAR1", "PAR1PAR1", "PAR1\xff\xff\xff\x7fPAR1"}) {
        test::write_file(input.files[0], text);
        test::expect_error([&] { read_all(); }, {input.files[0], "Parquet", "HINT"});
    }
}

// ---- web archives -----------------------------------------------------------------------------------------------------------
std::string record(const std::string& type, const std::string& content_type, const std::string& body) {
    return "WARC/1.0\r\nWARC-Type: " + type + "\r\nWARC-Target-URI: http://a.example/\r\nWARC-Date: 2024-01-01T00:00:00Z\r\n" +
           "Content-Type: " + content_type + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body +
           "\r\n\r\n";
}
std::string response(const std::string& headers, const std::string& page) {
    return record("response", "application/http; msgtype=response", "HTTP/1.1 200 OK\r\n" + headers + "\r\n\r\n" + page);
}
const std::string long_text = [] {
    std::string text;
    for (int i = 0; i < 8; i++) text += "This is a sentence of a paragraph that somebody wrote. ";
    text.pop_back();
    return text;
}();

#ifdef HAVE_ZLIB
// window_bits: zlib's, with 16 more for gzip.
std::string deflated(const std::string& text, int window_bits) {
    std::string packed(text.size() + 1000, '\0');
    z_stream z{};
    EXPECT_EQ(deflateInit2(&z, 6, Z_DEFLATED, window_bits, 8, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (Bytef*)text.data();
    z.avail_in = (uInt)text.size();
    z.next_out = (Bytef*)packed.data();
    z.avail_out = (uInt)packed.size();
    EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
    packed.resize(packed.size() - z.avail_out);
    deflateEnd(&z);
    return packed;
}
#endif

TEST(Warc, RecordsByTheirTypes) {
    const test::TemporaryDirectory dir;
    const std::string html =
        "<html><head><title>no</title><script>var no;</script></head><body><nav><a href=x>Home no</a></nav><p>" + long_text +
        "<p>" + long_text + " Two.</body></html>";
    const std::string wanted = long_text + "\n" + long_text + " Two.\n";
    std::string broken = "HTTP/1.1 404 Not Found\r\nContent-Type: text/html\r\n\r\n" + html;
    const std::vector<std::array<std::string, 3>> table = {
        // record, text, reason for dropping it
        {record("warcinfo", "application/warc-fields", "software: x"), "", "warcinfo records"},
        {record("request", "application/http; msgtype=request", "GET / HTTP/1.1"), "", "request records"},
        {record("conversion", "text/plain", "a text as it stands\r\nof two lines"), "a text as it stands\r\nof two lines", ""},
        {record("conversion", "text/plain", ""), "", "empty documents"},
        {record("my own", "x", "y"), "", "other records"},
        {response("Content-Type: text/html; charset=utf-8", html), wanted, ""},
        {response("content-type:text/html\r\nTransfer-Encoding: chunked", format("%zx\r\n", html.size() - 9) +
                                                                              html.substr(0, html.size() - 9) + "\r\n9;x\r\n" +
                                                                              html.substr(html.size() - 9) + "\r\n0\r\n\r\n"),
         wanted, ""},
        {response("Content-Type: text/plain; charset=\"iso-8859-1\"", "caf\xe9 \x93"), "café “", ""},
        {response("Content-Type: text/plain", "Rar!" + std::string(200, '\0')), "", "text/plain responses that are not text"},
        {response("Content-Type: image/jpeg", "\xff\xd8"), "", "responses of type image/..."},
        {response("Content-Type: text/html", "<nav>nothing</nav><p>short"), "", "pages without text besides boilerplate"},
        {response("Content-Type: text/html\r\nContent-Encoding: br", "\x8b\x01"), "",
         "responses in an unsupported compression"},
        {record("response", "application/http", broken), "", "responses of another status than 200"},
        {record("response", "application/http", "SSH-2.0"), "", "responses that are not HTTP"},
    };
    std::string all;
    for (const auto& row : table) all += row[0];
    for (const bool compressed : {false, true}) {
        TextInput input;
        input.files = {dir / "a.warc"};
        input.keep_fields = true;
        std::string bytes = all;
#ifdef HAVE_ZLIB
        if (compressed) {  // a member per record, as required by the standard
            bytes.clear();
            for (const auto& row : table) bytes += deflated(row[0], 15 + 16);
        }
#endif
        test::write_file(input.files[0], bytes);
        const std::vector<Chunk> found = chunks(input);
        ASSERT_EQ(found.size(), table.size());
        for (size_t i = 0; i < table.size(); i++) {
            EXPECT_EQ(found[i].text, table[i][1]) << i;
            EXPECT_EQ(found[i].left_out, table[i][2]) << i;
            EXPECT_TRUE(found[i].fields.get("url") == R"("http://a.example/")" || found[i].text.empty());
        }
    }
    TextInput input;
    input.files = {dir / "b.warc"};
    const std::vector<std::array<std::string, 2>> refused = {
        {all.substr(0, all.size() - 12), "record 14 of " + input.files[0] + " is cut off"},
        {all + "no record\r\n\r\n", "record 15 of " + input.files[0] + " does not start with WARC/"},
        {"WARC/1.0\r\nContent-Length: 5x\r\n\r\n", "record 1 of " + input.files[0] + " has no length"},
        {"WARC/1.0\r\nContent-Length: 5", "is cut off within its header"},
        {"WARC/1.0\r\nContent-Length: 999999999999999999\r\n\r\nx", "is cut off"},
    };
    for (const auto& [bytes, part] : refused) {
        test::write_file(input.files[0], bytes);
        test::expect_error([&] { chunks(input); }, {part});
    }
}

#ifdef HAVE_ZLIB
TEST(Warc, CompressedPages) {
    const test::TemporaryDirectory dir;
    const std::string page = "<p>" + long_text + "<p>" + long_text + " Two.", whole = long_text + "\n" + long_text + " Two.\n";
    const std::string gzip = deflated(page, 15 + 16), type = "Content-Type: text/html\r\nContent-Encoding: ";
    // The compression and the text: complete, empty or, for a truncated page, its start.
    const std::vector<std::array<std::string, 2>> table = {
        {response(type + "gzip", gzip), whole},
        {response(type + "X-GZIP", gzip), whole},
        {response(type + "deflate", deflated(page, 15)), whole},
        {response(type + "gzip", page), whole},  // the crawler has unpacked it
        {response(type + "identity", page), whole},
        {response(type + "deflate", page), whole},
        {response(type + "deflate", "neither packed nor a page"), ""},
        {response(type + "gzip", gzip.substr(0, 20)), ""},
    };
    TextInput input;
    input.files = {dir / "a.warc"};
    std::string all;
    for (const auto& row : table) all += row[0];
    all += response(type + "gzip", gzip.substr(0, gzip.size() - 8));  // without its checksum and length
    test::write_file(input.files[0], all);
    const std::vector<Chunk> found = chunks(input);
    ASSERT_EQ(found.size(), table.size() + 1);
    for (size_t i = 0; i < table.size(); i++) EXPECT_EQ(found[i].text, table[i][1]) << i;
    EXPECT_EQ(found.back().text, whole);
}
#endif

#ifdef HAVE_GUMBO
// jusText's rules, one per row.
TEST(Html, Boilerplate) {
    const auto text_of = [](const std::string& page) {
        std::vector<html::Paragraph> paragraphs;
        EXPECT_TRUE(html::page_paragraphs(page, paragraphs));
        return html::without_boilerplate(paragraphs);
    };
    const std::string good = "<p>" + long_text + "</p>", middle(100, 'm'), line = long_text + "\n";
    const std::string links = "<p><a href=x>" + long_text + "</a></p>";
    const std::vector<std::array<std::string, 2>> table = {
        {good, line},
        {links + good + links, line},
        {"<p>short</p>" + good, line},                            // at the edge
        {good + "<p>short</p>" + good, line + "short\n" + line},  // between good ones
        {good + "<p>short</p>" + links + links, line},            // before a bad one
        {"<h1>A heading</h1>" + good, "A heading\n" + line},
        {"<h1>A heading</h1>" + links + good, line},             // too far
        {good + "<p>" + middle + "</p>", line + middle + "\n"},  // near good, next to a good one
        {"<p>" + middle + "</p>", middle + "\n"},                // the best there is
        {"<p>" + links + middle + links, middle + "\n"},
        {good + links + links + "<p>" + middle + "</p>" + links, line},      // there is a better one
        {good + "<p>\xc2\xa9 2024 " + middle + "</p>" + good, line + line},  // copyright
        {"<div>" + long_text + "<br><br>" + long_text + "</div>", line + line},
        {"<p>" + long_text + "<br>" + long_text + "</p>", long_text + " " + line},
        {good + "<script>" + long_text + "</script><style>x</style><div hidden>" + long_text + "</div>", line},
        {"<p>" + long_text + " <b>b</b>o<i>ld</i>&amp;&nbsp; &eacute;</p>", long_text + " bold& é\n"},
    };
    for (const auto& [page, text] : table) EXPECT_EQ(text_of(page), text) << page;
    std::string deep;
    for (int i = 0; i < 200000; i++) deep += "<b><div>";
    std::vector<html::Paragraph> paragraphs;
    EXPECT_FALSE(html::page_paragraphs(deep + good, paragraphs));
    EXPECT_TRUE(html::page_paragraphs(deep.substr(0, 900 * 4) + good, paragraphs));
    std::string cells, wrong_ends;
    for (int i = 0; i < 300000; i++) cells += "<td>1</td>";
    EXPECT_EQ(text_of("<table><tr>" + cells + "</table>"), "");  // quadratic time would be minutes
    for (int i = 0; i < 200000; i++) wrong_ends += "<div></x>";
    EXPECT_FALSE(html::page_paragraphs(wrong_ends, paragraphs));
}

#ifdef HAVE_GUMBO
TEST(Html, TagsOfManyAttributesAreLeftOut) {
    std::string many = "<a";
    for (int i = 0; i < 60000; i++) many += i % 2 ? " b" + std::to_string(i) + "=1" : "/c" + std::to_string(i);
    std::vector<html::Paragraph> paragraphs;
    EXPECT_FALSE(html::page_paragraphs(many + ">text", paragraphs));
    const std::string image =
        "<img src=\"data:" + std::string(10000, '/') + "\" alt='" + std::string(10000, ' ') + "'><p>text</p>";
    EXPECT_TRUE(html::page_paragraphs(image, paragraphs));
    EXPECT_FALSE(paragraphs.empty());
}
#endif

TEST(Html, Characters) {
    EXPECT_EQ(html::to_utf8("<meta charset=shift_jis>\x93\xfa\x96\x7b", ""), "<meta charset=shift_jis>日本");
    EXPECT_EQ(html::to_utf8("<meta http-equiv=Content-Type content='text/html; charset=euc-jp'>\xc6\xfc", ""),
              "<meta http-equiv=Content-Type content='text/html; charset=euc-jp'>日");
    EXPECT_EQ(html::to_utf8("\x93\xfa", "shift_jis"), "日");
    EXPECT_EQ(html::to_utf8("caf\xe9", ""), "café");
    EXPECT_EQ(html::to_utf8("caf\xc3\xa9", "no-such-charset"), "café");
    EXPECT_EQ(html::to_utf8("a\xff"
                            "b\xe3\x81",
                            "utf-8"),
              "a\xef\xbf\xbd"
              "b\xef\xbf\xbd");
    EXPECT_EQ(html::to_utf8("\xef\xbb\xbf"
                            "a",
                            "latin1"),
              "a");
    EXPECT_EQ(html::to_utf8(std::string("\xff\xfe"
                                        "a\0b\0",
                                        6),
                            ""),
              "ab");
}
#endif

}  // namespace test_documents
