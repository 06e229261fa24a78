// Renders Jinja templates, as Jinja's sandbox with the settings of transformers' chat templates does (jinja_parser.h: the
// syntax). A template comes with a model, from anywhere: it reads the given variables and nothing else, and its steps, memory,
// and recursion are bounded.
//
// A string knows which message each part of it is from, also after it was cut, joined, or replaced in. Therefore the result
// shows where a message's text is: chat_template.h needs it for the loss, and to keep text that spells a special token text.
// Threads that render the same template share only its tree.
#pragma once
#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/text.h"
#include "jinja_strings.h"

// A parsed template.
class JinjaTemplate {
public:
    explicit JinjaTemplate(std::string_view source) { root_ = JinjaParser::parse(source, names_); }
    const JinjaNode& root() const { return *root_; }
    int id(const std::string& name) const {  // -1: the template does not use it
        const auto found = names_.find(name);
        return found == names_.end() ? -1 : found->second;
    }

private:
    std::map<std::string, int> names_;
    std::unique_ptr<JinjaNode> root_;
};

class JinjaRendering : public JinjaStrings {
public:
    // now: the time of strftime_now().
    JinjaRendering(const JinjaTemplate& parsed, time_t now) : template_(parsed), now_(now) {
        root_ = scope(nullptr);
        static const std::vector<JinjaString> functions = {JinjaString("range"), JinjaString("dict"), JinjaString("namespace"),
                                                           JinjaString("raise_exception"), JinjaString("strftime_now")};
        root_->variables.reserve(functions.size() + 8);
        for (const JinjaString& name : functions) {
            Value v;
            v.kind = Value::function;
            v.s = &name;
            set(name.text.c_str(), v);
        }
        loop_id_ = parsed.id("loop");
        caller_id_ = parsed.id("caller");
    }

    void set(const char* name, Value v) {
        if (const int id = template_.id(name); id >= 0) assign(*root_, id, v);
    }

    // Throws Error: the template raised an exception, or is wrong.
    JinjaString render() {
        JinjaString out;
        run(template_.root(), root_, out);
        return out;
    }

private:
    enum class Flow { next, breaks, continues };

