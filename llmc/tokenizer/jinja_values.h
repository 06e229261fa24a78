// The values of a rendering (jinja.h): their memory, kinds and properties, and their text as Python prints it.
//
// Values are views into memory of one rendering, which frees all of it at its end: copying a value copies two words. Memory,
// steps and recursion are bounded.
#pragma once
#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "jinja_parser.h"

struct JinjaList;
struct JinjaDict;
struct JinjaScope;
struct JinjaLoop;
struct JinjaMethod;
struct JinjaMacro;

struct JinjaValue {
    enum Kind : uint8_t {
        undefined,
        none,
        boolean,
        integer,
        real,
        string,
        array,
        tuple,
        dict,
        space,
        function,
        method,
        macro,
        loop
    };
    Kind kind = undefined;
    union {
        int64_t i = 0;         // boolean, integer
        double d;              // real
        const JinjaString* s;  // string, name of a function; of an undefined value if known
        JinjaList* l;          // list, tuple
        JinjaDict* m;          // dict, namespace
        const JinjaMethod* f;
        const JinjaMacro* macro_;
        JinjaLoop* loop_;
    };
    bool is(Kind k) const { return kind == k; }
    bool is_number() const { return kind == boolean || kind == integer || kind == real; }
    bool is_whole() const { return kind == boolean || kind == integer; }
    bool is_sequence() const { return kind == array || kind == tuple; }
    double number() const { return kind == real ? d : (double)i; }
};
struct JinjaList {
    std::vector<JinjaValue> items;
};
struct JinjaDict {
    std::vector<std::pair<JinjaValue, JinjaValue>> items;  // in the order of insertion
};
struct JinjaScope {
    JinjaScope* outer;
    std::vector<std::pair<int, JinjaValue>> variables;
};
struct JinjaLoop {
    const std::vector<JinjaValue>* items;
    const JinjaNode* node;
    JinjaScope* scope;
    size_t at;
    int depth;
    JinjaValue last_seen;  // by changed()
    bool has_seen;
};
struct JinjaMethod {
    JinjaValue self;
    std::string_view name;
};
struct JinjaMacro {
    const JinjaNode* node;
    JinjaScope* scope;
};

// Memory of many values of a type, which stay where they are.
template <class T>
class JinjaPool {
public:
    T& add(T value) {
        if (blocks_.empty() || blocks_.back().size() == blocks_.back().capacity()) {
            blocks_.emplace_back();
            blocks_.back().reserve(blocks_.size() == 1 ? 16 : 256);
        }
        blocks_.back().push_back(std::move(value));
        return blocks_.back().back();
    }

private:
    std::vector<std::vector<T>> blocks_;
};

class JinjaValues {
public:
    using Value = JinjaValue;
    using Values = std::vector<Value>;

