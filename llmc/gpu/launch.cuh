// Errors of CUDA calls, and kernel launches: one macro, so that the stream and the check are never forgotten, and the same
// source runs under the emulator (test/emu).
//   CUDA(cudaMalloc(&p, n));                                       a failed call throws Error with call, code, file:line
//   LAUNCH(kernel, grid, block, shared_bytes, ctx, arguments...);  on ctx.stream; (kernel<A, B>) in parentheses
//   LAUNCH_CLUSTERS(kernel, cluster, grid, ...);                   the same in clusters of `cluster` blocks; grid is a multiple
//   DYNAMIC_SHARED(float, tile);                                   in a kernel: float* tile, aligned to 1024 bytes
#pragma once
#include <cuda_runtime.h>

#include "../base/check.h"

namespace gpu {

[[noreturn]] inline void cuda_failed(cudaError_t error, const char* what, const char* file, int line) {
    fail("%s failed: %s (%s) at %s:%d%s", what, cudaGetErrorName(error), cudaGetErrorString(error), file, line,
         error == cudaErrorNoKernelImageForDevice
             ? "; HINT: the program was not built for this GPU; make BACKEND=cuda on a machine that has it"
             : "");
}
#define CUDA(call)                                                                                \
    do {                                                                                          \
        const cudaError_t cuda_error_ = (call);                                                   \
        if (cuda_error_ != cudaSuccess) gpu::cuda_failed(cuda_error_, #call, __FILE__, __LINE__); \
    } while (0)

// Static and dynamic shared memory of a kernel may exceed 48 KB together only if the dynamic part is requested: once per launch
// site and size, regardless of the static part.
class SharedBytes {
public:
    void allow(const void* kernel, size_t bytes) {
        if (bytes == 0 || (kernel == kernel_ && bytes <= allowed_)) return;
        CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
        kernel_ = kernel;
        allowed_ = bytes;
    }

private:
    const void* kernel_ = nullptr;
    size_t allowed_ = 0;
};

#ifdef __CUDACC__
#define DYNAMIC_SHARED(T, name)                                     \
    extern __shared__ __align__(1024) unsigned char name##_bytes[]; \
    T* name = reinterpret_cast<T*>(name##_bytes)
#define START_KERNEL(kernel, grid, block, shared_bytes, ctx, ...) \
    kernel<<<(grid), (block), (shared_bytes), (ctx).stream>>>(__VA_ARGS__)
#define START_CLUSTERS(kernel, cluster, grid, block, shared_bytes, ctx, ...) \
    gpu::start_clusters(kernel, cluster, grid, block, shared_bytes, (ctx).stream, __VA_ARGS__)
template <class... Parameters, class... Arguments>
void start_clusters(void (*kernel)(Parameters...), int cluster, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                    Arguments&&... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    (void)cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);  // LAUNCH_CLUSTERS checks for errors
}
#else
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emu::block().shared)
#define START_KERNEL(kernel, grid, block, shared_bytes, ctx, ...) \
    emu::launch_kernel(#kernel, kernel, (grid), (block), (shared_bytes), (ctx).stream, __VA_ARGS__)
#define START_CLUSTERS(kernel, cluster, grid, block, shared_bytes, ctx, ...) \
    emu::launch_clusters(#kernel, kernel, cluster, grid, block, shared_bytes, (ctx).stream, __VA_ARGS__)
#endif
#define CHECKED_LAUNCH(kernel, shared_bytes, start)                                                                  \
    do {                                                                                                             \
        static gpu::SharedBytes shared_bytes_;                                                                       \
        shared_bytes_.allow((const void*)(kernel), (size_t)(shared_bytes));                                          \
        start;                                                                                                       \
        const cudaError_t launch_error_ = cudaGetLastError();                                                        \
        if (launch_error_ != cudaSuccess) gpu::cuda_failed(launch_error_, "launch of " #kernel, __FILE__, __LINE__); \
    } while (0)
#define LAUNCH(kernel, grid, block, shared_bytes, ctx, ...) \
    CHECKED_LAUNCH(kernel, shared_bytes, START_KERNEL(kernel, (grid), (block), (shared_bytes), (ctx), __VA_ARGS__))
#define LAUNCH_CLUSTERS(kernel, cluster, grid, block, shared_bytes, ctx, ...) \
    CHECKED_LAUNCH(kernel, shared_bytes, START_CLUSTERS(kernel, (cluster), (grid), (block), (shared_bytes), (ctx), __VA_ARGS__))

}  // namespace gpu
