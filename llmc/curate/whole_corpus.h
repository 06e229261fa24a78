// The stages that look at the whole corpus before they judge a document: exact and near duplicates, decontamination. Documents
// kept by the other stages are in an intermediate set of shards, which is read up to three times:
//   1  exact duplicates sign documents, and paragraphs or lines
//   2  near duplicates sign, and decontamination counts, the text that remains of each document after 1
//   3  each stage returns the remaining text (document_pipeline.h writes it)
// Near duplicates do not see exact ones, so that two sources' equal documents are never both dropped.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../base/check.h"
#include "decontaminate.h"
#include "exact_duplicates.h"
#include "near_duplicates.h"
#include "document_pipeline.h"

struct WholeCorpusOptions {
    std::vector<std::string> exact;  // documents, and paragraphs or lines
    bool folded = false;
    std::optional<NearDuplicateOptions> near;
    std::vector<std::string> task_files;
    DecontaminationOptions decontamination;

    bool wanted() const { return !exact.empty() || near || !task_files.empty(); }
    void check() const {
        for (const std::string& unit : exact) ExactDuplicates::check_unit(unit);
        const auto is_part = [](const std::string& unit) { return unit != "documents"; };
        if (std::count_if(exact.begin(), exact.end(), is_part) > 1)
            fail_usage("--exact-duplicates has paragraphs and lines; HINT: use only lines, which make up paragraphs");
    }
};

class WholeCorpus {
public:
    WholeCorpus(const WholeCorpusOptions& o, const std::string& work_directory, size_t memory_bytes)
        : o_(o), directory_(work_directory) {
        o.check();
        memory_ = memory_bytes / std::max<size_t>(1, o.exact.size() + (o.near ? 1 : 0)) / 2;  // one sort drains into another
        for (const std::string& unit : o.exact)
            exact_.push_back(std::make_unique<ExactDuplicates>(ExactDuplicateOptions{unit, o.folded, 0}, directory_, memory_));
        if (!o.task_files.empty()) tasks_ = std::make_unique<Decontaminator>(o.task_files, o.decontamination);
    }

    // Reads the intermediate set as often as needed. A document's source is its priority: the first one is kept.
    void learn(const PassInput& input, int threads) {
        const int passes = !exact_.empty() + (o_.near || tasks_);
        int pass = 0;
        const auto label = [&](const char* what) { return format("%s (reading %d of %d)", what, ++pass, passes + 1); };
        if (!exact_.empty()) {
            std::vector<std::vector<ExactDuplicates::Signature>> signatures;
            for_each_document(
                input, threads, label("exact duplicates"),
                [&](const Document& d, size_t i) {
                    signatures[i].clear();
                    for (const auto& exact : exact_) signatures[i].push_back(exact->sign(d.text));
                },
                [&](const Document& d, size_t i) {
                    for (size_t k = 0; k < exact_.size(); k++) exact_[k]->add(d.number, signatures[i][k]);
                },
                [&](size_t n) { signatures.resize(n); });
            for (const auto& exact : exact_) exact->solve();
        }
        if (!o_.near && !tasks_) return;
        std::unique_ptr<NearDuplicates> near;
        if (o_.near) near = std::make_unique<NearDuplicates>(*o_.near, directory_, memory_);
        struct Signed {
            bool left;
            NearDuplicates::Signature near;
            std::vector<uint32_t> matches;
        };
        std::vector<Signed> all;
        for_each_document(
            input, threads, label(near ? "near duplicates" : "decontamination"),
            [&](const Document& d, size_t i) {
                Document left = d;
                Changes changes;
                all[i] = {drop_exact(left, changes).keep, {}, {}};
                if (!all[i].left) return;
                if (near) all[i].near = near->sign(left.text);
                if (tasks_) all[i].matches = tasks_->matches(left.text);
            },
            [&](const Document& d, size_t i) {
                if (!all[i].left) return;
                if (near) near->add(d.number, (int)d.source, all[i].near);
                if (tasks_) tasks_->add(all[i].matches);
            },
            [&](size_t n) { all.resize(n); });
        if (near) clusters_ = std::make_unique<Clusters>(near->solve(threads));
        if (tasks_) tasks_->solve();
    }

    // The stages, after learning. They point to this object.
    std::vector<Stage> stages() {
        std::vector<Stage> stages;
        if (!exact_.empty())
            stages.push_back({"exact duplicates", [this](Document& d, Changes& c) { return drop_exact(d, c); }});
        if (o_.near)
            stages.push_back({"near duplicates", [this](Document& d, Changes&) -> DocumentVerdict {
                                  const int64_t kept = clusters_->representative(d.number);
                                  if (kept == d.number) return {};
                                  return {false, "near-duplicate", "of document " + with_commas(kept)};
                              }});
        if (tasks_) stages.push_back({"decontaminate", [this](Document& d, Changes& c) { return decontaminate(d, c); }});
        return stages;
    }

private:
    DocumentVerdict drop_exact(Document& d, Changes& changes) const {
        for (size_t k = 0; k < exact_.size(); k++) {
            const std::vector<uint32_t> units = exact_[k]->dropped(d.number);
            if (units.empty()) continue;
            if (o_.exact[k] == "documents") return {false, "exact-duplicate", "of an earlier document"};
            d.text = exact_[k]->without(d.text, units);
            changes.push_back({o_.exact[k] == "lines" ? "repeated-line" : "repeated-paragraph", (int64_t)units.size()});
            if (d.text.find_first_not_of(" \t\r\n") == std::string::npos)
                return {false, "repeated-throughout", "all its " + o_.exact[k] + " occur in earlier documents"};
        }
        return {};
    }
    DocumentVerdict decontaminate(Document& d, Changes& changes) const {
        DecontaminationCounts counts;
        std::vector<std::string> pieces = tasks_->apply(d.text, counts);
        if (counts.documents == 0) return {};
        const auto& example = counts.examples.at(0);
        if (pieces.empty()) return {false, "contaminated", "\"" + example.ngram + "\" of " + tasks_->tasks()[example.task]};
        for (const int64_t matches : counts.matches)
            if (matches > 0) changes.push_back({"task-text", matches});
        d.text = std::move(pieces[0]);
        pieces.erase(pieces.begin());
        d.more = std::move(pieces);
        return {};
    }

    WholeCorpusOptions o_;
    std::string directory_;
    size_t memory_;
    std::vector<std::unique_ptr<ExactDuplicates>> exact_;
    std::unique_ptr<Clusters> clusters_;
    std::unique_ptr<Decontaminator> tasks_;
};
