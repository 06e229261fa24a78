// safetensors files byte by byte, every way in which one can be damaged, and model directories: names, layouts, and
// bit-exact round trips.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <tuple>

#include "../llmc/checkpoint/checkpoint.h"
#include "files.h"
#include "../llmc/checkpoint/upcycling.h"
#include "model_files.h"
#include "testing.h"

namespace test_safetensors {

using test::array_of;
using test::bytes_of;
using test::expect_error;
using test::read_file;
using test::TemporaryDirectory;
using test::write_file;

// A model directory without training state.
void write_model(const std::string& dir, const ModelConfig& c, const ParameterTable& table, const floatX* params,
                 const ModelTexts& texts) {
    publish_directory(dir, [&](const std::string& temporary) { write_model_files(temporary, c, table, params, texts); });
}

// Points p's tensors into a buffer that is laid out by the table.
template <class E>
void bind_parameters(const ModelConfig& c, const ParameterTable& table, Params<E>& p, E* buffer) {
    bind_rows(c, table, p, [&](size_t row) { return buffer + table.rows[row].offset; });
}

// A file with exactly this header and these bytes of data.
std::string file_of(const std::string& header, const std::string& data) {
    return bytes_of<uint64_t>(header.size()) + header + data;
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

template <class E>
std::vector<E> values(const SafetensorsReader& file, const std::string& name) {
    const TensorView* t = file.find(name);
    if (!t) {
        ADD_FAILURE() << "no tensor " << name;
        return {};
    }
    std::vector<E> x(t->elements());
    file.read_as(*t, x.data());
    return x;
}

// ---- bytes -----------------------------------------------------------------------------------------------------------------
TEST(Safetensors, WritesTheseBytes) {
    TemporaryDirectory dir;
    const std::vector<float> a = {1, 2, 3, 4, 5, 6};
    const std::vector<bf16> b = {bf16(1.0f), bf16(-2.0f)};
    SafetensorsWriter writer(dir / "x.safetensors");
    writer.declare("b", "BF16", {2});
    writer.declare("alpha", "F32", {2, 3});
    writer.write("b", b.data(), 4);
    writer.write("alpha", a.data(), 24);
    writer.finish();
    const std::string header =
        "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
        "\"alpha\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]}}      ";
    EXPECT_EQ(header.size() % 8, 0u);
    EXPECT_EQ(read_file(dir / "x.safetensors"), file_of(header, array_of<uint16_t>({0x3f80, 0xc000}) + array_of(a)));
    EXPECT_EQ(dir.names(), (std::set<std::string>{"x.safetensors"}));
}

// Into a directory under the usual name; nothing without finish(); a file without tensors.
TEST(Safetensors, WriterFinishesOrLeavesNothing) {
    TemporaryDirectory dir;
    const float x = 1;
    {
        SafetensorsWriter writer(dir / "");
        writer.declare("x", "F32", {1});
        writer.write("x", &x, 4);
    }
    EXPECT_TRUE(dir.names().empty());
    SafetensorsWriter(dir / "").finish();
    EXPECT_EQ(dir.names(), (std::set<std::string>{"model.safetensors"}));
    EXPECT_TRUE(SafetensorsReader::open(dir / "model.safetensors").tensors().empty());
}

// Output of Hugging Face's safetensors.numpy.save for
//   {"f": float32 [[1], [-2.5], [0.1]], "half": float16 [1, -0.5, 65504], "empty": float32 (0, 4), "scalar": int64 -3,
//    "d": float64 [0.1], "b": bool [True]} with metadata {"format": "pt"}.
const std::string python_header =
    "{\"__metadata__\":{\"format\":\"pt\"},\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
    "\"d\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[8,16]},\"empty\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_"
    "offsets\":[16,16]},"
    "\"f\":{\"dtype\":\"F32\",\"shape\":[3,1],\"data_offsets\":[16,28]},\"half\":{\"dtype\":\"F16\",\"shape\":[3],\"data_"
    "offsets\":[28,34]},"
    "\"b\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[34,35]}} ";
const std::string python_data(
    "\xfd\xff\xff\xff\xff\xff\xff\xff\x9a\x99\x99\x99\x99\x99\xb9\x3f\x00\x00\x80\x3f\x00\x00\x20\xc0\xcd\xcc\xcc"
    "\x3d\x00\x3c\x00\xb8\xff\x7b\x01",
    35);

TEST(Safetensors, ReadsWhatPythonWrote) {
    TemporaryDirectory dir;
    ASSERT_EQ(python_header.size(), 376u);
    write_file(dir / "p.safetensors", file_of(python_header, python_data));
    const SafetensorsReader file = SafetensorsReader::open(dir / "p.safetensors");
    EXPECT_EQ(file.tensors().size(), 6u);
    EXPECT_EQ(file.find("__metadata__"), nullptr);
    EXPECT_EQ(file.find("nothing"), nullptr);
    EXPECT_EQ(file.find("f")->shape, (std::vector<int64_t>{3, 1}));
    EXPECT_EQ(file.find("f")->dtype, "F32");
    EXPECT_EQ(values<float>(file, "f"), (std::vector<float>{1, -2.5, 0.1f}));
    EXPECT_EQ(values<float>(file, "half"), (std::vector<float>{1, -0.5, 65504}));
    EXPECT_EQ(file.find("empty")->shape, (std::vector<int64_t>{0, 4}));
    EXPECT_TRUE(values<float>(file, "empty").empty());
    EXPECT_TRUE(file.find("scalar")->shape.empty());
    EXPECT_EQ(values<float>(file, "scalar"), std::vector<float>{-3});
    EXPECT_EQ(values<double>(file, "d"), std::vector<double>{0.1});
    EXPECT_EQ(values<float>(file, "d"), std::vector<float>{0.1f});
    expect_error([&] { values<float>(file, "b"); }, {"BOOL", "supported are", "BF16"});
}

TEST(Safetensors, EveryType) {
    TemporaryDirectory dir;
    // At an odd address, as headers may have any length.
    const auto read = [&](const std::string& dtype, size_t n, const std::string& data) {
        const std::string end = std::to_string(data.size());
        std::string header = "{" + tensor("x", dtype, "[" + std::to_string(n) + "]", "[0," + end + "]") + "}";
        if (header.size() % 2 == 0) header += " ";
        write_file(dir / "x.safetensors", file_of(header, data));
        return SafetensorsReader::open(dir / "x.safetensors");
    };
    const std::vector<float> floats = {0, -0.0f, 1.00390625f, 3.4e38f, 1e-45f, -INFINITY};
    const SafetensorsReader f32 = read("F32", floats.size(), array_of(floats));
    test::expect_same_bits(values<float>(f32, "x"), floats, "F32");
    // to bf16: to nearest, ties to even
    const std::vector<bf16> narrow = values<bf16>(f32, "x");
    for (size_t i = 0; i < floats.size(); i++) EXPECT_EQ(narrow[i].bits, bf16(floats[i]).bits);
    EXPECT_EQ(narrow[2].bits, 0x3f80);

    std::vector<uint16_t> all(65536);
    for (size_t i = 0; i < all.size(); i++) all[i] = (uint16_t)i;
    const std::vector<bf16> same = values<bf16>(read("BF16", all.size(), array_of(all)), "x");
    const std::vector<float> wide = values<float>(read("BF16", all.size(), array_of(all)), "x");
    const std::vector<float> half = values<float>(read("F16", all.size(), array_of(all)), "x");
    for (size_t i = 0; i < all.size(); i++) {
        uint32_t bits;
        memcpy(&bits, &wide[i], 4);
        ASSERT_EQ(bits, (uint32_t)i << 16);
        const bool nan = std::isnan(wide[i]);
        ASSERT_EQ(same[i].bits, nan ? 0x7fff : (int)i);
        // IEEE 754 binary16: sign, 5 bits of exponent with bias 15, 10 bits of mantissa
        const int exponent = (int)i >> 10 & 31, mantissa = (int)i & 1023;
        double x = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
        if (exponent == 31) x = mantissa == 0 ? (double)INFINITY : NAN;
        if (i & 0x8000) x = -x;
        ASSERT_TRUE(half[i] == x || (std::isnan(half[i]) && std::isnan(x))) << i;
        ASSERT_EQ(std::signbit(half[i]), (i & 0x8000) != 0) << i;
    }
    EXPECT_EQ(values<double>(read("F64", 2, array_of<double>({0.1, -1e300})), "x"), (std::vector<double>{0.1, -1e300}));
    EXPECT_EQ(values<float>(read("I32", 2, array_of<int32_t>({7, -8})), "x"), (std::vector<float>{7, -8}));
    EXPECT_EQ(values<double>(read("I64", 1, array_of<int64_t>({int64_t{1} << 40})), "x"), std::vector<double>{0x1p40});
    for (const char* dtype : {"U8", "I8", "F8_E4M3", "F8_E5M2"})
        expect_error([&] { values<float>(read(dtype, 3, "abc"), "x"); }, {dtype, "cannot be read"});
}

// ---- damaged files ---------------------------------------------------------------------------------------------------------
class Damaged : public ::testing::Test {
protected:
    void refuse(const std::string& bytes, const std::vector<std::string>& parts) {
        write_file(dir_ / "bad.safetensors", bytes);
        std::vector<std::string> all = {dir_ / "bad.safetensors"};
        all.insert(all.end(), parts.begin(), parts.end());
        expect_error([&] { SafetensorsReader::open(dir_ / "bad.safetensors"); }, all);
    }
    void refuse_header(const std::string& header, const std::vector<std::string>& parts, size_t data_bytes = 16) {
        refuse(file_of(header, std::string(data_bytes, '\0')), parts);
    }
    TemporaryDirectory dir_;
};

TEST_F(Damaged, TruncatedAtEveryByte) {
    const std::string good = file_of(python_header, python_data);
    for (size_t n = 0; n < good.size(); n++) refuse(good.substr(0, n), {});
    refuse(good.substr(0, 7), {"7 bytes", "at least 8"});
    refuse(good.substr(0, 100), {"truncated"});
    refuse(good.substr(0, good.size() - 1), {"'b'", "truncated"});
    refuse(good + "x", {"1 bytes", "no tensor"});
}

TEST_F(Damaged, HeaderLengths) {
    const std::string good = file_of(python_header, python_data);
    for (const uint64_t length :
         {UINT64_MAX, UINT64_MAX - 7, uint64_t{1} << 63, (uint64_t)good.size() - 7, uint64_t{100000001}})
        refuse(bytes_of(length) + good.substr(8), {std::to_string(length), "truncated or not a safetensors file"});
    refuse(bytes_of<uint64_t>(0) + good.substr(8), {"header is empty"});
    refuse("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5\n", {"Git LFS pointer", "lfs pull"});
}

TEST_F(Damaged, NoJson) {
    refuse_header("", {"header is empty"});
    for (const std::string header : {"garbage", "{", "{\"a\":", "{\"a\":1,}", "{} {}", "\xff\xfe{}", "nul", "{'a':1}"})
        refuse_header(header, {"header is not valid"});
    refuse_header(std::string(1 << 20, '['), {"header is not valid"});  // deep nesting uses no stack
    refuse_header(std::string(1 << 16, '[') + std::string(1 << 16, ']'), {"header is not valid", "nested"});
    for (const char* header : {"[]", "null", "3", "\"text\""}) refuse_header(header, {"not a JSON object"});
    refuse_header("{\"a\":" + std::string(1 << 16, '[') + std::string(1 << 16, ']') + "}", {"header is not valid"});
}

// One or two bytes of a file must not become a hundred in memory.
TEST_F(Damaged, MoreValuesThanAnyModelHas) {
    const int n = 20000001;
    std::string list(2 * n + 10, '0');
    for (size_t i = 1; i < list.size(); i += 2) list[i] = ',';
    list.back() = '0';
    refuse_header("{\"a\":[" + list + "]}", {"header is not valid", "the maximum is 20000000"});
    refuse_header(std::string(n, '[') + std::string(n, ']'), {"header is not valid", "the maximum is 20000000"});
}

TEST_F(Damaged, Entries) {
    for (const char* entry : {"1", "null", "[]", "{}", "{\"dtype\":\"F32\"}", "{\"dtype\":\"F32\",\"shape\":[4]}",
                              "{\"dtype\":4,\"shape\":[4]}", "{\"shape\":[4],\"data_offsets\":[0,16]}"})
        refuse_header(std::string("{\"a\":") + entry + "}", {"header is not valid"});
    for (const char* dtype : {"", "f32", "F4", "float32"})
        refuse_header("{" + tensor("a", dtype, "[4]", "[0,16]") + "}", {"'a'", "unknown type '" + std::string(dtype) + "'"});
    for (const char* shape : {"[-4]", "[4.0]", "[\"4\"]", "[null]", "[[4]]", "4", "{\"rows\":-1}"})
        refuse_header("{" + tensor("a", "F32", shape, "[0,16]") + "}", {"'a'", "malformed shape"});
    for (const char* offsets :
         {"[]", "[0]", "[0,8,16]", "[-16,0]", "[0,16.0]", "[\"0\",\"16\"]", "null", "{\"0\":0,\"1\":16}", "16"})
        refuse_header("{" + tensor("a", "F32", "[4]", offsets) + "}", {"'a'", "malformed data_offsets"});
}

TEST_F(Damaged, Shapes) {
    const auto with_shape = [&](const char* shape, const char* offsets, const std::string& what) {
        refuse_header("{" + tensor("a", "F32", shape, offsets) + "}", {"'a'", what});
    };
    with_shape("[3]", "[0,16]", "16 bytes where its shape and type need 12");
    with_shape("[5]", "[0,16]", "16 bytes where its shape and type need 20");
    with_shape("[]", "[0,16]", "need 4");
    with_shape("[0]", "[0,16]", "need 0");
    with_shape("[2,3]", "[0,16]", "need 24");
    // products that are 16 modulo 2^64, or overflow
    with_shape("[4611686018427387908]", "[0,16]", "larger than the file");
    with_shape("[18446744073709551615]", "[0,16]", "larger than the file");
    with_shape("[0,9223372036854775808]", "[0,0]", "larger than the file");
    with_shape("[64,64,64,64,64,64,64,64,64,64,64]", "[0,16]", "larger than the file");
    with_shape("[99999999999999999999999]", "[0,16]", "malformed shape");
}

TEST_F(Damaged, Offsets) {
    const auto with_offsets = [&](const char* offsets, const std::string& what) {
        refuse_header("{" + tensor("a", "F32", "[4]", offsets) + "}", {"'a'", what});
    };
    with_offsets("[16,0]", "truncated or damaged");
    with_offsets("[4,20]", "truncated or damaged");
    with_offsets("[0,18446744073709551615]", "truncated or damaged");
    with_offsets("[18446744073709551600,18446744073709551615]", "truncated or damaged");
    with_offsets("[18446744073709551600,0]", "truncated or damaged");
    const auto two = [&](const char* a, const char* b, const std::string& what, size_t data_bytes) {
        refuse_header("{" + tensor("a", "F32", "[2]", a) + "," + tensor("b", "F32", "[2]", b) + "}", {what}, data_bytes);
        refuse_header("{" + tensor("b", "F32", "[2]", b) + "," + tensor("a", "F32", "[2]", a) + "}", {what}, data_bytes);
    };
    two("[0,8]", "[0,8]", "overlaps", 16);
    two("[0,8]", "[4,12]", "overlaps", 16);
    two("[0,8]", "[7,15]", "overlaps", 16);
    two("[0,8]", "[9,17]", "no tensor", 17);
    two("[1,9]", "[9,17]", "no tensor", 17);
    two("[0,8]", "[8,16]", "no tensor", 17);
}

TEST_F(Damaged, MissingFiles) {
    expect_error([&] { SafetensorsReader::open(dir_ / "nothing.safetensors"); },
                 {dir_ / "nothing.safetensors", "No such file"});
    expect_error([&] { SafetensorsReader::open(dir_ / ""); }, {dir_ / "", "model.safetensors.index.json"});
}

// ---- a model in several files ----------------------------------------------------------------------------------------------
TEST(Index, FilesTogether) {
    TemporaryDirectory dir;
    const auto one = [&](const std::string& name, float x) {
        return file_of("{" + tensor(name, "F32", "[1]", "[0,4]") + "}", bytes_of(x));
    };
    write_file(dir / "1.safetensors", one("a", 1));
    write_file(dir / "2.safetensors", one("b", 2));
    const std::string index = dir / "/model.safetensors.index.json";
    write_file(index, R"({"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})");
    const SafetensorsReader both = SafetensorsReader::open(dir / "");
    EXPECT_EQ(both.tensors().size(), 2u);
    EXPECT_EQ(values<float>(both, "a"), std::vector<float>{1});
    EXPECT_EQ(values<float>(both, "b"), std::vector<float>{2});
    // A single file has priority over an index, which may be left from an earlier download, as in transformers.
    write_file(dir / "model.safetensors", one("a", 3));
    const SafetensorsReader single = SafetensorsReader::open(dir / "");
    EXPECT_EQ(single.tensors().size(), 1u);
    EXPECT_EQ(values<float>(single, "a"), std::vector<float>{3});
    std::filesystem::remove(dir / "model.safetensors");

    const auto refuse = [&](const std::vector<std::string>& parts) {
        expect_error([&] { SafetensorsReader::open(dir / ""); }, parts);
    };
    write_file(dir / "2.safetensors", one("a", 2));
    refuse({"2.safetensors", "'a'", "twice"});
    write_file(index, R"({"weight_map": {"a": "3.safetensors"}})");
    refuse({"3.safetensors", "does not exist", "HINT"});
    write_file(index, R"({"weight_map": {"a": "../secret.safetensors"}})");
    refuse({index, "outside its directory", "../secret.safetensors"});
    write_file(index, R"({"weight_map": {"a": "/etc/passwd"}})");
    refuse({index, "outside its directory"});
    write_file(index, R"({"weight_map": {"a": "x/../../secret.safetensors"}})");
    refuse({index, "outside its directory"});
    ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
    alarm(60);  // instead of waiting forever for the pipe
    write_file(index, R"({"weight_map": {"a": "pipe"}})");
    refuse({"/pipe", "regular file"});
    std::filesystem::remove(index);
    std::filesystem::rename(dir / "pipe", index);
    refuse({index, "regular file"});
    std::filesystem::rename(index, dir / "config.json");
    expect_error([&] { read_config(dir / ""); }, {"config.json", "regular file"});
    alarm(0);
    // A model directory of links, as in Hugging Face's cache.
    std::filesystem::create_directories(dir / "model");
    std::filesystem::create_symlink("../1.safetensors", dir / "model/model.safetensors");
    EXPECT_EQ(SafetensorsReader::open(dir / "model").tensors().size(), 1u);
    const std::string deep = "{\"weight_map\":" + std::string(1 << 18, '[') + std::string(1 << 18, ']') + "}";
    const std::vector<std::string> bad = {"",  "garbage", "[]", "{}", R"({"weight_map": {"a": 3}})", R"({"weight_map": 3})",
                                          deep};
    for (const std::string& text : bad) {
        write_file(index, text);
        refuse({index});
    }
}

// ---- model directories -----------------------------------------------------------------------------------------------------
ModelConfig tiny(const std::string& family, bool tied) {
    ModelConfig c;
    set_family(c, family);
    c.L = 2;
    c.NH = 4;
    c.NKV = family == "llama" ? 2 : 4;
    c.C = 24;
    c.F = family == "llama" ? 40 : 96;
    c.T = 11;
    c.V = 61;
    if (family == "llama") c.tied = tied;
    c.eps = 1e-4;
    c.init_std = 0.03;
    if (family == "llama") c.rope_base = 500000;
    pad_vocabulary(c, 16);
    return c;
}

constexpr const char* file_dtype = sizeof(floatX) == 2 ? "BF16" : "F32";

// Random parameters, with zeros in the padded vocabulary rows and between tensors.
std::vector<floatX> random_parameters(const ModelConfig& c, const ParameterTable& table, uint64_t seed) {
    test::Rng rng(seed);
    std::vector<floatX> params(table.size, floatX(0));
    for (const TensorSpec& spec : table.rows) {
        const size_t n = spec.rows == c.Vp && !spec.vector() ? (size_t)c.V * c.C : spec.size();
        const std::vector<floatX> x = rng.normals<floatX>(n);
        std::copy(x.begin(), x.end(), params.begin() + (long)spec.offset);
    }
    return params;
}

struct Family {
    const char* name;
    bool tied;
};
// A directory with the family's model, written once (syncing to the disk takes most of the time) and copied for each test.
class Model : public ::testing::TestWithParam<Family> {
protected:
    void SetUp() override {
        static std::map<std::string, std::unique_ptr<TemporaryDirectory>> written;
        auto& once = written[c_.family + (c_.tied ? " tied" : "")];
        if (!once) {
            once = std::make_unique<TemporaryDirectory>();
            write_model(*once / "model", c_, table_, params_.data(), {});
            EXPECT_EQ(once->names(), std::set<std::string>{"model"});
        }
        std::filesystem::copy(*once / "model", model_);
    }
    const ModelConfig c_ = tiny(GetParam().name, GetParam().tied);
    const ParameterTable table_{c_};
    const std::vector<floatX> params_ = random_parameters(c_, table_, 1);
    TemporaryDirectory dir_;
    const std::string model_ = dir_ / "model";
};

TEST_P(Model, RoundTrip) {
    std::set<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(model_)) files.insert(entry.path().filename().string());
    EXPECT_EQ(files, (std::set<std::string>{"config.json", "generation_config.json", "manifest.json", "model.safetensors"}));

