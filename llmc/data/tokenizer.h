// Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) from Hugging Face's tokenizer.json: GPT-2, Llama-3 and BLOOM
// style. A file is encoded exactly as Hugging Face's library does, or refused with the name of the unsupported feature.
//
// Text becomes tokens in three steps.
//   1. Pre-tokenisation: a regular expression splits the text into pieces (a word with the space before it, a run of digits).
//      Merges never cross a piece, so " the" is learned once rather than together with every word that follows.
//   2. Each piece is its UTF-8 bytes; every byte value is a token, so there is no text without an encoding.
//   3. Merges: training learned an ordered list of pairs of tokens. Of the adjacent pairs in a piece, the one learned first is
//      merged, again and again, until none is left.
// tokenizer.json writes bytes as characters (GPT-2's table: printable bytes stand for themselves, the others for U+0100 and
// up), so that " the" reads "Ġthe". Only loading and saving use that table; everything else works on raw bytes. Bytes that are
// not valid UTF-8 are pieces of their own: encode() takes any bytes, and decode(encode(x)) == x (unless the file says
// otherwise: keeps_every_byte).
// Added tokens are found in the text before these steps. Special ones ("<|endoftext|>") control the model. In training data,
// text that spells a special token stays text: a web page must not end a document. In a prompt it becomes the token, and the
// tokens that the file's template puts around a text (Llama 3's "<|begin_of_text|>") are added, as in transformers.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/unicode.h"
#include "bpe.h"
#include "pre_tokenizer.h"
#include "tokenizer_identity.h"

// ---- bytes as characters ---------------------------------------------------------------------------------------------------
// The code point that stands for each byte in GPT-2's table.
inline const std::array<uint32_t, 256>& byte_characters() {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t{};
        uint32_t next = 256;
        for (uint32_t b = 0; b < 256; b++) {
            const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
            t[b] = printable ? b : next++;
        }
        return t;
    }();
    return table;
}

inline std::string bytes_to_characters(std::string_view bytes) {
    std::string s;
    for (unsigned char b : bytes) s += utf8(byte_characters()[b]);
    return s;
}

// Returns false if a character is not in the table.
inline bool characters_to_bytes(std::string_view characters, std::string& bytes) {
    static const std::unordered_map<std::string, char> inverse = [] {
        std::unordered_map<std::string, char> m;
        for (int b = 0; b < 256; b++) m[utf8(byte_characters()[b])] = (char)b;
        return m;
    }();
    bytes.clear();
    for (size_t i = 0; i < characters.size();) {
        const size_t n = (unsigned char)characters[i] < 0x80 ? 1 : 2;  // the table ends at U+0143
        const auto found = inverse.find(std::string(characters.substr(i, n)));
        if (found == inverse.end()) return false;
        bytes += found->second;
        i += n;
    }
    return true;
}

// ---- added tokens ----------------------------------------------------------------------------------------------------------
struct AddedToken {
    std::string content;
    int id;
    bool special, single_word, lstrip, rstrip;
};

// Finds tokens in text as Hugging Face's library does: the leftmost one, and of those that begin there the longest.
class AddedTokenFinder {
public:
    bool empty() const { return tokens_.empty(); }
    bool only_special() const { return only_special_; }

    void add(const AddedToken& token) {
        int node = 0;
        for (unsigned char byte : token.content) {
            const auto [edge, is_new] = edges_.emplace((uint64_t)node << 8 | byte, (int)token_at_.size());
            if (is_new) token_at_.push_back(-1);
            node = edge->second;
        }
        token_at_[(size_t)node] = (int)tokens_.size();
        first_[(unsigned char)token.content[0]] = true;
        only_special_ &= token.special;
        tokens_.push_back(token);
    }

