// Similarity of texts to references: numbers of sacrebleu 2.6.0, rouge-score 0.1.2, NLTK 3.10.4 and SQuAD's script on texts
// that are hard to tokenize (dev/interop/test_text_metrics.py --golden), and stopping.
#include "../llmc/tokenizer/stopping_text.h"
#include "../llmc/data/text_metrics.h"

#include <gtest/gtest.h>

namespace test_text_metrics {

struct Pair {
    std::string text;
    std::vector<std::string> references;
    // exact match, F1, BLEU; ROUGE-1, -2, -L, -Lsum; the same four with stems
    std::vector<double> expected;
};
const std::vector<Pair>& pairs() {
    static const std::vector<Pair> all = {
        {"The cat sat on the mat.",
         {"A cat sat on the mat!", "the cat is on the mat"},
         {1.0, 1.0, 61.47881529512643, 0.8333333333333334, 0.8000000000000002, 0.8333333333333334, 0.8333333333333334,
          0.8333333333333334, 0.8000000000000002, 0.8333333333333334, 0.8333333333333334}},
        {"", {"x"}, {0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0, 0}},
        {"", {""}, {1.0, 1.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0, 0}},
        {"the", {"an"}, {1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}},
        {"It cost $1,000.50 (10-20% more).",
         {"It costs $1,000.50, 10-20% more."},
         {0.0, 0.8000000000000002, 38.827267775222325, 0.875, 0.7142857142857143, 0.875, 0.875, 1.0, 1.0, 1.0, 1.0}},
        {"dogs were running\nhappily in skies",
         {"a dog runs happily\nin the sky", "running dogs"},
         {0.0, 0.5, 16.341219448835542, 0.5, 0.1818181818181818, 0.30769230769230765, 0.30769230769230765, 0.7692307692307692,
          0.3636363636363636, 0.7692307692307692, 0.7692307692307692}},
        {"the the the the the the the",
         {"the cat is on the mat", "there is a cat on the mat"},
         {0.0, 0.0, 7.809849842300637, 0.30769230769230765, 0.0, 0.30769230769230765, 0.30769230769230765, 0.30769230769230765,
          0.0, 0.30769230769230765, 0.30769230769230765}},
        {"Ünïcode «naïve»  &quot;text&quot; 東京",
         {"ünïcode naïve \"text\" 東京"},
         {0.0, 0.5, 50.81327481546149, 0.8333333333333333, 0.6, 0.8333333333333333, 0.8333333333333333, 0.8333333333333333, 0.6,
          0.8333333333333333, 0.8333333333333333}},
    };
    return all;
}

TEST(TextMetrics, EqualTheReferenceImplementations) {
    for (const Pair& p : pairs()) {
        std::vector<double> found = {exact_match(p.text, p.references), word_f1(p.text, p.references),
                                     bleu(bleu_counts(p.text, p.references))};
        for (const bool stem : {false, true})
            for (const double x : {rouge_n(p.text, p.references, 1, stem), rouge_n(p.text, p.references, 2, stem),
                                   rouge_l(p.text, p.references, stem), rouge_lsum(p.text, p.references, stem)})
                found.push_back(x);
        ASSERT_EQ(found.size(), p.expected.size());
        for (size_t i = 0; i < found.size(); i++) EXPECT_NEAR(found[i], p.expected[i], 1e-9) << p.text << ": " << i;
    }
}

TEST(TextMetrics, BleuIsOfAllTextsTogether) {
    BleuCounts all;
    for (const Pair& p : pairs()) all += bleu_counts(p.text, p.references);
    EXPECT_NEAR(bleu(all), 34.14300855060115, 1e-9);
    BleuCounts first = bleu_counts(pairs()[0].text, pairs()[0].references), rest = all - first;
    rest += first;
    EXPECT_EQ(bleu(rest), bleu(all));
    EXPECT_EQ(bleu({}), 0);
    const BleuCounts same = bleu_counts("one two three four", {"one two three four"});
    EXPECT_DOUBLE_EQ(bleu(same), 100);
    EXPECT_EQ(bleu(bleu_counts("one two three", {"one two three"})), 0);  // no 4-gram
}

TEST(TextMetrics, Tokens13a) {
    const auto tokens = [](const std::string& text) {
        std::string joined;
        for (const std::string& word : tokens_13a(text)) joined += (joined.empty() ? "" : "|") + word;
        return joined;
    };
    EXPECT_EQ(tokens("Hello, world!"), "Hello|,|world|!");
    EXPECT_EQ(tokens("1,000.5 and .5, x.1 1.x 10-20"), "1,000.5|and|.|5|,|x|.|1|1|.|x|10|-|20");
    EXPECT_EQ(tokens("don't well-known"), "don't|well-known");
    EXPECT_EQ(tokens("&quot;a&amp;b&quot; &lt;i&gt;"), "\"|a|&|b|\"|<|i|>");
    EXPECT_EQ(tokens("hy-\nphen <skipped>x\ny \n"), "hyphen|x|y");
    EXPECT_EQ(tokens("東京。\u3000\u00e9."), "東京。|\u00e9|.");
}

TEST(TextMetrics, ReferencesCanBeEmptyAndBytesCanBeAnything) {
    EXPECT_EQ(exact_match("The", {""}), 1);  // an article by itself counts as nothing
    EXPECT_EQ(word_f1("a", {"", "b"}), 1);
    EXPECT_EQ(word_f1("b", {""}), 0);
    const std::string bytes = "caf\xe9 \xff\xfe";
    EXPECT_EQ(exact_match(bytes, {bytes}), 1);
    EXPECT_EQ(exact_match(bytes, {"caf"}), 0);
    EXPECT_EQ(bleu_counts(bytes, {bytes}).matches[0], 2);
    EXPECT_EQ(rouge_n(bytes, {"CAF!"}, 1, false), 1);
    EXPECT_EQ(rouge_n("", {""}, 2, true), 0);
    EXPECT_EQ(rouge_n("東京", {"東京"}, 1, false), 0);  // no letters a-z
    EXPECT_EQ(rouge_lsum("\n\n", {"\n"}, false), 0);
}

TEST(TextMetrics, PorterStems) {
    const std::pair<const char*, const char*> words[] = {
        {"caresses", "caress"},   {"ponies", "poni"},     {"ties", "tie"},           {"cats", "cat"},
        {"agreed", "agre"},       {"feed", "feed"},       {"plastered", "plaster"},  {"motoring", "motor"},
        {"sing", "sing"},         {"hopping", "hop"},     {"falling", "fall"},       {"filing", "file"},
        {"happy", "happi"},       {"enjoy", "enjoy"},     {"died", "die"},           {"spied", "spi"},
        {"relational", "relat"},  {"rational", "ration"}, {"geology", "geolog"},     {"radically", "radic"},
        {"electrical", "electr"}, {"adoption", "adopt"},  {"replacement", "replac"}, {"controlling", "control"},
        {"rate", "rate"},         {"probate", "probat"},  {"skies", "sky"},          {"news", "news"},
        {"succeed", "succeed"},   {"syzygy", "syzygi"},   {"x1y2s", "x1y2"},         {"as", "as"}};
    for (const auto& [word, stem] : words) EXPECT_EQ(porter_stem(word), stem) << word;
}

TEST(StoppingText, EndsBeforeTheFirstStop) {
    StoppingText text({"\n\n", "END"});
    EXPECT_FALSE(text.add("one\ntwo E"));
    EXPECT_EQ(text.take(), "one\ntwo ");  // E may start a stop
    EXPECT_FALSE(text.add("N"));
    EXPECT_EQ(text.take(), "");
    EXPECT_TRUE(text.add("D and\n\nmore"));
    EXPECT_EQ(text.take(), "");
    StoppingText open({"END"});
    EXPECT_FALSE(open.add("E\xe3\x81"));
    EXPECT_EQ(open.take(), "E");  // never part of a character
    open.end();
    EXPECT_EQ(open.take(), "\xe3\x81");
}

}  // namespace test_text_metrics
