// Ladder: the fused classifier, from logits to the loss of each row and, in place, the gradient of the logits.
//   logZ = log sum_{i<V} exp(x_i),  loss = logZ - x_target,  z = z_coef logZ^2,
//   dx_i = loss_scale (p_i (1 + 2 z_coef logZ) - [i = target]),  p_i = exp(x_i - logZ)
// (llmc/cpu/loss.h has the derivation.) Columns V .. Vp-1 are padding; rows with a target below 0 do not count. At best each
// logit is read once and its gradient written once, 4 bytes in bf16, for two exponentials: bound by memory bandwidth. A row of
// 50,257 logits is 100 KB: too long for registers, not for shared memory.
//
//   1  the softmax as a matrix, a thread per row   fp32 matrix written and read again; neighboring threads read far apart
//   2  a block per row, three passes               maximum, sum, gradient: neighbors read neighbors; the row is read 3 times
//   3  maximum and sum in one pass, "online"       when the maximum rises, the sum so far is scaled; the row is read twice
//   4  packs, four of them in flight               16-byte accesses; the second reading still goes to the L2 cache or beyond
//   5  the trainer's                               between the two passes the row stays in shared memory: it is read once
#include "../../llmc/cpu/loss.h"
#include "../../llmc/gpu/loss.cuh"
#include "ladder.h"

namespace {

using gpu::block_max, gpu::block_sum, gpu::load, gpu::Pack, gpu::store;

struct Classifier {
    int N, V, Vp;
    float loss_scale, z_coef;

    __device__ float gradient(float x, bool is_target, int target, float log_z) const {
        if (target < 0) return 0;
        const float p = exp_real(x - log_z);
        return loss_scale * (p * (1 + 2 * z_coef * log_z) - (is_target ? 1.0f : 0.0f));
    }
};
struct Losses {  // (N) each
    float *loss, *zloss, *log_z;

    __device__ void write(size_t n, float log_sum, float at_target, int target, const Classifier& c) const {
        log_z[n] = log_sum;
        loss[n] = target < 0 ? 0 : log_sum - at_target;
        zloss[n] = target < 0 ? 0 : c.z_coef * log_sum * log_sum;
    }
};

// ---- 1: the softmax as a matrix --------------------------------------------------------------------------------------------
__global__ void softmax_rows(float* probability /*(N, V)*/, Losses out, const floatX* logits, const int* targets,
                             Classifier c) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= c.N) return;
    const floatX* x = logits + (size_t)n * c.Vp;
    float *p = probability + (size_t)n * c.V, top = -INFINITY, sum = 0;
    for (int i = 0; i < c.V; i++) top = fmaxf(top, (float)x[i]);
    for (int i = 0; i < c.V; i++) {
        p[i] = exp_real((float)x[i] - top);
        sum += p[i];
    }
    for (int i = 0; i < c.V; i++) p[i] /= sum;
    const int target = targets[n];
    out.write(n, top + logf(sum), target < 0 ? 0.0f : (float)x[target], target, c);
}
__global__ void gradient_of_softmax(floatX* logits, const float* probability, const float* log_z, const int* targets,
                                    Classifier c) {
    const size_t k = (size_t)blockIdx.x * blockDim.x + threadIdx.x, n = k / c.Vp;
    const int i = (int)(k % c.Vp);
    if (n >= (size_t)c.N) return;
    const int target = targets[n];
    const float p = i < c.V ? probability[n * c.V + i] : 0.0f;
    const float g = c.loss_scale * (p * (1 + 2 * c.z_coef * log_z[n]) - (i == target ? 1.0f : 0.0f));
    logits[k] = (floatX)(target < 0 ? 0.0f : g);
}

// ---- 2: a block per row, three passes --------------------------------------------------------------------------------------
__global__ void __launch_bounds__(512) three_passes(floatX* logits, Losses out, const int* targets, Classifier c) {
    const size_t n = blockIdx.x;
    floatX* x = logits + n * c.Vp;
    const int target = targets[n];
    const float at_target = target < 0 ? 0.0f : (float)x[target];  // soon overwritten
    float top = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < c.V; i += blockDim.x) top = fmaxf(top, (float)x[i]);
    top = block_max(top);
    for (int i = threadIdx.x; i < c.V; i += blockDim.x) sum += exp_real((float)x[i] - top);
    const float log_z = top + logf(block_sum(sum));
    if (threadIdx.x == 0) out.write(n, log_z, at_target, target, c);
    for (int i = threadIdx.x; i < c.V; i += blockDim.x) x[i] = (floatX)c.gradient((float)x[i], i == target, target, log_z);
    for (int i = c.V + threadIdx.x; i < c.Vp; i += blockDim.x) x[i] = (floatX)0.0f;
}

