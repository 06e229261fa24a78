// Each wrapper of llmc/gpu/hopper.cuh by itself, compared with plain loops: TMA boxes with edges inside and outside the
// array, their swizzle, all forms of wgmma, mbarriers, named barriers. Then a small pipeline of all of them, and the same
// pipeline without one of its waits, which must give wrong numbers.
#include <gtest/gtest.h>

#include "../../llmc/gpu/hopper.cuh"
#include "device_memory.h"
#include "hopper_cases.h"

namespace test_gpu_hopper {

using namespace test;
using namespace gpu::hopper;

class Hopper : public OnHopper {};

// ---- TMA -------------------------------------------------------------------------------------------------------------------
template <int rank>
struct Position {
    int x[rank];
};

template <int rank>
__device__ void load_box(void* to, const CUtensorMap& map, uint64_t* barrier, const Position<rank>& at) {
    if constexpr (rank == 2) tma_load(to, map, barrier, at.x[0], at.x[1]);
    if constexpr (rank == 3) tma_load(to, map, barrier, at.x[0], at.x[1], at.x[2]);
    if constexpr (rank == 4) tma_load(to, map, barrier, at.x[0], at.x[1], at.x[2], at.x[3]);
}
template <int rank>
__device__ void store_box(const CUtensorMap& map, const void* from, const Position<rank>& at) {
    if constexpr (rank == 2) tma_store(map, from, at.x[0], at.x[1]);
    if constexpr (rank == 3) tma_store(map, from, at.x[0], at.x[1], at.x[2]);
    if constexpr (rank == 4) tma_store(map, from, at.x[0], at.x[1], at.x[2], at.x[3]);
}

// Copies shared memory as written by TMA to out.
template <int rank>
__global__ void load_kernel(const __grid_constant__ CUtensorMap map, uint16_t* out, Position<rank> at, int bytes) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(uint16_t, box);
    uint64_t* barrier = (uint64_t*)((unsigned char*)box + bytes);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_prefetch(map);
        mbarrier_arrive_expect(barrier, bytes);
        load_box<rank>(box, map, barrier, at);
    }
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < bytes / 2; i += blockDim.x) out[i] = box[i];
#else
    __trap();
#endif
}
template <int rank>
__global__ void store_kernel(const __grid_constant__ CUtensorMap map, const uint16_t* in, Position<rank> at, int bytes) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(uint16_t, box);
    for (int i = threadIdx.x; i < bytes / 2; i += blockDim.x) box[i] = in[i];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        store_box<rank>(map, box, at);
        tma_store_commit();
        tma_store_wait<0>();
    }
#else
    __trap();
#endif
}

// An array of `sizes` with padded rows, and a box in it.
template <int rank>
struct BoxCase {
    uint64_t sizes[rank], strides[rank - 1];
    uint32_t box[rank];

    size_t elements() const { return strides[rank - 2] * sizes[rank - 1] / 2; }
    size_t box_elements() const {
        size_t n = 1;
        for (const uint32_t x : box) n *= x;
        return n;
    }
    // Calls f(element of the array or -1, element of shared memory) for each element of the box at a position.
    template <class F>
    void each(const Position<rank>& at, F f) const {
        for (size_t i = 0; i < box_elements(); i++) {
            int64_t offset = 0;
            bool inside = true;
            size_t rest = i;
            for (int d = 0; d < rank; rest /= box[d], d++) {
                const int64_t x = at.x[d] + (int64_t)(rest % box[d]);
                inside = inside && x >= 0 && x < (int64_t)sizes[d];
                offset += d == 0 ? x : x * (int64_t)strides[d - 1] / 2;
            }
            const size_t row = i / 64, chunk = i % 64 / 8;
            f(inside ? offset : -1, row * 64 + (chunk ^ row % 8) * 8 + i % 8);
        }
    }
};

template <int rank>
void check_boxes(gpu::Ctx& ctx, const BoxCase<rank>& k, const std::vector<Position<rank>>& positions) {
    const std::vector<bf16> values = Rng(3).normals<bf16>(k.elements());
    const std::vector<bf16> other = Rng(4).normals<bf16>(k.box_elements());
    const int bytes = (int)k.box_elements() * 2;
    for (const Position<rank>& at : positions) {
        DeviceMemory<bf16> array(values, "array"), out(k.box_elements(), "box");
        const CUtensorMap map = tensor_map<rank>(array.p(), k.sizes, k.strides, k.box);
        LAUNCH((load_kernel<rank>), 1, 64, bytes + 16, ctx, map, (uint16_t*)out.p(), at, bytes);
        std::vector<bf16> expected(k.box_elements());
        k.each(at, [&](int64_t from, size_t to) { expected[to] = from >= 0 ? values[from] : bf16(0.0f); });
        expect_same_bits(out.get(), expected, "loaded box");

        if (std::any_of(std::begin(at.x), std::end(at.x), [](int x) { return x < 0; })) continue;  // cannot be stored
        DeviceMemory<bf16> in(other, "in");
        LAUNCH((store_kernel<rank>), 1, 64, bytes, ctx, map, (const uint16_t*)in.p(), at, bytes);
        std::vector<bf16> stored = values;
        k.each(at, [&](int64_t to, size_t from) {
            if (to >= 0) stored[to] = other[from];
        });
        expect_same_bits(array.get(), stored, "array after the store");
    }
}

