// Tables as text (CSV by RFC 4180, TSV): the rows as documents, the text in the column that --json-keys names, the other
// columns as fields. The first line has the columns' names.
//
// A field that starts with a quote ends with one, before a delimiter or the end of the line, and may hold both and line ends; a
// quote in it is doubled. Where that is not so the quote is part of the text: many TSV files quote nothing. A comma between
// fields may be a semicolon, a tab or a bar: whichever is most frequent in the first line. A row that has more or fewer fields
// than the first line is a bad line.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"
#include "document_source.h"

class TableDocuments : public StreamDocuments {
public:
    // delimiter: 0 if the first line shall show it.
    TableDocuments(std::unique_ptr<InputStream> in, const TextInput& input, char delimiter)
        : StreamDocuments(std::move(in)), keep_fields_(input.keep_fields || input.open_record), delimiter_(delimiter) {
        if (!delimiter_) delimiter_ = find_delimiter();
        while (columns_.empty()) {
            if (!read_record(columns_)) return;  // an empty file
            if (columns_.size() == 1 && columns_[0].empty()) columns_.clear();
        }
        for (std::string& name : columns_) {
            name.erase(0, std::min(name.size(), name.find_first_not_of(" \t")));
            name.erase(name.find_last_not_of(" \t") + 1);
        }
        if (!input.open_record) choose_column(input);
    }
    // The name of the text's column.
    const std::string& column() const { return column_; }

    bool next(Chunk& chunk) override {
        std::vector<std::string> fields;
        do
            if (!read_record(fields)) return false;
        while (fields.size() == 1 && fields[0].empty() && columns_.size() > 1);  // a blank line
        chunk.line = begin_line_;
        chunk.is_record = true;
        if (fields.size() != columns_.size()) {
            chunk.problem =
                format("it has %s, the first line has %zu", counted((int64_t)fields.size(), "field").c_str(), columns_.size());
            return true;
        }
        if (!column_.empty() || !keep_fields_) chunk.text = std::move(fields[text_]);
        if (!keep_fields_) return true;
        for (size_t i = 0; i < fields.size(); i++)
            if (column_.empty() || i != text_) chunk.fields.add(columns_[i], json_text(nlohmann::json(fields[i])));
        return true;
    }

private:
    std::string name() const { return input_name(in_->name()); }

    void choose_column(const TextInput& input) {
        const auto at = [&](const std::string& name) {
            return (size_t)(std::find(columns_.begin(), columns_.end(), name) - columns_.begin());
        };
        text_ = at(input.json_key);
        if (text_ == columns_.size() && input.json_key == "text") {
            text_ = columns_.size() == 1 ? 0 : columns_.size();
            for (const char* usual : {"content", "Text", "TEXT", "document", "body", "article", "sentence", "passage"})
                if (text_ == columns_.size()) text_ = at(usual);
        }
        const std::string names = joined(columns_, [](const std::string& column) { return column.substr(0, 40); });
        if (text_ == columns_.size())
            fail(
                "%s has no column '%s'; its first line has the columns %.300s; HINT: --json-keys COLUMN names the text's, "
                "--format text reads the lines unchanged",
                name().c_str(), input.json_key.c_str(), printable(names).c_str());
        column_ = columns_[text_];
        if (std::count(columns_.begin(), columns_.end(), column_) > 1)
            fail("%s has several columns '%s'; HINT: rename the others in its first line", name().c_str(),
                 printable(column_).c_str());
    }

    // By the first line; Excel writes it as "sep=;".
    char find_delimiter() {
        std::string_view line = in_->peek(first_bytes);
        line = line.substr(0, line.find('\n'));
        if (begins_with(line, "sep=") && line.size() <= 6 && line.size() > 4) {
            const char found = line[4];
            std::string said;
            read_line(said);
            return found;
        }
        char best = ',';
        int64_t most = 0;
        for (const char c : {',', ';', '\t', '|'}) {
            int64_t n = 0;
            bool quoted = false;
            for (const char here : line) {
                quoted ^= here == '"';
                n += here == c && !quoted;
            }
            if (n > most) {
                most = n;
                best = c;
            }
        }
        return best;
    }

