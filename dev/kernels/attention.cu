// Ladder: causal attention with grouped queries, forward and backward; query head h uses key/value head h / (NH / NKV).
//   s_tj = scale q_t.k_j for j <= t,  p_tj = exp(s_tj - lse_t),  out_t = sum_j p_tj v_j
//   ds_tj = p_tj (dout_t.v_j - dout_t.out_t),  dq_t = scale sum_j ds_tj k_j,  dk_j = scale sum_t ds_tj q_t,  dv_j = sum_t p_tj
//   dout_t
// (llmc/cpu/attention.h has the derivation.) Forward has 2 products of T^2/2 x HS multiply-adds per head, backward 5: 4 and 10
// FLOPs times T^2/2 HS. All tensors that must be moved have size T HS: bound by the tensor cores, unless a T x T matrix travels
// through memory. Figures count these FLOPs, even if a rung computes some twice; masked halves do not count.
//
//   1  the T x T matrix in memory, a thread per score   each score reads two rows of HS for itself, and memory grows with T^2
//   2  flash: tiles of keys, a running maximum          no T x T matrix (Dao et al., 2022); ordinary multiplications, each of
//                                                       which must load an operand from shared memory
//   3  tensor cores: mma.sync                           16 x 8 x 16 products of a warp, copies of the next tile in flight
//                                                       (Dao, 2023); warps issue the products and wait for them
//   4  Hopper: wgmma and TMA                            asynchronous products of 64 rows, tiles loaded by one thread, softmax
//                                                       overlapped with products (Shah et al., 2024)
//   5  only backward: in one kernel               5 products instead of 7, as the copy engine sums queries' gradients,
//                                                 in the order in which parts arrive (--nondeterministic-attention)
//   5, backward 6  cuDNN's, if the library is installed
// 2 to 5 are the trainer's own kernels (llmc/gpu/attention_simple.cuh, _mma.cuh, _hopper.cuh); 4 is called through the op,
// which selects it if the GPU supports it.
#include "../../llmc/cpu/attention.h"
#include "../../llmc/gpu/attention.cuh"
#include "../../llmc/gpu/matmul.cuh"
#include "cudnn_attention.h"
#include "ladder.h"

namespace {

// ---- 1: the T x T matrix in memory -----------------------------------------------------------------------------------------
// One sequence b at a time. scores, weights, dscores (NH, T, T).
__device__ float dot(const floatX* a, const floatX* b, int n) {
    float sum = 0;
    for (int i = 0; i < n; i++) sum += (float)a[i] * (float)b[i];
    return sum;
}
__global__ void naive_scores(float* scores, const floatX* qkv, AttentionShape a, int b) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
    if (t >= a.T || j > t) return;
    scores[((size_t)h * a.T + t) * a.T + j] = a.scale * dot(qkv + a.query(b, t, h), qkv + a.key(b, j, h / a.group()), a.HS);
}
__global__ void naive_softmax(float* scores, float* lse, AttentionShape a, int b) {  // a thread per row
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = i % a.T, h = i / a.T;
    if (h >= a.NH) return;
    float *p = scores + (size_t)i * a.T, top = -INFINITY, sum = 0;
    for (int j = 0; j <= t; j++) top = fmaxf(top, p[j]);
    for (int j = 0; j <= t; j++) sum += p[j] = exp_real(p[j] - top);
    for (int j = 0; j <= t; j++) p[j] /= sum;
    lse[a.statistic(b, t, h)] = top + logf(sum);
}
__global__ void naive_output(floatX* out, const float* weights, const floatX* qkv, AttentionShape a, int b) {
    const int c = threadIdx.x, t = blockIdx.x, h = blockIdx.y;  // a thread per element
    const float* p = weights + ((size_t)h * a.T + t) * a.T;
    float sum = 0;
    for (int j = 0; j <= t; j++) sum += p[j] * (float)qkv[a.value(b, j, h / a.group()) + c];
    out[a.output(b, t, h) + c] = (floatX)sum;
}

