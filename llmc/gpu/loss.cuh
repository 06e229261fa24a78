// Fused classifier, in place over the logits, and the sums of its losses; formulas in cpu/loss.h.
//
// One block per row. First pass: every thread keeps the maximum of its logits so far and the sum of exponentials relative to
// it, rescaled when the maximum rises; the block combines them into log Z. Second pass: the gradient. Between the passes, as
// much of the row as fits stays in shared memory (113,000 bf16 logits on Hopper; up to 57,000, two blocks share a
// multiprocessor); the rest is read again, most likely from the L2 cache. So a row is read from memory once and written once:
// bound by memory bandwidth, closely followed by the exponentials, two per logit. Padding is written, never read.
//
// For a shard of the vocabulary, the first pass is a separate launch (classifier_statistics), whose results the ranks exchange.
#pragma once
#include "../base/math.h"
#include "../ops.h"
#include "device.cuh"
#include "reduce.cuh"

namespace gpu {
namespace detail {

// The log of a running sum of exponentials, stored as sum exp(top).
struct LogSum {
    float top = -INFINITY, sum = 0;

    // Rescales the sum to a new top; returns what to subtract from further terms: 0 while all are -inf, since -inf - -inf is
    // NaN.
    __device__ float raise(float highest) {
        const float shift = highest == -INFINITY ? 0.0f : highest;
        sum *= exp_real(top - shift);
        top = highest;
        return shift;
    }
    __device__ void add(float x) {
        const float shift = raise(fmaxf(top, x));  // fmaxf ignores NaN; the exponential does not
        sum += exp_real(x - shift);
    }
};

// Soft caps of logits. -infinity, used beyond a row's end, is unchanged.
struct NoCap {
    __device__ float operator()(float x) const { return x; }
    __device__ float derivative(float) const { return 1; }
};
struct SoftCap {
    float cap;
    __device__ float operator()(float x) const { return x == -INFINITY ? x : soft_cap(x, cap); }
    __device__ float derivative(float y) const { return soft_cap_derivative(y, cap); }
};

template <int packs, class Cap>
__device__ __forceinline__ void add(LogSum& s, const Pack<floatX> (&x)[packs], Cap cap) {
    constexpr int size = Pack<floatX>::size;
    float capped[packs][size], highest = s.top;
#pragma unroll
    for (int k = 0; k < packs; k++)
#pragma unroll
        for (int j = 0; j < size; j++) {
            capped[k][j] = cap((float)x[k][j]);
            highest = fmaxf(highest, capped[k][j]);
        }
    const float shift = s.raise(highest);
#pragma unroll
    for (int k = 0; k < packs; k++)
#pragma unroll
        for (int j = 0; j < size; j++) s.sum += exp_real(capped[k][j] - shift);
}

// The log-sum-exp over shards; each shard's own is statistics[stride shard].
__device__ __forceinline__ float join_log_sum_exp(const real* statistics, int shards, size_t stride) {
    LogSum s;
    for (int r = 0; r < shards; r++) {
        const float lse = statistics[r * stride], shift = s.raise(fmaxf(s.top, lse));
        s.sum += exp_real(lse - shift);
    }
    return s.top + logf(s.sum);
}

constexpr int classifier_in_flight = 4;  // packs in flight per thread

// The log-sum-exp of a row, computed by the whole block. The first n_packs packs are loaded as packs, the rest up to V one by
// one; n_kept packs stay in shared memory.
template <class Cap>
__device__ __forceinline__ float keep_and_sum(floatX* kept, const floatX* x, int V, int n_packs, int n_kept, Cap cap) {
    constexpr int size = Pack<floatX>::size, in_flight = classifier_in_flight;
    const int thread = threadIdx.x, threads = blockDim.x;
    LogSum s;
    for (int first = thread; first < n_packs; first += in_flight * threads) {
        Pack<floatX> p[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int i = first + k * threads;
            if (i < n_packs) p[k] = load(x + (size_t)i * size);
            else
#pragma unroll
                for (int j = 0; j < size; j++) p[k][j] = (floatX)-INFINITY;
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++)
            if (first + k * threads < n_kept) store(kept + (first + k * threads) * size, p[k]);
        add(s, p, cap);
    }
    for (int i = n_packs * size + thread; i < V; i += threads) s.add(cap((float)x[i]));
    const float highest = block_max(s.top);
    s.raise(highest);
    return highest + logf(block_sum(s.sum));
}

// With own_statistics, computes only those; with statistics, sums nothing, and n_kept is 0.
template <class Cap>
__global__ void __launch_bounds__(1024)
    classifier_kernel(floatX* logits, real* loss, real* zloss, real* lse, const int* targets, const real* statistics,
                      int shards, real* own_statistics, int v0, int V, int Vp, int n_packs, int n_kept, float loss_scale,
                      float z_coef, const real* weight, bool write_gradient, Cap cap) {
    constexpr int size = Pack<floatX>::size, in_flight = classifier_in_flight;
    DYNAMIC_SHARED(floatX, kept);
    const size_t n = blockIdx.x, N = gridDim.x;
    floatX* x = logits + n * Vp;
    const int thread = threadIdx.x, threads = blockDim.x;
    const bool masked = targets[n] < 0;
    const int target = masked ? -1 : targets[n] - v0;  // in this shard if in [0, V)
    const bool here = target >= 0 && target < V;
    if (!masked && !here && !statistics && !own_statistics) __trap();  // a fault of the data loader; the next CUDA call fails
    float at_target = here ? cap((float)x[target]) : 0.0f, log_z;

    if (statistics) {
        log_z = join_log_sum_exp(statistics + n, shards, 2 * N);
        at_target = 0;
        for (int r = 0; r < shards; r++) at_target += statistics[(2 * r + 1) * N + n];
    } else {
        log_z = keep_and_sum(kept, x, V, n_packs, n_kept, cap);
    }
    if (own_statistics) {
        if (thread == 0) {
            own_statistics[n] = log_z;
            own_statistics[N + n] = at_target;
        }
        return;
    }
    __syncthreads();  // the target's logit is read before the row is overwritten

    if (thread == 0) {
        lse[n] = log_z;
        loss[n] = masked ? 0.0f : log_z - at_target;
        zloss[n] = masked ? 0.0f : z_coef * log_z * log_z;
    }
    if (!write_gradient) return;

    if (weight) loss_scale *= weight[n];
    const float factor = loss_scale * (1 + 2 * z_coef * log_z);
    const auto gradient = [&](int i, float logit) {
        if (masked) return 0.0f;  // regardless of the row's values
        const float value = cap(logit), g = factor * exp_real(value - log_z);
        return (i == target ? g - loss_scale : g) * cap.derivative(value);
    };
    for (int first = thread; first < n_packs; first += in_flight * threads) {
        Pack<floatX> p[in_flight];
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int i = first + k * threads;
            if (i < n_packs) p[k] = i < n_kept ? load(kept + i * size) : load(x + (size_t)i * size);
        }
#pragma unroll
        for (int k = 0; k < in_flight; k++) {
            const int i = first + k * threads;
            if (i >= n_packs) continue;
#pragma unroll
            for (int j = 0; j < size; j++) p[k][j] = (floatX)gradient(i * size + j, (float)p[k][j]);
            store(x + (size_t)i * size, p[k]);
        }
    }
    for (int i = n_packs * size + thread; i < V; i += threads) x[i] = (floatX)gradient(i, (float)x[i]);
    for (int i = V + thread; i < Vp; i += threads) x[i] = (floatX)0.0f;
}

// One block; a thread takes every 1024th row.
__global__ void __launch_bounds__(1024)
    loss_sums_kernel(LossSums* sums, const real* loss, const real* zloss, const real* lse, const int* targets, int N) {
    double ce = 0, z = 0, log_z = 0, rows = 0;
    float highest = -INFINITY;
    bool is_nan = false;  // fmaxf would lose it
    for (int n = threadIdx.x; n < N; n += 1024) {
        if (targets[n] < 0) continue;
        ce += loss[n];
        z += zloss[n];
        log_z += lse[n];
        rows++;
        highest = fmaxf(highest, lse[n]);
        is_nan |= lse[n] != lse[n];
    }
    ce = block_total(ce);
    z = block_total(z);
    log_z = block_total(log_z);
    rows = block_total(rows);
    highest = block_max(highest);
    const bool any_nan = block_max(is_nan) > 0;
    if (threadIdx.x > 0) return;
    sums->ce += ce;
    sums->z += z;
    sums->lse += log_z;
    sums->n += (int64_t)rows;
    if (any_nan) sums->lse_max = NAN;
    else if (highest > sums->lse_max) sums->lse_max = highest;  // false if lse_max is NaN: it stays NaN
}

// statistics: of all shards, or null; own_statistics: output for this shard's, or null.
inline void launch_classifier(Ctx& ctx, floatX* logits, const RowLosses& losses, const int* targets, const real* statistics,
                              int shards, real* own_statistics, int N, const VocabularyShard& shard,
                              const LossConstants& constants) {
    if (N == 0) return;
    const int V = shard.V, Vp = shard.Vp;
    constexpr int size = Pack<floatX>::size;
    const int n_packs = Vp % size == 0 && aligned_16(logits) ? V / size : 0;
    // Per block, static shared memory uses 1 KB and the system reserves another, which shared_bytes excludes for one block.
    const size_t most = ctx.shared_bytes - 1024, half = ctx.shared_bytes / 2 - 1536, row = (size_t)n_packs * 16;
    const size_t kept = constants.write_gradient && !statistics ? std::min(row, most) : 0;
    const int wanted = std::max(32, ceil_div(ceil_div(V, size), 32) * 32);
    const int threads = std::min(wanted, kept <= half ? 512 : 1024);
    const auto launch = [&](auto cap) {
        LAUNCH(classifier_kernel<decltype(cap)>, N, threads, kept, ctx, logits, losses.loss, losses.zloss, losses.lse, targets,
               statistics, shards, own_statistics, shard.v0, V, Vp, n_packs, (int)(kept / 16), constants.loss_scale,
               constants.z_coef, constants.weight, constants.write_gradient, cap);
    };
    if (constants.softcap > 0) launch(SoftCap{constants.softcap});
    else launch(NoCap());
}

}  // namespace detail

