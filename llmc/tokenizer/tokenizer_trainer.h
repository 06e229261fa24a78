// Learns a byte-level BPE vocabulary (see tokenizer.h): counts the pieces of a text, then merges the most frequent pair of
// tokens, repeatedly, until the vocabulary is full. Ids are assigned like in Hugging Face's BpeTrainer: special tokens, the 256
// bytes in the order of their characters, then merges; among equally frequent pairs the one with smaller ids wins.
//
// A merge changes only the words that contain its pair. So each pair remembers its words, counts are updated as merges happen,
// and the priority queue may hold outdated counts: an entry that no longer agrees is corrected when it reaches the top.
#pragma once
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <queue>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/progress.h"
#include "tokenizer.h"

// Distinct pieces and how often each occurs.
using PieceCounts = std::unordered_map<std::string, int64_t>;

// Counts pieces: short ones in a small flat table, where a piece replaces another with the same hash.
class PieceCounter {
public:
    // end: end of the readable memory.
    void add(std::string_view piece, const char* end) {
        const auto key = WordCache::key_of(piece, end);
        if (!key.exists()) {
            others_[std::string(piece)]++;
            return;
        }
        Slot& place = places_[key.hash() % places_.size()];
        if (!(place.key == key)) {
            empty(place);
            place.key = key;
        }
        place.count++;
    }
    // Number of distinct pieces outside the table.
    size_t others() const { return others_.size(); }
    // Adds all counts to `counts` and clears them here.
    void move_to(PieceCounts& counts) {
        for (Slot& place : places_) empty(place);
        for (const auto& [piece, count] : others_) counts[piece] += count;
        others_.clear();
    }

private:
    struct Slot {
        WordCache::Key key;
        int64_t count = 0;
    };
    void empty(Slot& place) {
        if (place.count > 0) others_[place.key.piece()] += place.count;
        place.count = 0;
    }

    std::vector<Slot> places_ = std::vector<Slot>(1 << 14);
    PieceCounts others_;
};

// A special token, as listed in tokenizer.json.
inline nlohmann::ordered_json added_token(size_t id, const std::string& content) {
    return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
            {"rstrip", false}, {"normalized", false}, {"special", true}};
}

// Appends placeholders for later special tokens, so that the size of the vocabulary need not change then: `reserved` of them,
// and as many more as make it a multiple of `multiple`. Returns the new size.
inline int reserve_tokens(nlohmann::ordered_json& tokenizer, int size, int reserved, int multiple) {
    const int all = (size + reserved + multiple - 1) / multiple * multiple;
    std::set<std::string> taken;
    for (const auto& token : tokenizer["added_tokens"]) taken.insert(token["content"].get<std::string>());
    for (int id = size, k = 0; id < all; k++)
        if (const std::string name = format("<|reserved_special_token_%d|>", k); !taken.count(name))
            tokenizer["added_tokens"].push_back(added_token((size_t)id++, name));
    return all;
}

class BpeTrainer {
public:
    using Pair = std::pair<int, int>;

    BpeTrainer(const PieceCounts& counts, std::vector<std::string> special_tokens, std::string pattern)
        : special_(std::move(special_tokens)), pattern_(std::move(pattern)) {
        for (const std::string& token : special_) add_token(token, token);
        std::map<uint32_t, int> alphabet;  // sorted by character
        for (int b = 0; b < 256; b++) alphabet[byte_characters()[b]] = b;
        std::array<int, 256> byte_id;
        for (const auto& [character, byte] : alphabet) byte_id[byte] = add_token(utf8(character), std::string(1, (char)byte));

        std::vector<std::pair<std::string, int64_t>> sorted(counts.begin(), counts.end());
        std::sort(sorted.begin(), sorted.end());  // so that the result does not depend on the hash table
        for (const auto& [piece, count] : sorted) {
            Word word{{}, count};
            for (unsigned char b : piece) word.tokens.push_back(byte_id[b]);
            words_.push_back(std::move(word));
        }
    }

    // Merges until there are vocab_size tokens or no pair occurs min_frequency times.
    void train(int vocab_size, int64_t min_frequency, Progress* progress) {
        for (size_t w = 0; w < words_.size(); w++) {
            const std::vector<int>& t = words_[w].tokens;
            for (size_t i = 0; i + 1 < t.size(); i++) change({t[i], t[i + 1]}, words_[w].count, (int)w);
        }
        for (const auto& [key, entry] : pairs_) queue_.push({entry.count, key});
        while ((int)characters_.size() < vocab_size && !queue_.empty()) {
            const Candidate best = queue_.top();
            queue_.pop();
            const Entry& entry = pairs_[best.pair];
            if (best.count != entry.count) {
                if (entry.count > 0) queue_.push({entry.count, best.pair});
                continue;
            }
            if (best.count < min_frequency) break;
            if (is_special(bytes_[best.pair.first] + bytes_[best.pair.second])) continue;
            merge(best.pair);
            if (progress) progress->update((int64_t)characters_.size());
        }
    }

    int vocab_size() const { return (int)characters_.size(); }

