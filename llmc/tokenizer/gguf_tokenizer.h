// Tokenizers in llama.cpp's GGUF form, converted from Hugging Face's files and back:
//   gpt2    byte-level BPE: tokens in GPT-2's characters, merges, and llama.cpp's name of the pre-tokenizer
//   llama   character BPE like SentencePiece's: of neighbors that together are a token, the pair with the highest
//           score is merged first. tokenizer.json has merges instead, whose order gives the scores
//   t5      unigram models: scores are logarithms of probabilities
// A tokenizer that llama.cpp would apply differently is refused by name, except for two things that its own converter leaves
// out too: the normalization of text (NFC of Qwen), and the byte fallback of unigram models.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/text.h"
#include "../model/gguf.h"
#include "chat_template.h"
#include "sentencepiece_model.h"
#include "tokenizer.h"

struct GgufTokenizer {
    using Kind = SentencePieceModel::Kind;  // of tokens; GGUF has SentencePiece's numbers
    std::string model;                      // empty: no tokenizer
    std::string pre;                        // gpt2: the pre-tokenizer
    std::vector<std::string> tokens, merges;
    std::vector<float> scores;
    std::vector<int32_t> kinds;
    int bos = -1, eos = -1, unknown = -1, pad = -1;
    int eot = -1, eom = -1;                          // end a turn, a message
    bool add_bos = false, add_eos = false;           // around a prompt
    bool space_prefix = true, drops_spaces = false;  // llama and t5: a space before the text; runs of spaces become one
    std::vector<uint8_t> charsmap;                   // t5: SentencePiece's table of replacements
    std::string chat_template;
};

