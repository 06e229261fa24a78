// Files that are no plain text by their names or their markup: tables, pages, XML, articles of WikiExtractor; texts in other
// encodings; folders with files that cannot be read; small files that claim much.
#include <gtest/gtest.h>

#include <ctime>
#include <set>
#include <sstream>

#include "../llmc/text/document_reader.h"
#include "files.h"

namespace test_input_formats {

using Texts = std::vector<std::string>;
struct Read {
    Texts texts, notes;
    std::string taken;
    std::vector<Chunk> chunks;
};
// The documents of an input, as commands read it.
Read read(TextInput input) {
    Read found;
    DocumentReader reader(std::move(input));
    std::string text;
    for_each_chunk(
        reader, 2, "reading", [](const Chunk&, size_t) {},
        [&](const Chunk& chunk, size_t) {
            text += chunk.text;
            if (!chunk.ends_document) return;
            found.texts.push_back(text);
            found.chunks.push_back(chunk);
            text.clear();
        },
        [](size_t) {}, false);
    found.taken = reader.taken();
    found.notes = reader.notes();
    return found;
}
Read read_file(const std::string& file, const std::string& text, const std::string& key = "text",
               const std::string& format = "") {
    test::write_file(file, text);
    TextInput input;
    input.files = {file};
    input.json_key = key;
    input.format = format;
    return read(input);
}

TEST(Tables, QuotesAreUndone) {
    const test::TemporaryDirectory dir;
    struct Row {
        const char *name, *bytes;
        Texts texts;
        const char* key = "text";
    };
    const std::vector<Row> rows = {
        {"a.csv", "id,text\n1,one\n2,\"two, \"\"three\"\"\nand four\"\n\n3,five", {"one", "two, \"three\"\nand four", "five"}},
        {"a.csv", "\xef\xbb\xbftext\r\none\r\n\"two\"\r\n", {"one", "two"}},
        {"A.CSV", "\"text\",\"id\"\n\"one\",1\n", {"one"}},
        {"a.csv", "id;text\n1;one, two\n", {"one, two"}},
        {"a.csv", "sep=|\nid|text\n1|one; two\n", {"one; two"}},
        {"a.csv", "id,content\n1,one\n", {"one"}},
        {"a.csv", "review\none; two\n", {"one; two"}},
        {"a.csv", "id,body\n1,one\n", {"one"}, "body"},
        {"a.csv", "id,text\n1,\"a\" quote, and\n2,b\n3,c\n4,d\n", {"b", "c", "d"}},  // three fields: a bad line
        {"a.csv", "id,text\n1,say \"hello\" now\n", {"say \"hello\" now"}},
        {"a.csv", "id,text\n1,\n2,x\n", {"x"}},
        {"a.tsv",
         "id\ttext\n1\tone, \"two\"\n2\t\"three\tfour\"\n3\t\"five\" six\n4\t\"seven\n5\teight\n",
         {"one, \"two\"", "three\tfour", "\"five\" six", "\"seven", "eight"}},
        {"a.tsv.txt", "id\ttext\n", {"id\ttext\n"}},
    };
    for (const Row& row : rows) {
        TextInput input;
        input.files = {dir / row.name};
        input.json_key = row.key;
        input.max_bad_lines = "1";
        test::write_file(input.files[0], row.bytes);
        EXPECT_EQ(read(input).texts, row.texts) << row.bytes;
    }
    EXPECT_NE(read_file(dir / "a.csv", "id,content\n1,one\n").taken.find("as CSV (the text in column 'content')"),
              std::string::npos);
    // A whole table whose every field is quoted, of any length, and where the buffer ends.
    std::string table = "text,n\n";
    Texts texts;
    for (int i = 0; i < 3000; i++) {
        texts.push_back(format("row %d, \"said\"\n", i) + std::string((size_t)(i * 7 % 100), '\n') + "end");
        std::string doubled;
        for (const char c : texts.back()) doubled += c == '"' ? "\"\"" : std::string(1, c);
        table += "\"" + doubled + "\"," + std::to_string(i) + (i % 2 ? "\r\n" : "\n");
    }
    EXPECT_EQ(read_file(dir / "b.csv", table).texts, texts);
    // Of unclosed quotes in TSV the time must not grow with the square.
    std::string quotes = "text\n\"";
    for (int i = 0; i < 300000; i++) quotes += "\t\"\"x";
    EXPECT_EQ(read_file(dir / "c.tsv", quotes + "\n", "text", "text").texts.size(), 1u);
    test::write_file(dir / "c.tsv", quotes + "\"y\n");
    TextInput input;
    input.files = {dir / "c.tsv"};
    test::expect_error([&] { read(input); }, {"c.tsv", "column"});
}

TEST(Tables, OtherColumnsAreFieldsAndConversations) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.csv", "id,text,note\n7,one,\"a \"\"b\"\"\"\n");
    TextInput input;
    input.files = {dir / "a.csv"};
    input.keep_fields = true;
    const Read found = read(input);
    ASSERT_EQ(found.texts, Texts{"one"});
    EXPECT_EQ(found.chunks[0].fields.object(), R"({"id":"7","note":"a \"b\""})");
    test::write_file(dir / "b.csv", "prompt,completion\nWho?,me\n,\n");
    TextInput chats;
    chats.files = {dir / "b.csv"};
    chats.max_bad_lines = "1";
    chats.open_record = [](const nlohmann::json& record, Chunk& chunk) {
        if (record["prompt"] == "") chunk.problem = "empty";
        else chunk.text = json_text(record);
    };
    EXPECT_EQ(read(chats).texts, Texts{R"({"completion":"me","prompt":"Who?"})"});
}

