// config.json: an accepted file gives a model whose sizes fit their types, and is the same after writing and reading it.
#include "fuzz.h"

#include "../../llmc/checkpoint/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    files.write("config.json", view(data, size));
    refused([&] {
        ModelConfig c = read_config(files / "");
        check_config(c);
        match_family(c);
        CHECK(same_model(c, from_hf_config(to_hf_config(c, "bfloat16"), "what was written")), "the round trip changes it");
        pad_vocabulary(c, 128);
        CHECK(c.Vp >= c.V && c.QKV() > 0 && c.F1() >= c.F, "sizes overflow");
        CHECK((float)c.eps > 0 && std::isfinite((float)c.eps), "norm-epsilon %g is no float", c.eps);
        c.L = std::min(c.L, 3);  // three layers show enough
        const ParameterTable table(c);
        for (const TensorSpec& spec : table.rows) CHECK(spec.rows > 0 && spec.cols > 0, "%s is empty", spec.name.c_str());
    });
    return 0;
}
