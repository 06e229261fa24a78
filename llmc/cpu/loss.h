// Fused classifier: cross-entropy with z-loss (PaLM, Chowdhery et al., 2022) and its gradient over the logits, in place.
//   Z = sum_{i<V} exp(x_i),  loss = log Z - x_y,  z = c (log Z)^2
//   d/dx_i (loss + z) = p_i (1 + 2 c log Z) - [i = y],  p_i = exp(x_i - log Z),  times the row's weight, if there are weights
// With a soft cap (math.h), x_i is the capped logit, and the gradient is multiplied by the cap's derivative.
// Two passes over a row that stays in cache: log Z online, then the gradient from the exponentials of the first pass, which
// each thread keeps for one row. Sums are fp32, in chunks. No softmax is stored. A masked target (< 0) has loss, z and gradient
// 0, even if its logits are not finite; otherwise a NaN logit gives a NaN loss. The exponential is the one for results rounded
// to bf16 (vectors.h): log Z of bf16 logits is within 3.6e-6. Cost: an exponential and 4 bytes moved per bf16 logit; bound by
// exp on few cores, by memory bandwidth on many.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../base/math.h"
#include "../ops.h"
#include "parallel.h"
#include "vectors.h"

namespace cpu {
namespace detail {

constexpr int chunk = 512;

// The maximum of start and all x; NaNs are ignored. Prefetches the chunks after the next one, or the next row.
inline real highest_of(const floatX* x, int n, real start) {
    constexpr int ahead = 2 * chunk;
    floats highest = floats{} + start;
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        __builtin_prefetch(x + i + ahead);
        highest = larger(load(x + i), highest);
    }
    real lane[lanes];
    store(lane, highest);
    for (const real one : lane) start = one > start ? one : start;
    for (; i < n; i++) start = (real)x[i] > start ? (real)x[i] : start;
    return start;
}

// Soft caps of logits. Both preserve their order.
struct NoCap {
    template <class F>
    F operator()(F x) const {
        return x;
    }
};
struct SoftCap {
    real cap;
    template <class F>
    F operator()(F x) const {
        return soft_cap(x, cap);
    }
};
// Calls f with the cap.
template <class F>
void with_cap(real softcap, F f) {
    if (softcap > 0) f(SoftCap{softcap});
    else f(NoCap());
}

// e[i] = exp(cap(x[i]) - shift); returns their sum.
template <class Cap>
real exponentials(real* e, const floatX* x, int n, real shift, Cap cap) {
    floats sums = {};
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        const floats y = exp_for_rounding(cap(load(x + i)) - shift);
        store(e + i, y);
        sums += y;
    }
    real sum = total(sums);
    for (; i < n; i++) sum += e[i] = exp_real(cap((real)x[i]) - shift);
    return sum;
}

// A row's exponentials, each chunk's relative to the maximum so far.
struct Exponentials {
    real *e, *tops;  // (V) (chunks)
    static size_t bytes(int V) { return ((size_t)V + ceil_div(V, chunk)) * sizeof(real); }
    Exponentials(char* memory, int V) : e((real*)memory), tops(e + V) {}

    // Computes them; returns the log-sum-exp of cap(x[0 .. V-1]). Earlier sums are rescaled when the maximum rises. NaN if any
    // x is NaN or (without a cap) +infinity.
    template <class Cap>
    real set(const floatX* x, int V, Cap cap) const {
        const real minus_infinity = -std::numeric_limits<real>::infinity();
        real largest = minus_infinity, top = minus_infinity, sum = 0;  // of the logits so far; capped
        for (int c = 0; c * chunk < V; c++) {
            const int first = c * chunk, n = std::min(chunk, V - first);
            largest = highest_of(x + first, n, largest);
            const real highest = cap(largest);
            const real shift = highest == minus_infinity ? real(0) : highest;  // only -inf so far: exp gives 0, not NaN
            sum = sum * exp_real(top - shift) + exponentials(e + first, x + first, n, shift, cap);
            tops[c] = top = highest;
        }
        return top + std::log(sum);
    }
    // x[i] = factor exp(cap(x[i]) - log_z) cap'(x[i]), for the row of the last set().
    template <class Cap>
    void put(floatX* x, int V, real factor, real log_z, Cap cap) const {
        for (int c = 0; c * chunk < V; c++) {
            const real scale = factor * exp_real(tops[c] - log_z);
            floatX* y = x + c * chunk;
            const real* from = e + c * chunk;
            for_vectors(std::min(chunk, V - c * chunk), [=](int i, auto n) {
                floats gradient = scale * load(from + i, n);
                if constexpr (std::is_same_v<Cap, SoftCap>) gradient *= soft_cap_derivative(cap(load(y + i, n)), cap.cap);
                store(y + i, gradient, n);
            });
        }
    }
};

