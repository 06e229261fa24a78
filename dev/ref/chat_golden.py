#!/usr/bin/env python3
"""Golden tokens and masks of conversations from transformers' apply_chat_template, in test/golden/chat.json.

Two tokenizers of test/golden/tokenizer get the special tokens of chat templates: a byte-level one, and one of characters
with Llama 2's normalizer. Each template appears as in models' tokenizer_config.json (parts only for tools are shortened),
and again with {% generation %} around the assistant's text, for return_assistant_tokens_mask.

    pip install transformers && python3 dev/ref/chat_golden.py        writes the same bytes again
    dev/ref/chat_golden.py --check                                    compares instead
"""
import json
import pathlib
import sys
import tempfile

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "test/golden"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
           "<end_of_turn>", "<think>", "</think>"]


def patch(base, normalizer, eos, bos):
    """A tokenizer's file with the special tokens, the change to it (RFC 6902), and its eos and bos."""
    file = json.loads((GOLDEN / "tokenizer" / base).read_text())
    first = 1 + max(max(file["model"]["vocab"].values()), *(t["id"] for t in file["added_tokens"]))
    change = [{"op": "add", "path": "/added_tokens/-", "value": {
        "id": first + i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}}
        for i, token in enumerate(SPECIAL)]
    if normalizer:
        steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                 {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
        change.append({"op": "replace", "path": "/normalizer", "value": normalizer})
        change.append({"op": "replace", "path": "/decoder", "value": {"type": "Sequence", "decoders": steps}})
    for c in change:
        if c["op"] == "add": file["added_tokens"].append(c["value"])
        else: file[c["path"][1:]] = c["value"]
    return {"base": base, "patch": change, "eos": eos, "bos": bos, "file": file}


LLAMA_2 = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                               {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
TOKENIZERS = {"bytes": patch("gpt2.json", None, "<|endoftext|>", "<|begin_of_text|>"),
              "characters": patch("characters_bpe.json", LLAMA_2, "</s>", "<s>")}

U, A, S = (lambda t: {"role": "user", "content": t}), (lambda t: {"role": "assistant", "content": t}), (lambda t: {"role": "system", "content": t})
CONVERSATIONS = [
    [U("In the beginning?"), A("God created the heaven.")],
    [U("  Who was  first?\n"), A(" Adam.\n\nThen Eve. "), U("初めに神は天と地を創造された。"), A("😀 naïve\tend")],
    [S("Be brief. "), U("the king"), A("the son of the king")],
    [S("答え"), U(" 12 x 34?\n"), A("408"), U("and\u00a0"), A("so on ")],
]
# With thoughts, for the template that supports them.
CONVERSATIONS_WITH_THOUGHTS = [
    [S("x"), U("who?"), A("<think>\nhe or she\n</think>\n\nhe"), U("why?"), A("\n<think>\n\n\nas it is\n</think>\n\n\nso ")],
    [U("a"), A("some</think>thoughts</think>\n\nb"), A("c"), A("\n\nd")],
    [U("a"), A("<think>one<think>two\n</think>b"), A("</think>c"), A("d")],
    [A("no question"), A("\n<think>x</think>\ny")],
    [U("a"), A("b"), U("<tool_response>c</tool_response>"), A("<think>t</think>d"), A("e")],
]
CHATML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ALTERNATE = "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
QWEN2 = CHATML.replace("{% for message in messages %}", "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}")
QWEN25 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\nShortened." }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
QWEN3_BEGIN = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nShortened." }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
"""
QWEN3_TURNS = r"""{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
"""
QWEN3_END = r"""        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {{- 'Shortened.' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
"""
# Qwen3-Instruct-2507, without thoughts, and Qwen3.
QWEN3_2507 = QWEN3_BEGIN + QWEN3_TURNS + r"""        {{- '<|im_start|>' + message.role + '\n' + content }}
""" + QWEN3_END + "{%- endif %}"
QWEN3 = QWEN3_BEGIN + r"""{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
""" + QWEN3_TURNS + r"""        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
""" + QWEN3_END + r"""    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
OLMO2 = "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
WRITTEN_OUT = r"""{# ChatML #}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" -}}
    {{- message.content -}}
    {{- "<|im_end|>\n" -}}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}
"""
LLAMA2 = r"{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}" + ALTERNATE + r"{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
LLAMA3 = "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
LLAMA31 = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message + builtin tools #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: shortened\n\n"}}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions. Shortened." }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{#- Custom tools are passed in a user message with some extra guidance #}
{%- if tools_in_user_message and not tools is none %}
    {{- "Shortened." }}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- "Shortened." }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
MISTRAL01 = MISTRAL.replace("eos_token}}", "eos_token + ' ' }}")
ROLE = "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
GEMMA = "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}" + ALTERNATE + ROLE + "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
GEMMA3 = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
PLAIN = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


def marked(before, text, after, otherwise):
    """A turn with the assistant's text marked."""
    return "{% if message['role'] == 'assistant' %}" + before + "{% generation %}" + text + "{% endgeneration %}" + after + "{% else %}" + otherwise + "{% endif %}"


TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
CHATML_MARKED = marked("{{'<|im_start|>assistant\n'}}", "{{ message['content'] + '<|im_end|>' }}", "{{ '\n' }}", TURN)
HEADER = "{{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}"
# Both branches start with the same text, so that one mark covers the rest of the turn.
QWEN3_MARKED = (QWEN3.replace("        {%- set reasoning_content = '' %}", "        {{- '<|im_start|>assistant\\n' }}{% generation %}\n        {%- set reasoning_content = '' %}")
                .replace("'<|im_start|>' + message.role + '\\n<think>", "'<think>").replace("'<|im_start|>' + message.role + '\\n' + content }}", "content }}")
                .replace("        {{- '<|im_end|>\\n' }}\n    {%- elif", "        {{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}\n    {%- elif"))
# name, template, the same with marks (or None)
TEMPLATES = [
    ("chatml", CHATML, CHATML.replace(TURN, CHATML_MARKED)),
    ("chatml", QWEN2, QWEN2.replace(TURN, CHATML_MARKED)),
    ("chatml", QWEN25, None),
    ("chatml", WRITTEN_OUT, None),
    ("llama-2", LLAMA2, LLAMA2.replace("{{ ' '  + content.strip() + ' ' + eos_token }}", "{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}")),
    ("llama-3", LLAMA3, LLAMA3.replace("{{ content }}", marked(HEADER, "{{ message['content'] | trim + '<|eot_id|>' }}", "", "{{ content }}"))),
    ("llama-3.1", LLAMA31, None),
    ("mistral", MISTRAL, MISTRAL.replace("{{ message['content'] + eos_token}}", "{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}")),
    ("mistral-v0.1", MISTRAL01, None),
    ("gemma", GEMMA, GEMMA.replace("{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
                                   marked("{{ '<start_of_turn>model\n' }}", "{{ message['content'] | trim + '<end_of_turn>' }}", "{{ '\n' }}",
                                          "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"))),
    ("gemma-3", GEMMA3, None),
    ("plain", PLAIN, PLAIN.replace("{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}",
                                   marked("", "{{ message['content'] + eos_token }}", "", "{{ message['content'] }}"))),
    ("chatml", QWEN3_2507, None),
    ("qwen3", QWEN3, QWEN3_MARKED),
    ("olmo-2", OLMO2, OLMO2.replace("{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}",
                                    "{{ '<|assistant|>\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% if not loop.last %}{{ '\n' }}{% endif %}")),
]
# Similar to known ones, but different.
UNKNOWN = [
    "",
    "{{ messages }}",
    CHATML.replace("+ '\n'}}", "}}"),
    CHATML.replace("message['content']", "message['content'] | trim"),
    QWEN2.replace("!= 'system'", "== 'user'"),
    QWEN25.replace("{%- endfor %}\n{%- if add", "{{- 'x' }}{%- endfor %}\n{%- if add"),
    WRITTEN_OUT.replace("-}}\n{%- endfor", "}}\n{% endfor"),
    LLAMA31.replace("26 Jul 2024", "27 Jul 2024"),
    GEMMA.replace("'model'", "'assistant'"),
    MISTRAL.replace("'[INST] '", "'[INST]'"),
    QWEN3.replace("loop.last or (", "("),
    QWEN3_2507.replace("'' %}", "'none' %}"),
    OLMO2.replace("{% if not loop.last %}", "{% if loop.last %}"),
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + eos_token }}{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endif %}{% endfor %}",
]


def main():
    golden = {"tokenizers": {name: {k: t[k] for k in ("base", "patch", "eos", "bos")} for name, t in TOKENIZERS.items()},
              "conversations": CONVERSATIONS + CONVERSATIONS_WITH_THOUGHTS, "unknown": UNKNOWN, "templates": []}
    loaded = {}
    for name, t in TOKENIZERS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            json.dump(t["file"], f)
            f.flush()
            loaded[name] = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(f.name), bos_token=t["bos"], eos_token=t["eos"])
    for name, template, with_marks in TEMPLATES:
        rows = []
        for tokenizer_name, tokenizer in loaded.items():
            if tokenizer_name == "characters" and name not in ("llama-2", "mistral", "chatml"): continue
            if tokenizer_name == "characters" and template not in (LLAMA2, MISTRAL, CHATML): continue
            for i, conversation in enumerate(CONVERSATIONS + (CONVERSATIONS_WITH_THOUGHTS if name == "qwen3" else [])):
                row = {"tokenizer": tokenizer_name, "conversation": i}
                try:
                    row["tokens"] = tokenizer.apply_chat_template(conversation, chat_template=template, return_dict=True)["input_ids"]
                except Exception as e:
                    row["refused"] = str(e)[:40]
                    rows.append(row)
                    continue
                row["prompt"] = tokenizer.apply_chat_template(conversation[:-1], chat_template=template, add_generation_prompt=True,
                                                              return_dict=True)["input_ids"]
                if with_marks:
                    marks = tokenizer.apply_chat_template(conversation, chat_template=with_marks, return_dict=True, return_assistant_tokens_mask=True)
                    assert marks["input_ids"] == row["tokens"], (name, tokenizer_name, i)
                    row["learned"] = "".join(str(m) for m in marks["assistant_masks"])
                rows.append(row)
        golden["templates"].append({"name": name, "jinja": template, "rows": rows})
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":")).replace('{"name":', '\n{"name":').replace('{"tokenizer":', '\n{"tokenizer":') + "\n"
    path = GOLDEN / "chat.json"
    if "--check" not in sys.argv: path.write_text(text)
    elif path.read_text() != text: sys.exit(f"{path} differs from what transformers gives now")
    print(f"{path}: {len(text)} bytes, {sum(len(t['rows']) for t in golden['templates'])} rows")


if __name__ == "__main__": main()
