// A checkpoint is a model directory in Hugging Face's form, so that transformers opens it as it is and directories that
// transformers wrote are read here:
//   config.json, generation_config.json, tokenizer.json, tokenizer_config.json
//   model.safetensors                     or model-0000i-of-0000n.safetensors with model.safetensors.index.json
//   training/master.safetensors           fp32 weights (where the model's are not fp32 themselves)
//   training/exp_avg.safetensors, training/exp_avg_sq.safetensors     AdamW's moments
//   training/state.json                   counters, options and what else a resumed run must agree with
//   manifest.json                         size and CRC-32C of every other file
// Every tensor is whole, under its Hugging Face name and in that layout, whatever machine or number of ranks wrote it.
//   publish_directory   writes under a temporary name, syncs, renames: never half a directory under its final name
//   verify_directory    compares a directory with its manifest
//   read_config, read_parameters, read_tensors   refuse by name what is missing, has another shape, or is not supported
#pragma once
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "crc32c.h"
#include "file.h"
#include "json.h"
#include "parameters.h"
#include "safetensors.h"
#include "types.h"

inline nlohmann::json read_json(const std::string& path) { return parse_json(read_whole_file(path), path); }

// ---- reading ---------------------------------------------------------------------------------------------------------------
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

// Shape of a tensor in files.
inline std::vector<int64_t> file_shape(const TensorSpec& spec, const HfTensor& t) {
    if (spec.vector) return {t.rows};
    if (t.transposed) return {spec.cols, t.rows};
    return {t.rows, spec.cols};
}

// Whether the file's rows are ours, one after another.
inline bool same_layout(const HfTensor& t) { return !t.transposed && !t.interleaved; }

// Fills buffer (table.size) from a .safetensors file or a directory with model.safetensors, whatever their float type. Padded
// vocabulary rows become zero.
template <class E>
void read_tensors(const std::string& path, const ModelConfig& c, const ParameterTable& table, E* buffer) {
    const SafetensorsReader files = SafetensorsReader::open(path);
    std::set<std::string> used;
    const auto find = [&](std::string name) {
        const TensorView* t = files.find(name);
        // GPT-2's and BLOOM's published files leave out the prefix that transformers writes.
        const std::string prefix = "transformer.";
        if (!t && name.compare(0, prefix.size(), prefix) == 0) name = name.substr(prefix.size()), t = files.find(name);
        used.insert(name);
        return t;
    };
    std::vector<E> file;
    for (const TensorSpec& spec : table.rows) {
        E* ours = buffer + spec.offset;
        std::fill(ours, ours + spec.size(), E(0));
        for (const HfTensor& t : spec.hf) {
            const TensorView* view = find(t.name);
            if (!view) fail("%s has no tensor '%s', which a %s model needs", path.c_str(), t.name.c_str(), c.family.c_str());
            const std::vector<int64_t> shape = file_shape(spec, t);
            if (view->shape != shape)
                fail("%s: tensor '%s' has shape %s; config.json asks for %s", path.c_str(), t.name.c_str(),
                     shape_string(view->shape).c_str(), shape_string(shape).c_str());
            if (same_layout(t)) {
                files.read_as(*view, ours + (size_t)t.row * spec.cols);
                continue;
            }
            file.resize((size_t)t.rows * spec.cols);
            files.read_as(*view, file.data());
            convert_layout(spec, t, ours, file.data(), false);
        }
    }
    // A weight that we have no place for is part of another model. Masks and rotary angles are no weights; a tied head is a
    // copy.
    for (const auto& [name, unused] : files.tensors()) {
        const auto ends_with = [&, &n = name](const std::string& end) {
            return n.size() >= end.size() && n.compare(n.size() - end.size(), end.size(), end) == 0;
        };
        const bool known = used.count(name) || ends_with(".attn.bias") || ends_with(".attn.masked_bias") ||
                           ends_with(".inv_freq") || (c.tied && name == "lm_head.weight");
        if (!known)
            fail("%s holds the tensor '%s', which a %s model has no place for", path.c_str(), name.c_str(), c.family.c_str());
    }
}

inline void read_parameters(const std::string& dir, const ModelConfig& c, const ParameterTable& table, floatX* params) {
    read_tensors(dir, c, table, params);
}

