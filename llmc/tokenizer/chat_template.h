// Renders a conversation as text and encodes it, as transformers' apply_chat_template does: by a model's own Jinja template,
// which jinja.h runs, or by one of the known templates below.
//
// The tokens in the loss are the ones that the model generates after the prompt of `generate --chat`: the answer and the token
// that ends it. To find them, the conversation up to an answer is rendered with the prompt for it: the answer starts where the
// prompt ends, and its end is the first special token after its text. A template with {% generation %} defines them itself.
//
// The text between two special tokens is encoded as a whole, as in transformers. If a token would span the boundary between
// prompt and answer, the text is split there instead: in generation, too, an answer starts with a separate token. In messages,
// text that spells a special token stays text.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
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
#include "jinja.h"
#include "tokenizer.h"

struct ChatTemplate {
    std::string name, about;
    std::vector<std::string> tokens;  // special tokens that it needs
    std::string jinja;
};

namespace known_templates {
inline const std::string
    no_tools = "{%- if tools %}{{- raise_exception('this template has no tools') }}{%- endif -%}",
    take_turns = R"({%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%})",
    chatml =
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    plain = R"({%- for message in messages %}
    {{- message.content }}{%- if message.role == 'assistant' %}{{- eos_token }}{%- endif %}
{%- endfor %})",
    olmo_2 = R"({{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '<|system|>\n' + message.content + '\n' }}
    {%- elif message.role == 'user' %}{{- '<|user|>\n' + message.content + '\n' }}
    {%- elif message.role == 'assistant' %}{{- '<|assistant|>\n' + message.content + eos_token + ('' if loop.last else '\n') }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
{%- endfor %})",
    llama_2 = R"({%- set has_system = messages and messages[0].role == 'system' %}
{%- for message in (messages[1:] if has_system else messages) -%})" +
              take_turns + R"(
    {%- set content = message.content %}
    {%- if loop.first and has_system %}
        {%- set content = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' + content %}
    {%- endif %}
    {%- if message.role == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %})",
    llama_3_turn =
        "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}",
    llama_3_prompt = "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    llama_3 = "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}" + llama_3_turn + "{% endfor %}" +
              llama_3_prompt,
    llama_3_1 = no_tools + R"({{- bos_token }}
{%- set has_system = messages and messages[0].role == 'system' %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: " }}
{{- (date_string if date_string is defined else "26 Jul 2024") + "\n\n" }}
{{- messages[0].content | trim if has_system else "" }}{{- "<|eot_id|>" }}
{%- for message in (messages[1:] if has_system else messages) %}
    {%- if message.role == 'system' %}{{- raise_exception('a system message follows others') }}{%- endif -%})" +
                llama_3_turn + "{%- endfor %}" + llama_3_prompt,
    gemma_turn = R"({{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }})",
    gemma_prompt = "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    gemma = R"({{- bos_token }}
{%- for message in messages -%}
    {%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif -%})" +
            take_turns + gemma_turn + "{{- message.content | trim + '<end_of_turn>\\n' }}{%- endfor %}" + gemma_prompt,
    gemma_3 = no_tools + R"({{- bos_token }}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- for message in (messages[1:] if has_system else messages) -%})" +
              take_turns + gemma_turn + R"(
    {{- messages[0].content + '\n\n' if loop.first and has_system else '' }}
    {{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %})" +
              gemma_prompt,
    // After the last question an answer has its thoughts, even empty ones, if it is the last message.
    qwen3 = no_tools + R"(
{%- set ns = namespace(found=false, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if not ns.found and message.role == 'user' and
           not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.found = true %}{%- set ns.last_question = loop.revindex0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}{%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_question and (loop.last or thoughts) %}
            {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' }}{%- set content = content.lstrip('\n') %}
        {%- endif %}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %})";

inline std::string mistral(const std::string& answer) {
    return "{{ bos_token }}{% for message in messages %}" + take_turns + R"(
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' -%}{{ )" +
           answer + R"( }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %})";
}
}  // namespace known_templates

