// The safetensors format: 8 bytes little-endian header length, a JSON header
//   {"name": {"dtype": "BF16", "shape": [r, c], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}
// then the tensors' bytes. A model may be split into several files, listed in model.safetensors.index.json.
// The reader maps files and does not trust them: lengths, offsets and shapes are checked before use; errors name the file.
// checkpoint.h writes such files; each rank writes its own part.
// https://huggingface.co/docs/safetensors
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "file.h"
#include "json.h"
#include "types.h"

inline std::string shape_string(const std::vector<int64_t>& shape) {
    std::string s = "[";
    for (size_t i = 0; i < shape.size(); i++) s += (i ? ", " : "") + std::to_string(shape[i]);
    return s + "]";
}

inline size_t dtype_bytes(const std::string& dtype) {
    static const std::map<std::string, size_t> sizes = {{"F64", 8},     {"I64", 8},     {"U64", 8},  {"F32", 4}, {"I32", 4},
                                                        {"U32", 4},     {"F16", 2},     {"BF16", 2}, {"I16", 2}, {"U16", 2},
                                                        {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I8", 1},   {"U8", 1},  {"BOOL", 1}};
    const auto found = sizes.find(dtype);
    return found == sizes.end() ? 0 : found->second;
}

// Float to IEEE half, to the nearest, ties to even; numbers above the range become infinite.
inline uint16_t float_to_half(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);   // NaN
    if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // 65520 and above
    const uint32_t exponent = std::max(size >> 23, 113u);        // of the half's unit in the last place, plus 10 + 127
    const uint32_t mantissa = (size & 0x7fffffu) | (size >> 23 ? 1u << 23 : 0);
    const uint32_t shift = 13 + (exponent - std::max(size >> 23, 1u));
    if (shift > 24) return (uint16_t)sign;
    const uint32_t kept = mantissa >> shift, lost = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    const uint32_t rounded = kept + (lost > half || (lost == half && (kept & 1)));
    // The mantissa's leading one, if it is kept, adds one to the exponent.
    return (uint16_t)(sign | (((exponent - 113) << 10) + rounded));
}

struct TensorView {
    std::string dtype;
    std::vector<int64_t> shape;
    const char* data = nullptr;
    size_t bytes = 0;
    std::function<void(size_t first, size_t n, float* to)> decode;  // of a tensor that is stored as codes; empty: it is not
    size_t elements() const {
        size_t n = 1;
        for (const int64_t size : shape) n *= (size_t)size;
        return n;
    }
};

// MXFP4 (Open Compute Project, 2023): blocks of 32 numbers, each a code of 4 bits (sign, exponent, mantissa: e2m1), two to a
// byte, the lower bits first, times a power of two that the block shares, 2^(scale - 127); 255 is NaN.
inline float mxfp4_number(const char* codes, const char* scales, size_t i) {
    static const float magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int code = (uint8_t)codes[i / 2] >> (i % 2 * 4) & 15, scale = (uint8_t)scales[i / 32];
    const uint32_t bits = scale == 255 ? 0x7fc00000u : scale == 0 ? 1u << 22 : (uint32_t)scale << 23;  // 2^-127 is subnormal
    float power;
    memcpy(&power, &bits, sizeof power);
    const float x = magnitudes[code & 7] * power;
    return code & 8 ? -x : x;
}
// A tensor of these from two: `blocks` (..., n / 32, 16) bytes, and a scale for each block.
inline TensorView mxfp4_tensor(const TensorView& blocks, const TensorView& scales) {
    TensorView t = blocks;
    t.dtype = "MXFP4";
    t.decode = [codes = blocks.data, powers = scales.data](size_t first, size_t n, float* to) {
        for (size_t i = 0; i < n; i++) to[i] = mxfp4_number(codes, powers, first + i);
    };
    t.shape.pop_back();
    t.shape.back() *= 32;
    return t;
}
inline bool are_mxfp4(const TensorView& blocks, const TensorView& scales) {
    std::vector<int64_t> shape = scales.shape;
    shape.push_back(16);
    return blocks.dtype == "U8" && scales.dtype == "U8" && blocks.shape == shape && shape.size() > 1;
}

class SafetensorsReader {
public:
    // Opens a .safetensors file, or all its shards if there is an index next to it; or a directory with model.safetensors or
    // else its index.
    static SafetensorsReader open(const std::string& path) {
        namespace fs = std::filesystem;
        SafetensorsReader reader;
        if (!is_folder(path)) {
            if (!file_exists(path) && file_exists(path + ".index.json"))
                reader.add_indexed(fs::path(path).parent_path().string(), path + ".index.json");
            else reader.add_file(path);
        } else if (const std::string single = path + "/model.safetensors"; file_exists(single)) {
            reader.add_file(single);
        } else if (const std::string index = path + "/model.safetensors.index.json"; file_exists(index)) {
            reader.add_indexed(path, index);
        } else {
            refuse_other_weights(path);
            fail("%s holds neither model.safetensors nor model.safetensors.index.json; HINT: download or copy it again",
                 path.c_str());
        }
        return reader;
    }

    const TensorView* find(const std::string& name) const {
        const auto found = tensors_.find(name);
        return found == tensors_.end() ? nullptr : &found->second;
    }
    const std::unordered_map<std::string, TensorView>& tensors() const { return tensors_; }

    // dst[i] = element first + i, converted, for i < n_elements. Tensors may be at unaligned addresses, so elements are copied.
    template <class E>
    void read_as(const TensorView& t, size_t first, size_t n_elements, E* dst) const {
        CHECK(first + n_elements <= t.elements(), "elements %zu to %zu of %zu", first, first + n_elements, t.elements());
        if (t.decode) {
            constexpr size_t piece = 4096;
            const int64_t pieces = (int64_t)((n_elements + piece - 1) / piece);
#pragma omp parallel for schedule(static) if (pieces > 8)
            for (int64_t p = 0; p < pieces; p++) {
                float numbers[piece];
                const size_t begin = (size_t)p * piece, n = std::min(piece, n_elements - begin);
                t.decode(first + begin, n, numbers);
                for (size_t i = 0; i < n; i++) dst[begin + i] = (E)numbers[i];
            }
            return;
        }
        const auto each = [&](auto zero, auto convert) {
            using S = decltype(zero);
            const int64_t n = (int64_t)n_elements;
            const char* from = t.data + first * sizeof(S);
#pragma omp parallel for schedule(static) if (n > 1 << 15)
            for (int64_t i = 0; i < n; i++) {
                S x;
                memcpy(&x, from + i * sizeof(S), sizeof(S));
                dst[i] = (E)convert(x);
            }
        };
        if (t.dtype == "F32") each(float(), [](float x) { return x; });
        else if (t.dtype == "BF16") each(bf16(), [](bf16 x) { return (float)x; });
        else if (t.dtype == "F16") each(uint16_t(), [](uint16_t x) { return half_to_float(x); });
        else if (t.dtype == "F64") each(double(), [](double x) { return x; });
        else if (t.dtype == "I32") each(int32_t(), [](int32_t x) { return x; });
        else if (t.dtype == "I64") each(int64_t(), [](int64_t x) { return x; });
        else fail("tensors of type %s cannot be read as numbers; supported are F64, F32, F16, BF16, I64, I32", t.dtype.c_str());
    }
    template <class E>
    void read_as(const TensorView& t, E* dst) const {
        read_as(t, 0, t.elements(), dst);
    }

private:
    // Rejects a directory whose weights are pickles of PyTorch: unpickling can run any code.
    static void refuse_other_weights(const std::string& dir) {
        for (const std::string& name : names_in(dir)) {
            const std::string ending = std::filesystem::path(name).extension().string();
            const bool pickle =
                ending == ".pth" || ending == ".pt" || (ending == ".bin" && name.compare(0, 13, "pytorch_model") == 0);
            if (!pickle) continue;
            fail_unsupported(
                "%s holds its weights as a pickle of PyTorch, %s, which is not supported; HINT: python3 -c "
                "\"import transformers as t; t.AutoModelForCausalLM.from_pretrained('%s', torch_dtype='auto')"
                ".save_pretrained('%s-safetensors')\"; cp %s/*token* %s-safetensors",
                dir.c_str(), name.c_str(), dir.c_str(), dir.c_str(), dir.c_str(), dir.c_str());
        }
    }
    void add_indexed(const std::string& dir, const std::string& index) {
        std::map<std::string, bool> files;
        try {
            const nlohmann::json j = parse_json(read_whole_file(index), index);
            for (const auto& [tensor, file] : j.at("weight_map").items()) {
                const std::string name = file.get<std::string>();
                files[inside(dir, name, index)] = true;
            }
        } catch (const nlohmann::json::exception& e) {
            fail("%s is not a valid index: %s", index.c_str(), json_problem(e).c_str());
        }
        for (const auto& [path, unused] : files) {
            if (!file_exists(path))
                fail("%s names %s, which does not exist; HINT: download or copy it again", index.c_str(), path.c_str());
            add_file(path);
        }
    }

    void add_file(const std::string& path) {
        const MappedFile& file = *files_.emplace_back(std::make_unique<MappedFile>(path));
        const char* name = path.c_str();
        uint64_t length = 0;
        if (file.size() < 8)
            fail("%s has %zu bytes; a safetensors file has at least 8; HINT: download or copy it again", name, file.size());
        memcpy(&length, file.data(), 8);
        if (length > file.size() - 8 || length > 100000000)
            fail(
                "%s: the header claims %llu bytes, the file has %zu: truncated or not a safetensors file; HINT: download or "
                "copy it again",
                name, (unsigned long long)length, file.size());
        const size_t data_bytes = file.size() - 8 - length;
        const char* data = file.data() + 8 + length;
        try {
            const auto header = parse_json({file.data() + 8, length}, path + ": the header");
            if (!header.is_object()) fail("%s: the header is not a JSON object", name);
            std::map<uint64_t, std::pair<uint64_t, std::string>> ranges;  // start -> end, name: to find gaps and overlaps
            for (const auto& [key, entry] : header.items()) {
                if (key == "__metadata__") continue;
                TensorView t;
                t.dtype = entry.at("dtype").get<std::string>();
                const size_t element = dtype_bytes(t.dtype);
                if (!element) fail("%s: tensor '%s' has the unknown type '%s'", name, key.c_str(), t.dtype.c_str());
                uint64_t bytes = element;
                const auto& shape = entry.at("shape");
                if (!shape.is_array()) fail("%s: tensor '%s' has a malformed shape", name, key.c_str());
                for (const auto& dim : shape) {
                    if (!dim.is_number_unsigned()) fail("%s: tensor '%s' has a malformed shape", name, key.c_str());
                    const uint64_t d = dim.get<uint64_t>();
                    if (d > file.size() || __builtin_mul_overflow(bytes, d, &bytes))
                        fail("%s: the shape of tensor '%s' is larger than the file", name, key.c_str());
                    t.shape.push_back((int64_t)d);
                }
                const auto& offsets = entry.at("data_offsets");
                if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
                    !offsets[1].is_number_unsigned())
                    fail("%s: tensor '%s' has malformed data_offsets", name, key.c_str());
                const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
                if (begin > end || end > data_bytes)
                    fail(
                        "%s: tensor '%s' ends at byte %llu of %zu: the file is truncated or damaged; HINT: download or copy it "
                        "again",
                        name, key.c_str(), (unsigned long long)end, data_bytes);
                if (end - begin != bytes)
                    fail("%s: tensor '%s' has %llu bytes where its shape and type need %llu", name, key.c_str(),
                         (unsigned long long)(end - begin), (unsigned long long)bytes);
                t.data = data + begin;
                t.bytes = bytes;
                if (bytes > 0 && !ranges.emplace(begin, std::make_pair(end, key)).second)
                    fail("%s: tensor '%s' overlaps another", name, key.c_str());
                if (!tensors_.emplace(key, t).second) fail("%s: tensor '%s' occurs twice", name, key.c_str());
            }
            uint64_t last = 0;
            for (const auto& [begin, range] : ranges) {
                if (begin < last) fail("%s: tensor '%s' overlaps another", name, range.second.c_str());
                if (begin > last)
                    fail("%s: %llu bytes before tensor '%s' belong to no tensor: damaged", name,
                         (unsigned long long)(begin - last), range.second.c_str());
                last = range.first;
            }
            if (last < data_bytes)
                fail("%s: %zu bytes at its end belong to no tensor: damaged", name, (size_t)(data_bytes - last));
        } catch (const nlohmann::json::exception& e) {
            fail("%s: the header is not valid: %s", name, json_problem(e).c_str());
        }
    }

    std::vector<std::unique_ptr<MappedFile>> files_;
    std::unordered_map<std::string, TensorView> tensors_;
};

// The bytes before the data of a file with this header.
inline std::string safetensors_start(const nlohmann::ordered_json& header) {
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that data starts at a multiple of 8
    const uint64_t length = text.size();
    return std::string((const char*)&length, 8) + text;
}
