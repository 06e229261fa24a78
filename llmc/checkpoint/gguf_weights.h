// A model in a GGUF file: its configuration, its weights as numbers, and the codes of its quantized matrices as they are.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../base/check.h"
#include "../base/file.h"
#include "../base/safetensors.h"
#include "../model/gguf.h"
#include "../model/gguf_model.h"
#include "../model/hf_config.h"
#include "../model/parameters.h"

namespace detail {

// Assembles our tensor from the file's, as the file's configuration describes.
inline std::vector<float> rows_from_gguf(const ModelConfig& c, const GgufArchitecture& a, const GgufReader& file,
                                         const TensorSpec& spec) {
    std::vector<float> ours(spec.size()), rows;
    for (const GgufPart& part : gguf_parts(c, a, spec)) {
        const GgufTensor* t = file.find(part.name);
        if (!t) fail("%s has no tensor '%s', which a %s model needs", file.path().c_str(), part.name.c_str(), a.name);
        const std::vector<int64_t> shape = part.shape(spec);
        // A matrix of one row may be a vector.
        if (t->shape != shape && !(t->elements == (size_t)spec.cols && part.rows == 1 && t->shape.back() == spec.cols))
            fail("%s: tensor '%s' has shape %s; its configuration requires %s", file.path().c_str(), part.name.c_str(),
                 shape_string(t->shape).c_str(), shape_string(shape).c_str());
        rows.resize(t->elements);
        file.read(*t, rows.data());
        if (!all_finite(rows.data(), rows.size()))
            fail("%s: tensor '%s' holds numbers that are not finite; HINT: download or copy it again", file.path().c_str(),
                 part.name.c_str());
        if (is_one_more(c, spec))
            for (float& x : rows) x -= 1;
        const size_t columns = (size_t)spec.cols, size = (size_t)part.rows * columns;
        if (part.paired_heads > 0) reorder_pairs(rows.data(), &ours[(size_t)part.row * columns], part, spec.cols, true);
        for (int e = 0; e < part.matrices() && part.paired_heads == 0; e++)
            std::copy_n(&rows[(size_t)e * size], size, &ours[(size_t)(part.row + e * part.next) * columns]);
    }
    return ours;
}

// Rejects tensors that the model does not have: the file is for another model.
inline void check_no_other_tensors(const GgufReader& file, const ModelConfig& c, const GgufArchitecture& a) {
    std::set<std::string> known;
    for (const TensorSpec& spec : ParameterTable(c).rows)
        for (const GgufPart& part : gguf_parts(c, a, spec)) known.insert(part.name);
    for (const GgufTensor& t : file.tensors())
        if (!known.count(t.name) && !(c.tied && t.name == "output.weight") && t.name != gguf_rope_factors)
            fail("%s contains the tensor '%s', which a %s model does not have", file.path().c_str(), t.name.c_str(), a.name);
}

// Architectures that cannot tie the head store the embedding twice.
inline bool same_head(const GgufReader& file) {
    const GgufTensor *head = file.find("output.weight"), *embedding = file.find("token_embd.weight");
    return head && embedding && head->type == embedding->type && head->shape == embedding->shape &&
           memcmp(head->data, embedding->data, head->elements / gguf_type(head->type).elements * gguf_type(head->type).bytes) ==
               0;
}

}  // namespace detail

class GgufModel {
public:
    explicit GgufModel(const std::string& path) : file(path), architecture(gguf_architecture(file.metadata(), path)) {
        architecture.split_experts = file.find("blk.0.ffn_gate.0.weight") != nullptr;
        c = gguf_config(file.metadata(), path, [&](const std::string& name) { return file.find(name) != nullptr; });
        if (architecture.needs_output && detail::same_head(file)) c.tied = true;
        check_config_of(file.metadata(), path, c, architecture.name + std::string("."));
        if (const GgufTensor* t = file.find(gguf_rope_factors)) {
            std::vector<float> factors(t->elements);
            file.read(*t, factors.data());
            c.rope_scaling = scaling_of_factors(c, factors, path);
        }
        c = canonical(c);
        pad_vocabulary(c, 1);
        detail::check_no_other_tensors(file, c, architecture);
        for (const TensorSpec& spec : ParameterTable(c).rows) tensors_.emplace(spec.hf[0].name, spec);
    }