TEST(Tables, WhatIsNoTableIsRefused) {
    const test::TemporaryDirectory dir;
    const auto refused = [&](const std::string& name, const std::string& bytes, std::vector<std::string> parts) {
        test::expect_error([&] { read_file(dir / name, bytes); }, parts);
    };
    refused("a.csv", "id,name\n1,one\n", {"a.csv", "no column 'text'", "id, name", "--json-keys"});
    refused("a.csv", "text,text\n1,one\n", {"a.csv", "several columns 'text'"});
    refused("a.csv", "id,text\n1,\"one\n2,two\n", {"a.csv:2", "has no end", "--format text"});
    refused("a.csv", "id,text\n1,a,b\n2,c,d\n3,e\n", {"a.csv:2", "3 fields", "the first line has 2"});
    EXPECT_EQ(read_file(dir / "a.csv", "id,text\n1,one\n", "text", "text").texts, Texts{"id,text\n1,one\n"});
    EXPECT_EQ(read_file(dir / "a.txt", "id,text\n1,one\n", "text", "csv").texts, Texts{"one"});
}

TEST(Json, PythonsNumbersThatAreNone) {
    const test::TemporaryDirectory dir;
    test::write_file(dir / "a.jsonl",
                     "{\"text\": \"NaN \\\" Infinity\", \"score\": NaN, \"b\": [-Infinity, Infinity, -1]}\n"
                     "{\"score\": NaN, \"text\": \"b\"}\n");
    TextInput input;
    input.files = {dir / "a.jsonl"};
    input.keep_fields = true;
    const Read found = read(input);
    EXPECT_EQ(found.texts, (Texts{"NaN \" Infinity", "b"}));
    EXPECT_EQ(found.chunks[0].fields.object(), R"({"b":[null,null,-1],"score":null})");
    test::expect_error([&] { read_file(dir / "b.jsonl", "{\"text\": NaN}\n"); }, {"'text' is not a string but null"});
    test::expect_error([&] { read_file(dir / "b.jsonl", "{\"text\": nan}\n"); }, {"not valid JSON"});
}

TEST(Markup, WikiExtractorsArticles) {
    const test::TemporaryDirectory dir;
    const std::string articles =
        "<doc id=\"1\" url=\"u\" title=\"A &amp; B\">\nA &amp; B\n\n1 &lt; 2\n</doc>\n"
        "<doc id=\"2\" url=\"v\" title=\"C\">\n\n</doc>\n"
        "<doc id=\"3\" url=\"w\" title=\"D\">\nD\n\n</doc>\n";
    EXPECT_EQ(read_file(dir / "wiki_00", articles).texts, (Texts{"A & B\n\n1 < 2", "D"}));
    TextInput input;
    input.files = {dir / "wiki_00"};
    input.keep_fields = true;
    EXPECT_EQ(read(input).chunks[0].fields.object(), R"({"id":"1","url":"u","title":"A & B"})");
    test::expect_error([&] { read_file(dir / "wiki_00", articles + "<doc id=\"4\">\nx\n"); }, {"wiki_00:14", "cut off"});
    test::expect_error([&] { read_file(dir / "wiki_00", articles + "x\n"); }, {"wiki_00:13", "not within <doc"});
}