TEST_F(Hopper, TmaBoxesOfTwoDimensions) {
    // 104 columns of rows of 112, and boxes partly and completely outside. An H100 moves 16 bytes at a time along a row: it
    // stores past the end of 100 columns, which tensor_map refuses, and a box that starts within 16 bytes, or a store from
    // a negative column, is an illegal instruction.
    check_boxes<2>(
        ctx, {{104, 37}, {224}, {64, 16}},
        {{{0, 0}}, {{64, 16}}, {{8, 30}}, {{0, -5}}, {{40, 21}}, {{96, 36}}, {{104, 0}}, {{0, 37}}, {{-64, 0}}, {{-8, 3}}});
}
TEST_F(Hopper, TmaBoxesOfThreeDimensions) {
    check_boxes<3>(ctx, {{64, 5, 3}, {128, 768}, {64, 8, 2}}, {{{0, 0, 0}}, {{0, 2, 2}}, {{8, -1, 1}}, {{0, 0, -1}}});
}
TEST_F(Hopper, TmaBoxesOfFourDimensions) {
    // Heads of a fused projection, as read by attention: (B 2, T 19, heads * slabs 6, 64).
    check_boxes<4>(ctx, {{64, 19, 6, 2}, {768, 128, 19 * 768}, {64, 16, 2, 1}},
                   {{{0, 0, 0, 0}}, {{0, 16, 2, 1}}, {{0, 8, 5, 0}}, {{0, 18, 4, 1}}, {{0, 32, 0, 1}}});
}

__global__ void bulk_kernel(float* out, const float* in, int n) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(float, buffer);
    uint64_t* barrier = (uint64_t*)(buffer + n);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(barrier, n * 4);
        bulk_load(buffer, in, n * 4, barrier);
    }
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = buffer[i];
#else
    __trap();
#endif
}

namespace {
// Blocks add the same numbers, in two warps with a part each, twice: from one buffer, which the first addition must have
// read.
__global__ void bulk_add_kernel(float* sums, int n) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(float, buffer);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = n / 2;
    float* mine = buffer + warp * part;
    for (int round = 0; round < 2; round++) {
        if (lane == 0) tma_store_wait<0>();
        __syncwarp();
        for (int i = lane; i < part; i += 32) mine[i] = (float)(warp * part + i + round);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            bulk_add(sums + warp * part, mine, part * 4);
            tma_store_commit();
        }
    }
    if (lane == 0) tma_store_wait<0>();
#else
    __trap();
#endif
}
}  // namespace

TEST_F(Hopper, BulkAdd) {
    constexpr int n = 200, blocks = 9;
    std::vector<float> start(n), expected(n);
    for (int i = 0; i < n; i++) {
        start[i] = (float)(7 * i);
        expected[i] = (float)(7 * i + blocks * (2 * i + 1));
    }
    DeviceMemory<float> sums(start);
    LAUNCH(bulk_add_kernel, blocks, 64, n * 4, ctx, sums.p(), n);
    expect_same_bits(sums.get(), expected, "sums");
}

TEST_F(Hopper, BulkLoad) {
    const std::vector<float> values = Rng(5).normals<float>(192);
    DeviceMemory<float> in(values), out(values.size());
    LAUNCH(bulk_kernel, 1, 64, 192 * 4 + 16, ctx, out.p(), in.p(), 192);
    expect_same_bits(out.get(), values, "bulk load");
}

// ---- wgmma -----------------------------------------------------------------------------------------------------------------

constexpr int K = 128;

enum class Left { rows, columns, registers };

