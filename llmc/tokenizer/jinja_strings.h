// Operations on the strings of a rendering (jinja.h): the methods of Python's str, and those that filters use.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "jinja_values.h"

class JinjaStrings : public JinjaValues {
protected:
    // The position of the n-th character after `from`.
    size_t byte_of(const std::string& s, size_t from, int64_t n) {
        step(n / 64);
        while (n > 0 && from < s.size())
            if (++from == s.size() || begins_character(s[from])) n--;
        return from;
    }
    Value join(const Values& items, const JinjaString& between) {
        JinjaString out;
        for (size_t i = 0; i < items.size(); i++) {
            if (i) out.append(between);
            append(out, items[i]);
            if (out.text.size() > most_bytes_) wrong("it needs too much memory");
        }
        return string(std::move(out));
    }
    Value strip(const JinjaString& s, const Value& characters, bool left = true, bool right = true) {
        step((int64_t)s.text.size() / 64);
        if (characters.is(Value::none)) return part_of(s, stripped(s.text, is_python_space, left, right));
        std::vector<int32_t> codes;
        each_character(text_of(characters, "strip").text, [&](int32_t c, std::string_view) { codes.push_back(c); });
        const auto drops = [&](int32_t c) { return std::find(codes.begin(), codes.end(), c) != codes.end(); };
        return part_of(s, stripped(s.text, drops, left, right));
    }
    Value split(const JinjaString& s, const Value& by, int64_t most, bool from_right) {
        Values parts;
        size_t begin = 0, end = s.text.size();
        if (most < 0) most = INT64_MAX;
        if (by.is(Value::none)) {
            if (from_right) wrong("rsplit needs a separator");
            while (true) {
                const std::string_view rest = stripped(std::string_view(s.text).substr(begin), is_python_space, true, false);
                if (rest.empty()) break;
                size_t size = 0;
                if ((int64_t)parts.size() >= most) size = rest.size();
                else
                    while (size < rest.size() && !is_python_space(first_character(rest.substr(size)).code))
                        size += first_character(rest.substr(size)).length;
                step((int64_t)rest.size() / 64);
                parts.push_back(part_of(s, rest.substr(0, size)));
                begin = (size_t)(rest.data() - s.text.data()) + size;
                if ((int64_t)parts.size() > most) break;
            }
            return list(std::move(parts));
        }
        const std::string& mark = text_of(by, "split").text;
        if (mark.empty()) wrong("split: the separator is empty");
        while ((int64_t)parts.size() < most) {
            step();
            const size_t at = from_right ? end < mark.size() ? std::string::npos : s.text.rfind(mark, end - mark.size())
                                         : s.text.find(mark, begin);
            if (at == std::string::npos) break;
            parts.push_back(from_right ? part_of(s, at + mark.size(), end) : part_of(s, begin, at));
            (from_right ? end : begin) = from_right ? at : at + mark.size();
        }
        parts.push_back(part_of(s, begin, end));
        if (from_right) std::reverse(parts.begin(), parts.end());
        return list(std::move(parts));
    }
    Value replace(const JinjaString& s, const JinjaString& from, const JinjaString& to, int64_t most) {
        JinjaString out;
        size_t at = 0;
        if (most < 0) most = INT64_MAX;
        const std::string& what = from.text;
        for (; most > 0; most--) {
            step();
            size_t next = what.empty() ? at : s.text.find(what, at);
            if (next == std::string::npos) break;
            if (out.text.size() > most_bytes_) wrong("it needs too much memory");
            out.append(s, at, next);
            out.append(to);
            if (what.empty()) {  // before each character and at the end
                if (at == s.text.size()) return string(std::move(out));
                next = byte_of(s.text, at, 1);
                out.append(s, at, next);
            }
            at = next + what.size();
        }
        out.append(s, at, s.text.size());
        return string(std::move(out));
    }
    static int32_t upper(int32_t c) {
        if (c >= 0 && c < 0x80) return c >= 'a' && c <= 'z' ? c - 32 : c;
        need_unicode("upper case");
#if HAVE_UTF8PROC
        return utf8proc_toupper(c);
#else
        return c;
#endif
    }
    static bool is_cased(int32_t c) { return upper(c) != c || ::lower(c) != c; }
    // mode: 'u' upper, 'l' lower, 'c' first upper and the others lower, 't' the first of each word upper (words: letters),
    // 'f' the same by the filter (words: after blanks and brackets).
    Value in_case(const JinjaString& s, char mode) {
        JinjaString out;
        bool first = true;
        size_t part = 0, at = 0;
        step((int64_t)s.text.size() / 16);
        each_character(s.text, [&](int32_t c, std::string_view bytes) {
            while (part < s.parts.size() && s.parts[part].end <= at) part++;
            const bool up = mode == 'u' || (mode != 'l' && first);
            const std::string changed = c < 0             ? std::string(bytes)
                                        : up && c == 0xdf ? "SS"
                                                          : utf8((uint32_t)(up ? upper(c) : ::lower(c)));
            if (part < s.parts.size()) out.append(changed, s.parts[part].source, s.parts[part].generated);
            else out.append(changed);
            first =
                mode == 't' ? !is_cased(c) : mode == 'f' && (is_python_space(c) || (c > 0 && c < 0x80 && strchr("-({[<", c)));
            at += bytes.size();
        });
        return string(std::move(out));
    }
    Values lines_of(const JinjaString& s, bool keeps_ends) {
        Values lines;
        size_t begin = 0, at = 0;
        bool after_return = false;
        each_character(s.text, [&](int32_t c, std::string_view bytes) {
            const bool pair = c == '\n' && after_return;
            if (pair) {
                if (keeps_ends)
                    lines.back() = part_of(s, begin - (size_t)(length(lines.back()) ? lines.back().s->text.size() : 0), at + 1);
                begin = at + 1;
            } else if ((c >= '\n' && c <= '\r') || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029) {
                lines.push_back(part_of(s, begin, at + (keeps_ends ? bytes.size() : 0)));
                begin = at + bytes.size();
            }
            after_return = c == '\r';
            at += bytes.size();
        });
        if (begin < s.text.size()) lines.push_back(part_of(s, begin, s.text.size()));
        step((int64_t)lines.size());
        return lines;
    }
    Value string_method(const JinjaString& s, std::string_view name, const Arguments& a) {
        const auto characters = [&] { return a.take(0, "chars", none()); };
        const auto limit = [&](size_t place, const char* n) { return integer(a.take(place, n, whole(-1)), n); };
        const auto argument = [&](const char* what) -> const JinjaString& { return text_of(need(a, 0, what, what), what); };
        if (name == "strip") return strip(s, characters());
        if (name == "lstrip") return strip(s, characters(), true, false);
        if (name == "rstrip") return strip(s, characters(), false, true);
        if (name == "split" || name == "rsplit")
            return split(s, a.take(0, "sep", none()), limit(1, "maxsplit"), name == "rsplit");
        if (name == "splitlines") return list(lines_of(s, truth(a.take(0, "keepends", boolean(false)))));
        if (name == "startswith" || name == "endswith") {
            const Value what = need(a, 0, "prefix", "startswith");
            const Values any = what.is(Value::tuple) ? what.l->items : Values{what};
            return boolean(std::any_of(any.begin(), any.end(), [&](const Value& one) {
                const std::string& with = text_of(one, "startswith").text;
                return name == "startswith" ? begins_with(s.text, with) : ends_with(s.text, with);
            }));
        }
        if (name == "replace")
            return replace(s, argument("replace"), text_of(need(a, 1, "new", "replace"), "replace"), limit(2, "count"));
        if (name == "upper") return in_case(s, 'u');
        if (name == "lower") return in_case(s, 'l');
        if (name == "title") return in_case(s, 't');
        if (name == "capitalize") return in_case(s, 'c');
        if (name == "join") {
            const Values items = items_of(need(a, 0, "iterable", "join"));
            for (const Value& one : items) text_of(one, "join");
            return join(items, s);
        }
        if (name == "find" || name == "rfind" || name == "index") {
            const std::string& what = argument("find").text;
            const size_t at = name == "rfind" ? s.text.rfind(what) : s.text.find(what);
            if (at == std::string::npos && name == "index") wrong("index: the text does not occur");
            return whole(at == std::string::npos ? -1 : count_characters(std::string_view(s.text).substr(0, at)));
        }
        if (name == "count") {
            const std::string& what = argument("count").text;
            if (what.empty()) return whole(count_characters(s.text) + 1);
            int64_t n = 0;
            for (size_t at = 0; (at = s.text.find(what, at)) != std::string::npos; at += what.size()) n++;
            return whole(n);
        }
        if (name == "removeprefix" || name == "removesuffix") {
            const std::string& what = argument("removeprefix").text;
            if (name == "removeprefix" && begins_with(s.text, what)) return part_of(s, what.size(), s.text.size());
            if (name == "removesuffix" && ends_with(s.text, what)) return part_of(s, 0, s.text.size() - what.size());
            return string(s);
        }
        if (begins_with(name, "is")) return boolean(is_class(s.text, name));
        wrong(format("the method %s of a str is not supported", std::string(name).c_str()));
    }
    static bool is_class(const std::string& s, std::string_view name) {
        bool all = true, cased = false;
        each_character(s, [&](int32_t c, std::string_view) {
            if (name == "isspace") all = all && is_python_space(c);
            else if (name == "isdigit")
                all = all && (c < 0x80 ? c >= '0' && c <= '9' : general_category(c) == std::string_view("Nd"));
            else if (name == "isalpha") all = all && is_letter(c);
            else if (name == "isalnum") all = all && (is_letter(c) || is_number(c));
            else {
                cased = cased || is_cased(c);
                all = all && !is_cased(c) == !(name == "isupper" ? ::lower(c) != c : upper(c) != c);
            }
        });
        return all && !s.empty() && (cased || (name != "isupper" && name != "islower"));
    }
};
