// Ladder: AdamW, one step of the optimizer for every parameter.
//   g = grad_scale * grad,  m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g^2,
//   w -= lr (m/c1 / (sqrt(v/c2) + eps) + decay w),  param = bf16(w)          c1 = 1 - b1^step, c2 = 1 - b2^step
// (llmc/cpu/optimizer.h; Loshchilov & Hutter, 2019). Per parameter 16 bytes are read (grad, m, v, w in fp32) and 14 written
// (m, v, w, and param in bf16) for about 15 operations: bound by memory bandwidth, 30 bytes per parameter.
//
//   1  a launch for each line of the formula   m, v and w travel through memory again between launches: 46 bytes
//   2  fused: one pass                         30 bytes; 4-byte loads, and some wait for a store: for all that the compiler
//                                              knows, the arrays may overlap
//   3  packs: 8 elements of a thread           16-byte loads, eight of them before the first use
//   4  the trainer's                           hints for the cache: what is not read again soon does not stay there
#include "../../llmc/cpu/optimizer.h"
#include "../../llmc/gpu/optimizer.cuh"
#include "ladder.h"

namespace {

using gpu::load, gpu::Pack, gpu::store;
constexpr int threads = 256;

struct AdamW {
    float lr, beta1, beta2, eps, decay, grad_scale, correct1, correct2;  // correct: 1/c1, 1/c2
};

// ---- 1: a launch for each line of the formula ------------------------------------------------------------------------------
__global__ void update_m(float* m, const float* grad, size_t n, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] = a.beta1 * m[i] + (1 - a.beta1) * (a.grad_scale * grad[i]);
}
__global__ void update_v(float* v, const float* grad, size_t n, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const float g = i < n ? a.grad_scale * grad[i] : 0;
    if (i < n) v[i] = a.beta2 * v[i] + (1 - a.beta2) * g * g;
}
__global__ void update_master(float* master, const float* m, const float* v, size_t n, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) master[i] -= a.lr * (m[i] * a.correct1 / (sqrtf(v[i] * a.correct2) + a.eps) + a.decay * master[i]);
}
__global__ void cast(floatX* param, const float* master, size_t n) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] = (floatX)master[i];
}

// ---- 2: one pass -----------------------------------------------------------------------------------------------------------
__device__ void update(float& w, float& m, float& v, float grad, const AdamW& a) {
    const float g = a.grad_scale * grad;
    m = a.beta1 * m + (1 - a.beta1) * g;
    v = a.beta2 * v + (1 - a.beta2) * g * g;
    w -= a.lr * (m * a.correct1 / (sqrtf(v * a.correct2) + a.eps) + a.decay * w);
}
__global__ void fused(floatX* param, float* master, float* m, float* v, const float* grad, size_t n, AdamW a) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    update(master[i], m[i], v[i], grad[i], a);
    param[i] = (floatX)master[i];
}

// ---- 3: packs --------------------------------------------------------------------------------------------------------------
__global__ void packed(floatX* param, float* master, float* m, float* v, const float* grad, size_t n, AdamW a) {
    constexpr int size = Pack<float>::size, packs = 2, per_thread = size * packs;
    const size_t first = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * per_thread;
    if (first + per_thread > n) {  // the last few
        for (size_t i = first; i < n; i++) update(master[i], m[i], v[i], grad[i], a), param[i] = (floatX)master[i];
        return;
    }
    Pack<float> pw[packs], pm[packs], pv[packs], pg[packs];
#pragma unroll
    for (int k = 0; k < packs; k++) {  // all loads come before the first value is used
        const size_t i = first + k * size;
        pw[k] = load(master + i), pm[k] = load(m + i), pv[k] = load(v + i), pg[k] = load(grad + i);
    }
    alignas(16) floatX rounded[per_thread];
#pragma unroll
    for (int k = 0; k < packs; k++) {
#pragma unroll
        for (int j = 0; j < size; j++) {
            update(pw[k][j], pm[k][j], pv[k][j], pg[k][j], a);
            rounded[k * size + j] = (floatX)pw[k][j];
        }
        const size_t i = first + k * size;
        store(master + i, pw[k]), store(m + i, pm[k]), store(v + i, pv[k]);
    }
#pragma unroll
    for (int j = 0; j < per_thread; j += Pack<floatX>::size) {
        Pack<floatX> p;
#pragma unroll
        for (int k = 0; k < Pack<floatX>::size; k++) p[k] = rounded[j + k];
        store(param + first + j, p);
    }
}

