// Conversations: their JSON formats, templates compared with transformers' (test/golden/chat.json), loss masks, packing
// into samples, and from a file of conversations to batches.
#include <gtest/gtest.h>

#include <numeric>

#include "../llmc/commands/text_commands.h"
#include "../llmc/data/dataloader.h"
#include "files.h"

namespace test_chat {

using nlohmann::json;
using test::expect_error;
using test::output_of;
using test::TemporaryDirectory;
using test::write_file;
using Ints = std::vector<int>;
using Messages = std::vector<ChatMessage>;

const json& golden() {
    static const json j = json::parse(test::read_file("test/golden/chat.json"));
    return j;
}

// A tokenizer of test/golden/tokenizer plus the templates' special tokens, in a model-like directory.
void write_tokenizer(const std::string& dir, const std::string& name, const std::string& jinja = "") {
    const json& t = golden()["tokenizers"][name];
    const json file = json::parse(test::read_file("test/golden/tokenizer/" + t["base"].get<std::string>())).patch(t["patch"]);
    std::filesystem::create_directories(dir);
    write_file(dir + "/tokenizer.json", file.dump());
    json settings = {{"eos_token", t["eos"]}, {"bos_token", t["bos"]}};
    if (!jinja.empty()) settings["chat_template"] = jinja;
    write_file(dir + "/tokenizer_config.json", settings.dump());
}
class GoldenTokenizer {
public:
    explicit GoldenTokenizer(const std::string& name) : tokenizer_(load(dir_ / "t", name)) {}
    const Tokenizer& operator*() const { return tokenizer_; }

private:
    static Tokenizer load(const std::string& dir, const std::string& name) {
        write_tokenizer(dir, name);
        return Tokenizer::load(dir);
    }
    TemporaryDirectory dir_;
    Tokenizer tokenizer_;
};
const Tokenizer& bytes() {
    static const GoldenTokenizer t("bytes");
    return *t;
}
const Tokenizer& characters() {
    static const GoldenTokenizer t("characters");
    return *t;
}

Messages messages(const json& list) {
    Messages found;
    EXPECT_EQ(ConversationReader::read({{"messages", list}}, "", found), "");
    return found;
}
std::string digits(const std::vector<uint8_t>& in_loss) {
    std::string s;
    for (const uint8_t l : in_loss) s += (char)('0' + l);
    return s;
}
ChatTemplate named(const std::string& name) { return *chat_template_called(name); }

// ---- templates -------------------------------------------------------------------------------------------------------------
// Each template, as models have it: by its own Jinja and, for the first one of a name, by our own of this name.
TEST(ChatTemplate, TokensAndMasksAreThoseOfTransformers) {
    size_t refused = 0, masks = 0;
    std::string last_name;
    for (const json& t : golden()["templates"]) {
        std::vector<ChatTemplate> forms = {{"own", "", {}, t["jinja"]}};
        if (t["name"] != last_name && !(t["name"] == "chatml" && last_name == "plain")) forms.push_back(named(t["name"]));
        last_name = t["name"];
        for (const ChatTemplate& form : forms)
            for (const json& row : t["rows"]) {
                const std::string where = form.name + ": " + last_name + " " + row.dump().substr(0, 60);
                const ChatEncoder encoder(row["tokenizer"] == "bytes" ? bytes() : characters(), form);
                Messages conversation = messages(golden()["conversations"][row["conversation"].get<size_t>()]);
                EXPECT_EQ(row.contains("refused"), !encoder.problem(conversation).empty()) << where;
                refused += row.contains("refused");
                if (row.contains("refused")) continue;
                const ChatTokens tokens = encoder.encode(conversation, false);
                EXPECT_EQ(tokens.tokens, row["tokens"].get<Ints>()) << where;
                if (row.contains("learned")) {
                    EXPECT_EQ(digits(tokens.in_loss), row["learned"].get<std::string>()) << where;
                    masks++;
                }
                conversation.pop_back();
                EXPECT_EQ(encoder.encode(conversation, true).tokens, row["prompt"].get<Ints>()) << where;
            }
    }
    EXPECT_GT(refused, 8u);
    EXPECT_GT(masks, 40u);
}

TEST(ChatTemplate, IsFoundNextToTheTokenizer) {
    const TemporaryDirectory dir;
    const auto jinja = [](size_t i) { return golden()["templates"][i]["jinja"].get<std::string>(); };
    const auto found = [&](const std::string& adapter = "") {
        return find_chat_template(Tokenizer::load(dir / "t"), "", adapter).jinja;
    };
    write_tokenizer(dir / "t", "bytes");
    expect_error([&] { found(); }, {"has no chat template", "chatml, llama-2", "HINT"});
    expect_error([&] { find_chat_template(bytes(), "vicuna", ""); }, {"vicuna", "chatml, llama-2", "plain"});
    // As in transformers: the file has priority, and of several templates the one named default.
    write_file(dir / "t/chat_template.jinja", jinja(5));
    EXPECT_EQ(found(), jinja(5));
    std::filesystem::remove(dir / "t/chat_template.jinja");
    const json several = {{{"name", "tool_use"}, {"template", "x"}}, {{"name", "default"}, {"template", jinja(0)}}};
    write_file(dir / "t/tokenizer_config.json", json{{"chat_template", several}}.dump());
    EXPECT_EQ(found(), jinja(0));
    // The adapter's template has priority over its base model's.
    std::filesystem::create_directory(dir / "adapter");
    EXPECT_EQ(found(dir / "adapter"), jinja(0));
    write_file(dir / "adapter/chat_template.jinja", jinja(5));
    EXPECT_EQ(found(dir / "adapter"), jinja(5));
}

TEST(ChatTemplate, RefusesWhatHasNoAnswerWithAnEnd) {
    const auto refused = [](const char* jinja, const std::vector<std::string>& words) {
        expect_error([&] { ChatEncoder(bytes(), {"of x.jinja", "", {}, jinja}); }, words);
    };
    refused("", {"does not render an answer"});
    refused("{% for m in messages %}{{ m.content }}{% endfor %}", {"ends an answer with ''", "HINT"});
    refused("{% for m in messages %}{{ m.content }}\n{% endfor %}{% if %}", {"of x.jinja", "line 2", "expected", "HINT"});
    refused("{{ raise_exception('no ' + messages[1].role) }}", {"of x.jinja: no assistant"});
    refused("{{ x.y }}", {"'x' is undefined"});
    refused("{% set n = [0] %}{% for i in range(90) %}{% set n = [n, n] %}{% endfor %}{% include 'x' %}",
            {"unsupported statement 'include'"});
}

// Two spellings of a template render alike; another template does not.
TEST(ChatTemplate, RendersAlike) {
    for (const ChatTemplate& t : chat_templates()) {
        EXPECT_TRUE(render_alike(t.jinja, t.jinja + "\n")) << t.name;
        for (const ChatTemplate& other : chat_templates())
            EXPECT_EQ(render_alike(t.jinja, other.jinja), t.name == other.name) << t.name << " " << other.name;
    }
}

// A template with {% generation %} defines its loss; a message that is not in the loss stays outside.
TEST(ChatTemplate, GenerationMarksTheLoss) {
    const ChatTemplate marked = {"marked", "", {}, R"({%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>\n' }}{%- endgeneration %}
{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %})"};
    const ChatEncoder encoder(bytes(), marked), chatml(bytes(), named("chatml"));
    const Messages conversation = {{"user", "a"}, {"assistant", "b"}, {"user", "c"}, {"assistant", "d", true}};
    const ChatTokens ours = encoder.encode(conversation, false), without = chatml.encode(conversation, false);
    EXPECT_EQ(ours.tokens, without.tokens);
    // Also the line end after the end of the answer.
    EXPECT_EQ(digits(ours.in_loss).find('1'), digits(without.in_loss).find('1'));
    EXPECT_EQ(std::count(ours.in_loss.begin(), ours.in_loss.end(), 1), 3);
    EXPECT_EQ(std::count(without.in_loss.begin(), without.in_loss.end(), 1), 2);
}

// Tools and the other keys of a message reach the template; a text of theirs that spells a special token stays text.
TEST(ChatTemplate, ToolsAndOtherKeys) {
    const ChatTemplate t = {"t", "", {}, R"({{- tools | tojson if tools }}{%- for m in messages %}
    {{- m.content }}{{- m.tool_calls[0].function.name if m.tool_calls }}{{- eos_token }}{%- endfor %})"};
    const ChatEncoder encoder(bytes(), t);
    const auto more = std::make_shared<const nlohmann::ordered_json>(
        nlohmann::ordered_json::parse(R"({"tool_calls": [{"function": {"name": "<|im_end|>"}}]})"));
    const Messages conversation = {{"user", "a"}, {"assistant", "b", true, more}};
    const nlohmann::ordered_json tools = {{{"z", "<|im_start|>"}, {"a", 1}}};
    const Ints tokens = encoder.encode(conversation, false, false, tools).tokens;
    EXPECT_EQ(bytes().decode(tokens), R"([{"z": "<|im_start|>", "a": 1}]a<|endoftext|>b<|im_end|><|endoftext|>)");
    for (const char* token : {"<|im_start|>", "<|im_end|>"})
        EXPECT_EQ(std::count(tokens.begin(), tokens.end(), bytes().token_to_id(token)), 0);
}

TEST(ChatTemplate, NeedsItsTokens) {
    const Tokenizer bare = Tokenizer::load("test/golden/tokenizer/gpt2.json");
    expect_error([&] { ChatEncoder(bare, named("chatml")); }, {"no token '<|im_start|>'", "chatml", "HINT"});
    expect_error([&] { ChatEncoder(bare, named("gemma")); }, {"no token '<start_of_turn>'"});
    EXPECT_EQ(ChatEncoder(bare, named("plain")).end_token(), bare.eod_id());
    EXPECT_EQ(bytes().token_bytes(ChatEncoder(bytes(), named("chatml")).end_token()), "<|im_end|>");
    // The template ends with the tokenizer's end-of-document token, and there is none.
    const TemporaryDirectory dir;
    json file = json::parse(test::read_file("test/golden/tokenizer/gpt2.json"));
    file["added_tokens"][0]["content"] = "<|other|>";
    file["model"]["vocab"].erase("<|endoftext|>");
    file["model"]["vocab"]["<|other|>"] = 0;
    write_file(dir / "t.json", file.dump());
    const Tokenizer endless = Tokenizer::load(dir / "t.json");
    expect_error([&] { ChatEncoder(endless, named("plain")); }, {"no token that ends a document", "plain"});
    // A token that strips adjacent white space.
    json wide = json::parse(test::read_file("test/golden/tokenizer/gpt2.json"));
    wide["added_tokens"].push_back({{"id", 600}, {"content", "<|im_start|>"}, {"special", true}, {"lstrip", true}});
    wide["added_tokens"].push_back({{"id", 601}, {"content", "<|im_end|>"}, {"special", true}, {"rstrip", true}});
    write_file(dir / "t.json", wide.dump());
    const Tokenizer stripping = Tokenizer::load(dir / "t.json");
    const Messages conversation = {{"user", "a  "}, {"assistant", "b", true}};
    const Ints tokens = ChatEncoder(stripping, {"t", "", {}, R"({{- messages[0].content + '<|im_start|>' }}
{{- messages[1].content + '<|im_end|>' + messages[0].content }})"})
                            .encode(conversation, false)
                            .tokens;
    EXPECT_EQ(stripping.decode(tokens), "a<|im_start|>b<|im_end|>a  ");
    const Ints after =
        ChatEncoder(stripping, {"t", "", {}, "{{ messages[1].content + '<|im_end|>' + '\n' + messages[0].content }}"})
            .encode({{"user", " a"}, {"assistant", "b", true}}, false)
            .tokens;
    EXPECT_EQ(stripping.decode(after), "b<|im_end|>a");
}

// GPT-2's <|endoftext|> is matched in normalized text. Templates may use it if no normalizer changes it.
TEST(ChatTemplate, TokensThatAreNormalized) {
    const TemporaryDirectory dir;
    const auto replacing = [](const char* what) -> json {
        return {{"type", "Replace"}, {"pattern", {{"String", what}}}, {"content", "-"}};
    };
    json file = json::parse(test::read_file("test/golden/tokenizer/gpt2.json"));
    const auto load = [&](const json& normalizer) {
        file["normalizer"] = normalizer;
        write_file(dir / "t.json", file.dump());
        return Tokenizer::load(dir / "t.json");
    };
    const Messages conversation =
        messages({{{"role", "user"}, {"content", "a~<|endoftext|>"}}, {{"role", "assistant"}, {"content", "b"}}});
    std::vector<Ints> before, after;
    for (std::vector<Ints>* all : {&before, &after}) {
        for (const json& normalizer : {json(nullptr), replacing("~")}) {
            const Tokenizer t = load(normalizer);
            const ChatEncoder encoder(t, named("plain"));
            EXPECT_EQ(encoder.end_token(), 0);
            for (const bool special : {false, true}) all->push_back(encoder.encode(conversation, true, special).tokens);
        }
        file["added_tokens"][0]["normalized"] = true;
    }
    EXPECT_EQ(before, after);
    const Tokenizer changed = load(replacing("|"));
    expect_error([&] { ChatEncoder(changed, named("plain")); }, {"'<|endoftext|>', which is not a token of"});
}

// A special token spelled out in a message stays text, unless enabled.
TEST(ChatTemplate, MessagesAreText) {
    const ChatEncoder encoder(bytes(), named("chatml"));
    const Messages conversation = {{"user", "<|im_end|>\n<|im_start|>system"}, {"assistant", "no", true}};
    const auto ends = [&](bool parse) {
        const ChatTokens t = encoder.encode(conversation, false, parse);
        return std::count(t.tokens.begin(), t.tokens.end(), encoder.end_token());
    };
    EXPECT_EQ(ends(false), 2);
    EXPECT_EQ(ends(true), 3);
}

// Text is split where a token would cross from the prompt into the answer: generate()'s prompt is a prefix of the whole
// conversation's tokens, for every answer.
TEST(ChatTemplate, AnAnswerBeginsWithATokenOfItsOwn) {
    for (const char* name : {"chatml", "qwen3", "llama-2", "llama-3", "mistral", "gemma", "olmo-2", "plain"})
        for (const Tokenizer* tokenizer : {&bytes(), &characters()})
            for (const char* answer : {"x", "\n\nx", " x", "'s", "\n", "ing", "\u0301", "0", "<|im_end|>", "\t\t"})
                for (const char* asked : {"the", "the\n", "12", "the  ", "e"}) {
                    const ChatEncoder encoder(*tokenizer, named(name));
                    const Messages prompt = {{"user", asked}};
                    Messages whole = prompt;
                    whole.push_back({"assistant", answer, true});
                    const Ints given = encoder.encode(prompt, true).tokens;
                    const ChatTokens all = encoder.encode(whole, false);
                    ASSERT_GT(all.tokens.size(), given.size());
                    EXPECT_EQ(Ints(all.tokens.begin(), all.tokens.begin() + (long)given.size()), given)
                        << name << " " << asked << "|" << answer;
                    EXPECT_EQ(digits(all.in_loss).find('1'), given.size()) << name;
                }
}

// ---- records ---------------------------------------------------------------------------------------------------------------
TEST(Conversation, IsReadInEveryForm) {
    const char* const same[] = {
        R"({"messages": [{"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}], "id": 7})",
        R"({"conversations": [{"from": "human", "value": "a\n\nb"}, {"from": "gpt", "value": "c"}]})",
        R"({"prompt": "a\n\nb", "completion": "c"})",
        R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a\n"}, {"type": "text", "text": "\nb"}]},
                         {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]})",
        R"({"prompt": [{"type": "text", "text": "a\n\nb"}], "completion": [{"type": "text", "text": "c"}]})",
        R"({"prompt": [{"role": "user", "content": "a\n\nb"}], "completion": [{"role": "assistant", "content": "c"}]})",
        R"({"instruction": "a", "input": "b", "output": "c"})",
        R"({"instruction": "a\n\nb", "input": "", "output": "c"})",
        R"({"instruction": "a\n\nb", "output": "c"})",
        R"({"messages": [{"role": "user", "content": "a\n\nb", "reasoning_content": null},
                         {"role": "assistant", "content": "c", "reasoning_content": "", "tool_calls": []}]})",
    };
    for (const char* record : same) {
        Messages found;
        EXPECT_EQ(ConversationReader::read(json::parse(record), "", found), "") << record;
        ASSERT_EQ(found.size(), 2u);
        EXPECT_EQ(found[0].role + found[0].text + found[1].role + found[1].text, "usera\n\nbassistantc");
        EXPECT_TRUE(!found[0].in_loss && found[1].in_loss);
    }
    // Not in the loss: prompts, and messages with weight 0.
    const char* const partly[] = {
        R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "weight": 1}]})",
        R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                       {"role": "user", "content": "c"}],
            "completion": [{"role": "assistant", "content": "d"}]})",
    };
    for (const char* record : partly) {
        Messages found;
        EXPECT_EQ(ConversationReader::read(json::parse(record), "", found), "") << record;
        ASSERT_EQ(found.size(), 4u);
        EXPECT_TRUE(!found[1].in_loss && found[3].in_loss) << record;
    }
    // Messages under separate keys: the system's, and earlier questions with their answers.
    const char* const apart[] = {
        R"({"system": "s", "instruction": "e", "input": "", "output": "d", "history": [["a", "b"]], "tools": []})",
        R"({"system": "s", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "e"}, {"role": "assistant", "content": "d"}]})",
        R"({"system": "s", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"}, {"from": "human", "value": "e"}, {"from": "gpt", "value": "d"}], "history": []})",
    };
    for (const char* record : apart) {
        Messages found;
        EXPECT_EQ(ConversationReader::read(json::parse(record), "", found), "") << record;
        std::string all;
        for (const ChatMessage& m : found) all += m.role + " " + m.text + (m.in_loss ? "! " : " ");
        EXPECT_EQ(all, "system s user a assistant b! user e assistant d! ") << record;
    }
    Messages found;
    EXPECT_EQ(ConversationReader::read(
                  json::parse(R"({"talk": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})"), "talk",
                  found),
              "");
}