inline const std::vector<ChatTemplate>& chat_templates() {
    namespace known = known_templates;
    static const std::vector<std::string> im = {"<|im_start|>", "<|im_end|>"}, turns = {"<start_of_turn>", "<end_of_turn>"},
                                          headers = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
                                          thinks = {"<|im_start|>", "<|im_end|>", "<think>", "</think>"};
    static const std::vector<ChatTemplate> all = {
        {"chatml", "Qwen without thoughts, SmolLM2, Hermes and others", im, known::chatml},
        {"llama-2", "Llama 2 chat", {}, known::llama_2},
        {"llama-3", "Llama 3 instruct", headers, known::llama_3},
        {"llama-3.1", "Llama 3.1 and 3.3 instruct, without tools", headers, known::llama_3_1},
        {"mistral", "Mistral 7B and Mixtral instruct (v0.2)", {}, known::mistral("message.content + eos_token")},
        {"mistral-v0.1",
         "the first Mistral 7B instruct: a space after an answer's end",
         {},
         known::mistral("message.content + eos_token + ' '")},
        {"gemma", "Gemma 1 and 2", turns, known::gemma},
        {"gemma-3", "Gemma 3, text only: the system's text before the user's first", turns, known::gemma_3},
        {"qwen3", "Qwen3: <think>, thoughts and </think> before the last answer, without tools", thinks, known::qwen3},
        {"olmo-2", "OLMo-2 instruct", {}, known::olmo_2},
        {"plain", "the unchanged texts, with an end-of-document token after each answer", {}, known::plain}};
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

// Datasets record the template of their conversations: the name of a known one, or the Jinja source of another one.
inline std::string recorded_template(const ChatTemplate& t) { return chat_template_called(t.name) ? t.name : t.jinja; }
inline std::string jinja_of_recorded(const std::string& recorded) {
    const ChatTemplate* known = chat_template_called(recorded);
    return known ? known->jinja : recorded;
}
inline std::string label_of_recorded(const std::string& recorded) {
    return chat_template_called(recorded) ? recorded : "of its tokenizer";
}

// The Jinja template among a model's files (name -> text), as transformers finds it; empty: there is none.
inline constexpr const char* jinja_file = "chat_template.jinja";
inline std::string jinja_template_in(const std::map<std::string, std::string>& files) {
    if (const auto found = files.find(jinja_file); found != files.end()) return found->second;
    const auto found = files.find("tokenizer_config.json");
    const nlohmann::json settings = found == files.end() ? nlohmann::json() : parse_json(found->second, found->first);
    const nlohmann::json value = settings.is_object() ? settings.value("chat_template", nlohmann::json()) : nlohmann::json();
    if (value.is_null()) return "";
    if (value.is_string()) return value.get<std::string>();
    const auto wrong = [&] {
        fail("%s: 'chat_template' is %.200s; it must be a string, or a list of {\"name\": ..., \"template\": ...}",
             found->first.c_str(), json_text(value).c_str());
    };
    if (!value.is_array()) wrong();
    for (const auto& named : value) {  // several, by name
        if (!named.is_object() || !named.contains("template") || !named["template"].is_string()) wrong();
        if (named.value("name", nlohmann::json()) == "default") return named["template"].get<std::string>();
    }
    return "";
}
// The file of a directory that has its template, if it has one.
inline std::string template_file_in(const std::filesystem::path& dir) {
    return (dir / (file_exists((dir / jinja_file).string()) ? jinja_file : "tokenizer_config.json")).string();
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
        fail_usage(
            "--chat-template is '%s'; the templates are %s; HINT: without --chat-template, a file chat_template.jinja next to "
            "the tokenizer is used",
            name.c_str(), names.c_str());
    }
    std::filesystem::path place = adapter;
    std::string jinja = adapter.empty() ? "" : jinja_template_of(place);
    if (jinja.empty()) {
        place = std::filesystem::path(tokenizer.source()).parent_path();
        jinja = jinja_template_of(place);
    }
    if (jinja.empty())
        fail("%s has no chat template; HINT: --chat-template NAME, one of %s", tokenizer.source().c_str(), names.c_str());
    return {"of " + template_file_in(place), "", {}, jinja};
}

