// Part of op_tests.h: quantized weights. Every bit is compared: NF4 with bitsandbytes (dev/ref/nf4_golden.py), the others
// with the decoder of GGUF files.
#pragma once
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "../../llmc/cpu/threads.h"
#include "../../llmc/model/quantize.h"
#include "inputs.h"

namespace {

float hashed(uint32_t i) {
    uint32_t h = (i + 1) * 2654435761u;
    h ^= h >> 15;
    h *= 3266489917u;
    h ^= h >> 13;
    return (float)((double)(h >> 8) / 0x1p24 - 0.5);
}
std::vector<float> decoded_by_backend(WeightFormat format, const std::vector<uint8_t>& codes, size_t n) {
    backend::Ctx ctx;
    Buffer<uint8_t> in(codes.size(), "codes");
    in.set(codes);
    Buffer<floatX> out(n, "out");
    backend::dequantize_weights(ctx, out.p(), {format, in.p()}, n);
    const std::vector<floatX> x = out.get();
    return {x.begin(), x.end()};
}

}  // namespace

TEST(Quantized, Nf4HasTheBitsOfBitsandbytes) {
    std::ifstream file("test/golden/nf4.json");
    const auto golden = nlohmann::json::parse(file);
    std::vector<float> x(640);
    for (size_t i = 0; i < x.size(); i++) {
        const size_t block = i / 64, k = i % 64;
        x[i] = hashed((uint32_t)i);
        if (block == 1) x[i] *= 0x1p-6f;
        if (block == 2) x[i] = x[i] * x[i] * x[i];
        if (block == 3) x[i] = 0;
        if (block == 4) x[i] = k < 15 ? (nf4_level((int)k) + nf4_level((int)k + 1)) / 2 : -1;
        if (block == 5) x[i] *= 0x1p-140f;
        if (block == 6) x[i] *= 0x1p100f;
        if (block == 7 && k > 0) x[i] = 0;
        if (block == 8) x[i] = bf16(x[i]);
    }
    std::vector<uint8_t> codes(QuantizedWeights::bytes(WeightFormat::nf4, x.size()));
    ASSERT_TRUE(quantize_weights(WeightFormat::nf4, x.data(), x.size(), codes.data()));
    const std::string wanted = golden.at("codes");
    for (size_t i = 0; i < x.size() / 2; i++)
        ASSERT_EQ(codes[i], std::stoi(wanted.substr(2 * i, 2), nullptr, 16)) << "byte " << i;
    const uint8_t* const scales = codes.data() + QuantizedWeights::code_bytes(WeightFormat::nf4, x.size());
    const std::vector<int32_t> expected_scales = golden.at("scales");
    EXPECT_EQ(memcmp(scales, expected_scales.data(), expected_scales.size() * 4), 0);
    const std::vector<float> decoded = decoded_by_backend(WeightFormat::nf4, codes, x.size());
    const bool narrow = sizeof(floatX) == 2;
    for (size_t i = 0; i < x.size(); i++) {
        uint32_t bits;
        memcpy(&bits, &decoded[i], 4);
        const uint32_t expected =
            narrow ? (uint32_t)golden.at("bf16").at(i).get<int>() << 16 : (uint32_t)golden.at("fp32").at(i).get<int>();
        ASSERT_EQ(bits, expected) << "element " << i;
    }
}

// Two groups of scales, the second a part of one.
TEST(Quantized, DoubleQuantizationHasTheBitsOfBitsandbytes) {
    std::ifstream file("test/golden/nf4.json");
    const auto golden = nlohmann::json::parse(file).at("double");
    for (int code = 0; code < 256; code++) {
        const float level = dynamic_level(code);
        int32_t bits;
        memcpy(&bits, &level, sizeof bits);
        EXPECT_EQ(bits, golden.at("levels").at((size_t)code).get<int32_t>()) << code;
    }
    const size_t blocks = 300, n = 64 * blocks;
    std::vector<float> x(n);
    for (size_t i = 0; i < n; i++) x[i] = hashed((uint32_t)i) * (float)(1 + i / 64 % 7);
    std::vector<uint8_t> codes(QuantizedWeights::bytes(WeightFormat::nf4_double, n));
    ASSERT_TRUE(quantize_weights(WeightFormat::nf4_double, x.data(), n, codes.data()));
    const DoubleScales scales = {codes.data() + QuantizedWeights::code_bytes(WeightFormat::nf4_double, n), blocks};
    const std::vector<int> expected_codes = golden.at("codes");
    const std::vector<int32_t> factors = golden.at("factors_and_mean"), expected = golden.at("scales");
    EXPECT_EQ(std::vector<int>(scales.codes, scales.codes + blocks), expected_codes);
    EXPECT_EQ(memcmp(scales.factors(), factors.data(), factors.size() * sizeof(float)), 0);
    const std::vector<float> decoded = decoded_by_backend(WeightFormat::nf4_double, codes, n);
    for (size_t i = 0; i < n; i++) {
        float scale;
        memcpy(&scale, &expected[i / 64], sizeof scale);
        ASSERT_EQ(decoded[i], (float)(floatX)(nf4_level(codes[i / 2] >> (i % 2 ? 0 : 4) & 15) * scale)) << i;
    }
}

