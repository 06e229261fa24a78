// Compares generated text with human references, by the definitions of published numbers:
//   exact match, F1   SQuAD's (Rajpurkar et al., 2016; the official script of 2.0): texts in lower case, without ASCII
//                     punctuation and articles; equal, or the harmonic mean of precision and recall of their words
//   BLEU              Papineni et al. (2002) as computed by sacrebleu (Post, 2018): case, tokens of mteval-v13a, 1- to 4-grams,
//                     exponential smoothing, brevity penalty by the nearest reference; of all texts together, 0 to 100
//                       BLEU = BP exp(1/4 sum log p_n),  p_n = clipped matches / n-grams,  BP = min(1, exp(1 - r / c))
//   ROUGE-N, -L, -Lsum   F of n-grams, of the longest common subsequence, and of the lines' union of these (Lin, 2004) as
//                     computed by rouge-score: words of a-z and 0-9 in lower case, with or without Porter's stemmer
// With several references the best score counts; BLEU clips an n-gram at the maximum of its counts in the references.
// Other languages: SQuAD's words and BLEU's tokens are separated by white space, and ROUGE knows letters a-z only. A Japanese
// text is one token for the first two and none for ROUGE; put spaces between its words, or characters, on both sides.
// Bytes that are not UTF-8 are compared unchanged.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/unicode.h"
#include "../base/utf8.h"
#include "porter_stemmer.h"

using Words = std::vector<std::string>;
using NgramCounts = std::map<std::vector<std::string_view>, int64_t>;

// Splits at white space like Python's str.split().
inline Words split_words(std::string_view text) {
    Words words;
    bool inside = false;
    each_character(text, [&](int32_t c, std::string_view bytes) {
        if (is_python_space(c)) inside = false;
        else if (std::exchange(inside, true)) words.back() += bytes;
        else words.emplace_back(bytes);
    });
    return words;
}

// The words must outlive the counts.
inline NgramCounts count_ngrams(const Words& words, size_t n) {
    NgramCounts counts;
    for (size_t i = 0; i + n <= words.size(); i++) counts[{words.begin() + (long)i, words.begin() + (long)(i + n)}]++;
    return counts;
}
inline int64_t common_ngrams(const NgramCounts& a, const NgramCounts& b) {
    int64_t common = 0;
    for (const auto& [ngram, count] : a)
        if (const auto found = b.find(ngram); found != b.end()) common += std::min(count, found->second);
    return common;
}

// The harmonic mean of precision and recall.
inline double f_measure(int64_t common, int64_t written, int64_t expected) {
    const double precision = (double)common / (double)std::max<int64_t>(written, 1),
                 recall = (double)common / (double)std::max<int64_t>(expected, 1);
    return common ? 2 * precision * recall / (precision + recall) : 0;
}
// The largest of measure(reference).
template <class F>
double best_of(const std::vector<std::string>& references, F measure) {
    double best = 0;
    for (const std::string& reference : references) best = std::max(best, (double)measure(reference));
    return best;
}

// ---- SQuAD -----------------------------------------------------------------------------------------------------------------
// The words of an answer that are compared. (Unlike Python's lower(), this ignores the final form of a Greek sigma.)
inline Words answer_words(std::string_view text) {
    std::string plain, word;
    const auto end_word = [&] {
        if (word == "a" || word == "an" || word == "the") word = " ";
        plain += std::exchange(word, "");
    };
    each_character(lowercase(text), [&](int32_t c, std::string_view bytes) {
        if (c > 0 && c < 0x80 && ispunct(c)) return;
        if (c >= 0 && (c < 0x80 ? isalnum(c) != 0 : is_letter(c) || is_number(c))) word += bytes;
        else {
            end_word();
            plain += bytes;
        }
    });
    end_word();
    return split_words(plain);
}

inline double exact_match(const std::string& text, const std::vector<std::string>& references) {
    const Words words = answer_words(text);
    return best_of(references, [&](const std::string& reference) { return words == answer_words(reference); });
}
inline double word_f1(const std::string& text, const std::vector<std::string>& references) {
    const Words words = answer_words(text);
    const NgramCounts counts = count_ngrams(words, 1);
    return best_of(references, [&](const std::string& reference) {
        const Words expected = answer_words(reference);
        if (words.empty() || expected.empty()) return words.size() == expected.size() ? 1.0 : 0.0;
        const int64_t common = common_ngrams(counts, count_ngrams(expected, 1));
        return f_measure(common, (int64_t)words.size(), (int64_t)expected.size());
    });
}

