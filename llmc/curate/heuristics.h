// Rules that distinguish running text from menus, lists, logs, code and spam, as published by the makers of three corpora:
//   gopher    Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1: quality, and repetition (table A1)
//   c4        Raffel et al. 2020 (JMLR 21:140), section 2.2, and the code they released (TensorFlow Datasets, c4_utils.py)
//   fineweb   Penedo et al. 2024 (arXiv:2406.17557), section 3.5, and the code they released (datatrove)
// Every rule is a row of one table: name, source, measure, threshold. A document is dropped by the first rule that it breaks;
// C4's rules for lines remove lines instead. Measured as in datatrove 0.10 (compared rule by rule in test-interop), except for
// two things that need a language's own tokenizer there: words are separated by white space (as in RedPajama and Dolma), and a
// sentence ends with . ? ! before white space.
//
// Languages. If most letters belong to a script without spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese,
// Tibetan), the rules that count words or letters of a line do not apply (`spaced` below). gopher-stop-words is for English:
// without a list of words (--stop-words) it does not apply to a document whose key `language`, from the stage or the input, is
// not en.
//
// N-grams are compared by 64-bit hashes: in a document of 100,000 words two different ones collide with probability
// 3e-10.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "../base/check.h"
#include "../base/hash.h"
#include "../base/similar.h"
#include "../base/unicode.h"
#include "../data/shares.h"
#include "document.h"
#include "words.h"

// ---- measures --------------------------------------------------------------------------------------------------------------
// 64 bits of a word; well mixed, so that weighted sums of them distinguish n-grams.
inline uint64_t hash_text(std::string_view text) {
    uint64_t h = text.size() * 0x9e3779b97f4a7c15u;
    for (; text.size() >= 8; text.remove_prefix(8)) {
        uint64_t eight;
        memcpy(&eight, text.data(), 8);
        h = mix64(h ^ eight) + 0x9e3779b97f4a7c15u;
    }
    uint64_t last = 0;
    memcpy(&last, text.data(), text.size());
    return mix64(h ^ last);
}

// The code of the last character of a text that is not empty.
inline int32_t last_character(std::string_view text) {
    size_t at = text.size() - 1;
    while (at > 0 && !begins_character(text[at])) at--;
    return first_character(text.substr(at)).code;
}
inline int64_t count_places(std::string_view text, std::string_view word) {
    int64_t n = 0;
    for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + word.size())) n++;
    return n;
}

// Length in bytes of the white space at the start of a text; 0: none.
inline size_t space_length(std::string_view text) {
    const auto c = (unsigned char)text[0];
    if (c < 0x80) return is_python_space(c);
    if (c != 0xc2 && c != 0xe1 && c != 0xe2 && c != 0xe3) return 0;
    const Utf8Character first = first_character(text);
    return is_space(first.code) ? first.length : 0;
}
inline std::string_view without_spaces_around(std::string_view text) {
    while (!text.empty()) {
        const size_t n = space_length(text);
        if (n == 0) break;
        text.remove_prefix(n);
    }
    while (!text.empty()) {
        size_t begin = text.size() - 1;
        while (begin > 0 && text.size() - begin < 3 && !begins_character(text[begin])) begin--;
        if (space_length(text.substr(begin)) != text.size() - begin) break;
        text.remove_suffix(text.size() - begin);
    }
    return text;
}

// Calls each(word) for the words between white space.
template <class F>
void each_word(std::string_view text, F each) {
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
        const size_t n = space_length(text.substr(i));
        if (n == 0) {
            i++;
            continue;
        }
        if (i > begin) each(text.substr(begin, i - begin));
        i += n;
        begin = i;
    }
    if (begin < text.size()) each(text.substr(begin));
}
// Calls each(part) for the parts between the separators.
template <class F>
void each_part(std::string_view text, char separator, F each) {
    for (;;) {
        const size_t end = text.find(separator);
        each(text.substr(0, end));
        if (end == std::string_view::npos) return;
        text.remove_prefix(end + 1);
    }
}

// Scripts that are written without spaces between words.
inline bool is_unspaced(int32_t c) {
    return (c >= 0x0e00 && c <= 0x0eff) || (c >= 0x0f00 && c <= 0x0fff) || (c >= 0x1000 && c <= 0x109f) ||
           (c >= 0x1780 && c <= 0x17ff) || (c >= 0x3040 && c <= 0x30ff) || (c >= 0x3400 && c <= 0x9fff) ||
           (c >= 0xf900 && c <= 0xfaff) || (c >= 0xff66 && c <= 0xff9f) || (c >= 0x20000 && c <= 0x3134f);
}

