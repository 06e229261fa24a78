// Ladder: AdamW, one step of the optimizer for every parameter.
//   g = grad_scale * grad,  m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,
//   w -= lr (m/c1 / (sqrt(v/c2) + eps) + decay w)                                 c1 = 1 - b1^step, c2 = 1 - b2^step
// (llmc/cpu/optimizer.h; Loshchilov & Hutter, 2019), w in two halves of 16 bits, whose upper one is the bf16 parameter. 16
// bytes are read (grad, m, v, w) and 12 written (m, v, w) for about 20 operations: bound by memory bandwidth, 28 bytes per
// parameter.
//
//   1  a launch for each line of the formula   m and v travel through memory again between launches: 40 bytes
//   2  fused: one pass                         28 bytes; 2- and 4-byte loads, and some wait for a store: the compiler
//                                              must assume that the arrays overlap
//   3  packs: 8 elements of a thread           16-byte loads, eight of them before the first use
//   4  the trainer's                           the same, also for arrays that are not aligned
#include "../../llmc/cpu/optimizer.h"
#include "../../llmc/gpu/optimizer.cuh"
#include "ladder.h"

namespace {

using gpu::load, gpu::Pack, gpu::store;
constexpr int threads = 256;

struct Constants {
    float lr, beta1, beta2, eps, decay, grad_scale, correct1, correct2;  // correct: 1/c1, 1/c2
};

// ---- 1: a launch for each line of the formula ------------------------------------------------------------------------------
__global__ void update_m(float* m, const float* grad, size_t n, Constants a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] = a.beta1 * m[i] + (1 - a.beta1) * (a.grad_scale * grad[i]);
}
__global__ void update_v(float* v, const float* grad, size_t n, Constants a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const float g = i < n ? a.grad_scale * grad[i] : 0;
    if (i < n) v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
}
__global__ void update_weight(floatX* param, LowerHalf* lower, const float* m, const float* v, size_t n, Constants a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float w = load_weight(param, lower, i);
    store_weight(param, lower, i, w - a.lr * (m[i] * a.correct1 / (sqrtf(v[i] * a.correct2) + a.eps) + a.decay * w));
}

// ---- 2: one pass -----------------------------------------------------------------------------------------------------------
__device__ void update(float& w, float& m, float& v, float grad, const Constants& a) {
    const float g = a.grad_scale * grad;
    m = a.beta1 * m + (1 - a.beta1) * g;
    v = a.beta2 * v + (1 - a.beta2) * g * g;
    w -= a.lr * (m * a.correct1 / (sqrtf(v * a.correct2) + a.eps) + a.decay * w);
}
__device__ void update_at(floatX* param, LowerHalf* lower, float* m, float* v, const float* grad, size_t i,
                          const Constants& a) {
    float w = load_weight(param, lower, i);
    update(w, m[i], v[i], grad[i], a);
    store_weight(param, lower, i, w);
}
__global__ void fused(floatX* param, LowerHalf* lower, float* m, float* v, const float* grad, size_t n, Constants a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) update_at(param, lower, m, v, grad, i, a);
}

// ---- 3: packs --------------------------------------------------------------------------------------------------------------
__global__ void packed(floatX* param, LowerHalf* lower, float* m, float* v, const float* grad, size_t n, Constants a) {
    constexpr int size = Pack<float>::size, packs = 2, per_thread = size * packs;
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * per_thread;
    if (first + per_thread > n) {  // the last few
        for (size_t i = first; i < n; i++) update_at(param, lower, m, v, grad, i, a);
        return;
    }
    constexpr int param_size = Pack<floatX>::size;
    Pack<float> pm[packs], pv[packs], pg[packs];
    Pack<floatX> p[per_thread / param_size];
    Pack<LowerHalf> low = load(lower + first);
#pragma unroll
    for (int k = 0; k < per_thread; k += param_size) p[k / param_size] = load(param + first + k);
#pragma unroll
    for (int k = 0; k < packs; k++) {  // all loads come before the first value is used
        const size_t i = first + k * size;
        pm[k] = load(m + i);
        pv[k] = load(v + i);
        pg[k] = load(grad + i);
    }
#pragma unroll
    for (int k = 0; k < per_thread; k++) {
        floatX* const x = &p[k / param_size][k % param_size];
        float w = load_weight(x, &low[k], 0);
        update(w, pm[k / size][k % size], pv[k / size][k % size], pg[k / size][k % size], a);
        store_weight(x, &low[k], 0, w);
    }
#pragma unroll
    for (int k = 0; k < packs; k++) {
        store(m + first + k * size, pm[k]);
        store(v + first + k * size, pv[k]);
    }
#pragma unroll
    for (int k = 0; k < per_thread; k += param_size) store(param + first + k, p[k / param_size]);
    store(lower + first, low);
}

