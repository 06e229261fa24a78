// Detects the format of an input by its first bytes and its name, so that nothing is learned from files that are not text.
//   refuse_other_formats   compressed, binary and UTF-16 files, by their signatures, each with the command that converts it
//   refuse_other_names     files of other kinds that have no signature, by their names; XML, and text that is mostly tags
//   find_text_format       text, JSON lines, other JSON, WARC, HTML, tables, WikiExtractor's articles
//   OddBytes               the share of NUL and of invalid UTF-8, which gives away binary data without a signature; and of tags
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "address_source.h"
#include "markup.h"

// ---- files that are not text ------------------------------------------------------------------------------------------------
struct FileSignature {
    size_t at;  // offset in the file
    std::string_view bytes;
    const char *name, *command;  // a command that writes FILE as text to stdout; "" if there is none
    bool letters = false;        // text may start like this, too: there must be control characters among the first 64 bytes
    size_t also_at = 0;          // a second piece, if there is one
    std::string_view also = "";
};

using std::literals::string_view_literals::operator""sv;

inline constexpr std::string_view parquet_magic = "PAR1";

inline constexpr FileSignature file_signatures[] = {
    {0, "\x1f\x8b"sv, "gzip-compressed", "zcat FILE"},
    {0, "\x28\xb5\x2f\xfd"sv, "zstd-compressed", "zstdcat FILE"},
    {1, "\x2a\x4d\x18"sv, "zstd-compressed", "zstdcat FILE"},  // starts with a skippable frame
    {0, "BZh"sv, "bzip2-compressed", "bzcat FILE", false, 4, "1AY&SY"sv},
    {0, "\xfd\x37zXZ\0"sv, "xz-compressed", "xzcat FILE"},
    {0, "\x04\x22\x4d\x18"sv, "lz4-compressed", "lz4cat FILE"},
    {0, "PK\x03\x04"sv, "a zip archive", "unzip -p FILE"},
    {0, "7z\xbc\xaf\x27\x1c"sv, "a 7z archive", "7z x -so FILE"},
    {257, "ustar"sv, "a tar archive", "tar -xOf FILE"},
    {0, parquet_magic, "a Parquet file",
     "python3 -c 'import pandas, sys; pandas.read_parquet(sys.argv[1]).to_json(sys.stdout, orient=\"records\", lines=True)' "
     "FILE"},
    {0, "ARROW1"sv, "an Arrow file",
     "python3 -c 'import pandas, sys; pandas.read_feather(sys.argv[1]).to_json(sys.stdout, orient=\"records\", lines=True)' "
     "FILE"},
    {0, "FEA1"sv, "an old Feather file",
     "python3 -c 'import pandas, sys; pandas.read_feather(sys.argv[1]).to_json(sys.stdout, orient=\"records\", lines=True)' "
     "FILE",
     true},
    {0, "\xff\xff\xff\xff"sv, "an Arrow stream, as datasets' save_to_disk and its cache write it",
     "python3 -c 'import datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_json(sys.stdout.buffer)' FILE", false, 7,
     "\0"sv},  // the highest byte of its schema's length
    {0, "ORC"sv, "an ORC file",
     "python3 -c 'import pandas, sys; pandas.read_orc(sys.argv[1]).to_json(sys.stdout, orient=\"records\", lines=True)' FILE",
     true},
    {0, "GGUF"sv, "a GGUF file, a model of llama.cpp, which --model takes", "", true},
    {0, "%!PS"sv, "a PostScript document", "ps2ascii FILE"},
    {0, "AT&TFORM"sv, "a DjVu document", "djvutxt FILE"},
    {0, "Rar!\x1a\x07"sv, "a RAR archive", "unrar p -inul FILE"},
    {0, "{\\rtf"sv, "an RTF document", "unrtf --text FILE"},
    {0, "%PDF-"sv, "a PDF document", "pdftotext FILE -"},
    {0, "\xff\xfe\0\0"sv, "UTF-32 text", "iconv -f UTF-32 -t UTF-8 FILE"},
    {0, "\xff\xfe"sv, "UTF-16 text", "iconv -f UTF-16 -t UTF-8 FILE"},
    {0, "\xfe\xff"sv, "UTF-16 text", "iconv -f UTF-16 -t UTF-8 FILE"},
    {0, "MMIDIDX\0"sv, "the index of prepared data, which --data-path takes", ""},
    {0, "\x88\xd8\x34\x01"sv, "prepared data (a shard of llm.c), which --data-path takes", ""},
    {0, "\xa1\xd9\x34\x01"sv, "prepared data (a shard of llm.c), which --data-path takes", ""},
    {0, "Obj\x01"sv, "an Avro file", "avro-tools tojson FILE"},
    {0, "\x89HDF\r\n"sv, "an HDF5 file", ""},
    {0, "\x93NUMPY"sv, "a NumPy array; prepared tokens in one are written as llm.c's shards or by Megatron-LM's builder", ""},
    {0, "\x80\x02"sv, "a pickle of Python", ""},
    {0, "\x80\x03"sv, "a pickle of Python", ""},
    {0, "\x80\x04\x95"sv, "a pickle of Python", ""},
    {0, "\x80\x05\x95"sv, "a pickle of Python", ""},
    {0, "SQLite format 3\0"sv, "an SQLite database", ""},
    {0, "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "a Microsoft Office document", ""},
    {0, "\177ELF"sv, "a program", ""},
    {0, "\x89PNG\r\n"sv, "a PNG image", ""},
    {0, "\xff\xd8\xff"sv, "a JPEG image", ""},
    {0, "GIF8"sv, "a GIF image", "", true},
    {0, "RIFF"sv, "a sound, a video or an image (RIFF)", "", true},
    {0, "ID3\x03"sv, "a sound (MP3)", ""},
    {0, "ID3\x04"sv, "a sound (MP3)", ""},
    {0, "fLaC"sv, "a sound (FLAC)", "", true},
    {0, "OggS"sv, "a sound or a video (Ogg)", "", true},
    {4, "ftyp"sv, "a video (MP4)", "", true},
    {0, "\x1a\x45\xdf\xa3"sv, "a video (Matroska)", ""},
    {0, "\xca\xfe\xba\xbe"sv, "a Java class", ""},
    {0, "\0asm"sv, "a WebAssembly program", ""},
};

// The kind of a zip archive, by the first names in it.
inline const FileSignature& zip_kind(std::string_view first) {
    static constexpr FileSignature kinds[] = {
        {0, "word/"sv, "a Word document (.docx)", "pandoc --to plain --wrap none FILE"},
        {0, "xl/"sv, "an Excel table (.xlsx)",
         "python3 -c 'import pandas, sys; pandas.read_excel(sys.argv[1]).to_json(sys.stdout, orient=\"records\", lines=True)' "
         "FILE"},
        {0, "ppt/"sv, "a PowerPoint presentation (.pptx)", "markitdown FILE"},
        {0, "application/epub+zip"sv, "an e-book (EPUB)", "pandoc --from epub --to plain --wrap none FILE"},
        {0, "application/vnd.oasis.opendocument.text"sv, "an OpenDocument text (.odt)",
         "pandoc --from odt --to plain --wrap none FILE"},
        {0, "application/vnd.oasis.opendocument"sv, "an OpenDocument file (LibreOffice)", ""},
        {0, "[Content_Types].xml"sv, "a Microsoft Office document (.docx, .xlsx or .pptx)",
         "pandoc --from docx --to plain --wrap none FILE"},
        {0, "data.pkl"sv, "a file of PyTorch", ""},
        {0, ".npy"sv, "an archive of NumPy arrays (.npz)", ""},
        {0, "META-INF/"sv, "a Java archive", ""},
    };
    static constexpr FileSignature plain = {0, "", "a zip archive", "unzip -p FILE"};
    for (const FileSignature& kind : kinds)
        if (first.find(kind.bytes) != std::string_view::npos) return kind;
    return plain;
}

// The entry that matches the first bytes, or null.
inline const FileSignature* find_signature(std::string_view first) {
    for (const FileSignature& s : file_signatures) {
        if (first.size() < s.at || first.substr(s.at, s.bytes.size()) != s.bytes) continue;
        if (first.substr(std::min(s.also_at, first.size()), s.also.size()) != s.also) continue;
        if (s.letters && first.substr(0, 64).find_first_of("\0\1\2\3\4\5\6\7"sv) == std::string_view::npos) continue;
        if (s.bytes == "PK\x03\x04") return &zip_kind(first);
        return &s;
    }
    // UTF-16 without a byte order mark: in Latin text every second byte is NUL, and hardly any other.
    static constexpr FileSignature little = {0, "", "UTF-16 text", "iconv -f UTF-16LE -t UTF-8 FILE"},
                                   big = {0, "", "UTF-16 text", "iconv -f UTF-16BE -t UTF-8 FILE"};
    size_t nul[2] = {0, 0};
    for (size_t i = 0; i < first.size(); i++) nul[i % 2] += first[i] == 0;
    const size_t half = first.size() / 2;
    if (half >= 2 && nul[1] > half / 2 && nul[0] <= half / 20) return &little;
    if (half >= 2 && nul[0] > half / 2 && nul[1] <= half / 20) return &big;
    return nullptr;
}

// "zcat FILE" with the input's name, piped into the command that reads it. `reading` is that command up to the file's name, as
// in "prepare --input"; "" if it reads only files. Data from a pipe or an address has no name.
inline std::string as_pipe(std::string command, const std::string& path, const std::string& reading) {
    const bool piped = path == "-" || path.rfind("/dev/", 0) == 0 || is_address(path);
    if (const size_t at = command.find(piped ? " FILE" : "FILE"); at != std::string::npos)
        command.replace(at, piped ? 5 : 4, piped ? "" : shell_word(path));
    if (reading.empty()) return command + " >text.jsonl makes a file that can be given";
    return (piped ? "... | " : "") + command + " | train_gpt " + reading + " - ...";
}

inline std::string input_name(const std::string& path) { return path == "-" ? "standard input" : path; }

inline constexpr size_t first_bytes = 4096;  // number of bytes examined

inline void refuse_other_formats(std::string_view first, const std::string& path, const std::string& reading) {
    const FileSignature* found = find_signature(first.substr(0, first_bytes));
    if (!found) return;
    const std::string hint = *found->command ? as_pipe(found->command, path, reading) : "give text or JSON lines";
    fail("%s is not UTF-8 text: it is %s; HINT: %s", input_name(path).c_str(), found->name, hint.c_str());
}

// The name in lower case, without the ending of a compression and without an address's query.
inline std::string plain_name(const std::string& path) {
    std::string name = lower_ascii(without_query(path));
    for (const std::string_view ending : {".gz", ".zst"})
        if (ends_with(name, ending)) name.resize(name.size() - ending.size());
    return name;
}

// Files that are not text by their names, though their bytes may look like it.
struct NamedKind {
    const char *ending, *name, *command;
};
inline constexpr NamedKind named_kinds[] = {
    {".mds", "a shard of MosaicML's streaming",
     "python3 -c 'import json, streaming, sys; [print(json.dumps({\"text\": s[\"text\"]})) for s in "
     "streaming.StreamingDataset(local=sys.argv[1], batch_size=1)]' $(dirname FILE)"},
    {".ipynb", "a Jupyter notebook", "jupyter nbconvert --to markdown --stdout FILE"},
    {".npy", "a NumPy array", ""},
    {".npz", "an archive of NumPy arrays", ""},
    {".pkl", "a pickle of Python", ""},
    {".pickle", "a pickle of Python", ""},
    {".safetensors", "a file of tensors", ""},
    {".tfrecord", "a file of TFRecords", ""},
    {".arrow", "an Arrow file",
     "python3 -c 'import datasets, sys; datasets.Dataset.from_file(sys.argv[1]).to_json(sys.stdout.buffer)' FILE"},
};

// "" or why a file is not taken for text by its name or its markup, with a hint.
inline std::string other_kind(std::string_view first, const std::string& path, const std::string& reading) {
    const std::string name = plain_name(path);
    const std::string as_it_is = "--format text reads it unchanged, with its markup";
    for (const NamedKind& kind : named_kinds)
        if (ends_with(name, kind.ending))
            return format("by its name it is %s; HINT: %s", kind.name,
                          *kind.command ? as_pipe(kind.command, path, reading).c_str() : "give text or JSON lines");
    if (ends_with(path, ".bin") && file_exists(path.substr(0, path.size() - 4) + ".idx"))
        return "it is prepared data, next to its index; HINT: --data-path " + shell_word(path.substr(0, path.size() - 4));
    if (markup::begins_as_html(first)) return "";
    const std::string root = markup::root_of(first);
    if (root == "mediawiki")
        return format("it is a dump of a wiki in XML; HINT: %s; %s",
                      as_pipe("python3 -m wikiextractor.WikiExtractor --json -o - FILE", path, reading).c_str(),
                      as_it_is.c_str());
    const bool named_xml =
        ends_with(name, ".xml") || ends_with(name, ".svg") || ends_with(name, ".rss") || ends_with(name, ".tei");
    if (markup::begins_as_xml(first) || (named_xml && !root.empty()))
        return format("it is XML%s; HINT: %s; %s", root.empty() ? "" : (" (<" + root + ">)").c_str(),
                      as_pipe("python3 -c 'import sys, xml.etree.ElementTree as tree; "
                              "print(\"\".join(tree.parse(sys.argv[1]).getroot().itertext()))' FILE",
                              path, reading)
                          .c_str(),
                      as_it_is.c_str());
    const double share = first.empty() ? 0 : (double)markup::count_markup(first) / (double)first.size();
    if (share > 0.25 && first.find_first_not_of(" \t\r\n") != std::string_view::npos)
        return format("%.0f%% of its first %s is markup tags; HINT: --format html takes the text of a page; %s", 100 * share,
                      counted((int64_t)first.size(), "byte").c_str(), as_it_is.c_str());
    return "";
}
inline void refuse_other_names(std::string_view first, const std::string& path, const std::string& reading) {
    const std::string kind = other_kind(first, path, reading);
    if (!kind.empty()) fail("%s is not plain text: %s", input_name(path).c_str(), kind.c_str());
}

// Counts bytes that text should not have. An input with more than 1 in 200 is rejected as binary: real corpora have one in
// thousands, German in Latin-1 one in 75.
struct OddBytes {
    int64_t bytes = 0, nul = 0, invalid = 0;  // total; NUL; not part of valid UTF-8
    int64_t tags = 0;                         // part of markup; only counted in documents

    OddBytes& operator+=(const OddBytes& more) {
        bytes += more.bytes;
        nul += more.nul;
        invalid += more.invalid;
        tags += more.tags;
        return *this;
    }
    bool too_many() const { return nul + invalid > bytes / 200; }
};

inline OddBytes count_odd_bytes(std::string_view text) {
    OddBytes odd;
    odd.bytes = (int64_t)text.size();
    for (size_t i = 0; i < text.size();) {
        constexpr uint64_t ones = 0x0101010101010101;
        uint64_t eight = 0;
        if (i + 8 <= text.size()) memcpy(&eight, text.data() + i, 8);
        if (((eight | (eight - ones)) & 128 * ones) == 0) {  // ASCII without NUL
            i += 8;
            continue;
        }
        odd.nul += text[i] == 0;
        const size_t n = valid_utf8_length((const unsigned char*)text.data() + i, text.size() - i);
        odd.invalid += n == 0;
        i += std::max<size_t>(n, 1);
    }
    return odd;
}

// encoding: that it seems to be in, or "".
[[noreturn]] inline void refuse_odd_bytes(const OddBytes& odd, const std::string& path, const std::string& reading,
                                          const std::string& encoding = "") {
    fail(
        "%s is not UTF-8 text: of the %s bytes read, %s are NUL and %s are not valid UTF-8, %.1f%%; at most 0.5%% are "
        "allowed; HINT: %s, or %s; --allow-binary accepts any bytes",
        input_name(path).c_str(), with_commas(odd.bytes).c_str(), with_commas(odd.nul).c_str(),
        with_commas(odd.invalid).c_str(), 100.0 * (double)(odd.nul + odd.invalid) / (double)odd.bytes,
        encoding.empty() ? "if it is text in another encoding, --encoding NAME (latin1, cp932, windows-1251)"
                         : ("it seems to be " + encoding + ": --encoding " + lower_ascii(encoding)).c_str(),
        as_pipe("iconv -f " + (encoding.empty() ? "ENCODING" : encoding) + " -t UTF-8 FILE", path, reading).c_str());
}

// ---- text or JSON ----------------------------------------------------------------------------------------------------------
enum class TextFormat { text, json_lines, json_objects, json_array, parquet, warc, html, csv, tsv, wiki };
inline bool is_json(TextFormat f) {
    return f == TextFormat::json_lines || f == TextFormat::json_objects || f == TextFormat::json_array;
}
inline bool is_table(TextFormat f) { return f == TextFormat::parquet || f == TextFormat::csv || f == TextFormat::tsv; }

inline bool named_as(const std::string& path, std::initializer_list<const char*> endings) {
    const std::string name = plain_name(path);
    return std::any_of(endings.begin(), endings.end(), [&](const char* ending) { return ends_with(name, ending); });
}
inline bool named_as_json(const std::string& path) { return named_as(path, {".jsonl", ".ndjson", ".jsonlines", ".json"}); }

// JSON if `asked` or the name says so, or if the input starts like JSON: an array of objects, objects over several lines
// (only where the name says JSON), or else one object per line. WARC, HTML and WikiExtractor's articles by their first bytes,
// tables and HTML by their names. Text otherwise.
inline TextFormat find_text_format(InputStream& in, const std::string& asked) {
    if (asked == "text") return TextFormat::text;
    std::string_view first = in.peek(first_bytes).substr(0, first_bytes);
    if (asked == "html") return TextFormat::html;
    if (asked == "csv") return TextFormat::csv;
    if (asked == "tsv") return TextFormat::tsv;
    if (asked.empty()) {
        if (begins_with(first, "WARC/")) return TextFormat::warc;
        if (named_as(in.name(), {".csv"})) return TextFormat::csv;
        if (named_as(in.name(), {".tsv", ".tab"})) return TextFormat::tsv;
        if (markup::begins_as_html(first) || named_as(in.name(), {".html", ".htm", ".xhtml"})) return TextFormat::html;
        if (markup::begins_as_wiki(first)) return TextFormat::wiki;
    }
    const auto skip = [&](const char* blanks, size_t from) {
        first.remove_prefix(std::min(first.size(), first.find_first_not_of(blanks, from)));
        return first.substr(0, 1);
    };
    first = without_byte_order_mark(first);
    const bool json = asked == "jsonl" || named_as_json(in.name());
    const std::string_view opening = skip(" \t\r\n", 0);
    if (opening == "[" && (json || (skip(" \t\r\n", 1) == "{" && skip(" \t\r\n", 1) == "\""))) return TextFormat::json_array;
    if (opening != "{") return json ? TextFormat::json_lines : TextFormat::text;
    // A first line that does not end an object, and a second one that does not start one.
    const size_t newline = first.find('\n');
    if (json && newline != std::string_view::npos) {
        const size_t end = first.find_last_not_of(" \t\r", newline - 1), next = first.find_first_not_of(" \t\r\n", newline);
        if (first[end] != '}' && next != std::string_view::npos && first[next] != '{') return TextFormat::json_objects;
    }
    // {' starts a dictionary printed by Python, which is not JSON: treated as JSON it is refused, instead of being used as
    // text.
    const std::string_view next = skip(" \t\r", 1);
    return json || next == "\"" || next == "'" || next == "}" ? TextFormat::json_lines : TextFormat::text;
}
