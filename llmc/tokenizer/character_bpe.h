// Byte-pair encoding whose first symbols are characters instead of bytes (Llama 2, Mistral). A character without a token
// becomes the tokens of its bytes (byte fallback), or the unknown token.
//
// Many of these tokenizers have no pre-tokenizer: a text is one piece. If no merge joins a space (U+2581) to the text before
// it, merges never cross that boundary, and the text can be split there into words, whose tokens are cached.
#pragma once
#include <climits>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"
#include "byte_trie.h"
#include "merge_by_rank.h"
#include "piece_cache.h"
#include "unigram.h"

class CharacterBpe {
public:
    bool whole_tokens = false;  // ignore_merges: a piece that is a token is not divided
    bool fuse_unknown = false;  // neighboring unknown characters are one token
    // The state of a character without a token during merges: SentencePiece resolves it only afterwards.
    bool late_unknown = false;
    UnknownCharacters unknown;

    void add_token(const std::string& text, int id) {
        ids_[text] = id;
        space_ |= text == "\u2581";
    }
    // Merges of lower rank happen first; of equal rank, from left to right.
    void add_merge(const std::string& left, const std::string& right, int rank) {
        const int a = symbol(left), b = symbol(right), merged = symbol(left + right);
        merges_[pair_key(a, b)] = {rank, merged};
        crosses_spaces_ |=
            right.compare(0, 3, "\u2581") == 0 && (left.size() < 3 || left.compare(left.size() - 3, 3, "\u2581") != 0);
    }
    // Pieces that are found before everything else and never merged.
    void set_user_defined(std::vector<std::pair<std::string, int>> pieces) { frozen_ = ByteTrie(std::move(pieces)); }

    void encode_append(std::string_view text, std::vector<int>& tokens) const {
        if (whole_tokens)
            if (const auto found = ids_.find(std::string(text)); found != ids_.end()) return tokens.push_back(found->second);
        if (crosses_spaces_ || !space_ || !frozen_.empty()) return encode_word(text, tokens);
        for (size_t begin = 0; begin < text.size();) {
            size_t end = begin;
            const auto at_space = [&] { return text.compare(end, 3, "\u2581") == 0; };
            while (end < text.size() && at_space()) end += 3;
            while (end < text.size() && !at_space()) end++;
            encode_word(text.substr(begin, end - begin), tokens);
            begin = end;
        }
    }

private:
    static uint64_t pair_key(int a, int b) { return (uint64_t)(uint32_t)a << 32 | (uint32_t)b; }

    // Symbols with a token have its id; others that occur in merges (or are unknown) have a number below -1.
    int symbol(const std::string& text) {
        const auto found = ids_.find(text);
        return found != ids_.end() ? found->second : unnamed_.emplace(text, -2 - (int)unnamed_.size()).first->second;
    }

    void encode_word(std::string_view word, std::vector<int>& tokens) const {
        cache_.encode_append(word, tokens, [&](std::string_view w, std::vector<int>& out) { merge(w, out); });
    }

    struct Symbol {
        int begin, size;  // in bytes
        bool frozen;
    };

    void merge(std::string_view word, std::vector<int>& tokens) const {
        if (word.size() > INT_MAX) fail("a text of %zu bytes is too long to merge; at most %d are", word.size(), INT_MAX);
        std::vector<int> ids;  // of tokens; below -1: no token
        std::vector<Symbol> symbols;
        ids.reserve(word.size());
        symbols.reserve(word.size());
        first_symbols(word, ids, symbols);
        const auto find = [&](int i, int j) {
            if (symbols[i].frozen || symbols[j].frozen) return Merge();
            const auto found = merges_.find(pair_key(ids[i], ids[j]));
            return found == merges_.end() ? Merge() : found->second;
        };
        const std::vector<int> next = merge_by_rank(ids, find, [&](int, int i, int j) { symbols[i].size += symbols[j].size; });
        bool after_unknown = false;
        for (size_t i = 0; i < ids.size(); i = (size_t)next[i]) {
            const Symbol& s = symbols[i];
            if (ids[i] >= 0) tokens.push_back(ids[i]);
            else if (unknown.falls_back)
                for (char c : word.substr((size_t)s.begin, (size_t)s.size)) tokens.push_back(unknown.byte[(unsigned char)c]);
            else if (unknown.id >= 0 && !(after_unknown && fuse_unknown)) tokens.push_back(unknown.id);
            after_unknown = ids[i] < 0;
        }
    }

    void first_symbols(std::string_view word, std::vector<int>& ids, std::vector<Symbol>& symbols) const {
        bool after_unknown = false;
        std::string character;
        for (size_t i = 0; i < word.size();) {
            int frozen = -1;
            size_t length = 0;
            frozen_.prefixes(word.substr(i), [&](int id, size_t n) {
                frozen = id;
                length = n;
            });
            const auto push = [&](int id) {
                ids.push_back(id);
                symbols.push_back({(int)i, (int)length, frozen >= 0});
            };
            if (frozen >= 0) {
                push(frozen);
                after_unknown = false;
                i += length;
                continue;
            }
            length = first_character(word.substr(i)).length;
            character.assign(word, i, length);
            const auto found = ids_.find(character);
            const bool known = found != ids_.end();
            if (known) push(found->second);
            else if (late_unknown) {
                const auto unnamed = unnamed_.find(character);
                push(unnamed == unnamed_.end() ? -1 : unnamed->second);
            } else if (unknown.falls_back) {
                for (char c : character) push(unknown.byte[(unsigned char)c]);
            } else if (unknown.id >= 0 && !(after_unknown && fuse_unknown)) {
                push(unknown.id);
            }
            after_unknown = !known && !unknown.falls_back;
            i += length;
        }
    }

    PieceCache cache_;
    bool space_ = false, crosses_spaces_ = false;
    std::unordered_map<std::string, int> ids_, unnamed_;
    std::unordered_map<uint64_t, Merge> merges_;
    ByteTrie frozen_;
};
