// A checkpoint's training/state.json. An accepted one can be resumed: the histories of FP8, the guard and the clock are
// restored or refused, and differences from options described; it is the same after writing and reading it.
#include "fuzz.h"

#include "../../llmc/checkpoint/agreement.h"
#include "../../llmc/run/trainer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    static const TrainOptions now = [] {
        TrainOptions o;
        o.fp8_format = "hybrid";
        o.override = {"lr", "optimizer"};
        return o;
    }();
    const std::string dir = files / "step";
    std::filesystem::create_directories(dir + "/training");
    files.write("step/training/state.json", view(data, size));
    TrainingState s;
    if (refused([&] { s = read_state(dir); })) return 0;
    refused([&] {
        StepHistory history(now, 3, s, dir);
        history.save(s);
    });
    refused([&] { check_agreement(s, now, s.data, "", {"lr"}); });
    refused([&] { describe_overrides(s, now); });
    const std::string text = json_text(to_json(s));
    files.write("step/training/state.json", text);
    const std::string again = json_text(to_json(read_state(dir)));
    CHECK(nlohmann::json::parse(again) == nlohmann::json::parse(text), "the round trip changes\n%s\ninto\n%s", text.c_str(),
          again.c_str());
    return 0;
}
