// The byte-pair engine of the tokenizer (tokenizer.h): encodes a piece of text. A piece starts as the tokens of its bytes; of
// the adjacent pairs that have a merge, the one learned first is merged, repeatedly, until none is left. Finding the same
// tokens from left to right, without any merging, is several times as fast (LeftToRight).
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../base/check.h"
#include "byte_trie.h"
#include "merge_by_rank.h"

// The merges: pair of tokens -> rank, the order in which training learned them. A flat table of 8 bytes per entry, at most half
// full; an entry is at the first free place from its hash on.
class MergeTable {
public:
    static constexpr uint32_t none = UINT32_MAX;
    static constexpr int most_tokens = (1 << 21) - 1;  // ids below, and ranks, so that an entry fits into 64 bits
    static constexpr uint32_t most_merges = 1 << 22;

    // Merges are added in order. If a pair is added twice, the later merge wins.
    void add(int left, int right, int merged) {
        for (int id : {left, right})
            if (id >= most_tokens) fail("a merge uses token %d; the maximum is %d", id, most_tokens);
        if (merged_.size() >= most_merges) fail("more than %u merges are not supported", most_merges);
        if (entries_.size() < 2 * (merged_.size() + 1)) grow();
        place(key_of(left, right), (uint32_t)merged_.size());
        merged_.push_back(merged);
    }

    uint32_t rank(int left, int right) const {
        const uint64_t key = key_of(left, right);
        for (size_t at = begin(key);; at = (at + 1) & (entries_.size() - 1)) {
            if (entries_[at] >> rank_bits == key) return (uint32_t)entries_[at] & (most_merges - 1);
            if (entries_[at] == empty) return none;
        }
    }
    int merged(uint32_t rank) const { return merged_[rank]; }

private:
    static constexpr uint64_t empty = UINT64_MAX;
    static constexpr int id_bits = 21, rank_bits = 22;

    static uint64_t key_of(int left, int right) { return (uint64_t)left << id_bits | (uint64_t)right; }
    size_t begin(uint64_t key) const { return (size_t)(key * 0x9e3779b97f4a7c15 >> shift_); }

    void place(uint64_t key, uint32_t rank) {
        size_t at = begin(key);
        while (entries_[at] != empty && entries_[at] >> rank_bits != key) at = (at + 1) & (entries_.size() - 1);
        entries_[at] = key << rank_bits | rank;
    }
    void grow() {
        std::vector<uint64_t> old(2 * entries_.size(), empty);
        old.swap(entries_);
        shift_--;
        for (uint64_t entry : old)
            if (entry != empty) place(entry >> rank_bits, (uint32_t)entry & (most_merges - 1));
    }

    int shift_ = 64 - 4;
    std::vector<uint64_t> entries_ = std::vector<uint64_t>(1 << 4, empty);
    std::vector<int> merged_;  // by rank: the token that the pair becomes
};

// The tokens of recent short pieces, for one thread: most words of a text have occurred before. Two entries share a cache line,
// and the older one of the two is replaced: a bounded table, without allocations.
class WordCache {
public:
    // The bytes of a piece and, in the last byte, their number. A piece that is too long has none.
    struct Key {
        uint64_t low = 0, high = 0;
        bool operator==(const Key& other) const { return ((low ^ other.low) | (high ^ other.high)) == 0; }
        bool exists() const { return high != 0; }
        std::string piece() const {
            std::string text(16, '\0');
            memcpy(text.data(), &low, 8);
            memcpy(text.data() + 8, &high, 8);
            text.resize(high >> 56);
            return text;
        }
        uint64_t hash() const {
            const auto product = (unsigned __int128)(low ^ 0x9e3779b97f4a7c15) * (high ^ 0xd6e8feb86659fd93);
            return (uint64_t)(product ^ product >> 64);
        }
    };
    static constexpr size_t longest = 15, most_tokens = 3, bytes = 1 << 22;

    // end: end of the readable memory.
    static Key key_of(std::string_view piece, const char* end) {
        if (piece.size() > longest) return {};
        uint64_t words[2] = {};
        if (end - piece.data() >= 16) memcpy(words, piece.data(), 16);
        else memcpy(words, piece.data(), piece.size());
        const Masks& keep = masks[piece.size()];
        return {words[0] & keep.low, (words[1] & keep.high) | (uint64_t)piece.size() << 56};
    }

    struct Entry {
        Key key;
        int tokens[most_tokens];
        int count;
    };
    struct alignas(64) Line {
        Entry entries[2];
    };

