// The classifier of languages and quality: it learns, its file preserves its bits and other files are refused, threads do
// not change results, and no text makes it fail.
#include <gtest/gtest.h>

#include "../llmc/curate/classifier_report.h"
#include "../llmc/curate/labeled_texts.h"
#include "../llmc/curate/language.h"
#include "../llmc/curate/quality.h"
#include "../llmc/curate/text_classifier.h"
#include "files.h"
#include "testing.h"

namespace test_text_classifier {

// Sentences of four languages; every third is left out of training.
const std::vector<std::string> languages = {"de", "en", "ja", "ru"};
const std::vector<std::vector<std::string>> sentences = {
    {"Der Hund läuft schnell über die Straße und bellt.", "Ich möchte heute nicht mit dir in die Schule gehen.",
     "Wir haben gestern ein schönes Haus in der Stadt gesehen.", "Das ist nicht das, was ich dir gesagt habe.",
     "Die Kinder spielen auf der Wiese hinter dem Haus.", "Er hat sich nicht über das Geschenk gefreut."},
    {"The dog runs quickly across the street and barks.", "I do not want to go to school with you today.",
     "Yesterday we have seen a beautiful house in the town.", "This is not what I have told you about it.",
     "The children are playing on the meadow behind the house.", "He was not happy about what they had given him."},
    {"犬は通りを速く走って、吠えています。", "今日はあなたと一緒に学校に行きたくありません。",
     "昨日、私たちは町で美しい家を見ました。", "それは私があなたに言ったことではありません。",
     "子供たちは家の後ろの草原で遊んでいます。", "彼はその贈り物を喜びませんでした。"},
    {"Собака быстро бежит через улицу и лает.", "Сегодня я не хочу идти с тобой в школу.",
     "Вчера мы видели в городе красивый дом.", "Это не то, что я тебе об этом сказал.", "Дети играют на лугу за домом.",
     "Он не обрадовался этому подарку."}};

std::vector<LabeledText> training_texts() {
    std::vector<LabeledText> texts;
    for (size_t k = 0; k < languages.size(); k++)
        for (size_t i = 0; i < sentences[k].size(); i++)
            if (i % 3 != 2) texts.push_back({sentences[k][i], (int)k});
    return texts;
}
TextClassifier train(int threads, uint64_t seed = 1) {
    ClassifierShape shape;
    shape.bits = 12;
    ClassifierTraining how;
    how.epochs = 5;
    how.shortest_piece = 16;
    how.longest_piece = 60;
    how.seed = seed;
    how.threads = threads;
    return TextClassifier::train(languages, shape, how, training_texts());
}
const TextClassifier& trained() {
    static const TextClassifier c = train(1);
    return c;
}
std::string bytes_of(const TextClassifier& c) {
    const test::TemporaryDirectory dir;
    c.save(dir / "model");
    EXPECT_EQ(dir.names(), std::set<std::string>{"model"});
    return test::read_file(dir / "model");
}

TEST(TextClassifier, LearnsLanguages) {
    for (size_t k = 0; k < languages.size(); k++)
        for (const std::string& text : sentences[k]) {
            const auto guess = trained().classify(text);
            EXPECT_EQ(guess.label, languages[k]) << text;
            EXPECT_GT(guess.probability, 0.3f) << text;
            float sum = 0;
            for (const float p : trained().probabilities(text)) sum += p;
            EXPECT_NEAR(sum, 1, 1e-5);
        }
}

TEST(TextClassifier, HasTheSameBitsForAnyNumberOfThreadsAndTheSameSeed) {
    const std::string one = bytes_of(trained());
    EXPECT_EQ(one, bytes_of(train(2)));
    EXPECT_EQ(one, bytes_of(train(3)));
    EXPECT_NE(one, bytes_of(train(1, 2)));
}

TEST(TextClassifier, SavesAndLoadsTheSameBits) {
    const test::TemporaryDirectory dir;
    trained().save(dir / "model");
    const TextClassifier loaded = TextClassifier::load(dir / "model");
    EXPECT_EQ(loaded.labels(), languages);
    EXPECT_EQ(bytes_of(loaded), bytes_of(trained()));
    for (const auto& texts : sentences)
        for (const std::string& text : texts) EXPECT_EQ(loaded.probabilities(text), trained().probabilities(text));
}

// A model's bytes with another header and a matching checksum.
std::string with_header(const std::string& model, const std::string& from, const std::string& to) {
    uint32_t n;
    memcpy(&n, &model[12], 4);
    std::string header = model.substr(16, n);
    const size_t at = header.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    header.replace(at, from.size(), to);
    n = (uint32_t)header.size();
    const std::string body = std::string((const char*)&n, 4) + header + model.substr(16 + model[12]);
    const uint32_t checksum = crc32c(body.data(), body.size());
    return model.substr(0, 8) + std::string((const char*)&checksum, 4) + body;
}

TEST(TextClassifier, RefusesOtherFiles) {
    const std::string model = bytes_of(trained());
    const auto refused = [](const std::string& bytes, const std::string& why) {
        test::expect_error([&] { TextClassifier::from_bytes(bytes, "x.model"); }, {"x.model", why});
    };
    for (const std::string& foreign : {std::string(), std::string("TGPT"), std::string("PK\x03\x04 something else")})
        refused(foreign, "is not a classifier; HINT: ");
    refused("\xba\x16\x4f\x2f\x0c", "is a fastText model");
    for (const size_t size : {(size_t)8, (size_t)13, (size_t)16, (size_t)100, model.size() - 1})
        refused(model.substr(0, size), "is damaged or truncated");
    refused(model + "x", "is damaged or truncated");
    for (const size_t at : {(size_t)9, (size_t)14, (size_t)40, model.size() / 2}) {
        std::string damaged = model;
        damaged[at] ^= 4;
        refused(damaged, "is damaged or truncated");
    }
    for (const auto& [from, to, why] :
         std::vector<std::array<std::string, 3>>{{"\"bits\":12", "\"bits\":40", "exceeds the limits"},
                                                 {"\"bits\":12", "\"bits\":11", "bytes; it has"},
                                                 {"\"bits\":12", "\"bits\":1e99", "exceeds the limits"},
                                                 {"\"bits\":12", "\"bits\":\"x\"", "is not a supported classifier"},
                                                 {"\"longest\":4", "\"longest\":9", "exceeds the limits"},
                                                 {"characters", "pictures", "exceeds the limits"},
                                                 {"\"de\",\"en\",\"ja\",\"ru\"", "\"de\"", "exceeds the limits"},
                                                 {"\"labels\"", "\"names\"", "is not a supported classifier"},
                                                 {"{", "[", "is not valid JSON"}})
        refused(with_header(model, from, to), why);
    TextClassifier::from_bytes(with_header(model, "\"de\"", "\"nl\""), "x.model");
}

TEST(TextClassifier, TakesAnyText) {
    const auto same = trained().probabilities("");
    for (const float p : same) EXPECT_FLOAT_EQ(p, 0.25f);
    for (const std::string& nothing : {std::string("\0\0\n ", 4), std::string("12345 !?"), std::string("\xff\xc0\x80\xed")})
        EXPECT_EQ(trained().probabilities(nothing), same);
    test::Rng rng(1);
    for (int i = 0; i < 300; i++) {
        std::string text;
        for (int k = rng.below(60); k > 0; k--) text += (char)(rng.below(3) ? rng.below(256) : 0xe0 + rng.below(32));
        for (const float p : trained().probabilities(text)) EXPECT_TRUE(p >= 0 && p <= 1) << printable(text);
    }
    for (const std::string& one :
         {std::string("a"), std::string("\xe3"), std::string("\xe3\x81"), std::string("\xf0\x9f\x99\x82")})
        EXPECT_TRUE(trained().classify(one).probability >= 0.25f);
    const std::string much(4 << 20, 'e');  // a sum of weights that exceeds 16 bits
    EXPECT_TRUE(trained().classify(much).probability > 0);
    const std::string mixed = sentences[1][0] + "\n" + sentences[3][0] + sentences[3][1];
    EXPECT_EQ(trained().classify(mixed).label, "ru");
}

TEST(TextFeatures, AreThoseOfLowerCaseWordsWhateverIsBetweenThem) {
    const auto of = [](const std::string& text) {
        std::vector<uint32_t> found;
        features::of_characters(text, 1, 4, 20, [&](uint32_t row) { found.push_back(row); });
        return found;
    };
    EXPECT_EQ(of("ÄÖÜ éÀ Ελλάς ΆΈ Жёлтый ЁЖ Źdźbło İ"), of("äöü éà ελλάς άέ жёлтый ёж źdźbło i"));
    EXPECT_EQ(of("one two"), of("One, 12 -- TWO"));
    EXPECT_EQ(of("one\xff two"), of("one two"));
    EXPECT_NE(of("one two"), of("onetwo"));
    EXPECT_NE(of("ab ba"), of("ba ab"));
    // a, the space, ab, " ab", ...: 1 + 1 (" a"), b: 1 + 1 ("ab") + 1 (" ab"), end: 2 ("b "), ("ab ", " ab ")
    EXPECT_EQ(of("ab ").size(), 8u);
}

TEST(TextFeatures, OfWordsKeepMarksAndLines) {
    const auto of = [](const std::string& text) {
        std::vector<uint32_t> found;
        features::of_words(text, 1, 2, 20, [&](uint32_t row) { found.push_back(row); });
        return found;
    };
    EXPECT_EQ(of("Some 12 words").size(), 6u);
    EXPECT_EQ(of("Some 12 words"), of("some  99\twords"));
    EXPECT_EQ(of("one.").size(), 4u);
    EXPECT_NE(of("one two"), of("one\ntwo"));
    EXPECT_EQ(of("犬は").size(), 4u);
}

TEST(SampleText, TakesPiecesEvenly) {
    std::string buffer, text;
    EXPECT_EQ(sample_text("short", 100, buffer), "short");
    for (int i = 0; i < 1000; i++) text += i < 500 ? "あ" : "я";
    const std::string_view sample = sample_text(text, 160, buffer);
    EXPECT_NEAR((double)sample.size(), 168, 24);
    EXPECT_EQ(count_odd_bytes(sample).invalid, 0);
    EXPECT_EQ(sample.substr(0, 3), "あ");
    EXPECT_EQ(sample.substr(sample.size() - 3), "я\n");
    EXPECT_EQ(sample_text(std::string_view(text).substr(0, 200), 0, buffer).size(), 200u);
    EXPECT_LE(sample_text(std::string(1000, '\x80'), 16, buffer).size(), 64u);
}

TEST(LanguageFilter, KeepsLanguagesThatAreSure) {
    const test::TemporaryDirectory dir;
    trained().save(dir / "model");
    const LanguageFilter english(dir / "model", {"en"}, 0.3);
    const auto of = [](const LanguageFilter& filter, const std::string& text) { return filter.judge(filter.guess(text)); };
    EXPECT_TRUE(of(english, sentences[1][2]).keep);
    const DocumentVerdict other = of(english, sentences[2][2]);
    EXPECT_FALSE(other.keep);
    EXPECT_EQ(other.rule, "language");
    EXPECT_EQ(other.detail.substr(0, 19), "ja with probability");
    EXPECT_TRUE(of(LanguageFilter(dir / "model", {}, 0.3), sentences[2][2]).keep);
    EXPECT_FALSE(of(LanguageFilter(dir / "model", {}, 0.3), "").keep);
    test::expect_error([&] { LanguageFilter(dir / "model", {"fr"}, 0.5); },
                       {"does not know the language 'fr'", "de, en, ja, ru"});
}

TEST(QualityFilter, KeepsAsParetoDoes) {
    const test::TemporaryDirectory dir;
    ClassifierShape shape{"words", 1, 2, 12};
    const std::vector<LabeledText> texts = {{"buy cheap pills now !!! click here", 0},
                                            {"click here click here to buy now !!!", 0},
                                            {"The theory was confirmed by later observations.", 1},
                                            {"Later observations have not confirmed the theory of light.", 1}};
    ClassifierTraining how;
    how.epochs = 10;
    TextClassifier::train({"bad", "good"}, shape, how, texts).save(dir / "model");
    const QualityFilter threshold(dir / "model", "threshold", 0.5, 1), pareto(dir / "model", "pareto", 9, 1);
    const float good = threshold.score("The observations confirmed it."), bad = threshold.score("click now to buy !!!");
    EXPECT_GT(good, 0.5f);
    EXPECT_LT(bad, 0.5f);
    EXPECT_TRUE(threshold.judge(good, 0).keep);
    EXPECT_FALSE(threshold.judge(bad, 0).keep);
    for (const float score : {0.f, 0.5f, 0.9f, 1.f}) {
        int kept = 0;
        for (int64_t number = 0; number < 20000; number++) kept += pareto.judge(score, number).keep;
        const double share = std::pow(2 - score, -9.0);
        EXPECT_NEAR(kept, 20000 * share, 4 * std::sqrt(20000 * share * (1 - share)) + 1e-9) << score;
    }
    EXPECT_EQ(pareto.judge(0.8f, 7).keep, pareto.judge(0.8f, 7).keep);
    trained().save(dir / "languages");
    test::expect_error([&] { QualityFilter(dir / "languages", "threshold", 0.5, 1); }, {"does not judge quality", "HINT: "});
}

TEST(ClassifierReport, CountsAndRanks) {
    ClassifierReport report({"good", "bad"});
    report.add("a", 0, {0.9f, 0.1f});
    report.add(std::string(60, 'a'), 0, {0.4f, 0.6f});
    report.add("a", 1, {0.4f, 0.6f});
    report.add("a", 1, {0.2f, 0.8f});
    EXPECT_DOUBLE_EQ(report.accuracy(), 0.75);
    EXPECT_DOUBLE_EQ(report.recall(0), 0.5);
    EXPECT_DOUBLE_EQ(report.precision(0), 1);
    EXPECT_DOUBLE_EQ(report.precision(1), 2.0 / 3);
    EXPECT_DOUBLE_EQ(report.f1(0), 2.0 / 3);
    EXPECT_DOUBLE_EQ(report.auc(), 3.5 / 4);  // one of four pairs is a tie
    EXPECT_TRUE(std::isnan(ClassifierReport({"a", "b"}).auc()));
}

TEST(LabeledTexts, AreLabeledByNameFolderOrPrefix) {
    const test::TemporaryDirectory dir;
    std::filesystem::create_directories(dir / "texts/ja/more");
    for (const char* name : {"texts/en.txt", "texts/ja/a.txt", "texts/ja/more/b.txt", "de.old.txt"})
        test::write_file(dir / name, "first line\n\nsecond\n");
    const auto list = [&](const Strings& items) {
        std::string text;
        for (const LabeledFile& f : labeled_files(items, "train-language"))
            text += f.label + "=" + f.path.substr((dir / "").size()) + " ";
        return text;
    };
    EXPECT_EQ(list({dir / "texts"}), "en=texts/en.txt ja=texts/ja/a.txt ja=texts/ja/more/b.txt ");
    EXPECT_EQ(list({"nl:" + (dir / "de.old.txt"), dir / "de.old.txt", dir / "texts"}),
              "nl=de.old.txt de=de.old.txt en=texts/en.txt ja=texts/ja/a.txt ja=texts/ja/more/b.txt ");
    EXPECT_EQ(list({"pt:" + (dir / "texts")}), "pt=texts/en.txt pt=texts/ja/a.txt pt=texts/ja/more/b.txt ");

    TextInput input;
    input.split = "line";
    const auto read = [&](int threads) {
        return LabeledTexts::read(labeled_files({dir / "texts"}, "train-language"), input, {}, 1, threads);
    };
    const LabeledTexts texts = read(1), again = read(3);
    EXPECT_EQ(texts.labels, (std::vector<std::string>{"en", "ja"}));
    ASSERT_EQ(texts.items.size(), 6u);
    for (size_t i = 0; i < 6; i++) {
        EXPECT_EQ(texts.items[i].text, i % 2 ? "second" : "first line");
        EXPECT_EQ(texts.items[i].label, i >= 2);
        EXPECT_EQ(texts.items[i].key, again.items[i].key);
    }
    test::expect_error(
        [&] {
            LabeledTexts::read({{"fr", dir / "de.old.txt"}}, input, {"de", "en"}, 1, 1);
        },
        {"is labeled 'fr'", "de, en"});
}

}  // namespace test_text_classifier