// Unicode's property Sentence_Terminal (Unicode 14) and the equivalent Khmer signs, as ranges: the ends of sentences in any
// script.
inline bool ends_sentence(int32_t c) {
    static constexpr std::array<std::array<int32_t, 2>, 79> ranges = {
        {{0x589, 0x589},     {0x61d, 0x61f},     {0x6d4, 0x6d4},     {0x700, 0x702},     {0x7f9, 0x7f9},     {0x837, 0x837},
         {0x839, 0x839},     {0x83d, 0x83e},     {0x964, 0x965},     {0x104a, 0x104b},   {0x1362, 0x1362},   {0x1367, 0x1368},
         {0x166e, 0x166e},   {0x1735, 0x1736},   {0x17d5, 0x17d6},   {0x17d9, 0x17da},   {0x1803, 0x1803},   {0x1809, 0x1809},
         {0x1944, 0x1945},   {0x1aa8, 0x1aab},   {0x1b5a, 0x1b5b},   {0x1b5e, 0x1b5f},   {0x1b7d, 0x1b7e},   {0x1c3b, 0x1c3c},
         {0x1c7e, 0x1c7f},   {0x203c, 0x203d},   {0x2047, 0x2049},   {0x2e2e, 0x2e2e},   {0x2e3c, 0x2e3c},   {0x2e53, 0x2e54},
         {0x3002, 0x3002},   {0xa4ff, 0xa4ff},   {0xa60e, 0xa60f},   {0xa6f3, 0xa6f3},   {0xa6f7, 0xa6f7},   {0xa876, 0xa877},
         {0xa8ce, 0xa8cf},   {0xa92f, 0xa92f},   {0xa9c8, 0xa9c9},   {0xaa5d, 0xaa5f},   {0xaaf0, 0xaaf1},   {0xabeb, 0xabeb},
         {0xfe52, 0xfe52},   {0xfe56, 0xfe57},   {0xff01, 0xff01},   {0xff0e, 0xff0e},   {0xff1f, 0xff1f},   {0xff61, 0xff61},
         {0x10a56, 0x10a57}, {0x10f55, 0x10f59}, {0x10f86, 0x10f89}, {0x11047, 0x11048}, {0x110be, 0x110c1}, {0x11141, 0x11143},
         {0x111c5, 0x111c6}, {0x111cd, 0x111cd}, {0x111de, 0x111df}, {0x11238, 0x11239}, {0x1123b, 0x1123c}, {0x112a9, 0x112a9},
         {0x1144b, 0x1144c}, {0x115c2, 0x115c3}, {0x115c9, 0x115d7}, {0x11641, 0x11642}, {0x1173c, 0x1173e}, {0x11944, 0x11944},
         {0x11946, 0x11946}, {0x11a42, 0x11a43}, {0x11a9b, 0x11a9c}, {0x11c41, 0x11c42}, {0x11ef7, 0x11ef8}, {0x11f43, 0x11f44},
         {0x16a6e, 0x16a6f}, {0x16af5, 0x16af5}, {0x16b37, 0x16b38}, {0x16b44, 0x16b44}, {0x16e98, 0x16e98}, {0x1bc9f, 0x1bc9f},
         {0x1da88, 0x1da88}}};
    if (c < 0x80) return c == '.' || c == '!' || c == '?';
    const auto after =
        std::upper_bound(ranges.begin(), ranges.end(), c, [](int32_t x, const auto& range) { return x < range[0]; });
    return after != ranges.begin() && c <= after[-1][1];
}

struct Word {
    uint64_t hash;
    int32_t characters;
    bool symbols;  // only punctuation, symbols and control characters
    bool letter;   // at least one letter
};

