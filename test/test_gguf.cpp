// GGUF: fp16 numbers and blocks compared with llama.cpp's package gguf (0.19), every way in which a file can be damaged,
// and round trips of models and tokenizers. dev/interop/test_gguf.py reads the same with gguf and llama.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "../llmc/commands/gguf_command.h"
#include "files.h"
#include "model_files.h"
#include "testing.h"

namespace test_gguf {

using test::bytes_of;
using test::expect_error;
using test::read_file;
using test::TemporaryDirectory;
using test::write_file;

std::string pseudo_random_bytes(size_t n, uint32_t seed) {
    std::string bytes;
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        bytes += (char)(seed >> 24);
    }
    return bytes;
}
template <class T>
std::string hash_of(const std::vector<T>& x) {
    return hash_text(add_to_hash(empty_hash, {(const char*)x.data(), x.size() * sizeof(T)}));
}

// ---- numbers ---------------------------------------------------------------------------------------------------------------
TEST(Gguf, HalvesRoundToNearestEven) {
    for (uint32_t h = 0; h < 65536; h++) {
        const float x = half_to_float((uint16_t)h);
        if (std::isnan(x)) EXPECT_EQ(float_to_half(x) & 0x7e00, 0x7e00);
        else EXPECT_EQ(float_to_half(x), h) << x;
        // Halfway between two neighbors rounds to the even one; slightly off halfway to the nearer.
        const float next = half_to_float((uint16_t)(h + 1));
        if ((h & 0x7fff) >= 0x7bff || h == 0x7fff) continue;
        const float middle = (x + next) / 2;
        EXPECT_EQ(float_to_half(middle), h + (h & 1)) << x;
        EXPECT_EQ(float_to_half(std::nextafter(middle, x)), h) << x;
        EXPECT_EQ(float_to_half(std::nextafter(middle, next)), h + 1) << x;
    }
    EXPECT_EQ(float_to_half(65519.996f), 0x7bff);
    EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
    EXPECT_EQ(float_to_half(-1e30f), 0xfc00);
    EXPECT_EQ(float_to_half(0x1p-25f), 0);
    EXPECT_EQ(float_to_half(-0.0f), 0x8000);
}

// 64 blocks of pseudo-random bytes with scales (at the offsets in `halves`) below 2: gguf.quants.dequantize's result, as a
// hash of the numbers' bytes.
TEST(Gguf, DequantizesAsGgufDoes) {
    struct Golden {
        GgufType type;
        std::vector<size_t> halves;
        const char* hash;
    };
    const Golden all[] = {{GgufType::Q8_0, {0}, "346c26eb3569e683"},        {GgufType::Q4_0, {0}, "1465298a76d7625c"},
                          {GgufType::Q4_1, {0, 2}, "8e2225ec8f8532a4"},     {GgufType::Q5_0, {0}, "8391ac8e47b4f6ea"},
                          {GgufType::Q5_1, {0, 2}, "78d10149198699a2"},     {GgufType::Q4_K, {0, 2}, "1c980c4e70dfd836"},
                          {GgufType::Q5_K, {0, 2}, "15fdee48573d6c90"},     {GgufType::Q6_K, {208}, "87675cb35a3be50e"},
                          {GgufType::F16, {0}, "e7c87b8400253cb4"},         {GgufType::BF16, {}, "a7ca3e543a83a783"},
                          {GgufType::MXFP4, {SIZE_MAX}, "986e6d8287e1791c"}};  // the scale is byte 0
    for (const Golden& golden : all) {
        const GgufTypeRow& row = gguf_type(golden.type);
        std::string blocks = pseudo_random_bytes(64 * row.bytes, 1);
        for (size_t i = 0; i < 64; i++)
            for (const size_t at : golden.halves) blocks[i * row.bytes + at + 1] &= (char)0xbf;
        std::vector<float> x(64 * row.elements);
        dequantize(golden.type, blocks.data(), 64, x.data());
        EXPECT_EQ(hash_of(x), golden.hash) << row.name;
    }
}

// Sizes over 40 powers of two, a block of zeros, and one whose quotients are all halfway between two integers.
TEST(Gguf, QuantizesToQ8_0AsGgufDoes) {
    const std::string random = pseudo_random_bytes(64 * 32 * 2, 7);
    std::vector<float> x(64 * 32);
    for (size_t i = 0; i < x.size(); i++) {
        const double whole = (uint8_t)random[2 * i] * 256 + (uint8_t)random[2 * i + 1] - 32768;
        x[i] = (float)(whole * std::ldexp(1.0, -(int)(i / 32 % 40)) / 1000);
    }
    for (size_t i = 0; i < 32; i++) {
        x[64 + i] = 0;
        x[96 + i] = i == 0 ? 127.0f : (float)i - 16 + 0.5f;
    }
    std::vector<char> blocks(64 * 34);
    EXPECT_TRUE(quantize(GgufType::Q8_0, x.data(), x.size(), blocks.data()));
    EXPECT_EQ(hash_of(blocks), "bcafdda1c31532de");
    for (const float wrong : {INFINITY, NAN, 1e7f}) {
        x[40] = wrong;
        EXPECT_FALSE(quantize(GgufType::Q8_0, x.data(), x.size(), blocks.data())) << wrong;
    }
    const float large = 65520, largest = 3.4e38f;
    char out[4];
    EXPECT_FALSE(quantize(GgufType::F16, &large, 1, out));
    EXPECT_TRUE(quantize(GgufType::BF16, &large, 1, out));
    EXPECT_FALSE(quantize(GgufType::BF16, &largest, 1, out));
    EXPECT_TRUE(quantize(GgufType::F32, &largest, 1, out));
}

// The relative errors of llama.cpp's encoders (quantize_row_q4_K_ref, ...) for these numbers: ours are smaller
// (dev/ref/k_quants_errors.py).
TEST(Gguf, QuantizesBetterThanLlamaCpp) {
    const std::string random = pseudo_random_bytes(512 * 256 * 4, 11);
    std::vector<float> x(512 * 256), decoded(x.size());
    for (size_t i = 0; i < x.size(); i++) {  // the sum of four is nearly normal; the size differs between groups of 32
        int sum = 0;
        for (size_t k = 0; k < 4; k++) sum += (uint8_t)random[4 * i + k];
        x[i] = (float)(2 * sum - 1020) * (float)std::ldexp(1.0, -10 - (int)(i / 32 * 7 % 5));
    }
    struct Golden {
        GgufType type;
        double llama_cpp;
    };
    for (const auto& [type, theirs] :
         {Golden{GgufType::Q4_K, 0.0691904}, {GgufType::Q5_K, 0.0349130}, {GgufType::Q6_K, 0.0172104}}) {
        const GgufTypeRow& row = gguf_type(type);
        std::vector<char> blocks(x.size() / row.elements * row.bytes);
        ASSERT_TRUE(quantize(type, x.data(), x.size(), blocks.data()));
        dequantize(type, blocks.data(), x.size() / row.elements, decoded.data());
        double squares = 0, errors = 0;
        for (size_t i = 0; i < x.size(); i++) {
            squares += (double)x[i] * x[i];
            errors += ((double)decoded[i] - x[i]) * ((double)decoded[i] - x[i]);
        }
        const double ours = std::sqrt(errors / squares);
        EXPECT_LT(ours, theirs) << row.name;
        EXPECT_GT(ours, 0.9 * theirs) << row.name;
        std::vector<float> wrong(x.begin(), x.begin() + 256);
        for (const float number : {INFINITY, NAN, 1e30f}) {
            wrong[200] = number;
            EXPECT_FALSE(quantize(type, wrong.data(), 256, blocks.data())) << row.name << " " << number;
        }
        for (const float same : {0.0f, 1.0f, -1.0f}) {
            std::fill(wrong.begin(), wrong.end(), same);
            ASSERT_TRUE(quantize(type, wrong.data(), 256, blocks.data()));
            dequantize(type, blocks.data(), 1, decoded.data());
            for (size_t i = 0; i < 256; i++) EXPECT_NEAR(decoded[i], same, 1e-3f) << row.name;
        }
    }
}