// ---- writing ---------------------------------------------------------------------------------------------------------------
// Every tensor of the table into `path`, or, if that is more than shard_bytes, into several files beside it with an index,
// named as transformers names them. E: bf16 or float.
template <class E>
void write_tensors(const std::string& path, const ParameterTable& table, const E* buffer, size_t shard_bytes = 5000000000) {
    namespace fs = std::filesystem;
    const char* const dtype = std::is_same_v<E, bf16> ? "BF16" : sizeof(E) == 8 ? "F64" : "F32";
    using Part = std::pair<const TensorSpec*, const HfTensor*>;
    const auto bytes_of = [](const Part& p) { return (size_t)p.second->rows * p.first->cols * sizeof(E); };
    std::vector<std::vector<Part>> shards(1);
    size_t in_shard = 0, total = 0;
    for (const TensorSpec& spec : table.rows)
        for (const HfTensor& t : spec.hf) {
            const Part part = {&spec, &t};
            if (in_shard > 0 && in_shard + bytes_of(part) > shard_bytes) shards.emplace_back(), in_shard = 0;
            shards.back().push_back(part), in_shard += bytes_of(part), total += bytes_of(part);
        }

    nlohmann::ordered_json index = {{"metadata", {{"total_size", total}}}, {"weight_map", nlohmann::ordered_json::object()}};
    const fs::path stem = fs::path(path).parent_path() / fs::path(path).stem();
    std::vector<E> file;
    for (size_t i = 0; i < shards.size(); i++) {
        const std::string name =
            shards.size() == 1 ? path : format("%s-%05zu-of-%05zu.safetensors", stem.c_str(), i + 1, shards.size());
        SafetensorsWriter writer(name);
        for (const auto& [spec, t] : shards[i]) writer.declare(t->name, dtype, file_shape(*spec, *t));
        for (const auto& [spec, t] : shards[i]) {
            const size_t n = (size_t)t->rows * spec->cols;
            const E* data = buffer + spec->offset + (size_t)t->row * spec->cols;
            if (!same_layout(*t)) {
                file.resize(n);
                convert_layout(*spec, *t, const_cast<E*>(buffer) + spec->offset, file.data(), true);
                data = file.data();
            }
            writer.write(t->name, data, n * sizeof(E));
            index["weight_map"][t->name] = fs::path(name).filename().string();
        }
        writer.finish();
    }
    if (shards.size() > 1) write_file_atomically(path + ".index.json", index.dump(2) + "\n");
}

struct TokenizerFiles {
    std::string json;  // tokenizer.json's text; empty: none. Kept in memory: its file may be gone when a checkpoint is due
    std::string bos_token, eos_token;
    int bos_id = -1, eos_id = -1;
};

// The files that make `dir`, which exists, a model directory.
inline void write_model_files(const std::string& dir, const ModelConfig& c, const ParameterTable& table, const floatX* params,
                              const TokenizerFiles& tokenizer) {
    using json = nlohmann::ordered_json;
    const auto write_json = [&](const char* name, const json& j) { write_file_atomically(dir + "/" + name, j.dump(2) + "\n"); };
    write_json("config.json",
               to_hf_config(c, sizeof(floatX) == 2 ? "bfloat16" : "float32", tokenizer.bos_id, tokenizer.eos_id));
    json generation = {{"do_sample", true}};
    if (tokenizer.bos_id >= 0) generation["bos_token_id"] = tokenizer.bos_id;
    if (tokenizer.eos_id >= 0) generation["eos_token_id"] = generation["pad_token_id"] = tokenizer.eos_id;
    write_json("generation_config.json", generation);
    if (!tokenizer.json.empty()) {
        write_file_atomically(dir + "/tokenizer.json", tokenizer.json);
        // Without model_input_names transformers 4 hands token_type_ids to the model, which GPT-2 adds to the embeddings.
        json settings = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                         {"model_max_length", c.T},
                         {"model_input_names", {"input_ids", "attention_mask"}},
                         {"clean_up_tokenization_spaces", false}};
        if (!tokenizer.bos_token.empty()) settings["bos_token"] = tokenizer.bos_token;
        if (!tokenizer.eos_token.empty()) settings["eos_token"] = tokenizer.eos_token;
        write_json("tokenizer_config.json", settings);
    }
    write_tensors(dir + "/model.safetensors", table, params);
}