// A set of hashes with a count each, cleared in constant time: entries of earlier texts have another generation.
class HashCounts {
public:
    void clear(size_t entries) {
        size_t size = 64;
        while (size < 2 * entries) size *= 2;
        if (size > slots_.size() || ++generation_ == 0) {
            slots_.assign(std::max(size, slots_.size()), {});
            generation_ = 1;
        }
        mask_ = size - 1;
    }
    // Increments the count of `hash`, found at `place`.
    struct Slot {
        uint64_t hash = 0;
        uint32_t generation = 0;
        int32_t count = 0;
        int64_t first = 0;  // the place of its first occurrence
    };
    const Slot& add(uint64_t hash, size_t place) {
        for (size_t i = hash & mask_;; i = (i + 1) & mask_) {
            Slot& slot = slots_[i];
            if (slot.generation != generation_) slot = {hash, generation_, 0, (int64_t)place};
            if (slot.hash != hash) continue;
            slot.count++;
            return slot;
        }
    }

private:
    std::vector<Slot> slots_;
    size_t mask_ = 0;
    uint32_t generation_ = 0;
};

// A text's words, lines and paragraphs, each computed when a rule first needs it.
class TextMeasures {
public:
    explicit TextMeasures(std::string_view text) : text_(text), characters_((double)count_characters(text)) {}

    std::string_view text() const { return text_; }
    double characters() const { return characters_; }

    // Most letters belong to scripts with spaces between words.
    bool spaced() {
        if (spaced_ < 0) {
            int64_t without = 0, others = 0;
            for (size_t i = 0; i < text_.size();) {
                const auto c = (unsigned char)text_[i];
                if (c < 0x80) {
                    others += (c | 32) >= 'a' && (c | 32) <= 'z';
                    i++;
                    continue;
                }
                const Utf8Character first = first_character(text_.substr(i));
                if (is_unspaced(first.code)) without++;
                else others += first.code >= 0xc0 && !(first.code >= 0x2000 && first.code <= 0x303f);
                i += first.length;
            }
            spaced_ = without <= others;
        }
        return spaced_ != 0;
    }

    const std::vector<Word>& words() {
        if (!has_words_)
            each_word(text_, [&](std::string_view word) {
                bool symbols = true, letter = false;
                for (size_t i = 0; i < word.size() && (symbols || !letter);) {
                    const auto c = (unsigned char)word[i];
                    if (c < 0x80) {
                        const bool is_ascii_letter = (c | 32) >= 'a' && (c | 32) <= 'z';
                        letter |= is_ascii_letter;
                        symbols &= !is_ascii_letter && !(c >= '0' && c <= '9');
                        i++;
                        continue;
                    }
                    const Utf8Character first = first_character(word.substr(i));
                    letter |= is_letter(first.code);
                    symbols &= is_punctuation(first.code) || (first.code >= 0x80 && first.code < 0xa0);
                    i += first.length;
                }
                words_.push_back({hash_text(word), (int32_t)count_characters(word), symbols, letter});
            });
        has_words_ = true;
        return words_;
    }
    double n_words() { return (double)words().size(); }
    // Words that are more than punctuation, and their mean length.
    double real_words() {
        return (double)std::count_if(words().begin(), words().end(), [](const Word& w) { return !w.symbols; });
    }
    double mean_word_length() {
        double sum = 0;
        for (const Word& w : words()) sum += w.symbols ? 0 : w.characters;
        return sum / real_words();
    }

    // Lines end with LF or CR LF; other ends that str.splitlines() knows are not ends here.
    const std::vector<std::string_view>& lines() {
        if (lines_.empty() && !text_.empty()) {
            std::string_view text = text_;
            if (text.back() == '\n') text.remove_suffix(1);
            each_part(text, '\n', [&](std::string_view line) {
                if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
                lines_.push_back(line);
            });
        }
        return lines_;
    }
    template <class F>
    double share_of_lines(F with) {
        return (double)std::count_if(lines().begin(), lines().end(), with) / (double)lines().size();
    }

    // Fractions of repeated parts: of their number, and of the text's characters.
    struct Repeated {
        double parts = 0, characters = 0;
    };
    // Parts between `newlines` or more newlines.
    const Repeated& repeated(int newlines) {
        Repeated& r = repeated_[newlines - 1];
        if (has_repeated_[newlines - 1]) return r;
        has_repeated_[newlines - 1] = true;
        std::string_view text = newlines == 1 ? text_ : without_spaces_around(text_);
        std::unordered_set<std::string_view> seen;
        int64_t parts = 0, again = 0, characters = 0;
        const auto take = [&](std::string_view part) {
            parts++;
            if (seen.insert(part).second) return;
            again++;
            characters += count_characters(part);
        };
        size_t begin = 0;
        for (size_t at = text.find('\n'); at != std::string_view::npos;) {
            size_t end = at;
            while (end < text.size() && text[end] == '\n') end++;
            if (end - at >= (size_t)newlines) {
                take(text.substr(begin, at - begin));
                begin = end;
            }
            at = text.find('\n', end);
        }
        take(text.substr(begin));
        r = {(double)again / (double)parts, (double)characters / characters_};
        return r;
    }

