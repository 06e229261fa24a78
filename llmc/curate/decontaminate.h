// Decontamination: removes the questions and answers of evaluation tasks from a corpus, by the rule of GPT-3 (Brown et al.,
// 2020, appendix C) as applied for MT-NLG (Smith et al., 2022; Megatron-LM, tools/openwebtext/filter_ngrams.py):
//   - A task's texts, each with its right answer, are split into n-grams of 13 words in lower case. A text of 8 to 12
//     words is one n-gram; a shorter one is skipped.
//   - N-grams in 10 or more documents of the corpus are common phrases, and are ignored.
//   - Each match of the others is removed from a document together with 200 characters on both sides, and with the sentences
//     that these cut into. The remaining pieces become documents; pieces of 200 characters or less are dropped.
//   - A document that would become more than 10 pieces is dropped.
// Words are the matches of \w+; Chinese and Japanese characters and characters of other scripts without spaces are single words
// (words.h). N-grams are compared by hashes of 64 bits: in a trillion words, a million n-grams of tasks are found by chance
// once in 20 such corpora.
//
// Steps: matches (a pure function, on many threads), add (in order, on one thread), solve; then apply, from many threads.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "../base/check.h"
#include "../base/hash.h"
#include "../data/tasks.h"
#include "words.h"

struct DecontaminationOptions {
    int shortest_ngram = 8, ngram = 13;  // words
    int window = 200;                    // characters cut out on each side
    int shortest_piece = 200;            // characters; pieces must have more
    int most_pieces = 10;
    int common = 10;  // an n-gram in this many documents is a common phrase
};

struct DecontaminationCounts {
    struct Example {
        size_t task;
        std::string ngram;  // as in the document
    };
    int64_t documents = 0;         // with a match
    int64_t pieces = 0;            // left of them
    int64_t dropped = 0;           // of them, for too many pieces or none
    int64_t characters = 0;        // removed or dropped
    std::vector<int64_t> matches;  // by task
    std::vector<Example> examples;

    // To be added in the documents' order, so that the examples are the first ones.
    DecontaminationCounts& operator+=(const DecontaminationCounts& other) {
        documents += other.documents;
        pieces += other.pieces;
        dropped += other.dropped;
        characters += other.characters;
        matches.resize(std::max(matches.size(), other.matches.size()));
        for (size_t i = 0; i < other.matches.size(); i++) matches[i] += other.matches[i];
        for (const Example& example : other.examples)
            if (examples.size() < most_examples) examples.push_back(example);
        return *this;
    }
    static constexpr size_t most_examples = 20;
};

class Decontaminator {
public:
    explicit Decontaminator(const std::vector<std::string>& task_files, const DecontaminationOptions& options = {})
        : options_(options), filter_(filter_bits / 64) {
        const auto in = [](const std::string& name, int value, int least, int most) {
            refuse_value(value < least || value > most, name + " of decontamination", value,
                         format("from %d to %d", least, most));
        };
        in("the n-gram's length", options.ngram, 1, (int)ring - 1);
        in("the shortest n-gram's length", options.shortest_ngram, 1, options.ngram);
        in("the window", options.window, 0, 1 << 20);
        in("the shortest piece", options.shortest_piece, 0, 1 << 20);
        in("the number of pieces", options.most_pieces, 1, 1 << 20);
        in("the number of documents", options.common, 1, 1 << 30);
        powers_.assign((size_t)options.ngram + 1, 1);
        for (size_t n = 1; n < powers_.size(); n++) powers_[n] = powers_[n - 1] * factor;
        for (const std::string& file : task_files) add_task(read_task(file));
        fill_table();
        seen_.resize(ngrams_.size());
    }
    const std::vector<std::string>& tasks() const { return tasks_; }
    size_t n_ngrams() const { return ngrams_.size(); }
    size_t n_common() const {
        size_t n = 0;
        for (const int64_t documents : seen_) n += documents >= options_.common;
        return n;
    }

