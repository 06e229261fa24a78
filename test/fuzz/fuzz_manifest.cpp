// A checkpoint's manifest, next to files of 0, 1 and 3000 bytes, a pipe, a link to a device and one to an outside file.
// Whatever it names, checking ends, and no outside file is reported as correct except through that link.
#include <sys/stat.h>

#include "fuzz.h"

#include "../../llmc/checkpoint/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Files files;
    static const bool made = [] {
        std::filesystem::create_directories(files / "model/training");
        files.write("secret", "s");
        files.write("model/empty", "");
        files.write("model/a.bin", "a");
        files.write("model/training/state.json", std::string(3000, 's'));
        std::filesystem::create_symlink("../secret", files / "model/link");
        std::filesystem::create_symlink("/dev/zero", files / "model/zeros");
        return mkfifo((files / "model/pipe").c_str(), 0600) == 0;
    }();
    CHECK(made, "no pipe");
    files.write("model/manifest.json", view(data, size));
    const std::string dir = files / "model", problem = verify_directory(dir);
    if (!problem.empty()) return 0;
    const nlohmann::json manifest = read_json(dir + "/manifest.json");
    for (const auto& [name, entry] : manifest.at("files").items()) {
        CHECK(name.find("..") == std::string::npos, "'%s' is taken for a file of the directory", name.c_str());
        CHECK(std::filesystem::is_regular_file(dir + "/" + name), "'%s' is taken for a file", name.c_str());
    }
    return 0;
}
