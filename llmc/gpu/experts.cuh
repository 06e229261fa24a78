// Mixtures of experts: routing, the products of all experts (grouped_product.cuh), and the sums over a row's experts. The
// formulas and derivatives are in llmc/cpu/experts.h.
//
// Routing: a warp per row, in fp32, with the exponential of the CPU. Choices are sorted by expert by counting: a block counts
// its part of a sequence's choices per expert, one block adds up the counts, and each part places its choices, a thread per
// expert, in the order of the rows.
//
// Determinism: no atomics; each sum has a fixed order.
#pragma once
#include "../activations.h"
#include "../ops.h"
#include "device.cuh"
#include "grouped_product.cuh"
#include "matmul.cuh"
#include "reduce.cuh"

namespace gpu {
namespace detail {

// ---- router ----------------------------------------------------------------------------------------------------------------
constexpr int router_warps = 8;  // of a block, a row each

// Scores of a row, computed again whenever needed: no limit to the number of experts. All lanes of a warp make one together.
class RowScores {
public:
    __device__ RowScores(const real* logits, int E, bool sigmoid) : logits_(logits), sigmoid_(sigmoid) {
        if (sigmoid) return;
        const LogSum all = log_sum(logits, E);
        top_ = all.top;
        inverse_ = 1.0f / all.sum;
    }
    __device__ float of(int e) const {
        return sigmoid_ ? 1.0f / (1.0f + exp_of(-logits_[e])) : exp_of(logits_[e] - top_) * inverse_;
    }
    struct LogSum {
        float top, sum;  // the sum of exp(logit - top)
    };
    static __device__ LogSum log_sum(const real* logits, int E) {
        float top = -INFINITY, sum = 0;
        for (int e = threadIdx.x % 32; e < E; e += 32) top = fmaxf(top, logits[e]);
        top = warp_max(top);
        for (int e = threadIdx.x % 32; e < E; e += 32) sum += exp_of(logits[e] - top);
        return {top, warp_sum(sum)};
    }

private:
    const real* logits_;
    bool sigmoid_;
    float top_ = 0, inverse_ = 0;
};

__device__ __forceinline__ int row_of_warp() { return (int)blockIdx.x * router_warps + (int)threadIdx.x / 32; }

// The k-th choice is the best expert after the previous one in the order of decreasing score (without a bias, of decreasing
// logit), then increasing index. NaN counts as -infinity, so that K different experts are always found.
__global__ void __launch_bounds__(32 * router_warps) choose_experts_kernel(Routing r, int N, int E, int K, RouterRule rule) {
    const int row = row_of_warp(), lane = threadIdx.x % 32;
    if (row >= N) return;
    const RowScores scores(r.logits + (size_t)row * E, E, rule.sigmoid);
    float last = INFINITY, sum = 0;
    int last_expert = -1;
    for (int k = 0; k < K; k++) {
        float best = 0;
        int expert = E;  // none
        for (int e = lane; e < E; e += 32) {
            float score = rule.bias ? scores.of(e) + rule.bias[e] : r.logits[(size_t)row * E + e];
            if (score != score) score = -INFINITY;  // NaN
            const bool after = score < last || (score == last && e > last_expert);
            if (after && (expert == E || score > best)) {
                best = score;
                expert = e;
            }
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const float other = __shfl_xor_sync(all_lanes, best, offset);
            const int other_expert = __shfl_xor_sync(all_lanes, expert, offset);
            const bool better = expert == E || other > best || (other == best && other_expert < expert);
            if (other_expert < E && better) {
                best = other;
                expert = other_expert;
            }
        }
        last = best;
        last_expert = expert;
        const float weight = scores.of(expert);
        sum += weight;
        if (lane != k % 32) continue;  // the lane that scales it below
        r.experts[(size_t)row * K + k] = expert;
        r.weights[(size_t)row * K + k] = weight;
    }
    const float factor = rule.normalize ? rule.scale / (sum + smallest_scores_sum) : rule.scale;
    for (int k = lane; k < K; k += 32) r.weights[(size_t)row * K + k] *= factor;
}

// A row's gradient of the logits. With scores s, weights w_k = scale s_k / S where S is the sum over chosen experts, or 1:
//   ds_k = scale / S (dw_k - sum_j dw_j s_j / S), without the second term if S is 1
// The balance loss adds c_e = factor E / (K T^2) counts_e to the gradient of p_e, where p = s, or s divided by its sum.
//   softmax: dlogit_e = s_e (ds_e - sum_i ds_i s_i)      sigmoid: dlogit_e = ds_e s_e (1 - s_e)
// The z loss adds 2 factor lse softmax(logits)_e.
__global__ void __launch_bounds__(32 * router_warps)
    router_backward_kernel(real* dlogits, const real* dweights, Routing r, MixtureShape shape, RouterRule rule, float balance,
                           float z) {
    const int row = row_of_warp(), lane = threadIdx.x % 32, E = shape.E, K = shape.K;
    if (row >= shape.N()) return;
    const real* logits = r.logits + (size_t)row * E;
    const int *experts = r.experts + (size_t)row * K, *counts = r.counts + (size_t)(row / shape.T) * E;
    const RowScores scores(logits, E, rule.sigmoid);
    const RowScores::LogSum log_sum = RowScores::log_sum(logits, E);
    dweights += (size_t)row * K;

    float chosen = smallest_scores_sum, weighted = 0;  // sums of s_k, dw_k s_k
    for (int k = 0; k < K; k++) {
        const float s = scores.of(experts[k]);
        chosen += s;
        weighted += dweights[k] * s;
    }
    const float factor = rule.normalize ? rule.scale / chosen : rule.scale, shift = rule.normalize ? weighted / chosen : 0.0f;
    float all = 0, mean = 0;  // sums of s_e, of c_e s_e
    for (int e = lane; e < E; e += 32) {
        const float s = scores.of(e);
        all += s;
        mean += balance * (float)counts[e] * s;
    }
    all = rule.sigmoid ? warp_sum(all) + smallest_scores_sum : 1.0f;
    mean = rule.sigmoid ? warp_sum(mean) / all : 0.0f;
    const auto dscore = [&](int e) {
        float d = (balance * (float)counts[e] - mean) / all;
        for (int k = 0; k < K; k++)
            if (experts[k] == e) d += factor * (dweights[k] - shift);
        return d;
    };
    float projection = 0;  // sum of ds_e s_e
    if (!rule.sigmoid)
        for (int e = lane; e < E; e += 32) projection += dscore(e) * scores.of(e);
    projection = warp_sum(projection);
    const float lse = log_sum.top + logf(log_sum.sum), of_lse = 2 * z * lse / log_sum.sum;
    for (int e = lane; e < E; e += 32) {
        const float s = scores.of(e), d = rule.sigmoid ? dscore(e) * s * (1 - s) : s * (dscore(e) - projection);
        dlogits[(size_t)row * E + e] = d + of_lse * exp_of(logits[e] - log_sum.top);
    }
}

// partial (gridDim.x, 2): sums of both losses over every gridDim.x-th group of rows, the balance loss without E / (K T^2).
__global__ void __launch_bounds__(32 * router_warps)
    router_losses_kernel(double* partial, Routing r, MixtureShape shape, bool sigmoid) {
    const int E = shape.E;
    double balance = 0, z = 0;
    for (int row = row_of_warp(); row < shape.N(); row += (int)gridDim.x * router_warps) {
        const real* logits = r.logits + (size_t)row * E;
        const int* counts = r.counts + (size_t)(row / shape.T) * E;
        const RowScores scores(logits, E, sigmoid);
        float all = 0, chosen = 0;
        for (int e = threadIdx.x % 32; e < E; e += 32) {
            const float s = scores.of(e);
            all += s;
            chosen += (float)counts[e] * s;
        }
        all = sigmoid ? warp_sum(all) + smallest_scores_sum : 1.0f;
        chosen = warp_sum(chosen);
        const RowScores::LogSum log_sum = RowScores::log_sum(logits, E);
        const float lse = log_sum.top + logf(log_sum.sum);
        balance += chosen / all;
        z += (double)lse * lse;
    }
    const bool first = threadIdx.x % 32 == 0;  // all lanes have the same sums
    balance = block_total(first ? balance : 0);
    z = block_total(first ? z : 0);
    if (threadIdx.x > 0) return;
    partial[2 * blockIdx.x] = balance;
    partial[2 * blockIdx.x + 1] = z;
}
__global__ void __launch_bounds__(256)
    add_router_sums_kernel(double* sums, const double* partial, int n, const int* counts, int B, int E, double factor) {
    double balance = 0, z = 0;
    for (int i = threadIdx.x; i < n; i += 256) {
        balance += partial[2 * i];
        z += partial[2 * i + 1];
    }
    balance = block_total(balance);
    z = block_total(z);
    if (threadIdx.x == 0) {
        sums[0] += factor * balance;
        sums[1] += z;
    }
    for (int e = threadIdx.x; e < E; e += 256) {
        int64_t rows = 0;
        for (int b = 0; b < B; b++) rows += counts[(size_t)b * E + e];
        sums[2 + e] += (double)rows;
    }
}

// ---- sorting choices by expert ---------------------------------------------------------------------------------------------
constexpr int choices_part = 1024, choices_threads = 256;

// Block (parts of a sequence, B). Without `places`, sets counts (B, parts, E): the number of each part's choices of each
// expert. With `places`, counts are the first slots of each part's choices of each expert; sets slots and choices.
// Experts are numbered from first_expert on; choices of others get no slot.
template <bool places>
__global__ void __launch_bounds__(choices_threads)
    sort_choices_kernel(int* counts, Routing r, MixtureShape shape, int first_expert) {
    __shared__ int experts[choices_part];
    const int of_sequence = shape.T * shape.K, part = blockIdx.x * choices_part, n = min(choices_part, of_sequence - part);
    const int first = blockIdx.y * of_sequence + part;
    for (int i = threadIdx.x; i < n; i += choices_threads) {
        const int e = experts[i] = r.experts[first + i] - first_expert;
        if (places && (e < 0 || e >= shape.E)) r.slots[first + i] = -1;
    }
    __syncthreads();
    counts += ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * shape.E;
    for (int e = threadIdx.x; e < shape.E; e += choices_threads) {
        int slot = places ? counts[e] : 0;
#pragma unroll 8
        for (int i = 0; i < n; i++) {
            if (experts[i] != e) continue;
            if (places) {
                r.slots[first + i] = slot;
                r.choices[slot] = first + i;
            }
            slot++;
        }
        if (!places) counts[e] = slot;
    }
}

// One block. Sets r.counts and r.offsets; counts (B, parts, E) become first slots.
__global__ void __launch_bounds__(1024) scan_choices_kernel(int* counts, Routing r, int B, int parts, int E) {
    for (int e = threadIdx.x; e < E; e += 1024) {
        int total = 0;
        for (int b = 0; b < B; b++) {
            int rows = 0;
#pragma unroll 8
            for (int p = 0; p < parts; p++) rows += counts[((size_t)b * parts + p) * E + e];
            r.counts[(size_t)b * E + e] = rows;
            total += rows;
        }
        r.offsets[e + 1] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int e = 0; e <= E; e++) r.offsets[e] = total += e > 0 ? r.offsets[e] : 0;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 1024) {
        int slot = r.offsets[e];
#pragma unroll 8
        for (int p = 0; p < B * parts; p++) {
            int& place = counts[(size_t)p * E + e];
            const int rows = place;
            place = slot;
            slot += rows;
        }
    }
}

// ---- activations and sums over experts -------------------------------------------------------------------------------------
// The numbers that an activation reads: one, or gate and up.
template <class Act>
struct PlainActivation {
    static constexpr int inputs = 1;
    static __device__ float forward(const float* x) { return Act::forward(x[0]); }
    static __device__ void gradient(float* dx, const float* x, float dy) { dx[0] = Act::gradient(x[0], dy); }
};
template <class Act>
struct GatedActivation {
    static constexpr int inputs = 2;
    static __device__ float forward(const float* x) { return Act::forward(x[0], x[1]); }
    static __device__ void gradient(float* dx, const float* x, float dy) {
        const GateUp<float> d = Act::gradient(x[0], x[1], dy);
        dx[0] = d.gate;
        dx[1] = d.up;
    }
};

constexpr int expert_threads = 256;

// A block per slot.
template <bool packed, class Act>
__global__ void __launch_bounds__(expert_threads)
    expert_activation_kernel(floatX* out, const floatX* inp, Routing r, const int* n_slots, int F) {
    constexpr int size = Pack<floatX>::size, inputs = Act::inputs;
    const size_t slot = blockIdx.x;
    if (slot >= (size_t)*n_slots) return;
    const float weight = r.weights[r.choices[slot]];
    for (int f = threadIdx.x * size; f < F; f += blockDim.x * size) {
        Pack<floatX> in[inputs], result;
#pragma unroll
        for (int i = 0; i < inputs; i++) in[i] = load_part<packed>(inp + (slot * inputs + i) * F, f, F);
#pragma unroll
        for (int j = 0; j < size; j++) {
            float x[inputs];
#pragma unroll
            for (int i = 0; i < inputs; i++) x[i] = (float)in[i][j];
            result[j] = (floatX)(weight * Act::forward(x));
        }
        store_part<packed>(out + slot * F, f, F, result);
    }
}

template <bool packed, class Act>
__global__ void __launch_bounds__(expert_threads)
    expert_activation_backward_kernel(floatX* dinp, real* dweights, const floatX* dout, const floatX* inp, Routing r,
                                      const int* n_slots, int F) {
    constexpr int size = Pack<floatX>::size, inputs = Act::inputs;
    const size_t slot = blockIdx.x;
    if (slot >= (size_t)*n_slots) return;
    const int choice = r.choices[slot];
    const float weight = r.weights[choice];
    float dweight = 0;
    for (int f = threadIdx.x * size; f < F; f += blockDim.x * size) {
        Pack<floatX> in[inputs], result[inputs];
#pragma unroll
        for (int i = 0; i < inputs; i++) in[i] = load_part<packed>(inp + (slot * inputs + i) * F, f, F);
        const Pack<floatX> d = load_part<packed>(dout + slot * F, f, F);
#pragma unroll
        for (int j = 0; j < size; j++) {
            float x[inputs], dx[inputs];
#pragma unroll
            for (int i = 0; i < inputs; i++) x[i] = (float)in[i][j];
            dweight += (float)d[j] * Act::forward(x);
            Act::gradient(dx, x, weight * (float)d[j]);
#pragma unroll
            for (int i = 0; i < inputs; i++) result[i][j] = (floatX)dx[i];
        }
#pragma unroll
        for (int i = 0; i < inputs; i++) store_part<packed>(dinp + (slot * inputs + i) * F, f, F, result[i]);
    }
    dweight = block_sum(dweight);
    if (threadIdx.x == 0) dweights[choice] = dweight;
}

// A block per slot. Numbers are drawn one by one: four times as many as needed.
__global__ void __launch_bounds__(expert_threads)
    expert_dropout_kernel(floatX* out, const floatX* inp, ExpertRows rows, const int* n_slots, int columns, Dropout dropout,
                          bool add) {
    const size_t slot = blockIdx.x;
    if (slot >= (size_t)*n_slots) return;
    const size_t row = rows.row((int)slot) * columns;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        const float kept = dropout.apply(row + i, (float)inp[slot * columns + i]);
        floatX* to = out + slot * columns + i;
        *to = (floatX)(add ? (float)*to + kept : kept);
    }
}