    // Calls on_text(part) and on_token(token) for all of text in order. Special tokens count as text unless asked for.
    template <class Text, class Token>
    void split(std::string_view text, bool special, Text on_text, Token on_token) const {
        size_t done = 0;
        for (size_t i = 0; i < text.size();) {
            const AddedToken* t = first_[(unsigned char)text[i]] ? longest(text.substr(i)) : nullptr;
            if (!t) {
                i++;
                continue;
            }
            size_t begin = i, end = i += t->content.size();
            if (t->special && !special) continue;
            if (t->single_word && (ends_with_word(text.substr(0, begin)) || begins_with_word(text.substr(end)))) continue;
            if (t->lstrip) begin = begin <= done ? done : done + length_without_space(text.substr(done, begin - done));
            while (t->rstrip && white_space_at(text.substr(end))) end += white_space_at(text.substr(end));
            if (done < begin) on_text(text.substr(done, begin - done));
            if (begin < end) on_token(*t);
            done = end;
        }
        if (done < text.size()) on_text(text.substr(done));
    }

private:
    const AddedToken* longest(std::string_view text) const {
        const AddedToken* found = nullptr;
        int node = 0;
        for (unsigned char byte : text) {
            const auto edge = edges_.find((uint64_t)node << 8 | byte);
            if (edge == edges_.end()) break;
            node = edge->second;
            if (token_at_[(size_t)node] >= 0) found = &tokens_[(size_t)token_at_[(size_t)node]];
        }
        return found;
    }

    // Length in bytes of the Unicode white space that begins s; 0 if there is none.
    static size_t white_space_at(std::string_view s) {
        if (s.empty()) return 0;
        const Utf8Character c = first_character(s);
        return is_space(c.code) ? c.length : 0;
    }
    static size_t length_without_space(std::string_view s) {
        for (size_t n = 1; n <= 3 && n <= s.size();)
            if (white_space_at(s.substr(s.size() - n)) == n) {
                s.remove_suffix(n);
                n = 1;
            } else n++;
        return s.size();
    }

    // Words consist of letters, marks, decimal digits, connecting punctuation and joiners.
    static bool begins_with_word(std::string_view s) {
        static const std::shared_ptr<pcre2_code> word = [] {
            int error = 0;
            PCRE2_SIZE at = 0;
            const char* pattern = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]";
            return std::shared_ptr<pcre2_code>(
                pcre2_compile((PCRE2_SPTR)pattern, strlen(pattern), PCRE2_UTF | PCRE2_ANCHORED, &error, &at, nullptr),
                pcre2_code_free);
        }();
        const size_t n = s.empty() ? 0 : valid_utf8_length((const unsigned char*)s.data(), s.size());
        const std::shared_ptr<pcre2_match_data> data(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
        return n > 0 && pcre2_match(word.get(), (PCRE2_SPTR)s.data(), n, 0, 0, data.get(), nullptr) >= 0;
    }
    static bool ends_with_word(std::string_view s) {
        for (size_t n = 1; n <= 4 && n <= s.size(); n++)
            if (valid_utf8_length((const unsigned char*)s.data() + s.size() - n, n) == n)
                return begins_with_word(s.substr(s.size() - n));
        return false;
    }

    std::vector<AddedToken> tokens_;
    std::array<bool, 256> first_{};                        // bytes that begin a token
    std::unordered_map<uint64_t, int> edges_;              // a trie of the tokens' bytes: node and byte -> node
    std::vector<int> token_at_ = std::vector<int>(1, -1);  // node -> the token that ends there
    bool only_special_ = true;
};

// ---- the tokenizer ---------------------------------------------------------------------------------------------------------
class Tokenizer {
public:
    // path: a tokenizer.json or a directory that holds one.
    static Tokenizer load(const std::string& path) {
        const std::string file = std::filesystem::is_directory(path) ? path + "/tokenizer.json" : path;
        try {
            return Tokenizer(parse_json(MappedFile(file).text(), file), file);
        } catch (const nlohmann::json::exception& e) {
            fail("%s is not a valid tokenizer.json: %s", file.c_str(), e.what());
        }
    }

