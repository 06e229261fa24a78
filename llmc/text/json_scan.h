// Extracts the text under one key of a JSON object, without making values of the others: a line of a corpus is read once, 16
// bytes at a time. Accepts valid JSON (RFC 8259) like nlohmann::json; unusual cases are left to that parser: no such key, no
// string under it, the key twice, deep nesting, invalid text.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/json.h"
#include "../base/utf8.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// The other members of an object. Values are kept as they are written: a number of thirty digits is unchanged, and so are the
// order of keys and repeated keys.
class JsonFields {
public:
    const std::vector<std::pair<std::string, std::string>>& members() const { return members_; }  // names, and values as JSON
    // The value as JSON; empty: no such name.
    std::string_view get(std::string_view name) const {
        for (const auto& [other, value] : members_)
            if (other == name) return value;
        return {};
    }
    // Removes line ends between the parts of a value: the fields are in one line.
    void add(std::string name, std::string_view value) {
        std::string line(value);
        line.erase(std::remove_if(line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r'; }), line.end());
        members_.emplace_back(std::move(name), std::move(line));
    }
    // Replaces the value under this name.
    void set(const std::string& name, const nlohmann::ordered_json& value) {
        const auto same = [&](const auto& member) { return member.first == name; };
        members_.erase(std::remove_if(members_.begin(), members_.end(), same), members_.end());
        members_.emplace_back(name, json_text(value));
    }
    // Removes the first member and returns its value.
    std::string take_first() {
        std::string value = std::move(members_.at(0).second);
        members_.erase(members_.begin());
        return value;
    }
    std::string object() const {
        std::string text = "{";
        for (const auto& [name, value] : members_)
            text += (text.size() > 1 ? "," : "") + json_text(nlohmann::json(name)) + ":" + value;
        return text + "}";
    }

private:
    std::vector<std::pair<std::string, std::string>> members_;
};

class JsonScan {
public:
    // True if the line is an object that has a string under `key`, which is appended to `text`; the other members are added to
    // `fields`, unless null. If false, the outputs are undefined.
    static bool find(std::string_view line, std::string_view key, std::string& text, JsonFields* fields = nullptr) {
        JsonScan scan{line.data(), line.data() + line.size()};
        return scan.object(key, text, fields);
    }
    static constexpr int most_levels = 60;  // of brackets in a value

private:
    JsonScan(const char* begin, const char* end) : p_(begin), end_(end) {}

    bool object(std::string_view key, std::string& text, JsonFields* fields) {
        if (!take('{')) return false;
        bool found = false, ended = take('}');
        std::string unescaped;
        if (!ended) do {
                std::string_view name;
                if (!take('"') || !read_name(name, unescaped) || !take(':')) return false;
                skip_blanks();
                const char* value = p_;
                if (name != key) {
                    if (!skip_value()) return false;
                    if (fields) fields->add(std::string(name), std::string_view(value, (size_t)(value_end_ - value)));
                    continue;
                }
                if (found || !take('"') || !string(&text)) return false;
                found = true;
            } while (take(','));
        if (!found || (!ended && !take('}'))) return false;
        skip_blanks();
        return p_ == end_;
    }

    void skip_blanks() {
        while (p_ < end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\n' || *p_ == '\r')) p_++;
    }
    bool take(char c) {
        skip_blanks();
        if (p_ == end_ || *p_ != c) return false;
        p_++;
        return true;
    }
    // A view of the line or, if there are escapes in it, of the unescaped text.
    bool read_name(std::string_view& name, std::string& unescaped) {
        const char* begin = p_;
        if (!string(nullptr)) return false;
        name = std::string_view(begin, (size_t)(p_ - begin) - 1);
        if (name.find('\\') == std::string_view::npos) return true;
        p_ = begin;
        unescaped.clear();
        string(&unescaped);
        name = unescaped;
        return true;
    }

    // Any value, up to value_end_, without recursion: `closers` has a bit for each open bracket, set for an object's.
    bool skip_value() {
        uint64_t closers = 0;
        int depth = 0;
        while (true) {
            skip_blanks();
            if (p_ == end_) return false;
            const char c = *p_;
            if (c == '{' || c == '[') {
                p_++;
                if (++depth > most_levels) return false;
                closers = closers << 1 | (c == '{');
                if (!take(c == '{' ? '}' : ']')) {
                    if (c == '{' && !begin_member()) return false;
                    continue;
                }
                depth--;
                closers >>= 1;
            } else if (c == '"') {
                p_++;
                if (!string(nullptr)) return false;
            } else if (!(c == '-' || (c >= '0' && c <= '9') ? number() : literal())) return false;
            // A value has ended, and with it all brackets that close here.
            while (true) {
                value_end_ = p_;
                if (depth == 0) return true;
                if (take(',')) {
                    if ((closers & 1) && !begin_member()) return false;
                    break;
                }
                if (!take(closers & 1 ? '}' : ']')) return false;
                depth--;
                closers >>= 1;
            }
        }
    }
    bool begin_member() { return take('"') && string(nullptr) && take(':'); }

    bool literal() {
        for (const std::string_view word : {"true", "false", "null"})
            if ((size_t)(end_ - p_) >= word.size() && std::string_view(p_, word.size()) == word) {
                p_ += word.size();
                return true;
            }
        return false;
    }
    bool digits() {
        const char* begin = p_;
        while (p_ < end_ && *p_ >= '0' && *p_ <= '9') p_++;
        return p_ > begin;
    }
    bool number() {
        const char* begin = p_;
        if (*p_ == '-') p_++;
        if (p_ < end_ && *p_ == '0') p_++;
        else if (!digits()) return false;
        if (p_ < end_ && *p_ == '.') {
            p_++;
            if (!digits()) return false;
        }
        if (p_ < end_ && (*p_ == 'e' || *p_ == 'E')) {
            p_++;
            if (p_ < end_ && (*p_ == '+' || *p_ == '-')) p_++;
            if (!digits()) return false;
            return std::isfinite(strtod(std::string(begin, p_).c_str(), nullptr));
        }
        return p_ - begin < 300;  // no overflow
    }

    // From after the opening quote to after the closing one. Appends the unescaped text to `out`, unless null.
    bool string(std::string* out) {
        while (true) {
            const char* begin = p_;
            if (!plain_run()) return false;
            if (out) out->append(begin, (size_t)(p_ - begin));
            if (*p_++ == '"') return true;
            if (!escape(out)) return false;  // after a backslash
        }
    }
    // Up to the next quote or backslash; false if the string is truncated, or has control characters or invalid UTF-8 before.
    bool plain_run() {
        while (true) {
#if defined(__SSE2__)
            const __m128i quote = _mm_set1_epi8('"'), backslash = _mm_set1_epi8('\\'), space = _mm_set1_epi8(0x20);
            while (end_ - p_ >= 16) {
                const __m128i bytes = _mm_loadu_si128((const __m128i*)p_);
                // Compared as signed numbers, non-ASCII bytes are below the space, too.
                const __m128i special = _mm_or_si128(
                    _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, backslash)), _mm_cmplt_epi8(bytes, space));
                const int mask = _mm_movemask_epi8(special);
                if (mask) {
                    p_ += __builtin_ctz((unsigned)mask);
                    break;
                }
                p_ += 16;
            }
#endif
            while (p_ < end_ && (unsigned char)*p_ >= 0x20 && (unsigned char)*p_ < 0x80 && *p_ != '"' && *p_ != '\\') p_++;
            if (p_ == end_ || (unsigned char)*p_ < 0x20) return false;
            if (*p_ == '"' || *p_ == '\\') return true;
            while (p_ < end_ && (unsigned char)*p_ >= 0x80) {
                const size_t n = valid_utf8_length((const unsigned char*)p_, (size_t)(end_ - p_));
                if (n == 0) return false;
                p_ += n;
            }
        }
    }
    bool escape(std::string* out) {
        if (p_ == end_) return false;
        const char c = *p_++;
        char meant = c;
        switch (c) {
            case '"':
            case '\\':
            case '/': break;
            case 'b': meant = '\b'; break;
            case 'f': meant = '\f'; break;
            case 'n': meant = '\n'; break;
            case 'r': meant = '\r'; break;
            case 't': meant = '\t'; break;
            case 'u': return character(out);
            default: return false;
        }
        if (out) *out += meant;
        return true;
    }
    bool hex(uint32_t& value) {
        if (end_ - p_ < 4) return false;
        value = 0;
        for (int i = 0; i < 4; i++) {
            const char c = *p_++;
            const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
            if (digit < 0) return false;
            value = value << 4 | (uint32_t)digit;
        }
        return true;
    }
    // After \u: four hexadecimal digits, or a pair of surrogates.
    bool character(std::string* out) {
        uint32_t c = 0, low = 0;
        if (!hex(c)) return false;
        if (c >= 0xdc00 && c < 0xe000) return false;
        if (c >= 0xd800 && c < 0xdc00) {
            if (end_ - p_ < 2 || p_[0] != '\\' || p_[1] != 'u') return false;
            p_ += 2;
            if (!hex(low) || low < 0xdc00 || low > 0xdfff) return false;
            c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
        }
        if (out) *out += utf8(c);
        return true;
    }

    const char *p_, *end_, *value_end_ = nullptr;
};