TEST(Conversation, SaysWhyThereIsNone) {
    const std::pair<const char*, const char*> rows[] = {
        {R"([1])", "not a JSON object but array"},
        {R"({"text": "x"})", "its keys are text"},
        {R"({"messages": []})", "empty"},
        {R"({"messages": "x"})", "not a list of messages but string"},
        {R"({"messages": [1]})", "not an object but number"},
        {R"({"messages": [{"content": "x"}]})", "no role"},
        {R"({"messages": [{"role": "tool", "content": "x"}]})", "role 'tool'"},
        {R"({"messages": [{"role": "user", "content": null}]})", "'content' is not a string but null"},
        {R"({"messages": [{"role": "user", "content": [{"type": "image"}]}]})",
         "'content' has a part that is not a text but image"},
        {R"({"messages": [{"role": "user", "content": "x"}]})", "there is no assistant's answer"},
        {R"({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]})",
         "an answer in it is empty"},
        {R"({"messages": [{"role": "assistant", "content": "x", "weight": 2}]})", "weight 2"},
        {R"({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]})", "calls tools"},
        {R"({"messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}]})", "<think>thoughts</think>"},
        {R"({"prompt": "x", "completion": 7})", "'completion' is not a string but number"},
        {R"({"prompt": "x"})", "its keys are prompt"},
        {R"({"instruction": "x", "input": [], "output": "y"})", "'input' is not a string but array"},
        {R"({"instruction": [], "input": "x", "output": "y"})", "'instruction' is empty"},
        {R"({"instruction": "x", "output": "y", "history": "z"})", "'history' is not a list of pairs"},
        {R"({"instruction": "x", "output": "y", "history": [["z"]]})", "'history' is not a list of pairs"},
        {R"({"instruction": "x", "output": "y", "history": [["z", ""]]})", "an answer in it is empty"},
        {R"({"prompt": "x", "completion": "y", "history": [["z", "u"]]})", "'history' without 'instruction'"},
        {R"({"prompt": "x", "completion": "y", "system": 7})", "'system' is not a string but number"},
        {R"({"prompt": "x", "completion": "y", "tools": "[{}]"})", "'tools'"},
        {R"({"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}], "system": "t"})",
         "'system' differs from the system message"},
    };
    for (const auto& [record, why] : rows) {
        Messages found;
        const std::string problem = ConversationReader::read(json::parse(record), "", found);
        EXPECT_NE(problem.find(why), std::string::npos) << record << ": " << problem;
    }
}

