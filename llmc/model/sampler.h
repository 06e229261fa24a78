// Chooses a token from logits: greedy, or temperature with top-k and top-p (nucleus; Holtzman et al., 2020) filtering.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../base/rng.h"

struct SamplingOptions {
    double temperature = 1.0;  // 0: greedy
    int top_k = 0;             // keep the k most likely; 0: all
    double top_p = 1.0;        // keep the smallest set of most likely tokens with at least this total probability
};

// logits (V); uniform in [0, 1). Ties go to the smaller id, so that the result is a function of its inputs.
inline int sample_token(const float* logits, int V, const SamplingOptions& options, double uniform) {
    const auto more_likely = [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
    if (options.temperature <= 0) {
        int best = 0;
        for (int i = 1; i < V; i++)
            if (more_likely(i, best)) best = i;
        return best;
    }
    std::vector<int> order(V);
    std::iota(order.begin(), order.end(), 0);
    const int k = options.top_k > 0 ? std::min(options.top_k, V) : V;
    if (k < V) {
        std::nth_element(order.begin(), order.begin() + k - 1, order.end(), more_likely);
        order.resize(k);
    }
    // Only filtering by total probability needs the order; otherwise ids stay sorted as they are.
    if (options.top_p < 1) std::sort(order.begin(), order.end(), more_likely);

    const float top = logits[*std::min_element(order.begin(), order.end(), more_likely)];
    std::vector<double> p(order.size());
    for (size_t i = 0; i < p.size(); i++) p[i] = std::exp(((double)logits[order[i]] - top) / options.temperature);
    double total = std::accumulate(p.begin(), p.end(), 0.0);
    if (options.top_p < 1) {
        double sum = 0;
        size_t kept = 0;
        while (kept < p.size() && (kept == 0 || sum < options.top_p * total)) sum += p[kept++];
        p.resize(kept);
        total = sum;
    }
    double left = uniform * total;
    for (size_t i = 0; i < p.size(); i++)
        if ((left -= p[i]) < 0) return order[i];
    return order[p.size() - 1];
}
