// Compressed files, read as if they were not: gzip (RFC 1952; files of several members, as in WARC) and zstd (RFC 8878; several
// frames, skippable ones). The first bytes identify the format. Memory does not depend on the file: a window of 32 KiB, or of
// at most 128 MiB in zstd. A file that is damaged or cut off is refused with its name and the member that is bad; all bytes
// before that were already passed on, so the caller must drop its results from them. Files that grow to more than
// 2,000 times their size are refused, too (output_budget).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "../base/budget.h"
#include "../base/check.h"
#include "../base/file.h"
#include "../base/text.h"

#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<zlib.h>)
#define ZLIB_CONST  // zlib does not write to its input
#include <zlib.h>
#define HAVE_ZLIB 1
#endif
#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<zstd.h>)
#include <zstd.h>
#include <zstd_errors.h>
#define HAVE_ZSTD 1
#endif

// Position of the decompression: the member or frame, its start in the file, and the bytes of the file consumed.
class CompressedInput {
public:
    explicit CompressedInput(std::unique_ptr<InputStream> in) : in_(std::move(in)) {}
    InputStream& stream() { return *in_; }
    int64_t position() const { return in_->position(); }
    void begin_member() {
        member_++;
        member_at_ = consumed_;
    }
    bool first() const { return member_ == 0; }
    // After so many bytes came out.
    void made(size_t bytes) {
        if (budget_.spend(bytes, (uint64_t)consumed_)) return;
        fail("%s: %s expands to more than %s, which no text does; HINT: if that is intended, decompress it first",
             in_->name().c_str(), counted(consumed_, "byte").c_str(),
             human_bytes((double)budget_.allowed((uint64_t)consumed_)).c_str());
    }
    void skip(size_t bytes) {
        in_->skip(bytes);
        consumed_ += (int64_t)bytes;
    }
    // "FILE: its second member, from byte 1234 on, WHAT at byte 5678"
    [[noreturn]] void refuse(const char* format_name, const char* member_name, const std::string& what) const {
        const std::string place = member_ > 1 ? format("in %s %lld, which starts at byte %s, ", member_name, (long long)member_,
                                                       with_commas(member_at_).c_str())
                                              : "";
        const std::string name = in_->name() == "-" ? "standard input" : in_->name();
        fail("%s is not a complete %s file: %sat byte %s, %s; HINT: download or create it again", name.c_str(), format_name,
             place.c_str(), with_commas(consumed_).c_str(), what.c_str());
    }

private:
    std::unique_ptr<InputStream> in_;
    int64_t member_ = 0, member_at_ = 0, consumed_ = 0;
    Budget budget_ = output_budget;
};

#ifdef HAVE_ZLIB
class GzipSource : public ByteSource {
public:
    explicit GzipSource(std::unique_ptr<InputStream> in) : in_(std::move(in)) {
        CHECK(inflateInit2(&stream_, 15 + 16) == Z_OK, "no memory for zlib");  // 16: gzip's header and checksum
    }
    GzipSource(const GzipSource&) = delete;
    GzipSource& operator=(const GzipSource&) = delete;
    ~GzipSource() override { inflateEnd(&stream_); }
    int64_t position() const override { return in_.position(); }