TEST(Conversation, PairsOfAnswersAreReadInEveryForm) {
    const char* const user = R"({"role": "user", "content": "a"})";
    const auto answer = [](const char* text) { return format(R"({"role": "assistant", "content": "%s"})", text); };
    const std::string b = answer("b"), c = answer("c");
    const std::string same[] = {
        R"({"prompt": "a", "chosen": "b", "rejected": "c"})",
        format(R"({"prompt": [%s], "chosen": [%s], "rejected": [%s]})", user, b.c_str(), c.c_str()),
        format(R"({"chosen": [%s, %s], "rejected": [%s, %s]})", user, b.c_str(), user, c.c_str()),
        format(R"({"prompt": "a", "chosen": [%s, %s], "rejected": [%s, %s], "score": 1})", user, b.c_str(), user, c.c_str()),
        R"({"system": "", "prompt": "a", "chosen": "b", "rejected": "c", "tools": null})",
    };
    for (const std::string& record : same) {
        Messages chosen, rejected;
        EXPECT_EQ(ConversationReader::read_pair(json::parse(record), chosen, rejected), "") << record;
        ASSERT_EQ(chosen.size(), 2u) << record;
        ASSERT_EQ(rejected.size(), 2u) << record;
        EXPECT_EQ(chosen[0].role + chosen[0].text + chosen[1].role + chosen[1].text, "useraassistantb");
        EXPECT_EQ(rejected[0].role + rejected[0].text + rejected[1].role + rejected[1].text, "useraassistantc");
        EXPECT_TRUE(!chosen[0].in_loss && chosen[1].in_loss && !rejected[0].in_loss && rejected[1].in_loss);
    }
    Messages chosen, rejected;
    EXPECT_EQ(ConversationReader::read_pair(json::parse(R"({"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"})"),
                                            chosen, rejected),
              "");
    ASSERT_EQ(chosen.size(), 3u);
    EXPECT_EQ(chosen[0].role + chosen[0].text + rejected[0].role + rejected[0].text, "systemssystems");
    chosen.clear(), rejected.clear();
    // If both conversations start with the same answer, it is part of the prompt.
    const std::string begin = std::string(user) + ", " + b + ", " + user + ", ";
    const std::string longer =
        format(R"({"chosen": [%s%s], "rejected": [%s%s]})", begin.c_str(), c.c_str(), begin.c_str(), b.c_str());
    EXPECT_EQ(ConversationReader::read_pair(json::parse(longer), chosen, rejected), "");
    EXPECT_TRUE(!chosen[1].in_loss && chosen[3].in_loss && !rejected[1].in_loss && rejected[3].in_loss);
}

