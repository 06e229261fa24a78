// Mixtures of experts (Shazeer et al., 2017): a router chooses K of E experts for each row; each expert is an MLP.
//   router   logits = x W^T in fp32; scores s = softmax(logits) or sigmoid(logits); the K experts with the largest s + bias;
//            their weights w_k = scale s_k, or scale s_k / S with S = sum of the chosen s
//   experts  the choices, sorted by expert, are the rows ("slots") of products with each expert's own weights; the weight of a
//            choice multiplies the activation between the two, and the output of a row is the sum of its slots
// Backward, with g_k = dL/dw_k. The choices are constants, as in every implementation: L is continuous in the weights only.
//   weights   dL/ds_k = scale g_k, or normalized scale / S (g_k - sum_j g_j s_j / S), since dw_j/ds_k = scale ([j = k] / S -
//             s_j / S^2)
//   balance   with c_e = E counts_e / (K T^2) of the row's sequence, the row contributes sum_e c_e p_e: for a softmax p = s and
//             dL/ds_e = c_e; for sigmoids p = s / Z with Z = sum of all s, and dL/ds_e = (c_e - sum_j c_j p_j) / Z
//   logits    softmax: dL/dx_e = s_e (dL/ds_e - sum_j s_j dL/ds_j); sigmoid: dL/dx_e = dL/ds_e s_e (1 - s_e)
//   z         d/dx_e (log sum exp x)^2 = 2 (log sum exp x) softmax(x)_e
//   entropy   of p, for the log: - sum_e p_e log p_e = log Z - sum_e s_e log s_e / Z, where Z = 1 for a softmax
//   activation of a slot with weight w: a = w act(h), so dh = act'(h) (w da), and dw = sum over f of da_f act(h)_f
//   biases    w (W act(h) + b) = W a + w b: the second product adds w b, of which db = sum over slots of w dy, dw = dy . b
// Without a bias, experts are compared by their logits: scores have the same order, but round to equal numbers.
// Ties are won by the lower index, and slots of an expert are in the order of the rows (a stable counting sort): results have
// the same bits for any number of threads. Products have a plain loop, the specification, and a fast path: grouped_gemm.h, and
// for experts with a few rows the dot products of matmul.h. The other ops have one version.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../activations.h"
#include "../ops.h"
#include "grouped_gemm.h"
#include "matmul.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {

// ---- plain loops -----------------------------------------------------------------------------------------------------------
namespace plain {

inline void router_logits(real* logits, const floatX* inp, const floatX* weight, const floatX* bias, const MixtureShape& shape,
                          int C) {
    parallel_for(shape.N(), [=](int n) {
        for (int e = 0; e < shape.E; e++) {
            real sum = bias ? (real)bias[e] : real(0);
            for (int c = 0; c < C; c++) sum += (real)inp[(size_t)n * C + c] * (real)weight[(size_t)e * C + c];
            logits[(size_t)n * shape.E + e] = sum;
        }
    });
}

inline void router_backward_input(floatX* dinp, const real* dlogits, const floatX* weight, const MixtureShape& shape, int C) {
    const int E = shape.E;
    parallel_for(shape.N(), [=](int n) {
        for (int c = 0; c < C; c++) {
            real sum = 0;
            for (int e = 0; e < E; e++) sum += dlogits[(size_t)n * E + e] * (real)weight[(size_t)e * C + c];
            floatX& d = dinp[(size_t)n * C + c];
            d = (floatX)((real)d + sum);
        }
    });
}

inline void router_backward_weight(real* dweight, const real* dlogits, const floatX* inp, const MixtureShape& shape, int C,
                                   Acc acc) {
    const int N = shape.N(), E = shape.E;
    parallel_for(E, [=](int e) {
        for (int c = 0; c < C; c++) {
            real sum = 0;
            for (int n = 0; n < N; n++) sum += dlogits[(size_t)n * E + e] * (real)inp[(size_t)n * C + c];
            real& d = dweight[(size_t)e * C + c];
            d = acc == Acc::Add ? d + sum : sum;
        }
    });
}

inline void expert_linear_forward(floatX* out, const ExpertRows& inp, const floatX* weight, const ExpertBias& bias,
                                  const ExpertGroups& groups, int IC, int OC, Acc acc, real scale) {
    parallel_for(groups.E, [=](int e) {
        const floatX* const w = weight + (size_t)e * OC * IC;
        for (int slot = groups.offsets[e]; slot < groups.offsets[e + 1]; slot++)
            for (int o = 0; o < OC; o++) {
                floatX& result = out[(size_t)slot * OC + o];
                real sum = 0;
                for (int i = 0; i < IC; i++) sum += (real)inp.x[inp.row(slot) * IC + i] * (real)w[(size_t)o * IC + i];
                sum *= scale;
                if (bias.x) sum += bias.factor(slot) * (real)bias.x[(size_t)e * OC + o];
                result = (floatX)(acc == Acc::Add ? (real)result + sum : sum);
            }
    });
}

inline void expert_linear_backward_input(floatX* dinp, const ExpertRows& dout, const floatX* weight, const ExpertGroups& groups,
                                         int IC, int OC, Acc acc, real scale) {
    parallel_for(groups.E, [=](int e) {
        const floatX* const w = weight + (size_t)e * OC * IC;
        for (int slot = groups.offsets[e]; slot < groups.offsets[e + 1]; slot++)
            for (int i = 0; i < IC; i++) {
                floatX& result = dinp[(size_t)slot * IC + i];
                real sum = 0;
                for (int o = 0; o < OC; o++) sum += (real)dout.x[dout.row(slot) * OC + o] * (real)w[(size_t)o * IC + i];
                sum *= scale;
                result = (floatX)(acc == Acc::Add ? (real)result + sum : sum);
            }
    });
}

inline void expert_linear_backward_weight(const StackedRows& dweight, const ExpertRows& dout, const ExpertRows& inp,
                                          const ExpertGroups& groups, int IC, int OC, Acc acc, real scale) {
    parallel_for(dweight.rows, [=](int row) {
        const int e = (dweight.row + row) / OC, o = (dweight.row + row) % OC;
        for (int i = 0; i < IC; i++) {
            real sum = 0;
            for (int slot = groups.offsets[e]; slot < groups.offsets[e + 1]; slot++)
                sum += (real)dout.x[dout.row(slot) * OC + o] * (real)inp.x[inp.row(slot) * IC + i];
            sum *= scale;
            real& d = dweight.x[(size_t)row * IC + i];
            d = acc == Acc::Add ? d + sum : sum;
        }
    });
}

}  // namespace plain

