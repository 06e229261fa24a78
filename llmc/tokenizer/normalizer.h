// Normalization of a text before a tokenizer splits it: the normalizers of Hugging Face's tokenizer.json, and a SentencePiece
// model's, each with the same result as in its library. Anything unknown is refused by name.
//
//   NFC NFD NFKC NFKD   Unicode's normal forms (unicode.h)
//   Lowercase, Strip    lower case; white space at the ends dropped
//   Prepend, Replace    text at the start; a text, or the matches of a regular expression, replaced
//   Precompiled         SentencePiece's table of replacements, looked up for each user-perceived character (grapheme)
//   Sequence            one after the other
//
// SentencePiece's own: at each place the longest entry of the table is replaced, malformed bytes become U+FFFD, runs of spaces
// become one, spaces become U+2581, and one is put before the text.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/unicode.h"
#include "byte_trie.h"
#include "pre_tokenizer.h"

inline constexpr std::string_view space_symbol = "\u2581";

// SentencePiece's table: a double array (Darts) whose values are offsets in a list of texts, each terminated by a NUL.
class CharsMap {
public:
    CharsMap() = default;
    explicit CharsMap(std::string_view bytes) {
        uint32_t size = 0;
        if (bytes.size() >= 4) memcpy(&size, bytes.data(), 4);
        if (size == 0 || size % 4 || size > bytes.size() - 4 || (bytes.size() > 4 + size && bytes.back() != '\0'))
            fail("the table of characters (precompiled_charsmap) of %zu bytes is damaged", bytes.size());
        units_.resize(size / 4);
        memcpy(units_.data(), bytes.data() + 4, size);
        texts_ = bytes.substr(4 + size);
    }

    // The shortest and the longest entry that are prefixes of the text; their lengths are 0 if there is none.
    struct Entry {
        size_t length = 0;
        std::string_view replacement;
    };
    Entry shortest(std::string_view text) const { return find(text, true); }
    Entry longest(std::string_view text) const { return find(text, false); }

private:
    Entry find(std::string_view text, bool first) const {
        Entry entry;
        if (units_.empty()) return entry;
        uint32_t at = offset(units_[0]), value = 0;
        for (size_t i = 0; i < text.size(); i++) {
            const auto byte = (unsigned char)text[i];
            at ^= byte;
            if (byte == 0 || at >= units_.size() || (units_[at] & 0x800000ff) != byte) break;
            const bool leaf = units_[at] >> 8 & 1;
            at ^= offset(units_[at]);
            if (!leaf) continue;
            if (at >= units_.size()) break;
            entry.length = i + 1;
            value = units_[at] & 0x7fffffff;
            if (first) break;
        }
        if (entry.length == 0) return entry;
        if (value >= texts_.size()) fail("the table of characters (precompiled_charsmap) has a place beyond its end");
        entry.replacement = texts_.c_str() + value;
        return entry;
    }
    static uint32_t offset(uint32_t unit) { return unit >> 10 << ((unit & 512) >> 6); }

    std::vector<uint32_t> units_;
    std::string texts_;
};

// Decodes base 64.
inline std::string from_base64(std::string_view text) {
    static constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    uint32_t bits = 0, n = 0;
    while (!text.empty() && text.back() == '=') text.remove_suffix(1);
    for (char c : text) {
        const size_t digit = digits.find(c);
        if (digit == std::string_view::npos) fail("the table of characters (precompiled_charsmap) is not base 64");
        bits = bits << 6 | (uint32_t)digit;
        n += 6;
        if (n < 8) continue;
        n -= 8;
        out += (char)(bits >> n);
    }
    return out;
}

// The fields of SentencePiece's normalizer_spec.
struct SentencePieceRules {
    CharsMap map;
    ByteTrie kept;  // user-defined pieces, which are unchanged
    bool dummy_prefix = true, drops_extra_spaces = true, escapes_spaces = true;
};

class Normalizer {
public:
    Normalizer() = default;
    explicit Normalizer(const nlohmann::json& step) { add(step); }
    explicit Normalizer(SentencePieceRules rules) {
        rules_ = std::make_shared<SentencePieceRules>(std::move(rules));
        steps_.emplace_back([this_rules = rules_](std::string_view text, bool continues) {
            return sentencepiece(*this_rules, text, continues);
        });
    }