inline void classifier(Ctx& ctx, floatX* logits, const RowLosses& losses, const int* targets, int N,
                       const VocabularyShard& shard, const LossConstants& constants) {
    detail::launch_classifier(ctx, logits, losses, targets, nullptr, 0, nullptr, N, shard, constants);
}

inline void classifier_shard(Ctx& ctx, floatX* logits, const RowLosses& losses, const int* targets, const real* statistics,
                             int shards, int N, const VocabularyShard& shard, const LossConstants& constants) {
    detail::launch_classifier(ctx, logits, losses, targets, statistics, shards, nullptr, N, shard, constants);
}

inline void classifier_statistics(Ctx& ctx, real* statistics, const floatX* logits, const int* targets, int N,
                                  const VocabularyShard& shard, real softcap) {
    floatX* only_read = const_cast<floatX*>(logits);
    detail::launch_classifier(ctx, only_read, {}, targets, nullptr, 0, statistics, N, shard, {0, 0, false, softcap});
}

inline void loss_sums(Ctx& ctx, LossSums* sums, const RowLosses& losses, const int* targets, int N) {
    if (N == 0) return;
    LAUNCH(detail::loss_sums_kernel, 1, 1024, 0, ctx, sums, losses.loss, losses.zloss, losses.lse, targets, N);
}

}  // namespace gpu
