// Reading JSON that others wrote, with bounds on what a small file can cost:
//   nesting   nlohmann::json parses without recursion, but copies, compares and prints values recursively: a file of a million
//             brackets would overflow the stack
//   size      a value of two bytes in a file takes up to 70 in memory
// and writing JSON that may hold what a user gave, which can be any bytes.
#pragma once
#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "check.h"

template <class Json>
bool nested_deeper_than(const Json& j, int levels) {
    if (!j.is_structured()) return false;
    return levels == 0 ||
           std::any_of(j.begin(), j.end(), [&](const auto& child) { return nested_deeper_than(child, levels - 1); });
}

// `what` names the text in messages: a file, or a part of one.
inline nlohmann::json parse_json(std::string_view text, const std::string& what) {
    constexpr int most_levels = 32, most_marks = 20000000;  // far above any model's or tokenizer's
    const auto is_mark = [](char c) { return c == ',' || c == ':' || c == '[' || c == '{'; };
    if (const auto marks = std::count_if(text.begin(), text.end(), is_mark); marks > most_marks)
        fail("%s is not valid: it has %lld brackets, commas and colons; at most %d are read", what.c_str(), (long long)marks,
             most_marks);
    nlohmann::json j;
    try {
        j = nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception& e) {
        fail("%s is not valid JSON: %.500s", what.c_str(), e.what());
    }
    if (nested_deeper_than(j, most_levels))
        fail("%s is not valid: it is nested more than %d levels deep", what.c_str(), most_levels);
    return j;
}

// Bytes that are not UTF-8 become U+FFFD, where dump() alone would throw: a name or a path may be any bytes.
template <class Json>
std::string json_text(const Json& j, int indent = -1) {
    return j.dump(indent, ' ', false, Json::error_handler_t::replace);
}
// The value as it reads back from a file that holds it, for comparison with a value that was read.
template <class Json>
Json as_written(const Json& j) {
    return Json::parse(json_text(j));
}
