// Tokenizers, from Hugging Face's tokenizer.json or a SentencePiece model. A file is either encoded exactly as by its library,
// or refused with the name of the unsupported feature. Two kinds:
//   of bytes        byte-level BPE (Sennrich et al., 2016; Radford et al., 2019): GPT-2, Llama-3, BLOOM, Qwen. bpe.h
//   of characters   BPE (Llama-2, Mistral: character_bpe.h) or a unigram model (LLM-jp, T5: unigram.h), in which a character
//                   without a token falls back to its bytes
//
// Text becomes tokens in these steps (after normalization, if the file requires it: normalizer.h).
//   1. Pre-tokenization: a regular expression splits the text into pieces (a word with the space before it, a run of digits).
//      Merges never cross a piece, so " the" is learned once rather than together with every word that follows.
//   2. Each piece is its UTF-8 bytes; every byte value is a token, so there is no text without an encoding.
//   3. Merges: training learned an ordered list of pairs of tokens. Among the adjacent pairs in a piece, the one learned first
//      is merged, repeatedly, until none is left.
// tokenizer.json writes bytes as characters (GPT-2's table: printable bytes as themselves, the others as U+0100 and up), so
// that " the" reads "Ġthe". In tokenizers of characters a space is U+2581: "▁the". Only loading and saving use that table;
// everything else works on raw bytes. Bytes that are not valid UTF-8 are separate pieces: encode() accepts any bytes, and with
// a tokenizer of bytes decode(encode(x)) == x (unless the file prevents it: keeps_every_byte).
// Added tokens are found in the text before these steps. Special ones ("<|endoftext|>") control the model. In training data,
// text that spells a special token stays text: a web page must not end a document. In a prompt it becomes the token, and the
// file's template tokens around a text (Llama 3's "<|begin_of_text|>") are added, as in transformers.
#pragma once
#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/terminal.h"
#include "../base/text.h"
#include "added_tokens.h"
#include "bpe.h"
#include "character_bpe.h"
#include "normalizer.h"
#include "pre_tokenizer.h"
#include "sentencepiece_model.h"
#include "text_decoder.h"
#include "text_steps.h"
#include "tokenizer_identity.h"
#include "unigram.h"

// ---- bytes as characters ---------------------------------------------------------------------------------------------------
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

// Position of a text in its document: at its start, after an earlier part of the text, or after a special token. A tokenizer
// may put a space before a text at the start of a document.
enum class TextPlace { begins, continues, behind_token };

// ---- the tokenizer ---------------------------------------------------------------------------------------------------------
class Tokenizer {
    using Strings = std::vector<std::string>;

public:
    // path: a tokenizer.json, a SentencePiece model, or a directory that holds one as tokenizer.json or tokenizer.model.
    static std::string file_of(const std::string& path) {
        if (!is_folder(path)) return path;
        const std::string file = tokenizer_file_in(path);
        return file.empty() ? path + "/tokenizer.json" : file;  // reported as missing
    }
    static Tokenizer load(const std::string& path) {
        refuse_other_forms(path);
        const std::string file = file_of(path), newest = path + "/latest";
        if (is_folder(path) && !file_exists(file))
            fail("%s holds no tokenizer (tokenizer.json or tokenizer.model)%s", path.c_str(),
                 tokenizer_file_in(newest).empty() ? "; HINT: a directory written by train_gpt tokenizer, or of a model"
                                                   : ("; HINT: " + newest + ", of the run's newest checkpoint").c_str());
        const std::string bytes = read_whole_file(file);
        try {
            // A model starts with a field 1, within which is a field 1.
            if (bytes.size() > 2 && bytes[0] == '\n' && bytes[2] == '\n') return Tokenizer(sentencepiece, bytes, file);
            if (!ends_with(file, ".json") && bytes.find_first_not_of(" \t\r\n") != bytes.find('{'))
                fail(
                    "%s is not a tokenizer: it is neither a tokenizer.json nor a SentencePiece model; HINT: --tokenizer DIR, "
                    "as written by train_gpt tokenizer",
                    file.c_str());
            return Tokenizer(parse_json(bytes, file), file);
        } catch (const nlohmann::json::exception& e) {
            fail("%s is not a valid tokenizer.json: %s", file.c_str(), json_problem(e).c_str());
        }
    }

