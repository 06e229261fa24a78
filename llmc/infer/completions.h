// Requests and responses of `train_gpt serve`, in the form of OpenAI's API (platform.openai.com/docs/api-reference:
// completions, chat completions, models): converts JSON to generation requests for a Decoder, and results back. Unsupported
// features are rejected by name, never ignored.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/json.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "../tokenizer/chat_template.h"
#include "../tokenizer/stopping_text.h"
#include "../tokenizer/tokenizer.h"
#include "../model/decoder.h"
#include "../checkpoint/model_texts.h"

// An error as returned by the API.
struct ApiError {
    int status;
    std::string message, param = "", code = "";

    std::string type() const { return status >= 500 ? "server_error" : "invalid_request_error"; }
    nlohmann::ordered_json json() const {
        const auto or_null = [](const std::string& s) {
            return s.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(s);
        };
        return {{"error", {{"message", message}, {"type", type()}, {"param", or_null(param)}, {"code", or_null(code)}}}};
    }
};

// The model's properties that requests depend on.
struct ServedModel {
    std::string name;
    const Tokenizer& tokenizer;
    int room;            // tokens of a prompt and its answer
    int max_new_tokens;  // limit for a request
    std::vector<int> ends;
    std::optional<ChatEncoder> chat;
    std::string no_chat;  // why conversations are not available; empty if they are
};

// A request of /v1/completions or /v1/chat/completions.
struct CompletionRequest {
    bool chat = false, streams = false, reports_usage = false;
    bool json = false;    // the text is a JSON object
    bool echoes = false;  // the text starts with the prompt
    int logprobs = -1;    // >= 0: log-probabilities of the tokens, and of this many of the most likely ones
    std::vector<std::vector<int>> prompts;
    int n = 1, max_new_tokens = 16;
    SamplingOptions sampling{};
    std::optional<uint64_t> seed{};
    std::vector<std::string> stops;

    int choices() const { return n * (int)prompts.size(); }
};
constexpr int most_choices = 128, most_stops = 16, most_logprobs = 20;

namespace detail {

// Reads the fields of a request; null is equivalent to absent.
class RequestReader {
public:
    // body: the same text; tools reach the template with their keys in order.
    RequestReader(const nlohmann::json& j, const std::string& body, const ServedModel& model, CompletionRequest& r)
        : body_(body), model_(model), r_(r) {
        if (!j.is_object()) throw ApiError{400, format("the body must be a JSON object, not %s", j.type_name())};
        r_.sampling.tokens = model.tokenizer.vocab_size();
        r_.max_new_tokens = r_.chat ? model.max_new_tokens : std::min(16, model.max_new_tokens);
        for (const auto& [key, value] : j.items())
            if (!value.is_null()) member(key, value);
        if (const char* key = r_.chat ? "messages" : "prompt"; r_.prompts.empty())
            throw ApiError{400, format("the parameter '%s' is missing", key), key};
        if (j.contains("best_of") && !j["best_of"].is_null() && j["best_of"] != r_.n)
            throw ApiError{400, "this server does not support 'best_of' other than n", "best_of", "unsupported_parameter"};
        if (r_.logprobs >= 0 && r_.streams)
            throw ApiError{400, "this server does not support 'logprobs' with 'stream'", "logprobs", "unsupported_parameter"};
        if (r_.echoes && !r_.stops.empty())
            throw ApiError{400, "this server does not support 'stop' with 'echo'", "echo", "unsupported_parameter"};
        if (r_.reports_usage && !r_.streams) throw ApiError{400, "stream_options requires stream", "stream_options"};
        if (r_.choices() > most_choices)
            throw ApiError{
                400, format("n and the prompts request %d completions; the maximum is %d", r_.choices(), most_choices), "n"};
    }

private:
    void member(const std::string& key, const nlohmann::json& value) {
        if (key == "model") {
            if (const std::string name = text(key, value); name != model_.name)
                throw ApiError{404, "the model '" + name + "' does not exist; this server has '" + model_.name + "'", key,
                               "model_not_found"};
        } else if (key == "prompt" && !r_.chat) prompts(value);
        else if (key == "messages" && r_.chat) messages();
        else if (key == "tools" && r_.chat && value.is_array()) return;  // with the messages
        else if (key == "tool_choice" && r_.chat && value == "auto") return;
        else if (key == "max_tokens" || (key == "max_completion_tokens" && r_.chat))
            r_.max_new_tokens = (int)number(key, value, 1, model_.max_new_tokens, true);
        else if (key == "n") r_.n = (int)number(key, value, 1, most_choices, true);
        else if (key == "temperature") r_.sampling.temperature = number(key, value, 0, 100);
        else if (key == "top_p") r_.sampling.top_p = number(key, value, 0, 1);
        else if (key == "top_k") r_.sampling.top_k = (int)number(key, value, 0, 1e9, true);
        else if (key == "seed") r_.seed = (uint64_t)(int64_t)number(key, value, -9e15, 9e15, true);
        else if (key == "stop") stops(value);
        else if (key == "stream") r_.streams = flag(key, value);
        else if (key == "stream_options") stream_options(value);
        else if (key == "response_format" && value == nlohmann::json{{"type", "json_object"}}) r_.json = true;
        else if (key == "echo" && !r_.chat) r_.echoes = flag(key, value);
        else if (key == "logprobs" && !r_.chat && value != false) r_.logprobs = (int)number(key, value, 0, most_logprobs, true);
        else if (key == "user" || key == "metadata") return;  // information about the client
        else unsupported(key, value);
    }
    // Accepts unsupported fields if they hold their no-op value.
    void unsupported(const std::string& key, const nlohmann::json& value) {
        using nlohmann::json;
        const std::pair<const char*, json> neutral[] = {{"logprobs", false},
                                                        {"top_logprobs", 0},
                                                        {"echo", false},
                                                        {"suffix", ""},
                                                        {"best_of", value},  // compared with n once that is known
                                                        {"logit_bias", json::object()},
                                                        {"presence_penalty", 0},
                                                        {"frequency_penalty", 0},
                                                        {"tools", json::array()},
                                                        {"tool_choice", "none"},
                                                        {"parallel_tool_calls", true},
                                                        {"response_format", {{"type", "text"}}},
                                                        {"store", false},
                                                        {"modalities", json::array({"text"})},
                                                        {"service_tier", "auto"}};
        for (const auto& [name, harmless] : neutral)
            if (key == name) {
                if (value == harmless) return;
                throw ApiError{400, "this server does not support '" + key + "'", key, "unsupported_parameter"};
            }
        throw ApiError{400, "unrecognized parameter '" + printable(key) + "'", key, "unknown_parameter"};
    }