    // The fraction of characters in the most frequent n-gram of words; among equally frequent ones the first counts.
    double top_n_gram(int n) {
        const size_t count = n_grams(n);
        if (count == 0) return 0;
        HashCounts& counts = table(count);
        HashCounts::Slot top;
        for (size_t i = 0; i < count; i++) {
            const HashCounts::Slot& slot = counts.add(hash_of(i, n), i);
            if (slot.count > top.count || (slot.count == top.count && slot.first < top.first)) top = slot;
        }
        return (double)(length_of((size_t)top.first, n) + n - 1) * top.count / characters_;
    }
    // The fraction of characters in repeated n-grams of words; characters are counted at most once.
    double repeated_n_grams(int n) {
        const size_t count = n_grams(n);
        if (count == 0) return 0;
        HashCounts& counts = table(count);
        int64_t characters = 0;
        for (size_t i = 0; i < count;) {
            if (counts.add(hash_of(i, n), i).count == 1) {
                i++;
                continue;
            }
            characters += length_of(i, n);
            i += (size_t)n;
        }
        return (double)characters / characters_;
    }

private:
    // Hashes of n-grams are differences of one running sum, hash = sum of word i times base^(n - 1 - i); so are their lengths.
    static constexpr uint64_t base = 0x9e3779b97f4a7c15u;
    static constexpr int longest = 10;
    static constexpr std::array<uint64_t, longest + 1> powers = [] {
        std::array<uint64_t, longest + 1> p{};
        p[0] = 1;
        for (size_t i = 1; i < p.size(); i++) p[i] = p[i - 1] * base;
        return p;
    }();
    size_t n_grams(int n) {
        if (sums_.empty()) {
            sums_.push_back(0);
            lengths_.push_back(0);
            for (const Word& w : words()) {
                sums_.push_back(sums_.back() * base + w.hash);
                lengths_.push_back(lengths_.back() + w.characters);
            }
        }
        return words().size() < (size_t)n ? 0 : words().size() - (size_t)n + 1;
    }
    uint64_t hash_of(size_t i, int n) const { return mix64(sums_[i + (size_t)n] - sums_[i] * powers[(size_t)n]); }
    int64_t length_of(size_t i, int n) const { return lengths_[i + (size_t)n] - lengths_[i]; }
    static HashCounts& table(size_t entries) {
        thread_local HashCounts counts;
        counts.clear(entries);
        return counts;
    }

    std::string_view text_;
    double characters_;
    int spaced_ = -1;
    bool has_words_ = false, has_repeated_[2] = {};
    std::vector<Word> words_;
    std::vector<std::string_view> lines_;
    Repeated repeated_[2];
    std::vector<uint64_t> sums_;
    std::vector<int64_t> lengths_;
};

// ---- the rules -------------------------------------------------------------------------------------------------------------
inline constexpr double rule_off = std::numeric_limits<double>::quiet_NaN();

struct HeuristicRule {
    enum class Kind { at_least, at_most, lines, other };  // lines: removes lines; other: drops the document, as `measured` says
    const char *name, *source, *measured;
    Kind kind;
    double threshold;
    bool spaced;                       // only for scripts with spaces between words
    double (*measure)(TextMeasures&);  // null: c4_text() below applies the rule

    std::string set() const { return std::string(name).substr(0, std::string(name).find('-')); }
};

