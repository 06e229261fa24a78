// Recognizes markup, so that tags are not learned as text.
//   begins_as_html   a page: a doctype, <html>, <head> or <body> after comments and an XML declaration
//   count_markup     the bytes of a text that are tags
#pragma once
#include <cctype>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "../base/utf8.h"

namespace markup {

// What follows white space, comments, processing instructions and, if requested, a doctype.
inline std::string_view behind_prologue(std::string_view text, bool doctype) {
    text = without_byte_order_mark(text);
    while (true) {
        text.remove_prefix(std::min(text.size(), text.find_first_not_of(" \t\r\n")));
        std::string_view end;
        if (begins_with(text, "<!--")) end = "-->";
        else if (begins_with(text, "<?")) end = "?>";
        else if (doctype && lower_ascii(text.substr(0, 9)) == "<!doctype") end = ">";
        else return text;
        const size_t at = text.find(end, 2);
        if (at == std::string_view::npos) return {};
        text.remove_prefix(at + end.size());
    }
}

// The name of the first element, in lower case; "" if the text does not start with one.
inline std::string root_of(std::string_view text) {
    text = behind_prologue(text, true);
    if (text.size() < 2 || text[0] != '<' || !isalpha((unsigned char)text[1])) return "";
    size_t end = 1;
    while (end < text.size() && end < 40 && (isalnum((unsigned char)text[end]) || strchr(":_-.", text[end]))) end++;
    if (end < text.size() && !strchr(" \t\r\n/>", text[end])) return "";
    return lower_ascii(text.substr(1, end - 1));
}

inline bool begins_as_html(std::string_view first) {
    if (lower_ascii(behind_prologue(first, false).substr(0, 14)) == "<!doctype html") return true;
    const std::string root = root_of(first);
    return root == "html" || root == "head" || root == "body";
}
inline bool begins_as_xml(std::string_view first) {
    first = without_byte_order_mark(first);
    first.remove_prefix(std::min(first.size(), first.find_first_not_of(" \t\r\n")));
    return begins_with(first, "<?xml") || root_of(first) == "mediawiki";
}
// WikiExtractor's output: <doc id="12" url="..." title="..."> around each article.
inline bool begins_as_wiki(std::string_view first) { return begins_with(without_byte_order_mark(first), "<doc id=\""); }

// The bytes of tags, counted by features that only markup has: ends of elements, which count twice for their first bytes, tags
// with attributes, and the few that have no end. Programs have <int> and <vector>, which do not count.
inline int64_t count_markup(std::string_view text) {
    constexpr size_t longest = 2000;  // of a tag
    int64_t bytes = 0;
    for (size_t at = text.find('<'); at != std::string_view::npos && at + 2 < text.size(); at = text.find('<', at + 1)) {
        const bool end = text[at + 1] == '/';
        size_t i = at + 1 + end;
        const size_t name = i;
        if (!isalpha((unsigned char)text[i])) continue;
        while (i < text.size() && i < name + 40 && (isalnum((unsigned char)text[i]) || text[i] == ':' || text[i] == '-')) i++;
        const std::string tag = lower_ascii(text.substr(name, i - name));
        if (end) {
            if (i < text.size() && text[i] == '>') bytes += 2 * (int64_t)(i + 1 - at) - 1;
            continue;
        }
        const size_t stop = text.substr(0, std::min(text.size(), at + longest)).find_first_of("<>", i);
        if (stop == std::string_view::npos || text[stop] != '>') continue;
        const size_t attribute = text.substr(i, stop - i).find("=\"");
        const bool empty = tag == "br" || tag == "hr" || tag == "p" || tag == "li";
        if (attribute != std::string_view::npos && isspace((unsigned char)text[i])) bytes += (int64_t)(stop - i);
        if (empty) bytes += (int64_t)(stop + 1 - at);
    }
    return bytes;
}

}  // namespace markup