// A block per row.
template <bool packed>
__global__ void __launch_bounds__(expert_threads)
    expert_combine_kernel(floatX* out, const floatX* inp, const int* slots, int K, int C) {
    constexpr int size = Pack<floatX>::size;
    slots += (size_t)blockIdx.x * K;
    for (int c = threadIdx.x * size; c < C; c += blockDim.x * size) {
        float sum[size] = {};
#pragma unroll 4
        for (int k = 0; k < K; k++) {
            if (slots[k] < 0) continue;
            const Pack<floatX> x = load_part<packed>(inp + (size_t)slots[k] * C, c, C);
#pragma unroll
            for (int j = 0; j < size; j++) sum[j] += (float)x[j];
        }
        Pack<floatX> result;
#pragma unroll
        for (int j = 0; j < size; j++) result[j] = (floatX)sum[j];
        store_part<packed>(out + (size_t)blockIdx.x * C, c, C, result);
    }
}

// ---- biases ----------------------------------------------------------------------------------------------------------------
__global__ void __launch_bounds__(256) add_bias_kernel(real* x, const floatX* bias, size_t n, int columns) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) x[i] += (float)bias[i % (size_t)columns];
}

// Block (32, 32) for 32 columns of an expert's bias: a thread adds every 32nd slot, then one thread per column adds 32 parts.
__global__ void __launch_bounds__(1024)
    expert_bias_kernel(real* dbias, ExpertRows dout, ExpertBias bias, const int* offsets, int OC) {
    __shared__ float parts[32][33];
    const int c = blockIdx.x * 32 + threadIdx.x, e = blockIdx.y, end = offsets[e + 1];
    float sum = 0;
    if (c < OC) {
#pragma unroll 4
        for (int slot = offsets[e] + (int)threadIdx.y; slot < end; slot += 32)
            sum += bias.factor(slot) * (float)dout.x[dout.row(slot) * OC + c];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= OC) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) sum += parts[i][threadIdx.x];
    dbias[(size_t)e * OC + c] += sum;
}