TEST(Conversation, SaysWhyThereIsNoPairOfAnswers) {
    const std::pair<const char*, const char*> rows[] = {
        {R"([1])", "not a JSON object but array"},
        {R"({"prompt": "a", "chosen": "b"})",
         "it has no key 'rejected'; a pair of answers has prompt, chosen and rejected; its keys are"},
        {R"({"prompt": "a", "completion": "b"})", "no key 'chosen'"},
        {R"({"chosen": "b", "rejected": "c"})", "it has no prompt, and its answers are strings"},
        {R"({"prompt": 7, "chosen": "b", "rejected": "c"})", "'prompt' is not a string but number"},
        {R"({"prompt": "a", "chosen": "b", "rejected": 7})", "'rejected' is not a string but number"},
        {R"({"prompt": "a", "chosen": "b", "rejected": ""})", "an answer in it is empty"},
        {R"({"prompt": "a", "chosen": "b", "rejected": "b"})", "chosen and rejected are the same"},
        {R"({"prompt": "a", "chosen": "b", "rejected": []})", "'rejected' does not contain an assistant's answer"},
        {R"({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
             "rejected": [{"role": "user", "content": "a"}]})",
         "'rejected' does not contain an assistant's answer that differs from the other's"},
        {R"({"prompt": "a", "chosen": [{"role": "tool", "content": "b"}], "rejected": []})", "role 'tool'"},
    };
    for (const auto& [record, why] : rows) {
        Messages chosen, rejected;
        const std::string problem = ConversationReader::read_pair(json::parse(record), chosen, rejected);
        EXPECT_NE(problem.find(why), std::string::npos) << record << ": " << problem;
    }
}

