// Documents as JSON lines, one object each: .jsonl, and .jsonl.gz or .jsonl.zst by the name. Many threads make lines
// (document_line) and one writes them. The file has a temporary name until finish(): an incomplete file never has the final
// name. The same documents give the same bytes.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/utf8.h"
#include "byte_source.h"
#include "json_scan.h"

// The line of a document: the text, followed by the fields unchanged; a field called "text" becomes "other_text". Bytes of the
// text that are not UTF-8 become U+FFFD.
inline std::string document_line(std::string_view text, const JsonFields& fields = {}) {
    std::string line = R"({"text":)";
    line.reserve(text.size() + text.size() / 16 + 64);
    append_json_string(line, text);
    for (const auto& [name, value] : fields.members()) {
        line += ',';
        append_json_string(line, name == "text" ? "other_text" : name);
        line += ':' + value;
    }
    return line += "}\n";
}

class DocumentWriter {
public:
    explicit DocumentWriter(const std::string& path) : file_(path), coding_(coding_of(path)) {
        if (coding_ == Coding::none) return;
        packed_.resize(1 << 17);
#ifdef HAVE_ZLIB
        if (coding_ == Coding::gzip)
            CHECK(deflateInit2(&gzip_, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "no memory for zlib");
#endif
#ifdef HAVE_ZSTD
        if (coding_ != Coding::zstd) return;
        zstd_ = ZSTD_createCCtx();
        CHECK(zstd_, "no memory for zstd");
        ZSTD_CCtx_setParameter(zstd_, ZSTD_c_checksumFlag, 1);
        ZSTD_CCtx_setParameter(zstd_, ZSTD_c_nbWorkers, 1);  // a library without threads ignores it
#endif
    }
    DocumentWriter(const DocumentWriter&) = delete;
    DocumentWriter& operator=(const DocumentWriter&) = delete;
    ~DocumentWriter() {
#ifdef HAVE_ZLIB
        if (coding_ == Coding::gzip) deflateEnd(&gzip_);
#endif
#ifdef HAVE_ZSTD
        ZSTD_freeCCtx(zstd_);
#endif
    }

    void write(std::string_view line) {
        pending_ += line;
        if (pending_.size() >= 1 << 20) flush(false);
    }
    // Completes the file: on the disk, and under its name.
    void finish() {
        flush(true);
        file_.commit();
    }

private:
    enum class Coding { none, gzip, zstd };

    static Coding coding_of(const std::string& path) {
        const Coding coding = ends_with(path, ".gz") ? Coding::gzip : ends_with(path, ".zst") ? Coding::zstd : Coding::none;
        [[maybe_unused]] const auto refuse = [&](const char* package, const char* ending) {
            fail("%s cannot be written: this build has no %s; HINT: install it and build again, or give a name without .%s",
                 path.c_str(), package, ending);
        };
#ifndef HAVE_ZLIB
        if (coding == Coding::gzip) refuse("zlib1g-dev", "gz");
#endif
#ifndef HAVE_ZSTD
        if (coding == Coding::zstd) refuse("libzstd-dev", "zst");
#endif
        return coding;
    }

    // Passes pending data on to the file; `last` ends the compressed stream.
    void flush([[maybe_unused]] bool last) {
        if (coding_ == Coding::none) file_.write(pending_);
#ifdef HAVE_ZLIB
        if (coding_ == Coding::gzip) {
            gzip_.next_in = (Bytef*)pending_.data();
            gzip_.avail_in = (uInt)pending_.size();
            do {
                gzip_.next_out = (Bytef*)packed_.data();
                gzip_.avail_out = (uInt)packed_.size();
                CHECK(deflate(&gzip_, last ? Z_FINISH : Z_NO_FLUSH) != Z_STREAM_ERROR, "zlib's state is damaged");
                file_.write(packed_.data(), packed_.size() - gzip_.avail_out);
            } while (gzip_.avail_out == 0);
        }
#endif
#ifdef HAVE_ZSTD
        if (coding_ == Coding::zstd) {
            ZSTD_inBuffer in = {pending_.data(), pending_.size(), 0};
            size_t left = 1;
            while (last ? left > 0 : in.pos < in.size) {
                ZSTD_outBuffer out = {packed_.data(), packed_.size(), 0};
                left = ZSTD_compressStream2(zstd_, &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
                CHECK(!ZSTD_isError(left), "zstd: %s", ZSTD_getErrorName(left));
                file_.write(packed_.data(), out.pos);
            }
        }
#endif
        pending_.clear();
    }

    FileWriter file_;
    std::string pending_, packed_;
    Coding coding_;
#ifdef HAVE_ZLIB
    z_stream gzip_{};
#endif
#ifdef HAVE_ZSTD
    ZSTD_CCtx* zstd_ = nullptr;
#endif
};
