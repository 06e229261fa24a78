// Pre-tokenization: regular expressions split text into pieces, which tokens never cross (tokenizer.h). Hugging Face's
// tokenizers match with Oniguruma, this program with PCRE2; pcre2_pattern() translates the patterns. The patterns that most
// tokenizers share are scanned by hand (piece_scanner.h).
#pragma once
#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"
#include "piece_scanner.h"

// ---- patterns, translated ---------------------------------------------------------------------------------------------------
// Translates an Oniguruma pattern, as in tokenizer.json files, to PCRE2. The two differ in:
//   \s \w \b [[:alpha:]] \p{Han}   other characters
//   ^ $                            match at ends of lines (PCRE2_MULTILINE)
//   a{1,3}+  a{2}?                 repeated again, optional; in PCRE2 possessive, lazy
//   [a[bc]]                        a class within a class
//   (?m)                           the dot matches a newline: (?s)
//   (?i:ss)                        several letters that match a single one
// Patterns that PCRE2 cannot express are refused.
class PatternTranslator {
public:
    explicit PatternTranslator(const std::string& pattern) : in_(pattern) {}

    std::string translate() {
        while (i_ < in_.size()) item();
        std::string lower = in_;
        for (char& c : lower) c = (char)tolower((unsigned char)c);
        for (const char* letters : {"ss", "ff", "fi", "fl", "st"})
            if (ignores_case_ && lower.find(letters) != std::string::npos) refuse(letters, "without regard to case");
        if (ignores_case_ && std::any_of(in_.begin(), in_.end(), [](char c) { return c & 0x80; }))
            refuse("(?i", "with letters beyond ASCII");
        return out_;
    }

private:
    [[noreturn]] void refuse(const std::string& what, const std::string& why = "") const {
        fail("the pre-tokenizer's pattern '%.500s' is not understood: '%s'%s at %zu", in_.c_str(), what.c_str(),
             (why.empty() ? "" : " " + why).c_str(), std::min(i_, in_.size()));
    }
    bool at(std::string_view s) const { return in_.compare(i_, s.size(), s) == 0; }
    char next(size_t n) const { return i_ + n < in_.size() ? in_[i_ + n] : '\0'; }
    void begin_atom() {
        atom_ = out_.size();
        repeated_ = false;
    }

    void item() {
        const char c = in_[i_];
        if (c == '*' || c == '+' || c == '?' || (c == '{' && interval_length() > 0)) return quantifier();
        if (c == '(') return group();
        if (c == ')') {
            out_ += c;
            i_++;
            atom_ = open_.empty() ? none : open_.back();
            repeated_ = false;
            if (!open_.empty()) open_.pop_back();
        } else if (c == '|' || c == '^' || c == '$') {
            out_ += c;
            i_++;
            atom_ = none;
        } else if (c == '[') {
            begin_atom();
            character_class();
        } else if (c == '\\') {
            begin_atom();
            out_ += escape(false);
        } else {
            begin_atom();
            do out_ += in_[i_++];
            while (((unsigned char)next(0) & 0xc0) == 0x80);
        }
    }

    // The length of {n}, {n,}, {,m} or {n,m}; 0 for other text in braces.
    size_t interval_length() const {
        size_t n = 1;
        while (isdigit((unsigned char)next(n))) n++;
        const bool low = n > 1, comma = next(n) == ',';
        if (comma) n++;
        const size_t high = n;
        while (isdigit((unsigned char)next(n))) n++;
        return next(n) == '}' && (low || n > high) ? n + 1 : 0;
    }

    void quantifier() {
        const bool interval = in_[i_] == '{';
        std::string q = in_.substr(i_, interval ? interval_length() : 1);
        i_ += q.size();
        if (atom_ == none) refuse(q, "with nothing to repeat");
        if (repeated_) {
            out_.insert(atom_, "(?:");
            out_ += ")";
        }
        if (q.compare(0, 2, "{,") == 0) q.insert(1, "0");
        out_ += q;
        repeated_ = true;
        if (next(0) == '?' && interval && q.find(',') == std::string::npos) return;  // handled as a separate quantifier
        if (next(0) == '?' || (next(0) == '+' && !interval)) out_ += in_[i_++];
    }