    // ---- expressions ----
    Arguments arguments(const Node& node, JinjaScope* scope) {
        Arguments a;
        for (size_t i = 1; i < node.kids.size(); i++) a.positional.push_back(eval(*node.kids[i], scope));
        for (const auto& [name, value] : node.named) a.named.emplace_back(name, eval(*value, scope));
        return a;
    }
    Value eval(const Node& n, JinjaScope* scope) {
        const Level level(*this);
        step();
        line_ = n.line;
        switch (n.kind) {
            case Node::text: return string_at(&n.string);
            case Node::number: return whole(n.integer);
            case Node::real: return real(n.real_value);
            case Node::truth: return boolean(n.integer);
            case Node::none: return none();
            case Node::name: return look_up(scope, n);
            case Node::attribute: return attribute(eval(*n.kids[0], scope), n.string);
            case Node::both:
            case Node::either: {
                const Value left = eval(*n.kids[0], scope);
                return truth(left) == (n.kind == Node::both) ? eval(*n.kids[1], scope) : left;
            }
            case Node::negation: return boolean(!truth(eval(*n.kids[0], scope)));
            case Node::condition: {
                const bool yes = truth(eval(*n.kids[0], scope));
                return yes ? eval(*n.kids[1], scope) : n.kids[2] ? eval(*n.kids[2], scope) : undefined();
            }
            case Node::item: {
                const Value object = eval(*n.kids[0], scope);
                return item(object, eval(*n.kids[1], scope));
            }
            case Node::slice: return slice(n, scope);
            case Node::call: return call(n, scope);
            case Node::filter: return apply_filter(n, n.kids[0] ? eval(*n.kids[0], scope) : undefined(), scope);
            case Node::test: {
                const Value v = eval(*n.kids[0], scope);
                return boolean(test(n.string.text, v, arguments(n, scope)));
            }
            case Node::negative:
            case Node::positive: {
                const Value v = eval(*n.kids[0], scope);
                if (!v.is_number()) wrong_type("a sign", v);
                const int sign = n.kind == Node::negative ? -1 : 1;
                return v.is(Value::real) ? real(sign * v.d) : whole(sign * v.i);
            }
            case Node::binary: {
                if (n.ops[0] == '+') return sum(n, scope);
                const Value left = eval(*n.kids[0], scope);
                return calculate(n.ops[0], left, eval(*n.kids[1], scope));
            }
            case Node::compare: return compare(n, scope);
            case Node::array:
            case Node::tuple:
            case Node::concat:
            case Node::dict: return build(n, scope);
            default: break;
        }
        wrong("a statement where an expression must be");
    }
    Value build(const Node& n, JinjaScope* scope) {
        if (n.kind == Node::concat) {
            JinjaString out;
            for (const auto& kid : n.kids) append(out, eval(*kid, scope));
            return string(std::move(out));
        }
        if (n.kind != Node::dict) {
            Values items;
            for (const auto& kid : n.kids) items.push_back(eval(*kid, scope));
            return list(std::move(items), n.kind == Node::array ? Value::array : Value::tuple);
        }
        const Value made = dict();
        for (size_t i = 0; i < n.kids.size(); i += 2) {
            const Value key = eval(*n.kids[i], scope);
            put(*made.m, key, eval(*n.kids[i + 1], scope));
        }
        return made;
    }
    Value compare(const Node& n, JinjaScope* scope) {
        Value left = eval(*n.kids[0], scope);
        for (size_t i = 0; i < n.ops.size(); i++) {
            const Value right = eval(*n.kids[i + 1], scope);
            bool right_order = false;
            switch (n.ops[i]) {
                case '=': right_order = equal(left, right); break;
                case '!': right_order = !equal(left, right); break;
                case 'i': right_order = contains(right, left); break;
                case 'n': right_order = !contains(right, left); break;
                case '<': right_order = order(left, right) < 0; break;
                case '>': right_order = order(left, right) > 0; break;
                case 'l': right_order = order(left, right) <= 0; break;
                default: right_order = order(left, right) >= 0;
            }
            if (!right_order) return boolean(false);
            left = right;
        }
        return boolean(true);
    }
    // a + b + c: a text grows in one place.
    Value sum(const Node& n, JinjaScope* scope) {
        std::vector<const Node*> later;
        const Node* first = &n;
        for (; first->kind == Node::binary && first->ops[0] == '+'; first = first->kids[0].get())
            later.push_back(first->kids[1].get());
        Value total = eval(*first, scope);
        JinjaString* own = nullptr;
        for (; !later.empty(); later.pop_back()) {
            const Value v = eval(*later.back(), scope);
            if (!total.is(Value::string) || !v.is(Value::string)) {
                total = calculate('+', total, v);
                own = nullptr;
                continue;
            }
            if (!own) {
                own = &strings_.add(*total.s);
                charge(sizeof(JinjaString) + own->text.size());
                total = string_at(own);
            }
            own->append(*v.s);
            charge(v.s->text.size() + v.s->parts.size() * sizeof(JinjaString::Part));
        }
        return total;
    }
    Value calculate(char op, const Value& a, const Value& b) {
        if (a.is_number() && b.is_number()) return calculate_numbers(op, a, b);
        if (op == '+' && a.is(Value::string) && b.is(Value::string)) {
            JinjaString out = *a.s;
            out.append(*b.s);
            return string(std::move(out));
        }
        if (op == '+' && a.is_sequence() && a.kind == b.kind) {
            Values items = a.l->items;
            items.insert(items.end(), b.l->items.begin(), b.l->items.end());
            return list(std::move(items), a.kind);
        }
        if (op == '*' && (a.is_whole() || b.is_whole())) {
            const Value& v = a.is_whole() ? b : a;
            const int64_t times = std::max<int64_t>(0, a.is_whole() ? a.i : b.i);
            const size_t size = v.is(Value::string) ? v.s->text.size() + 1 : v.is_sequence() ? 16 * v.l->items.size() + 1 : 0;
            if (size && times > (int64_t)(most_bytes_ / size)) wrong("it needs too much memory");
            step(times);
            if (v.is(Value::string)) {
                JinjaString out;
                for (int64_t i = 0; i < times; i++) out.append(*v.s);
                return string(std::move(out));
            }
            if (v.is_sequence()) {
                Values items;
                for (int64_t i = 0; i < times; i++) items.insert(items.end(), v.l->items.begin(), v.l->items.end());
                return list(std::move(items), v.kind);
            }
        }
        for (const Value* v : {&a, &b})
            if (v->is(Value::undefined)) fail_undefined(*v);
        wrong(format("unsupported operands of types %s and %s", type_of(a), type_of(b)));
    }
    Value calculate_numbers(char op, const Value& a, const Value& b) {
        const bool divides = op == '/' || op == '_' || op == '%';
        if (divides && b.number() == 0) wrong("division by zero");
        if (a.is_whole() && b.is_whole() && op != '/' && !(op == '^' && b.i < 0)) {
            int64_t r = 1;
            bool over = false;
            if (op == '+') over = __builtin_add_overflow(a.i, b.i, &r);
            else if (op == '-') over = __builtin_sub_overflow(a.i, b.i, &r);
            else if (op == '*') over = __builtin_mul_overflow(a.i, b.i, &r);
            else if (op == '^') {
                if (a.i == 0 || a.i == 1 || a.i == -1) r = b.i == 0 ? 1 : b.i % 2 || a.i >= 0 ? a.i : 1;
                else
                    for (int64_t i = 0; i < b.i && !over; i++) over = __builtin_mul_overflow(r, a.i, &r);
            } else if (b.i == -1) {
                over = op == '_' && __builtin_sub_overflow((int64_t)0, a.i, &r);
                if (op == '%') r = 0;
            } else {
                const int64_t rest = a.i % b.i;
                const bool down = rest != 0 && (rest < 0) != (b.i < 0);
                r = op == '_' ? a.i / b.i - down : rest + (down ? b.i : 0);
            }
            if (over) wrong("an integer is too large");
            return whole(r);
        }
        const double x = a.number(), y = b.number();
        switch (op) {
            case '+': return real(x + y);
            case '-': return real(x - y);
            case '*': return real(x * y);
            case '/': return real(x / y);
            case '_': return real(std::floor(x / y));
            case '%': {
                const double rest = std::fmod(x, y);
                return real(rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest);
            }
            default: break;
        }
        const double power = std::pow(x, y);
        if (!std::isfinite(power)) wrong("a power is not a finite number");
        return real(power);
    }

