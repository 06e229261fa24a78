// Curation: each stage on small texts with results worked out by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "../llmc/curate/heuristics.h"
#include "../llmc/curate/mixing.h"
#include "../llmc/curate/normalize.h"

namespace test_curate {

// The stage's output for `text`, or "dropped: RULE"; followed by its counts: "café (encoding-repair 1)".
std::string normalized(const std::string& text) {
    Document d;
    d.text = text;
    Changes changes;
    const DocumentVerdict j = normalize(d, changes);
    std::string counts;
    for (const auto& [rule, n] : changes) counts += (counts.empty() ? " (" : ", ") + format("%s %d", rule, (int)n);
    return (j.keep ? d.text : "dropped: " + j.rule) + counts + (counts.empty() ? "" : ")");
}

TEST(Curate, Normalizes) {
    const std::pair<std::string, std::string> rows[] = {
        {"plain", "plain"},
        // mojibake of one, two and three misreadings, as Windows-1252 and Latin-1
        {"cafÃ©", "café (encoding-repair 1)"},
        {"cafÃƒÂ©", "café (encoding-repair 2)"},
        {"Itâ€™s â€œgoodâ€\u009d", "It’s “good” (encoding-repair 3)"},
        {"Ã\u00a0 la carte", "à la carte (encoding-repair 1)"},
        {"Ð¿Ñ€Ð¸Ð²ÐµÑ‚", "привет (encoding-repair 1)"},
        {"ðŸ˜€ Â£5", "😀 £5 (encoding-repair 2)"},
        {"æ—¥æœ¬", "日本 (encoding-repair 1)"},
        // correct texts with such characters
        {"“AMANHÃ” perché»… „Spaß“ «Â» naïve façade", "“AMANHÃ” perché»… „Spaß“ «Â» naïve façade"},
        {"Þórður à Örebro: 5 × 3 = 15 °C, ½ €", "Þórður à Örebro: 5 × 3 = 15 °C, ½ €"},
        {"São Paulo não é CÃO", "São Paulo não é CÃO"},
        // an ambiguous sequence is repaired if a clear one starts the same way: Ð¸ by itself could be intended
        {"Ð¿Ñ€ Ð¸ Å“", "пр и Å“ (encoding-repair 2)"},
        // bytes, lines, controls, forms
        {"caf\xe9 \x93quoted\x94", "café “quoted” (invalid-utf8 3)"},
        {"a\r\nb\rc\u2028d  \ne", "a\nb\nc\nd\ne (line-ends 5)"},
        {"\n\na\n\n\n\nb\n\n", "a\n\nb (blank-lines 6)"},
        {"\ufeffa\x07 b\x1b[1;31mred\x1b[0m", "a bred (control-characters 4)"},
        {"a\tb", "a\tb"},
        {"e\u0301 \u304b\u3099", "é が (nfc 1)"},
        {"Ａ ﬁ ½", "Ａ ﬁ ½"},
        {" \n\x01 ", "dropped: empty (control-characters 1, line-ends 1, blank-lines 1)"},
    };
    for (const auto& [text, expected] : rows) {
        EXPECT_EQ(normalized(text), expected) << text;
        // Normalized text stays unchanged.
        Document once;
        once.text = text;
        Changes changes;
        normalize(once, changes);
        EXPECT_EQ(normalized(once.text), once.text.empty() ? "dropped: empty" : once.text);
    }
}

double measured(const char* name, const std::string& text) {
    const Heuristics h({{"gopher", "c4", "fineweb"}, {}, {}, {}});
    TextMeasures m(text);
    for (const HeuristicRule& rule : heuristic_rules())
        if (std::string(rule.name) == name) return h.measured(rule, m);
    return NAN;
}

TEST(Curate, MeasuresWhatTheRulesSay) {
    const std::tuple<const char*, const char*, double> rows[] = {
        {"gopher-min-words", "one - two ... three 4 #", 4},
        {"gopher-min-word-length", "aa bbbb - été", 3},
        {"gopher-hashes", "# a #b c", 2.0 / 4},
        {"gopher-ellipses", "a... b… c ......", 4.0 / 4},
        {"gopher-bullets", "- a\n  • b\nc\nd", 0.5},
        {"gopher-ellipsis-lines", "a...\nb… \nc\nd\n", 0.5},
        {"gopher-alphabetic-words", "a 1 é -", 0.5},
        {"gopher-stop-words", "the cat and the dog, of", 3},
        {"gopher-repeated-paragraphs", "a\nb\n\nc\n\n\na\nb", 1.0 / 3},
        {"gopher-repeated-paragraph-characters", "ab\n\nab", 2.0 / 6},
        {"gopher-repeated-lines", "a\nb\n\na\na", 2.0 / 4},
        {"gopher-repeated-line-characters", "éa\néa", 2.0 / 5},
        {"gopher-top-2-gram", "a b c a b", 2 * 3.0 / 9},  // "a b", twice
        {"gopher-top-2-gram", "aa b c d", 4.0 / 8},       // all once: the first
        {"gopher-top-3-gram", "a b", 0},                  // none
        {"gopher-top-4-gram", "a b c d x a b c d", 2 * 7.0 / 17},
        {"gopher-repeated-5-grams", "a b c d e a b c d e f", 5.0 / 21},
        // the second copy counts once, not once per n-gram
        {"gopher-repeated-5-grams", "a b c d e f g a b c d e f g", 5.0 / 27},
        {"fineweb-line-ends", "One.\nTwo\n\nThree。\n four!\n", 3.0 / 4},
        {"fineweb-short-lines", "short\n\na line of more than thirty characters\n", 0.5},
        {"fineweb-repeated-line-characters", "ab\ncd\nab", 2.0 / 6},
        {"fineweb-lines-per-word", "a b\nc d\n", 2.0 / 4},
    };
    for (const auto& [rule, text, expected] : rows) EXPECT_DOUBLE_EQ(measured(rule, text), expected) << rule << ": " << text;
}

std::string judged(const HeuristicOptions& o, const std::string& text, const char* language = "") {
    Document d;
    d.text = text;
    if (*language) d.fields.set("language", language);
    Changes changes;
    const DocumentVerdict j = Heuristics(o).apply(d, changes);
    return j.keep ? d.text : "dropped: " + j.rule;
}

TEST(Curate, DropsByTheFirstRuleBroken) {
    std::string sound;  // 60 words, none repeated
    for (int i = 0; i < 60; i++) sound += format("%sword%c%c", i ? " " : "", 'a' + i / 10, 'a' + i % 10);
    const std::string text = sound + " the end of it.";
    EXPECT_EQ(judged({{"gopher", "fineweb"}, {}, {}, {}}, text), text);
    EXPECT_EQ(judged({{"gopher"}, {}, {}, {}}, "too short"), "dropped: gopher-min-words");
    EXPECT_EQ(judged({{"gopher"}, {}, {}, {}}, ""), "dropped: gopher-min-words");
    EXPECT_EQ(judged({{"gopher"}, {"gopher-min-words=70"}, {}, {}}, text), "dropped: gopher-min-words");
    EXPECT_EQ(judged({{"gopher"}, {}, {}, {}}, sound), "dropped: gopher-stop-words");
    EXPECT_EQ(judged({{"gopher"}, {"gopher-stop-words=off"}, {}, {}}, sound), sound);
    EXPECT_EQ(judged({{"gopher"}, {}, {"wordaa", "wordbb"}, {}}, sound), sound);
    EXPECT_EQ(judged({{"gopher"}, {}, {}, {}}, sound, "fr"), sound) << "stop words are English";
    // Japanese has no words to count, but lines to compare
    std::string japanese;
    for (int i = 0; i < 3; i++) japanese += "吾輩は猫である。名前はまだ無い。どこで生れたか頓と見当がつかぬ。\n";
    EXPECT_EQ(judged({{"gopher"}, {}, {}, {}}, japanese.substr(0, japanese.size() / 3)),
              japanese.substr(0, japanese.size() / 3));
    EXPECT_EQ(judged({{"gopher"}, {}, {}, {}}, japanese), "dropped: gopher-repeated-lines");
    for (const char* setting :
         {"gopher-min-word=3", "gopher-min-words=many", "gopher-min-words", "gopher-min-words=-1", "c4-policy=off"})
        EXPECT_THROW(judged({{"gopher"}, {setting}, {}, {}}, text), UsageError) << setting;
}

TEST(Curate, CleansLinesAsC4) {
    const HeuristicOptions c4 = {{"c4"}, {"c4-sentences=1"}, {}, {"bad word", "悪い言葉", "คำหยาบ", "slur"}};
    const std::pair<std::string, std::string> rows[] = {
        {"A line that ends well.\nA line that does not\nToo short.\nAnother one here!",
         "A line that ends well.\nAnother one here!"},
        {"We know this[1] and that.[citation needed]", "We know this and that."},
        {"It goes on and on...\nHe said \"so it is\"", "He said \"so it is\""},
        {"Please enable JavaScript to go on.\nThis site uses cookies for you.\nHere is the text.", "Here is the text."},
        {"Some code { here } as text.", "dropped: c4-curly-bracket"},
        {"Lorem Ipsum dolor sit amet.", "dropped: c4-lorem-ipsum"},
        {"no end", "dropped: c4-sentences"},
        {"Here is a Bad, word for you.", "dropped: c4-bad-words"},
        {"Here is a badword for you.", "Here is a badword for you."},
        {"“Bad word”—it said.", "dropped: c4-bad-words"},
        {"これは悪い言葉です。", "dropped: c4-bad-words"},  // no spaces: anywhere
        {"これは悪いです。", "これは悪いです。"},
        {"นี่คือคำหยาบนะ", "dropped: c4-bad-words"},
        {"これはslurです。", "dropped: c4-bad-words"},
        {"吾輩は猫である。\n名前はまだ無い", "吾輩は猫である。"},
        {"One word " + std::string(1001, 'x') + " is long.\nThe other line stays.", "The other line stays."},
    };
    for (const auto& [text, expected] : rows) EXPECT_EQ(judged(c4, text), expected) << text;
    EXPECT_EQ(judged({{"c4"}, {}, {}, {}}, "One. Two. Three and four."), "dropped: c4-sentences");
    EXPECT_NE(judged({{"c4"}, {}, {}, {}}, "One. Two. Three. Four? Five it is."), "dropped: c4-sentences");
}

TEST(Curate, MixesSourcesByWeight) {
    const std::vector<std::string> names = {"raw/web.jsonl.gz", "raw/books/"};
    const auto epochs = [&](const MixingOptions& o) {
        std::vector<double> all;
        for (const MixedSource& s : mix_sources(names, {100, 50}, o)) all.push_back(s.epochs);
        return all;
    };
    EXPECT_EQ(epochs({{"web=1", "books=1"}, 1, 0, 0}), (std::vector<double>{0.75, 1.5}));
    EXPECT_EQ(epochs({{"web=0.5", "raw/books/=0.5"}, 1, 300, 0}), (std::vector<double>{1.5, 3}));
    EXPECT_EQ(epochs({{"web=1", "books=0"}, 1, 50, 0}), (std::vector<double>{0.5, 0}));
    EXPECT_EQ(epochs({{}, 1, 75, 0}), (std::vector<double>{0.5, 0.5}));
    const std::vector<double> lifted = epochs({{}, 2, 0, 0});  // shares 10 : sqrt(50)
    EXPECT_NEAR(lifted[0], 1.5 * 10 / (10 + std::sqrt(50.0)), 1e-12);
    EXPECT_NEAR(lifted[0] * 100 + lifted[1] * 50, 150, 1e-9);
    for (const std::vector<std::string>& weights : std::vector<std::vector<std::string>>{{"web=1"},
                                                                                         {"web=1", "web=1"},
                                                                                         {"web=1", "book=1"},
                                                                                         {"web", "books=1"},
                                                                                         {"web=x", "books=1"},
                                                                                         {"web=-1", "books=1"},
                                                                                         {"web=0", "books=0"}})
        EXPECT_THROW(epochs({weights, 1, 0, 0}), UsageError);
    int64_t copies = 0;
    for (int64_t i = 0; i < 10000; i++) {
        const int n = copies_of(i, 2.3, 7);
        EXPECT_TRUE(n == 2 || n == 3);
        copies += n;
    }
    EXPECT_NEAR((double)copies, 23000, 200);  // standard deviation: 46
    EXPECT_EQ(copies_of(5, 3, 7), 3);
    EXPECT_EQ(copies_of(5, 0, 7), 0);
}

// Table 2 of Smith et al. 2022 (arXiv:2201.11990): each set's tokens in billions, its share in %, and its epochs in 270
// billion training tokens. Shares and sizes are published with two or three digits, epochs with one decimal.
TEST(Curate, MixesAsMtNlg) {
    struct Row {
        const char* name;
        double tokens, share, epochs;
    };
    const Row rows[] = {{"Books3", 25.7, 14.3, 1.5},       {"OpenWebText2", 14.8, 19.3, 3.6},
                        {"StackExchange", 11.6, 5.7, 1.4}, {"PubMed", 4.4, 2.9, 1.8},
                        {"Wikipedia", 4.2, 4.8, 3.2},      {"PG-19", 2.7, 0.9, 0.9},
                        {"BookCorpus2", 1.5, 1.0, 1.8},    {"NIH", 0.3, 0.2, 1.8},
                        {"Pile-CC", 49.8, 9.4, 0.5},       {"ArXiv", 20.8, 1.4, 0.2},
                        {"GitHub", 24.3, 1.6, 0.2},        {"CC-2020-50", 68.7, 13.0, 0.5},
                        {"CC-2021-04", 82.6, 15.7, 0.5},   {"RealNews", 21.9, 9.0, 1.1},
                        {"CC-Stories", 5.3, 0.9, 0.5}};
    std::vector<std::string> names, weights;
    std::vector<double> sizes;
    for (const Row& r : rows) {
        names.push_back(r.name);
        sizes.push_back(r.tokens * 1e9);
        weights.push_back(format("%s=%g", r.name, r.share));
    }
    const std::vector<MixedSource> mixed = mix_sources(names, sizes, {weights, 1, 270e9, 0});
    for (size_t i = 0; i < mixed.size(); i++) EXPECT_NEAR(mixed[i].epochs, rows[i].epochs, 0.15) << rows[i].name;
}

}  // namespace test_curate