TEST(Markup, IsNotLearned) {
    const test::TemporaryDirectory dir;
    const std::string xml = "<?xml version=\"1.0\"?>\n<book><p>One.</p></book>\n";
    std::string tags;
    for (int i = 0; i < 50; i++) tags += "<p class=\"a\">One <b>two</b>.</p>\n";
    const std::vector<std::array<std::string, 3>> table = {
        {"a.xml", xml, "XML"},
        {"a.txt", xml, "XML (<book>)"},
        {"a.xml", "<TEI>\n</TEI>", "XML (<tei>)"},
        {"dump", "<mediawiki xmlns=\"x\">\n<page>", "wikiextractor"},
        {"a.txt", tags, "markup tags"},
        {"a.ipynb", "{\n \"cells\": []\n}", "Jupyter"},
        {"shard.00000.mds", "abc", "MosaicML"},
        {"a.npy", "abc", "NumPy"},
        {"a", test::bytes_of(20240520) + std::string(1020, '\0'), "a shard of llm.c"},
        {"a", test::bytes_of(20240801) + std::string(1020, '\0'), "a shard of llm.c"},
        {"a.npy", "\x93NUMPY\x01", "NumPy"},
        {"a", std::string("\xff\xff\xff\xff\x10\0\0\0", 8), "Arrow stream"},
        {"a", std::string("GGUF\3\0\0\0", 8), "GGUF"},
        {"a.docx", std::string("PK\3\4\x14\0\0\0", 8) + "[Content_Types].xml", "pandoc"},
        {"a.docx", std::string("PK\3\4\x14\0\0\0", 8) + "word/document.xml", "Word document (.docx)"},
        {"a.xlsx", std::string("PK\3\4\x14\0\0\0", 8) + "xl/workbook.xml", "Excel"},
        {"a.epub", std::string("PK\3\4\x14\0\0\0", 8) + "mimetypeapplication/epub+zip", "EPUB"},
    };
    for (const auto& row : table) test::expect_error([&] { read_file(dir / row[0], row[1]); }, {row[0], row[2], "HINT"});
    EXPECT_EQ(read_file(dir / "a.xml", xml, "text", "text").texts, Texts{xml});
    // What only looks like it.
    for (const std::string text :
         {"<3 is a heart\n", "GGUF is a format\n", "RIFF raff\n", "vector<int> a; map<string, vector<int>> b;\n",
          "<b>One</b> word of many that come after it in this text.\n", "ORC and elf\n", "<doc> a\n"})
        EXPECT_EQ(read_file(dir / "a.txt", text).texts, Texts{text});
    EXPECT_EQ(markup::count_markup("vector<int> a<b; x</y"), 0);
    EXPECT_EQ(markup::count_markup("<b>a</b>"), 7);
    EXPECT_EQ(markup::count_markup("<a href=\"x\">a</a>"), 7 + 9);
}

#ifdef HAVE_GUMBO
TEST(Markup, PagesAreReadAsText) {
    const test::TemporaryDirectory dir;
    std::string sentence, plain;
    for (int i = 0; i < 8; i++) sentence += "This is a sentence of a paragraph that somebody wrote. ";
    sentence.pop_back();
    const std::string page = "<nav><a href=x>no</a></nav><p>" + sentence + "<p>" + sentence + "</p>";
    const std::string text = sentence + "\n" + sentence + "\n";
    EXPECT_EQ(read_file(dir / "a.html", page).texts, Texts{text});
    EXPECT_EQ(read_file(dir / "a.HTM", page).texts, Texts{text});
    EXPECT_EQ(read_file(dir / "a.txt", "<!-- x -->\n<!DOCTYPE HTML>" + page).texts, Texts{text});
    EXPECT_EQ(read_file(dir / "a", "<?xml version=\"1.0\"?>\n<!DOCTYPE html PUBLIC \"x\"><html>" + page).texts, Texts{text});
    EXPECT_EQ(read_file(dir / "a.txt", page, "text", "html").texts, Texts{text});
    const std::string sjis = "<html><meta charset=shift_jis><p>" + sentence + "\x93\xfa\x96\x7b";
    EXPECT_EQ(read_file(dir / "a.html", sjis).texts, Texts{sentence + "日本\n"});
    EXPECT_EQ(read_file(dir / "a.html", page).taken, (dir / "a.html") + " as HTML (the text of pages, without boilerplate)");
}
#endif

