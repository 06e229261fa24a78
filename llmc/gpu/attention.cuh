// Causal flash attention with grouped queries, ALiBi and document masks on the GPU: dispatch to the implementations, and
// decoding. The definition and its derivatives are in llmc/cpu/attention.h. No implementation stores a T x T matrix; all are
// deterministic, except attention_hopper_backward.cuh with dq_sums:
//   attention_simple.cuh   any head size up to 256, both precisions, no tensor cores
//   attention_mma.cuh      bf16, MmaHeads (shapes.h); tensor cores of capability 8.0 and later
//   attention_hopper.cuh   bf16, HopperHeads; wgmma, TMA and warp specialization of capability 9.0
// Each supports soft caps and dropout. attention_kernels (shapes.h) chooses.
// Scratch: backward keeps 16 bytes per row and head, Hopper's 12.
//
// Decoding attends from one new token per sequence. A block computes one query head; groups of lanes, just enough to hold a row
// of the cache in 16-byte packs, each process every n-th key with their own running maximum and sum, with several loads in
// flight; the groups are merged at the end, in a fixed order. Bound by reading the caches: 2 t NKV HS elements, if the heads of
// a group share keys through the L2 cache. A single sequence with few heads occupies few multiprocessors (the keys of a head
// are not split over blocks), which matters only for large t. Not yet measured on a GPU.
#pragma once
#include <string>

#include "attention_simple.cuh"
#ifndef PRECISION_FP32
#include "attention_hopper_backward.cuh"
#include "attention_mma.cuh"
#include "rope.cuh"
#endif

namespace gpu {

constexpr int attention_largest_head = 256;

inline std::string attention_limits(int HS) {
    if (HS <= attention_largest_head) return "";
    return format("head size %d exceeds %d, the maximum for attention on the GPU", HS, attention_largest_head);
}

inline AttentionKernels choose_attention(const Ctx& ctx, const AttentionShape& shape) {
    const bool in_bf16 = std::is_same<floatX, bf16>::value;
    return ctx.plain ? AttentionKernels::simple : attention_kernels(shape.HS, ctx.capability, in_bf16);
}

inline void check_attention_shape(const AttentionShape& a) {
    const std::string wrong = attention_limits(a.HS);
    if (!wrong.empty()) fail("%s", wrong.c_str());
    CHECK(a.B > 0 && a.T > 0 && a.HS > 0 && a.NKV > 0 && a.NH > 0 && a.NH % a.NKV == 0, "B %d, T %d, NH %d, NKV %d, HS %d", a.B,
          a.T, a.NH, a.NKV, a.HS);
    CHECK(a.scale > 0, "the largest score is looked for before scaling");
}

// Some rows: not with the kernels for Hopper, which read queries, keys and values from one tensor.
inline void attention_rows_forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const floatX* kv,
                                   const AttentionMask& mask, const AttentionShape& shape) {
    check_attention_shape(shape);
#ifndef PRECISION_FP32
    const bool mma = choose_attention(ctx, shape) != AttentionKernels::simple;
    CHECK(!mma || aligned_16(out, qkv, kv), "rows are moved 16 bytes at a time");
    if (mma) return attention_forward_mma(ctx, out, lse, qkv, kv, mask, shape);
#endif
    attention_forward_simple(ctx, out, lse, qkv, kv, mask, shape);
}
inline void attention_rows_backward(Ctx& ctx, floatX* dqkv, floatX* dkv, const floatX* dout, const AttentionActs& acts,
                                    const AttentionMask& mask, const AttentionShape& shape) {
    check_attention_shape(shape);
#ifndef PRECISION_FP32
    const bool mma = choose_attention(ctx, shape) != AttentionKernels::simple;
    CHECK(!mma || aligned_16(dqkv, dkv, dout, acts.out, acts.qkv, acts.keys()), "rows are moved 16 bytes at a time");
    if (mma) return attention_backward_mma(ctx, dqkv, dkv, dout, acts, mask, shape);
#endif
    attention_backward_simple(ctx, dqkv, dkv, dout, acts, mask, shape);
}

