// cuBLASLt on the CPU.
#pragma once
#include <cuda_runtime.h>

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_NOT_INITIALIZED = 1 };
inline const char* cublasLtGetStatusName(cublasStatus_t s) { return s == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "?"; }
struct emu_cublas {};
using cublasLtHandle_t = emu_cublas*;
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* h) { return *h = new emu_cublas, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return delete h, CUBLAS_STATUS_SUCCESS; }