// ---- router ----------------------------------------------------------------------------------------------------------------
namespace detail {

// Calls f(row, memory for E numbers) for each row, in parallel.
template <class F>
void for_rows_of_scores(const MixtureShape& shape, F f) {
    parallel_ranges((size_t)shape.N(),
                    [&](size_t first, size_t last) {
                        std::vector<real> scores((size_t)shape.E);
                        for (size_t n = first; n < last; n++) f(n, scores.data());
                    },
                    32);
}

// scores = softmax(logits), or sigmoid(logits); returns log sum exp of the logits.
inline real set_scores(real* scores, const real* logits, int E, bool sigmoids) {
    const real top = *std::max_element(logits, logits + E);
    real sum = 0;
    for (int e = 0; e < E; e++) scores[e] = exp_real(logits[e] - top);
    for (int e = 0; e < E; e++) sum += scores[e];
    const real factor = 1 / sum;
    for (int e = 0; e < E; e++) scores[e] = sigmoids ? sigmoid(logits[e]) : scores[e] * factor;
    return top + std::log(sum);
}

// chosen = the indices of the K largest keys, in decreasing order, the lower index first where keys are equal.
inline void choose_largest(int* chosen, int K, const real* keys, int E) {
    int n = 0;
    for (int e = 0; e < E; e++) {
        int k = n;
        while (k > 0 && keys[e] > keys[chosen[k - 1]]) k--;
        if (k == K) continue;
        n = std::min(n + 1, K);
        std::copy_backward(chosen + k, chosen + n - 1, chosen + n);
        chosen[k] = e;
    }
}

// The sum of a row's chosen scores, or 1 if they are not normalized.
inline real chosen_sum(const real* scores, const int* chosen, int K, const RouterRule& rule) {
    real sum = smallest_scores_sum;
    for (int k = 0; k < K; k++) sum += scores[chosen[k]];
    return rule.normalize ? sum : real(1);
}

// The coefficients c_e of the balance loss of each sequence (B, E).
inline std::vector<real> balance_coefficients(const int* counts, const MixtureShape& shape) {
    std::vector<real> coefficients((size_t)shape.B * shape.E);
    const double factor = shape.balance_factor();
    for (size_t i = 0; i < coefficients.size(); i++) coefficients[i] = (real)(factor * counts[i]);
    return coefficients;
}

// A row's part of the first RouterSums.
inline void set_router_sums(double* sums, const real* scores, const real* logits, const real* coefficients, int E, double lse,
                            double all, bool sigmoids) {
    double balance = 0, entropy = 0;
    for (int e = 0; e < E; e++) {
        const double s = scores[e], log_s = sigmoids ? std::log(std::max(s, 1e-30)) : logits[e] - lse;
        balance += (double)coefficients[e] * s;
        entropy -= s * log_s;
    }
    sums[RouterSums::balance] = balance / all;
    sums[RouterSums::z] = lse * lse;
    sums[RouterSums::entropy] = std::log(all) + entropy / all;
}

// Z of the balance loss.
inline real balance_sum(const real* scores, int E, bool sigmoids) {
    real sum = smallest_scores_sum;
    for (int e = 0; e < E; e++) sum += scores[e];
    return sigmoids ? sum : real(1);
}

// Keeps the `topk` best groups: the keys of other experts become -infinity. values: of experts (RouterRule).
inline void keep_best_groups(std::vector<real>& keys, const std::vector<real>& values, int K, const RouterRule& rule) {
    const int each = (int)keys.size() / rule.groups, counted = K / rule.group_topk;
    std::vector<real> sums((size_t)rule.groups);
    std::vector<int> best((size_t)std::max(counted, rule.group_topk));
    for (int g = 0; g < rule.groups; g++) {
        const real* const of_group = values.data() + g * each;
        choose_largest(best.data(), counted, of_group, each);
        for (int i = 0; i < counted; i++) sums[(size_t)g] += of_group[best[(size_t)i]];
    }
    choose_largest(best.data(), rule.group_topk, sums.data(), rule.groups);
    for (int g = 0; g < rule.groups; g++)
        if (std::find(best.begin(), best.begin() + rule.group_topk, g) == best.begin() + rule.group_topk)
            std::fill_n(keys.begin() + g * each, each, -INFINITY);
}

// Applies rule.capacity to slots that have all choices.
inline void drop_choices(const Routing& r, int E, const RouterRule& rule) {
    std::vector<int> kept;
    for (int e = 0, first = 0, slot = 0; e < E; e++) {
        kept.clear();
        for (; first < r.offsets[e + 1]; first++) kept.push_back(r.choices[first]);
        if ((int)kept.size() > rule.capacity) {
            const auto weight = [&](int choice) {
                const real w = r.weights[choice];
                return w == w ? w : real(-1);  // NaN last: an order must be total
            };
            const auto heavier = [&](int a, int b) { return weight(a) > weight(b); };
            for (const int choice : kept) r.slots[choice] = -1;
            if (!rule.by_position) std::stable_sort(kept.begin(), kept.end(), heavier);
            kept.resize((size_t)rule.capacity);
            std::sort(kept.begin(), kept.end());
        }
        r.offsets[e] = slot;
        for (const int choice : kept) {
            r.choices[slot] = choice;
            r.slots[choice] = slot++;
        }
        if (e == E - 1) r.offsets[E] = slot;
    }
}

}  // namespace detail

inline void router_logits(Ctx& ctx, real* logits, const floatX* inp, const floatX* weight, const floatX* bias,
                          const MixtureShape& shape, int C) {
    if (ctx.plain) return plain::router_logits(logits, inp, weight, bias, shape, C);
#if CPU_FAST_PATHS
    using namespace detail::gemm;
    const auto epilogue = [=, E = shape.E](int n, int first, auto columns, const float* sums) {
        with_bias(at_column(bias, first), sums,
                  [=](auto value) { put(false, logits + (size_t)n * E + first, columns, value); });
    };
    forward(ctx, nullptr, {}, {inp, weight, bias, shape.N(), C, shape.E}, finished_by(epilogue));
#endif
}

