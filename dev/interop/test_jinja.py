#!/usr/bin/env python3
"""Our Jinja interpreter compared with transformers': every template file of TRL on conversations with system messages, tools,
thoughts and hostile text, and random expressions and statements. Both must give the same text and the same spans of
{% generation %}, or both refuse.

    dev/interop/test_jinja.py JINJA [PROGRAMS]    JINJA: the program of dev/interop/render_jinja.cpp
"""
import copy
import datetime
import json
import pathlib
import random
import subprocess
import sys
import warnings

import jinja2
import transformers.utils.chat_template_utils as chat_utils

warnings.filterwarnings("ignore")
failed = 0
NOW = datetime.datetime.fromtimestamp(1700000000)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None): return NOW


chat_utils.datetime = Clock


def test(name, right, why=""):
    global failed
    failed += not right
    print(("ok: " if right else "FAILED: ") + name + ("" if right else f" {why}"), flush=True)


def theirs(template, variables):
    try:
        compiled = chat_utils._compile_jinja_template(template)
        variables = copy.deepcopy(variables)  # Jinja's indent changes a list
        messages, tools = variables.pop("messages", []), variables.pop("tools", None)
        variables.pop("documents", None)
        prompt = variables.pop("add_generation_prompt", False)
        text, spans = chat_utils._render_with_assistant_indices(compiled, messages, tools, None, prompt, **variables)
        return {"text": text, "spans": spans}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}


def ours(programs):
    lines = "".join(json.dumps({"template": t, "variables": v}) + "\n" for t, v in programs)
    done = subprocess.run([sys.argv[1]], input=lines, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


U, A, S = (lambda t: {"role": "user", "content": t}), (lambda t, **more: {"role": "assistant", "content": t, **more}), (lambda t: {"role": "system", "content": t})
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, True, "ü\n"]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds \"two\" <b>numbers</b>.", "parameters": {
    "type": "object", "properties": {"b": {"type": "array", "items": {"type": "number"}, "description": "second"}, "a": {"type": "integer", "enum": [1, 2]}},
    "required": ["a"]}, "return": {"type": "number"}}}
