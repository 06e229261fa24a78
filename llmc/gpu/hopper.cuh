// The instructions that Hopper (sm_90a) adds for matrix kernels, one function each: inline PTX on a GPU, an equivalent on the
// CPU in test/emu/hopper.h. Source: NVIDIA's PTX ISA (mbarrier, cp.async.bulk.tensor, wgmma, setmaxnreg).
//
// mbarrier. 8 bytes of shared memory that count arrivals and bytes. A phase completes after `count` arrivals, when TMA has
// written all bytes that were announced; then the next phase starts. mbarrier_wait(b, parity) returns once the phase of that
// parity is complete: a new barrier is in phase 0, so waiting for parity 0 waits for its first completion, and for parity 1
// returns at once.
//
// TMA, the copy engine. One thread starts the copy of a whole box of an array of up to 5 dimensions; elements outside the array
// are read as 0 and not written. The array, the box and the layout in shared memory are described by a CUtensorMap that the
// host makes (tensor_map) and passes as `const __grid_constant__ CUtensorMap`. Coordinates count elements, the contiguous
// dimension first. All boxes here have rows of 128 bytes (64 bf16) and the 128-byte swizzle: in each group of 8 rows, aligned
// to 1024 bytes, 16-byte chunk c of row r is stored at position c ^ r, so that the chunks of one column in 8 rows are in
// different banks.
//
// wgmma. A warpgroup (4 warps, the first of which has an index divisible by 4) multiplies a (64, 16) by b (16, N) into fp32
// registers, asynchronously: fence, products, commit; then wait. Until then the registers must not be accessed.
//   d: warp w holds rows 16w .. 16w+15. With g = lane / 4, t = lane % 4:
//      d[4j] (g, 8j + 2t)  d[4j+1] (g, 8j + 2t+1)  d[4j+2] (g+8, 8j + 2t)  d[4j+3] (g+8, 8j + 2t+1)
//   a: from shared memory through a descriptor, or four registers per thread as in mma_m16n8k16 (tensor.cuh). So the
//      registers of 16 columns of one product's d, rounded and packed in pairs, are an a of the next: d[8i] and d[8i+1], ...
//   b: from shared memory through a descriptor, in one of two layouts, both of rows of 128 bytes, swizzled:
//      Major::rows     row n holds b's column n along k (64 k): the product is a b^T of row-major matrices
//      Major::columns  row k holds b's row k along n (64 n); further columns are `leading` bytes on
//   An a in shared memory has the same two layouts: Major::rows, row m holds its row m along k; Major::columns, row k holds its
//   column k along m.
// A descriptor has the address / 16 in bits 0-13, `leading` / 16 in 16-29, `stride` (from 8 rows to the next 8) / 16 in 32-45,
// and in 62-63 the swizzle, 1 for 128 bytes. The hardware swizzles by address bits, so a step along k within the 128 bytes is
// just +32 bytes.
//
// Clusters. Blocks launched with LAUNCH_CLUSTERS run at the same time on neighboring multiprocessors. TMA can write one box to
// several of them (multicast), at the same offset of each one's shared memory, and completes bytes on each one's mbarrier of
// the same offset; a thread can arrive at another block's mbarrier. A block must not end while others may still do so.
//
// Ordinary stores to shared memory that TMA or wgmma read next need fence_proxy_async() in each writing thread, then a barrier.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <array>
#include <unordered_map>

#include "ctx.cuh"
#include "tensor.cuh"

namespace gpu::hopper {

enum class Major { rows, columns };

}  // namespace gpu::hopper

// Code for Hopper is compiled in the pass for sm_90a and in the emulator; in other passes kernels have empty bodies.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HOPPER_CODE 1
#endif

#ifdef __CUDACC__

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define HOPPER_ASM(...) __trap()
#endif

