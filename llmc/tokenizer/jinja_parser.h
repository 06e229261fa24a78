// Parses Jinja templates, as Jinja 3 does with the settings of transformers' chat templates: trim_blocks, lstrip_blocks, loop
// controls, and the block {% generation %}. A tree of nodes is the result, which jinja.h renders. Statements that load other
// templates (include, import, extends, block) are refused. Nesting is bounded, so that no recursion over a tree overflows the
// stack.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/unicode.h"
#include "../base/utf8.h"

// A text whose parts know where they are from: from the template itself, or from a message (by its number).
struct JinjaString {
    static constexpr int32_t literal = -1;  // of the template
    struct Part {
        size_t end;
        int32_t source;
        bool generated;  // within {% generation %}
    };
    std::string text;
    std::vector<Part> parts;  // in order; none: all of the text is literal

    JinjaString() = default;
    explicit JinjaString(std::string_view s, int32_t source = literal) { append(s, source); }
    void append(std::string_view s, int32_t source = literal, bool generated = false) {
        if (s.empty()) return;
        const bool plain = source == literal && !generated;
        if (parts.empty() && !plain && !text.empty()) parts.push_back({text.size(), literal, false});
        text += s;
        if (parts.empty() && plain) return;
        if (parts.empty() || parts.back().source != source || parts.back().generated != generated)
            parts.push_back({text.size(), source, generated});
        parts.back().end = text.size();
    }
    void append(const JinjaString& s, bool generated = false) { append(s, 0, s.text.size(), generated); }
    void append(const JinjaString& s, size_t begin, size_t end, bool generated = false) {
        if (s.parts.empty()) return append(std::string_view(s.text).substr(begin, end - begin), literal, generated);
        for (const Part& p : s.parts) {
            if (p.end <= begin) continue;
            const size_t to = std::min(p.end, end);
            append(std::string_view(s.text).substr(begin, to - begin), p.source, p.generated || generated);
            begin = to;
            if (begin == end) return;
        }
    }
    // The message that some of the text is from.
    int32_t source() const {
        for (const Part& p : parts)
            if (p.source != literal) return p.source;
        return literal;
    }
};

struct JinjaNode;
using JinjaNodes = std::vector<std::unique_ptr<JinjaNode>>;

struct JinjaNode {
    enum Kind {
        // expressions; kids
        text,    // a constant, string
        number,  // integer
        real,    // real
        truth,   // integer
        none,
        name,  // id
        array,
        tuple,
        dict,       // items; keys and values in turn
        attribute,  // object; string is the attribute
        item,       // object, index
        slice,      // object, first, last, step; each but the object may be null
        call,       // callee, positional arguments; named
        filter,     // input, positional arguments; string is the filter; named. Without input in a {% filter %}
        test,       // input, positional arguments; string is the test; named
        negative,
        positive,
        negation,
        binary,   // two; op: + - * / % and ** ("^"), // ("_")
        compare,  // two or more; ops: = ! < > l(<=) g(>=) i(in) n(not in)
        both,
        either,
        concat,     // ~
        condition,  // condition, value, other value or null
        // statements
        data,          // string
        output,        // expressions
        block,         // statements
        if_block,      // condition, block, condition, block, ..., block of else
        for_loop,      // target, iterable, filter or null, block, else block or null; integer: recursive
        assign,        // target, value
        assign_block,  // target, filter or null, block
        macro,         // block, then default values of the last parameters; parameters are ids; id
        call_block,    // call, block, then default values; parameters are ids
        filter_block,  // filter, block
        with_block,    // block, then values; parameters are ids
        generation,    // block
        break_loop,
        continue_loop
    };
    Kind kind;
    int line = 0, depth = 1;
    int id = -1;  // of a name
    int64_t integer = 0;
    double real_value = 0;
    JinjaString string{};
    std::string ops{};
    std::vector<int> ids{};
    JinjaNodes kids{};
    std::vector<std::pair<std::string, std::unique_ptr<JinjaNode>>> named{};
};

struct JinjaToken {
    enum Kind { data, block_begin, block_end, output_begin, output_end, name, string, integer, real, sign, end };
    Kind kind;
    int line;
    std::string text;
};

