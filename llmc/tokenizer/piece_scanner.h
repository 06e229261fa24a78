// The pre-tokenization patterns that most tokenizers share, written by hand: the same pieces as PCRE2's (test_piece_scanner.cpp
// compares them), many times as fast. A text's characters are sorted into the classes of a pattern (letters, numbers, white
// space, all others), a bit for each byte and class, 64 bytes at a time by vectors. The end of a run of letters is then the
// first clear bit.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#if defined(__AVX512BW__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"

// ---- classes of characters -------------------------------------------------------------------------------------------------
// For every code point, the first class that holds it, or `other`. Two levels, as blocks of 256 code points are mostly alike.
// PCRE2 provides the classes, so that both ways of splitting use the same Unicode.
class CharacterClasses {
public:
    enum Class : uint8_t { other, first, second, third };

    // Regular expressions for one character.
    explicit CharacterClasses(const std::vector<const char*>& patterns) {
        std::string text;  // all code points that may be in a class: above them Unicode has no letters, numbers or spaces
        std::vector<uint32_t> begin;
        for (uint32_t c = 0; c < 0x40000; c++) {
            begin.push_back((uint32_t)text.size());
            if (c < 0xd800 || c > 0xdfff) text += utf8(c);
        }
        begin.push_back((uint32_t)text.size());
        std::vector<uint8_t> classes(n_code_points, other);
        for (size_t k = patterns.size(); k-- > 0;) find(patterns[k], (Class)(k + 1), text, begin, classes);
        for (size_t block = 0; block < n_code_points; block += 256) {
            size_t same = 0;
            while (same < blocks_.size() && memcmp(&blocks_[same], &classes[block], 256) != 0) same++;
            if (same == blocks_.size()) {
                blocks_.emplace_back();
                memcpy(&blocks_.back(), &classes[block], 256);
            }
            block_[block / 256] = (uint8_t)same;
            CHECK(same <= UINT8_MAX, "%zu kinds of blocks of code points", same);
        }
        for (uint8_t c = 0; c < 128; c++) {
            ascii_class_[c] = of(c);
            if (of(c) == other) continue;
            if (c > 0 && of(c) == of((uint8_t)(c - 1))) ascii_.back().last = c;
            else ascii_.push_back({of(c), c, c});
        }
    }

    Class of(uint32_t code_point) const { return (Class)blocks_[block_[code_point / 256]][code_point % 256]; }
    Class of_ascii(unsigned char c) const { return (Class)ascii_class_[c]; }
    // The ASCII characters of the classes except `other`.
    struct Range {
        Class of;
        uint8_t first, last;
    };
    const std::vector<Range>& ascii() const { return ascii_; }

private:
    static constexpr uint32_t n_code_points = 0x110000;