#ifdef HAVE_GUMBO
// Pages of news in twelve languages, whose paragraphs are all short, with menus, links to other pages and notices. Recall is
// the share of the article's characters that are found, precision the share of what is found that is the article's.
TEST(Html, ArticlesOfShortParagraphsInTwelveLanguages) {
    size_t wanted = 0, found = 0, right = 0;
    int pages = 0;
    for (const auto& entry : std::filesystem::directory_iterator("test/golden/pages")) {
        if (entry.path().extension() != ".html") continue;
        pages++;
        std::vector<html::Paragraph> paragraphs;
        ASSERT_TRUE(html::page_paragraphs(test::read_file(entry.path()), paragraphs));
        std::istringstream text(html::without_boilerplate(paragraphs)),
            golden(test::read_file(std::filesystem::path(entry.path()).replace_extension(".txt")));
        std::set<std::string> article;
        size_t wanted_here = 0, right_here = 0;
        for (std::string line; std::getline(golden, line);) {
            article.insert(line);
            wanted_here += line.size();
        }
        for (std::string line; std::getline(text, line);) {
            found += line.size();
            if (article.count(line)) right_here += line.size();
        }
        EXPECT_GE((double)right_here, 0.9 * (double)wanted_here) << entry.path();
        wanted += wanted_here;
        right += right_here;
    }
    EXPECT_EQ(pages, 12);
    printf("recall %.3f, precision %.3f\n", (double)right / (double)wanted, (double)right / (double)found);
    EXPECT_GE((double)right, 0.97 * (double)wanted);
    EXPECT_GE((double)right, 0.97 * (double)found);
}
#endif

// ---- encodings and folders -------------------------------------------------------------------------------------------------
TEST(Encodings, AreNamedOrFound) {
    const test::TemporaryDirectory dir;
    // "Größe" and so on in Latin-1, "これは日本語のテキストです。" in CP932
    std::string latin1, cp932, german, japanese;
    for (int i = 0; i < 40; i++) {
        latin1 +=
            "Die Gr\xf6\xdf"
            "e der T\xfcr ist \xfc"
            "ber zwei Meter, das w\xe4re sch\xf6n.\n";
        german += "Die Größe der Tür ist über zwei Meter, das wäre schön.\n";
        cp932 +=
            "\x82\xb1\x82\xea\x82\xcd\x93\xfa\x96\x7b\x8c\xea\x82\xcc"
            "\x83\x65\x83\x4c\x83\x58\x83\x67\x82\xc5\x82\xb7\x81\x42\n";
        japanese += "これは日本語のテキストです。\n";
    }
    const auto read_as = [&](const std::string& bytes, const std::string& encoding) {
        test::write_file(dir / "a.txt", bytes);
        TextInput input;
        input.files = {dir / "a.txt"};
        input.encoding = encoding;
        return read(input).texts;
    };
    EXPECT_EQ(read_as(cp932, "cp932"), Texts{japanese});
    EXPECT_EQ(read_as(latin1, "latin1"), Texts{german});
    EXPECT_EQ(read_as(cp932, "auto"), Texts{japanese});
    EXPECT_EQ(read_as(latin1, "auto"), Texts{german});
    EXPECT_EQ(read_as(german + japanese, "auto"), Texts{german + japanese});
    EXPECT_EQ(read_as(std::string("\xff\xfeG\0r\0\xf6\0", 8), "utf-16"), Texts{"Grö"});
    EXPECT_EQ(read_as(std::string("\xff\xfeG\0r\0\xf6\0", 8), "auto"), Texts{"Grö"});
    test::expect_error([&] { read_as(cp932, ""); }, {"a.txt", "not UTF-8", "--encoding cp932", "iconv -f CP932"});
    test::expect_error([&] { read_as(latin1, ""); }, {"a.txt", "--encoding windows-1252"});
    test::expect_error([&] { read_as(latin1, "utf-8"); }, {"a.txt", "is not in the encoding utf-8"});
    test::expect_error([&] { read_as(latin1, "no-such"); }, {"--encoding", "iconv -l"});
    // Russian has several encodings, and is not guessed.
    std::string russian;
    for (int i = 0; i < 40; i++) russian += "\xdd\xf2\xee \xf2\xe5\xea\xf1\xf2 \xed\xe0 \xf0\xf3\xf1\xf1\xea\xee\xec.\n";
    test::expect_error([&] { read_as(russian, "auto"); }, {"--encoding NAME"});
}