    int vocab_size() const { return (int)bytes_.size(); }
    int eod_id() const { return eod_; }  // end of document; -1: none
    int bos_id() const { return bos_; }
    // Prints a note if the settings next to it name an end-of-text token that does not exist.
    void warn_of_missing_end() const {
        if (!missing_end_.empty())
            print_line(stderr, format("note: the eos_token of %s is '%s', which is not one of its tokens: %s ends documents",
                                      source_.c_str(), missing_end_.c_str(),
                                      eod_ >= 0 ? ("'" + token_bytes(eod_) + "'").c_str() : "none"));
    }
    const std::string& source() const { return source_; }
    // The file's name in the directory of a model.
    const char* file_name() const { return is_sentencepiece_ ? "tokenizer.model" : "tokenizer.json"; }
    TokenizerIdentity identity() const { return {hash_, std::filesystem::absolute(source_).string(), vocab_size()}; }
    // The raw bytes of a token; for an added token, its name. Models have more ids than their tokenizers if the vocabulary was
    // padded (BLOOM's by 200).
    std::string token_bytes(int id) const { return has_text(id) ? bytes_[(size_t)id] : format("<|id %d|>", id); }
    bool has_text(int id) const { return id >= 0 && id < vocab_size(); }
    bool is_special(int id) const { return !has_text(id) || special_[(size_t)id]; }
    bool of_bytes() const { return pre_tokenizer_ != nullptr; }  // else of characters
    // True if decode(encode(x)) is x for every x.
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
    // continues: the text is a later part of a document, so that no space is put before it.
    void encode_append(std::string_view text, std::vector<int>& tokens, bool special = false, bool continues = false) const {
        encode_append(text, tokens, special, continues ? TextPlace::continues : TextPlace::begins);
    }
    void encode_append(std::string_view text, std::vector<int>& tokens, bool special, TextPlace place) const {
        try {
            find_added(
                text, special, place,
                [&](std::string_view part, bool begins, bool goes_on) {
                    if (!pre_tokenizer_)
                        return steps_.split(part, begins, goes_on,
                                            [&](std::string_view piece) { encode_piece_(piece, tokens); });
                    BytePairEncoder::Run run(bpe_, part, tokens);
                    pre_tokenizer_->split(part, [&](std::string_view piece) { run(piece); });
                    run.finish();
                },
                [&](const AddedToken& t) { tokens.push_back(t.id); });
        } catch (const Error& e) {
            fail("%s: %s", source_.c_str(), e.what());
        }
    }
    // Encodes a prompt: special tokens are recognized, and the template's tokens are put around it.
    std::vector<int> encode_prompt(std::string_view text) const {
        std::vector<int> tokens = template_before_;
        encode_append(text, tokens, true);
        tokens.insert(tokens.end(), template_after_.begin(), template_after_.end());
        return tokens;
    }
    const std::vector<int>& template_before() const { return template_before_; }
    const std::vector<int>& template_after() const { return template_after_; }
    // Calls on_text(part) and on_token(AddedToken) for the parts of a text, in order; special tokens are recognized, except
    // ones that the normalizer would change, which stay text.
    template <class Text, class Token>
    void split_at_added(std::string_view text, Text on_text, Token on_token) const {
        const auto rest = [&](std::string_view part) {
            if (added_unchanged_.empty()) on_text(part);
            else added_unchanged_.split(part, true, on_text, on_token);
        };
        if (added_plain_.empty()) rest(text);
        else added_plain_.split(text, true, rest, on_token);
    }
    // The number of special tokens that the text spells.
    int64_t count_special(std::string_view text) const {
        int64_t count = 0;
        find_added(
            text, true, TextPlace::begins, [](std::string_view, bool, bool) {},
            [&](const AddedToken& t) { count += t.special; });
        return count;
    }
    // Number of bytes without a token in a text with these tokens or, for a tokenizer of characters, of places in the text.
    int64_t count_lost(std::string_view text, const std::vector<int>& tokens) const {
        if (!pre_tokenizer_) return std::count(tokens.begin(), tokens.end(), unknown_);
        if (bpe_.knows_every_byte() && !steps_.drops_text) return 0;  // a normalizer changes bytes and loses none
        return (int64_t)text.size() - (int64_t)decode(tokens).size();
    }

    std::string decode(const std::vector<int>& tokens) const {
        if (pre_tokenizer_) {
            std::string text;
            for (int id : tokens) text += token_bytes(id);
            return text;
        }
        std::vector<std::string> pieces;
        for (int id : tokens) pieces.push_back(has_text(id) ? pieces_[(size_t)id] : token_bytes(id));
        return decoder_.decode(std::move(pieces), true);
    }

