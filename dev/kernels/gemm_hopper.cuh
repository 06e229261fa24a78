// Matrix product for Hopper (sm_90a): out (M, N) = A (M, K) B (K, N) [+ bias (N)], bf16 with fp32 sums, rounded once. The
// instructions are in llmc/gpu/hopper.cuh. Each factor is contiguous along K (Major::rows: A is stored (M, K), B (N, K)) or
// along the other dimension (Major::columns: A (K, M), B (K, N)). The products of a linear layer (llmc/gpu/matmul.cuh) are
//   forward          out  = inp weight^T     A = inp, rows        B = weight, rows
//   backward_input   dinp = dout weight      A = dout, rows       B = weight, columns
//   backward_weight  dW   = dout^T inp       A = dout, columns    B = inp, columns      K is the number of tokens
//
// A block multiplies a tile of 128 x 256 in steps of 64 along K. Its first warpgroup is the producer: one thread keeps a ring
// of four stages (A's 128 x 64 and B's 256 x 64, 48 KB) filled by TMA and gives its registers to the two consumers, each of
// which sums 64 x 256 in 128 registers per thread with wgmma m64n256k16. If a tile reaches beyond the matrices, TMA reads zeros
// and clips stores, so only the contiguous dimensions must be multiples of 8 (16 bytes).
//   Clusters. At 5.3 TFLOP/s a multiprocessor reads 48 KB in 0.8 us: 8 TB/s for 132 of them, more than the L2 cache has. The
//   two blocks of a cluster process tiles above one another, so that they need the same B: each loads half of it and
//   multicasts it to both (32 KB per step and block, 5.3 TB/s). A stage is free once the consumers of both have read it.
//   Persistent. The grid fills the GPU; each cluster processes every n-th item. The producer loads the next item's stages
//   while the consumers store. Items are ordered in bands of rows (2048 of M), so that the 66 active clusters share rows and
//   columns in the L2 cache.
//   Epilogue. Each warp writes its 16 rows by stmatrix into its own two buffers of 16 x 64, and TMA stores these: no barriers
//   between warps.
//   Splits. If there are fewer tiles than multiprocessors (gradients of small weights), K is split, parts of the sums go to
//   scratch memory in fp32, and a second kernel adds them in order.
//
// Determinism: sums have a fixed order, given the sizes and the number of multiprocessors. K is summed in order within a split.
// Cost: 2 M N K FLOPs; bound by the tensor cores. Not yet measured on a GPU (dev/kernels/bench.md has the prediction).
#pragma once
#include "../../llmc/gpu/device.cuh"
#include "../../llmc/gpu/hopper.cuh"