// out (64, N) = start + a b with a (64, K) or, Left::columns, (K, 64); b is (N, K) or, Major::columns, (K, N). With start null
// the first product overwrites.
template <int N, Major b_major, Left left>
__global__ void product_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float* out,
                               const float* start, const bf16* a_values) {
#ifdef HOPPER_CODE
    constexpr int b_rows = b_major == Major::rows ? N : K, b_slabs = (b_major == Major::rows ? K : N < 64 ? 64 : N) / 64;
    DYNAMIC_SHARED(bf16, a);
    bf16* b = a + 64 * K;
    uint64_t* barrier = (uint64_t*)(b + b_rows * b_slabs * 64);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_fence();
        mbarrier_arrive_expect(barrier, (64 * K + b_rows * b_slabs * 64) * 2);
        for (int slab = 0; slab < (left == Left::columns ? 1 : K / 64); slab++)
            tma_load(a + slab * 64 * 64, a_map, barrier, slab * 64, 0);
        for (int slab = 0; slab < b_slabs; slab++) tma_load(b + slab * b_rows * 64, b_map, barrier, slab * 64, 0);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
    const auto each = [&](auto f) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) f(i, (row + i / 2 % 2 * 8) * N + i / 4 * 8 + column + i % 2);
    };
    float d[N / 2];
    each([&](int i, int element) { d[i] = start ? start[element] : NAN; });
    uint32_t registers[K / 16][4];
#pragma unroll
    for (int i = 0; i < K / 16; i++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const bf16* x = a_values + (row + r % 2 * 8) * K + i * 16 + r / 2 * 8 + column;
            registers[i][r] = gpu::pack_bf16(x[0], x[1]);
        }
    const uint64_t a_matrix = matrix_descriptor(a, 0), b_matrix = matrix_descriptor(b, b_rows * 128);
    wgmma_fence(d, registers);
#pragma unroll
    for (int i = 0; i < K / 16; i++) {
        // 16 along k: 32 bytes within the rows of a slab of 64, or 16 rows.
        const unsigned along_row = (i % 4) * 32;
        const uint64_t b_here = advanced(b_matrix, b_major == Major::rows ? i / 4 * b_rows * 128 + along_row : i * 16 * 128);
        constexpr Major a_major = left == Left::columns ? Major::columns : Major::rows;
        const uint64_t a_here = advanced(a_matrix, left == Left::columns ? i * 16 * 128 : i / 4 * 64 * 128 + along_row);
        if constexpr (left == Left::registers) wgmma<N, b_major>(d, registers[i], b_here, i > 0 || start);
        else if (i > 0 || start) wgmma<N, b_major, a_major>(d, a_here, b_here, true);
        else if constexpr (N == 32 || N == 256) wgmma<N, b_major, a_major>(d, a_here, b_here, false);
        else wgmma_set<N, b_major, a_major>(d, a_here, b_here);
    }
    wgmma_commit();
    wgmma_wait<0>(d);
    each([&](int i, int element) { out[element] = d[i]; });
#else
    __trap();
#endif
}

template <int N, Major b_major, Left left>
void check_product(gpu::Ctx& ctx) {
    SCOPED_TRACE(testing::Message() << "N " << N << (b_major == Major::rows ? ", b by rows" : ", b by columns")
                                    << (left == Left::registers ? ", a in registers"
                                        : left == Left::rows    ? ", a by rows"
                                                                : ", a by columns"));
    const std::vector<bf16> a = whole_numbers(64 * K, 6), b = whole_numbers(N * K, 7);
    std::vector<float> start(64 * N);
    for (int i = 0; i < 64 * N; i++) start[i] = (float)(i % 101 - 50);
    DeviceMemory<bf16> a_device(a), b_device(b);
    DeviceMemory<float> start_device(start);
    const bool rows = b_major == Major::rows, a_rows = left != Left::columns;
    const CUtensorMap a_map = tensor_map<2>(a_device.p(), {(uint64_t)(a_rows ? K : 64), (uint64_t)(a_rows ? 64 : K)},
                                            {(uint64_t)(a_rows ? K : 64) * 2}, {64, (uint32_t)(a_rows ? 64 : K)});
    const CUtensorMap b_map = tensor_map<2>(b_device.p(), {(uint64_t)(rows ? K : N), (uint64_t)(rows ? N : K)},
                                            {(uint64_t)(rows ? K : N) * 2}, {64, (uint32_t)(rows ? N : K)});
    const size_t shared = (64 * K + (rows ? N * K : K * (N < 64 ? 64 : N))) * 2 + 16;
    for (const bool accumulate : {false, true}) {
        DeviceMemory<float> out(64 * N);
        LAUNCH((product_kernel<N, b_major, left>), 1, 128, shared, ctx, a_map, b_map, out.p(),
               accumulate ? start_device.p() : nullptr, a_device.p());
        std::vector<float> expected(64 * N);
        for (int i = 0; i < 64; i++)
            for (int j = 0; j < N; j++) {
                float sum = accumulate ? start[i * N + j] : 0;
                for (int k = 0; k < K; k++)
                    sum += (float)(a_rows ? a[i * K + k] : a[k * 64 + i]) * (float)(rows ? b[j * K + k] : b[k * N + j]);
                expected[i * N + j] = sum;
            }
        expect_same_bits(out.get(), expected, "product");
    }
}