    static void find(const std::string& pattern, Class found, const std::string& text, const std::vector<uint32_t>& begin,
                     std::vector<uint8_t>& classes) {
        int error = 0;
        PCRE2_SIZE at = 0;
        const std::string run = pattern + "+";
        const std::shared_ptr<pcre2_code> code(
            pcre2_compile((PCRE2_SPTR)run.data(), run.size(), PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr), pcre2_code_free);
        CHECK(code, "PCRE2 does not know '%s'", pattern.c_str());
        pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
        const std::shared_ptr<pcre2_match_data> data(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
        const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
        size_t c = 0;
        for (size_t done = 0;
             pcre2_match(code.get(), (PCRE2_SPTR)text.data(), text.size(), done, PCRE2_NO_UTF_CHECK, data.get(), nullptr) >= 0;
             done = range[1]) {
            c = (size_t)(std::lower_bound(begin.begin() + (long)c, begin.end(), range[0] + 1) - begin.begin()) - 1;
            for (; begin[c] < range[1]; c++) classes[c] = found;
        }
    }

    std::array<uint8_t, n_code_points / 256> block_;
    std::vector<std::array<uint8_t, 256>> blocks_;
    std::array<uint8_t, 128> ascii_class_;
    std::vector<Range> ascii_;
};

// ---- 64 bytes at a time ----------------------------------------------------------------------------------------------------
// A bit for each of 64 bytes, by the vectors that the program was compiled for.
class Bytes64 {
public:
#if defined(__AVX512BW__)
    explicit Bytes64(const char* text) : bytes_(_mm512_loadu_si512(text)) {}
    // Bytes of first ... last.
    uint64_t within(uint8_t first, uint8_t last) const {
        const __m512i from_first = _mm512_sub_epi8(bytes_, _mm512_set1_epi8((char)first));
        return _mm512_cmple_epu8_mask(from_first, _mm512_set1_epi8((char)(last - first)));
    }

private:
    __m512i bytes_;
#elif defined(__AVX2__)
    explicit Bytes64(const char* text) {
        for (int i = 0; i < 2; i++) bytes_[i] = _mm256_loadu_si256((const __m256i*)text + i);
    }
    uint64_t within(uint8_t first, uint8_t last) const {
        uint64_t bits = 0;
        for (int i = 0; i < 2; i++) {
            const __m256i from_first = _mm256_sub_epi8(bytes_[i], _mm256_set1_epi8((char)first));
            const __m256i least = _mm256_min_epu8(from_first, _mm256_set1_epi8((char)(last - first)));
            bits |= (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(least, from_first)) << 32 * i;
        }
        return bits;
    }

private:
    __m256i bytes_[2];
#elif defined(__SSE2__)
    explicit Bytes64(const char* text) {
        for (int i = 0; i < 4; i++) bytes_[i] = _mm_loadu_si128((const __m128i*)text + i);
    }
    uint64_t within(uint8_t first, uint8_t last) const {
        uint64_t bits = 0;
        for (int i = 0; i < 4; i++) {
            const __m128i from_first = _mm_sub_epi8(bytes_[i], _mm_set1_epi8((char)first));
            const __m128i least = _mm_min_epu8(from_first, _mm_set1_epi8((char)(last - first)));
            bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(least, from_first)) << 16 * i;
        }
        return bits;
    }

private:
    __m128i bytes_[4];
#else
    explicit Bytes64(const char* text) { memcpy(bytes_, text, 64); }
    uint64_t within(uint8_t first, uint8_t last) const {
        uint64_t bits = 0;
        for (int i = 0; i < 64; i++) bits |= (uint64_t)((uint8_t)(bytes_[i] - first) <= last - first) << i;
        return bits;
    }

private:
    uint8_t bytes_[64];
#endif
};

// ---- runs of a class -------------------------------------------------------------------------------------------------------
// A text, valid UTF-8, whose characters are sorted into classes: all bytes of a character have a bit set in the map of its
// class. The maps are made for a stretch of text at a time; queried positions must not decrease.
class ClassifiedText {
public:
    using Class = CharacterClasses::Class;

    ClassifiedText(std::string_view text, const CharacterClasses& classes) : text_(text), classes_(classes) {}

    size_t size() const { return text_.size(); }
    bool is(size_t i, char c) const { return i < text_.size() && text_[i] == c; }
    bool is(size_t i, Class c) const { return i < text_.size() && at(i) == c; }
    bool is_newline(size_t i) const { return is(i, '\n') || is(i, '\r'); }
    unsigned char operator[](size_t i) const { return (unsigned char)text_[i]; }

    // The class of the character at i, and the start of the next character.
    Class at(size_t i) const { return (*this)[i] < 0x80 ? classes_.of_ascii((*this)[i]) : classes_.of(code_point(i)); }
    size_t after(size_t i) const { return i + length(i); }
    size_t before(size_t i) const { return begin_of_character(i - 1); }

    // The end of the run of characters of class c from i on.
    size_t end_of_run(Class c, size_t i) {
        if (i >= end_) classify(i);
        constexpr size_t most = 57;  // bits of a word that starts at any bit of its first byte
        const size_t bit = i - begin_;
        uint64_t run;
        memcpy(&run, (const char*)maps_[c].data() + bit / 8, sizeof run);
        i += (size_t)__builtin_ctzll(~(run >> bit % 8) | uint64_t{1} << most);
        return i < begin_ + bit + most && i < end_ ? i : end_of_long_run(c, i);
    }

private:
    static constexpr size_t stretch = 4096;  // bytes