// ---- files -----------------------------------------------------------------------------------------------------------------
std::string small_file() {
    GgufHeader header;
    header.add("general.architecture", "llama");
    header.add("n", 7);
    header.add("x", 0.5);
    header.add("yes", true);
    header.add("tokens", std::vector<std::string>{"a", "", "\xff"});
    header.add("scores", std::vector<float>{1, -2.5f});
    header.add("kinds", std::vector<int32_t>{-1, 3});
    header.add("bytes", std::vector<uint8_t>{0, 255});
    header.add("none", std::vector<float>{});
    header.add_tensor("m", GgufType::Q8_0, {2, 32});
    header.add_tensor("v", GgufType::F32, {3});
    std::string data((size_t)header.data_bytes(), '\0');
    const float v[] = {1, 2, 3};
    std::vector<float> m(64);
    for (size_t i = 0; i < 64; i++) m[i] = (float)i * 2;
    quantize(GgufType::Q8_0, m.data(), 64, data.data());
    memcpy(data.data() + 96, v, 12);
    return header.bytes() + data;
}

TEST(Gguf, ReadsWhatItWrites) {
    TemporaryDirectory dir;
    write_file(dir / "x.gguf", small_file());
    const GgufReader file(dir / "x.gguf");
    const nlohmann::json& m = file.metadata();
    EXPECT_EQ(m.size(), 8u);
    EXPECT_EQ(m.at("general.architecture"), "llama");
    EXPECT_EQ(m.at("n"), 7);
    EXPECT_EQ(m.at("x"), 0.5);
    EXPECT_EQ(m.at("yes"), true);
    EXPECT_EQ(m.at("tokens").get<std::vector<std::string>>(), (std::vector<std::string>{"a", "", "\xff"}));
    EXPECT_EQ(m.at("scores"), (nlohmann::json{1.0, -2.5}));
    EXPECT_EQ(m.at("kinds"), (nlohmann::json{-1, 3}));
    EXPECT_EQ(m.at("bytes"), (nlohmann::json{0, 255}));
    ASSERT_EQ(file.tensors().size(), 2u);
    EXPECT_EQ(file.find("nothing"), nullptr);
    const GgufTensor &a = *file.find("m"), &v = *file.find("v");
    EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 32}));
    EXPECT_EQ(v.shape, (std::vector<int64_t>{3}));
    std::vector<float> x(64), y(3);
    file.read(a, x.data());
    file.read(v, y.data());
    EXPECT_EQ(y, (std::vector<float>{1, 2, 3}));
    for (int i = 0; i < 64; i++) EXPECT_NEAR(x[(size_t)i], 2 * i, 0.5);
}

// A truncated or extended file is never read.
TEST(Gguf, RefusesEveryTruncation) {
    TemporaryDirectory dir;
    const std::string whole = small_file();
    const size_t padding = 96 - 12;  // after the last tensor; other programs may omit it
    for (size_t n = 0; n < whole.size() - padding % 32; n++) {
        write_file(dir / "x.gguf", whole.substr(0, n));
        expect_error([&] { GgufReader(dir / "x.gguf"); }, {"x.gguf"});
    }
    write_file(dir / "x.gguf", whole + "x");
    expect_error([&] { GgufReader(dir / "x.gguf"); }, {"1 bytes at its end belong to no tensor"});
}

TEST(Gguf, RefusesDamageByItsPlace) {
    TemporaryDirectory dir;
    const std::string whole = small_file();
    const auto place = [&](const std::string& text) { return whole.find(text); };
    const size_t n = place(bytes_of<uint64_t>(1) + "n"), tokens = place("tokens"), m = place(bytes_of<uint64_t>(1) + "m"),
                 v = place(bytes_of<uint64_t>(1) + "v");
    struct Damage {
        size_t at;
        std::string bytes, message;
    };
    const uint64_t huge = 1ull << 62;
    const Damage all[] = {
        {0, "GGML", "is not a GGUF file"},
        {4, bytes_of<uint32_t>(1), "version 1 of the format; supported are 2 and 3; HINT: llama-quantize"},
        {4, bytes_of<uint32_t>(3 << 24), "big-endian"},
        {8, bytes_of(huge), "4611686018427387904 tensors are declared"},
        {8, bytes_of<uint64_t>(3), "dimensions"},
        {16, bytes_of(huge), "values are declared"},
        {16, bytes_of<uint64_t>(7), "tensor"},
        {n, bytes_of(huge), "bytes are declared"},
        {n + 9, bytes_of<uint32_t>(13), "the value of 'n' has the unknown type 13"},
        {n + 8, "x", "the key 'x' occurs twice"},
        {tokens + 10, bytes_of<uint32_t>(9), "lists of lists"},
        {tokens + 14, bytes_of(huge), "values of a list are declared"},
        {m + 8, "v", "tensor 'v' occurs twice"},
        {m + 9, bytes_of<uint32_t>(0), "tensor 'm' has 0 dimensions"},
        {m + 9, bytes_of<uint32_t>(5), "tensor 'm' has 5 dimensions"},
        {m + 13, bytes_of<uint64_t>(0), "tensor 'm' has the size 0"},
        {m + 13, bytes_of<uint64_t>(31), "not a multiple of the 32 of a block of Q8_0"},
        {m + 13, bytes_of(huge), "tensor 'm' has the size 4611686018427387904"},
        {m + 21, bytes_of<uint64_t>(1 << 20), "more than the file has"},
        {m + 29, bytes_of<uint32_t>(10), "type Q2_K; supported are F32, F16, BF16, Q8_0"},
        {m + 29, bytes_of<uint32_t>(19), "type IQ1_S; supported are F32"},
        {m + 29, bytes_of<uint32_t>(99), "HINT: llama.cpp converts it: llama-quantize --allow-requantize"},
        {m + 33, bytes_of<uint64_t>(32), "tensor 'm' starts at 32 of the data"},
        {v + 25, bytes_of<uint64_t>(64), "must be 96"},
    };
    for (const Damage& d : all) {
        std::string damaged = whole;
        damaged.replace(d.at, d.bytes.size(), d.bytes);
        write_file(dir / "x.gguf", damaged);
        expect_error([&] { GgufReader(dir / "x.gguf"); }, {"x.gguf", d.message});
    }
    for (const uint32_t alignment : {0u, 24u, 4u, 1u << 21}) {
        GgufHeader header;
        header.add("general.alignment", alignment);
        write_file(dir / "x.gguf", header.bytes());
        expect_error([&] { GgufReader(dir / "x.gguf"); }, {"general.alignment is " + std::to_string(alignment)});
    }
}