// A warp per slot.
__global__ void __launch_bounds__(32 * router_warps)
    expert_bias_weights_kernel(real* dweights, ExpertRows dout, ExpertBias bias, ExpertGroups groups, int OC) {
    const int slot = row_of_warp(), lane = threadIdx.x % 32;
    if (slot >= groups.offsets[groups.E]) return;
    int e = 0;
    while (slot >= groups.offsets[e + 1]) e++;
    const floatX *const row = dout.x + dout.row(slot) * OC, *const of_expert = bias.x + (size_t)e * OC;
    float sum = 0;
    for (int c = lane; c < OC; c += 32) sum += (float)row[c] * (float)of_expert[c];
    sum = warp_sum(sum);
    if (lane == 0) dweights[bias.choices[slot]] += sum;
}

// Threads for a row of `columns` numbers.
inline int threads_of_row(int columns) { return std::min(expert_threads, round_up(ceil_div(columns, Pack<floatX>::size), 32)); }
template <class... T>
bool packs_of_rows(int columns, const T*... p) {
    return columns % Pack<floatX>::size == 0 && aligned_16(p...);
}

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline void router_logits(Ctx& ctx, real* logits, const floatX* inp, const floatX* weight, const floatX* bias,
                          const MixtureShape& shape, int C) {
    const GemmPointers p = {logits, weight, inp};
    GemmKey key = detail::forward_key(p, shape.N(), C, shape.E, CUBLASLT_EPILOGUE_DEFAULT);
    key.d = cublas_type<real>();
    detail::gemm(ctx, p, key);
    const size_t n = (size_t)shape.N() * shape.E;
    if (bias) LAUNCH(detail::add_bias_kernel, (unsigned)ceil_div(n, 256), 256, 0, ctx, logits, bias, n, shape.E);
}