TEST(Quantized, OtherFormatsHaveTheBitsOfGgufFiles) {
    for (const WeightFormatRow& row : weight_formats) {
        if (row.block == 1 || row.scale_bytes > 0) continue;
        const GgufType type = gguf_type_of(row.value);
        for (const size_t blocks : {(size_t)1, (size_t)33, (size_t)700}) {
            const size_t n = blocks * row.block;
            std::vector<uint8_t> codes(QuantizedWeights::bytes(row.value, n));
            if (row.encodes) {
                std::vector<float> x(n);
                for (size_t i = 0; i < n; i++) x[i] = hashed((uint32_t)i) * (i / 32 % 3 ? 0.1f : i / 32 % 5 ? 1e-7f : 0);
                ASSERT_TRUE(quantize_weights(row.value, x.data(), n, codes.data()));
            } else {
                for (size_t i = 0; i < codes.size(); i++) codes[i] = (uint8_t)(256 * (hashed((uint32_t)i) + 0.5f));
                for (size_t i = 0; i < blocks; i++)
                    for (const size_t high : {1, 3}) codes[i * row.code_bytes + high] &= 0xbf;  // scales are finite
            }
            std::vector<float> expected(n);
            dequantize(type, (const char*)codes.data(), blocks, expected.data());
            for (float& e : expected) e = (float)(floatX)e;
            EXPECT_EQ(decoded_by_backend(row.value, codes, n), expected) << row.word << ", " << n;
        }
        const std::vector<float> large(row.block, 1e9f);
        std::vector<uint8_t> codes(QuantizedWeights::bytes(row.value, row.block));
        if (row.encodes) {
            EXPECT_FALSE(quantize_weights(row.value, large.data(), row.block, codes.data())) << "the scale exceeds fp16";
        }
    }
}

// Small weights have scales that are denormal in fp16, also where denormal floats are zero, as in the program.
TEST(Quantized, KeepsSmallScales) {
    std::thread([] {
        cpu::flush_denormals();
        for (const WeightFormatRow& row : weight_formats) {
            if (row.value == WeightFormat::none || !row.encodes) continue;
            std::vector<float> x(row.block);
            for (size_t i = 0; i < x.size(); i++) x[i] = 2e-3f * hashed((uint32_t)i);
            std::vector<uint8_t> codes(QuantizedWeights::bytes(row.value, x.size()));
            ASSERT_TRUE(quantize_weights(row.value, x.data(), x.size(), codes.data()));
            const std::vector<float> decoded = decoded_by_backend(row.value, codes, x.size());
            for (size_t i = 0; i < x.size(); i++) EXPECT_NEAR(decoded[i], x[i], 2e-4f) << row.word;
        }
    }).join();
}

TEST(Quantized, ProductsHaveTheBitsOfDecodedWeights) {
    const int IC = 256, OC = 96;
    const size_t n = (size_t)IC * OC;
    backend::Ctx ctx;
    for (const auto& [format, word, encodes, block, code_bytes, scale_bytes] : weight_formats) {
        if (format == WeightFormat::none || !encodes) continue;
        std::vector<float> w(n);
        for (size_t i = 0; i < n; i++) w[i] = hashed((uint32_t)i);
        std::vector<uint8_t> codes(QuantizedWeights::bytes(format, n));
        ASSERT_TRUE(quantize_weights(format, w.data(), n, codes.data()));
        Buffer<uint8_t> coded(codes.size(), "codes");
        coded.set(codes);
        const QuantizedWeights weight = {format, coded.p()};
        Buffer<floatX> dequantized(n, "dequantized"), bias(OC, "bias");
        backend::dequantize_weights(ctx, dequantized.p(), weight, n);
        std::vector<floatX> numbers(OC);
        for (int i = 0; i < OC; i++) numbers[(size_t)i] = hashed((uint32_t)i + 7);
        bias.set(numbers);
        for (const int N : {1, 2, 3, 5, 8, 33}) {
            std::vector<floatX> x((size_t)N * IC);
            for (size_t i = 0; i < x.size(); i++) x[i] = hashed((uint32_t)i + 100);
            Buffer<floatX> inp(x.size(), "inp"), expected((size_t)N * OC, "expected"), out((size_t)N * OC, "out");
            inp.set(x);
            if (!backend::decodes_rows(ctx, N)) continue;
            for (const floatX* b : {(const floatX*)nullptr, (const floatX*)bias.p()}) {
                backend::linear_forward(ctx, expected.p(), inp.p(), dequantized.p(), b, N, IC, OC);
                backend::quantized_linear_forward(ctx, out.p(), OC, inp.p(), weight, b, N, IC, OC);
                EXPECT_EQ(memcmp(expected.get().data(), out.get().data(), (size_t)N * OC * sizeof(floatX)), 0) << N;
            }
        }
    }
}

// A tensor-parallel rank's columns, in whole blocks, have the codes of the whole matrix.
TEST(Quantized, PartsOfRowsHaveTheCodesOfTheWhole) {
    const size_t rows = 3, columns = 512, part = 256;
    for (const WeightFormat format : {WeightFormat::nf4, WeightFormat::q4_k, WeightFormat::q6_k, WeightFormat::q8_0}) {
        std::vector<float> whole(rows * columns), right;
        for (size_t i = 0; i < whole.size(); i++) whole[i] = hashed((uint32_t)i);
        for (size_t r = 0; r < rows; r++)
            right.insert(right.end(), whole.begin() + (ptrdiff_t)(r * columns + part),
                         whole.begin() + (ptrdiff_t)((r + 1) * columns));
        const auto decoded = [&](const std::vector<float>& x) {
            std::vector<uint8_t> codes(QuantizedWeights::bytes(format, x.size()));
            EXPECT_TRUE(quantize_weights(format, x.data(), x.size(), codes.data()));
            return decoded_by_backend(format, codes, x.size());
        };
        const std::vector<float> all = decoded(whole), some = decoded(right);
        for (size_t i = 0; i < some.size(); i++) ASSERT_EQ(some[i], all[i / part * columns + part + i % part]);
    }
}