// ---- models ----------------------------------------------------------------------------------------------------------------
ModelConfig tiny(const std::string& family, bool tied = false) {
    ModelConfig c;
    set_family(c, family);
    const bool one_group = family == "gpt2" || family == "bloom" || family == "gpt_neox" || family == "mpt";
    c.L = family == "gemma3_text" ? 7 : family == "smollm3" || family == "cohere2" ? 5 : 2;
    c.NH = 6;
    c.NKV = one_group ? 6 : 3;
    c.C = 96;
    c.F = one_group ? 384 : 64;
    c.T = 11;
    c.V = 61;
    c.eps = c.norm == Norm::rmsnorm ? 1e-6 : 1e-5;
    c.tied = c.tied || tied;
    if (family == "llama") c.rope_base = 500000;
    if (c.mixture.on()) c.mixture.experts = 5, c.mixture.topk = 3;
    if (c.mixture.shared) c.mixture.shared = 40;
    if (c.norm_plus_one) c.embedding_scale = std::sqrt(96.0);
    if (family == "qwen3" || c.norm_plus_one) c.head_size = 20;
    if (family.rfind("granite", 0) == 0) {
        c.embedding_scale = 12;
        c.residual_scale = 0.22;
        c.attention_scale = 0.015625;
        c.logit_divisor = 6;
    }
    if (family == "minicpm") {
        c.embedding_scale = 12;
        c.residual_scale = 1.4 / std::sqrt(2.0);
        c.logit_divisor = 6;
    }
    if (family == "cohere" || family == "cohere2") c.logit_divisor = 4;
    if (family == "cohere2") {
        c.window = 5;
        c.full_interval = 4;
    }
    if (family == "gemma2" || family == "gemma3_text") {
        c.window = 5;
        c.full_interval = family == "gemma2" ? 2 : 6;
    }
    if (family == "gemma2") {
        c.attention_softcap = 50;
        c.logit_softcap = 30;
    }
    if (family == "gpt_oss") {
        c.head_size = 20;
        c.window = 4;
        c.full_interval = 2;
        c.rope_scaling = {RopeScaling::Type::yarn, 4, 8};
        c.rope_scaling.truncate = false;
    }
    if (family == "gemma3_text") {
        c.rope_base = 1e6;
        c.local_rope_base = 10000;
    }
    pad_vocabulary(c, 1);
    return c;
}

// A model directory in BF16, with this tokenizer.json.
std::vector<bf16> write_tiny(const std::string& dir, const ModelConfig& c, const std::string& tokenizer = "") {
    const ParameterTable table(c);
    test::Rng rng(3);
    std::vector<bf16> params(table.size);
    for (const TensorSpec& spec : table.rows) {
        const std::vector<bf16> x = rng.normals<bf16>(spec.size());
        std::copy(x.begin(), x.end(), params.begin() + (long)spec.offset);
    }
    publish_directory(dir, [&](const std::string& temporary) {
        ModelTexts texts;
        texts.dtype = "bfloat16";
        if (!tokenizer.empty()) texts.files["tokenizer.json"] = tokenizer;
        WrittenFiles written(temporary);
        write_model_texts(temporary, c, texts, written);
        write_tensors(temporary + "/model.safetensors", table, params.data());
    });
    return params;
}
void run_export(const std::string& model, const std::string& gguf, const std::string& type) {
    World world = World::join();
    ExportOptions o;
    o.model = model;
    o.gguf = gguf;
    o.type = type;
    EXPECT_EQ(export_command(world, o), 0);
}
void run_import(const std::string& gguf, const std::string& out) {
    ImportOptions o;
    o.gguf = gguf;
    o.out = out;
    EXPECT_EQ(import_command(o), 0);
}

// Through a file of its own type or a wider one, a model round-trips byte by byte and its configuration key by key.
TEST(GgufModel, ComesBack) {
    for (const GgufArchitecture& a : gguf_architectures())
        for (const bool tied : {false, true}) {
            if (std::string(a.family) == "mistral" || std::string(a.family) == "internlm3") continue;  // return as Llamas
            const ModelConfig c = tiny(a.family, tied);
            if (c.tied != tied) continue;  // a family with an always tied head
            SCOPED_TRACE(a.family);
            TemporaryDirectory dir;
            write_tiny(dir / "model", c);
            run_export(dir / "model", dir / "x.gguf", tied ? "" : "f32");
            run_import(dir / "x.gguf", dir / "back");
            EXPECT_EQ(read_file(dir / "back/model.safetensors"), read_file(dir / "model/model.safetensors"));
            EXPECT_EQ(read_json(dir / "back/config.json"), read_json(dir / "model/config.json"));
        }
}

// Small models written by transformers, of every family and with odd sizes: numbers and configuration round-trip, or the
// settings that llama.cpp hard-codes differently are reported.
TEST(GgufModel, OfTransformersComesBack) {
    const std::map<std::string, const char*> refused = {{"cohere", "'proj_bias' is true"},
                                                        {"internlm2", "'proj_bias' is true"},
                                                        {"falcon", "'mlp_bias' is true"},
                                                        {"cohere2", "'full_attention_interval' is 2"},
                                                        {"gemma2", "'attention_scale' is 0.33"},
                                                        {"gemma3_text", "'attention_scale' is 0.33"},
                                                        {"smollm3", "'no_rope_layer_interval' is 2"},
                                                        {"qwen2_moe", "no dense layers among mixtures"}};
    const std::vector<GgufArchitecture>& all = gguf_architectures();
    int models = 0;
    for (const auto& entry : std::filesystem::directory_iterator("test/golden/families")) {
        const std::string model = entry.path().string();
        SCOPED_TRACE(model);
        models++;
        TemporaryDirectory dir;
        ModelConfig before = read_config(model);
        if (std::none_of(all.begin(), all.end(), [&](const auto& a) { return before.family == a.family; })) {
            expect_error([&] { run_export(model, dir / "x.gguf", "f32"); }, {"GGUF files of the family " + before.family});
            continue;
        }
        const auto as_refused = refused.find(before.family);
        if (as_refused != refused.end()) {
            expect_error([&] { run_export(model, dir / "x.gguf", "f32"); }, {as_refused->second});
            continue;
        }
        run_export(model, dir / "x.gguf", "f32");
        run_import(dir / "x.gguf", dir / "back");
        ModelConfig after = read_config(dir / "back");
        before.init_std = after.init_std;
        if (before.family == "mistral" || before.family == "mixtral") {  // without its window, which llama.cpp lacks
            before.T = before.window ? std::min(before.T, before.window) : before.T;
            before.window = 0;
        }
        EXPECT_TRUE(same_model(before, after));
        pad_vocabulary(before, 1);
        pad_vocabulary(after, 1);
        const ParameterTable ours(before), theirs(after);
        const TensorSource source(model, before), back(dir / "back", after);
        ASSERT_EQ(ours.rows.size(), theirs.rows.size());
        for (size_t i = 0; i < ours.rows.size(); i++) {
            std::vector<float> x(ours.rows[i].size()), y(x.size());
            source.read(ours.rows[i], x.data());
            back.read(theirs.rows[i], y.data());
            // 1 + w - 1 loses the last bits of w.
            for (size_t k = 0; k < x.size(); k++)
                ASSERT_NEAR(x[k], y[k], before.norm_plus_one ? 0x1p-23 : 0) << ours.rows[i].name;
        }
    }
    EXPECT_GE(models, 13);
}

