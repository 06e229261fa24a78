// Text for people: numbers, bytes and durations in words, lists, characters that are safe to print, lines of a given width.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "utf8.h"

using Strings = std::vector<std::string>;

// ---- numbers ---------------------------------------------------------------------------------------------------------------
// x in three significant digits, in the largest unit that keeps it at 1 or above; units step by `base`.
inline std::string three_digits(double x, double base, const std::vector<const char*>& units) {
    if (!std::isfinite(x)) return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
    size_t u = 0;
    // half a unit below the base would be printed as the base: 1000K
    while (std::fabs(x) >= base - 0.5 && u + 1 < units.size()) {
        x /= base;
        u++;
    }
    const double size = std::fabs(x);
    if (size >= 1e6) return format("%.2e%s", x, units[u]);  // there is no larger unit
    const int decimals = (u == 0 && x == std::floor(x)) || size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
    return format("%.*f%s", decimals, x, units[u]);
}

// x with this many decimals; in scientific notation if that would be long: 1.23e+45.
inline std::string with_decimals(double x, int decimals) { return format(std::fabs(x) < 1e9 ? "%.*f" : "%.*e", decimals, x); }

inline std::string human_count(double n) { return three_digits(n, 1000, {"", "K", "M", "B", "T", "Q"}); }
inline std::string human_flops(double n) {
    return three_digits(n, 1000, {" FLOP/s", " KFLOP/s", " MFLOP/s", " GFLOP/s", " TFLOP/s", " PFLOP/s", " EFLOP/s"});
}
inline std::string human_bytes(double n) { return three_digits(n, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"}); }

// 1234567 -> "1,234,567"
inline std::string with_commas(int64_t n) {
    std::string s = std::to_string(n);
    for (int i = (int)s.size() - 3; i > (n < 0 ? 1 : 0); i -= 3) s.insert(i, ",");
    return s;
}

// "a, b, c": name_of(row) for each row; names are listed as they are
template <class Rows, class F>
std::string joined(const Rows& rows, F name_of) {
    std::string text;
    for (const auto& row : rows) text += (text.empty() ? "" : ", ") + std::string(name_of(row));
    return text;
}
inline std::string joined(const std::vector<std::string>& names) {
    return joined(names, [](const std::string& name) { return name; });
}
// "1 document", "12,000 documents"; `several`: a plural other than noun + s
inline std::string counted(int64_t n, const std::string& noun, const std::string& several = "") {
    return with_commas(n) + " " + (n == 1 ? noun : several.empty() ? noun + "s" : several);
}

// "12 ms", "4.2s", "42s", "12m 05s", "1h 02m", "3d 04h"; "-" for an unknown duration
inline std::string human_duration(double seconds) {
    if (!(seconds >= 0 && seconds < 1e15)) return "-";
    if (seconds < 0.0005) return "0s";
    if (seconds < 0.0995) return format("%.0f ms", seconds * 1e3);
    if (seconds < 9.95) return format("%.1fs", seconds);
    const long long s = std::llround(seconds), m = (s + 30) / 60, h = (s + 1800) / 3600;
    if (s < 60) return format("%llds", s);
    if (s < 3600) return format("%lldm %02llds", s / 60, s % 60);
    if (m < 24 * 60) return format("%lldh %02lldm", m / 60, m % 60);
    return format("%lldd %02lldh", h / 24, h % 24);
}

// ---- characters ------------------------------------------------------------------------------------------------------------
// The UTF-8 character at s[i], which moves past it. An invalid byte gives U+FFFD and moves by one.
inline uint32_t next_codepoint(const std::string& s, size_t& i) {
    const Utf8Character c = first_character(std::string_view(s).substr(i));
    i += c.length;
    return c.code < 0 ? 0xfffd : (uint32_t)c.code;
}

// Width of a character on a terminal, in columns: 0 for combining marks, 2 for East Asian wide characters and emoji.
inline int columns_of(uint32_t c) {
    struct Range {
        uint32_t first, last;
    };
    static const Range marks[] = {{0x300, 0x36f}, {0x200b, 0x200f}, {0x3099, 0x309a}, {0xfe00, 0xfe0f}};
    static const Range wide[] = {{0x1100, 0x115f},   {0x2e80, 0xa4cf},  {0xac00, 0xd7a3}, {0xf900, 0xfaff},
                                 {0xfe30, 0xfe6f},   {0xff00, 0xff60},  {0xffe0, 0xffe6}, {0x1f300, 0x1f64f},
                                 {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd}};
    const auto in = [c](const Range& r) { return c >= r.first && c <= r.last; };
    if (std::any_of(std::begin(marks), std::end(marks), in)) return 0;
    return std::any_of(std::begin(wide), std::end(wide), in) ? 2 : 1;
}

inline int display_width(const std::string& s) {
    int width = 0;
    for (size_t i = 0; i < s.size();) width += columns_of(next_codepoint(s, i));
    return width;
}

// Untrusted text (from a model, a file name) made safe to show: valid UTF-8 without control characters except newline (a
// terminal would obey them), without characters that change the writing direction or that XML forbids. Each one becomes U+FFFD.
inline std::string printable(const std::string& text) {
    std::string out;
    for (size_t i = 0; i < text.size();) {
        const size_t start = i;
        const uint32_t c = next_codepoint(text, i);
        if (c == '\r') continue;
        const bool control = (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7f && c < 0xa0) || (c >= 0x202a && c <= 0x202e) ||
                             (c >= 0x2066 && c <= 0x2069) || (c & 0xfffe) == 0xfffe;
        if (c == '\t') out += ' ';
        else if (control || c == 0xfffd) out += replacement_character;
        else out.append(text, start, i - start);
    }
    return out;
}

// A word quoted for a shell.
inline std::string shell_word(const std::string& word) {
    const auto plain = [](char c) { return isalnum((unsigned char)c) || strchr("_-+=./:,@%", c) != nullptr; };
    if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
    std::string quoted = "'";
    for (const char c : word) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}
inline std::string shell_command(const Strings& words) {
    std::string command;
    for (const std::string& word : words) command += (command.empty() ? "" : " ") + shell_word(word);
    return command;
}

// The words of a command as a shell splits it: blanks separate them; quotes and backslashes protect. `problem` gets why the
// text is not a list of words ("needs a shell for '|'").
inline Strings split_words(const std::string& command, std::string& problem) {
    Strings words;
    bool in_word = false;
    char quote = 0;
    for (size_t i = 0; i < command.size(); i++) {
        char c = command[i];
        if (!quote && strchr(" \t\n", c)) {
            in_word = false;
            continue;
        }
        if (!in_word) words.emplace_back();
        in_word = true;
        if (c == quote) quote = 0;
        else if (!quote && (c == '\'' || c == '"')) quote = c;
        else {
            if (quote != '\'' && strchr("$`", c)) problem = format("needs a shell for '%c'", c);
            if (!quote && strchr("|&;<>()*?#~", c)) problem = format("needs a shell for '%c'", c);
            if (c == '\\' && quote != '\'' && i + 1 < command.size() && (!quote || strchr("\"\\$`", command[i + 1])))
                c = command[++i];
            words.back() += c;
        }
    }
    if (quote) problem = format("has a %c without its end", quote);
    return words;
}

// Length of the text in bytes without an incomplete character at its end.
inline size_t whole_characters(const std::string& text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); back++) {
        const unsigned char c = (unsigned char)text[text.size() - back];
        if ((c & 0xc0) == 0x80) continue;  // a continuation byte
        const size_t length = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc0 ? 2 : 1;
        return text.size() - (length > back ? back : 0);
    }
    return text.size();
}