namespace detail {

// llama.cpp's pre-tokenizers: regular expressions, applied in turn. Among equal rows the first name is written.
struct GgufPreTokenizer {
    const char* name;
    std::vector<std::string> patterns;
    bool whole_tokens = false;  // a word that is a token is not split (ignore_merges)
    bool nfc = false;           // the models that use it normalize text, which llama.cpp does not
    bool adds_bos = false;      // also without add_bos_token in the file
};
inline const std::vector<GgufPreTokenizer>& gguf_pre_tokenizers() {
    static const std::string gpt2 = pretokenizer_pattern("gpt2"), llama3 = pretokenizer_pattern("llama3"), digit = "\\p{N}";
    static const std::vector<GgufPreTokenizer> rows = {
        {"gpt-2", {gpt2}},
        {"olmo", {gpt2}, false, true},
        {"mpt", {gpt2}},
        {"phi-2", {gpt2}},
        {"llama-bpe", {llama3}, true, false, true},
        {"llama3", {llama3}, true, false, true},
        {"llama-v3", {llama3}, true, false, true},
        {"dbrx", {llama3}},
        {"smaug-bpe", {llama3}},
        {"qwen2", {qwen2_pattern}, false, true},
        {"stablelm2", {qwen2_pattern}},
        {"deepseek-r1-qwen", {qwen2_pattern}, false, true},
        {"bloom", {bloom_pattern_in_files}},
        {"smollm", {digit, gpt2}},
        {"starcoder", {digit, gpt2}},
        {"refact", {digit, gpt2}},
        {"command-r", {digit, gpt2}},
        {"exaone", {digit, gpt2}},
        {"falcon", {"[\\p{P}$+<=>^`|~]+", gpt2, "\\p{N}+", "[0-9][0-9][0-9]"}},  // llama.cpp lacks the third
    };
    return rows;
}

inline const GgufPreTokenizer& gguf_pre_tokenizer(const GgufTokenizer& t) {
    static const GgufPreTokenizer none = {"", {}};
    if (t.model != "gpt2") return none;
    for (const GgufPreTokenizer& row : gguf_pre_tokenizers())
        if (row.name == t.pre) return row;
    fail("its pre-tokenizer, called '%s' in llama.cpp, is not supported; supported are %s", t.pre.c_str(),
         joined(gguf_pre_tokenizers(), [](const GgufPreTokenizer& row) { return row.name; }).c_str());
}

// The regular expressions of a tokenizer.json whose last step is ByteLevel.
inline void collect_patterns(const nlohmann::json& step, std::vector<std::string>& patterns) {
    const std::string type = step.value("type", "");
    if (type == "Sequence") {
        for (const auto& part : step.at("pretokenizers")) collect_patterns(part, patterns);
    } else if (type == "ByteLevel") {
        if (step.value("use_regex", true)) patterns.push_back(pretokenizer_pattern("gpt2"));
    } else if (type == "Digits") {
        patterns.emplace_back(step.value("individual_digits", false) ? "\\p{N}" : "\\p{N}+");
    } else if (type == "Punctuation" && step.value("behavior", "") == "Contiguous") {
        patterns.emplace_back("[\\p{P}$+<=>^`|~]+");
    } else if (type == "Split" && step.at("pattern").contains("Regex") && step.value("behavior", "") == "Isolated" &&
               !step.value("invert", false)) {
        patterns.push_back(step["pattern"]["Regex"].get<std::string>());
    } else {
        fail("llama.cpp does not know its pre-tokenizer %.300s", step.dump().c_str());
    }
}

inline std::string gguf_pre_tokenizer_of(const nlohmann::json& file) {
    std::vector<std::string> patterns;
    collect_patterns(file.at("pre_tokenizer"), patterns);
    const nlohmann::json normalizer = file.value("normalizer", nlohmann::json());
    const std::string normal = normalizer.is_null() ? "" : normalizer.value("type", "");
    const bool empty = normal.empty() || (normal == "Sequence" && normalizer.at("normalizers").empty());
    if (!empty && normal != "NFC") fail("llama.cpp does not know its normalizer %.300s", normalizer.dump().c_str());
    const bool whole_tokens = file.at("model").value("ignore_merges", false);
    for (const GgufPreTokenizer& row : gguf_pre_tokenizers())
        if (row.patterns == patterns && row.whole_tokens == whole_tokens) return row.name;
    fail("llama.cpp does not know how it cuts text into words, %.300s; known are %s", file["pre_tokenizer"].dump().c_str(),
         joined(gguf_pre_tokenizers(), [](const GgufPreTokenizer& row) { return row.name; }).c_str());
}

// Scores that make llama.cpp merge like these merges: each token's is minus the number of tokens made before it.
inline std::vector<float> scores_of_merges(const nlohmann::json& merges, const std::unordered_map<std::string, int>& ids,
                                           const GgufTokenizer& t) {
    std::vector<float> scores(t.tokens.size(), 0.0f);
    std::vector<size_t> ways(t.tokens.size(), 0);
    float made = 0;
    std::string last;
    const auto refuse = [](const std::string& token) {
        fail(
            "the token '%s' does not follow SentencePiece's rules, the only ones that llama.cpp supports for character "
            "tokenizers",
            token.c_str());
    };
    for (const auto& entry : merges) {
        std::string both;
        if (entry.is_array()) both = entry.at(0).get<std::string>() + entry.at(1).get<std::string>();
        else {
            both = entry.get<std::string>();
            both.erase(both.find(' ', 1), 1);
        }
        const auto id = ids.find(both);
        if (id == ids.end()) refuse(both);
        if (both != last) {
            if (ways[(size_t)id->second] > 0) refuse(both);
            scores[(size_t)id->second] = -++made;
        }
        ways[(size_t)id->second]++;
        last = both;
    }
    for (size_t i = 0; i < t.tokens.size(); i++) {
        if (t.kinds[i] != GgufTokenizer::Kind::normal) continue;
        const std::string& token = t.tokens[i];
        size_t possible = 0;
        for (size_t at = 1; at < token.size(); at++) possible += ids.count(token.substr(0, at)) && ids.count(token.substr(at));
        if (possible != ways[i]) refuse(token);
    }
    return scores;
}

inline void read_pieces(GgufTokenizer& t, const std::string& file) {
    const SentencePieceModel m = read_sentencepiece_model(MappedFile(file).text(), file);
    t.model = m.type == SentencePieceModel::unigram ? "t5" : "llama";
    for (const SentencePieceModel::Piece& piece : m.pieces) {
        if (piece.kind == SentencePieceModel::unknown) t.unknown = (int)t.tokens.size();
        t.tokens.push_back(piece.text);
        t.scores.push_back(piece.score);
        t.kinds.push_back(piece.kind);
    }
    if (t.model == "t5") t.charsmap.assign(m.charsmap.begin(), m.charsmap.end());
}

inline void place_token(GgufTokenizer& t, size_t id, const std::string& text, int32_t kind, float score) {
    if (id >= t.tokens.size()) {
        t.tokens.resize(id + 1);
        t.kinds.resize(id + 1, GgufTokenizer::Kind::unused);
        t.scores.resize(id + 1, 0.0f);
    }
    t.tokens[id] = text;
    t.kinds[id] = kind;
    t.scores[id] = score;
}

// The tokenizer.json is known to be valid.
inline void read_vocabulary(GgufTokenizer& t, const nlohmann::json& file, bool of_bytes) {
    using Kind = GgufTokenizer::Kind;
    const nlohmann::json& model = file.at("model");
    const auto kind_of = [&](const std::string& token) {
        return !of_bytes && byte_of_token(token) >= 0 ? Kind::byte : Kind::normal;
    };
    if (model.value("type", "") == "Unigram") {
        t.model = "t5";
        for (const auto& entry : model.at("vocab")) {
            const auto text = entry.at(0).get<std::string>();
            place_token(t, t.tokens.size(), text, kind_of(text), entry.at(1).get<float>());
        }
        if (const auto unknown = model.value("unk_id", nlohmann::json()); unknown.is_number()) t.unknown = unknown.get<int>();
        return;
    }
    t.model = of_bytes ? "gpt2" : "llama";
    std::unordered_map<std::string, int> ids;
    for (const auto& [text, id] : model.at("vocab").items()) {
        place_token(t, id.get<size_t>(), text, kind_of(text), 0);
        ids[text] = id.get<int>();
    }
    const auto unknown = model.value("unk_token", nlohmann::json());
    if (unknown.is_string() && ids.count(unknown.get<std::string>())) t.unknown = ids.at(unknown.get<std::string>());
    if (!of_bytes) {
        t.scores = scores_of_merges(model.at("merges"), ids, t);
        return;
    }
    t.pre = gguf_pre_tokenizer_of(file);
    for (const auto& merge : model.at("merges"))
        t.merges.push_back(merge.is_string() ? merge.get<std::string>()
                                             : merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>());
}

}  // namespace detail