inline void sort_choices(Ctx& ctx, const Routing& r, const MixtureShape& shape, int first_expert) {
    const int parts = ceil_div(shape.T * shape.K, detail::choices_part);
    int* counts = (int*)ctx.scratch(sizeof(int) * (size_t)shape.B * parts * shape.E);
    const dim3 grid(parts, shape.B);
    LAUNCH(detail::sort_choices_kernel<false>, grid, detail::choices_threads, 0, ctx, counts, r, shape, first_expert);
    LAUNCH(detail::scan_choices_kernel, 1, 1024, 0, ctx, counts, r, shape.B, parts, shape.E);
    LAUNCH(detail::sort_choices_kernel<true>, grid, detail::choices_threads, 0, ctx, counts, r, shape, first_expert);
}

inline void route(Ctx& ctx, const Routing& r, const MixtureShape& shape, const RouterRule& rule) {
    CHECK(shape.K <= shape.E, "%d choices of %d experts", shape.K, shape.E);
    const int N = shape.N();
    LAUNCH(detail::choose_experts_kernel, ceil_div(N, detail::router_warps), 32 * detail::router_warps, 0, ctx, r, N, shape.E,
           shape.K, rule);
    sort_choices(ctx, r, shape, 0);
}

inline void router_backward(Ctx& ctx, real* dlogits, const real* dweights, const Routing& r, const MixtureShape& shape,
                            const RouterRule& rule, const RouterLossFactors& factors) {
    LAUNCH(detail::router_backward_kernel, ceil_div(shape.N(), detail::router_warps), 32 * detail::router_warps, 0, ctx,
           dlogits, dweights, r, shape, rule, (float)(factors.balance * shape.balance_factor()), factors.z);
}

