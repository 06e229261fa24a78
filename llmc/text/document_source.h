// The documents of one file, in order, by its format:
//   TextDocuments       the file, its parts between blank lines, or its lines
//   JsonLineDocuments   one JSON object per line
//   JsonValueDocuments  one array of JSON objects, or objects over several lines; only the object in hand is held
//   WikiDocuments       WikiExtractor's articles between <doc> and </doc>
// A source passes JSON on unchanged: open_chunk() (document_reader.h) finds the document in it, in many threads. Parquet,
// WARC, HTML and tables have headers of their own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/text.h"
#include "address_source.h"
#include "byte_source.h"
#include "../tokenizer/conversation.h"
#include "../tokenizer/jinja_parser.h"
#include "json_scan.h"
#include "text_format.h"

// The longest document that is kept whole in memory. A small compressed file can hold gigabytes.
inline constexpr size_t most_document_bytes = 64 << 20;
inline constexpr const char* most_document_name = "64 MiB";

struct Chunk;

// Which files are read, and how.
struct TextInput {
    Strings files;
    std::string reading = "prepare --input";  // the command and its option that name the files, for messages
    std::string json_key = "text", split = "file", format = "";
    std::string max_bad_lines = "1%";
    bool allow_binary = false;
    std::string encoding = "";                // of texts: iconv's name, "auto", or "": UTF-8
    bool skip_bad_files = false;              // files that cannot be read are left out, with a note
    Strings given{};                          // options of reading that the user has given
    InputCommand command{};                   // reads the addresses among the files
    std::string writes = "";                  // a data set that the command writes: in folders its files are left out
    bool keep_fields = false;                 // Chunk::fields gets the other fields next to the text
    bool whole_documents = false;             // a long document does not come in parts
    size_t batch_bytes = 16 << 20;            // of text that is worked on at once
    size_t most_bytes = most_document_bytes;  // of a line of JSON
    std::string invalid_bytes_become = "were kept unchanged";
    // For records that hold a conversation or a pair of them instead of a text: replaces the chunk, or sets `problem`. Its
    // argument is the record as JSON.
    std::function<void(const nlohmann::json&, Chunk&)> open_record{};
};

// The files, read as the options say (options/text_options.h, READING_OPTIONS).
template <class Options>
TextInput text_input(const Options& o, const Strings& files, const std::string& reading, const std::string& split) {
    const auto no_address = [](const std::string& name) { return !is_address(name) && name[0] != '@'; };
    refuse_idle(!o.input_command.empty() && std::all_of(files.begin(), files.end(), no_address), "--input-command",
                "an address to read");
    return {files,
            reading,
            o.json_keys,
            split,
            o.format,
            o.on_bad_line == "fail" ? "0" : o.max_bad_lines,
            o.allow_binary,
            o.encoding,
            o.skip_bad_files,
            Strings(o.given.begin(), o.given.end()),
            InputCommand(o.input_command)};
}

// Statistics for judging an input: of the current file, and of all files.
struct JudgedLines {
    OddBytes odd;
    int64_t lines = 0, bad = 0;  // of JSON
    int64_t bad_of_all = 0;
};

// A document, or a part of a long one.
struct Chunk {
    std::string text;
    bool ends_document = true;
    bool continues = false;  // the previous chunk was an earlier part of the same document
    size_t file = 0;
    int64_t line = 0;    // line (or row) of its start; 0: (part of) a file that is one document
    int64_t number = 0;  // among the file's chunks
    // `text` until open_chunk() has opened it: the document itself, a JSON value, a response of HTTP, a page of
    // HTML.
    enum Holds { document, json, response, page } holds = document;
    bool is_record = false;  // of JSON or of a table: one that cannot be used is counted as a bad line
    JsonFields fields;
    std::vector<ChatMessage> conversation;
    std::vector<ChatMessage> rejected;        // for a pair of answers; `conversation` has the chosen one
    JinjaString rendered, rendered_rejected;  // both, by the template
    std::string problem;                      // why a line is unusable
    std::string left_out;                     // why there is no document here, although nothing is wrong: "rows without text"
    OddBytes odd;
    JudgedLines before;  // counts before this chunk

    size_t bytes() const {
        size_t sum = sizeof(Chunk) + text.capacity();
        for (const auto& [name, value] : fields.members()) sum += 2 * sizeof(std::string) + name.size() + value.size();
        return sum;
    }
};

[[noreturn]] inline void refuse_long_document(const std::string& file, int64_t line, const std::string& split) {
    fail("%s:%lld: a document starting here exceeds %s, the maximum; HINT: --split-documents %s, or cut it",
         input_name(file).c_str(), (long long)line, most_document_name, split == "file" ? "blank or line" : "file");
}

class DocumentSource {
public:
    virtual ~DocumentSource() = default;
    virtual bool next(Chunk& chunk) = 0;   // returns false at the end of the file; the chunk must be new
    virtual int64_t position() const = 0;  // bytes of the file read so far
};