// The tokenizer in the directory of a model with this vocabulary; its `model` is empty if there is none.
inline GgufTokenizer read_hf_tokenizer(const std::string& dir, int vocabulary) {
    using Kind = GgufTokenizer::Kind;
    GgufTokenizer t;
    const std::string file = tokenizer_file_in(dir), pieces = dir + "/tokenizer.model",
                      settings_file = dir + "/tokenizer_config.json";
    if (file.empty()) return t;
    Tokenizer tokenizer = Tokenizer::load(dir);  // fails if it is damaged
    tokenizer.fit(vocabulary, true);
    try {
        const nlohmann::json j = file == pieces ? nlohmann::json::object() : parse_json(read_whole_file(file), file);
        if (!tokenizer.of_bytes() && file_exists(pieces)) detail::read_pieces(t, pieces);
        else detail::read_vocabulary(t, j, tokenizer.of_bytes());
        for (const auto& added : j.value("added_tokens", nlohmann::json::array())) {
            const bool special = added.value("special", false);
            detail::place_token(t, added.at("id").get<size_t>(), added.at("content").get<std::string>(),
                                special ? Kind::control : Kind::user_defined, 0);
        }
        for (int id = (int)t.tokens.size(); id < tokenizer.vocab_size(); id++)  // added next to a SentencePiece model
            detail::place_token(t, (size_t)id, tokenizer.token_bytes(id),
                                tokenizer.is_special(id) ? Kind::control : Kind::user_defined, 0);
        if (t.unknown >= 0 && t.model != "gpt2") t.kinds[(size_t)t.unknown] = Kind::unknown;
        t.tokens.resize(std::min(t.tokens.size(), (size_t)vocabulary));  // drop tokens that the model lacks
        t.kinds.resize(t.tokens.size());
        t.scores.resize(t.tokens.size());
        for (int id = (int)t.tokens.size(); id < vocabulary; id++)
            detail::place_token(t, (size_t)id, format("[PAD%d]", id), Kind::unused, 0);
        if (t.model == "gpt2") {
            t.scores.clear();
        } else {
            const auto tokens = tokenizer.encode("a");
            t.space_prefix = !tokens.empty() && t.tokens[(size_t)tokens[0]].compare(0, space_symbol.size(), space_symbol) == 0;
            t.drops_spaces = tokenizer.encode("a  a") == tokenizer.encode("a a");
        }
        t.bos = tokenizer.bos_id();
        t.eos = tokenizer.eod_id();
        const auto around = [&](const std::vector<int>& tokens, int id) {
            if (!tokens.empty() && tokens != std::vector<int>{id})
                fail("it adds more to a text than a start and an end token, which llama.cpp does not support");
            return !tokens.empty();
        };
        t.add_bos = around(tokenizer.template_before(), t.bos);
        t.add_eos = around(tokenizer.template_after(), t.eos);
        const bool has_settings = file_exists(settings_file);
        const nlohmann::json settings =
            has_settings ? parse_json(read_whole_file(settings_file), settings_file) : nlohmann::json::object();
        nlohmann::json padding = settings.value("pad_token", nlohmann::json());
        if (padding.is_object()) padding = padding.value("content", nlohmann::json());
        if (padding.is_string()) t.pad = tokenizer.token_to_id(padding.get<std::string>());
        t.chat_template = jinja_template_of(dir);
    } catch (const Error& e) {
        fail("%s: %s; HINT: --weights-only omits the tokenizer", file.c_str(), e.what());
    }
    return t;
}