// ---- 3: maximum and sum in one pass ----------------------------------------------------------------------------------------
// (Milakov & Gimelshein, 2018.) sum is relative to top: each thread has its own, and the block's are combined at the end.
__device__ float log_of_block_sum(float top, float sum) {
    const float highest = block_max(top);
    return highest + logf(block_sum(sum * exp_real(top - highest)));  // a thread without logits adds 0 * exp(-inf)
}
__global__ void __launch_bounds__(512) online(floatX* logits, Losses out, const int* targets, Classifier c) {
    const size_t n = blockIdx.x;
    floatX* x = logits + n * c.Vp;
    const int target = targets[n];
    const float at_target = target < 0 ? 0.0f : (float)x[target];
    float top = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < c.V; i += blockDim.x) {
        const float value = (float)x[i], highest = fmaxf(top, value);
        sum = sum * exp_real(top - highest) + exp_real(value - highest);
        top = highest;
    }
    const float log_z = log_of_block_sum(top, sum);
    if (threadIdx.x == 0) out.write(n, log_z, at_target, target, c);
    for (int i = threadIdx.x; i < c.V; i += blockDim.x) x[i] = (floatX)c.gradient((float)x[i], i == target, target, log_z);
    for (int i = c.V + threadIdx.x; i < c.Vp; i += blockDim.x) x[i] = (floatX)0.0f;
}

// ---- 4: packs --------------------------------------------------------------------------------------------------------------
// Rows start at a multiple of 16 bytes, so padding is read along with the last logits; it is replaced by -inf.
__global__ void __launch_bounds__(512) packed(floatX* logits, Losses out, const int* targets, Classifier c) {
    constexpr int size = Pack<floatX>::size, under_way = 4;
    const size_t n = blockIdx.x;
    floatX* x = logits + n * c.Vp;
    const int target = targets[n], stride = blockDim.x * size;
    const float at_target = target < 0 ? 0.0f : (float)x[target];
    float top = -INFINITY, sum = 0;
    for (int first = threadIdx.x * size; first < c.V; first += under_way * stride) {
        Pack<floatX> p[under_way];
#pragma unroll
        for (int k = 0; k < under_way; k++)
            if (first + k * stride < c.V) p[k] = load(x + first + k * stride);
        float value[under_way][size], highest = top;
#pragma unroll
        for (int k = 0; k < under_way; k++)
#pragma unroll
            for (int j = 0; j < size; j++) {
                value[k][j] = first + k * stride + j < c.V ? (float)p[k][j] : -INFINITY;
                highest = fmaxf(highest, value[k][j]);
            }
        sum *= exp_real(top - highest);
        top = highest;  // once for 32 logits, not for each
#pragma unroll
        for (int k = 0; k < under_way; k++)
#pragma unroll
            for (int j = 0; j < size; j++) sum += exp_real(value[k][j] - highest);
    }
    const float log_z = log_of_block_sum(top, sum);
    if (threadIdx.x == 0) out.write(n, log_z, at_target, target, c);
    for (int first = threadIdx.x * size; first < c.Vp; first += under_way * stride) {
        Pack<floatX> p[under_way];
#pragma unroll
        for (int k = 0; k < under_way; k++)
            if (first + k * stride < c.Vp) p[k] = load(x + first + k * stride);
#pragma unroll
        for (int k = 0; k < under_way; k++) {
            const int i = first + k * stride;
            if (i >= c.Vp) continue;
#pragma unroll
            for (int j = 0; j < size; j++)
                p[k][j] = (floatX)(i + j < c.V ? c.gradient((float)p[k][j], i + j == target, target, log_z) : 0.0f);
            store(x + i, p[k]);
        }
    }
}

// ---- the ladder ------------------------------------------------------------------------------------------------------------
struct Shape {
    int N, V, Vp;
};

struct Problem {
    Classifier c;
    std::vector<floatX> logits0;  // expected results, once cpu::classifier has run
    std::vector<float> loss0, zloss0, log_z0;
    std::vector<int> targets0;
    ladder::Array<floatX> logits;
    ladder::Array<float> loss, zloss, log_z;
    ladder::Array<int> targets;

