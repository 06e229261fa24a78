// Ladder: the backward pass of RMSNorm, y = w xhat with xhat = x r, r = rstd of the row.
//   dx += r (g - xhat mean(g xhat)) with g = w dy,   dw += sum over rows of dy xhat
// (llmc/cpu/norm.h has the derivation.) x (N, C). Reads x, dy and dx, writes dx: 8 bytes of bf16 per element for about ten
// operations, bound by memory bandwidth. The difficulty: dx sums along rows, dw down columns, of the same data.
//
//   1  a thread per row, then one per column   rows: neighboring threads read a row's length apart; columns: few threads
//   2  a warp per row, dw by atomic adds       coalesced reads, but every element adds to global memory, in an order that
//                                              changes from run to run, and so do the last bits of dw
//   3  dw in parts, one per block              a block sums its rows in shared memory, a second kernel sums the blocks:
//                                              the same bits in every run; 2-byte loads, each row is read twice
//   4  packs, parts in registers               a thread owns 8 columns: one reading, three loads in flight; two barriers a row
//   5  the trainer's                           one barrier a row or none, several rows at once, as many blocks as run at once
#include "../../llmc/cpu/norm.h"
#include "../../llmc/gpu/norm.cuh"
#include "ladder.h"

namespace {

using gpu::block_sum, gpu::load, gpu::Pack, gpu::store, gpu::warp_sum;

struct Norm {
    floatX* dx;  // (N, C)
    float* dw;   // (C)
    const floatX *dy, *x, *w;
    const float* rstd;  // (N)
    int N, C;
};

// ---- 1: a thread per row, then one per column ------------------------------------------------------------------------------
__global__ void thread_per_row(Norm k) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= k.N) return;
    const size_t row = (size_t)n * k.C;
    const float r = k.rstd[n];
    float sum = 0;
    for (int c = 0; c < k.C; c++) sum += (float)k.w[c] * (float)k.dy[row + c] * ((float)k.x[row + c] * r);
    const float mean = sum / k.C;
    for (int c = 0; c < k.C; c++) {
        const float g = (float)k.w[c] * (float)k.dy[row + c], xhat = (float)k.x[row + c] * r;
        k.dx[row + c] = (floatX)((float)k.dx[row + c] + r * (g - xhat * mean));
    }
}
__global__ void thread_per_column(Norm k) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= k.C) return;
    float sum = 0;
    for (size_t n = 0; n < (size_t)k.N; n++) sum += (float)k.dy[n * k.C + c] * ((float)k.x[n * k.C + c] * k.rstd[n]);
    k.dw[c] += sum;
}

// ---- 2: a warp per row, dw by atomic adds ----------------------------------------------------------------------------------
__global__ void __launch_bounds__(256) warp_per_row(Norm k) {
    const size_t n = (size_t)blockIdx.x * 8 + threadIdx.x / 32, row = n * k.C;
    const int lane = threadIdx.x % 32;
    if (n >= (size_t)k.N) return;  // whole warps
    const float r = k.rstd[n];
    float sum = 0;
    for (int c = lane; c < k.C; c += 32) {
        const float dy = (float)k.dy[row + c], xhat = (float)k.x[row + c] * r;
        sum += (float)k.w[c] * dy * xhat;
        atomicAdd(&k.dw[c], dy * xhat);
    }
    const float mean = warp_sum(sum) / k.C;
    for (int c = lane; c < k.C; c += 32) {
        const float g = (float)k.w[c] * (float)k.dy[row + c], xhat = (float)k.x[row + c] * r;
        k.dx[row + c] = (floatX)((float)k.dx[row + c] + r * (g - xhat * mean));
    }
}