    ModelConfig c = read_config(model_);
    EXPECT_EQ(c.Vp, 0);  // the reader chooses the padding
    const auto all_but_padding = [](const ModelConfig& m) {
        return std::make_tuple(m.family, m.L, m.C, m.NH, m.NKV, m.F, m.T, m.V, m.norm, m.position, m.activation, m.qkv_bias,
                               m.proj_bias, m.mlp_bias, m.embedding_norm, m.tied, m.eps, m.rope_base, m.init_std);
    };
    EXPECT_TRUE(all_but_padding(c) == all_but_padding(c_));

    // with our padding, and with another one; previous contents of the memory have no effect
    for (const int divisible_by : {16, 1, 100}) {
        pad_vocabulary(c, divisible_by);
        const ParameterTable table(c);
        std::vector<floatX> params(table.size, floatX(7));
        read_parameters(model_, c, table, params.data());
        for (size_t i = 0; i < table.rows.size(); i++) {
            const TensorSpec &ours = table.rows[i], &theirs = table_.rows[i];
            const floatX *x = params.data() + ours.offset, *expected = params_.data() + theirs.offset;
            const size_t n = std::min(ours.size(), theirs.size());
            ASSERT_EQ(memcmp(x, expected, n * sizeof(floatX)), 0) << ours.name;
            for (size_t k = n; k < ours.size(); k++) ASSERT_EQ((double)x[k], 0) << ours.name;
        }
    }
}

