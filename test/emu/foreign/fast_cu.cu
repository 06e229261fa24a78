// fast.cu's matmuls compared with a plain loop: fast_cu NUMBER. C (n, m) = B (n, k) A (m, k)^T; the first: C (m, n) = A (m,
// k) B (k, n).
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda/barrier>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

typedef __nv_bfloat16 bf16;
#define CEIL_DIV(M, N) (((M) + (N)-1) / (N))
#define cudaCheck(call) \
    if (call != cudaSuccess) abort()

#include "matmul_1.cuh"
#include "matmul_2.cuh"
#include "matmul_3.cuh"
#include "matmul_4.cuh"
#include "matmul_5.cuh"
#include "matmul_6.cuh"
#include "matmul_7.cuh"

int main(int, char** argv) {
    const int which = atoi(argv[1]), M = 512, N = 512, K = 320;
    std::vector<bf16> a(M * K), b(N * K), c(M * N);
    std::mt19937 random(69);
    std::normal_distribution<float> normal;
    for (bf16& x : a) x = normal(random);
    for (bf16& x : b) x = normal(random);
    bf16 *A, *B, *C;
    cudaCheck(cudaMalloc(&A, a.size() * sizeof(bf16)));
    cudaCheck(cudaMalloc(&B, b.size() * sizeof(bf16)));
    cudaCheck(cudaMalloc(&C, c.size() * sizeof(bf16)));
    cudaCheck(cudaMemcpy(A, a.data(), a.size() * sizeof(bf16), cudaMemcpyHostToDevice));
    cudaCheck(cudaMemcpy(B, b.data(), b.size() * sizeof(bf16), cudaMemcpyHostToDevice));
    switch (which) {
        case 1: runKernel1(M, N, K, A, B, C); break;
        case 2: runKernel2(M, N, K, A, B, C); break;
        case 3: runKernel3(M, N, K, A, B, C, nullptr); break;
        case 4: runKernel4(M, N, K, A, B, C, nullptr); break;
        case 5: runKernel5(M, N, K, A, B, C, nullptr); break;
        case 6: runKernel6(M, N, K, A, B, C, nullptr); break;
        case 7: runKernel7(M, N, K, A, B, C, nullptr); break;
    }
    if (cudaGetLastError() != cudaSuccess) return puts("the launch was refused"), 1;
    cudaCheck(cudaMemcpy(c.data(), C, c.size() * sizeof(bf16), cudaMemcpyDeviceToHost));
    double worst = 0;
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            double sum = 0, size = 0;
            for (int k = 0; k < K; k++) {
                const double product = (double)(float)a[m * K + k] * (double)(float)(which == 1 ? b[k * N + n] : b[n * K + k]);
                sum += product, size += std::fabs(product);
            }
            // A rounding to bf16, and fp32's in the sum.
            const double error = std::fabs((float)(which == 1 ? c[m * N + n] : c[n * M + m]) - sum);
            const double allowed = std::fabs(sum) / 256 + size * 1e-5;
            if (!(error <= allowed)) return printf("C(%d, %d) is off by %g, allowed is %g\n", m, n, error, allowed), 1;
            worst = std::max(worst, error / allowed);
        }
    printf("largest error: %.2f of what rounding allows\n", worst);
}