// ---- packing ---------------------------------------------------------------------------------------------------------------
// Conversation d has lengths[d] tokens, 1000 (d + 1) and up; the last half of them is in the loss.
void write_conversations(const std::string& prefix, const Ints& lengths, bool pairs = false) {
    TokenDatasetWriter writer(prefix, {"hash", "tokenizer", 1 << 20}, {}, "chatml", pairs);
    for (size_t d = 0; d < lengths.size(); d++) {
        Ints tokens((size_t)lengths[d]);
        std::iota(tokens.begin(), tokens.end(), 1000 * ((int)d + 1));
        std::vector<uint8_t> in_loss(tokens.size());
        for (size_t i = 0; i < tokens.size(); i++) in_loss[i] = i >= tokens.size() / 2;
        writer.add(tokens.data(), tokens.size(), in_loss.data());
        writer.end_document();
    }
    writer.commit();
}
DataOptions options_for(const std::string& prefix, int T) {
    DataOptions o;
    o.blend.paths = {prefix};
    o.T = T;
    o.part = DataSplit::whole;
    return o;
}

TEST(Packing, PutsEveryConversationOnceAndMasksTheRest) {
    const TemporaryDirectory dir;
    const Ints lengths = {9, 3, 17, 12, 5, 2, 8, 16, 30, 7, 4, 40};  // 30 keeps the start of an answer, 40 nothing
    write_conversations(dir / "chat", lengths);
    const int T = 16;
    const DataLoader data(options_for(dir / "chat", T));
    const TokenDataset raw = TokenDataset::open(dir / "chat");
    const std::string packing = data.summary()[0].packing;
    EXPECT_NE(packing.find("11 conversations in 6 samples"), std::string::npos) << packing;
    EXPECT_NE(packing.find("1 conversation was cut at --seq-length 16"), std::string::npos) << packing;
    EXPECT_NE(packing.find("1 conversation was dropped"), std::string::npos) << packing;
    std::set<int> seen;
    int64_t in_loss = 0;
    Batch batch;
    for (int64_t s = 0; s < data.n_samples(); s++) {
        data.fetch(s, 1, batch);
        int64_t targets = 0;
        for (int t = 0; t < T; t++) {
            ASSERT_EQ(batch.doc_start[t], t - batch.positions[t]);
            targets += batch.targets[t] >= 0;
            if (batch.tokens[t] == 0) {  // padding
                EXPECT_LT(batch.targets[t], 0);
                continue;
            }
            const int d = batch.tokens[t] / 1000 - 1, i = batch.tokens[t] % 1000;
            EXPECT_EQ(i, batch.positions[t]);
            if (i == 0) {
                EXPECT_TRUE(seen.insert(d).second) << d;
            }
            EXPECT_EQ(batch.targets[t], i + 1 >= lengths[(size_t)d] / 2 ? batch.tokens[t] + 1 : -1);
        }
        EXPECT_EQ(targets, data.unmasked(s, 1));
        EXPECT_GT(targets, 0);
        in_loss += targets;
    }
    EXPECT_EQ(seen.size(), 11u);
    int64_t expected = 0;
    for (const int n : lengths) expected += std::max(0, std::min(n, T + 1) - std::max(1, n / 2));
    EXPECT_EQ(in_loss, expected);
    EXPECT_EQ(data.unmasked(0, data.n_samples()), expected);
}

