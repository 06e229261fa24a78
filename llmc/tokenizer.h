// Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) from Hugging Face's tokenizer.json: GPT-2, Llama-3 and BLOOM
// style.
//
// Text becomes tokens in three steps.
//   1. Pre-tokenisation: a regular expression cuts the text into pieces (a word with the space before it, a run of digits,
//   ...).
//      Merges never cross a piece, so " the" is learned once and not together with every word that follows.
//   2. Each piece is its UTF-8 bytes; every byte value is a token, so there is no text without an encoding.
//   3. Merges: training learned an ordered list of pairs of tokens. Of the pairs that stand side by side in the piece, the one
//      learned first is merged, again and again, until none is left.
// tokenizer.json writes bytes as characters (GPT-2's table: printable bytes stand for themselves, the others for U+0100 and
// up), so that " the" reads "Ġthe". Only loading and saving know of that; everything in between is raw bytes. Bytes that are
// not valid UTF-8 are pieces of their own: encode() takes any bytes and decode(encode(x)) == x.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "file.h"
#include "json.h"

// ---- bytes as characters ---------------------------------------------------------------------------------------------------
inline std::string utf8(uint32_t c) {
    if (c < 0x80) return {(char)c};
    if (c < 0x800) return {(char)(0xc0 | c >> 6), (char)(0x80 | (c & 63))};
    return {(char)(0xe0 | c >> 12), (char)(0x80 | (c >> 6 & 63)), (char)(0x80 | (c & 63))};  // no more is needed here
}

// Code point of each byte in GPT-2's table.
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

inline std::string bytes_to_characters(std::string_view bytes) {
    std::string s;
    for (unsigned char b : bytes) s += utf8(byte_characters()[b]);
    return s;
}

// False if a character is not of the table.
inline bool characters_to_bytes(std::string_view characters, std::string& bytes) {
    static const std::unordered_map<std::string, char> inverse = [] {
        std::unordered_map<std::string, char> m;
        for (int b = 0; b < 256; b++) m[utf8(byte_characters()[b])] = (char)b;
        return m;
    }();
    bytes.clear();
    for (size_t i = 0; i < characters.size();) {
        const size_t n = (unsigned char)characters[i] < 0x80 ? 1 : 2;  // the table ends at U+0143
        const auto found = inverse.find(std::string(characters.substr(i, n)));
        if (found == inverse.end()) return false;
        bytes += found->second, i += n;
    }
    return true;
}

// Length of the valid UTF-8 sequence at the start of s; 0 if it does not begin with one.
inline size_t valid_utf8_length(const unsigned char* s, size_t n) {
    const auto follows = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
        return i < n && s[i] >= low && s[i] <= high;
    };
    const unsigned c = s[0];
    if (c < 0x80) return 1;
    if (c >= 0xc2 && c <= 0xdf) return follows(1) ? 2 : 0;
    if (c >= 0xe0 && c <= 0xef) return follows(1, c == 0xe0 ? 0xa0 : 0x80, c == 0xed ? 0x9f : 0xbf) && follows(2) ? 3 : 0;
    if (c >= 0xf0 && c <= 0xf4)
        return follows(1, c == 0xf0 ? 0x90 : 0x80, c == 0xf4 ? 0x8f : 0xbf) && follows(2) && follows(3) ? 4 : 0;
    return 0;
}

// ---- pre-tokenisation ------------------------------------------------------------------------------------------------------
// Named patterns; "bloom" is Oniguruma's nested class written flat.
inline std::string pretokenizer_pattern(const std::string& name) {
    if (name == "gpt2") return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    if (name == "llama3")
        return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    if (name == "bloom") return " ?[^(\\s|.,!?…。，、।۔،)]+";
    fail("pre-tokenizer '%s' is unknown; one of gpt2, llama3, bloom", name.c_str());
}
inline constexpr const char* bloom_pattern_in_files = " ?[^(\\s|[.,!?…。，、।۔،])]+";

// Cuts text into pieces: the matches of a pattern, and what lies between them.
//
// Patterns come from files, and some would go over a text for years. So the next match is first looked for nearby and in few
// steps, which is all that a good pattern needs for almost every piece. Where that is not enough (a long piece, a long run of
// spaces), the same pattern, compiled with a callout before each of its items, looks at the whole text and counts its steps:
// those of all such pieces of a text are limited, to far more than a good pattern takes. Either way finds the same match.
class PreTokenizer {
public:
    explicit PreTokenizer(const std::string& pattern)
        : pattern_(pattern), quick_(compile(0)), counting_(compile(PCRE2_AUTO_CALLOUT)) {
        uint32_t references = 0;
        pcre2_pattern_info(quick_.code.get(), PCRE2_INFO_BACKREFMAX, &references);
        if (references > 0)  // their comparisons are steps that nobody counts
            fail("the pre-tokenizer's pattern '%.500s' is not supported: it has a back reference", pattern.c_str());
    }
    const std::string& pattern() const { return pattern_; }