inline void router_sums(Ctx& ctx, double* sums, const Routing& r, const MixtureShape& shape, const RouterRule& rule) {
    const int blocks = std::min(512, ceil_div(shape.N(), detail::router_warps));
    double* partial = (double*)ctx.scratch(sizeof(double) * 2 * (size_t)blocks);
    LAUNCH(detail::router_losses_kernel, blocks, 32 * detail::router_warps, 0, ctx, partial, r, shape, rule.sigmoid);
    LAUNCH(detail::add_router_sums_kernel, 1, 256, 0, ctx, sums, partial, blocks, r.counts, shape.B, shape.E,
           shape.balance_factor());
}

inline void router_backward_input(Ctx& ctx, floatX* dinp, const real* dlogits, const floatX* weight, const MixtureShape& shape,
                                  int C) {
    using namespace detail;
    const int E = shape.E;
    simple_product<false, true>(ctx, Sums<floatX>{dinp, C, true}, Factor<real>{dlogits, E}, Factor<floatX>{weight, C},
                                TilesOfParts{shape.N(), E, E});
}

inline void router_backward_weight(Ctx& ctx, real* dweight, const real* dlogits, const floatX* inp, const MixtureShape& shape,
                                   int C, Acc acc) {
    using namespace detail;
    const int N = shape.N(), E = shape.E;
    // As many parts as fill the GPU twice, of at least 256 rows.
    const int tiles = ceil_div(E, simple_tile) * ceil_div(C, simple_tile);
    const int wanted = std::max(1, 2 * ctx.multiprocessors / tiles);
    const int of_part = std::max(256, ceil_div(N, wanted)), parts = ceil_div(N, of_part);
    const size_t n = (size_t)E * C;
    real* partial = parts == 1 ? dweight : (real*)ctx.scratch(sizeof(real) * n * (size_t)parts);
    simple_product<true, true>(ctx, Sums<real>{partial, C, parts == 1 && acc == Acc::Add}, Factor<real>{dlogits, E},
                               Factor<floatX>{inp, C}, TilesOfParts{E, N, of_part});
    if (parts == 1) return;
    if (acc == Acc::Set) clear(ctx, dweight, sizeof(real) * n);
    add_rows(ctx, dweight, nullptr, nullptr, partial, parts, (int)n);
}

