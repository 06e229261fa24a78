// Weights of sources in the training data. Shares of the output are given (--weights), or derived from the sizes n of the
// sources and a temperature T: n^(1/T) / sum n^(1/T), as in multilingual models (Conneau et al. 2020, Raffel et al. 2020): 1
// keeps the sizes, larger ones upweight small sources. With a budget of B bytes or tokens, source s is repeated
//     epochs = share * B / n
// times: each document floor(epochs) times, and once more with the remaining probability, by a draw that depends only on the
// seed and the document's number.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/rng.h"
#include "../data/shares.h"

struct MixedSource {
    std::string name;
    double size = 0;   // bytes or tokens
    double share = 0;  // of the output
    double epochs = 0;
};

struct MixingOptions {
    std::vector<std::string> weights;  // SOURCE=W, for every source; empty: by temperature
    double temperature = 1;
    double budget = 0;  // 0: all of the sources
    uint64_t seed = 0;

    bool wanted() const { return !weights.empty() || temperature != 1 || budget > 0; }
};

// Parses "web=0.7" into the index of the source and its weight. A source is named as in --input, or by the last part of that,
// without endings, if that is unique.
inline std::pair<size_t, double> parse_weight(const std::string& text, const std::vector<std::string>& sources) {
    const size_t equals = text.rfind('=');
    if (equals == std::string::npos) fail_usage("--weights has '%s'; it must be SOURCE=WEIGHT", text.c_str());
    const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
    const double weight = parse_number(value);
    if (!(weight >= 0) || !std::isfinite(weight))
        fail_usage("--weights has '%s'; the weight must be a number of at least 0", text.c_str());
    const auto last_part = [](std::string path) {
        while (path.size() > 1 && path.back() == '/') path.pop_back();
        path.erase(0, path.rfind('/') + 1);
        return path.substr(0, path.find('.', 1));
    };
    std::vector<size_t> found;
    std::string known;
    for (size_t i = 0; i < sources.size(); i++) {
        if (sources[i] == name) return {i, weight};
        if (last_part(sources[i]) == name) found.push_back(i);
        known += (known.empty() ? "" : ", ") + last_part(sources[i]);
    }
    if (found.size() == 1) return {found[0], weight};
    fail_usage("--weights names '%s', which %s --input; its sources are %s", name.c_str(),
               found.empty() ? "is not the name of" : "is the name of several of", known.c_str());
}

inline std::vector<MixedSource> mix_sources(const std::vector<std::string>& names, const std::vector<double>& sizes,
                                            const MixingOptions& o) {
    CHECK(names.size() == sizes.size(), "%zu sources, %zu sizes", names.size(), sizes.size());
    std::vector<MixedSource> sources;
    std::vector<int> given(names.size());
    double total = 0, sum = 0;
    for (size_t i = 0; i < names.size(); i++) {
        sources.push_back({names[i], sizes[i], o.weights.empty() ? std::pow(sizes[i], 1 / o.temperature) : 0, 0});
        total += sizes[i];
    }
    if (total <= 0) fail("no source has documents left, so there is nothing to mix; HINT: looser rules");
    for (const std::string& text : o.weights) {
        const auto [i, weight] = parse_weight(text, names);
        if (given[i]++) fail_usage("--weights names '%s' twice", names[i].c_str());
        sources[i].share = weight;
    }
    for (size_t i = 0; i < names.size() && !o.weights.empty(); i++)
        if (!given[i])
            fail_usage("--weights does not name the source %s; HINT: %s=0 excludes it", names[i].c_str(), names[i].c_str());
    for (const MixedSource& s : sources) sum += s.share;
    if (sum <= 0) fail_usage("the weights of all sources are 0");
    if (!std::isfinite(sum)) fail_usage("the sum of the weights is not finite; HINT: smaller ones in the same proportions");
    for (MixedSource& s : sources) {
        s.share /= sum;
        if (s.size == 0 && s.share > 0)
            fail("source %s has no documents left, but --weights asks for %.3g%% from it", s.name.c_str(), 100 * s.share);
        s.epochs = s.share > 0 ? s.share * (o.budget > 0 ? o.budget : total) / s.size : 0;
    }
    return sources;
}

// How often a document is in the output.
inline int copies_of(int64_t number, double epochs, uint64_t seed) {
    const double whole = std::floor(epochs);
    return (int)whole + (uniform_at(seed, RngPurpose::documents, 2, (uint64_t)number) < epochs - whole);
}