    size_t begin_of_character(size_t i) const {
        while (i < text_.size() && ((*this)[i] & 0xc0) == 0x80) i--;
        return i;
    }
    size_t length(size_t i) const {
        const unsigned char lead = (*this)[i];
        return lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    }
    uint32_t code_point(size_t i) const {
        const auto* s = (const unsigned char*)text_.data() + i;
        const auto low = [&](int k) { return (uint32_t)(s[k] & 63); };
        switch (length(i)) {
            case 1: return s[0];
            case 2: return (uint32_t)(s[0] & 31) << 6 | low(1);
            case 3: return (uint32_t)(s[0] & 15) << 12 | low(1) << 6 | low(2);
            default: return (uint32_t)(s[0] & 7) << 18 | low(1) << 12 | low(2) << 6 | low(3);
        }
    }

    [[gnu::noinline]] size_t end_of_long_run(Class c, size_t i) const {
        i = begin_of_character(i);
        while (is(i, c)) i = after(i);
        return i;
    }

    [[gnu::noinline]] void classify(size_t begin) {
        begin_ = begin;
        end_ = begin_of_character(std::min(text_.size(), begin + stretch));
        const size_t words = (end_ - begin_ + 63) / 64;
        for (auto& map : maps_) std::fill(map.begin(), map.begin() + (long)words + 2, 0);
        for (size_t w = 0; w < words; w++) {
            const size_t at = begin_ + 64 * w;
            char last[64] = {};
            const char* from = text_.data() + at;
            if (at + 64 > text_.size()) from = (const char*)memcpy(last, from, text_.size() - at);
            const Bytes64 bytes(from);
            for (const auto& range : classes_.ascii()) maps_[range.of][w] |= bytes.within(range.first, range.last);
            for (uint64_t leads = bytes.within(0xc0, 0xff); leads; leads &= leads - 1) {
                const int bit = __builtin_ctzll(leads);
                const size_t i = at + (size_t)bit;
                if (i >= end_) break;
                const size_t n = length(i);
                auto& map = maps_[this->at(i)];
                const uint64_t bits = (uint64_t{1} << n) - 1;
                map[w] |= bits << bit;
                if (bit + n > 64) map[w + 1] |= bits >> (64 - bit);
            }
            uint64_t known = 0;
            for (int c = 1; c < 4; c++) known |= maps_[c][w];
            maps_[CharacterClasses::other][w] = ~known;
        }
    }

    std::string_view text_;
    const CharacterClasses& classes_;
    size_t begin_ = 0, end_ = 0;  // the stretch with maps
    std::array<std::array<uint64_t, stretch / 64 + 2>, 4> maps_;
};

// ---- the patterns ----------------------------------------------------------------------------------------------------------
// Patterns by name; "bloom" is the nested class of the published files, written flat.
inline std::string pretokenizer_pattern(const std::string& name) {
    if (name == "gpt2") return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    if (name == "llama3")
        return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|)"
               R"(\s+(?!\S)|\s+)";
    if (name == "bloom") return " ?[^(\\s|.,!?…。，、।۔،)]+";
    fail("pre-tokenizer '%s' is unknown; one of gpt2, llama3, bloom", name.c_str());
}
inline constexpr const char* bloom_pattern_in_files = " ?[^(\\s|[.,!?…。，、।۔،])]+";
// Qwen's: Llama 3's, but every digit is a separate piece.
inline constexpr const char* qwen2_pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Splits text like a known pattern. Every part is a piece: the matches and, for BLOOM, the text between them.
class PieceScanner {
public:
    // True if there is a scanner for this pattern, spelled as in files.
    static bool knows(const std::string& pattern) { return kind_of(pattern) != Kind::none; }
    explicit PieceScanner(const std::string& pattern)
        : kind_(kind_of(pattern)), classes_(kind_ == Kind::bloom ? of_bloom() : of_letters()) {}

    // piece(string_view) for each piece of text, which is valid UTF-8.
    template <class F>
    void split(std::string_view text, F piece) const {
        ClassifiedText t(text, classes_);
        const auto pieces = [&](const auto& end_of_piece) {
            for (size_t i = 0; i < text.size();) {
                const size_t end = end_of_piece(t, i);
                piece(text.substr(i, end - i));
                i = end;
            }
        };
        switch (kind_) {
            case Kind::gpt2: return pieces(gpt2);
            case Kind::llama3: return pieces(llama3<3>);
            case Kind::qwen2: return pieces(llama3<1>);
            case Kind::bloom: return pieces(bloom);
            case Kind::none: break;
        }
        CHECK(false, "a pattern without a scanner");
    }

private:
    enum class Kind { none, gpt2, llama3, qwen2, bloom };
    static constexpr auto other = CharacterClasses::other, letter = CharacterClasses::first, number = CharacterClasses::second,
                          space = CharacterClasses::third, separator = CharacterClasses::first;