TEST_F(Hopper, Products) {
    check_product<32, Major::rows, Left::rows>(ctx);
    check_product<32, Major::columns, Left::registers>(ctx);
    check_product<64, Major::rows, Left::rows>(ctx);
    check_product<64, Major::rows, Left::columns>(ctx);
    check_product<64, Major::rows, Left::registers>(ctx);
    check_product<64, Major::columns, Left::rows>(ctx);
    check_product<64, Major::columns, Left::columns>(ctx);
    check_product<64, Major::columns, Left::registers>(ctx);
    check_product<128, Major::rows, Left::rows>(ctx);
    check_product<128, Major::rows, Left::registers>(ctx);
    check_product<128, Major::columns, Left::rows>(ctx);
    check_product<128, Major::columns, Left::columns>(ctx);
    check_product<128, Major::columns, Left::registers>(ctx);
    check_product<256, Major::rows, Left::rows>(ctx);
    check_product<256, Major::columns, Left::rows>(ctx);
    check_product<256, Major::columns, Left::columns>(ctx);
}

// Each warp stores 16 x 16 numbers, in the layout of mma's d, with rows 24 apart.
__global__ void stmatrix_kernel(uint16_t* out) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(uint16_t, tile);  // (2, 16, 24)
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint16_t* mine = tile + warp * 16 * 24;
    uint32_t r[4];
    for (int i = 0; i < 4; i++) {
        const unsigned row = lane / 4 + i % 2 * 8, column = i / 2 * 8 + lane % 4 * 2, x = warp * 256 + row * 16 + column;
        r[i] = x | (x + 1) << 16;
    }
    stmatrix_x4(mine + lane % 16 * 24 + lane / 16 * 8, r);
    __syncthreads();
    for (int i = threadIdx.x; i < 512; i += 64) out[i] = tile[i / 16 * 24 + i % 16];
#else
    __trap();
#endif
}
TEST_F(Hopper, Stmatrix) {
    DeviceMemory<uint16_t> out(512);
    LAUNCH(stmatrix_kernel, 1, 64, 2 * 16 * 24 * 2, ctx, out.p());
    const std::vector<uint16_t> values = out.get();
    for (int i = 0; i < 512; i++) ASSERT_EQ(values[i], i);
}

// ---- barriers --------------------------------------------------------------------------------------------------------------

// Warp 0 writes numbers to a ring of two slots, warps 1 and 2 sum them; 32 arrivals fill a slot, 64 free it.
__global__ void ring_kernel(int* out, int rounds) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(int, place);  // 2 x 32
    uint64_t *full = (uint64_t*)(place + 64), *empty = full + 2;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&full[i], 32);
            mbarrier_init(&empty[i], 64);
        }
        mbarrier_fence();
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = 0;
    for (int i = 0; i < rounds; i++) {
        const int stage = i % 2;
        const unsigned parity = i / 2 & 1;
        if (warp == 0) {
            mbarrier_wait(&empty[stage], parity ^ 1);
            place[stage * 32 + lane] = i * 32 + lane;
            mbarrier_arrive(&full[stage]);
        } else {
            mbarrier_wait(&full[stage], parity);
            sum += place[stage * 32 + (lane + warp) % 32] * (i + 1);
            mbarrier_arrive(&empty[stage]);
        }
    }
    out[threadIdx.x] = sum;
#else
    __trap();
#endif
}

// Three warps use a counter in turn without waiting unnecessarily: arrive for the next warp, sync for the own turn.
__global__ void turns_kernel(int* out, int rounds) {
#ifdef HOPPER_CODE
    DYNAMIC_SHARED(int, counter);
    const int warp = threadIdx.x / 32, next = (warp + 1) % 3;
    if (threadIdx.x == 64) *counter = 0;
    if (warp == 2) named_barrier_arrive(1, 64);  // the first turn
    for (int i = 0; i < rounds; i++) {
        named_barrier_sync(1 + warp, 64);
        const int value = *counter;
        __syncwarp();
        if (threadIdx.x % 32 == 0) *counter = value + 1;
        out[(value * 3 + warp) * 32 + threadIdx.x % 32] = i;
        __syncwarp();
        named_barrier_arrive(1 + next, 64);
    }
    if (warp == 0) named_barrier_sync(1, 64);  // the last arrival
#else
    __trap();
#endif
}

