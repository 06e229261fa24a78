// A directory of adapters: adapter_config.json, the header of adapter_model.safetensors, and base.json, separated by 0xff,
// which JSON cannot contain. Accepted adapters fit the model that they adapt: their tensors have a place and can be read, and
// the same adapters in PEFT's form as this program writes it are accepted too.
#include "fuzz.h"

#include "../../llmc/checkpoint/adapter_files.h"

static ModelConfig base_model() {
    ModelConfig c;
    set_family(c, "llama");
    c.L = 2;
    c.C = 16;
    c.NH = 2;
    c.NKV = 1;
    c.F = 24;
    c.T = 32;
    c.V = 40;
    check_config(c);
    pad_vocabulary(c, 8);
    return c;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    const std::string_view config = read_until(input, '\xff'), header = read_until(input, '\xff'), base = input;
    const uint64_t length = header.size();
    files.write("adapter_config.json", config);
    files.write("adapter_model.safetensors",
                std::string((const char*)&length, 8) + std::string(header) + std::string((size_t)1 << 14, '\0'));
    files.write("base.json", base);
    const std::string dir = files / ".";
    refused([&] { base_of_adapter(dir); });
    refused([&] { format_of_base(dir); });
    ModelConfig c = base_model();
    if (refused([&] { read_adapter_config(dir, c); })) return 0;
    CHECK(c.lora.on() != c.virtual_tokens.on(), "neither kind of adapters, or both");
    if (c.lora.rank > 64 || c.virtual_tokens.count > 64 || c.virtual_tokens.encoder_width > 64) return 0;
    const ParameterTable table = trained_table(c);
    std::vector<real> values(table.size);
    const bool all_there = !refused([&] { read_tensors(dir + "/adapter_model.safetensors", c, table, values.data()); });
    if (!all_there || !c.lora.on()) return 0;
    files.write("adapter_config.json", lora_json(c, "base").dump());
    ModelConfig again = base_model();
    read_adapter_config(dir, again);
    CHECK(again.lora.modules == c.lora.modules, "other matrices after writing it");
    return 0;
}
