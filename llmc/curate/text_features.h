// The features of a text for a classifier: its n-grams, each hashed to one of 2^bits buckets (feature hashing: Weinberger et
// al., arXiv 0902.2206). Only the bucket of an n-gram is stored; n-grams that share one are distinguished by the text's other
// n-grams.
//   characters   n-grams of letters in lower case; any text between words counts as one space. They identify
//                languages (Cavnar and Trenkle 1994). N-grams longer than 2 do not reach into Chinese, Japanese or Korean
//                characters, which are informative by themselves; a character beyond ASCII also adds its script
//   words        n-grams of words, of single punctuation marks and of ends of lines; digits are alike. They distinguish good
//                prose from bad (fastText: Joulin et al., arXiv 1607.01759). Without spaces, each character is a word
// Lower case uses our own table for Latin, Greek and Cyrillic: a model must see the same features on every machine, for any
// locale and libraries. Bytes that are not UTF-8 count as spaces. A text's features depend on nothing else.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "../base/utf8.h"

namespace features {

enum class Kind : uint32_t { space, letter, digit, mark };
struct Character {
    uint32_t code;  // of the letter in lower case; of a space: ' '; of a digit: '0'
    Kind kind;
    bool is_wide() const { return code >= 0x2e80; }  // CJK, kana, Hangul and further scripts: mostly written without spaces
};

inline uint32_t lower_case(uint32_t c) {
    const auto in = [c](uint32_t low, uint32_t high) { return c >= low && c <= high; };
    if (in('A', 'Z') || (in(0xc0, 0xde) && c != 0xd7) || (in(0x391, 0x3ab)) || in(0x410, 0x42f)) return c + 32;
    if (in(0x400, 0x40f)) return c + 80;
    if (c == 0x130) return 'i';
    if (c == 0x178) return 0xff;
    if (in(0x139, 0x148) || in(0x179, 0x17e)) return c + (c & 1);
    if (in(0x100, 0x177) || in(0x460, 0x481) || in(0x48a, 0x4bf) || in(0x4d0, 0x52f)) return c | 1;
    switch (c) {  // Greek letters with accents
        case 0x386: return 0x3ac;
        case 0x388:
        case 0x389:
        case 0x38a: return c + 37;
        case 0x38c: return 0x3cc;
        case 0x38e:
        case 0x38f: return c + 63;
        default: return c;
    }
}
inline Character character(uint32_t c) {
    const auto in = [c](uint32_t low, uint32_t high) { return c >= low && c <= high; };
    if (c <= ' ' || in(0x7f, 0xa0) || in(0x2000, 0x200f) || in(0x2028, 0x202f) || c == 0x3000 || c == 0xfeff || c == 0xfffd)
        return {c == '\n' ? (uint32_t)'\n' : (uint32_t)' ', Kind::space};
    if (in('0', '9') || in(0xff10, 0xff19)) return {'0', Kind::digit};
    const bool letter = c < 0x80 ? in('A', 'Z') || in('a', 'z')
                                 : (c >= 0xc0 || c == 0xaa || c == 0xb5 || c == 0xba) && c != 0xd7 && c != 0xf7 &&
                                       !in(0x2010, 0x2bff) && !in(0x3001, 0x3004) && !in(0x3008, 0x3020) && c != 0x30fb &&
                                       !in(0xff00, 0xff20) && !in(0xff3b, 0xff40) && !in(0xff5b, 0xff65) && c < 0x1f000;
    return {letter ? lower_case(c) : c, letter ? Kind::letter : Kind::mark};
}

// Calls use(Character) for each character of a text.
template <class Use>
void for_each_character(std::string_view text, const Use& use) {
    static const std::array<Character, 0x800> table = [] {  // codes of one or two bytes
        std::array<Character, 0x800> t;
        for (uint32_t c = 0; c < t.size(); c++) t[c] = character(c);
        return t;
    }();
    const unsigned char *s = (const unsigned char*)text.data(), *const end = s + text.size();
    const auto follows = [&](int k) { return end - s > k && (s[k] & 0xc0) == 0x80; };
    while (s < end) {
        const uint32_t first = *s;
        if (first < 0x80) {
            use(table[first]);
            s++;
        } else if (first >= 0xc2 && first < 0xe0 && follows(1)) {
            use(table[(first & 0x1f) << 6 | (s[1] & 0x3f)]);
            s += 2;
        } else if (first >= 0xe0 && first < 0xf0 && follows(1) && follows(2)) {
            use(character((first & 0xf) << 12 | (s[1] & 0x3fu) << 6 | (s[2] & 0x3f)));
            s += 3;
        } else if (first >= 0xf0 && first < 0xf5 && follows(1) && follows(2) && follows(3)) {
            use(character((first & 7) << 18 | (s[1] & 0x3fu) << 12 | (s[2] & 0x3fu) << 6 | (s[3] & 0x3f)));
            s += 4;
        } else {
            use(table[' ']);
            s++;
        }
    }
}

// The bucket of `key`; n separates n-grams of different lengths.
inline uint32_t bucket(uint64_t key, uint32_t n, int bits) {
    uint64_t h = (key + n * 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
    h ^= h >> 31;
    return (uint32_t)(h * 0x94D049BB133111EBull >> (64 - bits));
}

// Calls add(bucket) for each n-gram of n in [shortest, longest] characters, longest at most 5.
template <class Add>
void of_characters(std::string_view text, int shortest, int longest, int bits, const Add& add) {
    constexpr uint32_t script = 99;
    uint64_t before[4] = {' ', ' ', ' ', ' '};  // the characters before, newest first
    for_each_character(text, [&](Character c) {
        if (c.kind != Kind::letter) {
            if (before[0] == ' ') return;
            c.code = ' ';
        }
        uint64_t key = c.code;
        if (shortest <= 1 && c.code != ' ') add(bucket(key, 1, bits));
        if (c.code >= 0x80) add(bucket(c.code >> 8, script, bits));
        const int most = c.is_wide() ? std::min(longest, 2) : longest;
        for (int n = 2; n <= most; n++) {
            if (before[n - 2] >= 0x2e80 && n > 2) break;
            key = n <= 3 ? key | before[n - 2] << 21 * (n - 1) : key * 0xD6E8FEB86659FD93ull + before[n - 2];
            if (n >= shortest) add(bucket(key, (uint32_t)n, bits));
            if (before[n - 2] == ' ') break;  // an n-gram starts with at most one space
        }
        for (int k = 3; k > 0; k--) before[k] = before[k - 1];
        before[0] = c.code;
    });
}

// Calls add(bucket) for each n-gram of n in [shortest, longest] words, longest at most 3.
template <class Add>
void of_words(std::string_view text, int shortest, int longest, int bits, const Add& add) {
    uint64_t before[2] = {0, 0}, word = 0;  // keys of the previous words, newest first, and of the current one
    const auto end_word = [&](uint64_t next) {
        if (word != 0) {
            uint64_t key = word;
            for (int n = 1; n <= longest; n++) {
                if (n > 1) key = key * 0xD6E8FEB86659FD93ull + before[n - 2];
                if (n >= shortest) add(bucket(key, (uint32_t)n, bits));
            }
            before[1] = before[0];
            before[0] = word;
        }
        word = next;
    };
    for_each_character(text, [&](Character c) {
        const bool alone = c.kind == Kind::mark || c.is_wide() || c.code == '\n';
        if (alone) end_word(0);
        if (alone) end_word(c.code + 1);
        if (alone || c.kind == Kind::space) end_word(0);
        else word = (word + c.code) * 0x9E3779B97F4A7C15ull + 1;
    });
    end_word(0);
}

}  // namespace features

// At most about `bytes` of a text, for a guess about the whole: all of a short one, else eight pieces spread evenly over it,
// split between characters. `buffer` holds the pieces.
inline std::string_view sample_text(std::string_view text, size_t bytes, std::string& buffer) {
    constexpr size_t pieces = 8;
    if (bytes == 0 || text.size() <= bytes) return text;
    buffer.clear();
    const size_t length = bytes / pieces;
    const auto boundary = [&](size_t at) {
        for (int k = 0; k < 3 && at < text.size() && !begins_character(text[at]); k++) at++;
        return at;
    };
    for (size_t i = 0; i < pieces; i++) {
        const size_t from = boundary((text.size() - length) / (pieces - 1) * i);
        buffer += text.substr(from, boundary(std::min(text.size(), from + length)) - from);
        buffer += '\n';
    }
    return buffer;
}