namespace gpu::hopper {

struct Gemm {
    static constexpr int rows = 128, columns = 256, depth = 64, stages = 4;
    static constexpr int consumers = 2, warps = 4 * consumers, threads = 128 * (1 + consumers);
    static constexpr int unit = 128, unit_elements = unit * depth;  // 128 rows of A or columns of B, over one step
    static constexpr int producer_registers = 40, consumer_registers = 232;
    static_assert(producer_registers + consumers * consumer_registers <= 512, "a multiprocessor has 64 K registers");
    struct Shared {
        bf16 a[stages][unit_elements], b[stages][2][unit_elements];
        bf16 out[warps][2][16 * 64];
        uint64_t full[stages], empty[stages];
    };
    static_assert(sizeof(Shared) <= 232448, "what a block can have");
    static constexpr unsigned stage_bytes = 3 * unit_elements * sizeof(bf16);
};

// The items of a product, one tile per block of a cluster: (128 * cluster, 256) over a part of K.
struct GemmWork {
    int M, N, steps, splits;   // steps along K
    int rows, columns, group;  // items; rows of a band
    struct Item {
        int row, column, split, first, last;  // steps first .. last - 1
    };
    __host__ __device__ int tiles() const { return rows * columns; }
    __host__ __device__ int items() const { return tiles() * splits; }
    __device__ Item item(int i) const {
        const int split = i / tiles(), tile = i % tiles(), band = tile / (group * columns), in_band = tile % (group * columns);
        const int height = min(group, rows - band * group);
        return {band * group + in_band % height, in_band / height, split, steps * split / splits, steps * (split + 1) / splits};
    }
};

// ---- device ----------------------------------------------------------------------------------------------------------------
#ifdef HOPPER_CODE

// Loads 128 rows of A, or columns of B, from x on, over step k. blocks: the mask of a multicast, 0: only to this block.
template <Major major>
__device__ __forceinline__ void load_unit(bf16* to, const CUtensorMap& map, uint64_t* full, int x, int k, uint16_t blocks) {
    const auto load = [&](bf16* box, int x0, int x1) {
        if (blocks) tma_load_multicast(box, map, full, x0, x1, blocks);
        else tma_load(box, map, full, x0, x1);
    };
    if constexpr (major == Major::rows) load(to, k * Gemm::depth, x);
    else
        for (int slab = 0; slab < Gemm::unit / 64; slab++) load(to + slab * 64 * 64, x + slab * 64, k * Gemm::depth);
}

template <int cluster, Major a_major, Major b_major>
__device__ void gemm_producer(Gemm::Shared& shared, const CUtensorMap& a_map, const CUtensorMap& b_map, const GemmWork& work) {
    const int rank = cluster > 1 ? (int)cluster_rank() : 0;
    unsigned n = 0;  // stages filled so far
    for (int i = blockIdx.x / cluster; i < work.items(); i += gridDim.x / cluster) {
        const GemmWork::Item item = work.item(i);
        const int m0 = (item.row * cluster + rank) * Gemm::rows, n0 = item.column * Gemm::columns;
        for (int k = item.first; k < item.last; k++, n++) {
            const unsigned stage = n % Gemm::stages;
            uint64_t* full = &shared.full[stage];
            mbarrier_wait(&shared.empty[stage], (n / Gemm::stages & 1) ^ 1);
            mbarrier_arrive_expect(full, Gemm::stage_bytes);  // both halves of B, from either block
            load_unit<a_major>(shared.a[stage], a_map, full, m0, k, 0);
            for (int half = 0; half < 2; half++)
                if (cluster == 1 || half == rank)
                    load_unit<b_major>(shared.b[stage][half], b_map, full, n0 + half * Gemm::unit, k, cluster > 1 ? 3 : 0);
        }
    }
}

// Adds to the two columns of each of a thread's register pairs the bias of column `first` + 8j.
__device__ __forceinline__ void add_bias(float (&d)[128], const bf16* bias, int first, int N) {
#pragma unroll
    for (int j = 0; j < 32; j++) {
        if (first + 8 * j >= N) continue;
        const uint32_t pair = *reinterpret_cast<const uint32_t*>(bias + first + 8 * j);
        const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
        d[4 * j] += low;
        d[4 * j + 1] += high;
        d[4 * j + 2] += low;
        d[4 * j + 3] += high;
    }
}

// A warp stores its (16, 256), rounded, from row m on.
__device__ __forceinline__ void store_rows(bf16 (&buffers)[2][16 * 64], const CUtensorMap& out_map, const float (&d)[128],
                                           int m, int n0, int N) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int slab = 0; slab < 4; slab++) {
        bf16* buffer = buffers[slab % 2];
        if (lane == 0) tma_store_wait<1>();  // the store before last has left this buffer
        __syncwarp();
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {  // two times 8 columns, 16 rows
            const float* x = d + slab * 32 + pair * 8;
            const uint32_t r[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
            const int row = lane % 16, chunk = pair * 2 + lane / 16;
            stmatrix_x4(buffer + row * 64 + (chunk ^ row % 8) * 8, r);
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            if (n0 + slab * 64 < N) tma_store(out_map, buffer, n0 + slab * 64, m);
            tma_store_commit();
        }
    }
}
// A thread stores its part of a split's sums (M, N) in fp32: rows `row` and row + 8, columns `first` + 8j and the next.
__device__ __forceinline__ void store_sums(float* sums, const float (&d)[128], int row, int first, int M, int N) {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int j = 0; j < 32; j++)
            if (row + 8 * r < M && first + 8 * j < N)
                *reinterpret_cast<float2*>(sums + (size_t)(row + 8 * r) * N + first + 8 * j) =
                    float2{d[4 * j + 2 * r], d[4 * j + 2 * r + 1]};
}

