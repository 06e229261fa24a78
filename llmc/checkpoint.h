// A model directory in Hugging Face's form: config.json, generation_config.json, the tokenizer's files and model.safetensors in
// the family's standard names. transformers opens it as it is, and directories that transformers wrote are read here.
//   write_model   into a temporary directory beside the final one, synced, then renamed: never half a model under its name
//   read_config, read_parameters   refuse by name what is missing, has another shape, or is not supported
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"
#include "file.h"
#include "parameters.h"
#include "safetensors.h"
#include "types.h"

inline nlohmann::json read_json(const std::string& path) {
    std::ifstream in(path);
    if (!in) fail("cannot read %s: %s", path.c_str(), strerror(errno));
    try {
        return nlohmann::json::parse(in);
    } catch (const nlohmann::json::exception& e) {
        fail("%s is not valid JSON: %s", path.c_str(), e.what());
    }
}

inline ModelConfig read_config(const std::string& dir) {
    if (!std::filesystem::is_directory(dir)) fail("model directory %s does not exist", dir.c_str());
    const std::string path = dir + "/config.json";
    const nlohmann::json j = read_json(path);
    try {
        return from_hf_config(j, path);
    } catch (const nlohmann::json::exception& e) {
        fail("%s has a value of an unexpected type: %s", path.c_str(), e.what());
    }
}

// Fills params (table.size) from dir's safetensors, whatever their float type. Padded vocabulary rows become zero.
inline void read_parameters(const std::string& dir, const ModelConfig& c, const ParameterTable& table, floatX* params) {
    const SafetensorsReader files = SafetensorsReader::open(dir);
    const auto find = [&](const std::string& name) {
        const TensorView* t = files.find(name);
        // GPT-2's and BLOOM's published files leave out the prefix that transformers writes.
        const std::string prefix = "transformer.";
        if (!t && name.compare(0, prefix.size(), prefix) == 0) t = files.find(name.substr(prefix.size()));
        return t;
    };
    std::vector<floatX> file;
    for (const TensorSpec& spec : table.rows) {
        floatX* ours = params + spec.offset;
        std::fill(ours, ours + spec.size(), floatX(0));
        for (const HfTensor& t : spec.hf) {
            const TensorView* view = find(t.name);
            if (!view) fail("%s has no tensor '%s', which a %s model needs", dir.c_str(), t.name.c_str(), c.family.c_str());
            std::vector<int64_t> shape = {t.rows, spec.cols};
            if (t.transposed) std::swap(shape[0], shape[1]);
            if (spec.vector) shape = {t.rows};
            if (view->shape != shape)
                fail("%s: tensor '%s' has shape %s; config.json asks for %s", dir.c_str(), t.name.c_str(),
                     shape_string(view->shape).c_str(), shape_string(shape).c_str());
            file.resize((size_t)t.rows * spec.cols);
            files.read_as(*view, file.data());
            convert_layout(spec, t, ours, file.data(), false);
        }
    }
}

struct TokenizerFiles {
    std::string path;  // a tokenizer.json or a directory that holds one; empty: none
    std::string bos_token, eos_token;
    int bos_id = -1, eos_id = -1;
};

// Writes `dir` (which may exist: it is replaced only once the new one is complete).
inline void write_model(const std::string& dir, const ModelConfig& c, const ParameterTable& table, const floatX* params,
                        const TokenizerFiles& tokenizer) {
    namespace fs = std::filesystem;
    const std::string temporary = dir + ".tmp";
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    std::error_code error;
    if (!fs::create_directories(temporary, error))
        fail("cannot create directory %s: %s", temporary.c_str(), error.message().c_str());
    try {
        using json = nlohmann::ordered_json;
        const bool wide = sizeof(floatX) == 4;
        const auto write_json = [&](const char* name, const json& j) {
            write_file_atomically(temporary + "/" + name, j.dump(2) + "\n");
        };
        write_json("config.json", to_hf_config(c, wide ? "float32" : "bfloat16", tokenizer.bos_id, tokenizer.eos_id));
        json generation = {{"do_sample", true}};
        if (tokenizer.bos_id >= 0) generation["bos_token_id"] = tokenizer.bos_id;
        if (tokenizer.eos_id >= 0) generation["eos_token_id"] = tokenizer.eos_id;
        write_json("generation_config.json", generation);
        if (!tokenizer.path.empty()) {
            const fs::path given = tokenizer.path, file = fs::is_directory(given) ? given / "tokenizer.json" : given;
            write_file_atomically(temporary + "/tokenizer.json", read_whole_file(file.string()));
            json settings = {{"tokenizer_class", "PreTrainedTokenizerFast"}, {"model_max_length", c.T}};
            if (!tokenizer.bos_token.empty()) settings["bos_token"] = tokenizer.bos_token;
            if (!tokenizer.eos_token.empty()) settings["eos_token"] = tokenizer.eos_token;
            write_json("tokenizer_config.json", settings);
        }

        SafetensorsWriter writer(temporary);
        for (const TensorSpec& spec : table.rows)
            for (const HfTensor& t : spec.hf) {
                std::vector<int64_t> shape = {t.rows, spec.cols};
                if (t.transposed) std::swap(shape[0], shape[1]);
                if (spec.vector) shape = {t.rows};
                writer.declare(t.name, wide ? "F32" : "BF16", shape);
            }
        std::vector<floatX> file;
        for (const TensorSpec& spec : table.rows)
            for (const HfTensor& t : spec.hf) {
                file.resize((size_t)t.rows * spec.cols);
                convert_layout(spec, t, const_cast<floatX*>(params) + spec.offset, file.data(), true);
                writer.write(t.name, file.data(), file.size() * sizeof(floatX));
            }
        writer.finish();

        sync_directory(temporary);
        const std::string old = dir + ".old";
        fs::remove_all(old);
        if (fs::exists(dir)) fs::rename(dir, old);
        fs::rename(temporary, dir);
        fs::remove_all(old);
        sync_directory(fs::path(dir).parent_path().string());
    } catch (const fs::filesystem_error& e) {
        fs::remove_all(temporary, ignored);
        fail("cannot write %s: %s", dir.c_str(), e.what());
    } catch (...) {
        fs::remove_all(temporary, ignored);
        throw;
    }
}

// Makes `link` a symbolic link to `target`, replacing what it was in one step.
inline void point_link(const std::string& link, const std::string& target) {
    const std::string temporary = link + ".tmp";
    unlink(temporary.c_str());
    if (symlink(target.c_str(), temporary.c_str()) != 0 || rename(temporary.c_str(), link.c_str()) != 0)
        fail("cannot point %s to %s: %s", link.c_str(), target.c_str(), strerror(errno));
}