TEST_F(Hopper, MbarrierPhases) {
    for (const int rounds : {1, 2, 3, 9}) {
        DeviceMemory<int> out(96);
        LAUNCH(ring_kernel, 1, 96, 64 * 4 + 32, ctx, out.p(), rounds);
        const std::vector<int> sums = out.get();
        for (int t = 0; t < 96; t++) {
            int expected = 0;
            for (int i = 0; t >= 32 && i < rounds; i++) expected += (i * 32 + (t % 32 + t / 32) % 32) * (i + 1);
            ASSERT_EQ(sums[t], expected) << "thread " << t << ", " << rounds << " rounds";
        }
    }
}

TEST_F(Hopper, NamedBarriersTakeTurns) {
    const int rounds = 5;
    std::vector<int> before(rounds * 3 * 3 * 32, -1);
    DeviceMemory<int> out(before);
    LAUNCH(turns_kernel, 1, 96, 16, ctx, out.p(), rounds);
    const std::vector<int> turns = out.get();
    for (int value = 0; value < rounds * 3; value++)
        for (int warp = 0; warp < 3; warp++)
            for (int lane = 0; lane < 32; lane++)
                ASSERT_EQ(turns[(value * 3 + warp) * 32 + lane], warp == value % 3 ? value / 3 : -1)
                    << "turn " << value << ", warp " << warp << ", lane " << lane;
}

// ---- clusters --------------------------------------------------------------------------------------------------------------

enum class Together { right, no_last_barrier, releases_own_only, loads_own_only, no_first_barrier };

// Both blocks of a cluster sum `steps` boxes (64, 16) in shared memory: each loads 8 rows of a box for both. Two stages.
template <Together how>
__global__ void cluster_kernel(const __grid_constant__ CUtensorMap map, float* out, int steps) {
#ifdef HOPPER_CODE
    struct Shared {
        uint16_t box[2][2][8 * 64];
        uint64_t full[2], empty[2];
    };
    DYNAMIC_SHARED(Shared, shared);
    const unsigned rank = cluster_rank(), first = blockIdx.x / 2 * steps * 16;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&shared->full[i], 1);
            mbarrier_init(&shared->empty[i], how == Together::releases_own_only ? 2 : 4);  // two warps of each block
        }
        mbarrier_fence();
    }
    if (how == Together::no_first_barrier) __syncthreads();
    else cluster_sync();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0)
            for (int i = 0; i < steps; i++) {
                const int stage = i % 2;
                mbarrier_wait(&shared->empty[stage], (i / 2 & 1) ^ 1);
                mbarrier_arrive_expect(&shared->full[stage], sizeof shared->box[0]);
                if (how == Together::loads_own_only)
                    tma_load(shared->box[stage][rank], map, &shared->full[stage], 0, first + i * 16 + rank * 8);
                else tma_load_multicast(shared->box[stage][rank], map, &shared->full[stage], 0, first + i * 16 + rank * 8, 3);
            }
    } else {
        const unsigned lane = threadIdx.x % 32;
        float sum[16] = {};
        for (int i = 0; i < steps; i++) {
            const int stage = i % 2;
            mbarrier_wait(&shared->full[stage], i / 2 & 1);
            for (int e = 0; e < 16; e++) {
                bf16 x;
                x.bits = shared->box[stage][0][e * 64 + threadIdx.x - 32];
                sum[e] += (float)x;
            }
            __syncwarp();
            if (how == Together::releases_own_only && lane == 0) mbarrier_arrive(&shared->empty[stage]);
            if (how != Together::releases_own_only && lane < 2) mbarrier_arrive_in(&shared->empty[stage], lane);
        }
        for (int e = 0; e < 16; e++) out[blockIdx.x * 1024 + e * 64 + threadIdx.x - 32] = sum[e];
    }
    __syncwarp();
    if (how != Together::no_last_barrier) cluster_sync();
#else
    __trap();
#endif
}

template <Together how>
bool cluster_is_right(gpu::Ctx& ctx) {
    constexpr int steps = 7, clusters = 3;
    const std::vector<bf16> values = whole_numbers((size_t)clusters * steps * 16 * 64, 11);
    DeviceMemory<bf16> array(values);
    DeviceMemory<float> out(clusters * 2 * 1024);
    const CUtensorMap map = tensor_map<2>(array.p(), {64, (uint64_t)clusters * steps * 16}, {128}, {64, 8});
    LAUNCH_CLUSTERS((cluster_kernel<how>), 2, clusters * 2, 96, 2 * 2048 + 32, ctx, map, out.p(), steps);
    const std::vector<float> sums = out.get();
    for (int b = 0; b < clusters * 2; b++)
        for (int e = 0; e < 1024; e++) {
            const int row = e / 64, column = ((e % 64 / 8) ^ row % 8) * 8 + e % 8;
            float expected = 0;
            for (int i = 0; i < steps; i++) expected += (float)values[((b / 2 * steps + i) * 16 + row) * 64 + column];
            if (!(sums[b * 1024 + e] == expected)) return false;
        }
    return true;
}
TEST_F(Hopper, Clusters) { EXPECT_TRUE(cluster_is_right<Together::right>(ctx)); }

