// CUDA on the CPU. With test/emu/ on the include path, `#include <cuda_runtime.h>` finds this file instead of the toolkit's,
// and CUDA sources compile with g++ or clang++ into a program in which every kernel is an ordinary function: breakpoints,
// printf, AddressSanitizer and ThreadSanitizer work inside it. block.h runs the threads of a block; this file provides the
// device language and the runtime's functions, as far as this program uses them.
//
// Differences from a GPU
// - Work on streams runs when the host waits for it, one after another (streams.h), as late as possible.
// - Blocks do not run at the same time (unless EMU_THREADS is set): a kernel that waits for another block hangs.
// - cudaMalloc fills with 0xFF bytes (NaN in every float type); so is dynamic shared memory before each block.
// - Memory order is the CPU's, stronger than a GPU's; ThreadSanitizer reports accesses that a real run might reorder.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include "block.h"
#include "resources.h"
#include "streams.h"

// ---- the device language ---------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#ifdef EMU_ASAN
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#define threadIdx (emu::block().current->id)
#define blockIdx (emu::block().id)
#define blockDim (emu::block().size)
#define gridDim (emu::block().grid)
constexpr int warpSize = 32;

#define __syncthreads() emu::block().barrier(0, 0, true, EMU_HERE)
#define __syncwarp(...) (void)emu::block().meet(emu::mask_or_all(__VA_ARGS__), nullptr, 0, EMU_HERE)
#define __shfl_sync(...) emu::shuffle(emu::From::lane, EMU_HERE, __VA_ARGS__)
#define __shfl_xor_sync(...) emu::shuffle(emu::From::other, EMU_HERE, __VA_ARGS__)
#define __shfl_down_sync(...) emu::shuffle(emu::From::above, EMU_HERE, __VA_ARGS__)
#define __shfl_up_sync(...) emu::shuffle(emu::From::below, EMU_HERE, __VA_ARGS__)
#define __ballot_sync(mask, predicate) emu::ballot((mask), (predicate), EMU_HERE)
#define __any_sync(mask, predicate) (emu::ballot((mask), (predicate), EMU_HERE) != 0)
#define __all_sync(mask, predicate) (emu::ballot((mask), !(predicate), EMU_HERE) == 0)
#define __match_any_sync(mask, value) emu::match_any((mask), (value), EMU_HERE)
#define __activemask() emu::unsupported("__activemask: its value is not defined by CUDA")