    bool does_nothing() const { return steps_.empty(); }

    // continues: the text is a later part of a document; nothing is put before it.
    std::string normalize(std::string_view text, bool continues) const {
        std::string out(text);
        for (const Step& step : steps_) out = step(out, continues);
        return out;
    }

private:
    using Step = std::function<std::string(std::string_view text, bool continues)>;

    void add(const nlohmann::json& j) {
        if (j.is_null()) return;
        const std::string type = j.value("type", "");
        const auto each = [&](auto change) {
            steps_.push_back([change](std::string_view text, bool) { return change(text); });
        };
        for (const auto& [name, form] : {std::pair{"NFC", NormalForm::nfc},
                                         {"NFD", NormalForm::nfd},
                                         {"NFKC", NormalForm::nfkc},
                                         {"NFKD", NormalForm::nfkd}})
            if (type == name) {
                need_unicode(name);
                return each([form = form](std::string_view text) { return of_unicode_9(text, form); });
            }
        if (type == "Sequence") {
            for (const auto& part : j.at("normalizers")) add(part);
        } else if (type == "Lowercase") {
            need_unicode("Lowercase");
            each(lowercase);
        } else if (type == "Strip") {
            const bool left = j.value("strip_left", true), right = j.value("strip_right", true);
            steps_.emplace_back([left, right](std::string_view text, bool continues) {
                return std::string(stripped(text, is_space, left && !continues, right));
            });
        } else if (type == "Prepend") {
            steps_.emplace_back([prefix = j.at("prepend").get<std::string>()](std::string_view text, bool continues) {
                return text.empty() || continues ? std::string(text) : prefix + std::string(text);
            });
        } else if (type == "Replace") {
            add_replacement(j, each);
        } else if (type == "Precompiled") {
            need_unicode("Precompiled");
            each([map = CharsMap(from_base64(j.at("precompiled_charsmap").get<std::string>()))](std::string_view text) {
                return by_graphemes(map, text);
            });
        } else {
            fail(
                "the normalizer '%s' is not supported; Sequence, NFC, NFD, NFKC, NFKD, Lowercase, Strip, Prepend, Replace and "
                "Precompiled are",
                type.c_str());
        }
    }