namespace gpu::hopper {

// ---- mbarriers -------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, unsigned count) {
    HOPPER_ASM("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// After the inits, before a barrier of the block: makes them visible to the copy engine.
__device__ __forceinline__ void mbarrier_fence() { HOPPER_ASM("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
    HOPPER_ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives and announces that this many bytes will be written in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, unsigned bytes) {
    HOPPER_ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, unsigned parity) {
    unsigned over = 0;
    do {
        HOPPER_ASM(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!over);
}

// ---- clusters --------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank = 0;
    HOPPER_ASM("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// A barrier of all threads of the cluster, each warp as a whole.
__device__ __forceinline__ void cluster_sync() {
    HOPPER_ASM(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}
// Arrives at the mbarrier of the cluster's block `rank` that is at the same offset as this one. Orders products and tensor
// copies that were waited for; ordinary stores for the other block would need .release.cluster, which ptxas compiles to a fence
// of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_in(uint64_t* barrier, unsigned rank) {
    HOPPER_ASM(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

// ---- TMA -------------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
    HOPPER_ASM("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                   shared_address(to)),
               "l"(&map), "r"(shared_address(barrier)), "r"(x0), "r"(x1)
               : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1, int x2) {
    HOPPER_ASM(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2)
        : "memory");
}
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1, int x2, int x3) {
    HOPPER_ASM(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
        : "memory");
}
// To each block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap& map, uint64_t* barrier, int x0, int x1,
                                                   uint16_t blocks) {
    HOPPER_ASM(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "h"(blocks)
        : "memory");
}
// Stores are grouped by the thread that starts them: store ..., commit, wait.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int x0, int x1) {
    HOPPER_ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x0), "r"(x1)
               : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int x0, int x1, int x2) {
    HOPPER_ASM("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2)
               : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int x0, int x1, int x2, int x3) {
    HOPPER_ASM("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
// Adds fp32 numbers from shared memory to the numbers at `to`, in no fixed order among such adds; grouped like the stores
// above. Addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_add(float* to, const float* from, unsigned bytes) {
    HOPPER_ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { HOPPER_ASM("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `pending` of this thread's groups have yet to read shared memory. Their writes are visible when the
// kernel ends.
template <int pending>
__device__ __forceinline__ void tma_store_wait() {
    HOPPER_ASM("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}
// Copies contiguous bytes; addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
    HOPPER_ASM(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
__device__ __forceinline__ void fence_proxy_async() { HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- wgmma -----------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint32_t descriptor_address(const void* p) { return shared_address(p); }

// To the compiler, a wgmma is complete when issued. Naming the registers in an empty asm next to a fence or wait keeps it from
// moving accesses across.
template <int R>
__device__ __forceinline__ void pin_registers(float (&r)[R]) {
#pragma unroll
    for (int i = 0; i < R; i++) asm volatile("" : "+f"(r[i])::"memory");
}
// Required before the first product, and before any product whose registers were accessed since: d, and a if it is in
// registers.
__device__ __forceinline__ void wgmma_fence() { HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int R>
__device__ __forceinline__ void wgmma_fence(float (&d)[R]) {
    pin_registers(d);
    wgmma_fence();
}
template <int R, int S>
__device__ __forceinline__ void wgmma_fence(float (&d)[R], uint32_t (&a)[S][4]) {
#pragma unroll
    for (int i = 0; i < S; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
    wgmma_fence(d);
}
__device__ __forceinline__ void wgmma_commit() { HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` committed groups are unfinished; r: registers that may be accessed afterwards.
template <int pending, int R>
__device__ __forceinline__ void wgmma_wait(float (&r)[R]) {
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
    pin_registers(r);
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// ptxas moves a wait up within its basic block, ahead of arithmetic that was to overlap with the products (seen in SASS of CUDA
// 13.0: all of forward's exponentials came after it). A branch that is never taken, unknown to ptxas, ends the basic block.
__device__ __forceinline__ void end_of_basic_block(bool never) {
    if (never) HOPPER_ASM("nanosleep.u32 0;" ::: "memory");
}

// Operands of the asm statements below: the registers of d, by number and by value.
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64 D16(0), D16(16), D16(32), D16(48)
#define D128 D64, D16(64), D16(80), D16(96), D16(112)
#define D_SET_4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define D_SET_16(i) D_SET_4(i), D_SET_4(i + 4), D_SET_4(i + 8), D_SET_4(i + 12)
#define D_NUMBERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define D_NUMBERS_32 D_NUMBERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D_NUMBERS_64                                                                                       \
    D_NUMBERS_32                                                                                           \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56" \
    ",%57,%58,%59,%60,%61,%62,%63"
#define D_NUMBERS_128                                                                                           \
    D_NUMBERS_64                                                                                                \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89"  \
    ",%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112" \
    ",%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_BEGIN(N, accumulate)                 \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate \
    ", 0;\n"                                       \
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "

// d = a b, ignoring d's value: unlike with accumulate = false below, the compiler need not keep any earlier value of d.
template <int N, Major b_major, Major a_major = Major::rows>
__device__ __forceinline__ void wgmma_set(float (&d)[N / 2], uint64_t a, uint64_t b) {
    static_assert(N == 64 || N == 128, "the supported widths");
    constexpr int columns = b_major == Major::columns, a_columns = a_major == Major::columns;
    if constexpr (N == 64)
        HOPPER_ASM(WGMMA_BEGIN(64, "0") "{" D_NUMBERS_32 "}, %32, %33, p, 1, 1, %34, %35;\n}"
                   : D_SET_16(0), D_SET_16(16)
                   : "l"(a), "l"(b), "n"(a_columns), "n"(columns));
    if constexpr (N == 128)
        HOPPER_ASM(WGMMA_BEGIN(128, "0") "{" D_NUMBERS_64 "}, %64, %65, p, 1, 1, %66, %67;\n}"
                   : D_SET_16(0), D_SET_16(16), D_SET_16(32), D_SET_16(48)
                   : "l"(a), "l"(b), "n"(a_columns), "n"(columns));
}
// d = a b, or d += a b. a: (64, 16) at a descriptor.
template <int N, Major b_major, Major a_major = Major::rows>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(N == 32 || N == 64 || N == 128 || N == 256, "the supported widths");
    constexpr int columns = b_major == Major::columns, a_columns = a_major == Major::columns;
    if constexpr (N == 32)
        HOPPER_ASM(WGMMA_BEGIN(32, "%18") "{" D_NUMBERS_16 "}, %16, %17, p, 1, 1, %19, %20;\n}"
                   : D16(0)
                   : "l"(a), "l"(b), "r"((int)accumulate), "n"(a_columns), "n"(columns));
    if constexpr (N == 64)
        HOPPER_ASM(WGMMA_BEGIN(64, "%34") "{" D_NUMBERS_32 "}, %32, %33, p, 1, 1, %35, %36;\n}"
                   : D16(0), D16(16)
                   : "l"(a), "l"(b), "r"((int)accumulate), "n"(a_columns), "n"(columns));
    if constexpr (N == 128)
        HOPPER_ASM(WGMMA_BEGIN(128, "%66") "{" D_NUMBERS_64 "}, %64, %65, p, 1, 1, %67, %68;\n}"
                   : D64
                   : "l"(a), "l"(b), "r"((int)accumulate), "n"(a_columns), "n"(columns));
    if constexpr (N == 256)
        HOPPER_ASM(WGMMA_BEGIN(256, "%130") "{" D_NUMBERS_128 "}, %128, %129, p, 1, 1, %131, %132;\n}"
                   : D128
                   : "l"(a), "l"(b), "r"((int)accumulate), "n"(a_columns), "n"(columns));
}
// a in registers.
template <int N, Major b_major>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(N == 32 || N == 64 || N == 128, "the supported widths");
    constexpr int columns = b_major == Major::columns;
    if constexpr (N == 32)
        HOPPER_ASM(WGMMA_BEGIN(32, "%21") "{" D_NUMBERS_16 "}, {%16,%17,%18,%19}, %20, p, 1, 1, %22;\n}"
                   : D16(0)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(columns));
    if constexpr (N == 64)
        HOPPER_ASM(WGMMA_BEGIN(64, "%37") "{" D_NUMBERS_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
                   : D16(0), D16(16)
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(columns));
    if constexpr (N == 128)
        HOPPER_ASM(WGMMA_BEGIN(128, "%69") "{" D_NUMBERS_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
                   : D64
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(columns));
}
#undef D4
#undef D16
#undef D64
#undef D128
#undef D_SET_4
#undef D_SET_16
#undef D_NUMBERS_16
#undef D_NUMBERS_32
#undef D_NUMBERS_64
#undef D_NUMBERS_128
#undef WGMMA_BEGIN

// ---- warps -----------------------------------------------------------------------------------------------------------------
// Stores four 8 x 8 matrices of bf16 to shared memory, the reverse of ldmatrix_x4 (tensor.cuh): lane i gives the address of row
// i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
    HOPPER_ASM("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// Barriers 1 .. 15 (0 is __syncthreads) for `threads` threads that sync or arrive; arriving threads do not wait.
__device__ __forceinline__ void named_barrier_sync(unsigned number, unsigned threads) {
    HOPPER_ASM("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(unsigned number, unsigned threads) {
    HOPPER_ASM("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// Each warp of a warpgroup releases registers, or waits until it has n per thread. Effective only in kernels with
// __launch_bounds__(threads, 1).
template <int n>
__device__ __forceinline__ void registers_decrease() {
    HOPPER_ASM("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
__device__ __forceinline__ void registers_increase() {
    HOPPER_ASM("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

}  // namespace gpu::hopper

#undef HOPPER_ASM
#else
#include "../../test/emu/hopper.h"
#endif

namespace gpu::hopper {

// Descriptor of a matrix in shared memory that TMA wrote in rows of 128 bytes. leading_bytes: distance from 64 columns to the
// next 64, if it is read as Major::columns.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* matrix, unsigned leading_bytes) {
    constexpr uint64_t stride = 8 * 128, swizzle_128 = 1;
    return (uint64_t)(descriptor_address(matrix) >> 4 & 0x3fff) | (uint64_t)(leading_bytes >> 4) << 16 | stride >> 4 << 32 |
           swizzle_128 << 62;
}
// The descriptor of the same matrix some bytes further on, within the 256 KB that the address bits can represent.
__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, unsigned bytes) { return descriptor + (bytes >> 4); }

// ---- host: tensor maps -----------------------------------------------------------------------------------------------------
// The driver's function, looked up at run time: the program is not linked with the driver's library and starts without it.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || !function)
        fail("the CUDA driver has no cuTensorMapEncodeTiled; HINT: update it");
    return (decltype(&cuTensorMapEncodeTiled))function;
}

// For an array of bf16 with `sizes`, contiguous dimension first and a multiple of 8 (stores end at multiples of 16 bytes, even
// past the edge), other dimensions `strides` bytes apart (multiples of 16), moved in boxes of `box` elements, whose first
// dimension is 64 (128 bytes, swizzled).
template <int rank>
CUtensorMap tensor_map(const bf16* array, const uint64_t (&sizes)[rank], const uint64_t (&strides)[rank - 1],
                       const uint32_t (&box)[rank]) {
    CHECK(sizes[0] % 8 == 0, "rows of %zu elements", (size_t)sizes[0]);
    static const auto encode = tensor_map_encoder();
    uint32_t ones[rank];
    for (uint32_t& x : ones) x = 1;
    CUtensorMap map;
    const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void*)array, sizes, strides, box, ones,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled of rank %d gave %d; box %u x %u", rank, (int)result, box[0],
          rank > 1 ? box[rank - 1] : 0);
    return map;
}

// Cache of a Ctx's tensor maps, each encoded once: training uses the same ones in every step. A map is a function of these
// arguments only, so it never becomes stale. When there are too many, all are dropped.
class TensorMaps {
public:
    template <int rank>
    CUtensorMap get(const bf16* array, const uint64_t (&sizes)[rank], const uint64_t (&strides)[rank - 1],
                    const uint32_t (&box)[rank]) {
        Key key{(uint64_t)array};
        auto at = std::copy(std::begin(sizes), std::end(sizes), key.begin() + 1);
        at = std::copy(std::begin(strides), std::end(strides), at);
        std::copy(std::begin(box), std::end(box), at);
        const auto found = maps_.find(key);
        if (found != maps_.end()) return found->second;
        if (maps_.size() >= most) maps_.clear();
        return maps_[key] = tensor_map<rank>(array, sizes, strides, box);
    }

private:
    static constexpr size_t most = 4096;   // 128 bytes each; 96 layers need 768
    using Key = std::array<uint64_t, 15>;  // enough for rank 5
    struct Hash {
        size_t operator()(const Key& key) const {
            uint64_t h = 0;
            for (const uint64_t word : key) {
                h = (h ^ word) * 0x9E3779B97F4A7C15ull;
                h ^= h >> 32;
            }
            return (size_t)h;
        }
    };
    std::unordered_map<Key, CUtensorMap, Hash> maps_;
};

}  // namespace gpu::hopper
