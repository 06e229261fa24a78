// Fused classifier: cross-entropy with z-loss (PaLM, Chowdhery et al., 2022) and its gradient over the logits, in place.
//   Z = sum_{i<V} exp(x_i),  loss = log Z - x_y,  z = c (log Z)^2
//   d/dx_i (loss + z) = p_i (1 + 2 c log Z) - [i = y],  p_i = exp(x_i - log Z)
// Two passes over a row that stays in cache: log Z online, then the gradient. Sums in fp32, of chunks. No softmax is stored.
// A masked target (< 0) has loss, z and gradient 0, also where its logits are not finite; elsewhere a NaN logit gives a NaN
// loss. Cost: two exponentials and 3 bytes moved per bf16 logit; bound by exp on few cores, by memory bandwidth on many.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../math.h"
#include "../ops.h"
#include "parallel.h"
#include "reduce.h"

namespace cpu {
namespace detail {

// log sum exp of x[0 .. V-1]: a chunk's maximum, then its exponentials relative to the largest so far; what was summed before
// is scaled when the maximum rises. NaN if any x is NaN or +infinity.
inline real log_sum_exp(const floatX* x, int V) {
    constexpr int chunk = 512;
    const real minus_infinity = -std::numeric_limits<real>::infinity();
    real top = minus_infinity, sum = 0;
    for (int first = 0; first < V; first += chunk) {
        const floatX* part = x + first;
        const int n = std::min(chunk, V - first);
        const real highest = lane_max(n, top, [=](int i) { return (real)part[i]; });
        const real shift = highest == minus_infinity ? real(0) : highest;  // only -inf so far: exp gives 0, not NaN
        sum = sum * exp_real(top - shift) + lane_sum(n, [=](int i) { return exp_real((real)part[i] - shift); });
        top = highest;
    }
    return top + std::log(sum);
}

// log sum exp over shards, each of whose own is statistics[2 N shard]. NaN and +infinity as above.
inline real join_log_sum_exp(const real* statistics, int shards, size_t stride) {
    real top = -std::numeric_limits<real>::infinity(), sum = 0;
    for (int r = 0; r < shards; r++) top = std::max(top, statistics[r * stride]);
    for (int r = 0; r < shards; r++) sum += exp_real(statistics[r * stride] - (std::isinf(top) && top < 0 ? real(0) : top));
    return top + std::log(sum);
}

}  // namespace detail

inline void classifier_statistics(Ctx&, real* statistics, const floatX* logits, const int* targets, int N, int v0, int V,
                                  int Vp) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const floatX* x = logits + (size_t)n * Vp;
        const int target = targets[n] - v0;
        statistics[n] = V > 0 ? detail::log_sum_exp(x, V) : -std::numeric_limits<real>::infinity();
        statistics[N + n] = targets[n] >= 0 && target >= 0 && target < V ? (real)x[target] : real(0);
    }
}

// statistics null: the logits are the whole
inline void classifier_shard(Ctx&, floatX* logits, real* loss, real* zloss, real* lse, const int* targets,
                             const real* statistics, int shards, int N, int v0, int V, int Vp, real loss_scale, real z_coef,
                             bool write_gradient) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        floatX* x = logits + (size_t)n * Vp;
        const bool masked = targets[n] < 0;
        const int target = targets[n] - v0;  // in this shard, if it is in [0, V)
        const bool here = !masked && target >= 0 && target < V;
        CHECK(statistics || masked || here, "row %d: target %d of %d", n, target, V);
        real log_z, at_target = here ? (real)x[target] : real(0);
        if (statistics) {
            log_z = detail::join_log_sum_exp(statistics + n, shards, (size_t)2 * N);
            at_target = 0;
            for (int r = 0; r < shards; r++) at_target += statistics[((size_t)2 * r + 1) * N + n];
        } else {
            log_z = detail::log_sum_exp(x, V);
        }
        lse[n] = log_z;
        loss[n] = masked ? real(0) : log_z - at_target;
        zloss[n] = masked ? real(0) : z_coef * log_z * log_z;
        if (!write_gradient) continue;
        if (masked) {
            std::fill(x, x + Vp, floatX(0));
            continue;
        }
        const real factor = loss_scale * (1 + 2 * z_coef * log_z);
        INDEPENDENT_ITERATIONS
        for (int i = 0; i < V; i++) x[i] = (floatX)(factor * exp_real((real)x[i] - log_z));
        if (here) x[target] = (floatX)(factor * exp_real(at_target - log_z) - loss_scale);
        std::fill(x + V, x + Vp, floatX(0));
    }
}

inline void classifier(Ctx& ctx, floatX* logits, real* loss, real* zloss, real* lse, const int* targets, int N, int V, int Vp,
                       real loss_scale, real z_coef, bool write_gradient) {
    classifier_shard(ctx, logits, loss, zloss, lse, targets, nullptr, 0, N, 0, V, Vp, loss_scale, z_coef, write_gradient);
}

inline void loss_sums(Ctx&, LossSums* sums, const real* loss, const real* zloss, const real* lse, const int* targets, int N) {
    for (int n = 0; n < N; n++) {
        if (targets[n] < 0) continue;
        sums->ce += loss[n], sums->z += zloss[n], sums->lse += lse[n], sums->n++;
        // !(<=) and not >, so that a NaN shows
        if (!(lse[n] <= sums->lse_max) && !std::isnan(sums->lse_max)) sums->lse_max = lse[n];
    }
}

}  // namespace cpu
