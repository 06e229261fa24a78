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

// Scores of a row, recomputed whenever needed, so that any number of experts works. All lanes of a warp compute one together.
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

struct Candidate {
    float value;
    int expert;
};
// Among experts first, first + step, ... below `end`: the first after `last` in the order of decreasing value, then of
// increasing index; its expert is `end` if there is none. NaN counts as -infinity.
template <class Value>
__device__ __forceinline__ Candidate next_best(Value value_of, int first, int end, int step, const Candidate& last) {
    Candidate best = {0, end};
    for (int e = first; e < end; e += step) {
        float value = value_of(e);
        if (value != value) value = -INFINITY;
        const bool after = value < last.value || (value == last.value && e > last.expert);
        if (after && (best.expert == end || value > best.value)) best = {value, e};
    }
    return best;
}

// The best groups of experts, a bit each, in every lane: lane g adds up the largest values of group g.
template <class Value>
__device__ uint32_t best_groups(Value value_of, int E, int K, const RouterRule& rule) {
    const int lane = threadIdx.x % 32, each = E / rule.groups;
    float sum = 0;
    Candidate last = {INFINITY, -1};
    for (int i = 0; i < K / rule.group_topk && lane < rule.groups; i++) {
        last = next_best(value_of, lane * each, (lane + 1) * each, 1, last);
        sum += last.value;
    }
    if (sum != sum) sum = -INFINITY;
    int better = 0;
    for (int g = 0; g < rule.groups; g++) {
        const float other = __shfl_sync(all_lanes, sum, g);
        better += other > sum || (other == sum && g < lane);
    }
    return __ballot_sync(all_lanes, lane < rule.groups && better < rule.group_topk);
}

// The k-th choice is the best expert after the previous one in the order of decreasing score (without a bias, of decreasing
// logit), then increasing index. Without NaN, experts outside the best groups are never chosen; with it, K different ones are.
__global__ void __launch_bounds__(32 * router_warps) choose_experts_kernel(Routing r, int N, int E, int K, RouterRule rule) {
    const int row = row_of_warp(), lane = threadIdx.x % 32;
    if (row >= N) return;
    const RowScores scores(r.logits + (size_t)row * E, E, rule.sigmoid);
    const auto logit = [&](int e) { return r.logits[(size_t)row * E + e]; };
    const auto biased = [&](int e) { return scores.of(e) + (rule.bias ? rule.bias[e] : 0); };
    uint32_t groups = ~0u;
    if (rule.groups > 1) groups = rule.groups_by_scores() ? best_groups(biased, E, K, rule) : best_groups(logit, E, K, rule);
    const int each = E / rule.groups;
    const auto value_of = [&](int e) {
        if (rule.groups > 1 && !(groups >> (e / each) & 1)) return -INFINITY;
        return rule.bias ? biased(e) : logit(e);
    };
    float sum = 0;
    Candidate last = {INFINITY, -1};
    for (int k = 0; k < K; k++) {
        Candidate best = next_best(value_of, lane, E, 32, last);
        best.expert = min(best.expert, E);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const Candidate other = {__shfl_xor_sync(all_lanes, best.value, offset),
                                     __shfl_xor_sync(all_lanes, best.expert, offset)};
            const bool better =
                best.expert == E || other.value > best.value || (other.value == best.value && other.expert < best.expert);
            if (other.expert < E && better) best = other;
        }
        last = best;
        const float weight = scores.of(best.expert);
        sum += weight;
        if (lane != k % 32) continue;  // the lane that scales it below
        r.experts[(size_t)row * K + k] = best.expert;
        r.weights[(size_t)row * K + k] = weight;
    }
    const float factor = rule.normalize ? rule.scale / (sum + smallest_scores_sum) : rule.scale;
    for (int k = lane; k < K; k += 32) r.weights[(size_t)row * K + k] *= factor;
}

// A row's part of a router's sums, the balance loss without E / (K T^2).
struct RowSums {
    double balance = 0, z = 0, entropy = 0;
};

