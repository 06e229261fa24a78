// The text files of a model directory: config.json, generation_config.json, and the tokenizer's. A run that starts from a model
// keeps the model's own: the ids of the start, end and padding tokens, its chat template, every file of its tokenizer.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../base/check.h"
#include "checkpoint.h"
#include "../base/file.h"
#include "../model/hf_config.h"
#include "../model/model_config.h"
#include "../base/terminal.h"
#include "../tokenizer/chat_template.h"
#include "../tokenizer/tokenizer.h"
#include "../base/types.h"

struct ModelTexts {
    std::map<std::string, std::string> files;                       // name -> text; in memory, as a file may be removed later
    nlohmann::ordered_json ids = nlohmann::ordered_json::object();  // bos_token_id, ... for config.json
    std::vector<int> end_ids;                                       // tokens that end generated text
    std::string bos_token, eos_token;                               // as text
    bool has_tokenizer = false;                                     // one that this program can read
    std::string dtype = sizeof(floatX) == 2 ? "bfloat16" : "float32";
    int turn_end = -1;  // also ends an answer in generation_config.json

    size_t bytes() const {
        size_t sum = 0;
        for (const auto& [name, text] : files) sum += text.size();
        return sum;
    }
};

inline constexpr const char* tokenizer_files[] = {
    "tokenizer.json",    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",        "tokenizer.model",       "sentencepiece.bpe.model", "spiece.model",      "chat_template.jinja",
    "chat_template.json"};

// A number or a list of numbers; empty for null.
inline std::vector<int> token_ids(const nlohmann::ordered_json& config, const char* key, const std::string& source) {
    const nlohmann::ordered_json value = config.value(key, nlohmann::ordered_json());
    std::vector<int> ids;
    for (const auto& id : value.is_array()  ? value
                          : value.is_null() ? nlohmann::ordered_json::array()
                                            : nlohmann::ordered_json::array({value})) {
        if (!id.is_number_integer() || id < 0 || id > INT_MAX)
            fail("%s: '%s' is %.200s; it must be a token id or a list of them", source.c_str(), key, value.dump().c_str());
        ids.push_back(id.get<int>());
    }
    return ids;
}

// The tokenizer of a model's directory; null if there is none that this program can read.
inline std::unique_ptr<Tokenizer> usable_tokenizer(const std::string& model_dir) {
    try {
        if (!tokenizer_file_in(model_dir).empty()) return std::make_unique<Tokenizer>(Tokenizer::load(model_dir));
    } catch (const Error&) {
    }
    return nullptr;
}

// True if a tokenizer equals the one in a model's directory, however its file is written.
inline bool is_tokenizer_of(const std::string& model_dir, const Tokenizer& given) {
    const std::string beside = tokenizer_file_in(model_dir);
    if (beside.empty()) return false;
    const bool whole = given.file_name() == std::string("tokenizer.json");  // a SentencePiece model may get tokens elsewhere
    if (whole && read_whole_file(beside) == read_whole_file(given.source())) return true;
    const auto own = usable_tokenizer(model_dir);
    return own && own->identity().hash == given.identity().hash;
}

// A model's token ids have the meaning of its own tokenizer. Rejects another tokenizer that gives one of them another text; it
// may have more tokens. If the model's tokenizer cannot be read, nothing is compared.
inline void check_tokenizer_of_model(const std::string& model_dir, const Tokenizer& given) {
    if (model_dir.empty() || is_tokenizer_of(model_dir, given)) return;
    const auto own = usable_tokenizer(model_dir);
    for (int id = 0; own && id < std::min(own->vocab_size(), given.vocab_size()); id++)
        if (own->token_bytes(id) != given.token_bytes(id))
            fail(
                "the tokenizer %s is not the model's (%s): token %d is '%s' in one and '%s' in the other; HINT: omit "
                "--tokenizer to use the model's own, and prepare the data with it",
                given.source().c_str(), model_dir.c_str(), id, given.token_bytes(id).c_str(), own->token_bytes(id).c_str());
}

