// The GGUF format of llama.cpp, versions 2 and 3, little-endian: "GGUF", the version, the numbers of tensors and of metadata
// values, then
//   metadata   key, type, value, each; strings and lists are prefixed with their length
//   tensors    name, sizes (the fastest dimension first), type, offset of its bytes
//   data       the tensors' bytes, in the same order, each aligned to general.alignment (32)
// A tensor stores plain numbers or blocks: 32 or 256 neighbors of a row share a scale. See quantized.h for the formulas; the
// results of decoding equal those from llama.cpp's package gguf bit by bit, and so does quantization to Q8_0.
//   GgufReader   maps a file and does not trust it: counts, lengths, types and offsets are checked before use; errors name the
//                place in the file
//   GgufHeader   everything before the data of a file to be written
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/check.h"
#include "../base/enum_table.h"
#include "../base/file.h"
#include "../base/safetensors.h"
#include "../base/types.h"
#include "../quantized.h"
#include "k_quants.h"

// ---- types of tensors ------------------------------------------------------------------------------------------------------
enum class GgufType : uint32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    BF16 = 30,
    MXFP4 = 39
};

struct GgufTypeRow {
    const char* name;
    uint32_t id;
    size_t elements, bytes;                    // of a block; 0: reading is not supported
    WeightFormat format = WeightFormat::none;  // of quantized weights with these blocks
};
inline constexpr GgufTypeRow gguf_type_rows[] = {{"F32", 0, 1, 4},
                                                 {"F16", 1, 1, 2},
                                                 {"BF16", 30, 1, 2},
                                                 {"Q8_0", 8, 32, 34, WeightFormat::q8_0},
                                                 {"Q4_0", 2, 32, 18, WeightFormat::q4_0},
                                                 {"Q4_1", 3, 32, 20, WeightFormat::q4_1},
                                                 {"Q5_0", 6, 32, 22, WeightFormat::q5_0},
                                                 {"Q5_1", 7, 32, 24, WeightFormat::q5_1},
                                                 {"Q4_K", 12, 256, 144, WeightFormat::q4_k},
                                                 {"Q5_K", 13, 256, 176, WeightFormat::q5_k},
                                                 {"Q6_K", 14, 256, 210, WeightFormat::q6_k},
                                                 {"Q8_1", 9, 0, 0},
                                                 {"Q2_K", 10, 0, 0},
                                                 {"Q3_K", 11, 0, 0},
                                                 {"Q8_K", 15, 0, 0},
                                                 {"IQ2_XXS", 16, 0, 0},
                                                 {"IQ2_XS", 17, 0, 0},
                                                 {"IQ3_XXS", 18, 0, 0},
                                                 {"IQ1_S", 19, 0, 0},
                                                 {"IQ4_NL", 20, 0, 0},
                                                 {"IQ3_S", 21, 0, 0},
                                                 {"IQ2_S", 22, 0, 0},
                                                 {"IQ4_XS", 23, 0, 0},
                                                 {"I8", 24, 0, 0},
                                                 {"I16", 25, 0, 0},
                                                 {"I32", 26, 0, 0},
                                                 {"I64", 27, 0, 0},
                                                 {"F64", 28, 0, 0},
                                                 {"IQ1_M", 29, 0, 0},
                                                 {"TQ1_0", 34, 0, 0},
                                                 {"TQ2_0", 35, 0, 0},
                                                 {"MXFP4", 39, 32, 17}};
constexpr const auto& gguf_types() { return gguf_type_rows; }
// Null for an unknown type.
constexpr const GgufTypeRow* find_gguf_type(uint32_t id) {
    for (const GgufTypeRow& row : gguf_type_rows)
        if (row.id == id) return &row;
    return nullptr;
}
inline const GgufTypeRow& gguf_type(GgufType type) { return *find_gguf_type((uint32_t)type); }
template <size_t... id>
constexpr bool gguf_types_have_rows(std::index_sequence<id...>) {
    return ((!detail::has_name<(GgufType)id>() || find_gguf_type(id)) && ...);
}
static_assert(gguf_types_have_rows(std::make_index_sequence<64>()), "every value of GgufType has a row");
constexpr bool blocks_agree() {
    for (const GgufTypeRow& row : gguf_type_rows)
        if (const WeightFormatRow& format = weight_format_row(row.format); row.format != WeightFormat::none)
            if (row.elements != format.block || row.bytes != format.code_bytes) return false;
    return true;
}
static_assert(blocks_agree());
// The type with a format's blocks.
inline GgufType gguf_type_of(WeightFormat format) {
    for (const GgufTypeRow& row : gguf_type_rows)
        if (row.format == format && format != WeightFormat::none) return (GgufType)row.id;
    fail("GGUF has no type %s", weight_format_row(format).word);
}