CONVERSATIONS = [
    [U("Hi"), A("Hello.")],
    [S("Be brief."), U("  the king\n"), A(" the <b>son</b> "), U("and?"), A("so on")],
    [U("a"), A("<think>\none\n</think>\n\ntwo"), U("b"), A("<think>x</think>y")],
    [U("a"), A("two", reasoning_content="one"), U("b"), A("y", reasoning_content="x\n")],
    [S("s"), U("add"), A("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "3", "tool_call_id": "abcdefghi"}, A("It is 3.")],
    [U("add"), A("I add.", tool_calls=[CALL, CALL]), {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}, A("3, 4"), U("x"), A("y")],
    [U("初めに😀 </think> {{ x }} {% if %}"), A("é\u00a0 <|im_end|>"), A("again")],
    [U(""), A("")],
    [A("first"), U("b"), A("c")],
    [U([{"type": "text", "text": "parts"}, {"type": "text", "text": "two"}]), A([{"type": "text", "text": "answer"}])],
    [U("a"), U("b")],
    [S("only")],
    [],
]


def compare_templates():
    import importlib.util
    folder = pathlib.Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    templates = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
    test(f"TRL has {len(templates)} templates", len(templates) >= 60)
    for name, template in templates.items():
        programs = [(template, {"messages": c, "tools": tools, "documents": None, "add_generation_prompt": prompt, "bos_token": "<s>", "eos_token": "</s>", **more})
                    for c in CONVERSATIONS for tools in (None, [TOOL], [TOOL, TOOL["function"]]) for prompt in (False, True)
                    for more in ({}, {"enable_thinking": False})]
        equal = refused = 0
        for (_, v), got in zip(programs, ours(programs), strict=True):
            want = theirs(template, v)
            spans = [s for s in merged(want.get("spans", []))]
            if "error" in want and "error" in got: refused += 1
            elif want.get("text") == got.get("text") and spans == characters(got): equal += 1
            else:
                test(name, False, f"\n{json.dumps(v)}\n theirs {want}\n ours   {got}")
                break
        else: test(f"{name}: {equal} equal, {refused} refused by both", equal > 20)


def merged(spans):
    out = []
    for b, e in sorted(s for s in spans if s[0] < s[1]):
        if out and out[-1][1] == b: out[-1][1] = e
        else: out.append([b, e])
    return out


def characters(got):
    data = got["text"].encode()
    return merged([[len(data[:b].decode()), len(data[:e].decode())] for b, e in got["spans"]])


VARIABLES = {"messages": [U("Hi there"), A("Héllo, \"x\"\n"), {"role": "tool", "content": None, "n": 3}], "tools": None, "documents": None,
             "add_generation_prompt": False, "i": 7, "j": -2, "x": 2.5, "s": "  a b-c, B\n", "e": "", "t": "été ß 12", "flag": True, "off": False, "nothing": None,
             "l": [3, 1, 2, 1], "w": ["b", "A", "c", "a"], "d": {"b": 1, "A": [1, {"k": None}], "items": "i", "c d": 2.0}, "nested": [[1, 2], ["x"], []]}


class Random:
    def __init__(self, seed): self.r = random.Random(seed)
    def pick(self, *options): return self.r.choice(options)

    def constant(self):
        return self.pick("0", "1", "-1", "2", "3", "10", "1.5", "0.1", "1e3", "'a'", "'b'", "''", "' '", "\"it's\"", "'a\\nb'", "','", "true", "false", "none",
                         "'role'", "'content'", "'user'", "[]", "{}", "()", "'%'", "'é'", "'-'", "True", "None")

    def name(self): return self.pick("i", "j", "x", "s", "e", "t", "flag", "off", "nothing", "l", "w", "d", "nested", "messages", "missing", "tools", "i", "s", "l", "w")

    def call_arguments(self): return ", ".join(self.expression(1) for _ in range(self.r.randrange(0, 3)))

    def expression(self, depth):
        if depth <= 0 or self.r.random() < 0.12: return self.pick(self.constant(), self.name(), self.name())
        e = lambda: self.expression(depth - 1)
        kind = self.r.randrange(17)
        if kind == 0: return f"{e()} {self.pick('+', '-', '*', '/', '//', '% 3 +', '**', '~', '+', '~')} {e()}"
        if kind == 1: return f"({e()} {self.pick('==', '!=', '<', '>', '<=', '>=', 'in', 'not in', 'and', 'or')} {e()})"
        if kind == 2: return f"{e()} {self.pick('==', '!=', '<', 'in', 'not in', 'and', 'or')} {e()}"
        if kind == 3: return f"{self.pick('not', '-', 'not', '+')} {e()}"
        if kind == 4: return f"({e()} if {e()}" + (f" else {e()})" if self.r.random() < 0.8 else ")")
        if kind == 5: return f"{self.name()}[{self.pick(e(), '0', '-1', '1', repr('role'), ':2', '1:', '::-1', '-2:', ':-1', '::2', '5:1:-2', f'{self.constant()}:{self.constant()}')}]"
        if kind == 6: return f"{self.name()}.{self.pick('role', 'content', 'items', 'b', 'get', 'upper', '0', 'k')}"
        if kind == 7:
            test = self.pick("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "number", "true", "false", "integer", "float",
                             "odd", "even", f"equalto({e()})", f"equalto {self.constant()}", f"in {self.name()}", f"eq({e()})", f"ne({e()})", f"lt({e()})",
                             f"ge({e()})", "divisibleby 2", "upper", "lower", f"sameas({self.constant()})")
            return f"{self.pick(self.name(), '(' + e() + ')')} is {self.pick('', 'not ')}{test}"
        if kind in (8, 9, 10):
            f = self.pick("trim", "upper", "lower", "length", "tojson", "first", "last", "list", "string", "int", "capitalize", "title", "dictsort", "unique|list",
                          "reverse|list", "sort", "safe", "items|list", "float", "abs", "round", "sum", "min", "max", "count", "sort(reverse=true)", "tojson(indent=2)",
                          f"default({e()})", f"default({e()}, true)", f"d('x', boolean={self.pick('true', 'false')})", f"join({e()})", "join(', ')", "join",
                          "replace('a', 'bb')", f"replace({e()}, {e()})", "replace('', '-')", "indent", "indent(2, true)", "indent(first=true, width=1)", "trim('a ')",
                          "map('upper')|list", "map(attribute='role')|list", "map('string')|join('|')", "select|list", "reject('none')|list", "select('string')|list",
                          "selectattr('role', 'equalto', 'user')|list", "rejectattr('content')|list", "selectattr('n', 'defined')|list", "int(default=5)",
                          "round(1)", "round(1, 'floor')", "dictsort(by='value')", "dictsort(reverse=true)", "tojson(sort_keys=true)", "tojson(separators=(',', ':'))",
                          "sort(case_sensitive=true)", "sort(attribute='role')", "tojson(ensure_ascii=true)", "sum(start=1)", "map('length')|list")
            return f"{self.pick(self.name(), self.name(), '(' + e() + ')')}|{f}"
        if kind in (11, 12):
            m = self.pick("strip()", "lstrip()", "rstrip()", "strip(' a')", "split()", "split(' ')", "split(',', 1)", "upper()", "lower()", "title()", "capitalize()",
                          "startswith('  ')", "endswith('\\n')", f"startswith({e()})", "replace('a', 'x')", "replace('b', '', 1)", "find('b')", "count('b')", "get('b')",
                          f"get({e()}, {e()})", "items()", "keys()", "values()", "splitlines()", "rsplit(' ', 1)", f"join({e()})", "append(1)", "isdigit()", "islower()",
                          "get('zz')", "index(1)", "removeprefix('  ')", "pop()", "rfind('b')", "isalpha()", "isspace()", "isupper()", "splitlines(true)", "split(none, 1)")
            m = m if not m.startswith(("items()", "keys()", "values()")) else m + "|list"
            return f"{self.pick(self.name(), self.name(), '(' + e() + ')', repr('a,b c'))}.{m}"
        if kind == 13: return "[" + ", ".join(e() for _ in range(self.r.randrange(0, 4))) + "]"
        if kind == 14: return "{" + ", ".join(f"{self.constant()}: {e()}" for _ in range(self.r.randrange(0, 3))) + "}"
        if kind == 15: return f"({e()}, {e()})"
        return self.pick(f"range({self.r.randrange(-2, 5)})|list", "range(5, 0, -2)|list", f"dict(a={e()}).a", "namespace(a=1).a", f"dict({self.name()}, z=1)|tojson")

    def sign(self): return self.pick("", "", "", "-", "-", "+")

    def tag(self, body): return "{%" + self.pick("", "-", "+", "") + " " + body + " " + self.pick("", "-", "", "") + "%}"

    def space(self): return self.pick("", " ", "\n", "  \n", "\n  ", "x", "\n\n ", "text\n", " y ")

    def statements(self, depth):
        out = self.space()
        for _ in range(self.r.randrange(1, 4)): out += self.statement(depth) + self.space()
        return out

    def statement(self, depth):
        e = lambda: self.expression(2)
        kind = self.r.randrange(14 if depth > 0 else 3)
        body = lambda: self.statements(depth - 1)
        v = self.pick("i", "v", "s", "q")
        if kind <= 1: return "{{" + self.pick("", "-", "") + " " + e() + " " + self.pick("", "-", "") + "}}"
        if kind == 2: return self.pick("{# note #}", "{#- note -#}", "{# a\n#}", self.tag(f"set {v} = {e()}"), self.tag(f"set {v}, q = {e()}, 2"), "{% raw %} {{ x }} {% endraw %}", "{%- raw -%}\n {% if %} {%- endraw %}\n")
        if kind == 3: return self.tag(f"if {e()}") + body() + self.tag("endif")
        if kind == 4: return self.tag(f"if {e()}") + body() + self.tag(f"elif {e()}") + body() + self.tag("else") + body() + self.tag("endif")
        if kind in (5, 6):
            loop = self.pick("loop.index", "loop.index0", "loop.first", "loop.last", "loop.length", "loop.revindex", "loop.previtem", "loop.nextitem", "loop.previtem.role",
                             "loop.cycle('a', 'b')", "loop.changed(v)", "loop.nextitem is defined", "loop.depth")
            over = self.pick("l", "w", "nested", "messages", "s", "d", "missing", "range(3)", e())
            condition = self.pick("", "", f" if {e()}", " if v", " if v != 1")
            return (self.tag(f"for v in {over}{condition}") + body() + "{{ v }}{{ " + loop + " }}" +
                    self.pick("", self.tag(f"if {e()}") + self.tag(self.pick("break", "continue")) + self.tag("endif")) + body() +
                    self.pick("", self.tag("else") + body()) + self.tag("endfor"))
        if kind == 7: return self.tag(f"for a, b in {self.pick('d.items()', 'd|items', 'd|dictsort', 'nested', '[(1, 2), (3, 4)]')}") + "{{ a }}={{ b }} " + body() + self.tag("endfor")
        if kind == 8: return self.tag(f"set ns = namespace(n=0, v={e()})") + self.tag("for k in range(3)") + self.tag("set ns.n = ns.n + k") + self.tag(f"set ns.v = {e()}") + body() + self.tag("endfor") + "{{ ns.n }}{{ ns.v }}"
        if kind == 9: return self.tag(f"set q{self.pick('', '|upper', '|trim|length')}") + body() + self.tag("endset") + "{{ q }}"
        if kind == 10: return self.tag(f"macro f(a, b={e()}, c='z')") + "{{ a }}{{ b }}{{ c }}" + body() + self.tag("endmacro") + "{{ f(" + self.pick("1", "1, 2", "b=3", "a=s, c=l", "1, c=i", "") + ") }}"
        if kind == 11: return self.tag("macro g(a)") + "<{{ caller(a) if caller else 'no' }}>" + self.tag("endmacro") + self.tag(f"call(y) g({e()})") + "{{ y }}" + body() + self.tag("endcall") + "{{ g(1) }}"
        if kind == 12: return self.tag("generation") + body() + self.tag("endgeneration")
        return self.pick(self.tag(f"filter {self.pick('upper', 'trim', 'title', 'indent(2)')}") + body() + self.tag("endfilter"), self.tag(f"with v = {e()}") + body() + self.tag("endwith"))


def compare_random(count):
    programs = []
    for seed in range(count):
        r = Random(seed)
        programs.append(("{{ " + r.expression(3) + " }}" if seed % 2 else r.statements(2), VARIABLES))
    results = ours(programs)
    equal = refused = 0
    different = []
    for (template, v), got in zip(programs, results, strict=True):
        want = theirs(template, v)
        chat_utils._compile_jinja_template.cache_clear()
        if "error" in want and "error" in got: refused += 1
        elif "text" in want and "text" in got and want["text"] == got["text"]: equal += 1
        elif any(s in want.get("text", "").lower() for s in (" object at 0x", "<built-in", "<bound", "dict_")): refused += 1  # Python's objects, printed
        elif "Markup(" in want.get("text", ""): refused += 1
        else: different.append((template, want, got))
    for template, want, got in different[:20]: print(f"  {template!r}\n    theirs {want}\n    ours   {got}")
    test(f"{count} random programs: {equal} equal, {refused} refused by both", not different and equal > count / 5, f"{len(different)} differ")


if __name__ == "__main__":
    assert jinja2.__version__ >= "3.1"
    compare_templates()
    compare_random(int(sys.argv[2]) if len(sys.argv) > 2 else 20000)
    sys.exit(failed > 0)
