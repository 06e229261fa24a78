// The few functions of cuBLAS that foreign code calls, implemented by the emulator's cuBLASLt (fp32 and bf16, whole batches).
#pragma once
#include <cublasLt.h>

enum cublasMath_t { CUBLAS_DEFAULT_MATH = 0, CUBLAS_TF32_TENSOR_OP_MATH = 3 };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
using cublasHandle_t = cublasLtHandle_t;
using cublasDataType_t = cudaDataType;
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) { return cublasLtCreate(handle); }
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) { return cublasLtDestroy(handle); }
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void*, size_t) { return CUBLAS_STATUS_SUCCESS; }

inline cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n,
                                                 int k, const void* alpha, const void* A, cudaDataType type_a, int lda,
                                                 long long stride_a, const void* B, cudaDataType type_b, int ldb,
                                                 long long stride_b, const void* beta, void* C, cudaDataType type_c, int ldc,
                                                 long long stride_c, int batches, cublasComputeType_t compute,
                                                 cublasGemmAlgo_t) {
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatmulDescInit(&op, compute, CUDA_R_32F);
    cublasLtMatmulDescSetAttribute(&op, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a);
    cublasLtMatmulDescSetAttribute(&op, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b);
    cublasLtMatrixLayoutOpaque_t a, b, c;
    const bool turned_a = op_a != CUBLAS_OP_N, turned_b = op_b != CUBLAS_OP_N;
    cublasLtMatrixLayoutInit(&a, type_a, turned_a ? k : m, turned_a ? m : k, lda);
    cublasLtMatrixLayoutInit(&b, type_b, turned_b ? n : k, turned_b ? k : n, ldb);
    cublasLtMatrixLayoutInit(&c, type_c, m, n, ldc);
    cublasLtMatrixLayoutOpaque_t* layouts[] = {&a, &b, &c};
    const int64_t strides[] = {stride_a, stride_b, stride_c};
    for (int i = 0; i < 3; i++) {
        cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches);
        cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &strides[i], sizeof strides[i]);
    }
    // No workspace, no partial sums in D's type, and no guaranteed alignment.
    cublasLtMatmulPreferenceOpaque_t preference;
    cublasLtMatmulPreferenceInit(&preference);
    const size_t no_bytes = 0;
    const uint32_t no_schemes = 0, alignment = 2;
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &no_bytes, sizeof no_bytes);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_schemes, sizeof no_schemes);
    for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        cublasLtMatmulPreferenceSetAttribute(&preference, which, &alignment, sizeof alignment);
    cublasLtMatmulHeuristicResult_t result;
    int n_results = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(handle, &op, &a, &b, &c, &c, &preference, 1, &result, &n_results);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatmul(handle, &op, alpha, A, &a, B, &b, beta, C, &c, C, &c, &result.algo, nullptr, 0, nullptr);
}
inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                   const void* alpha, const void* A, cudaDataType type_a, int lda, const void* B,
                                   cudaDataType type_b, int ldb, const void* beta, void* C, cudaDataType type_c, int ldc,
                                   cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, A, type_a, lda, 0, B, type_b, ldb, 0, beta, C, type_c,
                                      ldc, 0, 1, compute, algo);
}
inline cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                                int n, int k, const float* alpha, const float* A, int lda, long long stride_a,
                                                const float* B, int ldb, long long stride_b, const float* beta, float* C,
                                                int ldc, long long stride_c, int batches) {
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, A, CUDA_R_32F, lda, stride_a, B, CUDA_R_32F, ldb,
                                      stride_b, beta, C, CUDA_R_32F, ldc, stride_c, batches, CUBLAS_COMPUTE_32F,
                                      CUBLAS_GEMM_DEFAULT);
}
inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                                  const float* alpha, const float* A, int lda, const float* B, int ldb, const float* beta,
                                  float* C, int ldc) {
    return cublasSgemmStridedBatched(handle, op_a, op_b, m, n, k, alpha, A, lda, 0, B, ldb, 0, beta, C, ldc, 0, 1);
}
inline cublasStatus_t cublasSgemv(cublasHandle_t handle, cublasOperation_t op, int m, int n, const float* alpha, const float* A,
                                  int lda, const float* x, int, const float* beta, float* y, int) {
    const bool turned = op != CUBLAS_OP_N;  // vectors without gaps only
    return cublasSgemm(handle, op, CUBLAS_OP_N, turned ? n : m, 1, turned ? m : n, alpha, A, lda, x, turned ? m : n, beta, y,
                       turned ? n : m);
}