    // Hugging Face's library has the tables of Unicode 9, which lack these characters: later versions compose, decompose or
    // reorder them. The text on both sides of one is normalized separately.
    static std::string of_unicode_9(std::string_view text, NormalForm form) {
        static constexpr std::pair<int32_t, int32_t> later[] = {
            {0x7fd, 0x7fd},     {0x898, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},     {0xd3b, 0xd3c},
            {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},   {0x32ff, 0x32ff},
            {0xa7f2, 0xa7f4},   {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x10781, 0x107ba}, {0x10d24, 0x10d27},
            {0x10eab, 0x10eac}, {0x10efd, 0x10eff}, {0x10f46, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b},
            {0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11938, 0x11943}, {0x119e0, 0x119e0}, {0x11a34, 0x11a47},
            {0x11a99, 0x11a99}, {0x11d42, 0x11d45}, {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1},
            {0x1e030, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c},
            {0x1fbf0, 0x1fbf9}};
        const auto is_later = [](int32_t c) {
            if (c < later[0].first) return false;
            const auto* after = std::upper_bound(std::begin(later), std::end(later), std::pair{c, INT32_MAX});
            return c <= (after - 1)->second;
        };
        std::string out;
        size_t begin = 0, at = 0;
        each_character(text, [&](int32_t c, std::string_view bytes) {
            if (is_later(c)) {
                out += normalize_unicode(text.substr(begin, at - begin), form);
                out += bytes;
                begin = at + bytes.size();
            }
            at += bytes.size();
        });
        return out += normalize_unicode(text.substr(begin), form);
    }

public:
    // A few replacements can turn a word into any amount of text.
    static void append(std::string& out, std::string_view part) {
        constexpr size_t most = 1 << 30;
        if (out.size() + part.size() > most)
            fail("the tokenizer's normalizer (Replace) makes more than 1 GiB of a text; HINT: look at tokenizer.json");
        out += part;
    }
    static std::string replaced(const std::string& from, std::string_view text, const std::string& by) {
        std::string out;
        if (from.empty()) return std::string(text);
        for (size_t at; (at = text.find(from)) != std::string_view::npos; text.remove_prefix(at + from.size())) {
            append(out, text.substr(0, at));
            append(out, by);
        }
        return out += text;
    }
    static std::string replaced(const Splitter& splitter, std::string_view text, const std::string& by) {
        std::string out;
        Splitter::begin_text(text.size());
        each_valid_part(text, [&](std::string_view part, bool valid) {
            if (!valid) out += part;
            else
                splitter.ranges(part,
                                [&](std::string_view range, bool match) { append(out, match ? std::string_view(by) : range); });
        });
        return out;
    }
    // Adds the step "Replace" of tokenizer.json: each(change) adds a change of a text.
    template <class Each>
    static void add_replacement(const nlohmann::json& j, Each each) {
        const auto& pattern = j.at("pattern");
        const auto content = j.at("content").get<std::string>();
        if (pattern.contains("Regex"))
            each([splitter = Splitter(pattern["Regex"].get<std::string>()), content](std::string_view text) {
                return replaced(splitter, text, content);
            });
        else
            each([from = pattern.at("String").get<std::string>(), content](std::string_view text) {
                return replaced(from, text, content);
            });
    }

private:
    // Like Hugging Face's library: graphemes of up to 5 bytes are looked up whole, and an entry for the first bytes of one
    // replaces all of it; in longer ones each character is looked up.
    static std::string by_graphemes(const CharsMap& map, std::string_view text) {
        std::string out;
        const auto add = [&](std::string_view part) {
            const CharsMap::Entry entry = map.shortest(part);
            out += entry.length ? entry.replacement : part;
            return entry.length > 0;
        };
        each_grapheme(text, [&](std::string_view grapheme) {
            if (grapheme.size() >= 6 || map.shortest(grapheme).length == 0)
                each_character(grapheme, [&](int32_t, std::string_view bytes) { add(bytes); });
            else add(grapheme);
        });
        return out;
    }

    static std::string sentencepiece(const SentencePieceRules& rules, std::string_view text, bool continues) {
        const auto next = [&](std::string_view rest) -> CharsMap::Entry {  // length consumed, and its replacement
            CharsMap::Entry kept;
            rules.kept.prefixes(rest, [&](int, size_t length) { kept = {length, rest.substr(0, length)}; });
            if (kept.length) return kept;
            if (const CharsMap::Entry entry = rules.map.longest(rest); entry.length) return entry;
            const Utf8Character c = first_character(rest);
            return {c.length, c.code < 0 ? replacement_character : rest.substr(0, c.length)};
        };
        const std::string_view space = rules.escapes_spaces ? space_symbol : " ";
        std::string out;
        out.reserve(text.size() + text.size() / 2);
        if (rules.drops_extra_spaces && !continues)
            while (!text.empty()) {
                const CharsMap::Entry entry = next(text);
                if (entry.replacement != " ") break;
                text.remove_prefix(entry.length);
            }
        if (text.empty()) return out;
        if (rules.dummy_prefix && !continues) out += space;
        bool after_space = rules.drops_extra_spaces && !continues;
        while (!text.empty()) {
            CharsMap::Entry entry = next(text);
            text.remove_prefix(entry.length);
            std::string_view s = entry.replacement;
            while (after_space && !s.empty() && s[0] == ' ') s.remove_prefix(1);
            if (s.empty()) continue;
            for (char c : s)
                if (c == ' ') out += space;
                else out += c;
            after_space = rules.drops_extra_spaces && s.back() == ' ';
        }
        if (rules.drops_extra_spaces)
            while (out.size() >= space.size() && out.compare(out.size() - space.size(), space.size(), space) == 0)
                out.resize(out.size() - space.size());
        return out;
    }

    std::vector<Step> steps_;
    std::shared_ptr<SentencePieceRules> rules_;
};