class JinjaLexer {
public:
    static std::vector<JinjaToken> tokens(std::string_view source) {
        JinjaLexer lexer(source);
        while (lexer.at_ < lexer.s_.size()) lexer.next();
        lexer.add(JinjaToken::end, "");
        return std::move(lexer.tokens_);
    }

private:
    explicit JinjaLexer(std::string_view source) {
        for (size_t i = 0; i < source.size(); i++) {
            if (source[i] == '\r') s_ += '\n';
            else if (source[i] != '\n' || i == 0 || source[i - 1] != '\r') s_ += source[i];
        }
        if (!s_.empty() && s_.back() == '\n') s_.pop_back();
    }

    [[noreturn]] void wrong(const std::string& why) const { fail("line %d: %s", line_, why.c_str()); }
    void add(JinjaToken::Kind kind, std::string text) { tokens_.push_back({kind, line_, std::move(text)}); }
    std::string_view rest(size_t at) const { return std::string_view(s_).substr(std::min(at, s_.size())); }
    void advance(size_t to) {
        line_ += (int)std::count(s_.begin() + (std::ptrdiff_t)at_, s_.begin() + (std::ptrdiff_t)to, '\n');
        at_ = to;
    }
    size_t skip_space(size_t at) const {
        const std::string_view r = rest(at);
        return at + (r.size() - stripped_left(r).size());
    }
    static std::string_view stripped_left(std::string_view s) {
        while (!s.empty()) {
            const Utf8Character c = first_character(s);
            if (!is_python_space(c.code)) break;
            s.remove_prefix(c.length);
        }
        return s;
    }

    // The text up to the next tag without the white space that the tag strips.
    std::string_view before_tag(size_t open, char kind, char sign) const {
        std::string_view text = std::string_view(s_).substr(at_, open - at_);
        if (sign == '-') return without_trailing_space(text);
        if (sign == '+' || kind == '{') return text;
        const size_t line = text.rfind('\n') + 1;  // 0: not found
        const bool starts = line > 0 || at_ == 0 || s_[at_ - 1] == '\n';
        return starts && stripped_left(text.substr(line)).empty() ? text.substr(0, line) : text;
    }
    // The end of a tag at `at`, after the white space that it strips; 0: there is none.
    size_t after_end(size_t at, std::string_view end, bool trims) const {
        const bool sign = at < s_.size() && (s_[at] == '-' || (s_[at] == '+' && trims));
        if (rest(at + sign).substr(0, 2) != end) return 0;
        size_t after = at + sign + 2;
        if (sign && s_[at] == '-') return skip_space(after);
        if (!sign && trims && after < s_.size() && s_[after] == '\n') after++;
        return after;
    }

    void next() {
        size_t open = at_;
        const auto opens = [&](size_t i) { return s_[i] == '{' && (s_[i + 1] == '{' || s_[i + 1] == '%' || s_[i + 1] == '#'); };
        while (open + 1 < s_.size() && !opens(open)) open++;
        if (open + 1 >= s_.size()) open = s_.size();
        const char kind = open < s_.size() ? s_[open + 1] : 0;
        const char sign = open + 2 < s_.size() && (s_[open + 2] == '-' || s_[open + 2] == '+') ? s_[open + 2] : 0;
        if (const std::string_view text = kind ? before_tag(open, kind, sign) : rest(at_); !text.empty())
            add(JinjaToken::data, std::string(text));
        advance(open);
        if (!kind) return;
        const size_t begin = open + 2 + (sign != 0);
        if (kind == '#') return comment(open + 2);
        if (kind == '%' && raw(begin)) return;
        add(kind == '%' ? JinjaToken::block_begin : JinjaToken::output_begin, "");
        advance(begin);
        while (!tag_token(kind)) {
        }
    }
    void comment(size_t from) {
        const size_t close = s_.find("#}", from);
        if (close == std::string::npos) wrong("a comment does not end");
        const bool sign = close > from && (s_[close - 1] == '-' || s_[close - 1] == '+');
        advance(after_end(close - sign, "#}", true));
    }
    // {% raw %}text{% endraw %}
    bool raw(size_t at) {
        at = skip_space(at);
        if (rest(at).substr(0, 3) != "raw") return false;
        const size_t begin = after_end(skip_space(at + 3), "%}", false);
        if (begin == 0) return false;
        for (size_t open = begin; (open = s_.find("{%", open)) != std::string::npos; open += 2) {
            const char sign = open + 2 < s_.size() && (s_[open + 2] == '-' || s_[open + 2] == '+') ? s_[open + 2] : 0;
            const size_t word = skip_space(open + 2 + (sign != 0));
            const size_t end = rest(word).substr(0, 6) == "endraw" ? after_end(skip_space(word + 6), "%}", true) : 0;
            if (end == 0) continue;
            advance(begin);
            if (const std::string_view text = before_tag(open, '%', sign); !text.empty())
                add(JinjaToken::data, std::string(text));
            advance(end);
            return true;
        }
        wrong("{% raw %} does not end");
    }

