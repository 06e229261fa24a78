// Conversations for supervised fine-tuning: messages of a system, a user and an assistant, from one record of JSON (or a row of
// Parquet) in any of these forms:
//   {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}    OpenAI, transformers
//   {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}        ShareGPT
//   {"prompt": "...", "completion": "..."}    each a text or a list of messages; the prompt's are not in the loss (TRL)
//   {"instruction": "...", "input": "...", "output": "..."}    input may be missing or empty (Alpaca); with
//       "history": [["...", "..."], ...]    earlier questions with their answers, which are in the loss (LLaMA-Factory)
// Each may have "system": "...", the first message. An assistant's message with "weight": 0 is not in the loss (OpenAI).
// And pairs of answers for preference training (TRL), each of which makes two conversations:
//   {"prompt": "...", "chosen": "...", "rejected": "..."}    each a text or a list of messages
//   {"chosen": [...], "rejected": [...]}    two whole conversations; their common first messages are the prompt (a separate
//                                           prompt that is a text repeats it)
#pragma once
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"

struct ChatMessage {
    std::string role, text;                                // role: system, user or assistant
    bool in_loss = false;                                  // its tokens are in the loss
    std::shared_ptr<const nlohmann::ordered_json> more{};  // other keys for the template, such as tool_calls; null: none
};

class ConversationReader {
public:
    // Reads the messages of a record; otherwise returns the reason why it contains no conversation. key: of the list of
    // messages; empty: the forms above.
    static std::string read(const nlohmann::json& record, const std::string& key, std::vector<ChatMessage>& messages) {
        ConversationReader reader{messages};
        reader.record(record, key);
        return reader.problem_;
    }

    // Reads the two conversations of a pair of answers; otherwise returns the reason why the record contains no pair.
    static std::string read_pair(const nlohmann::json& record, std::vector<ChatMessage>& chosen,
                                 std::vector<ChatMessage>& rejected) {
        const std::pair<const char*, std::vector<ChatMessage>*> answers[] = {{"chosen", &chosen}, {"rejected", &rejected}};
        for (const auto& [key, messages] : answers) {
            ConversationReader reader{*messages};
            reader.answer(record, key);
            if (!reader.problem_.empty()) return reader.problem_;
        }
        const auto same = [](const ChatMessage& a, const ChatMessage& b) { return a.role == b.role && a.text == b.text; };
        const size_t most = std::min(chosen.size(), rejected.size());
        size_t prompt = 0;
        while (prompt < most && same(chosen[prompt], rejected[prompt])) prompt++;
        if (prompt == std::max(chosen.size(), rejected.size())) return "chosen and rejected are the same";
        if (!record.contains("prompt") || !record["prompt"].is_array())
            for (size_t i = 0; i < prompt; i++) chosen[i].in_loss = rejected[i].in_loss = false;
        for (const auto& [key, messages] : answers)
            if (std::none_of(messages->begin(), messages->end(), [](const ChatMessage& m) { return m.in_loss; }))
                return format("'%s' does not contain an assistant's answer that differs from the other's", key);
        return "";
    }

private:
    explicit ConversationReader(std::vector<ChatMessage>& messages) : messages_(messages) {}

    void record(const nlohmann::json& record, const std::string& key) {
        if (!record.is_object()) return refuse(format("it is not a JSON object but %s", record.type_name()));
        const auto has = [&](const char* name) { return record.contains(name); };
        if (!key.empty()) {
            if (!has(key.c_str())) return refuse(format("it has no key '%s'", key.c_str()) + keys_of(record));
            add_messages(record[key], key, true);
        } else if (has("messages")) add_messages(record["messages"], "messages", true);
        else if (has("conversations")) add_messages(record["conversations"], "conversations", true);
        else if (has("prompt") && has("completion")) {
            add_part(record["prompt"], "prompt", "user");
            add_part(record["completion"], "completion", "assistant");
        } else if (has("instruction") && has("output")) {
            add_history(record);
            add_part(record["instruction"], "instruction", "user");
            const nlohmann::json input = record.value("input", nlohmann::json());
            if (!input.is_null() && !input.is_string())
                return refuse(format("'input' is not a string but %s", input.type_name()));
            if (problem_.empty() && input.is_string() && !input.get_ref<const std::string&>().empty()) {
                if (messages_.empty() || messages_.back().role != "user") return refuse("'instruction' is empty");
                messages_.back().text += "\n\n" + input.get<std::string>();
            }
            add_part(record["output"], "output", "assistant");
        } else return refuse("it has neither messages nor prompt and completion nor instruction and output" + keys_of(record));
        if (problem_.empty() && messages_.empty()) refuse("the conversation is empty");
        if (given(record, "history") && !has("instruction")) refuse("it has 'history' without 'instruction' and 'output'");
        add_system(record);
        bool learns = false;
        for (const ChatMessage& m : messages_) learns = learns || m.in_loss;
        if (problem_.empty() && !learns) refuse("no message is in the loss: there is no assistant's answer");
    }

    // The prompt and one of a pair's answers.
    void answer(const nlohmann::json& record, const char* key) {
        if (!record.is_object()) return refuse(format("it is not a JSON object but %s", record.type_name()));
        if (!record.contains(key))
            return refuse(format("it has no key '%s'; a pair of answers has prompt, chosen and rejected", key) +
                          keys_of(record));
        const nlohmann::json prompt = record.value("prompt", nlohmann::json());
        if (!record[key].is_array() || prompt.is_array()) {
            if (prompt.is_null()) return refuse("it has no prompt, and its answers are strings" + keys_of(record));
            add_part(prompt, "prompt", "user");
        }
        add_part(record[key], key, "assistant");
        add_system(record);
    }