// ---- 3: dw in parts, one per block -----------------------------------------------------------------------------------------
__global__ void __launch_bounds__(256) block_per_row(float* parts /*(gridDim.x, C)*/, Norm k) {
    DYNAMIC_SHARED(float, dw);  // (C); a thread only ever touches its own columns, so this needs no barrier
    for (int c = threadIdx.x; c < k.C; c += 256) dw[c] = 0;
    for (size_t n = blockIdx.x; n < (size_t)k.N; n += gridDim.x) {
        const size_t row = n * k.C;
        const float r = k.rstd[n];
        float sum = 0;
        for (int c = threadIdx.x; c < k.C; c += 256) {
            const float dy = (float)k.dy[row + c], xhat = (float)k.x[row + c] * r;
            sum += (float)k.w[c] * dy * xhat;
            dw[c] += dy * xhat;
        }
        const float mean = block_sum(sum) / k.C;
        for (int c = threadIdx.x; c < k.C; c += 256) {
            const float g = (float)k.w[c] * (float)k.dy[row + c], xhat = (float)k.x[row + c] * r;
            k.dx[row + c] = (floatX)((float)k.dx[row + c] + r * (g - xhat * mean));
        }
    }
    for (int c = threadIdx.x; c < k.C; c += 256) parts[(size_t)blockIdx.x * k.C + c] = dw[c];
}
__global__ void add_parts(Norm k, const float* parts, int n_parts) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= k.C) return;
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < n_parts; i++) sum += parts[(size_t)i * k.C + c];
    k.dw[c] += sum;
}

// ---- 4: packs, parts in registers ------------------------------------------------------------------------------------------
__global__ void __launch_bounds__(1024) pack_per_thread(float* parts, Norm k) {
    constexpr int size = Pack<floatX>::size;
    const int first = threadIdx.x * size;
    const bool there = first < k.C;  // the last warp may reach beyond the row, but must reach the barriers
    Pack<floatX> w{};
    if (there) w = load(k.w + first);
    float dw[size] = {};
    for (size_t n = blockIdx.x; n < (size_t)k.N; n += gridDim.x) {
        const size_t i = n * k.C + first;
        const float r = k.rstd[n];
        Pack<floatX> x{}, dy{}, dx{};
        if (there) {
            x = load(k.x + i);
            dy = load(k.dy + i);
            dx = load(k.dx + i);
        }
        float sum = 0;
#pragma unroll
        for (int j = 0; j < size; j++) {
            const float xhat = (float)x[j] * r;
            sum += (float)w[j] * (float)dy[j] * xhat;
            dw[j] += (float)dy[j] * xhat;
        }
        const float mean = block_sum(sum) / k.C;
#pragma unroll
        for (int j = 0; j < size; j++)
            dx[j] = (floatX)((float)dx[j] + r * ((float)w[j] * (float)dy[j] - (float)x[j] * r * mean));
        if (there) store(k.dx + i, dx);
    }
    if (there)
#pragma unroll
        for (int j = 0; j < size; j++) parts[(size_t)blockIdx.x * k.C + first + j] = dw[j];
}

// ---- the ladder ------------------------------------------------------------------------------------------------------------
struct Shape {
    int N, C;
};

struct Problem {
    int N, C;
    std::vector<floatX> dx0, dy0, x0, w0;  // dx and dw: expected results, once cpu::rmsnorm_backward has run
    std::vector<float> dw0, rstd0;
    ladder::Array<floatX> dx, dy, x, w;
    ladder::Array<float> dw, rstd;

    Problem(ladder::Run& run, const Shape& s)
        : N(s.N),
          C(s.C),
          dx0(ladder::random<floatX>((size_t)N * C, 1, -1, 1)),
          dy0(ladder::random<floatX>((size_t)N * C, 2, -1, 1)),
          x0(ladder::random<floatX>((size_t)N * C, 3, -1, 1)),
          w0(ladder::random<floatX>(C, 4, 0.5, 1.5)),
          dw0(ladder::random<float>(C, 5, -1, 1)),
          rstd0(ladder::random<float>(N, 6, 0.5, 2)),  // backward accepts any input
          dx(dx0),
          dy(dy0),
          x(x0),
          w(w0),
          dw(dw0),
          rstd(rstd0) {
        CHECK(C % Pack<floatX>::size == 0, "rung 4 moves rows in packs");
        cpu::rmsnorm_backward(run.oracle, dx0.data(), {dw0.data(), nullptr}, dy0.data(), x0.data(), {w0.data(), nullptr, C, 0},
                              {nullptr, rstd0.data()}, N, Acc::Add);
    }
    std::string name() const { return format("%d rows of %d", N, C); }
    double work() const { return 4.0 * sizeof(floatX) * N * C; }
    void restore(gpu::Ctx& ctx) {
        dx.restore(ctx);
        dw.restore(ctx);
    }