    // Reads a token of a tag. Returns true at the tag's end.
    bool tag_token(char kind) {
        advance(skip_space(at_));
        if (at_ >= s_.size()) wrong("a tag does not end");
        if (open_.empty())
            if (const size_t after = after_end(at_, kind == '%' ? "%}" : "}}", kind == '%')) {
                add(kind == '%' ? JinjaToken::block_end : JinjaToken::output_end, "");
                advance(after);
                return true;
            }
        const char c = s_[at_];
        size_t end = at_;
        if (is_digit(c)) number();
        else if (c == '\'' || c == '"') string(c);
        else if (is_word(c)) {
            while (end < s_.size() && is_word(s_[end])) end++;
            add(JinjaToken::name, s_.substr(at_, end - at_));
            advance(end);
        } else sign(c);
        return false;
    }
    static bool is_digit(char c) { return c >= '0' && c <= '9'; }
    static bool is_word(char c) {
        return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80);
    }
    void number() {
        size_t end = at_;
        std::string text;
        const auto digits = [&] {
            for (; end < s_.size() && (is_digit(s_[end]) || (s_[end] == '_' && is_digit(rest(end + 1).substr(0, 1)[0]))); end++)
                if (s_[end] != '_') text += s_[end];
        };
        const auto digit_at = [&](size_t i) { return i < s_.size() && is_digit(s_[i]); };
        if (s_[at_] == '0' && end + 1 < s_.size() && strchr("bBoOxX", s_[end + 1])) wrong("a number is not decimal");
        digits();
        const bool after_point = at_ > 0 && s_[at_ - 1] == '.';
        bool real = false;
        if (!after_point && end < s_.size() && s_[end] == '.' && digit_at(end + 1)) {
            text += s_[end++];
            digits();
            real = true;
        }
        const size_t power = end + 1 < s_.size() && (s_[end + 1] == '-' || s_[end + 1] == '+') ? end + 2 : end + 1;
        if (!after_point && end < s_.size() && (s_[end] == 'e' || s_[end] == 'E') && digit_at(power)) {
            text += s_.substr(end, power - end);
            end = power;
            digits();
            real = true;
        }
        if (!real && text.size() > 18) wrong("a number is too large");
        add(real ? JinjaToken::real : JinjaToken::integer, text);
        advance(end);
    }
    void string(char quote) {
        std::string value;
        size_t i = at_ + 1;
        for (; i < s_.size() && s_[i] != quote; i++) {
            if (s_[i] != '\\') {
                value += s_[i];
                continue;
            }
            if (++i >= s_.size()) break;
            constexpr std::string_view letters = "ntr\\'\"abfv", codes = "\n\t\r\\'\"\a\b\f\v";
            const size_t known = letters.find(s_[i]);
            const int hex = s_[i] == 'x' ? 2 : s_[i] == 'u' ? 4 : s_[i] == 'U' ? 8 : 0;
            if (known < letters.size()) value += codes[known];
            else if (hex) {
                const std::string code(rest(i + 1).substr(0, (size_t)hex));
                char* end = nullptr;
                const unsigned long c = strtoul(code.c_str(), &end, 16);
                if ((int)code.size() < hex || *end || c > 0x10ffff) wrong("a string has a wrong escape");
                value += utf8((uint32_t)c);
                i += (size_t)hex;
            } else if (s_[i] >= '0' && s_[i] <= '7') {
                uint32_t c = 0;
                for (int n = 0; n < 3 && i < s_.size() && s_[i] >= '0' && s_[i] <= '7'; n++, i++)
                    c = c * 8 + (uint32_t)(s_[i] - '0');
                i--;
                value += utf8(c);
            } else if (s_[i] != '\n') {
                value += '\\';
                value += s_[i];
            }
        }
        if (i >= s_.size()) wrong("a string does not end");
        add(JinjaToken::string, value);
        advance(i + 1);
    }
    void sign(char c) {
        const std::string two(rest(at_).substr(0, 2));
        const bool is_two = two == "//" || two == "**" || two == "==" || two == "!=" || two == ">=" || two == "<=";
        if (!is_two && !strchr("+-/*%~[](){}><=.:|,;", c)) wrong(format("unexpected character '%c'", c));
        if (strchr("([{", c)) open_ += c == '(' ? ')' : c == '[' ? ']' : '}';
        if (strchr(")]}", c)) {
            if (open_.empty() || open_.back() != c) wrong(format("unexpected '%c'", c));
            open_.pop_back();
        }
        add(JinjaToken::sign, is_two ? two : std::string(1, c));
        advance(at_ + (is_two ? 2 : 1));
    }

    std::string s_;
    size_t at_ = 0;
    int line_ = 1;
    std::string open_;  // closing brackets to come
    std::vector<JinjaToken> tokens_;
};

