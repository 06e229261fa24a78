// Which tokenizer it is. Token ids mean nothing without their tokenizer, and another one's often fit the same model: training
// would run, and learn nonsense. So a data set says which one made it, in PREFIX.meta.json beside PREFIX.bin and PREFIX.idx
// (the pair stays Megatron's, and data without that file can be read as before), and whoever reads it compares.
//
// Tokenizers are the same if they encode every text alike: the hash is of the vocabulary, the merges in their order, the steps
// before them and the added tokens, however a tokenizer.json writes them down. It is FNV-1a of 64 bits: against mistakes, not
// against people.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"

struct TokenizerIdentity {
    std::string hash;  // empty: it is not known which
    std::string path;
    int vocab_size = 0;

    bool known() const { return !hash.empty(); }
    std::string text() const { return format("%s (%d tokens, hash %s)", path.c_str(), vocab_size, hash.c_str()); }
};

// Of a tokenizer.json that was found valid.
inline std::string tokenizer_hash(const nlohmann::json& file) {
    using nlohmann::json;
    uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](const json& part) {
        for (const unsigned char byte : part.dump() + "\n") hash = (hash ^ byte) * 0x100000001b3;
    };
    const auto field = [](const json& of, const char* key, const json& otherwise) {
        return of.contains(key) && !of[key].is_null() ? of[key] : otherwise;
    };
    const json& model = file.at("model");
    add(model.at("vocab"));
    for (const json& merge : model.at("merges"))  // "a b" or ["a", "b"]
        add(merge.is_string() ? merge : json(merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>()));
    add(field(model, "ignore_merges", false));

    std::map<int64_t, json> added;  // by id
    for (const json& token : field(file, "added_tokens", json::array())) {
        json& t = added[token.at("id").get<int64_t>()];
        t["content"] = token.at("content");
        for (const char* flag : {"special", "single_word", "lstrip", "rstrip"}) t[flag] = field(token, flag, false);
    }
    for (const auto& [id, token] : added) add(id), add(token);

    // Steps before the merges. Sequences are written out, as are values that a file may leave to the library.
    const std::function<void(const json&, const char*)> add_steps = [&](json step, const char* parts) {
        const std::string type = step.is_object() ? step.value("type", "") : "";
        if (type == "Sequence")
            for (const json& part : step.at(parts)) add_steps(part, parts);
        if (type.empty() || type == "Sequence") return;
        step.erase("trim_offsets");  // of places in the text, not of tokens
        if (type == "ByteLevel") step.emplace("use_regex", true);
        if (type == "Split") step.emplace("invert", false);
        if (type == "Digits") step.emplace("individual_digits", false);
        add(step);
    };
    add_steps(field(file, "normalizer", {}), "normalizers");
    add_steps(field(file, "pre_tokenizer", {}), "pretokenizers");
    return format("%016llx", (unsigned long long)hash);
}

// ---- the file beside a data set --------------------------------------------------------------------------------------------
struct DataOrigin {
    TokenizerIdentity tokenizer;
    int64_t documents = 0, tokens = 0;
};

inline const char* const origin_ending = ".meta.json";

inline std::string origin_text(const DataOrigin& o) {
    const nlohmann::ordered_json j = {
        {"made_by", "train_gpt prepare"},
        {"documents", o.documents},
        {"tokens", o.tokens},
        {"tokenizer", {{"path", o.tokenizer.path}, {"vocab_size", o.tokenizer.vocab_size}, {"hash", o.tokenizer.hash}}}};
    return json_text(j, 1) + "\n";
}

// Whose file it is: for reading, and before it is written over.
inline DataOrigin read_origin(const std::string& path) {
    const nlohmann::json j = parse_json(read_whole_file(path), path);
    try {
        const nlohmann::json& t = j.at("tokenizer");
        DataOrigin o{{t.at("hash"), t.at("path"), t.at("vocab_size")}, j.at("documents"), j.at("tokens")};
        if (o.tokenizer.known()) return o;
    } catch (const nlohmann::json::exception&) {
    }
    fail("%s is not what train_gpt prepare writes beside its data; HINT: move it, or choose another --output-prefix",
         path.c_str());
}
