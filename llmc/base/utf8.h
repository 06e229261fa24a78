// UTF-8 (RFC 3629): characters to bytes and back. Overlong forms, surrogates and codes above U+10FFFF are invalid.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

// Length of the valid UTF-8 sequence at the start of s; 0 if there is none.
inline size_t valid_utf8_length(const unsigned char* s, size_t n) {
    const auto follows = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
        return i < n && s[i] >= low && s[i] <= high;
    };
    const unsigned c = s[0];
    if (c < 0x80) return 1;
    if (c >= 0xc2 && c <= 0xdf) return follows(1) ? 2 : 0;
    if (c >= 0xe0 && c <= 0xef) return follows(1, c == 0xe0 ? 0xa0 : 0x80, c == 0xed ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
    if (c >= 0xf0 && c <= 0xf4)
        return follows(1, c == 0xf0 ? 0x90 : 0x80, c == 0xf4 ? 0x8f : 0xbf) && follows(2) && follows(3) ? 4 : 0;
    return 0;
}

// True if the byte starts a UTF-8 character or is one; else it continues one.
inline bool begins_character(char c) { return ((unsigned char)c & 0xc0) != 0x80; }
inline int64_t count_characters(std::string_view text) { return std::count_if(text.begin(), text.end(), begins_character); }

inline bool is_utf8(std::string_view text) {
    for (size_t i = 0; i < text.size();) {
        uint64_t eight = 128;  // no ASCII
        if (i + 8 <= text.size()) memcpy(&eight, &text[i], 8);
        if ((eight & 0x8080808080808080) == 0) {
            i += 8;
            continue;
        }
        const size_t n = valid_utf8_length((const unsigned char*)text.data() + i, text.size() - i);
        if (n == 0) return false;
        i += n;
    }
    return true;
}

// ASCII letters in lower case; all other bytes unchanged.
inline std::string lower_ascii(std::string_view text) {
    std::string s(text);
    for (char& c : s) c = (char)(c >= 'A' && c <= 'Z' ? c + 32 : c);
    return s;
}

inline std::string utf8(uint32_t c) {
    const auto byte = [](uint32_t bits, uint32_t mark) { return (char)(mark | bits); };
    const auto tail = [&](int shift) { return byte(c >> shift & 63, 0x80); };
    if (c < 0x80) return {(char)c};
    if (c < 0x800) return {byte(c >> 6, 0xc0), tail(0)};
    if (c < 0x10000) return {byte(c >> 12, 0xe0), tail(6), tail(0)};
    return {byte(c >> 18, 0xf0), tail(12), tail(6), tail(0)};
}

// The character at the start of `text`, which is not empty, and its length in bytes; an invalid byte has the code -1 and the
// length 1.
struct Utf8Character {
    int32_t code;
    size_t length;
};
inline Utf8Character first_character(std::string_view text) {
    const auto* s = (const unsigned char*)text.data();
    const size_t n = valid_utf8_length(s, text.size());
    switch (n) {
        case 1: return {s[0], 1};
        case 2: return {(s[0] & 31) << 6 | (s[1] & 63), 2};
        case 3: return {(s[0] & 15) << 12 | (s[1] & 63) << 6 | (s[2] & 63), 3};
        case 4: return {(s[0] & 7) << 18 | (s[1] & 63) << 12 | (s[2] & 63) << 6 | (s[3] & 63), 4};
        default: return {-1, 1};
    }
}

// Calls each(character, its bytes) for all of text in order.
template <class F>
void each_character(std::string_view text, F each) {
    while (!text.empty()) {
        const Utf8Character c = first_character(text);
        each(c.code, text.substr(0, c.length));
        text.remove_prefix(c.length);
    }
}

// Calls each(part, whether it is UTF-8) for the longest parts of text that are entirely UTF-8, and for the bytes between them.
template <class F>
void each_valid_part(std::string_view text, F each) {
    const auto* bytes = (const unsigned char*)text.data();
    for (size_t begin = 0, i = 0; begin < text.size(); begin = i) {
        const bool valid = valid_utf8_length(bytes + begin, text.size() - begin) > 0;
        while (i < text.size()) {
            uint64_t eight = ~uint64_t{0};
            if (valid && i + 8 <= text.size()) memcpy(&eight, bytes + i, 8);
            if ((eight & 0x8080808080808080) == 0) {  // ASCII
                i += 8;
                continue;
            }
            const size_t n = valid_utf8_length(bytes + i, text.size() - i);
            if ((n > 0) != valid) break;
            i += std::max<size_t>(n, 1);
        }
        each(text.substr(begin, i - begin), valid);
    }
}

inline bool begins_with(std::string_view text, std::string_view with) { return text.substr(0, with.size()) == with; }
inline bool ends_with(std::string_view text, std::string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}
inline constexpr std::string_view replacement_character = "\ufffd";
// Editors on Windows put it before a text in UTF-8; it is not part of the text.
inline constexpr std::string_view byte_order_mark = "\xef\xbb\xbf";
inline std::string_view without_byte_order_mark(std::string_view text) {
    return text.substr(begins_with(text, byte_order_mark) ? byte_order_mark.size() : 0);
}