    // The next bytes: those that were read before their quote turned out to be text, then the stream's.
    bool more() {
        if (at_ < again_.size()) {
            now_ = std::string_view(again_).substr(at_);
            return true;
        }
        if (!keeps_) {
            again_.clear();
            at_ = 0;
        }
        now_ = in_->peek(1);
        return !now_.empty();
    }
    void consume(size_t n) {
        line_ += std::count(now_.begin(), now_.begin() + (std::ptrdiff_t)n, '\n');
        if (at_ < again_.size()) at_ += n;
        else {
            if (keeps_) {
                again_.append(now_.substr(0, n));
                at_ = again_.size();
            }
            in_->skip(n);
        }
        now_.remove_prefix(n);
    }

    // False at the end.
    bool read_record(std::vector<std::string>& fields) {
        fields.clear();
        begin_line_ = line_ + 1;
        if (!more()) return false;
        size_t bytes = 0;
        while (true) {
            std::string field;
            const End end = more() && now_[0] == '"' ? read_quoted(field) : read_plain(field, "");
            if ((bytes += field.size()) > most_document_bytes || fields.size() > most_columns)
                fail(
                    "%s:%lld starts a row of more than %s or %zu columns; HINT: if it is not a table, --format text reads it "
                    "unchanged",
                    name().c_str(), (long long)begin_line_, most_document_name, most_columns);
            fields.push_back(std::move(field));
            if (end != End::field) return true;
        }
    }

    enum class End { field, record };
    // Up to the delimiter or the end of the line. before: the part of the field already read.
    End read_plain(std::string& field, const std::string& before) {
        field = before;
        while (more()) {
            const size_t n = std::min(now_.size(), std::min(now_.find(delimiter_), now_.find('\n')));
            if (field.size() + n > most_document_bytes)
                fail("%s:%lld starts a row of more than %s; HINT: if it is not a table, --format text reads it unchanged",
                     name().c_str(), (long long)begin_line_, most_document_name);
            field.append(now_.substr(0, n));
            const bool ends = n < now_.size();
            const char c = ends ? now_[n] : '\0';
            consume(n + ends);
            if (!ends) continue;
            if (c == delimiter_) return End::field;
            break;
        }
        if (!field.empty() && field.back() == '\r') field.pop_back();
        return End::record;
    }

    // A field that starts with a quote. Its bytes are kept: if it does not end as such a field must, they are read once more.
    End read_quoted(std::string& field) {
        const int64_t line = line_;
        const size_t mark = at_;
        size_t bytes = 0;
        const auto ended = [&](End end) {
            keeps_ = false;
            return end;
        };
        keeps_ = true;
        consume(1);
        while (more() && bytes <= most_document_bytes) {
            const size_t n = std::min(now_.find('"'), now_.size());
            field.append(now_.substr(0, n));
            bytes += n + 1;
            const bool quote = n < now_.size();
            consume(n + quote);
            if (!quote) continue;
            const char after = more() ? now_[0] : '\n';
            if (after == '"') field += '"';
            else if (after != delimiter_ && after != '\n' && after != '\r') return quote_is_text(field, mark, line);
            if (!now_.empty()) consume(1);
            if (after == '"') continue;
            if (after == delimiter_) return ended(End::field);
            if (after == '\r' && more() && now_[0] == '\n') consume(1);
            return ended(End::record);
        }
        if (line_ > line && delimiter_ != '\t')
            fail(
                "%s:%lld: a field in quotes starts here and has no end within %s; HINT: is the file cut off? --format text "
                "reads the lines unchanged",
                name().c_str(), (long long)line + 1, bytes > most_document_bytes ? most_document_name : "the file");
        return quote_is_text(field, mark, line);
    }
    // Reads the field once more, its quote being text.
    End quote_is_text(std::string& field, size_t mark, int64_t line) {
        keeps_ = false;
        at_ = mark + 1;
        line_ = line;
        return read_plain(field, "\"");
    }

    static constexpr size_t most_columns = 100000;
    bool keep_fields_;
    char delimiter_;
    std::vector<std::string> columns_;
    std::string column_;
    size_t text_ = 0;
    int64_t begin_line_ = 0;
    std::string again_;  // bytes that are read once more, from at_ on
    size_t at_ = 0;
    bool keeps_ = false;  // keeps the bytes read from the stream in again_
    std::string_view now_;
};