// The nodes of a template, and the names of its variables, which are numbered.
class JinjaParser {
public:
    using Node = std::unique_ptr<JinjaNode>;

    static Node parse(std::string_view source, std::map<std::string, int>& names) {
        JinjaParser parser(JinjaLexer::tokens(source), names);
        return parser.statements({});
    }

private:
    using Token = JinjaToken;
    JinjaParser(std::vector<Token> tokens, std::map<std::string, int>& names) : tokens_(std::move(tokens)), names_(names) {}

    // ---- tokens and nodes ----
    const Token& now() const { return tokens_[at_]; }
    const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
    bool is_sign(const char* text) const { return now().kind == Token::sign && now().text == text; }
    bool is_name(const char* text) const { return now().kind == Token::name && now().text == text; }
    bool skip_sign(const char* text) { return is_sign(text) && ++at_; }
    bool skip_name(const char* text) { return is_name(text) && ++at_; }
    [[noreturn]] void wrong(const std::string& expected) const {
        static const char* const kinds[] = {"text",     "{%",       "%}",       "{{", "}}",     "",
                                            "a string", "a number", "a number", "",   "its end"};
        fail("line %d: expected %s, but got %s", now().line, expected.c_str(),
             *kinds[now().kind] ? kinds[now().kind] : ("'" + now().text + "'").c_str());
    }
    void need_sign(const char* text) {
        if (!skip_sign(text)) wrong(text);
    }
    void need(Token::Kind kind, const char* what) {
        if (now().kind != kind) wrong(what);
        at_++;
    }
    std::string need_name() {
        if (now().kind != Token::name) wrong("a name");
        return tokens_[at_++].text;
    }
    int id_of(const std::string& name) { return names_.emplace(name, (int)names_.size()).first->second; }

    static constexpr int deepest = 150;
    Node make(JinjaNode::Kind kind) const { return Node(new JinjaNode{kind, now().line}); }
    template <class... Kids>
    Node make(JinjaNode::Kind kind, Kids... kids) const {
        Node node = make(kind);
        (add(node, std::move(kids)), ...);
        return node;
    }
    static void deepen(const Node& node, const Node& kid) {
        if (!kid) return;
        node->depth = std::max(node->depth, kid->depth + 1);
        if (node->depth > deepest) fail("line %d: nested more than %d levels deep", node->line, deepest);
    }
    static void add(const Node& node, Node kid) {
        deepen(node, kid);
        node->kids.push_back(std::move(kid));
    }
    struct Level {
        explicit Level(JinjaParser& p) : p(p) {
            if (++p.level_ > deepest) fail("line %d: nested more than %d levels deep", p.now().line, deepest);
        }
        ~Level() { p.level_--; }
        Level(const Level&) = delete;
        Level& operator=(const Level&) = delete;
        JinjaParser& p;
    };