inline void attention_forward(Ctx& ctx, floatX* out, real* lse, const floatX* qkv, const AttentionMask& mask,
                              const AttentionShape& shape) {
    check_attention_shape(shape);
#ifndef PRECISION_FP32
    const AttentionKernels kernels = choose_attention(ctx, shape);
    CHECK(kernels == AttentionKernels::simple || aligned_16(out, qkv), "rows are moved 16 bytes at a time");
    if (kernels == AttentionKernels::hopper) return attention_forward_hopper(ctx, out, lse, qkv, mask, shape);
    if (kernels == AttentionKernels::mma) return attention_forward_mma(ctx, out, lse, qkv, qkv, mask, shape);
#endif
    attention_forward_simple(ctx, out, lse, qkv, qkv, mask, shape);
}

inline size_t attention_sums([[maybe_unused]] const Ctx& ctx, [[maybe_unused]] const AttentionShape& shape) {
#ifndef PRECISION_FP32
    if (choose_attention(ctx, shape) == AttentionKernels::hopper && !shape.capped_or_dropped())
        return attention_hopper_sums(shape);
#endif
    return 0;
}

inline size_t attention_scratch(const Ctx&, const AttentionShape&) { return 0; }

inline void attention_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const AttentionActs& acts, const AttentionMask& mask,
                               const AttentionShape& shape, real* dq_sums) {
    check_attention_shape(shape);
    CHECK(!dq_sums || attention_sums(ctx, shape) > 0, "head size %d on capability %d", shape.HS, ctx.capability);
#ifndef PRECISION_FP32
    const AttentionKernels kernels = choose_attention(ctx, shape);
    CHECK(kernels == AttentionKernels::simple || aligned_16(dqkv, dout, acts.out, acts.qkv),
          "rows are moved 16 bytes at a time");
    if (kernels == AttentionKernels::hopper)
        return attention_backward_hopper(ctx, dqkv, dout, acts.out, acts.lse, acts.qkv, mask, shape, dq_sums);
    if (kernels == AttentionKernels::mma) return attention_backward_mma(ctx, dqkv, dqkv, dout, acts, mask, shape);
#endif
    attention_backward_simple(ctx, dqkv, dqkv, dout, acts, mask, shape);
}

inline void attention_rope_backward(Ctx& ctx, floatX* dqkv, const floatX* dout, const AttentionActs& acts,
                                    const AttentionMask& mask, const Rope& rope, const AttentionShape& shape, real* dq_sums) {
    attention_backward(ctx, dqkv, dout, acts, mask, shape, dq_sums);
    rope_backward(ctx, dqkv, rope, shape);
}

// ---- decoding --------------------------------------------------------------------------------------------------------------
constexpr int decode_warps = 8, decode_batch = 4;  // keys in flight per group of lanes

