// Accuracy of a classifier on labeled texts: precision, recall and F1 of each label, accuracy by the texts' lengths, the
// labels most often confused and, for good and bad texts, the area under the ROC curve.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../base/table.h"
#include "../base/text.h"
#include "../base/utf8.h"
#include "text_classifier.h"

class ClassifierReport {
public:
    explicit ClassifierReport(std::vector<std::string> labels)
        : labels_(std::move(labels)), confusion_(labels_.size(), std::vector<int64_t>(labels_.size())) {
        if (labels_.back() == "good") positive_ = labels_.size() - 1;
    }

    // label: the correct one. probabilities: the classifier's
    void add(std::string_view text, size_t label, const std::vector<float>& probabilities) {
        const size_t guess = (size_t)(std::max_element(probabilities.begin(), probabilities.end()) - probabilities.begin());
        confusion_[label][guess]++;
        const int64_t characters = count_characters(text);
        auto& [right, all] = by_length_[characters < 50 ? 0 : characters < 200 ? 1 : 2];
        right += guess == label;
        all++;
        if (labels_.size() == 2) scores_.emplace_back(probabilities[positive_], label == positive_);
    }

    int64_t count(size_t label) const {
        int64_t n = 0;
        for (const int64_t x : confusion_[label]) n += x;
        return n;
    }
    double recall(size_t label) const { return share(confusion_[label][label], count(label)); }
    double precision(size_t label) const {
        int64_t n = 0;
        for (const auto& row : confusion_) n += row[label];
        return share(confusion_[label][label], n);
    }
    double f1(size_t label) const {
        const double p = precision(label), r = recall(label);
        return p + r > 0 ? 2 * p * r / (p + r) : 0;
    }
    double accuracy() const {
        int64_t right = 0, all = 0;
        for (const auto& [r, n] : by_length_) {
            right += r;
            all += n;
        }
        return share(right, all);
    }
    // The probability that a text of one label, good or the first, has a higher score for it than one of the other; ties count
    // half (Mann and Whitney). NaN unless there are two labels, with texts of both.
    double auc() const {
        auto scores = scores_;
        std::sort(scores.begin(), scores.end());
        double pairs = 0, below = 0, firsts = 0;
        for (size_t i = 0; i < scores.size();) {
            size_t end = i;
            double first = 0, second = 0;
            for (; end < scores.size() && scores[end].first == scores[i].first; end++) (scores[end].second ? first : second)++;
            pairs += first * (below + second / 2);
            below += second;
            firsts += first;
            i = end;
        }
        return pairs / (firsts * below);
    }

    void print() const {
        Table table;
        table.section(format("%s, accuracy %.2f%%", counted(total(), "text").c_str(), 100 * accuracy()));
        static constexpr const char* lengths[] = {"below 50 characters", "50 to 199", "200 and more"};
        for (size_t i = 0; i < by_length_.size(); i++)
            if (const auto& [right, n] = by_length_[i]; n > 0)
                table.row(lengths[i], format("%6.2f%%", 100 * share(right, n)), "of " + with_commas(n));
        table.section("labels");
        double mean = 0;
        int present = 0;
        for (size_t k = 0; k < labels_.size(); k++) {
            if (count(k) == 0) continue;
            table.row(labels_[k],
                      format("F1 %6.2f%%, precision %6.2f%%, recall %6.2f%%", 100 * f1(k), 100 * precision(k), 100 * recall(k)),
                      "of " + with_commas(count(k)));
            mean += f1(k);
            present++;
        }
        if (present > 1) table.row("mean", format("F1 %6.2f%%", 100 * mean / present));
        std::vector<std::pair<int64_t, std::string>> wrong;
        for (size_t a = 0; a < labels_.size(); a++)
            for (size_t b = 0; b < labels_.size(); b++)
                if (a != b && confusion_[a][b] > 0)
                    wrong.emplace_back(-confusion_[a][b], labels_[a] + " taken for " + labels_[b]);
        std::sort(wrong.begin(), wrong.end());
        if (!wrong.empty()) table.section("most frequent errors", Table::Values::amounts);
        for (size_t i = 0; i < std::min<size_t>(wrong.size(), 8); i++) table.row(wrong[i].second, with_commas(-wrong[i].first));
        if (const double area = auc(); area >= 0) {
            table.section("score of " + labels_[positive_], Table::Values::text, "score");
            table.row("area under the ROC curve", format("%.4f", area));
            for (const double threshold : {0.1, 0.3, 0.5, 0.7, 0.9}) {
                int64_t kept = 0, right = 0, all = 0;
                for (const auto& [score, first] : scores_) {
                    kept += score >= threshold;
                    right += first && score >= threshold;
                    all += first;
                }
                table.row(format("kept from %.1f", threshold),
                          format("precision %6.2f%%, recall %6.2f%%", 100 * share(right, kept), 100 * share(right, all)),
                          with_commas(kept) + " of " + with_commas(total()));
            }
        }
        table.print();
    }

private:
    static double share(int64_t part, int64_t whole) { return whole > 0 ? (double)part / (double)whole : 0; }
    int64_t total() const { return by_length_[0].second + by_length_[1].second + by_length_[2].second; }

    std::vector<std::string> labels_;
    size_t positive_ = 0;                                     // of two labels, the one whose score is ranked
    std::vector<std::vector<int64_t>> confusion_;             // (right label, guess)
    std::array<std::pair<int64_t, int64_t>, 3> by_length_{};  // short, medium, long: right, total
    std::vector<std::pair<float, bool>> scores_;              // for two labels: score; whether it is the right one
};