    void group() {
        const size_t begin = out_.size();
        open_.push_back(begin);
        atom_ = none;
        if (next(1) != '?') {
            out_ += in_[i_++];
            return;
        }
        for (const char* kind : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"})
            if (at(kind)) {
                out_ += kind;
                i_ += strlen(kind);
                return;
            }
        if (at("(?<")) {  // group names are dropped: there are no references to them
            const size_t end = in_.find('>', i_);
            if (end == std::string::npos || !isalpha((unsigned char)next(3))) refuse("(?<");
            out_ += "(";
            i_ = end + 1;
            return;
        }
        std::string options;
        size_t n = 2;
        for (; next(n) == 'i' || next(n) == 'm' || next(n) == '-'; n++) {
            options += next(n) == 'm' ? 's' : next(n);
            ignores_case_ |= next(n) == 'i';
        }
        const bool whole = i_ == 0 && next(n) == ')';  // elsewhere its scope would differ from PCRE2's
        if (options.empty() || (next(n) != ':' && !whole)) refuse(in_.substr(i_, 3));
        out_ += "(?" + options + next(n);
        i_ += n + 1;
        if (whole) open_.pop_back();
    }

    // Flattens a class within a class: in a union, inner brackets change nothing.
    void character_class() {
        out_ += in_[i_++];
        if (next(0) == '^') out_ += in_[i_++];
        if (next(0) == ']') {
            out_ += "\\]";
            i_++;
        }
        for (int depth = 1; depth > 0;) {
            if (i_ >= in_.size()) refuse("[", "without an end");
            if (at("&&") || at("[^")) refuse(in_.substr(i_, 2), "within a class");
            if (at("[:")) {
                out_ += named_class();
            } else if (at("[")) {
                if (out_.back() == '-') refuse("-[");
                depth++;
                i_++;
            } else if (at("]")) {
                depth--;
                i_++;
                if (depth > 0 && at("-")) refuse("]-");
            } else if (at("\\")) {
                out_ += escape(true);
            } else {
                out_ += in_[i_++];
            }
        }
        out_ += ']';
    }

    std::string named_class() {
        for (const auto& [name, characters] : {std::pair{"[:space:]", "\\p{White_Space}"},
                                               {"[:^space:]", "\\P{White_Space}"},
                                               {"[:digit:]", "\\d"},
                                               {"[:^digit:]", "\\D"},
                                               {"[:alpha:]", "\\p{Alphabetic}"},
                                               {"[:punct:]", "\\p{P}\\p{S}"}})
            if (at(name)) {
                i_ += strlen(name);
                return characters;
            }
        refuse(in_.substr(i_, in_.find(']', i_) + 1 - i_));
    }

    std::string escape(bool in_class) {
        static const std::string word = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
        static const std::string is = "[" + word + "]", edge = "(?<=" + is + ")(?!" + is + ")|(?<!" + is + ")(?=" + is + ")";
        const char c = next(1);
        const std::string same = in_.substr(i_, 2);
        const auto is_one_of = [&](const char* letters) { return c && strchr(letters, c); };
        if (c == 'p' || c == 'P') return property(c);
        if (c == 'x') return character_number();
        if (!in_class && isdigit((unsigned char)c)) refuse(same, "is a back reference");
        i_ += 2;
        if (is_one_of("dDtnrfae") || (c > 0 && !isalnum((unsigned char)c))) return same;
        if (c == 's') return "\\p{White_Space}";
        if (c == 'S') return "\\P{White_Space}";
        if (c == 'v') return "\\x0b";
        if (c == 'h') return in_class ? "0-9a-fA-F" : "[0-9a-fA-F]";
        if (c == 'w') return in_class ? word : is;
        if (in_class && c == 'b') return same;
        if (!in_class && is_one_of("AzZGKRXN")) return same;
        if (!in_class && c == 'W') return "[^" + word + "]";
        if (!in_class && c == 'b') return "(?:" + edge + ")";
        if (!in_class && c == 'B') return "(?!" + edge + ")";
        i_ -= 2;
        refuse(same, in_class ? "within a class" : "");
    }

    // General categories have the same names in both, except the long ones. PCRE2 widens the meaning of scripts unless
    // disabled.
    std::string property(char c) {
        const size_t end = in_.find('}', i_);
        if (next(2) != '{' || end == std::string::npos) refuse(in_.substr(i_, 2));
        std::string name = in_.substr(i_ + 3, end - i_ - 3);
        const bool negated = !name.empty() && name[0] == '^';
        if (negated) name.erase(0, 1);
        for (const auto& [full, brief] : {std::pair{"Letter", "L"},
                                          {"Mark", "M"},
                                          {"Number", "N"},
                                          {"Punctuation", "P"},
                                          {"Symbol", "S"},
                                          {"Separator", "Z"},
                                          {"Other", "C"}})
            if (name == full) name = brief;
        if (name.empty() ||
            !std::all_of(name.begin(), name.end(), [](char x) { return isalpha((unsigned char)x) || x == '_'; }))
            refuse(in_.substr(i_, end + 1 - i_));
        i_ = end + 1;
        return std::string("\\") + (negated ? (c == 'p' ? 'P' : 'p') : c) + (name.size() > 2 ? "{sc:" : "{") + name + "}";
    }

    std::string character_number() {
        size_t n = 2;
        if (next(2) == '{') n = in_.find('}', i_) == std::string::npos ? 0 : in_.find('}', i_) + 1 - i_;
        else
            while (n < 4 && isxdigit((unsigned char)next(n))) n++;
        const std::string number = in_.substr(i_, n);
        if (n < 3 || (next(2) != '{' && strtol(number.c_str() + 2, nullptr, 16) >= 0x80)) refuse(number, "is no character");
        i_ += n;
        return number;
    }

    static constexpr size_t none = std::string::npos;
    const std::string& in_;
    std::string out_;
    size_t i_ = 0;
    size_t atom_ = none;        // start in out_ of the item that a quantifier would repeat
    bool repeated_ = false;     // the item has a quantifier already
    std::vector<size_t> open_;  // open groups: their start in out_
    bool ignores_case_ = false;
};

inline std::string pcre2_pattern(const std::string& pattern) { return PatternTranslator(pattern).translate(); }

// A pattern that matches this text and nothing else.
inline std::string literal_pattern(const std::string& text) {
    std::string pattern;
    for (char c : text) {
        if (!isalnum((unsigned char)c) && !(c & 0x80)) pattern += '\\';
        pattern += c;
    }
    return pattern;
}

// The code point of each byte in GPT-2's table.
inline const std::array<uint32_t, 256>& byte_characters() {
    static const std::array<uint32_t, 256> table = [] {
        std::array<uint32_t, 256> t{};
        uint32_t next = 256;
        for (uint32_t b = 0; b < 256; b++) {
            const bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
            t[b] = printable ? b : next++;
        }
        return t;
    }();
    return table;
}

// Splits text into pieces: the matches of a pattern and the text between them.
//
// Patterns come from files, and some would take years on a text. So the next match is first searched nearby and in few steps,
// which suffices for almost every piece if the pattern is good. If not (a long piece, a long run of spaces), the same pattern,
// compiled with a callout before each item, searches the whole text and counts its steps; their number per text is limited, far
// above the needs of a good pattern. Both searches find the same match.
//
// Behaviors by Hugging Face's names, for the matches: isolated: separate pieces. removed: dropped. contiguous: adjacent
// matches form one piece. merged_with_previous, merged_with_next: joined to the text before or after.
//
// After ByteLevel (Falcon) the pattern sees the bytes as GPT-2's characters: some bytes in the middle of a character are
// numbers.
enum class SplitBehavior { isolated, removed, contiguous, merged_with_previous, merged_with_next };

class Splitter {
public:
    // invert: swaps matches and the text between them. by_hand: uses a scanner if the pattern has one. of_bytes: the step is
    // after ByteLevel.
    explicit Splitter(const std::string& pattern, SplitBehavior behavior = SplitBehavior::isolated, bool invert = false,
                      bool by_hand = true, bool of_bytes = false)
        : pattern_(pattern), behavior_(behavior), invert_(invert), of_bytes_(of_bytes) {
        if (by_hand && behavior == SplitBehavior::isolated && PieceScanner::knows(pattern)) {
            scanner_.emplace(pattern);
        } else {
            quick_ = compile(0);
            counting_ = compile(PCRE2_AUTO_CALLOUT);
        }
    }