    int vocab_size() const { return (int)bytes_.size(); }
    int eod_id() const { return eod_; }  // end of document; -1: none
    int bos_id() const { return bos_; }
    const std::string& source() const { return source_; }
    TokenizerIdentity identity() const { return {hash_, std::filesystem::absolute(source_).string(), vocab_size()}; }
    // The raw bytes of a token; for an added token, its name. Models have more ids than their tokenizers where the vocabulary
    // was padded (BLOOM's by 200).
    std::string token_bytes(int id) const { return has_text(id) ? bytes_[(size_t)id] : format("<|id %d|>", id); }
    bool has_text(int id) const { return id >= 0 && id < vocab_size(); }
    bool is_special(int id) const { return !has_text(id) || special_[(size_t)id]; }
    // Whether decode(encode(x)) is x for every x.
    bool keeps_every_byte() const { return keeps_every_byte_; }
    int token_to_id(const std::string& name) const {
        const auto found = added_.find(name);
        return found == added_.end() ? -1 : found->second;
    }

    // Encodes training data.
    std::vector<int> encode(std::string_view text) const {
        std::vector<int> tokens;
        encode_append(text, tokens);
        return tokens;
    }
    void encode_append(std::string_view text, std::vector<int>& tokens, bool special = false) const {
        const auto encode_text = [&](std::string_view part) {
            pre_tokenizer_->split(part, [&](std::string_view piece) { bpe_.encode_append(piece, tokens); });
        };
        try {
            find_added(text, special, encode_text, [&](const AddedToken& t) { tokens.push_back(t.id); });
        } catch (const Error& e) {
            fail("%s: %s", source_.c_str(), e.what());
        }
    }
    // Encodes a prompt: special tokens are recognised, and the template's tokens are put around it.
    std::vector<int> encode_prompt(std::string_view text) const {
        std::vector<int> tokens = template_before_;
        encode_append(text, tokens, true);
        tokens.insert(tokens.end(), template_after_.begin(), template_after_.end());
        return tokens;
    }
    const std::vector<int>& template_before() const { return template_before_; }
    const std::vector<int>& template_after() const { return template_after_; }
    // The number of special tokens that the text spells.
    int64_t count_special(std::string_view text) const {
        int64_t count = 0;
        find_added(
            text, true, [](std::string_view) {}, [&](const AddedToken& t) { count += t.special; });
        return count;
    }

    std::string decode(const std::vector<int>& tokens) const {
        std::string text;
        for (int id : tokens)
            if (has_text(id)) text += bytes_[(size_t)id];
            else text += token_bytes(id);
        return text;
    }

    // Refuses a model whose vocabulary lacks ids of this tokenizer: it has no embeddings for them.
    void check_fits(int model_vocabulary) const {
        if (vocab_size() > model_vocabulary)
            fail(
                "%s has %d tokens, the model's vocabulary %d: it lacks the token %d, '%s'; HINT: the tokenizer must be the "
                "model's own",
                source_.c_str(), vocab_size(), model_vocabulary, model_vocabulary, token_bytes(model_vocabulary).c_str());
    }

private:
    // Tokens that are not to be normalised are found first, then the others in the text between. (No normaliser is supported,
    // but this is the library's order.)
    template <class Text, class Token>
    void find_added(std::string_view text, bool special, Text on_text, Token on_token) const {
        const auto looked_for = [&](const AddedTokenFinder& f) { return !f.empty() && (special || !f.only_special()); };
        const auto second = [&](std::string_view part) {
            if (looked_for(added_normalized_)) added_normalized_.split(part, special, on_text, on_token);
            else on_text(part);
        };
        if (looked_for(added_plain_)) added_plain_.split(text, special, second, on_token);
        else second(text);
    }

