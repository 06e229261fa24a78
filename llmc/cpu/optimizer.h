// AdamW (Loshchilov & Hutter, 2019): a single pass that reads gradient, weight and both moments once and writes weight and
// moments. Bound by memory bandwidth: 28 bytes per parameter, 20 with both moments in bf16, 16 in 8 bits, 2 less with bf16
// gradients. A bf16 parameter is the upper half of its fp32 weight. Also in this file: Lion, which has one moment and moves 8
// bytes less (4 in bf16), Muon's elementwise operations, and sums in bf16.
#pragma once
#include <cmath>
#include <vector>

#include "../ops.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {
namespace detail {

inline void store_moment(real* p, floats x, words, int n) { store(p, x, n); }
inline void store_moment(bf16* p, floats x, words random, int n) { store(&p->bits, round_stochastically(x, random), n); }
template <bool has_sign, int bias>
void store_moment(Float8<has_sign, bias>* p, floats x, words random, int n) {
    store(&p->bits, Float8<has_sign, bias>::encode(x, random), n);
}

// The random words by which the elements of a range are rounded, drawn some at a time; without `rounded` none.
template <bool rounded>
struct RangeOfWords {
    static constexpr int drawn = 64;  // at a time: few, so that drawing overlaps with memory access
    uint32_t random[rounded ? drawn : 1] = {};
    // For the vector at element i, k elements after the start of the range, which ends before `last`. To be called in order.
    words at(const Rounding& rounding, size_t k, size_t i, size_t last) {
        words word{};
        if constexpr (rounded) {
            if (k % drawn == 0) random_words(random, rounding, i, std::min((size_t)drawn, last - i));
            memcpy(&word, random + k % drawn, sizeof word);
        }
        return word;
    }
};

template <class M, class V, class G>
void adamw(floatX* param, LowerHalf* lower, M* m, V* v, const G* grad, size_t n, const AdamW& constants,
           const Rounding& rounding) {
    const real lr = constants.lr, beta1 = constants.beta1, beta2 = constants.beta2, eps = constants.eps;
    const real weight_decay = constants.weight_decay, grad_scale = constants.grad_scale;
    const int64_t step = constants.step;
    // Bias corrections in double: beta^step loses digits in fp32.
    const real correct1 = (real)(1 / (1 - std::pow((double)beta1, (double)step)));
    const real correct2 = (real)(1 / (1 - std::pow((double)beta2, (double)step)));
    constexpr size_t ahead = 256;  // elements; hardware prefetch is not enough for so many streams
    constexpr bool rounded = !std::is_same_v<M, real> || !std::is_same_v<V, real>;
    parallel_ranges(n, [=](size_t first, size_t last) {
        RangeOfWords<rounded> random;
        for_vectors((int)(last - first), [=, &random](int k, auto there) {
            const size_t i = first + (size_t)k;
            __builtin_prefetch(grad + i + ahead);
            __builtin_prefetch(m + i + ahead);
            __builtin_prefetch(v + i + ahead);
            __builtin_prefetch(param + i + ahead);
            if (has_lower_halves) __builtin_prefetch(lower + i + ahead);
            const words word = random.at(rounding, (size_t)k, i, last);
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

template <class M, class G>
void lion(floatX* param, LowerHalf* lower, M* m, const G* grad, size_t n, const AdamW& constants, const Rounding& rounding) {
    const real lr = constants.lr, beta1 = constants.beta1, beta2 = constants.beta2;
    const real weight_decay = constants.weight_decay, grad_scale = constants.grad_scale;
    constexpr bool rounded = !std::is_same_v<M, real>;
    parallel_ranges(n, [=](size_t first, size_t last) {
        RangeOfWords<rounded> random;
        for_vectors((int)(last - first), [=, &random](int k, auto there) {
            const size_t i = first + (size_t)k;
            const words word = random.at(rounding, (size_t)k, i, last);
            const floats g = grad_scale * load(grad + i, there), mean = load(m + i, there);
            const floats direction = beta1 * mean + (1 - beta1) * g, one = floats{} + 1;
            const floats sign = direction > 0.0f ? one : direction < 0.0f ? -one : direction;  // 0 and NaN stay
            const floats w = load_weights(param, lower, i, there);
            store_moment(m + i, beta2 * mean + (1 - beta2) * g, word, there);
            store_weights(param, lower, i, w - lr * (sign + weight_decay * w), there);
        });
    });
}

template <class M, class G>
void muon_momentum(floatX* update, M* m, const G* grad, size_t n, const MuonMomentum& constants, const Rounding& rounding) {
    const real momentum = constants.momentum, grad_scale = constants.grad_scale;
    constexpr bool rounded = !std::is_same_v<M, real>;
    parallel_ranges(n, [=](size_t first, size_t last) {
        RangeOfWords<rounded> random;
        for_vectors((int)(last - first), [=, &random](int k, auto there) {
            const size_t i = first + (size_t)k;
            const words word = random.at(rounding, (size_t)k, i, last);
            const floats share = (1 - momentum) * (grad_scale * load(grad + i, there));
            const floats mean = momentum * load(m + i, there) + share;
            store_moment(m + i, mean, word, there);
            store(update + i, share + momentum * mean, there);
        });
    });
}

}  // namespace detail

inline void adamw(Ctx&, floatX* param, LowerHalf* lower, const Elements& exp_avg, const Elements& exp_avg_sq,
                  const Elements& grad, size_t n, const AdamW& constants, const Rounding& rounding) {
    exp_avg.visit_first([&](auto* m) {
        exp_avg_sq.visit_second(
            [&](auto* v) { grad.visit([&](const auto* g) { detail::adamw(param, lower, m, v, g, n, constants, rounding); }); });
    });
}

inline void lion(Ctx&, floatX* param, LowerHalf* lower, const Elements& exp_avg, const Elements& grad, size_t n,
                 const AdamW& constants, const Rounding& rounding) {
    exp_avg.visit_first(
        [&](auto* m) { grad.visit([&](const auto* g) { detail::lion(param, lower, m, g, n, constants, rounding); }); });
}

// Both are bound by memory bandwidth: 12 bytes per parameter, and 16.
inline void average_weights(Ctx&, real* average, const floatX* param, const LowerHalf* lower, size_t n, real keep) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first), [=](int k, auto there) {
            const size_t i = first + (size_t)k;
            const floats before = load(average + i, there);
            store(average + i, before + (1 - keep) * (load_weights(param, lower, i, there) - before), there);
        });
    });
}
inline void swap_weights(Ctx&, real* other, floatX* param, LowerHalf* lower, size_t n) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first), [=](int k, auto there) {
            const size_t i = first + (size_t)k;
            const floats mine = load_weights(param, lower, i, there);
            store_weights(param, lower, i, load(other + i, there), there);
            store(other + i, mine, there);
        });
    });
}

