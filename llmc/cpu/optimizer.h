// AdamW (Loshchilov & Hutter, 2019): a single pass that reads gradient, weight and both moments once and writes weight and
// moments. Bound by memory bandwidth: 28 bytes per parameter, 20 with both moments in bf16, 18 with bf16 gradients as well. A
// bf16 parameter is the upper half of its fp32 weight.
#pragma once
#include <cmath>

#include "../ops.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {
namespace detail {

inline void store_moment(real* p, floats x, words, int n) { store(p, x, n); }
inline void store_moment(bf16* p, floats x, words random, int n) { store(&p->bits, round_stochastically(x, random), n); }

template <class M, class V, class G>
void adamw(floatX* param, LowerHalf* lower, M* m, V* v, const G* grad, size_t n, const AdamW& constants,
           const Rounding& rounding) {
    const real lr = constants.lr, beta1 = constants.beta1, beta2 = constants.beta2, eps = constants.eps;
    const real weight_decay = constants.weight_decay, grad_scale = constants.grad_scale;
    const int64_t step = constants.step;
    // Bias corrections in double: beta^step loses digits in fp32.
    const real correct1 = (real)(1 / (1 - std::pow((double)beta1, (double)step)));
    const real correct2 = (real)(1 / (1 - std::pow((double)beta2, (double)step)));
    constexpr size_t ahead = 256;  // numbers: what the CPU itself asks for in advance is too little for so many streams
    constexpr bool rounded = std::is_same_v<M, bf16> || std::is_same_v<V, bf16>;
    constexpr int drawn = 64;  // random numbers at a time: few, so that drawing overlaps with memory access
    parallel_ranges(n, [=](size_t first, size_t last) {
        uint32_t words_of_block[rounded ? drawn : 1] = {}, *const random = words_of_block;
        for_vectors((int)(last - first), [=](int k, auto there) {
            const size_t i = first + (size_t)k;
            __builtin_prefetch(grad + i + ahead);
            __builtin_prefetch(m + i + ahead);
            __builtin_prefetch(v + i + ahead);
            __builtin_prefetch(param + i + ahead);
            if (has_lower_halves) __builtin_prefetch(lower + i + ahead);
            words word{};
            if constexpr (rounded) {
                if (k % drawn == 0) random_words(random, rounding, i, std::min((size_t)drawn, last - i));
                memcpy(&word, random + k % drawn, sizeof word);
            }
            const floats g = grad_scale * load(grad + i, there);
            const floats mi = beta1 * load(m + i, there) + (1 - beta1) * g,
                         vi = beta2 * load(v + i, there) + (1 - beta2) * g * g;
            const floats w = load_weights(param, lower, i, there);
            const floats updated = w - lr * (mi * correct1 / (root(vi * correct2) + eps) + weight_decay * w);
            store_moment(m + i, mi, word, there);
            store_moment(v + i, vi, word >> 16, there);
            store_weights(param, lower, i, updated, there);
        });
    });
}

}  // namespace detail

inline void adamw(Ctx&, floatX* param, LowerHalf* lower, const Elements& exp_avg, const Elements& exp_avg_sq,
                  const Elements& grad, size_t n, const AdamW& constants, const Rounding& rounding) {
    exp_avg.visit([&](auto* m) {
        exp_avg_sq.visit(
            [&](auto* v) { grad.visit([&](const auto* g) { detail::adamw(param, lower, m, v, g, n, constants, rounding); }); });
    });
}

// Bound by memory bandwidth: 6 bytes per element to set, 8 to add.
inline void accumulate(Ctx&, bf16* sum, const real* x, size_t n, Acc acc, const Rounding& rounding) {
    constexpr int drawn = 64;  // random numbers at a time
    parallel_ranges(n, [=](size_t first, size_t last) {
        uint32_t words_of_block[drawn] = {}, *const random = words_of_block;
        for_vectors((int)(last - first), [=](int k, auto there) {
            const size_t i = first + (size_t)k;
            const floats summand = load(x + i, there);
            if (acc == Acc::Set) return store(&sum[i].bits, round_to_nearest(summand), there);
            if (k % drawn == 0) random_words(random, rounding, i, std::min((size_t)drawn, last - i));
            words word;
            memcpy(&word, random + k % drawn, sizeof word);
            store(&sum[i].bits, round_stochastically(load(sum + i, there) + summand, word), there);
        });
    });
}

// In parallel, so that on a NUMA machine the pages that all threads read are spread over all nodes (first touch).
inline void initialize_weights(Ctx&, floatX* param, LowerHalf* lower, const InitialWeights& w, size_t first, size_t n) {
    const size_t cols = (size_t)w.cols, begin = first / cols, end = ceil_div(first + n, cols);
    const auto of_rows = [&](size_t row, size_t last) {
        for (row += begin, last += begin; row < last; row++)
            for (size_t k = std::max(first, row * cols); k < std::min(first + n, (row + 1) * cols); k++) {
                LowerHalf unused;
                store_weight(param + (k - first), lower ? lower + (k - first) : &unused, 0, w.at(row, k - row * cols));
            }
    };
    parallel_ranges(end - begin, of_rows, ceil_div((size_t)8192, cols));
}

}  // namespace cpu
