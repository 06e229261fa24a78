// Identifies a tokenizer. Token ids mean nothing without their tokenizer, and another one's ids often fit the same model:
// training would run and learn nonsense. So a dataset records the tokenizer that made it, in PREFIX.meta.json next to
// PREFIX.bin and PREFIX.idx (which are as Megatron writes them; data without that file can still be read), and every reader
// compares.
//
// Tokenizers are the same if they encode every text alike: the hash covers the vocabulary, the merges in their order, the steps
// before them and the added tokens, independent of their spelling in tokenizer.json. It is FNV-1a with 64 bits, which protects
// against mistakes, not against attacks.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"

struct TokenizerIdentity {
    std::string hash;  // empty: not known
    std::string path;
    int vocab_size = 0;

    bool known() const { return !hash.empty(); }
    std::string text() const { return format("%s (%d tokens, hash %s)", path.c_str(), vocab_size, hash.c_str()); }
};

// The file of the tokenizer in a directory: Hugging Face's, else SentencePiece's; empty: there is none.
inline std::string tokenizer_file_in(const std::string& dir) {
    for (const char* name : {"tokenizer.json", "tokenizer.model"})
        if (file_exists(dir + "/" + name)) return dir + "/" + name;
    return "";
}

inline uint64_t add_to_hash(uint64_t hash, std::string_view bytes) {
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
    return hash;
}
inline constexpr uint64_t empty_hash = 0xcbf29ce484222325;
inline std::string hash_text(uint64_t hash) { return format("%016llx", (unsigned long long)hash); }

// The hash of a valid tokenizer.json. (For a SentencePiece model, the file is hashed.)
inline std::string tokenizer_hash(const nlohmann::json& file) {
    using nlohmann::json;
    uint64_t hash = empty_hash;
    const auto add = [&](const json& part) { hash = add_to_hash(hash, part.dump() + "\n"); };
    const auto field = [](const json& of, const char* key, const json& otherwise) {
        return of.contains(key) && !of[key].is_null() ? of[key] : otherwise;
    };
    const json& model = file.at("model");
    add(model.at("vocab"));
    for (const json& merge : field(model, "merges", json::array()))  // "a b" or ["a", "b"]
        add(merge.is_string() ? merge : json(merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>()));
    add(field(model, "ignore_merges", false));
    // Fields that tokenizers of bytes do not use.
    for (const char* key : {"byte_fallback", "unk_id"})
        if (const json value = field(model, key, false); value != false) add({key, value});

    std::map<int64_t, json> added;  // by id
    for (const json& token : field(file, "added_tokens", json::array())) {
        json& t = added[token.at("id").get<int64_t>()];
        t["content"] = token.at("content");
        for (const char* flag : {"special", "single_word", "lstrip", "rstrip"}) t[flag] = field(token, flag, false);
    }
    for (const auto& [id, token] : added) {
        add(id);
        add(token);
    }

    // Steps before the merges. Sequences are flattened, and values that a file may omit are filled in.
    const std::function<void(const json&, const char*)> add_steps = [&](json step, const char* parts) {
        const std::string type = step.is_object() ? step.value("type", "") : "";
        if (type == "Sequence")
            for (const json& part : step.at(parts)) add_steps(part, parts);
        if (type.empty() || type == "Sequence") return;
        step.erase("trim_offsets");  // affects offsets in the text, not tokens
        if (type == "ByteLevel") step.emplace("use_regex", true);
        if (type == "Split") step.emplace("invert", false);
        if (type == "Digits") step.emplace("individual_digits", false);
        if (type == "Metaspace") {  // old files have add_prefix_space
            step.emplace("prepend_scheme", step.value("add_prefix_space", true) ? "always" : "never");
            step.emplace("replacement", "\u2581");
            step.emplace("split", true);
            step.erase("add_prefix_space");
            step.erase("str_rep");  // the replacement again
        }
        add(step);
    };
    add_steps(field(file, "normalizer", {}), "normalizers");
    add_steps(field(file, "pre_tokenizer", {}), "pretokenizers");
    return hash_text(hash);
}

// ---- the file next to a data set -------------------------------------------------------------------------------------------
struct DataOrigin {
    TokenizerIdentity tokenizer;
    int64_t documents = 0, tokens = 0;
    std::string chat_template{};  // for conversations, which have a mask file (dataset.h); empty: text
    bool pairs = false;           // conversations are pairs of answers, the chosen one before the rejected one
};

// Endings of a data set's files, next to PREFIX.bin and PREFIX.idx (dataset.h).
inline const char* const origin_ending = ".meta.json";
inline const char* const mask_ending = ".mask";
// For a data set that `prepare --resume` is writing: its progress file, and the ending of its unfinished files.
inline const char* const resume_ending = ".resume.json";
inline const char* const partial_ending = ".partial";

inline std::string origin_text(const DataOrigin& o) {
    nlohmann::ordered_json j = {
        {"made_by", "train_gpt prepare"},
        {"documents", o.documents},
        {"tokens", o.tokens},
        {"tokenizer", {{"path", o.tokenizer.path}, {"vocab_size", o.tokenizer.vocab_size}, {"hash", o.tokenizer.hash}}}};
    if (!o.chat_template.empty()) j["chat_template"] = o.chat_template;
    if (o.pairs) j["pairs"] = true;
    return json_text(j, 1) + "\n";
}

// Reads the file; also used before overwriting it, to refuse files of other programs.
inline DataOrigin read_origin(const std::string& path) {
    const nlohmann::json j = parse_json(read_whole_file(path), path);
    try {
        const nlohmann::json& t = j.at("tokenizer");
        DataOrigin o{{t.at("hash"), t.at("path"), t.at("vocab_size")},
                     j.at("documents"),
                     j.at("tokens"),
                     j.value("chat_template", ""),
                     j.value("pairs", false)};
        if (o.tokenizer.known()) return o;
    } catch (const nlohmann::json::exception&) {
    }
    fail("%s was not written by train_gpt prepare; HINT: move it, or choose another --output-prefix", path.c_str());
}

// For a hint: the tokenizer that prepared the first of the data, else DIR.
inline std::string tokenizer_of_data(const Strings& data_path) {
    for (const std::string& prefix : data_path)
        if (const std::string origin = prefix + origin_ending; is_regular(origin)) try {
                return shell_word(read_origin(origin).tokenizer.path) + " (it prepared " + prefix + ")";
            } catch (const Error&) {  // damaged
            }
    return "DIR";
}
