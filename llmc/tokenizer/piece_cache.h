// Caches the tokens of short pieces of text: most words of a text have occurred before. Each thread has its own table, of
// bounded size, for the last tokenizer that it used.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

class PieceCache {
public:
    PieceCache() {
        static std::atomic<uint64_t> instances{0};
        instance_ = ++instances;
    }

    // Appends the same tokens as encode(piece, tokens).
    template <class F>
    void encode_append(std::string_view piece, std::vector<int>& tokens, F encode) const {
        constexpr size_t longest = 48, most = 1 << 18;
        if (piece.size() > longest) return encode(piece, tokens);
        thread_local Table table;
        if (table.owner != instance_) {
            table.owner = instance_;
            table.pieces.clear();
        }
        table.key.assign(piece);
        if (const auto found = table.pieces.find(table.key); found != table.pieces.end()) {
            tokens.insert(tokens.end(), found->second.begin(), found->second.end());
            return;
        }
        const size_t before = tokens.size();
        encode(piece, tokens);
        if (table.pieces.size() >= most) table.pieces.clear();
        table.pieces.emplace(table.key, std::vector<int>(tokens.begin() + (std::ptrdiff_t)before, tokens.end()));
    }

private:
    struct Table {
        uint64_t owner = 0;
        std::string key;
        std::unordered_map<std::string, std::vector<int>> pieces;
    };
    uint64_t instance_;
};
