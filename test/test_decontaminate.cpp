// Decontamination by n-grams: the rule worked out by hand, and compared with a plain implementation on random texts.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "../llmc/curate/decontaminate.h"
#include "files.h"
#include "testing.h"

namespace {

std::string numbered(int first, int last) {  // "w3 w4 w5"
    std::string s;
    for (int i = first; i <= last; i++) s += (i > first ? " w" : "w") + std::to_string(i);
    return s;
}
std::string sentences(const std::string& name, int n) {  // of 21 characters each
    std::string s;
    for (int i = 0; i < n; i++) s += format("The %-8.8s is %03d. ", name.c_str(), i);
    return s;
}

class Decontamination : public testing::Test {
protected:
    // A task file with these texts as examples, split before the last word.
    Decontaminator of(const std::vector<std::string>& texts, DecontaminationOptions options = {}) {
        std::string lines;
        for (const std::string& text : texts) {
            const size_t last = text.rfind(' ');
            lines += nlohmann::json{{"context", text.substr(0, last)}, {"target", text.substr(last)}}.dump() + "\n";
        }
        test::write_file(dir_ / "task.jsonl", lines);
        return Decontaminator({dir_ / "task.jsonl"}, options);
    }
    test::TemporaryDirectory dir_;
    DecontaminationCounts counts_;
};
using Pieces = std::vector<std::string>;

TEST_F(Decontamination, CutsTheSentencesAround) {
    const Decontaminator tasks = of({numbered(1, 20)});
    EXPECT_EQ(tasks.n_ngrams(), 8u);                                                       // of 13 words
    const std::string before = sentences("before", 30), behind = sentences("behind", 30);  // 630 characters each
    // The same words with other case and punctuation.
    const std::string text = before + "W3, w4: w5 w6 w7-w8 (w9) w10 w11 w12 w13 w14 w15 w16. " + behind;
    const Pieces pieces = tasks.apply(text, counts_);
    ASSERT_EQ(pieces.size(), 2u);
    EXPECT_EQ(pieces[0], before.substr(0, 20 * 21 - 1));  // up to the last sentence end 200 characters before the match
    EXPECT_EQ(pieces[1], behind.substr(10 * 21 - 1));     // from the first sentence end at least 200 characters after it
    EXPECT_EQ(counts_.documents, 1);
    EXPECT_EQ(counts_.pieces, 2);
    EXPECT_EQ(counts_.dropped, 0);
    EXPECT_EQ(counts_.matches, std::vector<int64_t>{1});
    EXPECT_EQ(counts_.characters, (int64_t)(text.size() - pieces[0].size() - pieces[1].size()));
    ASSERT_EQ(counts_.examples.size(), 1u);
    EXPECT_EQ(counts_.examples[0].ngram, "W3, w4: w5 w6 w7-w8 (w9) w10 w11 w12 w13 w14 w15");

    EXPECT_EQ(tasks.apply(before + numbered(3, 14) + behind, counts_).size(), 1u);  // 12 words
    EXPECT_EQ(tasks.apply("", counts_), Pieces{""});
    EXPECT_EQ(tasks.apply(" \n\n ", counts_), Pieces{" \n\n "});
    EXPECT_EQ(counts_.documents, 1);
    EXPECT_TRUE(tasks.apply(numbered(1, 20), counts_).empty());  // only the example
    EXPECT_EQ(counts_.dropped, 1);
}

TEST_F(Decontamination, ShortTextsAreOneNgram) {
    const Decontaminator tasks = of({numbered(1, 8), numbered(21, 27), numbered(31, 42)});
    EXPECT_EQ(tasks.n_ngrams(), 2u);
    const std::string around = sentences("around", 30);
    EXPECT_EQ(tasks.apply(around + numbered(1, 8) + " " + around, counts_).size(), 2u);
    EXPECT_EQ(tasks.apply(around + numbered(1, 7) + " " + around, counts_).size(), 1u);
    EXPECT_EQ(tasks.apply(around + numbered(21, 27) + " " + around, counts_).size(), 1u);  // 7 words: too short
    EXPECT_EQ(tasks.apply(around + numbered(31, 42) + ".", counts_).size(), 1u);           // at the end
    EXPECT_EQ(counts_.documents, 2);
}

TEST_F(Decontamination, CountsCharactersNotBytes) {
    const Decontaminator tasks = of({"雪は白いですかはい 白い"});  // each character is a word
    std::string before, behind;
    for (int i = 0; i < 500; i++) before += i % 10 == 9 ? "。" : "前";
    for (int i = 0; i < 500; i++) behind += i % 10 == 9 ? "。" : "後";
    const Pieces pieces = tasks.apply(before + "雪は白いですかはい 白い" + behind, counts_);
    ASSERT_EQ(pieces.size(), 2u);
    EXPECT_EQ(pieces[0], before.substr(0, 3 * 300));
    EXPECT_EQ(pieces[1], behind.substr(3 * 210));
    EXPECT_EQ(counts_.characters, 200 + 11 + 1 + 210);
}

TEST_F(Decontamination, CommonPhrasesAndManyPieces) {
    Decontaminator tasks = of({numbered(1, 13), numbered(21, 33)});
    const std::string around = sentences("around", 40), common = around + numbered(1, 13) + ". ",
                      rare = numbered(21, 33) + ". ";
    for (int i = 0; i < 9; i++) tasks.add(tasks.matches(common + common));  // counts once per document
    tasks.solve();
    EXPECT_EQ(tasks.n_common(), 0u);
    EXPECT_EQ(tasks.apply(common + around, counts_).size(), 2u);
    tasks.add(tasks.matches(common));
    tasks.add(tasks.matches(rare));
    tasks.solve();
    EXPECT_EQ(tasks.n_common(), 1u);
    EXPECT_EQ(tasks.apply(common + around, counts_).size(), 1u);

    std::string many = around;
    for (int i = 1; i < 10; i++) many += rare + around;
    EXPECT_EQ(tasks.apply(many, counts_).size(), 10u);
    EXPECT_TRUE(tasks.apply(many + rare + around, counts_).empty());
}

// A minimal implementation of the rule, for ASCII.
struct Plain {
    std::set<std::vector<std::string>> ngrams;
    std::set<size_t> lengths;

