// Errors of CUDA calls, and kernel launches: one macro, so that the stream and the check are never forgotten, and the same
// source runs under the emulator (test/emu).
//   CUDA(cudaMalloc(&p, n));                                       a failed call throws Error with call, code, file:line
//   LAUNCH(kernel, grid, block, shared_bytes, ctx, arguments...);  on ctx.stream; (kernel<A, B>) in parentheses
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
#else
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emu::block().shared)
#define START_KERNEL(kernel, grid, block, shared_bytes, ctx, ...) \
    emu::launch_kernel(#kernel, kernel, (grid), (block), (shared_bytes), (ctx).stream, __VA_ARGS__)
#endif
#define LAUNCH(kernel, grid, block, shared_bytes, ctx, ...)                                                          \
    do {                                                                                                             \
        static gpu::SharedBytes shared_bytes_;                                                                       \
        shared_bytes_.allow((const void*)(kernel), (size_t)(shared_bytes));                                          \
        START_KERNEL(kernel, (grid), (block), (shared_bytes), (ctx), __VA_ARGS__);                                   \
        const cudaError_t launch_error_ = cudaGetLastError();                                                        \
        if (launch_error_ != cudaSuccess) gpu::cuda_failed(launch_error_, "launch of " #kernel, __FILE__, __LINE__); \
    } while (0)

}  // namespace gpu