// ---- a pipeline ------------------------------------------------------------------------------------------------------------

enum class Wrong {
    nothing,
    full_wait_late,
    empty_wait_missing,
    product_wait_late,
    result_wait_late,
    store_wait_missing,
    leading_bytes
};

// out (steps, 64, 128) = running sums of a (64, 64 steps) b (64 steps, 128): a producer warp fills a ring of two stages; a
// warpgroup multiplies and writes each running sum, rounded, through one staging buffer. `wrong` breaks one thing.
template <Wrong wrong>
__global__ void pipeline_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                                const __grid_constant__ CUtensorMap out_map, int steps) {
#ifdef HOPPER_CODE
    struct Shared {
        bf16 a[2][64 * 64], b[2][2 * 64 * 64], staging[2 * 64 * 64];
        uint64_t full[2], empty[2];
    };
    DYNAMIC_SHARED(Shared, shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mbarrier_init(&shared->full[i], 1);
            mbarrier_init(&shared->empty[i], 4);
        }
        mbarrier_fence();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        if (threadIdx.x == 128)
            for (int i = 0; i < steps; i++) {
                const int stage = i % 2;
                if (wrong != Wrong::empty_wait_missing) mbarrier_wait(&shared->empty[stage], (i / 2 & 1) ^ 1);
                mbarrier_arrive_expect(&shared->full[stage], sizeof shared->a[0] + sizeof shared->b[0]);
                tma_load(shared->a[stage], a_map, &shared->full[stage], i * 64, 0);
                tma_load(shared->b[stage], b_map, &shared->full[stage], 0, i * 64);
                tma_load(shared->b[stage] + 64 * 64, b_map, &shared->full[stage], 64, i * 64);
            }
        return;
    }
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
    float d[64];
    for (int i = 0; i < 64; i++) d[i] = 0;
    for (int i = 0; i < steps; i++) {
        const int stage = i % 2;
        if (wrong != Wrong::full_wait_late) mbarrier_wait(&shared->full[stage], i / 2 & 1);
        const uint64_t a = matrix_descriptor(shared->a[stage], 0);
        const uint64_t b = matrix_descriptor(shared->b[stage], wrong == Wrong::leading_bytes ? 0 : 64 * 128);
        wgmma_fence(d);
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma<128, Major::columns>(d, advanced(a, k * 32), advanced(b, k * 16 * 128), true);
        wgmma_commit();
        if (wrong == Wrong::product_wait_late && lane == 0) mbarrier_arrive(&shared->empty[stage]);
        if (wrong != Wrong::result_wait_late) wgmma_wait<0>(d);
        if (wrong == Wrong::full_wait_late) {
            mbarrier_wait(&shared->full[stage], i / 2 & 1);
            named_barrier_sync(1, 128);
        }
        if (wrong != Wrong::product_wait_late && lane == 0) mbarrier_arrive(&shared->empty[stage]);
        if (threadIdx.x == 0 && wrong != Wrong::store_wait_missing) tma_store_wait<0>();
        named_barrier_sync(1, 128);
#pragma unroll
        for (int j = 0; j < 64; j += 2) {
            const int r = row + j / 2 % 2 * 8, c = j / 4 * 8 + column;
            bf16* to = shared->staging + c / 64 * 64 * 64 + r * 64 + (c % 64 / 8 ^ r % 8) * 8 + c % 8;
            *(uint32_t*)to = gpu::pack_bf16(d[j], d[j + 1]);
        }
        if (wrong == Wrong::result_wait_late) wgmma_wait<0>(d);
        fence_proxy_async();
        named_barrier_sync(1, 128);
        if (threadIdx.x == 0) {
            for (int slab = 0; slab < 2; slab++) tma_store(out_map, shared->staging + slab * 64 * 64, slab * 64, i * 64);
            tma_store_commit();
        }
    }
    if (threadIdx.x == 0) tma_store_wait<0>();
#else
    __trap();
#endif
}