    // Empties the cache if it belongs to another owner.
    void begin(uint64_t owner) {
        if (owner == owner_) return;
        owner_ = owner;
        lines_.assign(bytes / sizeof(Line), {});
    }
    Line& line(Key key) { return lines_[key.hash() % (bytes / sizeof(Line))]; }
    static void insert(Line& line, Key key, const int* tokens, size_t count) {
        line.entries[1] = line.entries[0];
        line.entries[0].key = key;
        std::copy(tokens, tokens + count, line.entries[0].tokens);
        line.entries[0].count = (int)count;
    }

private:
    struct Masks {
        uint64_t low, high;
    };
    static constexpr std::array<Masks, 16> masks = [] {
        std::array<Masks, 16> all{};
        for (size_t n = 0; n < 16; n++) {
            all[n].low = n < 8 ? (uint64_t{1} << 8 * n) - 1 : ~uint64_t{0};
            all[n].high = n <= 8 ? 0 : (uint64_t{1} << 8 * (n - 8)) - 1;
        }
        return all;
    }();

    uint64_t owner_ = 0;
    std::vector<Line> lines_;
};

// Computes the result of merging a piece, from left to right. (GitHub's rust-gems has this method as its crate bpe.)
//
// Merges within a stretch of text do not depend on its surroundings until a merge crosses its ends. So each token of a piece is
// the result of merging only its own bytes, and each two neighbors are the result of merging only their bytes. The converse
// holds too: if tokens were not the result of merging, consider the first merge across one of their boundaries; until then both
// sides developed as if separate, so the merge would also happen between these two tokens in isolation. Hence any sequence of
// tokens in which all neighbors stay separate is the piece's only encoding. At each place the longest token that stays
// separate from the previous one is used; if there is none, the previous token was wrong and a shorter one replaces it. A place
// from which this failed is not tried again: linear time.
//
// To decide whether two tokens stay separate, their merges are undone, the latest first, down to bytes: they do not if the
// symbols on both sides of the boundary have a merge that precedes the merges which consumed these symbols. At equal ranks, the
// left one comes first.
class LeftToRight {
public:
    struct Made {
        int rank = -1, left = -1, right = -1;  // the last merge that makes the token; none for a byte
    };

    bool knows_tokens() const { return !tokens_.empty(); }

    // Tokens that result from merging their own bytes, and how. Returns false if a token could be made before its parts.
    bool learn(const std::vector<std::pair<std::string, int>>& reached, const std::vector<Made>& made) {
        std::vector<Token> tokens(made.size());
        for (const auto& [bytes, id] : reached) {
            const Made& m = made[(size_t)id];
            if (m.rank >= 0 && std::max(made[(size_t)m.left].rank, made[(size_t)m.right].rank) >= m.rank) return false;
            tokens[(size_t)id] = {m, -1, (uint32_t)bytes.size()};
        }
        trie_ = ByteTrie(reached);
        for (const auto& [bytes, id] : reached)
            trie_.prefixes(bytes, [&, &of = tokens[(size_t)id], token = id](int shorter, size_t) {
                if (shorter != token) of.shorter = shorter;
            });
        tokens_.swap(tokens);
        return true;
    }

    void encode_append(std::string_view piece, const MergeTable& merges, std::vector<int>& tokens) const {
        std::array<uint64_t, 4> few{};
        if (piece.size() < 64 * few.size()) return encode(piece, merges, few.data(), tokens);
        std::vector<uint64_t> many(piece.size() / 64 + 1);
        encode(piece, merges, many.data(), tokens);
    }

private:
    struct Token {
        Made made;
        int shorter = -1;  // the longest token that is its prefix
        uint32_t length = 0;
    };

    // fails: a bit for each place, set if no tokens lead from there to the end.
    void encode(std::string_view piece, const MergeTable& merges, uint64_t* fails, std::vector<int>& tokens) const {
        const size_t first = tokens.size();
        int token = longest(piece);
        for (size_t at = 0; at < piece.size();) {
            const int before = tokens.size() > first ? tokens.back() : -1;
            const auto fits = [&] {
                const size_t end = at + tokens_[(size_t)token].length;
                return !(fails[end / 64] >> end % 64 & 1) && (before < 0 || stay_apart(before, token, merges));
            };
            while (token >= 0 && !fits()) token = tokens_[(size_t)token].shorter;
            if (token >= 0) {
                tokens.push_back(token);
                at += tokens_[(size_t)token].length;
                token = longest(piece.substr(at));
                continue;
            }
            CHECK(before >= 0, "no tokens for a piece of %zu bytes", piece.size());
            fails[at / 64] |= uint64_t{1} << at % 64;
            tokens.pop_back();
            at -= tokens_[(size_t)before].length;
            token = before;
        }
    }
    int longest(std::string_view text) const {
        int token = -1;
        trie_.prefixes(text, [&](int found, size_t) { token = found; });
        return token;
    }
    bool stay_apart(int left, int right, const MergeTable& merges) const {
        uint32_t left_until = MergeTable::none, right_until = MergeTable::none;  // ranks of the merges that consume them
        while (true) {
            const uint32_t rank = merges.rank(left, right);
            if (rank < left_until && rank <= right_until && rank != MergeTable::none) return false;
            const Made &a = tokens_[(size_t)left].made, &b = tokens_[(size_t)right].made;
            if (a.rank > b.rank) {
                left_until = (uint32_t)a.rank;
                left = a.right;
            } else if (b.rank >= 0) {
                right_until = (uint32_t)b.rank;
                right = b.left;
            } else {
                return true;
            }
        }
    }

