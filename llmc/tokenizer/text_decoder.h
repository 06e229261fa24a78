// Decodes tokens to text if tokens are not simply bytes: the decoders of Hugging Face's tokenizer.json, and SentencePiece's.
//
//   Replace            one text by another, in each token
//   ByteFallback       <0x0A> is a byte. Byte sequences that are not UTF-8 are unchanged (the library has U+FFFD for each)
//   Fuse               all tokens become one
//   Strip              characters dropped from both ends of each token
//   Metaspace          U+2581 is a space, and the one inserted before the text is dropped
//   Sequence           one after the other
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/utf8.h"
#include "normalizer.h"
#include "unigram.h"

class TextDecoder {
public:
    TextDecoder() = default;
    explicit TextDecoder(const nlohmann::json& step) { add(step); }

    // SentencePiece's: the space before the text is dropped; with `all_leading`, every piece of spaces before the first other
    // one.
    static TextDecoder sentencepiece(bool drops_prefix, bool all_leading) {
        TextDecoder d;
        d.steps_.emplace_back([=](Strings& tokens, bool begins) {
            bool at_start = begins && drops_prefix;
            for (std::string& t : tokens) {
                bool dropped = false;
                if (at_start && t.compare(0, space_symbol.size(), space_symbol) == 0) {
                    t.erase(0, space_symbol.size());
                    dropped = true;
                }
                at_start = at_start && t.empty() && (all_leading || !dropped);
                t = Normalizer::replaced(std::string(space_symbol), t, " ");
            }
        });
        d.add_bytes();
        return d;
    }

    // begins: the first token starts a text, before which a space may have been inserted.
    std::string decode(std::vector<std::string> tokens, bool begins) const {
        for (const Step& step : steps_) step(tokens, begins);
        std::string text;
        for (const std::string& t : tokens) text += t;
        return text;
    }

private:
    using Strings = std::vector<std::string>;
    using Step = std::function<void(Strings& tokens, bool begins)>;

    void add_bytes() {
        steps_.emplace_back([](Strings& tokens, bool) {
            Strings out;
            bool bytes = false;  // the last token consists of bytes
            for (std::string& t : tokens) {
                const int byte = byte_of_token(t);
                if (byte >= 0 && bytes) out.back() += (char)byte;
                else out.push_back(byte >= 0 ? std::string(1, (char)byte) : std::move(t));
                bytes = byte >= 0;
            }
            tokens = std::move(out);
        });
    }

    void add(const nlohmann::json& j) {
        const std::string type = j.is_object() ? j.value("type", "") : "null";
        const auto each = [&](auto change) {
            steps_.push_back([change](Strings& tokens, bool) {
                for (std::string& t : tokens) t = change(t);
            });
        };
        if (type == "Sequence") {
            for (const auto& part : j.at("decoders")) add(part);
        } else if (type == "Replace") {
            Normalizer::add_replacement(j, each);
        } else if (type == "ByteFallback") {
            add_bytes();
        } else if (type == "Fuse") {
            fused_ = true;
            steps_.emplace_back([](Strings& tokens, bool) {
                std::string all;
                for (const std::string& t : tokens) all += t;
                tokens = {all};
            });
        } else if (type == "Strip") {
            steps_.emplace_back([content = j.at("content").get<std::string>(), start = j.at("start").get<size_t>(),
                                 stop = j.at("stop").get<size_t>(), fused = fused_](Strings& tokens, bool begins) {
                for (std::string& t : tokens) {
                    const size_t n = content.size();
                    for (size_t i = 0; i < start && (begins || !fused) && n && t.compare(0, n, content) == 0; i++)
                        t.erase(0, n);
                    for (size_t i = 0; i < stop && n && t.size() >= n && t.compare(t.size() - n, n, content) == 0; i++)
                        t.resize(t.size() - n);
                }
            });
        } else if (type == "Metaspace") {
            const auto replacement = j.value("replacement", std::string(space_symbol));
            const bool drops = metaspace_scheme(j) != "never";
            steps_.emplace_back([=](Strings& tokens, bool begins) {
                for (size_t i = 0; i < tokens.size(); i++)
                    tokens[i] = Normalizer::replaced(replacement, tokens[i], i == 0 && begins && drops ? "" : " ");
            });
        } else {
            fail(
                "the decoder '%s' is not supported; Sequence, Replace, ByteFallback, Fuse, Strip and Metaspace are, and "
                "ByteLevel "
                "after a ByteLevel pre-tokenizer",
                type.c_str());
        }
    }

public:
    // Whether Metaspace inserts a space before a text: always, first (only at the start of the whole text), never. Old files
    // have add_prefix_space.
    static std::string metaspace_scheme(const nlohmann::json& j) {
        const std::string scheme = j.value("prepend_scheme", j.value("add_prefix_space", true) ? "always" : "never");
        if (scheme != "always" && scheme != "first" && scheme != "never")
            fail("Metaspace has the prepend_scheme '%s'; it must be always, first or never", scheme.c_str());
        return scheme;
    }

private:
    std::vector<Step> steps_;
    bool fused_ = false;
};