// The time that templates get from strftime_now(): SOURCE_DATE_EPOCH, if set, so that the same command gives the same tokens on
// another day (reproducible-builds.org).
inline time_t chat_time() {
    const char* fixed = getenv("SOURCE_DATE_EPOCH");
    return fixed && *fixed ? (time_t)strtoll(fixed, nullptr, 10) : time(nullptr);
}

// A template with a tokenizer's first and last token, ready to render.
class ChatRenderer {
public:
    ChatRenderer(const std::string& jinja, std::string bos, std::string eos)
        : template_(std::make_shared<JinjaTemplate>(jinja)), bos_(std::move(bos)), eos_(std::move(eos)), now_(chat_time()) {}

    // The first n messages. The text of message i has the source i. asks: with the prompt for an answer. tools: a list or
    // null.
    JinjaString render(const std::vector<ChatMessage>& messages, size_t n, bool asks,
                       const nlohmann::ordered_json& tools = nullptr) const {
        static const JinjaString role("role"), content("content");
        JinjaRendering r(*template_, now_);
        std::vector<JinjaValue> list;
        list.reserve(n);
        for (size_t i = 0; i < n; i++) {
            const auto source = (int32_t)i;
            JinjaValue message =
                r.dict({{r.text("role"), r.text(messages[i].role)}, {r.text("content"), r.text(messages[i].text, source)}});
            if (messages[i].more)
                for (const auto& [key, value] : messages[i].more->items())
                    message.m->items.emplace_back(r.text(key), r.json(value, source));
            list.push_back(message);
        }
        r.set("messages", r.list(std::move(list)));
        r.set("add_generation_prompt", JinjaRendering::boolean(asks));
        r.set("tools", r.json(tools, INT32_MAX));
        r.set("documents", JinjaRendering::none());
        if (!bos_.empty()) r.set("bos_token", r.text(bos_));
        if (!eos_.empty()) r.set("eos_token", r.text(eos_));
        return r.render();
    }

private:
    std::shared_ptr<const JinjaTemplate> template_;
    std::string bos_, eos_;
    time_t now_;
};

// True if two templates render the same short conversations alike.
inline bool render_alike(const std::string& a, const std::string& b) {
    if (a == b) return true;
    const ChatMessage system{"system", "s\n"}, user{"user", " u\n"}, answer{"assistant", " a\n"};
    const std::vector<std::vector<ChatMessage>> probes = {
        {user}, {system, user}, {user, answer, user, answer}, {system, user, answer, user, answer}};
    try {
        const ChatRenderer first(a, "<s>", "</s>"), second(b, "<s>", "</s>");
        const auto text = [](const ChatRenderer& r, const std::vector<ChatMessage>& messages) -> std::string {
            try {
                return r.render(messages, messages.size(), messages.back().role == "user").text;
            } catch (const Error&) {
                return "refused";
            }
        };
        return std::all_of(probes.begin(), probes.end(), [&](const auto& m) { return text(first, m) == text(second, m); });
    } catch (const Error&) {
        return false;
    }
}

// A conversation's tokens, and which of them are in the loss.
struct ChatTokens {
    std::vector<int> tokens;
    std::vector<uint8_t> in_loss;  // 0 or 1
    int64_t spelled = 0;           // special tokens that messages spell
};

