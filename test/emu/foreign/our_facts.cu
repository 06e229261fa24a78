// The layouts of cute_facts.cpp from llmc/gpu/hopper.cuh and the emulator, line by line: descriptors and tensor maps from
// our kernels' functions; where the emulated wgmma reads its operands for these descriptors; its register layout; the
// addresses of the emulated copy engine's loads and stores.
#include <cuda.h>

#include "facts.h"

inline bool print_maps = false;
#define cudaGetDriverEntryPointByVersion(name, function, ...) printing_encoder(function, __VA_ARGS__)
inline cudaError_t printing_encoder(void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    *function =
        (void*)+[](CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                   const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
            if (print_maps) print_map(type, rank, sizes, strides, box, steps, interleave, swizzle, fill);
            return cuTensorMapEncodeTiled(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion,
                                          fill);
        };
    return *found = cudaDriverEntryPointSuccess, cudaSuccess;
}
#include "../../../llmc/gpu/attention_hopper_backward.cuh"

using namespace gpu::hopper;
using emu::MatrixDescriptor;

void descriptors(const char* what, uint64_t matrix, int first, int k_steps, unsigned step_bytes, unsigned slab_bytes,
                 bool far) {
    for (int k = 0; k < k_steps; k++)
        print_descriptor(what, first, k,
                         advanced(matrix, slab_bytes ? k / 4 * slab_bytes + k % 4 * step_bytes : k * step_bytes), far);
}
template <class F>
void places(const char* what, int rows, int columns, F at) {
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) print_place(what, row, column, at(row, column));
}
void registers(const char* what, int columns) {
    struct Element {
        int row, column;
    };
    for (int thread = 0; thread < 128; thread++) {
        std::vector<Element> elements(columns / 2);
        emu::each_register(thread, columns, [&](int row, int column, int i) { elements[i] = {row, column}; });
        for (int i = 0; i < columns / 2; i++) print_register(what, elements[i].row, elements[i].column, thread, i);
    }
}

void kernel(const CUtensorMap& load_map, const CUtensorMap& store_map) {
    constexpr unsigned slab_bytes = 128 * 128;
    unsigned char* const tile = emu::block().shared + (tile_address - emu::shared_base);
    const auto by_rows = [&](int first) { return matrix_descriptor(tile + first * 128, 0); };
    descriptors("a by rows", by_rows(0), 0, 8, 32, slab_bytes, false);
    descriptors("a by rows", by_rows(64), 64, 8, 32, slab_bytes, false);
    descriptors("b by rows", by_rows(0), 0, 8, 32, slab_bytes, false);
    places("by rows", 128, 128, [&](int row, int k) {
        const uint64_t matrix = advanced(by_rows(0), k / 64 * slab_bytes + k % 64 / 16 * 32);
        return MatrixDescriptor(matrix, EMU_HERE).by_rows(row, k % 16);
    });
    const uint64_t by_columns = matrix_descriptor(tile, 64 * 128);
    for (const int N : {64, 128}) {
        const std::string name = "by columns, N " + std::to_string(N);
        descriptors(("b " + name).c_str(), by_columns, 0, 4, 16 * 128, 0, N > 64);
        places(name.c_str(), N, 64, [&](int n, int k) {
            return MatrixDescriptor(advanced(by_columns, k / 16 * 16 * 128), EMU_HERE).by_columns(n, k % 16);
        });
    }
    registers("d", 64);
    registers("d of 128", 128);
    registers("a", 16);

    // The copied tensors have a distinct number in each position.
    const int n = 64 * 128;
    uint64_t* const barrier = (uint64_t*)emu::block().shared;
    uint16_t* const elements = (uint16_t*)tile;
    unsigned address[64][128];
    mbarrier_init(barrier, 1);
    mbarrier_arrive_expect(barrier, n * sizeof(uint16_t));
    tma_load(tile, load_map, barrier, 0, 0, 0, 0);
    mbarrier_wait(barrier, 0);
    for (int i = 0; i < n; i++) address[elements[i] / 128][elements[i] % 128] = tile_address + i * 2;
    places("TMA load", 64, 128, [&](int row, int k) { return address[row][k]; });
    for (int i = 0; i < n; i++) elements[i] = (uint16_t)i;
    fence_proxy_async();
    tma_store(store_map, tile, 0, 0, 0, 0);
    tma_store_commit();
    tma_store_wait<0>();
}

int main() {
    std::vector<uint16_t> from(64 * 128), to(64 * 128, 0xffff);
    for (size_t i = 0; i < from.size(); i++) from[i] = (uint16_t)i;
    const CUtensorMap load_map = head_map((const bf16*)from.data(), 1, 64, 1, 128, 64, 2);
    const CUtensorMap store_map = head_map((const bf16*)to.data(), 1, 64, 1, 128, 64, 2);
    emu::launch(dim3(1), dim3(1), 64 << 10, "kernel", [&] { kernel(load_map, store_map); });
    places("TMA store", 64, 128, [&](int row, int k) { return tile_address + to[row * 128 + k] * 2; });
    print_maps = true;
    head_map((const bf16*)0x10000, B, T, heads, 64, 128, 1);
    tensor_map<2>((const bf16*)0x10000, {heads * 64, T}, {heads * 64 * sizeof(bf16)}, {64, 64});
}