// ---- BLEU ------------------------------------------------------------------------------------------------------------------
// A text with spaces between its tokens, by the rules of NIST's mteval-v13a.pl. Bytes of characters beyond ASCII are not
// digits, and stay together.
inline std::string separate_tokens_13a(std::string text) {
    const auto replace_all = [&](std::string_view from, std::string_view to) {
        for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) text.replace(at, from.size(), to);
    };
    const auto digit = [](char c) { return c >= '0' && c <= '9'; };
    const auto point = [](char c) { return c == '.' || c == ','; };
    const auto symbol = [](char c) {
        return (c >= ' ' && c <= '&') || (c >= '(' && c <= '+') || c == '/' || (c >= ':' && c <= '@') ||
               (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
    };
    // Pairs of characters that match first and second, without overlaps, get spaces around one of them.
    const auto separate = [&](auto first, auto second, const char* before, const char* between, const char* after) {
        std::string out;
        for (size_t i = 0; i < text.size(); i++)
            if (i + 1 < text.size() && first(text[i]) && second(text[i + 1])) {
                out += std::string(before) + text[i] + between + text[i + 1] + after;
                i++;
            } else out += text[i];
        text = out;
    };
    replace_all("<skipped>", "");
    replace_all("-\n", "");
    replace_all("\n", " ");
    for (const auto& [entity, character] : {std::pair("&quot;", "\""), {"&amp;", "&"}, {"&lt;", "<"}, {"&gt;", ">"}})
        replace_all(entity, character);
    std::string out = " ";
    for (const char c : text) out += symbol(c) ? std::string(" ") + c + " " : std::string(1, c);
    text = out + " ";
    const auto other = [&](char c) { return !digit(c); };
    separate(other, point, "", " ", " ");
    separate(point, other, " ", " ", "");
    separate(
        digit, [](char c) { return c == '-'; }, "", " ", " ");
    return text;
}
inline Words tokens_13a(const std::string& text) {
    return split_words(separate_tokens_13a(std::string(without_trailing_space(text))));
}

// The counts of a text for BLEU; counts of several texts add up.
struct BleuCounts {
    static constexpr size_t orders = 4;
    int64_t length = 0, reference_length = 0;         // in tokens
    std::array<int64_t, orders> matches{}, ngrams{};  // by n - 1

    BleuCounts& operator+=(const BleuCounts& other) { return add(other, 1); }
    BleuCounts operator-(const BleuCounts& other) const { return BleuCounts(*this).add(other, -1); }

private:
    BleuCounts& add(const BleuCounts& other, int64_t sign) {
        length += sign * other.length;
        reference_length += sign * other.reference_length;
        for (size_t i = 0; i < orders; i++) {
            matches[i] += sign * other.matches[i];
            ngrams[i] += sign * other.ngrams[i];
        }
        return *this;
    }
};

inline BleuCounts bleu_counts(const std::string& text, const std::vector<std::string>& references) {
    const Words words = tokens_13a(text);
    std::vector<Words> expected;
    for (const std::string& reference : references) expected.push_back(tokens_13a(reference));
    BleuCounts counts;
    counts.length = (int64_t)words.size();
    const auto distance = [&](const Words& w) { return std::abs((int64_t)w.size() - counts.length); };
    const auto nearest = std::min_element(expected.begin(), expected.end(), [&](const Words& a, const Words& b) {
        return std::pair(distance(a), a.size()) < std::pair(distance(b), b.size());
    });
    counts.reference_length = (int64_t)nearest->size();
    for (size_t n = 1; n <= BleuCounts::orders; n++) {
        NgramCounts most;
        for (const Words& w : expected)
            for (const auto& [ngram, count] : count_ngrams(w, n)) {
                int64_t& known = most[ngram];
                known = std::max(known, count);
            }
        counts.matches[n - 1] = common_ngrams(count_ngrams(words, n), most);
        counts.ngrams[n - 1] = std::max<int64_t>(0, counts.length - (int64_t)n + 1);
    }
    return counts;
}

// An order without matches counts as 1/2 of a match, the next such order as 1/4, and so on.
inline double bleu(const BleuCounts& c) {
    if (c.matches[0] == 0 || c.ngrams[BleuCounts::orders - 1] == 0) return 0;
    double sum = 0, unmatched = 1;
    for (size_t i = 0; i < BleuCounts::orders; i++) {
        if (c.matches[i] == 0) unmatched *= 2;
        const double precision =
            c.matches[i] ? 100.0 * (double)c.matches[i] / (double)c.ngrams[i] : 100.0 / (unmatched * (double)c.ngrams[i]);
        sum += std::log(precision);
    }
    const double brevity = c.length < c.reference_length ? std::exp(1 - (double)c.reference_length / (double)c.length) : 1;
    return brevity * std::exp(sum / BleuCounts::orders);
}