    // ---- values ----
    Value text(std::string_view s, int32_t source = JinjaString::literal) {
        if (source != JinjaString::literal) most_bytes_ += 50 * s.size();  // a long message may be cut and joined
        return string(JinjaString(s, source));
    }
    // A text that outlives the rendering.
    static Value string_at(const JinjaString* s) {
        Value v;
        v.kind = Value::string;
        v.s = s;
        return v;
    }
    static Value boolean(bool b) { return whole(b, Value::boolean); }
    static Value none() {
        Value v;
        v.kind = Value::none;
        return v;
    }
    Value list(Values items, Value::Kind kind = Value::array) {
        charge(sizeof(JinjaList) + items.size() * sizeof(Value));
        Value v;
        v.kind = kind;
        v.l = &lists_.add({std::move(items)});
        return v;
    }
    Value dict(std::vector<std::pair<Value, Value>> items = {}, Value::Kind kind = Value::dict) {
        charge(sizeof(JinjaDict) + items.size() * 2 * sizeof(Value));
        Value v;
        v.kind = kind;
        v.m = &dicts_.add({std::move(items)});
        return v;
    }
    template <class Json>
    Value json(const Json& j, int32_t source) {
        if (j.is_null()) return none();
        if (j.is_boolean()) return boolean(j.template get<bool>());
        if (j.is_number_integer()) return whole(j.template get<int64_t>());
        if (j.is_number()) return real(j.template get<double>());
        if (j.is_string()) return text(j.template get_ref<const std::string&>(), source);
        if (j.is_array()) {
            Values items;
            for (const Json& one : j) items.push_back(json(one, source));
            return list(std::move(items));
        }
        std::vector<std::pair<Value, Value>> items;
        for (const auto& [key, value] : j.items()) items.emplace_back(text(key, source), json(value, source));
        return dict(std::move(items));
    }

protected:
    using Node = JinjaNode;
    // ---- errors and bounds ----
    [[noreturn]] void wrong(const std::string& why) const { fail("line %d of the template: %s", line_, why.c_str()); }
    void step(int64_t n = 1) {
        if ((steps_ += n) > most_steps) wrong("it takes too many steps");
    }
    void charge(size_t bytes) {
        if ((bytes_ += bytes) > most_bytes_) wrong("it needs too much memory");
    }
    struct Level {
        explicit Level(JinjaValues& r) : r(r) {
            if (++r.depth_ > most_depth) r.wrong("it is nested too deeply");
        }
        ~Level() { r.depth_--; }
        Level(const Level&) = delete;
        Level& operator=(const Level&) = delete;
        JinjaValues& r;
    };

    // ---- making values ----
    static Value whole(int64_t i, Value::Kind kind = Value::integer) {
        Value v;
        v.kind = kind;
        v.i = i;
        return v;
    }
    static Value real(double d) {
        Value v;
        v.kind = Value::real;
        v.d = d;
        return v;
    }
    const JinjaString* store(JinjaString s) {
        charge(sizeof(JinjaString) + s.text.size() + s.parts.size() * sizeof(JinjaString::Part));
        return &strings_.add(std::move(s));
    }
    Value string(JinjaString s) { return string_at(store(std::move(s))); }
    static Value undefined(const JinjaString* name = nullptr) {
        Value v;
        v.s = name;
        return v;
    }
    Value part_of(const JinjaString& s, size_t begin, size_t end) {
        JinjaString out;
        if (begin < end) out.append(s, begin, end);
        return string(std::move(out));
    }
    Value part_of(const JinjaString& s, std::string_view view) {
        const size_t begin = view.empty() ? 0 : (size_t)(view.data() - s.text.data());
        return part_of(s, begin, begin + view.size());
    }
    JinjaScope* scope(JinjaScope* outer) {
        charge(sizeof(JinjaScope) + 4 * sizeof(std::pair<int, Value>));
        JinjaScope& made = scopes_.add({outer, {}});
        made.variables.reserve(4);
        return &made;
    }
    static void assign(JinjaScope& scope, int id, Value v) {
        for (auto& [known, value] : scope.variables)
            if (known == id) {
                value = v;
                return;
            }
        scope.variables.emplace_back(id, v);
    }
    Value look_up(const JinjaScope* scope, const Node& name) const {
        for (; scope; scope = scope->outer)
            for (const auto& [id, value] : scope->variables)
                if (id == name.id) return value;
        return undefined(&name.string);
    }

