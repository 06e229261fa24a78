// Models in bitsandbytes' 4 bits: matrices as bitsandbytes decodes them (dev/ref/bitsandbytes_golden.py), whole models, damage.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "../llmc/checkpoint/checkpoint.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace test_bitsandbytes {

using test::expect_error;

struct Bytes {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};
using Tensors = std::map<std::string, Bytes>;

Tensors golden_tensors() {
    Tensors all;
    const auto golden = std::filesystem::path(__FILE__).parent_path() / "golden/bitsandbytes.safetensors";
    const SafetensorsReader files = SafetensorsReader::open(golden);
    for (const auto& [name, t] : files.tensors()) all[name] = {t.dtype, t.shape, {t.data, t.bytes}};
    return all;
}
std::string state_of(const std::string& name) {
    return name + ".weight" + bitsandbytes_state + (name == "fp4" ? "fp4" : "nf4");
}
TensorView view_of(const Bytes& b) {
    TensorView t;
    t.dtype = b.dtype;
    t.shape = b.shape;
    t.data = b.bytes.data();
    t.bytes = b.bytes.size();
    return t;
}
// The matrix `name` of these tensors, which must outlive it.
TensorView matrix(const Tensors& tensors, const std::string& name) {
    std::map<std::string, TensorView> views;
    for (const auto& [key, bytes] : tensors) views[key] = view_of(bytes);
    const auto part = [&](const char* ending) -> const TensorView& { return views.at(name + ".weight" + ending); };
    return bitsandbytes_tensor(views.at(state_of(name)), part, "tensor '" + name + "'");
}
std::vector<float> numbers(const TensorView& t) {
    std::vector<float> x(t.elements());
    t.decode(0, x.size(), x.data());
    return x;
}

TEST(Bitsandbytes, DecodesMatrices) {
    const Tensors golden = golden_tensors();
    for (const std::string name : {"plain", "nested", "fp4"}) {
        const std::vector<float> x = numbers(matrix(golden, name));
        const std::string& decoded = golden.at(name + ".decoded").bytes;
        ASSERT_EQ(decoded.size(), 4000);
        EXPECT_EQ(memcmp(&x[x.size() - 1000], decoded.data(), decoded.size()), 0) << name;
    }
}

// Encoded again, also after double quantization, a matrix has the same codes.
TEST(Bitsandbytes, KeepsCodes) {
    const Tensors golden = golden_tensors();
    for (const std::string name : {"plain", "nested"}) {
        const std::vector<float> x = numbers(matrix(golden, name));
        std::vector<uint8_t> again(QuantizedWeights::bytes(WeightFormat::nf4, x.size()));
        ASSERT_TRUE(quantize_weights(WeightFormat::nf4, x.data(), x.size(), again.data()));
        EXPECT_EQ(memcmp(again.data(), golden.at(name + ".weight").bytes.data(), x.size() / 2), 0) << name;
        if (name == "nested") continue;
        const std::string& factors = golden.at(name + ".weight.absmax").bytes;
        EXPECT_EQ(memcmp(&again[QuantizedWeights::code_bytes(WeightFormat::nf4, x.size())], factors.data(), factors.size()), 0);
    }
}

TEST(Bitsandbytes, RejectsDamage) {
    const std::string w = "nested.weight", state = state_of("nested");
    const Tensors golden = golden_tensors();
    const auto refuse = [&](const std::string& key, const std::string& said, auto change) {
        Tensors damaged = golden;
        change(damaged.at(key));
        expect_error([&] { matrix(damaged, "nested"); }, {"'nested'", said});
    };
    for (const std::string part : {"absmax", "quant_map", "nested_absmax", "nested_quant_map"}) {
        refuse(w + "." + part, part, [](Bytes& t) { t.shape[0]--; });
        refuse(w + "." + part, part, [](Bytes& t) { t.dtype = "I8"; });
    }
    refuse(w, "size", [](Bytes& t) { t.bytes.pop_back(); });
    refuse(state, "quant_state", [](Bytes& t) { t.bytes.pop_back(); });
    refuse(state, "quant_state", [](Bytes& t) { t.bytes = "[]"; });
    const auto set = [&](const char* key, const nlohmann::json& value, const std::string& said) {
        refuse(state, said, [&](Bytes& t) {
            auto j = nlohmann::json::parse(t.bytes);
            j[key] = value;
            if (value.is_null()) j.erase(key);
            t.bytes = j.dump();
        });
    };
    for (const char* key : {"blocksize", "nested_blocksize"})
        for (const nlohmann::json& value : {nlohmann::json(0), {-64}, {1.5}, {"64"}, nlohmann::json(INT64_MAX)})
            set(key, value, "quant_state");
    set("blocksize", 128, "absmax");
    set("nested_blocksize", nullptr, "absmax");
    set("nested_offset", nullptr, "quant_state");
    for (const nlohmann::json& value : {nlohmann::json(nullptr), {257}, {257, 0}, {257, -64}, {257, 64, 1}})
        set("shape", value, "quant_state");
    set("shape", {257, 65}, "size");
    set("shape", {INT32_MAX, INT32_MAX}, "size");
}

