// Included before every line of a foreign source: the parts of CUDA that this repository, and so the emulator, do not need.
#pragma once
#include <cassert>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

// Names in this repository that foreign sources use for their own purposes.
#define bf16 our_bf16
#define floatX our_floatX
#define real our_real
#include "../../../../llmc/base/types.h"
#include <cublasLt.h>
#ifdef FOREIGN_HOPPER
namespace gpu::hopper {
enum class Major { rows, columns };  // of llmc/gpu/hopper.cuh
}
#include <hopper.h>
#endif
#undef bf16
#undef floatX
#undef real
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using std::isfinite;
using uint = unsigned;

// K<<<grid, block, bytes, stream>>>(arguments) becomes, by launches.sed, configure("K", [=](auto... a) { K(a...); }, {grid, block,
// bytes, stream})(arguments).
namespace foreign {

// Arrays with static __shared__ that tensor copies or mbarriers use: the emulator gives addresses only to dynamic shared
// memory, so launches reserve this much more of it, and such arrays are at its end.
constexpr size_t static_bytes = 17 << 10;
template <class T>
T* static_shared(size_t offset) {
    return (T*)(emu::block().shared + emu::block().shared_bytes - static_bytes + offset);
}

struct Grid {
    dim3 grid, size;
    size_t bytes;
    cudaStream_t stream;
    Grid(dim3 g, dim3 s, size_t b = 0, cudaStream_t on = nullptr) : grid(g), size(s), bytes(b), stream(on) {}
};
template <class Kernel>
struct Configured {
    Grid g;
    const char* name;
    Kernel kernel;
    template <class... A>
    void operator()(A... arguments) const {
        size_t bytes = g.bytes;
#ifdef FOREIGN_HOPPER
        bytes = (bytes + 1023) / 1024 * 1024 + static_bytes;
#endif
        // Like launch_kernel, except for its table of limits: a lambda has no address to look up.
        emu::streams().put(g.stream, [=, g = g, name = name, kernel = kernel] {
            emu::launch(g.grid, g.size, bytes, name, [=] { kernel(arguments...); });
        });
    }
};
template <class Kernel>
Configured<Kernel> configure(const char* name, Kernel kernel, Grid grid) {
    return {grid, name, kernel};
}

}  // namespace foreign

inline void atomicAdd(__nv_bfloat162* p, __nv_bfloat162 x) {
    emu::atomic_update(p, [=](__nv_bfloat162 old) { return old + x; });
}

inline cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                                cudaMemcpyKind kind) {
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind);
}
constexpr auto cudaDevAttrMaxSharedMemoryPerBlock = cudaDevAttrMaxSharedMemoryPerBlockOptin;
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {  // the only one in use
    return *value = (int)emu::device().shared_bytes, cudaSuccess;
}
constexpr unsigned cudaHostAllocWriteCombined = 4;
enum cudaMemoryAdvise { cudaMemAdviseSetPreferredLocation = 3 };
constexpr int cudaCpuDeviceId = -1;
template <class T>
cudaError_t cudaMallocManaged(T** p, size_t bytes) {
    return cudaMalloc(p, bytes);
}
inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, int) { return cudaSuccess; }

#ifdef FOREIGN_HOPPER
namespace foreign {

// Replacements for the PTX statements in fast.cu (run.sh): each is the emulator's function for that instruction.
inline uint32_t shared_address(const void* p) { return emu::shared_address(p, 1, 1, EMU_HERE); }
#define __cvta_generic_to_shared(p) foreign::shared_address(p)
template <int N>
void wgmma(float* d, uint64_t a, uint64_t b, EMU_CALLER) {
    emu::issue_product<N>(*(float(*)[N / 2])d, nullptr, a, false, b, false, true, EMU_CALLED_FROM);
}
inline void wgmma_fence() { emu::block().current->fenced = true; }
inline void arrive(uint64_t* barrier, unsigned count, EMU_CALLER) {
    while (count-- > 0) emu::mbarrier_arrive(barrier, 0, EMU_CALLED_FROM);
}
inline void load(void* to, const void* map, uint64_t* barrier, int row, int column, EMU_CALLER) {
    emu::tma_load<5>(to, *(const CUtensorMap*)map, barrier, {0, row, column / 64, 0, 0}, EMU_CALLED_FROM);
}

}  // namespace foreign
#endif

template <class T>
cudaError_t cudaMallocHost(T** p, size_t bytes, unsigned = 0) {
    return cudaMallocHost((void**)p, bytes);
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags) { return cudaEventCreateWithFlags(event, flags); }