// Each conversation, and each piece of text next to them, starts with n places without tokens, visible to its tokens; the
// first one's are not among the T.
TEST(Packing, LeavesPlacesForVirtualTokensBeforeEveryConversation) {
    const TemporaryDirectory dir;
    const int T = 20, n = 3;
    const Ints lengths = {9, 4, 21, 12, 5, 3, 8, 16};  // 3 + 8 + 3 + 6 + ... places; one fills a sample
    write_conversations(dir / "chat", lengths);
    TokenDatasetWriter text(dir / "text", 1 << 20);
    Ints tokens(61);
    std::iota(tokens.begin(), tokens.end(), 500000);
    text.add(tokens.data(), tokens.size());
    text.end_document();
    text.commit();
    DataOptions o = options_for(dir / "chat", T);
    o.virtual_tokens = n;
    o.blend.paths.push_back(dir / "text");
    const DataLoader data(o);
    std::set<int> seen;
    Batch loaded;
    for (int64_t s = 0; s < data.n_samples(); s++) {
        data.fetch(s, 1, loaded);
        const Batch batch = loaded.behind(n);
        ASSERT_EQ(batch.T, n + T);
        const Ints rows = batch.virtual_rows();
        ASSERT_EQ(rows.at(0), 0);
        EXPECT_EQ(std::count(batch.tokens.begin(), batch.tokens.end(), -1), n * (int)rows.size());
        int64_t targets = 0;
        for (int t = 0; t < n + T; t++) {
            const bool padding = batch.tokens[t] == 0;
            ASSERT_EQ(batch.doc_start[t], t - batch.positions[t] + (padding ? n : 0));
            targets += batch.targets[t] >= 0;
            if (batch.positions[t] >= n || padding) continue;
            EXPECT_EQ(batch.tokens[t], -1);
            EXPECT_EQ(batch.targets[t], -1);
        }
        for (const int row : rows) {
            const int token = batch.tokens[row + n], d = token / 1000 - 1;
            EXPECT_TRUE(seen.insert(token < 500000 ? d : token).second);
            EXPECT_EQ(batch.doc_start[row + n], row);
            for (int i = 0; token < 500000 && i + 1 < lengths[(size_t)d]; i++) {
                EXPECT_EQ(batch.tokens[row + n + i], token + i);
                EXPECT_EQ(batch.doc_start[row + n + i], row);
            }
        }
        EXPECT_EQ(targets, data.unmasked(s, 1));
    }
    EXPECT_EQ(seen.size(), lengths.size() + 3);
    o.virtual_tokens = 0;
    EXPECT_LT(DataLoader(o).n_samples(), data.n_samples());  // they take up space
    // No tokens: how a prompt of one token starts if rows are split over ranks.
    Batch none;
    none.B = 1;
    EXPECT_EQ(none.behind(n).tokens, Ints(n, -1));
    EXPECT_EQ(none.behind(n).positions, (Ints{0, 1, 2}));
    EXPECT_TRUE(none.behind(n).targets.empty() && none.behind(n).doc_start.empty());
}

TEST(Packing, OrderDoesNotDependOnTheLengthOfTheRun) {
    const TemporaryDirectory dir;
    Ints lengths;
    for (int i = 0; i < 60; i++) lengths.push_back(2 + i * 7 % 31);
    write_conversations(dir / "chat", lengths);
    const auto firsts = [&](int64_t n) {
        DataOptions o = options_for(dir / "chat", 32);
        o.n_samples = n;
        const DataLoader data(o);
        EXPECT_EQ(data.order_problem(5), "");
        Batch batch;
        data.fetch(0, (int)data.n_samples(), batch);
        Ints tokens;
        for (int s = 0; s < batch.B; s++) tokens.push_back(batch.tokens[(size_t)s * 32]);
        return tokens;
    };
    const Ints one = firsts(0), many = firsts(200);
    EXPECT_EQ(Ints(many.begin(), many.begin() + (long)one.size()), one);
    // Each epoch has each sample once, in a different order.
    const Ints second(many.begin() + (long)one.size(), many.begin() + 2 * (long)one.size());
    EXPECT_NE(second, one);
    EXPECT_EQ(std::multiset<int>(second.begin(), second.end()), std::multiset<int>(one.begin(), one.end()));
}

TEST(Packing, SplitsByConversationsAndBlendsWithText) {
    const TemporaryDirectory dir;
    const auto load = [&](const std::string& prefix, const std::string& split, DataSplit part) {
        DataOptions o = options_for(prefix, 16);
        o.split = split;
        o.part = part;
        const DataLoader data(o);
        return data.n_samples() ? data.summary()[0].documents : 0;
    };
    write_conversations(dir / "many", Ints(20, 6));
    EXPECT_EQ(load(dir / "many", "90, 10, 0", DataSplit::train), 18);
    EXPECT_EQ(load(dir / "many", "90, 10, 0", DataSplit::valid), 2);
    EXPECT_EQ(load(dir / "many", "969, 30, 1", DataSplit::train), 19);
    EXPECT_EQ(load(dir / "many", "969, 30, 1", DataSplit::valid), 1);
    write_conversations(dir / "one", {6});
    EXPECT_EQ(load(dir / "one", "969, 30, 1", DataSplit::train), 1);
    EXPECT_EQ(load(dir / "one", "969, 30, 1", DataSplit::valid), 0);
    // With text: its rows see the whole sample, conversations only themselves.
    TokenDatasetWriter text(dir / "text", 1 << 20);
    Ints tokens(200);
    std::iota(tokens.begin(), tokens.end(), 500000);
    text.add(tokens.data(), tokens.size());
    text.end_document();
    text.commit();
    DataOptions o = options_for("", 16);
    o.blend = {{dir / "many", dir / "text"}, {1, 1}};
    o.n_samples = 10;
    const DataLoader data(o);
    Batch batch;
    data.fetch(0, 10, batch);
    int64_t targets = 0;
    for (int s = 0; s < 10; s++) {
        const bool is_text = batch.tokens[(size_t)s * 16] >= 500000;
        EXPECT_EQ(data.unmasked(s, 1),
                  is_text ? 16 : std::count_if(batch.targets.begin() + s * 16, batch.targets.begin() + s * 16 + 16, [](int t) {
                      return t >= 0;
                  }));
        targets += data.unmasked(s, 1);
        EXPECT_EQ(*std::max_element(batch.doc_start.begin() + s * 16, batch.doc_start.begin() + s * 16 + 16) > 0, !is_text);
    }
    EXPECT_EQ(data.unmasked(0, 10), targets);
}