// The mixtures of types have llama.cpp's choices, and rows without whole blocks of 256 have smaller ones.
TEST(GgufModel, MixturesOfTypes) {
    const auto types = [](ModelConfig c, const char* word) {
        std::map<std::string, GgufType> types;
        for (const GgufFileType& file : gguf_file_types)
            for (const TensorSpec& spec : ParameterTable(c).rows)
                for (const GgufPart& part : gguf_parts(c, gguf_architecture_of(c), spec))
                    if (file.word == std::string(word)) types[part.name] = gguf_type_of(c, spec, part.name, file);
        return types;
    };
    ModelConfig c = tiny("llama");
    c.C = c.F = 256;
    c.L = 16;
    c.NH = 4;
    c.NKV = 2;
    c.tied = false;
    auto all = types(c, "q4_k_m");
    std::string finest;  // layers whose values and down projections are in Q6_K: llama.cpp's use_more_bits() for 16 layers
    for (int layer = 0; layer < c.L; layer++) {
        const std::string block = format("blk.%d.", layer);
        EXPECT_EQ(all.at(block + "attn_v.weight"), all.at(block + "ffn_down.weight"));
        if (all.at(block + "attn_v.weight") == GgufType::Q6_K) finest += format("%d ", layer);
        for (const char* most : {"attn_q.weight", "attn_k.weight", "attn_output.weight", "ffn_gate.weight", "ffn_up.weight"})
            EXPECT_EQ(all.at(block + most), GgufType::Q4_K) << most;
        EXPECT_EQ(all.at(block + "attn_norm.weight"), GgufType::F32);
    }
    EXPECT_EQ(finest, "0 1 4 7 10 13 14 15 ");
    EXPECT_EQ(all.at("token_embd.weight"), GgufType::Q4_K);
    EXPECT_EQ(all.at("output.weight"), GgufType::Q6_K);
    EXPECT_EQ(types(c, "q5_k_m").at("blk.2.attn_v.weight"), GgufType::Q5_K);
    c.C = c.F = 192;
    all = types(c, "q4_k_m");
    EXPECT_EQ(all.at("blk.2.ffn_up.weight"), GgufType::Q8_0);
    ModelConfig gpt2 = tiny("gpt2");
    gpt2.C = gpt2.F = 256;
    gpt2.NH = gpt2.NKV = 4;
    EXPECT_EQ(types(gpt2, "q4_k_m").at("blk.0.attn_qkv.weight"), GgufType::Q5_K);
    EXPECT_EQ(types(gpt2, "q4_k_m").at("token_embd.weight"), GgufType::Q6_K);
}

// GPT-OSS's names, as in the package gguf; and its gates and ups, which alternate in the files of transformers.
TEST(GgufModel, ExpertsOfGptOss) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("gpt_oss");
    const std::vector<bf16> params = write_tiny(dir / "model", c);
    run_export(dir / "model", dir / "x.gguf", "f32");
    const GgufReader file(dir / "x.gguf");
    EXPECT_EQ(file.metadata().at("general.architecture"), "gpt-oss");
    for (const char* name : {"attn_norm.weight", "post_attention_norm.weight", "attn_q.bias", "attn_output.bias",
                             "attn_sinks.weight", "ffn_gate_inp.weight", "ffn_gate_inp.bias"})
        EXPECT_NE(file.find("blk.1." + std::string(name)), nullptr) << name;
    const int E = c.mixture.experts, F = c.F;
    const ParameterTable table(c);
    for (const TensorSpec& spec : table.rows) {
        if (spec.name != "blocks.1.fc1_w" && spec.name != "blocks.1.fc1_b") continue;
        const char* const ending = spec.vector() ? "bias" : "weight";
        for (const int half : {0, 1}) {
            const GgufTensor& t = *file.find(format("blk.1.ffn_%s_exps.%s", half ? "up" : "gate", ending));
            EXPECT_EQ(t.shape, spec.vector() ? (std::vector<int64_t>{E, F}) : (std::vector<int64_t>{E, F, c.C}));
            std::vector<float> x(t.elements);
            file.read(t, x.data());
            const size_t size = x.size() / (size_t)E;
            for (size_t i = 0; i < x.size(); i++)
                ASSERT_EQ(x[i], (float)params[spec.offset + (2 * (i / size) + (size_t)half) * size + i % size]) << i;
        }
    }
}

