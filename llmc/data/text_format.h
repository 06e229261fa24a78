// Detects the format of an input by its first bytes, so that no model is trained on files that are not text.
//   refuse_other_formats   compressed, binary and UTF-16 files, by their signatures, each with the command that converts it
//   find_text_format       text, JSON lines, other JSON, or WARC
//   OddBytes               the fraction of NUL and of invalid UTF-8, which reveals binary data without a signature
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/terminal.h"
#include "../base/utf8.h"

// ---- files that are not text ------------------------------------------------------------------------------------------------
struct FileSignature {
    size_t at;  // offset in the file
    std::string_view bytes;
    const char *name, *command;  // a command that writes FILE as text to stdout; "" if there is none
};

using std::literals::string_view_literals::operator""sv;

inline constexpr std::string_view parquet_magic = "PAR1";

inline constexpr FileSignature file_signatures[] = {
    {0, "\x1f\x8b"sv, "gzip-compressed", "zcat FILE"},
    {0, "\x28\xb5\x2f\xfd"sv, "zstd-compressed", "zstdcat FILE"},
    {1, "\x2a\x4d\x18"sv, "zstd-compressed", "zstdcat FILE"},  // starts with a skippable frame
    {0, "BZh"sv, "bzip2-compressed", "bzcat FILE"},            // and more, checked in find_signature
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
    {0, "{\\rtf"sv, "an RTF document", "unrtf --text FILE"},
    {0, "%PDF-"sv, "a PDF document", "pdftotext FILE -"},
    {0, "\xff\xfe\0\0"sv, "UTF-32 text", "iconv -f UTF-32 -t UTF-8 FILE"},
    {0, "\xff\xfe"sv, "UTF-16 text", "iconv -f UTF-16 -t UTF-8 FILE"},
    {0, "\xfe\xff"sv, "UTF-16 text", "iconv -f UTF-16 -t UTF-8 FILE"},
    {0, "MMIDIDX\0"sv, "the index of prepared data, which --data-path takes", ""},
    {0, "\x98\xd8\x34\x01"sv, "prepared data (a shard of llm.c), which --data-path takes", ""},
    {0, "\xb1\xd9\x34\x01"sv, "prepared data (a shard of llm.c), which --data-path takes", ""},
    {0, "Obj\x01"sv, "an Avro file", ""},
    {0, "\x89HDF\r\n"sv, "an HDF5 file", ""},
    {0, "\x93NUMPY"sv, "a NumPy array", ""},
    {0, "SQLite format 3\0"sv, "an SQLite database", ""},
    {0, "\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"sv, "a Microsoft Office document", ""},
    {0, "\177ELF"sv, "a program", ""},
    {0, "\x89PNG\r\n"sv, "a PNG image", ""},
    {0, "\xff\xd8\xff"sv, "a JPEG image", ""},
};

// The entry that matches the first bytes, or null.
inline const FileSignature* find_signature(std::string_view first) {
    for (const FileSignature& s : file_signatures) {
        if (first.size() < s.at || first.substr(s.at, s.bytes.size()) != s.bytes) continue;
        if (s.bytes == "BZh" && first.substr(4, 6) != "1AY&SY") continue;  // text may start with "BZh"
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
// in "prepare --input"; "" if it reads only files. Data from a pipe has no name.
inline std::string as_pipe(std::string command, const std::string& path, const std::string& reading) {
    const bool piped = path == "-" || path.rfind("/dev/", 0) == 0;
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

// Counts bytes that text should not have. An input with more than 1 in 200 is rejected as binary: real corpora have one in
// thousands, German in Latin-1 one in 75.
struct OddBytes {
    int64_t bytes = 0, nul = 0, invalid = 0;  // total; NUL; not part of valid UTF-8

    OddBytes& operator+=(const OddBytes& more) {
        bytes += more.bytes;
        nul += more.nul;
        invalid += more.invalid;
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

[[noreturn]] inline void refuse_odd_bytes(const OddBytes& odd, const std::string& path, const std::string& reading) {
    fail(
        "%s is not UTF-8 text: of the %s bytes read, %s are NUL and %s are not valid UTF-8, %.1f%%; at most 0.5%% are "
        "allowed; HINT: if it is text in another encoding, %s; prepare and tokenizer accept any bytes with --allow-binary",
        input_name(path).c_str(), with_commas(odd.bytes).c_str(), with_commas(odd.nul).c_str(),
        with_commas(odd.invalid).c_str(), 100.0 * (double)(odd.nul + odd.invalid) / (double)odd.bytes,
        as_pipe("iconv -f ENCODING -t UTF-8 FILE", path, reading).c_str());
}

// ---- text or JSON ----------------------------------------------------------------------------------------------------------
enum class TextFormat { text, json_lines, json_objects, json_array, parquet, warc };

// By the name, without the ending of a compression.
inline bool named_as_json(std::string path) {
    for (char& c : path) c = (char)tolower((unsigned char)c);
    for (const std::string_view ending : {".gz", ".zst"})
        if (ends_with(path, ending)) path.resize(path.size() - ending.size());
    const auto is_named = [&](const char* ending) { return ends_with(path, ending); };
    return is_named(".jsonl") || is_named(".ndjson") || is_named(".jsonlines") || is_named(".json");
}

// JSON if `asked` or the name says so, or if the input starts like JSON: an array of objects, objects over several lines (only
// if the name says JSON), or else one object per line. Text otherwise.
inline TextFormat find_text_format(InputStream& in, const std::string& asked) {
    if (asked == "text") return TextFormat::text;
    std::string_view first = in.peek(first_bytes).substr(0, first_bytes);
    if (asked.empty() && first.substr(0, 5) == "WARC/") return TextFormat::warc;
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