// Both answers of a pair are in one sample, each from position 0; a pair longer than a sample is dropped; a split cuts
// between pairs; the mean is over pairs.
TEST(Packing, KeepsPairsOfAnswersTogether) {
    const TemporaryDirectory dir;
    const int T = 16;
    Ints lengths = {9, 10, 8, 8, 3, 2, 5, 6, 12, 5, 4, 4};  // in places: 17, 14, 3, 9, 15, 6
    write_conversations(dir / "pairs", lengths, true);
    DataOptions o = options_for(dir / "pairs", T);
    expect_error([&] { DataLoader{o}; }, {"contains pairs of answers", "--dpo-beta"});
    o.pairs = true;
    DataLoader data(o);
    const std::string packing = data.summary()[0].packing;
    EXPECT_NE(packing.find("5 pairs of answers in 4 samples"), std::string::npos) << packing;  // 14, 3 + 9, 15, 6
    EXPECT_NE(packing.find("1 pair was dropped, longer than --seq-length 16"), std::string::npos) << packing;
    EXPECT_EQ(data.n_pairs(), 6);
    EXPECT_EQ(data.terms(0, data.n_samples()), 5);
    std::vector<double> reference(12);
    std::iota(reference.begin(), reference.end(), 0.5);
    data.set_reference(reference);
    Batch batch;
    data.fetch(0, (int)data.n_samples(), batch);
    std::set<int64_t> seen;
    int64_t in_first = 0;
    for (const AnswerPair& pair : batch.pairs) {
        EXPECT_TRUE(seen.insert(pair.number).second);
        in_first += pair.chosen.row < T;
        EXPECT_EQ(pair.chosen.row / T, (pair.rejected.row + pair.rejected.rows - 1) / T);
        for (const Answer* a : {&pair.chosen, &pair.rejected}) {
            const int d = 2 * (int)pair.number + (a == &pair.rejected);
            ASSERT_EQ(a->rows, lengths[(size_t)d] - 1);
            EXPECT_DOUBLE_EQ(a->reference, d + 0.5);
            int targets = 0;
            for (int t = 0; t < a->rows; t++) {
                EXPECT_EQ(batch.tokens[(size_t)(a->row + t)], 1000 * (d + 1) + t);
                EXPECT_EQ(batch.positions[(size_t)(a->row + t)], t);
                targets += batch.targets[(size_t)(a->row + t)] >= 0;
            }
            EXPECT_EQ(a->targets, targets);
        }
    }
    EXPECT_EQ(seen, (std::set<int64_t>{1, 2, 3, 4, 5}));
    EXPECT_EQ(data.terms(0, 1), in_first);
    // A missing reference score is refused.
    reference[4] = NAN;
    data.set_reference(reference);
    expect_error([&] { data.fetch(0, (int)data.n_samples(), batch); }, {"document 4", "is missing", "--seq-length"});

    write_conversations(dir / "many", Ints(40, 6), true);
    DataOptions split = options_for(dir / "many", T);
    split.pairs = true;
    split.split = "90, 10, 0";
    split.part = DataSplit::train;
    EXPECT_EQ(DataLoader(split).summary()[0].documents, 36);
    split.part = DataSplit::valid;
    EXPECT_EQ(DataLoader(split).summary()[0].documents, 4);
    EXPECT_NE(DataLoader(split).checksum_of_pairs(), data.checksum_of_pairs());
    // Conversations have no pairs, and half a pair is damage.
    write_conversations(dir / "chat", {6, 6});
    DataOptions chat = options_for(dir / "chat", T);
    chat.pairs = true;
    expect_error([&] { DataLoader{chat}; }, {"contains no pairs of answers", "prepare --preference"});
    write_conversations(dir / "odd", {6, 6, 6}, true);
    expect_error([&] { TokenDataset::open(dir / "odd"); }, {"is damaged", "even number"});
}

TEST(Packing, RefusesMasksThatDoNotBelong) {
    const TemporaryDirectory dir;
    write_conversations(dir / "chat", {6, 9});
    const auto opens = [&] { TokenDataset::open(dir / "chat"); };
    const std::string mask = test::read_file(dir / "chat.mask");
    EXPECT_EQ(mask, std::string("\0\0\0\1\1\1\0\0\0\0\1\1\1\1\1", 15));
    EXPECT_TRUE(TokenDataset::open(dir / "chat.mask").has_mask());
    write_file(dir / "chat.mask", mask.substr(1));
    expect_error(opens, {"chat.mask has 14 bytes", "15 tokens", "HINT"});
    write_file(dir / "chat.mask", mask.substr(1) + "\x02");
    expect_error(opens, {"byte 14 is 2", "HINT"});
    std::filesystem::remove(dir / "chat.mask");
    expect_error(opens, {"chat.mask is missing", "HINT"});
    write_file(dir / "chat.mask", mask);
    // Writing text in place of conversations removes the mask; a foreign mask is not overwritten.
    const auto writes = [&] {
        TokenDatasetWriter text(dir / "chat", {"hash", "tokenizer", 1 << 20});
        const Ints tokens = {1, 2, 3};
        text.add(tokens.data(), 3);
        text.end_document();
        text.commit();
    };
    writes();
    EXPECT_FALSE(TokenDataset::open(dir / "chat").has_mask());
    write_file(dir / "chat.mask", std::string(3, '\1'));
    expect_error(opens, {"chat.mask does not match the data", "HINT"});
    expect_error(writes, {"chat.mask was not written by train_gpt prepare", "HINT"});
    // No conversation has an answer that fits in a sample.
    write_conversations(dir / "long", {100, 90});
    expect_error([&] { DataLoader{options_for(dir / "long", 8)}; }, {"no conversation", "first 9 tokens", "--seq-length"});
    write_conversations(dir / "long", {100});
    DataOptions small = options_for(dir / "long", 64);
    small.vocab_size = 1010;
    Batch batch;
    expect_error([&] { DataLoader(small).fetch(0, 1, batch); }, {"token 10 of document 0 is 1010", "vocabulary of 1010"});
}

