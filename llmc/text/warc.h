// Web archives: WARC (ISO 28500) and Common Crawl's WET.
//   WarcDocuments   the records of a file, in order. Conversions (WET) are plain texts; HTTP responses are passed on
//                   with their headers, for open_page(); all others are left out and counted
//   open_page       extracts the text of such a response, in many threads: by its type, after chunks and gzip, HTML by html.h
//   PageDocuments   a file of HTML, which is one document; open_html() gives its text
#pragma once
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/text.h"
#include "document_source.h"
#include "html.h"

// "Name: value" lines, as in WARC and HTTP.
class HeaderLines {
public:
    void add(std::string_view line) {
        const size_t colon = line.find(':');
        if (colon == std::string_view::npos) return;
        lines_.emplace_back(lower_ascii(line.substr(0, colon)), std::string(trimmed(line.substr(colon + 1))));
    }
    // "" if there is none; the name in lower case.
    std::string get(std::string_view name) const {
        for (const auto& [found, value] : lines_)
            if (found == name) return value;
        return "";
    }
    static std::string_view trimmed(std::string_view text) {
        const size_t begin = std::min(text.size(), text.find_first_not_of(" \t\r\n"));
        const size_t end = text.find_last_not_of(" \t\r\n");
        return text.substr(begin, end == std::string_view::npos ? 0 : end + 1 - begin);
    }

private:
    std::vector<std::pair<std::string, std::string>> lines_;
};

class WarcDocuments : public StreamDocuments {
public:
    WarcDocuments(std::unique_ptr<InputStream> in, const TextInput& input)
        : StreamDocuments(std::move(in)), keep_fields_(input.keep_fields) {}

    bool next(Chunk& chunk) override {
        std::string line;
        do
            if (!in_->read_line(line, most_line)) return false;
        while (is_blank(line));
        chunk.line = ++record_;
        if (line.compare(0, 5, "WARC/") != 0) refuse("does not start with WARC/");
        HeaderLines headers;
        for (int n = 0;; n++) {
            if (!in_->read_line(line, most_line)) refuse("is cut off within its header");
            if (is_blank(line)) break;
            if (n == 1000 || line.size() > most_line) refuse("has a header that is too long");
            headers.add(line);
        }
        const std::string length = headers.get("content-length");
        if (length.empty() || length.size() > 18 || length.find_first_not_of("0123456789") != std::string::npos)
            refuse("has no length (Content-Length)");
        const uint64_t bytes = strtoull(length.c_str(), nullptr, 10);

        const std::string type = lower_ascii(headers.get("warc-type")), content = lower_ascii(headers.get("content-type"));
        const bool is_text = type == "conversion" || (type == "resource" && content.compare(0, 10, "text/plain") == 0);
        const bool is_page = type == "response" && content.compare(0, 16, "application/http") == 0;
        if (!is_text && !is_page) chunk.left_out = of_type(type) + " records";
        else if (bytes > most_document_bytes) chunk.left_out = std::string("records of more than ") + most_document_name;
        if (!chunk.left_out.empty()) {
            skip(bytes);
            return true;
        }
        chunk.text.resize((size_t)bytes);
        if (in_->read(chunk.text.data(), chunk.text.size()) < chunk.text.size()) refuse("is cut off");
        if (is_page) chunk.holds = Chunk::response;
        if (is_text && chunk.text.empty()) chunk.left_out = "empty documents";
        if (!keep_fields_) return true;
        for (const auto& [header, field] : {std::pair("warc-target-uri", "url"), std::pair("warc-date", "date")})
            if (const std::string value = headers.get(header); !value.empty()) chunk.fields.set(field, value);
        return true;
    }

private:
    static constexpr size_t most_line = 1 << 16;

    // One of the known types; other names from a file are not repeated.
    static std::string of_type(const std::string& type) {
        for (const char* known : {"warcinfo", "request", "metadata", "revisit", "resource", "response", "continuation"})
            if (type == known) return type;
        return "other";
    }
    void skip(uint64_t bytes) {
        while (bytes > 0) {
            const size_t n = (size_t)std::min<uint64_t>(bytes, in_->peek(1).size());
            if (n == 0) refuse("is cut off");
            in_->skip(n);
            bytes -= n;
        }
    }
    [[noreturn]] void refuse(const char* what) const {
        fail("record %lld of %s %s; HINT: download or create the file again", (long long)record_,
             input_name(in_->name()).c_str(), what);
    }

    bool keep_fields_;
    int64_t record_ = 0;
};

// Decodes HTTP's chunked transfer; false if there are no chunks.
inline bool join_http_chunks(std::string_view body, std::string& joined) {
    while (true) {
        size_t digits = 0;
        while (digits < body.size() && isxdigit((unsigned char)body[digits])) digits++;
        const size_t newline = body.find('\n');
        if (digits == 0 || digits > 8 || newline == std::string_view::npos) return false;
        const size_t bytes = strtoull(std::string(body.substr(0, digits)).c_str(), nullptr, 16);
        body.remove_prefix(newline + 1);
        if (bytes == 0) return true;
        joined += body.substr(0, bytes);
        if (bytes >= body.size()) return true;  // the record was truncated, as crawlers do with long pages
        body.remove_prefix(bytes);
        body.remove_prefix(std::min(body.size(), body.find_first_not_of("\r\n")));
    }
}