    static std::string text(const std::string& key, const nlohmann::json& value) {
        if (!value.is_string()) throw ApiError{400, "'" + key + "' must be a string, not " + value.type_name(), key};
        return value;
    }
    static bool flag(const std::string& key, const nlohmann::json& value) {
        if (!value.is_boolean()) throw ApiError{400, "'" + key + "' is neither true nor false but " + value.type_name(), key};
        return value;
    }
    static double number(const std::string& key, const nlohmann::json& value, double least, double most, bool whole = false) {
        const double x = value.is_number() ? value.get<double>() : NAN;
        if (!(x >= least && x <= most) || (whole && x != std::floor(x)))
            throw ApiError{400,
                           format("'%s' is %.100s; it must be a%s number from %.10g to %.10g", key.c_str(),
                                  json_text(value).c_str(), whole ? " whole" : "", least, most),
                           key};
        return x;
    }

    void add_prompt(std::vector<int> tokens, const char* key) {
        if (tokens.empty()) throw ApiError{400, "the prompt is empty", key};
        if ((int)tokens.size() >= model_.room)
            throw ApiError{400,
                           format("the prompt has %zu tokens; with at least one generated token it exceeds the context of %d",
                                  tokens.size(), model_.room),
                           key, "context_length_exceeded"};
        r_.prompts.push_back(std::move(tokens));
    }
    void prompts(const nlohmann::json& value) {
        const auto add = [&](const nlohmann::json& one) {
            if (one.is_array()) return add_prompt(token_ids(one), "prompt");
            std::vector<int> tokens = model_.tokenizer.encode_prompt(text("prompt", one));
            if (tokens.empty()) {
                if (model_.tokenizer.eod_id() < 0) throw ApiError{400, "the prompt is empty", "prompt"};
                tokens.push_back(model_.tokenizer.eod_id());  // precedes a new document
            }
            add_prompt(std::move(tokens), "prompt");
        };
        if (!value.is_array() || (!value.empty() && value[0].is_number())) return add(value);
        if (value.empty()) throw ApiError{400, "'prompt' is an empty list", "prompt"};
        if (value.size() > most_choices) throw ApiError{400, format("more than %d prompts", most_choices), "prompt"};
        for (const nlohmann::json& one : value) add(one);
    }
    std::vector<int> token_ids(const nlohmann::json& list) {
        std::vector<int> tokens;
        for (const nlohmann::json& id : list)
            tokens.push_back((int)number("prompt", id, 0, model_.tokenizer.vocab_size() - 1, true));
        if (tokens.empty()) throw ApiError{400, "the prompt is an empty list of tokens", "prompt"};
        return tokens;
    }