// Writing again replaces the directory; a failure leaves the old one and no other files.
TEST_P(Model, ReplacesOrLeavesAlone) {
    const std::string first = read_file(model_ + "/model.safetensors");
    const std::vector<floatX> other = random_parameters(c_, table_, 2);
    write_model(model_, c_, table_, other.data(), {});
    const std::string second = read_file(model_ + "/model.safetensors");
    EXPECT_NE(first, second);
    EXPECT_EQ(dir_.names(), std::set<std::string>{"model"});

    expect_error(
        [&] {
            publish_directory(model_, [](const std::string& temporary) {
                write_file(temporary + "/model.safetensors", "half of a");
                fail("the disk is full");
            });
        },
        {"the disk is full"});
    EXPECT_EQ(dir_.names(), std::set<std::string>{"model"});
    EXPECT_EQ(read_file(model_ + "/model.safetensors"), second);
    expect_error([&] { write_model(dir_ / "model/config.json/x", c_, table_, params_.data(), {}); },
                 {"model/config.json/x", "cannot write"});
}

// transformers' names and shapes.
TEST_P(Model, NamesAndShapes) {
    using Shape = std::vector<int64_t>;
    std::map<std::string, Shape> expected;
    const std::string family = c_.family;
    for (const std::string l : {"0", "1"}) {
        if (family == "llama") {
            const std::string h = "model.layers." + l + ".";
            expected[h + "input_layernorm.weight"] = expected[h + "post_attention_layernorm.weight"] = {24};
            expected[h + "self_attn.q_proj.weight"] = expected[h + "self_attn.o_proj.weight"] = {24, 24};
            expected[h + "self_attn.k_proj.weight"] = expected[h + "self_attn.v_proj.weight"] = {12, 24};
            expected[h + "mlp.gate_proj.weight"] = expected[h + "mlp.up_proj.weight"] = {40, 24};
            expected[h + "mlp.down_proj.weight"] = {24, 40};
            continue;
        }
        const bool gpt2 = family == "gpt2";
        const std::string h = "transformer.h." + l + ".";
        const auto linear = [&](const std::string& name, int64_t out, int64_t in) {
            expected[h + name + ".weight"] = gpt2 ? Shape{in, out} : Shape{out, in};
            expected[h + name + ".bias"] = {out};
        };
        for (const char* norm : {gpt2 ? "ln_1" : "input_layernorm", gpt2 ? "ln_2" : "post_attention_layernorm"})
            expected[h + norm + ".weight"] = expected[h + norm + ".bias"] = {24};
        linear(gpt2 ? "attn.c_attn" : "self_attention.query_key_value", 72, 24);
        linear(gpt2 ? "attn.c_proj" : "self_attention.dense", 24, 24);
        linear(gpt2 ? "mlp.c_fc" : "mlp.dense_h_to_4h", 96, 24);
        linear(gpt2 ? "mlp.c_proj" : "mlp.dense_4h_to_h", 24, 96);
    }
    if (family == "llama") {
        expected["model.embed_tokens.weight"] = {61, 24};
        expected["model.norm.weight"] = {24};
        if (!c_.tied) expected["lm_head.weight"] = {61, 24};
    } else {
        expected["transformer.ln_f.weight"] = expected["transformer.ln_f.bias"] = {24};
        if (family == "gpt2") {
            expected["transformer.wte.weight"] = {61, 24};
            expected["transformer.wpe.weight"] = {11, 24};
        } else
            for (const char* name :
                 {"transformer.word_embeddings_layernorm.weight", "transformer.word_embeddings_layernorm.bias"}) {
                expected[name] = {24};
                expected["transformer.word_embeddings.weight"] = {61, 24};
            }
    }
    const SafetensorsReader file = SafetensorsReader::open(model_);
    std::map<std::string, Shape> found;
    size_t elements = 0;
    for (const auto& [name, t] : file.tensors()) {
        found[name] = t.shape;
        elements += t.elements();
        EXPECT_EQ(t.dtype, file_dtype) << name;
    }
    EXPECT_EQ(found, expected);
    EXPECT_EQ(elements, table_.trained);
}