    // Refuses a model whose vocabulary lacks ids of this tokenizer: it has no embeddings for them.
    void check_fits(int model_vocabulary) const {
        if (vocab_size() > model_vocabulary) refuse_model(model_vocabulary, model_vocabulary);
    }
    // The same, but drops added tokens beyond the vocabulary, with a note if `says`: Gemma 3's tokenizer has one for images,
    // which its text models lack. Pieces of text beyond it, and tokens that start or end a text, are refused.
    void fit(int model_vocabulary, bool says) {
        const int before = vocab_size();
        if (before <= model_vocabulary) return;
        added_plain_ = added_plain_.below(model_vocabulary);
        added_normalized_ = added_normalized_.below(model_vocabulary);
        added_unchanged_ = added_unchanged_.below(model_vocabulary);
        std::vector<int> needed = {eod_, bos_, unknown_};
        for (const auto* around : {&template_before_, &template_after_})
            needed.insert(needed.end(), around->begin(), around->end());
        std::set<int> added;
        for (auto token = added_.begin(); token != added_.end();) {
            if (token->second < model_vocabulary) {
                token++;
                continue;
            }
            encode_append(token->first, needed);  // it may be a piece of text as well
            added.insert(token->second);
            token = added_.erase(token);
        }
        for (int id = model_vocabulary; id < before; id++)
            if (!added.count(id)) needed.push_back(id);
        for (const int id : needed)
            if (id >= model_vocabulary) refuse_model(model_vocabulary, id);
        if (says)
            print_line(stderr, format("note: the model's vocabulary has only %d tokens: it lacks %s of %s, '%s'%s, which "
                                      "stays text",
                                      model_vocabulary, counted((int64_t)added.size(), "added token").c_str(), source_.c_str(),
                                      token_bytes(model_vocabulary).c_str(), added.size() > 1 ? " and so on" : ""));
        bytes_.resize((size_t)model_vocabulary);
        special_.resize(bytes_.size());
        if (!pre_tokenizer_) pieces_.resize(bytes_.size());
    }

private:
    // Tokens that must not be normalized are found first, then the text between them is normalized, then the others are found
    // in it. on_text(part, whether it starts the document, whether it continues an earlier text), on_token(token).
    template <class Text, class Token>
    void find_added(std::string_view text, bool special, TextPlace place, Text on_text, Token on_token) const {
        const auto looked_for = [&](const AddedTokenFinder& f) { return !f.empty() && (special || !f.only_special()); };
        const auto normal = [&](std::string_view part, bool begins, bool goes_on) {
            if (!looked_for(added_normalized_)) return on_text(part, begins, goes_on);
            const auto on_part = [&](std::string_view p) {
                const bool first = p.data() == part.data();
                on_text(p, begins && first, goes_on && first);
            };
            added_normalized_.split(part, special, on_part, on_token);
        };
        const auto plain = [&](std::string_view part) {
            const bool first = part.data() == text.data();
            const bool opens = first && place == TextPlace::begins, goes_on = first && place == TextPlace::continues;
            if (normalizer_.does_nothing()) return normal(part, opens, goes_on);
            const std::string normalized = normalizer_.normalize(part, goes_on);
            if (normalized.empty()) return;
            // False if the normalizer has dropped the start.
            const bool begins = opens && !normalizer_.normalize(part.substr(0, first_character(part).length), false).empty();
            normal(normalized, begins, goes_on);
        };
        if (text.empty()) return;
        if (looked_for(added_plain_)) added_plain_.split(text, special, plain, on_token);
        else plain(text);
    }

    // ---- loading ----
    // Names the formats of tokenizers that are not read, and how to convert them.
    static void refuse_other_forms(const std::string& path) {
        namespace fs = std::filesystem;
        std::vector<fs::path> files;
        if (is_regular(path)) files = {path};
        else if (is_folder(path) && tokenizer_file_in(path).empty())
            for (const std::string& name : names_in(path)) files.push_back(fs::path(path) / name);
        for (const fs::path& file : files) {
            const std::string name = file.filename().string(),
                              folder = file.parent_path().empty() ? "." : file.parent_path().string();
            const std::string where = file.string();
            const char* const text = where.c_str();
            if (name.compare(0, 6, "tekken") == 0 && file.extension() == ".json")
                fail_unsupported(
                    "%s is a tokenizer of Mistral (tekken); a tokenizer.json is needed; HINT: hf download ORG/NAME "
                    "tokenizer.json --local-dir %s, from the model's repository, or one of the same family that has it",
                    text, folder.c_str());
            if (file.extension() == ".tiktoken" || (file.extension() == ".model" && is_tiktoken(where)))
                fail_unsupported(
                    "%s is a tokenizer of tiktoken; a tokenizer.json is needed; HINT: pip install transformers tiktoken; "
                    "python3 -c \"from transformers.convert_slow_tokenizer import TikTokenConverter as C; "
                    "C('%s').converted().save('%s/tokenizer.json')\"; its special tokens, which the file does not "
                    "have, are C's extra_special_tokens=[...]",
                    text, text, folder.c_str());
            if (name == "vocab.json" && file_exists((file.parent_path() / "merges.txt").string()))
                fail_unsupported(
                    "%s holds a tokenizer as vocab.json and merges.txt; a tokenizer.json is needed; HINT: pip install "
                    "transformers; python3 -c \"from transformers import AutoTokenizer as T; "
                    "T.from_pretrained('%s').save_pretrained('%s')\"",
                    folder.c_str(), folder.c_str(), folder.c_str());
        }
    }
    // Lines of a token in base64, a space and its rank, as in Llama 3's original tokenizer.model.
    static bool is_tiktoken(const std::string& file) {
        const MappedFile mapped(file);
        const std::string_view line = mapped.text().substr(0, std::min<size_t>(mapped.text().find('\n'), 200));
        const size_t space = line.find(' ');
        const char* const base64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=";
        return space != std::string_view::npos && space > 0 && line.find_first_not_of(base64) == space &&
               line.size() > space + 1 && line.find_first_not_of("0123456789\r", space + 1) == std::string_view::npos;
    }
    explicit Tokenizer(const std::string& file) : source_(file) {}

