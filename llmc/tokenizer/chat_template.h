// Renders a conversation as text and encodes it: chatml, llama-2, llama-3, llama-3.1, mistral, gemma, gemma-3, qwen3, olmo-2
// and plain, as transformers' apply_chat_template writes them. A model's own template is a program (Jinja) in
// tokenizer_config.json; none is run here. It is compared with the known spellings of these templates, and refused if it
// matches none of them.
//
// The tokens in the loss are those that the model generates after the prompt of `generate --chat`: the answer and the token
// that ends it. The text between two special tokens is encoded as a whole, as in transformers. If a token would span the
// boundary between prompt and answer, the text is split there instead: in generation, too, an answer starts with a separate
// token. In messages, text that spells a special token stays text.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"
#include "../base/unicode.h"
#include "conversation.h"
#include "jinja_spelling.h"
#include "tokenizer.h"

// {bos} and {eos} are replaced by the tokenizer's tokens.
struct ChatTemplate {
    enum class System { turn, before_user, before_trimmed_user, refused };  // a separate turn, or within the first user's
    std::string name, about;
    Strings tokens;                           // special tokens that it needs
    std::string begin;                        // at the start of a conversation
    std::string system_before, system_after;  // around the system's text
    std::string user_before, user_after;
    std::string answer_before;             // the prompt for an answer
    std::string answer_start, answer_end;  // around its text, in the loss; ends with the token that ends the turn
    std::string answer_after;              // not learned
    bool nothing_after_last = false;       // answer_after only between turns
    bool thinks = false;                   // thoughts precede the last answer, and are dropped from earlier ones
    System system = System::turn;
    bool trims = false;          // white space around a message is dropped
    bool alternates = false;     // user and assistant alternate; the user starts
    bool system_always = false;  // a system turn is written even if there is no message for it
    std::string default_system;  // its text, if there is no message for it and this is not empty
    Strings spellings;           // in Jinja
};

// Spellings of the templates in Jinja. @SYSTEM@ is the default text of the system, @ANY@ any text that only tools need.
namespace chat_spellings {
inline const std::string chatml_turn = "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
                         chatml_prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
                         take_turns = R"({%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%})";

inline const std::string qwen3_begin = R"({%- if tools %}@ANY@{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- endif -%})",
                         qwen3_turns = R"({%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" -%})",
                         qwen3_end = R"({%- if message.tool_calls %}@ANY@{%- endif %}{{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}@ANY@{%- endif %}
{%- endfor -%})";

inline const Strings chatml = {
    "{% for message in messages %}" + chatml_turn + "{% endfor %}" + chatml_prompt,
    R"({%- for message in messages %}
    {%- if loop.first and messages[0].role != 'system' %}{{- '<|im_start|>system\n@SYSTEM@<|im_end|>\n' }}{%- endif -%})" +
        chatml_turn + "{% endfor %}" + chatml_prompt,
    R"({%- if tools %}@ANY@{%- else %}
    {%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>system\n@SYSTEM@<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) -%})" +
        chatml_turn + R"({%- elif message.role == "assistant" %}@ANY@{%- elif message.role == "tool" %}@ANY@{%- endif %}
{%- endfor -%})" +
        chatml_prompt,
    qwen3_begin + qwen3_turns + "{{- '<|im_start|>' + message.role + '\\n' + content }}" + qwen3_end + chatml_prompt};

// After the last question an answer has its thoughts, even empty ones, if it is the last message.
inline const Strings qwen3 = {qwen3_begin +
                              R"({%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
           not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor -%})" + qwen3_turns +
                              R"({%- set reasoning_content = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
{%- endif %}
{%- if loop.index0 > ns.last_query_index %}
    {%- if loop.last or (not loop.last and reasoning_content) %}
        {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' +
            content.lstrip('\n') }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}
    {%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}
{%- endif %})" + qwen3_end + R"({%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %})"};

