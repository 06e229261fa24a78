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
    int tokens = 0;  // ids from this one on have no token (padding of the vocabulary) and are never drawn; 0: all have
    int known(int V) const { return tokens > 0 ? std::min(V, tokens) : V; }  // ids with a token
};

// A token's log-probability is its logit minus this.
inline double log_sum_exp(const float* logits, int V) {
    const float top = *std::max_element(logits, logits + V);
    double sum = 0;
    for (int i = 0; i < V; i++) sum += std::exp((double)logits[i] - top);
    return top + std::log(sum);
}
// Orders ids by their logits, larger ones first; ties go to the smaller id.
inline auto more_likely_by(const float* logits) {
    return [logits](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
}
// The n most likely ids below V, or all, in this order.
inline std::vector<int> most_likely(const float* logits, int V, int n) {
    std::vector<int> order((size_t)V);
    std::iota(order.begin(), order.end(), 0);
    n = std::min(n, V);
    std::partial_sort(order.begin(), order.begin() + n, order.end(), more_likely_by(logits));
    order.resize((size_t)n);
    return order;
}

namespace detail {
// Partially sorts `order` (ids of p): moves the most likely ids to its front until reached(the sum of their p) holds, with the
// last one needed at the end of them, and returns their number, or all of them if it never does. Halves the candidates each
// time, so that the time is linear in their number, without a sort.
template <class MoreLikely, class Reached>
size_t select_front(std::vector<int>& order, size_t n, const std::vector<double>& p, MoreLikely more_likely, Reached reached) {
    size_t low = 0, high = n;  // low ids are too few, high are enough
    for (double before = 0; high - low > 1;) {
        const size_t middle = low + (high - low) / 2;
        std::nth_element(order.begin() + low, order.begin() + middle, order.begin() + high, more_likely);
        double sum = before;
        for (size_t i = low; i < middle; i++) sum += p[order[i]];
        if (reached(sum)) high = middle;
        else {
            low = middle;
            before = sum;
        }
    }
    return high;
}
}  // namespace detail

// logits (V); uniform in [0, 1). Ties go to the smaller id, so that the result is a function of its inputs.
inline int sample_token(const float* logits, int V, const SamplingOptions& options, double uniform) {
    V = options.known(V);
    const auto more_likely = more_likely_by(logits);
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
    const float top = logits[*std::min_element(order.begin(), order.end(), more_likely)];
    std::vector<double> p(V);
    double total = 0;
    for (const int i : order) total += p[i] = std::exp(((double)logits[i] - top) / options.temperature);
    if (options.top_p < 1) {
        // The smallest set, and in it the token where the cumulative sum from the most likely on exceeds the random number.
        const auto select = [&](size_t n, auto reached) { return detail::select_front(order, n, p, more_likely, reached); };
        const size_t kept = select(order.size(), [&](double sum) { return sum >= options.top_p * total; });
        total = 0;
        for (size_t i = 0; i < kept; i++) total += p[order[i]];
        return order[select(kept, [&](double sum) { return sum > uniform * total; }) - 1];
    }
    // Otherwise ids stay in their present order.
    double left = uniform * total;
    for (const int i : order)
        if ((left -= p[i]) < 0) return i;
    return order.back();
}