namespace detail {
// sum[k] (+)= x[k]: the elements from `first` on.
inline void accumulate(bf16* sum, const real* x, int n, Acc acc, const Rounding& rounding, size_t first) {
    RangeOfWords<true> random;
    for_vectors(n, [=, &random](int k, auto there) {
        const floats summand = load(x + k, there);
        if (acc == Acc::Set) return store(&sum[k].bits, round_to_nearest(summand), there);
        const words word = random.at(rounding, (size_t)k, first + (size_t)k, first + (size_t)n);
        store(&sum[k].bits, round_stochastically(load(sum + k, there) + summand, word), there);
    });
}
}  // namespace detail

// Bound by memory bandwidth: 6 bytes per element to set, 8 to add.
inline void accumulate(Ctx&, bf16* sum, const real* x, size_t n, Acc acc, const Rounding& rounding) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        detail::accumulate(sum + first, x + first, (int)(last - first), acc, rounding, first);
    });
}

// 8 bytes per element to set, 12 to add.
inline void accumulate_real(Ctx&, real* sum, const real* x, size_t n, Acc acc) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        if (acc == Acc::Set) return (void)std::copy(x + first, x + last, sum + first);
        for (size_t i = first; i < last; i++) sum[i] += x[i];
    });
}

// ---- Muon: all bound by memory bandwidth ------------------------------------------------------------------------------------
inline void muon_momentum(Ctx&, floatX* update, const Elements& exp_avg, const Elements& grad, size_t n,
                          const MuonMomentum& constants, const Rounding& rounding) {
    exp_avg.visit_first(
        [&](auto* m) { grad.visit([&](const auto* g) { detail::muon_momentum(update, m, g, n, constants, rounding); }); });
}

inline void divide_by_norm(Ctx&, floatX* x, size_t n, const double* squares) {
    const real factor = 1 / std::max((real)std::sqrt(*squares), smallest_norm);
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first), [=](int k, auto there) {
            floatX* const p = x + first + k;
            store(p, factor * load(p, there), there);
        });
    });
}

inline void newton_schulz_polynomial(Ctx&, floatX* square, const floatX* gram, int n) {
    parallel_for(n, [=](int row) {
        floatX* const s = square + (size_t)row * (size_t)n;
        const floatX* const g = gram + (size_t)row * (size_t)n;
        const real diagonal = newton_schulz_a + newton_schulz_b * (real)g[row] + newton_schulz_c * (real)s[row];
        for_vectors(n, [=](int k, auto there) {
            store(s + k, newton_schulz_b * load(g + k, there) + newton_schulz_c * load(s + k, there), there);
        });
        s[row] = (floatX)diagonal;
    });
}

inline void normalize_neurons(Ctx&, floatX* x, real* second_moment, int rows, int cols, real beta2) {
    std::vector<real> factors((size_t)rows);
    std::vector<double> squares((size_t)rows);
    parallel_for(rows, [&](int row) {
        const floatX* const neuron = x + (size_t)row * (size_t)cols;
        const real sum = inner_product(neuron, neuron, cols);
        real& v = second_moment[row];
        v = beta2 * v + (1 - beta2) * sum / (real)cols;
        factors[(size_t)row] = 1 / (std::sqrt(v) + neuron_eps);
        squares[(size_t)row] = (double)sum * (double)factors[(size_t)row] * (double)factors[(size_t)row];
    });
    double total = 0;
    for (const double s : squares) total += s;
    const real scale = total > 0 ? (real)std::sqrt((double)std::min(rows, cols) / total) : real(0);
    parallel_for(rows, [&](int row) {
        floatX* const neuron = x + (size_t)row * (size_t)cols;
        const real factor = scale * factors[(size_t)row];
        for_vectors(cols, [=](int k, auto there) { store(neuron + k, factor * load(neuron + k, there), there); });
    });
}

inline void apply_update(Ctx&, floatX* param, LowerHalf* lower, const floatX* update, size_t n, real rate, real decay) {
    parallel_ranges(n, [=](size_t first, size_t last) {
        for_vectors((int)(last - first), [=](int k, auto there) {
            const size_t i = first + (size_t)k;
            const floats w = load_weights(param, lower, i, there);
            store_weights(param, lower, i, (1 - decay) * w - rate * load(update + i, there), there);
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
