// llmc/base/unicode.h: Unicode normalization forms and character classes.
#include <gtest/gtest.h>

#include "../llmc/base/unicode.h"

TEST(Unicode, CharactersRoundTrip) {
    for (uint32_t c = 0; c < 0x110000; c++) {
        if (c >= 0xd800 && c < 0xe000) continue;
        const std::string s = utf8(c);
        const Utf8Character back = first_character(s + "x");
        ASSERT_EQ(back.code, (int32_t)c);
        ASSERT_EQ(back.length, s.size());
    }
    for (const char* bad : {"\x80", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8", "\xe3\x81"}) {
        EXPECT_EQ(first_character(bad).code, -1);
        EXPECT_EQ(first_character(bad).length, 1u);
    }
}

TEST(Unicode, PartsThatAreUtf8) {
    std::vector<std::pair<std::string, bool>> parts;
    each_valid_part("a\u3042\xff\xe3\x81z", [&](std::string_view part, bool valid) { parts.emplace_back(part, valid); });
    EXPECT_EQ(parts, (std::vector<std::pair<std::string, bool>>{{"a\u3042", true}, {"\xff\xe3\x81", false}, {"z", true}}));
}

TEST(Unicode, White) {
    size_t n = 0;
    for (int32_t c = -1; c < 0x110000; c++) n += is_space(c);
    EXPECT_EQ(n, 25u);  // from PropList.txt
    EXPECT_TRUE(is_space(0x3000) && is_space(0x85) && !is_space(0x200b) && !is_space(0x180e));
}

#if HAVE_UTF8PROC
TEST(Unicode, NormalForms) {
    struct {
        const char *text, *nfc, *nfd, *nfkc, *nfkd;
    } rows[] = {
        {"", "", "", "", ""},
        {"plain\tASCII\n", "plain\tASCII\n", "plain\tASCII\n", "plain\tASCII\n", "plain\tASCII\n"},
        {"\u00e9", "\u00e9", "e\u0301", "\u00e9", "e\u0301"},
        {"ae\u0301b", "a\u00e9b", "ae\u0301b", "a\u00e9b", "ae\u0301b"},  // the accent belongs to an ASCII letter
        {"\u212b", "\u00c5", "A\u030a", "\u00c5", "A\u030a"},
        {"a\u0323\u0307", "\u1ea1\u0307", "a\u0323\u0307", "\u1ea1\u0307", "a\u0323\u0307"},
        {"a\u0307\u0323", "\u1ea1\u0307", "a\u0323\u0307", "\u1ea1\u0307", "a\u0323\u0307"},  // marks in order of their class
        {"\uac01", "\uac01", "\u1100\u1161\u11a8", "\uac01", "\u1100\u1161\u11a8"},
        {"\uff76\uff9e", "\uff76\uff9e", "\uff76\uff9e", "\u30ac", "\u30ab\u3099"},
        {"\ufb01 \u00bd \uff21\u3000x", "\ufb01 \u00bd \uff21\u3000x", "\ufb01 \u00bd \uff21\u3000x", "fi 1\u20442 A x",
         "fi 1\u20442 A x"},
        {"\ufdfa", "\ufdfa", "\ufdfa",
         "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645",
         "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645"},
        {"\U0001d15e", "\U0001d157\U0001d165", "\U0001d157\U0001d165", "\U0001d157\U0001d165", "\U0001d157\U0001d165"},
        {"e\u0301\xff\u0301\xe3\x81 e\u0301", "\u00e9\xff\u0301\xe3\x81 \u00e9", "e\u0301\xff\u0301\xe3\x81 e\u0301",
         "\u00e9\xff\u0301\xe3\x81 \u00e9", "e\u0301\xff\u0301\xe3\x81 e\u0301"},  // invalid UTF-8 stays unchanged
    };
    for (const auto& row : rows) {
        EXPECT_EQ(normalize_unicode(row.text, NormalForm::nfc), row.nfc) << row.text;
        EXPECT_EQ(normalize_unicode(row.text, NormalForm::nfd), row.nfd) << row.text;
        EXPECT_EQ(normalize_unicode(row.text, NormalForm::nfkc), row.nfkc) << row.text;
        EXPECT_EQ(normalize_unicode(row.text, NormalForm::nfkd), row.nfkd) << row.text;
    }
    const std::string nul("a\0\u00e9\0", 5);
    EXPECT_EQ(normalize_unicode(nul, NormalForm::nfkc), nul);
}

// The identities of UAX 15, on random text that is half ASCII, with invalid UTF-8.
TEST(Unicode, FormsOfForms) {
    uint64_t state = 1;
    const auto random = [&](uint64_t n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) % n;
    };
    for (int round = 0; round < 500; round++) {
        std::string text;
        for (int i = 0; i < 60; i++) {
            const uint64_t kind = random(8);
            if (kind < 3) text += (char)random(128);
            else if (kind == 3) text += (char)(128 + random(128));
            else if (kind == 4) text += utf8((uint32_t)(0x300 + random(0x70)));
            else if (kind == 5) text += utf8((uint32_t)(0x1100 + random(0x100)));
            else text += utf8((uint32_t)(kind == 6 ? random(0xd800) : 0xf900 + random(0x2100)));
        }
        const auto form = [&](std::string_view s, NormalForm f) { return normalize_unicode(s, f); };
        const std::string nfc = form(text, NormalForm::nfc), nfd = form(text, NormalForm::nfd);
        const std::string nfkc = form(text, NormalForm::nfkc), nfkd = form(text, NormalForm::nfkd);
        EXPECT_EQ(form(nfc, NormalForm::nfc), nfc);
        EXPECT_EQ(form(nfd, NormalForm::nfc), nfc);
        EXPECT_EQ(form(nfc, NormalForm::nfd), nfd);
        EXPECT_EQ(form(nfkd, NormalForm::nfkc), nfkc);
        EXPECT_EQ(form(nfkc, NormalForm::nfkd), nfkd);
        EXPECT_EQ(form(nfc, NormalForm::nfkc), nfkc);
        EXPECT_EQ(form(nfd, NormalForm::nfkd), nfkd);
    }
}