void naive_forward(gpu::Ctx& ctx, floatX* out, float* lse, const floatX* qkv, const AttentionShape& a) {
    float* scores = (float*)ctx.scratch(sizeof(float) * (size_t)a.NH * a.T * a.T);
    for (int b = 0; b < a.B; b++) {
        LAUNCH(naive_scores, dim3(ceil_div(a.T, 32), ceil_div(a.T, 4), a.NH), dim3(32, 4), 0, ctx, scores, qkv, a, b);
        LAUNCH(naive_softmax, ceil_div(a.NH * a.T, 64), 64, 0, ctx, scores, lse, a, b);
        LAUNCH(naive_output, dim3(a.T, a.NH), a.HS, 0, ctx, out, scores, qkv, a, b);
    }
}

__global__ void naive_weights(float* weights, float* dscores, const floatX* dout, const floatX* out, const float* lse,
                              const floatX* qkv, AttentionShape a, int b) {
    const int j = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y * blockDim.y + threadIdx.y, h = blockIdx.z;
    if (t >= a.T || j > t) return;
    const floatX *dy = dout + a.output(b, t, h), *q = qkv + a.query(b, t, h);
    const float s = a.scale * dot(q, qkv + a.key(b, j, h / a.group()), a.HS), p = exp_real(s - lse[a.statistic(b, t, h)]);
    const float dp = dot(dy, qkv + a.value(b, j, h / a.group()), a.HS) - dot(dy, out + a.output(b, t, h), a.HS);
    const size_t i = ((size_t)h * a.T + t) * a.T + j;
    weights[i] = p;
    dscores[i] = a.scale * p * dp;
}
__global__ void naive_dq(floatX* dqkv, const float* dscores, const floatX* qkv, AttentionShape a, int b) {
    const int c = threadIdx.x, t = blockIdx.x, h = blockIdx.y;
    const float* ds = dscores + ((size_t)h * a.T + t) * a.T;
    float sum = 0;
    for (int j = 0; j <= t; j++) sum += ds[j] * (float)qkv[a.key(b, j, h / a.group()) + c];
    dqkv[a.query(b, t, h) + c] = (floatX)sum;
}
__global__ void naive_dkv(floatX* dqkv, const float* weights, const float* dscores, const floatX* dout, const floatX* qkv,
                          AttentionShape a, int b) {
    const int c = threadIdx.x, j = blockIdx.x, g = blockIdx.y;
    float dk = 0, dv = 0;
    for (int h = g * a.group(); h < (g + 1) * a.group(); h++)
        for (int t = j; t < a.T; t++) {
            const size_t i = ((size_t)h * a.T + t) * a.T + j;
            dk += dscores[i] * (float)qkv[a.query(b, t, h) + c];
            dv += weights[i] * (float)dout[a.output(b, t, h) + c];
        }
    dqkv[a.key(b, j, g) + c] = (floatX)dk;
    dqkv[a.value(b, j, g) + c] = (floatX)dv;
}

void naive_backward(gpu::Ctx& ctx, floatX* dqkv, const floatX* dout, const floatX* out, const float* lse, const floatX* qkv,
                    const AttentionShape& a) {
    const size_t n = (size_t)a.NH * a.T * a.T;
    float *weights = (float*)ctx.scratch(2 * sizeof(float) * n), *dscores = weights + n;
    for (int b = 0; b < a.B; b++) {
        LAUNCH(naive_weights, dim3(ceil_div(a.T, 32), ceil_div(a.T, 4), a.NH), dim3(32, 4), 0, ctx, weights, dscores, dout, out,
               lse, qkv, a, b);
        LAUNCH(naive_dq, dim3(a.T, a.NH), a.HS, 0, ctx, dqkv, dscores, qkv, a, b);
        LAUNCH(naive_dkv, dim3(a.T, a.NKV), a.HS, 0, ctx, dqkv, weights, dscores, dout, qkv, a, b);
    }
}

// ---- the ladder ------------------------------------------------------------------------------------------------------------
struct Shape {
    int B, T, NH, NKV, HS;
};

// Both passes. Every rung's backward gets the CPU's out and lse.
struct Heads {
    static constexpr double largest = 2.5;  // query, key or value: scores have a standard deviation of two, so that each row
                                            // has keys that matter and others that do not; of dout: 1
    AttentionShape a;
    std::vector<floatX> qkv0, dout0, out0, dqkv0;  // out, lse, dqkv: expected results, once cpu:: has run
    std::vector<float> lse0;