class ChatEncoder {
public:
    ChatEncoder(const Tokenizer& tokenizer, const ChatTemplate& chosen)
        : tokenizer_(tokenizer), name_(chosen.name), recorded_(recorded_template(chosen)), renderer_(made(tokenizer, chosen)) {
        for (const std::string& token : chosen.tokens)
            if (tokenizer.token_to_id(token) < 0)
                fail(
                    "%s has no token '%s', which the template %s needs; HINT: choose another one with --chat-template (%s); "
                    "`train_gpt tokenizer --special-tokens` creates a tokenizer with such tokens",
                    tokenizer.source().c_str(), token.c_str(), name_.c_str(), chat_template_names().c_str());
        for (const auto& [token, id, role] : {std::tuple("bos_token", tokenizer.bos_id(), "starts a text"),
                                              std::tuple("eos_token", tokenizer.eod_id(), "ends a document")})
            if (id < 0 && chat_template_called(name_) && chosen.jinja.find(token) != std::string::npos)
                fail("%s has no token that %s, which the template %s needs; HINT: --chat-template takes another one (%s)",
                     tokenizer.source().c_str(), role, name_.c_str(), chat_template_names().c_str());
        find_end();
    }

    const std::string& name() const { return name_; }
    const std::string& recorded() const { return recorded_; }
    int end_token() const { return end_; }  // of an answer

    // The reason why the template cannot render the messages; empty if it can.
    std::string problem(const std::vector<ChatMessage>& messages, const nlohmann::ordered_json& tools = nullptr) const {
        JinjaString whole;
        return render(messages, whole, tools);
    }
    // The same, and the conversation as text for encode().
    std::string render(const std::vector<ChatMessage>& messages, JinjaString& whole,
                       const nlohmann::ordered_json& tools = nullptr) const {
        try {
            whole = renderer_.render(messages, messages.size(), false, tools);
            return "";
        } catch (const Error& e) {
            return "the template " + name_ + ": " + e.what();
        }
    }

    // asks: append the prompt for an answer. parse_special: messages may spell special tokens.
    ChatTokens encode(const std::vector<ChatMessage>& messages, bool asks, bool parse_special = false,
                      const nlohmann::ordered_json& tools = nullptr) const {
        return encode(renderer_.render(messages, messages.size(), asks, tools), messages, parse_special, tools);
    }
    ChatTokens encode(const JinjaString& whole, const std::vector<ChatMessage>& messages, bool parse_special,
                      const nlohmann::ordered_json& tools = nullptr) const {
        const Ranges learned = learned_ranges(whole, messages, tools);
        ChatTokens out;
        Run run(tokenizer_, out);
        size_t begin = 0, at = 0, range = 0;  // begin: of text in which special tokens are recognized
        // Calls each(part, whether it is in the loss) for the parts of the text from `at` to `end`.
        const auto by_loss = [&](size_t at, size_t end, auto each) {
            while (at < end) {
                while (range < learned.size() && learned[range].second <= at) range++;
                const bool in_loss = range < learned.size() && learned[range].first <= at;
                const size_t next = range == learned.size() ? end : in_loss ? learned[range].second : learned[range].first;
                each(std::string_view(whole.text).substr(at, std::min(next, end) - at), in_loss);
                at = std::min(next, end);
            }
        };
        const auto text = [&](std::string_view s, bool in_loss) { run.text(s, in_loss); };
        const auto literal = [&](size_t from, size_t to) {
            tokenizer_.split_at_added(
                std::string_view(whole.text).substr(from, to - from),
                [&](std::string_view part) {
                    from = (size_t)(part.data() - whole.text.data());
                    by_loss(from, from + part.size(), text);
                    from += part.size();
                },
                [&](const AddedToken& token) {
                    from = whole.text.find(token.content, from);
                    by_loss(from, from + 1, [&](std::string_view, bool in_loss) { run.token(token, in_loss); });
                    from += token.content.size();
                });
        };
        for (const JinjaString::Part& part : whole.parts) {
            if (part.source != JinjaString::literal) {
                out.spelled += tokenizer_.count_special(std::string_view(whole.text).substr(at, part.end - at));
                if (!parse_special) {
                    literal(begin, at);
                    by_loss(at, part.end, text);
                    begin = part.end;
                }
            }
            at = part.end;
        }
        literal(begin, whole.text.size());
        run.flush();
        return out;
    }

private:
    using Ranges = std::vector<std::pair<size_t, size_t>>;  // of bytes, in order

