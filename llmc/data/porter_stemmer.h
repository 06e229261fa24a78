// Porter's stemmer ("An algorithm for suffix stripping", Program 14.3, 1980), which strips endings of English words so that
// their forms compare equal, with the extensions of NLTK, as in the package rouge-score. Words consist of a-z and 0-9.
//   consonants and vowels   y is a vowel after a consonant; digits are consonants
//   m, the measure          how many times a consonant follows a vowel: tree 0, oats 1, private 2
#pragma once
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/utf8.h"

namespace porter {

inline std::vector<bool> consonants(std::string_view word) {
    std::vector<bool> is(word.size());
    for (size_t i = 0; i < word.size(); i++)
        is[i] = word[i] == 'y' ? i == 0 || !is[i - 1] : std::string_view("aeiou").find(word[i]) == std::string_view::npos;
    return is;
}
inline int measure(std::string_view word) {
    const std::vector<bool> consonant = consonants(word);
    int m = 0;
    for (size_t i = 1; i < word.size(); i++) m += consonant[i] && !consonant[i - 1];
    return m;
}
inline bool has_vowel(std::string_view word) {
    for (const bool consonant : consonants(word))
        if (!consonant) return true;
    return false;
}
inline bool ends_in_double_consonant(std::string_view word) {
    const size_t n = word.size();
    return n >= 2 && word[n - 1] == word[n - 2] && consonants(word)[n - 1];
}
// Consonant, vowel, consonant other than w, x, y; for two letters, vowel and consonant (NLTK).
inline bool ends_in_short_syllable(std::string_view word) {
    const std::vector<bool> c = consonants(word);
    const size_t n = word.size();
    if (n == 2) return !c[0] && c[1];
    return n >= 3 && c[n - 3] && !c[n - 2] && c[n - 1] && std::string_view("wxy").find(word[n - 1]) == std::string_view::npos;
}

struct Rule {
    std::string_view suffix, replacement;
};
// Finds the first rule whose suffix matches, and applies it if condition(stem, suffix) holds.
template <class Condition>
std::string apply(const std::string& word, std::initializer_list<Rule> rules, Condition condition) {
    for (const Rule& rule : rules) {
        if (!ends_with(word, rule.suffix)) continue;
        const std::string stem = word.substr(0, word.size() - rule.suffix.size());
        return condition(stem, rule.suffix) ? stem + std::string(rule.replacement) : word;
    }
    return word;
}

// Plurals.
inline std::string step_1a(const std::string& word) {
    if (word.size() == 4 && ends_with(word, "ies")) return word.substr(0, 3);
    return apply(word, {{"sses", "ss"}, {"ies", "i"}, {"ss", "ss"}, {"s", ""}}, [](auto&, auto) { return true; });
}

// -ed and -ing.
inline std::string step_1b(const std::string& word) {
    if (ends_with(word, "ied")) return word.substr(0, word.size() - (word.size() == 4 ? 1 : 2));
    if (ends_with(word, "eed")) return measure(word.substr(0, word.size() - 3)) > 0 ? word.substr(0, word.size() - 1) : word;
    for (const std::string_view suffix : {"ed", "ing"}) {
        if (!ends_with(word, suffix)) continue;
        const std::string stem = word.substr(0, word.size() - suffix.size());
        if (!has_vowel(stem)) continue;
        for (const std::string_view end : {"at", "bl", "iz"})
            if (ends_with(stem, end)) return stem + "e";
        if (ends_in_double_consonant(stem)) {
            const bool keeps = std::string_view("lsz").find(stem.back()) != std::string_view::npos;
            return keeps ? stem : stem.substr(0, stem.size() - 1);
        }
        return measure(stem) == 1 && ends_in_short_syllable(stem) ? stem + "e" : stem;
    }
    return word;
}

inline std::string step_1c(const std::string& word) {
    return apply(word, {{"y", "i"}}, [](const std::string& stem, auto) { return stem.size() > 1 && consonants(stem).back(); });
}

// Two suffixes become one.
inline std::string step_2(const std::string& word) {
    if (ends_with(word, "alli") && measure(word.substr(0, word.size() - 4)) > 0) return step_2(word.substr(0, word.size() - 2));
    return apply(
        word,
        {{"ational", "ate"}, {"tional", "tion"}, {"enci", "ence"},   {"anci", "ance"},   {"izer", "ize"},    {"bli", "ble"},
         {"alli", "al"},     {"entli", "ent"},   {"eli", "e"},       {"ousli", "ous"},   {"ization", "ize"}, {"ation", "ate"},
         {"ator", "ate"},    {"alism", "al"},    {"iveness", "ive"}, {"fulness", "ful"}, {"ousness", "ous"}, {"aliti", "al"},
         {"iviti", "ive"},   {"biliti", "ble"},  {"fulli", "ful"},   {"logi", "log"}},
        [](const std::string& stem, std::string_view suffix) { return measure(suffix == "logi" ? stem + "l" : stem) > 0; });
}
inline std::string step_3(const std::string& word) {
    return apply(word,
                 {{"icate", "ic"}, {"ative", ""}, {"alize", "al"}, {"iciti", "ic"}, {"ical", "ic"}, {"ful", ""}, {"ness", ""}},
                 [](const std::string& stem, auto) { return measure(stem) > 0; });
}
// Removes remaining suffixes.
inline std::string step_4(const std::string& word) {
    return apply(word,
                 {{"al", ""},
                  {"ance", ""},
                  {"ence", ""},
                  {"er", ""},
                  {"ic", ""},
                  {"able", ""},
                  {"ible", ""},
                  {"ant", ""},
                  {"ement", ""},
                  {"ment", ""},
                  {"ent", ""},
                  {"ion", ""},
                  {"ou", ""},
                  {"ism", ""},
                  {"ate", ""},
                  {"iti", ""},
                  {"ous", ""},
                  {"ive", ""},
                  {"ize", ""}},
                 [](const std::string& stem, std::string_view suffix) {
                     return measure(stem) > 1 && (suffix != "ion" || stem.back() == 's' || stem.back() == 't');
                 });
}
inline std::string step_5(const std::string& word) {
    std::string stem = word;
    if (ends_with(word, "e")) {
        const std::string shorter = word.substr(0, word.size() - 1);
        const int m = measure(shorter);
        if (m > 1 || (m == 1 && !ends_in_short_syllable(shorter))) stem = shorter;
    }
    if (ends_with(stem, "ll") && measure(stem.substr(0, stem.size() - 1)) > 1) stem.pop_back();
    return stem;
}

}  // namespace porter

inline std::string porter_stem(const std::string& word) {
    static constexpr std::pair<std::string_view, std::string_view> irregular[] = {
        {"sky", "sky"},        {"skies", "sky"},       {"dying", "die"},        {"lying", "lie"},
        {"tying", "tie"},      {"news", "news"},       {"innings", "inning"},   {"inning", "inning"},
        {"outings", "outing"}, {"outing", "outing"},   {"cannings", "canning"}, {"canning", "canning"},
        {"howe", "howe"},      {"proceed", "proceed"}, {"exceed", "exceed"},    {"succeed", "succeed"}};
    for (const auto& [form, stem] : irregular)
        if (word == form) return std::string(stem);
    if (word.size() <= 2) return word;
    using namespace porter;
    return step_5(step_4(step_3(step_2(step_1c(step_1b(step_1a(word)))))));
}
