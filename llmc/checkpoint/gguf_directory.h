// A GGUF file in place of a model directory: --model X.gguf, --tokenizer X.gguf. Its texts (config.json, tokenizer) are written
// to a temporary directory, next to a link to the file, from which the weights are read (gguf_weights.h).
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "../base/check.h"
#include "../parallel/world.h"
#include "../tokenizer/gguf_tokenizer.h"
#include "gguf_weights.h"
#include "hub.h"
#include "model_texts.h"

// The texts of a model directory for this model; tokenizer: may be empty.
inline ModelTexts texts_of_gguf(const GgufModel& model, const GgufTokenizer& tokenizer, const std::string& dtype) {
    ModelTexts texts;
    texts.dtype = dtype;
    texts.files = hf_tokenizer_files(tokenizer, model.c.T);
    texts.has_tokenizer = !tokenizer.model.empty();
    struct Role {
        const char* name;
        int id;
    };
    for (const auto& [name, id] : {Role{"bos_token_id", tokenizer.bos}, {"pad_token_id", tokenizer.pad}})
        if (id >= 0) texts.ids[name] = id;
    std::vector<int>& ends = texts.end_ids;
    for (const int id : {tokenizer.eos, tokenizer.eot, tokenizer.eom})
        if (id >= 0 && std::find(ends.begin(), ends.end(), id) == ends.end()) ends.push_back(id);
    if (ends.size() == 1) texts.ids["eos_token_id"] = ends[0];
    else if (!ends.empty()) texts.ids["eos_token_id"] = ends;
    return texts;
}

namespace detail {

class TextsOfGguf {
public:
    explicit TextsOfGguf(const std::string& file) {
        namespace fs = std::filesystem;
        const GgufModel model(file);
        refuse_together(model.c.mixture.on(), "--model " + file, "a mixture of experts",
                        "it cannot be used without converting it", "train_gpt import --gguf " + file + " --out DIR");
        std::string pattern = (fs::temp_directory_path() / "train_gpt-gguf-XXXXXX").string();
        if (!mkdtemp(pattern.data())) fail("cannot create a directory in %s", fs::temp_directory_path().c_str());
        path = pattern;
        fs::create_symlink(fs::canonical(file), path + "/model.gguf");
        WrittenFiles written(path);
        write_model_texts(path, model.c, texts_of_gguf(model, read_gguf_tokenizer(model.file.metadata(), file), "bfloat16"),
                          written);
    }
    ~TextsOfGguf() {
        std::error_code ignored;
        std::filesystem::remove_all(path, ignored);
    }
    std::string path;
};

}  // namespace detail

inline bool is_gguf_file(const std::string& path) {
    return std::filesystem::path(path).extension() == ".gguf" && is_regular(path);
}
// The directory for a GGUF file; removed when the program ends.
inline std::string gguf_directory(const std::string& file) {
    static std::map<std::string, std::unique_ptr<detail::TextsOfGguf>> made;
    std::unique_ptr<detail::TextsOfGguf>& texts = made[file];
    if (!texts) texts = std::make_unique<detail::TextsOfGguf>(file);
    return texts->path;
}
// Each process has a directory of its own, but ranks must have the same model.
inline void refuse_gguf_on_ranks(const World& world, const std::string& model) {
    refuse_together(world.size() > 1 && is_gguf_file(model), "--model " + model, "several ranks",
                    "a GGUF file is for one process", "convert it: train_gpt import --gguf " + model + " --out DIR");
}
// local_path() for a tokenizer, which may be in a GGUF file.
inline std::string tokenizer_path(const std::string& given) {
    return is_gguf_file(given) ? gguf_directory(given) : local_path(given);
}
// The path by which a model is found again: of the GGUF file, if the directory is one of these.
inline std::string lasting_path(const std::string& dir) {
    namespace fs = std::filesystem;
    return fs::is_symlink(dir + "/model.gguf") ? fs::canonical(dir + "/model.gguf").string()
                                               : fs::weakly_canonical(dir).string();
}