// The position of single weights in layer 1: our fused projection has rows [q heads | k heads | v heads] with head size 6.
TEST_P(Model, Layouts) {
    const SafetensorsReader file = SafetensorsReader::open(model_);
    std::vector<floatX> params = params_;
    Params<floatX> p;
    bind_parameters(c_, table_, p, params.data());
    const auto& b = p.blocks[1];
    const auto at = [&](const std::string& name) {
        return values<float>(file, (c_.family == "llama" ? "model.layers.1." : "transformer.h.1.") + name);
    };
    if (c_.family == "gpt2") {  // (in, out)
        const std::vector<float> qkv = at("attn.c_attn.weight"), fc2 = at("mlp.c_proj.weight");
        for (int out = 0; out < 72; out++)
            for (int in = 0; in < 24; in++) ASSERT_EQ(qkv[in * 72 + out], (float)b.qkv_w[out * 24 + in]);
        for (int out = 0; out < 24; out++)
            for (int in = 0; in < 96; in++) ASSERT_EQ(fc2[in * 24 + out], (float)b.fc2_w[out * 96 + in]);
        EXPECT_EQ(at("attn.c_attn.bias")[50], (float)b.qkv_b[50]);
    } else if (c_.family == "bloom") {  // rows (head, q k v, element)
        const std::vector<float> qkv = at("self_attention.query_key_value.weight"),
                                 bias = at("self_attention.query_key_value.bias");
        for (int head = 0; head < 4; head++)
            for (int which = 0; which < 3; which++)
                for (int i = 0; i < 6; i++) {
                    const int ours = which * 24 + head * 6 + i, theirs = (head * 3 + which) * 6 + i;
                    ASSERT_EQ(bias[theirs], (float)b.qkv_b[ours]);
                    for (int in = 0; in < 24; in++) ASSERT_EQ(qkv[theirs * 24 + in], (float)b.qkv_w[ours * 24 + in]);
                }
    } else {
        EXPECT_EQ(at("self_attn.q_proj.weight")[23 * 24 + 5], (float)b.qkv_w[23 * 24 + 5]);
        EXPECT_EQ(at("self_attn.k_proj.weight")[3 * 24 + 5], (float)b.qkv_w[(24 + 3) * 24 + 5]);
        EXPECT_EQ(at("self_attn.v_proj.weight")[3 * 24 + 5], (float)b.qkv_w[(36 + 3) * 24 + 5]);
        EXPECT_EQ(at("mlp.gate_proj.weight")[7 * 24 + 1], (float)b.fc1_w[7 * 24 + 1]);
        EXPECT_EQ(at("mlp.up_proj.weight")[7 * 24 + 1], (float)b.fc1_w[(40 + 7) * 24 + 1]);
    }
}

