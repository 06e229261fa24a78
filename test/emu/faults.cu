// Kernels with one mistake each, and the same kernels without it: the emulator must detect the former and accept the latter.
//   faults NAME [fixed]     runs one; prints `right` or `wrong` according to its result; a reported fault ends the program
#include <cstdio>
#include <vector>

#include "../../llmc/gpu/device.cuh"
#include "../../llmc/gpu/tensor.cuh"

using namespace gpu;

constexpr int n_threads = 128;

// The sum of 128 numbers, in place, by repeated halving.
__global__ void missing_barrier(float* x, bool fixed) {
    __shared__ float s[n_threads];
    s[threadIdx.x] = x[threadIdx.x];
    for (int half = n_threads / 2; half > 0; half /= 2) {
        if (fixed) __syncthreads();
        if ((int)threadIdx.x < half) s[threadIdx.x] += s[threadIdx.x + half];
    }
    if (threadIdx.x == 0) x[0] = s[0];
}

// Every thread reads its neighbor's number and then overwrites its own.
__global__ void missing_barrier_before_overwrite(float* x, bool fixed) {
    const float neighbor = x[(threadIdx.x + 32) % n_threads];
    if (fixed) __syncthreads();
    x[threadIdx.x] = neighbor;
}

// Tiles pass through one buffer; the next must not arrive before all threads have read the current one.
__global__ void missing_barrier_in_loop(float* x, bool fixed) {
    __shared__ float tile[n_threads];
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        tile[threadIdx.x] = x[threadIdx.x] + (float)i;
        __syncthreads();
        for (int j = 0; j < n_threads; j += 32) sum += tile[(threadIdx.x + j) % n_threads];
        if (fixed) __syncthreads();
    }
    x[threadIdx.x] = sum;
}

__global__ void divergent_barrier(float* x, bool fixed) {
    if (fixed) {
        __syncthreads();
    } else if (threadIdx.x < 64) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    x[threadIdx.x] = 1;
}

__global__ void absent_lanes(float* x, bool fixed) {
    float value = 1;
    if (fixed) value = __shfl_xor_sync(all_lanes, value, 1);
    else if (threadIdx.x % 32 < 8) value = __shfl_xor_sync(all_lanes, value, 1);
    else __syncthreads();
    x[threadIdx.x] = value;
}

__global__ void race(float* x, bool fixed) {
    if (fixed) atomicAdd(x, 1.0f);
    else x[0] += 1.0f;
}

__global__ void static_shared_out_of_bounds(float* x, bool fixed) {
    __shared__ float s[n_threads];
    s[threadIdx.x + (fixed ? 0 : 1)] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x] > 0 ? 1 : 1.5f;
}

__global__ void dynamic_shared_out_of_bounds(float* x, bool fixed) {
    DYNAMIC_SHARED(float, s);
    s[threadIdx.x + (fixed ? 0 : 1)] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x] > 0 ? 1 : 1.5f;
}

__global__ void global_out_of_bounds(float* x, bool fixed) { x[threadIdx.x + (fixed ? 0 : 1)] = 1; }

__global__ void misaligned(float* x, bool fixed) {
    if (threadIdx.x > 0) return;
    const int4* bits = reinterpret_cast<const int4*>(x + (fixed ? 4 : 1));
    x[0] = bits->w == 1 ? 0 : 1;
}

__global__ void uninitialized_shared(float* x, bool fixed) {
    DYNAMIC_SHARED(float, s);
    if (fixed || threadIdx.x != 5) s[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] = s[threadIdx.x];
}

__global__ void uninitialized_global(float* x, bool fixed) {
    float* y = x + n_threads;  // not initialized by the host
    if (fixed) y[threadIdx.x] = 1;
    x[threadIdx.x] = y[threadIdx.x];
}

// A copy of 16 bytes per thread that is read too early.
__global__ void missing_copy_wait(float* x, bool fixed) {
    DYNAMIC_SHARED(float, s);
    if (threadIdx.x < 32) copy_async_16(s + threadIdx.x * 4, x + threadIdx.x * 4);
    copy_async_commit();
    if (fixed) copy_async_wait<0>();
    __syncthreads();
    const float value = s[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = value;
}

struct Fault {
    const char* name;
    void (*kernel)(float*, bool);
    float (*expected)(int i);  // of x[i], if x[i] = i initially
    int checked;               // elements
};

const Fault faults[] = {
    {"missing_barrier", missing_barrier, [](int) { return 8128.0f; }, 1},
    {"missing_barrier_before_overwrite", missing_barrier_before_overwrite, [](int i) { return (float)((i + 32) % 128); }, 128},
    {"missing_barrier_in_loop", missing_barrier_in_loop, [](int i) { return (float)(16 * (i % 32) + 768 + 24); }, 128},
    {"divergent_barrier", divergent_barrier, [](int) { return 1.0f; }, 128},
    {"absent_lanes", absent_lanes, [](int) { return 1.0f; }, 128},
    {"race", race, [](int) { return 128.0f; }, 1},
    {"static_shared_out_of_bounds", static_shared_out_of_bounds, [](int) { return 1.0f; }, 128},
    {"dynamic_shared_out_of_bounds", dynamic_shared_out_of_bounds, [](int) { return 1.0f; }, 128},
    {"global_out_of_bounds", global_out_of_bounds, [](int) { return 1.0f; }, 128},
    {"misaligned", misaligned, [](int) { return 1.0f; }, 1},
    {"uninitialized_shared", uninitialized_shared, [](int) { return 1.0f; }, 128},
    {"uninitialized_global", uninitialized_global, [](int) { return 1.0f; }, 128},
    {"missing_copy_wait", missing_copy_wait, [](int i) { return (float)i; }, 128},
};

int main(int argc, char** argv) {
    const bool fixed = argc > 2;
    for (const Fault& fault : faults) {
        if (argc < 2) printf("%s\n", fault.name);
        if (argc < 2 || strcmp(argv[1], fault.name)) continue;
        // global_out_of_bounds needs memory that ends after the numbers, uninitialized_global a longer one.
        const int n = fault.kernel == uninitialized_global ? 2 * n_threads : n_threads;
        std::vector<float> host(n_threads);
        for (int i = 0; i < n_threads; i++) host[i] = (float)i;
        struct {
            cudaStream_t stream = nullptr;
        } ctx;
        float* x;
        CUDA(cudaMalloc(&x, n * sizeof(float)));
        CUDA(cudaMemcpy(x, host.data(), n_threads * sizeof(float), cudaMemcpyHostToDevice));
        LAUNCH(fault.kernel, 1, n_threads, n_threads * sizeof(float), ctx, x, fixed);
        CUDA(cudaMemcpy(host.data(), x, n_threads * sizeof(float), cudaMemcpyDeviceToHost));
        CUDA(cudaFree(x));
        bool right = true;
        for (int i = 0; i < fault.checked; i++) right = right && host[i] == fault.expected(i);
        puts(right ? "right" : "wrong");
    }
    return 0;
}
