// The driver's tensor maps on the CPU, as far as llmc/gpu/hopper.cuh uses them. A tensor map describes an array in global
// memory and a box that the copy engine moves between it and shared memory. On a GPU its 128 bytes are opaque; here they hold a
// emu::TensorMap. cuTensorMapEncodeTiled enforces the limits in the driver's documentation.
#pragma once
#include <cuda_runtime.h>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_UINT16,
    CU_TENSOR_MAP_DATA_TYPE_UINT32,
    CU_TENSOR_MAP_DATA_TYPE_INT32,
    CU_TENSOR_MAP_DATA_TYPE_UINT64,
    CU_TENSOR_MAP_DATA_TYPE_INT64,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B,
};
enum CUtensorMapL2promotion {
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
    CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

struct alignas(16) CUtensorMap {  // at least 64 on a GPU; g++ would warn about such parameters
    cuuint64_t opaque[16];
};

namespace emu {

struct TensorMap {
    static constexpr uint32_t written = 0x744d6170;
    unsigned char* address;
    uint64_t stride[4];      // bytes, of dimensions 1 ..; dimension 0 is contiguous
    uint32_t last_index[5];  // size - 1, as a size may be 2^32
    uint16_t box[5];
    uint16_t element_bytes;
    uint16_t swizzle_bytes;  // 0, 32, 64, 128
    uint16_t rank;
    uint32_t mark;  // == written
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a tensor map has 128 bytes");

inline unsigned element_bytes(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32:
        case CU_TENSOR_MAP_DATA_TYPE_INT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
        default: return 8;
    }
}

}  // namespace emu

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    EMU_CALLED();
    emu::TensorMap m{};
    m.address = (unsigned char*)address;
    m.rank = (uint16_t)rank;
    m.mark = emu::TensorMap::written;
    m.element_bytes = (uint16_t)emu::element_bytes(type);
    m.swizzle_bytes = (uint16_t)(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle);
    bool good = rank >= 1 && rank <= 5 && (uintptr_t)address % 16 == 0 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
    for (unsigned d = 0; good && d < rank; d++) {
        good = sizes[d] >= 1 && sizes[d] <= (uint64_t)1 << 32 && box[d] >= 1 && box[d] <= 256 && element_strides[d] == 1;
        m.last_index[d] = (uint32_t)(sizes[d] - 1);
        m.box[d] = (uint16_t)box[d];
        if (d > 0) {
            good = good && strides[d - 1] % 16 == 0 && strides[d - 1] < (uint64_t)1 << 40;
            m.stride[d - 1] = strides[d - 1];
        }
    }
    const unsigned inner_bytes = m.box[0] * m.element_bytes;
    good = good && inner_bytes % 16 == 0 && (!m.swizzle_bytes || inner_bytes <= m.swizzle_bytes);
    if (!good) return CUDA_ERROR_INVALID_VALUE;
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

// The runtime finds the driver's functions by name, so that programs need not be linked with the driver's library.
enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2,
};
constexpr unsigned long long cudaEnableDefault = 0;
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    const bool found = !strcmp(name, "cuTensorMapEncodeTiled");
    *function = found ? (void*)cuTensorMapEncodeTiled : nullptr;
    *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