    // ---- properties of values ----
    static const char* type_of(const Value& v) {
        static const char* const names[] = {"undefined", "none", "bool",      "int",      "float",  "str",   "list",
                                            "tuple",     "dict", "namespace", "function", "method", "macro", "loop"};
        return names[v.kind];
    }
    [[noreturn]] void fail_undefined(const Value& v) const {
        wrong(v.s ? "'" + printable(v.s->text) + "' is undefined" : "a value is undefined");
    }
    [[noreturn]] void wrong_type(const char* what, const Value& v) const {
        if (v.is(Value::undefined)) fail_undefined(v);
        wrong(format("%s: a value has the type %s", what, type_of(v)));
    }
    static bool truth(const Value& v) {
        switch (v.kind) {
            case Value::undefined:
            case Value::none: return false;
            case Value::boolean:
            case Value::integer: return v.i != 0;
            case Value::real: return v.d != 0;
            case Value::string: return !v.s->text.empty();
            case Value::array:
            case Value::tuple: return !v.l->items.empty();
            case Value::dict: return !v.m->items.empty();
            default: return true;
        }
    }
    bool equal(const Value& a, const Value& b, int level = 0) {
        step();
        if (level > most_levels) wrong("a value is nested too deeply");
        if (a.is_number() && b.is_number()) return a.is_whole() && b.is_whole() ? a.i == b.i : a.number() == b.number();
        if (a.kind != b.kind) return false;
        if (a.is(Value::string)) return a.s->text == b.s->text;
        if (a.is_sequence()) {
            bool same = a.l->items.size() == b.l->items.size();
            for (size_t i = 0; same && i < a.l->items.size(); i++) same = equal(a.l->items[i], b.l->items[i], level + 1);
            return same;
        }
        if (a.is(Value::dict)) {
            bool same = a.m->items.size() == b.m->items.size();
            for (size_t i = 0; same && i < a.m->items.size(); i++) {
                const Value* other = find(*b.m, a.m->items[i].first);
                same = other && equal(a.m->items[i].second, *other, level + 1);
            }
            return same;
        }
        return a.is(Value::undefined) || a.is(Value::none) || a.i == b.i;
    }
    // < 0, 0, > 0 as a is less than, equal to, greater than b.
    int order(const Value& a, const Value& b, int level = 0) {
        step();
        if (level > most_levels) wrong("a value is nested too deeply");
        if (a.is_number() && b.is_number()) {
            if (a.is_whole() && b.is_whole()) return a.i < b.i ? -1 : a.i > b.i;
            return a.number() < b.number() ? -1 : a.number() > b.number();
        }
        if (a.is(Value::string) && b.is(Value::string)) return a.s->text.compare(b.s->text);
        if (a.kind != b.kind || !a.is_sequence()) wrong_type("comparison", a.is_number() || a.is(Value::string) ? b : a);
        const size_t n = std::min(a.l->items.size(), b.l->items.size());
        for (size_t i = 0; i < n; i++)
            if (!equal(a.l->items[i], b.l->items[i], level + 1)) return order(a.l->items[i], b.l->items[i], level + 1);
        return a.l->items.size() < b.l->items.size() ? -1 : a.l->items.size() > b.l->items.size();
    }
    Value* find(JinjaDict& dict, const Value& key) {
        for (auto& [k, v] : dict.items)
            if (equal(k, key)) return &v;
        return nullptr;
    }
    static Value* find(JinjaDict& dict, std::string_view key) {
        for (auto& [k, v] : dict.items)
            if (k.is(Value::string) && k.s->text == key) return &v;
        return nullptr;
    }
    std::vector<std::pair<Value, Value>> copied(const JinjaDict& dict) {
        charge(dict.items.size() * 2 * sizeof(Value));
        return dict.items;
    }
    void check_key(const Value& key) const {
        if (key.is(Value::array) || key.is(Value::dict)) wrong_type("a key", key);
    }
    void put(JinjaDict& dict, const Value& key, const Value& value) {
        check_key(key);
        if (Value* known = find(dict, key)) *known = value;
        else {
            charge(2 * sizeof(Value));
            dict.items.emplace_back(key, value);
        }
    }
    bool contains(const Value& in, const Value& what) {
        if (in.is(Value::string)) {
            if (!what.is(Value::string)) wrong_type("in a str", what);
            step((int64_t)in.s->text.size() / 64);
            return in.s->text.find(what.s->text) != std::string::npos;
        }
        if (in.is(Value::dict)) {
            check_key(what);
            return find(*in.m, what) != nullptr;
        }
        if (in.is(Value::undefined)) return false;
        if (!in.is_sequence()) wrong_type("in", in);
        return std::any_of(in.l->items.begin(), in.l->items.end(), [&](const Value& one) { return equal(one, what); });
    }
    // The items over which a loop goes.
    Values items_of(const Value& v) {
        Values items;
        if (v.is_sequence()) items = v.l->items;
        else if (v.is(Value::dict))
            for (const auto& [key, value] : v.m->items) items.push_back(key);
        else if (v.is(Value::string)) {
            size_t at = 0;
            each_character(v.s->text, [&](int32_t, std::string_view bytes) {
                items.push_back(part_of(*v.s, at, at + bytes.size()));
                at += bytes.size();
            });
        } else if (!v.is(Value::undefined)) wrong_type("iteration", v);
        step((int64_t)items.size());
        charge(items.size() * sizeof(Value));
        return items;
    }
    int64_t length(const Value& v) const {
        if (v.is(Value::string)) return count_characters(v.s->text);
        if (v.is_sequence()) return (int64_t)v.l->items.size();
        if (v.is(Value::dict)) return (int64_t)v.m->items.size();
        if (!v.is(Value::undefined)) wrong_type("length", v);
        return 0;
    }
    int64_t integer(const Value& v, const char* what) const {
        if (!v.is_whole()) wrong_type(what, v);
        return v.i;
    }
    const JinjaString& text_of(const Value& v, const char* what) const {
        if (!v.is(Value::string)) wrong_type(what, v);
        return *v.s;
    }