    void messages() {
        const auto all = nlohmann::ordered_json::parse(body_);
        const nlohmann::ordered_json& list = all["messages"];
        if (!model_.chat)
            throw ApiError{400, "this model does not support conversations: " + model_.no_chat, "messages", "no_chat_template"};
        if (!list.is_array() || list.empty()) throw ApiError{400, "'messages' must be a list of messages", "messages"};
        std::vector<ChatMessage> conversation;
        for (const nlohmann::ordered_json& message : list) {
            const bool calls = message.is_object() && message.contains("tool_calls") && message["tool_calls"].is_array();
            if (!message.is_object() || !message.contains("role") || !(message.contains("content") || calls))
                throw ApiError{400, "each message must be an object with 'role' and 'content'", "messages"};
            std::string role = text("role", message["role"]);
            if (role == "developer") role = "system";
            if (role != "system" && role != "user" && role != "assistant" && role != "tool")
                throw ApiError{400, "a role is '" + printable(role) + "'; system, user, assistant and tool are known",
                               "messages"};
            const nlohmann::json said = message.value("content", nlohmann::ordered_json());
            conversation.push_back({role, said.is_null() && calls ? "" : content(said), false, more_of(message)});
        }
        if (conversation.back().role == "assistant")
            throw ApiError{400, "the last message is an assistant message", "messages"};
        nlohmann::ordered_json tools = all.value("tools", nlohmann::ordered_json());
        if (!tools.is_array() || tools.empty() || all.value("tool_choice", nlohmann::ordered_json()) == "none") tools = nullptr;
        if (const std::string problem = model_.chat->problem(conversation, tools); !problem.empty())
            throw ApiError{400, problem, "messages"};
        std::vector<int> tokens = model_.chat->encode(conversation, true, false, tools).tokens;
        if (!tools.is_null() && tokens == model_.chat->encode(conversation, true).tokens)
            throw ApiError{400, "the model's chat template does not render tools", "tools", "unsupported_parameter"};
        add_prompt(std::move(tokens), "messages");
    }
    // The other keys of a message, such as tool_calls, as templates expect them: the arguments of a call are an object.
    static std::shared_ptr<const nlohmann::ordered_json> more_of(const nlohmann::ordered_json& message) {
        auto more = std::make_shared<nlohmann::ordered_json>(nlohmann::ordered_json::object());
        for (const auto& [key, value] : message.items())
            if (key != "role" && key != "content" && !value.is_null()) (*more)[key] = value;
        if (more->empty()) return nullptr;
        if (more->contains("tool_calls") && (*more)["tool_calls"].is_array())
            for (auto& call : (*more)["tool_calls"])
                if (call.is_object() && call.contains("function") && call["function"].is_object() &&
                    call["function"].contains("arguments") && call["function"]["arguments"].is_string()) {
                    auto& arguments = call["function"]["arguments"];
                    auto parsed = nlohmann::ordered_json::parse(arguments.get<std::string>(), nullptr, false);
                    if (parsed.is_object() && !nested_deeper_than(parsed, 32)) arguments = std::move(parsed);
                }
        return more;
    }
    // A text, or parts of one.
    static std::string content(const nlohmann::json& value) {
        if (!value.is_array()) return text("content", value);
        std::string all;
        for (const nlohmann::json& part : value) {
            if (!part.is_object() || part.value("type", nlohmann::json()) != "text" || !part.contains("text"))
                throw ApiError{400, "a part of a message is not text", "messages"};
            all += text("text", part["text"]);
        }
        return all;
    }

    void stops(const nlohmann::json& value) {
        const nlohmann::json list = value.is_array() ? value : nlohmann::json::array({value});
        if (list.size() > most_stops) throw ApiError{400, format("'stop' has more than %d strings", most_stops), "stop"};
        for (const nlohmann::json& one : list) {
            r_.stops.push_back(text("stop", one));
            if (r_.stops.back().empty()) throw ApiError{400, "'stop' has an empty string", "stop"};
        }
    }
    void stream_options(const nlohmann::json& value) {
        if (!value.is_object()) throw ApiError{400, "'stream_options' must be an object", "stream_options"};
        for (const auto& [key, option] : value.items()) {
            if (key != "include_usage")
                throw ApiError{400, "unrecognized parameter 'stream_options." + printable(key) + "'", "stream_options"};
            if (!option.is_null()) r_.reports_usage = flag("stream_options.include_usage", option);
        }
    }