// A source over a stream of bytes.
class StreamDocuments : public DocumentSource {
public:
    explicit StreamDocuments(std::unique_ptr<InputStream> in) : in_(std::move(in)) {}
    int64_t position() const override { return in_->position(); }

protected:
    // The next line with its newline, if it has one.
    bool read_line(std::string& line, size_t most_bytes = most_document_bytes) {
        if (!in_->read_line(line, most_bytes)) return false;
        line_++;
        return true;
    }
    static bool is_blank(const std::string& line) { return line.find_first_not_of(" \t\r\n") == std::string::npos; }

    std::unique_ptr<InputStream> in_;
    int64_t line_ = 0;
};

class TextDocuments : public StreamDocuments {
public:
    TextDocuments(std::unique_ptr<InputStream> in, const TextInput& input)
        : StreamDocuments(std::move(in)), split_(input.split), whole_(input.whole_documents) {}
    bool next(Chunk& chunk) override { return split_ == "file" ? next_part(chunk) : next_lines(chunk, split_ == "line"); }

private:
    // The maximum size of a part of a document that is encoded at once. A part ends before a newline that follows an ASCII
    // letter or digit: every pre-tokenizer splits there anyway, so the tokens are the same as for the whole text. Text without
    // such a place is split at any newline, or anywhere, once it is much longer.
    static constexpr size_t part_bytes = 1 << 20, longest_part_bytes = 16 << 20;

    bool next_part(Chunk& chunk) {
        chunk.continues = !carried_.empty();
        chunk.text = std::move(carried_);
        carried_.clear();
        bool end = false;
        while (!end) {
            const size_t before = chunk.text.size();
            chunk.text.resize(before + part_bytes);
            const size_t n = in_->read(&chunk.text[before], part_bytes);
            chunk.text.resize(before + n);
            end = n < part_bytes;
            if (whole_) check_size(chunk.text, 1);
            else if (!end && cut(chunk.text)) break;
        }
        chunk.ends_document = end;
        // Many small files may wait in memory, each a chunk.
        if (chunk.text.capacity() > 2 * chunk.text.size()) chunk.text.shrink_to_fit();
        // The last part may be followed by nothing: an empty text only means that the file has ended.
        return !chunk.text.empty();
    }

    // Moves the text after a good place to split into carried_.
    bool cut(std::string& text) {
        const auto at = [&](size_t i) {
            carried_ = text.substr(i);
            text.resize(i);
            return true;
        };
        for (size_t i = text.size() - 1; i > text.size() / 2; i--)
            if (text[i] == '\n' && (unsigned char)text[i - 1] < 0x80 && isalnum((unsigned char)text[i - 1])) return at(i);
        if (text.size() < longest_part_bytes) return false;
        const size_t newline = text.rfind('\n');
        if (newline != std::string::npos && newline > 0) return at(newline);
        return at(text.size() - 9 + whole_characters(text.substr(text.size() - 9, 8)));
    }

    // A line, or the lines up to the next blank one. The last newline is a separator and is dropped.
    bool next_lines(Chunk& chunk, bool single) {
        std::string line;
        while (read_line(line)) {
            const bool blank = is_blank(line);
            if (blank && (single || chunk.text.empty())) continue;
            if (blank) break;
            if (chunk.text.empty()) chunk.line = line_;
            chunk.text += line;
            check_size(chunk.text, chunk.line);
            if (single) break;
        }
        while (!chunk.text.empty() && (chunk.text.back() == '\n' || chunk.text.back() == '\r')) chunk.text.pop_back();
        return !chunk.text.empty();
    }

    void check_size(const std::string& text, int64_t line) const {
        if (text.size() > most_document_bytes) refuse_long_document(in_->name(), line, split_);
    }

    std::string split_, carried_;
    bool whole_;
};

class JsonLineDocuments : public StreamDocuments {
public:
    JsonLineDocuments(std::unique_ptr<InputStream> in, size_t most_bytes)
        : StreamDocuments(std::move(in)), most_bytes_(most_bytes) {}
    bool next(Chunk& chunk) override {
        do
            if (!read_line(chunk.text, most_bytes_)) return false;
        while (is_blank(chunk.text));
        chunk.holds = Chunk::json;
        chunk.is_record = true;
        chunk.line = line_;
        if (chunk.text.size() > most_bytes_) {
            chunk.text.clear();
            chunk.problem = format("it is longer than %s", most_document_name);
        }
        return true;
    }

private:
    size_t most_bytes_;
};

class JsonValueDocuments : public StreamDocuments {
public:
    JsonValueDocuments(std::unique_ptr<InputStream> in, bool array) : StreamDocuments(std::move(in)), array_(array) {
        line_ = 1;
    }