inline const std::vector<HeuristicRule>& heuristic_rules() {
    using M = TextMeasures;
    using View = std::string_view;
    const auto at_least = HeuristicRule::Kind::at_least, at_most = HeuristicRule::Kind::at_most,
               lines = HeuristicRule::Kind::lines, other = HeuristicRule::Kind::other;
    const char *quality = "Gopher A.1.1", *repetition = "Gopher table A1", *c4 = "C4 2.2", *c4_code = "C4's code",
               *fineweb = "FineWeb 3.5", *fineweb_code = "FineWeb's code";
    static const std::vector<HeuristicRule> rules = {
        {"gopher-min-words", quality, "words that are more than punctuation", at_least, 50, true,
         [](M& m) { return m.real_words(); }},
        {"gopher-max-words", quality, "the same", at_most, 100000, true, [](M& m) { return m.real_words(); }},
        {"gopher-min-word-length", quality, "average word length in characters", at_least, 3, true,
         [](M& m) { return m.mean_word_length(); }},
        {"gopher-max-word-length", quality, "the same", at_most, 10, true, [](M& m) { return m.mean_word_length(); }},
        {"gopher-hashes", quality, "# per word", at_most, 0.1, true,
         [](M& m) { return (double)count_places(m.text(), "#") / m.n_words(); }},
        {"gopher-ellipses", quality, "... and … per word", at_most, 0.1, true,
         [](M& m) { return (double)(count_places(m.text(), "...") + count_places(m.text(), "…")) / m.n_words(); }},
        {"gopher-bullets", quality, "fraction of lines that start with a bullet (•, -)", at_most, 0.9, false,
         [](M& m) {
             return m.share_of_lines([](View line) {
                 line = without_spaces_around(line);
                 return begins_with(line, "•") || begins_with(line, "-");
             });
         }},
        {"gopher-ellipsis-lines", quality, "fraction of lines that end with an ellipsis", at_most, 0.3, false,
         [](M& m) {
             return m.share_of_lines([](View line) {
                 line = without_spaces_around(line);
                 return ends_with(line, "...") || ends_with(line, "…");
             });
         }},
        {"gopher-alphabetic-words", quality, "fraction of words with a letter", at_least, 0.8, true,
         [](M& m) {
             const auto& words = m.words();
             return (double)std::count_if(words.begin(), words.end(), [](const Word& w) { return w.letter; }) / m.n_words();
         }},
        {"gopher-stop-words", quality, "how many of the stop words occur (--stop-words)", at_least, 2, true, nullptr},
        {"gopher-repeated-paragraphs", repetition, "fraction of repeated paragraphs", at_most, 0.3, false,
         [](M& m) { return m.repeated(2).parts; }},
        {"gopher-repeated-paragraph-characters", repetition, "their fraction of all characters", at_most, 0.2, false,
         [](M& m) { return m.repeated(2).characters; }},
        {"gopher-repeated-lines", repetition, "fraction of repeated lines", at_most, 0.3, false,
         [](M& m) { return m.repeated(1).parts; }},
        {"gopher-repeated-line-characters", repetition, "their fraction of all characters", at_most, 0.2, false,
         [](M& m) { return m.repeated(1).characters; }},
        {"gopher-top-2-gram", repetition, "fraction of characters in the most frequent word n-gram", at_most, 0.2, true,
         [](M& m) { return m.top_n_gram(2); }},
        {"gopher-top-3-gram", repetition, "the same", at_most, 0.18, true, [](M& m) { return m.top_n_gram(3); }},
        {"gopher-top-4-gram", repetition, "the same", at_most, 0.16, true, [](M& m) { return m.top_n_gram(4); }},
        {"gopher-repeated-5-grams", repetition, "fraction of characters in repeated word n-grams", at_most, 0.15, true,
         [](M& m) { return m.repeated_n_grams(5); }},
        {"gopher-repeated-6-grams", repetition, "the same", at_most, 0.14, true, [](M& m) { return m.repeated_n_grams(6); }},
        {"gopher-repeated-7-grams", repetition, "the same", at_most, 0.13, true, [](M& m) { return m.repeated_n_grams(7); }},
        {"gopher-repeated-8-grams", repetition, "the same", at_most, 0.12, true, [](M& m) { return m.repeated_n_grams(8); }},
        {"gopher-repeated-9-grams", repetition, "the same", at_most, 0.11, true, [](M& m) { return m.repeated_n_grams(9); }},
        {"gopher-repeated-10-grams", repetition, "the same", at_most, 0.1, true, [](M& m) { return m.repeated_n_grams(10); }},
        {"c4-word-length", c4_code, "lines with a longer word, in characters, are removed", lines, 1000, true, nullptr},
        {"c4-citations", c4_code, "[1], [edit], [citation needed] are removed", lines, 1, false, nullptr},
        {"c4-line-end", c4, "lines that do not end with . ? ! \" ' or that end with ... are removed", lines, 1, false, nullptr},
        {"c4-line-words", c4, "lines of fewer words are removed", lines, 3, true, nullptr},
        {"c4-lorem-ipsum", c4, "a document with \"lorem ipsum\" is dropped", other, 1, false, nullptr},
        {"c4-javascript", c4, "lines with \"javascript\" are removed", lines, 1, false, nullptr},
        {"c4-curly-bracket", c4, "a document with { is dropped", other, 1, false, nullptr},
        {"c4-policy", c4_code, "lines about cookies, terms of use and privacy are removed", lines, 1, false, nullptr},
        {"c4-sentences", c4, "sentences in the lines that remain", at_least, 5, false, nullptr},
        {"c4-bad-words", c4, "a document with a word of --bad-words is dropped", other, 1, false, nullptr},
        {"fineweb-line-ends", fineweb, "fraction of lines that end like a sentence", at_least, 0.12, false, nullptr},
        {"fineweb-short-lines", fineweb, "fraction of lines of at most 30 characters", at_most, 0.67, true, nullptr},
        {"fineweb-repeated-line-characters", fineweb, "fraction of characters in repeated lines (their code: 0.01)", at_most,
         0.1, false, nullptr},
        {"fineweb-lines-per-word", fineweb_code, "newlines per word", at_most, 0.3, true,
         [](M& m) { return (double)count_places(m.text(), "\n") / m.n_words(); }},
    };
    return rules;
}