// The texts for the model in `model_dir` (empty: a new one) with this tokenizer (null: none). The model's own files are kept
// unless the tokenizer differs from its own.
inline ModelTexts model_texts(const std::string& model_dir, const Tokenizer* tokenizer) {
    namespace fs = std::filesystem;
    ModelTexts t;
    const auto add = [&](const fs::path& dir, const char* name) {
        if (is_regular((dir / name).string())) t.files[name] = read_whole_file((dir / name).string());
    };
    const std::string file = tokenizer ? read_whole_file(tokenizer->source()) : "";
    const fs::path given = tokenizer ? tokenizer->source() : "";
    const bool own =
        !model_dir.empty() && (!tokenizer || tokenizer_file_in(model_dir).empty() || is_tokenizer_of(model_dir, *tokenizer));
    for (const char* name : tokenizer_files) {
        if (tokenizer && given.filename() == tokenizer->file_name()) add(given.parent_path(), name);
        if (own) add(model_dir, name);
    }
    if (tokenizer) {
        t.files.erase("tokenizer.json");  // read before any other, so it must be the right one
        t.files[tokenizer->file_name()] = file;
        t.has_tokenizer = true;
        if (tokenizer->bos_id() >= 0) t.bos_token = tokenizer->token_bytes(tokenizer->bos_id());
        if (tokenizer->eod_id() >= 0) t.eos_token = tokenizer->token_bytes(tokenizer->eod_id());
    }
    if (own) {
        const std::string config_file = model_dir + "/config.json";
        const auto config = nlohmann::ordered_json(read_json(config_file));
        for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
            if (config.contains(key)) t.ids[key] = config[key];
        t.end_ids = token_ids(config, "eos_token_id", config_file);
        add(model_dir, "generation_config.json");
        if (const auto found = t.files.find("generation_config.json"); found != t.files.end()) {
            const std::string name = model_dir + "/" + found->first;
            const auto generation = nlohmann::ordered_json(parse_json(found->second, name));
            if (!generation.is_object()) fail("%s does not hold a JSON object", name.c_str());
            for (int id : token_ids(generation, "eos_token_id", name)) t.end_ids.push_back(id);
        }
    } else {
        const auto id = [](int i) { return i >= 0 ? nlohmann::ordered_json(i) : nlohmann::ordered_json(nullptr); };
        t.ids = {{"bos_token_id", id(tokenizer ? tokenizer->bos_id() : -1)},
                 {"eos_token_id", id(tokenizer ? tokenizer->eod_id() : -1)}};
    }
    if (t.end_ids.empty() && tokenizer && tokenizer->eod_id() >= 0) t.end_ids = {tokenizer->eod_id()};
    return t;
}

// The token that ends an answer in this Jinja template; -1: none, or no token.
inline int turn_end_of(const Tokenizer& tokenizer, const std::string& jinja) {
    if (jinja.empty()) return -1;
    try {
        return ChatEncoder(tokenizer, {"", "", {}, jinja}).end_token();
    } catch (const Error&) {
        return -1;
    }
}

// Gives a model trained on conversations their chat template if it has none, so that it can be used for chat. recorded: the
// template of each dataset; empty: running text. tells: warns of different ones.
inline void take_chat_template(ModelTexts& t, const Tokenizer& tokenizer, const Strings& recorded, bool tells) {
    std::string of_model = jinja_template_in(t.files);
    for (const std::string& name : recorded) {
        const std::string learned = jinja_of_recorded(name);
        if (learned.empty()) continue;
        if (of_model.empty()) {
            t.files[jinja_file] = of_model = learned;
            t.turn_end = turn_end_of(tokenizer, learned);
        } else if (tells && !render_alike(of_model, learned)) {
            const bool known = chat_template_called(name);
            print_line(stderr, format("warning: conversations use the template %s, but the model has another one%s",
                                      label_of_recorded(name).c_str(),
                                      known ? ("; HINT: pass --chat-template " + name + " to `generate --chat`").c_str() : ""));
            return;
        }
    }
}

// The texts of a model with the adapters in a directory (empty: none), whose template takes precedence.
inline ModelTexts adapted_texts(const std::string& model_dir, const Tokenizer* tokenizer, const std::string& adapter) {
    ModelTexts t = model_texts(model_dir, tokenizer);
    const std::string learned = adapter.empty() ? "" : jinja_template_of(adapter);
    if (learned.empty() || learned == jinja_template_in(t.files)) return t;
    t.files[jinja_file] = learned;
    if (tokenizer) t.turn_end = turn_end_of(*tokenizer, learned);
    if (t.turn_end >= 0) t.end_ids.push_back(t.turn_end);
    return t;
}