    // Resets the count of steps; the limit holds for a text as a whole.
    static void begin_text(size_t bytes) { memory().work = {0, 20000000 + 64 * (uint64_t)bytes, 0}; }

    // piece(string_view) for each piece of text, which is valid UTF-8, unless the step is after ByteLevel.
    template <class F>
    void split(std::string_view text, F piece) const {
        if (!of_bytes_) return split_characters(text, piece);
        std::string characters;
        for (const char byte : text) characters += utf8(byte_characters()[(unsigned char)byte]);
        size_t at = 0;
        split_characters(characters, [&](std::string_view part) {
            const auto bytes = (size_t)std::count_if(part.begin(), part.end(), [](char c) { return (c & 0xc0) != 0x80; });
            piece(text.substr(at, bytes));
            at += bytes;
        });
    }

    // Calls each(part, whether the pattern matches it) for all parts of text in order, for any behavior.
    template <class F>
    void ranges(std::string_view text, F each) const {
        each_range(text, each);
    }

private:
    template <class F>
    void split_characters(std::string_view text, F piece) const {
        if (scanner_) return scanner_->split(text, piece);
        if (behavior_ == SplitBehavior::isolated) return each_range(text, [&](std::string_view part, bool) { piece(part); });
        if (behavior_ == SplitBehavior::removed)
            return each_range(text, [&](std::string_view part, bool match) {
                if (match == invert_) piece(part);
            });
        std::vector<std::pair<std::string_view, bool>> parts;  // a part, and whether it matches
        each_range(text, [&](std::string_view part, bool match) { parts.emplace_back(part, match != invert_); });
        const bool to_next = behavior_ == SplitBehavior::merged_with_next;
        if (to_next) std::reverse(parts.begin(), parts.end());
        std::vector<std::string_view> merged;
        bool before = false;  // whether the previous part is a match
        for (const auto& [part, match] : parts) {
            const bool joins = behavior_ == SplitBehavior::contiguous ? match == before : match && !before;
            before = match;
            if (!joins || merged.empty()) merged.push_back(part);
            else merged.back() = {std::min(part.data(), merged.back().data()), merged.back().size() + part.size()};
        }
        if (to_next) std::reverse(merged.begin(), merged.end());
        for (std::string_view part : merged) piece(part);
    }

