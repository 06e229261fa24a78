// Added tokens: strings that are one token wherever they occur, found before all other steps of a tokenizer.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "../base/unicode.h"
#include "pre_tokenizer.h"

struct AddedToken {
    std::string content;
    int id;
    bool special, single_word, lstrip, rstrip;
};

// Finds tokens in text like Hugging Face's library: the leftmost one, and the longest of those that start there.
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
        one_first_byte_ &= token.content[0] == tokens_[0].content[0];
    }

    // The same finder for only the tokens with ids below the limit.
    AddedTokenFinder below(int limit) const {
        AddedTokenFinder kept;
        for (const AddedToken& token : tokens_)
            if (token.id < limit) kept.add(token);
        return kept;
    }

    // Calls on_text(part) and on_token(token) for all of text in order. Special tokens count as text unless requested.
    template <class Text, class Token>
    void split(std::string_view text, bool special, Text on_text, Token on_token) const {
        size_t done = 0;
        for (size_t i = begin_of_any(text, 0); i < text.size(); i = begin_of_any(text, i)) {
            const AddedToken* t = longest(text.substr(i));
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
    // The next byte from i on that starts a token. Usually all tokens start with the same byte.
    size_t begin_of_any(std::string_view text, size_t i) const {
        const char byte = tokens_[0].content[0];
        if (one_first_byte_) return std::min(text.find(byte, i), text.size());
        while (i < text.size() && !first_[(unsigned char)text[i]]) i++;
        return i;
    }

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

    // Length in bytes of the Unicode white space at the start of s; 0 if there is none.
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
    std::array<bool, 256> first_{};                        // first bytes of tokens
    std::unordered_map<uint64_t, int> edges_;              // a trie of the tokens' bytes: node and byte -> node
    std::vector<int> token_at_ = std::vector<int>(1, -1);  // node -> the token that ends there
    bool only_special_ = true, one_first_byte_ = true;
};
