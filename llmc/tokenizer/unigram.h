// The unigram language model as a tokenizer (Kudo, 2018): every piece has a score, the logarithm of its probability, and a text
// is encoded as the pieces with the largest sum of scores. Found from left to right (Viterbi): the best way to end at a place
// is the best way to end at the start of the last piece, plus that piece. The cost is the text's length times the longest
// piece's.
//
// A character that is not a piece is unknown, at 10 below the lowest score; neighboring ones become one unknown token, or with
// byte fallback the tokens of their bytes, <0x00> .. <0xFF>.
//
// Equal sums: the longer last piece wins. Hugging Face's library keeps sums in double precision, SentencePiece in single, which
// decides between nearly equal encodings: `Score` is one or the other.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"
#include "byte_trie.h"
#include "piece_cache.h"

// The token for a byte: "<0x0A>".
inline std::string byte_token(unsigned char byte) { return format("<0x%02X>", byte); }
// The byte that this token represents; -1: none.
inline int byte_of_token(std::string_view token) {
    if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
    int value = 0;
    for (char c : token.substr(3, 2)) {
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                                 : -1;
        if (digit < 0) return -1;
        value = 16 * value + digit;
    }
    return value;
}

// Handling of characters without a token, shared by the tokenizers whose symbols are characters.
struct UnknownCharacters {
    int id = -1;                  // -1: there is no unknown token
    std::array<int, 256> byte{};  // the tokens of bytes
    bool falls_back = false;      // all of them exist and are used

    UnknownCharacters() { byte.fill(-1); }
};

template <class Score>
class UnigramEncoder {
public:
    struct Piece {
        std::string text;
        double score;
        int id;
        bool user_defined = false;  // preferred to any way to split it, by SentencePiece's formula
    };

    // min_score: the lowest score of a piece, max_score: the highest; both include pieces outside the list.
    UnigramEncoder(const std::vector<Piece>& pieces, UnknownCharacters unknown, double min_score, double max_score)
        : unknown_(unknown), unknown_score_((Score)min_score - (Score)10) {
        std::vector<std::pair<std::string, int>> strings;
        for (const Piece& p : pieces) {
            strings.emplace_back(p.text, p.id);
            if ((size_t)p.id >= scores_.size()) scores_.resize((size_t)p.id + 1);
            scores_[(size_t)p.id] = p.user_defined ? (double)((Score)p.text.size() * (Score)max_score) - 0.1 : p.score;
        }
        trie_ = ByteTrie(std::move(strings));
    }

    // Bytes that are not UTF-8 count as characters of one byte.
    void encode_append(std::string_view text, std::vector<int>& tokens) const {
        cache_.encode_append(text, tokens, [&](std::string_view t, std::vector<int>& out) { best_way(t, out); });
    }

private:
    static constexpr int no_way = -1, unknown_way = -2;
    struct Node {  // the best way to end here: its sum, its last token, and that token's start
        Score score;
        int32_t id, begin;
    };

    void best_way(std::string_view text, std::vector<int>& tokens) const {
        if (text.size() > INT32_MAX) fail("a text of %zu bytes is too long; at most %d are", text.size(), INT32_MAX);
        thread_local std::vector<Node> nodes;
        nodes.assign(text.size() + 1, Node{0, -1, -1});
        for (size_t begin = 0; begin < text.size();) {
            const size_t length = first_character(text.substr(begin)).length;
            const Score before = nodes[begin].score;
            const auto consider = [&](int id, size_t n, Score sum) {
                Node& node = nodes[begin + n];
                if (node.id == no_way || sum > node.score) node = {sum, id, (int32_t)begin};
            };
            bool single = false;
            trie_.prefixes(text.substr(begin), [&](int id, size_t n) {
                consider(id, n, (Score)(scores_[(size_t)id] + before));
                single |= n == length;
            });
            if (!single) consider(unknown_way, length, unknown_score_ + before);
            begin += length;
        }
        const size_t first = tokens.size();
        for (size_t end = text.size(); end > 0;) {
            const Node& node = nodes[end];
            size_t begin = (size_t)node.begin;
            if (node.id == unknown_way) {
                while (begin > 0 && nodes[begin].id == unknown_way) begin = (size_t)nodes[begin].begin;
                add_unknown(text.substr(begin, end - begin), tokens);
            } else {
                tokens.push_back(node.id);
            }
            end = begin;
        }
        std::reverse(tokens.begin() + (std::ptrdiff_t)first, tokens.end());
    }

    // From the last token to the first. Adjacent unknown characters may form a token, which is then used (as in Hugging Face's
    // library).
    void add_unknown(std::string_view text, std::vector<int>& tokens) const {
        if (const int id = std::is_same_v<Score, double> ? trie_.find(text) : -1; id >= 0) tokens.push_back(id);
        else if (unknown_.falls_back)
            for (size_t i = text.size(); i > 0; i--) tokens.push_back(unknown_.byte[(unsigned char)text[i - 1]]);
        else if (unknown_.id >= 0) tokens.push_back(unknown_.id);
    }

    PieceCache cache_;
    ByteTrie trie_;
    std::vector<double> scores_;
    UnknownCharacters unknown_;
    Score unknown_score_;
};