// In narrower types: the numbers' values, and which tensors stay in F32.
TEST(GgufModel, TypesOfTensors) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("gpt2");
    const std::vector<bf16> params = write_tiny(dir / "model", c);
    const ParameterTable table(c);
    const auto ours = [&](const char* name) {
        for (const TensorSpec& spec : table.rows)
            if (spec.name == name) return params.data() + spec.offset;
        return (const bf16*)nullptr;
    };
    for (const auto& [name, type] : {std::pair{"f16", GgufType::F16}, {"q8_0", GgufType::Q8_0}}) {
        run_export(dir / "model", dir / (std::string(name) + ".gguf"), name);
        const GgufReader file(dir / (std::string(name) + ".gguf"));
        EXPECT_EQ(file.find("token_embd.weight")->type, type);
        EXPECT_EQ(file.find("blk.1.ffn_down.weight")->type, type);
        for (const char* wide : {"position_embd.weight", "blk.0.attn_qkv.bias", "blk.1.ffn_norm.weight", "output_norm.bias"})
            EXPECT_EQ(file.find(wide)->type, GgufType::F32) << wide;
        EXPECT_EQ(file.find("output.weight"), nullptr);
        EXPECT_EQ(file.metadata().at("general.file_type"), type == GgufType::F16 ? 1 : 7);
        EXPECT_EQ(file.metadata().at("gpt2.attention.head_count"), 6);
        // (out, in) as ours, although GPT-2's own files are transposed
        const GgufTensor& t = *file.find("blk.1.ffn_up.weight");
        EXPECT_EQ(t.shape, (std::vector<int64_t>{c.F, c.C}));
        std::vector<float> x(t.elements);
        file.read(t, x.data());
        for (size_t i = 0; i < x.size(); i++) {
            const float expected = ours("blocks.1.fc1_w")[i];
            ASSERT_NEAR(x[i], expected, type == GgufType::F16 ? 0 : 5.0 / 254) << i;  // half a step of a block's scale
        }
    }
    // Rows of 40 are not a multiple of blocks of 32.
    ModelConfig odd = tiny("llama");
    odd.F = 40;
    write_tiny(dir / "odd", odd);
    run_export(dir / "odd", dir / "odd.gguf", "q8_0");
    const GgufReader file(dir / "odd.gguf");
    EXPECT_EQ(file.find("blk.0.ffn_down.weight")->type, GgufType::F16);
    EXPECT_EQ(file.find("blk.0.ffn_up.weight")->type, GgufType::Q8_0);
}

// Element (i, half) of a query or key head is at (half, i) in ours: rotating neighbors equals rotating halves.
TEST(GgufModel, OrdersQueriesAndKeysByPairs) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("llama");
    const std::vector<bf16> params = write_tiny(dir / "model", c);
    run_export(dir / "model", dir / "x.gguf", "f32");
    const GgufReader file(dir / "x.gguf");
    const ParameterTable table(c);
    const auto qkv =
        std::find_if(table.rows.begin(), table.rows.end(), [](const TensorSpec& s) { return s.name == "blocks.1.qkv_w"; });
    struct Part {
        const char* name;
        int row, heads;
    };
    const int HS = c.HS();
    for (const Part& part : {Part{"blk.1.attn_q.weight", 0, c.NH},
                             {"blk.1.attn_k.weight", c.NH * HS, c.NKV},
                             {"blk.1.attn_v.weight", (c.NH + c.NKV) * HS, 0}}) {
        const GgufTensor& t = *file.find(part.name);
        std::vector<float> x(t.elements);
        file.read(t, x.data());
        for (int row = 0; row < t.shape[0]; row++) {
            const int head = row / HS, i = row % HS / 2, half = row % 2;
            const int from = part.row + (part.heads ? head * HS + half * HS / 2 + i : row);
            for (int col = 0; col < c.C; col++)
                ASSERT_EQ(x[(size_t)row * c.C + col], (float)params[qkv->offset + (size_t)from * c.C + col])
                    << part.name << row;
        }
    }
}

// The gates of all experts are one tensor, (experts, F, C), and so are their ups and downs; the router is in F32. Old files
// have a tensor per expert.
TEST(GgufModel, StacksExperts) {
    for (const char* family : {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"}) {
        SCOPED_TRACE(family);
        TemporaryDirectory dir;
        const ModelConfig c = tiny(family);
        const std::vector<bf16> params = write_tiny(dir / "model", c);
        run_export(dir / "model", dir / "x.gguf", "q8_0");
        const GgufReader quantized(dir / "x.gguf");
        EXPECT_EQ(quantized.find("blk.1.ffn_gate_exps.weight")->type, GgufType::Q8_0);
        run_export(dir / "model", dir / "y.gguf", "bf16");
        const GgufReader file(dir / "y.gguf");
        EXPECT_EQ(file.find("blk.1.ffn_gate_inp.weight")->type, GgufType::F32);
        const ParameterTable table(c);
        const auto spec = [&](const std::string& name) {
            return *std::find_if(table.rows.begin(), table.rows.end(), [&](const TensorSpec& s) { return s.name == name; });
        };
        const int E = c.mixture.experts;
        GgufArchitecture old = gguf_architecture_of(c);
        old.split_experts = true;
        GgufHeader header;
        std::string data;
        const auto metadata = gguf_metadata(c, old);
        for (const auto& [key, value] : metadata.items()) header.add(key, nlohmann::json(value));
        const auto check = [&](const char* name, const TensorSpec& s, int first, int rows, int next) {
            const GgufTensor& t = *file.find(name);
            ASSERT_EQ(t.shape, (std::vector<int64_t>{E, rows, s.cols}));
            std::vector<float> x(t.elements);
            file.read(t, x.data());
            for (int e = 0; e < E; e++)
                for (int i = 0; i < rows * s.cols; i++)
                    ASSERT_EQ(x[(size_t)(e * rows * s.cols + i)],
                              (float)params[s.offset + (size_t)((e * next + first) * s.cols + i)])
                        << name;
        };
        check("blk.1.ffn_gate_exps.weight", spec("blocks.1.fc1_w"), 0, c.F, 2 * c.F);
        check("blk.1.ffn_up_exps.weight", spec("blocks.1.fc1_w"), c.F, c.F, 2 * c.F);
        check("blk.1.ffn_down_exps.weight", spec("blocks.1.fc2_w"), 0, c.C, c.C);
        for (const TensorSpec& s : table.rows)
            for (const GgufPart& part : gguf_parts(c, old, s)) {
                const GgufType type = gguf_type_of(c, s, part.name, gguf_file_types[2]);
                header.add_tensor(part.name, type, part.shape(s));
                std::vector<float> ours(params.begin() + (long)s.offset, params.begin() + (long)(s.offset + s.size()));
                const std::vector<float> x = detail::rows_for_gguf(c, s, part, ours);
                std::string bytes(x.size() * gguf_type(type).bytes, '\0');
                ASSERT_TRUE(quantize(type, x.data(), x.size(), bytes.data()));
                data += bytes + std::string(GgufHeader::padding(bytes.size()), '\0');
            }
        write_file(dir / "old.gguf", header.bytes() + data);
        EXPECT_NE(GgufReader(dir / "old.gguf").find(format("blk.1.ffn_down.%d.weight", E - 1)), nullptr);
        run_import(dir / "old.gguf", dir / "back");
        EXPECT_EQ(read_file(dir / "back/model.safetensors"), read_file(dir / "model/model.safetensors"));
        EXPECT_EQ(read_json(dir / "back/config.json"), read_json(dir / "model/config.json"));
    }
}

TEST(GgufModel, NormsOfGemmaAreOneMore) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("gemma3_text");
    const std::vector<bf16> params = write_tiny(dir / "model", c);
    run_export(dir / "model", dir / "x.gguf", "");
    const GgufReader file(dir / "x.gguf");
    const GgufArchitecture& a = gguf_architecture_of(c);
    int norms = 0;
    for (const TensorSpec& spec : ParameterTable(c).rows) {
        if (!spec.vector()) continue;
        const GgufTensor& t = *file.find(gguf_parts(c, a, spec)[0].name);
        std::vector<float> x(t.elements);
        file.read(t, x.data());
        for (size_t i = 0; i < x.size(); i++) ASSERT_EQ(x[i], 1 + (float)params[spec.offset + i]) << spec.name;
        norms++;
    }
    EXPECT_EQ(norms, 6 * c.L + 1);
}