    nlohmann::ordered_json to_json() const {
        using json = nlohmann::ordered_json;
        json added = json::array(), vocabulary = json::object(), merges = json::array();
        for (size_t id = 0; id < special_.size(); id++) added.push_back(added_token(id, special_[id]));
        // ordered_json searches all keys at every insertion, which is quadratic; the sorted json does not.
        nlohmann::json sorted = nlohmann::json::object();
        for (size_t id = 0; id < characters_.size(); id++) sorted[characters_[id]] = id;
        vocabulary = sorted;
        for (const Pair& m : merges_) merges.push_back(characters_[m.first] + " " + characters_[m.second]);
        json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
        json pre_tokenizer;
        if (pattern_ == "gpt2") {
            byte_level["use_regex"] = true;
            pre_tokenizer = byte_level;
        } else {
            const std::string regex = pattern_ == "bloom" ? bloom_pattern_in_files : pretokenizer_pattern(pattern_);
            const json split = {
                {"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}, {"invert", false}};
            pre_tokenizer = {{"type", "Sequence"}, {"pretokenizers", json::array({split, byte_level})}};
        }
        const json decoder = {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}, {"use_regex", true}};
        return {{"version", "1.0"},
                {"truncation", nullptr},
                {"padding", nullptr},
                {"added_tokens", added},
                {"normalizer", nullptr},
                {"pre_tokenizer", pre_tokenizer},
                {"post_processor", nullptr},
                {"decoder", decoder},
                {"model",
                 {{"type", "BPE"},
                  {"dropout", nullptr},
                  {"unk_token", nullptr},
                  {"continuing_subword_prefix", nullptr},
                  {"end_of_word_suffix", nullptr},
                  {"fuse_unk", false},
                  {"byte_fallback", false},
                  {"ignore_merges", false},
                  {"vocab", vocabulary},
                  {"merges", merges}}}};
    }

private:
    struct Word {
        std::vector<int> tokens;
        int64_t count;
    };
    struct Entry {
        int64_t count = 0;
        std::vector<int> words;  // words that contain the pair or once did; may repeat
    };
    struct Candidate {
        int64_t count;
        Pair pair;
        bool operator<(const Candidate& other) const { return count != other.count ? count < other.count : pair > other.pair; }
    };
    struct PairHash {
        size_t operator()(const Pair& p) const {
            return std::hash<uint64_t>()(((uint64_t)(uint32_t)p.first << 32 | (uint32_t)p.second) * 0x9E3779B97F4A7C15u);
        }
    };

    int add_token(const std::string& characters, const std::string& bytes) {
        const auto [found, is_new] = ids_.emplace(bytes, (int)characters_.size());
        if (is_new) {
            characters_.push_back(characters);
            bytes_.push_back(bytes);
        }
        return found->second;
    }

    // Text is never merged into a special token, which might end documents, for example.
    bool is_special(const std::string& bytes) const {
        const auto found = ids_.find(bytes);
        return found != ids_.end() && found->second < (int)special_.size();
    }

    void change(Pair pair, int64_t by, int word) {
        Entry& entry = pairs_[pair];
        entry.count += by;
        if (by > 0 && (entry.words.empty() || entry.words.back() != word)) entry.words.push_back(word);
    }

    void merge(Pair pair) {
        const int token =
            add_token(characters_[pair.first] + characters_[pair.second], bytes_[pair.first] + bytes_[pair.second]);
        merges_.push_back(pair);
        const std::vector<int> words = std::move(pairs_[pair].words);
        std::vector<Pair> grown;
        for (int w : words) {
            std::vector<int>& t = words_[w].tokens;
            const int64_t count = words_[w].count;
            size_t out = 0;
            for (size_t i = 0; i < t.size(); i++) {
                if (i + 1 >= t.size() || t[i] != pair.first || t[i + 1] != pair.second) {
                    t[out++] = t[i];
                    continue;
                }
                // ... left [first second] right ... becomes ... left token right ...
                if (out > 0) {
                    change({t[out - 1], t[i]}, -count, w);
                    change({t[out - 1], token}, count, w);
                    grown.emplace_back(t[out - 1], token);
                }
                if (i + 2 < t.size()) {
                    change({t[i + 1], t[i + 2]}, -count, w);
                    change({token, t[i + 2]}, count, w);
                    grown.emplace_back(token, t[i + 2]);
                }
                t[out++] = token;
                i++;
            }
            t.resize(out);
        }
        pairs_[pair].count = 0;
        std::sort(grown.begin(), grown.end());
        grown.erase(std::unique(grown.begin(), grown.end()), grown.end());
        for (const Pair& p : grown)
            if (pairs_[p].count > 0) queue_.push({pairs_[p].count, p});
    }

    std::vector<std::string> special_;
    std::string pattern_;
    std::vector<std::string> characters_, bytes_;  // by id: as in tokenizer.json, and raw
    std::unordered_map<std::string, int> ids_;
    std::vector<Pair> merges_;
    std::vector<Word> words_;
    std::unordered_map<Pair, Entry, PairHash> pairs_;
    std::priority_queue<Candidate> queue_;
};