    // ---- statements ----
    // Up to one of the words, which is not consumed, or the end.
    Node statements(const std::vector<const char*>& until) {
        const Level level(*this);
        Node block = make(JinjaNode::block);
        while (now().kind != Token::end) {
            if (now().kind == Token::data) {
                Node node = make(JinjaNode::data);
                node->string = JinjaString(tokens_[at_++].text);
                add(block, std::move(node));
            } else if (now().kind == Token::output_begin) {
                at_++;
                add(block, make(JinjaNode::output, tuple(true)));
                need(Token::output_end, "}}");
            } else {
                need(Token::block_begin, "{%");
                for (const char* word : until)
                    if (is_name(word)) return block;
                add(block, statement());
                need(Token::block_end, "%}");
            }
        }
        if (!until.empty()) wrong(std::string("{% ") + until.back() + " %}");
        return block;
    }
    // A block up to {% word, of which the word is consumed.
    Node body(const char* end) {
        need(Token::block_end, "%}");
        Node block = statements({end});
        at_++;
        return block;
    }
    Node statement() {
        const std::string word = need_name();
        if (word == "if") return if_block();
        if (word == "for") return for_loop();
        if (word == "set") return set();
        if (word == "macro") {
            Node node = make(JinjaNode::macro);
            node->id = id_of(need_name());
            std::vector<Node> defaults = parameters(node);
            add(node, body("endmacro"));
            for (Node& value : defaults) add(node, std::move(value));
            return node;
        }
        if (word == "call") {
            Node node = make(JinjaNode::call_block);
            std::vector<Node> defaults;
            if (is_sign("(")) defaults = parameters(node);
            add(node, expression());
            if (node->kids[0]->kind != JinjaNode::call) wrong("a call");
            add(node, body("endcall"));
            for (Node& value : defaults) add(node, std::move(value));
            return node;
        }
        if (word == "filter") {
            Node filter = filters(nullptr, true);
            return make(JinjaNode::filter_block, std::move(filter), body("endfilter"));
        }
        if (word == "with") {
            Node node = make(JinjaNode::with_block);
            std::vector<Node> values;
            while (now().kind != Token::block_end) {
                if (!values.empty()) need_sign(",");
                node->ids.push_back(id_of(need_name()));
                need_sign("=");
                values.push_back(expression());
            }
            add(node, body("endwith"));
            for (Node& value : values) add(node, std::move(value));
            return node;
        }
        if (word == "generation") return make(JinjaNode::generation, body("endgeneration"));
        if (word == "break" || word == "continue") {
            if (loops_ == 0) fail("line %d: %s outside of a loop", now().line, word.c_str());
            return make(word == "break" ? JinjaNode::break_loop : JinjaNode::continue_loop);
        }
        fail("line %d: unknown or unsupported statement '%.40s'", now().line, word.c_str());
    }
    Node if_block() {
        Node node = make(JinjaNode::if_block);
        for (;;) {
            add(node, tuple(false));
            need(Token::block_end, "%}");
            add(node, statements({"elif", "else", "endif"}));
            if (skip_name("elif")) continue;
            if (skip_name("else")) add(node, body("endif"));
            else at_++;
            return node;
        }
    }
    Node for_loop() {
        Node node = make(JinjaNode::for_loop);
        add(node, target());
        if (!skip_name("in")) wrong("in");
        add(node, tuple(false));
        add(node, skip_name("if") ? expression() : nullptr);
        node->integer = skip_name("recursive");
        need(Token::block_end, "%}");
        loops_++;
        add(node, statements({"endfor", "else"}));
        loops_--;
        if (skip_name("else")) add(node, body("endfor"));
        else {
            at_++;
            add(node, nullptr);
        }
        return node;
    }
    Node set() {
        Node to = target();
        if (skip_sign("=")) return make(JinjaNode::assign, std::move(to), tuple(true));
        Node filter = is_sign("|") ? filters(nullptr, false) : nullptr;
        return make(JinjaNode::assign_block, std::move(to), std::move(filter), body("endset"));
    }
    // Names, one attribute of a namespace, or a tuple of them.
    Node target() {
        const Level level(*this);
        Node first = nullptr;
        bool several = false;
        Node all = make(JinjaNode::tuple);
        do {
            if (!several && first) {
                several = true;
                add(all, std::move(first));
            }
            if (now().kind != Token::name && !is_sign("(")) break;
            Node one;
            if (skip_sign("(")) {
                one = target();
                need_sign(")");
            } else {
                one = make(JinjaNode::name);
                one->string = JinjaString(now().text);
                one->id = id_of(need_name());
                if (skip_sign(".")) {
                    one = make(JinjaNode::attribute, std::move(one));
                    one->string = JinjaString(need_name());
                }
            }
            if (several) add(all, std::move(one));
            else first = std::move(one);
        } while (skip_sign(","));
        if (!several && !first) wrong("a name");
        return several ? std::move(all) : std::move(first);
    }
    std::vector<Node> parameters(const Node& node) {
        std::vector<Node> defaults;
        need_sign("(");
        while (!is_sign(")")) {
            if (!node->ids.empty()) need_sign(",");
            node->ids.push_back(id_of(need_name()));
            if (skip_sign("=")) defaults.push_back(expression());
            else if (!defaults.empty()) wrong("a default value");
        }
        at_++;
        return defaults;
    }