// Files of another float type, and GPT-2's and BLOOM's published files, whose names lack "transformer.".
TEST_P(Model, OtherTypesAndNames) {
    std::filesystem::create_directory(dir_ / "other");
    {
        const SafetensorsReader file = SafetensorsReader::open(model_);
        SafetensorsWriter writer(dir_ / "other");
        const auto short_name = [](const std::string& name) {
            return name.rfind("transformer.", 0) == 0 ? name.substr(12) : name;
        };
        for (const auto& [name, t] : file.tensors()) writer.declare(short_name(name), "F64", t.shape);
        for (const auto& [name, t] : file.tensors()) {
            const std::vector<double> x = values<double>(file, name);
            writer.write(short_name(name), x.data(), 8 * x.size());
        }
        writer.finish();
    }
    std::vector<floatX> params(table_.size, floatX(0));
    read_parameters(dir_ / "other", c_, table_, params.data());
    test::expect_same_bits(params, params_, "parameters");
}

// Drop-Upcycling: half of each expert's dimensions have other numbers, with the mean and deviation of those that they replace.
TEST_P(Model, ExpertsOfADenseModel) {
    if (c_.mlp_bias) return;
    ModelConfig c = c_;
    c.mixture.experts = 4;
    const ParameterTable table(c);
    const auto read = [&](const ParameterTable& to, double ratio, uint64_t seed) {
        std::vector<floatX> params(to.size);
        read_parameters(model_, c, to, params.data());
        redraw_experts(model_, c, to, params.data(), ratio, seed);
        return params;
    };
    const std::vector<floatX> copies = read(table, 0, 5), half = read(table, 0.5, 5);
    test::expect_same_bits(read(table, 0.5, 5), half, "the same seed");
    EXPECT_NE(read(table, 0.5, 6), half);
    std::vector<floatX> plain(table.size);
    read_parameters(model_, c, table, plain.data());
    test::expect_same_bits(copies, plain, "ratio 0");
    Params<const floatX> dense, before, after;
    bind_parameters(c_, table_, dense, params_.data());
    bind_parameters(c, table, before, copies.data());
    bind_parameters(c, table, after, half.data());
    const int F = c.F, C = c.C;
    std::set<std::vector<bool>> different;
    double moved = 0;
    int n_dropped = 0;
    for (int layer = 0; layer < c.L; layer++) {
        const BlockParams<const floatX>&d = dense.blocks[layer], &b = before.blocks[layer], &a = after.blocks[layer];
        for (int e = 0; e < 4; e++) {
            EXPECT_EQ(memcmp(b.fc1_w + e * 2 * F * C, d.fc1_w, sizeof(floatX) * 2 * F * C), 0);
            EXPECT_EQ(memcmp(b.fc2_w + e * F * C, d.fc2_w, sizeof(floatX) * F * C), 0);
            // The numbers of dimension f in matrix k of an expert: gate, up, down.
            const auto number = [&](const BlockParams<const floatX>& p, int k, int f, int i) {
                return (double)(k < 2 ? p.fc1_w[(size_t)(((e * 2 + k) * F + f) * C + i)]
                                      : p.fc2_w[(size_t)((e * C + i) * F + f)]);
            };
            std::vector<bool> dropped((size_t)F);
            for (int k = 0; k < 3; k++) {
                double sum[2] = {}, squares[2] = {};
                int n = 0;
                for (int f = 0; f < F; f++) {
                    int changed = 0;
                    for (int i = 0; i < C; i++) changed += number(a, k, f, i) != number(b, k, f, i);
                    if (k == 0) dropped[(size_t)f] = changed > 0;
                    EXPECT_EQ(dropped[(size_t)f], changed > 0) << "the same dimensions in gate, up and down";
                    EXPECT_TRUE(changed == 0 || changed > C * 3 / 4);
                    for (int i = 0; i < C && changed; i++, n++)
                        for (const bool now : {false, true}) {
                            const double x = number(now ? a : b, k, f, i);
                            sum[now] += x;
                            squares[now] += x * x;
                        }
                }
                ASSERT_EQ(n, F / 2 * C);
                n_dropped += k == 0 ? F / 2 : 0;
                const double std0 = std::sqrt(squares[0] / n - sum[0] * sum[0] / n / n);
                const double std1 = std::sqrt(squares[1] / n - sum[1] * sum[1] / n / n);
                // 5 standard errors of the mean, and of the deviation
                EXPECT_NEAR(sum[1] / n, sum[0] / n, 5 * std0 / std::sqrt(n)) << k;
                EXPECT_NEAR(std1, std0, 5 * std0 / std::sqrt(2.0 * n)) << k;
                moved += std0;
            }
            different.insert(dropped);
        }
    }
    EXPECT_EQ(n_dropped, c.L * 4 * (F / 2));
    EXPECT_GT(moved, 0);
    EXPECT_EQ(different.size(), (size_t)c.L * 4) << "of each expert and layer others";
    // A rank's part has the bits of the whole.
    for (int rank = 0; rank < 2; rank++) {
        Part part = whole_model(c);
        part.layers = {c.L - 1};
        part.tp = {2, rank};
        part.first = false;
        const ParameterTable mine(c, part);
        const std::vector<floatX> params = read(mine, 0.5, 5);
        for (const TensorSpec& t : mine.rows) {
            const auto all = std::find_if(table.rows.begin(), table.rows.end(), [&](const auto& s) { return s.id == t.id; });
            if (t.vector() || t.router()) continue;
            for (size_t i = 0; i < t.size(); i++) {
                const size_t row = (size_t)t.whole_row((int)(i / (size_t)t.cols)),
                             col = (size_t)t.first_col + i % (size_t)t.cols;
                ASSERT_EQ((double)params[t.offset + i], (double)half[all->offset + row * (size_t)all->cols + col]) << t.name;
            }
        }
    }
}

