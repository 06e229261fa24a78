// The byte-pair engine of the tokenizer (tokenizer.h): from a piece of text to tokens. A piece starts as the tokens of its bytes;
// of the adjacent pairs for which there is a merge, the one learned first is merged, again and again, until none is left.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../base/check.h"

class BytePairEncoder {
public:
    bool whole_tokens = false;  // Llama-3's ignore_merges: a piece that is a token is not split
    bool fuse_unknown = false;  // neighbouring bytes without a token are one unknown token
    int unknown = -1;           // the token of a byte that has none; -1: such a byte is dropped

    BytePairEncoder() {
        static std::atomic<uint64_t> instances{0};
        instance_ = ++instances;
        byte_id_.fill(-1);
    }

    // The vocabulary, then the merges in the order in which they were learned. If a pair is added twice, the later merge counts.
    void add_token(const std::string& bytes, int id) {
        by_bytes_.emplace(bytes, id);
        if (bytes.size() == 1) byte_id_[(unsigned char)bytes[0]] = id;
    }
    void add_merge(int left, int right, int merged) { merges_[pair_key(left, right)] = Merge{n_merges_++, merged}; }

    int byte_id(unsigned char byte) const { return byte_id_[byte]; }  // -1: the byte has no token
    bool knows_every_byte() const { return std::find(byte_id_.begin(), byte_id_.end(), -1) == byte_id_.end(); }

    void encode_append(std::string_view piece, std::vector<int>& tokens) const {
        constexpr size_t longest_cached = 32, most_cached = 1 << 18;
        if (piece.size() > longest_cached) return merge_piece(piece, tokens);
        Cache& cache = cache_of_this_thread();
        std::string key(piece);
        const auto found = cache.pieces.find(key);
        if (found != cache.pieces.end()) {
            tokens.insert(tokens.end(), found->second.begin(), found->second.end());
            return;
        }
        const size_t before = tokens.size();
        merge_piece(piece, tokens);
        if (cache.pieces.size() >= most_cached) cache.pieces.clear();
        cache.pieces.emplace(std::move(key), std::vector<int>(tokens.begin() + (long)before, tokens.end()));
    }

private:
    struct Merge {
        int rank, token;
    };
    struct Cache {
        uint64_t owner = 0;
        std::unordered_map<std::string, std::vector<int>> pieces;
    };

    static uint64_t pair_key(int a, int b) { return (uint64_t)(uint32_t)a << 32 | (uint32_t)b; }
    const Merge* merge_of(int a, int b) const {
        const auto found = merges_.find(pair_key(a, b));
        return found == merges_.end() ? nullptr : &found->second;
    }

    Cache& cache_of_this_thread() const {
        thread_local Cache cache;
        if (cache.owner != instance_) {
            cache.owner = instance_;
            cache.pieces.clear();
        }
        return cache;
    }

    void merge_piece(std::string_view piece, std::vector<int>& tokens) const {
        if (whole_tokens) {
            const auto found = by_bytes_.find(std::string(piece));
            if (found != by_bytes_.end()) return tokens.push_back(found->second);
        }
        if (piece.size() > INT_MAX) fail("a piece of %zu bytes is too long to merge; at most %d are", piece.size(), INT_MAX);
        if (piece.size() <= 48) merge_short(piece, tokens);
        else merge_long(piece, tokens);
    }

    // Calls symbol(id) for each byte. A byte without a token is the unknown token, or skipped if there is none.
    template <class F>
    void each_byte(std::string_view piece, F symbol) const {
        bool after_unknown = false;
        for (unsigned char b : piece) {
            const bool known = byte_id_[b] >= 0;
            if (known) symbol(byte_id_[b]);
            else if (unknown >= 0 && !(after_unknown && fuse_unknown)) symbol(unknown);
            after_unknown = !known;
        }
    }

    // Searches for the best pair again after every merge: quadratic, and fastest for words.
    void merge_short(std::string_view piece, std::vector<int>& tokens) const {
        int symbols[48], n = 0;
        each_byte(piece, [&](int id) { symbols[n++] = id; });
        while (n > 1) {
            Merge best = {INT_MAX, -1};
            int at = -1;
            for (int i = 0; i + 1 < n; i++)
                if (const Merge* m = merge_of(symbols[i], symbols[i + 1]); m && m->rank < best.rank) {
                    best = *m;
                    at = i;
                }
            if (at < 0) break;
            symbols[at] = best.token;
            std::copy(symbols + at + 2, symbols + n, symbols + at + 1);
            n--;
        }
        tokens.insert(tokens.end(), symbols, symbols + n);
    }

    // A linked list of symbols and a priority queue of candidate pairs: O(n log n), for runs of thousands of letters without a
    // space.
    void merge_long(std::string_view piece, std::vector<int>& tokens) const {
        std::vector<int> symbol;
        symbol.reserve(piece.size());
        each_byte(piece, [&](int id) { symbol.push_back(id); });
        const int n = (int)symbol.size();
        std::vector<int> next(n), previous(n);
        using Candidate = std::array<int, 4>;  // rank, position, left symbol, right symbol
        std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue;
        const auto consider = [&](int i) {
            if (i < 0 || next[i] >= n) return;
            if (const Merge* m = merge_of(symbol[i], symbol[next[i]])) queue.push({m->rank, i, symbol[i], symbol[next[i]]});
        };
        for (int i = 0; i < n; i++) {
            next[i] = i + 1;
            previous[i] = i - 1;
        }
        for (int i = 0; i < n; i++) consider(i);
        while (!queue.empty()) {
            const auto [rank, i, left, right] = queue.top();
            queue.pop();
            if (symbol[i] != left || next[i] >= n || symbol[next[i]] != right) continue;  // outdated: one of the two was merged
            const int gone = next[i];
            symbol[i] = merge_of(left, right)->token;
            symbol[gone] = -1;
            next[i] = next[gone];
            if (next[i] < n) previous[next[i]] = i;
            consider(previous[i]);
            consider(i);
        }
        for (int i = 0; i < n; i = next[i]) tokens.push_back(symbol[i]);
    }

    uint64_t instance_;
    int n_merges_ = 0;
    std::array<int, 256> byte_id_;
    std::unordered_map<std::string, int> by_bytes_;
    std::unordered_map<uint64_t, Merge> merges_;
};