    size_t read(char* out, size_t bytes) override {
        stream_.next_out = (Bytef*)out;
        stream_.avail_out = (uInt)std::min<size_t>(bytes, 1 << 30);
        const uInt room = stream_.avail_out;
        while (stream_.avail_out == room) {
            if (!in_member_ && !next_member()) return 0;
            const std::string_view in = in_.stream().peek(1);
            stream_.next_in = (const Bytef*)in.data();
            stream_.avail_in = (uInt)in.size();
            const int result = inflate(&stream_, Z_NO_FLUSH);
            in_.skip(in.size() - stream_.avail_in);
            if (result == Z_STREAM_END) in_member_ = false;
            else if (in.empty() && stream_.avail_out == room) refuse("it is cut off");
            else if (result != Z_OK && result != Z_BUF_ERROR)
                refuse(format("it is damaged (%s)", stream_.msg ? stream_.msg : "zlib refuses it"));
        }
        in_.made(room - stream_.avail_out);
        return room - stream_.avail_out;
    }

private:
    [[noreturn]] void refuse(const std::string& what) const { in_.refuse("gzip", "member", what); }
    // Returns false at the end of the file. Zeros after the last member are padding, as in gzip(1).
    bool next_member() {
        std::string_view next = in_.stream().peek(2);
        while (!in_.first() && !next.empty() && next[0] == 0) {
            in_.skip(1);
            next = in_.stream().peek(2);
        }
        if (next.empty()) return false;
        if (next.substr(0, 2) != "\x1f\x8b") refuse("other data follow");
        in_.begin_member();
        inflateReset(&stream_);
        return in_member_ = true;
    }

    CompressedInput in_;
    z_stream stream_{};
    bool in_member_ = false;
};
#endif

#ifdef HAVE_ZSTD
class ZstdSource : public ByteSource {
public:
    explicit ZstdSource(std::unique_ptr<InputStream> in) : in_(std::move(in)), context_(ZSTD_createDCtx()) {
        CHECK(context_, "no memory for zstd");
    }
    ZstdSource(const ZstdSource&) = delete;
    ZstdSource& operator=(const ZstdSource&) = delete;
    ~ZstdSource() override { ZSTD_freeDCtx(context_); }
    int64_t position() const override { return in_.position(); }

    size_t read(char* out, size_t bytes) override {
        ZSTD_outBuffer output = {out, bytes, 0};
        while (output.pos == 0) {
            const std::string_view in = in_.stream().peek(1);
            if (in.empty() && !in_frame_) return 0;
            if (!in_frame_) in_.begin_member();
            ZSTD_inBuffer input = {in.data(), in.size(), 0};
            const size_t result = ZSTD_decompressStream(context_, &output, &input);
            in_.skip(input.pos);
            if (ZSTD_getErrorCode(result) == ZSTD_error_frameParameter_windowTooLarge) {
                const std::string name = in_.stream().name();
                fail("%s needs a zstd window of more than 128 MiB of memory; HINT: zstdcat --long=31 %s | train_gpt ... -",
                     name.c_str(), shell_word(name).c_str());
            }
            if (ZSTD_isError(result)) refuse(format("it is damaged (%s)", ZSTD_getErrorName(result)));
            in_frame_ = result != 0;
            if (in_frame_ && in.empty() && output.pos == 0) refuse("it is cut off");
        }
        in_.made(output.pos);
        return output.pos;
    }

private:
    [[noreturn]] void refuse(const std::string& what) const { in_.refuse("zstd", "frame", what); }

    CompressedInput in_;
    ZSTD_DCtx* context_;
    bool in_frame_ = false;
};
#endif

// The stream, decompressed if this build can. If it cannot, the bytes are unchanged, and text_format.h refuses them with the
// command that helps.
inline std::unique_ptr<InputStream> decompressed(std::unique_ptr<InputStream> in) {
    [[maybe_unused]] const std::string name = in->name();
    [[maybe_unused]] const std::string_view first = in->peek(4).substr(0, 4);
#ifdef HAVE_ZLIB
    if (first.substr(0, 2) == "\x1f\x8b")
        return std::make_unique<InputStream>(name, std::make_unique<GzipSource>(std::move(in)));
#endif
#ifdef HAVE_ZSTD
    const bool skippable = first.size() == 4 && ((unsigned char)first[0] & 0xf0) == 0x50 && first.substr(1) == "\x2a\x4d\x18";
    if (first == "\x28\xb5\x2f\xfd" || skippable)
        return std::make_unique<InputStream>(name, std::make_unique<ZstdSource>(std::move(in)));
#endif
    return in;
}
// A file, a pipe or standard input, decompressed.
inline std::unique_ptr<InputStream> open_input(const std::string& name) {
    return decompressed(std::make_unique<InputStream>(name));
}
