// Several datasets as one, blended like Megatron-Core. Weights w are normalized; dataset j must provide ceil(ceil(N w_j)
// 1.005) samples; sample i of the blend is the next one of the dataset with the largest w_j max(i, 1) - (samples taken from j);
// ties go to the first. Without weights, a dataset's weight is its number of samples in one epoch; no dataset is repeated as
// long as all together suffice.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "../base/check.h"
#include "shares.h"

// The value of --data-path: PATH ..., or WEIGHT PATH WEIGHT PATH ...
struct Blend {
    std::vector<std::string> paths;
    std::vector<double> weights;  // empty: by size
};

inline Blend parse_data_path(const std::vector<std::string>& words) {
    Blend blend;
    std::vector<bool> is_number;
    for (const std::string& word : words) is_number.push_back(!std::isnan(parse_number(word)));
    bool pairs = !words.empty() && words.size() % 2 == 0;
    for (size_t i = 0; i < words.size(); i += 2) pairs = pairs && is_number[i];
    for (size_t i = 0; i < words.size(); i++) {
        if (pairs && i % 2 == 0) {
            const double weight = parse_number(words[i]);
            if (!(weight > 0) || !std::isfinite(weight))
                fail_usage("--data-path: the weight %s of %s must be above 0; HINT: omit data that you do not want",
                           words[i].c_str(), words[i + 1].c_str());
            blend.weights.push_back(weight);
            continue;
        }
        std::error_code ignored;
        const bool exists = std::filesystem::exists(words[i], ignored) || std::filesystem::exists(words[i] + ".idx", ignored);
        if (!pairs && is_number[i] && !exists)
            fail_usage(
                "--data-path: '%s' looks like a weight; give a weight before every path (WEIGHT PATH WEIGHT PATH ...) or "
                "before none",
                words[i].c_str());
        blend.paths.push_back(words[i]);
    }
    return blend;
}

// Sample i of the blend is sample `index` of dataset `dataset`; dataset j has available[j] samples. Greedy: each sample is
// drawn from the dataset that lags most behind its share. tick() is called every million samples.
struct BlendEntry {
    uint32_t dataset, index;
};

template <class Tick>
void blend_samples(const std::vector<double>& weights, const std::vector<int64_t>& available, int64_t n, BlendEntry* blend,
                   Tick tick) {
    std::vector<int64_t> taken(weights.size(), 0);
    for (int64_t i = 0; i < n; i++) {
        if (i % (1 << 20) == 0) tick();
        const double i_or_1 = (double)std::max<int64_t>(i, 1);
        size_t best = 0;
        double most = -INFINITY;
        for (size_t j = 0; j < weights.size(); j++) {
            // Rounded before the subtraction, as in Megatron (volatile: no fused multiply-add): lags often differ only by this
            // rounding.
            const volatile double due = weights[j] * i_or_1;
            const double lag = due - (double)taken[j];
            if (lag > most && taken[j] < available[j]) {
                most = lag;
                best = j;
            }
        }
        blend[i] = {(uint32_t)best, (uint32_t)taken[best]++};
    }
}