    // ---- parts of values ----
    static bool is_method(const Value& v, std::string_view name) {
        static constexpr unsigned of_string = 1, of_list = 2, of_dict = 4;
        static const std::unordered_map<std::string_view, unsigned> known = [] {
            std::unordered_map<std::string_view, unsigned> all;
            for (const char* n : {"strip",    "lstrip",  "rstrip",  "split",        "rsplit",       "splitlines", "startswith",
                                  "endswith", "replace", "upper",   "lower",        "title",        "capitalize", "join",
                                  "find",     "rfind",   "index",   "count",        "isdigit",      "isalpha",    "isalnum",
                                  "isspace",  "isupper", "islower", "removeprefix", "removesuffix", "encode",     "format"})
                all[n] |= of_string;
            for (const char* n : {"index", "count", "append", "extend", "insert", "pop", "remove", "clear", "reverse", "sort"})
                all[n] |= of_list;
            for (const char* n :
                 {"get", "items", "keys", "values", "copy", "pop", "update", "clear", "setdefault", "popitem", "fromkeys"})
                all[n] |= of_dict;
            return all;
        }();
        const unsigned kind = v.is(Value::string) ? of_string : v.is_sequence() ? of_list : v.is(Value::dict) ? of_dict : 0;
        if (!kind) return false;
        const auto found = known.find(name);
        return found != known.end() && (found->second & kind);
    }
    Value method(const Value& self, std::string_view name) {
        charge(sizeof(JinjaMethod));
        Value v;
        v.kind = Value::method;
        v.f = &methods_.add({self, name});
        return v;
    }
    Value attribute(const Value& v, const JinjaString& name) {
        if (v.is(Value::undefined)) fail_undefined(v);
        if (v.is(Value::loop)) return loop_attribute(*v.loop_, name);
        if (is_method(v, name.text)) return method(v, name.text);
        if (v.is(Value::dict) || v.is(Value::space))
            if (const Value* found = find(*v.m, std::string_view(name.text))) return *found;
        return undefined(&name);
    }
    Value loop_attribute(const JinjaLoop& loop, const JinjaString& name) {
        const int64_t at = (int64_t)loop.at, n = (int64_t)loop.items->size();
        const std::string& s = name.text;
        if (s == "index") return whole(at + 1);
        if (s == "index0") return whole(at);
        if (s == "revindex") return whole(n - at);
        if (s == "revindex0") return whole(n - at - 1);
        if (s == "first") return boolean(at == 0);
        if (s == "last") return boolean(at + 1 == n);
        if (s == "length") return whole(n);
        if (s == "depth") return whole(loop.depth + 1);
        if (s == "depth0") return whole(loop.depth);
        if (s == "previtem") return at > 0 ? (*loop.items)[(size_t)at - 1] : undefined(&name);
        if (s == "nextitem") return at + 1 < n ? (*loop.items)[(size_t)at + 1] : undefined(&name);
        if (s != "cycle" && s != "changed") return undefined(&name);
        Value self;
        self.kind = Value::loop;
        self.loop_ = const_cast<JinjaLoop*>(&loop);
        return method(self, s);
    }
    Value item(const Value& v, const Value& key) {
        if (v.is(Value::undefined)) fail_undefined(v);
        const JinjaString* name = key.is(Value::string) ? key.s : nullptr;
        if (v.is(Value::dict))
            if (const Value* found = find(*v.m, key)) return *found;
        if (name) return v.is(Value::loop) || !v.is(Value::space) ? attribute(v, *name) : undefined(name);
        if (!key.is_whole() || !(v.is_sequence() || v.is(Value::string))) return undefined(name);
        const int64_t n = length(v), at = key.i < 0 ? key.i + n : key.i;
        if (at < 0 || at >= n) return undefined();
        if (v.is_sequence()) return v.l->items[(size_t)at];
        const size_t begin = byte_of(v.s->text, 0, at);
        return part_of(*v.s, begin, byte_of(v.s->text, begin, 1));
    }
    Value slice(const Node& n, JinjaScope* scope) {
        const Value v = eval(*n.kids[0], scope);
        Value bounds[3];
        for (size_t i = 0; i < 3; i++) {
            bounds[i] = n.kids[i + 1] ? eval(*n.kids[i + 1], scope) : none();
            if (!bounds[i].is(Value::none)) integer(bounds[i], "a slice");
        }
        if (!v.is_sequence() && !v.is(Value::string)) wrong_type("a slice", v);
        const int64_t size = length(v), step = bounds[2].is(Value::none) ? 1 : bounds[2].i;
        if (step == 0) wrong("the step of a slice is 0");
        const auto bound = [&](const Value& b, int64_t otherwise) {
            if (b.is(Value::none)) return otherwise;
            const int64_t at = b.i < 0 ? b.i + size : b.i;
            return std::clamp(at, step < 0 ? (int64_t)-1 : 0, step < 0 ? size - 1 : size);
        };
        const int64_t first = bound(bounds[0], step < 0 ? size - 1 : 0), last = bound(bounds[1], step < 0 ? -1 : size);
        if (v.is(Value::string) && step == 1) {
            const size_t begin = byte_of(v.s->text, 0, first);
            return part_of(*v.s, begin, byte_of(v.s->text, begin, last - first));
        }
        const Values all = items_of(v);
        Values chosen;
        for (int64_t i = first; step < 0 ? i > last : i < last;) {
            chosen.push_back(all[(size_t)i]);
            if (__builtin_add_overflow(i, step, &i)) break;
        }
        return v.is(Value::string) ? join(chosen, JinjaString()) : list(std::move(chosen), v.kind);
    }

