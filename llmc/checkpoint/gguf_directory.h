// A GGUF file in place of a model directory: --model X.gguf, --tokenizer X.gguf. Its texts (config.json, tokenizer) are files
// in memory, X.gguf/config.json; the weights are read from the file (gguf_weights.h).
#pragma once
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
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

// The path of the file as a model directory. From now on its texts are in memory, below that path.
inline std::string gguf_directory(const std::string& file) {
    if (FilesInMemory::is_folder(file)) return file;
    const GgufModel& model = *gguf_model_in(file);
    refuse_together(model.c.mixture.on(), "--model " + file, "a mixture of experts", "it cannot be used without converting it",
                    "train_gpt import --gguf " + file + " --out DIR");
    FilesInMemory::add(
        file, files_of_texts(model.c, texts_of_gguf(model, read_gguf_tokenizer(model.file.metadata(), file), "bfloat16")));
    return file;
}
// Ranks look for model directories together, and each file is in the memory of one process.
inline void refuse_gguf_on_ranks(const World& world, const std::string& model) {
    refuse_together(world.size() > 1 && is_gguf_file(model), "--model " + model, "several ranks",
                    "a GGUF file is for one process", "convert it: train_gpt import --gguf " + model + " --out DIR");
}
// local_path() for a tokenizer, which may be in a GGUF file: of that name, or X.gguf/tokenizer.json as data has recorded it.
inline std::string tokenizer_path(const std::string& given) {
    if (is_gguf_file(given)) return gguf_directory(given);
    if (const std::string folder = folder_and_name(given).first; is_gguf_file(folder)) gguf_directory(folder);
    return local_path(given);
}
// The path by which a model is found again.
inline std::string lasting_path(const std::string& dir) { return std::filesystem::weakly_canonical(dir).string(); }