    std::vector<Token> tokens_;  // by id
    ByteTrie trie_;
};

class BytePairEncoder {
public:
    bool whole_tokens = false;  // Llama-3's ignore_merges: a piece that is a token is not split
    bool fuse_unknown = false;  // neighboring bytes without a token are one unknown token
    int unknown = -1;           // the token of a byte that has none; -1: such a byte is dropped

    BytePairEncoder() {
        static std::atomic<uint64_t> instances{0};
        instance_ = ++instances;
        byte_id_.fill(-1);
    }

    // The vocabulary, then the merges in the order in which they were learned.
    void add_token(const std::string& bytes, int id) {
        by_bytes_.emplace(bytes, id);
        if (bytes.size() == 1) byte_id_[(unsigned char)bytes[0]] = id;
    }
    void add_merge(int left, int right, int merged) { merges_.add(left, right, merged); }
    // To be called after the last merge. Pieces are encoded from left to right if every byte has a token and no merge precedes
    // its parts' merges, which training guarantees; else by merging. Returns true for left to right.
    bool finish() {
        if (!knows_every_byte()) return false;
        std::vector<std::pair<std::string, int>> reached;
        std::vector<LeftToRight::Made> made;
        std::vector<int> tokens;
        for (const auto& [bytes, id] : by_bytes_) {
            LeftToRight::Made last;
            tokens.clear();
            merge(bytes, tokens, [&](uint32_t rank, int left, int right) { last = {(int)rank, left, right}; });
            if (tokens != std::vector<int>{id}) continue;
            reached.emplace_back(bytes, id);
            if ((size_t)id >= made.size()) made.resize((size_t)id + 1);
            made[(size_t)id] = last;
        }
        return left_to_right_.learn(reached, made);
    }

    int byte_id(unsigned char byte) const { return byte_id_[byte]; }  // -1: the byte has no token
    bool knows_every_byte() const { return std::find(byte_id_.begin(), byte_id_.end(), -1) == byte_id_.end(); }

    // Encodes the pieces of a text, in order, and appends their tokens. finish() must be called after the last.
    class Run {
    public:
        Run(const BytePairEncoder& encoder, std::string_view text, std::vector<int>& tokens)
            : encoder_(encoder), end_(text.data() + text.size()), cache_(encoder.cache_of_this_thread()), tokens_(tokens) {}

        // A few pieces wait while their cache entries are fetched from memory.
        void operator()(std::string_view piece) {
            const WordCache::Key key = WordCache::key_of(piece, end_);
            WordCache::Line& line = cache_.line(key);
            __builtin_prefetch(&line);
            waiting_[n_waiting_++] = {piece, key, &line};
            if (n_waiting_ == most_waiting) encode_waiting();
        }
        void finish() {
            encode_waiting();
            flush();
        }

    private:
        void encode_waiting() {
            for (size_t i = 0; i < n_waiting_; i++) {
                const auto& [piece, key, line] = waiting_[i];
                const WordCache::Entry& entry = line->entries[line->entries[1].key == key];
                if (!(entry.key == key) || !key.exists()) {
                    encode(piece, key, *line);
                    continue;
                }
                memcpy(done_ + n_done_, entry.tokens, sizeof entry.tokens);
                n_done_ += (size_t)entry.count;
            }
            n_waiting_ = 0;
            if (n_done_ > most_done) flush();
        }
        void encode(std::string_view piece, WordCache::Key key, WordCache::Line& line) {
            flush();
            const size_t before = tokens_.size();
            encoder_.merge_piece(piece, tokens_);
            const size_t count = tokens_.size() - before;
            if (key.exists() && count <= WordCache::most_tokens) WordCache::insert(line, key, &tokens_[before], count);
        }
        void flush() {
            tokens_.insert(tokens_.end(), done_, done_ + n_done_);
            n_done_ = 0;
        }