    // ---- calls ----
    Value call(const Node& n, JinjaScope* scope, const JinjaMacro* caller = nullptr) {
        const Node& callee = *n.kids[0];
        Value f;
        JinjaMethod direct;
        if (callee.kind == Node::attribute) {  // saves the method as a value
            const Value object = eval(*callee.kids[0], scope);
            if (is_method(object, callee.string.text)) {
                direct = {object, callee.string.text};
                f.kind = Value::method;
                f.f = &direct;
            } else f = attribute(object, callee.string);
        } else f = eval(callee, scope);
        Arguments a = arguments(n, scope);
        if (caller && f.is(Value::macro)) return call_macro(*f.macro_, a, caller);
        switch (f.kind) {
            case Value::macro: return call_macro(*f.macro_, a, nullptr);
            case Value::method:
                if (f.f->self.is(Value::loop)) return call_loop(*f.f, a);
                return f.f->self.is(Value::string) ? string_method(*f.f->self.s, f.f->name, a) : other_method(*f.f, a);
            case Value::function: return call_function(f.s->text, a);
            case Value::loop: {  // of a recursive loop
                if (!f.loop_->node->integer) wrong("the loop is not recursive");
                JinjaString out;
                loop(*f.loop_->node, f.loop_->scope, need(a, 0, "iterable", "loop"), f.loop_->depth + 1, out);
                return string(std::move(out));
            }
            default: wrong_type("a call", f);
        }
    }
    Value call_macro(const JinjaMacro& macro, const Arguments& a, const JinjaMacro* caller) {
        const Level level(*this);
        const Node& n = *macro.node;
        const size_t block = n.kind == Node::call_block ? 1 : 0;
        JinjaScope* inner = scope(macro.scope);
        if (a.positional.size() > n.ids.size()) wrong("a macro has too many arguments");
        const size_t defaults = n.kids.size() - block - 1;
        std::vector<bool> given(n.ids.size());
        for (size_t i = 0; i < a.positional.size(); i++) {
            assign(*inner, n.ids[i], a.positional[i]);
            given[i] = true;
        }
        for (const auto& [name, value] : a.named) {
            const auto found = std::find(n.ids.begin(), n.ids.end(), template_.id(std::string(name)));
            if (found == n.ids.end() || given[(size_t)(found - n.ids.begin())])
                wrong(format("a macro has no argument '%.40s', or has it twice", std::string(name).c_str()));
            assign(*inner, *found, value);
            given[(size_t)(found - n.ids.begin())] = true;
        }
        for (size_t i = 0; i < n.ids.size(); i++)
            if (!given[i]) {
                const bool has = i + defaults >= n.ids.size();
                assign(*inner, n.ids[i], has ? eval(*n.kids[block + 1 + i + defaults - n.ids.size()], inner) : undefined());
            }
        if (caller_id_ >= 0 && n.kind == Node::macro) {
            Value v = undefined();
            if (caller) {
                v.kind = Value::macro;
                v.macro_ = caller;
            }
            assign(*inner, caller_id_, v);
        }
        JinjaString out;
        run(*n.kids[block], inner, out);
        return string(std::move(out));
    }
    Value call_loop(const JinjaMethod& m, const Arguments& a) {
        JinjaLoop& loop = *m.self.loop_;
        if (m.name == "cycle") {
            if (a.positional.empty()) wrong("cycle has no values");
            return a.positional[loop.at % a.positional.size()];
        }
        const Value now = list(a.positional, Value::tuple);
        const bool changed = !loop.has_seen || !equal(loop.last_seen, now);
        loop.has_seen = true;
        loop.last_seen = now;
        return boolean(changed);
    }
    Value call_function(const std::string& name, const Arguments& a) {
        if (name == "raise_exception") fail("%s", as_text(need(a, 0, "message", "raise_exception")).text.c_str());
        if (name == "strftime_now") {
            const std::string form = text_of(need(a, 0, "format", "strftime_now"), "strftime_now").text;
            tm local{};
            localtime_r(&now_, &local);
            char buffer[1000];
            return text(
                std::string_view(buffer, form.size() < 200 ? strftime(buffer, sizeof(buffer), form.c_str(), &local) : 0));
        }
        if (name == "range") {
            int64_t bounds[3] = {0, 0, 1};
            const size_t n = a.positional.size();
            if (n < 1 || n > 3) wrong("range takes 1 to 3 arguments");
            for (size_t i = 0; i < n; i++) bounds[n == 1 ? 1 : i] = integer(a.positional[i], "range");
            const auto [first, last, by] = bounds;
            if (by == 0) wrong("the step of a range is 0");
            Values items;
            for (int64_t i = first; by < 0 ? i > last : i < last;) {
                if (items.size() >= 100000) wrong("a range is longer than 100000");
                items.push_back(whole(i));
                if (__builtin_add_overflow(i, by, &i)) break;
            }
            return list(std::move(items));
        }
        // dict and namespace
        const Value made = dict({}, name == "dict" ? Value::dict : Value::space);
        if (const Value* first = a.find(0, "")) {
            if (first->is(Value::undefined)) fail_undefined(*first);
            if (first->is(Value::dict)) made.m->items = copied(*first->m);
            else
                for (const Value& pair : items_of(*first)) {
                    if (!pair.is_sequence() || pair.l->items.size() != 2) wrong_type("dict", pair);
                    put(*made.m, pair.l->items[0], pair.l->items[1]);
                }
        }
        for (const auto& [key, value] : a.named) put(*made.m, text(key), value);
        return made;
    }
    Value other_method(const JinjaMethod& m, const Arguments& a) {
        const std::string_view name = m.name;
        if (m.self.is(Value::dict)) {
            JinjaDict& d = *m.self.m;
            if (name == "get") {
                const Value* found = find(d, need(a, 0, "key", "get"));
                return found ? *found : a.take(1, "default", none());
            }
            if (name == "items") return pairs_of(d);
            if (name == "copy") return dict(copied(d));
            if (name == "keys" || name == "values") {
                Values all;
                for (const auto& [key, value] : d.items) all.push_back(name == "keys" ? key : value);
                return list(std::move(all));
            }
        } else if (name == "count" || name == "index") {
            const Value what = need(a, 0, "value", "count");
            int64_t n = 0;
            for (size_t i = 0; i < m.self.l->items.size(); i++)
                if (equal(m.self.l->items[i], what)) {
                    if (name == "index") return whole((int64_t)i);
                    n++;
                }
            if (name == "index") wrong("index: the value is not in the list");
            return whole(n);
        }
        wrong(format("%s.%s changes its object, which is not allowed", type_of(m.self), std::string(name).c_str()));
    }
    Value pairs_of(const JinjaDict& d) {
        Values all;
        for (const auto& [key, value] : d.items) all.push_back(list({key, value}, Value::tuple));
        return list(std::move(all));
    }