    Tokenizer(const nlohmann::json& j, const std::string& file) : Tokenizer(file) {
        const char* name = file.c_str();
        if (!j.is_object() || !j.contains("model")) fail("%s is not a tokenizer.json: it has no 'model'", name);
        const auto& model = j["model"];
        const std::string type = model.value("type", model.contains("merges") ? "BPE" : "");
        if (type != "BPE" && type != "Unigram")
            fail("%s: model type '%s' is not supported; BPE and Unigram are", name, type.c_str());
        const auto given = [&](const char* key, const nlohmann::json& harmless) {
            return model.contains(key) && !model[key].is_null() && model[key] != harmless;
        };
        for (const auto& [key, harmless] : {std::pair<const char*, nlohmann::json>{"dropout", 0.0},
                                            {"continuing_subword_prefix", ""},
                                            {"end_of_word_suffix", ""}})
            if (given(key, harmless)) fail("%s: %s %s is not supported", name, key, model[key].dump().c_str());
        const auto part = [&](const char* key) { return j.value(key, nlohmann::json()); };
        try {
            normalizer_ = Normalizer(part("normalizer"));
            steps_ = TextSteps(part("pre_tokenizer"));
        } catch (const Error& e) {
            fail("%s: %s", name, e.what());
        }
        if (steps_.byte_level) {
            if (type != "BPE") refuse("a ByteLevel pre-tokenizer before a model of type " + type);
            if (given("byte_fallback", false)) refuse("byte_fallback after a ByteLevel pre-tokenizer");
            if (!steps_.only_splits()) refuse("the pre-tokenizer 'Metaspace' before ByteLevel");
            pre_tokenizer_ = std::make_shared<PreTokenizer>(steps_.splitters());
            keeps_every_byte_ = !steps_.drops_text && normalizer_.does_nothing();
            bpe_.whole_tokens = given("ignore_merges", false);
            bpe_.fuse_unknown = given("fuse_unk", false);
        } else {
            keeps_every_byte_ = false;
            try {
                decoder_ = TextDecoder(part("decoder"));
            } catch (const Error& e) {
                fail("%s: %s", name, e.what());
            }
        }
        const bool byte_fallback = given("byte_fallback", false);
        if (type == "Unigram") load_unigram(j, byte_fallback);
        else if (pre_tokenizer_) load_bytes(j);
        else load_characters(j, byte_fallback);
        hash_ = tokenizer_hash(j);
        if (j.contains("post_processor")) load_template(j["post_processor"]);
        load_roles();
    }

    [[noreturn]] void refuse_model(int vocabulary, int id) const {
        fail(
            "%s has %d tokens, the model's vocabulary %d: it lacks the token %d, '%s'; HINT: the tokenizer must be the "
            "model's own",
            source_.c_str(), vocab_size(), vocabulary, id, token_bytes(id).c_str());
    }
    [[noreturn]] void refuse(const std::string& what) const { fail("%s: %s is not supported", source_.c_str(), what.c_str()); }

    // Reserves the index `id` for a token; ids are 0 .. limit-1.
    size_t place(const nlohmann::json& number, const std::string& token, size_t limit) {
        if (!number.is_number_integer()) fail("%s: the id of token '%s' is not a whole number", source_.c_str(), token.c_str());
        const int64_t id = number.get<int64_t>();
        if (id < 0 || id >= (int64_t)limit)
            fail("%s: token '%s' has the id %lld; ids must be 0 .. %zu without gaps", source_.c_str(), token.c_str(),
                 (long long)id, limit - 1);
        if ((size_t)id >= bytes_.size()) {
            bytes_.resize((size_t)id + 1);
            special_.resize((size_t)id + 1);
            taken_.resize((size_t)id + 1);
        }
        return (size_t)id;
    }
    void take(size_t id, const std::string& text) {
        if (taken_[id]) fail("%s: the id %zu belongs to two tokens, '%s' and another", source_.c_str(), id, text.c_str());
        if (!by_characters_.emplace(text, (int)id).second)
            fail("%s: the token '%s' is listed twice, the second time with the id %zu", source_.c_str(), text.c_str(), id);
        bytes_[id] = text;
        taken_[id] = true;
    }
    static size_t size_limit(const nlohmann::json& j) {
        return j["model"].at("vocab").size() + (j.contains("added_tokens") ? j["added_tokens"].size() : 0);
    }
    void find_unknown(const nlohmann::json& unknown) {
        if (!unknown.is_string()) return;
        const auto found = by_characters_.find(unknown.get<std::string>());
        if (found != by_characters_.end()) unknown_ = found->second;
    }