    // ---- text of values, as Python prints them ----
    static std::string real_text(double d) {
        if (std::isnan(d)) return "nan";
        if (std::isinf(d)) return d < 0 ? "-inf" : "inf";
        char buffer[64];
        const auto shortest = std::to_chars(buffer, buffer + sizeof(buffer), d, std::chars_format::scientific);
        const std::string text(buffer, shortest.ptr);
        const size_t e = text.find('e');
        const int power = atoi(text.c_str() + e + 1);
        if (power < -4 || power >= 16) return text;
        const auto fixed = std::to_chars(buffer, buffer + sizeof(buffer), d, std::chars_format::fixed);
        const std::string digits(buffer, fixed.ptr);
        return digits.find('.') == std::string::npos ? digits + ".0" : digits;
    }
    static std::string quoted(const std::string& s) {
        const char quote = s.find('\'') != std::string::npos && s.find('"') == std::string::npos ? '"' : '\'';
        std::string out(1, quote);
        for (const char c : s) {
            constexpr std::string_view special = "\n\r\t\\", letters = "nrt\\";
            if (const size_t known = special.find(c); known < special.size()) out += {'\\', letters[known]};
            else if (c == quote) out += {'\\', c};
            else if ((unsigned char)c < ' ' || c == 0x7f) out += format("\\x%02x", c);
            else out += c;
        }
        return out + quote;
    }
    void append(JinjaString& out, const Value& v, bool in_list = false, int level = 0) {
        step();
        if (level > most_levels) wrong("a value is nested too deeply");
        const auto each = [&](const auto& items, const char* open, const char* close, auto one) {
            out.append(open);
            for (size_t i = 0; i < items.size(); i++) {
                if (i) out.append(", ");
                one(items[i]);
            }
            out.append(close);
        };
        const auto item = [&](const Value& x) { append(out, x, true, level + 1); };
        const size_t before = out.text.size();
        switch (v.kind) {
            case Value::undefined: out.append(in_list ? "Undefined" : ""); break;
            case Value::none: out.append("None"); break;
            case Value::boolean: out.append(v.i ? "True" : "False"); break;
            case Value::integer: out.append(std::to_string(v.i)); break;
            case Value::real: out.append(real_text(v.d)); break;
            case Value::string: in_list ? out.append(quoted(v.s->text), v.s->source()) : out.append(*v.s); break;
            case Value::array: each(v.l->items, "[", "]", item); break;
            case Value::tuple: each(v.l->items, "(", v.l->items.size() == 1 ? ",)" : ")", item); break;
            case Value::dict:
                each(v.m->items, "{", "}", [&](const auto& pair) {
                    item(pair.first);
                    out.append(": ");
                    item(pair.second);
                });
                break;
            default: wrong_type("output", v);
        }
        charge(out.text.size() - before);
    }
    JinjaString as_text(const Value& v) {
        JinjaString out;
        append(out, v);
        return out;
    }
    // indent < 0: in one line.
    struct JsonStyle {
        std::string item = ", ", key = ": ", indent;
        bool ascii = false, sorted = false, lines = false;
    };
    void append_json(JinjaString& out, const Value& v, const JsonStyle& style, int level = 0) {
        step();
        if (level > most_levels) wrong("a value is nested too deeply");
        const size_t before = out.text.size();
        const auto line = [&](int levels) {
            if (!style.lines) return;
            out.append("\n");
            for (int i = 0; i < levels; i++) out.append(style.indent);
        };
        const auto each = [&](const auto& items, const char* open, const char* close, auto one) {
            out.append(open);
            for (size_t i = 0; i < items.size(); i++) {
                if (i) out.append(style.item);
                line(level + 1);
                one(items[i]);
            }
            if (!items.empty()) line(level);
            out.append(close);
        };
        const auto as_json = [&](const JinjaString& s) {
            out.append(nlohmann::json(s.text).dump(-1, ' ', style.ascii, nlohmann::json::error_handler_t::replace), s.source());
        };
        switch (v.kind) {
            case Value::none: out.append("null"); break;
            case Value::boolean: out.append(v.i ? "true" : "false"); break;
            case Value::integer: out.append(std::to_string(v.i)); break;
            case Value::real:
                out.append(std::isfinite(v.d) ? real_text(v.d) : std::isnan(v.d) ? "NaN" : v.d < 0 ? "-Infinity" : "Infinity");
                break;
            case Value::string: as_json(*v.s); break;
            case Value::array:
            case Value::tuple:
                each(v.l->items, "[", "]", [&](const Value& x) { append_json(out, x, style, level + 1); });
                break;
            case Value::dict: {
                auto pairs = v.m->items;
                if (style.sorted)
                    std::stable_sort(pairs.begin(), pairs.end(), [&](auto& a, auto& b) { return order(a.first, b.first) < 0; });
                each(pairs, "{", "}", [&](const auto& pair) {
                    if (pair.first.is(Value::string)) as_json(*pair.first.s);
                    else {
                        JinjaString key;
                        if (pair.first.kind > Value::real) wrong_type("tojson", pair.first);
                        append_json(key, pair.first, style);
                        out.append("\"" + key.text + "\"");
                    }
                    out.append(style.key);
                    append_json(out, pair.second, style, level + 1);
                });
                break;
            }
            default: wrong_type("tojson", v);
        }
        charge(out.text.size() - before);
    }