    // ---- filters and tests ----
    // The value under a path such as "function.name" or 0.
    Value path(Value v, const Value& at) {
        if (!at.is(Value::string)) return item(v, at);
        const std::string& names = at.s->text;
        for (size_t begin = 0; begin <= names.size();) {
            const size_t end = std::min(names.find('.', begin), names.size());
            const std::string name = names.substr(begin, end - begin);
            const bool digits = !name.empty() && name.size() < 10 && name.find_first_not_of("0123456789") == std::string::npos;
            v = item(v, digits ? whole(atoll(name.c_str())) : text(name));
            begin = end + 1;
        }
        return v;
    }
    Value lower_if_text(const Value& v, bool case_sensitive) {
        return v.is(Value::string) && !case_sensitive ? in_case(*v.s, 'l') : v;
    }
    Values sorted(Values items, const Value& attribute, bool case_sensitive, bool reverse) {
        std::vector<std::pair<Value, Value>> keyed;
        for (const Value& one : items) {
            const Value key = attribute.is(Value::none) ? one : path(one, attribute);
            keyed.emplace_back(lower_if_text(key, case_sensitive), one);
        }
        // Comparisons may throw: not within std::sort, whose order they define.
        const auto less = [&](const Value& x, const Value& y) { return !equal(x, y) && order(x, y) < 0; };
        for (size_t i = 1; i < keyed.size(); i++) less(keyed[0].first, keyed[i].first);
        std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& x, const auto& y) {
            return reverse ? less(y.first, x.first) : less(x.first, y.first);
        });
        for (size_t i = 0; i < items.size(); i++) items[i] = keyed[i].second;
        return items;
    }
    Arguments without(const Arguments& a, size_t n) {
        Arguments rest = a;
        rest.positional.erase(rest.positional.begin(),
                              rest.positional.begin() + (std::ptrdiff_t)std::min(n, a.positional.size()));
        return rest;
    }
    Value chosen(const std::string& name, const Value& v, const Arguments& a) {
        const bool by_attribute = ends_with(name, "attr"), keeps = begins_with(name, "select");
        const Value attribute = by_attribute ? need(a, 0, "attribute", name.c_str()) : none();
        const Arguments rest = without(a, by_attribute);
        Values kept;
        for (const Value& one : truth(v) ? items_of(v) : Values()) {
            const Value x = by_attribute ? path(one, attribute) : one;
            const bool yes =
                rest.positional.empty() ? truth(x) : test(text_of(rest.positional[0], "a test").text, x, without(rest, 1));
            if (yes == keeps) kept.push_back(one);
        }
        return list(std::move(kept));
    }
    Value apply_filter(const Node& n, const Value& v, JinjaScope* scope) {
        const Arguments a = arguments(n, scope);
        return filter(n.string.text, v, a);
    }
    Value filter(const std::string& name, const Value& v, const Arguments& a) {
        const Level level(*this);
        if (name == "trim") return strip(as_text(v), a.take(0, "chars", none()));
        if (name == "length" || name == "count") return whole(length(v));
        if (name == "string" || name == "safe") return v.is(Value::string) ? v : string(as_text(v));
        if (name == "tojson") return tojson(v, a);
        if (name == "default" || name == "d") {
            const bool any = truth(a.take(1, "boolean", boolean(false)));
            return v.is(Value::undefined) || (any && !truth(v)) ? a.take(0, "default_value", text("")) : v;
        }
        if (name == "upper" || name == "lower" || name == "capitalize") return in_case(as_text(v), name[0]);
        if (name == "title") return in_case(as_text(v), 'f');
        if (name == "join") {
            Values items = items_of(v);
            if (const Value* attribute = a.find(1, "attribute"))
                for (Value& one : items) one = path(one, *attribute);
            return join(items, as_text(a.take(0, "d", text(""))));
        }
        if (name == "replace") {
            const JinjaString from = as_text(need(a, 0, "old", "replace")), to = as_text(need(a, 1, "new", "replace"));
            const Value most = a.take(2, "count", none());
            return replace(as_text(v), from, to, most.is(Value::none) ? -1 : integer(most, "replace"));
        }
        if (name == "first" || name == "last") {
            const Values items = items_of(v);
            return items.empty() ? undefined() : name == "first" ? items.front() : items.back();
        }
        if (name == "list") return list(items_of(v));
        if (name == "items") {
            if (v.is(Value::undefined)) return list({});
            if (!v.is(Value::dict)) wrong_type("items", v);
            return pairs_of(*v.m);
        }
        if (name == "dictsort") {
            if (!v.is(Value::dict)) wrong_type("dictsort", v);
            const std::string by = text_of(a.take(1, "by", text("key")), "dictsort").text;
            if (by != "key" && by != "value") wrong("dictsort is by key or value");
            return list(sorted(pairs_of(*v.m).l->items, whole(by == "value"),
                               truth(a.take(0, "case_sensitive", boolean(false))),
                               truth(a.take(2, "reverse", boolean(false)))));
        }
        if (name == "sort")
            return list(sorted(items_of(v), a.take(2, "attribute", none()), truth(a.take(1, "case_sensitive", boolean(false))),
                               truth(a.take(0, "reverse", boolean(false)))));
        if (name == "unique" || name == "min" || name == "max") {
            const bool sensitive = truth(a.take(0, "case_sensitive", boolean(false)));
            const Value attribute = a.take(1, "attribute", none());
            Values keys, kept;
            for (const Value& one : items_of(v)) {
                const Value key = lower_if_text(attribute.is(Value::none) ? one : path(one, attribute), sensitive);
                const bool better = keys.empty() || (name == "min" ? order(key, keys[0]) < 0 : order(key, keys[0]) > 0);
                if (name != "unique" && better) {
                    keys = {key};
                    kept = {one};
                } else if (name == "unique" && std::none_of(keys.begin(), keys.end(), [&](auto& k) { return equal(k, key); })) {
                    keys.push_back(key);
                    kept.push_back(one);
                }
            }
            return name == "unique" ? list(std::move(kept)) : kept.empty() ? undefined() : kept[0];
        }
        if (name == "reverse") {
            Values items = items_of(v);
            std::reverse(items.begin(), items.end());
            return v.is(Value::string) ? join(items, JinjaString()) : list(std::move(items));
        }
        if (name == "map") {
            Values items = truth(v) ? items_of(v) : Values();
            const Value* attribute = a.positional.empty() ? a.find(0, "attribute") : nullptr;
            if (!attribute && a.positional.empty()) wrong("map needs a filter or an attribute");
            for (Value& one : items) {
                if (!attribute) one = filter(text_of(a.positional[0], "map").text, one, without(a, 1));
                else {
                    one = path(one, *attribute);
                    if (const Value* other = a.find(1, "default"); other && one.is(Value::undefined)) one = *other;
                }
            }
            return list(std::move(items));
        }
        if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") return chosen(name, v, a);
        if (name == "sum") {
            Value total = a.take(1, "start", whole(0));
            const Value attribute = a.take(0, "attribute", none());
            for (const Value& one : items_of(v))
                total = calculate('+', total, attribute.is(Value::none) ? one : path(one, attribute));
            return total;
        }
        if (name == "int" || name == "float" || name == "abs" || name == "round") return number_filter(name, v, a);
        if (name == "indent") return indent(text_of(v, "indent"), a);
        wrong("unknown or unsupported filter '" + printable(name).substr(0, 40) + "'");
    }
    Value number_filter(const std::string& name, const Value& v, const Arguments& a) {
        if (name == "abs" || name == "round") {
            if (!v.is_number()) wrong_type(name.c_str(), v);
            if (name == "abs")
                return v.is(Value::real) ? real(std::fabs(v.d)) : v.i == INT64_MIN ? real(-(double)v.i) : whole(std::abs(v.i));
            const int64_t digits = std::clamp<int64_t>(integer(a.take(0, "precision", whole(0)), "round"), -300, 300);
            const std::string how = text_of(a.take(1, "method", text("common")), "round").text;
            const double scale = std::pow(10, (double)digits), x = v.number();
            if (how == "ceil") return real(std::ceil(x * scale) / scale);
            if (how == "floor") return real(std::floor(x * scale) / scale);
            if (v.is_whole() && digits >= 0) return whole(v.i);
            return real(digits >= 0 ? strtod(format("%.*f", (int)digits, x).c_str(), nullptr)
                                    : std::nearbyint(x * scale) / scale);
        }
        const bool to_int = name == "int";
        const Value otherwise = a.take(0, "default", to_int ? whole(0) : real(0));
        if (v.is_number()) {
            if (!to_int) return real(v.number());
            if (v.is_whole()) return whole(v.i);
            return std::fabs(v.d) < 9e18 ? whole((int64_t)v.d) : otherwise;
        }
        if (v.is(Value::undefined)) fail_undefined(v);
        if (!v.is(Value::string)) return otherwise;
        const std::string s(stripped(v.s->text, is_python_space));
        const size_t sign = !s.empty() && (s[0] == '-' || s[0] == '+');
        const bool digits = s.size() > sign && s.size() < 19 && s.find_first_not_of("0123456789", sign) == std::string::npos;
        if (to_int && digits) return whole(atoll(s.c_str()));
        if (s.size() <= sign || s.find_first_not_of("0123456789.eE+-") != std::string::npos) return otherwise;
        char* end = nullptr;
        const double d = strtod(s.c_str(), &end);
        if (*end || !std::isfinite(d)) return otherwise;
        return to_int ? std::fabs(d) < 9e18 ? whole((int64_t)d) : otherwise : real(d);
    }
    Value tojson(const Value& v, const Arguments& a) {
        JsonStyle style;
        style.ascii = truth(a.take(0, "ensure_ascii", boolean(false)));
        style.sorted = truth(a.take(3, "sort_keys", boolean(false)));
        const Value indent = a.take(1, "indent", none()), separators = a.take(2, "separators", none());
        style.lines = !indent.is(Value::none);
        if (indent.is(Value::string)) style.indent = indent.s->text;
        else if (style.lines) style.indent = std::string((size_t)std::clamp<int64_t>(integer(indent, "tojson"), 0, 100), ' ');
        if (style.lines) style.item = ",";
        if (!separators.is(Value::none)) {
            if (!separators.is_sequence() || separators.l->items.size() != 2) wrong_type("separators", separators);
            style.item = text_of(separators.l->items[0], "separators").text;
            style.key = text_of(separators.l->items[1], "separators").text;
        }
        JinjaString out;
        append_json(out, v, style);
        return string(std::move(out));
    }
    Value indent(const JinjaString& s, const Arguments& a) {
        const Value width = a.take(0, "width", whole(4));
        const bool first = truth(a.take(1, "first", boolean(false))), blank = truth(a.take(2, "blank", boolean(false)));
        const std::string by = width.is(Value::string)
                                   ? width.s->text
                                   : std::string((size_t)std::clamp<int64_t>(integer(width, "indent"), 0, 1000), ' ');
        JinjaString ended = s, out;
        ended.append("\n");
        const Values lines = lines_of(ended, false);
        for (size_t i = 0; i < lines.size(); i++) {
            if (i) out.append("\n");
            if (i ? blank || !lines[i].s->text.empty() : first) out.append(by);
            out.append(*lines[i].s);
            charge(by.size());
        }
        return string(std::move(out));
    }
    bool test(const std::string& name, const Value& v, const Arguments& a) {
        static const std::vector<std::string> alone = {"defined", "undefined", "none",    "string", "mapping",  "boolean",
                                                       "true",    "false",     "integer", "float",  "number",   "odd",
                                                       "even",    "iterable",  "upper",   "lower",  "sequence", "callable"};
        if (!a.positional.empty() && std::find(alone.begin(), alone.end(), name) != alone.end())
            wrong("the test " + name + " takes no argument");
        const auto other = [&] { return need(a, 0, "other", name.c_str()); };
        if (name == "defined") return !v.is(Value::undefined);
        if (name == "undefined") return v.is(Value::undefined);
        if (name == "none") return v.is(Value::none);
        if (name == "string") return v.is(Value::string);
        if (name == "mapping") return v.is(Value::dict);
        if (name == "boolean") return v.is(Value::boolean);
        if (name == "true" || name == "false") return v.is(Value::boolean) && v.i == (name == "true");
        if (name == "integer") return v.is(Value::integer);
        if (name == "float") return v.is(Value::real);
        if (name == "number") return v.is_number();
        if (name == "iterable" || name == "sequence")
            return v.is_sequence() || v.is(Value::string) || v.is(Value::dict) || v.is(Value::undefined) ||
                   (v.is(Value::loop) && name == "iterable");
        if (name == "callable") return v.kind >= Value::function;
        if (name == "equalto" || name == "eq" || name == "==") return equal(v, other());
        if (name == "ne" || name == "!=") return !equal(v, other());
        if (name == "in") return contains(need(a, 0, "seq", "in"), v);
        if (name == "lt" || name == "lessthan" || name == "<") return order(v, other()) < 0;
        if (name == "le" || name == "<=") return order(v, other()) <= 0;
        if (name == "gt" || name == "greaterthan" || name == ">") return order(v, other()) > 0;
        if (name == "ge" || name == ">=") return order(v, other()) >= 0;
        if (name == "odd" || name == "even") {
            if (!v.is_number()) wrong_type(name.c_str(), v);
            const double rest = v.is(Value::real) ? std::fabs(std::fmod(v.d, 2)) : (double)(v.i % 2 != 0);
            return rest == (name == "odd");
        }
        if (name == "divisibleby") {
            const int64_t by = integer(need(a, 0, "num", "divisibleby"), "divisibleby");
            if (by == 0) wrong("division by zero");
            return by == -1 || integer(v, "divisibleby") % by == 0;
        }
        if (name == "sameas") {
            const Value b = other();
            return v.kind == b.kind &&
                   (v.is(Value::none) || v.is(Value::undefined) || v.i == b.i || (v.is(Value::string) && equal(v, b)));
        }
        if (name == "upper" || name == "lower") return is_class(as_text(v).text, "is" + name);
        wrong("unknown or unsupported test '" + printable(name).substr(0, 40) + "'");
    }

    // ---- statements ----
    Flow run(const Node& n, JinjaScope* scope, JinjaString& out) {
        const Level level(*this);
        step();
        line_ = n.line;
        switch (n.kind) {
            case Node::data:
                charge(n.string.text.size());
                out.append(n.string);
                return Flow::next;
            case Node::output: append(out, eval(*n.kids[0], scope)); return Flow::next;
            case Node::block:
                for (const auto& kid : n.kids)
                    if (const Flow flow = run(*kid, scope, out); flow != Flow::next) return flow;
                return Flow::next;
            case Node::if_block: {
                size_t i = 0;
                for (; i + 1 < n.kids.size(); i += 2)
                    if (truth(eval(*n.kids[i], scope))) return run(*n.kids[i + 1], scope, out);
                return i < n.kids.size() ? run(*n.kids[i], scope, out) : Flow::next;
            }
            case Node::for_loop: loop(n, scope, eval(*n.kids[1], scope), 0, out); return Flow::next;
            case Node::break_loop: return Flow::breaks;
            case Node::continue_loop: return Flow::continues;
            default: run_other(n, scope, out); return Flow::next;
        }
    }
    void run_other(const Node& n, JinjaScope* scope, JinjaString& out) {
        JinjaString inner;
        switch (n.kind) {
            case Node::assign: return assign_to(*n.kids[0], eval(*n.kids[1], scope), scope);
            case Node::assign_block: {
                run(*n.kids[2], this->scope(scope), inner);
                Value v = string(std::move(inner));
                if (n.kids[1]) v = chain(*n.kids[1], v, scope);
                return assign_to(*n.kids[0], v, scope);
            }
            case Node::macro: return assign(*scope, n.id, macro(n, scope));
            case Node::call_block: return append(out, call(*n.kids[0], scope, macro(n, scope).macro_));
            case Node::filter_block:
                run(*n.kids[1], this->scope(scope), inner);
                return append(out, chain(*n.kids[0], string(std::move(inner)), scope));
            case Node::with_block: {
                JinjaScope* own = this->scope(scope);
                for (size_t i = 0; i < n.ids.size(); i++) assign(*own, n.ids[i], eval(*n.kids[i + 1], scope));
                run(*n.kids[0], own, out);
                return;
            }
            case Node::generation:
                run(*n.kids[0], this->scope(scope), inner);
                out.append(inner, true);
                return;
            default: wrong("an expression where a statement must be");
        }
    }
    // Filters of a block, whose innermost one has no input of its own.
    Value chain(const Node& filter, const Value& input, JinjaScope* scope) {
        return apply_filter(filter, filter.kids[0] ? chain(*filter.kids[0], input, scope) : input, scope);
    }
    Value macro(const Node& n, JinjaScope* scope) {
        charge(sizeof(JinjaMacro));
        Value v;
        v.kind = Value::macro;
        v.macro_ = &macros_.add({&n, scope});
        return v;
    }
    void assign_to(const Node& target, const Value& v, JinjaScope* scope) {
        if (target.kind == Node::name) return assign(*scope, target.id, v);
        if (target.kind == Node::attribute) {
            const Value object = eval(*target.kids[0], scope);
            if (!object.is(Value::space)) wrong("only attributes of a namespace can be set");
            return put(*object.m, string_at(&target.string), v);
        }
        const Values parts = items_of(v);
        if (parts.size() != target.kids.size()) wrong(format("%zu values for %zu names", parts.size(), target.kids.size()));
        for (size_t i = 0; i < parts.size(); i++) assign_to(*target.kids[i], parts[i], scope);
    }
    void loop(const Node& n, JinjaScope* outer, const Value& over, int depth, JinjaString& out) {
        const Level level(*this);
        Values items = items_of(over);
        if (n.kids[2]) {
            Values kept;
            for (const Value& one : items) {
                JinjaScope* own = scope(outer);
                assign_to(*n.kids[0], one, own);
                if (truth(eval(*n.kids[2], own))) kept.push_back(one);
            }
            items = std::move(kept);
        }
        const Values& all = lists_.add({std::move(items)}).items;
        JinjaLoop& now = loops_.add({&all, &n, outer, 0, depth, {}, false});
        Value self;
        self.kind = Value::loop;
        self.loop_ = &now;
        bool complete = false;  // as in Jinja, `else` also follows if no iteration came to its end
        for (; now.at < all.size(); now.at++) {
            JinjaScope* own = scope(outer);
            if (loop_id_ >= 0) own->variables.emplace_back(loop_id_, self);
            assign_to(*n.kids[0], all[now.at], own);
            const Flow flow = run(*n.kids[3], own, out);
            complete = complete || flow == Flow::next;
            if (flow == Flow::breaks) break;
        }
        if (!complete && n.kids[4]) run(*n.kids[4], scope(outer), out);
    }

    const JinjaTemplate& template_;
    time_t now_;
    JinjaScope* root_ = nullptr;
    int loop_id_ = -1, caller_id_ = -1;
};