template <Wrong wrong>
bool pipeline_is_right(gpu::Ctx& ctx) {
    constexpr int steps = 5;
    const std::vector<bf16> a = whole_numbers(64 * 64 * steps, 8), b = whole_numbers(64 * steps * 128, 9);
    DeviceMemory<bf16> a_device(a), b_device(b), out(steps * 64 * 128);
    const CUtensorMap a_map = tensor_map<2>(a_device.p(), {64 * steps, 64}, {128 * steps}, {64, 64});
    const CUtensorMap b_map = tensor_map<2>(b_device.p(), {128, 64 * steps}, {256}, {64, 64});
    const CUtensorMap out_map = tensor_map<2>(out.p(), {128, 64 * steps}, {256}, {64, 64});
    LAUNCH((pipeline_kernel<wrong>), 1, 160, 100 << 10, ctx, a_map, b_map, out_map, steps);
    const std::vector<bf16> result = out.get();
    std::vector<float> sum(64 * 128);
    for (int step = 0; step < steps; step++)
        for (int i = 0; i < 64; i++)
            for (int j = 0; j < 128; j++) {
                for (int k = step * 64; k < step * 64 + 64; k++)
                    sum[i * 128 + j] += (float)a[i * 64 * steps + k] * (float)b[k * 128 + j];
                if (!((float)result[(step * 64 + i) * 128 + j] == (float)bf16(sum[i * 128 + j]))) return false;
            }
    return true;
}

TEST_F(Hopper, Pipeline) { EXPECT_TRUE(pipeline_is_right<Wrong::nothing>(ctx)); }

// ---- errors that the emulator detects --------------------------------------------------------------------------------------
#ifndef __CUDACC__

template <Wrong wrong>
int wrong_of_20(gpu::Ctx& ctx) {
    const emu::Config before = emu::config();
    emu::config().order = emu::Order::random;
    int n = 0;
    for (unsigned seed = 1; seed <= 20; seed++) {
        emu::config().seed = seed;
        n += !pipeline_is_right<wrong>(ctx);
    }
    emu::config() = before;
    return n;
}

template <Together how>
int wrong_clusters_of_20(gpu::Ctx& ctx) {
    const emu::Config before = emu::config();
    emu::config().order = emu::Order::random;
    int n = 0;
    for (unsigned seed = 1; seed <= 20; seed++) {
        emu::config().seed = seed;
        n += !cluster_is_right<how>(ctx);
    }
    emu::config() = before;
    return n;
}

TEST_F(Hopper, ClustersInAnyOrder) {
    EXPECT_EQ(wrong_clusters_of_20<Together::right>(ctx), 0);
    const emu::Config before = emu::config();
    for (const emu::Order order : {emu::Order::forward, emu::Order::reverse}) {
        emu::config().order = order;
        EXPECT_TRUE(cluster_is_right<Together::right>(ctx));
    }
    emu::config() = before;
}

TEST_F(Hopper, EmulatorShowsMissingWaits) {
#ifdef EMU_TSAN
    GTEST_SKIP() << "these kernels race, as ThreadSanitizer would say";
#endif
    EXPECT_EQ(wrong_of_20<Wrong::nothing>(ctx), 0);
    EXPECT_GE(wrong_of_20<Wrong::full_wait_late>(ctx), 15);
    EXPECT_GE(wrong_of_20<Wrong::product_wait_late>(ctx), 15);
    EXPECT_GE(wrong_of_20<Wrong::result_wait_late>(ctx), 15);
    EXPECT_GE(wrong_of_20<Wrong::store_wait_missing>(ctx), 15);
    EXPECT_EQ(wrong_of_20<Wrong::leading_bytes>(ctx), 20);
    EXPECT_GE(wrong_clusters_of_20<Together::releases_own_only>(ctx), 15);
}

enum class Mistake {
    no_init,
    too_many_arrivals,
    no_arrival,
    no_fence,
    different_products,
    unwaited_product,
    unwaited_load,
    misaligned,
    within_16_bytes,
    stored_before_the_row,
    unfenced_store,
    store_fenced_by_one_warp,
    unfenced_add,
    unfenced_operand
};