// A row's gradient of the logits, and, with `sums`, its sums. With scores s, weights w_k = scale s_k / S where S is the sum
// over chosen experts, or 1:
//   ds_k = scale / S (dw_k - sum_j dw_j s_j / S), without the second term if S is 1
// The balance loss adds c_e = factor E / (K T^2) counts_e to the gradient of p_e, where p = s, or s divided by its sum.
//   softmax: dlogit_e = s_e (ds_e - sum_i ds_i s_i)      sigmoid: dlogit_e = ds_e s_e (1 - s_e)
// The z loss adds 2 factor lse softmax(logits)_e. Dropped choices have dw_k = 0.
__device__ RowSums router_backward_row(real* dlogits, const real* drouting, int row, const Routing& r,
                                       const MixtureShape& shape, const RouterRule& rule, float balance, float z, bool sums) {
    const int lane = threadIdx.x % 32, E = shape.E, K = shape.K;
    const real* logits = r.logits + (size_t)row * E;
    const int *experts = r.experts + (size_t)row * K, *counts = r.counts + (size_t)(row / shape.T) * E;
    const RowScores scores(logits, E, rule.sigmoid);
    const RowScores::LogSum log_sum = RowScores::log_sum(logits, E);
    const auto dweight = [&](int k) {
        const size_t choice = (size_t)row * K + k;
        return r.slots[choice] < 0 ? 0.0f : drouting[choice];
    };

    float chosen = smallest_scores_sum, weighted = 0;  // sums of s_k, dw_k s_k
    for (int k = 0; k < K; k++) {
        const float s = scores.of(experts[k]);
        chosen += s;
        weighted += dweight(k) * s;
    }
    const float factor = rule.normalize ? rule.scale / chosen : rule.scale, shift = rule.normalize ? weighted / chosen : 0.0f;
    const float lse = log_sum.top + logf(log_sum.sum);
    float all = 0, counted = 0, entropy = 0;  // sums of s_e, counts_e s_e, - s_e log s_e
    for (int e = lane; e < E; e += 32) {
        const float s = scores.of(e);
        all += s;
        counted += (float)counts[e] * s;
        if (sums) entropy -= s * (rule.sigmoid ? logf(fmaxf(s, 1e-30f)) : logits[e] - lse);
    }
    all = rule.sigmoid ? warp_sum(all) + smallest_scores_sum : 1.0f;
    counted = warp_sum(counted) / all;
    const float mean = rule.sigmoid ? balance * counted : 0.0f;
    const auto dscore = [&](int e) {
        float d = (balance * (float)counts[e] - mean) / all;
        for (int k = 0; k < K; k++)
            if (experts[k] == e) d += factor * (dweight(k) - shift);
        return d;
    };
    float projection = 0;  // sum of ds_e s_e
    if (!rule.sigmoid)
        for (int e = lane; e < E; e += 32) projection += dscore(e) * scores.of(e);
    projection = warp_sum(projection);
    const float of_lse = 2 * z * lse / log_sum.sum;
    for (int e = lane; e < E; e += 32) {
        const float s = scores.of(e), d = rule.sigmoid ? dscore(e) * s * (1 - s) : s * (dscore(e) - projection);
        dlogits[(size_t)row * E + e] = d + of_lse * exp_of(logits[e] - log_sum.top);
    }
    if (!sums) return {};
    return {counted, (double)lse * lse, (double)(logf(all) + warp_sum(entropy) / all)};
}

// partial (gridDim.x): the sums of a block's rows; or null.
__global__ void __launch_bounds__(32 * router_warps)
    router_backward_kernel(real* dlogits, RowSums* partial, const real* drouting, Routing r, MixtureShape shape,
                           RouterRule rule, float balance, float z) {
    const int row = row_of_warp();
    RowSums sums;
    if (row < shape.N()) sums = router_backward_row(dlogits, drouting, row, r, shape, rule, balance, z, partial);
    if (!partial) return;
    if (threadIdx.x % 32 > 0) sums = {};  // all lanes of a warp have the same
    sums = {block_total(sums.balance), block_total(sums.z), block_total(sums.entropy)};
    if (threadIdx.x == 0) partial[blockIdx.x] = sums;
}
__global__ void __launch_bounds__(256)
    add_router_sums_kernel(double* sums, const RowSums* partial, int n, Routing r, MixtureShape shape) {
    const int E = shape.E;
    RowSums all;
    for (int i = threadIdx.x; i < n; i += 256) {
        all.balance += partial[i].balance;
        all.z += partial[i].z;
        all.entropy += partial[i].entropy;
    }
    all = {block_total(all.balance), block_total(all.z), block_total(all.entropy)};
    if (threadIdx.x == 0) {
        sums[RouterSums::balance] += shape.balance_factor() * all.balance;
        sums[RouterSums::z] += all.z;
        sums[RouterSums::entropy] += all.entropy;
        sums[RouterSums::dropped] += shape.slots() - r.offsets[E];
    }
    for (int e = threadIdx.x; e < E; e += 256) {
        int64_t rows = 0;
        for (int b = 0; b < shape.B; b++) rows += r.counts[(size_t)b * E + e];
        sums[RouterSums::rows + e] += (double)rows;
    }
}