// A counting sort: each sequence counts its choices, and then has its own range of each expert's slots.
inline void sort_choices(Ctx&, const Routing& r, const MixtureShape& shape, int first_expert) {
    const int B = shape.B, E = shape.E, choices = shape.T * shape.K;  // of a sequence
    const auto expert_of = [&](int choice) {
        const int e = r.experts[choice] - first_expert;
        return e >= 0 && e < E ? e : -1;
    };
    parallel_for(B, [&](int b) {
        int* const counts = r.counts + (size_t)b * E;
        std::fill_n(counts, E, 0);
        for (int i = b * choices; i < (b + 1) * choices; i++)
            if (const int e = expert_of(i); e >= 0) counts[e]++;
    });
    std::vector<int> first((size_t)B * E);
    int slot = 0;
    for (int e = 0; e < E; e++) {
        r.offsets[e] = slot;
        for (size_t i = (size_t)e; i < first.size(); i += (size_t)E) {
            first[i] = slot;
            slot += r.counts[i];
        }
    }
    r.offsets[E] = slot;
    parallel_for(B, [&](int b) {
        int* const next = first.data() + (size_t)b * E;
        for (int i = b * choices; i < (b + 1) * choices; i++) {
            const int e = expert_of(i);
            r.slots[i] = e < 0 ? -1 : next[e]++;
            if (e >= 0) r.choices[r.slots[i]] = i;
        }
    });
}

inline void route(Ctx& ctx, const Routing& r, const MixtureShape& shape, const RouterRule& rule) {
    const int E = shape.E, K = shape.K;
    detail::for_rows_of_scores(shape, [&](size_t n, real* scores) {
        const real* const logits = r.logits + n * E;
        int* const chosen = r.experts + n * K;
        detail::set_scores(scores, logits, E, rule.sigmoid);
        if (!rule.bias && rule.groups == 1) detail::choose_largest(chosen, K, logits, E);
        else {
            std::vector<real> biased(scores, scores + E), raw(logits, logits + E);
            for (int e = 0; e < E && rule.bias; e++) biased[(size_t)e] += rule.bias[e];
            std::vector<real> keys = rule.bias ? biased : raw;
            if (rule.groups > 1) detail::keep_best_groups(keys, rule.groups_by_scores() ? biased : raw, K, rule);
            detail::choose_largest(chosen, K, keys.data(), E);
        }
        const real factor = rule.scale / detail::chosen_sum(scores, chosen, K, rule);
        for (int k = 0; k < K; k++) r.weights[n * K + k] = factor * scores[chosen[k]];
    });
    sort_choices(ctx, r, shape, 0);
    if (rule.capacity) detail::drop_choices(r, E, rule);
}

inline void router_backward(Ctx&, real* dlogits, double* sums, const real* drouting, const Routing& r,
                            const MixtureShape& shape, const RouterRule& rule, const RouterLossFactors& factors) {
    const int E = shape.E, K = shape.K;
    const std::vector<real> coefficients = detail::balance_coefficients(r.counts, shape);
    std::vector<double> of_rows(sums ? (size_t)RouterSums::dropped * shape.N() : 0);  // added in order
    detail::for_rows_of_scores(shape, [&](size_t n, real* s) {
        const real* const logits = r.logits + n * E;
        const auto g = [&](int k) { return r.slots[n * K + k] < 0 ? real(0) : drouting[n * K + k]; };
        const real* const c = coefficients.data() + n / (size_t)shape.T * E;
        const int* const chosen = r.experts + n * K;
        real* const d = dlogits + n * E;  // first dL/ds
        const real lse = detail::set_scores(s, logits, E, rule.sigmoid);
        const real all = detail::balance_sum(s, E, rule.sigmoid);
        if (sums) detail::set_router_sums(&of_rows[n * RouterSums::dropped], s, logits, c, E, lse, all, rule.sigmoid);
        real mean = 0;
        for (int e = 0; e < E && rule.sigmoid; e++) mean += c[e] * (s[e] / all);
        for (int e = 0; e < E; e++) d[e] = factors.balance * (c[e] - mean) / all;
        const real sum = detail::chosen_sum(s, chosen, K, rule);
        mean = 0;
        for (int k = 0; k < K && rule.normalize; k++) mean += g(k) * (s[chosen[k]] / sum);
        for (int k = 0; k < K; k++) d[chosen[k]] += rule.scale / sum * (g(k) - mean);
        mean = 0;
        for (int e = 0; e < E; e++) mean += s[e] * d[e];
        const real z = 2 * factors.z * lse;
        for (int e = 0; e < E; e++)
            d[e] = rule.sigmoid ? s[e] * (1 - s[e]) * d[e] + z * exp_real(logits[e] - lse) : s[e] * (d[e] - mean + z);
    });
    if (!sums) return;
    for (size_t i = 0; i < of_rows.size(); i++) sums[i % RouterSums::dropped] += of_rows[i];
    sums[RouterSums::dropped] += shape.slots() - r.offsets[E];
    for (int i = 0; i < shape.B * E; i++) sums[RouterSums::rows + i % E] += r.counts[i];
}

