// Matrices of a model in 4 bits, as bitsandbytes and transformers save them (`load_in_4bit`; QLoRA, Dettmers et al., 2023):
//   NAME                            codes, two to a byte, the first in the upper half
//   NAME.quant_map                  16 levels (fp32): NF4's or FP4's
//   NAME.absmax                     the factor of each block: fp32 or, with double quantization, a byte for
//                                   nested_quant_map[byte] * nested_absmax[block / nested_blocksize] + nested_offset
//   NAME.quant_state.bitsandbytes__nf4 or __fp4    a JSON text with the matrix's shape and the sizes of blocks
// A number is quant_map[code] * factor in fp32; bitsandbytes rounds it to the type in the JSON text. Encoded in `nf4` again
// (quantize.h) a matrix gets the same codes and factors: each block has a code of 1 or -1, its largest magnitude.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/json.h"
#include "../base/safetensors.h"

inline constexpr const char* bitsandbytes_state = ".quant_state.bitsandbytes__";

// The matrix; its decode() reads the file. part(ending): the tensor NAME + ending. what: for errors.
template <class Part>
TensorView bitsandbytes_tensor(const TensorView& state, Part part, const std::string& what) {
    struct Codes {
        const char *codes, *levels, *factors, *nested_factors, *nested_levels;
        size_t block, nested_block;
        float offset;

        static float number(const char* numbers, size_t i) {
            float x;
            memcpy(&x, numbers + i * sizeof x, sizeof x);
            return x;
        }
        void operator()(size_t first, size_t n, float* to) const {
            for (size_t i = 0; i < n; i++) to[i] = element(first + i);
        }
        float element(size_t i) const {
            const size_t code = (uint8_t)codes[i / 2] >> (i % 2 ? 0 : 4) & 15, b = i / block;
            if (!nested_block) return number(levels, code) * number(factors, b);
            // Rounded before the offset is added, as PyTorch does; the compiler must not fuse the two.
            const double factor =
                (double)number(nested_levels, (uint8_t)factors[b]) * (double)number(nested_factors, b / nested_block);
            return number(levels, code) * ((float)factor + offset);
        }
    };
    const auto require = [&](bool good, const char* which) {
        if (!good) fail("%s: its %s is not what bitsandbytes writes; HINT: download or copy it again", what.c_str(), which);
    };
    const auto data = [&](const char* ending, const char* dtype, size_t n) {
        const TensorView& t = part(ending);
        require(t.dtype == dtype && t.elements() == n, ending + 1);
        return t.data;
    };
    const char* const name_of_state = "quant_state";
    const nlohmann::json j = parse_json({state.data, state.bytes}, what + ": its quant_state");
    require(j.is_object(), name_of_state);
    const auto size = [&](const nlohmann::json& from, uint64_t most) {
        require(from.is_number_unsigned() && from.get<uint64_t>() > 0 && from.get<uint64_t>() <= most, name_of_state);
        return (size_t)from.get<uint64_t>();
    };
    const auto key = [&](const char* k) { return j.value(k, nlohmann::json()); };
    const nlohmann::json shape = key("shape");
    require(shape.is_array() && shape.size() == 2, name_of_state);
    TensorView t = part("");  // of any type: bnb_4bit_quant_storage
    t.shape = {(int64_t)size(shape[0], INT32_MAX), (int64_t)size(shape[1], INT32_MAX)};
    t.dtype = "bitsandbytes";
    const size_t n = t.elements();
    require(t.bytes == (n + 1) / 2, "size");
    Codes c = {};
    c.codes = t.data;
    c.block = size(key("blocksize"), 1 << 20);
    const size_t blocks = (n + c.block - 1) / c.block;
    c.levels = data(".quant_map", "F32", 16);
    const bool nested = j.contains("nested_blocksize");
    c.factors = data(".absmax", nested ? "U8" : "F32", blocks);
    if (nested) {
        c.nested_block = size(key("nested_blocksize"), 1 << 20);
        c.nested_factors = data(".nested_absmax", "F32", (blocks + c.nested_block - 1) / c.nested_block);
        c.nested_levels = data(".nested_quant_map", "F32", 256);
        require(key("nested_offset").is_number(), name_of_state);
        c.offset = key("nested_offset").template get<float>();
    }
    t.decode = c;
    return t;
}