    // A vocabulary of bytes, as GPT-2's characters.
    void load_bytes(const nlohmann::json& j) {
        const char* name = source_.c_str();
        for (const auto& [characters, value] : j["model"].at("vocab").items()) {
            const size_t id = place(value, characters, size_limit(j));
            take(id, characters);  // names of special tokens are not in the byte table
            std::string bytes;
            if (!characters_to_bytes(characters, bytes)) continue;
            bytes_[id] = bytes;
            bpe_.add_token(checked_piece(bytes), (int)id);
        }
        const auto& unknown = j["model"].value("unk_token", nlohmann::json());
        find_unknown(unknown);
        bpe_.unknown = unknown_;
        keeps_every_byte_ &= bpe_.knows_every_byte();
        // A few bytes never occur in UTF-8, but a vocabulary without the letters is not byte-level.
        for (unsigned char b = 'a'; b <= 'z'; b++)
            if (bpe_.byte_id(b) < 0) fail("%s: the byte %d has no token; it is not a byte-level vocabulary", name, b);
        if (!bpe_.knows_every_byte() && unknown_ < 0 && unknown.is_string())
            fail("%s: unk_token %s is not in the vocabulary", name, unknown.dump().c_str());
        load_added(j);
        each_merge(j["model"].at("merges"), [&](int, const std::string& left, const std::string& right) {
            const auto id = [&](const std::string& s) { return by_characters_.at(s); };
            bpe_.add_merge(id(left), id(right), id(left + right));
        });
        bpe_.finish();
        by_characters_.clear();
    }

    // A vocabulary of characters: Llama 2's, Mistral's.
    void load_characters(const nlohmann::json& j, bool byte_fallback) {
        const auto& model = j["model"];
        CharacterBpe bpe;
        for (const auto& [text, value] : model.at("vocab").items()) {
            const size_t id = place(value, text, size_limit(j));
            take(id, text);
            bpe.add_token(checked_piece(text), (int)id);
        }
        const auto& unknown = model.value("unk_token", nlohmann::json());
        find_unknown(unknown);
        if (unknown_ < 0 && unknown.is_string())
            fail("%s: unk_token %s is not in the vocabulary", source_.c_str(), unknown.dump().c_str());
        bpe.unknown = unknown_characters(byte_fallback);
        bpe.whole_tokens = model.value("ignore_merges", false);
        bpe.fuse_unknown = model.value("fuse_unk", false);
        each_merge(model.at("merges"),
                   [&](int rank, const std::string& left, const std::string& right) { bpe.add_merge(left, right, rank); });
        load_added(j);
        encodes_by(std::move(bpe));
    }

    void load_unigram(const nlohmann::json& j, bool byte_fallback) {
        const auto& model = j["model"];
        std::vector<double> scores;
        for (const auto& entry : model.at("vocab")) {
            const auto text = entry.at(0).get<std::string>();
            const double score = entry.at(1).get<double>();
            if (text.empty()) fail("%s: token %zu is empty", source_.c_str(), scores.size());
            take(place(scores.size(), text, size_limit(j)), text);
            scores.push_back(check_score(score, text));
        }
        const auto& unknown = model.value("unk_id", nlohmann::json());
        if (!unknown.is_number_integer() || unknown < 0 || unknown >= scores.size())
            fail("%s: unk_id is %s; it must be the id of a token", source_.c_str(), unknown.dump().c_str());
        unknown_ = unknown.get<int>();
        load_added(j);
        // Text that spells a special token stays text, so it is not a piece. (In the library it is one if a normalizer has
        // produced it.)
        std::vector<UnigramEncoder<double>::Piece> pieces;
        std::set<std::string> seen = {""};  // normalized added tokens may coincide, or be empty
        for (size_t id = 0; id < scores.size(); id++)
            if (!special_[id] && seen.insert(checked_piece(pieces_[id])).second)
                pieces.push_back({pieces_[id], scores[id], (int)id});
        const auto [low, high] = std::minmax_element(scores.begin(), scores.end());
        encodes_by(UnigramEncoder<double>(pieces, unknown_characters(byte_fallback), *low, *high));
    }

    // A trie of tokens is as deep as the longest, and merging takes quadratic time in its length.
    const std::string& checked_piece(const std::string& text) const {
        constexpr size_t most = 4096;
        if (text.size() > most)
            fail("%s: a token has %zu bytes; at most %zu can be searched for", source_.c_str(), text.size(), most);
        return text;
    }
    double check_score(double score, const std::string& text) const {
        if (!std::isfinite(score)) fail("%s: the score of token '%s' is not a number", source_.c_str(), text.c_str());
        return score;
    }

    UnknownCharacters unknown_characters(bool byte_fallback) const {
        UnknownCharacters u;
        u.id = unknown_;
        u.falls_back = byte_fallback;
        for (int b = 0; byte_fallback && b < 256; b++) {
            const auto found = by_characters_.find(byte_token((unsigned char)b));
            if (found == by_characters_.end())
                fail("%s: byte_fallback is on, and there is no token %s", source_.c_str(),
                     byte_token((unsigned char)b).c_str());
            u.byte[(size_t)b] = found->second;
        }
        return u;
    }

    template <class Encoder>
    void encodes_by(Encoder encoder) {
        encode_piece_ = [shared = std::make_shared<Encoder>(std::move(encoder))](
                            std::string_view piece, std::vector<int>& tokens) { shared->encode_append(piece, tokens); };
        by_characters_.clear();
    }

