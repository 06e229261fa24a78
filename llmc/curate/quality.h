// The quality of a document: the probability of the label "good" by a text classifier trained on good and bad documents, and
// whether to keep a document with that score.
//   threshold   keep if score >= threshold
//   pareto      keep if a draw from Pareto(alpha) exceeds 1 - score (GPT-3: arXiv 2005.14165, appendix A, alpha 9; MT-NLG:
//               alpha 3): keeps nearly all good documents, and some bad ones, so that the corpus does not only resemble the
//               good examples. numpy's pareto draws u^(-1/alpha) - 1, u uniform in (0, 1], so a document is kept with
//               probability (2 - score)^-alpha
// The draw is a function of only the seed and the document's number (base/rng.h).
#pragma once
#include <cmath>
#include <string>
#include <string_view>

#include "document.h"
#include "text_classifier.h"

class QualityFilter {
public:
    // limit: the threshold, or alpha
    QualityFilter(const std::string& model, const std::string& method, double limit, uint64_t seed)
        : classifier_(TextClassifier::load(model)), pareto_(method == "pareto"), limit_(limit), seed_(seed) {
        if (!classifier_.has("good"))
            fail(
                "%s does not judge quality: its labels are %s; HINT: train_gpt curate --train-quality good:FILE bad:FILE "
                "trains one that does",
                model.c_str(), classifier_.label_list().c_str());
    }

    // Pure, like judge().
    float score(std::string_view text) const {
        std::string buffer;
        return classifier_.probability_of("good", sample_text(text, sample_bytes, buffer));
    }
    // number: the document's position in the corpus
    DocumentVerdict judge(float score, int64_t number) const {
        const double least = pareto_ ? uniform_at(seed_, RngPurpose::documents, 0, (uint64_t)number) : limit_;
        const double value = pareto_ ? std::pow(2.0 - score, -limit_) : score;
        if (pareto_ ? value > least : value >= least) return {};
        if (pareto_) return {false, "quality-pareto", format("score %.3f, kept with probability %.3f", score, value)};
        return {false, "quality", format("score %.3f; at least %.3f is kept", score, limit_)};
    }

    DocumentVerdict apply(Document& document) const {
        const float value = score(document.text);
        document.fields.set("quality_score", std::round(1e4 * value) / 1e4);
        return judge(value, document.number);
    }

private:
    static constexpr size_t sample_bytes = 64 << 10;  // quality varies within a document more than its language does
    TextClassifier classifier_;
    bool pareto_;
    double limit_;
    uint64_t seed_;
};
