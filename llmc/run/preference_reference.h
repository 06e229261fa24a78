// The reference of preference training (model/preference.h): the log-probabilities of all answers under the model that training
// starts from. They are computed once, before the first step, and every checkpoint keeps them, so that no second model is in
// memory and a resumed run has the same bits:
//   training/reference.safetensors    train and valid, (pairs, 2) in F64: log p of the chosen and of the rejected answer; NaN
//                                     for a pair outside all samples
//   training/state.json               "reference": path and checksums of the model, checksums of the data
#pragma once
#include <cmath>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/safetensors.h"
#include "../data/dataloader.h"
#include "../parallel/ranks.h"
#include "../checkpoint/adapter_files.h"
#include "../plan/from_options.h"
#include "run.h"
#include "../checkpoint/run_directory.h"

namespace detail {

using NamedLoaders = std::vector<std::pair<const char*, DataLoader*>>;
inline NamedLoaders loaders_of(Run& run) {
    NamedLoaders loaders = {{"train", run.train.get()}};
    if (run.valid) loaders.emplace_back("valid", run.valid.get());
    return loaders;
}

inline std::string checksum_of(const DataLoader& data) { return format("%08x", data.checksum_of_pairs()); }

// From each rank's scores, (pairs, 3): the log-probabilities of both answers, and 1, or 0 for pairs of other ranks.
inline std::vector<double> log_probabilities(const Ranks& ranks, const std::vector<double>& mine, const std::string& model) {
    const std::vector<double> all = sum_of_all_ranks(ranks, mine);
    std::vector<double> log_p;
    for (size_t i = 0; i < all.size(); i += 3)
        for (size_t k = 0; k < 2; k++) {
            const bool scored = all[i + 2] > 0;
            if (scored && !std::isfinite(all[i + k]))
                fail("%s gives an answer of pair %zu the log-probability %g; its weights may be damaged", model.c_str(), i / 3,
                     all[i + k]);
            log_p.push_back(scored ? all[i + k] : NAN);
        }
    return log_p;
}

// score(data): this rank's scores of all pairs in its samples, under the current model.
template <class Score>
void compute_reference(Run& run, Score score) {
    run.begin("computing the log-probabilities of all answers by the reference");
    nlohmann::ordered_json header = {{"__metadata__", {{"format", "pt"}}}}, sums;
    std::string bytes;
    for (const auto& [name, data] : loaders_of(run)) {
        const DataSplit part = data == run.train.get() ? DataSplit::train : DataSplit::valid;
        DataOptions once = data_options(run.o, run.c, run.tokenizer.get(), part, 0);
        once.tokenizer = data->tokenizer();
        const std::vector<double> log_p = log_probabilities(*run.ranks, score(DataLoader(once)), run.o.model);
        const size_t begin = bytes.size();
        bytes.append((const char*)log_p.data(), log_p.size() * sizeof(double));
        header[name] = {{"dtype", "F64"}, {"shape", {log_p.size() / 2, 2}}, {"data_offsets", {begin, bytes.size()}}};
        sums[name] = checksum_of(*data);
        data->set_reference(log_p);
    }
    run.reference.file = safetensors_start(header) + bytes;
    run.reference.identity = {{"model", std::filesystem::weakly_canonical(run.o.model).string()},
                              {"files", identity_of_base(run.world, run.o.model)},
                              {"data", sums}};
}

inline void read_reference(Run& run) {
    const std::string path = reference_file(run.resumed_from), &model = run.o.model;
    run.reference.identity = run.state.reference;
    if (run.reference.identity.is_null() || !file_exists(path))
        fail(
            "the checkpoint %s is from a run without preference training; HINT: start one from it with --model %s and "
            "another --out",
            run.resumed_from.c_str(), run.resumed_from.c_str());
    const bool named = !is_adapter(run.resumed_from) && !model.empty() && model != run.resumed_from;
    if (named && run.reference.identity.value("files", nlohmann::ordered_json()) != identity_of_base(run.world, model))
        fail("%s is not the resumed run's reference, which is %s, by the checksums of its files; HINT: omit --model",
             model.c_str(), run.reference.identity.value("model", std::string()).c_str());
    run.reference.file = read_whole_file(path);
    const SafetensorsReader file = SafetensorsReader::open(path);
    for (const auto& [name, data] : loaders_of(run)) {
        const TensorView* t = file.find(name);
        const auto sums = run.reference.identity.value("data", nlohmann::ordered_json::object());
        if (!t || t->elements() != 2 * (size_t)data->n_pairs() || sums.value(name, "") != checksum_of(*data))
            fail(
                "the pairs of answers for %s differ from those scored in %s; HINT: use the resumed run's data%s, or start a "
                "new run",
                data == run.train.get() ? "training" : "validation", path.c_str(), t ? "" : ", --eval-iters 0");
        std::vector<double> log_p(t->elements());
        file.read_as(*t, log_p.data());
        data->set_reference(std::move(log_p));
    }
}

}  // namespace detail

// Gives the data of a preference run the reference's log-probabilities: the checkpoint's, or the results of `score`.
template <class Score>
void find_reference(Run& run, Score score) {
    if (!run.o.dpo_beta) return;
    if (run.resumes()) detail::read_reference(run);
    else detail::compute_reference(run, score);
}