    void load_added(const nlohmann::json& j) {
        const char* name = source_.c_str();
        const nlohmann::json tokens = j.value("added_tokens", nlohmann::json::array());
        const size_t limit = bytes_.size() + tokens.size();
        std::map<size_t, std::string> contents;  // the decoder's text for normalized tokens
        for (const auto& token : tokens.is_null() ? nlohmann::json::array() : tokens) {
            const std::string content = token.at("content").get<std::string>();
            const auto known = by_characters_.find(content);
            const size_t id = place(token.at("id"), content, limit);
            if (content.empty()) fail("%s: the added token %zu is empty", name, id);
            if (added_.count(content)) fail("%s: the added token '%s' is listed twice", name, content.c_str());
            if (known == by_characters_.end() ? taken_[id] : (size_t)known->second != id)
                fail("%s: the id %zu belongs to two tokens, '%s' and '%s'", name, id, bytes_[id].c_str(), content.c_str());
            if (known == by_characters_.end() && id + 1 != bytes_.size())
                fail("%s: the added token '%s' has the id %zu before a smaller one; HINT: list added tokens in order", name,
                     content.c_str(), id);
            const auto flag = [&](const char* key, bool otherwise) { return token.value(key, otherwise); };
            const bool special = flag("special", false);
            AddedToken added = {
                content, (int)id, special, flag("single_word", false), flag("lstrip", false), flag("rstrip", false)};
            if (!taken_[id]) bytes_[id] = content;
            special_[id] = special;
            taken_[id] = true;
            added_[content] = (int)id;
            // A token of the vocabulary may be listed under another text ("é" is a byte, too): it still means those bytes.
            keeps_every_byte_ &= !added.lstrip && !added.rstrip && bytes_[id] == content;
            const bool normalized = flag("normalized", !special);
            if (normalized) added.content = normalizer_.normalize(content, false);
            if (normalized && !pre_tokenizer_) contents[id] = added.content;
            if (!added.content.empty()) (normalized ? added_normalized_ : added_plain_).add(added);
            if (normalized && special && added.content == content) added_unchanged_.add(added);
        }
        check_all_taken();
        for (const auto& [id, content] : contents) pieces_[id] = content;
    }
    // Checks that every id has its token. Tokens of characters are stored as the decoder needs them, and as text pieces.
    void check_all_taken() {
        for (size_t id = 0; id < taken_.size(); id++)
            if (!taken_[id]) fail("%s: no token has the id %zu", source_.c_str(), id);
        if (pre_tokenizer_) return;
        pieces_ = bytes_;
        constexpr size_t most = 256 << 20;  // a file of tokens has no more, either
        size_t total = 0;
        for (size_t id = 0; id < bytes_.size(); id++)
            if (!special_[id]) {
                bytes_[id] = decoder_.decode({pieces_[id]}, false);
                total += bytes_[id].size();
                if (total > most) fail("%s: its decoder makes more than %zu bytes of the tokens", source_.c_str(), most);
            }
    }

    // ---- SentencePiece's models ----
    enum FromSentencePiece { sentencepiece };
    Tokenizer(FromSentencePiece, std::string_view bytes, const std::string& file) : Tokenizer(file) {
        using Model = SentencePieceModel;
        const Model m = read_sentencepiece_model(bytes, file);
        if (m.type != Model::unigram && m.type != Model::bpe)
            refuse(format("a model of type %s", m.type == Model::words        ? "WORD"
                                                : m.type == Model::characters ? "CHAR"
                                                                              : "unknown"));
        if (m.whitespace_as_suffix) refuse("treat_whitespace_as_suffix");
        if (m.denormalizes) refuse("a denormalizer");
        is_sentencepiece_ = true;
        keeps_every_byte_ = false;
        bytes_.resize(m.pieces.size());
        special_.resize(bytes_.size());
        taken_.resize(bytes_.size());
        std::vector<std::pair<std::string, int>> user_defined;
        for (size_t id = 0; id < m.pieces.size(); id++) {
            const Model::Piece& p = m.pieces[id];
            if (p.text.empty()) fail("%s: the piece %zu is empty", file.c_str(), id);
            take(id, p.text);
            check_score((double)p.score, p.text);
            if (p.kind == Model::user_defined) user_defined.emplace_back(p.text, (int)id);
            if (p.kind == Model::unknown && unknown_ >= 0) fail("%s has two unknown tokens", file.c_str());
            if (p.kind == Model::unknown) unknown_ = (int)id;
            if (p.kind == Model::byte && (!m.byte_fallback || byte_of_token(p.text) < 0))
                fail("%s: '%s' is marked as a byte", file.c_str(), p.text.c_str());
            if (p.kind < Model::normal || p.kind > Model::byte)
                fail("%s: '%s' has an unknown kind", file.c_str(), p.text.c_str());
            special_[id] = p.kind == Model::control || p.kind == Model::unknown;
            if (p.kind != Model::control) continue;
            added_[p.text] = (int)id;
            added_plain_.add({p.text, (int)id, true, false, false, false});
        }
        if (unknown_ < 0) fail("%s has no unknown token", file.c_str());
        decoder_ = TextDecoder::sentencepiece(m.dummy_prefix || m.drops_extra_spaces, m.drops_extra_spaces);
        const nlohmann::json added = added_beside();
        load_added({{"added_tokens", added}});
        pieces_[(size_t)unknown_] = m.unknown_surface;
        SentencePieceRules rules;
        try {
            if (!m.charsmap.empty()) rules.map = CharsMap(m.charsmap);
        } catch (const Error& e) {
            fail("%s: %s", file.c_str(), e.what());
        }
        rules.kept = ByteTrie(user_defined);
        rules.dummy_prefix = m.dummy_prefix;
        rules.drops_extra_spaces = m.drops_extra_spaces;
        rules.escapes_spaces = m.escapes_spaces;
        normalizer_ = Normalizer(std::move(rules));
        if (m.type == Model::unigram) load_pieces_of_unigram(m);
        else load_pieces_of_bpe(m, std::move(user_defined));
        hash_ = hash_text(add_to_hash(add_to_hash(empty_hash, bytes), added.empty() ? "" : added.dump()));
        load_roles({m.eos}, {m.bos});
    }

