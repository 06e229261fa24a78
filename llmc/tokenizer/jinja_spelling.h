// Normalizes the spelling of Jinja templates, so that equivalent ones compare equal: without comments and white-space control,
// message.role for message['role'], one kind of quotes, and consecutive outputs as one sum. Nothing is evaluated: two templates
// with the same spelling render alike (with transformers' trim_blocks and lstrip_blocks), others may too.
#pragma once
#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

// Placeholders in the known spellings: a text without quotes, and anything at all.
inline constexpr std::string_view text_part = "@SYSTEM@", any_part = "@ANY@";

class JinjaSpelling {
public:
    explicit JinjaSpelling(std::string_view source) : s_(source) {
        if (!s_.empty() && s_.back() == '\n') s_.remove_suffix(1);  // keep_trailing_newline is off
        while (at_ < s_.size()) {
            const size_t open = next_tag(at_);
            text(s_.substr(at_, open - at_), open);
            at_ = open;
            if (at_ < s_.size()) tag();
        }
    }
    // Tokens, separated by blanks; strings are in single quotes.
    std::string text() const {
        std::vector<std::string> tokens = tokens_;
        drop(tokens, {"{%", "generation", "%}"});
        drop(tokens, {"{%", "endgeneration", "%}"});
        drop(tokens, {"{%", "if", "not", "add_generation_prompt", "is", "defined", "%}", "{%", "set", "add_generation_prompt",
                      "=", "false", "%}", "{%", "endif", "%}"});
        std::string all;
        for (const std::string& token : joined(tokens)) all += (all.empty() ? "" : " ") + token;
        return all;
    }

private:
    using Tokens = std::vector<std::string>;

    size_t next_tag(size_t from) const {
        for (size_t i = from; i + 1 < s_.size(); i++)
            if (s_[i] == '{' && (s_[i + 1] == '%' || s_[i + 1] == '{' || s_[i + 1] == '#')) return i;
        return s_.size();
    }
    static constexpr const char* blanks = " \t\r\n";

    // The text between tags, up to `open`.
    void text(std::string_view t, size_t open) {
        const char kind = open + 1 < s_.size() ? s_[open + 1] : 0, control = open + 2 < s_.size() ? s_[open + 2] : 0;
        bool line_begins = at_ == 0;
        if (strips_) t.remove_prefix(std::min(t.size(), t.find_first_not_of(blanks)));
        else if (after_block_ && !t.empty() && t.front() == '\n') {
            t.remove_prefix(1);
            line_begins = true;
        }
        if (open < s_.size() && control == '-') t = t.substr(0, t.find_last_not_of(blanks) + 1);
        else if (kind == '%' || kind == '#') {
            const size_t end = t.find_last_not_of(" \t") + 1;
            if (end > 0 ? t[end - 1] == '\n' : line_begins) t = t.substr(0, end);
        }
        if (t.empty()) return;
        if (t == any_part) tokens_.emplace_back(t);
        else tokens_.insert(tokens_.end(), {"{{", quoted(t), "}}"});
    }

    void tag() {
        const char kind = s_[at_ + 1];
        const std::string_view close = kind == '%' ? "%}" : kind == '{' ? "}}" : "#}";
        at_ += 2;
        if (at_ < s_.size() && (s_[at_] == '-' || s_[at_] == '+')) at_++;
        if (kind != '#') tokens_.push_back(kind == '%' ? "{%" : "{{");
        bool ended = false;
        while (at_ < s_.size() && !ended) {
            const char c = s_[at_];
            strips_ = c == '-' && s_.substr(at_ + 1, 2) == close;
            ended = strips_ || s_.substr(at_, 2) == close;
            if (ended) at_ += strips_ ? 3 : 2;
            else if (kind == '#' || strchr(blanks, c)) at_++;
            else token();
        }
        after_block_ = kind != '{';
        if (kind != '#') tokens_.emplace_back(close);
    }

    void token() {
        const char c = s_[at_];
        const auto is_word = [](char x) { return std::isalnum((unsigned char)x) || x == '_'; };
        if (c == '\'' || c == '"') return string(c);
        size_t end = at_ + 1;
        if (is_word(c))
            while (end < s_.size() && is_word(s_[end])) end++;
        else if (end < s_.size() && s_[end] == '=' && (c == '=' || c == '!' || c == '<' || c == '>')) end++;
        tokens_.emplace_back(s_.substr(at_, end - at_));
        at_ = end;
    }
    void string(char quote) {
        std::string value;
        for (at_++; at_ < s_.size() && s_[at_] != quote; at_++) {
            char c = s_[at_];
            if (c == '\\' && at_ + 1 < s_.size()) {
                c = s_[++at_];
                c = c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
            }
            value += c;
        }
        at_++;
        tokens_.push_back(quoted(value));
    }
    static std::string quoted(std::string_view value) { return "'" + std::string(value) + "'"; }
    static bool is_string(const std::string& token) { return token[0] == '\''; }

    static void drop(Tokens& tokens, const Tokens& what) {
        for (size_t i = 0; i + what.size() <= tokens.size();)
            if (std::equal(what.begin(), what.end(), tokens.begin() + (std::ptrdiff_t)i))
                tokens.erase(tokens.begin() + (std::ptrdiff_t)i, tokens.begin() + (std::ptrdiff_t)(i + what.size()));
            else i++;
    }

    // {{ a }}{{ b }} is {{ a + b }}, 'a' + 'b' is 'ab', and x['name'] is x.name.
    static Tokens joined(const Tokens& tokens) {
        Tokens out;
        for (size_t i = 0; i < tokens.size(); i++) {
            const std::string& token = tokens[i];
            const auto before = [&](size_t back) { return out.size() >= back ? out[out.size() - back] : std::string(" "); };
            if (token == "{{" && before(1) == "}}") out.back() = "+";
            else if (is_string(token) && before(1) == "+" && is_string(before(2)) && before(3) != "|" &&
                     (i + 1 == tokens.size() || !strchr("|.[", tokens[i + 1][0]))) {
                out.pop_back();
                out.back() = out.back().substr(0, out.back().size() - 1) + token.substr(1);
            } else if (token == "]" && before(2) == "[" && is_string(before(1)) && before(1).size() > 2) {
                const std::string name = before(1).substr(1, before(1).size() - 2);
                out.resize(out.size() - 2);
                out.insert(out.end(), {".", name});
            } else out.push_back(token);
        }
        return out;
    }

    std::string_view s_;
    size_t at_ = 0;
    bool strips_ = false, after_block_ = false;  // the tag before ends with -, is no {{ }}
    Tokens tokens_;
};

inline std::string jinja_spelling(const std::string& source) { return JinjaSpelling(source).text(); }

// True if `given` matches `known` with its placeholders filled; `taken`: the text in text_part.
inline bool matches_spelling(std::string_view known, std::string_view given, std::string& taken) {
    const size_t at = std::min(known.find(text_part), known.find(any_part));
    if (at == std::string_view::npos) return known == given;
    if (given.substr(0, at) != known.substr(0, at)) return false;
    const bool is_text = known.substr(at, text_part.size()) == text_part;
    known.remove_prefix(at + (is_text ? text_part : any_part).size());
    given.remove_prefix(at);
    for (size_t n = 0; n <= given.size(); n++) {
        if (is_text && n > 0 && given[n - 1] == '\'') return false;
        if (!matches_spelling(known, given.substr(n), taken)) continue;
        if (is_text) taken = std::string(given.substr(0, n));
        return true;
    }
    return false;
}