TEST(InputFiles, AllAreJudgedBeforeTheFirstIsRead) {
    const test::TemporaryDirectory dir;
    const std::string folder = dir / "in";
    std::filesystem::create_directories(folder);
    std::string latin1;
    for (int i = 0; i < 99; i++) latin1 += "sch\xf6n ";
    test::write_file(folder + "/a.txt", "one");
    test::write_file(folder + "/b.csv", "id,name\n1,x\n");
    test::write_file(folder + "/c.xml", "<?xml version=\"1.0\"?><a/>");
    test::write_file(folder + "/d.txt", latin1);
    test::write_file(folder + "/e.jsonl", "{\"body\": \"x\"}\n{\"body\": \"y\"}\n");
    test::write_file(folder + "/f.jsonl", "{\"text\": \"two\"}\n");
    TextInput input;
    input.files = {folder};
    test::expect_error([&] { read(input); },
                       {"4 files cannot be read", "b.csv has no column", "c.xml is not plain text", "d.txt is not UTF-8",
                        "e.jsonl: none of its first lines", "keys are body", "--skip-bad-files"});
    input.skip_bad_files = true;
    const Read found = read(input);
    EXPECT_EQ(found.texts, (Texts{"one", "two"}));
    std::string notes;
    for (const std::string& note : found.notes) notes += note + "\n";
    for (const char* part : {"4 files were left out", "b.csv", "c.xml", "d.txt", "e.jsonl"})
        EXPECT_NE(notes.find(part), std::string::npos) << notes;
    for (const char* name : {"/b.csv", "/d.txt", "/e.jsonl"}) std::filesystem::remove(folder + name);
    input.skip_bad_files = false;
    test::expect_error([&] { read(input); }, {"c.xml is not plain text", "--skip-bad-files"});
    input.files = {folder + "/c.xml"};
    test::expect_error([&] { read(input); }, {"c.xml is not plain text", "--format text"});
    // A folder of datasets' save_to_disk says how it becomes text.
    test::write_file(folder + "/state.json", "{}");
    test::write_file(folder + "/dataset_info.json", "{}");
    input.files = {folder};
    test::expect_error([&] { read(input); }, {"save_to_disk", "datasets.load_from_disk"});
}

