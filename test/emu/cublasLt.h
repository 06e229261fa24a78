// cuBLASLt on the CPU: the part of the library's interface that this program uses, as documented.
//   D (m, n) = epilogue(alpha op(A) op(B) + beta C),  op(A) (m, k), op(B) (k, n), column-major, fp32 sums, one rounding
// with strided batches, bf16, fp32 and fp8 operands, fp8 scales, and the bias and GELU epilogues. Enumerators have the values
// of CUDA 13.0's header. Rejects everything that the library rejects, and everything that this file does not support.
//
// It is deliberately adversarial: anything that callers may not rely on fails.
// - Reading or writing outside of device memory ends the program, as on a GPU, down to the operands' last elements.
// - The first algorithm offered is the least accurate that the preference allows (partial sums rounded to D's type), and most
//   require 16-byte alignment if they may. Each adds in a different order. The fastest one is drawn, from EMU_SEED and
//   the product.
// - Epilogues that are not fused on all GPUs and for all shapes (with an auxiliary matrix, with a bias gradient) are refused
//   for one in EMU_REFUSALS products, drawn from EMU_SEED and the product: the same one is refused each time.
// - C is read only if beta is not 0; unset pointers, unaligned pointers, a workspace too small are errors.
// Not supported: fp16, integers, complex numbers, row-major and tiled orders, ReLU, block scales (mxfp8), matrix transforms.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

// ---- types and enumerators -------------------------------------------------------------------------------------------------
enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14,
    CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum cudaDataType {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14,
    CUDA_R_8F_E4M3 = 28,
    CUDA_R_8F_E5M2 = 29,
};
using cudaDataType_t = cudaDataType;
enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 };
enum cublasFillMode_t { CUBLAS_FILL_MODE_LOWER = 0, CUBLAS_FILL_MODE_UPPER = 1, CUBLAS_FILL_MODE_FULL = 2 };
enum cublasComputeType_t {
    CUBLAS_COMPUTE_16F = 64,
    CUBLAS_COMPUTE_32F = 68,
    CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_32F_FAST_16F = 74,
    CUBLAS_COMPUTE_32F_FAST_16BF = 75,
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
    CUBLAS_COMPUTE_64F = 70,
};
enum cublasLtOrder_t { CUBLASLT_ORDER_COL = 0, CUBLASLT_ORDER_ROW = 1 };
enum cublasLtPointerMode_t { CUBLASLT_POINTER_MODE_HOST = 0, CUBLASLT_POINTER_MODE_DEVICE = 1 };
enum cublasLtReductionScheme_t {
    CUBLASLT_REDUCTION_SCHEME_NONE = 0,
    CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,
    CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
    CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
    CUBLASLT_REDUCTION_SCHEME_MASK = 7,
};
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_RELU = 2,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_RELU_BIAS = 2 | 4,
    CUBLASLT_EPILOGUE_GELU = 32,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
    CUBLASLT_EPILOGUE_GELU_BIAS = 32 | 4,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
    CUBLASLT_EPILOGUE_DGELU = 64 | 128,
    CUBLASLT_EPILOGUE_DGELU_BGRAD = 64 | 128 | 16,
    CUBLASLT_EPILOGUE_BGRADA = 256,
    CUBLASLT_EPILOGUE_BGRADB = 512,
};
enum cublasLtMatrixLayoutAttribute_t {
    CUBLASLT_MATRIX_LAYOUT_TYPE = 0,
    CUBLASLT_MATRIX_LAYOUT_ORDER = 1,
    CUBLASLT_MATRIX_LAYOUT_ROWS = 2,
    CUBLASLT_MATRIX_LAYOUT_COLS = 3,
    CUBLASLT_MATRIX_LAYOUT_LD = 4,
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5,
    CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6,
};
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_COMPUTE_TYPE = 0,
    CUBLASLT_MATMUL_DESC_SCALE_TYPE = 1,
    CUBLASLT_MATMUL_DESC_POINTER_MODE = 2,
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_TRANSC = 5,
    CUBLASLT_MATMUL_DESC_FILL_MODE = 6,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE = 10,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE = 13,
    CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET = 15,
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17,
    CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
    CUBLASLT_MATMUL_DESC_C_SCALE_POINTER = 19,
    CUBLASLT_MATMUL_DESC_D_SCALE_POINTER = 20,
    CUBLASLT_MATMUL_DESC_AMAX_D_POINTER = 21,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE = 22,
    CUBLASLT_MATMUL_DESC_FAST_ACCUM = 25,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26,
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_SEARCH_MODE = 0,
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
};
enum cublasLtMatmulAlgoConfigAttributes_t {
    CUBLASLT_ALGO_CONFIG_ID = 0,
    CUBLASLT_ALGO_CONFIG_TILE_ID = 1,
    CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2,
    CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3,
};