// Memory for one row per thread.
struct RowsOfThreads {
    size_t per_thread;
    int V;
    char* memory;
    RowsOfThreads(Ctx& ctx, int columns)
        : per_thread(round_up(Exponentials::bytes(columns), 64)),
          V(columns),
          memory((char*)ctx.scratch(per_thread * (size_t)ctx.threads)) {}
    Exponentials of(const Team::Member& me) const { return Exponentials(memory + per_thread * (size_t)me.number, V); }
};

// The log-sum-exp over shards; each shard's own is statistics[stride * shard]. NaN and +infinity as above.
inline real join_log_sum_exp(const real* statistics, int shards, size_t stride) {
    real top = -std::numeric_limits<real>::infinity(), sum = 0;
    for (int r = 0; r < shards; r++) top = std::max(top, statistics[r * stride]);
    for (int r = 0; r < shards; r++) sum += exp_real(statistics[r * stride] - (std::isinf(top) && top < 0 ? real(0) : top));
    return top + std::log(sum);
}

}  // namespace detail

inline void classifier_statistics(Ctx& ctx, real* statistics, const floatX* logits, const int* targets, int N,
                                  const VocabularyShard& shard, real softcap) {
    const int V = shard.V;
    const detail::RowsOfThreads rows(ctx, V);
    detail::with_cap(softcap, [&](auto cap) {
        parallel_for(
            N,
            [=](Team::Member& me, int n) {
                const floatX* x = logits + (size_t)n * shard.Vp;
                const int target = targets[n] - shard.v0;
                statistics[n] = V > 0 ? rows.of(me).set(x, V, cap) : -std::numeric_limits<real>::infinity();
                statistics[N + n] = targets[n] >= 0 && target >= 0 && target < V ? cap((real)x[target]) : real(0);
            },
            ctx.threads);
    });
}

// statistics null: the logits are not sharded
inline void classifier_shard(Ctx& ctx, floatX* logits, const RowLosses& losses, const int* targets, const real* statistics,
                             int shards, int N, const VocabularyShard& shard, const LossConstants& constants) {
    const int V = shard.V, Vp = shard.Vp;
    const real z_coef = constants.z_coef;
    const bool write_gradient = constants.write_gradient;
    const detail::RowsOfThreads rows(ctx, V);
    const auto row = [=](auto cap, Team::Member& me, int n) {
        floatX* x = logits + (size_t)n * Vp;
        const bool masked = targets[n] < 0;
        const int target = targets[n] - shard.v0;  // in this shard if in [0, V)
        const bool here = !masked && target >= 0 && target < V;
        CHECK(statistics || masked || here, "row %d: target %d of %d", n, target, V);
        const detail::Exponentials exponentials = rows.of(me);
        real log_z = !statistics || write_gradient ? exponentials.set(x, V, cap) : real(0),
             at_target = here ? cap((real)x[target]) : real(0);
        if (statistics) {
            log_z = detail::join_log_sum_exp(statistics + n, shards, (size_t)2 * N);
            at_target = 0;
            for (int r = 0; r < shards; r++) at_target += statistics[((size_t)2 * r + 1) * N + n];
        }
        losses.lse[n] = log_z;
        losses.loss[n] = masked ? real(0) : log_z - at_target;
        losses.zloss[n] = masked ? real(0) : z_coef * log_z * log_z;
        if (!write_gradient) return;
        if (masked) {
            std::fill(x, x + Vp, floatX(0));
            return;
        }
        const real loss_scale = constants.weight ? constants.loss_scale * constants.weight[n] : constants.loss_scale;
        const real factor = loss_scale * (1 + 2 * z_coef * log_z);
        exponentials.put(x, V, factor, log_z, cap);
        if (here) {
            real gradient = factor * exp_real(at_target - log_z) - loss_scale;
            if (constants.softcap > 0) gradient *= soft_cap_derivative(at_target, constants.softcap);
            x[target] = (floatX)gradient;
        }
        std::fill(x + V, x + Vp, floatX(0));
    };
    detail::with_cap(constants.softcap, [&](auto cap) {
        parallel_for(
            N, [=](Team::Member& me, int n) { row(cap, me, n); }, ctx.threads);
    });
}

inline void classifier(Ctx& ctx, floatX* logits, const RowLosses& losses, const int* targets, int N,
                       const VocabularyShard& shard, const LossConstants& constants) {
    classifier_shard(ctx, logits, losses, targets, nullptr, 0, N, shard, constants);
}

inline void loss_sums(Ctx&, LossSums* sums, const RowLosses& losses, const int* targets, int N) {
    for (int n = 0; n < N; n++) {
        if (targets[n] < 0) continue;
        const real lse = losses.lse[n];
        sums->ce += losses.loss[n];
        sums->z += losses.zloss[n];
        sums->lse += lse;
        sums->n++;
        // !(<=) rather than >, so that a NaN is kept
        if (!(lse <= sums->lse_max) && !std::isnan(sums->lse_max)) sums->lse_max = lse;
    }
}

}  // namespace cpu
