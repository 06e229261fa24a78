// The choice of the matrix unit: the fastest by measured, cached rates; the user's choice and a checkpoint's have priority;
// ranks on CPUs of the same model agree.
#include <gtest/gtest.h>

#include <fstream>

#include "../llmc/cpu/attention.h"
#include "../llmc/cpu/matmul.h"
#include "../llmc/cpu/unit_choice.h"
#include "testing.h"

namespace test_unit_choice {

using namespace test;
using cpu::AnyUnit;
using cpu::Products;
using cpu::detail::UnitRates;

// A cache folder of its own, and no unit from the environment.
struct UnitChoice : testing::Test {
    std::string folder = testing::TempDir() + "unit_choice", file = folder + "/train_gpt/matrix_unit.json";
    std::optional<std::string> cache, unit;
    static std::optional<std::string> exchange(const char* name, const std::optional<std::string>& value) {
        const char* before = getenv(name);
        const std::optional<std::string> old = before ? std::optional<std::string>(before) : std::nullopt;
        if (value) setenv(name, value->c_str(), 1);
        else unsetenv(name);
        return old;
    }
    void SetUp() override {
        std::filesystem::remove_all(folder);
        cache = exchange("XDG_CACHE_HOME", folder);
        unit = exchange("TRAIN_GPT_MATRIX_UNIT", std::nullopt);
    }
    void TearDown() override {
        exchange("XDG_CACHE_HOME", cache);
        exchange("TRAIN_GPT_MATRIX_UNIT", unit);
        std::filesystem::remove_all(folder);
    }
};

namespace {

const Products kinds[] = {Products::layers, Products::attention};

std::vector<std::string> alone(const std::string& mine) { return {mine}; }

std::vector<std::string> choose(const std::string& asked = "", const std::vector<std::string>& before = {}) {
    cpu::Ctx ctx(1);
    const auto record = cpu::choose_matrix_unit(ctx, asked, before, 0, alone);
    EXPECT_EQ(record, (std::vector<std::string>{cpu::detail::cpu_model(), name_of(ctx.layers), name_of(ctx.attention)}));
    EXPECT_GT(ctx.layers_rate, 0);
    EXPECT_GT(ctx.attention_rate, 0);
    return record;
}

// All units at the same rate, except one faster unit.
UnitRates rates_with_best(Products kind, const std::string& best) {
    UnitRates rates;
    for (const AnyUnit unit : cpu::matrix_units<floatX>(kind)) rates[name_of(unit)] = 1e9;
    rates.at(best) = 2e9;
    return rates;
}
// Cached rates in which portable is the fastest.
void keep_portable(const std::string& file) {
    nlohmann::json kept;
    for (const Products kind : kinds) kept[cpu::detail::rates_key(kind)] = rates_with_best(kind, "portable");
    std::filesystem::create_directories(std::filesystem::path(file).parent_path());
    std::ofstream(file) << kept;
}

}  // namespace

TEST_F(UnitChoice, FastestOfTheRates) {
    for (const Products kind : kinds) {
        const auto units = cpu::matrix_units<floatX>(kind);
        for (const AnyUnit unit : units)
            EXPECT_TRUE(cpu::detail::fastest(units, rates_with_best(kind, name_of(unit))) == unit) << name_of(unit);
        UnitRates equal = rates_with_best(kind, "portable");
        equal.at("portable") = 1e9;
        EXPECT_TRUE(cpu::detail::fastest(units, equal) == units[0]);
    }
}

// Measured again, no other unit is more than a tenth faster: in one of several tries, as the machine may be busy.
TEST_F(UnitChoice, NoOtherUnitIsFaster) {
    for (const Products kind : kinds) {
        double least = 2;
        for (int attempt = 0; attempt < 10 && least > 1.1; attempt++) {
            std::filesystem::remove_all(folder);
            const auto record = choose();
            cpu::Ctx ctx(1);
            const UnitRates again = cpu::detail::measure_units(ctx, kind);
            double best = 0;
            for (const auto& [name, rate] : again) best = std::max(best, rate);
            least = std::min(least, best / again.at(record[kind == Products::layers ? 1 : 2]));
        }
        EXPECT_LE(least, 1.1);
    }
}

TEST_F(UnitChoice, RatesAreKept) {
    choose();
    ASSERT_TRUE(std::filesystem::exists(file));
    const std::string measured = read_whole_file(file);
    choose();
    EXPECT_EQ(read_whole_file(file), measured) << "measured again";

    keep_portable(file);
    EXPECT_EQ(choose()[1], "portable");
    EXPECT_EQ(choose()[2], "portable");
}

// Rates of another CPU or build, damaged ones, or without a unit that now exists.
TEST_F(UnitChoice, KeptRatesThatAreNotOfUse) {
    choose();
    for (const char* text : {"", "{", "[]", "null", "{\"1; bf16\": {\"AVX2\": 1e12}}"}) {
        std::ofstream(file) << text;
        choose();
        const auto kept = nlohmann::json::parse(read_whole_file(file));
        for (const Products kind : kinds) EXPECT_TRUE(kept.contains(cpu::detail::rates_key(kind))) << text;
    }
    const std::string key = cpu::detail::rates_key(Products::layers);
    for (const nlohmann::json& rates :
         {nlohmann::json{{"AVX9000", 1e15}}, nlohmann::json{{"portable", "fast"}}, nlohmann::json{{"portable", nullptr}}}) {
        std::ofstream(file) << nlohmann::json{{key, rates}, {"another CPU", 1}};
        choose();
        const auto kept = nlohmann::json::parse(read_whole_file(file));
        EXPECT_EQ(kept.at(key).size(), cpu::matrix_units<floatX>(Products::layers).size());
        EXPECT_TRUE(kept.contains("another CPU"));
    }
}

TEST_F(UnitChoice, TheUsersComesFirstThenTheCheckpoints) {
    keep_portable(file);
    for (const Products kind : kinds)
        for (const AnyUnit unit : cpu::matrix_units<floatX>(kind)) {
            const std::string name = name_of(unit);
            const size_t place = kind == Products::layers ? 1 : 2;
            EXPECT_EQ(choose(name)[place], name);
            std::vector<std::string> before = {cpu::detail::cpu_model(), "portable", "portable"};
            before[place] = name;
            EXPECT_EQ(choose("", before), before);
            EXPECT_EQ(choose("portable", before)[place], "portable");
            before[0] = "another CPU";
            EXPECT_EQ(choose("", before)[place], "portable");
        }
    const std::string first = name_of(cpu::matrix_units<floatX>(Products::layers)[0]);
    setenv("TRAIN_GPT_MATRIX_UNIT", first.c_str(), 1);  // replaces the fastest
    EXPECT_EQ(choose()[1], first);
    EXPECT_EQ(choose("portable")[1], "portable");
    EXPECT_EQ(choose("", {cpu::detail::cpu_model(), "portable", "portable"})[1], "portable");
    setenv("TRAIN_GPT_MATRIX_UNIT", "AVX9000", 1);
    try {
        choose();
        FAIL() << "AVX9000 was taken";
    } catch (const UsageError& e) {
        EXPECT_EQ(std::string(e.what()).find("TRAIN_GPT_MATRIX_UNIT is 'AVX9000'"), 0u) << e.what();
    }
    unsetenv("TRAIN_GPT_MATRIX_UNIT");
    EXPECT_EQ(choose("", {cpu::detail::cpu_model(), "AVX9000", "AVX9000"})[1], "portable");
    EXPECT_EQ(choose("", {cpu::detail::cpu_model()})[1], "portable");
    for (const char* name : {"AVX9000", "avx2", " "}) {
        try {
            choose(name);
            FAIL() << name << " was taken";
        } catch (const UsageError& e) {
            const std::string text = e.what();
            EXPECT_NE(text.find(format("--matrix-unit is '%s'", name)), std::string::npos) << text;
            EXPECT_NE(text.find(cpu::unit_names<floatX>()), std::string::npos) << text;
        }
    }
}

// The second of three ranks has the first one's CPU model and choice, and measures nothing; the third has another CPU. The
// first one's virtual machine may have other units.
TEST_F(UnitChoice, RanksAgree) {
    const std::string model = cpu::detail::cpu_model();
    for (const bool hidden : {false, true}) {
        int call = 0;
        cpu::Ctx ctx(1);
        const auto all_gather = [&](const std::string& mine) -> std::vector<std::string> {
            if (call++ == 0) return {model, mine, "another CPU"};
            EXPECT_EQ(mine, "{}") << "measured";
            const Products kind = call == 2 ? Products::layers : Products::attention;
            const UnitRates first =
                hidden ? UnitRates{{"portable", 1e9}, {"AVX9000", 1e15}} : rates_with_best(kind, "portable");
            return {nlohmann::json(first).dump(), mine, "{\"AVX9000\":1e15}"};
        };
        const auto record = cpu::choose_matrix_unit(ctx, "", {}, 1, all_gather);
        EXPECT_EQ(record, (std::vector<std::string>{model, "portable", "portable"}));
        EXPECT_FALSE(std::filesystem::exists(file));
    }
}

TEST_F(UnitChoice, WhatTellsCpusApart) {
    const std::string path = testing::TempDir() + "cpuinfo";
    std::ofstream(path)
        << "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) "
           "Xeon(R)\nstepping\t: 8\nmicrocode\t: 0x2b000\ncpu MHz\t\t: 2000.0\n\nprocessor\t: 1\nmodel\t\t: 1\n";
    EXPECT_EQ(cpu::processor_name(path.c_str()), "Intel(R) Xeon(R)");
    EXPECT_EQ(cpu::detail::cpu_model(path.c_str()), "cpu family 6, model 143, Intel(R) Xeon(R), stepping 8, microcode 0x2b000");
    std::ofstream(path) << "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n";
    EXPECT_EQ(cpu::detail::cpu_model(path.c_str()), "CPU implementer 0x41, CPU part 0xd40");
    EXPECT_EQ(cpu::detail::cpu_model("/nowhere"), "unknown");
    EXPECT_EQ(cpu::processor_name(path.c_str()), "Arm Neoverse V1");
    std::ofstream(path) << "processor\t: 0\nCPU implementer\t: 0x61\nCPU part\t: 0x022\n\nModel\t\t: Raspberry\n";
    EXPECT_EQ(cpu::processor_name(path.c_str()), "Raspberry");
    EXPECT_EQ(cpu::processor_name("/nowhere"), "CPU");
}

}  // namespace test_unit_choice