#if CPU_FAST_PATHS
namespace detail {

// Some rows, at most four, of x y with x (rows, K) in fp32, at strides of its own, and y (K, columns), rows C apart: set(row,
// column, sums, valid lanes) receives each vector of sums. A vector of y is widened once for all rows.
struct Factors {
    const real* x;
    size_t row, k;  // distances
};
template <class Set>
void mixed_product(const Factors& factors, const floatX* y, int C, int rows, int K, int columns, Set set) {
    constexpr int high = 4, wide = 2;
    const real* x[high];
    for (int i = 0; i < high; i++) x[i] = factors.x + (size_t)std::min(i, rows - 1) * factors.row;
    const auto columns_from = [&](int c, auto some) {
        floats sums[high][wide] = {};
        for (int k = 0; k < K; k++)
            for (int j = 0; j < wide; j++) {
                const floats part = load(y + (size_t)k * (size_t)C + c + j * lanes, some - j * lanes);
                for (int i = 0; i < high; i++) sums[i][j] += x[i][(size_t)k * factors.k] * part;
            }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide && j * lanes < some; j++)
                set(i, c + j * lanes, sums[i][j], std::min<int>(lanes, some - j * lanes));
    };
    int c = 0;
    for (; c + wide * lanes <= columns; c += wide * lanes) columns_from(c, std::integral_constant<int, wide * lanes>());
    if (c < columns) columns_from(c, columns - c);
}

inline void router_backward_input(floatX* dinp, const real* dlogits, const floatX* weight, const MixtureShape& shape, int C) {
    const int N = shape.N(), E = shape.E;
    parallel_for(ceil_div(N, 4), [=](int task) {
        const size_t n = (size_t)task * 4;
        mixed_product({dlogits + n * E, (size_t)E, 1}, weight, C, std::min(4, N - (int)n), E, C,
                      [=](int i, int c, floats sums, int there) {
                          floatX* d = dinp + (n + (size_t)i) * C + c;
                          store(d, load(d, there) + sums, there);
                      });
    });
}

inline void router_backward_weight(real* dweight, const real* dlogits, const floatX* inp, const MixtureShape& shape, int C,
                                   Acc acc) {
    const int N = shape.N(), E = shape.E;
    const int groups = ceil_div(E, 4);
    constexpr int columns = 64;  // of N rows: they stay in the L2 cache for all experts
    parallel_tasks((size_t)ceil_div(C, columns) * groups, [=](size_t task) {
        const int e = (int)task % groups * 4, first = (int)task / groups * columns;
        mixed_product({dlogits + e, 1, (size_t)E}, inp + first, C, std::min(4, E - e), N, std::min(columns, C - first),
                      [=](int i, int c, floats sums, int there) {
                          real* d = dweight + (size_t)(e + i) * C + first + c;
                          store(d, acc == Acc::Add ? load(d, there) + sums : sums, there);
                      });
    });
}