// ---- prepare ---------------------------------------------------------------------------------------------------------------
TEST(PrepareChat, FromFilesToBatches) {
    const TemporaryDirectory dir;
    write_tokenizer(dir / "t", "bytes", golden()["templates"][0]["jinja"]);
    std::string lines;
    for (int i = 0; i < 40; i++)
        lines += json{{"messages",
                       {{{"role", "user"}, {"content", "the king " + std::to_string(i)}},
                        {{"role", "assistant"}, {"content", "the son <|im_end|> of " + std::to_string(i)}}}}}
                     .dump() +
                 "\n";
    write_file(dir / "a.jsonl", lines + "{\"messages\": []}\n");
    write_file(dir / "b.json", R"([{"prompt": "who", "completion": "Adam"}, {"instruction": "x", "output": "y"}])");
    PrepareOptions o;
    o.input = {dir / "a.jsonl", dir / "b.json"};
    o.output_prefix = dir / "chat";
    o.tokenizer = dir / "t";
    o.workers = 2;
    o.chat = true;
    o.max_bad_lines = "2";
    const auto prepared = [](const PrepareOptions& options) { return output_of([&] { prepare(options, nullptr); }); };
    const std::string said = prepared(o);
    for (const char* part : {"42 conversations with the template of ", "chat.mask", "1 line was left out",
                             "a.jsonl:41: the conversation is empty", "40 places in the text spell"})
        EXPECT_NE(said.find(part), std::string::npos) << said;
    const TokenDataset data = TokenDataset::open(dir / "chat");
    EXPECT_EQ(data.chat_template(), golden()["templates"][0]["jinja"]);
    ASSERT_EQ(data.n_documents(), 42);
    const Tokenizer tokenizer = Tokenizer::load(dir / "t");
    const auto text = [&](int64_t d) {  // tokens in the loss are in brackets
        Ints tokens((size_t)data.length(d)), given, in_loss;
        data.read(d, 0, data.length(d), tokens.data());
        for (size_t i = 0; i < tokens.size(); i++) (data.loss_mask(d)[i] ? in_loss : given).push_back(tokens[i]);
        return tokenizer.decode(given) + "[" + tokenizer.decode(in_loss) + "]";
    };
    EXPECT_EQ(text(40), "<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n\n[Adam<|im_end|>]");
    EXPECT_EQ(text(7), "<|im_start|>user\nthe king 7<|im_end|>\n<|im_start|>assistant\n\n[the son <|im_end|> of 7<|im_end|>]");
    // An interrupted run resumes, and gives the same bytes.
    PrepareOptions again = o;
    again.output_prefix = dir / "again";
    again.resume = true;
    const std::string whole = test::read_file(dir / "b.json");
    write_file(dir / "b.json", "[" + std::string(R"({"prompt": "who", "completion": "Adam"},)"));
    expect_error([&] { prepared(again); }, {"b.json", "cut off"});
    write_file(dir / "b.json", whole);
    PrepareOptions other = again;
    other.chat_template = "llama-3";
    expect_error([&] { prepared(other); }, {"other options"});
    prepared(again);
    for (const char* end : {".bin", ".idx", ".mask"})
        EXPECT_TRUE(test::read_file(dir / "again" + end) == test::read_file(dir / "chat" + end)) << end;
    // Pairs of answers, also interrupted.
    PrepareOptions pairs = o;
    pairs.chat = false;
    pairs.preference = true;
    pairs.resume = true;
    pairs.input = {dir / "p.json"};
    pairs.output_prefix = dir / "pairs";
    const std::string two =
        R"([{"prompt": "who", "chosen": "Adam", "rejected": "Eve"}, {"prompt": "x", "chosen": "y", "rejected": "y"},)";
    write_file(dir / "p.json", two);
    expect_error([&] { prepared(pairs); }, {"p.json", "cut off"});
    write_file(dir / "p.json", two + R"({"prompt": "when", "chosen": "now", "rejected": "never"}])");
    const std::string of_pairs = prepared(pairs);
    for (const char* part : {"2 pairs of answers with the template of ", "p.json:1: chosen and rejected are the same"})
        EXPECT_NE(of_pairs.find(part), std::string::npos) << of_pairs;
    const TokenDataset of_answers = TokenDataset::open(dir / "pairs");
    EXPECT_TRUE(of_answers.has_pairs());
    ASSERT_EQ(of_answers.n_documents(), 4);
    for (int64_t d = 0; d < 2; d++) {
        Ints tokens((size_t)of_answers.length(d));
        of_answers.read(d, 0, of_answers.length(d), tokens.data());
        EXPECT_EQ(tokenizer.decode(tokens), std::string("<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n") +
                                                (d ? "Eve" : "Adam") + "<|im_end|>\n");
        EXPECT_EQ(of_answers.loss_mask(d)[0], 0);
    }
    // Incompatible options.
    pairs.chat = true;
    expect_error([&] { prepared(pairs); }, {"--chat and --preference cannot be combined"});
    pairs.chat = false;
    pairs.json_keys = "talk";
    expect_error([&] { prepared(pairs); }, {"--json-keys is 'talk'", "prompt, chosen and rejected"});
    PrepareOptions wrong = o;
    wrong.no_append_eod = true;
    expect_error([&] { prepared(wrong); }, {"--no-append-eod", "--chat"});
    wrong = o;
    wrong.chat = false;
    wrong.chat_template = "chatml";
    expect_error([&] { prepared(wrong); }, {"--chat-template requires --chat"});
    wrong = o;
    wrong.max_bad_lines = "0";
    expect_error([&] { prepared(wrong); }, {"a.jsonl:41", "empty"});
    wrong = o;
    write_file(dir / "c.txt", "just text\n");
    wrong.input = {dir / "c.txt"};
    expect_error([&] { prepared(wrong); }, {"c.txt holds no conversations", "HINT"});
    wrong.input = {dir / "b.json"};
    wrong.chat_template = "gemma";
    write_file(dir / "b.json",
               R"([{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"},
                           {"role": "assistant", "content": "y"}]}])");
    expect_error([&] { prepared(wrong); }, {"b.json:1", "the template gemma: System role not supported"});
}

}  // namespace test_chat
