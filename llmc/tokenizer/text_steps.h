// The pre-tokenizers of Hugging Face's tokenizer.json, as a list of steps, each of which splits the previous step's pieces.
// Anything unknown is refused by name.
//
//   ByteLevel                   GPT-2's words, whose characters become bytes (tokenizer.h); only splits may follow
//   Metaspace                   spaces become U+2581, one is put before the text, and each starts a piece
//   Split, CharDelimiterSplit   at matches of a regular expression, or of a text
//   Digits, Punctuation         at numbers, at punctuation
//   Whitespace, WhitespaceSplit at non-words, at white space, which is dropped
//   Sequence                    one after the other
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"
#include "pre_tokenizer.h"
#include "text_decoder.h"

class TextSteps {
public:
    TextSteps() = default;
    explicit TextSteps(const nlohmann::json& j) { add(j); }

    bool byte_level = false;  // a step is ByteLevel
    bool drops_text = false;  // some step drops its matches
    bool only_splits() const {
        return std::all_of(steps_.begin(), steps_.end(), [](const Step& s) { return std::holds_alternative<Splitter>(s); });
    }
    std::vector<Splitter> splitters() const {
        std::vector<Splitter> all;
        for (const Step& step : steps_) all.push_back(std::get<Splitter>(step));
        return all;
    }

    // Calls piece(string_view) for each piece of text. Bytes that are not UTF-8 are separate pieces. begins: the text starts a
    // document; continues: it is a later part of a text, before which nothing is put.
    template <class F>
    void split(std::string_view text, bool begins, bool continues, F piece) const {
        Splitter::begin_text(text.size());
        each_valid_part(text, [&](std::string_view part, bool valid) {
            const bool first = part.data() == text.data();
            if (valid) divide(0, part, begins && first, continues || !first, piece);
            else piece(part);
        });
    }

private:
    struct Metaspace {
        std::string replacement, scheme;
        bool splits;
    };
    using Step = std::variant<Splitter, Metaspace>;

    template <class F>
    void divide(size_t i, std::string_view text, bool begins, bool continues, F& piece) const {
        if (text.empty()) return;
        if (i == steps_.size()) return piece(text);
        if (const auto* splitter = std::get_if<Splitter>(&steps_[i]))
            return splitter->split(text, [&](std::string_view part) {
                const bool first = part.data() == text.data();
                divide(i + 1, part, begins && first, continues && first, piece);
            });
        const auto& metaspace = std::get<Metaspace>(steps_[i]);
        const std::string& space = metaspace.replacement;
        std::string changed = Normalizer::replaced(" ", text, space);
        const bool puts = metaspace.scheme == "always" ? !continues : metaspace.scheme == "first" && begins && !continues;
        if (puts && changed.compare(0, space.size(), space) != 0) changed.insert(0, space);
        const std::string_view all = changed;
        for (size_t begin = 0, end; begin < all.size(); begin = end) {
            end = metaspace.splits ? std::min(all.find(space, begin + 1), all.size()) : all.size();
            divide(i + 1, all.substr(begin, end - begin), begins && begin == 0, continues && begin == 0, piece);
        }
    }

    void add(const nlohmann::json& j) {
        if (j.is_null()) return;
        const std::string type = j.value("type", "");
        if (type == "Sequence") {
            for (const auto& part : j.at("pretokenizers")) add(part);
            return;
        }
        const auto split = [&](const std::string& pattern, SplitBehavior behavior, bool invert = false) {
            if (byte_level && behavior == SplitBehavior::removed)
                refuse("the pre-tokenizer '" + type + "', which drops text, after ByteLevel");
            steps_.emplace_back(Splitter(pattern, behavior, invert, true, byte_level));
            drops_text |= behavior == SplitBehavior::removed;
        };
        if (byte_level && (type == "ByteLevel" || type == "Metaspace"))
            refuse("the pre-tokenizer '" + type + "' after ByteLevel");
        if (type == "Split") {
            const auto& p = j.at("pattern");
            const bool regex = p.contains("Regex");
            const auto pattern = p.at(regex ? "Regex" : "String").get<std::string>();
            split(regex ? pattern : literal_pattern(pattern), behavior(j.value("behavior", "")), j.value("invert", false));
        } else if (type == "CharDelimiterSplit") {
            split(literal_pattern(j.at("delimiter").get<std::string>()), SplitBehavior::removed);
        } else if (type == "Digits") {
            split("\\p{N}", j.value("individual_digits", false) ? SplitBehavior::isolated : SplitBehavior::contiguous);
        } else if (type == "Punctuation") {
            split("[\\p{P}$+<=>^`|~]", behavior(j.value("behavior", "Isolated")));
        } else if (type == "Whitespace") {
            const std::string word = "[:alpha:]\\p{M}\\p{Nd}\\p{Pc}\\x{200c}\\x{200d}";
            split("[" + word + "]+|[^" + word + "\\s]+", SplitBehavior::removed, true);
        } else if (type == "WhitespaceSplit") {
            split("\\s", SplitBehavior::removed);
        } else if (type == "Metaspace") {
            const auto replacement = j.value("replacement", std::string(space_symbol));
            if (replacement.empty()) refuse("Metaspace without replacement");
            steps_.emplace_back(Metaspace{replacement, TextDecoder::metaspace_scheme(j), j.value("split", true)});
        } else if (type == "ByteLevel") {
            if (j.value("add_prefix_space", true)) refuse("ByteLevel with add_prefix_space");
            if (j.value("use_regex", true)) split(pretokenizer_pattern("gpt2"), SplitBehavior::isolated);
            byte_level = true;
        } else {
            refuse("the pre-tokenizer '" + type + "'");
        }
    }

    static SplitBehavior behavior(const std::string& name) {
        const std::vector<std::string> names = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"};
        const auto found = std::find(names.begin(), names.end(), name);
        if (found == names.end()) refuse("the behavior '" + name + "' of a pre-tokenizer");
        return (SplitBehavior)(found - names.begin());
    }
    [[noreturn]] static void refuse(const std::string& what) { fail("%s is not supported", what.c_str()); }

    std::vector<Step> steps_;
};