    // ---- expressions, from the weakest operator to the strongest ----
    Node tuple(bool conditional, bool parentheses = false) {
        const auto ends = [&] {
            return now().kind == Token::block_end || now().kind == Token::output_end || is_sign(")") ||
                   (!conditional && (is_name("if") || is_name("recursive")));
        };
        const auto one = [&] { return conditional ? expression() : either(); };
        if (ends()) {
            if (!parentheses) wrong("an expression");
            return make(JinjaNode::tuple);
        }
        Node first = one();
        if (!is_sign(",")) return first;
        Node all = make(JinjaNode::tuple, std::move(first));
        while (skip_sign(",") && !ends()) add(all, one());
        return all;
    }
    Node expression() {
        const Level level(*this);
        Node value = either();
        while (skip_name("if")) {
            Node condition = either();
            Node other = skip_name("else") ? expression() : nullptr;
            value = make(JinjaNode::condition, std::move(condition), std::move(value), std::move(other));
        }
        return value;
    }
    Node either() {
        Node left = both();
        while (skip_name("or")) left = make(JinjaNode::either, std::move(left), both());
        return left;
    }
    Node both() {
        Node left = negation();
        while (skip_name("and")) left = make(JinjaNode::both, std::move(left), negation());
        return left;
    }
    Node negation() {
        const Level level(*this);
        if (skip_name("not")) return make(JinjaNode::negation, negation());
        return compare();
    }
    Node compare() {
        Node first = sum();
        Node all = make(JinjaNode::compare);
        for (;;) {
            char op = 0;
            if (now().kind == Token::sign)
                for (const auto& [text, letter] :
                     {std::pair("==", '='), {"!=", '!'}, {"<", '<'}, {">", '>'}, {"<=", 'l'}, {">=", 'g'}})
                    if (now().text == text) op = letter;
            if (is_name("in")) op = 'i';
            if (is_name("not") && ahead().kind == Token::name && ahead().text == "in") {
                op = 'n';
                at_++;
            }
            if (!op) break;
            at_++;
            if (all->ops.empty()) add(all, std::move(first));
            all->ops += op;
            add(all, sum());
        }
        return all->ops.empty() ? std::move(first) : std::move(all);
    }
    Node operation(Node left, char op, Node right) {
        Node node = make(JinjaNode::binary, std::move(left), std::move(right));
        node->ops = std::string(1, op);
        return node;
    }
    Node sum() {
        Node left = concat();
        while (is_sign("+") || is_sign("-")) {
            const char op = tokens_[at_++].text[0];
            left = operation(std::move(left), op, concat());
        }
        return left;
    }
    Node concat() {
        Node first = product();
        if (!is_sign("~")) return first;
        Node all = make(JinjaNode::concat, std::move(first));
        while (skip_sign("~")) add(all, product());
        return all;
    }
    Node product() {
        Node left = power();
        while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
            const std::string sign = tokens_[at_++].text;
            left = operation(std::move(left), sign == "//" ? '_' : sign[0], power());
        }
        return left;
    }
    Node power() {
        Node left = unary(true);
        while (skip_sign("**")) left = operation(std::move(left), '^', unary(true));
        return left;
    }
    Node unary(bool filtered) {
        const Level level(*this);
        Node node;
        if (skip_sign("-")) node = make(JinjaNode::negative, unary(false));
        else if (skip_sign("+")) node = make(JinjaNode::positive, unary(false));
        else node = primary();
        node = postfix(std::move(node));
        return filtered ? filter_or_test(std::move(node)) : std::move(node);
    }
    Node primary() {
        const Token token = now();
        at_ += token.kind != Token::end;
        if (token.kind == Token::name) {
            if (token.text == "true" || token.text == "false" || token.text == "True" || token.text == "False") {
                Node node = make(JinjaNode::truth);
                node->integer = token.text[0] == 't' || token.text[0] == 'T';
                return node;
            }
            if (token.text == "none" || token.text == "None") return make(JinjaNode::none);
            Node node = make(JinjaNode::name);
            node->id = id_of(token.text);
            node->string = JinjaString(token.text);
            return node;
        }
        if (token.kind == Token::string) {
            std::string text = token.text;
            while (now().kind == Token::string) text += tokens_[at_++].text;
            Node node = make(JinjaNode::text);
            node->string = JinjaString(text);
            return node;
        }
        if (token.kind == Token::integer || token.kind == Token::real) {
            Node node = make(token.kind == Token::integer ? JinjaNode::number : JinjaNode::real);
            if (token.kind == Token::integer) node->integer = strtoll(token.text.c_str(), nullptr, 10);
            else node->real_value = strtod(token.text.c_str(), nullptr);
            return node;
        }
        if (token.kind == Token::sign && token.text == "(") {
            Node node = tuple(true, true);
            need_sign(")");
            return node;
        }
        if (token.kind == Token::sign && (token.text == "[" || token.text == "{")) {
            const bool dict = token.text == "{";
            Node node = make(dict ? JinjaNode::dict : JinjaNode::array);
            const char* end = dict ? "}" : "]";
            while (!is_sign(end)) {
                if (!node->kids.empty()) need_sign(",");
                if (is_sign(end)) break;
                add(node, expression());
                if (dict) {
                    need_sign(":");
                    add(node, expression());
                }
            }
            at_++;
            return node;
        }
        at_--;
        wrong("an expression");
    }
    Node postfix(Node node) {
        for (;;) {
            if (skip_sign(".")) {
                if (now().kind == Token::integer) {
                    Node index = primary();
                    node = make(JinjaNode::item, std::move(node), std::move(index));
                    continue;
                }
                Node got = make(JinjaNode::attribute, std::move(node));
                got->string = JinjaString(need_name());
                node = std::move(got);
            } else if (skip_sign("[")) node = subscript(std::move(node));
            else if (is_sign("(")) {
                Node call = make(JinjaNode::call, std::move(node));
                arguments(call);
                node = std::move(call);
            } else return node;
        }
    }
    Node subscript(Node node) {
        Node parts[3];
        bool is_slice = false;
        int part = 0;
        while (!is_sign("]")) {
            if (skip_sign(":")) {
                is_slice = true;
                if (++part > 2) wrong("]");
            } else if (parts[part]) wrong("]");
            else parts[part] = expression();
        }
        at_++;
        if (is_slice)
            return make(JinjaNode::slice, std::move(node), std::move(parts[0]), std::move(parts[1]), std::move(parts[2]));
        if (!parts[0]) wrong("an index");
        return make(JinjaNode::item, std::move(node), std::move(parts[0]));
    }
    void arguments(const Node& node) {
        need_sign("(");
        bool first = true;
        while (!is_sign(")")) {
            if (!first) need_sign(",");
            first = false;
            if (is_sign(")")) break;
            if (now().kind == Token::name && ahead().kind == Token::sign && ahead().text == "=") {
                const std::string name = need_name();
                at_++;
                Node value = expression();
                deepen(node, value);
                node->named.emplace_back(name, std::move(value));
            } else if (!node->named.empty()) wrong("a named argument");
            else add(node, expression());
        }
        at_++;
    }
    Node filter_or_test(Node node) {
        for (;;) {
            if (is_sign("|")) node = filters(std::move(node), false);
            else if (skip_name("is")) node = test(std::move(node));
            else if (is_sign("(")) {
                Node call = make(JinjaNode::call, std::move(node));
                arguments(call);
                node = std::move(call);
            } else return node;
        }
    }
    // One or more filters; `inner`: the first is not preceded by |.
    Node filters(Node node, bool inner) {
        while (inner || skip_sign("|")) {
            inner = false;
            Node filter = make(JinjaNode::filter, std::move(node));
            filter->string = JinjaString(need_name());
            if (is_sign("(")) arguments(filter);
            node = std::move(filter);
        }
        return node;
    }
    Node test(Node node) {
        const bool negated = skip_name("not");
        Node test = make(JinjaNode::test, std::move(node));
        test->string = JinjaString(need_name());
        const auto kind = now().kind;
        if (is_sign("(")) arguments(test);
        else if ((kind == Token::name || kind == Token::string || kind == Token::integer || kind == Token::real ||
                  is_sign("[") || is_sign("{")) &&
                 !is_name("else") && !is_name("or") && !is_name("and")) {
            if (is_name("is")) wrong("the end of a test");
            add(test, postfix(primary()));
        }
        return negated ? make(JinjaNode::negation, std::move(test)) : std::move(test);
    }

    std::vector<Token> tokens_;
    std::map<std::string, int>& names_;
    size_t at_ = 0;
    int level_ = 0, loops_ = 0;
};