    // The tokens that transformers' Python tokenizer has added to a model, in tokenizer.json's form: from added_tokens_decoder
    // in tokenizer_config.json, else (before transformers 4.34) from added_tokens.json, where the ones with a role are special.
    // All are found in the unnormalized text.
    nlohmann::json added_beside() const {
        using nlohmann::json;
        std::vector<json> all;
        try {
            const json settings = settings_beside(), listed = settings.value("added_tokens_decoder", json());
            const json old = is_named_as_usual() ? object_beside("added_tokens.json") : json::object();
            std::set<std::string> roles;
            for (const json& value : settings)
                for (const json& one : value.is_array() ? value : json::array({value})) roles.insert(token_name(one));
            const auto add = [&](const json& id, const std::string& content, const json& flags) {
                if (id.is_number_integer() && id >= 0 && id < bytes_.size() && bytes_[id.get<size_t>()] == content) return;
                json token = {{"id", id}, {"content", content}, {"normalized", false}};
                for (const char* flag : {"special", "single_word", "lstrip", "rstrip"}) token[flag] = flags.value(flag, false);
                all.push_back(token);
            };
            if (listed.is_object())
                for (const auto& [id, token] : listed.items()) add(json::parse(id, nullptr, false), token.at("content"), token);
            else
                for (const auto& [content, id] : old.items()) add(id, content, {{"special", roles.count(content) > 0}});
        } catch (const json::exception& e) {
            fail("the added tokens of %s are damaged: %s", source_.c_str(), json_problem(e).c_str());
        }
        std::sort(all.begin(), all.end(), [](const json& a, const json& b) { return a["id"] < b["id"]; });
        return all;
    }

    void load_pieces_of_unigram(const SentencePieceModel& m) {
        std::vector<UnigramEncoder<float>::Piece> pieces;
        float low = FLT_MAX, high = FLT_MIN;  // FLT_MIN, above 0, is SentencePiece's as well
        for (size_t id = 0; id < m.pieces.size(); id++) {
            const SentencePieceModel::Piece& p = m.pieces[id];
            const bool user_defined = p.kind == SentencePieceModel::user_defined;
            if (p.kind == SentencePieceModel::normal) {
                low = std::min(low, p.score);
                high = std::max(high, p.score);
            } else if (!user_defined) {
                continue;
            }
            pieces.push_back({checked_piece(p.text), (double)p.score, (int)id, user_defined});
        }
        encodes_by(UnigramEncoder<float>(pieces, unknown_characters(m.byte_fallback), (double)low, (double)high));
    }

