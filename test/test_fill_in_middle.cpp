// Fill-in-the-middle: the split and its draws against a plain loop over characters, the shares of each kind, and prepare.
#include <map>

#include "../llmc/commands/text_commands.h"
#include "files.h"
#include "small_tokenizer.h"
#include "testing.h"

namespace test_fill_in_middle {

using Texts = std::vector<std::string>;

Tokenizer tokenizer_with(const test::TemporaryDirectory& dir, const Texts& sentinels) {
    Texts special_tokens = {"<|endoftext|>"};
    special_tokens.insert(special_tokens.end(), sentinels.begin(), sentinels.end());
    return test::small_tokenizer(dir, special_tokens);
}
const Texts starcoder = {"<fim_prefix>", "<fim_suffix>", "<fim_middle>"};

// The result as a text, with the sentinels as P, S and M and each part in brackets, those that continue the text after a plus.
std::string shown(const FillInMiddle& fim, const Tokenizer& tokenizer, const std::string& text, uint32_t file,
                  uint64_t number) {
    std::string all;
    fim.split(
        text, file, number, [&](int token) { all += (char)toupper(tokenizer.token_bytes(token)[5]); },
        [&](std::string_view part, bool continues) { all += (continues ? "+[" : "[") + std::string(part) + "]"; });
    return all;
}

TEST(FillInMiddle, EqualsAPlainLoop) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = tokenizer_with(dir, starcoder);
    const Texts characters = {"a", " ", "\n", "é", "あ", "😀"};
    test::Rng rng(1);
    const double rate = 0.6, spm_rate = 0.3;
    std::map<char, int> kinds;
    double prefix_share = 0, middle_share = 0, long_ones = 0;
    const int n = 4000;
    for (int i = 0; i < n; i++) {
        Texts document;
        for (int length = i % 40; length > 0; length--) document.push_back(characters[(size_t)rng.below(6)]);
        const auto part = [&](int64_t begin, int64_t end) {
            std::string text;
            for (int64_t k = begin; k < end; k++) text += document[(size_t)k];
            return text;
        };
        const auto length = (int64_t)document.size();
        const uint32_t file = (uint32_t)(i % 3);
        const auto draw = [&](uint64_t k) { return uniform_at(7, RngPurpose::infilling, file, (uint64_t)i * 4 + k); };
        std::string expected = "[" + part(0, length) + "]";
        if (draw(0) < rate) {
            int64_t first = (int64_t)(draw(2) * (double)(length + 1)), second = (int64_t)(draw(3) * (double)(length + 1));
            if (first > second) std::swap(first, second);
            const std::string prefix = "[" + part(0, first) + "]", middle = "+[" + part(first, second) + "]",
                              suffix = "+[" + part(second, length) + "]";
            expected = draw(1) < spm_rate ? "PS" + suffix + "M" + prefix + middle : "P" + prefix + "S" + suffix + "M" + middle;
            kinds[expected[1]]++;
            if (length >= 30) {
                prefix_share += (double)first / (double)length;
                middle_share += (double)(second - first) / (double)length;
                long_ones++;
            }
        }
        const std::string text = part(0, length);
        EXPECT_EQ(shown(FillInMiddle(tokenizer, rate, spm_rate, 7), tokenizer, text, file, (uint64_t)i), expected);
    }
    // [: PSM, S: SPM. The parts have a third of the text on average. Bounds of four standard deviations.
    EXPECT_NEAR(kinds['['] + kinds['S'], n * rate, 4 * std::sqrt(n * rate * (1 - rate)));
    EXPECT_NEAR(kinds['S'], n * rate * spm_rate, 4 * std::sqrt(n * rate * spm_rate * (1 - rate * spm_rate)));
    EXPECT_NEAR(prefix_share / long_ones, 1 / 3.0, 4 * std::sqrt(1 / 18.0 / long_ones));
    EXPECT_NEAR(middle_share / long_ones, 1 / 3.0, 4 * std::sqrt(1 / 18.0 / long_ones));
}