    Problem(ladder::Run& run, const Shape& s)
        : c{s.N, s.V, s.Vp, 1 / 64.0f, 1e-2f},
          logits0(random_logits(s)),
          loss0(s.N),
          zloss0(s.N),
          log_z0(s.N),
          targets0(random_targets(s)),
          logits(logits0),
          loss(s.N),
          zloss(s.N),
          log_z(s.N),
          targets(targets0) {
        CHECK(s.Vp % Pack<floatX>::size == 0, "rung 4 moves rows in packs");
        cpu::classifier(run.oracle, logits0.data(), {loss0.data(), zloss0.data(), log_z0.data()}, targets0.data(), c.N,
                        {0, c.V, c.Vp}, {c.loss_scale, c.z_coef, true});
    }
    static std::vector<floatX> random_logits(const Shape& s) {
        std::vector<floatX> x = ladder::random<floatX>((size_t)s.N * s.Vp, 1, -4, 4);
        for (int n = 0; n < s.N; n++)
            for (int i = s.V; i < s.Vp; i++) x[(size_t)n * s.Vp + i] = (floatX)NAN;  // the content of padding must not matter
        return x;
    }
    static std::vector<int> random_targets(const Shape& s) {
        std::vector<int> target(s.N);
        for (int n = 0; n < s.N; n++) target[n] = n % 7 == 5 ? -1 : (int)ladder::uniform(2, n, 0, s.V);
        return target;
    }

    std::string name() const { return format("%d rows of %d logits", c.N, c.V); }
    double work() const { return 2.0 * sizeof(floatX) * c.N * c.Vp; }
    void restore(gpu::Ctx& ctx) {
        logits.restore(ctx);
        loss.restore(ctx);
        zloss.restore(ctx);
        log_z.restore(ctx);
    }

    // A sum of V positive terms in fp32, one after the other at worst, has V roundings, each within u of the sum; and they add
    // up, because many of the logits are the same bf16 number. An exponential of x in [-20, 0] is within 2 + 1.2 |x| units in
    // the last place. Gradients have this relative error (at the target, where p - 1 has at most twice p's relative error, p
    // being below 1/2), and are rounded twice, here and by the CPU.
    void check(ladder::Verdict& verdict) {
        const double e = (c.V + 32) * ladder::u, of_log = e + 4 * ladder::u * 16;
        verdict.close("log Z", log_z, log_z0, 1, 0, of_log);
        verdict.close("loss", loss, loss0, 1, 0, of_log);
        verdict.close("z-loss", zloss, zloss0, 1, 4 * ladder::u, c.z_coef * 2 * 16 * of_log);
        verdict.close("gradient", logits, logits0, 1, 2 * ladder::roundoff<floatX> + 2 * e, 1e-30);
    }
    Losses losses() { return {loss.p(), zloss.p(), log_z.p()}; }
};

void climb_all(ladder::Run& run) {
    ladder::climb<Problem, Shape>(
        run, "classifier", ladder::copy_bound,
        {{"the softmax as a matrix, a thread per row",
          [](gpu::Ctx& ctx, Problem& x) {
              float* probability = (float*)ctx.scratch(sizeof(float) * (size_t)x.c.N * x.c.V);
              LAUNCH(softmax_rows, ceil_div(x.c.N, 64), 64, 0, ctx, probability, x.losses(), x.logits.p(), x.targets.p(), x.c);
              LAUNCH(gradient_of_softmax, (unsigned)ceil_div(x.logits.size(), 256), 256, 0, ctx, x.logits.p(), probability,
                     x.log_z.p(), x.targets.p(), x.c);
          }},
         {"a block per row, three passes",
          [](gpu::Ctx& ctx, Problem& x) {
              LAUNCH(three_passes, x.c.N, 512, 0, ctx, x.logits.p(), x.losses(), x.targets.p(), x.c);
          }},
         {"maximum and sum in one pass, online",
          [](gpu::Ctx& ctx, Problem& x) { LAUNCH(online, x.c.N, 512, 0, ctx, x.logits.p(), x.losses(), x.targets.p(), x.c); }},
         {"packs, four of them in flight",
          [](gpu::Ctx& ctx, Problem& x) { LAUNCH(packed, x.c.N, 512, 0, ctx, x.logits.p(), x.losses(), x.targets.p(), x.c); }},
         {"the trainer's: the row stays in shared memory",
          [](gpu::Ctx& ctx, Problem& x) {
              gpu::classifier(ctx, x.logits.p(), {x.loss.p(), x.zloss.p(), x.log_z.p()}, x.targets.p(), x.c.N,
                              {0, x.c.V, x.c.Vp}, {x.c.loss_scale, x.c.z_coef, true});
          }}},
        {{3, 1003, 1008}, {1, 37, 48}, {3, 17001, 17024}, {67, 520, 520}}, {{8192, 50257, 50304}});
}

}  // namespace

int main(int argc, char** argv) {
    return ladder::main(argc, argv, "The fused classifier, from a softmax matrix to the trainer's one pass.", climb_all);
}
