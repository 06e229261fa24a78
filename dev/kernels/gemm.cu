// Ladder: matrix product, out (M, N) = A (M, K) B (K, N) in bf16 with fp32 sums: a linear layer's forward, where both factors
// are contiguous along K; then its backward products, where one or both are contiguous along the other dimension.
//   out_mn = sum_k A_mk B_kn
// 2 M N K FLOPs on (M K + K N + M N) numbers: with sizes above a few hundred bound by the tensor cores, provided that each
// number is read from memory few times, and from shared memory by few threads.
//
//   1  a thread per element                          each product loads both of its factors
//   2  tiles in shared memory, 8 x 8 per thread      a number in shared memory serves 128 threads, in a register 8 products;
//                                                    fp32 multipliers: 67 TFLOP/s at most
//   3  tensor cores: mma.sync                        16 x 8 x 16 products of a warp, copies in flight (cp.async), swizzled rows
//   4  Hopper: wgmma and TMA                        64 x 128 x 16 products of four warps from shared memory; one thread
//                                                    loads whole tiles
//   5  a producer, tiles of 128 x 256, persistent    loads run ahead across tiles; registers go to the warps that sum;
//                                                    half the reads per product; results leave through shared memory by TMA
//   6  clusters                                      two blocks load B together: 32 KB instead of 48 KB per step of a block
//   7  cuBLASLt's first suggestion, for comparison
// Layers' products, forward and backward: only 5, 6 and 7, numbered 1 to 3.
// 5 and 6 are gemm_hopper.cuh with clusters of one and of two blocks.
#include "../../llmc/cpu/matmul.h"
#include "../../llmc/gpu/matmul.cuh"
#include "gemm_hopper.cuh"
#include "ladder.h"