// ---- blocks ----------------------------------------------------------------------------------------------------------------
namespace detail {

inline float half_at(const uint8_t* bytes) {
    uint16_t half;
    memcpy(&half, bytes, 2);
    return half_to_float(half);
}

inline void dequantize_block(GgufType type, const uint8_t* b, float* out) {
    if (type == GgufType::F32) memcpy(out, b, 4);
    if (type == GgufType::F16) *out = half_at(b);
    if (type == GgufType::BF16) {
        const uint32_t bits = (uint32_t)(b[0] | b[1] << 8) << 16;
        memcpy(out, &bits, 4);
    }
    // The scale first; then 16 bytes, of which the lower halves are the first 16 codes. Adding 0 makes -0 a 0, as in gguf.
    for (size_t i = 0; type == GgufType::MXFP4 && i < 32; i++) {
        const char code = (char)(b[1 + i % 16] >> i / 16 * 4 & 15);
        out[i] = mxfp4_number(&code, (const char*)b, 0) + 0.0f;
    }
    const WeightFormat format = gguf_type(type).format;
    visit_gguf_format(format, [&](auto f) {
        for (size_t first = 0; first < weight_format_row(f()).block; first += 8) decode_eight<f()>(out + first, b, (int)first);
    });
}

}  // namespace detail

// Decodes consecutive blocks of a type to numbers.
inline void dequantize(GgufType type, const char* blocks, size_t n_blocks, float* out) {
    const GgufTypeRow& row = gguf_type(type);
#pragma omp parallel for schedule(static) if (n_blocks * row.elements > 1 << 15)
    for (size_t i = 0; i < n_blocks; i++)
        detail::dequantize_block(type, (const uint8_t*)blocks + i * row.bytes, out + i * row.elements);
}

namespace detail {

// A block of Q8_0: d = max|x| / 127 in fp16, then round(x / d).
inline bool quantize_q8_0(const float* x, uint8_t* out) {
    bool fits = true;
    float most = 0;
    for (int j = 0; j < 32; j++) {
        fits &= std::isfinite(x[j]);
        most = std::max(most, std::fabs(x[j]));
    }
    const float d = most / 127, inverse = d == 0 ? 0 : 1 / d;
    const uint16_t half = float_to_half(d);
    fits &= (half & 0x7c00) != 0x7c00;
    memcpy(out, &half, 2);
    for (int j = 0; j < 32 && fits; j++) out[2 + j] = (uint8_t)(int8_t)std::round(x[j] * inverse);
    return fits;
}

inline bool quantize_block(GgufType type, const float* x, uint8_t* out) {
    switch (type) {
        case GgufType::Q8_0: return quantize_q8_0(x, out);
        case GgufType::Q4_K: return quantize_q4_k(x, out);
        case GgufType::Q5_K: return quantize_q5_k(x, out);
        case GgufType::Q6_K: return quantize_q6_k(x, out);
        case GgufType::F32: memcpy(out, x, 4); return std::isfinite(*x);
        case GgufType::F16: {
            const uint16_t half = float_to_half(*x);
            memcpy(out, &half, 2);
            return (half & 0x7c00) != 0x7c00;
        }
        case GgufType::BF16: {
            const bf16 rounded(*x);
            memcpy(out, &rounded, 2);
            return std::isfinite((float)rounded);
        }
        default: fail("writing GGUF's type %s is not supported", gguf_type(type).name);
    }
}

}  // namespace detail

// Encodes n numbers as a type that can be written. Returns false if a number is not finite, or too large for the type.
inline bool quantize(GgufType type, const float* x, size_t n, char* out) {
    const GgufTypeRow& row = gguf_type(type);
    bool fits = true;
#pragma omp parallel for schedule(static) reduction(&& : fits) if (n > 1 << 15)
    for (size_t i = 0; i < n / row.elements; i++)
        fits = detail::quantize_block(type, x + i * row.elements, (uint8_t*)out + i * row.bytes) && fits;
    return fits;
}

