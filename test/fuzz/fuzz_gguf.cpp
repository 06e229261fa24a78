// GGUF files. The first byte of the input, modulo 2, selects the format of the rest:
//   '0'  a complete file
//   '1'  a byte n and the file after its counts: the numbers of tensors and values are prepended, n zeros of data appended
#include "fuzz.h"

#include "../../llmc/commands/gguf_command.h"

static void read_all(const std::string& path) {
    const GgufReader file(path);
    for (const GgufTensor& t : file.tensors()) {
        std::vector<float> x(t.elements);
        file.read(t, x.data());
        CHECK(file.find(t.name) == &t, "tensor '%s' is not found", t.name.c_str());
    }
    refused([&] { hf_tokenizer_files(read_gguf_tokenizer(file.metadata(), path), 100); });
    const auto has = [&](const std::string& name) { return file.find(name) != nullptr; };
    ModelConfig c = gguf_config(file.metadata(), path, has);
    check_config(c);
    if ((int64_t)c.L * c.C > 1 << 16) return;  // the table of its parameters would take too long
    pad_vocabulary(c, 1);
    const GgufArchitecture& a = gguf_architecture(file.metadata(), path);
    detail::check_no_other_tensors(file, c, a);
    for (const TensorSpec& spec : ParameterTable(c).rows)
        if (spec.size() < 1 << 20) detail::rows_from_gguf(c, a, file, spec);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    std::string file;
    if (read_byte(input) % 2) {
        const std::string zeros(read_byte(input), '\0');
        const uint64_t counts[] = {read_byte(input), read_byte(input)};
        file = std::string("GGUF\3\0\0\0", 8) + std::string((const char*)counts, 16) + std::string(input) + zeros;
    } else {
        file = input;
    }
    files.write("x.gguf", file);
    refused([&] { read_all(files / "x.gguf"); });
    return 0;
}
