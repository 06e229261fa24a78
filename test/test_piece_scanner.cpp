// The hand-written scanners split every text like PCRE2, and use PCRE2's character classes.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "../llmc/tokenizer/pre_tokenizer.h"

namespace test_piece_scanner {

std::vector<std::string> known_patterns() {
    return {pretokenizer_pattern("gpt2"), pretokenizer_pattern("llama3"), qwen2_pattern, pretokenizer_pattern("bloom"),
            bloom_pattern_in_files};
}

std::vector<std::string_view> pieces_of(const PreTokenizer& p, std::string_view text) {
    std::vector<std::string_view> pieces;
    p.split(text, [&](std::string_view piece) { pieces.push_back(piece); });
    return pieces;
}

struct Both {
    PreTokenizer by_hand, by_pcre2;
    explicit Both(const std::string& pattern)
        : by_hand(pattern), by_pcre2({Splitter(pattern, SplitBehavior::isolated, false, false)}) {}
};

// Every code point between letters, spaces, digits and punctuation; only the first 4096 of planes without characters, with
// LONG=1 all.
TEST(PieceScanner, EveryCodePointIsCutAsByPcre2) {
    for (const std::string& pattern : known_patterns()) {
        const Both both(pattern);
        ASSERT_TRUE(PieceScanner::knows(pattern));
        for (uint32_t block = 0; block < 0x110000; block += 0x1000) {
            const bool assigned = block < 0x40000 || block >> 16 == 0xe;
            if (!assigned && block % 0x10000 && !getenv("LONG")) continue;
            std::string text;
            for (uint32_t c = block; c < block + 0x1000; c++)
                if (c < 0xd800 || c > 0xdfff) {
                    const std::string character = utf8(c);
                    text += character + "a " + character + "1'" + character + "-\n" + character;
                }
            ASSERT_EQ(pieces_of(both.by_hand, text), pieces_of(both.by_pcre2, text)) << pattern << " from " << block;
        }
    }
}

// Random texts of characters that the patterns distinguish, some with invalid UTF-8; LONG=1: a hundred times as many.
TEST(PieceScanner, RandomTextsAreCutAsByPcre2) {
    const std::vector<std::string> parts = {
        " ",      " ",  "  ",  "\n",         "\r\n", "\t",     "a",      "the",      "B",      "S",      "'",
        "'s",     "'S", "'re", "'LL",        "'ve",  "'",      "l",      "e",        "v",      "1",      "12",
        "345",    ".",  ",",   "!?",         "--",   "(",      "|",      "é",        "日本",   "語",     "。",
        "、",     "،",  "।",   "\u3000",     "…",    "\u00a0", "\u2028", "\u0085",   "\u017f", "\u212a", "\u0301",
        "\u0663", "Ⅷ",  "😀",   "\U00020000", "\x0b", "\x1c",   "\xff",   "\xe3\x81", "\xc2",   "_"};
    const int rounds = getenv("LONG") ? 1000000 : 10000;
    std::vector<Both> all;
    for (const std::string& pattern : known_patterns()) all.emplace_back(pattern);
    std::mt19937 random(7);
    for (int round = 0; round < rounds; round++) {
        // Few kinds of parts per text, so that they meet often; a few of them in long runs.
        std::vector<size_t> chosen(2 + random() % 8);
        for (size_t& c : chosen) c = random() % parts.size();
        std::string text;
        const size_t length = random() % 50 == 0 ? 9000 : random() % 200;
        while (text.size() < length) {
            const std::string& part = parts[chosen[random() % chosen.size()]];
            for (size_t n = random() % 40 == 0 ? random() % 400 : 1 + random() % 3; n > 0; n--) text += part;
        }
        for (size_t p = 0; p < all.size(); p++)
            ASSERT_EQ(pieces_of(all[p].by_hand, text), pieces_of(all[p].by_pcre2, text)) << known_patterns()[p] << "\n" << text;
    }
}

// The searches over 64 bytes at once give the same result as testing each byte.
TEST(PieceScanner, VectorsFindTheBytesOfARange) {
    char bytes[64];
    std::mt19937 random(8);
    for (int round = 0; round < 10000; round++) {
        for (char& b : bytes) b = (char)(random() % 256);
        const uint8_t first = (uint8_t)(random() % 256), last = (uint8_t)(first + random() % (256u - first));
        uint64_t expected = 0;
        for (int i = 0; i < 64; i++) {
            const uint8_t b = (uint8_t)bytes[i];
            expected |= (uint64_t)(b >= first && b <= last) << i;
        }
        ASSERT_EQ(Bytes64(bytes).within(first, last), expected) << (int)first << " ... " << (int)last;
    }
}

}  // namespace test_piece_scanner