    // True if a record has a value other than null or an empty one under a key.
    static bool given(const nlohmann::json& record, const char* key) {
        const nlohmann::json none = "";
        return record.contains(key) && !record[key].is_null() && record[key] != none &&
               !(record[key].is_structured() && record[key].empty());
    }

    // The system's message under a separate key. Refuses tools under such a key, which no template here supports.
    void add_system(const nlohmann::json& record) {
        if (given(record, "tools")) return refuse("it has 'tools', which no template supports");
        if (!given(record, "system") || !problem_.empty()) return;
        const nlohmann::json& system = record["system"];
        if (!system.is_string()) return refuse(format("'system' is not a string but %s", system.type_name()));
        const bool has_one = !messages_.empty() && messages_[0].role == "system";
        if (!has_one) messages_.insert(messages_.begin(), {"system", system.get<std::string>(), false});
        else if (messages_[0].text != system) refuse("'system' differs from the system message in the conversation");
    }

    void add_history(const nlohmann::json& record) {
        if (!given(record, "history")) return;
        const char* const wrong = "'history' is not a list of pairs [question, answer]";
        if (!record["history"].is_array()) return refuse(wrong);
        for (const nlohmann::json& turn : record["history"]) {
            if (!turn.is_array() || turn.size() != 2) return refuse(wrong);
            add(turn[0], "history", "user", false);
            add(turn[1], "history", "assistant", true);
        }
    }

    // A text, which is one message, or a list of messages.
    void add_part(const nlohmann::json& part, const char* key, const char* role) {
        const bool answers = std::string(role) == "assistant";
        if (part.is_array() && !is_parts(part)) return add_messages(part, key, answers);
        add(part, key, role, answers);
    }

    void add_messages(const nlohmann::json& list, const std::string& key, bool in_loss) {
        if (!list.is_array()) return refuse(format("'%s' is not a list of messages but %s", key.c_str(), list.type_name()));
        for (const nlohmann::json& message : list) {
            if (!message.is_object()) return refuse(format("a message is not an object but %s", message.type_name()));
            const bool named_from = message.contains("from") && !message.contains("role");
            const nlohmann::json role = message.value(named_from ? "from" : "role", nlohmann::json());
            const char* text_key = named_from ? "value" : "content";
            if (!role.is_string()) return refuse("a message has no role");
            const std::string name = usual_name(role.get<std::string>());
            if (name != "system" && name != "user" && name != "assistant")
                return refuse(format("a message has the role '%.40s'; roles are system, user and assistant", name.c_str()));
            if (message.contains("tool_calls") && !message["tool_calls"].empty())
                return refuse("a message calls tools, which no template here supports");
            const nlohmann::json thoughts = message.value("reasoning_content", nlohmann::json("")), none = "";
            if (!thoughts.is_null() && thoughts != none)
                return refuse(
                    "a message has 'reasoning_content', which is not supported; HINT: <think>thoughts</think> before its text");
            const nlohmann::json weight = message.value("weight", nlohmann::json(1));
            const double share = weight.is_number() ? weight.get<double>() : -1;
            if (share != 0 && share != 1)
                return refuse(format("a message has the weight %.40s; it must be 0 or 1", weight.dump().c_str()));
            add(message.value(text_key, nlohmann::json()), text_key, name, in_loss && name == "assistant" && share == 1);
        }
    }

    static std::string usual_name(const std::string& role) {
        if (role == "human") return "user";
        if (role == "gpt") return "assistant";
        return role;
    }

    // Parts as OpenAI's and Hugging Face's multimodal formats have them: [{"type": "text", "text": "..."}], only text.
    static bool is_parts(const nlohmann::json& list) {
        return list.is_array() && !list.empty() && list[0].is_object() && list[0].contains("type") && !list[0].contains("role");
    }
    void add_parts(const nlohmann::json& parts, const char* key, const std::string& role, bool in_loss) {
        std::string text;
        for (const nlohmann::json& part : parts) {
            const nlohmann::json type = part.is_object() ? part.value("type", nlohmann::json()) : nlohmann::json();
            if (type != "text" || !part.contains("text") || !part["text"].is_string())
                return refuse(format("'%s' has a part that is not a text but %.60s; only texts are read", key,
                                     type.is_string() ? type.get_ref<const std::string&>().c_str() : part.type_name()));
            text += part["text"].get_ref<const std::string&>();
        }
        add(text, key, role, in_loss);
    }

    void add(const nlohmann::json& text, const char* key, const std::string& role, bool in_loss) {
        if (is_parts(text)) return add_parts(text, key, role, in_loss);
        if (!text.is_string()) return refuse(format("'%s' is not a string but %s", key, text.type_name()));
        if (in_loss && text.get_ref<const std::string&>().empty()) return refuse("an answer in it is empty");
        messages_.push_back({role, text.get<std::string>(), in_loss});
    }

    static std::string keys_of(const nlohmann::json& record) {
        std::string keys;
        for (const auto& [name, value] : record.items()) keys += (keys.empty() ? "; its keys are " : ", ") + name.substr(0, 40);
        return keys.size() > 300 ? keys.substr(0, 300) + " ..." : keys;
    }

    void refuse(const std::string& why) {
        if (problem_.empty()) problem_ = why;
    }

    std::vector<ChatMessage>& messages_;
    std::string problem_;
};
