// The language of a document, by a text classifier whose labels are languages, and whether to keep it. FineWeb keeps documents
// that fastText's classifier labels English with a probability of at least 0.65 (arXiv 2406.17557). A long document is judged
// by 4 KiB of it, in pieces spread evenly: the whole would give the same answer.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "document.h"
#include "text_classifier.h"

class LanguageFilter {
public:
    // keep: languages by their labels in the model; none: all of them
    LanguageFilter(const std::string& model, std::vector<std::string> keep, double min_probability)
        : classifier_(TextClassifier::load(model)), keep_(std::move(keep)), min_probability_(min_probability) {
        for (const std::string& language : keep_)
            if (!classifier_.has(language))
                fail("%s does not know the language '%s'; it knows %s", model.c_str(), language.c_str(),
                     classifier_.label_list().c_str());
    }

    // Pure: the same text gives the same guess on every thread.
    TextClassifier::Guess guess(std::string_view text) const {
        std::string buffer;
        return classifier_.classify(sample_text(text, sample_bytes, buffer));
    }
    DocumentVerdict judge(const TextClassifier::Guess& guess) const {
        const bool wanted = keep_.empty() || std::find(keep_.begin(), keep_.end(), guess.label) != keep_.end();
        if (wanted && guess.probability >= min_probability_) return {};
        return {false, "language", format("%s with probability %.2f", guess.label.c_str(), guess.probability)};
    }

    DocumentVerdict apply(Document& document) const {
        const TextClassifier::Guess found = guess(document.text);
        document.fields.set("language", found.label);
        document.fields.set("language_score", std::round(1e4 * found.probability) / 1e4);
        return judge(found);
    }

private:
    static constexpr size_t sample_bytes = 4096;
    TextClassifier classifier_;
    std::vector<std::string> keep_;
    double min_probability_;
};
