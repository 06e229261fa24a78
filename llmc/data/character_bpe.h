// Byte-pair encoding whose first symbols are characters instead of bytes (Llama 2, Mistral). A character without a token
// becomes the tokens of its bytes (byte fallback), or the unknown token.
//
// Many of these tokenizers have no pre-tokenizer: a text is one piece. Where no merge joins what ends before a space (U+2581)
// with that space, merges never cross that place, and the text can be cut there into words, whose tokens are remembered.
#pragma once
#include <array>
#include <climits>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"
#include "byte_trie.h"
#include "piece_cache.h"
#include "unigram.h"

class CharacterBpe {
public:
    bool whole_tokens = false;  // ignore_merges: a piece that is a token is not divided
    bool fuse_unknown = false;  // neighbouring unknown characters are one token
    // What a character without a token is while merges go on: SentencePiece decides only then what becomes of it.
    bool late_unknown = false;
    UnknownCharacters unknown;

    void add_token(const std::string& text, int id) {
        ids_[text] = id;
        space_ |= text == "\u2581";
    }
    // Merges of equal rank happen from left to right; of a lower rank first.
    void add_merge(const std::string& left, const std::string& right, int rank) {
        const int a = symbol(left), b = symbol(right), merged = symbol(left + right);
        merges_[pair_key(a, b)] = {rank, merged};
        crosses_spaces_ |=
            right.compare(0, 3, "\u2581") == 0 && (left.size() < 3 || left.compare(left.size() - 3, 3, "\u2581") != 0);
    }
    // Pieces that are found before all else and never merged.
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
    struct Merge {
        int rank, symbol;
    };
    static uint64_t pair_key(int a, int b) { return (uint64_t)(uint32_t)a << 32 | (uint32_t)b; }

    // Tokens are symbols, and what is no token but occurs in merges (or is unknown) has a number below -1.
    int symbol(const std::string& text) {
        const auto found = ids_.find(text);
        return found != ids_.end() ? found->second : unnamed_.emplace(text, -2 - (int)unnamed_.size()).first->second;
    }

    void encode_word(std::string_view word, std::vector<int>& tokens) const {
        cache_.encode_append(word, tokens, [&](std::string_view w, std::vector<int>& out) { merge(w, out); });
    }

    struct Symbol {
        int id;           // of its token; below -1: it has none; gone: merged into the one before
        int begin, size;  // in bytes
        bool frozen;
        int next, previous;
    };
    static constexpr int gone = INT_MIN;

    void merge(std::string_view word, std::vector<int>& tokens) const {
        if (word.size() > INT_MAX) fail("a text of %zu bytes is too long to merge; at most %d are", word.size(), INT_MAX);
        std::vector<Symbol> symbols = first_symbols(word);
        const int n = (int)symbols.size();
        using Candidate = std::array<int, 4>;  // rank, position, left symbol, right symbol
        std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue;
        const auto consider = [&](int i) {
            if (i < 0 || symbols[(size_t)i].next >= n) return;
            const Symbol &a = symbols[(size_t)i], &b = symbols[(size_t)a.next];
            if (a.frozen || b.frozen) return;
            if (const auto found = merges_.find(pair_key(a.id, b.id)); found != merges_.end())
                queue.push({found->second.rank, i, a.id, b.id});
        };
        for (int i = 0; i < n; i++) {
            symbols[(size_t)i].next = i + 1;
            symbols[(size_t)i].previous = i - 1;
        }
        for (int i = 0; i < n; i++) consider(i);
        while (!queue.empty()) {
            const auto [rank, i, left, right] = queue.top();
            queue.pop();
            Symbol& a = symbols[(size_t)i];
            if (a.id != left || a.next >= n || symbols[(size_t)a.next].id != right) continue;  // one of the two was merged
            Symbol& b = symbols[(size_t)a.next];
            a.id = merges_.at(pair_key(left, right)).symbol;
            a.size += b.size;
            a.next = b.next;
            b.id = gone;
            if (a.next < n) symbols[(size_t)a.next].previous = i;
            consider(a.previous);
            consider(i);
        }
        bool after_unknown = false;
        for (int i = 0; i < n; i = symbols[(size_t)i].next) {
            const Symbol& s = symbols[(size_t)i];
            if (s.id >= 0) tokens.push_back(s.id);
            else if (unknown.falls_back)
                for (char c : word.substr((size_t)s.begin, (size_t)s.size)) tokens.push_back(unknown.byte[(unsigned char)c]);
            else if (unknown.id >= 0 && !(after_unknown && fuse_unknown)) tokens.push_back(unknown.id);
            after_unknown = s.id < 0;
        }
    }

    std::vector<Symbol> first_symbols(std::string_view word) const {
        std::vector<Symbol> symbols;
        symbols.reserve(word.size());
        bool after_unknown = false;
        std::string character;
        for (size_t i = 0; i < word.size();) {
            int frozen = -1;
            size_t length = 0;
            frozen_.prefixes(word.substr(i), [&](int id, size_t n) {
                frozen = id;
                length = n;
            });
            const auto push = [&](int id) { symbols.push_back({id, (int)i, (int)length, frozen >= 0, 0, 0}); };
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
        return symbols;
    }

    PieceCache cache_;
    bool space_ = false, crosses_spaces_ = false;
    std::unordered_map<std::string, int> ids_, unnamed_;
    std::unordered_map<uint64_t, Merge> merges_;
    ByteTrie frozen_;
};