    // ---- loading ----
    Tokenizer(const nlohmann::json& j, const std::string& file) : source_(file) {
        const char* name = file.c_str();
        if (!j.is_object() || !j.contains("model")) fail("%s is not a tokenizer.json: it has no 'model'", name);
        const auto& model = j["model"];
        const std::string type = model.value("type", model.contains("merges") ? "BPE" : "");
        if (type != "BPE") fail("%s: model type '%s' is not supported; only byte-level BPE is", name, type.c_str());
        const auto given = [&](const char* key, const nlohmann::json& harmless) {
            return model.contains(key) && !model[key].is_null() && model[key] != harmless;
        };
        for (const auto& [key, harmless] : {std::pair<const char*, nlohmann::json>{"dropout", 0.0},
                                            {"continuing_subword_prefix", ""},
                                            {"end_of_word_suffix", ""},
                                            {"byte_fallback", false}})
            if (given(key, harmless))
                fail("%s: %s %s is not supported; only byte-level BPE without it is", name, key, model[key].dump().c_str());
        if (j.contains("normalizer") && !does_nothing(j["normalizer"], "normalizers"))
            fail("%s: normalizer '%s' is not supported; only none is", name, j["normalizer"].value("type", "?").c_str());
        bpe_.whole_tokens = given("ignore_merges", false);
        bpe_.fuse_unknown = given("fuse_unk", false);
        load_pre_tokenizer(j);
        load_vocabulary(j);
        load_merges(model.at("merges"));
        hash_ = tokenizer_hash(j);
        if (j.contains("post_processor")) load_template(j["post_processor"]);
        load_roles();
    }

    // Whether a step is absent or a sequence of steps that do nothing.
    static bool does_nothing(const nlohmann::json& step, const char* parts) {
        if (step.is_null()) return true;
        if (step.value("type", "") != "Sequence") return false;
        const auto& list = step.at(parts);
        return std::all_of(list.begin(), list.end(), [&](const auto& part) { return does_nothing(part, parts); });
    }

    [[noreturn]] void refuse(const std::string& what) const { fail("%s: %s is not supported", source_.c_str(), what.c_str()); }

    void load_pre_tokenizer(const nlohmann::json& j) {
        if (!j.contains("pre_tokenizer") || j["pre_tokenizer"].is_null()) refuse("a tokenizer without pre-tokenizer");
        std::vector<Splitter> steps;
        bool bytes = false;
        add_steps(j["pre_tokenizer"], steps, bytes);
        if (!bytes) refuse("a pre-tokenizer without ByteLevel");
        pre_tokenizer_ = std::make_shared<PreTokenizer>(steps);
    }

    void add_steps(const nlohmann::json& step, std::vector<Splitter>& steps, bool& bytes) {
        const std::string type = step.value("type", "");
        if (type == "Sequence") {
            for (const auto& part : step.at("pretokenizers")) add_steps(part, steps, bytes);
            return;
        }
        if (bytes) refuse("the pre-tokenizer '" + type + "' after ByteLevel");
        if (type == "Split") {
            const auto& p = step.at("pattern");
            const bool regex = p.contains("Regex"), invert = step.value("invert", false);
            const SplitBehavior behavior = split_behavior(step.value("behavior", ""));
            const std::string pattern = p.at(regex ? "Regex" : "String").get<std::string>();
            steps.emplace_back(regex ? pattern : literal_pattern(pattern), behavior, invert);
            keeps_every_byte_ &= behavior != SplitBehavior::removed;
        } else if (type == "Digits") {
            steps.emplace_back("\\p{N}",
                               step.value("individual_digits", false) ? SplitBehavior::isolated : SplitBehavior::contiguous);
        } else if (type == "ByteLevel") {
            if (step.value("add_prefix_space", true)) refuse("ByteLevel with add_prefix_space");
            if (step.value("use_regex", true)) steps.emplace_back(pretokenizer_pattern("gpt2"));
            bytes = true;
        } else {
            refuse("the pre-tokenizer '" + type + "'");
        }
    }

    SplitBehavior split_behavior(const std::string& name) const {
        const std::vector<std::string> names = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"};
        const auto found = std::find(names.begin(), names.end(), name);
        if (found == names.end()) refuse("the behavior '" + name + "' of a pre-tokenizer");
        return (SplitBehavior)(found - names.begin());
    }