// "gopher-min-words=100", or =off: threshold of a rule, by its index.
inline std::pair<size_t, double> parse_rule_setting(const std::string& text) {
    const size_t equals = std::min(text.find('='), text.size());
    const std::string name = text.substr(0, equals), value = text.substr(std::min(equals + 1, text.size()));
    const std::vector<HeuristicRule>& rules = heuristic_rules();
    std::vector<std::string> names;
    for (const HeuristicRule& rule : rules) names.emplace_back(rule.name);
    const size_t index = (size_t)(std::find(names.begin(), names.end(), name) - names.begin());
    if (index == rules.size())
        fail_usage("--set names '%s', which is not a rule%s HINT: train_gpt help rules lists them", name.c_str(),
                   did_you_mean(name, names).c_str());
    if (value == "off") return {index, rule_off};
    const double threshold = parse_number(value);
    refuse_value(!(threshold >= 0) || !std::isfinite(threshold), "--set " + name, value, "a number of at least 0, or off");
    return {index, threshold};
}

struct HeuristicOptions {
    std::vector<std::string> sets;        // gopher, c4, fineweb, in the order in which they are applied
    std::vector<std::string> settings;    // RULE=VALUE
    std::vector<std::string> stop_words;  // empty: Gopher's
    std::vector<std::string> bad_words;   // for c4-bad-words, in lower case
};

class Heuristics {
public:
    explicit Heuristics(const HeuristicOptions& o) : stop_words_(o.stop_words), own_stop_words_(!o.stop_words.empty()) {
        if (stop_words_.empty()) stop_words_ = {"the", "be", "to", "of", "and", "that", "have", "with"};
        if (stop_words_.size() > 64) fail_usage("--stop-words has %zu words; at most 64 are allowed", stop_words_.size());
        for (const std::string& word : o.bad_words)
            if (const std::string words = simple_words(word); !words.empty()) bad_words_.push_back(" " + words);
        const std::vector<HeuristicRule>& rules = heuristic_rules();
        for (const HeuristicRule& rule : rules) thresholds_.push_back(rule.threshold);
        std::vector<bool> changed(rules.size());
        for (const std::string& setting : o.settings) {
            const auto [index, threshold] = parse_rule_setting(setting);
            refuse_idle(std::find(o.sets.begin(), o.sets.end(), rules[index].set()) == o.sets.end(), "--set " + setting,
                        "--heuristics " + rules[index].set());
            if (changed[index]) fail_usage("--set names the rule %s twice", rules[index].name);
            changed[index] = true;
            thresholds_[index] = threshold;
        }
        for (const std::string& set : o.sets)
            for (size_t i = 0; i < rules.size(); i++)
                if (rules[i].set() == set) order_.push_back(i);
    }