inline void add_tokenizer(GgufHeader& header, const GgufTokenizer& t) {
    const auto key = [](const char* name) { return std::string("tokenizer.ggml.") + name; };
    const auto id = [&](const char* name, int token) {
        if (token >= 0) header.add(key(name), token);
    };
    header.add(key("model"), t.model.empty() ? "none" : t.model);
    if (t.model.empty()) return;
    header.add(key("pre"), t.model == "gpt2" ? t.pre : "default");
    header.add(key("tokens"), t.tokens);
    header.add(key("scores"), t.scores);
    header.add(key("token_type"), t.kinds);
    header.add(key("merges"), t.merges);
    id("bos_token_id", t.bos);
    id("eos_token_id", t.eos);
    id("eot_token_id", t.eot);
    id("eom_token_id", t.eom);
    id("unknown_token_id", t.unknown);
    id("padding_token_id", t.pad);
    header.add(key("add_bos_token"), t.add_bos);
    header.add(key("add_eos_token"), t.add_eos);
    if (t.model != "gpt2") {
        header.add(key("add_space_prefix"), t.space_prefix);
        header.add(key("remove_extra_whitespaces"), t.drops_spaces);
    }
    header.add(key("precompiled_charsmap"), t.charsmap);
    if (!t.chat_template.empty()) header.add("tokenizer.chat_template", t.chat_template);
}