    void load_vocabulary(const nlohmann::json& j) {
        const char* name = source_.c_str();
        const auto& vocabulary = j["model"].at("vocab");
        const size_t limit = vocabulary.size() + (j.contains("added_tokens") ? j["added_tokens"].size() : 0);
        const auto place = [&](const nlohmann::json& number, const std::string& token) {
            if (!number.is_number_integer()) fail("%s: the id of token '%s' is not a whole number", name, token.c_str());
            const int64_t id = number.get<int64_t>();
            if (id < 0 || id >= (int64_t)limit)
                fail("%s: token '%s' has the id %lld; ids must be 0 .. %zu without gaps", name, token.c_str(), (long long)id,
                     limit - 1);
            if ((size_t)id >= bytes_.size()) {
                bytes_.resize((size_t)id + 1);
                special_.resize((size_t)id + 1);
                taken_.resize((size_t)id + 1);
            }
            return id;
        };
        for (const auto& [characters, value] : vocabulary.items()) {
            const int64_t id = place(value, characters);
            if (taken_[id])
                fail("%s: the id %lld belongs to two tokens, '%s' and another", name, (long long)id, characters.c_str());
            std::string bytes;
            const bool of_bytes = characters_to_bytes(characters, bytes);
            bytes_[id] = of_bytes ? bytes : characters;
            taken_[id] = true;  // names of special tokens are not in the byte table
            by_characters_[characters] = (int)id;
            if (of_bytes) bpe_.add_token(bytes, (int)id);
        }
        const auto& unknown = j["model"].value("unk_token", nlohmann::json());
        if (unknown.is_string()) {
            const auto found = by_characters_.find(unknown.get<std::string>());
            if (found != by_characters_.end()) bpe_.unknown = found->second;
        }
        keeps_every_byte_ &= bpe_.knows_every_byte();
        // A few bytes never occur in UTF-8, but a vocabulary without the letters is not byte-level.
        for (int b = 'a'; b <= 'z'; b++)
            if (bpe_.byte_id((unsigned char)b) < 0)
                fail("%s: the byte %d has no token; it is not a byte-level vocabulary", name, b);
        if (!bpe_.knows_every_byte() && bpe_.unknown < 0 && unknown.is_string())
            fail("%s: unk_token %s is no token of the vocabulary", name, unknown.dump().c_str());
        if (j.contains("added_tokens"))
            for (const auto& token : j["added_tokens"]) {
                const std::string content = token.at("content").get<std::string>();
                const auto known = by_characters_.find(content);
                const int64_t id = place(token.at("id"), content);
                if (content.empty()) fail("%s: the added token %lld is empty", name, (long long)id);
                if (added_.count(content)) fail("%s: the added token '%s' is listed twice", name, content.c_str());
                if (known == by_characters_.end() ? taken_[id] : known->second != id)
                    fail("%s: the id %lld belongs to two tokens, '%s' and '%s'", name, (long long)id, bytes_[id].c_str(),
                         content.c_str());
                if (known == by_characters_.end() && (size_t)id + 1 != bytes_.size())
                    fail("%s: the added token '%s' has the id %lld before a smaller one; HINT: list added tokens in order",
                         name, content.c_str(), (long long)id);
                const auto flag = [&](const char* key, bool otherwise) { return token.value(key, otherwise); };
                const bool special = flag("special", false);
                const AddedToken added = {
                    content, (int)id, special, flag("single_word", false), flag("lstrip", false), flag("rstrip", false)};
                (flag("normalized", !special) ? added_normalized_ : added_plain_).add(added);
                if (!taken_[id]) bytes_[id] = content;
                special_[id] = special;
                taken_[id] = true;
                added_[content] = (int)id;
                // A token of the vocabulary may be listed under another text ("é" is a byte, too): it stands for those bytes
                // still.
                keeps_every_byte_ &= !added.lstrip && !added.rstrip && bytes_[id] == content;
            }
        for (size_t id = 0; id < taken_.size(); id++)
            if (!taken_[id]) fail("%s: no token has the id %zu", name, id);
    }

