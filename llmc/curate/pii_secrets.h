// Keys that open accounts, handles, and e-mail addresses that are spelled out:
//   key    by the prefixes that issuers use (AWS, GitHub, GitLab, Google, Slack, Stripe, OpenAI, Hugging Face, npm, PyPI,
//   SendGrid, JSON Web Tokens, private keys in PEM); and values assigned to a name like password, token or api_key, if it has
//          letters and digits and is not a placeholder
//   user   @name of 3 to 30 characters, as in social networks; not annotations of programs (@Override, @media), packages
//   (@scope/x), nor decorators, which are alone in their lines
//   email  "john [at] example [dot] com", "john(at)example.com", "john AT example DOT com", "john at example dot com"
#pragma once
#include <algorithm>
#include <string>
#include <string_view>

#include "../base/utf8.h"
#include "pii_text.h"

namespace pii {

// ---- keys: called at the start of a word --------------------------------------------------------------------------------
struct KeyForm {
    std::string_view prefix;
    size_t shortest, longest;       // behind the prefix
    const char* characters;         // next to letters and digits: "-_."
    bool upper_and_digits = false;  // no small letters
};
inline constexpr KeyForm key_forms[] = {
    {"AKIA", 16, 16, "", true},
    {"ASIA", 16, 16, "", true},
    {"ghp_", 36, 36, ""},
    {"gho_", 36, 36, ""},
    {"ghu_", 36, 36, ""},
    {"ghs_", 36, 36, ""},
    {"ghr_", 36, 76, ""},
    {"github_pat_", 60, 100, "_"},
    {"glpat-", 20, 30, "-_"},
    {"AIza", 35, 35, "-_"},
    {"ya29.", 30, 300, "-_"},
    {"xoxb-", 20, 100, "-"},
    {"xoxp-", 20, 100, "-"},
    {"xoxa-", 20, 100, "-"},
    {"xoxs-", 20, 100, "-"},
    {"sk_live_", 16, 120, ""},
    {"rk_live_", 16, 120, ""},
    {"pk_live_", 16, 120, ""},
    {"sk_test_", 16, 120, ""},
    {"sk-ant-", 30, 200, "-_"},
    {"sk-proj-", 30, 250, "-_"},
    {"sk-", 32, 64, ""},
    {"hf_", 30, 40, ""},
    {"npm_", 36, 36, ""},
    {"pypi-AgE", 50, 300, "-_"},
    {"SG.", 60, 80, "-_."},
    {"dop_v1_", 64, 64, ""},
    {"shpat_", 32, 32, ""},
    {"AGE-SECRET-KEY-", 50, 70, "", true},
};

// Letters and digits, and no word that stands for a secret.
inline bool looks_secret(std::string_view value) {
    int letters = 0, digits = 0, changes = 0;
    for (size_t i = 0; i < value.size(); i++) {
        letters += is_ascii_letter(value[i]);
        digits += is_digit_character(value[i]);
        changes += i > 0 && is_digit_character(value[i]) != is_digit_character(value[i - 1]);
    }
    if (letters < 2 || digits < 2 || changes < 2) return false;
    const std::string lower = lower_ascii(value);
    for (const char* word : {"example", "xxxx", "your", "1234567890", "abcdef", "changeme", "placeholder", "00000000", "insert",
                             "process.env", "secret"})
        if (lower.find(word) != std::string::npos) return false;
    return true;
}

inline bool find_key(const Text& t, size_t begin, Found& found) {
    if (!strchr("AgxsrphndSye", t[begin])) return false;  // the prefixes' first letters
    const std::string_view rest = t.s.substr(begin, 320);
    for (const KeyForm& form : key_forms) {
        if (rest.substr(0, form.prefix.size()) != form.prefix) continue;
        size_t n = form.prefix.size();
        bool digit = false;
        for (; n < rest.size(); n++) {
            const char c = rest[n];
            const bool fits =
                is_digit_character(c) || is_upper(c) ||
                (!form.upper_and_digits && (is_ascii_letter(c) || (*form.characters && strchr(form.characters, c) && c)));
            if (!fits) break;
            digit |= is_digit_character(c);
        }
        while (n > form.prefix.size() && strchr("-_.", rest[n - 1])) n--;
        const size_t length = n - form.prefix.size();
        if (length < form.shortest || length > form.longest || (!digit && form.prefix.size() < 8)) continue;
        found = {"key", begin, begin + n};
        return true;
    }
    // A JSON Web Token: three parts in base64, the first two of them JSON objects.
    if (rest.substr(0, 3) == "eyJ") {
        size_t at = begin, dots = 0, parts[3] = {0, 0, 0};
        for (; is_alnum(t[at]) || t[at] == '-' || t[at] == '_' || (t[at] == '.' && dots < 2); at++)
            t[at] == '.' ? dots++ : parts[dots]++;
        if (dots == 2 && parts[0] > 10 && parts[1] > 10 && parts[2] > 10 && t.s.substr(begin + parts[0] + 1, 3) == "eyJ") {
            found = {"key", begin, at};
            return true;
        }
    }
    return false;
}
// Called at the first of five hyphens: -----BEGIN ... PRIVATE KEY----- up to its end.
inline bool find_private_key(const Text& t, size_t begin, Found& found) {
    if (t.s.substr(begin, 11) != "-----BEGIN ") return false;
    const std::string_view head = t.s.substr(begin, 60);
    const size_t name = head.find("PRIVATE KEY");
    if (name == std::string_view::npos || head.find('\n') < name) return false;
    constexpr size_t longest = 10000;
    const size_t end = t.s.substr(0, std::min(t.s.size(), begin + longest)).find("-----END ", begin);
    if (end == std::string_view::npos) return false;
    const size_t stop = t.s.substr(0, std::min(t.s.size(), end + 60)).find("-----", end + 9);
    if (stop == std::string_view::npos) return false;
    found = {"key", begin, stop + 5};
    return true;
}
// Called at '=' or ':' behind a name: password = "...", "api_key": "...", TOKEN: ...
inline bool find_assigned_key(const Text& t, size_t at, Found& found) {
    size_t name_end = at;
    while (name_end > 0 && strchr(" \t\"'", t[name_end - 1])) name_end--;
    size_t name_begin = name_end;
    while (name_begin > 0 && name_end - name_begin < 40 &&
           (is_alnum(t[name_begin - 1]) || t[name_begin - 1] == '_' || t[name_begin - 1] == '-'))
        name_begin--;
    std::string name;
    for (size_t i = name_begin; i < name_end; i++)
        if (is_alnum(t[i])) name += t[i];
    name = lower_ascii(name);
    bool names = false, secret = false;
    for (const char* word : {"password", "passwd", "pwd"}) secret |= ends_with(name, word);
    for (const char* word : {"secret", "apikey", "accesskey", "secretkey", "authtoken", "accesstoken", "apitoken", "privatekey",
                             "token", "clientsecret"})
        names |= ends_with(name, word);
    if (!names && !secret) return false;
    size_t begin = at + 1;
    if (t[begin] == '=' || t[begin] == '>') return false;
    while (t[begin] == ' ' || t[begin] == '\t') begin++;
    const char quote = t[begin] == '"' || t[begin] == '\'' ? t[begin] : '\0';
    begin += quote != 0;
    size_t end = begin;
    const auto is_part = [&](char c) {
        if (!c || (unsigned char)c <= ' ' || (c & 0x80)) return false;
        return quote ? c != quote : is_alnum(c) || strchr("-_.+/=!@#%^*~", c) != nullptr;
    };
    while (end - begin < 200 && is_part(t[end])) end++;
    if (quote && t[end] != quote) return false;
    while (!quote && end > begin && strchr(".,;", t[end - 1])) end--;
    const std::string_view value = t.s.substr(begin, end - begin);
    if (t[end] == '(' || t[end] == '[' || value.size() < (secret ? 8u : 16u) || !looks_secret(value)) return false;
    found = {"key", begin, end};
    return true;
}

// ---- handles: called at an @ ------------------------------------------------------------------------------------------------
inline bool find_user(const Text& t, size_t at, Found& found) {
    if (t.is_word_before(at) || (at > 0 && strchr("./@+-=", t[at - 1]))) return false;
    size_t end = at + 1;
    bool letter = false;
    for (; is_alnum(t[end]) || t[end] == '_' || (t[end] == '.' && is_alnum(t[end + 1])); end++)
        letter |= is_ascii_letter(t[end]);
    const size_t n = end - at - 1;
    if (n < 3 || n > 30 || !letter || (t[end] & 0x80) || t[end] == '/' || t[end] == '@' || t[end] == '(' || t[end] == '{' ||
        t[end] == '-')
        return false;
    const std::string name = lower_ascii(t.s.substr(at + 1, n));
    static constexpr std::string_view annotations[] = {"param",
                                                       "return",
                                                       "returns",
                                                       "throws",
                                                       "see",
                                                       "since",
                                                       "author",
                                                       "version",
                                                       "deprecated",
                                                       "override",
                                                       "test",
                                                       "todo",
                                                       "link",
                                                       "code",
                                                       "inheritdoc",
                                                       "suppresswarnings",
                                                       "nullable",
                                                       "nonnull",
                                                       "notnull",
                                                       "autowired",
                                                       "bean",
                                                       "component",
                                                       "service",
                                                       "media",
                                                       "import",
                                                       "charset",
                                                       "keyframes",
                                                       "include",
                                                       "mixin",
                                                       "extend",
                                                       "font",
                                                       "supports",
                                                       "page",
                                                       "layer",
                                                       "tailwind",
                                                       "apply",
                                                       "property",
                                                       "staticmethod",
                                                       "classmethod",
                                                       "dataclass",
                                                       "abstractmethod",
                                                       "echo",
                                                       "end",
                                                       "interface",
                                                       "implementation",
                                                       "selector",
                                                       "protocol",
                                                       "class",
                                                       "private",
                                                       "public",
                                                       "protected",
                                                       "type",
                                                       "typedef",
                                                       "brief",
                                                       "example",
                                                       "internal",
                                                       "ts",
                                                       "functionalinterface",
                                                       "before",
                                                       "after",
                                                       "beforeeach",
                                                       "aftereach",
                                                       "entity",
                                                       "table",
                                                       "column",
                                                       "json",
                                                       "xmlelement",
                                                       "if",
                                                       "else",
                                                       "for",
                                                       "foreach",
                                                       "endif",
                                                       "section",
                                                       "yield",
                                                       "extends",
                                                       "package",
                                                       "file",
                                                       "module",
                                                       "function",
                                                       "constructor"};
    for (const std::string_view word : annotations)
        if (name == word) return false;
    // A decorator is alone in its line.
    size_t line = at;
    while (line > 0 && (t[line - 1] == ' ' || t[line - 1] == '\t')) line--;
    const bool begins_line = line == 0 || t[line - 1] == '\n';
    size_t rest = end;
    while (t[rest] == ' ' || t[rest] == '\t' || t[rest] == '\r') rest++;
    if (begins_line && t[rest] == '\n' && rest + 1 < t.s.size()) return false;
    found = {"user", at, end};
    return true;
}

// ---- addresses that are spelled out ----------------------------------------------------------------------------------------
// Where "at" or "dot" ends that is spelled at `i`: [at], (dot), {at}, <at>, " at " or " AT ", with blanks around; 0 if it is
// not there. `plain` is set where nothing is around the word but blanks.
inline size_t spelled(const Text& t, size_t i, std::string_view word, bool& plain) {
    size_t at = i;
    while (at - i < 3 && t[at] == ' ') at++;
    const char open = t[at];
    const char close = open == '[' ? ']' : open == '(' ? ')' : open == '{' ? '}' : open == '<' ? '>' : '\0';
    if (close) at++;
    else if (at == i) return 0;
    while (close && t[at] == ' ') at++;
    for (const char c : word)
        if ((t[at++] | 32) != c) return 0;
    if (is_word(t[at])) return 0;
    while (close && t[at] == ' ') at++;
    if (close && t[at++] != close) return 0;
    plain = !close;
    if (plain && t[at] != ' ') return 0;
    const size_t end = at;
    while (at - end < 3 && t[at] == ' ') at++;
    return at;
}
// Called where a word ends: "john" of "john [at] example [dot] com".
inline bool find_spelled_email(const Text& t, size_t end, size_t least, Found& found) {
    bool plain_at = false, plain_dot = false, dots_spelled = false;
    size_t at = spelled(t, end, "at", plain_at);
    if (at == 0) return false;
    const auto part = [](char c) { return is_alnum(c) || c == '_' || c == '-'; };
    size_t begin = end;
    while (begin > least && end - begin < 64 && (part(t[begin - 1]) || t[begin - 1] == '.' || t[begin - 1] == '+')) begin--;
    while (begin < end && !is_alnum(t[begin])) begin++;
    if (begin == end) return false;
    int labels = 0;
    size_t label = at, stop = at;
    while (true) {
        label = at;
        while (part(t[at])) at++;
        if (at == label) break;
        labels++;
        stop = at;
        const size_t dot = spelled(t, at, "dot", plain_dot);
        if (dot) {
            dots_spelled = true;
            at = dot;
        } else if (t[at] == '.' && part(t[at + 1])) at++;
        else break;
        if (plain_dot && !plain_at) plain_dot = false;
    }
    size_t top = stop;
    while (top > 0 && part(t[top - 1])) top--;
    if (labels < 2 || stop - top < 2 || stop - top > 12) return false;
    for (size_t i = top; i < stop; i++)
        if (!is_ascii_letter(t[i])) return false;
    if (plain_at) {
        const std::string last = lower_ascii(t.s.substr(top, stop - top));
        static constexpr std::string_view usual[] = {
            "com", "org", "net", "edu", "gov", "info", "io", "co", "uk", "de", "fr", "it", "es", "nl", "be", "ch", "at", "se",
            "no",  "dk",  "fi",  "pl",  "cz",  "pt",   "eu", "us", "ca", "au", "nz", "br", "mx", "in", "cn", "jp", "kr", "ru"};
        if (!dots_spelled || std::find(std::begin(usual), std::end(usual), last) == std::end(usual)) return false;
        const std::string word = lower_ascii(t.s.substr(begin, end - begin));
        for (const char* other : {"look", "us", "me", "found", "available", "is", "are", "was", "or", "visit", "located",
                                  "hosted", "here", "site", "website", "online", "more", "live", "and"})
            if (word == other) return false;
    }
    found = {"email", begin, stop};
    return true;
}

}  // namespace pii