    // dx: values that differ by a few u are rounded to floatX here and on the CPU; around a tie they become one step apart, but
    // rarely, so half a rounding of the row's norm suffices. dw: a sum of N + 1 terms has as many roundings of random sign,
    // each within u of a partial sum no larger than the result: sqrt(N) u of dw's norm, for the CPU and the kernel each; four
    // times that is allowed.
    void check(ladder::Verdict& verdict) {
        verdict.close("dx", dx, dx0, C, ladder::roundoff<floatX> / 2 + 32 * ladder::u, 0);
        verdict.close("dw", dw, dw0, C, (4 * std::sqrt((double)N) + 8) * ladder::u, 0);
    }
    Norm norm() const { return {dx.p(), dw.p(), dy.p(), x.p(), w.p(), rstd.p(), N, C}; }
};

// Blocks that each process every n-th row: enough to keep the GPU busy, few enough that their parts of dw are few.
int blocks_of(const gpu::Ctx& ctx, const Problem& p) { return std::min(p.N, 4 * ctx.multiprocessors); }

void climb_all(ladder::Run& run) {
    ladder::climb<Problem, Shape>(
        run, "rmsnorm_backward", ladder::copy_bound,
        {{"a thread per row, then one per column",
          [](gpu::Ctx& ctx, Problem& p) {
              LAUNCH(thread_per_row, ceil_div(p.N, 64), 64, 0, ctx, p.norm());
              LAUNCH(thread_per_column, ceil_div(p.C, 64), 64, 0, ctx, p.norm());
          }},
         {"a warp per row, dw by atomic adds",
          [](gpu::Ctx& ctx, Problem& p) { LAUNCH(warp_per_row, ceil_div(p.N, 8), 256, 0, ctx, p.norm()); }, false},
         {"dw in parts, one per block",
          [](gpu::Ctx& ctx, Problem& p) {
              const int blocks = blocks_of(ctx, p);
              float* parts = (float*)ctx.scratch(sizeof(float) * (size_t)blocks * p.C);
              LAUNCH(block_per_row, blocks, 256, sizeof(float) * p.C, ctx, parts, p.norm());
              LAUNCH(add_parts, ceil_div(p.C, 64), 64, 0, ctx, p.norm(), parts, blocks);
          }},
         {"packs, parts in registers",
          [](gpu::Ctx& ctx, Problem& p) {
              const int blocks = blocks_of(ctx, p), threads = ceil_div(p.C / Pack<floatX>::size, 32) * 32;
              float* parts = (float*)ctx.scratch(sizeof(float) * (size_t)blocks * p.C);
              LAUNCH(pack_per_thread, blocks, threads, 0, ctx, parts, p.norm());
              gpu::detail::add_rows(ctx, p.dw.p(), nullptr, nullptr, parts, blocks, p.C);  // add_parts with more threads
          }},
         {"the trainer's: one barrier a row or none",
          [](gpu::Ctx& ctx, Problem& p) {
              gpu::rmsnorm_backward(ctx, p.dx.p(), {p.dw.p(), nullptr}, p.dy.p(), p.x.p(), {p.w.p(), nullptr, p.C, 0},
                                    {nullptr, p.rstd.p()}, p.N, Acc::Add);
          }}},
        {{5, 264}, {1, 96}, {131, 520}, {37, 1032}}, {{32768, 4096}});
}

}  // namespace

int main(int argc, char** argv) {
    return ladder::main(argc, argv, "RMSNorm's backward pass: sums along rows and down columns at once.", climb_all);
}
