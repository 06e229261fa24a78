// Learns the vocabulary of a unigram model (unigram.h; Kudo, 2018), as SentencePiece's trainer does.
//
//   1. Seeds: the parts of words that occur at least twice, the largest (occurrences x characters) first, and all
//      characters but the rarest, which fall back to bytes. They are found in a sorted list of all suffixes of words: a part
//      that occurs again is a common prefix of neighbors in this list.
//   2. EM, twice: the expected number of times that each piece is used, over all ways to split the words (forward-backward);
//      the score of a piece is then digamma(its number) - digamma(the sum), which favors few pieces. Pieces below 0.5 are
//      dropped.
//   3. Pruning: the loss of likelihood without a piece, when the best other way to split it replaces it. The least important
//      pieces are dropped, a quarter of all; 2 and 3 repeat until there are twice as many as requested. Then the highest
//      scores are selected, including every character.
//
// (SentencePiece prunes to 1.1 times as many, by likelihood. Selecting more of them by score, that is by how often they are
// used, needs fewer tokens, above all if many scripts share a small vocabulary: dev/data/README.md.)
//
// The result does not depend on the number of threads: words are distributed over a fixed number of parts, whose sums are added
// in order.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/progress.h"
#include "../base/utf8.h"
#include "byte_trie.h"
#include "text_steps.h"
#include "tokenizer_trainer.h"
#include "unigram.h"

// Splits text into the words that pieces never cross: letters, up to three digits, other characters, each with a space before
// them; further spaces; line ends. (The regular expression of GPT-2 with U+2581 for the space.)
inline nlohmann::ordered_json unigram_pre_tokenizer() {
    const std::string words =
        "\u2581?[\\p{L}\\p{M}]+|\u2581?\\p{N}{1,3}|\u2581?[^\u2581\\s\\p{L}\\p{M}\\p{N}]+|\u2581+(?=\u2581)|\\s+|\u2581";
    return {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "first"}, {"split", false}},
              {{"type", "Split"}, {"pattern", {{"Regex", words}}}, {"behavior", "Isolated"}, {"invert", false}}}}};
}

class UnigramTrainer {
public:
    UnigramTrainer(const PieceCounts& counts, int threads) : threads_(threads) {
        std::vector<std::pair<std::string_view, int64_t>> sorted(counts.begin(), counts.end());
        std::sort(sorted.begin(), sorted.end());  // so that the result does not depend on the hash table
        find_characters(sorted);
        for (const auto& [word, count] : sorted) add_word(word, count);
        words_.push_back({text_.size(), 0});
    }

    // Learns at most `size` pieces.
    void train(int size, Progress* progress) {
        size_ = std::max<int>(size, (int)characters_.size());
        find_seeds();
        const size_t enough = (size_t)(2.0 * size_);
        const auto rounds = [&] {
            return std::max(0.0, std::log((double)pieces_.size() / (double)enough) / std::log(1 / 0.75));
        };
        const double all = rounds() + 1;
        while (true) {
            for (int i = 0; i < 2; i++) maximize(expected_counts());
            if (progress) progress->update((int64_t)(100 * (all - rounds()) / (all + 1)));
            if (pieces_.size() <= enough) break;
            const size_t before = pieces_.size();
            prune(std::max(enough, (size_t)(0.75 * (double)before)));
            if (pieces_.size() == before) break;
        }
        choose();
        if (progress) progress->update(100);
    }

    struct ScoredPiece {
        std::string text;
        double score;
    };
    const std::vector<ScoredPiece>& pieces() const { return pieces_; }
    // Special tokens, which no piece may equal. Call before train().
    void leave_out(const std::vector<std::string>& special) { left_out_.insert(special.begin(), special.end()); }