inline const Strings olmo_2 = {R"({{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '<|system|>\n' + message.content + '\n' }}
    {%- elif message.role == 'user' %}{{- '<|user|>\n' + message.content + '\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if not loop.last %}{{- '<|assistant|>\n' + message.content + eos_token + '\n' }}
        {%- else %}{{- '<|assistant|>\n' + message.content + eos_token }}
        {%- endif %}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
{%- endfor %})"};

inline const Strings llama_2 = {R"({%- if messages[0].role == 'system' %}
    {%- set loop_messages = messages[1:] %}{%- set system_message = messages[0].content %}
{%- else %}
    {%- set loop_messages = messages %}{%- set system_message = false %}
{%- endif %}
{%- for message in loop_messages -%})" +
                                take_turns + R"(
    {%- if loop.index0 == 0 and system_message != false %}
        {%- set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message.content %}
    {%- else %}{%- set content = message.content %}
    {%- endif %}
    {%- if message.role == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %})"};

inline const std::string llama_3_turns = R"({%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}{%- set content = bos_token + content %}{%- endif %}
    {{- content }}
{%- endfor -%})",
                         llama_3_prompt = "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}";
inline const Strings llama_3 = {llama_3_turns + "{% if add_generation_prompt %}" + llama_3_prompt + "{% endif %}",
                                llama_3_turns + llama_3_prompt};
inline const Strings llama_3_1 = {R"({{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{%- if builtin_tools is defined %}@ANY@{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}@ANY@{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}@ANY@{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}@ANY@
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %})"};

inline std::string mistral(const std::string& answer) {
    return "{{ bos_token }}{% for message in messages %}" + take_turns + R"(
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' -%}{{ )" +
           answer + R"( }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %})";
}

inline const std::string gemma_role = R"({%- if (message.role == 'assistant') %}{%- set role = 'model' %}
    {%- else %}{%- set role = message.role %}
    {%- endif -%})",
                         gemma_prompt = "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}";