// ---- ROUGE -----------------------------------------------------------------------------------------------------------------
// Two characters beyond ASCII have one of a-z as their lower case.
inline Words rouge_words(std::string_view text, bool stem) {
    Words words;
    bool inside = false;
    each_character(text, [&](int32_t c, std::string_view) {
        const bool dotted = c == 0x130;  // I with a dot, which becomes i and the dot
        c = c == 0x212a ? 'k' : dotted ? 'i' : c >= 'A' && c <= 'Z' ? c + 32 : c;
        const bool counts = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
        if (counts && std::exchange(inside, true)) words.back() += (char)c;
        else if (counts) words.emplace_back(1, (char)c);
        inside = counts && !dotted;
    });
    for (std::string& word : words)
        if (stem && word.size() > 3) word = porter_stem(word);
    return words;
}

inline double rouge_n(const std::string& text, const std::vector<std::string>& references, size_t n, bool stem) {
    const Words words = rouge_words(text, stem);
    const NgramCounts counts = count_ngrams(words, n);
    const auto ngrams = [&](const Words& w) { return std::max<int64_t>(0, (int64_t)w.size() - (int64_t)n + 1); };
    return best_of(references, [&](const std::string& reference) {
        const Words expected = rouge_words(reference, stem);
        return f_measure(common_ngrams(counts, count_ngrams(expected, n)), ngrams(words), ngrams(expected));
    });
}

// Marks the indices of `expected` that are in one of the longest common subsequences: the one that rouge-score finds.
inline std::vector<bool> longest_common_subsequence(const Words& expected, const Words& words) {
    const size_t columns = words.size() + 1;
    std::vector<int> length((expected.size() + 1) * columns);  // of the first i and j words
    for (size_t i = 1; i <= expected.size(); i++)
        for (size_t j = 1; j < columns; j++)
            length[i * columns + j] = expected[i - 1] == words[j - 1]
                                          ? length[(i - 1) * columns + j - 1] + 1
                                          : std::max(length[(i - 1) * columns + j], length[i * columns + j - 1]);
    std::vector<bool> common(expected.size());
    for (size_t i = expected.size(), j = words.size(); i > 0 && j > 0;) {
        if (expected[i - 1] == words[j - 1]) {
            common[--i] = true;
            j--;
        } else if (length[i * columns + j - 1] > length[(i - 1) * columns + j]) j--;
        else i--;
    }
    return common;
}
inline double rouge_l(const std::string& text, const std::vector<std::string>& references, bool stem) {
    const Words words = rouge_words(text, stem);
    return best_of(references, [&](const std::string& reference) {
        const Words expected = rouge_words(reference, stem);
        const std::vector<bool> common = longest_common_subsequence(expected, words);
        return f_measure(std::count(common.begin(), common.end(), true), (int64_t)words.size(), (int64_t)expected.size());
    });
}

// The words of each line.
inline std::vector<Words> rouge_lines(std::string_view text, bool stem) {
    std::vector<Words> lines;
    for (size_t begin = 0, end; begin <= text.size(); begin = end + 1) {
        end = std::min(text.find('\n', begin), text.size());
        lines.push_back(rouge_words(text.substr(begin, end - begin), stem));
    }
    return lines;
}
inline double rouge_l_of_lines(const std::string& text, const std::string& reference, bool stem) {
    const std::vector<Words> lines = rouge_lines(text, stem), expected = rouge_lines(reference, stem);
    // Each word counts as often as both texts have it.
    std::map<std::string_view, int64_t> in_text, in_reference;
    int64_t written = 0, wanted = 0, common = 0;
    for (const Words& line : lines)
        for (const std::string& word : line) {
            written++;
            in_text[word]++;
        }
    for (const Words& line : expected)
        for (const std::string& word : line) {
            wanted++;
            in_reference[word]++;
        }
    for (const Words& line : expected) {
        std::vector<bool> found(line.size());
        for (const Words& other : lines) {
            const std::vector<bool> of_line = longest_common_subsequence(line, other);
            for (size_t i = 0; i < line.size(); i++) found[i] = found[i] || of_line[i];
        }
        for (size_t i = 0; i < line.size(); i++)
            if (found[i] && in_text[line[i]] > 0 && in_reference[line[i]] > 0) {
                common++;
                in_text[line[i]]--;
                in_reference[line[i]]--;
            }
    }
    return f_measure(common, written, wanted);
}
inline double rouge_lsum(const std::string& text, const std::vector<std::string>& references, bool stem) {
    return best_of(references, [&](const std::string& reference) { return rouge_l_of_lines(text, reference, stem); });
}