// All files of a model directory except the weights, by name. For adapters, their own files replace the model's
// (adapter_files.h).
inline std::map<std::string, std::string> files_of_texts(const ModelConfig& c, const ModelTexts& t) {
    using json = nlohmann::ordered_json;
    auto files = t.files;
    const auto set_json = [&](const char* name, const json& j) { files[name] = j.dump(2) + "\n"; };
    if (!c.adapted()) set_json("config.json", to_hf_config(c, t.dtype, t.ids));
    const auto id = [&](const char* key) { return t.ids.value(key, json()); };
    json generation = {{"do_sample", true}};
    if (!t.files.count("generation_config.json")) {
        for (const char* key : {"bos_token_id", "eos_token_id"})
            if (!id(key).is_null()) generation[key] = id(key);
        if (!t.end_ids.empty())
            generation["pad_token_id"] = id("pad_token_id").is_null() ? json(t.end_ids[0]) : id("pad_token_id");
    } else if (t.turn_end >= 0) generation = json::parse(t.files.at("generation_config.json"));
    if (t.turn_end >= 0) {
        std::vector<int> ends = t.end_ids;
        if (std::find(ends.begin(), ends.end(), t.turn_end) == ends.end()) ends.push_back(t.turn_end);
        generation["eos_token_id"] = ends.size() == 1 ? json(ends[0]) : json(ends);
    }
    if (!c.adapted() && (t.turn_end >= 0 || !t.files.count("generation_config.json")))
        set_json("generation_config.json", generation);
    if (t.has_tokenizer && !t.files.count("tokenizer_config.json")) {
        // Without model_input_names, transformers 4 passes token_type_ids to the model, which GPT-2 adds to the embeddings.
        json settings = {{"tokenizer_class", t.files.count("tokenizer.json") ? "PreTrainedTokenizerFast" : "LlamaTokenizer"},
                         {"model_max_length", c.T},
                         {"model_input_names", {"input_ids", "attention_mask"}},
                         {"clean_up_tokenization_spaces", false}};
        if (!t.bos_token.empty()) settings["bos_token"] = t.bos_token;
        if (!t.eos_token.empty()) settings["eos_token"] = t.eos_token;
        set_json("tokenizer_config.json", settings);
    }
    return files;
}
// Writes them into `dir`, which exists, each once: the disk is compared with it.
inline void write_model_texts(const std::string& dir, const ModelConfig& c, const ModelTexts& t, WrittenFiles& written) {
    for (const auto& [name, text] : files_of_texts(c, t)) written.write(dir + "/" + name, text);
}

// The tokenizer of a model's directory with this vocabulary; null if there is none that can be used. Tokenized data needs none,
// so unless it is `needed`, a tokenizer that this program cannot read is ignored, with a warning if `says`.
inline std::unique_ptr<Tokenizer> tokenizer_of_model(const std::string& dir, int vocabulary, bool needed, bool says) {
    if (tokenizer_file_in(dir).empty()) {
        if (needed) fail("%s has no tokenizer.json or tokenizer.model; HINT: --model DIR of a model with one", dir.c_str());
        return nullptr;
    }
    std::unique_ptr<Tokenizer> tokenizer;
    try {
        tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(dir));
    } catch (const Error& e) {
        if (needed) throw;
        if (says)
            print_line(stderr,
                       format("warning: the model's tokenizer cannot be used: %s. Tokenized data needs none, but samples "
                              "cannot be shown as text",
                              e.what()));
        return nullptr;
    }
    tokenizer->fit(vocabulary, says);
    if (says) tokenizer->warn_of_missing_end();
    return tokenizer;
}

// The tokens to start from: the prompt's, or the end-of-document token, which precedes a new document. option: the option that
// has the prompt.
inline std::vector<int> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt, int capacity,
                                      const char* option = "--prompt") {
    std::vector<int> tokens = tokenizer.encode_prompt(prompt);
    if (tokens.empty() && tokenizer.eod_id() >= 0) tokens.push_back(tokenizer.eod_id());
    if (tokens.empty())
        fail("the prompt is empty and the tokenizer has no end-of-document token to start from; HINT: give %s", option);
    if ((int)tokens.size() > capacity)
        fail("the prompt has %zu tokens, the model's context holds %d; HINT: give a shorter %s", tokens.size(), capacity,
             option);
    return tokens;
}