// ---- the ladder ------------------------------------------------------------------------------------------------------------
// eps is larger than in training, so that forgetting it would show.
constexpr float lr = 1e-2f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-3f, decay = 0.1f, grad_scale = 0.5f;
constexpr int64_t step = 3;

struct Problem {
    size_t n;
    std::vector<float> master0, m0, v0, grad0;  // expected results, once cpu::adamw has run
    std::vector<floatX> param0;
    ladder::Array<float> master, m, v, grad;
    ladder::Array<floatX> param;
    AdamW constants{lr,
                    beta1,
                    beta2,
                    eps,
                    decay,
                    grad_scale,
                    (float)(1 / (1 - std::pow((double)beta1, (double)step))),
                    (float)(1 / (1 - std::pow((double)beta2, (double)step)))};

    Problem(ladder::Run& run, size_t size)
        : n(size),
          master0(ladder::random<float>(n, 1, -1, 1)),
          m0(ladder::random<float>(n, 2, -1, 1)),
          v0(ladder::random<float>(n, 3, 0.5, 1.5)),
          grad0(ladder::random<float>(n, 4, -2, 2)),
          param0(n),
          master(master0),
          m(m0),
          v(v0),
          grad(grad0),
          param(n) {
        cpu::adamw(run.oracle, param0.data(), master0.data(), m0.data(), v0.data(), grad0.data(), n, lr, beta1, beta2, eps,
                   decay, grad_scale, step);
    }
    std::string name() const { return format("%zu parameters", n); }
    double work() const { return (double)n * (7 * sizeof(float) + sizeof(floatX)); }
    void restore(gpu::Ctx& ctx) { master.restore(ctx), m.restore(ctx), v.restore(ctx), param.restore(ctx); }

    // All numbers are of order one. m is two products and a sum, so within 4 u of the CPU's; v has terms of one sign. The
    // update is at most 2.1 and has a dozen roundings, of which lr = 1e-2 reaches the weight: less than the weight's own two.
    void check(ladder::Verdict& verdict) {
        using ladder::u;
        verdict.close("m", m, m0, 1, 0, 4 * u);
        verdict.close("v", v, v0, 1, 4 * u, 0);
        verdict.close("master", master, master0, 1, 0, 4 * u);
        verdict.close("param", param, param0, 1, 2 * ladder::roundoff<floatX>, 4 * u);
    }
    unsigned blocks(int per_thread) const { return (unsigned)ceil_div(n, (size_t)threads * per_thread); }
};

void climb_all(ladder::Run& run) {
    ladder::climb<Problem, size_t>(run, "adamw", ladder::copy_bound,
                                   {{"a launch for each line of the formula",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         LAUNCH(update_m, x.blocks(1), threads, 0, ctx, x.m.p(), x.grad.p(), x.n, x.constants);
                                         LAUNCH(update_v, x.blocks(1), threads, 0, ctx, x.v.p(), x.grad.p(), x.n, x.constants);
                                         LAUNCH(update_master, x.blocks(1), threads, 0, ctx, x.master.p(), x.m.p(), x.v.p(),
                                                x.n, x.constants);
                                         LAUNCH(cast, x.blocks(1), threads, 0, ctx, x.param.p(), x.master.p(), x.n);
                                     }},
                                    {"fused: one pass",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         LAUNCH(fused, x.blocks(1), threads, 0, ctx, x.param.p(), x.master.p(), x.m.p(),
                                                x.v.p(), x.grad.p(), x.n, x.constants);
                                     }},
                                    {"packs: 8 elements of a thread",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         LAUNCH(packed, x.blocks(8), threads, 0, ctx, x.param.p(), x.master.p(), x.m.p(),
                                                x.v.p(), x.grad.p(), x.n, x.constants);
                                     }},
                                    {"the trainer's: hints for the cache",
                                     [](gpu::Ctx& ctx, Problem& x) {
                                         gpu::adamw(ctx, x.param.p(), x.master.p(), x.m.p(), x.v.p(), x.grad.p(), x.n, lr,
                                                    beta1, beta2, eps, decay, grad_scale, step);
                                     }}},
                                   {1003, 1, 7, 20003}, {(size_t)64 << 20});
}

}  // namespace

int main(int argc, char** argv) { return ladder::main(argc, argv, "AdamW, from four passes to the trainer's one.", climb_all); }