    // special: the first tokens. The unknown token follows, then the 256 bytes, then the pieces.
    static size_t other_tokens(const std::vector<std::string>& special) { return all_special(special).size() + 256; }
    nlohmann::ordered_json to_json(const std::vector<std::string>& special) const {
        using json = nlohmann::ordered_json;
        const std::vector<std::string> names = all_special(special);
        json vocabulary = json::array(), added = json::array();
        for (const std::string& name : names) {
            added.push_back(added_token(vocabulary.size(), name));
            vocabulary.push_back({name, 0.0});
        }
        for (int b = 0; b < 256; b++) vocabulary.push_back({byte_token((unsigned char)b), 0.0});
        for (const ScoredPiece& p : pieces_) vocabulary.push_back({p.text, p.score});
        const auto unknown = std::find(names.begin(), names.end(), unknown_name) - names.begin();
        const json space = {{"String", "\u2581"}};
        return {{"version", "1.0"},
                {"truncation", nullptr},
                {"padding", nullptr},
                {"added_tokens", added},
                {"normalizer", nullptr},
                {"pre_tokenizer", unigram_pre_tokenizer()},
                {"post_processor", nullptr},
                {"decoder",
                 {{"type", "Sequence"},
                  {"decoders",
                   {{{"type", "Replace"}, {"pattern", space}, {"content", " "}},
                    {{"type", "ByteFallback"}},
                    {{"type", "Fuse"}},
                    {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
                {"model", {{"type", "Unigram"}, {"unk_id", unknown}, {"vocab", vocabulary}, {"byte_fallback", true}}}};
    }

private:
    static constexpr const char* unknown_name = "<unk>";
    static constexpr size_t most_seeds = 1000000, longest_piece = 16;  // in characters
    static constexpr size_t parts = 8;
    struct Word {
        size_t begin;  // in text_
        int64_t count;
    };
    struct Edge {
        int begin, end, id;  // in bytes; id -1: unknown
    };

    static std::vector<std::string> all_special(std::vector<std::string> names) {
        if (std::find(names.begin(), names.end(), unknown_name) == names.end()) names.emplace_back(unknown_name);
        return names;
    }

    // The most frequent characters, which are 99.95% of the text.
    void find_characters(const std::vector<std::pair<std::string_view, int64_t>>& words) {
        std::unordered_map<int32_t, int64_t> counts;
        int64_t all = 0, covered = 0;
        for (const auto& [word, count] : words)
            each_character(word, [&, n = count](int32_t c, std::string_view) {
                if (c <= 0) return;  // a byte that is not UTF-8, or NUL
                counts[c] += n;
                all += n;
            });
        std::vector<std::pair<int64_t, int32_t>> sorted;
        for (const auto& [c, count] : counts) sorted.emplace_back(-count, c);
        std::sort(sorted.begin(), sorted.end());
        for (const auto& [count, c] : sorted) {
            if ((double)covered >= 0.9995 * (double)all) break;
            characters_.emplace(c, -count);
            covered -= count;
        }
    }

    // A word without its rare characters, where it is split.
    void add_word(std::string_view word, int64_t count) {
        bool inside = false;
        each_character(word, [&](int32_t c, std::string_view bytes) {
            if (!characters_.count(c)) {
                inside = false;
                return;
            }
            if (!inside) words_.push_back({text_.size(), count});
            inside = true;
            text_ += bytes;
        });
    }
    std::string_view word(size_t i) const {
        return std::string_view(text_).substr(words_[i].begin, words_[i + 1].begin - words_[i].begin);
    }

    // ---- 1. seeds ----
    void find_seeds() {
        struct End {
            const char* text;
            uint32_t word;
            uint16_t length;  // of the longest piece that starts here
        };
        std::vector<End> ends;
        for (size_t w = 0; w + 1 < words_.size(); w++)
            for (std::string_view rest = word(w); !rest.empty(); rest.remove_prefix(first_character(rest).length)) {
                size_t length = 0;
                for (size_t n = 0; n < longest_piece && length < rest.size(); n++)
                    length += first_character(rest.substr(length)).length;
                ends.push_back({rest.data(), (uint32_t)w, (uint16_t)length});
            }
        const auto view = [](const End& e) { return std::string_view(e.text, e.length); };
        std::sort(ends.begin(), ends.end(), [&](const End& a, const End& b) {
            const int order = view(a).compare(view(b));
            return order != 0 ? order < 0 : a.text < b.text;
        });
        // A stack of prefixes shared with the previous suffixes, from short to long, and their counts.
        struct Common {
            size_t length;
            int64_t count;
        };
        std::vector<Common> stack;
        std::vector<std::pair<double, std::string_view>> seeds;
        const auto close_down_to = [&](size_t length, const End& last) {
            int64_t count = 0;
            while (!stack.empty() && stack.back().length > length) {
                count += stack.back().count;
                const std::string_view text = view(last).substr(0, stack.back().length);
                stack.pop_back();
                const auto n = (double)count_characters(text);
                if (n > 1 && count > 1) seeds.emplace_back((double)count * n, text);
            }
            if (count > 0 && length > 0) {
                if (!stack.empty() && stack.back().length == length) stack.back().count += count;
                else stack.push_back({length, count});
            }
        };
        // The common prefix of two suffixes, in whole characters.
        const auto common = [&](const End& left, const End& right) {
            const std::string_view a = view(left), b = view(right);
            size_t n = 0;
            while (n < a.size() && n < b.size() && a[n] == b[n]) n++;
            while (n > 0 && n < b.size() && !begins_character(b[n])) n--;
            return n;
        };
        size_t with_last = 0;
        for (size_t i = 0; i < ends.size(); i++) {
            // A suffix counts toward its longest prefix shared with a neighbor, or as a whole if its word occurs again, and,
            // when that is closed, toward shorter ones.
            const size_t with_next = i + 1 < ends.size() ? common(ends[i], ends[i + 1]) : 0;
            const int64_t count = words_[ends[i].word].count;
            const size_t length = count > 1 ? ends[i].length : std::max(with_last, with_next);
            if (!stack.empty() && stack.back().length == length) stack.back().count += count;
            else if (length > 0) stack.push_back({length, count});
            close_down_to(with_next, ends[i]);
            with_last = with_next;
        }
        std::sort(seeds.begin(), seeds.end(),
                  [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
        seeds.resize(std::min(seeds.size(), most_seeds));
        double sum = 0;
        for (const auto& [c, count] : characters_) pieces_.push_back({utf8((uint32_t)c), (double)count});
        std::sort(pieces_.begin(), pieces_.end(), [](const ScoredPiece& a, const ScoredPiece& b) { return a.text < b.text; });
        for (const auto& [score, text] : seeds) pieces_.push_back({std::string(text), score});
        for (const ScoredPiece& p : pieces_) sum += p.score;
        for (ScoredPiece& p : pieces_) p.score = std::log(p.score) - std::log(sum);
        build();
    }

    // ---- the ways to split a word ----
    void build() {
        std::vector<std::pair<std::string, int>> strings;
        lowest_ = 0;
        for (size_t i = 0; i < pieces_.size(); i++) {
            strings.emplace_back(pieces_[i].text, (int)i);
            lowest_ = std::min(lowest_, pieces_[i].score);
        }
        trie_ = ByteTrie(std::move(strings));
    }
    double score(int id) const { return id < 0 ? lowest_ - 10 : pieces_[(size_t)id].score; }

    // All pieces in a word, by their start, except `left_out`.
    void find_edges(std::string_view word, std::vector<Edge>& edges, int left_out = -1) const {
        edges.clear();
        for (size_t begin = 0; begin < word.size();) {
            const size_t length = first_character(word.substr(begin)).length;
            bool single = false;
            trie_.prefixes(word.substr(begin), [&](int id, size_t n) {
                if (id == left_out) return;
                single |= n == length;
                edges.push_back({(int)begin, (int)(begin + n), id});
            });
            if (!single) edges.push_back({(int)begin, (int)(begin + length), -1});
            begin += length;
        }
    }

    // The best way: calls use(id) for each of its pieces, the last first; returns its score.
    template <class F>
    double best_way(std::string_view word, const std::vector<Edge>& edges, F use) const {
        thread_local std::vector<std::pair<double, const Edge*>> best;
        best.assign(word.size() + 1, {-INFINITY, nullptr});
        best[0].first = 0;
        for (const Edge& e : edges) {
            const double sum = best[(size_t)e.begin].first + score(e.id);
            if (sum > best[(size_t)e.end].first) best[(size_t)e.end] = {sum, &e};
        }
        for (size_t end = word.size(); end > 0; end = (size_t)best[end].second->begin) use(best[end].second->id);
        return best[word.size()].first;
    }

    // Runs work(part, word) for all words; words of one part are in order, in one thread.
    template <class F>
    void for_each_word(F work) const {
        const size_t n = words_.size() - 1;
        std::atomic<size_t> next{0};
        const auto run = [&] {
            for (size_t part; (part = next++) < parts;)
                for (size_t w = part; w < n; w += parts) work(part, w);
        };
        std::vector<std::thread> others;
        try {
            for (int t = 1; t < std::min(threads_, (int)parts); t++) others.emplace_back(run);
        } catch (const std::system_error&) {  // no more threads: the existing ones do the work
        }
        run();
        for (std::thread& t : others) t.join();
    }
    std::vector<double> added_up(const std::vector<std::vector<double>>& of_parts) const {
        std::vector<double> sum(pieces_.size());
        for (const std::vector<double>& part : of_parts)
            for (size_t i = 0; i < sum.size(); i++) sum[i] += part[i];
        return sum;
    }

    // ---- 2. EM ----
    std::vector<double> expected_counts() const {
        std::vector<std::vector<double>> counts(parts, std::vector<double>(pieces_.size()));
        for_each_word([&](size_t part, size_t w) { add_expected(word(w), (double)words_[w].count, counts[part]); });
        return added_up(counts);
    }
    // log(exp(a) + exp(b))
    static double log_add(double a, double b) {
        if (a < b) std::swap(a, b);
        return b == -INFINITY ? a : a + std::log1p(std::exp(b - a));
    }
    void add_expected(std::string_view word, double count, std::vector<double>& counts) const {
        thread_local std::vector<Edge> edges;
        thread_local std::vector<double> forward, backward;
        find_edges(word, edges);
        forward.assign(word.size() + 1, -INFINITY);
        backward.assign(word.size() + 1, -INFINITY);
        forward[0] = backward[word.size()] = 0;
        for (const Edge& e : edges)
            forward[(size_t)e.end] = log_add(forward[(size_t)e.end], forward[(size_t)e.begin] + score(e.id));
        for (auto e = edges.rbegin(); e != edges.rend(); ++e)
            backward[(size_t)e->begin] = log_add(backward[(size_t)e->begin], backward[(size_t)e->end] + score(e->id));
        for (const Edge& e : edges)
            if (e.id >= 0)
                counts[(size_t)e.id] +=
                    count * std::exp(forward[(size_t)e.begin] + score(e.id) + backward[(size_t)e.end] - forward[word.size()]);
    }

    static double digamma(double x) {
        double sum = 0;
        for (; x < 7; x++) sum -= 1 / x;
        x -= 0.5;
        const double a = 1 / (x * x);
        return sum + std::log(x) + a * (1.0 / 24 + a * (-7.0 / 960 + a * (31.0 / 8064 - a * 127.0 / 30720)));
    }
    void maximize(const std::vector<double>& counts) {
        std::vector<ScoredPiece> kept;
        double sum = 0;
        for (size_t i = 0; i < pieces_.size(); i++) {
            if (counts[i] < 0.5) continue;
            kept.push_back({std::move(pieces_[i].text), counts[i]});
            sum += counts[i];
        }
        for (ScoredPiece& p : kept) p.score = digamma(p.score) - digamma(sum);
        pieces_ = std::move(kept);
        build();
    }

    // ---- 3. pruning ----
    void prune(size_t size) {
        std::vector<std::vector<double>> of_parts(parts, std::vector<double>(pieces_.size()));
        for_each_word([&](size_t part, size_t w) {
            thread_local std::vector<Edge> edges;
            find_edges(word(w), edges);
            best_way(word(w), edges, [&](int id) {
                if (id >= 0) of_parts[part][(size_t)id] += (double)words_[w].count;
            });
        });
        const std::vector<double> used = added_up(of_parts);
        double sum = 0;
        for (const double n : used) sum += n;
        std::vector<std::pair<double, size_t>> losses;  // loss without each piece
        std::vector<Edge> edges;
        for (size_t i = 0; i < pieces_.size(); i++) {
            if (used[i] == 0) continue;
            find_edges(pieces_[i].text, edges, (int)i);
            std::vector<int> instead;
            const double other = best_way(pieces_[i].text, edges, [&](int id) { instead.push_back(id); });
            if (std::find(instead.begin(), instead.end(), -1) != instead.end()) {  // a character
                losses.emplace_back(-INFINITY, i);
                continue;
            }
            if (other > pieces_[i].score) continue;  // never the best way
            const double sum_then = std::log(sum + used[i] * ((double)instead.size() - 1));
            double then = 0;
            for (int id : instead) then += std::log(used[(size_t)id] + used[i]) - sum_then;
            losses.emplace_back(-used[i] * (std::log(used[i]) - std::log(sum) - then), i);
        }
        std::sort(losses.begin(), losses.end());
        losses.resize(std::min(losses.size(), size));
        std::sort(losses.begin(), losses.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
        std::vector<ScoredPiece> kept;
        for (const auto& [loss, i] : losses) kept.push_back(std::move(pieces_[i]));
        pieces_ = std::move(kept);
        build();
    }

    // Keeps all characters, then the pieces with the highest scores; sorted by score.
    void choose() {
        const auto better = [](const ScoredPiece& a, const ScoredPiece& b) {
            return a.score != b.score ? a.score > b.score : a.text < b.text;
        };
        const auto is_left_out = [&](const ScoredPiece& p) { return left_out_.count(p.text) > 0; };
        pieces_.erase(std::remove_if(pieces_.begin(), pieces_.end(), is_left_out), pieces_.end());
        std::sort(pieces_.begin(), pieces_.end(), better);
        std::unordered_set<std::string> missing;
        for (const auto& [c, count] : characters_) missing.insert(utf8((uint32_t)c));
        std::vector<ScoredPiece> chosen;
        for (const ScoredPiece& p : pieces_)
            if (missing.erase(p.text)) chosen.push_back(p);
        for (const std::string& text : missing) chosen.push_back({text, lowest_ - 0.0001});
        const std::unordered_map<int32_t, int64_t>& characters = characters_;
        for (const ScoredPiece& p : pieces_) {
            if ((int)chosen.size() >= size_) break;
            const Utf8Character c = first_character(p.text);
            if (c.length < p.text.size() || !characters.count(c.code)) chosen.push_back(p);
        }
        std::sort(chosen.begin(), chosen.end(), better);
        pieces_ = std::move(chosen);
    }

    int threads_, size_ = 0;
    std::unordered_map<int32_t, int64_t> characters_;  // characters with tokens, and their counts
    std::string text_;                                 // all words
    std::vector<Word> words_;                          // and the end of the last one
    std::vector<ScoredPiece> pieces_;
    std::unordered_set<std::string> left_out_;
    double lowest_ = 0;
    ByteTrie trie_;
};
