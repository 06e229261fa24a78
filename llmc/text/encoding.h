// Texts in other encodings than UTF-8, through iconv.
//   EncodedSource    a stream in an encoding, as UTF-8; refused where more than 1 in 200 characters are not of that encoding
//   guess_encoding   of the start of a text that is not UTF-8, the encoding that it shows beyond doubt, or ""
#pragma once
#include <iconv.h>

#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "text_format.h"

class EncodingConverter {
public:
    explicit EncodingConverter(const std::string& name) : convert_(iconv_open("UTF-8", name.c_str())) {}
    EncodingConverter(const EncodingConverter&) = delete;
    EncodingConverter& operator=(const EncodingConverter&) = delete;
    ~EncodingConverter() {
        if (known()) iconv_close(convert_);
    }
    bool known() const { return convert_ != (iconv_t)-1; }  // NOLINT(performance-no-int-to-ptr): iconv's own value

    // Converts what fits into `out`, of at least 8 bytes: bytes that are not of the encoding become U+FFFD, which `bad` counts.
    // Returns the numbers of bytes taken and made. A character that is cut off at the end is left, unless it is the last.
    std::pair<size_t, size_t> convert(std::string_view in, char* out, size_t room, bool last, int64_t& bad) {
        char *from = const_cast<char*>(in.data()), *to = out;  // iconv does not write to its input
        size_t left = in.size();
        while (left > 0 && room >= replacement_character.size()) {
            if (iconv(convert_, &from, &left, &to, &room) != (size_t)-1) continue;
            if (errno == E2BIG || (errno == EINVAL && !last) || room < replacement_character.size()) break;
            memcpy(to, replacement_character.data(), replacement_character.size());
            to += replacement_character.size();
            room -= replacement_character.size();
            from++;
            left--;
            bad++;
        }
        return {in.size() - left, (size_t)(to - out)};
    }

private:
    iconv_t convert_;
};

inline void check_encoding(const std::string& name) {
    if (name.empty() || name == "auto" || EncodingConverter(name).known()) return;
    fail_usage("--encoding is '%s', which iconv does not know; HINT: iconv -l lists the names: latin1, cp932, utf-16, auto",
               name.c_str());
}

class EncodedSource : public ByteSource {
public:
    EncodedSource(std::unique_ptr<InputStream> in, const std::string& encoding)
        : in_(std::move(in)), encoding_(encoding), converter_(encoding) {
        CHECK(converter_.known(), "check_encoding() comes first");
    }
    int64_t position() const override { return in_->position(); }
    size_t read(char* out, size_t bytes) override {
        if (at_ == end_) convert_more();
        const size_t n = std::min(bytes, end_ - at_);
        memcpy(out, made_.data() + at_, n);
        at_ += n;
        return n;
    }

private:
    void convert_more() {
        at_ = end_ = 0;
        while (end_ == 0) {
            const std::string_view in = in_->peek(16);
            if (in.empty()) return;
            const auto [taken, made] = converter_.convert(in, made_.data(), made_.size(), in.size() < 16, bad_);
            in_->skip(taken);
            bytes_ += (int64_t)taken;
            end_ = made;
            if (bad_ > 16 && bad_ > bytes_ / 200)
                fail(
                    "%s is not in the encoding %s: %s of its first %s bytes are not; HINT: --encoding names another one, "
                    "--encoding auto tries to find it",
                    input_name(in_->name()).c_str(), encoding_.c_str(), with_commas(bad_).c_str(), with_commas(bytes_).c_str());
        }
    }

    std::unique_ptr<InputStream> in_;
    std::string encoding_, made_ = std::string(1 << 16, '\0');  // UTF-8, from at_ to end_ not passed on yet
    size_t at_ = 0, end_ = 0;
    EncodingConverter converter_;
    int64_t bad_ = 0, bytes_ = 0;
};

// A text in an encoding: its characters beyond ASCII, how many of them are kana or Chinese ones, and bytes that are none.
struct Decoded {
    int64_t others = 0, kana = 0, han = 0, bad = 0;
};
inline Decoded decode_as(std::string_view text, const char* encoding) {
    Decoded found;
    EncodingConverter converter(encoding);
    if (!converter.known()) {
        found.bad = (int64_t)text.size();
        return found;
    }
    std::string out(4 * text.size() + 16, '\0');
    const auto [taken, made] = converter.convert(text, out.data(), out.size(), false, found.bad);
    out.resize(made);
    for (size_t i = 0; i < out.size();) {
        const uint32_t c = next_codepoint(out, i);
        if (c < 0x80) continue;
        found.others++;
        found.kana += c >= 0x3041 && c <= 0x30fe;
        found.han += c >= 0x4e00 && c <= 0x9fff;
    }
    return found;
}

// Only where a text cannot be taken for another: Japanese by its kana, and languages of Western Europe, whose
// letters beyond ASCII are few and seldom three in a row. Cyrillic, Greek, Chinese and Korean have several encodings
// that look alike.
inline std::string guess_encoding(std::string_view first) {
    if (first.substr(0, 2) == "\xff\xfe" || first.substr(0, 2) == "\xfe\xff") return "UTF-16";
    std::string best;
    int64_t most = 0;
    for (const char* name : {"CP932", "EUC-JP"}) {
        const Decoded d = decode_as(first, name);
        if (d.bad > (int64_t)first.size() / 1000 || d.others < 5 || 5 * d.kana < d.others || d.kana <= most) continue;
        if (10 * (d.kana + d.han) < 6 * d.others) continue;
        most = d.kana;
        best = name;
    }
    if (!best.empty()) return best;
    int64_t high = 0, in_runs = 0, run = 0, undefined = 0;
    for (const char byte : first) {
        const auto c = (unsigned char)byte;
        run = c < 0x80 ? 0 : run + 1;
        high += c >= 0x80;
        in_runs += run >= 3;
        undefined += c == 0x81 || c == 0x8d || c == 0x8f || c == 0x90 || c == 0x9d;
    }
    return high > 0 && undefined == 0 && 20 * in_runs <= high && 5 * high < (int64_t)first.size() ? "WINDOWS-1252" : "";
}