    Heads(ladder::Run& run, const Shape& s, bool backward)
        : a{s.B, s.T, s.NH, s.NKV, s.HS, (float)(1 / std::sqrt((double)s.HS))},
          qkv0(ladder::random<floatX>((size_t)s.B * s.T * a.row(), 1, -largest, largest)),
          dout0(ladder::random<floatX>((size_t)s.B * s.T * a.output_row(), 2, -1, 1)),
          out0(dout0.size()),
          dqkv0(qkv0.size()),
          lse0((size_t)s.B * s.NH * s.T) {
        cpu::attention_forward(run.oracle, out0.data(), lse0.data(), qkv0.data(), {}, a);
        if (backward)
            cpu::attention_backward(run.oracle, dqkv0.data(), dout0.data(), {qkv0.data(), out0.data(), lse0.data()}, {}, a,
                                    nullptr);
    }
    std::string name() const { return format("%d x %d tokens, %d/%d heads of %d", a.B, a.T, a.NH, a.NKV, a.HS); }
    double forward_work() const { return 2.0 * a.B * a.T * a.T * a.NH * a.HS; }

    // Rows of a head. Tensor cores use weights (p, ds) rounded to bf16: relative errors of random sign, as large as a rounding,
    // of terms in random directions; then the result is rounded, here and by the CPU: three roundings. If all terms cancel, as
    // in the first row's dq, which is exactly zero, the error of a dot product in fp32 remains, scaled, times a key or a query;
    // the error of a score is the same without that factor.
    double relative() const { return 3 * ladder::roundoff<floatX>; }
    double of_dot() const { return (a.HS + 8) * ladder::u * a.scale * a.HS * largest * largest; }
};

struct Forward : Heads {
    ladder::Array<floatX> qkv, out;
    ladder::Array<float> lse;
#ifdef HAVE_CUDNN
    std::unique_ptr<cudnn_attention::Plan> cudnn;  // created on first use
#endif
    Forward(ladder::Run& run, const Shape& s) : Heads(run, s, false), qkv(qkv0), out(out0.size()), lse(lse0.size()) {}
    double work() const { return forward_work(); }
    void restore(gpu::Ctx& ctx) {
        out.restore(ctx);
        lse.restore(ctx);
    }
    void check(ladder::Verdict& verdict) {
        verdict.close("out", out, out0, a.HS, relative(), 4 * ladder::u);
        verdict.close("lse", lse, lse0, 1, 4 * ladder::u, of_dot() + a.T * ladder::u);
    }
};

struct Backward : Heads {
    ladder::Array<floatX> qkv, dout, out, dqkv;
    ladder::Array<float> lse, dq_sums;
#ifdef HAVE_CUDNN
    std::unique_ptr<cudnn_attention::Plan> cudnn;
#endif
    Backward(ladder::Run& run, const Shape& s)
        : Heads(run, s, true),
          qkv(qkv0),
          dout(dout0),
          out(out0),
          dqkv(dqkv0.size()),
          lse(lse0),
          dq_sums(gpu::attention_sums(run.ctx, a)) {}
    double work() const { return 2.5 * forward_work(); }
    AttentionActs acts() { return {qkv.p(), out.p(), lse.p()}; }
    void restore(gpu::Ctx& ctx) { dqkv.restore(ctx); }
    void check(ladder::Verdict& verdict) { verdict.close("dqkv", dqkv, dqkv0, a.HS, relative(), of_dot()); }
};

std::string lacks_hopper(const gpu::Ctx& ctx) {
    return ctx.capability == 90
               ? ""
               : format("needs a GPU of compute capability 9.0, this is %d.%d", ctx.capability / 10, ctx.capability % 10);
}

double matmul_rate(ladder::Run& run) {
    constexpr int n = 8192;
    const auto values = ladder::random<floatX>((size_t)n * n, 1, -1, 1);
    const ladder::Array<floatX> x(values), w(values), y(values.size());
    const auto multiply = [&] { gpu::linear_forward(run.ctx, y.p(), x.p(), w.p(), nullptr, n, n, n); };
    return 2.0 * n * n * n / run.seconds([] {}, multiply);
}
constexpr ladder::Bound matmul_bound{"TFLOP/s", "cuBLASLt 8192^3", 1e12, matmul_rate};