// expert_linear_forward for experts with a few rows: each row of a weight is read once (matmul.h).
inline void few_rows_of_experts(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight, const ExpertBias& bias,
                                const ExpertGroups& groups, int IC, int OC, Acc acc) {
    constexpr int columns = 64;  // of a task
    constexpr std::array product{dot_products<1>, dot_products<2>, dot_products<3>, dot_products<4>};
    struct Group {
        int e, slot, rows, copy;
    };
    std::vector<Group> few;
    int copies = 0;
    for (int e = 0; e < groups.E; e++) {
        const int slot = groups.offsets[e], rows = groups.offsets[e + 1] - slot;
        if (rows == 0 || rows > most_few_rows(ctx)) continue;
        few.push_back({e, slot, rows, copies});
        copies += rows;
    }
    if (few.empty()) return;
    ctx.copies[0].resize((size_t)copies * IC);
    floatX* const x = ctx.copies[0].data();
    for (const Group& g : few) gemm::gather_rows(x + (size_t)g.copy * IC, (size_t)IC, inp, IC, g.slot, g.rows, g.rows, 0, IC);
    const float* const wide = widened(ctx, x, copies, IC);
    const int tasks = ceil_div(OC, columns);
    parallel_tasks(few.size() * tasks, [&](size_t task) {
        const Group& g = few[task / tasks];
        const int first = (int)(task % tasks) * columns;
        const size_t row = (size_t)g.copy * IC;
        for (int o = first; o < std::min(first + columns, OC); o++) {
            const floatX* const w = weight + ((size_t)g.e * OC + o) * IC;
            float sums[few_rows];
            for (size_t n = 0; n < (size_t)g.rows; n += product.size())
                product[std::min(product.size(), g.rows - n) - 1](sums + n, x + row + n * IC, wide + row + n * IC, w, IC);
            const float b = bias.x ? (float)bias.x[(size_t)g.e * OC + o] : 0.0f;
            for (int n = 0; n < g.rows; n++) {
                floatX& result = out[((size_t)g.slot + n) * OC + o];
                if (bias.x) sums[n] += bias.factor(g.slot + n) * b;
                result = (floatX)(acc == Acc::Add ? (float)result + sums[n] : sums[n]);
            }
        }
    });
}

}  // namespace detail
#endif

inline void router_backward_input(Ctx& ctx, floatX* dinp, const real* dlogits, const floatX* weight, const MixtureShape& shape,
                                  int C) {
    if (ctx.plain) return plain::router_backward_input(dinp, dlogits, weight, shape, C);
#if CPU_FAST_PATHS
    detail::router_backward_input(dinp, dlogits, weight, shape, C);
#endif
}

inline void router_backward_weight(Ctx& ctx, real* dweight, const real* dlogits, const floatX* inp, const MixtureShape& shape,
                                   int C, Acc acc) {
    if (ctx.plain) return plain::router_backward_weight(dweight, dlogits, inp, shape, C, acc);
#if CPU_FAST_PATHS
    detail::router_backward_weight(dweight, dlogits, inp, shape, C, acc);
#endif
}

inline void router_backward_bias(Ctx&, real* dbias, const real* dlogits, const MixtureShape& shape) {
    for (int e = 0; e < shape.E; e++) {
        real sum = 0;
        for (int n = 0; n < shape.N(); n++) sum += dlogits[(size_t)n * shape.E + e];
        dbias[e] += sum;
    }
}

// ---- experts ---------------------------------------------------------------------------------------------------------------
inline void expert_linear_forward(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight, const ExpertBias& bias,
                                  const ExpertGroups& groups, int IC, int OC, Acc acc) {
    if (ctx.plain) return plain::expert_linear_forward(out, inp, weight, bias, groups, IC, OC, acc, 1);
#if CPU_FAST_PATHS
    detail::few_rows_of_experts(ctx, out, inp, weight, bias, groups, IC, OC, acc);
    detail::gemm::expert_linear_forward(ctx, out, inp, weight, bias, groups, detail::most_few_rows(ctx), IC, OC, acc, 1);
#endif
}
inline void fp8_expert_linear_forward(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight,
                                      const Fp8Scales& scales, const ExpertBias& bias, const ExpertGroups& groups, int IC,
                                      int OC) {
    const float scale = scales.product();
    if (ctx.plain) return plain::expert_linear_forward(out, inp, weight, bias, groups, IC, OC, Acc::Set, scale);
#if CPU_FAST_PATHS
    detail::gemm::expert_linear_forward(ctx, out, inp, weight, bias, groups, 0, IC, OC, Acc::Set, scale);
#endif
}

inline void expert_bias_backward(Ctx&, real* dbias, const ExpertRows& dout, const ExpertBias& bias, const ExpertGroups& groups,
                                 int OC) {
    constexpr int columns = 64;  // of a task
    const int parts = ceil_div(OC, columns);
    parallel_for(groups.E * parts, [=](int task) {
        const int e = task / parts, first = task % parts * columns;
        for_vectors(std::min(columns, OC - first), [=](int c, auto there) {
            floats sum{};
            for (int slot = groups.offsets[e]; slot < groups.offsets[e + 1]; slot++)
                sum += bias.factor(slot) * load(dout.x + dout.row(slot) * OC + first + c, there);
            real* const d = dbias + (size_t)e * OC + first + c;
            store(d, load(d, there) + sum, there);
        });
    });
}