// A Llama whose matrices of blocks are in 4 bits: quantized or widened, on every tp rank, it has the numbers of the model that
// bitsandbytes quantized.
TEST(Bitsandbytes, WholeModel) {
    ModelConfig c;
    set_family(c, "llama");
    c.L = 2;
    c.C = c.F = 128;
    c.NH = 4;
    c.NKV = 2;
    c.T = 16;
    c.V = 9;
    pad_vocabulary(c, 2);
    ModelConfig frozen = c;
    frozen.base_format = WeightFormat::nf4;

    const ParameterTable whole(c), coded = frozen_table(frozen, whole_model(c));
    std::vector<float> params(whole.size);
    for (size_t i = 0; i < params.size(); i++) params[i] = 0.1f * std::sin((float)(i * i % 9973));
    Tensors plain, packed;
    for (size_t i = 0; i < whole.rows.size(); i++) {
        const TensorSpec& spec = whole.rows[i];
        for (const HfTensor& t : spec.hf) {
            const size_t n = (size_t)t.rows * (size_t)spec.whole_cols, first = (size_t)t.row * (size_t)spec.whole_cols;
            const std::vector<float> x(&params[spec.offset + first], &params[spec.offset + first] + n);
            const Bytes numbers = {"F32", file_shape(spec, t), {(const char*)x.data(), n * sizeof(float)}};
            plain[t.name] = numbers;
            if (!coded.rows[i].quantized()) {
                packed[t.name] = numbers;
                continue;
            }
            const auto codes = (int64_t)n / 2, blocks = (int64_t)n / 64;
            std::string bytes((size_t)codes + (size_t)blocks * sizeof(float), '\0');
            ASSERT_TRUE(quantize_weights(WeightFormat::nf4, x.data(), n, (uint8_t*)bytes.data()));
            std::vector<float> levels;
            for (int k = 0; k < 16; k++) levels.push_back(nf4_level(k));
            const nlohmann::json state = {{"quant_type", "nf4"}, {"blocksize", 64}, {"shape", numbers.shape}};
            packed[t.name] = {"U8", {codes, 1}, bytes.substr(0, (size_t)codes)};
            packed[t.name + ".absmax"] = {"F32", {blocks}, bytes.substr((size_t)codes)};
            packed[t.name + ".quant_map"] = {"F32", {16}, {(const char*)levels.data(), 64}};
            packed[t.name + bitsandbytes_state + "nf4"] = {"U8", {(int64_t)state.dump().size()}, state.dump()};
        }
    }
    const test::TemporaryDirectory dir;
    const std::string file = dir / "model.safetensors";
    const auto write = [&](const Tensors& tensors) {
        SafetensorsWriter writer(file);
        for (const auto& [name, t] : tensors) writer.declare(name, t.dtype, t.shape);
        for (const auto& [name, t] : tensors) writer.write(name, t.bytes.data(), t.bytes.size());
        writer.finish();
    };
    const auto read = [&](const ParameterTable& table) {
        std::vector<float> numbers(table.size);
        std::vector<uint8_t> codes(table.quantized_bytes);
        read_tensors(file, c, table, numbers.data(), codes.data());
        return std::pair(numbers, codes);
    };
    for (const int rank : {0, 1}) {
        Part part = whole_model(c);
        part.tp = {2, rank};
        const ParameterTable of_codes = frozen_table(frozen, part), of_numbers(c, part);
        write(plain);
        const auto [norms, codes] = read(of_codes);
        const std::vector<float> exact = read(of_numbers).first;
        write(packed);
        EXPECT_EQ(read(of_codes), (std::pair(norms, codes)));
        // Widened numbers have the same codes.
        const std::vector<float> widened = read(of_numbers).first;
        std::vector<uint8_t> again(of_codes.quantized_bytes);
        for (size_t i = 0; i < of_codes.rows.size(); i++) {
            const TensorSpec &spec = of_codes.rows[i], &row = of_numbers.rows[i];
            if (spec.quantized()) ASSERT_TRUE(quantize_tensor(spec, &widened[row.offset], &again[spec.offset]));
            else EXPECT_EQ(memcmp(&widened[row.offset], &exact[row.offset], row.size() * sizeof(float)), 0) << row.name;
        }
        EXPECT_EQ(again, codes);
        EXPECT_NE(widened, exact);
    }
    Tensors damaged = packed;
    damaged.erase("model.layers.1.mlp.up_proj.weight.absmax");
    write(damaged);
    expect_error([&] { read(whole); }, {file, "no tensor", "up_proj.weight.absmax"});
    damaged = packed;
    damaged["model.layers.1.mlp.up_proj.weight.other"] = damaged["model.norm.weight"];
    write(damaged);
    expect_error([&] { read(whole); }, {file, "up_proj.weight.other"});
}

TEST(Bitsandbytes, Configs) {
    const auto read = [](const char* quantization) {
        ModelConfig c;
        set_family(c, "llama");
        c.L = 1;
        c.C = c.F = 64;
        c.NH = c.NKV = 4;
        c.T = 16;
        c.V = 9;
        nlohmann::json j = to_hf_config(c, "float32");
        j["quantization_config"] = nlohmann::json::parse(quantization);
        return from_hf_config(j, "config.json");
    };
    EXPECT_EQ(read(R"({"quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false})").family, "llama");
    for (const char* other : {R"({"quant_method": "bitsandbytes", "load_in_8bit": true})", R"({"quant_method": "gptq"})",
                              R"({})", R"({"quant_method": "bitsandbytes", "load_in_4bit": false})"})
        expect_error([&] { read(other); }, {"'quantization_config'", "bitsandbytes in 4 bits", "HINT", "dequantize()"});
}

}  // namespace test_bitsandbytes