// ---- sorting choices by expert ---------------------------------------------------------------------------------------------
constexpr int choices_part = 1024, choices_threads = 256;

// Block (part of a sequence, sequence). Without `places`, sets counts (B, parts, E): the number of each part's choices of each
// expert. With `places`, counts are the first slots of each part's choices of each expert; sets slots and choices.
// Experts are numbered from first_expert on; choices of others get no slot.
template <bool places>
__global__ void __launch_bounds__(choices_threads)
    sort_choices_kernel(int* counts, Routing r, MixtureShape shape, int first_expert, int parts) {
    __shared__ int experts[choices_part];
    const int of_sequence = shape.T * shape.K, sequence = (int)blockIdx.x / parts;
    const int part = (int)blockIdx.x % parts * choices_part, n = min(choices_part, of_sequence - part);
    const int first = sequence * of_sequence + part;
    for (int i = threadIdx.x; i < n; i += choices_threads) {
        const int e = experts[i] = r.experts[first + i] - first_expert;
        if (places && (e < 0 || e >= shape.E)) r.slots[first + i] = -1;
    }
    __syncthreads();
    counts += (size_t)blockIdx.x * shape.E;
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

// ---- a capacity ------------------------------------------------------------------------------------------------------------
constexpr int capacity_threads = 256;

// Slots have all choices. Sets kept (slots): whether an expert keeps the choice. Each choice counts the better ones.
__global__ void __launch_bounds__(capacity_threads) keep_choices_kernel(int* kept, Routing r, int E, RouterRule rule) {
    const int slot = blockIdx.x * capacity_threads + threadIdx.x;
    if (slot >= r.offsets[E]) return;
    const int e = r.experts[r.choices[slot]], first = r.offsets[e], end = r.offsets[e + 1];
    int better = slot - first;
    if (!rule.by_position && end - first > rule.capacity) {
        const auto weight_of = [&](int i) {
            const float w = r.weights[r.choices[i]];
            return w != w ? -INFINITY : w;
        };
        const float weight = weight_of(slot);
        better = 0;
        for (int i = first; i < end; i++) {
            const float other = weight_of(i);
            better += other > weight || (other == weight && i < slot);
        }
    }
    kept[slot] = better < rule.capacity;
}

// A block per expert. Sets r.slots, and in `choices` and `offsets` the new r.choices and r.offsets.
__global__ void __launch_bounds__(capacity_threads)
    place_kept_kernel(int* choices, int* offsets, const int* kept, Routing r, int E, int capacity) {
    __shared__ int of_warps[capacity_threads / 32], start;
    const int e = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    for (int i = threadIdx.x; i < e; i += capacity_threads) before += min(r.offsets[i + 1] - r.offsets[i], capacity);
    before = block_total(before);
    if (threadIdx.x == 0) offsets[e] = start = before;
    __syncthreads();
    const int end = r.offsets[e + 1];
    int next = start;
    for (int first = r.offsets[e]; first < end; first += capacity_threads) {
        const int slot = first + threadIdx.x;
        const bool keeps = slot < end && kept[slot];
        const uint32_t of_warp = __ballot_sync(all_lanes, keeps);
        if (lane == 0) of_warps[warp] = __popc(of_warp);
        __syncthreads();
        int to = next + __popc(of_warp & ((1u << lane) - 1));
        for (int w = 0; w < capacity_threads / 32; w++) {
            if (w < warp) to += of_warps[w];
            next += of_warps[w];
        }
        if (slot < end) r.slots[r.choices[slot]] = keeps ? to : -1;
        if (keeps) choices[to] = r.choices[slot];
        __syncthreads();
    }
    if (e == E - 1 && threadIdx.x == 0) offsets[E] = next;
}
__global__ void __launch_bounds__(capacity_threads)
    copy_kept_kernel(Routing r, const int* choices, const int* offsets, int slots, int E) {
    const int i = blockIdx.x * capacity_threads + threadIdx.x;
    if (i < slots && i < offsets[E]) r.choices[i] = choices[i];
    if (i <= E) r.offsets[i] = offsets[i];
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
    expert_activation_backward_kernel(floatX* dinp, real* drouting, const floatX* dout, const floatX* inp, Routing r,
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
    if (threadIdx.x == 0) drouting[choice] = dweight;
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

// A thread per number.
__global__ void __launch_bounds__(expert_threads)
    expert_combine_real_kernel(real* out, const real* inp, const int* slots, size_t n, int K, int columns) {
    const size_t i = (size_t)blockIdx.x * expert_threads + threadIdx.x, row = i / columns;
    if (i >= n) return;
    real sum = 0;
    for (int k = 0; k < K; k++) {
        const int slot = slots[row * K + k];
        if (slot >= 0) sum += inp[(size_t)slot * columns + i % columns];
    }
    out[i] = sum;
}

// ---- rows sent to other ranks ----------------------------------------------------------------------------------------------
// A thread per row.
__global__ void __launch_bounds__(expert_threads)
    ranks_of_experts_kernel(int* out, const int* experts, int N, int ranks, int K, int each) {
    const int row = (int)blockIdx.x * expert_threads + threadIdx.x;
    if (row < N) set_ranks(out + (size_t)row * ranks, ranks, experts + (size_t)row * K, K, each);
}

// A thread per choice.
__global__ void __launch_bounds__(expert_threads) kept_experts_kernel(int* out, Routing r, int n) {
    const int i = (int)blockIdx.x * expert_threads + threadIdx.x;
    if (i < n) out[i] = r.slots[i] < 0 ? -1 : r.experts[i];
}

// A block per row, of `units` numbers.
template <class Unit>
__global__ void __launch_bounds__(expert_threads)
    gather_rows_kernel(Unit* out, const Unit* inp, const int* choices, int K, size_t units) {
    out += (size_t)blockIdx.x * units;
    inp += (size_t)(choices[blockIdx.x] / K) * units;
    for (size_t i = threadIdx.x; i < units; i += blockDim.x) out[i] = inp[i];
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
    expert_bias_weights_kernel(real* drouting, ExpertRows dout, ExpertBias bias, ExpertGroups groups, int OC) {
    const int slot = row_of_warp(), lane = threadIdx.x % 32;
    if (slot >= groups.offsets[groups.E]) return;
    int e = 0;
    while (slot >= groups.offsets[e + 1]) e++;
    const floatX *const row = dout.x + dout.row(slot) * OC, *const of_expert = bias.x + (size_t)e * OC;
    float sum = 0;
    for (int c = lane; c < OC; c += 32) sum += (float)row[c] * (float)of_expert[c];
    sum = warp_sum(sum);
    if (lane == 0) drouting[bias.choices[slot]] += sum;
}

// Threads for a row of `columns` numbers.
inline int threads_of_row(int columns) { return std::min(expert_threads, round_up(ceil_div(columns, Pack<floatX>::size), 32)); }
template <class... T>
bool packs_of_rows(int columns, const T*... p) {
    return columns % Pack<floatX>::size == 0 && aligned_16(p...);
}

}  // namespace detail

namespace detail {
// Applies rule.capacity to slots that have all choices.
inline void drop_choices(Ctx& ctx, const Routing& r, const MixtureShape& shape, const RouterRule& rule) {
    const int slots = shape.slots(), E = shape.E;
    int* const kept = (int*)ctx.scratch(sizeof(int) * (2 * (size_t)slots + (size_t)E + 1));
    int *const choices = kept + slots, *const offsets = choices + slots;
    LAUNCH(keep_choices_kernel, ceil_div(slots, capacity_threads), capacity_threads, 0, ctx, kept, r, E, rule);
    LAUNCH(place_kept_kernel, E, capacity_threads, 0, ctx, choices, offsets, kept, r, E, rule.capacity);
    LAUNCH(copy_kept_kernel, ceil_div(std::max(slots, E + 1), capacity_threads), capacity_threads, 0, ctx, r, choices, offsets,
           slots, E);
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
    const int grid = parts * shape.B;
    LAUNCH(detail::sort_choices_kernel<false>, grid, detail::choices_threads, 0, ctx, counts, r, shape, first_expert, parts);
    LAUNCH(detail::scan_choices_kernel, 1, 1024, 0, ctx, counts, r, shape.B, parts, shape.E);
    LAUNCH(detail::sort_choices_kernel<true>, grid, detail::choices_threads, 0, ctx, counts, r, shape, first_expert, parts);
}

inline void route(Ctx& ctx, const Routing& r, const MixtureShape& shape, const RouterRule& rule) {
    CHECK(shape.K <= shape.E, "%d choices of %d experts", shape.K, shape.E);
    const int N = shape.N();
    LAUNCH(detail::choose_experts_kernel, ceil_div(N, detail::router_warps), 32 * detail::router_warps, 0, ctx, r, N, shape.E,
           shape.K, rule);
    sort_choices(ctx, r, shape, 0);
    if (rule.capacity) detail::drop_choices(ctx, r, shape, rule);
}

inline void router_backward(Ctx& ctx, real* dlogits, double* sums, const real* drouting, const Routing& r,
                            const MixtureShape& shape, const RouterRule& rule, const RouterLossFactors& factors) {
    using namespace detail;
    const int blocks = ceil_div(shape.N(), router_warps);
    auto* const partial = sums ? (RowSums*)ctx.scratch(sizeof(RowSums) * (size_t)blocks) : nullptr;
    LAUNCH(router_backward_kernel, blocks, 32 * router_warps, 0, ctx, dlogits, partial, drouting, r, shape, rule,
           (float)(factors.balance * shape.balance_factor()), factors.z);
    if (sums) LAUNCH(add_router_sums_kernel, 1, 256, 0, ctx, sums, partial, blocks, r, shape);
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

namespace detail {
inline void experts_forward(Ctx& ctx, const Sums<floatX>& out, const ExpertRows& inp, const floatX* weight,
                            const ExpertGroups& groups, int IC) {
    grouped_product<false, false>(ctx, out, factor_of(inp, groups, IC), {weight, IC},
                                  TilesOfExperts{groups, IC, (size_t)out.columns * IC});
}
inline void experts_backward_input(Ctx& ctx, const Sums<floatX>& dinp, const ExpertRows& dout, const floatX* weight,
                                   const ExpertGroups& groups, int OC) {
    grouped_product<false, true>(ctx, dinp, factor_of(dout, groups, OC), {weight, dinp.columns},
                                 TilesOfExperts{groups, OC, (size_t)OC * dinp.columns});
}
inline void experts_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout, const ExpertRows& inp,
                                    const Fp8Scales& scales, const ExpertGroups& groups, int IC, int OC, Acc acc) {
    CHECK(dweight.row % OC == 0 ? dweight.rows <= OC || dweight.rows % OC == 0 : dweight.row % OC + dweight.rows <= OC,
          "rows %d .. %d of experts of %d rows", dweight.row, dweight.row + dweight.rows, OC);
    grouped_product<true, true>(ctx, Sums<real>{dweight.x, IC, acc == Acc::Add, {}, scales}, factor_of(dout, groups, OC),
                                factor_of(inp, groups, IC), TilesOfMatrices{groups.offsets, dweight.row, dweight.rows, OC});
}
}  // namespace detail

inline void expert_linear_forward(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight, const ExpertBias& bias,
                                  const ExpertGroups& groups, int IC, int OC, Acc acc) {
    detail::experts_forward(ctx, {out, OC, acc == Acc::Add, bias}, inp, weight, groups, IC);
}

inline void expert_linear_backward_input(Ctx& ctx, floatX* dinp, const ExpertRows& dout, const floatX* weight,
                                         const ExpertGroups& groups, int IC, int OC, Acc acc) {
    detail::experts_backward_input(ctx, {dinp, IC, acc == Acc::Add}, dout, weight, groups, OC);
}

inline void expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout, const ExpertRows& inp,
                                          const ExpertGroups& groups, int IC, int OC, Acc acc) {
    detail::experts_backward_weight(ctx, dweight, dout, inp, {}, groups, IC, OC, acc);
}

// In FP8: the kernels for bf16, on the numbers of the codes.
inline void fp8_expert_linear_forward(Ctx& ctx, floatX* out, const ExpertRows& inp, const floatX* weight,
                                      const Fp8Scales& scales, const ExpertBias& bias, const ExpertGroups& groups, int IC,
                                      int OC) {
    detail::experts_forward(ctx, {out, OC, false, bias, scales}, inp, weight, groups, IC);
}

inline void fp8_expert_linear_backward_input(Ctx& ctx, floatX* dinp, const ExpertRows& dout, const floatX* weight,
                                             const Fp8Scales& scales, const ExpertGroups& groups, int IC, int OC) {
    detail::experts_backward_input(ctx, {dinp, IC, false, {}, scales}, dout, weight, groups, OC);
}

inline void fp8_expert_linear_backward_weight(Ctx& ctx, const StackedRows& dweight, const ExpertRows& dout,
                                              const ExpertRows& inp, const Fp8Scales& scales, const ExpertGroups& groups,
                                              int IC, int OC, Acc acc) {
    detail::experts_backward_weight(ctx, dweight, dout, inp, scales, groups, IC, OC, acc);
}

inline void expert_bias_backward(Ctx& ctx, real* dbias, const ExpertRows& dout, const ExpertBias& bias,
                                 const ExpertGroups& groups, int OC) {
    LAUNCH(detail::expert_bias_kernel, dim3(ceil_div(OC, 32), groups.E), dim3(32, 32), 0, ctx, dbias, dout, bias,
           groups.offsets, OC);
}

inline void expert_bias_backward_routing(Ctx& ctx, real* drouting, const ExpertRows& dout, const ExpertBias& bias,
                                         const ExpertGroups& groups, int OC) {
    const int blocks = ceil_div(groups.slots, detail::router_warps);
    LAUNCH(detail::expert_bias_weights_kernel, blocks, 32 * detail::router_warps, 0, ctx, drouting, dout, bias, groups, OC);
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

inline void expert_activation_backward(Ctx& ctx, floatX* dinp, real* drouting, const floatX* dout, const floatX* inp,
                                       const Routing& r, const MixtureShape& shape, int F, Activation activation) {
    const bool packed = detail::packs_of_rows(F, dinp, dout, inp);
    const auto with = [&](auto act) {
        using Act = decltype(act);
        const auto kernel = packed ? detail::expert_activation_backward_kernel<true, Act>
                                   : detail::expert_activation_backward_kernel<false, Act>;
        LAUNCH(kernel, shape.slots(), detail::threads_of_row(F), 0, ctx, dinp, drouting, dout, inp, r, r.offsets + shape.E, F);
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
inline void expert_combine_real(Ctx& ctx, real* out, const real* inp, const Routing& r, const MixtureShape& shape,
                                int columns) {
    const size_t n = (size_t)shape.N() * columns;
    LAUNCH(detail::expert_combine_real_kernel, (unsigned)ceil_div(n, (size_t)detail::expert_threads), detail::expert_threads, 0,
           ctx, out, inp, r.slots, n, shape.K, columns);
}

inline void ranks_of_experts(Ctx& ctx, int* out, const int* experts, const MixtureShape& ranks, int K, int each) {
    LAUNCH(detail::ranks_of_experts_kernel, ceil_div(ranks.N(), detail::expert_threads), detail::expert_threads, 0, ctx, out,
           experts, ranks.N(), ranks.K, K, each);
}

inline void kept_experts(Ctx& ctx, int* out, const Routing& r, const MixtureShape& shape) {
    const int n = shape.N() * shape.K;
    LAUNCH(detail::kept_experts_kernel, ceil_div(n, detail::expert_threads), detail::expert_threads, 0, ctx, out, r, n);
}

inline void gather_rows(Ctx& ctx, void* out, const void* inp, const int* choices, int K, int n, size_t row_bytes) {
    if (n == 0) return;
    const auto in_units_of = [&](auto unit) {
        using Unit = decltype(unit);
        LAUNCH((detail::gather_rows_kernel<Unit>), n, detail::expert_threads, 0, ctx, (Unit*)out, (const Unit*)inp, choices, K,
               row_bytes / sizeof(Unit));
    };
    if ((row_bytes | (uintptr_t)out | (uintptr_t)inp) % sizeof(uint4) == 0) in_units_of(uint4());
    else in_units_of(uint16_t());
}

}  // namespace gpu