namespace {

using gpu::hopper::Major;
constexpr Major by_rows = Major::rows, by_columns = Major::columns;

// The products of a linear layer, with the tensors that out, A and B represent.
enum class Product { forward, backward_input, backward_weight };

// ---- 1: a thread per element -----------------------------------------------------------------------------------------------
// a_k: distance of A's neighbors along K, a_m: along M; likewise for B.
struct Strides {
    size_t a_m, a_k, b_n, b_k;
};
__global__ void naive(bf16* out, const bf16* a, const bf16* b, Strides s, int M, int N, int K) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x, m = blockIdx.y * blockDim.y + threadIdx.y;
    if (m >= M || n >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += (float)a[m * s.a_m + k * s.a_k] * (float)b[n * s.b_n + k * s.b_k];
    out[(size_t)m * N + n] = bf16(sum);
}

// ---- 2: tiles in shared memory ---------------------------------------------------------------------------------------------
// 128 x 128 per block of 256 threads; a thread sums 8 x 8: rows y + 16 i, columns x + 16 j.
__global__ void __launch_bounds__(256) tiled(bf16* out, const bf16* a, const bf16* b, Strides s, int M, int N, int K) {
    constexpr int depth = 16;
    __shared__ float a_tile[depth][128], b_tile[depth][128];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16, m0 = blockIdx.y * 128, n0 = blockIdx.x * 128;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += depth) {
        for (int i = threadIdx.x; i < 128 * depth; i += 256) {
            const int along = i / depth, k = i % depth;  // neighbors along K in memory
            a_tile[k][along] = m0 + along < M && k0 + k < K ? (float)a[(m0 + along) * s.a_m + (k0 + k) * s.a_k] : 0.0f;
            b_tile[k][along] = n0 + along < N && k0 + k < K ? (float)b[(n0 + along) * s.b_n + (k0 + k) * s.b_k] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < depth; k++) {
            float row[8], column[8];
#pragma unroll
            for (int i = 0; i < 8; i++) row[i] = a_tile[k][y + 16 * i], column[i] = b_tile[k][x + 16 * i];
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] = fmaf(row[i], column[j], sum[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (m0 + y + 16 * i < M && n0 + x + 16 * j < N)
                out[(size_t)(m0 + y + 16 * i) * N + n0 + x + 16 * j] = bf16(sum[i][j]);
}

// A thread's four numbers of a (16, 8) of mma's or wgmma's sums: two columns of rows `row` and row + 8. N is even.
__device__ __forceinline__ void store_fragment(bf16* out, const float* d, int row, int column, int M, int N) {
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (row + 8 * r < M && column < N)
            *reinterpret_cast<uint32_t*>(out + (size_t)(row + 8 * r) * N + column) = gpu::pack_bf16(d[2 * r], d[2 * r + 1]);
}

// ---- 3: mma.sync -----------------------------------------------------------------------------------------------------------
// 128 x 128 per block of 8 warps, each of which sums 64 x 32; steps of 32 along K, three in shared memory. Both factors are
// contiguous along K, K a multiple of 8. Rows of 64 bytes: chunk c of 16 bytes of row r is at c ^ r / 2 % 4.
__device__ __forceinline__ const bf16* chunk_of(const bf16 (&tile)[128][32], int row, int chunk) {
    return &tile[row][(chunk ^ row / 2 % 4) * 8];
}
__global__ void __launch_bounds__(256) mma(bf16* out, const bf16* a, const bf16* b, int M, int N, int K) {
    using namespace gpu;
    constexpr int depth = 32, stages = 3;
    struct Shared {
        bf16 a[stages][128][depth], b[stages][128][depth];
    };
    DYNAMIC_SHARED(Shared, shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m0 = blockIdx.y * 128, n0 = blockIdx.x * 128;
    const int m_warp = warp / 4 * 64, n_warp = warp % 4 * 32, steps = ceil_div(K, depth);
    const auto load = [&](int step) {
        if (step < steps)
            for (int i = threadIdx.x; i < 128 * 4; i += 256) {
                const int row = i / 4, chunk = i % 4, k = step * depth + chunk * 8;
                copy_async_16((void*)chunk_of(shared->a[step % stages], row, chunk),
                              a + (size_t)min(m0 + row, M - 1) * K + min(k, K - 8), m0 + row < M && k < K);
                copy_async_16((void*)chunk_of(shared->b[step % stages], row, chunk),
                              b + (size_t)min(n0 + row, N - 1) * K + min(k, K - 8), n0 + row < N && k < K);
            }
        copy_async_commit();
    };
    for (int step = 0; step < stages - 1; step++) load(step);
    float d[4][4][4] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<stages - 2>();
        __syncthreads();
        load(step + stages - 1);
        const auto &a_tile = shared->a[step % stages], &b_tile = shared->b[step % stages];
#pragma unroll
        for (int k = 0; k < depth / 8; k += 2) {
            uint32_t a_part[4][4], b_part[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) ldmatrix_x4(a_part[i], chunk_of(a_tile, m_warp + i * 16 + lane % 16, k + lane / 16));
#pragma unroll
            for (int j = 0; j < 2; j++)
                ldmatrix_x4(b_part[j], chunk_of(b_tile, n_warp + j * 16 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint32_t pair[2] = {b_part[j / 2][j % 2 * 2], b_part[j / 2][j % 2 * 2 + 1]};
                    mma_m16n8k16(d[i][j], a_part[i], pair, d[i][j]);
                }
        }
    }
    copy_async_wait<0>();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            store_fragment(out, d[i][j], m0 + m_warp + i * 16 + lane / 4, n0 + n_warp + j * 8 + lane % 4 * 2, M, N);
}

// ---- 4: wgmma and TMA ------------------------------------------------------------------------------------------------------
// 128 x 128 per block of two warpgroups, each of which sums 64 x 128; steps of 64 along K, four in shared memory. Thread 0
// loads a step when all warps have released its slot.
__global__ void __launch_bounds__(256)
    wgmma_tiles(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, bf16* out, int M, int N,
                int steps) {
#ifdef HOPPER_CODE
    using namespace gpu::hopper;
    constexpr int stages = 4;
    struct Shared {
        bf16 a[stages][128 * 64], b[stages][128 * 64];
        uint64_t full[stages];
    };
    DYNAMIC_SHARED(Shared, shared);
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, m0 = blockIdx.y * 128, n0 = blockIdx.x * 128;
    const auto load = [&](int step) {
        if (threadIdx.x != 0 || step >= steps) return;
        const int stage = step % stages;
        mbarrier_arrive_expect(&shared->full[stage], sizeof shared->a[0] + sizeof shared->b[0]);
        tma_load(shared->a[stage], a_map, &shared->full[stage], step * 64, m0);
        tma_load(shared->b[stage], b_map, &shared->full[stage], step * 64, n0);
    };
    if (threadIdx.x == 0) {
        for (uint64_t& full : shared->full) mbarrier_init(&full, 1);
        mbarrier_fence();
    }
    __syncthreads();
    for (int step = 0; step < stages - 1; step++) load(step);
    float d[64];
#pragma unroll
    for (float& x : d) x = 0;
    for (int step = 0; step < steps; step++) {
        mbarrier_wait(&shared->full[step % stages], step / stages & 1);
        const uint64_t a = matrix_descriptor(shared->a[step % stages] + warpgroup * 64 * 64, 0),
                       b = matrix_descriptor(shared->b[step % stages], 0);
        wgmma_fence(d);
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma<128, Major::rows>(d, advanced(a, k * 32), advanced(b, k * 32), true);
        wgmma_commit();
        wgmma_wait<0>(d);
        __syncthreads();
        load(step + stages - 1);
    }
#pragma unroll
    for (int j = 0; j < 16; j++)
        store_fragment(out, d + 4 * j, m0 + threadIdx.x / 32 * 16 + lane / 4, n0 + j * 8 + lane % 4 * 2, M, N);
#else
    __trap();
#endif
}

// ---- the ladder ------------------------------------------------------------------------------------------------------------
struct Shape {
    int M, N, K;
};

template <Product product>
struct Factors {
    static constexpr bool weights = product == Product::backward_weight, inputs = product == Product::backward_input;
    static constexpr Major a_major = weights ? by_columns : by_rows, b_major = weights || inputs ? by_columns : by_rows;
    int M, N, K;
    std::vector<bf16> a0, b0, out0;
    ladder::Array<bf16> a, b, out;

    Factors(ladder::Run& run, const Shape& s)
        : M(s.M),
          N(s.N),
          K(s.K),
          a0(ladder::random<bf16>((size_t)M * K, 1, -1, 1)),
          b0(ladder::random<bf16>((size_t)N * K, 2, -1, 1)),
          out0((size_t)M * N),
          a(a0),
          b(b0),
          out(out0.size()) {
        if (weights) {
            std::vector<float> sums(out0.size());
            cpu::linear_backward_weight(run.oracle, sums.data(), nullptr, a0.data(), b0.data(), K, N, M, Acc::Set);
            for (size_t i = 0; i < sums.size(); i++) out0[i] = bf16(sums[i]);
        } else if (inputs) cpu::linear_backward_input(run.oracle, out0.data(), a0.data(), b0.data(), M, N, K);
        else cpu::linear_forward(run.oracle, out0.data(), a0.data(), b0.data(), nullptr, M, K, N);
    }
    std::string name() const { return format("%d x %d, K %d", M, N, K); }
    double work() const { return 2.0 * M * N * K; }
    void restore(gpu::Ctx& ctx) { out.restore(ctx); }
    // Two roundings to bf16 may be a unit apart, of sums of K products of at most 1, each of which has an error of K u at most.
    void check(ladder::Verdict& verdict) {
        verdict.close("out", out, out0, N, ladder::roundoff<bf16>, (double)K * K * ladder::u);
    }
    Strides strides() const {
        return {a_major == by_rows ? (size_t)K : 1, a_major == by_rows ? 1 : (size_t)M, b_major == by_rows ? (size_t)K : 1,
                b_major == by_rows ? 1 : (size_t)N};
    }
};

std::string lacks_hopper(const gpu::Ctx& ctx) {
    return ctx.capability == 90
               ? ""
               : format("needs a GPU of compute capability 9.0, this is %d.%d", ctx.capability / 10, ctx.capability % 10);
}

template <class P>
void run_naive(gpu::Ctx& ctx, P& x) {
    LAUNCH(naive, dim3(ceil_div(x.N, 32), ceil_div(x.M, 8)), dim3(32, 8), 0, ctx, x.out.p(), x.a.p(), x.b.p(), x.strides(), x.M,
           x.N, x.K);
}
template <class P>
void run_tiled(gpu::Ctx& ctx, P& x) {
    LAUNCH(tiled, dim3(ceil_div(x.N, 128), ceil_div(x.M, 128)), 256, 0, ctx, x.out.p(), x.a.p(), x.b.p(), x.strides(), x.M, x.N,
           x.K);
}
void run_mma(gpu::Ctx& ctx, Factors<Product::forward>& x) {
    LAUNCH(mma, dim3(ceil_div(x.N, 128), ceil_div(x.M, 128)), 256, 2 * 3 * 128 * 32 * sizeof(bf16), ctx, x.out.p(), x.a.p(),
           x.b.p(), x.M, x.N, x.K);
}
void run_wgmma(gpu::Ctx& ctx, Factors<Product::forward>& x) {
    const CUtensorMap a_map = gpu::hopper::gemm_map(ctx, {x.a.p(), by_rows}, x.M, x.K),
                      b_map = gpu::hopper::gemm_map(ctx, {x.b.p(), by_rows}, x.N, x.K);
    LAUNCH(wgmma_tiles, dim3(ceil_div(x.N, 128), ceil_div(x.M, 128)), 256, 4 * 2 * 128 * 64 * sizeof(bf16) + 4 * 8, ctx, a_map,
           b_map, x.out.p(), x.M, x.N, ceil_div(x.K, 64));
}
template <int cluster, class P>
void run_hopper(gpu::Ctx& ctx, P& x) {
    gpu::hopper::gemm(ctx, x.out.p(), {x.a.p(), P::a_major}, {x.b.p(), P::b_major}, nullptr, x.M, x.N, x.K, {cluster, 0});
}
template <class P>
void run_cublas(gpu::Ctx& ctx, P& x) {
    if (P::weights) gpu::linear_backward_weight(ctx, Elements{x.out.p()}, nullptr, x.a.p(), x.b.p(), x.K, x.N, x.M, Acc::Set);
    else if (P::inputs) gpu::linear_backward_input(ctx, x.out.p(), x.a.p(), x.b.p(), x.M, x.N, x.K);
    else gpu::linear_forward(ctx, x.out.p(), x.a.p(), x.b.p(), nullptr, x.M, x.K, x.N);
}

double matmul_rate(ladder::Run& run) {
    constexpr int n = 8192;
    const auto values = ladder::random<bf16>((size_t)n * n, 1, -1, 1);
    const ladder::Array<bf16> x(values), w(values), y(values.size());
    const auto multiply = [&] { gpu::linear_forward(run.ctx, y.p(), x.p(), w.p(), nullptr, n, n, n); };
    return 2.0 * n * n * n / run.seconds([] {}, multiply);
}
constexpr ladder::Bound matmul_bound{"TFLOP/s", "cuBLASLt 8192^3", 1e12, matmul_rate};

// Layers of GPT-2 124M (64 x 1024 tokens), Llama 1B (8 x 2048) and 7B (2 x 4096).
template <Product product>
void climb_layers(ladder::Run& run, const char* name, const std::vector<Shape>& large) {
    using P = Factors<product>;
    ladder::climb<P, Shape>(run, name, matmul_bound,
                            {{"a producer, tiles of 128 x 256, persistent", run_hopper<1, P>, true, lacks_hopper},
                             {"clusters of two blocks that share B", run_hopper<2, P>, true, lacks_hopper},
                             {"cuBLASLt", run_cublas<P>}},
                            {{136, 264, 72}, {8, 8, 8}}, large);
}

void climb_all(ladder::Run& run) {
    using Forward = Factors<Product::forward>;
    ladder::climb<Forward, Shape>(run, "matrix product", matmul_bound,
                                  {{"a thread per element", run_naive<Forward>},
                                   {"tiles in shared memory, 8 x 8 per thread", run_tiled<Forward>},
                                   {"tensor cores: mma.sync", run_mma},
                                   {"Hopper: wgmma and TMA", run_wgmma, true, lacks_hopper},
                                   {"a producer, tiles of 128 x 256, persistent", run_hopper<1, Forward>, true, lacks_hopper},
                                   {"clusters of two blocks that share B", run_hopper<2, Forward>, true, lacks_hopper},
                                   {"cuBLASLt", run_cublas<Forward>}},
                                  {{130, 264, 72}, {1, 8, 8}, {300, 136, 200}}, {{8192, 8192, 8192}});
    climb_layers<Product::forward>(run, "layers' products",
                                   {{65536, 3072, 768}, {65536, 768, 3072}, {16384, 2048, 2048}, {8192, 11008, 4096}});
    climb_layers<Product::backward_input>(run, "products for inputs' gradients", {{65536, 768, 3072}, {8192, 4096, 11008}});
    climb_layers<Product::backward_weight>(run, "products for weights' gradients",
                                           {{3072, 768, 65536}, {768, 768, 65536}, {4096, 11008, 8192}});
}

}  // namespace

int main(int argc, char** argv) {
    return ladder::main(argc, argv, "A matrix product, from a thread per element to clusters that share their loads.",
                        climb_all);
}