    // The n-grams of tasks in a document, each once. As in the reference, the search continues after each match.
    std::vector<uint32_t> matches(std::string_view text) const {
        std::vector<uint32_t> found;
        for_each_match(text, [&](size_t, size_t end, uint32_t ngram) {
            found.push_back(ngram);
            return end;
        });
        std::sort(found.begin(), found.end());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        return found;
    }
    void add(const std::vector<uint32_t>& matches) {
        for (const uint32_t ngram : matches) seen_[ngram]++;
    }
    // From now on, common phrases are ignored.
    void solve() {
        for (size_t i = 0; i < ngrams_.size(); i++) ngrams_[i].common = seen_[i] >= options_.common;
    }

    // The remaining pieces of a document; the document itself if it has no match.
    std::vector<std::string> apply(std::string_view text, DecontaminationCounts& counts) const {
        std::vector<std::string> pieces;
        size_t piece = 0;  // start of the current one
        bool any = false;
        const auto keep = [&](std::string_view s) {
            if (characters_exceed(s, options_.shortest_piece)) pieces.emplace_back(s);
        };
        DecontaminationCounts here;
        here.matches.resize(tasks_.size());
        for_each_match(text, [&](size_t begin, size_t end, uint32_t ngram) {
            any = true;
            here.matches[ngrams_[ngram].task]++;
            if (here.examples.size() < DecontaminationCounts::most_examples)
                here.examples.push_back({ngrams_[ngram].task, std::string(text.substr(begin, end - begin))});
            keep(text.substr(piece, end_of_sentence_before(text, begin, piece) - piece));
            return piece = end_of_sentence_behind(text, end);
        });
        if (!any) return {std::string(text)};
        if (piece < text.size()) keep(text.substr(piece));
        if ((int)pieces.size() > options_.most_pieces) pieces.clear();
        here.documents = 1;
        here.pieces = (int64_t)pieces.size();
        here.dropped = pieces.empty();
        here.characters = count_characters(text);
        for (const std::string& s : pieces) here.characters -= count_characters(s);
        counts += here;
        return pieces;
    }

private:
    static constexpr size_t ring = 64, filter_bits = 1 << 22;
    static constexpr uint64_t factor = 0xd6e8feb86659fd93u;
    struct Ngram {
        uint64_t hash;
        uint32_t task;
        bool common;
    };
    struct Slot {
        uint64_t hash = 0;
        uint32_t ngram = UINT32_MAX;
    };

    // ---- the tasks' n-grams ----
    void add_task(const Task& task) {
        const auto number = (uint32_t)tasks_.size();
        tasks_.push_back(task.file);
        for (const TaskExample& example : task.examples) {
            std::vector<uint64_t> sums = {0};  // prefix sums over the words
            for_each_word<Punctuation::separates, Digits::kept>(
                example.solved(), [&](uint64_t word, size_t, size_t) { sums.push_back(sums.back() * factor + word); });
            const size_t n = std::min(sums.size() - 1, (size_t)options_.ngram);
            if ((int)n < options_.shortest_ngram) continue;
            lengths_.insert(n);
            for (size_t i = 0; i + n < sums.size(); i++) {
                const uint64_t hash = mix64(sums[i + n] - sums[i] * powers_[n]);
                if (known_.insert(hash).second) ngrams_.push_back({hash, number, false});
            }
        }
    }
    void fill_table() {
        known_.clear();
        size_t n = 16;
        while (n < 2 * ngrams_.size()) n *= 2;
        table_.resize(n);
        for (uint32_t i = 0; i < ngrams_.size(); i++) {
            const uint64_t hash = ngrams_[i].hash;
            filter_[hash % filter_bits / 64] |= (uint64_t)1 << hash % 64;
            size_t slot = hash >> 32 & (n - 1);
            while (table_[slot].ngram != UINT32_MAX) slot = (slot + 1) & (n - 1);
            table_[slot] = {hash, i};
        }
    }
    // UINT32_MAX if no task has it, or if it is a common phrase. A filter of 512 KiB, which stays in the CPU's caches, decides
    // for most words.
    uint32_t find(uint64_t hash) const {
        if (!(filter_[hash % filter_bits / 64] >> hash % 64 & 1)) return UINT32_MAX;
        for (size_t slot = hash >> 32 & (table_.size() - 1); table_[slot].ngram != UINT32_MAX;
             slot = (slot + 1) & (table_.size() - 1))
            if (table_[slot].hash == hash) return ngrams_[table_[slot].ngram].common ? UINT32_MAX : table_[slot].ngram;
        return UINT32_MAX;
    }