#ifdef HAVE_ZLIB
// Decompresses a gzip body as far as possible, up to the limit; false if it is not gzip.
inline bool unpack_http_body(std::string_view packed, size_t limit, std::string& body) {
    z_stream z{};
    CHECK(inflateInit2(&z, 15 + 32) == Z_OK, "no memory for zlib");
    z.next_in = (const Bytef*)packed.data();
    z.avail_in = (uInt)packed.size();
    int result = Z_OK;
    while (result == Z_OK && body.size() <= limit) {
        const size_t before = body.size();
        body.resize(before + (1 << 16));
        z.next_out = (Bytef*)&body[before];
        z.avail_out = 1 << 16;
        result = inflate(&z, Z_NO_FLUSH);
        body.resize(before + (1 << 16) - z.avail_out);
    }
    inflateEnd(&z);
    return !body.empty();
}
#endif

inline constexpr size_t most_page_bytes = 8 << 20;

// The text of a page, or why it is left out. charset: HTTP's, or "".
inline void open_html(Chunk& chunk, std::string_view page, const std::string& charset, const std::string& file) {
    const auto leave_out = [&](const char* why) { chunk.left_out = why; };
    if (page.size() > most_page_bytes) return leave_out("pages of more than 8 MiB");
#ifdef HAVE_GUMBO
    (void)file;
    std::vector<html::Paragraph> paragraphs;
    if (!html::page_paragraphs(html::to_utf8(page, charset), paragraphs))
        return leave_out("pages nested too deep, with too many attributes or made to take long");
    chunk.text = html::without_boilerplate(paragraphs);
    if (chunk.text.empty()) leave_out("pages without text besides boilerplate");
#else
    (void)charset;
    fail("%s holds HTML, which this build cannot read; HINT: install libgumbo-dev and build again, or give the .wet.gz files",
         input_name(file).c_str());
#endif
}

// A file that is one page.
class PageDocuments : public StreamDocuments {
public:
    explicit PageDocuments(std::unique_ptr<InputStream> in) : StreamDocuments(std::move(in)) {}
    bool next(Chunk& chunk) override {
        if (done_) return false;
        done_ = true;
        chunk.text.resize(most_page_bytes + 1);
        chunk.text.resize(in_->read(chunk.text.data(), chunk.text.size()));
        chunk.text.shrink_to_fit();
        chunk.holds = Chunk::page;
        return true;
    }

private:
    bool done_ = false;
};

// Replaces an HTTP response by its text, or reports why it is left out.
inline void open_page(Chunk& chunk, const std::string& file) {
    const std::string whole = std::move(chunk.text);
    chunk.text.clear();
    const auto leave_out = [&](const char* why) { chunk.left_out = why; };

    std::string_view rest = whole;
    const auto line = [&] {
        const size_t end = std::min(rest.size(), rest.find('\n'));
        const std::string_view found = HeaderLines::trimmed(rest.substr(0, end));
        rest.remove_prefix(std::min(rest.size(), end + 1));
        return found;
    };
    const std::string_view status = line();
    if (status.substr(0, 5) != "HTTP/") return leave_out("responses that are not HTTP");
    if (status.substr(std::min(status.size(), status.find(' ')), 4) != " 200")
        return leave_out("responses of another status than 200");
    HeaderLines headers;
    for (std::string_view found = line(); !found.empty(); found = line()) headers.add(found);

    const std::string type = lower_ascii(headers.get("content-type"));
    const bool plain = type.compare(0, 10, "text/plain") == 0;
    const bool page = type.compare(0, 9, "text/html") == 0 || type.compare(0, 21, "application/xhtml+xml") == 0;
    if (!plain && !page) {
        for (const char* kind : {"image", "video", "audio", "application", "text", "font"})
            if (type.compare(0, strlen(kind), kind) == 0) chunk.left_out = std::string("responses of type ") + kind + "/...";
        if (chunk.left_out.empty()) leave_out("responses of other types");
        return;
    }
    std::string joined, unpacked;
    if (lower_ascii(headers.get("transfer-encoding")) == "chunked" && join_http_chunks(rest, joined)) rest = joined;
    const std::string packed = lower_ascii(headers.get("content-encoding"));
    if (!packed.empty() && packed != "identity") {
        bool undone = rest.substr(0, 2) != "\x1f\x8b" && packed == "gzip";  // crawlers decompress it and keep the header
#ifdef HAVE_ZLIB
        if (!undone && (packed == "gzip" || packed == "x-gzip" || packed == "deflate") &&
            unpack_http_body(rest, most_page_bytes, unpacked)) {
            rest = unpacked;
            undone = true;
        }
#endif
        const bool looks_undone = rest.substr(0, 64).find('<') != std::string_view::npos;
        if (!undone && !looks_undone) return leave_out("responses in an unsupported compression");
    }
    if (plain) {
        const std::string text = html::to_utf8(rest, html::charset_in(type));
        if (text.empty()) return leave_out("empty documents");
        if (count_odd_bytes(text).too_many()) return leave_out("text/plain responses that are not text");
        chunk.text = text;
        return;
    }
    open_html(chunk, rest, html::charset_in(type), file);
}