    // piece(string_view) for each piece of text, which may hold any bytes.
    template <class F>
    void split(std::string_view text, F piece) const {
        Work& work = memory().work;
        work = {0, 20000000 + 64 * (uint64_t)text.size(), 0};
        const auto* bytes = (const unsigned char*)text.data();
        for (size_t i = 0; i < text.size();) {
            size_t end = i;
            while (end < text.size()) {
                if (bytes[end] < 0x80) {
                    end++;
                    continue;
                }
                const size_t n = valid_utf8_length(bytes + end, text.size() - end);
                if (n == 0) break;
                end += n;
            }
            if (end > i) split_valid(text.substr(i, end - i), piece);
            i = end;
            while (end < text.size() && valid_utf8_length(bytes + end, text.size() - end) == 0) end++;
            if (end > i) piece(text.substr(i, end - i));
            i = end;
        }
    }

private:
    struct Code {
        std::shared_ptr<pcre2_code> code;
        bool jit;
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
        const std::string flat = pattern_ == bloom_pattern_in_files ? pretokenizer_pattern("bloom") : pattern_;
        int error = 0;
        PCRE2_SIZE at = 0;
        pcre2_code* code = pcre2_compile((PCRE2_SPTR)flat.data(), flat.size(),
                                         options | PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &at, nullptr);
        if (!code)
            fail("the pre-tokenizer's pattern '%s' is not understood: %s at %zu", pattern_.c_str(), error_text(error).c_str(),
                 (size_t)at);
        const bool jit = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
        return {std::shared_ptr<pcre2_code>(code, pcre2_code_free), jit};
    }

    // Steps over a text: items of the pattern that were tried, and characters that lie between where.
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
    static constexpr uint32_t few_steps = 64;  // from each place where a match might begin
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
            pcre2_match_context_free(quick), pcre2_match_context_free(counting);
            pcre2_jit_stack_free(stack), pcre2_match_data_free(data);
        }
    };
    static MatchMemory& memory() {
        thread_local MatchMemory of_this_thread;
        return of_this_thread;
    }

    // The first match from `done` on, in m.data; not negative if there is one.
    int find(std::string_view text, size_t done, MatchMemory& m) const {
        size_t end = std::min(text.size(), done + nearby);
        while (end < text.size() && ((unsigned char)text[end] & 0xc0) == 0x80) end--;  // a character is not cut
        const bool all = end == text.size();
        // A match counts only if it does not depend on what comes after `end`.
        const int near = quick_.match(text.substr(0, end), done, all ? 0 : PCRE2_PARTIAL_HARD, m.data, m.quick);
        const PCRE2_SIZE* range = pcre2_get_ovector_pointer(m.data);
        if ((near >= 0 && range[1] > range[0]) || (near == PCRE2_ERROR_NOMATCH && all)) return near;

        m.work.at = done;
        const int found = counting_.match(text, done, 0, m.data, m.counting);
        if (found == PCRE2_ERROR_CALLOUT)
            fail(
                "the pre-tokenizer's pattern '%.500s' takes more than %llu steps over %zu bytes of text; HINT: a pattern that "
                "goes "
                "over the same text again and again must be written in another way",
                pattern_.c_str(), (unsigned long long)m.work.most, text.size());
        if (found < 0 && found != PCRE2_ERROR_NOMATCH)
            fail("the pre-tokenizer's pattern '%.500s' fails on %zu bytes of text: %s", pattern_.c_str(), text.size(),
                 error_text(found).c_str());
        return found;
    }

    template <class F>
    void split_valid(std::string_view text, F piece) const {
        MatchMemory& m = memory();
        for (size_t done = 0; done < text.size();) {
            const int found = find(text, done, m);  // may be 0: more groups than there is room for
            const PCRE2_SIZE* range = pcre2_get_ovector_pointer(m.data);
            const size_t begin = found < 0 ? text.size() : range[0], end = found < 0 ? text.size() : range[1];
            if (found >= 0 && (begin < done || end <= begin))
                fail("the pre-tokenizer's pattern '%s' matches the empty string", pattern_.c_str());
            if (begin > done) piece(text.substr(done, begin - done));
            if (end > begin) piece(text.substr(begin, end - begin));
            done = end;
        }
    }

    std::string pattern_;
    Code quick_, counting_;
};