// ---- reading ---------------------------------------------------------------------------------------------------------------
struct GgufTensor {
    std::string name;
    GgufType type = GgufType::F32;
    std::vector<int64_t> shape;  // slowest dimension first
    const char* data = nullptr;
    size_t elements = 0;
};

class GgufReader {
public:
    explicit GgufReader(const std::string& path) : file_(path), data_(file_.data()), size_(file_.size()) {
        if (size_ < 24 || std::string_view(data_, 4) != "GGUF")
            fail("%s is not a GGUF file; HINT: give a file of llama.cpp, or download it again", path.c_str());
        at_ = 4;
        const auto version = number<uint32_t>();
        if (version && (version & 0xffff) == 0)
            fail_unsupported(
                "%s is big-endian; only little-endian files are supported; HINT: pip install gguf; "
                "gguf-convert-endian %s little",
                path.c_str(), path.c_str());
        if (version == 1 || (version > 3 && version < 100))
            fail_unsupported(
                "%s has version %u of the format; supported are 2 and 3; HINT: llama-quantize --allow-requantize %s OUT.gguf "
                "Q8_0, of a llama.cpp that reads it, writes version 3",
                path.c_str(), version, path.c_str());
        if (version != 2 && version != 3) refuse(format("version %u is unknown", version));
        // The smallest tensor and value occupy this many bytes.
        const uint64_t n_tensors = count(8 + 4 + 8 + 4 + 8, "tensors"), n_values = count(8 + 4 + 1, "values");
        for (uint64_t i = 0; i < n_values; i++) {
            const size_t place = at_;
            const std::string key(text());
            nlohmann::json read = value(number<uint32_t>(), key);
            if (!metadata_.emplace(key, std::move(read)).second) refuse("the key '" + key + "' occurs twice", place);
        }
        read_tensors(n_tensors);
    }

    const std::string& path() const { return file_.path(); }
    const std::vector<GgufTensor>& tensors() const { return tensors_; }
    const GgufTensor* find(const std::string& name) const {
        const auto found = by_name_.find(name);
        return found == by_name_.end() ? nullptr : &tensors_[found->second];
    }
    const nlohmann::json& metadata() const { return metadata_; }  // an object of all values

    // All elements of a tensor as numbers.
    void read(const GgufTensor& t, float* out) const {
        dequantize(t.type, t.data, t.elements / gguf_type(t.type).elements, out);
    }

private:
    [[noreturn]] void refuse(const std::string& what, size_t place) const {
        fail("%s: %s (at byte %zu of %zu): it is damaged, or not for this program; HINT: download or copy it again",
             path().c_str(), printable(what).c_str(), place, size_);
    }
    [[noreturn]] void refuse(const std::string& what) const { refuse(what, at_); }

    std::string_view take(uint64_t bytes) {
        if (bytes > size_ - at_)
            refuse(format("%llu bytes are declared, %zu are left", (unsigned long long)bytes, size_ - at_));
        at_ += bytes;
        return {data_ + at_ - bytes, (size_t)bytes};
    }
    template <class N>
    N number() {
        N n;
        memcpy(&n, take(sizeof(N)).data(), sizeof(N));
        return n;
    }
    std::string_view text() { return take(number<uint64_t>()); }
    uint64_t count(size_t least_bytes, const char* what) {
        const auto n = number<uint64_t>();
        if (n > (size_ - at_) / least_bytes)
            refuse(format("%llu %s are declared, more than fit in the file", (unsigned long long)n, what), at_ - 8);
        return n;
    }