// ---- directories -----------------------------------------------------------------------------------------------------------
inline constexpr const char* manifest_name = "manifest.json";

// All files below dir but the manifest, as paths relative to it, sorted.
inline std::vector<std::string> files_below(const std::string& dir) {
    namespace fs = std::filesystem;
    std::vector<std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(dir))
        if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), dir).string());
    files.erase(std::remove(files.begin(), files.end(), manifest_name), files.end());
    std::sort(files.begin(), files.end());
    return files;
}

struct FileSum {
    size_t bytes = 0;
    uint32_t crc = 0;
};
// Read in pieces and not mapped, so that a large file does not count as memory of the run.
inline FileSum sum_file(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("cannot open %s: %s", path.c_str(), strerror(errno));
    std::vector<char> buffer(1 << 20);
    FileSum sum;
    ssize_t n;
    while ((n = read(fd, buffer.data(), buffer.size())) != 0) {
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) break;
        sum.crc = crc32c(buffer.data(), (size_t)n, sum.crc), sum.bytes += (size_t)n;
    }
    const int error = errno;
    close(fd);
    if (n < 0) fail("cannot read %s: %s", path.c_str(), strerror(error));
    return sum;
}

inline void write_manifest(const std::string& dir) {
    nlohmann::ordered_json manifest = {{"checksum", "crc32c"}, {"files", nlohmann::ordered_json::object()}};
    for (const std::string& name : files_below(dir)) {
        const FileSum sum = sum_file(dir + "/" + name);
        manifest["files"][name] = {{"bytes", sum.bytes}, {"crc32c", format("%08x", sum.crc)}};
    }
    write_file_atomically(dir + "/" + manifest_name, manifest.dump(2) + "\n");
}

// What is wrong with a directory that has a manifest, naming the file; empty if it is as it was written.
inline std::string verify_directory(const std::string& dir) {
    try {
        const nlohmann::json manifest = read_json(dir + "/" + manifest_name);
        const nlohmann::json& files = manifest.at("files");
        if (!files.is_object() || files.empty()) return dir + "/" + manifest_name + " is damaged: it lists no files";
        for (const auto& [name, entry] : files.items()) {
            const std::string path = dir + "/" + name;
            const FileSum sum = sum_file(path);
            const size_t bytes = entry.at("bytes").get<size_t>();
            if (sum.bytes != bytes) return format("%s has %zu bytes; it was written with %zu", path.c_str(), sum.bytes, bytes);
            if (format("%08x", sum.crc) != entry.at("crc32c").get<std::string>())
                return path + " is damaged: its checksum is not that of the manifest";
        }
    } catch (const nlohmann::json::exception& e) {
        return dir + "/" + manifest_name + " is damaged: " + e.what();
    } catch (const Error& e) {
        return e.what();
    }
    return "";
}

// fill(temporary directory) writes files; then a manifest is added, everything is synced, and the directory gets its name. What
// was there under that name is replaced only then. On any error nothing is left but what was there before.
inline void publish_directory(const std::string& dir, const std::function<void(const std::string&)>& fill) {
    namespace fs = std::filesystem;
    const fs::path parent = fs::path(dir).parent_path(), name = fs::path(dir).filename();
    const std::string temporary = (parent / ("." + name.string() + ".tmp")).string(),
                      old = (parent / ("." + name.string() + ".old")).string();
    std::error_code ignored;
    try {
        fs::remove_all(temporary);
        fs::remove_all(old);
        fs::create_directories(temporary);
        fill(temporary);
        write_manifest(temporary);
        for (const auto& entry : fs::recursive_directory_iterator(temporary))
            if (entry.is_directory()) sync_directory(entry.path().string());
        sync_directory(temporary);
        const bool replaces = fs::exists(dir);
        if (replaces) fs::rename(dir, old);
        try {
            fs::rename(temporary, dir);
        } catch (...) {
            if (replaces) fs::rename(old, dir, ignored);
            throw;
        }
        sync_directory(parent.string());
        fs::remove_all(old, ignored);
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
    sync_directory(std::filesystem::path(link).parent_path().string());
}