    // Loads the tokens that the template puts before and after a text.
    void load_template(const nlohmann::json& step) {
        const std::string type = step.is_null() ? "" : step.value("type", "");
        if (step.is_null() || type == "ByteLevel") return;  // ByteLevel only moves offsets
        if (type == "Sequence") {
            for (const auto& part : step.at("processors")) load_template(part);
            return;
        }
        if (type != "TemplateProcessing") refuse("the post-processor '" + type + "'");
        bool text = false;
        for (const auto& item : step.at("single")) {
            if (item.contains("Sequence")) {
                if (text) refuse("a template that repeats the text");
                text = true;
                continue;
            }
            const std::string name = item.at("SpecialToken").at("id").get<std::string>();
            for (const auto& id : step.at("special_tokens").at(name).at("ids")) {
                if (!id.is_number_integer() || id < 0 || id >= vocab_size())
                    fail("%s: the template's '%s' has the id %s, which is no token", source_.c_str(), name.c_str(),
                         id.dump().c_str());
                (text ? template_after_ : template_before_).push_back(id.get<int>());
            }
        }
        if (!text) refuse("a template without the text");
    }

    // Finds the tokens that begin and end a text: from tokenizer_config.json beside the file, else by the usual names. (Its
    // add_bos_token is ignored: in transformers, too, the template of tokenizer.json decides.)
    void load_roles() {
        const std::filesystem::path file = source_;
        nlohmann::json settings = nlohmann::json::object();
        if (file.filename() == "tokenizer.json")
            for (const char* name : {"special_tokens_map.json", "tokenizer_config.json"})
                if (const auto path = file.parent_path() / name; std::filesystem::exists(path))
                    if (const auto j = parse_json(MappedFile(path.string()).text(), path.string()); j.is_object())
                        settings.update(j);
        const auto role = [&](const char* key, std::vector<std::string> names) {
            auto value = settings.value(key, nlohmann::json());
            if (value.is_object()) value = value.value("content", nlohmann::json());
            if (value.is_string()) names.insert(names.begin(), value.get<std::string>());
            for (const std::string& name : names)
                if (const int id = token_to_id(name); id >= 0) return id;
            return -1;
        };
        eod_ = role("eos_token", {"<|endoftext|>", "<|end_of_text|>", "</s>"});
        bos_ = role("bos_token", {"<|begin_of_text|>", "<s>"});
        if (bos_ < 0) bos_ = eod_;
    }

    void load_merges(const nlohmann::json& merges) {
        int rank = 0;
        for (const auto& entry : merges) {
            std::string left, right;
            if (entry.is_string()) {
                const std::string text = entry.get<std::string>();
                const size_t space = text.find(' ', 1);
                if (space == std::string::npos) fail("%s: merge %d, '%s', is not a pair", source_.c_str(), rank, text.c_str());
                left = text.substr(0, space);
                right = text.substr(space + 1);
            } else {
                left = entry.at(0).get<std::string>();
                right = entry.at(1).get<std::string>();
            }
            const auto id = [&](const std::string& characters) {
                const auto found = by_characters_.find(characters);
                if (found == by_characters_.end())
                    fail("%s: merge %d names '%s', which is no token", source_.c_str(), rank, characters.c_str());
                return found->second;
            };
            bpe_.add_merge(id(left), id(right), id(left + right));
            rank++;
        }
        by_characters_.clear();
    }

    std::string source_, hash_;
    bool keeps_every_byte_ = true;
    int eod_ = -1, bos_ = -1;
    std::vector<int> template_before_, template_after_;
    AddedTokenFinder added_plain_, added_normalized_;
    std::shared_ptr<PreTokenizer> pre_tokenizer_;
    std::vector<std::string> bytes_;  // id -> raw bytes
    std::vector<bool> special_, taken_;
    std::unordered_map<std::string, int> by_characters_, added_;
    BytePairEncoder bpe_;
};