    const GgufReader file;
    GgufArchitecture architecture;
    ModelConfig c;  // the vocabulary is not padded

    // The whole tensor of which spec is a part.
    const TensorSpec& whole(const TensorSpec& spec) const {
        const auto found = tensors_.find(spec.hf[0].name);
        if (found == tensors_.end()) fail("%s has no tensor '%s'", file.path().c_str(), spec.hf[0].name.c_str());
        return found->second;
    }
    // Fills ours (rows x cols of the row of the table). Padded vocabulary rows become zero. spec.hf may name the file's tensor
    // several times: copies of a dense MLP below each other, as experts.
    template <class E>
    void read(const TensorSpec& spec, E* ours) const {
        const TensorSpec& all = whole(spec);
        const std::vector<float> numbers = detail::rows_from_gguf(c, architecture, file, all);
        std::fill(ours, ours + spec.size(), E(0));
        const auto cols = (size_t)spec.cols;
        const int rows = all.rows * (int)(spec.hf.size() / all.hf.size());
        for (const RowBlock& block : spec.blocks)
            for (int r = 0; r < block.rows && block.whole_row + r < rows; r++) {
                const auto row = (size_t)((block.whole_row + r) % all.rows);
                const float* const from = &numbers[row * (size_t)all.cols + (size_t)spec.first_col];
                std::copy(from, from + cols, ours + (size_t)(block.row + r) * cols);
            }
    }

    // The formats of the blocks' matrices that can be kept as they are, by name: of the rows of each tensor of TensorSpec::hf.
    std::map<std::string, std::vector<WeightFormat>> formats() const {
        std::map<std::string, std::vector<WeightFormat>> coded;
        for (const auto& [name, spec] : tensors_) {
            if (spec.block < 0 || spec.vector() || spec.of_mixture) continue;
            std::vector<WeightFormat> formats;
            for (const GgufPart& part : gguf_parts(c, architecture, spec))
                if (const GgufTensor* t = file.find(part.name)) formats.push_back(gguf_type(t->type).format);
            const bool plain = std::count(formats.begin(), formats.end(), WeightFormat::none) > 0;
            if (!plain && formats.size() == spec.hf.size()) coded[spec.name] = formats;
        }
        return coded;
    }
    // Copies the codes of a quantized tensor's part.
    void read_codes(const TensorSpec& spec, uint8_t* to) const {
        const std::vector<GgufPart> parts = gguf_parts(c, architecture, whole(spec));
        for (const CodedRows& coded : coded_rows(spec)) {
            const WeightFormatRow& blocks = weight_format_row(coded.format);
            const auto bytes_of = [&](int numbers) { return (size_t)numbers / blocks.block * blocks.code_bytes; };
            for (int r = 0; r < coded.rows; r++) {
                const int row = spec.whole_row(coded.row + r);
                const auto part = std::find_if(parts.begin(), parts.end(),
                                               [&](const GgufPart& p) { return p.row <= row && row < p.row + p.rows; });
                CHECK(part != parts.end(), "row %d of %s", row, spec.name.c_str());
                const GgufTensor& t = *file.find(part->name);
                const int in_part = row - part->row, in_file = part->paired_heads ? paired_row(*part, in_part) : in_part;
                memcpy(to + coded.offset + (size_t)r * bytes_of(spec.cols),
                       t.data + (size_t)in_file * bytes_of(spec.whole_cols) + bytes_of(spec.first_col), bytes_of(spec.cols));
            }
        }
    }

private:
    std::map<std::string, TensorSpec> tensors_;  // by the names of their first tensor in a model directory
};

inline bool is_gguf_file(const std::string& path) {
    return std::filesystem::path(path).extension() == ".gguf" && (FilesInMemory::is_folder(path) || is_regular(path));
}
// The model in a GGUF file, which is opened once; null: the path is not a GGUF file.
inline std::shared_ptr<const GgufModel> gguf_model_in(const std::string& path) {
    static std::map<std::string, std::shared_ptr<const GgufModel>> opened;
    if (const auto found = opened.find(path); found != opened.end()) return found->second;
    if (!is_gguf_file(path)) return nullptr;
    return opened[path] = std::make_shared<const GgufModel>(path);
}