    const std::string& body_;
    const ServedModel& model_;
    CompletionRequest& r_;
};

}  // namespace detail

// Throws ApiError.
inline CompletionRequest read_completion_request(const std::string& body, bool chat, const ServedModel& model) {
    CompletionRequest r;
    r.chat = chat;
    nlohmann::json j;
    try {
        j = parse_json(body, "the body");
    } catch (const Error& e) {
        throw ApiError{400, e.what()};
    }
    detail::RequestReader(j, body, model, r);
    return r;
}

// The log-probabilities of a text's tokens, in the form of the API's completions.
class TokenLogprobs {
public:
    explicit TokenLogprobs(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
    // The prompt's first token, which has none.
    void add_first(int token) { add(token, nullptr, nullptr); }
    void add(const TokenScore& s) {
        nlohmann::ordered_json best = nlohmann::ordered_json::object();
        for (const auto& [token, log_probability] : s.best) best[name(token)] = log_probability;
        add(s.token, s.log_probability, std::move(best));
    }
    nlohmann::ordered_json json() const {
        return {{"tokens", tokens_}, {"token_logprobs", logprobs_}, {"top_logprobs", best_}, {"text_offset", offsets_}};
    }

private:
    void add(int token, nlohmann::ordered_json logprob, nlohmann::ordered_json best) {
        tokens_.push_back(name(token));
        logprobs_.push_back(std::move(logprob));
        best_.push_back(std::move(best));
        offsets_.push_back(characters_);
        characters_ += count_characters(tokenizer_.token_bytes(token));
    }
    // Part of a character is written as its bytes, as by OpenAI: bytes:\xe2\x96.
    std::string name(int token) const {
        const std::string bytes = tokenizer_.token_bytes(token);
        if (is_utf8(bytes)) return bytes;
        std::string text = "bytes:";
        for (const char c : bytes) text += format("\\x%02x", (unsigned char)c);
        return text;
    }

    const Tokenizer& tokenizer_;
    nlohmann::ordered_json tokens_ = nlohmann::ordered_json::array(), logprobs_ = tokens_, best_ = tokens_, offsets_ = tokens_;
    int64_t characters_ = 0;
};

// Builds the objects of a response.
struct CompletionAnswer {
    std::string id, model;
    int64_t created;  // Unix time in seconds
    bool chat;

    // choices: made by choice() or part(). usage: null if not requested.
    nlohmann::ordered_json object(bool streamed, nlohmann::ordered_json choices, const nlohmann::ordered_json& usage) const {
        nlohmann::ordered_json j = {{"id", id},
                                    {"object", !chat      ? "text_completion"
                                               : streamed ? "chat.completion.chunk"
                                                          : "chat.completion"},
                                    {"created", created},
                                    {"model", model},
                                    {"choices", std::move(choices)}};
        if (!usage.is_null()) j["usage"] = usage;
        return j;
    }
    // end: "stop" or "length"; empty in all parts of a stream but the last.
    nlohmann::ordered_json choice(int index, const std::string& text, const std::string& end) const {
        nlohmann::ordered_json j = {{"index", index}};
        if (chat) j["message"] = {{"role", "assistant"}, {"content", text}};
        else j["text"] = text;
        return with_end(j, end);
    }
    nlohmann::ordered_json part(int index, const std::string& text, bool first, const std::string& end) const {
        if (!chat) return choice(index, text, end);
        nlohmann::ordered_json delta = nlohmann::ordered_json::object();
        if (first) delta["role"] = "assistant";
        if (!text.empty()) delta["content"] = text;
        return with_end({{"index", index}, {"delta", delta}}, end);
    }
    static nlohmann::ordered_json usage(int64_t prompt, int64_t written) {
        return {{"prompt_tokens", prompt}, {"completion_tokens", written}, {"total_tokens", prompt + written}};
    }

private:
    static nlohmann::ordered_json with_end(nlohmann::ordered_json j, const std::string& end) {
        j["logprobs"] = nullptr;
        j["finish_reason"] = end.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(end);
        return j;
    }
};
