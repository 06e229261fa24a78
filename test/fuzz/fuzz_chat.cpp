// Conversations and chat templates: any Jinja template gives a text, or an error, within bounds of time and memory; any record
// has a conversation or a reason why not, and each template that accepts it gives tokens with a mask of the same length.
#include "fuzz.h"

#include "../../llmc/tokenizer/chat_template.h"

// A question, an answer with a tool call, and tools, by any template.
static void render(const std::string& jinja) {
    static const auto more = std::make_shared<const nlohmann::ordered_json>(nlohmann::ordered_json::parse(
        R"({"tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, null, "\u00e9"]}}}]})"));
    static const std::vector<ChatMessage> messages = {{"user", " a <x>\n b"}, {"assistant", "c", true, more}};
    static const nlohmann::ordered_json tools = {{{"name", "f"}, {"parameters", {{"x", 1}}}}};
    try {
        const ChatRenderer renderer(jinja, "<s>", "</s>");
        const JinjaString text = renderer.render(messages, 2, true, tools);
        CHECK(text.parts.empty() || text.parts.back().end == text.text.size(), "the parts are the text");
    } catch (const Error&) {
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Tokenizer tokenizer = Tokenizer::load("test/golden/tokenizer/gpt2.json");
    const std::string text(view(data, size));
    render(text);
    const nlohmann::json record = nlohmann::json::parse(text, nullptr, false);
    if (record.is_discarded() || nested_deeper_than(record, 60)) return 0;
    std::vector<ChatMessage> messages;
    if (!ConversationReader::read(record, "", messages).empty()) return 0;
    for (const ChatTemplate& t : chat_templates()) {
        if (!t.tokens.empty()) continue;  // not in this tokenizer
        const ChatEncoder encoder(tokenizer, t);
        if (!encoder.problem(messages).empty()) continue;
        const ChatTokens tokens = encoder.encode(messages, false);
        CHECK(tokens.tokens.size() == tokens.in_loss.size() && !tokens.tokens.empty(), "a mask for each token");
        const auto in_loss = std::count(tokens.in_loss.begin(), tokens.in_loss.end(), 1);
        CHECK(in_loss > 0 && tokens.in_loss[0] <= 1, "an answer is learned");
    }
    return 0;
}