    // Gathers text up to the next special token, and encodes it.
    class Run {
    public:
        Run(const Tokenizer& tokenizer, ChatTokens& out) : tokenizer_(tokenizer), out_(out) {}

        void text(std::string_view s, bool in_loss) {
            if (strips_) s = stripped(s, is_space, true, false);
            if (s.empty()) return;
            strips_ = false;
            if (!parts_.empty() && parts_.back().in_loss != in_loss) cut();
            if (parts_.empty() || parts_.back().end) parts_.push_back({0, in_loss});
            text_ += s;
        }
        // A token takes the white space next to it, also from a message, if the tokenizer says so.
        void token(const AddedToken& token, bool in_loss) {
            if (token.lstrip) {
                text_.resize(stripped(text_, is_space, false).size());
                while (parts_.size() > 1 && parts_[parts_.size() - 2].end >= text_.size()) parts_.pop_back();
                if (!parts_.empty()) parts_.back().end = 0;
            }
            flush();
            add(token.id, in_loss);
            strips_ = token.rstrip;
        }
        void flush() {
            if (text_.empty()) return parts_.clear();
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
        bool strips_ = false;  // white space at the start of the next text
    };

    static ChatRenderer made(const Tokenizer& tokenizer, const ChatTemplate& chosen) {
        const auto token = [&](int id) { return id < 0 ? std::string() : tokenizer.token_bytes(id); };
        try {
            return {chosen.jinja, token(tokenizer.bos_id()), token(tokenizer.eod_id())};
        } catch (const Error& e) {
            fail(
                "the chat template %s: %s; HINT: --chat-template NAME uses a known one (%s), which the model may not have been "
                "trained with",
                chosen.name.c_str(), e.what(), chat_template_names().c_str());
        }
    }

    // The token that ends an answer: the first special one after its text.
    void find_end() {
        const std::vector<ChatMessage> probe = {{"user", "a"}, {"assistant", "b"}};
        if (const std::string why = problem(probe); !why.empty()) fail("%s", why.c_str());
        const JinjaString whole = renderer_.render(probe, 2, false);
        const auto [begin, end] = place_of(whole, 1);
        if (begin == end) fail("the template %s does not render an answer", name_.c_str());
        tokenizer_.split_at_added(
            std::string_view(whole.text).substr(end), [](std::string_view) {},
            [&](const AddedToken& token) {
                if (end_ < 0) {
                    end_ = token.id;
                    end_text_ = token.content;
                }
            });
        if (end_ < 0)
            fail("the template %s ends an answer with '%s', which is not a token of %s; HINT: --chat-template NAME, one of %s",
                 name_.c_str(), printable(whole.text.substr(end, 40)).c_str(), tokenizer_.source().c_str(),
                 chat_template_names().c_str());
        marks_ = std::any_of(whole.parts.begin(), whole.parts.end(), [](const auto& p) { return p.generated; });
    }

    // From the first to the last byte of a message's text, or an empty range.
    static std::pair<size_t, size_t> place_of(const JinjaString& s, int32_t source) {
        size_t begin = 0, from = 0, to = 0;
        for (const JinjaString::Part& p : s.parts) {
            if (p.source == source) {
                if (from == to) from = begin;
                to = p.end;
            }
            begin = p.end;
        }
        return {from, to};
    }