// Opaque to callers, so the fields are ours; none is larger than the library's.
struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType type;
    int32_t order;
    uint64_t rows, cols;
    int64_t ld;
    int64_t batch_stride;
    int32_t batch_count;
};
struct cublasLtMatmulDescOpaque_t {
    int32_t compute_type, scale_type, pointer_mode, op_a, op_b, op_c, fill_mode;
    uint32_t epilogue;
    void* bias;
    int64_t bias_batch_stride;
    void* aux;
    int64_t aux_ld, aux_batch_stride;
    int32_t sm_count_target;
    const float *a_scale, *b_scale, *c_scale, *d_scale;
    float* amax_d;
    int32_t aux_type, bias_type;  // -1: as documented for the operands
    int8_t fast_accum;
};
struct cublasLtMatmulPreferenceOpaque_t {
    uint32_t search_mode;
    uint64_t workspace_bytes;
    uint32_t reduction_mask, alignment[4];  // of A, B, C, D
};
struct cublasLtMatmulAlgo_t {  // may be stored as these bytes and reused with the same version of the library
    uint64_t data[8];
};
static_assert(sizeof(cublasLtMatrixLayoutOpaque_t) <= 64 && sizeof(cublasLtMatmulDescOpaque_t) <= 256, "the library's sizes");
static_assert(sizeof(cublasLtMatmulPreferenceOpaque_t) <= 64, "the library's size");
using cublasLtMatrixLayout_t = cublasLtMatrixLayoutOpaque_t*;
using cublasLtMatmulDesc_t = cublasLtMatmulDescOpaque_t*;
using cublasLtMatmulPreference_t = cublasLtMatmulPreferenceOpaque_t*;
struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
    int reserved[4];
};
struct cublasLtContext {};
using cublasLtHandle_t = cublasLtContext*;

inline const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "CUBLAS_STATUS_UNKNOWN";
}
inline size_t cublasLtGetVersion() { return 130100; }
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    return *handle = new cublasLtContext, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return delete handle, CUBLAS_STATUS_SUCCESS; }