inline void router_backward_bias(Ctx& ctx, real* dbias, const real* dlogits, const MixtureShape& shape) {
    detail::add_rows(ctx, dbias, nullptr, nullptr, dlogits, shape.N(), shape.E);
}

inline void expert_linear_forward(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight, const ExpertBias& bias,
                                  const ExpertGroups& groups, int IC, int OC, Acc acc) {
    using namespace detail;
    grouped_product<false, false>(ctx, Sums<floatX>{out, OC, acc == Acc::Add, bias}, factor_of(inp, groups, IC), {weight, IC},
                                  TilesOfExperts{groups, IC, (size_t)OC * IC});
}

inline void expert_linear_backward_input(Ctx& ctx, floatX* dinp, const ExpertRows& dout, const floatX* weight,
                                         const ExpertGroups& groups, int IC, int OC, Acc acc) {
    using namespace detail;
    grouped_product<false, true>(ctx, Sums<floatX>{dinp, IC, acc == Acc::Add}, factor_of(dout, groups, OC), {weight, IC},
                                 TilesOfExperts{groups, OC, (size_t)OC * IC});
}

inline void expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout, const ExpertRows& inp,
                                          const ExpertGroups& groups, int IC, int OC, Acc acc) {
    using namespace detail;
    CHECK(dweight.row % OC == 0 ? dweight.rows <= OC || dweight.rows % OC == 0 : dweight.row % OC + dweight.rows <= OC,
          "rows %d .. %d of experts of %d rows", dweight.row, dweight.row + dweight.rows, OC);
    grouped_product<true, true>(ctx, Sums<real>{dweight.x, IC, acc == Acc::Add}, factor_of(dout, groups, OC),
                                factor_of(inp, groups, IC), TilesOfMatrices{groups.offsets, dweight.row, dweight.rows, OC});
}