template <int cluster, Major a_major, Major b_major>
__device__ void gemm_consumer(Gemm::Shared& shared, const CUtensorMap& out_map, const GemmWork& work, const bf16* bias,
                              float* sums, int w) {
    constexpr int a_step = a_major == Major::rows ? 32 : 16 * 128, b_step = b_major == Major::rows ? 32 : 16 * 128;
    const int rank = cluster > 1 ? (int)cluster_rank() : 0, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const auto release = [&](unsigned n) {  // stage n may be filled again, by both blocks
        __syncwarp();
        if (cluster == 1 && lane == 0) mbarrier_arrive(&shared.empty[n % Gemm::stages]);
        if (cluster > 1 && lane < cluster) mbarrier_arrive_in(&shared.empty[n % Gemm::stages], (unsigned)lane);
    };
    float d[128];
#pragma unroll
    for (int i = 0; i < 128; i++) d[i] = 0;
    unsigned n = 0;  // stages multiplied so far
    for (int i = blockIdx.x / cluster; i < work.items(); i += gridDim.x / cluster) {
        const GemmWork::Item item = work.item(i);
        for (int k = item.first; k < item.last; k++, n++) {
            const unsigned stage = n % Gemm::stages;
            mbarrier_wait(&shared.full[stage], n / Gemm::stages & 1);
            const uint64_t a = matrix_descriptor(shared.a[stage] + w * 64 * 64, 0),
                           b = matrix_descriptor(shared.b[stage], 64 * 128);
            wgmma_fence(d);
#pragma unroll
            for (int j = 0; j < Gemm::depth / 16; j++)
                wgmma<256, b_major, a_major>(d, advanced(a, j * a_step), advanced(b, j * b_step), k > item.first || j > 0);
            wgmma_commit();
            wgmma_wait<1>();  // the stage before
            if (k > item.first) release(n - 1);
        }
        wgmma_wait<0>(d);
        release(n - 1);
        const int m = (item.row * cluster + rank) * Gemm::rows + w * 64 + warp * 16, n0 = item.column * Gemm::columns;
        const int column = n0 + lane % 4 * 2;
        if (sums) {
            store_sums(sums + (size_t)item.split * work.M * work.N, d, m + lane / 4, column, work.M, work.N);
            continue;
        }
        if (bias) add_bias(d, bias, column, work.N);
        store_rows(shared.out[w * 4 + warp], out_map, d, m, n0, work.N);
    }
    if (lane == 0) tma_store_wait<0>();
}

#endif

template <int cluster, Major a_major, Major b_major>
__global__ void __launch_bounds__(Gemm::threads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                const __grid_constant__ CUtensorMap out_map, GemmWork work, const bf16* bias, float* sums) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(Gemm::Shared, shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Gemm::stages; i++) {
            mbarrier_init(&shared->full[i], 1);
            mbarrier_init(&shared->empty[i], cluster * Gemm::warps);
        }
        mbarrier_fence();
    }
    if (cluster > 1) cluster_sync();
    else __syncthreads();
    const int warpgroup = __shfl_sync(all_lanes, threadIdx.x / 128, 0);  // declares it uniform in a warp
    if (warpgroup == 0) {
        registers_decrease<Gemm::producer_registers>();
        if (threadIdx.x == 0) gemm_producer<cluster, a_major, b_major>(*shared, a_map, b_map, work);
    } else {
        registers_increase<Gemm::consumer_registers>();
        gemm_consumer<cluster, a_major, b_major>(*shared, out_map, work, bias, sums, warpgroup - 1);
    }
    __syncwarp();
    if (cluster > 1) cluster_sync();  // the other block still arrives at this one's mbarriers
#else
    __trap();
#endif
}

// out (M, N) = the sums of all splits, in order [+ bias (N)]. A thread adds 4 neighbors, of one row as N % 8 == 0.
__global__ void gemm_sum_kernel(bf16* out, const float* sums, const bf16* bias, size_t n, int N, int splits) {
    const size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) return;
    Pack<float> sum = load(sums + i);
    for (int split = 1; split < splits; split++) {
        const Pack<float> x = load(sums + split * n + i);
        for (int e = 0; e < 4; e++) sum[e] += x[e];
    }
    if (bias)
        for (int e = 0; e < 4; e++) sum[e] += (float)bias[i % N + e];
    uint2 bits{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3])};
    *reinterpret_cast<uint2*>(out + i) = bits;
}

// ---- host ------------------------------------------------------------------------------------------------------------------
struct GemmFactor {
    const bf16* p;
    Major major;
};

// The tensor map of a factor of `size` rows or columns, in the boxes of load_unit.
inline CUtensorMap gemm_map(Ctx& ctx, const GemmFactor& x, int size, int K) {
    if (!ctx.tensor_maps) ctx.tensor_maps = std::make_shared<TensorMaps>();
    const uint64_t inner = x.major == Major::rows ? (uint64_t)K : (uint64_t)size,
                   outer = x.major == Major::rows ? (uint64_t)size : (uint64_t)K;
    return ctx.tensor_maps->get<2>(x.p, {inner, outer}, {inner * sizeof(bf16)},
                                   {64, x.major == Major::rows ? (uint32_t)Gemm::unit : 64u});
}