TEST(GgufModel, RefusesWhatItCannotSay) {
    ModelConfig c = tiny("llama");
    EXPECT_NO_THROW(check_gguf_says(c, gguf_architecture_of(c)));
    c.rope_base = 12345.678;  // not a number in single precision
    EXPECT_NO_THROW(check_gguf_says(c, gguf_architecture_of(c)));
    ModelConfig gpt2 = tiny("gpt2");  // llama.cpp's graph supports one activation for it
    EXPECT_NO_THROW(check_gguf_says(gpt2, gguf_architecture_of(gpt2)));
    for (const auto& [activation, name] : {std::pair{Activation::gelu_exact, "\"gelu_exact\""},
                                           {Activation::relu, "\"relu\""},
                                           {Activation::relu2, "\"relu2\""}}) {
        gpt2.activation = activation;
        expect_error([&] { check_gguf_says(gpt2, gguf_architecture_of(gpt2)); },
                     {std::string("'activation' is ") + name, "architecture gpt2", "llama.cpp cannot run it"});
    }
    c.family = "ours";
    expect_error([&] { gguf_architecture_of(c); }, {"GGUF files of the family ours are not supported", "gpt2, bloom, llama"});
    const auto has = [](const std::string&) { return false; };
    nlohmann::json m = gguf_metadata(tiny("llama"), gguf_architecture_of(tiny("llama")));
    const auto refused = [&](const char* key, const nlohmann::json& value, const std::vector<std::string>& parts) {
        nlohmann::json changed = m;
        if (value.is_null()) changed.erase(key);
        else changed[key] = value;
        expect_error([&] { gguf_config(changed, "x.gguf", has); }, parts);
    };
    refused("general.architecture", "mamba", {"x.gguf", "general.architecture is 'mamba'; supported are gpt2, bloom, llama"});
    refused("llama.expert_count", 8, {"has no 'llama.expert_used_count'"});
    refused("llama.expert_used_count", 2, {"'llama.expert_used_count' is 2; only 0 is supported"});
    refused("llama.expert_feed_forward_length", 8, {"'llama.expert_feed_forward_length' is 8; only 0 is supported"});
    refused("llama.logit_scale", 0.5, {"'llama.logit_scale' is 0.5"});
    refused("llama.block_count", nullptr, {"has no 'llama.block_count'"});
    refused("llama.block_count", "two", {"'llama.block_count' is \"two\""});
    refused("llama.attention.head_count", 0, {"'llama.attention.head_count' is 0"});
    refused("llama.attention.value_length", 8, {"'llama.attention.value_length' is 8; only 16 is supported"});
    m = gguf_metadata(tiny("qwen2"), gguf_architecture_of(tiny("qwen2")));
    refused("qwen2.expert_count", 8, {"'qwen2.expert_count' is 8; 0 is expected"});
    m = gguf_metadata(tiny("olmoe"), gguf_architecture_of(tiny("olmoe")));
    refused("olmoe.expert_count", 0, {"'olmoe.expert_count' is 0; at least 1 is expected"});
    refused("olmoe.expert_gating_func", 2, {"'olmoe.expert_gating_func' is 2; only 1 is supported"});
    refused("olmoe.expert_shared_count", 1, {"'olmoe.expert_shared_count' is 1; models with this value are not supported"});
    ModelConfig normalized = tiny("olmoe");  // llama.cpp has one rule for each architecture
    normalized.mixture.normalize = true;
    expect_error([&] { check_gguf_says(normalized, gguf_architecture_of(normalized)); },
                 {"'norm_topk_prob' is true", "architecture olmoe", "llama.cpp cannot run it"});
}

TEST(GgufModel, RefusesAFileOfAnotherModel) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("llama");
    const GgufArchitecture& a = gguf_architecture_of(c);
    struct Change {
        const char *tensor, *message;
    };
    for (const auto& [changed, message] :
         {Change{"blk.1.ffn_up.weight", "has no tensor 'blk.1.ffn_up.weight', which a llama model needs"},
          {"", "contains the tensor 'more'"},
          {"token_embd.weight", "shape"}}) {
        GgufHeader header;
        const auto metadata = gguf_metadata(c, a);
        for (const auto& [key, value] : metadata.items()) header.add(key, nlohmann::json(value));
        for (const TensorSpec& spec : ParameterTable(c).rows)
            for (const GgufPart& part : gguf_parts(c, a, spec)) {
                const bool wrong = part.name == changed;
                if (wrong && part.name != "token_embd.weight") continue;
                header.add_tensor(
                    part.name, GgufType::F32,
                    spec.vector() ? std::vector<int64_t>{part.rows} : std::vector<int64_t>{part.rows + wrong, spec.cols});
            }
        if (!*changed) header.add_tensor("more", GgufType::F32, {3});
        write_file(dir / "x.gguf", header.bytes() + std::string(header.data_bytes(), '\0'));
        expect_error([&] { run_import(dir / "x.gguf", dir / "out"); }, {"x.gguf", message});
        EXPECT_EQ(dir.names(), std::set<std::string>{"x.gguf"});
    }
}

// ---- tokenizers ------------------------------------------------------------------------------------------------------------
const std::string golden = "test/golden/tokenizer/";
const char* const sample = "In the year 1234 the king's sheep weren't 3.14 over\n\n  there: 言葉 Zürich <|endoftext|> !?";

// The tokenizer in `dir` and its round trip through GGUF encode equally.
GgufTokenizer comes_back(const TemporaryDirectory& dir, const std::string& text) {
    const Tokenizer before = Tokenizer::load(dir / "");
    const GgufTokenizer t = read_hf_tokenizer(dir / "", before.vocab_size() + 3);
    GgufHeader header;
    add_tokenizer(header, t);
    write_file(dir / "x.gguf", header.bytes());
    const GgufTokenizer read = read_gguf_tokenizer(GgufReader(dir / "x.gguf").metadata(), "x.gguf");
    EXPECT_EQ(read.tokens.size(), (size_t)before.vocab_size());
    EXPECT_EQ(read.merges, t.merges);
    std::filesystem::create_directory(dir / "back");
    for (const auto& [name, bytes] : hf_tokenizer_files(read, 128)) write_file(dir / "back/" + name, bytes);
    const Tokenizer after = Tokenizer::load(dir / "back");
    EXPECT_EQ(after.encode(text), before.encode(text));
    EXPECT_EQ(after.encode_prompt(text), before.encode_prompt(text));
    EXPECT_EQ(after.eod_id(), before.eod_id());
    EXPECT_EQ(after.bos_id(), before.bos_id());
    EXPECT_EQ(after.vocab_size(), before.vocab_size());
    return t;
}