// ---- the tokenizer ---------------------------------------------------------------------------------------------------------
class Tokenizer {
public:
    // path: a tokenizer.json or a directory that holds one.
    static Tokenizer load(const std::string& path) {
        const std::string file = std::filesystem::is_directory(path) ? path + "/tokenizer.json" : path;
        try {
            return Tokenizer(parse_json(MappedFile(file).text(), file), file);
        } catch (const nlohmann::json::exception& e) {
            fail("%s is not a valid tokenizer.json: %s", file.c_str(), e.what());
        }
    }

    int vocab_size() const { return (int)bytes_.size(); }
    int eod_id() const { return eod_; }  // end of document; -1: none
    int bos_id() const { return bos_; }
    const std::string& source() const { return source_; }
    // The raw bytes of a token; of a special token, its name.
    const std::string& token_bytes(int id) const { return bytes_[id]; }
    bool is_special(int id) const { return special_[id]; }
    int token_to_id(const std::string& name) const {
        const auto found = added_.find(name);
        return found == added_.end() ? -1 : found->second;
    }

    std::vector<int> encode(std::string_view text) const {
        std::vector<int> tokens;
        encode_append(text, tokens);
        return tokens;
    }
    // Special tokens are not looked for: text that spells one is text.
    void encode_append(std::string_view text, std::vector<int>& tokens) const {
        Cache& cache = cache_of_this_thread();
        try {
            pre_tokenizer_->split(text, [&](std::string_view piece) { encode_piece(piece, tokens, cache); });
        } catch (const Error& e) {
            fail("%s: %s", source_.c_str(), e.what());
        }
    }

    std::string decode(const std::vector<int>& tokens) const {
        std::string text;
        for (int id : tokens)
            if (id >= 0 && id < vocab_size()) text += bytes_[id];
        return text;
    }

private:
    struct Merge {
        int rank, token;
    };
    struct Cache {
        uint64_t owner = 0;
        std::unordered_map<std::string, std::vector<int>> pieces;
    };

    static uint64_t pair_key(int a, int b) { return (uint64_t)(uint32_t)a << 32 | (uint32_t)b; }
    const Merge* merge_of(int a, int b) const {
        const auto found = merges_.find(pair_key(a, b));
        return found == merges_.end() ? nullptr : &found->second;
    }

    Cache& cache_of_this_thread() const {
        thread_local Cache cache;
        if (cache.owner != instance_) cache.owner = instance_, cache.pieces.clear();
        return cache;
    }

    void encode_piece(std::string_view piece, std::vector<int>& tokens, Cache& cache) const {
        constexpr size_t longest_cached = 32, most_cached = 1 << 18;
        if (piece.size() > longest_cached) return merge_piece(piece, tokens);
        std::string key(piece);
        const auto found = cache.pieces.find(key);
        if (found != cache.pieces.end()) {
            tokens.insert(tokens.end(), found->second.begin(), found->second.end());
            return;
        }
        const size_t before = tokens.size();
        merge_piece(piece, tokens);
        if (cache.pieces.size() >= most_cached) cache.pieces.clear();
        cache.pieces.emplace(std::move(key), std::vector<int>(tokens.begin() + before, tokens.end()));
    }

    void merge_piece(std::string_view piece, std::vector<int>& tokens) const {
        if (ignore_merges_) {  // Llama-3: a piece that is a token as a whole stays one
            const auto found = by_bytes_.find(std::string(piece));
            if (found != by_bytes_.end()) return tokens.push_back(found->second);
        }
        if (piece.size() > INT_MAX) fail("a piece of %zu bytes is too long to merge; at most %d are", piece.size(), INT_MAX);
        if (piece.size() <= 48) merge_short(piece, tokens);
        else merge_long(piece, tokens);
    }

    // Looks for the best pair again after every merge: quadratic, and fastest for words.
    void merge_short(std::string_view piece, std::vector<int>& tokens) const {
        int symbols[48], n = 0;
        for (unsigned char b : piece) symbols[n++] = byte_id_[b];
        while (n > 1) {
            Merge best = {INT_MAX, -1};
            int at = -1;
            for (int i = 0; i + 1 < n; i++)
                if (const Merge* m = merge_of(symbols[i], symbols[i + 1]); m && m->rank < best.rank) best = *m, at = i;
            if (at < 0) break;
            symbols[at] = best.token;
            std::copy(symbols + at + 2, symbols + n, symbols + at + 1);
            n--;
        }
        tokens.insert(tokens.end(), symbols, symbols + n);
    }

