// A program in other projects' style, so that test/emulator_test.sh can check run.sh without foreign sources: launches with
// <<<>>>, on a stream and over several lines, dynamic shared memory, cooperative groups, bf16, cuBLAS.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdio.h>

namespace cg = cooperative_groups;

template <typename T>
__global__ void sum_kernel(float* sums, const T* x, int n) {
    extern __shared__ float shared[];
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += (float)x[i];
    sum = cg::reduce(warp, sum, cg::plus<float>{});
    if (warp.thread_rank() == 0) shared[warp.meta_group_rank()] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < warp.meta_group_size(); i++) sums[blockIdx.x] += shared[i];
}
__global__ void fill_kernel(__nv_bfloat16* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = __float2bfloat16((float)(i % 3));
}

int main() {
    const int n = 1000;
    __nv_bfloat16* x;
    float *sums, *square, sum, one = 1.0f, zero = 0.0f;
    cudaStream_t stream;
    cublasHandle_t handle;
    cudaStreamCreate(&stream);
    cublasCreate(&handle);
    cudaMalloc(&x, n * sizeof(__nv_bfloat16));
    cudaMalloc(&sums, sizeof(float));
    cudaMalloc(&square, sizeof(float));
    cudaMemset(sums, 0, sizeof(float));
    fill_kernel<<<(n + 127) / 128, 128>>>(x, n);
    sum_kernel<<<dim3(1, 1), 256, 256 / 32 * sizeof(float), stream>>>(sums, x, n);
    cudaDeviceSynchronize();
    cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, sums, 1, sums, 1, &zero, square, 1);
    cudaMemcpy(&sum, square, sizeof(float), cudaMemcpyDeviceToHost);
    printf("%.0f\n", sum);
    return sum == 999.0f * 999.0f ? 0 : 1;
}