TEST(GgufTokenizer, OfBytes) {
    for (const auto& [name, pre] : {std::pair{"gpt2", "gpt-2"}, {"llama3", "dbrx"}, {"bloom", "bloom"}}) {
        TemporaryDirectory dir;
        write_file(dir / "tokenizer.json", read_file(golden + name + ".json"));
        write_file(dir / "tokenizer_config.json", R"({"chat_template": "{{ messages }}", "pad_token": "<|endoftext|>"})");
        const GgufTokenizer t = comes_back(dir, sample);
        EXPECT_EQ(t.model, "gpt2");
        EXPECT_EQ(t.pre, pre);
        EXPECT_EQ(t.chat_template, "{{ messages }}");
        EXPECT_EQ(t.tokens.back().compare(0, 4, "[PAD"), 0);
        EXPECT_EQ(t.kinds.back(), SentencePieceModel::unused);
        EXPECT_NE(read_file(dir / "back/tokenizer_config.json").find("{{ messages }}"), std::string::npos);
    }
}

// Like llama.cpp's converter: omits added tokens that the model lacks.
TEST(GgufTokenizer, LeavesOutWhatTheModelLacks) {
    nlohmann::json j = nlohmann::json::parse(read_file(golden + "gpt2.json"));
    j["added_tokens"].push_back({{"id", 600}, {"content", "<image>"}, {"special", true}});
    TemporaryDirectory dir;
    write_file(dir / "tokenizer.json", j.dump());
    EXPECT_EQ(read_hf_tokenizer(dir / "", 601).tokens.back(), "<image>");
    const GgufTokenizer t = read_hf_tokenizer(dir / "", 600);
    EXPECT_EQ(t.tokens.size(), 600u);
    EXPECT_EQ(t.kinds.size(), 600u);
    expect_error([&] { read_hf_tokenizer(dir / "", 599); }, {"lacks the token 599"});
}

TEST(GgufTokenizer, TokensAroundAPrompt) {
    const std::string name = "<|endoftext|>";
    const nlohmann::json token = {{"SpecialToken", {{"id", name}, {"type_id", 0}}}},
                         text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
    for (const bool before : {true, false})
        for (const bool after : {true, false}) {
            nlohmann::json j = nlohmann::json::parse(read_file(golden + "llama3.json")), single = nlohmann::json::array();
            const int id = j["added_tokens"][0]["id"];
            if (before) single.push_back(token);
            single.push_back(text);
            if (after) single.push_back(token);
            j["post_processor"] = {{"type", "TemplateProcessing"},
                                   {"single", single},
                                   {"pair", nlohmann::json::array()},
                                   {"special_tokens", {{name, {{"id", name}, {"ids", {id}}, {"tokens", {name}}}}}}};
            TemporaryDirectory dir;
            write_file(dir / "tokenizer.json", j.dump());
            write_file(dir / "tokenizer_config.json", nlohmann::json{{"bos_token", name}, {"eos_token", name}}.dump());
            const GgufTokenizer t = comes_back(dir, sample);
            EXPECT_EQ(t.add_bos, before);
            EXPECT_EQ(t.add_eos, after);
            EXPECT_EQ(Tokenizer::load(dir / "back").encode_prompt("x").front() == id, before);
        }
}

// Falcon's pre-tokenizer cuts on after ByteLevel. llama.cpp's name for it gives the same pieces.
TEST(GgufTokenizer, OfFalcon) {
    const auto rows = nlohmann::json::parse(read_file(golden + "variants.json"));
    for (const auto& row : rows["variants"]) {
        if (row["name"] != "Falcon") continue;
        TemporaryDirectory dir;
        write_file(dir / "tokenizer.json", nlohmann::json::parse(read_file(golden + "gpt2.json")).patch(row["patch"]).dump());
        EXPECT_EQ(comes_back(dir, "in 1234 years,,.. 12 3").pre, "falcon");
    }
}

TEST(GgufTokenizer, OfBytesThatLlamaCppCannot) {
    const auto original = nlohmann::json::parse(read_file(golden + "gpt2.json"));
    const auto refused = [&](const char* key, const nlohmann::json& value, const char* message) {
        TemporaryDirectory dir;
        nlohmann::json j = original;
        j[key] = value;
        write_file(dir / "tokenizer.json", j.dump());
        expect_error([&] { read_hf_tokenizer(dir / "", 1 << 20); }, {"tokenizer.json", message, "--weights-only"});
    };
    const nlohmann::json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
    refused("normalizer", {{"type", "Lowercase"}}, "does not know its normalizer");
    refused("pre_tokenizer", bytes, "does not know how it cuts text into words");
    refused("pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {{{"type", "Punctuation"}}, bytes}}},
            "does not know its pre-tokenizer");
}