inline void expert_bias_backward(Ctx& ctx, real* dbias, const ExpertRows& dout, const ExpertBias& bias,
                                 const ExpertGroups& groups, int OC) {
    LAUNCH(detail::expert_bias_kernel, dim3(ceil_div(OC, 32), groups.E), dim3(32, 32), 0, ctx, dbias, dout, bias,
           groups.offsets, OC);
}

inline void expert_bias_backward_weights(Ctx& ctx, real* dweights, const ExpertRows& dout, const ExpertBias& bias,
                                         const ExpertGroups& groups, int OC) {
    const int blocks = ceil_div(groups.slots, detail::router_warps);
    LAUNCH(detail::expert_bias_weights_kernel, blocks, 32 * detail::router_warps, 0, ctx, dweights, dout, bias, groups, OC);
}

inline void expert_activation_forward(Ctx& ctx, floatX* out, const floatX* inp, const Routing& r, const MixtureShape& shape,
                                      int F, Activation activation) {
    const bool packed = detail::packs_of_rows(F, out, inp);
    const auto with = [&](auto act) {
        using Act = decltype(act);
        const auto kernel = packed ? detail::expert_activation_kernel<true, Act> : detail::expert_activation_kernel<false, Act>;
        LAUNCH(kernel, shape.slots(), detail::threads_of_row(F), 0, ctx, out, inp, r, r.offsets + shape.E, F);
    };
    with_activation(
        activation, [&](auto act) { with(detail::PlainActivation<decltype(act)>()); },
        [&](auto act) { with(detail::GatedActivation<decltype(act)>()); });
}

inline void expert_activation_backward(Ctx& ctx, floatX* dinp, real* dweights, const floatX* dout, const floatX* inp,
                                       const Routing& r, const MixtureShape& shape, int F, Activation activation) {
    const bool packed = detail::packs_of_rows(F, dinp, dout, inp);
    const auto with = [&](auto act) {
        using Act = decltype(act);
        const auto kernel = packed ? detail::expert_activation_backward_kernel<true, Act>
                                   : detail::expert_activation_backward_kernel<false, Act>;
        LAUNCH(kernel, shape.slots(), detail::threads_of_row(F), 0, ctx, dinp, dweights, dout, inp, r, r.offsets + shape.E, F);
    };
    with_activation(
        activation, [&](auto act) { with(detail::PlainActivation<decltype(act)>()); },
        [&](auto act) { with(detail::GatedActivation<decltype(act)>()); });
}

inline void expert_dropout(Ctx& ctx, floatX* out, const floatX* inp, const ExpertRows& rows, const ExpertGroups& groups,
                           int columns, const Dropout& dropout, Acc acc) {
    LAUNCH(detail::expert_dropout_kernel, groups.slots, detail::expert_threads, 0, ctx, out, inp, rows,
           groups.offsets + groups.E, columns, dropout, acc == Acc::Add);
}

inline void expert_combine(Ctx& ctx, floatX* out, const floatX* inp, const Routing& r, const MixtureShape& shape, int C) {
    const auto kernel =
        detail::packs_of_rows(C, out, inp) ? detail::expert_combine_kernel<true> : detail::expert_combine_kernel<false>;
    LAUNCH(kernel, shape.N(), detail::threads_of_row(C), 0, ctx, out, inp, r.slots, shape.K, C);
}

}  // namespace gpu
