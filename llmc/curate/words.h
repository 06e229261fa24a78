// Words and characters of a text as hashes, for comparing texts: the same on every machine, for any locale and libraries.
//
// A word is a run of letters and digits in lower case. Characters of scripts that are written without spaces (Chinese and
// Japanese, Thai, Lao, Khmer, Burmese, Tibetan) are words of their own; Korean has spaces. Accents that are characters of their
// own are left out. Punctuation and symbols are
//   Punctuation::removed     left out, as if they were not there: "don't" is "dont"
//   Punctuation::spaces      as spaces, _ too; but a number keeps the point or comma before its decimals (datatrove's
//                            simplify_text, FineWeb)
//   Punctuation::separates   between words, and _ is a letter: the words of the regular expression \w+ (MT-NLG)
// Lower case covers Latin, Greek, Cyrillic and Armenian letters with a lower case of one character. Bytes that are not UTF-8
// count as letters.
#pragma once
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "../base/hash.h"
#include "../base/unicode.h"

enum class Punctuation { removed, spaces, separates };
enum class Digits { kept, as_zero };  // as_zero: a run of digits is "0", so that dates and counters make no difference

// ---- characters ------------------------------------------------------------------------------------------------------------
enum class CharacterKind : uint8_t { letter, digit, ideograph, space, punctuation, underscore, mark };