TEST_P(Model, MismatchesAreNamed) {
    const auto refuse = [&](const ModelConfig& c, const std::vector<std::string>& parts) {
        const ParameterTable table(c);
        std::vector<floatX> params(table.size);
        expect_error([&] { read_parameters(model_, c, table, params.data()); }, parts);
    };
    ModelConfig c = c_;
    c.L = 3;
    refuse(c, {model_, "has no tensor", c_.family == "llama" ? "'model.layers.2.input_layernorm.weight'" : ".h.2.", c_.family});
    c = c_;
    c.V = 62;
    refuse(c, {model_, "[61, 24]", "[62, 24]", "config.json"});
    c = c_;
    c.F = 44;
    refuse(c, {model_, "mlp", c_.family == "gpt2" ? "[24, 44]" : "[44, 24]", "config.json"});
    expect_error([&] { read_config(dir_ / "nothing"); }, {dir_ / "nothing", "does not exist"});
    for (const char* text : {"", "garbage", "[]", "3", "{}", R"({"model_type": 3})", R"({"model_type": "mamba"})"}) {
        write_file(model_ + "/config.json", text);
        expect_error([&] { read_config(model_); }, {model_ + "/config.json"});
    }
    std::filesystem::remove(model_ + "/config.json");
    expect_error([&] { read_config(model_); }, {model_ + " holds no model: it has no config.json"});
    std::filesystem::resize_file(model_ + "/model.safetensors", 1000);
    refuse(c_, {model_ + "/model.safetensors", "truncated"});
}

INSTANTIATE_TEST_SUITE_P(Families, Model,
                         ::testing::Values(Family{"gpt2", true}, Family{"bloom", true}, Family{"llama", false},
                                           Family{"llama", true}),
                         [](const auto& info) { return std::string(info.param.name) + (info.param.tied ? "Tied" : "Untied"); });

TEST(ModelDirectory, HoldsTheTokenizer) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("gpt2", true);
    const ParameterTable table(c);
    const std::vector<floatX> params = random_parameters(c, table, 1);
    write_file(dir / "tokenizer.json", read_file("test/golden/tokenizer/gpt2.json"));
    const Tokenizer tokenizer = Tokenizer::load(dir / "");
    write_model(dir / "model", c, table, params.data(), model_texts("", &tokenizer));
    EXPECT_EQ(read_file(dir / "model/tokenizer.json"), read_file(dir / "tokenizer.json"));
    const auto settings = read_json(dir / "model/tokenizer_config.json"), config = read_json(dir / "model/config.json");
    EXPECT_EQ(settings.at("eos_token"), "<|endoftext|>");
    EXPECT_EQ(settings.at("bos_token"), "<|endoftext|>");
    EXPECT_EQ(config.at("eos_token_id"), 0);
    EXPECT_EQ(config.at("bos_token_id"), 0);
    EXPECT_FALSE(config.contains("pad_token_id"));
    EXPECT_EQ(read_json(dir / "model/generation_config.json").at("eos_token_id"), 0);
    EXPECT_EQ(dir.names(), (std::set<std::string>{"model", "tokenizer.json"}));
}