#ifdef HAVE_ZLIB
TEST(InputFiles, TheRestOfADamagedFileIsLeftOut) {
    const test::TemporaryDirectory dir;
    std::string lines, packed(1 << 20, '\0');
    for (int i = 0; i < 20000; i++) lines += format("{\"text\": \"%d %d\"}\n", i, i * 7919 % 10007);
    z_stream z{};
    ASSERT_EQ(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (Bytef*)lines.data();
    z.avail_in = (uInt)lines.size();
    z.next_out = (Bytef*)packed.data();
    z.avail_out = (uInt)packed.size();
    ASSERT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
    packed.resize((packed.size() - z.avail_out) / 2);
    deflateEnd(&z);
    test::write_file(dir / "a.jsonl.gz", packed);
    test::write_file(dir / "b.jsonl", "{\"text\": \"last\"}\n");
    TextInput input;
    input.files = {dir / "a.jsonl.gz", dir / "b.jsonl"};
    test::expect_error([&] { read(input); }, {"a.jsonl.gz", "cut off"});
    input.skip_bad_files = true;
    input.max_bad_lines = "1";  // the line that is cut
    const Read found = read(input);
    EXPECT_GT(found.texts.size(), 1000u);
    EXPECT_EQ(found.texts[0], "0 0");
    EXPECT_EQ(found.texts.back(), "last");
    EXPECT_NE(found.notes.back().find("the rest of a file"), std::string::npos);
}
#endif

// ---- small files that claim much -------------------------------------------------------------------------------------------
TEST(Budgets, ZerosInAnArchive) {
    Budget budget{100, 10};
    EXPECT_TRUE(budget.spend(150, 5));
    EXPECT_FALSE(budget.spend(1, 5));
    EXPECT_TRUE(budget.spend(1, 6));
    EXPECT_FALSE(budget.spend(~0ull, 6));
    EXPECT_FALSE(budget.spend(1, 6));
    EXPECT_EQ(budget.allowed(~0ull), ~0ull);
#ifdef HAVE_ZSTD
    // 64 frames of 64 MiB of zeros each are 134 kB.
    const test::TemporaryDirectory dir;
    const std::string zeros(64 << 20, ' ');
    std::string frame(ZSTD_compressBound(zeros.size()), '\0'), all;
    frame.resize(ZSTD_compress(frame.data(), frame.size(), zeros.data(), zeros.size(), 1));
    for (int i = 0; i < 64; i++) all += frame;
    test::write_file(dir / "a.txt.zst", all);
    auto in = open_input(dir / "a.txt.zst");
    std::string part(1 << 20, '\0');
    test::expect_error(
        [&] {
            while (in->read(part.data(), part.size()) > 0) continue;
        },
        {"a.txt.zst", "expands to more than", "decompress it first"});
#endif
}

// Thrift's compact protocol, as far as a Parquet file of one column needs it.
struct ThriftWriter {
    std::string bytes;
    int last = 0;
    static std::string varint(uint64_t n) {
        std::string out;
        for (; n >= 0x80; n >>= 7) out += (char)(n | 0x80);
        return out + (char)n;
    }
    ThriftWriter& head(int field, int type) {
        bytes += (char)((field - last) << 4 | type);
        last = field;
        return *this;
    }
    ThriftWriter& number(int field, int64_t n) {
        head(field, 6).bytes += varint((uint64_t)n << 1);
        return *this;
    }
    ThriftWriter& text(int field, const std::string& value) {
        head(field, 8).bytes += varint(value.size()) + value;
        return *this;
    }
    ThriftWriter& part(int field, const ThriftWriter& value) {
        head(field, 12).bytes += value.bytes + '\0';
        return *this;
    }
    ThriftWriter& list(int field, int type, const std::vector<std::string>& values) {
        head(field, 9).bytes += (char)(values.size() << 4 | (size_t)type);
        for (const std::string& value : values) bytes += value;
        return *this;
    }
};
std::string page(int64_t type, int64_t values, int64_t encoding, const std::string& body) {
    ThriftWriter kind, header;
    kind.number(1, values).number(2, encoding);
    if (type == 0) kind.number(3, 3).number(4, 3);
    header.number(1, type).number(2, (int64_t)body.size()).number(3, (int64_t)body.size()).part(type == 0 ? 5 : 7, kind);
    return header.bytes + '\0' + body;
}
// A file of one column `text`. unknown: a field of the footer that no reader knows.
std::string parquet_of(const std::string& pages, size_t data_page, int64_t rows, bool optional,
                       const ThriftWriter& unknown = {}) {
    ThriftWriter root, column, meta, chunk, group, footer;
    root.text(4, "schema").number(5, 1);
    column.number(1, 6).number(3, optional).text(4, "text");
    meta.number(1, 6).list(3, 8, {ThriftWriter::varint(4) + "text"}).number(4, 0).number(5, rows);
    meta.number(7, (int64_t)pages.size()).number(9, (int64_t)data_page + 4);
    if (data_page > 0) meta.number(11, 4);
    chunk.part(3, meta);
    group.list(1, 12, {chunk.bytes + '\0'}).number(3, rows);
    footer.list(2, 12, {root.bytes + '\0', column.bytes + '\0'}).list(4, 12, {group.bytes + '\0'}).part(9, unknown);
    const std::string end = footer.bytes + '\0';
    return "PAR1" + pages + end + test::bytes_of((uint32_t)end.size()) + "PAR1";
}

TEST(Budgets, JsonOfManyValues) {
    const test::TemporaryDirectory dir;
    const auto bad_line = [&](const std::string& line) {
        test::write_file(dir / "a.jsonl", line + "\n{\"text\": \"a\"}\n");
        TextInput input;
        input.files = {dir / "a.jsonl"};
        input.max_bad_lines = "1";
        const clock_t start = clock();
        EXPECT_EQ(read(input).texts, Texts{"a"});
        EXPECT_LT((double)(clock() - start) / CLOCKS_PER_SEC, 4);
    };
    std::string wide = "{\"body\": [";
    for (int i = 0; i < 2000000; i++) wide += "{},";
    bad_line(wide + "1]}");
    bad_line("{\"body\": " + std::string(5000000, '['));
    EXPECT_FALSE(json_exceeds(R"({"a": "[[[,,,\"[[", "b": [1]})", 2, 4));
    EXPECT_TRUE(json_exceeds(R"({"a": "", "b": [[1]]})", 2, 9));
    EXPECT_TRUE(json_exceeds("[1,2,3,4]", 2, 3));
    test::expect_error([&] { parse_json(std::string(5000000, '['), "it"); }, {"it is not valid", "32 levels"});
}

TEST(Budgets, ParquetOfManyRowsInFewBytes) {
    const test::TemporaryDirectory dir;
    TextInput input;
    input.files = {dir / "a.parquet"};
    const auto rows_of = [&](const std::string& bytes) {
        test::write_file(input.files[0], bytes);
        ParquetDocuments documents(input.files[0], input);
        int64_t rows = 0;
        for (Chunk chunk; documents.next(chunk); chunk = {}) rows++;
        return rows;
    };
    const auto run = [](uint64_t n, char value) { return ThriftWriter::varint(n << 1) + value; };
    const auto levels = [](const std::string& runs) { return test::bytes_of((uint32_t)runs.size()) + runs; };
    const auto nulls = [&](int64_t rows) {
        return parquet_of(page(0, rows, 0, levels(run((uint64_t)rows, 0))), 0, rows, true);
    };
    // A dictionary of one long text, and a run of its index.
    const std::string text = test::bytes_of((uint32_t)600000) + std::string(600000, 'x');
    const auto repeated = [&](int64_t rows) {
        const std::string dictionary = page(2, 1, 0, text);
        return parquet_of(dictionary + page(0, rows, 8, '\1' + run((uint64_t)rows, 0)), dictionary.size(), rows, false);
    };
    const auto widths_of_0 = [&](int64_t rows) {
        const uint64_t block = 1 << 20;
        std::string deltas = ThriftWriter::varint(block) + '\1' + ThriftWriter::varint((uint64_t)rows) + '\0';
        for (uint64_t left = (uint64_t)rows; left > 0 && deltas.size() < 200; left -= std::min(left, block))
            deltas += std::string(2, '\0');
        return parquet_of(page(0, rows, 6, deltas), 0, rows, false);
    };
    EXPECT_EQ(rows_of(nulls(100000)), 100000);
    EXPECT_EQ(rows_of(repeated(50)), 50);
    EXPECT_EQ(rows_of(widths_of_0(100000)), 100000);
    for (const int shift : {24, 40, 60}) {
        test::expect_error([&] { rows_of(nulls((int64_t)1 << shift)); }, {"a.parquet", "rows, which no text does"});
        test::expect_error([&] { rows_of(widths_of_0((int64_t)1 << shift)); }, {"a.parquet", "rows, which no text does"});
    }
    test::expect_error([&] { rows_of(repeated((int64_t)1 << 20)); }, {"a.parquet", "come out of its", "which no text does"});
    // Maps of truth values have a byte for each.
    ThriftWriter maps;
    for (int i = 0; i < 20000; i++) maps.head(maps.last + 1, 11).bytes += ThriftWriter::varint(100000) + '\x11';
    test::expect_error([&] { rows_of(parquet_of(page(0, 1, 0, "\1"), 0, 1, false, maps)); }, {"a.parquet"});
}

#ifdef HAVE_GUMBO
TEST(Budgets, PagesMadeToTakeLong) {
    std::vector<html::Paragraph> paragraphs;
    const auto seconds = [&](const std::string& page) {
        const double start = html::thread_seconds();
        if (html::page_paragraphs(page, paragraphs)) html::without_boilerplate(paragraphs);
        return html::thread_seconds() - start;
    };
    std::string bodies, applets, headings;
    for (int i = 0; i < 100000; i++) bodies += format("<body a%d>", i);
    for (int i = 0; i < 60000; i++) applets += "<applet><div></applet><p>";
    for (int i = 0; i < 60000; i++) headings += "<h1>\xcc\x80</h1>";
    EXPECT_LT(seconds(bodies), 1);
    EXPECT_FALSE(html::page_paragraphs(bodies, paragraphs));
    EXPECT_LT(seconds(applets), 2);
    EXPECT_LT(seconds(headings), 2);
}
#endif

}  // namespace test_input_formats