        static constexpr size_t most_waiting = 64, most_done = 1024;
        struct Waiting {
            std::string_view piece;
            WordCache::Key key;
            WordCache::Line* line;
        };
        const BytePairEncoder& encoder_;
        const char* end_;
        WordCache& cache_;
        std::vector<int>& tokens_;
        std::array<Waiting, most_waiting> waiting_;
        size_t n_waiting_ = 0, n_done_ = 0;
        int done_[most_done + most_waiting * WordCache::most_tokens];  // tokens not yet appended
    };

private:
    WordCache& cache_of_this_thread() const {
        thread_local WordCache cache;
        cache.begin(instance_);
        return cache;
    }

    void merge_piece(std::string_view piece, std::vector<int>& tokens) const {
        if (whole_tokens) {
            const auto found = by_bytes_.find(std::string(piece));
            if (found != by_bytes_.end()) return tokens.push_back(found->second);
        }
        if (piece.size() > INT_MAX) fail("a piece of %zu bytes is too long to merge; at most %d are", piece.size(), INT_MAX);
        if (left_to_right_.knows_tokens()) left_to_right_.encode_append(piece, merges_, tokens);
        else merge(piece, tokens, [](uint32_t, int, int) {});
    }

    // merged(rank, left, right) is called for each merge.
    template <class F>
    void merge(std::string_view piece, std::vector<int>& tokens, F merged) const {
        if (piece.size() <= most_short) merge_short(piece, tokens, merged);
        else merge_long(piece, tokens, merged);
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

    // Every symbol has a number that orders its pair with the next one: the merge's rank and then the position. The smallest is
    // searched after every merge: quadratic, but 16 at a time, and fastest for words.
    static constexpr int position_bits = 7, most_short = 1 << position_bits;
    template <class F>
    void merge_short(std::string_view piece, std::vector<int>& tokens, F merged) const {
        int symbol[most_short], n = 0;
        uint8_t next[most_short], previous[most_short];
        uint32_t order[most_short];
        each_byte(piece, [&](int id) { symbol[n++] = id; });
        const auto order_of = [&](int i, int j) {
            const uint32_t rank = merges_.rank(symbol[i], symbol[j]);
            return rank == MergeTable::none ? rank : rank << position_bits | (uint32_t)i;
        };
        for (int i = 0; i < n; i++) {
            next[i] = (uint8_t)(i + 1);
            previous[i] = (uint8_t)(i - 1);
            order[i] = i + 1 < n ? order_of(i, i + 1) : MergeTable::none;
        }
        const int vectors = std::max(1, (n + 15) / 16);
        std::fill(order + n, order + 16 * vectors, MergeTable::none);
        while (true) {
            uint32_t least[16], best = MergeTable::none;
            std::copy(order, order + 16, least);
            for (int v = 1; v < vectors; v++)
                for (int k = 0; k < 16; k++) least[k] = std::min(least[k], order[16 * v + k]);
            for (uint32_t value : least) best = std::min(best, value);
            if (best == MergeTable::none) break;
            const int i = (int)(best % most_short), gone = next[i], after = next[gone];
            merged(best >> position_bits, symbol[i], symbol[gone]);
            symbol[i] = merges_.merged(best >> position_bits);
            next[i] = (uint8_t)after;
            if (after < n) previous[after] = (uint8_t)i;
            order[gone] = MergeTable::none;
            order[i] = after < n ? order_of(i, after) : MergeTable::none;
            if (i > 0) order[previous[i]] = order_of(previous[i], i);
        }
        for (int i = 0; i < n; i = next[i]) tokens.push_back(symbol[i]);
    }

    // For runs of thousands of letters without a space.
    template <class F>
    void merge_long(std::string_view piece, std::vector<int>& tokens, F merged) const {
        std::vector<int> symbol;
        symbol.reserve(piece.size());
        each_byte(piece, [&](int id) { symbol.push_back(id); });
        const auto find = [&](int i, int j) {
            const uint32_t rank = merges_.rank(symbol[i], symbol[j]);
            return rank == MergeTable::none ? Merge() : Merge{(int)rank, merges_.merged(rank)};
        };
        const std::vector<int> next =
            merge_by_rank(symbol, find, [&](int rank, int i, int j) { merged((uint32_t)rank, symbol[i], symbol[j]); });
        for (size_t i = 0; i < symbol.size(); i = (size_t)next[i]) tokens.push_back(symbol[i]);
    }

    uint64_t instance_;
    std::array<int, 256> byte_id_;
    std::unordered_map<std::string, int> by_bytes_;
    MergeTable merges_;
    LeftToRight left_to_right_;
};