    // A linked list of symbols and a queue of candidate pairs: n log n, for runs of thousands of letters without a space.
    void merge_long(std::string_view piece, std::vector<int>& tokens) const {
        const int n = (int)piece.size();
        std::vector<int> symbol(n), next(n), previous(n);
        using Candidate = std::array<int, 4>;  // rank, position, left symbol, right symbol
        std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue;
        const auto consider = [&](int i) {
            if (i < 0 || next[i] >= n) return;
            if (const Merge* m = merge_of(symbol[i], symbol[next[i]])) queue.push({m->rank, i, symbol[i], symbol[next[i]]});
        };
        for (int i = 0; i < n; i++) symbol[i] = byte_id_[(unsigned char)piece[i]], next[i] = i + 1, previous[i] = i - 1;
        for (int i = 0; i < n; i++) consider(i);
        while (!queue.empty()) {
            const auto [rank, i, left, right] = queue.top();
            queue.pop();
            if (symbol[i] != left || next[i] >= n || symbol[next[i]] != right) continue;  // one of them was merged meanwhile
            const int gone = next[i];
            symbol[i] = merge_of(left, right)->token, symbol[gone] = -1;
            next[i] = next[gone];
            if (next[i] < n) previous[next[i]] = i;
            consider(previous[i]), consider(i);
        }
        for (int i = 0; i < n; i = next[i]) tokens.push_back(symbol[i]);
    }

    // ---- loading ----
    Tokenizer(const nlohmann::json& j, const std::string& file) : source_(file) {
        static std::atomic<uint64_t> instances{0};
        instance_ = ++instances;
        const char* name = file.c_str();
        if (!j.is_object() || !j.contains("model")) fail("%s is not a tokenizer.json: it has no 'model'", name);
        const auto& model = j["model"];
        const std::string type = model.value("type", model.contains("merges") ? "BPE" : "");
        if (type != "BPE") fail("%s: model type '%s' is not supported; only byte-level BPE is", name, type.c_str());
        if (j.contains("normalizer") && !j["normalizer"].is_null())
            fail("%s: normalizer '%s' is not supported; only none is", name, j["normalizer"].value("type", "?").c_str());
        if (model.value("byte_fallback", false)) fail("%s: byte_fallback is not supported; only byte-level BPE is", name);
        ignore_merges_ = model.value("ignore_merges", false);
        load_pre_tokenizer(j);
        load_vocabulary(j);
        load_merges(model.at("merges"));
        for (const char* token : {"<|endoftext|>", "<|end_of_text|>", "</s>"})
            if (eod_ < 0) eod_ = token_to_id(token);
        for (const char* token : {"<|begin_of_text|>", "<s>"})
            if (bos_ < 0) bos_ = token_to_id(token);
        if (bos_ < 0) bos_ = eod_;
    }

    void load_pre_tokenizer(const nlohmann::json& j) {
        const auto refuse = [&](const std::string& what) { fail("%s: %s is not supported", source_.c_str(), what.c_str()); };
        if (!j.contains("pre_tokenizer") || j["pre_tokenizer"].is_null()) refuse("a tokenizer without pre-tokenizer");
        std::vector<nlohmann::json> steps;
        if (j["pre_tokenizer"].value("type", "") == "Sequence")
            for (const auto& step : j["pre_tokenizer"].at("pretokenizers")) steps.push_back(step);
        else steps.push_back(j["pre_tokenizer"]);
        std::string pattern;
        bool bytes = false;
        for (const auto& step : steps) {
            const std::string type = step.value("type", "");
            if (type == "Split") {
                const auto& p = step.at("pattern");
                if (!p.contains("Regex") || step.value("behavior", "") != "Isolated" || step.value("invert", false) ||
                    !pattern.empty())
                    refuse("a Split other than one isolated regular expression");
                pattern = p["Regex"].get<std::string>();
            } else if (type == "ByteLevel") {
                if (step.value("add_prefix_space", false)) refuse("ByteLevel with add_prefix_space");
                if (step.value("use_regex", true)) {
                    if (!pattern.empty()) refuse("ByteLevel with use_regex after a Split");
                    pattern = pretokenizer_pattern("gpt2");
                }
                bytes = true;
            } else {
                refuse("the pre-tokenizer '" + type + "'");
            }
        }
        if (!bytes || pattern.empty()) refuse("a pre-tokenizer without ByteLevel and a pattern");
        pre_tokenizer_ = std::make_shared<PreTokenizer>(pattern);
    }