namespace detail {

struct CharacterRange {
    uint32_t first, last;
};
template <size_t n>
bool in_ranges(uint32_t c, const CharacterRange (&ranges)[n]) {
    for (const CharacterRange& r : ranges)
        if (c >= r.first && c <= r.last) return true;
    return false;
}

inline CharacterKind kind_by_ranges(uint32_t c) {
    static constexpr CharacterRange marks[] = {{0x300, 0x36f},   {0x483, 0x489},   {0x591, 0x5bd},   {0x610, 0x61a},
                                               {0x64b, 0x65f},   {0x1ab0, 0x1aff}, {0x1dc0, 0x1dff}, {0x200b, 0x200f},
                                               {0x202a, 0x202e}, {0x2060, 0x2064}, {0x20d0, 0x20ff}, {0x3099, 0x309a},
                                               {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}, {0xfeff, 0xfeff}};
    static constexpr CharacterRange punctuation[] = {
        {0, 0x2f},         {0x3a, 0x40},     {0x5b, 0x60},     {0x7b, 0xa9},     {0xab, 0xb4},     {0xb6, 0xb9},
        {0xbb, 0xbf},      {0xd7, 0xd7},     {0xf7, 0xf7},     {0x37e, 0x37e},   {0x387, 0x387},   {0x55a, 0x55f},
        {0x589, 0x58a},    {0x5be, 0x5be},   {0x5c0, 0x5c0},   {0x5f3, 0x5f4},   {0x60c, 0x60d},   {0x61b, 0x61f},
        {0x66a, 0x66d},    {0x6d4, 0x6d4},   {0x964, 0x965},   {0x1360, 0x1368}, {0x2010, 0x2070}, {0x207a, 0x207e},
        {0x208a, 0x208e},  {0x20a0, 0x20cf}, {0x2190, 0x2bff}, {0x2e00, 0x2e7f}, {0x3001, 0x3004}, {0x3008, 0x3020},
        {0x3030, 0x3030},  {0x303d, 0x303f}, {0x30a0, 0x30a0}, {0x30fb, 0x30fb}, {0xfd3e, 0xfd3f}, {0xfe10, 0xfe19},
        {0xfe30, 0xfe6b},  {0xff01, 0xff0f}, {0xff1a, 0xff20}, {0xff3b, 0xff40}, {0xff5b, 0xff65}, {0xffe0, 0xffee},
        {0x1f000, 0x1faff}};
    static constexpr CharacterRange digits[] = {
        {'0', '9'},     {0x660, 0x669}, {0x6f0, 0x6f9}, {0x966, 0x96f},   {0x9e6, 0x9ef},   {0xa66, 0xa6f},
        {0xae6, 0xaef}, {0xb66, 0xb6f}, {0xbe6, 0xbef}, {0xc66, 0xc6f},   {0xce6, 0xcef},   {0xd66, 0xd6f},
        {0xe50, 0xe59}, {0xed0, 0xed9}, {0xf20, 0xf29}, {0x1040, 0x1049}, {0x17e0, 0x17e9}, {0xff10, 0xff19}};
    static constexpr CharacterRange ideographs[] = {
        {0xe00, 0xfff},   {0x1000, 0x109f}, {0x1780, 0x17ff}, {0x2e80, 0x2fdf},   {0x3005, 0x3007},  {0x3021, 0x3029},
        {0x3031, 0x303c}, {0x3040, 0x30ff}, {0x31a0, 0x31ff}, {0x3200, 0x33ff},   {0x3400, 0x4dbf},  {0x4e00, 0x9fff},
        {0xf900, 0xfaff}, {0xaa60, 0xaa7f}, {0xff66, 0xff9f}, {0x1b000, 0x1b16f}, {0x20000, 0x3ffff}};
    if (is_python_space((int32_t)c)) return CharacterKind::space;
    if (c == '_') return CharacterKind::underscore;
    if (in_ranges(c, marks)) return CharacterKind::mark;
    if (in_ranges(c, digits)) return CharacterKind::digit;
    if (in_ranges(c, punctuation)) return CharacterKind::punctuation;
    return in_ranges(c, ideographs) ? CharacterKind::ideograph : CharacterKind::letter;
}

inline uint32_t lower_by_ranges(uint32_t c) {
    const auto in = [c](uint32_t first, uint32_t last) { return c >= first && c <= last; };
    if (in('A', 'Z') || in(0xc0, 0xd6) || in(0xd8, 0xde) || in(0x391, 0x3a9) || in(0x410, 0x42f) || in(0xff21, 0xff3a))
        return c + 32;
    if (c == 0x130) return 'i';
    if (c == 0x178) return 0xff;
    if (in(0x139, 0x148) || in(0x179, 0x17e)) return c % 2 ? c + 1 : c;  // pairs that start with an odd code
    if (in(0x100, 0x137) || in(0x14a, 0x177) || in(0x1de, 0x1ef) || in(0x1f8, 0x21f) || in(0x222, 0x233) || in(0x460, 0x481) ||
        in(0x48a, 0x4bf) || in(0x4d0, 0x52f) || in(0x1e00, 0x1e95) || in(0x1ea0, 0x1eff))
        return c % 2 ? c : c + 1;
    if (in(0x1cd, 0x1dc) || in(0x4c1, 0x4ce)) return c % 2 ? c + 1 : c;
    if (c == 0x386) return 0x3ac;
    if (in(0x388, 0x38a)) return c + 37;
    if (c == 0x38c) return 0x3cc;
    if (in(0x38e, 0x38f)) return c + 63;
    if (c == 0x3c2) return 0x3c3;  // the sigma at a word's end
    if (in(0x400, 0x40f)) return c + 80;
    if (in(0x531, 0x556)) return c + 48;
    return c;
}

}  // namespace detail

struct FoldedCharacter {
    uint32_t code;  // in lower case
    CharacterKind kind;
    size_t length;  // bytes
};

// The first plane of Unicode.
class FoldingTable {
public:
    static const FoldingTable& instance() {
        static const FoldingTable table;
        return table;
    }
    // The character at text[at].
    FoldedCharacter at(std::string_view text, size_t at) const {
        const auto byte = (unsigned char)text[at];
        if (byte < 0x80) return {entries_[byte].lower, entries_[byte].kind, 1};
        const Utf8Character c = first_character(text.substr(at));
        if (c.code < 0) return {0x110000u + byte, CharacterKind::letter, 1};
        if (c.code < 1 << 16) return {entries_[(size_t)c.code].lower, entries_[(size_t)c.code].kind, c.length};
        return {(uint32_t)c.code, detail::kind_by_ranges((uint32_t)c.code), c.length};
    }
    // An ASCII letter in lower case; 0 for all other bytes.
    unsigned char letter(char c) const { return letters_[(unsigned char)c]; }

private:
    FoldingTable() : entries_(1 << 16) {
        for (uint32_t c = 0; c < entries_.size(); c++)
            entries_[c] = {(uint16_t)detail::lower_by_ranges(c), detail::kind_by_ranges(c)};
        for (size_t c = 0; c < 0x80; c++)
            if (entries_[c].kind == CharacterKind::letter) letters_[c] = (unsigned char)entries_[c].lower;
    }
    struct Entry {
        uint16_t lower;
        CharacterKind kind;
    };
    std::vector<Entry> entries_;
    std::array<unsigned char, 256> letters_{};
};