    // The first rule that the document breaks, if any. C4's rules may remove lines.
    DocumentVerdict apply(Document& d, Changes& changes) const {
        const std::string_view language = d.fields.get("language");
        const bool english = language.empty() || language == "\"en\"";
        TextMeasures measures(d.text);
        for (const size_t i : order_) {
            const HeuristicRule& rule = heuristic_rules()[i];
            const std::string_view name = rule.name;
            if (begins_with(name, "c4-")) {  // one function applies all of them, at the first one
                if (name != "c4-word-length") continue;
                const DocumentVerdict v = c4_text(d, measures.spaced(), changes);
                if (!v.keep) return v;
                measures = TextMeasures(d.text);
                continue;
            }
            if (std::isnan(thresholds_[i]) || (rule.spaced && !measures.spaced())) continue;
            if (name == "gopher-stop-words" && !english && !own_stop_words_) continue;
            const DocumentVerdict v = judged(i, measured(rule, measures));
            if (!v.keep) return v;
        }
        return {};
    }

    // A rule's measure of a text: for tests and for people who choose thresholds.
    double measured(const HeuristicRule& rule, TextMeasures& m) const {
        const std::string_view name = rule.name;
        if (rule.measure) return rule.measure(m);
        if (name == "gopher-stop-words") {
            uint64_t found = 0;
            each_word(m.text(), [&](std::string_view word) {
                for (size_t i = 0; i < stop_words_.size(); i++)
                    if (word == stop_words_[i]) found |= 1ull << i;
            });
            return (double)__builtin_popcountll(found);
        }
        double lines = 0, ends = 0, brief = 0, repeated = 0, characters = 0;
        std::unordered_set<std::string_view> seen;
        each_part(m.text(), '\n', [&](std::string_view line) {
            const int64_t n = count_characters(line);
            characters += (double)n;
            if (without_spaces_around(line).empty()) return;
            lines++;
            brief += n <= 30;
            ends += ends_sentence(last_character(line));
            if (!seen.insert(line).second) repeated += (double)n;
        });
        if (name == "fineweb-line-ends") return ends / lines;
        if (name == "fineweb-short-lines") return brief / lines;
        CHECK(name == "fineweb-repeated-line-characters", "rule %s", rule.name);
        return repeated / characters;
    }

private:
    static size_t index_of(std::string_view name) {
        for (size_t i = 0; i < heuristic_rules().size(); i++)
            if (name == heuristic_rules()[i].name) return i;
        CHECK(false, "there is no such rule");
        return 0;
    }
    DocumentVerdict judged(size_t i, double value) const {
        const HeuristicRule& rule = heuristic_rules()[i];
        const bool low = rule.kind == HeuristicRule::Kind::at_least,
                   good = low ? value >= thresholds_[i] : value <= thresholds_[i];
        if (good) return {};  // false for NaN
        return {false, rule.name, format("%.4g; %s %.4g is kept", value, low ? "at least" : "at most", thresholds_[i])};
    }
    double threshold(const char* name) const { return thresholds_[index_of(name)]; }
    bool on(const char* name) const { return threshold(name) > 0; }  // off is NaN

    // Lower case words of letters and digits with single spaces between and around them, in which bad words are searched. In
    // scripts without spaces each character is a word, so that bad words are found anywhere, as in C4.
    static std::string simple_words(std::string_view text) {
        const std::string lower = lowercase(text);
        std::string out;
        bool open = false;
        for (size_t i = 0; i < lower.size();) {
            const FoldedCharacter c = FoldingTable::instance().at(lower, i);
            const bool alone = c.kind == CharacterKind::ideograph;
            const bool in_word =
                c.kind == CharacterKind::letter || c.kind == CharacterKind::digit || c.kind == CharacterKind::mark;
            if (open && !in_word) out += ' ';
            if (alone || in_word) out.append(lower, i, c.length);
            if (alone) out += ' ';
            open = in_word;
            i += c.length;
        }
        return open ? out + ' ' : out;
    }
    // Ends of sentences before white space or the line's end; a tail counts as one.
    static int64_t sentences(std::string_view line) {
        int64_t n = 0;
        bool open = false;
        for (size_t i = 0; i < line.size();) {
            const Utf8Character c = first_character(line.substr(i));
            i += c.length;
            const bool mark = ends_sentence(c.code);
            if (mark && open && (c.code > 0x2000 || i == line.size() || space_length(line.substr(i)) > 0)) {
                n++;
                open = false;
            } else if (!mark && !is_space(c.code)) open = true;
        }
        return n + open;
    }
    static std::string without_citations(std::string_view line) {
        std::string out;
        for (size_t i = 0; i < line.size();) {
            size_t n = 0;
            if (line[i] == '[') {
                n = 1;
                while (i + n < line.size() && isdigit((unsigned char)line[i + n])) n++;
                n = i + n < line.size() && line[i + n] == ']' ? n + 1 : 0;
                for (const char* word : {"[edit]", "[citation needed]"})
                    if (begins_with(line.substr(i), word)) n = strlen(word);
            }
            if (n == 0) out += line[i++];
            i += n;
        }
        return out;
    }