    Ranges learned_ranges(const JinjaString& whole, const std::vector<ChatMessage>& messages,
                          const nlohmann::ordered_json& tools) const {
        Ranges ranges;
        if (marks_) {
            size_t begin = 0;
            for (size_t i = 0; i < whole.parts.size(); begin = whole.parts[i++].end) {
                if (!whole.parts[i].generated) continue;
                const size_t from = begin;
                int32_t source = JinjaString::literal;
                for (;; i++) {
                    if (source < 0) source = whole.parts[i].source;
                    if (i + 1 == whole.parts.size() || !whole.parts[i + 1].generated) break;
                }
                // An answer without text has no source: then all answers must be in the loss.
                const bool in_loss = source >= 0 && source < (int32_t)messages.size()
                                         ? messages[(size_t)source].in_loss
                                         : std::all_of(messages.begin(), messages.end(),
                                                       [](const ChatMessage& m) { return m.in_loss || m.role != "assistant"; });
                if (in_loss) ranges.emplace_back(from, whole.parts[i].end);
            }
            return ranges;
        }
        std::vector<KnownStart> known;
        for (size_t i = 0; i < messages.size(); i++) {
            if (!messages[i].in_loss) continue;
            const auto range = learned_range(whole, messages, i, tools, known);
            const size_t before = ranges.empty() ? 0 : ranges.back().second;
            if (range.second > std::max(before, range.first)) ranges.emplace_back(std::max(before, range.first), range.second);
        }
        return ranges;
    }
    // An answer starts where its prompt ends. Earlier messages may be rendered differently in the prompt (without their
    // thoughts), so only the text after the last of them is compared. [first, last): the answer's own text.
    size_t answer_start(const JinjaString& whole, const std::vector<ChatMessage>& messages, size_t i, size_t first, size_t last,
                        const nlohmann::ordered_json& tools) const {
        JinjaString prompt;
        try {
            prompt = renderer_.render(messages, i, true, tools);
        } catch (const Error&) {  // for example, the template needs a question first
            return first;
        }
        size_t before = 0, at = 0;  // the ends of the last message, in the prompt and in the whole
        int32_t source = JinjaString::literal;
        for (const JinjaString::Part& p : prompt.parts)
            if (p.source != JinjaString::literal) {
                before = p.end;
                source = p.source;
            }
        for (const JinjaString::Part& p : whole.parts)
            if (p.source == source && source >= 0 && (first == last || p.end <= first)) at = p.end;
        const size_t most = first < last ? first : whole.text.size();
        for (; before < prompt.text.size() && at < most && prompt.text[before] == whole.text[at]; at++) before++;
        while (at > 0 && at < whole.text.size() && !begins_character(whole.text[at])) at--;
        return at;
    }
    // Where answers start is found once for those with the same text between them and the message before.
    struct KnownStart {
        std::string_view between, role;  // role of the message before
        size_t before;                   // bytes from the start to the answer's own text
    };
    std::pair<size_t, size_t> learned_range(const JinjaString& whole, const std::vector<ChatMessage>& messages, size_t i,
                                            const nlohmann::ordered_json& tools, std::vector<KnownStart>& known) const {
        const auto [first, last] = place_of(whole, (int32_t)i);
        // The end of the last message before the answer; the start of the next one after it.
        size_t previous = 0, next = whole.text.size(), begin = 0, at = std::string::npos;
        for (const JinjaString::Part& p : whole.parts)
            if (p.source != JinjaString::literal && p.end <= first) previous = p.end;
        const std::string_view between = std::string_view(whole.text).substr(previous, first < last ? first - previous : 0);
        const std::string_view role = i > 0 ? std::string_view(messages[i - 1].role) : "";
        for (const KnownStart& k : known)
            if (first < last && k.between == between && k.role == role) at = first - k.before;
        if (at == std::string::npos) {
            at = answer_start(whole, messages, i, first, last, tools);
            if (first < last && at >= previous) known.push_back({between, role, first - at});
        }
        const size_t text_end = first < last ? last : at;
        for (const JinjaString::Part& p : whole.parts) {
            if (begin >= text_end && p.source != JinjaString::literal) next = std::min(next, begin);
            begin = p.end;
        }
        const size_t end = whole.text.find(end_text_, text_end);
        return {at, end != std::string::npos && end < next ? end + end_text_.size() : text_end};
    }

    const Tokenizer& tokenizer_;
    std::string name_, recorded_;
    ChatRenderer renderer_;
    int end_ = -1;
    std::string end_text_;
    bool marks_ = false;  // the template has {% generation %}
};