inline void expert_bias_backward_routing(Ctx&, real* drouting, const ExpertRows& dout, const ExpertBias& bias,
                                         const ExpertGroups& groups, int OC) {
    parallel_for(groups.E, [=](int e) {
        for (int slot = groups.offsets[e]; slot < groups.offsets[e + 1]; slot++)
            drouting[bias.choices[slot]] += inner_product(dout.x + dout.row(slot) * OC, bias.x + (size_t)e * OC, OC);
    });
}

inline void expert_linear_backward_input(Ctx& ctx, floatX* dinp, const ExpertRows& dout, const floatX* weight,
                                         const ExpertGroups& groups, int IC, int OC, Acc acc) {
    if (ctx.plain) return plain::expert_linear_backward_input(dinp, dout, weight, groups, IC, OC, acc, 1);
#if CPU_FAST_PATHS
    detail::gemm::expert_linear_backward_input(ctx, dinp, dout, weight, groups, IC, OC, acc, 1);
#endif
}
inline void fp8_expert_linear_backward_input(Ctx& ctx, floatX* dinp, const ExpertRows& dout, const floatX* weight,
                                             const Fp8Scales& scales, const ExpertGroups& groups, int IC, int OC) {
    const float scale = scales.product();
    if (ctx.plain) return plain::expert_linear_backward_input(dinp, dout, weight, groups, IC, OC, Acc::Set, scale);
#if CPU_FAST_PATHS
    detail::gemm::expert_linear_backward_input(ctx, dinp, dout, weight, groups, IC, OC, Acc::Set, scale);
#endif
}

inline void expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout, const ExpertRows& inp,
                                          const ExpertGroups& groups, int IC, int OC, Acc acc) {
    if (ctx.plain) return plain::expert_linear_backward_weight(dweight, dout, inp, groups, IC, OC, acc, 1);
#if CPU_FAST_PATHS
    detail::gemm::expert_linear_backward_weight(ctx, dweight, dout, inp, groups, IC, OC, acc, 1);
#endif
}
inline void fp8_expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout,
                                              const ExpertRows& inp, const Fp8Scales& scales, const ExpertGroups& groups,
                                              int IC, int OC, Acc acc) {
    const float scale = scales.product();
    if (ctx.plain) return plain::expert_linear_backward_weight(dweight, dout, inp, groups, IC, OC, acc, scale);
#if CPU_FAST_PATHS
    detail::gemm::expert_linear_backward_weight(ctx, dweight, dout, inp, groups, IC, OC, acc, scale);
#endif
}

inline void expert_activation_forward(Ctx&, floatX* out, const floatX* inp, const Routing& r, const MixtureShape& shape, int F,
                                      Activation activation) {
    const auto set_slots = [&](auto row) {
        parallel_for(r.offsets[shape.E], [&](int slot) { row(out + (size_t)slot * F, slot, r.weights[r.choices[slot]]); });
    };
    with_activation(
        activation,
        [&](auto act) {
            set_slots([=](floatX* y, int slot, real weight) {
                const floatX* x = inp + (size_t)slot * F;
                for_vectors(F, [=](int f, auto there) { store(y + f, weight * act.forward(load(x + f, there)), there); });
            });
        },
        [&](auto act) {
            set_slots([=](floatX* y, int slot, real weight) {
                const floatX *gate = inp + (size_t)slot * 2 * F, *up = gate + F;
                for_vectors(F, [=](int f, auto there) {
                    store(y + f, weight * act.forward(load(gate + f, there), load(up + f, there)), there);
                });
            });
        });
}