// ---- storage types ---------------------------------------------------------------------------------------------------------
namespace emu {

inline size_t bytes_of(int type) {
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2 ? 1 : 0;
}
inline bool is_fp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

// 1 sign bit, 8 - 1 - mantissa_bits exponent bits. e4m3 (bias 7) has no infinities and one NaN, s.1111.111, so that its largest
// number is 448; e5m2 (bias 15) is like IEEE's formats, largest number 57344.
inline float decode_fp8(uint8_t code, int type) {
    const int mantissa_bits = type == CUDA_R_8F_E4M3 ? 3 : 2, bias = type == CUDA_R_8F_E4M3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    float x;
    if (type == CUDA_R_8F_E4M3 ? (code & 0x7f) == 0x7f : exponent == 31 && mantissa) x = NAN;
    else if (type == CUDA_R_8F_E5M2 && exponent == 31) x = INFINITY;
    else if (exponent == 0) x = std::ldexp((float)mantissa, 1 - bias - mantissa_bits);
    else x = std::ldexp((float)(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
    return code & 0x80 ? -x : x;
}
inline const float* decoded_fp8(int type) {
    static const auto all = [] {
        std::array<std::array<float, 256>, 2> numbers;
        for (int code = 0; code < 256; code++) {
            numbers[0][(size_t)code] = decode_fp8((uint8_t)code, CUDA_R_8F_E4M3);
            numbers[1][(size_t)code] = decode_fp8((uint8_t)code, CUDA_R_8F_E5M2);
        }
        return numbers;
    }();
    return all[type == CUDA_R_8F_E5M2].data();
}
// To nearest, ties to even; values above the range become the largest number. NaN stays NaN.
inline uint8_t encode_fp8(float x, int type) {
    const int mantissa_bits = type == CUDA_R_8F_E4M3 ? 3 : 2, bias = type == CUDA_R_8F_E4M3 ? 7 : 15;
    const int sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return 0x7f;
    x = std::min(std::abs(x), type == CUDA_R_8F_E4M3 ? 448.0f : 57344.0f);
    const int exponent = std::max((int)(__float_as_uint(x) >> 23) - 127, 1 - bias);
    // In units of the last place: at least 2^mantissa_bits unless subnormal. A carry correctly moves into the exponent.
    const float per_unit = __uint_as_float((unsigned)(127 + mantissa_bits - exponent) << 23);
    const int units = (int)std::nearbyint(x * per_unit);
    return (uint8_t)(sign | (units + ((exponent + bias - 1) << mantissa_bits)));
}

inline float load_as_float(const void* p, int type, size_t i) {
    if (type == CUDA_R_32F) return ((const float*)p)[i];
    if (type == CUDA_R_16BF) return __uint_as_float((unsigned)((const uint16_t*)p)[i] << 16);
    return decoded_fp8(type)[((const uint8_t*)p)[i]];
}
inline void store_rounded(void* p, int type, size_t i, float x) {
    if (type == CUDA_R_32F) {
        ((float*)p)[i] = x;
    } else if (type == CUDA_R_16BF) {
        const unsigned u = __float_as_uint(x);
        ((uint16_t*)p)[i] = (uint16_t)(std::isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16);
    } else {
        ((uint8_t*)p)[i] = encode_fp8(x, type);
    }
}
inline float round_to(int type, float x) {
    float stored = 0;
    store_rounded(&stored, type, 0, x);
    return load_as_float(&stored, type, 0);
}

// ---- attributes ------------------------------------------------------------------------------------------------------------
struct Field {
    void* p = nullptr;  // null: no such attribute
    size_t bytes = 0;
    Field() = default;
    template <class T>
    explicit Field(T& x) : p((void*)&x), bytes(sizeof x) {}
};
inline cublasStatus_t set_field(Field field, const void* value, size_t bytes) {
    if (!field.p || !value || bytes != field.bytes) return CUBLAS_STATUS_INVALID_VALUE;
    return memcpy(field.p, value, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t get_field(Field field, void* value, size_t bytes, size_t* written) {
    if (!field.p || (bytes == 0 ? !written : !value || bytes != field.bytes)) return CUBLAS_STATUS_INVALID_VALUE;
    if (bytes) memcpy(value, field.p, bytes);
    if (written) *written = field.bytes;
    return CUBLAS_STATUS_SUCCESS;
}

inline Field field_of(cublasLtMatrixLayoutOpaque_t& x, cublasLtMatrixLayoutAttribute_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_TYPE: return Field(x.type);
        case CUBLASLT_MATRIX_LAYOUT_ORDER: return Field(x.order);
        case CUBLASLT_MATRIX_LAYOUT_ROWS: return Field(x.rows);
        case CUBLASLT_MATRIX_LAYOUT_COLS: return Field(x.cols);
        case CUBLASLT_MATRIX_LAYOUT_LD: return Field(x.ld);
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return Field(x.batch_count);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return Field(x.batch_stride);
    }
    return {};
}
inline Field field_of(cublasLtMatmulDescOpaque_t& x, cublasLtMatmulDescAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return Field(x.compute_type);
        case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return Field(x.scale_type);
        case CUBLASLT_MATMUL_DESC_POINTER_MODE: return Field(x.pointer_mode);
        case CUBLASLT_MATMUL_DESC_TRANSA: return Field(x.op_a);
        case CUBLASLT_MATMUL_DESC_TRANSB: return Field(x.op_b);
        case CUBLASLT_MATMUL_DESC_TRANSC: return Field(x.op_c);
        case CUBLASLT_MATMUL_DESC_FILL_MODE: return Field(x.fill_mode);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return Field(x.epilogue);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return Field(x.bias);
        case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return Field(x.bias_batch_stride);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return Field(x.aux);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return Field(x.aux_ld);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return Field(x.aux_batch_stride);
        case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET: return Field(x.sm_count_target);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return Field(x.a_scale);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return Field(x.b_scale);
        case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: return Field(x.c_scale);
        case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return Field(x.d_scale);
        case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return Field(x.amax_d);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return Field(x.aux_type);
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return Field(x.fast_accum);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return Field(x.bias_type);
    }
    return {};
}
inline Field field_of(cublasLtMatmulPreferenceOpaque_t& x, cublasLtMatmulPreferenceAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_SEARCH_MODE: return Field(x.search_mode);
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return Field(x.workspace_bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return Field(x.reduction_mask);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return Field(x.alignment[0]);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return Field(x.alignment[1]);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return Field(x.alignment[2]);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return Field(x.alignment[3]);
    }
    return {};
}

// ---- products and their refusal --------------------------------------------------------------------------------------------
struct Product {
    const cublasLtMatmulDescOpaque_t* op;
    const cublasLtMatrixLayoutOpaque_t *a, *b, *c, *d;
    size_t m, n, k;
    int aux_type, bias_type;
    bool has_bias() const { return op->epilogue & CUBLASLT_EPILOGUE_BIAS; }
    bool sums_bias_gradient() const {
        return op->epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD || op->epilogue == CUBLASLT_EPILOGUE_BGRADA ||
               op->epilogue == CUBLASLT_EPILOGUE_BGRADB;
    }
    bool has_aux() const { return op->epilogue & 128; }
    size_t bias_length() const { return op->epilogue == CUBLASLT_EPILOGUE_BGRADB ? n : m; }
};

// A random number from EMU_SEED and the product.
inline unsigned drawn(const Product& p, unsigned what = 0) {
    unsigned hash = config().seed ^ what;
    for (const size_t x : {p.m, p.n, p.k, (size_t)p.a->type, (size_t)p.d->type, (size_t)p.op->epilogue}) {
        hash = (hash ^ (unsigned)x) * 2654435761u;
        hash ^= hash >> 15;
    }
    return hash;
}
inline bool refused_by_chance(const Product& p) {
    return config().refusals < 2 ? config().refusals == 1 : drawn(p) % config().refusals == 0;
}

// Everything that does not depend on pointers to matrices.
inline cublasStatus_t describe(Product& p) {
    if (!p.op || !p.a || !p.b || !p.c || !p.d) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasLtMatmulDescOpaque_t& op = *p.op;
    for (const cublasLtMatrixLayoutOpaque_t* x : {p.a, p.b, p.c, p.d}) {
        if (!bytes_of(x->type) || x->order != CUBLASLT_ORDER_COL) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (x->rows == 0 || x->cols == 0 || x->ld < (int64_t)x->rows) return CUBLAS_STATUS_INVALID_VALUE;
        if (x->batch_count < 1 || x->batch_count != p.d->batch_count) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (op.op_c != CUBLAS_OP_N || op.fill_mode != CUBLAS_FILL_MODE_FULL) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const int32_t t : {op.op_a, op.op_b})
        if (t != CUBLAS_OP_N && t != CUBLAS_OP_T) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (op.pointer_mode != CUBLASLT_POINTER_MODE_HOST && op.pointer_mode != CUBLASLT_POINTER_MODE_DEVICE)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool a_t = op.op_a == CUBLAS_OP_T, b_t = op.op_b == CUBLAS_OP_T;
    p.m = p.d->rows;
    p.n = p.d->cols;
    p.k = a_t ? p.a->rows : p.a->cols;
    if ((a_t ? p.a->cols : p.a->rows) != p.m || (b_t ? p.b->cols : p.b->rows) != p.k || (b_t ? p.b->rows : p.b->cols) != p.n ||
        p.c->rows != p.m || p.c->cols != p.n)
        return CUBLAS_STATUS_INVALID_VALUE;

    const int in = p.a->type, out = p.d->type, capability = device().major * 10 + device().minor;
    const bool fp8 = is_fp8(in);
    const bool plain_32f = op.compute_type == CUBLAS_COMPUTE_32F || op.compute_type == CUBLAS_COMPUTE_32F_PEDANTIC;
    if (op.scale_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!plain_32f && !(op.compute_type == CUBLAS_COMPUTE_32F_FAST_TF32 && in == CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (fp8) {
        const bool e5m2_twice = in == CUDA_R_8F_E5M2 && p.b->type == CUDA_R_8F_E5M2;
        if (op.compute_type != CUBLAS_COMPUTE_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (capability < 89 || !is_fp8(p.b->type) || e5m2_twice || !a_t || b_t) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (p.m % 16 || p.n % 16 || p.k % 16) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (is_fp8(p.c->type)) return CUBLAS_STATUS_NOT_SUPPORTED;
        // D may be fp8 with a bf16 C; e5m2 only if an operand is.
        const bool e4m3_twice = in == CUDA_R_8F_E4M3 && p.b->type == CUDA_R_8F_E4M3;
        if (is_fp8(out) ? p.c->type != CUDA_R_16BF || (out == CUDA_R_8F_E5M2 && e4m3_twice) : p.c->type != out)
            return CUBLAS_STATUS_NOT_SUPPORTED;
    } else {
        if (p.b->type != in || p.c->type != out || is_fp8(out)) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (in == CUDA_R_32F && out != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (in == CUDA_R_16BF && capability < 80) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (op.fast_accum != 0 && op.fast_accum != 1) return CUBLAS_STATUS_INVALID_VALUE;
    // Scales belong to fp8 matrices. Versions 12.9 to 13.1 require them at multiples of 16.
    for (const void* scale : {(const void*)op.a_scale, (const void*)op.b_scale, (const void*)op.d_scale})
        if ((uintptr_t)scale % 16) return CUBLAS_STATUS_INVALID_VALUE;
    if (((op.a_scale || op.b_scale) && !fp8) || op.c_scale || ((op.d_scale || op.amax_d) && !is_fp8(out)))
        return CUBLAS_STATUS_INVALID_VALUE;

    switch (op.epilogue) {
        case CUBLASLT_EPILOGUE_DEFAULT:
        case CUBLASLT_EPILOGUE_BIAS:
        case CUBLASLT_EPILOGUE_GELU:
        case CUBLASLT_EPILOGUE_GELU_BIAS: break;
        case CUBLASLT_EPILOGUE_GELU_AUX:
        case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
        case CUBLASLT_EPILOGUE_DGELU:
        case CUBLASLT_EPILOGUE_DGELU_BGRAD:
        case CUBLASLT_EPILOGUE_BGRADA:
        case CUBLASLT_EPILOGUE_BGRADB:
            if (fp8 || refused_by_chance(p)) return CUBLAS_STATUS_NOT_SUPPORTED;
            break;
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    const int default_bias_type = fp8 ? CUDA_R_16BF : out;
    p.bias_type = op.bias_type < 0 ? default_bias_type : op.bias_type;
    p.aux_type = op.aux_type < 0 ? out : op.aux_type;
    if ((p.has_bias() || p.sums_bias_gradient()) && p.bias_type != default_bias_type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (p.has_aux()) {
        if (p.aux_type != out) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (op.aux_ld < (int64_t)p.m || op.aux_ld % 8 || op.aux_batch_stride % 8) return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}

// ---- algorithms ------------------------------------------------------------------------------------------------------------
// k is split into `splits` parts (split-K), reduced by `scheme`; within a part, `step` products at a time are summed before
// they are added to the others, as in tensor cores.
struct Algorithm {
    uint32_t magic = 0x4c744d4d;
    int32_t id = 0;
    uint32_t tile = 0;
    int32_t splits = 1;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    uint32_t step = 1, alignment = 1;  // alignment: in bytes, of matrices and of their columns
    int32_t types[4] = {};             // of A, B, C, D
    uint32_t check = 0;

    uint32_t checksum() const {
        uint32_t sum = 2166136261u;
        const uint8_t* bytes = (const uint8_t*)this;
        for (size_t i = 0; i < offsetof(Algorithm, check); i++) sum = (sum ^ bytes[i]) * 16777619u;
        return sum;
    }
    size_t workspace_bytes(const Product& p) const {
        if (scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE) return 256;  // counters
        return splits > 1 ? splits * p.m * p.n * (scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE ? bytes_of(p.d->type) : 4)
                          : 0;
    }
};
// The duration of an algorithm by the stream's clock: 1 to 2 ms.
inline double drawn_ms(const Product& p, const Algorithm& x) { return 1 + (double)drawn(p, x.checksum()) * 0x1p-32; }
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "fits the opaque bytes");

inline Field field_of(Algorithm& x, cublasLtMatmulAlgoConfigAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_ALGO_CONFIG_ID: return Field(x.id);
        case CUBLASLT_ALGO_CONFIG_TILE_ID: return Field(x.tile);
        case CUBLASLT_ALGO_CONFIG_SPLITK_NUM: return Field(x.splits);
        case CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME: return Field(x.scheme);
    }
    return {};
}
inline Algorithm unpack(const cublasLtMatmulAlgo_t& algo) {
    Algorithm x;
    return memcpy((void*)&x, &algo, sizeof x), x;
}
inline cublasLtMatmulAlgo_t pack(Algorithm x) {
    cublasLtMatmulAlgo_t algo = {};
    x.check = x.checksum();
    return memcpy(&algo, &x, sizeof x), algo;
}

inline bool columns_aligned(const Product& p, uint32_t alignment) {
    for (const cublasLtMatrixLayoutOpaque_t* x : {p.a, p.b, p.c, p.d})
        if ((size_t)x->ld * bytes_of(x->type) % alignment || (size_t)x->batch_stride * bytes_of(x->type) % alignment)
            return false;
    return true;
}

// All algorithms for a product, as the library's heuristic would list them: see the head of this file for the order.
inline std::vector<Algorithm> algorithms(const Product& p) {
    struct Kind {
        int splits;
        uint32_t scheme, step, alignment;
    };
    constexpr uint32_t all_at_once = ~0u;
    const Kind kinds[] = {
        {2, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 16, 16}, {2, CUBLASLT_REDUCTION_SCHEME_INPLACE, 16, 1},
        {1, CUBLASLT_REDUCTION_SCHEME_NONE, 32, 16},        {3, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 16, 16},
        {1, CUBLASLT_REDUCTION_SCHEME_NONE, 64, 16},        {1, CUBLASLT_REDUCTION_SCHEME_NONE, all_at_once, 1},
        {2, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 8, 1},
    };
    std::vector<Algorithm> all;
    for (const Kind& kind : kinds) {
        if (kind.alignment == 1 && is_fp8(p.a->type)) continue;
        if (!columns_aligned(p, kind.alignment) || (size_t)kind.splits > p.k) continue;
        Algorithm x;
        x.id = kind.alignment == 1 ? 1 : 66;
        x.tile = 15 + (uint32_t)(&kind - kinds);
        x.splits = kind.splits;
        x.scheme = kind.scheme;
        x.step = kind.step;
        x.alignment = kind.alignment;
        x.types[0] = p.a->type;
        x.types[1] = p.b->type;
        x.types[2] = p.c->type;
        x.types[3] = p.d->type;
        all.push_back(x);
    }
    return all;
}
inline cublasStatus_t check_algorithm(const Product& p, const Algorithm& x) {
    const int types[4] = {p.a->type, p.b->type, p.c->type, p.d->type};
    if (x.magic != Algorithm().magic || x.check != x.checksum() || memcmp(types, x.types, sizeof types))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (x.splits < 1 || (size_t)x.splits > p.k || (x.splits > 1) != (x.scheme != 0)) return CUBLAS_STATUS_NOT_SUPPORTED;
    return columns_aligned(p, x.alignment) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

// ---- the product -----------------------------------------------------------------------------------------------------------
// Ends the program unless the whole range is in one allocation.
inline void expect_device_memory(const void* p, size_t bytes, const char* what) {
    if (within(device().allocations, p, bytes)) return;
    fault("cublasLtMatmul: %s: %zu bytes at %p are not device memory", what, bytes, p);
}
inline void expect_matrix(const void* p, const cublasLtMatrixLayoutOpaque_t& x, const char* what) {
    for (int batch = 0; batch < x.batch_count; batch++) {
        const size_t element = bytes_of(x.type), last = (x.cols - 1) * (size_t)x.ld + x.rows;
        expect_device_memory((const char*)p + (int64_t)element * x.batch_stride * batch, last * element, what);
    }
}

// The GPU's tanh.approx.f32, which the library's epilogues use: correct to 11 bits.
inline float tanh_approximate(float x) {
    return __uint_as_float((__float_as_uint(std::tanh(x)) + (1u << 12)) & ~((1u << 13) - 1));
}
inline float gelu_tanh(float x) { return 0.5f * x * (1 + tanh_approximate(0.7978845608f * (x + 0.044715f * x * x * x))); }
inline float gelu_tanh_derivative(float x) {
    const float t = tanh_approximate(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

// sums[i] = sum of a(i, l) b[l] over l in [first, last): `width` rows of A at once, so that the loop over them is vectorized. a
// (k, stride) holds op(A)'s columns one after another.
constexpr size_t width = 64;
EMU_OPTIMIZED inline void add_products(float* sums, const float* a, size_t stride, const float* b, size_t first, size_t last,
                                       size_t step) {
    float total[width] = {};
    for (size_t l = first; l < last; l += step) {
        float part[width] = {};
        const size_t end = std::min(last, l + step);
        for (size_t j = l; j < end; j++) {
            const float* column = a + j * stride;
            const float factor = b[j];
            for (size_t i = 0; i < width; i++) part[i] += column[i] * factor;
        }
        for (size_t i = 0; i < width; i++) total[i] += part[i];
    }
    memcpy(sums, total, sizeof total);
}

// The same for fp8, as measured on Hopper's tensor cores (DeepSeek-V3, arXiv 2412.19437, section 3.5): 32 products and the sum
// so far are all truncated 13 bits below the leading bit of the largest. Without fast accumulation the sum is moved to fp32
// every 128 products.
EMU_OPTIMIZED inline void add_fp8_products(float* sums, const float* a, size_t stride, const float* b, size_t first,
                                           size_t last, bool fast) {
    constexpr size_t step = 32, promotion = 128;
    float total[width] = {}, part[width] = {};
    for (size_t l = first; l < last; l += step) {
        const size_t end = std::min(last, l + step);
        float largest[width], per_unit[width], units[width];
        for (size_t i = 0; i < width; i++) largest[i] = std::abs(part[i]);
        for (size_t j = l; j < end; j++)
            for (size_t i = 0; i < width; i++) {
                const float product = std::abs(a[j * stride + i] * b[j]);
                largest[i] = product > largest[i] ? product : largest[i];
            }
        for (size_t i = 0; i < width; i++) {
            const unsigned exponent = std::max(64u, __float_as_uint(largest[i]) >> 23);
            per_unit[i] = __uint_as_float((254 - (exponent - 13)) << 23);
            units[i] = std::trunc(part[i] * per_unit[i]);
        }
        for (size_t j = l; j < end; j++)
            for (size_t i = 0; i < width; i++) units[i] += std::trunc(a[j * stride + i] * b[j] * per_unit[i]);
        const bool promoted = !fast && (end - first) % promotion == 0;
        for (size_t i = 0; i < width; i++) {
            part[i] = units[i] / per_unit[i];
            if (promoted) {
                total[i] += part[i];
                part[i] = 0;
            }
        }
    }
    for (size_t i = 0; i < width; i++) sums[i] = total[i] + part[i];
}

struct Operands {
    const void *a, *b, *c;
    void *d, *workspace;
    float alpha, beta;
};

// One matrix of the batch.
EMU_OPTIMIZED inline void multiply(const Product& p, const Algorithm& algorithm, const Operands& x, int batch) {
    const cublasLtMatmulDescOpaque_t& op = *p.op;
    const size_t m = p.m, n = p.n, k = p.k, padded = (m + width - 1) / width * width;
    const auto at = [&](const void* base, int type, int64_t stride) {
        return (const char*)base + (int64_t)bytes_of(type) * stride * batch;
    };
    const void *A = at(x.a, p.a->type, p.a->batch_stride), *B = at(x.b, p.b->type, p.b->batch_stride);
    const void* C = x.beta != 0 ? at(x.c, p.c->type, p.c->batch_stride) : nullptr;
    void* D = (void*)at(x.d, p.d->type, p.d->batch_stride);
    void* bias = op.bias ? (void*)at(op.bias, p.bias_type, op.bias_batch_stride) : nullptr;
    void* aux = op.aux ? (void*)at(op.aux, p.aux_type, op.aux_batch_stride) : nullptr;

    std::vector<float> a(k * padded), b(n * k), sums(n * padded);
    const size_t lda = (size_t)p.a->ld, ldb = (size_t)p.b->ld;
    for (size_t l = 0; l < k; l++)
        for (size_t i = 0; i < m; i++)
            a[l * padded + i] = load_as_float(A, p.a->type, op.op_a == CUBLAS_OP_T ? l + i * lda : i + l * lda);
    for (size_t j = 0; j < n; j++)
        for (size_t l = 0; l < k; l++)
            b[j * k + l] = load_as_float(B, p.b->type, op.op_b == CUBLAS_OP_T ? j + l * ldb : l + j * ldb);

    const size_t splits = (size_t)algorithm.splits, part = (k + splits - 1) / splits, elements = n * padded;
    std::vector<float> partial(splits > 1 ? elements : 0);
    const bool narrow =
        algorithm.scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE || algorithm.scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE;
    const bool stored = splits > 1 && algorithm.scheme != CUBLASLT_REDUCTION_SCHEME_INPLACE;
    for (size_t s = 0; s < splits; s++) {
        std::vector<float>& target = splits > 1 ? partial : sums;
        for (size_t j = 0; j < n; j++)
            for (size_t i = 0; i < padded; i += width)
                if (is_fp8(p.a->type))
                    add_fp8_products(&target[j * padded + i], &a[i], padded, &b[j * k], std::min(k, s * part),
                                     std::min(k, (s + 1) * part), op.fast_accum);
                else
                    add_products(&target[j * padded + i], &a[i], padded, &b[j * k], std::min(k, s * part),
                                 std::min(k, (s + 1) * part), algorithm.step);
        if (splits == 1) break;
        for (size_t j = 0; j < n; j++)
            for (size_t i = 0; i < m; i++) {
                float& sum = sums[j * padded + i];
                float value = partial[j * padded + i];
                if (stored) {
                    const int type = narrow ? p.d->type : CUDA_R_32F;
                    const size_t place = (s * n + j) * m + i;
                    store_rounded(x.workspace, type, place, value);
                    value = load_as_float(x.workspace, type, place);
                }
                sum = narrow && !stored ? round_to(p.d->type, sum + value) : sum + value;
            }
    }

    const float scale = x.alpha * (op.a_scale ? *op.a_scale : 1) * (op.b_scale ? *op.b_scale : 1);
    const float d_scale = op.d_scale ? *op.d_scale : 1;
    std::vector<float> bias_gradient(p.bias_length());
    float amax = batch && op.amax_d ? *op.amax_d : 0;
    // Some algorithms round a product to a bf16 D's type before they add C, or a bias if columns are not at multiples of 16
    // bytes (seen on an H100).
    const bool rounded_first =
        p.d->type == CUDA_R_16BF && !is_fp8(p.a->type) && (C || (p.has_bias() && !columns_aligned(p, 16)));
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < m; i++) {
            float y = scale * sums[j * padded + i];
            if (rounded_first) y = round_to(p.d->type, y);
            if (C) y += x.beta * load_as_float(C, p.c->type, i + j * (size_t)p.c->ld);
            if (p.has_bias()) y += load_as_float(bias, p.bias_type, i);
            const size_t aux_place = i + j * (size_t)op.aux_ld;
            if (op.epilogue & 32) {
                if (p.has_aux()) store_rounded(aux, p.aux_type, aux_place, y);
                y = gelu_tanh(y);
            } else if (op.epilogue & 64) {
                y *= gelu_tanh_derivative(load_as_float(aux, p.aux_type, aux_place));
            }
            if (op.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) bias_gradient[i] += y;
            amax = std::max(amax, std::abs(y));
            store_rounded(D, p.d->type, i + j * (size_t)p.d->ld, y * d_scale);
        }
    if (op.amax_d) *op.amax_d = amax;
    if (op.epilogue == CUBLASLT_EPILOGUE_BGRADA)
        for (size_t l = 0; l < k; l++)
            for (size_t i = 0; i < m; i++) bias_gradient[i] += a[l * padded + i];
    if (op.epilogue == CUBLASLT_EPILOGUE_BGRADB)
        for (size_t j = 0; j < n; j++)
            for (size_t l = 0; l < k; l++) bias_gradient[j] += b[j * k + l];
    if (p.sums_bias_gradient())
        for (size_t i = 0; i < bias_gradient.size(); i++) store_rounded(bias, p.bias_type, i, bias_gradient[i]);
}

}  // namespace emu

// ---- the library's functions -----------------------------------------------------------------------------------------------
inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t x, cudaDataType type, uint64_t rows, uint64_t cols,
                                               int64_t ld) {
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    return *x = {type, CUBLASLT_ORDER_COL, rows, cols, ld, 0, 1}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* x, cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    return cublasLtMatrixLayoutInit(*x = new cublasLtMatrixLayoutOpaque_t, type, rows, cols, ld);
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t x) { return delete x, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t x, cublasLtMatrixLayoutAttribute_t attribute,
                                                       const void* value, size_t bytes) {
    return x ? emu::set_field(emu::field_of(*x, attribute), value, bytes) : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t x, cublasLtMatrixLayoutAttribute_t attribute,
                                                       void* value, size_t bytes, size_t* written) {
    return x ? emu::get_field(emu::field_of(*x, attribute), value, bytes, written) : CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t x, cublasComputeType_t compute, cudaDataType_t scale) {
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    *x = {};
    x->compute_type = compute;
    x->scale_type = scale;
    x->fill_mode = CUBLAS_FILL_MODE_FULL;
    x->epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    x->aux_type = x->bias_type = -1;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* x, cublasComputeType_t compute, cudaDataType_t scale) {
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    return cublasLtMatmulDescInit(*x = new cublasLtMatmulDescOpaque_t, compute, scale);
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t x) { return delete x, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t x, cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, size_t bytes) {
    EMU_CALLED();
    return x ? emu::set_field(emu::field_of(*x, attribute), value, bytes) : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t x, cublasLtMatmulDescAttributes_t attribute,
                                                     void* value, size_t bytes, size_t* written) {
    return x ? emu::get_field(emu::field_of(*x, attribute), value, bytes, written) : CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t x) {
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    return *x = {0, 0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}}, CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* x) {
    return x ? cublasLtMatmulPreferenceInit(*x = new cublasLtMatmulPreferenceOpaque_t) : CUBLAS_STATUS_INVALID_VALUE;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t x) { return delete x, CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t x,
                                                           cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                           size_t bytes) {
    return x ? emu::set_field(emu::field_of(*x, attribute), value, bytes) : CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo,
                                                           cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                           size_t bytes, size_t* written) {
    if (!algo) return CUBLAS_STATUS_INVALID_VALUE;
    emu::Algorithm x = emu::unpack(*algo);
    return emu::get_field(emu::field_of(x, attribute), value, bytes, written);
}
inline cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t* algo,
                                                           cublasLtMatmulAlgoConfigAttributes_t attribute, const void* value,
                                                           size_t bytes) {
    if (!algo || attribute == CUBLASLT_ALGO_CONFIG_ID) return CUBLAS_STATUS_INVALID_VALUE;
    emu::Algorithm x = emu::unpack(*algo);
    const cublasStatus_t status = emu::set_field(emu::field_of(x, attribute), value, bytes);
    if (status == CUBLAS_STATUS_SUCCESS) *algo = emu::pack(x);
    return status;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                                     cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                     cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                                     int wanted, cublasLtMatmulHeuristicResult_t results[], int* returned) {
    EMU_CALLED();
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!preference || wanted <= 0 || !results || !returned) return CUBLAS_STATUS_INVALID_VALUE;
    *returned = 0;
    emu::Product p = {op, a, b, c, d, 0, 0, 0, 0, 0};
    const cublasStatus_t status = emu::describe(p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (preference->search_mode != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    uint32_t alignment = 256;
    for (const uint32_t bytes : preference->alignment) alignment = std::min(alignment, bytes);
    for (const emu::Algorithm& x : emu::algorithms(p)) {
        const size_t workspace = x.workspace_bytes(p);
        if (*returned == wanted) break;
        if (x.alignment > alignment || workspace > preference->workspace_bytes) continue;
        if (x.scheme && !(x.scheme & preference->reduction_mask)) continue;
        results[(*returned)++] = {emu::pack(x), workspace, CUBLAS_STATUS_SUCCESS, 1.0f, {}};
    }
    return *returned ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result) {
    EMU_CALLED();
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!algo || !result) return CUBLAS_STATUS_INVALID_VALUE;
    emu::Product p = {op, a, b, c, d, 0, 0, 0, 0, 0};
    cublasStatus_t status = emu::describe(p);
    const emu::Algorithm x = emu::unpack(*algo);
    if (status == CUBLAS_STATUS_SUCCESS) status = emu::check_algorithm(p, x);
    if (status == CUBLAS_STATUS_SUCCESS) {
        result->workspaceSize = x.workspace_bytes(p);
        result->wavesCount = 1;
    }
    return result->state = status;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t op, const void* alpha, const void* A,
                                     cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                                     const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                                     const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes,
                                     cudaStream_t stream) {
    EMU_CALLED();
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!alpha || !beta || !A || !B || !D) return CUBLAS_STATUS_INVALID_VALUE;
    emu::Product p = {op, a, b, c, d, 0, 0, 0, 0, 0};
    cublasStatus_t status = emu::describe(p);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const bool factors_on_device = op->pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;  // not known yet
    emu::Operands x = {A, B, C, D, workspace, 1, 0};
    if (factors_on_device) {
        emu::expect_device_memory(alpha, 4, "alpha");
        emu::expect_device_memory(beta, 4, "beta");
    } else {
        x.alpha = *(const float*)alpha;
        x.beta = *(const float*)beta;
    }
    if (x.beta != 0 && !C) return CUBLAS_STATUS_INVALID_VALUE;
    if (C == D && c->ld != d->ld) return CUBLAS_STATUS_INVALID_VALUE;  // in place means the same layout

    // Without an algorithm the library chooses one that needs no workspace.
    emu::Algorithm algorithm;
    if (algo) algorithm = emu::unpack(*algo);
    else
        for (const emu::Algorithm& candidate : emu::algorithms(p))
            if (candidate.splits == 1) {
                algorithm = candidate;
                algorithm.check = candidate.checksum();
            }
    status = emu::check_algorithm(p, algorithm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const size_t needed = algorithm.workspace_bytes(p);
    if (needed > workspace_bytes || (needed && (!workspace || (uintptr_t)workspace % 256))) return CUBLAS_STATUS_INVALID_VALUE;
    if (needed) emu::expect_device_memory(workspace, workspace_bytes, "the workspace");

    const struct {
        const void* p;
        const cublasLtMatrixLayoutOpaque_t& layout;
        const char* name;
        bool used;
    } matrices[] = {{A, *a, "A", true}, {B, *b, "B", true}, {C, *c, "C", x.beta != 0}, {D, *d, "D", true}};
    for (const auto& matrix : matrices) {
        if (!matrix.used) continue;
        const size_t alignment = std::max<size_t>(algorithm.alignment, emu::bytes_of(matrix.layout.type));
        if ((uintptr_t)matrix.p % alignment) return CUBLAS_STATUS_INVALID_VALUE;
        emu::expect_matrix(matrix.p, matrix.layout, matrix.name);
    }
    if (p.has_bias() || p.sums_bias_gradient()) {
        const size_t element = emu::bytes_of(p.bias_type);
        if (!op->bias || (uintptr_t)op->bias % element) return CUBLAS_STATUS_INVALID_VALUE;
        for (int batch = 0; batch < d->batch_count; batch++)
            emu::expect_device_memory((const char*)op->bias + (int64_t)element * op->bias_batch_stride * batch,
                                      p.bias_length() * element, "the bias");
    }
    if (p.has_aux()) {
        cublasLtMatrixLayoutOpaque_t aux = *d;
        aux.type = (cudaDataType)p.aux_type;
        aux.ld = op->aux_ld;
        aux.batch_stride = op->aux_batch_stride;
        if (!op->aux || (uintptr_t)op->aux % 16) return CUBLAS_STATUS_INVALID_VALUE;
        emu::expect_matrix(op->aux, aux, "the auxiliary matrix");
    }
    for (const void* scalar :
         {(const void*)op->a_scale, (const void*)op->b_scale, (const void*)op->d_scale, (const void*)op->amax_d})
        if (scalar) emu::expect_device_memory(scalar, 4, "a scale");

    // The caller may change the product's description as soon as this returns.
    emu::streams().put(stream, [=, op = *op, a = *a, b = *b, c = *c, d = *d]() mutable {
        p.op = &op;
        p.a = &a;
        p.b = &b;
        p.c = &c;
        p.d = &d;
        if (factors_on_device) {
            x.alpha = *(const float*)alpha;
            x.beta = *(const float*)beta;
        }
        for (int batch = 0; batch < d.batch_count; batch++) emu::multiply(p, algorithm, x, batch);
        emu::streams().takes(emu::drawn_ms(p, algorithm));
    });
    return CUBLAS_STATUS_SUCCESS;
}