    nlohmann::json value(uint32_t type, const std::string& key) {
        switch (type) {
            case 0: return number<uint8_t>();
            case 1: return number<int8_t>();
            case 2: return number<uint16_t>();
            case 3: return number<int16_t>();
            case 4: return number<uint32_t>();
            case 5: return number<int32_t>();
            case 6: return number<float>();
            case 7: return number<uint8_t>() != 0;
            case 8: return text();
            case 9: return list(key);
            case 10: return number<uint64_t>();
            case 11: return number<int64_t>();
            case 12: return number<double>();
            default: refuse(format("the value of '%s' has the unknown type %u", key.c_str(), type), at_ - 4);
        }
    }
    nlohmann::json list(const std::string& key) {
        constexpr size_t most = 20000000;  // far above any vocabulary; a value needs up to 48 bytes in memory
        static constexpr size_t least_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 1, 8, 8, 8};
        const auto type = number<uint32_t>();
        if (type == 9) refuse("lists of lists, as in '" + key + "', are not supported", at_ - 4);
        const uint64_t n = count(type < 13 ? least_bytes[type] : 1, "values of a list");
        if ((listed_ += n) > most) refuse(format("its lists have more than %zu values", most));
        nlohmann::json values = nlohmann::json::array();
        for (uint64_t i = 0; i < n; i++) values.push_back(value(type, key));
        return values;
    }

    void read_tensors(uint64_t n_tensors) {
        const auto round_up = [](uint64_t n, uint64_t to) { return (n + to - 1) / to * to; };
        uint64_t alignment = 32, end = 0;
        if (const auto& given = metadata_.value("general.alignment", nlohmann::json()); !given.is_null()) {
            if (!given.is_number_unsigned() || given < 8 || given > 1 << 20 ||
                (given.get<uint64_t>() & (given.get<uint64_t>() - 1)))
                refuse("general.alignment is " + given.dump() + "; a power of two from 8 on is expected");
            alignment = given.get<uint64_t>();
        }
        std::vector<std::pair<uint64_t, size_t>> offsets;  // with the position of the offset in the file
        for (uint64_t i = 0; i < n_tensors; i++) {
            const size_t place = at_;
            GgufTensor t;
            t.name = text();
            const std::string named = "tensor '" + t.name + "'";
            const auto dims = number<uint32_t>();
            if (dims < 1 || dims > 4) refuse(format("%s has %u dimensions; 1 to 4 are expected", named.c_str(), dims), at_ - 4);
            t.elements = 1;
            for (uint32_t d = 0; d < dims; d++) {
                const auto n = number<uint64_t>();
                if (n == 0 || n > INT64_MAX || __builtin_mul_overflow(t.elements, (size_t)n, &t.elements) ||
                    t.elements > (size_t)1 << 60)
                    refuse(format("%s has the size %llu", named.c_str(), (unsigned long long)n), at_ - 8);
                t.shape.insert(t.shape.begin(), (int64_t)n);
            }
            const auto id = number<uint32_t>();
            const GgufTypeRow* const type = find_gguf_type(id);
            if (!type || !type->elements) {
                const std::string name = type ? type->name : format("%u", id);
                fail_unsupported(
                    "%s: %s has the type %s; supported are %s; HINT: llama.cpp converts it: llama-quantize "
                    "--allow-requantize %s %s.q8_0.gguf Q8_0",
                    path().c_str(), printable(named).c_str(), name.c_str(), supported().c_str(), path().c_str(),
                    path().substr(0, path().rfind(".gguf")).c_str());
            }
            t.type = (GgufType)id;
            if ((size_t)t.shape.back() % type->elements)
                refuse(format("rows of %s have %lld elements, not a multiple of the %zu of a block of %s", named.c_str(),
                              (long long)t.shape.back(), type->elements, type->name));
            offsets.emplace_back(number<uint64_t>(), at_ - 8);
            if (offsets.back().first != end)
                refuse(format("%s starts at %llu of the data; after the previous tensor it must be %llu", named.c_str(),
                              (unsigned long long)offsets.back().first, (unsigned long long)end),
                       at_ - 8);
            const uint64_t bytes = t.elements / type->elements * type->bytes;
            if (bytes > size_ - std::min(end, (uint64_t)size_))
                refuse(format("%s takes %llu bytes, more than the file has", named.c_str(), (unsigned long long)bytes), place);
            end = round_up(end + bytes, alignment);
            if (!by_name_.emplace(t.name, tensors_.size()).second) refuse(named + " occurs twice", place);
            tensors_.push_back(std::move(t));
        }
        const uint64_t begin = round_up(at_, alignment);
        for (size_t i = 0; i < tensors_.size(); i++) {
            GgufTensor& t = tensors_[i];
            const GgufTypeRow& type = gguf_type(t.type);
            const uint64_t last = begin + offsets[i].first + t.elements / type.elements * type.bytes;
            if (last > size_)
                refuse(format("tensor '%s' ends at byte %llu", t.name.c_str(), (unsigned long long)last), offsets[i].second);
            t.data = data_ + begin + offsets[i].first;
        }
        if (size_ > std::max(begin + end, (uint64_t)at_))
            refuse(format("%llu bytes at its end belong to no tensor", (unsigned long long)(size_ - begin - end)), begin + end);
    }
    static std::string supported() {
        std::string names;
        for (const GgufTypeRow& row : gguf_types())
            if (row.elements) names += (names.empty() ? "" : ", ") + std::string(row.name);
        return names;
    }

    MappedFile file_;
    const char* data_;
    size_t size_, at_ = 0, listed_ = 0;
    nlohmann::json metadata_ = nlohmann::json::object();
    std::vector<GgufTensor> tensors_;
    std::unordered_map<std::string, size_t> by_name_;
};