template <bool packed>
__global__ void __launch_bounds__(32 * decode_warps, 1)
    attention_decode_kernel(floatX* out, floatX* keys, floatX* values, const floatX* qkv, DecodeMask mask, int P,
                            AttentionShape a, int lanes) {
    constexpr int size = Pack<floatX>::size;
    constexpr int packs = attention_largest_head / (32 * size);  // packs per lane, if all 32 share a row
    constexpr int U = decode_batch;
    const int group_lane = threadIdx.x % lanes, NH = a.NH, NKV = a.NKV, HS = a.HS;
    const int h = blockIdx.x % NH, b = blockIdx.x / NH, g = h / (NH / NKV), t = mask.t[b];
    const size_t begin = (size_t)mask.sequences[b] * P;
    const floatX* token = qkv + (size_t)b * (NH + 2 * NKV) * HS;
    const floatX *new_key = token + (size_t)(NH + g) * HS, *new_value = new_key + (size_t)NKV * HS;
    // One block per key/value head writes the new row; the other blocks of its group read it from the token, so they need not
    // wait.
    const auto cached = [&](int j) { return ((begin + j) * NKV + g) * HS; };
    if (h % (NH / NKV) == 0)
        for (int c = threadIdx.x; c < HS; c += blockDim.x)
            keys[cached(t) + c] = new_key[c], values[cached(t) + c] = new_value[c];

    float q[packs][size], o[packs][size] = {}, top = -INFINITY, sum = 0;
    const auto load_row = [&](Pack<floatX>(&x)[packs], const floatX* row) {
#pragma unroll
        for (int i = 0; i < packs; i++) x[i] = load_part<packed>(row, (group_lane + i * lanes) * size, HS);
    };
    Pack<floatX> query[packs];
    load_row(query, token + (size_t)h * HS);
#pragma unroll
    for (int i = 0; i < packs; i++)
#pragma unroll
        for (int k = 0; k < size; k++) q[i][k] = a.scale * (float)query[i][k];
    const float slope = mask.slopes ? mask.slopes[h] : 0.0f;

    const int groups = 32 * decode_warps / lanes, group = (int)threadIdx.x / lanes;
    for (int j0 = mask.first(b); j0 <= t; j0 += U * groups) {  // all lanes of a warp loop together: they exchange partial sums
        Pack<floatX> key[U][packs], value[U][packs];
#pragma unroll
        for (int n = 0; n < U; n++) {
            const int j = min(j0 + n * groups + group, t);
            load_row(key[n], j < t ? keys + cached(j) : new_key);
            load_row(value[n], j < t ? values + cached(j) : new_value);
        }
#pragma unroll
        for (int n = 0; n < U; n++) {
            const int j = j0 + n * groups + group;
            float s = 0;
#pragma unroll
            for (int i = 0; i < packs; i++)
#pragma unroll
                for (int k = 0; k < size; k++) s += q[i][k] * (float)key[n][i][k];
            for (int offset = lanes / 2; offset > 0; offset /= 2) s += __shfl_xor_sync(all_lanes, s, offset);
            if (j > t) continue;
            if (a.softcap > 0) s = soft_cap(s, a.softcap);
            s += slope * (float)(j - t);
            const float highest = fmaxf(top, s), rescale = exp_real(top - highest), p = exp_real(s - highest);
            sum = sum * rescale + p;
            top = highest;
#pragma unroll
            for (int i = 0; i < packs; i++)
#pragma unroll
                for (int k = 0; k < size; k++) o[i][k] = o[i][k] * rescale + p * (float)value[n][i][k];
        }
    }

    // Merges the sums of all groups, element by element.
    DYNAMIC_SHARED(float, shared);
    float *tops = shared, *sums = tops + groups, *outs = sums + groups;
    if (group_lane == 0) {
        tops[group] = top;
        sums[group] = sum;
    }
#pragma unroll
    for (int i = 0; i < packs; i++)
#pragma unroll
        for (int k = 0; k < size; k++) {
            const int c = (group_lane + i * lanes) * size + k;
            if (c < HS) outs[group * HS + c] = o[i][k];
        }
    __syncthreads();
    const float sink = mask.sinks ? (float)mask.sinks[h] : -INFINITY;
    float highest = sink;
    for (int i = 0; i < groups; i++) highest = fmaxf(highest, tops[i]);
    float total = exp_real(sink - highest);
    for (int i = 0; i < groups; i++) total += sums[i] * exp_real(tops[i] - highest);
    for (int c = threadIdx.x; c < HS; c += blockDim.x) {
        float x = 0;
        for (int i = 0; i < groups; i++) x += outs[i * HS + c] * exp_real(tops[i] - highest);
        out[((size_t)b * NH + h) * HS + c] = (floatX)(x / total);
    }
}