// A run's checkpoints keep the other files of its starting model, whether we can read its tokenizer or not.
TEST(ModelDirectory, KeepsWhatAModelCameWith) {
    TemporaryDirectory dir;
    const ModelConfig c = tiny("llama", true);
    const ParameterTable table(c);
    const std::vector<floatX> params = random_parameters(c, table, 1);
    std::filesystem::create_directory(dir / "given");
    std::map<std::string, std::string> files = {
        {"tokenizer.json", read_file("test/golden/tokenizer/gpt2.json")},
        {"tokenizer_config.json", R"({"eos_token": "<|endoftext|>", "model_max_length": 7})"},
        {"special_tokens_map.json", R"({"pad_token": "<|endoftext|>"})"},
        {"generation_config.json", R"({"eos_token_id": [3, 4], "temperature": 0.6})"},
        {"chat_template.jinja", "{{ messages }}"},
        {"vocab.json", "{}"},
        {"merges.txt", "a b"},
        {"added_tokens.json", "{}"}};
    for (const auto& [name, text] : files) write_file(dir / "given/" + name, text);
    const nlohmann::ordered_json ids = {{"bos_token_id", 1}, {"eos_token_id", {2, 3}}, {"pad_token_id", nullptr}};
    write_file(dir / "given/config.json", to_hf_config(c, "float32", ids).dump());
    write_file(dir / "given/README.md", "not of the tokenizer");
    const Tokenizer own = Tokenizer::load(dir / "given");
    for (const Tokenizer* tokenizer : {&own, (const Tokenizer*)nullptr}) {
        const ModelTexts texts = model_texts(dir / "given", tokenizer);
        EXPECT_EQ(texts.end_ids, (std::vector<int>{2, 3, 3, 4}));
        const std::string out = dir / (tokenizer ? "tuned" : "tuned without tokenizer");
        write_model(out, c, table, params.data(), texts);
        for (const auto& [name, text] : files) EXPECT_EQ(read_file(out + "/" + name), text) << name;
        EXPECT_FALSE(std::filesystem::exists(out + "/README.md"));
        const auto config = read_json(out + "/config.json");
        for (const auto& [key, value] : ids.items()) EXPECT_EQ(config.at(key), nlohmann::json(value)) << key;
    }
    // Another tokenizer has other ids.
    auto j = nlohmann::json::parse(files["tokenizer.json"]);
    j["added_tokens"].push_back({{"id", 600}, {"content", "</s>"}, {"special", true}});
    std::filesystem::create_directory(dir / "other");
    write_file(dir / "other/tokenizer.json", j.dump());
    const Tokenizer other = Tokenizer::load(dir / "other");
    const ModelTexts texts = model_texts(dir / "given", &other);
    EXPECT_EQ(texts.files.size(), 1u);
    EXPECT_EQ(texts.end_ids, std::vector<int>{0});
    EXPECT_EQ(texts.ids.at("eos_token_id"), 0);

    for (const char* wrong : {R"("2")", "-1", "[1, null]", "1.5", "{}"}) {
        write_file(dir / "given/generation_config.json", std::string(R"({"eos_token_id": )") + wrong + "}");
        expect_error([&] { model_texts(dir / "given", &own); }, {"given/generation_config.json", "'eos_token_id'"});
    }
}

TEST(ModelDirectory, TokensNeedNoTokenizer) {
    TemporaryDirectory dir;
    EXPECT_EQ(tokenizer_of_model(dir / "", 600, false, true), nullptr);
    expect_error([&] { tokenizer_of_model(dir / "", 600, true, true); }, {"has no tokenizer.json"});
    write_file(dir / "tokenizer.json", R"({"model": {"type": "WordPiece"}})");
    testing::internal::CaptureStderr();
    EXPECT_EQ(tokenizer_of_model(dir / "", 600, false, true), nullptr);
    EXPECT_NE(testing::internal::GetCapturedStderr().find("WordPiece"), std::string::npos);
    expect_error([&] { tokenizer_of_model(dir / "", 600, true, true); }, {"WordPiece"});
    write_file(dir / "tokenizer.json", read_file("test/golden/tokenizer/gpt2.json"));
    EXPECT_NE(tokenizer_of_model(dir / "", 600, false, true), nullptr);
    expect_error([&] { tokenizer_of_model(dir / "", 599, false, true); }, {"lacks the token 599"});
}