TEST(FillInMiddle, AnyBytesAndExtremeRates) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = tokenizer_with(dir, starcoder);
    const FillInMiddle never(tokenizer, 0, 0.5, 1), psm(tokenizer, 1, 0, 1), spm(tokenizer, 1, 1, 1);
    EXPECT_EQ(shown(psm, tokenizer, "", 0, 0), "P[]S+[]M+[]");
    for (uint64_t i = 0; i < 50; i++) {
        const std::string bytes = "\x80\xbf" + std::string(i % 5, 'a') + "\xff\xe3\x81";
        EXPECT_EQ(shown(never, tokenizer, bytes, 0, i), "[" + bytes + "]");
        std::string whole;
        Texts parts;
        psm.split(
            bytes, 0, i, [](int) {}, [&](std::string_view part, bool) { parts.emplace_back(part); });
        ASSERT_EQ(parts.size(), 3u);
        EXPECT_EQ(parts[0] + parts[2] + parts[1], bytes);
        EXPECT_EQ(shown(spm, tokenizer, bytes, 0, i).substr(0, 2), "PS");
    }
}

TEST(FillInMiddle, FindsTheTokens) {
    const test::TemporaryDirectory dir;
    const Texts known[] = {{"<fim-prefix>", "<fim-suffix>", "<fim-middle>"},
                           {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"},
                           {"▁<PRE>", "▁<SUF>", "▁<MID>"},
                           {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}};
    for (const Texts& tokens : known) {
        const Tokenizer tokenizer = tokenizer_with(dir, tokens);
        std::vector<int> found;
        FillInMiddle(tokenizer, 1, 0, 1)
            .split(
                "abc", 0, 0, [&](int token) { found.push_back(token); }, [](std::string_view, bool) {});
        for (size_t i = 0; i < 3; i++) EXPECT_EQ(tokenizer.token_bytes(found.at(i)), tokens[i]);
    }
    const Tokenizer partial = tokenizer_with(dir, {"<fim_prefix>", "<fim_suffix>"});
    test::expect_error([&] { FillInMiddle(partial, 1, 0, 1); },
                       {"has no tokens for prefix, suffix and middle", "<fim_prefix>", "HINT"});
}

// Each document's parts are encoded by themselves; an interrupted run resumes with the same bytes.
TEST(FillInMiddle, PreparesAndResumes) {
    const test::TemporaryDirectory dir;
    const Tokenizer tokenizer = tokenizer_with(dir, starcoder);
    PrepareOptions o;
    o.tokenizer = dir / "tok";
    o.output_prefix = dir / "whole";
    o.fim_rate = 0.5;
    o.workers = 2;
    Texts documents;
    for (const std::string name : {"a", "b"}) {
        std::string lines;
        for (int i = 0; i < 200; i++) {
            documents.push_back("the cat " + name + std::to_string(i) + " sat on the mat <|endoftext|> and あ");
            lines += nlohmann::json{{"text", documents.back()}}.dump() + "\n";
        }
        o.input.push_back(dir / (name + ".jsonl"));
        test::write_file(o.input.back(), lines);
    }
    const auto run = [](const PrepareOptions& options) { test::output_of([&] { prepare(options, nullptr); }); };
    run(o);
    const FillInMiddle fim(tokenizer, 0.5, 0.5, 1234);
    {
        const TokenDataset data = TokenDataset::open(dir / "whole");
        ASSERT_EQ(data.n_documents(), 400);
        for (int64_t d = 0; d < 400; d++) {
            std::vector<int> expected, found((size_t)data.length(d));
            fim.split(
                documents[(size_t)d], (uint32_t)(d / 200), (uint64_t)(d % 200), [&](int token) { expected.push_back(token); },
                [&](std::string_view part, bool) { tokenizer.encode_append(part, expected); });
            expected.push_back(tokenizer.eod_id());
            data.read(d, 0, data.length(d), found.data());
            EXPECT_EQ(found, expected) << d;
        }
    }
    const std::string lines = test::read_file(o.input[1]);
    PrepareOptions parts = o;
    parts.output_prefix = dir / "parts";
    parts.resume = true;
    test::write_file(o.input[1], "[" + lines.substr(0, lines.find('\n') + 1) + ",");
    test::expect_error([&] { run(parts); }, {"b.jsonl", "cut off"});
    test::write_file(o.input[1], lines);
    for (int change = 0; change < 3; change++) {
        PrepareOptions other = parts;
        (change == 0 ? other.fim_rate : other.fim_spm_rate) = 0.4;
        if (change == 2) other = parts, other.seed = 5;
        test::expect_error([&] { run(other); }, {"other options"});
    }
    run(parts);
    EXPECT_EQ(test::read_file(dir / "parts.bin"), test::read_file(dir / "whole.bin"));
}

}  // namespace test_fill_in_middle