    // Any two neighbors that together are a piece are merged, the pair with the highest score first.
    void load_pieces_of_bpe(const SentencePieceModel& m, std::vector<std::pair<std::string, int>> user_defined) {
        CharacterBpe bpe;
        bpe.late_unknown = bpe.fuse_unknown = true;
        std::vector<size_t> by_score;
        std::unordered_set<std::string> symbols;  // possible halves of a merge
        for (size_t id = 0; id < m.pieces.size(); id++) {
            const SentencePieceModel::Piece& p = m.pieces[id];
            if (p.kind == SentencePieceModel::unused) refuse("the unused piece '" + p.text + "'");
            if (p.kind != SentencePieceModel::normal) continue;
            bpe.add_token(checked_piece(p.text), (int)id);
            symbols.insert(p.text);
            by_score.push_back(id);
            each_character(p.text, [&](int32_t, std::string_view bytes) { symbols.emplace(bytes); });
        }
        std::stable_sort(by_score.begin(), by_score.end(),
                         [&](size_t a, size_t b) { return m.pieces[a].score > m.pieces[b].score; });
        int rank = 0;
        for (size_t i = 0; i < by_score.size(); i++) {
            const SentencePieceModel::Piece& p = m.pieces[by_score[i]];
            rank += i > 0 && p.score != m.pieces[by_score[i - 1]].score;
            size_t at = 0;
            each_character(p.text, [&](int32_t, std::string_view bytes) {
                at += bytes.size();
                const std::string left = p.text.substr(0, at), right = p.text.substr(at);
                if (!right.empty() && symbols.count(left) && symbols.count(right)) bpe.add_merge(left, right, rank);
            });
        }
        bpe.set_user_defined(std::move(user_defined));
        bpe.unknown = unknown_characters(m.byte_fallback);
        encodes_by(std::move(bpe));
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
                    fail("%s: the template's '%s' has the id %s, which is not a token", source_.c_str(), name.c_str(),
                         id.dump().c_str());
                (text ? template_after_ : template_before_).push_back(id.get<int>());
            }
        }
        if (!text) refuse("a template without the text");
    }

    // The settings next to it are read only if it has its usual name: other files of a directory may not belong to it.
    bool is_named_as_usual() const { return std::filesystem::path(source_).filename() == file_name(); }
    nlohmann::json object_beside(const char* name) const {
        const std::string path = std::filesystem::path(source_).parent_path() / name;
        if (!file_exists(path)) return nlohmann::json::object();
        nlohmann::json j = parse_json(read_whole_file(path), path);
        if (!j.is_object()) fail("%s does not hold a JSON object", path.c_str());
        return j;
    }
    nlohmann::json settings_beside() const {
        nlohmann::json settings = nlohmann::json::object();
        if (is_named_as_usual())
            for (const char* name : {"special_tokens_map.json", "tokenizer_config.json"}) settings.update(object_beside(name));
        for (const char* key : {"bos_token", "eos_token"})
            if (const auto at = settings.find(key);
                at != settings.end() && !at->is_null() && !at->is_string() && !at->is_object())
                fail("the settings next to %s: '%s' is %.200s; it must be the text of a token", source_.c_str(), key,
                     at->dump().c_str());
        return settings;
    }
    // A token in settings: its text, or an object that holds it; empty for anything else.
    static std::string token_name(const nlohmann::json& value) {
        const nlohmann::json name = value.is_object() ? value.value("content", nlohmann::json()) : value;
        return name.is_string() ? name.get<std::string>() : "";
    }

    // Finds the tokens at the start and end of a text: from tokenizer_config.json next to the file, else special ones by the
    // usual names. Its add_bos_token and add_eos_token decide the tokens around a text for a SentencePiece model, which has no
    // template, and for the classes of transformers in which they replace the template of tokenizer.json: Llama, Gemma and Code
    // Llama. (Other classes, some of which do so in transformers 4 and all in 5, keep the template.)
    void load_roles(const Strings& eos = {"<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>"},
                    const Strings& bos = {"<|begin_of_text|>", "<bos>", "<s>"}) {
        const nlohmann::json settings = settings_beside();
        const auto role = [&](const char* key, const Strings& names) {
            if (const int id = token_to_id(token_name(settings.value(key, nlohmann::json()))); id >= 0) return id;
            for (const std::string& name : names)
                if (const int id = token_to_id(name); id >= 0 && is_special(id)) return id;
            return -1;
        };
        eod_ = role("eos_token", eos);
        missing_end_ = token_name(settings.value("eos_token", nlohmann::json()));
        if (token_to_id(missing_end_) >= 0) missing_end_.clear();
        bos_ = role("bos_token", bos);
        bool decide = is_sentencepiece_;
        for (const char* name : {"LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer"})
            for (const char* fast : {"", "Fast"})
                decide |= settings.value("tokenizer_class", nlohmann::json()) == name + std::string(fast);
        const auto around = [&](const char* key, int id, std::vector<int>& tokens) {
            const nlohmann::json flag = settings.value(key, nlohmann::json());
            if (!decide || !flag.is_boolean()) return;
            if (flag == false) tokens.clear();
            else if (id >= 0) tokens = {id};
        };
        around("add_bos_token", bos_, template_before_);
        around("add_eos_token", eod_, template_after_);
        if (bos_ < 0) bos_ = eod_;
    }

    // Calls each(rank, left, right) for every merge, whose halves and result are tokens.
    template <class F>
    void each_merge(const nlohmann::json& merges, F each) const {
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
            for (const std::string& token : {left, right, left + right})
                if (!by_characters_.count(token))
                    fail("%s: merge %d names '%s', which is not a token", source_.c_str(), rank, token.c_str());
            each(rank++, left, right);
        }
    }

    std::string source_, hash_, missing_end_;
    bool is_sentencepiece_ = false, keeps_every_byte_ = true;
    int eod_ = -1, bos_ = -1, unknown_ = -1;
    std::vector<int> template_before_, template_after_;
    AddedTokenFinder added_plain_, added_normalized_;
    AddedTokenFinder added_unchanged_;  // special ones of the latter that the normalizer leaves unchanged
    Normalizer normalizer_;
    std::vector<std::string> bytes_;  // id -> raw bytes
    std::vector<bool> special_, taken_;
    std::unordered_map<std::string, int> by_characters_, added_;

    // For tokens of bytes.
    std::shared_ptr<PreTokenizer> pre_tokenizer_;
    BytePairEncoder bpe_;
    // For tokens of characters, if pre_tokenizer_ is null.
    TextSteps steps_;
    std::function<void(std::string_view, std::vector<int>&)> encode_piece_;
    TextDecoder decoder_;
    std::vector<std::string> pieces_;  // id -> as in the file
};