// ---- writing ---------------------------------------------------------------------------------------------------------------
class GgufHeader {
public:
    static constexpr size_t alignment = 32;

    // Integers are stored as uint32, other numbers as float32.
    void add(const std::string& key, const nlohmann::json& x) {
        if (x.is_boolean()) return value(key, 7, (uint8_t)x.get<bool>());
        if (x.is_number_integer()) return value(key, 4, x.get<uint32_t>());
        if (x.is_number()) return value(key, 6, x.get<float>());
        begin(key, 8);
        put(values_, x.get<std::string>());
    }
    // Drops empty lists.
    void add(const std::string& key, const std::vector<std::string>& list) { add_list(key, 8, list); }
    void add(const std::string& key, const std::vector<float>& list) { add_list(key, 6, list); }
    void add(const std::string& key, const std::vector<int32_t>& list) { add_list(key, 5, list); }
    void add(const std::string& key, const std::vector<uint8_t>& list) { add_list(key, 0, list); }

    // Tensors follow the header in this order, each padded to `alignment`.
    void add_tensor(const std::string& name, GgufType type, const std::vector<int64_t>& shape) {
        CHECK(!shape.empty() && (size_t)shape.back() % gguf_type(type).elements == 0, "tensor '%s' has no whole blocks",
              name.c_str());
        put(tensors_, name);
        put(tensors_, (uint32_t)shape.size());
        size_t elements = 1;
        for (auto d = shape.rbegin(); d != shape.rend(); ++d) {
            put(tensors_, (uint64_t)*d);
            elements *= (size_t)*d;
        }
        put(tensors_, (uint32_t)type);
        put(tensors_, (uint64_t)data_bytes_);
        const size_t bytes = elements / gguf_type(type).elements * gguf_type(type).bytes;
        data_bytes_ += bytes + padding(bytes);
        n_tensors_++;
    }
    static size_t padding(size_t bytes) { return (alignment - bytes % alignment) % alignment; }
    size_t data_bytes() const { return data_bytes_; }

    std::string bytes() const {
        std::string all = "GGUF";
        put(all, (uint32_t)3);
        put(all, n_tensors_);
        put(all, n_values_);
        all += values_ + tensors_;
        return all + std::string(padding(all.size()), '\0');
    }

private:
    template <class N, class = std::enable_if_t<std::is_arithmetic_v<N>>>
    static void put(std::string& to, N x) {
        to.append((const char*)&x, sizeof x);
    }
    static void put(std::string& to, const std::string& x) {
        put(to, (uint64_t)x.size());
        to += x;
    }
    void begin(const std::string& key, uint32_t type) {
        put(values_, key);
        put(values_, type);
        n_values_++;
    }
    template <class N>
    void value(const std::string& key, uint32_t type, N x) {
        begin(key, type);
        put(values_, x);
    }
    template <class E>
    void add_list(const std::string& key, uint32_t type, const std::vector<E>& list) {
        if (list.empty()) return;
        begin(key, 9);
        put(values_, type);
        put(values_, (uint64_t)list.size());
        for (const E& x : list) put(values_, x);
    }

    std::string values_, tensors_;
    uint64_t n_values_ = 0, n_tensors_ = 0;
    size_t data_bytes_ = 0;
};