void climb_all(ladder::Run& run) {
    const std::vector<Shape> small = {{1, 65, 2, 1, 64}, {2, 130, 4, 2, 64}, {1, 17, 2, 2, 128}, {1, 200, 2, 1, 128}};
    const std::vector<Shape> large = {{4, 4096, 32, 8, 128}, {32, 1024, 12, 12, 64}};
    ladder::climb<Forward, Shape>(
        run, "attention forward", matmul_bound,
        {
            {"the T x T matrix in memory, a thread per score",
             [](gpu::Ctx& ctx, Forward& x) { naive_forward(ctx, x.out.p(), x.lse.p(), x.qkv.p(), x.a); }},
            {"flash: tiles of keys, a running maximum",
             [](gpu::Ctx& ctx, Forward& x) { gpu::attention_forward_simple(ctx, x.out.p(), x.lse.p(), x.qkv.p(), {}, x.a); }},
            {"tensor cores: mma.sync",
             [](gpu::Ctx& ctx, Forward& x) { gpu::attention_forward_mma(ctx, x.out.p(), x.lse.p(), x.qkv.p(), {}, x.a); }},
            {"the trainer's on Hopper: wgmma and TMA",
             [](gpu::Ctx& ctx, Forward& x) { gpu::attention_forward(ctx, x.out.p(), x.lse.p(), x.qkv.p(), {}, x.a); }, true,
             lacks_hopper},
#ifdef HAVE_CUDNN
            {"cuDNN's",
             [](gpu::Ctx& ctx, Forward& x) {
                 if (!x.cudnn) x.cudnn = std::make_unique<cudnn_attention::Plan>(ctx, x.a, false);
                 x.cudnn->forward(x.out.p(), x.lse.p(), x.qkv.p());
             },
             true, cudnn_attention::lacks},
#endif
        },
        small, large);
    ladder::climb<Backward, Shape>(
        run, "attention backward", matmul_bound,
        {
            {"the T x T matrix in memory, a thread per score",
             [](gpu::Ctx& ctx, Backward& x) {
                 naive_backward(ctx, x.dqkv.p(), x.dout.p(), x.out.p(), x.lse.p(), x.qkv.p(), x.a);
             }},
            {"flash: tiles of keys, weights computed again",
             [](gpu::Ctx& ctx, Backward& x) {
                 gpu::attention_backward_simple(ctx, x.dqkv.p(), x.dout.p(), x.acts(), {}, x.a);
             }},
            {"tensor cores: mma.sync",
             [](gpu::Ctx& ctx, Backward& x) { gpu::attention_backward_mma(ctx, x.dqkv.p(), x.dout.p(), x.acts(), {}, x.a); }},
            {"the trainer's on Hopper: wgmma and TMA",
             [](gpu::Ctx& ctx, Backward& x) {
                 gpu::attention_backward(ctx, x.dqkv.p(), x.dout.p(), x.acts(), {}, x.a, nullptr);
             },
             true, lacks_hopper},
            {"the trainer's on Hopper, in one kernel",
             [](gpu::Ctx& ctx, Backward& x) {
                 gpu::attention_backward(ctx, x.dqkv.p(), x.dout.p(), x.acts(), {}, x.a, x.dq_sums.p());
             },
             true, lacks_hopper},
#ifdef HAVE_CUDNN
            {"cuDNN's",
             [](gpu::Ctx& ctx, Backward& x) {
                 if (!x.cudnn) x.cudnn = std::make_unique<cudnn_attention::Plan>(ctx, x.a, true);
                 x.cudnn->backward(x.dqkv.p(), x.dout.p(), x.out.p(), x.lse.p(), x.qkv.p());
             },
             false, cudnn_attention::lacks},
#endif
        },
        small, large);
}

}  // namespace

int main(int argc, char** argv) {
    return ladder::main(argc, argv, "Causal attention, from a T x T matrix in memory to tensor cores beside a softmax.",
                        climb_all);
}