    static void words_of(const std::string& text, std::vector<std::string>& words, std::vector<size_t>& begins) {
        for (size_t i = 0; i < text.size(); i++) {
            const bool letter = isalnum((unsigned char)text[i]) || text[i] == '_';
            if (!letter) continue;
            if (i == 0 || !(isalnum((unsigned char)text[i - 1]) || text[i - 1] == '_')) {
                words.emplace_back();
                begins.push_back(i);
            }
            words.back() += (char)tolower(text[i]);
        }
    }
    void add(const std::string& text) {
        std::vector<std::string> words;
        std::vector<size_t> begins;
        words_of(text, words, begins);
        const size_t n = std::min<size_t>(words.size(), 13);
        if (n < 8) return;
        lengths.insert(n);
        for (size_t i = 0; i + n <= words.size(); i++) ngrams.insert({words.begin() + (long)i, words.begin() + (long)(i + n)});
    }
    Pieces apply(const std::string& text, bool first_call = true) const {
        std::vector<std::string> words;
        std::vector<size_t> begins;
        words_of(text, words, begins);
        std::vector<size_t> order(lengths.begin(), lengths.end());
        if (lengths.count(13)) std::rotate(order.begin(), order.end() - 1, order.end());
        for (size_t i = 0; i < words.size(); i++)
            for (const size_t n : order) {
                if (i + n > words.size() || !ngrams.count({words.begin() + (long)i, words.begin() + (long)(i + n)})) continue;
                Pieces pieces;
                long at = (long)begins[i] - 200;
                while (at > 0 && !strchr(".!?", text[(size_t)at])) at--;
                if (at > 0 && at + 1 > 200) pieces.push_back(text.substr(0, (size_t)at + 1));
                size_t behind = begins[i + n - 1] + words[i + n - 1].size() + 200;
                while (behind < text.size() && !strchr(".!?", text[behind])) behind++;
                const std::string second = behind + 1 < text.size() ? text.substr(behind + 1) : "";
                if (second.size() > 200)
                    for (const std::string& piece : apply(second, false)) pieces.push_back(piece);
                return first_call && pieces.size() > 10 ? Pieces{} : pieces;
            }
        return {text};
    }
};

TEST_F(Decontamination, AsThePlainRule) {
    test::Rng rng(5);
    const auto words = [&](int n) {
        std::string s;
        for (int i = 0; i < n; i++) {
            s += "abcdefghijklmnopqrst"[rng.below(20)];
            if (rng.below(3) == 0) s += std::to_string(rng.below(4));
            s += rng.below(8) ? " " : rng.below(2) ? ". " : ", ";
        }
        return s;
    };
    std::vector<std::string> questions;
    Plain plain;
    for (int i = 0; i < 40; i++) {
        questions.push_back(words(5 + rng.below(15)) + "end");
        plain.add(questions.back());
    }
    const Decontaminator tasks = of(questions);
    EXPECT_EQ(tasks.n_ngrams(), plain.ngrams.size());
    int touched = 0, emptied = 0;
    for (int trial = 0; trial < 400; trial++) {
        std::string text;
        for (int part = rng.below(12); part >= 0; part--) {
            text += words(rng.below(300));
            if (rng.below(2)) text += questions[(size_t)rng.below(40)] + (rng.below(2) ? ". " : " ");
        }
        const Pieces expected = plain.apply(text);
        ASSERT_EQ(tasks.apply(text, counts_), expected) << text;
        touched += expected != Pieces{text};
        emptied += expected.empty();
    }
    EXPECT_GT(touched, 100);
    EXPECT_GT(emptied, 5);
}

TEST_F(Decontamination, LargeAndHostileTexts) {
    const Decontaminator tasks = of({numbered(1, 20)});
    std::string text;
    while (text.size() < 4 << 20) text += sentences("filler", 100) + numbered(1, 20) + ". ";
    EXPECT_TRUE(tasks.apply(text, counts_).empty());  // too many pieces
    EXPECT_EQ(tasks.apply(std::string(4 << 20, 'x'), counts_).size(), 1u);
    EXPECT_EQ(tasks.apply(std::string(4 << 20, ' '), counts_).size(), 1u);
    EXPECT_EQ(tasks.apply("\xff\xfe\xe3\x80", counts_).size(), 1u);
    EXPECT_EQ(counts_.documents, 1);
    DecontaminationOptions options;
    options.ngram = 64;
    test::expect_error([&] { of({numbered(1, 20)}, options); }, {"64", "from 1 to 63"});
    test::expect_error([&] { Decontaminator({dir_ / "nothing.jsonl"}); }, {"nothing.jsonl"});
}

}  // namespace
