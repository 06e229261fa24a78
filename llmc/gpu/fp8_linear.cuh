// Linear layers with FP8 codes as operands (../fp8.h): products by cuBLASLt, from codes made by fp8.cuh. The mathematics is in
// ../cpu/fp8_linear.h and ../cpu/matmul.h.
//
// Products. FP8 tensor cores of Ada and Hopper need both operands contiguous along k, which cuBLASLt calls TN: A transposed, B
// not (as matmul.cuh reads row-major matrices). So each product needs its operands in one particular order, and tensors that
// occur in two products are kept in both orders:
//   forward          m = OC, n = N,  k = IC    A = weight (OC, IC)               B = inp (N, IC)
//   backward_input   m = IC, n = N,  k = OC    A = weight_transposed (IC, OC)    B = dout (N, OC)
//   backward_weight  m = IC, n = OC, k = N     A = inp_transposed (IC, N)        B = dout_transposed (OC, N)
// e4m3 x e5m2 is supported, e5m2 x e5m2 is not; D is bf16 or fp32. The library reads the inverse scales from device memory, so
// no op waits for them. Plans, autotuning and the cache file are in matmul.cuh.
//
// Precision: Hopper's tensor cores keep about 14 bits of a sum of FP8 products. So cuBLASLt adds partial sums in fp32 registers
// at intervals, unless `fast` is set: then the whole sum stays in the tensor cores. The forward pass tolerates that; gradients
// are sums over tens of thousands of tokens, so backward does it only on request (--fp8-fast-backward). Everything else is
// fp32, rounded once.
//
// Cost. Besides a product of N x IC x OC, its input is moved as codes (3 N IC bytes: written, then read and written by the
// transposition for backward), and, unless the previous op makes the codes, written and read as bf16 (4 N IC more). At 4.3 TB/s
// and 1400 TFLOP/s that is 490 or 1140 / OC of the product's time: 12% or 28% at OC = 4096 (not yet measured on a GPU).
//
// Limits: compute capability 8.9; all sizes and pointers, the scales' too, multiples of 16 (required by cuBLASLt
// 12.9 to 13.1).
#pragma once
#include "../ops.h"
#include "fp8.cuh"
#include "matmul.cuh"

namespace gpu {
namespace detail {

// ---- products --------------------------------------------------------------------------------------------------------------
// D (n, m) in rows = B (n, k) A (m, k)^T.
inline void fp8_gemm(Ctx& ctx, const GemmPointers& p, int m, int n, int k, Fp8 a, Fp8 b, cudaDataType d,
                     cublasLtEpilogue_t epilogue, bool add, bool fast) {
    CHECK(m % 16 == 0 && n % 16 == 0 && k % 16 == 0, "an FP8 product with m %d, n %d, k %d", m, n, k);
    CHECK(aligned_16(p.d, p.a, p.b, p.bias), "an FP8 product of matrices that are not at multiples of 16 bytes");
    CHECK(aligned_16(p.a_scale, p.b_scale), "inverse scales at %p and %p", (const void*)p.a_scale, (const void*)p.b_scale);
    gemm(ctx, p, {m, n, k, true, false, cublas_type(a), cublas_type(b), d, epilogue, add, p, fast});
}

// Sets every row of x, of C elements, to `row`.
__global__ void __launch_bounds__(256) repeat_row(floatX* x, const floatX* row, size_t n, int C) {
    constexpr int width = Pack<floatX>::size;
    const size_t stride = (size_t)gridDim.x * blockDim.x * width;
    for (size_t i = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * width; i < n; i += stride)
        store(x + i, load(row + i % (size_t)C));
}

}  // namespace detail

// ---- the ops ---------------------------------------------------------------------------------------------------------------
inline std::string fp8_limits(const Ctx& ctx) {
    if (ctx.capability >= 89) return "";
    return format("%s has compute capability %d.%d, and FP8 matrix products need 8.9 (RTX 40, L40, H100 and later)",
                  ctx.name.c_str(), ctx.capability / 10, ctx.capability % 10);
}

inline void fp8_linear_forward(Ctx& ctx, floatX* out, const Fp8Matrix& inp, const Fp8Matrix& weight, const floatX* bias, int N,
                               int IC, int OC, bool fast) {
    CHECK(aligned_16(bias), "a bias at %p", (const void*)bias);
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    bool add = false;
    if (bias && std::is_same<floatX, bf16>::value) {
        epilogue = CUBLASLT_EPILOGUE_BIAS;
    } else if (bias) {
        // Even if D is fp32, the library requires a bf16 bias. So D is set to the bias, and the product added to it.
        const size_t n = (size_t)N * OC, blocks = ceil_div(n, (size_t)256 * Pack<floatX>::size);
        LAUNCH(detail::repeat_row, (unsigned)std::min(blocks, (size_t)ctx.multiprocessors * 8), 256, 0, ctx, out, bias, n, OC);
        bias = nullptr;
        add = true;
    }
    detail::fp8_gemm(ctx, {out, weight.codes, inp.codes, bias, nullptr, weight.inverse_scale, inp.inverse_scale}, OC, N, IC,
                     weight.format, inp.format, detail::x_type, epilogue, add, fast);
}

inline void fp8_linear_residual_forward(Ctx& ctx, floatX* out, const Addends& addends, const Fp8Matrix& inp,
                                        const Fp8Matrix& weight, int N, int IC, int OC, bool fast) {
    const floatX *residual = addends.residual, *bias = addends.bias;
    if (!std::is_same<floatX, bf16>::value) {
        fp8_linear_forward(ctx, out, inp, weight, bias, N, IC, OC, fast);
        return residual_forward(ctx, out, residual, out, (size_t)N * OC);
    }
    CHECK(aligned_16(residual, bias), "a residual stream at %p, a bias at %p", (const void*)residual, (const void*)bias);
    detail::fp8_gemm(ctx, {out, weight.codes, inp.codes, bias, nullptr, weight.inverse_scale, inp.inverse_scale, residual}, OC,
                     N, IC, weight.format, inp.format, detail::x_type,
                     bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT, true, fast);
}

inline void fp8_linear_backward_input(Ctx& ctx, floatX* dinp, const Fp8Matrix& dout, const Fp8Matrix& weight_transposed, int N,
                                      int IC, int OC, bool fast) {
    const Fp8Matrix& w = weight_transposed;
    detail::fp8_gemm(ctx, {dinp, w.codes, dout.codes, nullptr, nullptr, w.inverse_scale, dout.inverse_scale}, IC, N, OC,
                     w.format, dout.format, detail::x_type, CUBLASLT_EPILOGUE_DEFAULT, false, fast);
}

inline void fp8_linear_backward_weight(Ctx& ctx, const Elements& dweight, const Fp8Matrix& dout_transposed,
                                       const Fp8Matrix& inp_transposed, int N, int IC, int OC, Acc acc, bool fast) {
    const Fp8Matrix &dout = dout_transposed, &inp = inp_transposed;
    detail::fp8_gemm(ctx, {dweight.data, inp.codes, dout.codes, nullptr, nullptr, inp.inverse_scale, dout.inverse_scale}, IC,
                     OC, N, inp.format, dout.format, detail::gradient_type(dweight, acc), CUBLASLT_EPILOGUE_DEFAULT,
                     acc == Acc::Add, fast);
}

inline void bias_backward(Ctx& ctx, real* dbias, const floatX* dout, int N, int OC) {
    detail::bias_backward(ctx, dbias, dout, OC, N, OC, Acc::Add);
}

}  // namespace gpu