inline void expert_activation_backward(Ctx&, floatX* dinp, real* drouting, const floatX* dout, const floatX* inp,
                                       const Routing& r, const MixtureShape& shape, int F, Activation activation) {
    const auto set_slots = [&](auto row) {
        parallel_for(r.offsets[shape.E], [&](int slot) {
            const int choice = r.choices[slot];
            drouting[choice] = total(row(dout + (size_t)slot * F, slot, r.weights[choice]));
        });
    };
    with_activation(
        activation,
        [&](auto act) {
            set_slots([=](const floatX* dy, int slot, real weight) {
                const floatX* x = inp + (size_t)slot * F;
                floatX* dx = dinp + (size_t)slot * F;
                floats sum{};
                for_vectors(F, [&](int f, auto there) {
                    const floats h = load(x + f, there), d = load(dy + f, there);
                    sum += act.forward(h) * d;
                    store(dx + f, act.gradient(h, weight * d), there);
                });
                return sum;
            });
        },
        [&](auto act) {
            set_slots([=](const floatX* dy, int slot, real weight) {
                const floatX *gate = inp + (size_t)slot * 2 * F, *up = gate + F;
                floatX *dgate = dinp + (size_t)slot * 2 * F, *dup = dgate + F;
                floats sum{};
                for_vectors(F, [&](int f, auto there) {
                    const floats g = load(gate + f, there), u = load(up + f, there), d = load(dy + f, there);
                    sum += act.forward(g, u) * d;
                    const auto dh = act.gradient(g, u, weight * d);
                    store(dgate + f, dh.gate, there);
                    store(dup + f, dh.up, there);
                });
                return sum;
            });
        });
}

inline void expert_dropout(Ctx&, floatX* out, const floatX* inp, const ExpertRows& rows, const ExpertGroups& groups,
                           int columns, const Dropout& dropout, Acc acc) {
    constexpr int drawn = 64;  // random numbers at a time
    const real factor = dropout.factor();
    const uint32_t threshold = dropout.threshold();
    parallel_for(groups.offsets[groups.E], [=](int slot) {
        const floatX* const x = inp + (size_t)slot * columns;
        floatX* const y = out + (size_t)slot * columns;
        uint32_t random[drawn] = {};
        for (int i = 0; i < columns; i += drawn) {
            const int count = std::min(drawn, columns - i);
            random_words(random, dropout.draws, rows.row(slot) * columns + (size_t)i, (size_t)count);
            for_vectors(count, [&](int k, auto there) {
                words word;
                memcpy(&word, random + k, sizeof word);
                const floats kept = word >= threshold ? load(x + i + k, there) * factor : floats{};
                store(y + i + k, acc == Acc::Add ? load(y + i + k, there) + kept : kept, there);
            });
        }
    });
}

inline void expert_combine(Ctx&, floatX* out, const floatX* inp, const Routing& r, const MixtureShape& shape, int C) {
    const int K = shape.K;
    parallel_for(shape.N(), [=](int n) {
        const int* const slots = r.slots + (size_t)n * K;
        for_vectors(C, [=](int c, auto there) {
            floats sum{};
            for (int k = 0; k < K; k++)
                if (slots[k] >= 0) sum += load(inp + (size_t)slots[k] * C + c, there);
            store(out + (size_t)n * C + c, sum, there);
        });
    });
}
inline void expert_combine_real(Ctx&, real* out, const real* inp, const Routing& r, const MixtureShape& shape, int columns) {
    const int K = shape.K;
    parallel_for(shape.N(), [=](int n) {
        const int* const slots = r.slots + (size_t)n * K;
        for (int c = 0; c < columns; c++) {
            real sum = 0;
            for (int k = 0; k < K; k++)
                if (slots[k] >= 0) sum += inp[(size_t)slots[k] * columns + c];
            out[(size_t)n * columns + c] = sum;
        }
    });
}

inline void ranks_of_experts(Ctx&, int* out, const int* experts, const MixtureShape& ranks, int K, int each) {
    parallel_for(ranks.N(), [=](int n) { set_ranks(out + (size_t)n * ranks.K, ranks.K, experts + (size_t)n * K, K, each); });
}

inline void kept_experts(Ctx&, int* out, const Routing& r, const MixtureShape& shape) {
    const int n = shape.N() * shape.K;
    INDEPENDENT_ITERATIONS
    for (int i = 0; i < n; i++) out[i] = r.slots[i] < 0 ? -1 : r.experts[i];
}

inline void gather_rows(Ctx&, void* out, const void* inp, const int* choices, int K, int n, size_t row_bytes) {
    parallel_for(n, [=](int i) {
        memcpy((char*)out + (size_t)i * row_bytes, (const char*)inp + (size_t)(choices[i] / K) * row_bytes, row_bytes);
    });
}

}  // namespace cpu