// The number of splits with the shortest time, in steps of 0.8 us: rounds of items, 4 steps for each item's first loads and its
// epilogue; and 8 bytes per element and split that are written and read, 2.4 MB in a step.
inline int gemm_splits(int tiles, int steps, int clusters, size_t elements) {
    int best = 1;
    double least = INFINITY;
    for (int splits = 1; splits <= 16 && splits * 8 <= std::max(steps, 8); splits++) {
        const double rounds = ceil_div(tiles * splits, clusters);
        const double time = rounds * (ceil_div(steps, splits) + 4) + (splits > 1 ? 8e-6 / 2.4 * (double)elements * splits : 0);
        if (!(time < least)) continue;
        least = time;
        best = splits;
    }
    return best;
}

template <int cluster, Major a_major, Major b_major>
void run_gemm(Ctx& ctx, bf16* out, const bf16* a, const bf16* b, const bf16* bias, int M, int N, int K, int splits) {
    GemmWork work{M,           N, ceil_div(K, Gemm::depth), 1, ceil_div(M, Gemm::rows * cluster), ceil_div(N, Gemm::columns),
                  16 / cluster};
    const int clusters = std::max(1, ctx.multiprocessors / cluster);
    work.splits = splits ? splits : gemm_splits(work.tiles(), work.steps, clusters, (size_t)M * N);
    CHECK(work.splits <= work.steps, "%d splits of %d steps", work.splits, work.steps);
    float* sums = work.splits > 1 ? (float*)ctx.scratch(sizeof(float) * (size_t)M * N * work.splits) : nullptr;
    const CUtensorMap a_map = gemm_map(ctx, {a, a_major}, M, K), b_map = gemm_map(ctx, {b, b_major}, N, K);
    const CUtensorMap out_map =
        ctx.tensor_maps->get<2>(out, {(uint64_t)N, (uint64_t)M}, {(uint64_t)N * sizeof(bf16)}, {64, 16});
    LAUNCH_CLUSTERS((gemm_kernel<cluster, a_major, b_major>), cluster, cluster * std::min(clusters, work.items()),
                    Gemm::threads, sizeof(Gemm::Shared), ctx, a_map, b_map, out_map, work, bias, sums);
    if (!sums) return;
    const size_t n = (size_t)M * N;
    LAUNCH(gemm_sum_kernel, (unsigned)ceil_div(n / 4, (size_t)256), 256, 0, ctx, out, sums, bias, n, N, work.splits);
}

struct GemmOptions {
    int cluster;  // 1 or 2 blocks that share B
    int splits;   // of K; 0: chosen automatically
};
template <int cluster>
void choose_gemm(Ctx& ctx, bf16* out, const GemmFactor& a, const GemmFactor& b, const bf16* bias, int M, int N, int K,
                 int splits) {
    if (a.major == Major::columns) run_gemm<cluster, Major::columns, Major::columns>(ctx, out, a.p, b.p, bias, M, N, K, splits);
    else if (b.major == Major::columns)
        run_gemm<cluster, Major::rows, Major::columns>(ctx, out, a.p, b.p, bias, M, N, K, splits);
    else run_gemm<cluster, Major::rows, Major::rows>(ctx, out, a.p, b.p, bias, M, N, K, splits);
}
inline void gemm(Ctx& ctx, bf16* out /*(M, N)*/, const GemmFactor& a, const GemmFactor& b, const bf16* bias /*(N) or null*/,
                 int M, int N, int K, const GemmOptions& options) {
    CHECK(ctx.capability == 90, "wgmma on capability %d", ctx.capability);
    CHECK(K > 0 && N % 8 == 0 && (a.major == Major::rows ? K : M) % 8 == 0 && (b.major == Major::rows ? K : N) % 8 == 0,
          "M %d, N %d, K %d: rows in memory must be multiples of 16 bytes", M, N, K);
    CHECK(a.major == Major::rows || b.major == Major::columns, "no product needs this pair of layouts");
    const auto run = options.cluster == 1 ? choose_gemm<1> : choose_gemm<2>;
    run(ctx, out, a, b, bias, M, N, K, options.splits);
}

}  // namespace gpu::hopper
