// train_gpt curate --train-language and --train-quality train a classifier for curation; with only --measure-on, measures one.
// Languages use n-grams of 1 to 4 characters in 2^16 buckets: 2^18 were no better, 2^14 worse; quality uses words and pairs of
// words in 2^20.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "../curate/classifier_report.h"
#include "../curate/labeled_texts.h"
#include "../curate/text_classifier.h"
#include "../options/options.h"
#include "text_commands.h"

namespace detail {

inline void measure_classifier(const TextClassifier& classifier, const LabeledTexts& texts, int threads) {
    if (texts.items.empty()) fail("there is no text to measure the classifier on");
    ClassifierReport report(classifier.labels());
    std::vector<std::vector<float>> p(texts.items.size());
    const double start = monotonic_seconds();
    size_t bytes = 0;
#pragma omp parallel for schedule(dynamic, 64) num_threads(threads) reduction(+ : bytes)
    for (size_t i = 0; i < p.size(); i++) {
        p[i] = classifier.probabilities(texts.items[i].text);
        bytes += texts.items[i].text.size();
    }
    const double seconds = monotonic_seconds() - start;
    for (size_t i = 0; i < p.size(); i++) report.add(texts.items[i].text, (size_t)texts.items[i].label, p[i]);
    report.print();
    print_line(stderr, format("note: %s texts per second, %.0f MB/s, with %s",
                              with_commas((int64_t)((double)p.size() / seconds)).c_str(), (double)bytes / 1e6 / seconds,
                              counted(threads, "thread").c_str()));
}

}  // namespace detail

// True if the options train or measure a classifier instead of curating a corpus.
inline bool wants_classifier(const CurateOptions& o) {
    return !o.train_language.empty() || !o.train_quality.empty() || !o.measure_on.empty();
}

namespace detail {

struct ClassifierTask {
    bool trains, quality;  // otherwise: measures, languages
    std::string option;    // the one that selects this
};
inline ClassifierTask classifier_task(const CurateOptions& o) {
    const bool trains = !o.train_language.empty() || !o.train_quality.empty();
    refuse_together(!o.train_language.empty() && !o.train_quality.empty(), "--train-language", "--train-quality",
                    "each trains a classifier", "use two commands");
    if (!trains && o.language_model.empty() == o.quality_model.empty())
        fail_usage("--measure-on measures a model; HINT: --language-model FILE or --quality-model FILE names it");
    const bool quality = !o.train_quality.empty() || (!trains && !o.quality_model.empty());
    const std::string option = !trains ? "measure-on" : quality ? "train-quality" : "train-language";
    const std::string model = quality ? "quality-model" : "language-model";
    const nlohmann::ordered_json given = options_to_json(o), defaults = options_to_json(CurateOptions());
    for (const auto& [name, value] : given.items()) {
        static const Strings used = {"format",  "json-keys", "on-bad-line",  "max-bad-lines", "measure-on",
                                     "threads", "seed",      "allow-binary", "encoding",      "skip-bad-files"};
        const bool is_used =
            std::find(used.begin(), used.end(), name) != used.end() || name == option || name == (trains ? "output" : model);
        if (!is_used && value != defaults[name])
            fail_usage("--%s has no effect with --%s: %s", name.c_str(), option.c_str(),
                       trains ? "training a classifier does not curate a corpus" : "a classifier is measured");
    }
    return {trains, quality, option};
}

inline void check_output_of_classifier(const CurateOptions& o, const ClassifierTask& task) {
    refuse_missing(o.output.empty(), "the output", "--output FILE gets the model that --" + task.option + " trains");
    make_directory(std::filesystem::absolute(o.output).parent_path().string());
    if (std::error_code error; std::filesystem::exists(o.output, error)) {
        if (beginning_of(o.output, 8) != TextClassifier::magic)
            fail("%s exists and is not a classifier; HINT: another --output", o.output.c_str());
    }
}

// Moves every twentieth text out of `texts`, to measure on.
inline LabeledTexts hold_out(LabeledTexts& texts) {
    const auto is_held_out = [](const LabeledTexts::Item& item) { return item.key % 20 == 0; };
    LabeledTexts held_out;
    held_out.labels = texts.labels;
    std::copy_if(texts.items.begin(), texts.items.end(), std::back_inserter(held_out.items), is_held_out);
    texts.items.erase(std::remove_if(texts.items.begin(), texts.items.end(), is_held_out), texts.items.end());
    return held_out;
}

inline void check_labels(const LabeledTexts& texts, const std::string& option) {
    std::vector<int64_t> count(texts.labels.size());
    for (const LabeledTexts::Item& item : texts.items) count[(size_t)item.label]++;
    for (size_t k = 0; k < count.size(); k++)
        if (count[k] == 0)
            fail("--%s: there is no text labeled '%s'; each label needs some", option.c_str(), texts.labels[k].c_str());
    if (count.size() < 2)
        fail_usage("--%s has texts of one label, '%s'; at least two are needed", option.c_str(), texts.labels[0].c_str());
}

inline TextClassifier train_classifier(const LabeledTexts& texts, bool quality, uint64_t seed, int threads) {
    ClassifierShape shape;
    ClassifierTraining how;
    if (quality) shape = {"words", 1, 2, 20};
    else {
        how.shortest_piece = 16;
        how.longest_piece = 120;
    }
    how.seed = seed;
    how.threads = threads;
    std::vector<LabeledText> training;
    for (const LabeledTexts::Item& item : texts.items) training.push_back({item.text, item.label});
    Progress progress("training", (int64_t)(training.size() * (size_t)how.epochs), "texts");
    TextClassifier classifier =
        TextClassifier::train(texts.labels, shape, how, training, [&](int64_t done) { progress.update(done); });
    progress.finish();
    return classifier;
}

}  // namespace detail

inline int classifier_command(const CurateOptions& o) {
    using namespace detail;
    const int threads = cpu::thread_count(o.threads);
    const ClassifierTask task = classifier_task(o);
    const auto read = [&](const Strings& items, const std::string& name, const std::vector<std::string>& labels) {
        const TextInput input = text_input(o, o.input, "curate --" + name, task.quality ? "blank" : "line");
        return LabeledTexts::read(labeled_files(items, name), input, labels, (uint64_t)o.seed, threads);
    };
    if (!task.trains) {
        const TextClassifier classifier = TextClassifier::load(task.quality ? o.quality_model : o.language_model);
        measure_classifier(classifier, read(o.measure_on, task.option, classifier.labels()), threads);
        return 0;
    }
    check_output_of_classifier(o, task);
    LabeledTexts texts = read(task.quality ? o.train_quality : o.train_language, task.option, {});
    if (task.quality && texts.labels != std::vector<std::string>{"bad", "good"})
        fail_usage(
            "--train-quality has texts labeled %s; the labels must be good and bad; HINT: --train-quality good:FILE "
            "bad:FILE",
            joined(texts.labels).c_str());
    const LabeledTexts others = o.measure_on.empty() ? hold_out(texts) : read(o.measure_on, "measure-on", texts.labels);
    check_labels(texts, task.option);
    const TextClassifier classifier = train_classifier(texts, task.quality, (uint64_t)o.seed, threads);
    classifier.save(o.output);
    print_line(stdout, format("%s: %s, %s trained on", o.output.c_str(), counted((int64_t)texts.labels.size(), "label").c_str(),
                              counted((int64_t)texts.items.size(), "text").c_str()));
    if (!others.items.empty()) measure_classifier(classifier, others, threads);
    return 0;
}