    void load_vocabulary(const nlohmann::json& j) {
        const char* name = source_.c_str();
        const auto& vocabulary = j["model"].at("vocab");
        const size_t limit = vocabulary.size() + (j.contains("added_tokens") ? j["added_tokens"].size() : 0);
        const auto place = [&](const nlohmann::json& number, const std::string& token) {
            if (!number.is_number_integer()) fail("%s: the id of token '%s' is no whole number", name, token.c_str());
            const int64_t id = number.get<int64_t>();
            if (id < 0 || id >= (int64_t)limit)
                fail("%s: token '%s' has the id %lld; ids must be 0 .. %zu without gaps", name, token.c_str(), (long long)id,
                     limit - 1);
            if ((size_t)id >= bytes_.size())
                bytes_.resize((size_t)id + 1), special_.resize((size_t)id + 1), taken_.resize((size_t)id + 1);
            return id;
        };
        std::fill(byte_id_.begin(), byte_id_.end(), -1);
        for (const auto& [characters, value] : vocabulary.items()) {
            const int64_t id = place(value, characters);
            if (taken_[id])
                fail("%s: the id %lld belongs to two tokens, '%s' and another", name, (long long)id, characters.c_str());
            std::string bytes;
            const bool of_bytes = characters_to_bytes(characters, bytes);
            if (!of_bytes) bytes = characters;  // a special token: its own name
            bytes_[id] = bytes, taken_[id] = true;
            by_characters_[characters] = (int)id;
            by_bytes_.emplace(bytes, (int)id);
            if (of_bytes && bytes.size() == 1) byte_id_[(unsigned char)bytes[0]] = (int)id;
        }
        for (int b = 0; b < 256; b++)
            if (byte_id_[b] < 0) fail("%s: the byte %d has no token; it is not a byte-level vocabulary", name, b);
        if (j.contains("added_tokens"))
            for (const auto& token : j["added_tokens"]) {
                const std::string content = token.at("content").get<std::string>();
                const int64_t id = place(token.at("id"), content);
                if (!taken_[id]) bytes_[id] = content;
                else if (content != bytes_[id] && content != bytes_to_characters(bytes_[id]))
                    fail("%s: the id %lld belongs to two tokens, '%s' and '%s'", name, (long long)id, bytes_[id].c_str(),
                         content.c_str());
                special_[id] = token.value("special", false), taken_[id] = true;
                added_[content] = (int)id;
            }
        for (size_t id = 0; id < taken_.size(); id++)
            if (!taken_[id]) fail("%s: no token has the id %zu", name, id);
    }

    void load_merges(const nlohmann::json& merges) {
        int rank = 0;
        for (const auto& entry : merges) {
            std::string left, right;
            if (entry.is_string()) {
                const std::string text = entry.get<std::string>();
                const size_t space = text.find(' ', 1);
                if (space == std::string::npos) fail("%s: merge %d, '%s', is not a pair", source_.c_str(), rank, text.c_str());
                left = text.substr(0, space), right = text.substr(space + 1);
            } else {
                left = entry.at(0).get<std::string>(), right = entry.at(1).get<std::string>();
            }
            const auto id = [&](const std::string& characters) {
                const auto found = by_characters_.find(characters);
                if (found == by_characters_.end())
                    fail("%s: merge %d names '%s', which is no token", source_.c_str(), rank, characters.c_str());
                return found->second;
            };
            const int a = id(left), b = id(right), merged = id(left + right);
            merges_.emplace(pair_key(a, b), Merge{rank++, merged});
        }
        by_characters_.clear();
    }

    std::string source_;
    uint64_t instance_ = 0;
    bool ignore_merges_ = false;
    int eod_ = -1, bos_ = -1;
    std::shared_ptr<PreTokenizer> pre_tokenizer_;
    std::vector<std::string> bytes_;  // id -> raw bytes
    std::vector<bool> special_, taken_;
    std::array<int, 256> byte_id_;
    std::unordered_map<std::string, int> by_bytes_, by_characters_, added_;
    std::unordered_map<uint64_t, Merge> merges_;
};