    struct Code {
        std::shared_ptr<pcre2_code> code;
        bool jit = false;
        int match(std::string_view text, size_t from, uint32_t options, pcre2_match_data* data, pcre2_match_context* c) const {
            const auto* subject = (PCRE2_SPTR)text.data();
            options |= PCRE2_NO_UTF_CHECK;
            return jit ? pcre2_jit_match(code.get(), subject, text.size(), from, options, data, c)
                       : pcre2_match(code.get(), subject, text.size(), from, options, data, c);
        }
    };
    static std::string error_text(int error) {
        PCRE2_UCHAR text[256];
        pcre2_get_error_message(error, text, sizeof text);
        return (const char*)text;
    }
    Code compile(uint32_t options) const {
        const std::string pattern = pcre2_pattern(pattern_);
        int error = 0;
        PCRE2_SIZE at = 0;
        pcre2_code* code = pcre2_compile((PCRE2_SPTR)pattern.data(), pattern.size(),
                                         options | PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &error, &at, nullptr);
        if (!code)
            fail("the pre-tokenizer's pattern '%s' is not understood: %s at %zu", pattern_.c_str(), error_text(error).c_str(),
                 (size_t)at);
        const bool jit = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
        return {std::shared_ptr<pcre2_code>(code, pcre2_code_free), jit};
    }

    // The steps spent on a text: pattern items tried, and characters skipped between the tries.
    struct Work {
        uint64_t done, most;
        size_t at;
    };
    static int count(pcre2_callout_block* callout, void* data) {
        Work& work = *(Work*)data;
        const size_t at = callout->current_position;
        work.done += 1 + (at > work.at ? at - work.at : work.at - at);
        work.at = at;
        return work.done > work.most ? PCRE2_ERROR_CALLOUT : 0;
    }