template <Mistake mistake>
__global__ void mistaken_kernel(const __grid_constant__ CUtensorMap map, float* sums) {
    DYNAMIC_SHARED(bf16, tile);
    uint64_t* barrier = (uint64_t*)(tile + 64 * 64);
    if (mistake != Mistake::no_init && threadIdx.x == 0) mbarrier_init(barrier, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(barrier, 64 * 64 * 2);
        if (mistake == Mistake::too_many_arrivals) mbarrier_arrive(barrier);
        if (mistake != Mistake::no_arrival)
            tma_load(tile + (mistake == Mistake::misaligned ? 8 : 0), map, barrier, mistake == Mistake::within_16_bytes ? 4 : 0,
                     0);
        if (mistake == Mistake::stored_before_the_row) tma_store(map, tile, -64, 0);
    }
    if (mistake != Mistake::unwaited_load) mbarrier_wait(barrier, 0);
    constexpr bool by_one = mistake == Mistake::store_fenced_by_one_warp;
    constexpr bool adds = mistake == Mistake::unfenced_add;
    if (mistake == Mistake::unfenced_store || by_one || adds || mistake == Mistake::unfenced_operand) {
        tile[threadIdx.x] = bf16((float)blockIdx.x + 20);  // differs from the previous block's data
        if (by_one && threadIdx.x < 32) fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0 && adds) {
            bulk_add(sums, (const float*)tile, 256);
            tma_store_commit();
        }
        if (threadIdx.x == 0 && !adds && mistake != Mistake::unfenced_operand) {
            tma_store(map, tile, 0, 0);
            tma_store_commit();
        }
        if (threadIdx.x == 0) tma_store_wait<0>();
        __syncthreads();
    }
    float d[32];
    if (mistake != Mistake::no_fence) wgmma_fence(d);
    const bool odd = mistake == Mistake::different_products && threadIdx.x == 77;
    wgmma<64, Major::rows>(d, matrix_descriptor(tile, 0), matrix_descriptor(tile + (odd ? 1024 : 0), 0), false);
    wgmma_commit();
    if (mistake != Mistake::unwaited_product) wgmma_wait<0>(d);
}

template <Mistake mistake>
void run_mistaken(gpu::Ctx& ctx, int blocks = 1) {
    emu::config().order = blocks == 1 ? emu::Order::forward : emu::Order::random;
    DeviceMemory<bf16> array(whole_numbers(64 * 64, 10));
    const CUtensorMap map = tensor_map<2>(array.p(), {64, 64}, {128}, {64, 64});
    LAUNCH((mistaken_kernel<mistake>), blocks, 128, 64 * 64 * 2 + 16, ctx, map, (float*)array.p());
    CUDA(cudaDeviceSynchronize());
}

TEST_F(Hopper, EmulatorNamesMistakes) {
#ifdef EMU_TSAN
    GTEST_SKIP() << "ThreadSanitizer and tests that die do not go together";
#endif
    EXPECT_DEATH(pipeline_is_right<Wrong::empty_wait_missing>(ctx), "test_hopper.cu:.*more than 1 arrivals|deadlock");
    EXPECT_DEATH(wrong_clusters_of_20<Together::no_last_barrier>(ctx), "test_hopper.cu:.*block . of the cluster has ended");
    EXPECT_DEATH(wrong_clusters_of_20<Together::no_first_barrier>(ctx), "test_hopper.cu:.*not initialized");
    EXPECT_DEATH(cluster_is_right<Together::loads_own_only>(ctx), "deadlock");
    EXPECT_DEATH(run_mistaken<Mistake::no_init>(ctx), "test_hopper.cu:.*not initialized");
    EXPECT_DEATH(run_mistaken<Mistake::too_many_arrivals>(ctx), "test_hopper.cu:.*more than 1 arrivals");
    EXPECT_DEATH(run_mistaken<Mistake::no_arrival>(ctx), "deadlock.*\n.*128 threads wait at .*test_hopper.cu");
    EXPECT_DEATH(run_mistaken<Mistake::no_fence>(ctx), "test_hopper.cu:.*without wgmma_fence");
    EXPECT_DEATH(run_mistaken<Mistake::different_products>(ctx), "test_hopper.cu:.*another wgmma");
    EXPECT_DEATH(run_mistaken<Mistake::unwaited_product>(ctx), "wgmma that nobody waits for");
    EXPECT_DEATH(run_mistaken<Mistake::unwaited_load>(ctx), "TMA loads were under way");
    EXPECT_DEATH(run_mistaken<Mistake::misaligned>(ctx), "test_hopper.cu:.*not a multiple of 128");
    EXPECT_DEATH(run_mistaken<Mistake::within_16_bytes>(ctx), "test_hopper.cu:.*begins at element 4 of a row, within 16 bytes");
    EXPECT_DEATH(run_mistaken<Mistake::stored_before_the_row>(ctx), "test_hopper.cu:.*a box is stored at -64");
    EXPECT_DEATH(run_mistaken<Mistake::unfenced_store>(ctx), "test_hopper.cu:.*no fence_proxy_async");
    EXPECT_DEATH(run_mistaken<Mistake::store_fenced_by_one_warp>(ctx, 200), "test_hopper.cu:.*no fence_proxy_async");
    EXPECT_DEATH(run_mistaken<Mistake::unfenced_add>(ctx), "test_hopper.cu:.*no fence_proxy_async");
    EXPECT_DEATH(run_mistaken<Mistake::unfenced_operand>(ctx), "test_hopper.cu:.*no fence_proxy_async");
}
#endif

}  // namespace test_gpu_hopper