// ---- from GGUF -------------------------------------------------------------------------------------------------------------
inline GgufTokenizer read_gguf_tokenizer(const nlohmann::json& metadata, const std::string& source) {
    using Kind = GgufTokenizer::Kind;
    GgufTokenizer t;
    const auto of = [&](const char* name) { return metadata.value(std::string("tokenizer.ggml.") + name, nlohmann::json()); };
    const auto id = [&](const char* name) {
        const nlohmann::json value = of(name);
        return value.is_number_integer() && value >= 0 && value < t.tokens.size() ? value.get<int>() : -1;
    };
    try {
        t.model = of("model").is_null() ? "none" : of("model").get<std::string>();
        if (t.model == "none" || t.model == "no_vocab") return {};
        if (t.model != "gpt2" && t.model != "llama" && t.model != "t5")
            fail("its tokenizer has the unsupported kind '%s'; supported are gpt2, llama and t5", t.model.c_str());
        t.pre = of("pre").is_null() ? "" : of("pre").get<std::string>();
        t.tokens = of("tokens").get<std::vector<std::string>>();
        const nlohmann::json kinds = of("token_type"), scores = of("scores"), merges = of("merges");
        t.kinds = kinds.is_null() ? std::vector<int32_t>(t.tokens.size(), Kind::normal) : kinds.get<std::vector<int32_t>>();
        if (!scores.is_null()) t.scores = scores.get<std::vector<float>>();
        if (!merges.is_null()) t.merges = merges.get<std::vector<std::string>>();
        if (const auto map = of("precompiled_charsmap"); !map.is_null())
            for (const auto& byte : map) t.charsmap.push_back((uint8_t)byte.get<int>());
        if (t.kinds.size() != t.tokens.size() || (t.model != "gpt2" && t.scores.size() != t.tokens.size()))
            fail("it has %zu tokens, %zu types and %zu scores", t.tokens.size(), t.kinds.size(), t.scores.size());
        // Placeholders at the end pad to the model's vocabulary.
        while (!t.tokens.empty() && t.kinds.back() == Kind::unused && t.tokens.back().compare(0, 4, "[PAD") == 0) {
            t.tokens.pop_back();
            t.kinds.pop_back();
            if (!t.scores.empty()) t.scores.pop_back();
        }
        t.bos = id("bos_token_id");
        t.eos = id("eos_token_id");
        t.eot = id("eot_token_id");
        t.eom = id("eom_token_id");
        t.unknown = id("unknown_token_id");
        t.pad = id("padding_token_id");
        const auto flag = [&](const char* name, bool otherwise) {
            return of(name).is_null() ? otherwise : of(name).get<bool>();
        };
        t.add_bos = flag("add_bos_token", t.model == "llama" || detail::gguf_pre_tokenizer(t).adds_bos);
        t.add_eos = flag("add_eos_token", t.model == "t5");
        t.space_prefix = flag("add_space_prefix", true);
        t.drops_spaces = flag("remove_extra_whitespaces", false);
        t.chat_template = metadata.value("tokenizer.chat_template", "");
    } catch (const nlohmann::json::exception& e) {
        fail("%s: its tokenizer is damaged: %s", source.c_str(), json_problem(e).c_str());
    } catch (const Error& e) {
        fail("%s: %s; HINT: --weights-only omits the tokenizer", source.c_str(), e.what());
    }
    return t;
}

namespace detail {

inline nlohmann::ordered_json tokenizer_json_of(const GgufTokenizer& t) {
    using json = nlohmann::ordered_json;
    const GgufPreTokenizer& pre = gguf_pre_tokenizer(t);
    nlohmann::json vocabulary = nlohmann::json::object();
    json added = json::array(), steps = json::array();
    for (size_t id = 0; id < t.tokens.size(); id++) {
        vocabulary[t.tokens[id]] = id;
        const int32_t kind = t.kinds[id];
        if (kind != GgufTokenizer::Kind::control && kind != GgufTokenizer::Kind::user_defined) continue;
        added.push_back({{"id", id},
                         {"content", t.tokens[id]},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", false},
                         {"special", kind == GgufTokenizer::Kind::control}});
    }
    const bool words_of_gpt2 = pre.patterns.back() == pretokenizer_pattern("gpt2");
    for (size_t i = 0; i + words_of_gpt2 < pre.patterns.size(); i++)
        steps.push_back(
            {{"type", "Split"}, {"pattern", {{"Regex", pre.patterns[i]}}}, {"behavior", "Isolated"}, {"invert", false}});
    steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", words_of_gpt2}});
    json around = nullptr;
    if (t.add_bos || t.add_eos) {
        json single = json::array(), names = json::object();
        const auto token = [&](bool adds, int id) {
            if (!adds || id < 0) return;
            const std::string& name = t.tokens[(size_t)id];
            single.push_back({{"SpecialToken", {{"id", name}, {"type_id", 0}}}});
            names[name] = {{"id", name}, {"ids", {id}}, {"tokens", {name}}};
        };
        token(t.add_bos, t.bos);
        single.push_back({{"Sequence", {{"id", "A"}, {"type_id", 0}}}});
        token(t.add_eos, t.eos);
        json pair = single;
        pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
        around = {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", names}};
    }
    return {{"version", "1.0"},
            {"truncation", nullptr},
            {"padding", nullptr},
            {"added_tokens", added},
            {"normalizer", pre.nfc ? json{{"type", "NFC"}} : json(nullptr)},
            {"pre_tokenizer", steps.size() == 1 ? steps[0] : json{{"type", "Sequence"}, {"pretokenizers", steps}}},
            {"post_processor", around},
            {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}}},
            {"model",
             {{"type", "BPE"},
              {"dropout", nullptr},
              {"unk_token", t.unknown >= 0 ? json(t.tokens[(size_t)t.unknown]) : json(nullptr)},
              {"continuing_subword_prefix", nullptr},
              {"end_of_word_suffix", nullptr},
              {"fuse_unk", false},
              {"byte_fallback", false},
              {"ignore_merges", pre.whole_tokens},
              {"vocab", vocabulary},
              {"merges", t.merges}}}};
}