    DocumentVerdict c4_text(Document& d, bool spaced, Changes& changes) const {
        // Each rule by its name, looked up once.
        struct Thresholds {
            double word_length, line_words, sentences;
            bool citations, line_end, lorem, javascript, bracket, policy, bad_words;
        };
        const Thresholds t = {spaced ? threshold("c4-word-length") : rule_off,
                              spaced ? threshold("c4-line-words") : rule_off,
                              threshold("c4-sentences"),
                              on("c4-citations"),
                              on("c4-line-end"),
                              on("c4-lorem-ipsum"),
                              on("c4-javascript"),
                              on("c4-curly-bracket"),
                              on("c4-policy"),
                              on("c4-bad-words") && !bad_words_.empty()};
        if (t.bad_words) {
            const std::string words = " " + simple_words(d.text);
            for (const std::string& bad : bad_words_)
                if (words.find(bad) != std::string::npos) return {false, "c4-bad-words", "a word of --bad-words"};
        }
        std::string kept;
        int64_t n_sentences = 0;
        bool first = true;
        const auto take = [&](std::string_view whole) -> DocumentVerdict {
            std::string_view line = without_spaces_around(whole);
            int64_t words = 0, longest = 0;
            each_word(line, [&](std::string_view word) {
                words++;
                longest = std::max(longest, count_characters(word));
            });
            const auto without = [&](const char* rule) {
                if (!line.empty()) changes.push_back({rule, 1});
                return DocumentVerdict{};
            };
            if ((double)longest > t.word_length) return without("c4-word-length");
            std::string cited;
            if (t.citations && line.find('[') != std::string_view::npos) {
                cited = without_citations(line);
                if (cited.size() < line.size()) changes.push_back({"c4-citations", 1});
                line = cited;
            }
            if (t.line_end && (!c4_line_end(line) || ends_with(line, "..."))) return without("c4-line-end");
            if ((double)words < t.line_words) return without("c4-line-words");
            const std::string low = lower_ascii(line);  // the phrases are ASCII
            if (t.lorem && low.find("lorem ipsum") != std::string::npos) return {false, "c4-lorem-ipsum", "lorem ipsum"};
            if (t.javascript && low.find("javascript") != std::string::npos) return without("c4-javascript");
            if (t.bracket && line.find('{') != std::string_view::npos) return {false, "c4-curly-bracket", "{"};
            for (const char* phrase :
                 {"terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"})
                if (t.policy && low.find(phrase) != std::string::npos) return without("c4-policy");
            n_sentences += sentences(line);
            kept += (first ? "" : "\n") + std::string(line);
            first = false;
            return {};
        };
        DocumentVerdict verdict;
        TextMeasures measures(d.text);
        for (const std::string_view line : measures.lines())
            if (verdict = take(line); !verdict.keep) return verdict;
        if (!std::isnan(t.sentences)) verdict = judged(index_of("c4-sentences"), (double)n_sentences);
        if (!verdict.keep) return verdict;
        if (kept.empty()) return {false, "c4-sentences", "no line is left"};
        d.text = without_spaces_around(kept);
        return verdict;
    }
    // C4's marks, and other scripts' own marks.
    static bool c4_line_end(std::string_view line) {
        if (line.empty()) return false;
        if (strchr(".?!\"'", line.back())) return true;
        const int32_t c = last_character(line);
        return c >= 0x80 && (ends_sentence(c) || c == 0x300d || c == 0x300f);
    }

    std::vector<std::string> stop_words_, bad_words_;
    bool own_stop_words_;  // these apply to any language
    std::vector<double> thresholds_;
    std::vector<size_t> order_;
};