inline void attention_decode(Ctx& ctx, floatX* out, const AttentionCache& cache, const floatX* qkv, const DecodeMask& mask,
                             const AttentionShape& shape) {
    check_attention_shape(shape);
    CHECK(shape.T == 1, "%d new tokens of each sequence", shape.T);
    const int lanes = lanes_of_row(shape.HS), groups = 32 * decode_warps / lanes;
    const size_t bytes = sizeof(float) * (size_t)groups * (shape.HS + 2);
    const unsigned blocks = (unsigned)shape.B * (unsigned)shape.NH;
    const bool packed = shape.HS % Pack<floatX>::size == 0 && aligned_16(cache.keys, cache.values, qkv);
    const auto kernel = packed ? attention_decode_kernel<true> : attention_decode_kernel<false>;
    LAUNCH(kernel, blocks, 32 * decode_warps, bytes, ctx, out, cache.keys, cache.values, qkv, mask, cache.P, shape, lanes);
}

// ---- sinks -----------------------------------------------------------------------------------------------------------------
// As many lanes as hold a head in packs process a row of a head.
template <bool packed>
__global__ void __launch_bounds__(256) sinks_kernel(floatX* out, float* lse, const floatX* sinks, AttentionShape a, int lanes) {
    const size_t row = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    const bool there = row < (size_t)a.N() * a.NH;
    const int lane = threadIdx.x % lanes, h = (int)(row % a.NH), b = (int)(row / a.NH / a.T), t = (int)(row / a.NH % a.T);
    const float log_sum = there ? lse[a.statistic(b, t, h)] : 0.0f, sink = (float)sinks[h], top = fmaxf(log_sum, sink);
    const float with_sink = top + logf(exp_real(log_sum - top) + exp_real(sink - top)), factor = exp_real(log_sum - with_sink);
    constexpr int size = Pack<floatX>::size;
    for (int c = lane * size; there && c < a.HS; c += lanes * size) {
        Pack<floatX> x = load_part<packed>(out + row * a.HS, c, a.HS);
#pragma unroll
        for (int k = 0; k < size; k++) x[k] = (floatX)((float)x[k] * factor);
        store_part<packed>(out + row * a.HS, c, a.HS, x);
    }
    __syncwarp();  // all lanes of the row have read its lse
    if (there && lane == 0) lse[a.statistic(b, t, h)] = with_sink;
}

// A block sums over the rows of a head.
__global__ void __launch_bounds__(1024) sinks_backward_kernel(float* dsinks, const floatX* dout, const floatX* out,
                                                              const float* lse, const floatX* sinks, AttentionShape a) {
    const int h = blockIdx.x, lane = threadIdx.x % 32;
    const float sink = (float)sinks[h];
    float sum = 0;
    for (int row = threadIdx.x / 32; row < a.N(); row += 32) {
        const int b = row / a.T, t = row % a.T;
        const size_t at = a.output(b, t, h);
        float product = 0;
        for (int c = lane; c < a.HS; c += 32) product += (float)dout[at + c] * (float)out[at + c];
        sum += exp_real(sink - lse[a.statistic(b, t, h)]) * product;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) dsinks[h] -= sum;
}

inline void sinks_forward(Ctx& ctx, floatX* out, real* lse, const floatX* sinks, const AttentionShape& shape) {
    const int lanes = lanes_of_row(shape.HS);
    const bool packed = shape.HS % Pack<floatX>::size == 0 && aligned_16(out);
    const auto kernel = packed ? sinks_kernel<true> : sinks_kernel<false>;
    const size_t threads = (size_t)shape.N() * shape.NH * lanes;
    LAUNCH(kernel, (unsigned)ceil_div(threads, 256), 256, 0, ctx, out, lse, sinks, shape, lanes);
}

inline void sinks_backward(Ctx& ctx, real* dsinks, const floatX* dout, const AttentionActs& acts, const floatX* sinks,
                           const AttentionShape& shape) {
    LAUNCH(sinks_backward_kernel, shape.NH, 1024, 0, ctx, dsinks, dout, acts.out, acts.lse, sinks, shape);
}

}  // namespace gpu
