// Reading JSON from untrusted files, with bounds on the cost of a small file:
//   nesting   nlohmann::json parses without recursion, but copies, compares and prints values recursively: a file of a million
//             brackets would overflow the stack
//   size      a value of two bytes in a file needs up to 70 in memory
// and writing JSON with a user's text, which can be any bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "check.h"
#include "utf8.h"

template <class Json>
bool nested_deeper_than(const Json& j, int levels) {
    if (!j.is_structured()) return false;
    return levels == 0 ||
           std::any_of(j.begin(), j.end(), [&](const auto& child) { return nested_deeper_than(child, levels - 1); });
}

// Whether a JSON text is nested deeper than `levels`, or has more than `most` values, without parsing it: a value takes up to a
// hundred times its bytes in memory. Roughly, where the text is not valid.
inline bool json_exceeds(std::string_view text, int levels, size_t most) {
    int depth = 0;
    size_t values = 0;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c == '"') {
            for (i++; i < text.size() && text[i] != '"'; i++) i += text[i] == '\\';
        } else if (c == '[' || c == '{') {
            if (++depth > levels) return true;
            values++;
        } else if (c == ']' || c == '}') depth--;
        else if (c == ',') values++;
        if (values > most) return true;
    }
    return false;
}

// The error in a text or its values, in words and with the place: "at line 3, column 7: invalid literal; last read: '{x';
// expected string literal", "key 'scales' not found". Strips the error numbers from the library's message.
inline std::string json_problem(const nlohmann::json::exception& e) {
    std::string reason = e.what();
    const auto drop = [&](const std::string& from, const std::string& to, const std::string& instead) {
        const size_t begin = reason.find(from), end = reason.find(to, begin + from.size());
        if (begin != std::string::npos && end != std::string::npos) reason.replace(begin, end + to.size() - begin, instead);
    };
    drop("[json.exception", "] ", "");
    drop("parse error at ", "", "at ");
    drop("syntax error while parsing ", " - ", "");
    drop("type must be ", "", "a value must be ");
    drop("cannot use ", "() with ", "an object is expected, not ");
    return reason.substr(0, 300);
}
// An exception's message; the library's own exceptions, if no reader has translated them, go through json_problem().
inline std::string in_words(const std::exception& e) {
    const auto* json = dynamic_cast<const nlohmann::json::exception*>(&e);
    return json ? "unexpected content in a JSON file: " + json_problem(*json) : e.what();
}

// `what` names the text in messages: a file, or a part of one.
inline nlohmann::json parse_json(std::string_view text, const std::string& what) {
    if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
        fail("%s is empty; HINT: copy or download it again", what.c_str());
    constexpr int most_levels = 32, most_marks = 20000000;  // far above any model's or tokenizer's
    const auto is_mark = [](char c) { return c == ',' || c == ':' || c == '[' || c == '{'; };
    if (const auto marks = std::count_if(text.begin(), text.end(), is_mark); marks > most_marks)
        fail("%s is not valid: it has %lld brackets, commas and colons; the maximum is %d", what.c_str(), (long long)marks,
             most_marks);
    if (json_exceeds(text, most_levels, SIZE_MAX))
        fail("%s is not valid: it is nested more than %d levels deep", what.c_str(), most_levels);
    try {
        return nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception& e) {
        fail("%s is not valid JSON: %s", what.c_str(), json_problem(e).c_str());
    }
}

// Bytes that are not UTF-8 become U+FFFD, where plain dump() would throw: a name or a path may be any bytes.
template <class Json>
std::string json_text(const Json& j, int indent = -1) {
    return j.dump(indent, ' ', false, Json::error_handler_t::replace);
}
// The text as a JSON string, like json_text, but eight bytes at a time: for whole documents.
inline void append_json_string(std::string& out, std::string_view text) {
    if (!is_utf8(text)) {
        out += json_text(nlohmann::json(text));
        return;
    }
    constexpr uint64_t ones = 0x0101010101010101, high = 128 * ones;
    const auto stays = [](char c) { return (unsigned char)c >= ' ' && c != '"' && c != '\\'; };
    const auto eight_stay = [](const char* at) {
        uint64_t x;
        memcpy(&x, at, 8);
        const uint64_t quote = x ^ ones * '"', backslash = x ^ ones * '\\';
        return ((((x - ones * ' ') & ~x) | ((quote - ones) & ~quote) | ((backslash - ones) & ~backslash)) & high) == 0;
    };
    out += '"';
    for (size_t i = 0;; i++) {
        const size_t begin = i;
        while (i + 8 <= text.size() && eight_stay(&text[i])) i += 8;
        while (i < text.size() && stays(text[i])) i++;
        out.append(text, begin, i - begin);
        if (i == text.size()) break;
        constexpr std::string_view special = "\"\\\b\f\n\r\t", letters = "\"\\bfnrt";
        const size_t known = special.find(text[i]);
        out += known < special.size() ? std::string{'\\', letters[known]} : format("\\u%04x", text[i]);
    }
    out += '"';
}
// The value after a round trip through a file, for comparison with a value that was read.
template <class Json>
Json as_written(const Json& j) {
    return Json::parse(json_text(j));
}