// The bytes of a SentencePiece model (sentencepiece_model.proto).
inline std::string sentencepiece_of(const GgufTokenizer& t) {
    const auto variable = [](std::string& to, uint64_t n) {
        for (; n > 127; n >>= 7) to += (char)(n | 128);
        to += (char)n;
    };
    const auto number = [&](std::string& to, int field, uint64_t n) {
        variable(to, (uint64_t)field << 3);
        variable(to, n);
    };
    const auto text = [&](std::string& to, int field, std::string_view bytes) {
        variable(to, (uint64_t)field << 3 | 2);
        variable(to, bytes.size());
        to += bytes;
    };
    std::string file, trainer, normalizer;
    bool bytes = false;
    for (size_t id = 0; id < t.tokens.size(); id++) {
        const bool own = t.kinds[id] == GgufTokenizer::Kind::user_defined;
        std::string piece;
        text(piece, 1, own ? Normalizer::replaced(" ", t.tokens[id], std::string(space_symbol)) : t.tokens[id]);
        variable(piece, 2 << 3 | 5);
        piece.append((const char*)&t.scores[id], 4);
        number(piece, 3, (uint64_t)(uint32_t)t.kinds[id]);
        text(file, 1, piece);
        bytes |= t.kinds[id] == GgufTokenizer::Kind::byte;
    }
    number(trainer, 3, t.model == "t5" ? SentencePieceModel::unigram : SentencePieceModel::bpe);
    number(trainer, 35, bytes);
    struct Role {
        int id, number_field, text_field;
    };
    for (const auto& [id, number_field, text_field] :
         {Role{t.unknown, 40, 45}, {t.bos, 41, 46}, {t.eos, 42, 47}, {t.pad, 43, 48}}) {
        number(trainer, number_field, (uint64_t)(int64_t)id);
        if (id >= 0) text(trainer, text_field, t.tokens[(size_t)id]);
    }
    text(file, 2, trainer);
    text(normalizer, 1, t.charsmap.empty() ? "identity" : "precompiled");
    text(normalizer, 2, std::string_view((const char*)t.charsmap.data(), t.charsmap.size()));
    number(normalizer, 3, t.space_prefix);
    number(normalizer, 4, t.drops_spaces);
    number(normalizer, 5, 1);
    text(file, 3, normalizer);
    return file;
}

}  // namespace detail

// The files of the tokenizer in a model's directory: names and contents.
inline std::map<std::string, std::string> hf_tokenizer_files(const GgufTokenizer& t, int longest) {
    std::map<std::string, std::string> files;
    if (t.model.empty()) return files;
    nlohmann::ordered_json settings = {{"tokenizer_class", t.model == "gpt2" ? "PreTrainedTokenizerFast" : "LlamaTokenizer"},
                                       {"model_max_length", longest},
                                       {"model_input_names", {"input_ids", "attention_mask"}},
                                       {"clean_up_tokenization_spaces", false},
                                       {"add_bos_token", t.add_bos},
                                       {"add_eos_token", t.add_eos}};
    struct Role {
        const char* name;
        int id;
    };
    for (const auto& [name, id] :
         {Role{"bos_token", t.bos}, {"eos_token", t.eos}, {"unk_token", t.unknown}, {"pad_token", t.pad}})
        if (id >= 0) settings[name] = t.tokens[(size_t)id];
    if (!t.chat_template.empty()) settings["chat_template"] = t.chat_template;
    files["tokenizer_config.json"] = json_text(settings, 2) + "\n";
    if (t.model == "gpt2") files["tokenizer.json"] = json_text(detail::tokenizer_json_of(t), 2) + "\n";
    else files["tokenizer.model"] = detail::sentencepiece_of(t);
    return files;
}