    static constexpr size_t nearby = 256;      // bytes
    static constexpr uint32_t few_steps = 64;  // from each possible start of a match
    struct MatchMemory {
        Work work{};
        pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
        pcre2_jit_stack* stack = pcre2_jit_stack_create(32 * 1024, 64 * 1024 * 1024, nullptr);
        pcre2_match_context *quick = pcre2_match_context_create(nullptr), *counting = pcre2_match_context_create(nullptr);
        MatchMemory() {
            for (pcre2_match_context* context : {quick, counting}) pcre2_jit_stack_assign(context, nullptr, stack);
            pcre2_set_match_limit(quick, few_steps);
            pcre2_set_match_limit(counting, UINT32_MAX);
            pcre2_set_callout(counting, count, &work);
        }
        MatchMemory(const MatchMemory&) = delete;
        ~MatchMemory() {
            pcre2_match_context_free(quick);
            pcre2_match_context_free(counting);
            pcre2_jit_stack_free(stack);
            pcre2_match_data_free(data);
        }
    };
    static MatchMemory& memory() {
        thread_local MatchMemory of_this_thread;
        return of_this_thread;
    }

    // Finds the first match from `done` on, in m.data; returns a negative number if there is none.
    int find(std::string_view text, size_t done, MatchMemory& m) const {
        size_t end = std::min(text.size(), done + nearby);
        while (end < text.size() && ((unsigned char)text[end] & 0xc0) == 0x80) end--;  // do not cut a character
        const bool all = end == text.size();
        // A match is valid only if it does not depend on the text after `end`.
        const int near = quick_.match(text.substr(0, end), done, all ? 0 : PCRE2_PARTIAL_HARD, m.data, m.quick);
        const PCRE2_SIZE* range = pcre2_get_ovector_pointer(m.data);
        if ((near >= 0 && range[1] > range[0]) || (near == PCRE2_ERROR_NOMATCH && all)) return near;

        m.work.at = done;
        const int found = counting_.match(text, done, 0, m.data, m.counting);
        if (found == PCRE2_ERROR_CALLOUT)
            fail(
                "the pre-tokenizer's pattern '%.500s' needs more than %llu steps for %zu bytes of text; HINT: rewrite it "
                "without repeated passes over the same text",
                pattern_.c_str(), (unsigned long long)m.work.most, text.size());
        if (found < 0 && found != PCRE2_ERROR_NOMATCH)
            fail("the pre-tokenizer's pattern '%.500s' fails on %zu bytes of text: %s", pattern_.c_str(), text.size(),
                 error_text(found).c_str());
        return found;
    }

    // Calls each(part, whether the pattern matches it) for all parts of text in order.
    template <class F>
    void each_range(std::string_view text, F each) const {
        MatchMemory& m = memory();
        for (size_t done = 0; done < text.size();) {
            const int found = find(text, done, m);  // 0 is a match, too: more groups than m.data holds
            const PCRE2_SIZE* range = pcre2_get_ovector_pointer(m.data);
            const size_t begin = found < 0 ? text.size() : range[0], end = found < 0 ? text.size() : range[1];
            if (found >= 0 && (begin < done || end <= begin))
                fail("the pre-tokenizer's pattern '%s' matches the empty string", pattern_.c_str());
            if (begin > done) each(text.substr(done, begin - done), false);
            if (end > begin) each(text.substr(begin, end - begin), true);
            done = end;
        }
    }

    std::string pattern_;
    SplitBehavior behavior_;
    bool invert_, of_bytes_;
    std::optional<PieceScanner> scanner_;
    Code quick_, counting_;  // without a scanner
};

// A chain of Splitters: each splits the previous one's pieces. An empty chain leaves the text as one piece.
class PreTokenizer {
public:
    explicit PreTokenizer(std::vector<Splitter> steps) : steps_(std::move(steps)) {}
    explicit PreTokenizer(const std::string& pattern) : steps_({Splitter(pattern)}) {}

    // Calls piece(string_view) for each piece of text, which may hold any bytes.
    template <class F>
    void split(std::string_view text, F piece) const {
        Splitter::begin_text(text.size());
        each_valid_part(text, [&](std::string_view part, bool valid) {
            if (valid) split_valid(0, part, piece);
            else piece(part);
        });
    }

private:
    template <class F>
    void split_valid(size_t step, std::string_view text, F& piece) const {
        if (step == steps_.size()) return piece(text);
        steps_[step].split(text, [&](std::string_view part) { split_valid(step + 1, part, piece); });
    }

    std::vector<Splitter> steps_;
};