// No-op settings of other programs; and values of another type, whose key is named.
TEST(ModelDirectory, HarmlessAndWrongSettings) {
    TemporaryDirectory dir;
    using json = nlohmann::json;
    const auto read = [&](const char* family, const std::map<std::string, json>& settings) {
        json j = to_hf_config(tiny(family, true), "float32");
        for (const auto& [key, value] : settings) j[key] = value;
        write_file(dir / "config.json", j.dump());
        return read_config(dir / "");
    };
    const auto same = [](const ModelConfig& a, const ModelConfig& b) { return to_hf_config(a, "") == to_hf_config(b, ""); };
    const ModelConfig plain = read("llama", {});
    for (const std::map<std::string, json>& harmless : std::initializer_list<std::map<std::string, json>>{
             {{"sliding_window", 4096}, {"use_sliding_window", false}},
             {{"rope_scaling", {{"rope_type", "default"}}}},
             {{"rope_scaling", {{"type", "default"}, {"rope_theta", nullptr}}}},
             {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", plain.rope_base}}}},
             {{"hidden_act", "swish"}},
             {{"hidden_act", nullptr}, {"head_dim", nullptr}, {"rope_parameters", nullptr}, {"pretraining_tp", nullptr}},
             {{"tie_word_embeddings", true}, {"attention_bias", nullptr}, {"sliding_window", nullptr}}})
        EXPECT_TRUE(same(read("llama", harmless), plain)) << json(harmless);
    EXPECT_EQ(read("llama", {{"rms_norm_eps", nullptr}, {"initializer_range", nullptr}}).eps, 1e-6);
    EXPECT_EQ(read("gpt2", {{"layer_norm_epsilon", nullptr}, {"activation_function", nullptr}}).eps, 1e-5);
    const std::tuple<const char*, const char*, json> wrong[] = {{"llama", "rms_norm_eps", "1e-5"},
                                                                {"llama", "rope_theta", true},
                                                                {"llama", "tie_word_embeddings", 1},
                                                                {"llama", "hidden_act", 3},
                                                                {"llama", "rope_scaling", "default"},
                                                                {"llama", "rope_parameters", {{"rope_theta", "x"}}},
                                                                {"llama", "model_type", 3},
                                                                {"llama", "vocab_size", "600"},
                                                                {"llama", "head_dim", "8"},
                                                                {"llama", "sliding_window", 4096},
                                                                {"llama", "use_sliding_window", "no"},
                                                                {"gpt2", "layer_norm_epsilon", {1}},
                                                                {"gpt2", "activation_function", 1},
                                                                {"bloom", "initializer_range", "0.02"},
                                                                {"bloom", "layer_norm_epsilon", json::object()}};
    for (const auto& [family, key, value] : wrong)
        expect_error([&, f = family, k = key, v = value] { read(f, {{k, v}}); }, {"config.json", std::string("'") + key + "'"});
}

// Extreme numbers, and values that appear in messages.
TEST(ModelDirectory, HostileConfigs) {
    TemporaryDirectory dir;
    const auto refuse = [&](const char* family, const char* key, const nlohmann::json& value, const std::string& part) {
        nlohmann::json j = to_hf_config(tiny(family, true), "float32");
        j[key] = value;
        write_file(dir / "config.json", j.dump());
        expect_error([&] { read_config(dir / ""); }, {dir / "/config.json", part});
    };
    for (const char* key : {"vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "max_position_embeddings"})
        for (const int64_t value : {int64_t{-1}, int64_t{1} << 30, int64_t{1} << 32, INT64_MAX})
            refuse("llama", key, value, key);
    // The table by itself would need tens of GB.
    refuse("llama", "num_hidden_layers", 1 << 28,
           "'num_hidden_layers' is 268435456; it must be at most 10000; HINT: correct it");
    refuse("llama", "intermediate_size", 1 << 28, "'intermediate_size' is 268435456; it must be at most");
    refuse("llama", "num_attention_heads", 0, "'num_attention_heads' is 0; it must be at least 1; HINT: correct it");
    refuse("llama", "num_key_value_heads", 3, "'num_attention_heads' 4 is not divisible by 'num_key_value_heads' 3");
    refuse("gpt2", "n_embd", 1 << 30, "n_embd");  // 4 n_embd overflows an int
    refuse("gpt2", "n_embd", 1 << 28, "'n_embd' is 268435456; it must be at most");
    for (const double eps : {0.0, -1e-5, 1e-300, 2.0}) refuse("bloom", "layer_norm_epsilon", eps, "'layer_norm_epsilon' is ");
    for (const double base : {0.0, -10000.0, 1e-300}) refuse("llama", "rope_theta", base, "'rope_theta' is ");
    refuse("llama", "rope_parameters", {{"rope_theta", -1}}, "'rope_parameters.rope_theta' is -1");
    refuse("llama", "rope_scaling", {{"type", "linear"}, {"factor", 1e9}}, "'rope_scaling.factor' is 1e+09");
    refuse("gpt2", "resid_pdrop", 1.5, "'resid_pdrop' is 1.5; it must be between 0 and 0.99");
    refuse("mixtral", "num_experts_per_tok", 99, "'num_experts_per_tok' is 99; it must be between 1 and 'num_local_experts'");
    refuse("gemma2", "query_pre_attn_scalar", 1e300, "attention scores (from 'query_pre_attn_scalar') is 1e-150");
    for (const double std : {-0.02, 1e9}) refuse("llama", "initializer_range", std, "'initializer_range' is ");

    ModelConfig tall = tiny("llama", true);
    tall.L = 99999;
    expect_error(
        [&] {
            check_config_of({{"llama.block_count", tall.L}}, "x.gguf", tall, "llama.");
        },
        {"x.gguf: 'llama.block_count' is 99999; it must be at most 10000"});

    const int deep = 1 << 18;
    const std::string nested = std::string(deep, '[') + std::string(deep, ']');
    for (const std::string key : {"model_type", "vocab_size", "rope_scaling", "rope_parameters"}) {
        std::string text = nlohmann::json(to_hf_config(tiny("llama", true), "float32")).dump();
        write_file(dir / "config.json", text.replace(text.size() - 1, 1, ",\"" + key + "\":" + nested + "}"));
        expect_error([&] { read_config(dir / ""); }, {dir / "/config.json", "nested"});
    }
}

// Keys that change nothing here have the types that transformers requires; a token beyond the vocabulary is named.
TEST(ModelDirectory, KeysWithoutEffectMakeSense) {
    const auto refuse = [](const char* family, const char* key, const nlohmann::json& value, const std::string& part) {
        nlohmann::json j = to_hf_config(tiny(family, true), "float32");
        j[key] = value;
        expect_error([&] { from_hf_config(j, "config.json"); }, {"config.json: ", part});
    };
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
        for (const nlohmann::json& id : {nlohmann::json("</s>"), nlohmann::json(1.5), nlohmann::json({0, true})})
            refuse("llama", key, id, std::string("'") + key + "' is " + id.dump() + "; the id of a token");
    for (const char* key : {"torch_dtype", "dtype"}) {
        refuse("llama", key, "int8", std::string("'") + key + "' is \"int8\"; float32, float16");
        refuse("llama", key, 16, key);
    }
    refuse("llama", "use_cache", "yes", "'use_cache' is \"yes\"; true or false");

    nlohmann::json j = to_hf_config(tiny("llama", true), "float32");
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) j[key] = nullptr;
    EXPECT_TRUE(ids_outside_vocabulary(j, "config.json").empty());
    const int64_t V = j["vocab_size"];
    j["bos_token_id"] = V - 1;
    j["eos_token_id"] = {0, V, UINT64_MAX};
    j["pad_token_id"] = -1;
    from_hf_config(j, "config.json");
    const Strings outside = {"'eos_token_id' " + std::to_string(V), "'eos_token_id' 9223372036854775807", "'pad_token_id' -1"};
    EXPECT_EQ(ids_outside_vocabulary(j, "config.json"), outside);
}

TEST(ModelDirectory, LinkIsReplaced) {
    TemporaryDirectory dir;
    point_link(dir / "latest", "step_1");
    point_link(dir / "latest", "step_2");
    EXPECT_EQ(std::filesystem::read_symlink(dir / "latest"), "step_2");
    EXPECT_EQ(dir.names(), std::set<std::string>{"latest"});
    expect_error([&] { point_link(dir / "no/such/latest", "x"); }, {"no/such/latest", "No such file"});
    std::filesystem::create_directory(dir / "taken");
    expect_error([&] { point_link(dir / "taken", "x"); }, {"taken"});
    EXPECT_EQ(dir.names(), (std::set<std::string>{"latest", "taken"}));
}

}  // namespace test_safetensors