    // ---- arguments of calls ----
    // Positional and named arguments of a call; take() finds each by its position and name.
    struct Arguments {
        Values positional;
        std::vector<std::pair<std::string_view, Value>> named;
        const Value* find(size_t place, std::string_view name) const {
            if (place < positional.size()) return &positional[place];
            for (const auto& [n, v] : named)
                if (n == name) return &v;
            return nullptr;
        }
        Value take(size_t place, std::string_view name, Value otherwise) const {
            const Value* found = find(place, name);
            return found ? *found : otherwise;
        }
    };
    Value need(const Arguments& a, size_t place, std::string_view name, const char* what) const {
        const Value* found = a.find(place, name);
        if (!found) wrong(format("%s needs an argument '%s'", what, std::string(name).c_str()));
        return *found;
    }

    int line_ = 0;  // of the template
    size_t most_bytes_ = (size_t)64 << 20;
    JinjaPool<JinjaString> strings_;
    JinjaPool<JinjaList> lists_;
    JinjaPool<JinjaScope> scopes_;
    JinjaPool<JinjaLoop> loops_;
    JinjaPool<JinjaMethod> methods_;
    JinjaPool<JinjaMacro> macros_;

private:
    static constexpr int64_t most_steps = 20'000'000;
    static constexpr int most_depth = 400;
    static constexpr int most_levels = 60;  // of lists in lists, which are compared and printed recursively

    int depth_ = 0;
    int64_t steps_ = 0;
    size_t bytes_ = 0;
    JinjaPool<JinjaDict> dicts_;
};