inline const Strings gemma = {R"({{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages -%})" +
                              take_turns + gemma_role + R"(
    {{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endfor -%})" + gemma_prompt};
inline const Strings gemma_3 = {R"({{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is string %}{%- set first_user_prefix = messages[0].content + '\n\n' %}
    {%- else %}{%- set first_user_prefix = messages[0].content[0].text + '\n\n' %}
    {%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set first_user_prefix = "" %}{%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages -%})" +
                                take_turns + gemma_role + R"(
    {{- '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message.content is string %}{{- message.content | trim }}
    {%- elif message.content is iterable %}@ANY@
    {%- else %}{{- raise_exception("Invalid content type") }}
    {%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor -%})" + gemma_prompt};

inline const Strings plain = {R"({%- for message in messages %}
    {{- message.content }}{%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}
{%- endfor %})"};
}  // namespace chat_spellings

// A table, field by field: long, but without branches.
inline std::vector<ChatTemplate> make_chat_templates() {
    using System = ChatTemplate::System;
    ChatTemplate chatml;
    chatml.name = "chatml";
    chatml.about = "Qwen without thoughts, SmolLM2, Hermes and others";
    chatml.tokens = {"<|im_start|>", "<|im_end|>"};
    chatml.system_before = "<|im_start|>system\n";
    chatml.user_before = "<|im_start|>user\n";
    chatml.answer_before = "<|im_start|>assistant\n";
    chatml.answer_end = "<|im_end|>";
    chatml.system_after = chatml.user_after = "<|im_end|>\n";
    chatml.answer_after = "\n";
    chatml.spellings = chat_spellings::chatml;

    ChatTemplate qwen3 = chatml;
    qwen3.name = "qwen3";
    qwen3.about = "Qwen3: <think>, thoughts and </think> before the last answer, without tools";
    qwen3.tokens = {"<|im_start|>", "<|im_end|>", "<think>", "</think>"};
    qwen3.thinks = true;
    qwen3.spellings = chat_spellings::qwen3;

    ChatTemplate olmo_2;
    olmo_2.name = "olmo-2";
    olmo_2.about = "OLMo-2 instruct";
    olmo_2.begin = "{bos}";
    olmo_2.system_before = "<|system|>\n";
    olmo_2.user_before = "<|user|>\n";
    olmo_2.answer_before = "<|assistant|>\n";
    olmo_2.answer_end = "{eos}";
    olmo_2.system_after = olmo_2.user_after = olmo_2.answer_after = "\n";
    olmo_2.nothing_after_last = true;
    olmo_2.spellings = chat_spellings::olmo_2;

    ChatTemplate llama_2;
    llama_2.name = "llama-2";
    llama_2.about = "Llama 2 chat";
    llama_2.system_before = "<<SYS>>\n";
    llama_2.system_after = "\n<</SYS>>\n\n";
    llama_2.user_before = "{bos}[INST] ";
    llama_2.user_after = " [/INST]";
    llama_2.answer_start = " ";
    llama_2.answer_end = " {eos}";
    llama_2.system = System::before_user;
    llama_2.trims = llama_2.alternates = true;
    llama_2.spellings = chat_spellings::llama_2;

    ChatTemplate llama_3;
    llama_3.name = "llama-3";
    llama_3.about = "Llama 3 instruct";
    llama_3.tokens = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"};
    llama_3.begin = "{bos}";
    llama_3.system_before = "<|start_header_id|>system<|end_header_id|>\n\n";
    llama_3.user_before = "<|start_header_id|>user<|end_header_id|>\n\n";
    llama_3.answer_before = "<|start_header_id|>assistant<|end_header_id|>\n\n";
    llama_3.system_after = llama_3.user_after = llama_3.answer_end = "<|eot_id|>";
    llama_3.trims = true;
    llama_3.spellings = chat_spellings::llama_3;

    ChatTemplate llama_3_1 = llama_3;
    llama_3_1.name = "llama-3.1";
    llama_3_1.about = "Llama 3.1 and 3.3 instruct, without tools";
    llama_3_1.system_before += "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
    llama_3_1.system_always = true;
    llama_3_1.spellings = chat_spellings::llama_3_1;

    ChatTemplate mistral;
    mistral.name = "mistral";
    mistral.about = "Mistral 7B and Mixtral instruct (v0.2)";
    mistral.begin = "{bos}";
    mistral.user_before = "[INST] ";
    mistral.user_after = " [/INST]";
    mistral.answer_end = "{eos}";
    mistral.system = System::refused;
    mistral.alternates = true;
    mistral.spellings = {chat_spellings::mistral("message.content + eos_token")};

    ChatTemplate mistral_01 = mistral;
    mistral_01.name = "mistral-v0.1";
    mistral_01.about = "the first Mistral 7B instruct: a space behind an answer's end";
    mistral_01.answer_after = " ";
    mistral_01.spellings = {chat_spellings::mistral("message.content + eos_token + ' '")};

    ChatTemplate gemma;
    gemma.name = "gemma";
    gemma.about = "Gemma 1 and 2";
    gemma.tokens = {"<start_of_turn>", "<end_of_turn>"};
    gemma.begin = "{bos}";
    gemma.user_before = "<start_of_turn>user\n";
    gemma.answer_before = "<start_of_turn>model\n";
    gemma.user_after = "<end_of_turn>\n";
    gemma.answer_end = "<end_of_turn>";
    gemma.answer_after = "\n";
    gemma.system = System::refused;
    gemma.trims = gemma.alternates = true;
    gemma.spellings = chat_spellings::gemma;

    ChatTemplate gemma_3 = gemma;
    gemma_3.name = "gemma-3";
    gemma_3.about = "Gemma 3, text only: the system's text before the user's first";
    gemma_3.system = System::before_trimmed_user;
    gemma_3.system_after = "\n\n";
    gemma_3.spellings = chat_spellings::gemma_3;

    ChatTemplate plain;
    plain.name = "plain";
    plain.about = "the unchanged texts, with an end-of-document token after each answer";
    plain.answer_end = "{eos}";
    plain.spellings = chat_spellings::plain;

    return {chatml, llama_2, llama_3, llama_3_1, mistral, mistral_01, gemma, gemma_3, qwen3, olmo_2, plain};
}
inline const std::vector<ChatTemplate>& chat_templates() {
    static const std::vector<ChatTemplate> all = make_chat_templates();
    return all;
}

inline std::string chat_template_names() {
    return joined(chat_templates(), [](const ChatTemplate& t) { return t.name; });
}

inline const ChatTemplate* chat_template_called(const std::string& name) {
    for (const ChatTemplate& t : chat_templates())
        if (t.name == name) return &t;
    return nullptr;
}

// The template that matches a model's Jinja; empty name: none known.
inline ChatTemplate recognized_template(const std::string& jinja) {
    static const std::vector<std::pair<const ChatTemplate*, std::string>> known = [] {
        std::vector<std::pair<const ChatTemplate*, std::string>> all;
        for (const ChatTemplate& t : chat_templates())
            for (const std::string& spelling : t.spellings) all.emplace_back(&t, jinja_spelling(spelling));
        return all;
    }();
    const std::string given = jinja_spelling(jinja);
    for (const auto& [t, spelling] : known) {
        std::string system;
        if (!matches_spelling(spelling, given, system)) continue;
        ChatTemplate found = *t;
        found.default_system = system;
        return found;
    }
    return {};
}

// The Jinja template among a model's files (name -> text), as transformers finds it; empty: there is none.
inline constexpr const char* jinja_file = "chat_template.jinja";
inline std::string jinja_template_in(const std::map<std::string, std::string>& files) {
    if (const auto found = files.find(jinja_file); found != files.end()) return found->second;
    const auto found = files.find("tokenizer_config.json");
    const nlohmann::json settings = found == files.end() ? nlohmann::json() : parse_json(found->second, found->first);
    const nlohmann::json value = settings.is_object() ? settings.value("chat_template", nlohmann::json()) : nlohmann::json();
    if (value.is_string()) return value.get<std::string>();
    if (value.is_array())  // several, by name
        for (const auto& named : value)
            if (named.is_object() && named.value("name", "") == "default") return named.value("template", "");
    return "";
}
inline std::string jinja_template_of(const std::filesystem::path& dir) {
    std::map<std::string, std::string> files;
    for (const char* name : {jinja_file, "tokenizer_config.json"})
        if (file_exists((dir / name).string())) files[name] = read_whole_file((dir / name).string());
    return jinja_template_in(files);
}

// The template of this name or, without a name, of the adapters in a directory (empty: none) or of the tokenizer's model.
inline ChatTemplate find_chat_template(const Tokenizer& tokenizer, const std::string& name, const std::string& adapter) {
    const std::string names = chat_template_names();
    if (!name.empty()) {
        if (const ChatTemplate* t = chat_template_called(name)) return *t;
        fail_usage("--chat-template is '%s'; the templates are %s", name.c_str(), names.c_str());
    }
    std::string place = adapter, jinja = adapter.empty() ? "" : jinja_template_of(adapter);
    if (jinja.empty()) {
        place = tokenizer.source();
        jinja = jinja_template_of(std::filesystem::path(place).parent_path());
    }
    if (jinja.empty())
        fail("%s has no chat template; HINT: --chat-template NAME, one of %s", tokenizer.source().c_str(), names.c_str());
    ChatTemplate found = recognized_template(jinja);
    if (found.name.empty())
        fail(
            "the chat template of %s is unknown; known are %s; HINT: --chat-template NAME uses one of them, which the model "
            "may not have been trained with. It starts with: %.200s",
            place.c_str(), names.c_str(), printable(jinja.substr(0, 200)).c_str());
    return found;
}

// A conversation's tokens, and which of them are in the loss.
struct ChatTokens {
    std::vector<int> tokens;
    std::vector<uint8_t> in_loss;  // 0 or 1
};

class ChatEncoder {
public:
    ChatEncoder(const Tokenizer& tokenizer, ChatTemplate chosen) : tokenizer_(tokenizer), t_(std::move(chosen)) {
        for (const std::string& token : t_.tokens)
            if (tokenizer.token_to_id(token) < 0)
                fail(
                    "%s has no token '%s', which the template %s needs; HINT: choose another one with --chat-template (%s); "
                    "`train_gpt tokenizer --special-tokens` creates a tokenizer with such tokens",
                    tokenizer.source().c_str(), token.c_str(), t_.name.c_str(), chat_template_names().c_str());
        for (std::string* text : {&t_.begin, &t_.system_before, &t_.system_after, &t_.user_before, &t_.user_after,
                                  &t_.answer_before, &t_.answer_start, &t_.answer_end, &t_.answer_after}) {
            put_token(*text, "{bos}", tokenizer.bos_id(), "starts a text");
            put_token(*text, "{eos}", tokenizer.eod_id(), "ends a document");
        }
        ChatTokens end;
        Run run(tokenizer_, end);
        run.literal(t_.answer_end, true);
        run.flush();
        if (end.tokens.empty() ||
            tokenizer.token_bytes(end.tokens.back()) != t_.answer_end.substr(t_.answer_end.find_first_not_of(' ')))
            fail("the template %s ends an answer with '%s', which is not a token of %s", t_.name.c_str(), t_.answer_end.c_str(),
                 tokenizer.source().c_str());
        end_ = end.tokens.back();
    }

    const std::string& name() const { return t_.name; }
    int end_token() const { return end_; }  // of an answer
    // The number of special tokens that a message spells, except the template's own around thoughts.
    int64_t count_special(const ChatMessage& m) const {
        if (!t_.thinks || m.role != "assistant") return tokenizer_.count_special(m.text);
        const Thoughts parts = divide(m.text);
        return tokenizer_.count_special(parts.thoughts) + tokenizer_.count_special(parts.answer);
    }

    // The reason why the template cannot render the messages; empty if it can.
    std::string problem(const std::vector<ChatMessage>& messages) const {
        size_t turn = 0;
        for (size_t i = 0; i < messages.size(); i++) {
            const bool system = messages[i].role == "system";
            if (system && t_.system == ChatTemplate::System::refused)
                return format("the template %s does not support system messages", t_.name.c_str());
            if (system && i > 0 && (t_.system != ChatTemplate::System::turn || t_.system_always))
                return format("a system message follows others, which the template %s does not support", t_.name.c_str());
            if (system) continue;
            if (t_.alternates && (messages[i].role == "user") != (turn % 2 == 0))
                return format("user and assistant do not take turns, as the template %s needs", t_.name.c_str());
            turn++;
        }
        return "";
    }

    // asks: append the prompt for an answer. parse_special: messages may spell special tokens.
    ChatTokens encode(const std::vector<ChatMessage>& messages, bool asks, bool parse_special = false) const {
        ChatTokens out;
        Run run(tokenizer_, out);
        const auto text = [&](const std::string& s, bool in_loss) {
            parse_special ? run.literal(s, in_loss) : run.text(s, in_loss);
        };
        run.literal(t_.begin, false);
        const bool begins_with_system = !messages.empty() && messages[0].role == "system";
        const bool turn = t_.system == ChatTemplate::System::turn;
        if (turn && !begins_with_system && (t_.system_always || !t_.default_system.empty()))
            run.literal(t_.system_before + t_.default_system + t_.system_after, false);
        const size_t question = last_question(messages);
        std::string system;  // inserted within the next message
        for (size_t i = 0; i < messages.size(); i++) {
            const ChatMessage& m = messages[i];
            const std::string trimmed = t_.trims ? trim(m.text) : m.text;
            if (m.role == "system" && !turn) {
                system = m.text;
                continue;
            }
            if (m.role == "assistant") {
                run.literal(t_.answer_before, false);
                run.literal(t_.answer_start, m.in_loss);
                const bool last = i + 1 == messages.size();
                Thoughts parts{"", trimmed};
                if (t_.thinks) parts = divide(m.text);
                if (t_.thinks && i > question && (last || !parts.thoughts.empty())) {
                    run.literal("<think>\n", m.in_loss);
                    text(parts.thoughts, m.in_loss);
                    run.literal("\n</think>\n\n", m.in_loss);
                    parts.answer.erase(0, parts.answer.find_first_not_of('\n'));
                }
                text(parts.answer, m.in_loss);
                run.literal(t_.answer_end, m.in_loss);
                if (!last || !t_.nothing_after_last) run.literal(t_.answer_after, false);
                continue;
            }
            const bool user = m.role == "user";
            run.literal(user ? t_.user_before : t_.system_before, false);
            if (user && i == 1 && begins_with_system && !turn) {
                run.literal(t_.system_before, false);
                text(system, false);
                run.literal(t_.system_after, false);
                const bool inside = t_.system == ChatTemplate::System::before_user;  // then the whole text is trimmed
                text(inside && t_.trims ? trim(m.text, false) : trimmed, false);
            } else text(trimmed, false);
            run.literal(user ? t_.user_after : t_.system_after, false);
        }
        if (asks) run.literal(t_.answer_before, false);
        run.flush();
        return out;
    }

private:
    // Gathers text up to the next special token, and encodes it.
    class Run {
    public:
        Run(const Tokenizer& tokenizer, ChatTokens& out) : tokenizer_(tokenizer), out_(out) {}

        void text(std::string_view s, bool in_loss) {
            if (s.empty()) return;
            if (!parts_.empty() && parts_.back().in_loss != in_loss) cut();
            if (parts_.empty() || parts_.back().end) parts_.push_back({0, in_loss});
            text_ += s;
        }
        // Text in which special tokens are recognized.
        void literal(std::string_view s, bool in_loss) {
            tokenizer_.split_at_added(
                s, [&](std::string_view part) { text(part, in_loss); },
                [&](const AddedToken& token) {
                    if (token.lstrip || token.rstrip)
                        fail("%s: the token '%s' strips adjacent white space, which is not supported in chat templates",
                             tokenizer_.source().c_str(), token.content.c_str());
                    flush();
                    add(token.id, in_loss);
                });
        }
        void flush() {
            if (text_.empty()) return;
            cut();
            TextPlace place = out_.tokens.empty() ? TextPlace::begins : TextPlace::behind_token;
            std::string_view rest = text_;
            std::vector<int> whole = encode(rest, place);
            size_t at = 0, used = 0;  // start of `rest` in the text; tokens of it that were used
            for (const Part& part : parts_) {
                const bool last = &part == &parts_.back();
                const std::vector<int> head = last ? std::vector<int>() : encode(rest.substr(0, part.end - at), place);
                const bool fits = last || (head.size() <= whole.size() && std::equal(head.begin(), head.end(), whole.begin()));
                const std::vector<int>& from = fits ? whole : head;
                const size_t end = last ? whole.size() : head.size();
                for (; used < end; used++) add(from[used], part.in_loss);
                if (fits) continue;
                // A token spans the boundary: the text after it is encoded separately.
                rest.remove_prefix(part.end - at);
                at = part.end;
                place = TextPlace::continues;
                whole = encode(rest, place);
                used = 0;
            }
            text_.clear();
            parts_.clear();
        }

    private:
        struct Part {
            size_t end;  // in the text; 0: not yet known
            bool in_loss;
        };
        void cut() {
            if (!parts_.empty() && parts_.back().end == 0) parts_.back().end = text_.size();
        }
        void add(int token, bool in_loss) {
            out_.tokens.push_back(token);
            out_.in_loss.push_back(in_loss);
        }
        std::vector<int> encode(std::string_view s, TextPlace place) const {
            std::vector<int> tokens;
            tokenizer_.encode_append(s, tokens, false, place);
            return tokens;
        }

        const Tokenizer& tokenizer_;
        ChatTokens& out_;
        std::string text_;
        std::vector<Part> parts_;
    };

    // An answer, and the thoughts before it: the text up to </think>. Both are without the line ends in between.
    struct Thoughts {
        std::string thoughts, answer;
    };
    static Thoughts divide(const std::string& text) {
        const std::string begin = "<think>", end = "</think>";
        const size_t at = text.find(end);
        if (at == std::string::npos) return {"", text};
        std::string thoughts = text.substr(0, at), answer = text.substr(text.rfind(end) + end.size());
        if (const size_t first = thoughts.rfind(begin); first != std::string::npos) thoughts.erase(0, first + begin.size());
        for (std::string* part : {&thoughts, &answer}) part->erase(0, part->find_first_not_of('\n'));
        thoughts.erase(thoughts.find_last_not_of('\n') + 1);
        return {thoughts, answer};
    }
    // The last message of a user that is not a tool's, or the last message.
    static size_t last_question(const std::vector<ChatMessage>& messages) {
        const std::string begin = "<tool_response>", end = "</tool_response>";
        for (size_t i = messages.size(); i-- > 0;) {
            const std::string& text = messages[i].text;
            if (messages[i].role == "user" && !(begins_with(text, begin) && ends_with(text, end))) return i;
        }
        return messages.empty() ? 0 : messages.size() - 1;
    }

    // Like Python's str.strip().
    static std::string trim(std::string_view s, bool left = true) { return std::string(stripped(s, is_python_space, left)); }

    void put_token(std::string& text, const std::string& mark, int id, const char* role) const {
        const size_t at = text.find(mark);
        if (at == std::string::npos) return;
        if (id < 0)
            fail("%s has no token that %s, which the template %s needs; HINT: --chat-template takes another one (%s)",
                 tokenizer_.source().c_str(), role, t_.name.c_str(), chat_template_names().c_str());
        text.replace(at, mark.size(), tokenizer_.token_bytes(id));
    }

    const Tokenizer& tokenizer_;
    ChatTemplate t_;
    int end_ = -1;
};