// A tokenizer.json with Llama 2's normalizer and decoder around its model.
nlohmann::json with_steps(const std::string& file) {
    auto j = nlohmann::json::parse(read_file(file));
    const nlohmann::json space = {{"String", " "}}, symbol = {{"String", "\u2581"}};
    j["normalizer"] = {
        {"type", "Sequence"},
        {"normalizers",
         {{{"type", "Prepend"}, {"prepend", "\u2581"}}, {{"type", "Replace"}, {"pattern", space}, {"content", "\u2581"}}}}};
    j["decoder"] = {{"type", "Sequence"},
                    {"decoders",
                     {{{"type", "Replace"}, {"pattern", symbol}, {"content", " "}},
                      {{"type", "ByteFallback"}},
                      {{"type", "Fuse"}},
                      {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}};
    j["added_tokens"].erase(4);  // matched in normalized text
    return j;
}

// SentencePiece models, and the same as tokenizer.json, whose merges become scores.
TEST(GgufTokenizer, OfCharacters) {
    for (const auto& [name, model] : {std::pair{"characters_bpe.model", "llama"},
                                      {"characters_bpe.json", "llama"},
                                      {"characters_unigram.model", "t5"},
                                      {"characters_unigram.json", "t5"}}) {
        SCOPED_TRACE(name);
        TemporaryDirectory dir;
        const bool json = std::string(name).find(".json") != std::string::npos;
        if (json) write_file(dir / "tokenizer.json", with_steps(golden + name).dump());
        else write_file(dir / "tokenizer.model", read_file(golden + name));
        const GgufTokenizer t = comes_back(dir, read_file(golden + "text.txt"));
        EXPECT_EQ(t.model, model);
        EXPECT_EQ(t.scores.size(), t.tokens.size());
        EXPECT_GE(t.unknown, 0);
        EXPECT_TRUE(std::filesystem::exists(dir / "back/tokenizer.model"));
    }
    // Tokens added to a model.
    TemporaryDirectory more;
    write_file(more / "tokenizer.model", read_file(golden + "characters_bpe.model"));
    write_file(more / "added_tokens.json", R"({"<|im_end|>": 500, "<think>": 501})");
    write_file(more / "tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
    const GgufTokenizer t = comes_back(more, read_file(golden + "text.txt"));
    EXPECT_EQ(t.eos, 500);
    EXPECT_EQ(t.tokens[501], "<think>");
    EXPECT_EQ(t.kinds[500], SentencePieceModel::control);
    EXPECT_EQ(t.kinds[501], SentencePieceModel::user_defined);
    // Merges that SentencePiece would not do.
    TemporaryDirectory dir;
    nlohmann::json j = with_steps(golden + "characters_bpe.json");
    j["model"]["merges"].erase(j["model"]["merges"].size() - 1);
    write_file(dir / "tokenizer.json", j.dump());
    expect_error([&] { read_hf_tokenizer(dir / "", 1 << 20); }, {"does not follow SentencePiece's rules"});
}

// The file's end-of-turn tokens also end generated text.
TEST(GgufTokenizer, EndsOfTurns) {
    TemporaryDirectory dir;
    ModelConfig c = tiny("llama");
    c.V = 600;
    pad_vocabulary(c, 1);
    write_tiny(dir / "model", c, read_file(golden + "llama3.json"));
    run_export(dir / "model", dir / "x.gguf", "bf16");
    const std::string whole = read_file(dir / "x.gguf");
    const auto ends = [&](const std::string& file, const std::vector<uint32_t>& more) {
        std::string inserted;
        const auto text = [&](const std::string& s) { inserted += bytes_of<uint64_t>(s.size()) + s; };
        const char* const keys[] = {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
        for (size_t i = 0; i < more.size(); i++) {
            text(keys[i]);
            inserted += bytes_of<uint32_t>(4) + bytes_of<uint32_t>(more[i]);
        }
        text("filler");
        inserted += bytes_of<uint32_t>(8);
        text(std::string((32 - (inserted.size() + 8) % 32) % 32, 'x'));  // the tensors stay aligned
        std::string changed = whole;
        changed.replace(16, 8, bytes_of<uint64_t>((unsigned char)whole[16] + more.size() + 1));  // fewer than 250
        changed.insert(24, inserted);
        write_file(dir / "y.gguf", changed);
        run_import(dir / "y.gguf", dir / file);
        return nlohmann::json::parse(read_file(dir / file + "/generation_config.json")).at("eos_token_id");
    };
    EXPECT_EQ(ends("a", {}), 0);
    EXPECT_EQ(ends("b", {0}), 0);
    EXPECT_EQ(ends("c", {7, 5}), nlohmann::json({0, 7, 5}));
    EXPECT_EQ(model_texts(dir / "c", nullptr).end_ids.size(), 6u);  // of both files
    EXPECT_EQ(ends("d", {600, 5}), nlohmann::json({0, 5}));
}

// For a model with end-of-turn tokens they are written: first the template's, then generation_config.json's.
TEST(GgufTokenizer, EndsOfTurnsAreWritten) {
    nlohmann::json j = nlohmann::json::parse(read_file(golden + "gpt2.json"));
    const auto add = [&](int id, const char* token) {
        j["added_tokens"].push_back({{"id", id}, {"content", token}, {"special", true}});
    };
    add(600, "<|im_start|>");
    add(601, "<|im_end|>");
    ModelConfig c = tiny("llama");
    c.V = 602;
    pad_vocabulary(c, 1);
    TemporaryDirectory dir;
    write_tiny(dir / "model", c, j.dump());
    const auto ends = [&](const std::string& jinja, const char* generation, int eos = 0) {
        write_file(dir / "model/chat_template.jinja", jinja);
        write_file(dir / "model/generation_config.json", generation);
        ExportOptions o;
        o.model = dir / "model";
        o.gguf = dir / "x.gguf";
        o.overwrite = true;
        World world = World::join();
        EXPECT_EQ(export_command(world, o), 0);
        const GgufTokenizer t = read_gguf_tokenizer(GgufReader(o.gguf).metadata(), o.gguf);
        EXPECT_EQ(t.eos, eos);
        return std::vector<int>{t.eot, t.eom};
    };
    using Ints = std::vector<int>;
    EXPECT_EQ(ends("{{ messages }}", "{}"), (Ints{-1, -1}));
    EXPECT_EQ(ends("{{ messages }}", R"({"eos_token_id": [0, 7, 5]})"), (Ints{-1, 7}));
    EXPECT_EQ(ends("{{ messages }}", R"({"eos_token_id": -1})"), (Ints{-1, -1})) << "with a warning";
    EXPECT_EQ(ends(chat_template_called("chatml")->jinja, "{}"), (Ints{601, -1}));
    EXPECT_EQ(ends(chat_template_called("chatml")->jinja, R"({"eos_token_id": [7, 601, 0]})"), (Ints{601, 7}));
    EXPECT_EQ(ends(chat_template_called("plain")->jinja, "{}"), (Ints{0, -1}));
    // If the tokenizer's end token ends a turn, the other one ends a document.
    write_file(dir / "model/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
    EXPECT_EQ(ends(chat_template_called("chatml")->jinja, R"({"eos_token_id": [601, 0]})", 601), (Ints{601, 0}));
}

TEST(GgufTokenizer, RefusesDamage) {
    const nlohmann::json whole = {{"tokenizer.ggml.model", "llama"},
                                  {"tokenizer.ggml.tokens", {"<unk>", "a"}},
                                  {"tokenizer.ggml.scores", {0.0, -1.0}},
                                  {"tokenizer.ggml.token_type", {2, 1}}};
    EXPECT_EQ(read_gguf_tokenizer(whole, "x.gguf").tokens.size(), 2u);
    EXPECT_TRUE(read_gguf_tokenizer({{"tokenizer.ggml.model", "none"}}, "x.gguf").model.empty());
    struct Damage {
        const char *key, *message;
        nlohmann::json value;
    };
    for (const auto& [key, message, value] : {Damage{"model", "its tokenizer has the unsupported kind 'bert'", "bert"},
                                              {"model", "its tokenizer is damaged", 3},
                                              {"tokens", "its tokenizer is damaged", {"a", 1}},
                                              {"scores", "it has 2 tokens, 2 types and 1 scores", {1.0}},
                                              {"token_type", "2 tokens, 3 types", {1, 1, 1}},
                                              {"add_bos_token", "its tokenizer is damaged", "yes"}}) {
        nlohmann::json damaged = whole;
        damaged[std::string("tokenizer.ggml.") + key] = value;
        expect_error([&] { read_gguf_tokenizer(damaged, "x.gguf"); }, {"x.gguf", message});
    }
    nlohmann::json odd = whole;
    odd["tokenizer.ggml.model"] = "gpt2";
    odd["tokenizer.ggml.pre"] = "viking";
    expect_error([&] { read_gguf_tokenizer(odd, "x.gguf"); }, {"'viking' in llama.cpp, is not supported; supported are gpt-2"});
}

}  // namespace test_gguf
