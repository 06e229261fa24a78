// What all finders of personal data share: characters around a place, and a place that was found.
#pragma once
#include <cstring>
#include <string>
#include <string_view>

#include "../base/utf8.h"

namespace pii {

inline bool is_digit_character(char c) { return c >= '0' && c <= '9'; }
// Part of a word where a character starts: letters of alphabets, which have two bytes. Scripts of three bytes, such as Chinese
// and Japanese, have no spaces around numbers and names.
inline bool is_word(char c) {
    return is_digit_character(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           ((c & 0x80) && (unsigned char)c < 0xe0);
}
inline bool is_ascii_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
inline bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
inline bool is_alnum(char c) { return is_ascii_letter(c) || is_digit_character(c); }

// A text with access around a place; 0 outside.
struct Text {
    std::string_view s;
    char operator[](size_t i) const { return i < s.size() ? s[i] : '\0'; }
    // Whether the character that ends before `at` is part of a word.
    bool is_word_before(size_t at) const {
        if (at == 0) return false;
        const char last = s[at - 1];
        return last & 0x80 ? at >= 2 && (unsigned char)s[at - 2] >= 0xc0 : is_word(last);
    }
    // The word before `at` with a space or punctuation between, in lower case: "ISBN: 0-306", "version 1.2"
    std::string word_before(size_t at) const {
        for (int most = 16; most > 0 && at > 0 && strchr(" \t:#=-(", s[at - 1]); most--) at--;
        size_t begin = at;
        while (begin > 0 && at - begin < 12 && is_ascii_letter(s[begin - 1])) begin--;
        std::string word(s.substr(begin, at - begin));
        for (char& c : word) c = (char)(c | 32);
        return word;
    }
    // Whether one of these words is among the 40 bytes before `at`. Words of letters must be whole; in lower case.
    bool has_before(size_t at, std::initializer_list<const char*> words) const {
        const size_t begin = at > 40 ? at - 40 : 0;
        const std::string before = lower_ascii(s.substr(begin, at - begin));
        for (const char* word : words)
            for (size_t found = before.find(word); found != std::string::npos; found = before.find(word, found + 1)) {
                const size_t end = found + strlen(word);
                const bool starts = found == 0 || !is_ascii_letter(before[found - 1]) || !is_ascii_letter(word[0]);
                if (starts && (end == before.size() || !is_ascii_letter(before[end]) || !is_ascii_letter(before[end - 1])))
                    return true;
            }
        return false;
    }
};

struct Found {
    const char* kind;  // "email"
    size_t begin, end;
};

}  // namespace pii
