// CuTe's layouts for llmc/gpu/hopper.cuh, printed line by line like our_facts.cu. Plain C++: nothing is launched, an
// address in shared memory is a number, and the two functions below replace driver and runtime.
#include <cstdint>
#include <cstdio>

// A shared address is the pointer's own value.
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
#include <cute/tensor.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>

#include "facts.h"

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void*,
                                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                           const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    print_map(type, rank, sizes, strides, box, steps, interleave, swizzle, fill);
    return CUDA_SUCCESS;
}
extern "C" cudaError_t cudaDriverGetVersion(int* version) { return *version = 13020, cudaSuccess; }

using namespace cute;
using bf16 = cute::bfloat16_t;

template <class Layout>
auto shared_tile(Layout layout) {
    return make_tensor(make_smem_ptr((bf16*)(uintptr_t)tile_address), layout);
}
template <SM90::GMMA::Major major, class Rows, class Tile>
void descriptors(const char* what, Tile tile, Rows rows, int first, int k_steps, bool far) {
    for (int k = 0; k < k_steps; k++)
        print_descriptor(
            what, first, k,
            SM90::GMMA::make_gmma_desc<major>(local_tile(tile, make_shape(rows, _16{}), make_coord(first / rows, k))).desc_,
            far);
}
template <class Tile>
void places(const char* what, Tile tile) {
    for (int row = 0; row < size<0>(tile); row++)
        for (int k = 0; k < size<1>(tile); k++) print_place(what, row, k, (unsigned)(uintptr_t)&tile(row, k));
}
template <class Layout>
void registers(const char* what, Layout layout, int values) {
    for (int thread = 0; thread < 128; thread++)
        for (int i = 0; i < values; i++) print_register(what, layout(thread, i) % 64, layout(thread, i) / 64, thread, i);
}

int main() {
    using namespace SM90::GMMA;
    const auto by_rows = shared_tile(tile_to_shape(Layout_K_SW128_Atom<bf16>{}, Shape<_128, _128>{}));
    descriptors<Major::K>("a by rows", by_rows, _64{}, 0, 8, false);
    descriptors<Major::K>("a by rows", by_rows, _64{}, 64, 8, false);
    descriptors<Major::K>("b by rows", by_rows, _128{}, 0, 8, false);
    places("by rows", by_rows);
    const auto by_columns_64 = shared_tile(tile_to_shape(Layout_MN_SW128_Atom<bf16>{}, Shape<_64, _64>{}, Step<_2, _1>{}));
    descriptors<Major::MN>("b by columns, N 64", by_columns_64, _64{}, 0, 4, false);
    places("by columns, N 64", by_columns_64);
    const auto by_columns_128 = shared_tile(tile_to_shape(Layout_MN_SW128_Atom<bf16>{}, Shape<_128, _64>{}, Step<_2, _1>{}));
    descriptors<Major::MN>("b by columns, N 128", by_columns_128, _128{}, 0, 4, true);
    places("by columns, N 128", by_columns_128);

    registers("d", MMA_Traits<MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::MN>>::CLayout{}, 32);
    registers("d of 128", MMA_Traits<MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>>::CLayout{}, 64);
    registers("a", MMA_Traits<MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::MN>>::ALayout{}, 8);

    const int token = heads * 64;
    const auto x = make_tensor(make_gmem_ptr((bf16*)0x10000),
                               make_layout(make_shape(T, 64, heads, B), make_stride(token, 1, 64, token * T)));
    make_tma_copy(SM90_TMA_LOAD{}, x, tile_to_shape(Layout_K_SW128_Atom<bf16>{}, Shape<_128, _64>{}));
    const auto y = make_tensor(make_gmem_ptr((bf16*)0x10000), make_layout(make_shape(T, token), make_stride(token, 1)));
    make_tma_copy(SM90_TMA_STORE{}, y, tile_to_shape(Layout_K_SW128_Atom<bf16>{}, Shape<_64, _64>{}));
    places("TMA load", shared_tile(tile_to_shape(Layout_K_SW128_Atom<bf16>{}, Shape<_64, _128>{})));
    places("TMA store", shared_tile(tile_to_shape(Layout_K_SW128_Atom<bf16>{}, Shape<_64, _128>{})));
}
