// Option files (--config). The first byte of the input, modulo 4, selects the command whose options the rest holds. Accepted
// options of train are the same after config_text() has written them and they are read again.
#include "fuzz.h"

#include "../../llmc/options/cli.h"
#include "../../llmc/options/config_file.h"

template <class Options>
static bool read_options(const char* command, const std::string& file, Options& o) {
    return !refused([&] { cli::parse(command, o, {"--config", file}); });
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    std::string_view input = view(data, size);
    const unsigned kind = read_byte(input) % 4;
    files.write("a.toml", input);
    PrepareOptions prepare;
    GenerateOptions generate;
    CurateOptions curate;
    TrainOptions train;
    if (kind == 1) read_options("prepare", files / "a.toml", prepare);
    if (kind == 2) read_options("generate", files / "a.toml", generate);
    if (kind == 3) read_options("curate", files / "a.toml", curate);
    if (kind != 0 || !read_options("train", files / "a.toml", train)) return 0;
    files.write("b.toml", config_text(train));
    TrainOptions again;
    CHECK(read_options("train", files / "b.toml", again), "its own options are refused:\n%s", config_text(train).c_str());
    CHECK(config_text(again) == config_text(train), "the options\n%sare read as\n%s", config_text(train).c_str(),
          config_text(again).c_str());
    return 0;
}
