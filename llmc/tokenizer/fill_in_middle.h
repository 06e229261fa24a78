// Fill-in-the-middle (Bavarian et al., arXiv:2207.14255): documents whose middle follows prefix and suffix, so that a model
// learns to fill gaps. A share of the documents is split into three parts at two characters, all places being equally likely:
//   PSM   <PRE> prefix <SUF> suffix <MID> middle
//   SPM   <PRE> <SUF> suffix <MID> prefix middle, a share of them
// Each part is encoded by itself. The draws are a function of only the seed and the document's place in the input.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "../base/check.h"
#include "../base/rng.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "tokenizer.h"

class FillInMiddle {
public:
    FillInMiddle(const Tokenizer& tokenizer, double rate, double spm_rate, uint64_t seed)
        : rate_(rate), spm_rate_(spm_rate), seed_(seed) {
        // StarCoder's and Granite's, SantaCoder's, Qwen's and CodeGemma's, Code Llama's, DeepSeek's.
        const std::array<const char*, 3> known[] = {{"<fim_prefix>", "<fim_suffix>", "<fim_middle>"},
                                                    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>"},
                                                    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"},
                                                    {"▁<PRE>", "▁<SUF>", "▁<MID>"},
                                                    {"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}};
        std::string names;
        for (const auto& tokens : known) {
            for (size_t i = 0; i < 3; i++) sentinels_[i] = tokenizer.token_to_id(tokens[i]);
            if (*std::min_element(sentinels_.begin(), sentinels_.end()) >= 0) return;
            names += std::string(names.empty() ? "" : ", ") + tokens[0];
        }
        fail(
            "--fim-rate: %s has no tokens for prefix, suffix and middle (%s, and the others); HINT: train_gpt tokenizer "
            "--special-tokens \"<|endoftext|>\" \"<fim_prefix>\" \"<fim_suffix>\" \"<fim_middle>\"",
            tokenizer.source().c_str(), names.c_str());
    }

    // Calls on_token(id) and on_text(part, continues) in the order of the result. continues: the part starts within the text.
    // (file, number): the document's place.
    template <class OnToken, class OnText>
    void split(std::string_view text, uint32_t file, uint64_t number, OnToken on_token, OnText on_text) const {
        const auto uniform = [&](uint64_t i) { return uniform_at(seed_, RngPurpose::infilling, file, 4 * number + i); };
        if (uniform(0) >= rate_) return on_text(text, false);
        const auto places = (double)count_characters(text) + 1;
        const auto [first, second] = std::minmax({(int64_t)(uniform(2) * places), (int64_t)(uniform(3) * places)});
        const size_t begin = offset_of(text, first), end = begin + offset_of(text.substr(begin), second - first);
        const std::string_view prefix = text.substr(0, begin), middle = text.substr(begin, end - begin),
                               suffix = text.substr(end);
        const bool suffix_first = uniform(1) < spm_rate_;
        on_token(sentinels_[0]);
        if (!suffix_first) on_text(prefix, false);
        on_token(sentinels_[1]);
        on_text(suffix, true);
        on_token(sentinels_[2]);
        if (suffix_first) on_text(prefix, false);
        on_text(middle, true);
    }

private:
    // The byte at which a character starts; the text's size for the one after the last.
    static size_t offset_of(std::string_view text, int64_t character) {
        size_t i = 0;
        for (; i < text.size(); i++)
            if (begins_character(text[i]) && character-- == 0) break;
        return i;
    }

    double rate_, spm_rate_;
    uint64_t seed_;
    std::array<int, 3> sentinels_{};  // prefix, suffix, middle
};