namespace emu {

[[noreturn]] inline unsigned unsupported(const char* what) { fault("%s", what); }
inline uint32_t mask_or_all(uint32_t mask = ~0u) { return mask; }
inline unsigned lane() { return block().current->lane; }

// Lanes read within groups of `width`; one that would read beyond its group (above and below; xor: from a later one) keeps its
// own value.
enum class From { lane, other, above, below };
template <class T>
EMU_OPTIMIZED T shuffle(From from, Where where, uint32_t mask, T value, int x, int width = 32) {
    auto table = block().meet(mask, &value, sizeof(T), where);
    const int own = (int)lane(), first = own & ~(width - 1);
    int source = from == From::lane    ? first + (x & (width - 1))
                 : from == From::other ? own ^ x
                 : from == From::above ? own + x
                                       : own - x;
    if (source >= first + width || (from == From::below && source < first)) source = own;
    if (!(mask >> source & 1))
        fault("%s:%d: shuffle reads lane %d, which is not in %08x", where.file, where.line, source, mask);
    Quiet quiet;
    T result;
    memcpy((void*)&result, table[source], sizeof(T));
    return result;
}
inline unsigned ballot(uint32_t mask, bool predicate, Where where) {
    const int vote = predicate;
    auto table = block().meet(mask, &vote, sizeof vote, where);
    Quiet quiet;
    unsigned result = 0;
    for (unsigned i = 0; i < 32; i++)
        if ((mask >> i & 1) && table[i][0] == 1) result |= 1u << i;
    return result;
}
template <class T>
unsigned match_any(uint32_t mask, T value, Where where) {
    auto table = block().meet(mask, &value, sizeof(T), where);
    Quiet quiet;
    unsigned result = 0;
    for (unsigned i = 0; i < 32; i++)
        if ((mask >> i & 1) && !memcmp(table[i], &value, sizeof(T))) result |= 1u << i;
    return result;
}

template <class T, class F>
T atomic_update(T* p, F f) {
    T old, updated;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do updated = f(old);
    while (!__atomic_compare_exchange(p, &old, &updated, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

}  // namespace emu

template <class T>
T atomicAdd(T* p, std::common_type_t<T> x) {  // any type that converts to T, as with CUDA's overloads
    return emu::atomic_update(p, [=](T old) { return (T)(old + x); });
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> x) {
    return emu::atomic_update(p, [=](T old) { return old < x ? x : old; });
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> x) {
    return emu::atomic_update(p, [=](T old) { return x < old ? x : old; });
}
template <class T>
T atomicExch(T* p, std::common_type_t<T> x) {
    return emu::atomic_update(p, [=](T) { return x; });
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> x) {
    return emu::atomic_update(p, [=](T old) { return old == expected ? x : old; });
}
inline unsigned atomicInc(unsigned* p, unsigned last) {
    return emu::atomic_update(p, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __trap() { emu::fault("%s: __trap()", emu::block().kernel); }
inline void __nanosleep(unsigned) {}

template <class T>
T __ldg(const T* p) {
    return *p;
}
template <class T>
T __ldcs(const T* p) {
    return *p;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
template <class T>
void __stcs(T* p, T value) {
    *p = value;
}
template <class T>
void __stcg(T* p, T value) {
    *p = value;
}

namespace gpu {  // in the kernels' namespace, instead of the C library's, which is a call
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
}  // namespace gpu
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
inline float __uint_as_float(unsigned u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
inline int __float_as_int(float x) { return (int)__float_as_uint(x); }
inline float __int_as_float(int u) { return __uint_as_float((unsigned)u); }
// For any two numbers: with only int overloads, floats would be silently truncated.
template <class A, class B,
          class T = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>>>
T min(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmin((T)a, (T)b);
    else return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B,
          class T = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>>>
T max(A a, B b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmax((T)a, (T)b);
    else return (T)a > (T)b ? (T)a : (T)b;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }

// ---- the runtime's functions -----------------------------------------------------------------------------------------------
namespace emu {

// EMU_CALLS=FILE: counts the host's calls of each function of the runtime and of the libraries; written when the program ends.
class Calls {
public:
    void count(const char* function) {
        if (!path_) return;
        const std::lock_guard<std::mutex> lock(mutex_);
        counts_[function]++;
    }
    ~Calls() {
        if (!path_) return;
        std::ofstream file(path_);
        for (const auto& [function, n] : counts_) file << function << " " << n << "\n";
    }

private:
    const char* const path_ = getenv("EMU_CALLS");
    std::mutex mutex_;
    std::map<std::string, size_t> counts_;
};
inline Calls& calls() {
    static Calls c;
    return c;
}
#define EMU_CALLED() emu::calls().count(__func__)

}  // namespace emu

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorNotReady = 600,
    cudaErrorLaunchOutOfResources = 701,
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0, cudaHostRegisterDefault = 0,
                   cudaEventDefault = 0;

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int major, minor, multiProcessorCount, l2CacheSize, maxThreadsPerMultiProcessor;
    size_t sharedMemPerBlockOptin;
    int canUseHostPointerForRegisteredMem;
};

namespace emu {

// The emulated device: few multiprocessors, so that loops over "as many blocks as fit" are short, and the capability that the
// program was built for. EMU_MEMORY_MB limits cudaMalloc, EMU_LOCKABLE_MB limits cudaHostRegister, to test running out of
// memory. EMU_NAME: the device's name.
struct Device {
    int major = 9, minor = 0, multiprocessors = 3;
    size_t shared_bytes = 227 << 10, memory_bytes = (size_t)4 << 30, used_bytes = 0, lockable_bytes = SIZE_MAX;
    std::map<void*, size_t> allocations, page_locked;  // device memory; host memory
    std::map<const void*, size_t> dynamic_shared;      // limits set by cudaFuncSetAttribute
    cudaError_t last_error = cudaSuccess;
    Device() {
        if (const char* mb = getenv("EMU_MEMORY_MB")) memory_bytes = (size_t)atol(mb) << 20;
        if (const char* mb = getenv("EMU_LOCKABLE_MB")) lockable_bytes = (size_t)atol(mb) << 20;
        if (const char* sm = getenv("EMU_CAPABILITY")) {
            major = atoi(sm) / 10;
            minor = atoi(sm) % 10;
        }
    }
};
inline Device& device() {
    static Device d;
    return d;
}
inline cudaError_t error(cudaError_t e) { return device().last_error = e; }
// True if the whole range is in one of these.
inline bool within(const std::map<void*, size_t>& allocations, const void* p, size_t bytes) {
    auto found = allocations.upper_bound((void*)p);
    if (found == allocations.begin()) return false;
    --found;
    return (const char*)p + bytes <= (const char*)found->first + found->second;
}

}  // namespace emu

inline const char* cudaGetErrorName(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorLaunchOutOfResources: return "cudaErrorLaunchOutOfResources";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
        case cudaErrorNotReady: return "cudaErrorNotReady";
        case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
    }
    return "cudaErrorUnknown";
}
inline const char* cudaGetErrorString(cudaError_t e) {
    switch (e) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorLaunchOutOfResources: return "too many resources requested for launch";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorNotReady: return "device not ready";
        case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    }
    return "unknown error";
}
inline cudaError_t cudaGetLastError() {
    const cudaError_t e = emu::device().last_error;
    emu::device().last_error = cudaSuccess;
    return e;
}
inline cudaError_t cudaPeekAtLastError() { return emu::device().last_error; }

// EMU_DEVICES=0 simulates a machine without a GPU.
inline cudaError_t cudaGetDeviceCount(int* n) {
    EMU_CALLED();
    const char* devices = getenv("EMU_DEVICES");
    *n = devices ? atoi(devices) : 1;
    return *n > 0 ? cudaSuccess : emu::error(cudaErrorNoDevice);
}
inline cudaError_t cudaSetDevice(int device) {
    EMU_CALLED();
    int n;
    if (cudaGetDeviceCount(&n) != cudaSuccess) return cudaErrorNoDevice;
    return device >= 0 && device < n ? cudaSuccess : emu::error(cudaErrorInvalidDevice);
}
inline cudaError_t cudaGetDevice(int* device) { return EMU_CALLED(), *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    EMU_CALLED();
    const emu::Device& d = emu::device();
    *p = {};
    const char* const name = getenv("EMU_NAME");
    snprintf(p->name, sizeof p->name, "%s", name ? name : "emulated GPU (CPU fibers)");
    p->totalGlobalMem = d.memory_bytes;
    p->major = d.major;
    p->minor = d.minor;
    p->multiProcessorCount = d.multiprocessors;
    p->l2CacheSize = 1 << 20;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlockOptin = d.shared_bytes;
    p->canUseHostPointerForRegisteredMem = 1;
    return cudaSuccess;
}
// Each process has its own GPU, unless EMU_PCI_BUS_ID is set.
inline cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
    EMU_CALLED();
    const char* const given = getenv("EMU_PCI_BUS_ID");
    if (given) return snprintf(id, (size_t)length, "%s", given), cudaSuccess;
    return snprintf(id, (size_t)length, "%08x:00:00.0", (unsigned)getpid()), cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* v) { return EMU_CALLED(), *v = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* v) { return EMU_CALLED(), *v = 13000, cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    EMU_CALLED();
    if (int n; cudaGetDeviceCount(&n) != cudaSuccess) return cudaErrorNoDevice;
    *total = emu::device().memory_bytes;
    *available = *total - emu::device().used_bytes;
    return cudaSuccess;
}

template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
    EMU_CALLED();
    emu::Device& d = emu::device();
    if (bytes > d.memory_bytes - d.used_bytes) return emu::error(cudaErrorMemoryAllocation);
    const size_t huge_page = 2 << 20, alignment = bytes < huge_page ? 256 : huge_page;
    void* memory = aligned_alloc(alignment, (bytes + 255) / 256 * 256);
    if (!memory) return emu::error(cudaErrorMemoryAllocation);
    if (bytes >= huge_page) madvise(memory, bytes / huge_page * huge_page, MADV_HUGEPAGE);
    memset(memory, 0xff, bytes);
#ifdef EMU_ASAN
    __asan_poison_memory_region((char*)memory + bytes, (bytes + 255) / 256 * 256 - bytes);
#endif
    d.allocations[memory] = bytes;
    d.used_bytes += bytes;
    *p = (T*)memory;
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
    EMU_CALLED();
    if (!p) return cudaSuccess;
    emu::Device& d = emu::device();
    const auto found = d.allocations.find(p);
    if (found == d.allocations.end()) return emu::error(cudaErrorInvalidValue);
    emu::streams().finish_all();
    d.used_bytes -= found->second;
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(p, (found->second + 255) / 256 * 256);
#endif
    d.allocations.erase(found);
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** p, size_t bytes) {
    EMU_CALLED();
    *p = malloc(bytes);
    if (!*p) return emu::error(cudaErrorMemoryAllocation);
    memset(*p, 0xff, bytes);
    emu::device().page_locked[*p] = bytes;
    return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return EMU_CALLED(), cudaMallocHost(p, bytes); }
// Does not wait: a copy in flight may read other bytes.
inline cudaError_t cudaFreeHost(void* p) {
    EMU_CALLED();
    if (!p) return cudaSuccess;
    const auto found = emu::device().page_locked.find(p);
    if (found == emu::device().page_locked.end()) return emu::error(cudaErrorInvalidValue);
    memset(p, 0xff, found->second);
    emu::device().page_locked.erase(found);
    return free(p), cudaSuccess;
}
inline cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
    EMU_CALLED();
    if (bytes > emu::device().lockable_bytes) return emu::error(cudaErrorMemoryAllocation);
    return emu::device().page_locked[p] = bytes, cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void* p) {
    EMU_CALLED();
    return emu::device().page_locked.erase(p) ? cudaSuccess : emu::error(cudaErrorInvalidValue);
}

namespace emu {

// Rows of `width` bytes. Pageable memory is copied immediately when read, and written before the call returns; page-locked
// memory is read and written late, unless the call `blocks`. For copies within the device the host does not wait.
inline cudaError_t copy(const char* call, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                        size_t height, cudaMemcpyKind kind, cudaStream_t stream, bool blocks) {
    if (width > to_pitch || width > from_pitch) return error(cudaErrorInvalidValue);
    if (!width || !height) return cudaSuccess;
    const size_t to_bytes = (height - 1) * to_pitch + width, from_bytes = (height - 1) * from_pitch + width;
    const bool to_device = within(device().allocations, to, to_bytes);
    const bool from_device = within(device().allocations, from, from_bytes);
    if (kind != cudaMemcpyDefault && (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) ||
                                      from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)))
        fault("%s: %zu bytes at %p or %zu bytes at %p contradict the copy's kind", call, to_bytes, to, from_bytes, from);
    std::shared_ptr<char[]> staged;
    if (to_device && !from_device && !within(device().page_locked, from, from_bytes)) {
        if (blocks) streams().finish(stream);
        staged.reset(new char[from_bytes]);
        memcpy(staged.get(), from, from_bytes);
        from = staged.get();
        blocks = false;
    }
    const Ticket copied = streams().put(stream, [=] {
        (void)staged;
        for (size_t i = 0; i < height; i++) memcpy((char*)to + i * to_pitch, (const char*)from + i * from_pitch, width);
    });
    const bool to_pageable = !to_device && !within(device().page_locked, to, to_bytes);
    if (to_pageable || (blocks && !(to_device && from_device))) streams().finish(copied);
    return cudaSuccess;
}
// The host waits if the memory is its own, page-locked (CUDA's documentation, API synchronization behavior).
inline cudaError_t set(const char* call, void* p, int value, size_t bytes, cudaStream_t stream) {
    if (!bytes) return cudaSuccess;
    const bool on_device = within(device().allocations, p, bytes);
    if (!on_device && !within(device().page_locked, p, bytes))
        fault("%s: %zu bytes at %p are not device memory", call, bytes, p);
    const Ticket done = streams().put(stream, [=] { memset(p, value, bytes); });
    if (!on_device) streams().finish(done);
    return cudaSuccess;
}

}  // namespace emu

inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    EMU_CALLED();
    return emu::copy("cudaMemcpy", to, bytes, from, bytes, bytes, 1, kind, nullptr, true);
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s = nullptr) {
    EMU_CALLED();
    return emu::copy("cudaMemcpyAsync", to, bytes, from, bytes, bytes, 1, kind, s, false);
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind kind, cudaStream_t s = nullptr) {
    EMU_CALLED();
    return emu::copy("cudaMemcpy2DAsync", to, to_pitch, from, from_pitch, width, height, kind, s, false);
}
inline cudaError_t cudaMemset(void* p, int value, size_t bytes) {
    EMU_CALLED();
    return emu::set("cudaMemset", p, value, bytes, nullptr);
}
inline cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t s = nullptr) {
    EMU_CALLED();
    return emu::set("cudaMemsetAsync", p, value, bytes, s);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) {
    EMU_CALLED();
    return *s = emu::streams().create(!(flags & cudaStreamNonBlocking)), cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* s) { return EMU_CALLED(), cudaStreamCreateWithFlags(s, 0); }
// As on GPUs: 0 to -5; the lowest number is the highest priority. It has no effect here.
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return EMU_CALLED(), *least = 0, *greatest = -5, cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int) {
    return EMU_CALLED(), cudaStreamCreateWithFlags(s, flags);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) { return EMU_CALLED(), emu::streams().destroy(s), cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t s) { return EMU_CALLED(), emu::streams().finish(s), cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t s) {
    EMU_CALLED();
    if (emu::streams().is_idle(s)) return cudaSuccess;
    emu::streams().run_one();
    return cudaErrorNotReady;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned = 0) {
    EMU_CALLED();
    if (e->mark) emu::streams().put(s, nullptr, e->mark);
    return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return EMU_CALLED(), emu::streams().finish_all(), cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return EMU_CALLED(), *e = new emu_event, cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t* e) { return EMU_CALLED(), *e = new emu_event, cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { return EMU_CALLED(), delete e, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = nullptr) {
    EMU_CALLED();
    return e->mark = emu::streams().put(s, nullptr), cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    EMU_CALLED();
    if (e->mark) emu::streams().finish(e->mark);
    return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    EMU_CALLED();
    if (!e->mark || e->mark->over) return cudaSuccess;
    if (emu::streams().owns_this_thread()) emu::streams().run_one();  // frequent polling makes progress
    return cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    EMU_CALLED();
    if (!start->mark || !end->mark) return emu::error(cudaErrorInvalidValue);
    if (!start->mark->over || !end->mark->over) return cudaErrorNotReady;
    return *ms = (float)(end->mark->ms - start->mark->ms), cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
    EMU_CALLED();
    if (bytes < 0 || (size_t)bytes > emu::device().shared_bytes) return emu::error(cudaErrorInvalidValue);
    emu::device().dynamic_shared[(const void*)kernel] = (size_t)bytes;
    return cudaSuccess;
}

namespace emu {

// kernel<<<grid, size, shared_bytes, stream>>>(arguments...): fails immediately like the runtime, else is put on the stream.
template <class Kernel, class... Arguments>
void launch_clusters(const char* name, Kernel kernel, unsigned cluster, dim3 grid, dim3 size, size_t shared_bytes,
                     cudaStream_t stream, Arguments... arguments) {
    calls().count("cudaLaunchKernel");
    const size_t threads = (size_t)size.x * size.y * size.z;
    const bool sensible = threads > 0 && threads <= 1024 && size.z <= 64 && grid.x > 0 && grid.y > 0 && grid.z > 0 &&
                          grid.y <= 65535 && grid.z <= 65535 && grid.x <= 2147483647u &&
                          shared_bytes <= device().shared_bytes && cluster >= 1 && cluster <= 8 && grid.x % cluster == 0;
    if (!sensible) {
        error(cudaErrorInvalidConfiguration);
        return;
    }
    // Exceeds the requested limit. A foreign kernel's static part, of at most 48 KB, is included in these bytes.
    if (shared_bytes > 48 << 10 && device().dynamic_shared[(const void*)kernel] + (48 << 10) < shared_bytes) {
        error(cudaErrorInvalidValue);
        return;
    }
    if (!within_limits((const void*)kernel, threads, shared_bytes)) {
        error(cudaErrorLaunchOutOfResources);
        return;
    }
    streams().put(stream, [=] {
        launch(
            grid, size, shared_bytes, name, [=] { kernel(arguments...); }, cluster);
    });
}
template <class Kernel, class... Arguments>
void launch_kernel(const char* name, Kernel kernel, dim3 grid, dim3 size, size_t shared_bytes, cudaStream_t stream,
                   Arguments... arguments) {
    launch_clusters(name, kernel, 1, grid, size, shared_bytes, stream, arguments...);
}

}  // namespace emu
