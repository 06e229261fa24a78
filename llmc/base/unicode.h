// Unicode: classes of characters, graphemes, lower case, and the four normal forms (UAX 15) of text in UTF-8 (utf8.h).
//
// The tables of Unicode come from libutf8proc (2.8: Unicode 15), which is optional at build time: without it, functions that
// need the tables fail with the name of the package to install. Bytes that are not UTF-8 are never changed.
//
//   nfc, nfd     "é" is one character, or the letter and its accent; characters that look alike become the same bytes
//   nfkc, nfkd   also without differences of form: "ﬁ" becomes "fi", "Ａ" becomes "A", "½" becomes "1⁄2"
#pragma once
#if !defined(NO_OPTIONAL_LIBRARIES) && __has_include(<utf8proc.h>)
#include <utf8proc.h>
#define HAVE_UTF8PROC 1
#else
#define HAVE_UTF8PROC 0
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "utf8.h"

// Unicode's property White_Space.
inline bool is_space(int32_t c) {
    return c == ' ' || (c >= '\t' && c <= '\r') || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

// Python's str.isspace(): also four ASCII separators.
inline bool is_python_space(int32_t c) { return is_space(c) || (c >= 0x1c && c <= 0x1f); }
// `s` without the blank characters at its ends.
template <class Blank>
std::string_view stripped(std::string_view s, Blank is_blank, bool left = true, bool right = true) {
    size_t begin = s.size(), end = 0, at = 0;
    each_character(s, [&](int32_t c, std::string_view bytes) {
        if (!is_blank(c)) {
            begin = std::min(begin, at);
            end = at + bytes.size();
        }
        at += bytes.size();
    });
    if (!left) begin = 0;
    if (!right) end = s.size();
    return begin < end ? s.substr(begin, end - begin) : std::string_view();
}
// Like Python's str.rstrip.
inline std::string_view without_trailing_space(std::string_view s) { return stripped(s, is_python_space, false); }

#if HAVE_UTF8PROC
inline void need_unicode(const char*) {}
#else
[[noreturn]] inline void need_unicode(const char* what) {
    fail(
        "%s needs Unicode tables, but this program was built without libutf8proc; HINT: apt-get install libutf8proc-dev, then "
        "build again",
        what);
}
#endif

// The general category by its two letters ("Lu", "Nd", "Po"); "Cn" for unassigned characters and for -1.
inline const char* general_category([[maybe_unused]] int32_t c) {
    need_unicode("the category of a character");
#if HAVE_UTF8PROC
    return utf8proc_category_string(c);
#endif
}
inline bool is_letter(int32_t c) { return general_category(c)[0] == 'L'; }
inline bool is_mark(int32_t c) { return general_category(c)[0] == 'M'; }
inline bool is_number(int32_t c) { return general_category(c)[0] == 'N'; }  // digits, fractions, Roman numerals, circled ones
inline bool is_punctuation(int32_t c) { return general_category(c)[0] == 'P'; }

// The lower case of a character, as a single character.
inline int32_t lower(int32_t c) {
    if (c >= 0 && c < 0x80) return c >= 'A' && c <= 'Z' ? c + 32 : c;
    need_unicode("lower case");
#if HAVE_UTF8PROC
    return utf8proc_tolower(c);
#endif
}
// The lower case of a text, character by character: only U+0130 becomes two.
inline std::string lowercase(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    each_character(text, [&](int32_t c, std::string_view bytes) {
        if (c < 0) out += bytes;
        else if (c == 0x130) out += "i\u0307";
        else out += utf8((uint32_t)lower(c));
    });
    return out;
}

// Calls each(grapheme) for each user-perceived character (UAX 29): a letter with its accents, an emoji of several parts.
template <class F>
void each_grapheme(std::string_view text, F each) {
    need_unicode("a grapheme");
#if HAVE_UTF8PROC
    size_t begin = 0, at = 0;
    int32_t before = -1, state = 0;
    each_character(text, [&](int32_t c, std::string_view bytes) {
        if (before < 0 || c < 0) state = 0;  // state of the previous character
        if (at > begin && (before < 0 || c < 0 || utf8proc_grapheme_break_stateful(before, c, &state))) {
            each(text.substr(begin, at - begin));
            begin = at;
        }
        before = c;
        at += bytes.size();
    });
    if (at > begin) each(text.substr(begin));
#else
    (void)text;
    (void)each;
#endif
}

enum class NormalForm { nfc, nfd, nfkc, nfkd };

#if HAVE_UTF8PROC
// Unicode's canonical order: accents on the same letter by their combining class. (utf8proc_decompose() also does it, in
// quadratic time: 29 seconds for 100,000 accents.)
inline void order_marks(utf8proc_int32_t* begin, utf8proc_int32_t* end) {
    const auto mark_class = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
    const auto before = [&](utf8proc_int32_t a, utf8proc_int32_t b) { return mark_class(a) < mark_class(b); };
    while (begin < end) {
        utf8proc_int32_t* last = begin;
        while (last < end && mark_class(*last) != 0) last++;
        if (!std::is_sorted(begin, last, before)) std::stable_sort(begin, last, before);
        begin = last + 1;
    }
}
#endif

// Only non-ASCII characters take the slow path, together with the ASCII character before them, which an accent may belong to:
// no form changes ASCII, and nothing composes with an ASCII character that follows it.
inline std::string normalize_unicode(std::string_view text, NormalForm form) {
    need_unicode("a normal form of Unicode");
    std::string out;
#if HAVE_UTF8PROC
    const bool composes = form == NormalForm::nfc || form == NormalForm::nfkc;
    const bool compatible = form == NormalForm::nfkc || form == NormalForm::nfkd;
    const int options =
        UTF8PROC_STABLE | (composes ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) | (compatible ? UTF8PROC_COMPAT : 0);
    const auto* bytes = (const unsigned char*)text.data();
    std::vector<utf8proc_int32_t> codes;
    out.reserve(text.size() + text.size() / 8);
    for (size_t i = 0; i < text.size();) {
        const size_t begin = i;
        while (i < text.size() && bytes[i] < 0x80) i++;
        size_t end = i;
        for (size_t n; end < text.size() && bytes[end] >= 0x80; end += n) {
            n = valid_utf8_length(bytes + end, text.size() - end);
            if (n == 0) break;
        }
        if (end == i) {  // the end, or a byte that is not UTF-8
            if (i < text.size()) i++;
            out += text.substr(begin, i - begin);
            continue;
        }
        const size_t from = i > begin ? i - 1 : i;
        out += text.substr(begin, from - begin);
        codes.resize(4 * (end - from) + 4);
        utf8proc_ssize_t n = 0;
        int boundary = 0;  // graphemes are not needed
        each_character(text.substr(from, end - from), [&](int32_t c, std::string_view) {
            if (codes.size() < (size_t)n + 32) codes.resize(2 * codes.size() + 32);  // a character becomes at most 18
            const auto made = utf8proc_decompose_char(c, codes.data() + n, (utf8proc_ssize_t)codes.size() - 1 - n,
                                                      (utf8proc_option_t)options, &boundary);
            CHECK(made >= 0, "%s", utf8proc_errmsg(made));
            n += made;
        });
        order_marks(codes.data(), codes.data() + n);
        // The result is written over the codes: 4 bytes hold each of them, and there is room for the NUL after the last.
        n = utf8proc_reencode(codes.data(), n, (utf8proc_option_t)options);
        CHECK(n >= 0, "%s", utf8proc_errmsg(n));
        out.append((const char*)codes.data(), (size_t)n);
        i = end;
    }
#else
    (void)text;
    (void)form;
#endif
    return out;
}