    // ---- the document's ----
    // Calls f(begin, end, n-gram) for matches in order; among matches that start at one word the longest comes first. f returns
    // where the search continues.
    template <class F>
    void for_each_match(std::string_view text, F f) const {
        if (ngrams_.empty()) return;
        struct Word {
            size_t begin, end;
            uint64_t before, sum;
        };
        std::array<Word, ring> words;  // the first words of n-grams that are not looked up yet
        size_t first = 0, n = 0, resume = 0;
        uint64_t sum = 0;
        const auto at = [&](size_t i) -> const Word& { return words[(first + i) % ring]; };
        // Looks up n-grams that start with the first word, then removes that word; false if it was the last.
        const auto look_up = [&] {
            const auto matched = [&](size_t length) {
                const uint32_t ngram = find(mix64(at(length - 1).sum - at(0).before * powers_[length]));
                if (ngram == UINT32_MAX) return false;
                resume = f(at(0).begin, at(length - 1).end, ngram);
                return true;
            };
            bool found =
                n >= (size_t)options_.ngram && lengths_.count((size_t)options_.ngram) && matched((size_t)options_.ngram);
            for (const size_t length : lengths_)
                if (!found && length < (size_t)options_.ngram && length <= n) found = matched(length);
            do {
                first = (first + 1) % ring;
                n--;
            } while (n > 0 && at(0).begin < resume);
            return n > 0;
        };
        for_each_word<Punctuation::separates, Digits::kept>(text, [&](uint64_t word, size_t begin, size_t end) {
            if (begin < resume) return;
            words[(first + n++) % ring] = {begin, end, sum, sum * factor + word};
            sum = sum * factor + word;
            if (n == (size_t)options_.ngram) look_up();
        });
        while (n > 0 && look_up()) continue;
    }

    // ---- characters and sentences ----
    static bool characters_exceed(std::string_view s, int most) { return count_characters(s) > most; }
    // The length of a mark that ends a sentence; 0 if there is none.
    static size_t sentence_mark(std::string_view text, size_t at) {
        if (text[at] == '.' || text[at] == '!' || text[at] == '?') return 1;
        for (const std::string_view mark : {"\xe3\x80\x82", "\xef\xbc\x81", "\xef\xbc\x9f"})  // full width
            if (text.substr(at, 3) == mark) return 3;
        return 0;
    }
    // The end of the last sentence that ends at least `window` characters before `at`; `least` if there is none after that.
    size_t end_of_sentence_before(std::string_view text, size_t at, size_t least) const {
        for (int left = options_.window; left > 0 && at > least;) left -= begins_character(text[--at]);
        for (; at > least; at--)
            if (const size_t length = sentence_mark(text, at)) return at + length;
        return least;
    }
    // The end of the first sentence that ends at least `window` characters after `at`.
    size_t end_of_sentence_behind(std::string_view text, size_t at) const {
        for (int left = options_.window; at < text.size(); at++)
            if (begins_character(text[at]) && left-- == 0) break;
        for (; at < text.size(); at++)
            if (const size_t length = sentence_mark(text, at)) return at + length;
        return text.size();
    }

    const DecontaminationOptions options_;
    std::vector<std::string> tasks_;
    std::vector<Ngram> ngrams_;
    std::vector<int64_t> seen_;           // documents with each of them
    std::set<size_t> lengths_;            // in words
    std::vector<uint64_t> powers_;        // of the factor
    std::unordered_set<uint64_t> known_;  // while the table is built
    std::vector<Slot> table_;             // open addressing, at most half full
    std::vector<uint64_t> filter_;
};