    bool next(Chunk& chunk) override {
        if (before_all_ && array_ && skip_blanks() == '[') in_->skip(1);
        char first = skip_blanks();
        if (array_ && !before_all_ && first == ',') {
            in_->skip(1);
            first = skip_blanks();
            if (first == ']') refuse("has a comma after its last value");
        } else if (array_ && !before_all_ && first != ']') {
            refuse(first ? "has two values without a comma between them" : "is cut off: its array has no end");
        }
        before_all_ = false;
        if (array_ && first == ']') {
            in_->skip(1);
            if (skip_blanks()) refuse("continues after its array");
            return false;
        }
        if (!first) {
            if (array_) refuse("is cut off: its array has no end");
            return false;
        }
        chunk.holds = Chunk::json;
        chunk.is_record = true;
        chunk.line = line_;
        read_value(chunk);
        return true;
    }

private:
    [[noreturn]] void refuse(const char* what) const {
        fail("%s:%lld: the file %s; HINT: download or create it again, or convert it: jq -c '.[]' %s",
             input_name(in_->name()).c_str(), (long long)line_, what, shell_word(in_->name()).c_str());
    }

    // The next byte that is not blank, without consuming it; 0 at the end.
    char skip_blanks() {
        for (std::string_view next = in_->peek(1); !next.empty(); next = in_->peek(1)) {
            size_t n = 0;
            for (; n < next.size() && strchr(" \t\r\n", next[n]) && next[n]; n++) line_ += next[n] == '\n';
            const char found = n < next.size() ? next[n] : 0;
            in_->skip(n);
            if (n < next.size()) return found ? found : '?';
        }
        return 0;
    }

    // Reads up to the closing bracket of the value or, for a value without brackets in an array, up to the following delimiter.
    void read_value(Chunk& chunk) {
        int64_t depth = 0;
        bool in_string = false, escaped = false, done = false;
        for (std::string_view next = in_->peek(1); !next.empty() && !done; next = in_->peek(1)) {
            size_t n = 0;
            while (n < next.size() && !done) {
                const char c = next[n];
                if (!in_string && depth == 0 && chunk.text.size() + n > 0 && (c == ',' || c == ']' || c == '\n')) {
                    done = true;
                    break;
                }
                n++;
                line_ += c == '\n';
                if (escaped) escaped = false;
                else if (in_string) {
                    escaped = c == '\\';
                    in_string = c != '"';
                } else if (c == '"') in_string = true;
                else if (c == '{' || c == '[') depth++;
                else if (c == '}' || c == ']') done = --depth <= 0;
            }
            const size_t room = most_document_bytes + 1 - chunk.text.size();
            chunk.text.append(next.data(), std::min(n, room));
            in_->skip(n);
        }
        if (!done && array_) refuse("ends within a value");
        if (chunk.text.size() > most_document_bytes) {
            chunk.text.clear();
            chunk.problem = format("it is longer than %s", most_document_name);
        }
    }

    bool array_, before_all_ = true;
};

class WikiDocuments : public StreamDocuments {
public:
    WikiDocuments(std::unique_ptr<InputStream> in, const TextInput& input)
        : StreamDocuments(std::move(in)), keep_fields_(input.keep_fields) {}

    bool next(Chunk& chunk) override {
        std::string line;
        do
            if (!read_line(line)) return false;
        while (is_blank(line));
        chunk.line = line_;
        if (!begins_with(line, "<doc ")) refuse("is not within <doc ...> and </doc>");
        if (keep_fields_)
            for (const char* name : {"id", "url", "title"})
                if (const std::string value = attribute(line, name); !value.empty())
                    chunk.fields.add(name, json_text(nlohmann::json(value)));
        while (true) {
            if (!read_line(line)) refuse("ends the file within an article: it is cut off");
            if (begins_with(line, "</doc>")) break;
            chunk.text += unescaped(line);
            if (chunk.text.size() > most_document_bytes) refuse_long_document(in_->name(), chunk.line, "file");
        }
        chunk.text.erase(chunk.text.find_last_not_of("\r\n") + 1);
        if (chunk.text.empty()) chunk.left_out = "empty documents";
        return true;
    }

private:
    [[noreturn]] void refuse(const char* what) const {
        fail("%s:%lld %s; HINT: create it again with WikiExtractor, or read it unchanged with --format text",
             input_name(in_->name()).c_str(), (long long)line_, what);
    }
    static std::string attribute(const std::string& line, const std::string& name) {
        const size_t at = line.find(" " + name + "=\"");
        if (at == std::string::npos) return "";
        const size_t begin = at + name.size() + 3;
        return unescaped(line.substr(begin, line.find('"', begin) - begin));
    }
    // The three characters that WikiExtractor escapes, and quotes.
    static std::string unescaped(const std::string& text) {
        static constexpr std::pair<std::string_view, char> names[] = {
            {"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}};
        std::string out;
        for (size_t i = 0; i < text.size();) {
            const auto* found = std::find_if(std::begin(names), std::end(names), [&](const auto& n) {
                return text[i] == '&' && text.compare(i, n.first.size(), n.first) == 0;
            });
            const bool known = found != std::end(names);
            out += known ? found->second : text[i];
            i += known ? found->first.size() : 1;
        }
        return out;
    }

    bool keep_fields_;
};