// ---- lines ------------------------------------------------------------------------------------------------------------------
// Lines of at most `width` columns, broken at spaces if there are any, else between characters (Japanese has no spaces).
inline std::vector<std::string> wrap_text(const std::string& text, int width) {
    std::vector<std::string> lines(1);
    int columns = 0;
    size_t space = std::string::npos;  // where the current line can be broken
    for (size_t i = 0; i < text.size();) {
        const size_t start = i;
        const uint32_t c = next_codepoint(text, i);
        if (c == '\n') {
            lines.emplace_back();
            columns = 0;
            space = std::string::npos;
            continue;
        }
        if (columns + columns_of(c) > width && columns > 0) {
            std::string rest;
            if (c != ' ' && space != std::string::npos) {
                rest = lines.back().substr(space + 1);
                lines.back().resize(space);
            }
            lines.push_back(rest);
            columns = display_width(rest);
            space = std::string::npos;
            if (c == ' ') continue;
        }
        if (c == ' ') space = lines.back().size();
        lines.back().append(text, start, i - start);
        columns += columns_of(c);
    }
    return lines;
}

inline std::string pad_right(const std::string& s, int width) {
    return s + std::string(std::max(0, width - display_width(s)), ' ');
}
inline std::string pad_left(const std::string& s, int width) {
    return std::string(std::max(0, width - display_width(s)), ' ') + s;
}

// A line of text cut to this many columns.
inline std::string cut_text(const std::string& text, int width) {
    if (display_width(text) <= width) return text;
    std::string out;
    for (size_t i = 0, columns = 0; i < text.size();) {
        const size_t start = i;
        columns += (size_t)columns_of(next_codepoint(text, i));
        if ((int)columns > std::max(0, width)) break;
        out.append(text, start, i - start);
    }
    return out;
}