// ---- words -----------------------------------------------------------------------------------------------------------------
// The hash of a word's characters, eight ASCII letters at a time.
class WordHash {
public:
    void add_ascii(unsigned char c) {
        eight_ |= (uint64_t)c << bits_;
        bits_ += 8;
        if (bits_ == 64) flush();
    }
    void add(uint32_t code) {
        if (code < 0x80) return add_ascii((unsigned char)code);
        flush();
        hash_ = (hash_ ^ (code | (uint64_t)1 << 63)) * factor;  // unlike any eight letters
    }
    // The first n letters of a word, below 16; the bytes after them are zero.
    void begin(const uint64_t (&letters)[2], size_t n) {
        eight_ = letters[0];
        bits_ = 8 * (int)n;
        if (n < 8) return;
        flush();
        eight_ = letters[1];
        bits_ = 8 * ((int)n - 8);
    }
    // Also starts the next word.
    uint64_t finish() {
        flush();
        const uint64_t hash = mix64(hash_);
        hash_ = start;
        return hash;
    }

private:
    static constexpr uint64_t start = 0x9e3779b97f4a7c15u, factor = 0xff51afd7ed558ccdu;
    void flush() {
        if (bits_ == 0) return;
        hash_ = (hash_ ^ eight_) * factor;
        hash_ ^= hash_ >> 32;
        eight_ = 0;
        bits_ = 0;
    }
    uint64_t hash_ = start, eight_ = 0;
    int bits_ = 0;  // of eight_ that are in use
};

// The number of ASCII letters at the start of the 16 bytes at p, and these in lower case; 16 and nothing if all are letters.
#if defined(__SSE2__)
inline size_t leading_letters(const char* p, uint64_t (&letters)[2]) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    const __m128i low = _mm_or_si128(bytes, _mm_set1_epi8(0x20));
    // 'a' to 'z' become -128 to -103, and no other byte does.
    const __m128i is_letter = _mm_cmplt_epi8(_mm_add_epi8(low, _mm_set1_epi8((char)(0x80 - 'a'))), _mm_set1_epi8(-128 + 26));
    const auto n = (size_t)__builtin_ctz(~(uint32_t)_mm_movemask_epi8(is_letter));
    static constexpr unsigned char ones[32] = {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255};
    const __m128i first_n = _mm_loadu_si128((const __m128i*)(ones + 16 - n));
    _mm_storeu_si128((__m128i*)letters, _mm_and_si128(low, first_n));
    return n;
}
#endif