// A letter with 200,000 accents in wrong order is sorted in less than quadratic time.
TEST(Unicode, ManyAccentsOnALetter) {
    std::string text = "a", above, below;
    for (int i = 0; i < 100000; i++) text += "\u0301\u0316";
    for (int i = 0; i < 99999; i++) above += "\u0301";
    for (int i = 0; i < 100000; i++) below += "\u0316";
    if (HAVE_UTF8PROC) {
        EXPECT_TRUE(normalize_unicode(text, NormalForm::nfc) == "\u00e1" + below + above);
    }
}

TEST(Unicode, Graphemes) {
    for (const std::vector<std::string>& parts : {std::vector<std::string>{},
                                                  {"a", "b"},
                                                  {"e\u0301\u0302", "x"},
                                                  {"\r\n", "\n"},
                                                  {"\u1100\u1161\u11a8", "\u1100"},
                                                  {"\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd"},
                                                  {"\U0001f1ef\U0001f1f5", "\U0001f1eb\U0001f1f7"},
                                                  {"\xff", "\u0301", "a"},
                                                  {"x", "\n", "\xff", "a\u0301"}}) {
        std::string text;
        for (const std::string& part : parts) text += part;
        std::vector<std::string> found;
        each_grapheme(text, [&](std::string_view grapheme) { found.emplace_back(grapheme); });
        EXPECT_EQ(found, parts);
    }
}

TEST(Unicode, Classes) {
    struct {
        int32_t c;
        bool letter, mark, number, punctuation;
        int32_t lower;
    } rows[] = {
        {'a', true, false, false, false, 'a'},      {'Z', true, false, false, false, 'z'},
        {'7', false, false, true, false, '7'},      {'.', false, false, false, true, '.'},
        {'+', false, false, false, false, '+'},     {0x2167, false, false, true, false, 0x2177},
        {0x0669, false, false, true, false, 0x669}, {0x3042, true, false, false, false, 0x3042},
        {0x0301, false, true, false, false, 0x301}, {0x3002, false, false, false, true, 0x3002},
        {0x03a3, true, false, false, false, 0x3c3}, {0x10400, true, false, false, false, 0x10428},
        {-1, false, false, false, false, -1},
    };
    for (const auto& row : rows) {
        EXPECT_EQ(is_letter(row.c), row.letter) << row.c;
        EXPECT_EQ(is_mark(row.c), row.mark) << row.c;
        EXPECT_EQ(is_number(row.c), row.number) << row.c;
        EXPECT_EQ(is_punctuation(row.c), row.punctuation) << row.c;
        EXPECT_EQ(lower(row.c), row.lower) << row.c;
    }
    EXPECT_EQ(lowercase("\u00c4\u0130 ΑΣ\xff\u1e9e"), "\u00e4i\u0307 ασ\xff\u00df");
}
#else
TEST(Unicode, SaysWhichLibraryIsMissing) {
    EXPECT_THROW(normalize_unicode("x", NormalForm::nfc), Error);
    EXPECT_THROW(is_letter('x'), Error);
    EXPECT_EQ(lower('X'), 'x');
}
#endif
