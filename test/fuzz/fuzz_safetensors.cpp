// safetensors files and directories of several. The first byte of the input, modulo 3, selects the format of the rest:
//   '0'  a complete file
//   '1'  a byte n and a header: its length is prepended and n bytes of data appended, so that mutations of the header
//        reach the checks beyond the file's outer structure
//   '2'  an index, then up to three files as in '1', all separated by 0xff, which JSON cannot contain
#include "fuzz.h"

#include "../../llmc/base/safetensors.h"

static std::string with_length_and_data(std::string_view text) {
    const unsigned n = read_byte(text);
    const uint64_t length = text.size();
    std::string file((const char*)&length, 8);
    file += text;
    for (unsigned i = 0; i < n; i++) file += (char)(i * 151);
    return file;
}

template <class E>
static void read_elements(const SafetensorsReader& reader, const TensorView& t) {
    std::vector<E> elements(t.elements());
    refused([&] { reader.read_as(t, elements.data()); });
}

static void read_all(const std::string& path) {
    const SafetensorsReader reader = SafetensorsReader::open(path);
    for (const auto& [name, t] : reader.tensors()) {
        CHECK(reader.find(name) == &t, "tensor '%s' is not found", name.c_str());
        size_t elements = 1, sum = 0;
        for (const int64_t d : t.shape) elements *= (size_t)d;
        CHECK(t.elements() == elements, "%zu elements in shape %s", t.elements(), shape_string(t.shape).c_str());
        for (size_t i = 0; i < t.bytes; i++) sum += (uint8_t)t.data[i];
        CHECK(sum <= 255 * t.bytes, "the bytes have been read");
        read_elements<float>(reader, t);
        read_elements<double>(reader, t);
        read_elements<bf16>(reader, t);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    const unsigned kind = read_byte(input) % 3;
    if (kind < 2) {
        files.write("x.safetensors", kind == 0 ? std::string(input) : with_length_and_data(input));
        refused([&] { read_all(files / "x.safetensors"); });
        return 0;
    }
    std::filesystem::create_directories(files / "model");
    files.write("model/model.safetensors.index.json", read_until(input, '\xff'));
    for (const char* name : {"model/1.safetensors", "model/2.safetensors", "model/3.safetensors"})
        if (input.empty()) std::filesystem::remove(files / name);
        else files.write(name, with_length_and_data(read_until(input, '\xff')));
    refused([&] { read_all(files / "model"); });
    return 0;
}