// Calls f(hash of 64 bits, first, end) for each word, whose bytes in the text are [first, end). Without `fast`, by the
// definition, character by character.
template <Punctuation punctuation, Digits digits, bool fast = true, class F>
void for_each_word(std::string_view text, F f) {
    const FoldingTable& table = FoldingTable::instance();
    WordHash hash;
    size_t begin = 0, end = 0;
    bool within = false, after_digit = false, in_decimals = false;
    const auto finish = [&] {
        if (within) f(hash.finish(), begin, end);
        within = after_digit = in_decimals = false;
    };
    const auto begins_decimals = [&](uint32_t code, size_t next) {
        return (code == '.' || code == ',') && after_digit && !in_decimals && next < text.size() &&
               table.at(text, next).kind == CharacterKind::digit;
    };
    const auto add = [&](uint32_t code, size_t at, size_t length) {
        if (!within) begin = at;
        within = true;
        end = at + length;
        hash.add(code);
    };
    for (size_t at = 0; at < text.size();) {
#if defined(__SSE2__)
        if (fast && !within && at + 16 < text.size()) {
            uint64_t letters[2];
            const size_t n = leading_letters(text.data() + at, letters);
            if (n > 0 && n < 16) {
                hash.begin(letters, n);
                begin = at;
                end = at += n;
                within = true;
            }
        }
#endif
        if (unsigned char letter; fast && (letter = table.letter(text[at])) != 0) {  // a run of ASCII letters
            if (!within) begin = at;
            within = true;
            after_digit = in_decimals = false;
            do hash.add_ascii(letter);
            while (++at < text.size() && (letter = table.letter(text[at])) != 0);
            end = at;
            if (at == text.size()) break;
        }
        if (text[at] == ' ') {
            finish();
            at++;
            continue;
        }
        const FoldedCharacter c = table.at(text, at);
        switch (c.kind) {
            case CharacterKind::letter:
                add(c.code, at, c.length);
                after_digit = in_decimals = false;
                break;
            case CharacterKind::digit:
                if (digits == Digits::kept || !after_digit) add(digits == Digits::kept ? c.code : '0', at, c.length);
                else end = at + c.length;
                after_digit = true;
                break;
            case CharacterKind::ideograph:
                finish();
                add(c.code, at, c.length);
                finish();
                break;
            case CharacterKind::space: finish(); break;
            case CharacterKind::punctuation:
                if (punctuation == Punctuation::spaces && digits == Digits::as_zero && begins_decimals(c.code, at + c.length))
                    in_decimals = true;
                else if (punctuation != Punctuation::removed) finish();
                break;
            case CharacterKind::underscore:
                if (punctuation == Punctuation::separates) add(c.code, at, c.length);
                else if (punctuation == Punctuation::spaces) finish();
                break;
            case CharacterKind::mark: break;
        }
        at += c.length;
    }
    finish();
}

// Calls f(hash) for each character. Folded: in lower case, without punctuation and marks, white space as one space.
template <class F>
void for_each_character(std::string_view text, bool folded, F f) {
    if (!folded) {
        for (size_t at = 0; at < text.size();) {
            const Utf8Character c = first_character(text.substr(at));
            f(mix64(c.code < 0 ? 0x110000u + (unsigned char)text[at] : (uint64_t)c.code + 1));
            at += c.length;
        }
        return;
    }
    const FoldingTable& table = FoldingTable::instance();
    bool space = false, any = false;
    for (size_t at = 0; at < text.size();) {
        const FoldedCharacter c = table.at(text, at);
        at += c.length;
        if (c.kind == CharacterKind::space) space = any;
        if (c.kind == CharacterKind::space || c.kind == CharacterKind::punctuation || c.kind == CharacterKind::underscore ||
            c.kind == CharacterKind::mark)
            continue;
        if (space) f(mix64(' ' + 1));
        f(mix64((uint64_t)c.code + 1));
        any = true;
        space = false;
    }
}

// ---- n-grams ---------------------------------------------------------------------------------------------------------------
// Hashes of the last n items of a sequence, each in constant time: sum of h_i P^(n - i) modulo 2^64, P odd, then mixed.
class RollingHash {
public:
    explicit RollingHash(int n) : last_((size_t)n), leaving_(1) {
        for (int i = 0; i < n; i++) leaving_ *= factor;
    }
    // Adds an item; true once there are n.
    bool add(uint64_t hash) {
        uint64_t& oldest = last_[at_];
        at_ = at_ + 1 == last_.size() ? 0 : at_ + 1;
        sum_ = sum_ * factor + hash - oldest * leaving_;
        oldest = hash;
        return ++count_ >= last_.size();
    }
    uint64_t value() const { return mix64(sum_); }

private:
    static constexpr uint64_t factor = 0xd6e8feb86659fd93u;
    std::vector<uint64_t> last_;
    uint64_t leaving_, sum_ = 0;
    size_t at_ = 0, count_ = 0;
};