// ---- the ladder ------------------------------------------------------------------------------------------------------------
// eps is larger than in training, so that omitting it would be noticed.
constexpr float lr = 1e-2f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-3f, decay = 0.1f, grad_scale = 0.5f;
constexpr int64_t step = 3;

struct Problem {
    size_t n;
    std::vector<float> m0, v0, grad0;  // expected results, once cpu::adamw has run
    std::vector<floatX> param0;
    std::vector<LowerHalf> lower0;
    ladder::Array<float> m, v, grad;
    ladder::Array<floatX> param;
    ladder::Array<LowerHalf> lower;
    Constants constants{lr,
                        beta1,
                        beta2,
                        eps,
                        decay,
                        grad_scale,
                        (float)(1 / (1 - std::pow((double)beta1, (double)step))),
                        (float)(1 / (1 - std::pow((double)beta2, (double)step)))};

    Problem(ladder::Run& run, size_t size)
        : n(size),
          m0(ladder::random<float>(n, 2, -1, 1)),
          v0(ladder::random<float>(n, 3, 0.5, 1.5)),
          grad0(ladder::random<float>(n, 4, -2, 2)),
          param0(ladder::random<floatX>(n, 1, -1, 1)),
          lower0(n),
          m(m0),
          v(v0),
          grad(grad0),
          param(param0),
          lower(lower0) {
        cpu::adamw(run.oracle, param0.data(), lower0.data(), m0.data(), v0.data(), grad0.data(), n,
                   {lr, beta1, beta2, eps, decay, grad_scale, step}, {});
    }
    std::string name() const { return format("%zu parameters", n); }
    double work() const { return (double)n * 7 * sizeof(float); }
    void restore(gpu::Ctx& ctx) {
        lower.restore(ctx);
        m.restore(ctx);
        v.restore(ctx);
        param.restore(ctx);
    }

    // All numbers are near one. m is two products and a sum, so within 4 u of the CPU's; v has terms of one sign. The update is
    // at most 2.1 with a dozen roundings, scaled by lr = 1e-2 in the weight: less than the weight's own two roundings.
    void check(ladder::Verdict& verdict) {
        using ladder::u;
        verdict.close("m", m, m0, 1, 0, 4 * u);
        verdict.close("v", v, v0, 1, 4 * u, 0);
        verdict.close("param", param, param0, 1, 2 * ladder::roundoff<floatX>, 4 * u);
        verdict.close("weights", whole_weights(verdict.values("param", param), verdict.values("lower", lower)),
                      whole_weights(param0, lower0), 1, 0, 4 * u);
    }
    unsigned blocks(int per_thread) const { return (unsigned)ceil_div(n, (size_t)threads * per_thread); }
};

void climb_all(ladder::Run& run) {
    ladder::climb<Problem, size_t>(run, "adamw", ladder::copy_bound,
                                   {{"a launch for each line of the formula",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         LAUNCH(update_m, x.blocks(1), threads, 0, ctx, x.m.p(), x.grad.p(), x.n, x.constants);
                                         LAUNCH(update_v, x.blocks(1), threads, 0, ctx, x.v.p(), x.grad.p(), x.n, x.constants);
                                         LAUNCH(update_weight, x.blocks(1), threads, 0, ctx, x.param.p(), x.lower.p(), x.m.p(),
                                                x.v.p(), x.n, x.constants);
                                     }},
                                    {"fused: one pass",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         LAUNCH(fused, x.blocks(1), threads, 0, ctx, x.param.p(), x.lower.p(), x.m.p(), x.v.p(),
                                                x.grad.p(), x.n, x.constants);
                                     }},
                                    {"packs: 8 elements of a thread",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         LAUNCH(packed, x.blocks(8), threads, 0, ctx, x.param.p(), x.lower.p(), x.m.p(),
                                                x.v.p(), x.grad.p(), x.n, x.constants);
                                     }},
                                    {"the trainer's",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         gpu::adamw(ctx, x.param.p(), x.lower.p(), x.m.p(), x.v.p(), x.grad.p(), x.n,
                                                    {lr, beta1, beta2, eps, decay, grad_scale, step}, {});
                                     }}},
                                   {1003, 1, 7, 20003}, {(size_t)64 << 20});
}

}  // namespace

int main(int argc, char** argv) {
    return ladder::main(argc, argv, "AdamW, from three passes to the trainer's one.", climb_all);
}
