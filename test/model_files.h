// Writes model files for tests: whole and at once, whereas the trainer writes part by part and rank by rank.
#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../llmc/checkpoint/checkpoint.h"
#include "../llmc/checkpoint/model_texts.h"

// Declare every tensor, then write each in the same order, then finish().
class SafetensorsWriter {
public:
    explicit SafetensorsWriter(const std::string& dir_or_file)
        : file_(std::filesystem::is_directory(dir_or_file) ? dir_or_file + "/model.safetensors" : dir_or_file) {
        header_["__metadata__"] = {{"format", "pt"}};  // required by transformers
    }

    void declare(const std::string& name, const std::string& dtype, const std::vector<int64_t>& shape) {
        size_t bytes = dtype_bytes(dtype);
        CHECK(bytes > 0 && order_.size() == next_, "declare('%s') after write, or unknown type", name.c_str());
        for (int64_t d : shape) bytes *= (size_t)d;
        header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {total_, total_ + bytes}}};
        order_.push_back({name, bytes});
        next_ = order_.size();
        total_ += bytes;
    }

    void write(const std::string& name, const void* data, size_t bytes) {
        if (!header_written_) write_header();
        CHECK(next_ < order_.size() && order_[next_].first == name && order_[next_].second == bytes,
              "tensor '%s' out of order or of another size", name.c_str());
        file_.write(data, bytes);
        next_++;
    }

    void finish() {
        if (!header_written_) write_header();
        CHECK(next_ == order_.size(), "%zu of %zu tensors written", next_, order_.size());
        file_.commit();
    }

private:
    void write_header() {
        file_.write(safetensors_start(header_));
        header_written_ = true;
        next_ = 0;
    }

    FileWriter file_;
    nlohmann::ordered_json header_;
    std::vector<std::pair<std::string, size_t>> order_;
    size_t next_ = 0, total_ = 0;
    bool header_written_ = false;
};

// Writes every tensor of the whole table.
template <class E>
void write_tensors(const std::string& path, const ParameterTable& table, const E* buffer, size_t shard_bytes = 5000000000) {
    const TensorFiles files(path, table, dtype_of<E>, shard_bytes);
    WrittenFiles written(std::filesystem::path(path).parent_path().string());
    files.create(written);
    const Shards whole(table, {}, false, table.size);
    write_parts(files, table, whole, whole.not_duplicated(table), written, [=](size_t i) { return buffer[i]; });
}

// Writes a model directory's files.
inline void write_model_files(const std::string& dir, const ModelConfig& c, const ParameterTable& table, const floatX* params,
                              const ModelTexts& texts) {
    WrittenFiles written(dir);
    write_model_texts(dir, c, texts, written);
    write_tensors(dir + "/model.safetensors", table, params);
}

// fill(temporary directory) writes the files.
inline void publish_directory(const std::string& dir, const std::function<void(const std::string&)>& fill) {
    const NewDirectory directory(dir);
    directory.create();
    try {
        fill(directory.path());
    } catch (...) {
        directory.remove();
        throw;
    }
    directory.publish(sums_of(sum_lines(directory.path(), files_below(directory.path()), 0, 1)));
}

// Copies a rank's part of a tensor to the whole HfTensor in its file layout, or from there.
template <class E>
void convert_layout(const TensorSpec& spec, const HfTensor& t, E* ours, E* file, bool to_file) {
    for_each_run(spec, t, [&](const TensorRun& run) {
        for (size_t k = 0; k < run.n; k++) {
            if (to_file) file[run.file + k] = ours[run.place(k)];
            else ours[run.place(k)] = file[run.file + k];
        }
    });
}