    static const CharacterClasses& of_letters() {
        static const CharacterClasses classes({"\\p{L}", "\\p{N}", "\\p{White_Space}"});
        return classes;
    }
    static const CharacterClasses& of_bloom() {
        static const CharacterClasses classes({"[(\\p{White_Space}|.,!?…。，、।۔،)]"});
        return classes;
    }

    static Kind kind_of(const std::string& pattern) {
        if (pattern == pretokenizer_pattern("gpt2")) return Kind::gpt2;
        if (pattern == pretokenizer_pattern("llama3")) return Kind::llama3;
        if (pattern == qwen2_pattern) return Kind::qwen2;
        if (pattern == pretokenizer_pattern("bloom") || pattern == bloom_pattern_in_files) return Kind::bloom;
        return Kind::none;
    }

    // 's|'t|'re|'ve|'m|'ll|'d: the end of the match from the apostrophe at i, or i.
    static size_t contraction(const ClassifiedText& t, size_t i, bool ignore_case) {
        const auto is = [&](size_t at, char c) { return t.is(at, c) || (ignore_case && t.is(at, (char)(c - 'a' + 'A'))); };
        for (char c : {'s', 't', 'm', 'd'})
            if (is(i + 1, c)) return i + 2;
        if ((is(i + 1, 'r') || is(i + 1, 'v')) && is(i + 2, 'e')) return i + 3;
        if (is(i + 1, 'l') && is(i + 2, 'l')) return i + 3;
        if (ignore_case && t.is(i + 1, '\xc5') && t.is(i + 2, '\xbf')) return i + 3;  // U+017F, the long s, is an s
        return i;
    }

    // \s+(?!\S)|\s+ for the white space from i to end: all of it at the end of the text, else all but its last character.
    static size_t white_space(const ClassifiedText& t, size_t i, size_t end) {
        if (end == t.size()) return end;
        const size_t last = t.before(end);
        return last > i ? last : end;
    }

    static size_t gpt2(ClassifiedText& t, size_t i) {
        if (t[i] == '\'')
            if (const size_t end = contraction(t, i, false); end > i) return end;
        //  ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+
        const size_t begin = i + (t[i] == ' ');
        if (begin < t.size())
            if (const auto c = t.at(begin); c != space) return t.end_of_run(c, begin);
        return white_space(t, i, t.end_of_run(space, i));
    }

    template <int digits>
    static size_t llama3(ClassifiedText& t, size_t i) {
        if (t[i] == '\'')
            if (const size_t end = contraction(t, i, true); end > i) return end;
        const auto c = t.at(i);
        // [^\r\n\p{L}\p{N}]?\p{L}+
        const size_t begin = c == letter || c == number || t.is_newline(i) ? i : t.after(i);
        if (t.is(begin, letter)) return t.end_of_run(letter, begin);
        // \p{N}{1,3}
        if (c == number) {
            size_t end = t.after(i);
            for (int n = 1; n < digits && t.is(end, number); n++) end = t.after(end);
            return end;
        }
        //  ?[^\s\p{L}\p{N}]+[\r\n]*
        if (const size_t sign = i + (t[i] == ' '); t.is(sign, other)) {
            size_t end = t.end_of_run(other, sign);
            while (t.is_newline(end)) end++;
            return end;
        }
        // \s*[\r\n]+
        const size_t end = t.end_of_run(space, i);
        for (size_t k = end; k > i; k--)
            if (t.is_newline(k - 1)) return k;
        return white_space(t, i, end);
    }

    //  ?[^(\s|.,!?...)]+ and the text between: a space before a word belongs to the word.
    static size_t bloom(ClassifiedText& t, size_t i) {
        const size_t begin = i + (t[i] == ' ');
        if (t.is(begin, other)) return t.end_of_run(other, begin);
        const size_t end = t.end_of_run(separator, i);
        return end < t.size() && t[end - 1] == ' ' && end - 1 > i ? end - 1 : end;
    }

    Kind kind_;
    const CharacterClasses& classes_;
};
